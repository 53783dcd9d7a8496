"""Micro-batches that give way: the same step, cut smaller; their size by prediction, rehearsal, and later need."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshes import further
from optrush import hardware
from optrush.config import parse_config
from optrush.decide import changed, decide, resized
from optrush.errors import ConfigError, NeedsError, RunError
from optrush.planner.cost import room
from optrush.planner.search import predict
from optrush.planner.sets import fastest_rows, micro_batch_rows
from optrush.technique import Environment, Numerics, Part, Requirement, Technique
from optrush.techniques import ALL
from optrush.trainer.run import RunRequest
from optrush.trainer.run import run as fit
from optrush.trainer.trainer import evaluate
from scarce import CLASSES, SAID, Scarce

from golden.make_golden import T
from trials import assembled, first_gradients, furthest, golden_run, steps, weights

GPUS = """
model: {{shape: {shape}}}
objective: pretrain
data: {{random: 8}}
output: o
batch: {{tokens: {tokens}, micro_tokens: auto}}
with: {{{with_}}}
"""
QUICK = "bf16: {}, attention: {}, compile: {}, fused-loss: {}, fused-adamw: {}"


@pytest.fixture(autouse=True)
def _fresh(box):
    shutil.rmtree(box / "output", ignore_errors=True)


# --- the same step


def trained(box, rows, **with_):
    job = assembled(golden_run(box, rows=rows, packed=True, **with_), CLASSES)
    return list(steps(job)), weights(job), job


@pytest.mark.parametrize("after", further([1, 0, 5], 1))
def test_a_halved_run_is_the_run(box, after):
    """Against the plain run as configured and, halved from the first step on, the run of that size, to the bit."""
    whole = trained(box, 4)[0]
    halved, found, job = trained(box, 4, micro_batch={}, scarce={"rows": 2, "after": after})
    assert job.env.micro_rows == 2
    for (loss, norm, skipped), (want, want_norm, _) in zip(halved, whole, strict=True):
        assert loss == pytest.approx(want, rel=1e-6) and norm == pytest.approx(want_norm, rel=1e-5) and not skipped
    if after == 0:
        smaller = trained(box, 2)
        assert halved == smaller[0] and all(torch.equal(found[n], w) for n, w in smaller[1].items())


@pytest.mark.parametrize("after", further([1, 0], 1))
def test_gradients_of_a_halved_window(box, after):
    plain = first_gradients(assembled(golden_run(box, rows=4, packed=True)))
    job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}, scarce={"rows": 1, "after": after}), CLASSES)
    found = first_gradients(job)
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and furthest(found[1], plain[1]) < 2e-6
    assert Scarce.calls == [*[4] * (after + 1), 2, *[1] * 8], "4 rows, 2 rows, then 8 single ones"


def test_rows_that_no_two_divides(box):
    """Three rows are cut in single ones, for a step has 9."""
    sets = [f"batch.tokens={9 * T}", f"batch.micro_tokens={9 * T}"]
    plain = first_gradients(assembled(golden_run(box, sets=sets)))
    job = assembled(golden_run(box, sets=sets, micro_batch={}, scarce={}), CLASSES)
    found = first_gradients(job)
    assert Scarce.calls == [9, 3, *[1] * 9]
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and furthest(found[1], plain[1]) < 2e-6


def test_evaluation_is_halved_too(box):
    sets = [f"data.eval={box}/held.jsonl"]
    plain = evaluate(assembled(golden_run(box, rows=4, packed=True, sets=sets)))
    job = assembled(
        golden_run(box, rows=4, packed=True, sets=sets, micro_batch={}, scarce={"evaluating": True}), CLASSES
    )
    loss, targets, _ = evaluate(job)
    assert loss == pytest.approx(plain[0], rel=1e-6) and targets == plain[1] and job.env.micro_rows == 1


def test_a_halved_evaluation_counts_its_figures_once(box):
    """What the micro-batches before the one that failed had added is not added again."""
    job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}))
    counted = job.metrics["rows"] = torch.zeros(())
    inner, calls = job.loss, []

    def loss(batch):
        calls.append(len(batch.tokens))
        if len(calls) == 2:
            raise torch.OutOfMemoryError(SAID)
        counted.add_(len(batch.tokens))
        return inner(batch)

    job.loss = loss
    batches = next(job.batches)
    counted.fill_(100)  # of windows before this one
    job.eval_loss(batches)
    assert calls == [4, 4, 2, 2, 2, 2] and counted == 108


def test_one_row_and_other_errors_are_raised(box):
    job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}, scarce={"rows": 0}), CLASSES)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        list(steps(job, 1))
    assert job.env.micro_rows == 1
    job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}))

    def broken(batch):
        raise RuntimeError("shapes differ")

    job.loss = broken
    with pytest.raises(RuntimeError, match="shapes differ"):
        list(steps(job, 1))
    assert job.env.micro_rows == 4


def test_it_is_said_and_the_next_step_is_small_at_once(box):
    """When it is said, the half of a window that was there has been given back."""
    job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}, scarce={"rows": 2, "after": 1}), CLASSES)
    said = []
    job.log_event = lambda what: said.append((what, [t.name for t in job.trained if t.grad is not None]))
    list(steps(job, 2))
    after = SAID + ". Of the allocated memory 13.00 GiB is allocated by PyTorch"
    assert said == [({"micro_tokens": 2 * T, "after": after}, [])]
    assert Scarce.calls == [4, 4, *[2] * 8]


def test_a_window_that_cannot_be_repeated_is_not(box):
    """Somebody else records windows, or updates within them: the error goes on its way."""
    for part in (Part.CAPTURE, Part.UPDATE):

        @dataclass(frozen=True)
        class Owner(Scarce):
            claims = frozenset({part})

        job = assembled(golden_run(box, rows=4, packed=True, micro_batch={}, scarce={}), (*ALL, Owner))
        assert "out of memory after step 0 ends the run" in job.describe()
        with pytest.raises(torch.OutOfMemoryError):
            list(steps(job, 1))
        assert job.env.fewer_rows == 2


# --- a run


def lines(output):
    found = [json.loads(text) for text in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line], [line for line in found if "micro_tokens" in line]


def test_the_rehearsal_finds_what_fits(box):
    """The configuration that is written holds the number, and runs by itself."""
    plain = golden_run(box, rows=4, packed=True, sets=["train.steps=3"])
    assert fit(RunRequest(decide(plain))).code == 0
    want = lines(plain.output)[0]
    shutil.rmtree(plain.output)
    run = golden_run(box, rows=4, packed=True, sets=["train.steps=3"], micro_batch={}, scarce={})
    assert fit(RunRequest(decide(run, CLASSES))).code == 0
    found, said = lines(run.output)
    assert said == [], "it was before step 0"
    for a, b in zip(found, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert (a["tokens"], a["target_tokens"]) == (b["tokens"], b["target_tokens"])
    written = parse_config((Path(run.output) / "run.yaml").read_text(), "run.yaml")
    assert written.batch.micro_tokens == T and written.batch.tokens == run.batch.tokens


def test_a_late_lack_of_memory_loses_no_step(box):
    """4 calls in the rehearsal, 2 in step 1, 1 in step 2, then no more than 2 rows."""
    run = golden_run(box, rows=4, packed=True, sets=["train.steps=3"], micro_batch={}, scarce={"rows": 2, "after": 7})
    assert fit(RunRequest(decide(run, CLASSES))).code == 0
    found, said = lines(run.output)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [(line["step"], line["micro_tokens"]) for line in said] == [(1, 2 * T)] and SAID in said[0]["after"]
    assert Scarce.calls == [*[4] * 4, 4, 4, 4, 4, *[2] * 4, *[2] * 4]


@dataclass(frozen=True)
class Whole(Technique):
    """Wants a step in one micro-batch, whatever becomes of it."""

    name = "whole"
    summary = source = proof = "a toy"
    numerics = Numerics.EXACT
    verified_on = ("cpu",)
    claims = frozenset({Part.UPDATE})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(env.accumulation == 1, "`whole` wants one micro-batch a step", "several", "take them all")

    def wrap_window(self, job):
        return 1


def test_what_nobody_can_make_smaller_is_refused(box):
    run = golden_run(box, rows=8, packed=True, micro_batch={}, scarce={"rows": 4}, whole={})
    with pytest.raises(NeedsError) as caught:
        fit(RunRequest(decide(run, (*CLASSES, Whole))))
    assert caught.value.asked == f"micro-batches of 8 rows of {T} tokens" and "out of memory" in caught.value.found
    assert not Path(run.output).exists()


# --- several ranks


def on_two(box, data, rows, after, **more):
    """(losses, what is written of the micro-batch, sizes asked for) on this rank, or what the run failed with."""
    run = golden_run(
        box, rows=4, packed=True, sets=["train.steps=3"], micro_batch={}, scarce={"rows": rows, "after": after}, **data
    )
    try:
        assert fit(RunRequest(decide(run, CLASSES))).code == 0
    except (RunError, NeedsError) as error:
        return str(error)
    found = lines(run.output)[0]
    written = parse_config((Path(run.output) / "run.yaml").read_text(), "run.yaml")
    return [line["loss"] for line in found], written.batch.micro_tokens, list(Scarce.calls)


@pytest.mark.parametrize("data", further([{"fsdp": {}}, {"ddp": {}}, {"fsdp": {"stage": 2}}], 1), ids=str)
def test_ranks_begin_again_with_smaller_ones(box, pair, data):
    alone = golden_run(box, rows=4, packed=True, sets=["train.steps=3"])
    want = [line[0] for line in steps(assembled(alone), 3)]
    for losses, written, asked in pair(on_two, box, data, 1, 0):
        assert losses == pytest.approx(want, rel=1e-5)
        assert written == T and set(asked) == {1}, "two jobs were given up: of 4 rows and of 2"


def test_nothing_fits_on_ranks(box, pair):
    for said in pair(on_two, box, {"ddp": {}}, 0, 0):
        assert f"micro-batches of 1 row of {T} tokens" in said and "out of memory, before step 0" in said


@pytest.mark.parametrize("data", [{"ddp": {}}, {"fsdp": {}}], ids=str)
def test_later_ranks_end_the_run(box, pair, data):
    """Two calls in the rehearsal, one a step (4 rows of 8, on each rank)."""
    for said in pair(on_two, box, data, 1, 3):
        assert "out of memory in step 2" in said and f"--set batch.micro_tokens={2 * T}" in said


# --- auto


def sized(device, tokens=65536, shape="llama-3.2-1b", with_=QUICK):
    return decide(parse_config(GPUS.format(shape=shape, tokens=tokens, with_=with_), "x"), device=device)


@pytest.mark.parametrize("name", ["h200", "a100-40", "l4"])
def test_auto_is_the_largest_of_the_fastest_with_room_to_spare(name):
    device = hardware.NAMED[name]
    found = sized(device)
    by_rows = {}
    for rows in (1, 2, 4, 8, 16, 32):
        sets = [f"batch.micro_tokens={rows * 2048}"]
        config = parse_config(GPUS.format(shape="llama-3.2-1b", tokens=65536, with_=QUICK), "x", sets)
        made = predict(config, name)
        if made.fits:
            by_rows[rows] = made.tokens_per_s, made.peak_bytes <= 0.96 * made.room_bytes
    fastest = max(speed for speed, _ in by_rows.values())
    near = {rows: spare for rows, (speed, spare) in by_rows.items() if speed >= 0.99 * fastest}
    assert found.env.micro_rows == max((rows for rows, spare in near.items() if spare), default=min(near))
    assert found.config.batch.micro_tokens == found.env.micro_rows * 2048 and "micro-batch" in found.config.with_


def test_auto_knows_the_card():
    """Two blocks' memory apart: the smaller card takes smaller micro-batches; one that holds nothing takes one row."""
    small = dataclasses.replace(hardware.NAMED["h200"], memory_bytes=20 << 30)
    tiny = dataclasses.replace(hardware.NAMED["h200"], memory_bytes=4 << 30)
    rows = [sized(device).env.micro_rows for device in (hardware.NAMED["h200"], small, tiny)]
    assert rows[0] > rows[1] > rows[2] == 1


