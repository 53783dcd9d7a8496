"""Models whose layers differ (Gemma 4), beyond their parity (test_native.py): sizes, files, techniques, ranks."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshes import further
from optrush.data.batch import Documents
from optrush.decide import decide
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.hardware import parse_hardware
from optrush.kernels import attention
from optrush.models import decoder, kv_cache
from optrush.models.hf import load
from optrush.models.shapes import ModelShape, native_obstacle
from optrush.models.weights import export_weights
from optrush.planner import baseline, search

from golden import make_golden
from parity_models import EXPERTS, FAMILIES, compare_step, materialise, reference, save
from trials import assembled, furthest, golden_run, steps, weights
from trials import published as of_transformers

GEMMA4 = FAMILIES["gemma4_text"]
SIZED: dict[str, tuple[float, dict[str, Any]]] = {  # billions; the text parts of E2B, 31B and 26B-A4B
    "inputs": (
        4.63,
        {
            "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
            "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        },
    ),
    "keys": (
        30.7,
        {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
            "num_key_value_heads": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 4,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "experts": (
        25.2,
        {
            "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
}  # fmt: skip


def read(**changes: Any) -> ModelShape:
    return ModelShape.read({**GEMMA4, **changes})


@pytest.mark.parametrize("kind", SIZED)
def test_sizes(kind):
    """Counted by transformers on the meta device; attention's FLOPs by the heads of each layer."""
    billions, hf = SIZED[kind]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **hf))
    shape = ModelShape.read({"model_type": "gemma4_text", **hf})
    assert shape.parameters == sum(p.numel() for p in theirs.parameters())
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    widths = [layer.self_attn.head_dim for layer in theirs.model.layers]
    assert shape.flops(0, 10**6) == pytest.approx(6 * 10**6 * shape.heads * sum(widths), rel=1e-3)


