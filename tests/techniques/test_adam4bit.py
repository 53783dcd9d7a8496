"""AdamW with 4-bit moments: its codes against a search, its update against torch's on the decoded moments, cuts of
rows, and a held-out loss near that of float32 moments.

What it shares with the 8-bit one (who steps what, resuming, refusals by message) is in test_adam8bit.py.
"""

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
from optrush.kernels.adam8bit import BLOCK_4BIT, Nibbles, values_4bit
from optrush.models.decoder import build
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.adam8bit import Adam4bit
from optrush.planner import search
from optrush.trainer import checkpoint
from optrush.trainer.checkpoint import Meta
from optrush.trainer.trainer import evaluate

from golden.make_golden import T
from heldout import documents
from trials import assembled, golden_run, steps, weights, whole

CPU = torch.device("cpu")
OPTIM = Optim(lr=1e-2, weight_decay=0.1)
SIZES = {"a": (24, 300), "odd": (33, 257), "cube": (3, 8, 256), "norm": (5000,), "small": (9, 11), "one": ()}
encode, decode = Nibbles().encode, Nibbles().decode


def trained(dtype=torch.float32, sizes=SIZES, rows=slice(None)):
    """Parameters as an optimizer sees them; `rows`: what this rank holds of those with rows."""
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in sizes.items():
        full = torch.randn(shape, generator=g).to(dtype)
        offset = (rows.start or 0, *[0] * (len(shape) - 1))[: len(shape)]
        local = full[rows].clone() if shape else full
        found.append(
            SimpleNamespace(name=name, local=local, grad=None, decays=len(shape) > 1, whole=shape, offset=offset)
        )
    return found


def gradients(step, sizes=SIZES, rows=slice(None)):
    """Of wide range within a row, some exactly zero, another magnitude each step."""
    g = torch.Generator().manual_seed(step)
    for shape in sizes.values():
        x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape, generator=g))
        x = x * (torch.rand(shape, generator=g) > 0.1) * 10.0 ** (step % 3 - 2)
        yield x[rows] if shape else x


def stepped(ours, found, n, *, sizes=SIZES, rows=slice(None)):
    for step in range(1, n + 1):
        for t, g in zip(found, gradients(step, sizes, rows), strict=True):
            t.grad = g.to(t.local.dtype)
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(1.0), torch.tensor(False))


def everything(found, ours):
    return [t.local.clone() for t in found] + [s.clone() for by in ours.state().values() for s in by.values()]


# The codes.


