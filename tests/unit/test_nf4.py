"""4-bit and 8-bit weights: the bytes of bitsandbytes, its values back, arithmetic on paper, and the Triton kernels."""

import importlib.util

import numpy as np
import pytest
import torch

import interpreter
from optrush.kernels import int8, mxfp4, nf4
from optrush.models.decoder import Linear
from optrush.peft.quantized import Form, QuantizedLinear, unpacked

CPU = torch.device("cpu")
SHAPES = [(64, 64), (48, 48), (7, 9), (3, 65), (1, 1), (1000, 100), (130, 896)]  # blocks that cross rows, odd ends
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).abs() * 0.1).to(dtype)


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes.functional")


def back(bnb, codes, state, dtype):
    """What bitsandbytes makes of it. Taken flat: for rows of a multiple of 16 but not of 64, its CPU kernel counts
    blocks by rows, and gives wrong values."""
    n = state.shape.numel()
    if n % 64 == 0:
        state.shape = torch.Size((1, n))
        return bnb.dequantize_4bit(codes, state).view(-1)
    scales = state.absmax if not state.nested else bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    pairs = torch.stack((codes.view(-1) >> 4, codes.view(-1) & 15), -1).view(-1)[:n]
    return (state.code[pairs.int()] * scales.repeat_interleave(64)[:n]).to(dtype)


# The bytes.


def test_the_two_tables(bnb):
    assert torch.equal(nf4.table(CPU), bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(nf4.dynamic_map(CPU), bnb.create_dynamic_map())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_values_are_those_of_bitsandbytes(bnb, shape, double):
    for dtype in DTYPES:
        values = drawn(shape, dtype)
        codes, state = bnb.quantize_4bit(values, compress_statistics=double, quant_type="nf4")
        parts = nf4.quantize_nf4([values], double)
        assert torch.equal(parts["codes"], codes.view(-1)) and torch.equal(parts["absmax"], state.absmax)
        if double:
            assert torch.equal(parts["nested"], torch.cat((state.state2.absmax, state.offset[None])))
        out = torch.empty(shape, dtype=dtype)
        nf4.dequantize_nf4(parts, out)
        assert torch.equal(out.view(-1), back(bnb, codes, state, dtype))
        assert {n: p.numel() * p.element_size() for n, p in parts.items()} == nf4.nf4_bytes(*shape, double)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != (1, 1)], ids=str)
def test_bytes_of_a_row_are_those_of_bitsandbytes(bnb, shape):
    values = drawn(shape)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(values.clone())
    parts = int8.quantize_int8(values)
    assert torch.equal(parts["codes"], codes) and torch.equal(parts["scales"], scales)
    out = torch.empty(shape)
    int8.dequantize_int8(parts, out)
    assert torch.equal(out, torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales))


def test_zeros_stay_zeros():
    for shape in SHAPES:
        for form in (Form(4, True), Form(4, False), Form(8)):
            out = torch.ones(shape)
            dequantize(form, form.quantize(torch.zeros(shape)), out)
            assert not out.any()


# The arithmetic, against one of its own.


def dequantize(form, parts, out):
    (nf4.dequantize_nf4 if form.bits == 4 else int8.dequantize_int8)(parts, out)


def test_the_nearest_of_sixteen():
    values = drawn((40, 80), seed=3)
    out = torch.empty(values.shape)
    nf4.dequantize_nf4(nf4.quantize_nf4([values], False), out)
    flat = values.double().numpy().reshape(-1, 64)
    most = np.abs(flat).max(1, keepdims=True)
    table = np.array(nf4.VALUES)
    want = table[np.abs(flat[..., None] / most[..., None] - table).argmin(-1)] * most
    assert np.abs(out.double().numpy().reshape(want.shape) - want).max() <= 1e-7 * most.max()


def test_what_double_costs_and_saves():
    values = drawn((512, 1024), seed=4)
    errors = []
    for double in (False, True):
        out = torch.empty(values.shape)
        nf4.dequantize_nf4(nf4.quantize_nf4([values], double), out)
        errors.append(((out - values).norm() / values.norm()).item())
    assert errors[0] < errors[1] < 1.02 * errors[0] and 0.05 < errors[0] < 0.15
    bits = [8 * sum(nf4.nf4_bytes(4096, 4096, double).values()) / 4096**2 for double in (False, True)]
    assert bits == pytest.approx([4.5, 4.127], abs=1e-3)


def test_chunks_change_nothing(monkeypatch):
    values = drawn((37, 91))
    want = nf4.quantize_nf4([values], True)
    monkeypatch.setattr(nf4, "CHUNK", 256)
    assert all(torch.equal(part, want[name]) for name, part in nf4.quantize_nf4([values], True).items())


# The operator: pieces of a fused linear, each where its rows are.


