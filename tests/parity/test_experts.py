"""Experts of our own decoder against transformers': routing at its edges, balance, files, and whole runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meshes import further
from optrush import exporting
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.models.experts import TILE, balance_loss, grouped_matmul, load_figures, route_by_logits
from optrush.models.hf import load, load_plain
from optrush.models.shapes import ModelShape
from optrush.peft import io
from optrush.planner import baseline
from optrush.trainer.run import RunRequest, run

from golden import make_golden
from isolation import alone, disturbed
from parity_models import EXPERTS, compare_step, materialise, packed, reference, save
from trials import assembled, first_gradients, golden_run, metrics, micro, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks

MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


# Whose router is a softmax without bias, and whose files have two layouts; with a loss of balance in transformers.
GATED = ["mixtral", "olmoe", "qwen3_moe"]
BALANCED = [*GATED, "gpt_oss"]


def opened(theirs: Any, folder: Path, stacked: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """Ours from what transformers writes; stacked: from a folder with one tensor of all experts."""
    hf = save(theirs, folder)
    if stacked:
        save_file({name: t.clone() for name, t in theirs.state_dict().items()}, folder / "model.safetensors")
    ours, recipe = load(folder, hf, None, torch.float32, 0)
    return materialise(ours, recipe), recipe, hf


# --- products and routing
def test_grouped_products():
    """Groups of no row, one, and more than a tile; values and both gradients."""
    ends = torch.tensor([0, 1, 1, TILE + 8, TILE + 8 + TILE], dtype=torch.int32)
    x = torch.randn(int(ends[-1]), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 6, 4, dtype=torch.float64, requires_grad=True)
    group = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    want = torch.einsum("sc,scr->sr", x, weight[group])
    torch.testing.assert_close(grouped_matmul(x, weight, ends), want)
    assert torch.autograd.gradcheck(lambda x, w: grouped_matmul(x, w, ends), (x, weight), fast_mode=True)
    turned = weight.detach().mT.contiguous().requires_grad_()  # as a model keeps it
    out = grouped_matmul(x, turned.mT, ends)
    (ours,), (plain,) = torch.autograd.grad(out.sum(), turned), torch.autograd.grad(want.sum(), weight)
    torch.testing.assert_close(ours, plain.mT)
    assert ours.is_contiguous(), "autograd copies a gradient in another order than its weight's"


def test_a_row_of_a_group_is_what_it_is_alone():
    """To the bit, whatever other rows the group has: else a document's tokens would show in another's."""
    x, weight = torch.randn(40, 64), torch.randn(1, 64, 48)
    all_rows = grouped_matmul(x, weight, torch.tensor([40], dtype=torch.int32))
    for first, last in ((0, 1), (3, 5), (7, 10), (2, 35)):
        part = grouped_matmul(x[first:last], weight, torch.tensor([last - first], dtype=torch.int32))
        assert torch.equal(part, all_rows[first:last])


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("case", ["ties", "one", "none", "scattered"])
def test_routing_at_its_edges(name, case, tmp_path):
    """All experts equally probable; all tokens at the same ones; one expert that nobody takes; large logits."""
    theirs = reference(EXPERTS[name])
    for block in theirs.model.layers:
        if (gate := getattr(block.mlp, "gate", None)) is None:
            continue
        with torch.no_grad():
            if case == "ties":
                gate.weight.zero_()
            elif case == "scattered":
                gate.weight.mul_(10)
    if case in ("one", "none"):  # by the first value of the stream, which is large and the same for all tokens
        with torch.no_grad():
            theirs.model.embed_tokens.weight[:, 0] = 40.0
            for block in theirs.model.layers:
                block.self_attn.o_proj.weight[0] = 0.0
                block.post_attention_layernorm.weight[0] = 1.0
                if hasattr(block.mlp, "gate"):
                    block.mlp.gate.weight[:, 0] = 0.0
                    block.mlp.gate.weight[1 if case == "none" else [2, 4, 6], 0] = -9.0 if case == "none" else 9.0
                    block.mlp.experts.down_proj.data[:, 0] = 0.0
                else:
                    block.mlp.down_proj.weight[0] = 0.0
    ours, recipe, _ = opened(theirs, tmp_path)
    batch = packed([[5, 7, 3], [19, 1]], 20, 61)
    ours(batch.tokens, batch.positions, batch.documents)
    counts = ours.load[:, 0]
    k = EXPERTS[name]["num_experts_per_tok"]
    assert (counts.sum(-1) == 35 * k).all(), "padding is not counted"
    if case == "none":
        assert (counts[:, 1] == 0).all()
    if case == "one":
        assert (counts[:, [2, 4, 6]].sum(-1) == 35 * min(k, 3)).all()
    compare_step(ours, recipe, theirs, padding=True, every=False)


def test_a_choice_by_logits_whose_sigmoids_are_equal():
    e = ModelShape.read({**EXPERTS["llama4_text"], "num_experts_per_tok": 1}).experts
    assert e is not None
    weights, chosen, _ = route_by_logits(torch.tensor([[20.0, 25.0, 30.0, 22.0, -1.0]]), e)
    assert (weights.item(), chosen.item()) == (1.0, 2)


def test_experts_that_a_token_cannot_have():
    with pytest.raises(ConfigError, match="num_experts_per_tok 9"):
        ModelShape.read({**EXPERTS["mixtral"], "num_experts_per_tok": 9})
    with pytest.raises(ConfigError, match="n_group 4"):
        ModelShape.read({**EXPERTS["glm4_moe"], "n_group": 4})
    for key, value in (("clip_qkv", 8.0), ("router_jitter_noise", 0.1)):
        with pytest.raises(NeedsError, match=key):
            ModelShape.read({**EXPERTS["olmoe"], key: value})


FURTHER = {"eh_proj.weight": (24, 48), "enorm.weight": (24,), "shared_head.head.weight": (61, 24)}


@pytest.mark.parametrize(("family", "prefix", "implementation"), [
    ("glm4_moe", "model.layers.2.", None), ("deepseek_v3", "model.layers.2.", None),
    ("deepseek_v3", "model.layers.2.", "transformers"), ("glm4_moe_lite", "model.layers.2.", None),
    ("glm4_moe", "model.layers.3.", None), ("qwen3_next", "mtp.layers.0.", None),
])  # fmt: skip
def test_layers_that_predict_further_tokens_at_any_depth(family, prefix, implementation, tmp_path):
    """transformers names those of the published depths alone; files of two layers are trained, exported and opened."""
    theirs = reference(EXPERTS[family])
    hf = save(theirs, tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"{prefix}{name}": torch.randn(shape) for name, shape in FURTHER.items()}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    ours, recipe = load(tmp_path, hf, implementation, torch.float32, 0)
    materialise(ours, recipe)
    named = ((n, p.data) for n, p in ours.named_parameters())
    exporting.export_weights(tmp_path / "out", named, recipe, hf, base=tmp_path)
    ids = torch.arange(8)[None]
    for folder in (tmp_path, tmp_path / "out"):
        again = load_plain(folder, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    if implementation is None:
        before, out = (load_file(place / "model.safetensors") for place in (tmp_path, tmp_path / "out"))
        assert out.keys() == before.keys() and all(torch.equal(out[name], before[name]) for name in out)


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "model.layers.1.other.weight"), ("mixtral", "model.layers.2.eh_proj.weight")]
)
def test_other_tensors_without_a_place_are_refused(family, name, tmp_path):
    save(reference(EXPERTS[family]), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.randn(3)}, file, {"format": "pt"})
    with pytest.raises(NeedsError, match=f"unexpected keys: {name}"):
        load_plain(tmp_path, torch.float32, torch.device("cpu"))


# --- balance
@pytest.mark.parametrize("name", BALANCED)
def test_balance_is_transformers_own(name, tmp_path):
    """The loss over all layers and its gradient, of rows without padding and of one with."""
    theirs = reference({**EXPERTS[name], "output_router_logits": True})
    ours, _, hf = opened(theirs, tmp_path)
    shape = ModelShape.read(hf).experts
    assert shape is not None and shape.balance == theirs.config.router_aux_loss_coef > 0
    assert ModelShape.read({**hf, "output_router_logits": False}).experts.balance == 0
    for lengths in ([[12], [12]], [[12], [7]]):
        batch = packed(lengths, 12, 61)
        out = theirs(input_ids=batch.tokens, attention_mask=batch.documents.filled.long(), use_cache=False)
        ours(batch.tokens, batch.positions, batch.documents)
        mine = balance_loss(ours.load, shape.active)
        torch.testing.assert_close(mine, out.aux_loss, rtol=1e-6, atol=0)
        theirs.zero_grad()
        ours.zero_grad()
        out.aux_loss.backward()
        mine.backward()
        mlp = theirs.model.layers[0].mlp
        want = (mlp.gate if name in GATED else mlp.router).weight.grad
        torch.testing.assert_close(ours.blocks["0"].experts.router.grad, want, rtol=1e-4, atol=1e-6)
        assert want.abs().max() > 1e-4


def test_figures_of_a_load():
    even, one = torch.full((4,), 5.0), torch.tensor([0.0, 20.0, 0.0, 0.0])
    busiest, entropy = load_figures(torch.stack([torch.stack((c, c)) for c in (even, one)])).values()
    assert (busiest.item(), entropy.item()) == pytest.approx(((0.25 + 1.0) / 2, (1.0 + 0.0) / 2))


# --- files
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("stacked", [False, True])
def test_an_export_has_the_layout_of_its_base(name, stacked, tmp_path):
    theirs = reference(EXPERTS[name])
    ours, recipe, hf = opened(theirs, tmp_path / "base", stacked)
    named = ((n, p.data) for n, p in ours.named_parameters())
    exporting.export_weights(tmp_path / "out", named, recipe, hf)
    base, out = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "out"))
    assert any(".experts.0." in key for key in base) != stacked
    assert base.keys() == out.keys() and all(torch.equal(base[key], out[key]) for key in base)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("base", "out"))
    ids = torch.arange(12)[None]
    assert torch.equal(one(ids).logits, two(ids).logits)


def test_draws_of_a_shape_are_those_of_transformers_layout():
    hf = {**EXPERTS["mixtral"], "architectures": ["MixtralForCausalLM"]}
    model, recipe = load(None, hf, "native", torch.float32, 3)
    materialise(model, recipe)
    gate_up = model.blocks["0"].experts.gate_up
    assert gate_up.std().item() == pytest.approx(0.02, rel=0.1)
    ((name, stacked),) = recipe.split("blocks.0.experts.gate_up", gate_up.data)
    assert name == "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(stacked[:, :40], gate_up[:, ::2]) and torch.equal(stacked[:, 40:], gate_up[:, 1::2])
    local = torch.empty(2, 3, 4)
    recipe.fill("blocks.0.experts.gate_up", local, (5, 2, 1))
    assert torch.equal(local, gate_up[5:7, 2:5, 1:5])


# --- whole runs
@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A folder as the golden tests', whose `untied` has experts, and `balanced` their loss of balance too."""
    made = tmp_path_factory.mktemp("moe")
    make_golden.write_model(made / "untied", False, **MOE)
    shutil.copytree(made / "untied", made / "balanced")
    config = json.loads((made / "balanced" / "config.json").read_text())
    text = json.dumps({**config, "output_router_logits": True, "router_aux_loss_coef": 0.5})
    (made / "balanced" / "config.json").write_text(text)
    make_golden.write_documents(made / "text.jsonl", False)
    return made


