"""Kernels that fuse the elementwise operators of a block: the gated activation, the norms, the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from optrush.errors import NeedsError
from optrush.hardware import tiles
from optrush.peft.ledger import demand_compilers
from optrush.planner.ledger import OURS, WAYS, Line, Rule, WorkItem, add, launched, like, live, tagged
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from optrush.models.experts import Experts
    from optrush.models.shapes import ModelShape

# Shares of the extra traffic of a block's elementwise operators over one kernel's (75 D, planner/baseline.py): two
# norms in float32 with the additions, the rotation of queries and keys, silu and its product. 0 on a CPU, where torch's
# own operators run.
NORM, ROPE, GATE = 0.4, 0.15, 0.1


@dataclass(frozen=True)
class FusedKernels(Technique):
    """Computes silu(gate) * up, the norms and the rotary embedding of each block in one kernel each way.

    mlp: `triton`, a kernel between the matmuls. Backward it reads gate, up and the incoming gradient, and writes the
        gradients of both and the activation for the weight gradient of the down projection: so it is not saved.
        `quack`, the same in the epilogues of the matmuls before and after, with the package quack-kernels; bf16 on
        Hopper. Low-rank adapters of frozen linears are extra columns of these matmuls, and the sum is rounded once;
        only the gradient of the input of gate and up is rounded before the addition. Expert matmuls are QuACK's grouped
        matmuls. If experts are plain matrices, whole on each rank, and the model has no adapters, their activations are
        in epilogues, and token rows are not copied. `none` leaves the activation unchanged.
    norm: both norms of a block, the second with the addition before it.
    rope: splits queries, keys and values, and rotates queries and keys. Models that normalize their queries and keys
        between the two (qwen3) are rejected.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: mlp: B*T*F values less per block, of 2 (bf16) or 4 bytes (quack, plain experts: B*T*k (D + 2 F)); as many
        more in the backward pass of one block, and again as many with triton, which reads the gradient of the
        activation. With adapters on dense weights that are not sharded, r rows of A per weight, padded to a multiple
        of 64: 2 F r more values of gate_up per block, (rows + r) (width + r) - rows * width of each other linear.
        norm: not compiled, 2 D float32 values less per token and block; compiled, D in the residual stream's dtype
        instead of the matmul dtype. rope: unchanged.
    Work: unchanged FLOPs. mlp: triton reads and writes 3 F values per token and block forward, 6 F backward, quack F
        and 5 F. With adapters quack saves 2 values per token and row of a linear; inputs and gradients without padding
        (`norm`, `rope` and `attention:impl=fa4` pad) are copied, 2 D per token at least; sharded dense weights of
        gate_up and down too, 6 D F per micro-batch. norm: 4 D values per token forward with the addition, 2 D without,
        4 D backward. rope: 2 (H + 2 K) E values per token and block each way.
    Differs from the source: gate and up are pairs in one matrix, and the down projection belongs to the operator; the
        residual stream goes through the norm; the rotation reads and writes all heads at once, values too.
    """

    mlp: Literal["triton", "quack", "none"] = "triton"
    norm: bool = False
    rope: bool = False

    name = "fused-kernels"
    summary = "gated activation in one kernel, recomputed in backward; optionally norms and rotation"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return replace(
            spec,
            mlp="torch" if self.mlp == "none" else self.mlp,
            adds_unrounded=self.mlp == "quack",
            norm="fused" if self.norm else "torch",
            rope="fused" if self.rope else "torch",
        )

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "the model runs through transformers, whose blocks cannot take this kernel"
        yield Requirement(env.native, "`fused-kernels` needs the native implementation", found, "leave it out")
        do = "take mlp=triton, norm=true or rope=true, or leave it out"
        chosen = self.mlp != "none" or self.norm or self.rope
        yield Requirement(chosen, "`fused-kernels:mlp=none`", "no norm and no rope: nothing is left to fuse", do)
        if self.mlp != "none":
            clamped = env.shape is not None and env.shape.experts is not None and env.shape.experts.clamp is not None
            asked = f"`fused-kernels:mlp={self.mlp}` computes silu(gate) * up"
            yield Requirement(not clamped, asked, "a clamped activation in the model's experts", "take mlp=none")
            gelu = env.shape is not None and env.shape.gelu
            yield Requirement(not gelu, asked, "a model with gelu instead of silu", "leave `fused-kernels` out")
        order = None if env.shape is None else env.shape.other_order
        if self.norm or self.mlp == "quack":
            which, do = ("norm=true", "take norm=false") if self.norm else ("mlp=quack", "take mlp=triton")
            asked = f"`fused-kernels:{which}` adds to the stream within its kernel"
            yield Requirement(order is None, asked, f"a model with {order}", do)
        if self.norm:
            centred, kind = (env.shape.centred, env.shape.norm) if env.shape is not None else (False, "rms")
            asked = "`fused-kernels:norm=true` multiplies by the norms' weights"
            yield Requirement(not centred, asked, "a model whose norms multiply by 1 + weight", "take norm=false")
            asked = "`fused-kernels:norm=true` divides by the root of the mean square"
            yield Requirement(kind == "rms", asked, "a model with layer norms", "take norm=false")
        if self.rope:
            normed = env.shape is not None and env.shape.qk_norm
            asked = "`fused-kernels:rope=true` rotates the matmul's queries and keys"
            yield Requirement(not normed, asked, "the model normalizes each of them first", "take rope=false")
            part = env.shape is not None and env.shape.rotated is not None
            yield Requirement(not part, asked, "the model rotates only part of each head", "take rope=false")
            latent = env.shape is not None and env.shape.latent is not None
            found = "the model computes them by several matmuls, through latents"
            yield Requirement(not latent, asked, found, "take rope=false")
            pairs = env.shape is not None and env.shape.pairs
            yield Requirement(not pairs, asked, "the model rotates neighbouring pairs", "take rope=false")
            unrotated = env.shape is not None and bool(env.shape.unrotated)
            yield Requirement(not unrotated, asked, "some layers have no rotation", "take rope=false")
        if self.mlp == "quack":
            asked, do = "fused-kernels:mlp=quack", "take mlp=triton"
            yield env.needs_dense(f"`{asked}`", or_experts=True)
            yield env.needs_gpu(asked, (9, 0))
            yield Requirement(env.device.capability == (9, 0), f"`{asked}` needs Hopper", env.device.name, do)
            yield env.needs_half(f"`{asked}` needs matmuls in bf16 or fp16", do)
            linears = env.spec.linears["gate_up"], env.spec.linears["down"]
            low_rank = all(linear.matmul == "torch" and linear.adapter != "other" for linear in linears)
            found = "linears other than matrices with low-rank adapters (8-bit matmuls, IA3, DoRA, dropout)"
            yield Requirement(low_rank, f"`{asked}` computes the matmuls", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield each kernel's memory, traffic and host time."""
        done = 0.0 if env.device.kind == "cpu" else NORM * self.norm + ROPE * self.rope + GATE * (self.mlp != "none")
        yield live(tagged("elementwise", "fusable"), "by fused kernels", times=1 - done)
        kernels = (self.mlp != "none") + 2 * self.norm + self.rope
        for way in WAYS if kernels and Part.COMPILED in env.claimed else ():
            yield add(launched(way, "kernels.launches", f"{kernels} kernels per block", OURS * kernels * env.blocks))
        if self.norm:
            reason = "inside the kernel, recomputed in the backward pass"
            yield live("saved.widened", reason, gone=True)
            yield live("saved.normalised", reason, gone=True)
            yield live("saved.middle", "the sum is saved, in the residual stream's dtype", role="residual")
            yield live("saved.middle.wide", "in the sum", gone=True)
        if self.mlp != "none":
            yield from self._activation(env)
        if self.mlp == "quack" and env.shape is not None:
            if env.shape.experts is None or _in_products(env, env.shape):
                yield from _hidden(env.shape)
            if Part.ADAPTERS in env.claimed:
                yield from _adapters(env, env.shape)

    def _activation(self, env: Environment) -> Iterator[Rule]:
        """Yield the rules of the activation between gate, up and `down`: what is not saved, and what is added."""
        reason = "recomputed from gate and up in the backward pass"
        frozen = Part.ADAPTERS in env.claimed  # an adapter of `down` may need its input
        routed = env.shape is not None and env.shape.experts is not None  # their weights multiply the activation
        quack = self.mlp == "quack"
        if quack and routed and env.shape is not None and _in_products(env, env.shape):
            routed = False  # their weights multiply the output of `down`
            yield from _uncopied()
        kernel = not quack or routed
        called = bool({Part.LINEARS, Part.TP} & env.claimed) or _rerun(env)  # the last linear, which saves its input
        recomputed = quack and not routed if frozen or routed else not called
        adapted = {name for name, linear in env.spec.linears.items() if linear.adapter_rows}
        if recomputed:
            yield live("saved.product", reason, gone=True)
        if not routed and (recomputed or (frozen and adapted and "down" not in adapted)):  # then it is not saved
            yield like("saved.product", _in_feed("product", reason, env))
        yield live("saved.gated", reason, gone=True)
        if kernel:
            reason = "the gradient of the activation, which the kernel reads, F"
            yield like("saved.product", _in_feed("activation", reason, env))

    def packages(self) -> tuple[tuple[str, str], ...]:
        return (("quack-kernels", "kernels"),) if self.mlp == "quack" else ()

    def compile_s(self, env: Environment) -> float:
        return 7.0 if self.mlp == "quack" else 0.0  # one kernel per form of matmul (H200)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        """Yield no `norm` and `rope` (under 1 %), except with adapters, where they provide the padding.

        Nor `quack` for experts if it would replace only their matmuls (no measured gain).
        """
        if env.device.kind == "cpu" or (env.shape is not None and env.shape.gelu):
            return  # only for checks there: no gain was measured
        yield {}
        routed = env.shape is not None and env.shape.experts is not None
        if routed and env.shape is not None and not _in_products(env, env.shape):
            return
        if env.device.capability == (9, 0) and (env.shape is None or env.shape.other_order is None):
            yield {"mlp": "quack"}
            if Part.ADAPTERS in env.claimed and (s := env.shape) is not None and not s.centred and s.norm == "rms":
                rope = not (s.qk_norm or s.rotated or s.latent or s.pairs or s.unrotated)  # `needs` rejects these
                yield {"mlp": "quack", "norm": True, **({"rope": True} if rope else {})}

    def recompute(self, trainer: Trainer) -> int:  # the linears are settled here, and nothing is compiled yet
        from optrush.kernels import rms_norm, rope, swiglu

        blocks: list[Any] = list(trainer.model.blocks.values())
        if self.norm or self.rope:
            self.demand_triton(trainer.env.device)
        for block in blocks:
            if self.norm:
                block.norm1.impl = block.norm2.impl = rms_norm.fused_add_rms_norm
            if self.rope:
                block.split_and_rope = rope.fused_split_and_rotate
        if self.mlp == "quack":
            _set_quack([block for block in blocks if hasattr(block, "gate_up")])
            if experts := [block.experts for block in blocks if block.experts is not None]:
                demand_compilers(self.name, trainer.env.device)
                if sum(not _set_experts(each) for each in experts):
                    cause = "experts have adapters or quantized weights, share ranks, or weight their inputs"
                    trainer.notes.append(f"fused-kernels: {cause}, so QuACK computes only their matmuls")
        elif self.mlp == "triton":
            demand_compilers(self.name, trainer.env.device)
            dense = [block for block in blocks if block.experts is None]
            for block in blocks:
                if block.experts is not None:
                    block.experts.activation = swiglu.fused_activation
            matrices = [_plain(block.down) and not _rerun(trainer.env) for block in dense]
            for block, matrix in zip(dense, matrices, strict=True):
                block.mlp = swiglu.mlp_fused_down if matrix else swiglu.mlp_fused_activation
            if not all(matrices):
                trainer.notes.append("fused-kernels: `down` is not a plain matrix or runs again, so its input is saved")
        return len(blocks) * ((self.mlp != "none") + 2 * self.norm + self.rope)

    def wrap_step(self, trainer: Trainer) -> int:  # weights have bytes now
        """Pad unsharded frozen weights, and the inputs of matmuls, for the adapters' matrices."""
        if self.mlp != "quack":
            return 0
        import torch

        from optrush.peft.lora import make_room

        sharded = bool(trainer.env.sharded)
        if Part.ADAPTERS in trainer.env.claimed:
            self.demand_triton(trainer.env.device, "fused-kernels:mlp=quack")  # its kernel makes the copies
        blocks = cast("Iterable[Any]", trainer.model.blocks.values())
        padded = sum(make_room(block, whole=not sharded) for block in blocks)
        if padded and trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of the unpadded weights is too small for padded ones
        return padded


