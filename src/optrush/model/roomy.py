"""Room in a block for its adapters' small matrices: behind frozen weights, and beside what the products read.

Asked for where QuACK multiplies (`adapter.by`). Dense weights are laid anew; those that are stored in fewer bits have
room whenever they are made dense. Kernels of our own that write what a product reads leave room there; where another
one writes it, it is copied.
"""

from __future__ import annotations

from functools import partial

import torch

from optrush.frozen import tiles
from optrush.kernels import norm, rotation
from optrush.kernels.flash4 import flash4
from optrush.kernels.room import Room, with_room
from optrush.model.adapted import Beside
from optrush.model.decoder import Block, Linear


def make_room(block: Block) -> int:
    """How many dense weights were laid anew. Weights must have bytes, and be whole."""
    qkv, o, gate_up = (_columns(linear) for linear in (block.qkv, block.o, block.gate_up))
    before, after = block.norm1.kernel is norm.fused, block.norm2.kernel is norm.fused
    attends, turns = block.attend is flash4, block.separate is rotation.fused
    if before:
        block.norm1.kernel = partial(norm.fused, room=qkv)
    if after:
        block.norm2.kernel = partial(norm.fused, room=gate_up, back=o)
    if attends:
        block.attend = partial(flash4, room=o)
    if turns:
        block.separate = partial(rotation.fused, back=qkv)
    # Of gate and up the gradient needs none: its product makes d_z, too (kernels/products.py).
    return (
        lay(block.qkv, Room(True, before, turns))
        + lay(block.o, Room(True, attends, after))
        + lay(block.gate_up, Room(True, after), below=False)
        + lay(block.down, Room(True, True))
    )


def lay(linear: Linear, room: Room, *, below: bool = True) -> int:
    """Tells a linear that QuACK multiplies by what room there is, and lays its weight where there is some, if it is
    dense; whether it did."""
    many = _columns(linear)
    if not many:
        return 0
    assert isinstance(linear.adapter, Beside)
    linear.adapter.room = room
    if linear.stored is not None:
        return 0
    linear.weight.data = with_room(linear.weight.data, many if below else 0, many)
    return 1


def _columns(linear: Linear) -> int:
    """Rows of A in whole tiles, of a linear that QuACK multiplies by with a low-rank sum; else 0."""
    adapter = linear.adapter
    if not isinstance(adapter, Beside) or adapter.by != "quack" or linear.bias is not None:
        return 0
    low = adapter.low_rank(torch.float32)
    return 0 if low is None else tiles(len(low[0]))
