"""APOLLO: its steps against torch's AdamW on the sketches, on slices and whole matrices, and a held-out loss no worse
than AdamW's."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from optrush.config import Optim, parse_config
from optrush.errors import ConfigError, NeedsError
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.apollo import Apollo
from optrush.planner import search
from optrush.planner.ledger import Line
from optrush.resolve import resolve
from optrush.technique import Part
from optrush.techniques.apollo import ROOM
from optrush.techniques.apollo import Apollo as TheTechnique
from optrush.trainer import checkpoint

from heldout import SEEDS, float32, held_out
from memory import Tracker
from trials import assembled, golden_run, steps, weights

OPTIM = Optim(lr=1e-2, weight_decay=0.1)
RANK = 8
SIZES = {"a": (24, 300), "odd": (33, 57), "b": (40, 300), "narrow": (50, 8), "norm": (24,)}
SKETCHED = ("a", "odd", "b")


def trained(dtype=torch.float32, rows=slice(None), sizes=SIZES):
    """Parameters as an optimizer sees them; `rows`: what this rank holds of those with rows."""
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in sizes.items():
        full = torch.randn(shape, generator=g).to(dtype)
        offset = (rows.start or 0, *[0] * (len(shape) - 1))
        local = full[rows].clone()
        found.append(
            SimpleNamespace(name=name, local=local, grad=None, decays=len(shape) > 1, whole=shape, offset=offset)
        )
    return found


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


def everything(found, ours):
    return [t.local.clone() for t in found] + [s.clone() for by in ours.state().values() for s in by.values()]


# The step.


def test_it_goes_along_the_gradient_as_far_as_adamw_on_the_sketch():
    """torch's AdamW steps the sketches, from zeros, at a rate of 1: what it moves them by has the lengths."""
    found = trained()
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
    found = trained(sizes=sizes)
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
    signs = apollo(trained(), rank=64 - 8).signs
    assert set(signs) == {300, 57} and signs[300].shape == (300, 56)
    assert torch.equal(signs[300].abs(), torch.ones(300, 56)) and abs(signs[300].mean()) < 0.03
    x = torch.randn(1000, 300, generator=torch.Generator().manual_seed(1))
    ratio = (x @ signs[300] / math.sqrt(56)).norm(dim=1) / x.norm(dim=1)
    assert ratio.mean() == pytest.approx(1, abs=0.02) and ratio.std() == pytest.approx(1 / math.sqrt(112), rel=0.2)
    assert not torch.equal(apollo(trained(), seed=1).signs[57], apollo(trained(), seed=2).signs[57])


def test_a_row_of_nothing_stays():
    found = trained()
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
    found = trained(torch.bfloat16)
    state = apollo(found).state()
    assert list(state) == list(SIZES)
    for name in SKETCHED:
        held = {k: (tuple(s.shape), s.dtype) for k, s in state[name].items()}
        rows = ((SIZES[name][0], RANK), torch.float32)
        assert held == {"mean": rows, "square": rows, "count": ((), torch.float32)}
    assert state["narrow"]["mean"].shape == (50, 8), "no more than `rank` columns"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_and_company_do_not_matter(dtype):
    found = trained(dtype)
    ours = apollo(found, rounding="stochastic")
    stepped(ours, found, 3)
    want = everything(found, ours)
    for room, only in ((1, [None]), (1000, [[4], [0, 2], [1, 3]])):
        other = trained(dtype)
        theirs = apollo(other, room=room, rounding="stochastic")
        for step in range(1, 4):
            for some in only:
                stepped(theirs, other, 1, first=step, only=some)
        for a, b in zip(want, everything(other, theirs), strict=True):
            if a.dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * a.abs().max().item())
            else:  # what is summed in another order may be rounded to the other side
                assert (a != b).float().mean() < 0.02


@pytest.mark.parametrize("at", [1, 5, 24])
def test_a_shard_does_what_the_whole_does(at):
    """Bits of rounding too: places count in the whole. An empty piece is one."""
    sizes = {name: SIZES[name] for name in SKETCHED}
    base = trained(torch.bfloat16, sizes=sizes)
    one = apollo(base, rounding="stochastic", seed=7)
    stepped(one, base, 3, sizes=sizes)
    for rows in (slice(0, at), slice(at, None)):
        part = trained(torch.bfloat16, rows, sizes)
        ours = apollo(part, rounding="stochastic", seed=7)
        stepped(ours, part, 3, rows=rows, sizes=sizes)
        for t, p in zip(base, part, strict=True):
            assert (t.local[rows] != p.local).float().sum() <= 0.02 * p.local.numel(), t.name
            for name in ("mean", "square"):
                a, b = one.state()[t.name][name][rows], ours.state()[t.name][name]
                apart = 1e-2 * a.abs().amax().item() if len(a) else 0
                torch.testing.assert_close(a, b, rtol=1e-2, atol=apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_nothing(dtype):
    found = trained(dtype)
    ours = apollo(found, rounding="stochastic")
    stepped(ours, found, 1)
    before = everything(found, ours)
    stepped(ours, found, 1, scale=float("nan"), bad=True)
    assert all(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))
    stepped(ours, found, 1, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))
    assert all(torch.isfinite(t.local).all() for t in found)


