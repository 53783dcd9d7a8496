"""Kernels that only a GPU runs, each against a reference in float32."""

import os
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.kernels import adamw, attention, cross_entropy, linear_cross_entropy, lora_matmul, rms_norm, rope, swiglu
from optrush.kernels.attention import flash4
from optrush.kernels.cross_entropy import liger
from optrush.kernels.linear_cross_entropy import scale_to_dtype
from optrush.kernels.lora_matmul import Padding, with_padding
from optrush.models import delta_rule
from optrush.models.decoder import Linear
from optrush.models.experts import Experts, grouped_matmul
from optrush.models.shapes import SHAPES, ModelShape
from optrush.peft.adapter import AdapterToggle, place
from optrush.peft.lora import Lora, Settings, pad_weight
from optrush.peft.quantized import Form, QuantizedLinear
from optrush.technique import library
from optrush.techniques.attention import check_package

from updates import edges


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gated_activation(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 1111, 2 * 96, device="cuda", dtype=dtype)
    g = torch.randn(3, 1111, 96, device="cuda", dtype=dtype)
    close = 1e-6 if dtype == torch.float32 else 3e-3
    wide = x.float().cpu()
    assert off(swiglu.swiglu(x).cpu(), swiglu.swiglu(wide)) < close
    for got, want in zip(swiglu.swiglu_backward(x, g), swiglu.swiglu_backward(wide, g.float().cpu()), strict=True):
        assert off(got.cpu(), want) < close


@pytest.mark.parametrize("single", [False, True], ids=["packed", "single"])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kernel", [attention.varlen, attention.flash4])
def test_sinks_and_windows(kernel, window, compiled, single):
    """Values and gradients, against whole scores in float32."""
    if kernel is attention.flash4 and library("flash-attn-4") is None:
        pytest.skip("flash-attn-4 is not installed")
    torch._dynamo.reset()
    g = torch.Generator("cuda").manual_seed(0)
    T, starts = 320, [0, 320, 640] if single else [0, 70, 300, 320, 480, 640, 640]
    q, k, v = (torch.randn(2, T, n, 64, device="cuda", generator=g) for n in (8, 2, 2))
    sinks, d_out = torch.randn(8, device="cuda", generator=g), torch.randn(2, T, 8, 64, device="cuda", generator=g)
    ids = torch.tensor([[0] * 70 + [1] * 230 + [2] * 20, [0] * 160 + [1] * 160], device="cuda") * (not single)
    longest = T if single else 256
    documents = Documents(torch.tensor(starts, device="cuda", dtype=torch.int32), ids, longest, single)
    found = []
    for attend, dtype in ((attention.masked, torch.float32), (kernel, torch.bfloat16)):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v, sinks)]
        run = torch.compile(attend, fullgraph=True) if compiled and dtype == torch.bfloat16 else attend
        out = run(*given[:3], documents, window=window, sinks=given[3])
        found.append([out, *torch.autograd.grad(out, given, d_out.to(dtype))])
    for want, got in zip(*found, strict=True):
        assert off(got, want) < 2e-2


