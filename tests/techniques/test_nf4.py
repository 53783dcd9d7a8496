"""Frozen linears in fewer bits: the same maths as with the dense values they stand for, whatever runs beside them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from meshes import further
from optrush.config import dump_config
from optrush.errors import NeedsError
from optrush.exporting import write_model
from optrush.hardware import NAMED
from optrush.kernels import nf4
from optrush.models.decoder import Linear
from optrush.models.experts import StackedMatrices
from optrush.models.shapes import SHAPES
from optrush.models.weights import Memory, WeightEntry, WeightMap, export_weights
from optrush.peft import ledger, quantized
from optrush.peft.quantized import Form, quantize_model
from optrush.planner import search
from optrush.technique import Numerics, Part, Technique
from optrush.techniques import ALL
from optrush.trainer.trainer import Storage

from golden import make_golden
from golden.make_golden import SIZES
from memory import Tracker, known
from trials import apart, assembled, golden_run, micro, shaped, steps, weights

FORMS = {"nf4": {"nf4": {}}, "single": {"nf4": {"double": False}}, "int8": {"int8": {}}}
LORA = {"lora": {"rank": 4, "alpha": 16.0}}
MIXTURES = {
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16,
        "swiglu_limit": 1.0, "intermediate_size": 64,
    },
    "qwen2_moe": {  # through transformers
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "pad_token_id": None,
    },
    "deepseek_v3": {  # whose linears of latent attention, dense layers and shared experts are held so, too
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 10,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7, "head_dim": 4, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 3, "topk_group": 2,
        "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
    "qwen3_next": {  # and those of its delta rule
        "model_type": "qwen3_next", "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
LARGEST = 2 * SIZES["intermediate_size"] * SIZES["hidden_size"]  # values of the largest linear, gate and up
OP = "optrush.dense.default"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch._dynamo"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]


@dataclass(frozen=True)
class Norms(Technique):
    """Trains the norms, all else is frozen: another owner of what is trained than the adapters."""

    name = "norms"
    summary = source = proof = "norms"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    claims = frozenset({Part.TRAINED})

    def peft(self, trainer):
        for name, p in trainer.model.named_parameters():
            p.requires_grad_("norm" in name)
        return 1


@pytest.fixture(scope="module")
def routed(tmp_path_factory, box):
    """Folders as `box`, whose models have experts with rows of whole blocks, each a tensor or all of a layer in one."""
    made = {}
    for family, sizes in MIXTURES.items():
        made[family] = tmp_path_factory.mktemp(family)
        make_golden.write_model(made[family] / "untied", False, **sizes)
        for name in ("text.jsonl", "held.jsonl"):
            (made[family] / name).write_text((box / name).read_text())
    return made


def job_of(box, with_, **options):
    return assembled(golden_run(box, packed=True, **with_, **options), (*ALL, Norms))


def given(trainer, source):
    """The job with the dense values that another holds in fewer bits."""
    with torch.no_grad():
        for (_, linear), (_, other) in zip(trainer.model.linears(), source.model.linears(), strict=True):
            linear.weight.copy_(other.dequantized(linear.weight.dtype))
        for experts, other in zip(experts_of(trainer), experts_of(source), strict=True):
            for kind in experts.sizes:
                weight = experts.get_parameter(kind)
                weight.copy_(other.dense(kind, weight.dtype))
    return trainer


def experts_of(trainer):
    return [m for m in trainer.model.modules() if isinstance(m, StackedMatrices)]


def played(job, n=3):
    """Losses and norms of the first steps, and the trained weights after them."""
    return [line[:2] for line in steps(job, n)], weights(job)


def assert_equal(one, other):
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


# The same maths: losses, norms and what was learnt, to the bit.

DENSE = [  # form, what beside
    ("nf4", {"amp": {}}), ("nf4", {"recompute": {}}), ("int8", {"bf16": {"rounding": "nearest"}}),
    ("single", {"amp": {}}), *(("nf4", beside) for beside in (
        {"update_in_backward": {}}, {"fused_kernels": {}}, {"selective_recompute": {"ops": "attention"}},
        {"fused_adamw": {}}, {"fused_loss": {"chunk": 32}}, {"bf16": {"rounding": "nearest"}})),
    ("int8", {}), ("single", {}),
]  # fmt: skip
EXPERTS_LORA = {"lora": {**LORA["lora"], "targets": ["q_proj", "gate_up_proj", "down_proj"]}}
ROUTED = [  # form, family, what beside
    ("nf4", "qwen3_moe", {}), ("nf4", "gpt_oss", {"amp": {}}), ("single", "gpt_oss", {"recompute": {}}),
    ("int8", "qwen3_moe", {"fused_kernels": {"mlp": "triton", "norm": True}}), ("nf4", "deepseek_v3", {}),
    ("int8", "qwen3_next", {"amp": {}}),
]  # fmt: skip


def equal_to_dense(box, form, lora, beside):
    ours = job_of(box, {**FORMS[form], **lora, **beside})
    plain = given(job_of(box, {**lora, **beside}), ours)
    first = [linear.dequantized(torch.float32) for _, linear in ours.model.linears()]
    assert_equal(played(ours, 2), played(plain, 2))
    assert all(torch.equal(a, linear.dequantized(torch.float32)) for a, (_, linear) in zip(first, ours.model.linears()))
    return ours, plain


@pytest.mark.parametrize(("form", "beside"), further(DENSE, 3), ids=str)
def test_equal_to_dense_weights_of_these_values(box, form, beside):
    equal_to_dense(box, form, LORA, beside)


@pytest.mark.parametrize(("form", "family", "beside"), further(ROUTED, 2), ids=str)
def test_experts_equal_to_dense_ones_of_these_values(routed, form, family, beside):
    ours, plain = equal_to_dense(routed[family], form, EXPERTS_LORA, beside)
    assert all(experts.gate_up is None and experts.down is None for experts in experts_of(ours))
    narrow = torch.bfloat16 if "amp" in beside else torch.float32
    assert all(experts.gate_up.dtype == narrow for experts in experts_of(plain)), "frozen: as each product casts them"
    assert ours.model.frozen_flops == plain.model.frozen_flops > 0


def test_equal_whoever_says_what_is_trained(box):
    ours = job_of(box, {"nf4": {}, "norms": {}})
    assert_equal(played(ours), played(given(job_of(box, {"norms": {}}), ours)))


def test_a_bias_that_is_trained_has_its_gradient(tmp_path):
    at = {"device": torch.device("meta"), "dtype": torch.float32}
    linear = Linear(48, (("gate", 1), ("up", 1)), groups=5, bias=True, **at)
    parts = {name: torch.randn(5, 48) for name in ("g", "u")}
    recipe = WeightMap({"x.weight": WeightEntry((10, 48), (("g", 1), ("u", 1)), 5)}, Memory(parts))
    holder = type("Holder", (torch.nn.Module,), {"linears": lambda self: [("x", linear)]})()
    assert quantize_model(holder, recipe, Form(4), None) == 1 and linear.weight is None
    linear.to_empty(device="cpu")
    for name, p in linear.named_parameters(prefix="x"):
        if "bias" not in name:
            recipe.fill(name, p.detach(), (0,))
    torch.nn.init.normal_(linear.bias)
    x, g = torch.randn(3, 4, 48, requires_grad=True), torch.randn(3, 4, 10)
    found = torch.autograd.grad(linear(x), (x, linear.bias), g)
    y = torch.nn.functional.linear(x, linear.dequantized(torch.float32), linear.bias)
    want = torch.autograd.grad(y, (x, linear.bias), g)
    assert all(map(torch.equal, found, want)) and torch.equal(linear(x), y)
    rows = torch.empty(4, 48)
    recipe.fill("x.weight", rows, (3, 0))
    assert torch.equal(rows, linear.dequantized(torch.float32)[3:7]), "whoever measures the weight gets what multiplies"


# Compiled: a full graph, and nothing dense is kept for the backward pass.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("beside", further([{"amp": {}}, {"selective_recompute": {"ops": "attention"}}], 1), ids=str)
def test_compiled(box, monkeypatch, beside):
    """Through all of torch's compiler but the code it writes, which takes half a minute."""
    real, kept = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda f, options, **kwargs: real(f, backend="aot_eager", **kwargs))
    torch._dynamo.reset()
    counters.clear()
    ours = job_of(box, {"nf4": {}, "compile": {}, **LORA, **beside}, rows=8)
    inner = ours.loss

    def watched(batch):
        with saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            return inner(batch)

    ours.loss = watched
    found = played(ours)
    compiled = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert compiled <= 4, "block 0, whose input needs no gradient; block 1; norm; loss"
    want = played(job_of(box, {"nf4": {}, **LORA, **beside}, rows=8))
    for (a, norm), (b, other) in zip(found[0], want[0], strict=True):
        assert a == pytest.approx(b, rel=1e-3 if beside else 1e-5) and norm == pytest.approx(other, rel=2e-2)
    matrices = {tuple(linear.dequantized(torch.float32).shape) for _, linear in ours.model.linears()}
    assert kept and not (matrices | {shape[::-1] for shape in matrices}) & {*kept}, (
        "no dense weight waits for the backward pass"
    )


