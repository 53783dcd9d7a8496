"""train, eval: what makes a model, and what measures it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from optrush.commands.options import Config, Json, Ranks, Set, With, Without, launches, read_run
from optrush.errors import ConfigError
from optrush.launch import launched


def train(
    config: Config,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    ranks: Ranks = 1,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|FOLDER", help="go on from the newest intact checkpoint, or this"),
    ] = None,
    allow_change: Annotated[
        list[str], typer.Option("--allow-change", metavar="FIELD", help="with --resume: accept that this changed")
    ] = [],  # noqa: B006
) -> None:
    """Train a model.

    CONFIG says how; flags change it in the order --set, --with, --without. All output goes to the run's folder
    (`output`), whose path is printed at the end. Ctrl-C saves and stops; --resume auto goes on.

    The smallest useful file:

    \b
      model: tiny                      # or a Hugging Face folder or hub id
      objective: sft                   # or pretrain
      data: {sample: recipes, eval: 0.1}
      output: runs/first
      with: {packing: {}, attention: {}, fused-loss: {}}

    `optrush techniques` lists what can stand under `with`.
    """
    run = read_run(config, set_, with_, without)
    if allow_change and resume is None:
        raise ConfigError("--allow-change", "no --resume: there is nothing to compare with", "leave it out")
    go_on: Literal["auto"] | Path | None = "auto" if resume == "auto" else Path(resume) if resume else None
    from optrush.prepare import prepare

    if launches(ranks):
        from optrush import launch
        from optrush.fit import look

        look(prepare(run, ranks=ranks), go_on)  # what can be refused is refused once, here
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush import distributed
    from optrush.fit import fit

    with distributed.leaving():
        outcome = fit(prepare(run), go_on, frozenset(allow_change))
    if outcome.code == 0 and launched()[0] == 0:
        if outcome.evals:
            shown = " -> ".join(f"{loss:.4f}" for loss in dict.fromkeys((outcome.evals[0], outcome.evals[-1])))
            print(f"held-out loss {shown}", file=sys.stderr)
        print(outcome.output)
    raise typer.Exit(outcome.code)


def evaluate(
    config: Config,
    set_: Set = [],  # noqa: B006
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="another model's folder")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="another file of rows")] = None,
    ranks: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Measure a model's loss on held-out data.

    The mean negative log-likelihood a target token, natural logarithm. On --data; else on what CONFIG holds out
    (`data.eval`); else on all its data. The model is CONFIG's, not the trained one: for that, --model OUTPUT/model.
    """
    sets = [*set_, *([f"model.path={json.dumps(model, ensure_ascii=False)}", "model.shape=null"] if model else [])]
    if data is not None:
        sets += [f"data.path={json.dumps(data, ensure_ascii=False)}", "data.random=null", "data.sample=null"]
    run = read_run(config, sets, with_, without)
    from optrush import distributed
    from optrush.assemble import assemble
    from optrush.prepare import prepare
    from optrush.train import evaluate as measure

    if launches(ranks):
        from optrush import launch

        prepare(run, ranks=ranks)
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.console import rows_read

    if data is None and isinstance(run.data.eval, str):
        data = run.data.eval
    with distributed.leaving():
        job = assemble(prepare(run), training=False, data=data, progress=rows_read("tokenising"))
        loss, targets = measure(job)
    if job.world.rank == 0:
        assert job.evaluation is not None
        found = {
            "loss": loss,
            "target_tokens": targets,
            "documents": job.evaluation.documents,
            "rows": job.evaluation.rows,
            "too_long": job.too_long,
        }
        print(json.dumps(found) if as_json else "\n".join(f"{k:<14} {v}" for k, v in found.items()))
