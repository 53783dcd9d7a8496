"""Muon: its iterations against singular values in float64, its update against torch's on the published matrices, and a
held-out loss no worse than AdamW's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import interpreter
from optrush.config import Optim, parse_config
from optrush.errors import ConfigError, NeedsError
from optrush.kernels import stochastic_rounding
from optrush.kernels.adamw import key_words, random_bits, round_stochastic, step_key
from optrush.kernels.newton_schulz import COEFFICIENTS, orthogonal
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.muon import Muon, Pieces
from optrush.planner import search
from optrush.planner.ledger import Line
from optrush.resolve import resolve
from optrush.technique import Part, Technique
from optrush.techniques import ALL
from optrush.techniques.muon import ROOM, pieces
from optrush.techniques.muon import Muon as TheTechnique
from optrush.trainer import checkpoint

from heldout import SEEDS, float32, held_out
from memory import Tracker
from trials import assembled, golden_run, steps, weights

OPTIM = Optim(lr=1e-2, weight_decay=0.1)
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


def trained(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    found = []
    for name, shape in SIZES.items():
        local = torch.randn(shape, generator=g).to(dtype)
        zero = (0,) * len(shape)
        found.append(
            SimpleNamespace(name=name, local=local, grad=None, decays=len(shape) > 1, whole=shape, offset=zero)
        )
    return found


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


def everything(found, ours):
    return [t.local.clone() for t in found] + [s.clone() for by in ours.state().values() for s in by.values()]


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
    found = trained()
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
    found = trained()
    for name, w, want in both(muon(found), found, 4):
        torch.testing.assert_close(w, want, rtol=1e-5, atol=1e-6, msg=name)


def test_in_one_piece_it_is_another_matrix():
    """What the pieces are for: the fused matrix made orthogonal as one takes another step."""
    found, other = trained(), trained()
    stepped(muon(found), found, 1)
    stepped(Muon(other, OPTIM, {"qkv": Pieces(1, (60,))}, momentum=0.95, iterations=5, room=ROOM), other, 1)
    assert (found[0].local - other[0].local).abs().max() > 0.1 * OPTIM.lr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_and_company_do_not_matter(dtype):
    """One at a time, by index in any grouping, or all at once."""
    runs = []
    for room, only in ((ROOM, [None]), (1, [None]), (3000, [[6], [0, 2], [3, 4], [1, 5]])):
        found = trained(dtype)
        ours = muon(found, room=room, rounding="stochastic")
        for step in range(1, 4):
            for some in only:
                stepped(ours, found, 1, first=step, only=some)
        runs.append(everything(found, ours))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            if dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            else:  # what is summed in another order may be rounded to the other side
                assert (a != b).float().mean() < 0.02


def test_only_some():
    found = trained()
    ours = muon(found)
    before = everything(found, ours)
    stepped(ours, found, 1, only=[1, 5])
    changed = {t.name for t, a in zip(found, before, strict=False) if not torch.equal(t.local, a)}
    assert changed == {"qkv2", "embedding"}
    assert {n for n, s in ours.state().items() if s["count"]} == {"qkv2", "embedding"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_nothing(dtype):
    found = trained(dtype)
    ours = muon(found, rounding="stochastic")
    stepped(ours, found, 1)
    before = everything(found, ours)
    stepped(ours, found, 1, scale=float("nan"), bad=True)
    assert all(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))
    stepped(ours, found, 1, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(everything(found, ours), before, strict=True))
    assert all(torch.isfinite(t.local).all() for t in found)


def test_states_are_one_value_a_parameter():
    state = muon(trained(torch.bfloat16)).state()
    assert list(state) == list(SIZES)
    for name, (shape, _) in FUSED.items():
        assert {k: (tuple(s.shape), s.dtype) for k, s in state[name].items()} == {
            "momentum": (shape, torch.bfloat16), "count": ((), torch.float32)
        }  # fmt: skip
    assert set(state["norm"]) == {"mean", "square", "count"}


# Rounding.


def test_random_rounding_is_right_on_average_and_repeatable():
    value = torch.full((4, 1000), 1 + 1 / 512)  # a quarter of the way from 1 to the next bfloat16
    target = torch.ones(4, 1000, dtype=torch.bfloat16)
    key, good = step_key(torch.tensor([key_words(7, "a")]), torch.ones(1))[0], torch.tensor(False)
    stochastic_rounding.stochastic(target, value, good, key)
    assert (target > 1).float().mean() == pytest.approx(0.25, abs=0.03)
    want = round_stochastic(value.view(-1), random_bits(key, torch.arange(4000))).view(4, 1000)
    assert torch.equal(target, want)
    again = torch.zeros_like(target)
    stochastic_rounding.stochastic(again, value, good, key, 16)
    assert not torch.equal(again, target), "other bits of the same draw"
    stochastic_rounding.stochastic(again, value, torch.tensor(True), key)
    assert not torch.equal(again, target), "skipped"


def test_each_update_draws_anew():
    """Weights that only decay, from the same values, one update later: rounded by other bits."""
    found = [t for t in trained(torch.bfloat16) if t.decays]
    ours = muon(found, rounding="stochastic")
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
    went = {}
    for rounding, dtype in (("nearest", torch.float32), ("nearest", torch.bfloat16), ("stochastic", torch.bfloat16)):
        found = trained(torch.bfloat16)
        for t in found:
            t.local = (t.local * 0.02).to(dtype)  # as large as a model's weights
        before = [t.local.clone() for t in found[:5]]
        ours = muon(found, rounding=rounding)
        for step in range(1, 41):
            g = torch.Generator().manual_seed(step)
            for t in found:
                t.grad = (1 + torch.randn(t.full_shape, generator=g)).to(dtype)
            ours.step(torch.tensor(1e-4), torch.tensor(1.0), torch.tensor(False))
        moved = [(t.local - b).float().flatten() for t, b in zip(found, before, strict=False)]
        went[rounding, dtype] = torch.cat(moved)
    full = went["nearest", torch.float32]
    share = {r: (went[r, torch.bfloat16] @ full / (full @ full)).item() for r in ("nearest", "stochastic")}
    print(share)
    assert share["nearest"] < 0.6 and share["stochastic"] == pytest.approx(1, abs=0.1)


def interpreted():
    """The kernel and the reference: every bit, but of nan."""
    from optrush.kernels import stochastic_rounding_triton

    stochastic_rounding_triton.BLOCK = 256
    g = torch.Generator().manual_seed(1)
    for many in (1, 256, 1000):
        value = torch.randn(many, generator=g) * 10.0 ** torch.randint(-30, 30, (many,), generator=g)
        value[::97] = float("inf")
        value[5::97] = float("nan")
        for shift, bad in ((0, False), (16, False), (0, True)):
            key = step_key(torch.tensor([key_words(many, "a")]), torch.tensor([3.0]))[0]
            sides = [torch.ones(many, dtype=torch.bfloat16) for _ in range(2)]
            for side, write in zip(
                sides, (stochastic_rounding.stochastic, stochastic_rounding_triton.stochastic), strict=True
            ):
                write(side, value, torch.tensor(bad), key, shift, (1 << 33) + 77)
            torch.testing.assert_close(*sides, rtol=0, atol=0, equal_nan=True)
    print("equal")


@pytest.mark.skipif(not any(Path(p, "triton").is_dir() for p in sys.path), reason="no Triton here")
def test_the_kernel_is_the_reference_to_the_bit():
    interpreter.says(__file__, "equal")


# In a run.

# AdamW's best rate of 3e-3, 1e-2, 3e-2 and 6e-2 in these 40 steps, and Muon's. (At 1e-2, where steps are the limit and
# AdamW's first ones are as large as the rate, Muon's a fifth of it, Muon ends 0.17 nats above.)
RATE = ("optim.lr=3e-2",)
MARGIN = 0.01  # nats a token, of the mean over the seeds; a seed alone may be twice as far


def test_held_out_loss_over_seeds(box):
    base = [float32(box, seed, RATE) for seed in SEEDS]
    ours = [held_out(box, seed, RATE, muon={}) for seed in SEEDS]
    print("AdamW", base, "Muon", ours)
    assert all(last < 0.6 * first for first, last in base), "it learns"
    off = [b[1] - a[1] for a, b in zip(base, ours)]
    assert any(off), "another optimizer"
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN


def test_the_margin_is_no_accident(box, monkeypatch):
    """Steps of a tenth of their size do not learn as well."""
    base = float32(box, 1, RATE)[1]
    monkeypatch.setattr("optrush.optim.muon.LIKE_ADAMW", 0.02)
    found = held_out(box, 1, RATE, muon={})[1]
    print(base, found)
    assert found > base + MARGIN


def all_bits(trainer):
    found = weights(trainer)
    return found | {f"{n} {k}": s.clone() for n, by in trainer.optimizer.state().items() for k, s in by.items()}


@pytest.mark.parametrize("with_", [{}, {"bf16": {}}], ids=str)
def test_a_resumed_run_is_the_same_to_the_bit(box, with_):
    run = golden_run(box, packed=True, muon={}, **with_)
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
    assert "blocks.0.qkv.weight momentum" in a and "embedding.weight square" in a
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def two_ranks(box):
    job = assembled(golden_run(box, packed=True, rows=2, ddp={}, muon={}))
    return list(steps(job, 3)), weights(job)


def test_ranks_step_alike(box, pair):
    one = assembled(golden_run(box, packed=True, rows=4, muon={}))
    figures = list(steps(one, 3))
    (found, a), (_, b) = pair(two_ranks, box)
    assert [f[:2] for f in found] == [pytest.approx(f[:2], rel=1e-4) for f in figures]
    assert all(torch.equal(a[name], b[name]) for name in a)


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


def test_it_refuses_cut_matrices(box):
    with pytest.raises(NeedsError, match="whole matrices") as error:
        search.predict(golden_run(box, fsdp={}, muon={}), "2xh200")
    assert "cuts them over the ranks" in error.value.found and "take ddp instead" in error.value.do


def test_it_refuses_frozen_matrices(box):
    @dataclass(frozen=True)
    class Adapters(Technique):
        name = "adapters"
        claims = frozenset({Part.TRAINED})

    with pytest.raises(NeedsError, match="`muon` updates the blocks' own matrices") as error:
        resolve(golden_run(box, muon={}, adapters={}), (*ALL, Adapters))
    assert "freezes them" in error.value.found and "fused-adamw" in error.value.do


def test_it_refuses_a_model_without_linears(box, monkeypatch):
    monkeypatch.setattr("optrush.models.decoder.Decoder.linears", lambda self: iter(()))
    with pytest.raises(NeedsError, match="matrices orthogonal") as error:
        assembled(golden_run(box, muon={}))
    assert "no trained linear in the blocks of this llama model" in error.value.found
    assert "fused-adamw" in error.value.do


def test_it_refuses_kahan(box):
    with pytest.raises(NeedsError, match="`muon` has no place for remainders") as error:
        search.predict(golden_run(box, bf16={"rounding": "kahan"}, muon={}), "h200")
    assert "what rounding took" in error.value.found and "bf16:rounding=stochastic" in error.value.do


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"momentum": 0.0}, {"iterations": 0}], ids=str)
def test_it_refuses_options(box, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        resolve(golden_run(box, muon=options))


# What the plan says.


def predicted(with_, hardware="h200"):
    text = "{{model: {{shape: llama-3.2-1b}}, objective: pretrain, data: {{random: 4}}, output: x, with: {{{}}}}}"
    return search.predict(parse_config(text.format(with_), "test"), hardware, 1)


def test_states_are_as_predicted():
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    blocks, whole = shape.parameters - shape.vocab * shape.width, shape.parameters
    for with_, width in (("muon: {}", 4), ("bf16: {}, muon: {}", 2), ("amp: {}, muon: {}", 4)):
        lines = predicted(with_).lines
        found = sum(line.bytes for line in lines if line.name.startswith("states."))
        assert found == pytest.approx(width * (blocks + 2 * (whole - blocks)), rel=1e-3)


def test_products_are_as_predicted():
    """FLOPs of torch's own count on the matrices of one block, to the digit."""
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        for rows, columns in pieces(shape):
            orthogonal(torch.empty(1, rows, columns))
    (rule,) = [e for r in TheTechnique().predict(setup(shape)) for e in r.entries if e.name == "update.orthogonal"
               and hasattr(e, "flop")]  # fmt: skip
    assert rule.flop == shape.layers * counted.get_total_flops()


