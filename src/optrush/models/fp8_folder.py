"""Rewrite an exported folder with 8-bit float linears in the compressed-tensors format.

A linear's weight W (out, in) is stored as float8_e4m3fn with one scale per row: W = weight * weight_scale. Inputs are
scaled per token at the matmul, like in vLLM. Not changed: embedding, head, norms, routers, convolutions, multi-token
prediction layers (`mtp`), image and audio towers. Readers expect every linear in 8 bits except those in `ignore`,
listed by the files' names (vLLM) or the modules' names (transformers).

Source of the layout: https://github.com/vllm-project/compressed-tensors (format `float-quantized`)
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.files import read_text, regular
from optrush.models.config_json import read_config_json
from optrush.models.hf import opened_on_meta, stored_names
from optrush.models.text_part import is_text, layout, text_config
from optrush.models.weights import Folder

INDEX = "model.safetensors.index.json"
LARGEST = 448.0  # the largest float8_e4m3fn
_LINEAR = re.compile(r".*\.layers\.(\d+)\..+\.weight")
# Linears whose rounding could change the choice or weight of experts.
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)$")


def write_fp8(folder: Path, to: Path) -> int:
    """Write a copy of a transformers folder with its linears in 8-bit floats; return the number of linears.

    Args:
        to: an empty folder.

    Raises:
        NeedsError: experts in one tensor per layer, for which the format has no layout, or no linears.
    """
    hf, files = read_config_json(folder / "config.json"), Folder(folder).files
    linears, others = _modules(folder, hf)
    text_at, layers = layout(files), text_config(hf).get("num_hidden_layers") or math.inf  # `mtp` layers follow
    kept, sizes, places, done = {"lm_head"}, 0, dict[str, str](), set[str]()
    for file in sorted(folder.glob("*.safetensors")):
        written = dict[str, Tensor]()
        with safe_open(regular(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                t = stored.get_tensor(name)
                module, text = name.removesuffix(".weight"), text_at is None or is_text(name, text_at)
                leaf = module.rpartition(".")[2]
                if text and ".layers." in name and t.dim() > 2 and "conv" not in leaf:
                    reason = f"{name} has all experts of a layer; the format has no layout for it"
                    raise NeedsError("`--to fp8`", reason, "export with --to hf")
                linear = t.dim() == 2 and module != name and module not in others and leaf != "embed_tokens"
                block = _LINEAR.fullmatch(name) if linear and text else None
                if block is None or int(block[1]) >= layers or _ROUTER.search(module):
                    kept |= {module} if linear or _ROUTER.search(module) else set()
                    written[name] = t
                    continue
                written[name], written[f"{module}.weight_scale"] = quantized(t)
                done.add(module)
        save_file(written, to / file.name, {"format": "pt"})
        places |= dict.fromkeys(written, file.name)
        sizes += sum(t.nbytes for t in written.values())
    if not done:
        raise NeedsError("`--to fp8`", f"no linear layers in {folder.name}", "export with --to hf")
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
            shutil.copy2(file, to / file.name)
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": sizes}, "weight_map": places}
        (to / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
    config = json.loads(read_text(folder / "config.json"))
    kept |= {name for name, stored in linears.items() if stored not in done}
    config["quantization_config"] = settings(sorted(kept))
    (to / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    return len(done)


def _modules(folder: Path, hf: dict[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Return the linears of transformers' model (its name: the files' name), and the files' other modules."""
    model = opened_on_meta(hf)
    names = stored_names(folder, model, {})
    modules = {m: names.get(f"{m}.weight", f"{m}.weight").removesuffix(".weight") for m, _ in model.named_modules()}
    linears = {name: modules[name] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return linears, {*modules.values()} - {*linears.values()}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) float8_e4m3fn and (out, 1) scales of the weight's type: weight (out, in).

    Scales are rounded first, so that the stored weight is the nearest under the stored scale.
    """
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.bfloat16).tiny).to(weight.dtype)
    scaled = (wide / scale.float()).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale


def settings(kept: list[str]) -> dict[str, Any]:
    """Return config.json's `quantization_config`; kept: modules that are not quantized."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }
