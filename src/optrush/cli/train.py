"""train: train a model. eval: measure its held-out loss."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optrush.cli.options import ConfigFile, Json, Ranks, Set, With, Without, launches, read_run
from optrush.console import shown
from optrush.errors import ConfigError, RunError
from optrush.launch import BEGUN, launched

if TYPE_CHECKING:
    from optrush.config import Config
    from optrush.decide import Decided


def train_command(
    path: ConfigFile,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    ranks: Ranks = 1,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|FOLDER", help="resume from the newest intact checkpoint, or this"),
    ] = None,
    allow_change: Annotated[
        list[str], typer.Option("--allow-change", metavar="FIELD", help="with --resume: accept that this field changed")
    ] = [],  # noqa: B006
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show configuration, memory, disk, data and first rows; write nothing")
    ] = False,
    overfit: Annotated[
        int | None, typer.Option("--overfit", metavar="N", min=1, help="overfit the first N batches, as a check")
    ] = None,
    overfit_steps: Annotated[
        int | None,
        typer.Option("--overfit-steps", metavar="STEPS", min=2, help="maximum of steps (default 200)"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --dry-run or --overfit: print one JSON document")
    ] = False,
) -> None:
    """Train a model.

    Flags change CONFIG in the order --set, --with, --without. All output goes to the run's folder (`output`), whose
    path is printed at the end. Ctrl-C saves and stops; --resume auto resumes. --overfit 1 trains on the first
    batch until its loss is near zero, or prints the likely cause; it writes nothing.

    The smallest useful file:

    \b
      model: tiny                      # or a Hugging Face folder or hub id
      objective: sft                   # or pretrain, dpo, kto, reward, distill, ...
      data: {sample: recipes, eval: 0.1}
      output: runs/first
      with: {packing: {}, attention: {}, fused-loss: {}}

    `optrush techniques` lists the names for `with`.
    """
    config = read_run(path, set_, with_, without)
    _check_flags(allow_change, resume, dry_run, overfit, overfit_steps, as_json)
    start: Literal["auto"] | Path | None = "auto" if resume == "auto" else Path(resume) if resume else None
    from optrush.decide import as_begun, decide
    from optrush.trainer import copies, distributed

    if start is not None:
        copies.fetch_copies(config, launched()[1], start)
        config = as_begun(config, ranks if launches(ranks) else launched()[1])
    decided = decide(config, ranks=ranks if launches(ranks) else None)
    if dry_run:
        if launched()[0] == 0:  # one process shows all ranks
            _show_dry_run(decided, start, as_json)
        return
    if launches(ranks):
        from optrush import launch

        raise typer.Exit(launch.spawn(sys.argv[1:], ranks, None if overfit else _checked(decided, start)))
    if overfit is not None:
        from optrush.trainer.overfit import STEPS, run_overfit

        with distributed.leaving():
            result = run_overfit(decided, overfit, overfit_steps or STEPS)
        if launched()[0] == 0:
            print(json.dumps(dataclasses.asdict(result)) if as_json else result.text())
        raise typer.Exit(0 if result.reached else 1)
    from optrush.config import SECTIONS
    from optrush.trainer.run import RunRequest, run

    with distributed.leaving():
        outcome = run(RunRequest(decided, start, frozenset(allow_change), begun=BEGUN))
    if outcome.code == 0 and launched()[0] == 0:
        own_metrics = config.loss is not None or config.objective in SECTIONS
        print("\n".join(map(shown, outcome.closing_lines(own_metrics, config.scored))), file=sys.stderr)
        print(outcome.output)
    raise typer.Exit(outcome.code)


def _checked(decided: Decided, start: Literal["auto"] | Path | None) -> Callable[[], str]:
    """Check the run's output folder in one process, not in each rank; return a function for the remedy."""
    from optrush.trainer.run import check_run_output
    from optrush.trainer.run_dir import resume_line

    check_run_output(decided, start)
    return partial(resume_line, Path(decided.config.output))


def _check_flags(
    allow_change: list[str], resume: str | None, dry_run: bool, overfit: int | None, steps: int | None, as_json: bool
) -> None:
    """Raise ConfigError for incompatible flags."""
    no_document = "no --dry-run and no --overfit: a run writes metrics.jsonl, no document"
    nothing = "no --resume: there is nothing to compare with"
    overfits, fix = overfit is not None, "leave one of them out"
    alone = "it begins with the model, and leaves no checkpoint"
    for wrong, asked, found, do in (
        (allow_change and resume is None, "--allow-change", nothing, "leave it out"),
        (as_json and not (dry_run or overfits), "--json", no_document, "give both, or neither"),
        (steps is not None and not overfits, "--overfit-steps", "no --overfit", "give both, or neither"),
        (overfits and dry_run, "--overfit with --dry-run", "one trains and the other does not", fix),
        (overfits and resume is not None, "--overfit with --resume", alone, fix),
    ):
        if wrong:
            raise ConfigError(asked, found, do)


