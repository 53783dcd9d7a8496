"""launch: write the job file of a run for Slurm, Kubernetes or SkyPilot. Nothing is submitted."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from optrush.cli.options import ConfigFile, Set, With, Without, read_run
from optrush.errors import ConfigError
from optrush.files import read_text

if TYPE_CHECKING:
    from optrush.config import Config

ENGINES = {  # scheduler: its file, and the command that submits it
    "slurm": ("job.slurm", "sbatch"),
    "kubernetes": ("job.yaml", "kubectl apply -f"),
    "skypilot": ("task.yaml", "sky jobs launch"),
}
SKYPILOT = {"a100-40": "A100", "a100-80": "A100-80GB", "a6000": "RTXA6000"}  # names of cards that differ from ours
SAVE_S = 300  # seconds before its time limit at which a job is told to save


@dataclass(frozen=True)
class Job:
    """Values of a job file, by the names in its template."""

    name: str
    hosts: int
    gpus: int  # per host
    card: str
    command: str  # without its launcher
    config: str  # the configuration as text, for schedulers that embed it
    path: str
    time: str | None
    image: str | None
    volume: str | None
    partition: str | None
    setup: tuple[str, ...]
    save_s: int = SAVE_S


def launch(
    path: ConfigFile,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    slurm: Annotated[bool, typer.Option("--slurm", help="a batch script for sbatch")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="an indexed Job, its Service and ConfigMap")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="a task for sky jobs launch")] = False,
    hardware: Annotated[
        str,
        typer.Option("--hardware", metavar="NAME", help="GPUs to use: 8xh100; over several hosts 2x8xh100:infiniband"),
    ] = "8xh100",
    time: Annotated[str | None, typer.Option("--time", metavar="HH:MM:SS", help="Slurm: time limit of one job")] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Slurm: the partition")] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Kubernetes: an image that has optrush")
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(
            "--volume", metavar="NAME", help="claim (Kubernetes) or volume (SkyPilot) with model, data, output"
        ),
    ] = None,
    setup: Annotated[
        list[str], typer.Option("--setup", metavar="COMMAND", help="a line of shell before the run; may be repeated")
    ] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="the file to write; - prints it")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite FILE")] = False,
) -> None:
    """Write the job file of a run for a cluster's own scheduler; nothing is submitted.

    The plan of the run for these GPUs is checked first. The job saves before its time limit or when its host is
    reclaimed, and restarts with --resume auto. `output` must be on storage that all hosts share.
    """
    chosen = [name for name, on in zip(ENGINES, (slurm, kubernetes, skypilot), strict=True) if on]
    if len(chosen) != 1:
        do = "give one of --slurm, --kubernetes, --skypilot"
        raise ConfigError("`optrush launch`", " and ".join(f"--{c}" for c in chosen) or "no scheduler", do)
    engine = chosen[0]
    _check_flags(engine, time, partition, image, volume, setup)
    config = read_run(path, set_, with_, without)
    card, hosts, gpus = _check_plan(config, hardware)
    flags = [f for flag, values in (("--set", set_), ("--with", with_), ("--without", without)) for v in values
             for f in (flag, v)]  # fmt: skip
    where = "run.yaml" if engine == "kubernetes" else str(path)
    prefix = "/config/" if engine == "kubernetes" else ""
    command = shlex.join(["-m", "optrush", "train", prefix + where, *flags, "--resume", "auto"])
    job = Job(
        name=_name(config), hosts=hosts, gpus=gpus, card=card, command=command, config=read_text(path),
        path=str(path), time=time, image=image, volume=volume, partition=partition, setup=tuple(setup),
    )  # fmt: skip
    if engine == "skypilot" and not setup:
        from optrush.console import say

        say("the job installs optrush from the package index; for another source: --setup 'python3 -m pip install URL'")
    text = _rendered(engine, job)
    file, submit = ENGINES[engine]
    if str(out) == "-":
        print(text, end="")
        return
    target = Path(file) if out is None else out
    if target.exists() and not force:
        raise ConfigError(f"to write {target}", "it exists", "name another file with --out, or give --force")
    try:
        target.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"to write {target}", f"{error.strerror}", "name another file with --out") from None
    print(f"{submit} {shlex.quote(str(target))}")


def _check_flags(
    engine: str, time: str | None, partition: str | None, image: str | None, volume: str | None, setup: list[str]
) -> None:
    """Raise ConfigError for a flag that the scheduler does not use, or a missing one that it needs."""
    owners = {"--time": ("slurm",), "--partition": ("slurm",), "--image": ("kubernetes",),
              "--volume": ("kubernetes", "skypilot")}  # fmt: skip
    for (flag, engines), value in zip(owners.items(), (time, partition, image, volume), strict=True):
        if value is not None and engine not in engines:
            do = f"leave it out; it is for --{' and --'.join(engines)}"
            raise ConfigError(f"`optrush launch --{engine}`", f"{flag} {value}", do)
    needed = {"--image": (image, "an image that has optrush"), "--volume": (volume, "the claim that holds the files")}
    for flag, (value, what) in needed.items():
        if engine == "kubernetes" and value is None:
            raise ConfigError("`optrush launch --kubernetes`", f"no {flag}", f"give {flag} NAME: {what}")
    if time is not None and not re.fullmatch(r"(\d+-)?\d{1,3}:\d\d:\d\d", time):
        raise ConfigError(f"--time {time}", "not a time of Slurm", "write HH:MM:SS or D-HH:MM:SS")
    for flag, value, form in (("--partition", partition, r"[\w.,-]+"), ("--image", image, r"[\w./:@-]+"),
                              ("--volume", volume, r"[\w.-]+")):  # fmt: skip
        if value is not None and not re.fullmatch(form, value):
            raise ConfigError(f"{flag} {value}", "a name with characters that no such name has", "check the spelling")
    if any(len(line.splitlines()) > 1 for line in setup):
        raise ConfigError("--setup", "several lines", "give --setup once a line")


def _check_plan(config: Config, hardware: str) -> tuple[str, int, int]:
    """Return card, hosts and GPUs per host; raise ConfigError if the run cannot start or does not fit."""
    from optrush.decide import decide
    from optrush.hardware import GIB, parse_hardware
    from optrush.planner import search

    device, count = parse_hardware(hardware)
    if device.kind == "cpu":
        raise ConfigError(f"--hardware {hardware}", "no GPU", "name the GPUs of a host, as 8xh100")
    decided = decide(config, ranks=count, device=device)
    prediction = search.predict_decided(decided)
    if not prediction.fits:
        host, most = prediction.host_bytes, prediction.host_room_bytes
        found, do = f"it needs {prediction.peak_bytes / GIB:.1f} GiB of a card", "`optrush plan CONFIG --hardware"
        if most is not None and host > most:
            found += f" and {host / GIB:.1f} GiB of host memory a rank, for which {most / GIB:.1f} are assumed"
        raise ConfigError(f"`optrush launch` on {hardware}", found, f"{do} {hardware}` says what fits")
    if decided.reasons:
        print("\n".join(decided.lines()), file=sys.stderr)
    card = re.sub(r"^(\d+x)+|:.*$", "", hardware.strip(), flags=re.IGNORECASE)
    return card, device.hosts, count // device.hosts


def _name(config: Config) -> str:
    """Return a name valid for every scheduler, from the run's folder: lower case, at most 44 letters.

    A Service of Kubernetes must start with a letter, and YAML does not read a bare `true` or `on` as text.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", Path(config.output).name.lower()).strip("-")[:40].strip("-")
    if not stem:
        return "run"
    return stem if stem[0].isalpha() and isinstance(yaml.safe_load(stem), str) else f"run-{stem}"


def _rendered(engine: str, job: Job) -> str:
    """Format the scheduler's template."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("optrush.cli").joinpath(f"job_{engine}.j2").read_text("utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quoted"] = shlex.quote
    rtx = f"RTX{job.card.upper()}" if re.match(r"[345]0[5-9]0", job.card) else job.card.upper()
    values: dict[str, Any] = {**vars(job), "accelerator": SKYPILOT.get(job.card.lower(), rtx)}
    return environment.from_string(source).render(**values)
