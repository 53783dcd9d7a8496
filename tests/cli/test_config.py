"""The configuration alone: numbers, the round trip, the order of the flags, typed options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optrush.config import RENAMED, Config, current_techniques, dump_config, parse_config, parse_scalar
from optrush.errors import ConfigError
from optrush.technique import instantiate
from optrush.techniques import ALL

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SMALLEST = "model: tiny\nobjective: sft\ndata: {sample: recipes}\noutput: out\n"


def run(more: str = "", **flags: Any) -> Config:
    return parse_config(SMALLEST + more, "run.yaml", **flags)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("1.0e-5", 1e-5), ("2e-4", 2e-4), ("1.e-3", 1e-3), (".5e-3", 5e-4), ("+1e0", 1.0)],
)
def test_a_number_with_an_exponent_is_a_number(text: str, number: float) -> None:
    assert run(f"optim: {{lr: {text}}}\n").optim.lr == number
    assert run(sets=[f"optim.lr={text}"]).optim.lr == number
    assert parse_scalar(text) == number


def test_quoted_or_unlike_a_number_stays_text() -> None:
    assert parse_scalar("'1e-5'") == "1e-5"
    assert parse_scalar("1e-5x") == "1e-5x" and parse_scalar("e5") == "e5" and parse_scalar("1e") == "1e"
    with pytest.raises(ConfigError, match="valid number"):
        run("optim: {lr: '1e-5'}\n")


@pytest.mark.parametrize(
    "more",
    [
        "",
        "optim: {clip: null}\n",
        "optim: {lr: 3e-4, schedule: linear, warmup: 10, betas: [0.8, 0.99], clip: 0.5}\n",
        "batch: {seq: 64, tokens: 256, micro_tokens: 128}\ntrain: {steps: 7, eval_every: 0.05, keep: 1, clean: true}\n",
        "with: {attention: {impl: masked}, packing: , recompute: {every: 2}}\nseed: 7\n",
    ],
)
def test_dump_and_parse_are_each_others_inverse(more: str) -> None:
    first = run(more, sets=["output='Öl & Feuer: #1'", "data.eval='1e-5'"])
    again = parse_config(dump_config(first), "dumped")
    assert again == first
    assert dump_config(again) == dump_config(first) and "Öl" in dump_config(first)


def test_flags_act_in_the_order_set_with_without() -> None:
    found = run(
        "with: {recompute: {every: 4}}\n",
        sets=["with.recompute.every=3", "with.packing={}", "seed=1", "seed=2"],
        withs=["recompute:every=2", "attention:impl=masked"],
        withouts=["packing"],
    )
    assert found.seed == 2
    assert found.with_ == {"recompute": {"every": 2}, "attention": {"impl": "masked"}}


def test_with_keeps_the_options_it_does_not_name() -> None:
    found = run("with: {fsdp: {stage: 2}}\n", withs=["fsdp:sync=each"])
    assert found.with_ == {"fsdp": {"stage": 2, "sync": "each"}}
    assert run(withs=["fsdp:stage=2,sync=each"]).with_ == {"fsdp": {"stage": 2, "sync": "each"}}


def test_set_reaches_into_a_model_given_by_its_name() -> None:
    found = run(sets=["model.implementation=transformers"])
    assert found.model.path == "tiny" and found.model.implementation == "transformers"


def test_set_wins_over_the_file_and_is_named_in_errors() -> None:
    assert run("batch: {seq: 64}\n", sets=["batch.seq=128"]).batch.seq == 128
    with pytest.raises(ConfigError) as caught:
        run("batch: {seq: 64}\n", sets=["batch.seq=wide"])
    assert caught.value.asked == "--set batch.seq=wide: `batch.seq`"
    assert caught.value.found == "'wide'"


def test_an_error_names_the_line_of_its_own_key_only() -> None:
    with pytest.raises(ConfigError) as caught:
        run("batch:\n  seq: wide\n  tokens: many\n")
    assert caught.value.asked == "run.yaml:6: `batch.seq`"
    assert caught.value.do == "input should be a valid integer"


def test_options_are_typed() -> None:
    techniques = instantiate(ALL, run("with: {fused-loss: {chunk: 64}, recompute: {every: 2}, amp: }\n").with_)
    by_name = {t.name: t for t in techniques}
    assert [t.name for t in techniques] == [c.name for c in ALL if c.name in by_name]
    assert by_name["fused-loss"].chunk == 64 and by_name["recompute"].every == 2 and by_name["amp"].dtype == "bf16"
    for options in ({"chunk": "64"}, {"chunk": 64.0}, {"chunk": True}, {"chunk": 0}):
        with pytest.raises(ConfigError, match="fused-loss: chunk"):
            instantiate(ALL, {"fused-loss": options})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid(example: Path) -> None:
    """Every example parses, and its techniques and options exist and do not clash."""
    found = parse_config(example.read_text(), str(example))
    owned = [part for t in instantiate(ALL, found.with_) for part in t.claims]
    assert len(owned) == len(set(owned)) and len(EXAMPLES) >= 3
    assert found.batch.tokens % (found.batch.micro_tokens or found.batch.seq) == 0


SPELLINGS = {
    "fused-block": "fused-kernels: {mlp: triton}",
    "fused-norm": "fused-kernels: {mlp: none, norm: true}",
    "fused-rotation": "fused-kernels: {mlp: none, rope: true}",
    "max-autotune": "compile: {autotune: true}",
    "stochastic-rounding": "bf16: {rounding: stochastic}",
    "kahan": "bf16: {rounding: kahan}",
}


@pytest.mark.parametrize("name", RENAMED)
def test_the_old_name_of_a_technique_is_refused_with_the_new_spelling(name: str) -> None:
    old, new = run(f"with: {{{name}: }}\n"), RENAMED[name][0]
    options = SPELLINGS[name].partition(": ")[2].strip("{}")
    flag = f"--with {new}:{options.replace(', ', ',').replace(': ', '=')}"
    for place, spelling, refused in (
        (f"the technique `{name}`", SPELLINGS[name], lambda: instantiate(ALL, old.with_)),
        (f"--with {name}", flag, lambda: run(withs=[f"{name}:impl=triton"])),
        (f"--without {name}", f"--without {new}", lambda: run(withouts=[name])),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert caught.value.asked == place and caught.value.do == f"write `{spelling}`"
        assert caught.value.found == f"now an option of `{new}`"
    from_yaml = run(f"with: {{{SPELLINGS[name]}}}\n").with_
    assert from_yaml == run(withs=[flag.removeprefix("--with ")]).with_ and {*from_yaml} == {new}


def test_older_runs_have_the_techniques_of_today() -> None:
    old = {"bf16": {}, "kahan": {}, "compile": {"scope": "model"}, "max-autotune": {}, "fused-block": {"impl": "quack"}}
    new = {
        "bf16": {"rounding": "kahan"},
        "compile": {"scope": "model", "autotune": True},
        "fused-kernels": {"mlp": "quack"},
    }
    assert current_techniques(old) == new == current_techniques(new)
    assert current_techniques({"fused-norm": {}, "fused-rotation": {}}) == {
        "fused-kernels": {"mlp": "none", "norm": True, "rope": True}
    }
    assert current_techniques({"stochastic-rounding": {}}) == {"bf16": {"rounding": "stochastic"}}