@pytest.mark.skipif(library("flash-linear-attention") is None, reason="flash-linear-attention is not installed")
def test_delta_rule_of_the_package():
    """Values and gradients of packed documents, against chunks in float32."""
    try:
        check_package(torch.cuda.get_device_capability())
    except NeedsError as obstacle:
        pytest.skip(str(obstacle))
    g = torch.Generator("cuda").manual_seed(0)
    T, starts = 320, [0, 70, 300, 320, 480, 640, 640]
    q, k, v = (torch.randn(2, T, n, 64, device="cuda", generator=g) for n in (2, 2, 4))
    decay, beta = (torch.rand(2, T, 4, device="cuda", generator=g) for _ in range(2))
    ids = torch.tensor([[0] * 70 + [1] * 230 + [2] * 20, [0] * 160 + [1] * 160], device="cuda")
    documents = Documents(torch.tensor(starts, device="cuda", dtype=torch.int32), ids, 256, False)
    found = []
    for rule, dtype in ((delta_rule.plain, torch.float32), (delta_rule.fla, torch.bfloat16)):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        rest = [x.clone().requires_grad_() for x in (-decay, beta)]
        out = rule(*given, rest[0], rest[1].to(dtype), documents)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [*given, *rest])])
    for want, got in zip(*found, strict=True):
        assert off(got, want) < 2e-2


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("autocast", "half"), [(False, True), (True, False), (True, True)], ids=["bf16", "amp", "half"]
)
@pytest.mark.parametrize("D", [256, 4096])
def test_feed_forward_in_the_products(compiled, autocast, half, D):
    """half: the stream is bf16. The kernels' tiles differ with D."""
    from optrush.kernels import swiglu_quack

    torch._dynamo.reset()
    torch.manual_seed(0)
    F, N = 384, 200
    layers = [torch.nn.Linear(D, 2 * F, bias=False).cuda(), torch.nn.Linear(F, D, bias=False).cuda()]
    x = torch.randn(2, N, D, device="cuda", requires_grad=True)
    g = torch.randn(2, N, D, device="cuda")
    inputs = [x, *(layer.weight for layer in layers)]
    want = swiglu.gated_mlp(x, 2 * x, *layers)
    wants = torch.autograd.grad(want, inputs, g)
    if not autocast:
        layers = [layer.bfloat16() for layer in layers]
    given = x.detach().to(torch.bfloat16 if half else x.dtype).requires_grad_()
    inputs = [given, *(layer.weight for layer in layers)]

    def feed(x):
        return swiglu_quack.quack_mlp(x, 2 * x, *layers)

    run = torch.compile(feed, fullgraph=True, dynamic=False) if compiled else feed
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        got = run(inputs[0])
    grads = torch.autograd.grad(got, inputs, g.to(got.dtype))
    assert got.dtype == given.dtype and off(got, want) < 2e-2
    for one, other, given in zip(grads, wants, inputs, strict=True):
        assert one.dtype == given.dtype and off(one, other) < 2e-2
    for one in grads[1:] if autocast else ():
        assert not torch.equal(one, one.bfloat16().float()), "weights' gradients were rounded on their way"


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("width", "rows"), [(2048, 1536), (768, 2048), (256, 16), (16, 192)])
def test_products_of_groups(compiled, width, rows):
    """Of experts, and of their adapters; groups of no row, few, and many."""
    from optrush.kernels.experts_quack import grouped_quack

    torch._dynamo.reset()
    torch.manual_seed(0)
    ends = torch.tensor([0, 1, 1, 130, 130 + 512, 700, 700], dtype=torch.int32, device="cuda")
    x, weight = torch.randn(700, width, device="cuda").bfloat16(), torch.randn(7, rows, width, device="cuda").bfloat16()
    g = torch.randn(700, rows, device="cuda").bfloat16()

    def results(multiply, dtype):
        given = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = multiply(given[0], given[1].mT, ends)
        return [out, *torch.autograd.grad(out, given, g.to(dtype))]

    multiply = torch.compile(grouped_quack, fullgraph=True, dynamic=False) if compiled else grouped_quack
    for got, want in zip(results(multiply, torch.bfloat16), results(grouped_matmul, torch.float32), strict=True):
        assert got.dtype == torch.bfloat16 and (compiled or got.is_contiguous()) and off(got, want) < 5e-3
    assert not results(multiply, torch.bfloat16)[2][[0, 2, 6]].any(), "experts without a row"


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "amp"])
@pytest.mark.parametrize("slot", ["feed", "grouped"])
@pytest.mark.parametrize(("compiled", "crowded", "D", "F", "k"), [
    (False, False, 256, 96, 2), (False, True, 256, 96, 2), (False, True, 2048, 768, 8), (False, False, 4096, 384, 8),
    (True, False, 256, 96, 2),
])  # fmt: skip
def test_a_layer_of_experts(compiled, autocast, slot, crowded, D, F, k):
    """No further from float32 than the plain layer in the same precision, or hardly; the kernels' tiles differ with D.

    Crowded: all tokens are at the same k experts. The router is float32 and its input the same everywhere, so that
    tokens take the same experts.
    """
    from optrush.kernels import experts_quack

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "num_experts": 16, "num_experts_per_tok": k}
    shape = ModelShape.read({**SHAPES["qwen3-30b-a3b"], **sizes})
    made = {
        "router": torch.randn(16, D, device="cuda") * 0.05,
        "gate_up": torch.randn(16, 2 * F, D, device="cuda") * D**-0.5,
        "down": torch.randn(16, D, F, device="cuda") * F**-0.5,
    }
    h = torch.randn(2, 500, D, device="cuda")
    h[..., 0], made["router"][:, 0] = 4.0, 0.0
    if crowded:
        made["router"][:k, 0] = 10.0  # the others have no row
    g = torch.randn(2, 500, D, device="cuda").bfloat16()

    def results(dtype, at=None, autocast=False):
        experts = Experts(shape, device=torch.device("cuda"), dtype=dtype)
        for name, t in made.items():
            experts.get_parameter(name).data.copy_(t.bfloat16())
        if at is not None:
            setattr(experts, at, getattr(experts_quack, f"{at}_quack"))
        x = h.bfloat16().to(dtype).requires_grad_()
        inputs = [x, *(experts.get_parameter(name) for name in made)]
        run = torch.compile(experts, fullgraph=True, dynamic=False) if at is not None and compiled else experts

        def once():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                out, _ = run(x, None)
            return [out, *torch.autograd.grad(out, inputs, g.to(out.dtype))]

        found = once()
        if at is not None:
            torch.cuda.set_sync_debug_mode("default" if compiled else "error")  # no number of rows is read on the host
            try:
                again = once()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "not in a fixed order"
        return found

    held = torch.float32 if autocast else torch.bfloat16
    wants, plain, ours = results(torch.float32), results(held, None, autocast), results(held, slot, autocast)
    for want, other, got in zip(wants, plain, ours, strict=True):
        assert got.dtype == other.dtype and off(got, want) < max(1e-2, 1.25 * off(other, want))
    if crowded:
        assert not ours[3][k:].any() and not ours[4][k:].any(), "experts without a row"


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "m"), [(200, 256, 384), (1000, 4096, 128), (512, 512, 512), (0, 64, 64)])
def test_a_product_added_in_place(dtype, n, k, m):
    """By both layouts of the right factor, of rows with something behind them."""
    torch.manual_seed(0)
    y, a, b, wide = (torch.randn(*s, device="cuda").to(dtype) for s in ((n, m), (n, k), (k, m), (m, k + 64)))
    for right in (b, wide[:, :k].t()):
        want, found = y.float() + a.float() @ right.float(), y.clone()
        lora_matmul.add_product(found, a, right, "quack")
        torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "m", "r"), [(200, 768, 256, 16), (99, 512, 4096, 5), (70, 256, 64, 100), (0, 64, 64, 8)]
)
def test_a_product_with_a_low_rank_sum(dtype, n, k, m, r):
    """By a weight and by its transpose, of rows with and without room."""
    torch.manual_seed(0)
    x, wide, first, second = (torch.randn(*s, device="cuda").to(dtype) for s in ((n, k), (k, m), (k, r), (r, m)))
    z = x.float() @ first.float()
    want = x.float() @ wide.float() + z @ second.float()
    for weight in (with_padding(wide, r, r), with_padding(wide.t(), r, r).t()):
        for given, padded in ((x, False), (with_padding(x, 0, r), True)):
            for _ in range(2):
                found = lora_matmul.low_rank(given, weight, first, second, "quack", padded=True, padded_x=padded)
                assert [t.dtype for t in found] == [dtype, dtype] and [t.shape for t in found] == [(n, m), (n, r)]
                assert n == 0 or (off(found[0], want) < 1e-2 and off(found[1], z) < 1e-2)


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
def test_what_is_small_beside_a_product_counts():
    """A hundredth of the product's last place: lost where the product is rounded first, there on average otherwise."""
    torch.manual_seed(0)
    a, b = (torch.randn(1024, 1024, device="cuda").bfloat16() for _ in range(2))
    product = a.float() @ b.float()
    small = (product.abs() * 2.0**-8 / 100).bfloat16()
    found = small.clone()
    lora_matmul.add_product(found, a, b, "quack")
    gained = (found.float() - product).sum() / small.float().sum()
    assert gained.item() == pytest.approx(1.0, abs=0.25)
    found = lora_matmul.plus_product(small, a, b)
    gained = (found.float() - product).sum() / small.float().sum()
    assert gained.item() == pytest.approx(1.0, abs=0.25)
    lost = small.clone()
    lora_matmul.add_product(lost, a, b, "cublas")
    assert abs((lost.float() - product).sum() / small.float().sum()) < 0.25, "what it is against"


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "m", "d", "r"), [(200, 768, 256, 32), (99, 512, 4096, 5), (70, 256, 64, 100), (0, 64, 64, 8)]
)
def test_gradients_beside_an_adapter(dtype, n, m, d, r):
    torch.manual_seed(0)
    grad, weight, u, a = (torch.randn(*s, device="cuda").to(dtype) for s in ((n, m), (m, d), (m, r), (r, d)))
    d_z = grad.float() @ u.float()
    want = grad.float() @ weight.float() + d_z @ a.float()
    weight = with_padding(weight, 0, r)
    for _ in range(2):
        found = lora_matmul.low_rank_gradients(grad, weight, u, a)
        assert [t.dtype for t in found] == [dtype, dtype] and [t.shape for t in found] == [(n, d), (n, r)]
        assert n == 0 or (off(found[0], want) < 1e-2 and off(found[1], d_z) < 1e-2)


