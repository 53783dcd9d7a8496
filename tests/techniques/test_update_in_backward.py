"""Updating in the backward pass is the plain update without clipping, to the bit, with one gradient at a time."""

from __future__ import annotations

import math

import pytest
import torch

from meshes import further
from optrush import technique
from optrush.hardware import NAMED
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import baseline, ledger
from optrush.planner.ledger import BFLOAT16, FLOAT32
from optrush.technique import Environment, instantiate
from optrush.techniques import ALL

from golden.make_golden import PER_STEP, Case, T
from trials import all_bits, assembled, first_gradients, golden_run, steps

WHOLE = [f"batch.micro_tokens={T * PER_STEP // 2}", "optim.clip=null"]
OPTIMIZERS = [{}, {"fused_adamw": {}}, {"adam8bit": {}}, {"bf16": {}}, {"bf16": {}, "adam8bit": {}}]


def trained(box, case, n=5, **with_):
    job = assembled(golden_run(box, case, packed=True, sets=WHOLE, **with_))
    return list(steps(job, n)), all_bits(job), job


@pytest.mark.parametrize("case", further([Case(True), Case(False)], 1), ids=["tied", "untied"])
@pytest.mark.parametrize(
    "optimizer", further([OPTIMIZERS[4], OPTIMIZERS[1], *OPTIMIZERS[:1], *OPTIMIZERS[2:4]], 2), ids=str
)
def test_equal_bits_over_five_steps(box, optimizer, case):
    """Weights, moments and counts; a tied weight, whose gradient comes in two parts, is stepped once."""
    base, want, _ = trained(box, case, **optimizer)
    figures, found, job = trained(box, case, **optimizer, update_in_backward={})
    assert [f[0] for f in figures] == [f[0] for f in base], "losses, to the bit"
    assert [f[1] for f in figures] == [pytest.approx(f[1], rel=1e-6) for f in base], "norms, summed in another order"
    assert not any(f[2] for f in figures)
    assert found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)
    assert all(s["count"] == 5 for s in job.optimizer.state().values())


@pytest.mark.parametrize("beside", [{"recompute": {}}, {"amp": {}, "fused_loss": {"chunk": 50}}], ids=str)
def test_beside_others(box, beside):
    base, want, _ = trained(box, Case(True), n=3, **beside)
    figures, found, _ = trained(box, Case(True), n=3, **beside, update_in_backward={})
    assert [f[0] for f in figures] == [f[0] for f in base]
    assert all(torch.equal(found[n], want[n]) for n in want)


@pytest.mark.parametrize("case", [Case(False), Case(True)], ids=["untied", "tied"])
def test_gradients_live_one_at_a_time(box, case):
    """No gradient outlives its hook: at the end of each, what the next parameters' have is not whole yet."""
    job = assembled(golden_run(box, case, packed=True, update_in_backward={}))
    left, inner = [], job.optimizer.step

    def watched(*args, only):
        left.append({t.name for t in job.trained if t.grad is not None} - {job.trained[only[0]].name})
        inner(*args, only=only)

    job.optimizer.step = watched
    list(steps(job, 2))
    assert len(left) == 2 * len(job.trained), "each parameter once a step"
    # Parameters of one backward node (fused rows of one block) may be there together; blocks never.
    assert all(len(names) <= 1 for names in left), left
    assert all(t.grad is None for t in job.trained)


def poisoned(trainer, name, how):
    """From now on the gradient of this parameter is not finite, or the loss is."""
    if how == "loss":
        inner = trainer.loss
        trainer.loss = lambda batch: inner(batch) * math.inf
        return
    parameter = next(t.parameter for t in trainer.trained if t.name == name)

    def spoil(grad):
        grad = grad.clone()
        grad.view(-1)[3] = {"nan": math.nan, "inf": math.inf, "large": 1e30}[how]
        return grad

    parameter.register_hook(spoil)


