"""Whether documents of a row see each other: each beside the same document alone, and the others when one changes."""

from __future__ import annotations

import dataclasses

import torch

from optrush.data.batch import Batch, collate
from optrush.trainer.trainer import Trainer


def hidden(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """(B, T, D) what the head is given, as training computes it."""
    kept = []
    score = trainer.loss_from_hidden
    trainer.loss_from_hidden = lambda states, b: (kept.append(states), score(states, b))[1]
    try:
        trainer.model.train()
        trainer.loss(batch)
    finally:
        trainer.loss_from_hidden = score
    return kept[0]


def alone(trainer: Trainer, host: Batch) -> float:
    """The largest difference of a logit of a packed document from that of the document alone, in the same precision.

    Several documents must be there; logits are products with the head's weight in float32.
    """
    with torch.no_grad():
        weight = trainer.model.head.weight.float()
        together = hidden(trainer, host.to(trainer.world.device)).float() @ weight.T
        worst, seen = 0.0, 0
        for row, ids in enumerate(host.documents.ids):
            for number in ids.unique():
                at = (ids == number).nonzero().flatten()
                document = _document(host.tokens[row][at], host.labels[row][at])
                one = collate([[(0, document)]], host.tokens.shape[1], single=True, most=2)
                logits = hidden(trainer, one.to(trainer.world.device))[0, : len(at)].float() @ weight.T
                worst, seen = max(worst, (together[row][at] - logits).abs().max().item()), seen + 1
    assert seen > len(host.tokens), "no row holds two documents"
    return worst


def _document(tokens, labels):
    import numpy as np

    from optrush.data.schema import Document

    learnt = np.concatenate([[False], labels[:-1].numpy() != -100])
    return Document(tokens.numpy().astype(np.int32), learnt)


def disturbed(
    trainer: Trainer, host: Batch, equal: int = 2
) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]:
    """Another token in the first document: what becomes of all others.

    Returns:
        their states before and after, and gradients of their loss alone: before, `equal` times, and after.
    """
    device = trainer.world.device
    ids = host.documents.ids
    learnt = [r for r in range(len(ids)) if (host.labels[r][ids[r] == 1] != -100).any()]
    assert learnt, "no row holds two documents"
    r = learnt[0]
    others = torch.ones_like(host.tokens, dtype=torch.bool)
    others[r, ids[r] == 0] = False
    tokens = host.tokens.clone()
    tokens[r, 1] = (tokens[r, 1] + 1) % 60
    assert ids[r, 1] == 0
    labels = torch.where(others, host.labels, -100)
    before = dataclasses.replace(host, labels=labels).to(device)
    after = dataclasses.replace(host, labels=labels, tokens=tokens).to(device)
    with torch.no_grad():
        states = [hidden(trainer, batch)[others.to(device)] for batch in (before, after)]
        changed = hidden(trainer, before)[r, 1] != hidden(trainer, after)[r, 1]
    assert changed.any(), "the change has no effect on its own document"
    grads = []
    for batch in (*[before] * equal, after):
        trainer.zero_grad()
        trainer.loss(batch).backward()
        grads.append({t.name: t.grad.clone() for t in trainer.trained})
    trainer.zero_grad()
    return states[0], states[1], {name: tuple(g[name] for g in grads) for name in grads[0]}