# Memory.


class Watching(Tracker):
    """Also the most bytes of dense weights that are alive at once."""

    dense = 0

    def hold(self, t, op):
        super().hold(t, op)
        self.dense = max(self.dense, sum(p.bytes for p in self.pieces.values() if p.op == OP))


@pytest.mark.parametrize("beside", further([{"recompute": {}}, {}], 1), ids=str)
def test_one_dense_linear_at_a_time(box, beside):
    job = job_of(box, {"nf4": {}, **LORA, **beside})
    tracker = Watching()
    known(tracker, job)
    with tracker:
        list(steps(job, 2))
    assert tracker.dense == 4 * LARGEST


DEEP = {**SHAPES["llama-3.2-1b"], **SIZES, "num_hidden_layers": 24, "tie_word_embeddings": True, "rope_scaling": None}


def test_the_model_is_never_dense_as_a_whole(monkeypatch):
    """While it is filled, beside what stays lie a few copies of one tensor."""
    monkeypatch.setitem(SHAPES, "deep", DEEP)
    seen, materialise = {}, Storage.materialise

    def watched(storage, trainer):
        tracker = Tracker()
        with tracker:
            materialise(storage, trainer)
        held = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        seen.update(peak=tracker.peak, held=held)

    monkeypatch.setattr(Storage, "materialise", watched)
    job = assembled(shaped("deep", "nf4", "lora", rows=2, seq=32))
    tensor = 4 * SIZES["intermediate_size"] * SIZES["hidden_size"]
    dense = 4 * sum(linear.in_features * linear.out_features for _, linear in job.model.linears())
    assert dense > 70 * tensor and seen["peak"] - seen["held"] < 10 * tensor
    stored = sum(p.nbytes for _, linear in job.model.linears() for p in linear.quantized.parameters())
    assert 8 * stored / (dense / 4) == pytest.approx(4.127, rel=0.02)


