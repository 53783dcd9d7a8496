"""The pages: of a ladder, of several machines' ladders, of a training run. Each is one file that needs nothing else.

A page holds no script and fetches nothing, which its content security policy enforces; every text from a record or a
configuration is escaped. What a page says is drawn from the folder's records alone, so it can be written again at any
time. Everything is made before anything is written.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrush.bench import record
from optrush.errors import ConfigError, DataError
from optrush.files import write_whole
from optrush.planner.cost import PARTS
from optrush.report import charts, run
from optrush.report.charts import (
    Rung,
    amount,
    clean,
    cut,
    errors_said,
    gib,
    losses_said,
    number,
    numbers,
    percent,
    plain,
    positive,
    ratio,
    rungs,
    speed,
    times,
    troubled,
    verdict,
)

# --- How near a rung comes to its device's ceiling: the step as measured, and what its parts would take at the ceiling.
#
# The ceiling is computed: the work that the plan counts for the rung, at the rates that the device reaches with that
# kind of work alone (`optrush calibrate`) or, without them, at its datasheet's whole rates. Where the rung was profiled
# (parts.py) each part is held against it; else the whole step alone, and what is left of that is work below its
# ceiling, work that the plan does not count, and gaps.


LEFT, GAPS = "remainder", "gaps"  # gaps: the device had nothing to do
NEAR = 1.1  # times: profiled steps that took so much more or less than the timed ones do not speak for them


@dataclass(frozen=True)
class Roof:
    """One rung: seconds of its step, and of each part at the ceiling and, where it was profiled, as it took."""

    name: str
    basis: str
    step_s: float
    parts: dict[str, float]
    took: dict[str, float] | None = None  # gaps among them
    note: str = ""  # why it was not profiled

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def left_s(self) -> float:
        """Negative where the step is faster than what is called its ceiling."""
        return self.step_s - self.total_s

    @property
    def reached(self) -> float:
        """Percent of the ceiling."""
        return 100 * self.total_s / self.step_s

    def share(self, part: str) -> float:
        """Percent of the measured step that a part would take at the ceiling."""
        return 100 * (self.left_s if part == LEFT else self.parts[part]) / self.step_s

    @property
    def profiled_s(self) -> float:
        """Of a step under the profiler."""
        return sum((self.took or {}).values())

    def taken(self, part: str) -> float:
        """Percent of the profiled step."""
        return 100 * (self.took or {})[part] / self.profiled_s

    @property
    def apart(self) -> float | None:
        """How many times a timed step a profiled one took, where that is too much or too little; None: it is not."""
        times = self.profiled_s / self.step_s
        return times if self.took and not 1 / NEAR <= times <= NEAR else None

    @property
    def scored(self) -> bool:
        """Attention had no kernel: its whole scores were products and elementwise operators like any other."""
        return self.took is not None and self.took["attention"] == 0 < self.parts["attention"]

    def part_reached(self, part: str) -> float | None:
        """Percent of its ceiling that a part comes to; None: that cannot be said."""
        took, least = (self.took or {}).get(part), self.parts.get(part)
        mixed = self.scored and part in ("products", "attention", "elementwise")
        return 100 * least / took if took and least and not mixed and self.apart is None else None


def roofs(records: Sequence[Mapping[str, Any]]) -> list[Roof]:
    """Of every rung that has both, the later record of a rung that was measured twice; other systems have no plan."""
    latest = {tuple(clean(r.get(k)) for k in ("case", "device", "mode", "rung", "peer")): r for r in records}
    return [roof for record in latest.values() if (roof := _roof(record)) is not None]


def _roof(record: Mapping[str, Any]) -> Roof | None:
    given, repeats = record.get("ceiling_s"), record.get("step_s")
    steps = [s for own in repeats if isinstance(own, list) for s in numbers(own)] if isinstance(repeats, list) else []
    held = [s for s in map(positive, steps) if s is not None]
    if record.get("error") or not held or not isinstance(given, Mapping):
        return None
    parts = {part: positive(given.get(part)) or 0.0 for part in PARTS}
    if not any(parts.values()):
        return None
    seen = record.get("parts_s")
    read = {part: number(seen.get(part)) for part in (*PARTS, GAPS)} if isinstance(seen, Mapping) else {}
    took = {part: s for part, s in read.items() if s is not None and s >= 0}
    name = clean(record.get("rung")) or "unnamed"
    step_s, note = statistics.median(held), clean(record.get("parts_note"))
    whole = len(took) == len(PARTS) + 1 and any(took.values())
    return Roof(name, clean(record.get("basis")), step_s, parts, took if whole else None, note)


def section(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the page lays out; None: no rung has a ceiling."""
    shown = roofs(records)
    if not shown:
        return None
    said = {"calibrated": "the rates that optrush calibrate measured", "datasheet": "the whole rates of a datasheet"}
    bases = dict.fromkeys(said.get(r.basis, "rates of an unknown kind") for r in shown)
    profiled = any(r.took for r in shown)
    parts = (*PARTS, GAPS if profiled else LEFT)
    return {
        "basis": " and ".join(bases),
        "profiled": profiled,
        "chart": _profiled([r for r in shown if r.took]) if profiled else _chart(shown),
        "legend": [(_swatch(part), part) for part in parts],
        "parts": parts,
        "rows": shown,
        "notes": [f"{r.name}: {r.note}" for r in shown if r.note],
        "apart": [f"{r.name} ({r.apart:.2f} times)" for r in shown if r.apart is not None],
        "scored": [r.name for r in shown if r.scored],
        "above": [r.name for r in shown if r.left_s < 0],
    }


