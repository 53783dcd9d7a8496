"""Find users' losses, objectives, rewards and optimizers by name, call them, and name them in errors.

A name is an entry point of a package (`GROUPS`), `FILE.py:NAME`, or `MODULE:NAME` (docs/python.md). An object passed to
the functions of `optrush` also gets such a name, so that a ladder's processes can import it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from optrush.config import Plugin
from optrush.errors import ConfigError, RunError, UserError, exhausted, one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optrush.data.batch import Batch

Kind = Literal["loss", "optimizer", "reward"]
GROUPS: dict[Kind, tuple[str, ...]] = {
    "loss": ("optrush.losses", "optrush.objectives"), "optimizer": ("optrush.optimizers",),
    "reward": ("optrush.rewards",),
}  # fmt: skip
HERE = "python:"  # prefix of objects that other processes cannot import
_given: dict[str, Any] = {}  # objects passed by a program, by name
_files: dict[str, str] = {}  # file -> description of the object loaded from it
_importing: list[str] = []  # descriptions of the objects being imported


def find(kind: Kind, use: str) -> Any:
    """Return the object with a name.

    Raises:
        ConfigError: no such object, or its module cannot be imported.
    """
    what = f"the {kind} `{use}`"
    target = _given[use] if use in _given else _load(kind, use, what)
    if not callable(target):
        raise ConfigError(what, f"{type(target).__name__}, which cannot be called", "name a function or a class")
    with_code = inspect.unwrap(getattr(target, "func", target))
    with_code = with_code if inspect.isclass(with_code) or hasattr(with_code, "__code__") else type(with_code)
    module = sys.modules.get(getattr(with_code, "__module__", ""))
    file = getattr(getattr(with_code, "__code__", None), "co_filename", None) or getattr(module, "__file__", None)
    _files[str(file)] = what
    return target


def entry_names(kind: Kind) -> dict[str, str]:
    """Return the entry points of a kind by name, each with its value."""
    return {e.name: e.value for group in GROUPS[kind] for e in entry_points(group=group)}


def _load(kind: Kind, use: str, what: str) -> Any:
    """Return the object of an entry point, FILE.py:NAME or MODULE:NAME; raise ConfigError if it cannot be loaded."""
    place, colon, name = use.rpartition(":")
    if use.startswith(HERE):
        found, do = "an object of another Python process", f"pass it again: optrush.train(..., {kind}={name})"
        raise ConfigError(what, found, do)
    if not colon:
        installed = entry_names(kind)
        if use not in installed:
            known = f"known: {', '.join(sorted(installed))}" if installed else "none is installed"
            do = f"write FILE.py:NAME, or install a package with an entry point in {GROUPS[kind][0]}"
            raise ConfigError(what, f"no entry point of that name; {known}", do)
        place, _, name = installed[use].partition(":")
    module_parts = [] if place.endswith(".py") else place.split(".")
    if not all(part.isidentifier() for part in (*module_parts, *name.split("."))):
        raise ConfigError(what, f"{place!r} and {name!r} around the last colon", "write FILE.py:NAME or MODULE:NAME")
    _importing.append(what)
    try:
        with blamed(what, do="fix that line, or use another"):
            module = _file_module(Path(place), what) if place.endswith(".py") else importlib.import_module(place)
    finally:
        _importing.pop()
    _files[str(getattr(module, "__file__", ""))] = what
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        names = ", ".join(n for n, value in vars(module).items() if callable(value) and n[0] != "_") or "nothing"
        raise ConfigError(what, f"{place} has no `{name}`; it has {one_line(names)}", "name one of these") from None


def _file_module(path: Path, what: str) -> ModuleType:
    """Return the module of a Python file, imported once; append its folder to `sys.path`."""
    path = Path(os.path.expanduser(path)).resolve()
    if not os.path.isfile(path):
        raise ConfigError(what, f"no file {path}", "give the file's path: FILE.py:NAME")
    known = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        sys.path[:] = [*sys.path, *({str(path.parent)} - {*sys.path})]  # modules next to the file
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[known]
            raise
    return sys.modules[known]


def refuse_while_importing(asked: str) -> None:
    """Raise ConfigError if a plug-in's file calls `optrush` during its import: each import would start a run."""
    if _importing:
        do = 'put the call under `if __name__ == "__main__":`'
        raise ConfigError(asked, f"called while {_importing[-1]} is imported", do)