@pytest.fixture(scope="module")
def golden(moe):
    return make_golden.golden(moe / "untied", moe / "text.jsonl", False)


WAYS: list[dict[str, Any]] = [
    {}, {"attention": {}}, {"fused_kernels": {}}, {"recompute": {}}, {"selective_recompute": {"ops": "attention"}},
    {"fused_adamw": {}, "fused_loss": {"chunk": 5}},
]  # fmt: skip


def agrees(lines: list[dict[str, Any]], golden: dict[str, list[float]]) -> None:
    lines = [line for line in lines if "loss" in line]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == pytest.approx(golden[key], rel=1e-5)
    assert all(1 / 6 < line["expert_busiest"] < 0.6 and 0.5 < line["expert_entropy"] < 1 for line in lines)


@pytest.mark.parametrize("with_", further(WAYS[::-1], 1), ids=str)
def test_a_run_is_the_one_of_transformers(moe, golden, with_):
    agrees(metrics(golden_run(moe, packed="attention" not in with_, **with_)), golden)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.slow
def test_a_compiled_run(moe, golden, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more))
    torch._dynamo.reset()
    agrees(metrics(golden_run(moe, packed=True, compile={})), golden)
    torch._dynamo.reset()


def on_ranks(moe: Path, with_: dict[str, Any]) -> list[dict[str, Any]]:
    return metrics(golden_run(moe, packed=True, **with_))


