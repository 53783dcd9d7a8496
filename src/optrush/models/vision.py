"""Run the frozen tower of a model of images and text: transformers' own module, with the weights of its folder.

The tower is no part of the decoder's parameters: it is not trained, sharded, adapted or saved, and an export copies its
tensors from the base. It runs without gradients before the first block, once an image, so that no bit of an image's
features depends on the others of its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optrush.console import transformers_silenced
from optrush.data.batch import Images
from optrush.errors import NeedsError
from optrush.models.multimodal import OtherTensors, TextFolder
from optrush.models.rope_config import rope_settings
from optrush.models.text_part import reads_mutually, text_config, tower_spec

PARTS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.")  # whose tensors a tower has
# Of a tower's tensors, by earlier versions of its class: a module between, and places that are none now.
BETWEEN, NO_MORE = ("vision_tower.", "vision_tower.vision_model."), ".position_ids"


class Laid:
    """What images change in a forward pass."""

    def __init__(self, positions: Tensor | None, slots: Tensor, features: Tensor, deep: list[Tensor]) -> None:
        self.positions = positions  # (B, T, E/2): those by which each pair of a token's heads is rotated; None: its own
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
    """A tower with its projector, and how the decoder reads what it returns."""

    module: Any
    pairs: Tensor | None  # (E/2,) int64: the axis of each pair of a head; None: a token has one position
    mutual: str = "none"  # as `TowerSpec.mutual`
    pad: int = 0  # the id whose inputs of each layer images get

    @torch.no_grad()
    def __call__(self, images: Images) -> Laid:
        """Return the features of all placeholders, and what is added behind the first blocks."""
        if self.module.device != images.patches.device:
            self.module.to(images.patches.device)
        sizes = images.grids.prod(1).tolist()
        found = list[tuple[Tensor, list[Tensor]]]()
        for patches, grid in zip(torch.split(images.patches, sizes), torch.split(images.grids, 1), strict=True):
            found.append(self._features(patches.to(self.module.dtype), grid))
        deep = [torch.cat(layer) for layer in zip(*(layers for _, layers in found))]
        positions = None if self.pairs is None else images.axes[..., self.pairs.to(images.axes.device)]
        return Laid(positions, images.slots, torch.cat([features for features, _ in found]), deep)

    def _features(self, patches: Tensor, grid: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return an image's features (S, D), and those that are added behind the first blocks.

        patches: (P, values), in rows of the image. grid: (1, 3).
        """
        if self.pairs is not None:
            out = self.module(patches, grid_thw=grid, return_dict=True)
            return out.pooler_output, list(getattr(out, "deepstack_features", None) or ())
        high, wide = grid[0, 1:].tolist()
        v, given = self.module.config.vision_config, dict[str, Any]()
        if v.model_type == "gemma4_vision":
            places = torch.stack(torch.meshgrid(torch.arange(wide), torch.arange(high), indexing="xy"), -1)
            given = {"pixel_values": patches[None], "image_position_ids": places.view(1, -1, 2).to(patches.device)}
        else:
            p = v.patch_size
            pixels = patches.view(high, wide, -1, p, p).permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2)
            if v.model_type == "pixtral":
                given["image_sizes"] = torch.tensor([[high * p, wide * p]], device=patches.device)
            else:  # of one size, whose last pixels may be in no patch
                pixels = F.pad(pixels, (0, v.image_size - wide * p, 0, v.image_size - high * p))
            given["pixel_values"] = pixels[None]
        out = self.module.get_image_features(**given, return_dict=True)
        return torch.cat([*out.pooler_output]), []


def open_tower(folder: Path, hf: Any, dtype: torch.dtype, width: int) -> Tower:
    """Build the tower of a folder and read its weights.

    Args:
        width: E, of what is rotated of a head.

    Raises NeedsError: its tensors are missing, or do not fit config.json.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText
    asked, spec = f"the tower of {folder}", tower_spec(hf)
    assert spec is not None
    pairs = None if spec.axes == "one" else _pairs(hf, width, spec.axes)
    with transformers_silenced():
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.vision_config._attn_implementation = "sdpa"
        with torch.device("meta"):
            module: Any = auto.from_config(config).model
        if pairs is None:  # the parts besides the tower have no buffers
            module.vision_tower = type(module.vision_tower)(config.vision_config)
            module.language_model = module.audio_tower = module.embed_audio = None
        else:
            module = type(module.visual)(config.vision_config)
        module.eval()
    wanted = module.state_dict()
    tensors = dict(_tensors(folder, "visual." if pairs is not None else "", wanted))
    wrong = [name for name, t in wanted.items() if name not in tensors or tensors[name].shape != t.shape]
    if wrong or tensors.keys() - wanted.keys():
        name = min(wrong or tensors.keys() - wanted.keys())
        found = f"its tensor {name} is missing, or does not fit the vision_config of config.json"
        raise NeedsError(asked, found, "download that folder again")
    module.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
    mutual = spec.mutual if reads_mutually(hf) else "none"
    return Tower(module.requires_grad_(False), pairs, mutual, text_config(hf).get("pad_token_id") or 0)


def _tensors(folder: Path, prefix: str, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tower by their names in it.

    Args:
        prefix: that of the module among a model's.
        wanted: the names in it.
    """
    for stored, values in OtherTensors(folder, TextFolder(folder).others).items():
        name = stored.removeprefix("model.")
        if not name.startswith(PARTS) or name.endswith(NO_MORE):
            continue
        other = name.replace(*BETWEEN[::-1]) if BETWEEN[1] in name else name.replace(*BETWEEN)
        yield next((one for one in (name, other) if one in wanted), name).removeprefix(prefix), values


def _pairs(hf: Any, width: int, axes: str) -> Tensor:
    """Return the axis of each pair of a head: 0 time, 1 height, 2 width; raises NeedsError: config.json has none."""
    sections = rope_settings(text_config(hf)).get("mrope_section")
    in_turn = axes == "in turn"
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
