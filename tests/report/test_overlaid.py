"""Several runs on one page: their losses in one chart, the settings that differ, how long each took."""

from __future__ import annotations

import json
from pathlib import Path

from optrush.config import dump_config, parse_config
from optrush.report.bench import write_many
from optrush.report.run import load_run, overlaid, summary

TEXT = "model: tiny\nobjective: sft\ndata: {sample: recipes}\noutput: out\n"


def run(folder: Path, lr: str, more: str = "") -> Path:
    folder.mkdir()
    (folder / "run.yaml").write_text(dump_config(parse_config(f"{TEXT}optim: {{lr: {lr}}}\n{more}", "run.yaml")))
    lines = [{"step": n, "loss": 3.0 - n / 100, "step_s": 2.0, "tokens_per_s": 10.0} for n in (10, 40, 60)]
    lines.append({"step": 60, "eval_loss": 2.0, "eval_target_tokens": 3})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_two_runs_in_one_chart(tmp_path: Path) -> None:
    folders = [run(tmp_path / "one", "1e-4"), run(tmp_path / "two", "2e-4", "with: {packing: {}}\n")]
    logs = [load_run(folder) for folder in folders]
    found = overlaid(logs)
    assert [heading for heading, _, _ in found["overlaid"]] == ["Training loss", "Held-out loss"]
    differing = dict(found["differing"])
    assert differing == {"optim.lr": ["0.0001", "0.0002"], "with": ["on", "–"], "with.packing": ["–", "on"]}
    assert summary(logs[0])["time"] == "2 min 0 s", "60 steps of 2 s"
    page = tmp_path / "page.html"
    write_many(folders, page)
    text = page.read_text("utf-8")
    assert text.count('class="chart"') == 2 and "optim.lr" in text and "2 min 0 s" in text
    assert overlaid(logs[:1]) == {"overlaid": [], "differing": []}
