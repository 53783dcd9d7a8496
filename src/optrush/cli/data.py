"""The verbs data show, data pack and data clean: look at a run's data, tokenize it ahead of the run, clean it."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from optrush.cli.options import ConfigFile, Json, Set, With, Without, read_run
from optrush.errors import ConfigError, DataError
from optrush.files import parse_json, read_file

if TYPE_CHECKING:
    from optrush.config import Config
    from optrush.data.chat_template import Tokens
    from optrush.data.dataset import Sources
    from optrush.data.packing import RowLayout
    from optrush.data.preview import Pictures
    from optrush.data.samples import Dataset
    from optrush.decide import Decided


STREAMED = 1000  # rows read from a stream
REFUSED = 10  # bad rows that are listed
LEARNT, READ, SPECIAL, PLAIN = "1;32", "2", ";7", "\x1b[0m"  # bold green, dim, reversed, reset


def show(
    config: ConfigFile,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="number of samples or rows")] = 5,
    first: Annotated[int, typer.Option("--from", min=0, metavar="K", help="number of the first one, from 0")] = 0,
    random: Annotated[bool, typer.Option("--random", help="samples in the run's random order")] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="show the rows of T tokens that the run makes, instead of samples")
    ] = False,
    borders: Annotated[bool, typer.Option("--tokens", help="show where each token ends")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="also write DIR/data.html: lengths, and how full the rows are"),
    ] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show samples of the data as they are trained.

    Samples are read, tokenised and masked as for training, then decoded from the token ids. Colours show what is
    learnt, what is only read, and special tokens; each sample has its file and line. Long samples are shortened in the
    middle. No model is loaded and nothing is written to the run's folder. For large data, --set data.max_samples=1000
    reads only the beginning.
    """
    run = read_run(config, set_, with_, without)
    if random and packed:
        raise ConfigError("--random with --packed", "rows are in the run's random order", "leave --random out")
    if packed and run.data.stream:
        do = "optrush train CONFIG --dry-run shows the first ones"
        raise ConfigError("--packed with `data.stream`", "rows are laid out while training", do)
    prepared = _prepare(run)
    from optrush.console import use_color
    from optrush.data import preview
    from optrush.data.images import thumbnails

    tokens = _tokens(prepared)
    uncut = _whole(prepared, tokens)
    source = cast("Dataset", uncut.train)
    lengths, T = source.lengths(), run.batch.seq
    facts: dict[str, Any] = {
        "summary": (f"data.stream, the first {STREAMED} rows: " if run.data.stream else "") + uncut.summary,
        "objective": run.objective, "seq": T, "too_long": run.data.too_long,
        "lengths": preview.length_summary(lengths, source.targets(), T),
    }  # fmt: skip
    pictures = thumbnails(0 if out is None else preview.MOST_IMAGES)
    if packed:
        facts["rows"] = _rows(prepared, tokens, source, first, rows, pictures)
    else:
        facts["samples"] = _samples(prepared, tokens, source, first, rows, random, pictures)
    if out is not None:
        from optrush.report import data

        facts["fills"] = _fills(prepared, source)
        facts["page"] = str(data.write_data_page(facts, out))
    _print(json.dumps(facts) if as_json else "\n".join(_show_lines(facts, use_color(), borders)))


