"""Replace the head of a causal language model by a linear with one row: a score per token, for reward models.

The published model is transformers' ...ForSequenceClassification with one label, which scores a text at its last token
that is not `pad_token_id`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError
from optrush.kernels.cross_entropy import Scores
from optrush.models.decoder import Head
from optrush.models.weights import Initializer, RandomInit, Shape, WeightEntry, WeightMap

if TYPE_CHECKING:
    from optrush.models.decoder import Decoder
    from optrush.models.hf import HFModel

NAME, LABEL = "score.weight", "LABEL_0"


class ScoreHead(Head):
    """A head that returns the score of each token: (B, T, D) -> (B, T)."""

    scores = True

    def __init__(self, weight: Tensor, pad: int | None) -> None:
        """pad: a token that does not end a text, if any."""
        super().__init__(weight)
        self.pad, self.nll = pad, Scores()


def score_head(
    model: Decoder | HFModel, recipe: WeightMap, hf: dict[str, Any], dtype: torch.dtype, seed: int
) -> tuple[WeightMap, dict[str, Any]]:
    """Replace the head, its entries of the weight map and its keys of config.json; return both.

    The head is initialized by a normal draw with config.json's `initializer_range` and the seed.

    Raises:
        NeedsError: transformers has no such model of this family.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind = str(hf.get("model_type"))
    published: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(CONFIG_MAPPING[kind], None)
    if published is None:
        found = "transformers has no ...ForSequenceClassification for it"
        raise NeedsError(f"a reward model of type {kind!r}", found, "use another model family")
    weight = model.embedding.weight
    assert isinstance(weight, Tensor)
    shape = (1, weight.shape[1])
    model.head = ScoreHead(nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)), hf.get("pad_token_id"))
    model.ties = ()
    entries = {name: entry for name, entry in recipe.entries.items() if not name.startswith("head.")}
    entries["head.weight"] = WeightEntry(shape, ((NAME, 1),))
    drawn = RandomInit(seed, float(hf.get("initializer_range") or 0.02), {})
    fillers: dict[str, Initializer] = {**recipe.fillers, "head.weight": partial(_fill, drawn, shape)}
    names = {"architectures": [published.__name__], "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    weight_map = WeightMap(
        entries, recipe.source, recipe.buffers, fillers, recipe.stored_names, published.__name__, recipe.growth
    )
    return weight_map, {**hf, **names}


def _fill(drawn: RandomInit, shape: Shape, local: Tensor, offset: Shape) -> None:
    rows = drawn.rows(NAME, offset[0], offset[0] + local.shape[0], shape, local.device)
    local.copy_(rows.narrow(1, offset[1], local.shape[1]))
