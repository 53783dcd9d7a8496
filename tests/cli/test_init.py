"""`optrush init`: a YAML that parses to what was said, that `train` takes, and that says what every block means."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from meshes import further
from optrush import hardware
from optrush.config import SECTIONS, Config, parse_config, parse_yaml
from optrush.decide import decide
from optrush.errors import ConfigError
from optrush.planner import init_config, search
from optrush.planner.init_config import InitRequest, compose
from optrush.technique import instantiate
from optrush.techniques import ALL
from sights import write_base

from clirun import edited, write_rows

SMALLEST = init_config.SMALLEST
SAMPLE = ("--model", "tiny", "--data", "sample:recipes")
CLASSES = {c.name: c for c in ALL}


def written(file="train.yaml"):
    return parse_config(Path(file).read_text("utf-8"), file)


def refused(found, *says, file="train.yaml"):
    """Exit code 2, three lines, every fragment in them, and no file."""
    assert found.code == 2, found
    assert [line[:7] for line in found.err.splitlines()[-3:]] == ["asked: ", "found: ", "do:    "], found.err
    for fragment in says:
        assert fragment in found.err, f"{fragment!r} is not in\n{found.err}"
    assert found.out == "" and not Path(file).exists()


class Typed(io.StringIO):
    """A person at a terminal."""

    def isatty(self) -> bool:
        return True


# --- what is written


def test_it_trains(call, here):
    """As it stands, but for its length."""
    found = call("init", *SAMPLE)
    assert found.code == 0, found.err
    assert found.out.splitlines() == ["optrush train train.yaml --dry-run", "optrush train train.yaml"]
    config = written()
    values = (config.model.path, config.objective, config.data.sample, config.output)
    assert values == ("tiny", "sft", "recipes", "runs/train")
    short = ["--set", "data.max_samples=20", "--set", "train.epochs=0.1"]
    trained = call("train", "train.yaml", *short)
    assert trained.code == 0, trained.err
    assert trained.out == "runs/train\n"


@pytest.mark.parametrize("objective", SECTIONS)
def test_every_objective(here, objective):
    """Its settings are in the text, and its rows are explained."""
    teacher = "tiny" if objective == "distill" else None
    begun = compose(InitRequest("tiny", objective, "sample:recipes", "new", teacher=teacher), "new.yaml")
    assert begun.config.objective == objective and getattr(begun.config, objective) is not None
    assert f"\n{objective}: {{" in begun.text and '{"prompt": ' in begun.text
    assert begun.config.data.too_long == ("drop" if teacher is None else "split")
    for other in (InitRequest("tiny", "distill", "sample:recipes", "new"),
                  InitRequest("tiny", "sft", "sample:recipes", "new", teacher="tiny")):  # fmt: skip
        with pytest.raises(ConfigError, match="teacher"):
            compose(other, "new.yaml")


def test_the_objective_is_suggested_by_the_rows(call, here):
    write_rows(here / "text.jsonl", [{"text": "Stir well."}])
    assert call("init", "--model", "tiny", "--data", "text.jsonl").code == 0
    config = written()
    assert config.objective == "pretrain" and config.data.eval is None, "one row is not halved"
    assert "# eval: 0.1" in Path("train.yaml").read_text()
    assert call("init", "--model", "tiny", "--data", "text.jsonl", "--objective", "sft", "--force").code == 0
    assert written().objective == "sft"


ASKED, ANSWERED = ({"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "It is 1"})
OTHER, TALK = {**ANSWERED, "content": "It is 2"}, [ASKED, ANSWERED]
KINDS: dict[str, tuple[str, str]] = {
    "completion.jsonl": ('{"prompt": "What is 1?", "completion": " It is 1"}', "sft"),
    "turns.jsonl": (json.dumps({"prompt": [ASKED], "completion": [ANSWERED]}), "sft"),
    "completion.csv": ("prompt,completion\nWhat is 1?, It is 1", "sft"),
    "completion.json": ('[{"prompt": "What is 1?", "completion": " It is 1"}]', "sft"),
    "instruction.jsonl": ('{"instruction": "What is 1?", "output": "It is 1"}', "sft"),
    "share.jsonl": ('{"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "1"}]}', "sft"),
    "pair.jsonl": ('{"prompt": "What is 1?", "chosen": " 1", "rejected": " 2"}', "dpo"),
    "judged.jsonl": ('{"prompt": "What is 1?", "completion": " It is 1", "label": true}', "kto"),
    "both.jsonl": ('{"instruction": "1?", "output": "It is 1", "text": "1? It is 1"}', "sft"),
    "twice.jsonl": (json.dumps({"messages": TALK, "chosen": TALK, "rejected": [ASKED, OTHER]}), "dpo"),
    "text.jsonl": ('{"text": "What is 1? It is 1"}', "pretrain"),
    "text.txt": ("What is 1? It is 1", "pretrain"),
}


@pytest.mark.parametrize("name", KINDS)
def test_only_texts_are_learnt_whole(name, here):
    text, objective = KINDS[name]
    (here / name).write_text(f"{text}\n")
    assert init_config.check_data(name) == objective


BOOK = "".join(f"Chapter {i} of the tale.\nIt goes on.\n\n" for i in range(20))


@pytest.mark.parametrize(("name", "text", "text_rows", "eval_"), [
    ("book.txt", BOOK, "paragraph", 0.1), ("book.md", BOOK.replace("\n", "\r\n"), "paragraph", 0.1),
    ("book.txt.gz", BOOK, "paragraph", 0.1), ("lines.txt", "Stir well.\n" * 50, "file", None),
    ("quotes.csv", 'text\n"' + "Stir\n" * 20 + '"\n', None, None),
    ("many.csv", "text\n" + "Stir well.\n" * 20, None, 0.1),
    ("many.json", json.dumps([{"text": "Stir well."}] * 20), None, 0.1),
    ("few.json", json.dumps([{"text": "Stir well."}], indent=0).replace("{", "\n" * 20 + "{"), None, None),
])  # fmt: skip
def test_rows_are_counted_as_they_are_trained(name, text, text_rows, eval_, call, here):
    """Not lines: a held-out part of one row would be refused by `train`."""
    raw = text.encode()
    (here / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert call("init", "--model", "tiny", "--data", name, "--seq", "128").code == 0
    config, tree = written(), yaml.safe_load(Path("train.yaml").read_text())
    assert (tree["data"].get("text_rows"), config.data.eval) == (text_rows, eval_)
    found = call("train", "train.yaml", "--dry-run")
    assert found.code == 0, found.err


def test_a_shape_on_random_tokens(call):
    found = call("init", "--model", "shape:llama-3.2-1b", "--data", "random:64", "--hardware", "h200")
    assert found.code == 0, found.err
    config = written()
    assert config.model.shape == "llama-3.2-1b" and config.data.random == 64 and config.train.steps == 100
    fastest = ["amp", "fused-adamw", "attention", "fused-kernels", "compile", "fused-loss"]
    assert list(config.with_) == fastest, "no packing of full rows"
    assert config.batch.micro_tokens is not None and config.batch.micro_tokens > 2048, "several rows fit"


def test_every_block_says_what_it_is(call):
    """A comment stands over every key at the top, each technique has its summary, no line is long."""
    assert call("init", *SAMPLE).code == 0
    lines = Path("train.yaml").read_text().splitlines()
    assert max(map(len, lines)) <= 120
    for i, line in enumerate(lines):
        if re.match(r"[a-z]+:", line):
            assert lines[i - 1].startswith("# "), line
        if re.match(r"  [a-z_]+: \S", line) and i < lines.index("with:"):
            inside_data = lines[i - 1].startswith(("data:", "#"))
            assert "  # " in line or inside_data, line
    for name in written().with_:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {name}: "))
        assert lines[at - 1] == f"  # {CLASSES[name].summary}"


def test_defaults_are_those_of_the_documentation(call):
    """Of how often what happens, whose defaults are words."""
    assert call("init", *SAMPLE).code == 0
    contract = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    found = re.findall(r"  (\w+_every): .*\(default: (.*)\)", Path("train.yaml").read_text())
    assert [key for key, _ in found] == ["log_every", "eval_every", "save_every"]
    for key, default in found:
        assert f"| `train.{key}` | {default} |" in contract


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=24)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=TEXTS, output=TEXTS, objective=st.sampled_from(["sft", "pretrain"]), sample=st.booleans(),
    machine=st.sampled_from(["auto", "cpu", "t4", "a100-40", "h200", "2xh200"]),
    withs=st.lists(st.sampled_from(["recompute:every=2", "bf16", "attention:impl=masked", "fused-loss:chunk=64"]),
        unique=True),
)  # fmt: skip
def test_the_text_says_what_the_flags_said(name, output, objective, sample, machine, withs, here):
    """Whatever names are: the text parses, to these values, as plain YAML too, and can be prepared."""
    folder = here / "rows"
    folder.mkdir(exist_ok=True)
    path = folder / (name.replace("/", "_").replace(".", "_") + ".jsonl")
    shutil.copyfile(here / "chat.jsonl", path)
    data = "sample:recipes" if sample else f"rows/{path.name}"
    output = "runs/" + output.replace(".", "_")
    gone = ["bf16"] if machine == "t4" else []
    asked = [w for w in withs if w not in gone] + (["ddp"] if machine.startswith("2x") else [])
    begun = compose(InitRequest("tiny", objective, data, output, machine, asked), f"{name}.yaml")
    path.unlink()
    config = parse_config(begun.text, "written")
    assert config == begun.config
    assert (config.objective, config.output, config.model.path) == (objective, output, "tiny")
    assert (config.data.sample, config.data.path) == (("recipes", None) if sample else (None, data))
    for flag in asked:
        technique, _, option = flag.partition(":")
        assert technique in config.with_
        if option:
            key, _, value = option.partition("=")
            assert str(config.with_[technique][key]) == value
    owned = [part for t in instantiate(ALL, config.with_) for part in t.claims]
    assert len(owned) == len(set(owned)), "nothing that was asked for clashes with what was chosen"
    device, many = hardware.parse_hardware(machine)
    decide(config, ranks=many, device=device)
    assert yaml.safe_load(begun.text)["output"] == output
    assert set(parse_yaml(begun.text, "written")[0]) == set(yaml.safe_load(begun.text))


@pytest.mark.parametrize(
    "text",
    ["~", "null", "1e-5", "-", "@x", "a: b", "a #b", "'", '"', "x\ny", "\x7f", "😀", "...", "---", "0x1f", "yes"],
)
def test_odd_names_come_back(text):
    from optrush.planner.init_config import _text

    assert yaml.safe_load(f"k: {_text(text)}\n") == {"k": text}
    assert yaml.safe_load(f"k: {{a: {_text(text)}, b: 1}}\n") == {"k": {"a": text, "b": 1}}
    assert parse_yaml(f"k: {_text(text)}\n", "")[0] == {"k": text}


def test_preferences_of_llama_factory(call, here):
    row = {"conversations": [{"from": "human", "value": "q"}]}
    row |= {key: {"from": "gpt", "value": key} for key in ("chosen", "rejected")}
    Path("pairs.jsonl").write_text((json.dumps(row) + "\n") * 40)
    found = call("init", "--model", "tiny", "--data", "pairs.jsonl", "--objective", "dpo")
    assert found.code == 0 and written().objective == "dpo", found.err
    assert call("train", "train.yaml", "--dry-run").code == 0


# --- what is chosen


@pytest.mark.parametrize(("machine", "chosen"), [
    ("cpu", {"fused-adamw": {}, "attention": {}, "packing": {}}),
    ("t4", {"amp": {"dtype": "fp16"}, "fused-adamw": {}, "attention": {}, "fused-kernels": {}, "packing": {}}),
    ("h100", {"amp": {}, "fused-adamw": {}, "attention": {"impl": "varlen"}, "fused-kernels": {}, "cuda-graphs": {},
        "packing": {}}),
])  # fmt: skip
def test_techniques_suit_the_machine(machine, chosen, call):
    assert call("init", *SAMPLE, "--hardware", machine).code == 0
    assert written().with_ == chosen


BIG = ("--model", "shape:llama-3.1-8b", "--data", "random", "--yes")


@pytest.mark.parametrize(
    ("machine", "flags"),
    further([("24GiB", ("--method", "qlora")), ("4090", ()), ("t4", ("--with", "lora", "--with", "nf4"))], 1),
)
def test_what_does_not_fit_is_made_smaller(call, machine, flags):
    """What is fast and does not fit gives way to another method."""
    assert call("init", *BIG, "--hardware", machine, *flags, "--force").code == 0
    config = written()
    predicted = search.predict(config, machine)
    assert predicted.fits and "lora" in config.with_ and config.optim.lr > 1e-4, machine
    assert machine != "24GiB" or "nf4" in config.with_


@pytest.mark.parametrize(
    ("shape", "machine", "method", "do"),
    further([("70b", "3070", (), "other hardware: "), ("8b", "4090", ("--method", "full"), "method: ")], 1),
)
def test_what_fits_in_no_way_is_refused(call, shape, machine, method, do):
    """Nothing is written."""
    given = ("--model", f"shape:llama-3.1-{shape}", *BIG[2:], "--hardware", machine, *method)
    refused(call("init", *given), "nothing fits", do)


def test_what_is_asked_for_displaces_what_is_chosen(call):
    """`bf16` owns what `amp` would, `attention` brings its own options; the order is the ladder's."""
    asked = ("--with", "bf16", "--with", "recompute:every=2", "--with", "attention:impl=masked")
    assert call("init", *SAMPLE, "--hardware", "h200", *asked).code == 0
    config = written()
    assert "amp" not in config.with_ and config.with_["recompute"] == {"every": 2}
    assert config.with_["attention"] == {"impl": "masked"}
    assert list(config.with_) == [c.name for c in ALL if c.name in config.with_]


