"""Triton kernel that draws and stores one token per slot from its logits (models/sampling.py). CUDA only.

A program reads a slot's logits three times, only once from memory: for the maximum, the sum of exponentials, and the
token at which that sum passes the random number. It is the number of `sampling.uniform`, computed in integers.

Shapes: S slots, V vocabulary, A tokens per answer, N end tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # logits per tile of a program
M1, M2, STEP = (tl.constexpr(x) for x in (-4658895280553007687, -7723592293110705685, -7046029254386353131))


def draw(
    logits: Tensor, who: Tensor, keys: tuple[Tensor, Tensor, Tensor], token: Tensor, live: Tensor, ended: Tensor,
    kept: tuple[Tensor, Tensor, Tensor], ends: Tensor, *, seed: int, temperature: float, most: int,
) -> None:  # fmt: skip
    """Draw a token for the slots of a mask, and end finished answers; writes all but `logits`, `who` and `ends`.

    Args:
        logits: (S, V) float32.
        who: (S,) bool.
        keys: prompt, member, and tokens of the answer so far; (S,) int64 each. The last is incremented.
        token: (S,) int64.
        live, ended: (S,) bool.
        kept: tokens (S, A) int64, their log-probabilities and the entropies (S, A) float32.
        ends: (N,) int64.
        temperature: 0 takes the likeliest token, the first of equals.
        most: maximum tokens per answer.
    """
    S, V = logits.shape
    number, member, made = keys
    out, log_p, entropy = kept
    _draw[(S,)](
        logits.contiguous(), who, number, member, made, token, live, ended, out, log_p, entropy, ends, V, out.stride(0),
        len(ends), seed, 1 / (temperature or 1), most,
        GREEDY=temperature == 0, TILE=TILE, ENDS=triton.next_power_of_2(max(1, len(ends))), num_warps=8,
    )  # fmt: skip


@triton.jit
def _draw(
    logits, who, number, member, made, token, live, ended, out, log_p, entropy, ends, V, width, N, seed, factor, most,
    GREEDY: tl.constexpr, TILE: tl.constexpr, ENDS: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(who + slot):
        lane = tl.arange(0, TILE)
        row = logits + slot * V
        high = tl.full([TILE], float("-inf"), tl.float32)
        place = tl.zeros([TILE], tl.int32)
        for at in range(0, V, TILE):
            x = tl.load(row + at + lane, mask=at + lane < V, other=float("-inf"))
            place = tl.where(x > high, at + lane, place)
            high = tl.maximum(x, high)
        top = tl.max(high, 0) * factor
        chosen = tl.min(tl.where(high == tl.max(high, 0), place, V), 0)
        total = 0.0
        mixed = 0.0
        for at in range(0, V, TILE):
            x = tl.load(row + at + lane, mask=at + lane < V, other=float("-inf")) * factor
            e = tl.exp(x - top)
            total += tl.sum(e, 0)
            mixed += tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        lse = top + tl.log(total)
        length = tl.load(made + slot)
        if not GREEDY:
            state = _mixed(tl.full([1], 0, tl.int64) + seed)
            state = _mixed(state ^ tl.load(number + slot))
            state = _mixed(state ^ tl.load(member + slot))
            state = _mixed(state ^ length)
            share = ((state >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
            point = tl.minimum(tl.sum(share, 0).to(tl.float32), 0.99999994) * total
            below = 0.0
            for at in range(0, V, TILE):
                x = tl.load(row + at + lane, mask=at + lane < V, other=float("-inf")) * factor
                e = tl.exp(x - top)
                more = tl.sum(e, 0)
                if (below <= point) & (point < below + more):
                    last = tl.max(tl.where(e > 0, lane, 0), 0)  # if sums in another order do not pass it
                    passes = (below + tl.cumsum(e, 0) > point) & (e > 0)  # such sums may increase without an addend
                    chosen = at + tl.min(tl.where(passes, lane, last), 0)
                below += more
        x = tl.load(row + chosen) * factor
        column = slot * width + tl.minimum(length, most - 1)
        tl.store(out + column, chosen.to(tl.int64))
        tl.store(log_p + column, x - lse)
        tl.store(entropy + column, lse - mixed / total)
        tl.store(token + slot, chosen.to(tl.int64))
        tl.store(made + slot, length + 1)
        end = tl.arange(0, ENDS)
        stops = tl.load(ends + end, mask=end < N, other=-1)
        is_end = tl.max((stops == chosen).to(tl.int32), 0) > 0
        if is_end:
            tl.store(ended + slot, True)
        if is_end | (length + 1 >= most):
            tl.store(live + slot, False)


@triton.jit
def _mixed(state):
    """Mix the state with SplitMix64, like `sampling.uniform`."""
    state = state + STEP
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * M1
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * M2
    return state ^ ((state >> 31) & 0x1FFFFFFFF)