# Two ranks.


def bytes_of(t: torch.Tensor) -> bytes:
    return bytes(t.detach().contiguous().view(torch.uint8).tolist())


def sharded(box, with_):
    """(figures of three steps, bytes of the stored parameters while they are gathered, whether they are cut)."""
    job = job_of(box, with_)
    held = {name: p for name, p in job.model.named_parameters() if ".quantized." in name}
    gathered, cut = {}, all(isinstance(p, DTensor) for p in held.values())
    block = job.model.blocks["1"]

    def look(*_):
        for name, p in block.named_parameters():
            if ".quantized." in name and not isinstance(p, DTensor):
                gathered[name] = bytes_of(p)

    block.qkv.register_forward_hook(look)
    figures = [line[:2] for line in steps(job, 3)]
    local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in held.items()}
    return figures, gathered, cut, sum(p.nbytes for p in local.values())


TWO = [  # form, family with experts, axis, what beside: no policy of FSDP2 touches the bytes, nor one that casts
    ("nf4", "", "fsdp", {"amp": {}}), ("nf4", "", "ddp", {}), ("nf4", "qwen3_moe", "fsdp", {}),
    ("single", "", "fsdp", {"amp": {"dtype": "fp16"}}), ("int8", "", "fsdp", {"bf16": {}}),
    ("nf4", "qwen3_moe", "ddp", {}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "family", "axis", "beside"), further(TWO, 3), ids=str)
