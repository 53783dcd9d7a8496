"""Attach adapters to the linears of a frozen model, freeze it, and disable adapters. IA3, the simplest adapter.

An adapter is a module under `linear.adapter`. It wraps the linear's `matmul` and never reads `linear.weight`, because a
quantized base has none. Its parameters have canonical names (`blocks.0.qkv.adapter.a`). A linear of several pieces (the
decoder's qkv and gate/up) has one adapter for its chosen pieces, given by Hugging Face's names (`q_proj`); if one
published tensor has all pieces, one adapter of that module, with rows in our order.

IA3: learned factors of a linear's output or input. They multiply in float32 and the result is cast to the matmul dtype:
in bfloat16, a factor near 1 would change in steps of 1/256.
Source: https://arxiv.org/abs/2205.05638
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.kernels.lora_matmul import Padding
from optrush.models.decoder import Linear
from optrush.models.experts import StackedMatrices
from optrush.models.weights import Initializer, Shape, WeightMap, grouped, put_in_turn
from optrush.peft.ledger import EMBEDDING, HEAD, last, require_names, require_saved

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder
    from optrush.models.hf import HFModel

    Model: TypeAlias = Decoder | HFModel


class AdapterToggle:
    """Whether the adapters of a model are active; they share one object."""

    on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters: within the context the model is the one before training."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


class LinearAdapter(nn.Module, ABC):
    """Base of adapters: the adapted rows of a linear, and the wrapped matmul.

    The rows of a linear are `groups` groups of its pieces; the chosen rows belong to pieces with an adapter.
    """

    room = Padding()
    split: tuple[int, int, int] | None = None  # if the linear is sharded: dimension of the weight, this rank, ranks
    unsplittable: str | None = None  # the reason if the linear of this adapter cannot be sharded

    def __init__(self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: AdapterToggle) -> None:
        """modules: Hugging Face's, one per piece or one for all pieces; names: last parts of the chosen ones."""
        super().__init__()
        sizes = [rows for _, rows in linear.output_splits]
        self.below = sizes if len(modules) < len(sizes) else []  # stacked pieces of one published tensor
        self.groups, self.sizes = linear.groups, [sum(sizes)] if self.below else sizes
        self.width, self.rows = linear.in_features, linear.out_features
        self.chosen = [last(m) in names for m in modules]
        self.hf = [m for m, yes in zip(modules, self.chosen, strict=True) if yes]
        self.chosen_sizes = [n for n, yes in zip(self.sizes, self.chosen, strict=True) if yes]
        self.chosen_rows = self.groups * sum(self.chosen_sizes)
        self.inner, self.switch = linear.matmul, switch

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear's output, x (..., width) -> (..., rows); replaces its `matmul`."""
        return self.adapted(x, weight, bias) if self.switch.on else self.inner(x, weight, bias)

    @abstractmethod
    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the inner matmul with the adapter."""

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A (r, width) and U (rows, r) if all that the adapter does is add U A x; else None."""
        return None

    @abstractmethod
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight (rows, width) and bias (rows,), float32, with the adapter merged."""

    @abstractmethod
    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and tensors for the full parameters, given by our names."""

    def exported(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield like `published`, but relative to the published weight if the frozen one differs."""
        yield from self.published(whole)

    @abstractmethod
    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Invert `published`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the adapter's fields of PEFT's adapter_config.json."""

    def part(self, t: Tensor, along: int, dim: int) -> Tensor:
        """Return the part of a full parameter for this rank's shard of the linear.

        Args:
            along: the dimension of the linear's weight that matches dimension `dim` of the parameter.
        """
        if self.split is None or self.split[0] != along:
            return t
        _, rank, ranks = self.split
        return t.chunk(ranks, dim)[rank]

    def split_pieces(self, t: Tensor) -> list[Tensor]:
        """Split (chosen rows, ...) into (groups, its rows, ...) per chosen piece; (1, rows, ...) if joined."""
        if self.below:
            return [put_in_turn(t, self.below)[None]]
        return list(torch.split(t.view(-1, sum(self.chosen_sizes), *t.shape[1:]), self.chosen_sizes, 1))

    def join_pieces(self, parts: Sequence[Tensor]) -> Tensor:
        """Join (groups x its rows, ...) of each chosen piece to (chosen rows, ...)."""
        if self.below:
            return grouped(parts[0], self.below)
        shaped = [p.reshape(self.groups, n, *p.shape[1:]) for p, n in zip(parts, self.chosen_sizes, strict=True)]
        return torch.cat(shaped, 1).flatten(0, 1)

    def pick(self, t: Tensor) -> Tensor:
        """Select the chosen rows: (rows, ...) -> (chosen rows, ...)."""
        parts = torch.split(t.view(-1, sum(self.sizes), *t.shape[1:]), self.sizes, 1)
        return torch.cat([p for p, yes in zip(parts, self.chosen, strict=True) if yes], 1).flatten(0, 1)

    def spread(self, t: Tensor) -> Tensor:
        """Expand (chosen rows,) to (rows,), with 1 for rows without an adapter."""
        if all(self.chosen):
            return t
        mine, parts = iter(self.split_pieces(t)), []
        for n, yes in zip(self.sizes, self.chosen, strict=True):
            parts.append(next(mine) if yes else t.new_ones(len(t) // sum(self.chosen_sizes), n))
        return torch.cat(parts, 1).flatten()


class Ia3(LinearAdapter):
    """IA3 factors. feedforward: scale the chosen modules' input; else their output, including the bias."""

    def __init__(
        self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: AdapterToggle, feedforward: bool
    ) -> None:
        super().__init__(linear, modules, names, switch)
        assert not feedforward or len(self.sizes) == 1, "pieces of one linear share their input"
        size = self.width if feedforward else self.chosen_rows
        self.feedforward = feedforward
        self.scale = nn.Parameter(torch.empty(size, device="meta", dtype=torch.float32))  # (width,) or (chosen rows,)

    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.feedforward:
            return self.inner((x * self.part(self.scale, 1, 0)).to(x.dtype), weight, bias)
        y = self.inner(x, weight, bias)
        return (y * self.spread(self.part(self.scale, 0, 0))).to(y.dtype)

    @torch.no_grad()
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.feedforward:
            return weight * self.scale.float(), bias
        rows = self.spread(self.scale.float())
        return weight * rows[:, None], None if bias is None else bias * rows

    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        scale = whole["scale"]
        parts = [scale[None]] if self.feedforward else [p.reshape(-1, 1) for p in self.split_pieces(scale)]
        yield from ((f"{module}.ia3_l", t) for module, t in zip(self.hf, parts, strict=True))

    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        factors = [tensors[f"{module}.ia3_l"].flatten() for module in self.hf]
        return {"scale": factors[0] if self.feedforward else self.join_pieces(factors)}

    def settings(self) -> dict[str, Any]:
        return {"peft_type": "IA3", "fan_in_fan_out": False, "init_ia3_weights": True}

    def fillers(self) -> Iterator[tuple[str, Initializer]]:
        """Yield the initial values of the parameters."""
        yield "scale", partial(fill_constant, 1.0)


# --- Placement of adapters.


def known(model: Model, recipe: WeightMap) -> list[str]:
    """Return the names that adapters may target: the last part of each module of the blocks' linears."""
    return list(dict.fromkeys(last(m) for name, _ in model.linears() for m in _modules(recipe, f"{name}.weight")))


def find_outer_modules(model: Model, recipe: WeightMap) -> dict[str, str]:
    """Return the Hugging Face module of each parameter outside the blocks' linears; for a tied head, the embedding."""
    linears = {name for name, _ in model.linears()}
    free = [name for name in recipe.entries if name.rpartition(".")[0] not in linears]
    return {name: _modules(recipe, name)[0] for name in free}


def find_linears(model: Model, recipe: WeightMap, names: Collection[str]) -> list[tuple[str, Linear, list[str]]]:
    """Return (canonical name, linear, Hugging Face modules, one per piece) of each linear with some of these names."""
    linears = [(name, linear, _modules(recipe, f"{name}.weight")) for name, linear in model.linears()]
    return [each for each in linears if {last(m) for m in each[2]} & {*names}]


def _modules(recipe: WeightMap, parameter: str) -> list[str]:
    return [hf.rpartition(".")[0] for hf, _ in recipe.entries[parameter].pieces]


def check_targets(
    technique: str, model: Model, recipe: WeightMap, targets: str | Sequence[str], save: Sequence[str]
) -> None:
    """Raise NeedsError for names that the model does not have."""
    others = {last(module) for module in find_outer_modules(model, recipe).values()}
    others |= {HEAD} if model.ties and EMBEDDING in others else set()
    needs = [require_names(technique, "targets", targets, known(model, recipe))]
    for need in [*needs, *require_saved(technique, save, others, bool(model.ties))]:
        if not need.met:
            raise NeedsError(need.asked, need.found, need.do)


def freeze_base(model: Model, recipe: WeightMap, save: Collection[str], precision: torch.dtype | None) -> set[str]:
    """Freeze everything except the modules `save`; return the canonical names of their parameters.

    Frozen float32 matrices of linears, embedding and head are cast once to the matmul dtype `precision`, instead of at
    each use; the embedding's output keeps its dtype.
    """
    trained = {name for name, module in find_outer_modules(model, recipe).items() if last(module) in save}
    trained |= {"head.weight"} if model.head.scores else set()  # a score head starts untrained
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    if precision is None:
        return trained
    matrices: list[tuple[nn.Module, str]] = []
    matrices += [(linear, "weight") for _, linear in model.linears() if linear.quantized is None]
    experts = [m for m in model.modules() if isinstance(m, StackedMatrices) and m.quantized is None]
    matrices += [(m, kind) for m in experts for kind in m.sizes]
    for module, name in (*matrices, (model.head, "weight"), (model.embedding, "weight")):
        weight = module.get_parameter(name)
        if weight.requires_grad or weight.dtype != torch.float32:
            continue
        if module is model.embedding:  # runs before other hooks, so that their results keep their dtype
            module.register_forward_hook(lambda module, inputs, out: out.float(), prepend=True)
        setattr(module, name, nn.Parameter(weight.to(precision), requires_grad=False))
    model.tie()
    return trained


def place(
    name: str, linear: Linear, adapter: LinearAdapter, recipe: WeightMap, fillers: Iterable[tuple[str, Initializer]]
) -> None:
    """Attach an adapter to the linear `name`, with the initial values of its parameters."""
    linear.adapter = adapter
    linear.matmul = adapter.product
    recipe.fillers.update({f"{name}.adapter.{part}": fill for part, fill in fillers})


def fill_from(values: Tensor, local: Tensor, offset: Shape) -> None:
    """Fill a rectangle with its part of the full `values`, up to their last row."""
    part = values[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
    local[: len(part)].copy_(part)


def fill_over(values: Tensor, recipe: WeightMap, name: str, local: Tensor, offset: Shape) -> None:
    """Fill a rectangle of a parameter with the published values, then overwrite it with its part of `values`."""
    recipe.fill_published(name, local, offset)
    fill_from(values, local, offset)


def fill_constant(value: float, local: Tensor, offset: Shape) -> None:
    local.fill_(value)
