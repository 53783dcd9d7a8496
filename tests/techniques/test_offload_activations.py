"""Offloading is exact: the same bits, with most of what blocks save on the host meanwhile.

Here is no CUDA device, so the copies are played: `Late` does them as late as a stream may, when somebody waits for
them, and spoils what must not be read before. `tests/gpu/test_saved.py` has the streams themselves.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from meshes import further
from optrush import hardware
from optrush.cli.plan import memory_lines
from optrush.decide import decide
from optrush.errors import NeedsError, exhausted
from optrush.hardware import CPU, NAMED
from optrush.models import activation_offload as module
from optrush.models.activation_offload import Offload, Pages
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import baseline, cost, ledger, search
from optrush.technique import Environment, Part, settle
from optrush.techniques import ALL
from optrush.techniques.offload_activations import OffloadActivations
from optrush.trainer.run import RunRequest, run
from optrush.trainer.trainer import evaluate

from golden.make_golden import SIZES, T
from trials import assembled, golden_run, same_bits, shaped, steps, weights

NAME = OffloadActivations.name
SPOILT = 0xFF  # bytes of NaN in every float type


class Late:
    """A lane whose copies happen when they are waited for; until then their bytes must be somebody's."""

    kind = "cpu"

    def __init__(self):
        self.queue, self.done, self.made = [], 0, 0

    def copy(self, pairs):
        for to, _ in pairs:
            to.fill_(SPOILT)
        self.queue.append([(to.data, of.data) for to, of in pairs])  # no views, which would hold what they view
        return self.done + len(self.queue)

    def wait(self, mark):
        while self.done < mark:
            pairs = self.queue.pop(0)
            ours = Counter(t.untyped_storage().data_ptr() for p in (pairs, *self.queue) for both in p for t in both)
            for to, of in pairs:
                for t in (to, of):
                    storage = t.untyped_storage()
                    users = torch._C._storage_Use_Count(storage._cdata) - ours[storage.data_ptr()]
                    assert users > 1, "freed before it was copied"  # one is what we ask by
                to.copy_(of)
            self.done += 1

    def page(self, size):
        self.made += 1
        return torch.full((size,), SPOILT, dtype=torch.uint8)


LEAST, PAGE = 256, 4096  # tiny models save tiny tensors; some of them lie over several pages
lanes: list[Late] = []


@pytest.fixture
def here(monkeypatch):
    """ALL with the technique as it may run without a GPU, and its lanes."""
    monkeypatch.setattr(module, "LEAST_BYTES", LEAST)
    defaults = {"page": PAGE, "least": LEAST, "take": lambda size: None}
    monkeypatch.setattr(module.Offload.__init__, "__kwdefaults__", defaults)
    lanes.clear()

    @dataclasses.dataclass(frozen=True)
    class Here(OffloadActivations):
        def needs(self, setup):
            yield from (n for n in super().needs(setup) if "CUDA" not in n.asked)

        def lane(self, job):
            lanes.append(Late())
            return lanes[-1]

    return [Here if t is OffloadActivations else t for t in ALL]


def trained(box, classes, n=4, implementation="native", **with_):
    job = assembled(golden_run(box, packed=True, sets=[f"model.implementation={implementation}"], **with_), classes)
    return list(steps(job, n)), weights(job)


def offloading(trainer) -> Offload:
    """The part that moves, out of the slot."""
    cells = [c.cell_contents for c in trainer.model.block_call.__closure__]
    return next(c for c in cells if isinstance(c, Offload))


@pytest.mark.parametrize(
    ("beside", "keep", "implementation"),
    further([({"recompute": {}}, 0, "native"), ({"amp": {}}, 1, "native"), ({}, 0, "transformers"),
             ({"recompute": {"every": 2}}, 1, "native"), ({"attention": {}}, 0, "native"),
             ({"recompute": {}}, 1, "transformers"), ({"attention": {}}, 1, "transformers")], 2),
    ids=str,
)  # fmt: skip
def test_equal_bits_over_some_steps(box, here, beside, keep, implementation):
    base = trained(box, here, implementation=implementation, **beside)
    found = trained(box, here, implementation=implementation, offload_activations={"keep": keep}, **beside)
    assert lanes[0].done > 8 and found[0] == base[0], "copies were waited for; losses and norms"
    assert same_bits(found[1], base[1])


