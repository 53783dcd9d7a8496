"""The ledger: order never matters, nothing matches silently, and the arithmetic is the one on paper."""

import itertools
import random
import re
from pathlib import Path
from typing import get_args

import pytest

from optrush import technique
from optrush.hardware import NAMED
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import baseline, cost, ledger
from optrush.planner.ledger import (
    FLOAT32,
    Line,
    add,
    apply_rules,
    cut,
    freeze_rule,
    like,
    live,
    peak_memory,
    retype,
    tagged,
)
from optrush.technique import Environment, Part, instantiate
from optrush.techniques import ALL

LLAMA = ModelShape.read(SHAPES["llama-3.2-1b"])
GIB = 2**30
N, N_BLOCKS = LLAMA.parameters, LLAMA.parameters - LLAMA.vocab * LLAMA.width - LLAMA.width


def members(with_):
    return instantiate(ALL, with_)


def booked(
    with_, *, rows = 1, T = 2048, ranks = 1, accumulation = 1,
    order = None, shape = LLAMA,
):  # fmt: skip
    """The settled ledger of a set of techniques, their rules in the order asked for."""
    env = Environment(NAMED["h200"], ranks, T, rows * accumulation * ranks, rows, 1.0, "float32", True, shape.layers)
    chosen = members(with_)
    env = technique.settle(chosen, env)
    rules = [r for t in chosen for r in t.predict(env)]
    rules = rules if order is None else [rules[i % len(rules)] for i in order]
    entries = baseline.entries(shape, T, native=True, cuda=True)
    return apply_rules(entries, FLOAT32, rules, env.accumulation)


def held(book, kind):
    return sum(ledger.line_bytes(book, line) for line in book.lines if line.name.startswith(kind))


def test_the_order_of_techniques_never_matters():
    with_ = {"amp": {}, "attention": {}, "compile": {}, "recompute": {"every": 2}, "fused-loss": {}}
    env = technique.settle(members(with_), Environment(NAMED["h200"], 1, 2048, 16, 4, 1.0, "float32", True, 16))
    entries = baseline.entries(LLAMA, 2048, native=True, cuda=True)
    found = set()
    for order in itertools.permutations(members(with_)):
        book = apply_rules(entries, FLOAT32, [r for t in order for r in t.predict(env)], 4)
        found.add((peak_memory(book, 8192).bytes, cost.step_seconds(book, NAMED["h200"], 8192)))
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(20))
def test_nor_does_the_order_of_their_rules(seed):
    with_ = {"bf16": {}, "fused-loss": {}, "attention": {"impl": "varlen"}, "packing": {}, "fsdp": {}, "compile": {}}
    order = list(range(len([r for t in members(with_) for r in t.predict(setup_of(with_))])))
    random.Random(seed).shuffle(order)
    assert (
        peak_memory(booked(with_, ranks=4, order=order), 8192).bytes == peak_memory(booked(with_, ranks=4), 8192).bytes
    )


def setup_of(with_):
    return technique.settle(members(with_), Environment(NAMED["h200"], 4, 2048, 4, 1, 1.0, "float32", True, 16))


@pytest.mark.parametrize(
    "rule",
    [
        retype({"byte": 2}, "two"),  # given below a second time
        live("no.such", "nothing", gone=True),
        cut("no.such", "dp", 2, "nothing"),
        cut("casts", "dp", 2, "of that name there is work alone"),
        freeze_rule("weights.blocks", "neither gradients nor states"),
        like("no.such", Line("new", "new", 1.0, "byte", "always")),
        live(tagged("weights", "fusable"), "none of them is fusable", gone=True),
        live(tagged("casts", no=("blocks", "head")), "there are no others", gone=True),
        live(
            tagged("scores", no=("saved", "forward", "backward"), but="working.scores.forward.held"),
            "no field",
            times=2,
        ),
        add(Line("weights.blocks", "there is one of that name", 1.0, "byte", "always")),
    ],
    ids=lambda rule: f"{rule.kind.name} {rule.match or ''}",
)
def test_a_rule_that_matches_nothing_raises(rule):
    entries = baseline.entries(LLAMA, 2048, native=True, cuda=True)
    rules = [rule, retype({"byte": 3}, "three")]
    with pytest.raises(ValueError, match=r"nothing to change|no line of the baseline|different widths|two entries"):
        apply_rules(entries, FLOAT32, rules)


