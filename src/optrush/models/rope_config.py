"""Read the rotary embedding of a model from its config.json. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optrush.errors import ConfigError, NeedsError, one_line
from optrush.models.families import FAMILIES, FOREIGN_ROPE_KINDS, ROPE_KINDS, FamilySpec

HF = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class RopeShape:
    """Rotary embedding; models/rope_angles.py explains the kinds."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: for 'llama3'
    high_freq_factor: float = 4.0
    original_max: int = 8192
    scale: float = 1.0  # of cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    part: float = 1.0  # rotated part of a head's values; for 'proportional'
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether a document's angles depend on its length."""
        return self.kind in ("dynamic", "longrope")


def rope_settings(hf: HF) -> dict[str, Any]:
    """Return the rotary settings of a config.json, in either form; empty: the defaults."""
    return dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})


def rope_kind(hf: HF) -> str:
    """Return the RoPE type of a config.json."""
    rope, spec = rope_settings(hf), FAMILIES.get(str(hf.get("model_type")))
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return kind if spec is None else spec.rope_renamed.get(kind, kind)


_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def read_rope(hf: HF, width: int) -> RopeShape:
    """Read either form: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier versions).

    Args:
        width: of the rotated part of a head.
    """
    given, kind = rope_settings(hf), rope_kind(hf)
    theta = given.get("rope_theta", hf.get("rope_theta"))
    read: dict[str, Any] = {"theta": 10000.0 if theta is None else float(theta)}
    by_ratio = kind == "yarn" and "factor" in given and given["factor"] is None
    for key in () if by_ratio else _ROPE_NEEDS.get(kind, ()):
        if not isinstance(given.get(key), int | float):
            found = f"{key} is {given.get(key)!r} in config.json"
            raise ConfigError(f"RoPE type {kind!r}", found, f"give {key} a number")
        read[key] = float(given[key])
    if kind in ("default", "linear"):
        return RopeShape(kind, **read)
    if kind == "proportional":
        return RopeShape(kind, factor=float(given.get("factor") or 1.0), part=rotary_part(hf), **read)
    key, positions = "original_max_position_embeddings", hf["max_position_embeddings"]
    original = positions if kind == "dynamic" else hf.get(key) or given.get(key) or positions
    for name, value in (("max_position_embeddings", positions), (key, original)):
        if not isinstance(value, int) or value < 2:
            raise ConfigError(
                f"RoPE type {kind!r}", f"{name} is {value!r} in config.json", f"give {name} a whole number"
            )
    read["original_max"] = int(original)
    if kind == "yarn":
        read.setdefault("factor", positions / original)
        scale = given.get("attention_factor")
        read["scale"] = _yarn_scale(given, read["factor"]) if scale is None else float(scale)
        read |= {"beta_fast": float(given.get("beta_fast") or 32), "beta_slow": float(given.get("beta_slow") or 1)}
        read["truncate"] = bool(given.get("truncate", True))
    if kind == "longrope":
        read |= _longrope(given, float(given.get("factor") or positions / original), original, width)
    return RopeShape(kind, **read)


def _longrope(given: HF, factor: float, original: float, width: int) -> dict[str, Any]:
    """Return a longrope's fields: its two lists of factors, and the scale of cosines and sines."""
    scale = given.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    read: dict[str, Any] = {"factor": factor, "scale": float(scale)}
    for key in ("short_factor", "long_factor"):
        if not isinstance(given.get(key), list) or len(given[key]) != width // 2:
            found = f"{key} is {one_line(repr(given.get(key)), 60)} in config.json"
            raise ConfigError("RoPE type 'longrope'", found, f"give {key} {width // 2} numbers")
        read[key] = tuple(map(float, given[key]))
    return read


def _yarn_scale(given: HF, factor: float) -> float:
    """Return the factor of cosines and sines: 0.1 ln(factor) + 1, or a ratio of two of these (DeepSeek)."""

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def rope_by_kind(full: HF, spec: FamilySpec) -> tuple[HF, HF | None]:
    """Return the config of full attention layers' rotary embedding, and of windowed layers'; None: the same.

    `rope_parameters` may have one mapping per kind of layer; in the earlier form the scaling applies to full attention,
    and `rope_local_base_freq` is the base of windowed layers.
    """
    if not spec.local_rope:
        return full, None
    given, rest = rope_settings(full), {k: v for k, v in full.items() if k not in ("rope_scaling", "rope_parameters")}
    local = {**rest, "rope_theta": full["rope_local_base_freq"]}
    if _differs(given):
        of = {kind: given.get(kind) or {} for kind in ("full_attention", "sliding_attention")}
        return {**rest, "rope_parameters": of["full_attention"]}, {**local, "rope_parameters": of["sliding_attention"]}
    return full, local


def _differs(given: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in given.values())


def rotary_part(full: HF) -> float:
    """Return the rotated part of each head."""
    part = rope_settings(full).get("partial_rotary_factor") or full.get("partial_rotary_factor")
    return 1.0 if part is None else float(part)


def rope_obstacle(hf: HF, spec: FamilySpec) -> str | None:
    """Return the reason why our decoder does not support a config.json's rotary embedding; None: it does."""
    rope, kind = rope_settings(hf), rope_kind(hf)
    if _differs(rope):
        if not spec.local_rope:
            return "RoPE parameters that differ between layers"
        parts = ({**hf, "rope_scaling": None, "rope_parameters": part} for part in rope.values() if part)
        return next((found for part in parts if (found := rope_obstacle(part, spec)) is not None), None)
    if kind not in (*ROPE_KINDS, *FOREIGN_ROPE_KINDS):
        found = f"supported: {', '.join(ROPE_KINDS)}; through transformers also: {', '.join(FOREIGN_ROPE_KINDS)}"
        raise NeedsError(f"RoPE type {kind!r} in a {hf['model_type']} model", found, "fix rope_type in config.json")
    if kind not in spec.rope_kinds:
        return f"RoPE type {kind!r}, where our decoder has {', '.join(spec.rope_kinds)}"
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) and not spec.partial_rotary and kind != "proportional":
        return f"partial_rotary_factor {partial}: only part of each head is rotated"
    return None
