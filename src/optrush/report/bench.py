"""Write the pages of ladders and runs, and their charts: report.html; speed.png, memory.png; loss.png.

A page depends only on the folder's records, so it can be rewritten at any time. Everything is computed before anything
is written. A record can come from another machine or an older version; missing or invalid figures become None.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrush.benchmark import record
from optrush.errors import ConfigError, DataError
from optrush.files import read_file, write_whole
from optrush.hardware import GIB
from optrush.objectives import unit
from optrush.planner.cost import PARTS
from optrush.report import page, run
from optrush.report.quality import write_quality

PAGE, SPEED, MEMORY, LOSS = "report.html", "speed.png", "memory.png", "loss.png"
KINDS = {
    "cuda_allocated": "the most that torch had allocated on the GPU",
    "rss": "the most that the process held resident",
}
PEAK_BAND = 10.0  # percent: allowed error of a predicted peak, shaded in the chart


def write_bench(folder: Path) -> None:
    """Write report.html, speed.png and memory.png of a bench folder from its records.jsonl.

    Raises:
        DataError: no records, or a line that is not a record; nothing was written.
    """
    if record.is_quality(folder):
        return write_quality(folder)
    records = _records(folder)
    shown, replaced = read_rungs(records)
    title = _joined(records, "ladder") or folder.resolve().name
    cumulative = [r for r in shown if r.mode == "cumulative"]
    text = page.render("bench.html.j2", **_bench(records, shown, title, replaced))
    rows, peak_rows = (_rows(cumulative, bar) for bar in (_speed_bar, _memory_bar))
    axis = "tokens/s, median; whiskers: quartiles; tick: predicted"
    speeds = page.bars(rows, title=f"{title}: tokens/s", axis=axis, width=page.WIDE)
    peaks = page.bars(peak_rows, title=f"{title}: peak memory", axis="GiB; tick: predicted", width=page.WIDE)
    for name, content in ((SPEED, page.png(speeds)), (MEMORY, page.png(peaks)), (PAGE, text)):
        write_whole(folder / name, content)


def write_run(folder: Path, ranks: int | None = None) -> None:
    """Write report.html and loss.png of a training run's folder from its run.yaml and metrics.jsonl.

    Args:
        ranks: number of ranks; None: unknown, and a run of several ranks has no prediction.

    Raises:
        UserError: run.yaml cannot be read, or a line of metrics.jsonl before the last is invalid; nothing was written.
    """
    log = run.load_run(folder)
    text = page.render("run.html.j2", **run.page_content(log, ranks))
    loss = run.loss_curves(log, title=log.name, unit=f"loss, {unit(log.config)}", height=300, width=page.WIDE)
    for name, content in ((LOSS, page.png(loss)), (PAGE, text)):
        write_whole(folder / name, content)


def write_many(folders: Sequence[Path], out: Path) -> None:
    """Write one page with the ladders of several folders side by side, and one row per training run.

    Raises:
        UserError: a folder is neither a ladder's nor a run's, or cannot be read; nothing was written.
    """
    benches, logs = [], []
    for folder in folders:
        if folder_kind(folder) == "bench":
            if record.is_quality(folder):
                found = "a ladder of whole runs, whose page shows it alone"
                raise ConfigError(f"a report of several folders with {folder}", found, f"optrush report {folder}")
            benches.append((folder, _records(folder)))
        else:
            logs.append(run.load_run(folder))
    trained = {"trained": [run.summary(log) for log in logs], **run.overlaid(logs)}
    write_whole(out, page.render("many.html.j2", **_many(benches), **trained))


def folder_kind(folder: Path) -> str:
    """Return "bench" for a ladder's folder, "run" for a training run's.

    Raises:
        ConfigError: it is neither.
    """
    if (folder / record.RECORDS).exists():
        return "bench"
    if (folder / run.RUN).exists():
        return "run"
    missing = "a file" if folder.exists() else "no such folder"
    found = f"it has neither {record.RECORDS} nor {run.RUN}" if folder.is_dir() else missing
    do = "name a folder that `optrush bench` or `optrush train` has written"
    raise ConfigError(f"a report of {folder}", found, do)


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        records = [dataclasses.asdict(r) for r in record.read_records(folder)]
    except UnicodeDecodeError as error:
        path = folder / record.RECORDS
        place = read_file(path)[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{place}", "not UTF-8", "restore the file, or measure again") from None
    if not records:
        raise DataError(f"the records of {folder}", "the file is empty", "measure again: optrush bench")
    return records


# --- a ladder as rungs: safe figures, and comparisons between rungs


@dataclass(frozen=True)
class RungResult:
    """One record of a ladder.

    Attributes:
        key: the name, with the system's name for another system.
        factor, peak_factor: tokens/s and peak, as multiples of the reference rung's.
        scaling, predicted_scaling: scaling efficiency, tokens/s over `ranks` times one rank's; None on one rank.
        longest: tokens of the longest row that trained; `open` if no longer row was tried.
    """

    key: str
    name: str
    peer: str
    mode: str
    since: str
    changes: str
    speed: float | None
    low: float | None
    high: float | None
    peak: float | None
    memory_kind: str
    predicted_peak: float | None
    predicted_speed: float | None
    basis: str
    mfu: float | None
    targets: float | None
    fill: float | None
    waits: float | None
    losses: tuple[float | None, ...]
    proof: str
    verdict: str
    red: tuple[str, ...]
    error: str
    factor: float | None = None
    peak_factor: float | None = None
    since_speed: float | None = None
    ranks: int = 1
    scaling: float | None = None
    predicted_scaling: float | None = None
    case: str = ""
    longest: float | None = None
    open: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def kind(self) -> str:
        """Return the color's name: failed, peer, red, noise, faster, slower, smaller or base."""
        if self.failed:
            return "failed"
        if self.peer:
            return "peer"
        if self.red or self.verdict == "red":
            return "red"
        return self.verdict if self.verdict in ("faster", "slower", "smaller", "noise") else "base"

    @property
    def word(self) -> str:
        """Return the verdict as a word, because a color alone does not suffice."""
        return {"base": self.verdict or "baseline", "peer": "other system"}.get(self.kind, self.kind)

    @property
    def length(self) -> str:
        return page.DASH if self.longest is None else f"{page.plain_number(self.longest)}{' or more' * self.open}"

    @property
    def first_words(self) -> str:
        return self.error.strip().splitlines()[0] if self.error.strip() else ""

    @property
    def quartiles(self) -> str:
        return (
            page.DASH if self.low is None or self.high is None else f"{page.speed(self.low)} to {page.speed(self.high)}"
        )

    @property
    def peak_off(self) -> float | None:
        return page.relative_error(self.predicted_peak, self.peak)

    @property
    def speed_off(self) -> float | None:
        return page.relative_error(self.predicted_speed, self.speed)


