"""Frozen weights in 4 and 8 bits on the device: the kernels' bits, bitsandbytes' bytes, a linear's products."""

from __future__ import annotations

import pytest
import torch

from optrush.kernels import int8, nf4
from optrush.models.decoder import Linear
from optrush.models.weights import Memory, WeightEntry, WeightMap
from optrush.peft.quantized import Form, quantize_model

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_bitsandbytes_on_the_device(shape):
    bnb = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.bfloat16, torch.float32):
        values = drawn(shape, dtype).cuda()
        codes, state = bnb.quantize_4bit(values, compress_statistics=True, quant_type="nf4")
        parts = nf4.quantize_nf4(values, True)
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
    quantize_model(type("Holder", (), {"linears": lambda self: [("x", linear)]})(), recipe, form, None)
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
