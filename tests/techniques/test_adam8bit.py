"""AdamW with 8-bit moments: its codes, its update against torch's on the decoded moments, and a held-out loss near
that of float32 moments."""

from __future__ import annotations

import importlib.util
import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.adamw import adamw

import interpreter
from optrush.config import Optim, parse_config
from optrush.errors import NeedsError
from optrush.kernels import adam8bit as kernel
from optrush.kernels.adam8bit import BLOCK, decode, encode, values
from optrush.models.decoder import build
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.adam8bit import Adam8bit
from optrush.planner import search
from optrush.trainer import checkpoint

from heldout import SEEDS, float32, held_out
from trials import assembled, golden_run, steps, weights, whole

CPU = torch.device("cpu")
OPTIM = Optim(lr=1e-2, weight_decay=0.1)
SIZES = {"a": (24, 300), "odd": (33, 257), "cube": (3, 8, 256), "norm": (5000,), "small": (9, 11), "one": ()}


def trained(dtype=torch.float32, sizes=SIZES, rows=slice(None)):
    """Parameters as an optimizer sees them; `rows`: what this rank holds of those with rows."""
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in sizes.items():
        full = torch.randn(shape, generator=g).to(dtype)
        local = full[rows].clone() if shape else full
        first = (rows.start or 0) if shape else 0
        offset = (first, *[0] * (len(shape) - 1))[: len(shape)]
        found.append(
            SimpleNamespace(name=name, local=local, grad=None, decays=len(shape) > 1, whole=shape, offset=offset)
        )
    return found


def gradients(step, sizes=SIZES, rows=slice(None)):
    """Of wide range within a row, some exactly zero, another magnitude each step."""
    g = torch.Generator().manual_seed(step)
    for shape in sizes.values():
        x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
        x = x * (torch.rand(shape, generator=g) > 0.1) * 10.0 ** (step % 3 - 2)
        yield x[rows] if shape else x


def stepped(ours, found, n, *, scale=1.0, first=1, sizes=SIZES, rows=slice(None)):
    for step in range(first, first + n):
        for t, g in zip(found, gradients(step, sizes, rows), strict=True):
            t.grad = (g * scale).to(t.local.dtype)
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(float(scale)), torch.tensor(False))


def everything(found, ours):
    return [t.local.clone() for t in found] + [s.clone() for by in ours.state().values() for s in by.values()]


# The codes.


@pytest.mark.parametrize("signed", [True, False])
def test_the_map(signed):
    """7 decades, 2^i values in the ith of a sign; 0 and 1; byte 0 is zero. (The published map of the paper's code.)"""
    found = values(signed, CPU)
    assert found[0] == 0 and len(found.unique()) == 256 and found.max() == 1
    assert found[found > 0].min() == pytest.approx(0.55e-6 if signed else 0.325e-6)
    for i in range(7):
        inside = (found.abs() > 10.0 ** (i - 7)) & (found.abs() < 10.0 ** (i - 6))
        assert inside.sum() == 2 ** (i + 1), "in the decade, of both signs or without one"
    if signed:
        assert found.min() == pytest.approx(-0.99296875) and found[128] == 1
        assert all(found[256 - n] == -found[n] for n in range(1, 128))
    else:
        assert torch.equal(found, found.sort().values)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    g = torch.Generator().manual_seed(1)
    x = 10.0 ** (-9 * torch.rand(400, 700, generator=g)) * torch.randn(400, 1, generator=g).abs()
    x = x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0) if signed else x
    codes, scales = encode(x, signed)
    assert codes.shape == x.shape and scales.shape == (400, 3), "blocks of 256, 256 and 188, none over a row's end"
    part = (x / scales.repeat_interleave(BLOCK, 1)[:, :700]).double()
    assert part.abs().max() <= 1 + 1e-6
    found = values(signed, CPU).double()[codes.int()]
    best = (part[..., None] - values(signed, CPU).double().unique()).abs().min(-1).values
    off = (part - found).abs() - best
    lifted = (codes == 1) & (part > 0) if not signed else torch.zeros_like(codes, dtype=torch.bool)
    assert off[~lifted].max() < 1e-7, "but for rounding where two are as near"
    assert signed or (codes[x > 0] > 0).all(), "no root of something is nothing"


