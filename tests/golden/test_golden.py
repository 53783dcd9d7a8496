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
WAYS = [(name, *cut) for name in ("untied", "tied") for cut in CUTS] + [("chat", packed, 2) for packed in ROWS]
# On two ranks every second cutting, heads in turn; and the case in which ranks have the fewest targets in common.
SHARED = [
    (("untied", "tied")[(i // 2 + j) % 2], *cut, data)
    for j, data in enumerate(("ddp", "fsdp2", "fsdp3"))
    for i, cut in enumerate(CUTS)
    if (i + j) % 2 == 0
] + [("chat", packed, 2, data) for packed, data in ((True, "ddp"), (False, "fsdp2"), (True, "fsdp3"))]


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
    ("name", "packed", "rows"), further([*WAYS[::3], ("sgd", True, 2), *WAYS[1::3], *WAYS[2::3], ("sgd", False, 2)], 5)
)
def test_one_process(box, name, packed, rows):
    agrees(name, play(box, name, packed, rows, {}))


@pytest.mark.parametrize(
    ("name", "packed", "rows", "data"), further(SHARED[::4] + SHARED[1::4] + SHARED[2::4] + SHARED[3::4], 3)
)
def test_two_ranks(box, pair, name, packed, rows, data):
    agrees(name, pair(play, box, name, packed, rows, DATA[data])[0])


@pytest.mark.parametrize(
    ("name", "packed", "data"),
    further([("tied", True, "fsdp2-each"), ("tied", False, "fsdp3-each"), ("untied", True, "fsdp3-each")], 1),
)
def test_sums_after_every_micro_batch(box, pair, name, packed, data):
    agrees(name, pair(play, box, name, packed, 2, DATA[data])[0])


@pytest.mark.parametrize("data", further(["fsdp3", "ddp"], 1))
def test_another_optimizer_on_two_ranks(box, pair, data):
    """AdamW hides a wrong factor on all gradients, momentum does not."""
    agrees("sgd", pair(play, box, "sgd", True, 2, DATA[data])[0])


@pytest.mark.parametrize(("name", "with_"), further([
    ("untied", {"attention": {}}), ("tied", {"fused-loss": {"chunk": 5}}), ("untied", {"fused-adamw": {}}),
    ("tied", {"attention": {}}), ("untied", {"fused-loss": {"chunk": 5}}), ("tied", {"fused-adamw": {}}),
], 2))  # fmt: skip
def test_one_kernel_at_a_time(box, name, with_):
    agrees(name, play(box, name, True, 2, with_))


@pytest.mark.parametrize("data", further(["fsdp3-each", "ddp", "fsdp2", "fsdp3", "fsdp2-each"], 1))
def test_everything_at_once(box, pair, data):
    together = {"attention": {}, "fused-loss": {"chunk": 5}, "fused-adamw": {}, "recompute": {}}
    agrees("chat", pair(play, box, "chat", True, 2, together | DATA[data])[0])


# Norms do not see a permutation, nor two mistakes that cancel: so every number of every gradient, once.
def gradients(box: Path, name: str, packed: bool, with_: dict[str, Any]) -> dict[str, torch.Tensor]:
    return published(assembled(golden_run(box, CASES[name], packed=packed, **with_)))[1]


@pytest.mark.parametrize("data", ["one", "ddp", "fsdp2", "fsdp3", "fsdp3-each"])
@pytest.mark.parametrize(("name", "packed"), [("untied", True), ("tied", True), ("chat", False)])
def test_every_gradient(box, pair, reference, name, packed, data):
    found = [gradients(box, name, packed, {})] if data == "one" else pair(gradients, box, name, packed, DATA[data])
    for grads in found:
        wanted = reference(name)[1]
        assert grads.keys() == wanted.keys()
        for hf, want in wanted.items():
            off = apart(grads[hf], want)
            assert off < CLOSE, f"{hf}: {off:.1e} of its largest gradient"
