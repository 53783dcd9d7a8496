"""`optrush train --dry-run`: what a run would do and cost, from its real data, without a model and without a trace."""

import io
import json
import os
import re
import shutil
import sys
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from optrush import console
from optrush.config import parse_config
from optrush.data.preview import CLOSE, OPEN
from optrush.errors import ConfigError
from optrush.models import weights
from optrush.planner import search
from optrush.planner.ledger import Item
from optrush.planner.sets import Prediction

from clirun import base, document_of, edited, metrics

told = document_of("train", "--dry-run")

MARKED = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def shown(call, *arguments):
    found = call("train", *arguments, "--dry-run")
    assert found.code == 0, found.err
    return found.out


def files(folder):
    return {(p, p.stat().st_mtime_ns) for p in folder.rglob("*")}


@pytest.mark.parametrize(("sets", "said"), [
    (["optim.warmup=1000"], "optim.warmup: 1000 steps, in a run of "),
    (["data.eval=null", "train.eval_every=5"], "train.eval_every does nothing"),
    (["train.steps=8", "train.epochs=3"], "train.epochs does nothing: train.steps sets the length, 8 steps"),
    (["train.epochs=1"], " of 256 tokens: lower batch.tokens"),
    (["train.epochs=8"], "raise train.epochs (40 for 100 from random weights)"),
])  # fmt: skip
def test_what_does_nothing_is_said(call, here, write, sets, said):
    """Before the run; and in it, where that is short; of a run whose settings all act there is no note."""
    config = write(train={"epochs": 16})
    given = [word for value in sets for word in ("--set", value)]
    (note,) = told(call, config, *given)["notes"]
    assert said in note
    if "train.epochs=1" in sets:
        assert f"notes\n  {note}\n" in shown(call, config, *given)
        assert f"note       {note}\n" in call("train", config, *given).err
        assert told(call, config)["notes"] == [] and "\nnotes\n" not in shown(call, config)


@pytest.fixture
def predicted(monkeypatch):
    """Puts a prediction in the plan's place."""

    def put(**changes):
        values: dict[str, Any] = {
            "peak_bytes": 4 << 30, "memory_kind": "cuda_allocated", "phase": "head", "device": "NVIDIA H200",
            "capacity_bytes": 8 << 30, "fits": True, "tokens_per_s": 1234.0, "basis": "datasheet",
            "lines": (Item("states.blocks", 1 << 30, "two"), Item("weights.blocks", 3 << 30, "one")),
        }  # fmt: skip
        found = Prediction(**{**values, **changes})
        monkeypatch.setattr(search, "predict", lambda *_, **__: found)

    return put


# --- it is dry