def _latest(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return the records by place; a later record of the same rung replaces the first, in its place."""
    return {tuple(page.safe_text(r.get(k)) for k in ("case", "device", "mode", "rung", "peer")): r for r in records}


def read_rungs(records: Sequence[Mapping[str, Any]]) -> tuple[list[RungResult], int]:
    """Return the rungs, each compared with its reference rung, and the number of replaced records."""
    rungs = {place: _rung(row) for place, row in _latest(records).items()}
    # A rung with its own case can still be compared with a rung of another case.
    elsewhere = {(p[1], r.name): r for p, r in rungs.items() if r.mode == "cumulative" and not r.peer}
    compared: list[RungResult] = []
    for place, rung in rungs.items():
        base = rungs.get((*place[:2], "cumulative", rung.since, "")) or elsewhere.get((place[1], rung.since))
        if base is not None and base is not rung:
            factor, peak_factor = page.ratio(rung.speed, base.speed), page.ratio(rung.peak, base.peak)
            rung = dataclasses.replace(rung, factor=factor, peak_factor=peak_factor, since_speed=base.speed)
        alone = next((r for r in reversed(compared) if r.ranks == 1 and not r.peer and r.case == rung.case), None)
        if rung.ranks > 1 and alone is not None:
            shares = [page.ratio(rung.speed, alone.speed), page.ratio(rung.predicted_speed, alone.predicted_speed)]
            measured, planned = (None if share is None else share / rung.ranks for share in shares)
            rung = dataclasses.replace(rung, scaling=measured, predicted_scaling=planned)
        compared.append(rung)
    return compared, len(records) - len(rungs)


def _rung(record: Mapping[str, Any]) -> RungResult:
    """Return a record as a rung's result; missing or invalid figures are None, missing texts ""."""
    get = record.get
    tries = get("tries")
    quartiles = page.numbers(get("tokens_per_s_iqr"))
    low, high = quartiles if len(quartiles) == 2 else (None, None)
    name, peer = page.safe_text(get("rung")) or "unnamed", page.safe_text(get("peer"))
    error = page.safe_text(get("error"), lines=True)
    measured = page.positive(get("tokens_per_s")) if not error else None  # a failed rung has no comparable figure
    reasons = get("red")
    texts: dict[str, Any] = {
        key: page.safe_text(get(key)) for key in ("since", "changes", "memory_kind", "basis", "verdict", "case")
    }
    return RungResult(
        **texts,
        key=f"{name} ({peer})" if peer else name, name=name, peer=peer,
        mode=page.safe_text(get("mode")) or "cumulative",
        speed=measured, low=low, high=high, peak=page.positive(get("peak_bytes")) if measured is not None else None,
        predicted_peak=page.positive(get("predicted_peak_bytes")),
        predicted_speed=page.positive(get("predicted_tokens_per_s")),
        mfu=page.number(get("mfu")), targets=page.positive(get("targets_per_s")), fill=page.number(get("fill")),
        waits=page.number(get("data_wait")), losses=tuple(page.numbers(get("losses"))), proof=_proof(get("proof")),
        red=tuple(page.safe_text(r) for r in reasons) if isinstance(reasons, list | tuple) else (),
        ranks=int(page.positive(get("ranks")) or 1), longest=page.positive(get("longest_seq")),
        open=isinstance(tries, list) and not any(isinstance(t, Mapping) and t.get("error") for t in tries),
        error=error or ("" if measured is not None else "no figure, and no reason given"),
    )  # fmt: skip


def _proof(proof: object) -> str:
    if not isinstance(proof, Mapping):
        return page.DASH
    numerics = page.safe_text(proof.get("numerics")).lower().replace("_", " ") or "numerics not declared"
    worst, allowed = page.number(proof.get("worst")), page.number(proof.get("tolerance"))
    state = "holds" if proof.get("ok") is True else "BROKEN"
    where = f" ({page.safe_text(proof.get('of'))})" if proof.get("of") else ""
    limit = "" if allowed is None else f", allowed {allowed:.2g}"
    figures = "" if worst is None else f"; largest difference {worst:.2g}{where}{limit}"
    cosine = page.number(proof.get("cosine"))
    angle = "" if cosine is None else f"; 1 − cosine of the first gradients {max(0.0, 1 - cosine):.2g}"
    return f"{state}: {numerics}, against “{page.safe_text(proof.get('against'))}”{figures}{angle}"


# --- sentences


def ladder_summary(shown: Sequence[RungResult]) -> str:
    """Return the ladder in one paragraph: first and last figures, counts of all, red and failed rungs."""
    ours = [r for r in shown if not r.peer]
    cumulative = [r for r in ours if r.mode == "cumulative" and not r.failed]
    rungs = page.amount(sum(r.mode == "cumulative" for r in ours), "rung")
    others = {
        "failed": sum(r.failed for r in ours),
        "within the noise": sum(r.kind == "noise" for r in ours),
        "measured without one technique": sum(r.mode != "cumulative" for r in ours),
        "of other systems failed": sum(r.failed for r in shown if r.peer),
    }
    red = f"{sum(_is_red(r) and not r.failed for r in ours)} red"
    tally = ", ".join([rungs, red, *(f"{n} {what}" for what, n in others.items() if n)])
    if not cumulative:
        return f"No rung of the ladder has a figure; {tally}."
    first, last = cumulative[0], cumulative[-1]
    if first is last:
        return f"{page.speed(first.speed)} tokens/s, peak {page.gib(first.peak)} GiB ({first.name}); {tally}."
    if first.longest is not None and last.longest is not None:
        rows = f"From rows of {first.length} to {last.length} tokens"
        return f"{rows}, peak {page.gib(first.peak)} → {page.gib(last.peak)} GiB; {tally}."
    text = (
        f"From {page.speed(first.speed)} to {page.speed(last.speed)} tokens/s: "
        f"{page.times(page.ratio(last.speed, first.speed))}, "
        f"peak {page.gib(first.peak)} → {page.gib(last.peak)} GiB; {tally}."
    )
    best = max(cumulative, key=lambda r: r.speed or 0)
    if best is not last:
        text += f" The fastest rung is “{best.name}” with {page.speed(best.speed)} tokens/s."
    return text


def _is_red(rung: RungResult) -> bool:
    return bool(rung.red) or rung.verdict == "red"


def troubled(shown: Iterable[RungResult]) -> list[RungResult]:
    """Return red rungs, then failed ones."""
    return sorted((r for r in shown if _is_red(r) or r.failed), key=lambda r: not _is_red(r))


def prediction_summary(shown: Sequence[RungResult]) -> str:
    """Return the median and largest errors of the predictions in words."""
    sentences = []
    for what, value in (("Peak memory", "peak_off"), ("Speed", "speed_off")):
        errors = [(abs(e), r.key) for r in shown if (e := getattr(r, value)) is not None]
        if not errors:
            sentences.append(f"{what}: no prediction to compare.")
            continue
        worst, where = max(errors)
        middle = statistics.median(e for e, _ in errors)
        sentences.append(
            f"{what} was predicted to within {page.percent(middle)} in the median and {page.percent(worst)} at worst "
            f"({where}), over {page.amount(len(errors), 'rung')}."
        )
    bases = sorted({r.basis for r in shown if r.basis})
    return " ".join(sentences) + (f" Rates: {', '.join(bases)}." if bases else "")


def loss_summary(shown: Sequence[RungResult]) -> str:
    """Return the largest difference between two rungs at one proof step in words."""
    steps = max((len(r.losses) for r in shown), default=0)
    widest: tuple[float, int, str, str] | None = None
    for step in range(steps):
        here = sorted((x, r.key) for r in shown for x in r.losses[step : step + 1] if x is not None)
        if len(here) > 1 and (widest is None or here[-1][0] - here[0][0] > widest[0]):
            widest = here[-1][0] - here[0][0], step + 1, here[-1][1], here[0][1]
    gaps = sum(x is None for r in shown for x in r.losses)
    lost = f" {page.amount(gaps, 'loss was', 'losses were')} not finite." if gaps else ""
    if widest is None:
        return "There are no two curves to compare." + lost
    if widest[0] == 0:
        return f"All curves are equal to the last digit over {page.amount(steps, 'step')}." + lost
    return (
        f"Over {page.amount(steps, 'proof step')} the losses of two rungs differ by at most {widest[0]:.2g} nats, "
        f"at step {widest[1]}, between “{widest[2]}” and “{widest[3]}”." + lost
    )


# --- comparison with other systems


@dataclass(frozen=True)
class Versus:
    """Another system's rung and ours, measured alternately on the same load; ratios above 1 are in our favor."""

    case: str
    ours: RungResult
    theirs: RungResult

    @property
    def faster(self) -> float | None:
        """Return our tokens/s over theirs."""
        return page.ratio(self.ours.speed, self.theirs.speed)

    @property
    def learns_faster(self) -> float | None:
        """Return our target tokens/s over theirs, the relevant ratio for rows with padding or masked tokens."""
        return page.ratio(self.ours.targets, self.theirs.targets)

    @property
    def smaller(self) -> float | None:
        """Return their peak over ours."""
        return page.ratio(self.theirs.peak, self.ours.peak)


def versus(shown: Sequence[RungResult]) -> list[Versus]:
    """Return each rung of another system with figures, and its reference rung of ours."""
    ours = {r.name: r for r in shown if not r.peer and r.mode == "cumulative"}
    pairs = [(r, ours.get(r.since)) for r in shown if r.peer and not r.failed]
    return [Versus(r.case, mine, r) for r, mine in pairs if mine is not None and not mine.failed]


def versus_summary(pairs: Sequence[Versus]) -> str:
    """Return the smallest ratio of each case in a sentence."""
    least: dict[str, Versus] = {}
    for pair in pairs:
        if pair.faster is None or pair.theirs.red or pair.ours.red:
            continue  # different or wrong work
        if pair.case not in least or pair.faster < (least[pair.case].faster or 0):
            least[pair.case] = pair
    ratios = [f"{case}: ×{pair.faster:.2f} the tokens/s of “{pair.theirs.name}”" for case, pair in least.items()]
    return f"Ours against the fastest other system: {'; '.join(ratios)}." if ratios else ""


# --- the page of a ladder


def _bench(records: Sequence[Mapping[str, Any]], shown: list[RungResult], title: str, replaced: int) -> dict[str, Any]:
    """Return the values that the template of a ladder's page needs."""
    cumulative = [r for r in shown if r.mode == "cumulative"]
    without = [r for r in shown if r.mode != "cumulative"]
    native, ours = ([r for r in some if not r.peer] for some in (shown, cumulative))
    drawn = [r for r in native if any(x is not None for x in r.losses)]
    kinds = sorted({r.memory_kind for r in shown if r.memory_kind})
    dates = sorted({page.safe_text(r["date"])[:10] for r in records if r["date"]})
    return {
        "title": title,
        "case": _joined(records, "case"),
        "device": _machines(records),
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        "verdict": ladder_summary(shown),
        "replaced": f"{page.amount(replaced, 'older record')} of the same rungs not shown." if replaced else "",
        "troubled": troubled(shown),
        "versus": versus(shown),
        "versus_said": versus_summary(versus(shown)),
        "longest": [r for r in shown if r.longest is not None],
        "memory_said": "; ".join(KINDS.get(k, k) for k in kinds),
        "speed_chart": page.bars_svg("Tokens per second of each rung", _rows(cumulative, _speed_bar)),
        "memory_chart": page.bars_svg("Peak memory of each rung", _rows(cumulative, _memory_bar)),
        "scaling_chart": scaling_chart([r for r in shown if r.ranks > 1]),
        "gains_chart": page.bars_svg("Gain of each rung", _rows(ours, _gain_bar), log=True),
        "predicted_said": prediction_summary(native),
        "predicted_charts": _predicted_charts(native),
        "roof": roofline_section(records),
        "without": without,
        "without_chart": page.bars_svg(LOST, _rows(without, _without_bar), unit=" %"),
        "losses_said": loss_summary(drawn),
        "losses_chart": _losses_chart(drawn),
        "rungs": shown,
        "environment": environment(records),
        "commands": list(dict.fromkeys(page.safe_text(r["command"], lines=True) for r in records if r["command"])),
        "sources": list(dict.fromkeys(_source(r["source"]) for r in records)),
    }


def _joined(records: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(text for r in records if (text := page.safe_text(r[key]))))


def _machines(records: Sequence[Mapping[str, Any]]) -> str:
    named = []
    for r in records:
        ranks = page.number(r["ranks"])
        named.append((f"{ranks:,.0f} × " if ranks is not None and ranks > 1 else "") + page.safe_text(r["device"]))
    return ", ".join(dict.fromkeys(filter(None, named)))


def _source(source: object) -> str:
    if not isinstance(source, Mapping):
        return "not recorded"
    commit, digest, state = (
        page.safe_text(source.get("commit")),
        page.safe_text(source.get("digest")),
        source.get("clean"),
    )
    tree = "with changes that are not committed" if state is False else "clean" if state is True else "state not known"
    text = f"commit {commit}, tree {tree}" if commit else "no commit (not run from a checkout)"
    return text + (f"; digest of the package {digest}" if digest else "")


def environment(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the machines and versions of the records, with every distinct value."""
    facts: dict[str, dict[str, None]] = {}
    for r in records:
        if isinstance(r["environment"], Mapping):
            for key, value in r["environment"].items():
                facts.setdefault(page.safe_text(key), {})[page.safe_text(value)] = None
    return {key: "  |  ".join(values) for key, values in facts.items()}


# One bar per rung. The verdict is mostly on speed; next to memory its color would be misleading.

LOST = "What the full configuration loses without one technique"


def _rows(shown: Iterable[RungResult], bar: Callable[[RungResult], page.BarRow]) -> list[page.BarRow]:
    """Return the bar of each rung; a failed rung has an empty bar and its reason."""
    return [
        page.BarRow(r.key, f"failed: {page.cut_text(r.first_words, 60)}", failed=True) if r.failed else bar(r)
        for r in shown
    ]


def _note(rung: RungResult) -> str:
    return f" {rung.kind}" if rung.kind in ("noise", "red", "slower", "smaller") else ""


def _grown(factor: float | None, before: str = " ") -> str:
    return "" if factor is None else f"{before}{page.times(factor)}"


def _speed_bar(r: RungResult) -> page.BarRow:
    text = f"{page.speed(r.speed)}{_grown(r.factor)}{_note(r)}"
    return page.BarRow(r.key, text, ((0, r.speed or 0, r.kind),), r.low, r.high, r.predicted_speed)


def _memory_bar(r: RungResult) -> page.BarRow:
    predicted = None if r.predicted_peak is None else r.predicted_peak / GIB
    if r.peak is None:
        return page.BarRow(r.key, "not measured", predicted=predicted)
    color = r.kind if r.kind in ("red", "peer") else "base"
    text = f"{page.gib(r.peak)} GiB{_grown(r.peak_factor)}"
    return page.BarRow(r.key, text, ((0, r.peak / GIB, color),), predicted=predicted)


def _gain_bar(r: RungResult) -> page.BarRow:
    begin = r.since_speed if r.factor is not None and r.since_speed else r.speed
    text = f"{page.times(r.factor)}{_note(r)}" if r.factor is not None else "begins here"
    return page.BarRow(r.key, text, ((begin, r.speed, r.kind),) if begin and r.speed else ())


def _without_bar(r: RungResult) -> page.BarRow:
    if r.factor is None:
        return page.BarRow(r.key, page.percent(None))
    change = 100 * (r.factor - 1)
    color = r.kind if r.kind in ("red", "noise") else "slower" if change < 0 else "faster"
    text = f"{page.percent(change, signed=True)}{_grown(r.peak_factor, ', peak ')}"
    return page.BarRow(r.key, text, ((0, change, color),))


def _scaling_bar(r: RungResult) -> page.BarRow:
    share, planned = (None if x is None else 100 * x for x in (r.scaling, r.predicted_scaling))
    text = f"{page.amount(r.ranks, 'rank')}, {page.percent(share)}"
    return page.BarRow(r.key, text, () if share is None else ((0.0, share, "base"),), predicted=planned)


def scaling_chart(shown: Sequence[RungResult]) -> Markup | None:
    """Return the chart of scaling efficiency; None without such figures."""
    rows = _rows(shown, _scaling_bar)
    return (
        page.bars_svg("Share of ideal scaling of each rung", rows, unit=" %") if any(r.scaling for r in shown) else None
    )


def _predicted_charts(shown: Sequence[RungResult]) -> list[tuple[str, Markup]]:
    """Return the charts of peak and speed; a rung without a prediction has text in place of a bar."""
    peaks = [(r.peak_off, f"{page.gib(r.predicted_peak)}/{page.gib(r.peak)}") for r in shown]
    speeds = [(r.speed_off, f"{page.speed(r.predicted_speed)}/{page.speed(r.speed)}") for r in shown]
    drawn = []
    for heading, errors, band in (("Peak memory", peaks, PEAK_BAND), ("Tokens per second", speeds, None)):
        rows = []
        for r, (error, both) in zip(shown, errors):
            if error is None:
                rows.append(page.BarRow(r.key, "failed" if r.failed else "no prediction"))
                continue
            pieces = ((0, error, "faster" if abs(error) <= PEAK_BAND else "slower"),)
            rows.append(page.BarRow(f"{r.key} ({both})", page.percent(error, signed=True), pieces))
        if any(row.pieces for row in rows):
            title = f"{heading}: prediction against measurement"
            drawn.append((heading, page.bars_svg(title, rows, unit=" %", band=band)))
    return drawn


def _losses_chart(shown: Sequence[RungResult]) -> Markup:
    names = (r.key + " (all but one)" * (r.mode != "cumulative") for r in shown)
    series = [page.Series(name, list(enumerate(r.losses, 1))) for name, r in zip(names, shown)]
    description = f"{len(series)} curves: {', '.join(s.name for s in series)}"
    return page.inline_svg(page.curves(series, axis="step", height=260), "Loss at the proof's steps", description)


# --- several machines


def _many(benches: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """Return machines and ladders for a page that compares several folders side by side."""
    machines: list[dict[str, Any]] = []  # one per ladder and folder; its letter has a color in the charts
    for folder, records in benches:
        for ladder in dict.fromkeys(page.safe_text(r["ladder"]) for r in records):
            here = [r for r in records if page.safe_text(r["ladder"]) == ladder]
            shown, n = read_rungs(here)[0], len(machines)
            machines.append({
                "letter": chr(ord("A") + n % 26) + ("" if n < 26 else str(n // 26)), "color": f"s{n % page.SERIES}",
                "folder": page.safe_text(folder.resolve().name), "device": _machines(here), "ladder": ladder,
                "verdict": ladder_summary(shown), "troubled": troubled(shown), "environment": environment(here),
                "rungs": {r.name: r for r in shown if r.mode == "cumulative" and not r.peer},
            })  # fmt: skip
    ladders = []
    for name in dict.fromkeys(m["ladder"] for m in machines):
        same = [m for m in machines if m["ladder"] == name]
        names = list(dict.fromkeys(r for m in same for r in m["rungs"]))
        ladders.append({"name": name, "machines": same, "names": names, "chart": _side_by_side(name, names, same)})
    keys = list(dict.fromkeys(k for m in machines for k in m["environment"]))
    return {"machines": machines, "ladders": ladders, "environment_keys": keys}


def _side_by_side(ladder: str, names: Sequence[str], machines: Sequence[Mapping[str, Any]]) -> Markup:
    rows = []
    for name in names:
        for n, m in enumerate(machines):
            label = f"{page.cut_text(name, 56)} · {m['letter']}" if n == 0 else m["letter"]
            r = m["rungs"].get(name)
            if r is None or r.failed or r.speed is None:
                rows.append(
                    page.BarRow(label, "not measured" if r is None else page.cut_text(f"failed: {r.first_words}", 34))
                )
            else:
                rows.append(page.BarRow(label, f"{page.speed(r.speed)}{_note(r)}", ((0, r.speed, m["color"]),)))
    return page.bars_svg(f"Tokens per second, ladder {ladder}", rows)


# --- A step against its device's ceiling
#
# The ceiling is computed: the rung's planned work at the rates that the device reaches with each kind of work alone
# (`optrush calibrate`), or without them at the rates of its datasheet. For a profiled rung each part is compared with
# it; for other rungs the whole step, where the remainder is work below its ceiling, work that the plan does not count,
# and gaps.


LEFT, GAPS = "remainder", "gaps"  # gaps: the device was idle
NEAR = 1.1  # ratio above which profiled steps do not represent the timed ones


@dataclass(frozen=True)
class Roof:
    """One rung: seconds of its step, of each part at the ceiling and, if it was profiled, of each measured part.

    Attributes:
        took: measured seconds by part, with gaps; None if the rung was not profiled.
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
        """Return the speed of the step in percent of the ceiling."""
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
        """Return whether attention ran without a kernel, as matmuls and elementwise operators."""
        return self.took is not None and self.took["attention"] == 0 < self.parts["attention"]

    def part_reached(self, part: str) -> float | None:
        """Return the speed of a part in percent of its ceiling; None if the ceiling is unknown."""
        took, least = (self.took or {}).get(part), self.parts.get(part)
        mixed = self.scored and part in ("products", "attention", "elementwise")
        return 100 * least / took if took and least and not mixed and self.apart is None else None


def roofs(records: Sequence[Mapping[str, Any]]) -> list[Roof]:
    """Return the roofs of all rungs with steps and a ceiling; a later record of the same rung counts."""
    return [roof for record in _latest(records).values() if (roof := _roof(record)) is not None]


def _roof(record: Mapping[str, Any]) -> Roof | None:
    """Return the roof of a rung; None if it failed, or has no step times or no ceiling."""
    given, repeats = record.get("ceiling_s"), record.get("step_s")
    repeats = repeats if isinstance(repeats, list) else []
    steps = [s for times in repeats if isinstance(times, list) for s in page.numbers(times)]
    durations = [s for s in map(page.positive, steps) if s is not None]
    if record.get("error") or not durations or not isinstance(given, Mapping):
        return None
    parts = {part: page.positive(given.get(part)) or 0.0 for part in PARTS}
    if not any(parts.values()):
        return None
    seen = record.get("parts_s")
    read = {part: page.number(seen.get(part)) for part in (*PARTS, GAPS)} if isinstance(seen, Mapping) else {}
    took = {part: s for part, s in read.items() if s is not None and s >= 0}
    name = page.safe_text(record.get("rung")) or "unnamed"
    step_s, note = statistics.median(durations), page.safe_text(record.get("parts_note"))
    complete = len(took) == len(PARTS) + 1 and any(took.values())
    return Roof(name, page.safe_text(record.get("basis")), step_s, parts, took if complete else None, note)


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
        "legend": [(page.swatch(_part_color(part)), part) for part in parts],
        "parts": parts,
        "rows": shown,
        "notes": [f"{r.name}: {r.note}" for r in shown if r.note],
        "apart": [f"{r.name} ({r.apart:.2f} times)" for r in shown if r.apart is not None],
        "scored": [r.name for r in shown if r.scored],
        "above": [r.name for r in shown if r.left_s < 0],
    }


def _parts_chart(shown: Sequence[Roof], profiled: bool) -> Markup:
    """Draw one bar per rung, divided into its parts in percent of the step.

    Without a profile, the bar has the parts at the ceiling, then the remainder. With a profile, it has the measured
    parts, pale beyond a known ceiling, then the gaps.
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
        rows.append(
            page.BarRow(roof.name, f"{page.percent(roof.reached)}, {page.milliseconds(roof.step_s)}", tuple(pieces))
        )
        descriptions.append(f"{roof.name}: " + ", ".join(f"{part} {page.percent(s)}" for part, s in shares.items()))
    step = (
        "as they took, in percent of the profiled step"
        if profiled
        else "at the ceiling, in percent of the measured step"
    )
    return page.inline_svg(page.bars(rows, unit=" %"), f"Parts of each rung's step {step}", "; ".join(descriptions))


def _part_color(part: str) -> str:
    return "grid" if part in (LEFT, GAPS) else f"s{PARTS.index(part)}"
