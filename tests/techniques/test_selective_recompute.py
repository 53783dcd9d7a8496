"""Selective recomputation: the same bits where blocks are not compiled, fewer bytes kept, and no more done twice than
said."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from meshes import further
from optrush.decide import decide
from optrush.models.shapes import SHAPES
from optrush.planner import baseline
from optrush.techniques import selective_recompute
from optrush.techniques.selective_recompute import SelectiveRecompute

from memory import supposed, track
from trials import assembled, first_gradients, furthest, golden_run, micro, steps

CLOSE = 1e-5


@pytest.fixture
def once(partitioned):
    """A fresh compiler that may make each graph once, and writes no code."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def ran(box, **with_) -> Counter:
    """Operators of one micro-batch's forward and backward pass."""
    job = assembled(golden_run(box, packed=True, attention={}, **with_))
    batch = micro(job)
    with Counted() as counted:
        job.model(batch.tokens, batch.positions, batch.documents).sum().backward()
    return counted.calls


ATTEND = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("options", "products"), [({"ops": "products"}, 0), ({}, 0), ({"ops": "attention"}, 3)], ids=str
)
def test_what_runs_again(box, options, products):
    """Of the 4 products of a block the last never does; and norms do, once more."""
    base, found = ran(box), ran(box, selective_recompute=options)
    blocks = 2
    assert found["aten::mm"] - base["aten::mm"] == products * blocks and found[ATTEND] == base[ATTEND] == blocks
    assert found["aten::rsqrt"] - base["aten::rsqrt"] == 2 * blocks, "two norms a block"
    whole = ran(box, recompute={})
    assert whole["aten::mm"] - base["aten::mm"] == 3 * blocks and whole[ATTEND] == 2 * blocks, "what they are against"


@pytest.mark.slow
def test_fewer_bytes_are_kept(box, monkeypatch):
    """At the end of the forward pass, by the allocator of the machine: against nothing, and against everything."""
    for blocks in (4, 8):
        monkeypatch.setitem(SHAPES, f"short-{blocks}", SHAPES["qwen2.5-0.5b"] | {"num_hidden_layers": blocks})

    def kept(blocks=8, **with_):
        sets = ["model.implementation=native", "batch.seq=256", "batch.tokens=1024", "batch.micro_tokens=1024"]
        sets += ["data.path=null", "data.random=16", "objective=pretrain", "model.path=null"]
        run = golden_run(box, attention={}, sets=[*sets, f"model.shape=short-{blocks}"], **with_)
        with supposed(run) as job:
            return track(job, 1, supposed=True).peaks["forward"]

    nothing, least = kept(), kept(recompute={})
    products, attention = kept(selective_recompute={}), kept(selective_recompute={"ops": "attention"})
    assert least < attention < products < nothing, (least, attention, products, nothing)
    before, D, q, kv, F = 7, 896, 14 * 64, 2 * 64, 4864
    # Of three products of a block, not of the fourth; of the blocks before the last, in which the peak is.
    outputs = 1024 * 4 * (q + 2 * kv + D + 2 * F)
    assert products - attention == pytest.approx(before * outputs, rel=0.03)
    # In the last block it is less than another block's at most; so of four blocks less.
    fewer = kept(4, selective_recompute={"ops": "attention"}) - kept(4, recompute={})
    each = 1024 * 4 * q
    assert attention - least - fewer == pytest.approx(4 * each, rel=0.02)
    assert attention - least == pytest.approx(before * each, abs=0.06 * 23 * each)


# --- compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("options", "implementation", "scope"),
    further([({"ops": "products"}, "native", "blocks"), ({"budget": 0.4}, "native", "model"),
             ({"ops": "attention"}, "native", "blocks"), ({"budget": 0.4}, "native", "blocks"),
             ({"ops": "products"}, "native", "model"), ({"ops": "products"}, "transformers", "blocks"),
             ({"budget": 0.4}, "transformers", "blocks")], 0),
    ids=str,
)  # fmt: skip
def test_same_gradients_compiled(box, once, options, implementation, scope):
    """Equal blocks still share one graph, and later steps compile nothing."""
    sets, with_ = [f"model.implementation={implementation}"], {"attention": {}, "fused_loss": {"chunk": 64}}
    packed = implementation == "native"

    def trained(**more):
        job = assembled(golden_run(box, packed=packed, sets=sets, **with_, **more))
        _, grads = first_gradients(job)
        return grads, list(steps(job, 2))

    want, base = trained()
    grads, figures = trained(compile={"scope": scope}, selective_recompute=options)
    if implementation == "native":  # of the blocks and the last norm, or of the model, and of a chunk of the loss
        assert counters["stats"]["unique_graphs"] == (3 if scope == "blocks" else 2)
    assert not counters["graph_break"]
    assert furthest(grads, want) < CLOSE
    assert figures == [pytest.approx(line, rel=CLOSE) for line in base]