def _plain(linear: object) -> bool:
    import torch.nn.functional as F

    from optrush.models.decoder import Linear

    return type(linear) is Linear and linear.matmul is F.linear and linear.bias is None


def _set_quack(blocks: Sequence[Any]) -> None:
    """Put QuACK's matmuls into every block, or raise NeedsError for unsupported linears."""
    from optrush.kernels import swiglu_quack
    from optrush.peft import lora

    linears = [linear for block in blocks for linear in (block.gate_up, block.down)]
    if all(lora.fits(linear) for linear in linears):
        feed: Callable[..., Any] = lora.feed
    elif all(_plain(linear) for linear in linears):
        feed = swiglu_quack.quack_mlp
    else:
        found = "linears other than matrices with low-rank adapters (a bias, DoRA, dropout, other matmuls)"
        raise NeedsError("`fused-kernels:mlp=quack`", found, "take mlp=triton")
    for block in blocks:
        block.mlp = feed


def _set_experts(experts: Experts) -> bool:
    """Put QuACK's matmuls into a layer of experts; return whether they fuse activations and index rows."""
    from optrush.kernels import experts_quack, swiglu
    from optrush.models.experts import gate_pairs, multiply_here

    experts.grouped = experts_quack.grouped_quack
    plain = experts.adapter is None and experts.quantized is None and experts.gate_up_bias is None
    here = experts.dispatch is multiply_here and not experts.shape.scaled_input
    if plain and here and experts.activation is gate_pairs:
        experts.feed = experts_quack.feed_quack
        return True
    experts.activation = swiglu.fused_activation
    return False