def test_on_two_ranks(box, routed, pair, form, family, axis, beside):
    """Cut over them and gathered whole to the byte, or whole on each."""
    box, lora = (routed[family], EXPERTS_LORA) if family else (box, LORA)
    with_ = {**FORMS[form], **lora, **beside}
    alone = job_of(box, with_)
    want = {n: bytes_of(p) for n, p in alone.model.blocks["1"].named_parameters() if ".quantized." in n}
    whole = sum(p.nbytes for n, p in alone.model.named_parameters() if ".quantized." in n)
    figures = [line[:2] for line in steps(alone, 3)]
    both = pair(sharded, box, {**with_, axis: {}})
    assert both[0][0] == both[1][0] and any("experts" in name for name in want) == bool(family)
    for found, gathered, cut, held in both:
        assert gathered == want and cut == (axis == "fsdp") and (held < 0.55 * whole) == cut
        assert found == [pytest.approx(line, rel=2e-2 if beside else 1e-5) for line in figures]


# What comes out: a model that transformers loads.


@pytest.mark.parametrize(
    ("form", "family", "lora"),
    further([("nf4", "", LORA), ("nf4", "qwen3_moe", EXPERTS_LORA), ("nf4", "gpt_oss", LORA),
             ("nf4", "qwen3_next", LORA), ("single", "", LORA), ("int8", "", LORA)], 2),
    ids=str,
)  # fmt: skip
def test_merged_and_exported(box, routed, tmp_path, form, family, lora):
    """transformers loads both: the merged model, and in PEFT the adapter on the values that the codes stand for."""
    box = routed[family] if family else box
    job = job_of(box, {**FORMS[form], **lora})
    list(steps(job, 3))
    (tmp_path / "run.yaml").write_text(dump_config(job.config))
    folder = write_model(job, tmp_path, 3, box / "untied")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    plain = given(job_of(box, lora), job)
    base = {n: p for n, p in plain.model.named_parameters() if "adapter" not in n}
    export_weights(tmp_path / "dense", iter(base.items()), plain.weight_map, plain.hf)
    batch = micro(job)
    first = slice(int(batch.positions[0].eq(0).nonzero()[1]))
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        want = job.model.head.logits(job.model(batch.tokens, batch.positions, batch.documents))[:1, first]
        for model in (merged, theirs):
            assert apart(model(batch.tokens[:1, first]).logits, want) < 1e-5


# Models through transformers.


def test_through_transformers(box):
    sets = ["model.implementation=transformers"]
    ours = job_of(box, {"nf4": {}, **LORA}, sets=sets)
    native = job_of(box, {"nf4": {}, **LORA})
    found, want = played(ours)[0], played(native)[0]
    assert [a for pair in found for a in pair] == pytest.approx([a for pair in want for a in pair], rel=1e-4)


def test_a_gpu_without_what_builds_kernels(box, monkeypatch):
    monkeypatch.setattr("optrush.technique.installed", lambda *names: None)
    monkeypatch.setattr("optrush.technique.library", lambda name: "3")
    with pytest.raises(NeedsError, match="needs a C compiler"):
        ledger.demand_compilers("nf4", NAMED["h200"])


# What it predicts.


