"""Hold the product to docs/contract.md: every key there exists, and every key that exists is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from optrush import config
from optrush.config import Config

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "contract.md").read_text("utf-8")
SURFACE = json.loads((HERE / "surface.json").read_text("utf-8"))
FREE = {"data.clean", "with"}  # their own keys are documented in docs/data.md and by `optrush techniques`


def section(title: str) -> str:
    """The text below a heading that begins with this title, up to the next one."""
    return re.split(r"^## ", PAGE.partition(f"\n## {title}")[2], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    """The names in backticks in the first column of the tables."""
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The configuration's keys, dotted."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner = re.findall(r"<class 'optrush\.config\.(\w+)'>|optrush\.config\.(\w+)", repr(field.annotation))
        nested = [getattr(config, a or b) for a, b in inner]
        models = [m for m in nested if isinstance(m, type) and issubclass(m, BaseModel)]
        if key in FREE or not models or key in ("data.path",):
            yield key
        else:
            yield from keys(models[0], key + ".")


def test_configuration() -> None:
    short = {"model", "tracker", "train.stop_after"}  # a text or a number instead of a block
    assert first_cells(section("Configuration")) - short == set(keys(Config))


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_metrics(objective: str) -> None:
    text = section("A run's folder")
    table = first_cells(text)
    written = SURFACE[f"run of {objective}"]
    assert set(written["train"]) <= table
    assert {*written["eval"], *written["end"]} <= set(re.findall(r"`(\w+)`", text))
    if objective == "dpo":
        assert table == set(written["train"]), "nothing is listed that no run writes"


def test_records() -> None:
    listed = first_cells(section("`optrush bench"))
    written = {key.removeprefix("[].").partition(".")[0] for key in SURFACE["bench"]["keys"]}
    assert listed <= written, listed - written


def test_folder() -> None:
    text = section("A run's folder")
    for file in SURFACE["run folder"]:
        top = file.partition("/")[0]
        assert top == ".lock" or top in text, file


def test_others() -> None:
    assert set(re.findall(r"`(\w+)`", section("`optrush eval"))) >= set(SURFACE["eval"])
    text = section("Others")
    for key in ("keys of techniques", "keys of plan"):
        named = {k.removeprefix("[].").partition("[")[0].partition(".")[0] for k in SURFACE[key]}
        assert set(re.findall(r"`(\w+)`", text)) & named, key
    techniques = text.partition("`optrush plan")[0]
    assert {k.removeprefix("[].").partition(".")[0] for k in SURFACE["keys of techniques"]} <= set(
        re.findall(r"`(\w+)`", techniques)
    )


def test_verbs() -> None:
    listed = set(re.findall(r"`(\w+)`", section("Verbs").partition("Every verb")[0]))
    helped = {command.split()[1] for command in SURFACE["options"] if " " in command}
    assert helped and helped <= listed, helped - listed
