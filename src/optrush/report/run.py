"""Read a training run's folder, and lay out its page: curves, prediction against measurement, problems."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from optrush.config import JUDGED, Config, dump_config, parse_config
from optrush.console import duration
from optrush.errors import ConfigError, DataError, UserError
from optrush.files import parse_json, read_file, read_text
from optrush.hardware import GIB, NAMED, PRICES_USD_H, first_device
from optrush.models.shapes import LOAD_FIGURES
from optrush.objectives import ALL_FIGURES, unit
from optrush.report import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from optrush.planner.sets import Prediction

RUN, METRICS, ANSWERS, SAMPLES = "run.yaml", "metrics.jsonl", "answers.jsonl", "samples.json"
MARKED = ("learnt", "special")  # flags of a sample's pieces
GROUPS = 3  # groups of sampled answers on a page
WAITS = 0.05  # share of a step spent waiting for data above which the page warns
_FIGURES = {
    "step", "loss", "lr", "grad_norm", "tokens", "target_tokens", "step_s", "tokens_per_s", "mfu", "peak_bytes",
    "memory_kind", "data_wait_s", "skipped", "updates_left_out", "eval_loss", "eval_target_tokens",
    "start_s", "steps_s", "end_s", "resumed_at", "device", "ranks", "ended",
    *(f"{kind}{name}" for kind in ("", "eval_") for name in (*ALL_FIGURES, *LOAD_FIGURES)),
}  # fmt: skip


@dataclass(frozen=True)
class RunLog:
    """A run's configuration and metrics.

    Attributes:
        text: the configuration as YAML.
        torn: the last line of the metrics is incomplete, after a kill.
        times: the line with the seconds of start, steps and end; empty: the run is not finished.
    """

    name: str
    config: Config
    text: str
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    notes: list[str]
    torn: bool
    folder: Path = Path()
    times: Mapping[str, Any] = field(default_factory=dict)

    def points(self, key: str, scale: float = 1.0) -> list[tuple[float, float | None]]:
        """Return a figure over the logged steps; None if it was not finite."""
        return [(m["step"], None if (y := page.number(m.get(key))) is None else y * scale) for m in self.steps]

    def median(self, key: str) -> float | None:
        values = [y for m in self.steps if (y := page.number(m.get(key))) is not None]
        return statistics.median(values) if values else None


def load_run(folder: Path) -> RunLog:
    """Read the configuration and the metrics of a run.

    Raises:
        UserError: run.yaml cannot be read, or a line of metrics.jsonl before the last is not a JSON object.
    """
    path = folder / RUN
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}", f"cannot be read: {error}", "name a run's folder") from None
    config = parse_config(text, str(path), own=True)
    lines, torn = _lines(folder / METRICS)
    return RunLog(
        name=page.safe_text(folder.resolve().name),
        config=config,
        text=page.safe_text(dump_config(config), lines=True),
        steps=[m for m in lines if "loss" in m],
        evals=[m for m in lines if "eval_loss" in m],
        notes=[note for m in lines for note in _notes(m)],
        torn=torn,
        folder=folder,
        times=next((m for m in reversed(lines) if "start_s" in m), {}),
    )


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return all lines with a step, and whether the last line is torn."""
    if not path.exists():
        return [], False
    logged = []
    lines = read_file(path).split(b"\n")  # after the last newline comes a torn line, or nothing
    for i, line in enumerate(lines):
        try:
            value = parse_json(line) if line.strip() else None
        except ValueError:
            value = line
        if isinstance(value, dict) and page.number(value.get("step")) is not None:
            logged.append(value)
        elif value is not None and i == len(lines) - 1:
            return logged, True
        elif value is not None:
            raise DataError(f"{path}:{i + 1}", "no line of metrics", "restore the file, or take that line out")
    return logged, False


