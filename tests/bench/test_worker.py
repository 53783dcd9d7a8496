"""What one process measures: the proof's documents, batches and steps, and the state that timing begins with."""

import dataclasses
from pathlib import Path

import pytest
import torch

from optrush.benchmark import record, results, worker
from optrush.benchmark.worker import sketch
from optrush.data.schema import Document
from optrush.decide import decide
from optrush.planner.cost import PARTS
from optrush.report.bench import GAPS
from optrush.technique import Part
from optrush.trainer.trainer import RunPlan

from toy import parsed as run


def job_of(of):
    from optrush.trainer.build import build

    return build(decide(of))


def proof_of(of, baseline, count=3, steps=3):
    trainer = job_of(of)
    documents = worker.first_documents(trainer, decide(of), baseline, count)
    widest = RunPlan(trainer, trainer.stream.plan(None, 3)).length.widest
    laid = worker.lay_out(trainer, documents, most=widest)
    return trainer, worker.proof_losses(trainer, laid, steps)


def test_the_proof_is_the_same_in_every_layout():
    """Micro-batches of one, two and eight rows, longer rows, packed rows: the same documents, the same losses."""
    base = run(batch={"seq": 64, "tokens": 64})
    _, wanted = proof_of(base, base)
    others = [
        run(),
        run(batch={"seq": 64, "tokens": 512, "micro_tokens": 512}),
        run(batch={"seq": 128, "tokens": 256, "micro_tokens": 256}),
        run(batch={"seq": 256, "tokens": 256}, **{"with": {"packing": {}}}),
        run(model={"path": "toy", "implementation": "transformers"}),
    ]
    for other in others:
        _, found = proof_of(other, base)
        for series, tolerance in (("losses", 1e-5), ("grad_norms", 1e-4)):
            assert found[series] == pytest.approx(wanted[series], rel=tolerance), other.batch
        assert results.cosine(found["gradient"], wanted["gradient"]) == pytest.approx(1, abs=1e-9), other.batch
    assert wanted["losses"][0] > wanted["losses"][-1]  # it learns


def test_stages_of_a_pipeline_get_whole_windows():
    """Fewer micro-batches than stages are no window: empty ones fill it up."""
    base = run(batch={"seq": 64, "tokens": 256, "micro_tokens": 64})
    trainer = job_of(base)
    documents = worker.first_documents(trainer, decide(base), base, 1)
    assert len(worker.lay_out(trainer, documents, most=2)) == 1
    trainer.env = dataclasses.replace(trainer.env, claimed=trainer.env.claimed | {Part.PP})
    assert trainer.env.accumulation == 4
    laid = worker.lay_out(trainer, documents, most=2)
    assert [b.n_tokens > 0 for b in laid] == [True, False, False, False]


def test_the_proofs_gradient_is_the_first():
    """Of the weights as they begin; in bf16 later ones differ by what is rounded away."""
    base = run()
    trainer = job_of(base)
    laid = worker.lay_out(trainer, worker.first_documents(trainer, decide(base), base, 3), most=2)
    trainer.forward_backward(laid, trainer.all_reduce_terms(sum(b.n_terms for b in laid)))
    assert worker.proof_losses(job_of(base), laid, 3)["gradient"] == sketch(trainer)


def test_timing_begins_where_the_proof_began():
    base = run(**{"with": {"amp": {"dtype": "fp16"}, "fused-adamw": {}}})
    trainer = job_of(base)
    start = worker.InitialState(trainer)
    weights = [t.local.clone() for t in trainer.trained]
    kept = trainer.state["amp"].save()
    documents = worker.first_documents(trainer, decide(base), base, 2)
    trainer.scale.fill_(2.0)
    worker.proof_losses(trainer, worker.lay_out(trainer, documents, most=2), 2)
    assert not all(torch.equal(t.local, w) for t, w in zip(trainer.trained, weights))
    start.restore()
    assert all(torch.equal(t.local, w) for t, w in zip(trainer.trained, weights))
    assert not any(s.any() for states in trainer.optimizer.state().values() for s in states.values())
    assert trainer.state["amp"].save() == kept and trainer.scale.item() == kept["scale"]


