"""Attention functions against a float64 oracle, a document at a time; no document reaches another, nor its NaNs."""

import numpy as np
import pytest
import torch

from optrush.data.batch import collate
from optrush.data.schema import Document
from optrush.errors import NeedsError
from optrush.kernels.attention import ATTENTIONS, masked, sdpa, varlen, visible_tokens
from optrush.kernels.attention_varlen import include_sinks, sinks_gradient

torch.set_num_threads(1)
B, T, H, K, E = 2, 16, 6, 2, 8
LENGTHS = [[5, 7, 3], [1, 12]]  # the rest of a row is padding, a document of its own
SPANS = [(0, 0, 5), (0, 5, 12), (0, 12, 15), (0, 15, 16), (1, 0, 1), (1, 1, 13), (1, 13, 16)]
BOTH = pytest.mark.parametrize("attend", [masked, sdpa])


def documents(lengths=LENGTHS, *, single=False):
    rows = [[(0, Document(np.zeros(n, np.int32), np.zeros(n, bool))) for n in row] for row in lengths]
    return collate(rows, T, single=single, most=16).documents


def drawn(dtype=torch.float32, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, T, heads, E, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for heads in (H, K, K)
    ]


def oracle(q, k, v, spans):
    """Loops over documents, heads and queries, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for b, first, last in spans:
        for h in range(H):
            for t in range(first, last):
                scores = k[b, first : t + 1, h * K // H] @ q[b, t, h] / E**0.5
                out[b, t, h] = scores.softmax(0) @ v[b, first : t + 1, h * K // H]
    return out


@BOTH
def test_against_a_document_at_a_time(attend):
    q, k, v = drawn()
    weight = torch.randn(B, T, H, E, generator=torch.Generator().manual_seed(1))
    got, want = attend(q, k, v, documents()), oracle(q, k, v, SPANS)
    assert got.shape == (B, T, H, E) and got.dtype == q.dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad((got * weight).sum(), (q, k, v))
    wants = torch.autograd.grad((want * weight).sum(), (q, k, v))
    for a, b in zip(grads, wants, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@BOTH
def test_one_document_a_row(attend):
    q, k, v = drawn()
    got = attend(q, k, v, documents([[11], [16]], single=True))
    want = oracle(q, k, v, [(0, 0, 11), (1, 0, 16)])
    torch.testing.assert_close(got[0, :11].double(), want[0, :11], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-6)


IMAGES = [[0, 1, 1, 1, 0, 2, 2, 0, 0, 0, 3, 3, 3, 3, 3, 0], [0, 0, 0, 0, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0]]


@BOTH
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("single", [False, True])
def test_images_whose_tokens_read_each_other(attend, window, single):
    """Also those behind them, within the window; a token of a text reads what lies before it."""
    held, spans = (documents([[16], [16]], single=True), [(0, 0, 16), (1, 0, 16)]) if single else (documents(), SPANS)
    q, k, v = drawn()
    got = attend(q, k, v, held._replace(mutual=torch.tensor(IMAGES)), window=window)
    for b, first, last in spans:
        for t in range(first, last):
            read = [s for s in range(first, last) if s <= t or (IMAGES[b][s] and IMAGES[b][s] == IMAGES[b][t])]
            read = [s for s in read if window is None or t - s < window]
            scores = torch.einsum("skc,khc->khs", k[b, read], q[b, t].view(K, H // K, E)) / E**0.5
            want = torch.einsum("khs,skc->khc", scores.softmax(-1), v[b, read]).flatten(0, 1)
            torch.testing.assert_close(got[b, t], want, rtol=1e-5, atol=1e-6)


def others_than(b, first, last):
    rest = torch.ones(B, T, dtype=torch.bool)
    rest[b, first:last] = False
    return rest


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_no_document_reaches_another(attend, dtype, bad, which):
    """Change one document, or put a bad value into it: outputs and gradients of all others keep their bits."""
    weight = torch.randn(B, T, H, E, generator=torch.Generator().manual_seed(1)).to(dtype)
    for b, first, last in SPANS:
        rest = others_than(b, first, last)

        def run(change, b=b, first=first, last=last, rest=rest):
            inputs = drawn(dtype)
            with torch.no_grad():
                if change and bad is None:
                    inputs[which][b, first:last] = -3 * inputs[which][b, first:last]
                elif change:
                    inputs[which][b, first, 0, 3] = bad
            out = attend(*inputs, documents())
            grads = torch.autograd.grad((out * weight)[rest].sum(), inputs)  # a loss of the others alone
            return out, grads

        (was, was_grads), (now, now_grads) = run(False), run(True)
        assert torch.equal(was[rest], now[rest])
        for a, c in zip(was_grads, now_grads, strict=True):
            assert torch.equal(a[rest], c[rest])
            assert c[~rest].eq(0).all()


@BOTH
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_bad_value_is_not_hidden_from_its_own_document(attend, which):
    """Outputs of the same document from that token on are NaN; earlier ones are what they were."""
    inputs = drawn()
    clean = attend(*inputs, documents())
    with torch.no_grad():
        inputs[which][0, 8, 1, 2] = float("inf")
    out = attend(*inputs, documents())
    assert out[0, 8:12].isnan().all()
    rest = others_than(0, 8, 12)
    assert torch.equal(out[rest], clean[rest])


@BOTH
def test_one_graph(attend):
    for single, lengths in ((False, LENGTHS), (True, [[11], [16]])):
        q, k, v = (t.detach() for t in drawn())
        where = documents(lengths, single=single)
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(q, k, v, where), attend(q, k, v, where))


def test_names_and_refusals():
    assert list(ATTENTIONS) == ["masked", "sdpa", "varlen", "cudnn", "fa4"]
    q, k, v = drawn(torch.bfloat16)
    with pytest.raises(NeedsError, match=r"torch\.bfloat16 on cpu"):
        varlen(q, k, v, documents())
    with pytest.raises(NeedsError, match="rows of several documents"):
        ATTENTIONS["cudnn"](q, k, v, documents())


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_by_a_kernel_without_them(window):
    """Outputs scaled after it, and its own backward pass given those: values and gradients of the reference."""
    g = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(B, T, H, E, dtype=torch.float64, generator=g).requires_grad_() for _ in range(4))
    sinks = torch.randn(H, dtype=torch.float64, generator=g).requires_grad_()
    rows = documents()
    want = masked(q, k, v, rows, window=window, sinks=sinks)
    wants = torch.autograd.grad(want, (q, k, v, sinks), d_out)
    with torch.no_grad():
        heads = [x.transpose(1, 2) for x in (q, k, v, d_out)]
        mask = torch.zeros(B, 1, T, T, dtype=torch.float64)
        mask = mask.masked_fill(~visible_tokens(rows, window)[:, None], float("-inf"))
        plain, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads[:3], attn_mask=mask)
        out, total = include_sinks(plain.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1), sinks)
        inside = out.view(B, T, H, E).transpose(1, 2), total.view(H, B, T).transpose(0, 1)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = [x.transpose(1, 2) for x in backward(heads[3], *heads[:3], *inside, 0.0, False, attn_mask=mask)]
        found.append(sinks_gradient(d_out.flatten(0, 1), out, total, sinks))
    for got, wanted in zip((out.view(B, T, H, E), *found), (want, *wants), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
