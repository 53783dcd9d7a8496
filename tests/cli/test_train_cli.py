"""`optrush train` from outside: the folder, the metrics, the exported model, two ranks, a signal and going on after."""

import json
import math
from pathlib import Path

import torch
from test_eval_cli import plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from optrush import __version__
from optrush.config import parse_config

from clirun import metrics

LINE = {
    "step": int, "loss": float, "lr": float, "grad_norm": float, "tokens": int, "target_tokens": int, "step_s": float,
    "tokens_per_s": float, "mfu": (float, type(None)), "peak_bytes": int, "memory_kind": str, "data_wait_s": float,
    "skipped": int,
}  # fmt: skip
FOLDER = {"run.yaml", "metrics.jsonl", "checkpoints", "model"}
BESIDE = {"data.json", "loss.png", "report.html", ".lock", "tensorboard"}


def steps(lines):
    return [line for line in lines if "loss" in line]


def evals(lines):
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def test_a_run(call, write, here):
    rows = (here / "chat.jsonl").read_text().splitlines(keepends=True)
    (here / "held.jsonl").write_text("".join(rows[:4]))
    (here / "chat.jsonl").write_text("".join(rows[4:]))
    found = call("train", write(data={"eval": "held.jsonl"}, train={"eval_every": 0.5, "save_every": 2, "keep": 1}))
    assert found.code == 0, found.err
    assert found.out == "out\n"
    out = here / "out"
    assert {p.name for p in out.iterdir()} - BESIDE == FOLDER
    assert "held-out loss" in found.err and "packing (window=65536): 1 change" in found.err

    lines = metrics(out)
    logged = steps(lines)
    total = logged[-1]["step"]
    assert [line["step"] for line in logged] == list(range(1, total + 1)), "log_every 1: a line a step, from 1"
    for line in logged:
        assert set(line) == set(LINE)
        assert all(isinstance(line[key], kind) for key, kind in LINE.items()), line
        assert 0 < line["target_tokens"] < line["tokens"] <= 256 and line["skipped"] == 0
        assert line["data_wait_s"] <= line["step_s"] and line["peak_bytes"] > 2**20
        assert math.isclose(line["tokens_per_s"], line["tokens"] / line["step_s"], rel_tol=1e-9), "log_every 1"
    if not torch.cuda.is_available():
        assert {(line["mfu"], line["memory_kind"]) for line in logged} == {(None, "rss")}
    for line in lines:
        if "eval_loss" in line:
            assert set(line) == {"step", "eval_loss", "eval_target_tokens"} and line["eval_target_tokens"] > 0
    half = max(1, round(total / 2))
    assert [step for step, _ in evals(lines)] == sorted({0, *range(half, total + 1, half), total})
    assert evals(lines)[-1][1] < evals(lines)[0][1], "it learns"
    assert [p.name for p in (out / "checkpoints").glob("step-*")] == [f"step-{total:06d}"], "keep: 1"

    held = [json.loads(row) for row in rows[:4]]
    loss, targets = plain(out / "model", held)
    assert targets == lines[0]["eval_target_tokens"]
    assert math.isclose(loss, evals(lines)[-1][1], rel_tol=1e-4)


def test_the_exported_model(call, write, here, model):
    """It loads in transformers with its tokenizer, template and generation config, and evaluates as it did here."""
    assert call("train", write()).code == 0
    folder = here / "out" / "model"
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    turns = [{"role": "user", "content": "Hm?"}]
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(model)
    assert ours.apply_chat_template(turns, tokenize=False) == theirs.apply_chat_template(turns, tokenize=False)
    assert loaded.generation_config.eos_token_id == [4, 2], "it stops at the end of a turn too"
    card = (folder / "README.md").read_text()
    assert f"optrush {__version__}" in card and "`sft`" in card and "packing" in card
    found = call("eval", "run.yaml", "--model", "out/model", "--json")
    last = evals(metrics(here / "out"))[-1][1]
    assert math.isclose(json.loads(found.out)["loss"], last, rel_tol=1e-6)


