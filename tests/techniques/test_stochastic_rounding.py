"""Stochastic rounding: weights as far as float32's on average, the same bits everywhere, and who refuses what."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optrush import hardware, technique
from optrush.errors import NeedsError
from optrush.resolve import resolve
from optrush.technique import demand_triton
from optrush.techniques import ALL
from optrush.trainer.checkpoint import Meta, find, restore, save

from golden.sgd import Sgd
from heldout import travelled, worse
from trials import assembled, golden_run, steps, weights

MARGIN = 0.02  # nats a token, of the mean over the seeds; a seed alone may be twice as far
OURS = {"bf16": {}, "stochastic_rounding": {}}
BOTH = {"stochastic": OURS, "kahan": {"bf16": {}, "kahan": {}}}


def words(trainer):
    """What the bits of a run's parameters are drawn from."""
    ((_, update),) = trainer.optimizer.groups
    return update.group.words


def test_held_out_loss_over_seeds(box):
    off = worse(box, **OURS)
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_weights_move_at_a_small_rate(box):
    """The way along float32's is as long as float32's; what is beside it is the rounding's noise."""
    want, nearest = travelled(box), travelled(box, rounding="nearest")
    found = travelled(box, "bf16", "stochastic-rounding")
    print(found.still, nearest.still)
    assert want.still == 0 and found.still <= 0.05 and nearest.still > 0.5
    length = (found.way @ want.way) / want.way.norm() ** 2
    assert length == pytest.approx(1.0, abs=0.05) and found.way.norm() < 1.5 * want.way.norm()
    assert (nearest.way @ want.way) / want.way.norm() ** 2 < 0.5


def states(trainer) -> dict[str, torch.Tensor]:
    found = {
        f"{name} {kind}": s.clone() for name, kinds in trainer.optimizer.state().items() for kind, s in kinds.items()
    }
    return found | weights(trainer)


@pytest.mark.parametrize("rounding", BOTH)
def test_a_resumed_run_draws_the_same_bits(box, tmp_path, rounding):
    run = golden_run(box, packed=True, sets=[f"output={tmp_path}"], **BOTH[rounding])
    job = assembled(run)
    list(steps(job, 2))
    save(job, 2, Meta("00ff", position=0))
    list(steps(job, 2, first=3))
    again = assembled(run)
    for _ in range(2):
        next(again.batches)
    restore(again, find(tmp_path)[0], {})
    list(steps(again, 2, first=3))
    want, found = states(job), states(again)
    assert want.keys() == found.keys() and all(torch.equal(want[name], found[name]) for name in want)
    other = assembled(golden_run(box, packed=True, sets=[f"output={tmp_path}", "seed=12"], **BOTH[rounding]))
    assert words(job).tolist() != words(other).tolist(), "the seed is the run's"


@pytest.mark.parametrize("rounding", BOTH)
def test_the_loop_and_one_kernel_agree(box, rounding):
    one, other = (assembled(golden_run(box, packed=True, **BOTH[rounding], **w)) for w in ({}, {"fused_adamw": {}}))
    assert list(steps(one)) == list(steps(other)) and not one.optimizer.reads_host
    want, found = states(one), states(other)
    assert all(torch.equal(want[name], found[name]) for name in want)


def after_three_steps(box, with_):
    """Without clipping, so that a sum over ranks in another order cannot show in a weight."""
    job = assembled(golden_run(box, packed=True, sets=["optim.clip=null"], **with_))
    list(steps(job, 3))
    return weights(job), [t.name for t in job.trained if t.is_sharded]


@pytest.mark.parametrize("rounding", BOTH)
def test_ranks_and_shards_draw_the_same_bits(box, pair, rounding):
    """Whole weights on two ranks, and the halves of each: equal to the bit."""
    (one, _), (two, _) = pair(after_three_steps, box, {**BOTH[rounding], "ddp": {}})
    (halves, cut), _ = pair(after_three_steps, box, {**BOTH[rounding], "fsdp": {}})
    assert cut, "nothing is cut"
    for name, want in one.items():
        assert torch.equal(two[name], want) and torch.equal(halves[name], want), name


# Who rounds, and who cannot.


@pytest.mark.parametrize("name", ["stochastic-rounding", "kahan"])
def test_float32_weights_are_refused(box, name):
    with pytest.raises(NeedsError, match="weights in float32") as error:
        resolve(golden_run(box, **{name: {}}))
    assert f"`{name}`" in error.value.asked and "--with bf16" in error.value.do


@pytest.mark.parametrize("sets", [(), ("model.dtype=bfloat16",)])
def test_it_sets_the_rounding(box, sets):
    with_ = {"stochastic_rounding": {}} if sets else OURS
    job = assembled(golden_run(box, packed=True, sets=sets, **with_))
    assert job.rounding == job.optimizer.rounding == "stochastic"
    assert f"stochastic-rounding: {len(job.trained)} changes" in job.describe()


def test_an_optimizer_that_cannot_is_refused(box):
    with pytest.raises(NeedsError, match="stochastic rounding") as error:
        assembled(golden_run(box, packed=True, sgd={}, **OURS), (*ALL, Sgd))
    assert "Momentum rounds to the nearest" in error.value.found and "another" in error.value.do
    job = assembled(golden_run(box, packed=True, sgd={}, bf16={"rounding": "nearest"}), (*ALL, Sgd))
    assert "rounded to the nearest" in job.describe()


def test_a_machine_without_triton_is_refused(monkeypatch):
    card = hardware.NAMED["h200"]
    demand_triton("x", hardware.CPU)
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match="triton is not installed") as error:
        demand_triton("stochastic-rounding", card)
    assert "`stochastic-rounding`" in error.value.asked and "pip install triton" in error.value.do
    monkeypatch.setattr(technique, "library", lambda name: "3.6.0")
    monkeypatch.setattr(technique, "installed", lambda *names: None)
    with pytest.raises(NeedsError, match="no C compiler") as error:
        demand_triton("stochastic-rounding", dataclasses.replace(card, name="other"))
    assert "install gcc" in error.value.do


def test_these_tests_would_see_bits_that_differ(box, monkeypatch):
    """Another seed's bits: other weights, though the loss hardly shows it."""
    job, other = (assembled(golden_run(box, packed=True, **OURS)) for _ in range(2))
    words(other).add_(1)
    first, second = list(steps(job)), list(steps(other))
    assert first[0] == second[0] and first[-1][0] == pytest.approx(second[-1][0], rel=0.02)
    assert not any(torch.equal(weights(job)[n], weights(other)[n]) for n in weights(job) if weights(job)[n].dim() > 1)