def test_what_cannot_run_here_is_left_out(call, monkeypatch):
    """`compile` on this machine, a GPU without triton; for another machine nobody looks."""
    from optrush.cli import setup

    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h200"]])
    monkeypatch.setattr(setup, "library", lambda name: None)
    long = ("--model", "shape:llama-3.2-1b", "--data", "random:100000", "--yes")
    assert call("init", *long).code == 0
    assert "compile" not in written().with_ and "amp" in written().with_
    assert call("init", *long, "--hardware", "h200", "--force").code == 0
    assert "compile" in written().with_


def test_several_ranks(call):
    found = call("init", *SAMPLE, "--with", "ddp")
    assert found.code == 0, found.err
    assert found.out.splitlines()[1] == "optrush train train.yaml --ranks 2"
    assert "#   optrush train train.yaml --ranks 2\n" in Path("train.yaml").read_text()
    trained = call("train", "train.yaml", "--ranks", "2", "--dry-run", "--json")
    assert trained.code == 0 and json.loads(trained.out)["data"]["ranks"] == 2


@pytest.mark.parametrize("machine", further(["2x8xh100:infiniband", "3x4090", "8xh100"], 1))
def test_hardware_of_several_gpus_needs_no_technique_to_be_named(call, machine):
    model = ["--model", "shape:llama-3.1-8b", "--data", "random", "--hardware", machine, "--yes"]
    found = call("init", *model)
    assert found.code == 0, found.err
    _, ranks = hardware.parse_hardware(machine)
    assert f"optrush train train.yaml --ranks {ranks}" in found.out
    assert {"ddp", "fsdp"} & written().with_.keys()
    assert search.predict(written(), machine).fits
    model[1] = "shape:llama-3.2-1b"
    assert call("init", *model, "--with", "recompute:every=2", "--with", "adam8bit", "--force").code == 0
    assert written().with_["recompute"] == {"every": 2} and "adam8bit" in written().with_
    decide(written(), ranks=ranks, device=hardware.parse_hardware(machine)[0])


