"""A large tensor times a number that is on the device, in place or into a narrower type, in one pass.

torch's own product with a number on the device is one of its slower kernels, takes the number in the tensor's type (in
bfloat16 eight of its bits), and needs a second pass for another type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from optrush.data.batch import IGNORE
from optrush.kernels.lora_matmul import summed


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in `dtype`: the product in float32, rounded once. Where x has that type, x itself is overwritten.

    Args:
        x: contiguous, of a floating type up to float32.
        factor: one float32, on x's device.
    """
    if x.is_cuda:
        from optrush.kernels.linear_cross_entropy_triton import launch

        return launch(x, factor, dtype)
    product = x * factor if x.dtype == torch.float32 else x.float() * factor
    return x.copy_(product) if dtype == x.dtype else product.to(dtype)


# --- Linear layer and cross-entropy by exponents: no logits are written, and three plain products are left.
#
# A row's exponents are taken relative to the logit of its own label, which one small kernel finds beforehand. So the
# product's epilogue can write E = 2^((z - z_label) log2 e - SHIFT), V values a row in bf16, and their sums S in
# float32, without a maximum and without looking at other tiles. Then the softmax is E / S and the loss ln S + SHIFT ln
# 2. With E_label - S in its label's place, E / S is the gradient of the logits, and 1 / S is a factor of rows, which
# narrow matrices take: dX = (E W) / S, dW = E^T (X / S). E is made once and multiplied twice: by cuBLAS, but dW by
# QuACK where it is written once in its own type.
#
# Where all rows fit into one chunk, both are made in the backward pass, which knows the incoming factor by then: the
# weight's gradient is written once, in its own type. Otherwise the chunks' gradients are made in turn in the forward
# pass, the weight's summed in float32, and multiplied by the factor in the backward pass.
#
# bf16 holds 2^-126 to 2^127, so a loss is right up to 132 nats, and its gradients up to about 110, where X / S times
# the incoming factor goes under; a loss beyond is infinite, and is seen as such. What is 43 nats below the label's
# logit loses digits and becomes 0. A loss near 0 is right to the rounding of the logit: it may be a hundred-thousandth
# below.
#
# Source: the epilogue is written for QuACK's products (https://github.com/Dao-AILab/quack, epilogue/frontend.py), whose
# own loss (linear_cross_entropy.py) writes exponents relative to maxima of tiles, and so needs products that scale E
# while they read it.
#
# Legend: N rows (tokens), D width, V vocabulary.


SHIFT = 64.0  # binary places by which exponents are moved down: a label's own is 2^-64
LOG2E = math.log2(math.e)
STEP = 128  # rows of a tile


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """hidden (N, D), weight (V, D), labels (N,) int64 -> () float32, the sum over labels that are not -100.

    The others are from 0 to V - 1, which a kernel does not check. bfloat16 (autocast's too) on capability 9.0; V and
    chunk multiples of 128. No bias, scale, softcap or row weights. Holds (chunk, V) bfloat16. The gradients can be had
    once; without `torch.is_grad_enabled` none are made.
    """
    learns = torch.is_grad_enabled()  # in a Function it never is
    total: Tensor = _Loss.apply(hidden, weight, labels.contiguous(), chunk, learns)  # type: ignore[no-untyped-call]
    return total


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, learns: bool) -> Tensor:
        kind, N = hidden.device.type, len(hidden)
        h_needs, w_needs = (learns and needs for needs in ctx.needs_input_grad[:2])
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        h, w = hidden.to(dtype).contiguous(), weight.to(dtype)  # loads want rows that begin at 16 bytes
        size = even(N, chunk)
        e = h.new_empty(min(N, size), len(w))
        losses, inverse = (torch.empty(N, dtype=torch.float32, device=h.device) for _ in range(2))
        dh, dw, one = torch.empty_like(h) if h_needs and size < N else None, None, losses.new_ones(())
        with torch.autocast(kind, enabled=False):
            for first in range(0, N, size):
                rows = slice(first, first + size)
                x, part = h[rows], e[: N - first]
                sums = exponents(x, w, offsets(x, w, labels[rows]), part)
                settle(part, sums, labels[rows], losses[rows], inverse[rows])
                if size >= N:
                    break
                if dh is not None:
                    torch.mm(part, w, out=dh[rows])
                if w_needs:
                    dw = _add(dw, part.t(), rows_scaled(x, inverse[rows], one, torch.empty_like(x)))
        ctx.types, ctx.needs = (hidden.dtype, weight.dtype), (h_needs, w_needs)
        if size < N:
            ctx.made = inverse, dh, dw
        else:
            ctx.made = inverse, e
            ctx.save_for_backward(h, w)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("quack's loss gives its gradients once: what they are made of is gone")
        (inverse, *made), ctx.made, (h_needs, w_needs) = ctx.made, None, ctx.needs
        (h_dtype, w_dtype), dh, dw = ctx.types, None, None
        if len(made) == 2:
            dh, dw = made
            dw = None if dw is None else scaled(dw, incoming[0], w_dtype)
        else:
            (e,), (h, w) = made, ctx.saved_tensors
            with torch.autocast(e.device.type, enabled=False):
                if w_needs:
                    x = rows_scaled(h, inverse, incoming[0], torch.empty_like(h))
                    dw = weight_gradient(e, x) if w_dtype == h.dtype else _add(None, e.t(), x).to(w_dtype)
                if h_needs:
                    dh = e @ w
        if dh is not None:
            out = dh if dh.dtype == h_dtype else torch.empty_like(dh, dtype=h_dtype)
            dh = rows_scaled(dh, inverse, incoming[0], out)
        return dh, dw, None, None, None


