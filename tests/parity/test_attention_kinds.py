"""Windows, sinks and every kind of RoPE in our decoder against transformers, and each kernel against the plain one."""

from typing import Any

import pytest
import torch
from test_delta_rule import QWEN35
from test_latent_attention import YOUTU
from transformers import Llama4TextConfig

from optrush import hardware
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.kernels.attention import masked, sdpa
from optrush.models.decoder import Decoder
from optrush.models.hf import load
from optrush.models.rope_angles import query_scales
from optrush.models.shapes import SHAPES, ModelShape

from memory import check_prediction
from parity_models import EXPERTS, SIZES, compare_gradients, materialise, packed, reference, reference_alone, save
from trials import shaped

ROWS = [[5, 7, 3], [19, 1]]


def roped(kind: str, family: str = "llama", **more: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1000.0, "original_max_position_embeddings": 16, **more}
    return {**SIZES, "model_type": family, "rope_parameters": rope}


LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 2.0, 4.0, 1.0]}
QWEN2 = {**SIZES, "model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True}
CASES: dict[str, dict[str, Any]] = {
    "mistral windows": {**SIZES, "model_type": "mistral", "sliding_window": 4},
    "mixtral windows": {
        **SIZES, "model_type": "mixtral", "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2
    },
    "qwen2 windows above": {**QWEN2, "max_window_layers": 1},
    "qwen3 layers": {**QWEN2, "model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]},
    "llama4 chunks of layers without a rotation": {
        **SIZES, "model_type": "llama4_text", "moe_layers": [], "intermediate_size_mlp": 28, "use_qk_norm": False,
        "no_rope_layers": [1, 0], "layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 5,
        "floor_scale": 3, "attn_scale": 0.7, "pad_token_id": None,
    },
    "yarn": roped("yarn", factor=4.0),
    "yarn by ratio": roped("yarn", factor=None, beta_fast=8.0, beta_slow=0.5, truncate=False),
    "yarn scaled": roped("yarn", "qwen3", factor=8.0, mscale=0.7, mscale_all_dim=1.2),
    "yarn attention": roped("yarn", factor=4.0, attention_factor=1.3),
    "longrope": roped("longrope", "qwen2", **LONG),
    "longrope scaled": roped("longrope", factor=32.0, **LONG),
    "dynamic": {**roped("dynamic", factor=4.0), "max_position_embeddings": 8},
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["masked", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_a_kind_is_that_of_transformers(case, kernel, tmp_path):
    """Logits and gradients of packed documents, each alone in transformers, and rows of one document."""
    theirs = reference(CASES[case])
    hf = save(theirs, tmp_path)
    ours, recipe = load(tmp_path, hf, None, torch.float32, 0)
    assert isinstance(ours, Decoder)
    materialise(ours, recipe)
    ours.set_attention(kernel)
    batch = packed(ROWS, 20, 61)
    want, loss = reference_alone(theirs, batch)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    found = [part for row, n in zip(ours.head.logits(hidden), ROWS, strict=True) for part in row[: sum(n)].split(n)]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    ours.head(hidden, batch.labels).backward()
    loss.backward()
    compare_gradients(ours, recipe, theirs, every=False)
    changed = batch.tokens.clone()
    changed[0, 2] += 1
    again = ours(changed % 61, batch.positions, batch.documents)
    assert torch.equal(again[0, 5:15], hidden[0, 5:15]) and not torch.equal(again[0, 2], hidden[0, 2])
    one = packed([[19]], 20, 61, single=True)  # of one document, with padding
    alone = ours(batch.tokens[1:], one.positions, one.documents)
    torch.testing.assert_close(alone[0, :19], hidden[1, :19], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sunk", [False, True])
def test_kernels_are_the_plain_softmax(single, window, sunk):
    """Written out query by query in float64, with the gradient of the sinks too; a bad value stays in its document."""
    batch = packed([[11]] if single else [[5, 6]], 11, 61, single=single)
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 11, n, 4, dtype=torch.float64, generator=drawn, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=drawn, requires_grad=True) if sunk else None
    rows = []
    for t in range(11):
        first = 0 if single or t < 5 else 5
        first = first if window is None else max(first, t - window + 1)
        heads = []
        for h in range(4):
            weights = torch.exp(k[0, first : t + 1, h // 2] @ q[0, t, h] / 2)
            total = weights.sum() if sinks is None else weights.sum() + sinks[h].exp()
            heads.append((weights / total) @ v[0, first : t + 1, h // 2])
        rows.append(torch.stack(heads))
    want = torch.stack(rows)[None]
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    grad = torch.randn(want.shape, dtype=torch.float64, generator=drawn)
    wanted = torch.autograd.grad(want, inputs, grad)
    for attend in (masked, sdpa):
        got = attend(q, k, v, batch.documents, window=window, sinks=sinks)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, inputs, grad), wanted, strict=True):
            torch.testing.assert_close(a, b)
        if not single:
            bad = v.detach().clone()
            bad[0, 2] = float("nan")
            spoiled = attend(q, k, bad, batch.documents, window=window, sinks=sinks)
            assert torch.equal(spoiled[0, 5:], got[0, 5:])
            assert spoiled[0, 2:5].isnan().all() and not spoiled[0, :2].isnan().any()


# --- chunks, and layers without rotary embedding

CHUNKED = {
    "model_type": "llama4_text", "hidden_size": 1024, "intermediate_size": 256, "intermediate_size_mlp": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 2000,
    "num_local_experts": 8, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 512,
}  # fmt: skip


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setitem(SHAPES, "chunked", CHUNKED)


def test_chunks_begin_with_their_document():
    """Boundaries of rows with padding; documents that fit into a chunk are left as they are."""
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    cut = batch.documents.in_chunks(6, batch.positions)
    assert cut.ids.tolist()[0] == [1] * 5 + [2] * 6 + [3] + [4] * 3 + [5] * 5
    assert cut.ids.tolist()[1] == [1] * 6 + [2] * 6 + [3] * 6 + [4, 5]
    assert cut.starts.tolist()[:11] == [0, 5, 11, 12, 15, 20, 26, 32, 38, 39, 40] and set(cut.starts[11:].tolist()) == {
        40
    }
    assert (cut.longest, cut.single) == (6, False) and cut.filled is batch.documents.filled
    assert batch.documents.in_chunks(20, batch.positions) is batch.documents


def test_queries_grow_with_their_position():
    """At positions that no small model reaches, by the formula in float64."""
    positions = torch.tensor([[0, 8190, 8191, 16383, 1_000_000]], dtype=torch.int32)
    found = query_scales((8192, 0.1), positions)[0, :, 0, 0]
    want = ((positions[0].double() + 1) / 8192).floor().log1p() * 0.1 + 1
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=0)
    assert torch.equal(query_scales(None, positions), torch.ones(1, 5, 1, 1))


def test_published_sizes_are_counted():
    """Of Scout, whose sizes are transformers' defaults: 109B in all with its tower, 17B of them active."""
    shape = ModelShape.read(Llama4TextConfig().to_dict())
    assert 107e9 < shape.parameters < 108.5e9
    assert 16.5e9 < shape.matrix_parameters + shape.vocab * shape.width < 17.5e9


@pytest.mark.usefixtures("chunked")
def test_a_plan_of_chunks_is_what_torch_holds():
    check_prediction(shaped("chunked", "bf16", "fused-adamw", "attention", "fused-loss", seq=1024, rows=4), rel=0.03)


@pytest.mark.parametrize(("given", "found"), [
    ({"no_rope_layers": [1, 0]}, "2 values in no_rope_layers, and 3 layers"),
    ({"layer_types": ["full_attention"]}, "1 values in layer_types, and 3 layers"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer types 'sliding_attention'"),
    ({"attention_chunk_size": None}, "attention_chunk_size is None"), ({"attn_scale": None}, "attn_scale is None"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn', where our decoder has default"),
])  # fmt: skip
def test_chunks_that_are_not_those_of_transformers(given, found):
    with pytest.raises((NeedsError, ConfigError), match=found):
        ModelShape.read(EXPERTS["llama4_text"] | given)


# --- what has no way to such layers

WINDOWS = {**SHAPES["qwen2.5-0.5b"], "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}
DYNAMIC = {**SHAPES["qwen2.5-0.5b"], "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
ODD = {
    "windowed": WINDOWS, "dynamic": DYNAMIC, "chunked-dense": {**CHUNKED, "moe_layers": []}, "latent": YOUTU,
    "delta": {**QWEN35, "num_hidden_layers": 4, "vocab_size": 32000},
}  # fmt: skip
MATRICES = "whose matrices it does not support"
WITHOUT = (
    "tensor:size=2", "pipeline:size=2", "context:size=2", "fp8", "muon", "cuda-graphs", "fused-kernels:mlp=quack",
)  # fmt: skip
HEADS, CUT = "query and key heads of 192, value heads of 128", "context:size=2,kind=gather"


@pytest.fixture
def odd(monkeypatch):
    for name, hf in ODD.items():
        monkeypatch.setitem(SHAPES, name, hf)


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("shape", "technique", "found", "card"), [
    *(("latent", name, f"latent attention, {MATRICES}", "h100") for name in WITHOUT),
    *(("delta", name, f"layers of a delta rule, {MATRICES}", "h100") for name in WITHOUT),
    ("latent", "fused-kernels:rope=true", "by several matmuls, through latents", "h100"),
    ("latent", "attention:impl=fa4", HEADS, "h100"), ("latent", "attention:impl=cudnn", HEADS, "h100"),
    ("delta", "fused-kernels:norm=true", "norms multiply by 1 \\+ weight", "h100"),
    ("delta", "fused-kernels:rope=true", "the model normalizes each of them first", "h100"),
    ("chunked-dense", "attention:impl=cudnn", "attention in chunks of 512 tokens", "h100"),
    ("chunked-dense", "longlora", "chunks or capped scores in the model", "h100"),
    ("chunked-dense", "fused-kernels:rope=true", "rotates neighbouring pairs", "h100"),
    ("chunked-dense", "context:size=2", "layers without rotary embedding", "h100"),
    ("chunked-dense", "tensor:size=2", "layers without rotary embedding", "h100"),
    ("windowed", "attention:impl=cudnn", "a sliding window of 512 tokens", "h100"),
    ("windowed", CUT, "a sliding window of 512 tokens", "h100"),
    ("dynamic", CUT, "'dynamic', whose angles depend on the length", "h100"),
    ("gpt-oss-20b", "attention:impl=cudnn", "attention sinks in the model", "h100"),
    ("gpt-oss-20b", "attention:impl=fa4", "attention sinks in the model", "5090"),
])  # fmt: skip
def test_what_has_no_way_to_it(shape, technique, found, card):
    """flash-attn-4 has no gradients with sinks on the newest cards for desktops."""
    device, _ = hardware.parse_hardware(card)
    more, ranks = ["compile"] * (shape in ("latent", "delta")), 1 + ("size=2" in technique)
    seq = 128 if shape == "gpt-oss-20b" else 1024  # as long as its window
    with pytest.raises(NeedsError, match=found):
        decide(shaped(shape, "bf16", *more, technique, seq=seq, rows=2), device=device, ranks=ranks)


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(
    ("shape", "impl", "seq"), [("windowed", "cudnn", 512), ("windowed", "fa4", 1024), ("gpt-oss-20b", "fa4", 128)]
)
def test_what_kernels_do_have(shape, impl, seq):
    """Up to the length of the window there is nothing to cut."""
    device, _ = hardware.parse_hardware("h100")
    decide(shaped(shape, "bf16", f"attention:impl={impl}", seq=seq, rows=1), device=device, ranks=1)
