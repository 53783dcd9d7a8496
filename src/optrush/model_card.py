"""Write the model card, README.md next to the weights: only facts of the run.

Names from the user (models, files, folders) are untrusted text on pages that show the card. So they are escaped for
Markdown and HTML; a YAML library writes the block at the top. Paths stay private: for a folder, a file or a pattern the
card has only the last name, existing or not. Only hub ids are complete.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from optrush import __version__
from optrush.config import Config, parse_yaml
from optrush.console import count
from optrush.data import readers
from optrush.data.readers import form
from optrush.errors import reason
from optrush.files import read_text
from optrush.report import run as runs
from optrush.report.page import safe_text
from optrush.technique import library

NAME = "README.md"
LICENCE = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}\Z")  # an identifier of the hub's list
_MARKS = re.compile(r"""[\\`*_{}\[\]()#+.!|~:@$=^"']""")
LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```"""


def card(
    config: Config, folder: Path, steps: int, base: Path | None, data: str = "", ends: Sequence[str | None] = ()
) -> str:
    """Return the card's text.

    Args:
        folder: the run's, with its metrics.jsonl.
        steps: number of steps before the weights were saved.
        base: the folder of the initial model; None: random weights of a shape.
        data: a description of the data.
        ends: end-of-answer tokens.

    Damaged files do not fail an export: the card reports the damage instead.
    """
    try:
        measured = _measured(runs.load_run(folder), steps)
    except Exception as error:  # their lines can hold anything
        measured = [("measured", escaped(f"unknown: metrics.jsonl is damaged: {reason(error)}"))]
    facts = [
        ("base model", _base(config)),
        ("objective", f"`{config.objective}`" + (f", the loss {escaped(config.loss.use)}" if config.loss else "")),
        ("data", escaped(_data(config)) + (f": {escaped(data)}" if data else "")),
        ("steps", f"{steps:,}"),
        ("techniques", escaped(", ".join(config.with_) or "none")),
        *measured,
        *([("end-of-answer tokens", ", ".join(escaped(end) for end in ends if end is not None))] if any(ends) else []),
        ("versions", f"optrush {__version__}, torch {torch.__version__}, transformers {library('transformers')}"),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in facts)
    parts = [
        f"---\n{yaml.safe_dump(_front(config, base), sort_keys=False)}---",
        f"# {escaped(folder.resolve().name)}",
        f"Trained by optrush {__version__}.",
        f"| | |\n|---|---|\n{table}",
        f"## Loading\n\n{LOAD}",
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: object) -> str:
    """Return untrusted text as Markdown that shows it literally: no mark-up, no HTML, no link, one line."""
    return html.escape(_MARKS.sub(r"\\\g<0>", safe_text(text)), quote=False)


def _front(config: Config, base: Path | None) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["optrush"]}
    if config.model.path is not None and _of_hub(config.model.path):
        front["base_model"] = config.model.path
    if (licence := _licence(base)) is not None:
        front["license"] = licence
    return front


def _licence(base: Path | None) -> str | None:
    if base is None or not (base / NAME).is_file():
        return None
    try:
        front_matter = re.match(r"---\r?\n(.*?)\r?\n---\s", read_text(base / NAME, "utf-8", "replace"), re.DOTALL)
        front = parse_yaml(front_matter[1], NAME)[0] if front_matter else {}
    except Exception:  # the base's README can hold anything
        return None
    licence = front.get("license")
    return licence if isinstance(licence, str) and LICENCE.match(licence) else None


def _base(config: Config) -> str:
    m = config.model
    if m.path is None:
        return f"random weights of the shape {escaped(m.shape)}, seed {config.seed}"
    return escaped(_called(m.path))


def _data(config: Config) -> str:
    if config.data.random is not None:
        return "random tokens"
    if config.data.sample is not None:
        return f"the sample {config.data.sample}"
    return ", ".join(_called(o.path) for o in config.data.origins)


def _called(path: str) -> str:
    """Return a hub id unchanged, or the last name of a path."""
    data = path.removeprefix(readers.HUB)
    return path if (data != path and readers.HUB_SET.fullmatch(data)) or _of_hub(path) else Path(path).resolve().name


def _of_hub(path: str) -> bool:
    """Return whether text looks like a hub id, and neither it nor its parent exists as a path."""
    local = os.path.exists(path) or os.path.isdir(os.path.dirname(path)) or form(Path(path)) is not None
    return readers.HUB_ID.fullmatch(path) is not None and not local


def _measured(told: runs.RunLog, steps: int) -> list[tuple[str, str]]:
    """Return names and values of what a run measured up to step `steps`: tokens, speed, memory, held-out loss."""
    lines = [m for m in told.steps if m["step"] <= steps]
    evals = [m for m in told.evals if m["step"] <= steps and m["eval_loss"] is not None]
    rows: list[tuple[str, str]] = []
    if lines:
        before = [0, *(m["step"] for m in lines)]
        tokens = sum(m["tokens_per_s"] * m["step_s"] * (m["step"] - b) for m, b in zip(lines, before))
        kind = {"cuda_allocated": "GiB allocated on the GPU", "rss": "GiB resident"}[lines[-1]["memory_kind"]]
        rows = [
            ("tokens seen", f"about {count(tokens)}"),
            ("tokens a second", f"{count(told.median('tokens_per_s') or 0.0)} (median of the logged steps)"),
            ("peak memory", f"{max(m['peak_bytes'] for m in lines) / 2**30:.2f} {kind}"),
        ]
    if evals:
        best = min(evals, key=lambda m: float(m["eval_loss"]))
        rows.append(("held-out loss", f"{evals[-1]['eval_loss']:.4f} at step {evals[-1]['step']:,}"))
        rows.append(("best held-out loss", f"{best['eval_loss']:.4f} at step {best['step']:,}"))
    return rows
