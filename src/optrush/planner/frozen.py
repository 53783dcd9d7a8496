"""Predict a run that trains a part of the model's own parameters. Pure.

Frozen bases of adapters have other types and other rules: peft/ledger.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from optrush.models.shapes import ModelShape
from optrush.planner.ledger import Rule, Tag, freeze_rule, live, tagged
from optrush.technique import Environment, Part

NO_GRADIENT = "frozen: no gradient, no state"
UNREAD = "only a gradient that is not made reads it"


def frozen_parameters(env: Environment, shape: ModelShape, names: Collection[str]) -> Iterator[Rule]:
    """Yield the rules for frozen parameters in their own dtype.

    Args:
        names: of `ModelShape.named_parameters`.
    """
    sizes, L = dict(shape.named_parameters()), shape.layers
    parts: tuple[Tag, ...] = ("blocks", "embedding", "head", "norm")
    for part in parts:
        begins = ("embedding.", "inputs.") if part == "embedding" else (f"{part}.",)
        if share := _share({name: n for name, n in sizes.items() if name.startswith(begins)}, names):
            yield freeze_rule(tagged(part), NO_GRADIENT, share)
    begin = _first_trained(shape, names)
    if begin:
        reason, passed = f"no backward pass goes below block {begin}", 1 - begin / L
        for kept in (tagged("saved"), "input", "casts.blocks"):
            yield live(kept, reason, values=passed)
        yield live(tagged("backward"), reason, times=passed)

    def share_of(*modules: str) -> float:
        """Return the frozen share of these parameters' values in the blocks that a backward pass reaches."""
        places = (f"blocks.{layer}.{module}.weight" for layer in range(begin, L) for module in modules)
        return _share({name: sizes[name] for name in places if name in sizes}, names)

    mixing = [linear.module for linear in shape.linears.values() if linear.module not in ("o", "gate_up", "down")]
    entering = {"normed": (share_of(*mixing) + share_of("gate_up")) / 2, "product": share_of("down")}
    entering |= {} if Part.ATTENTION in env.claimed else {"attended": share_of("o")}  # kernels save their output
    for line, share in entering.items():
        yield live(f"saved.{line}", UNREAD, values=1 - share)
    yield live(tagged("normalised"), UNREAD, values=1 - share_of("norm1", "norm2"))
    for work, modules in (("qkv", mixing), ("o", ["o"]), ("gate_up", ["gate_up"]), ("down", ["down"])):
        yield live(f"backward.{work}", "frozen weights have no gradients", times=1 - share_of(*modules) / 2)
    if ("embedding.weight" if shape.tied else "head.weight") in names:
        yield live("head.products", "the head's own gradient is not made", times=4 / 6)
        if Part.HEAD in env.claimed:
            yield live("head.gradient", NO_GRADIENT, gone=True)
    if shape.tied and "embedding.weight" in names:
        yield live(tagged("tied"), NO_GRADIENT, gone=True)
    trained = 1 - _share(sizes, names)
    yield live(tagged("update"), "of what is trained", times=trained)
    if Part.DATA in env.claimed:
        yield live(tagged("reduce"), "of what is trained", times=trained)


def _share(sizes: dict[str, int], names: Collection[str]) -> float:
    """Return the share of all values in the parameters of these names; 0.0 without names."""
    return sum(values for name, values in sizes.items() if name in names) / max(1, sum(sizes.values()))


def _first_trained(shape: ModelShape, names: Collection[str]) -> int:
    """Return the index of the first block that a backward pass reaches; the number of blocks if it reaches none."""
    before = (name for name, _ in shape.named_parameters() if name.startswith(("embedding.", "inputs.")))
    if not {*before} <= {*names}:
        return 0
    trained = (name for name, _ in shape.named_parameters() if name.startswith("blocks.") and name not in names)
    return min((int(name.split(".")[1]) for name in trained), default=shape.layers)
