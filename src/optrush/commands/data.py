"""data show, data pack: what a run's data looks like to the model, and all of it tokenised ahead of the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from optrush.commands.options import Config, Json, Set, With, Without, read_run
from optrush.errors import ConfigError, DataError

if TYPE_CHECKING:
    from optrush.config import Run
    from optrush.data.chat_template import Tokens
    from optrush.data.dataset import Corpus
    from optrush.data.packing import Layout
    from optrush.data.sources import Sources
    from optrush.resolve import Prepared

STREAMED = 1000  # rows that are read of data that is never tokenised as a whole
REFUSED = 10  # bad rows that are named
LEARNT, READ, SPECIAL, PLAIN = "1;32", "2", ";7", "\x1b[0m"  # bold green, dim; and reversed


def show(
    config: Config,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="how many samples, or rows")] = 5,
    first: Annotated[int, typer.Option("--from", min=0, metavar="K", help="the first one's number, from 0")] = 0,
    random: Annotated[bool, typer.Option("--random", help="samples in the run's random order")] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="not samples but rows, as the run lays them out and cuts them to T")
    ] = False,
    borders: Annotated[bool, typer.Option("--tokens", help="show where each token ends")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="also write DIR/data.html, with lengths and fills")
    ] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    with_: With = [],  # noqa: B006
    without: Without = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show samples of the data as they are trained.

    Read, tokenised and masked as for training, and told from the token ids: what is learnt, what is only read, special
    tokens, and the file and line of each sample. Of long ones the beginning and the end. No model is loaded, and the
    run's folder is not touched. Of large data, --set data.max_samples=1000 reads the beginning only.
    """
    run = read_run(config, set_, with_, without)
    if random and packed:
        raise ConfigError("--random with --packed", "rows are in the run's random order", "leave --random out")
    if packed and run.data.stream:
        found = "rows are laid out while training"
        raise ConfigError("--packed with `data.stream`", found, "optrush train CONFIG --dry-run shows the first ones")
    prepared = _prepare(run)
    from optrush.data import preview as seen
    from optrush.trainer.dry_run import colours

    tokens = _tokens(prepared)
    whole = _whole(prepared, tokens)
    source = cast("Corpus", whole.train)
    lengths, T = source.lengths(), run.batch.seq
    facts: dict[str, Any] = {
        "summary": (f"data.stream, the first {STREAMED} rows: " if run.data.stream else "") + whole.summary,
        "objective": run.objective,
        "seq": T,
        "too_long": run.data.too_long,
        "lengths": seen.spread(lengths, source.targets(), T),
    }
    if packed:
        facts["rows"] = _rows(prepared, tokens, source, first, rows)
    else:
        facts["samples"] = _samples(prepared, tokens, source, first, rows, random)
    if out is not None:
        from optrush.report import data

        facts["fills"] = _fills(prepared, source)
        facts["page"] = str(data.write_data_page(facts, out))
    _print(json.dumps(facts) if as_json else "\n".join(_told(facts, colours(), borders)))


