"""A model whose vocabulary has grown against transformers' own resizing, with the same rows: logits and gradients."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from optrush.models.hf import load
from optrush.models.source import Growth
from optrush.models.weights import export_weights

from parity_models import FAMILIES, SIZES, compare_gradients, materialise, packed, reference, reference_loss, save

KNOWN, ROWS, GROWN = 57, 61, 128  # tokens of the tokenizer, rows of the published embedding, rows after it grew
GROWTHS = {
    "grown": Growth(("<a>", "<b>", "<c>", "<d>", "<e>"), (), ROWS, KNOWN, GROWN, GROWN),
    "spare rows": Growth(("<a>", "<b>"), (), ROWS, KNOWN, KNOWN + 2, ROWS),
}
MODELS = {
    "llama": (FAMILIES["llama"], "native"),
    "llama-tied": (FAMILIES["llama-tied"], "native"),
    "qwen2 through transformers": (FAMILIES["qwen2"], "transformers"),
    "phi, whose head has a bias": (
        {**SIZES, "model_type": "phi", "hidden_size": 32, "tie_word_embeddings": False}, "transformers",
    ),
}  # fmt: skip


def resized(theirs: torch.nn.Module, growth: Growth) -> torch.nn.Module:
    """transformers' own resizing; the new rows, means in float64, are written by hand."""
    if growth.vocab > growth.rows:
        theirs.resize_token_embeddings(growth.vocab, mean_resizing=False)
    head = theirs.get_output_embeddings()
    with torch.no_grad():
        parameters = {id(p): p for p in (theirs.get_input_embeddings().weight, head.weight, head.bias)}
        for p in [p for p in parameters.values() if p is not None]:  # a tied head is one of them
            p[growth.first : growth.last] = p[:KNOWN].double().mean(0).float()
    return theirs


@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, growth, tmp_path):
    sizes, implementation = MODELS[name]
    theirs = reference(sizes)
    hf = {**save(theirs, tmp_path / "old"), "vocab_size": growth.vocab}
    ours, recipe = load(tmp_path / "old", hf, implementation, torch.float32, 0, growth)
    materialise(ours, recipe).eval()
    theirs = resized(theirs, growth)
    batch = packed([[5, 7, 3], [19, 1]], 20, growth.last)
    assert int((batch.tokens >= KNOWN).sum()) > 0, "the batch has new tokens in it"
    logits, loss = reference_loss(theirs, batch)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    real = torch.tensor([[True] * 15 + [False] * 5, [True] * 20])
    torch.testing.assert_close(ours.head.logits(hidden)[real], logits[real], rtol=1e-5, atol=1e-5)
    mine = ours.head(hidden, batch.labels)
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    theirs.zero_grad()
    loss.backward()
    mine.backward()
    assert compare_gradients(ours, recipe, theirs) >= 18
    export_weights(tmp_path / "new", ((n, p.detach()) for n, p in ours.named_parameters()), recipe, hf)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new", attn_implementation="eager")
    assert again.config.vocab_size == growth.vocab
    torch.testing.assert_close(reference_loss(again, batch)[0], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_random_weights(implementation, growth):
    """Old rows are those of the model as it was; new ones their mean; the same through transformers."""
    hf = {**FAMILIES["qwen2"], "tie_word_embeddings": False, "vocab_size": growth.vocab}
    was = materialise(*load(None, {**hf, "vocab_size": ROWS}, "native", torch.float32, 3))
    now, recipe = load(None, hf, implementation, torch.float32, 3, growth)
    materialise(now, recipe)
    for old, new in ((was.embedding.weight, now.embedding.weight), (was.head.weight, now.head.weight)):
        untouched = [*range(growth.first), *range(growth.last, ROWS)]
        assert torch.equal(new[untouched], old[untouched])
        mean = old[:KNOWN].double().mean(0).float().expand(growth.last - growth.first, -1)
        assert torch.equal(new[growth.first : growth.last], mean)
