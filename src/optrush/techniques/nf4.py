"""Weights of the linears and experts under what is trained in 4 bits, as QLoRA has them, or in 8."""

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
    """Base: frozen weights of the linears in fewer bits, made dense where they multiply."""

    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.LINEARS})
    wants = frozenset({Part.TRAINED})
    searched = False  # changes what is computed

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return spec.with_linears(weight="quantized")

    def forms(self) -> tuple[Form, Form | None]:
        """Return the form of linears, and that of experts if it is another one."""
        raise AssertionError("each form is a technique")

    def peft(self, trainer: Trainer) -> int:
        ledger.demand_compilers(self.name, trainer.env.device)
        from optrush.peft.quantized import quantize_model

        form, of_experts = self.forms()
        return quantize_model(trainer.model, trainer.weight_map, form, trainer.precision, of_experts)


@dataclass(frozen=True)
class Nf4(StoredInBits):
    """Holds the weights of linears and experts as 4-bit NormalFloat, and makes each dense while it multiplies.

    Quantised while they are read, a tensor at a time, to the bytes that bitsandbytes makes; folders that bitsandbytes
    quantised are taken as they are. Another technique determines what is trained; embedding, norms and head stay as
    they are.

    double: the scales are quantised too. experts: `mxfp4` keeps those of a checkpoint that has them so, byte by byte.

    Source: Dettmers et al., https://arxiv.org/abs/2305.14314
    Memory: 4.127 bits a weight of linears and experts, 4.5 without double; and one dense linear, or all gates and ups
        of a layer's experts, while they multiply.
    Work: a linear's codes read and its dense weight written, once a forward pass and once a backward pass.
    Differs from the source: values are quantised as the file has them, not rounded to a type of products before; the
        experts of a layer are two matrices, whose rows are in our order; no paged optimizer.
    """

    double: bool = True
    experts: Literal["nf4", "mxfp4"] = "nf4"

    name = "nf4"
    summary = "frozen weights of the linears in 4-bit NormalFloat, dequantized for each matmul"
    source = "https://arxiv.org/abs/2305.14314"

    def needs(self, env: Environment) -> Iterator[Requirement]:
        experts = None if env.shape is None else env.shape.experts
        width = 0 if env.shape is None or experts is None else math.gcd(env.shape.width, experts.ff_width)
        found = f"experts with rows of {env.shape.width if env.shape else 0} and {experts.ff_width if experts else 0}"
        found += " values, not multiples of 64, the block size of NF4"
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
        """Remove `quantization_config`: what is exported is not quantised."""
        stored = hf.get("quantization_config") or {}
        if not isinstance(stored, dict):
            raise ConfigError("`quantization_config` of config.json", f"{stored!r}, no mapping", "download it again")
        if self.experts == "mxfp4" and stored.get("quant_method") != "mxfp4":
            found = f"a checkpoint {'quantised by another method' if stored else 'of dense weights'}"
            raise ConfigError("`nf4:experts=mxfp4`", found, "leave experts=mxfp4 out")
        if stored.get("quant_method") != "bitsandbytes":
            return 0
        kind = stored.get("bnb_4bit_quant_type") if stored.get("load_in_4bit") else "int8"
        kind = f"{kind} in {stored.get('bnb_4bit_quant_storage', 'uint8')}"
        if kind != "nf4 in uint8":
            do = "start from the unquantised checkpoint"
            raise ConfigError("`nf4` on weights that bitsandbytes quantised", f"they are {kind}", do)
        there = bool(stored.get("bnb_4bit_use_double_quant"))
        if there != self.double:
            found = f"weights that were quantised {'with' if there else 'without'} it"
            raise ConfigError(f"`nf4:double={self.double}`", found, f"take --with nf4:double={str(there).lower()}")
        del hf["quantization_config"]
        return 1

    def forms(self) -> tuple[Form, Form | None]:
        from optrush.peft.quantized import Form

        return Form(4, self.double), Form(4, floats=True) if self.experts == "mxfp4" else None


@dataclass(frozen=True)
class Int8(StoredInBits):
    """Holds the weights of linears and experts as integers of a byte with a scale a row; dense while they multiply.

    Quantised while they are read, a tensor at a time. Another technique determines what is trained; embedding, norms
    and head stay as they are, and so do the products' inputs.

    Source: Dettmers et al., https://arxiv.org/abs/2208.07339
    Memory: 8 + 32 / D bits a weight of linears and experts; and one dense linear, or all gates and ups of a layer's
        experts, while they multiply.
    Work: a linear's codes read and its dense weight written, once a forward pass and once a backward pass.
    Differs from the source: products run in the type of their inputs, which are not quantised.
    """

    name = "int8"
    summary = "frozen weights of the linears in 8-bit integers, dequantized for each matmul"
    source = "https://arxiv.org/abs/2208.07339"

    def quality(self, env: Environment) -> str:
        return "8-bit base"

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield from ledger.predict_quantized(env, 1 + (4 / env.shape.width if env.shape else 0))

    def forms(self) -> tuple[Form, Form | None]:
        from optrush.peft.quantized import Form

        return Form(8), None
