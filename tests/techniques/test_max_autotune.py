"""Max-autotune: whatever is compiled is told the mode, and computes what it computed before."""

from __future__ import annotations

import pytest
import torch

from optrush.errors import NeedsError
from optrush.prepare import prepare

from trials import assembled, first_gradients, furthest, golden_run, steps, wire

MODE = "max-autotune-no-cudagraphs"
CLOSE = 1e-5


@pytest.fixture
def modes(monkeypatch):
    """The modes that modules and functions are compiled in, instead of compiling them."""
    told = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode, **_: told.append(("module", mode)))
    monkeypatch.setattr(torch, "compile", lambda f, mode, **_: told.append(("function", mode)) or f)
    return told


@pytest.mark.parametrize("with_", [{}, {"fused_loss": {"chunk": 32}}, {"compile": {"scope": "model"}}], ids=str)
@pytest.mark.parametrize("tuned", [True, False])
def test_everything_compiled_is_told(box, modes, with_, tuned):
    asked = {"compile": {}, **with_, **({"max_autotune": {}} if tuned else {})}
    job = assembled(golden_run(box, packed=True, **asked))
    list(steps(job, 1))
    assert {kind for kind, _ in modes} == {"module", "function"}
    assert {mode for _, mode in modes} == {MODE if tuned else "default"}
    assert tuned == any("first steps compile" in note for note in job.notes)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_same_figures(box):
    """Compiled in that mode, in earnest: losses, norms and gradients of the baseline."""

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
        prepare(golden_run(box, max_autotune={}))
