"""Saved activations in 8 bits: the loss to the bit, gradients near the exact ones, and the bytes that the plan says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from meshes import further
from optrush.decide import decide
from optrush.kernels import int8
from optrush.kernels.int8 import BLOCK, LEAST
from optrush.models import activation_rounding as module
from optrush.models.activation_rounding import Rounded, RoundedActivations
from optrush.techniques.quantised_activations import QuantisedActivations

from golden.make_golden import SIZES
from trials import assembled, first_gradients, golden_run, micro

NEAR = 0.999  # cosine of each gradient with the exact one


@pytest.fixture
def small(monkeypatch):
    """Tiny models save tiny tensors, of which all are rounded."""
    monkeypatch.setattr(module, "SMALL", 256)


# The round trip.


def made(kind: str, n: int) -> torch.Tensor:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    match kind:
        case "constant":
            values[:] = 0.3
        case "zeros":
            values[:BLOCK] = 0
        case "outlier":
            values[7] = 1e4
        case "faint":
            values *= 1e-42
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "constant", "zeros", "outlier", "faint"])
@pytest.mark.parametrize("n", [4 * BLOCK, 3 * BLOCK + 17])
def test_within_half_a_step_of_each_block(monkeypatch, kind, dtype, n):
    monkeypatch.setattr(int8, "CHUNK", 2 * BLOCK)
    values = made(kind, n).to(dtype)
    saved = Rounded.of(values.view(1, n))
    back = saved.tensor()
    assert back.shape == (1, n) and back.dtype == dtype
    assert saved.codes.nbytes + saved.scales.nbytes == n + 4 * -(-n // BLOCK)
    for block, found in zip(values.float().split(BLOCK), back[0].float().split(BLOCK), strict=True):
        half = block.abs().max() / 127 / 2
        rounded = (block - found).abs() - found.abs() * torch.finfo(dtype).eps  # and once to the type
        assert (rounded <= half * 1.001 + LEAST).all()


def test_what_is_not_finite_stays_so():
    values = made("plain", 2 * BLOCK)
    values[3], values[BLOCK + 3] = torch.inf, torch.nan
    assert not Rounded.of(values.view(1, -1)).tensor().isfinite().any(), "of such a block nothing else is believed"


def test_a_view_with_gaps():
    gate = torch.randn(8, 64, 2).unbind(-1)[0]
    saved = Rounded.of(gate)
    assert saved.codes.numel() == 512 and (saved.tensor() - gate).abs().max() < gate.abs().max() / 250


# What is rounded, and what stays.


def test_what_stays():
    """A weight as long as the tokens, its view and cast, an adapter's, statistics, masks, what blocks are given."""
    linear = torch.nn.Linear(64, 128, bias=False)
    low = torch.nn.Parameter(torch.randn(128, 16))
    given = torch.randn(2, 64, 1, 64)
    kept = RoundedActivations(1, frozenset({16}))
    with kept.block(linear, torch.randn(2, 64, 32), [given]):
        one = kept._pass
        x = torch.randn(2, 64, 64)
        rounded = [x, x.view(128, 64), torch.randn(2, 64, 128).unflatten(-1, (64, 2)).unbind(-1)[0]]
        weight = linear.weight
        stays = [
            weight, weight.detach(), weight.data.view(128, 8, 8), weight.bfloat16(), low * 2.0, given, given[:, :, 0],
            torch.randn(2, 64, 1).expand(2, 64, 64), torch.randn(2, 64, 64, 1), torch.randn(64, 128),
            torch.ones(2, 64, 64, dtype=torch.bool), torch.ones(2, 64, 64, dtype=torch.int32),
            torch.randn(2, 64, 64).to(torch.float8_e4m3fn), torch.randn(2, 64, 16),
        ]  # fmt: skip
        found = [one.save(t) for t in rounded]
        assert all(isinstance(f, Rounded) for f in found) and found[0].codes is found[1].codes, "once a storage"
        assert not any(isinstance(one.save(t), Rounded) for t in stays)
        address = x.untyped_storage()._cdata
        del x, rounded
        others = [torch.randn(2, 64, 64) for _ in range(20)]  # perhaps where x was
        for other in others:
            saved = one.save(other)
            assert saved.codes is not found[0].codes, address
            assert (saved.tensor() - other).abs().max() < 0.03


