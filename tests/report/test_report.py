"""What the pages say, from records made by hand: whole, escaped, and honest about what is not there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshes import further
from optrush.cli import app
from optrush.errors import DataError, NeedsError
from optrush.report import bench as report
from optrush.report import bench as summaries
from optrush.report import page as pages
from optrush.report import run

Ladder = list[dict[str, Any]]
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def _page(folder: Path) -> str:
    return (folder / report.PAGE).read_text("utf-8")


def _sections(page: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', page)


def _sound(page: str) -> None:
    """Self-contained: a policy that forbids all else, no script, nothing that is fetched, nothing that stayed open."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    assert "<script" not in page
    assert not re.search(r"https?://", page)
    assert not re.search(r"<[^>]*\s(src|srcset|action|on[a-z]+)\s*=", page)
    assert {u for u in re.findall(r'href="([^"]*)"', page) if not u.startswith("#")} == {"data:,"}
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(re.findall(r' id="([^"]*)"', page))
    assert "None" not in page and "nan" not in page.lower().replace("nanogpt", "")
    for tag in ("svg", "table", "section", "div", "text", "g", "defs"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag


def test_a_ladder(ladder: Ladder, bench: Callable[..., Path]) -> None:
    folder = bench(ladder)
    report.write_bench(folder)
    page = _page(folder)
    _sound(page)
    assert _sections(page) == [
        "verdict", "charts", "gains", "predicted", "without", "losses", "table", "environment", "command", "reading",
    ]  # fmt: skip
    for said in (
        "From 4,835 to 69,851 tokens/s: ×14.4, peak 31.4 → 48.6 GiB; 13 rungs, 1 red, 1 failed, 2 within the noise",
        "llama-3.2-1b, random tokens · NVIDIA H200 · 2026-11-21",
        "losses leave those of `amp` by 0.21, allowed 0.02",
        "CUDA out of memory. Tried to allocate 15.66 GiB\nand a second line of it",
        "16,420 ×3.40", "45,630 ×1.01 noise", "37,020 ×0.81 slower", "46,890 ×1.27 red", "24.6 GiB ×0.83",
        "failed: CUDA out of memory",
        "Peak memory was predicted to within 2.0 % in the median and 5.4 % at worst (compile the whole model), over 16",
        "−26.7 %, peak ×1.24",
        "differ by at most 0.21 nats, at step 8, between “without fused-loss” and “native decoder”",
        "BROKEN: same maths, against “eager”; largest difference 0.013 (losses), allowed 0.02",
        "(losses), allowed 0.02; 1 − cosine of the first gradients 0.00013",
        "Intel(R) Xeon(R) Platinum, 16 threads",
        "commit 579b23d0c1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6, tree clean; digest of the package 8115d0382db2875a",
        "optrush bench benchmarks/llama1b.yaml --ladder single-gpu --out runs/ladder --repeats 3",
    ):  # fmt: skip
        assert said in page, said
    gains = page[page.index('id="gains"') : page.index('id="predicted"')]
    assert gains.count("begins here") == 2 and "×3.40" in gains, "the baseline alone, drawn and told"
    assert page.index("native decoder") < page.index("fused loss") < page.index("Tokens per second"), "trouble first"
    for name in ("speed.png", "memory.png"):
        picture = (folder / name).read_bytes()
        assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000
    assert sorted(p.name for p in folder.iterdir()) == ["memory.png", "records.jsonl", "report.html", "speed.png"]


def test_names_stay_text(ladder: Ladder, bench: Callable[..., Path]) -> None:
    for record in ladder:
        for key in ("ladder", "case", "changes", "device", "command", "peer", "date"):
            record[key] = EVIL
        record |= {"rung": EVIL + record["rung"], "since": EVIL, "error": EVIL, "red": [EVIL]}
        record |= {"environment": {EVIL: EVIL}, "source": {"commit": EVIL, "digest": EVIL, "clean": EVIL}}
        record |= {"proof": {"against": EVIL, "numerics": EVIL, "of": EVIL, "ok": EVIL}}
    folder = bench(ladder)
    report.write_bench(folder)
    report.write_many([folder, folder], folder / "many.html")
    for page in (_page(folder), (folder / "many.html").read_text()):
        assert "<script" not in page and "<img" not in page
        assert "&lt;script&gt;alert(1)" in page


def test_what_is_no_figure_is_a_dash(ladder: Ladder, bench: Callable[..., Path]) -> None:
    """Nulls, texts in place of figures, infinities, half a surrogate pair, letters that no font has."""
    for i, key in enumerate(k for k in ladder[0] if k not in ("ladder", "rung", "mode")):
        if key not in ("case", "device"):
            ladder[2 + i % 10][key] = [None, "text", [1, "x"], {"a": None}, -1, 10**400, True][i % 7]
    ladder[1] |= {
        "rung": "\ud800 \u202e 安$x^2$ \x00 \U0001f680",
        "losses": [None, "x", 3.0],
        "predicted_peak_bytes": 0,
    }
    folder = bench(ladder)
    (folder / "records.jsonl").write_text((folder / "records.jsonl").read_text().replace("16420", "Infinity"))
    report.write_bench(folder)
    page = _page(folder)
    assert "\ufffd \ufffd 安$x^2$ \ufffd" in page
    assert "no figure, and no reason given" in page
    assert "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", page.lower())


