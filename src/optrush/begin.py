"""The first YAML of a run: what `optrush init` writes for a model, data and a machine. Pure.

The values are chosen once (`choose`, `pick`) and written once, as text with a comment for every block (`commented`);
the text is read back and prepared before anybody gets it, so that what is written can run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from optrush import hardware, plan
from optrush.commented import write
from optrush.config import Run, nearest, parse
from optrush.errors import ConfigError, UserError
from optrush.hardware import Device
from optrush.models.shapes import ModelShape, native_obstacle, refuse_foreign
from optrush.models.source import locate
from optrush.plan import Prediction
from optrush.prepare import prepare
from optrush.technique import Need, Part, Setup, Technique, build
from optrush.techniques import ALL
from optrush.toolchain import compilers

SMALLEST = "{model: tiny, objective: sft, data: {sample: recipes}, output: out}"  # to read flags with
SAMPLES = ("recipes",)
SAMPLE, RANDOM, SHAPE = "sample:", "random", "shape:"
COUNTED = 2000  # rows of a file that are counted, to choose what is held out
FEW = 10  # rows of which nothing is held out
GPU_SEQ, GPU_TOKENS = 2048, 32768
CPU_SEQ, CPU_TOKENS = 512, 2048
FASTER = 1.01  # less than this gain is not worth a larger micro-batch
CPU_CONVERSATIONS = 300  # of the sample: minutes on two cores

# What is chosen for each kind of device, in the ladder's order; of several options the first that can run here.
Choice = tuple[str, tuple[dict[str, Any], ...]]
ON_GPU: tuple[Choice, ...] = (
    ("amp", ({}, {"dtype": "fp16"})),
    ("fused-adamw", ({},)),
    ("attention", ({"impl": "varlen"}, {"impl": "sdpa"})),
    ("compile", ({},)),
    ("packing", ({},)),
    ("fused-loss", ({},)),
)
ON_CPU: tuple[Choice, ...] = (
    ("fused-adamw", ({},)),
    ("attention", ({"impl": "sdpa"},)),
    ("packing", ({},)),
    ("fused-loss", ({"chunk": 256},)),
)


@dataclass(frozen=True)
class Wanted:
    """What the flags or the answers said."""

    model: str  # a folder, a hub id, `tiny`, `shape:NAME`
    objective: str
    data: str  # a file, `sample:recipes`, `random`
    output: str
    hardware: str = "auto"
    withs: Sequence[str] = ()  # as --with takes them


@dataclass(frozen=True)
class Begun:
    """The text, the run that it parses to, and with how many ranks it runs."""

    text: str
    run: Run
    ranks: int


def compose(wanted: Wanted, file: str, classes: Sequence[type[Technique]] = ALL) -> Begun:
    """The YAML for what is wanted, checked as `optrush train` will check it.

    Raises:
        UserError: as `prepare`; the data file cannot be read; the output is not empty.
    """
    device, ranks = hardware.named(wanted.hardware)
    here = wanted.hardware == "auto"
    if not wanted.model:
        raise ConfigError("the model ''", "no name", "name a Hugging Face folder, a hub id, or `tiny`")
    check_objective(wanted.objective)
    check_data(wanted.data)
    check_output(wanted.output)
    asked = parse(SMALLEST, file, withs=wanted.withs).with_
    if ranks == 1 and any(Part.DATA in t.claims for t in build(classes, asked)):
        ranks = max(2, len(hardware.probe())) if here else 2
    tree = choose(wanted, device, ranks)
    setup = prepare(Run.model_validate(tree), classes, 1, device).setup
    techniques, left = pick(wanted, asked, setup, classes, here)
    run = Run.model_validate(tree | {"with": techniques})
    prepare(run, classes, ranks, device)
    tree["batch"]["micro_tokens"], said = fitting(run, wanted.hardware, ranks, classes)
    text = write(tree, file, device, techniques, left, said, ranks, classes)
    run = parse(text, file)
    prepare(run, classes, ranks, device)
    return Begun(text, run, ranks)


def fitting(run: Run, hardware_name: str, ranks: int, classes: Sequence[type[Technique]]) -> tuple[int, str]:
    """The micro-batch to take, and what the plan says of it; on a CPU one row, as small as it gets.

    It grows while it fits and that makes it faster; where the plan does not know the model, one row.
    """
    T, most = run.batch.seq, run.batch.tokens // ranks
    cpu = hardware.named(hardware_name)[0].kind == "cpu"
    best: Prediction | None = None
    micro = T
    for rows in (2**k for k in range(20)):
        if most % (rows * T) or (cpu and rows > 1):
            break
        batch = run.batch.model_copy(update={"micro_tokens": rows * T})
        try:
            found = plan.predict(run.model_copy(update={"batch": batch}), hardware_name, ranks, classes)
        except UserError as error:
            return T, f"no prediction of memory: {error.found}"
        faster = best is None or (found.tokens_per_s or 0.0) > (best.tokens_per_s or 0.0) * FASTER
        if best is not None and not (found.fits and faster):
            break
        best, micro = found, rows * T
    assert best is not None
    fits = "" if best.fits else ", which is too much: take a smaller model, or add techniques (`optrush techniques`)"
    return micro, f"predicted to need {best.peak_bytes / hardware.GIB:.1f} GiB of memory at most{fits}"


def choose(wanted: Wanted, device: Device, ranks: int = 1) -> dict[str, Any]:
    """Every value but the techniques, as the tree that the YAML will hold."""
    tree: dict[str, Any] = {"model": _model(wanted.model), "objective": wanted.objective}
    tree["data"] = _data(wanted.data, device)
    pairs = wanted.objective == "dpo"
    if pairs:
        tree["dpo"] = {"beta": 0.1, "loss": "sigmoid", "reference": "auto"}
        if "too_long" in tree["data"]:
            tree["data"]["too_long"] = "drop"
    gpu = device.kind == "cuda"
    seq = _longest(tree, GPU_SEQ if gpu else CPU_SEQ)
    rows = max(1, (GPU_TOKENS if gpu else CPU_TOKENS) // seq // ranks) * ranks
    tree["batch"] = {"seq": seq, "tokens": seq * rows, "micro_tokens": seq}
    fresh = wanted.model == "tiny" or wanted.model.startswith(SHAPE)
    lr = 2e-3 if wanted.model == "tiny" else 3e-4 if fresh else 2e-5
    lr = lr / 10 if pairs and fresh else 1e-6 if pairs else lr  # 1e-6 is also TRL's
    tree["optim"] = {"lr": lr, "schedule": "cosine", "warmup": 0.1 if fresh else 0.03, "clip": 1.0}
    tree["train"] = {"steps": 100} if "random" in tree["data"] else {"epochs": 1}
    tree["train"] |= {"log_every": 5, "save_every": 0.25, "keep": 2}
    if "eval" in tree["data"]:
        tree["train"]["eval_every"] = 0.25
    return tree | {"seed": 0, "output": wanted.output}


def pick(
    wanted: Wanted, asked: dict[str, Any], setup: Setup, classes: Sequence[type[Technique]], here: bool
) -> tuple[dict[str, dict[str, Any]], list[tuple[str, Need]]]:
    """The techniques of the run with their options, in the ladder's order, and what was left out with its reason."""
    known = {c.name: c for c in classes}
    taken = {part for t in build(classes, asked) for part in t.claims}
    text = not wanted.data.startswith(RANDOM)
    chosen: dict[str, tuple[dict[str, Any], ...]] = {}
    for name, options in ON_GPU if setup.device.kind == "cuda" else ON_CPU:
        if name in asked or known[name].claims & taken or (not text and Part.ROWS in known[name].claims):
            continue
        if not text and name == "attention":  # rows of one document need no mask
            options = options[-1:]
        chosen[name] = options
    left: list[tuple[str, Need]] = []
    while True:
        owned = frozenset(taken.union(*(known[name].claims for name in chosen)))
        settled = dataclasses.replace(setup, owned=owned)
        found = {name: _first(known[name], options, settled, here) for name, options in chosen.items()}
        lacks = {name: f for name, f in found.items() if isinstance(f, Need)}
        if not lacks:
            break
        for name, need in lacks.items():
            left.append((name, need))
            del chosen[name]
    techniques = {**{name: f for name, f in found.items() if isinstance(f, dict)}, **asked}
    return {c.name: techniques[c.name] for c in classes if c.name in techniques}, left


