"""Load a model and its weights: our own decoder where it represents the model, else transformers' implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from optrush.models.decoder import Decoder, build
from optrush.models.hf import HFModel, adapt
from optrush.models.shapes import HF, native_obstacle, refuse_foreign
from optrush.models.source import Growth
from optrush.models.weights import (
    WeightMap,
    native_constants,
    native_entries,
    open_weights,
    random_init,
    refuse_packed,
    vocabulary_names,
    widened,
)


def load(
    folder: Path | None,
    hf: HF,
    implementation: Literal["native", "transformers"] | None,
    dtype: torch.dtype,
    seed: int,
    growth: Growth | None = None,
) -> tuple[Decoder | HFModel, WeightMap]:
    """Build a model on the meta device, and the map of its weights.

    Args:
        folder: of safetensors and config.json; None draws random weights.
        hf: the config.json, perhaps edited; the folder's is ignored.
        implementation: None takes our own decoder wherever it represents the model, else transformers'.
        dtype: type of the parameters.
        seed: of the random draw.
        growth: new tokens; `hf` has the larger vocabulary already, the folder does not.

    Raises:
        NeedsError: the model is not supported, or the weights do not fit it.
        ConfigError: config.json is not complete.
    """
    refuse_foreign(hf)
    if implementation == "transformers" or (implementation is None and native_obstacle(hf) is not None):
        if folder is not None:
            refuse_packed(folder)
        return adapt(folder, hf, dtype, seed, growth)
    model = build(hf, dtype)
    entries = native_entries(model)
    if folder is None:
        drawn = random_init(hf, seed, native_constants(entries))
        return model, WeightMap(entries, widened(drawn, model, entries, growth))
    stored = open_weights(folder)
    needed = {name: shape for entry in entries.values() for name, shape in entry.hf_shapes()}
    if growth is not None:
        needed |= {name: (growth.rows, *needed[name][1:]) for name in vocabulary_names(model, entries)}
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.shape.tied else {}
    stored.check(needed, tied)
    return model, WeightMap(entries, widened(stored, model, entries, growth))