def _notes(line: Mapping[str, Any]) -> list[str]:
    """Return the events of a line: skipped checkpoints, changes on resuming, failed saves."""
    at, notes = f"Step {page.number(line['step']):,.0f}: ", []
    figures = "loss" in line or "eval_loss" in line
    for key in [k for k in line if k not in _FIGURES]:
        value = line[key]
        if figures and page.number(value) is not None:  # the objective's own metrics
            continue
        if key == "passed_over" and isinstance(value, list):
            pairs = [(v.get("checkpoint"), v.get("reason")) for v in value if isinstance(v, Mapping)]
            notes += [
                f"{at}the damaged checkpoint {page.safe_text(c)} was passed over: {page.safe_text(reason)}"
                for c, reason in pairs
            ]
        elif key == "changed" and isinstance(value, Mapping):
            notes += [f"{at}went on with another {page.safe_text(k)}: {page.safe_text(v)}" for k, v in value.items()]
        elif key == "save_failed":
            notes.append(f"{at}the save failed, and training went on: {page.safe_text(value)}")
        else:
            notes.append(f"{at}{page.safe_text(key).replace('_', ' ')}: {page.safe_text(value)}")
    return notes


# --- against the plan

OFF = 0.15  # deviation from the planned speed that a run reports
WARM, FEWEST = 1, 4  # logged lines that are skipped, and lines required after them


def off_plan(run: RunLog, ranks: int | None = None) -> str:
    """Return the deviation of a run's median speed from its plan, and the part of the step; empty: no deviation.

    CPU rates computed from its cores rank settings but do not predict speeds: they are not compared.
    """
    from optrush.planner import search

    lines = run.steps[WARM:]
    if len(lines) < FEWEST or run.config.grpo is not None:  # the plan covers only its updates
        return ""
    try:
        guess: Prediction = search.predict(run.config, ranks=ranks)
    except UserError:
        return ""
    if guess.tokens_per_s is None or guess.step_s is None or (guess.memory_kind, guess.basis) == ("rss", "datasheet"):
        return ""
    speed_, step_s, wait_s = (
        statistics.median(float(m[key]) for m in lines) for key in ("tokens_per_s", "step_s", "data_wait_s")
    )
    change = speed_ / guess.tokens_per_s - 1
    if abs(change) < OFF:
        return ""
    text = f"{page.speed(speed_)} tokens/s in the median, planned {page.speed(guess.tokens_per_s)} ({change:+.0%})"
    if change > 0:
        return f"{text}: the plan's rates are low here; optrush calibrate measures them"
    # Time of steps over twice the median: recompilation, or another process on the device.
    paused_s = sum(s - step_s for m in lines if (s := float(m["step_s"])) > 2 * step_s) / len(lines)
    own_s = step_s - wait_s
    parts = {
        f"waiting for data, {wait_s:.3g} s of {step_s:.3g} s a step (--with loader, optrush data pack)": wait_s,
        f"single slow steps, {paused_s:.3g} s a step in the mean (compiling again, or another process)": paused_s,
        f"the step itself, {own_s:.3g} s, planned {guess.step_s:.3g} s (optrush tune, optrush calibrate)": (
            own_s - guess.step_s
        ),
    }
    return f"{text}: most of it {max(parts, key=lambda part: parts[part])}"


BESIDE = 0.1  # share of a run's time outside its steps that it reports
MANY, LONG_S = 10, 20.0  # fewest steps and seconds of a run for that report