def _chart(shown: Sequence[Roof]) -> Markup:
    """A bar a rung, as long as its step: the parts from the left, then what is left."""
    most = max(1.0, *(r.total_s / r.step_s for r in shown))
    inside: list[Markup] = []
    for i, roof in enumerate(shown):
        pieces = [(max(0.0, roof.share(part)) / 100, _kind(part)) for part in (*PARTS, LEFT)]
        inside += _row(i, roof, pieces, most)
    said = "; ".join(
        f"{r.name}: " + ", ".join(f"{part} {percent(r.share(part))}" for part in (*PARTS, LEFT)) for r in shown
    )
    title = "Parts of each rung's step at the ceiling, in percent of the measured step"
    return charts.picture(title, said, len(shown) * charts.ROW, *inside)


def _profiled(shown: Sequence[Roof]) -> Markup:
    """A bar a rung: each part as it took, pale what of it goes beyond a known ceiling; then the gaps."""
    inside: list[Markup] = []
    for i, roof in enumerate(shown):
        pieces = []
        for part in PARTS:
            reached = roof.part_reached(part)
            width, reached = roof.taken(part) / 100, 1.0 if reached is None else min(100.0, reached) / 100
            pieces += [(width * reached, _kind(part)), (width * (1 - reached), f"{_kind(part)} pale")]
        inside += _row(i, roof, [*pieces, (roof.taken(GAPS) / 100, _kind(GAPS))], 1.0)
    said = "; ".join(
        f"{r.name}: " + ", ".join(f"{part} {percent(r.taken(part))}" for part in (*PARTS, GAPS)) for r in shown
    )
    title = "Parts of each rung's step as they took, in percent of the profiled step"
    return charts.picture(title, said, len(shown) * charts.ROW, *inside)


def _row(i: int, roof: Roof, pieces: Sequence[tuple[float, str]], most: float) -> Iterator[Markup]:
    """A rung's name, its pieces side by side, each a share of the longest bar, and how it fares."""
    top, begin = i * charts.ROW, 0.0
    yield charts.named(roof.name, top)
    for width, kind in pieces:
        yield charts.segment(begin, begin + width / most, top, kind)
        begin += width / most
    yield charts.figure(f"{percent(roof.reached)}, {milliseconds(roof.step_s)}", top, begin)


def milliseconds(seconds: float) -> str:
    """1.2345 -> 1,234.5 ms; what is shorter than one has three digits."""
    value = 1e3 * seconds
    return (f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}").replace("-", "−") + " ms"


def _kind(part: str) -> str:
    return "band" if part in (LEFT, GAPS) else f"fill s{PARTS.index(part)}"


def _swatch(part: str) -> Markup:
    square = charts.node("rect", class_=_kind(part), width=12, height=12)
    return charts.node("svg", square, width=12, height=12, class_="swatch", aria_hidden="true")


# --- Ours against other systems: ratios from the records of one climb. Pure; a ratio above 1 is in our favour.


