"""data clean: the rows of files that stay, those that were taken and why, a page, and a record that can be checked."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.commands.options import Json, Set, read_run
from optrush.errors import ConfigError, DataError

if TYPE_CHECKING:
    from optrush.config import Run

RECORD, PAGE = "cleaning.json", "cleaning.html"


def clean(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="a run's YAML, or data files, folders and globs", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="the folder to write")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="DIR", help="clean again as DIR/cleaning.json says, and compare")
    ] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    as_json: Json = False,
) -> None:
    """Take rows out of data, and show which and why.

    What is taken out is said by `data.clean` of the YAML, or by flags: --set data.clean.chars=[200,4000] --set
    data.clean.exact_duplicates=true --set data.clean.near_duplicates=0.8. Bounds in tokens need a tokenizer: --set
    model=DIR. The folder then holds rows.jsonl (rows of JSON Lines byte for byte, of other formats as JSON, without
    what JSON cannot hold), removed.jsonl and quarantine.jsonl (place and reason, not the row), cleaning.html to look
    at, and cleaning.json, the record. Training with the same `data.clean` takes out the same rows by itself.
    """
    if check is not None:
        if sources or out is not None or set_:
            raise ConfigError(f"--check {check}", "something to clean beside it", "give --check DIR alone")
        _check(check)
        print(json.dumps({"same": True}) if as_json else f"{check}: cleaned again, the same bytes")
        return
    if not sources or out is None:
        found = "nothing to clean" if not sources else "no folder to write"
        raise ConfigError("optrush data clean", found, "optrush data clean SOURCE... --out DIR")
    run = _run(sources, set_)
    record = _clean(run, out)
    if as_json:
        print(json.dumps(record))
        return
    for f in record["filters"]:
        print(f"{f['taken']:>12,}  {f['label']}")
    if record["bad"]["rows"]:
        print(f"{record['bad']['rows']:>12,}  bad rows, see {out / 'quarantine.jsonl'}")
    print(f"{record['kept']['rows']:,} of {record['rows']:,} rows stay: {out / 'rows.jsonl'}, {out / PAGE}")


def _run(sources: Sequence[str], sets: list[str]) -> Run:
    """What is to be cleaned, as a run's configuration: the YAML, or one made of the files named."""
    if Path(sources[0]).suffix not in (".yaml", ".yml"):
        return _bare({"path": list(sources)}, {}, sets)
    if len(sources) > 1:
        raise ConfigError(f"to clean {sources[1]}", f"it stands beside {sources[0]}", "name one YAML, or data files")
    return read_run(Path(sources[0]), sets, [], [])


def _bare(data: Mapping[str, Any], model: Mapping[str, Any], sets: list[str]) -> Run:
    import yaml

    from optrush.config import parse

    document = {"model": dict(model), "objective": "pretrain", "data": dict(data), "output": "."}
    return parse(yaml.safe_dump(document), "the command line", sets)


def _clean(run: Run, folder: Path) -> dict[str, Any]:
    """Cleans what the run names and writes the folder; returns the record."""
    from optrush.data import readers
    from optrush.data.chat_template import open_tokens
    from optrush.data.cleaning import clean, folder_for, write_rows
    from optrush.data.tokenize import root
    from optrush.models.source import locate
    from optrush.report import data

    d = run.data
    if d.path is None or d.clean is None:
        found = "no `data.path`" if d.path is None else "no `data.clean`"
        do = "say what and how: --set data.clean.exact_duplicates=true, or `clean:` under `data:`"
        raise ConfigError(f"to clean into {folder}", found, do)
    cache = root(d.cache)
    named = [p if isinstance(p, str) else p.path for p in ([d.path] if isinstance(d.path, str) else d.path)]
    reads = list(dict.fromkeys(file for path in named for file in readers.find(path, cache)))
    tokens = None
    if d.clean.tokens is not None and (run.model.path or run.model.tokenizer):
        tokens = open_tokens(run, None if run.model.path is None else locate(run, weights=False)[0])
    evaluation = [] if d.clean.decontaminate is None else readers.find(d.clean.decontaminate, cache)
    with folder_for(folder, [*reads, *evaluation]) as new, _bar() as progress:
        cleaned = clean(
            reads, d.clean, tokens=tokens, text_rows=d.text_rows, bad_rows=d.bad_rows, most_bad=d.most_bad,
            workers=d.workers, progress=progress, folder=new, cache=cache,
        )  # fmt: skip
        model = run.model.model_dump(include={"path", "tokenizer"}, exclude_none=True) if tokens else {}
        record = {**write_rows(cleaned, new), "model": model}
        data.write_cleaning_page(record, new)
    return record


def _check(folder: Path) -> None:
    """Cleans again as the record says.

    Raises:
        DataError: no record there, a file that is not as it says, or other rows than then.
    """
    from optrush.data.cleaning import FORMAT, sha256

    asked = f"to check {folder}"
    try:
        record = json.loads((folder / RECORD).read_bytes())
        settings = {key: record[key] for key in ("text_rows", "bad_rows", "most_bad")}
        output, inputs, held = record["output"], record["inputs"], record["evaluation"]
        run = _bare({"path": [i["file"] for i in inputs], "clean": record["settings"], **settings}, record["model"], [])
        if record["format"] != FORMAT:
            raise DataError(asked, f"a record of format {record['format']}", "clean again with --out")
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(asked, f"{RECORD}: {found}", "name a folder that `optrush data clean` wrote") from None
    read = [(Path(one["file"]), one["sha256"]) for one in inputs + held]
    for file, digest in [*read, *((folder / name, one["sha256"]) for name, one in output.items())]:
        if not file.is_file() or sha256(file) != digest:
            raise DataError(asked, f"{file} is not there, or not as it was", "restore it, or clean again with --out")
    with tempfile.TemporaryDirectory(prefix="optrush-check-", dir=folder.absolute().parent) as name:
        again = _clean(run, Path(name) / "again")
    differing = [name for name, held in output.items() if again["output"].get(name) != held]
    if differing:
        versions = {k: (v, again["versions"].get(k)) for k, v in record["versions"].items()}
        changed = ", ".join(f"{k} {a} then, {b} now" for k, (a, b) in versions.items() if a != b)
        do = f"clean with the same versions ({changed})" if changed else "report this with the record"
        raise DataError(f"the same bytes as in {folder}", f"{', '.join(differing)} came out differently", do)


@contextmanager
def _bar() -> Iterator[Callable[[float, int], None]]:
    """Shows how far cleaning is and when it will be done, once it takes longer than a moment."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from optrush.console import QUIET_S, err

    columns = SpinnerColumn(), BarColumn(20), TextColumn("{task.description}"), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("", total=1.0)
    begun = last = time.monotonic()

    def report(share: float, rows: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - begun > QUIET_S:
            bar.start()
            bar.update(task, completed=share, description=f"cleaning: {rows:,} rows")
            if bar.disable and now - last > QUIET_S:
                last = now
                rest = (now - begun) * (1 - share) / share
                err.print(f"cleaning: {rows:,} rows read, {share:.0%}, ETA {rest:.0f} s", markup=False)

    try:
        yield report
    finally:
        bar.stop()
