"""Kahan summation: weight and remainder together follow float32; its memory; who refuses what.

What it shares with stochastic rounding (bits over ranks, shards and resumed runs) is in test_stochastic_rounding.py.
"""

from __future__ import annotations

import pytest
import torch

from optrush.config import parse_config
from optrush.errors import ConflictError, NeedsError
from optrush.planner import search
from optrush.resolve import resolve

from heldout import travelled, worse
from trials import assembled, golden_run, steps, weights

MARGIN = 0.01  # nats a token, of the mean over the seeds; a seed alone may be twice as far
OURS = {"bf16": {}, "kahan": {}}
LLAMA = "{model: {shape: llama-3.2-1b}, objective: pretrain, data: {random: 64}, batch: {seq: 2048}, output: o}"


def test_held_out_loss_over_seeds(box):
    off = worse(box, **OURS)
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_weights_move_at_a_small_rate(box):
    """Weight and remainder go float32's way."""
    want, found = travelled(box), travelled(box, "bf16", "kahan")
    assert found.still == 0 and (found.way - want.way).norm() < 0.05 * want.way.norm()


def test_the_weight_is_the_nearest_of_the_sum(box):
    job = assembled(golden_run(box, packed=True, **OURS))
    list(steps(job, 4))
    kept = {name: s["compensation"] for name, s in job.optimizer.state().items()}
    assert kept.keys() == weights(job).keys() and any(c.any() for c in kept.values())
    for name, w in weights(job).items():
        assert kept[name].dtype == torch.bfloat16 and kept[name].shape == w.shape
        both = w.double() + kept[name].double()
        # The remainder is rounded itself, so that a tie may fall to the other side.
        unit = torch.exp2(w.double().abs().clamp_min(1e-30).log2().floor() - 8)
        assert ((both - w.double()).abs() <= unit * 1.01).all(), name


def test_these_tests_would_see_remainders_that_are_lost(box):
    job, other = (assembled(golden_run(box, packed=True, sets=["optim.lr=1e-5"], **OURS)) for _ in range(2))
    list(steps(job))
    for k in range(1, 9):
        list(steps(other, 1, first=k))
        for s in other.optimizer.state().values():
            s["compensation"].zero_()
    assert not all(torch.equal(w, weights(other)[name]) for name, w in weights(job).items())


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_its_memory_is_predicted(hardware):
    config = parse_config(LLAMA, "test", withs=["bf16"])
    without = search.predict(config, hardware)
    found = search.predict(parse_config(LLAMA, "test", withs=["bf16", "kahan"]), hardware)
    assert without.a_parameter == {"weights": 2, "gradients": 2, "states": 4}
    assert found.a_parameter == {"weights": 2, "gradients": 2, "states": 6}
    configured = parse_config(LLAMA, "test", ["model.dtype=bfloat16"], withs=["kahan"])
    assert search.predict(configured, hardware).a_parameter == found.a_parameter


def test_one_owner_of_the_rounding(box):
    with pytest.raises(ConflictError, match="how updated weights are rounded"):
        resolve(golden_run(box, bf16={}, kahan={}, stochastic_rounding={}))
    with pytest.raises(NeedsError, match="another technique says how weights are rounded") as error:
        resolve(golden_run(box, bf16={"rounding": "nearest"}, kahan={}))
    assert "`bf16:rounding=nearest`" in error.value.asked and "one of the two" in error.value.do
