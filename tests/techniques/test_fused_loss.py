"""The loss a chunk at a time: the baseline's loss and gradients, and never all the logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrush.kernels import cross_entropy

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
