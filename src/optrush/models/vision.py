"""Run the tower of a model of images and text: transformers' own module, with the weights of its folder.

A frozen tower is no part of the decoder's parameters: it is not sharded, adapted or saved, and an export copies its
tensors from the base; it runs without gradients. One that is trained, or whose projector is, is the decoder's submodule
`visual`. Either runs before the first block. On a CPU each image is a call of its own, so
that no bit of its features depends on the others of its batch. On a GPU a call has many images: each attends to itself
alone, but the kernels that a device picks for a larger product may round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from optrush.console import transformers_silenced
from optrush.data.batch import Images
from optrush.errors import NeedsError
from optrush.models.families import TOWERS
from optrush.models.multimodal import OtherTensors, TextFolder
from optrush.models.rope_config import rope_settings
from optrush.models.text_part import PATCHES_TOGETHER, text_config
from optrush.models.weights import Initializer, WeightEntry, WeightMap

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder

PREFIXES = ("model.visual.", "visual.")  # of a tower's tensors, in the two layouts of files
# Not cuDNN's, which plans some 40 ms for each size of an image that is new to it (H200).
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Laid:
    """What images change in a forward pass."""

    def __init__(self, positions: Tensor, slots: Tensor, features: Tensor, deep: list[Tensor]) -> None:
        self.positions = positions  # (B, T, E/2): those by which each pair of a token's heads is rotated
        self.slots = slots  # (S,) int64, of B*T
        self.features, self.deep = features, deep  # (S, D) each; of `deep` one for each of the first blocks

    def embed(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> with the features in place of the placeholders' embeddings."""
        return x.flatten(0, 1).index_copy(0, self.slots, self.features.to(x.dtype)).view_as(x)

    def after(self, block: int, x: Tensor) -> Tensor:
        """x (B, T, D) behind a block, by its place among all -> with what the tower adds there."""
        if block >= len(self.deep):
            return x
        return x.flatten(0, 1).index_add(0, self.slots, self.deep[block].to(x.dtype)).view_as(x)


