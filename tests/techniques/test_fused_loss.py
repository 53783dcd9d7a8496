"""The loss a chunk at a time: the baseline's loss and gradients, and never all the logits."""

from __future__ import annotations

import pytest
import torch
from golden.make_golden import CASES, SIZES, T
from runs import assembled, first_gradients, furthest, golden_run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrush.kernels import cross_entropy

CLOSE = 1e-5
V = SIZES["vocab_size"]


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("chunk", [1, 5, 96, 4096])
@pytest.mark.parametrize("name", ["chat", "tied"])
def test_same_loss_and_gradients(box, name, chunk, implementation):
    def made(**with_):
        sets = [f"model.implementation={implementation}"]
        return first_gradients(assembled(golden_run(box, CASES[name], packed=True, sets=sets, **with_)))

    if chunk != 5 and implementation == "transformers":
        pytest.skip("one chunk size is enough for the adapter")
    (loss, grads), (want_loss, want) = made(**{"fused-loss": {"chunk": chunk}}), made()
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < CLOSE


class Widest(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary, and most numbers of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.numel())
                if t.dim() and t.shape[-1] == V:
                    self.rows = max(self.rows, t.numel() // V)
        return out


@pytest.mark.parametrize(("chunk", "most"), [(None, 4 * T), (16, 16)])
def test_logits_are_never_held_whole(box, chunk, most):
    """In training and in evaluation. The (V, D) weight's transpose is (D, V): views of weights are no logits."""
    with_ = {} if chunk is None else {"fused-loss": {"chunk": chunk}}
    job = assembled(golden_run(box, rows=4, packed=True, **with_))
    hidden = torch.randn(4 * T, SIZES["hidden_size"], requires_grad=True)
    labels = torch.randint(0, V, (4, T))
    with Widest() as seen:
        job.model.head(hidden.view(4, T, -1), labels).backward()
        with torch.no_grad():
            job.model.head(hidden.view(4, T, -1), labels)
    assert seen.rows in (most, SIZES["hidden_size"]) and (seen.rows == most or chunk is not None)
    with Widest() as seen, torch.no_grad():
        job.model.head(hidden.view(4, T, -1)[:, :, :], labels, reduce="token")
    assert seen.rows in (most, SIZES["hidden_size"]) and (seen.rows == most or chunk is not None)
    assert chunk is None or seen.numbers < 4 * T * V


def test_these_tests_would_see_a_lost_chunk(box, monkeypatch):
    real = cross_entropy._spans
    want = first_gradients(assembled(golden_run(box, **{"fused-loss": {"chunk": 40}})))
    monkeypatch.setattr(cross_entropy, "_spans", lambda n, chunk: list(real(n, chunk))[:-1])
    loss, grads = first_gradients(assembled(golden_run(box, **{"fused-loss": {"chunk": 40}})))
    assert abs(loss - want[0]) > 1e-2
    assert furthest(grads, want[1]) > 1e-2
