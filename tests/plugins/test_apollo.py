"""APOLLO: its steps against torch's AdamW on the sketches, and what the plan predicts. What every optimizer owes is in
test_optimizers.py."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from optrush.config import Optim
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.hardware import NAMED
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner.ledger import Line
from optrush.technique import Environment, Part
from optrush_apollo import ROOM
from optrush_apollo import Apollo as TheTechnique
from optrush_apollo.optimizer import Apollo

from memory import Tracker
from optimizers import OPTIM, parameters
from trials import KNOWN, assembled, golden_run, steps, weights

RANK = 8
SIZES = {"a": (24, 300), "odd": (33, 57), "b": (40, 300), "narrow": (50, 8), "norm": (24,)}
SKETCHED = ("a", "odd", "b")


def gradients(step, rows=slice(None), sizes=SIZES):
    """Rows of different sizes; one of nothing in every second step."""
    g = torch.Generator().manual_seed(step)
    for shape in sizes.values():
        x = torch.randn(shape, generator=g) * 10.0 ** torch.randn(shape[0], *[1] * (len(shape) - 1), generator=g)
        x[3] *= step % 2
        yield x[rows]


def stepped(ours, found, n, *, scale=1.0, first=1, only=None, bad=False, rows=slice(None), sizes=SIZES):
    for step in range(first, first + n):
        for t, g in zip(found, gradients(step, rows, sizes), strict=True):
            t.grad = (g * scale).to(t.local.dtype)
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(float(scale)), torch.tensor(bad), only=only)


def apollo(found, **options):
    return Apollo(found, OPTIM, **{"rank": RANK, "room": ROOM} | options)


# The step.


def test_it_goes_along_the_gradient_as_far_as_adamw_on_the_sketch():
    """torch's AdamW steps the sketches, from zeros, at a rate of 1: what it moves them by has the lengths."""
    found = parameters(sizes=SIZES)
    ours = apollo(found)
    moves = {t.name: torch.zeros(t.full_shape[0], RANK) for t in found if t.name in SKETCHED}
    rest = {t.name: t.local.clone() for t in found if t.name not in SKETCHED}
    theirs = torch.optim.AdamW(moves.values(), lr=1.0, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    other = torch.optim.AdamW(
        [{"params": rest["narrow"], "weight_decay": 0.1}, {"params": rest["norm"], "weight_decay": 0.0}],
        betas=OPTIM.betas, eps=OPTIM.eps,
    )  # fmt: skip
    for step in range(1, 6):
        rate, want = OPTIM.lr / step, {}
        for t, g in zip(found, gradients(step), strict=True):
            if t.name in rest:
                rest[t.name].grad = g
                continue
            C = t.full_shape[1]
            sketch = g @ ours.signs[C] / math.sqrt(RANK)
            before = moves[t.name].clone()
            moves[t.name].grad = sketch
            want[t.name] = (t.local.clone(), g, sketch, before)
        theirs.step()
        other.param_groups[0]["lr"] = other.param_groups[1]["lr"] = rate
        other.step()
        stepped(ours, found, 1, scale=2.0**step, first=step)
        for t in found:
            if t.name in rest:
                torch.testing.assert_close(t.local, rest[t.name], rtol=1e-5, atol=1e-6)
                continue
            weight, g, sketch, before = want[t.name]
            a = before - moves[t.name]
            times = a.norm(dim=1) / sketch.norm(dim=1).clamp(min=1e-18) * math.sqrt(t.full_shape[1] / RANK)
            weight = weight * (1 - rate * 0.1) - rate * times[:, None] * g
            torch.testing.assert_close(t.local, weight, rtol=1e-5, atol=1e-6, msg=f"{t.name} at {step}")


def test_steps_are_as_long_as_adamws():
    """A row's step beside that of AdamW on all its values: as long, within what a sketch knows."""
    sizes = {"a": (200, 400)}
    found = parameters(sizes=sizes)
    ours = Apollo(found, Optim(weight_decay=0.0), rank=64, room=ROOM)
    weight = torch.zeros(200, 400)
    theirs = torch.optim.AdamW([weight], lr=1e-2, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    for step in range(1, 21):
        before, theirs_before = found[0].local.clone(), weight.clone()
        (g,) = gradients(step, sizes=sizes)
        found[0].grad = weight.grad = g + 0.3
        ours.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False))
        theirs.step()
        ratio = (found[0].local - before).norm(dim=1) / (weight - theirs_before).norm(dim=1)
        if step > 2:  # one row has had no gradient yet but 0.3
            assert ratio.median() == pytest.approx(1, abs=0.1), step


def test_signs_keep_lengths():
    signs = apollo(parameters(sizes=SIZES), rank=64 - 8).signs
    assert set(signs) == {300, 57} and signs[300].shape == (300, 56)
    assert torch.equal(signs[300].abs(), torch.ones(300, 56)) and abs(signs[300].mean()) < 0.03
    x = torch.randn(1000, 300, generator=torch.Generator().manual_seed(1))
    ratio = (x @ signs[300] / math.sqrt(56)).norm(dim=1) / x.norm(dim=1)
    assert ratio.mean() == pytest.approx(1, abs=0.02) and ratio.std() == pytest.approx(1 / math.sqrt(112), rel=0.2)
    assert not torch.equal(
        apollo(parameters(sizes=SIZES), seed=1).signs[57], apollo(parameters(sizes=SIZES), seed=2).signs[57]
    )


