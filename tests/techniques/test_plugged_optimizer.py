"""Optimizers of other people: torch's own run beside it, resumed runs, pieces, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optrush.errors import ConfigError, NeedsError, RunError
from optrush.objectives import plugged

from trials import assembled, goes_on, golden_run, steps, weights

LION = """
import torch

class Lion(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["steps"] = torch.zeros_like(p), 0
                state["steps"] += 1
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state["average"].lerp(p.grad, 1 - first).sign(), alpha=group["lr"])
                state["average"].lerp_(p.grad, 1 - second)

class Whole(Lion):
    elementwise = False

class Fails(Lion):
    def step(self):
        raise KeyError("p")

class Growing(Lion):
    def step(self):
        self.param_groups[0]["d"] = self.param_groups[0].get("d", 1) + 1

class Listing(Lion):
    def step(self):
        super().step()
        for p in self.state:
            self.state[p]["past"] = []

def nothing(trained, optim):
    return 3

x = 3
"""
KINDS: dict[str, dict[str, Any]] = {
    "torch.optim:SGD": {"momentum": 0.9}, "torch.optim:Adagrad": {"initial_accumulator_value": 0.1},
    "torch.optim:AdamW": {}, "torch.optim:Adafactor": {}, "Lion": {"betas": [0.9, 0.95]},
}  # fmt: skip


@pytest.fixture
def lion(tmp_path: Path) -> Path:
    file = tmp_path / "lion.py"
    file.write_text(LION)
    return file


def run(box: Path, use: str, lion: Path, options: dict[str, Any] | None = None, **more: Any) -> Any:
    use = use if ":" in use else f"{lion}:{use}"
    return golden_run(box, packed=True, own_optimizer={"use": use, "options": options or {}}, **more)


@pytest.mark.parametrize("use", KINDS)
def test_steps_are_those_of_the_class_by_itself(box, lion, use):
    job = assembled(run(box, use, lion, KINDS[use]))
    copies = {t.name: torch.nn.Parameter(t.local.clone()) for t in job.trained}
    decay = job.config.optim.weight_decay
    assert decay > 0
    groups = [
        {"params": [copies[t.name] for t in job.trained if t.decays is decays], "weight_decay": decay * decays}
        for decays in (True, False)
    ]
    alone = plugged.find("optimizer", use if ":" in use else f"{lion}:{use}")(groups, lr=0.0, **KINDS[use])
    inner = job.optimizer.step

    def both(lr, scale, skipped):
        before = weights(job)
        inner(lr, scale, torch.tensor(True))
        assert all(torch.equal(w, before[n]) for n, w in weights(job).items()), "a skipped step changes nothing"
        for t in job.trained:
            copies[t.name].grad = t.grad / scale
        for group in alone.param_groups:
            group["lr"] = lr.item()
        alone.step()
        inner(lr, scale, skipped)

    job.optimizer.step = both
    list(steps(job, 3))
    for t in job.trained:
        assert torch.equal(t.local, copies[t.name]), t.name


@pytest.mark.parametrize("use", [kind for kind in KINDS if "Adafactor" not in kind])
def test_a_resumed_run_is_the_same_to_the_bit(box, lion, use, tmp_path):
    config = run(box, use, lion, KINDS[use], sets=[f"output={tmp_path}/out"])
    goes_on(config)


@pytest.mark.parametrize(("use", "options", "error", "says"), [
    ("Fails", {}, ConfigError, ["KeyError", "in Fails.step", "lion.py:"]),
    ("Growing", {}, NeedsError, ["`d`", "parameter group"]),
    ("Listing", {}, NeedsError, ["`past`", "list"]),
    ("nothing", {}, NeedsError, ["int has no step and no state"]),
    ("x", {}, ConfigError, ["int, which cannot be called"]),
    ("Lino", {}, ConfigError, ["no `Lino`", "Lion"]),
    ("Lion", {"beta": 1}, ConfigError, ["unexpected keyword", "betas"]),
    ("Lion", {"lr": 1.0}, NeedsError, ["`lr`", "`optim.lr`"]),
    ("torch.optim:LBFGS", {}, ConfigError, ["the optimizer `torch.optim:LBFGS`"]),
    ("nowhere_at_all:X", {}, ConfigError, ["ModuleNotFoundError"]),
    ("lion", {}, ConfigError, ["no entry point", "optrush.optimizers"]),
    ("/nowhere.py:X", {}, ConfigError, ["no file /nowhere.py"]),
])  # fmt: skip
def test_what_is_wrong_is_named(box, lion, use, options, error, says):
    config = run(box, use, lion, options)
    if use == "lion":
        config = golden_run(box, own_optimizer={"use": "lion"})
    with pytest.raises(error) as caught:
        list(steps(assembled(config), 1))
    assert use in caught.value.asked and all(text in str(caught.value) for text in says), caught.value
    assert not issubclass(error, RunError)


def test_one_is_to_be_named(box):
    with pytest.raises(NeedsError, match="no `use`"):
        assembled(golden_run(box, own_optimizer={}))


def first_losses(box: Path, use: str, with_: dict[str, Any]) -> list[float]:
    return [f[0] for f in steps(assembled(golden_run(box, packed=True, own_optimizer={"use": use}, **with_)), 3)]


def refused(box: Path, use: str) -> str:
    try:
        first_losses(box, use, {"fsdp": {}})
    except NeedsError as error:
        return str(error)
    return ""


def test_pieces(box, lion, pair):
    """A class that updates value by value steps pieces as the whole; another is refused."""
    for use in ("torch.optim:AdamW", f"{lion}:Lion"):
        one = first_losses(box, use, {})
        assert all(side == pytest.approx(one, rel=1e-4) for side in pair(first_losses, box, use, {"fsdp": {}}))
    assert all("elementwise = True" in text for text in pair(refused, box, f"{lion}:Whole"))