@dataclass(frozen=True)
class Versus:
    """Another system's rung beside ours, measured in turn with it on the same load."""

    case: str
    ours: Rung
    theirs: Rung

    @property
    def faster(self) -> float | None:
        """Our tokens/s over theirs."""
        return ratio(self.ours.speed, self.theirs.speed)

    @property
    def learns_faster(self) -> float | None:
        """Our target tokens/s over theirs: where rows hold padding or what is not learnt, the figure that counts."""
        return ratio(self.ours.targets, self.theirs.targets)

    @property
    def smaller(self) -> float | None:
        """Their peak over ours."""
        return ratio(self.theirs.peak, self.ours.peak)


def versus(shown: Sequence[Rung]) -> list[Versus]:
    """Each rung of another system that has figures, beside the rung of ours that it names."""
    ours = {r.name: r for r in shown if not r.peer and r.mode == "cumulative"}
    pairs = [(r, ours.get(r.since)) for r in shown if r.peer and not r.failed]
    return [Versus(r.case, own, r) for r, own in pairs if own is not None and not own.failed]


def said(pairs: Sequence[Versus]) -> str:
    """The ratios in a sentence: the least of each case."""
    least: dict[str, Versus] = {}
    for pair in pairs:
        if pair.faster is None or pair.theirs.red or pair.ours.red:
            continue  # not the same work, or work that is wrong
        if pair.case not in least or pair.faster < (least[pair.case].faster or 0):
            least[pair.case] = pair
    told = [f"{case}: ×{pair.faster:.2f} the tokens/s of “{pair.theirs.name}”" for case, pair in least.items()]
    return f"Ours against the fastest other system: {'; '.join(told)}." if told else ""


PAGE, SPEED, MEMORY = "report.html", "speed.png", "memory.png"
KINDS = {
    "cuda_allocated": "the most that torch had allocated on the GPU",
    "rss": "the most that the process held resident",
}
PEAK_BAND = 10.0  # percent: what a prediction of the peak may be off by, shaded in the chart


def write_bench(folder: Path) -> None:
    """report.html, speed.png and memory.png of a bench folder, from its records.jsonl.

    Raises:
        DataError: no records there, or a line that is none; nothing was written.
    """
    records = _records(folder)
    shown, replaced = rungs(records)
    title = _joined(records, "ladder") or folder.resolve().name
    climbed = [r for r in shown if r.mode == "cumulative"]
    page = _page("bench.html.j2", **_bench(records, shown, title, replaced))
    speeds, peaks = charts.tokens(title, climbed), charts.memory(title, climbed)
    for name, content in ((SPEED, speeds), (MEMORY, peaks), (PAGE, page.encode())):
        write_whole(folder / name, [content])


def write_run(folder: Path, ranks: int | None = None) -> None:
    """report.html of a training run's folder, from its run.yaml and metrics.jsonl.

    Args:
        ranks: that the run had; None: not known, and a run of several has no prediction.

    Raises:
        UserError: run.yaml cannot be read, or a line of metrics.jsonl before the last is none; nothing was written.
    """
    write_whole(folder / PAGE, _page("run.html.j2", **run.told(run.read(folder), ranks)))


def write_many(folders: Sequence[Path], out: Path) -> None:
    """One page that holds the ladders of several folders side by side, and a row for each training run.

    Raises:
        UserError: a folder is neither, or cannot be read; nothing was written.
    """
    benches, trained = [], []
    for folder in folders:
        if kind(folder) == "bench":
            benches.append((folder, _records(folder)))
        else:
            trained.append(run.summary(run.read(folder)))
    write_whole(out, _page("many.html.j2", **_many(benches), trained=trained))


def kind(folder: Path) -> str:
    """Whether a folder is a ladder's ("bench") or a training run's ("run").

    Raises:
        ConfigError: it is neither.
    """
    if (folder / record.RECORDS).is_file():
        return "bench"
    if (folder / run.RUN).is_file():
        return "run"
    found = f"neither {record.RECORDS} nor {run.RUN} lies there" if folder.is_dir() else "no such folder"
    raise ConfigError(
        f"a report of {folder}", found, "name a folder that `optrush bench` or `optrush train` has written"
    )


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


def _page(template: str, **content: Any) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    house = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    house.filters |= {
        "speed": speed, "gib": gib, "times": times, "percent": percent, "plain": plain, "cut": cut,
        "milliseconds": milliseconds,
        "signed": lambda value: percent(value, signed=True),
    }  # fmt: skip
    return house.get_template(template).render(hatching=charts.hatching(), **content)


# --- a ladder


