"""`optrush train --dry-run`: everything a run would be told to do, and what it would cost, before it costs anything.

The data is read and tokenised as for training, the rows are those of the first step; the model is neither loaded nor
allocated, and no file of the run is written. Facts first, one document for --json; their text is below.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from optrush import console
from optrush.config import Config, dump_config
from optrush.data import sampler
from optrush.data.chat_template import Tokens, open_tokens
from optrush.data.preview import CLOSE, OPEN, decoded, visible
from optrush.data.sources import Sources, read_sources
from optrush.errors import UserError
from optrush.hardware import GIB
from optrush.launch import launched
from optrush.objectives import check_layout
from optrush.planner import search
from optrush.resolve import ResolvedConfig
from optrush.technique import Part, instantiate
from optrush.techniques import ALL
from optrush.trainer import checkpoint
from optrush.trainer.distributed import World
from optrush.trainer.run import absolute, look
from optrush.trainer.trainer import Trainer

if TYPE_CHECKING:
    from optrush.planner.search import Prediction

ROWS, CHARACTERS = 3, 600  # that are shown: rows, and characters of each
BAR, LINES = 16, 12  # of the memory: characters of the longest bar, lines that are shown one by one
COLOUR, PLAIN = "\x1b[32m", "\x1b[0m"


def rehearse(prepared: ResolvedConfig, resume: Literal["auto"] | Path | None, command: str) -> dict[str, Any]:
    """The facts of a run that is not run.

    Args:
        command: the line that starts it.

    Raises:
        UserError: whatever training would refuse before it builds the model.
    """
    config, env = prepared.config, prepared.env
    look(prepared, resume)
    manifest = checkpoint.choose(config.output, resume)[0] if launched()[1] == 1 else None
    date = None if manifest is None else manifest.fingerprints.get("date")
    today = None if date is None else datetime.date.fromisoformat(date)
    tokens = open_tokens(config, prepared.folder, today)
    vocab = prepared.hf.get("vocab_size") or (0 if tokens is None else len(tokens.tokenizer))
    trainer = _laid(prepared)
    check_layout(config, trainer.layout)
    sources = read_sources(config, tokens, vocab, console.say, cut=trainer.layout.uncut)
    rows = sampler.Stream(
        sources.train, trainer.layout, T=env.seq, rows=env.rows, seed=config.seed, most_bad=config.data.most_bad
    )
    steps = rows.plan(None if config.train.steps else config.train.epochs, config.train.steps)
    if manifest is not None:
        checkpoint.check_plan(manifest, steps.steps, rows.seek(manifest.step, manifest.position))
    return {
        "config": absolute(config).model_dump(mode="json", by_alias=True),
        "memory": memory(config, env.ranks),
        "disk": disk(prepared, steps.steps),
        "data": data(prepared, sources, rows, steps, 0 if manifest is None else manifest.step),
        "rows": None if config.data.random is not None or tokens is None else shown(rows, steps, prepared, tokens),
        "launch": command,
    }


def _laid(prepared: ResolvedConfig) -> Trainer:
    """The data stage, on a job that has no model: how samples become rows."""
    nothing = cast(Any, None)
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(prepared.config, prepared.env, world, prepared.hf, nothing, nothing)
    for technique in prepared.techniques:
        technique.data(trainer)
    return trainer


def memory(config: Config, ranks: int) -> dict[str, Any]:
    """The prediction for the worst rank, biggest line first; or why there is none."""
    try:
        found = search.predict(config, "auto", ranks)
    except UserError as error:
        return {"unknown": f"{error.asked}: {error.found}"}
    lines = sorted(found.lines, key=lambda item: -item.bytes)
    return {
        "peak_bytes": found.peak_bytes,
        "memory_kind": found.memory_kind,
        "phase": found.phase,
        "device": found.device,
        "capacity_bytes": found.capacity_bytes,
        "fits": found.fits,
        "tokens_per_s": found.tokens_per_s,
        "basis": found.basis,
        "rates_from": found.rates_from,
        "lines": [{"name": i.name, "bytes": i.bytes, "reason": i.reason} for i in lines],
    }


def _period(every: float, steps: int) -> int:
    """Steps between two, of a cadence."""
    return max(1, round(every * steps)) if every < 1 else int(every)


def disk(prepared: ResolvedConfig, steps: int) -> dict[str, Any]:
    """What checkpoints and the exported model take at most, and what is free where they go."""
    config = prepared.config
    every, keep = config.train.save_every, config.train.keep
    period = steps if every is None else _period(every, steps)
    saved, tried = {*range(period, steps + 1, period), steps}, config.train.eval_every
    evaluated = set() if tried is None else set(range(_period(tried, steps), steps, _period(tried, steps)))
    best = bool(evaluated and config.train.best and every is not None and config.data.eval is not None)
    saves = len(saved | evaluated if best else saved)  # at most
    copies = min(saves, keep + 1 + best)  # a new one is whole before an old one goes
    output = Path(config.output).absolute()
    there = next(p for p in (output, *output.parents) if p.is_dir())
    weights, states = whole(config)
    needed = None if weights is None or states is None else copies * (weights + states) + weights * config.train.export
    free = shutil.disk_usage(there).free
    return {
        "weights_bytes": weights,
        "states_bytes": states,
        "checkpoints": copies,
        "saves": saves,
        "keep": keep,
        "needed_bytes": needed,
        "free_bytes": free,
        "folder": str(there),
        "fits": None if needed is None else needed <= free,
    }


def whole(config: Config) -> tuple[int, int] | tuple[None, None]:
    """Bytes of all weights and of all optimizer states, over the ranks: the prediction for one rank that has no peers.

    None where there is no prediction.
    """
    alone = {t.name: config.with_[t.name] for t in instantiate(ALL, config.with_) if Part.DATA not in t.claims}
    try:
        found: Prediction = search.predict(config.model_copy(update={"with_": alone}), "auto", 1)
    except UserError:
        return None, None
    return _of(found, "weights."), _of(found, "states.")


def _of(found: Prediction, part: str) -> int:
    size_bytes = sum(item.bytes for item in found.lines if item.name.startswith(part))
    assert size_bytes, f"the plan has no line {part}*"
    return size_bytes


def data(
    prepared: ResolvedConfig, sources: Sources, rows: sampler.Stream, steps: sampler.Plan, done: int
) -> dict[str, Any]:
    """Documents, steps and tokens of the run; null where only training will tell."""
    env = prepared.env
    known = rows.totals(steps, env.micro_rows)
    return {
        "summary": sources.summary,
        "documents": len(sources.train) * sources.train.parts,
        "held_out_documents": 0 if sources.held_out is None else len(sources.held_out) * sources.held_out.parts,
        "too_long": sources.too_long,
        "epochs": known and known.epochs,
        "steps": steps.steps,
        "done": done,
        "rows_a_step": env.rows,
        "seq": env.seq,
        "ranks": env.ranks,
        "micro_batches": env.accumulation,
        "tokens": known and known.tokens,
        "target_tokens": known and known.targets,
        "slots": known and known.slots,
        "fill": known and known.tokens / known.slots,
    }


def shown(rows: sampler.Stream, steps: sampler.Plan, prepared: ResolvedConfig, tokens: Tokens) -> list[dict[str, Any]]:
    """The first rows of the first step, in pieces that are learnt or not."""
    held = [(b, row) for b, row in enumerate(rows.step(0, steps)) if row]
    found = []
    for b, row in held[:ROWS]:
        left, documents = CHARACTERS, []
        names = ("chosen", "rejected") if rows.source.parts > 1 else ("document",)
        for name, (sample, document) in zip(cycle(names), row):
            most = min(left, CHARACTERS // len(names))
            pieces = list(decoded(tokens.tokenizer, document, most))
            size = sum(len(p.text) for p in pieces)
            left -= size
            documents.append(
                {
                    "name": name,
                    "document": sample,
                    "tokens": len(document),
                    "targets": int(document.targets.sum()),
                    "pieces": [{"text": p.text, "learnt": p.learnt} for p in pieces],
                    "cut": size >= most,
                }
            )
        used = sum(len(document) for _, document in row)
        found.append({"row": b, "tokens": used, "documents": documents})
    return found


# --- the text


def text(facts: dict[str, Any], config: Config, colour: bool) -> str:
    """The facts for people; what is learnt stands between marks, and in colour on a terminal."""
    parts = (
        ("configuration", dump_config(absolute(config)).rstrip().splitlines()),
        ("memory", _memory(facts["memory"])),
        ("disk", _disk(facts["disk"])),
        ("data", _data(facts["data"])),
        ("first rows", _rows(facts, colour)),
        ("launch", [facts["launch"]]),
    )
    return "\n\n".join("\n".join([title, *(f"  {line}".rstrip() for line in lines)]) for title, lines in parts)


def size(n: float) -> str:
    """Bytes for people."""
    return f"{n / GIB:.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"


def _memory(m: dict[str, Any]) -> list[str]:
    if "unknown" in m:
        return [f"no prediction: {m['unknown']}"]
    peak, capacity = m["peak_bytes"], m["capacity_bytes"]
    fits = "capacity unknown" if capacity is None else f"of {size(capacity)}, " + ("fits" if m["fits"] else "")
    if capacity is not None and not m["fits"]:
        fits += "DOES NOT FIT: smaller batch.micro_tokens or batch.seq, or a technique that saves memory"
    lines = [f"{size(peak)} {fits}; {m['memory_kind']} of a rank on {m['device']}, peak in the phase {m['phase']}"]
    big, small = m["lines"][:LINES], m["lines"][LINES:]
    if small:
        rest = sum(i["bytes"] for i in small)
        big = [*big, {"name": f"{len(small)} smaller", "bytes": rest, "reason": "all of them: --json"}]
    wide = max((len(i["name"]) for i in big), default=0)
    for item in big:
        share = item["bytes"] / peak if peak else 0.0
        bar = "█" * round(share * BAR)
        lines.append(f"{item['name']:<{wide}}  {size(item['bytes']):>10}  {bar:<{BAR}} {share:4.0%}  {item['reason']}")
    if m["tokens_per_s"] is not None:
        lines.append(f"about {console.count(m['tokens_per_s'])} tokens a second ({m['basis']})")
        if m["rates_from"]:
            lines.append(f"rates: {m['rates_from']}")
    return lines


def _disk(d: dict[str, Any]) -> list[str]:
    free = f"{size(d['free_bytes'])} free in {d['folder']}"
    if d["needed_bytes"] is None:
        return [f"needed: unknown without a prediction of memory; {free}"]
    each, n = d["weights_bytes"] + d["states_bytes"], d["checkpoints"]
    why = f"{d['saves']} saved"
    if n > d["keep"]:
        why = f"keep {d['keep']}, and a new one is whole before an old one goes"
    fits = "fits" if d["fits"] else "DOES NOT FIT: free some, lower train.keep, or take another output"
    return [
        f"checkpoints  {size(n * each):>10}  {n} x {size(each)}, weights and optimizer states ({why})",
        f"model        {size(d['weights_bytes']):>10}  exported at the end",
        f"needed       {size(d['needed_bytes']):>10}  {free}: {fits}",
    ]


def _data(d: dict[str, Any]) -> list[str]:
    go_on = f"; goes on after step {d['done']}" if d["done"] else ""
    times = "" if d["epochs"] is None else f", {d['epochs']:.3g} times over the documents"
    ranks = f" on {d['ranks']} ranks" if d["ranks"] > 1 else ""
    return [
        d["summary"],
        f"{_many(d['steps'], 'step')}{times}{go_on}",
        f"a step: {_many(d['rows_a_step'], 'row')} of {d['seq']} slots, "
        f"{_many(d['micro_batches'], 'micro-batch', 'es')} a rank{ranks}",
        "tokens: known when they are read (data.stream)"
        if d["tokens"] is None
        else f"{d['tokens']} tokens in the run, {d['target_tokens']} of them learnt; rows are {d['fill']:.1%} full",
    ]


def _rows(facts: dict[str, Any], colour: bool) -> list[str]:
    if facts["rows"] is None:
        return ["random tokens: nothing to decode"]
    lines = [f"what is learnt stands between {OPEN} and {CLOSE}; ↵ is a newline"]
    for row in facts["rows"]:
        d = facts["data"]
        lines.append(f"row {row['row']} of step 1: {_many(len(row['documents']), 'document')}, "
                     f"{row['tokens']} of {d['seq']} slots")  # fmt: skip
        for document in row["documents"]:
            counts = f"{document['tokens']} tokens, {document['targets']} learnt"
            head = f"── {document['name']} {document['document']}: {counts}"
            lines += ["  " + head, *("    " + line for line in _document(document, colour))]
    return lines


def _document(document: dict[str, Any], colour: bool) -> list[str]:
    whole = ""
    for piece in document["pieces"]:
        seen = "".join(map(visible, piece["text"]))
        if not piece["learnt"]:
            whole += seen
        elif colour:
            whole += OPEN + COLOUR + seen.replace("\n", f"{PLAIN}\n{COLOUR}") + PLAIN + CLOSE
        else:
            whole += OPEN + seen + CLOSE
    if not whole:
        return ["(not shown)"]
    return (whole.removesuffix("\n") + ("…" if document["cut"] else "")).split("\n")


def _many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def launch_line(arguments: Sequence[str]) -> str:
    """The command line without what made it a dry run, under the launcher that started this process."""
    import shlex

    left = shlex.join([a for a in arguments if a not in ("--dry-run", "--json")])
    if "RANK" not in os.environ:
        return f"optrush {left}"
    ranks = launched()[1]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return f"torchrun --nnodes {ranks // here} --nproc-per-node {here} -m optrush {left}"


def colours() -> bool:
    """Whether standard output is a terminal that wants colour."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