def test_what_was_named_must_fit(call):
    """It stays in a searched set, so that a whole 70B model on each of eight cards is no file but an error."""
    named = ("--hardware", "8xh100", "--method", "full", "--with", "ddp")
    found = call("init", "--model", "shape:llama-3.1-70b", "--data", "random", *named)
    assert found.code == 2 and "ddp in a run of shape:llama-3.1-70b on 8xh100" in found.err
    assert "with that it does not fit: predicted to need" in found.err and "--method auto" in found.err
    assert not Path("train.yaml").exists()


def test_rows_are_no_longer_than_the_model(call, model, here):
    edited(model, here / "m", max_position_embeddings=128)
    assert call("init", "--model", "m", "--data", "chat.jsonl").code == 0
    assert written().batch.seq == 128


def test_a_model_that_runs_through_transformers(call, here):
    """Its blocks are traced, and the file says what it is predicted to need."""
    (here / "g").mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 256, "n_layer": 2,
              "vocab_size": 2048}  # fmt: skip
    (here / "g" / "config.json").write_text(json.dumps(config))
    found = call("init", "--model", "g", "--data", "chat.jsonl", "--hardware", "h200")
    assert found.code == 0, found.err
    run = written()
    assert run.batch.seq == 256 and run.batch.micro_tokens and run.batch.micro_tokens > 256
    assert "attention" in run.with_ and "amp" in run.with_
    assert "predicted to need" in Path("train.yaml").read_text()


