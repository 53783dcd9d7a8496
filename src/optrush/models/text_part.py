"""Find the language model in an image-text model's config.json and tensors. Pure Python.

Such a model is a language model, towers that turn images (video, audio) into embeddings, and projections between them.
On text rows the towers compute nothing: only the language model is trained, and everything else remains as published.
transformers has the language model at `model.language_model` and its head at `lm_head`, unless the head is inside;
files have three layouts (`LAYOUTS`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from optrush.models.families import (
    FAMILIES,
    FLAT,
    HEAD_INSIDE,
    MULTIMODAL,
    NEEDED,
    NESTED,
    SAME,
    TOWERS,
    VISION,
    TowerSpec,
)

HF = Mapping[str, Any]  # a config.json
PREFIX, HEAD = "model.language_model.", "lm_head."
LAYOUTS = ((PREFIX, HEAD), ("language_model.model.", "language_model.lm_head."), ("model.", HEAD))
BLOCKS = ("layers.", "embed_tokens.", "norm.")  # for the last layout, whose prefix towers may share
PARTS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.")  # parts of a tower, after `model.`
# A second embedding, which gives each layer an input.
INPUT_WIDTH, INPUT_ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
OTHER_MEDIA = ("vision_config", "audio_config", "speech_config", "image_token_id", "text_config")


def is_multimodal(hf: HF) -> bool:
    """Return whether a config.json describes an image-text model with a language model."""
    nested = isinstance(hf.get("text_config"), dict) and bool(hf["text_config"])
    return bool(hf.get("vision_config")) and (nested or hf.get("model_type") in FLAT)


def prefixes(hf: HF) -> tuple[str, str]:
    """Return transformers' prefixes of the tensors of a config.json's language model, and of its head."""
    return LAYOUTS[-1 if not is_multimodal(hf) else 1 if hf["model_type"] in HEAD_INSIDE else 0]


def text_config(hf: Any) -> Any:
    """Return the mapping with the language model's keys in a config.json: all of it for a text model."""
    return hf["text_config"] if is_multimodal(hf) and hf.get("text_config") else hf


def as_text(hf: HF) -> HF:
    """Return the config.json of the language model alone, under the text family that computes the same."""
    if not is_multimodal(hf):
        return hf
    text = text_config(hf)
    kind = str(text.get("model_type", ""))
    family, unread = SAME.get(kind, (kind, ()))
    merged = {**NESTED.get((str(hf.get("model_type")), kind), {}), **text}
    config = {key: value for key, value in merged.items() if key not in (*OTHER_MEDIA, "architectures", *unread)}
    config["model_type"] = family
    tied = [part["tie_word_embeddings"] for part in (hf, text) if "tie_word_embeddings" in part]
    default = FAMILIES[family].defaults.get("tie_word_embeddings") if family in FAMILIES else False
    config["tie_word_embeddings"] = any(tied) if tied else bool(default)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict):
            rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
            config[key] = {n: "default" if n in ("type", "rope_type") and v == "mrope" else v for n, v in rope.items()}
    return config


def nested_obstacle(hf: HF) -> str | None:
    """Return why our decoder cannot run the language model of an image-text model; None: it can."""
    if hf.get("model_type") not in MULTIMODAL:
        return f"model_type {hf.get('model_type')!r}, our decoder has {', '.join(MULTIMODAL)} with images"
    text = as_text(hf)
    spec = FAMILIES.get(text["model_type"])
    missing = [key for key in (NEEDED if spec is None else spec.nested) if key not in text]
    defaults = {} if spec is None else spec.defaults
    if not any("rope_theta" in part for part in (text, text.get("rope_parameters") or {}, defaults)):
        missing.append("rope_theta")
    return f"{missing[0]} is not in its text_config" if missing else None


def tower_spec(hf: HF) -> TowerSpec | None:
    """Return the image settings of a base; None: its images, or its kind of tower, are not supported."""
    if not is_multimodal(hf):
        return None
    kind, tower = str(hf.get("model_type")), hf["vision_config"].get("model_type")
    spec = TOWERS.get(f"{kind},{tower}") or TOWERS.get(kind)
    return spec if spec is not None and (not spec.towers or tower in (None, *spec.towers)) else None


def reads_mutually(hf: HF) -> bool:
    """Return whether an image's placeholders read each other, later ones too, in some layers of a base."""
    spec = tower_spec(hf)
    if spec is None or spec.mutual == "none":
        return False
    return spec.mutual == "all" or text_config(hf).get("use_bidirectional_attention") == "vision"


def image_token(hf: HF) -> Any:
    """Return the id of the image placeholder in config.json, by either of its names; None: it has none."""
    return hf.get("image_token_id", hf.get("image_token_index"))


def vision_config(hf: HF) -> dict[str, Any]:
    """Return a base's vision_config with its class's defaults for missing keys."""
    spec = tower_spec(hf)
    usual = spec.towers[0] if spec is not None and spec.towers else ""
    kind = hf["vision_config"].get("model_type", usual)
    return {**VISION.get(kind, {}), "model_type": kind, **hf["vision_config"]}


PATCHES_TOGETHER = 32_768  # patches per call of a tower on a GPU: eight images of 1,024 x 1,024 pixels


class TowerSizes(NamedTuple):
    """Sizes of a tower from config.json."""

    parameters: int
    projector: int  # parameters of the mergers, which process one row per placeholder
    depth: int
    width: int
    inner: int
    merge: int  # patches per placeholder
    outputs: int  # rows of features per placeholder, including deep ones
    tables: int = 0  # parameters looked up by position

    def flops(self, patches: float, most: float) -> float:
        """Return the FLOPs of a forward pass of patches in images of `most` each."""
        products = self.parameters - self.tables - self.projector * (1 - 1 / self.merge)
        return patches * (2.0 * products + 4.0 * most * self.width * self.depth)


