"""AdamW for all parameters in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from optrush.planner.optimizer import OptimizerSpec
from optrush.technique import Environment, Numerics, Part, Technique, Trainer, compilers


@dataclass(frozen=True)
class FusedAdamW(Technique):
    """One kernel over all parameters that unscales, clips, skips and steps; the baseline loops over them.

    On a GPU it is our own Triton kernel, which rounds bfloat16 weights with the run's rounding. On a CPU, and for
    float32 weights on a machine that cannot build ours, it is torch's.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html (fused=True)
    Memory: unchanged, 8 bytes per parameter in float32; the loop's temporaries are gone.
    Work: reads weight, gradient and states once and writes them once, instead of once per operator.
    """

    name = "fused-adamw"
    summary = "AdamW for all parameters in one kernel, without a host synchronization"
    source = "https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.OPTIMIZER})

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        return OptimizerSpec("one kernel makes no temporaries", loop=False)

    def optimizer(self, trainer: Trainer) -> int:
        import torch

        from optrush.optim.adamw import AdamW

        if any(t.local.dtype == torch.bfloat16 for t in trainer.trained):
            self.demand_triton(trainer.env.device)
        cuda = trainer.world.device.type == "cuda"
        lacking = [need for need in compilers(trainer.env.device) if not need.met]
        if cuda and lacking:
            trainer.notes.append(f"fused-adamw: uses torch's kernel; ours cannot be built here: {lacking[0].found}")
        return self.set_optimizer(trainer, AdamW, fused=True, launch=cuda and not lacking)
