# ruff: noqa: E501 - tables
"""Feed random inputs to the readers of outside files, in this process; print one line of JSON, and what failed.

    python benchmarks/faults/fuzz.py --seconds 120 [--target yaml|config|weights|template|rows]

A reader returns, or raises a UserError of three lines; another exception, or more than LIMIT_S, is a failure. The seed is
printed, and `--seed` repeats a search.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cases"))
LIMIT_S = 10.0
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x", "64", "\0", "\ud800", "a" * 5000,
    [], [1], ["x"], [[]], {}, {"a": 1}, {"rope_type": "linear"}, [None], "default", "llama3", "full_attention", "gpt2", "gemma2", "phi3",
)  # fmt: skip
YAML_PARTS = (
    "model: ", "data: ", "batch: ", "with: ", "output: ", "seed: ", "objective: sft", "tiny", "{", "}", "[", "]", ", ", ": ", "\n", "  ", "- ", "? ",
    "&a ", "*a", "!!str ", "!!bool ", "!!timestamp ", "!!int ", "!x ", "'", '"', "|", ">", "#", "---", "...", "%YAML 1.1", "<<", "=", "~", "1e-5",
    "1:30", "0x1", ".inf", ".nan", "2001-02-30", "\t", "\\", "\0", "\ufeff", "\u202e", "yes", "null", "packing", "path", "x" * 300, "9" * 4400,
)  # fmt: skip
TEMPLATE_PARTS = (
    "{{ ", " }}", "{% ", " %}", "{# ", " #}", "messages", "m", "m['content']", "m.role", "for m in messages", "endfor", "if ", "else", "endif", "set x = ",
    "macro f(a)", "endmacro", "f(1)", "| ", "length", "tojson", "trim", "join", "map(attribute='role')", "list", "first", "loop.index", "range(3)", "1", "0",
    " / ", " % ", " + ", " == ", "'a'", "[", "]", "{", "}", "(", ")", ", ", ".", "none", "raise_exception('no')", "strftime_now('%Y')", "namespace(a=1)",
    "is defined", "not ", "in ", "|attr('__class__')", ".__class__", "generation", "endgeneration", "bos_token", "eos_token", "\n", "<|im_start|>", "break",
)  # fmt: skip


def joined(rng: random.Random, parts: tuple[str, ...], most: int) -> str:
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, most)))


def changed(rng: random.Random, tree: Any, times: int) -> Any:
    """A copy of a tree of JSON with some of its values replaced, removed or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(times):
        here = tree
        while isinstance(here, dict | list) and len(here):
            keys = list(here) if isinstance(here, dict) else range(len(here))
            key = rng.choice(keys)
            if not isinstance(here[key], dict | list) or not here[key] or rng.random() < 0.3:
                if rng.random() < 0.15:
                    del here[key]
                else:
                    here[key] = copy.deepcopy(rng.choice(ODD))
                break
            here = here[key]
    return tree


def garbled(rng: random.Random, raw: bytes) -> bytes:
    """Bytes with a few of them changed, taken out, doubled or cut off."""
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif how == 1:
            del data[at : at + rng.randrange(1, 20)]
        elif how == 2:
            data[at:at] = data[at : at + rng.randrange(1, 20)]
        else:
            data[at:at] = rng.choice(
                (b"[" * 3000, b'"', b"{", b"}", b"\xff", b"\0", b"\\ud800", b"NaN", b"1e999", b"9" * 4400)
            )
    return bytes(data)


