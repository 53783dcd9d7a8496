"""plan: what fits, how fast, what would be better, and what another model would cost; in less than a second."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.commands.options import Config, Json, Set, With, Without, read_run
from optrush.errors import ConfigError, ConflictError, NeedsError, UserError

if TYPE_CHECKING:
    from optrush.config import Run
    from optrush.planner.search import Found, Prediction, Setting

GIB = 2**30
BAR = 24  # characters of the longest bar
SMALL = 0.01  # of the peak: lines below are shown as one


def plan(
    config: Config,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="auto (this machine), h200, 2xh200, 4090, cpu, ...")
    ] = "auto",
    keep_maths: Annotated[
        bool, typer.Option("--keep-maths", help="leave out techniques that change what is computed")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="write the best setting as a YAML that train takes")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="with --out: overwrite the file")] = False,
    as_json: Json = False,
) -> None:
    """Predict memory and speed, and find better settings.

    Nothing is built and nothing is written, but --out FILE. Memory is shown by line at the moment of its peak. Speed
    rests on the rates that `optrush calibrate` measured on the device; without them on its datasheet and on the share
    of it that such work reached on one H200, and says so.
    """
    run = read_run(config, set_, with_, without)
    from optrush.planner import search as planner

    if out is not None and out.exists() and not force:
        raise ConfigError(f"--out {out}", "this file exists", "take another name, or add --force")
    prediction: Prediction | None = None
    refused: UserError | None = None
    try:
        prediction = planner.predict(run, hardware)
    except (ConfigError, ConflictError, NeedsError) as error:  # as configured it cannot run there; another may
        refused = error  # and what no setting mends, the search meets again
    found = planner.search(run, hardware, keep_maths=keep_maths)
    if as_json:
        print(json.dumps(_document(prediction, refused, found)))
    else:
        print("\n".join(_text(run, hardware, prediction, refused, found)))
    if out is not None:
        _write(run, hardware, found, out)


def _write(run: Run, name: str, found: Found, out: Path) -> None:
    from optrush import config, hardware

    if not found.settings:
        raise ConfigError(f"--out {out}", "no setting fits", "take a smaller model, shorter rows or other hardware")
    _, ranks = hardware.named(name)
    launch = f"optrush train {out}" + (f" --ranks {ranks}" if ranks > 1 else "")
    try:
        out.write_text(f"# {launch}\n{config.dump(found.settings[0].over(run))}")
    except OSError as error:
        raise ConfigError(f"--out {out}", f"{error.strerror}", "give a path that can be written") from None
    print(f"the best setting: {launch}", file=sys.stderr)


def _document(prediction: Prediction | None, refused: UserError | None, found: Found) -> dict[str, Any]:
    """The document of --json: the prediction's fields, null where it was refused, and the alternatives."""
    from optrush.planner.search import Prediction

    names = [f.name for f in dataclasses.fields(Prediction)]
    own = dict.fromkeys(names) if prediction is None else dataclasses.asdict(prediction)
    return {
        **own,
        "fits": prediction is not None and prediction.fits,
        "refused": None if refused is None else {"asked": refused.asked, "found": refused.found, "do": refused.do},
        "alternatives": [
            {
                "with": {k: dict(v) for k, v in s.with_.items()},
                "micro_rows": s.micro_rows,
                "peak_bytes": s.prediction.peak_bytes,
                "tokens_per_s": s.prediction.tokens_per_s,
                "fits": s.prediction.fits,
            }
            for s in found.settings
        ],
        "tried": found.tried,
        "lost": [{"what": what, "why": why} for what, why in found.lost],
    }