def adapted(width, pieces, groups, modules, names, rank):
    """A frozen linear with an adapter for those names, if any is its own; float32."""
    at = {"bias": False, "device": torch.device("cuda"), "dtype": torch.float32}
    linear = Linear(width, pieces, groups=groups, **at).requires_grad_(False)
    if {*modules} & {*names}:
        adapter = Lora(linear, modules, names, AdapterToggle(), Settings(rank, 2.0 * rank, 0.0, False, False))
        place("", linear, adapter.to_empty(device="cuda"), mock.Mock(fillers={}), ())
        torch.nn.init.normal_(adapter.a, std=width**-0.5)
        torch.nn.init.normal_(adapter.b, std=rank**-0.5)
    return linear


def pack(linear, wide):
    """Its weight in 4 bits, and in `wide` what these stand for."""
    stored = QuantizedLinear(linear, Form(4, True), torch.bfloat16).to_empty(device="cuda")
    rows = linear.weight.detach().view(linear.groups, -1, linear.in_features)
    for piece, values in zip(stored.children(), torch.split(rows, stored.layout.rows, 1), strict=True):
        for name, part in Form(4, True).quantize(values.flatten(0, 1).contiguous()).items():
            held, found = getattr(piece, name).data.view(torch.uint8), part.flatten().view(torch.uint8)
            held[: found.numel()].copy_(found)
    linear.weight, linear.quantized = None, stored
    if linear.adapter is None:
        linear.matmul = stored.product
    else:
        linear.adapter.inner = stored.product
    wide.weight.data.copy_(linear.dequantized(torch.float32))


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "amp"])
@pytest.mark.parametrize("base", ["dense", "padded", "nf4"])
@pytest.mark.parametrize(
    ("names", "rank"), [(["gate_proj", "up_proj", "down_proj"], 16), (["gate_proj"], 4), (["down_proj"], 12)], ids=str
)
def test_adapters_in_the_products(compiled, autocast, base, names, rank):
    from optrush.peft import lora

    torch._dynamo.reset()
    D, F, N = 256, 384, 200

    def made():
        torch.manual_seed(0)
        gate_up = adapted(D, (("gate", 1), ("up", 1)), F, ["gate_proj", "up_proj"], names, rank)
        return gate_up, adapted(F, (("down", D),), 1, ["down_proj"], names, rank)

    def given(x, layers):
        return [x, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]

    (ours, wide), g = (made(), made()), torch.randn(2, N, D, device="cuda")
    for layer, other in zip(ours, wide, strict=True):
        if base == "nf4":
            pack(layer, other)
        else:
            layer.weight.data = layer.weight.data.bfloat16()
        assert lora.fits(layer)
    for layer in ours:
        if base != "dense" and layer.adapter is not None:
            assert pad_weight(layer, 64, Padding(True), below=layer is ours[1]) == (base == "padded")
    x = torch.randn(2, N, D, device="cuda", requires_grad=True)
    want = swiglu.gated_mlp(x, 2 * x, *wide)
    wants = torch.autograd.grad(want, given(x, wide), g)
    inputs = given(x if autocast else x.detach().bfloat16().requires_grad_(), ours)

    def feed(x):
        return lora.feed(x, 2 * x, *ours)

    run = torch.compile(feed, fullgraph=True, dynamic=False) if compiled else feed
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        got = run(inputs[0])
        with torch.no_grad():
            assert off(run(inputs[0]), want) < 2e-2
    grads = torch.autograd.grad(got, inputs, g.to(got.dtype))
    for layer in (*ours, *wide):
        if layer.adapter is not None:
            layer.adapter.switch.on = False
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast), torch.no_grad():
        assert off(run(inputs[0]), swiglu.gated_mlp(x, 2 * x, *wide)) < 2e-2, "switched off, it is the base"
    assert got.dtype == inputs[0].dtype and off(got, want) < 2e-2
    for one, other, of in zip(grads, wants, inputs, strict=True):
        assert one.dtype == of.dtype and off(one, other) < 2e-2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "amp"])
