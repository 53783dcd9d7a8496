"""One list of losses and gradient norms, made without us, against every way of cutting the same eight steps.

The figures do not depend on the version of torch: with another one installed in ENV, PYTHONPATH=src ENV/bin/python -m
pytest tests/golden holds that one to them, too.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshes import further
from optrush.techniques import ALL

from golden import make_golden
from golden.make_golden import CASES
from golden.sgd import Sgd
from trials import apart, assembled, golden_run, metrics, published

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
CLOSE = 1e-5  # relative, of losses and of norms before clipping
ROWS = {True: (1, 2, 4), False: (2, 4, 8)}  # of a micro-batch, packed or not: 8, 4 and 2 micro-batches in one process
DATA: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": {}}, "fsdp2": {"fsdp": {"stage": 2}}, "fsdp3": {"fsdp": {"stage": 3}},
    "fsdp2-each": {"fsdp": {"stage": 2, "sync": "each"}}, "fsdp3-each": {"fsdp": {"stage": 3, "sync": "each"}},
}  # fmt: skip
CUTS = [(packed, rows) for packed in ROWS for rows in ROWS[packed]]
KERNELS = [{"attention": {}}, {"fused-loss": {"chunk": 5}}, {"fused-adamw": {}}]
TOGETHER = {"attention": {}, "fused-loss": {"chunk": 5}, "fused-adamw": {}, "recompute": {}}
# Name, whether packed, rows of a micro-batch, other techniques, how ranks share (or one process). AdamW hides a wrong
# factor on all gradients, the momentum of `sgd` does not; ranks of `chat` have the fewest targets in common.
QUICK: list[tuple[str, bool, int, dict[str, Any], str]] = [
    ("untied", True, 1, {}, "one"), ("tied", False, 8, {}, "one"), ("chat", True, 2, {}, "one"),
    ("untied", True, 2, KERNELS[0], "one"), ("tied", True, 2, KERNELS[1], "one"), ("untied", True, 1, {}, "ddp"),
    ("chat", False, 2, {}, "fsdp2"), ("sgd", True, 2, {}, "fsdp3"), ("tied", True, 2, {}, "fsdp2-each"),
    ("chat", True, 2, TOGETHER, "fsdp3-each"),
]  # fmt: skip
MORE = [(name, *cut, {}, "one") for name in ("untied", "tied") for cut in CUTS]
MORE += [("chat", False, 2, {}, "one"), ("sgd", True, 2, {}, "one"), ("sgd", False, 2, {}, "one")]
MORE += [(name, True, 2, kernel, "one") for name in ("untied", "tied") for kernel in KERNELS]
# On two ranks every second cutting, heads in turn.
MORE += [
    (("untied", "tied")[(i // 2 + j) % 2], *cut, {}, data)
    for j, data in enumerate(("ddp", "fsdp2", "fsdp3")) for i, cut in enumerate(CUTS) if (i + j) % 2 == 0
]  # fmt: skip
MORE += [("chat", True, 2, {}, "ddp"), ("chat", True, 2, {}, "fsdp3"), ("sgd", True, 2, {}, "ddp")]
MORE += [("tied", False, 2, {}, "fsdp3-each"), ("untied", True, 2, {}, "fsdp3-each")]
MORE += [("chat", True, 2, TOGETHER, data) for data in ("ddp", "fsdp2", "fsdp3", "fsdp2-each")]


# On two ranks every second cutting, heads in turn; and the case in which ranks have the fewest targets in common.


def play(box: Path, name: str, packed: bool, rows: int, with_: dict[str, Any]) -> list[dict[str, Any]]:
    """One golden case through the real path, here or on a rank."""
    sets: list[str] = []
    classes: tuple[Any, ...] = ALL
    if CASES[name].sgd:
        with_ = with_ | {"sgd": {"momentum": make_golden.MOMENTUM}}
        classes, sets = (*ALL, Sgd), [f"optim.lr={make_golden.SGD_LR}"]
    return metrics(golden_run(box, CASES[name], rows=rows, packed=packed, sets=sets, **with_), classes)


def agrees(name: str, lines: list[dict[str, Any]]) -> None:
    lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, make_golden.STEPS + 1))
    for key, wanted in GOLDEN[name].items():
        for step, (line, want) in enumerate(zip(lines, wanted), 1):
            off = abs(line[key] - want) / want
            assert off < CLOSE, f"{key} of step {step}: {line[key]}, golden {want}, {off:.1e} apart"


@pytest.mark.slow
def test_the_script_still_writes_this(tmp_path):
    for name, made in make_golden.make(tmp_path).items():
        for key, values in made.items():
            assert values == pytest.approx(GOLDEN[name][key], rel=1e-6), (name, key)


@pytest.mark.parametrize(
    ("name", "packed", "rows", "with_", "data"), further([*QUICK, *(c for c in MORE if c not in QUICK)], len(QUICK))
)
def test_eight_steps(box, pair, name, packed, rows, with_, data):
    lines = play(box, name, packed, rows, with_) if data == "one" else pair(
        play, box, name, packed, rows, with_ | DATA[data])[0]  # fmt: skip
    agrees(name, lines)


# Norms do not see a permutation, nor two mistakes that cancel: so every number of every gradient, once.
def gradients(box: Path, name: str, packed: bool, with_: dict[str, Any]) -> dict[str, torch.Tensor]:
    return published(assembled(golden_run(box, CASES[name], packed=packed, **with_)))[1]


@pytest.mark.parametrize(("name", "packed", "data"), further([
    ("untied", True, "one"), ("tied", True, "one"), ("chat", False, "one"), ("untied", True, "ddp"),
    ("tied", True, "fsdp2"), ("chat", False, "fsdp3"), ("untied", True, "fsdp3-each"), ("tied", True, "ddp"),
    ("chat", False, "ddp"), ("untied", True, "fsdp2"), ("chat", False, "fsdp2"), ("untied", True, "fsdp3"),
    ("tied", True, "fsdp3"), ("tied", True, "fsdp3-each"), ("chat", False, "fsdp3-each"),
], 7))  # fmt: skip
def test_every_gradient(box, pair, reference, name, packed, data):
    found = [gradients(box, name, packed, {})] if data == "one" else pair(gradients, box, name, packed, DATA[data])
    for grads in found:
        wanted = reference(name)[1]
        assert grads.keys() == wanted.keys()
        for hf, want in wanted.items():
            off = apart(grads[hf], want)
            assert off < CLOSE, f"{hf}: {off:.1e} of its largest gradient"
