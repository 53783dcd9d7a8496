"""A ladder as written: what it resolves to, and every mistake in it with its line."""

from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from optrush import config
from optrush.benchmark import ladder
from optrush.cli.bench import bench
from optrush.decide import changed, decide
from optrush.errors import ConfigError
from optrush.hardware import NAMED

from toy import document

ROOT = Path(__file__).parents[2]


def run(**changes):
    return config.parse_config(yaml.safe_dump(document(**changes)), "run.yaml")


def resolved(text, only=True, **changes):
    return {r.name: r for r in ladder.resolve_rungs(ladder.parse_ladder(text, "own.yaml", "own"), run(**changes), only)}


def refused(text):
    with pytest.raises(ConfigError) as caught:
        resolved(text)
    return str(caught.value)


# --- what is shipped


def test_single_gpu_ends_at_the_set_that_is_compared_with_others():
    found = ladder.resolve_rungs(ladder.find_ladder("single-gpu", run()), run(**{"with": {"packing": {}}}), True)
    assert found[0].config.with_ == {} and found[0].config.model.implementation == "transformers"
    for rung in found:
        batch = rung.config.batch
        assert batch.tokens == batch.micro_tokens and batch.tokens % batch.seq == 0, rung.name
        assert (rung.config.model.dtype, rung.config.train.steps, rung.config.train.log_every) == ("float32", 13, 1)
    assert [r.since for r in found[:3]] == [None, "float32, eager", "mixed precision"]
    compared = config.parse_config((ROOT / "benchmarks/llama1b-peers.yaml").read_text(), "peers")
    assert any(r.config.with_ == compared.with_ | {"compile": {"scope": "blocks"}} for r in found)


def test_cpu_demo_has_six_rungs_and_no_compiler():
    found = ladder.resolve_rungs(ladder.find_ladder("cpu-demo", run()), run(), True)
    assert len(found) >= 6
    assert not any("compile" in r.config.with_ for r in found)


def test_the_help_names_what_is_shipped():
    (option,) = (o for o in get_type_hints(bench, include_extras=True)["ladder"].__metadata__)
    assert set(ladder.shipped()) <= {name.strip() for name in option.help.split(",")}


@pytest.mark.parametrize("name", [n for n in ladder.shipped() if n != ladder.OWN])
def test_what_is_shipped_resolves(name):
    held_out = run(
        data={"random": 256, "eval": 0.1}, **{"with": {"bf16": {}}}
    )  # which the ladder `peers` has of CONFIG
    written = ladder.find_ladder(name, held_out)
    found = ladder.resolve_rungs(written, held_out, False)
    last = [r for r in found if r.mode == "cumulative" and r.peer is None][-1]
    for rung in found:
        assert rung.config.output == "never-written"
        assert rung.config.data.eval == (None if written.quality is None else 0.1)
        if rung.mode == "without":
            assert (
                rung.since == last.name
                and rung.name == f"without {(set(last.config.with_) - set(rung.config.with_)).pop()}"
            )
            assert len(rung.config.with_) == len(last.config.with_) - 1
    without = len(found) - len([r for r in found if r.mode == "cumulative"])
    assert without == (len(last.config.with_) if written.all_but_one and written.quality is None else 0)


def test_every_rung_of_quality_runs_on_a_gpu():
    text = (ROOT / "benchmarks/quality.yaml").read_text()
    sets = ["model={shape: HuggingFaceTB/SmolLM2-135M}", "data={random: 4096, eval: 0.1}", "objective=pretrain"]
    own = config.parse_config(text, "quality.yaml", sets)
    found = ladder.resolve_rungs(ladder.find_ladder("quality", own), own, False)
    for rung in found:
        decide(rung.config, device=NAMED["h100"], ranks=1)
    assert len(found) >= 24 and {r.since for r in found} == {None, "float32", "amp", "LoRA r 32"}