@pytest.mark.parametrize("signed", [True, False])
def test_codes_survive(signed):
    """What was read and not changed is written as it was."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 2)  # 1 in each block
    scales = torch.tensor([[1.0, 3e-9], [2e9, 0.7], [1e-30, 5.0]])
    again, same = encode(decode(codes, scales, signed), signed)
    assert torch.equal(again, codes) and torch.allclose(same, scales, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_nothing_is_nothing(signed):
    for x in (torch.zeros(2, 300), torch.full((2, 300), 1e-38), torch.eye(2, 300)):
        codes, scales = encode(x, signed)
        assert torch.equal(codes != 0, x == 1) and torch.isfinite(scales).all()
        assert torch.equal(decode(codes, scales, signed), (x == 1).float())


# The update.


def test_equals_torch_on_the_decoded_moments():
    """torch's AdamW is given the moments as they are decoded; weights equal, and new codes are of its new moments."""
    found = trained()
    ours = Adam8bit(found, OPTIM)
    for step in range(1, 7):
        scale = 2.0**step
        state = ours.state()
        theirs = []
        for t, g in zip(found, gradients(step), strict=True):
            mean, square = decoded(state[t.name])
            theirs.append((t.local.clone(), g, mean, square, torch.tensor(float(step - 1))))
            t.grad = g * scale
        for t, (w, g, m, s, count) in zip(found, theirs, strict=True):
            adamw([w], [g], [m], [s], [], [count], foreach=False, amsgrad=False, beta1=OPTIM.betas[0],
                  beta2=OPTIM.betas[1], lr=OPTIM.lr / step, weight_decay=0.1 if t.decays else 0.0, eps=OPTIM.eps,
                  maximize=False)  # fmt: skip
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(scale), torch.tensor(False))
        for t, (w, _, m, s, _) in zip(found, theirs, strict=True):
            torch.testing.assert_close(t.local, w, rtol=1e-5, atol=1e-6, msg=f"{t.name} at {step}")
            after = ours.state()[t.name]
            mean, square = decoded(after)
            assert after["count"] == step
            if "mean_scale" in after:
                rows = m.reshape(-1, m.shape[-1])
                assert (after["mean"].view(rows.shape) != encode(rows, True)[0]).float().mean() < 1e-3
                root = s.sqrt().view(rows.shape)
                assert (after["square"].view(rows.shape) != encode(root, False)[0]).float().mean() < 1e-3
                blocks = root.abs().amax(-1, keepdim=True)
                assert ((square.view(rows.shape).sqrt() - root).abs() <= 0.036 * blocks).all()
            else:
                torch.testing.assert_close(mean, m, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(square, s, rtol=1e-5, atol=1e-9)


def decoded(state):
    """Mean and mean square of a parameter, in its shape."""
    if "mean_scale" not in state:
        return state["mean"].clone(), state["square"].clone()
    shape = state["mean"].shape
    parts = []
    for name, signed in (("mean", True), ("square", False)):
        codes, scales = state[name], state[f"{name}_scale"]
        rows = decode(codes.reshape(-1, shape[-1]), scales.reshape(-1, scales.shape[-1]), signed)
        parts.append(rows.view(shape))
    return parts[0], parts[1].square()


def test_which_moments_take_a_byte():
    state = Adam8bit(trained(), OPTIM).state()
    coded = {name for name, s in state.items() if s["mean"].dtype == torch.uint8}
    assert coded == {"a", "odd", "cube"}, "no vectors, and nothing small"
    assert state["odd"]["mean_scale"].shape == (33, 2) and state["cube"]["square_scale"].shape == (3, 8, 1)
    assert set(state["a"]) == {"mean", "mean_scale", "square", "square_scale", "count"}
    assert not any(s.any() for by in state.values() for s in by.values()), "states begin at zero"


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen2.5-0.5b"])
def test_bytes_a_parameter(shape):
    model = build(SHAPES[shape], torch.bfloat16)
    found = [
        SimpleNamespace(name=n, local=p.detach(), decays=p.dim() > 1, whole=tuple(p.shape), offset=(0,) * p.dim())
        for n, p in model.named_parameters()
    ]
    states = [s for by in Adam8bit(found, OPTIM).state().values() for s in by.values()]
    size = sum(s.numel() * s.element_size() for s in states)
    assert 2 < size / sum(t.local.numel() for t in found) <= 2.1


def test_what_the_plan_says():
    """The ledger's bytes of states are the optimizer's, within a thousandth: it has no norms and no short blocks."""
    text = "{{model: {{shape: llama-3.2-1b}}, objective: pretrain, data: {{random: 4}}, output: x, with: {{{}}}}}"

    def states(with_):
        found = search.predict(parse_config(text.format(with_), "test"), "h200", 1)
        return sum(line.bytes for line in found.lines if line.name.startswith("states."))

    n = ModelShape.read(SHAPES["llama-3.2-1b"]).parameters
    for with_ in ("adam8bit: {}", "bf16: {}, adam8bit: {}", "amp: {}, adam8bit: {}"):
        assert states(with_) == pytest.approx(n * 2 * (1 + 4 / 256), rel=1e-3)
    assert states("bf16: {}, fused-adamw: {}") == 4 * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_nothing(dtype):
    found = trained(dtype)
    ours = Adam8bit(found, OPTIM, rounding="stochastic")
    stepped(ours, found, 1)
    before = everything(found, ours)
    for t in found:
        t.grad = t.grad * float("nan")
    ours.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))
    stepped(ours, found, 1, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(everything(found, ours)[:3], before[:3], strict=True))
    assert all(torch.isfinite(t.local).all() for t in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_some(dtype):
    """One by one, in any grouping, gives what all at once gives; what is left out stays."""
    found, other = trained(dtype), trained(dtype)
    ours, theirs = (Adam8bit(x, OPTIM, rounding="stochastic") for x in (found, other))
    stepped(ours, found, 2)
    for step in (1, 2):
        for t, g in zip(other, gradients(step), strict=True):
            t.grad = g.to(dtype)
        for only in ([5], [0, 2], [1], [3, 4]):
            theirs.step(torch.tensor(OPTIM.lr / step), torch.tensor(1.0), torch.tensor(False), only=only)
    assert all(torch.equal(a, b) for a, b in zip(everything(found, ours), everything(other, theirs), strict=True))
    before = everything(other, theirs)
    theirs.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(False), only=[1])
    changed = {t.name for t, a in zip(other, before, strict=False) if not torch.equal(t.local, a)}
    assert changed == {"odd"}