def _in_products(env: Environment, shape: ModelShape) -> bool:
    """Return whether experts are plain matrices, whole on each rank, like `_set_experts`, but without any adapters.

    The description of the blocks does not tell whether adapters are on experts.
    """
    e = shape.experts
    plain = e is not None and not (e.biases or e.clamp or e.scaled_input)
    return plain and not env.claimed & {Part.ADAPTERS, Part.LINEARS, Part.EP}


def _in_feed(name: str, reason: str, env: Environment) -> Line:
    return Line(f"feed.{name}", reason, 1.0 / env.blocks, "product", "backward", True, side="feed", of=("mlp",))


def _uncopied() -> Iterator[Rule]:
    """Yield the saved copies: matmuls index the tokens of experts' rows, and the gradients of their sums.

    The rate of matmuls stays torch's; with it the predicted step is 0.5 % off (one H200: h200-cells-kinds).
    """
    reason = "matmuls read tokens by index, without copies"
    yield live("saved.routed", reason, gone=True)
    yield live("saved.weighed", "weights multiply the output of the down projection", gone=True)
    for way in ("forward", "backward"):
        yield live(f"{way}.rows", f"{reason}: sums alone", times=0.5)


def _hidden(s: ModelShape) -> Iterator[Rule]:
    """Yield the epilogues' traffic that matmuls do not hide: F and 3 F, of 3 F and 6 F (docs/log)."""
    D, F, heads = s.width, s.active_width, 2 * (s.heads + s.kv_heads) * s.head_width
    reason = "of share of the activation's traffic that the matmuls do not hide"
    yield live("forward.elementwise", reason, times=(D + heads + F) / (D + heads + 3 * F))
    yield live("backward.elementwise", reason, times=(D + heads + 3 * F) / (D + heads + 6 * F))


