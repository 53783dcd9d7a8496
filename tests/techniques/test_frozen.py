"""A technique of a few lines that freezes a part of the model: what it computes, what a plan says, what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from optrush.config import Config, parse_config
from optrush.hardware import parse_hardware
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import ledger, search
from optrush.planner.frozen import frozen_parameters
from optrush.planner.ledger import Rule
from optrush.technique import Environment, Numerics, Part, Technique, Trainer
from optrush.techniques import ALL

from memory import check_prediction, supposed


@dataclass(frozen=True)
class Freeze(Technique):
    """Does not train the parameters whose names match."""

    names: tuple[str, ...] = ()

    name = "freeze"
    summary = "parameters that are not trained"
    source = "https://arxiv.org/abs/1911.03090"
    numerics = Numerics.DIFFERENT_MATHS
    claims = frozenset({Part.TRAINED})

    def predict(self, env: Environment) -> Iterator[Rule]:
        assert env.shape is not None
        names = {name for name, _ in env.shape.named_parameters() if self._matches(name)}
        yield from frozen_parameters(env, env.shape, names)

    def peft(self, trainer: Trainer) -> int:
        chosen = [p for name, p in trainer.model.named_parameters() if self._matches(name)]
        for p in chosen:
            p.requires_grad_(False)
        trainer.fingerprints["freeze"] = ", ".join(self.names)
        return len(chosen)

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)


CLASSES = (*ALL, Freeze)
EIGHT = "blocks.[0-7].*"


def run(*names: str, shape: str = "llama-3.2-1b", rows: int = 4, more: tuple[str, ...] = ()) -> Config:
    text = f"""
model: {{shape: {shape}}}
objective: pretrain
data: {{random: 32}}
batch: {{seq: 1024, tokens: {rows * 1024}, micro_tokens: {rows * 1024}}}
with: {{bf16: {{}}, fused-adamw: {{}}, attention: {{}}, freeze: {{names: {list(names)}}}}}
output: unused
"""
    return parse_config(text, "case", (), more)


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        ((EIGHT,), "llama-3.2-1b"),
        ((EIGHT, "embedding.*"), "llama-3.2-1b"),  # tied, and nothing below the eighth block has a gradient
        ((EIGHT, "embedding.*"), "llama-3.2-1b-untied"),
        (("*.gate_up.*", "*.down.*"), "qwen2.5-0.5b"),
        (("blocks.*", "embedding.*"), "llama-3.2-1b-untied"),
    ],
)
def test_memory(names: tuple[str, ...], shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | {"num_hidden_layers": 12})
    check_prediction(run(*names, shape=shape, more=("fused-loss:chunk=512",)), classes=CLASSES)


def test_a_checkpoint_has_what_is_trained() -> None:
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    frozen = sum(n for name, n in shape.named_parameters() if name.startswith("embedding.") or fnmatchcase(name, EIGHT))
    ((book,), *_) = search.books_of(run(EIGHT, "embedding.*"), parse_hardware("h200")[0], 1, CLASSES)
    assert ledger.saved_bytes(book) == pytest.approx((shape.parameters - frozen) * 6)


def test_flops() -> None:
    """Of 6 a weight: 4 where it is frozen, and 2 where all that is below is frozen, too."""
    shape = ModelShape.read(SHAPES["llama-3.2-1b"])
    block = sum(linear.inputs * linear.outputs for linear in shape.linears.values())
    head = shape.vocab * shape.width
    for names, saved in (((EIGHT,), 8 * 2 * block), ((EIGHT, "embedding.*"), 8 * 4 * block + 2 * head)):
        with supposed(run(*names), CLASSES) as job:
            assert job.model.frozen_flops == saved
