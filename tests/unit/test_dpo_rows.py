"""Pairs on their way into batches: never torn, never apart, counted as pairs; and what a row's loss is made of."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from optrush.config import Dpo, parse_config
from optrush.data import sample, sampler
from optrush.data.batch import collate
from optrush.data.packing import Fitted, Packed, Padded, Sorted
from optrush.data.schema import Chat, Document, Pair, RowLocation
from optrush.data.schema import parse_row as row
from optrush.objectives import FIGURES, dpo, pairs
from optrush.trainer.run import largest_batch

T = 40
LAYOUTS = [Padded(), Fitted(), Sorted(7), Packed(), Packed(5)]


class Pairs:
    """Pair i: documents of tokens 2i and 2i + 1, of lengths that depend on i."""

    parts, fingerprint, tokenized = 2, "", True

    def __init__(self, n: int) -> None:
        self.n, self.spans = n, ((n, 1.0),)

    def __len__(self) -> int:
        return self.n

    def lengths(self) -> np.ndarray:
        return np.array([sum(map(len, self.documents(i))) for i in range(self.n)])

    def targets(self) -> np.ndarray:
        return self.lengths() - 4

    def documents(self, i: int) -> tuple[Document, ...]:
        sizes = (3 + i % 11, 3 + (5 * i) % 13)
        return tuple(Document(np.full(n, 2 * i + s, np.int32), np.arange(n) > 1) for s, n in enumerate(sizes))


def known(n):
    """A reference that tells of its pair: -i and -i - 1/2."""
    return -np.arange(2 * n, dtype=np.float32).reshape(n, 2) / 2


def check(batch):
    """Every pair of a batch stands beside itself, where `pairs` and the reference say; its numbers in order."""
    there, seen = batch.extra["pairs"], []
    ids = batch.documents.ids
    for b, counts in enumerate(batch.rows):
        assert there[b].sum() == len(counts.samples)
        for p, i in enumerate(counts.samples):
            for side in (0, 1):
                assert set(batch.tokens[b][ids[b] == 2 * p + side].tolist()) == {2 * i + side}
            assert batch.extra["reference"][b, p].tolist() == [-i, -i - 0.5]
            seen.append(i)
    assert batch.n_terms == len(seen) == len(batch.samples)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("micro_rows", [1, 3])
def test_every_pair_once_an_epoch_and_whole(layout, micro_rows):
    rows = sampler.Stream(Pairs(25), layout, T=T, rows=6, seed=3)
    rows.reference = known(25)
    plan = rows.plan(epochs=1)
    of_rank = [partial(rows.batches, plan=plan, rank=r, ranks=2, micro_rows=micro_rows) for r in (0, 1)]
    batches = [b for k in range(plan.steps) for made in of_rank for b in made(k)]
    assert sorted(i for b in batches for i in check(b)) == list(range(25))
    assert sum(b.n_targets for b in batches) == Pairs(25).targets().sum()
    assert len({b.extra["pairs"].shape for b in batches}) == 1, "one shape for compiled code"
    assert not any(b.documents.single for b in batches)


def test_halves_are_batches_too():
    rows = [[(i, d) for d in Pairs(9).documents(i)] for i in range(4)]
    batch = collate(rows, T, single=False, most=4 * 5, parts=2, reference=known(9))
    parts = batch.parts(3)
    assert [check(part) for part in parts] == [[0, 1, 2], [3]]
    assert sum(part.n_terms for part in parts) == batch.n_terms == 4
    assert [part.extra["pairs"].shape for part in parts] == [(3, 2), (1, 2)]


@pytest.mark.parametrize("packed", [False, True])
def test_an_evaluation_has_every_pair_once(packed):
    made = [sampler.evaluation(Pairs(25), T=T, micro_rows=2, rank=r, ranks=3, packed=packed) for r in range(3)]
    seen = [i for part in made for b in part for i in check(replaced(b))]
    assert sorted(seen) == list(range(25)) and {len(list(part)) for part in made} == {made[0].batches}
    assert made[0].documents == 50


def replaced(batch):
    """The batch as if its reference were known: rows of an evaluation bring none of their own."""
    assert set(batch.extra) == {"pairs", "desirable"} and batch.extra["desirable"].all()
    rows = [[(i, d) for i in c.samples for d in Pairs(25).documents(i)] for c in batch.rows]
    room = 2 * batch.extra["pairs"].shape[1] + 1
    again = collate(rows, T, single=False, most=len(rows) * room, parts=2, reference=known(25))
    assert torch.equal(again.tokens, batch.tokens) and torch.equal(again.extra["pairs"], batch.extra["pairs"])
    return again


def test_a_row_that_is_full_has_no_padding_to_count():
    """Room for one pair a row, and padding's number would lie beyond it."""
    full = [[(0, d) for d in (Document(np.arange(n, dtype=np.int32), np.arange(n) > 0) for n in (15, 25))]]
    short = [[(1, d) for d in Pairs(2).documents(1)]]
    batch = collate([*full, *short, []], T, single=False, most=3 * 3, parts=2, reference=known(2))
    assert batch.extra["pairs"].tolist() == [[True], [True], [False]]
    values = torch.where(batch.labels >= 0, 1.0, 0.0)
    assert pairs.by_document(values, batch)[:, 0].tolist() == [[14, 24], [2, 6], [0, 0]]


