"""Load and export the values of a model's parameters: maps to Hugging Face tensors, folders of safetensors.

A parameter has one canonical name (the model's own). Its `WeightEntry` lists its Hugging Face tensors: one, copied;
several, interleaved in groups (a fused qkv, a gate/up pair); or one with these pieces stacked. So a `WeightMap` fills
any rectangle of a parameter and reads only the rows that it needs: a shard is loaded without the full tensor. `split`
is the inverse, for export. Values come from a folder (`Folder`, `PackedFolder`), random initialization (`RandomInit`)
or host memory (`Memory`).

Nothing is unpickled: a folder without safetensors is rejected.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from optrush.errors import CheckpointError, NeedsError
from optrush.files import open_file, parse_json, read_file, read_text, regular
from optrush.kernels import mxfp4, nf4
from optrush.models.decoder import Decoder, Linear
from optrush.models.experts import Experts
from optrush.models.families import ARCHITECTURES, FAMILIES, LAYER_INPUTS, FamilySpec
from optrush.models.shapes import HF, ModelShape, native_obstacle
from optrush.models.text_part import LAYOUTS, text_config

if TYPE_CHECKING:
    from optrush.models.source import Growth

Shape = tuple[int, ...]
Initializer = Callable[[Tensor, Shape], None]
"""Fills a tensor with a parameter's rectangle that begins at an offset and has the tensor's shape."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_rows = 32768  # rows per read, when all rows of an embedding or head are read
EDGE_bytes = 4096  # at each end of a tensor, in a fingerprint


