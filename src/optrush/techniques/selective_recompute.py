"""Selective activation checkpointing: save expensive outputs, and recompute the cheap rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import Field

from optrush.planner.ledger import Rule, like, live, saved, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

# Operators by prefix of their "namespace::name", so that a kernel's operator need not be imported.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
WITH_GATE = "optrush::gated"  # QuACK's first feed-forward matmul; its backward has the same prefix
ATTENTION = (
    "aten::_scaled_dot_product_", "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn", "optrush::flash4",
)  # fmt: skip
RECEIVED = "_c10d_functional::wait_tensor"  # the output of a collective in a compiled block


@dataclass(frozen=True)
class SelectiveRecompute(Technique):
    """Saves the outputs of chosen operators, or as much as a budget allows; recomputes the rest.

    ops `products` (the default): outputs of matmuls and attention kernels are saved, in compiled blocks under `tensor`
        also those of its collectives; norms, rotation, activation and gating run again.
    ops `attention`: outputs of attention kernels are saved, matmuls run again too.
    budget: the share of their activations that compiled blocks keep; torch's partitioner chooses what to recompute.

    The last matmul of a block never runs again, as the backward pass does not read its output. Attention by plain
    matmuls with whole scores is not a kernel: it runs again, and its scores are not saved.

    Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
    Memory: `products` saves B*T*(2D + (2H + 2K)E + 2F) values per block, `attention` B*T*(D + HE); one block at a time
        has all its activations in the backward pass. budget: whole outputs that fit into its share.
    Work: the elementwise part of the forward pass again; with `attention` all but attention and the last matmul.
    Differs from the source: it keeps all but the inside of attention; here attention kernels keep no inside.
    """

    ops: Literal["products", "attention"] | None = None
    budget: Annotated[float, Field(gt=0, le=1)] | None = None

    name = "selective-recompute"
    summary = "recomputes cheap operators in the backward pass: by operator, or by a memory budget"
    source = "https://arxiv.org/abs/2205.05198"
    numerics = Numerics.EXACT
    claims = frozenset({Part.ACTIVATION_CHECKPOINTING})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        asked, found = (
            "`selective-recompute` works by operator or by budget",
            f"both, ops={self.ops} and budget={self.budget}",
        )
        yield Requirement(self.ops is None or self.budget is None, asked, found, "give one of the two")
        asked = f"`selective-recompute:budget={self.budget}`"
        found, do = (
            "no compiled blocks; a budget needs the compiler's partitioner",
            "add --with compile, or take ops=products",
        )
        yield Requirement(self.budget is None or Part.COMPILED in env.claimed, asked, found, do)
        if self.ops != "attention" or self.budget is not None:
            yield env.needs_dense("`selective-recompute` of matmuls or by a budget (ops=attention saves no matmul)")
        asked = "`selective-recompute` keeps the outputs of all matmuls, or of the expensive ones"
        found, do = (
            "adapters, whose matmuls are summed in place: their cost is unknown",
            "take ops=attention, or recompute",
        )
        yield Requirement(self.ops == "attention" or Part.ADAPTERS not in env.claimed, asked, found, do)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield discarded tensors of one block at a time, and their operators twice, under the baseline's names."""
        if self.budget is not None:
            yield from _by_budget(self.budget, env)
            return
        reason = "saved by one block at a time, while it is recomputed"
        again = "these operators of the forward pass run twice"
        if self.ops == "attention":
            # Assumed, not measured: the received rows of experts are saved.
            yield live(tagged("saved", no=("attention-output",), but="saved.arriving"), reason, recomputed=1.0)
            yield live(tagged("forward", no=("attention", "scores"), but="forward.down"), again, times=2)
        else:
            kept = "saved.normed" if _keeps_received(env) else ""
            yield live(tagged("saved", no=("attention-output", "product-output"), but=kept), reason, recomputed=1.0)
            yield from _cheap_again(env, again, exchanged=_keeps_received(env))
            yield live("forward.launches", again, times=1.5)
            if Part.TP in env.claimed and not _keeps_received(env):
                kept = "output of attention's last matmul for all tokens, saved before the ranks sum it"
                yield live("saved.middle", kept, gone=True)
                stream = "saved.middle" if env.shape is None else env.shape.stream_line
                yield like(stream, saved("added", kept, 1.0, env.blocks, "product-output"))
        if Part.COMPILED in env.claimed:  # else autocast holds the copies until the loss is computed
            yield live(tagged("casts", "blocks"), "compiled blocks cast their weights again", recomputed=1.0)
        if Part.ATTENTION not in env.claimed:  # plain matmuls, which are not saved
            for work in ("attention", "scores"):
                yield live(tagged("forward", work), "attention by plain matmuls runs twice", times=2)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"ops": "attention"}

    def recompute(self, trainer: Trainer) -> int:
        """Recompute by operator: inside the block, so that it is compiled too."""
        if self.budget is not None:
            return 0
        from types import MethodType

        from torch.utils.checkpoint import checkpoint

        blocks, through = trainer.model.blocks, trainer.model.block_call
        of_matmuls = self.ops != "attention"
        contexts = _kept(_products(blocks.values()) if of_matmuls else 0, of_matmuls and _keeps_received(trainer.env))
        for block in blocks.values():
            block.keeps_outputs = True  # type: ignore[assignment]  # outside autograd's saved tensors, unless compiled

        # All but the hidden states are captured, because a compiler guards on every field of arguments.
        if not trainer.env.native:  # the slot is inside a block's forward

            def selective(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                def run(*first: Any) -> Any:
                    return through(call, *first, *args[1:], **kwargs)

                return checkpoint(run, *args[:1], use_reentrant=False, context_fn=contexts)

            trainer.model.block_call = selective
            return len(blocks)

        def forward(block: Any, x: Any, *rest: Any) -> Any:
            def run(x: Any) -> Any:
                return type(block).forward(block, x, *rest)

            return checkpoint(run, x, use_reentrant=False, context_fn=contexts)

        for block in blocks.values():
            # One function bound to each block: a compiler would build a graph for each closure.
            block.forward = MethodType(forward, block)
        return len(blocks)

    def wrap_step(self, trainer: Trainer) -> int:
        """Recompute by budget: around the compiled block, whose graph is split in two at its first call."""
        if self.budget is None:
            return 0
        changed = 0
        for module in (trainer.model, *trainer.model.blocks.values()):
            if (call := module._compiled_call_impl) is not None:
                module._compiled_call_impl = _within(self.budget, call)
                changed += 1
        return changed


def _by_budget(budget: float, env: Environment) -> Iterator[Rule]:
    """Yield rules for a budget: the partitioner saves an operator's output whole or not at all.

    It is assumed to save the most expensive fitting set of three outputs, the stream before the feed-forward part if
    there is room for all, and whole scores (which it does not at some budgets).
    """
    shape = env.shape
    if (
        shape is None or not env.native or budget == 1
    ):  # assumed, not measured: an even share, and cheap operators run again first
        cheap = min(1.0, 3 * (1 - budget))
        yield live(tagged("saved"), f"of all but {budget:g}, kept by one block at a time", recomputed=1 - budget)
        yield live(tagged("forward", "elementwise"), "elementwise operators run again first", times=1 + cheap)
        dear = max(0.0, 1 - 1.5 * budget)
        reason = "matmuls and attention, if that is not enough"
        yield live(tagged("forward", no=("elementwise", "launches")), reason, times=1 + dear)
        return
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_width
    # Values per token, FLOP per token (attention's for T = 4 D), and the work recomputed without them.
    outputs = {
        "heads": (heads, 2 * shape.width * heads, "qkv"),
        "attended": (shape.heads * shape.head_width, 8 * shape.width**2, "scores"),
        "gate_up": (shape.fed, 2 * shape.width * shape.fed, "gate_up"),
    }
    cheap = 3 * shape.width + (0 if env.spec.mlp != "torch" else shape.ff_width)
    all_three = sum(size for size, *_ in outputs.values())
    room = budget * (all_three + cheap)
    sets = [kept for n in range(4) for kept in combinations(outputs, n) if sum(outputs[k][0] for k in kept) <= room]
    kept = max(sets, key=lambda names: sum(outputs[k][1] for k in names))
    reason = "saved by one block at a time, while it is recomputed"
    cheap_to_make = tagged(
        "saved", no=("product-output", "attention-output", "scores", "mask"), but="saved.middle.wide"
    )
    yield live(cheap_to_make, reason, recomputed=1.0)
    if all_three + shape.width > room:  # room for the stream before the feed-forward part, too
        for line in ("saved.middle", "saved.middle.wide"):
            yield live(line, reason, recomputed=1.0)
    yield from _cheap_again(env, "elementwise operators run twice", exchanged=False)
    for name, (_, _, work) in outputs.items():
        if name not in kept:
            yield live(f"saved.{name}", "does not fit into the budget whole", recomputed=1.0)
            yield live(f"forward.{work}", "runs twice", times=2)


def _cheap_again(env: Environment, reason: str, exchanged: bool) -> Iterator[Rule]:
    """Yield the recomputation of all operators except matmuls and attention; `exchanged`: and collectives."""
    yield live(tagged("forward", "elementwise"), reason, times=2)
    if env.claimed & {Part.TP, Part.CP} and not exchanged:
        yield live(tagged("forward", "exchange"), "communication around saved matmuls is repeated", times=2)


def _keeps_received(env: Environment) -> bool:
    """Return whether outputs of collectives are kept: compiled tensor parallelism would wait for each of them again."""
    return Part.TP in env.claimed and Part.COMPILED in env.claimed


def _products(blocks: Any) -> float:
    """Return the number of saved matmuls per block: all but the last; all if some linears are not plain."""
    from torch import nn

    count = max(sum(isinstance(m, nn.Linear) for m in block.modules()) for block in blocks)
    return count - 1 if count else math.inf


def _kept(products: float, received: bool = False) -> Callable[[], Any]:
    """Return a checkpoint's `context_fn`, which saves the first `products` matmuls and all attention.

    Args:
        received: also save the outputs of collectives.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    class Policy:
        """Count the matmuls of one pass through one block: torch 2.11 calls it in the second pass too."""

        def __init__(self) -> None:
            self.seen = {False: 0, True: 0}  # first pass, second pass

        def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = op.name()
            if product := name.startswith(PRODUCTS) or name == WITH_GATE:
                self.seen[ctx.is_recompute] += 1
            keep = name.startswith(ATTENTION) or (product and self.seen[ctx.is_recompute] <= products)
            keep |= received and name == RECEIVED
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(Policy())  # type: ignore[no-untyped-call]

    return contexts


def _within(budget: float, compiled: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch._functorch import config

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        with config.patch(activation_memory_budget=budget):  # at each call, because any may recompile
            return compiled(*args, **kwargs)

    return call
