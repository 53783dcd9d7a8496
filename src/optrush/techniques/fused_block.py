"""The gated activation in one kernel, and made again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from optrush.errors import NeedsError
from optrush.peft.ledger import sizes, tiles
from optrush.planner.ledger import Line, Rule, Work, add, like, live
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, compilers, demand, demand_triton, gpu

if TYPE_CHECKING:
    from optrush.kernels.swiglu import Mlp
    from optrush.models.shapes import ModelShape
    from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class FusedBlock(Technique):
    """Makes silu(gate) * up in one kernel each way, and again in the backward pass instead of keeping it.

    triton: a kernel between the products. Backward it reads gate, up and the incoming gradient, and writes gradients
        of both and the activation itself, which the down product's weight gradient wants: so it was not kept.
    quack: the same in the epilogues of the products before and after, by the package quack-kernels; bf16 on Hopper.
        Low-rank adapters of frozen linears, dense or stored in fewer bits, are further columns of these products and of
        those before them, and the sum is rounded once; but not the gradient of what enters gate and up: rounded, then
        added to. Where dense weights are sharded, its kernel adds the frozen product to what adapters make.

    Source: Hsu et al., https://arxiv.org/abs/2410.10989
    Memory: B*T*F values a block less, of 2 (bf16) or 4 bytes; as many more in one block's backward pass, and again as
        many with triton, which reads the activation's gradient. With adapters on dense weights that are not sharded, r
        rows of A beside each up to a multiple of 64, 2 F r values of gate_up's a block more and (rows + r) (width + r)
        - rows * width of each other linear's.
    Work: unchanged FLOPs; triton reads and writes 3 F values a token and block forward, 6 F backward, quack F and 5 F.
        With adapters quack spares what is added, 2 values a token and row of a linear. Weights have room for what lies
        beside them, those that are stored in fewer bits when they are made dense; so has what `fused-norm`,
        `fused-rotation` and `attention:impl=fa4` write. What a linear reads, forward and backward, is copied where
        another wrote it: 2 D a token with all of these. Where dense weights are sharded, gate_up's and down's are
        copied, 6 D F a micro-batch, and others' products added in place.
    Differs from the source: gate and up lie as pairs in one matrix; the down product belongs to it.
    """

    impl: Literal["triton", "quack"] = "triton"

    name = "fused-block"
    summary = "the gated activation in one kernel or in the products, made again backward instead of kept"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_block.py"
    verified_on = ("cpu", "gpu")
    opaque = frozenset({"saved.product"})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "the model runs through transformers, whose blocks have no such place"
        yield Requirement(env.native, "`fused-block` needs the native implementation", found, "leave it out")
        if self.impl == "quack":
            asked, do = "fused-block:impl=quack", "take impl=triton"
            yield gpu(asked, env, (9, 0))
            yield Requirement(env.device.capability == (9, 0), f"`{asked}` needs Hopper", env.device.name, do)
            half = env.dtype == "bfloat16" or Part.PRECISION in env.claimed
            found = "weights and products in float32"
            yield Requirement(
                half, f"`{asked}` needs products in bf16 or fp16", found, f"add --with amp or --with bf16, or {do}"
            )
            found = "linears that are more than matrices with low-rank sums (8-bit products, IA3, DoRA, dropout)"
            yield Requirement(env.plain_feed, f"`{asked}` makes the products", found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """What is no longer kept, what one block's backward pass makes instead, and the work in QuACK's products."""
        why = "made again from gate and up where the backward pass wants it"
        frozen = Part.TRAINED in env.claimed  # and an adapter of `down` may want its input
        inside = frozen and self.impl == "quack"
        again = inside or not (frozen or Part.LINEARS in env.claimed or _again(env))
        if again:
            yield live("saved.product", why, gone=True)
        if again or (frozen and env.rows_beside and "down" not in env.rows_beside):  # which nobody kept
            product = Line("feed.product", why, 1.0 / env.blocks, "product", "backward", True, side="feed")
            yield like("saved.product", product)
        yield live("saved.gated", why, gone=True)
        if self.impl == "triton":
            why = "the activation's gradient, which the kernel reads, F"
            activation = Line("feed.activation", why, 1.0 / env.blocks, "product", "backward", True, side="feed")
            yield like("saved.product", activation)
        if self.impl == "quack" and env.shape is not None:
            yield from _hidden(env.shape)
            if inside:
                yield from _beside(env, env.shape)

    def packages(self) -> tuple[tuple[str, str], ...]:
        return (("quack-kernels", "kernels"),) if self.impl == "quack" else ()

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        if env.device.capability == (9, 0):
            yield {"impl": "quack"}

    def recompute(self, trainer: Trainer) -> int:  # here it is settled what the linears are
        from optrush.kernels import swiglu

        blocks = list(trainer.model.blocks.values())
        if self.impl == "quack":
            demand(self)
            return _in_products(blocks)
        if trainer.world.device.type == "cuda":
            for need in compilers(trainer.env.device):
                if not need.met:
                    raise NeedsError(need.asked.replace("torch.compile", "`fused-block`"), need.found, need.do)
        matrices = [_plain(block.down) and not _again(trainer.env) for block in blocks]
        for block, matrix in zip(blocks, matrices, strict=True):
            block.feed = swiglu.mlp_fused_down if matrix else swiglu.mlp_fused_activation  # type: ignore[assignment]
        if not all(matrices):
            trainer.notes.append("fused-block: `down` is more than a matrix or runs again, so its input is kept")
        return len(blocks)

    def wrap_step(self, trainer: Trainer) -> int:  # weights have bytes now
        """Room for adapters' matrices behind frozen weights that are whole, and beside what the products read."""
        if self.impl != "quack":
            return 0
        import torch

        from optrush.peft.lora import make_room

        cut = Part.PARAM_SHARDING in trainer.env.claimed
        if Part.TRAINED in trainer.env.claimed:
            demand_triton("fused-block:impl=quack", trainer.env.device)  # which lays them there
        made = sum(make_room(block, whole=not cut) for block in cast("Iterable[Any]", trainer.model.blocks.values()))
        if made and trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()  # where weights lay before is too small for one with room
        return made