def test_each_update_draws_anew():
    """Weights that only decay, from the same values, one update later: rounded by other bits."""
    found = [t for t in trained(torch.bfloat16) if t.decays]
    ours = apollo(found, rounding="stochastic")
    before, after = [t.local.clone() for t in found], []
    for _ in range(2):
        for t, b in zip(found, before, strict=True):
            t.local.copy_(b)
            t.grad = torch.zeros_like(b)
        ours.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False))
        after.append([t.local.clone() for t in found])
    for t, a, b in zip(found, *after, strict=True):
        assert not torch.equal(a, b), t.name


def test_bf16_weights_move_at_a_small_rate():
    """With stochastic rounding as far as float32 weights do, on the average; to the nearest most stand still."""
    went, sizes = {}, {"a": (24, 300)}
    for rounding, dtype in (("nearest", torch.float32), ("nearest", torch.bfloat16), ("stochastic", torch.bfloat16)):
        found = trained(torch.bfloat16, sizes=sizes)
        found[0].local = (found[0].local * 0.02).to(dtype)  # as large as a model's weights
        before = found[0].local.clone()
        ours = apollo(found, rounding=rounding)
        for step in range(1, 61):
            (g,) = gradients(step, sizes=sizes)
            found[0].grad = (1 + g).to(dtype)
            ours.step(torch.tensor(1e-5), torch.tensor(1.0), torch.tensor(False))
        went[rounding, dtype] = (found[0].local - before).float().flatten()
    full = went["nearest", torch.float32]
    share = {r: (went[r, torch.bfloat16] @ full / (full @ full)).item() for r in ("nearest", "stochastic")}
    print(share)
    assert share["nearest"] < 0.6 and share["stochastic"] == pytest.approx(1, abs=0.1)


# In a run.

# 3e-2 is AdamW's best rate of 3e-3, 1e-2, 3e-2 and 6e-2 in these 40 steps.
RATE = ("optim.lr=3e-2",)
MARGIN = 0.01  # nats a token, of the mean over the seeds; a seed alone may be twice as far
LITTLE = {"rank": 16}  # of 64 or 96 columns


def test_held_out_loss_over_seeds(box):
    base = [float32(box, seed, RATE) for seed in SEEDS]
    ours = [held_out(box, seed, RATE, apollo=LITTLE) for seed in SEEDS]
    print("AdamW", base, "APOLLO", ours)
    assert all(last < 0.6 * first for first, last in base), "it learns"
    off = [b[1] - a[1] for a, b in zip(base, ours)]
    assert any(off), "another optimizer"
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_the_margin_is_no_accident(box, monkeypatch):
    """With the gradients' own lengths instead of AdamW's it does not learn as well."""
    base = float32(box, 1, RATE)[1]
    monkeypatch.setattr("optrush.optim.apollo._length", lambda x: torch.ones(len(x), 1))
    found = held_out(box, 1, RATE, apollo=LITTLE)[1]
    print(base, found)
    assert found > base + MARGIN


def all_bits(trainer):
    found = weights(trainer)
    return found | {f"{n} {k}": s.clone() for n, by in trainer.optimizer.state().items() for k, s in by.items()}


