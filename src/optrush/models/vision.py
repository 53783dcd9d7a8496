"""Run the tower of an image-text model: transformers' own module, with the weights of its folder.

A frozen tower does not belong to the decoder's parameters: it is not sharded, adapted or saved, an export copies its
tensors from the base, and it runs without gradients. A tower that is trained, or whose projector is, is the decoder's
submodule `visual`. Either runs before the first block. On a CPU each image is a separate call, so other images do not
change a bit of its features. On a GPU a call has many images: each attends only to itself, but kernels for larger
matmuls may round differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from optrush.models.families import TowerSpec
from optrush.models.multimodal import OtherTensors, TextFolder
from optrush.models.rope_config import rope_settings
from optrush.models.text_part import PARTS, PATCHES_TOGETHER, reads_mutually, text_config, tower_spec
from optrush.models.weights import Initializer, WeightEntry, WeightMap

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder

PROJECTOR = (
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "embed_vision",
)  # modules between tower and model
# In a tower's tensor names of earlier class versions: a module in between, and tensors that no longer exist.
BETWEEN, NO_MORE = ("vision_tower.", "vision_tower.vision_model."), ".position_ids"
# Without cuDNN's, which needs some 40 ms to plan for each new image size (H200).
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Laid:
    """Changes of a forward pass by images."""

    def __init__(self, positions: Tensor | None, slots: Tensor, features: Tensor, deep: list[Tensor]) -> None:
        self.positions = positions  # (B, T, E/2): positions that rotate the pairs of a token's heads; None: its own
        self.slots = slots  # (S,) int64, of B*T
        self.features, self.deep = features, deep  # (S, D) each; `deep` has one for each of the first blocks

    def embed(self, x: Tensor) -> Tensor:
        """Replace the placeholders' embeddings in x (B, T, D) by the features."""
        return x.flatten(0, 1).index_copy(0, self.slots, self.features.to(x.dtype)).view_as(x)

    def after(self, block: int, x: Tensor) -> Tensor:
        """Add the tower's features after a block, by its number, to x (B, T, D)."""
        if block >= len(self.deep):
            return x
        return x.flatten(0, 1).index_add(0, self.slots, self.deep[block].to(x.dtype)).view_as(x)