def test_the_maps():
    """The source's: a sign, 1, 2 and 4 parts of the decades below 1, each at its middle, 0 and 1; sixteenths."""
    signed = {0.0, 1.0} | {
        s * 10.0 ** (i - 2) * (0.1 + 0.9 * (k + 0.5) / 2**i) for i in range(3) for k in range(2**i) for s in (1, -1)
    }
    assert (
        sorted(values_4bit(True, CPU).tolist()) == pytest.approx(sorted(signed), rel=1e-6)
        and values_4bit(True, CPU)[0] == 0
    )
    assert values_4bit(False, CPU).tolist() == [n / 16 for n in range(1, 17)], (
        "no zero, which would divide by eps alone"
    )


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [700, 701, 128, 1])
def test_codes_are_the_nearest(signed, columns):
    """Found by a search over all values; two a byte, the even column's in the low half."""
    g = torch.Generator().manual_seed(1)
    x = 10.0 ** (-4 * torch.rand(200, columns, generator=g)) * torch.randn(200, 1, generator=g).abs()
    x = x * torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0) if signed else x
    codes, scales = encode(x, signed)
    assert codes.shape == (200, (columns + 1) // 2) and scales.shape == (200, -(-columns // BLOCK_4BIT))
    part = (x / scales.repeat_interleave(BLOCK_4BIT, 1)[:, :columns]).double()
    assert part.abs().max() <= 1 + 1e-6
    halves = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    assert not halves[:, columns:].any(), "nothing beyond the row's end"
    found = values_4bit(signed, CPU).double()[halves[:, :columns].int()]
    best = (part[..., None] - values_4bit(signed, CPU).double()).abs().min(-1).values
    assert ((part - found).abs() - best).max() < 1e-7
    want = (found * scales.double().repeat_interleave(BLOCK_4BIT, 1)[:, :columns]).float()
    torch.testing.assert_close(decode(codes, scales, signed, columns), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_survive(signed):
    """What was read and not changed is written as it was."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1).repeat(2, 1)
    top = 8 if signed else 15
    codes[:, ::64] = codes[:, ::64] & 0xF0 | top  # the largest in each block of 64 bytes
    scales = torch.tensor([[1.0, 3e-9, 2e9, 0.7], [1e-30, 5.0, 1e-3, 1e3]])
    if signed:  # two codes that only a block's scale could have: one, and none is minus one
        assert values_4bit(True, CPU).max() == 1 > -values_4bit(True, CPU).min()
    again, same = encode(decode(codes, scales, signed, 512), signed)
    assert torch.equal(again, codes) and torch.allclose(same, scales, rtol=1e-6)


def test_nothing_is_nothing():
    """Where a block has no mean square at all it is zero, and where it has some none is."""
    for x in (torch.zeros(2, 300), torch.full((2, 300), 1e-38)):
        assert not decode(*encode(x, True), True, 300).any()
    assert not decode(*encode(torch.zeros(2, 300), False), False, 300).any()
    found = decode(*encode(torch.eye(2, 300), False), False, 300)
    assert (found[:, :128] >= 1 / 16).all() and found[0, 0] == found[1, 1] == 1 and not found[:, 128:].any()


# The update.


def decoded(state, name, signed):
    if "mean_scale" not in state:
        return state[name].clone()
    codes, scales = state[name], state[f"{name}_scale"]
    columns = SIZES_OF[codes.shape]
    rows = decode(codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1]), signed, columns)
    rows = rows if signed else rows.square()
    return rows.view(*codes.shape[:-1], columns)


SIZES_OF = {(*s[:-1], (s[-1] + 1) // 2): s[-1] for s in SIZES.values() if s}  # of codes -> columns


def test_equals_torch_on_the_decoded_moments():
    """torch's AdamW is given the moments as they are decoded: weights equal but for what the mean's codes lost, which
    moves them at once as it would have later, and new codes are of its new moments."""
    found = trained()
    ours = Adam4bit(found, OPTIM)
    for step in range(1, 7):
        scale, state, theirs = 2.0**step, ours.state(), []
        for t, g in zip(found, gradients(step), strict=True):
            moments = decoded(state[t.name], "mean", True), decoded(state[t.name], "square", False)
            theirs.append((t.local.clone(), g, *moments, torch.tensor(float(step - 1))))
            t.grad = g * scale
        for t, (w, g, m, s, count) in zip(found, theirs, strict=True):
            adamw([w], [g], [m], [s], [], [count], foreach=False, amsgrad=False, beta1=OPTIM.betas[0],
                  beta2=OPTIM.betas[1], lr=OPTIM.lr / step, weight_decay=0.1 if t.decays else 0.0, eps=OPTIM.eps,
                  maximize=False)  # fmt: skip
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(scale), torch.tensor(False))
        for t, (w, _, m, s, _) in zip(found, theirs, strict=True):
            after = ours.state()[t.name]
            lost = m - decoded(after, "mean", True)
            below = (s / (1 - OPTIM.betas[1] ** step)).sqrt() + OPTIM.eps
            later = sum(OPTIM.betas[0] ** n for n in range(1, 300)) if "mean_scale" in after else 0.0
            w -= OPTIM.lr / step * later * lost / below
            torch.testing.assert_close(t.local, w, rtol=1e-5, atol=1e-6, msg=f"{t.name} at {step}")
            assert after["count"] == step
            if "mean_scale" in after:
                for name, x, signed in (("mean", m, True), ("square", s.sqrt(), False)):
                    codes = encode(x.reshape(-1, x.shape[-1]), signed)[0]
                    assert (after[name].reshape(codes.shape) != codes).float().mean() < 1e-3, f"{t.name} {name}"
            else:
                torch.testing.assert_close(decoded(after, "mean", True), m, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(decoded(after, "square", False), s, rtol=1e-5, atol=1e-9)


def test_which_moments_are_codes():
    state = Adam4bit(trained(), OPTIM).state()
    assert {name for name, s in state.items() if s["mean"].dtype == torch.uint8} == {"a", "odd", "cube"}
    assert state["odd"]["mean"].shape == (33, 129) and state["odd"]["mean_scale"].shape == (33, 3)
    assert state["cube"]["square"].shape == (3, 8, 128) and state["cube"]["square_scale"].shape == (3, 8, 2)
    assert not any(s.any() for by in state.values() for s in by.values()), "states begin at zero"


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen2.5-0.5b"])
def test_bytes_a_parameter(shape):
    model = build(SHAPES[shape], torch.bfloat16)
    found = [
        SimpleNamespace(name=n, local=p.detach(), decays=p.dim() > 1, whole=tuple(p.shape), offset=(0,) * p.dim())
        for n, p in model.named_parameters()
    ]
    states = [s for by in Adam4bit(found, OPTIM).state().values() for s in by.values()]
    each = sum(s.nbytes for s in states) / sum(t.local.numel() for t in found)
    print(shape, each)
    assert each == pytest.approx(1 + 8 / 128, abs=2e-3), "norms have 8 bytes each"


def test_what_the_plan_says():
    """The ledger's bytes of states are the optimizer's, within a thousandth: it has no norms and no short blocks."""
    text = "{{model: {{shape: llama-3.2-1b}}, objective: pretrain, data: {{random: 4}}, output: x, with: {{{}}}}}"
    n = ModelShape.read(SHAPES["llama-3.2-1b"]).parameters
    for with_ in ("adam4bit: {}", "bf16: {}, adam4bit: {}", "amp: {}, adam4bit: {}"):
        found = search.predict(parse_config(text.format(with_), "test"), "h200", 1)
        states = sum(line.bytes for line in found.lines if line.name.startswith("states."))
        assert states == pytest.approx(n * (1 + 8 / 128), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_nothing(dtype):
    found = trained(dtype)
    ours = Adam4bit(found, OPTIM, rounding="stochastic")
    stepped(ours, found, 1)
    before = everything(found, ours)
    for t in found:
        t.grad = t.grad * float("nan")
    ours.step(torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))


SHARDED = {"a": (24, 300), "odd": (33, 257), "cube": (3, 8, 256)}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_shard_does_what_the_whole_does(at):
    """Codes, scales and stochastically rounded weights of pieces are pieces of the whole's; an empty piece too."""
    run = partial(Adam4bit, optim=OPTIM, rounding="stochastic", seed=7)
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


def test_what_it_refuses(box):
    with pytest.raises(NeedsError, match="`adam4bit` has no place for remainders") as error:
        search.predict(golden_run(box, bf16={"rounding": "kahan"}, adam4bit={}), "h200")
    assert "what rounding took" in error.value.found and "--with bf16:rounding=stochastic" in error.value.do
    cut = trained(sizes={"a": (24, 300)})
    cut[0].local = cut[0].local[:, :150]
    with pytest.raises(NeedsError, match="4-bit AdamW, whose blocks lie in whole rows"):
        Adam4bit(cut, OPTIM)


# In a run.

STEPS = 300
SEEDS = (1, 2, 3)


def held_out(box, seed, lr=1e-2, **with_):
    """Held-out loss before and after 300 steps."""
    sets = [*documents(box), f"seed={seed}", f"train.steps={STEPS}", f"optim.lr={lr}"]
    sets += [f"batch.tokens={T * 2}", f"batch.micro_tokens={T * 2}"]
    job = assembled(golden_run(box, sets=sets, packing={}, **with_))
    first = evaluate(job)[0]
    list(steps(job, STEPS))
    return first, evaluate(job)[0]


@pytest.fixture(scope="module")
def float32(box):
    return [held_out(box, seed) for seed in SEEDS]


def noise(last):
    """Standard deviation over the seeds of the baseline: what another seed alone does to the loss."""
    return torch.tensor(last).std().item()


@pytest.mark.parametrize("name", ["adam8bit", "adam4bit"])
def test_held_out_loss_within_the_seeds_noise(box, float32, name):
    """300 steps, 3 seeds, the rate of other proofs: the mean is within the spread that seeds give float32 moments."""
    ours = [held_out(box, seed, **{name: {}}) for seed in SEEDS]
    base = [last for _, last in float32]
    off = [b[1] - a for a, b in zip(base, ours)]
    print(name, "float32", base, "noise", noise(base), "worse by", off)
    assert all(last < 0.6 * first for first, last in float32), "it learns"
    assert any(off) and sum(off) / len(off) < noise(base)


def test_held_out_loss_at_a_small_rate(box, monkeypatch):
    """At 1e-3, where three seeds of float32 scatter by 0.009: as near, and not so if what codes lose is lost."""
    base, ours = (held_out(box, SEEDS[0], 1e-3, **with_)[1] for with_ in ({}, {"adam4bit": {}}))
    monkeypatch.setattr(Nibbles, "repays", False)
    without = held_out(box, SEEDS[0], 1e-3, adam4bit={})[1]
    print("float32", base, "worse by", ours - base, "and without", without - base)
    assert abs(ours - base) < 0.009 and without - base > 0.04


def test_the_bar_is_no_accident(box, float32, monkeypatch):
    """A second moment whose least code is zero does not learn as well: the source's point."""
    inner = Nibbles.decode

    def with_zero(self, codes, scales, signed, columns):
        found = inner(self, codes, scales, signed, columns)
        if signed:
            return found
        least = scales.repeat_interleave(BLOCK_4BIT, -1)[:, :columns] / 16
        return torch.where(found <= least * 1.001, 0.0, found)

    monkeypatch.setattr(Nibbles, "decode", with_zero)
    base = [last for _, last in float32]
    assert held_out(box, SEEDS[0], adam4bit={})[1] > base[0] + noise(base)


def resumed(box, **with_):
    run = golden_run(box, packed=True, adam4bit={}, **with_)
    straight, stopped, again = assembled(run), assembled(run), None
    list(steps(straight, 4))
    list(steps(stopped, 2))
    checkpoint.save(stopped, 2, Meta("00ff", 0, fingerprints={}))
    again = assembled(run)
    checkpoint.restore(again, checkpoint.find(Path(run.output))[0], {})
    for _ in range(2):
        next(again.batches)
    list(steps(again, 2, first=3))
    return all_bits(straight), all_bits(again)


def all_bits(trainer):
    found = {n: whole(w) for n, w in weights(trainer).items()}
    return found | {f"{n} {k}": s.clone() for n, by in trainer.optimizer.state().items() for k, s in by.items()}


@pytest.mark.parametrize("with_", [{}, {"bf16": {}}], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(box, with_):
    a, b = resumed(box, **with_)
    assert any(s.dtype == torch.uint8 for s in a.values())
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def cut_and_saved(box, output):
    """Two steps on two ranks, saved; whole weights, and this rank's codes."""
    job = assembled(golden_run(box, packed=True, rows=2, sets=[f"output={output}"], fsdp={}, adam4bit={}))
    list(steps(job, 2))
    checkpoint.save(job, 2, Meta("00ff", 0, fingerprints={}))
    return all_bits(job)


def test_states_of_two_ranks_are_one_ranks(box, pair, tmp_path):
    """Rows of codes that two ranks saved lie one below the other in the whole."""
    halves = pair(cut_and_saved, box, str(tmp_path))
    job = assembled(golden_run(box, packed=True, rows=4, adam4bit={}))
    checkpoint.restore(job, checkpoint.find(tmp_path)[0], {})
    found = all_bits(job)
    assert any(s.dtype == torch.uint8 for s in found.values())
    for name, s in found.items():
        parts = [half[name] for half in halves]
        want = parts[0] if parts[0].shape == s.shape else torch.cat(parts)
        assert torch.equal(s, want), name


# The kernel, run by Triton's interpreter.


def interpreted():
    """Kernel and reference over some steps: every bit of weights, codes, scales and counts."""
    from optrush.kernels.adam8bit_triton import Launcher

    cases = itertools.product([torch.float32, torch.bfloat16], ["nearest", "stochastic"], [slice(None), slice(1, 3)])
    for dtype, rounding, rows in cases:
        sizes = {"whole": (8, 512), "odd": (33, 257), "a": (24, 300), "norm": (5000,), "small": (9, 11)}
        if rows != slice(None):
            sizes = {"whole": (4, 1024), "a": (24, 300)}
        for names in (list(sizes), ["whole"]):
            chosen = {n: sizes[n] for n in names}
            sides = [trained(dtype, chosen, rows) for _ in range(2)]
            one, two = (Adam4bit(side, OPTIM, rounding=rounding, seed=5) for side in sides)
            two.updates = [Launcher(group) for group in two.groups]
            assert any(u.halves for u in two.updates)
            for step in range(1, 4):
                for ours, side in zip((one, two), sides, strict=True):
                    for t, g in zip(side, gradients(step, chosen, rows), strict=True):
                        t.grad = (8 * g).to(dtype)
                    ours.step(torch.tensor(1e-2), torch.tensor(8.0), torch.tensor(step == 2))
                    ours.step(torch.tensor(1e-2), torch.tensor(8.0), torch.tensor(False), only=[len(chosen) - 1])
                for a, b in zip(everything(sides[0], one), everything(sides[1], two), strict=True):
                    assert torch.equal(a, b), (dtype, rounding, rows, names, step, (a != b).float().mean())
    print("equal")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernel_is_the_reference_to_the_bit():
    interpreter.says(__file__, "equal")


if __name__ == "__main__":
    interpreted()
