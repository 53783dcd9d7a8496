"""8-bit frozen linears: near the model of the file, and as good on documents that it has not seen.

tests/techniques/test_nf4.py has what both forms owe: equal maths, ranks, compilers, memory, export.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from heldout import worse
from trials import assembled, golden_run

FORMS = {"int8": {"int8": {}}, "nf4": {"nf4": {}}}
LORA = {"lora": {"rank": 8, "save": ["embed_tokens", "lm_head"]}}
MARGIN = 0.03  # nats a token, of the mean over the seeds; a seed alone twice


@pytest.mark.parametrize(("form", "off"), [("int8", 0.01), ("nf4", 0.15)])
def test_how_far_weights_and_hidden_states_are(box, form, off):
    """A bound for each: halved, these fail."""
    plain = assembled(golden_run(box, packed=True, lora={}))
    ours = assembled(golden_run(box, packed=True, lora={}, **FORMS[form]))
    for (_, a), (_, b) in zip(ours.model.linears(), plain.model.linears(), strict=True):
        dense = a.dequantized(torch.float32)
        assert off / 4 < (dense - b.weight).norm() / b.weight.norm() < off
    batch = next(plain.batches)[0]
    with torch.no_grad():
        x, y = (j.model(batch.tokens, batch.positions, batch.documents).flatten() for j in (ours, plain))
    assert F.cosine_similarity(x, y, dim=0) > 1 - off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_held_out_loss_over_seeds(box, form):
    off = worse(box, base=LORA, learnt=0.7, **FORMS[form])
    assert sum(off) / len(off) < MARGIN and max(off) < 2 * MARGIN
