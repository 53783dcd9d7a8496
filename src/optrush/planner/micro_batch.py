"""Predict the micro-batch of `batch.micro_tokens: auto`, before anything is built. Pure.

The candidates are the powers of two that divide a rank's rows of a step, and all of its rows. Of those whose predicted
peak fits on the device the fastest is chosen, and of equally fast ones the smallest; a trial step then tests it.
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


def choose_micro_batch(techniques: Sequence[Technique], env: Environment, hf: Mapping[str, Any]) -> int:
    """Return the rows of one micro-batch.

    Args:
        env: not settled yet; its micro-batch is ignored.

    Raises:
        UserError: `settle` rejects every size; or this model has no prediction and the device is a CPU, where the
            system kills a process that needs too much memory.
    """
    possible: list[Environment] = []
    refused: NeedsError | None = None
    for rows in micro_batch_rows(env.rows // env.ranks):
        try:
            possible.append(settle(techniques, dataclasses.replace(env, micro_rows=rows)))
        except NeedsError as error:  # some techniques need a step of one micro-batch
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
    rates, most = cost.device_rates(device, calibration.for_device(device), shape, T), room(device)
    speeds: list[tuple[float, int]] = []
    for one in possible:
        book, rows = baseline.book(techniques, one, shape, 0.0), one.micro_rows
        if most is None or ledger.peak_memory(book, rows * T).bytes <= most:
            # Without rates the largest is chosen: fewer and larger products are not slower.
            seconds = cost.step_seconds(book, device, rows * T, rates)
            speeds.append((rows if seconds is None else 1 / seconds, rows))
    if not speeds:
        return possible[0].micro_rows  # it may fit all the same: the trial step decides
    fastest, _ = max(speeds)
    return min(rows for speed, rows in speeds if speed >= fastest * (1 - CLOSE))


def micro_batch_rows(share: int) -> list[int]:
    """Return the possible rows of a micro-batch, smallest first, for a rank with `share` rows of a step."""
    return sorted({2**k for k in range(share.bit_length()) if share % 2**k == 0} | {share})


def _device(env: Environment) -> Device:
    """Return the device with rates and memory; on a CPU, this machine's memory divided by the ranks that share it."""
    if env.device.kind != "cpu" or env.device.memory_bytes is not None:
        return env.device
    here = hardware.cpu()
    if here.memory_bytes is None:
        return here
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", env.ranks))
    return dataclasses.replace(here, memory_bytes=here.memory_bytes // ranks)
