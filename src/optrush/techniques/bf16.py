"""Weights, gradients and optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from optrush.errors import NoEffectError
from optrush.planner.ledger import Line, Role, Rule, WorkItem, add, like, retype, tagged
from optrush.planner.optimizer import OptimizerSpec
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer


@dataclass(frozen=True)
class Bf16(Technique):
    """Everything in bfloat16, with no float32 copy of the weights.

    rounding: how updated weights are rounded. `stochastic`: to one of the two neighbors in bfloat16, with the
        probability that keeps the expected value. Both moments are rounded in the same way: to nearest, one with beta2
        = 0.999 would never shrink. The random bits are a function of seed, name, update count and index in the whole
        parameter: the same on every rank, device and run. `nearest`: a weight moves only when its update exceeds about
        1/256 of it; at small learning rates most weights then never move. `kahan`: a weight is the sum of two bfloat16,
        the one used by the model and its rounding error.

    Source: Kalamkar et al., https://arxiv.org/abs/1905.12322; rounding: Zamirai et al.,
        https://arxiv.org/abs/2010.06192
    Memory: 8 bytes per parameter (2 weight, 2 gradient, 4 states) instead of 16; kahan: 10.
    Work: matmuls at the bf16 rate; half the bytes in every elementwise operator and in the optimizer. stochastic:
        three 32-bit hashes per weight, in the update kernel. kahan: 4 more bytes per parameter in the update.
    Differs from the source: Kalamkar et al. keep a float32 copy of the weights; with kahan, the rounding error (itself
        rounded) and both moments are rounded stochastically, so that no update is too small to count.
    """

    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"

    name = "bf16"
    summary = "weights, gradients and states in bf16; stochastic, nearest or Kahan rounding of the weights"
    source = "https://arxiv.org/abs/1905.12322"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.PRECISION, Part.WEIGHTS})

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, rounding=self.rounding)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        asked, found = "`bf16` converts float32 weights to bf16", f"`model.dtype: {env.dtype}`"
        yield Requirement(env.dtype == "float32", asked, found, "leave one of the two out")
        yield env.needs_capability((8, 0), "`bf16` needs a device with bf16 matmuls", "take --with amp:dtype=fp16")

    def quality(self, env: Environment) -> str:
        if Part.ADAPTERS in env.claimed:  # adapters are float32
            return ""
        return "bf16 weights" + " rounded to the nearest, which loses small updates" * (self.rounding == "nearest")

    def optimizer_spec(self, env: Environment) -> OptimizerSpec | None:
        if self.rounding == "nearest":
            return None
        # 100 ns per weight on one core, torch 2.13; expressed as values moved at the assumed rate of a CPU.
        reason = "random bits and roundings, one operator at a time"
        rounding = {"*": WorkItem("update.rounding", reason, "step", values=400, role="wide")}
        work = rounding if env.device.kind == "cpu" else {}
        return OptimizerSpec("float32 inside, and no temporaries of whole parameters", loop=False, work=work)

    def predict(self, env: Environment) -> Iterator[Rule]:
        yield from super().predict(env)
        everything: dict[Role, float] = {"weight": 2, "gradient": 2, "state": 2, "product": 2, "residual": 2}
        yield retype(everything, "8 bytes a parameter, and 2 bytes a saved value")
        yield retype({"narrowing": 2, "widening": 2, "plain": 2.5}, "norms and softmax still run in float32")
        if self.rounding != "nearest" and env.device.kind != "cpu" and Part.OPTIMIZER not in env.claimed:
            launches = 3.0 * (env.blocks * 9 + 2)
            reason = "a kernel for each parameter"
            yield add(WorkItem("update.launches", reason, "step", launches=launches, of=("update", "launches")))
        if self.rounding == "kahan":
            reason = "the rounding error of each weight"
            yield like(tagged("weights"), Line("states.compensation", reason, 1.0, "weight", "always", of=("states",)))
            reason = "the same read and written"
            work = WorkItem("update.compensation", reason, "step", values=2.0, role="weight", of=("update",))
            yield like(tagged("weights"), work)

    def model(self, trainer: Trainer) -> int:
        import torch

        from optrush.models.layers import uncast

        if self.rounding != "nearest":
            self.demand_triton(trainer.env.device)
        wide = [(p, p.dtype) for p in uncast(trainer.model)]
        trainer.model.to(torch.bfloat16)  # still on meta; buffers are restored in their own dtype
        for p, dtype in wide:
            p.data = p.data.to(dtype)
        return sum(1 for _ in trainer.model.parameters())

    def optimizer(self, trainer: Trainer) -> int:
        import torch

        if self.rounding == "kahan" and all(t.local.dtype != torch.bfloat16 for t in trainer.trained):
            found = "every bfloat16 weight is frozen, and the trained ones are float32"
            raise NoEffectError("`bf16:rounding=kahan`", found, "leave rounding out: --with bf16")
        return 0
