"""Blocks over ranks: golden list, gradients, checkpoints, evaluation, exports, refusals, what is predicted."""

from __future__ import annotations

import itertools
import os
import shutil
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.pipelining.schedules import get_schedule_class

from meshes import MeshCase, follows, further, prove, saved, train
from optrush.decide import changed, decide
from optrush.errors import NeedsError
from optrush.exporting import export_run
from optrush.hardware import NAMED
from optrush.planner import baseline
from optrush.planner.ledger import line_bytes, peak_memory
from optrush.techniques import ALL
from optrush.techniques.pipeline import CHANNELS, CLASSES, Pipeline, _balanced, head_in_blocks
from optrush.trainer import build
from optrush.trainer.trainer import evaluate
from techniques.test_mesh import half, other_half

from golden import make_golden
from trials import assembled, first_gradients, furthest, golden_run, shaped, steps

ONE = {"pipeline": {}}
TWICE, ZERO = {"pipeline": {"schedule": "interleaved"}}, {"pipeline": {"schedule": "zero-bubble"}}
LORA = {"lora": {"rank": 4}}
QLORA = {"nf4": {}} | LORA
ALIKE = ("train.log_every=1",)  # says nothing new: compared with one process, there is no list of five layers
HALF = 0.08  # of a largest gradient: on so small a model one process in bfloat16 is 0.04 from float32
TWO = [
    MeshCase(2, ONE | {"recompute": {}, "fused-loss": {"chunk": 5}, "attention": {}}, "chat"),
    MeshCase(2, ONE | QLORA, base=QLORA),
    MeshCase(2, ONE | {"amp": {}}, "tied", packed=False, base={"amp": {}}, close=HALF),
]
FOUR = [
    MeshCase(4, ONE | {"fsdp": {}}, "tied", packed=False, rows=1), MeshCase(4, ONE | {"ddp": {}}, "tied", rows=1),
    MeshCase(4, ONE | {"fsdp": {"stage": 2}} | QLORA, rows=1, base=QLORA),
    MeshCase(4, ONE | {"fsdp": {}, "amp": {}}, rows=1, base={"amp": {}}, close=HALF),
    MeshCase(4, ONE | {"tensor": {}}, "tied"), MeshCase(4, ONE | {"context": {}, "ddp": {}}),
]  # fmt: skip
# Five blocks: no stages have as many each.
DEEP_TWO = [
    MeshCase(2, TWICE | QLORA, "tied", packed=False, base=QLORA),
    MeshCase(2, ZERO | {"recompute": {}}, "tied", sets=ALIKE),
    MeshCase(2, ZERO | LORA, base=LORA),
]
DEEP_FOUR = [
    MeshCase(4, {"pipeline": {"size": 4}}, "tied", sets=ALIKE),
    MeshCase(4, TWICE | {"fsdp": {}}, sets=ALIKE, rows=1),
    MeshCase(4, TWICE | {"tensor": {}}, sets=ALIKE),
]


@pytest.fixture(scope="module")
def deep(box, tmp_path_factory):
    """The golden folders with models of five layers."""
    made = tmp_path_factory.mktemp("deep")
    for name in ("tied", "untied"):
        make_golden.write_model(made / name, name == "tied", num_hidden_layers=5)
    for file in box.glob("*.jsonl"):
        shutil.copyfile(file, made / file.name)
    return made


@pytest.mark.parametrize("case", further(TWO, 1), ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)