def test_layers_read_the_last_one_of_their_kind():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 2]
    by = read(layer_types=[*kinds, "full_attention"], num_hidden_layers=7, num_kv_shared_layers=3).by_layer
    assert by is not None and by.sources == (None, None, None, None, 2, 2, 3)
    listed = read(layer_types=["sliding_attention"] * 4, num_kv_shared_layers=0)
    assert listed.window_layers == (0, 1, 2), "transformers gives the last layer full attention, whatever is listed"
    absent = read(rope_parameters=None)
    assert (absent.rope.kind, absent.rope.part, absent.rope.theta) == ("proportional", 0.25, 1e6)
    assert absent.local_rope is not None and absent.local_rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4, of 4 layers"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers 3, of 4 layers"),  # none of the kind of layer 1 before
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers -1"),
        ({"global_head_dim": 7}, "heads of 7 values"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 heads of 16 values, and 3 key/value heads"),
        ({"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"intermediate_size": 16}}}, "per_layer_config"),
        ({"per_layer_config": [16]}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": "x"}, "3": {"head_dim": "x"}}}, "head_dim is 'x'"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts 5",
        ),
        ({"enable_moe_block": True, "num_experts": None}, "num_experts is None"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
            "layers that also reuse other layers' keys and values",
        ),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0"),
    ],
)
def test_sizes_that_cannot_be(changes, found):
    with pytest.raises(ConfigError, match=found):
        read(**changes)


@pytest.mark.parametrize("changes", [{"use_bidirectional_attention": "all"}, {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
}, {"attention_dropout": 0.1}, {"hidden_activation": "silu"}])  # fmt: skip
def test_what_runs_through_transformers(changes):
    assert native_obstacle({**GEMMA4, **changes}) is not None


def test_keys_and_values_that_no_layer_reads(tmp_path):
    """Published files have some, which transformers ignores: they are exported as they were."""
    theirs = reference(GEMMA4)
    hf = save(theirs, tmp_path / "base")
    file, extra = tmp_path / "base" / "model.safetensors", "model.layers.3.self_attn.k_proj.weight"
    save_file({**load_file(file), extra: torch.ones(3, 5)}, file, {"format": "pt"})
    ours, recipe = load(tmp_path / "base", hf, None, torch.float32, 0)
    compare_step(materialise(ours, recipe), recipe, theirs, padding=False)
    export_weights(tmp_path / "out", ((n, p.data) for n, p in ours.named_parameters()), recipe, hf)
    assert load_file(tmp_path / "out" / "model.safetensors")[extra].sum() == 15
    own = {**load_file(file), extra.replace(".3.", ".1."): torch.ones(3, 5)}
    save_file(own, file, {"format": "pt"})
    with pytest.raises(NeedsError, match=r"layers.1.self_attn.k_proj.weight"):
        load(tmp_path / "base", hf, None, torch.float32, 0)


def test_a_cache_holds_lent_keys_once():
    ours, recipe = load(None, GEMMA4, "native", torch.float32, 0)
    materialise(ours, recipe)
    cache = kv_cache.SlotCache(ours, 2, 64)
    with cache.within(ours):
        held = [block.attention for block in ours.blocks.values()]
        assert [layer.source for layer in held] == [None, None, *held[:2]]


def test_wide_heads_are_repeated_where_no_kernel_groups_them():
    """CUDA's flash attention has at most 256 values a head; torch would take whole scores."""
    wide, narrow = (torch.empty(1, 2, 1, E, dtype=torch.bfloat16, device="meta") for E in (512, 256))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        assert (attention._groups(wide), attention._groups(narrow)) == (False, True)


# --- techniques
def written(made: Path, hf: dict[str, Any]) -> Path:
    sizes = {key: value for key, value in hf.items() if key not in ("bos_token_id", "eos_token_id")}
    sizes |= {"vocab_size": 128, "vocab_size_per_layer_input": 128}
    make_golden.write_model(made / "untied", True, **sizes)
    make_golden.write_documents(made / "text.jsonl", False)
    return made


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder as `box` is, its model a Gemma 4."""
    return written(tmp_path_factory.mktemp("wide"), GEMMA4)


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """The same, with experts."""
    return written(tmp_path_factory.mktemp("routed"), EXPERTS["gemma4_text-experts"])


@cache
def plain(box: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    return trained(box)


def trained(box: Path, **with_: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    job = assembled(golden_run(box, packed=True, **with_))
    return list(steps(job, 2)), weights(job)


@pytest.mark.parametrize("name", ["recompute", "every", "selective_recompute"])
def test_recomputing_is_exact(wide, name):
    """Keys and values leave the block that runs again, and enter others."""
    with_ = {"every": {"recompute": {"every": 2}}, "selective_recompute": {name: {"ops": "attention"}}}
    base, again = plain(wide), trained(wide, **with_.get(name, {name: {}}))
    assert again[0] == base[0] and all(torch.equal(again[1][n], want) for n, want in base[1].items())


def first(box: Path, with_: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    return of_transformers(assembled(golden_run(box, **with_)))


@pytest.mark.parametrize(("kind", "with_"), further(
    [("wide", {"fsdp": {}}), ("routed", {"ddp": {}, "experts": {"size": 2}}), ("wide", {"ddp": {}}),
     ("routed", {"fsdp": {}}), ("wide", {"fsdp": {"stage": 2}, "recompute": {}})], 2))  # fmt: skip
def test_two_ranks(kind, request, pair, with_):
    box = request.getfixturevalue(kind)
    loss, want = first(box, {})
    for mine, grads in pair(first, box, with_):
        assert mine == pytest.approx(loss, rel=1e-5)
        assert not grads or furthest(grads, want) < 1e-4


@pytest.mark.parametrize("kind", further(["routed", "wide"], 1))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
def test_blocks_are_one_graph_each(kind, request):
    job = assembled(golden_run(request.getfixturevalue(kind), packed=True))
    batch = next(job.batches)[0]
    given = batch.tokens, batch.positions, batch.documents
    plain, graphs = job.model(*given), []
    torch._dynamo.reset()
    for block in job.model.blocks.values():
        block.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True, dynamic=False)
    torch.testing.assert_close(job.model(*given), plain)
    torch._dynamo.reset()
    assert len(graphs) == len(job.model.blocks)


@pytest.mark.parametrize(("with_", "hardware"), [
    ({"tensor": {"size": 2}}, "2xh100"), ({"context": {"size": 2}}, "2xh100"), ({"pipeline": {}}, "2xh100"),
    ({"cuda-graphs": {}}, "h100"), ({"fused-kernels": {}}, "h100"), ({"fp8": {}}, "h100"), ({"muon": {}}, "h100"),
    ({"attention": {"impl": "fa4"}}, "h100"),
], ids=str)  # fmt: skip
def test_techniques_that_do_not_reach_it(wide, with_, hardware):
    sizes = {"head_dim": 256, "global_head_dim": 512, "per_layer_config": None}
    hf = {**GEMMA4, **sizes, "tie_word_embeddings": True}
    (wide / "large").mkdir(exist_ok=True)
    (wide / "large" / "config.json").write_text(json.dumps(hf))
    sets = [f"model={wide / 'large'}", "objective=pretrain", "data.path=null", "data.random=8"]
    config = golden_run(wide, sets=sets, **with_, **({} if "muon" in with_ else {"bf16": {}}))
    with pytest.raises((NeedsError, ConflictError)) as error:
        search.predict(config, hardware)
    assert re.search(r"\b(layers|gelu)\b", error.value.found), error.value
    assert parse_hardware(hardware)


@pytest.mark.parametrize(("narrow", "wide_", "kernels"), [(256, 512, "vs"), (128, 256, "vv"), (512, 512, None)])
def test_flash_attention_of_narrow_layers(wide, narrow, wide_, kernels):
    """Layers with wider heads than flash attention has take torch's other kernels; not where all are as wide."""
    hf = {**GEMMA4, "head_dim": narrow, "global_head_dim": wide_, "per_layer_config": None, "tie_word_embeddings": True}
    (wide / "heads").mkdir(exist_ok=True)
    (wide / "heads" / "config.json").write_text(json.dumps(hf))
    sets = [f"model={wide / 'heads'}", "objective=pretrain", "data.path=null", "data.random=8"]
    config = golden_run(wide, sets=sets, attention={"impl": "varlen"}, bf16={})
    if kernels is None:
        with pytest.raises(NeedsError, match="heads of 512 values") as error:
            search.predict(config, "h100")
        assert error.value.do == "take impl=sdpa"
        return
    plain = search.predict(golden_run(wide, sets=sets, attention={"impl": "sdpa"}, bf16={}), "h100")
    assert search.predict(config, "h100").peak_bytes <= plain.peak_bytes
    for width, kernel in zip((narrow, wide_), kernels, strict=True):
        q, documents = (
            torch.randn(1, 3, 2, width),
            Documents(torch.tensor([0, 3]).int(), torch.zeros(1, 3).int(), 4, True),
        )
        if kernel == "v":  # which is not for a CPU
            with pytest.raises(NeedsError, match="variable-length attention"):
                attention.varlen(q, q, q, documents)
        else:
            assert torch.equal(attention.varlen(q, q, q, documents), attention.sdpa(q, q, q, documents))


@pytest.mark.parametrize("names", [["embed_tokens"], ["embed_tokens", "embed_tokens_per_layer", "per_layer_*"]])
def test_frozen_embeddings(wide, names):
    """The second embedding has a gradient, which goes through all blocks, until it is frozen too."""
    config = golden_run(wide, sets=["model.implementation=native"], freeze={"names": names, "layers": "0-1"})
    job, resolved = assembled(config), decide(config)
    book = baseline.book(resolved.techniques, resolved.env, ModelShape.read(resolved.hf), 0.0)
    planned = {line.name: line.values for line in book.lines if not line.gone}
    whole = {name: p.numel() for name, p in job.model.named_parameters() if name.startswith(("embedding", "inputs"))}
    learnt = sum(t.parameter.numel() for t in job.trained if t.name in whole)
    assert planned.get("gradients.embedding", 0.0) == pytest.approx(learnt)
    assert (job.model.blocks["0"] in decoder._without_backward(job.model)) == (len(names) == 3)
