"""Measure the plan's answer, a configuration without `with`, against ten sets of techniques made by hand.

usage: answers.py OUT.jsonl [--case CASE] [--repeats 1] [--limit SECONDS]   measures, a JSON line a run, at once
       answers.py --plan [--case CASE] [--hardware NAME]                    only predicts: what would not start is said

The answer runs first and last, between them the sets, fastest by the plan first, a fresh process each; the last line
has the ratio of the answer to the best set. Sets keep the answer's method and precision: `amp` on a GPU, where one may
have its stream in bf16, float32 on a CPU. What runs out of memory or beyond the limit is a record too. With more GPUs
than a case takes, CUDA_VISIBLE_DEVICES chooses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from optrush import hardware
from optrush.benchmark import record
from optrush.benchmark.runner import LATE, run_worker, stop_on_signals
from optrush.config import Config, dump_config, parse_config
from optrush.decide import decide, spelled_out
from optrush.errors import UserError, one_line
from optrush.hardware import GIB, parse_hardware
from optrush.planner.search import predict

ANSWER, BAR = "answer", 0.97
UNTRIED = "not measured"
STEPS, WARMUP = 12, 4  # of a process; the first of them compile and are not timed
LEAST_S = 5.0  # without so many seconds left no process is started
With = dict[str, dict[str, Any]]
Entry = tuple[str, Config, dict[str, Any]]  # name, configuration, plan

TORCH: With = {"amp": {}, "fused-adamw": {}, "attention": {}, "compile": {}}
KERNELS: With = {"fused-kernels": {"norm": True, "rope": True}}
# The words of a set: each adds its techniques to those before it.
WORDS: dict[str, With] = {
    "sdpa": TORCH,
    "fa4": {**TORCH, "attention": {"impl": "fa4"}},
    "varlen": {**TORCH, "attention": {"impl": "varlen"}},
    "quack": {  # what `cells.py` calls fastest, in this precision
        **TORCH, "attention": {"impl": "fa4"}, "fused-kernels": {"mlp": "quack", "norm": True, "rope": True},
        "fused-loss": {"impl": "quack", "chunk": 8192},
    },
    "liger": {"amp": {}, "fused-adamw": {}, "attention": {}, **KERNELS, "fused-loss": {"impl": "liger"}},  # no compiler
    "float32": {"fused-adamw": {}, "attention": {}},
    "plain": {}, "masked": {"fused-adamw": {}, "attention": {"impl": "masked"}},
    "loss": {"fused-loss": {}}, "chunks": {"fused-loss": {"chunk": 256}}, "triton": KERNELS,
    "half": {"amp": {"stream": "half"}}, "compile": {"compile": {}}, "model": {"compile": {"scope": "model"}},
    "recompute": {"recompute": {}}, "second": {"recompute": {"every": 2}}, "selective": {"selective-recompute": {}},
    "ddp": {"ddp": {}}, "fsdp-2": {"fsdp": {"stage": 2}}, "fsdp-3": {"fsdp": {}}, "each": {"fsdp": {"sync": "each"}},
}  # fmt: skip


class Case(NamedTuple):
    """A run, and the sets made by hand for it: words, then rows of a micro-batch."""

    model: str
    seq: int
    rows: int  # of a step, of all ranks
    sets: tuple[str, ...]
    method: str = "full"
    ranks: int = 1


CASES = {
    "cpu": Case("tiny", 128, 8, (
        "plain 8", "float32 2", "masked 8", "float32 loss 8", "float32 loss 4", "float32 loss 1", "float32 chunks 8",
        "float32 chunks 2", "float32 loss recompute 8", "float32 loss compile 8")),
    "1b": Case("llama-3.2-1b", 2048, 8, (
        "sdpa 8", "sdpa loss 8", "varlen loss 4", "fa4 loss 8", "fa4 loss model 8", "fa4 loss triton 8", "quack 8",
        "quack half 8", "quack recompute 8", "liger 8")),
    "8b-lora": Case("llama-3.1-8b", 2048, 8, (
        "sdpa 2", "sdpa loss 4", "fa4 loss 2", "varlen loss 4", "quack 2", "quack 4", "quack half 4", "quack half 8",
        "quack recompute 8", "liger 2"), method="lora"),
    "1b-two": Case("llama-3.2-1b", 2048, 16, (
        "sdpa loss ddp 8", "fa4 loss ddp 8", "fa4 loss triton ddp 8", "quack ddp 8", "quack half ddp 8", "liger ddp 8",
        "sdpa loss fsdp-2 8", "quack fsdp-2 8", "quack fsdp-3 8", "quack recompute fsdp-3 8"), ranks=2),
    "8b-two": Case("llama-3.1-8b", 2048, 8, (
        "sdpa loss recompute fsdp-3 4", "fa4 loss recompute fsdp-3 4", "liger recompute fsdp-3 4", "quack each 1",
        "quack second each 2", "quack selective each 2", "quack selective fsdp-3 4", "quack recompute fsdp-3 4",
        "quack selective fsdp-2 4", "quack recompute fsdp-2 4"), ranks=2),
}  # fmt: skip


def run(case: Case, words: str | None = None) -> Config:
    """Return a case's configuration: as a set has it, or with what the plan answers left out."""
    batch, made = {"seq": case.seq, "tokens": case.rows * case.seq}, {}
    if words is not None:
        *names, rows = words.split()
        batch["micro_tokens"] = int(rows) * case.seq
        made = {"with": {k: v for name in names for k, v in WORDS[name].items()}}
    data = {
        "model": case.model if case.model == "tiny" else {"shape": case.model}, "objective": "pretrain",
        "method": case.method, "data": {"random": max(256, STEPS * case.rows)}, "batch": batch,
        "optim": {"lr": 1e-5, "schedule": "constant", "warmup": 0}, "train": {"steps": STEPS, "log_every": 1},
        "output": "unused", **made,
    }  # fmt: skip
    return parse_config(json.dumps(data), "answers.py")


