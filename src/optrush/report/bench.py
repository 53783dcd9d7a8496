"""Write the pages of ladders and runs, and a ladder's charts: report.html, speed.png, memory.png.

A page is drawn from the folder's records alone, so it can be written again at any time. Everything is made before
anything is written.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrush.bench import record
from optrush.errors import ConfigError, DataError
from optrush.files import write_whole
from optrush.planner.cost import PARTS
from optrush.report import run
from optrush.report.charts import SERIES, BarRow, Series, bars, curves, describe_bars, inline_svg, png, swatch
from optrush.report.page import (
    amount,
    cut_text,
    gib,
    milliseconds,
    number,
    numbers,
    percent,
    positive,
    render,
    safe_text,
    speed,
    times,
)
from optrush.report.rungs import (
    RungResult,
    ladder_summary,
    loss_summary,
    prediction_summary,
    read_rungs,
    troubled,
    versus,
    versus_summary,
)

GIB = 2**30
PAGE, SPEED, MEMORY = "report.html", "speed.png", "memory.png"
KINDS = {
    "cuda_allocated": "the most that torch had allocated on the GPU",
    "rss": "the most that the process held resident",
}
PEAK_BAND = 10.0  # percent: the error that a prediction of the peak may have, shaded in the chart


def write_bench(folder: Path) -> None:
    """Write report.html, speed.png and memory.png of a bench folder from its records.jsonl.

    Raises:
        DataError: there are no records, or a line is not a record; nothing was written.
    """
    records = _records(folder)
    shown, replaced = read_rungs(records)
    title = _joined(records, "ladder") or folder.resolve().name
    climbed = [r for r in shown if r.mode == "cumulative"]
    page = render("bench.html.j2", **_bench(records, shown, title, replaced))
    marks = "whiskers: quartiles; tick: predicted"
    speeds = png(bars(_speed_rows(climbed), title=f"{title}: tokens/s", axis=f"tokens/s, median; {marks}"))
    peaks = png(bars(_memory_rows(climbed), title=f"{title}: peak memory", axis="GiB; tick: predicted"))
    for name, content in ((SPEED, speeds), (MEMORY, peaks), (PAGE, page)):
        write_whole(folder / name, content)


def write_run(folder: Path, ranks: int | None = None) -> None:
    """Write report.html of a training run's folder from its run.yaml and metrics.jsonl.

    Args:
        ranks: of the run; None: unknown, and a run of several ranks has no prediction.

    Raises:
        UserError: run.yaml cannot be read, or a line of metrics.jsonl before the last is no metrics; nothing was
            written.
    """
    write_whole(folder / PAGE, render("run.html.j2", **run.page_content(run.load_run(folder), ranks)))


def write_many(folders: Sequence[Path], out: Path) -> None:
    """Write one page with the ladders of several folders side by side, and a row for each training run.

    Raises:
        UserError: a folder is neither a ladder's nor a run's, or cannot be read; nothing was written.
    """
    benches, trained = [], []
    for folder in folders:
        if folder_kind(folder) == "bench":
            benches.append((folder, _records(folder)))
        else:
            trained.append(run.summary(run.load_run(folder)))
    write_whole(out, render("many.html.j2", **_many(benches), trained=trained))


def folder_kind(folder: Path) -> str:
    """Return "bench" for a ladder's folder, "run" for a training run's.

    Raises:
        ConfigError: it is neither.
    """
    if (folder / record.RECORDS).is_file():
        return "bench"
    if (folder / run.RUN).is_file():
        return "run"
    found = f"it has neither {record.RECORDS} nor {run.RUN}" if folder.is_dir() else "no such folder"
    do = "name a folder that `optrush bench` or `optrush train` has written"
    raise ConfigError(f"a report of {folder}", found, do)


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        found = [dataclasses.asdict(r) for r in record.read_records(folder)]
    except UnicodeDecodeError as error:
        path = folder / record.RECORDS
        place = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{place}", "not UTF-8", "restore the file, or climb again") from None
    if not found:
        raise DataError(f"the records of {folder}", "the file is empty", "climb again: optrush bench")
    return found


# --- a ladder


def _bench(records: Sequence[Mapping[str, Any]], shown: list[RungResult], title: str, replaced: int) -> dict[str, Any]:
    climbed = [r for r in shown if r.mode == "cumulative"]
    without = [r for r in shown if r.mode != "cumulative"]
    drawn = [r for r in shown if not r.peer and any(x is not None for x in r.losses)]
    kinds = sorted({r.memory_kind for r in shown if r.memory_kind})
    dates = sorted({safe_text(r["date"])[:10] for r in records if r["date"]})
    return {
        "title": title,
        "case": _joined(records, "case"),
        "device": _machines(records),
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        "verdict": ladder_summary(shown),
        "replaced": f"{amount(replaced, 'older record')} of the same rungs not shown." if replaced else "",
        "troubled": troubled(shown),
        "versus": versus(shown),
        "versus_said": versus_summary(versus(shown)),
        "longest": [r for r in shown if r.longest is not None],
        "memory_said": "; ".join(KINDS.get(k, k) for k in kinds),
        "speed_chart": _drawn("Tokens a second of each rung", _speed_rows(climbed)),
        "memory_chart": _drawn("Peak memory of each rung", _memory_rows(climbed)),
        "gains_chart": _gains_chart([r for r in climbed if not r.peer]),
        "predicted_said": prediction_summary([r for r in shown if not r.peer]),
        "predicted_charts": _predicted_charts([r for r in shown if not r.peer]),
        "roof": roofline_section(records),
        "without": without,
        "without_chart": _without_chart(without),
        "losses_said": loss_summary(drawn),
        "losses_chart": _losses_chart(drawn),
        "rungs": shown,
        "environment": environment(records),
        "commands": list(dict.fromkeys(safe_text(r["command"], lines=True) for r in records if r["command"])),
        "sources": list(dict.fromkeys(_source(r["source"]) for r in records)),
    }


def _joined(records: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(text for r in records if (text := safe_text(r[key]))))


def _machines(records: Sequence[Mapping[str, Any]]) -> str:
    named = []
    for r in records:
        ranks = number(r["ranks"])
        named.append((f"{ranks:,.0f} × " if ranks is not None and ranks > 1 else "") + safe_text(r["device"]))
    return ", ".join(dict.fromkeys(filter(None, named)))


def _source(source: object) -> str:
    if not isinstance(source, Mapping):
        return "not recorded"
    commit, digest, state = safe_text(source.get("commit")), safe_text(source.get("digest")), source.get("clean")
    tree = "with changes that are not committed" if state is False else "clean" if state is True else "state not known"
    text = f"commit {commit}, tree {tree}" if commit else "no commit (not run from a checkout)"
    return text + (f"; digest of the package {digest}" if digest else "")


def environment(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what the records were measured with; where they differ, every value."""
    found: dict[str, dict[str, None]] = {}
    for r in records:
        if isinstance(r["environment"], Mapping):
            for key, value in r["environment"].items():
                found.setdefault(safe_text(key), {})[safe_text(value)] = None
    return {key: "  |  ".join(values) for key, values in found.items()}


