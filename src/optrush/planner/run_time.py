"""Predict how long a run takes from its command to its model: start, steps, end. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optrush.config import Config
from optrush.data.length_estimate import estimate_rows, estimate_tokens
from optrush.decide import changed
from optrush.planner.sets import Prediction

# Seconds of SmolLM2-135M on one H200 with 16 cores (docs/log): Python, torch, transformers' tokenizer and the device's
# context; tokenization workers and their tokens/s; kernels that every run loads; the report's charts.
IMPORTS_S, WORKERS_S, TOKENISED_S, KERNELS_S, REPORT_S = 8.0, 1.5, 1.5e6, 3.0, 2.0
READ_BYTES_S, WRITTEN_BYTES_S = 2e9, 6e8  # weights from a warm disk; a checkpoint, hashed and flushed
FORWARD = 1 / 3  # forward pass's share of a step


@dataclass(frozen=True)
class RunTime:
    """Steps of a run, and its seconds in order of time."""

    steps: float | None  # None: unknown
    start_s: float | None = None  # on a machine without compiled code for it
    steps_s: float | None = None
    end_s: float | None = None  # saves, evaluations, the model, the report

    @property
    def seconds(self) -> float | None:
        """Return the seconds from the command to the model; None: unknown."""
        parts = (self.start_s, self.steps_s, self.end_s)
        return None if None in parts else sum(p for p in parts if p is not None)


UNKNOWN = RunTime(None)


def run_time(config: Config, p: Prediction, tokens: float | None) -> RunTime:
    """Predict the time of a run.

    Args:
        p: the prediction of its steps.
        tokens: per epoch; None: unknown.
    """
    length = config.train
    if (g := config.grpo) is not None:  # the length of answers is unknown, and so is the time of a step
        rows = estimate_rows(config)
        epoch = None if rows is None else length.epochs * rows / g.prompts * g.updates
        return RunTime(float(length.steps) if length.steps else None if epoch is None else math.ceil(epoch))
    if p.step_s is None or not p.tokens_per_s:
        return RunTime(None if length.steps is None else float(length.steps))
    steps: float | None = length.steps
    if steps is None and tokens is not None:
        steps = math.ceil(length.epochs * tokens / (p.step_s * p.tokens_per_s))
    if steps is None:
        return RunTime(None)
    held_out = _held_out(config, tokens) * FORWARD / p.tokens_per_s
    return RunTime(steps, _start(p, tokens) + held_out, steps * p.step_s, _end(config, p, steps, held_out))


def _held_out(config: Config, tokens: float | None) -> float:
    """Return the tokens of an evaluation; 0 if unknown."""
    data = config.data
    if isinstance(data.eval, str):  # a file
        alone = {"path": data.eval, **dict.fromkeys(("eval", "sample", "random", "max_samples"))}
        return estimate_tokens(changed(config, {f"data.{key}": value for key, value in alone.items()})) or 0.0
    share = data.eval or 0.0
    return 0.0 if tokens is None else share / (1 - share) * tokens


def _start(p: Prediction, tokens: float | None) -> float:
    weights = sum(line.bytes for line in p.lines if line.name.startswith("weights."))
    data = 0.0 if tokens is None else WORKERS_S + tokens / TOKENISED_S
    return IMPORTS_S + KERNELS_S + data + weights / READ_BYTES_S + p.compile_s


def _end(config: Config, p: Prediction, steps: float, held_out: float) -> float:
    length = config.train
    weights, states = p.a_parameter.get("weights", 0.0), p.a_parameter.get("states", 0.0)
    saved = p.parameters * (states + min(weights, states)) / WRITTEN_BYTES_S
    # All weights, with adapters merged; quantized weights are written with two bytes each.
    exported = p.parameters * max(weights, 2.0) / WRITTEN_BYTES_S if length.export else 0.0
    evals = 1 + _times(length.eval_cadence(int(steps)), steps)
    return (1 + _times(length.save_every, steps)) * saved + exported + evals * held_out + REPORT_S


def _times(cadence: float | None, steps: float) -> float:
    """Return how many times an event is due before the last step."""
    if cadence is None:
        return 0.0
    return max(0.0, (1 / cadence if cadence < 1 else steps / cadence) - 1)
