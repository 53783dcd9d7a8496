"""Linear layer and cross-entropy without logits in memory: exponentials from a matmul's epilogue (QuACK), bf16.

A row's exponents are relative to its label's logit, which one small kernel computes first. So the matmul's epilogue can
write E = 2^((z - z_label) log2 e - SHIFT), V values per row in bf16, and their sums S in float32, without a maximum and
without other tiles. Then the softmax is E / S and the loss ln S + SHIFT ln 2. With E_label - S at the label, E / S is
the gradient of the logits; 1 / S scales rows, and is applied to narrow matrices: dX = (E W) / S, dW = E^T (X / S). E is
computed once and multiplied twice: by cuBLAS, except that QuACK computes a dW that is written once in its final type.

If all rows fit into one chunk, both gradients are computed in the backward pass, where the incoming factor is
available: the weight's gradient is written once, in its final type. Otherwise the forward pass computes the chunks'
gradients, sums the weight's in float32, and the backward pass multiplies them by the factor.

bf16 represents 2^-126 to 2^127, so a loss is correct up to 132 nats, and its gradients up to about 110, where X / S
times the incoming factor underflows; a larger loss is infinite, which is detected. Exponentials 43 nats below the
label's logit lose digits and become 0. A loss near 0 has the logit's rounding error, and may be negative.

Source: an epilogue for QuACK's matmuls (https://github.com/Dao-AILab/quack, epilogue/frontend.py); QuACK's loss has
    exponents relative to tile maxima, and so needs matmuls that scale E while reading it.

Legend: N rows (tokens), D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from optrush.data.batch import IGNORE
from optrush.kernels import compute_dtype
from optrush.kernels.lora_matmul import matmul_to_dtype

SHIFT = 64.0  # subtracted from all exponents: the label's exponential is 2^-64
LOG2E = math.log2(math.e)
TILE_ROWS = 128  # rows per tile


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Return the () float32 sum of losses for hidden (N, D), weight (V, D), labels (N,) int64; -100 is ignored.

    Other labels must be from 0 to V - 1, which is not checked. bfloat16 (or autocast to it) on capability 9.0; V and
    chunk multiples of 128. No bias, scale or softcap. Allocates (chunk, V) bfloat16. One backward only; gradients are
    computed only if `torch.is_grad_enabled()`.
    """
    learns = torch.is_grad_enabled()  # inside a Function it is off
    total: Tensor = _Loss.apply(hidden, weight, labels.contiguous(), chunk, learns)  # type: ignore[no-untyped-call]
    return total


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, learns: bool) -> Tensor:
        kind, N = hidden.device.type, len(hidden)
        h_needs, w_needs = (learns and needs for needs in ctx.needs_input_grad[:2])
        dtype = compute_dtype(hidden)
        h, w = hidden.to(dtype).contiguous(), weight.to(dtype)  # loads need rows aligned to 16 bytes
        size = rows_per_chunk(N, chunk)
        e = h.new_empty(min(N, size), len(w))
        losses, inverse = (torch.empty(N, dtype=torch.float32, device=h.device) for _ in range(2))
        dh, dw, ones = torch.empty_like(h) if h_needs and size < N else None, None, losses.new_ones(())
        with torch.autocast(kind, enabled=False):
            for first in range(0, N, size):
                rows = slice(first, first + size)
                x, part = h[rows], e[: N - first]
                sums = exp_logits(x, w, label_offsets(x, w, labels[rows]), part)
                finish_rows(part, sums, labels[rows], losses[rows], inverse[rows])
                if size >= N:
                    break
                if dh is not None:
                    torch.mm(part, w, out=dh[rows])
                if w_needs:
                    dw = _add(dw, part.t(), scale_rows(x, inverse[rows], ones, torch.empty_like(x)))
        ctx.types, ctx.needs = (hidden.dtype, weight.dtype), (h_needs, w_needs)
        if size < N:
            ctx.buffers = inverse, dh, dw
        else:
            ctx.buffers = inverse, e
            ctx.save_for_backward(h, w)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.buffers is None:
            raise RuntimeError("quack's loss frees its buffers in the backward pass: one backward only")
        (inverse, *buffers), ctx.buffers, (h_needs, w_needs) = ctx.buffers, None, ctx.needs
        (h_dtype, w_dtype), dh, dw = ctx.types, None, None
        if len(buffers) == 2:
            dh, dw = buffers
            dw = None if dw is None else scale_to_dtype(dw, incoming[0], w_dtype)
        else:
            (e,), (h, w) = buffers, ctx.saved_tensors
            with torch.autocast(e.device.type, enabled=False):
                if w_needs:
                    x = scale_rows(h, inverse, incoming[0], torch.empty_like(h))
                    dw = weight_gradient(e, x) if w_dtype == h.dtype else _add(None, e.t(), x).to(w_dtype)
                if h_needs:
                    dh = e @ w
        if dh is not None:
            out = dh if dh.dtype == h_dtype else torch.empty_like(dh, dtype=h_dtype)
            dh = scale_rows(dh, inverse, incoming[0], out)
        return dh, dw, None, None, None