def saved(box, scope: str = "blocks", **with_) -> int:
    """Bytes that the compiled blocks of one micro-batch keep for their backward pass, parameters left out."""
    torch._dynamo.reset()
    run = golden_run(box, **{"packed": True, "attention": {}, "compile": {"scope": scope}} | with_)
    job = assembled(run)
    batch = micro(job)
    parameters = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        job.model(batch.tokens, batch.positions, batch.documents)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_compiled_blocks_keep_less(box, once, scope):
    nothing = saved(box, scope)
    assert scope == "model" or saved(box, selective_recompute={"budget": 1.0}) == nothing, "a whole budget is none"
    half, third = (saved(box, scope, selective_recompute={"budget": b}) for b in (0.6, 0.3))
    assert third < 0.6 * nothing and third < half < 0.85 * nothing, (nothing, half, third)
    products, attention = (saved(box, scope, selective_recompute={"ops": o}) for o in ("products", "attention"))
    assert attention < 0.6 * nothing and attention < products < 0.85 * nothing, (nothing, products, attention)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_budget_is_for_these_blocks_only(box, partitioned):
    from torch._functorch import config

    job = assembled(golden_run(box, compile={}, selective_recompute={"budget": 0.5}))
    assert config.activation_memory_budget == 1.0
    seen = []
    for block in job.model.blocks.values():
        cell = block._compiled_call_impl.__closure__
        assert any(c.cell_contents == 0.5 for c in cell)
        for c in cell:
            if callable(c.cell_contents):
                c.cell_contents = lambda x, *_: seen.append(config.activation_memory_budget) or x
    batch = micro(job)
    job.model(batch.tokens, batch.positions, batch.documents)
    assert seen == [0.5] * len(job.model.blocks)
    with torch.no_grad():
        job.model(batch.tokens, batch.positions, batch.documents)
    assert seen[2:] == [1.0] * len(job.model.blocks)
    assert config.activation_memory_budget == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("budget", "withs"),
    further([(0.5, {}), (0.6, {"fused_kernels": {}}), (0.7, {}), (0.9, {"fused_kernels": {}})], 1),
    ids=str,
)
def test_the_plan_keeps_what_the_partitioner_keeps(box, once, monkeypatch, budget, withs):
    """Of a block of the 1B shape's proportions, in values of D a token."""
    D, T, L = 256, 128, 2
    small = {"hidden_size": D, "intermediate_size": 4 * D, "head_dim": 32, "num_attention_heads": 8, "vocab_size": 512}
    shape = SHAPES["llama-3.2-1b"] | small | {"num_key_value_heads": 2, "num_hidden_layers": L}
    monkeypatch.setitem(SHAPES, "small", shape)
    sets = ["data.path=null", "data.random=8", "objective=pretrain", "model.path=null", "model.shape=small"]
    sets += [f"batch.{name}={T}" for name in ("seq", "tokens", "micro_tokens")]
    given = {"packed": False, "sets": sets, "bf16": {}, "selective_recompute": {"budget": budget}, **withs}
    env = decide(golden_run(box, attention={}, compile={}, **given)).env
    rules = [r.match for r in SelectiveRecompute(budget=budget).predict(env) if "recomputed" in r.changes]
    assert env.shape is not None
    lines = {e.name: {*e.of, f"'{e.name}'"} for e in baseline.entries(env.shape, T, native=True, cuda=False)}
    outputs = {"saved.heads": 1.5, "saved.attended": 1.0, "saved.gate_up": 8.0, "saved.middle": 1.0}
    kept = [n for n in outputs if not any(r.every <= lines[n] and r.none.isdisjoint(lines[n]) for r in rules)]
    said = 1 + sum(outputs[name] for name in kept)  # 1: what enters the block
    more = saved(box, **given) / (2 * L * T * D) - said
    assert 0 < more < 0.8, "numbers a row of each norm and head, angles"


# --- what it refuses


def test_the_product_that_gates_is_a_product():
    """QuACK's operator is kept like any product, its backward operator is none."""
    from types import SimpleNamespace

    from torch.utils.checkpoint import CheckpointPolicy

    policy = selective_recompute._kept(1.0)()[0].policy_fn

    def asked(name):
        return policy(SimpleNamespace(is_recompute=False), SimpleNamespace(name=lambda: name))

    assert asked("optrush::gated_backward") is CheckpointPolicy.PREFER_RECOMPUTE
    assert asked("optrush::gated") is CheckpointPolicy.MUST_SAVE
    assert asked("aten::mm") is CheckpointPolicy.PREFER_RECOMPUTE, "one product is kept"