def _drawn(title: str, rows: Sequence[BarRow], **options: Any) -> Markup:
    return inline_svg(bars(rows, **options), title, describe_bars(rows))


def _note(rung: RungResult) -> str:
    return f" {rung.kind}" if rung.kind in ("noise", "red", "slower", "smaller") else ""


def _failure(rung: RungResult) -> BarRow:
    return BarRow(rung.key, f"failed: {cut_text(rung.first_words, 60)}", failed=True)


def _speed_rows(shown: Sequence[RungResult]) -> list[BarRow]:
    rows = []
    for r in shown:
        gain = f" {times(r.factor)}" if r.factor is not None else ""
        bar = BarRow(r.key, f"{speed(r.speed)}{gain}{_note(r)}", ((0, r.speed or 0, r.kind),), r.low, r.high,
                  r.predicted_speed)  # fmt: skip
        rows.append(_failure(r) if r.failed else bar)
    return rows


def _memory_rows(shown: Sequence[RungResult]) -> list[BarRow]:
    rows = []
    for r in shown:
        grown = f" {times(r.peak_factor)}" if r.peak_factor is not None else ""
        # A verdict is mostly of the speed; next to memory its color would be misread.
        color = r.kind if r.kind in ("red", "peer") else "base"
        pieces = () if r.peak is None else ((0, r.peak / GIB, color),)
        text = f"{gib(r.peak)} GiB{grown}" if r.peak is not None else "not measured"
        predicted = None if r.predicted_peak is None else r.predicted_peak / GIB
        rows.append(_failure(r) if r.failed else BarRow(r.key, text, pieces, predicted=predicted))
    return rows


