"""Weights quantised on disk: what is read are the values that the published layouts stand for, and a run is theirs.

The layouts are written here field by field, by loops, from their descriptions.
"""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mxfp4 import alike, played

from meshes import further
from optrush import exporting
from optrush.errors import NeedsError
from optrush.models.config_json import read_config_json
from optrush.models.hf import load

from golden import make_golden
from trials import assembled, golden_run

Tensors = dict[str, torch.Tensor]
GROUP = 8
LORA: dict[str, Any] = {"lora": {"rank": 4, "targets": ["q_proj", "gate_proj", "down_proj"]}}


def word(fields: list[int], bits: int) -> int:
    """Fields of an int32, the first one lowest."""
    value = sum(field << (bits * i) for i, field in enumerate(fields))
    return value - (1 << 32) if value >= 1 << 31 else value


def gptq(weight: torch.Tensor, draw: torch.Generator, bits: int = 4, v2: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Parts of a linear (out, in) of random codes, and what they stand for; inputs are in groups out of order."""
    out, inputs = weight.shape
    n, groups, top = 32 // bits, inputs // GROUP, 1 << bits
    q = torch.randint(0, top, (inputs, out), generator=draw).tolist()
    z = torch.randint(1, top, (groups, out), generator=draw).tolist()
    scales = torch.rand(groups, out, generator=draw).half() * 0.05
    of = (torch.randperm(inputs, generator=draw) // GROUP).tolist()
    codes = [[word([q[i + k][o] for k in range(n)], bits) for o in range(out)] for i in range(0, inputs, n)]
    less = 0 if v2 else 1
    zeros = [[word([z[g][o + k] - less for k in range(n)], bits) for o in range(0, out, n)] for g in range(groups)]
    want = [[scales[of[i]][o].item() * (q[i][o] - z[of[i]][o]) for i in range(inputs)] for o in range(out)]
    parts = {"qweight": codes, "qzeros": zeros, "g_idx": of}
    found = {name: torch.tensor(value, dtype=torch.int32) for name, value in parts.items()}
    return {**found, "scales": scales, "bias": torch.zeros(out)}, torch.tensor(want)


def awq(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Fields of eight outputs in the order 0 2 4 6 1 3 5 7."""
    out, inputs = weight.shape
    order, groups = (0, 2, 4, 6, 1, 3, 5, 7), inputs // GROUP
    q = torch.randint(0, 16, (inputs, out), generator=draw).tolist()
    z = torch.randint(0, 16, (groups, out), generator=draw).tolist()
    scales = torch.rand(groups, out, generator=draw).half() * 0.05

    def packed(rows: list[list[int]]) -> torch.Tensor:
        words = [[word([row[o + k] for k in order], 4) for o in range(0, out, 8)] for row in rows]
        return torch.tensor(words, dtype=torch.int32)

    want = [[scales[i // GROUP][o].item() * (q[i][o] - z[i // GROUP][o]) for i in range(inputs)] for o in range(out)]
    return {"qweight": packed(q), "qzeros": packed(z), "scales": scales}, torch.tensor(want)


def fp8(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 16 x 8, the last of each row and column smaller."""
    out, inputs = weight.shape
    codes = (torch.randn(out, inputs, generator=draw) * 8).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-out // 16), -(-inputs // 8), generator=draw) * 0.01
    want = [[codes[o, i].float() * scales[o // 16, i // 8] for i in range(inputs)] for o in range(out)]
    return {"weight": codes, "weight_scale_inv": scales}, torch.tensor(want)


def by_row(weight: torch.Tensor, draw: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    out, inputs = weight.shape
    codes = (torch.randn(out, inputs, generator=draw) * 8).to(torch.float8_e4m3fn)
    scales = torch.rand(out, 1, generator=draw) * 0.01
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


KINDS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq v2, 8 bits": (
        lambda w, draw: gptq(w, draw, 8, v2=True),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}),
    "compressed-tensors": (by_row, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
}


@pytest.fixture(scope="module", params=KINDS)
def boxes(request, tmp_path_factory):
    """Two boxes of the same rows: with quantised linears, and with the dense values that they stand for."""
    pack, settings = KINDS[request.param]
    packed, dense = (tmp_path_factory.mktemp(name) for name in ("packed", "dense"))
    make_golden.write_model(dense / "untied", False)
    make_golden.write_documents(dense / "text.jsonl", False)
    shutil.copytree(dense, packed, dirs_exist_ok=True)
    tensors = load_file(dense / "untied" / "model.safetensors")
    stored, draw = dict(tensors), torch.Generator().manual_seed(7)
    for name, t in tensors.items():
        if name.endswith("_proj.weight"):
            del stored[name]
            parts, want = pack(t, draw)
            tensors[name] = want.to(torch.bfloat16).to(t.dtype)
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
    for box, written in ((dense, tensors), (packed, stored)):
        save_file(written, box / "untied" / "model.safetensors", metadata={"format": "pt"})
    file = packed / "untied" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    return packed, dense


RUNS: list[dict[str, Any]] = [{**LORA}, {"nf4": {}, **LORA}, {}]


@pytest.mark.parametrize("with_", further(RUNS, 1), ids=str)
def test_a_run_is_that_of_the_dense_values(boxes, tmp_path, with_):
    """Of adapters, of adapters over codes that are made of these values, of all weights; an export is dense."""
    ours, dense = (assembled(golden_run(box, packed=True, **with_)) for box in boxes)
    assert alike(played(ours), played(dense))
    assert any(note.endswith("weights are loaded as dense weights") for note in ours.notes)
    exporting.export_weights(
        tmp_path / "out", exporting.published_tensors(ours), ours.weight_map, ours.hf, base=boxes[0] / "untied"
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_other_readers_and_damage(boxes, tmp_path):
    folder = boxes[0] / "untied"
    with pytest.raises(NeedsError, match=r"weights in .*\n.*runs through transformers"):
        load(folder, read_config_json(folder / "config.json"), "transformers", torch.float32, 0)
    shutil.copytree(folder, tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith(("scales", "weight_scale", "weight_scale_inv")))
    t = tensors[name]
    tensors[name] = (t[:, :-1] if t.shape[1] > 1 else t[:-1]).contiguous()
    save_file(tensors, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    model, recipe = load(tmp_path / "cut", read_config_json(folder / "config.json"), None, torch.float32, 0)
    every = [(name, torch.empty(p.shape)) for name, p in model.named_parameters()]
    with pytest.raises(NeedsError, match="download it again"):
        _ = [recipe.fill(name, t, (0,) * t.ndim) for name, t in every]


def test_a_bias_that_is_not_zero_is_refused(boxes, tmp_path):
    tensors = load_file(boxes[0] / "untied" / "model.safetensors")
    biases = [name for name in tensors if name.endswith("o_proj.bias")]
    if biases:
        shutil.copytree(boxes[0] / "untied", tmp_path / "biased")
        tensors[biases[0]] += 1
        save_file(tensors, tmp_path / "biased" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(NeedsError, match="a tensor that this model does not have"):
            load(tmp_path / "biased", read_config_json(tmp_path / "biased/config.json"), None, torch.float32, 0)