def test_nothing_is_written_and_no_model_is_made(call, write, here, cache, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a model")

    monkeypatch.setattr(weights.Folder, "rows", never)
    monkeypatch.setattr(torch.nn.Module, "__init__", never)
    config = write()
    before = files(here) | files(cache)
    assert "launch" in shown(call, config)
    assert files(here) | files(cache) == before


def test_it_says_what_the_run_then_does(call, write, here):
    """Steps, tokens and targets are those of metrics.jsonl, and the configuration is run.yaml's."""
    config = write(train={"epochs": 2.5})
    facts = told(call, config)
    assert call("train", config).code == 0
    lines = [m for m in metrics(here / "out") if "loss" in m]
    d = facts["data"]
    assert d["steps"] == len(lines) and d["done"] == 0
    assert d["tokens"] == sum(m["tokens"] for m in lines)
    assert d["target_tokens"] == sum(m["target_tokens"] for m in lines)
    assert d["slots"] == 256 * len(lines) and d["fill"] == d["tokens"] / d["slots"]
    assert (d["documents"], d["held_out_documents"]) == (9, 3) and d["epochs"] == pytest.approx(2.5, abs=0.2)
    assert parse_config(json.dumps(facts["config"]), "facts") == parse_config(
        (here / "out" / "run.yaml").read_text(), "run.yaml"
    )


def test_the_disk_that_the_run_then_takes(call, write, here):
    """Weights and states to a per cent (headers, names and tokenizer are not counted)."""
    config = write(train={"epochs": 2, "save_every": 1, "keep": 2})
    disk = told(call, config)["disk"]
    assert disk["checkpoints"] == 3 and disk["keep"] == 2 and disk["folder"] == str(here)
    assert call("train", config).code == 0
    saved = [sum(f.stat().st_size for f in c.iterdir()) for c in (here / "out" / "checkpoints").glob("step-*")]
    assert len(saved) == 2
    assert disk["weights_bytes"] + disk["states_bytes"] == pytest.approx(saved[0], rel=0.01)
    assert disk["weights_bytes"] == pytest.approx((here / "out/model/model.safetensors").stat().st_size, rel=0.01)
    assert disk["needed_bytes"] == 3 * (disk["weights_bytes"] + disk["states_bytes"]) + disk["weights_bytes"]


def test_the_copy_of_a_save_in_the_background(call, write, predicted):
    """On a CPU it is a line of the memory, as large as a checkpoint; beside a GPU it is pinned host memory."""
    told_of = {mode: told(call, write(train={"epochs": 2, "save": mode})) for mode in ("sync", "async")}
    one, other = ({i["name"]: i["bytes"] for i in told_of[mode]["memory"]["lines"]} for mode in ("sync", "async"))
    disk = told_of["async"]["disk"]
    assert other.pop("saved copy") == disk["weights_bytes"] + disk["states_bytes"] and other == one
    predicted(host_bytes=3 << 30)
    assert "  and 3.00 GiB of pinned host memory" in shown(call, write())


@pytest.mark.parametrize(("save_every", "copies"), [(None, 1), (0.5, 2), (2, 3)])
def test_copies_on_the_disk(save_every, copies, call, write):
    """As many as are saved, at most `keep` and the one that is being written."""
    facts = told(call, write(train={"epochs": None, "steps": 10, "save_every": save_every}))
    assert facts["disk"]["checkpoints"] == copies


@pytest.mark.parametrize(("best", "eval_every", "copies"), [(True, 3, 4), (False, 3, 3), (True, None, 3)])
def test_copies_with_the_best_one(best, eval_every, copies, call, write):
    """It is kept beside the newest; where nothing is evaluated on the way, it is the last one."""
    train = {"epochs": None, "steps": 10, "save_every": 2, "eval_every": eval_every, "best": best, "export": best}
    disk = told(call, write(train=train))["disk"]
    assert disk["checkpoints"] == copies
    one = disk["weights_bytes"] + disk["states_bytes"]
    assert disk["needed_bytes"] == copies * one + disk["weights_bytes"] * best


def test_ranks_in_one_process(call, write):
    """Weights on the disk stay whole though each rank holds a share."""
    sizes = {"tokens": 512, "micro_tokens": 128}
    one = told(call, write(batch=sizes))
    two = told(call, write(batch=sizes), "--ranks", "2", "--with", "fsdp")
    assert two["data"]["ranks"] == 2 and two["data"]["micro_batches"] == 2 and one["data"]["micro_batches"] == 4
    assert two["data"]["steps"] == one["data"]["steps"]
    assert two["rows"] == one["rows"] and len(two["rows"]) > 1
    assert two["disk"]["weights_bytes"] == one["disk"]["weights_bytes"]
    assert two["launch"] == "optrush train run.yaml --ranks 2 --with fsdp"
    assert "══ row 1 · " in shown(call, "run.yaml", "--ranks", "2", "--with", "fsdp")


def test_under_a_launcher(call, write, monkeypatch):
    """The first of torchrun's processes speaks, the others are silent; the line is torchrun's."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [])
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    flags = ("--with", "ddp", "--set", "batch.tokens=512")
    facts = told(call, write(), *flags)
    assert facts["data"]["ranks"] == 4 and left == [0]
    assert facts["launch"] == (
        "torchrun --nnodes 2 --nproc-per-node 2 -m optrush train run.yaml --with ddp --set batch.tokens=512"
    )
    monkeypatch.setenv("RANK", "1")
    found = call("train", "run.yaml", *flags, "--dry-run")
    assert found.code == 0 and found.out == ""


# --- the rows


def test_rows_are_those_of_the_first_step(call, write, model, here):
    """Documents in packed order, targets exactly the assistant's words and their end; as `data show --packed` has
    them, whose own tests cover cutting, control characters and the end of a turn."""
    rows = [json.loads(line) for line in (here / "chat.jsonl").read_text().splitlines()]
    config = write(data={"eval": None}, batch={"tokens": 512})
    found = told(call, config)["rows"]
    assert [row["row"] for row in found] == [0, 1, 2]
    samples = found[0]["samples"]
    assert len(samples) > 1 and found[0]["tokens"] == sum(x["documents"][0]["tokens"] for x in samples) <= 128
    whole = samples[0]["documents"][0]
    talk = rows[samples[0]["sample"]]["messages"]
    text = "".join(p["text"] for p in whole["pieces"])
    assert text == AutoTokenizer.from_pretrained(model).apply_chat_template(talk, tokenize=False)
    learned = "".join(p["text"] for p in whole["pieces"] if p["learnt"])
    assert learned == "".join(m["content"] + "<|im_end|>" for m in talk if m["role"] == "assistant")
    shows = call("data", "show", config, "--packed", "--rows", "3", "--json")
    assert json.loads(shows.out)["rows"] == found
    part = shown(call, config)
    assert "\x1b" not in part and part.count("══ row ") == 3 and len(MARKED.findall(part)) >= 4


def test_color_on_a_terminal(monkeypatch):
    """NO_COLOR and dumb terminals get the marks alone."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for env, color in (
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert console.use_color() == color


def test_a_terminal_without_our_marks(call, write, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert call("train", write(), "--dry-run").code == 0
    terminal.seek(0)
    assert "\\u27e6" in terminal.read()


def test_random_tokens_are_not_decoded(call, write):
    config = write(objective="pretrain", data={"path": None, "random": 8, "eval": None}, train={"epochs": 3})
    facts = told(call, config)
    assert facts["rows"] is None
    assert (facts["data"]["tokens"], facts["data"]["target_tokens"]) == (3 * 8 * 128, 3 * 8 * 127)
    assert "random tokens: nothing to decode" in shown(call, config)


def test_a_shape_has_no_weights(call, write):
    """A billion parameters: nothing of them is allocated, the disk they need is said."""
    random = {"path": None, "random": 8, "eval": None}
    facts = told(call, write(model={"shape": "llama-3.2-1b"}, objective="pretrain", data=random))
    assert facts["disk"]["weights_bytes"] == pytest.approx(4 * 1_235_814_400, rel=1e-3)
    assert facts["disk"]["states_bytes"] == pytest.approx(8 * 1_235_814_400, rel=1e-3)


# --- memory and disk


def test_memory_and_time_are_those_of_the_plan(call, write, predicted):
    """By the plan's own lines, biggest first; the small ones together."""
    small = tuple(Item(f"weights.{i}", 1 << 20, "x") for i in range(5))
    predicted(lines=(Item("states.blocks", 1 << 30, "two"), Item("weights.blocks", 3 << 30, "one"), *small))
    lines = told(call, write())["memory"]["lines"]
    assert [i["name"] for i in lines][:2] == ["weights.blocks", "states.blocks"] and len(lines) == 7
    text = shown(call, "run.yaml")
    assert "\n  NVIDIA H200: 4.00 GiB, fits; peak in: head\n" in text
    weights_, states = (next(x for x in text.splitlines() if x.startswith(f"  {name}")) for name in ("weig", "stat"))
    assert weights_.count("█") == 24 and states.count("█") == 8 and "3.00" in weights_ and "weights.4" not in text
    assert "\n  smaller lines " in text and "\n  speed: about 1,234 tokens/s (basis: datasheet)\n" in text
    assert "DOES NOT FIT" not in text


def test_memory_that_does_not_fit(call, write, predicted):
    predicted(fits=False, capacity_bytes=2 << 30, room_bytes=1 << 30, tokens_per_s=None)
    text = shown(call, write(batch={"micro_tokens": 128}))
    assert "4.00 GiB of 1.0 usable (2.0 in all), does NOT fit" in text
    assert "\n  DOES NOT FIT: smaller batch.micro_tokens" in text and "recompute in addition" not in text
    assert "tokens/s" not in text
    predicted(fits=False, capacity_bytes=8 << 30, room_bytes=7 << 30, host_bytes=3 << 30, host_room_bytes=2 << 30)
    text = shown(call, "run.yaml")
    assert "DOES NOT FIT: recompute in addition to offloading" in text and "smaller batch.micro" not in text


def test_a_model_that_the_plan_does_not_know(call, write, monkeypatch):
    """It trains all the same, so the dry run goes on and says what it cannot say."""

    def unknown(*_, **__):
        raise ConfigError("a plan for this", "a strange model", "train it")

    monkeypatch.setattr(search, "predict", unknown)
    facts = told(call, write())
    assert facts["memory"] == {"unknown": "a plan for this: a strange model"}
    assert facts["disk"]["needed_bytes"] is None and facts["disk"]["fits"] is None
    text = shown(call, "run.yaml")
    assert "no prediction: a plan for this: a strange model" in text
    assert "needed: unknown without a memory prediction" in text


def test_a_disk_that_is_too_small(call, write, monkeypatch):
    real = shutil.disk_usage
    assert ": fits" in shown(call, write())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=2**20))
    assert told(call, "run.yaml")["disk"]["fits"] is False
    assert "1.0 MiB free in" in (text := shown(call, "run.yaml")) and "DOES NOT FIT: free space" in text


