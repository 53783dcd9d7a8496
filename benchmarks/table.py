"""Writes figures and pictures of README.md and of docs from committed records; a test compares.

usage: table.py          rewrites each between its two markers, and the pictures next to the records
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from optrush.benchmark import ladder
from optrush.benchmark.record import Record, read_records
from optrush.config import Config
from optrush.planner.cost import PARTS
from optrush.planner.search import Prediction, predict
from optrush.report import bench
from optrush.techniques import ALL, attention

sys.path.insert(0, str(Path(__file__).parent))
import cells
import gains
import guide

ROOT = Path(__file__).parent.parent
LADDER = Path("benchmarks/results/h200-single-gpu")
PLAIN = Path("benchmarks/results/h200-plain.jsonl")  # in turn with an earlier run of its lower rungs
CELLS = Path("benchmarks/results/h200-cells.jsonl")
FURTHER = tuple(
    Path(f"benchmarks/results/{name}.jsonl")
    for name in ("h200-cells-kinds", "h200-cells-families", "2xh200-cells", "4xh200-cells")
)
LAYOUTS = Path("benchmarks/results/h200-data")
FASTEST = tuple(
    Path(f"benchmarks/results/h200-{name}")
    for name in (
        "peers", "peers-best", "peers-bf16", "rows", "head", "least", "levers", "eight", "least8", "longest8",
        "small-card", "adapters", "adapters8", "qlora", "longest-qlora", "chat-lengths", "families-full",
        "families-lora", "families-lora4", "small-adapters",
    )
)  # fmt: skip
BEST = ("peers-best", "peers-bf16")  # other systems' best-tuned settings alone, on other machines
SAVING = tuple(Path(f"benchmarks/results/h200-{name}") for name in ("memory", "memory8"))
LONGEST = tuple(Path(f"benchmarks/results/h200-{name}") for name in ("long-context", "long-context8"))
PARTED = (LADDER, Path("benchmarks/results/cpu-demo"))
LEVERS = Path("benchmarks/results/h200-adapter-levers")
PROOFS = tuple(Path(f"benchmarks/results/h200-{name}") for name in ("proofs", "proof-amp", "proof-chats", "proofs8"))
GRADIENTS = Path("benchmarks/results/h200-gradients.jsonl")
TRAINED = Path("benchmarks/results/h200-gradients-trained.jsonl")
CHOICES = tuple(Path(f"benchmarks/results/h200-{name}") for name in ("choices", "choices-kernels"))
CURVES = Path("benchmarks/results/h200-float8-curve.jsonl")
CALIBRATION = Path("benchmarks/results/h200-calibration.json")  # `optrush calibrate --out`, where a record has no own
FAULTS = Path("benchmarks/results/faults.jsonl")  # `make faults`
ANSWERS = tuple(Path(f"benchmarks/results/{name}-answers.jsonl") for name in ("h100", "h200", "cpu"))
EXPERTS = Path("benchmarks/results/h200-experts.jsonl")  # `experts.py`; h100-experts: before QuACK's layer
SHARED = Path("benchmarks/results/2xh200-gpus.jsonl")  # `bench --ladder gpus`
SHARED_LARGE = Path("benchmarks/results/2xh200-gpus-large.jsonl")
LONG_ROW = Path("benchmarks/results/2xh200-long-row.jsonl")
RATES = {  # `rates.py rates.yaml`
    "cpu-rates": "The built-in model, on a CPU; the race itself, and then the grid",
    "h100-rates": "A model of 0.5B (qwen2.5-0.5b) from random weights, on an H100",
    "h200-rates-short": "The same in fewer and larger steps, on an H200; the race itself, and then the grid",
}
BEGIN, END = "<!-- figures: benchmarks/table.py -->", "<!-- end of figures -->"
GIB = 2**30
# The rung of the plain loop (transformers and torch alone) that does the same.
SAME = {
    "float32, eager": "0_fp32_eager",
    "mixed precision": "1_amp",
    "fused AdamW": "2_fused_adam",
    "flash attention": "3_sdpa",
    "compile": "4_compile",
    "batch 4": "5_bs4",
    "batch 8": "5_bs8",
    "batch 16": "5_bs16",
    "recompute, T=4096": "6_gc_bs16_4096",
}


SHOWN = {
    "1b, 1": "1B, all weights, T=2048",
    "1b ddp, 2": "the same, ddp",
    "1b ddp, 4": "the same, ddp",
    "8b, 1, T=4096": "8B, all weights, T=4096",
    "8b fsdp, 2, T=4096": "the same, fsdp",
    "8b fsdp 3, 4": "the same, fsdp",
    "70b qlora fsdp, 2, T=2048": "70B, QLoRA, T=2048, fsdp",
    "70b qlora fsdp, 4, T=2048": "70B, QLoRA, T=2048, fsdp",
}


def first_page() -> str:
    """Return the one table of the README: other systems in turn with ours, where they did the same work."""
    rows = [
        "optrush and each other framework ran alternately on one NVIDIA H200, each in its own process, with the same",
        "data, precision and trained parameters",
        "([all of it](docs/ladder.md#measured-the-fastest-set-and-other-systems)).",
        "*Stock*: the framework's defaults, including gradient checkpointing.",
        "",
        *_in_turn(folder for folder in FASTEST if _named(folder) not in BEST),
        "",
        "optrush on one, two and four H200s of one host ([all ways to share a model](docs/guide/14-gpus.md)):",
        "",
        "| case | GPUs | tokens/s | scaling (1.0 is linear) |",
        "|---|---|---|---|",
        *(
            f"| {SHOWN[name]} | {ranks} | {speed:,.0f} | {f'{ratio:.2f}' if ratio and ranks > 1 else ''} |"
            for name, ranks, speed, ratio, _ in sorted(guide.scaling(), key=lambda run: [*SHOWN, run[0]].index(run[0]))
            if name in SHOWN
        ),
    ]
    return "\n".join(rows)


def _in_turn(folders: Iterable[Path]) -> list[str]:
    """Return a row for each other system, with the rung of ours that it ran in turn with."""
    rows = [
        "| case | system | runs | tokens/s: ours | theirs | ours / theirs | peak GiB: ours | theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for records in (read_records(ROOT / folder) for folder in folders):
        by_name = {r.rung: r for r in records}
        for ours, r in ((by_name.get(r.since or ""), r) for r in records if r.peer and not r.red):
            if ours and ours.tokens_per_s and ours.peak_bytes and r.tokens_per_s and r.peak_bytes:
                speeds = f"{ours.tokens_per_s:,.0f} | {r.tokens_per_s:,.0f} | {ours.tokens_per_s / r.tokens_per_s:.2f}"
                peaks = f"{ours.peak_bytes / GIB:.1f} | {r.peak_bytes / GIB:.1f}"
                rows.append(f"| {r.case} | {r.rung} | {len(r.repeats)} | {speeds} | {peaks} |")
    return rows


def table() -> str:
    """Return the ladder, a row a rung, with the plain loop and the prediction."""
    records = read_records(ROOT / LADDER)
    plain = plain_loops()
    first, known = records[0], {r.rung for r in records}
    config = Config.model_validate(first.config)
    rungs = ladder.resolve_rungs(ladder.find_ladder(first.ladder, config), config, True)
    since = [f"*{r.name}*" for r in rungs if r.name not in known]
    rows = [
        "![tokens/s of each rung](rungs-speed.svg)\n\n![peak memory of each rung](rungs-memory.svg)",
        "",
        f"{first.case}, T=2048 where no other is named, one {first.device}, torch {first.environment['torch']};",
        f"medians of {_repeats([r.repeats for r in records])}, each in a fresh process, others stopped meanwhile",
        "([how](../benchmarks/README.md#the-committed-results)). *plain*: a loop of transformers and torch that",
        "does the same, in turn with an earlier climb of these rungs, on another machine of the same kind.",
        "",
        "| rung | tokens/s | repeats | x | peak GiB | predicted GiB | MFU | plain tokens/s | plain GiB | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(r, {x.rung: x for x in records}, plain) for r in records if r.mode == "cumulative"),
        "",
        f"x: against the rung before, or the one it begins from. Records: [{LADDER}](../{LADDER}/records.jsonl),",
        f"[{PLAIN}](../{PLAIN}).",
        *_red(records),
        *(["", f"Rungs that are younger than this climb: {', '.join(since)}."] if since else []),
        "",
        "The plan's constants were fitted to this load, in earlier climbs. Other shapes, row lengths and techniques,",
        "predicted before they were measured, by an earlier state of the plan (benchmarks/README.md), on the same",
        "kind of machine:",
        "",
        cells.table(ROOT / CELLS),
        "",
        "Adapters, 4 bits, experts, two and four GPUs (NVLink), also predicted before they were measured, by a",
        "datasheet, in one run a cell, beside others on other GPUs of the machine. Records:",
        ", ".join(f"[{path.name}](../{path})" for path in FURTHER) + ".",
        *(line for path in FURTHER for line in ("", cells.table(ROOT / path))),
        "",
        cells.errors([ROOT / path for path in (CELLS, *FURTHER)]),
        "",
        "Figures of the plan were mended or fitted by this table since: the loss of one chunk, and the rates of",
        "experts and of the order of their rows. *earlier*: before windows and sinks without a mask, FlashAttention 4,",
        "two rows a micro-batch with 4 bits, and moments of narrow rows.",
        "",
        shared(),
        "",
        answered(),
        "",
        multiplied(),
    ]
    return "\n".join(rows)


def answered() -> str:
    """Return the tables of the plan's answer beside sets of techniques made by hand."""
    rows = [
        "The plan's answer, a configuration without `with`, beside ten sets of techniques made by hand, in turn, by",
        "answers.py on H100, on H200 and on two cores, all predicted before they were measured. *8b-lora* on an H100",
        "and the cases on H200 were ended by the limit of time. The former's answer is of an earlier plan, which took",
        "the smallest micro-batch and a float32 stream; the largest error of a peak is mended since, too. On the CPU",
        "the answer is the set *float32 8*, which ran at 5,729 and 6,586 tokens/s. Records:",
        ", ".join(f"[{path.stem}](../{path})" for path in ANSWERS) + ".", "",
        "| case | set, rows of a micro-batch | predicted GiB | measured | predicted tokens/s | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    said, apart = [], list[list[float]]()
    for path in ANSWERS:
        where = path.stem.partition("-")[0]
        for r in map(json.loads, (ROOT / path).read_text().splitlines()):
            case = r["case"] + f", {where.upper()}" * (where != "cpu")
            if "ratio" in r:
                best = f"{case}: {r['ratio']:.3f} of *{r['best']}*, the best of {r['measured']}"
                said.append(f"{best} that ran, {len(r['out_of_memory']) or 'none'} out of memory")
            elif r["tokens_per_s"] is not None:
                title = f"answer, {r['micro_tokens'] // r['seq']}" if r["name"] == "answer" else r["name"]
                peak, speed = r["planned_peak_bytes"], r["planned_tokens_per_s"]
                off = [peak / r["peak_bytes"] - 1, speed / r["tokens_per_s"] - 1]
                apart += [off] if r["memory_kind"] != "rss" else []
                rows.append(
                    f"| {case} | {title} | {peak / GIB:.1f} | {r['peak_bytes'] / GIB:.1f} "
                    f"| {speed:,.0f} | {r['tokens_per_s']:,.0f} | {off[1]:+.1%} |"
                )
    peaks, speeds = ([abs(x) for x in column] for column in zip(*apart, strict=True))  # of GPUs
    errors = [f"median error {statistics.median(e):.1%}, largest {max(e):.1%}" for e in (peaks, speeds)]
    rows += ["", f"The answer has, {'; '.join(said)}. On GPUs: peaks {errors[0]}, speeds {errors[1]}."]
    return "\n".join(rows)


def shared() -> str:
    """Return the table of the ladder of two GPUs, with what the plan said, and the longest row."""
    rows = [
        "The ladder `gpus` on two H200, `bench --ladder gpus benchmarks/llama1b.yaml --set batch.micro_tokens=4096`:",
        "micro-batches so small that the host, which starts kernels and collectives, bounds most rungs. One repeat, in",
        "two calls (the second begins with `one GPU` again). *planned*: before, without the rung's link and without",
        "the host's time of collectives, mended since (tests/unit/test_plan_measured.py). Record:",
        f"[{SHARED.stem}](../{SHARED}).", "",
        "| rung | tokens/s | x one GPU | planned | error | peak GiB | planned |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    rows += _scaled(SHARED)
    apart = [abs(r["predicted_tokens_per_s"] / r["tokens_per_s"] - 1) for r in _lines(SHARED_LARGE)]
    rows += [
        "",
        "The same ladder with micro-batches of 8,192 tokens, eight of them a step, on two other H200, one or two",
        "repeats, `--set batch.tokens=65536 --set batch.micro_tokens=8192`: the plan's speeds are "
        f"{statistics.median(apart):.1%} off",
        "in the median; since then links without NVLink are slower in it (tests/unit/test_plan_measured.py). Record:",
        f"[{SHARED_LARGE.stem}](../{SHARED_LARGE}).", "",
        "| rung | tokens/s | x one GPU | planned | error | peak GiB | planned |", "|---|---|---|---|---|---|---|",
        *_scaled(SHARED_LARGE),
    ]  # fmt: skip
    r, whole = _lines(LONG_ROW)
    rows += [
        "",
        f"A row of {r['seq']:,} tokens over two H200 (`context`, `fsdp`, `recompute`, `offload-activations`), all 32 "
        "blocks of llama-3.1-8b: two whole steps, loading and compiling took "
        f"{whole['rehearsed_s'] / 60:.0f} min at most (planned {whole['predicted_step_s'] / 60:.1f} a step); "
        f"{whole['device_gib']:.1f} GiB of a card by nvidia-smi (planned, less what torch keeps free, "
        f"{whole['predicted_peak_gib']:.1f}) and {whole['host_shared_gib'] / 2:.1f} GiB of host memory a rank (planned "
        f"{whole['predicted_host_gib']:.1f}). {r['blocks']} blocks: {r['step_s']:.0f} s a step, the first, in which "
        f"kernels are compiled (planned {r['predicted_step_s']:.0f}), {r['peak_gib']:.1f} GiB (planned "
        f"{r['predicted_peak_gib']:.1f}). Record: [{LONG_ROW.stem}](../{LONG_ROW}).",
    ]
    return "\n".join(rows)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def _scaled(path: Path) -> list[str]:
    """Return a ladder's rungs beside its rung of one GPU and beside the plan."""
    one, rows = 0.0, []
    for r in _lines(path):
        speed, said = r["tokens_per_s"], r["predicted_tokens_per_s"]
        one = speed if r["ranks"] == 1 else one
        rows.append(
            f"| {r['rung']} | {speed:,.0f} | {speed / one:.2f} | {said:,.0f} | {said / speed - 1:+.0%} "
            f"| {r['peak_bytes'] / GIB:.1f} | {r['predicted_peak_bytes'] / GIB:.1f} |"
        )
    return rows


def multiplied() -> str:
    """Return the table of a layer of experts by every kernel."""
    kernels = ("experts fused", "experts quack", "quack", "sonic", "torch bare", "quack bare")
    rows = [
        f"A layer of experts of 30B-A3B by itself, ms, by experts.py on an H200 ([{EXPERTS.stem}](../{EXPERTS})):",
        "*experts fused* is `fused-kernels:mlp=triton`, *experts quack* `mlp=quack`, *bare* are products alone,",
        "*layer* has the order of rows and the sums in it.", "",
        f"| tokens | routing | part | {' | '.join(kernels)} |", f"|---|---|---|{'---|' * len(kernels)}",
    ]  # fmt: skip
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for r in map(json.loads, (ROOT / EXPERTS).read_text().splitlines()):
        key = (f"{r['shape']['tokens']:,}", r["routing"], r["what"])
        found.setdefault(key, {})[r["kernel"]] = f"{r['ms']:.2f}" if "ms" in r else ""
    rows += [f"| {' | '.join((*key, *(ms.get(kernel, '') for kernel in kernels)))} |" for key, ms in found.items()]
    return "\n".join(rows)


def layouts() -> str:
    """The ladder `data`: what each layout makes of the same chats."""
    records = read_records(ROOT / LAYOUTS)
    first, by_name = records[0], {r.rung: r for r in records}
    rows = [
        f"{first.case}, T={first.seq}, micro-batches of {first.micro_tokens // first.seq} rows, amp, varlen",
        f"attention, not compiled, one {first.device}, torch {first.environment['torch']};",
        f"{len(first.repeats)} run of each layout in a fresh process, median step.",
        "",
        "| layout | text in the slots | target tokens/s | x | waits for data | peak GiB | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        before = by_name.get(r.since or "")
        figures = "failed | | | |"
        if r.targets_per_s and r.fill and r.data_wait is not None and r.peak_bytes:
            factor = f"{r.targets_per_s / before.targets_per_s:.2f}" if before and before.targets_per_s else ""
            peak = f"{r.peak_bytes / GIB:.1f}"
            figures = f"{r.fill:.1%} | {r.targets_per_s:,.0f} | {factor} | {r.data_wait:.1%} | {peak}"
        rows.append(f"| {r.rung} | {figures} | {r.verdict} |")
    tail = f"x: against the rung it begins from. Records: {_links([LAYOUTS])}."
    return "\n".join([*rows, "", tail, *_red(records)])


def fastest() -> str:
    """The fastest set on one GPU, other systems in turn with it, longer rows, larger shapes, adapters, least memory."""
    ladders = [read_records(ROOT / folder) for folder in FASTEST]
    first = ladders[0][0]
    rows = [
        f"Random tokens (chats: words), a step in one micro-batch, one {first.device},",
        f"torch {first.environment['torch']};",
        "median step of all runs, each in a fresh process; of several, the range of their medians. Rungs of one ladder",
        "ran in turn. x: our tokens/s by theirs.",
        "",
        "| ladder | rung | case | tokens a step | runs | tokens/s | x | peak GiB | predicted tokens/s | and GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for folder, records in zip(FASTEST, ladders, strict=True):
        by_name = {r.rung: r for r in records}
        for r in records:
            ours = by_name.get(r.since or "") if r.peer and not r.red else None
            figures = f"failed: {r.error} | | | |"
            if r.tokens_per_s and r.peak_bytes:
                ratio = f"{ours.tokens_per_s / r.tokens_per_s:.2f}" if ours and ours.tokens_per_s else ""
                speed = f"{r.predicted_tokens_per_s:,.0f}" if r.predicted_tokens_per_s else ""
                size = f"{r.predicted_peak_bytes / GIB:.1f}" if r.predicted_peak_bytes else ""
                figures = f"{r.tokens_per_s:,.0f} | {ratio} | {r.peak_bytes / GIB:.1f} | {speed} | {size}"
            runs = str(len(r.repeats))
            if len(r.repeats) > 1:
                runs += f": {min(r.repeats):,.0f} to {max(r.repeats):,.0f}"
            tokens = "" if r.peer and (r.fill or 1) < 0.9 else f"{r.config['batch']['tokens']:,}"  # so many documents
            rows.append(f"| {_named(folder)} | {r.rung} | {r.case} | {tokens} | {runs} | {figures} |")
    tail = f"The least memory has no global clip: weights are updated in the backward pass. Records: {_links(FASTEST)}."
    unproved = [
        f"*{r.rung}* ({_named(folder)})"
        for folder, records in zip(FASTEST, ladders, strict=True)
        for r in records
        if r.tokens_per_s and not (r.proof or r.peer)
    ]
    tail += f" Without a proof, first on their ladder or after one without: {', '.join(unproved)}."
    red = [line for records in ladders for line in _red(records)]
    return "\n".join([*rows, "", tail, *red, "", *savings(), "", *nearness()])


def savings() -> list[str]:
    """The ladders `memory` and `long-context` of both shapes side by side, with what is predicted today."""
    first, longest = (read_records(ROOT / folders[0])[0] for folders in (SAVING, LONGEST))
    asked = ladder.find_ladder(longest.ladder, Config.model_validate(longest.config)).longest
    assert asked is not None
    rows = [
        "Step by step, the ladder `memory` (one micro-batch a step: of 1B 16 rows of 2048, of 8B one of 4096; medians",
        f"of {len(first.repeats)} interleaved repeats):",
        "",
        "| rung | 1B: tokens/s | peak GiB | predicted | 8B: tokens/s | peak GiB | predicted |",
        "|---|---|---|---|---|---|---|",
        *_side_by_side(SAVING, lambda r: f"{r.tokens_per_s:,.0f}", lambda r: ""),
        "",
        f"The longest row, the ladder `long-context`, which ends at {asked.to:,} tokens (a run a rung):",
        "",
        "| rung | 1B: tokens | peak GiB | predicted | too long | 8B: tokens | peak GiB | predicted | too long |",
        "|---|---|---|---|---|---|---|---|---|",
        *_side_by_side(
            LONGEST,
            lambda r: f"{r.longest_seq:,}",
            lambda r: " | " + ", ".join(f"{t['seq']:,}" for t in r.tries if t["error"]),
        ),
    ]
    return [*rows, "", f"Records: {_links((*SAVING, *LONGEST))}."]


def nearness() -> list[str]:
    """Return how far the fastest sets are from plain transformers in float32: gradients, then five steps."""
    fresh, trained = (
        [json.loads(line) for line in (ROOT / path).read_text().splitlines()] for path in (GRADIENTS, TRAINED)
    )
    told = {r["case"]: (r["trained"]["steps"], *r["trained"]["losses"]) for r in trained}
    left = "; ".join(f"{case}, {n} steps, loss {first:.1f} to {last:.1f}" for case, (n, first, last) in told.items())
    by_heart = read_records(ROOT / PROOFS[-1])[0].losses[-1]
    rows = [
        "How far a rung's first gradient lies from that of plain transformers in float32, on the same documents from",
        "the same random weights of the 1B shape: all values compared, then the tensor that is farthest, then its",
        "length against float32's.",
        "",
        *_angles(fresh),
        "",
        "The same on the package's own pages, a page a row, at weights that so many steps of training in bf16 have",
        f"left (`text8b.yaml`): {left}.",
        "",
        *_angles(trained, "case"),
        "",
        "Five steps on one window from random weights, against *plain float32* of the same run, by the largest",
        f"relative distance. 8B learns its one row by heart, to {by_heart:.2f} in float32: so of small losses.",
        "",
        "| of | rung | losses | gradient norms | 1 - cosine of the first gradients | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    pairs = [(plain, x) for plain, *others in (read_records(ROOT / folder) for folder in PROOFS) for x in others]
    for plain, x in pairs:
        if not (x.proof and x.tokens_per_s):
            rows.append(f"| {x.case} | {x.rung} | failed: {x.error} | | | |")
            continue
        apart = [
            max(math.inf if a is None or b is None else abs(a - b) / b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((x.losses, plain.losses), (x.grad_norms, plain.grad_norms))
        ]
        angle = "" if x.proof["cosine"] is None else f"{1 - x.proof['cosine']:.1e}"
        rows.append(f"| {x.case} | {x.rung} | {apart[0]:.1e} | {apart[1]:.1e} | {angle} | {x.tokens_per_s:,.0f} |")
    gradients = ", ".join(f"[{path.name}](../{path})" for path in (GRADIENTS, TRAINED))
    return [*rows, "", f"Records: {gradients}, {_links(PROOFS)}."]


def _angles(told: list[dict[str, Any]], by: Literal["ladder", "case"] = "ladder") -> Iterator[str]:
    """A row a rung."""
    yield f"| {'of' if by == 'case' else by} | rung | 1 - cosine | of the farthest tensor | length |"
    yield "|---|---|---|---|---|"
    for r in told:
        figures = f"failed: {r.get('error', '').removeprefix('ValueError: ').split(':')[0]} | | |"
        if "cosine" in r:
            farthest, apart = r["tensors"]["lowest"]
            name = f"{1 - apart:.1e} ({farthest.removeprefix('model.').removesuffix('.weight')})" if apart < 1 else "0"
            figures = f"{1 - r['cosine']:.1e}".replace("0.0e+00", "0") + f" | {name} | {r['length']:.4f} |"
        yield f"| {r[by]} | {r['rung']} | {figures}"


def _side_by_side(
    folders: Sequence[Path], before: Callable[[Record], str], after: Callable[[Record], str]
) -> Iterator[str]:
    """A row a rung, of each folder its peak, measured and predicted today, between two more figures."""
    found = [read_records(ROOT / folder) for folder in folders]
    for pair in zip(*(zip(records, _said(records)) for records in found), strict=True):
        figures = (f"{before(r)} | {_gib(r.peak_bytes)} | {_gib(p.peak_bytes)}{after(r)}" for r, p in pair)
        yield f"| {pair[0][0].rung} | {' | '.join(figures)} |"


def _named(folder: Path) -> str:
    return folder.name.removeprefix("h200-")


def _links(folders: Sequence[Path]) -> str:
    """To the records, seen from a page in docs."""
    return ", ".join(f"[{folder.name}](../{folder}/records.jsonl)" for folder in folders)


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def accuracy() -> str:
    """Today's plan, by the datasheet and by what `optrush calibrate` measured, against each of our rungs on one GPU."""
    rows = [
        "| ladder | rung | predicted GiB | measured | error | tokens/s | datasheet | error | calibrated | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    records = [
        (folder, r)
        for folder in (LADDER, *FASTEST, *SAVING, *LONGEST, LEVERS, *CHOICES, *PROOFS)
        for r in read_records(ROOT / folder)
        if not r.peer and r.mode == "cumulative" and r.peak_bytes and r.tokens_per_s and "path" not in r.config["data"]
    ]
    apart, waiting, runs = list[list[float]](), list[float](), [r for _, r in records]
    folders = list(dict.fromkeys(folder for folder, _ in records))  # a folder's records follow each other
    calibrated = [p for at in folders for p in _said([r for folder, r in records if folder == at], _calibration(at))]
    for (folder, r), sheet, own in zip(records, _said(runs), calibrated, strict=True):
        assert r.peak_bytes and r.tokens_per_s and sheet.tokens_per_s and own.tokens_per_s
        speeds = (sheet.tokens_per_s, own.tokens_per_s)
        apart.append([sheet.peak_bytes / r.peak_bytes - 1])
        told = " | | | |"  # first steps, much of whose time is compiling
        if folder not in LONGEST:
            errors = [said / r.tokens_per_s - 1 for said in speeds]
            if waits_for_host(sheet):
                waiting += errors
            else:
                apart[-1] += errors
            told = f"{r.tokens_per_s:,.0f} | "
            told += " | ".join(f"{said:,.0f} | {error:+.1%}" for said, error in zip(speeds, errors)) + " |"
        peaks = f"{sheet.peak_bytes / GIB:.1f} | {r.peak_bytes / GIB:.1f} | {apart[-1][0]:+.1%}"
        rows.append(f"| {_named(folder)} | {r.rung} | {peaks} | {told}")
    said_of = (
        f"median {statistics.median(x):.1%}, largest {max(x):.1%}"
        for x in ([abs(each[i]) for each in apart if i < len(each)] for i in range(3))
    )
    tail = "Errors of peaks: {}; of speeds by the datasheet: {}; of speeds after `calibrate`: {}.".format(*said_of)
    tail += f" Where the device waits for the host, speeds are up to {max(map(abs, waiting)):.0%} off: hosts differ."
    return "\n".join([*rows, "", tail])


def waits_for_host(p: Prediction) -> bool:
    """Return whether the host starts a step's work more slowly than the device does it, by the plan."""
    return sum(w.seconds for w in p.work if w.where == "host") > sum(w.seconds for w in p.work if w.where == "device")


def _repeats(runs: Sequence[Sequence[float]]) -> str:
    least, most = (of(len(each) for each in runs) for of in (min, max))
    return f"{least} to {most} repeats" if least < most else f"{most} repeats"


def _calibration(folder: Path) -> Path:
    """That of the climb's own machine, or of another day's."""
    own = ROOT / folder / "calibration.json"
    return own if own.exists() else ROOT / CALIBRATION


def parted() -> str:
    """Of each rung that was profiled: what its parts took, and what share of their ceilings they reached."""
    rows = []
    for folder in PARTED:
        records = [json.loads(line) for line in (ROOT / folder / "records.jsonl").read_text().splitlines()]
        first, climbed = records[0], [r for r in records if r["mode"] == "cumulative"]
        device = first["environment"]["cpu"] if first["device"] == "cpu" else first["device"]
        rates = "measured by `optrush calibrate`" if first["basis"] == "calibrated" else "of the datasheet"
        rows += [
            f"{first['case']}, {device}, torch {first['environment']['torch']},",
            f"{_repeats([r['repeats'] for r in climbed])}; ceilings {rates}.",
            "In milliseconds of a step, in brackets percent of the part's ceiling:",
            "",
            f"| rung | step | profiled | {' | '.join((*PARTS, bench.GAPS))} |",
            "|---" * (4 + len(PARTS)) + "|",
        ]
        for r in bench.roofs(climbed):
            assert r.took, f"{r.name} was not profiled"
            shares = ((took, r.part_reached(part)) for part, took in r.took.items())
            told = (f"{1e3 * took:,.1f}" + (f" ({share:.0f})" if share else "") for took, share in shares)
            rows.append(f"| {r.name} | {1e3 * r.step_s:,.1f} | {1e3 * r.profiled_s:,.1f} | {' | '.join(told)} |")
        rows += ["", f"Record: {_links([folder])}.", ""]
    return "\n".join(rows[:-1])


def _said(records: list[Record], calibration: Path | None = None) -> list[Prediction]:
    """Return the plan of each rung, with this calibration and no other."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, OPTRUSH_CACHE=cache):
        if calibration is not None:
            (Path(cache) / "calibrations").mkdir()
            shutil.copy(calibration, Path(cache) / "calibrations")
        return [_predicted(r) for r in records]


def _predicted(r: Record) -> Prediction:
    """Return the plan for the version of torch that the record has."""
    with mock.patch.object(attention, "library", {"torch": r.environment["torch"]}.get):
        return predict(Config.model_validate(gains.renamed(r).config), "h200")


def plain_loops() -> dict[str, tuple[float, float]]:
    """(tokens/s, peak GiB) of each rung of the plain loop: medians over its runs."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in (ROOT / PLAIN).read_text().splitlines():
        loop = json.loads(line)
        if "error" not in loop:
            found[loop["rung"]].append(loop)
    return {
        name: (statistics.median(x["tok_s"] for x in runs), statistics.median(x["peak_gib"] for x in runs))
        for name, runs in found.items()
    }


def _row(r: Record, by_name: dict[str, Record], plain: dict[str, tuple[float, float]]) -> str:
    before = by_name.get(r.since or "")
    factor = f"{r.tokens_per_s / before.tokens_per_s:.2f}" if before and before.tokens_per_s and r.tokens_per_s else ""
    beside = plain.get(SAME.get(r.rung, ""))
    figures = "failed | | | | |"
    if r.tokens_per_s and r.peak_bytes and r.predicted_peak_bytes and r.mfu:
        peaks = f"{r.peak_bytes / GIB:.1f} | {r.predicted_peak_bytes / GIB:.1f}"
        figures = f"{r.tokens_per_s:,.0f} | {len(r.repeats)} | {factor} | {peaks} | {r.mfu:.1%}"
    other = f"{beside[0]:,.0f} | {beside[1]:.1f}" if beside else "|"
    return f"| {r.rung} | {figures} | {other} | {r.verdict} |"


def _red(records: list[Record]) -> list[str]:
    """Why rungs are red, each reason once."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for r in records:
        for reason in r.red:
            reasons[" ".join(reason.split())].append(f"*{r.rung}*")
    return [line for reason, names in reasons.items() for line in ("", f"Red, {' and '.join(names)}: {reason}.")]


@cache
def gained() -> dict[str, str]:
    """Of each technique, on its page."""
    return gains.pages(ROOT / "benchmarks/results", [c.name for c in ALL], "../../benchmarks/results")


def learnt() -> str:
    """Loss curves in bf16 with and without float8, over seeds."""
    *runs, said = [json.loads(line) for line in (ROOT / CURVES).read_text().splitlines()]
    curves = [[*r["losses"], r["held_out"]] for r in runs]
    without, beside = ([c for c, r in zip(curves, runs) if bool(r["with"]) is there] for there in (False, True))
    tenth = said["steps"] // (len(without[0]) - 1)
    rows = [
        f"{said['steps']} steps of the 1B shape from random weights on recipes (`float8-curve.yaml`): mean loss over",
        f"{len(without)} seeds; by how much a seed is higher with float8, in the mean, and the standard error of that;",
        "and the standard deviation over seeds, without it what another start changes, and with it.",
        "",
        "| steps | bf16 | with float8 | higher by | seeds scatter by | with float8 by |",
        "|---|---|---|---|---|---|",
    ]
    for k in range(len(without[0])):
        plain, given = ([curve[k] for curve in each] for each in (without, beside))
        name = "held-out" if k == len(without[0]) - 1 else f"{k * tenth + 1} to {(k + 1) * tenth}"
        apart = [b - a for a, b in zip(plain, given, strict=True)]
        higher = f"{statistics.mean(apart):+.4f} ± {statistics.stdev(apart) / len(apart) ** 0.5:.4f}"
        means, scatter = ((f"{of(plain):.4f} | {of(given):.4f}") for of in (statistics.mean, statistics.stdev))
        rows.append(f"| {name} | {means} | {higher} | {scatter} |")
    return "\n".join([*rows, "", f"Record: [{CURVES.stem}](../../{CURVES})."])


def survived() -> str:
    """Return the table of the faults that `make faults` tried."""
    rows = ["| | what happens | held | figures |", "|---|---|---|---|"]
    what = runpy.run_path(str(ROOT / "benchmarks/faults/run.py"))["TRIED"]
    for one in map(json.loads, (ROOT / FAULTS).read_text().splitlines()):
        rows.append(f"| {one['fault']} | {what[one['fault']][0]} | {one['pass']} of {one['n']} | {one['figure']} |")
    return "\n".join([*rows, "", f"Record: [{FAULTS.stem}](../{FAULTS})."])


def raced() -> str:
    """Return the tables of the race of learning rates beside a grid, a row a seed."""
    parts = []
    for name, what in RATES.items():
        path = Path(f"benchmarks/results/{name}.jsonl")
        *runs, said = map(json.loads, (ROOT / path).read_text().splitlines())
        rows = [
            f"{what}; eight rates, {said['steps']} steps ([{name}](../{path})):", "",
            "| seed | the grid's best rate | held-out loss | the race's rate | trained to the end | worse by | steps |",
            "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for r in runs:
            losses = {rate: loss for rate, loss in r["grid"] if loss is not None}
            best = min(losses, key=lambda rate: losses[rate])
            figures = f"{best:g} | {losses[best]:.3f} | {r['picked']:g} | {losses[r['picked']]:.3f} | {r['within']:.1%}"
            rows.append(f"| {r['seed']} | {figures} | {r['cost']:.0%} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "README.md": first_page,
    "docs/benchmarks.md": table,
    "docs/data.md": layouts,
    "docs/ladder.md": fastest,
    "docs/plan.md": accuracy,
    "docs/calibrate.md": parted,
    "docs/reliability.md": survived,
    "docs/tune.md": raced,
    **{f"docs/techniques/{c.name}.md": partial(lambda name: gained()[name], c.name) for c in ALL},
    "docs/techniques/fp8.md": lambda: f"{gained()['fp8']}\n\n{learnt()}",
    **guide.PAGES,
}


MEASURED = re.compile(r"^(\| \*\*measured\*\* \| ).*$", re.MULTILINE)  # of the card of a technique's page


@cache
def best() -> dict[str, str]:
    return gains.cards(ROOT / "benchmarks/results", [c.name for c in ALL])


def written(name: str) -> str:
    """A page with the figures of the records between its markers."""
    before, rest = (ROOT / name).read_text().split(BEGIN)
    if MEASURED.search(before):
        before = MEASURED.sub(lambda line: f"{line[1]}{best()[Path(name).stem]} |", before)
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(written(name))
    bench.write_bench(ROOT / LADDER)