@pytest.mark.parametrize(("form", "bits"), [("nf4", 4.127), ("single", 4.5), ("int8", 8.0078)])
def test_what_it_predicts(form, bits):
    usual = ("bf16", "attention", "compile", "fused-loss", "fused-adamw", "lora")
    config = shaped("llama-3.1-8b", *usual, rows=1, seq=4096, windows=2)
    ours = search.predict(config.model_copy(update={"with_": {**config.with_, **FORMS[form]}}), "h200")
    plain = search.predict(config, "h200")
    of = {line.name: line.bytes for line in ours.lines}
    blocks = next(line.bytes for line in plain.lines if line.name == "weights.blocks") / 2
    assert 8 * of["weights.blocks"] / blocks == pytest.approx(bits, abs=1e-3)
    saved = blocks * (2 - bits / 8)
    assert plain.peak_bytes - ours.peak_bytes == pytest.approx(saved, rel=0.02)
    work = {e.name: e.seconds for e in ours.work if e.where == "device"}
    extra = sum(s for name, s in work.items() if "pack" in name)
    assert 0 < extra < 0.06 * sum(work.values()) and ours.tokens_per_s < plain.tokens_per_s


def test_the_prediction_is_what_is_held(box):
    """Of a model whose linears are nearly all: bytes of the blocks' weights as torch counts them."""
    job = job_of(box, {"nf4": {}, **LORA})
    held = sum(p.nbytes for n, p in job.model.named_parameters() if ".quantized." in n)
    values = sum(linear.in_features * linear.out_features for _, linear in job.model.linears())
    pieces = [
        rows * linear.groups * linear.in_features
        for _, linear in job.model.linears()
        for _, rows in linear.output_splits
    ]
    exact = sum(sum(nf4.nf4_bytes(1, n, True).values()) for n in pieces)
    assert exact <= held <= exact + 2 * 3 * len(pieces) and held / values == pytest.approx(0.516, rel=0.02)


# Experts.


@pytest.mark.parametrize("targets", further(["all-linear", "experts", ["q_proj", "gate_up_proj"]], 1), ids=str)
def test_experts_of_a_transformers_model(routed, tmp_path, targets):
    """They are held in 4 bits, too, as the plan says, and adapters beside them are PEFT's."""
    box, lora = routed["qwen2_moe"], {"lora": {**LORA["lora"], "rank": 8, "targets": targets}}
    ours, plain = job_of(box, {"nf4": {}, **lora}), job_of(box, lora)
    assert_equal(played(ours, 2), played(given(plain, ours), 2))
    assert all(experts.down_proj is None for experts in experts_of(ours))
    assert ours.model.frozen_flops == plain.model.frozen_flops > 0
    frozen = "stacked matrices" if targets == "all-linear" else "routers"
    assert any(f"the {frozen} of the experts stay frozen" in note for note in ours.notes)
    held = {n: p.nbytes for n, p in ours.model.named_parameters() if ".layers." in n and "adapter" not in n}
    small = sum(size for n, size in held.items() if "quantized" not in n)
    of = {line.name: line.bytes for line in search.predict(ours.config, "h100").lines}
    assert of["weights.blocks"] == pytest.approx(sum(held.values()), abs=small)
    adapters = sum(p.nbytes for n, p in ours.model.named_parameters() if "adapter" in n)
    assert of["weights.adapters"] == pytest.approx(adapters)
    test_merged_and_exported(box, routed, tmp_path, "nf4", "qwen2_moe", lora)


def test_experts_of_one_matrix_are_dense_at_a_time(routed):
    job = job_of(routed["qwen3_moe"], {"nf4": {}, **EXPERTS_LORA, "amp": {}})
    tracker, kept, gate_up = Watching(), [], math.prod(experts_of(job)[0].sizes["gate_up"])
    known(tracker, job)
    with tracker, saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        job.loss(micro(job)).backward()
    assert tracker.dense == 2 * gate_up and max(kept) < gate_up, "in 16 bits, and not for the backward pass"