SHARDED = {"a": (24, 300), "odd": (33, 257), "cube": (3, 8, 256)}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_shard_does_what_the_whole_does(at):
    """Codes, scales and stochastically rounded weights of pieces are pieces of the whole's; an empty piece too."""
    run = partial(Adam8bit, optim=OPTIM, rounding="stochastic", seed=7)
    base = trained(torch.bfloat16, SHARDED)
    one = run(base)
    stepped(one, base, 3, sizes=SHARDED)
    for rows in (slice(0, at), slice(at, None)):
        part = trained(torch.bfloat16, SHARDED, rows)
        ours = run(part)
        stepped(ours, part, 3, sizes=SHARDED, rows=rows)
        for t, p in zip(base, part, strict=True):
            assert torch.equal(t.local[rows], p.local), t.name
            want, found = one.state()[t.name], ours.state()[t.name]
            assert all(torch.equal(want[n][rows], found[n]) for n in want if n != "count"), t.name


def test_bf16_weights_move_at_a_small_rate():
    """With stochastic rounding as far as float32 weights do, on the average; to the nearest most stand still."""
    sizes, went = {"a": (24, 300)}, {}
    for rounding, dtype in (("nearest", torch.float32), ("nearest", torch.bfloat16), ("stochastic", torch.bfloat16)):
        found = trained(torch.bfloat16, sizes)
        found[0].local = (found[0].local * 0.02).to(dtype)  # as large as a model's weights
        before = found[0].local.clone()
        ours = Adam8bit(found, OPTIM, rounding=rounding)
        for step in range(1, 101):
            found[0].grad = next(gradients(step, sizes)).to(dtype)
            ours.step(torch.tensor(1e-5), torch.tensor(1.0), torch.tensor(False))
        went[rounding, dtype] = (found[0].local - before).float().flatten()
    full = went["nearest", torch.float32]
    share = {r: (went[r, torch.bfloat16] @ full / (full @ full)).item() for r in ("nearest", "stochastic")}
    print(share)
    assert share["nearest"] < 0.5 and share["stochastic"] == pytest.approx(1, abs=0.15)


def test_what_it_refuses(box):
    with pytest.raises(NeedsError, match="`adam8bit` has no place for remainders") as error:
        search.predict(golden_run(box, bf16={"rounding": "kahan"}, adam8bit={}), "h200")
    assert "what rounding took" in error.value.found and "--with bf16:rounding=stochastic" in error.value.do
    cut = trained(sizes={"a": (24, 300)})
    cut[0].local = cut[0].local[:, :150]
    with pytest.raises(NeedsError, match="whole rows") as error:
        Adam8bit(cut, OPTIM)
    assert "(24, 150) of the (24, 300) of a" in error.value.found and "fused-adamw" in error.value.do


# In a run.

MARGIN = 0.03  # nats a token, of the mean over the seeds; a seed alone may be twice as far


