"""What holds for every technique in ALL: a new one gets these tests free."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshes import further
from optrush.cli import setup
from optrush.decide import decide
from optrush.errors import ConfigError, ConflictError, NeedsError, NoEffectError
from optrush.technique import RANK_PARTS, STAGES, Numerics, Part, Technique, in_order
from optrush.techniques import ALL
from optrush.techniques.fused_adamw import FusedAdamW
from optrush.techniques.rows import Packing
from optrush.trainer.trainer import evaluate

from golden.sgd import Sgd
from trials import assembled, golden_run, metrics, steps, weights

ROOT = Path(__file__).parents[2]
HERE = [t.name for t in ALL if (stands := setup.standing(t, [])).runs or stands.several]  # that a CPU can run
SHARED = [t.name for t in ALL if RANK_PARTS & t.claims]
BESIDE: dict[str, dict] = {
    "nf4": {"lora": {}},
    "int8": {"lora": {}},
    "context": {"ddp": {}},
    "experts": {"ddp": {}},
    "quantised-links": {"fsdp": {}},
}  # what a technique cannot be without
OTHERS = (
    {"amp": {"dtype": "fp16"}},
    {"fsdp": {"stage": 2}},
    {"recompute": {"every": 2}},
    {"bf16": {"rounding": "kahan"}},
    {"fused-kernels": {"norm": True, "rope": True}},
)  # than the defaults
SAMPLES = {t.name: dict(t.sample) for t in ALL}


def acts_in(cls: type[Technique]) -> list[str]:
    return [stage for stage in STAGES if getattr(cls, stage) is not getattr(Technique, stage)]


STAGES_OF = {t.name: acts_in(t) for t in ALL}
UPDATES = {"process", "optimizer"}
EVERY = [{name: SAMPLES[name], **BESIDE.get(name, {})} for name in HERE] + list(OTHERS)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch._dynamo")


def shared(with_) -> bool:
    return any(name in SHARED for name in with_)


def model(box, with_, name="untied") -> list[str]:
    """The setting of the model that a technique takes."""
    return [f"model.path={box / ('moe' if 'experts' in with_ else name)}"]


# What a technique says of itself.


@pytest.mark.parametrize("t", ALL, ids=lambda t: t.name)
def test_it_says_what_it_is(t):
    assert dataclasses.is_dataclass(t) and t.__dataclass_params__.frozen
    assert t.name and t.summary and t.source.startswith("https://") and isinstance(t.numerics, Numerics)
    assert set(t.verified_on) <= {"cpu", "gpu"} and t.verified_on
    assert (ROOT / t.proof).is_file(), t.proof
    for line in ("Source:", "Memory:", "Work:"):
        assert line in (t.__doc__ or ""), line
    assert acts_in(t), "it acts in some stage"


def test_names_differ():
    assert len({t.name for t in ALL}) == len(ALL)


# What it leaves alone: names, wherever it acts, and what training computes when it is evaluated in between.


def lived(box, with_, evaluating=False, of=None):
    """Two steps of this rank's job, evaluated before each and after, or never.

    Returns:
        edits; names before (of parameters with their aliases, trained, of optimizer states); losses
        and norms; weights; evaluations.

    of: the techniques whose model it is, if others.
    """
    sets = [f"data.eval={box}/few.jsonl", *model(box, with_ if of is None else of, "tied")]
    job = assembled(golden_run(box, sets=sets, packed="packing" not in with_, **with_))
    edits = [(e.technique, e.count) for e in job.applied]
    before, figures, evals = names(job), [], []
    for k in range(1, 3 if "compile" not in with_ else 1):  # which would compile
        evals += [evaluate(job)] * evaluating
        figures += list(steps(job, 1, first=k))
    if figures:
        assert names(job) == before
        evals += [evaluate(job)] * evaluating
    return edits, before, figures, {n: w.clone() for n, w in weights(job).items()}, evals


def names(job):
    elsewhere = {f"{n}.weight" for n, linear in job.model.linears() if linear.quantized is not None}  # as published
    known = set(job.weight_map.entries) | set(job.weight_map.fillers)
    held = {n for n, _ in job.model.named_parameters()}
    whole = "pp" not in job.env.axes  # else other ranks hold others
    assert (known - elsewhere == held if whole else held < known) and elsewhere <= known
    parameters = [n for n, _ in job.model.named_parameters(remove_duplicate=False)]
    return [parameters, [t.name for t in job.trained], list(job.optimizer.state())]


def together(found):
    """What the ranks of a pipeline hold, each name once."""
    return [[list(dict.fromkeys(name for one in found for name in one[kind])) for kind in range(3)]]


# An evaluation is a forward pass: with what acts on updates alone, and with further options, it is looked at last.
ALIKE = [w for w in EVERY if w in OTHERS or all(set(STAGES_OF[name]) <= UPDATES for name in w)]
QUICK = [(w, w not in ALIKE) for w in EVERY if w not in OTHERS]
LIVED = further([*QUICK, *((w, True) for w in [*ALIKE, {"fsdp": {}, "amp": {}}])], len(QUICK))


@pytest.fixture(scope="module")
def plain_names():
    """Names without techniques, once a model."""
    made = {}

    def plain(box, with_):
        key = tuple(model(box, with_, "tied"))
        if key not in made:
            made[key] = lived(box, {}, of=with_)[1]
        return made[key]

    return plain


@pytest.mark.parametrize(("with_", "evaluated"), LIVED, ids=str)
def test_it_changes_something_and_leaves_names_and_evaluations_alone(box, pair, with_, evaluated, plain_names):
    def play(evaluating):
        return pair(lived, box, with_, evaluating) if shared(with_) else [lived(box, with_, evaluating)]

    here = play(False)
    for edits, *_ in here:
        assert set(with_) <= {name for name, _ in edits} <= {*with_, "packing"} and all(n > 0 for _, n in edits)
    want, seen = plain_names(box, with_), [found for _, found, *_ in here]
    assert want[1] == want[2] and ("head.weight" in want[0]) and ("head.weight" not in want[1])
    for found in together(seen) if "pipeline" in with_ else seen:
        if any(Part.ADAPTERS in t.claims for t in ALL if t.name in with_):  # others are trained, beside those
            stored = {n for n in found[0] if ".quantized." in n}
            left = set(want[0]) - {f"{n.partition('.quantized.')[0]}.weight" for n in stored}
            assert left < set(found[0]) and found[1] == found[2]
            assert set(found[1]) == set(found[0]) - set(want[0]) - stored
        elif any(Part.TRAINED in t.claims for t in ALL if t.name in with_):  # fewer are trained, by their names
            assert found[0] == want[0] and found[1] == found[2] and set(found[1]) < set(want[1])
        else:
            assert found == want
    if not evaluated or "compile" in with_:
        return
    for (*_, figures, after, _), (*_, same, same_after, evals) in zip(here, play(True), strict=True):
        assert figures == same and all(torch.equal(after[name], w) for name, w in same_after.items())
        assert evals[0] != evals[-1], "it sees the weights as trained"


# What it must do: something.


def neutralised(cls: type[Technique]) -> type[Technique]:
    """The technique with every stage doing nothing and saying so."""
    idle = {stage: (lambda *_: 0) for stage in acts_in(cls)}
    return dataclass(frozen=True)(type(cls.__name__, (cls,), idle))


def without_effect(box, name):
    """What assembly says to a technique that does nothing."""
    classes = [neutralised(t) if t.name == name else t for t in ALL]
    try:
        with_ = {name: SAMPLES[name], **BESIDE.get(name, {})}
        assembled(golden_run(box, sets=model(box, with_), **with_), classes)
    except NoEffectError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", HERE)
def test_doing_nothing_is_an_error(box, pair, name):
    said = pair(without_effect, box, name) if name in SHARED else [without_effect(box, name)]
    for text in said:
        assert f"`{name}`" in text and f"--without {name}" in text


def test_a_toy_that_changes_nothing(box):
    @dataclass(frozen=True)
    class Toy(Technique):
        name = "toy"
        summary = source = proof = "toy"
        numerics = Numerics.EXACT
        verified_on = ("cpu",)

    with pytest.raises(NoEffectError, match="toy"):
        assembled(golden_run(box, toy={}), (*ALL, Toy))


def test_another_technique_is_a_file_and_a_line(box):
    job = assembled(golden_run(box, sgd={}), (*ALL, Sgd))
    assert "optimizer  sgd (momentum=0.9): 1 change" in job.describe()
    with pytest.raises(ConflictError, match="the optimizer"):
        decide(golden_run(box, sgd={}, fused_adamw={}), (*ALL, Sgd))
    with pytest.raises(ConfigError, match="no such technique"):
        decide(golden_run(box, sgd={}))


def test_the_chosen_kernel_is_named(box):
    said = assembled(golden_run(box, attention={}, fused_loss={"chunk": 16})).describe()
    assert "attention (impl=sdpa): " in said and "fused-loss (impl=chunked, chunk=16): 1 change\n" in said


# How several go together.


@pytest.mark.parametrize("a", ALL, ids=lambda t: t.name)
def test_two_owners_of_one_part_conflict(box, a):
    for b in ALL[ALL.index(a) + 1 :]:
        conflict(box, a, b)


def conflict(box, a, b):
    given = {t.name: dict(t.sample) for t in (a, b)}
    run = golden_run(box, **given)
    if a.claims & b.claims:
        run = golden_run(box, sets=["batch.tokens=1536"], **given)  # which any two ranks can share
        with pytest.raises(ConflictError, match=f"`{a.name}` with `{b.name}`"):
            decide(run, ranks=2)
        return
    with suppress(NeedsError):  # what one of them lacks here is no conflict
        assert {t.name for t in decide(run, ranks=2 if shared((a.name, b.name)) else 1).techniques} == {a.name, b.name}


def test_the_conflicts_we_know(box):
    clashes = {f"{a.name} {b.name}" for a, b in itertools.combinations(ALL, 2) if a.claims & b.claims}
    assert clashes >= {"amp bf16", "ddp fsdp"}


def test_several_ranks_want_somebody_to_share_the_work(box):
    with pytest.raises(NeedsError, match="2 ranks"):
        decide(golden_run(box), ranks=2)
    for name in SHARED:
        with pytest.raises(NeedsError, match="one rank"):
            decide(golden_run(box, **{name: {}}), ranks=1)


TOGETHER = ["packing", "recompute", "fused-loss", "amp", "attention", "fused-adamw"]


def test_the_order_they_are_named_in_does_not_matter(box):
    def made(order):
        job = assembled(golden_run(box, **{name: {} for name in order}))
        return job.describe(), [line[:2] for line in steps(job, 1)]

    assert made(TOGETHER[::-1]) == made(TOGETHER)


def test_owners_act_first():
    class Free(Packing):
        claims = frozenset()

    made = [Free(), FusedAdamW(), Free(), Packing()]
    assert in_order(made) == [made[1], made[3], made[0], made[2]]


# Evaluation.


def evaluated(box, with_):
    return evaluate(assembled(golden_run(box, packed=True, sets=[f"data.eval={box}/held.jsonl"], **with_)))


@pytest.mark.parametrize(
    "data", further([{"ddp": {}}, {"fsdp": {}}, {"fsdp": {"stage": 2}}, {"tensor": {}}, {"pipeline": {}}], 2), ids=str
)
def test_evaluation_is_the_same_however_it_is_shared(box, pair, data):
    want = evaluated(box, {}).loss
    for found in pair(evaluated, box, data):
        assert found.targets == 1248 and found.loss == pytest.approx(want, rel=1e-5)


def test_the_loop_evaluates_when_it_is_due(box):
    sets = [f"data.eval={box}/held.jsonl", "train.steps=4", "train.eval_every=2"]
    lines = metrics(golden_run(box, packed=True, sets=sets))
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2, 4]