def even(N: int, chunk: int) -> int:
    """Rows a chunk: up to `chunk`, a multiple of 128, about as many in each; all N where they fit into one."""
    if chunk >= N:
        return max(N, 1)
    chunks = -(-N // chunk)
    return -(-N // (chunks * STEP)) * STEP


def _add(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total (M, K) float32 + a @ b, in place; a new one where there is none. Tensor cores' sums are not rounded."""
    if total is None:
        return summed(a, b, torch.float32)
    if a.dtype == torch.float32 or not a.is_cuda:
        return total.add_(summed(a, b, torch.float32))
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


# What follows has a plain form, which says what it means, and a kernel for CUDA.


def offsets(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """x (n, D), weight (V, D), labels (n,) -> (n,) float32: z_label log2 e + SHIFT, infinite where ignored."""
    if x.is_cuda:
        from optrush.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.offsets(x, weight, labels, LOG2E, SHIFT)
    z = (x.float() * weight[labels.where(labels != IGNORE, 0)].float()).sum(1)
    return torch.where(labels == IGNORE, math.inf, z * LOG2E + SHIFT)


def exponents(x: Tensor, weight: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    """Writes 2^(z log2 e - offset) into out (n, V); returns float32 sums (n, any) of parts of its rows, unrounded."""
    if x.is_cuda:
        from optrush.kernels import linear_cross_entropy_quack

        return linear_cross_entropy_quack.product(x, weight, offset, out)
    e = torch.exp2((x.float() @ weight.float().t()) * LOG2E - offset[:, None])
    out.copy_(e)
    return e.sum(1, keepdim=True)


def settle(e: Tensor, sums: Tensor, labels: Tensor, losses: Tensor, inverse: Tensor) -> None:
    """Writes losses (n,), 1 / S into inverse (n,), both 0 where ignored, and E_label - S in the label's place of e."""
    if e.is_cuda:
        from optrush.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.settle(e, sums, labels, losses, inverse, SHIFT)
    total, learnt = sums.sum(1), labels != IGNORE
    up = 2.0**SHIFT
    low = total < 1  # the sum of two large numbers of which little is left would lose digits
    nats = torch.where(low, torch.log(total * up), torch.log(total) + math.log(up))
    losses.copy_(torch.where(learnt, nats, 0))
    inverse.copy_(torch.where(learnt, 1 / total, 0))
    rows = learnt.nonzero().squeeze(1)
    e[rows, labels[rows]] = (1 / up - total[rows]).to(e.dtype)
    return None


def weight_gradient(e: Tensor, x: Tensor) -> Tensor:
    """e (n, V), x (n, D) -> e^T x (V, D), in their type."""
    if e.is_cuda and len(e):
        from optrush.kernels import linear_cross_entropy_quack

        return linear_cross_entropy_quack.weight_gradient(e, x)
    return e.t() @ x


def rows_scaled(x: Tensor, rows: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """x (n, D) * rows (n,) * factor () into out, which may be x; rounded once; 0 where `rows` is, whatever x is."""
    if x.is_cuda:
        from optrush.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.rows_scaled(x, rows, factor, out)
    return out.copy_(torch.where((rows == 0)[:, None], 0, x.float() * (rows * factor)[:, None]))
