"""A worker: a fresh interpreter that turns chunks of files into shards.

It is told its jobs on standard input, a line of JSON each, and answers with one. So it inherits no GPU, no process
group and no lock, needs no pickle, and does not run the caller's main module again. It never imports torch, which would
cost more memory than all that it does, and transformers only for the templates of conversations.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from optrush.data.chat import Tokens
from optrush.data.read import Chunk
from optrush.data.tokenising import Job, Kept, commit, template
from optrush.errors import UserError


def order(tokens: Tokens, kept: Kept, train_on: str, text_rows: str, folder: Path) -> dict[str, Any]:
    """How to tokenise, as a worker is told it first; what is large lies in the folder, under the shards' lock."""
    tokenizer, engine, rows = tokens.tokenizer, folder / "tokenizer.json", folder / "kept.npz"
    engine.write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
    if kept is not None:
        save(rows, kept)
    return {
        "tokenizer": str(engine), "eos": tokenizer.eos_token_id, "special": tokenizer.special_tokens_map,
        "template": template(tokens), "kept": kept and str(rows), "train_on": train_on, "text_rows": text_rows,
        "folder": str(folder),
    }  # fmt: skip


def save(path: Path, kept: Sequence[np.ndarray]) -> None:
    """Writes which rows cleaning kept, by file."""
    with path.open("wb") as file:
        np.savez_compressed(file, *kept)


def load(path: Path) -> list[np.ndarray]:
    """What `save` wrote."""
    with np.load(path) as held:
        return [held[f"arr_{i}"] for i in range(len(held.files))]


def main() -> None:
    """A worker: the first line says how to tokenise, each further one a job; it ends where its input does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not pass for an answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # whoever asked is gone: what is half done stays undone

    threading.Thread(target=listen, daemon=True).start()
    try:
        work = _begin(json.loads(lines.get()))
        while True:
            try:
                answer = work(json.loads(lines.get()))
            except UserError as error:
                answer = {"error": [type(error).__name__, error.asked, error.found, error.do]}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: the interpreter would wait for the thread that listens


class _Tokenizer:
    """What `Tokens` asks of a tokenizer, from what the process that started this one wrote down of its own."""

    is_fast = True

    def __init__(self, said: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.name_or_path, self.eos_token_id = said["tokenizer"], said["eos"]
        self.special_tokens_map, self._template = said["special"], said["template"]
        self.backend_tokenizer = Tokenizer.from_file(said["tokenizer"])
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, given: str | None) -> str:
        if self._template is None:
            raise ValueError("no template")
        return str(self._template)

    def convert_ids_to_tokens(self, i: int) -> str | None:
        return self.backend_tokenizer.id_to_token(i)


def _begin(order: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Opens the tokenizer; what comes back does a job."""
    tokens = Tokens(cast(Any, _Tokenizer(order)))
    folder, kept = Path(order["folder"]), None if order["kept"] is None else load(Path(order["kept"]))

    def work(task: dict[str, Any]) -> dict[str, Any]:
        chunks = tuple((file, Chunk(Path(path), *rest)) for file, path, *rest in task["chunks"])
        job = Job(task["number"], chunks, marks=tuple(task["marks"]))
        names, n = commit(job, tokens, order["train_on"], order["text_rows"], kept, folder, task["skip"], task["piece"])
        return {"names": names, "rows": n}

    return work
