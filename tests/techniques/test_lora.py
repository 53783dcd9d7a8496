"""Adapters among the other techniques: same gradients, frozen bits, dtypes, resuming, ranks, memory, messages.

tests/parity/test_peft.py holds the adapters themselves against PEFT.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshes import further
from optrush.config import parse_config
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.exporting import write_adapter
from optrush.hardware import parse_hardware
from optrush.models import activation_offload
from optrush.models.shapes import SHAPES
from optrush.models.weights import Memory, WeightMap, native_entries
from optrush.peft import io, ledger
from optrush.planner import baseline, search
from optrush.planner.answer import planned_notes
from optrush.restore import rebuild
from optrush.technique import instantiate
from optrush.techniques import ALL
from optrush.techniques.lora import Lora
from optrush.techniques.offload_activations import OffloadActivations
from optrush.trainer import run as fit

import memory
from golden.make_golden import CASES
from heldout import held_out
from trials import assembled, first_gradients, furthest, golden_run, learnt, micro, shaped, steps, weights

CLOSE = 1e-5
SOME = {"targets": ["q_proj", "v_proj", "up_proj", "down_proj"], "rank": 4}


def learning(box, case="untied", classes=ALL, rows=2, **with_):
    """A job whose adapters have learnt something already, so that every gradient is there."""
    with_ = {"lora": SOME, **with_}
    run = golden_run(box, CASES[case], packed=True, rows=rows, sets=with_.pop("sets", ()), **with_)
    return learnt(assembled(run, classes))


# Beside other techniques.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.slow
def test_compiled(box, traced):
    """Full graphs: of the first block, into which no gradient goes back, and of all others; and with adapters off."""
    want_loss, want = first_gradients(learning(box, lora={**SOME, "dora": True}))
    job = learning(box, lora={**SOME, "dora": True}, compile={}, attention={}, recompute={"every": 2})
    loss, grads = first_gradients(job)
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < CLOSE
    assert counters["stats"]["unique_graphs"] <= 5 and not counters["graph_break"]
    batch, base = micro(job), evaluate_on(assembled(golden_run(box, packed=True)))
    with job.adapters_disabled(), torch.no_grad():
        assert (job.loss(batch) / batch.n_terms).item() == pytest.approx(base, rel=1e-6)
    assert furthest(first_gradients(job)[1], want) > CLOSE, "the next step"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("base", further([{"nf4": {"double": False}}, {"int8": {}}], 1), ids=str)
def test_compiled_where_nothing_has_a_gradient(box, traced, base):
    """An evaluation, over weights stored in two parts each; without the code that a compiler writes."""
    want, found = (evaluate_on(learning(box, **base, **more)) for more in ({}, {"compile": {}}))
    assert found == pytest.approx(want, rel=1e-6)


class Now:
    """Copies at once, for there is no CUDA device here."""

    kind = "cpu"

    def copy(self, pairs):
        for to, of in pairs:
            to.copy_(of)

    def wait(self, mark):
        pass

    def page(self, size):
        return torch.empty(size, dtype=torch.uint8)


def offloading(monkeypatch, classes):
    """The techniques, of which one moves activations, even the smallest, without a GPU."""

    @dataclasses.dataclass(frozen=True)
    class Here(OffloadActivations):
        def needs(self, setup):
            yield from ()

        def lane(self, job):
            return Now()

    monkeypatch.setattr(activation_offload.Offload.__init__, "__kwdefaults__", {"page": 4096, "least": 256})
    return [Here if t is OffloadActivations else t for t in classes]


def test_offloaded_and_updated_in_the_backward_pass(box, monkeypatch):
    classes = offloading(monkeypatch, ALL)
    want = first_gradients(learning(box))
    found = first_gradients(learning(box, classes=classes, offload_activations={"keep": 0}))
    assert found[0] == want[0] and furthest(found[1], want[1]) == 0
    sets = ["batch.tokens=768", "batch.micro_tokens=768", "optim.clip=null"]
    plain, ours = (learning(box, sets=sets, **more) for more in ({}, {"update_in_backward": {}}))
    assert list(steps(ours, 3)) == [pytest.approx(line, rel=CLOSE) for line in steps(plain, 3)]
    assert furthest(weights(ours), weights(plain)) < CLOSE


def test_fp8_keeps_its_products(box):
    job = learning(box, lora={**SOME, "targets": "attention"}, fp8={}, sets=["batch.micro_tokens=96"])
    linears = dict(job.model.linears())
    assert linears["blocks.0.down"].matmul is linears["blocks.0.qkv"].adapter.inner
    (loss, norm, skipped), *_ = steps(job, 1)
    want = next(steps(learning(box, lora={**SOME, "targets": "attention"}), 1))
    assert loss == pytest.approx(want[0], rel=0.02) and norm == pytest.approx(want[1], rel=0.2) and not skipped


class Shapes(TorchDispatchMode):
    """Shapes of what products give."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.name().partition("::")[2].split(".")[0] in ("mm", "addmm", "bmm"):
            self.seen |= {tuple(t.shape) for t in tree_leaves(out)}
        return out