@pytest.mark.parametrize("with_", further([{"fsdp": {}}, {"ddp": {}}], 1), ids=str)
def test_two_ranks(moe, golden, pair, with_):
    agrees(pair(on_ranks, moe, with_)[0], golden)


def test_documents_do_not_see_each_other(moe):
    trainer = assembled(golden_run(moe, rows=4, packed=True))
    batch = micro(trainer)
    assert alone(trainer, batch) <= 1e-5
    before, after, _ = disturbed(trainer, batch)
    assert torch.equal(before, after)


def test_the_loss_has_the_balance(moe):
    """As many times as transformers adds it to a batch's mean; not in an evaluation."""
    plain, balanced = (
        assembled(golden_run(moe, rows=8, packed=True, sets=[f"model.path={moe / name}"]))
        for name in ("untied", "balanced")
    )
    batch = micro(balanced)
    extra = (balanced.loss(batch) - plain.loss(batch)) / batch.n_terms
    torch.testing.assert_close(extra, 0.5 * balance_loss(balanced.model.load, 2), rtol=1e-4, atol=0)
    with torch.no_grad():
        assert torch.equal(balanced.loss(batch), plain.loss(batch))
    assert first_gradients(balanced)[0] > first_gradients(plain)[0]


def test_a_stopped_run_goes_on_to_the_bit(moe, tmp_path):
    prepared, finals = decide(golden_run(moe, packed=True, sets=[f"output={tmp_path}", "train.save_every=3"])), []
    for resume in (None, "auto"):
        assert run(RunRequest(prepared, resume=resume)).code == 0
        finals.append(load_file(tmp_path / "model" / "model.safetensors"))
        for place in (*sorted((tmp_path / "checkpoints").glob("step-*"))[1:], tmp_path / "model"):
            shutil.rmtree(place)
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


