"""plan: predict memory and speed, and search for better settings. calibrate: measure the rates that plan uses."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.cli.options import Json, Set, With, Without, given, launches, read_run
from optrush.errors import ConfigError, ConflictError, NeedsError, NoRowsError, UserError
from optrush.hardware import GIB, counted, first_device, first_priced, parse_hardware, price_usd_h
from optrush.launch import NOT_SHARED, launched

if TYPE_CHECKING:
    from optrush.config import Config
    from optrush.decide import Decided
    from optrush.planner.answer import Answer, Way
    from optrush.planner.calibration import Calibration
    from optrush.planner.run_time import RunTime
    from optrush.planner.sets import Candidate, Prediction

BAR = 24  # length of the longest bar in characters
Asked = Annotated[
    Path, typer.Argument(help="the run's YAML, or a model: a folder or hub id", metavar="CONFIG", show_default=False)
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="a model's data: JSON Lines, sample:recipes, random[:ROWS]"),
]
SMALL = 0.01  # share of the peak; smaller lines are combined


def plan(
    path: Asked,
    data: Data = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware", metavar="NAME", help="auto (this machine), h200, 2xh200, 2x8xh200:infiniband, 4090, cpu, ..."
        ),
    ] = "auto",
    keep_maths: Annotated[
        bool, typer.Option("--keep-maths", help="leave out techniques that change what is computed")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="write the best setting as a YAML for train")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="with --out: overwrite the file")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="add memory and time by line, runners-up and other sizes")
    ] = False,
    solve: Annotated[
        str | None,
        typer.Option(
            "--solve", metavar="WHAT", help="longest, largest-model, gpus, cheapest, batch, hours=N, usd=N, tokens=N"
        ),
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option("--host-memory", min=1, metavar="GIB", help="memory of the named GPUs' host")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0, metavar="USD", help="per card and hour (default: list price)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what fits and how fast it is, by method and techniques.

    The first line says whether the run fits, how fast it is and how long it takes. If it does not fit, the nearest
    settings that fit follow. Nothing is built; only --out FILE writes. --details adds memory by line at its peak. Speed
    is computed from rates that `optrush calibrate` measured on the device, else from its datasheet and the share of it
    that similar work reached on one H200. The output names the source (basis).
    """
    hardware = hardware if host_memory is None else _hosted(hardware, host_memory, solve)
    config = _asked(path, data, first_priced() if solve == "cheapest" else hardware, set_, with_, without)
    from optrush.decide import NothingFits
    from optrush.planner import answer as answers
    from optrush.planner import search as planner

    for error, text, weights in planner.without_plan(config):
        print(json.dumps({"refused": error.found, "weights_bytes": weights}) if as_json else text)
        raise error
    if solve is not None:
        beside = {
            "--out": out is not None, "--price": price is not None, "--details": details, "--keep-maths": keep_maths,
            "--force": force,
            "--hardware": solve == "cheapest" and hardware != "auto",  # it compares all cards with a price
        }  # fmt: skip
        print(_solved(config, hardware, solve, [name for name, given in beside.items() if given], as_json))
        return
    if out is not None and out.exists() and not force:
        raise ConfigError(f"--out {out}", "this file exists", "use another name, or add --force")
    decided: Decided | None = None
    prediction: Prediction | None = None
    refused: UserError | None = None
    try:
        decided = _decided(config, hardware, _is_file(path))
        prediction = planner.predict_decided(decided)
    except (ConfigError, ConflictError, NeedsError) as error:  # another setting may run there
        refused = error  # the search raises it too if no setting can run
    result = answers.answer(config, hardware, keep_maths=keep_maths)
    if as_json:
        print(json.dumps(_document(config, decided, prediction, refused, result, hardware, price)))
    else:
        print("\n".join(_text(config, hardware, decided, prediction, refused, result, price, details)))
    other = not isinstance(refused, NothingFits) and result.best is None  # memory is not the reason
    if refused is not None and (other or _lacking_all(config, result)):  # only a different run fits
        raise refused if out is not None else typer.Exit(2)  # nothing is written
    if out is not None:
        _write(config, hardware, result, out)


