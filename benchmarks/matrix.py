"""Ask the product which techniques go together, on one device and on every mesh; write docs/matrix.md.

    python benchmarks/matrix.py

Nothing is run: each set is settled as `optrush plan` does, by claims, wants and needs. A set may take others that
it needs (adapters for a base in 4 bits), of which the fewest are looked for. What a test proves is read from the tables
of mesh cases in tests/techniques and from tests/golden.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from optrush.errors import UserError
from optrush.hardware import NAMED
from optrush.models.shapes import SHAPES, ModelShape
from optrush.technique import RANK_PARTS, Environment, Part, Technique, in_order, instantiate, settle
from optrush.techniques import OWN

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/matrix.md"
SHAPE = ModelShape.read(SHAPES["llama-3.2-1b"])
EXPERTS = ModelShape.read(SHAPES["qwen3-30b-a3b"])
ENV = Environment(
    device=NAMED["h100"], ranks=1, seq=2048, rows=32, micro_rows=32, clip=None, dtype="float32", native=True,
    blocks=SHAPE.layers, vocab=SHAPE.vocab, shape=SHAPE,
)  # fmt: skip
MESHES: dict[str, dict[str, dict[str, Any]]] = {
    "one device": {}, "ddp": {"ddp": {}}, "fsdp": {"fsdp": {}}, "hsdp": {"fsdp": {"replicate": 2}},
    "deepspeed": {"deepspeed": {}}, "tensor": {"tensor": {}}, "context": {"context": {}},
    "pipeline": {"pipeline": {}}, "experts": {"experts": {}},
}  # fmt: skip
MOST_RANKS = 8
FILLING = 4  # micro-batches of a step that a pipeline is filled with
DIVIDING = {c.name for c in OWN if c.claims & RANK_PARTS}
NAMES = [c.name for c in OWN]
TEXT = """\
# What goes together

Which techniques can be combined, by the checks of `optrush plan`. Each technique has its default options. The run is
Llama-3.2-1B (Qwen3-30B-A3B with `experts`) in float32: rows of 2048 tokens on H100s, one micro-batch per step (four in
a pipeline), no clipping. Other options, GPUs and models may differ. `benchmarks/matrix.py` writes this page.

## On meshes

`hsdp` is `fsdp` with `replicate: 2`.

- **yes**: allowed.
- **proven**: allowed, and a test compares its losses, norms or gradients with one process (`tests/techniques`,
  `tests/golden`).
- A number: rejected, for the reason of that number below.
- In brackets: what it requires in addition.

{meshes}

{reasons}

## Pairs on one device

A dot: the two can be combined. A number: rejected, for the reason of that number below. Techniques for several GPUs are
in the table above.

{pairs}

{pair_reasons}
"""


def technique(name: str, options: dict[str, Any] | None = None) -> Technique:
    cls = next(c for c in OWN if c.name == name)
    return instantiate([cls], {name: dict(options or cls.sample)})[0]


@cache
def by_default(name: str) -> Technique:
    return technique(name)


def refusal(techniques: Iterable[Technique], one: bool) -> str:
    """Return why a set is refused on the fewest ranks that it can have; empty: it is not."""
    members, said = in_order(list(techniques)), ""
    shape = EXPERTS if any(Part.EP in t.claims for t in members) else SHAPE
    for ranks in (1,) if one else (2, 4, MOST_RANKS):
        env = dataclasses.replace(ENV, ranks=ranks, shape=shape, blocks=shape.layers, vocab=shape.vocab)
        try:
            axes = {axis: n for t in members for axis, n in t.axes().items()}
            if not one and ranks % math.prod(axes.values()):  # there is more to say of a mesh that there can be
                continue
            groups = max(1, dataclasses.replace(env, axes=axes).data_ranks)
            times = FILLING if "pp" in axes else 1
            settle(members, dataclasses.replace(env, micro_rows=env.rows // groups // times), OWN)
        except UserError as error:
            said = said or f"{error.asked}; found {error.found}"
        else:
            return ""
    return said


@cache
def company(name: str) -> tuple[str, ...]:
    """Return the fewest other techniques with which one can run on one device."""
    if name in DIVIDING:
        return ()
    for many in range(3):
        for others in itertools.combinations([n for n in NAMES if n != name and n not in DIVIDING], many):
            if not refusal(map(by_default, (name, *others)), one=True):
                return others
    raise ValueError(f"{name} runs with no two others")


def together(names: Iterable[str], mesh: dict[str, dict[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Return why techniques cannot run on a mesh, or nothing and what they need besides."""
    own = {**{n: by_default(n) for n in names}, **{n: technique(n, o) for n, o in mesh.items()}}
    one = not own.keys() & DIVIDING
    needed = tuple(n for name in own for n in company(name) if n not in own)
    data = () if own.keys() & {"ddp", "fsdp", "deepspeed"} or one else ("ddp", "fsdp")
    first = refusal([*own.values(), *map(by_default, needed)], one)
    claimed = [part for t in own.values() for part in t.claims]
    if not first or len(claimed) > len(set(claimed)):  # two owners of one part: no third technique helps
        return first, () if first else needed
    free = [n for n in NAMES if n not in own and (n in data or n not in DIVIDING)]
    for others in ((), *((n,) for n in (*data, *free)), *((n, *needed) for n in (*data, *free))):
        if not refusal([*own.values(), *map(by_default, dict.fromkeys(others))], one):
            return "", tuple(dict.fromkeys(others))
    with_data = data and refusal([*own.values(), *map(by_default, (*needed, data[0]))], one)
    return with_data or first, ()


