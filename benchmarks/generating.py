"""Answer prompts by the sampling engine and by transformers' padded `generate`, on one GPU, and say the time of each.

    python benchmarks/generating.py OUT.jsonl MODEL PROMPTS.jsonl [--new 256]

MODEL is a folder, PROMPTS rows with `messages` whose first one is asked. Tokens are drawn at temperature 1. The first
pass of the engine records its step as a graph and compiles; it is timed alone. Appends a line to OUT for each way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optrush import generation
from optrush.models.sampling import Drawing, PromptIds, SamplingEngine

MOST = 1000


def timed(work: Callable[[], int]) -> dict[str, Any]:
    """Return the seconds that `work` took on the GPU, and the tokens that it counted."""
    began = time.perf_counter()
    tokens = work()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {"s": round(seconds, 2), "tokens": tokens, "tokens_per_s": round(tokens / seconds)}


def main() -> None:
    """Run every way and append its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--new", type=int, default=256)
    of = parser.parse_args()
    tok = AutoTokenizer.from_pretrained(of.model, padding_side="left")
    tok.pad_token = tok.pad_token or tok.eos_token
    rows = [json.loads(line)["messages"] for line in of.prompts.read_text("utf-8").splitlines()[:MOST]]
    texts = [tok.apply_chat_template(m[:1], tokenize=False, add_generation_prompt=True) for m in rows]
    ids = [tok(t, add_special_tokens=False)["input_ids"] for t in texts]
    prompts = [PromptIds(i, np.array(x, np.int32)) for i, x in enumerate(ids)]
    ours = generation.GenerationModel(generation.find_model(of.model), streams=False).decoder
    theirs = AutoModelForCausalLM.from_pretrained(of.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    theirs = theirs.cuda().eval()
    fixed = {"gpu": torch.cuda.get_device_name(), "prompts": len(rows), "max_new": of.new, "temperature": 1.0}

    def say(who: str, **more: Any) -> None:
        text = json.dumps({**fixed, "who": who, **more})
        print(text, flush=True)
        with of.out.open("a") as file:
            file.write(text + "\n")

    def engine(slots: int, compiled: bool) -> None:
        if compiled:
            for module in (*ours.blocks.values(), ours.norm):
                module.compile(fullgraph=True, dynamic=False)
        found = SamplingEngine(ours, slots, max(map(len, ids)) + of.new, of.new)
        drawing = Drawing(of.new, 1.0, (tok.eos_token_id,), 1, slots)

        def work() -> int:
            return sum(len(a.ids) for a in found.sample(prompts, 1, drawing))

        first = timed(work)["s"]
        say("optrush", slots=slots, compiled=compiled, first_s=first, **timed(work))

    def padded(batch: int) -> None:
        def work() -> int:
            found = 0
            for i in range(0, len(texts), batch):
                x = tok(texts[i : i + batch], return_tensors="pt", padding=True, add_special_tokens=False).to("cuda")
                y = theirs.generate(**x, max_new_tokens=of.new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
                found += int((y[:, x["input_ids"].shape[1] :] != tok.pad_token_id).sum())
            return found

        say("transformers", batch=batch, **timed(work))

    with torch.no_grad():
        engine(256, False)
        engine(512, False)
        padded(64)
        padded(256)
        engine(512, True)


if __name__ == "__main__":
    main()
