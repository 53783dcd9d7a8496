"""Frozen parameters: whole layers, or parameters by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from optrush.models.families import FAMILIES, LAYER_INPUTS
from optrush.models.shapes import ModelShape
from optrush.planner.frozen import frozen_parameters
from optrush.planner.ledger import Rule
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer, refuse_unmet

Published = Mapping[str, Collection[str]]  # our decoder's name -> names in the model's files


@dataclass(frozen=True)
class Freeze(Technique):
    """Excludes the parameters of these layers and names from training.

    layers: numbers from 0 and ranges with both ends, "0-3,7".
    names: in the model's files or in our decoder, or parts of them between dots; `*` matches any text.

    Source: https://arxiv.org/abs/1911.03090
    Memory: no gradient and no states; nothing is saved for the backward pass below the first trained block.
    Work: 4 FLOPs per frozen weight and token instead of 6; 2 below the first trained block, if embeddings are frozen.
    """

    layers: str | int | tuple[int, ...] | None = None
    names: tuple[str, ...] | str = ()

    name = "freeze"
    summary = "excludes layers or parameters from training: no gradients, no optimizer states"
    source = "https://arxiv.org/abs/1911.03090"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/techniques/test_frozen.py"
    verified_on = ("cpu",)
    claims = frozenset({Part.TRAINED})
    searched = False  # changes the trained parameters
    sample = {"layers": "0"}  # noqa: RUF012

    def needs(self, env: Environment) -> Iterator[Requirement]:
        do = "name some: --with freeze:layers=0-3, or names: [embed_tokens]"
        yield Requirement(self.layers is not None or bool(self.names), "`freeze`", "neither `layers` nor `names`", do)
        found, do = "a technique that quantizes frozen weights: it is for adapters", "leave one of the two out"
        met = all(linear.weight == "dense" for linear in env.spec.linears.values())
        yield Requirement(met, "`freeze` leaves weights unchanged", found, do)
        found = "a technique that gives ranks some of the layers: a rank may have nothing to train"
        yield Requirement(Part.PP not in env.claimed, "`freeze` in a pipeline", found, do)
        yield from self._within(env.blocks)
        if env.shape is not None and (known := published_names(env.shape)):
            yield from self._matching(known, env.shape.tied)

    def predict(self, env: Environment) -> Iterator[Rule]:
        if env.shape is not None and (known := published_names(env.shape)):  # else the plan trains all weights
            yield from frozen_parameters(env, env.shape, set(self._chosen(known)))

    def peft(self, trainer: Trainer) -> int:
        parameters, entries = dict(trainer.model.named_parameters()), trainer.weight_map.entries
        known = {name: [piece for piece, _ in entries[name].pieces] if name in entries else [] for name in parameters}
        refuse_unmet(self._matching(known, trainer.model.head.weight is trainer.model.embedding.weight))
        chosen = list(self._chosen(known))
        for name in chosen:
            parameters[name].requires_grad_(False)
        trainer.fingerprints["freeze"] = ", ".join(chosen)
        frozen, every = (sum(parameters[name].numel() / 1e6 for name in names) for names in (chosen, parameters))
        trainer.notes.append(f"freeze: {frozen:,.1f} M of {every:,.1f} M parameters are not trained")
        return len(chosen)

    def _numbers(self) -> list[tuple[int, int]]:
        """Return the ranges of layers, both ends included; an empty list if the text is invalid."""
        if not isinstance(self.layers, str):
            numbers = () if self.layers is None else (self.layers,) if isinstance(self.layers, int) else self.layers
            return [(n, n) for n in numbers]
        matches = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part) for part in self.layers.split(",")]
        return [(int(m[1]), int(m[2] or m[1])) for m in matches if m] if all(matches) else []

    def _within(self, blocks: int) -> Iterator[Requirement]:
        """Yield whether `layers` is valid, and its layers exist in the model."""
        if self.layers is None:
            return
        asked, ranges = f"`freeze:layers={self.layers}`", self._numbers()
        yield Requirement(bool(ranges), asked, "no numbers and ranges", 'write numbers from 0 and ranges: "0-3,7"')
        wrong = next((f"{a}-{b}" for a, b in ranges if a > b), "")
        yield Requirement(not wrong, asked, f"the range {wrong} is empty", "write the smaller number first")
        met = not blocks or all(a >= 0 and b < blocks for a, b in ranges)
        yield Requirement(met, asked, f"a model with the layers 0 to {blocks - 1}", f"take numbers below {blocks}")

    def _matching(self, known: Published, tied: bool) -> Iterator[Requirement]:
        """Yield whether each name matches whole parameters, and something is left to train."""
        for pattern in (self.names,) if isinstance(self.names, str) else self.names:
            asked = f"`freeze:names=[{pattern}]`"
            met = any(_matches(pattern, [name, *pieces]) for name, pieces in known.items())
            found, do = f"no parameter of that name among {len(known)}", f"names are, for example: {_examples(known)}"
            if tied and _matches(pattern, ["lm_head.weight", "head.weight"]):
                found, do = "the head is the embedding's weight: the two are tied", "write names: [embed_tokens]"
            yield Requirement(met, asked, found, do)
            for name, pieces in known.items():
                halves = [piece for piece in pieces if not _matches(pattern, [piece])]
                together = not halves or len(halves) == len(pieces) or self._freezes(name, pieces)
                found = f"{name} holds {', '.join(_module(p) for p in pieces)} in one tensor, not all named"
                yield Requirement(together, asked, found, f"name {', '.join(_module(p) for p in halves)}, too")
        chosen = set(self._chosen(known))
        found, do = "every parameter of the model: nothing is left to train", "name fewer"
        yield Requirement(chosen != set(known), "`freeze`", found, do)

    def _chosen(self, known: Published) -> Iterator[str]:
        return (name for name, pieces in known.items() if self._freezes(name, pieces))

    def _freezes(self, name: str, pieces: Collection[str]) -> bool:
        layer = re.search(r"\.(\d+)\.", name)  # blocks.3.down.weight, model.layers.3.mlp...
        if layer and any(a <= int(layer[1]) <= b for a, b in self._numbers()):
            return True
        patterns = (self.names,) if isinstance(self.names, str) else self.names
        listed = any(_matches(p, [name]) for p in patterns)
        return listed or (bool(pieces) and all(any(_matches(p, [piece]) for p in patterns) for piece in pieces))


def published_names(shape: ModelShape) -> dict[str, list[str]]:
    """Return the file names of each parameter of our decoder; empty for other models."""
    if shape.family not in FAMILIES:
        return {}
    spec, files = FAMILIES[shape.family], dict[str, list[str]]()
    for name, _ in shape.named_parameters():
        module, _, kind = name.rpartition(".")
        _, number, part = [*module.split(".", 2), "", ""][:3]
        layer = f"model.layers.{number}"
        if module in ("embedding", "norm", "head"):
            files[name] = [{"embedding": "model.embed_tokens.", "norm": "model.norm."}.get(module, "lm_head.") + kind]
        elif module.startswith("inputs."):
            files[name] = [f"model.{LAYER_INPUTS[module.removeprefix('inputs.')]}.{kind}"]
        elif part.startswith("delta."):
            files[name] = [f"{layer}.linear_attn.{part.removeprefix('delta.')}.{kind}"]
        else:
            last = spec.names.get(part.rpartition(".")[2], ())
            last = last[: len(shape.at(int(number)).parts)] if part == "qkv" else last
            files[name] = [f"{layer}.{text.format(mlp=spec.feed_forward)}.{kind}" for text in last]
    return files


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(f".{name}.", f"*.{pattern}.*") or fnmatchcase(name, pattern) for name in names)


def _module(name: str) -> str:
    return name.rsplit(".", 2)[-2]


def _examples(known: Published) -> str:
    names = dict.fromkeys(_module(piece) for name, pieces in known.items() for piece in pieces or [name])
    return ", ".join([*names][:10])