def _decided(config: Config, hardware: str, as_written: bool) -> Decided:
    """Decide a file's run as written; for a model, with the techniques that `optrush init` would add to --with."""
    from optrush.decide import changed, decide

    (device, ranks), adds = parse_hardware(hardware), bool(config.with_) and not as_written
    config = changed(config, {"method": config.method or "auto"}) if adds else config
    return decide(config, ranks=ranks, device=device, here=hardware == "auto", choose=adds or None)


def _hosted(hardware: str, memory_gib: float, solve: str | None) -> str:
    """Return the name of the hardware in a host with this memory."""
    if parse_hardware(hardware)[0].kind != "cuda" or not memory_gib < 1e6 or solve == "cheapest":
        others = f"--hardware {hardware}{' --solve cheapest' * (solve == 'cheapest')}"
        raise ConfigError(f"--host-memory {memory_gib:g}", others, "name a GPU, such as --hardware 4090; below 1e6 GiB")
    return f"{hardware}@{memory_gib:.0f}GiB"


def _solved(config: Config, hardware: str, what: str, others: Sequence[str], as_json: bool) -> str:
    """Return the answer of --solve; raise ConfigError for options that it does not support."""
    from optrush.planner import answer as answers

    for option in others:
        reason = "it compares all cards that have a price" if option == "--hardware" else "--solve prints one line"
        raise ConfigError(f"--solve {what} with {option}", reason, f"leave out {option}; then plan its answer")
    text, values = answers.solve(config, hardware, what)
    return json.dumps(values) if as_json else text


def _is_file(path: Path) -> bool:
    """Return whether the argument is a file, not a model."""
    return path.is_file() or path.suffix in (".yaml", ".yml", ".json")


def _asked(path: Path, data: str | None, name: str, *flags: list[str]) -> Config:
    """Return the configuration of a YAML, or of a model's first run."""
    if _is_file(path):
        if data is not None:
            raise ConfigError(f"--data {data}", f"{path} names its data", f"--set data.path={data}")
        return read_run(path, *flags)
    from optrush.planner.init_config import of_model

    return of_model(str(path), data, name, *flags)


def _write(config: Config, name: str, result: Answer, out: Path) -> None:
    """Write the YAML of the best setting to `out` and print its command; raise ConfigError if no setting fits."""
    from optrush.config import dump_config

    best = result.best
    if best is None or best.setting is None:
        do = result.nearest[0] if result.nearest else "take a smaller model, shorter rows or other hardware"
        raise ConfigError(f"--out {out}", "no setting fits", do)
    device, ranks = parse_hardware(name)
    hosts = device.hosts
    launch = f"optrush train {out}" + (f" --ranks {ranks}" if ranks > 1 else "")
    if hosts > 1:
        launch = f"{NOT_SHARED} torchrun --nnodes {hosts} --nproc-per-node {ranks // hosts} --max-restarts 3 "
        launch += f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m optrush train {out} --resume auto, on each host"
    try:
        out.write_text(f"# {launch}\n{dump_config(_over(config, best))}")
    except OSError as error:
        raise ConfigError(f"--out {out}", f"{error.strerror}", "give a path that can be written") from None
    print(f"the best setting: {launch}", file=sys.stderr)


def _over(config: Config, way: Way) -> Config:
    """Return the configuration with a method's setting."""
    from optrush.config import METHODS
    from optrush.decide import changed, with_rate, with_setting

    assert way.setting is not None
    named = way.method in METHODS and METHODS[way.method].keys() <= way.setting.with_.keys() and config.method
    return with_rate(changed(with_setting(config, way.setting), {"method": way.method if named else None}))