@pytest.mark.parametrize("how", ["nan", "inf", "large"])
def test_a_bad_gradient_skips_its_parameter_alone(box, how):
    """A value whose square is beyond float32 counts as not finite, as in the norm of an update that clips."""
    job = assembled(golden_run(box, packed=True, update_in_backward={}))
    list(steps(job, 1))
    before = all_bits(job)
    name = job.trained[2].name
    poisoned(job, name, how)
    ((_, norm, skipped),) = steps(job, 1, first=2)
    assert skipped and not math.isfinite(norm)
    after = all_bits(job)
    same = {n for n in after if torch.equal(after[n], before[n])}
    assert same == {n for n in after if n.split(" ")[0] == name}
    assert all(bool(torch.isfinite(t.float()).all()) for t in after.values())


def test_a_bad_loss_skips_every_parameter(box):
    job = assembled(golden_run(box, packed=True, update_in_backward={}))
    list(steps(job, 1))
    before = all_bits(job)
    poisoned(job, "", "loss")
    ((_, _, skipped),) = steps(job, 1, first=2)
    assert skipped and all(torch.equal(t, before[n]) for n, t in all_bits(job).items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:3], ids=str)
def test_an_infinite_scale_changes_nothing(box, optimizer):
    """How the largest step is rehearsed; gradients that are zero are infinite nowhere, and are skipped all the same."""
    job = assembled(golden_run(box, packed=True, update_in_backward={}, **optimizer))
    before = all_bits(job)
    job.trained[3].parameter.register_hook(torch.zeros_like)
    job.scale.fill_(math.inf)
    ((_, _, skipped),) = steps(job, 1)
    assert skipped and all(torch.equal(t, before[n]) for n, t in all_bits(job).items())


def test_a_backward_pass_outside_the_window_updates_nothing(box):
    job = assembled(golden_run(box, packed=True, update_in_backward={}))
    plain = assembled(golden_run(box, packed=True, sets=WHOLE))
    want = first_gradients(plain)[1]
    before = all_bits(job)
    batch = next(job.batches)[0]
    (job.loss(batch) / batch.n_terms).backward()
    assert all(torch.equal(t, before[n]) for n, t in all_bits(job).items())
    assert all(torch.allclose(t.grad, want[t.name], rtol=1e-5, atol=1e-8) for t in job.trained)


# What the plan says.


def book(shape, *, dtype="bfloat16", **with_):
    shape = ModelShape.read(SHAPES[shape])
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    env = Environment(NAMED["h200"], 1, 2048, 4, 4, None, "bfloat16", True, shape.layers)
    members = instantiate(ALL, with_)
    env = technique.settle(members, env)
    entries = baseline.entries(shape, 2048, native=True, cuda=True)
    widths = BFLOAT16 if dtype == "bfloat16" else FLOAT32
    return shape, ledger.apply_rules(entries, widths, [r for t in members for r in t.predict(env)], 1)


def there(book, phase, kind="gradients."):
    return sum(
        ledger.line_bytes(book, line) * ledger._shares(line, 1)[ledger.PHASES.index(phase)]
        for line in book.lines
        if line.name.startswith(kind)
    )


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_gradients_in_the_plan(name):
    """One block's; the embedding's at the end; a tied one's all the way, for it begins at the head."""
    s, found = book(name, update_in_backward={}, fused_adamw={})
    block = 2 * (s.parameters - (1 if s.tied else 2) * s.vocab * s.width - s.width) / s.layers
    embedding = 2 * s.vocab * s.width
    assert there(found, "backward, last block") == pytest.approx(block + embedding * s.tied)
    assert there(found, "backward, first block") == pytest.approx(block + embedding * s.tied)
    assert there(found, "backward, embedding") == embedding
    assert there(found, "forward") == there(found, "head") == there(found, "update") == 0
    assert there(found, "backward, embedding", "update.loop") == 0
    _, looped = book(name, update_in_backward={})
    assert there(looped, "backward, embedding", "update.loop") == 2 * embedding
    assert there(looped, "update", "update.loop") == 0
    _, plain = book(name, fused_adamw={})
    assert there(plain, "update") == 2 * s.parameters


# With an optimizer of one operator a step: others take thousands, on tensors without bytes too.
