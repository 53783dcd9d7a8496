"""The flags that say how answers are drawn, for the verbs that ask a model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated

import typer

from optrush.errors import ConfigError

Temperature = Annotated[
    float, typer.Option("--temperature", help="0.001 to 1000; below 1 the likely tokens get likelier still")
]
TopP = Annotated[float, typer.Option("--top-p", help="draw from the fewest tokens whose probabilities sum to this")]
TopK = Annotated[int, typer.Option("--top-k", help="draw from the likeliest so many; 0: all")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="most tokens of an answer")]
Greedy = Annotated[bool, typer.Option("--greedy", help="take the likeliest token each time: the same answer again")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="of the draw; a new one each time if not given")
]
Plain = Annotated[
    bool, typer.Option("--plain", help="no chat template: what you write is continued, as it stands, by the model")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="the system prompt")]
TheModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="a run's folder, a Hugging Face folder or hub id, tiny", show_default=False),
]


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of these options that stand on the command line, as they are written there."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{n.replace('_', '-')}" for n, source in sources.items() if source is not None and source.name != "DEFAULT"
    ]


def demand_used(context: typer.Context) -> None:
    """Raises ConfigError for an option that another one makes void."""
    if context.params["plain"] and given(context, ["system"]):
        raise ConfigError("--system with --plain", "a text that is continued has no system prompt", "leave one out")
    if context.params["greedy"] and (void := given(context, ["temperature", "top_p", "top_k"])):
        raise ConfigError(f"{void[0]} with --greedy", "the likeliest token is taken, none is drawn", "leave one out")


def drawn(seed: int | None) -> int:
    """The seed given, or a new one."""
    return secrets.randbelow(2**31) if seed is None else seed
