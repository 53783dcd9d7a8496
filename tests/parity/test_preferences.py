"""`objective: orpo` and `simpo` against the papers' formulas in float64, and to TRL's functions.

The formulas see documents one at a time, tokenised and masked by transformers; ours see them packed or not, with
chunked losses or not, on one rank and two.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_dpo import PER_STEP, documents, dpo_run, filled_box, order

from meshes import further
from optrush.config import Config, Orpo, Simpo
from optrush.objectives import FIGURES

from golden import make_golden
from trials import apart, assembled, published

CLOSE = 1e-5
OBJECTIVES = {"orpo": {"beta": 0.3}, "simpo": {"beta": 2.5, "gamma": 0.7}}


@pytest.fixture(scope="module")
def folder(box):
    return filled_box(box)


def preferred(box: Path, objective: str, **how: Any) -> Config:
    settings = {"dpo": None, "objective": objective, objective: OBJECTIVES[objective]}
    config = dpo_run(box, model="moved", **how)
    return Config.model_validate({**config.model_dump(by_alias=True), **settings})


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equations 3, 4, 6 and 7 of the paper, of log p(y|x) that are means over the answer's tokens."""

    def odds(log_p: torch.Tensor) -> torch.Tensor:
        return log_p.exp() / (1 - log_p.exp())

    return -chosen - OBJECTIVES["orpo"]["beta"] * torch.log(torch.sigmoid(torch.log(odds(chosen) / odds(rejected))))


def simpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equation 6 of the paper."""
    beta, gamma = OBJECTIVES["simpo"]["beta"], OBJECTIVES["simpo"]["gamma"]
    return -torch.log(torch.sigmoid(beta * chosen - beta * rejected - gamma))


FORMULAS = {"orpo": orpo, "simpo": simpo}


@cache
def wanted(box: Path, objective: str) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and rewards of the first step in float64."""
    policy, made = make_golden.open_model(box / "moved").double(), documents(box)
    loss, rewards = 0.0, [0.0] * 4
    for i in order()[0]:
        means = []
        for ids, learnt in made[2 * i : 2 * i + 2]:
            logits = policy(input_ids=ids[None], use_cache=False).logits[0, :-1]
            means.append(logits.log_softmax(-1).gather(1, ids[1:, None])[learnt[1:], 0].mean())
        one = FORMULAS[objective](*means) / PER_STEP
        one.backward()
        loss += one.item()
        first, second = (OBJECTIVES[objective]["beta"] * m.item() for m in means)
        values = (first, second, first > second, first - second)
        rewards = [old + value / PER_STEP for old, value in zip(rewards, values, strict=True)]
    return loss, {name: p.grad.float() for name, p in policy.named_parameters()}, rewards


def agrees(box: Path, objective: str, found: tuple[float, dict[str, torch.Tensor], list[float]]) -> None:
    for ours, wants in zip(found[::2], wanted(box, objective)[::2], strict=True):
        assert ours == pytest.approx(wants, rel=CLOSE)
    grads = wanted(box, objective)[1]
    assert grads.keys() == found[1].keys()
    for name, g in grads.items():
        assert apart(found[1][name], g) < CLOSE, name


def ours(box: Path, objective: str, how: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    trainer = assembled(preferred(box, objective, **how))
    loss, grads = published(trainer)
    rewards = [trainer.all_reduce(trainer.metrics[name]).item() / PER_STEP for name in FIGURES]
    return loss, grads, rewards


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("how", further([
    {"rows": 2}, {"packed": True, "rows": 2, "fused_loss": {"chunk": 5}, "attention": {}}, {"rows": 8},
    {"packed": True, "rows": 4}, {"packed": True, "rows": 1},
], 2), ids=["micro", "chunked", "padded", "packed", "packed-micro"])  # fmt: skip
def test_losses_rewards_and_gradients_are_the_formulas(folder, objective, how):
    agrees(folder, objective, ours(folder, objective, how))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks(folder, pair, objective):
    for found in pair(ours, folder, objective, {"packed": True, "rows": 1, "ddp": {}}):
        assert found[0] == pytest.approx(wanted(folder, objective)[0], rel=CLOSE)
        assert found[2] == pytest.approx(wanted(folder, objective)[2], rel=CLOSE)


def test_the_formulas_are_trls(folder):
    """TRL's functions of log-probabilities; its SimPO divides gamma by beta, its ORPO has the odds apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
    chosen, rejected = torch.tensor([-1.2, -0.3, -4.0]).double(), torch.tensor([-1.0, -2.3, -4.5]).double()
    of, device = OBJECTIVES["simpo"], SimpleNamespace(device=torch.device("cpu"))
    settings = SimpleNamespace(
        alpha=0.0, beta=of["beta"], simpo_gamma=of["gamma"], loss_type="simpo", label_smoothing=0.0, accelerator=device
    )
    assert torch.allclose(CPOTrainer.cpo_loss(settings, chosen, rejected)[0], simpo(chosen, rejected))
    settings = SimpleNamespace(beta=OBJECTIVES["orpo"]["beta"], accelerator=device)
    ratios = ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]
    assert torch.allclose(-chosen - ratios, orpo(chosen, rejected))


def test_an_answer_learnt_by_heart_has_a_finite_loss():
    """Its odds are infinite: 1 - p is 0 in float32."""
    from optrush.objectives import orpo as ours
    from optrush.objectives import simpo as other

    figures = {name: torch.zeros(()) for name in FIGURES}
    batch: Any = SimpleNamespace(
        extra={"pairs": torch.tensor([[True]])}, labels=torch.tensor([[1, 1]]),
        documents=SimpleNamespace(ids=torch.tensor([[0, 1]])),
    )  # fmt: skip
    for score, settings in ((ours.score, Orpo()), (other.score, Simpo())):
        hidden = torch.zeros(1, 2, requires_grad=True)
        loss = score(lambda h, labels, reduce: h, settings, figures, hidden, batch)  # type: ignore[arg-type]
        loss.backward()
        assert math.isfinite(loss.item()) and bool(hidden.grad.isfinite().all())
