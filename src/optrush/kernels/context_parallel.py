"""Compute causal attention over rows whose tokens are sharded over the ranks of an axis. All kinds have one signature:

    attend(q (B, T/n, H, E), k (B, T/n, K, E), v (B, T/n, K, E), documents of the full rows) -> (B, T/n, H, E)

    ulysses  exchanges tokens for heads around any kernel of attention.py, which gets full rows of H/n heads
    gather   gathers keys and values of full rows; each rank's queries attend to the keys that are not later
    ring     passes keys and values from rank to rank; partial results are joined by their log-sum-exp

With ulysses a rank has consecutive tokens, since heads are shared evenly. With gather and ring it has the r-th of 2 n
chunks from the start and the r-th from the end, since early tokens read few keys and late tokens many.

Sources: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509; gathered keys as in Llama 3, https://arxiv.org/abs/2407.21783;
ring attention, https://arxiv.org/abs/2310.01889; chunks from both ends, https://github.com/zhuzilin/ring-flash-attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels import compute_dtype, widen
from optrush.kernels.attention import Attend, AttendFrom, repeat_heads


@dataclass(frozen=True)
class Share:
    """The tokens of a row on this rank."""

    group: dist.ProcessGroup
    ranks: int  # n
    rank: int
    both_ends: bool  # a chunk from the start and one from the end; else consecutive tokens

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks of a row, as indices of n or 2 n."""
        return (self.rank, 2 * self.ranks - 1 - self.rank) if self.both_ends else (self.rank,)

    def cut(self, t: Tensor) -> Tensor:
        """Return this rank's tokens of full rows, (B, T) -> (B, T/n)."""
        width = t.shape[1] // (self.ranks * len(self.chunks))
        assert t.shape[1] == width * self.ranks * len(self.chunks), "rows of another width than batch.seq"
        return torch.cat([t[:, i * width : (i + 1) * width] for i in self.chunks], 1)


