"""The committed table of families, and some of them tried again."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from meshes import further
from optrush.errors import NeedsError
from optrush.models.families import FAMILIES, MIXTURES, MULTIMODAL, UNSEPARATED
from optrush.models.hf import HFModel, load

ROOT = Path(__file__).parents[2]
QUICK = (*FAMILIES, "gpt2", "gpt_neox", "phi3", "stablelm", "mamba", "falcon_h1", "opt", "deepseek_v3", "bert")

LONG = "falcon_h1"  # states that run on, and attention


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks/families.py"))


@pytest.fixture(scope="module")
def record(script):
    found: dict[str, list[str]] = json.loads(script["RECORD"].read_text("utf-8"))
    return found


def test_the_page_is_what_the_record_says(script, record):
    assert script["PAGE"].read_text("utf-8") == script["page"](record), "run benchmarks/families.py"
    native = {kind for kind, each in record.items() if each[0] == "native"}
    assert native == {kind for kind, each in record.items() if each[2] == "native"} == {*FAMILIES, *MULTIMODAL}
    assert {*MIXTURES} <= record.keys()
    assert not [kind for kind, each in record.items() if each[0] == "crashes"]


def test_causal_models_train_and_have_a_plan(script, record):
    """Few are refused, each with its reason; those of one document a row are known to a plan."""
    causal = {kind: each for kind, each in record.items() if each[3] == script["CAUSAL"]}
    refused = {kind: each[1] for kind, each in causal.items() if each[0] == "refused"}
    assert len(refused) < 10 and all(refused.values())
    trained = {kind: each for kind, each in causal.items() if each[0] in ("native", "transformers")}
    assert len([kind for kind, each in trained.items() if each[2] == "none"]) < 6
    assert {kind for kind, each in trained.items() if each[1] == "rows of one document"} == UNSEPARATED
    everything = len([kind for kind, each in record.items() if each[0] == "refused"])
    told = f"{len(refused)} of the {everything} refused families are [causal language models of text]"
    assert told in script["PAGE"].read_text("utf-8")


@pytest.mark.parametrize("kind", further([k for k in QUICK if k != LONG] + [LONG], len(QUICK) - 1))
def test_a_family_is_as_the_table_says(kind, script, record):
    assert list(script["tried"](kind)) == record[kind][:2]


@pytest.mark.parametrize(
    ("kind", "what"),
    [("bert", "ENCODER"), ("bart", "SEQUENCES"), ("trocr", "SEQUENCES"), ("fuyu", "MEDIA"), ("mpt", "CAUSAL")],
)
def test_what_a_family_is(kind, what, script):
    assert script["kind_of"](kind) == script[what]


@pytest.mark.parametrize(("text", "kind"), [(
    "The size of tensor a (4) must match the size of tensor b (8)", NeedsError,
), ("can't allocate memory", RuntimeError)])  # fmt: skip
def test_a_forward_pass_that_fails(text, kind, script, monkeypatch):
    """Sizes that contradict each other refuse the model, where its own class did not check them; a lack of memory is
    none of its faults."""

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(HFModel, "forward", fail)
    with pytest.raises(kind, match=re.escape(text)):
        load(None, script["small"]("phi"), None, torch.float32, 0)
