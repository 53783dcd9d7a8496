"""Groups of small parameters for the tests of AdamW's kernels; run as a program, Triton's against the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optrush.kernels import adamw as kernel

WHOLE = (slice(None),)


def group_of(
    rounding: kernel.Rounding,
    shapes: Sequence[tuple[int, ...]],
    *,
    cut: tuple[slice, ...] = WHOLE,
    betas: tuple[float, float] = (0.9, 0.999),
    decay: float = 0.1,
    wide: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> kernel.AdamWGroup:
    """Parameters of these shapes, or a piece of each; equal ones each time. wide: states in float32."""
    g = torch.Generator().manual_seed(3)
    weights = [torch.randn(s, generator=g).to(dtype) for s in shapes]
    pieces = [w[cut].contiguous().to(device) if w.dim() else w.to(device) for w in weights]
    offsets = [tuple((c.start or 0) for c in cut) + (0,) * (len(s) - len(cut)) for s in shapes]

    def states(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=dtype) for p in pieces]

    kind = torch.float32 if wide else torch.bfloat16
    return kernel.AdamWGroup(
        weights=pieces,
        means=states(kind),
        squares=states(kind),
        remainders=states(torch.bfloat16) if rounding == "kahan" else None,
        params=kernel.ParamTable(
            counts=torch.zeros(len(shapes), device=device),
            decays=torch.tensor([decay * (len(s) > 1) for s in shapes], dtype=torch.float64, device=device),
            words=torch.tensor([kernel.key_words(3, f"parameter {k}") for k in range(len(shapes))], device=device),
            spans=[kernel.shard_span(s, p.shape, o[: len(s)]) for s, p, o in zip(shapes, pieces, offsets)],
        ),
        betas=betas,
        eps=torch.tensor(1e-8).item(),
        rounding=rounding,
    )


def grads_of(shapes: Sequence[tuple[int, ...]], step: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [(torch.randn(s, generator=g) * 10.0 ** (step % 3 - 1)).to(dtype) for s in shapes]


def stepped(
    update: kernel.GroupUpdate,
    grads: Sequence[Tensor],
    step: int,
    *,
    scale: float = 1.0,
    bad: bool = False,
    first: int = 0,
) -> None:
    """One update; the rate falls like 1 / step."""
    device = grads[0].device
    rate, scale_, flag = (torch.tensor(v, device=device) for v in (1e-2 / step, scale, bad))
    update(grads, rate, scale_, flag, first)


def tensors(group: kernel.AdamWGroup) -> list[Tensor]:
    """All that an update changes."""
    return [*group.weights, *group.means, *group.squares, *(group.remainders or []), group.params.counts]


def compare(rounding: kernel.Rounding, aligned: bool, launcher: Any, device: str = "cpu") -> tuple[int, int]:
    """Values after six updates by the reference and by `launcher`, and how many of them differ.

    One is skipped, one is of some parameters only, one makes a weight nan; gradients and states in either width, and
    weights too where they are rounded to the nearest.
    """
    cases = [(False, WHOLE, torch.bfloat16), (True, (slice(None), slice(1, None)), torch.bfloat16)]
    if rounding == "nearest":
        cases.append((True, WHOLE, torch.float32))
    whole = [(8, 48), (16,), (2, 40)] if aligned else [(9, 11), (5,), (1,), (0, 3), (40, 2)]
    many = different = 0
    for wide, cut, dtype in cases:
        shapes = [s for s in whole if len(s) == 2] if len(cut) > 1 else whole
        one, other = (group_of(rounding, shapes, wide=wide, cut=cut, dtype=dtype, device=device) for _ in range(2))
        pair = kernel.ReferenceUpdate(one), launcher(other)
        assert pair[1].aligned == (aligned and len(cut) == 1) and pair[1].cut == (len(cut) > 1)
        for step in range(1, 7):
            kind = torch.float32 if wide else torch.bfloat16
            grads = [g[cut].contiguous().to(device) for g in grads_of(shapes, step, kind)]
            if step == 5:
                grads[0].view(-1)[0] = math.inf
            some = slice(1, 2) if step == 3 else slice(None)
            for update in pair:
                stepped(update, grads[some], step, scale=3.7**step, bad=step == 2, first=some.start or 0)
        for a, b in zip(tensors(one), tensors(other), strict=True):
            many += a.numel()
            different += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    return many, different


def edges(write: Callable[..., None], device: str = "cpu") -> Tensor:
    """Zeros, the least values, those about bfloat16's largest, inf and nan; each rounded with 64 draws."""
    raw = [0, 1, 0xFFFF, 0x7FFFFF, 0x800000, 0x7F7EFFFF, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    x = torch.tensor([*raw, *(n - (1 << 31) for n in raw)], dtype=torch.int32).view(torch.float32).repeat(64).to(device)
    key = kernel.step_key(torch.tensor([kernel.key_words(3, "edges")]), torch.ones(1))[0].to(device)
    out = torch.ones(len(x), dtype=torch.bfloat16, device=device)
    write(out, x, torch.tensor(False, device=device), key)
    return out.cpu()


def compare_writes(launch: Callable[..., None]) -> None:
    """Stochastic writes by the reference and by a kernel: every bit, but of nan."""
    g = torch.Generator().manual_seed(1)
    for many in (1, 256, 1000):
        value = torch.randn(many, generator=g) * 10.0 ** torch.randint(-30, 30, (many,), generator=g)
        value[::97] = math.inf
        value[5::97] = math.nan
        for shift, bad in ((0, False), (16, False), (0, True)):
            key = kernel.step_key(torch.tensor([kernel.key_words(many, "a")]), torch.tensor([3.0]))[0]
            sides = [torch.ones(many, dtype=torch.bfloat16) for _ in range(2)]
            for side, write in zip(sides, (kernel.write_stochastic, launch), strict=True):
                write(side, value, torch.tensor(bad), key, shift, (1 << 33) + 77)
            torch.testing.assert_close(*sides, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    from optrush.kernels import adamw_triton

    adamw_triton.WRITE_BLOCK = 256
    compare_writes(adamw_triton.launch_stochastic)
    torch.testing.assert_close(
        edges(adamw_triton.launch_stochastic),
        edges(kernel.write_stochastic),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    adamw_triton.PART, adamw_triton.BLOCK = 128, 64
    for rounding, aligned in itertools.product(("nearest", "stochastic", "kahan"), (True, False)):
        many, different = compare(rounding, aligned, adamw_triton.AdamWLauncher)  # type: ignore[arg-type]
        print(f"{rounding}, aligned {aligned}: {'equal' if not different else f'{different} of {many} differ'}")