# --- adapters
def test_adapters_of_the_attention(moe, tmp_path):
    """Trained, written in PEFT's format, and loaded there onto the base: the same logits."""
    config = golden_run(moe, packed=True, lora={"rank": 2})
    trainer = assembled(config)
    list(steps(trainer, 2))
    assert {t.name.split(".")[2] for t in trainer.trained} == {"qkv", "o"}
    assert any("experts" in note for note in trainer.notes)
    folder = tmp_path / "adapter"
    folder.mkdir()
    values = exporting.trained_parameters(trainer)
    io.save_adapter(folder, trainer.model, trainer.weight_map, values, str(moe / "untied"))
    adapted = load_file(folder / "adapter_model.safetensors")
    assert not any("expert" in key for key in adapted)
    base = AutoModelForCausalLM.from_pretrained(moe / "untied", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    batch = packed([[12]], 12, 61, single=True)
    hidden = trainer.model(batch.tokens, batch.positions, batch.documents)
    with torch.no_grad():
        want = theirs(input_ids=batch.tokens, use_cache=False).logits
    torch.testing.assert_close(trainer.model.head.logits(hidden), want, rtol=1e-5, atol=1e-5)
    full = 6 * trainer.env.shape.matrix_parameters
    assert trainer.model.frozen_flops > 0.3 * full, "frozen experts have no gradient"


NEXT, DEEPSEEK, LLAMA4, GLM4, GEMMA4 = (
    {key: value for key, value in EXPERTS[name].items() if not key.endswith("token_id") and key != "vocab_size"}
    for name in ("qwen3_next", "deepseek_v3", "llama4_text", "glm4_moe", "gemma4_text-experts")
)
GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16,
    "swiglu_limit": 1.0,
}  # fmt: skip


SOME = ["q_proj", "o_proj", "down_proj"]