def test_these_tests_would_see_what_is_read_too_early(box, here, monkeypatch):
    base = trained(box, here, 1)
    monkeypatch.setattr(Offload, "_arrive", lambda self, shelf: None)
    assert trained(box, here, 1, offload_activations={})[0] != base[0]


def test_these_tests_would_see_what_is_freed_too_early(box, here, monkeypatch):
    forget = Offload._forget

    def early(self):
        if self._leaving is not None:
            for piece in self._leaving[1]:
                piece.device = None
        forget(self)

    monkeypatch.setattr(Offload, "_forget", early)
    with pytest.raises(AssertionError, match="freed before"):
        trained(box, here, 1, offload_activations={})


def test_pages_are_used_again(box, here):
    job = assembled(golden_run(box, packed=True, offload_activations={}), here)
    made = []
    for k in (1, 2):
        list(steps(job, 1, first=k))
        gc.collect()
        pages = offloading(job).pages
        made.append(lanes[-1].made)
        assert len(pages.free) == pages.allocated == lanes[-1].made, "all of them came back"
    assert made[0] == made[1] > 0, "none was made after the first step"


def test_evaluation_moves_nothing(box, here):
    sets = [f"data.eval={box}/chat.jsonl", "data.train_on=all"]
    job = assembled(golden_run(box, sets=sets, offload_activations={}), here)
    evaluate(job)
    assert not lanes[-1].made and not lanes[-1].done


def moved(box, here, **with_) -> int:
    """Bytes that one micro-batch moves."""
    job = assembled(golden_run(box, packed=True, **with_), here)
    list(steps(job, 1))
    return offloading(job).moved_bytes // 4


def test_what_moves(box, here):
    """Beside recompute the input of a block; without it all that is large; parameters and what all are given never."""
    batch, width = 2 * T, SIZES["hidden_size"]
    assert moved(box, here, offload_activations={}, recompute={}) == batch * width * 4
    assert moved(box, here, offload_activations={"keep": 0}, recompute={}) == 2 * batch * width * 4
    everything = moved(box, here, offload_activations={})
    assert everything > 10 * batch * width * 4
    assert moved(box, here, offload_activations={}, amp={}) < everything, "products at half the width, and no weights"


# --- the machinery, by itself


class Toy(torch.nn.Module):
    """Blocks that save outputs, views, one storage twice, what they are given, and small things."""

    def __init__(self, blocks=5, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.randn(width, width) / 8 for _ in range(blocks))

    def block(self, i, x, given):
        y = torch.tanh(x @ self.weights[i]) * given  # tanh saves its output
        a, b = y.view(*y.shape[:-1], -1, 2).unbind(-1)
        return x + torch.cat((a * b, a.exp()), -1) + y.mean(-1, keepdim=True).square()

    def forward(self, x, given, offload=None):
        for i in range(len(self.weights)):
            with offload.block(i, {"x": [given]}) if offload else nullcontext():
                x = self.block(i, x, given)
        return x.square().sum()


def toy(keep=1, blocks=5, **options):
    model, x, given = Toy(blocks), torch.randn(32, 64), torch.randn(32, 64)
    model(x, given).backward()
    want = [w.grad.clone() for w in model.weights]
    model.zero_grad()
    offload = Offload(Late(), blocks, keep, **{"page": PAGE, "least": LEAST, **options})
    return model, x, given, want, offload


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("keep", [0, 1, 5])
@pytest.mark.parametrize("page", [512, 1 << 20])
def test_gradients(blocks, keep, page):
    model, x, given, want, offload = toy(keep, blocks, page=page)
    for _ in range(3):
        model.zero_grad()
        model(x, given, offload).backward()
        assert all(torch.equal(w.grad, g) for w, g in zip(model.weights, want, strict=True))
    assert (offload.moved_bytes > 0) == (keep < blocks)
    assert len(offload.pages.free) == offload.pages.allocated == offload.lane.made