@pytest.mark.parametrize("beside", further([{}, {"fused_loss": {"chunk": 64}}, {"fused_kernels": {}}], 1), ids=str)
def test_no_frozen_weight_has_a_gradient_made(box, beside):
    job = learning(box, rows=1, **beside)
    shapes = {
        s for p in job.model.parameters() if not p.requires_grad and p.dim() > 1 for s in (p.shape, p.shape[::-1])
    }
    batch = micro(job)
    with Shapes() as found:
        job.loss(batch).backward()
    assert found.seen and not found.seen & shapes
    everything = assembled(golden_run(box, packed=True, rows=1, **beside))
    with Shapes() as found:
        everything.loss(batch).backward()
    assert found.seen & shapes, "this test would see one"


# What stays.


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_flops_are_counted_once_all_is_built(box, implementation, monkeypatch):
    """4 a frozen weight of a matrix and 6 one of an adapter; and no module is walked for it in a step."""
    run = golden_run(box, sets=[f"model.implementation={implementation}"], lora={"rank": 4})
    job = assembled(run)
    frozen = sum(linear.in_features * linear.out_features for _, linear in job.model.linears())
    frozen += job.model.head.weight.numel()
    learnt = sum(t.parameter.numel() for t in job.trained)
    monkeypatch.setattr(torch.nn.Module, "named_modules", None)
    assert job.model.flops(10, 0) == 10 * (4 * frozen + 6 * learnt)


def test_frozen_bits_stay(box):
    job = learning(box, sets=["optim.lr=1e-2", "batch.tokens=192", "batch.micro_tokens=96", "train.steps=25"])
    before = {n: p.detach().clone() for n, p in job.model.named_parameters() if not p.requires_grad}
    learnt, first = weights(job), evaluate_on(job)
    list(steps(job, 25))
    assert evaluate_on(job) < first - 0.3
    assert all(torch.equal(p, before[n]) for n, p in job.model.named_parameters() if n in before)
    assert all(not torch.equal(w, learnt[n]) for n, w in weights(job).items()) and len(before) > 10


def evaluate_on(trainer):
    batch = micro(trainer)
    return (trainer.eval_loss([batch]) / batch.n_terms).item()


@pytest.mark.parametrize("beside", further([{}, {"recompute": {}}], 1), ids=str)
def test_untrained_is_the_model_before(box, beside):
    job, base = learning(box, **beside), assembled(golden_run(box, packed=True))
    batch, want = micro(job), evaluate_on(base)
    for _ in range(2):
        assert evaluate_on(job) != pytest.approx(want, rel=1e-3)
        with job.adapters_disabled(), torch.no_grad():
            assert (job.loss(batch) / batch.n_terms).item() == pytest.approx(want, rel=1e-6)
    assert furthest(first_gradients(job)[1], first_gradients(learning(box))[1]) < CLOSE
    assert learning(box, lora={**SOME, "save": ["norm"]}).adapters_disabled is None


def test_dropout_is_for_training(box):
    job = learning(box, lora={**SOME, "dropout": 0.3})
    plain = learning(box)
    assert evaluate_on(job) == evaluate_on(plain)
    want = first_gradients(job)
    assert furthest(first_gradients(learning(box, lora={**SOME, "dropout": 0.3}, recompute={}))[1], want[1]) < CLOSE
    assert furthest(want[1], first_gradients(plain)[1]) > 0.01


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_all_modules_know_that_they_train(box, implementation):
    job = assembled(golden_run(box, sets=[f"model.implementation={implementation}"], lora={"rank": 4}))
    for _ in range(2):
        list(steps(job, 1))
        assert all(m.training for m in job.model.modules())
        evaluate_on(job)
        assert not any(m.training for m in job.model.modules())


