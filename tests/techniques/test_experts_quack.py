"""Experts by QuACK's products, of which this machine has references, against plain ones: a layer, and whole models."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

import interpreter
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import parse_hardware
from optrush.kernels import swiglu
from optrush.models.experts import Experts
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import search
from optrush.technique import library
from optrush.techniques.fused_kernels import FusedKernels
from techniques.test_adapted_feed import CLASSES

from golden import make_golden
from trials import assembled, first_gradients, furthest, golden_run, shaped

D, F, N, K, TOKENS = 16, 24, 6, 2, 11
DTYPE = torch.float64


def rows_of(a, numbers):
    if numbers is None:
        return a
    assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    return a[numbers.long()]


def bounds(given):
    assert given.dtype == torch.int32
    found = given.tolist()
    return list(itertools.pairwise(found))


def product(a, b, out, config, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, dynamic_scheduler=False):
    assert (cu_seqlens_m is None) != (cu_seqlens_k is None) and (A_idx is None or config.cluster_n == 1)
    assert all(1 in t.stride() for t in (a, b, out))
    out.fill_(float("nan"))
    if cu_seqlens_m is not None:
        a = rows_of(a, A_idx)
        for group, (first, last) in enumerate(bounds(cu_seqlens_m)):
            out[first:last] = a[first:last] @ b[group]
    else:
        a = rows_of(a.T, A_idx)
        for group, (first, last) in enumerate(bounds(cu_seqlens_k)):
            out[group] = a[first:last].T @ b[first:last]


def gated(a, b, activation, config, cu_seqlens_m, A_idx, dynamic_scheduler):
    assert activation == "swiglu" and config.cluster_n == 1
    pairs = a.new_empty(len(A_idx), b.shape[-1])
    product(a, b, pairs, config, cu_seqlens_m, A_idx=A_idx)
    return pairs, swiglu.swiglu(pairs)


def dgated(a, b, pairs, activation, config, colvec_scale, colvec_reduce, cu_seqlens_m, A_idx, dynamic_scheduler):
    assert activation == "swiglu" and colvec_reduce and config.cluster_n == 1
    grad = a.new_empty(len(A_idx), b.shape[-1])
    product(a, b, grad, config, cu_seqlens_m, A_idx=A_idx)
    d_pairs, activation = swiglu.swiglu_backward(pairs, grad * colvec_scale[:, None])
    scale = colvec_scale.dtype
    return d_pairs, (activation * colvec_scale[:, None]).to(a.dtype), (grad.to(scale) * activation.to(scale)).sum(1)


@pytest.fixture
def quack(monkeypatch):
    interface = SimpleNamespace(gemm_tuned=SimpleNamespace(fn=product), gemm_gated=gated, gemm_dgated=dgated)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(gemm_interface=interface))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=SimpleNamespace))


def layer(**others):
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "num_experts": N, "num_experts_per_tok": K}
    shape = ModelShape.read({**SHAPES["qwen3-30b-a3b"], **sizes})
    shape = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, **others))
    torch.manual_seed(0)
    experts = Experts(shape, device=torch.device("cpu"), dtype=DTYPE)
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    return experts


def run(experts, case, how=lambda f: f):
    torch.manual_seed(1)
    h = torch.randn(1, 0 if case == "no token" else TOKENS, D, dtype=DTYPE)
    with torch.no_grad():
        h[..., 0] = 40.0
        experts.router[:, 0] = torch.tensor([1, 1, 0, 0, 0, 0]) if case == "two experts" else 0.0
    h.requires_grad_()
    out, _ = how(experts)(h, None)
    given = [h, *(p for p in experts.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), given)]


@pytest.mark.parametrize("case", ["scattered", "two experts", "no token"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("slot", ["feed", "grouped"])
def test_a_layer_and_its_gradients(quack, case, frozen, slot):
    """Of tokens, router and both matrices; experts without a row have gradients of zero."""
    from optrush.kernels import experts_quack

    experts = layer()
    for name in ("gate_up", "down") if frozen else ():
        experts.get_parameter(name).requires_grad_(False)
    want = run(experts, case)
    setattr(experts, slot, getattr(experts_quack, f"{slot}_quack"))
    for got, other in zip(run(experts, case), want, strict=True):
        torch.testing.assert_close(got, other)
        assert got.is_contiguous(), "of a weight's gradient a copy would be made"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph(quack):
    """The operators say of what shapes and strides their results are; what is of this machine's own is checked."""
    from optrush.kernels import experts_quack

    experts = layer()
    want = run(experts, "scattered")
    experts.feed, experts.grouped = experts_quack.feed_quack, experts_quack.grouped_quack
    found = run(experts, "scattered", lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
    for got, other in zip(found, want, strict=True):
        torch.testing.assert_close(got, other)


def test_what_is_saved(quack):
    """Tokens, gate and up, and places and weights of rows: nothing else with values of each row."""
    from optrush.kernels import experts_quack

    def kept(experts):
        mine = {p.untyped_storage().data_ptr() for p in experts.parameters()}
        seen = {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in mine:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(experts, "scattered")
        return sum(seen.values())

    experts = layer()
    plain = kept(experts)
    experts.feed = experts_quack.feed_quack
    # silu(gate), what that multiplies and its product, the activation by its weight: 4 F; rows of tokens: D.
    assert plain - kept(experts) > TOKENS * K * (3 * F + D) * 8


# --- whole models, and the plan

SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "dense and sparse layers": {"model_type": "qwen3_moe", **SIZES, "mlp_only_layers": [1]},
    "shared experts": {
        "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
    },
    "weights before experts": {
        "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 5,
        "attn_scale": 0.5, "use_qk_norm": True, "attn_temperature_tuning": True,
    },
}  # fmt: skip
ADAPTED = {"lora": {"targets": ["experts", "q_proj"], "rank": 8}}


@pytest.mark.parametrize(
    ("family", "with_", "whole"),
    [("dense and sparse layers", {}, True), ("dense and sparse layers", {"recompute": {}}, True),
     ("dense and sparse layers", ADAPTED, False), ("dense and sparse layers", {"int8": {}, **ADAPTED}, False),
     ("shared experts", {}, True), ("weights before experts", {}, False)],
    ids=str,
)  # fmt: skip
def test_gradients_of_whole_models(quack, tmp_path, family, with_, whole):
    from optrush.kernels import experts_quack

    make_golden.write_model(tmp_path / "untied", False, **FAMILIES[family])
    make_golden.write_documents(tmp_path / "text.jsonl", False)

    def job(**more):
        made = assembled(golden_run(tmp_path, packed=True, **with_, **more), CLASSES)
        for t in made.trained:
            if t.name.endswith("_b"):  # of adapters of experts, which are zeros
                t.local.copy_(torch.randn(t.local.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
        return made

    ours = job(fused_kernels={"mlp": "quack"})
    layers = [block.experts for block in ours.model.blocks.values() if block.experts is not None]
    assert all(e.grouped is experts_quack.grouped_quack for e in layers)
    assert all((e.feed is experts_quack.feed_quack) == whole for e in layers)
    assert ("QuACK computes only their matmuls" in ours.describe()) == (not whole)
    (loss, grads), (want_loss, want) = first_gradients(ours), first_gradients(job())
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5


USUAL = ("bf16", "attention", "compile", "fused-loss", "fused-adamw")


@pytest.mark.parametrize("more", [(), ("recompute",), ("lora:targets=experts",), ("lora", "nf4"), ("lora", "int8")])
def test_the_plan(more):
    """No rate is assumed of what is not measured: less is moved, and where whole layers are, less is kept."""

    def said(mlp):
        return search.predict(shaped("qwen3-30b-a3b", *USUAL, *more, f"fused-kernels:mlp={mlp}", rows=64), "h200")

    quack, triton = said("quack"), said("triton")
    whole = not any(name.startswith("lora") for name in more)
    assert (quack.peak_bytes < triton.peak_bytes) == whole and quack.peak_bytes <= triton.peak_bytes
    assert quack.tokens_per_s > triton.tokens_per_s or not whole  # adapters of attention have rules of their own
    work = [{w.name: w.seconds for w in one.work} for one in (quack, triton)]
    assert work[0]["forward.grouped"] == work[1]["forward.grouped"]
    assert (work[0]["forward.rows"] < work[1]["forward.rows"]) == whole


def test_a_clamped_activation_is_refused():
    with pytest.raises(NeedsError, match="a clamped activation") as caught:
        decide(shaped("gpt-oss-20b", *USUAL, "fused-kernels:mlp=quack"), device=parse_hardware("h200")[0])
    assert caught.value.do == "take mlp=none"


def test_a_search_tries_it_where_a_step_was_measured():
    both = [{}, {"mlp": "quack"}]
    for shape, more, device, found in (
        ("qwen3-30b-a3b", (), "h200", both), ("qwen3-30b-a3b", (), "a100-40", [{}]), ("llama-3.2-1b", (), "h200", both),
        ("qwen3-30b-a3b", ("lora:targets=experts",), "h200", [{}]), ("qwen3-30b-a3b", ("lora",), "h200", [{}]),
    ):  # fmt: skip
        env = decide(shaped(shape, *USUAL, *more), device=parse_hardware(device)[0]).env
        assert list(FusedKernels.variants(env)) == found


def interpreted():
    from optrush.kernels.experts_triton import launch_sum_of_rows

    for S, k, width in ((5, 2, 24), (3, 8, 1300), (1, 1, 1), (0, 2, 8)):
        y, weights = torch.randn(S * k, width), torch.rand(S, k)
        places = torch.randperm(S * k).view(S, k)
        torch.testing.assert_close(launch_sum_of_rows(y, places, None), y[places].sum(1))
        want = (y[places] * weights[..., None]).sum(1)
        torch.testing.assert_close(launch_sum_of_rows(y, places, weights), want)
    print("equal")


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_torchs_sums():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
