"""The pages: of a ladder, of several machines' ladders, of a training run. Each is one file that needs nothing else.

A page holds no script and fetches nothing, which its content security policy enforces; every text from a record or a
configuration is escaped. What a page says is drawn from the folder's records alone, so it can be written again at any
time. Everything is made before anything is written.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrush.bench import charts, pictures, record, roofline, runs, versus
from optrush.bench.figures import (
    Rung,
    amount,
    clean,
    cut,
    errors_said,
    gib,
    losses_said,
    number,
    percent,
    plain,
    rungs,
    speed,
    times,
    troubled,
    verdict,
)
from optrush.errors import ConfigError, DataError

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
    speeds, peaks = pictures.tokens(title, climbed), pictures.memory(title, climbed)
    for name, content in ((SPEED, speeds), (MEMORY, peaks), (PAGE, page.encode())):
        _put(folder / name, content)


def write_run(folder: Path, ranks: int | None = None) -> None:
    """report.html of a training run's folder, from its run.yaml and metrics.jsonl.

    Args:
        ranks: that the run had; None: not known, and a run of several has no prediction.

    Raises:
        UserError: run.yaml cannot be read, or a line of metrics.jsonl before the last is none; nothing was written.
    """
    _put(folder / PAGE, _page("run.html.j2", **runs.told(runs.read(folder), ranks)).encode())


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
            trained.append(runs.summary(runs.read(folder)))
    _put(out, _page("many.html.j2", **_many(benches), trained=trained).encode())


def kind(folder: Path) -> str:
    """Whether a folder is a ladder's ("bench") or a training run's ("run").

    Raises:
        ConfigError: it is neither.
    """
    if (folder / record.RECORDS).is_file():
        return "bench"
    if (folder / runs.RUN).is_file():
        return "run"
    found = f"neither {record.RECORDS} nor {runs.RUN} lies there" if folder.is_dir() else "no such folder"
    raise ConfigError(
        f"a report of {folder}", found, "name a folder that `optrush bench` or `optrush train` has written"
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        found = [dataclasses.asdict(r) for r in record.read(folder)]
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
        "milliseconds": roofline.milliseconds,
        "signed": lambda value: percent(value, signed=True),
    }  # fmt: skip
    return house.get_template(template).render(hatching=charts.hatching(), **content)


def _put(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    new = path.with_name(path.name + ".tmp")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


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
        "versus": versus.versus(shown),
        "versus_said": versus.said(versus.versus(shown)),
        "longest": [r for r in shown if r.longest is not None],
        "memory_said": "; ".join(KINDS.get(k, k) for k in kinds),
        "speed_chart": _speed_chart(climbed),
        "memory_chart": _memory_chart(climbed),
        "gains_chart": _gains_chart([r for r in climbed if not r.peer]),
        "predicted_said": errors_said([r for r in shown if not r.peer]),
        "predicted_charts": _predicted_charts([r for r in shown if not r.peer]),
        "roof": roofline.section(records),
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
