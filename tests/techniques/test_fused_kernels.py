"""The fused kernels: the baseline's loss and gradients, finite differences, bytes saved, and kernels interpreted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import interpreter
from meshes import further
from optrush import technique
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import CPU, parse_hardware
from optrush.kernels import rms_norm, rope, swiglu
from optrush.kernels.lora_matmul import copied_padded, empty_padded
from optrush.planner import search
from optrush.technique import Technique, missing, refuse_unmet
from optrush.techniques.fused_kernels import FusedKernels

from golden.make_golden import SIZES, T
from trials import assembled, first_gradients, furthest, golden_run, kept, ledgers, shaped

D, F, EPS = SIZES["hidden_size"], SIZES["intermediate_size"], 1e-5
MLP, NORM, ROPE = {}, {"mlp": "none", "norm": True}, {"mlp": "none", "rope": True}  # one kernel each
HALF = {"stream": "half"}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of its own


@pytest.mark.parametrize(("options", "amp"), further([(NORM, {}), (ROPE, HALF), (NORM, HALF), (ROPE, {})], 2), ids=str)
def test_in_half_precision_within_its_rounding(box, options, amp):
    """The gradients are no further from float32's than those of the baseline in the same precision, or hardly."""
    _, want = first_gradients(assembled(golden_run(box, packed=True)))
    (plain_loss, plain), (loss, ours) = (
        first_gradients(assembled(golden_run(box, packed=True, amp=amp, **with_)))
        for with_ in ({}, {"fused_kernels": options})
    )
    assert loss == pytest.approx(plain_loss, rel=2e-3)
    assert furthest(ours, want) < 1.25 * furthest(plain, want)
    assert [g.dtype for g in ours.values()] == [g.dtype for g in plain.values()]


@pytest.mark.parametrize("options", [MLP, NORM, ROPE, {"norm": True, "rope": True}], ids=str)
def test_which_kernels_are_taken(box, options):
    for block in assembled(golden_run(box, fused_kernels=options)).model.blocks.values():
        assert (block.mlp is not swiglu.gated_mlp) == (options is not NORM and options is not ROPE)
        for norm in (block.norm1, block.norm2):
            assert (norm.impl is rms_norm.fused_add_rms_norm) == ("norm" in options)
        assert (block.split_and_rope is rope.fused_split_and_rotate) == ("rope" in options)


def more(box, options: dict[str, Any], **others: Any) -> float:
    """Bytes that are saved for the backward pass, a token and block, beyond the baseline's."""
    jobs = (assembled(golden_run(box, rows=4, packed=True, **others, **w)) for w in ({}, {"fused_kernels": options}))
    plain, ours = map(kept, jobs)
    return (ours - plain) / (2 * 4 * T)


def test_bytes_saved_for_the_backward_pass(box):
    """mlp: silu(gate), and its product with up, less. norm: of each one float32 value less. rope: the same."""
    assert more(box, MLP) == -2 * F * 4
    assert more(box, NORM) == more(box, NORM, amp={}) == more(box, NORM, amp={"stream": "half"}) == -2 * 4 * D
    assert more(box, ROPE) == more(box, ROPE, amp={}) == more(box, ROPE, bf16={}) == 0


@pytest.mark.slow
def test_bytes_saved_by_a_compiled_norm(box):
    """None less, but a sum in the type of the stream, where that is wider."""
    assert round(more(box, NORM, compile={}) / D) == 0
    assert round(more(box, NORM, compile={}, amp={}) / D) == 2


def test_refused(box, tmp_path, monkeypatch):
    with pytest.raises(NeedsError, match="`fused-kernels` needs the native"):
        decide(golden_run(box, sets=["model.implementation=transformers"], fused_kernels={}))
    with pytest.raises(NeedsError, match="nothing is left to fuse"):
        decide(golden_run(box, fused_kernels={"mlp": "none"}))
    folder = shutil.copytree(box / "untied", tmp_path / "qwen3")
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": "qwen3", "attention_bias": True}))
    with pytest.raises(NeedsError, match="rotates the matmul's queries and keys"):
        decide(golden_run(box, sets=[f"model.path={folder}"], fused_kernels=ROPE))
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    FusedKernels().demand_triton(CPU)
    with pytest.raises(NeedsError, match="`fused-kernels` runs a Triton kernel"):
        FusedKernels().demand_triton(parse_hardware("h200")[0])


# --- the activation


SAME = nn.Identity()  # in the place of the product before
STREAM = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def drawn(dtype=torch.float64, *, bias=False):
    torch.manual_seed(0)
    down = nn.Linear(7, 5, bias=bias, dtype=dtype)
    return torch.randn(2, 3, 14, dtype=dtype, requires_grad=True), down


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_the_activation_by_finite_differences(bias):
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
        prepared = decide(golden_run(box, packed=True, **with_))
        return assembled(dataclasses.replace(prepared, techniques=[Doubled(), *prepared.techniques]))

    job = made(fused_kernels={})
    assert "its input is saved" in job.describe()
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


def test_quack_is_refused_where_it_cannot_run(box, monkeypatch):
    run = golden_run(box, fused_kernels={"mlp": "quack"}, bf16={})
    for device, what in ((None, "CUDA"), (parse_hardware("b200")[0], "Hopper")):
        with pytest.raises(NeedsError, match=what):
            decide(run, device=device)
    h200 = parse_hardware("h200")[0]
    decide(run, device=h200)
    with pytest.raises(NeedsError, match="float32"):
        decide(golden_run(box, fused_kernels={"mlp": "quack"}), device=h200)
    job = assembled(golden_run(box))
    ours = FusedKernels(mlp="quack")
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match=r"not installed(.|\n)*optrush\[kernels\]"):
        refuse_unmet(missing(ours))
    assert ours.recompute(job) == len(job.model.blocks)
    job.model.blocks["0"].gate_up.matmul = torch.nn.functional.bilinear
    with pytest.raises(NeedsError, match="other than matrices"):
        ours.recompute(job)