def _document(
    config: Config, decided: Decided | None, prediction: Prediction | None, refused: UserError | None, answer: Answer,
    hardware: str, price: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Build the document of --json: the prediction's fields, null if it was rejected, and the answer."""
    from optrush.planner.run_time import RunTime, run_time
    from optrush.planner.sets import Prediction

    names = [f.name for f in dataclasses.fields(Prediction)]
    fields = dict.fromkeys(names) if prediction is None else dataclasses.asdict(prediction)
    time = RunTime(None) if prediction is None else run_time(config, prediction, answer.tokens)
    best = answer.best
    settings = answer.found.settings or ((best.setting,) if best is not None and best.setting is not None else ())
    return {
        **fields,
        "decided": None if decided is None else decided.facts(),
        "fits": prediction is not None and prediction.fits,
        **_time_document(time, hardware, price),
        "refused": None if refused is None else {"asked": refused.asked, "found": refused.found, "do": refused.do},
        "alternatives": [
            {"with": {k: dict(v) for k, v in s.with_.items()}, "micro_rows": s.micro_rows}
            | {name: getattr(s.prediction, name) for name in ("peak_bytes", "host_bytes", "tokens_per_s", "fits")}
            for s in settings
        ],
        "tried": answer.found.tried,
        "lost": [{"what": what, "why": reason} for what, reason in answer.found.lost],
        "answer": {
            "fits": best is not None,
            "methods": [_way_document(w, hardware, price) for w in answer.ways],
            "nearest": list(answer.nearest),
        },
    }


def _way_document(way: Way, hardware: str, price: float | None) -> dict[str, Any]:
    """Return a method as JSON values: its setting and time, or the smallest memory if no setting fits."""
    s = way.setting
    known: dict[str, Any] = {"method": way.method, "fits": s is not None}
    if s is None:
        refused = {"refused": way.refused} if way.refused else {}
        peak, lacking = (None, None) if way.least is None else way.least
        return {**known, "least_bytes": peak, "lacking_host_bytes": lacking, **refused}
    return {
        **known,
        "with": {k: dict(v) for k, v in s.with_.items()},
        "micro_rows": s.micro_rows,
        "mesh": dict(s.prediction.mesh),
        "peak_bytes": s.prediction.peak_bytes,
        "host_bytes": s.prediction.host_bytes,
        "tokens_per_s": s.prediction.tokens_per_s,
        "quality": list(way.quality),
        **_time_document(way.time, hardware, price),
    }


def _time_document(time: RunTime, hardware: str, price: float | None) -> dict[str, Any]:
    hours = None if time.seconds is None else time.seconds / 3600
    return {**dataclasses.asdict(time), "hours": hours, "usd": _usd(time.seconds, hardware, price)}


def _usd(seconds: float | None, name: str, price: float | None) -> float | None:
    """Return the price of a run; None: its duration or the hourly price is unknown."""
    device, ranks = parse_hardware(name)
    listed = None if name == "auto" else price_usd_h(device)
    an_hour = listed if price is None else price
    return None if an_hour is None or seconds is None else seconds / 3600 * an_hour * ranks


def _text(
    config: Config, hardware: str, decided: Decided | None, prediction: Prediction | None, refused: UserError | None,
    answer: Answer, price: float | None, details: bool,
) -> list[str]:  # fmt: skip
    """Format the answer, its methods and better settings; with `details` also memory bars, work and other models."""
    from optrush.decide import NothingFits
    from optrush.planner.run_time import run_time

    lines = [*_answer_lines(config, hardware, answer, price), ""]
    if isinstance(refused, NoRowsError):
        lines.insert(0, f"no data given for `objective: {config.objective}`; planned with rows that are full:")
    elif refused is not None and not isinstance(refused, NothingFits):
        lines[: answer.best is None] = ()  # memory is not the reason
        lines.insert(0, f"invalid as configured: {refused.asked}: {refused.found}; alternatives:")
    if details:
        lines.append("as configured")
        if prediction is not None:
            lines += [*memory_lines(prediction), "", *work_lines(prediction)]
    elif prediction is not None:
        fits = "fits" if prediction.fits else "does NOT fit"
        time = _time(config, run_time(config, prediction, answer.tokens), hardware, price)
        size = f"{prediction.peak_bytes / GIB:.2f} GiB{_on_host(prediction)}"
        lines.append(f"as configured: {size}, {fits}; {_speed(prediction)}{time}")
        lines += [] if decided is None else decided.lines()
    elif refused is not None:
        lines.append(f"as configured: {'does NOT fit' if isinstance(refused, NothingFits) else 'refused'}")
    if refused is not None:
        lines += [f"  {text}" for text in str(_pointing(refused, answer)).splitlines()]
    result = answer.found
    if result.settings:
        first = f"the best of {result.tried} compatible sets of techniques, each with its micro-batch"
        speeds = [s.prediction.tokens_per_s for s in result.settings]
        first += "" if None not in speeds else ", in the order of their speeds on an H100"
        first += "" if speeds == sorted(speeds, key=lambda s: -(s or 0)) else "; the whole run decides, start included"
        lines += ["", first]
    for place, setting in enumerate(result.settings, 1):
        lines.append(f"  {place}. {setting.title}{_without(config, setting)}")
        lines.append(f"     {_short(setting)}")
    named = {f"without {name}": f"  without {name}, which you named" for name in _named(config)}
    faster = {what: note for what, note in result.lost if what in named and re.match(r"\+(?!0%)\d+% tokens/s", note)}
    lines += [f"{named[what]}: {note}" for what, note in faster.items()]
    return lines + (_other_lines(config, hardware, answer) if details else [])


def _pointing(refused: UserError, answer: Answer) -> UserError:
    """Return an out-of-memory error whose remedy points to the settings above, instead of a second setting."""
    from optrush.decide import NothingFits

    if not isinstance(refused, NothingFits) or not (answer.best or answer.nearest):
        return refused
    do = "take a setting above: --out FILE writes the first" if answer.best else "take what is nearest, above"
    return NothingFits(refused.asked, refused.found, do)


def _answer_lines(config: Config, hardware: str, answer: Answer, price: float | None) -> list[str]:
    """Format the answer in one line, then a line per method, or the nearest settings."""
    from optrush.config import METHODS
    from optrush.planner.answer import planned_notes, typed

    device, ranks = parse_hardware(hardware)
    on = counted(device, ranks)
    best = answer.best
    if best is None or best.setting is None:
        needs = "" if (least := answer.least) is None else f"; the smallest setting tried needs {least.text()}"
        nearest = answer.nearest or ("none found; use a smaller model, shorter rows or other hardware",)
        return [
            f"does NOT fit on {on}, rows of {config.batch.seq:,} tokens{needs}",
            *(f"  nearest: {text}" for text in nearest),
        ]
    p = best.setting.prediction
    most = "" if p.room_bytes is None else f" of {p.room_bytes / GIB:.1f}"
    mesh = f"{best.mesh}, " if best.mesh else ""
    time = _time(config, best.time, hardware, price)
    lacking = _without(config, best.setting)
    size = f"{p.peak_bytes / GIB:.1f}{most} GiB{_on_host(p)}"
    where = f"{on}, rows of {config.batch.seq:,} tokens"
    lines = [f"fits on {where}: {best.method}, {mesh}{size}, {_speed(p, basis=False)}{time}{lacking}"]
    if p.tokens_per_s is None:
        lines.append("  speed unknown for this device; run `optrush calibrate` on it")
    lines += [f"  {note}" for note in planned_notes(config, device, ranks)]
    name, _, frozen = best.method.partition(" + ")
    if config.method is None and {*METHODS.get(name, {}), *([frozen] if frozen else [])} - config.with_.keys():
        lines.append(f"  no adapters are configured; for this answer add {typed(best.method)}")
    width = max(len(w.method) for w in answer.ways)
    for way in answer.ways:
        if way.refused:
            lines.append(f"  {way.method:<{width}}  refused: {way.refused}")
        elif way.setting is None:
            needs = "" if way.least is None else f": it needs {way.least.text()}"
            lines.append(f"  {way.method:<{width}}  does not fit{needs}")
        else:
            lines += [
                f"  {way.method:<{width}}  {way.costs}{', tight' * way.tight}; {_short(way.setting)}",
                f"  {'':<{width}}  {way.setting.title}{_without(config, way.setting)}",
            ]
    return lines


def _lacking(config: Config, setting: Candidate) -> list[str]:
    """Return the configured, unsearched techniques that a set lacks."""
    return [name for name in _named(config) if name not in setting.with_]


def _named(config: Config) -> list[str]:
    """Return the configured techniques that a search does not choose."""
    from optrush.techniques import ALL

    searched = {technique.name for technique in ALL if technique.searched}
    return [name for name in config.with_ if name not in searched]


def _lacking_all(config: Config, answer: Answer) -> bool:
    """Return whether something fits, but each of the best sets lacks a configured technique."""
    fitting = [way.setting for way in answer.ways if way.setting is not None]
    return bool(fitting) and all(_lacking(config, setting) for setting in fitting)


def _without(config: Config, setting: Candidate) -> str:
    lacking = _lacking(config, setting)
    return f"; without {', '.join(lacking)}, which you named" if lacking else ""


def _time(config: Config, time: RunTime, hardware: str, price: float | None) -> str:
    """Format the duration and price of a run; "about" marks steps from estimated tokens."""
    from optrush.console import duration

    if time.steps is None or time.start_s is None or time.steps_s is None or time.end_s is None:
        return f"; {time.steps:,.0f} steps; answers decide how long each takes" if config.grpo and time.steps else ""
    about = "" if config.train.steps is not None else "about "
    start, steps, end = map(duration, (time.start_s, time.steps_s, time.end_s))
    usd = _usd(time.seconds, hardware, price)
    source, size = "this data: ", ""
    if config.data.random is not None:
        source, size = "", f" of {config.batch.tokens:,} tokens"
    text = f"; {source}{about}{time.steps:,.0f} steps{size}, {steps} + start {start} + end {end}"
    unknown = ", no list price (--price USD)" * (hardware != "auto" and parse_hardware(hardware)[0].kind == "cuda")
    return text + (unknown if usd is None else f", {usd:,.2f} USD")


def _other_lines(config: Config, hardware: str, answer: Answer) -> list[str]:
    """Format the changes by other techniques, and other models of the family."""
    from optrush.planner import search as planner

    result, best = answer.found, answer.best
    if best is None or best.setting is None:
        return []
    lines = ["", "beside the best"] if result.lost else []
    width = max((len(what) for what, _ in result.lost), default=0)
    lines += [f"  {what:<{width}}  {reason}" for what, reason in result.lost]
    rows = list(planner.predict_family(config, hardware, result.settings[0] if result.settings else best.setting))
    lines += ["", "the same on models of the family"] if rows else []
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, parameters, other in rows:
        cost = "does not fit" if other is None else _short(other)
        speed = None if other is None else other.prediction.tokens_per_s
        cost += f", {1e9 / speed / 3600:,.1f} h per billion tokens" if speed else ""
        lines.append(f"  {name:<{width}} {parameters / 1e9:6.2f} G parameters  {cost}")
    return lines


def memory_lines(p: Prediction) -> list[str]:
    """Format the lines at the peak as bars, largest first, and the bytes per parameter."""
    kinds = " + ".join(f"{kind} {size:.3g}" for kind, size in p.a_parameter.items())
    total = sum(p.a_parameter.values())
    room = ""
    if p.capacity_bytes is not None and p.room_bytes is not None:
        room = f" of {p.room_bytes / GIB:.1f} usable ({p.capacity_bytes / GIB:.1f} in all)"
    fits = "fits" if p.fits else "does NOT fit"
    lines = [
        f"  {p.device}: {p.peak_bytes / GIB:.2f} GiB{room}, {fits}; peak in: {p.phase}",
        f"  {p.parameters / 1e9:.3f} G parameters x {total:.3g} bytes ({kinds})",
    ]
    if p.stage_bytes:
        lines.append(f"  ranks of the pipeline: {', '.join(f'{n / GIB:.2f}' for n in p.stage_bytes)} GiB")
    if p.host_bytes:
        most, assumed = p.host_room_bytes, ", assumed" * p.host_assumed
        host_room = "" if most is None else f" of {most / GIB:.1f} that a rank may have{assumed}"
        lines.append(f"  and {p.host_bytes / GIB:.2f} GiB of pinned host memory{host_room}")
    shown = sorted((i for i in p.lines if i.bytes >= SMALL * p.peak_bytes), key=lambda i: -i.bytes)
    rest = p.peak_bytes - sum(i.bytes for i in shown)
    width = max((len(i.name) for i in shown), default=0)
    for item in shown:
        bar = "█" * max(1, round(BAR * item.bytes / shown[0].bytes))
        lines.append(f"  {item.name:<{width}} {item.bytes / GIB:7.2f} {bar:<{BAR}} {item.reason}")
    return [*lines, f"  {'smaller lines':<{width}} {rest / GIB:7.2f}"]


def work_lines(p: Prediction) -> list[str]:
    """Format the time of a step by work, longest first; host and link run in parallel with the device."""
    speed = _speed(p) if p.tokens_per_s is None else f"speed: {_speed(p)}"
    lines = [f"  {speed}", *([f"  rates: {p.rates_from}"] if p.rates_from else [])]
    total = sum(e.seconds for e in p.work if e.where == "device")
    shown = sorted((e for e in p.work if e.seconds >= 2 * SMALL * total), key=lambda e: -e.seconds)
    for e in shown:
        texts = {
            f"{e.flop / 1e12:,.2f} TFLOP": e.flop,
            f"{e.bytes / 1e9:,.1f} GB {'sent' if e.where == 'link' else 'moved'}": e.bytes,
            f"{e.launches:,.0f} operators started": e.launches,
        }
        amounts = ", ".join(text for text, amount in texts.items() if amount)
        place = "" if e.where == "device" else f" ({e.where})"
        lines.append(f"  {e.name + place:<22} {e.seconds * 1e3:9.1f} ms  {amounts:<32} {e.reason}")
    return lines


def _speed(p: Prediction, basis: bool = True) -> str:
    if p.tokens_per_s is None:
        return "speed not known"
    of = f" (basis: {'traced, ' * p.traced}{p.basis})" if basis else ""
    return f"about {p.tokens_per_s:,.0f} tokens/s{of}"


def _short(s: Candidate) -> str:
    rows = f"{s.micro_rows} row{'s' * (s.micro_rows > 1)} a micro-batch"
    size = f"{s.prediction.peak_bytes / GIB:.1f} GiB{_on_host(s.prediction, short=True)}"
    return f"{_speed(s.prediction)}, {size}, {rows}"


def _on_host(p: Prediction, short: bool = False) -> str:
    """Format a rank's bytes in host memory, and unless `short`, its room there."""
    if not p.host_bytes:
        return ""
    most, assumed = p.host_room_bytes, " (assumed)" * p.host_assumed
    room = "" if most is None or short else f" of {most / GIB:.1f}{assumed}"
    return f" + {p.host_bytes / GIB:.1f}{room} GiB of host memory" + " a rank" * (not short)


# --- calibrate

LINK_S = 10.0  # seconds of link measurements
EVERY_S = 10.0  # seconds between lines, without a terminal
UNSTEADY = 0.10  # median spread of rates over the rounds that triggers a warning


def calibrate(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(help="a run's YAML, whose shapes, rows and micro-batch are measured", metavar="[CONFIG]"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=100, help="seconds of load, shared by the shapes")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="also write the result to this new file")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="measure only the communication of this many processes, one per GPU")
    ] = 1,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure this machine's rates, for the plan.

    Measures matrix products at the model's shapes, attention, copies, the link to the host and the launch of an
    operator. It takes about a minute; run nothing else on the device. Without CONFIG, the shapes are those of Llama 1B
    and 8B on a GPU, and of the built-in model on a CPU.

    The result replaces the stored one for this device, torch and driver. `optrush plan` and `optrush bench` use it
    (basis: calibrated).

    --ranks N measures the communication of N ranks on this machine (all-reduce, all-gather, reduce-scatter) and adds
    it to the stored rates, which must exist.
    """
    config = None if path is None else read_run(path, set_, with_, without)
    if path is None and (set_ or with_ or without):
        raise ConfigError("--set, --with or --without", "no CONFIG to change", "name a CONFIG")
    if ranks == 1 and given(context, ["ranks"]):
        raise ConfigError("--ranks 1", "one process exchanges nothing", "take two or more, or leave it out")
    if ranks > 1:
        if path is not None:
            raise ConfigError("--ranks with a CONFIG", "--ranks measures links alone", "leave one of the two out")
        _calibrate_links(ranks, seconds if given(context, ["seconds"]) else LINK_S, out, as_json)
        return
    if launched()[1] > 1:
        raise ConfigError("optrush calibrate", f"a launcher has started {launched()[1]} ranks", "start it alone")
    from optrush.planner import calibration
    from optrush.planner.calibrate import loads, measure_rates

    if out is not None and out.exists():
        raise ConfigError(f"--out {out}", "this file exists", "use another name")
    for folder in (calibration.folder(), *(() if out is None else (out.absolute().parent,))):
        calibration.check_writable(folder)  # before a minute of measurement
    device = first_device()
    with _progress() as report:
        measured = measure_rates(loads(config, device), device, seconds, report)
    file = calibration.path(measured)
    if file.exists():  # links were measured separately
        measured = dataclasses.replace(measured, links=calibration.read_calibration(file).links)
    for target in (file, *(() if out is None else (out,))):
        calibration.write_calibration(measured, target)
    print(json.dumps(dataclasses.asdict(measured)) if as_json else "\n".join(_calibration_text(measured)))
    print(f"kept in {file}", file=sys.stderr)


def _calibrate_links(ranks: int, seconds: float, out: Path | None, as_json: bool) -> None:
    """Measure collectives between ranks, and add them to the device's calibration; the first rank writes."""
    from optrush import launch
    from optrush.planner import calibration

    device = first_device()
    kept = calibration.for_device(device)
    if kept is None or (changed := calibration.stale(kept)):
        found_too = (
            "no rates of this device"
            if kept is None
            else f"the measured rates of this device are out of date ({changed})"
        )
        do = "run optrush calibrate without --ranks first"
        raise ConfigError(f"--ranks {ranks}", f"{found_too}, to which those of links belong", do)
    if out is not None and launched()[0] == 0 and out.exists():
        raise ConfigError(f"--out {out}", "this file exists", "use another name")
    if launches(ranks):
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.planner.calibrate import measure_links

    measured = dataclasses.replace(kept, links=measure_links(device, launched()[0], ranks, seconds))
    if launched()[0]:
        return
    file = calibration.path(measured)
    for target in (file, *(() if out is None else (out,))):
        calibration.write_calibration(measured, target)
    print(json.dumps(dataclasses.asdict(measured)) if as_json else "\n".join(_links_text(measured)))
    print(f"kept in {file}", file=sys.stderr)


def _links_text(c: Calibration) -> list[str]:
    """Format one row per collective."""
    rows = (f"{r.operation:<16} {r.bytes_s / 1e9:9.3g} GB/s, {r.latency_s * 1e6:9.3g} us at least" for r in c.links)
    return [f"{c.device}, {c.links[0].ranks} ranks", *rows]


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows (steps done, all steps, current step): as a bar, or in occasional lines."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from optrush.console import err

    if sys.stderr.isatty():
        columns = (SpinnerColumn(), BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=err, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda done, steps, what: progress.update(task, total=steps, completed=done, description=what)
        return
    begun = last = time.monotonic()

    def report(done: int, steps: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last > EVERY_S:
            last = now
            err.print(f"calibrating: {what}  ETA {(now - begun) / done * (steps - done):.0f} s", markup=False)

    yield report


def _calibration_text(c: Calibration) -> list[str]:
    """Format one row per shape, with its three matmuls."""
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
