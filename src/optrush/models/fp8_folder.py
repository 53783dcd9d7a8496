"""Write an exported folder again with its linears in 8-bit floats, as the compressed-tensors format lays them out.

A linear's weight W (out, in) is stored as float8_e4m3fn with a scale a row: W = weight * weight_scale. Inputs are
scaled a token at a time when they are multiplied, as vLLM does it. Embedding, head, norms and routers stay as they are.

Source of the layout: https://github.com/vllm-project/compressed-tensors (format `float-quantized`)
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from optrush.errors import NeedsError
from optrush.files import read_text, regular

INDEX = "model.safetensors.index.json"
LARGEST = 448.0  # of float8_e4m3fn
_LINEAR = re.compile(r"(.*\.layers\.\d+\..+)\.weight")
_ROUTER = re.compile(r"\.(gate|router)$")  # whose choice of experts a rounded score may change


def write_fp8(folder: Path, to: Path) -> int:
    """Write a folder of transformers' again with its linears in 8-bit floats; return the number of linears.

    Args:
        to: an empty folder.

    Raises:
        NeedsError: experts in one tensor a layer, for which the format has no layout, or no linears.
    """
    kept, sizes, places, done = ["lm_head"], 0, dict[str, str](), 0
    for file in sorted(folder.glob("*.safetensors")):
        written = dict[str, Tensor]()
        with safe_open(regular(file), "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                t = stored.get_tensor(name)
                module = _LINEAR.fullmatch(name)
                if ".layers." in name and t.dim() > 2:
                    found = f"{name} holds all experts of a layer, for which the format has no layout"
                    raise NeedsError("`--to fp8`", found, "export with --to hf")
                if module is None or t.dim() != 2 or _ROUTER.search(module[1]):
                    if module is not None and t.dim() == 2:
                        kept.append(module[1])
                    written[name] = t
                    continue
                written[name], written[f"{module[1]}.weight_scale"] = quantized(t)
                done += 1
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
    config["quantization_config"] = settings(kept)
    (to / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    return done


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, in) float8_e4m3fn and (out, 1) scales of the weight's type: weight (out, in).

    Scales are rounded first, so that what is stored is the nearest to the weight under the scale that is stored.
    """
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.bfloat16).tiny).to(weight.dtype)
    scaled = (wide / scale.float()).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale


def settings(kept: list[str]) -> dict[str, Any]:
    """Return config.json's `quantization_config`; kept: modules that stay as they are."""
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
