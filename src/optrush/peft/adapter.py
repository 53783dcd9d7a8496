"""Adapters beside the linears of a frozen model: where they go, what stays frozen, and the switch that turns them off.

An adapter is a module under `linear.adapter`. It wraps the linear's `product`, whatever that is by then, and never
looks at `linear.weight`, which a base stored in another form has not. Its parameters are float32 and have canonical
names (`blocks.0.qkv.adapter.a`). A linear of several pieces (the decoder's qkv and gate/up) has one adapter for those
of its pieces that were chosen, which Hugging Face's names say (`q_proj`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.kernels.lora_matmul import Padding
from optrush.models.decoder import Linear
from optrush.models.weights import Initializer, Shape, WeightMap
from optrush.peft.ledger import EMBEDDING, HEAD, last, named, whole

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder
    from optrush.models.hf import HFModel

    Model = Decoder | HFModel


class AdapterToggle:
    """Whether adapters act: one for all of a model."""

    on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model is what it was before training."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


class Beside(nn.Module, ABC):
    """Base of adapters: which rows of a linear one is about, and the product that it wraps.

    The rows of a linear are `groups` groups of its pieces; its chosen rows are the same without the pieces that have no
    adapter.
    """

    room = Padding()

    def __init__(self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: AdapterToggle) -> None:
        """modules: Hugging Face's, one a piece; names: the last parts of those that are chosen."""
        super().__init__()
        self.groups, self.sizes = linear.groups, [rows for _, rows in linear.output_splits]
        self.width, self.rows = linear.in_features, linear.out_features
        self.chosen = [last(m) in names for m in modules]
        self.hf = [m for m, yes in zip(modules, self.chosen, strict=True) if yes]
        self.chosen_sizes = [n for n, yes in zip(self.sizes, self.chosen, strict=True) if yes]
        self.chosen_rows = self.groups * sum(self.chosen_sizes)
        self.inner, self.switch = linear.matmul, switch

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., width) -> (..., rows): what the linear multiplies by from now on."""
        return self.adapted(x, weight, bias) if self.switch.on else self.inner(x, weight, bias)

    @abstractmethod
    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The inner product with what was learnt."""

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A (r, width) and U (rows, r), where all it does is to add U A x; None: it does something else."""
        return None

    @abstractmethod
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `decoder.Adapted`."""

    @abstractmethod
    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """PEFT's names and tensors of whole parameters, by our names of them."""

    @abstractmethod
    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `published`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Its part of PEFT's adapter_config.json."""

    def apart(self, t: Tensor) -> list[Tensor]:
        """(chosen rows, ...) -> of each chosen piece (groups, its rows, ...)."""
        return list(torch.split(t.view(self.groups, -1, *t.shape[1:]), self.chosen_sizes, 1))

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Of each chosen piece (groups x its rows, ...) -> (chosen rows, ...)."""
        shaped = [p.reshape(self.groups, n, *p.shape[1:]) for p, n in zip(parts, self.chosen_sizes, strict=True)]
        return torch.cat(shaped, 1).flatten(0, 1)

    def pick(self, t: Tensor) -> Tensor:
        """(rows, ...) -> (chosen rows, ...)."""
        parts = torch.split(t.view(-1, sum(self.sizes), *t.shape[1:]), self.sizes, 1)
        return torch.cat([p for p, yes in zip(parts, self.chosen, strict=True) if yes], 1).flatten(0, 1)

    def spread(self, t: Tensor) -> Tensor:
        """(chosen rows,) -> (rows,), 1 where there is no adapter."""
        if all(self.chosen):
            return t
        mine, parts = iter(self.apart(t)), []
        for n, yes in zip(self.sizes, self.chosen, strict=True):
            parts.append(next(mine) if yes else t.new_ones(self.groups, n))
        return torch.cat(parts, 1).flatten()


def known(model: Model, recipe: WeightMap) -> list[str]:
    """Names that adapters may go to: the last parts of the modules of the blocks' linears."""
    return list(dict.fromkeys(last(m) for name, _ in model.linears() for m in _modules(recipe, f"{name}.weight")))


def outside(model: Model, recipe: WeightMap) -> dict[str, str]:
    """Hugging Face's module of every parameter that no linear of the blocks has; a tied head is its embedding's."""
    linears = {name for name, _ in model.linears()}
    free = [name for name in recipe.entries if name.rpartition(".")[0] not in linears]
    return {name: _modules(recipe, name)[0] for name in free}


def places(model: Model, recipe: WeightMap, names: Collection[str]) -> list[tuple[str, Linear, list[str]]]:
    """(canonical name, linear, Hugging Face's modules, one a piece) of each linear that has some of these names."""
    found = [(name, linear, _modules(recipe, f"{name}.weight")) for name, linear in model.linears()]
    return [each for each in found if {last(m) for m in each[2]} & {*names}]


def _modules(recipe: WeightMap, parameter: str) -> list[str]:
    return [hf.rpartition(".")[0] for hf, _ in recipe.entries[parameter].pieces]


def check(technique: str, model: Model, recipe: WeightMap, targets: str | Sequence[str], save: Sequence[str]) -> None:
    """Refuses names that this model has not.

    Raises:
        NeedsError: in its three lines.
    """
    others = {last(module) for module in outside(model, recipe).values()}
    others |= {HEAD} if model.ties and EMBEDDING in others else set()
    needs = [named(technique, "targets", targets, known(model, recipe))]
    for need in [*needs, *whole(technique, save, others, bool(model.ties))]:
        if not need.met:
            raise NeedsError(need.asked, need.found, need.do)


def freeze(model: Model, recipe: WeightMap, save: Collection[str], precision: torch.dtype | None) -> set[str]:
    """Nothing but the modules `save` learns; canonical names of their parameters.

    Frozen float32 matrices of linears, embedding and head take the products' type, to which each use would cast them;
    what the embedding gives keeps its type.
    """
    trained = {name for name, module in outside(model, recipe).items() if last(module) in save}
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    if precision is None:
        return trained
    linears = [linear for _, linear in model.linears() if linear.quantized is None]
    for module in (*linears, model.head, model.embedding):
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if weight.requires_grad or weight.dtype != torch.float32:
            continue
        if module is model.embedding:  # first of the hooks: what another makes of its output stays as it is
            module.register_forward_hook(lambda module, inputs, out: out.float(), prepend=True)
        module.weight = nn.Parameter(weight.to(precision), requires_grad=False)
    model.tie()
    return trained


def place(
    name: str, linear: Linear, adapter: Beside, recipe: WeightMap, fillers: Iterable[tuple[str, Initializer]]
) -> None:
    """Puts an adapter beside the linear of that name, with the first values of its parameters."""
    linear.adapter = adapter
    linear.matmul = adapter.product
    recipe.fillers.update({f"{name}.adapter.{own}": fill for own, fill in fillers})


def filled(values: Tensor) -> Initializer:
    """Fills any rectangle from the whole."""

    def fill(local: Tensor, offset: Shape) -> None:
        local.copy_(values[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])

    return fill


def constant(value: float) -> Initializer:
    def fill(local: Tensor, offset: Shape) -> None:
        local.fill_(value)

    return fill
