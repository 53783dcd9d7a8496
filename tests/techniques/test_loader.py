"""Who makes the batches changes no bit of the training, nor where a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshes import further
from optrush.config import dump_config

from trials import assembled, golden_run, steps, wire


@pytest.mark.slow
def test_a_run_with_workers_ends(box):
    """Workers ignore the signal by which the interpreter ends its children."""
    config = box / "loader.yaml"
    config.write_text(
        dump_config(golden_run(box, packed=True, loader={}, sets=["train.steps=2", f"output={box}/ended"]))
    )
    assert subprocess.run([sys.executable, "-m", "optrush", "train", str(config)], timeout=300).returncode == 0


def test_the_batches_come_from_other_processes(box):
    """Equal bits would also come of a loader that does nothing."""
    job = assembled(golden_run(box, packed=True, loader={}))
    made = job.stream.batches
    pids = []

    def told(k, **options):
        found = made(k, **options)
        for batch in found:
            batch.tokens[0, 0] = os.getpid()
        return found

    job.stream.batches = told
    wire(job)
    pids = {next(job.batches)[0].tokens[0, 0].item() for _ in range(4)}
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize("with_", further([{"loader": {"workers": 2}}, {}], 1), ids=["workers", "here"])
def test_streamed_data_trains_alike(box, with_):
    """`data.stream`: the same rows in the same steps, tokenized while training."""
    base = list(steps(assembled(golden_run(box, packed=True)), 4))
    job = assembled(golden_run(box, packed=True, sets=["data.stream=true"], **with_))
    assert not job.stream.tokenized and job.stream.totals(job.stream.plan(steps=8), 1) is None
    for (loss, norm, _), (want, want_norm, _) in zip(steps(job, 4), base, strict=True):
        assert loss == pytest.approx(want, rel=1e-6) and norm == pytest.approx(want_norm, rel=1e-5)
