"""The fused rotation: the baseline's losses and gradients, finite differences, bytes kept, its kernel interpreted."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch

import interpreter
from optrush.errors import NeedsError
from optrush.hardware import CPU, named
from optrush.kernels import rope
from optrush.kernels.lora_matmul import empty_padded
from optrush.resolve import resolve
from optrush.technique import demand_triton

from golden.make_golden import CASES, SIZES
from trials import assembled, first_gradients, furthest, golden_run, kept

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of its own


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("chat", {}),
        ("tied", {"recompute": {}}),
        ("chat", {"selective_recompute": {"ops": "products"}}),
        ("tied", {"compile": {}}),
        ("chat", {"compile": {"scope": "model"}, "fused_norm": {}}),
    ],
    ids=str,
)
def test_same_loss_and_gradients(box, name, others):
    want_loss, want = first_gradients(assembled(golden_run(box, CASES[name], packed=True)))
    job = assembled(golden_run(box, CASES[name], packed=True, fused_rotation={}, **others))
    assert all(block.split_and_rope is rope.fused_split_and_rotate for block in job.model.blocks.values())
    loss, grads = first_gradients(job)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < 1e-5


@pytest.mark.parametrize(("K", "group"), [(2, 3), (3, 1), (1, 1)])
def test_gradients_by_finite_differences(K, group):
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


@pytest.mark.parametrize("others", [{"amp": {}}, {"amp": {"stream": "half"}}, {"bf16": {}}], ids=str)
def test_in_half_precision_within_its_rounding(box, others):
    """The gradients are no further from float32's than those of the baseline in the same precision, or hardly."""
    _, want = first_gradients(assembled(golden_run(box, packed=True)))
    (plain_loss, plain), (loss, ours) = (
        first_gradients(assembled(golden_run(box, packed=True, **others, **with_)))
        for with_ in ({}, {"fused_rotation": {}})
    )
    assert loss == pytest.approx(plain_loss, rel=2e-3)
    assert furthest(ours, want) < 1.25 * furthest(plain, want)
    assert [g.dtype for g in ours.values()] == [g.dtype for g in plain.values()]


@pytest.mark.parametrize("others", [{}, {"amp": {}}, {"compile": {}, "amp": {}}, {"compile": {}, "bf16": {}}], ids=str)
def test_as_much_is_kept(box, others):
    """So that it predicts nothing."""
    plain, ours = (
        kept(assembled(golden_run(box, rows=4, packed=True, **others, **with_)))
        for with_ in ({}, {"fused_rotation": {}})
    )
    assert ours == plain


def test_refused(box, tmp_path, monkeypatch):
    with pytest.raises(NeedsError, match="`fused-rotation` needs the native"):
        resolve(golden_run(box, sets=["model.implementation=transformers"], fused_rotation={}))
    folder = shutil.copytree(box / "untied", tmp_path / "qwen3")
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": "qwen3", "attention_bias": True}))
    with pytest.raises(NeedsError, match="turns queries and keys as the product makes them"):
        resolve(golden_run(box, sets=[f"model.path={folder}"], fused_rotation={}))
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    demand_triton("fused-rotation", CPU)
    with pytest.raises(NeedsError, match="`fused-rotation` runs a Triton kernel"):
        demand_triton("fused-rotation", named("h200")[0])


def interpreted() -> None:
    """Both ways against float64, at widths that are and are no power of two; in a process of its own.

    The interpreter cuts to bfloat16 where a GPU rounds: a whole unit in the last place is near.
    """
    from optrush.kernels import rope_triton

    torch.manual_seed(0)
    units = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
    for B, T, K, group, E in (
        (2, 37, 2, 4, 64),
        (1, 5, 3, 1, 16),
        (2, 9, 1, 7, 80),
        (1, 40, 2, 2, 256),
        (0, 4, 2, 2, 8),
    ):
        for kind, turns in (*((t, torch.float32) for t in units), (torch.bfloat16, torch.bfloat16)):
            near = {"rtol": units[kind], "atol": 1e-6}
            # As a model may hand them over: rows of a longer tensor, the same turns for every row of a batch.
            qkv = torch.randn(B, T + 1, K, group + 2, E).to(kind)[:, 1:]
            cos, sin = torch.randn(2, 1, T, 1, E).to(turns).expand(-1, B, -1, -1, -1)
            grads = [torch.randn(B, n, T, E).to(kind).transpose(1, 2) for n in (K * group, K, K)]
            sure = cos.double(), sin.double()
            found = rope_triton.rope_forward(qkv, cos, sin)
            for one, want in zip(found, rope.rotation(qkv.double(), *sure), strict=True):
                assert one.dtype == kind and one.is_contiguous()
                torch.testing.assert_close(one.double(), want, **near)
            assert torch.equal(found[2], qkv[:, :, :, -1]), "values are moved, not touched"
            wanted = rope.rotation_backward(*(g.double() for g in grads), *sure)
            for room in (0, 8):
                d_qkv = empty_padded(qkv, B, T, K * (group + 2) * E, columns=room).view(qkv.shape)
                back = rope_triton.rope_backward(*grads, cos, sin, d_qkv)
                assert back is d_qkv and back.dtype == kind
                torch.testing.assert_close(back.double(), wanted, **near)
    print("near")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernel_interpreted():
    interpreter.says(__file__, "near")


if __name__ == "__main__":
    interpreted()
