"""The loss a chunk at a time: the baseline's loss and gradients, and never all the logits."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interpreter
from optrush import technique
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import CPU, parse_hardware
from optrush.kernels import cross_entropy, linear_cross_entropy
from optrush.kernels.cross_entropy import Package
from optrush.kernels.linear_cross_entropy import rows_per_chunk
from optrush.technique import library, missing, refuse_unmet, unmet
from optrush.techniques.fused_loss import FusedLoss

from golden.make_golden import SIZES, T
from trials import assembled, golden_run, shaped

V = SIZES["vocab_size"]


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


# The packages, as far as a CPU can tell.


def test_a_stage_of_a_pipeline_without_a_head(monkeypatch):
    """The weight that quack's kernel asks for lies on another rank."""
    monkeypatch.setattr(FusedLoss, "demand_triton", lambda *_: None)
    head = SimpleNamespace(weight=None, bias=None, scale=1.0, softcap=None, nll=None)
    env = SimpleNamespace(vocab=256, slots=64, device=CPU)
    trainer = SimpleNamespace(model=SimpleNamespace(head=head), env=env, precision=torch.bfloat16, notes=[])
    assert FusedLoss(impl="quack").loss(trainer) == 1 and isinstance(head.nll, Package)


@pytest.mark.parametrize("impl", ["quack", "liger"])
def test_a_package_has_no_loss_of_a_cut_vocabulary(impl):
    """Said by a plan, not first where the run is built."""
    device, _ = parse_hardware("h100")
    with pytest.raises(NeedsError, match="a vocabulary that is sharded over ranks"):
        decide(shaped("llama-3.2-1b", "bf16", f"fused-loss:impl={impl}", "tensor", seq=1024), device=device, ranks=2)


@pytest.mark.parametrize("impl", ["quack", "liger"])
def test_refused_where_it_cannot_run(box, impl, monkeypatch):
    with pytest.raises(NeedsError, match="CUDA"):
        decide(golden_run(box, fused_loss={"impl": impl}, bf16={}))
    plain = decide(golden_run(box, bf16={})).env

    def lacks(device="h200", **options):
        env = dataclasses.replace(plain, device=parse_hardware(device)[0], vocab=options.pop("vocab", 1024))
        return [need.found for need in unmet([FusedLoss(impl=impl, **options)], env)]

    assert lacks() == []
    assert len(lacks(chunk=100)) == 1
    if impl == "quack":
        assert lacks("b200") and lacks(vocab=1000) == ["a vocabulary of 1000, not a multiple of 128"]
        wide = dataclasses.replace(plain, claimed=frozenset(), device=parse_hardware("h200")[0])
        assert any("float32" in need.found for need in unmet([FusedLoss(impl=impl)], wide))
    job = assembled(golden_run(box))
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match=r"not installed(.|\n)*optrush\[kernels\]"):
        refuse_unmet(missing(FusedLoss(impl=impl)))
    with monkeypatch.context() as patch:
        patch.setattr(technique, "library", lambda name: "1")
        patch.setattr(technique, "installed", lambda *names: None)
        patch.setattr(job, "env", dataclasses.replace(job.env, device=parse_hardware("h200")[0]))
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
        return cross_entropy.chunked_cross_entropy(hidden, weight, labels, chunk=chunk)

    kernel = Package(function=library, chunk=8)
    hidden, weight, labels = torch.randn(20, 4, requires_grad=True), torch.randn(V, 4), torch.randint(0, V, (20,))
    rest = {"bias": None, "scale": 1.0, "softcap": None, "reduce": "sum"}
    want = cross_entropy.cross_entropy(hidden, weight, labels)
    assert kernel(hidden, weight, labels, **rest).item() == pytest.approx(want.item(), rel=1e-6)
    assert asked == [8]
    with torch.no_grad():
        assert kernel(hidden, weight, labels, **rest).item() == pytest.approx(want.item(), rel=1e-6)
    assert asked == [8], "evaluation goes through the chunked kernel"
    losses = kernel(hidden, weight, labels, **{**rest, "reduce": "token"})
    assert losses.sum().item() == pytest.approx(want.item(), rel=1e-6) and losses.requires_grad
    assert asked == [8], "and so do losses by token"


