"""Low-rank adapters of a linear (LoRA, with rsLoRA's scaling and DoRA's magnitudes): W x + s B A x.

Of the chosen pieces of a fused linear, the matrices A (rank x width) lie one below the other, so that one product makes
all of A x; B lies in the linear's order of rows, and is laid out with zeros, a column for each row of A, so that one
product adds all of B A x to what the linear gave. Products are in the type of the linear's output; the parameters are
float32.

DoRA scales each row of the sum to a learnt length: m (W + s B A) x / |W + s B A|. The lengths are no part of the
gradient (section 4.3 of the paper) and are found without the sum: |w + s b A|^2 = |w|^2 + 2 s b.(A w) + s^2 b A A^T b.

Source: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2312.03732 (rsLoRA),
https://arxiv.org/abs/2402.09353 (DoRA). The first values are PEFT's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.model import adapted_linear
from optrush.model.adapted import Beside, Switch, constant
from optrush.model.decoder import Linear
from optrush.model.quantised import Layout, Quantised
from optrush.model.weights import Filler, Recipe, Shape


@dataclass(frozen=True)
class Settings:
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Lora(Beside):
    """Legend: r rank, n chosen pieces, D the linear's width."""

    def __init__(
        self, linear: Linear, modules: Sequence[str], names: Collection[str], switch: Switch, settings: Settings
    ) -> None:
        super().__init__(linear, modules, names, switch)
        self.s, n = settings, len(self.hf)
        at: dict[str, Any] = {"device": torch.device("meta"), "dtype": torch.float32}
        self.a = nn.Parameter(torch.empty(n * settings.rank, self.width, **at))  # (n r, D)
        self.b = nn.Parameter(torch.empty(self.chosen_rows, settings.rank, **at))  # (chosen rows, r)
        self.magnitude = nn.Parameter(torch.empty(self.chosen_rows, **at)) if settings.dora else None
        self._dense, stored = linear.dense, linear.stored
        # Settled here, for torch 2.11 compiles no comparison of methods; in a tuple, for the module is the linear's.
        held = isinstance(stored, Quantised) and linear.product == stored.product
        self._stored, self._matrix = (stored if held else None,), linear.product is F.linear

    def adapted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        low_rank, base = self.low_rank(dtype), self._base(weight, dtype)
        if low_rank is not None and base is not None:
            bias = None if bias is None else bias.to(dtype)
            return adapted_linear.linear(x.to(dtype), *low_rank, bias, *base, self.by, self.room)
        y = self.inner(x, weight, None if self.s.dora else bias)
        low = F.dropout(x.to(y.dtype), self.s.dropout, self.training) if self.s.dropout else x.to(y.dtype)
        h = F.linear(low, self.a.to(y.dtype)).flatten(0, -2)  # (N, n r)
        out = torch.addmm(y.flatten(0, -2), h, self.up(y.dtype).t(), alpha=self.s.scaling)  # (N, rows)
        if self.magnitude is not None:
            dense = self._dense(y.dtype) if weight is None else weight.to(y.dtype)
            out = (out * self.spread(self.magnitude / self.pick(self.lengths(dense)))).to(y.dtype)
            out = out if bias is None else out + bias.to(y.dtype)
        return out.view(y.shape)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.s.dora or self.s.dropout:
            return None
        return self.a.to(dtype), (self.up(self.b.dtype) * self.s.scaling).to(dtype)  # rounded once

    def _base(self, weight: Tensor | None, dtype: torch.dtype) -> tuple[Layout | None, list[Tensor]] | None:
        """Layout and parts of a frozen matrix that the inner product multiplies by; None: it does something else."""
        (stored,) = self._stored
        if isinstance(stored, Quantised):
            return stored.layout, [*stored.parameters()]
        if weight is None or weight.requires_grad or not self._matrix:
            return None
        # Cast out here, where autograd sees it: what moves saved tensors knows a parameter's copy by that.
        return None, [weight.to(dtype)]

    def up(self, dtype: torch.dtype) -> Tensor:
        """B as a matrix from all of A x to all rows: (rows, n r)."""
        b, r, n = self.b.to(dtype), self.s.rank, len(self.hf)
        if len(self.sizes) == 1:
            return b
        parts, j, laid = self.apart(b), 0, []
        for rows, yes in zip(self.sizes, self.chosen, strict=True):
            if yes:
                laid.append(F.pad(parts[j], (j * r, (n - 1 - j) * r)))
                j += 1
            else:
                laid.append(b.new_zeros(self.groups, rows, n * r))
        return torch.cat(laid, 1).flatten(0, 1)

    @torch.no_grad()
    def lengths(self, dense: Tensor) -> Tensor:
        """(rows,) float32 at least: of each row of W + s B A, for a weight (rows, D)."""
        wide, s = torch.promote_types(dense.dtype, torch.float32), self.s.scaling
        with torch.autocast(dense.device.type, enabled=False):
            a, up = self.a.to(wide), self.up(wide)
            crossed = (dense @ self.a.to(dense.dtype).t()).to(wide)  # (rows, n r)
            squares: Tensor = torch.linalg.vector_norm(dense, dim=1, dtype=wide).square()
            longer: Tensor = (up * (2 * s * crossed + s * s * (up @ (a @ a.t())))).sum(1)
            return (squares + longer).sqrt()

    @torch.no_grad()
    def merge(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        total = weight + self.s.scaling * (self.up(torch.float32) @ self.a.float())
        if self.magnitude is not None:
            total *= self.spread(self.magnitude.float() / self.pick(self.lengths(weight)))[:, None]
        return total, bias

    def published(self, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, tensors in (
            ("lora_A.weight", torch.split(whole["a"], self.s.rank)),
            ("lora_B.weight", [p.flatten(0, 1) for p in self.apart(whole["b"])]),
            ("lora_magnitude_vector", [p.flatten() for p in self.apart(whole["magnitude"])] if self.s.dora else ()),
        ):
            yield from ((f"{module}.{key}", t) for module, t in zip(self.hf, tensors, strict=False))

    def taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def of(key: str) -> list[Tensor]:
            return [tensors[f"{module}.{key}"] for module in self.hf]

        found = {"a": torch.cat(of("lora_A.weight")), "b": self.together(of("lora_B.weight"))}
        return found | ({"magnitude": self.together(of("lora_magnitude_vector"))} if self.s.dora else {})

    def settings(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA", "r": self.s.rank, "lora_alpha": whole_number(self.s.alpha),
            "lora_dropout": self.s.dropout, "use_rslora": self.s.rslora, "use_dora": self.s.dora, "bias": "none",
            "fan_in_fan_out": False, "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {},
        }  # fmt: skip

    def fillers(self, name: str, linear: Linear, recipe: Recipe, seed: int) -> Iterator[tuple[str, Filler]]:
        """First values of its parameters; name: the linear's."""
        yield "a", self._drawn(seed)
        yield "b", constant(0.0)
        if self.magnitude is not None:
            held = torch.float32 if linear.stored is not None else linear.weight.dtype
            yield "magnitude", self._measured(recipe, f"{name}.weight", held)

    def _drawn(self, seed: int) -> Filler:
        """As kaiming_uniform_ with a = sqrt(5), each piece from its own name: equal whatever is fused or cut."""

        def fill(local: Tensor, offset: Shape) -> None:
            parts, bound = [], self.width**-0.5
            for module in self.hf:
                digest = hashlib.blake2b(f"{seed}:{module}.lora_A".encode(), digest_size=8).digest()
                generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest, "big") >> 1)
                whole = torch.empty(self.s.rank, self.width, device=local.device)
                parts.append(whole.uniform_(-bound, bound, generator=generator))
            rows, columns = (slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            local.copy_(torch.cat(parts)[rows, columns])

        return fill

    def _measured(self, recipe: Recipe, weight: str, dtype: torch.dtype) -> Filler:
        """Lengths of the rows of the weight in that type; of one stored in another form, of what it stands for."""

        def fill(local: Tensor, offset: Shape) -> None:
            each, group = sum(self.chosen_sizes), sum(self.sizes)
            first, last = offset[0] // each, -(-(offset[0] + len(local)) // each)  # groups that hold these rows
            rows = torch.empty((last - first) * group, self.width, device=local.device, dtype=dtype)
            recipe.fill(weight, rows, (first * group, 0))
            found = torch.linalg.vector_norm(self.pick(rows), dim=1, dtype=torch.float32)
            local.copy_(found[offset[0] - first * each :][: len(local)])

        return fill


def whole_number(value: float) -> float | int:
    """PEFT writes its alpha as a whole number, where it is one."""
    return int(value) if value == int(value) else value
