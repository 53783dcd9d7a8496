"""Both loss kernels against torch's cross_entropy in float64: values and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from optrush.kernels import cross_entropy as cross_entropy_module
from optrush.kernels.cross_entropy import chunk_loss, chunked_cross_entropy, cross_entropy

torch.set_num_threads(1)
N, D, V = 23, 8, 37
CASES = {
    "plain": {}, "bias": {"bias": True}, "softcap": {"softcap": 1.5}, "scale": {"scale": 0.3},
    "all": {"bias": True, "softcap": 2.0, "scale": 1.7},
}  # fmt: skip


def chunked(*args, **kwargs):
    return chunked_cross_entropy(*args, chunk=5, **kwargs)


def problem(case, dtype=torch.float64, *, seed=0):
    """(hidden, weight, labels, keywords) with a quarter of the labels ignored."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    hidden, weight = draw(N, D).requires_grad_(), draw(V, D).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=g)
    labels[torch.rand(N, generator=g) < 0.25] = -100
    options = dict(CASES[case])
    if options.pop("bias", False):
        options["bias"] = draw(V).requires_grad_()
    return hidden, weight, labels, options


def oracle(hidden, weight, labels, *, bias=None, scale=1.0, softcap=None):
    """By row, in float64, from torch's own loss."""
    z = hidden.double() @ weight.double().T
    z = (z if bias is None else z + bias.double()) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, labels, ignore_index=-100, reduction="none")


def gradients(loss, hidden, weight, options):
    leaves = [hidden, weight, *([options["bias"]] if "bias" in options else [])]
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("kernel", [cross_entropy, chunked])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduce", ["sum", "token"])
def test_against_float64(kernel, case, dtype, reduce):
    hidden, weight, labels, options = problem(case, dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    got, want = kernel(hidden, weight, labels, reduce=reduce, **options), oracle(hidden, weight, labels, **options)
    factor = torch.linspace(-1, 2, N, dtype=torch.float64)
    want = want.sum() * 0.7 if reduce == "sum" else want
    got = got * 0.7 if reduce == "sum" else got
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, **close)
    if reduce == "token":
        got, want = (got * factor.to(dtype)).sum(), (want * factor).sum()
    for a, b in zip(gradients(got, hidden, weight, options), gradients(want, hidden, weight, options), strict=True):
        torch.testing.assert_close(a.double(), b.double(), **close)


@pytest.mark.parametrize("kernel", [cross_entropy, chunked])
@pytest.mark.parametrize("reduce", ["sum", "token"])
def test_ignored_rows_give_exactly_nothing(kernel, reduce):
    """Whatever they hold: NaN hidden values."""
    hidden, weight, labels, options = problem("all", torch.float32)
    ignored = labels == -100
    clean = kernel(hidden, weight, labels, reduce=reduce, **options)
    clean_grads = gradients(clean.sum(), hidden, weight, options)
    with torch.no_grad():
        hidden[ignored] = float("nan")
    dirty = kernel(hidden, weight, labels, reduce=reduce, **options)
    assert torch.equal(clean, dirty)
    if reduce == "token":
        assert dirty[ignored].eq(0).all()
    for a, b in zip(clean_grads, gradients(dirty.sum(), hidden, weight, options), strict=True):
        assert torch.equal(a, b)
    assert clean_grads[0][ignored].eq(0).all() and clean_grads[0][~ignored].ne(0).any()


@pytest.mark.parametrize("kernel", [cross_entropy, chunked])
@pytest.mark.parametrize("reduce", ["sum", "token"])
@pytest.mark.parametrize("n", [0, 6])
def test_nothing_learnt_is_zero(kernel, reduce, n):
    hidden, weight, _, _ = problem("plain", torch.float32)
    loss = kernel(hidden[:n], weight, torch.full((n,), -100), reduce=reduce).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0 and all(g.eq(0).all() for g in grads)


@pytest.mark.parametrize("reduce", ["sum", "token"])
def test_frozen_inputs_get_no_gradient(reduce):
    hidden, weight, labels, _ = problem("plain")
    chunked(hidden, weight.detach(), labels, reduce=reduce).sum().backward()
    want = torch.autograd.grad(oracle(hidden, weight, labels).sum(), (hidden, weight))
    torch.testing.assert_close(hidden.grad, want[0])
    chunked(hidden.detach(), weight, labels, reduce=reduce).sum().backward()
    torch.testing.assert_close(weight.grad, want[1])


def test_without_gradient_no_gradient_is_made():
    hidden, weight, labels, options = problem("all", torch.float32)

    def inner(*_args):
        raise AssertionError("gradients were made")

    with torch.no_grad():
        got = chunked(hidden, weight, labels, inner=inner, **options)
    assert not got.requires_grad
    torch.testing.assert_close(got.double(), oracle(hidden, weight, labels, **options).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "token"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_and_autocast(reduce, weight_dtype):
    """Products in bfloat16, all else in float32, gradients in the inputs' own types; summed over chunks in float32."""
    hidden, weight, labels, options = problem("all", torch.float32)
    hidden, weight = (t.detach().to(weight_dtype).requires_grad_() for t in (hidden, weight))
    options["bias"] = options["bias"].detach().to(weight_dtype).requires_grad_()
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight, options["bias"])]
    want = oracle(rounded[0], rounded[1], labels, **{**options, "bias": rounded[2]}).sum()
    want_grads = torch.autograd.grad(want, rounded)
    for kernel in (cross_entropy, chunked):
        with torch.autocast("cpu", torch.bfloat16, enabled=weight_dtype == torch.float32):
            got = kernel(hidden, weight, labels, reduce=reduce, **options).sum()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
        for g, w, t in zip(gradients(got, hidden, weight, options), want_grads, (hidden, weight, options["bias"])):
            assert g.dtype == t.dtype
            assert (g.double() - w).abs().max() < 2e-2 * w.abs().max()


def test_weight_gradient_is_summed_in_float32():
    """Many rows of one bfloat16 gradient: summed in bfloat16 they would stall at 256 times the first."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk=1).backward()
    assert weight.grad.tolist() == [[-512.0], [512.0]]


def test_the_body_of_a_chunk_may_be_replaced_and_compiled():
    hidden, weight, labels, options = problem("all", torch.float32)
    shapes = []

    def inner(h, *rest):
        shapes.append(len(h))
        return compiled(h, *rest)

    compiled = torch.compile(chunk_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    got = chunked(hidden, weight, labels, inner=inner, **options)
    assert shapes == [5, 5, 5, 5, 3]
    torch.testing.assert_close(got, cross_entropy(hidden, weight, labels, **options))
    for a, b in zip(
        gradients(got, hidden, weight, options),
        gradients(cross_entropy(hidden, weight, labels, **options), hidden, weight, options),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_sum_gives_its_gradients_once():
    hidden, weight, labels, _ = problem("plain")
    loss = chunked(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


def test_losses_by_token_of_a_package_are_those_in_chunks():
    """A package has the sum alone; weighted rows and losses of other people need each token's."""
    package = cross_entropy_module.Package(function=lambda *_: torch.zeros(()), chunk=8)
    found = []
    for kernel in (package, cross_entropy_module.Chunked(chunk=8)):
        hidden = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
        losses = kernel(hidden, weight, torch.arange(12) % 9, reduce="token")
        (losses * torch.arange(12)).sum().backward()
        found.append((losses.detach(), hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