def _first(cls: type[Technique], options: Sequence[dict[str, Any]], setup: Setup, here: bool) -> dict[str, Any] | Need:
    """The first of these options whose needs are met, or what the last lacks."""
    unmet: list[Need] = []
    for option in options:
        technique = build([cls], {cls.name: option})[0]
        unmet = [n for n in technique.needs(setup) if not n.met]
        compiles = type(technique).compile is not Technique.compile
        unmet += [n for n in compilers(setup.device) if not n.met] if here and compiles else []
        if not unmet:
            return option
    return unmet[0]


def _model(text: str) -> Any:
    return {"shape": text.removeprefix(SHAPE)} if text.startswith(SHAPE) else text


def _data(text: str, device: Device) -> dict[str, Any]:
    if text.startswith(SAMPLE):
        held = {"sample": text.removeprefix(SAMPLE), "eval": 0.1, "too_long": "split"}
        return held if device.kind == "cuda" else held | {"max_samples": CPU_CONVERSATIONS}
    if text == RANDOM or text.startswith(RANDOM + ":"):
        n = text.removeprefix(RANDOM).removeprefix(":")
        return {"random": int(n) if n else True}
    rows = count(Path(text).expanduser())
    held_out = {} if rows < FEW else {"eval": 0.1 if rows < COUNTED else 0.02}
    return {"path": text, **held_out, "too_long": "split"}


