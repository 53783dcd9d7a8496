"""Muon: its iterations against singular values in float64, its update against torch's on the published matrices. What
every optimizer owes is in test_optimizers.py."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from meshes import further
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.muon import COEFFICIENTS, Muon, Pieces, orthogonal
from optrush.planner.ledger import Line
from optrush.technique import Part, Technique
from optrush.techniques import ALL
from optrush.techniques.muon import ROOM, pieces
from optrush.techniques.muon import Muon as TheTechnique

from memory import Tracker
from optimizers import OPTIM, parameters
from trials import assembled, golden_run, steps, weights

# Rows of 4 key/value heads with 3 query heads each, of width 3; interleaved gate and up; a tall and a wide one.
FUSED = {
    "qkv": ((60, 24), Pieces(4, (9, 3, 3))),
    "qkv2": ((60, 24), Pieces(4, (9, 3, 3))),
    "gate_up": ((80, 24), Pieces(40, (1, 1))),
    "tall": ((40, 24), Pieces(1, (40,))),
    "wide": ((24, 40), Pieces(1, (24,))),
}
REST = {"embedding": (50, 24), "norm": (24,)}
SIZES = {name: shape for name, (shape, _) in FUSED.items()} | REST


def muon(found, **options):
    matrices = {name: taken for name, (_, taken) in FUSED.items()}
    options = {"momentum": 0.95, "iterations": 5, "room": ROOM} | options
    return Muon(found, OPTIM, matrices, **options)


def gradients(step):
    g = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=g) for shape in SIZES.values()]


def stepped(ours, found, n, *, scale=1.0, first=1, only=None, bad=False):
    for step in range(first, first + n):
        for t, g in zip(found, gradients(step), strict=True):
            t.grad = (g * scale).to(t.local.dtype)
        ours.step(torch.tensor(OPTIM.lr / step), torch.tensor(float(scale)), torch.tensor(bad), only=only)


def published(matrix, taken):
    """The matrices in a fused one, by rows one at a time."""
    rows = {p: [] for p in range(len(taken.rows))}
    at = 0
    for _ in range(taken.groups):
        for p, many in enumerate(taken.rows):
            rows[p] += [matrix[r] for r in range(at, at + many)]
            at += many
    assert at == len(matrix)
    return [torch.stack(r) for r in rows.values()]


# The iterations.


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 40, 24), (1, 16, 16), (4, 1, 7)], ids=str)
def test_the_polynomial_of_the_singular_values(shape):
    """In float64, by singular values: vectors stay, values go through the polynomial."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / x.flatten(1).norm(dim=1)[:, None]
    a, b, c = COEFFICIENTS
    for n in range(1, 6):
        s = a * s + b * s**3 + c * s**5
        want = u @ torch.diag_embed(s) @ v
        torch.testing.assert_close(orthogonal(x, n), want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(orthogonal(x.float(), n).double(), want, rtol=1e-4, atol=1e-5)
        assert (orthogonal(x.bfloat16(), n) - want).norm() < 0.05 * want.norm()
    assert s.min() > 0.5 and s.max() < 1.3, "near 1"


def test_size_does_not_matter_and_nothing_stays_nothing():
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonal(x * 1e-3), orthogonal(x), rtol=1e-4, atol=1e-5)
    assert not orthogonal(torch.zeros(2, 24, 40)).any()
    assert orthogonal(torch.full((1, 24, 40), 1e-30)).isfinite().all()


# The update.


