"""A run's first YAML as text: every block with what it means, its default, and when to change it. Pure.

The values come from `begin`; here they only get their places and their comments. Text is quoted where YAML would read
something else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from optrush import hardware
from optrush.config import scalar
from optrush.hardware import Device
from optrush.technique import Need, Technique
from optrush.techniques import ALL


def write(
    tree: dict[str, Any],
    file: str,
    device: Device,
    techniques: dict[str, dict[str, Any]],
    left: Sequence[tuple[str, Need]],
    said: str,
    ranks: int,
    classes: Sequence[type[Technique]] = ALL,
) -> str:
    """The tree and its techniques as YAML, every block with what it means, its default, and when to change it.

    Args:
        left: techniques that would suit and cannot run, with what they lack.
        said: what the plan says of memory.
    """
    batch, optim = tree["batch"], tree["optim"]
    rows = batch["tokens"] // batch["seq"]
    command = f"optrush train {shlex.quote(file) if file.isprintable() else 'FILE'}"
    if ranks > 1:
        command += f" --ranks {ranks}"
    machine = "this CPU" if device.kind == "cpu" else _line(device.name)
    if device.memory_bytes is not None:
        machine += f", {device.memory_bytes / hardware.GIB:.1f} GiB"
    wants = "models that have learnt before; random weights want about 1e-3"
    if "dpo" in tree:
        wants = "other objectives; for pairs 1e-6 is usual, of a model that has learnt before"
    larger = "double it while memory lasts" if device.kind == "cpu" else "halve it when memory runs out"
    lines = [
        f"# A run of optrush, written for {machine}; {_line(said)}.",
        f"#   {command} --dry-run    shows memory, disk and the first rows; writes nothing",
        f"#   {command}",
        "# A key that is left out has its default. Flags change values for one run: --set optim.lr=1e-4",
        "",
        "# What is trained: a Hugging Face folder, a hub id (downloaded at first use), or `tiny`: small and random.",
        f"model: {_flow(tree['model'])}",
        "",
        "# sft learns the assistant's words of conversations, pretrain every token, dpo which answer is better.",
        f"objective: {tree['objective']}",
        "",
        *_dpo_lines(tree.get("dpo")),
        *_data_lines(tree["data"], "dpo" in tree),
        "",
        "# Sizes in tokens, padding included. More a step: steadier and fewer updates. Default: 2048 and 32768.",
        "batch:",
        f"  seq: {batch['seq']}  # tokens a row; the longest text that is seen whole. More takes more memory",
        f"  tokens: {batch['tokens']}  # of one update over all devices: {rows} rows",
        f"  micro_tokens: {batch['micro_tokens']}  # computed at once on a device: rows of seq (default: 1); {larger}",
        "",
        "# AdamW. The rate is what to change first: lower if the loss jumps, higher if it hardly falls.",
        "optim:",
        f"  lr: {optim['lr']!r}  # default 2e-5, for {wants}",
        f"  schedule: {optim['schedule']}  # how the rate falls after the warm-up: cosine (default), linear, constant",
        f"  warmup: {optim['warmup']!r}  # the part of the run (or a number of steps) in which the rate rises from 0",
        f"  clip: {optim['clip']!r}  # the largest norm of a gradient (default); null turns clipping off",
        "",
        *_train_lines(tree["train"]),
        "",
        "# Order of the data and random weights. Another number, another run; the same number, the same run.",
        f"seed: {tree['seed']}",
        "",
        "# The folder of everything that the run writes: metrics, checkpoints, and the model in model/.",
        f"output: {_text(tree['output'])}",
        "",
        *_technique_lines(techniques, left, classes),
    ]
    return "\n".join(lines) + "\n"


def _dpo_lines(dpo: dict[str, Any] | None) -> list[str]:
    if dpo is None:
        return []
    return [
        "# The loss of a pair. beta: a larger one keeps the model nearer to the reference, what it is before training.",
        "# loss: sigmoid or ipo. reference: of an adapter the model without it, else log-probabilities made before.",
        f"dpo: {_flow(dpo)}",
        "",
    ]


def _data_lines(data: dict[str, Any], pairs: bool = False) -> list[str]:
    lines = []
    if pairs:
        row = (
            '{"prompt": [{"role": "user", "content": "..."}], "chosen": [{"role": "assistant", ...}], "rejected": ...}'
        )
        key = "sample" if "sample" in data else "path"
        kind = "Built-in pairs of recipes; your own: `path: FILE`, a" if key == "sample" else "A"
        lines += [f"# {kind} row a line:", f"# {row}", "data:", f"  {key}: {_text(data[key])}"]
    elif "sample" in data:
        lines += [
            "# Built-in conversations about cooking. Your own: `path: FILE` instead of `sample`, a row a line, either",
            '# {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or '
            '{"text": "..."}',
            "data:",
            f"  sample: {data['sample']}",
        ]
    elif "random" in data:
        lines += [
            "# Random tokens: for measuring, nothing is learnt. For real text: `path: FILE` instead.",
            "data:",
            f"  random: {_flow(data['random'])}  # documents of exactly batch.seq tokens; true: 4096 of them",
        ]
    else:
        lines += [
            '# One row a line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]} '
            'or {"text": "..."}',
            "data:",
            f"  path: {_text(data['path'])}",
        ]
    if "max_samples" in data:
        lines.append(f"  max_samples: {data['max_samples']}  # so that a CPU takes minutes; left out: all")
    if "eval" in data:
        lines.append(f"  eval: {data['eval']!r}  # held out of training to measure on: a part of the rows, or a file")
    elif "path" in data:
        lines.append("  # eval: 0.1  # a part held out to measure on; left out, for there are few rows")
    if "too_long" in data:
        others = "error (default)" if pairs else "error (default), drop, truncate"
        lines.append(f"  too_long: {data['too_long']}  # of rows longer than batch.seq; or {others}")
    return lines


def _train_lines(train: dict[str, Any]) -> list[str]:
    length = (
        f"  steps: {train['steps']}  # updates; `epochs` instead says how often the data is seen"
        if "steps" in train
        else f"  epochs: {train['epochs']}  # how often the data is seen (default 1); `steps: 100` instead says updates"
    )
    lines = [
        "# How long, and how often what happens. `*_every` below 1 is a part of the run, from 1 on a number of steps.",
        "train:",
        length,
        f"  log_every: {train['log_every']}  # steps between two lines of metrics (default 10)",
        f"  save_every: {train['save_every']!r}  # checkpoints to go on from (default: at the end only)",
        f"  keep: {train['keep']}  # of the checkpoints the newest so many (default 2)",
    ]
    if "eval_every" in train:
        lines.insert(4, f"  eval_every: {train['eval_every']!r}  # measures on what is held out (default: at the end)")
    return lines


def _technique_lines(
    techniques: dict[str, dict[str, Any]], left: Sequence[tuple[str, Need]], classes: Sequence[type[Technique]]
) -> list[str]:
    known = {c.name: c for c in classes}
    lines = [
        "# What makes it faster or smaller; each can be left out. `optrush techniques` lists all with their options,",
        "# `optrush doctor` says which of them this machine can run.",
        "with:" if techniques else "with: {}",
    ]
    for name, options in techniques.items():
        lines += [f"  # {known[name].summary}", f"  {name}: {_flow(options)}"]
    lines += [f"  # without {name}: {_line(need.found)}; to have it: {_line(need.do)}" for name, need in left]
    return lines


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r}"


def _text(value: str) -> str:
    """Text that `parse` reads back as itself: plain where that is safe, else in quotes."""
    if re.fullmatch(r"[\w./][\w./~+@-]*", value, re.ASCII) and scalar(value) == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31).removesuffix("\n")


def _line(text: str) -> str:
    return " ".join(text.split())
