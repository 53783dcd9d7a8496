"""Triton kernel of the rotary embedding; rope.py has the mathematics. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # values per program, of half heads over tokens: 8 per thread, 16 bytes in bf16
WARPS = 4


def rope_forward(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `rope.rotation`."""
    B, T, K, group, E = qkv.shape
    q, k, v = (qkv.new_empty(B, T, n, E) for n in (K * (group - 2), K, K))
    _launch(qkv.contiguous(), q, k, v, cos, sin, K * group * E, back=False)
    return q, k, v


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, d_qkv: Tensor) -> Tensor:
    """Implement `rope.rotation_backward`, into d_qkv, whose tokens may have padding between them."""
    _launch(d_qkv, dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin, d_qkv.stride(1), back=True)
    return d_qkv


def _launch(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pitch: int, *, back: bool) -> None:
    assert qkv.dtype != torch.float64, "float32 inside"
    B, T, K, group, E = qkv.shape
    width = triton.next_power_of_2(E // 2)
    tokens = max(1, TILE // width)
    if qkv.numel():
        _turn[(triton.cdiv(B * T, tokens) * K,)](
            qkv, q, k, v, cos.contiguous(), sin.contiguous(), B * T, pitch,
            K=K, GROUP=group - 2, HALF=E // 2, WIDTH=width, TOKENS=tokens, BACK=back, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _turn(
    qkv, q, k, v, cos, sin, N, pitch,
    K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    BACK: tl.constexpr
):  # fmt: skip
    """Rotate one key/value head's group of TOKENS tokens, from qkv to q, k, v; or BACK, their gradients to qkv's.

    Concurrent programs process the same tokens, so their cosines are read from memory once. The next head is read
    before this one is written, because a compiler may not move a load over a store. pitch: stride between tokens of
    qkv.
    """
    kv = tl.program_id(0) % K
    token = (tl.program_id(0) // K).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    mask = (token < N)[:, None] & (column < HALF)[None, :]
    angle = token[:, None] * (2 * HALF) + column[None, :]
    c1 = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACK:  # the transpose
        s1, s2 = -s2, -s1
    source, target = _places(qkv, q, k, v, token[:, None], column[None, :], pitch, kv, 0, K, GROUP, HALF, BACK)
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    for head in tl.static_range(GROUP + 2):
        a, b, here = first, second, target
        if head < GROUP + 1:
            source, target = _places(
                qkv, q, k, v, token[:, None], column[None, :], pitch, kv, head + 1, K, GROUP, HALF, BACK
            )
            first = tl.load(source, mask=mask, other=0.0)
            second = tl.load(source + HALF, mask=mask, other=0.0)
        if head <= GROUP:
            x, y = a.to(tl.float32), b.to(tl.float32)
            a, b = x * c1 - y * s1, y * c2 + x * s2
        tl.store(here, a, mask=mask)
        tl.store(here + HALF, b, mask=mask)


@triton.jit
def _places(
    qkv, q, k, v, token, column, pitch, kv, head: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """Return the addresses from which a group's head (first half) is read, and to which it is written."""
    joint = qkv + token * pitch + (kv * (GROUP + 2) + head) * (2 * HALF) + column
    if head < GROUP:
        part = q + ((token * K + kv) * GROUP + head) * (2 * HALF) + column
    elif head == GROUP:
        part = k + (token * K + kv) * (2 * HALF) + column
    else:
        part = v + (token * K + kv) * (2 * HALF) + column
    if BACK:
        return part, joint
    else:
        return joint, part