@pytest.mark.parametrize(("case", "stream"), [("tied", "half"), ("untied", "float32")])
def test_types_under_mixed_precision(box, case, stream):
    """Frozen matrices in the products' type; norms, adapters, what is trained whole in float32; the stream as ever."""
    save = ["embed_tokens", "lm_head"] if stream == "half" else []
    job = learning(box, case, lora={**SOME, "save": save}, amp={"stream": stream})
    for name, p in job.model.named_parameters():
        narrow = p.dim() > 1 and not p.requires_grad
        assert p.dtype == (torch.bfloat16 if narrow else torch.float32), name
    seen = []
    job.model.blocks["1"].register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    (loss, _, skipped), *_ = steps(job, 1)
    assert {*seen} == {torch.float32 if stream == "float32" else torch.bfloat16} and not skipped
    wide = learning(box, case, lora={**SOME, "save": save})
    assert loss == pytest.approx(next(steps(wide, 1))[0], rel=2e-3)
    assert all(s.dtype == torch.float32 for held in job.optimizer.state().values() for s in held.values())


def test_adapters_in_bfloat16(box):
    """Adapters and moments in it, their checkpoint's base marked; they learn as well as float32's, at a small rate."""
    narrow = {"dtype": "bfloat16"}
    job = learning(box, lora=SOME | narrow, bf16={})
    list(steps(job, 1))
    held = [s for by in job.optimizer.state().values() for s in by.values() if s.dim()]
    assert {t.dtype for t in (*(t.local for t in job.trained), *held)} == {torch.bfloat16}
    assert job.fingerprints["adapters"] != learning(box, bf16={}).fingerprints["adapters"]
    slow = ["optim.lr=1e-5", "optim.warmup=0", "optim.schedule=constant", "train.steps=6"]
    ways = []
    for options in (SOME, SOME | narrow):
        job = learning(box, lora=options, bf16={}, fused_adamw={}, sets=slow)
        before = weights(job)
        list(steps(job, 6))
        ways.append(torch.cat([(w.double() - before[n].double()).flatten() for n, w in sorted(weights(job).items())]))
    along = torch.dot(*ways) / ways[0].square().sum()
    assert along == pytest.approx(1, abs=0.2), "rounded to the nearest, the updates would vanish"


@pytest.mark.slow
def test_adapters_in_bfloat16_learn_as_well(box):
    (first, want), (_, last) = (
        held_out(box, 1, n=15, lora={"rank": 4, **more}, bf16={}, fused_adamw={})
        for more in ({}, {"dtype": "bfloat16"})
    )
    assert want < 0.9 * first and last < want + 0.05


def test_bf16_leaves_adapters_wide(box):
    job = learning(box, lora={**SOME, "save": ["lm_head"]}, bf16={})
    assert {t.name: t.local.dtype for t in job.trained if "adapter" not in t.name} == {"head.weight": torch.bfloat16}
    assert {t.local.dtype for t in job.trained if "adapter" in t.name} == {torch.float32}
    assert {p.dtype for p in job.model.parameters() if not p.requires_grad} == {torch.bfloat16}


# Over ranks.


def tensors(folder: Path):
    with safe_open(folder / io.TENSORS, "pt") as file:
        yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


# The ledger.


def filled_by_nobody(folder, hf, implementation, dtype, seed, growth=None):
    model = memory.build_decoder(hf, dtype)
    recipe = WeightMap(native_entries(model), Memory({}))
    object.__setattr__(recipe, "fill", lambda *_: None)
    return model, recipe