def pack(
    config: Config,
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
    sources = _read(run, prepared, tokens, cut=_layout(prepared).whole)
    parts = {"train": cast("Corpus", sources.train), "held_out": cast("Corpus | None", sources.held_out)}
    made = {path for part in parts.values() if part is not None for path in part.shelf.made if isinstance(path, Path)}
    facts = {
        "summary": sources.summary,
        "counts": {name: part and asdict(part.counts) for name, part in parts.items()},
        "refused": [{"where": str(where), "reason": why.found} for where, why in sources.refused[:REFUSED]],
        "cache": sorted({str(path.parent) for path in made}),
        "cache_bytes": sum(path.stat().st_size for path in made),
        "fills": _fills(prepared, cast("Corpus", _whole(prepared, tokens).train)),
    }
    _print(json.dumps(facts) if as_json else "\n".join(_packed(facts)))


def _prepare(run: Run) -> Prepared:
    """The run with those of its techniques that lay out rows: looking at data needs no GPU, whatever training needs."""
    from optrush.resolve import prepare
    from optrush.technique import Part, build
    from optrush.techniques import ALL

    if run.data.random is not None:
        raise DataError("to look at the data", "`data.random`: nothing to show", "give data.path or data.sample")
    laying = {t.name: run.with_[t.name] for t in build(ALL, run.with_) if Part.ROWS in t.claims}
    return prepare(run.model_copy(update={"with_": laying}), ranks=1)


def _layout(prepared: Prepared) -> Layout:
    """How the run's samples become rows: what its data stage sets."""
    from optrush.data.packing import Padded
    from optrush.objectives import check_layout

    job = cast(Any, SimpleNamespace(run=prepared.run, layout=Padded()))
    for technique in prepared.techniques:
        technique.data(job)
    layout: Layout = job.layout
    check_layout(prepared.run, layout)
    return layout


def _tokens(prepared: Prepared) -> Tokens:
    from optrush.data.chat_template import open_tokens

    tokens = open_tokens(prepared.run, prepared.folder)
    assert tokens is not None, "text without a tokenizer is refused before"
    return tokens


def _whole(prepared: Prepared, tokens: Tokens) -> Sources:
    """The data with no sample cut to T; of a stream the beginning."""
    run = prepared.run
    if run.data.stream:
        most = min(STREAMED, run.data.max_samples or STREAMED)
        run = run.model_copy(update={"data": run.data.model_copy(update={"stream": False, "max_samples": most})})
    return _read(run, prepared, tokens, cut=False)


def _read(run: Run, prepared: Prepared, tokens: Tokens, cut: bool) -> Sources:
    from optrush import console
    from optrush.data.sources import read_sources

    vocab = prepared.hf.get("vocab_size") or len(tokens.tokenizer)
    return read_sources(run, tokens, vocab, lambda line: console.err.print(line, markup=False), cut=cut)


def _fills(prepared: Prepared, source: Corpus) -> list[dict[str, Any]]:
    from optrush.data import preview

    setup = prepared.setup
    return preview.fills(source.lengths(), setup.seq, setup.rows, setup.micro_rows, prepared.run)


def _samples(
    prepared: Prepared, tokens: Tokens, source: Corpus, first: int, count: int, random: bool
) -> list[dict[str, Any]]:
    from optrush.data import preview
    from optrush.data.sampler import epoch_order

    order: Sequence[int] = range(len(source))
    if random:
        order = cast(Sequence[int], epoch_order(source.spans, prepared.run.seed, 0))
    _check(first, len(order), "samples")
    wanted = ((int(i), source.documents(int(i))) for i in order[first : first + count])
    return list(preview.samples(source, tokens.tokenizer, wanted, prepared.setup.seq))


def _rows(prepared: Prepared, tokens: Tokens, source: Corpus, first: int, count: int) -> list[dict[str, Any]]:
    from optrush.data import preview
    from optrush.data.sampler import Stream

    run, setup, layout = prepared.run, prepared.setup, _layout(prepared)
    if layout.whole:
        source = cast("Corpus", _read(run, prepared, tokens, cut=True).train)
    stream = Stream(source, layout, T=setup.seq, rows=setup.rows, seed=run.seed)
    plan = stream.plan(None if run.train.steps else run.train.epochs, run.train.steps)
    _check(first, plan.rows, "rows")
    steps = range(first // setup.rows, min(plan.steps, (first + count - 1) // setup.rows + 1))
    found = [(k * setup.rows + b, row) for k in steps for b, row in enumerate(stream.step(k, plan)) if row]
    wanted = [(g, row) for g, row in found if first <= g < first + count]
    return list(preview.rows(source, tokens.tokenizer, wanted, setup.seq))


def _check(first: int, n: int, what: str) -> None:
    if first >= n:
        raise ConfigError(f"--from {first}", f"{n} {what}, the first is 0", f"take at most {n - 1}")


def _print(text: str) -> None:
    """The rows are the user's text, whatever the terminal can write."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# --- the text


def _told(facts: Mapping[str, Any], colour: bool, borders: bool) -> Iterator[str]:
    special, learnt = ({"text": w, "learnt": w == "learnt", "special": w == "special"} for w in ("special", "learnt"))
    yield " ".join(["read, not learnt", *_text([learnt], colour, False), *_text([special], colour, False)])
    for sample in facts.get("samples", ()):
        yield from _sample(sample, facts, colour, borders)
    for row in facts.get("rows", ()):
        yield f"══ row {row['row']} · {_many(len(row['samples']), 'sample')} · {row['tokens']} of {facts['seq']} slots"
        for sample in row["samples"]:
            yield from _sample(sample, facts, colour, borders)
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


def _packed(facts: Mapping[str, Any]) -> Iterator[str]:
    columns = {name: counts for name, counts in facts["counts"].items() if counts is not None}
    yield " " * 14 + "".join(f"{name.replace('_', ' '):>14}" for name in columns)
    for key in columns["train"]:
        yield f"{key.replace('_', ' '):<14}" + "".join(f"{counts[key]:>14,}" for counts in columns.values())
    yield from (f"refused {_plain(r['where'])}: {_plain(r['reason'])}" for r in facts["refused"])
    yield ""
    if facts["cache"]:
        yield f"cache {', '.join(map(_plain, facts['cache']))}: {facts['cache_bytes'] / 2**20:.1f} MiB"
    else:
        yield "cache not needed: so little is tokenised at the start of a run, in memory"
    yield ""
    yield f"{'layout':<14}{'real tokens':>12}{'rows':>10}{'slots':>14}{'squared lengths':>18}{'planned a second':>18}"
    for f in facts["fills"]:
        name = f["name"] + " *" * f["chosen"]
        yield f"{name:<14}{f['fill']:>12.2%}{f['rows']:>10,}{f['slots']:>14,}{f['squares']:>18,}" + (
            f"{f['samples_per_s']:>18,.0f}"
        )
    if any(f["chosen"] for f in facts["fills"]):
        yield "* this run's"


def _plain(text: str) -> str:
    """Text in one line, without what must not reach a terminal."""
    from optrush.data.preview import visible

    return "".join(map(visible, text)).replace("\n", "")


def _counts(documents: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(d['tokens'] for d in documents)} tokens, {sum(d['targets'] for d in documents)} learnt"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _text(pieces: Sequence[Mapping[str, Any]], colour: bool, borders: bool) -> list[str]:
    """The lines of a document, in colours or between marks."""
    from optrush.data.preview import BORDER, CLOSE, CLOSE_SPECIAL, OPEN, OPEN_SPECIAL, visible

    whole, before = "", None
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
        whole, before = whole + seen, piece
    if not colour and before and before["learnt"]:
        whole += CLOSE
    return ["  " + line for line in whole.removesuffix("\n").split("\n")]
