"""Weights and gradients in 8 bits between ranks: what arrives, how far gradients and losses are, and the bytes sent."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshes import further
from optrush.decide import decide
from optrush.hardware import parse_hardware
from optrush.kernels.int8 import BLOCK
from optrush.planner import search
from optrush.techniques import ALL
from optrush.techniques.quantised_links import QuantisedLinks
from optrush.trainer import packed_links
from optrush.trainer.packed_links import Message, Shard
from optrush.trainer.trainer import evaluate

from trials import assembled, first_gradients, golden_run, ledgers, shaped, steps

LINKS = {"quantised-links": {}}
BOTH = {"quantised-links": {"gradients": "int8"}}
NEAR = 0.997  # cosine of each gradient with the exact one
CURVE = 0.01  # relative, of each loss


# A message.


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_message(sent):
    """Of matrices each 256 values are within half a step of their own; a norm beside them arrives to the bit."""
    kinds = [torch.float32, torch.bfloat16, torch.float32] if sent == torch.uint8 else [sent] * 3
    sizes, draw = [5, 3 * BLOCK + 9, 2 * BLOCK], torch.Generator().manual_seed(1)
    values = [(torch.randn(n, generator=draw) * f).to(k) for n, k, f in zip(sizes, kinds, (100, 0.01, 1), strict=True)]
    message = Message([Shard(len(v), v.dtype, i > 0) for i, v in enumerate(values)])
    flat = torch.cat([v.view(torch.uint8) if sent == torch.uint8 else v for v in values])
    packed, out = message.pack(flat), torch.empty_like(flat)
    assert len(packed) % 16 == 0 and len(packed) < 16 + 5 * kinds[0].itemsize + sum(sizes[1:]) + 4 * (4 + 2)
    message.unpack(packed, out)
    data, at = out.view(torch.uint8), 0
    for value, exact in zip(values, (True, False, False), strict=True):
        back = data[at : (at := at + value.nbytes)].clone().view(value.dtype)
        if exact:
            assert torch.equal(back, value)
        for a, b in zip(value.float().split(BLOCK), back.float().split(BLOCK), strict=True):
            eps = torch.finfo(value.dtype).eps * b.abs()
            assert ((a - b).abs() - eps <= a.abs().max() / 254 * 1.001).all()


# On two ranks.


def arrived(box, with_):
    """Of each parameter of a block: how far what the forward pass reads is from its shards, and half a step of it."""
    job = assembled(golden_run(box, packed=True, **with_))
    exact = {n: p.full_tensor().detach().clone() for n, p in job.model.blocks["0"].named_parameters()}
    seen = {}

    def look(*_):  # while the block runs, whose weights are freed behind it
        seen.update({n: p.detach().clone() for n, p in job.model.blocks["0"].named_parameters()})

    job.model.blocks["0"].norm2.register_forward_hook(look)
    job.model.blocks["0"].o.register_forward_hook(look)
    first_gradients(job)
    bounds = {n: p.abs().max().item() / 254 for n, p in exact.items()}
    return {n: ((seen[n].float() - p.float()).abs().max().item(), bounds[n]) for n, p in exact.items()}, seen


@pytest.mark.parametrize("with_", [{"fsdp": {}}, {"fsdp": {}, "lora": {}, "bf16": {}}], ids=str)
def test_what_arrives(box, pair, with_):
    """On every rank the same; of matrices something near, and of norms and adapters the very values."""
    (one, weights), (_, others) = pair(arrived, box, with_ | LINKS)
    for name, (off, bound) in one.items():
        matrix = name.endswith("weight") and "norm" not in name
        assert 0 < off <= 1.01 * bound + (0.002 if "bf16" in with_ else 0) if matrix else off == 0, name
        assert torch.equal(weights[name], others[name])


def cosines(found, want):
    pairs = ((found[name].double().flatten(), g.double().flatten()) for name, g in want.items())
    return [F.cosine_similarity(a, b, dim=0).item() for a, b in pairs if b.abs().max() > 0]


def near(box, with_, links):
    (_, want), (_, found) = (
        first_gradients(assembled(golden_run(box, packed=True, **with_, **x))) for x in ({}, links)
    )
    return cosines(found, want)


CASES = [
    ({"fsdp": {}}, LINKS), ({"fsdp": {"stage": 2, "sync": "each"}, "amp": {}}, BOTH),
    ({"fsdp": {}, "bf16": {}, "lora": {}}, LINKS),
    ({"fsdp": {}}, {"quantised-links": {"weights": "none", "gradients": "int8"}}),
    ({"fsdp": {}, "context": {}, "recompute": {}}, BOTH), ({"fsdp": {}, "pipeline": {}}, BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("with_", "links"), further([c for c in CASES if "pipeline" not in c[0]], 2), ids=str)
def test_gradients_are_near(box, pair, with_, links):
    for found in pair(near, box, with_, links):
        assert NEAR < min(found) < 1 - 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("with_", [{"fsdp": {"replicate": 2}}, {"fsdp": {}, "pipeline": {}}], ids=str)
def test_gradients_on_four_ranks_are_near(box, quad, with_):
    for found in quad(near, box, with_, BOTH):
        assert NEAR < min(found) < 1 - 1e-7


def curve(box, links):
    job = assembled(
        golden_run(box, packed=True, sets=["train.steps=5", f"data.eval={box}/held.jsonl"], fsdp={}, **links)
    )
    losses = [loss for loss, *_ in steps(job, 5)]
    return losses, evaluate(job)[0]


def test_losses_stay_near(box, pair):
    (want, held), (found, ours) = pair(curve, box, {})[0], pair(curve, box, BOTH)[0]
    assert found != want and found == pytest.approx(want, rel=CURVE)
    assert ours == pytest.approx(held, rel=CURVE)


def evaluated(box):
    """The evaluation with and without, of the same weights."""
    sets = [f"data.eval={box}/held.jsonl"]
    return [evaluate(assembled(golden_run(box, packed=True, sets=sets, fsdp={}, **x)))[0] for x in ({}, LINKS)]


def test_an_evaluation_is_of_the_exact_weights(box, pair):
    for want, found in pair(evaluated, box):
        assert found == want


def poisoned(box):
    job = assembled(golden_run(box, packed=True, fsdp={}, **BOTH))
    if job.world.rank:
        job.loss_from_hidden = lambda hidden, batch, inner=job.loss_from_hidden: inner(hidden, batch) * torch.nan
    return next(steps(job, 1))[2]


def test_what_is_not_finite_reaches_every_rank(box, pair):
    assert pair(poisoned, box) == [True, True]


def sent(box, links):
    """Bytes that a step receives from the other rank for its blocks, gathered and reduced."""
    many = {"gather": 0, "reduce": 0}
    gather, exchange = packed_links.gather_bytes, dist.all_to_all_single

    def gathered(out, mine, **kwargs):
        many["gather"] += out.nbytes // 2
        return gather(out, mine, **kwargs)

    def exchanged(out, mine, **kwargs):
        many["reduce"] += out.nbytes // 2
        return exchange(out, mine, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_links, "gather_bytes", gathered)
        patch.setattr(dist, "all_to_all_single", exchanged)
        first_gradients(assembled(golden_run(box, packed=True, sets=[f"model.path={box}/wide"], fsdp={}, **links)))
    return many


def test_the_plan_counts_the_bytes(box, pair):
    from golden.make_golden import write_model

    write_model(box / "wide", False, hidden_size=256, intermediate_size=1024)
    config = golden_run(box, packed=True, sets=[f"model.path={box}/wide"], fsdp={}, **BOTH)
    found = pair(sent, box, BOTH)
    (book,), env, _ = ledgers(config, parse_hardware("2xh100")[0], 2, ALL)
    (plain,), *_ = ledgers(golden_run(box, packed=True, fsdp={}), parse_hardware("2xh100")[0], 2, ALL)
    work = {w.name: w.values * w.times * book.bytes_per_value[w.role] for w in book.work}
    shape = env.shape
    ends = (shape.parameters - shape.block_parameters) * 4 / 2  # of gradients, by fsdp itself
    for one in found:
        assert one["gather"] == pytest.approx(work["gather.blocks"] * env.accumulation, rel=0.02)
        assert one["reduce"] == pytest.approx(work["reduce"] - ends, rel=0.02)
    assert plain.bytes_per_value["product"] == 4


def test_needs(box):
    env = decide(golden_run(box, fsdp={}, quantised_links={}), ranks=2).env
    others = {
        "runs through transformers": {"native": False},
        "over other ranks": {
            "claimed": env.claimed | {next(p for p in type(next(iter(env.claimed))) if p.name == "TP")}
        },
    }
    for found, changes in others.items():
        unmet = [n.found for n in QuantisedLinks().needs(dataclasses.replace(env, **changes)) if not n.met]
        assert len(unmet) == 1 and found in unmet[0]


def test_a_slow_link_carries_half(box):
    """In bf16; the plan is faster where the link was what a step waited for."""
    with_ = ("bf16", "attention", "fused-adamw", "fsdp")
    plain, packed = (
        search.predict(shaped("llama-3.2-1b", *with_, *more, rows=1, seq=512, windows=4), "4x4090")
        for more in ((), ("quantised-links",))
    )
    assert packed.tokens_per_s > 1.1 * plain.tokens_per_s
