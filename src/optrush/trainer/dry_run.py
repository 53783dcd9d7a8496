"""Show what `optrush train` would do and need: `--dry-run`.

The data is read and tokenized like in training, and the rows are the first step's; the model is neither loaded nor
allocated, and no run file is written. Facts first, as one document for --json; their text is below.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from optrush import console
from optrush.config import Config, dump_config
from optrush.data import preview, sampler
from optrush.data.dataset import Sources, read_sources
from optrush.data.packing import RowLayout
from optrush.data.schema import RowLocation
from optrush.data.tokenize import cache_root
from optrush.data.tokenizer import open_tokens, settle_images
from optrush.decide import Decided, changed
from optrush.errors import ConfigError, UserError
from optrush.hardware import GIB
from optrush.launch import launched
from optrush.models.text_part import text_config
from optrush.objectives import check_layout
from optrush.planner import search
from optrush.planner.sets import Prediction
from optrush.technique import RANK_PARTS, Teacher, instantiate
from optrush.techniques import ALL
from optrush.trainer import checkpoint, rollout, run_dir
from optrush.trainer.distributed import World
from optrush.trainer.rollout_server import connect
from optrush.trainer.run import absolute, check_run_output
from optrush.trainer.trainer import Trainer, idle_settings

if TYPE_CHECKING:
    from optrush.data.samples import Dataset

ROWS = 3  # rows to show
PREDICTED = (
    "peak_bytes", "memory_kind", "phase", "device", "capacity_bytes", "fits", "tokens_per_s", "basis", "host_bytes",
    "host_room_bytes", "room_bytes", "rates_from",
)  # fmt: skip


def dry_run(
    resolved: Decided, resume: Literal["auto"] | Path | None, command: str
) -> tuple[dict[str, Any], Prediction | None]:
    """Return the facts and the prediction, if any, of a run without running it.

    Args:
        command: the line that starts it.

    Raises:
        UserError: any error of training before it builds the model.
    """
    config, env = resolved.config, resolved.env
    remedy = None
    try:
        check_run_output(resolved, resume)
    except ConfigError as error:  # the facts are also useful for a finished run
        if error.found != run_dir.OCCUPIED:
            raise
        remedy = error.do
    manifest = checkpoint.choose(config.output, resume)[0] if launched()[1] == 1 else None
    today = checkpoint.first_date(manifest)
    tokens = open_tokens(config, resolved.folder, today)
    vocab = text_config(resolved.hf).get("vocab_size") or (0 if tokens is None else len(tokens.tokenizer))
    vocab = vocab if config.data.random is None else resolved.shared_ids(vocab)
    layout = _layout(resolved)
    settle_images(tokens, resolved.techniques, layout)
    sources = read_sources(config, tokens, vocab, console.say, cut=layout.uncut)
    if config.grpo is not None and tokens is not None:
        stream: sampler.Stream = rollout.prompt_stream(config, sources.train, layout, env.seq)
        rollout.try_rewards(config, sources.train, tokens.tokenizer)
        if config.rollout is not None:
            connect(config.rollout)
    else:
        stream = sampler.stream_of(
            sources.train, layout, T=env.seq, rows=env.rows, seed=config.seed, most_bad=config.data.most_bad
        )
    steps = stream.plan(None if config.train.steps else config.train.epochs, config.train.steps)
    if manifest is not None:
        checkpoint.check_plan(manifest, steps.steps, stream.seek(manifest.step, manifest.position))
    rows = None
    if config.data.random is None and tokens is not None:
        first = [(b, row) for b, row in enumerate(stream.step(0, steps)) if row][:ROWS]
        source = _StreamedRows(stream.source.parts) if not stream.tokenized else stream.source
        rows = list(preview.describe_rows(cast("Dataset", source), tokens.tokenizer, first, env.seq))
    memory, prediction = memory_facts(config, env.ranks)
    disk = disk_facts(resolved, steps.steps)
    if env.teacher is not None and env.teacher.stored is not None:
        disk |= stored_facts(config, env.teacher, sources)
    facts = data_facts(resolved, sources, stream, steps, 0 if manifest is None else manifest.step)
    answer = {
        "decided": resolved.facts(),
        "config": absolute(config).model_dump(mode="json", by_alias=True),
        "memory": memory,
        "time": time_facts(memory, facts),
        "disk": disk,
        "data": facts,
        "rows": rows,
        "notes": list(idle_settings(config, facts["steps"], sources.held_out is not None)),
        "occupied": remedy,
        "launch": command,
    }
    return answer, prediction


class _StreamedRows(NamedTuple):
    """The source of a stream for `preview.rows`, without the files of its rows."""

    parts: int

    def where(self, i: int) -> RowLocation:
        return RowLocation(Path("data.stream"), i + 1)


def _layout(resolved: Decided) -> RowLayout:
    """Return the row layout: runs the data stage on a trainer without a model."""
    nothing = cast(Any, None)
    trainer = Trainer(resolved.config, resolved.env, World(0, 1, torch.device("cpu")), resolved.hf, nothing, nothing)
    for technique in resolved.techniques:
        technique.data(trainer)
    check_layout(resolved.config, trainer.layout)
    return trainer.layout


def memory_facts(config: Config, ranks: int) -> tuple[dict[str, Any], Prediction | None]:
    """Return the worst rank's prediction, as facts with the biggest line first, and itself; or why there is none."""
    try:
        prediction = search.predict(config, "auto", ranks)
    except UserError as error:
        return {"unknown": f"{error.asked}: {error.found}"}, None
    lines = sorted(prediction.lines, key=lambda item: -item.bytes)
    facts = {name: getattr(prediction, name) for name in PREDICTED}
    return facts | {"lines": [{"name": i.name, "bytes": i.bytes, "reason": i.reason} for i in lines]}, prediction


