"""The committed table of families, and some of them tried again."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from optrush.errors import NeedsError
from optrush.models.families import FAMILIES, MIXTURES, MULTIMODAL
from optrush.models.hf import HFModel, load

ROOT = Path(__file__).parents[2]
QUICK = (*FAMILIES, "gpt2", "gpt_neox", "phi3", "gemma2", "deepseek_v3", "bert")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks/families.py"))


@pytest.fixture(scope="module")
def record(script: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(script["RECORD"].read_text("utf-8"))
    return found


def test_the_page_is_what_the_record_says(script: dict[str, Any], record: dict[str, list[str]]) -> None:
    assert script["PAGE"].read_text("utf-8") == script["page"](record), "run benchmarks/families.py"
    assert {kind for kind, (how, _) in record.items() if how == "native"} == {*FAMILIES, *MULTIMODAL}
    assert {*MIXTURES} <= record.keys()
    assert not [kind for kind, (how, _) in record.items() if how == "crashes"]


@pytest.mark.parametrize("kind", QUICK)
def test_a_family_is_as_the_table_says(kind: str, script: dict[str, Any], record: dict[str, list[str]]) -> None:
    assert list(script["tried"](kind)) == record[kind]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The size of tensor a (4) must match the size of tensor b (8)", NeedsError),
        ("can't allocate memory", RuntimeError),
    ],
)
def test_a_forward_pass_that_fails(
    text: str, kind: type[Exception], script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that contradict each other refuse the model, where its own class did not check them; a lack of memory is
    none of its faults."""

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(HFModel, "forward", fail)
    with pytest.raises(kind, match=re.escape(text)):
        load(None, script["small"]("phi"), None, torch.float32, 0)
