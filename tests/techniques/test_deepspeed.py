"""DeepSpeed's ZeRO on two ranks: golden list, gradients, checkpoints, exports, skips, refusals, what is predicted."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from meshes import MeshCase, follows, further, prove, saved, train
from optrush import technique
from optrush.benchmark.worker import proof_window
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import GIB, NAMED
from optrush.planner import baseline
from optrush.planner.ledger import line_bytes, peak_memory
from optrush.techniques import ALL, deepspeed
from optrush.trainer.checkpoint import slices, verify
from optrush.trainer.trainer import evaluate

from trials import assembled, first_gradients, furthest, golden_run, published, shaped, steps, weights

there = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")

LORA = {"lora": {"rank": 4}}
QLORA = {"nf4": {}} | LORA
KERNELS = {"recompute": {}, "fused-loss": {"chunk": 5}, "attention": {}, "fused-kernels": {}}
HALF = 0.08  # of a largest gradient: on so small a model one process in bfloat16 is 0.04 from float32


def zero(stage, **options):
    return {"deepspeed": {"stage": stage, **options}}


# Packed rows, one a micro-batch: four micro-batches of each rank a step.
TWO = [
    *(MeshCase(2, zero(stage), name, rows=1) for stage, name in ((1, "untied"), (2, "tied"), (3, "untied"))),
    *(MeshCase(2, zero(stage) | base, base=base, rows=1) for stage in (1, 2, 3) for base in (LORA, QLORA)),
    MeshCase(2, zero(3) | KERNELS, "chat", packed=False),
    MeshCase(2, zero(3, hpz=2), "tied", rows=1),
    MeshCase(2, zero(2, offload="states"), rows=1),
    MeshCase(2, zero(3, offload="all"), "tied", rows=1),
    MeshCase(2, zero(3) | {"amp": {}} | LORA, rows=1, base={"amp": {}} | LORA, close=HALF),
]


@there
@pytest.mark.parametrize("case", further(TWO, 4), ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)


def through_transformers(box, with_):
    sets = ["model.implementation=transformers"]
    return published(assembled(golden_run(box, sets=sets, rows=1, **with_)))


@there
def test_a_model_through_transformers(box, pair, reference):
    want_loss, want = reference("untied")
    for loss, grads in pair(through_transformers, box, zero(3)):
        assert loss == pytest.approx(want_loss, rel=1e-5) and furthest(grads, want) < 1e-5


# Evaluation, skipped updates, windows.


def evaluated(box, with_):
    """Held-out losses before and after a step, and of a run that only evaluates."""
    config = golden_run(box, packed=True, rows=1, sets=[f"data.eval={box}/held.jsonl"], **with_)
    job = assembled(config)
    before = evaluate(job).loss
    list(steps(job, 1))
    return before, evaluate(job).loss, evaluate(assembled(config, training=False)).loss


@there
def test_an_evaluation_is_that_of_one_process(box, pair):
    want = evaluated(box, QLORA)
    assert want[0] != want[1]
    for found in pair(evaluated, box, zero(3) | QLORA):
        assert found == tuple(pytest.approx(loss, rel=1e-5) for loss in want)


def held(job):
    """Weights and states of this rank, as a checkpoint has them."""
    return {s.name: s.local for s in job.storage.read(slices(job))}


def bad_steps(box, with_):
    """Gradients, then a loss, that are not finite on one rank: (skipped, nothing changed); then whether it goes on."""
    job = assembled(golden_run(box, packed=True, **with_))
    list(steps(job, 1))
    found, inner, before = [], job.loss, held(job)
    for spoil in (lambda loss: loss * float("inf"), lambda loss: loss.detach() * float("nan") + 0 * loss):
        if job.world.rank == 1:
            job.loss = lambda batch, spoil=spoil: spoil(inner(batch))
        ((_, _, skipped),) = steps(job, 1, first=2)
        job.loss, now = inner, held(job)
        found.append((skipped, all(torch.equal(now[name], value) for name, value in before.items())))
    ((_, _, skipped),) = steps(job, 1, first=3)
    after = held(job)
    return found, skipped, {after[n].item() for n in after if n.startswith("state/count") and job.world.rank == 0}


@there
@pytest.mark.parametrize("with_", [zero(2), zero(3)], ids=str)
def test_a_bad_rank_skips_the_update_on_all(box, pair, with_):
    for rank, found in enumerate(pair(bad_steps, box, with_)):
        assert found == ([(True, True)] * 2, False, {2.0} if rank == 0 else set())


def cut_short(box, with_):
    job = assembled(golden_run(box, packed=True, **with_))
    inner, calls = job.loss, []

    def failing(batch):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return inner(batch)

    job.loss = failing
    with pytest.raises(MemoryError):
        first_gradients(job)
    job.loss = inner
    try:
        first_gradients(job)
    except AssertionError as error:
        return str(error)
    return "taken again"


@there
def test_a_window_cut_short_is_not_taken_again(box, pair):
    assert all("resume from a checkpoint" in said for said in pair(cut_short, box, zero(2)))


# Checkpoints and exports.


@there
def test_a_checkpoint_goes_on_under_any_sharding(box, pair, tmp_path):
    first, one, two = (tmp_path / name for name in ("first", "one", "two"))
    follows(pair(train, box, first, zero(3), None, "tied", ALL, True)[0], "tied")
    follows(train(box, one, {}, saved(first), "tied", export=True), "tied", first=5)
    follows(pair(train, box, two, {"fsdp": {}}, saved(one.parent / "first"), "tied")[0], "tied", first=5)
    for name, stage in (("back", 3), ("flat", 2)):
        follows(pair(train, box, tmp_path / name, zero(stage), saved(first), "tied")[0], "tied", first=5)
    whole, resumed = (load_file(path / "model/model.safetensors") for path in (first, one))
    assert furthest(whole, resumed) < 1e-4
    manifest = verify(saved(first))
    assert {len(entry.pieces) for name, entry in manifest.tensors.items() if name.startswith("param/")} == {2}


@there
def test_exports_are_those_of_one_process(box, pair, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    pair(train, box, two, zero(3) | QLORA, None, "untied", ALL, True)
    train(box, one, QLORA, export=True)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert furthest(load_file(two / file), load_file(one / file)) < 1e-4


def begun(box, with_):
    return weights(assembled(golden_run(box, packed=True, **with_)))


@there
def test_under_amp_weights_begin_with_all_their_bits(box, pair):
    """The published float32 values, not those of their copies in bfloat16."""
    want = begun(box, {})
    for found in pair(begun, box, zero(3) | {"amp": {}}):
        assert all(torch.equal(found[name], w) for name, w in want.items())


# These tests would see a mistake.


def spoiled(box, how):
    """Gradients where the module is called past the engine, or it averages, or a window is added to one before it."""
    job = assembled(golden_run(box, rows=1, packed=True, **zero(3)))
    run = job.optimizer
    if how == "past":
        run.engine.forward = lambda batch: run.engine.module(batch)
    elif how == "average":
        job.scale = job.scale / 2
    elif how == "added":
        batches = next(job.batches)
        job.forward_backward(batches, 1)
        run.zero_grad = lambda: None
    return first_gradients(job)[1]


@there
@pytest.mark.parametrize("how", ["past", "average", "added"])
def test_these_tests_would_see_it(box, pair, how):
    want = first_gradients(assembled(golden_run(box, packed=True)))[1]
    for grads in pair(spoiled, box, how):
        assert furthest(grads, want) > 0.1


# What it refuses.


def refused_there(box, with_, version=None):
    if version is not None:
        deepspeed.library = lambda name: version
    try:
        assembled(golden_run(box, packed=True, **with_))
    except NeedsError as error:
        return error.found, error.do
    finally:
        deepspeed.library = technique.library
    return "nothing"


@there
@pytest.mark.parametrize(
    ("with_", "version", "found", "do"),
    [(zero(2) | {"amp": {"dtype": "fp16"}}, None, "loss scale", "bf16"),
     (zero(2), "0.18.3", "0.18.3", "optrush[deepspeed]"),
     (zero(2) | {"lora": {"rank": 4, "lr_ratio": 4.0}}, None, "lr_ratio", "leave lr_ratio out")],
)  # fmt: skip
def test_what_it_refuses_when_it_is_built(box, pair, with_, version, found, do):
    for said in pair(refused_there, box, with_, version):
        assert found in said[0] and do in said[1]


def test_without_the_package_it_names_what_installs_it(box, monkeypatch):
    monkeypatch.setattr(technique, "library", lambda name: None)
    with pytest.raises(NeedsError) as error:
        decide(golden_run(box, packed=True, **zero(3)), ranks=2)
    assert "deepspeed is not installed" in error.value.found and "optrush[deepspeed]" in error.value.do


def test_a_rung_of_weights_that_an_engine_keeps_has_no_proof():
    kept = SimpleNamespace(local=torch.empty(1, device="meta"))
    window, why = proof_window(SimpleNamespace(trained=[kept]), [], 1)
    assert not window and "an engine keeps" in why


# What it predicts.


def kept(box, with_):
    """Bytes on this rank: float32 weights, what products read, states, gradients between a window and its update."""
    job = assembled(golden_run(box, rows=1, packed=True, **with_))
    first_gradients(job)
    run, stage = job.optimizer, job.optimizer.stage
    flat = run._flat()
    read = [getattr(p, "ds_tensor", p.data) for p in job.model.parameters()]
    states = sum(s.nbytes for flat_state in run.adamw.state.values() for s in flat_state.values() if s.dim())
    grads = run.zero.grad_partitions_flat_buffer.nbytes if stage == 3 else 0
    apart_ = not {t.untyped_storage().data_ptr() for t in flat} & {t.untyped_storage().data_ptr() for t in read}
    return sum(t.nbytes for t in flat), sum(t.nbytes for t in read) * apart_, states, grads


@there
@pytest.mark.parametrize("with_", [zero(2), zero(3) | {"amp": {}}], ids=str)
def test_what_a_rank_holds_is_what_was_predicted(box, pair, with_):
    resolved = decide(golden_run(box, rows=1, packed=True, **with_), ranks=2)
    (book,) = baseline.books(resolved.techniques, resolved.env, resolved.env.shape, 0.0)
    sums = dict.fromkeys(("weights", "copies", "states", "gradients"), 0.0)
    for line in book.lines:
        if (kind := line.name.partition(".")[0]) in sums:
            sums[kind] += line_bytes(book, line)
    wanted = list(sums.values()) if with_["deepspeed"]["stage"] == 3 else [*list(sums.values())[:3], 0]
    for found in pair(kept, box, with_):
        assert found == tuple(pytest.approx(value, rel=0.01) for value in wanted)  # flat ones are filled up


def peak(shape, *withs, ranks=4):
    """Predicted GiB of the device, and GiB sent by a rank in a step of two micro-batches."""
    run = shaped(shape, "recompute", "fused-loss", *withs, rows=1, windows=2 * ranks)
    resolved = decide(run, ranks=ranks, device=NAMED["h100"])
    (book,) = baseline.books(resolved.techniques, resolved.env, resolved.env.shape, 0.0)
    sent = sum(
        w.values * book.bytes_per_value[w.role] * w.times * (2 if w.per == "micro" else 1)
        for w in book.work
        if w.unit == "link" and not w.gone
    )
    return peak_memory(book, 2048).bytes / GIB, sent / GIB


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
@pytest.mark.parametrize("more", [(), ("amp",), ("lora",), ("lora", "amp"), ("nf4", "lora", "amp")], ids=str)
def test_what_it_predicts(shape, more):
    stages = (2, 3) if "amp" in more else (1, 2, 3)
    found = [peak(shape, f"deepspeed:stage={stage}", *more) for stage in stages]
    peaks, sent = ([f[i] for f in found] for i in range(2))
    if "nf4" not in more:  # of few bytes stage 3 saves less than its buffers hold (2xh200-cells.jsonl)
        assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0], "a stage more holds less"
    assert sent == sorted(sent), "and sends more"
    states, everything = (peak(shape, f"deepspeed:offload={what}", *more)[0] for what in ("states", "all"))
    assert everything < states <= peaks[-1]
    assert peak(shape, "deepspeed:hpz=2", *more)[0] > peaks[-1]
    assert peak(shape, "deepspeed", *more, ranks=8)[0] < peaks[-1]