@pytest.mark.parametrize("keep", further([0, 2, 1], 2))
def test_a_ladder_of_few(ladder: Ladder, bench: Callable[..., Path], keep: int) -> None:
    """None with a figure, one, two: still a page."""
    failed = [{**r, "tokens_per_s": None, "error": "killed", "peak_bytes": None, "losses": []} for r in ladder[keep:3]]
    folder = bench(ladder[:keep] + failed)
    report.write_bench(folder)
    page = _page(folder)
    _sound(page)
    said = {0: "No rung of the ladder has a figure; 3 rungs", 1: "4,835 tokens/s, peak 31.4 GiB (eager)", 2: "×3.40"}
    assert said[keep] in page


def test_another_system_and_a_rung_measured_again(ladder: Ladder, bench: Callable[..., Path]) -> None:
    again = {**ladder[0], "tokens_per_s": 4900}
    peer = {**ladder[-5], "peer": "a plain loop 5.17", "tokens_per_s": 61228, "since": None}
    folder = bench([*ladder, again, peer])
    report.write_bench(folder)
    page = _page(folder)
    assert "larger micro-batch (a plain loop 5.17)" in page and "other system" in page
    assert "1 older record of the same rungs not shown." in page
    assert "From 4,900 to 69,851" in page and "13 rungs" in page


@pytest.mark.parametrize("title", ["bars", "curves", "a histogram"])
def test_a_chart_has_no_width_and_no_colour_of_its_own(title: str) -> None:
    """Its places are shares of the page's width, letters keep their size, colors are variables of both schemes."""
    curve = pages.Series('x="1" y="2"', [(1, 2.0), (2, None), (3, 1.0)], dots=True)
    figure = {
        "bars": lambda: pages.bars([pages.BarRow("name " * 20, "text " * 20, ((0, 1, "red"),), predicted=2.0)]),
        "curves": lambda: pages.curves([curve, curve], axis="step"),
        "a histogram": lambda: pages.histogram([0, 10, 20], [("base", [1, 2])], [(10, "T = 10")]),
    }[title]()
    drawn = pages.inline_svg(figure, title, "")
    assert re.match(r'<svg role="img" class="chart" height="\d+">', drawn)
    assert not re.search(r"#[0-9a-f]{6}\b", drawn) and set(re.findall(r"var\(--(\w+)\)", drawn)) <= pages.DARK.keys()
    loose = re.findall(r"<(?:text|use) [^>]*>", drawn)
    assert loose and all(re.search(r' x="-?[\d.]+%" y="[\d.]+"', tag) for tag in loose)
    assert all(0 <= float(share) < 100 for share in re.findall(r' x="([\d.]+)%"', drawn))
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", drawn))) > 11


def test_long_names_and_texts_of_bars_are_wrapped() -> None:
    name, text = "a rung with a name that is longer than a phone is wide", "failed: a reason " * 4
    drawn = pages.bars_svg("t", [pages.BarRow(name, text.strip()), pages.BarRow("b", "1")])
    lines = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    assert "…" not in "".join(lines) and all(len(line) < 42 for line in lines)
    assert set(name.split()) | set(text.split()) <= set(" ".join(lines).split())