@pytest.mark.parametrize(("D", "room"), [(300, 0), (2048, 64), (4096, 128)])
def test_norm_and_the_addition_before_it(compiled, autocast, D, room):
    torch.manual_seed(0)
    x, branch, past, g = (torch.randn(3, 1111, D, device="cuda") for _ in range(4))
    inputs = [t.requires_grad_() for t in (x, branch, torch.rand(D, device="cuda") + 0.5)]

    def both(function, inputs):
        return function(*inputs, 1e-5), function(inputs[0], None, inputs[2], 1e-5)

    def gradients(made, inputs):
        outputs = [t for pair in made for t in pair]
        given = [t.to(o.dtype) for o, t in zip(outputs, (past, g, past, g), strict=True)]
        return torch.autograd.grad(outputs, inputs, given)

    want = both(rms_norm.add_rms_norm, inputs)
    wants = gradients(want, inputs)
    if not autocast:
        inputs = [t.detach().bfloat16().requires_grad_() for t in inputs]
    run = torch.compile(both, fullgraph=True, dynamic=False) if compiled else both
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        made = run(partial(rms_norm.fused_add_rms_norm, padding=room, grad_padding=room), inputs)
    assert all(pair[1].stride() == (1111 * (D + room), D + room, 1) for pair in made)
    for got, sure in zip((t for pair in made for t in pair), (t for pair in want for t in pair), strict=True):
        assert off(got, sure) < 1e-2
    for one, other, given in zip(gradients(made, inputs), wants, inputs, strict=True):
        assert one.dtype == given.dtype and off(one, other) < 1e-2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("turns", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "group", "E"), [(8, 4, 64), (2, 7, 128), (3, 1, 80), (1, 2, 256)])
