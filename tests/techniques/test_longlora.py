"""Shifted sparse attention against its definition, pair by pair; dense in evaluation; what it refuses."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from meshes import further
from optrush.data.batch import Documents
from optrush.hardware import parse_hardware
from optrush.kernels import attention
from optrush.kernels.attention_shifted import shifted
from optrush.trainer.trainer import evaluate

from golden.make_golden import T
from trials import apart, assembled, first_gradients, furthest, golden_run, ledgers, shaped, steps

CLOSE = 1e-5
BESIDE = {"attention": {}, "recompute": {}, "fused-kernels": {"rope": True}}


def may_read(ids, heads, group):
    """(B, heads, T, T): whether a token reads another, by the definition."""
    shift = torch.tensor([0 if h < heads // 2 else group // 2 for h in range(heads)])[:, None]
    at = (torch.arange(ids.shape[1]) + shift) // group  # (heads, T)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return (same & (at[:, :, None] == at[:, None, :])).tril()


def plain(q, k, v, seen):
    """Softmax over what may be read, nothing else of ours."""
    many = q.shape[2] // k.shape[2]
    k, v = (torch.stack([x[:, :, h // many] for h in range(q.shape[2])], 2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bshe->bthe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def drawn(rows, H, K, E=8):
    draw = torch.Generator().manual_seed(7)
    ids = torch.tensor(rows, dtype=torch.int32)
    q, k, v = (torch.randn(*ids.shape, n, E, generator=draw, requires_grad=True) for n in (H, K, K))
    single = all(row == sorted(row) and set(row) <= {0, 1} for row in rows)
    starts = torch.zeros(2, dtype=torch.int32)
    return q, k, v, Documents(starts, ids, ids.shape[1], single), torch.randn(q.shape, generator=draw)


PACKED = [[0] * 5 + [1] * 9 + [2] * 10, [0] * 24]
SINGLE = [[0] * 24, [0] * 13 + [1] * 11]  # a document, and padding behind it


@pytest.mark.parametrize("impl", ["masked", "sdpa"])
@pytest.mark.parametrize("rows", [PACKED, SINGLE], ids=["packed", "single"])
@pytest.mark.parametrize(("H", "K", "group"), [(4, 2, 8), (2, 1, 12), (4, 4, 2), (8, 4, 6)])
def test_against_its_definition(impl, rows, H, K, group):
    q, k, v, documents, g = drawn(rows, H, K)
    real = (documents.ids == 0)[..., None, None] if documents.single else torch.tensor(1.0)  # nothing reads padding
    out = shifted(attention.ATTENTIONS[impl], q, k, v, documents, group) * real
    found = [out, *torch.autograd.grad(out, (q, k, v), g)]
    wanted = plain(q, k, v, may_read(documents.ids, H, group)) * real
    for a, b in zip(found, [wanted, *torch.autograd.grad(wanted, (q, k, v), g)], strict=True):
        assert apart(a.detach(), b.detach()) < CLOSE


def test_no_value_reaches_another_document():
    """To the bit, and if it is not finite: forward and backward."""
    q, k, v, documents, g = drawn(PACKED, 4, 2)

    def seen(spoil):
        inputs = [x.detach().clone() for x in (q, k, v)]
        for x in inputs:
            x[0, 5:14] = spoil if spoil is not None else x[0, 5:14]
        for x in inputs:
            x.requires_grad_()
        out = shifted(attention.sdpa, *inputs, documents, 8)
        others = torch.ones(24, dtype=torch.bool)
        others[5:14] = False
        keep = out[0, others]
        grads = torch.autograd.grad((keep * g[0, others]).sum(), inputs)
        return [keep, *(x[0, others] for x in grads)], out[0, 5:14]

    (want, _), (other, _), (bad, own) = seen(None), seen(3.0), seen(torch.nan)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, other, bad, strict=True))
    assert own.isnan().all()


# In a run.


@pytest.mark.parametrize(
    ("packed", "with_"),
    further([(True, {}), (False, BESIDE), (True, {"attention": {}}), (False, {}), (False, {"attention": {}}),
             (True, BESIDE)], 3),
    ids=str,
)  # fmt: skip
def test_training_is_by_the_definition(box, packed, with_):
    """Losses and gradients of the model with its attention replaced by the definition."""
    job = assembled(golden_run(box, packed=packed, longlora={"group": 12}, **with_))
    found = first_gradients(job)
    other = assembled(golden_run(box, packed=packed, **with_))

    def defined(q, k, v, documents):
        return plain(q, k, v, may_read(documents.ids, q.shape[2], 12))

    for block in other.model.blocks.values():
        block.attention = defined
    want = first_gradients(other)
    assert found[0] == pytest.approx(want[0], rel=CLOSE) and furthest(found[1], want[1]) < CLOSE
    dense = first_gradients(assembled(golden_run(box, packed=packed, **with_)))
    assert furthest(found[1], dense[1]) > 100 * CLOSE, "and it is another attention"


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients(box):
    """By a compiler that makes the graphs and writes no code for them."""
    real = torch.compile
    with mock.patch("torch.compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more)):
        found = first_gradients(assembled(golden_run(box, packed=True, longlora={"group": 12}, compile={})))[1]
    want = first_gradients(assembled(golden_run(box, packed=True, longlora={"group": 12})))[1]
    assert furthest(found, want) < 1e-5


def test_an_evaluation_is_dense(box):
    sets = [f"data.eval={box}/held.jsonl"]
    want, found = (evaluate(assembled(golden_run(box, packed=True, sets=sets, **w))) for w in ({}, {"longlora": {}}))
    assert found == want
    assert T // 4 == 12, "the groups that it takes by itself"


def test_with_adapters_embedding_and_norms_learn(box):
    """What the paper adds to LoRA is lora's own option."""
    save = ["embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"]
    job = assembled(golden_run(box, packed=True, longlora={}, lora={"save": save}))
    before = {t.name: t.whole.clone() for t in job.trained}
    list(steps(job, 2))
    moved = {t.name for t in job.trained if not torch.equal(t.whole, before[t.name])}
    whole = {"embedding.weight", "norm.weight", *(f"blocks.{i}.norm{n}.weight" for i in (0, 1) for n in (1, 2))}
    assert whole <= moved and all(name in whole or ".adapter." in name for name in moved)


def test_the_plan_counts_scores_within_groups():
    def flop(*withs):
        (book,), *_ = ledgers(shaped("llama-3.2-1b", "bf16", "attention", *withs), parse_hardware("h200")[0], 1)
        return sum(work.flop * work.times for work in book.work if work.name.endswith(".scores"))

    assert flop() and flop("longlora:group=256") == pytest.approx(flop() * 256 / 2048)
