"""`optrush schema`: a JSON schema that has every key of a configuration and every option of a technique."""

import dataclasses
from pathlib import Path

import jsonschema
import pytest
import yaml

from optrush.cli.setup import config_schema
from optrush.config import Config
from optrush.techniques import ALL

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SCHEMA = config_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_every_key_and_option_is_there():
    assert SCHEMA["properties"].keys() == {f.alias or name for name, f in Config.model_fields.items()}
    options = {name: set(part["properties"]) for name, part in SCHEMA["properties"]["with"]["properties"].items()}
    assert options == {t.name: {f.name for f in dataclasses.fields(t)} for t in ALL}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_valid(file):
    given = yaml.safe_load(file.read_text("utf-8"))
    given["optim"]["lr"] = float(given["optim"]["lr"])  # 1e-5 is a text in YAML 1.1
    VALIDATOR.validate(given)


@pytest.mark.parametrize(
    "wrong",
    [{"modle": "tiny"}, {"with": {"lora": {"ranks": 8}}}, {"with": {"lorra": {}}}, {"with": {"lora": {"rank": 0}}}],
    ids=["key", "option", "technique", "value"],
)
def test_mistakes_are_found(wrong):
    good = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": "out"}
    VALIDATOR.validate(good)
    assert not VALIDATOR.is_valid({**good, **wrong})
