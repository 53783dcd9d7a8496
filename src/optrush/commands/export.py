"""export: a run's checkpoint as a folder for transformers, checked against the trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from optrush.commands.options import Json
from optrush.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder, or its run.yaml", show_default=False)],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="STEP|FOLDER", help="which one; else the best, else the newest intact"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="the folder to write; RUN/model if not given")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="convert the weights; as they were trained if not given"),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="the adapter's files, as PEFT keeps them")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not load the folder and compare logits")] = False,
    max_shard_gb: Annotated[
        float | None,
        typer.Option("--max-shard-gb", min=0.001, metavar="GB", help="most of one file of weights; 5 if not given"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of a run as a folder that transformers loads.

    Adapters are merged in float32, then rounded. With the weights go the tokenizer with its chat template, the
    generation config and a model card. Then the folder is loaded by transformers and its logits are compared with the
    trained model's; a difference beyond what rounding explains is an error (exit code 1). The run's data is not needed.
    """
    if adapter and dtype is not None:
        raise ConfigError(f"--adapter with --dtype {dtype}", "an adapter is written as it was trained", "leave one out")
    if adapter and max_shard_gb is not None:
        raise ConfigError(f"--adapter with --max-shard-gb {max_shard_gb:g}", "an adapter is one file", "leave one out")
    from optrush.export import deliver

    found = deliver(
        run, out, checkpoint=checkpoint, dtype=dtype, adapter=adapter, verifies=not no_verify,
        max_shard_bytes=1e9 * (5.0 if max_shard_gb is None else max_shard_gb),
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.facts()))
        return
    for name, why in found.passed:
        print(f"{name} was passed over: {why}", file=sys.stderr)
    print(f"step {found.step}, {found.dtype or 'an adapter'}, {found.size_bytes / 1e9:.2f} GB", file=sys.stderr)
    if not no_verify:
        print(found.compared or "an adapter's files are not compared: merge them to be sure", file=sys.stderr)
    print(found.out)