def test_a_role_that_nothing_has():
    with pytest.raises(ValueError, match="nothing has the role"):
        apply_rules([Line("a", "a", 1.0, "byte", "always")], FLOAT32, [retype({"wide": 2}, "why")])


def test_gradients_that_end_where_they_are_made():
    """Of the blocks one at a time; what is made before them is gone then, what comes after them is not there yet."""
    places: tuple[ledger.ComputedIn, ...] = ("block", "before", "after", "throughout")
    lines = [
        Line(f"g.{m}", m, 12.0, "byte", "gradient", blocks=4 if m == "block" else 1, computed=m, of=("gradients",))
        for m in places
    ]

    def held_in(phase, *rules):
        book = apply_rules(lines, FLOAT32, rules)
        place = ledger.PHASES.index(phase)
        shares = [ledger._shares(line, book.accumulation)[place] for line in book.lines]
        return [ledger.line_bytes(book, line) * share for line, share in zip(book.lines, shares)]

    stepped = live(tagged("gradients"), "updated at once", freed_on_update=True)
    assert held_in("backward, last block", stepped) == [3, 0, 0, 12]
    assert held_in("backward, first block", stepped) == [3, 0, 0, 12]
    assert held_in("backward, embedding", stepped) == [0, 0, 12, 12]
    assert held_in("backward, last block") == [3, 12, 0, 12]
    assert held_in("backward, first block") == [12, 12, 0, 12] and held_in("backward, embedding") == [12] * 4
    assert all(held_in(phase, stepped) == [0] * 4 for phase in ("forward", "head", "update"))
    assert held_in("update") == [12] * 4
    assert held_in("update", live(tagged("gradients"), "elsewhere", live="end")) == [0] * 4
    coded = held_in("update", live("g.block", "a code", role="code"))
    assert coded == pytest.approx([12 * (1 + 4 / 256), 12, 12, 12])


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_freezing_leaves_no_gradient_and_no_state(share):
    """Nor does a checkpoint have what is frozen."""
    entries = baseline.entries(LLAMA, 2048, native=True, cuda=True)
    book = apply_rules(entries, FLOAT32, [freeze_rule(tagged("blocks"), "an adapter learns instead", share)])
    left = N - share * N_BLOCKS
    assert held(book, "weights") == 4 * N
    assert held(book, "gradients") == 4 * left
    assert held(book, "states") == 8 * left
    assert ledger.saved_bytes(book) == 12 * left


# --- on paper: docs/notation.md, 16 bytes a parameter and where they go


@pytest.mark.parametrize(
    ("with_", "weight", "gradient", "states", "casts"),
    [({}, 4, 4, 8, 0), ({"amp": {}}, 4, 4, 8, 2), ({"bf16": {}}, 2, 2, 4, 0)],
    ids=str,
)
def test_bytes_a_parameter(with_, weight, gradient, states, casts):
    book = booked(with_)
    for kind, each in (("weights", weight), ("gradients", gradient), ("states", states)):
        assert held(book, kind) == each * N
    assert held(book, "casts") == casts * LLAMA.matrix_parameters


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("amp", [False, True])
def test_sharding(ranks, stage, sync, accumulation, amp):
    """16/n bytes a parameter; whole: two blocks (stage 3; none at the head) or all (2), embedding and norm, in the
    products' type; whole gradients while accumulating, unless every micro-batch is reduced."""
    with_ = {"fsdp": {"stage": stage, "sync": sync}} | ({"amp": {}} if amp else {})
    book = booked(with_, ranks=ranks, accumulation=accumulation)
    assert held(book, "weights") == pytest.approx(4 * N / ranks)
    assert held(book, "states") == pytest.approx(8 * N / ranks)
    whole = accumulation > 1 and sync == "last"
    assert held(book, "gradients") == pytest.approx(4 * N / (1 if whole else ranks))
    assert held(book, "casts") == 0
    wide, outside = 2 if amp else 4, N - N_BLOCKS
    peak = peak_memory(book, 2048)
    running = 0 if peak.phase == "head" else N_BLOCKS * 2 / LLAMA.layers
    gathered = wide * (outside + (running if stage == 3 else N_BLOCKS))
    found = sum(i.bytes for i in peak.items if i.name.startswith("gathered weights"))
    assert found == pytest.approx(gathered, rel=1e-6)