@pytest.mark.parametrize("case", further(FOUR, 1), ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


@pytest.mark.parametrize("case", further(DEEP_TWO, 1), ids=str)
def test_two_stages_a_rank_are_one_process(deep, pair, reference, case):
    prove(deep, pair, case, reference)


@pytest.mark.parametrize("case", further(DEEP_FOUR, 1), ids=str)
def test_five_blocks_on_four_ranks_are_one_process(deep, quad, reference, case):
    prove(deep, quad, case, reference)


# Evaluation, and what deals rows to ranks.


def evaluated(box, with_):
    """Held-out loss and targets before a step, its norm, the loss after it, and the FLOPs that deal rows to ranks."""
    job = assembled(golden_run(box, packed=True, rows=1, sets=[f"data.eval={box}/held.jsonl"], **with_))
    before = evaluate(job)
    ((_, norm, _),) = steps(job, 1)
    return before.loss, norm, evaluate(job).loss, before.targets, job.model.flops(1000, 20000)


@pytest.mark.parametrize(
    "with_", further([ZERO, TWICE, ONE, ONE | {"fsdp": {}}, TWICE | {"fsdp": {"stage": 2}}], 1), ids=str
)
def test_an_evaluation_is_that_of_one_process(deep, pair, quad, with_):
    *close, targets, flops = evaluated(deep, LORA)
    for found in (quad if "fsdp" in with_ else pair)(evaluated, deep, with_ | LORA):
        assert found == (*(pytest.approx(value, rel=1e-5) for value in close), targets, flops)


# An error on one rank.


def refused_by_one(box):
    """What each rank says where one alone refuses the model, before its blocks are cut."""
    real, groups = build.frozen_flops, dist.new_group

    def refuse(model):
        dist.new_group = None  # whoever called it would wait for the rank that has refused
        if dist.get_rank() == 1:
            raise NeedsError("a model", "half of one", "copy it again")
        return real(model)

    build.frozen_flops = refuse
    try:
        assembled(golden_run(box, packed=True, rows=1, **ONE))
    except NeedsError as error:
        return error.found
    finally:
        build.frozen_flops, dist.new_group = real, groups


def test_a_refusal_of_one_rank_leaves_none_waiting(box, pair):
    assert pair(refused_by_one, box) == ["half of one"] * 2


# Checkpoints and exports.


def exported(output, name="model/model"):
    return load_file(output / f"{name}.safetensors")


def test_a_run_goes_on_in_one_process_and_exports_the_same(box, pair, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    follows(pair(train, box, two, ONE, None, "tied", ALL, True)[0], "tied")
    follows(train(box, one, {}, saved(two), "tied", export=True), "tied", first=5)
    assert furthest(exported(two), exported(one)) < 1e-4
    export_run(two, tmp_path / "later")
    whole, later = exported(two), exported(tmp_path, "later/model")
    assert whole.keys() == later.keys() and all(whole[name].equal(later[name]) for name in whole)


class Even(Pipeline):
    """Blocks cut by their number, as long as any stage is as good as another."""

    def stages(self, env):
        n, L = self.size * self.each, env.blocks
        return [range(i * L // n, (i + 1) * L // n) for i in range(n)]


EVEN = tuple(Even if cls is Pipeline else cls for cls in ALL)


def test_a_checkpoint_goes_on_under_another_split(deep, pair, tmp_path):
    """Saved by ranks of 2 and 3 blocks; gone on with by ranks of 3 and 2, in one stage each and in two."""
    went = pair(half, deep, tmp_path, "cut", ONE, (), EVEN)[0]
    for name, with_ in (("other", ONE), ("stages", TWICE)):
        for found in pair(other_half, deep, tmp_path, name, with_, (), ["cut"]):
            assert found["cut"][1] == [pytest.approx(line, rel=1e-5) for line in went], name


# What it refuses.


@pytest.mark.parametrize(
    ("with_", "ranks", "found"),
    [(ZERO | {"fused-loss": {}}, 2, "gradients once"), (ZERO | {"tensor": {}}, 4, "gradients once"),
     (ZERO | {"fsdp": {}}, 4, "over data ranks"), (ZERO | {"compile": {}}, 2, "compiled blocks")],
    ids=str,
)  # fmt: skip
def test_what_halves_of_a_backward_pass_refuse(deep, with_, ranks, found):
    with pytest.raises(NeedsError) as error:
        decide(golden_run(deep, packed=True, rows=1, **with_), ranks=ranks)
    assert found in error.value.found and "interleaved" in error.value.do


def test_rounds_of_an_interleaved_schedule(deep):
    """Three micro-batches are one round of two ranks, five are two rounds that are not alike."""
    for many, tokens in ((3, 288), (5, 480)):
        run = golden_run(deep, packed=True, rows=2, sets=[f"batch.tokens={tokens}"], **TWICE)
        if many == 3:
            assert decide(run, ranks=2).env.accumulation == 3
            continue
        with pytest.raises(NeedsError) as error:
            decide(run, ranks=2)
        assert "5 micro-batches" in error.value.found and "batch.tokens to 384" in error.value.do


# How blocks are split.


def splits(blocks, stages):
    """All numbers of blocks of the stages."""
    cuts = itertools.combinations(range(1, blocks), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, blocks))) for cut in cuts]


def judged(t, counts, head):
    """The blocks' work of the busiest rank, what is kept on the fullest, and each rank's longest stage."""
    costs = [*counts[:-1], counts[-1] + head]
    held = [sum(counts[i] for i in t.mine(r)) for r in range(t.size)]
    kept = [n * t.in_flight(r, 4 * t.size) for r, n in enumerate(held)]
    stages = [max(costs[i] for i in t.mine(r)) for r in range(t.size)]
    return max(sum(costs[i] for i in t.mine(r)) for r in range(t.size)), max(kept), held, stages


@pytest.mark.parametrize("schedule", list(CLASSES))
def test_no_split_is_better(schedule):
    """Of all that there are the busiest rank has least, then the fullest rank least, then no stage could be shorter."""
    for size in (2, 3, 4):
        t = Pipeline(size, schedule)
        least = size * t.each
        for blocks, head in itertools.product((least, least + 1, least + 3, 12), (0.0, 0.16, 1.0, 2.24, 9.5)):
            counts = _balanced(t, blocks, head)
            every = {one: judged(t, one, head) for one in splits(blocks, least)}
            assert counts in every, f"{counts} are not {blocks} blocks"
            *found, held, stages = every[counts]
            assert found == min(worst[:2] for worst in map(list, every.values())), (size, blocks, head, counts)
            alike = [worst[3] for worst in every.values() if worst[2] == held]
            assert all(mine <= other for one in alike for mine, other in zip(stages, one)), (counts, stages)


@pytest.mark.parametrize(
    ("shape", "options", "wanted"),
    [("llama-3.1-8b", "size=2", [17, 15]), ("llama-3.1-8b", "size=4", [8, 9, 9, 6]),
     ("llama-3.1-8b", "size=4,schedule=interleaved", [4, 4, 4, 4, 4, 5, 5, 2]),
     ("llama-3.1-8b", "size=2,schedule=zero-bubble", [9, 8, 9, 6]), ("llama-3.2-1b", "size=2", [10, 6]),
     ("mistralai/Mistral-7B-v0.1", "size=2", [16, 16])],
)  # fmt: skip
def test_the_head_counts_as_blocks(shape, options, wanted):
    """As many as by the FLOPs of the plan of one GPU."""
    size = int(options[5])
    resolved = decide(shaped(shape, f"pipeline:{options}", rows=1, seq=4096, windows=8), ranks=size)
    (t,) = (t for t in resolved.techniques if isinstance(t, Pipeline))
    assert [len(stage) for stage in t.stages(resolved.env)] == wanted
    alone = decide(shaped(shape, "bf16", "attention", rows=1, seq=4096), ranks=1, device=NAMED["h100"])
    (book,) = baseline.books(alone.techniques, alone.env, alone.env.shape, 0.0)
    flop = {work.name: work.flop * work.times for work in book.work if work.flop and not work.gone}
    head = flop.pop("head.products")
    assert head_in_blocks(alone.env) == pytest.approx(head * alone.env.blocks / sum(flop.values()))


# What it predicts.


def orders(t, many):
    """The passes of every rank in turn, by torch's own schedule."""
    stages = [
        SimpleNamespace(num_stages=t.size * t.each, group_size=t.size, group_rank=0, submod=None) for _ in range(t.each)
    ]
    for number, stage in enumerate(stages):
        stage.stage_index = number
    kind = get_schedule_class(CLASSES[t.schedule][0])
    made = kind(stages[0] if t.each == 1 else stages, many, loss_fn=lambda a, b: a).pipeline_order
    found = {}
    for rank, actions in made.items():
        passes, seen = [], 0
        for a in actions:
            if a is not None and a.computation_type.value in "FBIW":
                kind, number = a.computation_type.value, a.microbatch_index
                if kind == "F" and t.each == 1:  # torch's list for the last rank leaves the first number out
                    number, seen = seen, seen + 1
                passes.append((kind, a.stage_index, number))
        found[rank] = passes
    return found


LENGTH = {"F": 1, "B": 2, "I": 1, "W": 1}


def waiting(t, passes, costs=None):
    """The share of the time in which the busiest rank waits, each pass begun as soon as what it needs is there.

    costs: of the stages; None: all alike.
    """
    costs = costs or [1.0] * t.size * t.each
    last, done, at, clock = t.size * t.each - 1, {}, dict.fromkeys(passes, 0), dict.fromkeys(passes, 0)
    while any(at[rank] < len(passes[rank]) for rank in passes):
        before = len(done)
        for rank, mine in passes.items():
            while at[rank] < len(mine):
                kind, stage, number = mine[at[rank]]
                first = {"F": ("F", stage - 1, number), "W": ("B", stage, number)}.get(kind, ("B", stage + 1, number))
                if stage in ((0,) if kind == "F" else (last,) if kind in "BI" else ()):
                    first = None if kind == "F" else ("F", stage, number)
                if first is not None and first not in done:
                    break
                clock[rank] = max(clock[rank], done.get(first, 0)) + LENGTH[kind] * costs[stage]
                done["B" if kind in "BI" else kind, stage, number] = clock[rank]
                at[rank] += 1
        assert len(done) > before, "each waits for another"
    busy = max(sum(LENGTH[kind] * costs[stage] for kind, stage, _ in mine) for mine in passes.values())
    return 1 - busy / max(clock.values())


@pytest.mark.parametrize("schedule", list(CLASSES))
def test_what_is_under_way_and_how_long_ranks_wait_is_torchs_order(schedule):
    for size in (2, 3, 4):
        t = Pipeline(size, schedule)
        for many in (size, 2 * size, 4 * size, 8 * size):
            passes = orders(t, many)
            assert t.bubble(many) == pytest.approx(waiting(t, passes)), (size, many)
            for rank, mine in passes.items():
                held = most = 0
                for kind, *_ in mine:
                    held += {"F": 1, "I": 0}.get(kind, -1)
                    most = max(most, held)
                full = schedule != "zero-bubble" or many > size  # it begins with fewer on its first ranks
                assert (most / t.each == t.in_flight(rank, many)) if full else (most / t.each <= size), (size, many)


def exchanging(t, many, stream):
    """The share of the time in which a rank waits, with sends and receives in torch's order.

    Of a rank, passes run one after another, and so do the transfers of one stream. A transfer also follows the passes
    that are called before it, and ends when it has begun on both ranks.

    stream: the name of a transfer's stream, by its two ranks.
    """
    stages = [SimpleNamespace(num_stages=2 * t.size, group_size=t.size, group_rank=0, submod=None, stage_index=n)
              for n in range(2)]  # fmt: skip
    owner = {stage: rank for rank in range(t.size) for stage in t.mine(rank)}
    made = get_schedule_class(CLASSES[t.schedule][0])(stages, many, loss_fn=lambda a, b: a)
    queues = {}  # of what is done, what it needs, and how long it takes
    for rank, actions in made.pipeline_order_with_comms.items():
        called = []
        for a in actions:
            way, _, kind = a.computation_type.value.rpartition("_")
            stage, number = a.stage_index, a.microbatch_index
            if not way and kind in LENGTH:
                other = {"F": stage - 1, "W": stage}.get(kind, stage + 1)
                far = owner.get(other, rank) != rank
                needs = [("F" if kind == "F" else "B", other, stage, number)] if far else []
                called = [(kind, stage, number)]
                queues.setdefault(rank, []).append((*called, needs, LENGTH[kind]))
            elif way in ("SEND", "RECV"):
                other = stage + 1 if (way == "SEND") == (kind == "F") else stage - 1
                item = (kind, *((stage, other) if way == "SEND" else (other, stage)), number)
                queues.setdefault((rank, stream(rank, owner[other])), []).append((item, called, 0))
    done, begun, clock = {}, {}, dict.fromkeys(queues, 0)
    while any(queues.values()):
        state = sum(map(len, queues.values())), sum(map(len, begun.values()))
        for name, queue in queues.items():
            while queue and all(need in done for need in queue[0][1]):
                item, needs, length = queue[0]
                if item not in done:
                    begun.setdefault(item, {})[name] = max([clock[name], *(done[need] for need in needs)])
                    if len(item) == 4 and len(begun[item]) < 2:
                        break
                    done[item] = max(begun[item].values()) + length
                clock[name] = done[item]
                queue.pop(0)
        assert state != (sum(map(len, queues.values())), sum(map(len, begun.values()))), "each waits for another"
    return 1 - 3 * t.each * many / max(clock.values())


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_transfers_of_one_pair_of_ranks_do_not_wait_for_those_of_another(schedule):
    for size in (2, 3, 4):
        t = Pipeline(size, schedule)
        for many in (2 * size, 4 * size):
            paired = exchanging(t, many, lambda *ranks: frozenset(ranks))
            assert paired == pytest.approx(t.bubble(many)), (size, many)
            whole = exchanging(t, many, lambda *ranks: "one stream")
            assert (whole > 1.4 * paired) if size > 2 else (whole == paired), (size, many)


@pytest.mark.parametrize(("kind", "axes", "given", "left"), [
    ("cuda", {"pp": 2}, None, "4"), ("cuda", {"pp": 2}, "16", "16"), ("cuda", {"pp": 2, "cp": 2}, None, None),
    ("cpu", {"pp": 2}, None, None),
])  # fmt: skip
def test_transfers_leave_multiprocessors_to_matmuls(monkeypatch, kind, axes, given, left):
    monkeypatch.setattr(os, "environ", {CHANNELS[0]: given} if given else {})
    changes = Pipeline().process(SimpleNamespace(device=SimpleNamespace(kind=kind), axes=axes))
    assert (os.environ.get(CHANNELS[0]), changes) == (left, int(left == "4"))


def pairs_of(rank_box, with_):
    job = assembled(golden_run(rank_box, packed=True, rows=1, **with_))
    run = job.forward_backward.__self__
    list(steps(job, 1))
    (schedule,) = run.made.values()
    ops = schedule._stage.get_bwd_recv_ops(0) + schedule._stage.get_fwd_recv_ops(0)
    return [(op.peer, sorted(dist.get_process_group_ranks(op.group))) for op in ops]


def test_each_pair_of_ranks_has_its_own_group(deep, quad):
    for rank, found in enumerate(quad(pairs_of, deep, {"pipeline": {"size": 4}})):
        assert {peer for peer, _ in found} == {rank - 1, rank + 1} & set(range(4))
        assert all(group == sorted((rank, peer)) for peer, group in found)


@pytest.mark.parametrize("schedule", list(CLASSES))
def test_how_long_the_busiest_rank_waits_for_shorter_ones_is_torchs_order(schedule):
    for size, blocks, head in ((2, 32, 2.24), (4, 32, 2.24), (2, 16, 3.9), (3, 80, 0.6), (8, 64, 1.2)):
        t = Pipeline(size, schedule)
        costs = list(map(float, _balanced(t, blocks, head)))
        costs[-1] += head
        ranks = [sum(costs[i] for i in t.mine(r)) for r in range(size)]
        others = (sum(ranks) - max(ranks)) / (size - 1) / max(ranks)
        for many in (2 * size, 4 * size):
            found = waiting(t, orders(t, many), costs)
            assert t.bubble(many, others) == pytest.approx(found, abs=0.03), (size, many, head)


@pytest.mark.parametrize("schedule", list(CLASSES))
def test_no_split_is_much_faster_in_torchs_order(schedule):
    """Of a few blocks, where one more or less is much; even numbers take a tenth longer, or more."""

    def seconds(counts):
        costs = [*map(float, counts[:-1]), counts[-1] + 2.24]
        busiest = max(sum(costs[i] for i in t.mine(r)) for r in range(t.size))
        return busiest / (1 - waiting(t, passes, costs))

    t = Pipeline(3, schedule)
    passes = orders(t, 9)
    best = min(map(seconds, splits(12, 3 * t.each)))
    assert seconds(_balanced(t, 12, 2.24)) < 1.03 * best
    assert seconds([4 // t.each] * 3 * t.each) > 1.1 * best


def held(box, with_):
    """Bytes of the trained weights on this rank, and of what its stages receive."""
    job = assembled(golden_run(box, packed=True, **with_))
    first_gradients(job)
    (made,) = job.forward_backward.__self__.made.values()
    stages = getattr(made, "_stages", None) or [made._stage]
    infos = [i for s in stages for found in (s.args_recv_info, s.grad_recv_info) for row in found.values() for i in row]
    received = sum(i.buffer.nbytes for i in infos if i.buffer is not None)
    return sum(t.local.nbytes for t in job.trained), received


@pytest.mark.parametrize("with_", [ONE, TWICE], ids=str)
def test_what_a_rank_holds_is_what_was_predicted(deep, pair, with_):
    resolved = decide(golden_run(deep, packed=True, **with_), ranks=2)
    books = baseline.books(resolved.techniques, resolved.env, resolved.env.shape, 0.0)
    tokens = resolved.env.micro_rows * resolved.env.seq
    for (weights, received), book in zip(pair(held, deep, with_), books, strict=True):
        lines = {line.name: line_bytes(book, line, tokens) for line in book.lines}
        assert weights == pytest.approx(sum(v for name, v in lines.items() if name.startswith("weights.")))
        assert received == lines["received"]


def test_the_ranks_do_the_work_of_one_and_wait():
    def booked(ranks, **with_):
        resolved = decide(changed(shaped("llama-3.1-8b", rows=1, windows=8), {"with": with_}), ranks=ranks)
        return baseline.books(resolved.techniques, resolved.env, resolved.env.shape, 0.0)

    (alone,) = booked(ranks=1)
    books = booked(ranks=4, pipeline={"size": 4})

    def flop(book):
        return sum(w.flop * w.times for w in book.work if not w.gone)

    assert sum(map(flop, books)) == pytest.approx(flop(alone))
    waits = [next(w.waiting for w in book.work if w.name == "bubble") for book in books]
    works = [flop(book) for book in books]
    assert max(works) < 1.06 * sum(works) / 4, "no rank does much more than the others"
    for work, waits_ in zip(works, waits, strict=True):  # 8 micro-batches of its own, and one of each of the others
        assert waits_ == pytest.approx((sum(works) - work) / (sum(works) + 7 * work), rel=0.01)
    peaks = [peak_memory(book, 2048).bytes for book in books]
    assert max(peaks) == peaks[0] > peaks[1] > peaks[2], "the first rank has the most micro-batches under way"
    assert peaks[0] < peak_memory(alone, 2048).bytes
