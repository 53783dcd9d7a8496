"""Max-autotune: whatever is compiled is told the options, and computes what it computed before."""

from __future__ import annotations

import pytest
import torch

from optrush.errors import NeedsError
from optrush.resolve import resolve

from trials import assembled, first_gradients, furthest, golden_run, steps, wire

CLOSE = 1e-5


@pytest.fixture
def told(monkeypatch):
    """The options that modules and functions are compiled with, instead of compiling them."""
    told = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, options, **_: told.append(("module", options)))
    monkeypatch.setattr(torch, "compile", lambda f, options, **_: told.append(("function", options)) or f)
    return told


@pytest.mark.parametrize("with_", [{}, {"fused_loss": {"chunk": 32}}, {"compile": {"scope": "model"}}], ids=str)
@pytest.mark.parametrize("tuned", [True, False])
def test_everything_compiled_is_told(box, told, with_, tuned):
    asked = {"compile": {}, **with_, **({"max_autotune": {}} if tuned else {})}
    job = assembled(golden_run(box, packed=True, **asked))
    list(steps(job, 1))
    assert {kind for kind, _ in told} == {"module", "function"}
    assert all(options == ({"max_autotune": True} if tuned else {}) for _, options in told)
    assert tuned == any("first steps compile" in note for note in job.notes)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_same_figures(box):
    """Compiled with them, in earnest: losses, norms and gradients of the baseline."""

    def trained(**with_):
        job = assembled(golden_run(box, packed=True, attention={}, **with_))
        _, grads = first_gradients(job)
        wire(job)  # from the first step again
        return grads, list(steps(job, 2))

    torch._dynamo.reset()
    grads, figures = trained()
    tuned, tuned_figures = trained(compile={}, max_autotune={})
    torch._dynamo.reset()
    assert furthest(tuned, grads) < CLOSE
    assert tuned_figures == [pytest.approx(line, rel=CLOSE) for line in figures]


def test_it_wants_somebody_who_compiles(box):
    with pytest.raises(NeedsError, match="nobody owns what is compiled"):
        resolve(golden_run(box, max_autotune={}))
