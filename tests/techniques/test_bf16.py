"""Pure bf16 with each rounding: held-out loss near float32's, weights that move, the same bits everywhere, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from meshes import further
from optrush import hardware, technique
from optrush.errors import NeedsError, NoEffectError
from optrush.planner import search
from optrush.techniques import ALL
from optrush.techniques.bf16 import Bf16

from golden.sgd import Sgd
from heldout import float32, held_out, travelled
from trials import all_bits, assembled, golden_run, shaped, steps, weights

RANDOM = ["stochastic", "kahan"]
OURS = {"bf16": {}}
KAHAN = {"bf16": {"rounding": "kahan"}}


@pytest.mark.slow
def test_small_updates_are_lost_to_the_nearest(box):
    """The margin is no accident of a test that cannot fail: at a small rate most weights never move."""
    sets = ("optim.lr=2e-5",)
    base, ours = float32(box, 1, sets), held_out(box, 1, sets, bf16={"rounding": "nearest"})
    kept = held_out(box, 1, sets, bf16={})
    assert base[1] < base[0]
    assert ours[0] - ours[1] < 0.8 * (base[0] - base[1]) and kept[0] - kept[1] > 0.9 * (base[0] - base[1])


@pytest.mark.parametrize("options", [{}, {"rounding": "nearest"}], ids=str)
@pytest.mark.parametrize("optimizer", further([{}, {"fused_adamw": {}}], 1), ids=str)
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
    assert ("rounded to nearest" in job.describe()) == (options == {"rounding": "nearest"})


def test_weights_configured_in_bf16_say_that_small_updates_are_lost(box):
    job = assembled(golden_run(box, packed=True, sets=["model.dtype=bfloat16"]))
    assert job.rounding == "nearest" and "at small learning rates most never change" in job.describe()
    assert "rounded" not in assembled(golden_run(box, packed=True)).describe()


# --- stochastic rounding and Kahan summation


def words(trainer):
    """What the bits of a run's parameters are drawn from."""
    ((_, update),) = trainer.optimizer.groups
    return update.group.params.words


def test_bits_are_of_the_runs_seed(box):
    one, same, other = (words(assembled(golden_run(box, sets=[f"seed={n}"], **OURS))).tolist() for n in (11, 11, 12))
    assert one == same != other


@pytest.mark.slow
def test_weights_move_at_a_small_rate(box):
    """stochastic: the way along float32's is as long as float32's; across it is the rounding's noise. kahan: weight and
    remainder go float32's way."""
    want, nearest, found, kahan = (travelled(box, rounding=r) for r in (None, "nearest", *RANDOM))
    assert want.still == kahan.still == 0 and found.still <= 0.05 and nearest.still > 0.5
    length = (found.way @ want.way) / want.way.norm() ** 2
    assert length == pytest.approx(1.0, abs=0.05) and found.way.norm() < 1.5 * want.way.norm()
    assert (nearest.way @ want.way) / want.way.norm() ** 2 < 0.5
    assert (kahan.way - want.way).norm() < 0.05 * want.way.norm()


@pytest.mark.parametrize("rounding", RANDOM)
def test_the_loop_and_one_kernel_agree(box, rounding):
    one, other = (
        assembled(golden_run(box, packed=True, bf16={"rounding": rounding}, **w)) for w in ({}, {"fused_adamw": {}})
    )
    assert list(steps(one, 3)) == list(steps(other, 3)) and not one.optimizer.reads_host
    want, found = all_bits(one), all_bits(other)
    assert all(torch.equal(want[name], found[name]) for name in want)


def after_three_steps(box, with_):
    """Without clipping, so that a sum over ranks in another order cannot show in a weight."""
    job = assembled(golden_run(box, packed=True, sets=["optim.clip=null"], **with_))
    list(steps(job, 3))
    return weights(job), [t.name for t in job.trained if t.is_sharded]


@pytest.mark.parametrize("rounding", further(RANDOM, 1))
def test_ranks_and_shards_draw_the_same_bits(box, pair, rounding):
    """Whole weights on two ranks, and the halves of each: equal to the bit."""
    (one, _), (two, _) = pair(after_three_steps, box, {"bf16": {"rounding": rounding}, "ddp": {}})
    (halves, cut), _ = pair(after_three_steps, box, {"bf16": {"rounding": rounding}, "fsdp": {}})
    assert cut, "nothing is cut"
    for name, want in one.items():
        assert torch.equal(two[name], want) and torch.equal(halves[name], want), name


def test_an_optimizer_that_cannot_is_refused(box):
    with pytest.raises(NeedsError, match="stochastic rounding") as error:
        assembled(golden_run(box, packed=True, sgd={}, **OURS), (*ALL, Sgd))
    assert "Momentum rounds to nearest" in error.value.found and "another" in error.value.do
    job = assembled(golden_run(box, packed=True, sgd={}, bf16={"rounding": "nearest"}), (*ALL, Sgd))
    assert "rounded to nearest" in job.describe()


def test_no_remainders_of_float32_adapters(box):
    """The base is frozen, so Kahan summation would change nothing; adapters next to trained bf16 weights keep it."""
    with pytest.raises(NoEffectError, match="the trained ones are float32") as error:
        assembled(golden_run(box, packed=True, lora={}, **KAHAN))
    assert error.value.asked == "`bf16:rounding=kahan`" and error.value.do == "leave rounding out: --with bf16"
    assert assembled(golden_run(box, packed=True, lora={}, **OURS)).rounding == "stochastic"


def test_a_machine_without_triton_is_refused(monkeypatch):
    card = hardware.NAMED["h200"]
    Bf16().demand_triton(hardware.CPU)
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError, match="triton is not installed") as error:
        Bf16().demand_triton(card)
    assert "`bf16`" in error.value.asked and "pip install triton" in error.value.do
    monkeypatch.setattr(technique, "library", lambda name: "3.6.0")
    monkeypatch.setattr(technique, "installed", lambda *names: None)
    with pytest.raises(NeedsError, match="no C compiler") as error:
        Bf16().demand_triton(dataclasses.replace(card, name="other"))
    assert "install gcc" in error.value.do


def test_the_weight_is_the_nearest_of_the_sum(box):
    job = assembled(golden_run(box, packed=True, **KAHAN))
    list(steps(job, 4))
    kept = {name: s["compensation"] for name, s in job.optimizer.state().items()}
    assert kept.keys() == weights(job).keys() and any(c.any() for c in kept.values())
    for name, w in weights(job).items():
        assert kept[name].dtype == torch.bfloat16 and kept[name].shape == w.shape
        both = w.double() + kept[name].double()
        # The remainder is rounded itself, so that a tie may fall to the other side.
        unit = torch.exp2(w.double().abs().clamp_min(1e-30).log2().floor() - 8)
        assert ((both - w.double()).abs() <= unit * 1.01).all(), name


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_its_memory_is_predicted(hardware):
    without, found = (
        search.predict(shaped("llama-3.2-1b", with_), hardware) for with_ in ("bf16", "bf16:rounding=kahan")
    )
    assert without.a_parameter == {"weights": 2, "gradients": 2, "states": 4}
    assert found.a_parameter == {"weights": 2, "gradients": 2, "states": 6}
