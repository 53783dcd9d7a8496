"""Before step 0 the largest step is played: it changes no bit of the run, and meets what would run out of memory."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshes import further
from optrush.data.batch import IGNORE
from optrush.decide import decide
from optrush.errors import NeedsError, RunError
from optrush.technique import Part
from optrush.techniques import ALL
from optrush.trainer import distributed
from optrush.trainer import run as preflight
from optrush.trainer.run import RunRequest, out_of_memory_in
from optrush.trainer.run import run as fit
from optrush.trainer.trainer import RunPlan
from scarce import CLASSES, Scarce

from golden.make_golden import T
from trials import assembled, first_gradients, golden_run, weights

TIMES = {"step_s", "tokens_per_s", "mfu", "peak_bytes", "data_wait_s", "start_s", "steps_s", "end_s", "resumed_at"}
SHORT = ["train.steps=3", "train.save_every=2"]
STEPPING = [  # whoever owns the optimizer, the precision or its moment, and can do so in the plainest run on a CPU
    t.name
    for t in ALL
    if t.claims & {Part.OPTIMIZER, Part.UPDATE, Part.PRECISION} and Part.DATA not in t.claims and "cpu" in t.verified_on
]


def trained(run, resume=None):
    """(lines without times, exported weights) of a run, from its start or from a checkpoint."""
    assert fit(RunRequest(decide(run, CLASSES), resume)).code == 0
    output = Path(run.output)
    lines = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    model = {name: w.clone() for name, w in load_file(output / "model/model.safetensors").items()}
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines], model


def options(name):
    """What a technique of STEPPING needs beside it: (with, sets)."""
    with_ = {name: {"use": "torch.optim:Adagrad"} if name == "own-optimizer" else {}}
    sets = ["optim.clip=null", f"batch.micro_tokens={T * 8}"] if name == "update-in-backward" else []
    return {k.replace("-", "_"): v for k, v in with_.items()}, sets


def same(box, monkeypatch, sets, **with_):
    run = golden_run(
        box, packed=True, sets=[*SHORT, "train.overwrite=true", f"data.eval={box}/held.jsonl", *sets], **with_
    )
    played = []
    inner = preflight._largest_step

    def play(trainer, plan):
        inner(trainer, plan)
        played.append(trainer.world.rank)

    monkeypatch.setattr(preflight, "_largest_step", play)
    with_it = trained(run)
    assert played == [0]
    monkeypatch.setattr(preflight, "preflight", lambda job, plan: None)
    without = trained(run)
    assert played == [0]
    assert with_it[0] == without[0], "losses, norms, rates, skips"
    assert all(torch.equal(with_it[1][name], w) for name, w in without[1].items())


@pytest.mark.parametrize("name", further(STEPPING, 1))
def test_every_update_changes_no_bit(box, monkeypatch, name):
    with_, sets = options(name)
    same(box, monkeypatch, sets, **with_)


@pytest.mark.parametrize("with_", further([
    {"amp": {"dtype": "fp16"}}, {"sort_by_length": {}}, {}, {"recompute": {}, "fused_loss": {}},
], 1), ids=str)  # fmt: skip
def test_nothing_changes(box, monkeypatch, with_):
    same(box, monkeypatch, [], **with_)


def test_dropout_draws_what_it_would_have_drawn(box, monkeypatch, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=2048, n_positions=T, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    for file in (box / "untied").iterdir():
        if "token" in file.name:
            shutil.copy(file, folder / file.name)
    same(box, monkeypatch, [f"model.path={folder}"])


def test_the_state_is_put_back(box):
    job = assembled(golden_run(box, amp={"dtype": "fp16"}, sets=[f"data.eval={box}/held.jsonl"]))
    job.model.eval()
    job.state["amp"].good.fill_(5)
    inner = job.loss
    job.loss = lambda batch: inner(batch) + 0 * torch.rand(())  # as dropout draws
    torch.manual_seed(7)
    before, random = weights(job), torch.get_rng_state()
    scale, state = (
        job.scale.item(),
        {n: {k: s.clone() for k, s in by.items()} for n, by in job.optimizer.state().items()},
    )
    assert preflight.preflight(job, RunPlan(job, job.stream.plan(None, 8))) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert job.scale.item() == scale == 2.0**16 and job.state["amp"].good.item() == 5
    assert not job.model.training and all(t.grad is None for t in job.trained)
    for t in job.trained:
        assert torch.equal(before[t.name], t.local), t.name
        assert all(torch.equal(state[t.name][k], s) for k, s in job.optimizer.state()[t.name].items())


def test_these_tests_would_see_an_update(box, monkeypatch):
    """A finite scale lets the rehearsal train."""
    monkeypatch.setattr(preflight.math, "inf", 1.0)
    job = assembled(golden_run(box))
    job.lr.fill_(0.1)
    before = weights(job)
    assert preflight.preflight(job, RunPlan(job, job.stream.plan(None, 8))) is None
    assert any(not torch.equal(before[t.name], t.local) for t in job.trained)


# --- what is played


def plan_of(job, done=0):
    return RunPlan(job, job.stream.plan(None, 8), done)


@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_micro_batch_has_the_runs_shapes(box, packed):
    job = assembled(golden_run(box, rows=4, packed=packed))
    made, real = preflight.largest_batch(job, plan_of(job)), next(job.batches)[0]
    assert made.tokens.shape == real.tokens.shape == (4, T)
    assert made.documents.starts.shape == real.documents.starts.shape
    assert made.documents.single == real.documents.single
    assert made.documents.longest == T and made.attended == 4 * T * T
    assert (made.labels[:, :-1] != IGNORE).all() and made.n_tokens == 4 * T
    assert made.tokens.min() >= 0 and made.tokens.max() < job.model.embedding.weight.shape[0]


def test_a_layout_that_follows_its_rows_is_as_wide_as_the_longest_document(box):
    job = assembled(
        golden_run(box, sets=[f"batch.seq={4 * T}", f"batch.tokens={8 * T}", "batch.micro_tokens=null"], pad={})
    )
    longest = int(job.stream.source.lengths().max())
    width = preflight.largest_batch(job, plan_of(job)).tokens.shape[1]
    assert longest <= width < 4 * T and width == min(4 * T, -(-longest // 64) * 64)


@pytest.mark.parametrize(("rows", "first"), [(2, [2, 2]), (8, [8])])
def test_gradients_of_two_micro_batches_where_they_accumulate(box, rows, first):
    run = golden_run(box, rows=rows, packed=True, sets=[f"data.eval={box}/held.jsonl"], scarce={"rows": 99})
    job = assembled(run, CLASSES)
    assert preflight.preflight(job, plan_of(job)) is None
    assert Scarce.calls == [*first, *[rows] * (8 // rows), rows], "the largest, the first step, an evaluation"


def test_a_run_that_is_done_plays_nothing(box):
    job = assembled(golden_run(box, scarce={}), CLASSES)
    assert preflight.preflight(job, plan_of(job, done=8)) is None and Scarce.calls == []


# --- what it meets


@pytest.fixture(autouse=True)
def _fresh(box):
    shutil.rmtree(box / "output", ignore_errors=True)


def refused(run, resume=None):
    with pytest.raises(NeedsError) as caught:
        fit(RunRequest(decide(run, CLASSES), resume))
    return str(caught.value).splitlines()


def test_out_of_memory_before_step_0_is_refused(box):
    run = golden_run(box, rows=4, packed=True, scarce={"rows": 2})
    asked, found, do = refused(run)
    assert asked == f"asked: micro-batches of 4 rows of {T} tokens"
    assert found.startswith("found: out of memory, before step 0: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "15.00 GiB" in found and "by PyTorch" not in found
    assert f"batch.micro_tokens: {2 * T}, or auto" in do and "--with recompute" in do
    assert not Path(run.output).exists(), "nothing was written"


def test_one_row_that_is_too_much(box):
    asked, _, do = refused(golden_run(box, rows=1, packed=True, scarce={"rows": 0}, recompute={}))
    assert "1 row of" in asked and "shorter rows (batch.seq), or a smaller model" in do
    assert "recompute" not in do and "micro_tokens" not in do


def test_an_evaluation_is_rehearsed(box):
    sets = [f"data.eval={box}/held.jsonl"]
    assert "out of memory" in refused(golden_run(box, packed=True, sets=sets, scarce={"evaluating": True}))[1]


def test_going_on_is_rehearsed_too(box):
    run = golden_run(box, packed=True, sets=[*SHORT, "train.overwrite=true", "train.steps=2"])
    trained(run)
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 4, "overwrite": False})})
    asked = longer.model_copy(update={"with_": {**longer.with_, "scarce": {}}})
    before = (Path(run.output) / "metrics.jsonl").read_text()
    assert "out of memory" in refused(asked, "auto")[1]
    assert (Path(run.output) / "metrics.jsonl").read_text() == before


def test_what_is_no_lack_of_memory_stays_what_it_is(box, monkeypatch):
    job = assembled(golden_run(box))

    def broken(batch):
        raise RuntimeError("shapes differ")

    job.loss = broken
    with pytest.raises(RuntimeError, match="shapes differ"):
        preflight.preflight(job, plan_of(job))


@pytest.mark.parametrize("saved", [True, False])
def test_a_late_lack_of_memory_says_how_to_go_on(box, saved):
    """Its last checkpoint is there, and a run with smaller micro-batches goes on from it."""
    sets = ["train.steps=4", "train.overwrite=true", *(["train.save_every=1"] if saved else [])]
    run = golden_run(box, rows=4, packed=True, sets=sets, scarce={"after": 7})  # 4 in the rehearsal, 2 a step
    with pytest.raises(RunError) as caught:
        fit(RunRequest(decide(run, CLASSES)))
    said = str(caught.value)
    assert said.startswith(
        f"asked: micro-batches of 4 rows of {T} tokens\nfound: out of memory in step 2: CUDA out of memory"
    )
    assert f"--set batch.micro_tokens={2 * T}" in said
    assert ("resume from step-000001 with: --resume auto" if saved else "nothing is saved yet; start again") in said


# --- several ranks


def late_word(left=None):
    """Rank 1 answers after rank 0 has stopped waiting, where a file is named that says so."""
    distributed.join("cpu")
    rank = torch.distributed.get_rank()
    while left and rank and not left.exists():
        time.sleep(0.01)
    found = distributed.exchange(f"rank {rank}", 240.0 if rank or not left else 0.2)
    if left and not rank:
        left.touch()
    return found


def test_a_rank_that_does_not_answer_is_not_waited_for(pair, tmp_path):
    assert pair(late_word, tmp_path / "left") == [None, ["rank 0", "rank 1"]]
    assert pair(late_word) == [["rank 0", "rank 1"]] * 2
    assert distributed.exchange("alone", 0.0) == ["alone"]


def test_what_is_released_is_free(box):
    job = assembled(golden_run(box))
    first_gradients(job)
    held = [t.local.untyped_storage() for t in job.trained]
    held += [s.untyped_storage() for by in job.optimizer.state().values() for s in by.values()]
    preflight.release_memory(job)
    assert all(s.nbytes() == 0 for s in held)
    assert all(t.grad is None for t in job.trained)


def test_the_advice_is_none_that_the_run_would_refuse(box):
    """Who updates in the backward pass wants a step in one micro-batch: fewer tokens a step, not smaller pieces."""
    sets = ["optim.clip=null", f"batch.tokens={T * 8}", f"batch.micro_tokens={T * 8}"]
    job = assembled(golden_run(box, packed=True, sets=sets, update_in_backward={}))
    do = preflight._out_of_memory(job, "out of memory").do
    assert f"batch.tokens: {4 * T}" in do and "or auto" not in do
    assert "micro_tokens" not in str(out_of_memory_in(job, 3, RuntimeError("out of memory")))