def test_rotation(compiled, dtype, turns, K, group, E):
    torch._dynamo.reset()
    torch.manual_seed(0)
    B, T, room = 3, 333, 64 if K > 2 else 0
    qkv = torch.randn(B, T, K, group + 2, E, device="cuda").to(dtype).requires_grad_()
    cos, sin = (torch.randn(B, T, 1, E, device="cuda").to(turns) for _ in range(2))
    grads = [torch.randn(B, n, T, E, device="cuda").to(dtype).transpose(1, 2) for n in (K * group, K, K)]
    wide = qkv.detach().float().requires_grad_()
    want = rope.split_and_rotate(wide, cos.float(), sin.float(), None, None)
    (wanted,) = torch.autograd.grad(want, wide, [g.float() for g in grads])

    def separate(qkv):
        return rope.fused_split_and_rotate(qkv, cos, sin, None, None, grad_padding=room)

    found = (torch.compile(separate, fullgraph=True, dynamic=False) if compiled else separate)(qkv)
    (grad,) = torch.autograd.grad(found, qkv, grads)
    close = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    for got, sure in zip((*found, grad), (*want, wanted), strict=True):
        assert got.dtype == dtype and off(got, sure) < close
        assert got.is_contiguous() == (got is not grad or not room)
    assert grad.stride(1) == K * (group + 2) * E + room
    assert torch.equal(found[2], qkv[:, :, :, -1])


