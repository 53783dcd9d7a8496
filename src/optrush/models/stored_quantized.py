"""Read linears that are quantized on disk as dense weights: FP8, compressed-tensors in FP8, GPTQ and AWQ.

    fp8                 `weight` float8_e4m3fn (out, in), `weight_scale_inv` one scale per block of 128 x 128
    compressed-tensors  `weight` float8_e4m3fn (out, in), `weight_scale` (out, 1) or one; format `float-quantized`
    gptq                `qweight` int32 (in 8 / bits / 4, out), `qzeros` and `scales` per group of inputs, `g_idx` (in,)
    awq                 `qweight` int32 (in, out / 8), `qzeros` and `scales` per group of inputs; version `gemm`, 4 bits

A weight is scale * (code - zero), in float32, rounded once to bfloat16. Other techniques determine what is trained, and
whether the weight is quantized again; an export is dense.

Sources of the layouts: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md,
https://github.com/vllm-project/compressed-tensors, https://github.com/AutoGPTQ/AutoGPTQ (arXiv:2210.17323),
https://github.com/casper-hansen/AutoAWQ (arXiv:2306.00978)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrush.errors import NeedsError
from optrush.models.config_json import METHODS, is_readable
from optrush.models.weights import Folder, PackedFolder, Shape, open_weights

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each of 8 outputs among the 4-bit fields of an int32
SIDES = {
    "fp8": ("weight_scale_inv",), "compressed-tensors": ("weight_scale", "input_scale"),
    "gptq": ("qzeros", "scales", "g_idx"), "awq": ("qzeros", "scales"),
}  # fmt: skip


def opened_weights(folder: Path, hf: Mapping[str, Any]) -> Folder | PackedFolder:
    """Open the weights of a folder in any supported storage form; hf: its config.json."""
    settings = hf.get("quantization_config")
    return QuantizedFolder(folder, settings) if is_readable(settings) else open_weights(folder)


def refuse_quantised(folder: Path, hf: Mapping[str, Any]) -> None:
    """Raise NeedsError for quantized weights of a model that runs through transformers."""
    if is_readable(settings := hf.get("quantization_config")):
        found = "a model that runs through transformers, which does not make them dense"
        do = "set model.implementation: native, or use the unquantised checkpoint"
        raise NeedsError(f"the {METHODS[settings['quant_method']]} weights in {folder}", found, do)


class QuantizedFolder(Folder):
    """A folder whose quantized linears have the names and shapes of dense ones."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)
        assert is_readable(settings)
        self.method, self.bits = str(settings["quant_method"]), int(settings.get("bits", 4))
        self.block = tuple(settings.get("weight_block_size") or ())
        # GPTQ's first layout stores each zero minus one.
        self.less = int(self.method == "gptq" and settings.get("checkpoint_format", "gptq") == "gptq")
        self.stored = Folder(folder)
        codes = "qweight" if self.method in ("gptq", "awq") else "weight"
        sides = SIDES[self.method]
        self.packed = {
            name.removesuffix(codes): name
            for name in self.files
            if name.endswith(f".{codes}") and f"{name.removesuffix(codes)}{self._scales}" in self.files
        }
        held = {f"{module}{end}" for module in self.packed for end in (codes, *sides)}
        dense = {f"{module}weight": self.files[name] for module, name in self.packed.items()}
        self.files = {name: file for name, file in self.files.items() if name not in held} | dense
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    @property
    def _scales(self) -> str:
        return {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}.get(self.method, "scales")

    def check(self, needed: Mapping[str, Shape], duplicates: Mapping[str, str]) -> None:
        """Check like `Folder.check`; ignore biases of zeros, which GPTQ's writers add to every linear.

        Raises NeedsError also for a linear in 8-bit floats without its scale.
        """
        for name in sorted(needed.keys() & self.files.keys()):
            if name.removesuffix("weight") not in self.packed and self.stored._slice(name).get_dtype().startswith("F8"):
                found = f"{name} in 8-bit floats without {name.removesuffix('weight')}{self._scales}"
                raise NeedsError(f"{METHODS[self.method]} weights in {self.folder}", found, "download it again")
        extra = (f"{module}bias" for module in self.packed)
        for name in [name for name in extra if name in self.files and name not in needed]:
            if not bool(self.stored._slice(name)[:].any()):
                del self.files[name]
        super().check(needed, duplicates)

    def shape(self, name: str) -> Shape:
        module = name.removesuffix("weight")
        if module not in self.packed:
            return super().shape(name)
        if len(held := self.stored.shape(self.packed[module])) != 2:
            found = f"{self.packed[module]} has {len(held)} dimensions"
            raise NeedsError(f"{METHODS[self.method]} weights in {self.folder}", found, "download it again")
        rows, columns = held
        fields = 32 // self.bits
        if self.method == "gptq":
            return columns, rows * fields
        return (columns * fields, rows) if self.method == "awq" else (rows, columns)

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Return rows (last - first, in) of a linear in bfloat16; a quantized one is read completely."""
        module = name.removesuffix("weight")
        if module not in self.packed:
            return super().rows(name, first, last, shape, device)
        if self._last[0] != name or self._last[1].device != device:
            self._last = ("", torch.empty(0))  # freed before reading the next one
            self._last = name, self._dense(module, device)
        return self._last[1][first:last]

    def _dense(self, module: str, device: torch.device) -> Tensor:
        parts = {end: self._part(module + end, device) for end in (*SIDES[self.method], self._scales)}
        codes = self._part(self.packed[module], device)
        assert codes is not None
        try:
            if self.method in ("gptq", "awq"):
                weight = self._integers(codes, parts)
            else:
                weight = self._floats(codes, parts[self._scales])
        except (RuntimeError, IndexError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
            kinds = ", ".join(f"{end} {'missing' if t is None else list(t.shape)}" for end, t in parts.items())
            found = f"{list(codes.shape)} of {codes.dtype}, {kinds} ({error})"
            raise NeedsError(f"{METHODS[self.method]} weights of {module[:-1]}", found, "download it again") from None
        return weight.to(torch.bfloat16)

    def _part(self, name: str, device: torch.device) -> Tensor | None:
        return self.stored._slice(name)[:].to(device) if name in self.stored.files else None

    def _floats(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        weight, scale = codes.float(), scale.float()
        if self.block:
            scale = scale.repeat_interleave(self.block[0], 0)[: len(weight)]
            scale = scale.repeat_interleave(self.block[1], 1)[:, : weight.shape[1]]
        return weight * scale

    def _integers(self, codes: Tensor, parts: Mapping[str, Tensor | None]) -> Tensor:
        """Return (out, in) float32 from codes as on disk."""
        zeros, scales, groups = parts["qzeros"], parts["scales"], parts.get("g_idx")
        if zeros is None or scales is None:
            raise ValueError("a part is missing")
        if self.method == "awq":
            q, z = (_fields(t, 4)[..., list(AWQ_ORDER)].flatten(1) for t in (codes, zeros))  # (in, out), (groups, out)
        else:
            q = _fields(codes.t().contiguous(), self.bits).flatten(1).t()
            z = _fields(zeros, self.bits).flatten(1) + self.less
        if groups is None:
            groups = torch.arange(len(q), device=q.device) // (len(q) // len(scales))
        groups = groups.long()
        if groups.min() < 0:
            raise ValueError("a negative group")
        return ((q - z[groups]).float() * scales.float()[groups]).t().contiguous()


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unpack words (..., n) int32 into bit fields (..., n, 32 / bits), the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return torch.bitwise_and(torch.bitwise_right_shift(words[..., None], shifts), (1 << bits) - 1)