def test_the_resolved_run_runs(call, write, here, monkeypatch):
    """run.yaml has every value and absolute paths: from another folder it gives the same losses, bit by bit."""
    assert call("train", write(), "--set", "optim.lr=1e-2", "--with", "attention").code == 0
    text = (here / "out" / "run.yaml").read_text()
    resolved = parse_config(text, "run.yaml")
    assert resolved.optim.lr == 1e-2 and set(resolved.with_) == {"packing", "attention"}
    for path in (resolved.output, resolved.data.path):
        assert path is not None and Path(path).is_absolute()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert call("train", "../out/run.yaml", "--set", "output=again").code == 0
    again = metrics(here / "elsewhere" / "again")
    assert [line["loss"] for line in steps(again)] == [line["loss"] for line in steps(metrics(here / "out"))]


def test_resume_auto_begins_where_nothing_is(call, write, here):
    """The same command can be given again: without a checkpoint it begins, after the end it changes nothing."""
    config = write(train={"steps": 2})
    assert call("train", config, "--resume", "auto").code == 0
    before = (here / "out" / "metrics.jsonl").read_text()
    again = call("train", config, "--resume", "auto")
    assert again.code == 0 and "all 2 steps are done; to train more, raise train.steps" in again.err
    assert (here / "out" / "metrics.jsonl").read_text() == before


def test_pretraining_on_random_tokens_of_a_shape(call, write, here):
    changes = {"objective": "pretrain", "data": {"path": None, "random": 4, "eval": None}, "train": {"steps": 2}}
    assert call("train", write(**changes)).code == 0
    assert [line["target_tokens"] for line in steps(metrics(here / "out"))] == [254, 254]


def test_two_ranks(start, call, write, here):
    """The same steps on two processes: one line a step, the losses of one process, one folder."""
    config = write(train={"epochs": None, "steps": 2, "export": False})
    found = start("train", config, "--ranks", "2", "--with", "ddp", "--set", "output=both")
    assert found.code == 0, found.err
    assert found.out == "both\n"
    assert call("train", config).code == 0
    both, one = metrics(here / "both"), metrics(here / "out")
    assert [line["step"] for line in both] == [line["step"] for line in one]
    for ours, theirs in zip(both, one):
        for key in ("loss", "eval_loss", "grad_norm"):
            if key in theirs:
                assert math.isclose(ours[key], theirs[key], rel_tol=1e-5), (key, ours, theirs)
        for key in ("tokens", "target_tokens", "eval_target_tokens"):
            assert ours.get(key) == theirs.get(key)


def test_the_example_for_a_cpu(call, here):
    """It runs as it stands, shortened."""
    example = Path(__file__).parents[2] / "examples" / "tiny-sft-cpu.yaml"
    short = ["train.steps=2", "train.eval_every=null", "data.max_samples=20", "batch.tokens=512"]
    found = call("train", str(example), *(word for flag in short for word in ("--set", flag)))
    assert found.code == 0, found.err
    assert (here / found.out.strip() / "model" / "config.json").exists()


def test_a_run_without_techniques_is_planned(call, write, here, monkeypatch):
    """Once: the set is printed, stands in run.yaml, and a run that goes on has it, whatever would be chosen then."""
    from optrush.planner import sets

    config = write(with_=None, train={"epochs": None, "steps": 2, "save_every": 1, "eval_every": None}, method="lora")
    found = call("train", config)
    assert found.code == 0, found.err
    assert "decided for cpu:\n  techniques   fused-adamw attention packing: the fastest of" in found.err
    assert "\n  micro-batch  256 tokens (2 rows): " in found.err
    ran = parse_config((here / "out" / "run.yaml").read_text(), "run.yaml")
    assert list(ran.with_) == ["lora", "fused-adamw", "attention", "packing"] and ran.method == "lora"
    monkeypatch.setattr(sets, "fastest_rows", lambda fitting, *_: fitting[0][1])
    again = call("train", config, "--set", "train.steps=3", "--resume", "auto")
    assert again.code == 0, again.err
    assert "decided for" not in again.err
    on = parse_config((here / "out" / "run.yaml").read_text(), "run.yaml")
    assert (on.with_, on.batch.micro_tokens) == (ran.with_, ran.batch.micro_tokens)
    plain_run = call("train", write(with_={}, train={"epochs": None, "steps": 1}, output="plain"))
    assert plain_run.code == 0 and "techniques" not in plain_run.err
    assert parse_config((here / "plain" / "run.yaml").read_text(), "run.yaml").with_ == {}