@pytest.mark.parametrize("form", [Form(4, True), Form(4, False), Form(8)], ids=str)
@pytest.mark.parametrize("width", [64, 48, 33])
@pytest.mark.parametrize("pieces", [(("q", 6), ("k", 2), ("v", 2)), (("gate", 1), ("up", 1)), (("o", 5),)], ids=str)
def test_rows_lie_where_the_linear_has_them(form, width, pieces):
    groups = 3
    linear = Linear(width, pieces, groups=groups, bias=False, device=torch.device("meta"), dtype=torch.float32)
    parts, wanted = [], []
    for i, (_, rows) in enumerate(pieces):
        values = drawn((groups * rows, width), seed=i)
        made = form.quantize(values)
        out = torch.empty(values.shape)
        dequantize(form, made, out)
        wanted.append(out.view(groups, rows, width))
        for part in made.values():
            raw = part.flatten().view(torch.uint8)
            parts.append(torch.nn.functional.pad(raw, (0, raw.numel() % 2)).view(torch.bfloat16))
    layout = QuantizedLinear(linear, form, torch.bfloat16).layout
    found = unpacked(parts, layout, torch.float32, "test")
    want = torch.cat(wanted, 1).flatten(0, 1)
    assert torch.equal(found, want)
    within = unpacked(parts, layout, torch.float32, "test", (3, 5))
    assert within.shape == (len(want) + 3, width + 5) and torch.equal(within[:-3, :-5], want)


@pytest.mark.parametrize("form", [Form(4, True), Form(4, False), Form(8)], ids=str)
@pytest.mark.parametrize("width", [33, 64, 8192])
def test_one_tensor_with_all_pieces(form, width):
    """Rows of pieces one below the other, quantised as one: of the last width no block of scales crosses pieces."""
    groups, pieces = 3, (("q", 6), ("k", 2), ("v", 2))
    linear = Linear(width, pieces, groups=groups, bias=False, device=torch.device("meta"), dtype=torch.float32)
    values = drawn((30, width), seed=4)
    made = form.quantize(values)
    dequantize(form, made, values)
    raws = [part.flatten().view(torch.uint8) for part in made.values()]
    parts = [torch.nn.functional.pad(raw, (0, raw.numel() % 2)).view(torch.bfloat16) for raw in raws]
    layout = QuantizedLinear(linear, form, torch.bfloat16, joined=True).layout
    assert layout.parts == len(parts)
    found = unpacked(parts, layout, torch.float32, "test")
    q, k, v = values[:18].view(3, 6, width), values[18:24].view(3, 2, width), values[24:].view(3, 2, width)
    assert torch.equal(found, torch.cat((q, k, v), 1).flatten(0, 1))


# 4-bit floats with a shared power of two.


def floats(rows, width):
    """Flat codes and scales, of all codes and of powers of two that float32 has."""
    draw = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows * width // 2,), generator=draw, dtype=torch.uint8)
    return codes, torch.randint(0, 253, (rows * width // 32,), generator=draw, dtype=torch.uint8)


def test_floats_are_those_of_transformers():
    """Of every code and power of two, to the bit."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 64, 8)
    codes = torch.arange(256, dtype=torch.uint8).repeat(32).view(1, 64, 8, 16)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(64, 256, dtype=dtype)
        mxfp4.dequantize_mxfp4((codes.flatten(), scales.flatten()), out)
        want = convert_moe_packed_tensors(codes, scales, dtype=dtype)[0].T
        number = (scales < 255).view(64, 8).repeat_interleave(32, 1)  # 255 is none
        assert torch.equal(out[number], want[number])


# The Triton kernels.


def interpreted():
    from optrush.kernels import dequantize_triton

    tables = nf4.table(torch.device("cpu")), nf4.dynamic_map(torch.device("cpu"))
    for shape in (*SHAPES[:4], (12, 896), (130, 64), (3, 1088), (2, 2112)):  # the last two: several programs a row
        values = drawn(shape)
        # Not bfloat16: the interpreter cuts where a GPU rounds to the nearest. tests/gpu has it.
        for dtype in (torch.float32, torch.float16):
            for name, form in (("nf4", Form(4, True)), ("nf4", Form(4, False)), ("int8", Form(8))):
                parts, want = form.quantize(values), torch.empty(shape, dtype=dtype)
                dequantize(form, parts, want)
                wide = torch.full((shape[0], 3, shape[1]), 7.0, dtype=dtype)  # rows of others between
                target = wide[:, 1:2]
                if name == "nf4":
                    dequantize_triton.launch_nf4(parts["codes"], parts["absmax"], parts.get("nested"), target, *tables)
                else:
                    dequantize_triton.launch_int8(parts["codes"], parts["scales"], target)
                assert torch.equal(target[:, 0], want), (shape, dtype, form)
                if name == "nf4":  # codes that begin within a word
                    codes = torch.nn.functional.pad(parts["codes"], (1, 0))[1:]
                    again = torch.empty_like(want)
                    dequantize_triton.launch_nf4(codes, parts["absmax"], parts.get("nested"), again, *tables)
                    assert torch.equal(again, want), (shape, dtype, form)
                assert (wide[:, [0, 2]] == 7).all(), "it writes where it should"
    for rows, width in ((3, 64), (5, 32), (4, 2880), (2, 4352)):
        parts = floats(rows, width)
        want, found = torch.empty(rows, width), torch.full((rows, 3, width), 7.0)
        mxfp4.dequantize_mxfp4(parts, want)
        dequantize_triton.launch_mxfp4(*parts, found[:, 1:2], mxfp4.table(CPU))
        assert torch.equal(found[:, 1], want) and (found[:, [0, 2]] == 7).all(), (rows, width)
    print("equal")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernels_are_the_references_to_the_bit():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
