"""Adapters against PEFT's own on the same transformers model: losses, every gradient, files both ways, merging."""

import functools
import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from meshes import further
from optrush import config
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.exporting import write_model
from optrush.peft import io
from optrush.peft.adapter import find_outer_modules

from parity_models import EXPERTS, FAMILIES, SIZES, UNPACKED, packed, reference, save
from trials import apart, assembled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEOX = {
    **{k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}, "model_type": "gpt_neox",
    "hidden_size": 32, "hidden_act": "gelu", "rotary_pct": 0.5,
}  # fmt: skip
KINDS = {**FAMILIES, "gpt_neox": NEOX, "qwen3_next": EXPERTS["qwen3_next"]}
JOINED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
SOME = ["in_proj_qkvz", "in_proj_ba", "o_proj"]
R, ALPHA = 4, 6

# name: (family, implementation, our options, PEFT's)
LORA = {
    "all": ("llama", "native", {}, {"target_modules": EVERY}),
    "attention": ("llama-tied", "native", {"targets": "attention"}, {"target_modules": EVERY[:4]}),
    "mlp": ("qwen2", "native", {"targets": "mlp"}, {"target_modules": EVERY[4:]}),
    "names": ("qwen2", "native", {"targets": ["q_proj", "v_proj"]}, {"target_modules": ["q_proj", "v_proj"]}),
    "one of two": ("llama", "native", {"targets": ["up_proj", "k_proj"]}, {"target_modules": ["up_proj", "k_proj"]}),
    "rslora": ("qwen3", "native", {"rslora": True}, {"target_modules": EVERY, "use_rslora": True}),
    "dora": ("llama", "native", {"dora": True}, {"target_modules": EVERY, "use_dora": True}),
    "dora, some": ("qwen2", "native", {
        "dora": True, "rslora": True, "targets": ["q_proj", "v_proj", "gate_proj"],
    }, {"target_modules": ["q_proj", "v_proj", "gate_proj"], "use_dora": True, "use_rslora": True}),
    "delta": ("qwen3_5_text", "native", {}, {"target_modules": EVERY + DELTA}),
    "delta, some": (
        "qwen3_next", "native", {"targets": SOME, "rslora": True}, {"target_modules": SOME, "use_rslora": True},
    ),
    "without a gate": ("starcoder2", "native", {}, {"target_modules": [*EVERY[:4], "c_fc", "c_proj"]}),
    "by layer": (
        "gemma4_text", "native", {}, {"target_modules": [*EVERY, "per_layer_input_gate", "per_layer_projection"]},
    ),
    "keys as values": ("gemma4_text-keys", "native", {"targets": "attention"}, {"target_modules": EVERY[:4]}),
    "joined": ("phi3", "native", {}, {"target_modules": JOINED}),
    "joined, dora": ("phi3", "native", {
        "dora": True, "targets": ["qkv_proj", "down_proj"],
    }, {"target_modules": ["qkv_proj", "down_proj"], "use_dora": True}),
    "joined, attention": ("phi3-plain", "native", {"rslora": True, "targets": "attention"}, {
        "target_modules": JOINED[:2], "use_rslora": True,
    }),
    "joined, mlp": ("phi3", "native", {"targets": ["mlp", "qkv_proj"]}, {"target_modules": JOINED[2:] + JOINED[:1]}),
    "one joined": ("glm4", "native", {"targets": ["attention", "mlp"]}, {"target_modules": EVERY[:4] + JOINED[2:]}),
    "joined, transformers": ("phi3", "transformers", {}, {"target_modules": JOINED}),
    "transformers": ("llama", "transformers", {}, {"target_modules": EVERY}),
    "transformers, dora": ("qwen2", "transformers", {"dora": True}, {"target_modules": EVERY, "use_dora": True}),
    "neox": ("gpt_neox", "transformers", {}, {
        "target_modules": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
    }),
    "neox, a linear named as a set": ("gpt_neox", "transformers", {"targets": ["query_key_value", "dense"]}, {
        "target_modules": ["query_key_value", "dense"]
    }),
    "head too": ("llama", "native", {"save": ["lm_head", "input_layernorm", "norm"]}, {
        "target_modules": EVERY, "modules_to_save": ["input_layernorm", "lm_head", "model.norm"],
    }),
    "embedding too": ("mistral", "transformers", {"save": ["embed_tokens"]}, {
        "target_modules": EVERY, "modules_to_save": ["embed_tokens"],
    }),
    "tied, both": ("llama-tied", "native", {
        "save": ["embed_tokens", "lm_head"], "targets": "mlp",
    }, {"target_modules": EVERY[4:], "modules_to_save": ["embed_tokens", "lm_head"]}),
}  # fmt: skip
IA3 = {
    "ia3": ("llama", "native", {}, {"target_modules": ["k_proj", "v_proj", "down_proj"]}),
    "ia3, qwen2": ("qwen2", "native", {}, {"target_modules": ["k_proj", "v_proj", "down_proj"]}),
    "ia3, transformers": ("llama", "transformers", {}, {"target_modules": ["k_proj", "v_proj", "down_proj"]}),
    "ia3, names": ("llama", "native", {
        "targets": ["q_proj", "up_proj", "o_proj"], "feedforward": ["o_proj"],
    }, {"target_modules": ["q_proj", "up_proj", "o_proj"], "feedforward_modules": ["o_proj"]}),
    "ia3, joined": ("phi3", "native", {
        "targets": ["qkv_proj", "gate_up_proj", "down_proj"], "feedforward": ["gate_up_proj"],
    }, {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "feedforward_modules": ["gate_up_proj"]}),
    "ia3, delta": ("qwen3_5_text", "native", {}, {"target_modules": ["k_proj", "v_proj", "down_proj"]}),
    "ia3, delta, names": ("qwen3_5_text", "native", {
        "targets": ["in_proj_qkv", "in_proj_z", "out_proj"], "feedforward": ["out_proj"],
    }, {"target_modules": ["in_proj_qkv", "in_proj_z", "out_proj"], "feedforward_modules": ["out_proj"]}),
    "ia3, neox": ("gpt_neox", "transformers", {}, {
        "target_modules": ["query_key_value", "dense_4h_to_h"], "feedforward_modules": ["dense_4h_to_h"],
    }),
}  # fmt: skip
CASES = LORA | IA3
# One of each kind of adapter on each kind of linear, alone or joined, by either implementation; then combinations.
FIRST = ("all", "one of two", "dora, some", "delta, some", "without a gate", "by layer", "keys as values",
         "joined, dora", "one joined", "transformers", "neox", "head too", "tied, both", "ia3", "ia3, joined",
         "ia3, delta, names", "ia3, neox")  # fmt: skip
