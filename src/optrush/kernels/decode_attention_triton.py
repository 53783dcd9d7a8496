"""Triton kernel of attention from each cache slot's new token to its slot; models/kv_cache.py. Imported on CUDA only.

A program reads the keys and values of one slot and key/value head, or a part of them, once for all query heads of the
group; the new token's key and value come from the arguments and are written to the cache. So one launch serves slots of
different lengths, reads nothing beyond them, and can be replayed in a CUDA graph.

Shapes: S slots, C tokens of capacity per slot, K key/value heads, H query heads, E head width, W width of the values.
Source: the split over keys follows Flash-Decoding, https://pytorch.org/blog/flash-decoding/
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 16384  # of keys that a program reads together, 16 to 128 tokens; also of values. Two more are prefetched
PROGRAMS = 512  # with fewer, a slot's keys are split: a few per multiprocessor
MOST = 16  # parts per slot


@torch.library.custom_op("optrush::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, sinks: Tensor | None,
    window: int, cap: float,
) -> Tensor:  # fmt: skip
    """Write the new token's key and value to its slot, and attend from it to the slot.

    Args:
        q: (S, H, E); k: (S, K, E) and v: (S, K, W) of the new token.
        keys, values: (S or more, C, K, E) and (.., W).
        lengths: (S,) int64 tokens including the new one; 0: an empty slot, which returns 0 and writes nothing.
        sinks: (H,) logits in the softmax's sum without a value.
        window: tokens to read, including the new one; 0: all.
        cap: bound of the scores by a tanh; 0: no bound.

    Returns:
        (S, H, W) in q's type.
    """
    q, k, v = q.contiguous(), k.to(keys.dtype).contiguous(), v.to(values.dtype).contiguous()
    S, H, E = q.shape
    K, W = v.shape[1:]
    wide, wide_out = (triton.next_power_of_2(max(n, 16)) for n in (E, W))
    tokens = max(16, min(128, BYTES // (keys.element_size() * max(wide, wide_out))))
    parts = max(1, min(MOST, triton.cdiv(PROGRAMS, S * K), triton.cdiv(keys.shape[1], tokens)))
    out = torch.empty(S, parts, H, W, dtype=torch.float32 if parts > 1 else q.dtype, device=q.device)
    top, total = (torch.empty(S, parts, H, dtype=torch.float32, device=q.device) for _ in range(2))
    _attend[(S, K, parts)](
        q, k, v, keys, values, lengths, q if sinks is None else sinks, out, top, total,
        H, E, W, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), E**-0.5, window, cap,
        PARTS=parts, GROUP=H // K, ROWS=max(16, triton.next_power_of_2(H // K)), KEYS=tokens,
        WIDE=wide, OUT=wide_out, SINKS=sinks is not None, WINDOW=window > 0, CAP=cap > 0, num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts == 1:
        return out[:, 0]
    weight = (top - top.amax(1, keepdim=True).clamp_min(-1e30)).exp()  # (S, parts, H)
    mass = (weight * total).sum(1).clamp_min(1e-30)
    return ((weight[..., None] * out).sum(1) / mass[..., None]).to(q.dtype)


@decode_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, sinks: Tensor | None,
    window: int, cap: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:2], v.shape[-1])


@triton.jit
def _attend(
    q, k, v, keys, values, lengths, sinks, out, top, total, H, E, W, key_slot, key_token, value_slot, value_token,
    scale, window, cap, PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, OUT: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Process one slot, key/value head and part: rows are the query heads of the group."""
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    length = tl.load(lengths + slot).to(tl.int32)
    past = tl.maximum(length - 1, 0)
    begin = past * 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
    each = tl.cdiv(tl.cdiv(past - begin, PARTS), KEYS) * KEYS
    first = begin + part * each
    last = tl.minimum(first + each, past)

    row, wide, wide_out, key = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, OUT), tl.arange(0, KEYS)
    group = row < GROUP
    query = slot * H + head * GROUP + row
    x = tl.load(q + query[:, None] * E + wide[None, :], mask=group[:, None] & (wide < E)[None, :], other=0.0)
    a = x.to(keys.dtype.element_ty)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, OUT], tl.float32)
    if part == 0:  # noqa: SIM102 - `and` of tensors does not short-circuit
        if length > 0:
            start = (slot * heads + head) * E
            new = tl.load(k + start + wide, mask=wide < E, other=0.0)
            start = (slot * heads + head) * W
            held = tl.load(v + start + wide_out, mask=wide_out < W, other=0.0)
            tl.store(keys + slot * key_slot + past * key_token + head * E + wide, new, mask=wide < E)
            tl.store(values + slot * value_slot + past * value_token + head * W + wide_out, held, mask=wide_out < W)
            high = tl.sum(a.to(tl.float32) * new.to(tl.float32)[None, :], 1) * scale
            if CAP:
                high = _bounded(high, cap)
            mass += 1.0
            mixed += held.to(tl.float32)[None, :]
            if SINKS:
                sink = tl.load(sinks + head * GROUP + row, mask=group, other=0.0).to(tl.float32)
                higher = tl.maximum(high, sink)
                kept = tl.exp(high - higher)
                mixed *= kept[:, None]
                mass = kept + tl.exp(sink - higher)
                high = higher
    for at in range(first, last, KEYS):
        place = at + key
        mask = place < last
        held_key = tl.load(
            keys + slot * key_slot + place[None, :].to(tl.int64) * key_token + head * E + wide[:, None],
            mask=mask[None, :] & (wide < E)[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(a, held_key, input_precision="ieee") * scale
        if CAP:
            score = _bounded(score, cap)
        score = tl.where(mask[None, :], score, float("-inf"))
        higher = tl.maximum(high, tl.max(score, 1))
        kept = tl.exp(high - higher)
        p = tl.exp(score - higher[:, None])
        held_value = tl.load(
            values + slot * value_slot + place[:, None].to(tl.int64) * value_token + head * W + wide_out[None, :],
            mask=mask[:, None] & (wide_out < W)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * kept[:, None] + tl.dot(p.to(held_value.dtype), held_value, input_precision="ieee")
        mass = mass * kept + tl.sum(p, 1)
        high = higher
    if PARTS == 1:
        mixed = mixed / tl.maximum(mass, 1e-30)[:, None]
    else:
        at_row = (slot * PARTS + part) * H + head * GROUP + row
        tl.store(top + at_row, high, mask=group)
        tl.store(total + at_row, mass, mask=group)
    to = ((slot * PARTS + part) * H + head * GROUP + row)[:, None] * W + wide_out[None, :]
    tl.store(out + to, mixed, mask=group[:, None] & (wide_out < W)[None, :])


@triton.jit
def _bounded(x, cap):
    """Return cap tanh(x / cap)."""
    e = tl.exp(-2 * tl.abs(x) / cap)
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t) * cap
