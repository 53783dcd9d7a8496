"""Sample answers from a transformers model in training: its modules, its cache and our draws.

Prompts of a batch are padded on the left; each token of the batch is one pass. A batch ends with its longest answer.
Families differ in the state that they keep, so the first batch is preceded by a probe that compares cached sampling of
made-up tokens with the training forward pass. A family affected by padding gets batches of equally long prompts; a
family with a wrong cache, or without one, passes full rows for each token.

Shapes: S rows of a batch, D width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from optrush.data.batch import Documents
from optrush.errors import exhausted
from optrush.models.hf import HFModel, Kept
from optrush.models.kv_cache import uncompiled
from optrush.models.sampling import Drawing, PromptIds, SampledAnswer, draw_tokens

PROBED = (9, 5, 7)  # tokens of the probe's prompts
STEPS = 3  # tokens after each prompt
ONE_LENGTH = "prompts of one length per batch, because padding changes the model's output"
UNCACHED = "whole rows for each token (slow), because its cache does not match training"


class GrowingRows(Protocol):
    """Rows of tokens that grow by one token each."""

    def last(self, token: Tensor | None) -> Tensor:
        """Append tokens (S,), if given; return the hidden states (S, D) of the last ones."""


class PaddedEngine:
    """Batches of a model's sequences.

    note: how they are sampled, if not by cache and padding; None before the first batch.
    """

    weigh = None

    def __init__(self, model: HFModel) -> None:
        self.model = model
        self.note: str | None = None

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[PromptIds], members: int, drawing: Drawing,
        precision: AbstractContextManager[object] | None = None,
    ) -> list[SampledAnswer]:  # fmt: skip
        """Return `members` answers to each prompt, prompt by prompt; arguments: see `SamplingEngine.sample`."""
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p].ids))
        answers: list[SampledAnswer] = []
        with precision or nullcontext(), uncompiled(self.model):
            if prompts and self.note is None:
                self.note = self.probe()
            for _, alike in groupby(order, key=lambda p: len(prompts[p].ids) if self.note == ONE_LENGTH else 0):
                rows = [(p, m) for p in alike for m in range(members)]
                for i in range(0, len(rows), drawing.slots):
                    answers += self._batch(rows[i : i + drawing.slots], prompts, drawing)
        return sorted(answers, key=lambda a: (a.prompt, a.member))

    def probe(self) -> str:
        """Return how to sample this model: "" if cache and padding match its forward pass."""
        weight = self.model.head.weight
        rows = [(torch.arange(n + STEPS, device=weight.device) * 7919 + 13) % weight.shape[0] for n in PROBED]
        rounded = weight.dtype != torch.float32 or torch.is_autocast_enabled(weight.device.type)
        wanted = states(WholeRows, self.model, rows)
        for note in ("", ONE_LENGTH):
            try:
                cached = torch.cat(
                    [states(CachedRows, self.model, x) for x in ([rows] if not note else [[x] for x in rows])]
                )
            except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
                if exhausted(error):
                    raise
                continue
            gaps = ((cached - wanted).float().abs().amax(1) / wanted.float().abs().max()).sort().values
            # Rounding may route single tokens to other experts; a wrong computation affects most tokens.
            if gaps[int(0.75 * len(gaps)) - 1] <= 5e-2 if rounded else gaps[-1] <= 1e-4:
                return note
        return UNCACHED

    def _batch(
        self, rows: Sequence[tuple[int, int]], prompts: Sequence[PromptIds], drawing: Drawing
    ) -> Iterator[SampledAnswer]:
        """Yield an answer for each of the `rows`, (index of a prompt, number of the answer), sampled as one batch."""
        device = self.model.head.weight.device
        starts = [torch.tensor(prompts[p].ids.tolist(), device=device) for p, _ in rows]
        kept: GrowingRows = (WholeRows if self.note == UNCACHED else CachedRows)(self.model, starts)
        number = torch.tensor([prompts[p].number for p, _ in rows], device=device)
        member, ends = (torch.tensor(x, device=device) for x in ([m for _, m in rows], drawing.ends or (-1,)))
        live, ended = torch.ones_like(number, dtype=torch.bool), torch.zeros_like(number, dtype=torch.bool)
        made, columns, token = torch.zeros_like(number), list[tuple[Tensor, Tensor, Tensor]](), None
        for at in range(drawing.most):
            logits = self.model.head.logits(kept.last(token))
            columns.append(draw_tokens(logits, drawing, number, member, torch.full_like(number, at)))
            token, made = columns[-1][0], made + live
            ended |= live & torch.isin(token, ends)
            live &= ~ended
            if not live.any():
                break
        ids, log_p, entropy = (torch.stack(x, 1).tolist() for x in zip(*columns, strict=True))
        for i, ((p, m), n, end) in enumerate(zip(rows, made.tolist(), ended.tolist(), strict=True)):
            yield SampledAnswer(p, m, ids[i][:n], log_p[i][:n], end, sum(entropy[i][:n]) / n)


def states(kind: type[WholeRows] | type[CachedRows], model: HFModel, rows: Sequence[Tensor]) -> Tensor:
    """Return hidden states (S * (STEPS + 1), D): each row's last, from STEPS tokens before its end on."""
    kept: GrowingRows = kind(model, [x[:-STEPS] for x in rows])
    tokens = [None, *torch.stack([x[-STEPS:] for x in rows], 1)]
    return torch.stack([kept.last(token) for token in tokens], 1).flatten(0, 1)


