"""R10: updates that are not finite are skipped on every rank, counted, and end the run when they keep coming."""

import json

import pytest
import torch
from safetensors.torch import load_file

from meshes import further
from optrush.trainer import build, run
from optrush.trainer.checkpoint import find_checkpoints, verify

from harness import told
from runs import configuration, figures, lines, said, trained, trained_on


def firsts(home):
    """The first sample of each step of the reference."""
    found: dict[int, int] = {}
    for n, taken in map(json.loads, (home / "reference.samples").read_text().splitlines()):
        found.setdefault(n, taken[0])
    return found


def poisoning(home, bad, where):
    """In these steps, one micro-batch of one rank (the one with the reference's first sample) is not finite."""

    def before():
        begin, loss, first, at = run.set_step, build.loss, firsts(home), {"step": 0}

        def stepping(job, n, steps):
            at["step"] = n
            begin(job, n, steps)

        def poisoned(job, batch):
            found = loss(job, batch)
            if at["step"] in bad and first[at["step"]] in batch.samples and torch.is_grad_enabled():
                if where == "loss":
                    found = found * float("inf")
                else:
                    found.register_hook(lambda g: g * float("nan"))
            return found

        run.set_step, build.loss = stepping, poisoned

    return before


def every_number_is_finite(output):
    return all(
        bool(torch.isfinite(t).all())
        for path in find_checkpoints(output)
        for shard in path.glob("*.safetensors")
        for t in load_file(shard).values()
        if t.is_floating_point()
    )


def tensors(output, n):
    path = output / "checkpoints" / f"step-{n:06d}"
    return {f"{f.name} {k}": t for f in path.glob("*.safetensors") for k, t in load_file(f).items()}


CASES = [
    (1, {"fused-adamw": {}}, "loss"), (2, {"fsdp": {}}, "gradient"), (1, {}, "loss"), (2, {"ddp": {}}, "loss"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "techniques", "where"), further(CASES, 2))
def test_one_bad_micro_batch(home, ranks, techniques, where):
    """The update is skipped everywhere and counted; weights, moments and counts are as before it, to the bit."""
    output = home / f"one-{ranks}-{'-'.join(techniques)}-{where}"
    changes = {"with": {"packing": {}, **techniques}, "train__save_every": 1, "train__keep": 12, "train__steps": 6}
    config = configuration(home, output, **changes)
    before = poisoning(home, {3, 5}, where)
    codes = trained_on(ranks, config, before=before) if ranks > 1 else [trained(config, before=before)]
    assert codes == [0] * ranks, said(config)
    assert [f["skipped"] for f in figures(output)] == [0, 0, 1, 1, 2, 2]
    assert [f["grad_norm"] is None for f in figures(output)] == [False, False, True, False, True, False]
    for n in (3, 5):
        then, now = tensors(output, n - 1), tensors(output, n)
        assert then.keys() == now.keys() and all(torch.equal(then[k], now[k]) for k in then)
        assert any(not torch.equal(t, tensors(output, n + 1)[k]) for k, t in now.items())
    assert [verify(p).skipped for p in find_checkpoints(output)] == [2, 2, 1, 1, 0, 0]
    assert every_number_is_finite(output)
    told("R10", 1, f"{ranks} ranks, {techniques}, in the {where}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_three_in_a_row_end_the_run(home, ranks):
    """Exit 1, naming the steps and samples; the newest checkpoint is from before, and finite."""
    output = home / f"three-{ranks}"
    techniques = {"packing": {}, **({"ddp": {}} if ranks > 1 else {})}
    config = configuration(home, output, **{"with": techniques}, train__save_every=2)
    before = poisoning(home, {2, 5, 6, 7}, "loss")
    codes = trained_on(ranks, config, before=before) if ranks > 1 else [trained(config, before=before)]
    assert codes == [1] * ranks, said(config)
    assert "steps 5, 6, 7" in said(config) and "Traceback" not in said(config)
    assert f"step 7: {firsts(home)[7]}" in said(config)
    assert figures(output)[-1]["step"] in (7, 8) and find_checkpoints(output)[0].name == "step-000006"
    assert every_number_is_finite(output)
    if ranks == 1:  # two of the three lie before the checkpoint: going on does not forget them
        assert trained(config, "--resume", "auto", before=poisoning(home, {7}, "loss")) == 1
        assert trained(config, "--resume", "auto") == 0, "and without the fault it goes on to the end"
        assert figures(output)[-1] | {"loss": 0} == figures(output)[-1] | {"loss": 0, "step": 12, "skipped": 3}


def test_a_real_overflow(home):
    """A learning rate of 1e20: after the first update float32 overflows in the forward pass, and stays so."""
    output = home / "overflow"
    config = configuration(home, output, optim__lr=1e20, optim__warmup=0, train__save_every=1, train__keep=9)
    assert trained(config) == 1, said(config)
    assert "not finite" in said(config) and "steps 2, 3, 4" in said(config) and "do:    lower optim.lr" in said(config)
    found = figures(output)
    assert found[0]["skipped"] == 0 and found[1]["loss"] is None and found[1]["skipped"] == 1
    assert find_checkpoints(output) and every_number_is_finite(output)
    first, last = tensors(output, 1), tensors(output, verify(find_checkpoints(output)[0]).step)
    assert all(torch.equal(first[k], last[k]) for k in first)
    assert max(float(t.abs().max()) for k, t in first.items() if "param/" in k) > 1e18
    told("R10", 1, "float32 overflow: no weight moved after it")


def test_a_real_overflow_in_fp16(home):
    """With fp16 products the first scale overflows; it halves, the update is skipped, and the run goes on."""
    output = home / "fp16"
    config = configuration(home, output, **{"with": {"packing": {}, "amp": {"dtype": "fp16"}}}, train__save_every=1)
    model = load_file(home / "model" / "model.safetensors")
    assert "lm_head.weight" in model
    assert trained(config, before=_large_scale) == 0, said(config)
    found = figures(output)
    skipped = found[-1]["skipped"]
    assert 0 < skipped < 12 and found[-1]["grad_norm"] is not None
    manifest = verify(find_checkpoints(output)[0])
    assert manifest.state["amp"]["scale"] == 2.0**24 / 2**skipped
    assert every_number_is_finite(output)
    told("R10", skipped, "fp16 updates skipped while the scale came down from 2^24")


def _large_scale():
    from optrush.techniques import amp

    amp.FIRST_SCALE = 2.0**24


def test_not_finite_in_evaluation_is_no_reason_to_stop(home):
    output = home / "eval"
    config = configuration(home, output, data__eval=0.1, train__eval_every=6)

    def before():
        losses = build.eval_loss
        calls = {"n": 0}

        def poisoned(job, batches):
            calls["n"] += 1
            found = losses(job, batches)
            return found * float("nan") if calls["n"] == 2 else found  # the first is the rehearsal's

        build.eval_loss = poisoned

    assert trained(config, before=before) == 0, said(config)
    evals = [m["eval_loss"] for m in lines(output) if "eval_loss" in m]
    assert evals[0] is None and all(e is not None for e in evals[1:]) and len(evals) >= 2
    assert figures(output)[-1]["skipped"] == 0