def _gains_chart(shown: Sequence[RungResult]) -> Markup:
    rows = []
    for r in shown:
        begin = r.since_speed if r.factor is not None and r.since_speed else r.speed
        text = f"{times(r.factor)}{_note(r)}" if r.factor is not None else "begins here"
        pieces = ((begin, r.speed, r.kind),) if begin and r.speed else ()
        rows.append(_failure(r) if r.failed else BarRow(r.key, text, pieces))
    return _drawn("Gain of each rung", rows, log=True)


def _predicted_charts(shown: Sequence[RungResult]) -> list[tuple[str, Markup]]:
    """Return the charts of peak and speed; a rung without a prediction has a text and no bar."""
    peaks = [(r.peak_off, f"{gib(r.predicted_peak)}/{gib(r.peak)}") for r in shown]
    speeds = [(r.speed_off, f"{speed(r.predicted_speed)}/{speed(r.speed)}") for r in shown]
    drawn = []
    for heading, errors, band in (("Peak memory", peaks, PEAK_BAND), ("Tokens a second", speeds, None)):
        rows = []
        for r, (error, both) in zip(shown, errors):
            text = "failed" if r.failed else "no prediction" if error is None else percent(error, signed=True)
            color = "faster" if error is None or abs(error) <= PEAK_BAND else "slower"
            name = r.key if error is None else f"{r.key} ({both})"
            rows.append(BarRow(name, text, () if error is None else ((0, error, color),)))
        if any(row.pieces for row in rows):
            title = f"{heading}: prediction against measurement"
            drawn.append((heading, _drawn(title, rows, unit=" %", band=band)))
    return drawn


def _without_chart(shown: Sequence[RungResult]) -> Markup:
    rows = []
    for r in shown:
        if r.factor is None:
            rows.append(_failure(r) if r.failed else BarRow(r.key, percent(None)))
            continue
        change = 100 * (r.factor - 1)
        grown = "" if r.peak_factor is None else f", peak {times(r.peak_factor)}"
        color = r.kind if r.kind in ("red", "noise") else "slower" if change < 0 else "faster"
        rows.append(BarRow(r.key, f"{percent(change, signed=True)}{grown}", ((0, change, color),)))
    return _drawn("What the full configuration loses without one technique", rows, unit=" %")


def _losses_chart(shown: Sequence[RungResult]) -> Markup:
    series = [Series(r.key + " (all but one)" * (r.mode != "cumulative"), [(i + 1, y) for i, y in enumerate(r.losses)])
              for r in shown]  # fmt: skip
    description = f"{len(series)} curves: {', '.join(s.name for s in series)}"
    return inline_svg(curves(series, axis="step", height=260), "Loss at the proof's steps", description)


# --- several machines


@dataclasses.dataclass(frozen=True)
class _Machine:
    """One ladder of one folder, next to others; its letter has a color in the charts."""

    letter: str
    color: str
    folder: str
    device: str
    ladder: str
    verdict: str
    rungs: dict[str, RungResult]
    troubled: list[RungResult]
    environment: dict[str, str]