@pytest.mark.parametrize("scheme", ["LIGHT", "DARK"])
def test_words_stand_out_from_their_ground(scheme: str) -> None:
    """Contrast of 4.5 and more, WCAG's AA, for the colors that text has."""

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    colors = getattr(pages, scheme)
    style = (Path(pages.__file__).parent / "page.html.j2").read_text("utf-8")
    words = set(re.findall(r"[{;] *color: var\(--(\w+)\)", style))
    assert {"ink", "soft", "red"} <= words
    for word in words:
        for ground in ("page", "card"):
            high, low = sorted((light(colors[word]), light(colors[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (word, ground)


def test_equal_losses_are_said_to_be(ladder: Ladder) -> None:
    shown, _ = summaries.read_rungs([{**r, "losses": [3.0, 2.0]} for r in ladder[:3]])
    assert summaries.loss_summary(shown) == "All curves are equal to the last digit over 2 steps."
    shown, _ = summaries.read_rungs([{**r, "losses": [3.0, None]} for r in ladder[:1]])
    assert summaries.loss_summary(shown) == "There are no two curves to compare. 1 loss was not finite."


@pytest.mark.parametrize(
    ("value", "shown"), [(69851.4, "69,851"), (99.96, "100.0"), (3.14159, "3.14"), (None, "–"), (1e6, "1,000,000")]
)
def test_speeds(value: float | None, shown: str) -> None:
    assert pages.speed(value) == shown


def test_charts_of_odd_figures() -> None:
    """One value, none, equal ones, huge and tiny ones, and names with a meaning to matplotlib."""
    names = ["_hidden", "$x^2$", "\u5b89" * 60, EVIL, "plain"]
    for values in ([], [0.0], [1.0] * 5, [1e-300, 1e300], [-5.0, None, 7.0]):
        rows = [pages.BarRow(n, EVIL, ((0, v, "red"),) if v is not None else (), failed=v is None)
                for n, v in zip(names, values)]  # fmt: skip
        series = [pages.Series(n, list(enumerate([v, *values, None]))) for n, v in zip(names, values)]
        marks = [(3.0, "$a$"), (99.0, "outside")]
        for figure in (pages.bars(rows, unit=" %", band=10), pages.curves(series, zero=True),
                       pages.histogram([1, 2, 5, 9], [("base", [0, 3, 0])], marks)):  # fmt: skip
            drawn = pages.inline_svg(figure, EVIL, EVIL)
            assert "<script" not in drawn and "<img" not in drawn and "outside" not in drawn
            assert drawn == pages.inline_svg(figure, EVIL, EVIL), "the same bytes"
            assert pages.png(figure).startswith(b"\x89PNG")


def test_colors_follow_the_page() -> None:
    """No color of a chart is fixed, but those of both modes are declared."""
    figure = pages.bars([pages.BarRow("a", "1", ((0, 1, "faster"),)), pages.BarRow("b", "no", failed=True)])
    drawn = pages.inline_svg(figure, "t", "d")
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) >= {"faster", "ink", "red", "grid"}
    assert not set(re.findall(r"#[0-9a-f]{6}\b", drawn)) & set(pages.LIGHT.values())
    assert pages.LIGHT.keys() == pages.DARK.keys() and len(set(pages.LIGHT.values())) == len(pages.LIGHT)


# --- a training run


def test_a_run(trained: Path, predicted: SimpleNamespace) -> None:
    report.write_run(trained)
    page = _page(trained)
    _sound(page)
    assert _sections(page) == ["verdict", "curves", "predicted", "config"]
    for said in (
        "400 steps; the last logged loss is", "the held-out loss 2.4140 (at first 8.3100)",
        "Data is the bottleneck: in the median 12.0 % of a step",
        "2 updates skipped", "1 logged loss was not finite: a gap in the curve",
        "The last line of metrics.jsonl is incomplete",
        "Step 200: the damaged checkpoint step-000200 was passed over: a hash differs",
        "Step 100: went on with another optim.lr: 0.002 -&gt; 0.001",
        "Step 300: the save failed, and training went on: no space left on device",
        "Step 300: workers left: 3", "Step 300: beside steps: 12 % of the time",
        "T x V in float32, &lt;b&gt;twice&lt;/b&gt;", "−9.1 %", "objective: sft",
    ):  # fmt: skip
        assert said in page, said
    assert "own figure:" not in page and "eval own:" not in page, "an objective's metrics are no events"
    for heading in ("Loss", "Speed", "Peak memory", "Learning rate", "Gradient norm", "Waiting for data"):
        assert f"<h3>{heading}</h3>" in page


@pytest.mark.parametrize(
    ("device", "ranks", "said", "left_out"),
    [
        ("NVIDIA H200", 2, ("2 × NVIDIA H200", "about 2.67 USD", "8.90 USD an hour"), ()),
        ("NVIDIA H200", None, ("<dd>NVIDIA H200</dd>", "about 1.33 USD", "For NVIDIA H200 with"), ("1 × NVIDIA",)),
        ("cpu", 1, ("<dd>cpu</dd>", "18 min 0 s: start 40 s"), ("USD", "1 × cpu")),
        ("<b>", "x", ("<dd>&lt;b&gt;</dd>",), ("USD",)),
        (None, None, ("<dt>model</dt><dd>tiny</dd>", "<dt>tokens</dt><dd>about 1,6"), ("<dt>device", "USD")),
    ],
)
def test_a_run_says_where_it_ran_and_what_it_cost(
    trained: Path, device: str | None, ranks: object, said: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    file = trained / run.METRICS
    lines = file.read_text().splitlines()[:-1]
    end = {"step": 400, "start_s": 40.0, "steps_s": 1000.0, "end_s": 40.0, "device": device, "ranks": ranks}
    lines += [json.dumps({**end, "ended": "2026-11-28 22:53"})] if device else []
    file.write_text("\n".join(lines) + "\n")
    report.write_run(trained)
    page = _page(trained)
    _sound(page)
    assert not [text for text in said if text not in page] and not [text for text in left_out if text in page]
    assert ("2026-11-28 22:53" in page) == bool(device)
    assert "<details><summary>Every value, as the run used it" in page, "the configuration is folded"


@pytest.mark.parametrize(
    "text", ["", '{"step": 1, "lo', '{"step": 10, "loss": null}\n', '{"step": 0, "eval_loss": null}\n\n', None]
)
def test_a_run_with_little_to_show(trained: Path, predicted: SimpleNamespace, text: str | None) -> None:
    if text is None:
        (trained / "metrics.jsonl").unlink()
    else:
        (trained / "metrics.jsonl").write_text(text)
    report.write_run(trained)
    _sound(_page(trained))


def test_a_run_of_sampled_answers(trained: Path, predicted: SimpleNamespace) -> None:
    """Curves of rewards, the last answers, escaped; its figures are no events, and sampling no lack of data."""
    text = (trained / "run.yaml").read_text()
    (trained / "run.yaml").write_text(text.replace("objective: sft", "objective: grpo\ngrpo: {prompts: 2}"))
    lines = [
        {"step": n, "loss": 0.1, "lr": 1e-6, "grad_norm": 1.0, "tokens_per_s": 9.0, "mfu": None, "step_s": 2.0,
         "peak_bytes": 1, "data_wait_s": 1.5, "skipped": 0, "reward": n / 10, "group_spread": 0.1, "groups_flat": 0.5,
         "answer_tokens": 9.0, "truncated": 0.25, "entropy": 1.0, "logp_difference_max": 1e-6} for n in (1, 2, 3)
    ]  # fmt: skip
    (trained / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [{"text": EVIL, "reward": r, "tokens": 4, "ended": r is not None} for r in (1.0, 0.25, None)]
    groups = [{"step": n, "prompt": f"{EVIL} {n}", "reference": "7", "answers": answers} for n in (1, 2, 3, 4)]
    rows = [*map(json.dumps, groups), '{"step": 5, "prompt": "torn', "[]"]
    (trained / "answers.jsonl").write_text("\n".join(rows))
    report.write_run(trained)
    page = _page(trained)
    _sound(page)
    assert "sampled" in _sections(page) and "Step 4, the right answer: 7" in page and "Step 1," not in page
    assert "0.250" in page and "cut off" in page and pages.DASH in page
    assert "Data is the bottleneck" not in page and "group_spread" not in page and "<h3>Reward</h3>" in page


def test_a_run_of_experts(trained: Path, predicted: SimpleNamespace) -> None:
    """Two more curves, and no line of it among the events."""
    file = trained / run.METRICS
    lines = [json.loads(line) for line in file.read_text().splitlines()[:-1]]  # the last one is cut off
    for line in lines:
        kind = "eval_" if "eval_loss" in line else ""
        line |= {f"{kind}expert_busiest": 0.25, f"{kind}expert_entropy": 0.875}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run.load_run(trained)
    assert not [note for note in found.notes if "expert" in note]
    drawn = {heading: chart for heading, _, chart in run._curves(found)}
    assert "25" in drawn["Busiest expert"] and "0.875" in drawn["Entropy of experts"]


def test_a_run_that_cannot_be_predicted(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise NeedsError("a prediction", "no <shape> is known", "name one")

    monkeypatch.setattr("optrush.planner.search.predict", refuses)
    report.write_run(trained)
    assert "No prediction: no &lt;shape&gt; is known." in _page(trained)


def test_a_peak_of_another_kind_is_not_compared(trained: Path, predicted: SimpleNamespace) -> None:
    predicted.memory_kind = "cuda_allocated"
    report.write_run(trained)
    assert "of another kind (rss) and is not compared" in _page(trained)


def test_a_damaged_line_before_the_last(trained: Path) -> None:
    with (trained / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 420, "loss": 2.0}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:50"):
        run.load_run(trained)
    with pytest.raises(DataError):
        report.write_run(trained)
    assert not (trained / report.PAGE).exists()


# --- the verb


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """`optrush report ARGUMENTS` in this process: exit code, output, errors."""

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optrush", "report", *map(str, arguments)])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as leaving:
            app.main()
        out, err = capsys.readouterr()
        return int(str(leaving.value.code or 0)), out, err

    return called


def test_one_folder(call: Callable[..., Any], ladder: Ladder, bench: Callable[..., Path]) -> None:
    folder = bench(ladder)
    assert call(folder) == (0, f"{folder / 'report.html'}\n", "")
    before = _page(folder)
    assert call("climb") == (0, "climb/report.html\n", "")
    assert _page(folder) == before, "the same records, the same page"


def test_several_folders(
    call: Callable[..., Any], ladder: Ladder, bench: Callable[..., Path], trained: Path, tmp_path: Path
) -> None:
    first = bench(ladder, "first-machine")
    changed = {"device": "NVIDIA L4", "environment": {"driver": "570"}}
    second = bench([{**r, **changed} for r in ladder[:5]], "second-machine")
    assert call(first, second, trained) == (0, "report.html\n", "")
    page = (tmp_path / "report.html").read_text()
    _sound(page)
    assert _sections(page) == ["machines", "environment", "runs"]
    for said in ("Ladder single-gpu", "A: NVIDIA H200, B: NVIDIA L4", "not measured", "570", "2.4140", "first-machine"):
        assert said in page, said
    assert call(first, second, "--out", "both.html")[:2] == (0, "both.html\n")
    assert not (first / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["no-such"], "no such folder"),
        (["empty"], "neither records.jsonl nor run.yaml"),
        (["climb", "empty"], "neither records.jsonl nor run.yaml"),
        (["climb", "--out", "x.html"], "one folder; its report is in the folder"),
        (["climb", "first", "--out", "climb/records.jsonl"], "no name of a page"),
        (["climb", "first", "--out", "no-such/x.html"], "no folder no-such"),
        (["torn"], "not a record"),
        (["climb", "torn"], "not a record"),
        (["bytes"], "not UTF-8"),
        (["nothing"], "the file is empty"),
        (["badrun"], "no such key"),
    ],
)
def test_what_is_refused(
    call: Callable[..., Any], ladder: Ladder, bench: Callable[..., Path], trained: Path, tmp_path: Path,
    arguments: list[str], found: str,
) -> None:  # fmt: skip
    bench(ladder)
    for name, content in (
        ("torn", (json.dumps(ladder[0]) + '\n{"ladder": "x"').encode()),
        ("bytes", b'{"ladder"\n\xff\xfe'),
        ("nothing", b""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_bytes(content)
    (tmp_path / "empty").mkdir()
    (tmp_path / "badrun").mkdir()
    (tmp_path / "badrun" / "run.yaml").write_text((trained / "run.yaml").read_text() + "colour: red\n")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert found in err and [line.split(":")[0] for line in err.splitlines()] == ["asked", "found", "do"]
    if arguments[-1] in ("torn", "bytes"):
        assert "records.jsonl:2" in err
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"
