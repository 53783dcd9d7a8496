"""The micro-batch that `batch.micro_tokens: auto` begins with: predicted, before anything is built. Pure.

Of the powers of two that divide a rank's rows of a step, and all of them at once: those whose predicted peak fits on
the device, of these the fastest, and of equally fast ones the smallest. The rehearsal then tries it (rehearse.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from optrush import hardware
from optrush.errors import ConfigError, NeedsError
from optrush.hardware import Device
from optrush.models.shapes import ModelShape, native_obstacle
from optrush.planner import baseline, calibration, cost, ledger
from optrush.planner.cost import CLOSE, room
from optrush.technique import Environment, Technique, settle


def choose(techniques: Sequence[Technique], env: Environment, hf: Mapping[str, Any]) -> int:
    """Rows of one micro-batch.

    Args:
        setup: not settled yet, of a micro-batch of any size.

    Raises:
        UserError: what `settle` raises of every size, or no prediction of this model on a CPU, where what is too large
            is killed by the system instead of failing.
    """
    possible: list[Environment] = []
    refused: NeedsError | None = None
    for n in sizes(env.rows // env.ranks):
        try:
            possible.append(settle(techniques, dataclasses.replace(env, micro_rows=n)))
        except NeedsError as error:  # some techniques want a step in one micro-batch
            refused = error
    if not possible:
        assert refused is not None
        raise refused
    if (obstacle := native_obstacle(hf)) is not None:
        if env.device.kind == "cpu":
            do = f"give a multiple of {env.seq}"
            raise ConfigError("`batch.micro_tokens: auto` on a CPU", f"no prediction of memory: {obstacle}", do)
        return possible[-1].micro_rows  # the rehearsal halves it until it fits
    shape, device, T = ModelShape.read(hf), _device(possible[0]), env.seq
    known = cost.of(device, calibration.find(device), shape, T)
    speeds: list[tuple[float, int]] = []
    for made in possible:
        entries = baseline.entries(shape, T, native=made.native, cuda=device.kind == "cuda", padding=0.0)
        widths = ledger.BFLOAT16 if made.dtype == "bfloat16" else ledger.FLOAT32
        book = ledger.settle(entries, widths, baseline.rules(techniques, made, shape), made.accumulation)
        tokens, most = made.micro_rows * T, room(device)
        if most is None or ledger.peak(book, tokens).bytes <= most:
            # Where rates are unknown the largest: fewer and larger products are not slower.
            seconds = cost.seconds(book, device, tokens, known)
            speeds.append((made.micro_rows if seconds is None else 1 / seconds, made.micro_rows))
    if not speeds:
        return possible[0].micro_rows  # it may fit all the same: the rehearsal will tell
    fastest, _ = max(speeds)
    return min(rows for speed, rows in speeds if speed >= fastest * (1 - CLOSE))


def sizes(share: int) -> list[int]:
    """Rows that a micro-batch may have, of a rank's rows of a step; the smallest first."""
    return sorted({2**k for k in range(share.bit_length()) if share % 2**k == 0} | {share})


def _device(env: Environment) -> Device:
    """Where the run trains, with rates and memory: of a CPU, this machine's, which its ranks share."""
    if env.device.kind != "cpu" or env.device.memory_bytes is not None:
        return env.device
    here = hardware.cpu()
    if here.memory_bytes is None:
        return here
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", env.ranks))
    return dataclasses.replace(here, memory_bytes=here.memory_bytes // ranks)