TURNS = ("<|im_start|>", "<|im_end|>")
LORA = ("--with", "lora")


def without_template(model, folder, turns=True):
    """Write a folder like `model`, whose tokenizer has no chat template, nor, without `turns`, the tokens of ChatML."""
    from optrush.data.tokenizer import open_tokenizer

    edited(model, folder)
    tokenizer = open_tokenizer(model)
    tokenizer.chat_template = None
    for file in [*folder.glob("*token*"), *folder.glob("*.jinja")]:
        file.unlink()
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*token*"):
        text = file.read_text("utf-8")
        file.write_text(text if turns else text.replace("<|im_", "<|old_"), "utf-8")


@pytest.mark.parametrize(
    ("turns", "data", "flags"), [(False, "chat.jsonl", ()), (True, "sample:recipes", ()), (False, "pairs.jsonl", LORA)]
)
def test_conversations_on_a_model_without_a_chat_template(turns, data, flags, call, model, here):
    """ChatML is written, with what it needs, so that `train` takes the text as it stands."""
    without_template(model, here / "base", turns)
    pair = {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [OTHER]}
    write_rows(here / "pairs.jsonl", [pair] * 12)
    found = call("init", "--model", "base", "--data", data, "--seq", "256", *flags)
    assert found.code == 0, found.err
    config = written()
    assert config.model.path == "base" and config.model.chat_template == "chatml"
    assert config.model.add_tokens == (() if turns else TURNS)
    assert "for a tokenizer without one" in Path("train.yaml").read_text()
    short = ("--set", "train.steps=1", "--set", "train.export=false") if flags else ("--dry-run",)
    found = call("train", "train.yaml", *short)
    assert found.code == 0, found.err