def ulysses(attend: Attend, share: Share) -> Attend:
    """Exchange tokens for heads, (B, T/n, H, E) -> (B, T, H/n, E), and back, around any attention."""
    n = share.ranks

    def exchanged(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        B, t, H, E = q.shape
        if k.shape[2] < n:  # query heads of several ranks read the same key/value head
            k, v = repeat_heads(k, n), repeat_heads(v, n)
        # One exchange for all three: each rank gets its heads of every token.
        sent = torch.cat([x.reshape(B, t, n, -1, E) for x in (q, k, v)], 3).movedim(2, 0)  # (n, B, T/n, h, E)
        heads = _exchange(sent, share).movedim(0, 1).flatten(1, 2)  # (B, T, h, E)
        keys = (H + k.shape[2]) // n
        out = attend(heads[:, :, : H // n], heads[:, :, H // n : keys], heads[:, :, keys:], documents)  # (B, T, H/n, E)
        return _exchange(out.reshape(B, n, t, H // n, E).movedim(1, 0), share).movedim(0, 2).flatten(2, 3)

    return exchanged


def _exchange(sent: Tensor, share: Share) -> Tensor:
    """Send the i-th of n parts to rank i; return what each rank sent to this one, (n, ...)."""
    return all_to_all_single_autograd(sent.contiguous(), None, None, share.group)


def gather(attend: AttendFrom, share: Share) -> Attend:
    """Gather keys and values of full rows, and attend to them from this rank's two chunks of queries."""

    def gathered(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        B, t, K, E = k.shape
        c = t // 2
        local = torch.stack((k, v)).view(2, B, 2, c, K, E)
        everyones = all_gather_tensor_autograd(local, 0, share.group).view(share.ranks, 2, B, 2, c, K, E)
        early, late = everyones.unbind(3)
        rows = torch.cat((early, late.flip(0)))  # the chunks of a row in order: (2 n, 2, B, c, K, E)
        k, v = rows.movedim(0, 2).flatten(2, 3).unbind(0)  # (B, T, K, E)
        ends = [(i + 1) * c for i in share.chunks]
        parts = [attend(x, k[:, :s], v[:, :s], documents) for x, s in zip(q.chunk(2, 1), ends, strict=True)]
        return torch.cat(parts, 1)

    return gathered


def ring(share: Share) -> Attend:
    """Pass keys and values around the ranks, for rows of one document."""

    def passed(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        if not documents.single:
            raise NeedsError("ring attention", "rows of several documents", "use context:kind=gather or ulysses")
        q, k, v = (t.to(compute_dtype(t)).transpose(1, 2) for t in (q, k, v))  # (B, heads, T/n, E)
        out: Tensor = _Ring.apply(q, k, v, share)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    return passed


class _Ring(torch.autograd.Function):
    """q (B, H, t, E), k and v (B, K, t, E) of this rank's two chunks -> (B, H, t, E).

    All queries read only the first chunk of an earlier rank's keys; only the second chunk of queries reads a later
    rank's keys, both chunks. So no mask is needed, and each turn computes half a rank's square of scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        keys = torch.stack((k, v))
        for turn in range(share.ranks):
            passing = _Passing(keys, share) if turn < share.ranks - 1 else None
            rows, columns = _read(share, turn, q.shape[2])
            part, part_lse = _attend(q[:, :, rows], *keys[:, :, :, columns], causal=turn == 0)
            if turn == 0:
                out, lse = widen(part), part_lse
            else:
                both = torch.logaddexp(lse[:, :, rows], part_lse)
                old, new = torch.exp(lse[:, :, rows] - both), torch.exp(part_lse - both)
                out[:, :, rows] = out[:, :, rows] * old[..., None] + part * new[..., None]
                lse[:, :, rows] = both
            if passing is not None:
                keys = passing.arrived()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share = share
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        share, grad, keys = ctx.share, incoming[0].to(q.dtype), torch.stack((k, v))
        d_q, under_way = torch.zeros_like(q, dtype=lse.dtype), None
        for turn in range(share.ranks):
            passing = _Passing(keys, share) if turn < share.ranks - 1 else None
            rows, columns = _read(share, turn, q.shape[2])
            parts = (grad[:, :, rows], q[:, :, rows], *keys[:, :, :, columns], out[:, :, rows], lse[:, :, rows])
            part_q, part_k, part_v = _gradients(*parts, causal=turn == 0)
            d_q[:, :, rows] += part_q
            # Earlier ranks' sums of the gradients of these keys, passed on together with the keys.
            d_keys = torch.zeros_like(keys, dtype=lse.dtype) if under_way is None else under_way.arrived()
            d_keys[0, :, :, columns] += part_k
            d_keys[1, :, :, columns] += part_v
            under_way = _Passing(d_keys, share)
            if passing is not None:
                keys = passing.arrived()
        assert under_way is not None
        d_k, d_v = under_way.arrived().to(k.dtype)  # back on their own rank
        return d_q.to(q.dtype), d_k, d_v, None


class _Passing:
    """A tensor being sent to the next rank, and the previous rank's tensor being received."""

    def __init__(self, sent: Tensor, share: Share) -> None:
        self.sent, self.coming = sent, torch.empty_like(sent)
        to, come = (share.rank + 1) % share.ranks, (share.rank - 1) % share.ranks
        ops = [
            dist.P2POp(dist.isend, sent, group=share.group, group_peer=to),
            dist.P2POp(dist.irecv, self.coming, group=share.group, group_peer=come),
        ]
        self.work = dist.batch_isend_irecv(ops)

    def arrived(self) -> Tensor:
        for work in self.work:
            work.wait()
        return self.coming


def _read(share: Share, turn: int, tokens: int) -> tuple[slice, slice]:
    """Return which of this rank's queries read which of the current keys, from rank (r - turn) % n."""
    half, full = tokens // 2, slice(0, tokens)
    if turn == 0:
        return full, full
    return (full, slice(0, half)) if turn <= share.rank else (slice(half, tokens), full)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(B, H, t, E), (B, K, s, E) -> output (B, H, t, E) and log-sum-exp of its scores (B, H, t)."""
    k, v = (_repeated(t, q) for t in (k, v))
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, ...]:
    """Compute the gradients for these keys alone; the only difference to usual: `out` and `lse` include all keys."""
    K, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (_repeated(t, q) for t in (k, v))
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is off
        sizes = (None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0])
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), *sizes
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    d_q, *d_keys = gradients
    return d_q, *(t.unflatten(1, (K, group)).sum(2, dtype=lse.dtype) for t in d_keys)


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)
