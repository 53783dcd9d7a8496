"""The angle between two gradients by some thousand numbers, against the angle itself in float64."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from meshes import further
from optrush.benchmark import results
from optrush.benchmark.worker import SKETCH_PIECE, SKETCH_WIDTH, sketch
from optrush.trainer.trainer import Trainer

SHAPES = {"embedding": (1000, 96), "norm": (96,), "matrix": (900, 5000), "one": ()}


def gradients(seed=0):
    """Some columns much larger than the others, as features of a network are; the third is longer than a piece."""
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    made["embedding"][:, 7] *= 100
    made["matrix"][:, ::512] *= 50
    return made


def job_of(gradients):
    trained = [SimpleNamespace(name=name, whole_grad=grad) for name, grad in gradients.items()]
    world, env = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=SimpleNamespace(name="cpu"))
    return cast(Trainer, SimpleNamespace(trained=trained, world=world, env=env, weight_map=SimpleNamespace(entries={})))


def angle(a, b):
    return results.cosine(sketch(job_of(a)), sketch(job_of(b)))


def exact(a, b):
    x, y = (torch.cat([t.double().flatten() for t in made.values()]) for made in (a, b))
    return torch.nn.functional.cosine_similarity(x, y, dim=0).item()


@pytest.mark.parametrize("noise", further([1e-2, 0.3, 1e-4, 0.05], 2))
@pytest.mark.parametrize("alike", [True, False], ids=["the same everywhere", "as rounding makes it"])
def test_the_angle_is_told_within_some_percent(noise, alike):
    a, b = gradients(), gradients(1)
    assert sum(t.numel() for t in a.values()) > SKETCH_PIECE
    near = {name: t + noise * (1 if alike else t.abs() * b[name].sign()) for name, t in a.items()}
    found = angle(a, near)
    assert found is not None and 1 - found == pytest.approx(1 - exact(a, near), rel=0.2)


def test_one_large_channel_in_every_tensor():
    """Large activations lie in the same channel of all layers: their sums must not be the same."""
    told = []
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        a = {f"norm {i}": torch.randn(896, generator=g) for i in range(48)}
        near = {name: t + 1e-2 * t.abs() * torch.randn(896, generator=g) for name, t in a.items()}
        for t in (*a.values(), *near.values()):
            t[7] *= 300
        found = angle(a, near)
        assert found is not None
        told.append((1 - found) / (1 - exact(a, near)))
    assert min(told) > 0.5 and max(told) < 2


def test_it_is_the_same_each_time_and_in_another_order():
    made = gradients()
    assert angle(made, made) == pytest.approx(1, abs=1e-12)
    other = dict(reversed(made.items()))
    assert angle(made, other) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ["embedding", "matrix"])
def test_one_wrong_tensor_is_seen(name):
    """Turned round, or its rows in another order: its norm is as it was."""
    made = gradients()
    for wrong in (-made[name], made[name].roll(1, 0)):
        found = angle(made, {**made, name: wrong})
        wanted = exact(made, {**made, name: wrong})
        assert found is not None and found < 0.999 and found == pytest.approx(wanted, abs=0.05)


def test_what_cannot_be_compared():
    made = gradients()
    assert angle(made, {**made, "norm": None}) is None, "its update has taken it"
    assert angle(dict.fromkeys(made), dict.fromkeys(made)) is None
    assert angle(made, {"other" if n == "norm" else n: t for n, t in made.items()}) is None, "other tensors"
    assert angle(made, {n: torch.zeros_like(t) for n, t in made.items()}) is None
    assert angle(made, {**made, "one": torch.tensor(torch.nan)}) is None


def test_random_signs_of_unlike_gradients_are_far_apart():
    found = angle(gradients(0), gradients(1))
    assert found is not None and abs(found) < 0.2


def test_its_width_has_no_divisor_in_common_with_a_matrix():
    assert all(SKETCH_WIDTH % n for n in range(2, 64))
