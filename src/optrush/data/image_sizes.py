"""Compute an image's prepared size and number of tokens like the base model's image processor. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optrush.errors import NeedsError
from optrush.models.families import TowerSpec
from optrush.models.text_part import tower_spec, vision_config

NARROW = 200  # maximum aspect ratio
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # the bounds of Gemma 4's processor
BOUNDS = "data.min_pixels", "data.max_pixels"


def processed_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width after the image processor, multiples of `factor`.

    Equals transformers' `smart_resize`, without importing it. Raises ValueError: too narrow.
    """
    if max(height, width) > NARROW * min(height, width):
        raise ValueError(f"{width} x {height} pixels; at most {NARROW} times as long as wide")
    high, wide = (round(n / factor) * factor for n in (height, width))
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high, wide = (max(factor, math.floor(n / scale / factor) * factor) for n in (height, width))
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = (math.ceil(n * scale / factor) * factor for n in (height, width))
    return high, wide


@dataclass(frozen=True)
class ImageSizes:
    """The image sizes of a base model: a patch has `patch` pixels per side, a placeholder `merge` patches per side."""

    spec: TowerSpec
    patch: int
    merge: int
    least: int  # minimum pixels of a prepared image
    most: int
    extra: int = 0  # additional placeholders, for a class token

    @property
    def factor(self) -> int:
        """Pixels per side of a placeholder."""
        return self.patch * self.merge

    @property
    def options(self) -> dict[str, Any]:
        """The processor's arguments that set the size of images."""
        if self.spec.sizes == "bounded":
            return {"size": {"shortest_edge": self.least, "longest_edge": self.most}}
        if self.spec.sizes == "longest":
            return {"size": {"longest_edge": math.isqrt(self.most)}, "patch_size": self.factor}
        return {"max_soft_tokens": self.most // self.factor**2} if self.spec.sizes == "budget" else {}

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the patches in height and width of an image with these pixels; raises ValueError: too narrow."""
        if max(height, width) > NARROW * min(height, width):
            raise ValueError(f"{width} x {height} pixels; at most {NARROW} times as long as wide")
        if self.spec.sizes == "one":
            side = math.isqrt(self.most) // self.patch
            return side, side
        if self.spec.sizes == "bounded":
            high, wide = processed_size(height, width, self.factor, self.least, self.most)
        elif self.spec.sizes == "longest":
            ratio = max(height, width) / math.isqrt(self.most)
            high, wide = (int(n / ratio) if ratio > 1 else n for n in (height, width))
            if not high or not wide:
                raise ValueError(f"{width} x {height} pixels: the short side vanishes once the longest is reduced")
            high, wide = (-(-n // self.factor) * self.factor for n in (high, wide))
        else:
            high, wide = self._within(height, width)
        return high // self.patch, wide // self.patch

    def _within(self, height: int, width: int) -> tuple[int, int]:
        """Return the largest size within the pixel limit; a narrow image has one side of one placeholder."""
        scale, side = math.sqrt(self.most / (height * width)), self.factor
        high, wide = (math.floor(scale * n / side) * side for n in (height, width))
        longest = self.most // side**2 * side
        if high == 0:
            return side, min(width // height * side, longest)
        return (high, wide) if wide else (min(height // width * side, longest), side)

    def tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of an image's tokens, including marks."""
        high, wide = (n // self.merge for n in grid)
        return high * (wide + (self.spec.frame == "rows")) + self.extra + 2 * (self.spec.frame == "ids")


def sizes_of(hf: Any, given: Callable[[str], Any], least: int | None, most: int | None) -> ImageSizes:
    """Return the image sizes of a base model.

    Args:
        hf: its config.json.
        given: returns a setting of its image processor, or None.
        least, most: `data.min_pixels` and `data.max_pixels`.

    Raises NeedsError: the processor does not support these bounds, or min exceeds max.
    """
    spec, vision = tower_spec(hf), vision_config(hf)
    assert spec is not None
    size: Mapping[str, Any] = given("size") or {}
    patch = int(vision.get("patch_size") or given("patch_size") or 14)
    merge, extra = 1, 0
    if spec.sizes == "bounded":
        merge = int(vision.get("spatial_merge_size") or given("merge_size") or 2)
        low = int(least or size.get("shortest_edge") or given("min_pixels") or 4 * (patch * merge) ** 2)
        high = int(most or size.get("longest_edge") or given("max_pixels") or 1280 * (patch * merge) ** 2)
    elif spec.sizes == "one":
        _no_bound(spec, least, most, "one size", "remove it")
        low = high = int(vision["image_size"]) ** 2
        if spec.merge:
            merge = int(vision["image_size"]) // patch // math.isqrt(int(hf.get(spec.merge, 256)))
        else:  # CLIP has a class token; `default` drops the first token
            extra = int(vision["model_type"] == "clip_vision_model")
            extra -= hf.get("vision_feature_select_strategy", "default") == "default"
    elif spec.sizes == "longest":
        if spec.projector == "mlp" and hf.get("vision_feature_select_strategy", "default") == "default":
            found = "vision_feature_select_strategy 'default', which drops a patch of a tower without a class token"
            raise NeedsError("the images of a pixtral tower", found, "write 'full' in config.json")
        _no_bound(spec, least, None, "a longest edge and enlarges no image", "remove it")
        merge = int(hf.get(spec.merge, 2)) if spec.merge else 1
        factor = patch * merge
        edge = int(size.get("longest_edge") or 1024) if most is None else math.isqrt(most) // factor * factor
        low, high = factor**2, edge**2
        if edge < 1:
            raise _small(f"{most:,} (data.max_pixels)", factor**2)
    else:
        _no_bound(spec, least, None, "the largest size within a number of tokens", "remove it")
        merge = int(vision.get("pooling_kernel_size", 3))
        factor, soft = patch * merge, int(given("max_soft_tokens") or 280)
        if most is not None:
            fitting = [n for n in SOFT_TOKENS if n * factor**2 <= most]
            if not fitting:
                raise _small(f"{most:,} (data.max_pixels)", SOFT_TOKENS[0] * factor**2)
            soft = fitting[-1]
        low, high = factor**2, soft * factor**2
    if low > high:
        found = f"at least {low:,} (data.min_pixels), at most {high:,} (data.max_pixels) pixels"
        raise NeedsError("the size of images", found, "set data.min_pixels below data.max_pixels")
    return ImageSizes(spec, patch, merge, low, high, extra)


def _no_bound(spec: TowerSpec, least: int | None, most: int | None, what: str, do: str) -> None:
    for name, value in zip(BOUNDS, (least, most), strict=True):
        if value is not None:
            raise NeedsError(f"`{name}: {value}`", f"a base whose {spec.processors[0]} has {what}", do)


def _small(found: str, least: int) -> NeedsError:
    return NeedsError("the size of images", found, f"set data.max_pixels to at least {least:,}")
