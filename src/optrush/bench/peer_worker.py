"""Another system's rung, once, in a process of its own: `python -m optrush.bench.peer_worker REQUEST.json RESULT.json`.

its weights and rows -> the system's own loop, a clock around each step -> RESULT.json, as worker.py writes it. There is
no proof: what it learns is its own affair; but its first loss, what it trains and in which precision are held against
ours. Imports torch late: some systems must come before it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optrush import hardware
from optrush.bench import peers
from optrush.bench.peer import Peer, Rows, Work
from optrush.bench.peer_weights import ensure
from optrush.config import Config, parse_config
from optrush.errors import NeedsError, RunError, UserError
from optrush.launch import die_with_parent
from optrush.models.shapes import ModelShape
from optrush.technique import library

# Nobody calls home from a measurement.
QUIET = {
    "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "WANDB_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def check(peer: Peer, config: Config, device: hardware.Device) -> None:
    """Raises NeedsError where the system cannot train the run here."""
    for need in peer.needs(config, device):
        if not need.met:
            raise NeedsError(need.asked, need.found, need.do)


def measure(peer: Peer, config: Config, warmup: int) -> dict[str, Any]:
    """Everything one process finds out about another system's rung."""
    device = next(iter(hardware.probe()), hardware.CPU)
    check(peer, config, device)
    os.environ.update(QUIET)
    # One device, as ours: some systems spread a step over all that they see.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    folder, hf = ensure(config, peer.weights, device.kind)
    if peer.first is not None:
        importlib.import_module(peer.first)
    steps = config.train.steps
    assert steps is not None, "a ladder says how many"
    with tempfile.TemporaryDirectory(prefix="optrush-peer-") as scratch:
        batches = list(rows(config, hf, folder, steps))
        work = Work(config, hf, folder, Path(scratch), batches, device.kind)
        peer.train(work)
    return told(peer, work, device, warmup)


def rows(config: Config, hf: dict[str, Any], folder: Path, steps: int) -> Iterator[Rows]:
    """The first documents of the run in its order, one a row, padded to the longest of a step."""
    import torch

    from optrush.data.chat_template import open_tokens
    from optrush.data.packing import Padded
    from optrush.data.sampler import Stream
    from optrush.data.sources import read_sources

    source = read_sources(
        config, open_tokens(config, folder if config.model.path else None), int(hf["vocab_size"])
    ).train
    assert source.tokenized, "the system's needs refuse it"
    T, count = config.batch.seq, config.batch.tokens // config.batch.seq
    stream = Stream(source, Padded(), T=T, rows=count, seed=config.seed)
    plan = stream.plan(steps=steps)
    for k in range(steps):
        held = [document for row in stream.step(k, plan) for _, document in row]
        lengths = [len(document) for document in held]
        ids = torch.zeros(len(held), max(lengths), dtype=torch.int64)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for r, (document, n) in enumerate(zip(held, lengths)):
            ids[r, :n] = torch.from_numpy(document.ids)
            learnt = torch.from_numpy(document.targets)
            labels[r, :n][learnt] = ids[r, :n][learnt]
            mask[r, :n] = 1
        yield Rows(
            ids, labels, None if mask.all() else mask, sum(lengths), int((labels != -100).sum()),
            sum(n * n for n in lengths),
        )  # fmt: skip


def told(peer: Peer, work: Work, device: hardware.Device, warmup: int) -> dict[str, Any]:
    """The result, in the words of worker.py."""
    import torch

    from optrush.trainer.metrics import peak as peak_memory
    from optrush.trainer.metrics import resident

    if len(work.seconds) != len(work.batches):
        raise RunError(f"{peer.title} took {len(work.seconds)} steps of {len(work.batches)}")
    timed = list(zip(work.batches, work.seconds))[warmup:]
    losses = [float(loss) for loss in work.losses]
    slots = [batch.n_tokens / batch.ids.numel() for batch, _ in timed]
    shape, trained = ModelShape.read(work.hf), int(work.seen["trained parameters"].replace(",", ""))
    flop = [peer.flops(shape, batch, trained) for batch, _ in timed]
    peak = device.peak_flop_s
    shares = [] if peak is None else [f / s / peak for f, (_, s) in zip(flop, timed)]
    return {
        "proof": {"losses": [], "grad_norms": [], "note": None},
        "step_s": [s for _, s in timed],
        "tokens_per_s": [batch.n_tokens / s for batch, s in timed],
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "grad_norms": [],
        "mfu": statistics.median(shares) if shares else None,
        "targets_per_s": statistics.median(batch.n_targets / s for batch, s in timed),
        "fill": statistics.mean(slots),
        **peak_memory(torch.device(work.device)),
        "host_peak_bytes": resident(),
        "device": device.name,
        "seen": work.seen,
        "environment": {
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
            **{name: version for name in peer.required if (version := library(name))},
        },
    }


def main() -> None:
    """Answers one request; the exit code is 0 where the answer has figures."""
    from optrush.bench.record import put

    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    die_with_parent(request["parent"])
    begun = time.monotonic()
    found: dict[str, Any]
    try:
        ((name, options),) = request["peer"].items()
        config = parse_config(request["run"], "run")
        found = measure(peers.build(name, options), config, request["warmup"])
    except UserError as error:
        found = {"error": str(error), "refused": [error.asked, error.found, error.do]}
    except RunError as error:
        found = {"error": str(error)}
    except Exception as error:  # a rung may fail in any way, and the ladder goes on
        from optrush.bench.worker import explain

        found = {"error": explain(error), "traceback": traceback.format_exc()}
    found["seconds"] = time.monotonic() - begun
    put(Path(sys.argv[2]), json.dumps(found, allow_nan=False))
    sys.exit("error" in found)


if __name__ == "__main__":
    main()
