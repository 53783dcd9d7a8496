"""Meshes of several axes: golden list, gradients, checkpoints from any mesh to any other, many steps, who counts,
refusals."""

from __future__ import annotations

import functools
import gc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.harness import LONG, told
from meshes import MeshCase, bits, further, pass_on, play, prove
from optrush.techniques import ALL
from optrush.trainer import checkpoint
from optrush.trainer import run as fit
from optrush.trainer.trainer import RunPlan

from trials import assembled, golden_run, steps

HYBRID = {"fsdp": {"replicate": 2}}
CASES = [
    MeshCase(4, HYBRID, "tied", packed=False, rows=1),
    MeshCase(4, {"fsdp": {"replicate": 2, "stage": 2, "sync": "each"}}, "chat", rows=1),
    MeshCase(4, {"fsdp": {}}, "tied", rows=1),
    MeshCase(4, {"ddp": {}}, rows=1),
    MeshCase(4, {"fsdp": {"stage": 2}}, rows=1),
    MeshCase(4, HYBRID, rows=1),
    MeshCase(
        4, HYBRID | {"nf4": {}, "lora": {"rank": 4}, "recompute": {}}, rows=1, base={"nf4": {}, "lora": {"rank": 4}}
    ),
]


@pytest.mark.parametrize("case", further(CASES, 2), ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


def test_what_a_rank_of_a_group_holds(box, quad):
    """Half of the model, not a quarter: two groups of two."""
    whole = play(box, MeshCase(1, {}), {}).held
    assert [one.held for one in quad(play, box, MeshCase(4, HYBRID, rows=1), HYBRID)] == [whole // 2] * 4


# Any mesh goes on in any other.

DENSE = {
    "one process": (1, {}),
    "ddp": (2, {"ddp": {}}),
    "fsdp 2": (2, {"fsdp": {"stage": 2}}),
    "fsdp 3": (2, {"fsdp": {}}),
    "hsdp": (4, HYBRID),
    "tensor": (2, {"tensor": {}}),
    "context": (2, {"context": {}, "ddp": {}}),
    "pipeline": (2, {"pipeline": {}}),
}
ROUTED = {  # a mixture of experts, which tensor, context and pipeline refuse
    "one process": (1, {}),
    "experts": (2, {"experts": {}, "ddp": {}}),
    "ddp": DENSE["ddp"],
    "experts and fsdp": (4, {"experts": {}, "fsdp": {}}),
    "fsdp 3": DENSE["fsdp 3"],
}


MORE = 2  # steps after the four that are saved


def sources(meshes, name):
    """What a mesh goes on from: all in the long form, else itself and the two that follow it."""
    names = list(meshes)
    at = names.index(name)
    return names if LONG else [names[(at + n) % len(names)] for n in range(3)]


def half(box, folder, name, with_, sets, classes=ALL):
    """Save half of a run; return losses and norms of what follows."""
    config = golden_run(box, rows=1, packed=True, sets=(f"output={folder / name}", *sets), **with_)
    job = assembled(config, classes)
    list(steps(job, 4))
    checkpoint.save(job, 4, checkpoint.Meta("00ff", job.stream.position(4), fingerprints=job.fingerprints))
    return [figures[:2] for figures in steps(job, MORE, first=5)]


def other_half(box, folder, name, with_, sets, others):
    """Of each checkpoint: which tensors are not the same bits when saved again, and losses and norms from there on.

    One job loads one after another, so that nothing is right because it was never changed.
    """
    config = golden_run(box, rows=1, packed=True, sets=(f"output={folder / f'{name} again'}", *sets), **with_)
    job, found = assembled(config), {}
    for number, source in enumerate(others, 5):
        path = folder / source / "checkpoints" / "step-000004"
        again = pass_on(job, path, number)
        wrong = None
        if job.world.rank == 0:
            was, now = bits(path), bits(again)
            wrong = sorted(
                t for t in was.keys() | now.keys() if t not in was or t not in now or not was[t].equal(now[t])
            )
        job.batches = fit.batches(job, RunPlan(job, job.stream.plan(None, 8), done=4))
        found[source] = wrong, [figures[:2] for figures in steps(job, MORE, first=5)]
    return found


def groups(pair, quad):
    return {1: lambda f, *args: [f(*args)], 2: pair, 4: quad}


QUICK = [
    ("hsdp", "untied"), ("tensor", "untied"), ("context", "untied"), ("pipeline", "tied"),
    ("experts and fsdp", "moe"),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(box, tmp_path_factory):
    """Of a model, once: the folder in which one process saved the half of a run, and what follows there."""

    @functools.cache
    def made(model):
        folder = tmp_path_factory.mktemp("alone")
        return folder, half(box, folder, "one process", {}, (f"model.path={box / model}",))

    return made


@pytest.mark.parametrize(("name", "model"), QUICK)
def test_a_checkpoint_goes_on_in_one_process_and_back(box, pair, quad, alone, name, model):
    n, with_ = (ROUTED if model == "moe" else DENSE)[name]
    sets, ranks, (tmp_path, want) = (f"model.path={box / model}",), groups(pair, quad)[n], alone(model)
    for figures in ranks(half, box, tmp_path, name, with_, sets):
        assert np.allclose(figures, want, rtol=1e-5, atol=0)
    back = ranks(other_half, box, tmp_path, name, with_, sets, ["one process"])
    there = other_half(box, tmp_path, "one process", {}, sets, [name])
    assert back[0]["one process"][0] == there[name][0] == []
    for found in (there[name], *(one["one process"] for one in back)):
        assert np.allclose(found[1], want, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("meshes", "sets"), [(DENSE, ()), (ROUTED, ("model=moe",))], ids=["dense", "experts"])
def test_any_mesh_goes_on_in_any_other(box, pair, quad, tmp_path, meshes, sets):
    """Weights and optimizer states are the same bits, for a cut is a slice; losses and norms are to 1e-5."""
    by = groups(pair, quad)
    sets = tuple(text.replace("=moe", f".path={box / 'moe'}") for text in sets)
    went = {name: by[n](half, box, tmp_path, name, w, sets) for name, (n, w) in meshes.items()}
    want = went["one process"][0]
    for figures in (one for ranks in went.values() for one in ranks):
        assert np.allclose(figures, want, rtol=1e-5, atol=0)
    pairs = {name: sources(meshes, name) for name in meshes}
    for name, (n, with_) in meshes.items():
        ranks = by[n](other_half, box, tmp_path, name, with_, sets, pairs[name])
        for source in pairs[name]:
            assert ranks[0][source][0] == [], f"saved in {source}, gone on in {name}"
            for found in ranks:
                assert np.allclose(found[source][1], want, rtol=1e-5, atol=0), f"saved in {source}, gone on in {name}"
    n = sum(map(len, pairs.values()))
    told(
        "R9", n, f"saved in one of {', '.join(meshes)} and gone on in another: {n} pairs, every weight and state equal"
    )


# Many steps.

STEPS = 200 if LONG else 40  # of which the second half must not need more memory than the first
GROWS = 2 << 20  # what an allocator may waver by, of some 290 MiB


def held_now():
    """Tensors that are alive in this process, their bytes, and the process's own memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch keeps for those who still use them
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    return len(tensors), sum(t.nbytes for t in tensors), anonymous


def long_run(box, with_, rows):
    """Losses and norms of all steps, and what is held after half of them and after all."""
    sets = (f"train.steps={STEPS}", "optim.lr=1e-3")
    job = assembled(golden_run(box, rows=rows, packed=True, sets=sets, **with_))
    first = [figures[:2] for figures in steps(job, STEPS // 2)]
    before = held_now()
    second = [figures[:2] for figures in steps(job, STEPS // 2, first=STEPS // 2 + 1)]
    return [*first, *second], before, held_now()


@pytest.mark.slow
def test_many_steps_are_those_of_ddp_and_leak_nothing(box, pair, quad):
    worst, most, want = 0.0, 0, None
    for kind in ("ddp", "fsdp 2", "fsdp 3", "hsdp"):
        n, with_ = DENSE[kind]
        for found, (tensors, held, resident), after in (quad if n == 4 else pair)(long_run, box, with_, 8 // n):
            want = np.array(found) if want is None else want
            worst = max(worst, *(np.abs(found - want) / want).flat)
            most = max(most, after[2] - resident)
            assert worst < 1e-5, kind
            assert after[:2] == (tensors, held) and most < GROWS, f"{kind}: {after[2] - resident:+} bytes"
    figure = f"{STEPS} steps of fsdp 2, fsdp 3 and hsdp: losses and norms within {worst:.1e} of ddp's"
    told("R17", 4, f"{figure}; in the last {STEPS // 2} no tensor more, {most / (1 << 20):+.1f} MiB a rank at most")