@dataclass
class Tower:
    """A tower with its projector, and how the decoder's heads are rotated by three positions."""

    module: Any
    pairs: Tensor  # (E/2,) int64: the axis of each pair of a head
    together: int = 0  # most patches of images that run in one call; 0: each image by itself
    trained: bool = False  # or a part of it: it is a submodule of the decoder
    buffers: Sequence[tuple[Any, str, Tensor]] = ()  # (module, name, values), of one that is trained

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Tower:
        """Move the weights to a device, or cast them, and return the tower; frequencies of positions stay float32."""
        self.module.to(device)
        for p in self.module.parameters() if dtype is not None else ():
            p.data = p.data.to(dtype)
        self.together = PATCHES_TOGETHER if device.type == "cuda" else 0
        return self

    def restore_buffers(self, device: torch.device) -> None:
        """Restore what allocating the decoder's memory took."""
        self.together = PATCHES_TOGETHER if device.type == "cuda" else 0
        for module, name, values in self.buffers:
            module._buffers[name] = values.to(device, copy=True)

    def __call__(self, images: Images) -> Laid:
        """Return the features of all placeholders, and what is added behind the first blocks."""
        kind = images.colours.device.type
        narrow = self.module.dtype != torch.float32  # as it is cast already: autocast would widen its norms
        with (
            torch.autocast(kind, enabled=not narrow and torch.is_autocast_enabled(kind)),
            sdpa_kernel(ATTENTION),
            torch.set_grad_enabled(self.trained and torch.is_grad_enabled()),
        ):
            return self._laid(images)

    def nothing(self) -> Tensor:
        """Return 0, with a gradient of 0 for each trained parameter."""
        v, device = self.module.config, next(self.module.parameters()).device
        side, none = int(v.spatial_merge_size), torch.empty(0, dtype=torch.int64)
        colours = torch.zeros(side**2, int(v.in_channels * v.patch_size**2), dtype=torch.uint8, device=device)
        levels = np.zeros((int(v.in_channels), 256), np.float32)
        laid = self(Images(colours, none, torch.zeros(1, 1, 3, device=device).int(), (), ((side, side),), levels))
        return torch.stack([part.float().sum() for part in (laid.features, *laid.deep)]).sum() * 0

    def _laid(self, images: Images) -> Laid:
        device, at, found = images.colours.device, 0, list[tuple[Tensor, list[Tensor]]]()
        if not self.trained and self.module.device != device:
            self.to(device)
        frames = int(self.module.config.temporal_patch_size)
        for grids in self._calls(images.grids):
            grid = torch.tensor([(1, *each) for each in grids])
            end = at + int(grid.prod(1).sum())
            patches = images.patches(at, end, frames).to(self.module.dtype)
            given = _boundaries(self.module, grid)
            out = self.module(patches, grid_thw=grid.to(device, non_blocking=True), return_dict=True, **given)
            found.append((out.pooler_output, list(getattr(out, "deepstack_features", None) or ())))
            at = end
        deep = [torch.cat(layer) for layer in zip(*(layers for _, layers in found))]
        positions = images.axes[..., self.pairs.to(device)]
        return Laid(positions, images.slots, torch.cat([features for features, _ in found]), deep)

    def _calls(self, grids: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Yield the images of each call, in order."""
        held, patches = list[tuple[int, int]](), 0
        for high, wide in grids:
            if held and patches + high * wide > self.together:
                yield held
                held, patches = [], 0
            held.append((high, wide))
            patches += high * wide
        yield held


def _boundaries(module: Any, grid: Tensor) -> dict[str, Tensor]:
    """Return where images, and windows of them, begin among patches; on the host, where each block reads them.

    grid: (images, 3), patches in time, height and width.
    """
    found = {"cu_seqlens": pad(grid.prod(1).cumsum(0, dtype=torch.int32), (1, 0))}
    if hasattr(module, "window_size"):
        from transformers.vision_utils import get_vision_window_index

        windows = get_vision_window_index(grid, module.spatial_merge_size, module.window_size, module.patch_size)
        found |= dict(zip(("window_index", "cu_window_seqlens"), windows, strict=True))
    return found


PROJECTOR = ("merger", "deepstack_merger_list")


def train_tower(
    model: Decoder, recipe: WeightMap, folder: Path, hf: Any, part: Literal["projector", "tower"]
) -> WeightMap:
    """Make the tower of a folder a submodule of the decoder; return the map of its weights, too.

    Its blocks run again in the backward pass: a picture's patches are four times its tokens, and so is what they keep.
    """
    tower = open_tower(folder, hf, model.embedding.weight.dtype, model.shape.rotated_width)
    stored = dict(_names(folder))
    others = OtherTensors(folder, set(recipe.buffers) - set(stored.values()))
    values, fillers = OtherTensors(folder, stored.values()), dict[str, Initializer]()
    entries = dict[str, WeightEntry]()
    for name, p in list(tower.module.named_parameters()):
        owner, _, own = name.rpartition(".")
        empty = nn.Parameter(torch.empty_like(p, device="meta"))
        setattr(tower.module.get_submodule(owner), own, empty)
        entries[f"visual.{name}"] = WeightEntry(tuple(p.shape), ((PREFIXES[0] + name, p.shape[0]),))
        fillers[f"visual.{name}"] = partial(_fill, values, stored[name])
    modules = tower.module.modules()
    tower.buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    tower.trained = True
    model.tower, model.visual = tower, tower.module
    unfreeze(model, part)
    if part == "tower":
        for block in tower.module.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    entries, fillers = recipe.entries | entries, recipe.fillers | fillers
    names = recipe.stored_names | {PREFIXES[0] + name: file for name, file in stored.items()}
    return replace(recipe, entries=entries, fillers=fillers, buffers=others, stored_names=names)


def unfreeze(model: Decoder, part: str) -> None:
    """Set which parameters of a tower that is a submodule are trained."""
    assert model.tower is not None
    for name, p in model.tower.module.named_parameters():
        p.requires_grad_(part == "tower" or name.startswith(PROJECTOR))


def _fill(values: Mapping[str, Tensor], name: str, local: Tensor, offset: Sequence[int]) -> None:
    local.copy_(values[name][tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])


def open_tower(folder: Path, hf: Any, dtype: torch.dtype, width: int) -> Tower:
    """Build the tower of a folder and read its weights.

    Args:
        width: E, of what is rotated of a head.

    Raises NeedsError: its tensors are missing, or do not fit config.json.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText
    asked, pairs = f"the tower of {folder}", _pairs(hf, width)
    with transformers_silenced():
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.vision_config._attn_implementation = "sdpa"
        with torch.device("meta"):
            kind: Any = type(auto.from_config(config).model.visual)
        module = kind(config.vision_config).eval()
    tensors, wanted = dict(_tensors(folder)), module.state_dict()
    wrong = [name for name, t in wanted.items() if name not in tensors or tensors[name].shape != t.shape]
    if wrong or tensors.keys() - wanted.keys():
        name = min(wrong or tensors.keys() - wanted.keys())
        found = f"its tensor {name} is missing, or does not fit the vision_config of config.json"
        raise NeedsError(asked, found, "download that folder again")
    module.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
    return Tower(module.requires_grad_(False), pairs)


def _names(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of a tower's tensors, in it and in the folder's files."""
    for name in TextFolder(folder).others:
        for prefix in PREFIXES:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), name
                break


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tower by their names in it."""
    named = dict(_names(folder))
    values = OtherTensors(folder, named.values())
    yield from ((name, values[stored]) for name, stored in named.items())


def _pairs(hf: Any, width: int) -> Tensor:
    """Return the axis of each pair of a head: 0 time, 1 height, 2 width; raises NeedsError: config.json has none."""
    sections = rope_settings(text_config(hf)).get("mrope_section")
    in_turn = TOWERS[hf["model_type"]] == "in turn"
    if not isinstance(sections, list) or len(sections) != 3 or (sum(sections) != width // 2 and not in_turn):
        found = f"mrope_section {sections!r} in its rope_parameters, of heads with {width // 2} pairs"
        do = "add it there, or leave out what replaces them"
        raise NeedsError("rows with images: positions in time, height and width", found, do)
    if not in_turn:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    pairs = torch.zeros(width // 2, dtype=torch.int64)
    for axis in (1, 2):
        pairs[axis : sections[axis] * 3 : 3] = axis
    return pairs