def targets(box: Any) -> dict[str, Callable[[random.Random], None]]:
    """The readers, each as a function that makes an input from a source of randomness and reads it."""
    import torch

    from optrush.config import parse_config
    from optrush.data.chat_template import Tokens
    from optrush.data.readers import read_rows
    from optrush.data.schema import Chat, Message, RowLocation, parse_row
    from optrush.data.tokenizer import open_tokenizer
    from optrush.decide import decide
    from optrush.hardware import CPU
    from optrush.models.config_json import read_config_json
    from optrush.models.hf import load
    from optrush.models.weights import open_weights

    tokenizer = open_tokenizer(box.model)
    config = json.loads((box.model / "config.json").read_text())
    raw = (box.model / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    good = box.run()
    rows = [
        {"text": "Stir."}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"}, {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "input": "", "output": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
    ]  # fmt: skip

    def yaml_target(rng: random.Random) -> None:
        how = rng.randrange(3)
        if how == 0:
            text = joined(rng, YAML_PARTS, 30)
        elif how == 1:
            text = garbled(rng, json.dumps(good).encode()).decode("utf-8", "replace")
        else:
            text = json.dumps(changed(rng, good, rng.randrange(1, 4)))
        flags = (
            [f"{rng.choice(('seed', 'model', 'with.packing', 'batch.seq', 'x'))}={joined(rng, YAML_PARTS, 6)}"]
            if rng.random() < 0.3
            else []
        )
        parse_config(text, "fuzz.yaml", flags)

    def config_target(rng: random.Random) -> None:
        if rng.random() < 0.3:
            text = garbled(rng, json.dumps(config).encode()).decode("utf-8", "replace")
        else:
            text = json.dumps(changed(rng, config, rng.randrange(1, 4)))
        folder = box.edited(text)
        run = parse_config(json.dumps({**good, "model": str(folder)}), "fuzz.yaml")
        decide(run, ranks=1, device=CPU)
        hf = read_config_json(folder / "config.json")
        load(folder, hf, rng.choice((None, "transformers")), torch.float32, 0)

    def weights_target(rng: random.Random) -> None:
        if rng.random() < 0.4:
            whole = garbled(rng, raw[: 8 + size]) + raw[8 + size :]
        else:
            text = json.dumps(changed(rng, header, rng.randrange(1, 3))).encode()
            whole = len(text).to_bytes(8, "little") + text + raw[8 + size :]
        folder = box.edited()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(whole)
        open_weights(folder)
        _, recipe = load(folder, config, None, torch.float32, 0)
        name, entry = next(iter(recipe.entries.items()))
        recipe.fill(name, torch.empty(entry.shape), (0,) * len(entry.shape))

    def template_target(rng: random.Random) -> None:
        chat = Chat((Message("user", "a"), Message("assistant", "b")))
        tokens = Tokens(tokenizer, joined(rng, TEMPLATE_PARTS, 20))
        tokens.document(chat, "assistant", RowLocation(Path("fuzz"), 1))

    def rows_target(rng: random.Random) -> None:
        row = changed(rng, rng.choice(rows), rng.randrange(1, 4))
        text = json.dumps(row).encode()
        if rng.random() < 0.4:
            text = garbled(rng, text)
        file = box.folder / rng.choice(
            ("fuzz.jsonl", "fuzz.json", "fuzz.csv", "fuzz.txt", "fuzz.jsonl.gz", "fuzz.parquet")
        )
        file.write_bytes(text + b"\n")
        for where, found in read_rows(file):
            parse_row(where, found)

    found = {
        "yaml": yaml_target,
        "config": config_target,
        "weights": weights_target,
        "template": template_target,
        "rows": rows_target,
    }
    return found  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--target", default="", help="this one only")
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    kinds: Counter[str] = Counter()
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OPTRUSH_CACHE"] = f"{folder}/cache"
        from optrush.errors import UserError

        from hostile import Box, Hang, within

        box = Box(Path(folder))
        for target, read in targets(box).items():
            if asked.target not in ("", target):
                continue
            end = time.monotonic() + asked.seconds
            while time.monotonic() < end:
                rng = random.Random(f"{seed} {target} {done[target]}")
                done[target] += 1
                try:
                    with within(LIMIT_S):
                        read(rng)
                    continue
                except UserError as error:
                    wrong = "" if len(str(error).splitlines()) == 3 else f"not three lines: {error}"
                except Hang:
                    wrong = f"no answer within {LIMIT_S:.0f} s"
                except Exception as error:
                    at = traceback.extract_tb(error.__traceback__)
                    own = [f"{Path(f.filename).name}:{f.lineno}" for f in at if "optrush" in f.filename]
                    wrong = f"{type(error).__name__} at {own[-1] if own else at[-1].lineno}: {str(error)[:200]}"
                if wrong:
                    kind = f"{target}: {wrong.partition(':')[0]}" if "at" not in wrong else f"{target}: {wrong[:60]}"
                    kinds[kind] += 1
                    if kinds[kind] == 1:
                        print(f"{target}, input {done[target] - 1}, --seed {seed}: {wrong}", file=sys.stderr)
    n, failed = done.total(), kinds.total()
    figure = (
        f"seed {seed}: {', '.join(f'{name} {count}' for name, count in done.items())}; {len(kinds)} kinds of failure"
    )
    print(json.dumps({"fault": "fuzz", "n": n, "pass": n - failed, "figure": figure}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
