"""DeepSpeed's ZeRO: states, gradients and weights sharded over the ranks, by DeepSpeed's own engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from optrush.errors import NeedsError
from optrush.planner.ledger import Line, Match, Role, Rule, Tag, WorkItem, add, cut, like, live, tagged
from optrush.planner.optimizer import OptimizerSpec
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, library

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

ELSE = "take fsdp, or leave deepspeed out"
LIKE = "0.19."  # versions whose engine sums a window like ours
MOST_REDUCED = 50_000_000  # most gradients per bucket


class Sizes(NamedTuple):
    """Sizes of the engine's buffers, in values."""

    reduced: int  # gradients reduced together
    prefetched: int  # weights gathered ahead
    whole: int  # weights that are whole at a time
    kept_whole: int  # weights of at most this size are not sharded


@dataclass(frozen=True)
class DeepSpeed(Technique):
    """Shards states (stage 1), gradients too (2), weights too (3); updates with torch's AdamW over flat shards.

    The engine computes the norm, clips, and skips non-finite steps; loss, divisor, learning rate, checkpoints and
    exports are those of any other run. Under `amp` it holds bf16 copies of the weights, gathers these, and reduces
    gradients in float32.
    offload: `states` keeps float32 weights, states and gradients in host memory, where the update runs too; `all` also
    the matmul weights, until they are gathered (stage 3).
    hpz: a second copy of the weights, sharded over groups of that many neighboring ranks, from which the backward pass
    gathers (ZeRO++).

    Source: Rajbhandari et al., https://arxiv.org/abs/1910.02054; offload: https://arxiv.org/abs/2101.06840; hpz:
        https://arxiv.org/abs/2306.10209; the engine is DeepSpeed 0.19's
    Memory: states 8/n bytes per parameter on n ranks, gradients 4 (stage 1) or 4/n; float32 weights 4/n, plus matmul
        weights: 4, under amp 2 (stages 1 and 2), or 1/n of that (stage 3).
    Work: weights gathered once per step (stages 1, 2) or twice per micro-batch (3); gradients reduced once per step (1)
        or micro-batch (2, 3); one host read per step.
    Differs from the source: gradients are summed, not averaged; a loss that is not finite also skips the update; the
        sizes of buckets follow the model's.
    """

    stage: Literal[1, 2, 3] = 3
    offload: Literal["none", "states", "all"] = "none"
    hpz: Annotated[int, Field(ge=1)] = 1

    name = "deepspeed"
    summary = "states, gradients and weights sharded over the ranks by DeepSpeed (ZeRO stage 1, 2 or 3)"
    source = "https://arxiv.org/abs/1910.02054"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.DATA, Part.OPTIMIZER, Part.UPDATE, Part.STATES})
    shards = frozenset({"dp"})
    searched = False  # fsdp does the same with one copy less, except for offloading

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        if env.scarce and env.ranks > 1 and env.device.kind == "cuda":
            yield {"offload": "all"}

    def packages(self) -> tuple[tuple[str, str], ...]:
        return (("deepspeed", "deepspeed"),)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "start it with --ranks 2 or torchrun, or leave deepspeed out"
        yield Requirement(env.gradient_ranks > 1, "`deepspeed` shards states over several ranks", env.alone, do)
        found = "a technique that gives ranks blocks, parts of matrices or parts of rows"
        met = not {Part.TP, Part.CP, Part.PP} & env.claimed
        yield Requirement(met, "`deepspeed` shards one model over all ranks", found, ELSE)
        found, do = "a technique that compiles them as one graph", "leave compile out, or take fsdp"
        met = Part.COMPILED not in env.claimed
        yield Requirement(met, "`deepspeed` gathers weights by hooks inside blocks", found, do)
        found, do = "weights in bfloat16", "take amp, which uses bfloat16 for matmuls, gathers and copies"
        met = Part.WEIGHTS not in env.claimed and env.dtype == "float32"
        yield Requirement(met, "`deepspeed` updates float32 weights", found, do)
        found, do = "amp, for which DeepSpeed uses another optimizer", "take stage: 2, which takes less memory"
        met = self.stage > 1 or Part.PRECISION not in env.claimed
        yield Requirement(met, "`deepspeed: stage: 1` works in float32", found, do)
        found, do = "`batch.micro_tokens: auto`", "give batch.micro_tokens a number"
        met = Part.MICRO_BATCH not in env.claimed
        yield Requirement(met, "`deepspeed` builds its engine once", found, do)
        yield from self._model(env)
        yield from self._options(env)

    def _model(self, env: Environment) -> Iterator[Requirement]:
        """Yield requirements of the model and its implementation."""
        yield env.needs_dense("`deepspeed` gathers the weights of each module when it is called")
        found = "an objective with pairs, a reference or a teacher, which needs several passes"
        met = not (env.paired or env.reference or env.teacher)
        yield Requirement(met, "`deepspeed` runs one forward pass per micro-batch", found, ELSE)
        found, do = "the model runs through transformers", "leave amp out, or take fsdp"
        met = env.native or Part.PRECISION not in env.claimed
        yield Requirement(met, "`deepspeed` under `amp` casts the weights of our own decoder", found, do)
        found, do = "a technique that moves or rounds saved activations", f"take recompute, or {ELSE}"
        met = Part.ACTIVATION_STORAGE not in env.claimed
        yield Requirement(met, "`deepspeed` frees weights that the backward pass reads", found, do)
        found, do = "fused-kernels:mlp=quack, which changes the layout of weights", "take mlp=triton, or leave it out"
        yield Requirement(env.spec.mlp != "quack", "`deepspeed` flattens weights", found, do)

    def _options(self, env: Environment) -> Iterator[Requirement]:
        found, do = f"stage: {self.stage}", "take stage: 3"
        met = self.offload != "all" or self.stage == 3
        yield Requirement(met, "`deepspeed: offload: all` moves sharded weights", found, do)
        met, asked = (
            self.hpz == 1 or self.stage == 3,
            f"`deepspeed: hpz: {self.hpz}` copies sharded weights",
        )
        yield Requirement(met, asked, found, do)
        found, do = f"{env.ranks} rank{'s' * (env.ranks != 1)}", "take a divisor of the ranks, such as GPUs per host"
        yield Requirement(env.ranks % self.hpz == 0, f"`deepspeed: hpz: {self.hpz}` makes equal groups", found, do)

    def sizes(self, env: Environment) -> Sizes:
        """Return the sizes of the engine's buffers, from the shape: about a block at a time, as under fsdp."""
        if env.shape is None:
            return Sizes(MOST_REDUCED, MOST_REDUCED, 10**9, 10_000)
        s = env.shape
        block = max(s.block_matrices // s.layers, 1)
        ends = s.vocab * s.width * (1 if s.tied else 2)
        return Sizes(min(block, MOST_REDUCED), block, 2 * block + ends, 2 * s.width)

    # Predictions.

    def optimizer_spec(self, env: Environment) -> OptimizerSpec:
        resident = None if self.offload == "none" else 0
        return OptimizerSpec("one kernel makes no temporaries", resident=resident, loop=False)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield shards, whole tensors, buffers and communication."""
        n, frozen = env.gradient_ranks, Part.ADAPTERS in env.claimed
        yield cut(tagged("states"), "dp", n, "a rank updates its share")
        if self.stage > 1:
            reason, sharded = "reduced as soon as a block has made them", self.stage == 3
            yield cut(tagged("gradients"), "dp", n, reason, gathered=1, during=("backward",) if sharded else ())
            if sharded:
                yield live(tagged("gradients"), "in one flat buffer that stays", live="always")
        yield live(tagged("casts"), "matmuls read the gathered weights, without copies", gone=True)
        if not frozen:
            yield cut(tagged("weights"), "dp", n, "a rank updates its share of the float32 weights")
            parts: list[Tag] = ["blocks", "embedding"]
            parts += [] if env.shape is None or env.shape.tied else ["head"]
            reason = "matmul weights, in addition to the float32 weights"
            for part in parts:
                blocks = env.blocks if part == "blocks" else 1
                line = Line(f"copies.{part}", reason, 1.0, "product", "always", blocks=blocks, of=("copies", part))
                yield like(f"weights.{part}", line)
        if self.stage == 3:
            yield from self._gathered(env, "weights" if frozen else "copies")
        yield from super().predict(env)
        yield live(tagged("update"), "a rank updates its share", times=1 / n)
        sizes = self.sizes(env)
        reason = f"a bucket of {sizes.reduced:,} gradients, in float32"
        yield add(Line("buckets.reduce", reason, sizes.reduced, "wide", "always"))
        if self.hpz > 1:
            reason = f"the second copy of the weights, sharded over {self.hpz} ranks"
            yield like(tagged("weights"), Line("secondary", reason, 1 / self.hpz, "product", "always"))
        if self.offload != "none":
            yield from self._offloaded(not frozen)
        yield from self._links(env, n)

    def _gathered(self, env: Environment, kind: Literal["weights", "copies"]) -> Iterator[Rule]:
        """Yield the shards of stage 3, and the weights that are whole while in use."""
        n, tied = env.gradient_ranks, env.shape is None or env.shape.tied
        ends, running = "embedding and head are whole while they are used", "a block's weights are whole while it runs"
        reason, phases = f"{running}, and the next block's ahead of it", ("forward", "backward")
        yield cut(f"{kind}.blocks", "dp", n, reason, gathered=min(env.blocks, 2), during=phases)
        if kind == "weights" or not tied:
            yield cut(tagged(kind, no=("blocks", "embedding")), "dp", n, ends, gathered=1)
        during = () if tied else ("forward", "backward, embedding")
        yield cut(f"{kind}.embedding", "dp", n, ends, gathered=1, during=during)
        # Weights gathered together share one buffer, which is freed after the last of them is used.
        reason = "gather buffers of embedding and head, shared with weights not used yet"
        arriving = Line("head.arriving", reason, 1.0, "product", "head", of=("loss",))
        yield like(tagged("weights", no=("blocks",)), arriving)

    def _offloaded(self, copied: bool) -> Iterator[Rule]:
        """Yield the lines in host memory."""
        if self.stage == 3:
            yield live(tagged("gradients"), "on the host, once a block has made them", blocks_on_device=0)
        if copied:
            yield live(tagged("weights"), "the float32 weights: on the host", blocks_on_device=0)
        if self.offload == "all":
            kind: Tag = "copies" if copied else "weights"
            yield live(tagged(kind), "on the host until they are gathered", blocks_on_device=0)

    def _links(self, env: Environment, n: int) -> Iterator[Rule]:
        """Yield the communication between ranks."""
        share, (hosts, entering) = (n - 1) / n, env.over_hosts("dp")
        quantized = any(linear.weight == "quantized" for linear in env.spec.linears.values())
        stored: Role = "stored" if quantized else "product"
        reason, times = ("weights gathered twice", 2) if self.stage == 3 else ("updated weights gathered", 1)
        gathers: Literal["micro", "step"] = "micro" if self.stage == 3 else "step"
        reduces: Literal["micro", "step"] = "step" if self.stage == 1 else "micro"
        parts: list[tuple[Match | str, str, Role]] = [
            ("weights.blocks", "gather.blocks", stored), (tagged("weights", no=("blocks",)), "gather.ends", "product"),
        ]  # fmt: skip
        for match, name, role in parts if self.stage == 3 or Part.ADAPTERS not in env.claimed else ():
            steps = times * (hosts - 1) * (env.blocks if name == "gather.blocks" else 2)
            work = WorkItem(name, reason, gathers, unit="link", values=times * share, role=role, of=("gather",))
            yield like(match, replace(work, entering=times * entering, steps=steps))
        work = WorkItem("reduce", "gradients reduced", reduces, unit="link", values=share, role="wide", of=("reduce",))
        yield like(tagged("gradients"), replace(work, entering=entering, steps=(hosts - 1) * env.blocks))

    # Stages.

    def process(self, env: Environment) -> int:
        if env.device.kind == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        return 0

    def shard(self, trainer: Trainer) -> int:
        import torch

        version = library("deepspeed") or ""
        if not version.startswith(LIKE):
            do = "python -m pip install 'optrush[deepspeed]'"
            raise NeedsError(f"`deepspeed` runs DeepSpeed {LIKE}x", f"version {version}", do)
        if trainer.precision == torch.float16:
            asked, do = "`deepspeed` detects non-finite updates itself", "take amp:dtype=bf16, or fsdp"
            raise NeedsError(asked, "amp:dtype=fp16, whose loss scale would change twice", do)
        import deepspeed

        from optrush.trainer import zero

        zero.quiet()
        if trainer.world.device.type == "cpu":  # use gloo: compiling other collectives takes minutes
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        half = trainer.precision if trainer.autocast else None
        if half is not None:
            trainer.autocast = False
            trainer.model.embedding.register_forward_hook(lambda module, inputs, out: out.to(half))
        if half is not None or self.stage == 3:
            config = self.engine_config(trainer) if self.stage == 3 else None
            trainer.storage = zero.ModuleByModule(config, half)
        return sum(1 for _ in trainer.model.parameters())

    def optimizer(self, trainer: Trainer) -> int:
        from optrush.trainer.zero import Engine

        trainer.notes.append("deepspeed: its engine updates (torch's AdamW over flat shards), clips and skips")
        Engine(trainer, self.engine_config(trainer)).train(self.offload != "none")
        return len(trainer.trained)

    def wrap_step(self, trainer: Trainer) -> int:
        if trainer.optimizer is not None or self.stage < 3:
            return 0
        from optrush.trainer.zero import Engine

        Engine(trainer, self.engine_config(trainer)).evaluate()
        return 1

    def wrap_window(self, trainer: Trainer) -> int:
        from optrush.trainer.zero import Engine

        if trainer.optimizer is not None and not isinstance(trainer.optimizer, Engine):
            found, do = "lora:lr_ratio, which scales it for some parameters", "leave lr_ratio out, or take fsdp"
            raise NeedsError("`deepspeed` updates with one learning rate", found, do)
        return 0

    def engine_config(self, trainer: Trainer) -> dict[str, Any]:
        """Return DeepSpeed's configuration of this run."""
        env, sizes = trainer.env, self.sizes(trainer.env)
        cuda = trainer.world.device.type == "cuda"
        zero: dict[str, Any] = {
            "stage": self.stage, "contiguous_gradients": self.stage > 1, "reduce_bucket_size": sizes.reduced,
            "overlap_comm": cuda and self.stage == 3,
        }  # fmt: skip
        if self.stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": sizes.prefetched, "stage3_max_live_parameters": sizes.whole,
                "stage3_max_reuse_distance": sizes.prefetched, "zero_hpz_partition_size": self.hpz,
                "stage3_param_persistence_threshold": sizes.kept_whole,
            }  # fmt: skip
        host = {"device": "cpu", "pin_memory": cuda}
        if self.offload != "none":
            zero["offload_optimizer"] = host
        if self.offload == "all":
            zero["offload_param"] = host
        return {
            "train_micro_batch_size_per_gpu": env.micro_rows, "gradient_accumulation_steps": env.accumulation,
            "gradient_clipping": env.clip or 0.0, "zero_optimization": zero,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,  # it would compile its own
            "bf16": {"enabled": True, "check_grad_overflow": True} if trainer.precision is not None else {},
            "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
            "steps_per_print": 1 << 40, "wall_clock_breakdown": False,
        }  # fmt: skip
