"""The fused norm: the baseline's losses and gradients, finite differences, bytes kept, and its kernels interpreted."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import interpreter
from optrush.config import parse_config
from optrush.errors import NeedsError
from optrush.hardware import CPU, named
from optrush.kernels import rms_norm
from optrush.kernels.lora_matmul import copied_padded
from optrush.planner import search
from optrush.resolve import resolve
from optrush.technique import demand_triton

from golden.make_golden import CASES, SIZES, T
from trials import assembled, first_gradients, furthest, golden_run, kept

D, EPS = SIZES["hidden_size"], 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of its own


@pytest.mark.parametrize("name", ["chat", "tied"])
@pytest.mark.parametrize("others", [{}, {"recompute": {}}, {"compile": {}}, {"compile": {"scope": "model"}}], ids=str)
def test_same_loss_and_gradients(box, name, others):
    want_loss, want = first_gradients(assembled(golden_run(box, CASES[name], packed=True)))
    job = assembled(golden_run(box, CASES[name], packed=True, fused_norm={}, **others))
    loss, grads = first_gradients(job)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < 1e-5


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_by_finite_differences(alone):
    torch.manual_seed(0)
    x, branch, weight = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((2, 3, 7), (2, 3, 7), (7,)))
    given = (x, None if alone else branch, weight, EPS)
    assert torch.autograd.gradcheck(rms_norm.fused_add_rms_norm, given)
    torch.testing.assert_close(rms_norm.fused_add_rms_norm(*given), rms_norm.add_rms_norm(*given))


@pytest.mark.parametrize("stream", ["float32", "half"])
def test_under_autocast_within_its_rounding(box, stream):
    """The gradients are no further from float32's than those of the baseline under the same autocast, or hardly."""
    _, want = first_gradients(assembled(golden_run(box, packed=True)))
    amp = {"stream": stream}
    (plain_loss, plain), (loss, ours) = (
        first_gradients(assembled(golden_run(box, packed=True, amp=amp, **with_))) for with_ in ({}, {"fused_norm": {}})
    )
    assert loss == pytest.approx(plain_loss, rel=2e-3)
    assert furthest(ours, want) < 1.25 * furthest(plain, want)
    assert {g.dtype for g in ours.values()} == {torch.float32}


def test_what_is_kept(box):
    """Of each norm one float32 value less. Compiled, none; but a sum in the stream's type, where that is wider."""

    def more(**others: Any) -> int:
        plain, ours = (
            kept(assembled(golden_run(box, rows=4, packed=True, **others, **with_)))
            for with_ in ({}, {"fused_norm": {}})
        )
        return round((ours - plain) / (2 * 4 * T * D))  # bytes of D values a token and block

    assert more() == more(amp={}) == more(amp={"stream": "half"}) == -2 * 4
    assert more(compile={}) == more(compile={}, amp={"stream": "half"}) == more(compile={}, bf16={}) == 0
    assert more(compile={}, amp={}) == 2


def test_what_it_predicts():
    text = """
model: {shape: llama-3.2-1b}
objective: pretrain
data: {random: 64}
batch: {seq: 2048, tokens: 32768, micro_tokens: 32768}
output: unused
with: {attention: {}, compile: {}, fused-loss: {}, fused-block: {}}
"""

    def said(*withs: str) -> float:
        return search.predict(parse_config(text, "x", (), withs), "h200").peak_bytes

    for others, values in ((["bf16"], 0), (["amp:stream=half"], 0), (["amp"], 2), (["amp", "compile:scope=model"], 0)):
        assert said(*others, "fused-norm") - said(*others) == 16 * 32768 * 2048 * values


def test_a_frozen_weight_has_no_gradient(box):
    job = assembled(golden_run(box, packed=True, lora={"rank": 4}, fused_norm={}))
    want = assembled(golden_run(box, packed=True, lora={"rank": 4}))
    assert furthest(first_gradients(job)[1], first_gradients(want)[1]) < 1e-5
    _, dw = rms_norm.norm_backward(
        torch.ones(2, 4), torch.ones(4), torch.ones(2), torch.ones(2, 4), torch.ones(2, 4), False
    )
    assert dw.shape == (0,)


def test_refused(box, monkeypatch):
    with pytest.raises(NeedsError, match="native"):
        resolve(golden_run(box, sets=["model.implementation=transformers"], fused_norm={}))
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    demand_triton("fused-norm", CPU)
    with pytest.raises(NeedsError, match="`fused-norm` runs a Triton kernel"):
        demand_triton("fused-norm", named("h200")[0])


def interpreted() -> None:
    """Both kernels against float64, at widths that are and are no power of two; in a process of its own."""
    from optrush.kernels import rms_norm_triton

    torch.manual_seed(0)
    for rows, width in ((5, 2048), (3, 300), (1, 8192), (9, 96), (0, 64)):
        for types in ((torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.bfloat16), (torch.bfloat16,) * 3):
            stream, narrow, out = types
            x, past = (torch.randn(rows, width).to(stream) for _ in range(2))
            past, room = copied_padded(past, rows), 7 * (rows % 2)
            branch, grad = torch.randn(rows, width).to(narrow), torch.randn(rows, width).to(out)
            weight = torch.randn(width)
            near = 1e-5 if out == torch.float32 else 2e-2
            for added in (None, branch):
                total, normed, scale = rms_norm_triton.rms_norm_forward(x, added, weight, EPS, out, room)
                want, wanted = rms_norm.add_rms_norm(x, added, weight, EPS)
                assert total.dtype == want.dtype and normed.dtype == out and scale.dtype == torch.float32
                assert normed.stride() == (width + room, 1) and total.is_contiguous()
                torch.testing.assert_close(total, want)
                torch.testing.assert_close(normed.float(), wanted.float(), rtol=near, atol=near)
            sure = [t.double() for t in (total, weight, scale, past, grad)]
            for learns in (True, False):
                dx, dw = rms_norm_triton.rms_norm_backward(total, weight, scale, past, grad, learns, room)
                first, second = rms_norm.norm_backward(*sure, learns)
                assert dx.stride() == (width + room, 1)
                torch.testing.assert_close(dx.double(), first, rtol=near, atol=near)
                torch.testing.assert_close(dw.double(), second, rtol=near, atol=near * rows)
                assert dx.dtype == stream and dw.dtype == weight.dtype and len(dw) == (width if learns else 0)
    print("near")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_interpreted():
    interpreter.says(__file__, "near")


if __name__ == "__main__":
    interpreted()