@pytest.mark.parametrize(
    ("shape", "withs", "rows", "times"),
    further([("llama-3.2-1b", ("amp", "lora"), 2, 1), ("qwen2.5-0.5b", ("amp", "ia3"), 2, 1),
             ("llama-3.2-1b", ("bf16", "fused-loss:chunk=1024", "lora:rank=64,targets=attention"), 4, 2),
             ("llama-3.2-1b", ("bf16", "recompute", "lora:dora=true,targets=mlp"), 2, 1),
             ("qwen2.5-0.5b", ("bf16", "fused-kernels", "lora"), 2, 2),
             ("qwen2.5-0.5b", ("bf16", "lora:rank=256,dtype=bfloat16"), 1, 2)], 1),
    ids=str,
)  # fmt: skip
def test_memory_is_what_was_said(shape, withs, rows, times, monkeypatch):
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | {"num_hidden_layers": 6})
    config = shaped(shape, "fused-adamw", "attention", *withs, rows=rows, seq=1024, windows=times)
    said = search.predict(config, "h200")
    with mock.patch.object(memory, "_unfilled", filled_by_nobody), memory.supposed(config) as job:
        states = sum(s.numel() for by in job.optimizer.state().values() for s in by.values() if s.dim())
        learnt = sum(t.parameter.numel() for t in job.trained)
        found = memory.track(job, 1, supposed=True)
    lines = {i.name: i.bytes for i in said.lines}
    assert states == 2 * learnt
    width = 2 if "bfloat16" in withs[-1] else 4
    assert lines["states.adapters"] == pytest.approx(width * states, rel=0.001)
    assert lines["weights.adapters"] == pytest.approx(width * learnt, rel=0.001)
    assert not {n for n in lines if n.startswith(("gradients.", "states."))} - {"gradients.adapters", "states.adapters"}
    assert said.peak_bytes - baseline.CUBLAS_BYTES == pytest.approx(found.peak, rel=0.05)


def test_speed_is_said():
    def predicted(*more, usual=("bf16", "attention", "compile", "fused-loss", "fused-adamw"), sets=()):
        config = shaped("llama-3.1-8b", *usual, *more, rows=1, seq=4096, windows=2, sets=sets)
        return search.predict(config, "h200")

    plain, ours = predicted(), predicted("lora")
    assert 1.2 < ours.tokens_per_s / plain.tokens_per_s < 1.5
    assert ours.peak_bytes < 0.5 * plain.peak_bytes
    for more in ([], ["nf4"]):
        without, dora = (predicted(lora, *more) for lora in ("lora", "lora:dora=true"))
        added = {w.name for w in dora.work} - {w.name for w in without.work}
        stored = {"forward.measured.packed", "forward.measured.unpacked"} if more else set()
        assert added == {"forward.lengths", "forward.measured", "forward.scaled", "backward.scaled"} | stored
        assert 0.7 < dora.tokens_per_s / without.tokens_per_s < 0.99
    usual, sets = ("bf16", "attention", "fused-loss", "fused-adamw"), ["model.implementation=transformers"]
    assert predicted("lora", usual=usual, sets=sets).peak_bytes < plain.peak_bytes


