"""Paged states are exact: the same bits with any of the AdamWs, with states that pass through two small slots.

Here is no CUDA device, so the copies are played: `Late` does them when somebody waits for them, and spoils until then
what they write; `Early` does them at once. A stream may do either, or anything between. `tests/gpu/test_optimizers.py`
has the streams themselves.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from functools import partial
from unittest import mock

import pytest
import torch

from meshes import further
from optrush.errors import NeedsError, NoEffectError
from optrush.models.shapes import SHAPES, ModelShape
from optrush.optim.adam8bit import Adam4bit, Adam8bit
from optrush.optim.adamw import AdamW, build_optimizer
from optrush.optim.paged import Paged, ParamRows, Registered
from optrush.planner import search
from optrush.techniques import ALL, paged_states
from optrush.techniques.paged_states import PagedStates
from optrush.trainer import build
from optrush.trainer.checkpoint import Meta, find_checkpoints, restore, save
from optrush.trainer.run import release_memory
from optrush.trainer.trainer import evaluate

import optimizers
from golden.sgd import Sgd
from optimizers import OPTIM, same
from trials import all_bits, assembled, golden_run, shaped, steps

PIECE, LEAST = 1500, 300  # the golden matrices have some thousand elements: several pieces each


class Early:
    """A bus whose copies happen at once."""

    kind = "cpu"

    def __init__(self):
        self.copied = 0

    def copy(self, pairs):
        for to, of in pairs:
            to.copy_(of)
            self.copied += of.nbytes
        return 0

    def wait(self, mark): ...

    def settle(self, mark): ...

    def page(self, size):
        return torch.zeros(size, dtype=torch.uint8)


class Late(Early):
    """A bus whose copies happen when they are waited for; until then what they write is spoilt."""

    def __init__(self):
        super().__init__()
        self.queue, self.done = [], 0

    def copy(self, pairs):
        for to, _ in pairs:
            to.view(torch.uint8).fill_(0xFF)
        self.queue.append(pairs)
        return self.done + len(self.queue)

    def wait(self, mark):
        while self.done < mark:
            super().copy(self.queue.pop(0))
            self.done += 1

    settle = wait


BUSES = list(itertools.product((Late, Early), repeat=2))


def classes(kinds=(Late, Late)):
    """ALL with the technique as it may run without a GPU."""

    @dataclasses.dataclass(frozen=True)
    class Here(PagedStates):
        def needs(self, setup):
            return iter(())

        def buses(self, job):
            return kinds[0](), kinds[1]()

    return [Here if t is PagedStates else t for t in ALL]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(paged_states, "PIECE", PIECE)
    monkeypatch.setattr(paged_states, "LEAST", LEAST)


def trained(box, kinds=(Late, Late), n=4, **with_):
    job = assembled(golden_run(box, packed=True, **with_), classes(kinds))
    return list(steps(job, n)), all_bits(job)


OPTIMIZERS = [
    {}, {"fused_adamw": {}}, {"adam8bit": {}}, {"adam4bit": {}},
    {"bf16": {}}, {"bf16": {}, "fused_adamw": {}}, {"bf16": {"rounding": "kahan"}}, {"bf16": {}, "adam4bit": {}},
    {"lora": {"lr_ratio": 4}},
    {"fused_adamw": {}, "update_in_backward": {}}, {"bf16": {}, "adam8bit": {}, "update_in_backward": {}},
]  # fmt: skip


@pytest.mark.parametrize("with_", further(OPTIMIZERS[::-2] + OPTIMIZERS[-2::-2], 1), ids=str)
def test_equal_bits_over_some_steps(box, with_):
    base = trained(box, **with_)
    for kinds in BUSES if with_ == {"fused_adamw": {}} else BUSES[:1]:
        found = trained(box, kinds, paged_states={}, **with_)
        assert found[0] == base[0], "losses and norms"
        assert same(found[1], base[1])


@pytest.mark.parametrize("broken", ["inward", "outward"])
def test_these_tests_would_see_what_nobody_waits_for(box, broken):
    run = golden_run(box, packed=True, fused_adamw={}, paged_states={})
    base, job = assembled(run, classes()), assembled(run, classes())
    getattr(job.optimizer, broken).wait = lambda mark: None
    list(steps(base, 3)), list(steps(job, 3))
    assert not same(all_bits(base), all_bits(job))


def test_these_tests_would_see_a_slot_that_is_taken_too_early(box, monkeypatch):
    """Sent for without asking who has the slot: early copies overwrite what late ones have still to fetch."""
    base = trained(box, (Early, Late), 3, fused_adamw={}, paged_states={})
    send_for = Paged._prefetch

    def hasty(self, k, rows):
        with mock.patch.object(self, "left", [None, None]):
            return send_for(self, k, rows)

    monkeypatch.setattr(Paged, "_prefetch", hasty)
    assert not same(trained(box, (Early, Late), 3, fused_adamw={}, paged_states={})[1], base[1])


# The machinery, by itself.

SIZES = {
    "a": (70, 96),
    "small": (9, 11),
    "b": (100, 33),
    "cube": (40, 8, 16),
    "norm": (500,),
    "one": (),
    "none": (0, 64),
}
MAKES = {
    "loop": lambda t, **k: AdamW(t, OPTIM, fused=False, rounding="kahan", **k),
    "fused": lambda t, **k: AdamW(t, OPTIM, fused=True, rounding="stochastic", **k),
    "8": lambda t, **k: Adam8bit(t, OPTIM, rounding="stochastic", **k),
    "4": lambda t, **k: Adam4bit(t, OPTIM, **k),
}


parameters = partial(optimizers.parameters, sizes=SIZES)


def paged(found, make, kinds=(Late, Late), piece=PIECE, **options):
    return Paged(found, make, kinds[0](), kinds[1](), piece=piece, least=LEAST, **options)


def stepped(found, ours, step, *, bad=False, only=None):
    g = torch.Generator().manual_seed(step)
    for t in found:
        t.grad = torch.randn(t.full_shape, generator=g).to(t.local.dtype)
    ours.step(torch.tensor(1e-2 / step), torch.tensor(2.0), torch.tensor(bad), only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", further([4000, 1 << 20], 1))
@pytest.mark.parametrize("name", MAKES)
def test_any_pieces(name, piece, dtype):
    """Steps of all, of some (of neighbouring pieces or not), and one that is skipped: it changes no bit."""
    one, other = parameters(dtype), parameters(dtype)
    base, ours = build_optimizer(one, MAKES[name]), paged(other, MAKES[name], piece=piece)
    assert (ours.reads_host, ours.rounding) == (base.reads_host, base.rounding)
    for step, only in enumerate((None, [0, 3], None, [2], [0, 1, 2, 3, 4, 5, 6], [1]), 1):
        stepped(one, base, step, only=only), stepped(other, ours, step, only=only)
        assert same(optimizers.everything(one, base), optimizers.everything(other, ours)), step
        before = optimizers.everything(other, ours)
        stepped(other, ours, 9, bad=True)
        assert same(optimizers.everything(other, ours), before)


def test_what_lies_where():
    """Slots as large as the states of two pieces; host states of parameters, to the byte; the rest on the device."""
    found = parameters(torch.bfloat16)
    ours = paged(found, MAKES["fused"])
    sizes = [sum(r.local.numel() for r in ours.rows if isinstance(r, ParamRows) and ours.piece[ours.rows.index(r)] == k)
             for k in range(max(ours.piece.values()) + 1)]  # fmt: skip
    assert len(sizes) > 5 and max(sizes) <= PIECE
    assert max(s.numel() for s in ours.slots) <= 2 * 2 * 16 * 128 + 8 * 512, "two bfloat16 a weight, and alignment"
    slots = {s.untyped_storage().data_ptr() for s in ours.slots}
    for name, by in ours.state().items():
        assert not any(s.untyped_storage().data_ptr() in slots for s in by.values()), name
    stay = {r.name for i, r in enumerate(ours.rows) if i not in ours.piece}
    assert stay == {"small", "one", "none"}
    stepped(found, ours, 1)
    moved = sum(2 * t.local.nbytes for t in found if t.name not in stay)
    ours.state()
    assert ours.inward.copied == ours.outward.copied == moved, "each byte there and back"


def test_neighbours_share_pieces_and_pieces_take_turns():
    ours = paged(parameters(torch.bfloat16), MAKES["fused"], piece=4000)
    names = {k: {ours.rows[i].name for i, at in ours.piece.items() if at == k} for k in set(ours.piece.values())}
    assert {"b", "cube"} <= set.union(*names.values()) and any(len(n) > 1 for n in names.values())
    order, prefetch, step = [], ours._prefetch, ours.inner.step
    ours._prefetch = lambda k, rows: (order.append(k), prefetch(k, rows))[1]
    ours.inner.step = lambda *a, only: (order.append({ours.piece.get(i) for i in only}), step(*a, only=only))
    stepped(ours.trained, ours, 1)
    assert order[:6] == [{None}, 0, 1, {0}, 2, {1}]


def test_what_is_loaded_counts_for_all_rows():
    """A checkpoint writes a parameter's count once; rows behind its first follow."""
    one, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    base, ours = build_optimizer(one, MAKES["4"]), paged(other, MAKES["4"])
    for step in (1, 2, 3):
        stepped(one, base, step)
    for t, fresh in zip(one, other, strict=True):
        fresh.local.copy_(t.local)
        for kind, state in ours.state()[t.name].items():
            state.copy_(base.state()[t.name][kind])
    stepped(one, base, 4), stepped(other, ours, 4)
    assert same(optimizers.everything(one, base), optimizers.everything(other, ours))


