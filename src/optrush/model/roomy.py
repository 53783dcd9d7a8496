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


def make_room(block: Block, *, whole: bool = True) -> int:
    """How many slots and dense weights of a block changed. Weights must have bytes; whole: not sharded."""
    linears = block.qkv, block.o, block.gate_up, block.down
    qkv, o, gate_up, _ = columns = [_columns(linear, whole) for linear in linears]
    changed = 0
    before, after = block.norm1.kernel is norm.fused, block.norm2.kernel is norm.fused
    attends, turns = block.attend is flash4, block.separate is rotation.fused
    if before and qkv:
        block.norm1.kernel = partial(norm.fused, room=qkv)
        changed += 1
    if after and (gate_up or o):
        block.norm2.kernel = partial(norm.fused, room=gate_up, back=o)
        changed += 1
    if attends and o:
        block.attend = partial(flash4, room=o)
        changed += 1
    if turns and qkv:
        block.separate = partial(rotation.fused, back=qkv)
        changed += 1
    # The gradient of gate and up needs none: its product makes d_z, too (kernels/products.py).
    rooms = Room(True, before, turns), Room(True, attends, after), Room(True, after), Room(True, True)
    for linear, many, room in zip(linears, columns, rooms, strict=True):
        if many:
            changed += lay(linear, many, room, below=linear is not block.gate_up)
    return changed


def lay(linear: Linear, many: int, room: Room, *, below: bool = True) -> bool:
    """Tells a linear with an adapter what room there is, and lays a dense weight where there is; whether it did."""
    assert isinstance(linear.adapter, Beside)
    linear.adapter.room = room
    if linear.stored is None:
        linear.weight.data = with_room(linear.weight.data, many if below else 0, many)
    return linear.stored is None


def _columns(linear: Linear, whole: bool) -> int:
    """Rows of A in whole tiles, of a linear that QuACK multiplies by in one product with a low-rank sum; else 0."""
    adapter = linear.adapter
    if not isinstance(adapter, Beside) or adapter.by != "quack" or linear.bias is not None:
        return 0
    low = adapter.low_rank(torch.float32)
    return 0 if low is None or not (whole or linear.stored is not None) else tiles(len(low[0]))