def time_facts(memory: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted seconds of the remaining steps, without evaluations and saves; None if unknown."""
    steps, speed = data["steps"] - data["done"], memory.get("tokens_per_s")
    tokens = data["tokens"] or data["steps"] * data["rows_a_step"] * data["seq"]  # for a stream: assume full rows
    return {"steps": steps, "train_s": tokens / speed * steps / data["steps"] if speed else None}


def disk_facts(resolved: Decided, steps: int) -> dict[str, Any]:
    """Return the maximum bytes of checkpoints and exported model, and the free disk space."""
    config = resolved.config
    saves, copies = run_dir.saved_copies(config, steps)
    folder, free = run_dir.free_space(config.output)
    weights, states = _total_bytes(config)
    sizes = {"weights_bytes": weights, "states_bytes": states}
    needed = None if weights is None or states is None else copies * (weights + states) + weights * config.train.export
    fits = None if needed is None else needed <= free
    counts = {"checkpoints": copies, "saves": saves, "keep": config.train.keep, "needed_bytes": needed}
    return {**sizes, **counts, "free_bytes": free, "folder": str(folder), "fits": fits}


def stored_facts(config: Config, teacher: Teacher, sources: Sources) -> dict[str, Any]:
    """Return the bytes of the teacher's stored tokens, cached or not."""
    wanted = [sources.train] if sources.held_out is None else [sources.train, sources.held_out]
    targets = sum(int(source.targets().sum()) for source in wanted)
    folder, free = run_dir.free_space(cache_root(config.data.cache))
    stored = targets * teacher.record_bytes
    return {"stored_tokens_bytes": stored, "stored_tokens_free_bytes": free, "stored_tokens_folder": str(folder)}


def _total_bytes(config: Config) -> tuple[int, int] | tuple[None, None]:
    """Return the predicted bytes of all weights and all optimizer states over the ranks; None without a prediction."""
    alone = {t.name: config.with_[t.name] for t in instantiate(ALL, config.with_) if not RANK_PARTS & t.claims}
    try:
        prediction = search.predict(changed(config, {"with": alone, "method": None}), "auto", 1)
    except UserError:
        return None, None
    weights, states = (sum(i.bytes for i in prediction.lines if i.name.startswith(p)) for p in ("weights.", "states."))
    assert weights and states, "the plan has no line weights.* or states.*"
    return weights, states


def data_facts(
    resolved: Decided, sources: Sources, rows: sampler.Stream, steps: sampler.StreamPlan, done: int
) -> dict[str, Any]:
    """Return documents, steps and tokens of the run; null if unknown before training."""
    env = resolved.env
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


# --- the text


def dry_run_text(
    facts: dict[str, Any], config: Config, rows: Iterable[str], memory: Iterable[str] = (), work: Iterable[str] = ()
) -> str:
    """Format the facts for people.

    Args:
        rows: the lines of facts["rows"] in the form of `data show`.
        memory, work: the prediction's lines in the form of `plan --details`, if any.
    """
    parts = (
        ("configuration", dump_config(absolute(config)).rstrip().splitlines()),
        *([("decided", [f"{k}: {v}" for k, v in reasons.items()])] if (reasons := facts["decided"]["reasons"]) else []),
        ("memory", [*memory, *_memory(facts["memory"])]),
        ("time", [*work, *_time(facts["time"])]),
        ("disk", _disk(facts["disk"])),
        ("data", _data(facts["data"])),
        ("first rows", rows),
        *([("notes", facts["notes"])] if facts["notes"] else []),
        ("launch", _launch(facts["launch"], facts["occupied"])),
    )
    return "\n\n".join("\n".join([title, *(f"  {line}".rstrip() for line in lines)]) for title, lines in parts)


def _size(n: float) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB"


def _memory(m: dict[str, Any]) -> list[str]:
    """Return why there is no prediction, or what to do if it does not fit."""
    if "unknown" in m:
        return [f"no prediction: {m['unknown']}"]
    peak, room, host_room = m["peak_bytes"], m["room_bytes"], m["host_room_bytes"]
    remedies = {
        "smaller batch.micro_tokens or batch.seq, or a technique that saves memory": not m["fits"]
        and (room is None or peak > room),
        "recompute in addition to offloading, train.save: sync, or a host with more memory": host_room is not None
        and m["host_bytes"] > host_room,
    }
    return [f"DOES NOT FIT: {remedy}" for remedy, needed in remedies.items() if needed]


def _time(t: dict[str, Any]) -> list[str]:
    if t["train_s"] is None:
        return ["unknown: run `optrush calibrate` on this machine"]
    return [f"about {console.duration(t['train_s'])} for {_many(t['steps'], 'step')}, without evaluations and saves"]


def _launch(command: str, occupied: str | None) -> list[str]:
    return [command] if occupied is None else [command, f"would be rejected: {run_dir.OCCUPIED}", occupied]


def _disk(d: dict[str, Any]) -> list[str]:
    """Return lines about disk space: needed by checkpoints, the exported model and a teacher's tokens, and free."""
    free = f"{_size(d['free_bytes'])} free in {d['folder']}"
    teacher = []
    if (stored := d.get("stored_tokens_bytes")) is not None:
        room = f"{_size(d['stored_tokens_free_bytes'])} free in {d['stored_tokens_folder']}"
        teacher = [f"teacher      {_size(stored):>10}  its most likely tokens for each target, stored once; {room}"]
    if d["needed_bytes"] is None:
        return [f"needed: unknown without a memory prediction; {free}", *teacher]
    each, n = d["weights_bytes"] + d["states_bytes"], d["checkpoints"]
    reason = f"{d['saves']} saved"
    if n > d["keep"]:
        reason = f"keep {d['keep']}, plus one while it is written"
    fits = "fits" if d["fits"] else "DOES NOT FIT: free space, lower train.keep, or use another output"
    return [
        f"checkpoints  {_size(n * each):>10}  {n} x {_size(each)}, weights and optimizer states ({reason})",
        f"model        {_size(d['weights_bytes']):>10}  exported at the end",
        f"needed       {_size(d['needed_bytes']):>10}  {free}: {fits}",
        *teacher,
    ]


def _data(d: dict[str, Any]) -> list[str]:
    resumed = f"; resumes after step {d['done']}" if d["done"] else ""
    times = "" if d["epochs"] is None else f", {d['epochs']:.3g} epochs"
    ranks = f" on {d['ranks']} ranks" if d["ranks"] > 1 else ""
    return [
        d["summary"],
        f"{_many(d['steps'], 'step')}{times}{resumed}",
        f"per step: {_many(d['rows_a_step'], 'row')} of {d['seq']} slots, "
        f"{_many(d['micro_batches'], 'micro-batch', 'es')} per rank{ranks}",
        "tokens: unknown until they are read (data.stream)"
        if d["tokens"] is None
        else f"{d['tokens']} tokens in the run, {d['target_tokens']} of them targets; rows are {d['fill']:.1%} full",
    ]


def _many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def launch_line(arguments: Sequence[str]) -> str:
    """Return the command line without --dry-run and --json, under the launcher that started this process."""
    left = shlex.join([a for a in arguments if a not in ("--dry-run", "--json")])
    if "RANK" not in os.environ:
        return f"optrush {left}"
    ranks = launched()[1]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return f"torchrun --nnodes {ranks // local} --nproc-per-node {local} -m optrush {left}"
