"""bfloat16 weights at small rates: which share of them never moves, and Kahan summation against any-precision AdamW.

AdamW at a rate of 1e-5 moves a weight by about 1e-5 a step; a unit of bfloat16 at 0.02, a usual weight of a language
model, is 1.2e-4.
"""

from __future__ import annotations

import pytest
import torch

from optrush.kernels import adamw as kernel

from updates import group_of

STEPS, RATE, BETAS, EPS = 100, 1e-5, (0.9, 0.999), 1e-8
SHAPE = (64, 512)


def beginning():
    return (0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))).bfloat16()


def gradients():
    """Noise about a constant gradient of the same size, other for each weight: as in training."""
    g = torch.Generator().manual_seed(2)
    constant = torch.randn(SHAPE, generator=g)
    for _ in range(STEPS):
        yield (constant + torch.randn(SHAPE, generator=g)).bfloat16()


def ours(rounding):
    """(weights after each step, the remainders at the end)."""
    group = group_of(rounding, [SHAPE], betas=BETAS, decay=0.0)
    group.weights[0].copy_(beginning())
    loop, path = kernel.ReferenceUpdate(group), []
    for grad in gradients():
        loop([grad], torch.tensor(RATE), torch.tensor(1.0), torch.tensor(False))
        path.append(group.weights[0].clone())
    return path, 0.0 if group.remainders is None else group.remainders[0].double()


def float64():
    w, m, v = beginning().double(), torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double()
    for t, grad in enumerate(gradients(), 1):
        g = grad.double()
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        w = w - RATE * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
    return w


def any_precision():
    """AdamW in bfloat16 throughout, every operation rounded to the nearest, with Kahan's compensation: what torchdistx
    called AnyPrecisionAdamW, in our own words. Weights and compensations at the end."""
    w = beginning()
    m, v, kept = (torch.zeros_like(w) for _ in range(3))
    for t, g in enumerate(gradients(), 1):
        m = m * BETAS[0] + g * (1 - BETAS[0])
        v = v * BETAS[1] + g * g * (1 - BETAS[1])
        assert m.dtype == v.dtype == torch.bfloat16
        size = RATE / (1 - BETAS[0] ** t)
        kept = kept - size * m / (v.sqrt() / (1 - BETAS[1] ** t) ** 0.5 + EPS)
        moved = w + kept
        kept, w = kept + (w - moved), moved
    return w, kept.double()


def test_which_share_never_moves():
    """To the nearest most weights stand still; rounded stochastically, and with Kahan summation, hardly any."""
    still = {}
    for rounding in ("nearest", "stochastic", "kahan"):
        at, moved = beginning(), torch.zeros(SHAPE, dtype=torch.bool)
        for w in ours(rounding)[0]:
            moved |= w != at
        still[rounding] = 1 - moved.double().mean().item()
    print("never moved in 100 steps at 1e-5:", still)
    assert still["nearest"] == pytest.approx(0.85, abs=0.05)
    assert still["stochastic"] <= 0.05 and still["kahan"] <= 0.05


def test_kahan_is_any_precision_adamw_with_moments_that_stay_right():
    """Both follow float64 AdamW; ours more closely, for its moments are rounded stochastically and once an update."""
    way = float64() - beginning().double()
    (path, kept), (w, theirs) = ours("kahan"), any_precision()
    found = path[-1].double() + kept - beginning().double()
    other = w.double() + theirs - beginning().double()
    off = [((moved - way).norm() / way.norm()).item() for moved in (found, other)]
    print("off float64's way: ours", off[0], "any-precision", off[1])
    assert off[0] < 0.01 and off[1] < 0.02 and off[0] < off[1]