def test_rotation_beyond_32_bits():
    qkv = torch.empty(1, 2**17 + 1, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 1, 2**17 + 1, 1, 128, device="cuda", dtype=torch.bfloat16)
    qkv[:, -1] = torch.randn(8, 16, 128, device="cuda")
    heads = rope.rotation(qkv, cos, sin)
    last = [x[:, -1:].clone() for x in (qkv, cos, sin)]
    assert all(torch.equal(a[:, -1:], b) for a, b in zip(heads, rope.rotation(*last), strict=True))
    back = rope.rotation_backward(*heads, cos, sin)[:, -1:]
    assert torch.equal(back, rope.rotation_backward(*(x[:, -1:].clone() for x in heads), *last[1:]))


def test_gated_activation_beyond_32_bits():
    x = torch.empty(2**17 + 1, 2 * 2**14, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(2 * 2**14, device="cuda")
    assert torch.equal(swiglu.swiglu(x)[-1], swiglu.swiglu(x[-1:].clone())[0])


@pytest.mark.skipif(library("flash-attn-4") is None, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("single", [True, False], ids=["dense", "packed"])
@pytest.mark.parametrize(("H", "K", "E"), [(8, 2, 64), (8, 2, 128), (4, 4, 128)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_flash_attention_4(single, H, K, E, compiled):
    torch.manual_seed(0)
    B, T = 2, 384
    cuts = [0, T, 2 * T] if single else [0, 5, 200, T, T + 1, T + 300, 2 * T]
    starts = torch.full((12,), 2 * T, dtype=torch.int32)
    starts[: len(cuts)] = torch.tensor(cuts, dtype=torch.int32)
    ids = torch.searchsorted(torch.tensor(cuts), torch.arange(2 * T), right=True).view(B, T).int()
    documents = Documents(starts.cuda(), ids.cuda(), T, single)
    q, k, v = (torch.randn(B, T, n, E, device="cuda", requires_grad=True) for n in (H, K, K))
    weight = torch.randn(B, T, H, E, device="cuda")
    want = attention.masked(q, k, v, documents)
    wants = torch.autograd.grad((want * weight).sum(), (q, k, v))
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        out = flash4(q, k, v, documents, padding=room)
        assert out.stride(1) == H * E + room
        return out * 1.0

    room = 64 if E == 128 else 0
    got = (torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend)(*half)
    grads = torch.autograd.grad(got, half, weight.bfloat16())
    assert off(got, want) < 1e-2
    for one, other in zip(grads, wants, strict=True):
        assert off(one, other) < 2e-2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_sdpa_of_grouped_heads_holds_no_scores(compiled, dtype, close):
    torch.manual_seed(0)
    T, H, K, E = 2048, 8, 2, 64
    scores = H * T * T * 4
    starts, ids = torch.tensor([0, T], dtype=torch.int32), torch.zeros(1, T, dtype=torch.int32)
    documents = Documents(starts.cuda(), ids.cuda(), T, True)
    wide = [torch.randn(1, T, n, E, device="cuda", requires_grad=True) for n in (H, K, K)]
    weight = torch.randn(1, T, H, E, device="cuda")

    def peak(attend, heads):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(*heads, documents)
        grads = torch.autograd.grad(out, heads, weight.to(out.dtype))
        return out, grads, (torch.cuda.max_memory_allocated() - before) / scores

    want, wants, _ = peak(attention.masked, wide)
    attend = torch.compile(attention.sdpa, fullgraph=True, dynamic=False) if compiled else attention.sdpa
    heads = [x.detach().to(dtype).requires_grad_() for x in wide]
    peak(attend, heads)  # compiles
    out, grads, copies = peak(attend, heads)
    assert copies < 0.5
    assert off(out, want) < close
    assert all(off(one, other) < close for one, other in zip(grads, wants, strict=True))


def test_torch_multiplies_grouped_heads_in_float32_plainly():
    """What the plan takes of models through transformers: probabilities, their gradient, both's product, the result."""
    T, H, K, E = 2048, 8, 2, 64
    q, k, v = (torch.randn(1, n, T, E, device="cuda", requires_grad=True) for n in (H, K, K))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    assert 4 <= (torch.cuda.max_memory_allocated() - before) / (H * T * T * 4) < 4.5


@pytest.mark.skipif(library("flash-attn-4") is None, reason="flash-attn-4 is not installed")
def test_the_next_process_finds_what_flash_attention_4_compiled(tmp_path):
    """The second process writes nothing: it would replace what it could not load."""
    script = """
import torch
from optrush.data.batch import Documents
from optrush.kernels.attention import flash4
documents = Documents(torch.tensor([0, 256]).int().cuda(), torch.zeros(1, 256).int().cuda(), 256, True)
q, k, v = (torch.ones(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
flash4(q, k, v, documents).sum().backward()
print(q.grad.isfinite().all().item())
"""
    environment = {**os.environ, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path)}
    environment.pop("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", None)  # as an earlier test may have left it
    made = []
    for _ in range(2):
        said = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
        assert said == "True\n"
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")})
    assert made[0] == made[1] and len(made[0]) >= 3


PACKAGES = {"quack": "quack-kernels", "liger": "liger-kernel"}
LOSSES = {"quack": linear_cross_entropy.quack, "liger": liger}


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("V", [1024, 1152], ids=["128 columns", "192 columns"])
@pytest.mark.parametrize(
    ("N", "D", "chunk"),
    [(1000, 256, 512), (512, 512, 512), (1536, 512, 1024), (1, 256, 128), (300, 2056, 128), (1000, 2056, 1024)],
)
def test_loss_kernels(name, N, D, chunk, V):
    """With ignored labels, scaled by the incoming gradient; where rows are as many as the width too, in both tiles
    and rows longer than a block."""
    if library(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device="cuda")
    weight = torch.randn(V, D, device="cuda") * 0.05
    labels = torch.randint(0, V, (N,), device="cuda")
    labels[1::5] = -100
    wide = [hidden.bfloat16().float().requires_grad_(), weight.bfloat16().float().requires_grad_()]
    want = cross_entropy.cross_entropy(*wide, labels)
    wants = torch.autograd.grad(want * 0.125, wide)
    half = [x.detach().bfloat16().requires_grad_() for x in wide]
    got = LOSSES[name](*half, labels, chunk)
    grads = torch.autograd.grad(got * 0.125, half)
    assert got.dtype == torch.float32 and got.item() == pytest.approx(want.item(), rel=2e-3)
    for one, other in zip(grads, wants, strict=True):
        assert off(one, other) < 1e-2
    assert not grads[0][1::5].any()
    ignored = LOSSES[name](*half, torch.full_like(labels, -100), chunk)
    assert ignored.item() == 0 and not any(grad.any() for grad in torch.autograd.grad(ignored, half))


@pytest.mark.skipif(library("quack-kernels") is None, reason="quack-kernels is not installed")
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "amp"])
def test_quacks_gradients_by_a_factor(autocast):
    """A third, which bfloat16 has 0.2 % off; the roundings of the gradients themselves cancel."""
    torch.manual_seed(0)
    inputs = [torch.randn(1000, 256, device="cuda"), torch.randn(1024, 256, device="cuda") * 0.05]
    inputs = [(x if autocast else x.bfloat16()).requires_grad_() for x in inputs]
    labels = torch.randint(0, 1024, (1000,), device="cuda")
    wants = torch.autograd.grad(cross_entropy.cross_entropy(*(x.float() for x in inputs), labels), inputs)

    def gradients(factor):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy.quack(*inputs, labels, 512)
        return torch.autograd.grad(loss * factor, inputs)

    for one, third, want, given in zip(gradients(1.0), gradients(1 / 3), wants, inputs, strict=True):
        assert one.dtype == given.dtype and off(one, want) < 1e-2
        share = (one.double() * third.double()).sum() / one.double().square().sum()
        assert share.item() == pytest.approx(1 / 3, rel=3e-4)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_scaled(given, wanted):
    factor = torch.tensor(1 / 3, device="cuda")
    for n in (0, 1, 4096, 1_000_003):
        x = torch.randn(n, device="cuda").to(given)
        want = (x.float() * factor).to(wanted)
        found = scale_to_dtype(x, factor, wanted)
        assert torch.equal(found, want) and (found is x) == (given == wanted)


def test_scaled_beyond_32_bits():
    x = torch.ones(2**31 + 5, device="cuda", dtype=torch.bfloat16)
    assert (scale_to_dtype(x, torch.tensor(2.0, device="cuda"), x.dtype)[-6:] == 2).all()


def test_stochastic_rounding_at_the_edges():
    from optrush.kernels import adamw_triton

    found, want = (edges(adamw_triton.launch_stochastic, "cuda"), edges(adamw.write_stochastic))
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("slots", "heads", "group", "wide", "out", "masks"), [
    (3, 2, 3, 64, 64, {}), (5, 2, 1, 96, 64, {"window": 40}), (2, 1, 4, 24, 24, {"sinks": True}),
    (300, 8, 2, 128, 128, {}), (70, 8, 2, 64, 64, {"cap": 5.0}), (1, 4, 8, 256, 256, {"window": 200, "sinks": True}),
])  # fmt: skip
def test_attention_of_new_tokens_is_that_of_whole_slots(dtype, slots, heads, group, wide, out, masks):
    from optrush.kernels.decode_attention_triton import decode_attention
    from optrush.models.kv_cache import attend_slots

    torch.manual_seed(0)
    room, at = 448, {"device": "cuda", "dtype": dtype}
    lengths = torch.randint(1, room + 1, (slots,), device="cuda")
    lengths[0], lengths[-1] = 1, room
    if slots > 2:
        lengths[1] = 0
    q, k, v = (torch.randn(slots, n, e, **at) for n, e in ((heads * group, wide), (heads, wide), (heads, out)))
    keys, values = (torch.randn(slots + 1, room, heads, e, **at) for e in (wide, out))
    sinks = torch.randn(heads * group, **at) if masks.get("sinks") else None
    kept = keys.clone(), values.clone()
    live = lengths.nonzero()[:, 0]
    for cache, new in zip(kept, (k, v), strict=True):
        cache[live, lengths[live] - 1] = new[live]
    window, cap = masks.get("window"), masks.get("cap")
    plain = (x[:slots].float() for x in kept)
    want = attend_slots(q[:, None].float(), *plain, lengths, window=window, cap=cap, sinks=sinks)[:, 0]
    got = decode_attention(q, k, v, keys, values, lengths, sinks, window or 0, cap or 0.0)
    assert torch.equal(keys, kept[0]) and torch.equal(values, kept[1])
    assert off(got[live], want[live]) < (3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert not got[lengths == 0].any()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_kernel_draws_what_torch_draws(temperature):
    from optrush.kernels.draw_triton import draw
    from optrush.models.sampling import Drawing, uniform

    torch.manual_seed(0)
    S, V, most, at = 300, 50257, 5, {"device": "cuda"}
    logits = 3 * torch.randn(S, V, **at)
    logits[2, 100:] = -torch.inf
    who, made = torch.arange(S, **at) % 3 > 0, torch.arange(S, **at) % most
    number, member, ends = torch.arange(S, **at) * 7, torch.arange(S, **at) % 3, torch.arange(0, V, 5, **at)
    token, before = torch.full((S,), -1, **at), made.clone()
    live, ended = torch.ones(S, dtype=torch.bool, **at), torch.zeros(S, dtype=torch.bool, **at)
    out = torch.zeros(S, most, dtype=torch.int64, **at)
    kept = out, torch.zeros(S, most, **at), torch.zeros(S, most, **at)
    d = Drawing(most, temperature, (), 11)
    keys = number, member, made
    draw(logits, who, keys, token, live, ended, kept, ends, seed=d.seed, temperature=temperature, most=most)
    log_p = torch.log_softmax(logits.double() / (temperature or 1), -1)
    below = log_p.exp().cumsum(-1)
    point = uniform(d.seed, number, member, before)[:, None]
    want = torch.searchsorted(below, point, right=True)[:, 0] if temperature else logits.argmax(-1)
    rows = torch.arange(S, **at)
    assert torch.equal(token == -1, ~who) and torch.equal(made, before + who)
    assert (token == want)[who].float().mean() > 0.99  # a number between two sums is rounded
    assert (log_p[rows, token.clamp_min(0)] - kept[1][rows, before])[who].abs().max() < 1e-4
    assert (-(log_p.exp() * log_p).nansum(-1) - kept[2][rows, before])[who].abs().max() < 1e-3
    assert torch.equal(kept[0][rows, before][who], token[who])
    assert torch.equal(ended, who & (token % 5 == 0)) and torch.equal(
        live, ~(who & ((token % 5 == 0) | (made == most)))
    )
