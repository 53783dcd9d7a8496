"""AdamW on bfloat16 weights: its random bits, its roundings, its update against float64, and the Triton kernel."""

import itertools
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from meshes import further
from optrush.kernels import adamw as kernel
from optrush.technique import library

from updates import grads_of, group_of, stepped, tensors

LARGEST = torch.finfo(torch.bfloat16).max
TESTS = Path(__file__).parents[1]


def lowbias32(x):
    """In Python's integers, as its author writes it."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def bits(n, seed=0, name="w", count=1):
    words = torch.tensor([kernel.key_words(seed, name)])
    return kernel.random_bits(kernel.step_key(words, torch.tensor([float(count)]))[0], torch.arange(n))


# Random bits.


def test_the_hash_is_its_authors():
    some = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, *range(3, 2**32, 123_456_789)]
    assert kernel.mix(torch.tensor(some)).tolist() == [lowbias32(x) for x in some]


def test_bits_are_pinned():
    """Checkpoints resume with the same bits, in later versions too."""
    first, second = kernel.key_words(7, "blocks.0.o.weight")
    key = lowbias32(first ^ 5)
    want = [lowbias32(lowbias32(i ^ key) ^ lowbias32(key ^ second)) for i in range(4)]
    assert bits(4, 7, "blocks.0.o.weight", 5).tolist() == want
    assert kernel.key_words(0, "w") == (2194268830, 1177906864)


def test_every_bit_is_even_and_on_its_own():
    n = 1 << 16
    drawn = torch.stack([bits(n), bits(n, seed=1), bits(n, name="v"), bits(n, count=2), bits(n + 1)[1:]])
    flags = ((drawn[..., None] >> torch.arange(32)) & 1).double() * 2 - 1  # (5, n, 32)
    limit = 5 / math.sqrt(n)
    assert flags.mean(1).abs().max() < limit
    apart = flags[:1] * flags[1:]
    assert apart.mean(1).abs().max() < limit, "another seed, name, count or place draws others"
    within = flags[0].T @ flags[0] / n - torch.eye(32)
    assert within.abs().max() < limit


# Rounding.


def test_stochastic_rounding_is_right_on_average():
    """The mean over n draws within 4 standard errors, for values all over a unit, of either sign."""
    n = 1 << 14
    x = torch.tensor([1.0, 1.0009765625, 1.00390625, 1.0068359375, -1.0009765625, -3.02, 1e-5 * math.pi, 2.0**-133])
    found = kernel.round_stochastic(x.repeat(n, 1).T.contiguous(), bits(n).repeat(len(x), 1)).double()
    low, high = found.min(1).values, found.max(1).values
    assert ((low <= x) & (x <= high)).all() and (high[1:-1] > low[1:-1]).all() and high[0] == low[0]
    share = (x - low) / (high - low).clamp_min(1e-300)
    sigma = (high - low) * (share * (1 - share) / n).sqrt()
    assert ((found.mean(1) - x).abs() <= 4 * sigma + 2.0**-16 * (high - low)).all()


def test_what_bf16_holds_stays_as_it_is():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for word in (0, 1, 0x7FFF, 0xFFFF):
        found = kernel.round_stochastic(every.float(), torch.full((2**16,), word))
        assert torch.equal(found[~every.isnan()].view(torch.int16), every[~every.isnan()].view(torch.int16))
        assert found[every.isnan()].isnan().all()


@pytest.mark.parametrize("word", [0, 0x8000, 0xFFFF, 0xFFFFFFFF])
def test_finite_stays_finite(word):
    top = torch.finfo(torch.float32).max
    x = torch.tensor([LARGEST, LARGEST * 1.001, top, -top, math.inf, -math.inf, math.nan])
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # nans of other bits
    found = kernel.round_stochastic(torch.cat([x, odd]), torch.full((10,), word)).float()
    assert found[:6].tolist() == [LARGEST, LARGEST, LARGEST, -LARGEST, math.inf, -math.inf]
    assert found[6:].isnan().all()


# Where an element lies in the whole.


@pytest.mark.parametrize(("whole", "shape", "offset"), [
    ((6, 4), (6, 4), (0, 0)), ((6, 4), (2, 4), (3, 0)), ((6, 4), (6, 2), (0, 1)), ((6, 4), (2, 3), (4, 1)),
    ((5, 2, 3), (2, 2, 1), (1, 0, 2)), ((5,), (2,), (3,)), ((), (), ()), ((6, 4), (0, 4), (6, 0)),
])  # fmt: skip
def test_the_place_of_a_piece(whole, shape, offset):
    places = torch.arange(math.prod(whole)).view(whole)
    box = places[tuple(slice(o, o + n) for o, n in zip(offset, shape))].flatten()
    where, i = kernel.shard_span(whole, shape, offset), torch.arange(math.prod(shape))
    assert torch.equal(where.first + i // max(where.width, 1) * where.pitch + i % max(where.width, 1), box)


def test_a_piece_cut_in_the_middle_is_refused():
    with pytest.raises(AssertionError, match="cut in the middle"):
        kernel.shard_span((4, 4, 4), (4, 2, 2), (0, 0, 0))


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("columns", [False, True])
def test_pieces_draw_what_the_whole_draws(rounding, columns):
    """A parameter in two, along either dimension: the same bits of weights and states."""
    shape = (12, 10)
    whole = group_of(rounding, [shape])
    cut = (slice(None), slice(4, None)) if columns else (slice(5, None),)
    piece = group_of(rounding, [shape], cut=cut)
    for step in range(1, 6):
        (grad,) = grads_of([shape], step)
        stepped(kernel.ReferenceUpdate(whole), [grad], step)
        stepped(kernel.ReferenceUpdate(piece), [grad[cut].contiguous()], step)
    for a, b in zip(tensors(whole), tensors(piece), strict=True):
        assert torch.equal(a[cut] if a.dim() == 2 else a, b)


def test_chunks_draw_what_the_whole_draws(monkeypatch):
    one, other = (group_of("stochastic", [(30, 7)]) for _ in range(2))
    stepped(kernel.ReferenceUpdate(one), grads_of([(30, 7)], 1), 1)
    monkeypatch.setitem(kernel.CHUNK, "cpu", 16)
    stepped(kernel.ReferenceUpdate(other), grads_of([(30, 7)], 1), 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


# The update.


def oracle(weight, grads, rate, decay, betas, eps):
    """AdamW in float64 as the paper writes it."""
    mean = square = torch.zeros_like(weight)
    for t, g in enumerate(grads, 1):
        mean, square = betas[0] * mean + (1 - betas[0]) * g, betas[1] * square + (1 - betas[1]) * g * g
        weight = weight - rate(t) * decay * weight
        weight = weight - rate(t) * (mean / (1 - betas[0] ** t)) / ((square / (1 - betas[1] ** t)).sqrt() + eps)
    return weight, mean, square


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_the_update_against_float64(rounding):
    """One step: all but the last rounding is float32's, so the weight is one of the two neighbours."""
    shape = (64, 33)
    group = group_of(rounding, [shape], decay=0.1)
    start, grads = group.weights[0].double(), grads_of([shape], 1)
    stepped(kernel.ReferenceUpdate(group), grads, 1, scale=4.0)
    want, mean, square = oracle(start, [grads[0].double() / 4], lambda t: 1e-2, 0.1, group.betas, group.eps)
    unit = torch.exp2(want.abs().log2().floor() - 7) * (0.5 if rounding == "nearest" else 1.0) * 1.001
    assert ((group.weights[0].double() - want).abs() <= unit).all()
    for found, right in ((group.means[0], mean), (group.squares[0], square)):
        assert ((found.double() - right).abs() <= right.abs() * 2.0**-7 * 1.001 + 1e-40).all()
    if rounding == "kahan":
        both = group.weights[0].double() + group.remainders[0].double()
        assert ((both - want).abs() <= want.abs() * 2.0**-15 + 1e-9).all()