def test_a_row_of_nothing_stays():
    found = parameters(sizes=SIZES)
    ours = apollo(found)
    ours.optim = Optim(weight_decay=0.0)
    for t in found:
        t.grad = torch.zeros(t.full_shape)
        t.grad[1] = 1e-25  # whose square is no float32
    before = [t.local.clone() for t in found[:3]]
    ours.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False))
    for t, b in zip(found, before, strict=False):
        torch.testing.assert_close(t.local, b * (1 - 1e-2 * 0.1))


def test_which_matrices_are_sketched():
    found = parameters(torch.bfloat16, SIZES)
    state = apollo(found).state()
    assert list(state) == list(SIZES)
    for name in SKETCHED:
        held = {k: (tuple(s.shape), s.dtype) for k, s in state[name].items()}
        rows = ((SIZES[name][0], RANK), torch.float32)
        assert held == {"mean": rows, "square": rows, "count": ((), torch.float32)}
    assert state["narrow"]["mean"].shape == (50, 8), "no more than `rank` columns"


# In a run.

LITTLE = {"rank": 16}  # of 64 or 96 columns


def test_fused_matrices_are_stepped_as_the_published_ones(box):
    found = []
    for implementation in ("native", "transformers"):
        job = assembled(golden_run(box, sets=[f"model.implementation={implementation}"], apollo=LITTLE))
        list(steps(job, 2))
        found.append({hf: p for n, w in weights(job).items() for hf, p in job.weight_map.split(n, w)})
    assert found[0].keys() == found[1].keys()
    for name, w in found[0].items():
        torch.testing.assert_close(found[1][name], w, rtol=1e-3, atol=1e-4, msg=name)
    assert "apollo sketches 16 matrices, AdamW steps the other 5 parameters" in job.describe()


# What it refuses.


def test_what_it_refuses(box):
    with pytest.raises(NeedsError, match="a sketch of 96 values a row") as error:
        assembled(golden_run(box, apollo={"rank": 96}))
    assert "no matrix of this model has more than 96 columns" in error.value.found
    assert "a smaller rank" in error.value.do
    with pytest.raises(ConfigError, match="rank"):
        decide(golden_run(box, apollo={"rank": 0}), KNOWN)


def test_it_does_not_reach_experts():
    (need,) = [n for n in TheTechnique().needs(settled(ModelShape.read(SHAPES["qwen3-30b-a3b"]))) if not n.met]
    assert "experts" in need.found and need.do


# What the plan says.


def settled(shape):
    return Environment(NAMED["h200"], 1, 2048, 16, 4, 1.0, "float32", True, shape.layers, shape=shape)


def setup(shape, device="cuda"):
    return SimpleNamespace(shape=shape, device=SimpleNamespace(kind=device), claimed=frozenset())


def entries(rank=64):
    rules = TheTechnique(rank=rank).predict(setup(ModelShape.read(SHAPES["llama-3.2-1b"])))
    return {(type(e), e.name): e for rule in rules for e in rule.entries}


def test_products_are_as_predicted():
    """FLOPs of torch's own count, to the digit."""
    s = ModelShape.read(SHAPES["llama-3.2-1b"])
    shapes = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)] * s.layers + [(s.vocab, s.width)]
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        for rows, columns in shapes:
            torch.empty(rows, columns) @ torch.empty(columns, 64)
    (work,) = [e for (_, name), e in entries().items() if name == "update.sketch"]
    assert work.flop == counted.get_total_flops()


def test_temporaries_are_as_predicted():
    with FakeTensorMode():
        shape = (128256, 2048)
        t = SimpleNamespace(
            name="a", local=torch.zeros(shape), grad=torch.zeros(shape), decays=True, full_shape=shape, offset=(0, 0)
        )
        ours = Apollo([t], OPTIM, rank=64, room=ROOM)
        tracker = Tracker(supposed=True)
        held = [t.local, t.grad, *ours.signs.values(), *ours.state()["a"].values()]
        for each in held:
            tracker.hold(each, "weight")
        with tracker:
            ours.step(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(False))
        peak = tracker.measured().peak - sum(x.nbytes for x in held)
    assert peak == pytest.approx(4 * entries()[Line, "update.workspace"].values, rel=0.1)


def test_temporaries_beside_updates_in_the_backward_pass():
    """Of a block's matrix while blocks go back, of the embedding after them."""
    early = setup(ModelShape.read(SHAPES["llama-3.2-1b"]))
    early.claimed = frozenset({Part.UPDATE})
    lines = [e for r in TheTechnique().predict(early) for e in r.entries if e.name.startswith("update.workspace")]
    assert [line.live for line in lines] == ["backward", "end"] and lines[0].values == lines[1].values > 0