def test_host_memory_that_is_not_there():
    size = sum(2 * t.local.nbytes for t in parameters(torch.bfloat16) if t.local.numel() >= LEAST)
    paged(parameters(torch.bfloat16), MAKES["fused"], room_bytes=size)
    with pytest.raises(NeedsError, match="pinned host memory for optimizer states") as error:
        paged(parameters(torch.bfloat16), MAKES["fused"], room_bytes=size - 1)
    assert "for each process" in error.value.found and "adam8bit, adam4bit" in error.value.do

    class Full(Late):
        def page(self, size):
            raise RuntimeError("CUDA error: out of memory\nand more")

    with pytest.raises(NeedsError) as error:
        paged(parameters(torch.bfloat16), MAKES["fused"], (Late, Full))
    assert error.value.found.endswith("not enough memory: CUDA error: out of memory")


# In a run.


@pytest.mark.parametrize("with_", further([{"bf16": {}, "adam8bit": {}}, {"fused_adamw": {}}], 1), ids=str)
@pytest.mark.parametrize("first", further([True, False], 1))
def test_checkpoints_go_either_way(box, tmp_path, with_, first):
    """Saved with states on the host and resumed without, and the other way round: the same bits as straight on."""
    kinds = [with_ | ({"paged_states": {}} if here else {}) for here in (first, not first)]
    runs = [golden_run(box, packed=True, sets=[f"output={tmp_path}"], **k) for k in kinds]
    job, again = (assembled(run, classes()) for run in runs)
    list(steps(job, 2))
    save(job, 2, Meta("00ff", position=0))
    list(steps(job, 2, first=3))
    for _ in range(2):
        next(again.batches)
    restore(again, find_checkpoints(tmp_path)[0], {})
    list(steps(again, 2, first=3))
    assert same(all_bits(job), all_bits(again))