@cache
def moments(rounding, beta, wide):
    """After gradients that fall to a tenth: (mean, mean square) in float64."""
    shape = (40, 50)
    group = group_of(rounding, [shape], betas=(0.9, beta), wide=wide)
    for step in range(1, 401):
        grad = grads_of([shape], step)[0] * (1.0 if step <= 100 else 0.1)
        stepped(kernel.ReferenceUpdate(group), [grad], step)
    return group.means[0].double(), group.squares[0].double()


@pytest.mark.parametrize("rounding", further(["stochastic", "kahan"], 1))
@pytest.mark.parametrize("beta", further([0.999, 0.95], 1))
def test_moments_in_bf16_follow_float32s(rounding, beta):
    """To the nearest, with beta2 = 0.999, no mean square would ever shrink."""
    (want_mean, want), (mean, found) = moments("nearest", beta, True), moments(rounding, beta, False)
    assert abs(found.mean() / want.mean() - 1) < 0.02
    assert (mean - want_mean).norm() < 0.02 * want_mean.norm()
    _, frozen = moments("nearest", beta, False)
    assert (frozen.mean() > 1.2 * want.mean()) == (beta == 0.999), frozen.mean() / want.mean()


def test_a_skipped_update_changes_nothing():
    for rounding in ("nearest", "stochastic", "kahan"):
        group = group_of(rounding, [(5, 3)])
        stepped(kernel.ReferenceUpdate(group), grads_of([(5, 3)], 1), 1)
        before = [t.clone() for t in tensors(group)]
        stepped(kernel.ReferenceUpdate(group), [torch.full((5, 3), math.nan)], 2, bad=True)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(group), strict=True))