def beside_steps(config: Config, beside: Mapping[str, tuple[float, int]], steps: int, seconds: float) -> dict[str, str]:
    """Return activities outside the steps that took over a tenth of a run, with their shares and keys to change.

    Args:
        beside: seconds and counts of "saving", "evaluation" and "data", in the first `steps` and `seconds` of the run.
    """
    if steps < MANY and seconds < LONG_S:
        return {}
    train, loader, evals = config.train, config.with_.get("loader"), beside["evaluation"][1]
    often = {what: "every step" if n >= steps else f"{n} times in {steps:,} steps" for what, (_, n) in beside.items()}
    smaller = "" if train.save == "async" else ", or set train.save: async"
    saved = f"train.save_every is {train.save_every}; raise it (100: every 100 steps; 0.1: ten times a run){smaller}"
    saved = "the best checkpoint; train.best: false does without it" if train.save_every is None else saved
    fewer = "hold out fewer rows (data.eval)"
    held_out = f"train.eval_every is {train.eval_cadence(steps)}; raise it, or {fewer}" if evals > 1 else fewer
    workers = "--with loader" if loader is None else f"raise with.loader.workers ({loader.get('workers', 2)})"
    tokenised = f"{workers}, or tokenise before the run (optrush data pack)"
    # A single save is the final one, which no key changes; in a short run a single evaluation or batch means nothing.
    reasons = (
        ("saving", f"saving {often['saving']}", saved, beside["saving"][1] > 1),
        ("evaluation", f"evaluation {often['evaluation']}", held_out, evals > 1 or seconds > LONG_S),
        ("data", "waiting for data", tokenised, seconds > LONG_S and config.grpo is None),  # for grpo it is sampling
    )
    return {
        what: f"{name} took {beside[what][0] / seconds:.0%} of {duration(seconds)}: {keys}"
        for what, name, keys, changeable in reasons
        if changeable and beside[what][0] > BESIDE * seconds
    }


# --- the page


def page_content(run: RunLog, ranks: int | None = None) -> dict[str, Any]:
    """Return all values for the template."""
    return {
        "title": run.name, **_facts(run), "verdict": _verdict(run), "notes": _trouble(run) + run.notes,
        "curves": _curves(run), **_against(run, ranks), "config": run.text, "sampled": _sampled(run.folder),
        "seen": _seen(run.folder), "safe": page.readable, "too_long": run.config.data.too_long,
    }  # fmt: skip


def _facts(run: RunLog) -> dict[str, Any]:
    """Return the model, machine, date, seconds and price of a run; None: unknown."""
    tokens, before = 0.0, 0
    for m in run.steps:
        rate, step_s = (page.number(m.get(key)) or 0.0 for key in ("tokens_per_s", "step_s"))
        tokens += rate * step_s * (m["step"] - before)
        before = m["step"]
    device, ranks = page.safe_text(run.times.get("device")), int(page.positive(run.times.get("ranks")) or 1)
    parts = [page.number(run.times.get(key)) or 0.0 for key in ("start_s", "steps_s", "end_s")]
    usd = next((ranks * usd for name, usd in PRICES_USD_H.items() if NAMED[name].name == device), None)
    where = {
        "device": f"{ranks:,} × {device}" if ranks > 1 else device,
        "ended": page.safe_text(run.times.get("ended")),
    }
    return {**_kind(run), "tokens": tokens, "parts": parts, "usd_h": usd, **where}


def _seen(folder: Path) -> list[dict[str, Any]]:
    """Return the run's samples with images; empty for a run without images, or a damaged file."""

    def piece(p: dict[str, Any]) -> dict[str, Any]:
        image = str(p.get("image", ""))
        shown = {"text": str(p["text"]), "ids": list(map(int, p["ids"])), **{key: bool(p[key]) for key in MARKED}}
        return shown | {"image": image if image.startswith("data:image/jpeg;base64,") else ""}

    def document(d: dict[str, Any]) -> dict[str, Any]:
        counts = {key: int(d[key]) for key in ("tokens", "targets", "left_out")}
        return {"name": str(d["name"]), **counts, **{key: list(map(piece, d[key])) for key in ("pieces", "end")}}

    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        held = parse_json(read_text(folder / SAMPLES))["samples"]
        return [
            {"sample": int(s["sample"]), "where": str(s["where"]), "longer": bool(s["longer"]),
             "documents": list(map(document, s["documents"]))} for s in held
        ]  # fmt: skip
    return []