def test_a_chat_template_only_where_it_is_needed(call, model, here):
    """Not for texts and random tokens, nor where the tokenizer has one; `train` names the built-in one."""
    without_template(model, here / "base")
    write_rows(here / "random.jsonl", [{"prompt": "1?", "completion": " 1"}])
    write_rows(here / "both.jsonl", [{"instruction": "1?", "output": "1", "text": "1? 1"}])
    for data, more in (("both.jsonl", ("--objective", "pretrain")), ("random", ()), ("random.jsonl", ())):
        assert call("init", "--model", "base", "--data", data, *more, "--force").code == 0
        assert written().model == Config.model_validate({**yaml.safe_load(SMALLEST), "model": "base"}).model
    assert "packing" in written().with_, "a file may be named like random tokens"
    assert call("init", "--model", str(model), "--data", "chat.jsonl", "--force").code == 0
    assert written().model.chat_template is None
    (here / "own.jinja").write_text("{{ messages }}")
    own = ("--set", "model.chat_template=own.jinja")
    without_template(model, here / "bare", turns=False)
    assert call("init", "--model", "bare", "--data", "chat.jsonl", *own, "--output", "x", "--force").code == 0
    assert (written().model.chat_template, written().model.add_tokens) == ("own.jinja", ())
    assert call("init", "--model", str(model), "--data", "chat.jsonl", "--force").code == 0
    found = call("train", "train.yaml", "--set", "model.path=base")
    assert found.code == 2 and "`model.chat_template: chatml`" in found.err and "FILE.jinja" in found.err, found.err


