"""Shared options of several verbs, the configuration with these options applied, and the launch of ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optrush.errors import ConfigError

if TYPE_CHECKING:
    from optrush.config import Config


ConfigFile = Annotated[Path, typer.Argument(help="the run's YAML", metavar="CONFIG", show_default=False)]
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
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="processes on this machine, one per GPU; needs ddp or fsdp")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document, for programs")]


def read_run(path: Path, sets: list[str], withs: list[str], withouts: list[str]) -> Config:
    """Read and check the YAML with the flags."""
    from optrush.config import parse_config, refuse_secrets
    from optrush.files import config_text

    config = parse_config(config_text(path), str(path), sets, withs, withouts)
    refuse_secrets(config)  # any verb can write it to a file
    return config


def launches(ranks: int) -> bool:
    """Return whether this process must start the ranks: `--ranks` is given, and no launcher has started it."""
    started = os.environ.get("WORLD_SIZE")
    if ranks > 1 and started is not None and int(started) != ranks:
        raise ConfigError(f"--ranks {ranks}", f"a launcher has started {started}", "leave --ranks out under a launcher")
    return ranks > 1 and started is None


# --- sampling of answers, for the verbs that run a model

Temperature = Annotated[float, typer.Option("--temperature", help="0.001 to 1000; below 1 favours likely tokens")]
TopP = Annotated[float, typer.Option("--top-p", help="sample from the fewest tokens whose probabilities sum to this")]
TopK = Annotated[int, typer.Option("--top-k", help="sample from the k most likely tokens (0: no limit)")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="maximum number of tokens per answer")]
Greedy = Annotated[bool, typer.Option("--greedy", help="always take the most likely token: repeatable answers")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="seed of the sampling (default: a new one each time)")
]
Plain = Annotated[bool, typer.Option("--plain", help="no chat template: the model continues your text as it is")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="the system prompt")]
TheModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="a run's folder, a Hugging Face folder or hub id, tiny", show_default=False),
]


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Return the flags of those options that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{n.replace('_', '-')}" for n, source in sources.items() if source is not None and source.name != "DEFAULT"
    ]


def demand_used(context: typer.Context) -> None:
    """Raise ConfigError for an option without effect next to another one."""
    if context.params["plain"] and given(context, ["system"]):
        raise ConfigError("--system with --plain", "a text that is continued has no system prompt", "leave one out")
    if context.params["greedy"] and (void := given(context, ["temperature", "top_p", "top_k"])):
        raise ConfigError(
            f"{void[0]} with --greedy", "the most likely token is always taken, so nothing is sampled", "leave one out"
        )


def drawn(seed: int | None) -> int:
    """Return the seed, or a new one if it is None."""
    return secrets.randbelow(2**31) if seed is None else seed
