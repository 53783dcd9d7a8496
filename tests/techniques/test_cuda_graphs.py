"""A recorded window: equal bits with the plain one, from a recording that knows addresses and nothing else.

No CPU has such graphs, so a tape stands in: it notes every operator that the window runs, and later runs them again on
the very same memory, with every number as it was on the host. What is no tensor cannot change between two windows.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshes import further
from optrush.config import parse_config
from optrush.data.batch import Batch
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import NAMED
from optrush.technique import Part, instantiate
from optrush.techniques import ALL
from optrush.techniques.cuda_graphs import APART, Window, capture, tensors
from optrush.trainer import dpo_reference
from optrush.trainer.metrics import Meter
from optrush.trainer.trainer import evaluate

from golden.make_golden import T
from trials import assembled, golden_run, steps, weights, wire

READS = ("_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero")  # operators that ask the device


class Tape(TorchDispatchMode):
    """Notes operators with their arguments and results; `play` runs them again into the same results."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        assert name not in READS, f"{name} reads the device inside the window"
        out = function(*args, **(kwargs or {}))
        self.notes.append((function, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, out in self.notes:
                for old, new in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


def taped(function, forget):
    """As `recorded` does it: warm up, then record; the recording itself computes nothing that counts."""
    for _ in range(2):
        function()
        forget()
    with Tape() as tape:
        function()
    return tape.play, 1 << 20


def windowed(trainer, record=taped) -> Window:
    """What `finish` does, with another recorder."""
    trainer.forward_backward = Window(trainer, record)
    return trainer.forward_backward


def played(job, n=4):
    return list(steps(job, n)), weights(job)


SETS = [
    {}, {"attention": {}, "fused_loss": {"chunk": 32}, "fused_adamw": {}}, {"amp": {"dtype": "fp16"}},
    {"bf16": {}, "attention": {}},
]  # fmt: skip


@pytest.mark.parametrize("with_", further(SETS[1:] + SETS[:1], 1), ids=str)
@pytest.mark.parametrize("packed", further([False, True], 1))
def test_equal_bits_over_four_steps(box, packed, with_):
    """Two micro-batches a step, other documents and another number of targets each time."""
    run = golden_run(box, rows=4, packed=packed, **with_)
    want, want_weights = played(assembled(run))
    job = assembled(run)
    window = windowed(job)
    found, found_weights = played(job)
    assert window.replay is not None and job.outside_bytes == 1 << 20
    assert found == want, "losses, norms and skips"
    assert all(torch.equal(found_weights[name], w) for name, w in want_weights.items())


def test_what_a_window_leaves_stays_right(box):
    """Gradients are there after it, gone after the update, and there again; a loss outlives the next window."""
    job = assembled(golden_run(box, rows=4, packed=True))
    windowed(job)
    found = []
    for _ in range(3):
        batches = next(job.batches)
        found.append(job.forward_backward(batches, sum(b.n_terms for b in batches)))
        assert all(t.grad is not None for t in job.trained) and bool(job.loss_is_finite)
        job.optimizer_step()
        assert all(t.grad is None for t in job.trained)
    assert len({loss.item() for loss in found}) == 3


def test_it_may_be_called_again(box):
    job = assembled(golden_run(box, rows=4, packed=True))
    windowed(job)
    batches = next(job.batches)
    first = job.forward_backward(batches, 100)
    grads = [t.grad.clone() for t in job.trained]
    assert torch.equal(first, job.forward_backward(batches, torch.tensor(100.0)))
    assert all(torch.equal(a, t.grad) for a, t in zip(grads, job.trained))


def test_another_shape_runs_as_it_is(box):
    """Fewer micro-batches or rows, and evaluation: none of them is recorded, all are right."""
    job, plain = (
        assembled(golden_run(box, rows=4, packed=True, sets=[f"data.eval={box}/held.jsonl"])) for _ in range(2)
    )
    window = windowed(job)
    batches = next(job.batches)
    for part in (batches[:1], [narrow(b) for b in batches], []):
        terms = max(1, sum(b.n_terms for b in part))
        assert torch.equal(job.forward_backward(part, terms), plain.forward_backward(part, terms))
        assert window.replay is None
    job.forward_backward(batches, 100)
    assert window.replay is not None
    replay, window.replay = window.replay, lambda: pytest.fail("replayed")
    other = [dataclasses.replace(b, documents=b.documents._replace(single=True)) for b in batches]
    assert torch.equal(job.forward_backward(batches[:1], 50), plain.forward_backward(batches[:1], 50))
    job.forward_backward(other, 100)  # another value that the recording holds
    assert evaluate(job) == evaluate(plain)
    window.replay = replay
    assert torch.equal(job.forward_backward(batches, 100), plain.forward_backward(batches, 100))


def test_two_windows_of_another_kind_are_recorded_anew(box):
    run = golden_run(box, rows=4, packed=True)
    job, plain = assembled(run), assembled(run)
    window = windowed(job)
    batches = next(job.batches)
    job.forward_backward(batches, 100)
    first = window.replay
    more = [
        dataclasses.replace(
            b, documents=b.documents._replace(starts=torch.cat((b.documents.starts, b.documents.starts[-1:])))
        )
        for b in batches
    ]
    for given, other in ((more, False), (batches, False), (more, False), (more, True), (more, True)):
        assert torch.equal(job.forward_backward(given, 50), plain.forward_backward(given, 50))
        assert (window.replay is not first) == other
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(job.trained, plain.trained, strict=True))


def narrow(batch: Batch) -> Batch:
    ids = batch.documents.ids[:2]
    documents = batch.documents._replace(starts=batch.documents.starts.clamp_max(2 * T), ids=ids)
    parts = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = (t[:2] for t in parts)
    return dataclasses.replace(batch, tokens=tokens, labels=labels, positions=positions, documents=documents)


def test_it_resumes_with_equal_bits(box):
    """Weights and states of step 2 put into a fresh job, whose own recording then goes on."""
    run = golden_run(box, rows=4, packed=True, fused_adamw={})
    job = assembled(run)
    windowed(job)
    want = list(steps(job, 4))
    first = assembled(run)
    windowed(first)
    list(steps(first, 2))
    second = assembled(run)
    wire(second)
    windowed(second)
    for _ in range(2):
        next(second.batches)
    with torch.no_grad():
        for a, b in zip(first.trained, second.trained, strict=True):
            b.local.copy_(a.local)
        for name, states in first.optimizer.state().items():
            for key, value in states.items():
                second.optimizer.state()[name][key].copy_(value)
    assert list(steps(second, 2, first=3)) == want[2:]


def test_what_a_recording_holds_counts(box):
    """Metrics count it beside what torch counts."""
    job = assembled(golden_run(box, rows=4, packed=True))
    before = Meter(job, None, 1, lambda _: None).memory()["peak_bytes"]
    job.outside_bytes = 1 << 40
    assert Meter(job, None, 1, lambda _: None).memory()["peak_bytes"] >= before + (1 << 40)


def test_batches_of_others_are_not_written_to(box):
    job = assembled(golden_run(box, rows=4, packed=True))
    windowed(job)
    kept = [next(job.batches) for _ in range(3)]
    copies = [[[t.clone() for t in tensors(b)] for b in batches] for batches in kept]
    for batches in kept:
        job.forward_backward(batches, 100)
    for batches, before in zip(kept, copies):
        for b, own in zip(batches, before):
            assert all(map(torch.equal, tensors(b), own))


def test_the_tape_sees_what_is_no_tensor(box):
    """With the divisor left on the host the bits differ: the proof above can fail."""
    run = golden_run(box, rows=4, packed=True)
    want, _ = played(assembled(run), 3)
    job = assembled(run)
    plain = job.forward_backward
    job.forward_backward = lambda batches, terms: plain(batches, int(terms.tolist()))
    windowed(job)
    found, _ = played(job, 3)
    assert found[0] == want[0] and found[1] != want[1]


def test_the_tape_sees_who_asks_the_device(box):
    job = assembled(golden_run(box, rows=4, packed=True))
    loss = job.loss
    job.loss = lambda batch: loss(batch) * (1.0 if loss(batch).item() else 2.0)
    windowed(job)
    with pytest.raises(AssertionError, match="_local_scalar_dense reads the device"):
        next(steps(job, 1))


def test_moved_weights_are_seen(box):
    job = assembled(golden_run(box, rows=4, packed=True))
    windowed(job)
    list(steps(job, 1))
    job.trained[0].parameter.data = job.trained[0].parameter.data.clone()
    with pytest.raises(AssertionError, match="weights have moved"):
        list(steps(job, 1, first=2))


# What it refuses.


@pytest.mark.parametrize("part", [part for part, _, _ in APART], ids=lambda p: p.name)
def test_whose_owner_it_does_not_go_with(box, part):
    technique = instantiate(ALL, {"cuda-graphs": {}})[0]
    env = decide(golden_run(box), device=NAMED["h200"]).env
    owned = dataclasses.replace(env, claimed=frozenset({part}))
    assert [n.met for n in technique.needs(env)].count(False) == 0
    assert [n.met for n in technique.needs(owned)].count(False) == 1


def test_with_compiled_blocks_on_a_gpu(box):
    """The width that compile owns is one; what it starts is in the graph, and so is priced once."""
    run = golden_run(box, packed=True, compile={}, cuda_graphs={})
    env = decide(run, device=NAMED["h200"]).env
    assert {Part.CAPTURE, Part.COMPILED, Part.ROW_WIDTH} <= env.claimed


def test_a_refusal_of_the_device_has_three_parts():
    def refused():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def short():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(NeedsError, match="not permitted when stream is capturing\n") as caught:
        capture(refused, nullcontext())
    assert "--without cuda-graphs" in caught.value.do
    with pytest.raises(torch.OutOfMemoryError):
        capture(short, nullcontext())


CODES = {"lora": {}, "nf4": {}}  # adapters over 4 bits


@pytest.mark.parametrize(
    ("objective", "with_"),
    further([("dpo", CODES), ("orpo", {}), ("simpo", {}), ("reward", CODES), ("kto", {}), ("dpo", {}),
             ("orpo", CODES), ("simpo", CODES), ("reward", {}), ("kto", CODES)], 5),
    ids=str,
)  # fmt: skip
def test_preferences_are_recorded(objective: str, with_: dict, box, tmp_path) -> None:
    """No window reads the device, and each is what the plain one is: a plan chooses recordings for pairs, too."""
    pairs = [{"prompt": f"w{i} w2 ", "chosen": f"w3 w4 w{i}", "rejected": "w5"} for i in range(16)]
    if objective == "kto":
        pairs = [{"prompt": p["prompt"], "completion": p["chosen"], "label": i % 3 == 0} for i, p in enumerate(pairs)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))

    def run(**more):
        text = {
            "model": str(box / "untied"), "objective": objective,
            "data": {"path": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")},
            "batch": {"seq": 32, "tokens": 128, "micro_tokens": 64},
            "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
            "train": {"steps": 4, "log_every": 1}, "output": str(tmp_path / "out"), "with": {**with_, **more},
        }  # fmt: skip
        prepared = decide(parse_config(json.dumps(text), "run.yaml"))
        job = assembled(prepared)
        if prepared.config.referenced is not None:
            dpo_reference.fill_reference(job, prepared)
        return job

    want, _ = played(run(), 3)
    window = windowed(job := run())
    found, _ = played(job, 3)
    assert window.replay is not None and found == want
