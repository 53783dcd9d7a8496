"""A smaller card: the plan counts on it, the allocator is told of it; what no device can be capped to is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from optrush import config, hardware
from optrush.decide import decide, resized
from optrush.errors import NeedsError
from optrush.planner import cost, search
from optrush.techniques.memory_cap import MemoryCap

from trials import golden_run

TEXT = """
model: {shape: llama-3.2-1b}
objective: pretrain
data: {random: 8}
batch: {tokens: 65536, micro_tokens: auto}
output: o
with: {bf16: {}, attention: {}, compile: {}, fused-loss: {}}
"""
H200 = hardware.NAMED["h200"]


def run(*withs, **batch):
    return config.parse_config(TEXT, "x", [f"batch.{k}={v}" for k, v in batch.items()], withs)


@pytest.mark.parametrize(("cap", "size_bytes"), [("mib=20000", 20000 << 20), ("fraction=0.25", H200.memory_bytes // 4)])
def test_the_plan_sees_the_smaller_card(cap, size_bytes):
    sets = {"micro_tokens": 65536}
    whole, capped = search.predict(run(**sets), "h200"), search.predict(run(f"memory-cap:{cap}", **sets), "h200")
    assert whole.fits and not capped.fits and whole.peak_bytes == capped.peak_bytes
    assert capped.capacity_bytes == size_bytes
    assert capped.room_bytes == int(cost.room(dataclasses.replace(H200, memory_bytes=size_bytes)))
    assert capped.tokens_per_s == whole.tokens_per_s, "it is the same device otherwise"


def test_the_micro_batch_goes_by_it():
    whole, capped = (decide(run(*w), device=H200).env for w in ([], ["memory-cap:mib=16000"]))
    assert capped.micro_rows < whole.micro_rows and capped.device.memory_bytes == 16000 << 20


def test_no_search_leaves_it_out():
    """Three techniques for a quick one; each setting that is found has it, and fits under it."""
    classes = [c for c in search.ALL if c.name in ("bf16", "recompute", "memory-cap")]
    found = search.search(
        run("memory-cap:mib=30000").model_copy(update={"with_": {"memory-cap": {"mib": 30000}}}), "h200", classes
    )
    assert found.settings and all(s.with_["memory-cap"] == {"mib": 30000} for s in found.settings)
    assert all(s.prediction.capacity_bytes == 30000 << 20 and s.prediction.fits for s in found.settings)
    free = search.search(run().model_copy(update={"with_": {}}), "h200", classes)
    assert not any("memory-cap" in s.with_ for s in free.settings)


@pytest.mark.parametrize(
    ("withs", "device", "found", "do"),
    [("memory-cap:mib=100", hardware.CPU, "a CPU only", "use such a device"),
     ("memory-cap", H200, "neither `fraction` nor `mib`", "exactly one"),
     ("memory-cap:mib=9000,fraction=0.5", H200, "`fraction: 0.5` and `mib: 9000`", "exactly one"),
     ("memory-cap:mib=900000", H200, "NVIDIA H200 has 143155 MiB", "take less"),
     ("memory-cap:mib=700", H200, "800 MiB are for the CUDA context", "take more")],
)  # fmt: skip
def test_what_is_refused(withs, device, found, do):
    with pytest.raises(NeedsError) as caught:
        decide(run(withs), device=device)
    assert "`memory-cap`" in caught.value.asked and found in caught.value.found and do in caught.value.do


def test_the_allocator_is_told(monkeypatch):
    """Of each rank's own device, less what the plan takes for the context."""
    said = []
    total = H200.memory_bytes + (1 << 20)  # as torch counts it
    card = type("Card", (), {"total_memory": total})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, at: said.append((share, at)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for cap in (MemoryCap(mib=24000), MemoryCap(fraction=0.5)):
        env = decide(run(), device=H200).env
        capped = dataclasses.replace(env, device=cap.card(env.device))
        assert cap.process(capped) == 1
    assert said == [
        (pytest.approx(((24000 - 800) << 20) / total), 3),
        (pytest.approx((H200.memory_bytes // 2 - (800 << 20)) / total), 3),
    ]


def test_a_fraction_is_of_the_whole_card_when_the_micro_batch_changes(box):
    """Not of what was left of it the first time, which would be less than the CUDA context."""
    run = golden_run(box, memory_cap={"fraction": 0.07})
    h200 = hardware.parse_hardware("h200")[0]
    prepared = decide(run, device=h200)
    again = resized(prepared, 1)
    assert again.env.micro_rows == 1 and again.env.device == prepared.env.device
