"""Tables of the guide (docs/guide) from committed records; table.py writes them between the pages' markers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cells

from optrush.benchmark.record import Record, read_quality, read_records

RESULTS = Path(__file__).parent / "results"
LINK = "../../benchmarks/results"
GIB = 2**30
# Speed and memory of each rung against the one before it, as the ladder's author measured them on one A100.
SEED = {
    "mixed precision": "3.5",
    "fused AdamW": "1.10",
    "flash attention": "1.75, 30 % less memory",
    "compile": "1.20, 10 % less memory",
    "batch 4": "grows with the batch",
    "batch 8": "grows with the batch",
    "batch 16": "grows with the batch",
    "recompute, T=4096": "40 % less speed, and 4096 fits",
}


@cache
def records(folder: str) -> tuple[Record, ...]:
    return tuple(read_records(RESULTS / folder))


def rung(folder: str, name: str) -> Record:
    """Return the record of a rung with figures."""
    found = next(r for r in records(folder) if r.rung == name and r.mode == "cumulative")
    assert found.tokens_per_s and found.peak_bytes, f"{folder}: {name} has no figures"
    return found


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / path).read_text("utf-8").splitlines()]


def gib(size: float | None) -> str:
    return f"{(size or 0) / GIB:.1f}"


def device(r: Record) -> str:
    return "two CPU cores" if r.device == "cpu" else r.device.removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def sources(*paths: str) -> str:
    """Return links to records; a folder's are in records.jsonl."""
    found = (f"[{p}]({LINK}/{p}{'' if p.endswith('.jsonl') else '/records.jsonl'})" for p in dict.fromkeys(paths))
    return f"Records: {', '.join(found)}."


