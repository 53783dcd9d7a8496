"""What several verbs share: the configuration with the flags laid over it, and whether to launch ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optrush.errors import ConfigError

if TYPE_CHECKING:
    from optrush.config import Run

Config = Annotated[Path, typer.Argument(help="the run's YAML", metavar="CONFIG", show_default=False)]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="change a value of the YAML: optim.lr=1e-4; may be repeated"),
]
With = Annotated[
    list[str],
    typer.Option(
        "--with", metavar="NAME[:OPTION=VALUE,...]", help="add a technique: recompute:every=2; may be repeated"
    ),
]
Without = Annotated[
    list[str], typer.Option("--without", metavar="NAME", help="leave a technique of the YAML out; may be repeated")
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="processes on this machine, one a GPU; needs ddp or fsdp")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document, for programs")]


def read_run(path: Path, sets: list[str], withs: list[str], withouts: list[str]) -> Run:
    """The YAML with its flags, checked."""
    from optrush.config import parse, refuse

    if not path.is_file():
        raise ConfigError(f"the configuration {path}", "no such file", "name a YAML file; examples/ has some")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    run = parse(text, str(path), sets, withs, withouts)
    refuse(run)  # whatever a verb does with it, it may write it down
    return run


def launches(ranks: int) -> bool:
    """Whether this process must start the others: it was told how many, and no launcher has started it."""
    started = os.environ.get("WORLD_SIZE")
    if ranks > 1 and started is not None and int(started) != ranks:
        raise ConfigError(f"--ranks {ranks}", f"a launcher has started {started}", "leave --ranks out under a launcher")
    return ranks > 1 and started is None
