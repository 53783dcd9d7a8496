"""`HFModel`: GPT-2, Gemma 2 and Gemma 3 (text) against transformers itself; what its probe refuses."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshes import further
from optrush.errors import NeedsError
from optrush.models import hf as hf_module
from optrush.models.experts import TheirExperts, take_experts
from optrush.models.families import UNSEPARATED
from optrush.models.hf import HFModel, load, load_hf, probe_model

from parity_models import (
    EXPERTS,
    FAMILIES,
    SIZES,
    THEIR_EXPERTS,
    compare_alone,
    compare_export,
    compare_gradients,
    compare_isolated,
    compare_step,
    materialise,
    packed,
    reference,
    reference_alone,
    save,
)

MODELS = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "gemma2": {**SIZES, "model_type": "gemma2", "sliding_window": 4, "final_logit_softcapping": 5.0},
    "gemma3": {
        **SIZES, "model_type": "gemma3_text", "sliding_window": 4, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {**SIZES, "model_type": "cohere", "logit_scale": 0.25, "pad_token_id": 0},
    "phi": {**SIZES, "model_type": "phi", "hidden_size": 32},
}  # fmt: skip


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = reference(MODELS[request.param])
    hf = save(theirs, folder)
    ours, recipe = load(folder, hf, "transformers", torch.float32, 0)
    assert isinstance(ours, HFModel) and all(p.is_meta for p in ours.parameters())
    assert (ours.head.weight is ours.embedding.weight) == bool(ours.ties) == (request.param != "phi")
    return theirs, hf, materialise(ours, recipe).eval(), recipe


def test_logits_and_gradients(model):
    theirs, _, ours, recipe = model
    compare_step(ours, recipe, theirs, padding=True)


@pytest.mark.parametrize("attention", ["masked", "sdpa"])
def test_packed_rows_equal_documents_alone(model, attention):
    """Sliding windows of 4 included: they slide within a document."""
    theirs, _, ours, _ = model
    if attention == "sdpa" and theirs.config.model_type == "gemma2":
        with pytest.raises(NeedsError, match="attn_logit_softcapping"):
            ours.set_attention("sdpa")
        return
    assert ours.set_attention(attention) == 2
    compare_alone(ours)
    ours.set_attention("masked")


COMPILED = ("gpt2", "gemma3_text")  # learnt positions; a window in some of the layers


def masks_of_sdpa(ours, batch, *, compiled):
    """The masks that sdpa was given, one a call, and the hidden states; compiled, what the one graph says."""
    masks, graphs = [], []

    def sdpa(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **kwargs)

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    real = torch.nn.functional.scaled_dot_product_attention
    run = torch.compile(ours, backend=backend, fullgraph=True, dynamic=False) if compiled else ours
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        hidden = run(batch.tokens, batch.positions, batch.documents)
    if compiled:
        (graph,) = graphs
        masks = [n.kwargs["attn_mask"] for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
    return masks, hidden


@pytest.mark.parametrize("attention", further(["masked", "sdpa", "compiled sdpa"], 2))
def test_rows_of_one_document_need_neither_positions_nor_mask(model, attention):
    """The same values as with positions, learnt ones too, whatever follows the document."""
    theirs, _, ours, _ = model
    kind = theirs.config.model_type
    if attention != "masked" and (kind == "gemma2" or (attention == "compiled sdpa" and kind not in COMPILED)):
        return  # gemma2 has no sdpa
    batch = packed([[11], [20]], 20, 61, single=True)
    want = ours(batch.tokens, batch.positions, batch.documents._replace(single=False))
    if attention == "masked":
        found = ours(batch.tokens, batch.positions, batch.documents)
    else:
        torch._dynamo.reset()
        ours.set_attention("sdpa")
        masks, found = masks_of_sdpa(ours, batch, compiled="compiled" in attention)
        several = packed([[11, 4], [20]], 20, 61)
        explicit, _ = masks_of_sdpa(ours, several, compiled="compiled" in attention)
        ours.set_attention("masked")
        windows = [layer == "sliding_attention" for layer in getattr(theirs.config, "layer_types", None) or [""] * 2]
        assert [mask is not None for mask in masks] == windows, "a window is a mask"
        assert len(explicit) == 2 and all(mask is not None for mask in explicit)
    for row, n in ((0, 11), (1, 20)):
        torch.testing.assert_close(found[row, :n], want[row, :n], rtol=1e-5, atol=1e-5)
    spoilt = batch.tokens.clone()
    spoilt[0, 11:] = 7
    again = ours(spoilt, batch.positions, batch.documents)
    torch.testing.assert_close(again[0, :11], want[0, :11], rtol=1e-5, atol=1e-5)


def test_rows_longer_than_the_positions_there_are(model):
    """A learnt table ends at 64 positions: the document's own still fit, numbers through its padding would not."""
    _, _, ours, _ = model
    batch = packed([[60]], 100, 61, single=True)
    short = packed([[60]], 60, 61, single=True)
    long, alone = (ours(b.tokens, b.positions, b.documents) for b in (batch, short))
    torch.testing.assert_close(long[:, :60], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_get_positions(kind):
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    ours = HFModel(reference({**FAMILIES["llama-tied"], "rope_parameters": rope, "max_position_embeddings": 32}))
    batch = packed([[10]], 20, 61, single=True)
    want = ours(batch.tokens[:, :10], batch.positions[:, :10], batch.documents)
    found = ours(batch.tokens, batch.positions, batch.documents)[:, :10]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_same_attributes_as_our_decoder(model):
    theirs, _, ours, recipe = model
    assert list(ours.blocks) == ["0", "1"] and ours.supports_packing
    assert ours.embedding.weight is ours.get_parameter(next(iter(recipe.entries)))
    assert "Norm" in type(ours.norm).__name__
    assert [n for n, _ in ours.named_parameters()] == list(recipe.entries)
    assert ours.ties == () or ours.head.weight is ours.embedding.weight
    assert all(name in dict(ours.named_modules()) for name, _ in ours.linears())
    matrices = sum(p.numel() for n, p in theirs.named_parameters() if p.ndim == 2 and ("h." in n or "layers." in n))
    assert ours.matrix_parameters == matrices + theirs.lm_head.weight.numel()
    with pytest.raises(NeedsError, match="transformers' models have masked, sdpa"):
        ours.set_attention("varlen")


def test_through_wraps_every_block(model):
    _, _, ours, _ = model
    batch = packed([[5, 7, 3]], 16, 61)
    ours.zero_grad()
    plain = ours(batch.tokens, batch.positions, batch.documents)
    ours.head(plain, batch.labels).backward()
    want = ours.embedding.weight.grad.clone()
    ours.zero_grad()
    calls = []

    def through(function, *args, **kwargs):
        calls.append(function)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    default, ours.block_call = ours.block_call, through
    ours.head(ours(batch.tokens, batch.positions, batch.documents), batch.labels).backward()
    ours.block_call = default
    assert len(calls) == len(ours.blocks)
    assert torch.equal(ours.embedding.weight.grad, want)


def test_export_reloads_to_the_bit(model, tmp_path):
    theirs, hf, ours, recipe = model
    compare_export(theirs, ours, recipe, hf, tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_native_family_through_transformers(kind, tmp_path):
    """The same file through both implementations: equal to rounding."""
    hf = save(reference({**FAMILIES, **EXPERTS}[kind]), tmp_path)
    batch = packed([[5, 7, 3], [12, 2]], 16, 61)
    hidden = []
    for implementation in ("native", "transformers"):
        ours, recipe = load(tmp_path, hf, implementation, torch.float32, 0)
        materialise(ours, recipe)
        hidden.append(ours(batch.tokens, batch.positions, batch.documents))
    torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
    recipe.release()
    with pytest.raises(KeyError):
        recipe.fill("model.norm.weight", torch.empty(24), (0,))


def test_the_edited_config_counts(tmp_path):
    """A changed RoPE base reaches the model, though the folder's own config.json says otherwise."""
    hf = save(reference(MODELS["gemma3"]), tmp_path)
    for theta in (100.0, 1000.0):
        hf["rope_parameters"]["full_attention"]["rope_theta"] = theta
        ours, _ = load_hf(tmp_path, json.loads(json.dumps(hf)), torch.float32, 0)
        ours.restore_buffers(torch.device("cpu"))
        assert ours.model.rotary_emb.full_attention_inv_freq[1].item() == pytest.approx(theta ** (-1 / 4))


HEADS = [
    ("gemma2", "softcap", 6.0), ("gemma2", "softcap", None), ("gemma3", "softcap", 30.0), ("cohere", "scale", 1.0),
    ("phi", "bias", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "slot", "value"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_refuses_a_head_that_differs(name, slot, value, dtype):
    theirs = reference(MODELS[name]).to(dtype)
    ours = HFModel(theirs)
    probe_model(ours, theirs, dtype)
    setattr(ours.head, slot, value)
    with pytest.raises(NeedsError, match=r"our head's logits and its own .* differ by"):
        probe_model(ours, theirs, dtype)


def test_what_is_drawn_and_what_is_not():
    """Matrices by our draw and none twice; what transformers makes constant stays, a matrix of ones (cohere) too."""
    hf = {**MODELS["cohere"], "use_qk_norm": True, "initializer_range": 0.5}
    before = torch.get_rng_state()
    ours, recipe = load(None, hf, "transformers", torch.float32, 0)
    assert torch.equal(torch.get_rng_state(), before), "transformers drew matrices, only to have them replaced"
    values = dict(materialise(ours, recipe).named_parameters())
    assert recipe.entries.keys() == values.keys()
    for name, value in values.items():
        if "norm" in name:
            assert value.eq(1).all(), name
        else:
            assert value.std().item() == pytest.approx(0.5, rel=0.2), name
    assert values["model.layers.0.self_attn.q_norm.weight"].shape == (4, 8)


MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_ssm": 48}
ALONE = {
    "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 24, "pad_token_id": None},
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3},
    "falcon_h1": {**SIZES, **MAMBA, "head_dim": 6, "pad_token_id": None, "mamba_n_groups": 1},
    "granitemoehybrid": {
        **SIZES, **MAMBA, "layer_types": ["mamba", "attention"], "pad_token_id": None, "num_local_experts": 0,
        "shared_intermediate_size": 20, "logits_scaling": 2.0, "mamba_n_groups": 1,
    },
    "nemotron_h": {
        **SIZES, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
        "ssm_state_size": 8, "pad_token_id": None, "head_dim": 6,
    },
    "recurrent_gemma": {
        **SIZES, "num_key_value_heads": 1, "lru_width": 24, "block_types": ["recurrent", "attention"],
        "logits_soft_cap": 3.0, "pad_token_id": None, "attention_window_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_finds_documents_that_meet(dtype):
    ours, _ = load(None, {"model_type": "bloom", "vocab_size": 61, **ALONE["bloom"]}, None, dtype, 0)
    assert not ours.supports_packing
    with pytest.raises(NeedsError, match="rows of several documents for a model of type 'bloom'") as error:
        hf_module.refuse_shared_rows(ours, {"model_type": "bloom"}, paired=False)
    assert "--without packing" in error.value.do
    with pytest.raises(NeedsError, match="rows of several documents"):
        hf_module.refuse_shared_rows(ours, {"model_type": "bloom"}, paired=True)


@pytest.mark.parametrize("kind", ["bert", "big_bird", "roberta", "cpmant"])
def test_the_probe_refuses_tokens_that_read_later_ones(kind):
    hf = {**SIZES, "model_type": kind, "pad_token_id": 0, "dim_head": 6, "dim_ff": 20, "prompt_length": 2, "segment": 2}
    with pytest.raises(NeedsError, match="a document alone and before other tokens differ by"):
        load(None, hf, None, torch.float32, 0)


@pytest.mark.parametrize("kind", ALONE)
def test_rows_of_one_document(kind, tmp_path):
    """Logits, loss and every gradient of padded rows; the export; no plan that packs."""
    theirs = reference({"vocab_size": 61, "model_type": kind, **ALONE[kind]})
    hf = save(theirs, tmp_path / "base")
    ours, recipe = load(tmp_path / "base", hf, None, torch.float32, 0)
    ours = materialise(ours, recipe).eval()
    assert not ours.supports_packing and kind in UNSEPARATED
    batch = packed([[5], [19]], 20, 61, single=True)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    wanted, loss = reference_alone(theirs, batch)
    mine = ours.head.logits(hidden)
    torch.testing.assert_close(torch.cat((mine[0, :5], mine[1, :19])), torch.cat(wanted), rtol=1e-4, atol=1e-4)
    mine = ours.head(hidden, batch.labels)
    torch.testing.assert_close(mine, loss, rtol=1e-5, atol=0)
    theirs.zero_grad()
    ours.zero_grad()
    loss.backward()
    mine.backward()
    compare_gradients(ours, recipe, theirs, every=False)
    compare_export(theirs, ours, recipe, hf, tmp_path / "out")


def test_the_probe_finds_positions_that_run_on(monkeypatch):
    theirs = reference(MODELS["gpt2"])
    ours = HFModel(theirs)
    forward = HFModel.forward
    monkeypatch.setattr(HFModel, "forward", lambda self, t, p, d: forward(self, t, torch.arange(p.shape[1])[None], d))
    probe_model(ours, theirs, torch.float32)
    assert not ours.supports_packing


# --- experts of families that our own decoder does not have
@pytest.fixture(scope="module", params=list(THEIR_EXPERTS))
def mixture(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = reference(THEIR_EXPERTS[request.param])
    hf = save(theirs, folder)
    ours, recipe = load(folder, hf, None, torch.float32, 0)
    assert isinstance(ours, HFModel)
    return theirs, hf, materialise(ours, recipe).eval(), recipe


def layers_of_experts(model):
    return [m for m in model.modules() if isinstance(m, TheirExperts)]


def test_experts_of_other_families(mixture, tmp_path):
    """Logits, gradients, isolation to the bit, packed rows, the export."""
    theirs, hf, ours, recipe = mixture
    compare_step(ours, recipe, theirs, padding=True, every=False)
    compare_isolated(ours)
    compare_alone(ours)
    ours.set_attention("sdpa")
    compare_alone(ours)
    ours.set_attention("masked")
    compare_export(theirs, ours, recipe, hf, tmp_path)


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
def test_products_are_those_of_the_loop_over_experts(kind):
    """gpt-oss has biases, an activation of its own, and the width before rows."""
    model, tokens, found = reference(EXPERTS[kind]), torch.arange(20)[None] * 7 % 60, []
    model.set_experts_implementation("eager")
    for taken in (0, 2):
        assert not taken or take_experts(model) == taken
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_matrices_of_a_token(mixture):
    """N_mm has the experts that a token is routed to, and the recomputed block routes alike."""
    _, _, ours, _ = mixture
    layers = layers_of_experts(ours)
    assert layers and all((m.active, m.count) == (2, 6) for m in layers)
    matrices = sum(p.numel() for block in ours.blocks.values() for p in block.parameters() if p.ndim > 1)
    active = matrices - sum(m.weights for m in layers) * 4 // 6
    assert ours.matrix_parameters == active + ours.head.weight.numel()
    test_through_wraps_every_block(mixture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loops", [False, True])
def test_the_probe_finds_documents_that_meet_in_experts(dtype, loops, monkeypatch):
    """A token's rows get a small part of the row before; also where products of few rows are rounded otherwise."""
    if loops:  # transformers' own products, in groups of as many rows as are routed
        monkeypatch.setattr(hf_module, "take_experts", lambda _: 0)
    theirs = reference({**THEIR_EXPERTS["qwen2_moe"], "initializer_range": 0.5}).to(dtype)
    ours = HFModel(theirs)
    assert bool(layers_of_experts(ours)) != loops
    probe_model(ours, theirs, dtype)
    assert ours.supports_packing
    for block in ours.blocks.values():
        inner = block.mlp.forward
        block.mlp.forward = lambda h, inner=inner: inner(h + 0.2 * F.pad(h, (0, 0, 1, -1)))
    probe_model(ours, theirs, dtype)
    assert not ours.supports_packing
    for block in ours.blocks.values():
        inner = block.mlp.forward
        block.mlp.forward = lambda h, inner=inner: inner(h + 0.2 * h.roll(1, 1))  # the first token reads the last one
    with pytest.raises(NeedsError, match="a document alone and before other tokens differ"):
        probe_model(ours, theirs, dtype)


# --- blocks of short convolutions
@pytest.mark.parametrize("kinds", [["conv", "full_attention"], ["conv", "conv"]], ids=str)
@pytest.mark.parametrize(("family", "bias"), [("lfm2", False), ("lfm2", True), ("lfm3", False)])
def test_convolutions_stay_within_a_document(family, bias, kinds, tmp_path):
    """Logits and gradients of a packed row are those of each document alone, by transformers' own model."""
    sizes = {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "conv_bias": bias}
    theirs = reference({**SIZES, "model_type": family, **sizes, "pad_token_id": 0})
    hf = save(theirs, tmp_path)
    ours, recipe = load(tmp_path, hf, None, torch.float32, 0)
    materialise(ours, recipe)
    batch = packed([[5, 2, 9, 1], [17]], 20, 61)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    want, loss = reference_alone(theirs, batch)
    logits = ours.head.logits(hidden)
    found = [*logits[0, :17].split([5, 2, 9, 1]), logits[1, :17]]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    ours.head(hidden, batch.labels).backward()
    loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    names = {name: entry.pieces[0][0] for name, entry in recipe.entries.items()}
    for name, p in ours.named_parameters():
        g = grads[names[name]]
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-4 * g.abs().max().item())
    one = packed([[11]], 20, 61, single=True)
    several = ours(one.tokens, one.positions, one.documents._replace(single=False))
    torch.testing.assert_close(ours(one.tokens, one.positions, one.documents)[0, :11], several[0, :11])
