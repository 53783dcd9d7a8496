"""The learning rate of each step, beside transformers' schedules and by hand."""

import pytest
import torch
from transformers import get_scheduler

from optrush.config import Optim, parse_config
from optrush.optim.schedule import learning_rate
from optrush.trainer.trainer import idle_settings


def rates(steps, **optim):
    return [learning_rate(Optim(**optim), step, steps) for step in range(1, steps + 1)]


def theirs(name, steps, warmup, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=options)
    found = []
    for _ in range(steps + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


CASES = [
    ("cosine", {"schedule": "cosine"}, {}), ("linear", {"schedule": "linear"}, {}),
    ("cosine_with_restarts", {"schedule": "cosine", "restarts": 0}, {"num_cycles": 1}),
    ("cosine_with_restarts", {"schedule": "cosine", "restarts": 1}, {"num_cycles": 2}),
    ("cosine_with_restarts", {"schedule": "cosine", "restarts": 3}, {"num_cycles": 4}),
    ("cosine_with_min_lr", {"schedule": "cosine", "min_lr_ratio": 0.25}, {"min_lr_rate": 0.25}),
    ("warmup_stable_decay", {"schedule": "wsd", "decay": 6}, {"num_decay_steps": 6, "decay_type": "linear"}),
    ("warmup_stable_decay", {"schedule": "wsd", "decay": 6, "min_lr_ratio": 0.1},
        {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "optim", "options"), CASES, ids=str)
def test_it_is_that_of_transformers(name, optim, options):
    """Whose rate of the first update after the warm-up is the full one, as here; its warm-up begins at zero."""
    assert rates(20, lr=1.0, warmup=4, **optim)[4:] == pytest.approx(theirs(name, 20, 4, **options)[4:20], abs=1e-12)


def test_wsd_by_hand():
    found = rates(10, lr=2.0, warmup=2, schedule="wsd", decay=0.4, min_lr_ratio=0.5)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25])
    assert rates(4, lr=1.0, warmup=3, schedule="wsd", decay=4)[3] == 1.0, "a decay begins behind the warm-up"
    assert rates(3, lr=1.0, warmup=0, schedule="constant", min_lr_ratio=0.5) == [1.0] * 3


def test_rates_are_proportional_to_lr():
    """What a race of learning rates rests on."""
    one, two = (rates(9, lr=lr, schedule="wsd", min_lr_ratio=0.3) for lr in (1e-3, 2e-3))
    assert two == pytest.approx([2 * rate for rate in one])


@pytest.mark.parametrize(("optim", "said"), [
    ("schedule: cosine, decay: 0.2", "optim.decay does nothing"),
    ("schedule: constant, min_lr_ratio: 0.1", "optim.min_lr_ratio does nothing"),
    ("schedule: wsd, decay: 0.2, min_lr_ratio: 0.1", None),
])  # fmt: skip
def test_settings_that_do_nothing_are_said(optim, said):
    text = f"{{model: tiny, objective: pretrain, data: {{random: 64}}, output: o, optim: {{{optim}}}}}"
    notes = [note for note in idle_settings(parse_config(text, "case"), 200, held_out=False) if "optim" in note]
    assert len(notes) == (said is not None) and (said is None or said in notes[0])