# Targets.

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
GLM = {  # GLM-4.7-Flash
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "num_attention_heads": 20, "n_routed_experts": 64, "n_shared_experts": 1, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "names"),
    [(r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj", (*ATTENTION, *MLP)),
     (r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj", (*ATTENTION, *MLP)),
     (r".*\.self_attn\.(q|v)_proj", ("q_proj", "v_proj")), (r".*mlp\..*", MLP), (r"(?!.*mlp).*proj$", ATTENTION),
     (r".*feed_forward.*|.*self_attn.q_proj", ("q_proj", *MLP)), (r"(?!.*(visual|self_attn)).*", MLP),
     (r".*(vision|visual).*_proj", ()), (["self_attn.q_proj", "mlp.up_proj"], ("q_proj", "up_proj")),
     (["shared_expert.up_proj", "o_proj"], ("dense.up_proj", "o_proj")), (["mlp", "q_proj"], (*MLP, "q_proj"))],
    ids=str,
)  # fmt: skip
def test_expressions_and_ends_of_names(targets, names):
    """As PEFT reads them: a text that is no name as an expression of whole names, an entry with dots as an end."""
    assert ledger.resolve_targets(targets, ledger.LINEARS) == names


@pytest.mark.parametrize("pattern", [r".*layers\.(3|7)\..*q_proj", r".*\.1[0-9]\..*", "(q_proj", "*q_proj"])
def test_an_expression_of_some_layers_or_of_none(pattern):
    with pytest.raises(NeedsError, match=r"in some layers only|not a regular expression"):
        ledger.resolve_targets(pattern, ledger.LINEARS)


@pytest.mark.parametrize(
    "pattern", [r"(\w+|\.)+!", r"(.*)*(.*)*x!", r"(a|.|\w)*!", r"((.+)+)+!", r"(.*?,){0,9}(.|..|...)*!"]
)
def test_an_expression_that_takes_too_long_is_refused(pattern, monkeypatch):
    monkeypatch.setattr(ledger, "MATCHING_s", 0.05)
    with pytest.raises(NeedsError, match=r"takes longer than 0\.05 s") as caught:
        ledger.resolve_targets(pattern, ledger.LINEARS)
    assert caught.value.do.startswith("name the linears: [q_proj, ")


@pytest.mark.parametrize(
    ("targets", "note"),
    [("auto", None), ("all-linear", None), ("attention", None), (r".*self_attn.*", None), (["o_proj", "dense"], None),
     (["q_proj", "v_proj", "k_proj", "o_proj"], "is called q_proj, v_proj, k_proj"),
     ([*ATTENTION, *MLP], "is called q_proj, k_proj, v_proj"), (["q_a_proj", *MLP], "outside the experts"),
     (["q_a_proj", "c_attn"], "is called c_attn")],
    ids=str,
)  # fmt: skip
def test_targets_of_which_some_match(tmp_path, targets, note):
    """What matches nothing is named in the plan and in the run's notes; a slip of the keyboard is refused."""
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    config = parse_config(json.dumps({
        "model": {"path": str(tmp_path)}, "objective": "pretrain", "data": {"random": 8}, "output": "o",
        "with": {"lora": {"targets": targets}, "bf16": {}},
    }), "r")  # fmt: skip
    decide(config, ranks=1, device=parse_hardware("h200")[0])
    notes = [text for text in planned_notes(config, parse_hardware("h200")[0], 1) if text.startswith("lora: ")]
    assert [note in text for text in notes] == [True] * (note is not None)


def test_a_target_of_another_family_is_noted(box):
    job = assembled(golden_run(box, lora={"targets": ["q_proj", "c_attn"]}))
    assert any("no linear of this model is called c_attn" in note for note in job.notes)


# Messages.


def test_options_come_as_lists_and_on_the_command_line():
    (made,) = instantiate(ALL, {"lora": {"targets": ["q_proj"], "save": ["lm_head"], "rank": 2}})
    assert made == Lora(rank=2, targets=("q_proj",), save=("lm_head",))
    config = shaped("llama-3.2-1b", "lora:rank=8,targets=mlp")
    assert instantiate(ALL, config.with_) == [Lora(rank=8, targets="mlp")]


@pytest.fixture(scope="module")
def written(box, tmp_path_factory):
    return write_adapter(learning(box), tmp_path_factory.mktemp("written") / "adapter")


@pytest.fixture
def kept(written, tmp_path):
    """A folder with an adapter of SOME, to be spoilt."""
    return shutil.copytree(written, tmp_path / "adapter")


def spoil(folder, **changes):
    path = folder / io.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [({"r": 8}, {}, "r 8 in adapter_config.json, and 4 here"), ({"peft_type": "IA3"}, {}, "peft_type 'IA3'"),
     ({}, {"alpha": 4}, "lora_alpha 32"), ({"use_dora": True}, {}, "use_dora True"),
     ({"bias": "all"}, {}, "bias 'all' in adapter_config.json, which is unknown"),
     ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
     ({"init_lora_weights": "pissa"}, {}, "init_lora_weights 'pissa'"),
     ({"init_lora_weights": "olora"}, {}, "init_lora_weights 'olora'"),
     ({"alora_invocation_tokens": [3]}, {}, "alora_invocation_tokens [3]"),
     ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora"), ({"loftq_config": {"loftq_bits": 4}}, {}, "loftq_config"),
     ({"of_tomorrow": True}, {}, "of_tomorrow True"),
     ({}, {"targets": "all-linear"}, "no tensor model.layers.0.mlp.gate_proj.lora_A.weight"),
     ({}, {"targets": ["q_proj"]}, "for which this run has no adapter"),
     ({}, {"save": ["lm_head"]}, "no tensor lm_head.weight")],
)  # fmt: skip
def test_a_foreign_adapter_is_refused(box, kept, changes, options, text):
    spoil(kept, **changes)
    with pytest.raises(NeedsError) as caught:
        learning(box, lora={**SOME, **options, "init": str(kept)})
    assert text in str(caught.value) and f"`lora:init={kept}`" == caught.value.asked and caught.value.do


