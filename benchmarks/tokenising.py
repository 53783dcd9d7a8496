"""How fast data becomes shards, against the `tokenizers` library alone, and how much memory that takes.

usage: tokenising.py [--megabytes 100] [--repeats 3] [--memory MB MB] [--folder DIR]   prints a line of JSON a figure

Both tokenise the same rows with the same 32,768-token byte-level BPE on the same cores. The library gets the texts in
memory and throws the ids away; ours reads and checks the files and writes and syncs the shards. They run in turn, each
in a fresh process. `exact` is the library's encode_batch, `fast` its encode_batch_fast, which makes no offsets. Rates
are medians by the wall clock; `cpu` is the ratio of processor seconds of all processes, which other load blurs less.
Kinds: `recipes` (few different words), `messages` (the same as conversations, which the library gets rendered),
`python` (the standard library's files: many different words).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

VOCABULARY = 32768
TRAINED_bytes = 20_000_000  # that the vocabulary is trained on
KINDS = ("recipes", "messages", "python")
ROW_chars = 2500  # of a row of source text
BATCH = 1000  # texts that the library gets at a time: with all at once it is slower
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"""


# --- rows


def rows(kind: str) -> Iterator[dict[str, Any]]:
    """Without end; source text begins anew after some 30 MB."""
    if kind == "python":
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        for file in cycle(file for file in files if "site-packages" not in file.parts):
            text = file.read_text("utf-8", "replace")
            parts = (text[i : i + ROW_chars] for i in range(0, len(text), ROW_chars))
            yield from ({"text": part} for part in parts if part.strip())
    from recipes import conversations

    for chat in conversations(sys.maxsize, 0):
        text = "\n\n".join(turn["content"] for turn in chat)
        yield {"messages": chat} if kind == "messages" else {"text": text}


def write(path: Path, kind: str, size_bytes: int) -> None:
    with path.open("wb") as file:
        for row in rows(kind):
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            if file.tell() >= size_bytes:
                return


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE with the splitting rule of Llama 3, trained on recipes and source text in equal parts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def texts() -> Iterator[str]:
        for kind in ("recipes", "python"):
            left = TRAINED_bytes // 2
            for row in rows(kind):
                yield row["text"]
                left -= len(row["text"])
                if left < 0:
                    break

    engine = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    engine.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(texts(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


# --- the two, each in a process of its own


def ours(folder: Path, path: Path, cache: Path) -> int:
    """What a run does with its data; the tokens."""
    from transformers import AutoTokenizer

    from optrush.config import parse_config
    from optrush.data.chat_template import Tokens
    from optrush.data.dataset import read_sources

    tokens = Tokens(AutoTokenizer.from_pretrained(folder))
    top = {"model": "tiny", "objective": "sft", "output": "o", "batch": {"seq": 4096}}
    config = parse_config(
        json.dumps(top | {"data": {"path": str(path), "too_long": "split", "cache": str(cache)}}), "x"
    )

    def work() -> int:
        return int(read_sources(config, tokens, VOCABULARY).train.lengths().sum())

    return timed(work)


def library(folder: Path, path: Path, exact: bool) -> int:
    """`exact`: with offsets, as masks need them."""
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with path.open() as file:
        found = [json.loads(line) for line in file]
    if "text" in found[0]:
        texts = [row["text"] for row in found]
    else:
        wrapped = (((m["role"], m["content"]) for m in row["messages"]) for row in found)
        texts = ["".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) for turns in wrapped]
    del found
    encode = engine.encode_batch if exact else engine.encode_batch_fast

    def work() -> int:
        return sum(len(e) for i in range(0, len(texts), BATCH) for e in encode(texts[i : i + BATCH]))

    return timed(work)


def timed(work: Callable[[], int]) -> int:
    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    begun, before = time.perf_counter(), cpu()
    n = work()
    print(json.dumps({"tokens": n, "s": time.perf_counter() - begun, "cpu_s": cpu() - before}))
    return n


# --- measuring


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")


def measured(*arguments: object) -> dict[str, float]:
    process = started(*arguments)
    out = process.communicate()[0]
    assert process.returncode == 0, arguments
    found: dict[str, float] = json.loads(out)
    return found


def peak_bytes(folder: Path, path: Path, cache: Path) -> int:
    """Most resident memory of the process and its workers together, looked at 20 times a second; shared pages count
    once for each of them."""
    process, most = started("ours", folder, path, cache), 0
    while process.poll() is None:
        pids = [process.pid, *children(process.pid)]
        most = max(most, sum(resident(pid) for pid in pids))
        time.sleep(0.05)
    assert process.communicate() and process.returncode == 0
    return most


def children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def speed(folder: Path, kind: str, size_bytes: int, repeats: int) -> dict[str, Any]:
    path = folder / f"{kind}.jsonl"
    write(path, kind, size_bytes)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "exact": [], "fast": []}
    for _ in range(repeats):
        for what, of in runs.items():
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                of.append(measured(what, folder, path, cache))

    def median(what: str, figure: str) -> float:
        return statistics.median(one[figure] for one in runs[what])

    n = path.read_bytes().count(b"\n")
    return {
        "kind": kind, "bytes": path.stat().st_size, "rows": n,
        "rows_per_s": {what: round(n / median(what, "s")) for what in runs},
        "rows_per_cpu_s": {what: round(n / median(what, "cpu_s")) for what in runs},
        "tokens": runs["ours"][0]["tokens"],
        "tokens_per_s": {what: round(of[0]["tokens"] / median(what, "s")) for what, of in runs.items()},
        "ratio": {what: round(median(what, "s") / median("ours", "s"), 3) for what in ("exact", "fast")},
        "cpu": {what: round(median(what, "cpu_s") / median("ours", "cpu_s"), 3) for what in ("exact", "fast")},
        "s": {what: [round(one["s"], 2) for one in of] for what, of in runs.items()},
        "cpu_s": {what: [round(one["cpu_s"], 2) for one in of] for what, of in runs.items()},
    }  # fmt: skip


def memory(folder: Path, sizes_bytes: list[int]) -> dict[str, Any]:
    path = folder / "grows.jsonl"
    peaks = []
    for size_bytes in sizes_bytes:
        write(path, "recipes", size_bytes)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            peaks.append(peak_bytes(folder, path, Path(cache)))
    return {"kind": "memory", "bytes": sizes_bytes, "peak_bytes": peaks, "ratio": round(peaks[-1] / peaks[0], 3)}


def about() -> dict[str, Any]:
    import tokenizers

    import optrush

    digest = hashlib.sha256()
    for file in sorted(Path(optrush.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    cores = len(os.sched_getaffinity(0))
    return {
        "cores": cores, "processor": platform.processor() or platform.machine(), "load": os.getloadavg()[0],
        "python": platform.python_version(), "tokenizers": tokenizers.__version__, "source": digest.hexdigest()[:16],
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] in ("ours", "exact", "fast"):
        what, folder, path, cache = sys.argv[1], *map(Path, sys.argv[2:])
        ours(folder, path, cache) if what == "ours" else library(folder, path, what == "exact")
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--memory", type=float, nargs="*", default=[], help="sizes of a file, in MB")
    parser.add_argument("--folder", type=Path, help="for files and shards; a temporary one")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder = Path(name)
        make_tokenizer(folder)
        for kind in a.kinds:
            print(json.dumps(speed(folder, kind, int(a.megabytes * 1e6), a.repeats) | about()), flush=True)
        if a.memory:
            print(json.dumps(memory(folder, [int(size * 1e6) for size in a.memory]) | about()), flush=True)


if __name__ == "__main__":
    main()