@pytest.mark.parametrize(("family", "targets"), further([
    ("gpt_oss", "experts"), ("qwen3_next", ["in_proj_qkvz", "gate_up_proj", "down_proj", "dense"]),
    ("deepseek_v3", ["attention", "experts", "dense"]), ("llama4_text", ["attention", "experts", "dense"]),
    ("glm4_moe", ["attention", "experts", "dense"]), ("gemma4_text", ["attention", "experts", "dense"]),
    ("deepseek_v3", "dense"), ("gpt_oss", SOME), ("llama4_text", SOME),
    *(("qwen3_moe", targets) for targets in ("experts", SOME)),
], 4), ids=str)  # fmt: skip
def test_adapters_of_experts(family, targets, moe, tmp_path):
    """PEFT's adapters of parameters: loaded there the same logits and gradients, merged the same matrices."""
    box = moe
    if family != "qwen3_moe":
        box = tmp_path
        known = {
            "gpt_oss": GPT_OSS, "qwen3_next": NEXT, "deepseek_v3": DEEPSEEK, "llama4_text": LLAMA4, "glm4_moe": GLM4,
            "gemma4_text": GEMMA4,
        }  # fmt: skip
        sizes = known[family]
        make_golden.write_model(box / "untied", False, **sizes)
        make_golden.write_documents(box / "text.jsonl", False)
    lora = {"rank": 3, "targets": targets, "rslora": targets == "experts"}
    config = golden_run(box, packed=True, lora=lora)
    trainer, resolved = assembled(config), decide(config)
    learnt = baseline.book(resolved.techniques, resolved.env, ModelShape.read(resolved.hf), 0.0)
    planned = sum(line.values for line in learnt.lines if line.name == "weights.adapters")
    assert planned == sum(t.parameter.numel() for t in trainer.trained)
    list(steps(trainer, 2))
    frozen = [block.experts for block in trainer.model.blocks.values() if block.experts is not None]
    assert not any(experts.gate_up.requires_grad or experts.down.requires_grad for experts in frozen)
    folder = tmp_path / "adapter"
    folder.mkdir()
    values = exporting.trained_parameters(trainer)
    io.save_adapter(folder, trainer.model, trainer.weight_map, values, str(box / "untied"))
    base = AutoModelForCausalLM.from_pretrained(box / "untied", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    batch = packed([[12]], 12, 80, single=True)
    hidden = trainer.model(batch.tokens, batch.positions, batch.documents)
    want = theirs(input_ids=batch.tokens, use_cache=False).logits
    close = 1e-4 if family == "qwen3_next" else 1e-5  # its rule rounds more: in float64 equal (test_peft.py)
    torch.testing.assert_close(trainer.model.head.logits(hidden), want, rtol=1e-5, atol=close)
    trainer.zero_grad()
    trainer.model.head(hidden, batch.labels).backward()
    torch.nn.functional.cross_entropy(want.flatten(0, 1), batch.labels.flatten(), reduction="sum").backward()
    grads = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert any("experts" in name for name in grads)
    for adapter in io.adapters(trainer.model).values():
        for key, found in adapter.published({name: p.grad for name, p in adapter.named_parameters()}):
            expected = grads.pop(io.PREFIX + key)
            assert expected.abs().max() > 0, key
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4 * expected.abs().max().item(), msg=key)
    assert not grads
    again = assembled(golden_run(box, packed=True, lora={**lora, "init": str(folder)}))
    mine = dict(again.model.named_parameters())
    assert all(torch.equal(mine[name], value) for name, value in values.items())
    merged = theirs.merge_and_unload().state_dict()
    for name, full in exporting.published_tensors(trainer):
        for hf_name, part in trainer.weight_map.split(name, full):
            if hf_name in merged:  # stacked
                torch.testing.assert_close(part, merged[hf_name], rtol=1e-5, atol=1e-6)
    exporting.export_weights(tmp_path / "out", exporting.published_tensors(trainer), trainer.weight_map, trainer.hf)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(reloaded(batch.tokens).logits, want, rtol=1e-5, atol=close)


@pytest.mark.parametrize(("with_", "found"), [
    ({"lora": {"targets": "mlp"}}, "gate_proj is a part of the experts' gate_up_proj"),
    ({"lora": {"targets": ("experts", "dens")}}, "no linear is called dens"),
    ({"lora": {"targets": ("q_proj", "no_proj")}}, "no linear is called no_proj"),
    ({"lora": {"targets": "experts", "dora": True}}, "dora or dropout"),
    ({"lora": {"targets": "dense"}}, "every layer has experts"),
    ({"lora": {}, "nf4": {}}, "rows of 64 and 32 values; a block of 64"), ({"ia3": {}}, "`ia3`"),
    ({"fp8": {}}, "`fp8`"), ({"muon": {}}, "`muon`"), ({"fused_kernels": {"mlp": "quack"}}, "mlp=quack"),
    ({"selective_recompute": {}}, "selective-recompute"),
], ids=str)  # fmt: skip
def test_what_experts_do_not_have_is_refused(moe, with_, found):
    with pytest.raises(NeedsError, match=found):
        decide(golden_run(moe, packed=True, **with_))


def test_what_parts_beside_experts_do_not_have_is_refused(tmp_path):
    make_golden.write_model(tmp_path / "untied", False, **DEEPSEEK)
    make_golden.write_documents(tmp_path / "text.jsonl", False)
    with pytest.raises(NeedsError, match="which PEFT does not support for parts next to experts"):
        decide(golden_run(tmp_path, packed=True, lora={"targets": "dense", "dropout": 0.1}))
    with pytest.raises(NeedsError, match="gate_proj is a part of the experts' gate_up_proj") as caught:
        decide(golden_run(tmp_path, packed=True, lora={"targets": "mlp"}))
    assert "dense for shared experts" in caught.value.do
