"""What optrush shows outside is what it was when the pins were made (make_pins.py, which makes them again)."""

from __future__ import annotations

import json
from typing import Any

import make_pins
import pytest
import typer
from command import Command

PLANS = json.loads(make_pins.PLANS.read_text("utf-8"))
SURFACE = json.loads(make_pins.SURFACE.read_text("utf-8"))
LATER = (  # what others have in them too, by `make test-all`
    "pipeline", "hybrid-tensor", "context-ring", "fsdp-of-states", "memory-cap", "ranks-alone", "clash",
    "budget", "recompute-every-other", "fastest-calibrated", "transformers-float32", "micro-auto-two-ranks", "planned",
    "unknown-family", "amp-half-stream-untied", "wrap-qwen3", "varlen-of-older-torch", "stochastic-rounding",
    "fp8-feed-forward", "keep-maths", "dora", "plain-float32", "what-only-adapters-fit",
    "rows-that-three-cannot-share", "cpu-tiny-dpo", "kahan", "packing-with-mask", "fp16-of-older-card",
)  # fmt: skip
AGAIN = "if this was meant, make the pins again (tests/pins/make_pins.py) in a commit that says why"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("pins"))


def same(pinned: Any, now: Any) -> None:
    found = list(make_pins.differences(pinned, json.loads(json.dumps(now))))
    assert not found, "\n".join([*found[:20], f"{len(found)} differences; {AGAIN}"])


def test_every_plan_is_pinned() -> None:
    assert list(PLANS) == list(make_pins.table()["plans"])


def test_every_technique_is_planned() -> None:
    planned = {name for one in make_pins.table()["plans"].values() for name in one.get("with", {})}
    assert planned == {one["name"] for one in SURFACE["techniques"]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in PLANS])
def test_plan(name: str, command: Command) -> None:
    same(PLANS[name], make_pins.plan(command, name))


def test_help(command: Command) -> None:
    pinned, now = sections(make_pins.HELP.read_text("utf-8")), sections(make_pins.helps(command))
    assert list(pinned) == list(now), AGAIN
    for verb, text in pinned.items():
        assert now[verb] == text, f"{verb}, with typer {typer.__version__}; {AGAIN}"


def sections(text: str) -> dict[str, str]:
    """The text of each command."""
    return dict(one.split("\n", 1) for one in text.split("$ optrush")[1:])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "bench")) for name in SURFACE])
def test_surface(name: str, command: Command) -> None:
    same(SURFACE[name], make_pins.SECTIONS[name](command))


def test_all_of_the_surface_is_pinned() -> None:
    assert list(SURFACE) == list(make_pins.SECTIONS)


def test_pins_are_laid_out_as_they_are_made() -> None:
    for file, held in ((make_pins.PLANS, PLANS), (make_pins.SURFACE, SURFACE)):
        assert file.read_text("utf-8") == make_pins.laid(held) + "\n", f"{file.name} was changed by hand"


def test_differences_are_seen() -> None:
    pinned = {"a": 1, "b": [1.0, {"c": True}], "d": None}
    assert not list(make_pins.differences(pinned, {"a": 1, "b": [1.0 + 1e-12, {"c": True}], "d": None}))
    for other in (
        {**pinned, "a": 2}, {**pinned, "a": 1.0}, {**pinned, "b": [1.0 + 1e-6, {"c": True}]}, {**pinned, "d": 0},
        {**pinned, "b": [1.0, {"c": 1}]}, {**pinned, "b": [1.0]}, {"b": pinned["b"], "a": 1, "d": None}, {"a": 1},
        {**pinned, "e": 1},
    ):  # fmt: skip
        assert list(make_pins.differences(pinned, other)), other