# By linear, the operators that write its input and its output's gradient, and so can pad them. The matmul before `down`
# writes its input with padding, and likewise the gradient of gate_up.
INPUTS = {"qkv": "norm", "o": "attention", "gate_up": "norm"}
GRADIENTS = {"qkv": "rope", "o": "norm", "down": "none"}


def _adapters(env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """Yield the cost of storing adapters next to their weights; kernels that pad their output save a copy."""
    spec, L, room = env.spec, env.blocks, 0
    padding = {"norm": spec.norm == "fused", "attention": spec.attention == "fa4", "rope": spec.rope == "fused"}
    quantized = spec.linears["down"].weight != "dense"
    bare = bool(env.sharded) and not quantized  # no weight is padded
    for name, linear in shape.linears.items():
        many, rows, width = tiles(spec.linears[linear.module].adapter_rows), linear.outputs, linear.inputs
        if not many or (linear.bias and name in ("qkv", "o")) or (bare and linear.module not in ("gate_up", "down")):
            continue
        if name == "gate_up" or not bare:
            yield live(f"forward.added.{name}", "in the matmul itself", gone=True)
        for way, writers in zip(WAYS, (INPUTS, GRADIENTS), strict=True):
            if name in writers and (bare or not padding.get(writers[name], False)):
                n, what = (width, "input") if way == "forward" else (rows, "gradient")
                msg = f"{name}'s {what}, and A x or its gradient"
                yield add(WorkItem(f"{way}.beside.{name}", msg, "token", values=2.0 * L * n, role="product", of=(way,)))
            if bare and way == ("forward" if name == "gate_up" else "backward"):
                msg, weight = f"{name}'s weight next to its adapter's", rows * width
                values, of = 2.0 * L * weight, (way,)
                moved = WorkItem(f"{way}.beside.weights", msg, "micro", values=values, role="product", of=of)
                yield add(Line(f"working.beside.{way}", msg, weight, "product", way), moved)
        room += (rows + many * (name != "gate_up")) * (width + many) - rows * width
    if not (bare or quantized):
        msg = "padding of weights for the matrices of their adapters, in whole tiles"
        yield add(Line("weights.room", msg, L * room, "product", "always", blocks=L, of=("weights", "adapters")))


def _rerun(env: Environment) -> bool:
    """Return whether blocks are recomputed by operator, up to the last tensor needed, the input of `down`."""
    return Part.ACTIVATION_CHECKPOINTING in env.claimed and Part.COMPILED not in env.claimed
