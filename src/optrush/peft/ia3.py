"""Learnt factors of what leaves a linear, or of what enters it (IA3).

Source: https://arxiv.org/abs/2205.05638. Factors multiply in float32 and the result takes the type it had: in bfloat16
a factor near 1 would move in steps of 1/256.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optrush.models.decoder import Linear
from optrush.models.weights import Initializer
from optrush.peft.adapter import AdapterToggle, Beside, constant


class Ia3(Beside):
    """feedforward: the chosen modules whose input is scaled; the others' output is, with its bias."""

    def __init__(
        self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: AdapterToggle, feedforward: bool
    ) -> None:
        super().__init__(linear, modules, names, switch)
        assert not feedforward or len(self.sizes) == 1, "pieces of one linear share what enters"
        size = self.width if feedforward else self.chosen_rows
        self.feedforward = feedforward
        self.scale = nn.Parameter(torch.empty(size, device="meta", dtype=torch.float32))  # (width,) or (chosen rows,)

    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.feedforward:
            return self.inner((x * self.scale).to(x.dtype), weight, bias)
        y = self.inner(x, weight, bias)
        return (y * self.spread(self.scale)).to(y.dtype)

    @torch.no_grad()
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.feedforward:
            return weight * self.scale.float(), bias
        rows = self.spread(self.scale.float())
        return weight * rows[:, None], None if bias is None else bias * rows

    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        parts = [whole["scale"][None]] if self.feedforward else [p.reshape(-1, 1) for p in self.apart(whole["scale"])]
        yield from ((f"{module}.ia3_l", t) for module, t in zip(self.hf, parts, strict=True))

    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = [tensors[f"{module}.ia3_l"].flatten() for module in self.hf]
        return {"scale": found[0] if self.feedforward else self.together(found)}

    def settings(self) -> dict[str, Any]:
        return {"peft_type": "IA3", "fan_in_fan_out": False, "init_ia3_weights": True}

    def fillers(self) -> Iterator[tuple[str, Initializer]]:
        """First values of its parameters."""
        yield "scale", constant(1.0)