def _plain(linear: object) -> bool:
    """Whether a linear is a matrix and nothing else."""
    import torch.nn.functional as F

    from optrush.models.decoder import Linear

    return type(linear) is Linear and linear.matmul is F.linear and linear.bias is None


def _in_products(blocks: Sequence[Any]) -> int:
    """QuACK's products in every block; how many blocks changed.

    Raises:
        NeedsError: linears that they cannot do.
    """
    from optrush.kernels import swiglu_quack
    from optrush.kernels.lora_matmul import ALIGNED
    from optrush.peft import lora

    linears = [linear for block in blocks for linear in (block.gate_up, block.down)]
    if all(lora.fits(linear) for linear in linears):
        feed: Mlp = lora.feed
    elif all(_plain(linear) for linear in linears):
        feed = swiglu_quack.quack_mlp
    else:
        found = "linears that are more than matrices with low-rank adapters (a bias, DoRA, dropout, other products)"
        raise NeedsError("`fused-block:impl=quack`", found, "take impl=triton")
    for block in blocks:
        block.mlp = feed
        for linear in (block.qkv, block.o, block.gate_up, block.down):
            if linear.adapter is not None and linear.in_features % ALIGNED == linear.out_features % ALIGNED == 0:
                linear.adapter.by = "quack"
    return len(blocks)


def _hidden(s: ModelShape) -> Iterator[Rule]:
    """What epilogues read and write, less what passes while others multiply: F and 3 F, of 3 F and 6 F (docs/log)."""
    D, F, heads = s.width, s.ff_width, 2 * (s.heads + s.kv_heads) * s.head_width
    why = "of the activation's values, those that the products do not hide"
    yield live("forward.elementwise", why, times=(6 * D + heads + F) / (6 * D + heads + 3 * F))
    yield live("backward.elementwise", why, times=(10 * D + heads + 3 * F) / (10 * D + heads + 6 * F))


INPUTS = {"qkv": "normed", "o": "attended", "gate_up": "normed"}  # down reads what the product before it wrote
GRADIENTS = {"qkv": "turned", "o": "normed", "down": "the stream's"}  # of gate_up's the product makes d_z


def _beside(env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """What it takes to lay adapters beside what they add to; kernels that leave room for it spare a copy."""
    L, room, stored = env.blocks, 0, Part.LINEARS in env.claimed
    bare = Part.PARAM_SHARDING in env.claimed and not stored  # nothing has room
    ways: tuple[tuple[Literal["forward", "backward"], dict[str, str]], ...]
    ways = ("forward", INPUTS), ("backward", GRADIENTS)
    for name, (width, pieces) in sizes(shape).items():
        many, rows = tiles(env.rows_beside.get(name, 0)), sum(pieces.values())
        feeds, biased = name in ("gate_up", "down"), {"qkv": shape.qkv_bias, "o": shape.o_bias}.get(name, False)
        if not many or biased or (bare and not feeds):
            continue
        if name == "gate_up" or not bare:
            yield live(f"forward.added.{name}", "in the product itself", gone=True)
        for way, by in ways:
            if name in by and (bare or by[name] not in env.spacious):
                n, what = (width, "input") if way == "forward" else (rows, "gradient")
                why = f"{name}'s {what}, and A x or its gradient"
                yield add(Work(f"{way}.beside.{name}", why, "token", values=2.0 * L * n, role="product"))
            if bare and way == ("forward" if name == "gate_up" else "backward"):
                why, weight = f"{name}'s weight beside its adapter's", rows * width
                moved = Work(f"{way}.beside.weights", why, "micro", values=2.0 * L * weight, role="product")
                yield add(Line(f"working.beside.{way}", why, weight, "product", way), moved)
        room += (rows + many * (name != "gate_up")) * (width + many) - rows * width
    if not (bare or stored):
        why = "room behind them for their adapters' matrices, in whole tiles"
        yield add(Line("weights.room", why, L * room, "product", "always", blocks=L))


def _again(env: Environment) -> bool:
    """Blocks run again operator by operator, up to the last tensor that is wanted: the down product's input, not its
    output, as long as the two are no single operator."""
    return Part.ACTIVATION_CHECKPOINTING in env.claimed and Part.COMPILED not in env.claimed