def halves(box, with_):
    with mock.patch.multiple(paged_states, PIECE=PIECE, LEAST=LEAST):
        return trained(box, n=3, **with_)


@pytest.mark.parametrize("beside", [{"fsdp": {}, "adam4bit": {}}, {"ddp": {}, "fused_adamw": {}}], ids=str)
def test_on_two_ranks(box, pair, beside):
    """Each pages what it holds; of whole parameters the same bits, of halves within the sums' order."""
    base, ours = pair(halves, box, beside), pair(halves, box, beside | {"paged_states": {}})
    for (figures, states), (want, others) in zip(ours, base, strict=True):
        assert figures == want and same(states, others)


def test_evaluation_has_no_optimizer(box):
    sets = [f"data.eval={box}/held.jsonl"]
    job = assembled(golden_run(box, packed=True, sets=sets, paged_states={}), classes(), training=False)
    assert job.optimizer is None and evaluate(job)[1] > 0


def test_a_job_that_did_not_fit_is_released(box):
    job = assembled(golden_run(box, packed=True, fused_adamw={}, paged_states={}), classes())
    list(steps(job, 1))
    optimizer = job.optimizer
    assert optimizer.pages and optimizer.slots
    release_memory(job)
    assert not (optimizer.pages or optimizer.slots or optimizer.host or optimizer.pairs)


