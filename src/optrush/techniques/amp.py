"""Mixed precision: float32 weights, matmuls in bf16 or fp16; fp16 with a loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from optrush.planner.ledger import Rule, live, retype
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from torch import Tensor


FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # good updates before the scale doubles


@dataclass(frozen=True)
class Amp(Technique):
    """Casts to the lower precision in matmuls, by autocast; under sharding the gathered weights are cast.

    fp16's gradients underflow, so the loss is multiplied by a scale that halves when an update overflows and doubles
    after 2000 good ones; the update unscales. bf16 has float32's range and needs no scale.

    stream: dtype of the residual stream between blocks: float32, as under autocast, or the matmul dtype from the
        embedding on, as in a model whose weights are cast as a whole.

    Source: Micikevicius et al., https://arxiv.org/abs/1710.03740
    Memory: activations at 2 bytes instead of 4; a cast copy of each weight in use (autocast keeps them for the
        backward pass: 2 bytes per parameter); weights, gradients and states keep 16 bytes per parameter.
    Work: matmuls at the bf16/fp16 rate; one cast of each weight per micro-batch.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    stream: Literal["float32", "half"] = "float32"

    name = "amp"
    summary = "mixed precision: float32 weights, matmuls in bf16, or in fp16 with loss scaling"
    source = "https://arxiv.org/abs/1710.03740"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.PRECISION})

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, narrow_stream=self.stream == "half")

    def needs(self, env: Environment) -> Iterator[Requirement]:
        asked, do = "`amp` keeps float32 weights", "leave `model.dtype` out, or `amp`"
        yield Requirement(env.dtype == "float32", asked, f"`model.dtype: {env.dtype}`", do)
        asked = "`amp:stream=half` needs the native implementation"
        found = "the model runs through transformers, whose blocks may have other inputs than the embedding"
        yield Requirement(self.stream == "float32" or env.native, asked, found, "leave stream out")
        if self.dtype == "bf16":
            asked = "`amp` in bf16 needs a device with bf16 matmuls"
            yield env.needs_capability((8, 0), asked, "take --with amp:dtype=fp16")

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield retype({"product": 2, "cast": 2, "narrowing": 2}, "matmuls and their saved inputs take 2 bytes per value")
        yield live("tied.sum", "the cast gradient is added in place", gone=True)
        if self.stream == "half" or "dp" in env.sharded:  # sharding casts the inputs of blocks
            yield retype({"residual": 2, "widening": 2}, "the residual stream too; norms compute in float32")
            yield live("saved.middle.wide", "the residual stream has the type of the matmuls", gone=True)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        bf16 = env.device.kind == "cpu" or env.device.capability >= (8, 0)
        yield {} if bf16 else {"dtype": "fp16"}
        if bf16 and env.native and Part.ADAPTERS in env.claimed:  # a frozen model's stream has the dtype of its weights
            yield {"stream": "half"}

    def model(self, trainer: Trainer) -> int:
        import torch

        trainer.precision = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        trainer.autocast = True  # the owner of the data axis may cast instead
        if self.stream == "half":
            half = trainer.precision
            trainer.model.embedding.register_forward_hook(lambda module, inputs, out: out.to(half))
        return 1

    def wrap_step(self, trainer: Trainer) -> int:
        import torch

        changed = 0
        if trainer.autocast:
            inner = trainer.loss

            def loss(batch: Any) -> Tensor:
                with torch.autocast(trainer.world.device.type, trainer.precision):
                    return inner(batch)

            trainer.loss = loss
            changed += 1
        if self.dtype == "fp16":
            scaler = LossScale(trainer)
            trainer.state["amp"] = scaler
            trainer.optimizer_step = scaler.around(trainer.optimizer_step)
            trainer.max_skipped_updates += int(FIRST_SCALE).bit_length()  # halving down to 1 is not a failure
            changed += 1
        return changed


class LossScale:
    """The scale and its count of good updates, both on the device: adapting it needs no host read."""

    def __init__(self, trainer: Trainer) -> None:
        import torch

        self.trainer = trainer
        self.good = torch.zeros((), device=trainer.world.device)
        trainer.scale.fill_(FIRST_SCALE)

    def around(self, update: Any) -> Any:
        import torch

        def scaled() -> tuple[Tensor, Tensor]:
            norm, skipped = update()
            scale = self.trainer.scale
            self.good.copy_(torch.where(skipped, 0.0, self.good + 1))
            grown = self.good >= GROWTH_INTERVAL
            factor = torch.where(skipped, 0.5, torch.where(grown, 2.0, 1.0))
            scale.copy_((scale * factor).clamp(1.0, 2.0**24))
            self.good.mul_(~grown)
            return norm, skipped

        return scaled

    def save(self) -> dict[str, Any]:
        return {"scale": self.trainer.scale.item(), "good": self.good.item()}

    def load(self, saved: dict[str, Any]) -> None:
        self.trainer.scale.fill_(saved["scale"])
        self.good.fill_(saved["good"])
