"""Train one rung with another system, once, in a process of its own: `python -m optrush_peers.worker REQUEST RESULT`.

The initial weights and rows -> the system's own loop, a clock around each step -> RESULT.json, as
optrush.benchmark.worker writes it. There is no proof of what it learns; its first loss, what it trains and in which
precision are compared with ours. torch is imported late: some systems must be imported before it.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrush import hardware
from optrush.benchmark.peer import build_peer
from optrush.benchmark.record import answer_request
from optrush.config import Config, parse_config
from optrush.errors import RunError
from optrush.launch import launched
from optrush.models.shapes import ModelShape
from optrush.technique import library

from optrush_peers import PEERS
from optrush_peers.weights import ensure
from optrush_peers.work import Rows, System, Work

if TYPE_CHECKING:
    from torch import Tensor

# No telemetry during a measurement.
QUIET = {
    "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "WANDB_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def measure(system: System, config: Config, warmup: int) -> dict[str, Any]:
    """Train the run with the system and return its result."""
    device, (rank, ranks) = next(iter(hardware.probe()), hardware.CPU), launched()
    system.check(config, device, ranks)
    os.environ.update(QUIET)
    if ranks == 1:  # one device, as ours: some systems spread a step over all visible devices
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    folder, hf = ensure(config, system.weights, device.kind)
    if system.first is not None:
        importlib.import_module(system.first)
    steps = config.train.steps
    assert steps is not None, "a ladder sets it"
    with tempfile.TemporaryDirectory(prefix="optrush-peer-") as scratch:
        batches = list(rows(config, hf, folder, steps))
        work = Work(config, hf, folder, Path(scratch), batches, device.kind, rank, ranks)
        system.train(work)
        if ranks > 1:
            work.losses = mean_over_ranks(work.losses)
    return result(system, work, device, warmup)


def mean_over_ranks(losses: list[Tensor]) -> list[Tensor]:
    """Return each step's loss of all ranks, which have equally many rows; a system may have left its group."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    stacked = torch.stack(losses).float()
    dist.all_reduce(stacked)
    return list(stacked / dist.get_world_size())


def rows(config: Config, hf: dict[str, Any], folder: Path, steps: int) -> Iterator[Rows]:
    """Yield the first documents of the run in its order, one a row, padded to the longest of a step."""
    import torch

    from optrush.data.dataset import read_sources
    from optrush.data.packing import Padded
    from optrush.data.sampler import Stream
    from optrush.data.tokenizer import open_tokens

    tokens = open_tokens(config, folder if config.model.path else None)
    source = read_sources(config, tokens, int(hf["vocab_size"])).train
    assert source.tokenized, "refused by System.needs"
    T, count = config.batch.seq, config.batch.tokens // config.batch.seq
    stream = Stream(source, Padded(), T=T, rows=count, seed=config.seed)
    plan = stream.plan(steps=steps)
    for k in range(steps):
        documents = [document for row in stream.step(k, plan) for _, document in row]
        lengths = [len(document) for document in documents]
        ids = torch.zeros(len(documents), max(lengths), dtype=torch.int64)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for r, (document, n) in enumerate(zip(documents, lengths)):
            ids[r, :n] = torch.from_numpy(document.ids)
            learnt = torch.from_numpy(document.targets)
            labels[r, :n][learnt] = ids[r, :n][learnt]
            mask[r, :n] = 1
        yield Rows(
            ids, labels, None if mask.all() else mask, sum(lengths), int((labels != -100).sum()),
            sum(n * n for n in lengths),
        )  # fmt: skip


def result(system: System, work: Work, device: hardware.Device, warmup: int) -> dict[str, Any]:
    """Return the result of a finished run, with the keys of optrush.benchmark.worker.

    Raises:
        RunError: the system took another number of steps.
    """
    import torch

    from optrush.benchmark.worker import versions
    from optrush.trainer.metrics import peak_memory, resident

    if len(work.seconds) != len(work.batches):
        raise RunError(f"{system.title} took {len(work.seconds)} steps of {len(work.batches)}")
    timed = list(zip(work.batches, work.seconds))[warmup:]
    losses = [float(loss) for loss in work.losses]
    shape, trained = ModelShape.read(work.hf), int(work.seen["trained parameters"].replace(",", ""))
    peak = None if device.peak_flop_s is None else device.peak_flop_s * work.ranks
    mfu = [] if peak is None else [system.flops(shape, batch, trained) / s / peak for batch, s in timed]
    return {
        "proof": {"losses": [], "grad_norms": [], "note": None},
        "step_s": [s for _, s in timed],
        "tokens_per_s": [batch.n_tokens / s for batch, s in timed],
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "grad_norms": [],
        "mfu": statistics.median(mfu) if mfu else None,
        "targets_per_s": statistics.median(batch.n_targets / s for batch, s in timed),
        "fill": statistics.mean(batch.n_tokens / batch.ids.numel() for batch, _ in timed),
        **peak_memory(torch.device(work.device)),
        "host_peak_bytes": resident(),
        "device": device.name,
        "seen": work.seen,
        "environment": {**versions(), **{name: v for name in system.required if (v := library(name))}},
    }


def main() -> None:
    """Answer one request; the exit code is 0 where the answer has figures."""

    def answer(request: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        ((name, options),) = request["peer"].items()
        system = build_peer(name, options, {s.name: s for s in PEERS})
        assert isinstance(system, System)
        return measure(system, parse_config(request["run"], "run"), request["warmup"])

    answer_request(answer)


if __name__ == "__main__":
    main()
