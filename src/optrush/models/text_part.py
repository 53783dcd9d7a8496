"""Find the language model in the config.json, and among the tensors, of a model of images and text. Pure Python.

Such a model is a language model, towers that turn images (video, audio) into embeddings, and projections between. On
rows of text the towers compute nothing: what is trained is the language model alone, and everything else remains as
published. In transformers they have the language model at `model.language_model` and its head at `lm_head`, but for
those with the head inside; in files there are three layouts (`LAYOUTS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from optrush.models.families import FAMILIES, FLAT, HEAD_INSIDE, MULTIMODAL, NEEDED, SAME, TOWERS

HF = Mapping[str, Any]  # a config.json
PREFIX, HEAD = "model.language_model.", "lm_head."
LAYOUTS = ((PREFIX, HEAD), ("language_model.model.", "language_model.lm_head."), ("model.", HEAD))
BLOCKS = ("layers.", "embed_tokens.", "norm.")  # of the last layout, whose prefix the towers can have too
# Of a second embedding, which gives each layer an input.
INPUT_WIDTH, INPUT_ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
OTHER_MEDIA = ("vision_config", "audio_config", "speech_config", "image_token_id", "text_config")


def is_multimodal(hf: HF) -> bool:
    """Return whether a config.json is one of images and text, whose language model it describes."""
    nested = isinstance(hf.get("text_config"), dict) and bool(hf["text_config"])
    return bool(hf.get("vision_config")) and (nested or hf.get("model_type") in FLAT)


def prefixes(hf: HF) -> tuple[str, str]:
    """Return the prefixes of a language model's tensors and of its head's in transformers' model of a config.json."""
    return LAYOUTS[-1 if not is_multimodal(hf) else 1 if hf["model_type"] in HEAD_INSIDE else 0]


def text_config(hf: Any) -> Any:
    """Return the mapping of a config.json that has the language model's keys: of a model of text, all of it."""
    return hf["text_config"] if is_multimodal(hf) and hf.get("text_config") else hf


def as_text(hf: HF) -> HF:
    """Return the config.json of the language model alone, under the family of text that computes the same."""
    if not is_multimodal(hf):
        return hf
    text = text_config(hf)
    kind = str(text.get("model_type", ""))
    family, unread = SAME.get(kind, (kind, ()))
    found = {key: value for key, value in text.items() if key not in (*OTHER_MEDIA, "architectures", *unread)}
    found["model_type"] = family
    tied = [part["tie_word_embeddings"] for part in (hf, text) if "tie_word_embeddings" in part]
    default = FAMILIES[family].defaults.get("tie_word_embeddings") if family in FAMILIES else False
    found["tie_word_embeddings"] = any(tied) if tied else bool(default)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(key), dict):
            rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
            found[key] = {n: "default" if n in ("type", "rope_type") and v == "mrope" else v for n, v in rope.items()}
    return found


def nested_obstacle(hf: HF) -> str | None:
    """Return the reason why our decoder does not take the language model of a model of images; None: it can."""
    if hf.get("model_type") not in MULTIMODAL:
        return (
            f"model_type {hf.get('model_type')!r}, where our decoder has {', '.join(MULTIMODAL)} of those with images"
        )
    text = as_text(hf)
    spec = FAMILIES.get(text["model_type"])
    missing = [key for key in (NEEDED if spec is None else spec.nested) if key not in text]
    defaults = {} if spec is None else spec.defaults
    if not any("rope_theta" in part for part in (text, text.get("rope_parameters") or {}, defaults)):
        missing.append("rope_theta")
    return f"{missing[0]} is not in its text_config" if missing else None


PATCHES_TOGETHER = 32_768  # of a call of a tower on a GPU: eight pictures of 1,024 x 1,024 pixels


class TowerSizes(NamedTuple):
    """Sizes of a tower from config.json."""

    parameters: int
    projector: int  # parameters of the mergers, which have a row for each placeholder
    depth: int
    width: int
    inner: int
    merge: int  # patches of a placeholder
    outputs: int  # rows of features for a placeholder: deep ones, too

    def flops(self, patches: float, most: float) -> float:
        """Return the FLOPs of a forward pass of patches in images of `most` each."""
        products = self.parameters - self.projector * (1 - 1 / self.merge)
        return patches * (2.0 * products + 4.0 * most * self.width * self.depth)


def tower_sizes(hf: HF) -> TowerSizes | None:
    """Return the sizes of a tower and its projector; None for a base whose images are not read."""
    if hf.get("model_type") not in TOWERS or not is_multimodal(hf):
        return None
    usual = {
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 1152, "depth": 27,
        "intermediate_size": 4304, "out_hidden_size": 3584, "num_position_embeddings": 2304, "in_channels": 3,
    }  # fmt: skip
    v = {**usual, **hf["vision_config"]}
    width, inner, wide = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    values, merger = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2, wide**2 + wide
    merger += (wide + 1) * v["out_hidden_size"]
    merge, deep = int(v["spatial_merge_size"]) ** 2, len(v.get("deepstack_visual_indexes") or ())
    if TOWERS[hf["model_type"]] == "sections":  # gated blocks with RMS norms
        block = 4 * width**2 + 3 * width * inner + 2 * inner + 7 * width
        merger += width
        return TowerSizes(values * width + v["depth"] * block + merger, merger, v["depth"], width, inner, merge, 1)
    block = 4 * width**2 + 2 * width * inner + inner + 9 * width
    merger += 2 * width + deep * (merger + 2 * wide)
    before = (values + 1 + v["num_position_embeddings"]) * width
    return TowerSizes(before + v["depth"] * block + merger, merger, v["depth"], width, inner, merge, 1 + deep)


def tower_parameters(hf: HF) -> int:
    """Return the parameters of a tower and its projector from config.json; 0 of a base whose images are not read."""
    sizes = tower_sizes(hf)
    return 0 if sizes is None else sizes.parameters


def with_vocabulary(hf: HF, rows: int) -> dict[str, Any]:
    """Return a config.json whose language model has that many rows of embedding."""
    text = text_config(hf)
    own, spec = {"vocab_size": rows}, FAMILIES.get(str(text.get("model_type")))
    if spec is not None and spec.by_layer and text.get(INPUT_WIDTH, spec.defaults[INPUT_WIDTH]):
        own[INPUT_ROWS] = rows
    if text is hf:
        return {**hf, **own}
    top = {"vocab_size": rows} if "vocab_size" in hf else {}
    return {**hf, **top, "text_config": {**text, **own}}


def layout(names: Collection[str]) -> tuple[str, str] | None:
    """Return the prefixes of the language model and of its head among the names of a folder's tensors."""
    return next((each for each in LAYOUTS if f"{each[0]}embed_tokens.weight" in names), None)


def is_text(name: str, found: tuple[str, str]) -> bool:
    """Return whether a tensor of a folder belongs to the language model or its head."""
    prefix, head = found
    inner = name.removeprefix(prefix) if name.startswith(prefix) else None
    return name.startswith(head) or (inner is not None and (found != LAYOUTS[-1] or inner.startswith(BLOCKS)))
