"""A ladder as written: what it resolves to, and every mistake in it with its line."""

from __future__ import annotations

import pytest
import yaml

from optrush import config
from optrush.bench import ladder
from optrush.config import Run
from optrush.errors import ConfigError

from toy import document

ADAMW, SDPA = {"fused-adamw": {}}, {"attention": {"impl": "sdpa"}}
MODEL, BLOCKS = {"compile": {"scope": "model"}}, {"compile": {"scope": "blocks"}}
SINGLE_GPU = [  # name, T, rows, implementation, techniques
    ("float32, eager", 2048, 1, "transformers", {}),
    ("mixed precision", 2048, 1, "transformers", {"amp": {}}),
    ("fused AdamW", 2048, 1, "transformers", {"amp": {}} | ADAMW),
    ("flash attention", 2048, 1, "transformers", {"amp": {}} | ADAMW | SDPA),
    ("compile", 2048, 1, "transformers", {"amp": {}} | ADAMW | SDPA | MODEL),
    ("batch 4", 2048, 4, "transformers", {"amp": {}} | ADAMW | SDPA | MODEL),
    ("batch 8", 2048, 8, "transformers", {"amp": {}} | ADAMW | SDPA | MODEL),
    ("batch 16", 2048, 16, "transformers", {"amp": {}} | ADAMW | SDPA | MODEL),
    ("recompute, T=4096", 4096, 16, "transformers", {"amp": {}} | ADAMW | SDPA | MODEL | {"recompute": {}}),
    ("native decoder", 2048, 8, "native", {"amp": {}} | ADAMW | SDPA | BLOCKS),
    ("fused loss", 2048, 8, "native", {"amp": {}} | ADAMW | SDPA | BLOCKS | {"fused-loss": {}}),
    ("pure bf16", 2048, 8, "native", ADAMW | SDPA | BLOCKS | {"fused-loss": {}, "bf16": {}}),
    ("larger micro-batch", 2048, 16, "native", ADAMW | SDPA | BLOCKS | {"fused-loss": {}, "bf16": {}}),
]


def run(**changes: object) -> Run:
    return config.parse(yaml.safe_dump(document(**changes)), "run.yaml")


def resolved(text: str, only: bool = True, **changes: object) -> dict[str, ladder.Rung]:
    return {r.name: r for r in ladder.rungs(ladder.parse(text, "own.yaml", "own"), run(**changes), only)}


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(text)
    return str(caught.value)


# --- what is shipped


def test_single_gpu_to_the_letter() -> None:
    found = ladder.rungs(ladder.find("single-gpu", run()), run(**{"with": {"packing": {}}}), True)
    assert [r.name for r in found] == [name for name, *_ in SINGLE_GPU]
    for rung, (name, T, rows, implementation, techniques) in zip(found, SINGLE_GPU, strict=True):
        batch = rung.run.batch
        assert (batch.seq, batch.tokens, batch.micro_tokens) == (T, rows * T, rows * T), name
        assert (rung.run.model.implementation, rung.run.model.dtype) == (implementation, "float32"), name
        assert rung.run.with_ == techniques, name
        assert (rung.run.train.steps, rung.run.train.log_every) == (13, 1)
    assert found[9].since == "batch 8" and [r.since for r in found[:3]] == [None, "float32, eager", "mixed precision"]


def test_cpu_demo_has_six_rungs_and_no_compiler() -> None:
    found = ladder.rungs(ladder.find("cpu-demo", run()), run(), True)
    assert len(found) >= 6
    assert not any("compile" in r.run.with_ for r in found)


@pytest.mark.parametrize("name", [n for n in ladder.named() if n != ladder.OWN])
def test_what_is_shipped_resolves(name: str) -> None:
    held_out = run(data={"random": 256, "eval": 0.1})
    found = ladder.rungs(ladder.find(name, held_out), held_out, False)
    last = [r for r in found if r.mode == "cumulative"][-1]
    for rung in found:
        assert rung.run.data.eval is None and rung.run.output == "never-written"
        if rung.mode == "without":
            assert (
                rung.since == last.name and rung.name == f"without {(set(last.run.with_) - set(rung.run.with_)).pop()}"
            )
            assert len(rung.run.with_) == len(last.run.with_) - 1
    assert len(found) - len([r for r in found if r.mode == "cumulative"]) == len(last.run.with_)


def test_the_ladder_of_the_configuration_itself() -> None:
    own = run(**{"with": {"recompute": {}, "fused-adamw": {}, "packing": {}}, "batch": {"seq": 32, "tokens": 64}})
    found = ladder.rungs(ladder.find("config", own), own, False)
    assert [r.name for r in found] == [
        "baseline", "fused-adamw", "packing", "recompute",
        "without fused-adamw", "without packing", "without recompute",
    ]  # fmt: skip
    assert [list(r.run.with_) for r in found[:4]] == [
        [], ["fused-adamw"], ["fused-adamw", "packing"], ["fused-adamw", "packing", "recompute"],
    ]  # fmt: skip
    assert {r.run.batch.seq for r in found} == {32}