SETS = {
    "data.columns": {"question": "instruction", "answer": "output"}, "data.max_samples": 30, "data.eval": 0.2,
    "data.too_long": "drop", "optim.betas": [0.8, 0.9], "optim.lr": 2e-5, "optim.clip": None, "train.steps": 3,
    "train.best": False, "train.eval_every": None, "seed": 7, "tracker": "wandb", "model.dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("flag", ["data.text_rows=file", "data.max_samples=3", "data.eval=null"])
def test_values_of_set_decide_what_is_held_out(flag, call, here):
    (here / "text.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(40)))
    assert call("init", "--model", "tiny", "--data", "text.txt", "--set", flag).code == 0
    tree = yaml.safe_load(Path("train.yaml").read_text())
    assert tree["data"].get("eval") is None and "eval_every" not in tree["train"]


def test_one_length_of_a_run(call, here):
    found = call("init", *SAMPLE, "--set", "train.steps=5", "--epochs", "2")
    refused(found, "--epochs with --set train.steps", "give one of them")


def test_values_of_set_are_in_the_text(call, here):
    """Whatever the key: those that are explained, others, and options of techniques; in what is chosen, too."""
    write_rows(here / "qa.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(40)])
    flags = [part for key, value in SETS.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    found = call("init", "--model", "tiny", "--data", "qa.jsonl", *flags, "--with", "lora", "--set", "with.lora.rank=4")
    assert found.code == 0, found.err
    tree = yaml.safe_load(Path("train.yaml").read_text())
    assert (tree["objective"], tree["with"]["lora"], tree["model"]["path"]) == ("sft", {"rank": 4}, "tiny")
    config = written()
    for key, value in SETS.items():
        section, _, name = key.partition(".")
        assert (tree[section][name] if name else tree[section]) in (value, str(value)), key
    assert config.optim.lr == 2e-5 and config.tracker is not None and "epochs" not in tree["train"]
    assert call("train", "train.yaml", "--dry-run", "--set", "tracker=null").code == 0


@pytest.mark.parametrize(("flag", "says"), [
    ("data.colums={a: text}", ("`data.colums`", "did you mean `columns`?")),
    ("optim.lr=fast", ("--set optim.lr=fast: `optim.lr`", "'fast'")), ("seed", ("no `key=value`",)),
    ("output=there", ("has a flag for `output`", "give --output")),
    ("batch.seq=64", ("has a flag for `batch.seq`", "give --seq")),
    ("batch.micro_tokens=64", ("chooses `batch.micro_tokens`", "in the file that is written")),
    ("optim={lr: 1}", ("the whole of `optim`", "--set optim.KEY=VALUE")), ("dpo.beta=0.2", ("dpo",)),
])  # fmt: skip
def test_what_is_not_set(flag, says, call):
    refused(call("init", *SAMPLE, "--set", flag), *says)


@pytest.mark.parametrize(("row", "flag"), [
    ({"question": "1?", "answer": "1"}, "--set 'data.columns={question: instruction, answer: output}'"),
    ({"speech": "1"}, "--set 'data.columns={KEY: text}'"),
    ({"prompt": "1?", "completion": "1", "thought": "x"}, "--set 'data.columns={thought: ignore}'"),
])  # fmt: skip
def test_rows_of_other_names_are_answered_with_a_flag(row, flag, call, here):
    """Which is taken as it stands."""
    write_rows(here / "odd.jsonl", [row] * 20)
    refused(call("init", "--model", "tiny", "--data", "odd.jsonl"), flag)
    given = shlex.split(flag.replace("KEY", "speech"))
    found = call("init", "--model", "tiny", "--data", "odd.jsonl", *given)
    assert found.code == 0 and call("train", "train.yaml", "--dry-run").code == 0, found.err


# --- a terminal


def test_questions(call, monkeypatch, here):
    """Each with a line of help and a default; a wrong answer is asked again with the reason."""
    monkeypatch.setattr(sys, "stdin", Typed("\nno.jsonl\nchat.jsonl\nstf\n\nmine\nloar\nlora\n256\n3\n"))
    found = call("init")
    assert found.code == 0, found.err
    config = written()
    values = (config.model.path, config.data.path, config.objective, config.output)
    assert values == ("tiny", "chat.jsonl", "sft", "mine")
    assert "lora" in config.with_ and config.batch.seq == 256 and config.train.epochs == 3
    for said in ("`tiny` is built in", "model [tiny]:", "JSON Lines file", "no such file", "data [sample:recipes]:",
                 "did you mean `sft`?", "objective [sft]:", "new or empty", "output [runs/train]:",
                 "did you mean `lora`?", "method [auto]:", "seq [auto]:", "epochs [1]:"):  # fmt: skip
        assert said in found.err, said
    shown = [line.strip() for line in found.out.splitlines()]  # questions leave a blank on standard output
    assert shown == ["optrush train train.yaml --dry-run", "optrush train train.yaml"]


def test_only_what_is_missing_is_asked(call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typed("\n"))
    found = call("init", *SAMPLE, "--objective", "pretrain", "--method", "full", "--seq", "512", "--epochs", "1")
    assert found.code == 0 and "model [" not in found.err and "output [runs/train]" in found.err
    assert written().objective == "pretrain"
    monkeypatch.setattr(sys, "stdin", Typed(""))
    assert call("init", "--yes", "--force").code == 0, "--yes prompts for nothing on a terminal either"
    assert (written().model.path, written().data.sample) == ("tiny", "recipes")


def test_the_output_that_is_suggested_is_free(call, here):
    (here / "runs" / "train").mkdir(parents=True)
    assert call("init", *SAMPLE).code == 0
    assert written().output == "runs/train-2"


# --- what is refused

CASES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no model": (["--data", "chat.jsonl"], ("without a terminal", "no --model", "give --model, or --yes")),
    "no data": (["--model", "tiny"], ("without a terminal", "no --data", "give --data, or --yes")),
    "empty model": (["--model", "", "--data", "chat.jsonl"], ("the model ''", "no name", "`tiny`")),
    "no such model": (["--model", "./none", "--data", "chat.jsonl"], ("the model ./none", "no such folder")),
    "no such shape": (["--model", "shape:llama", "--data", "random"], ("model.shape: llama", "no such shape")),
    "no such file": (["--model", "tiny", "--data", "no.jsonl"], ("no.jsonl", "no such file", "check the path")),
    "a bad first row": (["--model", "tiny", "--data", "bad.jsonl"], ("bad.jsonl:1", "no known format")),
    "no such sample": (["--model", "tiny", "--data", "sample:jokes"], ("the data sample:jokes", "take sample:recipes")),
    "no number": (["--model", "tiny", "--data", "random:x"], ("the data random:x", "no number", "random:4096")),
    "no such objective": ([*SAMPLE, "--objective", "stf"], ("the objective stf", "did you mean `sft`?")),
    "sft of random": (["--model", "tiny", "--data", "random", "--objective", "sft"], ("`objective: sft` on", "random")),
    "text on a shape": (["--model", "shape:llama-3.2-1b", "--data", "chat.jsonl"], ("a shape has no tokenizer",)),
    "no such technique": ([*SAMPLE, "--with", "pakcing"], ("the technique `pakcing`", "did you mean `packing`?")),
    "dpo of chats": (["--model", "tiny", "--data", "chat.jsonl", "--objective", "dpo"], ("1 is not a pair",)),
    "sft of pairs": (["--model", "tiny", "--data", "pairs.jsonl", "--objective", "sft"], ("pairs.jsonl:1",)),
    "grpo of text": (["--model", "tiny", "--data", "text.jsonl", "--objective", "grpo"], ("text.jsonl:1",)),
    "kto without labels": (
        ["--model", "tiny", "--data", "judged.jsonl", "--objective", "kto"],
        ("no 'label'", 'use rows {"prompt": ..., "completion": ..., "label": true}', "'data.columns={KEY: label}'"),
    ),
    "output full": ([*SAMPLE, "--output", "full"], ("the output full", "not empty", "name another folder")),
    "output a file": ([*SAMPLE, "--output", "chat.jsonl"], ("the output chat.jsonl", "a file, not a folder")),
    "output empty": ([*SAMPLE, "--output", ""], ("the output ''", "no name")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name, call, here):
    flags, says = CASES[name]
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("years of work")
    write_rows(here / "bad.jsonl", [{"prompt": "Hm"}])
    write_rows(here / "pairs.jsonl", [{"prompt": "Hm", "chosen": " a", "rejected": " b"}])
    write_rows(here / "text.jsonl", [{"text": "Stir well."}])
    write_rows(here / "judged.jsonl", [{"prompt": "Hm", "completion": " a", "good": True}])
    refused(call("init", *flags), *says)


def test_prompts_without_an_answer_need_a_reward_without_one(call, here):
    write_rows(here / "prompts.jsonl", [{"prompt": f"Name {i} fruits"} for i in range(12)])
    flags = ("--model", "tiny", "--data", "prompts.jsonl", "--objective", "grpo")
    found = call("init", *flags)
    refused(found, "prompts.jsonl:1", "a prompt without the answer", "regex, length or FILE.py:FUNCTION")
    assert call("init", *flags, *shlex.split(found.err.partition("such as `")[2].partition("`")[0])).code == 0
    assert [rule.use for rule in written().grpo.rewards] == ["length"]


def test_a_file_in_the_way(call, here):
    (here / "train.yaml").write_text("mine: 1\n")
    found = call("init", *SAMPLE)
    assert found.code == 2 and "it exists" in found.err and "--force" in found.err
    assert (here / "train.yaml").read_text() == "mine: 1\n"
    found = call("init", *SAMPLE, "--data", "no.jsonl", "--force")
    assert found.code == 2 and (here / "train.yaml").read_text() == "mine: 1\n", "only a good one replaces it"
    assert call("init", *SAMPLE, "--force").code == 0
    assert written().model.path == "tiny"


def test_a_file_that_cannot_be(call, here):
    refused(
        call("init", "no/where.yaml", *SAMPLE), "to write no/where.yaml", "no is not a folder", file="no/where.yaml"
    )
    found = call("init", ".", *SAMPLE)
    assert found.code == 2 and "a folder" in found.err
    name = "x" * 300 + ".yaml"
    found = call("init", name, *SAMPLE)
    assert found.code == 2 and "File name too long" in found.err


def test_rows_are_counted_up_to_a_limit(here, monkeypatch):
    monkeypatch.setattr(init_config, "COUNTED", 20)
    row = (here / "chat.jsonl").read_text().splitlines()[0]
    (here / "many.jsonl").write_text(f"{row}\n" * 100)
    begun = compose(InitRequest("tiny", "sft", "many.jsonl", "out"), "f.yaml")
    assert begun.config.data.eval == 0.02, "a large file holds less out"


# --- a folder of images with captions


def folder_of_images(here, form):
    folder = here / "pictures"
    folder.mkdir()
    names = ["a.png", "b.JPG", "c.webp"]
    for n, name in enumerate(names):
        Image.new("RGB", (40, 30 + n), "red").save(folder / name)
        if form == "txt":
            (folder / name).with_suffix(".txt").write_text(f"red number {n}\n", encoding="utf-8-sig")
    listed = [{"file_name": name, "text": f"red number {n}"} for n, name in enumerate(names)]
    if form == "jsonl":
        more = {"question": "Which ?", "note": "one\u2028line"}
        lines = [json.dumps({**one, **more}, ensure_ascii=False) + "\n" for one in listed]
        (folder / "metadata.jsonl").write_text("".join(lines), encoding="utf-8-sig")
    if form == "csv":
        lines = ["file_name,text", *(f"{one['file_name']},{one['text']}" for one in listed)]
        (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    (folder / "README.txt").write_text("what these are")
    return folder


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv"])
def test_a_folder_of_images_with_captions(form, call, here):
    folder, base = folder_of_images(here, form), here / "eyes"
    write_base(base, "qwen3_vl")
    flags = ["--model", str(base), "--data", str(folder), "--hardware", "cpu", "--seq", "256"]
    assert call("init", "see.yaml", *flags).code == 0
    rows = [json.loads(line)["messages"] for line in (here / "see.jsonl").read_text().splitlines()]
    assert [row[1]["content"] for row in rows] == [f"red number {n}" for n in range(3)]
    images = [row[0]["content"][0]["image"] for row in rows]
    assert images == ["pictures/a.png", "pictures/b.JPG", "pictures/c.webp"]
    asked = "Which ?" if form == "jsonl" else "Describe this image."
    assert {row[0]["content"][1]["text"] for row in rows} == {asked}
    config = parse_config((here / "see.yaml").read_text(), "see.yaml")
    assert config.objective == "sft" and config.data.too_long == "truncate"
    dry = call("train", "see.yaml", "--dry-run")
    assert dry.code == 0 and "image 40 x 30" in dry.out, dry.err
    (here / "see.yaml").unlink()
    again = call("init", "see.yaml", *flags)
    assert again.code == 2 and "see.jsonl" in again.err and "it exists" in again.err
    assert call("init", "see.yaml", *flags, "--force").code == 0


@pytest.mark.parametrize(("break_", "found", "do"), [
    (lambda f: (f / "a.txt").unlink(), "1 of 3 have none: a.png", "write NAME.txt beside NAME.jpg"),
    (lambda f: (f / "a.txt").write_text(" "), "a.txt is empty", "write a caption"),
    (lambda f: (f / "a.txt").write_bytes(b"\xff\xfe"), "a.txt is not UTF-8", "save it as UTF-8"),
    (lambda f: (f / "metadata.jsonl").write_text('{"file_name": "a.png"}'), "jsonl:1 has no text in one of text",
        "give"),
    (lambda f: (f / "metadata.jsonl").write_text('\n{"text": "a"}'), "jsonl:2 has no text in one of file_name", "give"),
    (lambda f: (f / "metadata.jsonl").write_text('{"file_name": "z.png", "text": "a"}'),
        "names z.png, which does not exist", "fix the name"),
    (lambda f: (f / "metadata.jsonl").write_text("nonsense"), "jsonl:1 is not a JSON object", "fix that line"),
    (lambda f: (f / "metadata.csv").write_text("file_name,text\n"), "no image", "name a folder"),
    (lambda f: (f / "metadata.csv").write_text("file_name,text\n" + 'a.png,"' + "b\n" * 70_000),
        "larger than field limit", "close its quotes"),
    (lambda f: (f / "metadata.csv").write_text("file_name,text\na.png,a\n"),
        "2 of 3 are not in metadata.csv: b.JPG, c.webp", "list them in metadata.csv"),
    (lambda f: [(f / os.fsdecode(b"\xff" + end)).write_text("a") for end in (b".png", b".txt")],
        "udcff.png' is not UTF-8", "rename that file"),
    (lambda f: f, "model_type 'llama', whose images are not read", "take a base of one of qwen2_5_vl"),
])  # fmt: skip
def test_captions_that_are_none(break_, found, do, call, here):
    csv.field_size_limit(128 << 10)  # the module's own: reading rows raises it for the whole process
    folder = folder_of_images(here, "txt")
    break_(folder)
    made = call("init", "see.yaml", "--model", "tiny", "--data", str(folder), "--hardware", "cpu")
    assert made.code == 2 and found in made.err and do in made.err
    assert not (here / "see.yaml").exists() and not (here / "see.jsonl").exists()