def _bench(records: Sequence[Mapping[str, Any]], shown: list[Rung], title: str, replaced: int) -> dict[str, Any]:
    climbed = [r for r in shown if r.mode == "cumulative"]
    without = [r for r in shown if r.mode != "cumulative"]
    drawn = [r for r in shown if not r.peer and any(x is not None for x in r.losses)]
    kinds = sorted({r.memory_kind for r in shown if r.memory_kind})
    dates = sorted({clean(r["date"])[:10] for r in records if r["date"]})
    return {
        "title": title,
        "case": _joined(records, "case"),
        "device": _machines(records),
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        "verdict": verdict(shown),
        "replaced": f"{amount(replaced, 'older record')} of the same rungs not shown." if replaced else "",
        "troubled": troubled(shown),
        "versus": versus(shown),
        "versus_said": said(versus(shown)),
        "longest": [r for r in shown if r.longest is not None],
        "memory_said": "; ".join(KINDS.get(k, k) for k in kinds),
        "speed_chart": _speed_chart(climbed),
        "memory_chart": _memory_chart(climbed),
        "gains_chart": _gains_chart([r for r in climbed if not r.peer]),
        "predicted_said": errors_said([r for r in shown if not r.peer]),
        "predicted_charts": _predicted_charts([r for r in shown if not r.peer]),
        "roof": section(records),
        "without": without,
        "without_chart": _without_chart(without),
        "losses_said": losses_said(drawn),
        "losses_chart": _losses_chart(drawn),
        "legend": [(charts.swatch(i), r.key, "without" if r.mode != "cumulative" else "") for i, r in enumerate(drawn)],
        "rungs": shown,
        "environment": environment(records),
        "commands": list(dict.fromkeys(clean(r["command"], lines=True) for r in records if r["command"])),
        "sources": list(dict.fromkeys(_source(r["source"]) for r in records)),
    }


def _joined(records: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(text for r in records if (text := clean(r[key]))))


def _machines(records: Sequence[Mapping[str, Any]]) -> str:
    named = []
    for r in records:
        ranks = number(r["ranks"])
        named.append((f"{ranks:,.0f} × " if ranks is not None and ranks > 1 else "") + clean(r["device"]))
    return ", ".join(dict.fromkeys(filter(None, named)))


def _source(source: object) -> str:
    if not isinstance(source, Mapping):
        return "not recorded"
    commit, digest, state = clean(source.get("commit")), clean(source.get("digest")), source.get("clean")
    tree = "with changes that are not committed" if state is False else "clean" if state is True else "state not known"
    text = f"commit {commit}, tree {tree}" if commit else "no commit (not run from a checkout)"
    return text + (f"; digest of the package {digest}" if digest else "")


