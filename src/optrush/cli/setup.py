"""init: write a first YAML. doctor: show what this machine has and can run. techniques: list the techniques. Pure."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from optrush import hardware
from optrush.cli.options import Json, Set
from optrush.errors import ConfigError, RunError, UserError
from optrush.hardware import Device
from optrush.technique import (
    COMPILERS,
    Environment,
    Part,
    Requirement,
    Technique,
    compilers,
    installed,
    library,
    missing,
)
from optrush.techniques import ALL

MODEL, DATA = "tiny", "sample:recipes"  # defaults of --yes


def init(
    file: Annotated[Path, typer.Argument(help="the YAML to write", metavar="[FILE]")] = Path("train.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="a folder, a hub id, `tiny`, or shape:NAME")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option("--objective", metavar="NAME", help="sft, pretrain, dpo, distill, ... (docs/contract.md)"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DATA", help="file of rows, sample:recipes, random[:ROWS], folder of images"),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", metavar="DIR", help="the run's folder")] = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="teacher of distill: a folder or a hub id")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="full, lora, qlora, or auto: what fits")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=2, metavar="TOKENS", help="the longest text, in tokens")
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0, help="number of passes over the data")] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="target machine: cpu, h200, 2xh200, ...")
    ] = "auto",
    with_: Annotated[
        list[str],
        typer.Option("--with", metavar="NAME[:OPTION=VALUE,...]", help="technique to include; may be repeated"),
    ] = [],  # noqa: B006 - typer copies it
    set_: Set = [],  # noqa: B006
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing; use the default of what is not given")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace FILE if it exists")] = False,
) -> None:
    """Write a commented YAML for a first run.

    It chooses techniques and sizes for this machine (or --hardware). On a terminal it asks for what no flag gives;
    elsewhere --model and --data are required, or --yes. FILE defaults to train.yaml.
    """
    from optrush.planner import init_config

    _check_file(file, force)
    asking = sys.stdin.isatty() and not yes

    def value(flag: str, given: str | None, default: str, help_: str, check: Callable[[str], str] | None) -> str:
        """Return the value of the flag, the default of --yes, or the answer to a prompt."""
        if given is not None:
            return given
        if yes:
            return default
        if not asking:
            raise ConfigError("`optrush init` without a terminal", f"no {flag}", f"give {flag}, or --yes")
        return _prompt(flag, default, help_, check)

    help_ = "A Hugging Face folder or hub id; `tiny` is built in, small and random."
    model = value("--model", model, MODEL, help_, None)
    help_ = "A JSON Lines file of conversations or texts, or a folder of images; sample:recipes is built in."
    init_config.check_sets(set_, epochs)
    with _captioned(file, force) as captioned:
        check = partial(init_config.check_data, sets=set_, objective=objective or "")
        data = captioned(value("--data", data, DATA, help_, lambda text: check(captioned(text))))
        suggested = check(data)
        if objective is None:
            help_ = "sft learns the assistant's words of conversations, pretrain all tokens, dpo learns from pairs."
            objective = _prompt("--objective", suggested, help_, init_config.check_objective) if asking else suggested
        if output is None:
            help_ = "The folder that the run writes into; it must be new or empty."
            output = _prompt("--output", _new(file), help_, init_config.check_new_output) if asking else _new(file)
        method, seq, epochs = _how(method, seq, epochs, asking)
        request = init_config.InitRequest(
            model, objective, data, output, hardware, with_, method, seq, epochs, teacher, set_
        )
        first = init_config.compose(request, str(file))
        _write(file, first.text, force)
    ranks = f" --ranks {first.ranks}" if first.ranks > 1 else ""
    for more in (" --dry-run", ""):
        print(f"optrush train {shlex.quote(str(file))}{ranks}{more}")


@contextmanager
def _captioned(file: Path, force: bool) -> Iterator[Callable[[str], str]]:
    """Yield a function that writes the rows of an image folder and returns the file; remove the file after an error."""
    from optrush.data.captions import has_images, write_captions

    rows = file.with_suffix(".jsonl")
    before = rows.exists()

    def named(text: str) -> str:
        if not has_images(folder := Path(text).expanduser()):
            return text
        if before:
            _check_file(rows, force)
        write_captions(folder, rows)
        return str(rows)

    try:
        yield named
    except BaseException:
        if not before:
            rows.unlink(missing_ok=True)
        raise


def _how(method: str | None, seq: int | None, epochs: float | None, asking: bool) -> tuple[str, int | None, float]:
    """Return method, tokens per row and epochs, from the flags or the terminal."""
    from optrush.planner.init_config import check_method, check_number

    if method is None:
        help_ = "full trains all weights, lora adapters, qlora adapters on 4 bits; auto takes the first that fits."
        method = _prompt("--method", "auto", help_, check_method) if asking else "auto"
    if asking and seq is None:
        help_ = "The longest text that is seen whole, in tokens; auto: as suits the machine."
        text = _prompt("--seq", "auto", help_, lambda t: t if t == "auto" else check_number(t))
        seq = None if text == "auto" else int(float(text))
    if epochs is None:
        epochs = float(_prompt("--epochs", "1", "How often the data is seen.", check_number)) if asking else 1
    epochs = int(epochs) if epochs == int(epochs) else epochs
    return method, seq, epochs


def _check_file(file: Path, force: bool) -> None:
    if file.is_dir():
        raise ConfigError(f"to write {file}", "a folder", "name a file")
    if file.exists() and not force:
        raise ConfigError(f"to write {file}", "it exists", "name another FILE, or give --force to replace it")
    if not file.parent.is_dir():
        raise ConfigError(f"to write {file}", f"{file.parent} is not a folder", "make the folder, or name another FILE")


def _write(file: Path, text: str, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"to write {file}", f"{error.strerror}", "name another FILE") from None


def _prompt(flag: str, default: str, help_: str, check: Callable[[str], str] | None) -> str:
    """Prompt for the value of a flag until `check` accepts it."""

    def checked(text: str) -> str:
        try:
            if check is not None:
                check(text)
        except UserError as error:
            raise typer.BadParameter(f"{error.found}: {error.do}") from None
        return text

    typer.echo(help_, err=True)
    answer: str = typer.prompt(flag.removeprefix("--"), default=default, value_proc=checked, err=True)
    return answer


def _new(file: Path) -> str:
    """Return a new folder under runs/ with the file's name."""
    names = (f"runs/{file.stem}" + (f"-{n}" if n > 1 else "") for n in range(1, 10_000))
    return next(name for name in names if not os.path.lexists(name))