def _text(
    run: Run,
    hardware: str,
    prediction: Prediction | None,
    refused: UserError | None,
    found: Found,
) -> list[str]:
    """For people: the configuration's memory as a bar, its speed, better settings, other models."""
    from optrush.planner import search as planner

    lines = ["as configured"]
    if prediction is not None:
        lines += memory(prediction)
        lines += ["", *work(prediction)]
    if refused is not None:
        lines += [f"  {text}" for text in str(refused).splitlines()]
    lines += ["", f"the best of {found.tried} sets of techniques that go together, each with its micro-batch"]
    for place, setting in enumerate(found.settings, 1):
        lines.append(f"  {place}. {setting.title}")
        lines.append(f"     {_short(setting)}")
    if not found.settings:
        return [*lines, "  none fits: take a smaller model, shorter rows or other hardware"]
    lines += ["", "beside the best"]
    width = max((len(what) for what, _ in found.lost), default=0)
    lines += [f"  {what:<{width}}  {why}" for what, why in found.lost]
    lines += ["", "the same on models of the family"]
    rows = list(planner.family(run, hardware, found.settings[0]))
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, parameters, other in rows:
        cost = "does not fit" if other is None else f"{_short(other)}{_hours(other)}"
        lines.append(f"  {name:<{width}} {parameters / 1e9:6.2f} G parameters  {cost}")
    return lines


def memory(p: Prediction) -> list[str]:
    """The lines at the peak, longest first, as bars; and where the bytes of a parameter go."""
    kinds = " + ".join(f"{kind} {size:.3g}" for kind, size in p.a_parameter.items())
    total = sum(p.a_parameter.values())
    room = ""
    if p.capacity_bytes is not None and p.room_bytes is not None:
        room = f" of {p.room_bytes / GIB:.1f} usable ({p.capacity_bytes / GIB:.1f} in all)"
    fits = "fits" if p.fits else "does NOT fit"
    lines = [
        f"  {p.device}: {p.peak_bytes / GIB:.2f} GiB{room}, {fits}; the peak lies in: {p.phase}",
        f"  {p.parameters / 1e9:.3f} G parameters x {total:.3g} bytes ({kinds})",
    ]
    if p.host_bytes:
        lines.append(f"  and {p.host_bytes / GIB:.2f} GiB of pinned host memory")
    shown = sorted((i for i in p.lines if i.bytes >= SMALL * p.peak_bytes), key=lambda i: -i.bytes)
    rest = p.peak_bytes - sum(i.bytes for i in shown)
    width = max((len(i.name) for i in shown), default=0)
    for item in shown:
        bar = "█" * max(1, round(BAR * item.bytes / shown[0].bytes))
        lines.append(f"  {item.name:<{width}} {item.bytes / GIB:7.2f} {bar:<{BAR}} {item.reason}")
    return [*lines, f"  {'smaller lines':<{width}} {rest / GIB:7.2f}"]


def work(p: Prediction) -> list[str]:
    """Where the time of a step goes, longest first; what host and link do lies beside what the device does."""
    lines = [f"  speed: {_speed(p)}", *([f"  rates: {p.rates_from}"] if p.rates_from else [])]
    total = sum(e.seconds for e in p.work if e.where == "device")
    shown = sorted((e for e in p.work if e.seconds >= 2 * SMALL * total), key=lambda e: -e.seconds)
    for e in shown:
        did = ", ".join(
            text
            for amount, text in (
                (e.flop, f"{e.flop / 1e12:,.2f} TFLOP"),
                (e.bytes, f"{e.bytes / 1e9:,.1f} GB {'sent' if e.where == 'link' else 'moved'}"),
                (e.launches, f"{e.launches:,.0f} operators started"),
            )
            if amount
        )
        beside = "" if e.where == "device" else f" ({e.where})"
        lines.append(f"  {e.name + beside:<22} {e.seconds * 1e3:9.1f} ms  {did:<32} {e.reason}")
    return lines


def _speed(p: Prediction) -> str:
    if p.tokens_per_s is None:
        return "not known for this device: optrush calibrate measures its rates"
    return f"about {p.tokens_per_s:,.0f} tokens/s (basis: {p.basis})"


def _short(s: Setting) -> str:
    rows = f"{s.micro_rows} row{'s' * (s.micro_rows > 1)} a micro-batch"
    return f"{_speed(s.prediction)}, {s.prediction.peak_bytes / GIB:.1f} GiB, {rows}"


def _hours(s: Setting) -> str:
    speed = s.prediction.tokens_per_s
    return "" if not speed else f", {1e9 / speed / 3600:,.1f} h a billion tokens"