# --- the score, on log-probabilities that are given


def scored(settings, logps, refs):
    """Of one row of pairs of three-token documents, whose two targets have half of `logps` each; and an empty row."""
    document = Document(np.arange(3, dtype=np.int32), np.arange(3) > 0)
    rows = [[(i, document) for i in range(len(logps)) for _ in (0, 1)], []]
    batch = collate(rows, T, single=False, most=2 * 9, parts=2, reference=np.array(refs, np.float32))
    each = torch.zeros(2, T)
    for d, value in enumerate(v for pair in logps for v in pair):
        each[0, 3 * d : 3 * d + 2] = -value / 2
    figures = {name: torch.zeros(()) for name in FIGURES}
    head = SimpleNamespace(calls=0)

    def call(hidden, labels, reduce):
        assert reduce == "token"
        return torch.where(labels >= 0, each, 0)

    loss = partial(dpo.score, call, settings, figures)(head, batch)
    return loss.item(), {name: value.item() for name, value in figures.items()}


def test_the_loss_by_hand():
    logps, refs = [(-4.0, -6.0), (-9.0, -3.0)], [(-5.0, -5.0), (-8.0, -4.0)]
    z = [0.5 * 2, 0.5 * -2]

    def lost(x, e):
        return -(1 - e) * math.log(1 / (1 + math.exp(-x))) - e * math.log(1 / (1 + math.exp(x)))

    for e in (0.0, 0.2):
        loss, said = scored(Dpo(beta=0.5, label_smoothing=e), logps, refs)
        assert loss == pytest.approx(sum(lost(x, e) for x in z), rel=1e-6)
        wanted = {"rewards_chosen": 0.0, "rewards_rejected": 0.0, "reward_accuracy": 1, "reward_margin": 0.0}
        assert said == pytest.approx(wanted, abs=1e-6)
    loss, said = scored(Dpo(beta=0.5, loss="ipo"), logps, refs)
    assert loss == pytest.approx((1 - 1) ** 2 + (-1 - 1) ** 2, abs=1e-6)  # means over two targets, 1 / (2 beta) = 1
    one = scored(Dpo(beta=0.5), logps[:1], refs[:1])[1]
    assert one == pytest.approx(dict(zip(FIGURES, (0.5, -0.5, 1, 1.0))))


# --- the sample, and what is rehearsed


def test_the_sample_has_pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    sample.write_sample(path, 30, 4, pairs=True)
    found = [row(RowLocation(path, n), json.loads(line)) for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert len(found) == 30 and all(isinstance(pair, Pair) for pair in found)
    for pair in found:
        assert isinstance(pair.chosen, Chat) and isinstance(pair.rejected, Chat)
        good, bad = (part.messages[-1].content.splitlines() for part in (pair.chosen, pair.rejected))
        assert good != bad and good[:2] == bad[:2]
        steps, other = ({line.partition(". ")[2] for line in text[2:]} for text in (good, bad))
        assert steps == other and good[2].startswith("1. Prepare the ")
        assert [line.partition(".")[0] for line in bad[2:]] == [str(n) for n in range(1, len(bad) - 1)]
    sample.write_sample(path, 5, 4, pairs=True)
    again = [row(RowLocation(path, n), json.loads(line)) for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert again == found[:5]


def test_the_largest_micro_batch_is_full_rows_of_pairs():
    rows = sampler.Stream(Pairs(25), Packed(), T=T, rows=4, seed=0)
    rows.reference = known(25)
    job = SimpleNamespace(stream=rows, env=SimpleNamespace(seq=T, micro_rows=2), vocab=90, ids=90)
    plan = SimpleNamespace(length=rows.plan(epochs=1))
    batch = largest_batch(job, plan)
    assert batch.n_tokens == 2 * T and batch.n_terms == 2 and batch.n_targets == 2 * (T - 2)
    real = rows.batches(0, plan.length, rank=0, ranks=1, micro_rows=2)[0]
    assert batch.extra["pairs"].shape == real.extra["pairs"].shape


def test_the_block_is_read_and_written():
    from optrush.config import dump_config

    text = "{model: tiny, objective: dpo, dpo: {beta: 1, reference: adapter}, data: {sample: recipes}, output: o}"
    config = parse_config(text, "run.yaml")
    assert (
        config.dpo == Dpo(beta=1.0, reference="adapter") and parse_config(dump_config(config), "again.yaml") == config
    )