@pytest.mark.parametrize(
    "changes",
    [{"init_lora_weights": False, "alpha_pattern": None, "use_bdlora": None, "layers_to_transform": []},
     {"init_lora_weights": "gaussian", "loftq_config": {}, "of_tomorrow": None}],
)  # fmt: skip
def test_what_changes_nothing_is_taken(box, kept, changes):
    spoil(kept, **changes)
    learning(box, lora={**SOME, "init": str(kept)})


def test_files_that_are_none(box, kept):
    def said():
        with pytest.raises(NeedsError) as caught:
            learning(box, lora={**SOME, "init": str(kept)})
        return str(caught.value)

    whole = dict(tensors(kept))
    save_file(whole | {next(iter(whole)): torch.zeros(3, 3)}, kept / io.TENSORS)
    assert "of shape [3, 3], not" in said()
    (kept / io.TENSORS).write_bytes(b"no")
    assert io.TENSORS in said()
    (kept / io.TENSORS).rename(kept / io.PICKLE)
    assert "a pickle, which could run code when read" in said()
    (kept / io.CONFIG).write_text("[]")
    (kept / io.TENSORS).touch()
    assert "not a JSON object" in said()


# B at a rate of its own, and weights that are split.


@pytest.mark.parametrize("optimizer", [{}, {"fused_adamw": {}}], ids=str)
def test_b_steps_faster(box, optimizer):
    """torch's AdamW with two groups, on the gradients of each step."""
    ratio = 16.0
    job = learning(box, lora={**SOME, "lr_ratio": ratio}, sets=["optim.clip=null"], **optimizer)
    o = job.config.optim
    copies = [torch.nn.Parameter(t.local.clone()) for t in job.trained]
    fast = [t.name.endswith(".b") for t in job.trained]
    groups = [{"params": [c for c, f in zip(copies, fast) if f is faster], "lr": 0.0} for faster in (False, True)]
    other = torch.optim.AdamW(groups, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    for n in range(1, 4):
        batches = next(job.batches)
        job.set_step(n)
        job.forward_backward(batches, job.all_reduce_int(sum(b.n_terms for b in batches)))
        for c, t in zip(copies, job.trained, strict=True):
            c.grad = t.grad.clone()
        for group, times in zip(other.param_groups, (1, ratio), strict=True):
            group["lr"] = job.lr.item() * times
        job.optimizer_step()
        other.step()
    for c, t in zip(copies, job.trained, strict=True):
        torch.testing.assert_close(t.local, c.detach(), atol=1e-7, rtol=1e-5)
    assert {t.name for t in job.trained} == job.optimizer.state().keys()


def test_split_weights_are_rebuilt(box, tmp_path):
    """A checkpoint has the adapters alone: a run that resumes, and an export, split the base again."""
    config = golden_run(
        box, packed=True, sets=["train.save_every=1", f"output={tmp_path / 'run'}"], lora={**SOME, "init": "pissa"}
    )
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    rebuilt = rebuild(Path(config.output)).trainer
    job = assembled(config)
    list(steps(job))
    for (name, ours), (_, theirs) in zip(job.model.named_parameters(), rebuilt.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize(
    ("targets", "rows", "values"),
    [("auto", {"qkv": 16, "o": 16, "gate_up": 16, "down": 16}, 55_705_600),
     ("attention", {"qkv": 16, "o": 16}, 40 * 16 * (5120 + 7680 + 5120 + 5120)),
     (["gate_up_proj"], {"gate_up": 16}, 40 * 16 * (5120 + 2 * 17920))],
)  # fmt: skip
def test_the_plan_of_one_adapter_for_all_pieces(targets, rows, values):
    """Of Phi-4, whose files have query, key and value in one tensor, and gate and up in another."""
    config = shaped("microsoft/phi-4", "bf16", "lora")
    config.with_["lora"]["targets"] = targets
    env = decide(config).env
    found = {name: env.spec.linears[name].adapter_rows for name in env.shape.linears}
    assert {name: many for name, many in found.items() if many} == rows
    held = {line.name: line.bytes for line in search.predict(config, "h200").lines}
    assert held["weights.adapters"] == 4 * values
