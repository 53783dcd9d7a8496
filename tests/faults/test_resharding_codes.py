"""Moments that are codes, over ranks: what 1 rank saved goes on over 2 and 4 (uneven rows), and back, to the bit."""

import pytest

from optrush.optim.adam8bit import Adam4bit, Adam8bit
from optrush.trainer.checkpoint import find_checkpoints, restore, save

import harness
from harness import advance, holds, meta, ranks, run, small_job


@pytest.mark.parametrize("kind", [Adam8bit, Adam4bit])
def test_codes_are_cut_like_rows(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(harness.SHAPES, "embed", (65, 129))  # odd rows, odd columns, two blocks of 128 and one of 256

    def coded(how):
        job = small_job(tmp_path, how)
        job.optimizer = kind(job.trained, job.config.optim)
        assert "mean_scale" in job.optimizer.state()["embed"]
        return job

    def moved(n, before):
        """Loads what `before` ranks saved and saves it again."""
        job = coded("rows" if n > 1 else "whole")
        if before:
            restore(job, find_checkpoints(tmp_path / str(before))[0], {})
        else:
            advance(job, 2)
        job.config = job.config.model_copy(update={"output": str(tmp_path / f"{n}")})
        good = holds(job, 2)
        save(job, 2, meta(2))
        return good

    assert run(lambda: not moved(1, 0)) == 0
    for n, before in ((2, 1), (4, 2)):
        assert ranks(n, lambda n=n, before=before: moved(n, before)) == [True] * n
    job = coded("whole")
    restore(job, find_checkpoints(tmp_path / "4")[0], {})
    assert holds(job, 2)
    job.optimizer.state()["embed"]["mean"][-1, -1] ^= 16
    assert not holds(job, 2), "half a byte would be seen"
