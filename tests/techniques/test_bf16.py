"""Pure bf16: everything in two bytes, and a held-out loss near float32's."""

from __future__ import annotations

import pytest
import torch

from heldout import float32, held_out, worse
from trials import assembled, golden_run, steps

MARGIN = 0.03  # nats a token, of the mean over the seeds; a seed alone may be twice as far


@pytest.mark.parametrize("options", [{}, {"rounding": "nearest"}], ids=str)
def test_held_out_loss_over_seeds(box, options):
    off = worse(box, bf16=options)
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_small_updates_are_lost_to_the_nearest(box):
    """The margin is no accident of a test that cannot fail: at a small rate most weights never move."""
    sets = ("optim.lr=2e-5",)
    base, ours = float32(box, 1, sets), held_out(box, 1, sets, bf16={"rounding": "nearest"})
    kept = held_out(box, 1, sets, bf16={})
    assert base[1] < base[0]
    assert ours[0] - ours[1] < 0.8 * (base[0] - base[1]) and kept[0] - kept[1] > 0.9 * (base[0] - base[1])


@pytest.mark.parametrize("options", [{}, {"rounding": "nearest"}], ids=str)
@pytest.mark.parametrize("optimizer", [{}, {"fused_adamw": {}}], ids=str)
def test_everything_is_bf16(box, optimizer, options):
    job = assembled(golden_run(box, packed=True, bf16=options, **optimizer))
    types = set()
    update = job.optimizer_step

    def looked():
        types.update(t.grad.dtype for t in job.trained)
        return update()

    job.optimizer_step = looked
    list(steps(job, 1))
    assert types == {t.local.dtype for t in job.trained} == {torch.bfloat16}
    states = job.optimizer.state().values()
    assert {s[name].dtype for s in states for name in ("mean", "square")} == {torch.bfloat16}
    assert job.scale.item() == 1.0
    assert job.rounding == job.optimizer.rounding == options.get("rounding", "stochastic")
    assert ("rounded to the nearest" in job.describe()) == bool(options)


def test_weights_configured_in_bf16_say_that_small_updates_are_lost(box):
    job = assembled(golden_run(box, packed=True, sets=["model.dtype=bfloat16"]))
    assert job.rounding == "nearest" and "at small learning rates most never move" in job.describe()
    assert "rounded" not in assembled(golden_run(box, packed=True)).describe()
