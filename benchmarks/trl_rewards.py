"""Learn from rewards by TRL's GRPOTrainer, with the rows, groups, lengths and rewards of docs/guide/19-rewards.md.

    python benchmarks/trl_rewards.py OUT.jsonl MODEL TRAIN.jsonl TEST.jsonl SECONDS [--padded]

Rows have `messages`: a prompt, and the right number. Answers are sampled by continuous batching, or padded.
Appends a line to OUT for every five steps, and one with the share of right greedy answers before and after.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SAMPLED = 64  # tokens an answer


def right(text: str, answer: str) -> float:
    """Return 1 where the last number of the text is the answer, else 0."""
    found = NUMBER.findall(text)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(answer))


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return the reward of each answer."""
    return [right(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


@torch.no_grad()
def score(model: Any, tok: Any, rows: list[Any], batch: int = 256) -> float:
    """Return the share of rows whose greedy answer is right."""
    model.eval()
    good = 0.0
    for i in range(0, len(rows), batch):
        part = rows[i : i + batch]
        texts = [tok.apply_chat_template(x[:1], tokenize=False, add_generation_prompt=True) for x in part]
        x = tok(texts, return_tensors="pt", padding=True, add_special_tokens=False).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = model.generate(**x, max_new_tokens=SAMPLED, do_sample=False, pad_token_id=tok.pad_token_id)
        said = tok.batch_decode(y[:, x["input_ids"].shape[1] :], skip_special_tokens=True)
        good += sum(right(t, p[1]["content"]) for t, p in zip(said, part, strict=True))
    model.train()
    return good / len(rows)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes the metrics and ends the run in time."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.limit, self.began = out, limit, 0.0

    def say(self, line: dict[str, Any]) -> None:
        """Append a line."""
        print(json.dumps(line), flush=True)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.began = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write what the trainer logs."""
        if logs and "reward" in logs:
            length, seconds = logs.get("completions/mean_length"), round(time.time() - self.began, 1)
            self.say({"step": state.global_step, "s": seconds, "reward": logs["reward"], "length": length})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Stop where the time is over."""
        control.should_training_stop = time.time() - self.began > self.limit
        return control


def main() -> None:
    """Train, and score before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("out", "model", "train", "test"):
        parser.add_argument(name, type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--padded", action="store_true")
    of = parser.parse_args()
    rows = [[json.loads(x)["messages"] for x in p.read_text("utf-8").splitlines()] for p in (of.train, of.test)]
    tok = AutoTokenizer.from_pretrained(of.model, padding_side="left")
    tok.pad_token = tok.pad_token or tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(of.model, dtype=torch.float32, attn_implementation="sdpa").cuda()
    batching = {} if of.padded else {"transformers_continuous_batching_config": {"max_memory_percent": 0.4}}
    settings = GRPOConfig(
        output_dir=str(of.out.parent / "trl"), per_device_train_batch_size=512, num_generations=16,
        max_completion_length=SAMPLED, learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0, bf16=True,
        logging_steps=5, save_strategy="no", report_to=[], beta=0.0, temperature=1.0, epsilon_high=0.28,
        scale_rewards="none", loss_type="dapo", max_steps=3000, gradient_checkpointing=False, seed=1,
        max_grad_norm=1.0, weight_decay=0.0, use_transformers_continuous_batching=not of.padded, **batching,
    )  # fmt: skip
    before, watch = score(model, tok, rows[1]), Watch(of.out, of.seconds)
    data = Dataset.from_list([{"prompt": m[:1], "answer": m[1]["content"]} for m in rows[0]])
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=data, processing_class=tok, callbacks=[watch]
    )
    trainer.train()
    seconds = round(time.time() - watch.began, 1)
    watch.say({
        "trl": "padded" if of.padded else "continuous batching", "steps": trainer.state.global_step, "s": seconds,
        "held_out_before": before, "held_out_after": score(trainer.model, tok, rows[1]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
