"""The configuration alone: numbers, the round trip, the order of the flags, typed options."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from optrush.config import Config, dump_config, parse_config, parse_scalar, yaml_keys
from optrush.errors import ConfigError
from optrush.foreign_keys import TOOLS, foreign_spelling
from optrush.models.source import locate
from optrush.technique import instantiate
from optrush.techniques import ALL

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SMALLEST = "model: tiny\nobjective: sft\ndata: {sample: recipes}\noutput: out\n"


def run(more="", **flags):
    return parse_config(SMALLEST + more, "run.yaml", **flags)


@pytest.mark.parametrize(
    ("text", "number"), [("1E-5", 1e-5), ("1.0e-5", 1e-5), ("1.e-3", 1e-3), (".5e-3", 5e-4), ("+1e0", 1.0)]
)
def test_a_number_with_an_exponent_is_a_number(text, number):
    assert run(f"optim: {{lr: {text}}}\n").optim.lr == number
    assert run(sets=[f"optim.lr={text}"]).optim.lr == number
    assert parse_scalar(text) == number


def test_quoted_or_unlike_a_number_stays_text():
    assert parse_scalar("'1e-5'") == "1e-5"
    assert parse_scalar("1e-5x") == "1e-5x" and parse_scalar("e5") == "e5" and parse_scalar("1e") == "1e"
    with pytest.raises(ConfigError, match="give a number"):
        run("optim: {lr: '1e-5'}\n")


@pytest.mark.parametrize(
    "more",
    [
        "",
        "optim: {clip: null}\n",
        "optim: {lr: 3e-4, schedule: linear, warmup: 10, betas: [0.8, 0.99], clip: 0.5}\n",
        "batch: {seq: 64, tokens: 256, micro_tokens: 128}\n"
        "train: {steps: 7, eval_every: 0.05, keep: 1, overwrite: true}\n",
        "with: {attention: {impl: masked}, packing: , recompute: {every: 2}}\nseed: 7\n",
    ],
)
def test_dump_and_parse_are_each_others_inverse(more):
    first = run(more, sets=["output='Öl & Feuer: #1'", "data.eval='1e-5'"])
    again = parse_config(dump_config(first), "dumped")
    assert again == first
    assert dump_config(again) == dump_config(first) and "Öl" in dump_config(first)


def test_flags_act_in_the_order_set_with_without():
    found = run(
        "with: {recompute: {every: 4}}\n", sets=["with.recompute.every=3", "with.packing={}", "seed=1", "seed=2"],
        withs=["recompute:every=2", "attention:impl=masked"], withouts=["packing"],
    )  # fmt: skip
    assert found.seed == 2
    assert found.with_ == {"recompute": {"every": 2}, "attention": {"impl": "masked"}}


def test_with_keeps_the_options_it_does_not_name():
    found = run("with: {fsdp: {stage: 2}}\n", withs=["fsdp:sync=each"])
    assert found.with_ == {"fsdp": {"stage": 2, "sync": "each"}}
    assert run(withs=["fsdp:stage=2,sync=each"]).with_ == {"fsdp": {"stage": 2, "sync": "each"}}


def test_set_reaches_into_a_model_given_by_its_name():
    found = run(sets=["model.implementation=transformers"])
    assert found.model.path == "tiny" and found.model.implementation == "transformers"


def test_set_wins_over_the_file_and_is_named_in_errors():
    assert run("batch: {seq: 64}\n", sets=["batch.seq=128"]).batch.seq == 128
    with pytest.raises(ConfigError) as caught:
        run("batch: {seq: 64}\n", sets=["batch.seq=wide"])
    assert caught.value.asked == "--set batch.seq=wide: `batch.seq`"
    assert caught.value.found == "'wide'"


def test_an_error_names_the_line_of_its_own_key_only():
    with pytest.raises(ConfigError) as caught:
        run("batch:\n  seq: wide\n  tokens: many\n")
    assert caught.value.asked == "run.yaml:6: `batch.seq`"
    assert caught.value.do == "give a whole number"


@pytest.mark.parametrize(("more", "sets", "do"), [
    ("data: d/chat.jsonl\n", [], "write `data: {path: d/chat.jsonl}`"),
    ("train: 100\n", [], "write `train: {steps: 100}` or `train: {epochs: 100}`"),
    ("data: [a.jsonl, b.jsonl]\n", [], "write `data: {path: [a.jsonl, b.jsonl]}`"),
    ("", ["data=d/chat.jsonl"], "write `--set data.path=d/chat.jsonl`"),
    ("data: s3://me:secret@host/a\n", [], "write `data: {path: s3://***@host/a}`"),
    ("data: 5\n", [], "give a mapping {KEY: VALUE} with the keys path, sample, "),
    ("optim: 1e-4\n", [], "write `optim: {lr: 0.0001}`"),
    ("optim: adamw\n", [], "give a mapping {KEY: VALUE} with the keys lr, schedule, warmup, "),
    ("distill: org/teacher\n", [], "write `distill: {teacher: org/teacher}`"),
    ("data: {path: a.jsonl, clean: {items: [text]}}\n", [], "write `{field: text}`"),
    ("data: {eval: 2}\n", [], "give a number below 1 or a path"),
    ("data: {random: 0}\n", [], "give a number of at least 1 or true"),
    ("data: {path: [{path: a}, 1]}\n", [], "give a path or a mapping {KEY: VALUE}"),
    ("optim: {betas: [0.9]}\n", [], "give a list of more values"),
    ("optim: {betas: [0.9, 1]}\n", [], "give a number below 1"),
    ("seed: 4294967296\n", [], "give a number below 4294967296"),
    ("batch: {micro_tokens: many}\n", [], "give a whole number or 'auto'"),
    ("optim: {warmup: 1.5}\n", [], "give a whole number of steps (1 or more), or a fraction of the run (below 1)"),
    ("model: 5\n", [], "give a mapping {KEY: VALUE} with the keys path, "),
])  # fmt: skip
def test_the_remedy_of_a_wrong_value(more, sets, do):
    tree = {**yaml.safe_load(SMALLEST), **yaml.safe_load(more or "{}")}
    with pytest.raises(ConfigError) as caught:
        parse_config(yaml.safe_dump(tree) if "1e-4" not in more else SMALLEST + more, "run.yaml", sets)
    assert caught.value.do.startswith(do) and "secret" not in str(caught.value)


@pytest.mark.parametrize(("key", "text", "number"), [
    ("train.timeout", "1:30:00", "5400"), ("seed", "0777", "511"), ("seed", "0b11", "3"), ("seed", "00", "0"),
    ("optim.lr", "1:30.5", "90.5"), ("model.revision", "01234567", "342391"), ("seed", "-0_7", "-7"),
])  # fmt: skip
def test_numbers_that_only_yaml_reads_so(key, text, number):
    section, _, inner = key.partition(".")
    line = f"{section}: {{{inner}: {text}}}\n" if inner else f"{section}: {text}\n"
    lines = [line for line in SMALLEST.splitlines(keepends=True) if not line.startswith(section)]
    with pytest.raises(ConfigError) as caught:
        parse_config("".join(lines) + line, "run.yaml")
    assert caught.value.asked.endswith(f": `{key}`") and caught.value.found == f"`{text}`, which YAML reads as {number}"
    assert caught.value.do.startswith(f"write {number}, ") and f"'{text}'" in caught.value.do
    for flags in ([[f"{key}={text}"], []], [[], [f"bf16:rounding={text}"]]):
        with pytest.raises(ConfigError, match=f"which YAML reads as {number}"):
            parse_config(SMALLEST, "run.yaml", *flags)


@pytest.mark.parametrize(("text", "seed"), [("1_000", 1000), ("0x1f", 31), ("0", 0), ("10", 10)])
def test_numbers_that_everybody_reads_so(text, seed):
    assert parse_config(SMALLEST + f"seed: {text}\n", "run.yaml").seed == seed


@pytest.mark.parametrize("output", ["'1:30:00'", '"0777"', "a:1", "2024-01-01", "1.2.3", "08x"])
def test_texts_like_numbers(output):
    lines = [line for line in SMALLEST.splitlines(keepends=True) if not line.startswith("output")]
    config = parse_config("".join(lines) + f"output: {output}\n", "run.yaml")
    assert config.output == output.strip("'\"") == parse_config(dump_config(config), "run.yaml").output


WRONG: list[Any] = [
    "x", "", -1, 0, 1.5, True, None, [], ["x"], [1, 2, 3], {"a": 1}, float("inf"), 10**40,
]  # fmt: skip


def settings(part, path=()):
    for name in yaml_keys(part):
        inner = yaml_keys(part, (name, ""))
        yield (*path, name)
        if inner != yaml_keys(part):  # a section
            yield from ((*path, name, key) for key in inner)


def test_no_remedy_is_another_librarys():
    """Of every key and option: ours are sentences that begin with what to do, without a name of the code."""
    remedies = set()
    for path in settings(Config):
        for wrong in WRONG:
            tree: Any = {**yaml.safe_load(SMALLEST), "model": {"path": "tiny"}}
            inner = tree if len(path) == 1 else tree.setdefault(path[0], {})
            inner[path[-1]] = wrong
            try:
                parse_config(yaml.safe_dump(tree), "run.yaml")
            except ConfigError as error:
                remedies.add(error.do)
    for cls in ALL:
        for field in dataclasses.fields(cls):
            for wrong in WRONG:
                try:
                    instantiate(ALL, {cls.name: {field.name: wrong}})
                except ConfigError as error:
                    remedies.add(error.do)
    assert len(remedies) > 60
    ours = ("give ", "write `", "did you mean `", "known: ", "add `")
    theirs = re.compile("nput should|nstance of|valid |Error|error,|nable")
    assert [remedy for remedy in remedies if not remedy.startswith(ours) or theirs.search(remedy)] == []


def test_options_are_typed():
    techniques = instantiate(ALL, run("with: {fused-loss: {chunk: 64}, recompute: {every: 2}, amp: }\n").with_)
    by_name = {t.name: t for t in techniques}
    assert [t.name for t in techniques] == [c.name for c in ALL if c.name in by_name]
    assert by_name["fused-loss"].chunk == 64 and by_name["recompute"].every == 2 and by_name["amp"].dtype == "bf16"
    for options in ({"chunk": "64"}, {"chunk": 64.0}, {"chunk": True}, {"chunk": 0}):
        with pytest.raises(ConfigError, match="fused-loss: chunk"):
            instantiate(ALL, {"fused-loss": options})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid(example):
    """Every example parses, and its techniques and options exist and do not clash."""
    found = parse_config(example.read_text(), str(example))
    owned = [part for t in instantiate(ALL, found.with_) for part in t.claims]
    assert len(owned) == len(set(owned)) and len(EXAMPLES) >= 3
    assert found.batch.tokens % (found.batch.micro_tokens or found.batch.seq) == 0


@pytest.mark.parametrize(("line", "write"), [
    ("learning_rate: 1e-4", "optim: {lr: 0.0001}"), ("lora_r: 16", "with: {lora: {rank: 16}}"),
    ("bf16: true", "with: {amp: {}}"), ("bf16: false", "leave it out"),
    ("model_name_or_path: org/name", "model: org/name"), ("per_device_train_batch_size: 4", "batch: {micro_tokens: N}"),
    ("optim: {learning_rate: 3}", "optim: {lr: 3}"), ("train: {num_train_epochs: 2}", "train: {epochs: 2}"),
    ("with: {qlora: {}}", "method: qlora"), ("resume_from_checkpoint: true", "--resume auto"),
    ("early_stopping_threshold: 0.1", "train: {stop_after: {evals: N, min_delta: 0.1}}"),
    ("load_in_8bit: true", "with: {int8: {}, lora: {}}"),
    ("optimizer: paged_adamw_8bit", "with: {adam8bit: {}, paged-states: {}}"),
    ("flash_attention: true", "with: {attention: {impl: varlen}}"),
    ("flash_attn: true", "with: {attention: {impl: varlen}}"), ("evals_per_epoch: 4", "train: {eval_every: N}"),
    ("rl_beta: 0.2", "dpo: {beta: 0.2}"), ("adapter: qlora", "method: qlora"),
    ("lora_alpha: 16", "with: {lora: {alpha: 16}}"), ("gradient_checkpointing: true", "with: {recompute: {}}"),
    ("lr_scheduler_type: constant", "optim: {schedule: constant}"),
])  # fmt: skip
def test_spellings_of_other_tools_are_answered_with_ours(line, write):
    """Each answer that is a line of YAML is one that is read."""
    base = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": "out"}
    whole = {**base, **yaml.safe_load(line)}
    with pytest.raises(ConfigError) as found:
        instantiate(ALL, parse_config(yaml.safe_dump(whole), "run.yaml").with_)
    assert write in found.value.do
    if found.value.do.startswith("write `") and "N" not in write and "paged" not in write:
        theirs = yaml.safe_load(found.value.do.split("`")[1].partition(" (")[0])
        instantiate(ALL, parse_config(yaml.safe_dump({**base, **theirs}), "run.yaml").with_)


@pytest.mark.parametrize(("key", "do"), [
    ("model.method", "did you mean `method`?"), ("seq", "did you mean `batch.seq`?"),
    ("data.seq", "did you mean `batch.seq`?"), ("steps", "did you mean `train.steps`?"),
    ("train.seed", "did you mean `seed`?"), ("model.dtyp", "did you mean `dtype`?"),
    ("sequence_length", "write `batch: {seq: 1000000}`"), ("optim.name", "known: betas"),
    ("train.tokens", "write `train: {steps: N}`, where `optrush plan CONFIG --solve tokens=1000000` finds `N`"),
])  # fmt: skip
def test_a_key_that_is_elsewhere_is_found(key, do):
    text = "{model: tiny, objective: sft, data: {sample: recipes}, output: out}"
    with pytest.raises(ConfigError) as found:
        parse_config(text, "run.yaml", [f"{key}=1000000"])
    assert found.value.do.startswith(do)


def test_every_answer_names_keys_that_there_are():
    techniques = {t.name: {f.name for f in dataclasses.fields(t)} for t in ALL}
    rules = {key: rule for tool in TOOLS.values() for key, rule in tool.keys.items()}
    answers = {key: foreign_spelling(key, next(iter(rule.values or (1,)))) for key, rule in rules.items()}
    lines = {key: answer.split("`")[1] for key, answer in answers.items() if answer and answer.startswith("write `")}
    assert len(lines) > 100
    for key, line in lines.items():
        ((section, fields),) = yaml.safe_load(line.partition(" (")[0].partition(", where")[0]).items()
        if section == "with":
            assert all(set(options) <= techniques[name] for name, options in fields.items()), key
        elif isinstance(fields, dict):
            assert set(fields) <= set(yaml_keys(Config, (section, "x"))), key
        else:
            assert section in Config.model_fields, key


@pytest.mark.parametrize(("path", "objective", "more", "too_long"), [
    ("book.txt", "pretrain", "", "split"), ("[a.txt, {path: b.txt.gz, weight: 2}]", "pretrain", "", "split"),
    ("[a.txt, b.jsonl]", "pretrain", "", "error"), ("book.txt", "pretrain", ", too_long: drop", "drop"),
    ("book.txt", "sft", "", "error"),
])  # fmt: skip
def test_text_files_are_split_in_pre_training(path, objective, more, too_long):
    """A whole book is one document: no row is as long."""
    text = f"model: tiny\nobjective: {objective}\ndata: {{path: {path}{more}}}\noutput: out\n"
    config = parse_config(text, "run.yaml")
    assert config.data.too_long == too_long and parse_config(dump_config(config), "run.yaml") == config


def test_a_revision_is_of_a_hub_id(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.append((name, how)) or tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    locate(run(sets=["model.path=org/name", "model.revision=v2"]), weights=False)
    assert asked[0][0] == "org/name" and asked[0][1]["revision"] == "v2"
    with pytest.raises(ConfigError, match="not a hub id"):
        locate(run(sets=["model.revision=v2"]))
