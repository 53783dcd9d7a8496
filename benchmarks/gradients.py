"""Compare the first gradient of each rung of a ladder with that of the first rung; a JSON line each on stdout.

usage: gradients.py CONFIG --ladder LADDER [--trained] [--jobs N] [--set KEY=VALUE]...

Each rung is assembled in a process of its own, up to N at a time, and takes one gradient of the documents of the
ladder's proof, in micro-batches no larger than these need. All its values are compared, tensor by tensor under the
names of an export, where the proof of a ladder has a sketch of some thousand sums (worker.sketch). Nothing is timed,
and other systems are left out. A rung that ran out of memory next to others is run again, alone.

Random weights of many blocks turn a gradient by far more than trained ones do, in whatever precision. With --trained
the second rung trains first, for CONFIG's train.steps, and every rung takes the weights that it leaves, to the bit.

    loss     of the same documents, before any step
    cosine   of the angle between the two gradients, all tensors laid end to end; accumulated in float64
    length   of the gradient, by that of the first rung's
    tensors  the lowest cosine of any one tensor, and its name; the median over tensors
    sketch   the cosine that the proof of a ladder estimates
    error    instead of these: why there is no gradient
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrush import exporting
from optrush.benchmark import ladder, record, results, worker
from optrush.benchmark.worker import exported_gradients, sketch
from optrush.config import Config, dump_config, parse_config
from optrush.data.sampler import close_workers_after
from optrush.decide import decide
from optrush.errors import UserError
from optrush.models import weights
from optrush.technique import Part
from optrush.trainer import dpo_reference
from optrush.trainer.build import build
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan, Trainer, set_step

LETTERS = 240  # of an error
PIECE = 1 << 26  # values in float64 at a time


def trained(config: Config, folder: Path) -> dict[str, Any]:
    """Train the run, write its model to `folder`/model, and return the first and the last loss."""
    prepared = decide(config)
    trainer = build(prepared)
    dpo_reference.fill_reference(trainer, prepared)
    plan = RunPlan(trainer, trainer.stream.plan(None, config.train.steps))
    trainer.batches = batches(trainer, plan)
    with close_workers_after(trainer.batches):
        lines = worker.loop(trainer, plan).lines
    (folder / "model").mkdir()
    weights.export_weights(folder / "model", exporting.published_tensors(trainer), trainer.weight_map, trainer.hf)
    if trainer.tokenizer is not None:
        trainer.tokenizer.save_pretrained(folder / "model")
    return {"steps": plan.total, "losses": [lines[0]["loss"], lines[-1]["loss"]]}


def gradient(config: Config, baseline: Config, documents: int) -> tuple[Trainer, float]:
    """Return a trainer with the gradient of the baseline's first documents, computed as in the proof of a ladder.

    Returns:
        (the trainer, their loss).

    Raises:
        ValueError: the rung can have none of these documents, or keeps none.
    """
    slots = documents * config.batch.seq
    if isinstance(config.batch.micro_tokens, int) and config.batch.micro_tokens > slots:
        sizes = config.batch.model_copy(update={"tokens": slots, "micro_tokens": slots})
        config = config.model_copy(update={"batch": sizes})
    prepared = decide(config)
    trainer = build(prepared)
    if Part.UPDATE in trainer.env.claimed:
        raise ValueError("no gradient is left: weights are updated in the backward pass")
    dpo_reference.fill_reference(trainer, prepared)
    first = worker.first_documents(trainer, prepared, baseline, documents)
    window, reason = worker.proof_window(trainer, first, trainer.stream.plan(None, config.train.steps).widest)
    if reason is not None:
        raise ValueError(reason)
    set_step(trainer, 1, 1)
    loss = trainer.forward_backward(window, trainer.all_reduce_terms(sum(b.n_terms for b in window)))
    return trainer, loss.item()


@torch.no_grad()
def compared(trainer: Trainer, wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Return the angle between the trainer's gradient and another, over all tensors and for each that has one.

    Raises:
        ValueError: they cannot be compared.
    """
    inner, mine, theirs, cosines = 0.0, 0.0, 0.0, dict[str, float]()
    found = {name: values for t in trainer.trained for name, values in exported_gradients(trainer, t)}
    if set(found) != set(wanted):
        raise ValueError(f"other tensors: {sorted(set(found) ^ set(wanted))[:3]}")
    for name, values in found.items():
        products = [0.0, 0.0, 0.0]
        for a, b in zip(*(torch.split(x.flatten(), PIECE) for x in (values, wanted[name])), strict=True):
            a, b = a.double() / trainer.scale, b.to(a.device).double()
            products = [p + float(x @ y) for p, (x, y) in zip(products, ((a, b), (a, a), (b, b)))]
        inner, mine, theirs = (total + p for total, p in zip((inner, mine, theirs), products))
        if products[1] and products[2]:  # that of an adapter's first factor begins at zero
            cosines[name] = products[0] / (products[1] * products[2]) ** 0.5
    if not 0 < mine * theirs < math.inf:
        raise ValueError("a gradient is zero, or not finite")
    lowest = min(cosines, key=cosines.__getitem__)
    return {
        "cosine": inner / (mine * theirs) ** 0.5,
        "length": (mine / theirs) ** 0.5,
        "tensors": {"lowest": [lowest, cosines[lowest]], "median": statistics.median(cosines.values())},
    }


def answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the result of one rung's process; the first stores its gradient in `folder` for the others."""
    config, baseline = (parse_config(request[key], key) for key in ("run", "baseline"))
    if request["train"]:
        return trained(config, folder)
    trainer, loss = gradient(config, baseline, request["documents"])
    first, seen = folder / "first.pt", sketch(trainer)
    if not first.exists():
        held = {
            name: (values.float() / trainer.scale).cpu()
            for t in trainer.trained
            for name, values in exported_gradients(trainer, t)
        }
        torch.save({"tensors": held, "sketch": seen}, first)
    wanted = torch.load(first, mmap=True)
    return {"loss": loss, **compared(trainer, wanted["tensors"]), "sketch": results.cosine(seen, wanted["sketch"])}


def rung_result(
    rung: ladder.Rung, first: ladder.Rung, documents: int, folder: Path, *, train: bool = False
) -> dict[str, Any]:
    """Run a rung's process and return its result, or the last line of its standard error."""
    runs = {"run": dump_config(rung.config), "baseline": dump_config(first.config)}
    request = {**runs, "documents": documents, "train": train}
    line = [sys.executable, __file__, "--answer", json.dumps(request), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        result = {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    if "error" in result:
        result["error"] = result["error"][:LETTERS]
    outcome = result.get("error", result.get("losses", result.get("cosine")))
    print(f"{rung.name}: {outcome}", file=sys.stderr, flush=True)
    return {"rung": rung.name, **result}


def of_model(rung: ladder.Rung, folder: Path) -> ladder.Rung:
    """Return the rung on the weights and the tokenizer of a folder."""
    found = rung.config.model.model_copy(update={"path": str(folder), "shape": None, "tokenizer": None})
    return dataclasses.replace(rung, config=rung.config.model_copy(update={"model": found}))


def main() -> None:
    if sys.argv[1:2] == ["--answer"]:
        try:
            print(json.dumps(answer(json.loads(sys.argv[2]), Path(sys.argv[3])), allow_nan=False))
        except Exception as error:  # a rung may fail in any way, and the others are compared
            text = str(error) if isinstance(error, UserError) else record.describe_error(error)
            print(json.dumps({"error": text}))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--ladder", required=True)
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    a = parser.parse_args()
    config = parse_config(a.config.read_text(), str(a.config), sets=a.sets)
    climbed = ladder.find_ladder(a.ladder, config)
    first, *rungs = [r for r in ladder.resolve_rungs(climbed, config, cumulative_only=True) if r.peer is None]
    documents = climbed.proof.documents
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    known = {
        "config": str(a.config), "ladder": climbed.name, "set": a.sets, "case": ladder.case_of(config),
        "documents": documents, "environment": record.machine(), "source": record.source(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=shared) as held, ThreadPoolExecutor(a.jobs) as pool:
        folder = Path(held)
        if a.trained:
            longer = dataclasses.replace(rungs[0], config=rungs[0].config.model_copy(update={"train": config.train}))
            known["trained"] = rung_result(longer, first, documents, folder, train=True)
            if "error" in known["trained"]:
                sys.exit("there are no trained weights to take a gradient at")
            first, *rungs = [of_model(rung, folder / "model") for rung in (first, *rungs)]
        found, alone = rung_result(first, first, documents, folder), list[ladder.Rung]()
        print(json.dumps({**known, **found}), flush=True)
        if "error" in found:
            sys.exit("the first rung has no gradient: there is nothing to compare with")
        for rung, found in zip(rungs, pool.map(lambda rung: rung_result(rung, first, documents, folder), rungs)):
            if "out of memory" in found.get("error", "") and a.jobs > 1:
                alone.append(rung)  # the others may have had it
            else:
                print(json.dumps({**known, **found}), flush=True)
        for rung in alone:
            print(json.dumps({**known, **rung_result(rung, first, documents, folder)}), flush=True)


if __name__ == "__main__":
    main()