def test_every_rung_of_rl_runs_on_a_gpu(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": "2"}\n')
    text = (
        f"{{model: {{shape: HuggingFaceTB/SmolLM2-135M, tokenizer: {tmp_path}}}, objective: grpo, output: x,"
        f" data: {{path: {tmp_path / 'rows.jsonl'}, eval: {tmp_path / 'rows.jsonl'}}}, batch: {{seq: 512}},"
        " grpo: {prompts: 32, group: 16, max_new: 64}, train: {steps: 100}}"
    )
    own = config.parse_config(text, "rl.yaml")
    found = {rung.name: rung for rung in ladder.resolve_rungs(ladder.find_ladder("rl", own), own, False)}
    for rung in found.values():
        decide(rung.config, device=NAMED["h100"], ranks=1)
    assert {r.since for r in found.values()} == {None, "64 answers at a time", "512 answers at a time"}
    changed = found["two updates of the same answers"].config.grpo
    assert changed is not None and (changed.updates, changed.slots, changed.prompts) == (2, 512, 32)


CASES = {  # what the records are asked for by
    "single-gpu": {"1b-full-2048"},
    "memory": {"1b-least-memory", "8b-least-memory"},
    "long-context": {"1b-longest", "8b-longest"},
    "peers": {"1b-full-2048", "1b-amp-2048"},
    "benchmarks/rows.yaml": {"1b-full-2048", "1b-full-4096", "1b-full-8192"},
    "benchmarks/eight.yaml": {"8b-full-4096", "8b-fp8-4096"},
    "benchmarks/chats.yaml": {"1b-chat-lengths"},
    "benchmarks/adapters.yaml": {"1b-lora-2048", "1b-qlora-2048", "8b-lora-4096", "8b-qlora-4096"},
    "benchmarks/qlora.yaml": {"8b-qlora-least-memory", "70b-qlora-2048"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_cases_of_the_benchmarks(name):
    configs = {"1b": ["llama1b-peers", "llama1b"], "8b": ["llama8b"], "70b": ["llama8b"]}
    configs["1b"] += ["chat-lengths"] if "chats" in name else []
    found: set[str] = set()
    for size in {case.partition("-")[0] for case in CASES[name]}:
        for stem in configs[size]:
            own = config.parse_config((ROOT / f"benchmarks/{stem}.yaml").read_text(), stem)
            path = str(ROOT / name) if name.endswith(".yaml") else name
            found |= {r.case for r in ladder.resolve_rungs(ladder.find_ladder(path, own), own, True)}
    assert CASES[name] <= found


def test_a_ladder_names_its_cases():
    text = 'title: x\ncase: "{size}-at-{seq}"\nrungs:\n  - name: a\n  - {name: b, case: mine, set: {batch.seq: 32}}\n'
    found = resolved(text + "  - {name: c, with: {packing: {}}}\n", only=False, model={"shape": "llama-3.2-1b"})
    assert [r.case for r in found.values()] == ["1b-at-64", "mine", "1b-at-32", "1b-at-32"]
    for name, said in (
        ("Llama-3.1-8B-Instruct", "8b"),
        ("qwen2.5-0.5b", "0.5b"),
        ("smol-135M", "135m"),
        ("toy", "toy"),
    ):
        assert ladder.model_size(run(model=f"models/{name}")) == said


def test_another_system_trains_the_run_of_the_rung_before():
    found = resolved(
        BASE
        + "  - {name: a, with: {amp: {}}}\n"
        + "  - {name: b, peer: {trainer: {checkpointing: true}}}\n"
        + "  - {name: c, peer: {unsloth: }, set: {batch.tokens: 32}}\n"
        + "  - {name: d, with: {packing: {}}}\n",
        only=False,
    )
    assert [(r.since, r.mode) for r in list(found.values())[:4]] == [
        (None, "cumulative"), ("a", "cumulative"), ("a", "cumulative"), ("a", "cumulative"),
    ]  # fmt: skip
    assert [r.peer and r.peer.name for r in found.values()] == [None, "trainer", "unsloth", None, None, None]
    assert found["b"].config.with_ == {} and found["b"].config.batch == found["a"].config.batch
    assert found["b"].changes == "Hugging Face Trainer + Liger + checkpointing, float32 weights"
    assert found["c"].changes == "Unsloth + its checkpointing, bfloat16 weights, batch.tokens 128 -> 32"
    assert list(found["d"].config.with_) == ["amp", "packing"] and "without amp" in found


def test_a_ladder_of_longest_rows_begins_at_the_shortest():
    found = resolved("title: x\nwarmup: 0\nlongest: {from: 48, to: 4096}\nrungs: [{name: a}]")["a"].config.batch
    assert (found.seq, found.tokens, found.micro_tokens) == (48, 48, 48)


def test_the_ladder_of_the_configuration_itself():
    own = run(**{"with": {"recompute": {}, "fused-adamw": {}, "packing": {}}, "batch": {"seq": 32, "tokens": 64}})
    found = ladder.resolve_rungs(ladder.find_ladder("config", own), own, False)
    assert [r.name for r in found] == [
        "baseline", "fused-adamw", "packing", "recompute", "micro-batch",
        "without fused-adamw", "without packing", "without recompute",
    ]  # fmt: skip
    assert [list(r.config.with_) for r in found[:4]] == [
        [], ["fused-adamw"], ["fused-adamw", "packing"], ["fused-adamw", "packing", "recompute"],
    ]  # fmt: skip
    assert {r.config.batch.seq for r in found} == {32}
    assert [r.config.batch.micro_tokens for r in found] == [*[32] * 4, *[64] * 4], "what is decided is the last rung"
    given = changed(own, {"batch.micro_tokens": 32})
    assert len(ladder.resolve_rungs(ladder.find_ladder("config", given), given, True)) == 4


# --- what one writes


LONG = "title: x\nlongest: {from: 8, to: 64}\n"
BASE = "title: mine\nbase:\n  set: {batch.seq: 32}\nrungs:\n"


TWO = BASE + "  - {name: a}\n  - {name: b, "


def test_differences_are_laid_one_over_the_other():
    found = resolved(
        BASE
        + "  - name: a\n"
        + "  - {name: b, with: {amp: {dtype: fp16}, packing: }}\n"
        + "  - {name: c, with: {amp: {}}, set: {batch.tokens: 256}}\n"
        + "  - {name: d, from: b, without: [amp]}\n"
    )
    assert found["b"].config.with_ == {"amp": {"dtype": "fp16"}, "packing": {}}
    assert found["c"].config.with_ == {"amp": {}, "packing": {}} and found["c"].config.batch.tokens == 256
    assert found["d"].config.with_ == {"packing": {}} and found["d"].config.batch.tokens == 128
    assert [r.changes for r in found.values()] == [
        "the baseline", "+ amp (dtype=fp16), + packing", "amp: dtype fp16 -> default, batch.tokens 128 -> 256", "- amp",
    ]  # fmt: skip
    assert [r.since for r in found.values()] == [None, "a", "b", "b"]


def test_the_configurations_techniques_only_where_asked():
    with_ = {"with": {"packing": {}}}
    assert resolved("title: x\nrungs: [{name: a}]", **with_)["a"].config.with_ == {}
    assert resolved("title: x\nbase: {keep: true}\nrungs: [{name: a}]", **with_)["a"].config.with_ == {"packing": {}}


def test_a_change_of_the_load_alone():
    found = resolved(BASE + "  - name: a\n  - {name: b, set: {batch.tokens: 64}}\n  - {name: c, with: {amp: {}}}\n")
    runs = [r.config for r in found.values()]
    assert ladder.only_load(runs[0], runs[1])
    assert not ladder.only_load(runs[1], runs[2]) and not ladder.only_load(runs[0], runs[0])


@pytest.mark.parametrize(("text", "said"), [
    ("rungs: [{name: a}]", "own.yaml: `title`\nfound: it is missing"), ("title: x\nrungs: []", "own.yaml:2: `rungs`"),
    ("- a", "own.yaml\nfound: no mapping at the top\ndo:    start with `title:`, `rungs:`"),
    ("title: x\nsteps: many\nrungs: [{name: a}]", "own.yaml:2: `steps`\nfound: 'many'"),
    ("title: x\nstep: 3\nrungs: [{name: a}]", "own.yaml:2: `step`\nfound: no such key\ndo:    did you mean"),
    ("title: x\nwhere: 3\nrungs: [{name: a}]", "own.yaml:2: `where`\nfound: no such key"),
    ("title: x\nproof: {step: 3}\nrungs: [{name: a}]", "own.yaml:2: `proof.step`"),
    ("title: x\nrungs:\n  - nam: a", "own.yaml:3: `rungs.0.nam`\nfound: no such key\ndo:    did you mean `name`"),
    ("title: x\nrungs:\n  - with: {}", "own.yaml:3: `rungs.0.name`\nfound: it is missing"),
    (BASE + "  - {name: a}\n  - {name: a}", "own.yaml:6: `name: a`\nfound: another rung has this name"),
    (BASE + "  - {name: without amp}", "own.yaml:5: `name: without amp`"),
    (BASE + "  - {name: a}\n  - {name: b, from: c}", "own.yaml:6: `from: c`\nfound: no earlier rung"),
    (BASE + "  - {name: a, from: a}", "own.yaml:5: `from: a`"),
    (BASE + "  - {name: a, with: {amb: {}}}", "own.yaml:5: the technique `amb`\nfound: no such technique"),
    (BASE + "  - {name: a, with: {amp: {dtyp: x}}}", "own.yaml:5: `amp: dtyp`\nfound: no such option\ndo:    did"),
    (BASE + "  - {name: a, without: [amp]}", "own.yaml:5: `without: amp`\nfound: so far there is nothing"),
    (BASE + "  - {name: a, set: {batch.sek: 4}}", "own.yaml:5: `batch.sek`\nfound: a rung cannot change this key"),
    (BASE + "  - {name: a, set: {optim.lr: 4}}", "own.yaml:5: `optim.lr`\nfound: a rung cannot change this key"),
    (BASE + "  - {name: a, set: {batch.seq: x}}", "own.yaml:5: `batch.seq`\nfound: 'x'"),
    ("title: x\nbase: {set: {optim.rate: 1}}\nrungs: [{name: a}]", "own.yaml:2: `optim.rate`\nfound: no such key"),
    (BASE + "  - {name: a, peer: {trainer: {}}}", "own.yaml:5: `name: a`\nfound: the first rung is"),
    (TWO + "peer: {trainr: {}}}", "own.yaml:6: the system `trainr`\nfound: no such system"),
    (TWO + "peer: {trainer: {ligr: true}}}", "own.yaml:6: `trainer: ligr`\nfound: no such option"),
    (TWO + "peer: {}}", "own.yaml:6: `rungs.1.peer`"),
    (TWO + "peer: {trainer: {}}, with: {amp: {}}}", "own.yaml:6: `name: b`\nfound: techniques for another system"),
    (TWO + "peer: {trainer: }}\n  - {name: c, from: b}", "own.yaml:7: `name: c`\nfound: `from: b`, another"),
    (TWO + "case: '{rows}'}", "own.yaml:6: `rungs.1.case`\nfound: '{rows}'"),
    (TWO + "case: '{size'}", "own.yaml:6: `rungs.1.case`\nfound: '{size'"),
    (LONG + "rungs: [{name: a}, {name: b, peer: {trainer: {}}}]", "found: another system in a ladder of longest"),
    (LONG + "rungs: [{name: a, set: {batch.seq: 4}}]", "own.yaml:2: `longest`\nfound: `batch.seq` is set too"),
    ("title: x\nlongest: {from: 9, to: 8}\nrungs: [{name: a}]", "own.yaml:2: `longest`\nfound: `to: 8` before"),
    ("title: x\nlongest: {from: 9, too: 8}\nrungs: [{name: a}]", "own.yaml:2: `longest.too`\nfound: no such key"),
    ("title: x\nwarmup: 0\nrungs: [{name: a}]", "own.yaml:2: `warmup: 0`\nfound: the first step compiles"),
    ("title: x\nbase: {set: {train.steps: 1}}\nrungs: [{name: a}]", "own.yaml:2: `train.steps`\nfound: the ladder"),
])  # fmt: skip
def test_mistakes(text, said):
    assert said in refused(text)


def test_an_unknown_ladder():
    with pytest.raises(ConfigError) as caught:
        ladder.find_ladder("single-gpo", run())
    assert "did you mean `single-gpu`" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        ladder.find_ladder("annapurna", run())
    assert "config" in str(caught.value) and "cpu-demo" in str(caught.value)
