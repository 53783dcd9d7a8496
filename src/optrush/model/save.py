"""A model as transformers keeps it: config.json and safetensors, written tensor by tensor as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from optrush.errors import CheckpointError
from optrush.model.weights import INDEX, SINGLE, Recipe
from optrush.shapes import ARCHITECTURES, HF

# Of config.json: the old name of `dtype`; and which attention computes the model, which may name code on the hub.
LEFT_OUT = ("torch_dtype", "attn_implementation", "_attn_implementation", "_attn_implementation_internal")


class _Shards:
    """Writes tensors into numbered files as they come; names them at the end, when their number is known."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.written: list[list[str]] = []
        self.total_bytes = 0
        self.bytes_of: dict[torch.dtype, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.held_bytes + size > self.max_bytes:
            self.flush()
        self.held[name] = tensor.detach().contiguous()
        self.held_bytes += size
        self.total_bytes += size
        self.bytes_of[tensor.dtype] = self.bytes_of.get(tensor.dtype, 0) + size

    def _part(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors.part"

    def flush(self) -> None:
        save_file(self.held, self._part(len(self.written) + 1), metadata={"format": "pt"})
        self.written.append(list(self.held))
        self.held, self.held_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        if len(self.written) == 1:
            self._part(1).rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.written, 1):
            file = f"model-{i:05d}-of-{len(self.written):05d}.safetensors"
            self._part(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], recipe: Recipe, hf: HF, max_shard_bytes: float = 5e9
) -> None:
    """Write a folder that transformers' AutoModelForCausalLM loads: config.json and safetensors, in its own layout.

    Args:
        folder: made if missing; must hold no weights yet.
        tensors: every parameter by canonical name, whole, on the CPU, aliases left out; consumed one at a time.
        recipe: of the model that they belong to.
        hf: its config.json; "dtype" becomes the type that most of the bytes have.
        max_shard_bytes: begin a new file rather than exceed this, unless one tensor alone does.

    Raises:
        CheckpointError: the folder already holds weights, or a parameter is unknown, given twice or missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = f"export to {folder}"
    there = sorted(p.name for p in folder.iterdir() if ".safetensors" in p.name)
    if there:
        raise CheckpointError(asked, f"it already holds {there[0]}", "choose an empty folder")
    shards, missing = _Shards(folder, max_shard_bytes), set(recipe.entries)
    for name, full in tensors:
        if name not in missing:
            raise CheckpointError(asked, f"parameter {name} is unknown or came twice", "export the model's parameters")
        missing.remove(name)
        for hf_name, part in recipe.split(name, full):
            shards.add(hf_name, part)
    if missing:
        raise CheckpointError(asked, f"no values for {sorted(missing)[0]}", "export all of the model's parameters")
    dtype = max(shards.bytes_of, key=lambda d: shards.bytes_of[d])
    for hf_name, buffer in recipe.buffers.items():
        shards.add(hf_name, buffer)
    shards.close()
    config = {key: value for key, value in hf.items() if key not in LEFT_OUT}
    config["dtype"] = str(dtype).removeprefix("torch.")
    if not config.get("architectures"):
        config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