def _sampled(folder: Path) -> list[dict[str, Any]]:
    """Return the last groups of sampled answers, newest first, as safe text; empty for a run without sampling."""
    file = folder / ANSWERS
    if not file.is_file():
        return []
    groups = []
    for line in read_text(file, errors="replace").splitlines()[-GROUPS:]:
        with suppress(ValueError, TypeError, KeyError):  # a line torn by a kill
            group = parse_json(line)
            rows = [
                (page.plain_number(page.number(a["reward"]), 3), a["tokens"], "" if a["ended"] else "cut off",
                 page.safe_text(a["text"], lines=True)) for a in group["answers"]
            ]  # fmt: skip
            texts = {key: page.safe_text(group[key], lines=True) for key in ("prompt", "reference")}
            groups.append({"step": f"{group['step']:,}", **texts, "rows": rows})
    return groups[::-1]


def summary(run: RunLog) -> dict[str, str]:
    """Return a run as one row of a page on several folders."""
    return {
        "folder": run.name,
        **_kind(run),
        "steps": f"{run.steps[-1]['step']:,.0f}" if run.steps else page.DASH,
        "loss": _loss(run.steps, "loss"),
        "held_out": _loss(run.evals, "eval_loss"),
        "speed": page.speed(run.median("tokens_per_s")),
        "time": page.DASH if (seconds := _seconds(run)) is None else duration(seconds),
        "peak": page.gib(_peak(run)),
    }


