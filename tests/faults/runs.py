"""Whole training runs in forked children, through the command line's own `main`: small, and exact to the bit."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer import record_writer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from optrush import exporting
from optrush.cli import app
from optrush.trainer import build, metrics, run
from optrush.trainer.checkpoint import find_checkpoints, verify

from harness import RAISED, ended, fork, launch_env, wait_until

WORDS = 250
# What the command line imports late, a child finds in place.
LOADED = (build, metrics, exporting, run, event_pb2, summary_pb2, record_writer)


def write_model(folder: Path) -> None:
    """2 layers, D=64, V=256: random weights and a tokenizer that knows the words w0 ... w249."""
    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, eos_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_data(path: Path, n: int = 160) -> None:
    rng = random.Random(0)
    rows = [{"text": " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randrange(5, 40)))} for _ in range(n)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def configuration(folder: Path, output: Path, /, **changes: Any) -> Path:
    """A run of 12 steps: packing, shuffling, two micro-batches a step, cosine, a save every 3 steps."""
    tree: dict[str, Any] = {
        "model": str(folder / "model"), "objective": "pretrain", "data": {"path": str(folder / "data.jsonl")},
        "batch": {"seq": 64, "tokens": 512, "micro_tokens": 128},
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup": 2, "weight_decay": 0.1},
        "train": {"steps": 12, "log_every": 1, "save_every": 3}, "output": str(output), "with": {"packing": {}},
    }  # fmt: skip
    file = output.with_suffix(".yaml")
    for key, value in changes.items():
        at = tree
        *path, last = key.split("__")
        for part in path:
            at = at[part]
        at[last] = value
    file.write_text(yaml.safe_dump(tree))
    return file


def command(*arguments: str) -> int:
    """The command line, in this process."""
    sys.argv = ["optrush", *arguments]
    try:
        app.main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


Before = Callable[[], None] | None


def each_step(work: Callable[[int], None]) -> Callable[[], None]:
    """A `before` with which the run calls work(n) ahead of its step n."""

    def before() -> None:
        begin = run.set_step

        def noted(job: Any, n: int, steps: int) -> None:
            work(n)
            begin(job, n, steps)

        run.set_step = noted

    return before


def at_step(step: int, work: Callable[[], object], rank: int | None = None) -> Callable[[], None]:
    """A `before` with which one rank, or each, calls work() ahead of one step: there, however fast the machine is."""
    return each_step(lambda n: work() if n == step and rank in (None, int(os.environ.get("RANK", "0"))) else None)


def signalled(step: int, number: int, rank: int | None = None) -> Callable[[], None]:
    """A `before` with which one rank, or each, sends itself a signal ahead of a step."""
    return at_step(step, lambda: os.kill(os.getpid(), number), rank)


def recording(path: Path) -> Callable[[], None]:
    """Notes which samples each step took."""

    def before() -> None:
        begin, gradients = run.set_step, build.forward_backward
        at = {"step": 0}

        def noted(job: Any, n: int, steps: int) -> None:
            at["step"] = n
            begin(job, n, steps)

        def taking(job: Any, batches: Any, terms: int) -> Any:
            line = [at["step"], [s for b in batches for s in b.samples]]
            if at["step"]:  # else it is the rehearsal
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            return gradients(job, batches, terms)

        run.set_step, build.forward_backward = noted, taking

    return before


def held(step: int, until: Path) -> Callable[[], None]:
    """A `before` with which the run waits ahead of a step until there is such a file."""
    return at_step(step, lambda: wait_until(until.exists, f"{until.name} is there"))


def together(*works: Callable[[], object]) -> Callable[[], None]:
    """All of them as one `before`: at a step, in this order."""

    def before() -> None:
        for work in reversed(works):  # each comes ahead of those that were there
            work()

    return before


def begun(config: Path, *flags: str, before: Before = None, env: dict[str, str] | None = None) -> int:
    """Starts a run in a child and returns its pid; what it prints goes to <config>.log."""

    def work() -> int:
        if before is not None:
            before()
        return command("train", str(config), *flags)

    return fork(work, env, config.with_suffix(".log"))


def trained(config: Path, *flags: str, before: Before = None) -> int:
    """One run in a child, to its end: its exit code."""
    code = ended(begun(config, *flags, before=before))
    assert code != RAISED, said(config)  # the child's own traceback
    return code


def begun_on(n: int, config: Path, *flags: str, before: Before = None) -> list[int]:
    """The same on n ranks, as a launcher would start them; their pids."""
    return [begun(config, *flags, before=before, env=env) for env in launch_env(n)]


def trained_on(n: int, config: Path, *flags: str, before: Before = None) -> list[int]:
    codes = [ended(pid) for pid in begun_on(n, config, *flags, before=before)]
    assert RAISED not in codes, said(config)
    return codes


def said(config: Path) -> str:
    return config.with_suffix(".log").read_text()


def wait_for(output: Path, step: int) -> None:
    """Until the run has logged a step."""
    file = output / "metrics.jsonl"
    logged = lambda: file.exists() and any(f["step"] >= step for f in figures(output, torn=True))
    wait_until(logged, f"step {step} is logged")


EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "target_tokens", "skipped")


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def figures(output: Path, torn: bool = False) -> list[dict[str, Any]]:
    """What a resumed run must repeat to the bit, line by line; clocks and memory are left out.

    torn: a last line that is still being written is passed over.
    """
    text = (output / "metrics.jsonl").read_text()
    if torn:
        text = text[: text.rfind("\n") + 1]
    return [{k: m[k] for k in EXACT} for m in map(json.loads, text.splitlines()) if "loss" in m]


def weights(output: Path) -> dict[str, str]:
    """Hashes of everything in the newest checkpoint: parameters and optimizer states."""
    return {name: f.sha256 for name, f in verify(find_checkpoints(output)[0]).files.items()}