def rows_per_chunk(N: int, chunk: int) -> int:
    """Return the rows per chunk: up to `chunk`, a multiple of 128, evenly distributed; N if they fit into one chunk."""
    if chunk >= N:
        return max(N, 1)
    chunks = -(-N // chunk)
    return -(-N // (chunks * TILE_ROWS)) * TILE_ROWS


def _add(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to total (M, K) float32 in place; None: return the product. Tensor core sums are not rounded."""
    if total is None:
        return matmul_to_dtype(a, b, torch.float32)
    if a.dtype == torch.float32 or not a.is_cuda:
        return total.add_(matmul_to_dtype(a, b, torch.float32))
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


# --- Operators with a plain reference and a kernel for CUDA.


def label_offsets(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return z_label log2 e + SHIFT, (n,) float32, infinite if ignored; x (n, D), weight (V, D), labels (n,)."""
    if x.is_cuda:
        from optrush.kernels.linear_cross_entropy_triton import launch_label_offsets

        return launch_label_offsets(x, weight, labels, LOG2E, SHIFT)
    z = (x.float() * weight[labels.where(labels != IGNORE, 0)].float()).sum(1)
    return torch.where(labels == IGNORE, math.inf, z * LOG2E + SHIFT)


def exp_logits(x: Tensor, weight: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    """Write 2^(z log2 e - offset) into out (n, V); return unrounded float32 sums (n, any) over parts of the rows."""
    if x.is_cuda:
        from optrush.kernels import linear_cross_entropy_quack

        return linear_cross_entropy_quack.exp_logits_product(x, weight, offset, out)
    e = torch.exp2((x.float() @ weight.float().t()) * LOG2E - offset[:, None])
    out.copy_(e)
    return e.sum(1, keepdim=True)


def finish_rows(e: Tensor, sums: Tensor, labels: Tensor, losses: Tensor, inverse: Tensor) -> None:
    """Write losses (n,), 1 / S into inverse (n,), both 0 if ignored, and E_label - S at the label's place of e."""
    if e.is_cuda:
        from optrush.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.launch_finish_rows(e, sums, labels, losses, inverse, SHIFT)
    total, learnt = sums.sum(1), labels != IGNORE
    up = 2.0**SHIFT
    low = total < 1  # the log of the unscaled sum would cancel with SHIFT ln 2 and lose digits
    nats = torch.where(low, torch.log(total * up), torch.log(total) + math.log(up))
    losses.copy_(torch.where(learnt, nats, 0))
    inverse.copy_(torch.where(learnt, 1 / total, 0))
    rows = learnt.nonzero().squeeze(1)
    e[rows, labels[rows]] = (1 / up - total[rows]).to(e.dtype)
    return None


def weight_gradient(e: Tensor, x: Tensor) -> Tensor:
    """Compute e^T x (V, D) from e (n, V) and x (n, D), in their type."""
    if e.is_cuda and len(e):
        from optrush.kernels import linear_cross_entropy_quack

        return linear_cross_entropy_quack.transposed_product(e, x)
    return e.t() @ x


def scale_rows(x: Tensor, rows: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write x (n, D) * rows (n,) * factor () into out, which may be x; rounded once; 0 where `rows` is 0."""
    if x.is_cuda:
        from optrush.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.launch_scale_rows(x, rows, factor, out)
    return out.copy_(torch.where((rows == 0)[:, None], 0, x.float() * (rows * factor)[:, None]))


def scale_to_dtype(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute x * factor in float32, rounded once to `dtype`. If x has that type, x is overwritten.

    x: contiguous, of a floating type up to float32; factor: one float32, on x's device. torch's multiplication is
        slower, rounds the factor to the tensor's type, and needs a second pass for another type.
    """
    if x.is_cuda:
        from optrush.kernels.linear_cross_entropy_triton import launch_scale

        return launch_scale(x, factor, dtype)
    product = x * factor if x.dtype == torch.float32 else x.float() * factor
    return x.copy_(product) if dtype == x.dtype else product.to(dtype)