@dataclass
class Tower:
    """A tower with its projector, and the decoder's settings for its output."""

    module: Any
    spec: TowerSpec
    pairs: Tensor | None  # (E/2,) int64: the axis of each pair of a head; None: a token has one position
    mutual: str = "none"  # see `TowerSpec.mutual`
    pad: int = 0  # the id whose layer inputs images get
    together: int = 0  # maximum patches of images per call; 0: one image per call
    trained: bool = False  # all or part of it: it is a submodule of the decoder
    buffers: Sequence[tuple[Any, str, Tensor]] = ()  # (module, name, values), of a trained tower
    compiled: bool = False

    @property
    def vision(self) -> Any:
        """The configuration of the tower without its projector."""
        return getattr(self.module.config, "vision_config", self.module.config)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Tower:
        """Move the weights to a device, or cast them; return the tower. Position frequencies stay float32."""
        self.module.to(device)
        for p in self.module.parameters() if dtype is not None else ():
            p.data = p.data.to(dtype)
        self.together = PATCHES_TOGETHER if device.type == "cuda" else 0
        return self

    def restore_buffers(self, device: torch.device) -> None:
        """Restore the buffers that were lost by allocating the decoder's memory."""
        self.together = PATCHES_TOGETHER if device.type == "cuda" else 0
        for module, name, values in self.buffers:
            module._buffers[name] = values.to(device, copy=True)

    def compile(self) -> int:
        """Compile the blocks of a frozen tower that runs images of any size in one call; return their number.

        Their attention becomes one kernel for all images, because a loop over image lengths would break the graph.
        """
        if self.trained or not self.together or self.pairs is None or self.module.dtype == torch.float32:
            return 0
        blocks = _blocks(self.module)
        joined = _joined(type(blocks[0].attn))
        for block in blocks:
            block.attn.__class__ = joined
            block.compile(dynamic=True)
        self.compiled = True
        return len(blocks)

    def __call__(self, images: Images) -> Laid:
        """Return the features of all placeholders, and those added after the first blocks."""
        kind = images.colours.device.type
        narrow = self.module.dtype != torch.float32  # already cast: autocast would widen its norms
        with (
            torch.autocast(kind, enabled=not narrow and torch.is_autocast_enabled(kind)),
            sdpa_kernel(ATTENTION),
            torch.set_grad_enabled(self.trained and torch.is_grad_enabled()),
        ):
            return self._laid(images)

    def nothing(self) -> Tensor:
        """Return 0, with a gradient of 0 for each trained parameter."""
        v, device = self.vision, next(self.module.parameters()).device
        side = int(getattr(v, "spatial_merge_size", 0) or getattr(self.module.config, "spatial_merge_size", 1))
        if self.spec.sizes == "one":
            side = v.image_size // v.patch_size
        elif self.spec.sizes == "budget":
            side = int(v.pooling_kernel_size)
        colours = torch.zeros(side**2, 3 * v.patch_size**2, dtype=torch.uint8, device=device)
        levels, slots = np.zeros((3, 256), np.float32), torch.empty(0, dtype=torch.int64)
        laid = self(Images(colours, slots, torch.zeros(1, 1, 3, device=device).int(), (), ((side, side),), levels))
        return torch.stack([part.float().sum() for part in (laid.features, *laid.deep)]).sum() * 0

    def _laid(self, images: Images) -> Laid:
        device, at, results = images.colours.device, 0, list[tuple[Tensor, list[Tensor]]]()
        if not self.trained and self.module.device != device:
            self.to(device)
        frames = int(getattr(self.vision, "temporal_patch_size", 1))
        for grids in self._calls(images.grids):
            end = at + sum(high * wide for high, wide in grids)
            results.append(self._features(images.patches(at, end, frames).to(self.module.dtype), grids))
            at = end
        deep = [torch.cat(layer) for layer in zip(*(layers for _, layers in results))]
        positions = None if self.pairs is None else images.axes[..., self.pairs.to(device)]
        return Laid(positions, images.slots, torch.cat([features for features, _ in results]), deep)

    def _features(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor]]:
        """Return the features (S, D) of a call's images, and those added after the first blocks."""
        merge = getattr(self.module.config, "spatial_merge_size", 0)
        if self.pairs is None and len(patches) == merge**2:  # Mistral 3 drops the axis of a single placeholder
            return self._features(patches.repeat(2, 1), [*grids] * 2)[0][:1], []
        given = tower_inputs(self.spec, self.vision, patches, grids)
        if self.pairs is None:
            out = self.module.get_image_features(**given, return_dict=True)
            return torch.cat([*out.pooler_output]), []
        grid = given["image_grid_thw"]
        moved, bounds = grid.to(patches.device, non_blocking=True), _boundaries(self.module, grid)
        if self.compiled:
            bounds = {name: t.to(patches.device, non_blocking=True) for name, t in bounds.items()}
            _JoinedAttention.longest = max(_JoinedAttention.longest, 1 << int(grid.prod(1).max() - 1).bit_length())
        out = self.module(patches, grid_thw=moved, return_dict=True, **bounds)
        return out.pooler_output, list(getattr(out, "deepstack_features", None) or ())

    def _calls(self, grids: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Yield the images of each call, in order, as the tower supports them: any sizes, one size, or one by one."""
        held, patches = list[tuple[int, int]](), 0
        for high, wide in grids:
            other = held and self.spec.sizes != "bounded" and held[-1] != (high, wide)
            if held and (other or self.spec.sizes == "longest" or patches + high * wide > self.together):
                yield held
                held, patches = [], 0
            held.append((high, wide))
            patches += high * wide
        yield held


class _JoinedAttention:
    """Attention of a tower's block over the patches of many images, each within its own, in one kernel."""

    longest = 1  # bound of the patches per image: a power of two, to limit recompilations
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def forward(
        self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """hidden_states (P, D) of patches, cu_seqlens (images + 1,) int32 -> (P, D)."""
        from optrush.kernels.attention_varlen import attend_all

        q, k, v = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k = self.rotate(q, k, *position_embeddings)
        out: Tensor = self.proj(attend_all(q, k, v, cu_seqlens, self.longest).flatten(1))
        return out


def _joined(kind: type) -> type:
    rotate = staticmethod(sys.modules[kind.__module__].apply_rotary_pos_emb_vision)
    return type(f"Joined{kind.__name__}", (_JoinedAttention, kind), {"rotate": rotate})


def tower_inputs(spec: TowerSpec, vision: Any, patches: Tensor, grids: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for images with these patches, by name.

    Args:
        vision: the configuration of the tower.
        patches: (P, values), color by color; the images have one size, or the tower supports many.
    """
    if spec.sizes == "bounded":
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([(1, *grid) for grid in grids])}
    (high, wide), n, p = grids[0], len(grids), int(vision.patch_size)
    if spec.sizes == "budget":
        places = torch.stack(torch.meshgrid(torch.arange(wide), torch.arange(high), indexing="xy"), -1)
        places = places.view(1, -1, 2).expand(n, -1, -1).to(patches.device)
        values = patches.view(n, high * wide, 3, -1).transpose(2, 3).flatten(2)
        return {"pixel_values": values, "image_position_ids": places}
    pixels = patches.view(n, high, wide, 3, p, p).permute(0, 3, 1, 4, 2, 5).reshape(n, 3, high * p, wide * p)
    if spec.sizes == "one":  # the last pixels may be outside all patches
        return {"pixel_values": pad(pixels, (0, vision.image_size - wide * p, 0, vision.image_size - high * p))}
    sizes = torch.tensor([[high * p, wide * p]] * n, device=patches.device)
    return {"pixel_values": pixels, "image_sizes": sizes}


def _boundaries(module: Any, grid: Tensor) -> dict[str, Tensor]:
    """Return where images, and windows of them, begin among patches; on the host, where each block reads them.

    grid: (images, 3), patches in time, height and width.
    """
    bounds = {"cu_seqlens": pad(grid.prod(1).cumsum(0, dtype=torch.int32), (1, 0))}
    if hasattr(module, "window_size"):
        from transformers.vision_utils import get_vision_window_index

        windows = get_vision_window_index(grid, module.spatial_merge_size, module.window_size, module.patch_size)
        bounds |= dict(zip(("window_index", "cu_window_seqlens"), windows, strict=True))
    return bounds


def train_tower(
    model: Decoder, recipe: WeightMap, folder: Path, hf: Any, part: Literal["projector", "tower"]
) -> WeightMap:
    """Make a folder's tower a submodule of the decoder; return the weight map including it.

    Its blocks are recomputed in the backward pass: an image has four patches per token, and saves as much for each.
    """
    tower = open_tower(folder, hf, model.embedding.weight.dtype, model.shape.rotated_width)
    prefix = "model.visual." if tower.pairs is not None else "model."  # of its tensors in transformers' model
    parameters = {name for name, _ in tower.module.named_parameters()}
    stored = {name: file for name, file in _names(folder, tower.module) if name in parameters}
    others = OtherTensors(folder, set(recipe.buffers) - set(stored.values()))
    values, fillers = OtherTensors(folder, stored.values()), dict[str, Initializer]()
    entries = dict[str, WeightEntry]()
    for name, p in list(tower.module.named_parameters()):
        owner, _, last = name.rpartition(".")
        empty = nn.Parameter(torch.empty_like(p, device="meta"))
        setattr(tower.module.get_submodule(owner), last, empty)
        entries[f"visual.{name}"] = WeightEntry(tuple(p.shape), ((prefix + name, p.shape[0]),))
        fillers[f"visual.{name}"] = partial(_fill, values, stored[name])
    modules = tower.module.modules()
    tower.buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    tower.trained = True
    model.tower, model.visual = tower, tower.module
    unfreeze(model, part)
    if part == "tower":
        for block in _blocks(tower.module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    entries, fillers = recipe.entries | entries, recipe.fillers | fillers
    names = recipe.stored_names | {prefix + name: file for name, file in stored.items()}
    return replace(recipe, entries=entries, fillers=fillers, buffers=others, stored_names=names)


def _blocks(module: Any) -> Any:
    lists = (m for name, m in module.named_modules() if name.rpartition(".")[2] in ("blocks", "layers"))
    return next(m for m in lists if isinstance(m, nn.ModuleList))


def unfreeze(model: Decoder, part: str) -> None:
    """Set which parameters of a tower submodule are trained; none after the layer that is used."""
    assert model.tower is not None
    unread = _unread(model.tower)
    for name, p in model.tower.module.named_parameters():
        p.requires_grad_((part == "tower" or name.startswith(PROJECTOR)) and not name.startswith(unread))


def _unread(tower: Tower) -> tuple[str, ...]:
    """Return the prefixes of parameters whose results are not used."""
    module, layer = tower.module, getattr(tower.module.config, "vision_feature_layer", None)
    if tower.pairs is not None:
        return ()
    ends = ("head",) if layer is None else ("head", "post_layernorm")
    blocks, unread = _blocks(module), [name for name, _ in module.named_modules() if name.rpartition(".")[2] in ends]
    if layer is not None:
        last = max(n % (len(blocks) + 1) for n in (layer if isinstance(layer, list) else [layer]))
        path = next(name for name, m in module.named_modules() if m is blocks)
        unread += [f"{path}.{n}" for n in range(last, len(blocks))]
    return tuple(f"{name}." for name in unread)


def _fill(values: Mapping[str, Tensor], name: str, local: Tensor, offset: Sequence[int]) -> None:
    local.copy_(values[name][tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])


def open_tower(folder: Path, hf: Any, dtype: torch.dtype, width: int) -> Tower:
    """Build a folder's tower and read its weights.

    Args:
        width: E, or its rotated part.

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
        if pairs is None:  # the other parts have no buffers
            module.vision_tower = type(module.vision_tower)(config.vision_config)
            module.language_model = module.audio_tower = module.embed_audio = None
        else:
            module = type(module.visual)(config.vision_config)
        module.eval()
    wanted = module.state_dict()
    named = dict(_names(folder, module))
    values = OtherTensors(folder, named.values())
    tensors = {name: values[stored] for name, stored in named.items()}
    wrong = [name for name, t in wanted.items() if name not in tensors or tensors[name].shape != t.shape]
    if wrong or tensors.keys() - wanted.keys():
        name = min(wrong or tensors.keys() - wanted.keys())
        found = f"its tensor {name} is missing, or does not match the vision_config of config.json"
        raise NeedsError(asked, found, "download that folder again")
    module.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
    mutual = spec.mutual if reads_mutually(hf) else "none"
    return Tower(module.requires_grad_(False), spec, pairs, mutual, text_config(hf).get("pad_token_id") or 0)


def _names(folder: Path, module: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of a tower's tensors, in it and in the folder's files."""
    wanted, prefix = module.state_dict(), "" if hasattr(module, "vision_tower") else PARTS[0]
    for stored in TextFolder(folder).others:
        name = stored.removeprefix("model.")
        if not name.startswith(PARTS) or name.endswith(NO_MORE):
            continue
        other = name.replace(*BETWEEN[::-1]) if BETWEEN[1] in name else name.replace(*BETWEEN)
        yield next((n for n in (name, other) if n in wanted), name).removeprefix(prefix), stored


def _pairs(hf: Any, width: int, axes: str) -> Tensor:
    """Return the axis of each pair of a head: 0 time, 1 height, 2 width; raise NeedsError if config.json has none."""
    sections = rope_settings(text_config(hf)).get("mrope_section")
    in_turn = axes == "in turn"
    if not isinstance(sections, list) or len(sections) != 3 or (sum(sections) != width // 2 and not in_turn):
        found = f"mrope_section {sections!r} in its rope_parameters, for heads with {width // 2} pairs"
        do = "add it to rope_parameters, or remove what replaces it"
        raise NeedsError("rows with images: positions in time, height and width", found, do)
    if not in_turn:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    pairs = torch.zeros(width // 2, dtype=torch.int64)
    for axis in (1, 2):
        pairs[axis : sections[axis] * 3 : 3] = axis
    return pairs