# --- what is refused, as train refuses it


@pytest.mark.parametrize(("changes", "flags", "says"), [
    ({"batch": {"tokens": 200}}, [], "not divisible by 128 slots"),
    ({"batch": {"seq": 32, "tokens": 32}}, [], "data.too_long: split, drop or truncate"),
    ({}, ["--ranks", "2"], "no technique shares the work"),
    ({"output": "chat.jsonl"}, [], "chat.jsonl is not a folder"), ({}, ["--resume", "no-such"], "no-such"),
])  # fmt: skip
def test_refusals_are_those_of_train(changes, flags, says, call, write):
    config = write(**{("with_" if k == "with" else k): v for k, v in changes.items()})
    dry, wet = call("train", config, *flags, "--dry-run"), call("train", config, *flags)
    assert dry.code == wet.code == 2 and dry.out == "" and says in dry.err
    assert dry.err == wet.err


def test_the_folder_of_a_run(call, write, here):
    """A run lies there: that is said, and all the rest is shown; resumed, it goes on where that stands."""
    config = write(train={"epochs": None, "steps": 2})
    assert call("train", config).code == 0
    text = shown(call, config)
    assert "would be rejected: the folder has a run" in text and "--resume auto" in text
    found = told(call, config)
    assert "--resume auto" in found["occupied"]
    tokens, speed = found["data"]["tokens"], found["memory"]["tokens_per_s"]
    assert found["time"] == {"steps": 2, "train_s": tokens / speed if speed else None}
    before = files(here / "out")
    more = ("--resume", "auto", "--set", "train.steps=4")
    assert told(call, config, *more)["data"]["done"] == 2
    assert "4 steps, " in (text := shown(call, config, *more)) and "resumes after step 2" in text
    assert files(here / "out") == before


def test_another_model(call, write, model, here):
    """A tokenizer with tokens that the model lacks is refused here too."""
    edited(model, here / "m", vocab_size=100)
    found = call("train", write(model="m"), "--dry-run")
    assert found.code == 2 and "but the model has 100 tokens" in found.err
    assert base()["model"] == "tiny"
