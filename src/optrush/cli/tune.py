"""tune: measure the plan's best settings of a configuration, and write the fastest proved one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from optrush.cli.options import ConfigFile, Json, Ranks, Set, With, Without, read_run
from optrush.errors import ConfigError
from optrush.hardware import GIB
from optrush.launch import launched

if TYPE_CHECKING:
    from optrush.benchmark.tune import Tuned

SECONDS = {"s": 1, "m": 60, "h": 3600}


def tune(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="YAML to write (default NAME.tuned.yaml)")
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="time limit of all measurements: 90s, 10m, 1h")
    ] = "10m",
    ranks: Ranks = 1,
    batch: Annotated[
        bool,
        typer.Option("--batch", help="tune batch.tokens instead, by the gradient noise scale; writes NAME.batch.yaml"),
    ] = False,
    lr: Annotated[
        bool, typer.Option("--lr", help="tune optim.lr instead, by a race for held-out loss; writes NAME.lr.yaml")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list the settings, their planned speeds and the time needed")
    ] = False,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure the plan's best settings and write the fastest.

    Runs the plan's five best settings and the current one in fresh processes: first the largest step, then a few steps
    that check the gradients against the plain baseline, then timed steps, interleaved. A setting that is wrong, slow or
    out of memory is rejected with its reason. The fastest is written; the current one if no gain exceeds the spread.

    Adapters, optimizers and techniques that change the maths are kept as written. Records are in NAME.tuned/; the same
    command resumes a tuning that was stopped.
    """
    given = read_run(config, set_, with_, without)
    if launched()[1] > 1:
        raise ConfigError("optrush tune", f"a launcher has started {launched()[1]} ranks", "start it alone: --ranks")
    if (batch or lr) and (batch == lr or dry_run or ranks > 1):
        other = "--lr" if batch and lr else "--dry-run" if dry_run else f"--ranks {ranks}"
        found = "one process measures, and nothing is planned"
        raise ConfigError(f"--{'batch' if batch else 'lr'} with {other}", found, "give it alone")
    from optrush.benchmark.runner import ProgressBoard
    from optrush.benchmark.tune import tune_config, tune_number

    if batch or lr:
        kind: Literal["batch", "lr"] = "batch" if batch else "lr"
        place = config.with_name(f"{config.stem}.{kind}.yaml") if out is None else out
        sentence, values = tune_number(given, place, kind, seconds(budget))
        print(json.dumps(values) if as_json else f"{sentence}\nnext: optrush train {place}")
        return

    target = config.with_name(f"{config.stem}.tuned.yaml") if out is None else out
    command, time_s = shlex.join(["optrush", *sys.argv[1:]]), seconds(budget)
    with ProgressBoard() as board:
        tuned = tune_config(given, target, board, budget_s=time_s, ranks=ranks, dry=dry_run, command=command)
    if as_json:
        print(json.dumps(_document(tuned)))
        return
    print("\n".join([*tuned.notes, *_table(tuned)]))
    if dry_run:
        print(f"about {tuned.planned_s / 60:,.1f} min by the plan, {time_s / 60:g} min at most")
        return
    print(tuned.sentence())
    print(f"next: optrush train {target}" + (f" --ranks {ranks}" if ranks > 1 else ""))


def seconds(text: str) -> float:
    """Parse a duration: 90s, 10m, 1h, or a number of seconds.

    Raises:
        ConfigError: not a duration, or shorter than a second.
    """
    number, unit = (text[:-1], SECONDS[text[-1]]) if text[-1:] in SECONDS else (text, 1)
    try:
        duration = float(number) * unit
    except ValueError:
        duration = 0.0
    if not 1 <= duration < 1e6:
        raise ConfigError(f"--budget {text}", "no time", "write 90s, 10m or 1h")
    return duration


def _table(tuned: Tuned) -> Sequence[str]:
    """Format one row per setting: planned and measured speed, the ratio, the peak, the outcome, the changes."""
    head = ("", "planned tok/s", "tok/s", "x", "peak GiB", "")
    rows: list[tuple[str, ...]] = [head]
    for t in tuned.tried:
        peak = t.peak_bytes or t.planned_peak_bytes
        figures = (t.planned_tokens_per_s, t.tokens_per_s)
        speeds = ("-" if speed is None else f"{speed:,.0f}" for speed in figures)
        ratio = "" if t.ratio is None else f"{t.ratio:.2f}"
        outcome = "taken" if t.name == tuned.winner and t.outcome != "planned" else t.outcome
        rows.append((t.name, *speeds, ratio, "-" if peak is None else f"{peak / GIB:.2f}", outcome))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for n, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]
        lines.append("  ".join(cells).rstrip())
        if n and tuned.tried[n - 1].name.startswith("setting"):
            lines.append(f"  {tuned.tried[n - 1].changes}")
    return lines


def _document(tuned: Tuned) -> dict[str, Any]:
    tried = [
        {
            "name": t.name, "changes": t.changes, "with": t.config.with_, "micro_tokens": t.config.batch.micro_tokens,
            "planned_tokens_per_s": t.planned_tokens_per_s, "planned_peak_bytes": t.planned_peak_bytes,
            "tokens_per_s": t.tokens_per_s, "peak_bytes": t.peak_bytes, "ratio": t.ratio, "outcome": t.outcome,
        }
        for t in tuned.tried
    ]  # fmt: skip
    return {
        "winner": tuned.winner, "ratio": tuned.ratio, "proof": tuned.proof, "spent_s": tuned.spent_s,
        "pays_back_s": tuned.pays_back_s, "planned_s": tuned.planned_s, "out": str(tuned.out), "tried": tried,
        "notes": list(tuned.notes),
    }  # fmt: skip