def planned(config: Config, name: str, ranks: int) -> dict[str, Any]:
    """Return the plan's figures of a configuration, or why it would not start."""
    try:
        plan = predict(config, name, ranks)
    except UserError as error:
        return {"refused": f"{error.asked}: {error.found}"}
    speed, peak = plan.tokens_per_s, plan.peak_bytes
    return {"planned_tokens_per_s": speed, "planned_peak_bytes": peak, "planned_fits": plan.fits}


def entries(case: Case, name: str) -> list[Entry]:
    """Return the answer, then the sets, each with its plan: what fits first, of that the fastest first."""
    configs = {
        ANSWER: spelled_out(
            decide(run(case), ranks=case.ranks, device=parse_hardware(name)[0], here=name == "auto").config
        )
    }
    configs |= {words: spelled_out(run(case, words)) for words in case.sets}
    answer, *sets = [(title, config, planned(config, name, case.ranks)) for title, config in configs.items()]
    sets.sort(key=lambda e: (not e[2].get("planned_fits"), -(e[2].get("planned_tokens_per_s") or 0.0)))
    return [answer, *sets]


def measure(config: Config, ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the figures of fresh processes, of the steps after the first ones; or why there are none."""
    text = dump_config(config)
    request = {"run": text, "baseline": text, "warmup": 0, "proof": {"steps": 0, "documents": 0}, "ranks": ranks}
    found = run_worker(request, limit_s)
    speeds = (found.get("tokens_per_s") or [])[WARMUP:]
    kept = {k: found.get(k) for k in ("step_s", "peak_bytes", "memory_kind", "losses", "seconds", "error", "device")}
    machine = {**record.machine(), **found.get("environment", {})}
    return {"tokens_per_s": statistics.median(speeds) if speeds else None, **kept, "environment": machine}


def verdict(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratio of the answer to the best set, whether that is enough, and what ran out of memory."""
    ran: dict[str, list[dict[str, Any]]] = {}
    for r in runs:
        ran.setdefault(r["name"], []).append(r)
    speeds = {name: [r["tokens_per_s"] for r in of if r["tokens_per_s"]] for name, of in ran.items()}
    figures = {name: statistics.median(of) for name, of in speeds.items() if of and name != ANSWER}
    own = statistics.median(speeds[ANSWER]) if speeds.get(ANSWER) else 0.0
    best = max(figures, key=lambda name: figures[name], default=None)
    ratio = None if best is None else own / figures[best]
    lost = [name for name, of in ran.items() if any("out of memory" in (r["error"] or "") for r in of)]
    failed = any(r["error"] and not r["error"].startswith((LATE, UNTRIED)) for r in ran.get(ANSWER, []))
    return {
        "ratio": ratio, "bar": BAR, "holds": None if ratio is None else ratio >= BAR and not failed,
        "answer": speeds.get(ANSWER, []), "best": best, "best_tokens_per_s": figures.get(best or ""),
        "measured": len(figures), "out_of_memory": lost,
    }  # fmt: skip


def compare(name: str, out: Path, repeats: int, limit_s: float) -> dict[str, Any]:
    """Measure a case within the limit, write each run at once, and return the verdict, which is the last line."""
    case, start, reserve = CASES[name], time.monotonic(), 0.0  # seconds for the answer at the end
    answer, *sets = entries(case, "auto")
    common = {"case": name, "ranks": case.ranks, "method": case.method, "steps": STEPS, "warmup": WARMUP}
    command = f"answers.py {out.name} --case {name} --repeats {repeats} --limit {limit_s:g}"
    common |= {"seq": case.seq, "tokens": case.rows * case.seq, "command": command}
    common["source"] = record.source()
    queue = [(1, answer), *((n, e) for n in range(1, repeats + 1) for e in (*sets, answer))]
    runs: list[dict[str, Any]] = []
    with out.open("a") as file, stop_on_signals():
        for place, (repeat, (title, config, plan)) in enumerate(queue, 1):
            left = limit_s - (time.monotonic() - start) - (reserve if place < len(queue) else 0.0)
            if "refused" in plan or left < LEAST_S:
                why = plan.get("refused", f"{left:.0f} s of the limit are left")
                found: dict[str, Any] = {"tokens_per_s": None, "peak_bytes": None, "error": f"{UNTRIED}: {why}"}
            else:
                found = measure(config, case.ranks, left)
                reserve = max(reserve, found["seconds"]) if title == ANSWER else reserve
            own = {"name": title, "repeat": repeat, "with": config.with_, "micro_tokens": config.batch.micro_tokens}
            runs.append({**common, **own, **plan, **found})
            print(json.dumps(runs[-1]), file=file, flush=True)
            print(shown(title, config, plan, found), flush=True)
        result = {"case": name, **verdict(runs), "seconds": time.monotonic() - start}
        print(json.dumps(result), file=file)
    return result


def shown(title: str, config: Config, plan: dict[str, Any], found: dict[str, Any] | None = None) -> str:
    """Return a run, planned or measured, as a line for people."""
    if "refused" in plan:
        return f"{title}: {UNTRIED}: {plan['refused']}"
    speed, peak = plan["planned_tokens_per_s"] or 0, plan["planned_peak_bytes"] / GIB
    text = f"{title}: planned {speed:,.0f} tok/s, {peak:.2f} GiB{'' if plan['planned_fits'] else ', does not fit'}; "
    if found is None:
        techniques = " ".join(n + (f":{json.dumps(o)}" if o else "") for n, o in config.with_.items())
        return f"{text}micro_tokens {config.batch.micro_tokens}; {techniques}"
    if found["error"]:
        return text + one_line(found["error"])
    return f"{text}found {found['tokens_per_s']:,.0f} tok/s, {found['peak_bytes'] / GIB:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--case", choices=CASES, default="1b")
    parser.add_argument("--hardware", help="with --plan: another machine than this one")
    parser.add_argument("--limit", type=float, default=540, help="seconds that all processes may take together")
    parser.add_argument("--repeats", type=int, choices=(1, 2), default=1)
    parser.add_argument("--plan", action="store_true")
    a = parser.parse_args()
    if a.plan:
        print("\n".join(shown(*entry) for entry in entries(CASES[a.case], a.hardware or "auto")))
        return
    if a.file is None or a.hardware:
        parser.error("OUT.jsonl is needed to measure, and --hardware is for --plan alone")
    kind, ranks = "cpu" if CASES[a.case].model == "tiny" else "cuda", CASES[a.case].ranks
    devices = [d for d in hardware.probe() if d.kind == kind]
    if hardware.first_device().kind != kind or (kind == "cuda" and len(devices) < ranks):
        parser.error(f"--case {a.case} needs {ranks} of {kind} (a CPU alone: CUDA_VISIBLE_DEVICES=); --plan does not")
    print(json.dumps(compare(a.case, a.file, a.repeats, a.limit)))


if __name__ == "__main__":
    main()