@pytest.mark.parametrize("chunk", [128, 512, 4096, 8192])
def test_chunks_are_about_even(chunk):
    for N in (0, 1, 127, 128, 129, 500, 512, 1000, 2048, 4096, 8192, 12288, 32768):
        size = rows_per_chunk(N, chunk)
        assert 0 < size <= chunk and (size % 128 == 0 or size >= N)
        chunks = -(-N // size)
        assert chunks == -(-N // chunk) and size * chunks - N < 128 * max(chunks, 1)


# By exponents: the plain forms of its kernels, and what is made of them.

CPU_N, CPU_D, FACTOR = 400, 16, 1 / 3
CHUNKS = pytest.mark.parametrize("chunk", [512, 128], ids=["one chunk", "several"])


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


@CHUNKS
@pytest.mark.parametrize("amp", [False, True], ids=["", "amp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exponents_against_float64(dtype, amp, chunk):
    hidden, weight, labels = drawn(dtype)
    half = torch.bfloat16 if amp else dtype
    want, wants = oracle(hidden.to(half), weight.to(half), labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = linear_cross_entropy.quack(hidden, weight, labels, chunk)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(want.item(), rel=1e-6)
    close = 1e-6 if half == torch.float32 else 1e-2
    grads = torch.autograd.grad(loss * FACTOR, (hidden, weight), retain_graph=True)
    for grad, right in zip(grads, wants, strict=True):
        assert grad.dtype == dtype and (grad.double() - right).norm() < right.norm() * close
    assert not grads[0][::3].any()
    with pytest.raises(RuntimeError, match=r"one backward only|backward through the graph a second time"):
        torch.autograd.grad(loss, hidden)


def test_a_weight_that_changed_before_the_backward_pass_is_seen():
    hidden, weight, labels = drawn(torch.float32)
    loss = linear_cross_entropy.quack(hidden, weight, labels, 512)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_sum_is_of_what_is_not_rounded_yet_and_chunks_are_summed_in_float32(monkeypatch):
    *tensors, labels = drawn(torch.bfloat16)
    e = torch.empty(CPU_N, V, dtype=torch.bfloat16)
    sums = linear_cross_entropy.exp_logits(
        tensors[0], tensors[1], linear_cross_entropy.label_offsets(*tensors, labels), e
    ).sum(1)[1]
    assert sums.item() != e[1].float().sum().item() and sums.item() == pytest.approx(
        e[1].float().sum().item(), rel=1e-2
    )
    added = []
    monkeypatch.setattr(linear_cross_entropy, "scale_to_dtype", lambda t, *_: added.append(t) or t)
    linear_cross_entropy.quack(*tensors, labels, 128).backward()
    assert [t.dtype for t in added] == [torch.float32]


def test_what_has_no_factor_is_zero_whatever_it_was():
    x = torch.tensor([[1.0, math.nan], [math.inf, 2.0], [1.0, 2.0]])
    found = linear_cross_entropy.scale_rows(x, torch.tensor([0.0, 0.0, 3.0]), torch.tensor(0.5), torch.empty_like(x))
    assert found.tolist() == [[0, 0], [0, 0], [1.5, 3]]


def test_small_losses_keep_their_digits():
    """A label's logit of 0, whose exponent is not rounded, ten nats above the only other one."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [-10.0]])
    loss = linear_cross_entropy.quack(hidden, weight, torch.tensor([0]), 128)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-10)), abs=2e-7)


def interpreted():
    """Rows and parts over the kernels' blocks; not rounded to bfloat16, for the interpreter cuts there."""
    from optrush.kernels import linear_cross_entropy_triton as kernels

    torch.manual_seed(0)
    for n, width, vocab, parts in ((5, 16, 128, 1), (4, 2049, 384, 2), (3, 5000, 640, 1025), (1, 2048, 128, 1024)):
        x, weight = torch.randn(n, width), torch.randn(vocab, width) / width**0.5
        labels = torch.randint(0, vocab, (n,))
        labels[n // 2] = labels[n // 2] if n == 1 else -100
        args = x, weight, labels
        torch.testing.assert_close(
            kernels.launch_label_offsets(*args, linear_cross_entropy.LOG2E, linear_cross_entropy.SHIFT),
            linear_cross_entropy.label_offsets(*args),
            rtol=1e-5,
            atol=1e-5,
        )
        sums, e = torch.rand(n, parts) / 2.0 ** torch.randint(0, 70, (n, 1)), torch.rand(n, vocab)
        settled = [(e.clone(), torch.empty(n), torch.empty(n)) for _ in range(2)]
        kernels.launch_finish_rows(settled[0][0], sums, labels, *settled[0][1:], linear_cross_entropy.SHIFT)
        linear_cross_entropy.finish_rows(settled[1][0], sums, labels, *settled[1][1:])
        for got, want in zip(*settled, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=0)
        rows, factor = torch.rand(n), torch.tensor(1 / 3)
        rows[0], x[0] = 0, math.nan
        for out in (torch.empty(n, width), x):  # in place last
            want = linear_cross_entropy.scale_rows(x, rows, factor, torch.empty(n, width))
            assert torch.equal(kernels.launch_scale_rows(x, rows, factor, out), want)
    print("equal")


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_the_plain_forms():
    interpreter.says(__file__, "equal")


@CHUNKS
@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_exponents_make_the_gradient_of_what_is_trained(trained, chunk):
    *tensors, labels = drawn(torch.float32)
    tensors[1 - trained].requires_grad_(False)
    (linear_cross_entropy.quack(*tensors, labels, chunk) * FACTOR).backward()
    want = oracle(*tensors, labels)[1][trained]
    torch.testing.assert_close(tensors[trained].grad.double(), want, rtol=1e-5, atol=5e-6)
    assert tensors[1 - trained].grad is None
    with torch.no_grad():
        loss = linear_cross_entropy.quack(*tensors, labels, chunk)
    assert loss.item() == pytest.approx(oracle(*tensors, labels)[0].item())


@pytest.mark.parametrize("nats", [0.0, 40.0, 80.0, 120.0, -30.0])
def test_exponents_of_logits_far_from_the_labels(nats):
    """The row's largest logit so far above its label's (below: the label's is the largest), and all far from zero."""
    z = torch.zeros(6, V)
    z[:, 1::2] = -3.0
    z[:, 7] = nats
    hidden, weight = torch.eye(6).requires_grad_(), (z.T + 50.0).contiguous().requires_grad_()
    labels = torch.zeros(6).long()
    want = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    wants = torch.autograd.grad(want, (hidden, weight))
    loss = linear_cross_entropy.quack(hidden, weight, labels, 512)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5, abs=1e-4)
    for grad, right in zip(torch.autograd.grad(loss, (hidden, weight)), wants, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


def test_a_loss_beyond_the_exponents_is_infinite():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [140.0]])
    assert linear_cross_entropy.quack(hidden, weight, torch.tensor([0]), 128).item() == math.inf


def test_ignored_rows_count_nothing_and_there_may_be_none():
    *tensors, labels = drawn(torch.float32)
    loss = linear_cross_entropy.quack(*tensors, torch.full_like(labels, -100), 128)
    assert loss.item() == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, tensors))
    empty = tensors[0][:0]
    assert not torch.autograd.grad(linear_cross_entropy.quack(empty, tensors[1], labels[:0], 128), tensors[1])[0].any()


if __name__ == "__main__":
    interpreted()
