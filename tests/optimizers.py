"""Parameters, gradients and steps for the tests of optimizers; run as a program, Triton's kernels against the
reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from optrush.config import Optim

OPTIM = Optim(lr=1e-2, weight_decay=0.1)
SIZES = {"a": (24, 300), "odd": (33, 257), "cube": (3, 8, 256), "norm": (5000,), "small": (9, 11), "one": ()}
ALL = slice(None)


def parameters(dtype: torch.dtype = torch.float32, sizes: Mapping[str, Any] = SIZES, rows: slice = ALL) -> list[Any]:
    """Parameters as an optimizer reads them; rows: this rank's shard of those with rows."""
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in sizes.items():
        full = torch.randn(shape, generator=g).to(dtype)
        offset = (rows.start or 0, *[0] * (len(shape) - 1))[: len(shape)]
        local = full[rows].clone() if shape else full
        place = {"full_shape": shape, "offset": offset, "decays": len(shape) > 1}
        found.append(SimpleNamespace(name=name, local=local, grad=None, **place))
    return found


def gradients(step: int, sizes: Mapping[str, Any] = SIZES, rows: slice = ALL) -> Iterator[Tensor]:
    """Of wide range within a row, some exactly zero, another magnitude each step."""
    g = torch.Generator().manual_seed(step)
    for shape in sizes.values():
        x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape, generator=g))
        x = x * (torch.rand(shape, generator=g) > 0.1) * 10.0 ** (step % 3 - 2)
        yield x[rows] if shape else x


def stepped(
    optimizer: Any, params: list[Any], n: int = 1, *, first: int = 1, scale: float = 1.0, bad: bool = False,
    only: Sequence[int] | None = None, sizes: Mapping[str, Any] = SIZES, rows: slice = ALL,
) -> None:  # fmt: skip
    """n updates at a rate that falls like 1 / step."""
    for step in range(first, first + n):
        for t, g in zip(params, gradients(step, sizes, rows), strict=True):
            t.grad = (g * scale).to(t.local.dtype)
        optimizer.step(torch.tensor(OPTIM.lr / step), torch.tensor(float(scale)), torch.tensor(bad), only=only)


def everything(params: list[Any], optimizer: Any) -> dict[str, Tensor]:
    """Copies of weights and states."""
    states = {f"{n} {k}": s.clone() for n, by in optimizer.state().items() for k, s in by.items()}
    return {t.name: t.local.clone() for t in params} | states


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interpreted() -> None:
    """Kernels of 8-bit and 4-bit moments over some steps: every bit of weights, codes, scales and counts."""
    from optrush.kernels.adam8bit_triton import QuantizedLauncher
    from optrush.optim.adam8bit import Adam4bit, Adam8bit

    whole = {
        "whole": (8, 512), "odd": (33, 257), "a": (24, 300), "norm": (5000,), "small": (9, 11), "b": (3, 100, 16),
        "thin": (330, 13),
    }  # fmt: skip
    cases = itertools.product((Adam8bit, Adam4bit), (torch.float32, torch.bfloat16), (ALL, slice(1, 3)))
    for kind, dtype, rows in cases:
        sizes = whole if rows == ALL else {"whole": (4, 1024), "a": (24, 300)}
        for names, rounding in itertools.product((list(sizes), ["whole"]), ("nearest", "stochastic")):
            if (dtype, rounding) == (torch.float32, "stochastic"):
                continue  # float32 weights are not rounded
            chosen = {n: sizes[n] for n in names}
            sides = [parameters(dtype, chosen, rows) for _ in range(2)]
            one, two = (kind(side, OPTIM, rounding=rounding, seed=5) for side in sides)  # type: ignore[arg-type]
            two.updates = [QuantizedLauncher(group) for group in two.groups]
            assert any(u.halves for u in two.updates) == (kind is Adam4bit)
            for step in range(1, 4):
                for ours, side in zip((one, two), sides, strict=True):
                    stepped(ours, side, first=step, scale=8.0, bad=step == 2, sizes=chosen, rows=rows)
                    stepped(ours, side, first=step, scale=8.0, only=[len(chosen) - 1], sizes=chosen, rows=rows)
                a, b = everything(sides[0], one), everything(sides[1], two)
                assert same(a, b), (kind, dtype, rounding, rows, names, step)
    print("equal")


if __name__ == "__main__":
    interpreted()
