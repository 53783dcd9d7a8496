"""Recomputing is exact: the same bits, from fewer saved ones."""

from __future__ import annotations

import pytest
import torch

from meshes import further
from optrush.planner import search
from optrush.trainer.trainer import evaluate

from trials import assembled, golden_run, micro, shaped, steps


def counting(trainer):
    """Forward passes by block, counted from now on."""
    calls = dict.fromkeys(trainer.model.blocks, 0)
    for name, block in trainer.model.blocks.items():

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        block.register_forward_pre_hook(count)
    return calls


@pytest.mark.parametrize(
    ("implementation", "whole"), further([("native", True), ("transformers", True), ("transformers", False)], 1)
)
def test_a_compiler_sees_what_is_recomputed(box, implementation, whole):
    """What it traces holds a checkpoint for the chosen block, and nothing outside; native blocks are inside one."""
    run = golden_run(box, packed=True, sets=[f"model.implementation={implementation}"], recompute={"every": 2})
    job = assembled(run)
    graphs = []

    def backend(graph, _inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    for module in [job.model] if whole else job.model.blocks.values():
        module.compile(backend=backend, fullgraph=True, dynamic=False)
    list(steps(job, 1))
    torch._dynamo.reset()
    found = [sum("checkpoint" in target for target in graph) for graph in graphs]
    assert (set(found) == {1}) if whole else (found == [0, 1])


@pytest.mark.parametrize(("every", "twice"), [(1, {"0", "1"}), (2, {"1"})])
def test_chosen_blocks_run_twice(box, every, twice):
    with_ = {"recompute": {"every": every}} if every else {}
    job = assembled(golden_run(box, rows=4, packed=True, **with_))
    calls = counting(job)
    list(steps(job, 1))
    assert calls == {name: 2 * (2 if name in twice else 1) for name in calls}, "two micro-batches"


def test_evaluation_runs_each_block_once(box):
    job = assembled(golden_run(box, sets=[f"data.eval={box}/chat.jsonl", "data.train_on=all"], recompute={}))
    calls = counting(job)
    evaluate(job)
    assert calls == dict.fromkeys(calls, job.evaluation.batches)


def saved(trainer) -> int:
    """Bytes that one micro-batch's forward pass keeps for its backward pass, parameters left out."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def pack(t):
        where = t.untyped_storage()
        if where.data_ptr() not in parameters:
            kept[where.data_ptr()] = where.nbytes()
        held.append(t)
        return t

    held: list[torch.Tensor] = []  # so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        batch = micro(trainer)
        trainer.model(batch.tokens, batch.positions, batch.documents).sum().backward()
    trainer.zero_grad()
    return sum(kept.values())


def test_less_is_kept(box):
    """checkpoint saves a block's inputs beside autograd's own, so what these hooks see is the rest."""
    base, half, least = (
        saved(assembled(golden_run(box, packed=True, **with_)))
        for with_ in ({}, {"recompute": {"every": 2}}, {"recompute": {}})
    )
    assert least < 0.25 * base < half < 0.75 * base, (base, half, least)


def test_compiled_blocks_cast_again():
    """Else autocast holds the copies until the micro-batch ends. A record agrees: docs/plan.md, *recompute, T=4096*."""

    def casts(*withs):
        usual = ("amp", "fused-adamw", "attention", "fused-loss")
        said = search.predict(shaped("llama-3.2-1b", *usual, *withs, rows=32), "h200")
        return sum(line.bytes for line in said.lines if line.name == "casts.blocks")

    matrices = 2 * 973_078_528  # bytes of the blocks' matrices in bfloat16
    assert casts("compile") == casts("recompute") == matrices
    assert casts("compile", "recompute") == pytest.approx(matrices / 16)
