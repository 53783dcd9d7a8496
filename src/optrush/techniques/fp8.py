"""8-bit floats: the matmuls of the blocks' linears at twice the rate of bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from optrush.planner.ledger import WAYS, Line, Role, Rule, Tag, WorkItem, like, live, saved
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer

ALL, MLP = ("qkv", "o", "gate_up", "down"), ("gate_up", "down")
MLP_SHARE = 0.83  # share of the blocks' weights, for F = 4 D and K = H / 4
MULTIPLE = 16  # the inner sizes of the matmuls are multiples of it
# By linear: the ledger's lines of its input and its output, and its share of each.
ENTERS = {"qkv": ("normed", 0.5), "o": ("attended", 1.0), "gate_up": ("normed", 0.5), "down": ("product", 1.0)}
LEAVES = {"qkv": ("heads", 1.0), "o": ("middle", 1.0), "gate_up": ("gate_up", 1.0), "down": ("middle", 1.0)}


@dataclass(frozen=True)
class Fp8(Technique):
    """Inputs and weights of the chosen linears in e4m3, gradients in e5m2, each scaled by its maximum.

    The head, norms, attention and all sums are unchanged; so are weights, gradients and states. On a CPU the rounding
    is real and the matmuls run in float32: the same results, slower.

    Source: Micikevicius et al., https://arxiv.org/abs/2209.05433
    Memory: compiled, inputs written by our own kernels are saved in 1 byte per value: with the norms of `fused-kernels`
        2 D (mlp: D), with its mlp F. Outputs of the compiler are quantized again; cast weights are not saved.
    Work: matmuls at the 8-bit rate; every operand is read twice and written once or twice to be rounded.
    Differs from the source: the scale is that of the current tensor, not of its history.
    """

    targets: Literal["all", "mlp"] = "all"

    name = "fp8"
    summary = "8-bit matmuls of the blocks' linears, scaled by each tensor's maximum"
    source = "https://arxiv.org/abs/2209.05433"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.LINEARS})
    searched = False  # changes the computed values

    def describe(self, spec: ModelSpec) -> ModelSpec:
        return spec.with_linears(self._chosen, matmul="float8")

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield env.needs_dense("`fp8`")
        found = "the model runs through transformers"
        yield Requirement(env.native, "`fp8` needs our own linears", found, "take model.implementation: native")
        if env.device.kind != "cuda":
            return
        asked = "`fp8` needs a device with 8-bit float matmuls (capability 8.9 or newer)"
        yield env.needs_capability((8, 9), asked, "leave it out")
        yield env.needs_half("`fp8` needs matmuls in bf16")
        asked, compiled = "`fp8` needs `compile`", Part.COMPILED in env.claimed
        yield Requirement(compiled, asked, "no `compile`: without it, fp8 is slower than bf16", "add --with compile")
        slots, do = env.slots, f"take a batch.seq that is a multiple of {MULTIPLE * env.axes.get('cp', 1)}"
        yield Requirement(slots % MULTIPLE == 0, f"`fp8` sums over multiples of {MULTIPLE} slots", f"{slots} slots", do)

    def quality(self, env: Environment) -> str:
        return "fp8 products"

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield matmuls at the 8-bit rate, and bytes of rounding, assumed: an operand is read twice and written once;
        an input is transposed later (read and written), a gradient at once; a weight is rounded once per pass."""
        if Part.ADAPTERS not in env.claimed:  # matmuls of frozen weights save no input anyway
            yield from self._kept(env)
        if env.device.kind == "cuda":  # elsewhere the matmuls are float32
            for way in WAYS:
                for name in self._chosen:
                    yield live(f"{way}.{name}", "multiplied in 8 bits", unit="product8")
        for name in self._chosen:
            for kind, (line, share), moved in (("inputs", ENTERS[name], 7.0), ("gradients", LEAVES[name], 6.0)):
                work = WorkItem(
                    f"fp8.{kind}.{name}", f"{kind} of {name} rounded to 8 bits", "token", values=moved * share
                )
                of = env.shape.stream_line if line == "middle" and env.shape is not None else f"saved.{line}"
                yield like(of, work)
        reason = "weights rounded to 8 bits, in forward and backward pass"
        share = 1.0 if self.targets == "all" else MLP_SHARE
        yield like("casts.blocks", WorkItem("fp8.weights", reason, "micro", values=11.0 * share))

    def _kept(self, env: Environment) -> Iterator[Rule]:
        """Yield inputs that no compiler can recompute, in 8 bits; it recomputes and rounds the others. The input of `o`
        stays in the matmul dtype, because attention saves it."""
        reason, again, blocks = "kept in 8 bits", "recomputed and rounded again", env.blocks
        compiled = Part.COMPILED in env.claimed
        product, normed = not compiled or env.spec.mlp != "torch", not compiled or env.spec.norm == "fused"
        yield live("saved.product", reason, role="byte") if product else live("saved.product", again, gone=True)
        if compiled:  # a block's backward pass computes it, or its gradient, in the matmul dtype
            values = (0.5 if product else 1.0) / blocks  # beyond the 8 bits
            line = Line("feed.again", again, values, "product", "backward", True, side="feed", of=("mlp",))
            yield like("saved.product", line)
        if normed and self.targets == "all":
            yield live("saved.normed", reason, role="byte")
        else:
            yield live("saved.normed", "kept in two widths" if normed else again, gone=True)
        if self.targets == "mlp":
            halves: tuple[tuple[str, Role], ...] = (("qkv", "product"), ("gate_up", "byte"))
            for name, role in halves[: 2 if normed else 1]:
                yield like("saved.normed", saved(f"normed.{name}", f"input of {name}, D", 0.5, blocks, role=role))
        if compiled:
            yield live("casts.blocks", "rounded from the weights again", gone=True)
            if self.targets == "mlp":
                reason = "copies of the other matrices in the matmul dtype"
                of: tuple[Tag, ...] = ("casts", "blocks")
                others = Line("casts.blocks.others", reason, 1 - MLP_SHARE, "cast", "saved", blocks=blocks, of=of)
                yield like("casts.blocks", others)

    @property
    def _chosen(self) -> tuple[str, ...]:
        return ALL if self.targets == "all" else MLP

    def model(self, trainer: Trainer) -> int:
        from optrush.kernels import float8
        from optrush.models.decoder import Decoder

        assert isinstance(trainer.model, Decoder)
        changed, left = 0, []
        for name, linear in trainer.model.linears():
            if name.rpartition(".")[2] not in self._chosen:
                continue
            if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
                left.append(f"{name} ({linear.out_features} x {linear.in_features})")
                continue
            linear.matmul = float8.float8_linear
            changed += 1
        if left:
            note = f"fp8: {len(left)} linears stay: widths not multiples of {MULTIPLE}, the first {left[0]}"
            trainer.notes.append(note)
        return changed
