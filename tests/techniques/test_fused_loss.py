"""The loss a chunk at a time: the baseline's loss and gradients, and never all the logits."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrush import technique, toolchain
from optrush.errors import NeedsError
from optrush.hardware import named
from optrush.kernels import cross_entropy, libraries
from optrush.kernels.libraries import even
from optrush.kernels.nll import Package
from optrush.prepare import prepare
from optrush.technique import unmet
from optrush.techniques.fused_loss import FusedLoss

from golden.make_golden import CASES, SIZES, T
from trials import assembled, first_gradients, furthest, golden_run

CLOSE = 1e-5
V = SIZES["vocab_size"]


@pytest.mark.parametrize(
    ("implementation", "chunk"), [("native", 1), ("native", 5), ("native", 96), ("native", 4096), ("transformers", 5)]
)
@pytest.mark.parametrize("name", ["chat", "tied"])
def test_same_loss_and_gradients(box, name, chunk, implementation):
    def made(**with_):
        sets = [f"model.implementation={implementation}"]
        return first_gradients(assembled(golden_run(box, CASES[name], packed=True, sets=sets, **with_)))

    (loss, grads), (want_loss, want) = made(fused_loss={"chunk": chunk}), made()
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < CLOSE


class Widest(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary, the weight's own storage left out."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.weight = 0, weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            logits = isinstance(t, torch.Tensor) and t.dim() and t.shape[-1] == V
            if logits and t.untyped_storage().data_ptr() != self.weight:
                self.rows = max(self.rows, t.numel() // V)
        return out


@pytest.mark.parametrize(("chunk", "most"), [(None, 4 * T), (16, 16)])
def test_logits_are_never_held_whole(box, chunk, most):
    job = assembled(golden_run(box, rows=4, packed=True, **({} if chunk is None else {"fused_loss": {"chunk": chunk}})))
    hidden = torch.randn(4, T, SIZES["hidden_size"], requires_grad=True)
    labels = torch.randint(0, V, (4, T))
    head = job.model.head

    def by_token() -> None:
        head(hidden, labels, reduce="token").sum().backward()

    for call in (lambda: head(hidden, labels).backward(), torch.no_grad()(lambda: head(hidden, labels)), by_token):
        with Widest(head.weight) as seen:
            call()
        assert seen.rows == most


def test_these_tests_would_see_a_lost_chunk(box, monkeypatch):
    real = cross_entropy._spans
    want = first_gradients(assembled(golden_run(box, fused_loss={"chunk": 40})))
    monkeypatch.setattr(cross_entropy, "_spans", lambda n, chunk: list(real(n, chunk))[:-1])
    loss, grads = first_gradients(assembled(golden_run(box, fused_loss={"chunk": 40})))
    assert abs(loss - want[0]) > 1e-2
    assert furthest(grads, want[1]) > 1e-2


# The packages, as far as a CPU can tell.


@pytest.mark.parametrize("impl", ["quack", "liger"])
def test_refused_where_it_cannot_run(box, impl, monkeypatch):
    with pytest.raises(NeedsError, match="CUDA"):
        prepare(golden_run(box, fused_loss={"impl": impl}, bf16={}))
    plain = prepare(golden_run(box, bf16={})).setup

    def lacks(device="h200", **options):
        setup = dataclasses.replace(plain, device=named(device)[0], vocab=options.pop("vocab", 1024))
        return [need.found for need in unmet([FusedLoss(impl=impl, **options)], setup)]

    assert lacks() == []
    assert len(lacks(chunk=100)) == 1
    if impl == "quack":
        assert lacks("b200") and lacks(vocab=1000) == ["a vocabulary of 1000, no multiple of 128"]
        wide = dataclasses.replace(plain, owned=frozenset(), device=named("h200")[0])
        assert any("float32" in need.found for need in unmet([FusedLoss(impl=impl)], wide))
    job = assembled(golden_run(box))
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match=r"not installed(.|\n)*optrush\[kernels\]"):
        FusedLoss(impl=impl).loss(job)
    monkeypatch.setattr(technique, "library", lambda name: "1")
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "library", lambda name: "1")
        patch.setattr(toolchain, "installed", lambda *names: None)
        patch.setattr(job, "setup", dataclasses.replace(job.setup, device=named("h200")[0]))
        with pytest.raises(NeedsError, match=f"impl={impl}` runs a Triton(.|\n)*C compiler"):
            FusedLoss(impl=impl).loss(job)
    job.model.head.softcap = 30.0
    with pytest.raises(NeedsError, match="softcap"):
        FusedLoss(impl=impl).loss(job)
    job.model.head.softcap = None
    if impl == "quack":
        with pytest.raises(NeedsError, match="vocabulary"):
            FusedLoss(impl=impl).loss(job)  # V is no multiple of 128
    else:
        assert FusedLoss(impl=impl).loss(job) == 1


def test_a_package_serves_training_alone():
    torch.manual_seed(0)
    asked = []

    def library(hidden, weight, labels, chunk):
        asked.append(chunk)
        return cross_entropy.chunked_nll(hidden, weight, labels, chunk=chunk)

    kernel = Package(function=library, chunk=8)
    hidden, weight, labels = torch.randn(20, 4, requires_grad=True), torch.randn(V, 4), torch.randint(0, V, (20,))
    rest = {"bias": None, "scale": 1.0, "softcap": None, "part": None, "weights": None, "reduce": "sum"}
    want = cross_entropy.nll(hidden, weight, labels)
    assert kernel(hidden, weight, labels, **rest).item() == pytest.approx(want.item(), rel=1e-6)
    assert asked == [8]
    with torch.no_grad():
        assert kernel(hidden, weight, labels, **rest).item() == pytest.approx(want.item(), rel=1e-6)
    assert asked == [8], "evaluation goes through the chunked kernel"
    for other in ({"weights": torch.ones(20)}, {"reduce": "token"}):
        with pytest.raises(NeedsError, match="impl=chunked"):
            kernel(hidden, weight, labels, **{**rest, **other})


@pytest.mark.parametrize("D", [128, 256, 512, 2048, 4096])
@pytest.mark.parametrize("chunk", [128, 512, 4096, 8192])
def test_no_chunk_has_as_many_rows_as_the_width(D, chunk):
    for N in (1, 127, 128, 129, 500, 512, 1000, 2048, 4096, 8192, 12288, 32768):
        try:
            size = even(N, D, chunk)
        except NeedsError:
            assert D == 128  # the smallest there is
            continue
        assert size % 128 == 0 and 0 < size <= chunk
        last = -(-(N % size or size) // 128) * 128
        assert last != D and (size >= N or size != D)


# QuACK's operator replaced by plain torch: what is made of its gradients is ours.

CPU_N, CPU_D, FACTOR = 200, 16, 1 / 3


@pytest.fixture
def quack(monkeypatch):
    """The calls of a module that stands for the library's, whose padding is no number."""
    calls = []

    def padded(x, rows, fill):
        return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), fill)])

    def forward(x, weight, target, chunk_size, ignore_index=-100, *, need_dx=True, need_dw=True):
        assert x.dtype == weight.dtype and x.is_contiguous() and chunk_size % 128 == 0 and ignore_index == -100
        calls.append((x.dtype, need_dx, need_dw))
        wide = [t.double().requires_grad_() for t in (x, weight)]
        rows = -(-len(x) // 128) * 128
        with torch.enable_grad():
            losses = F.cross_entropy(wide[0] @ wide[1].T, target, reduction="none", ignore_index=ignore_index)
            dx, dw = torch.autograd.grad(losses.sum(), wide)
        losses = padded(losses.detach().float(), rows, math.nan)
        return losses, padded(dx.to(x.dtype), rows, math.nan) if need_dx else None, dw.float() if need_dw else None

    def whole(x, weight, target, chunk_size, ignore_index, reduction):
        assert reduction == "sum"
        calls.append("without gradients")
        return F.cross_entropy(x @ weight.T, target, reduction="sum", ignore_index=ignore_index)

    module = types.ModuleType("quack.linear_cross_entropy")
    module.scaled_exp_linear_cross_entropy_fwd, module.scaled_exp_linear_cross_entropy = forward, whole
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    return calls


def drawn(dtype):
    """Hidden states of which every second row is taken, weight, labels of which a third are ignored."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(CPU_N, 2, CPU_D, generator=g)[:, 1].to(dtype)
    labels = torch.randint(0, V, (CPU_N,), generator=g)
    labels[::3] = -100
    return hidden.requires_grad_(), torch.randn(V, CPU_D, generator=g).to(dtype).requires_grad_(), labels


def oracle(hidden, weight, labels):
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss = F.cross_entropy(wide[0] @ wide[1].T, labels, reduction="sum", ignore_index=-100)
    return loss, torch.autograd.grad(loss * FACTOR, wide)


@pytest.mark.parametrize("amp", [False, True], ids=["", "amp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quack_against_float64(quack, dtype, amp, monkeypatch):
    hidden, weight, labels = drawn(dtype)
    half = torch.bfloat16 if amp else dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: amp)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    want, wants = oracle(hidden.to(half), weight.to(half), labels)
    loss = libraries.quack(hidden, weight, labels, 128)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(want.item(), rel=1e-6)
    grads = torch.autograd.grad(loss * FACTOR, (hidden, weight), retain_graph=True)
    assert quack == [(half, True, True)]
    # The library rounds hidden's, and what is given in bfloat16 is rounded by us; the rest is float32's.
    for grad, right, rounded in zip(grads, wants, (half == torch.bfloat16, False), strict=True):
        roundings = int(rounded) + (dtype == torch.bfloat16)
        assert grad.dtype == dtype
        assert ((grad.double() - right).abs() <= right.abs() * (roundings * 2.0**-8 + 3e-7)).all()
    assert not grads[0][::3].any()
    with pytest.raises(RuntimeError, match="gives its gradients once"):
        torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_quack_makes_the_gradient_of_what_is_trained(quack, trained):
    *tensors, labels = drawn(torch.float32)
    tensors[1 - trained].requires_grad_(False)
    (libraries.quack(*tensors, labels, 128) * FACTOR).backward()
    torch.testing.assert_close(tensors[trained].grad.double(), oracle(*tensors, labels)[1][trained])
    assert tensors[1 - trained].grad is None
    with torch.no_grad():
        libraries.quack(*tensors, labels, 128)
    assert quack == [(torch.float32, trained == 0, trained == 1), "without gradients"]