@pytest.mark.parametrize("with_", [{}, {"bf16": {}}], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(box, with_):
    run = golden_run(box, packed=True, apollo=LITTLE, **with_)
    straight = assembled(run)
    list(steps(straight, 4))
    stopped = assembled(run)
    list(steps(stopped, 2))
    checkpoint.save(stopped, 2, checkpoint.Meta("00ff", 0, fingerprints={}))
    again = assembled(run)
    checkpoint.restore(again, checkpoint.find(Path(run.output))[0], {})
    for _ in range(2):
        next(again.batches)
    list(steps(again, 2, first=3))
    a, b = all_bits(straight), all_bits(again)
    assert a["embedding.weight mean"].shape == (80, 16) and a["norm.weight mean"].shape == (64,)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def cut_and_saved(box, output):
    """Two steps on two ranks, saved; (whole weights, the losses)."""
    job = assembled(golden_run(box, packed=True, rows=2, sets=[f"output={output}"], fsdp={}, apollo=LITTLE))
    figures = list(steps(job, 2))
    checkpoint.save(job, 2, checkpoint.Meta("00ff", 0, fingerprints={}))
    return weights(job), figures


def test_states_of_two_ranks_are_one_ranks(box, pair, tmp_path):
    """Rows cut over two ranks are stepped as the whole matrix is; their checkpoint loads into one rank."""
    (want, figures), _ = pair(cut_and_saved, box, str(tmp_path))
    job = assembled(golden_run(box, packed=True, rows=4, apollo=LITTLE))
    alone = list(steps(job, 2))
    assert [f[:2] for f in figures] == [pytest.approx(f[:2], rel=1e-4) for f in alone]
    before = all_bits(job)
    checkpoint.restore(job, checkpoint.find(tmp_path)[0], {})
    for name, w in weights(job).items():
        assert torch.equal(w, want[name]), name
    for name, s in all_bits(job).items():
        torch.testing.assert_close(s, before[name], rtol=1e-2, atol=1e-3 * before[name].abs().max().item(), msg=name)


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
    with pytest.raises(NeedsError, match="`apollo` has no place for remainders") as error:
        search.predict(golden_run(box, bf16={"rounding": "kahan"}, apollo={}), "h200")
    assert "what rounding took" in error.value.found and "bf16:rounding=stochastic" in error.value.do
    with pytest.raises(NeedsError, match="a sketch of 96 values a row") as error:
        assembled(golden_run(box, apollo={"rank": 96}))
    assert "no matrix of this model has more than 96 columns" in error.value.found
    assert "a smaller rank" in error.value.do
    cut = trained()
    cut[0].local = cut[0].local[:, :150]
    with pytest.raises(NeedsError, match="sketches whole rows") as error:
        apollo(cut)
    assert "(24, 150) of the (24, 300) of a" in error.value.found and "fused-adamw" in error.value.do
    with pytest.raises(ConfigError, match="rank"):
        resolve(golden_run(box, apollo={"rank": 0}))


# What the plan says.


def setup(shape, device="cuda"):
    return SimpleNamespace(shape=shape, device=SimpleNamespace(kind=device), owned=frozenset())


def entries(rank=64):
    rules = TheTechnique(rank=rank).predict(setup(ModelShape.read(SHAPES["llama-3.2-1b"])))
    return {(type(e), e.name): e for rule in rules for e in rule.entries}


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.2-1b-untied"])
@pytest.mark.parametrize("with_", ["apollo: {}", "bf16: {}, apollo: {rank: 256}"])
def test_states_are_as_predicted(shape, with_):
    """Those of an optimizer of that shape, to the byte."""
    text = f"{{model: {{shape: {shape}}}, objective: pretrain, data: {{random: 4}}, output: x, with: {{{with_}}}}}"
    found = sum(
        s.bytes for s in search.predict(parse_config(text, "test"), "h200", 1).lines if s.name.startswith("states.")
    )
    s = ModelShape.read(SHAPES[shape])
    rank, norm = (256, 2) if "256" in with_ else (64, 4)
    rows = s.layers * (3072 + 2048 + 16384 + 2048) + s.vocab * (1 + (not s.tied))
    norms = (2 * s.layers + 1) * s.width
    assert found == 8 * rank * rows + 2 * norm * norms


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
            name="a", local=torch.zeros(shape), grad=torch.zeros(shape), decays=True, whole=shape, offset=(0, 0)
        )
        ours = Apollo([t], OPTIM, rank=64, room=ROOM)
        tracker = Tracker(supposed=True)
        held = [t.local, t.grad, *ours.signs.values(), *ours.state()["a"].values()]
        for each in held:
            tracker.hold(each, "weight")
        with tracker:
            ours.step(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(False))
        peak = tracker.measured().peak - sum(x.nbytes for x in held)
    assert peak == pytest.approx(4 * entries()[Line, "update.rows"].values, rel=0.1)


def test_temporaries_beside_updates_in_the_backward_pass():
    """Of a block's matrix while blocks go back, of the embedding after them."""
    early = setup(ModelShape.read(SHAPES["llama-3.2-1b"]))
    early.claimed = frozenset({Part.UPDATE})
    lines = [e for r in TheTechnique().predict(early) for e in r.entries if e.name.startswith("update.rows")]
    assert [line.live for line in lines] == ["backward", "end"] and lines[0].values == lines[1].values > 0
