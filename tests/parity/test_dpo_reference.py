"""Which model a kept reference of `objective: dpo` belongs to, and which pairs are pairs of the same documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_dpo import filled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optrush.config import Config, parse_config
from optrush.data.batch import Batch
from optrush.models.weights import weights_fingerprint as fingerprint

from golden.make_golden import SIZES

LAST = "model.layers.1.mlp.down_proj.weight"


def pairs_run(box: Path, tmp_path: Path, model: Path, *sets: str) -> Config:
    rows = [{"prompt": f"w{i} w2 ", "chosen": f"w3 w4 w{i}", "rejected": "w5"} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "model": str(model), "objective": "dpo",
        "data": {"path": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path / "cache")},
        "batch": {"seq": 32, "tokens": 96, "micro_tokens": 96}, "train": {"steps": 1},
        "output": str(tmp_path / "out"),
    }  # fmt: skip
    return parse_config(yaml.safe_dump(document), "dpo.yaml", sets)


@pytest.fixture(scope="module")
def large(box, tmp_path_factory):
    """A model of 7 MiB: no sample of its bytes holds all of them."""
    folder = tmp_path_factory.mktemp("large") / "model"
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "model_type"} | {"intermediate_size": 4096, "pad_token_id": 0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.float32)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(box / "untied").save_pretrained(folder)
    return folder


def other(model: Path, folder: Path, first: int) -> Path:
    """The model with other values from row `first` on in one matrix of its last block."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[LAST][first : first + 30] += 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_models_that_differ_in_the_last_block_differ(large, tmp_path):
    assert fingerprint(large, 0) != fingerprint(other(large, tmp_path / "first", 0), 0), "its first values"
    assert fingerprint(large, 0) != fingerprint(other(large, tmp_path / "last", 34), 0), "its last"
    (tmp_path / "same").mkdir()
    for file in large.iterdir():
        (tmp_path / "same" / file.name).write_bytes(file.read_bytes())
    assert fingerprint(large, 0) == fingerprint(tmp_path / "same", 7)


def test_no_model_has_anothers_reference(box, large, tmp_path):
    """Where they differ in the middle of a matrix alone, which no sample sees; the same bytes elsewhere are found."""
    moved = other(large, tmp_path / "moved", 20)
    assert fingerprint(large, 0) == fingerprint(moved, 0)
    first = filled(pairs_run(box, tmp_path, large)).stream.reference
    second = filled(pairs_run(box, tmp_path, moved)).stream.reference
    assert np.abs(first - second).max() > 1e-3
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 2
    assert np.array_equal(filled(pairs_run(box, tmp_path, large)).stream.reference, first)
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 2


def test_texts_with_and_without_a_prompt_are_one_run(box, large, tmp_path):
    """`ipo` divides by the number of targets: words that both answers share count on neither side."""

    def taken(keys: bool) -> tuple[Batch, float]:
        config = pairs_run(box, tmp_path, large, "dpo.loss=ipo", f"data.path={tmp_path}/{keys}.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
        if not keys:
            rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
        (tmp_path / f"{keys}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        trainer = filled(config)
        with torch.no_grad():
            for t in trainer.trained:
                t.local.mul_(1.1)
        (batch,) = next(trainer.batches)
        return batch, trainer.forward_backward([batch], batch.n_terms).item()

    (given, loss), (found, same) = taken(True), taken(False)
    assert torch.equal(given.labels, found.labels) and given.n_targets == found.n_targets > 0
    assert loss == same and abs(loss - 25) > 1e-3, "25 is where it begins"