def named(kind: Kind, given: Any, *, elsewhere: bool = False) -> dict[str, Any]:
    """Return an object's `use` and `options` for a configuration.

    Args:
        given: a name, a function or class, or a `partial` of one with the options as keywords.
        elsewhere: other processes must be able to import it.

    Raises:
        ConfigError: other processes cannot import it.
    """
    options = dict(given.keywords) if isinstance(given, partial) else {}
    given = given.func if isinstance(given, partial) else given
    if isinstance(given, str):
        return {"use": given, "options": options}
    name = getattr(given, "__qualname__", type(given).__qualname__)
    module = sys.modules.get(getattr(given, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    try:
        importable = file is not None and reduce(getattr, name.split("."), module) is given
    except AttributeError:
        importable = False
    if importable and module is not None:
        use = f"{module.__name__}:{name}" if "." in module.__name__ else f"{os.path.abspath(str(file))}:{name}"
    elif elsewhere:
        do = f"define it at the top level of a file, and pass {kind}='FILE.py:NAME'"
        raise ConfigError(f"the {kind} `{name}`", "a ladder's processes cannot import it: it is not in a file", do)
    else:
        use = f"{HERE}{name}"
    _given[use] = given
    return {"use": use, "options": options}


def source_of(kind: Kind, use: str) -> str:
    """Return the source of a named object, to detect changes on resume; its name if there is no source."""
    try:
        return inspect.getsource(find(kind, use))
    except (OSError, TypeError):
        return use


def absolute_name(use: str) -> str:
    """Return a name with its file's absolute path, if it names a file."""
    place, _, name = use.rpartition(":")
    return f"{Path(os.path.expanduser(place)).resolve()}:{name}" if place.endswith(".py") else use


def call_plugin(what: str, made: Callable[..., Any], options: Mapping[str, Any], *arguments: Any) -> Any:
    """Return the result of calling a user's object; raise ConfigError for invalid options and for its exceptions."""
    try:
        signature = inspect.signature(made)
        signature.bind(*arguments, **options)
    except TypeError as error:
        takes = ", ".join([*signature.parameters][len(arguments) :]) or "none"
        raise ConfigError(f"the options of {what}", one_line(str(error)), f"its options: {takes}") from None
    except ValueError:  # a class in C without a signature
        pass
    with blamed(what):
        return made(*arguments, **options)


def plugged_loss(plugin: Plugin, head: nn.Module, metrics: Mapping[str, Tensor]) -> Callable[[Tensor, Batch], Tensor]:
    """Return the loss that a configuration names: hidden (B, T, D), batch -> () float32, a sum.

    Raises:
        ConfigError: no such loss, or it cannot be built with its options.
    """
    what, score = f"the loss `{plugin.use}`", find("loss", plugin.use)
    options = dict(plugin.options)
    if inspect.isclass(score):
        score, options = call_plugin(what, score, options), {}
    if names := figures_of(plugin):
        options["figures"] = {name: metrics[name] for name in names}
    try:
        inspect.signature(score).bind(None, None, None, **options)
    except TypeError as error:
        takes = ", ".join([*inspect.signature(score).parameters][3:]) or "none"
        do = f"a loss takes (head, hidden, batch) and its options; this one's options: {takes}"
        raise ConfigError(what, one_line(str(error)), do) from None

    def loss(hidden: Tensor, batch: Batch) -> Tensor:
        if "weights" in batch.extra and not getattr(score, "weighted", False):
            do = "multiply by batch.extra['weights'] and set its attribute `weighted = True`, or write 0 and 1"
            raise ConfigError(what, "turns with weights other than 0 and 1", do)
        with blamed(what):
            total = score(head, hidden, batch, **options)
        if getattr(total, "shape", None) != ():
            found = f"it returned {_kind(total)}"
            raise ConfigError(what, found, "return a tensor without dimensions: the sum over the batch's targets")
        result: Tensor = total.float()
        return result

    return loss


def figures_of(plugin: Plugin) -> tuple[str, ...]:
    """Return the names of a loss's metrics: its attribute `figures`."""
    return tuple(getattr(find("loss", plugin.use), "figures", ()))


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


@contextmanager
def blamed(what: str, do: str = "fix that line; --debug shows the traceback") -> Iterator[None]:
    """Convert exceptions of users' code to three-line errors with its file and line.

    Raises:
        ConfigError: before step 1 of a run. RunError: from then on.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:
        if exhausted(error):  # a smaller micro-batch may help
            raise
        raise _error(what, error, do) from error


def blame(error: Exception) -> UserError | RunError | None:
    """Return the error for a plug-in in a traceback, such as from its backward pass; None if there is none."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    what = next((_files[file] for file in reversed(files) if file in _files), None)
    return None if what is None else _error(what, error, "fix that line; --debug shows the traceback")


def _error(what: str, error: BaseException, do: str) -> UserError | RunError:
    """Return the error for an exception, with its place in users' code: RunError during training, else ConfigError."""
    calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    plugin_calls = [call for call in calls if call[0].co_filename in _files]
    outside = [call for call in calls if f"{os.sep}optrush{os.sep}" not in call[0].co_filename]
    name, file, line = "", "", 0
    if plugin_calls or outside:
        code, line = (plugin_calls or outside)[-1]
        name, file = code.co_qualname, code.co_filename
    if isinstance(error, SyntaxError) and error.filename:
        file, line, name = error.filename, error.lineno or 0, "<module>"
    place = f", in {name} ({file}:{line})" if file else ""
    above = [frame.f_code for frame, _ in traceback.walk_stack(None)] + [code for code, _ in calls]
    begun = any(c.co_name == "train" and c.co_filename.endswith(f"trainer{os.sep}trainer.py") for c in above)
    kind = RunError if begun else ConfigError
    return kind(what, f"{type(error).__name__}: {one_line(str(error))}{place}", do)
