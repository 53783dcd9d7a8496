"""`train.save: async` on a GPU: what is written is the step that was saved, whatever follows on the device."""

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from optrush.config import parse_config
from optrush.hardware import HostMemory
from optrush.optim.adamw import AdamW
from optrush.trainer.checkpoint import Meta, Saver, find_checkpoints, slices, verify
from optrush.trainer.distributed import World
from optrush.trainer.trainer import Storage, TrainedParam

DEVICE = torch.device("cuda")
SHAPES = {"wide": (4096, 4096), "norm": (4097,), "one": ()}


def test_the_copy_is_of_the_step_that_was_saved(tmp_path):
    text = f"{{model: tiny, objective: sft, data: {{random: 8}}, output: '{tmp_path}', train: {{save: async}}}}"
    config = parse_config(text, "test")
    kinds = {"norm": torch.bfloat16}
    tensors = {n: torch.zeros(s, device=DEVICE, dtype=kinds.get(n, torch.float32)) for n, s in SHAPES.items()}
    trained = [TrainedParam(name, nn.Parameter(t), True) for name, t in tensors.items()]
    optimizer = AdamW(trained, config.optim, fused=False)
    job: Any = SimpleNamespace(
        config=config, world=World(0, 1, DEVICE), trained=trained, optimizer=optimizer, state={},
        counts=lambda t: True, storage=Storage(), host_memory=HostMemory(None),
    )  # fmt: skip
    saver, results = Saver(job), []
    saver.settled = lambda step, failure: results.append((step, failure))
    assert saver.host is not None and saver.host.page.is_pinned() == (DEVICE.type == "cuda")
    for step in (2, 4):
        for s in slices(job):
            s.local.normal_()
        before = {s.name: s.local.clone() for s in slices(job)}
        saver.save(step, Meta("00ff", position=step))
        for s in slices(job):  # the next update, right behind the copies on the stream
            s.local.zero_()
        saver.settle(wait=True)
        found = load_file(find_checkpoints(tmp_path)[0] / "rank-0.safetensors")
        assert found.keys() == before.keys() and verify(find_checkpoints(tmp_path)[0]).step == step
        assert all(torch.equal(found[name], t.cpu()) for name, t in before.items())
    assert results == [(2, None), (4, None)]
