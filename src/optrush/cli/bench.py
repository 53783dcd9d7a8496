"""Measure the rungs of a ladder (`optrush bench`), and write reports from records (`optrush report`)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.cli.options import ConfigFile, Json, Set, With, Without, read_run
from optrush.errors import ConfigError
from optrush.hardware import GIB
from optrush.launch import launched

if TYPE_CHECKING:
    from optrush.benchmark.runner import PlannedRung


def bench(
    config: ConfigFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="folder for the records and the report; required without --dry-run"),
    ] = None,
    ladder: Annotated[
        str,
        typer.Option(
            "--ladder",
            metavar="NAME|FILE",
            help="config, single-gpu, gpus, memory, long-context, peers, data, quality, rl, cpu-demo, or a YAML file",
        ),
    ] = "config",
    cumulative_only: Annotated[
        bool, typer.Option("--cumulative-only", help="skip the rungs that remove one technique")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="processes per rung, interleaved; quality: seeds")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=1, metavar="SECONDS", help="time limit of one process")
    ] = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            min=1,
            help="quality: runs in parallel over all GPUs; each run of the first seed has its own GPU",
        ),
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="continue a bench that was stopped")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the rungs and their plans; write nothing")] = False,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure optimisations one by one.

    Each rung of the ladder adds one technique to the previous rung and runs in fresh processes: first a few steps on
    the same documents, to check that it learns the same, then timed steps. Then the last rung runs without each of its
    techniques. A failed rung is recorded, the others run, and the exit code is 1. A ladder with `quality:` trains whole
    runs over several seeds instead, and compares their held-out losses.

    The ladder `config` adds the techniques of CONFIG one by one. The other ladders have their own techniques and take
    the model and the data from CONFIG. Nothing is written to CONFIG's `output`. --dry-run lists the rungs, their
    planned speeds and missing requirements; the exit code is 1 if one is missing.
    """
    run = read_run(config, set_, with_, without)
    if launched()[1] > 1:
        raise ConfigError("optrush bench", f"a launcher has started {launched()[1]} ranks", "start it alone")
    from optrush.benchmark.ladder import find_ladder
    from optrush.benchmark.runner import ProgressBoard, plan_rungs, print_table, run_ladder

    written = find_ladder(ladder, run)
    if dry_run:
        if resume or limit is not None or at_once > 1:
            option = "--resume" if resume else "--limit" if limit is not None else "--at-once"
            raise ConfigError(f"--dry-run with {option}", "nothing is measured", f"leave {option} out")
        planned, times = plan_rungs(written, run, ProgressBoard(), repeats=repeats, cumulative_only=cumulative_only)
        if as_json:
            print(json.dumps([_planned_document(p) for p in planned]))
        else:
            print("\n".join(_planned_lines(planned, times)))
        raise typer.Exit(int(any(p.refused for p in planned)))
    if out is None:
        raise ConfigError("optrush bench", "no folder for its records", "add --out DIR, or --dry-run")
    with ProgressBoard() as board:
        records = run_ladder(
            written, run, out, board,
            repeats=repeats, cumulative_only=cumulative_only, limit_s=limit, resume=resume, at_once=at_once,
            command=shlex.join(["optrush", *sys.argv[1:]]),
        )  # fmt: skip
    print_table(records)
    print(json.dumps([json.loads(r.to_json()) for r in records]) if as_json else out / "report.html")
    raise typer.Exit(int(any(r.error for r in records)))


def _planned_lines(planned: Sequence[PlannedRung], times: int) -> list[str]:
    """Format the rungs with the plan's figures, and below each its changes or the reason of its rejection."""
    speeds = {p.rung.name: p.tokens_per_s for p in planned}
    width = max(len(p.rung.name) for p in planned)
    lines = [f"{'rung':<{width}}  ranks  planned tok/s  x since  planned GiB"]
    for rung, speed, peak, refused in planned:
        before = speeds.get(rung.since or "")
        ratio = f"{speed / before:.2f}" if speed and before else ""
        cells = (f"{speed:,.0f}" if speed else "-", ratio, f"{peak / GIB:.2f}" if peak else "-")
        lines.append(f"{rung.name:<{width}}  {rung.ranks:>5}  {cells[0]:>13}  {cells[1]:>7}  {cells[2]:>11}")
        reason = "; ".join(" ".join(part.split()) for part in (refused or "").splitlines())
        lines.append(f"  refused: {reason}" if refused else f"  {rung.changes}")
    ready = sum(p.refused is None for p in planned)
    return [*lines, f"{ready} rung{'s' * (ready != 1)}, {times} process{'es' * (times != 1)} each"]


def _planned_document(planned: PlannedRung) -> dict[str, Any]:
    rung = planned.rung
    return {
        "rung": rung.name, "since": rung.since, "ranks": rung.ranks, "changes": rung.changes, "with": rung.config.with_,
        "predicted_tokens_per_s": planned.tokens_per_s, "predicted_peak_bytes": planned.peak_bytes,
        "refused": planned.refused,
    }  # fmt: skip


# --- report


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="folders that `optrush bench` or `optrush train` wrote")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="the page to write for several folders (default report.html)"),
    ] = None,
) -> None:
    """Write report.html from the records.

    One folder: its page and charts are rewritten in place. Several folders: one page compares them, ladders rung by
    rung and training runs side by side. A page needs no network and has no script.
    """
    from optrush.report import bench as pages

    kinds = [pages.folder_kind(folder) for folder in folders]
    if len(folders) == 1:
        if out is not None:
            raise ConfigError(
                f"--out {out}", "one folder; its report is in the folder", "leave --out out, or name several"
            )
        folder = folders[0]
        (pages.write_bench if kinds[0] == "bench" else pages.write_run)(folder)
        print(folder / pages.PAGE)
        return
    page = Path(pages.PAGE) if out is None else out
    if page.suffix != ".html" or page.is_dir():
        raise ConfigError(f"--out {page}", "no name of a page", "name a file that ends in .html")
    if not page.absolute().parent.is_dir():
        raise ConfigError(f"--out {page}", f"no folder {page.parent}", "create it, or use another")
    pages.write_many(folders, page)
    print(page)