def test_accumulation_keeps_gradients_while_the_next_micro_batch_runs():
    one, four = booked({"bf16": {}}, rows=4), booked({"bf16": {}}, rows=4, accumulation=4)
    assert peak_memory(one, 8192).phase == peak_memory(four, 8192).phase == "head"
    assert peak_memory(four, 8192).bytes - peak_memory(one, 8192).bytes == pytest.approx(2 * N, rel=1e-3)


def test_recomputing_keeps_the_input_and_one_block():
    with_ = {"bf16": {}, "attention": {}, "compile": {}, "fused-loss": {}}
    plain, again = booked(with_, rows=16), booked({**with_, "recompute": {}}, rows=16)
    n = 16 * 2048
    saved = n * LLAMA.layers * 2 * (18.5 - 1) * LLAMA.width  # 18.5 D values a token and block, but its input
    assert peak_memory(plain, n).phase == "head"
    there = {i.name: i.bytes for i in peak_memory(plain, n).items}
    assert sum(b for name, b in there.items() if name.startswith("saved.")) == pytest.approx(saved)
    assert peak_memory(plain, n).bytes - peak_memory(again, n).bytes == pytest.approx(saved, rel=0.05)


def test_what_was_said_beforehand():
    """The 1B model in pure bf16 with a chunked loss, 16 x 2048: about 46 GiB by the arithmetic, and 11.4 recomputed;
    measured 46.7 to 48.6, and 12.4."""
    with_ = {"bf16": {}, "attention": {}, "compile": {}, "fused-loss": {}, "fused-adamw": {}}
    assert 46 < peak_memory(booked(with_, rows=16), 16 * 2048).bytes / GIB < 49
    assert 11.4 < peak_memory(booked({**with_, "recompute": {}}, rows=16), 16 * 2048).bytes / GIB < 14


@pytest.mark.parametrize(("T", "times"), [(256, 4.0), (512, 1.0), (2048, 1.0)])
def test_whole_scores_that_leave_the_heap_at_once(T, times):
    """On a CPU: from 32 MiB on, which scores of 32 heads have at T = 512, memory is a tensor's own."""
    cpu, gpu = (
        {e.name: e.values for e in baseline.entries(LLAMA, T, native=True, cuda=cuda) if isinstance(e, ledger.Line)}
        for cuda in (False, True)
    )
    assert cpu["working.scores.forward.held"] == times * gpu["working.scores.forward.held"]
    assert cpu["saved.gate_up"] == pytest.approx(1.4 * gpu["saved.gate_up"])


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
def test_every_technique_predicts(cls):
    """Its rules match lines of the baseline, and each says why; on one device and on four."""
    for given_options in cls.variants(Environment(NAMED["h200"], 4, 2048, 16, 1, 1.0, "float32", True, 16)):
        t = instantiate([cls], {cls.name: given_options})[0]
        ranks = 4 if Part.DATA in cls.claims else 1
        env = Environment(NAMED["h200"], ranks, 2048, 16, 1, 1.0, "float32", True, 16, cls.claims)
        rules = list(t.predict(env))
        assert rules and all(r.reason for r in rules)
        apply_rules(baseline.entries(LLAMA, 2048, native=True, cuda=True), FLOAT32, rules)


def test_every_tag_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/plan.md").read_text("utf-8")
    table = text.partition("| tags | of what |")[2].partition("\n\n")[0]
    named = [tag for row in table.splitlines()[2:] for tag in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(get_args(ledger.Tag))


def test_no_entry_is_without_tags_that_rules_look_for():
    """What names say of the lines of the baseline, tags say too."""
    for shape in map(ModelShape.read, SHAPES.values()):
        for entry in baseline.entries(shape, 2048, native=True, cuda=True):
            kind, _, rest = entry.name.partition(".")
            if rest and kind not in ("working", "feed", "head"):
                assert kind in entry.of, entry.name
            assert ("launches" in entry.of) == entry.name.endswith(".launches"), entry.name
            assert kind != "head" or "loss" in entry.of, entry.name
