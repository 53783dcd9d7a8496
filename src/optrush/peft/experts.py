"""Low-rank adapters of the matrices of experts, in PEFT's format for parameters (`target_parameters`).

Each expert has an A and a B for `gate_up_proj` and `down_proj`, applied to the rows routed to the expert, like its
frozen matmul: no matrix W + B A is formed. PEFT's tensors concatenate the experts: A (N r, width), and B (rows, r N)
with the expert index last. For Llama 4, whose class in transformers does not declare that its matrices are (N, width,
rows), PEFT mistakes rows for the width: its A is our transposed B, and its B our transposed A.

Source: https://arxiv.org/abs/2106.09685; the format is PEFT's (version 0.21, `ParamWrapper`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.models.experts import Grouped, StackedMatrices
from optrush.models.families import FamilySpec
from optrush.models.weights import Initializer, Shape, WeightMap, seeded_generator
from optrush.peft.adapter import AdapterToggle, fill_constant
from optrush.peft.lora import Settings


def _published(kind: str) -> str:
    return f"{kind.removesuffix('_proj')}_proj"


class ExpertsLora(nn.Module):
    """Adapters of a layer's experts. Parameters: `gate_up_a` (N, r, D), `gate_up_b` (N, 2 F, r), likewise for down."""

    hf: tuple[str, ...] = ()  # no linears
    feedforward = False

    def __init__(
        self, experts: StackedMatrices, module: str, names: Collection[str], switch: AdapterToggle, settings: Settings,
        spec: FamilySpec | None,
    ) -> None:  # fmt: skip
        """module: transformers' name of the experts; spec: the family's, None for the layout of transformers."""
        super().__init__()
        self.module, self.switch, self.s = module, switch, settings
        of = None if spec is None else spec.experts
        self.interleaved, self.swapped = of is None or of.interleaved, of is not None and of.untold
        self.kinds = [kind for kind in experts.sizes if _published(kind) in names]
        path = [part for part in module.split(".")[-2:] if not part.isdigit()]
        self.parameters_of = [f"{'.'.join(path)}.{_published(kind)}" for kind in self.kinds]
        at: dict[str, Any] = {"device": torch.device("meta"), "dtype": settings.dtype}
        for kind in self.kinds:
            N, rows, width = experts.sizes[kind]
            self.register_parameter(f"{kind}_a", nn.Parameter(torch.empty(N, settings.rank, width, **at)))
            self.register_parameter(f"{kind}_b", nn.Parameter(torch.empty(N, rows, settings.rank, **at)))

    def added(
        self, kind: str, y: Tensor, x: Tensor, ends: Tensor, piece: Callable[[Tensor], Tensor], grouped: Grouped
    ) -> Tensor:
        """Return a matrix's output y (rows, out) plus its adapter's, for x (rows, width) grouped by expert.

        Args:
            piece: returns this rank's part of a parameter.
            grouped: the matmul over groups of rows.
        """
        if kind not in self.kinds or not self.switch.on:
            return y
        a, b = (piece(self.get_parameter(f"{kind}_{part}")) for part in "ab")
        a = a.to(x.dtype)
        low = grouped(x, a.mT, ends)
        more: Tensor = grouped(low, (b * self.s.scaling).to(x.dtype).mT, ends)
        return y + more

    @torch.no_grad()
    def merge(self, kind: str, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the float32 matrices (N, rows, width) with the adapter merged.

        Args:
            gather: gathers a parameter.
        """
        if kind not in self.kinds:
            return weight
        a, b = (gather(self.get_parameter(f"{kind}_{part}")).float() for part in "ab")
        return weight + self.s.scaling * (b @ a)

    def _key(self, kind: str) -> str:
        """Return PEFT's name of the module: if both matrices have adapters, the wrapper of gate_up is the inner one."""
        return f"{self.module}.base_layer" if kind == self.kinds[0] and len(self.kinds) == 2 else self.module

    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield PEFT's names and tensors for the full parameters, given by our names."""
        for kind in self.kinds:
            a, b = whole[f"{kind}_a"], whole[f"{kind}_b"]
            if kind == "gate_up" and not self.interleaved:
                b = b.view(len(b), -1, 2, b.shape[2]).transpose(1, 2).flatten(1, 2)
            if self.swapped:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            yield f"{self._key(kind)}.lora_A.weight", a.flatten(0, 1)
            yield f"{self._key(kind)}.lora_B.weight", b.permute(1, 2, 0).flatten(1)

    exported = published

    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Invert `published`."""
        ours = {}
        for kind in self.kinds:
            r = self.s.rank
            a, b = (tensors[f"{self._key(kind)}.lora_{part}.weight"] for part in "AB")
            a, b = a.reshape(-1, r, a.shape[1]), b.reshape(len(b), r, -1).permute(2, 0, 1)
            if self.swapped:
                a, b = b.transpose(1, 2).contiguous(), a.transpose(1, 2)
            if kind == "gate_up" and not self.interleaved:
                b = b.reshape(len(b), 2, -1, r).transpose(1, 2).flatten(1, 2)
            ours[f"{kind}_a"] = a
            ours[f"{kind}_b"] = b.contiguous()
        return ours

    def settings(self) -> dict[str, Any]:
        """Return the adapter's fields of PEFT's adapter_config.json."""
        return self.s.fields()

    def fillers(self, seed: int) -> Iterator[tuple[str, Initializer]]:
        """Yield the initial values of the parameters."""
        for kind in self.kinds:
            yield f"{kind}_a", partial(self._fill_a, seed, kind)
            yield f"{kind}_b", partial(fill_constant, 0.0)

    def _fill_a(self, seed: int, kind: str, local: Tensor, offset: Shape) -> None:
        """Fill like kaiming_uniform_ with a = sqrt(5), drawing the full tensor with a seed from the matrix's name."""
        full = torch.empty(self.get_parameter(f"{kind}_a").shape, device=local.device)
        bound = full.shape[2] ** -0.5
        generator = seeded_generator(seed, f"{self.module}.{_published(kind)}.lora_A", local.device)
        full.uniform_(-bound, bound, generator=generator)
        local.copy_(full[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])


def place(
    model: nn.Module, recipe: WeightMap, names: Sequence[str], switch: AdapterToggle, settings: Settings, seed: int,
    spec: FamilySpec | None,
) -> int:  # fmt: skip
    """Attach adapters to the experts of each layer; return the number of these layers."""
    changed = 0
    for name, experts in model.named_modules():
        if isinstance(experts, StackedMatrices):
            if spec is None and experts.transposed:
                found, do = "experts stored as (experts, width, rows)", "use targets=attention or all-linear"
                raise NeedsError("`lora` adapts experts", found, do)
            if spec is None:  # a transformers model
                module = recipe.entries[f"{name}.{names[-1]}"].pieces[0][0].rpartition(".")[0]
            else:
                layer = ".".join(recipe.entries[f"{name}.router"].pieces[0][0].split(".")[:-3])
                module = f"{spec.experts_in(layer)}.experts"
            adapter = ExpertsLora(experts, module, names, switch, settings, spec)
            experts.adapter = adapter
            recipe.fillers.update({f"{name}.adapter.{part}": fill for part, fill in adapter.fillers(seed)})
            changed += 1
    return changed
