"""QLoRA against PEFT on bitsandbytes' linears, in a folder that bitsandbytes quantised: losses, gradients, bytes."""

import functools
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_peft import BATCH, DELTA, EVERY, JOINED, SINGLE, Wide, exact, learnt, logits_of, plain, same
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from optrush import config
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.kernels import nf4

from parity_models import SIZES, reference, save
from trials import apart, assembled

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
]
# Widths that are multiples of 64: of others bitsandbytes' CPU kernel makes wrong values.
LLAMA = {
    **SIZES, "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
PHI = {  # rows that are quantised apart end within a block of scales, and with one
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    "model_type": "phi3",
    "pad_token_id": None,
}
WIDE_PHI = {**PHI, "head_dim": 128, "intermediate_size": 256}
QWEN = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
RULE = {
    **LLAMA, "model_type": "qwen3_5_text", "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**LLAMA["rope_parameters"]},  # transformers writes to it
}  # fmt: skip

KINDS = {"llama": LLAMA, "qwen2": QWEN, "moe": MOE, "delta": RULE, "phi3": PHI, "phi3-wide": WIDE_PHI}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(dense, quantised by bitsandbytes), both written by transformers."""

    @functools.cache
    def made(family: str, double: bool = True) -> tuple[Path, Path]:
        dense = tmp_path_factory.mktemp("dense")
        save(reference(KINDS[family]), dense)
        four = tmp_path_factory.mktemp("four")
        opened(dense, double=double).save_pretrained(four)
        return dense, four

    return made


def opened(folder: Path, dtype=torch.float32, double=True, device="cpu"):
    """transformers' model with bitsandbytes' linears; all else, and the products, in that type."""
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    done = "quantization_config" in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=device, attn_implementation="eager",
        **({} if done else {"quantization_config": how}),
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    return model


def run(folder: Path, output: Path, **with_):
    text = yaml.safe_dump({
        "model": {"path": str(folder)}, "objective": "pretrain", "data": {"random": 8},
        "batch": {"seq": 20, "tokens": 40, "micro_tokens": 40}, "train": {"steps": 2}, "output": str(output),
        "with": with_,
    })  # fmt: skip
    return config.parse_config(text, "case.yaml")


def theirs(model, size=0.1, **options):
    """PEFT's adapters on it, drawn away from what they begin as, by so much."""
    torch.manual_seed(4)
    made = LoraConfig(
        r=4, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=[*EVERY, *DELTA, *JOINED], **options
    )
    peft = get_peft_model(model, made)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in peft.parameters():
            if p.requires_grad:
                p.data = p.data.float()  # autocast_adapter_dtype does so for half ones
                p.add_((torch.randn(p.shape, generator=generator) * size).to(p.device))
    return peft.train()


CASES = {
    "llama": ("llama", True, {}, {}), "qwen2, tied, biases": ("qwen2", True, {}, {}), "once": ("llama", False, {}, {}),
    "dora": ("llama", True, {"dora": True}, {"use_dora": True}), "delta": ("delta", True, {}, {}),
    "phi3": ("phi3", True, {}, {}), "phi3, once, dora": ("phi3-wide", False, {"dora": True}, {"use_dora": True}),
    "phi3, whole blocks": ("phi3-wide", True, {}, {}),
}  # fmt: skip


def pair(folders, tmp_path, case, dtype=torch.float32):
    """Our job, begun with what PEFT's model has saved, and that model."""
    family, double, options, peft_options = CASES[case]
    _, four = folders(family, double)
    peft = theirs(opened(four, dtype), **peft_options)
    peft.save_pretrained(tmp_path / "theirs")
    lora = {"rank": 4, "alpha": 6.0, "init": str(tmp_path / "theirs"), **options}
    beside = {"bf16": {}} if dtype == torch.bfloat16 else {}
    return assembled(run(four, tmp_path / "run", nf4={"double": double}, lora=lora, **beside)), peft


def dense(model) -> None:
    """Multiplies by what bitsandbytes gives back of its bytes: on a CPU its own product has no float64."""
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            module.forward = functools.partial(F.linear, weight=weight.double(), bias=module.bias)


@pytest.mark.parametrize("case", CASES)
def test_same_losses_and_gradients(folders, tmp_path, case):
    """As in test_peft.py. Seen: 6.3e-6 in the worst element, 5.2e-6 by norm; in float64 2.7e-14. Of 24 other batches
    1.3e-5 and 8.3e-6 at worst; from float64's gradients either side is then 2.1e-5 away, by norm."""
    job, peft = pair(folders, tmp_path, case)
    batch, rough = (SINGLE, 5) if case == "delta" else (BATCH, 1)  # as in test_peft.py
    ours, wanted = learnt(job, peft, batch)
    assert len(wanted[1]) >= 16
    same(ours, wanted, loss=3e-7, norm=1e-5 * rough, element=1.5e-5 * rough)
    peft.get_base_model().set_attn_implementation("sdpa")
    dense(peft)
    exact(peft)
    exact(job.model)
    given = bitsandbytes.functional.dequantize_4bit

    def dequantized(*args, **options):
        with torch._C.DisableTorchFunction():  # its kernel writes float32
            return given(*args, **options)

    with Wide(), mock.patch.object(bitsandbytes.functional, "dequantize_4bit", dequantized):
        same(*learnt(job, peft, batch), loss=1e-15 * rough, norm=1e-13 * rough, element=1e-13 * rough)


@pytest.mark.parametrize("case", ["llama", "qwen2, tied, biases"])
def test_bfloat16(folders, tmp_path, case):
    """Both round, each at places of its own: ours are no further from float32's gradients than PEFT's."""
    _, (_, single) = learnt(*pair(folders, tmp_path, case))
    (loss, found), (want, wanted) = learnt(*pair(folders, tmp_path, case, torch.bfloat16))
    assert loss == pytest.approx(want, rel=1e-2)
    right, ours, peft = (torch.cat([g[n].flatten().double() for n in single]) for g in (single, found, wanted))
    assert (ours - right).norm() < 1.25 * (peft - right).norm() and (ours - right).norm() < 0.2 * right.norm()


@pytest.mark.parametrize("double", [True, False])
def test_the_bytes_are_those_of_the_file(folders, tmp_path, double):
    """Taken as they are; and what we quantise ourselves from the dense folder is the same."""
    dense, four = folders("llama", double)
    held = load_file(four / "model.safetensors")
    jobs = [assembled(run(f, tmp_path / "run", nf4={"double": double}, lora={})) for f in (four, dense)]
    for i in range(2):
        for name, hf in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
            weight = f"model.layers.{i}.{hf}.weight"
            state = json.loads(bytes(held[f"{weight}.quant_state.bitsandbytes__nf4"].tolist()))
            want = {"codes": held[weight], "absmax": held[f"{weight}.absmax"]}
            if double:
                offset = torch.tensor([state["nested_offset"]])
                want["nested"] = torch.cat((held[f"{weight}.nested_absmax"], offset))
            for job in jobs:
                block = job.model.blocks[str(i)]
                piece = getattr({"q": block.qkv, "down": block.down}[name].quantized, name)
                for part, value in want.items():
                    raw = value.flatten().view(torch.uint8)
                    assert torch.equal(getattr(piece, part).view(torch.uint8)[: raw.numel()], raw), (weight, part)


def test_fresh_magnitudes_are_of_what_multiplies(folders, tmp_path):
    _, four = folders("llama")
    job = assembled(run(four, tmp_path / "run", nf4={}, lora={"dora": True}))
    made = LoraConfig(task_type="CAUSAL_LM", target_modules=EVERY, use_dora=True)
    peft = get_peft_model(opened(four), made)
    wanted = {plain(n): p for n, p in peft.named_parameters() if "magnitude" in n}
    found = {}
    for _, linear in job.model.linears():
        own = dict(linear.adapter.named_parameters())
        found |= {n: p for n, p in linear.adapter.published(own) if "magnitude" in n}
    assert found.keys() == wanted.keys() and all(apart(found[n].detach(), w.detach()) < 1e-6 for n, w in wanted.items())


def test_logits_without_training_are_transformers_own(folders, tmp_path):
    _, four = folders("llama")
    job = assembled(run(four, tmp_path / "run", nf4={}, lora={}))
    with torch.no_grad():
        ours = job.model.head.logits(job.model(BATCH.tokens, BATCH.positions, BATCH.documents))
        real = BATCH.labels != -100
        assert apart(ours[real], logits_of(opened(four).train(), BATCH)[real]) < 1e-5


def test_dense_experts_beside_packed_linears(folders, tmp_path):
    """As transformers writes them: linears are taken as they are, experts quantised; packed ones are refused."""
    _, four = folders("moe")
    job = assembled(run(four, tmp_path / "run", nf4={}, lora={}))
    held, block = load_file(four / "model.safetensors"), job.model.blocks["0"]
    assert torch.equal(block.o.quantized.o.codes.view(torch.uint8), held[O].flatten())
    each = [held[f"model.layers.0.mlp.experts.{n}.down_proj.weight"] for n in range(4)]
    made = nf4.quantize_nf4([torch.cat(each)], True)
    assert torch.equal(block.experts.quantized["down"].experts.codes.view(torch.uint8), made["codes"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = changed(folders, tmp_path, lambda t: repacked(t, name), family="moe")
    with pytest.raises(NeedsError, match=f"the packed tensor {name}"):
        assembled(run(folder, tmp_path / "run", nf4={}, lora={}))


# What is refused.
def changed(folders, tmp_path, edit=None, config_edit=None, family="llama", double=True):
    """A copy of the quantised folder with other tensors, or another config.json."""
    folder = tmp_path / "changed"
    shutil.copytree(folders(family, double)[1], folder)
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config_edit is not None:
        hf = json.loads((folder / "config.json").read_text())
        config_edit(hf)
        (folder / "config.json").write_text(json.dumps(hf))
    return folder


Q, O = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
STATE = f"{Q}.quant_state.bitsandbytes__nf4"


def said(tensors, **values):
    state = json.loads(bytes(tensors[STATE].tolist())) | values
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def bitsandbytes_of(**values):
    return lambda hf: hf["quantization_config"].update(values)


def silent(hf):
    del hf["quantization_config"]


NF4 = {"nf4": {}, "lora": {}}
ADD, USE = "add --with nf4 --with lora", "use --with nf4:double=true"


@pytest.mark.parametrize(("edit", "with_", "found", "do"), [
    *((None, with_, "method bitsandbytes", ADD) for with_ in ({}, {"lora": {}}, {"int8": {}, "lora": {}})),
    (bitsandbytes_of(quant_method="hqq"), NF4, "method hqq", "unquantised"),
    (bitsandbytes_of(quant_method="gptq", bits=3), NF4, "method gptq, 3 bits", "unquantised"),
    (bitsandbytes_of(bnb_4bit_quant_type="fp4"), NF4, "they are fp4 in uint8", "unquantised"),
    (bitsandbytes_of(bnb_4bit_quant_storage="bfloat16"), NF4, "they are nf4 in bfloat16", "unquantised"),
    (bitsandbytes_of(load_in_4bit=False, load_in_8bit=True), NF4, "they are int8", "unquantised"),
    (silent, {}, "is packed in 4 bits", ADD), (silent, {"nf4": {"double": False}, "lora": {}}, "quantised scales", USE),
    (silent, {"int8": {}, "lora": {}}, "in 8 bits", USE),
    *((lambda hf: hf.update(quantization_config=["nf4"]), with_, "not a mapping", "") for with_ in (NF4, {})),
])  # fmt: skip
def test_what_config_json_says(folders, tmp_path, edit, with_, found, do):
    """Where it says nothing, the tensors do; read as another form their values would be none."""
    folder = changed(folders, tmp_path, config_edit=edit)
    with pytest.raises((NeedsError, ConfigError), match=found) as caught:
        assembled(run(folder, tmp_path / "run", **with_))
    assert do in caught.value.do


def test_a_config_that_says_nothing(folders, tmp_path):
    assembled(run(changed(folders, tmp_path, config_edit=silent), tmp_path / "run", **NF4))


def test_scales_quantised_otherwise_than_asked(folders, tmp_path):
    for double in (True, False):
        _, four = folders("llama", double)
        with pytest.raises(ConfigError, match=f"nf4:double={not double}") as caught:
            decide(run(four, tmp_path / "run", nf4={"double": not double}, lora={}))
        assert caught.value.do == f"use --with nf4:double={str(double).lower()}"


def test_through_transformers(folders, tmp_path):
    _, four = folders("llama")
    asked = run(four, tmp_path / "run", nf4={}, lora={})
    model = asked.model.model_copy(update={"implementation": "transformers"})
    with pytest.raises(NeedsError, match="runs through transformers"):
        assembled(asked.model_copy(update={"model": model}))


def repacked(tensors, name="lm_head.weight"):
    """The head packed as well, or another tensor."""
    made = nf4.quantize_nf4([tensors[name]], True)
    for end in (".quant_map", ".nested_quant_map"):
        tensors[f"{name}{end}"] = tensors[f"{Q}{end}"].clone()
    state = json.loads(bytes(tensors[STATE].tolist()))
    state |= {"shape": list(tensors[name].shape), "nested_offset": made["nested"][-1].item()}
    mark = f"{name}.quant_state.bitsandbytes__nf4"
    tensors[mark] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {
        name: made["codes"][:, None], f"{name}.absmax": made["absmax"],
        f"{name}.nested_absmax": made["nested"][:-1].clone(),
    }  # fmt: skip


def single(tensors):
    """One tensor whose scales are not quantised among others whose are."""
    made = nf4.quantize_nf4([torch.randn(json.loads(bytes(tensors[STATE].tolist()))["shape"])], False)
    state = {k: v for k, v in json.loads(bytes(tensors[STATE].tolist())).items() if not k.startswith("nested")}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    for end in (".nested_absmax", ".nested_quant_map"):
        tensors.pop(f"{Q}{end}")
    tensors |= {Q: made["codes"][:, None], f"{Q}.absmax": made["absmax"]}


@pytest.mark.parametrize(("edit", "text"), [
    (lambda t: said(t, blocksize=128), "blocks of 128"), (lambda t: said(t, quant_type="fp4"), "quant_type fp4"),
    (lambda t: said(t, nested_blocksize=512), "their scales in blocks of 512"),
    (lambda t: said(t, shape=[32, 64]), r"of shape \[32, 64\]"),
    (lambda t: t.update({STATE: t[STATE][:-3].clone()}), "cannot be read"),
    (lambda t: t.update({f"{Q}.quant_map": t[f"{Q}.quant_map"] * 2}), "quant_map differs"),
    (lambda t: t.pop(f"{Q}.nested_quant_map"), "nested_quant_map differs"),
    (lambda t: t.pop(f"{Q}.absmax"), "bytes of .*absmax"),
    (lambda t: t.update({Q: t[Q][:-1].clone()}), "2048 bytes of"),
    (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight"),
    (lambda t: said(t, nested_offset=float("nan")), "nested_offset nan"),
    (lambda t: said(t, nested_offset="x"), "cannot be read"),
    (lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"].view(torch.int8)}), "absmax.* as torch.uint8"),
    (lambda t: t.update(
        {f"{Q}.nested_absmax": t[f"{Q}.nested_absmax"].view(torch.int32)}
    ), "nested.* as torch.float32"),
    (lambda t: t.update({Q: t[Q].view(torch.int8)}), "as torch.uint8"),
    (single, "packed in 4 bits with float32 scales"), (repacked, "the packed tensor lm_head.weight"),
])  # fmt: skip
def test_damaged_or_foreign_packing(folders, tmp_path, edit, text):
    folder = changed(folders, tmp_path, edit)
    with pytest.raises(NeedsError, match=text) as caught:
        assembled(run(folder, tmp_path / "run", nf4={}, lora={}))
    assert caught.value.asked and caught.value.found and caught.value.do
