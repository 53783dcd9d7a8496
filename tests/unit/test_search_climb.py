"""Compare climbing with trying every combination, where changes hardly depend on each other."""

from __future__ import annotations

import itertools
import random

import pytest
from test_plan import LLAMA

from meshes import further
from optrush.config import parse_config
from optrush.decide import problem_of
from optrush.hardware import parse_hardware
from optrush.planner import cost, search
from optrush.planner.climb import ascend, climb
from optrush.planner.sets import Evaluations, _options
from optrush.techniques import ALL

GROUPS = [[None, "a1", "a2"], [None, "b"], [None, "c1", "c2"], [None, "d"], ["e", "f"]]


def clash(x, y):
    return {x[0], y[0]} == {"b", "d"}


class Worths:
    """By a table of single gains; `c` is possible with `b` or `d` only, and `a2` is good for nothing without `c2`."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.gains = {o: draw.uniform(-1, 1) for group in GROUPS for o in group if o}
        self.asked: set[tuple[str | None, ...]] = set()

    def __call__(self, chosen: tuple[str | None, ...]) -> tuple[float, ...] | None:
        self.asked.add(chosen)
        held = {o for o in chosen if o}
        if chosen[-1] is None or {"b", "d"} <= held or (held & {"c1", "c2"} and not held & {"b", "d"}):
            return None
        return float("a2" not in held or "c2" in held), sum(self.gains[o] for o in held)


def test_mostly_the_best_of_all():
    """It may stop short where `c` is worth having only with the worse of its two."""
    best = 0
    for seed in range(40):
        value = Worths(seed)
        found = climb([(None, None, None, None, "e"), ("a1", "b", "c1", None, "f")], GROUPS, clash, value)
        asked = set(value.asked)
        worths = [w for c in itertools.product(*GROUPS) if (w := value(c)) is not None]
        got = value(found)
        assert got is not None and got[0] and all(o in group for o, group in zip(found, GROUPS))
        best += got == max(worths)
        for option in ("a1", "a2", "b", "c1", "c2", "d", "f"):
            told = [(value(c) or (0.0,))[0] for c in asked if option in c]
            assert any(told), f"nothing is said of {option}"
    assert best >= 34


def test_nothing_is_good():
    assert climb([(None,)], [[None, "x"]], clash, lambda c: (0.0, float(c == ("x",)))) == ("x",)
    assert climb([(None,)], [[None, "x"]], clash, lambda _: None) == (None,)


def test_what_stands_on_another_goes_with_it():
    """`y` needs `x`, which costs more than `y` gains: both must go at once."""
    worths: dict[tuple[str | None, ...], float] = {(None, None): 1.0, ("x", None): 0.0, ("x", "y"): 0.5}

    def value(chosen):
        return (1.0, worths[chosen]) if chosen in worths else None

    assert ascend(("x", "y"), [[None, "x"], [None, "y"]], lambda *_: False, value) == (None, None)


def test_from_what_is_not_possible():
    assert (
        climb([("x", None)], [[None, "x"], [None, "y"]], clash, lambda c: None if "x" in c else (1.0, 0.0))[0] is None
    )


@pytest.mark.parametrize(
    ("hardware", "sets"),
    further([("4090", ("model.shape=llama-3.1-8b",)), ("h200", ()), ("t4", ("model.shape=qwen2.5-0.5b",))], 1),
)
def test_a_plan_finds_what_trying_all_sets_finds(hardware, sets):
    """Over eight techniques, so that all can be tried. Of equally fast sets it may name another."""
    few = {"amp", "bf16", "fused-adamw", "attention", "compile", "packing", "fused-loss", "recompute"}
    classes = [t for t in ALL if t.name in few]
    sizes = ("batch.tokens=8192", "batch.micro_tokens=2048")
    config = parse_config(LLAMA, "x", (*sets, *sizes)).model_copy(update={"with_": {}})
    found = search.search(config, hardware, classes)
    evaluations = Evaluations(problem_of(config, classes, *reversed(parse_hardware(hardware)), fixed=False))
    for chosen in itertools.product(*_options(evaluations.problem.env, classes, False, {})[0]):
        evaluations.score(chosen)
    assert found.tried < evaluations.tried / 2
    speeds = [s.prediction.tokens_per_s or 0.0 for s in evaluations.settings]
    got = [s.prediction.tokens_per_s or 0.0 for s in found.settings]
    assert bool(speeds) == bool(got) and max(got, default=0.0) >= max(speeds, default=0.0) * (1 - cost.CLOSE)