def saved_by(box, **with_):
    """Of the tokens' tensors that the blocks save: (rounded, as they are), each with its last dimension."""
    job = assembled(golden_run(box, packed=True, quantised_activations={}, **with_))
    batch, seen, save = micro(job), [], module._Pass.save

    def watched(self, t):
        found = save(self, t)
        if t.numel() >= 256 and t.is_floating_point() and not isinstance(t, torch.nn.Parameter):
            seen.append((isinstance(found, Rounded), tuple(t.shape)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Pass, "save", watched)
        job.loss(batch)
    return [[shape for yes, shape in seen if yes is which] for which in (True, False)]


def test_attention_keeps_what_it_needs(box, small):
    """Of a block the hooks round all but weights and angles; attention's own are not even asked for."""
    rounded, exact = saved_by(box, attention={})
    assert len(rounded) == 2 * (2 * 3 + 2 + 1 + 4), "inputs of norms and products, the gate, factors"
    tokens = rounded[0][0] * rounded[0][1]
    left = [shape for shape in exact if tokens in (shape[0], shape[0] * shape[1]) and 1 not in shape[1:]]
    assert left == 2 * [(tokens, SIZES["hidden_size"])], "what enters o, which attention has kept"


# Gradients.


def cosines(found, want):
    pairs = ((found[name].double().flatten(), g.double().flatten()) for name, g in want.items())
    return [F.cosine_similarity(a, b, dim=0).item() for a, b in pairs if b.abs().max() > 0]


WAYS = [
    {}, {"attention": {}}, {"amp": {}, "fused-kernels": {"norm": True, "rope": True}},
    {"lora": {}, "nf4": {}, "bf16": {}}, {"lora": {"dora": True, "dropout": 0.1}}, {"ia3": {}},
]  # fmt: skip


@pytest.mark.parametrize("with_", further(WAYS, 2), ids=str)
def test_the_loss_is_the_same_and_gradients_are_near(box, small, with_):
    loss, want = first_gradients(assembled(golden_run(box, packed=True, **with_)))
    found, grads = first_gradients(assembled(golden_run(box, packed=True, quantised_activations={}, **with_)))
    near = cosines(grads, want)
    assert found == loss and NEAR < min(near) < 1 - 1e-6, "rounded, and near"


def on_ranks(box, with_):
    module.SMALL, before = 256, module.SMALL
    try:
        return [
            first_gradients(assembled(golden_run(box, packed=True, **with_, **own)))
            for own in ({}, {"quantised-activations": {}})
        ]
    finally:
        module.SMALL = before


MESHES = [
    {"fsdp": {}}, {"ddp": {}, "lora": {}}, {"fsdp": {"stage": 2}, "lora": {}, "nf4": {}, "amp": {}}, {"tensor": {}},
    {"context": {}, "ddp": {}},
]  # fmt: skip


@pytest.mark.parametrize("with_", further(MESHES, 1), ids=str)
def test_on_two_ranks(box, pair, with_):
    for (loss, want), (found, grads) in pair(on_ranks, box, with_):
        near = cosines(grads, want)
        assert found == loss and NEAR < min(near) < 1 - 1e-6


def test_evaluation_saves_nothing(box, small):
    job = assembled(golden_run(box, packed=True, quantised_activations={}))
    batch = micro(job)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Rounded, "of", None)
        job.loss(batch)


# Bytes.


# Refusals.


def test_quack(box):
    env = decide(golden_run(box)).env
    quack = dataclasses.replace(env, spec=dataclasses.replace(env.spec, mlp="quack"))
    assert ["mlp=quack" in n.found for n in QuantisedActivations().needs(quack) if not n.met] == [True]