def test_to_the_byte():
    """A block moves x, y, its activation and an exponential; no weight, not what it was given, no mean."""
    model, x, given, _, offload = toy()
    model(x, given, offload).backward()
    size = x.numel() * 4
    assert offload.moved_bytes == 4 * (3 * size + size // 2)


def test_casts_of_parameters_stay():
    """Autocast holds them anyway."""
    linear, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    offload = Offload(Late(), 2, 1, page=PAGE, least=LEAST)
    with torch.autocast("cpu", torch.bfloat16), offload.block(0, ()):
        y = linear(linear(x))
    assert offload.moved_bytes == 2 * x.numel() * 2, "two inputs in bfloat16"
    y.sum().backward()


def test_at_most_two_blocks_are_on_the_device():
    """Counted at each block's end and whenever autograd asks for a tensor; in the steady state."""
    model, x, given, _, offload = toy(keep=0, blocks=6)
    alive = weakref.WeakSet()
    counts = []

    class Watched(module.SavedStorage):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)

    def held():
        return len({id(p.store) for p in alive if p.device is not None})

    unpack = offload._unpack

    def counted(t):
        out = unpack(t)
        counts.append(held())
        return out

    offload._unpack = counted
    with mock.patch.object(module, "SavedStorage", Watched):
        loss = model(x, given, offload)
        assert held() == 0, "all have left at the head"
        loss.backward()
    assert max(counts) == 2 and counts[-1] <= 2


def test_the_block_before_is_sent_for_when_a_block_begins():
    model, x, given, _, offload = toy(keep=1)
    order = []
    fetch, arrive = offload._fetch, offload._arrive
    ids = {}
    offload._fetch = lambda s: (order.append(("fetch", ids.setdefault(id(s), len(ids)))), fetch(s))[1]
    offload._arrive = lambda s: (order.append(("arrive", ids.setdefault(id(s), len(ids)))), arrive(s))[1]
    model(x, given, offload).backward()
    # The last block keeps its own; then each finds its own there, and sends for the one before.
    assert order == [
        ("fetch", 0), ("arrive", 0), ("fetch", 1),
        ("fetch", 1), ("arrive", 1), ("fetch", 2),
        ("fetch", 2), ("arrive", 2), ("fetch", 3),
        ("fetch", 3), ("arrive", 3), ("fetch", 4),
        ("fetch", 4), ("arrive", 4),
    ]  # fmt: skip


def test_twice_through_one_graph():
    model, x, given, want, offload = toy()
    loss = model(x, given, offload)
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.allclose(w.grad, 2 * g) for w, g in zip(model.weights, want, strict=True))


def test_two_graphs_at_once():
    model, x, given, want, offload = toy()
    first, second = model(x, given, offload), model(x, given, offload)
    second.backward()
    first.backward()
    assert all(torch.allclose(w.grad, 2 * g) for w, g in zip(model.weights, want, strict=True))
    del first, second
    assert len(offload.pages.free) == offload.pages.allocated


