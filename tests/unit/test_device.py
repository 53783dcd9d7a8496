"""How a process sets its device up."""

from __future__ import annotations

import pytest
import torch

from optrush.trainer import distributed


@pytest.mark.parametrize("name", [None, *distributed.CHOSEN])
def test_segments_grow_unless_somebody_chose(monkeypatch, name):
    at, asked = [], []
    for variable in (*distributed.CHOSEN, "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "set_device", at.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    assert distributed.join("cuda") == torch.device("cuda", 0)
    assert at == [torch.device("cuda", 0)] and asked == ([] if name else ["expandable_segments:True"])
    assert distributed.join("cpu") == torch.device("cpu") and len(at) == 1, "a CPU has neither"


def test_one_process_is_alone(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    world = distributed.build_mesh({}, torch.device("cpu"))
    assert (world.rank, world.ranks, world.mesh) == (0, 1, None)