def cases() -> Iterator[tuple[dict[str, Any], int]]:
    """Yield `with:` and ranks of every case that a test holds to one process."""
    sys.path += [str(ROOT / folder) for folder in ("tests", "examples/plugin-optimizer")]
    from meshes import MeshCase

    for file in sorted((ROOT / "tests/techniques").glob("test_*.py")):
        if "MeshCase" in file.read_text("utf-8"):
            for table in vars(importlib.import_module(f"techniques.{file.stem}")).values():
                if isinstance(table, list):
                    yield from ((case.with_, case.ranks) for case in table if isinstance(case, MeshCase))
    golden = importlib.import_module("golden.test_golden")
    yield from ((with_, 2) for with_ in golden.DATA.values())
    yield from ((with_, 1) for with_ in golden.KERNELS)


def proven() -> set[tuple[str, str]]:
    """Return (technique, mesh) of the cases."""
    found = set()
    for with_, ranks in cases():
        for mesh, names in MESHES.items():
            grouped = with_.get("fsdp", {}).get("replicate", 1) > 1
            there = ranks > 1 and names and names.keys() <= with_.keys() and (grouped or mesh != "hsdp")
            if there or (ranks == 1 and mesh == "one device"):
                found |= {(name, mesh) for name in with_}
    return found


class Reasons:
    """Refusals by number, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, said: str) -> str:
        return str(self.numbers.setdefault(said, len(self.numbers) + 1))

    def __str__(self) -> str:
        return "\n".join(f"{number}. {said}" for said, number in self.numbers.items())


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return docs/matrix.md."""
    tested, reasons, others = proven(), Reasons(), Reasons()
    meshes = [row("technique", *MESHES), row(*["---"] * (1 + len(MESHES)))]
    for name in NAMES:
        cells = []
        for mesh, names in MESHES.items():
            said, needed = together([name], {} if name in names else names)
            if name in DIVIDING and not names:
                said, needed = refusal([by_default(name)], one=True), ()
            word = "proven" if (name, mesh) in tested else "yes"
            cells.append(reasons.of(said) if said else word + (f" ({', '.join(needed)})" if needed else ""))
        meshes.append(row(f"`{name}`", *cells))
    alone = [n for n in NAMES if n not in DIVIDING]
    pairs = [row("", *(str(i) for i in range(1, len(alone)))), row(*["---"] * len(alone))]
    for i, one in enumerate(alone):
        said = [together([one, other], {})[0] for other in alone[:i]]
        marks = [others.of(text) if text else "." for text in said] + [""] * (len(alone) - 1 - i)
        pairs.append(row(f"{i + 1} `{one}`", *marks[: len(alone) - 1]))
    return TEXT.format(meshes="\n".join(meshes), reasons=reasons, pairs="\n".join(pairs), pair_reasons=others)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