def check_data(text: str) -> str:
    """What the data suggests as objective.

    Raises:
        ConfigError: no such sample, no number.
        DataError: no such file, or its first row is not understood.
    """
    from optrush.data.readers import read
    from optrush.data.schema import Chat, Pair
    from optrush.data.schema import parse as row

    if text.startswith(SAMPLE):
        name = text.removeprefix(SAMPLE)
        if name not in SAMPLES:
            raise ConfigError(f"the data {text}", "no such sample", f"take {SAMPLE}{SAMPLES[0]}, or a JSON Lines file")
        return "sft"
    if text == RANDOM or text.startswith(RANDOM + ":"):
        if not re.fullmatch(r"random(:[1-9]\d*)?", text):
            raise ConfigError(f"the data {text}", "no number of documents", "write random, or random:4096")
        return "pretrain"
    where, found = next(read(Path(text).expanduser()))
    kind = row(where, found)
    return "dpo" if isinstance(kind, Pair) else "sft" if isinstance(kind, Chat) else "pretrain"


def check_objective(text: str) -> str:
    """The objective as it was given, if there is such a one."""
    known = ("sft", "pretrain", "dpo")
    if text not in known:
        raise ConfigError(f"the objective {text}", "no such objective", nearest(text, known))
    return text


def check_output(text: str) -> str:
    """The output as it was given, if a run may begin there: it does not exist, or is empty.

    Raises:
        ConfigError: it is no folder, or something lies there.
    """
    path = Path(text).expanduser()
    if not text:
        raise ConfigError("the output ''", "no name", "name a folder for what the run writes")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"the output {text}", "a file, no folder", "name another folder")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"the output {text}", "a folder that is not empty", "name another folder")
    return text


def count(path: Path) -> int:
    """Rows of a file, up to COUNTED."""
    with path.open("rb") as file:
        return sum(1 for _ in islice(file, COUNTED))


def _longest(tree: dict[str, Any], seq: int) -> int:
    """T, at most what the model was made for."""
    bare = {"model": tree["model"], "objective": tree["objective"], "data": tree["data"], "output": "runs/new"}
    _, hf = locate(Run.model_validate(bare))
    refuse_foreign(hf)
    window = ModelShape.read(hf).window if native_obstacle(hf) is None else None
    limits = [hf.get("max_position_embeddings"), hf.get("n_positions"), window]
    return min([seq, *(n for n in limits if isinstance(n, int))])