def doctor(
    warm: Annotated[
        bool, typer.Option("--warm", help="compile what a first run needs, by two short runs; print their seconds")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine has, and which techniques it can run.

    Each technique is `ok`, or `lacks` something: the requirement, what was found, and the command that fixes it. A
    lacking technique is no error: the exit code is 0. --warm trains the built-in model twice for two steps in a
    temporary folder, so that Python's bytecode and Triton's kernels are cached.
    """
    if warm:
        first, again, note = _warm()
        facts = {"first_s": round(first, 1), "again_s": round(again, 1), "note": note}
        text = f"a first run of two steps took {first:.1f} s, the same run again {again:.1f} s" + f"\n{note}" * bool(
            note
        )
        print(json.dumps(facts) if as_json else text)
        return
    machine = examine()
    if as_json:
        print(json.dumps(_document(machine)))
        return
    lines = [*_facts(machine), ""]
    if machine.problems:
        lines += [*(line for need in machine.problems for line in _lacks(need, "")), ""]
    print("\n".join([*lines, *(line for t in machine.techniques for line in _standing(t))]))


WARMING = """
{model: tiny, objective: pretrain, data: {random: 8}, batch: {seq: 64, tokens: 128}, train: {steps: 2}, output: run}
"""


def _warm() -> tuple[float, float, str]:
    """Train two steps twice in a temporary folder; return the seconds of both, and the caches that were not kept.

    Raises:
        RunError: the run failed.
    """
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "warm.yaml").write_text(WARMING)
        for _ in range(2):
            begun = time.monotonic()
            command = [sys.executable, "-m", "optrush", "train", "warm.yaml"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            seconds.append(time.monotonic() - begun)
            if done.returncode:
                found = f"exit code {done.returncode}: {' '.join(done.stderr.split()[-60:])}"
                raise RunError("two steps of the built-in model, by --warm", found, "fix that, and try again")
            shutil.rmtree(Path(folder) / "run")
    libraries = Path(importlib.util.find_spec("torch").submodule_search_locations[0]).parent  # type: ignore[union-attr, index]
    kept = sys.pycache_prefix is not None or os.access(libraries, os.W_OK)
    if sys.dont_write_bytecode:
        return seconds[0], seconds[1], "no bytecode is written: unset PYTHONDONTWRITEBYTECODE"
    note = f"{libraries} cannot be written: set PYTHONPYCACHEPREFIX=DIR, for this command and for runs"
    return seconds[0], seconds[1], "" if kept else note


def _document(machine: MachineFacts) -> dict[str, object]:
    document = dataclasses.asdict(machine)
    for standing, row in zip(machine.techniques, document["techniques"]):
        row["options"] = {name: [dataclasses.asdict(n) for n in lacks] for name, lacks in standing.options}
    return document


def _facts(machine: MachineFacts) -> list[str]:
    """Return lines about the machine: GPUs, CPU, memory, disk, packages and compiler."""
    host = machine.processor
    memory = "memory unknown" if host.memory_bytes is None else _gib(host.memory_bytes)
    if host.limit_bytes is not None:
        memory += f" ({_gib(host.limit_bytes)} for this container)"
    rows = [
        (f"gpu {i}", f"{d.name}, capability {d.capability[0]}.{d.capability[1]}, {_gib(d.memory_bytes)}")
        for i, d in enumerate(machine.devices)
    ] or [("gpu", "none" if machine.driver is None else f"none, though there is a driver for CUDA {machine.driver}")]
    if machine.devices and machine.driver is not None:
        rows.append(("driver", f"for CUDA {machine.driver}"))
    rows += [
        ("cpu", f"{host.model}, {host.cores} core{'s' * (host.cores != 1)}"),
        ("memory", memory),
        ("disk", f"{_gib(machine.free_bytes)} free in {machine.folder}"),
        ("python", machine.python),
        *((name, version or "not installed") for name, version in machine.packages.items()),
        ("compiler", machine.compiler or "none for C++"),
    ]
    return [f"{name:<13} {value}" for name, value in rows]


NAME = 21  # width of the column of names


def _standing(standing: Standing) -> list[str]:
    """Return lines about a technique: whether it runs here, what it lacks, and its options."""
    word = _colored("ok   ", "green") if standing.runs else _colored("lacks", "red")
    lines = [f"{standing.name:<{NAME}} {word}  {standing.summary}"]
    if standing.several:
        need = standing.lacks[0]
        lines.append(f"{'':<{NAME}} {'':<5}  with several ranks: {need.do}")
    elif not standing.runs:
        lines += [line for need in standing.lacks for line in _lacks(need, " " * (NAME + 1))]
    fits = [name for name, lacks in standing.options if not lacks]
    if fits:
        lines.append(f"{'':<{NAME}} {'':<5}  also {', '.join(fits)}")
    for name, lacks in standing.options:
        if lacks and standing.runs:
            lines += _lacks(lacks[0], " " * (NAME + 1), name)
    return lines


def _lacks(need: Requirement, indent: str, option: str = "") -> list[str]:
    what = f"{option}: " if option else ""
    word = _colored("lacks", "red")
    return [
        f"{indent}{word}  {what}{need.asked}",
        f"{indent}       found {need.found}",
        f"{indent}       do    {need.do}",
    ]


def _colored(text: str, color: str) -> str:
    return typer.style(text, fg=color) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def _gib(size: int | None) -> str:
    return "memory unknown" if size is None else f"{size / 2**30:.1f} GiB"


# --- techniques


def techniques(as_json: Json = False) -> None:
    """List the techniques.

    What each does, what it promises about the numbers, which part of a run it owns alone (two owners of one part
    cannot be combined), and its options with their defaults. --json also names its source and its test.
    """
    rows: list[dict[str, Any]] = [
        {
            "name": t.name,
            "summary": t.summary,
            "source": t.source,
            "numerics": t.numerics.name,
            "claims": sorted(p.name for p in t.claims),
            "options": {f.name: {"type": str(f.type), "default": f.default} for f in dataclasses.fields(t)},  # type: ignore[arg-type]
            "proof": t.proof,
            "verified_on": list(t.verified_on),
        }
        for t in ALL
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        options = " ".join(f"{k}={v['default']}" for k, v in row["options"].items())
        print(f"{row['name']:<21} {row['summary']}")
        owns = ", ".join(row["claims"]).lower() or "nothing alone"
        promise = row["numerics"].lower().replace("_", " ")
        print(f"{'':<21} {promise}; owns {owns}" + (f"; options: {options}" if options else ""))


def schema() -> None:
    """Print the JSON schema of a run's YAML, for editors.

    With VS Code's YAML extension: `# yaml-language-server: $schema=optrush.json` as the first line of the YAML.
    """
    print(json.dumps(config_schema(), indent=1))


def config_schema(classes: Sequence[type[Technique]] = ALL) -> dict[str, Any]:
    """Return the JSON schema of a configuration, with every technique and its options under `with`."""
    from pydantic import TypeAdapter

    from optrush.config import Config

    document = Config.model_json_schema(by_alias=True)
    short = {name: document["properties"][name] for name in ("model", "tracker")}  # each has text as a short form
    document["properties"] |= {name: {"anyOf": [{"type": "string"}, part]} for name, part in short.items()}
    rule = document["$defs"]["Grpo"]["properties"]["rewards"]
    rule["items"] = {"anyOf": [{"type": "string"}, rule["items"]]}
    techniques = {}
    for cls in classes:
        hints, options = get_type_hints(cls, include_extras=True), {}
        for option in dataclasses.fields(cls):  # type: ignore[arg-type]
            options[option.name] = TypeAdapter(hints[option.name]).json_schema() | {"default": option.default}
        body = {"type": ["object", "null"], "properties": options, "additionalProperties": False}
        techniques[cls.name] = {**body, "description": cls.summary}
    document["properties"]["with"] = {"type": "object", "properties": techniques, "additionalProperties": False}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


# --- facts of `optrush doctor`, without torch
#
# A technique can run if its `needs` are met, as in a run; the compile stage also needs compilers.

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
OPTIONAL = ("triton",)  # comes with torch's GPU builds
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Processor:
    """The host, and the limits of a container."""

    model: str
    cores: int  # that this process may use
    memory_bytes: int | None
    limit_bytes: int | None  # of a container; None: no limit below the memory


@dataclass(frozen=True)
class Standing:
    """Whether a technique can run here: `ok`, `ok` with several ranks, or `lacks` with the remedy."""

    name: str
    summary: str
    runs: bool
    several: bool  # it needs more than one rank
    lacks: tuple[Requirement, ...]
    options: tuple[tuple[str, tuple[Requirement, ...]], ...]  # other values (`impl=varlen`), and their unmet needs


@dataclass(frozen=True)
class MachineFacts:
    """The facts shown by `optrush doctor`."""

    devices: tuple[Device, ...]
    driver: str | None  # the newest CUDA that the driver runs
    processor: Processor
    folder: str
    free_bytes: int
    python: str
    packages: dict[str, str | None]
    compiler: str | None
    problems: tuple[Requirement, ...]
    techniques: tuple[Standing, ...]


def examine(classes: Sequence[type[Technique]] = ALL) -> MachineFacts:
    """Collect the facts of this machine."""
    devices = hardware.probe()
    packages = {name: library(name) for name in REQUIRED + OPTIONAL}
    folder = Path.cwd()
    return MachineFacts(
        devices=tuple(devices),
        driver=_driver(),
        processor=_processor(),
        folder=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
        python=platform.python_version(),
        packages=packages,
        compiler=installed(os.environ.get("CXX"), *COMPILERS),
        problems=tuple(problems(devices, packages)),
        techniques=tuple(standing(c, devices) for c in classes),
    )


def problems(devices: Sequence[Device], packages: dict[str, str | None]) -> Iterator[Requirement]:
    """Yield requirements of every run that this machine does not meet."""
    for name in REQUIRED:
        if packages[name] is None:
            yield Requirement(False, f"the package {name}", "not installed", f"python -m pip install {name}")
    torch = packages["torch"]
    if devices and torch is not None and "+cpu" in torch:
        yield Requirement(
            False, f"torch on {devices[0].name}", f"torch {torch}, built without CUDA",
            "python -m pip uninstall torch, then install the build for CUDA: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    if len({d.name for d in devices}) > 1:
        found = ", ".join(d.name for d in devices)
        yield Requirement(False, "devices of one kind", found, "choose with CUDA_VISIBLE_DEVICES")


def standing(cls: type[Technique], devices: Sequence[Device]) -> Standing:
    """Return whether a technique can run here, with its defaults and with each other option value."""
    device = devices[0] if devices else hardware.cpu()
    most = len(devices) or 2  # processes share a CPU, but not a GPU
    plain = cls(**cls.sample)
    lacks = lacking(plain, device, 1)
    several = bool(lacks) and most > 1 and not lacking(plain, device, most)
    options = []
    for name, value in choices(cls):
        other: Any = dataclasses.replace(plain, **{name: value})  # type: ignore[type-var]
        options.append((f"{name}={value}", tuple(lacking(other, device, most if several else 1))))
    return Standing(
        name=cls.name, summary=cls.summary, runs=several or not lacks, several=several, lacks=tuple(lacks),
        options=tuple(options),
    )  # fmt: skip


def choices(cls: type[Technique]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) for every value of Literal options, except defaults and values that switch it off."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if get_origin(hints[field.name]) is Literal:
            yield from ((field.name, v) for v in get_args(hints[field.name]) if v not in (field.default, "none"))


def lacking(technique: Technique, device: Device, ranks: int) -> list[Requirement]:
    """Return the unmet needs of a technique on a device in any run: the fewest over the owners of parts."""
    # An ordinary run, a run of whole steps without clipping, and a run with ranks that share rows meet all needs of the
    # model (blocks, dtype, positions), of the step and of other techniques; the machine's needs remain.
    plain = Environment(
        device=device, ranks=ranks, seq=2048, rows=8 * ranks, micro_rows=1, clip=1.0, dtype="float32", native=True,
        blocks=16, axes=technique.axes(),
    )  # fmt: skip
    owners = [frozenset[Part](), *(frozenset({p}) for p in Part), frozenset(Part)]
    stochastic = dataclasses.replace(plain.spec, rounding="stochastic")  # like bf16
    changes: tuple[dict[str, Any], ...]
    changes = {}, {"micro_rows": 8, "clip": None}, {"spec": stochastic}, {"axes": {"cp": ranks, **plain.axes}}
    runs = [dataclasses.replace(plain, **change) for change in changes]
    setups = [dataclasses.replace(run, claimed=owned | technique.claims) for run in runs for owned in owners]
    unmet = min(([n for n in technique.needs(s) if not n.met] for s in setups), key=len)
    unmet += missing(technique)
    if type(technique).compile is not Technique.compile:
        unmet += [n for n in compilers(device) if not n.met]
    return unmet


def _driver() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _processor() -> Processor:
    memory = hardware.cpu().memory_bytes
    try:
        limit = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        limit = ""
    limited = int(limit) if limit.isdigit() and (memory is None or int(limit) < memory) else None
    return Processor(*hardware.processor(), memory, limited)
