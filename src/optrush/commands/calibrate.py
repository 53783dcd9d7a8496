"""calibrate: what this machine really does in a second, for the plan."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.commands.options import Json, Set, With, Without, read_run
from optrush.errors import ConfigError
from optrush.launch import launched

if TYPE_CHECKING:
    from optrush.planner.calibration import Calibration

EVERY_S = 10.0  # between two lines, where there is no terminal
UNSTEADY = 0.10  # spread of a rate over the rounds, in the median, from which people are told


def calibrate(
    config: Annotated[
        Path | None, typer.Argument(help="a run's YAML: its shapes, rows and micro-batch", metavar="[CONFIG]")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=100, help="of load, shared over the shapes; a little more in all")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="write it to this file too; it must be new")
    ] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure this machine's rates, for the plan.

    Matrix products at the model's shapes, attention, copies, the link to the host and the time to start an operator:
    about a minute under load, with nothing else running on the device. Without CONFIG: the shapes of Llama 1B and 8B
    on a GPU, of the built-in model on a CPU.

    The result is kept for this device, this torch and this driver, in place of an older one. `optrush plan` and the
    predictions of `optrush bench` take it from there, and say so (basis: calibrated).
    """
    run = None if config is None else read_run(config, set_, with_, without)
    if config is None and (set_ or with_ or without):
        raise ConfigError("--set, --with or --without", "no CONFIG to change", "name a CONFIG")
    if launched()[1] > 1:
        raise ConfigError("optrush calibrate", f"a launcher has started {launched()[1]} ranks", "start it alone")
    from optrush.planner import calibration
    from optrush.planner.calibrate import calibrate as measure
    from optrush.planner.calibrate import here, loads

    if out is not None and out.exists():
        raise ConfigError(f"--out {out}", "this file exists", "take another name")
    for folder in (calibration.folder(), *(() if out is None else (out.absolute().parent,))):
        calibration.check(folder)  # before a minute is spent
    device = here()
    with _Bar() as bar:
        found = measure(loads(run, device), device, seconds, bar.tell)
    file = calibration.path(found)
    for place in (file, *(() if out is None else (out,))):
        calibration.write(found, place)
    print(json.dumps(dataclasses.asdict(found)) if as_json else "\n".join(_text(found)))
    print(f"kept in {file}", file=sys.stderr)


class _Bar:
    """A bar with the time that is left; off a terminal a line every few seconds."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        from optrush.console import err

        columns = (SpinnerColumn(), BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.err = err
        self.progress = Progress(*columns, console=err, transient=True) if sys.stderr.isatty() else None
        self.task = None if self.progress is None else self.progress.add_task("", total=None)
        self.begun = self.said = time.monotonic()

    def __enter__(self) -> _Bar:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def tell(self, done: int, steps: int, what: str) -> None:
        now = time.monotonic()
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, total=steps, completed=done, description=what)
        elif done and now - self.said > EVERY_S:
            self.said = now
            left = (now - self.begun) / done * (steps - done)
            self.err.print(f"calibrating: {what}  ETA {left:.0f} s", markup=False)


def _text(c: Calibration) -> list[str]:
    """For people: a row a shape, its three products beside each other."""
    lines = [f"{c.device}, torch {c.torch}" + (f", driver {c.driver}" if c.driver else ""), ""]
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for p in c.products:
        key = (p.dtype, f"{p.part} {p.inputs} -> {p.outputs}")
        rows.setdefault(key, {})[p.direction] = p.flop_s
    lines.append(f"{'TFLOP/s':<10} {'':<24} {'forward':>9} {'input':>9} {'weight':>9}")
    for (dtype, name), rates in rows.items():
        figures = (f"{rates[d] / 1e12:9.3g}" for d in ("forward", "input", "weight"))
        lines.append(f"{dtype:<10} {name:<24} {' '.join(figures)}")
    lines += ["", f"{'TFLOP/s':<10} {'causal attention':<24} {'forward':>9} {'backward':>9}"]
    heads: dict[tuple[Any, ...], dict[str, float]] = {}
    for a in c.attention:
        key = (a.dtype, f"T {a.seq}, {a.heads}/{a.kv_heads} heads of {a.head_width}")
        heads.setdefault(key, {})[a.direction] = a.flop_s
    for (dtype, name), rates in heads.items():
        lines.append(f"{dtype:<10} {name:<24} {rates['forward'] / 1e12:9.3g} {rates['backward'] / 1e12:9.3g}")
    lines += ["", f"copy within memory, read and written  {c.copy_bytes_s / 1e9:9.1f} GB/s"]
    if c.to_device_bytes_s is not None and c.from_device_bytes_s is not None:
        up, down = c.to_device_bytes_s / 1e9, c.from_device_bytes_s / 1e9
        lines.append(f"from and to pinned memory of the host {up:9.1f} and {down:.1f} GB/s")
    lines.append(f"to start an operator                  {c.launch_s * 1e6:9.1f} us")
    spread = statistics.median([p.spread for p in c.products] + [a.spread for a in c.attention])
    if spread > UNSTEADY:
        lines += ["", f"unsteady: rates differ by {spread:.0%} between rounds, in the median. Is the device in use?"]
    return lines