def test_the_same_batches_as_training_has():
    """Compiled code must not see another shape in the proof than in the timed steps."""
    base = run(**{"with": {"packing": {}}, "batch": {"seq": 128, "tokens": 256, "micro_tokens": 256}})
    trainer = job_of(base)
    plan = trainer.stream.plan(None, 3)
    trained = trainer.stream.batches(0, plan, rank=0, ranks=1, micro_rows=2)[0]
    (document,) = trainer.stream.source.documents(0)
    (laid,) = worker.lay_out(trainer, [(0, document)], most=plan.widest)
    assert laid.tokens.shape == trained.tokens.shape
    assert laid.documents.starts.shape == trained.documents.starts.shape
    short = Document(document.ids[:5], document.targets[:5])
    crowded = worker.lay_out(
        trainer, [(i, short) for i in range(6)], most=1
    )  # more than the rung's own batches ever hold
    assert sum(b.n_tokens for b in crowded) == 30


def test_documents_are_the_baselines():
    base, longer = run(), run(batch={"seq": 128, "tokens": 128})
    trainer = job_of(longer)
    found = worker.first_documents(trainer, decide(longer), base, 2)
    assert [len(d) for _, d in found] == [64, 64]
    same = job_of(base)
    first = same.stream.step(0, same.stream.plan(steps=1))[0][0][0]
    assert worker.first_documents(same, decide(base), base, 2)[0][0] == first
    assert worker.proof_window(trainer, found, 1)[1] is None
    note = worker.proof_window(same, worker.first_documents(same, decide(base), longer, 2), 1)[1]
    assert note == "no proof: the baseline's documents have up to 128 tokens, a row here has 64"


def test_a_model_that_drops_at_random_proves_nothing():
    base = run(model={"path": "toy", "implementation": "transformers"})
    trainer = job_of(base)
    trainer.model.config.attention_dropout = 0.1  # type: ignore[union-attr]
    note = worker.proof_window(trainer, worker.first_documents(trainer, decide(base), base, 2), 1)[1]
    assert note is not None and "attention_dropout" in note


def test_a_measurement():
    """With a proof and parts; without a warm-up, steps compile and have no parts."""
    base = run()
    found = worker.measure(base, base, warmup=1, proof_steps=2, proof_documents=2)
    assert [len(found[k]) for k in ("step_s", "tokens_per_s", "losses")] == [2, 2, 3]
    assert len(found["proof"]["losses"]) == len(found["proof"]["grad_norms"]) == 2 and found["proof"]["note"] is None
    assert found["peak_bytes"] > 0 and found["memory_kind"] == "rss" and found["mfu"] is None
    assert found["tokens_per_s"][0] == pytest.approx(128 / found["step_s"][0])
    assert set(found["parts_s"]) == {*PARTS, GAPS} and "parts_note" not in found
    assert all(found["parts_s"][part] > 0 for part in ("products", "head", "elementwise", "optimizer"))
    found = worker.measure(run(train={"steps": 1, "log_every": 1}), base, 0, 0, 0)
    assert found["proof"] == {"losses": [], "grad_norms": [], "note": worker.UNPROVED} and "parts_s" not in found
    assert len(found["step_s"]) == 1 and found["seen"]["trained parameters"] == "254,528"
    assert found["micro_tokens"] == 128 and found["host_peak_bytes"] > 0
    assert not Path("never-written").exists()


def test_documents_of_several_micro_batches_prove_nothing_of_who_updates_in_each():
    alone = {"seq": 64, "tokens": 64, "micro_tokens": 64}
    one = run(batch=alone, optim={"clip": None}, **{"with": {"fused-adamw": {}, "update-in-backward": {}}})
    found = worker.measure(one, one, warmup=0, proof_steps=2, proof_documents=2)
    assert found["proof"]["note"] == (
        "no proof: the baseline's documents take 2 micro-batches, and this rung updates after each"
    )
    assert found["proof"]["losses"] == [] and len(found["step_s"]) == 3
    proved = worker.measure(one, one, warmup=0, proof_steps=2, proof_documents=1)
    assert proved["proof"]["note"] is None and len(proved["proof"]["again"]["losses"]) == 1
    assert proved["losses"] == pytest.approx(found["losses"], rel=1e-6), "the proof leaves nothing behind"


def test_out_of_memory_is_said():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("can't allocate memory: 9"),
    ):
        assert record.describe_error(error_of(error)).startswith("out of memory: ")
    assert record.describe_error(error_of(ValueError("no"))).startswith("ValueError: no (test_worker.py:")


def error_of(error):
    try:
        raise error
    except Exception as raised:
        return raised