def tower_sizes(hf: HF) -> TowerSizes | None:
    """Return the sizes of a tower and its projector; None for a base whose images are not supported."""
    spec = tower_spec(hf)
    if spec is None:
        return None
    if spec.towers:
        return _sizes(hf, spec, vision_config(hf))
    usual = {
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 1152, "depth": 27,
        "intermediate_size": 4304, "out_hidden_size": 3584, "num_position_embeddings": 2304, "in_channels": 3,
    }  # fmt: skip
    v = {**usual, **hf["vision_config"]}
    width, inner, wide = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    values, merger = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2, wide**2 + wide
    merger += (wide + 1) * v["out_hidden_size"]
    merge, deep = int(v["spatial_merge_size"]) ** 2, len(v.get("deepstack_visual_indexes") or ())
    if spec.axes == "sections":  # gated blocks with RMS norms
        block = 4 * width**2 + 3 * width * inner + 2 * inner + 7 * width
        merger += width
        return TowerSizes(values * width + v["depth"] * block + merger, merger, v["depth"], width, inner, merge, 1)
    block = 4 * width**2 + 2 * width * inner + inner + 9 * width
    merger += 2 * width + deep * (merger + 2 * wide)
    before = (values + 1 + v["num_position_embeddings"]) * width
    return TowerSizes(before + v["depth"] * block + merger, merger, v["depth"], width, inner, merge, 1 + deep)


def _sizes(hf: HF, spec: TowerSpec, v: dict[str, Any]) -> TowerSizes:
    """Return the sizes of a tower in VISION."""
    depth, width, side = v["num_hidden_layers"], v["hidden_size"], int(hf.get(spec.merge, 2)) if spec.merge else 1
    if spec.sizes == "one" and spec.merge:
        side = v["image_size"] // v["patch_size"] // math.isqrt(int(hf.get(spec.merge, 256)))
    elif spec.sizes == "budget":
        side = int(v["pooling_kernel_size"])
    places = 2 * v["position_embedding_size"] if v["model_type"] == "gemma4_vision" else 0
    if v["model_type"] not in ("gemma4_vision", "pixtral"):
        places = (v["image_size"] // v["patch_size"]) ** 2
    projector = _projector(hf, spec.projector, width, as_text(hf)["hidden_size"])
    parameters, inner = _tower(v) + projector, v["intermediate_size"]
    return TowerSizes(parameters, projector, depth, width, inner, side**2, 1, places * width)


def _tower(v: dict[str, Any]) -> int:
    """Return the number of parameters of a tower in VISION."""
    D, F = v["hidden_size"], v["intermediate_size"]
    values = v["num_channels"] * v["patch_size"] ** 2
    if v["model_type"] == "pixtral":
        return int((values + 1) * D + v["num_hidden_layers"] * (4 * D**2 + 3 * D * F + 2 * D))
    if v["model_type"] == "gemma4_vision":
        heads, E = 2 * (v["num_attention_heads"] + v["num_key_value_heads"]), v["head_dim"]
        block = heads * E * D + 2 * E + 3 * D * F + 4 * D
        return int((values + 2 * v["position_embedding_size"]) * D + v["num_hidden_layers"] * block)
    attention, mlp, places = 4 * (D**2 + D), 2 * D * F + F + D, (v["image_size"] // v["patch_size"]) ** 2
    # A class token and a norm before the blocks; or a bias of the patches.
    rest = D * (2 + 4) if v["model_type"] == "clip_vision_model" else D * (1 + 2)
    rest += attention + mlp + 3 * D if v.get("vision_use_head") else 0
    return int((values + places) * D + v["num_hidden_layers"] * (attention + mlp + 4 * D) + rest)


def _projector(hf: HF, kind: str, wide: int, width: int) -> int:
    """Return the number of parameters between a tower of width `wide` and the language model."""
    if kind in ("linear", "normed"):
        return wide * width + (wide if kind == "normed" else 0)
    layers = hf.get("vision_feature_layer", -1)
    first = wide * (len(layers) if isinstance(layers, list) else 1) * width
    merger = wide + hf.get("spatial_merge_size", 2) ** 2 * wide**2 if kind == "merger" else 0
    bias = 2 * width if hf.get("multimodal_projector_bias", kind == "mlp") else 0
    return int(merger + first + width**2 + bias)


def with_vocabulary(hf: HF, rows: int) -> dict[str, Any]:
    """Return a config.json whose language model has that many embedding rows."""
    text = text_config(hf)
    sizes, spec = {"vocab_size": rows}, FAMILIES.get(str(text.get("model_type")))
    if spec is not None and spec.by_layer and text.get(INPUT_WIDTH, spec.defaults[INPUT_WIDTH]):
        sizes[INPUT_ROWS] = rows
    if text is hf:
        return {**hf, **sizes}
    top = {"vocab_size": rows} if "vocab_size" in hf else {}
    return {**hf, **top, "text_config": {**text, **sizes}}


def layout(names: Collection[str]) -> tuple[str, str] | None:
    """Return the prefixes of the language model and of its head in a folder's tensor names; None: no known layout."""
    return next((each for each in LAYOUTS if f"{each[0]}embed_tokens.weight" in names), None)


def is_text(name: str, found: tuple[str, str]) -> bool:
    """Return whether a tensor of a folder belongs to the language model or its head."""
    prefix, head = found
    inner = name.removeprefix(prefix) if name.startswith(prefix) else None
    return name.startswith(head) or (inner is not None and (found != LAYOUTS[-1] or inner.startswith(BLOCKS)))