def torchs(found):
    """torch's Muon on the published matrices of each fused one, AdamW on the rest; what they hold, and who steps it."""
    apart = {t.name: [t.local.clone()] for t in found}
    apart |= {t.name: published(t.local, FUSED[t.name][1]) for t in found if t.name in FUSED}
    for w in (w for ws in apart.values() for w in ws):
        w.requires_grad_(True)
    matrices = [w for name in FUSED for w in apart[name]]
    theirs = torch.optim.Muon(
        matrices, lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": apart["embedding"], "weight_decay": 0.1}, {"params": apart["norm"], "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    return apart, (theirs, rest)


def both(ours, found, n):
    """The same gradients to ours and torch's; (name, ours, torch's) of every published matrix after each step."""
    apart, theirs = torchs(found)
    for step in range(1, n + 1):
        stepped(ours, found, 1, scale=2.0**step, first=step)
        for t, whole in zip(found, gradients(step), strict=True):
            parts = published(whole, FUSED[t.name][1]) if t.name in FUSED else [whole]
            for w, g in zip(apart[t.name], parts, strict=True):
                w.grad = g
        for each in theirs:
            for group in each.param_groups:
                group["lr"] = OPTIM.lr / step
            each.step()
        for t in found:
            parts = published(t.local, FUSED[t.name][1]) if t.name in FUSED else [t.local]
            yield from ((t.name, w, other.detach()) for w, other in zip(parts, apart[t.name], strict=True))


def test_equals_torch_on_the_published_matrices():
    """torch's iterations are in bfloat16, as ours on a GPU: the same, to a rounding of bfloat16 a step."""
    found = parameters(sizes=SIZES)
    ours = muon(found)
    ours.products = torch.bfloat16
    start = {t.name: t.local.clone() for t in found}
    count = 0
    for name, w, want in both(ours, found, 4):
        assert (w - want).abs().max() < 0.02 * OPTIM.lr, name  # entries of an update are about 0.2 times the rate
        count += 1
    assert count == 4 * (3 + 3 + 2 + 1 + 1 + 2)
    assert all((t.local - start[t.name]).abs().max() > 0.5 * OPTIM.lr for t in found)


def test_equals_torch_where_both_are_exact(monkeypatch):
    """With torch's iterations replaced by ours in float32, all around them is equal to float32's last digits."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda g, coefficients, n, eps: orthogonal(g[None], n)[0]
    )
    found = parameters(sizes=SIZES)
    for name, w, want in both(muon(found), found, 4):
        torch.testing.assert_close(w, want, rtol=1e-5, atol=1e-6, msg=name)


def test_in_one_piece_it_is_another_matrix():
    """What the pieces are for: the fused matrix made orthogonal as one takes another step."""
    found, other = (parameters(sizes=SIZES) for _ in range(2))
    stepped(muon(found), found, 1)
    stepped(Muon(other, OPTIM, {"qkv": Pieces(1, (60,))}, momentum=0.95, iterations=5, room=ROOM), other, 1)
    assert (found[0].local - other[0].local).abs().max() > 0.1 * OPTIM.lr


def test_states_are_one_value_a_parameter():
    state = muon(parameters(torch.bfloat16, SIZES)).state()
    assert list(state) == list(SIZES)
    for name, (shape, _) in FUSED.items():
        assert {k: (tuple(s.shape), s.dtype) for k, s in state[name].items()} == {
            "momentum": (shape, torch.bfloat16), "count": ((), torch.float32)
        }  # fmt: skip
    assert set(state["norm"]) == {"mean", "square", "count"}


# In a run.


def test_in_the_backward_pass_it_is_the_same_update(box):
    whole = {"batch.micro_tokens": 384, "optim.clip": "null"}
    sets = [f"{name}={value}" for name, value in whole.items()]
    plain, early = (assembled(golden_run(box, packed=True, sets=sets, muon={}, **with_)) for with_ in (
        {}, {"update_in_backward": {}}))  # fmt: skip
    assert [f[0] for f in steps(early, 3)] == [pytest.approx(f[0], rel=1e-5) for f in steps(plain, 3)]
    for name, w in weights(plain).items():
        torch.testing.assert_close(weights(early)[name], w, rtol=1e-3, atol=1e-5)


def test_which_parameters_it_steps(box):
    """Of either implementation: the blocks' linears, as the published matrices; fused in ours, one by one in theirs."""
    job = assembled(golden_run(box, muon={}))
    ours = {n for n, s in job.optimizer.state().items() if "momentum" in s}
    assert ours == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("qkv", "o", "gate_up", "down")}
    assert "muon steps 8 matrices, AdamW the other 7 parameters" in job.describe()
    other = assembled(golden_run(box, sets=["model.implementation=transformers"], muon={}))
    theirs = {n for n, s in other.optimizer.state().items() if "momentum" in s}
    assert len(theirs) == 14 and all("_proj.weight" in n for n in theirs)
    list(steps(job, 1))
    list(steps(other, 1))
    now = {hf: p for n, w in weights(job).items() for hf, p in job.weight_map.split(n, w)}
    for n, w in weights(other).items():
        for hf, p in other.weight_map.split(n, w):
            torch.testing.assert_close(now[hf], p, rtol=1e-3, atol=1e-4, msg=hf)


