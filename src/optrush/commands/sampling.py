"""The flags that say how answers are drawn, for the verbs that ask a model."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

Temperature = Annotated[
    float, typer.Option("--temperature", help="above 0; below 1 the likely tokens get likelier still")
]
TopP = Annotated[float, typer.Option("--top-p", help="draw from the fewest tokens whose probabilities sum to this")]
TopK = Annotated[int, typer.Option("--top-k", help="draw from the likeliest so many; 0: all")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="most tokens of an answer")]
Greedy = Annotated[bool, typer.Option("--greedy", help="take the likeliest token each time: the same answer again")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="of the draw; a new one each time if not given")]
Plain = Annotated[
    bool, typer.Option("--plain", help="no chat template: what you write is continued, as it stands, by the model")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="the system prompt")]
TheModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="a run's folder, a Hugging Face folder or hub id, tiny", show_default=False),
]


def drawn(seed: int | None) -> int:
    """The seed given, or a new one."""
    return secrets.randbelow(2**31) if seed is None else seed
