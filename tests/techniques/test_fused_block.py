"""The fused gated activation: the baseline's loss and gradients, and one value a token and feed-forward width less."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from optrush import technique
from optrush.errors import NeedsError
from optrush.hardware import named
from optrush.kernels import swiglu
from optrush.resolve import resolve
from optrush.technique import Technique
from optrush.techniques.fused_block import FusedBlock

from golden.make_golden import CASES, SIZES, T
from trials import assembled, first_gradients, furthest, golden_run, kept

F = SIZES["intermediate_size"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of its own


@pytest.mark.parametrize("name", ["chat", "tied"])
@pytest.mark.parametrize("others", [{}, {"recompute": {}}, {"compile": {}}], ids=str)
def test_same_loss_and_gradients(box, name, others):
    want_loss, want = first_gradients(assembled(golden_run(box, CASES[name], packed=True)))
    loss, grads = first_gradients(assembled(golden_run(box, CASES[name], packed=True, fused_block={}, **others)))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < 1e-5


SAME = nn.Identity()  # in the place of the product before
STREAM = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def drawn(dtype=torch.float64, *, bias=False):
    torch.manual_seed(0)
    down = nn.Linear(7, 5, bias=bias, dtype=dtype)
    return torch.randn(2, 3, 14, dtype=dtype, requires_grad=True), down


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_by_finite_differences(bias):
    x, down = drawn(bias=bias)
    ours = swiglu.mlp_fused_activation if bias else swiglu.mlp_fused_down
    inputs = (STREAM.clone().requires_grad_(), x, *down.parameters())
    assert torch.autograd.gradcheck(lambda stream, x, *_: ours(stream, x, SAME, down), inputs)
    torch.testing.assert_close(ours(STREAM, x, SAME, down), swiglu.gated_mlp(STREAM, x, SAME, down))


def test_what_is_more_than_a_matrix_is_called(box):
    """A bias and another product are not lost."""
    x, down = drawn(bias=True)
    torch.testing.assert_close(
        swiglu.mlp_fused_activation(STREAM, x, SAME, down), swiglu.gated_mlp(STREAM, x, SAME, down)
    )

    class Doubled(Technique):
        name = "doubled"

        def peft(self, trainer):
            for block in trainer.model.blocks.values():
                block.down.matmul = lambda x, weight, bias: 2 * torch.nn.functional.linear(x, weight, bias)
            return 1

    def made(**with_):
        prepared = resolve(golden_run(box, packed=True, **with_))
        return assembled(dataclasses.replace(prepared, techniques=[Doubled(), *prepared.techniques]))

    job = made(fused_block={})
    assert "its input is kept" in job.describe()
    (loss, grads), (want_loss, want) = first_gradients(job), first_gradients(made())
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5


def test_autocast_gives_the_weight_its_own_type(box):
    x, down = drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu.mlp_fused_down(STREAM.bfloat16(), x.bfloat16(), SAME, down)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and down.weight.grad.dtype == torch.float32
    want = torch.autograd.grad(swiglu.gated_mlp(STREAM.float(), x, SAME, down).sum(), down.weight)[0]
    torch.testing.assert_close(down.weight.grad, want, rtol=3e-2, atol=3e-2)


def test_the_activation_is_not_kept(box):
    plain, ours = (assembled(golden_run(box, rows=4, packed=True, **with_)) for with_ in ({}, {"fused_block": {}}))
    blocks = len(plain.model.blocks)
    assert kept(plain) - kept(ours) == blocks * 4 * T * 2 * F * 4  # silu(gate), and its product with up


def test_refused_through_transformers(box):
    with pytest.raises(NeedsError, match="native"):
        resolve(golden_run(box, sets=["model.implementation=transformers"], fused_block={}))


def test_quack_is_refused_where_it_cannot_run(box, monkeypatch):
    run = golden_run(box, fused_block={"impl": "quack"}, bf16={})
    for device, what in ((None, "CUDA"), (named("b200")[0], "Hopper")):
        with pytest.raises(NeedsError, match=what):
            resolve(run, device=device)
    h200 = named("h200")[0]
    resolve(run, device=h200)
    with pytest.raises(NeedsError, match="float32"):
        resolve(golden_run(box, fused_block={"impl": "quack"}), device=h200)
    job = assembled(golden_run(box))
    ours = FusedBlock(impl="quack")
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match=r"not installed(.|\n)*optrush\[kernels\]"):
        ours.recompute(job)
    monkeypatch.setattr(technique, "library", lambda name: "1")
    assert ours.recompute(job) == len(job.model.blocks)
    job.model.blocks["0"].gate_up.matmul = torch.nn.functional.bilinear
    with pytest.raises(NeedsError, match="more than matrices"):
        ours.recompute(job)