@pytest.mark.parametrize(("device", "products"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_temporaries_are_as_predicted(device, products):
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    kinds = {"qkv": Pieces(8, (256, 64, 64)), "o": Pieces(1, (2048,)), "gate_up": Pieces(8192, (1, 1)),
             "down": Pieces(1, (2048,))}  # fmt: skip
    sizes = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
    with FakeTensorMode():
        found = [
            SimpleNamespace(name=f"{kind} {i}", local=torch.zeros(sizes[kind]), grad=torch.zeros(sizes[kind]),
                            decays=True, whole=sizes[kind], offset=(0, 0))
            for kind in kinds for i in range(shape.layers)
        ]  # fmt: skip
        matrices = {t.name: kinds[t.name.split()[0]] for t in found}
        ours = Muon(found, OPTIM, matrices, momentum=0.95, iterations=5, room=ROOM)
        ours.products = products
        tracker, flag = Tracker(supposed=True), torch.tensor(False)
        held = [*(t.local for t in found), *(t.grad for t in found), *(m for a in ours.alike for m in a.momenta)]
        for t in held:
            tracker.hold(t, "weight")
        with tracker:
            ours.step(torch.tensor(1.0), torch.tensor(1.0), flag)
        peak = tracker.measured().peak - sum(t.nbytes for t in held)
    rules = TheTechnique().predict(setup(shape, device))
    (line,) = [e for r in rules for e in r.entries if isinstance(e, Line) and e.name == "update.orthogonal"]
    assert peak == pytest.approx(4 * line.values, rel=0.1)


def setup(shape, device="cuda"):
    return SimpleNamespace(shape=shape, device=SimpleNamespace(kind=device), owned=frozenset())


if __name__ == "__main__":
    interpreted()