def test_host_memory_stays_pinned_until_it_is_released(monkeypatch):
    calls = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            calls.append(("register", address))
            return 0

        def cudaHostUnregister(self, address):
            calls.append(("unregister", address))

    class Pinned(Late):
        page = Registered.page

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    ours = paged(parameters(torch.bfloat16), MAKES["fused"], (Pinned, Pinned))
    assert len(calls) > 3 and {what for what, _ in calls} == {"register"}
    registered = [address for _, address in calls]
    ours.release()
    gc.collect()
    assert sorted(a for what, a in calls if what == "unregister") == sorted(registered)


# What it refuses.


@pytest.mark.parametrize(
    ("other", "said"), [("sgd", "keeps its states where it creates them"), ("muon", "`muon` makes its")]
)
def test_other_optimizers_are_refused(box, other, said):
    with pytest.raises(NeedsError, match=said) as error:
        assembled(golden_run(box, packed=True, paged_states={}, **{other: {}}), [*classes(), Sgd])
    assert "adam8bit" in error.value.do


def test_nothing_to_page_is_an_error(box, monkeypatch):
    monkeypatch.setattr(paged_states, "LEAST", 1 << 30)
    with pytest.raises(NoEffectError, match="paged-states"):
        assembled(golden_run(box, packed=True, paged_states={}), classes())


def test_the_baselines_own_is_what_assembly_makes(box, monkeypatch):
    """The AdamW that it makes where nobody owns the optimizer has the arguments of assembly's."""
    made = []
    monkeypatch.setattr(build, "AdamW", lambda t, o, **k: made.append({"optim": o, **k}) or AdamW(t, o, **k))
    assembled(golden_run(box, packed=True))
    job = assembled(golden_run(box, packed=True, paged_states={}), classes())
    ours = job.optimizer.inner
    theirs = {"optim": ours.optim, "fused": ours.fused, "rounding": ours.rounding, "seed": job.config.seed}
    assert made == [theirs | {"optim": made[0]["optim"]}] and ours.optim == made[0]["optim"]


# The plan.


def test_its_memory_is_predicted(monkeypatch):
    monkeypatch.setattr(paged_states, "PIECE", 1 << 23)
    n = ModelShape.read(SHAPES["llama-3.2-1b"]).parameters
    for with_, each in ((["fused-adamw"], 8), (["bf16", "fused-adamw"], 4), (["adam8bit"], 2 * (1 + 4 / 256)),
                        (["bf16", "adam4bit"], 1 + 8 / 128)):  # fmt: skip
        plain, found = (
            search.predict(shaped("llama-3.2-1b", *withs, rows=1), "h200")
            for withs in (with_, [*with_, "paged-states"])
        )
        assert found.host_bytes == pytest.approx(each * n) and plain.host_bytes == 0
        lines = {line.name: line.bytes for line in found.lines}
        assert not any(name.startswith("states.") for name in lines)
        assert lines["paging"] == 2 * 2 * (1 << 23) * (2 if "bf16" in with_ else 4)
        assert plain.peak_bytes - found.peak_bytes == pytest.approx(each * n - lines["paging"], rel=1e-3)
        assert found.tokens_per_s < plain.tokens_per_s