def _show_dry_run(decided: Decided, start: Literal["auto"] | Path | None, as_json: bool) -> None:
    """Print the dry run of a configuration, as text or as one JSON object."""
    from optrush.cli.data import data_lines
    from optrush.cli.plan import memory_lines, work_lines
    from optrush.console import use_color
    from optrush.trainer import dry_run

    config = decided.config
    facts, prediction = dry_run.dry_run(decided, start, dry_run.launch_line(sys.argv[1:]))
    if as_json:
        text = json.dumps(facts)
    else:
        page = {"rows": facts["rows"], "seq": config.batch.seq, "too_long": config.data.too_long}
        rows = ["random tokens: nothing to decode"] if facts["rows"] is None else data_lines(page, use_color())
        plan = () if prediction is None else (memory_lines(prediction), work_lines(prediction))
        text = dry_run.dry_run_text(facts, config, rows, *([line[2:] for line in lines] for lines in plan))
    # The rows are the user's text, and the terminal may not encode all of it.
    print(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8"))


def eval_command(
    path: ConfigFile,
    set_: Set = [],  # noqa: B006
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="evaluate this model")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="evaluate on this file")] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAME,...", help="evaluate public tasks instead: arc_easy, or a YAML file"),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="requests per task (default: all)")] = None,
    ranks: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Measure a model's loss on held-out data, or its answers to public tasks.

    Prints the mean negative log-likelihood per target token (natural logarithm). The data are --data, else the held-out
    rows of CONFIG (`data.eval`), else all its rows. The model is CONFIG's untrained one; --model OUTPUT/model evaluates
    the trained one. Adapters and quantization of CONFIG are not applied. For preferences: the mean loss per pair, and
    the rewards of --model relative to CONFIG's model.

    --tasks runs the Language Model Evaluation Harness instead (pip install optrush[eval]).
    """
    if tasks is not None:
        return _eval_tasks(read_run(path, set_, with_, without), tasks, limit, model, as_json, data, ranks)
    if limit is not None:
        raise ConfigError("--limit", "no --tasks: it limits their requests", "for rows set data.max_samples")
    rows: list[str] = []
    if data is not None:
        rows = [f"data.path={json.dumps(data, ensure_ascii=False)}", "data.random=null", "data.sample=null"]
    other = (
        [f"model.path={json.dumps(model, ensure_ascii=False)}", "model.shape=null", "model.revision=null"]
        if model
        else []
    )
    before = read_run(path, [*set_, *rows], with_, without)
    config = read_run(path, [*set_, *other, *rows], with_, without)
    if config.scored and model is not None:
        found = "a reward model: its scores are compared during the run"
        raise ConfigError("`optrush eval --model` of `objective: reward`", found, "read eval_loss of its metrics.jsonl")
    if config.has_reference and model is None:
        found, do = "no --model: CONFIG's would be compared with itself", "give the trained one: --model OUTPUT/model"
        raise ConfigError(f"`optrush eval` of `objective: {config.objective}`", found, do)
    from optrush.decide import decide, without_adapters
    from optrush.trainer import distributed, dpo_reference
    from optrush.trainer.build import build
    from optrush.trainer.trainer import evaluate

    config, left_out = without_adapters(config) if model else (config, [])
    if launches(ranks):
        from optrush import launch

        decide(config, ranks=ranks)
        raise typer.Exit(launch.spawn(sys.argv[1:], ranks))
    from optrush.console import say

    if left_out:
        say(f"{model} is measured as it lies there, without {', '.join(left_out)}")
    if data is None and isinstance(config.data.eval, str):
        data = config.data.eval
    with distributed.leaving():
        if config.has_reference:
            trainer = dpo_reference.build_with_reference(decide(config), decide(before), data, say)
        else:
            trainer = build(decide(config), training=False, data=data, progress=say)
        loss, targets, figures = evaluate(trainer)
    if trainer.world.rank == 0:
        assert trainer.evaluation is not None
        result = {"loss": loss, "target_tokens": targets, "documents": trainer.evaluation.documents}
        result |= {"rows": trainer.evaluation.rows, "too_long": trainer.sources.too_long, **figures}
        if bad := [name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value)]:
            found = f"{', '.join(bad)} is no finite number: the weights or the data overflow"
            raise RunError("the evaluation", found, "look at the run's losses; take an earlier checkpoint, or float32")
        print(json.dumps(result) if as_json else "\n".join(f"{k:<14} {v}" for k, v in result.items()))


def _eval_tasks(
    config: Config, tasks: str, limit: int | None, model: str | None, as_json: bool, data: str | None, ranks: int
) -> None:
    """Measure the configuration's model, or another one, on public tasks."""
    from optrush.cli import tasks as harness
    from optrush.generation import find_model

    if data is not None or ranks > 1:
        found = "--data: tasks have rows of their own" if data is not None else f"--ranks {ranks}: they run on one"
        raise ConfigError("`optrush eval --tasks`", found, "leave one of the two out")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks", "no name", "name one: --tasks arc_easy")
    if model is None and config.model.path is None:
        found = f"CONFIG's model is random: the shape {config.model.shape}"
        raise ConfigError("`optrush eval --tasks`", found, f"name the trained one: --model {config.output}")
    result = harness.run_tasks(find_model(model or str(config.model.path)), names, limit)
    print(json.dumps(result) if as_json else harness.table(result))
