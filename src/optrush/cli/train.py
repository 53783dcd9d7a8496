"""train, eval: what makes a model, and what measures it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optrush.cli.options import ConfigFile, Json, Ranks, Set, With, Without, launches, read_run
from optrush.errors import ConfigError
from optrush.launch import launched

if TYPE_CHECKING:
    from optrush.config import Config


def train(
    config: ConfigFile,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show configuration, memory, disk, data and first rows; write nothing")
    ] = False,
    overfit: Annotated[
        int | None, typer.Option("--overfit", metavar="N", min=1, help="learn the first N batches by heart, as a check")
    ] = None,
    overfit_steps: Annotated[
        int | None, typer.Option("--overfit-steps", metavar="STEPS", min=2, help="with --overfit: at most; 200")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --dry-run or --overfit: print one JSON document")
    ] = False,
) -> None:
    """Train a model.

    CONFIG says how; flags change it in the order --set, --with, --without. All output goes to the run's folder
    (`output`), whose path is printed at the end. Ctrl-C saves and stops; --resume auto goes on.
    --overfit 1 trains on the first batch alone, until its loss is near zero, or says why it is not; it writes nothing.

    The smallest useful file:

    \b
      model: tiny                      # or a Hugging Face folder or hub id
      objective: sft                   # or pretrain, dpo
      data: {sample: recipes, eval: 0.1}
      output: runs/first
      with: {packing: {}, attention: {}, fused-loss: {}}

    `optrush techniques` lists what can stand under `with`.
    """
    run = read_run(config, set_, with_, without)
    if allow_change and resume is None:
        raise ConfigError("--allow-change", "no --resume: there is nothing to compare with", "leave it out")
    if as_json and not (dry_run or overfit):
        found = "no --dry-run and no --overfit: a run writes metrics.jsonl, no document"
        raise ConfigError("--json", found, "give both, or neither")
    _alone(overfit, overfit_steps, dry_run, resume)
    go_on: Literal["auto"] | Path | None = "auto" if resume == "auto" else Path(resume) if resume else None
    from optrush.resolve import resolve

    if dry_run:
        return _rehearse(run, ranks if launches(ranks) else None, go_on, as_json)
    if overfit is not None:
        return _overfit(run, ranks, overfit, overfit_steps, as_json)
    if launches(ranks):
        from optrush import launch
        from optrush.trainer.run import look

        look(resolve(run, ranks=ranks), go_on)  # what can be refused is refused once, here
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.trainer import distributed
    from optrush.trainer.run import fit

    with distributed.leaving():
        outcome = fit(resolve(run), go_on, frozenset(allow_change))
    if outcome.code == 0 and launched()[0] == 0:
        if outcome.evals:
            shown = " -> ".join(f"{loss:.4f}" for loss in dict.fromkeys((outcome.evals[0], outcome.evals[-1])))
            print(f"held-out loss {shown}", file=sys.stderr)
        print(outcome.output)
    raise typer.Exit(outcome.code)


def _alone(overfit: int | None, steps: int | None, dry_run: bool, resume: str | None) -> None:
    """Raises ConfigError for flags that say nothing together."""
    if steps is not None and overfit is None:
        raise ConfigError("--overfit-steps", "no --overfit", "give both, or neither")
    if overfit is not None and dry_run:
        raise ConfigError("--overfit with --dry-run", "one trains and the other does not", "leave one of them out")
    if overfit is not None and resume is not None:
        do = "leave one of them out"
        raise ConfigError("--overfit with --resume", "it begins with the model, and leaves no checkpoint", do)


def _overfit(config: Config, ranks: int, count: int, steps: int | None, as_json: bool) -> None:
    """Exit code 1 where the batches were not learnt."""
    from optrush.resolve import resolve
    from optrush.trainer import distributed

    if launches(ranks):
        from optrush import launch

        resolve(config, ranks=ranks)
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.trainer.overfit import STEPS, overfit

    with distributed.leaving():
        verdict = overfit(resolve(config), count, steps or STEPS)
    if launched()[0] == 0:
        print(json.dumps(dataclasses.asdict(verdict)) if as_json else verdict.text())
    raise typer.Exit(0 if verdict.reached else 1)


def _rehearse(config: Config, ranks: int | None, go_on: Literal["auto"] | Path | None, as_json: bool) -> None:
    """Every rank of it in this one process; under a launcher the first speaks for all."""
    if launched()[0] != 0:
        return
    from optrush.resolve import resolve
    from optrush.trainer import dry_run

    facts = dry_run.rehearse(resolve(config, ranks=ranks), go_on, dry_run.launch_line(sys.argv[1:]))
    shown = json.dumps(facts) if as_json else dry_run.text(facts, config, dry_run.colours())
    # The rows are the user's text, whatever the terminal can write.
    print(shown.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8"))


def evaluate(
    config: ConfigFile,
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
    It is measured as it lies there: techniques that would train part of it, or quantise what they freeze, are left out.
    Of pairs the mean loss a pair and the rewards: those of --model, against CONFIG's.
    """
    rows: list[str] = []
    if data is not None:
        rows = [f"data.path={json.dumps(data, ensure_ascii=False)}", "data.random=null", "data.sample=null"]
    other = [f"model.path={json.dumps(model, ensure_ascii=False)}", "model.shape=null"] if model else []
    before = read_run(config, [*set_, *rows], with_, without)
    run = read_run(config, [*set_, *other, *rows], with_, without)
    if run.objective == "dpo" and model is None:
        alone = "no --model: CONFIG's would be compared with itself"
        raise ConfigError("`optrush eval` of `objective: dpo`", alone, "give the trained one: --model OUTPUT/model")
    from optrush.resolve import dense, resolve
    from optrush.trainer import distributed, dpo_reference
    from optrush.trainer.build import build
    from optrush.trainer.trainer import evaluate as measure

    run, gone = dense(run) if model else (run, [])
    if launches(ranks):
        from optrush import launch

        resolve(run, ranks=ranks)
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.console import say

    if gone:
        say(f"{model} is measured as it lies there, without {', '.join(gone)}")
    if data is None and isinstance(run.data.eval, str):
        data = run.data.eval
    with distributed.leaving():
        if run.objective == "dpo":
            trainer = dpo_reference.against(resolve(run), resolve(before), data, say)
        else:
            trainer = build(resolve(run), training=False, data=data, progress=say)
        loss, targets, figures = measure(trainer)
    if trainer.world.rank == 0:
        assert trainer.evaluation is not None
        found = {
            "loss": loss,
            "target_tokens": targets,
            "documents": trainer.evaluation.documents,
            "rows": trainer.evaluation.rows,
            "too_long": trainer.sources.too_long,
            **figures,
        }
        print(json.dumps(found) if as_json else "\n".join(f"{k:<14} {v}" for k, v in found.items()))
