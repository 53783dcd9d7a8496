"""Blocks over ranks: golden list, gradients, checkpoints, evaluation, exports, refusals, what is predicted."""

from __future__ import annotations

import shutil

import pytest

from meshes import MeshCase, prove

from golden import make_golden

ONE, INTER, ZERO = {"pipeline": {}}, {"pipeline": {"schedule": "interleaved"}}, {"pipeline": {"schedule": "zero-bubble"}}
LORA = {"lora": {"rank": 4}}
QLORA = {"nf4": {}} | LORA
DEEP = ("train.log_every=1",)  # says nothing new: compared with one process, as there is no list of four layers
TWO = [
    MeshCase(2, ONE, "tied", packed=False),
    MeshCase(2, ONE | {"recompute": {}, "fused-loss": {"chunk": 5}, "attention": {}}, "chat"),
    MeshCase(2, ONE | LORA, base=LORA),
    MeshCase(2, ONE | QLORA, base=QLORA),
]
FOUR = [
    MeshCase(4, ONE | {"ddp": {}}, "tied", rows=1),
    MeshCase(4, ONE | {"fsdp": {}}, rows=1),
    MeshCase(4, ONE | {"fsdp": {"stage": 2}} | QLORA, rows=1, base=QLORA),
    MeshCase(4, ONE | {"fsdp": {}}, "tied", packed=False, rows=1),
    MeshCase(4, ONE | {"tensor": {}}),
    MeshCase(4, ONE | {"context": {}, "ddp": {}}),
]
DEEP_TWO = [
    MeshCase(2, INTER, sets=DEEP),
    MeshCase(2, INTER | QLORA, "tied", packed=False, base=QLORA),
    MeshCase(2, ZERO, "tied", sets=DEEP),
    MeshCase(2, ZERO, sets=DEEP),
    MeshCase(2, ZERO | {"recompute": {}}, sets=DEEP),
    MeshCase(2, ZERO | LORA, base=LORA),
    MeshCase(2, ZERO | QLORA, base=QLORA),
    MeshCase(2, ZERO | {"fused-loss": {"chunk": 5}}, sets=DEEP),
    MeshCase(2, ZERO | {"fused-kernels": {"mlp": "triton", "norm": True, "rope": True}}, sets=DEEP),
]
DEEP_FOUR = [
    MeshCase(4, {"pipeline": {"size": 4}}, "tied", sets=DEEP),
    MeshCase(4, INTER | {"fsdp": {}}, sets=DEEP, rows=1),
    MeshCase(4, INTER | {"tensor": {}}, sets=DEEP),
    MeshCase(4, ZERO | {"fsdp": {}}, sets=DEEP, rows=1),
    MeshCase(4, ZERO | {"ddp": {}}, "tied", sets=DEEP, rows=1),
    MeshCase(4, ZERO | {"tensor": {}}, sets=DEEP),
]


@pytest.fixture(scope="module")
def deep(box, tmp_path_factory):
    """The golden folders with models of four layers."""
    made = tmp_path_factory.mktemp("deep")
    for name in ("tied", "untied"):
        make_golden.write_model(made / name, name == "tied", num_hidden_layers=4)
    for file in box.glob("*.jsonl"):
        shutil.copyfile(file, made / file.name)
    return made


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


@pytest.mark.parametrize("case", DEEP_TWO, ids=str)
def test_two_stages_a_rank_are_one_process(deep, pair, reference, case):
    prove(deep, pair, case, reference)


@pytest.mark.parametrize("case", DEEP_FOUR, ids=str)
def test_four_ranks_and_blocks_are_one_process(deep, quad, reference, case):
    prove(deep, quad, case, reference)
