"""What optrush shows outside is what it was when the pins were made (make_pins.py, which makes them again)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import make_pins
import pytest
import yaml
from command import Command, supposed

from optrush.config import parse_config
from optrush.planner import search
from optrush.techniques import ALL

PLANS = json.loads(make_pins.PLANS.read_text("utf-8"))
SURFACE = json.loads(make_pins.SURFACE.read_text("utf-8"))
# In parts what others have too: by `make test-all`.
LATER = ("transformers-amp", "lora", "fsdp", "pipeline", "hybrid-tensor", "clash", "cpu-tiny-sft")
AGAIN = "if this was meant, make the pins again (tests/pins/make_pins.py) in a commit that says why"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("pins"))


def same(pinned: Any, now: Any) -> None:
    found = list(make_pins.differences(pinned, json.loads(json.dumps(now))))
    assert not found, "\n".join([*found[:20], f"{len(found)} differences; {AGAIN}"])


# --- plans


def test_every_plan_is_pinned() -> None:
    assert list(PLANS) == list(make_pins.table()["plans"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in PLANS])
def test_plan(name: str, command: Command) -> None:
    same(PLANS[name], make_pins.regrouped(PLANS[name], make_pins.plan(command, name)))


CHATS = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "batch": {"seq": 512, "tokens": 16384}}
ONE_ROW = {"batch": {"seq": 512, "tokens": 512, "micro_tokens": 512}, "optim": {"clip": None}}
SHARED: dict[str, Any] = {"hardware": "4xh100", "beside": {"fsdp": {}}}
# What a technique needs to be planned: options, techniques beside it, hardware, other keys of the configuration.
NEEDED: dict[str, dict[str, Any]] = {
    "cuda-graphs": {"beside": {"compile": {}}},
    "fp8": {"beside": {"bf16": {}, "compile": {}}},
    "int8": {"beside": {"lora": {}}},
    "longlora": {"beside": {"lora": {}}},
    "nf4": {"beside": {"lora": {}}},
    "freeze": {"options": {"layers": "0-3"}},
    "own-optimizer": {"options": {"use": "torch.optim:Adagrad", "states": 1.0}},
    "memory-cap": {"options": {"mib": 24564}},
    "rope": {"options": {"factor": 2.0}, "keys": {"model": {"shape": "qwen2.5-0.5b"}}},
    "update-in-backward": {"keys": ONE_ROW},
    **{name: {"keys": CHATS} for name in ("pad", "sort-by-length", "wrap", "packing")},
    **dict.fromkeys(("tensor", "pipeline", "context", "quantised-links"), SHARED),
    **{name: {**SHARED, "beside": {}} for name in ("ddp", "fsdp", "deepspeed")},
    "experts": {**SHARED, "keys": {"model": {"shape": "qwen3-30b-a3b"}}},
}
UNPRICED = {
    "loader": "the host's work has no price",
    "micro-batch": "changes what happens when memory runs out",
    "rope": "the same work at other angles",
}


@pytest.mark.parametrize("name", [one.name for one in ALL])
def test_every_technique_predicts_an_effect(name: str) -> None:
    """Planned with and without it, on one GPU where it needs no more."""
    needed = NEEDED.get(name, {})
    beside, hardware = needed.get("beside", {}), needed.get("hardware", "h100")

    def predicted(techniques: dict[str, Any], hardware: str) -> dict[str, Any]:
        given = {**make_pins.table()["base"], **needed.get("keys", {}), "with": techniques}
        with supposed(make_pins.TORCH):
            prediction = search.predict(parse_config(yaml.safe_dump(given), "a plan"), hardware)
        assert prediction.tokens_per_s and prediction.peak_bytes
        return {field.name: getattr(prediction, field.name) for field in dataclasses.fields(prediction)}

    without = predicted(beside, hardware if beside else "h100")
    assert (predicted({**beside, name: needed.get("options", {})}, hardware) != without) == (name not in UNPRICED)


# --- the rest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("bench", "run of dpo"))) for name in SURFACE]
)
def test_surface(name: str, command: Command) -> None:
    same(SURFACE[name], make_pins.SECTIONS[name](command))


def test_all_of_the_surface_is_pinned() -> None:
    assert list(SURFACE) == list(make_pins.SECTIONS)


def test_an_option_of_a_help_text_is_found() -> None:
    text = """Usage: x

Arguments:
  [FILE] <path>  what to
                 write  [default:
                 train.yaml]

Options:
  --long-name TEXT <int>
                    [of] it  [x>=2]
  --help            Show this message and exit.

Commands:
  --none
"""
    assert list(make_pins._options(text)) == [
        "[FILE] <path> [default: train.yaml]",
        "--long-name TEXT <int> [x>=2]",
        "--help",
    ]


def test_pins_are_laid_out_as_they_are_made() -> None:
    for file, held in ((make_pins.PLANS, PLANS), (make_pins.SURFACE, SURFACE)):
        assert file.read_text("utf-8") == make_pins.laid(held) + "\n", f"{file.name} was changed by hand"


def test_differences_are_seen() -> None:
    pinned = {"a": 1, "b": [1.0, {"c": True}], "d": None, "work_s": {"x": 1.0}}
    near = {"a": 1, "b": [1.009, {"c": True}], "d": None, "work_s": {"x": 1.019}}
    assert not list(make_pins.differences(pinned, near))
    for other in (
        {**pinned, "a": 2}, {**pinned, "a": 1.0}, {**pinned, "b": [1.011, {"c": True}]}, {**pinned, "d": 0},
        {**pinned, "b": [1.0, {"c": 1}]}, {**pinned, "b": [1.0]}, {"b": pinned["b"], "a": 1, "d": None}, {"a": 1},
        {**pinned, "e": 1}, {**pinned, "work_s": {"x": 1.021}},
    ):  # fmt: skip
        assert list(make_pins.differences(pinned, other)), other


def test_a_line_near_the_limit_stays_where_its_pin_has_it() -> None:
    pinned = {"peak_gib": 1.0, "lines_gib": {"a": 0.5}, "small_lines": ["b"], "work_s": {}, "small_work": []}
    grown = {**pinned, "lines_gib": {"a": 0.5, "b": 0.011}, "small_lines": []}
    assert make_pins.regrouped(pinned, grown) == pinned
    grown["lines_gib"]["b"] = 0.02
    assert make_pins.regrouped(pinned, grown) == grown
