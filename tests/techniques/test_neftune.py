"""NEFTune: what is added to each embedding, when, and that a step repeats it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.technique import Part, refuse_unmet
from optrush.techniques.neftune import Neftune, _Noise
from optrush.trainer.trainer import evaluate

from trials import assembled, golden_run, micro, steps

ALPHA = 5.0


def embedded(job):
    """What the embedding gives to the blocks, of a batch."""
    found = []
    handle = job.model.embedding.register_forward_hook(lambda module, inputs, out: found.append(out.detach()))
    batch = micro(job)
    job.loss(batch)
    handle.remove()
    return batch, found[0]


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_noise_is_as_large_as_documents_are_short(box, implementation):
    sets = [f"model.implementation={implementation}"]
    job = assembled(golden_run(box, packed=True, neftune={"alpha": ALPHA}, sets=sets))
    job.model.train()
    torch.manual_seed(3)
    batch, noisy = embedded(job)
    noise = noisy - job.model.embedding.weight[batch.tokens].detach()
    spans, D = batch.documents.starts.unique().diff().tolist(), noise.shape[-1]
    assert len(set(spans)) > 2
    for part, n in zip(noise.flatten(0, 1).split(spans), spans, strict=True):
        most = ALPHA / (n * D) ** 0.5
        assert 0.9 * most < part.abs().max() <= most * 1.0001
        assert part.mean().abs() < 4 * most / (3 * part.numel()) ** 0.5
    torch.manual_seed(3)
    assert torch.equal(noisy, embedded(job)[1])
    job.model.eval()
    assert torch.equal(embedded(job)[1], job.model.embedding.weight[batch.tokens].detach())


def test_a_step_repeats_its_noise(box):
    """Noise is a function of the step: a second run, begun at the second step, continues as the first."""
    with_ = {"packed": True, "neftune": {}, "sets": [f"data.eval={box}/held.jsonl"]}
    job, plain, other = (assembled(golden_run(box, **w)) for w in (with_, {**with_, "neftune": {"alpha": 1e-9}}, with_))
    assert evaluate(job)[0] == evaluate(plain)[0]
    first = list(steps(job))
    assert first[0] != next(steps(plain))
    next(other.batches)
    after = assembled(golden_run(box, **with_))
    list(steps(after, 1))
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), after.model.parameters(), strict=True):
            mine.copy_(theirs)
    torch.manual_seed(12345)
    assert next(steps(other, 1, first=2))[0] == first[1][0]


@pytest.mark.parametrize("part", [Part.CP, Part.PP, Part.CAPTURE])
def test_refused_beside(box, part):
    env = dataclasses.replace(decide(golden_run(box)).env, claimed=frozenset({part}))
    with pytest.raises(NeedsError, match="neftune"):
        refuse_unmet(Neftune().needs(env))


def test_ranks_that_share_tokens_add_their_parts():
    """Together the noise of whole rows: what each would have drawn alone."""
    rows = SimpleNamespace(ids=torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]))
    parts = []
    for at, embedded in ((0, torch.zeros(1, 8, 4)), (0, torch.zeros(1, 4, 4)), (1, torch.zeros(1, 4, 4))):
        noise = _Noise(5.0, at)
        noise.enter(SimpleNamespace(training=True), (None, None, rows))
        torch.manual_seed(3)
        parts.append(noise.add(None, (), embedded))
    assert parts[0].any() and torch.equal(parts[0], torch.cat(parts[1:], 1))
