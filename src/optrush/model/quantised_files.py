"""Folders whose weights were quantised to 4 bits before: by bitsandbytes, saved by transformers. Read byte by byte.

Beside a tensor `x.weight`, there packed as uint8 (n, 1), lie `x.weight.absmax`, `.quant_map`, for double quantisation
`.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`: the bytes of a JSON text with the shape,
the sizes of blocks and the offset. Their config.json has a `quantization_config`. The bytes are taken as they are by
whoever holds the weights in that form, and by nobody else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrush.errors import NeedsError
from optrush.kernels import nf4
from optrush.model.weights import Folder, Shape

MARK = ".quant_state.bitsandbytes__"
MAP, NESTED_MAP = ".quant_map", ".nested_quant_map"
PARTS = {"codes": "", "absmax": ".absmax", "nested": ".nested_absmax"}  # of kernels/nf4.py: what follows the name


def opened(folder: Path) -> Folder | Packed:
    """A folder of dense weights, or of 4-bit ones.

    Raises:
        NeedsError: as `Folder` and `Packed`.
    """
    found = Folder(folder)
    return Packed(found) if any(MARK in name for name in found.files) else found


def refuse_packed(folder: Path) -> None:
    """For models that run through transformers.

    Raises:
        NeedsError: the folder's weights are packed.
    """
    if isinstance(opened(folder), Packed):
        found = "a model that runs through transformers, where weights are dense until they are loaded"
        raise NeedsError(f"the packed weights in {folder}", found, "start from the unquantised checkpoint, --with nf4")


class Packed:
    """A source some of whose tensors are packed: they have parts instead of rows.

    Raises:
        NeedsError: they are packed in another way than kernels/nf4.py has.
    """

    def __init__(self, everything: Folder) -> None:
        self.everything = everything
        marks = {name.partition(MARK)[0]: name for name in everything.files if MARK in name}
        self.states = {name: self._state(name, mark) for name, mark in marks.items()}
        sides = {name + end for name in marks for end in (*PARTS.values(), MAP, NESTED_MAP)}
        self.dense = Folder(everything.folder)
        self.dense.files = {n: f for n, f in everything.files.items() if n not in sides | set(marks.values())}

    def check(self, needed: Mapping[str, Shape], duplicates: Mapping[str, str]) -> None:
        """As `Folder.check`; a packed tensor has the shape that it was packed from.

        Raises:
            NeedsError: naming the tensor.
        """
        for name, state in self.states.items():
            shape = tuple(state["shape"])
            if needed.get(name) != shape:
                asked = f"the packed tensor {name} of shape {list(shape)} in {self.dense.folder}"
                found = f"config.json wants {list(needed[name]) if name in needed else 'no such tensor'}"
                raise NeedsError(asked, found, "check that config.json fits the weights")
        self.dense.check({n: s for n, s in needed.items() if n not in self.states}, duplicates)

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Of what is not packed.

        Raises:
            NeedsError: it is packed, and somebody wants it dense.
        """
        if name in self.states:
            found = f"{name} is packed in 4 bits"
            raise NeedsError(f"dense weights from {self.dense.folder}", found, "add --with nf4 --with lora")
        return self.dense.rows(name, first, last, shape, device)

    def parts(self, name: str) -> dict[str, Tensor]:
        """The parts of a packed tensor as `nf4.quantise` names them.

        Raises:
            NeedsError: one is not there in its size.
        """
        state = self.states[name]
        found = {part: self._read(name + end).reshape(-1) for part, end in PARTS.items() if self._has(name + end)}
        if "nested" in found:
            offset = torch.tensor([state["nested_offset"]], dtype=torch.float32)
            found["nested"] = torch.cat((found["nested"], offset)).to(found["nested"].dtype)  # checked below
        nested = "nested_offset" in state
        for part, size in nf4.sizes(state["rows"], state["width"], nested).items():
            kind = torch.uint8 if part == "codes" or (nested and part == "absmax") else torch.float32
            if part not in found or found[part].numel() * found[part].element_size() != size:
                asked = f"{size} bytes of {name}{PARTS[part]} in {self.dense.folder}"
                raise NeedsError(asked, "others" if part in found else "none", "download it again")
            if found[part].dtype != kind:
                asked = f"{name}{PARTS[part]} in {self.dense.folder} as {kind}"
                raise NeedsError(asked, f"{found[part].dtype}", "download it again")
        return found

    def _read(self, name: str) -> Tensor:
        values: Tensor = self.everything._slice(name)[:]
        return values

    def _state(self, name: str, mark: str) -> dict[str, Any]:
        """What its mark says, checked."""
        asked = f"tensor {name} in {self.everything.folder}, packed by bitsandbytes"
        do = "quantise its unquantised checkpoint anew: --with nf4 does it while it loads"
        try:
            state: dict[str, Any] = json.loads(bytes(self._read(mark).tolist()))
            kind, blocks, nested = state["quant_type"], state["blocksize"], state.get("nested_blocksize", nf4.NESTED)
            state["rows"], state["width"] = state["shape"]
            if not math.isfinite(state.get("nested_offset", 0.0)):
                raise ValueError(f"nested_offset {state['nested_offset']}")
        except (ValueError, KeyError, TypeError) as error:
            raise NeedsError(asked, f"{mark} cannot be read ({error})", "download it again") from None
        if (kind, blocks, nested) != ("nf4", nf4.BLOCK, nf4.NESTED):
            raise NeedsError(asked, f"quant_type {kind}, blocks of {blocks}, their scales in blocks of {nested}", do)
        cpu = torch.device("cpu")
        maps = {MAP: nf4.table(cpu)} | ({NESTED_MAP: nf4.dynamic_map(cpu)} if "nested_offset" in state else {})
        for end, known in maps.items():
            held = self._read(name + end).float() if self._has(name + end) else torch.empty(0)
            if held.shape != known.shape or not torch.allclose(held, known):
                raise NeedsError(asked, f"{end[1:]} has other values than bitsandbytes gives it", do)
        return state

    def _has(self, name: str) -> bool:
        return name in self.everything.files
