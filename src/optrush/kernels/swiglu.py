"""Gated feed-forward, x + down(silu(gate) * up), saving only gate and up for the backward pass.

Gate and up alternate along the last dimension (F, 2), like the decoder's rows, so one load reads a pair.

    gated_mlp             plain torch: the reference
    mlp_fused_activation  one kernel forward, one backward
    mlp_fused_down        also fuses the down matmul: the backward kernel recomputes the activation for the weight's
                          gradient, so it is not saved

Source: the kernel follows Liger Kernel (arXiv:2410.10989); recomputing the activation instead of saving it is Chen et
    al. (arXiv:1604.06174) applied to one operator. float32 inside, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.kernels import widen

Mlp = Callable[[Tensor | None, Tensor, Any, Any], Tensor]
"""(the stream x (..., D), h normalized from it (..., D), gate_up, down) -> x + down(silu(gate) * up) (..., D)

The stream is an argument because a matmul may add it while writing its result; None: it is not added."""


def gated_mlp(x: Tensor | None, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `Mlp` with torch operators; gate_up(h) is (..., F, 2)."""
    gate, up = _gate_and_up(gate_up(h))
    return _added(x, down(F.silu(gate) * up))


def gelu_mlp(x: Tensor | None, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `Mlp` with gelu, approximated by tanh, instead of silu."""
    gate, up = _gate_and_up(gate_up(h))
    return _added(x, down(F.gelu(gate, approximate="tanh") * up))


def plain_mlp(x: Tensor | None, h: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `Mlp` without a gate: x + down(gelu(up(h))), gelu approximated by tanh."""
    return _added(x, down(F.gelu(up(h), approximate="tanh")))


def _gate_and_up(pairs: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = pairs.view(*pairs.shape[:-1], -1, 2).unbind(-1)  # (..., F)
    return gate, up


def _added(x: Tensor | None, out: Tensor) -> Tensor:
    return out if x is None else x + out


def mlp_fused_activation(x: Tensor | None, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `Mlp` with one kernel each way; `down` may be any module, and saves its input."""
    return _added(x, down(fused_activation(gate_up(h))))


def fused_activation(pairs: Tensor) -> Tensor:
    """pairs (..., 2 F) -> silu(gate) * up (..., F), in one kernel each way, saving only the pairs."""
    product: Tensor = _Gated.apply(pairs)  # type: ignore[no-untyped-call]
    return product


def mlp_fused_down(x: Tensor | None, h: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    """Implement `Mlp` for a `down` that is a plain matrix: its input is not saved."""
    pairs: Tensor = gate_up(h)
    # Cast outside the Function, in autograd's graph: activation offloading uses it to recognize a parameter's copy.
    return _added(x, _Down.apply(pairs, down.weight.to(pairs.dtype)))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        product: Tensor = swiglu(gate_up)
        return product

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Tensor:
        gradient: Tensor = swiglu_backward(*ctx.saved_tensors, incoming[0])[0]
        return gradient


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        with torch.autocast(gate_up.device.type, enabled=False):
            return F.linear(swiglu(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        grad = incoming[0]  # (..., D)
        with torch.autocast(grad.device.type, enabled=False):
            d_gate_up, product = swiglu_backward(gate_up, grad @ weight)
            learns = ctx.needs_input_grad[1]
            d_weight = grad.flatten(0, -2).t() @ product.flatten(0, -2) if learns else None
        return d_gate_up, d_weight


@torch.library.custom_op("optrush::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2 F) contiguous -> silu(gate) * up (..., F), in its type."""
    if gate_up.is_cuda:
        from optrush.kernels.swiglu_triton import launch_swiglu_forward

        return launch_swiglu_forward(gate_up)
    gate, up = widen(gate_up).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2, 2).unbind(-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("optrush::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up (..., 2 F), gradient of the activation (..., F) -> gradient of gate_up, recomputed activation."""
    if gate_up.is_cuda:
        from optrush.kernels.swiglu_triton import launch_swiglu_backward

        return launch_swiglu_backward(gate_up, grad)
    gate, up = widen(gate_up).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2, 2).unbind(-1)
    wide = widen(grad)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = wide * up * (sigmoid + silu * (1 - sigmoid))
    both = torch.stack((d_gate, wide * silu), -1).flatten(-2)
    return both.to(gate_up.dtype), (silu * up).to(gate_up.dtype)


@swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(grad.shape)
