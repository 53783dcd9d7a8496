"""Frozen weights in 4 and 8 bits on the device: the kernels' bits, bitsandbytes' bytes, a linear's products."""

import pytest
import torch

from optrush.kernels import int8, mxfp4, nf4
from optrush.models.decoder import Linear
from optrush.models.experts import grouped_matmul
from optrush.models.weights import Memory, WeightEntry, WeightMap
from optrush.peft.quantized import Form, QuantizedLinear, Stack, quantize_model

SHAPES = [(64, 64), (48, 48), (7, 9), (3, 65), (1000, 100), (4096, 1536), (16, 4160)]
FORMS = [Form(4, True), Form(4, False), Form(8)]


def drawn(shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).abs() * 0.1).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_reference_to_the_bit(form, shape):
    parts = form.quantize(drawn(shape))
    dequantize = nf4.dequantize_nf4 if form.bits == 4 else int8.dequantize_int8
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        want, found = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype, device="cuda")
        dequantize(parts, want)
        dequantize({n: p.cuda() for n, p in parts.items()}, found)
        assert torch.equal(found.cpu(), want)


def test_floats_of_the_kernel_are_the_reference_to_the_bit():
    draw = torch.Generator().manual_seed(0)
    for rows, width in ((3, 64), (5, 32), (64, 2880), (4, 4352)):
        codes = torch.randint(0, 256, (rows * width // 2,), generator=draw, dtype=torch.uint8)
        scales = torch.randint(0, 255, (rows * width // 32,), generator=draw, dtype=torch.uint8)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            want, found = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype, device="cuda")
            mxfp4.dequantize_mxfp4((codes, scales), want)
            mxfp4.dequantize_mxfp4((codes.cuda(), scales.cuda()), found)
            assert torch.equal(found.cpu(), want)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_multiply_by_what_their_bytes_stand_for(form):
    """In bfloat16, where the products of groups are torch's own: values, and the gradient of the rows."""
    N, rows, width = 5, 192, 128
    stack = QuantizedLinear(Stack((("experts", N * rows),), 1, width), form, torch.bfloat16).to_empty(device="cuda")
    for name, part in form.quantize(drawn((N * rows, width)).cuda()).items():
        held, raw = getattr(stack.experts, name).data.view(torch.uint8), part.flatten().view(torch.uint8)
        held[: raw.numel()].copy_(raw)
    ends = torch.tensor([0, 16, 48, 48, 96], dtype=torch.int32, device="cuda")
    x = drawn((96, width), torch.bfloat16).cuda().requires_grad_()
    dense = stack.dense(torch.bfloat16).view(N, rows, width)
    y, want = stack.grouped_product(x, ends), grouped_matmul(x, dense.mT, ends)
    assert torch.equal(y, want)
    grad = drawn((96, rows), torch.bfloat16).cuda()
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, want)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_bitsandbytes_on_the_device(shape):
    bnb = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.bfloat16, torch.float32):
        values = drawn(shape, dtype).cuda()
        codes, state = bnb.quantize_4bit(values, compress_statistics=True, quant_type="nf4")
        parts = nf4.quantize_nf4([values], True)
        # Where its kernel divides less exactly, a value on a border falls on the other side.
        assert (parts["codes"] != codes.view(-1)).sum() <= max(1, 1e-6 * codes.numel())
        assert torch.equal(parts["absmax"], state.absmax)
        assert torch.equal(parts["nested"], torch.cat((state.state2.absmax, state.offset[None])))
        out = torch.empty_like(values)
        nf4.dequantize_nf4({**parts, "codes": codes.view(-1)}, out)
        assert torch.equal(out, bnb.dequantize_4bit(codes, state))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_multiplies_by_what_its_bytes_stand_for(form, compiled):
    at = {"device": torch.device("meta"), "dtype": torch.bfloat16}
    linear = Linear(256, (("gate", 1), ("up", 1)), groups=320, bias=False, **at)
    recipe = WeightMap(
        {"x.weight": WeightEntry((640, 256), (("g", 1), ("u", 1)), 320)}, Memory({n: drawn((320, 256)) for n in "gu"})
    )
    holder = type(
        "Holder", (), {"linears": lambda self: [("x", linear)], "named_modules": lambda self: [("x", linear)]}
    )
    quantize_model(holder(), recipe, form, None)
    linear.to_empty(device="cuda")
    for name, p in linear.named_parameters(prefix="x"):
        recipe.fill(name, p.detach(), (0,))
    call = torch.compile(linear, fullgraph=True) if compiled else linear
    x = drawn((4, 32, 256), torch.bfloat16).cuda().requires_grad_()
    y = call(x)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = torch.nn.functional.linear(x, linear.dequantized(torch.bfloat16))
    (wanted,) = torch.autograd.grad(want, x, torch.ones_like(want))
    assert torch.equal(y, want) and torch.equal(found, wanted)