# What it refuses.


def test_it_refuses_frozen_matrices(box):
    @dataclass(frozen=True)
    class Adapters(Technique):
        name = "adapters"
        claims = frozenset({Part.ADAPTERS})

    with pytest.raises(NeedsError, match="`muon` updates the blocks' own matrices") as error:
        decide(golden_run(box, muon={}, adapters={}), (*ALL, Adapters))
    assert "freezes them" in error.value.found and "fused-adamw" in error.value.do


def test_it_refuses_a_model_without_linears(box, monkeypatch):
    monkeypatch.setattr("optrush.models.decoder.Decoder.linears", lambda self: iter(()))
    with pytest.raises(NeedsError, match="orthogonalizes") as error:
        assembled(golden_run(box, muon={}))
    assert "no trained linear in the blocks of this llama model" in error.value.found
    assert "fused-adamw" in error.value.do


# What the plan says.


def test_products_are_as_predicted():
    """FLOPs of torch's own count on the matrices of one block, to the digit."""
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        for rows, columns in pieces(shape):
            orthogonal(torch.empty(1, rows, columns))
    (rule,) = [e for r in TheTechnique().predict(setup(shape)) for e in r.entries if e.name == "update.orthogonal"
               and hasattr(e, "flop")]  # fmt: skip
    assert rule.flop == shape.layers * counted.get_total_flops()


@pytest.mark.parametrize(("device", "products"), further([("cuda", torch.bfloat16), ("cpu", torch.float32)], 1))
def test_temporaries_are_as_predicted(device, products):
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    kinds = {"qkv": Pieces(8, (256, 64, 64)), "o": Pieces(1, (2048,)), "gate_up": Pieces(8192, (1, 1)),
             "down": Pieces(1, (2048,))}  # fmt: skip
    sizes = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
    with FakeTensorMode():
        found = [
            SimpleNamespace(name=f"{kind} {i}", local=torch.zeros(sizes[kind]), grad=torch.zeros(sizes[kind]),
                            decays=True, full_shape=sizes[kind], offset=(0, 0))
            for kind in kinds for i in range(shape.layers)
        ]  # fmt: skip
        matrices = {t.name: kinds[t.name.split()[0]] for t in found}
        ours = Muon(found, OPTIM, matrices, momentum=0.95, iterations=5, room=ROOM)
        ours.products = products
        tracker, flag = Tracker(supposed=True), torch.tensor(False)
        held = [*(t.local for t in found), *(t.grad for t in found), *(m for a in ours.groups for m in a.momenta)]
        for t in held:
            tracker.hold(t, "weight")
        with tracker:
            ours.step(torch.tensor(1.0), torch.tensor(1.0), flag)
        peak = tracker.measured().peak - sum(t.nbytes for t in held)
    rules = TheTechnique().predict(setup(shape, device))
    (line,) = [e for r in rules for e in r.entries if isinstance(e, Line) and e.name == "update.workspace"]
    assert peak == pytest.approx(4 * line.values, rel=0.1)


def setup(shape, device="cuda"):
    return SimpleNamespace(shape=shape, device=SimpleNamespace(kind=device), claimed=frozenset())