def steps(*rungs: tuple[str, str]) -> str:
    """Return a row for each (folder, rung), compared with the rung that its ladder compares it with."""
    rows = [
        "| load, device | rung | compared with | tokens/s | x | peak GiB | more GiB | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for folder, name in rungs:
        r = rung(folder, name)
        since, factor, saved = "", "", ""
        if r.since:
            before = rung(folder, r.since)
            since = before.rung
            factor = f"{(r.tokens_per_s or 0) / (before.tokens_per_s or 1):.2f}"
            saved = f"{((r.peak_bytes or 0) - (before.peak_bytes or 0)) / GIB:+.1f}"
        case = r.case.removesuffix(", random tokens").removeprefix("llama-3.1-").removeprefix("llama-3.2-")
        load = f"{case.partition('-')[0].partition(',')[0].upper()}, T={r.seq:,}, {device(r)}"
        figures = f"{r.tokens_per_s:,.0f} | {factor} | {gib(r.peak_bytes)} | {saved}"
        rows.append(f"| {load} | {name} | {since} | {figures} | {r.verdict} |")
    return "\n".join([*rows, "", sources(*(folder for folder, _ in rungs))])


QUALITY = "h200-quality"


def learnt(*rungs: str) -> str:
    """Return what the rungs learnt of the ladder `quality`, all of them if none is named; `first` has no difference."""
    found = [r for r in read_quality(RESULTS / QUALITY) if r.loss is not None and (not rungs or r.rung in rungs)]
    assert len(found) == len(rungs) or not rungs, f"{QUALITY}: not all of {rungs} have figures"
    text = [
        "| rung | held-out loss | compared with | difference | verdict | updates | tokens/s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        apart = "" if r.difference is None else f"{r.difference:+.4f} ± {r.margin:.4f}"
        figures = f"{r.evals[0][-1][0]:,} | {r.tokens_per_s or 0:,.0f} | {gib(r.peak_bytes)}"
        text.append(f"| {r.rung} | {r.loss:.4f} | {r.since or ''} | {apart} | {r.verdict} | {figures} |")
    first = found[0]
    tail = (
        f"SmolLM2-135M-Instruct, {first.config['train']['epochs']:g} epochs of GSM8K, {len(first.seeds)} seeds, one "
        f"{first.device.removeprefix('NVIDIA ')}; before training {first.evals[0][0][1]:.2f}. "
        "How the margin is found: [quality](../ladder.md#quality)."
    )
    return "\n".join(["What it costs in quality:", "", *text, "", tail, "", sources(QUALITY)])


def model() -> str:
    """What sizes and methods cost on one card: measured speeds as hours a billion tokens."""
    chosen = (
        ("1B, all weights", "h200-peers", "ours, bf16"), ("1B, LoRA", "h200-adapters", "ours, LoRA"),
        ("3B, all weights, in 24 GiB", "h200-small-card", "two rows"), ("8B, all weights", "h200-eight", "four rows"),
        ("8B, LoRA", "h200-adapters8", "ours, LoRA"), ("8B, QLoRA", "h200-adapters8", "ours, QLoRA"),
        ("8B, QLoRA, one row of 2048", "h200-qlora", "8B, one row"),
        ("70B, QLoRA", "h200-qlora", "70B, four rows, every other block kept on the host"),
    )  # fmt: skip
    rows = ["| model and method, one H200 | tokens/s | hours a billion tokens | peak GiB |", "|---|---|---|---|"]
    for title, folder, name in chosen:
        r = rung(folder, name)
        rows.append(
            f"| {title} | {r.tokens_per_s:,.0f} | {1e9 / (r.tokens_per_s or 1) / 3600:,.1f} | {gib(r.peak_bytes)} |"
        )
    return "\n".join([*rows, "", sources(*(folder for _, folder, _ in chosen))])


def memory() -> str:
    """Peaks as they were predicted on the day and measured."""
    rows = ["| load | rung | predicted GiB | measured GiB | off by |", "|---|---|---|---|---|"]
    folders = ("h200-memory", "h200-memory8")
    for r in (rung("h200-single-gpu", "float32, eager"), *(r for folder in folders for r in records(folder))):
        assert r.peak_bytes and r.predicted_peak_bytes
        off = r.predicted_peak_bytes / r.peak_bytes - 1
        rows.append(f"| {r.case} | {r.rung} | {gib(r.predicted_peak_bytes)} | {gib(r.peak_bytes)} | {off:+.1%} |")
    return "\n".join([*rows, "", sources("h200-single-gpu", *folders)])


def cleaning() -> str:
    """What the filters found of the faults that were planted in a million recipes."""
    (r,) = lines("cleaning.jsonl")
    names = {
        "short": "too short", "long": "too long", "few": "too few ingredients", "many": "too many ingredients",
        "rare": "an ingredient that hardly any other row has", "exact": "an exact duplicate",
        "near": "a near duplicate",
    }  # fmt: skip
    rows = ["| fault | rows planted | found |", "|---|---|---|"]
    rows += [f"| {title} | {r['planted'][key]:,} | {r['found'][key]:.2%} |" for key, title in names.items()]
    tail = (
        f"Of {r['good_rows']:,} good rows {r['good_rows_taken']:.2%} were taken; {r['rows']:,} rows took "
        f"{r['clean_s']:.0f} s on {r['cores']} cores and {r['peak_bytes'] / GIB:.2f} GiB."
    )
    return "\n".join([*rows, "", tail, "", sources("cleaning.jsonl")])


def rows_of_documents() -> str:
    """How full rows are, and what that was worth."""
    text = ["| layout | text in the rows | learnt tokens/s | x of padding to T |", "|---|---|---|---|"]
    data = records("h200-data")
    first = data[0].targets_per_s or 1
    for r in data:
        if r.targets_per_s and r.fill:
            text.append(f"| {r.rung} | {r.fill:.1%} | {r.targets_per_s:,.0f} | {r.targets_per_s / first:.2f} |")
    ours, other = rung("h200-chat-lengths", "ours, packed"), rung("h200-chat-lengths", "Trainer, padded")
    ratio = (ours.targets_per_s or 0) / (other.targets_per_s or 1)
    tail = (
        "Texts with the lengths of chats (log-normal), packed, against Hugging Face Trainer with rows padded to the "
        f"longest of eight: {ours.targets_per_s:,.0f} against {other.targets_per_s:,.0f} learnt tokens a second, "
        f"{ratio:.1f} times."
    )
    rows = "\n".join([*text, "", tail, "", sources("h200-data", "h200-chat-lengths")])
    return rows + "\n\n" + learnt("amp", "wrap", "pad", "sort")


def precision() -> str:
    """Speeds and memory, then how far gradients are from float32's."""
    text = [
        steps(("h200-single-gpu", "mixed precision"), ("h200-single-gpu", "pure bf16"), ("h200-eight", "float8")),
        "", "Distance of the first gradient from float32's, all values compared:", "",
        "| rung | 1 - cosine |", "|---|---|",
    ]  # fmt: skip
    for r in lines("h200-gradients.jsonl"):
        if r["ladder"] == "precisions" and r["rung"] in ("transformers, mixed precision", "bf16", "float8"):
            text.append(f"| {r['rung']} | {1 - r['cosine']:.1e} |")
    rungs = (
        "float32", "amp", "bf16, stochastic rounding", "bf16, rounding to the nearest", "bf16, kahan", "fp8",
        "quantised activations",
    )  # fmt: skip
    return "\n".join([*text, "", sources("h200-gradients.jsonl"), "", learnt(*rungs)])


def optimizers() -> str:
    """Speed and memory, then the held-out loss of Muon beside AdamW."""
    text = steps(
        ("h200-single-gpu", "fused AdamW"), ("h200-memory8", "8-bit Adam"), ("h200-memory8", "update in backward"),
        ("h100-doubt-optimizers", "8 bits"), ("h100-doubt-optimizers", "4 bits"),
    )  # fmt: skip
    curves = [r for r in lines("h100-muon-curve.jsonl") if "lr" in r]
    found = ["| learning rate | AdamW: held-out loss | Muon | seeds |", "|---|---|---|---|"]
    for lr in sorted({r["lr"] for r in curves}):
        held = [
            [r["held_out"] for r in curves if r["lr"] == lr and r["with"] == name and r["held_out"]]
            for name in (None, "muon")
        ]
        if all(held):
            means = " | ".join(f"{statistics.mean(x):.3f}" for x in held)
            found.append(f"| {lr:g} | {means} | {min(map(len, held))} |")
    return "\n".join(
        [
            text, "", "Muon from random weights, few steps:", "", *found, "", sources("h100-muon-curve.jsonl"), "",
            learnt("amp", "8-bit moments", "4-bit moments", "muon", "update in backward", "NEFTune"),
        ]
    )  # fmt: skip


def loader() -> str:
    """Batches made between steps or by workers, and the rate of tokenising."""
    text = [steps(("h200-loader", "two workers")), "", "| text | tokens/s tokenised | cores |", "|---|---|---|"]
    text += [
        f"| {r['kind']} | {r['tokens_per_s']['ours']:,.0f} | {r['cores']} |"
        for r in lines("tokenising.jsonl")
        if "tokens_per_s" in r
    ]
    return "\n".join([*text, "", sources("tokenising.jsonl")])


BASES = (("1b ddp", "1b, 1"), ("8b", "8b, 1, T=4096"))  # what a cell's speed is compared with, by how its name begins


def scaling() -> list[tuple[str, int, float, float | None, float]]:
    """Return each cell's name, GPUs, tokens/s, those against as many times one GPU, and planned tokens/s.

    Cells that have no run on one GPU with the same micro-batch have no ratio; a pipeline's are smaller.
    """
    runs = [*lines("2xh200-cells.jsonl"), *lines("4xh200-cells.jsonl")]
    speeds = {r["cell"]: r["tokens_per_s"] for r in runs}
    batches = {r["cell"]: r["config"]["batch"] for r in runs}
    found = []
    for r in sorted(runs, key=lambda r: (r["config"]["model"]["shape"], r["ranks"])):
        name, with_, base = r["cell"], r["config"]["with"], None
        for start, one in BASES if "lora" not in with_ else ():
            same = ["seq"] if "pipeline" in with_ else ["seq", "micro_tokens"]
            if name.startswith(start) and all(batches[one][key] == batches[name][key] for key in same):
                base = one
        ratio = speeds[name] / speeds[base] / r["ranks"] if base else None
        found.append((name, r["ranks"], r["tokens_per_s"], ratio, r["predicted_tokens_per_s"]))
    return found


def gpus() -> str:
    """Two and four cards of one host."""
    text = [
        "| model | techniques that matter here | tokens a step | tokens/s | peak GiB a card |",
        "|---|---|---|---|---|",
    ]
    for r in lines("2xh100-links.jsonl"):
        if "gather" in r["with"].get("fsdp", {}):  # an option of that time, which gained 1 %
            continue
        names = [n for n in ("amp", "lora", "nf4", "recompute", "selective-recompute", "ddp", "fsdp") if n in r["with"]]
        options = [f"{k}={v}" for k, v in r["with"].get("fsdp", {}).items()]
        text.append(
            f"| {r['shape']} | {' '.join(names + options)}, micro-batches of {r['micro_tokens'] // r['seq']} rows "
            f"| {r['tokens']:,} | {r['tokens_per_s']:,} | {r['peak_gib']:.1f} |"
        )
    text += ["", "Two H100 of one host, NVLink.", "", sources("2xh100-links.jsonl"), ""]
    text += [
        "Two and four H200 of one host; the ratio is to as many times the speed of one with the same "
        "micro-batch, half of it in a pipeline:",
        "",
        "| cell | GPUs | tokens/s | a GPU | ratio |", "|---|---|---|---|---|",
    ]  # fmt: skip
    text += [
        f"| {name} | {ranks} | {speed:,.0f} | {speed / ranks:,.0f} | {f'{ratio:.3f}' if ratio else ''} |"
        for name, ranks, speed, ratio, _ in scaling()
    ]
    text += [
        "",
        "Beside other systems, in turn on two H200: `bench llama8b.yaml --ladder gpus-peers.yaml` in `benchmarks`,",
        "8B in mixed precision under FSDP, two rows of 4,096 tokens a GPU; torchtitan 0.2.2 and Hugging Face Trainer:",
        "",
        "| system | tokens/s | a GPU | ours / it | peak GiB a card |",
        "|---|---|---|---|---|",
    ]
    ours, *others = lines("2xh200-peers.jsonl")
    for r in (ours, *others):
        speed, name = r["tokens_per_s"], r["changes"] if r["peer"] else "ours"
        text.append(
            f"| {name} | {speed:,.0f} | {speed / r['ranks']:,.0f} | {ours['tokens_per_s'] / speed:.2f} "
            f"| {gib(r['peak_bytes'])} |"
        )
    text += ["", sources("2xh200-peers.jsonl")]
    for title, path in (("Two", "2xh200-cells.jsonl"), ("Four", "4xh200-cells.jsonl")):
        text += [
            "",
            f"{title} H200, with what the plan said before:",
            "",
            cells.table(RESULTS / path),
            "",
            sources(path),
        ]
    return "\n".join(text)


def long_rows() -> str:
    """The longest row at each step of saving memory."""
    text = [
        "| rung | 1B: longest row | peak GiB | 8B: longest row | peak GiB |",
        "|---|---|---|---|---|",
    ]
    for a, b in zip(records("h200-long-context"), records("h200-long-context8"), strict=True):
        text.append(f"| {a.rung} | {a.longest_seq:,} | {gib(a.peak_bytes)} | {b.longest_seq:,} | {gib(b.peak_bytes)} |")
    most = rung("h200-longest8", "all weights")
    tail = f"The longest in one step, 8B with all weights: {most.longest_seq:,} tokens in {gib(most.peak_bytes)} GiB."
    return "\n".join([*text, "", tail, "", sources("h200-long-context", "h200-long-context8", "h200-longest8")])


def measuring() -> str:
    """Repeats of a rung, and which differences are larger than their spread."""
    text = ["| rung | repeats, tokens/s | spread | median | x | verdict |", "|---|---|---|---|---|---|"]
    for r in records("cpu-demo"):
        if r.mode != "cumulative" or not r.tokens_per_s:
            continue
        before = rung("cpu-demo", r.since).tokens_per_s if r.since else None
        factor = f"{r.tokens_per_s / before:.2f}" if before else ""
        spread = (max(r.repeats) - min(r.repeats)) / r.tokens_per_s
        runs = ", ".join(f"{x:,.0f}" for x in r.repeats)
        text.append(f"| {r.rung} | {runs} | {spread:.0%} | {r.tokens_per_s:,.0f} | {factor} | {r.verdict} |")
    return "\n".join([*text, "", sources("cpu-demo")])


def ladder() -> str:
    """The rungs of the ladder that this began with, beside its author's figures."""
    text = [
        "| rung | its author, A100: x | here, H200: x | tokens/s | peak GiB | MFU |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("float32, eager", *SEED):
        r = rung("h200-single-gpu", name)
        factor = ""
        if r.since:
            before = rung("h200-single-gpu", r.since)
            factor = f"{(r.tokens_per_s or 0) / (before.tokens_per_s or 1):.2f}"
        figures = f"{r.tokens_per_s:,.0f} | {gib(r.peak_bytes)} | {r.mfu:.1%}"
        text.append(f"| {name} | {SEED.get(name, '')} | {factor} | {figures} |")
    first, last = (rung("h200-single-gpu", name).tokens_per_s or 1 for name in ("float32, eager", "fused rotation"))
    tail = (
        f"The ladder goes on to {last:,.0f} tokens/s, {last / first:.1f} times the first rung: "
        "[every rung](../benchmarks.md)."
    )
    (trl,) = lines("h200-quality-trl.jsonl")
    other = (
        f"The same rows by {trl['system']}, {trl['steps']} updates: {trl['evals'][-1]:.4f}. It counts one token more a "
        f"row, the end of a line that is easy to guess: {trl['evals'][-1] / trl['count']:.4f} of ours. "
        f"{sources('h200-quality-trl.jsonl')}"
    )
    return "\n".join([*text, "", tail, "", sources("h200-single-gpu"), "", learnt(), "", other])


def rewards() -> str:
    """What answers learnt by rewards, and how fast they were sampled."""
    text = ["| after | held-out answers that are right | a step | of it sampling |", "|---|---|---|---|"]
    steps = lines("h200-grpo.jsonl")
    found = [r for r in steps if (r["call"], r["run"]) == (1, "compiled")]
    ours, theirs = ([r for r in steps if (r["call"], r["run"]) == (2, run)][-1] for run in ("plain", "TRL"))
    for r in found[:: max(1, len(found) // 5)] + found[-1:]:
        parts = f"{r['step_s']:.2f} s | {r['rollout_s']:.2f} s" if r["step"] else " | "
        text.append(f"| {r['step']} steps, {r['seconds_of_steps']:.0f} s | {r['held_out_right']:.1%} | {parts} |")
    first = found[0]
    tail = (
        f"{first['model']}, {first['rows']} ({first['prompts']} prompts x {first['group']} answers of at most "
        f"{first['max_new']} tokens a step), one {first['gpu'].removeprefix('NVIDIA ')}. On the same host at the same "
        f"time, {theirs['with']}: {theirs['step']} steps in {theirs['seconds_of_steps']:.0f} s, "
        f"{theirs['held_out_right']:.1%} "
        f"right; here without `compile` {ours['step']} steps in {ours['seconds_of_steps']:.0f} s, "
        f"{ours['held_out_right']:.1%}: a step takes {theirs['step_s'] * ours['step'] / ours['seconds_of_steps']:.0f} "
        "times as long there."
    )
    speeds = [
        "| sampling, random weights in bf16 | answers x tokens | tokens/s | of the memory's rate |",
        "|---|---|---|---|",
    ]
    for r in lines("h200-sampling.jsonl"):
        share = r["tokens_per_s"] / r["ceiling_tokens_per_s"]
        kind = f"{r['shape']}{', compiled' if r['compiled'] else ''}"
        speeds.append(f"| {kind} | {r['slots']} x {r['tokens']:,} | {r['tokens_per_s']:,.0f} | {share:.2f} |")
    why = (
        "The memory's rate: every weight, and every sequence's keys and values, read once a token as fast as a copy "
        "on the same device."
    )
    answers = lines("h200-generate.jsonl")
    of = answers[0]
    rates = [
        f"| {of['prompts']:,} prompts, at most {of['max_new']} tokens each | at a time | seconds | tokens/s |",
        "|---|---|---|---|",
    ]
    for r in answers:
        kind = "transformers, padded `generate`" if r["who"] == "transformers" else "optrush"
        kind += ", compiled" if r.get("compiled") else ""
        rates.append(f"| {kind} | {r.get('slots') or r['batch']} | {r['s']:.1f} | {r['tokens_per_s']:,} |")
    origin = (
        f"{of['model']}, {of['rows']}, sampled at temperature {of['temperature']:g}; what is recorded and compiled "
        "once is left out."
    )
    records = sources("h200-grpo.jsonl", "h200-sampling.jsonl", "h200-generate.jsonl")
    return "\n".join([*text, "", tail, "", *speeds, "", why, "", *rates, "", origin, "", records])


def pictures() -> str:
    """What rows with images take, beside rows of text and transformers' padded batches."""
    names = {
        "text": "rows of text, as many tokens", "image": "rows with images", "chosen": "the same, without `compile`",
        "peer": "transformers, PEFT, Liger, padded", "peer-recompute": "the same, recomputed",
    }  # fmt: skip
    found = [r for r in lines("h200-images.jsonl") if r["case"] in names]
    text = ["| Qwen3-VL 8B, LoRA | rows at once | tokens/s | s a step | peak GiB |", "|---|---|---|---|---|"]
    for r in sorted(found, key=lambda r: -r["tokens_per_s"]):
        rows = f"{r['rows']} padded" if "rows" in r else "packed"
        speed = f"{r['tokens_per_s']:,} | {r['step_s']:.2f} | {r['peak_gib']}"
        text.append(f"| {names[r['case']]} | {rows} | {speed} |")
    of = next(r for r in found if r["case"] == "image")
    tower = next(r for r in lines("h200-images.jsonl") if r["case"] == "tower")
    tail = (
        f"Random weights in bf16, rows of {of['seq']:,} tokens: {tower['images']} pictures of 448 to 1,024 pixels a "
        f"side with 200 tokens of text each, {tower['patches']:,} patches; one {of['machine'].removeprefix('NVIDIA ')} "
        f"a line. Not compiled, the tower takes {tower['tower_s']:.2f} s; with `compile` its blocks are compiled, "
        f"too. The wait for data is {of['data_wait']:.1%} of the step. Padded tokens do not count."
    )
    return "\n".join([*text, "", tail, "", sources("h200-images.jsonl")])


def pages(of: Sequence[tuple[str, Callable[[], str]]]) -> dict[str, Callable[[], str]]:
    return {f"docs/guide/{name}.md": make for name, make in of}


PAGES = pages((
    ("01-model", model),
    ("02-memory", memory),
    ("03-data", cleaning),
    ("04-rows", rows_of_documents),
    ("05-precision", precision),
    ("06-adapters", lambda: steps(("h200-adapters", "ours, LoRA"), ("h200-adapters", "Unsloth, LoRA"),
                                  ("h200-adapters8", "ours, LoRA"), ("h200-adapters8", "Unsloth, LoRA"),
                                  ("h200-eight", "four rows"))
     + "\n\n" + learnt("amp", *(r.rung for r in read_quality(RESULTS / QUALITY)
                               if "LoRA" in r.rung and r.rung[:4] not in ("QLoR", "int8")),
                          "DoRA r 32", "PiSSA r 32")),
    ("07-four-bits", lambda: steps(("h200-adapters8-rows", "ours, QLoRA, one row"), ("h200-adapters8", "ours, QLoRA"),
                                   ("h100-doubt-quantized", "4 bits"), ("h100-doubt-quantized", "8 bits"),
                                   ("h200-qlora", "8B, one row"))
     + "\n\n" + learnt("amp", "LoRA r 32", "QLoRA r 32", "int8 and LoRA r 32")),
    ("08-optimizers", optimizers),
    ("09-compile", lambda: steps(("h200-single-gpu", "compile"), ("h200-single-gpu", "max-autotune"),
                                 ("h200-single-gpu", "CUDA graphs"), ("h100-doubt-adapters", "CUDA graphs"))),
    ("10-attention", lambda: steps(("h200-single-gpu", "flash attention"), ("h200-single-gpu", "FlashAttention 4"),
                                   ("h200-choices-kernels", "cuDNN attention"),
                                   ("h200-choices-kernels", "varlen attention"),
                                   ("h200-rows", "T=2048"), ("h200-rows", "T=4096"), ("h200-rows", "T=8192"))),
    ("11-kernels", lambda: steps(("h200-single-gpu", "fused loss"), ("h200-single-gpu", "QuACK loss"),
                                 ("h200-single-gpu", "fused block"),
                                 ("h200-single-gpu", "fused block, in the products"),
                                 ("h200-single-gpu", "fused norm"), ("h200-single-gpu", "fused rotation"),
                                 ("h200-choices-kernels", "Liger loss"))),
    ("12-batch", lambda: steps(("h200-single-gpu", "batch 4"), ("h200-single-gpu", "batch 8"),
                               ("h200-single-gpu", "batch 16"), ("h200-single-gpu", "larger micro-batch"),
                               ("h200-memory", "selective recompute"), ("h200-memory", "recompute"),
                               ("h200-memory8", "recompute"))),
    ("13-loader", loader),
    ("14-gpus", gpus),
    ("15-long-rows", long_rows),
    ("17-measuring", measuring),
    ("18-ladder", ladder),
    ("19-rewards", rewards),
    ("20-images", pictures),
))  # fmt: skip