def test_a_pass_that_was_cut_short():
    """In the forward pass, in the backward pass, and before it: the next one is right, and all pages come back."""
    model, x, given, want, offload = toy()
    block = model.block

    def broken(i, x, given):
        if i == 3:
            raise MemoryError
        return block(i, x, given)

    model.block = broken
    with pytest.raises(MemoryError):
        model(x, given, offload)
    model.block = block
    model(x, given, offload)  # no backward pass at all
    loss = model(x, given, offload)
    model.weights[2].register_hook(lambda g: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        loss.backward()
    model.weights[2]._backward_hooks.clear()
    del loss
    model.zero_grad()
    model(x, given, offload).backward()
    assert all(torch.equal(w.grad, g) for w, g in zip(model.weights, want, strict=True))
    gc.collect()
    assert len(offload.pages.free) == offload.pages.allocated


def test_a_saved_tensor_that_is_written_to_is_an_error():
    offload = Offload(Late(), 2, 0, page=PAGE, least=LEAST)
    w = torch.randn(64, 64, requires_grad=True)

    def written():
        with offload.block(0, ()):
            y = (w * 2).exp()
            y.mul_(2)

    with pytest.raises(AssertionError, match="wrote into"):
        written()


def test_no_more_host_memory():
    class Full(Late):
        def page(self, size):
            raise RuntimeError("CUDA error: out of memory")

    host = hardware.HostMemory(5 << 19)
    pages = Pages(Late(), 1 << 20, host.take)
    taken = [pages.take(), pages.take()]
    assert host.left_bytes == 1 << 19
    for short, said in (
        (Pages(Full(), 1 << 20), "and no more available"),
        (pages, r"the limit of this process is 0\.0"),
    ):
        with pytest.raises(MemoryError, match=f"host memory in use, {said}") as refused:
            short.take()
        assert exhausted(refused.value) and short.allocated == (2 if short is pages else 0)
    pages.free.append(taken.pop())
    assert pages.take().numel() == 1 << 20 and host.taken_bytes == 2 << 20


def test_a_run_may_have_its_part_of_the_host(box, here, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    job = assembled(golden_run(box, packed=True, offload_activations={}), here)
    whole = hardware.cpu().memory_bytes
    assert job.host_memory == hardware.HostMemory(int(0.9 * whole / 4))
    job.host_memory.most_bytes = 3 * PAGE
    with pytest.raises(MemoryError, match="the limit of this process"):
        list(steps(job, 1))
    assert job.host_memory.taken_bytes == 3 * PAGE


def test_a_host_that_is_short_is_found_before_the_first_step(box, here, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware.HostMemory, "of", classmethod(lambda cls, ranks: cls(2 * PAGE)))
    refused = r"out of memory, before step 0: 0\.0 GiB of host memory in use, the limit of this process is 0\.0"
    sets = [f"output={tmp_path / 'run'}"]
    with pytest.raises(NeedsError, match=refused) as error:
        run(RunRequest(decide(golden_run(box, rows=4, packed=True, sets=sets, offload_activations={}), here)))
    assert "--with recompute" in str(error.value) and "batch.micro_tokens" in str(error.value)


# --- what it refuses


def test_what_does_not_go_with_it(box, here):
    with pytest.raises(NeedsError, match="take compile:scope=blocks"):
        assembled(golden_run(box, compile={"scope": "model"}, offload_activations={}), here)
    with pytest.raises(NeedsError, match="separately"):
        assembled(golden_run(box, selective_recompute={}, offload_activations={}), here)
    env = dataclasses.replace(SETUP, claimed=frozenset({Part.ACTIVATION_STORAGE, Part.CAPTURE}))
    assert [n.found for n in OffloadActivations().needs(env) if not n.met] == [
        "a technique that records the step: the two together are not tested"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("beside", further([{"selective_recompute": {}}, {}, {"recompute": {}}], 1), ids=str)
@pytest.mark.slow
def test_compiled_blocks(box, here, beside, partitioned):
    """What a graph saves passes the hooks; with the same figures as compiled without."""
    torch._dynamo.reset()
    base = trained(box, here, 2, compile={}, attention={}, **beside)
    counters.clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = trained(box, here, 2, compile={}, attention={}, offload_activations={}, **beside)
    torch._dynamo.reset()
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 3, "blocks, norm, loss"
    assert lanes[-1].done > 2 and found[0] == base[0]
    assert all(torch.equal(found[1][name], want) for name, want in base[1].items())


# --- the plan


SETUP = Environment(NAMED["h200"], 1, 2048, 16, 16, 1.0, "float32", True, 16)


def book(*names):
    techniques = [t() for t in ALL if t.name in ("bf16", "attention", "compile", "fused-loss", "fused-adamw", *names)]
    env = settle(techniques, SETUP)
    rules = [r for t in techniques for r in t.predict(env)]
    entries = baseline.entries(ModelShape.read(SHAPES["llama-3.2-1b"]), 2048, native=True, cuda=True)
    return ledger.apply_rules(entries, ledger.FLOAT32, rules)


def test_the_plan_moves_all_but_two_blocks():
    n, D, L = 16 * 2048, 2048, 16
    saved = 18.5 * D * 2 * n  # bytes of one block
    plain, moved = book(), book(NAME)
    assert sum(ledger.host_bytes(plain, n)) == 0
    assert sum(ledger.host_bytes(moved, n)) == pytest.approx((L - 1) * saved)
    lines = {i.name: i.bytes for i in ledger.peak_memory(moved, n).items}
    there = sum(size for name, size in lines.items() if name.startswith("saved.") or name == "input")
    blocks = {"head": 1, "forward": 2, "backward, last block": 2}[ledger.peak_memory(moved, n).phase]
    assert there == pytest.approx(blocks * saved)
    for phase, blocks in {"forward": 2, "head": 1, "backward, last block": 2, "backward, first block": 16}.items():
        less = plain.forms[phase][1] - moved.forms[phase][1]
        assert less == pytest.approx((16 - blocks) * saved / n, abs=1e-6), phase
    both = book(NAME, "recompute")
    assert sum(ledger.host_bytes(both, n)) == pytest.approx((L - 1) * D * 2 * n), "only the inputs of blocks"
    assert ledger.peak_memory(both, n).bytes < ledger.peak_memory(book("recompute"), n).bytes


def test_the_plan_counts_the_link_to_the_host():
    n, device = 16 * 2048, NAMED["h200"]
    moved = book(NAME)
    effort = next(e for e in cost.list_work_times(moved, device, n) if e.name == "offload")
    assert effort.bytes == pytest.approx(2 * sum(ledger.host_bytes(moved, n))) and effort.where == "link"
    alone = cost.step_seconds(book(), device, n)
    assert cost.step_seconds(moved, device, n) > effort.seconds > alone, "all of it is more than the link can carry"
    assert cost.step_seconds(book(NAME, "recompute"), device, n) == cost.step_seconds(book("recompute"), device, n)
    assert not [e for e in cost.list_work_times(book(), device, n) if e.name == "offload"]
    assert (
        cost.device_rates(NAMED["a100-80"]).host_bytes_s < cost.device_rates(device).host_bytes_s
        and cost.device_rates(CPU) is None
    )


def test_the_plan_says_how_much_host_memory():
    found = search.predict(shaped("llama-3.2-1b", "bf16", "attention", "recompute", NAME, rows=16), "h200")
    assert found.host_bytes == 15 * 2048 * 2 * 32768
    room = f"{0.9 * 2 * NAMED['h200'].memory_bytes / 2**30:.1f}"
    assert f"  and 1.88 GiB of pinned host memory of {room} that a rank may have, assumed" in memory_lines(found)
    assert not [line for line in memory_lines(search.predict(shaped("llama-3.2-1b"), "h200")) if "host" in line]


def test_what_the_host_has_no_memory_for_does_not_fit():
    """A rank of this run needs 952 GiB on its host; it was killed where two of them had 503."""
    withs = ("bf16", "adam8bit", "attention:impl=fa4", "fused-kernels:mlp=quack", "compile", "fused-loss:impl=quack")
    cut = ("selective-recompute", NAME, "context", "fsdp")
    long = shaped("llama-3.1-8b", *withs, *cut, rows=1, seq=700_000)
    found = search.predict(long, "2xh200")
    assert found.peak_bytes < found.room_bytes and found.host_bytes > 3 * found.host_room_bytes and not found.fits
    best = search.search(long, "2xh200").settings
    assert best and all(NAME in s.with_ and s.prediction.fits for s in best)
    assert all(0 < s.prediction.host_bytes <= found.host_room_bytes for s in best)
    larger = dataclasses.replace(NAMED["h200"], host_memory_bytes=4 << 40)
    assert search.predict(long, larger, 2).fits and not search.predict(long, larger, 2).host_assumed


@pytest.mark.parametrize(("hosts", "local", "share"), [(1, None, 4), (2, None, 2), (1, "1", 1)])
def test_the_ranks_of_a_host_share_its_memory(monkeypatch, hosts, local, share):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    device = dataclasses.replace(NAMED["h200"], host_memory_bytes=1 << 40, hosts=hosts)
    assert cost.host_room(dataclasses.replace(SETUP, device=device, ranks=4)) == int(0.9 * 2**40 / share)
    assert cost.host_room(dataclasses.replace(SETUP, device=CPU)) is None


def test_the_micro_batch_fits_on_the_host_too():
    device = dataclasses.replace(NAMED["h200"], host_memory_bytes=2 << 30)  # 16 rows need 1.88 GiB
    config = shaped("llama-3.2-1b", "bf16", "attention", "recompute", NAME, rows=512, sets=["batch.micro_tokens=auto"])
    rows = [decide(config, ranks=1, device=d).env.micro_rows for d in (NAMED["h200"], device)]
    assert rows == [32, 8]


def test_no_search_takes_it_by_itself():
    assert list(OffloadActivations.variants(SETUP)) == []