def test_auto_without_rates_takes_the_largest_that_fits():
    device = hardware.Device("cuda", "an unknown one", (9, 0), None, memory_bytes=1 << 40)
    assert sized(device).env.micro_rows == 32


def test_auto_serves_who_wants_one_micro_batch(box):
    run = golden_run(box, packed=True, sets=["batch.micro_tokens=auto"], whole={})
    assert decide(run, (*ALL, Whole)).env.accumulation == 1
    with pytest.raises(NeedsError, match="one micro-batch a step"):
        resized(decide(run, (*ALL, Whole)), 2)


def test_auto_on_ranks(box):
    run = golden_run(box, packed=True, sets=["batch.micro_tokens=auto"], ddp={})
    env = decide(run, ranks=2).env
    assert (8 // 2) % env.micro_rows == 0 and env.accumulation * env.micro_rows == 4


def test_sizes():
    assert micro_batch_rows(8) == [1, 2, 4, 8] and micro_batch_rows(12) == [1, 2, 4, 12] and micro_batch_rows(1) == [1]


def test_auto_on_a_cpu_goes_by_this_machines_memory(box, monkeypatch):
    run = golden_run(box, packed=True, sets=["batch.micro_tokens=auto"])
    one, two = (predict(golden_run(box, rows=n, packed=True), "cpu").peak_bytes for n in (1, 2))
    for memory_bytes, rows in ((1 << 40, 8), (int((one + two) / 2 * 1.03), 1)):
        machine = dataclasses.replace(hardware.CPU, memory_bytes=memory_bytes)  # no rates: the largest that fits
        monkeypatch.setattr(hardware, "cpu", lambda machine=machine: machine)
        assert decide(run, device=hardware.CPU).env.micro_rows == rows


def test_auto_of_a_family_without_a_plan(box, tmp_path):
    """By a dense decoder of the same sizes; on a GPU the rehearsal halves what does not fit."""
    from transformers import GPT2Config

    GPT2Config(vocab_size=2048, n_positions=T, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    run = golden_run(box, sets=["batch.micro_tokens=auto", f"model.path={tmp_path}"])
    assert decide(run, device=hardware.CPU).env.micro_rows > 1
    assert decide(run, device=hardware.NAMED["h200"]).env.accumulation == 1
    left_out = changed(run, {"batch.micro_tokens": None})
    assert "micro-batch" in decide(left_out, device=hardware.NAMED["h200"]).config.with_
    assert "micro-batch" not in decide(left_out, device=hardware.CPU).config.with_


def test_auto_needs_somebody_who_finds_it(box):
    run = golden_run(box, sets=["batch.micro_tokens=auto"])
    with pytest.raises(ConfigError, match="no technique here finds it"):
        decide(run, [t for t in ALL if Part.MICRO_BATCH not in t.claims])


def test_auto_runs(box):
    run = golden_run(box, packed=True, sets=["batch.micro_tokens=auto", "train.steps=2"])
    assert fit(RunRequest(decide(run))).code == 0
    written = parse_config((Path(run.output) / "run.yaml").read_text(), "run.yaml")
    assert isinstance(written.batch.micro_tokens, int) and "micro-batch" in written.with_


@pytest.mark.parametrize(
    ("speeds", "peaks", "want"),
    [({1: 100, 2: 100.5, 4: 100.4}, {1: 10, 2: 20, 4: 30}, 4),
     ({1: 100, 2: 100.5, 4: 100.4}, {1: 10, 2: 20, 4: 79}, 2), ({1: 100, 2: 102.5}, {1: 10, 2: 79}, 1),
     ({1: 100, 2: 104}, {1: 10, 2: 79}, 2), ({1: 100, 2: 104, 4: 104}, {1: 10, 2: 78.5, 4: 79}, 2)],
)  # fmt: skip
def test_rows_with_room_to_spare(speeds, peaks, want):
    """Of 80 GB, some 76 GiB of which a peak may have."""
    fitting = [(speed, rows) for rows, speed in speeds.items()]
    card = hardware.NAMED["h100"]
    rows = fastest_rows(fitting, lambda n: peaks[n] * 0.95 * 2**30 / room(card), card)
    assert rows == want
    half = dataclasses.replace(hardware.CPU, memory_bytes=2 << 40)
    assert fastest_rows(fitting, lambda n: peaks[n] / 200, half) == min(
        n for n, speed in speeds.items() if speed >= 0.99 * max(speeds.values())
    )
    assert fastest_rows(fitting, lambda n: 0.4 + peaks[n], half) == 1, "none leaves half of the memory: the smallest"
