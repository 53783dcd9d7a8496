"""Collect from the committed records what each technique gains alone: rungs that differ from the rung they are compared
with in this technique only, or where it replaces another, as one optimizer another. table.py writes the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from optrush.benchmark import ladder
from optrush.benchmark.record import QualityRecord, Record, is_quality, read_quality, read_records
from optrush.config import Config

GIB = 2**30
NONE = "No rung of a committed climb differs from another in it alone."
# Names of older records: the technique and the option that the name is today, and the old option that it takes over.
OLDER: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "fused-block": ("fused-kernels", {"mlp": "triton"}, {"impl": "mlp"}),
    "fused-norm": ("fused-kernels", {"norm": True}, {}),
    "fused-rotation": ("fused-kernels", {"rope": True}, {}),
    "max-autotune": ("compile", {"autotune": True}, {}),
    "stochastic-rounding": ("bf16", {"rounding": "stochastic"}, {}),
    "kahan": ("bf16", {"rounding": "kahan"}, {}),
}


def pages(results: Path, names: list[str], link: str) -> dict[str, str]:
    """Return the measured part of each technique's page.

    Args:
        link: path of `results`, relative to the page.
    """
    return {name: "\n".join(_table(rows, link)) for name, rows in _found(results, names).items()}


def cards(results: Path, names: list[str]) -> dict[str, str]:
    """Return each technique's largest gain on a GPU, and what it changed of the held-out loss, in one line."""
    quality = dict[str, str]()
    for folder in sorted(path.parent for path in results.glob("*/records.jsonl") if is_quality(path.parent)):
        records = {r.rung: r for r in read_quality(folder)}
        for r in records.values():
            since = records.get(r.since or "")
            if since is None or r.difference is None or r.margin is None:
                continue
            name = alone(replace(since, config={**since.config, "optim": r.config["optim"]}), r)  # each has its rate
            if name not in since.config["with"]:
                text = f"held-out loss changed by {r.difference:+.4f} ± {r.margin:.4f} ({r.config['model']['path']})"
                quality.setdefault(name, text)
    found = _found(results, names)
    gains = {name: [r for r in rows if r[2].device != "cpu" and not r[3]] for name, rows in found.items()}
    return {
        name: "; ".join([*map(_gain, sorted(rows, key=_factor)[-1:]), *filter(None, [quality.get(name)])])
        or "no record of it alone"
        for name, rows in gains.items()
    }


def _factors(before: Record, after: Record) -> tuple[float, float]:
    assert before.tokens_per_s and after.tokens_per_s and before.peak_bytes and after.peak_bytes
    if after.longest_seq and before.longest_seq:
        return after.longest_seq / before.longest_seq, before.peak_bytes / after.peak_bytes
    return after.tokens_per_s / before.tokens_per_s, before.peak_bytes / after.peak_bytes


def _factor(row: tuple[Path, Record, Record, bool]) -> float:
    return max(_factors(*row[1:3]))


def _gain(row: tuple[Path, Record, Record, bool]) -> str:
    _, before, after, _ = row
    assert before.tokens_per_s and after.tokens_per_s and before.peak_bytes and after.peak_bytes
    peak = f"peak {before.peak_bytes / GIB:.1f} → {after.peak_bytes / GIB:.1f} GiB"
    if after.longest_seq:
        return f"longest row {before.longest_seq:,} → {after.longest_seq:,}, {peak} ({after.case})"
    speed = f"{before.tokens_per_s:,.0f} → {after.tokens_per_s:,.0f} tokens/s"
    return f"{speed} (x {after.tokens_per_s / before.tokens_per_s:.2f}), {peak} ({after.case}, T={after.seq:,})"


def _found(results: Path, names: list[str]) -> dict[str, list[tuple[Path, Record, Record, bool]]]:
    """Return folder, records before and after, and whether it was taken out, of rungs that differ in it alone."""
    found: dict[str, list[tuple[Path, Record, Record, bool]]] = {name: [] for name in names}
    for folder in sorted(path.parent for path in results.glob("*/records.jsonl") if not is_quality(path.parent)):
        records = [renamed(r) for r in read_records(folder)]
        by_name = {r.rung: r for r in records}
        for r in records:
            since = by_name.get(r.since or "")
            if since is None or r.peer or since.peer or not all(x.tokens_per_s and x.peak_bytes for x in (r, since)):
                continue
            taken = r.mode == "without"
            before, after = (r, since) if taken else (since, r)
            if (name := alone(before, after)) in found:
                found[name].append((folder, before, after, taken))
    return found


def renamed(r: Record) -> Record:
    """Return a record with the names that its techniques have today."""
    older, techniques = r.config.get("with", {}), dict[str, dict[str, Any]]()
    if "fused-block" not in older and {"fused-norm", "fused-rotation"} & older.keys():
        techniques["fused-kernels"] = {"mlp": "none"}
    for name, given in older.items():
        new, options, taken = OLDER.get(name, (name, {}, {}))
        options = {**options, **{taken.get(key, key): value for key, value in given.items()}}
        techniques[new] = {**techniques.get(new, {}), **options}
    return replace(r, config={**r.config, "with": techniques})


def alone(before: Record | QualityRecord, after: Record | QualityRecord) -> str:
    """Return the one technique that `after` adds or configures differently; "" if there is another difference.

    With one added, another may be removed or configured differently: some exclude each other.
    """
    old, new = before.config.get("with", {}), after.config.get("with", {})
    others = [ladder.flat_values(Config.model_validate(r.config)) for r in (before, after)]
    if getattr(after, "longest_seq", None):  # each at its own longest row
        others = [{k: v for k, v in o.items() if k not in ladder.LOAD_KEYS} for o in others]
    more, gone = [n for n in new if n not in old], [n for n in old if n not in new]
    otherwise = [n for n in new if n in old and old[n] != new[n]]
    if others[0] != others[1]:
        return ""
    if len(more) == 1 and len(gone + otherwise) <= 1:
        return more[0]
    return otherwise[0] if len(otherwise) == 1 and not more + gone else ""


def _table(rows: list[tuple[Path, Record, Record, bool]], link: str) -> Iterator[str]:
    if not rows:
        yield NONE
        return
    yield "| record | load | changes | tokens/s: before | after | x | peak GiB: before | after | verdict |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for folder, before, after, taken in rows:
        assert before.tokens_per_s and after.tokens_per_s and before.peak_bytes and after.peak_bytes
        changes = ladder.differences(*(Config.model_validate(_plain(r)) for r in (before, after)))
        load = f"{after.case}, T={after.seq:,}" + (", a CPU" if after.device == "cpu" else "")
        speeds = (
            f"{before.tokens_per_s:,.0f} | {after.tokens_per_s:,.0f} | {after.tokens_per_s / before.tokens_per_s:.2f}"
        )
        if after.longest_seq:  # speeds of other lengths, and of first steps
            load, speeds = f"{after.case}, longest row {before.seq:,} -> {after.seq:,}", "| |"
        changes, verdict = (f"{changes} to all the others", "") if taken else (changes, after.verdict)
        peaks = f"{before.peak_bytes / GIB:.2f} | {after.peak_bytes / GIB:.2f}"
        row = f"| {load} | {changes} | {speeds} | {peaks} | {verdict} |"
        yield f"| [{folder.name.removeprefix('h200-')}]({link}/{folder.name}/records.jsonl) {row}"


def _plain(r: Record) -> dict[str, object]:
    """Return the rung's configuration without its row length, to compare the rest."""
    return {**r.config, "batch": {}} if r.longest_seq else r.config