def environment(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the records were measured with; where they differ, every value."""
    found: dict[str, dict[str, None]] = {}
    for r in records:
        if isinstance(r["environment"], Mapping):
            for key, value in r["environment"].items():
                found.setdefault(clean(key), {})[clean(value)] = None
    return {key: "  |  ".join(values) for key, values in found.items()}


def _note(rung: Rung) -> str:
    return f" {rung.kind}" if rung.kind in ("noise", "red", "slower", "smaller") else ""


def _failed(rung: Rung) -> str:
    return f"failed: {rung.first_words}"


def _speed_chart(shown: Sequence[Rung]) -> Markup:
    rows = []
    for r in shown:
        gain = f" {times(r.factor)}" if r.factor is not None else ""
        text = _failed(r) if r.failed else f"{speed(r.speed)}{gain}{_note(r)}"
        rows.append(charts.Bar(r.key, r.speed, text, r.kind, r.low, r.high, r.predicted_speed))
    return charts.bars("Tokens a second of each rung", _described(rows), rows)


def _memory_chart(shown: Sequence[Rung]) -> Markup:
    rows = []
    for r in shown:
        grown = f" {times(r.peak_factor)}" if r.peak_factor is not None else ""
        text = _failed(r) if r.failed else f"{gib(r.peak)} GiB{grown}" if r.peak is not None else "not measured"
        rows.append(charts.Bar(r.key, r.peak, text, _neutral(r), predicted=r.predicted_peak))
    return charts.bars("Peak memory of each rung", _described(rows), rows)


def _neutral(rung: Rung) -> str:
    """A verdict is mostly of the speed: beside memory its colours would say something else."""
    return rung.kind if rung.kind in ("red", "peer") else "base"


def _described(rows: Sequence[charts.Bar | charts.Offset | charts.Span]) -> str:
    """A chart in words, for those who do not see it."""
    return "; ".join(f"{r.name}: {r.text}" for r in rows)


def _gains_chart(shown: Sequence[Rung]) -> Markup:
    rows = []
    for r in shown:
        text = _failed(r) if r.failed else f"{times(r.factor)}{_note(r)}" if r.factor is not None else "begins here"
        begin = r.since_speed if r.factor is not None else None
        rows.append(charts.Span(r.key, begin, r.speed, text, r.kind))
    return charts.waterfall("Gain of each rung", _described(rows), rows)


def _predicted_charts(shown: Sequence[Rung]) -> list[tuple[str, Markup]]:
    """Peak and speed; a figure without a prediction has no bar, and says so."""
    peaks = [(r.peak_off, f"{gib(r.predicted_peak)}/{gib(r.peak)}") for r in shown]
    speeds = [(r.speed_off, f"{speed(r.predicted_speed)}/{speed(r.speed)}") for r in shown]
    made = []
    for heading, found, band in (("Peak memory", peaks, PEAK_BAND), ("Tokens a second", speeds, None)):
        rows = []
        for r, (error, both) in zip(shown, found):
            text = "failed" if r.failed else "no prediction" if error is None else percent(error, signed=True)
            full = f"{r.key} ({both})"
            named = full if error is not None and len(full) <= charts.NAME else r.key
            near = error is None or abs(error) <= PEAK_BAND
            rows.append(charts.Offset(named, error, text, "faster" if near else "slower"))
        if any(row.value is not None for row in rows):
            title = f"{heading}: prediction against measurement"
            made.append((heading, charts.offsets(title, _described(rows), rows, band)))
    return made


def _without_chart(shown: Sequence[Rung]) -> Markup:
    rows = []
    for r in shown:
        lost = None if r.factor is None else 100 * (r.factor - 1)
        grown = "" if r.peak_factor is None else f", peak {times(r.peak_factor)}"
        text = cut(_failed(r), 34) if r.failed else f"{percent(lost, signed=True)}{grown}"
        colour = r.kind if r.kind in ("red", "noise") or lost is None else "slower" if lost < 0 else "faster"
        rows.append(charts.Offset(r.key, lost, text, colour))
    return charts.offsets("What the full configuration loses without one technique", _described(rows), rows)


def _losses_chart(shown: Sequence[Rung]) -> Markup:
    series = [charts.Series(r.key, [(i + 1, y) for i, y in enumerate(r.losses)]) for r in shown]
    names = ", ".join(s.name for s in series)
    return charts.curves("Loss at the proof's steps", f"{len(series)} curves: {names}", series, height=280)


# --- several machines


@dataclasses.dataclass(frozen=True)
class Machine:
    """One ladder of one folder, as it stands beside others. `colour` and `letter` say the same."""

    letter: str
    colour: str
    folder: str
    device: str
    ladder: str
    verdict: str
    rungs: dict[str, Rung]
    troubled: list[Rung]
    environment: dict[str, str]


def _many(benches: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    machines: list[Machine] = []
    for folder, records in benches:
        for ladder in dict.fromkeys(clean(r["ladder"]) for r in records):
            here = [r for r in records if clean(r["ladder"]) == ladder]
            shown, n = rungs(here)[0], len(machines)
            machines.append(
                Machine(
                    letter=chr(ord("A") + n % 26) + ("" if n < 26 else str(n // 26)),
                    colour=f"s{n % charts.LINES}",
                    folder=clean(folder.resolve().name),
                    device=_machines(here),
                    ladder=ladder,
                    verdict=verdict(shown),
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


def _side_by_side(ladder: str, names: Sequence[str], machines: Sequence[Machine]) -> Markup:
    rows = []
    for name in names:
        bars = []
        for m in machines:
            r = m.rungs.get(name)
            text = "not climbed" if r is None else _failed(r) if r.failed else f"{speed(r.speed)}{_note(r)}"
            bars.append(charts.Bar(m.letter, None if r is None else r.speed, cut(text, 34), f"fill {m.colour}"))
        rows.append((name, bars))
    said = "; ".join(f"{n}: " + ", ".join(f"{b.name} {b.text}" for b in row) for n, row in rows)
    return charts.groups(f"Tokens a second, ladder {ladder}", said, rows)