def _many(benches: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    machines: list[_Machine] = []
    for folder, records in benches:
        for ladder in dict.fromkeys(safe_text(r["ladder"]) for r in records):
            here = [r for r in records if safe_text(r["ladder"]) == ladder]
            shown, n = read_rungs(here)[0], len(machines)
            machines.append(
                _Machine(
                    letter=chr(ord("A") + n % 26) + ("" if n < 26 else str(n // 26)),
                    color=f"s{n % SERIES}",
                    folder=safe_text(folder.resolve().name),
                    device=_machines(here),
                    ladder=ladder,
                    verdict=ladder_summary(shown),
                    rungs={r.name: r for r in shown if r.mode == "cumulative" and not r.peer},
                    troubled=troubled(shown),
                    environment=environment(here),
                )
            )
    ladders = []
    for name in dict.fromkeys(m.ladder for m in machines):
        same = [m for m in machines if m.ladder == name]
        names = list(dict.fromkeys(r for m in same for r in m.rungs))
        ladders.append({"name": name, "machines": same, "names": names, "chart": _side_by_side(name, names, same)})
    keys = list(dict.fromkeys(k for m in machines for k in m.environment))
    return {"machines": machines, "ladders": ladders, "environment_keys": keys}


def _side_by_side(ladder: str, names: Sequence[str], machines: Sequence[_Machine]) -> Markup:
    rows = []
    for name in names:
        for n, m in enumerate(machines):
            label = f"{cut_text(name, 56)} · {m.letter}" if n == 0 else m.letter
            r = m.rungs.get(name)
            if r is None or r.failed or r.speed is None:
                rows.append(BarRow(label, "not climbed" if r is None else cut_text(f"failed: {r.first_words}", 34)))
            else:
                rows.append(BarRow(label, f"{speed(r.speed)}{_note(r)}", ((0, r.speed, m.color),)))
    return _drawn(f"Tokens a second, ladder {ladder}", rows)


# --- A step against its device's ceiling
#
# The ceiling is computed: the work that the plan counts for the rung, at the rates that the device reaches with that
# kind of work alone (`optrush calibrate`) or, without them, at the rates of its datasheet. Each part of a profiled rung
# is compared with it; of other rungs the whole step, and the rest of the step is work below its ceiling, work that the
# plan does not count, and gaps.


LEFT, GAPS = "remainder", "gaps"  # gaps: the device had nothing to do
NEAR = 1.1  # times: profiled steps that differ more from the timed ones do not represent them


@dataclass(frozen=True)
class Roof:
    """One rung: seconds of its step, of each part at the ceiling and, if it was profiled, of each part as measured.

    Attributes:
        took: gaps included; None if the rung was not profiled.
        note: why it was not profiled.
    """

    name: str
    basis: str
    step_s: float
    parts: dict[str, float]
    took: dict[str, float] | None = None
    note: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def left_s(self) -> float:
        """Return the rest of the step, negative if the step is faster than its computed ceiling."""
        return self.step_s - self.total_s

    @property
    def reached(self) -> float:
        """Return how fast the step is in percent of the ceiling."""
        return 100 * self.total_s / self.step_s

    def share(self, part: str) -> float:
        """Return the time of a part at the ceiling in percent of the measured step."""
        return 100 * (self.left_s if part == LEFT else self.parts[part]) / self.step_s

    @property
    def profiled_s(self) -> float:
        """Return the length of a step under the profiler."""
        return sum((self.took or {}).values())

    def taken(self, part: str) -> float:
        """Return the time of a part in percent of the profiled step."""
        return 100 * (self.took or {})[part] / self.profiled_s

    @property
    def apart(self) -> float | None:
        """Return profiled over timed step if the two differ by more than NEAR, else None."""
        factor = self.profiled_s / self.step_s
        return factor if self.took and not 1 / NEAR <= factor <= NEAR else None

    @property
    def scored(self) -> bool:
        """Return whether attention ran without a kernel, as products and elementwise operators."""
        return self.took is not None and self.took["attention"] == 0 < self.parts["attention"]

    def part_reached(self, part: str) -> float | None:
        """Return how fast a part is in percent of its ceiling; None if that is unknown."""
        took, least = (self.took or {}).get(part), self.parts.get(part)
        mixed = self.scored and part in ("products", "attention", "elementwise")
        return 100 * least / took if took and least and not mixed and self.apart is None else None


def roofs(records: Sequence[Mapping[str, Any]]) -> list[Roof]:
    """Return the roofs of all rungs with steps and a ceiling; of a rung measured twice the later record counts."""
    latest = {tuple(safe_text(r.get(k)) for k in ("case", "device", "mode", "rung", "peer")): r for r in records}
    return [roof for record in latest.values() if (roof := _roof(record)) is not None]


def _roof(record: Mapping[str, Any]) -> Roof | None:
    given, repeats = record.get("ceiling_s"), record.get("step_s")
    steps = [s for own in repeats if isinstance(own, list) for s in numbers(own)] if isinstance(repeats, list) else []
    durations = [s for s in map(positive, steps) if s is not None]
    if record.get("error") or not durations or not isinstance(given, Mapping):
        return None
    parts = {part: positive(given.get(part)) or 0.0 for part in PARTS}
    if not any(parts.values()):
        return None
    seen = record.get("parts_s")
    read = {part: number(seen.get(part)) for part in (*PARTS, GAPS)} if isinstance(seen, Mapping) else {}
    took = {part: s for part, s in read.items() if s is not None and s >= 0}
    name = safe_text(record.get("rung")) or "unnamed"
    step_s, note = statistics.median(durations), safe_text(record.get("parts_note"))
    whole = len(took) == len(PARTS) + 1 and any(took.values())
    return Roof(name, safe_text(record.get("basis")), step_s, parts, took if whole else None, note)


def roofline_section(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the content of the page's section; None if no rung has a ceiling."""
    shown = roofs(records)
    if not shown:
        return None
    names = {"calibrated": "the rates that optrush calibrate measured", "datasheet": "the whole rates of a datasheet"}
    bases = dict.fromkeys(names.get(r.basis, "rates of an unknown kind") for r in shown)
    profiled = any(r.took for r in shown)
    parts = (*PARTS, GAPS if profiled else LEFT)
    return {
        "basis": " and ".join(bases),
        "profiled": profiled,
        "chart": _parts_chart(shown, profiled),
        "legend": [(swatch(_part_color(part)), part) for part in parts],
        "parts": parts,
        "rows": shown,
        "notes": [f"{r.name}: {r.note}" for r in shown if r.note],
        "apart": [f"{r.name} ({r.apart:.2f} times)" for r in shown if r.apart is not None],
        "scored": [r.name for r in shown if r.scored],
        "above": [r.name for r in shown if r.left_s < 0],
    }


def _parts_chart(shown: Sequence[Roof], profiled: bool) -> Markup:
    """Draw a bar a rung, made of its parts in percent of the step.

    Without a profile the parts are those at the ceiling, then the rest. With one they are as measured: what goes beyond
    a known ceiling is pale, then the gaps.
    """
    rows, descriptions = [], []
    for roof in (r for r in shown if r.took or not profiled):
        pieces: list[tuple[float, float, str]] = []
        begin = 0.0
        shares = {
            part: roof.taken(part) if profiled else roof.share(part) for part in (*PARTS, GAPS if profiled else LEFT)
        }
        for part, share in shares.items():
            reached = roof.part_reached(part) if profiled else None
            full = max(0.0, share) * (1.0 if reached is None else min(100.0, reached) / 100)
            pieces.append((begin, begin + full, _part_color(part)))
            begin += max(0.0, share)
            if reached is not None:
                pieces.append((pieces[-1][1], begin, f"{_part_color(part)} pale"))
        rows.append(BarRow(roof.name, f"{percent(roof.reached)}, {milliseconds(roof.step_s)}", tuple(pieces)))
        descriptions.append(f"{roof.name}: " + ", ".join(f"{part} {percent(s)}" for part, s in shares.items()))
    step = (
        "as they took, in percent of the profiled step"
        if profiled
        else "at the ceiling, in percent of the measured step"
    )
    return inline_svg(bars(rows, unit=" %"), f"Parts of each rung's step {step}", "; ".join(descriptions))


def _part_color(part: str) -> str:
    return "grid" if part in (LEFT, GAPS) else f"s{PARTS.index(part)}"
