"""Predict a configuration, search better settings of it, and predict other models of its family. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from optrush.config import Config
from optrush.data.length_estimate import estimate_fill
from optrush.decide import Decided, decide, problem_of, stand_in, with_method, with_setting
from optrush.hardware import GIB, Device, parse_hardware
from optrush.models.shapes import ModelShape
from optrush.models.source import locate, shapes_of
from optrush.models.traced import NoPlan, shape_of, stored_values
from optrush.planner import calibration
from optrush.planner.sets import Candidate, Evaluations, Prediction, SearchResult, predict_set, search_sets
from optrush.technique import Part, Technique, instantiate
from optrush.techniques import ALL


def predict(
    config: Config, hardware: str | Device = "auto", ranks: int | None = None,
    classes: Sequence[type[Technique]] = ALL,
) -> Prediction:  # fmt: skip
    """Predict peak memory and speed of a configuration, after `decide` has completed it.

    Args:
        hardware: a name for `hardware.parse_hardware`, or a device.
        ranks: processes; None: the number in the hardware's name.

    Raises:
        UserError: the configuration cannot be decided on this hardware, or the planner does not support its model.
    """
    device, count = (hardware, 1) if isinstance(hardware, Device) else parse_hardware(hardware)
    return predict_decided(decide(config, classes, ranks or count, device, here=hardware == "auto"))


def predict_decided(decided: Decided) -> Prediction:
    """Predict peak memory and speed of a run.

    Raises:
        NeedsError: the planner does not support its model.
    """
    lengths = estimate_fill(decided.config)
    env = dataclasses.replace(decided.env, reach=lengths.reach)
    measured = calibration.for_device(env.device)
    return predict_set(decided.techniques, env, shape_of(decided.hf), lengths.padding, measured)


def search(
    config: Config, hardware: str = "auto", classes: Sequence[type[Technique]] = ALL, *, ranks: int | None = None,
    fixed: bool = False, rough: bool = False, keep_maths: bool = False, best: int = 3, whole: bool = True,
    scarce: bool = False, here: bool = False, start: Mapping[str, Mapping[str, Any]] | None = None,
    keep: Container[str] = (),
) -> SearchResult:  # fmt: skip
    """Search the fastest settings of a configuration; `sets.search_sets` documents the further arguments.

    Args:
        ranks: processes; None: the number in the hardware's name.
        fixed: keep the micro-batch if the configuration has a number.
        rough: also search for a model without a memory plan, with the figures of `decide.stand_in`.

    Raises:
        UserError: see `search_sets`; the configuration is invalid, or the planner does not support its model.
    """
    device, count = parse_hardware(hardware)
    config = with_method(config)
    problem = problem_of(config, classes, ranks or count, device, fixed=fixed)
    if not rough:
        shape_of(problem.hf)
    return search_sets(
        problem, classes, config.with_, keep_maths=keep_maths, best=best, whole=whole, scarce=scarce, here=here,
        start=start, keep=keep,
    )  # fmt: skip


def predict_family(
    config: Config, hardware: str, setting: Candidate, classes: Sequence[type[Technique]] = ALL
) -> Iterator[tuple[str, int, Candidate | None]]:
    """Predict the named shapes of the model's family on the same hardware, smallest first.

    Each has the given setting, with or without a technique that stores fewer activations.

    Yields:
        name, parameters, setting; None: it does not fit.
    """
    device, ranks = parse_hardware(hardware)
    problem = problem_of(with_setting(config, setting), classes, ranks, device)
    owners = [c for c in classes if Part.ACTIVATION_CHECKPOINTING in c.claims]
    saving = [t for c in owners for options in c.variants(problem.env) for t in instantiate([c], {c.name: options})]
    kept = [t for t in instantiate(classes, setting.with_) if Part.ACTIVATION_CHECKPOINTING not in t.claims]
    named = shapes_of(problem.hf["model_type"])
    shapes = {name: ModelShape.read(hf) for name, hf in named.items()}
    for name, shape in sorted(shapes.items(), key=lambda s: s[1].parameters):
        env = dataclasses.replace(problem.env, blocks=shape.layers, vocab=shape.vocab, shape=shape)
        evaluations = Evaluations(dataclasses.replace(problem, hf=named[name], env=env))
        for less in (None, *saving):
            evaluations.score((*kept, less))
        yield name, shape.parameters, max(evaluations.settings, key=lambda s: s.speed, default=None)


def without_plan(config: Config) -> Iterator[tuple[NoPlan, str, dict[str, int]]]:
    """Yield the error, a text and the bytes of weights by bits for a model without a description of its blocks."""
    folder, hf = locate(config, weights=False)
    try:
        shape_of(hf)
    except NoPlan as error:
        values = stored_values(folder, hf) or stand_in(hf).parameters
        sizes = {"16": 2 * values, "4": round(values * 4.5 / 8)}  # one scale per 64 values of 4 bits
        least = " and ".join(f"{size / GIB:.1f} GiB in {bits} bits" for bits, size in sizes.items())
        text = f"no plan for {config.model.path}: {error.found}\n  its weights alone need about {least}"
        yield error, text, sizes