def overlaid(runs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the charts of several runs' losses, and the settings that differ between the runs."""
    if len(runs) < 2:
        return {"overlaid": [], "differing": []}
    charts = []
    for heading, words, series in (
        ("Training loss", "of each run", [page.Series(r.name, r.points("loss")) for r in runs]),
        ("Held-out loss", "of each run", [page.Series(r.name, _held_out(r), dots=True) for r in runs if r.evals]),
    ):
        if series:
            texts = "; ".join(f"{s.name}: {_ends(s.points)}" for s in series)
            charts.append(
                (heading, words, page.inline_svg(page.curves(series, axis="step", height=260), heading, texts))
            )
    settings = [dict(_settings(r.config.model_dump(mode="json", by_alias=True))) for r in runs]
    keys = dict.fromkeys(key for row in settings for key in row)
    rows = [(key, [row.get(key, page.DASH) for row in settings]) for key in keys]
    return {"overlaid": charts, "differing": [(key, values) for key, values in rows if len(set(values)) > 1]}


def _held_out(run: RunLog) -> list[tuple[float, float | None]]:
    return [(m["step"], page.number(m["eval_loss"])) for m in run.evals]


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of a configuration under its dotted key, as safe text."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _settings(part, f"{key}.{name}" if key else name)
    else:
        yield page.safe_text(key), "on" if value == {} else page.safe_text(value)


def _seconds(run: RunLog) -> float | None:
    """Return the seconds of the logged steps, without evaluations and saves."""
    total, before = 0.0, 0.0
    for m in run.steps:
        total += (page.number(m.get("step_s")) or 0.0) * max(0.0, m["step"] - before)
        before = m["step"]
    return total or None


def _kind(run: RunLog) -> dict[str, str]:
    return {
        "objective": run.config.objective,
        "model": page.safe_text(run.config.model.shape or run.config.model.path),
        "techniques": ", ".join(page.safe_text(n) for n in run.config.with_) or "none",
    }


def _loss(lines: list[dict[str, Any]], key: str) -> str:
    if not lines:
        return page.DASH
    value = page.number(lines[-1][key])
    return "not finite" if value is None else f"{value:.4f}"


def _peak(run: RunLog) -> float | None:
    return max((p for m in run.steps if (p := page.positive(m.get("peak_bytes"))) is not None), default=None)


def _verdict(run: RunLog) -> str:
    if not run.steps:
        return "No step has been logged yet."
    last = run.steps[-1]
    text = f"{page.amount(int(last['step']), 'step')}; the last logged loss is {_loss(run.steps, 'loss')}"
    if run.evals:
        first, end = (_loss(run.evals[:1], "eval_loss"), _loss(run.evals, "eval_loss"))
        text += f", the held-out loss {end}" + (f" (at first {first})" if len(run.evals) > 1 else "")
    text += f". Median {page.speed(run.median('tokens_per_s'))} tokens/s"
    mfu, peak = run.median("mfu"), _peak(run)
    text += "" if (seconds := _seconds(run)) is None else f", {duration(seconds)} of steps"
    text += "" if mfu is None else f", MFU {page.percent(100 * mfu)}"
    return text + ("." if peak is None else f", peak {page.gib(peak)} GiB.")


def _waits(run: RunLog) -> list[tuple[float, float | None]]:
    """Return the share of each logged step spent waiting for data, in percent."""
    shares: list[tuple[float, float | None]] = []
    for m in run.steps:
        waited, took = page.number(m.get("data_wait_s")), page.positive(m.get("step_s"))
        shares.append((m["step"], None if waited is None or took is None else 100 * waited / took))
    return shares


def _trouble(run: RunLog) -> list[str]:
    """Return notes on waits for data, skipped updates, losses that are not finite, and a torn last line."""
    notes = []
    shares = [y for _, y in _waits(run) if y is not None]
    share = statistics.median(shares) if shares else 0.0
    if share > 100 * WAITS and run.config.grpo is None:  # for grpo it is the time of sampling
        notes.append(
            f"Data is the bottleneck: in the median {page.percent(share)} of a step went by waiting for it. Worker "
            "processes (--with loader), tokens cached beforehand (optrush data pack) or a faster disk will do more "
            "than any kernel."
        )
    skipped = page.number(run.steps[-1].get("skipped")) if run.steps else None
    if skipped:
        notes.append(f"{page.amount(int(skipped), 'update')} skipped, because the gradient was not finite.")
    lost = sum(page.number(m["loss"]) is None for m in run.steps)
    if lost:
        notes.append(f"{page.amount(lost, 'logged loss was', 'logged losses were')} not finite: a gap in the curve.")
    if run.torn:
        notes.append(f"The last line of {METRICS} is incomplete, because the process was killed; it is not shown.")
    return notes


def _curves(run: RunLog) -> list[tuple[str, str, Markup]]:
    """Return heading, unit and chart of each metric."""
    shares = [("MFU", "percent of the device's peak", run.points("mfu", 100))] if run.median("mfu") is not None else []
    if run.config.paired:
        over = (
            ("Answers", "beyond the divergence, in the judgement's direction")
            if run.config.objective == JUDGED
            else ("Pairs", "of the chosen over the rejected")
        )
        shares += [(f"{over[0]} right", "percent per step, by their rewards", run.points("reward_accuracy", 100))]
        shares += [("Reward margin", over[1], run.points("reward_margin"))]
    if run.config.objective == "grpo":
        shares += [
            ("Reward", "mean of a step's answers", run.points("reward")),
            ("Length of an answer", "tokens", run.points("answer_tokens")),
            ("Cut off", "percent of a step's answers", run.points("truncated", 100)),
            ("Groups of equal rewards", "percent; they give no gradient", run.points("groups_flat", 100)),
            ("Entropy", "nats a sampled token", run.points("entropy")),
            ("Sampled and trained", "largest difference of log-probabilities", run.points("logp_difference_max")),
        ]
    busiest, entropy = LOAD_FIGURES
    if run.median(busiest) is not None:
        shares += [("Busiest expert", "percent of a layer's tokens, mean over the layers", run.points(busiest, 100))]
        shares += [("Entropy of experts", "1: all have as many tokens", run.points(entropy))]
    loss = page.inline_svg(loss_curves(run, height=260), "Loss", _ends(run.points("loss")))
    drawn = [("Loss", unit(run.config), loss)]
    for heading, words, points in (
        ("Speed", "tokens/s of the whole job", run.points("tokens_per_s")),
        *shares,
        ("Peak memory", "GiB", run.points("peak_bytes", 1 / GIB)),
        ("Learning rate", "as applied", run.points("lr")),
        ("Gradient norm", "before clipping", run.points("grad_norm")),
        ("Waiting for data" if run.config.grpo is None else "Sampling", "percent of a step", _waits(run)),
    ):
        figure = page.curves([page.Series(heading, points)], zero=heading != "Gradient norm", height=150)
        drawn.append((heading, words, page.inline_svg(figure, heading, _ends(points))))
    return drawn


def loss_curves(run: RunLog, **style: Any) -> Figure:
    """Draw training and held-out loss over the steps."""
    evals = _held_out(run)
    series = [page.Series("training loss", run.points("loss"))]
    series += [page.Series("held-out loss", evals, dots=True)] if evals else []
    return page.curves(series, axis="step", **style)


def _ends(points: page.Points) -> str:
    """Return the first and the last figure of a curve in words."""
    finite = [(x, y) for x, y in points if y is not None]
    if not finite:
        return "no figure"
    (first, begin), (last, end) = finite[0], finite[-1]
    return f"from {page.short(begin)} at step {first:,.0f} to {page.short(end)} at step {last:,.0f}"


def _size(count: int) -> str:
    """Format bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{page.gib(count)} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


def _times(run: RunLog, guess: Prediction) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield the parts of a finished run with their predicted and measured seconds."""
    from optrush.data.length_estimate import estimate_tokens
    from optrush.decide import changed
    from optrush.planner.run_time import REPORT_S, run_time

    if not run.times:
        return
    config = changed(run.config, {"train.steps": int(run.times["step"]), "train.epochs": 1.0})
    time = run_time(config, guess, estimate_tokens(config))
    if time.end_s is None:
        return
    yield "start, s", time.start_s, page.number(run.times["start_s"])
    if "resumed_at" not in run.times:  # else part of the time passed in another process
        yield "steps, s", time.steps_s, page.number(run.times["steps_s"])
        yield "saves, evaluations, model, s", time.end_s - REPORT_S, page.number(run.times["end_s"])


def _against(run: RunLog, ranks: int | None) -> dict[str, Any]:
    """Compare prediction and measurement: the table, lines of predicted memory, or why there is no prediction."""
    from optrush.planner import search

    hardware = next((d for d in NAMED.values() if d.name == run.times.get("device") != first_device().name), "auto")
    ranks = ranks or int(page.positive(run.times.get("ranks")) or 0) or None
    try:
        guess: Prediction = search.predict(run.config, hardware, ranks)
    except UserError as error:
        return {"predicted": [], "lines": [], "predicted_said": f"No prediction: {page.safe_text(error.found)}."}
    kinds = {page.safe_text(m.get("memory_kind")) for m in run.steps}
    peak = _peak(run) if kinds <= {guess.memory_kind} else None
    rows = [
        (name, text(predicted), text(measured), page.percent(page.relative_error(predicted, measured), signed=True))
        for name, text, predicted, measured in (
            ("peak, GiB", page.gib, guess.peak_bytes, peak),
            *(
                [("tokens/s", page.speed, guess.tokens_per_s, run.median("tokens_per_s"))]
                if run.config.grpo is None
                else []
            ),
            *((name, page.speed, planned, taken) for name, planned, taken in _times(run, guess)),
        )
    ]
    basis = "measured rates" if guess.basis == "calibrated" else "rates of its datasheet"
    summary = (
        f"For {page.safe_text(guess.device)} with {basis}; the peak lies in the phase “{page.safe_text(guess.phase)}”."
    )
    if run.steps and peak is None:
        summary += f" The measured peak is of another kind ({', '.join(sorted(kinds))}) and is not compared."
    lines = [(page.safe_text(item.name), _size(item.bytes), page.safe_text(item.reason)) for item in guess.lines]
    return {"predicted": rows, "lines": lines, "predicted_said": summary}
