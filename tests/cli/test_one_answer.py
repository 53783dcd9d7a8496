"""Every verb decides the same of what a configuration leaves open: method, techniques, micro-batch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import yaml

from meshes import further
from optrush import hardware, technique


class Case(NamedTuple):
    """A configuration and the hardware that it is decided for."""

    card: str
    ranks: int
    model: str
    more: dict[str, Any] = {}  # noqa: RUF012
    seq: int = 1024

    @property
    def name(self) -> str:
        return f"{self.ranks}x{self.card}" if self.ranks > 1 else self.card


PLAIN: dict[str, Any] = {"bf16": {}, "packing": {}, "attention": {}, "fused-loss": {}, "compile": {}, "fused-adamw": {}}
SHARDED = {"amp": {}, "attention": {}, "fsdp": {}}
# Families, cards, ranks, methods, sets and micro-batches of the file; gpt2 runs through transformers.
CASES = [
    Case("h100", 1, "llama-3.2-1b"), Case("cpu", 1, "tiny", {"with": {"attention": {}}}),
    Case("h100", 4, "llama-3.1-8b", {"method": "lora"}), Case("4090", 1, "llama-3.1-8b", {"method": "auto"}),
    Case("h100", 1, "gpt2"), Case("h100", 1, "qwen2.5-0.5b", {"with": PLAIN}), Case("cpu", 1, "tiny"),
    Case("cpu", 1, "tiny", {"method": "lora"}), Case("cpu", 1, "tiny", {"method": "auto"}),
    Case("cpu", 1, "tiny", {"with": {}}), Case("cpu", 1, "gpt2"),
    Case("cpu", 1, "gpt2", {"with": {"attention": {}, "packing": {}}}), Case("cpu", 1, "tiny", {"micro_tokens": 2048}),
    Case("cpu", 1, "tiny", {"micro_tokens": 1024, "with": {"packing": {}}}), Case("cpu", 2, "tiny"),
    Case("cpu", 2, "tiny", {"with": {"ddp": {}, "attention": {}}}), Case("h100", 1, "llama-3.2-1b", {"with": {}}),
    Case("h100", 1, "llama-3.2-1b", {"with": PLAIN}), Case("h100", 1, "llama-3.2-1b", {"micro_tokens": 4096}),
    Case("h100", 1, "llama-3.1-8b", {"method": "qlora"}),
    Case("h100", 1, "llama-3.1-8b", {"method": "lora", "with": {"attention": {}, "amp": {}}}),
    Case("h100", 1, "qwen2.5-0.5b", {"with": {"bf16": {}}}, 4096),
    Case("h100", 1, "gpt2", {"with": {"amp": {}, "attention": {}}}),
    Case("a100-80", 1, "llama-3.1-8b", {"method": "auto"}),
    Case("4090", 1, "llama-3.2-1b", {"with": {"bf16": {}, "recompute": {}, "attention": {}}}),
    Case("4090", 1, "llama-3.2-1b", {}, 4096), Case("t4", 1, "qwen2.5-0.5b"), Case("h100", 4, "llama-3.1-8b"),
    Case("h100", 4, "llama-3.2-1b", {"with": SHARDED}),
    Case("h100", 4, "llama-3.2-1b", {"with": SHARDED, "micro_tokens": 2048}),
]  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Make this machine that of a case, with every package and compiler; return the name of its hardware."""

    def made(case):
        devices = [] if case.card == "cpu" else [hardware.NAMED[case.card]] * case.ranks
        monkeypatch.setattr(hardware, "probe", lambda: devices)
        monkeypatch.setattr(technique, "library", lambda name: "1.0")
        monkeypatch.setattr(technique, "installed", lambda *names: "compiler")
        return case.name

    return made


def configured(case, here):
    model: Any = {"shape": case.model}
    if case.model == "tiny":
        model = "tiny"
    elif case.model == "gpt2":
        (here / "gpt2").mkdir(exist_ok=True)
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 2048, "n_positions": 4096}
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
        (here / "gpt2" / "config.json").write_text(json.dumps(config))
        model = "gpt2"
    more = dict(case.more)
    micro = {"micro_tokens": more.pop("micro_tokens")} if "micro_tokens" in more else {}
    return {
        "model": model, "objective": "pretrain", "data": {"random": 256}, "train": {"steps": 4000}, "output": "out",
        "batch": {"seq": case.seq, "tokens": 8 * case.seq, **micro}, **more,
    }  # fmt: skip


def answer(found):
    """The set and the micro-batch of a document."""
    decided = json.loads(found.out)["decided"]
    return decided["with"], decided["micro_tokens"]


@pytest.mark.parametrize("case", further(CASES, 3), ids=lambda c: f"{c.name}-{c.model}-{len(c.more)}")
def test_every_verb_gives_the_same_answer(case, call, here, machine, monkeypatch):
    name = machine(case)
    run = configured(case, here)
    (here / "run.yaml").write_text(yaml.safe_dump(run))
    ranks = () if case.ranks == 1 else ("--ranks", str(case.ranks))
    with_, micro = answer(call("plan", "run.yaml", "--hardware", name, "--json"))
    assert answer(call("train", "run.yaml", "--dry-run", "--json", *ranks)) == (with_, micro)
    assert micro == run["batch"].get("micro_tokens", micro)
    assert run.get("with", {}).items() <= with_.items()

    tuned = call("tune", "run.yaml", "--dry-run", "--json", *ranks)
    assert tuned.code == 0, tuned.err
    own = next(t for t in json.loads(tuned.out)["tried"] if t["name"] == "as it is")
    searched = {n: o for n, o in with_.items() if n != "micro-batch"}  # a tuning measures sizes, and halves none
    assert (own["with"], own["micro_tokens"]) == (searched, micro)

    if case.ranks == 1:
        listed = call("bench", "run.yaml", "--ladder", "config", "--cumulative-only", "--dry-run", "--json")
        rungs = json.loads(listed.out)
        assert {r["rung"] for r in rungs} >= searched.keys(), listed.err
        sizes = f"batch.micro_tokens {case.seq} -> {micro}"
        assert "micro_tokens" in run["batch"] or micro == case.seq or any(sizes in r["changes"] for r in rungs)
    if case.card != "cpu":
        job = call("launch", "run.yaml", "--slurm", "--hardware", name, "--out", "-") if case.model != "gpt2" else None
        assert job is None or (job.code == 0 and ("micro_tokens" in run["batch"] or f"{micro} tokens" in job.err))

    if "with" not in run and "micro_tokens" not in run["batch"]:
        given = (
            "--model", case.model if case.model in ("tiny", "gpt2") else f"shape:{case.model}", "--data", "random:256",
        )  # fmt: skip
        method = run.get("method", "full")
        flags = ("--objective", "pretrain", "--seq", str(case.seq), "--method", method, "--output", "new")
        began = call("init", *given, *flags, "--hardware", name if case.ranks > 1 else "auto", "new.yaml", "--yes")
        assert began.code == 0, began.err
        written = yaml.safe_load((here / "new.yaml").read_text())
        again = {**run, "batch": {k: v for k, v in written["batch"].items() if k != "micro_tokens"}, "method": method}
        again["optim"], again["train"] = {"clip": written["optim"]["clip"]}, written["train"]
        (here / "run.yaml").write_text(yaml.safe_dump(again))
        with_, micro = answer(call("train", "run.yaml", "--dry-run", "--json", *ranks))
        assert ({n: o or {} for n, o in written["with"].items()}, written["batch"]["micro_tokens"]) == (with_, micro)