# --- what one writes


BASE = "title: mine\nbase:\n  set: {batch.seq: 32}\nrungs:\n"


def test_differences_are_laid_one_over_the_other() -> None:
    found = resolved(
        BASE
        + "  - name: a\n"
        + "  - {name: b, with: {amp: {dtype: fp16}, packing: }}\n"
        + "  - {name: c, with: {amp: {}}, set: {batch.tokens: 256}}\n"
        + "  - {name: d, from: b, without: [amp]}\n"
    )
    assert found["b"].run.with_ == {"amp": {"dtype": "fp16"}, "packing": {}}
    assert found["c"].run.with_ == {"amp": {}, "packing": {}} and found["c"].run.batch.tokens == 256
    assert found["d"].run.with_ == {"packing": {}} and found["d"].run.batch.tokens == 128
    assert [r.changes for r in found.values()] == [
        "the baseline",
        "+ amp (dtype=fp16), + packing",
        "amp: dtype fp16 -> default, batch.tokens 128 -> 256",
        "- amp",
    ]
    assert [r.since for r in found.values()] == [None, "a", "b", "b"]


def test_the_configurations_techniques_only_where_asked() -> None:
    with_ = {"with": {"packing": {}}}
    assert resolved("title: x\nrungs: [{name: a}]", **with_)["a"].run.with_ == {}
    assert resolved("title: x\nbase: {keep: true}\nrungs: [{name: a}]", **with_)["a"].run.with_ == {"packing": {}}


def test_a_change_of_the_load_alone() -> None:
    found = resolved(BASE + "  - name: a\n  - {name: b, set: {batch.tokens: 64}}\n  - {name: c, with: {amp: {}}}\n")
    runs = [r.run for r in found.values()]
    assert ladder.only_load(runs[0], runs[1])
    assert not ladder.only_load(runs[1], runs[2]) and not ladder.only_load(runs[0], runs[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rungs: [{name: a}]", "own.yaml: `title`\nfound: it is missing"),
        ("title: x\nrungs: []", "own.yaml:2: `rungs`"),
        ("- a", "own.yaml\nfound: no mapping at the top\ndo:    begin with `title:`, `rungs:`"),
        ("title: x\nsteps: many\nrungs: [{name: a}]", "own.yaml:2: `steps`\nfound: 'many'"),
        ("title: x\nstep: 3\nrungs: [{name: a}]", "own.yaml:2: `step`\nfound: no such key\ndo:    did you mean"),
        ("title: x\nwhere: 3\nrungs: [{name: a}]", "own.yaml:2: `where`\nfound: no such key"),
        ("title: x\nproof: {step: 3}\nrungs: [{name: a}]", "own.yaml:2: `proof.step`"),
        ("title: x\nrungs:\n  - nam: a", "own.yaml:3: `rungs.0.nam`\nfound: no such key\ndo:    did you mean `name`"),
        ("title: x\nrungs:\n  - with: {}", "own.yaml:3: `rungs.0.name`\nfound: it is missing"),
        (BASE + "  - {name: a}\n  - {name: a}", "own.yaml:6: `name: a`\nfound: a second rung"),
        (BASE + "  - {name: without amp}", "own.yaml:5: `name: without amp`"),
        (BASE + "  - {name: a}\n  - {name: b, from: c}", "own.yaml:6: `from: c`\nfound: no earlier rung"),
        (BASE + "  - {name: a, from: a}", "own.yaml:5: `from: a`"),
        (BASE + "  - {name: a, with: {amb: {}}}", "own.yaml:5: the technique `amb`\nfound: no such technique"),
        (BASE + "  - {name: a, with: {amp: {dtyp: x}}}", "own.yaml:5: `amp: dtyp`\nfound: no such option\ndo:    did"),
        (BASE + "  - {name: a, without: [amp]}", "own.yaml:5: `without: amp`\nfound: so far there is nothing"),
        (BASE + "  - {name: a, set: {batch.sek: 4}}", "own.yaml:5: `batch.sek`\nfound: no key that a rung may change"),
        (BASE + "  - {name: a, set: {optim.lr: 4}}", "own.yaml:5: `optim.lr`\nfound: no key that a rung may change"),
        (BASE + "  - {name: a, set: {batch.seq: x}}", "own.yaml:5: `batch.seq`\nfound: 'x'"),
        ("title: x\nbase: {set: {optim.rate: 1}}\nrungs: [{name: a}]", "own.yaml:2: `optim.rate`\nfound: no such key"),
        ("title: x\nbase: {set: {train.steps: 1}}\nrungs: [{name: a}]", "own.yaml:2: `train.steps`\nfound: the ladder"),
    ],
)  # fmt: skip
def test_mistakes(text: str, said: str) -> None:
    assert said in refused(text)


def test_an_unknown_ladder() -> None:
    with pytest.raises(ConfigError) as caught:
        ladder.find("single-gpo", run())
    assert "did you mean `single-gpu`" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        ladder.find("everest", run())
    assert "config" in str(caught.value) and "cpu-demo" in str(caught.value)
