"""What `decide` refuses, keeps and says; that every verb asks it is in tests/cli/test_one_answer.py."""

import json

import pytest

from optrush import hardware
from optrush.config import Config, dump_config
from optrush.decide import as_begun, changed, decide
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.technique import Edit, instantiate
from optrush.techniques import ALL

H100 = hardware.NAMED["h100"]


def run(**more):
    base = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": "o"}
    return Config.model_validate({**base, **more})


@pytest.mark.parametrize(("more", "ranks", "found"), [
    ({"method": "auto", "with": {"nosuch": {}}}, 1, "no such technique"),
    ({"method": "auto", "with": {"lora": {"rnak": 3}}}, 1, "no such option"),
    ({"batch": {"micro_tokens": 3000}}, 1, "not a multiple of `batch.seq: 2048`"),
    ({"batch": {"micro_tokens": 32768}}, 2, "not divisible by 32768 slots"), ({}, 0, "a run has one or more"),
    ({"with": {"pipeline": {}}}, 4, "no technique shares the work"),
])  # fmt: skip
def test_what_it_refuses(more, ranks, found):
    """Named, whatever is open besides."""
    with pytest.raises((ConfigError, NeedsError)) as refused:
        decide(run(**more), ranks=ranks, device=H100)
    assert found in refused.value.found


@pytest.mark.parametrize("with_", [None, {}])
def test_a_family_without_sizes_asks_for_both(tmp_path, with_):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nosuchx", "architectures": ["XForCausalLM"]}))
    given = {} if with_ is None else {"with": with_}
    with pytest.raises(NeedsError, match="left out") as refused:
        decide(run(model=str(tmp_path), objective="pretrain", data={"random": 8}, **given), device=H100)
    assert refused.value.do == "give both"


def test_the_first_method_that_goes_with_the_file():
    decided = decide(run(method="auto", **{"with": {"lora": {}}}), ranks=1, device=H100)
    assert decided.config.method == "lora"
    assert {r.question: r.answer for r in decided.reasons}["method"] == "lora, the first that fits of lora"


@pytest.mark.parametrize(("began", "now", "kept"), [
    ({"method": "lora"}, {"method": "qlora"}, {"method": "qlora"}), ({}, {"method": "lora"}, {"method": "lora"}),
    ({"method": "auto", "with": {"lora": {"rank": 8}}}, {"method": "auto", "with": {"lora": {"rank": 16}}},
        {"with": {"lora": {"rank": 16}}}),
    ({"method": "lora"}, {"method": "lora"}, {"method": "lora"}),
])  # fmt: skip
def test_a_resumed_run_keeps_what_it_decided_and_the_file_what_it_names(tmp_path, began, now, kept):
    first = decide(run(output=str(tmp_path), **began), ranks=1, device=H100)
    (tmp_path / "run.yaml").write_text(dump_config(first.config))
    again = as_begun(run(output=str(tmp_path), **now), 1)
    if "method" in kept:
        assert again.method == kept["method"]
    for name, options in kept.get("with", {}).items():
        assert again.with_[name] == options
    same = began == now
    assert (again.with_ == first.config.with_) == same and (not same or not again.unplanned)


def test_a_run_is_resumed_on_other_ranks(tmp_path):
    config = run(output=str(tmp_path))
    for began, now in ((2, 1), (1, 2)):
        first = decide(config, ranks=began, device=H100)
        (tmp_path / "run.yaml").write_text(dump_config(first.config))
        decided = decide(as_begun(config, now), ranks=now, device=H100)
        assert decided.env.ranks == now and decided.config.batch.tokens == first.config.batch.tokens
    longer = changed(config, {"batch.seq": 3072, "batch.tokens": 24576})
    assert decide(as_begun(longer, 2), ranks=2, device=H100).env.seq == 3072, "its rows are others"


def test_nothing_fits_and_what_would_is_named():
    with pytest.raises(UserError, match=r"float32 weights as configured\nfound: it needs at least") as refused:
        decide(
            run(model={"shape": "llama-3.1-8b"}, objective="pretrain", data={"random": 8}),
            device=hardware.NAMED["4090"],
        )
    assert "write `" in refused.value.do and "which takes" in refused.value.do


@pytest.mark.parametrize(("name", "options", "listed"), [
    ("offload-activations", {"keep": 0}, "keep=0"), ("nf4", {"double": False}, "double=False"),
    ("nf4", {}, "double=True"), ("lora", {}, "rank=16"),
])  # fmt: skip
def test_a_change_lists_what_is_on_and_what_was_turned_off(name, options, listed):
    text = Edit.of("config", instantiate(ALL, {name: options})[0], 1).options
    assert listed in text.split(", ") and "dropout" not in text
