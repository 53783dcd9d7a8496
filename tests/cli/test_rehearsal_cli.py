"""What a user sees of the rehearsal and of `micro_tokens: auto`."""

import pytest
import torch

from optrush.config import parse_config
from optrush.trainer import run

from clirun import metrics

AUTO = {"tokens": 512, "micro_tokens": "auto"}


def test_auto(call, write, here):
    """It trains; the folder's run.yaml has the number and is itself runnable, with the same losses."""
    found = call("train", write(batch=AUTO, train={"steps": 2}))
    assert found.code == 0, found.err
    assert "micro-batch: 3 changes" in found.err
    written = parse_config((here / "out" / "run.yaml").read_text(), "run.yaml")
    assert isinstance(written.batch.micro_tokens, int) and 512 % written.batch.micro_tokens == 0
    assert written.with_["micro-batch"] == {}
    assert call("train", "out/run.yaml", "--set", "output=again").code == 0
    losses = [[line["loss"] for line in metrics(here / name) if "loss" in line] for name in ("out", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_plan_and_dry_run_take_auto(call, write, here):
    config = write(batch=AUTO)
    for command in (("plan", config, "--hardware", "cpu"), ("train", config, "--dry-run")):
        found = call(*command)
        assert found.code == 0, found.err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("micro", "way"),
    [(256, "set batch.micro_tokens: 128, or auto; or --with recompute"), (128, "--with recompute; or")],
)
def test_what_does_not_fit(call, write, here, monkeypatch, micro, way):
    """Exit code 2, three lines, and nothing was written."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has 1.00 GiB free.")

    monkeypatch.setattr(run, "_largest_step", full)
    found = call("train", write(batch={"micro_tokens": micro}))
    assert found.code == 2
    assert f"micro-batches of {micro // 128} row" in found.err and "out of memory, before step 0: CUDA out" in found.err
    assert "Tried to allocate 3.00 GiB" in found.err and way in found.err
    assert not (here / "out").exists()