def one_per_row(filled: Tensor) -> Documents:
    """Return rows of one document each, from the mask of filled slots (S, T)."""
    S, T = filled.shape
    starts = torch.arange(S + 1, dtype=torch.int32, device=filled.device) * T
    return Documents(starts, torch.zeros_like(filled, dtype=torch.int32), T, True, filled.bool())


class CachedRows:
    """Rows in the cache of transformers' model, padded on the left."""

    def __init__(self, model: HFModel, rows: Sequence[Tensor]) -> None:
        self.model, longest = model, max(map(len, rows))
        self.tokens = torch.stack([torch.cat([x.new_zeros(longest - len(x)), x]) for x in rows])
        mask = torch.stack([(torch.arange(longest, device=x.device) >= longest - len(x)).long() for x in rows])
        self.positions, self.kept = (mask.cumsum(1) - 1).clamp_min(0), Kept(mask)

    def last(self, token: Tensor | None) -> Tensor:
        """Append and return like `GrowingRows.last`. Raises ValueError: the model keeps no state."""
        mask = self.kept.mask
        if token is not None:
            self.tokens, self.positions = token[:, None], self.positions[:, -1:] + 1
            self.kept.mask = mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        self.model.kept = self.kept
        try:
            hidden: Tensor = self.model(self.tokens, self.positions, one_per_row(mask[:, -self.tokens.shape[1] :]))
        finally:
            self.model.kept = None
        if self.kept.cache is None:
            raise ValueError("the model keeps nothing of a sequence")
        return hidden[:, -1]


class WholeRows:
    """Rows recomputed from their first token like in training, padded on the right."""

    def __init__(self, model: HFModel, rows: Sequence[Tensor]) -> None:
        self.model, longest = model, max(map(len, rows))
        self.tokens = torch.stack([torch.cat([x, x.new_zeros(longest - len(x))]) for x in rows])
        self.lengths = torch.tensor([len(x) for x in rows], device=self.tokens.device)

    def last(self, token: Tensor | None) -> Tensor:
        """Append and return like `GrowingRows.last`."""
        if token is not None:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, 1))
            self.tokens.scatter_(1, self.lengths[:, None], token[:, None])
            self.lengths = self.lengths + 1
        S, T = self.tokens.shape
        place = torch.arange(T, device=self.tokens.device).expand(S, T)
        positions = torch.minimum(place, self.lengths[:, None] - 1).int()
        hidden: Tensor = self.model(self.tokens, positions, one_per_row(place < self.lengths[:, None]))
        return hidden[torch.arange(S, device=place.device), self.lengths - 1]
