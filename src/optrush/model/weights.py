"""Where every parameter's values come from, and how they go back: recipes, folders of safetensors.

A parameter has one canonical name (the model's own). Its `Entry` says which Hugging Face tensors make it: one, copied;
or several, laid together group by group (a fused qkv, a gate/up pair). A `Recipe` can therefore fill any rectangle of
any parameter by reading only the rows it needs, which is how a shard is loaded without the whole, and undo the layout
when a model is exported (save.py). Sources of values: a folder (`Folder`), random draws (`Drawn`), host memory
(`Memory`).

Nothing here unpickles: folders are safetensors or they are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from optrush.errors import NeedsError
from optrush.model.decoder import Decoder, Linear
from optrush.shapes import HF

if TYPE_CHECKING:
    pass

Shape = tuple[int, ...]
Filler = Callable[[Tensor, Shape], None]
"""Writes the rectangle of one parameter that begins at an offset and has the given tensor's shape into that tensor."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPARED_ROWS = 8192  # rows of a duplicated head compared at a time
EDGE_bytes = 4096  # at either end of a tensor, in a fingerprint


class Source(Protocol):
    """Rows of tensors by Hugging Face name."""

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Rows [first, last) of a tensor that has `shape`; on any device, of any floating type."""
        ...


class Folder:
    """A folder of safetensors files, with one index or a single file. Reads slices; holds files open, not values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._index()  # tensor name -> file name
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        asked = f"the weights in {self.folder}"
        index = self.folder / INDEX
        if index.is_file():
            try:
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = {str(name): str(file) for name, file in listed.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise NeedsError(asked, f"{INDEX} is not an index ({error})", "download the folder again") from None
            for file in set(files.values()):
                if re.fullmatch(r"[^/\\]+\.safetensors", file) is None or not (self.folder / file).is_file():
                    raise NeedsError(
                        asked, f"{INDEX} names {file!r}, no safetensors file of this folder", "download it again"
                    )
            return files
        if (self.folder / SINGLE).is_file():
            with self._handle_of(SINGLE) as handle:
                return dict.fromkeys(handle.keys(), SINGLE)
        pickles = sorted(p.name for p in self.folder.glob("*.bin"))[:1] if self.folder.is_dir() else []
        found = f"only {pickles[0]}, a pickle, which could run code when read" if pickles else f"no {SINGLE}"
        raise NeedsError(asked, found, f"give a folder with {SINGLE} or {INDEX} (save_pretrained writes it)")

    def _handle_of(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise NeedsError(f"the weights in {self.folder}", f"{file}: {error}", "download it again") from None

    def _slice(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = self._handle_of(file)
        try:
            return self._open[file].get_slice(name)
        except SafetensorError as error:
            raise NeedsError(f"tensor {name} in {self.folder / file}", str(error), "download it again") from None

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        values: Tensor = self._slice(name)[first:last]
        return values

    def check(self, needed: Mapping[str, Shape], duplicates: Mapping[str, str]) -> None:
        """Every needed tensor is there in its shape, and nothing else but what is known to be harmless.

        Args:
            needed: shapes by name.
            duplicates: names that may be stored again, each an exact copy of a needed one (a tied head).

        Raises:
            NeedsError: naming the tensor and the file.
        """
        for name, shape in needed.items():
            asked = f"tensor {name} of shape {list(shape)}"
            if name not in self.files:
                raise NeedsError(asked, f"no such tensor in {self.folder}", "check that config.json fits the weights")
            if self.shape(name) != shape:
                raise NeedsError(
                    asked,
                    f"shape {list(self.shape(name))} in {self.folder / self.files[name]}",
                    "check that config.json fits the weights",
                )
        for name in sorted(set(self.files) - set(needed)):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints stored what config.json says anyway
            original = duplicates.get(name)
            if original is None or not self._equal(name, original):
                what = "a tensor that this model does not have"
                raise NeedsError(
                    f"the weights in {self.folder}",
                    f"{name} in {self.files[name]}: " + (f"differs from {original}" if original else what),
                    "set tie_word_embeddings to false in config.json" if original else "check config.json",
                )

    def _equal(self, a: str, b: str) -> bool:
        shape, cpu = self.shape(a), torch.device("cpu")
        starts = range(0, shape[0] if shape else 0, COMPARED_ROWS)
        return shape == self.shape(b) and all(
            torch.equal(self.rows(a, i, i + COMPARED_ROWS, shape, cpu), self.rows(b, i, i + COMPARED_ROWS, shape, cpu))
            for i in starts
        )


@dataclass(frozen=True)
class Drawn:
    """Random weights: a normal draw for matrices, a constant where one is named (norms, biases).

    Each tensor is drawn whole in float32 on the target device from a generator of its own, seeded by (seed, name): the
    same values under any cutting and any model class, on devices of one kind.
    """

    seed: int
    std: float
    constants: Mapping[str, float]

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        if name in self.constants:
            return torch.full((last - first, *shape[1:]), self.constants[name], device=device)
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.empty(shape, device=device).normal_(0.0, self.std, generator=generator)[first:last]


@dataclass(frozen=True)
class Memory:
    """Tensors that already lie on the host."""

    tensors: dict[str, Tensor]

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        return self.tensors[name][first:last]


@dataclass(frozen=True)
class Entry:
    """How one parameter is made: `groups` groups of rows, in each group `rows` rows of every piece in turn."""

    shape: Shape
    pieces: tuple[tuple[str, int], ...]  # (Hugging Face name, rows in one group)
    groups: int = 1

    def hf_shapes(self) -> Iterator[tuple[str, Shape]]:
        for name, rows in self.pieces:
            yield name, ((self.groups * rows, *self.shape[1:]) if self.shape else ())


@dataclass(frozen=True)
class Recipe:
    """Values of every parameter by canonical name.

    `entries` say what is read, and what an export writes. Parameters that techniques add, and the published model has
    not (of adapters, of weights stored in another form), have a filler instead.
    """

    entries: dict[str, Entry]
    source: Source
    buffers: dict[str, Tensor] = field(default_factory=dict)  # persistent ones, by Hugging Face name: exported as is
    fillers: dict[str, Filler] = field(default_factory=dict)  # by canonical name

    def fill(self, name: str, local: Tensor, offset: Shape) -> None:
        """Copy the rectangle of parameter `name` that begins at `offset` and has `local`'s shape into `local`.

        Args:
            local: allocated, any device and floating type; may be empty.
            offset: one start per dimension, in the coordinates of the whole parameter.
        """
        if name in self.fillers:
            if local.numel():
                self.fillers[name](local, offset)
            return
        entry = self.entries[name]
        whole = entry.shape
        ends = [start + size for start, size in zip(offset, local.shape, strict=True)]
        assert len(ends) == len(whole) and all(0 <= s <= e <= n for s, e, n in zip(offset, ends, whole)), (
            f"{name}: {tuple(local.shape)} at {offset} does not lie in {whole}"
        )
        if local.numel() == 0:
            return
        with torch.no_grad():
            values = self._rows(entry, offset[0], ends[0], local.device)
            for dim in range(1, len(whole)):
                values = values.narrow(dim, offset[dim], local.shape[dim])
            local.copy_(values)

    def _rows(self, entry: Entry, first: int, last: int, device: torch.device) -> Tensor:
        if len(entry.pieces) == 1:
            return self.source.rows(entry.pieces[0][0], first, last, entry.shape, device)
        rows = sum(n for _, n in entry.pieces)
        g0, g1 = first // rows, -(-last // rows)  # the groups that cover [first, last)
        parts = []
        for (name, shape), (_, n) in zip(entry.hf_shapes(), entry.pieces, strict=True):
            values = self.source.rows(name, g0 * n, g1 * n, shape, device)
            parts.append(values.reshape(g1 - g0, n, *shape[1:]))
        together = torch.cat(parts, 1).flatten(0, 1)
        return together[first - g0 * rows : last - g0 * rows]

    def split(self, name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of a whole parameter: the inverse of `fill`."""
        entry = self.entries[name]
        assert tuple(full.shape) == entry.shape, f"{name}: {tuple(full.shape)} is not {entry.shape}"
        if len(entry.pieces) == 1:
            yield entry.pieces[0][0], full
            return
        parts = torch.split(full.reshape(entry.groups, -1, *entry.shape[1:]), [n for _, n in entry.pieces], 1)
        for (hf, _), part in zip(entry.pieces, parts, strict=True):
            yield hf, part.clone(memory_format=torch.contiguous_format).flatten(0, 1)  # storage of its own

    def release(self) -> None:
        """Drop host values that were only needed to fill: afterwards this recipe can split, and fill no more."""
        if isinstance(self.source, Memory):
            self.source.tensors.clear()


_BLOCK_NAMES = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_OUTER_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def native_entries(model: Decoder) -> dict[str, Entry]:
    """The entry of every parameter of a decoder, in the order of its named_parameters."""
    entries: dict[str, Entry] = {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        shape = tuple(parameter.shape)
        if owner in _OUTER_NAMES:
            entries[name] = Entry(shape, ((f"{_OUTER_NAMES[owner]}.{kind}", shape[0]),))
            continue
        _, number, part = owner.split(".")
        names = [f"model.layers.{number}.{hf}.{kind}" for hf in _BLOCK_NAMES[part]]
        module = model.get_submodule(owner)
        if isinstance(module, Linear):
            rows = [n for _, n in module.pieces]
            entries[name] = Entry(shape, tuple(zip(names, rows, strict=True)), module.groups)
        else:
            entries[name] = Entry(shape, ((names[0], shape[0]),))
    return entries


def fingerprint(folder: Path | None, seed: int) -> str:
    """What tells one folder's values from another's without reading all of them: a sample of every tensor.

    For weights that are not trained, and so not saved: a resumed run must find those it began with. Of each file the
    name, the size, the header, every 64th MiB, and of each tensor the first and the last 4 KiB. Values that differ
    between these alone are not told apart.
    """
    if folder is None:
        return f"drawn, seed {seed}"
    sha = hashlib.sha256()
    for path in value_files(folder):
        size = path.stat().st_size
        sha.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            begins = 8 + int.from_bytes(file.read(8), "little")
            header = file.read(begins - 8)
            sha.update(header)
            tensors = [t["data_offsets"] for name, t in json.loads(header).items() if name != "__metadata__"]
            pieces = [(at, 1 << 20) for at in range(0, size, 64 << 20)]
            pieces += [
                (begins + at, EDGE_bytes) for first, end in tensors for at in (first, max(first, end - EDGE_bytes))
            ]
            for at, length in sorted(pieces):
                file.seek(at)
                sha.update(file.read(length))
    return sha.hexdigest()


def value_files(folder: Path) -> list[Path]:
    """The files of a folder that hold its weights."""
    return [folder / name for name in sorted(set(Folder(folder).files.values()))]


def drawn(hf: HF, seed: int, constants: Mapping[str, float]) -> Drawn:
    """The draw of a config.json: its initializer_range, 0.02 where it names none."""
    return Drawn(seed, float(hf.get("initializer_range") or 0.02), constants)


def _constants(entries: Mapping[str, Entry]) -> dict[str, float]:
    names = [name for entry in entries.values() for name, _ in entry.pieces]
    biases = {name: 0.0 for name in names if name.endswith(".bias")}
    return biases | {name: 1.0 for name in names if name.endswith("norm.weight")}
