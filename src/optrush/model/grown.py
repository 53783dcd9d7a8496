"""Values of the rows that new tokens get: the mean of the rows of the tokens that were there.

Source: Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html: with rows drawn at random, new tokens can
take most of the probability before they were ever seen; with the mean of the old logits' rows, n of them among V take
no more than about n / V of it. Differs from the source: rows without a token, which published embeddings are padded
with, do not count in the mean, and those that a new token gets are overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrush.errors import NeedsError

if TYPE_CHECKING:
    from optrush.model.vocabulary import Growth
    from optrush.model.weights import Entry, Recipe, Shape, Source

CHUNK_rows = 32768  # that are read at a time


class Grown:
    """A source that gives embedding and head the rows of new tokens, under any cutting; all else is as it is."""

    def __init__(self, source: Source, names: frozenset[str], growth: Growth) -> None:
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
        """The mean row (D,) float32, summed in float64; a bias' is ()."""
        if name not in self._means:
            n = self.growth.first
            chunks = [range(at, min(at + CHUNK_rows, n)) for at in range(0, n, CHUNK_rows)]
            sums = (self.source.rows(name, c.start, c.stop, shape, device).sum(0, dtype=torch.float64) for c in chunks)
            self._means[name] = (sum(sums, torch.zeros((), dtype=torch.float64)) / n).float()
        return self._means[name]


def widened(source: Source, model: Any, entries: dict[str, Entry], growth: Growth | None) -> Source:
    """The source, or where tokens are new the one that has rows for them."""
    return source if growth is None else Grown(source, vocabulary_names(model, entries), growth)


def refuse_frozen(model: Any, recipe: Recipe, growth: Growth) -> None:
    """Raises NeedsError where new tokens have rows that are not trained: they would mean the average token forever."""
    both = {id(model.embedding.weight), id(model.head.weight)}
    rows = [name for name, p in model.named_parameters() if id(p) in both and not p.requires_grad]
    if not growth.tokens or not rows:
        return
    modules = [recipe.entries[name].pieces[0][0].rsplit(".", 2)[-2] for name in rows]
    if len(both) == 1:  # a tied head
        modules.append("lm_head")
    found = f"{' and '.join(modules)} frozen: the new rows would stay what they are, the mean of the others"
    do = f"train them too, beside the adapters (save: [{', '.join(modules)}])"
    raise NeedsError(f"`model.add_tokens: [{', '.join(growth.tokens)}]`", found, do)


def vocabulary_names(model: Any, entries: dict[str, Entry]) -> frozenset[str]:
    """The published names of a model's parameters that have a row for each token: embedding, head, its bias."""
    wide = {id(model.embedding.weight), id(model.head.weight), id(model.head.bias)}
    return frozenset(entries[name].pieces[0][0] for name, p in model.named_parameters() if id(p) in wide)


@torch.no_grad()
def enlarge(hf_model: Any, growth: Growth) -> None:
    """Gives a transformers model on the CPU the rows of new tokens."""
    if growth.vocab > growth.rows:
        hf_model.resize_token_embeddings(growth.vocab, mean_resizing=False)
    output = hf_model.get_output_embeddings()
    parameters = (hf_model.get_input_embeddings().weight, output.weight, output.bias)
    for p in {id(p): p for p in parameters if isinstance(p, nn.Parameter)}.values():
        p[growth.first : growth.last] = p[: growth.first].mean(0, dtype=torch.float64).to(p.dtype)
