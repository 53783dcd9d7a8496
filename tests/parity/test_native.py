"""Our decoder against transformers' own, in float32 on the CPU: logits, every gradient, reading and writing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshes import further
from optrush.errors import CheckpointError, NeedsError
from optrush.models import families
from optrush.models.decoder import Decoder
from optrush.models.families import FamilySpec
from optrush.models.hf import load
from optrush.models.weights import export_weights

from parity_models import (
    EXPERTS,
    FAMILIES,
    SIZES,
    compare_alone,
    compare_export,
    compare_isolated,
    compare_step,
    materialise,
    packed,
    reference,
    save,
)


def written(tmp_path_factory, name):
    """(transformers model, folder, config.json) of one family."""
    folder, model = tmp_path_factory.mktemp(name), reference({**FAMILIES, **EXPERTS}[name])
    return model, folder, save(model, folder)


@pytest.fixture(scope="module", params=[*FAMILIES, *EXPERTS])
def family(request, tmp_path_factory):
    return written(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return written(tmp_path_factory, "llama")


def native(folder, hf, dtype=torch.float32):
    model, recipe = load(folder, hf, None, dtype, 0)
    return materialise(model, recipe), recipe


def test_logits_and_gradients(family):
    theirs, folder, hf = family
    ours, recipe = native(folder, hf)
    compare_step(ours, recipe, theirs, padding=False)


def test_long_positions(family, monkeypatch):
    """Angles as transformers makes them: far positions would show a frequency that is off in its last bits."""
    theirs, folder, hf = family
    ours, _ = native(folder, {**hf, "attn_temperature_tuning": False})  # which transformers takes from no position
    for layer in theirs.model.layers if hf["model_type"] == "llama4_text" else ():
        monkeypatch.setattr(layer.self_attn, "attn_temperature_tuning", False)
    tokens = torch.arange(12)[None] % 61
    positions = torch.arange(30000, 30012)[None]
    documents = packed([[12]], 12, 61, single=True).documents
    got = ours.head.logits(ours(tokens, positions, documents))
    want = theirs(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_parameters_are_counted(family):
    theirs, _, hf = family
    ours, _ = load(None, hf, "native", torch.float32, 0)
    count = sum(p.numel() for p in theirs.parameters())
    assert ours.shape.parameters == count
    assert dict(ours.shape.named_parameters()) == {n: p.numel() for n, p in ours.named_parameters() if p.requires_grad}
    own = {name: m for name, m in theirs.named_modules() if type(m) is torch.nn.Linear and "router" not in name}
    linears = sum(m.weight.numel() for m in own.values())
    outer = theirs.lm_head.weight.numel() + (ours.inputs.project.weight.numel() if ours.inputs else 0)
    assert sum(m.weight.numel() for _, m in ours.linears()) == linears - outer
    named = [(name, p.numel()) for name, p in theirs.named_parameters() if not name.endswith("bias")]
    places = (".experts.", "mlp.gate.w", ".router.w", ".router.proj")
    parts = [(name, n) for name, n in named if any(p in name for p in places)]
    of = hf.get("n_routed_experts") or hf.get("num_experts") or hf.get("num_local_experts") or 1
    taken = hf.get("num_experts_per_tok") or hf.get("top_k_experts")
    active = sum(n * (taken if ".experts." in name else of) // of for name, n in parts)
    assert ours.shape.block_matrices == linears - outer + sum(n for _, n in parts)
    assert ours.shape.matrix_parameters == linears + active


def test_packed_rows_equal_documents_alone(family):
    _, folder, hf = family
    ours, _ = native(folder, hf)
    for name in ("masked", "sdpa"):
        if name == "sdpa" and ours.shape.score_cap is not None:
            with pytest.raises(NeedsError, match="attn_logit_softcapping 2, which its kernel does not support"):
                ours.set_attention(name)
            continue
        assert ours.set_attention(name) == hf["num_hidden_layers"]
        compare_alone(ours)
        compare_isolated(ours)


def test_any_rectangle_equals_the_whole(family):
    _, folder, hf = family
    whole, recipe = native(folder, hf)
    assert [name for name, _ in whole.named_parameters()] == list(recipe.entries)
    for name, parameter in whole.named_parameters():
        rows = parameter.shape[0]
        for first, last in [(0, rows), (1, rows), (0, rows - 1), (rows // 3, rows // 2 + 1), (5, 6), (7, 7)]:
            if last > rows:
                continue
            local = torch.empty(last - first, *parameter.shape[1:], dtype=torch.float64)
            recipe.fill(name, local, (first, *[0] * (parameter.ndim - 1)))
            assert torch.equal(local, parameter[first:last].double()), (name, first, last)
        if parameter.ndim == 2 and rows > 4:
            local = torch.empty(3, 4)
            recipe.fill(name, local, (2, 1))
            assert torch.equal(local, parameter[2:5, 1:5]), name
    with pytest.raises(AssertionError, match="is not inside"):
        recipe.fill("norm.weight", torch.empty(2), (hf["hidden_size"] - 1,))


@pytest.mark.parametrize("max_shard_bytes", further([20_000, 5e9], 1))
def test_export_reloads_to_the_bit(family, tmp_path, max_shard_bytes):
    """In one file or in several; a tied head is one tensor with the embedding."""
    theirs, folder, hf = family
    ours, recipe = native(folder, hf)
    assert (ours.head.weight is ours.embedding.weight) == ours.shape.tied == ("head.weight" not in recipe.entries)
    out = tmp_path / "out"
    compare_export(theirs, ours, recipe, hf, out, max_shard_bytes)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (max_shard_bytes < 5e9)
    back, _ = native(out, json.loads((out / "config.json").read_text()))
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), ours.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="already has"):
        export_weights(out, iter(()), recipe, hf)


def test_export_writes_its_type_and_needs_every_parameter(llama, tmp_path):
    _, folder, hf = llama
    ours, recipe = native(folder, hf, torch.bfloat16)
    named = [(n, p.data) for n, p in ours.named_parameters()]
    export_weights(tmp_path / "a", iter(named), recipe, {k: v for k, v in hf.items() if k != "architectures"})
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert {t.dtype for t in load_file(tmp_path / "a" / "model.safetensors").values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match=r"no values for norm.weight"):
        export_weights(tmp_path / "b", ((n, t) for n, t in named if n != "norm.weight"), recipe, hf)
    with pytest.raises(CheckpointError, match="unknown or repeated"):
        export_weights(tmp_path / "c", iter([*named, named[0]]), recipe, hf)


def test_draws_are_the_same_in_any_cut_and_class():
    hf = {**FAMILIES["llama"], "initializer_range": 0.5, "architectures": ["LlamaForCausalLM"]}
    one, recipe = load(None, hf, "native", torch.float32, 3)
    materialise(one, recipe)
    for name, parameter in one.named_parameters():
        local = torch.empty(parameter[-5:-1].shape)
        recipe.fill(name, local, (len(parameter) - 5, *[0] * (parameter.ndim - 1)))
        assert torch.equal(local, parameter[-5:-1]), name
    two, recipe2 = load(None, hf, "transformers", torch.float32, 3)
    materialise(two, recipe2)
    mine = {hf_name: t for n, p in one.named_parameters() for hf_name, t in recipe.split(n, p.data)}
    theirs = {hf_name: t for n, p in two.named_parameters() for hf_name, t in recipe2.split(n, p.data)}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine["model.norm.weight"].eq(1).all() and mine["model.layers.0.self_attn.q_proj.bias"].eq(0).all()
    assert mine["lm_head.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    other, recipe3 = load(None, hf, "native", torch.float32, 4)
    assert not torch.equal(materialise(other, recipe3).head.weight, one.head.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own tracer looks at it
@pytest.mark.slow
def test_compiled_blocks_and_the_through_slot(llama):
    """One graph a block, names kept, the same numbers; the slot sees every block once."""
    _, folder, hf = llama
    ours, _ = native(folder, hf)
    batch = packed([[5, 7, 3], [12]], 16, 61)
    names = [n for n, _ in ours.named_parameters()]
    for attention in ("masked", "sdpa"):
        ours.set_attention(attention)
        plain = ours(batch.tokens, batch.positions, batch.documents)
        calls = []

        def through(block, *args):
            calls.append(block)  # noqa: B023
            return block(*args)

        ours.block_call = through
        for block in ours.blocks.values():
            block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        compiled = ours(batch.tokens, batch.positions, batch.documents)
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)
        assert calls == list(ours.blocks.values())
        assert [n for n, _ in ours.named_parameters()] == names
    with pytest.raises(NeedsError, match="known: masked, sdpa"):
        ours.set_attention("flash")


def test_autocast_runs_in_its_type(llama):
    _, folder, hf = llama
    ours, _ = native(folder, hf)
    batch = packed([[5, 7, 3]], 16, 61)
    exact = ours.head(ours(batch.tokens, batch.positions, batch.documents), batch.labels)
    with torch.autocast("cpu", torch.bfloat16):
        rough = ours.head(ours(batch.tokens, batch.positions, batch.documents), batch.labels)
    assert rough.dtype == torch.float32 and rough != exact
    torch.testing.assert_close(rough, exact, rtol=2e-2, atol=0)


def broken(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path / "broken")
    path = tmp_path / "broken" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return tmp_path / "broken"


def test_folders_that_do_not_fit_are_refused(llama, tmp_path):
    _, folder, hf = llama
    key = "model.layers.1.self_attn.k_proj.weight"
    cases = [(lambda t: t.pop(key), f"tensor {key}.*\n.*no such tensor"), (
        lambda t: t.update({key: t[key][:-1].clone()}), r"shape \[15, 24\] in .*model.safetensors",
    ), (lambda t: t.update({"adapter.weight": t[key].clone()}), "adapter.weight in model.safetensors")]  # fmt: skip
    for i, (change, message) in enumerate(cases):
        with pytest.raises(NeedsError, match=message):
            load(broken(folder, tmp_path / str(i), change), hf, None, torch.float32, 0)
    harmless = broken(
        folder, tmp_path / "ok", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    load(harmless, hf, None, torch.float32, 0)
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(NeedsError, match=r"pytorch_model.bin, a pickle"):
        load(tmp_path / "pickle", hf, None, torch.float32, 0)
    with pytest.raises(NeedsError, match=r"no model.safetensors"):
        load(tmp_path / "nothing", hf, None, torch.float32, 0)
    (harmless / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(NeedsError, match=r"model.safetensors"):
        load(harmless, hf, None, torch.float32, 0)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "no.safetensors"]
)
def test_an_index_may_not_leave_its_folder(llama, tmp_path, name):
    _, folder, hf = llama
    shutil.copy(folder / "model.safetensors", tmp_path / "outside.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "x.bin").write_bytes(b"")
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for implementation in ("native", "transformers"):
        with pytest.raises(NeedsError, match="not a safetensors file of this folder"):
            load(inner, hf, implementation, torch.float32, 0)


def test_a_duplicated_tied_head_must_be_equal(tmp_path):
    model = reference(FAMILIES["qwen2"])
    hf = save(model, tmp_path / "plain")
    embedding = model.model.embed_tokens.weight.data

    same = broken(tmp_path / "plain", tmp_path / "1", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    load(same, hf, None, torch.float32, 0)
    other = broken(tmp_path / "plain", tmp_path / "2", lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(NeedsError, match=r"differs from model.embed_tokens.weight"):
        load(other, hf, None, torch.float32, 0)


def test_a_family_without_a_new_part_is_one_entry(tmp_path, monkeypatch):
    """Its config.json, tensors, logits, loss, gradients and export, by nothing but switches and defaults."""
    spec = FamilySpec(
        "SeedOssForCausalLM", {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
        qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias",
    )  # fmt: skip
    monkeypatch.setitem(families.FAMILIES, "seed_oss", spec)
    given = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "pad_token_id": None}
    theirs = reference({**SIZES, **given, "model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0})
    hf = save(theirs, tmp_path / "base")
    ours, recipe = native(tmp_path / "base", hf)
    assert isinstance(ours, Decoder)
    compare_step(ours, recipe, theirs, padding=True)
    compare_export(theirs, ours, recipe, hf, tmp_path / "out")
