"""Checkpoints of gpt-oss whose experts are 4-bit floats: read exactly, trained, kept as they are, exported dense."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from meshes import further
from optrush import exporting
from optrush.config import parse_config
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.models.experts import Experts
from optrush.planner import search

from golden import make_golden
from trials import apart, assembled, golden_run, micro, steps, weights

GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16,
    "swiglu_limit": 1.0, "intermediate_size": 64,
}  # fmt: skip
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
LORA: dict[str, Any] = {"lora": {"rank": 4, "targets": ["q_proj", "gate_up_proj", "down_proj"]}}
KEPT = {"nf4": {"experts": "mxfp4"}}


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """(with 4-bit experts, with the dense ones of the same values that transformers computes)."""
    packed, dense = (tmp_path_factory.mktemp(name) for name in ("packed", "dense"))
    make_golden.write_model(dense / "untied", False, **GPT_OSS)
    make_golden.write_documents(dense / "text.jsonl", False)
    shutil.copytree(dense, packed, dirs_exist_ok=True)
    tensors = load_file(dense / "untied" / "model.safetensors")
    four, draw = dict(tensors), torch.Generator().manual_seed(7)
    for name, t in tensors.items():
        if name.endswith("_proj") and "experts" in name:
            N, width, rows = t.shape
            codes = torch.randint(0, 256, (N, rows, width // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 125, (N, rows, width // 32), generator=draw, dtype=torch.uint8)
            tensors[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
            del four[name]
            four |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    for box, written in ((dense, tensors), (packed, four)):
        save_file(written, box / "untied" / "model.safetensors", metadata={"format": "pt"})
    file = packed / "untied" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": STORED}))
    return packed, dense


def played(trainer: Any) -> tuple[Any, Any]:
    return [line[:2] for line in steps(trainer, 2)], weights(trainer)


def alike(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], t) for name, t in other[1].items())


DENSE = [{}, {"nf4": {}, **LORA}, {"bf16": {}, **LORA}, {"int8": {}, **LORA}]


@pytest.mark.parametrize("with_", further(DENSE, 2), ids=str)
def test_a_run_is_that_of_the_dense_values(boxes, with_):
    """Of all weights, of adapters, and over codes that are made of these values."""
    packed, dense = (played(assembled(golden_run(box, packed=True, **with_))) for box in boxes)
    assert alike(packed, dense)


def test_experts_that_stay_as_they_are(boxes, tmp_path):
    """The bytes of the file, the maths of their exact values beside linears in NF4, a dense export."""
    trainer = assembled(golden_run(boxes[0], packed=True, **KEPT, **LORA))
    found = load_file(boxes[0] / "untied" / "model.safetensors")
    experts = [m for m in trainer.model.modules() if isinstance(m, Experts)]
    for i, layer in enumerate(experts):
        for kind, held in layer.quantized.items():
            name = f"model.layers.{i}.mlp.experts.{kind}_proj"
            for part, end in (("codes", "_blocks"), ("scales", "_scales")):
                raw = found[name + end].flatten()
                assert torch.equal(getattr(held.experts, part).view(torch.uint8)[: raw.numel()], raw)
            exact = convert_moe_packed_tensors(found[f"{name}_blocks"], found[f"{name}_scales"], dtype=torch.float32)
            assert torch.equal(layer.dense(kind, torch.float32), exact.mT)
    plain = assembled(golden_run(boxes[1], packed=True, **LORA))
    with torch.no_grad():
        for (_, linear), (_, other) in zip(plain.model.linears(), trainer.model.linears(), strict=True):
            linear.weight.copy_(other.dequantized(torch.float32))
    assert alike(played(trainer), played(plain))
    tensors = exporting.published_tensors(trainer)
    exporting.export_weights(tmp_path / "out", tensors, trainer.weight_map, trainer.hf, base=boxes[0] / "untied")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    batch = micro(trainer)
    first = slice(int(batch.positions[0].eq(0).nonzero()[1]))
    with torch.no_grad():
        hidden = trainer.model(batch.tokens, batch.positions, batch.documents)
        want = trainer.model.head.logits(hidden)[:1, first]
        assert apart(merged(batch.tokens[:1, first]).logits, want) < 1e-5


def test_what_it_predicts(tmp_path):
    """The published 20B model, of which config.json is enough: 4.25 bits an expert's weight, within 15 GiB."""
    sizes = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "vocab_size": 201088,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False,
        "quantization_config": STORED,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    text = f"{{model: {tmp_path}, objective: pretrain, data: {{random: 64}}, train: {{steps: 4}}, output: o}}"
    batch = ["batch.seq=2048", "batch.tokens=2048"]
    usual = ("bf16", "attention", "recompute", "compile", "fused-loss:chunk=512", "lora:rank=16")

    def bytes_of(*more: str) -> tuple[int, int]:
        found = search.predict(parse_config(text, "planned", batch, (*usual, *more)), "h100")
        return next(line.bytes for line in found.lines if line.name == "weights.blocks"), found.peak_bytes

    dense, kept, nf4 = (bytes_of(*more) for more in ((), ("nf4:experts=mxfp4",), ("nf4",)))
    experts = 24 * 32 * 3 * 2880 * 2880
    assert kept[0] - nf4[0] == pytest.approx(experts * (4.25 - 4.1270) / 8, rel=0.01)
    assert dense[0] > 2 * experts and kept[1] < 15 * 2**30


def broken(box: Path, to: Path, name: str, edit: Any) -> Path:
    shutil.copytree(box, to)
    file = to / "untied" / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = edit(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return to


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


def test_what_is_refused(boxes, tmp_path):
    packed, dense = boxes
    with pytest.raises(ConfigError, match=r"nf4:experts=mxfp4.*\nfound: a checkpoint of dense weights"):
        decide(golden_run(dense, packed=True, **KEPT, **LORA))
    with pytest.raises(NeedsError, match=r"MXFP4 experts.*\nfound: a model that runs through transformers"):
        assembled(golden_run(packed, packed=True, sets=["model.implementation=transformers"]))
    shutil.copytree(packed, tmp_path / "told")
    shutil.copy(dense / "untied" / "model.safetensors", tmp_path / "told" / "untied")
    with pytest.raises(NeedsError, match="is dense in the checkpoint"):
        assembled(golden_run(tmp_path / "told", packed=True, **KEPT, **LORA))
    for i, edit in enumerate((lambda t: t[..., :8].clone(), lambda t: t.view(torch.int8), lambda t: t[:, :8].clone())):
        with pytest.raises(NeedsError, match=f"the MXFP4 tensor {BLOCKS.removesuffix('_blocks')}"):
            assembled(golden_run(broken(packed, tmp_path / str(i), BLOCKS, edit), packed=True))
    file = tmp_path / "told" / "untied" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(NeedsError, match="method hqq"):
        decide(golden_run(tmp_path / "told", packed=True))