@pytest.mark.parametrize(("form", "family"), [("nf4", "qwen3_moe"), ("nf4", "gpt_oss"), ("single", "gpt_oss")])
def test_bytes_of_experts_are_those_of_bitsandbytes(routed, form, family):
    """For the matrix that has all experts of a layer one below the other; expert after expert is quantised."""
    quantize = pytest.importorskip("bitsandbytes.functional").quantize_4bit
    double = form == "nf4"
    ours, plain = (job_of(routed[family], with_) for with_ in ({**FORMS[form], **LORA}, LORA))
    for experts, dense in zip(experts_of(ours), experts_of(plain), strict=True):
        for kind, held in experts.quantized.items():
            codes, state = quantize(
                dense.get_parameter(kind).flatten(0, 1), compress_statistics=double, quant_type="nf4"
            )
            want = {"codes": codes, "absmax": state.absmax}
            if double:
                want["nested"] = torch.cat((state.state2.absmax, state.offset[None]))
            found = dict(held.experts.named_parameters())
            assert found.keys() == want.keys()
            for name, value in want.items():
                raw = value.flatten().view(torch.uint8)
                assert torch.equal(found[name].view(torch.uint8)[: raw.numel()], raw), (kind, name)


def test_what_it_predicts_of_experts(routed):
    """Bytes as torch counts them, up to the routers; and a model of 30B parameters in less than 20 GiB."""
    config = golden_run(routed["qwen3_moe"], packed=True, bf16={}, nf4={}, **LORA)
    of = {line.name: line.bytes for line in search.predict(config, "h100").lines}
    job = job_of(routed["qwen3_moe"], {"bf16": {}, "nf4": {}, **LORA})
    blocks = {n: p.nbytes for n, p in job.model.named_parameters() if n.startswith("blocks") and "adapter" not in n}
    held, small = sum(blocks.values()), sum(size for n, size in blocks.items() if "quantized" not in n)
    assert of["weights.blocks"] == pytest.approx(held, abs=small)
    usual = ("bf16", "attention", "compile", "fused-loss:chunk=512", "recompute", "lora:rank=16", "nf4")
    large = search.predict(shaped("qwen3-30b-a3b", *usual, rows=1, seq=4096), "h100")
    of = {line.name: line.bytes for line in large.lines}
    assert 8 * of["weights.blocks"] / 29_909_790_720 == pytest.approx(4.127, abs=1e-3)
    assert of["working.dense.backward"] == 2 * 128 * 2 * 768 * 2048 and large.peak_bytes < 20 * 2**30


def test_experts_are_dense_a_few_at_a_time(routed, monkeypatch):
    """How many are read at once changes no byte, and no more than those are dense."""
    seen = []
    for most in (1, 1 << 26):
        monkeypatch.setattr(quantized, "DENSE_values", most)
        job = job_of(routed["qwen3_moe"], {"nf4": {}, **LORA})
        seen.append({n: bytes_of(p) for n, p in job.model.named_parameters() if "experts.quantized" in n})
    assert seen[0] == seen[1] and len(seen[0]) == 2 * 2 * 3


# How far they are from the model of the file, and how they learn.


@pytest.mark.parametrize(("form", "off"), [("int8", 0.01), ("nf4", 0.15), ("single", 0.15)])
def test_how_far_weights_and_hidden_states_are(box, form, off):
    """A bound for each: halved, these fail."""
    plain = assembled(golden_run(box, packed=True, lora={}))
    ours = assembled(golden_run(box, packed=True, lora={}, **FORMS[form]))
    for (_, a), (_, b) in zip(ours.model.linears(), plain.model.linears(), strict=True):
        dense = a.dequantized(torch.float32)
        assert off / 4 < (dense - b.weight).norm() / b.weight.norm() < off
    batch = next(plain.batches)[0]
    with torch.no_grad():
        x, y = (j.model(batch.tokens, batch.positions, batch.documents).flatten() for j in (ours, plain))
    assert F.cosine_similarity(x, y, dim=0) > 1 - off