class WeightSource(Protocol):
    """Rows of tensors by Hugging Face name."""

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Return rows [first, last) of a tensor of this `shape`; on any device, of any floating type."""
        ...


class Folder:
    """A folder of safetensors files, with an index or a single file. Reads slices; keeps files open, but not values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._index()  # tensor name -> file name
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        """Return {tensor name: file name}; raise NeedsError if the folder has no valid index and no single file."""
        asked, index = f"the weights in {self.folder}", self.folder / INDEX
        if index.is_file():
            try:
                listed = parse_json(read_text(index))["weight_map"]
                files = {str(name): str(file) for name, file in listed.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise NeedsError(asked, f"{INDEX} is not an index ({error})", "download the folder again") from None
            for file in set(files.values()):
                if re.fullmatch(r"[^/\\]+\.safetensors", file) is None or not (self.folder / file).is_file():
                    found = f"{INDEX} names {file!r}, not a safetensors file of this folder"
                    raise NeedsError(asked, found, "download it again")
            return files
        if (self.folder / SINGLE).is_file():
            with self._handle_of(SINGLE) as handle:
                return dict.fromkeys(handle.keys(), SINGLE)
        pickles = sorted(p.name for p in self.folder.glob("*.bin"))[:1] if self.folder.is_dir() else []
        found = f"only {pickles[0]}, a pickle, which could run code when read" if pickles else f"no {SINGLE}"
        raise NeedsError(asked, found, f"give a folder with {SINGLE} or {INDEX} (save_pretrained writes it)")

    def _handle_of(self, file: str) -> Any:
        try:
            return safe_open(regular(self.folder / file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise NeedsError(f"the weights in {self.folder}", f"{file}: {error}", "download it again") from None

    def _slice(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = self._handle_of(file)
        try:
            return self._open[file].get_slice(self.stored_name(name))
        except SafetensorError as error:
            raise NeedsError(f"tensor {name} in {self.folder / file}", str(error), "download it again") from None

    def stored_name(self, name: str) -> str:
        """Return the name in its file of a tensor of `files`."""
        return name

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        values: Tensor = self._slice(name)[first:last]
        return values

    def check(self, needed: Mapping[str, Shape], duplicates: Mapping[str, str]) -> None:
        """Raise NeedsError unless the folder has the needed tensors in these shapes, and only harmless others.

        duplicates: names that may also be stored, each an exact copy of a needed tensor (a tied head).
        """
        for name, shape in needed.items():
            found = f"no such tensor in {self.folder}"
            if name in self.files:
                if self.shape(name) == shape:
                    continue
                found = f"shape {list(self.shape(name))} in {self.folder / self.files[name]}"
            raise NeedsError(f"tensor {name} of shape {list(shape)}", found, "check that config.json fits the weights")
        for name in sorted(set(self.files) - set(needed)):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # in old checkpoints, and redundant with config.json
            original = duplicates.get(name)
            if original is None or not self._equal(name, original):
                found = f"differs from {original}" if original else "a tensor that this model does not have"
                do = "set tie_word_embeddings to false in config.json" if original else "check config.json"
                raise NeedsError(f"the weights in {self.folder}", f"{name} in {self.files[name]}: {found}", do)

    def _equal(self, a: str, b: str) -> bool:
        shape, first, second = self.shape(a), self._slice(a), self._slice(b)
        chunks = [slice(at, at + CHUNK_rows) for at in range(0, shape[0] if shape else 0, CHUNK_rows)]
        return shape == self.shape(b) and all(torch.equal(first[c], second[c]) for c in chunks)


def refuse_more_layers(stored: Folder | PackedFolder, hf: HF) -> None:
    """Raise NeedsError if config.json has more layers than the files have tensors, before any layer is built."""
    folder = stored if isinstance(stored, Folder) else stored.everything
    text = text_config(hf)
    layers = text.get("num_hidden_layers") or text.get("n_layer") or 0
    if isinstance(layers, int) and layers > len(folder.files):
        numbers = "" if native_obstacle(hf) is not None else f" of {ModelShape.read(hf).parameters:,} parameters in all"
        found = f"{layers:,} layers{numbers} in config.json, where the files have {len(folder.files):,} tensors"
        raise NeedsError(f"the weights in {folder.folder}", found, "check that config.json fits the weights")


def leave_unread(stored: Folder | PackedFolder, shape: ModelShape) -> list[str]:
    """Remove tensors that no layer uses, which are not trained; return their names.

    They belong to multi-token prediction layers after the last layer, or are keys and values of layers that read an
    earlier layer's.
    """
    if not isinstance(stored, Folder):
        return []
    layers = [(name, re.match(r"(?:\w+\.)*layers\.(\d+)\.(self_attn\.[kv]_)?", name)) for name in stored.files]
    unused, b = list[str](), shape.by_layer
    if b is not None:
        reading = {i for i, source in enumerate(b.sources) if source is not None}
        unused = [name for name, match in layers if match is not None and match[2] and int(match[1]) in reading]
    if FAMILIES[shape.family].later_layers:
        unused = [name for name, match in layers if match is not None and int(match[1]) >= shape.layers]
        unused += [name for name in stored.files if name.startswith("mtp.")]
    stored.files = {name: file for name, file in stored.files.items() if name not in set(unused)}
    return [stored.stored_name(name) for name in unused]


def seeded_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return a generator that depends only on (seed, name)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


@dataclass(frozen=True)
class RandomInit:
    """Random weights: a normal draw for matrices, constants for the tensors in `constants` (norms, biases).

    Each full tensor is drawn in float32 on the target device from a separate generator (`seeded_generator`): values do
    not depend on sharding or the model class, on devices of one kind.
    """

    seed: int
    std: float
    constants: Mapping[str, float]

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        if name in self.constants:
            return torch.full((last - first, *shape[1:]), self.constants[name], device=device)
        generator = seeded_generator(self.seed, name, device)
        return torch.empty(shape, device=device).normal_(0.0, self.std, generator=generator)[first:last]


@dataclass(frozen=True)
class Memory:
    """Tensors in host memory."""

    tensors: dict[str, Tensor]

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        return self.tensors[name][first:last]


@dataclass(frozen=True)
class WeightEntry:
    """The layout of one parameter: `groups` groups of rows, each with `rows` rows of every piece in turn."""

    shape: Shape
    pieces: tuple[tuple[str, int], ...]  # (Hugging Face name, rows in one group)
    groups: int = 1
    joined: tuple[int, ...] = ()  # one tensor has several stacked pieces: rows of each in one group

    def hf_shapes(self) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of the Hugging Face tensors."""
        for name, rows in self.pieces:
            yield name, ((self.groups * rows, *self.shape[1:]) if self.shape else ())

    def rows(self, source: WeightSource, first: int, last: int, device: torch.device) -> Tensor:
        """Return rows [first, last) of the parameter."""
        sizes = self.joined or [n for _, n in self.pieces]
        if len(sizes) == 1:
            return source.rows(self.pieces[0][0], first, last, self.shape, device)
        rows = sum(sizes)
        g0, g1 = first // rows, -(-last // rows)  # the groups that cover [first, last)
        parts, above = [], 0
        for (name, shape), n in zip([*self.hf_shapes()] * (len(self.joined) or 1), sizes, strict=True):
            values = source.rows(name, above + g0 * n, above + g1 * n, shape, device)
            parts.append(values.reshape(g1 - g0, n, *shape[1:]))
            above += self.groups * n if self.joined else 0
        return torch.cat(parts, 1).flatten(0, 1)[first - g0 * rows : last - g0 * rows]

    def split(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors of the full parameter."""
        if len(self.pieces) == 1:
            yield self.pieces[0][0], put_in_turn(full, self.joined) if self.joined else full
            return
        parts = torch.split(full.reshape(self.groups, -1, *self.shape[1:]), [n for _, n in self.pieces], 1)
        for (hf, _), part in zip(self.pieces, parts, strict=True):
            yield hf, part.clone(memory_format=torch.contiguous_format).flatten(0, 1)  # separate storage


def put_in_turn(full: Tensor, rows: Sequence[int]) -> Tensor:
    """Return groups of pieces with these rows (groups x sum, ...) as complete pieces, stacked."""
    parts = torch.split(full.reshape(-1, sum(rows), *full.shape[1:]), [*rows], 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def grouped(whole: Tensor, rows: Sequence[int]) -> Tensor:
    """Invert `put_in_turn`."""
    parts = torch.split(whole, [len(whole) // sum(rows) * n for n in rows])
    return torch.cat([p.reshape(-1, n, *p.shape[1:]) for p, n in zip(parts, rows, strict=True)], 1).flatten(0, 1)


@dataclass(frozen=True)
class ExpertsEntry(WeightEntry):
    """The layout of a matrix per expert, (N, rows, width).

    Each expert's matrix is described like in a `WeightEntry`, with `{}` in names for the expert's number. If `stacked`,
    one tensor has all matrices, and in each matrix a piece's rows follow the rows of the piece before.
    """

    stacked: bool = False
    transposed: bool = False  # a stacked tensor is (N, width, rows)

    def hf_shapes(self) -> Iterator[tuple[str, Shape]]:
        if self.stacked:
            N, rows, width = self.shape
            yield self.pieces[0][0], ((N, width, rows) if self.transposed else self.shape)
            return
        for number in range(self.shape[0]):
            yield from self._matrix(number).hf_shapes()

    def _matrix(self, number: int) -> WeightEntry:
        pieces = tuple((name.format(number), rows) for name, rows in self.pieces)
        return WeightEntry(self.shape[1:], pieces, self.groups)

    def rows(self, source: WeightSource, first: int, last: int, device: torch.device) -> Tensor:
        if not self.stacked:
            rows = self.shape[1]
            return torch.stack([self._matrix(n).rows(source, 0, rows, device) for n in range(first, last)])
        ((name, shape),) = self.hf_shapes()
        values = source.rows(name, first, last, shape, device)
        values = values.transpose(1, 2) if self.transposed else values
        return values.reshape(last - first, -1, self.groups, self.shape[2]).transpose(1, 2).flatten(1, 2)

    def split(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        N, rows, width = self.shape
        if self.stacked:
            pieces = full.reshape(N, self.groups, -1, width).transpose(1, 2)
            stacked = pieces.reshape(N, rows, width)
            yield self.pieces[0][0], stacked.transpose(1, 2).contiguous() if self.transposed else stacked
            return
        for number in range(N):
            yield from self._matrix(number).split(full[number])


@dataclass(frozen=True)
class WeightMap:
    """The source of every parameter's values, by canonical name: for loading and for export.

    Parameters that techniques add to the published model (adapters, quantized weights) have a filler instead.
    """

    entries: dict[str, WeightEntry]
    source: WeightSource
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # exported unchanged, by Hugging Face name
    fillers: dict[str, Initializer] = field(default_factory=dict)  # by canonical name
    stored_names: dict[str, str] = field(default_factory=dict)  # Hugging Face name -> name in the base, if different
    architecture: str = ""  # transformers' class of the model
    growth: Growth | None = None  # of the vocabulary: the base has fewer rows

    def fill(self, name: str, local: Tensor, offset: Shape) -> None:
        """Fill `local` with the rectangle of parameter `name` that begins at `offset` and has `local`'s shape.

        local: any device and floating type; may be empty. offset: one start per dimension, in the full parameter.
        """
        if name in self.fillers:
            if local.numel():
                self.fillers[name](local, offset)
            return
        self.fill_published(name, local, offset)

    def fill_published(self, name: str, local: Tensor, offset: Shape) -> None:
        """Fill like `fill`, but from the source even if there is a filler."""
        entry = self.entries[name]
        full = entry.shape
        ends = [start + size for start, size in zip(offset, local.shape, strict=True)]
        assert len(ends) == len(full) and all(0 <= s <= e <= n for s, e, n in zip(offset, ends, full)), (
            f"{name}: {tuple(local.shape)} at {offset} is not inside {full}"
        )
        if local.numel() == 0:
            return
        with torch.no_grad():
            values = entry.rows(self.source, offset[0], ends[0], local.device)
            for dim in range(1, len(full)):
                values = values.narrow(dim, offset[dim], local.shape[dim])
            local.copy_(values)

    def split(self, name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors of a full parameter: the inverse of `fill`."""
        entry = self.entries[name]
        assert tuple(full.shape) == entry.shape, f"{name}: {tuple(full.shape)} is not {entry.shape}"
        yield from entry.split(full)

    def stored(self, name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `split` under their names in the base's files."""
        for hf_name, part in self.split(name, full):
            yield self.stored_names.get(hf_name, hf_name), part

    def release(self) -> None:
        """Free host values that only `fill` needs; afterwards `fill` fails, but `split` works."""
        source: object = self.source
        while not isinstance(source, Memory) and hasattr(source, "source"):
            source = source.source
        if isinstance(source, Memory):
            source.tensors.clear()


def native_entries(
    model: Decoder, stored: Collection[str] = (), prefixes: tuple[str, str] = LAYOUTS[-1]
) -> dict[str, WeightEntry]:
    """Return the entry of every parameter of a decoder, in the order of its named_parameters.

    Args:
        stored: names of the base's tensors, which show the layout of experts; without a base one tensor has all.
        prefixes: of tensor names, and of the head's.
    """
    entries: dict[str, WeightEntry] = {}
    (prefix, head), spec = prefixes, FAMILIES[model.shape.family]
    outer = {"embedding": f"{prefix}embed_tokens.", "norm": f"{prefix}norm.", "head": head}
    outer |= {f"inputs.{name}": f"{prefix}{hf}." for name, hf in LAYER_INPUTS.items()}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        shape, module = tuple(parameter.shape), model.get_submodule(owner)
        if isinstance(module, Experts):
            entries[name] = _experts_entry(f"{prefix}layers.{owner.split('.')[1]}", kind, shape, spec, stored)
            continue
        if owner in outer:
            names = [outer[owner] + kind]
        else:
            _, number, *inside = owner.split(".")
            layer, part = f"{prefix}layers.{number}", inside[-1] if inside else "sinks"
            mlp = spec.feed_forward
            if spec.experts is not None and spec.experts.shared_name and model.get_submodule(f"blocks.{number}").shared:
                mlp += f".{spec.experts.shared_name}"
            if kind == "layer_scalar":
                names = [f"{layer}.{kind}"]
            elif inside[:1] == ["delta"]:
                names = [".".join((layer, "linear_attn", *inside[1:], kind))]
            else:
                names = [f"{layer}.{hf.format(mlp=mlp)}.{kind}" for hf in spec.names[part]]
        rows, groups = [shape[0]], 1
        if isinstance(module, Linear):
            rows, groups = [n for _, n in module.output_splits], module.groups
        names, joined = names[: len(rows)], tuple(rows) if len(names) < len(rows) else ()
        entries[name] = WeightEntry(
            shape, tuple(zip(names, [sum(rows)] if joined else rows, strict=True)), groups, joined
        )
    return entries


# Parameters with one value per expert, by their names in the router.
_ROUTER = {"router": "weight", "router_bias": "bias", "correction": "e_score_correction_bias"}
_SCALES = {"router_scale": "scale", "expert_scale": "per_expert_scale"}  # of a router that scales its input and output


def _experts_entry(layer: str, kind: str, shape: Shape, spec: FamilySpec, stored: Collection[str]) -> WeightEntry:
    """Return the entry of one parameter of a layer's experts."""
    e, module = spec.experts, spec.experts_in(layer)
    assert e is not None
    stacked = e.apart is None or not stored or f"{module}.experts.gate_up_proj" in stored
    if e.apart is not None and not stacked:
        module = f"{layer}.{e.apart[0]}"
    if kind in _SCALES:
        return WeightEntry(shape, ((f"{module}.router.{_SCALES[kind]}", shape[0]),))
    if kind in _ROUTER:
        return WeightEntry(shape, ((f"{module}.{e.router_name}.{_ROUTER[kind]}", shape[0]),))
    if kind.endswith("_bias"):
        return WeightEntry(shape, ((f"{module}.experts.{kind.replace('_bias', '_proj_bias')}", shape[0]),))
    groups = shape[1] // 2 if kind == "gate_up" and not e.interleaved else 1
    if e.apart is None or stacked:
        pieces = ((f"{module}.experts.{kind}_proj", shape[1] // groups),)
        return ExpertsEntry(shape, pieces, groups, stacked=True, transposed=e.transposed)
    names = e.apart[1:3] if kind == "gate_up" else e.apart[3:]
    rows = 1 if kind == "gate_up" else shape[1]
    return ExpertsEntry(shape, tuple((f"{module}.experts.{{}}.{name}.weight", rows) for name in names), groups)


def weights_fingerprint(folder: Path | None, seed: int) -> str:
    """Return a hash of a sample of a folder's values, or the seed of random weights. For weights that are not saved.

    It covers name, size and header of each file, every 64th MiB, and the first and last 4 KiB of each tensor.
    """
    if folder is None:
        return f"drawn, seed {seed}"
    sha = hashlib.sha256()
    for path in value_files(folder):
        size = path.stat().st_size
        sha.update(f"{path.name} {size}".encode())
        with open_file(path) as file:
            begins = 8 + int.from_bytes(file.read(8), "little")
            header = file.read(begins - 8)
            sha.update(header)
            tensors = [t["data_offsets"] for name, t in parse_json(header).items() if name != "__metadata__"]
            edges = [at for first, end in tensors for at in (first, max(first, end - EDGE_bytes))]
            pieces = [(at, 1 << 20) for at in range(0, size, 64 << 20)] + [(begins + at, EDGE_bytes) for at in edges]
            for at, length in sorted(pieces):
                file.seek(at)
                sha.update(file.read(length))
    return sha.hexdigest()


def value_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights."""
    return [folder / name for name in sorted(set(Folder(folder).files.values()))]


def random_init(hf: HF, seed: int, constants: Mapping[str, float]) -> RandomInit:
    """Return random weights with the initializer_range of a config.json, by default 0.02."""
    return RandomInit(seed, float(text_config(hf).get("initializer_range") or 0.02), constants)


def native_constants(entries: Mapping[str, WeightEntry], centred: bool = False) -> dict[str, float]:
    """Return the initial values of a decoder's biases, norms (centred: of 1 + weight) and decays.

    Published decays are drawn from (0, 16); here all start in the middle.
    """
    names = [name for entry in entries.values() for name, _ in entry.pieces]
    biases = {name: 0.0 for name in names if name.endswith("bias")}
    ones = {
        name: 0.0 if centred and ".linear_attn." not in name else 1.0 for name in names if name.endswith("norm.weight")
    }
    decays = {name: math.log(8.0) for name in names if name.endswith("A_log")}
    return biases | ones | decays | {name: 1.0 for name in names if name.endswith(("dt_bias", "scale", "layer_scalar"))}


# --- export: config.json and safetensors in transformers' layout, written tensor by tensor

CONFIG = "config.json"
TYPE_KEYS = ("dtype", "torch_dtype")  # in config.json: the weights' type, and its name before transformers 4.56
# The quantization of the base's files, and the choice of attention, which may refer to code on the hub.
LEFT_OUT = ("quantization_config", "attn_implementation", "_attn_implementation", "_attn_implementation_internal")


class _Shards:
    """Numbered files of tensors, written as tensors are added; renamed at the end, when their number is known."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.written: list[list[str]] = []  # names of each file's tensors
        self.bytes_of = Counter[torch.dtype]()

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending and self.pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        self.pending[name] = tensor.detach().contiguous()
        self.pending_bytes += tensor.nbytes
        self.bytes_of[tensor.dtype] += tensor.nbytes

    def _part(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors.part"

    def _flush(self) -> None:
        save_file(self.pending, self._part(len(self.written) + 1), metadata={"format": "pt"})
        self.written.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        self._flush()
        if len(self.written) == 1:
            self._part(1).rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.written, 1):
            file = f"model-{i:05d}-of-{len(self.written):05d}.safetensors"
            self._part(i).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.bytes_of.total()}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_weights(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], recipe: WeightMap, hf: HF, max_shard_bytes: float = 5e9,
    base: Path | None = None,
) -> None:  # fmt: skip
    """Write a folder that transformers' AutoModelForCausalLM loads: config.json and safetensors, in its own layout.

    Args:
        folder: created if missing; must not contain weights.
        tensors: every full parameter by canonical name, on the CPU, without aliases; consumed one at a time.
        hf: the model's config.json; its type becomes that of most of the bytes.
        max_shard_bytes: maximum size of a file, unless a single tensor exceeds it.
        base: the folder that training started from; its config.json is copied if `hf` has the same values.

    Raises:
        CheckpointError: the folder already contains weights, or a parameter is unknown, given twice or missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = f"export to {folder}"
    if present := sorted(p.name for p in folder.iterdir() if ".safetensors" in p.name):
        raise CheckpointError(asked, f"it already has {present[0]}", "use an empty folder")
    shards, missing = _Shards(folder, max_shard_bytes), set(recipe.entries)
    for name, full in tensors:
        if name not in missing:
            raise CheckpointError(asked, f"parameter {name} is unknown or repeated", "export the model's parameters")
        missing.remove(name)
        for hf_name, part in recipe.stored(name, full):
            shards.add(hf_name, part)
    if missing:
        raise CheckpointError(asked, f"no values for {sorted(missing)[0]}", "export all of the model's parameters")
    dtype = shards.bytes_of.most_common(1)[0][0]
    for hf_name, buffer in recipe.buffers.items():
        shards.add(recipe.stored_names.get(hf_name, hf_name), buffer)
    shards.close()
    (folder / CONFIG).write_bytes(_config_bytes(hf, str(dtype).removeprefix("torch."), recipe.architecture, base))


def _config_bytes(hf: HF, dtype: str, architecture: str, base: Path | None) -> bytes:
    """Return config.json: the base's bytes if all values are equal; otherwise its keys in their order."""
    config = {key: value for key, value in hf.items() if key not in LEFT_OUT}
    # Readers before transformers 4.56 have no `dtype`; if a base has neither key, they use the type of the tensors.
    for key in [key for key in TYPE_KEYS if key in config] or ([] if base is not None else TYPE_KEYS[:1]):
        config[key] = dtype
    if text_config(config) is not config:  # also in a separate language model config
        text = config["text_config"]
        config["text_config"] = {**text, **{key: dtype for key in TYPE_KEYS if key in text}}
    if not config.get("architectures"):
        config["architectures"] = [architecture or ARCHITECTURES[config["model_type"]]]
    published = b"" if base is None else read_file(base / CONFIG)
    if published and json.loads(published) == config:
        return published
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


# --- new tokens: their rows of embedding and head are the mean of the existing tokens' rows
#
# Source: Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html: before any training, new tokens with
# random rows can get most of the probability; with the mean of the old rows, n new tokens among V get at most about n /
# V. Differs from the source: rows without a token, which pad published embeddings, are not in the mean; they are
# overwritten if a new token gets them.


class WithNewTokens:
    """A source that adds the rows of new tokens to embedding and head, under any sharding."""

    def __init__(self, source: WeightSource, names: frozenset[str], growth: Growth) -> None:
        self.source, self.names, self.growth = source, names, growth
        self._means: dict[str, Tensor] = {}

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        if name not in self.names:
            return self.source.rows(name, first, last, shape, device)
        growth, published = self.growth, (self.growth.rows, *shape[1:])
        a, b = max(first, growth.first), min(last, growth.last)
        if a >= b:
            return self.source.rows(name, first, last, published, device)
        parts = [self._mean(name, published, device).expand(b - a, *shape[1:])]
        if first < a:
            parts.insert(0, self.source.rows(name, first, a, published, device).float())
        if b < last:
            parts.append(self.source.rows(name, b, last, published, device).float())
        return torch.cat(parts)

    def _mean(self, name: str, shape: Shape, device: torch.device) -> Tensor:
        """Return the mean row (D,) in float32, summed in float64; () for a bias."""
        if name not in self._means:
            n = self.growth.first
            chunks = [range(at, min(at + CHUNK_rows, n)) for at in range(0, n, CHUNK_rows)]
            sums = (self.source.rows(name, c.start, c.stop, shape, device).sum(0, dtype=torch.float64) for c in chunks)
            self._means[name] = (sum(sums, torch.zeros((), dtype=torch.float64)) / n).float()
        return self._means[name]


def widened(source: WeightSource, model: Any, entries: dict[str, WeightEntry], growth: Growth | None) -> WeightSource:
    """Return the source with rows for new tokens, if any."""
    return source if growth is None else WithNewTokens(source, vocabulary_names(model, entries), growth)


def refuse_frozen(model: Any, recipe: WeightMap, growth: Growth) -> None:
    """Raise NeedsError if the rows of new tokens are not trained: they would remain the mean of the others."""
    both = {id(model.embedding.weight), id(model.head.weight)}
    rows = [name for name, p in model.named_parameters() if id(p) in both and not p.requires_grad]
    if not growth.tokens or not rows:
        return
    modules = [recipe.entries[name].pieces[0][0].rsplit(".", 2)[-2] for name in rows]
    modules += ["lm_head"] if len(both) == 1 else []  # a tied head
    found = f"{' and '.join(modules)} frozen: the new rows would stay at the mean of the others"
    do = f"train them in addition to the adapters (save: [{', '.join(modules)}])"
    raise NeedsError(f"`model.add_tokens: [{', '.join(growth.tokens)}]`", found, do)


def vocabulary_names(model: Any, entries: dict[str, WeightEntry]) -> frozenset[str]:
    """Return the published names of parameters with one row per token: embedding, head, its bias."""
    wide = {id(model.embedding.weight), id(model.head.weight), id(model.head.bias)}
    if (inputs := getattr(model, "inputs", None)) is not None:
        wide.add(id(inputs.embedding.weight))
    return frozenset(entries[name].pieces[0][0] for name, p in model.named_parameters() if id(p) in wide)


@torch.no_grad()
def enlarge(hf_model: Any, growth: Growth) -> None:
    """Add the rows of new tokens to a transformers model on the CPU."""
    if growth.vocab > growth.rows:
        hf_model.resize_token_embeddings(growth.vocab, mean_resizing=False)
    output = hf_model.get_output_embeddings()
    parameters = (hf_model.get_input_embeddings().weight, output.weight, output.bias)
    for p in {id(p): p for p in parameters if isinstance(p, nn.Parameter)}.values():
        p[growth.first : growth.last] = p[: growth.first].mean(0, dtype=torch.float64).to(p.dtype)


# --- folders of 4-bit weights: quantized by bitsandbytes, saved by transformers, read without dequantization
#
# A tensor `x.weight`, packed as uint8 (n, 1), has `x.weight.absmax`, `.quant_map`, with double quantization
# `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`: JSON with the shape, the block sizes
# and the offset. Only a technique that stores weights in this form can read them.

MARK = ".quant_state.bitsandbytes__"
MAP, NESTED_MAP = ".quant_map", ".nested_quant_map"
PARTS = {"codes": "", "absmax": ".absmax", "nested": ".nested_absmax"}  # name in kernels/nf4.py: suffix


def open_weights(folder: Path) -> Folder | PackedFolder:
    """Open a folder of dense or 4-bit weights; raise NeedsError like `Folder` and `PackedFolder`."""
    opened = Folder(folder)
    if any(name.endswith(BLOCKS) for name in opened.files):
        return Mxfp4Folder(folder)
    return PackedFolder(opened) if any(MARK in name for name in opened.files) else opened


def refuse_packed(folder: Path) -> None:
    """Raise NeedsError if the weights are packed, which models in transformers cannot load here."""
    opened = open_weights(folder)
    if isinstance(opened, Mxfp4Folder):
        found = "a model that runs through transformers, which loads dense weights"
        raise NeedsError(f"the MXFP4 experts in {folder}", found, "set model.implementation: native")
    if isinstance(opened, PackedFolder):
        found = "a model that runs through transformers, which loads dense weights"
        raise NeedsError(f"the packed weights in {folder}", found, "start from the unquantised checkpoint, --with nf4")


BLOCKS, SCALES = "_blocks", "_scales"  # gpt-oss's experts: (N, rows, width / 32, 16) and (N, rows, width / 32)


class Mxfp4Folder(Folder):
    """A folder whose experts are 4-bit floats (kernels/mxfp4.py); names and dense values are transformers'."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stored = Folder(folder)
        self.packed = {name.removesuffix(BLOCKS) for name in self.files if name.endswith(BLOCKS)}
        for name in sorted(self.packed):
            parts = [name + end for end in (BLOCKS, SCALES) if name + end in self.files]
            kinds = " and ".join(f"{list(self.stored.shape(p))} of {self.stored._slice(p).get_dtype()}" for p in parts)
            size = list(self.stored.shape(name + BLOCKS)[:3])
            if kinds != f"{[*size, mxfp4.BLOCK // 2]} of U8 and {size} of U8" or len(size) < 3:
                asked = f"the MXFP4 tensor {name} in {folder}, blocks of 16 bytes with a scale each"
                raise NeedsError(asked, kinds, "download it again")
        dense = {name: self.files[name + BLOCKS] for name in self.packed}
        ends = {name + end for name in dense for end in (BLOCKS, SCALES)}
        self.files = {name: file for name, file in self.files.items() if name not in ends} | dense

    def shape(self, name: str) -> Shape:
        if name not in self.packed:
            return super().shape(name)
        N, rows, blocks, _ = self.stored.shape(name + BLOCKS)
        return N, blocks * mxfp4.BLOCK, rows

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Return matrices (width, rows) of some experts; for a packed tensor the exact values, in bfloat16."""
        if name not in self.packed:
            return super().rows(name, first, last, shape, device)
        out = torch.empty(last - first, shape[2], shape[1], dtype=torch.bfloat16, device=device)
        parts = [self.stored._slice(name + end)[first:last].to(device).flatten() for end in (BLOCKS, SCALES)]
        mxfp4.dequantize_mxfp4(parts, out)
        return out.transpose(1, 2)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return a packed tensor's parts by the names of `mxfp4.mxfp4_bytes`."""
        return {"codes": self.stored._slice(name + BLOCKS)[:], "scales": self.stored._slice(name + SCALES)[:]}


class PackedFolder:
    """A source with some packed tensors, which have parts instead of rows; NeedsError for other formats."""

    def __init__(self, everything: Folder) -> None:
        self.everything = everything
        marks = {name.partition(MARK)[0]: name for name in everything.files if MARK in name}
        self.states = {name: self._state(name, mark) for name, mark in marks.items()}
        sides = {name + end for name in marks for end in (*PARTS.values(), MAP, NESTED_MAP)}
        self.dense = Folder(everything.folder)
        self.dense.files = {n: f for n, f in everything.files.items() if n not in sides | set(marks.values())}

    def check(self, needed: Mapping[str, Shape], duplicates: Mapping[str, str]) -> None:
        """Check like `Folder.check`; the shape of a packed tensor is that of its dense values."""
        for name, state in self.states.items():
            shape = tuple(state["shape"])
            if needed.get(name) != shape:
                asked = f"the packed tensor {name} of shape {list(shape)} in {self.dense.folder}"
                found = f"config.json needs {list(needed[name]) if name in needed else 'no such tensor'}"
                raise NeedsError(asked, found, "check that config.json fits the weights")
        self.dense.check({n: s for n, s in needed.items() if n not in self.states}, duplicates)

    def rows(self, name: str, first: int, last: int, shape: Shape, device: torch.device) -> Tensor:
        """Return rows of a tensor; raise NeedsError if it is packed."""
        if name in self.states:
            found = f"{name} is packed in 4 bits"
            raise NeedsError(f"dense weights from {self.dense.folder}", found, "add --with nf4 --with lora")
        return self.dense.rows(name, first, last, shape, device)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return a packed tensor's parts by the names of `nf4.quantize_nf4`; NeedsError for a wrong size or type."""
        state, files = self.states[name], self.everything.files
        parts = {part: self._read(name + end).reshape(-1) for part, end in PARTS.items() if name + end in files}
        if "nested" in parts:
            offset = torch.tensor([state["nested_offset"]], dtype=torch.float32)
            parts["nested"] = torch.cat((parts["nested"], offset)).to(parts["nested"].dtype)  # checked below
        nested = "nested_offset" in state
        for part, size in nf4.nf4_bytes(state["rows"], state["width"], nested).items():
            kind = torch.uint8 if part == "codes" or (nested and part == "absmax") else torch.float32
            if part not in parts or parts[part].numel() * parts[part].element_size() != size:
                asked = f"{size} bytes of {name}{PARTS[part]} in {self.dense.folder}"
                raise NeedsError(asked, "others" if part in parts else "none", "download it again")
            if parts[part].dtype != kind:
                asked = f"{name}{PARTS[part]} in {self.dense.folder} as {kind}"
                raise NeedsError(asked, f"{parts[part].dtype}", "download it again")
        return parts

    def _read(self, name: str) -> Tensor:
        values: Tensor = self.everything._slice(name)[:]
        return values

    def _state(self, name: str, mark: str) -> dict[str, Any]:
        """Return the checked contents of a tensor's `quant_state`."""
        asked = f"tensor {name} in {self.everything.folder}, packed by bitsandbytes"
        do = "use its unquantised checkpoint with --with nf4, which quantises while loading"
        try:
            state: dict[str, Any] = parse_json(bytes(self._read(mark).tolist()))
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
            table = self._read(name + end).float() if name + end in self.everything.files else torch.empty(0)
            if table.shape != known.shape or not torch.allclose(table, known):
                raise NeedsError(asked, f"{end[1:]} differs from bitsandbytes' values", do)
        return state