def test_ranges():
    assert list(kernel.contiguous_ranges([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)] and not list(
        kernel.contiguous_ranges([])
    )


def test_powers():
    counts = torch.tensor([0, 1, 2, 3, 1000, 2**24 - 1])
    for base in (0.9, 0.999):
        assert kernel.power(base, counts).tolist() == pytest.approx([base ** int(n) for n in counts], rel=1e-12)


# bfloat16 weights at small rates: AdamW at a rate of 1e-5 moves a weight by about 1e-5 a step; a unit of bfloat16 at
# 0.02, a usual weight of a language model, is 1.2e-4.

RATE, BETAS, EPS, SHAPE = 1e-5, (0.9, 0.999), 1e-8, (64, 512)


@cache
def moved_by(rounding):
    """(weights at first and after each of 100 steps, the remainders at the end), by gradients with noise about a
    constant of the same size, other for each weight, as in training; rounding: None is float64 AdamW."""
    start = (0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))).bfloat16()
    group = group_of(rounding or "nearest", [SHAPE], betas=BETAS, decay=0.0)
    group.weights[0].copy_(start)
    loop, path = kernel.ReferenceUpdate(group), [start.double()]
    draw = torch.Generator().manual_seed(2)
    constant, m, v = torch.randn(SHAPE, generator=draw), torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double()
    for t in range(1, 101):
        grad = (constant + torch.randn(SHAPE, generator=draw)).bfloat16()
        if rounding is not None:
            loop([grad], torch.tensor(RATE), torch.tensor(1.0), torch.tensor(False))
            path.append(group.weights[0].double())
            continue
        g = grad.double()
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        path.append(path[-1] - RATE * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS))
    return path, 0.0 if group.remainders is None else group.remainders[0].double()


@pytest.mark.parametrize(("rounding", "share"), [("nearest", 0.85), ("stochastic", 0.0), ("kahan", 0.0)])
def test_which_share_never_moves(rounding, share):
    """To the nearest most weights never change; rounded stochastically, and with Kahan summation, hardly any."""
    first, *rest = moved_by(rounding)[0]
    never = torch.stack([w == first for w in rest]).all(0)
    assert never.double().mean().item() == pytest.approx(share, abs=0.05)


def test_kahan_follows_float64():
    (path, kept), (exact, _) = moved_by("kahan"), moved_by(None)
    way = exact[-1] - exact[0]
    assert (path[-1] + kept - exact[-1]).norm() < 0.01 * way.norm()


# The Triton kernel.


@pytest.mark.skipif(library("triton") is None, reason="triton is not installed")
def test_triton_equals_the_reference():
    """In Triton's interpreter, in a process of its own: it is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    run = [sys.executable, "-W", "ignore", str(TESTS / "updates.py")]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert len(lines) == len(list(itertools.product(range(3), range(2)))) and all(": equal" in line for line in lines)