def test_held_out_loss_over_seeds(box):
    base = [float32(box, seed) for seed in SEEDS]
    ours = [held_out(box, seed, adam8bit={}) for seed in SEEDS]
    print("float32 moments", base, "8 bits", ours)
    assert all(last < 0.6 * first for first, last in base), "it learns"
    off = [b[1] - a[1] for a, b in zip(base, ours)]
    assert any(off), "the moments differ"
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_the_margin_is_no_accident(box, monkeypatch):
    """Codes of too few decades (no second moment under a tenth of its block's largest) do not learn as well."""
    base = float32(box, 1)[1]

    def coarse(x, signed, inner=encode):
        return inner(x if signed else torch.where(x > 0, x.amax(-1, keepdim=True), x), signed)

    monkeypatch.setattr(kernel, "encode", coarse)
    assert held_out(box, 1, adam8bit={})[1] > base + MARGIN


def resumed(box, **with_):
    run = golden_run(box, packed=True, adam8bit={}, **with_)
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
    return all_bits(straight), all_bits(again)


def all_bits(trainer):
    found = weights(trainer)
    return found | {f"{n} {k}": s.clone() for n, by in trainer.optimizer.state().items() for k, s in by.items()}


@pytest.mark.parametrize("with_", [{}, {"bf16": {}}], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(box, tmp_path, with_):
    a, b = resumed(box, **with_)
    assert any(s.dtype == torch.uint8 for s in a.values())
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def cut_and_saved(box, output):
    """Two steps on two ranks, saved; (whole weights, the losses)."""
    run = golden_run(box, packed=True, rows=2, sets=[f"output={output}"], fsdp={}, adam8bit={})
    job = assembled(run)
    figures = list(steps(job, 2))
    checkpoint.save(job, 2, checkpoint.Meta("00ff", 0, fingerprints={}))
    return {n: whole(w) for n, w in weights(job).items()}, figures


def test_states_of_two_ranks_are_one_ranks(box, pair, tmp_path):
    """Saved by two ranks, each with its rows' codes and scales, they load into the whole run, and are its states."""
    (want, figures), _ = pair(cut_and_saved, box, str(tmp_path))
    job = assembled(golden_run(box, packed=True, rows=4, adam8bit={}))
    alone = list(steps(job, 2))
    assert [f[:2] for f in figures] == [pytest.approx(f[:2], rel=1e-5) for f in alone]
    before = {n: {k: s.clone() for k, s in by.items()} for n, by in job.optimizer.state().items()}
    checkpoint.restore(job, checkpoint.find(tmp_path)[0], {})
    for name, w in weights(job).items():
        assert torch.equal(w, want[name]), name
    coded = [n for n, by in before.items() if "mean_scale" in by]
    assert coded
    for name in coded:
        now = job.optimizer.state()[name]
        mean, square = (a - b for a, b in zip(map(torch.Tensor.sqrt, map(torch.abs, decoded(now))), map(
            torch.Tensor.sqrt, map(torch.abs, decoded(before[name]))), strict=True))  # fmt: skip
        assert mean.abs().max() < 0.1 * now["mean_scale"].max().sqrt(), "another sum of gradients, the same states"
        assert square.abs().max() < 0.1 * now["square_scale"].max()
        assert now["count"] == 2


# The kernel, run by Triton's interpreter.


def interpreted():
    """Kernel and reference over some steps: every bit of weights, codes, scales and counts."""
    from optrush.kernels.adam8bit_triton import Launcher

    cases = itertools.product([torch.float32, torch.bfloat16], ["nearest", "stochastic"], [slice(None), slice(1, 3)])
    for dtype, rounding, rows in cases:
        sizes = {"whole": (4, 512), "odd": (33, 257), "a": (24, 300), "norm": (5000,), "small": (9, 11)}
        if rows != slice(None):
            sizes = {"whole": (4, 1024), "a": (24, 300)}
        for names in (list(sizes), ["whole"]):
            chosen = {n: sizes[n] for n in names}
            sides = [trained(dtype, chosen, rows) for _ in range(2)]
            one, two = (Adam8bit(side, OPTIM, rounding=rounding, seed=5) for side in sides)
            two.updates = [Launcher(group) for group in two.groups]
            for step in range(1, 4):
                for ours, side in zip((one, two), sides, strict=True):
                    for t, g in zip(side, gradients(step, chosen, rows), strict=True):
                        t.grad = (8 * g).to(dtype)
                    skip = torch.tensor(step == 2)
                    ours.step(torch.tensor(1e-2), torch.tensor(8.0), skip)
                    ours.step(torch.tensor(1e-2), torch.tensor(8.0), torch.tensor(False), only=[len(chosen) - 1])
                for a, b in zip(everything(sides[0], one), everything(sides[1], two), strict=True):
                    assert torch.equal(a, b), (dtype, rounding, rows, names, step, (a != b).float().mean())
    print("equal")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernel_is_the_reference_to_the_bit():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
