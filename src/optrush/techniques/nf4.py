"""Frozen weights of linears and experts in 4 bits, as in QLoRA, or in 8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from optrush.errors import ConfigError
from optrush.peft import ledger
from optrush.planner.ledger import Rule
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from optrush.peft.quantized import Form


class StoredInBits(Technique):
    """Base: frozen weights of the linears in fewer bits, dequantized to multiply."""

    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.LINEARS})
    wants = frozenset({Part.TRAINED})
    searched = False  # changes the computed values

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return spec.with_linears(weight="quantized")

    def forms(self) -> tuple[Form, Form | None]:
        """Return the form of linears, and that of experts if it differs."""
        raise AssertionError("each format is a technique")

    def peft(self, trainer: Trainer) -> int:
        ledger.demand_compilers(self.name, trainer.env.device)
        from optrush.peft.quantized import quantize_model

        form, of_experts = self.forms()
        return quantize_model(trainer.model, trainer.weight_map, form, trainer.precision, of_experts)


@dataclass(frozen=True)
class Nf4(StoredInBits):
    """Stores the weights of linears and experts as 4-bit NormalFloat, and dequantizes each to multiply.

    Weights are quantized while loading, one tensor at a time, to the bytes of bitsandbytes; folders quantized by
    bitsandbytes are loaded unchanged. Another technique determines the trained parameters; embedding, norms and head
    are unchanged.

    double: quantize the scales too. experts: `mxfp4` keeps a checkpoint's MXFP4 experts, byte by byte.

    Source: Dettmers et al., https://arxiv.org/abs/2305.14314
    Memory: 4.127 bits per weight of linears and experts, 4.5 without double; and one dense linear, or all gates and ups
        of a layer's experts, while they multiply.
    Work: a linear's codes read and its dense weight written, once per forward pass and once per backward pass.
    Differs from the source: values are quantized as stored in the file, without a cast to the matmul dtype; the experts
        of a layer are two matrices, with rows in our order; no paged optimizer.
    """

    double: bool = True
    experts: Literal["nf4", "mxfp4"] = "nf4"

    name = "nf4"
    summary = "frozen 4-bit NormalFloat linears under adapters (QLoRA), byte-compatible with bitsandbytes"
    source = "https://arxiv.org/abs/2305.14314"

    def needs(self, env: Environment) -> Iterator[Requirement]:
        experts = None if env.shape is None else env.shape.experts
        width = 0 if env.shape is None or experts is None else math.gcd(env.shape.width, experts.ff_width)
        found = f"experts with rows of {env.shape.width if env.shape else 0} and {experts.ff_width if experts else 0}"
        found += " values; a block of 64 cannot cross rows"
        met = width % 64 == 0 or self.experts == "mxfp4"
        yield Requirement(met, "`nf4`", found, "take --with int8 instead")

    def quality(self, env: Environment) -> str:
        return "4-bit base"

    def predict(self, env: Environment) -> Iterator[Rule]:
        width = 0.5 + 1 / 64 + 4 / (64 * 256) if self.double else 0.5 + 4 / 64
        if self.experts == "mxfp4":
            width += (0.5 + 1 / 32 - width) * ledger.expert_share(env.shape)
        yield from ledger.predict_quantized(env, width)

    def config(self, hf: dict[str, Any]) -> int:
        """Remove `quantization_config`: exports are not quantized."""
        stored = hf.get("quantization_config") or {}
        if not isinstance(stored, dict):
            raise ConfigError("`quantization_config` of config.json", f"{stored!r}, not a mapping", "download it again")
        if self.experts == "mxfp4" and stored.get("quant_method") != "mxfp4":
            found = f"a checkpoint {'quantized by another method' if stored else 'of dense weights'}"
            raise ConfigError("`nf4:experts=mxfp4`", found, "leave experts=mxfp4 out")
        if stored.get("quant_method") != "bitsandbytes":
            return 0
        kind = stored.get("bnb_4bit_quant_type") if stored.get("load_in_4bit") else "int8"
        kind = f"{kind} in {stored.get('bnb_4bit_quant_storage', 'uint8')}"
        if kind != "nf4 in uint8":
            do = "start from the unquantised checkpoint"
            raise ConfigError("`nf4` on weights quantized by bitsandbytes", f"they are {kind}", do)
        doubled = bool(stored.get("bnb_4bit_use_double_quant"))
        if doubled != self.double:
            found = f"weights quantized {'with' if doubled else 'without'} it"
            raise ConfigError(f"`nf4:double={self.double}`", found, f"use --with nf4:double={str(doubled).lower()}")
        del hf["quantization_config"]
        return 1

    def forms(self) -> tuple[Form, Form | None]:
        from optrush.peft.quantized import Form

        return Form(4, self.double), Form(4, floats=True) if self.experts == "mxfp4" else None


@dataclass(frozen=True)
class Int8(StoredInBits):
    """Stores the weights of linears and experts as int8 with one scale per row, and dequantizes each to multiply.

    Weights are quantized while loading, one tensor at a time. Another technique determines the trained parameters;
    embedding, norms, head and the inputs of matmuls are unchanged.

    Source: Dettmers et al., https://arxiv.org/abs/2208.07339
    Memory: 8 + 32 / D bits per weight of linears and experts; and one dense linear, or all gates and ups of a layer's
        experts, while they multiply.
    Work: a linear's codes read and its dense weight written, once per forward pass and once per backward pass.
    Differs from the source: matmuls run in the dtype of their inputs, which are not quantized.
    """

    name = "int8"
    summary = "frozen linears in 8-bit integers under adapters"
    source = "https://arxiv.org/abs/2208.07339"

    def quality(self, env: Environment) -> str:
        return "8-bit base"

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield from ledger.predict_quantized(env, 1 + (4 / env.shape.width if env.shape else 0))

    def forms(self) -> tuple[Form, Form | None]:
        from optrush.peft.quantized import Form

        return Form(8), None
