"""The verbs: parses, dispatches, prints. Imports what a verb needs inside it, so that --help answers at once.

Exit codes: 0 done; 1 the run failed; 2 the user must change something, nothing was written; 143 stopped by a signal,
resumable.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from optrush import __version__
from optrush.errors import ConfigError, RunError, UserError
from optrush.launch import launched

if TYPE_CHECKING:
    from optrush.config import Run

app = typer.Typer(
    name="optrush",
    help="Train large language models as efficiently as the hardware allows, and prove it.",
    epilog="A run is a YAML file: `optrush train --help` shows the smallest one, examples/ has commented ones. "
    "Exit codes: 0 done, 1 the run failed, 2 something must be changed and nothing was written, 143 stopped by a "
    "signal and resumable. --debug anywhere shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
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

    if _launches(ranks):
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


@app.command("eval")
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

    if _launches(ranks):
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


@app.command()
def techniques(as_json: Json = False) -> None:
    """List the techniques.

    What each does, what it promises about the numbers, which part of a run it owns alone (two owners of one part
    cannot be combined), and its options with their defaults. --json also names its source and its test.
    """
    import dataclasses

    from optrush.techniques import ALL

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
        print(f"{row['name']:<12} {row['summary']}")
        owns = ", ".join(row["claims"]).lower() or "nothing alone"
        promise = row["numerics"].lower().replace("_", " ")
        print(f"{'':<12} {promise}; owns {owns}" + (f"; options: {options}" if options else ""))


def read_run(path: Path, sets: list[str], withs: list[str], withouts: list[str]) -> Run:
    """The YAML with its flags, checked."""
    from optrush.config import parse

    if not path.is_file():
        raise ConfigError(f"the configuration {path}", "no such file", "name a YAML file; examples/ has some")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    return parse(text, str(path), sets, withs, withouts)


def _launches(ranks: int) -> bool:
    """Whether this process must start the others: it was told how many, and no launcher has started it."""
    started = os.environ.get("WORLD_SIZE")
    if ranks > 1 and started is not None and int(started) != ranks:
        raise ConfigError(f"--ranks {ranks}", f"a launcher has started {started}", "leave --ranks out under a launcher")
    return ranks > 1 and started is None


def main() -> None:
    """The command: parses sys.argv, and exits with the code that the module's docstring lists."""
    code = _run()
    if "RANK" in os.environ:
        # Threads of gloo can outlive their process group and abort the process while Python takes itself down (seen
        # once in a dozen two-rank runs on two cores). All is written and closed by now: leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app(prog_name="optrush")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except (UserError, RunError) as error:
        if debug:
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.everywhere:
            print(error if rank == "0" else f"rank {rank}:\n{error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if debug or error.filename is None or error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS):
            raise
        print(ConfigError(f"{error.filename}", f"{error.strerror}", "give a path that can be used"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