# --- the norm


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_the_norm_by_finite_differences(alone):
    torch.manual_seed(0)
    x, branch, weight = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((2, 3, 7), (2, 3, 7), (7,)))
    given = (x, None if alone else branch, weight, EPS)
    assert torch.autograd.gradcheck(rms_norm.fused_add_rms_norm, given)
    torch.testing.assert_close(rms_norm.fused_add_rms_norm(*given), rms_norm.add_rms_norm(*given))


def test_what_the_norm_is_predicted_to_save():
    def said(*withs: str) -> float:
        usual = ("attention", "compile", "fused-loss", "fused-kernels")
        return search.predict(shaped("llama-3.2-1b", *usual, *withs, rows=16), "h200").peak_bytes

    for others, values in ((["bf16"], 0), (["amp:stream=half"], 0), (["amp"], 2), (["amp", "compile:scope=model"], 0)):
        assert said(*others, "fused-kernels:norm=true") - said(*others) == 16 * 32768 * 2048 * values


def test_a_frozen_weight_has_no_gradient(box):
    job = assembled(golden_run(box, packed=True, lora={"rank": 4}, fused_kernels=NORM))
    want = assembled(golden_run(box, packed=True, lora={"rank": 4}))
    assert furthest(first_gradients(job)[1], first_gradients(want)[1]) < 1e-5
    _, dw = rms_norm.norm_backward(
        torch.ones(2, 4), torch.ones(4), torch.ones(2), torch.ones(2, 4), torch.ones(2, 4), False
    )
    assert dw.shape == (0,)


def interpret_norm() -> None:
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


# --- the rotation


@pytest.mark.parametrize(("K", "group"), further([(2, 3), (3, 1), (1, 1)], 1))
def test_gradients_of_the_rotation_by_finite_differences(K, group):
    """With cosines and sines that are not the same in both halves."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, K, group + 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 2, 3, 1, 6, dtype=torch.float64)
    given = qkv, cos, sin, None, None
    assert torch.autograd.gradcheck(rope.fused_split_and_rotate, given)
    torch.testing.assert_close(rope.fused_split_and_rotate(*given), rope.split_and_rotate(*given), rtol=0, atol=0)


def test_operators_are_what_the_compiler_is_told():
    """Fakes, strides and aliases: one token of one head is where a view would pass for a copy."""
    for shape in ((2, 3, 2, 4, 6), (1, 1, 1, 3, 6)):
        B, T, K, group, E = shape
        turns = (torch.randn(B, T, 1, E), torch.randn(B, T, 1, E))
        heads = [torch.randn(B, T, n, E) for n in (K * (group - 2), K, K)]
        for operator, given in ((rope.rotation, [torch.randn(shape)]), (rope.rotation_backward, heads)):
            torch.library.opcheck(operator, (*given, *turns))


def interpret_rotation() -> None:
    """Both ways against float64, at widths that are and are no power of two; in a process of its own.

    The interpreter cuts to bfloat16 where a GPU rounds: a whole unit in the last place is near.
    """
    from optrush.kernels import rope_triton

    torch.manual_seed(0)
    units = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
    for B, length, K, group, E in (
        (2, 37, 2, 4, 64),
        (1, 5, 3, 1, 16),
        (2, 9, 1, 7, 80),
        (1, 40, 2, 2, 256),
        (0, 4, 2, 2, 8),
    ):
        for kind, turns in (*((t, torch.float32) for t in units), (torch.bfloat16, torch.bfloat16)):
            near = {"rtol": units[kind], "atol": 1e-6}
            # As a model may hand them over: rows of a longer tensor, the same turns for every row of a batch.
            qkv = torch.randn(B, length + 1, K, group + 2, E).to(kind)[:, 1:]
            cos, sin = torch.randn(2, 1, length, 1, E).to(turns).expand(-1, B, -1, -1, -1)
            grads = [torch.randn(B, n, length, E).to(kind).transpose(1, 2) for n in (K * group, K, K)]
            sure = cos.double(), sin.double()
            found = rope_triton.rope_forward(qkv, cos, sin)
            for one, want in zip(found, rope.rotation(qkv.double(), *sure), strict=True):
                assert one.dtype == kind and one.is_contiguous()
                torch.testing.assert_close(one.double(), want, **near)
            assert torch.equal(found[2], qkv[:, :, :, -1]), "values are moved, not touched"
            wanted = rope.rotation_backward(*(g.double() for g in grads), *sure)
            for room in (0, 8):
                d_qkv = empty_padded(qkv, B, length, K * (group + 2) * E, columns=room).view(qkv.shape)
                back = rope_triton.rope_backward(*grads, cos, sin, d_qkv)
                assert back is d_qkv and back.dtype == kind
                torch.testing.assert_close(back.double(), wanted, **near)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_interpreted():
    interpreter.says(__file__, "near")


if __name__ == "__main__":
    interpret_norm()
    interpret_rotation()
    print("near")


@pytest.mark.parametrize(("shape", "own"), [("llama-3.2-1b", set()), ("qwen2.5-0.5b", {"forward.added.qkv"})])
def test_adapters_of_a_linear_with_a_bias_are_added_by_themselves(shape, own):
    run = shaped(shape, "bf16", "lora", "attention:impl=fa4", "compile", "fused-kernels:mlp=quack")
    (book,), *_ = ledgers(run, parse_hardware("h200")[0], 1)
    assert {work.name for work in book.work if work.name.startswith("forward.added.") and not work.gone} == own