EACH = pytest.mark.parametrize("case", further([*FIRST, *(case for case in CASES if case not in FIRST)], len(FIRST)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A family's folder, written by transformers once."""

    @functools.cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save(reference(KINDS[family]), folder)
        return folder

    return made


def theirs(folder: Path, case: str, dtype: torch.dtype = torch.float32, size: float = 0.1):
    """The case as PEFT has it, its adapters drawn away from what they begin as, by so much."""
    _, _, _, options = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if case in IA3:
        made = IA3Config(**{"feedforward_modules": ["down_proj"], **options}, task_type="CAUSAL_LM")
    else:
        made = LoraConfig(r=R, lora_alpha=ALPHA, lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    torch.manual_seed(2)  # PEFT draws A from torch's own generator
    model = get_peft_model(model, made)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * size)
    if case == "tied, both":  # PEFT has two copies of the one weight
        parts = dict(model.named_parameters())
        one, other = (parts[k] for k in sorted(parts) if "modules_to_save" in k)
        other.data.copy_(one)
    return model.train()


def run(folder: Path, output: Path, case: str, *sets: str, **with_):
    _, implementation, options, _ = CASES[case]
    technique = {"ia3": {**options}} if case in IA3 else {"lora": {"rank": R, "alpha": ALPHA, **options}}
    next(iter(technique.values())).update(with_.pop("init", {}))
    text = yaml.safe_dump({
        "model": {"path": str(folder), "implementation": implementation}, "objective": "pretrain",
        "data": {"random": 8}, "batch": {"seq": 20, "tokens": 40, "micro_tokens": 40}, "train": {"steps": 2},
        "output": str(output), "with": technique | with_,
    })  # fmt: skip
    return config.parse_config(text, "case.yaml", sets)


def job_of(folders, tmp_path, case, peft, **with_):
    """Our job of the case, begun with what PEFT's model has saved."""
    peft.save_pretrained(tmp_path / "theirs")
    init = {"init": str(tmp_path / "theirs"), **with_.pop("init", {})}
    job = assembled(run(folders(CASES[case][0]), tmp_path / "run", case, init=init, **with_))
    assert job.adapters_disabled is None, "without the adapter it is not what it was before training"
    return job


def logits_of(model, batch):
    logits = model(input_ids=batch.tokens, position_ids=batch.positions.long(), use_cache=False).logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(
        logits_of(model, batch).flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )


def ours_of(trainer, batch):
    return trainer.model.head.logits(trainer.model(batch.tokens, batch.positions, batch.documents)).float()


def plain(name: str) -> str:
    """A parameter of PEFT's model as its files call it."""
    name = name.removeprefix(io.PREFIX).replace("modules_to_save.default.", "")
    return name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(".default", "")


def gradients(trainer) -> dict[str, torch.Tensor]:
    """Under the names of PEFT's files."""
    found = {}
    for name, adapter in io.adapters(trainer.model).items():
        own = {
            t.name.removeprefix(f"{name}.adapter."): t.parameter.grad
            for t in trainer.trained
            if t.name.startswith(name)
        }
        found |= dict(adapter.published(own))
    modules = find_outer_modules(trainer.model, trainer.weight_map)
    return found | {f"{modules[t.name]}.weight": t.parameter.grad for t in trainer.trained if t.name in modules}


def asked(peft, batch):
    """(loss, gradients) of the batch by PEFT, these under the names of its files."""
    loss = loss_of(peft, batch)
    loss.backward()
    grads = {plain(n): p.grad for n, p in peft.named_parameters() if p.requires_grad}
    if grads.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}:  # PEFT's two copies of the one weight
        grads["model.embed_tokens.weight"] += grads.pop("lm_head.weight")
    return loss.item(), grads


def answered(job, batch):
    """The same of ours."""
    loss = job.loss(batch)
    loss.backward()
    return loss.item(), gradients(job)


def learnt(job, peft, batch=None):
    """(loss, gradients) of the batch, ours and PEFT's."""
    batch = batch or BATCH
    ours, wanted = answered(job, batch), asked(peft, batch)
    assert ours[1].keys() == wanted[1].keys() and len(wanted[1]) > 1
    return ours, wanted


def same(ours, theirs, *, loss, norm, element):
    """Within these: losses; each gradient's difference by its norm, and in its worst element by its largest."""
    (got, found), (want, wanted) = ours, theirs
    assert got == pytest.approx(want, rel=loss, abs=0)
    for name, g in wanted.items():
        assert (found[name] - g).norm() < norm * g.norm(), name
        assert apart(found[name], g) < element, name


def rougher(case):
    """How much more a delta rule over 20 tokens rounds, and a norm behind the gate of each layer's inputs."""
    return 5 if CASES[case][0] in (*UNPACKED, "gemma4_text") else 1


class Wide(TorchFunctionMode):
    """float64 wherever a model asks for float32, as transformers' norms and its delta rule do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        swapped = {key: wide.get(v, v) if isinstance(v, torch.dtype) else v for key, v in (kwargs or {}).items()}
        return func(*(wide.get(v, v) if isinstance(v, torch.dtype) else v for v in args), **swapped)


def exact(model) -> None:
    """float64 from now on, of the same values; run it within `Wide`."""
    for p in model.parameters():
        p.grad = None
        if p.dtype == torch.float32:  # and no bytes of a base in 4 bits
            p.data = p.data.double()


BATCH = packed([[5, 7, 3], [19, 1]], 20, 61)
REAL = torch.tensor([[True] * 15 + [False] * 5, [True] * 20])
SINGLE = packed([[20], [20]], 20, 61)


def batch_of(case):
    """Rows of one document each for those that transformers does not keep apart."""
    return SINGLE if CASES[case][0] in UNPACKED else BATCH


def check_files(job, folder, tmp_path, batch, before, close=1e-5):
    """PEFT reads what we write of a job that has learnt something, and transformers the merged model: its logits."""
    with torch.no_grad():
        for t in job.trained:
            t.local.mul_(1.1)
        job.model.eval()
        ours = ours_of(job, batch)
        assert apart(ours[REAL], before[REAL]) > 1e-3, "it has learnt something"
        (tmp_path / "run.yaml").write_text(config.dump_config(job.config))
        model = write_model(job, tmp_path, 2, folder)
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
        merged = AutoModelForCausalLM.from_pretrained(model).eval()
        assert apart(logits_of(read, batch)[REAL], ours[REAL]) < close
        assert apart(logits_of(merged, batch)[REAL], ours[REAL]) < close


@EACH
def test_losses_gradients_and_files_are_pefts(folders, tmp_path, case):
    """In float64 equal but for the last bits, so the mathematics is the same. In float32 each rounds at places of its
    own: W x + s B A x is one operation here, three of PEFT's. Seen: 6.3e-6 in the worst element, 3.5e-6 by norm; in
    float64 1.1e-14."""
    folder, batch, rough = folders(CASES[case][0]), batch_of(case), rougher(case)
    peft = theirs(folder, case)
    job = job_of(folders, tmp_path, case, peft)
    same(*learnt(job, peft, batch), loss=3e-7, norm=rough * 1e-5, element=rough * 1e-5)
    assert not any(p.grad is not None for p in job.model.parameters() if not p.requires_grad)
    begun = [t.local.clone() for t in job.trained]
    check_files(job, folder, tmp_path, batch, logits_of(peft, batch), 1e-5 * rough)
    written, kept = (load_file(d / "adapter_model.safetensors") for d in (tmp_path / "adapter", tmp_path / "theirs"))
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {n: (t.shape, t.dtype) for n, t in kept.items()}
    ours_, theirs_ = (json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("adapter", "theirs"))
    for key, value in ours_.items():
        same_ = sorted(theirs_[key]) if isinstance(theirs_[key], list) else theirs_[key]
        assert value == same_ or key == "base_model_name_or_path", key
    assert ours_["base_model_name_or_path"] == str(folder) and not list(tmp_path.glob("*.tmp"))
    for t, values in zip(job.trained, begun, strict=True):
        t.local.copy_(values)
    job.model.train()
    peft.get_base_model().set_attn_implementation("sdpa")
    peft.get_base_model().set_experts_implementation("eager")
    if CASES[case][1] == "transformers":
        job.model.set_attention("sdpa")
    exact(peft)
    exact(job.model)
    with Wide():
        same(*learnt(job, peft, batch), loss=1e-15 * rough, norm=1e-13 * rough, element=1e-13 * rough)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in ("all", "dora", "ia3", "transformers")), ("all", "bfloat16")]
)
def test_bfloat16(folders, tmp_path, case, dtype):
    """Both round, each at places of its own: from float32's gradients ours are about as far as PEFT's."""
    peft = theirs(folders(CASES[case][0]), case, torch.bfloat16)
    exact = theirs(folders(CASES[case][0]), case)
    if dtype == "bfloat16":
        for p in peft.parameters():
            p.data = p.data.bfloat16()  # PEFT's adapters are float32 unless they are cast
        exact.load_state_dict(peft.state_dict())
        job = job_of(folders, tmp_path, case, peft, init={"dtype": dtype}, bf16={})
    else:
        job = job_of(folders, tmp_path, case, peft, bf16={})
    assert {t.local.dtype for t in job.trained} == {getattr(torch, dtype)}
    loss, want, right = job.loss(BATCH), loss_of(peft, BATCH), loss_of(exact, BATCH)
    assert loss.item() == pytest.approx(want.item(), rel=1e-2)
    for each in (loss, want, right):
        each.backward()
    made = [{plain(n): p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (exact, peft)]
    right, other, ours = (torch.cat([g[n].flatten().double() for n in made[0]]) for g in (*made, gradients(job)))
    assert (ours - right).norm() < max(1.5 * (other - right).norm(), 0.02 * right.norm())


def first(trainer) -> dict[str, torch.Tensor]:
    """What adapters hold, under the names of PEFT's files."""
    adapters = io.adapters(trainer.model).values()
    return {key: t for a in adapters for key, t in a.published({n: p.detach() for n, p in a.named_parameters()})}


def test_one_module_with_all_pieces_has_no_other_names(folders, tmp_path):
    """Keys and values have no module of their own; nor have experts."""
    for with_, found, do in (
        ({"ia3": {}}, "linears with other names: qkv_proj, o_proj, gate_up_proj, down_proj", "set targets"),
        ({"lora": {"targets": ["q_proj"]}}, "no linear is called q_proj", "did you mean `qkv_proj`"),
        ({"lora": {"targets": "experts"}}, "a model without linears of the set experts", "gate_up_proj"),
    ):
        asked = run(folders("phi3"), tmp_path / "run", "joined").model_copy(update={"with_": with_})
        with pytest.raises(NeedsError) as caught:
            decide(asked)
        assert caught.value.found == found and do in caught.value.do


def test_it_begins_as_the_model_itself(folders, tmp_path):
    """A is drawn as PEFT draws it, alike for a fused linear and its pieces; B is zero; the logits are the model's."""
    base = AutoModelForCausalLM.from_pretrained(folders("llama"))
    found = []
    for implementation in ("native", "transformers"):
        job = assembled(run(folders("llama"), tmp_path, "all", f"model.implementation={implementation}"))
        assert apart(ours_of(job, BATCH)[REAL], logits_of(base, BATCH)[REAL]) < 1e-5
        found.append(first(job))
    native, other = found
    assert native.keys() == other.keys() and all(torch.equal(native[n], other[n]) for n in native)
    drawn = [t for n, t in native.items() if "lora_A" in n]
    assert all(0.8 < t.abs().max() * t.shape[1] ** 0.5 <= 1 for t in drawn)
    assert len({t[0, 0].item() for t in drawn}) == len(drawn)
    assert not any(t.any() for n, t in native.items() if "lora_B" in n)


def test_dora_begins_with_the_lengths_of_the_rows(folders, tmp_path):
    folder, options = folders("qwen2"), CASES["dora, some"][3]
    found = first(assembled(run(folder, tmp_path, "dora, some")))
    base = AutoModelForCausalLM.from_pretrained(folder)
    peft = get_peft_model(base, LoraConfig(r=R, task_type="CAUSAL_LM", **options))
    wanted = {plain(n): p for n, p in peft.named_parameters() if "magnitude" in n}
    assert len(wanted) == 6
    for name, p in wanted.items():
        torch.testing.assert_close(found[name], p.detach())


# Adapters that begin as a part of the weights.
@pytest.mark.parametrize(("family", "implementation", "init", "more"), further([
    ("qwen2", "native", "pissa", {"rslora": True, "targets": ["q_proj", "v_proj", "up_proj"]}),
    ("llama-tied", "transformers", "pissa", {}), ("llama", "native", "pissa_niter_4", {}),
    ("llama", "native", "olora", {}), ("phi3-plain", "native", "pissa", {"targets": JOINED}),
    ("llama", "native", "pissa", {}),
], 5))  # fmt: skip
def test_split_weights(folders, tmp_path, family, implementation, init, more):
    """Base and adapter are PEFT's; what a run leaves adds up to what was trained, on the published base."""
    folder = folders(family)
    targets = more.get("targets", EVERY)
    options = LoraConfig(
        r=R, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=init, use_rslora="rslora" in more
    )
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    untrained = logits_of(base, BATCH).detach()
    peft = get_peft_model(base, options).train()
    init_option = {"init": {"init": init, **more}}
    text = ("all", f"model.implementation={implementation}")
    job = assembled(run(folder, tmp_path / "run", *text, **init_option))
    assert job.adapters_disabled is None and job.fingerprints["adapters"].endswith(f", init {init}")
    assert apart(ours_of(job, BATCH)[REAL], untrained[REAL]) < 1e-5, "it begins as the model itself"
    pieces = dict(
        part for n, p in job.model.named_parameters() if n in job.weight_map.entries
        for part in job.weight_map.split(n, p.detach())
    )  # fmt: skip
    parts = {n.removeprefix(io.PREFIX).replace(".base_layer", ""): p for n, p in peft.named_parameters()}
    if "niter" not in init:  # another random subspace
        for name in (n for n in parts if "lora" not in n):
            torch.testing.assert_close(pieces[name], parts[name], atol=2e-6, rtol=0)
        assert answered(job, BATCH)[0] == pytest.approx(asked(peft, BATCH)[0], rel=3e-7)
    for a in (p for p in io.adapters(job.model).values() if init == "pissa"):
        whole = dict(a.published({n: p.detach() for n, p in a.named_parameters()}))
        for key in (k for k in whole if "lora_A" in k):
            b = key.replace("lora_A", "lora_B")
            want = parts[b.replace(".weight", ".default.weight")] @ parts[key.replace(".weight", ".default.weight")]
            torch.testing.assert_close(whole[b] @ whole[key], want, atol=2e-6, rtol=0)
    check_files(job, folder, tmp_path, BATCH, untrained)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"rank": 33}, "of rank 33"), ({"dora": True}, "dora: true"), ({"beside": {"nf4": {}}}, "4-bit or 8-bit")],
)
def test_split_weights_refused(folders, tmp_path, options, found):
    beside = options.pop("beside", {})
    with pytest.raises(NeedsError, match=found):
        assembled(run(folders("llama"), tmp_path, "all", init={"init": "pissa", **options}, **beside))