def pack(
    config: ConfigFile,
    set_: Set = [],  # noqa: B006
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Tokenise a run's data ahead of it.

    Into the cache, from which training then starts at once; what was tokenised before is not done again. Prints what
    was read and left out, and how full rows would be under each layout.
    """
    run = read_run(config, set_, with_, without)
    if run.data.stream:
        found = "`data.stream`: it is tokenised while training, without a cache"
        raise ConfigError("to tokenise ahead of a run", found, "leave data.stream out")
    prepared = _prepare(run)
    tokens = _tokens(prepared)
    sources = _read(run, prepared, tokens, cut=_layout(prepared).uncut)
    parts = {"train": cast("Dataset", sources.train), "held_out": cast("Dataset | None", sources.held_out)}
    made = {path for part in parts.values() if part is not None for path in part.shelf.made if isinstance(path, Path)}
    facts = {
        "summary": sources.summary,
        "counts": {name: part and asdict(part.counts) for name, part in parts.items()},
        "refused": [{"where": str(where), "reason": reason.found} for where, reason in sources.refused[:REFUSED]],
        "cache": sorted({str(path.parent) for path in made}),
        "cache_bytes": sum(path.stat().st_size for path in made),
        "fills": _fills(prepared, cast("Dataset", _whole(prepared, tokens).train)),
    }
    _print(json.dumps(facts) if as_json else "\n".join(_pack_lines(facts)))


def _prepare(config: Config) -> Decided:
    """Resolve the run with only its techniques for row layout, so that no GPU is needed."""
    from optrush.decide import changed, decide
    from optrush.technique import Part, instantiate
    from optrush.techniques import ALL

    if config.data.random is not None:
        raise DataError("to look at the data", "`data.random`: nothing to show", "give data.path or data.sample")
    laying = {t.name: config.with_[t.name] for t in instantiate(ALL, config.with_) if Part.BATCH_LAYOUT in t.claims}
    return decide(changed(config, {"with": laying, "method": None, "batch.micro_tokens": config.batch.seq}), ranks=1)


def _layout(prepared: Decided) -> RowLayout:
    from optrush.data.packing import Padded
    from optrush.objectives import check_layout

    job = cast(Any, SimpleNamespace(config=prepared.config, layout=Padded()))
    for technique in prepared.techniques:
        technique.data(job)
    layout: RowLayout = job.layout
    check_layout(prepared.config, layout)
    return layout


def _tokens(prepared: Decided) -> Tokens:
    from optrush.data.tokenizer import open_tokens, settle_images

    tokens = open_tokens(prepared.config, prepared.folder)
    settle_images(tokens, prepared.techniques, _layout(prepared))
    assert tokens is not None, "text without a tokenizer is refused before"
    return tokens


def _whole(prepared: Decided, tokens: Tokens) -> Sources:
    """Return the data without truncation to T; for a stream its beginning."""
    config = prepared.config
    if config.data.stream:
        from optrush.decide import changed

        most = min(STREAMED, config.data.max_samples or STREAMED)
        config = changed(config, {"data.stream": False, "data.max_samples": most})
    return _read(config, prepared, tokens, cut=False)


def _read(config: Config, prepared: Decided, tokens: Tokens, cut: bool) -> Sources:
    from optrush import console
    from optrush.data.dataset import read_sources
    from optrush.models.text_part import text_config

    vocab = text_config(prepared.hf).get("vocab_size") or len(tokens.tokenizer)
    return read_sources(config, tokens, vocab, lambda line: console.err.print(line, markup=False), cut=cut)


def _fills(prepared: Decided, source: Dataset) -> list[dict[str, Any]]:
    from optrush.data import preview

    env = prepared.env
    return preview.fills(source.lengths(), env.seq, env.rows, env.micro_rows, prepared.config)


def _samples(
    prepared: Decided, tokens: Tokens, source: Dataset, first: int, count: int, random: bool, pictures: Pictures
) -> list[dict[str, Any]]:
    from optrush.data import preview
    from optrush.data.sampler import epoch_order

    order: Sequence[int] = range(len(source))
    if random:
        order = cast(Sequence[int], epoch_order(source.spans, prepared.config.seed, 0))
    _check(first, len(order), "samples")
    wanted = ((int(i), source.documents(int(i))) for i in order[first : first + count])
    return list(preview.describe_samples(source, tokens.tokenizer, wanted, prepared.env.seq, pictures))


def _rows(
    prepared: Decided, tokens: Tokens, source: Dataset, first: int, count: int, pictures: Pictures
) -> list[dict[str, Any]]:
    """Return descriptions of up to `count` rows from row `first`, laid out as in training."""
    from optrush.data import preview
    from optrush.data.sampler import Stream

    config, env, layout = prepared.config, prepared.env, _layout(prepared)
    if layout.uncut:
        source = cast("Dataset", _read(config, prepared, tokens, cut=True).train)
    stream = Stream(source, layout, T=env.seq, rows=env.rows, seed=config.seed)
    plan = stream.plan(None if config.train.steps else config.train.epochs, config.train.steps)
    _check(first, plan.rows, "rows")
    steps = range(first // env.rows, min(plan.steps, (first + count - 1) // env.rows + 1))
    numbered = [(k * env.rows + b, row) for k in steps for b, row in enumerate(stream.step(k, plan)) if row]
    wanted = [(g, row) for g, row in numbered if first <= g < first + count]
    return list(preview.describe_rows(source, tokens.tokenizer, wanted, env.seq, pictures))


def _check(first: int, n: int, what: str) -> None:
    if first >= n:
        raise ConfigError(f"--from {first}", f"{n} {what}, the first is 0", f"take at most {n - 1}")


def _print(text: str) -> None:
    """Print text, with a replacement for characters outside the terminal's encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# --- the text


def data_lines(facts: Mapping[str, Any], colour: bool, borders: bool = False) -> Iterator[str]:
    """Yield the lines of facts["samples"] or facts["rows"]; facts also has "seq" and "too_long"."""
    special, learnt = ({"text": w, "learnt": w == "learnt", "special": w == "special"} for w in ("special", "learnt"))
    yield " ".join(["read, not learnt", *_text([learnt], colour, False), *_text([special], colour, False)])
    for sample in facts.get("samples", ()):
        yield from _sample(sample, facts, colour, borders)
    for row in facts.get("rows", ()):
        yield f"══ row {row['row']} · {_many(len(row['samples']), 'sample')} · {row['tokens']} of {facts['seq']} slots"
        for sample in row["samples"]:
            yield from _sample(sample, facts, colour, borders)


def _show_lines(facts: Mapping[str, Any], colour: bool, borders: bool) -> Iterator[str]:
    yield from data_lines(facts, colour, borders)
    yield _plain(facts["summary"])
    n = facts["lengths"]
    yield (
        f"{_many(n['samples'], 'sample')} of {n['min']} to {n['max']} tokens, median {n['median']:g}, "
        f"mean {n['mean']:.1f}, 95 % at most {n['p95']}; {n['learnt']:.1%} learnt; "
        f"{n['longer_than_seq']} longer than T = {facts['seq']} (data.too_long: {facts['too_long']})"
    )
    if "page" in facts:
        yield facts["page"]


def _sample(sample: Mapping[str, Any], facts: Mapping[str, Any], colour: bool, borders: bool) -> Iterator[str]:
    longer = f", longer than T (data.too_long: {facts['too_long']})" if sample["longer"] else ""
    yield f"── sample {sample['sample']} · {_plain(sample['where'])} · {_counts(sample['documents'])}{longer}"
    for document in sample["documents"]:
        if len(sample["documents"]) > 1:
            yield f"  ── {document['name']} · {_counts([document])}"
        yield from _text(document["pieces"], colour, borders)
        if document["left_out"]:
            yield f"  … {document['left_out']} tokens are not shown …"
            yield from _text(document["end"], colour, borders)


def _pack_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the counts of each split, refused rows, the cache and the fill of each layout."""
    columns = {name: counts for name, counts in facts["counts"].items() if counts is not None}
    yield " " * 14 + "".join(f"{name.replace('_', ' '):>14}" for name in columns)
    for key in (name for name in columns["train"] if name != "keys"):  # the summary has the keys
        yield f"{key.replace('_', ' '):<14}" + "".join(f"{counts[key]:>14,}" for counts in columns.values())
    yield from (f"refused {_plain(r['where'])}: {_plain(r['reason'])}" for r in facts["refused"])
    cache = f"cache {', '.join(map(_plain, facts['cache']))}: {facts['cache_bytes'] / 2**20:.1f} MiB"
    none = "cache not needed: so little is tokenised at the start of a run, in memory"
    yield from ("", cache if facts["cache"] else none, "")
    yield f"{'layout':<14}{'real tokens':>12}{'rows':>10}{'slots':>14}{'squared lengths':>18}{'planned a second':>18}"
    for f in facts["fills"]:
        name, planned = f["name"] + " *" * f["chosen"], f"{f['samples_per_s']:>18,.0f}"
        yield f"{name:<14}{f['fill']:>12.2%}{f['rows']:>10,}{f['slots']:>14,}{f['squares']:>18,}{planned}"
    if any(f["chosen"] for f in facts["fills"]):
        yield "* this run's"


def _plain(text: str) -> str:
    """Return text in one line, with escaped control characters."""
    from optrush.data.preview import visible

    return "".join(map(visible, text)).replace("\n", "")


def _counts(documents: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(d['tokens'] for d in documents)} tokens, {sum(d['targets'] for d in documents)} learnt"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _text(pieces: Sequence[Mapping[str, Any]], colour: bool, borders: bool) -> list[str]:
    """Return the lines of a document, in colors or between marks."""
    from optrush.data.preview import BORDER, CLOSE, CLOSE_SPECIAL, OPEN, OPEN_SPECIAL, visible

    joined, before = "", None
    for piece in pieces:
        seen = "".join(map(visible, piece["text"]))
        learnt, border = piece["learnt"], BORDER if borders and before else ""
        if colour:
            code = f"\x1b[{LEARNT if learnt else READ}{SPECIAL if piece['special'] else ''}m"
            seen = border + (code + seen.replace("\n", f"{PLAIN}\n{code}") + PLAIN).replace(code + PLAIN, "")
        else:
            was = before is not None and before["learnt"]
            seen = f"{OPEN_SPECIAL}{seen}{CLOSE_SPECIAL}" if piece["special"] else seen
            seen = CLOSE * (was and not learnt) + border + OPEN * (learnt and not was) + seen
        joined, before = joined + seen, piece
    if not colour and before and before["learnt"]:
        joined += CLOSE
    return ["  " + line for line in joined.removesuffix("\n").split("\n")]


# --- data clean


RECORD, PAGE = "cleaning.json", "cleaning.html"


def clean(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="a run's YAML, or data files, folders and globs", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="the folder to write")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="DIR", help="repeat the cleaning of DIR/cleaning.json and compare")
    ] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    as_json: Json = False,
) -> None:
    """Take rows out of data, and show which and why; without filters and --out, list the bad rows.

    A bad row cannot be read, or matches no kind of row: the list has its file, its line and the reason. The exit code
    is 2 if a run would stop at this number of bad rows (`data.bad_rows`, `data.most_bad`).

    The filters are those of `data.clean` in the YAML, or of flags: --set data.clean.chars=[200,4000] --set
    data.clean.exact_duplicates=true --set data.clean.near_duplicates=0.8. Bounds in tokens need a tokenizer: --set
    model=DIR. The folder then holds rows.jsonl (rows of JSON Lines byte for byte, of other formats as JSON, without
    what JSON cannot hold), removed.jsonl and quarantine.jsonl (place and reason, not the row), cleaning.html to look
    at, and cleaning.json, the record. Training with the same `data.clean` takes out the same rows by itself.
    """
    if check is not None:
        if sources or out is not None or set_:
            raise ConfigError(f"--check {check}", "something to clean with it", "give --check DIR alone")
        _check_cleaning(check)
        print(json.dumps({"same": True}) if as_json else f"{check}: cleaned again, the same bytes")
        return
    if not sources:
        do = "optrush data clean SOURCE... lists bad rows; with filters: --out DIR"
        raise ConfigError("optrush data clean", "nothing to clean", do)
    config = _run(sources, set_)
    if out is None:
        _list_bad(config, as_json)
        return
    record = _clean(config, out)
    if as_json:
        print(json.dumps(record))
        return
    for f in record["filters"]:
        print(f"{f['taken']:>12,}  {f['label']}")
    if record["bad"]["rows"]:
        print(f"{record['bad']['rows']:>12,}  bad rows, see {out / 'quarantine.jsonl'}")
    print(f"{record['kept']['rows']:,} of {record['rows']:,} rows stay: {out / 'rows.jsonl'}, {out / PAGE}")


def _run(sources: Sequence[str], sets: list[str]) -> Config:
    if Path(sources[0]).suffix not in (".yaml", ".yml"):
        return _bare({"path": list(sources)}, {}, sets)
    if len(sources) > 1:
        raise ConfigError(f"to clean {sources[1]}", f"another source is {sources[0]}", "name one YAML, or data files")
    return read_run(Path(sources[0]), sets, [], [])


def _bare(data: Mapping[str, Any], model: Mapping[str, Any], sets: list[str], objective: str = "pretrain") -> Config:
    import yaml

    from optrush.config import parse_config

    document = {"model": dict(model), "objective": objective, "data": dict(data), "output": "."}
    return parse_config(yaml.safe_dump(document), "the command line", sets)


def _list_bad(config: Config, as_json: bool) -> None:
    """Print the bad rows of a run's data; raise DataError if the run would not start with them."""
    from optrush.config import Cleaning
    from optrush.data.cleaning import Task, filters, measure_files
    from optrush.data.schema import row_rules

    d = config.data
    if filters(d.clean or Cleaning()):
        raise ConfigError("optrush data clean", "no folder to write", "optrush data clean SOURCE... --out DIR")
    with _bar() as progress:
        task = Task(Cleaning(), d.reading, row_rules(config), None, None)
        table = measure_files(_files(config, "to list bad rows"), task, d.workers, progress, strict=False)
    bad = [{"file": str(where.file), "line": where.line, "reason": reason} for _, where, reason in table.bad]
    found = f"{len(bad):,} of {len(table):,} rows are bad"
    lines = [*(f"{where}: {reason}" for _, where, reason in table.bad), found]
    _print(json.dumps({"rows": len(table), "bad": len(bad), "bad_rows": bad}) if as_json else "\n".join(lines))
    if len(bad) > (d.most_bad * len(table) if d.bad_rows == "quarantine" else 0):
        share = math.ceil(1000 * len(bad) / len(table)) / 1000
        do = f"fix them, or train without them: --set data.bad_rows=quarantine --set data.most_bad={share:g}"
        sys.stdout.flush()
        raise DataError("rows that a run can train on", found, do)


def _files(config: Config, asked: str) -> list[Path]:
    from optrush.data import readers
    from optrush.data.tokenize import cache_root

    path, cache = config.data.path, cache_root(config.data.cache)
    if path is None:
        raise ConfigError(asked, "no `data.path`", "name a data file, or `path:` under `data:`")
    named = [p if isinstance(p, str) else p.path for p in ([path] if isinstance(path, str) else path)]
    return list(dict.fromkeys(file for name in named for file in readers.find_files(name, cache)))


def _clean(config: Config, folder: Path) -> dict[str, Any]:
    """Write the cleaned rows of the data files and a page into `folder`; return the record of what was removed."""
    from optrush.data import readers
    from optrush.data.cleaning import clean_files, write_rows
    from optrush.data.schema import row_rules
    from optrush.data.tokenize import cache_root
    from optrush.data.tokenizer import open_tokens
    from optrush.models.source import locate
    from optrush.report import data

    d = config.data
    if d.clean is None:
        do = "add one: --set data.clean.exact_duplicates=true; or leave --out out to list the bad rows"
        raise ConfigError(f"to clean into {folder}", "no filter: no `data.clean`", do)
    cache, reads = cache_root(d.cache), _files(config, f"to clean into {folder}")
    tokens = None
    if d.clean.tokens is not None and (config.model.path or config.model.tokenizer):
        tokens = open_tokens(config, None if config.model.path is None else locate(config, weights=False)[0])
    evaluation = [] if d.clean.decontaminate is None else readers.find_files(d.clean.decontaminate, cache)
    with _cleaning_folder(folder, [*reads, *evaluation]) as new, _bar() as progress:
        cleaned = clean_files(
            reads, d.clean, tokens=tokens, text_rows=d.reading, bad_rows=d.bad_rows, most_bad=d.most_bad,
            rules=row_rules(config),
            workers=d.workers, progress=progress, cache=cache,
        )  # fmt: skip
        model = config.model.model_dump(include={"path", "tokenizer"}, exclude_none=True) if tokens else {}
        record = {**write_rows(cleaned, new), "model": model}
        data.write_cleaning_page(record, new)
    return record


@contextmanager
def _cleaning_folder(out: Path, reads: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder to write into; rename it to `out` at the end, over an earlier cleaning; remove it on error.

    A killed process leaves nothing unfinished under the final name.

    Raises ConfigError: `out` is not the folder of a cleaning, holds an input, cannot be created, or is in use.
    """
    asked = f"--out {out}"
    if out.name in ("", ".."):
        raise ConfigError(asked, "no name", "name a new folder")
    new, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old.tmp")
    for path in (out, new, old):
        _check_replaceable(asked, path)
    if inside := [r for r in reads if r.resolve().is_relative_to(out.resolve())]:
        raise ConfigError(asked, f"the folder of the input {inside[0]}", "use another folder")
    try:
        new.mkdir(parents=True, exist_ok=True)
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror}", "name a folder that can be made") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in new.iterdir():  # left by a killed process
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield new
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            new.rename(out)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        raise ConfigError(asked, "another cleaning is at work there", "wait for it, or use another folder") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(asked, "no space left there", "free some, or use another folder") from None
    finally:
        os.close(lock)


def _check_replaceable(asked: str, path: Path) -> None:
    from optrush.data.cleaning import QUARANTINE, REMOVED, ROWS

    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ConfigError(asked, f"{path} is not a folder", "use another folder")
    known = {ROWS, REMOVED, QUARANTINE, RECORD, PAGE}
    if foreign := sorted({p.name for p in path.iterdir()} - known):
        raise ConfigError(asked, f"`{foreign[0]}` in {path} is not of a cleaning", "use another folder")


def _check_cleaning(folder: Path) -> None:
    """Repeat a cleaning with its record's settings; raise DataError without a record, or if files or results differ."""
    from optrush.data.cleaning import FORMAT, file_sha256

    asked = f"to check {folder}"
    try:
        record = parse_json(read_file(folder / RECORD))
        data = {key: record[key] for key in ("text_rows", "bad_rows", "most_bad", "columns", "roles")}
        output, inputs, held = record["output"], record["inputs"], record["evaluation"]
        data |= {"path": [i["file"] for i in inputs], "clean": record["settings"]}
        config = _bare(data, record["model"], [], record["objective"])
        if record["format"] != FORMAT:
            raise DataError(asked, f"a record of format {record['format']}", "clean again with --out")
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(asked, f"{RECORD}: {found}", "name a folder that `optrush data clean` wrote") from None
    read = [(Path(entry["file"]), entry["sha256"]) for entry in inputs + held]
    for file, digest in [*read, *((folder / name, entry["sha256"]) for name, entry in output.items())]:
        if not file.is_file() or file_sha256(file) != digest:
            raise DataError(asked, f"{file} is not there, or not as it was", "restore it, or clean again with --out")
    with tempfile.TemporaryDirectory(prefix="optrush-check-", dir=folder.absolute().parent) as name:
        again = _clean(config, Path(name) / "again")
    differing = [name for name, held in output.items() if again["output"].get(name) != held]
    if differing:
        versions = {k: (v, again["versions"].get(k)) for k, v in record["versions"].items()}
        changed = ", ".join(f"{k} {a} then, {b} now" for k, (a, b) in versions.items() if a != b)
        do = f"clean with the same versions ({changed})" if changed else "report this with the record"
        raise DataError(f"the same bytes as in {folder}", f"{', '.join(differing)} came out differently", do)


@contextmanager
def _bar() -> Iterator[Callable[[float, int], None]]:
    """Show the progress and the ETA of a cleaning that takes longer than a moment."""
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


data_app = typer.Typer(
    help="Clean the data of a run, see it as it is trained on, tokenise it ahead.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
data_app.command()(clean)
data_app.command()(show)
data_app.command()(pack)
