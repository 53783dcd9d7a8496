"""The command: registers the verbs, prints errors, sets the exit code.

Exit codes: 0 done; 1 the run failed; 2 the user must change something, nothing was written; 130 interrupted by the
keyboard; 143 stopped by a signal, resumable.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer
import typer.core

from optrush import __version__
from optrush.console import LOST, shown
from optrush.errors import ConfigError, RunError, UserError, one_line
from optrush.launch import TRACKER_THREAD

# Each verb: its function, and its line in the list of verbs, the first sentence of its docstring.
VERBS = {
    "init": ("setup:init", "Write a commented YAML for a first run."),
    "plan": ("plan:plan", "Find what fits and how fast it is, by method and techniques."),
    "tune": ("tune:tune", "Measure the plan's best settings and write the fastest."),
    "import": ("import_config:import_command", "Translate another trainer's configuration."),
    "train": ("train:train_command", "Train a model."),
    "eval": ("train:eval_command", "Measure a model's loss on held-out data, or its answers to public tasks."),
    "launch": ("launch:launch", "Write the job file of a run for a cluster's own scheduler; nothing is submitted."),
    "bench": ("bench:bench", "Measure optimisations one by one."),
    "calibrate": ("plan:calibrate", "Measure this machine's rates, for the plan."),
    "report": ("bench:report", "Write report.html from the records."),
    "techniques": ("setup:techniques", "List the techniques."),
    "export": (
        "chat:export_command",
        "Write a checkpoint of a run as a folder that transformers loads, as a GGUF file, or in 8-bit floats.",
    ),
    "chat": ("chat:chat", "Talk to a model in the terminal."),
    "generate": ("chat:generate", "Answer a file of prompts."),
    "doctor": ("setup:doctor", "Show what this machine has, and which techniques it can run."),
    "schema": ("setup:schema", "Print the JSON schema of a run's YAML, for editors."),
    "data": ("data:data_app", "Clean the data of a run, see it as it is trained on, tokenise it ahead."),
}


class Verbs(dict[str, Any]):
    """The commands by name; a command's module is imported at its first use, to keep `--help` quick."""

    def __missing__(self, name: str) -> Any:
        module, _, function = VERBS[name][0].partition(":")
        verb = getattr(importlib.import_module(f"optrush.cli.{module}"), function)
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(rich_markup_mode=None, add_completion=False)
            alone.command(name)(verb)
            verb = alone
        self[name] = typer.main.get_command(verb)
        self[name].name = name
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in VERBS else default

    def keys(self) -> Any:
        return VERBS.keys()

    def items(self) -> Any:
        return [(name, self[name]) for name in VERBS]


class LazyGroup(typer.core.TyperGroup):
    """The group of all verbs; lists them without importing their modules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Verbs()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.removesuffix(".")) for name, (_, text) in VERBS.items()])


app = typer.Typer(
    name="optrush",
    cls=LazyGroup,
    help="Train large language models as efficiently as the hardware allows, and prove it.",
    epilog="A run is a YAML file: `optrush train --help` shows the smallest one, examples/ has commented ones. "
    "Exit codes: 0 done, 1 the run failed, 2 something must be changed and nothing was written, 143 stopped by a "
    "signal and resumable. --debug anywhere shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _of_rank(rank: str, text: str) -> str:
    """Return a rank's error with its number in the first line; rank 0's unchanged."""
    first, newline, rest = text.partition("\n")
    return text if rank == "0" else f"{first} (rank {rank}){newline}{rest}"


def main() -> None:
    """Parse sys.argv, run the verb, and exit with a code of the module's docstring."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # unsupported characters become question marks
    # Waiting threads spin for a moment, then sleep. Longer spinning occupies cores that other work needs; without
    # spinning, each wait costs a wake-up (docs/log). The variable is read once, when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if "RANK" in os.environ:  # a lost connection is an error of three lines, without C++ traces
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    logging.getLogger("DeepSpeed").addFilter(to_stderr)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    code = _run(debug)
    if "RANK" in os.environ or any(thread.name == TRACKER_THREAD for thread in threading.enumerate()):
        # Threads of gloo can outlive their process group and abort the process at Python's shutdown (once in a dozen
        # two-rank runs on two cores); a tracker's blocked client would delay it. All files are closed: exit at once.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log's disk is full: keep the exit code
                stream.flush()
        os._exit(code)
    sys.exit(code)


def to_stderr(record: logging.LogRecord) -> bool:
    """Move DeepSpeed's warnings from standard output, where `--json` promises one document, to standard error.

    Other libraries import an installed DeepSpeed, so its logger also prints in runs without it.
    """
    if record.levelno >= logging.WARNING:
        print(record.getMessage(), file=sys.stderr)
    return False


def _complain(text: str) -> None:
    """Print to standard error, unless its disk is full or the terminal is closed."""
    try:
        print(shown(text), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno not in LOST:
            raise


def _run(debug: bool) -> int:
    """Run the verb and print its error; return the exit code."""
    code = 0
    try:
        app(prog_name="optrush")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (UserError, RunError) as error:
        if debug:
            raise
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not error.everywhere:
            _complain(str(error) if f"rank {rank}" in str(error) else _of_rank(rank, str(error)))
        code = 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if debug or error.filename is None or error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS):
            raise
        refusal = ConfigError(f"{error.filename}", f"{error.strerror}", "give a path that can be used")
        _complain(str(refusal))
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if debug or (blamed := _of_plugin(error)) is None:
            raise
        _complain(_of_rank(os.environ.get("RANK", "0"), str(blamed)))
        code = 2 if isinstance(blamed, UserError) else 1
    return code


def _of_plugin(error: Exception) -> UserError | RunError | None:
    """Return the error that blames another package's technique, by its innermost call, or a user's loss."""
    from optrush.objectives.plugged import blame
    from optrush.techniques import ALL, OWN

    if (named := blame(error)) is not None:
        return named
    packages = {technique.__module__.partition(".")[0]: technique for technique in ALL[len(OWN) :]}
    calls = list(traceback.walk_tb(error.__traceback__))
    names = [frame.f_code.co_name for frame, _ in calls]
    for frame, line in reversed(calls if packages else []):
        held = [value for value in frame.f_locals.values() if hasattr(value, "__dict__")]
        # A callable that it put in place of a trainer's function can fail when called, without a frame of its own.
        put = [part for value in held for part in vars(value).values() if callable(part)]
        kinds = [type(value) for value in held if type(value) in packages.values()]
        modules = [frame.f_globals.get("__name__"), *(getattr(part, "__module__", "") for part in put)]
        kinds += [packages[top] for module in modules if (top := f"{module}".partition(".")[0]) in packages]
        if kinds:
            found = f"{type(error).__name__}: {one_line(str(error))}, in {frame.f_code.co_qualname} "
            found += f"({frame.f_code.co_filename}:{line})"
            do = f"leave it out: --without {kinds[0].name}; or report it to its authors: --debug shows the traceback"
            begun = "preflight" not in names and any("trainer/trainer.py" in f.f_code.co_filename for f, _ in calls)
            blamed = RunError if begun else ConfigError
            return blamed(f"the technique `{kinds[0].name}` of the package {kinds[0].__module__}", found, do)
    return None
