"""8-bit weights of the linears and experts under what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optrush.peft import ledger
from optrush.planner.ledger import Rule
from optrush.technique import Environment, ModelSpec, Numerics, Part, Technique, Trainer


@dataclass(frozen=True)
class Int8(Technique):
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
    summary = "frozen weights of the linears in 8-bit integers, dense while they multiply"
    source = "https://arxiv.org/abs/2208.07339"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.LINEARS})
    wants = frozenset({Part.TRAINED})
    searched = False  # changes what is computed

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return spec.with_linears(weight="quantized")

    def quality(self, env: Environment) -> str:
        return "8-bit base"

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield from ledger.predict_quantized(env, 1 + (4 / env.shape.width if env.shape else 0))

    def peft(self, trainer: Trainer) -> int:
        ledger.demand_compilers(self.name, trainer.env.device)
        from optrush.peft.quantized import Form, quantize_model

        return quantize_model(trainer.model, trainer.weight_map, Form(8), trainer.precision)
