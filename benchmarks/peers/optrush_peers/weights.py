"""Write the random initial weights for other systems, once: `python -m optrush_peers.weights REQUEST.json`.

The same values that a run of the shape begins with, as a Hugging Face folder with a tokenizer that has every token,
because some loaders require one. Runs in a process of its own, so that it does not count in the measured memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrush.config import Config
from optrush.errors import RunError
from optrush.models.source import locate

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TAIL = 5  # lines of the standard error of a failed writer


def ensure(config: Config, dtype: str, device: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder with the run's initial weights in `dtype`, and its config.json; a run on a folder has its own.

    Args:
        device: "cuda" or "cpu": random values are the same on devices of one kind, so they are drawn where ours are.

    Raises:
        RunError: they could not be written.
    """
    folder, hf = locate(config)
    if folder is not None:
        return folder, hf
    request = {"hf": hf, "dtype": dtype, "seed": config.seed, "device": device}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
    target = root() / f"{str(config.model.shape).replace('/', '--')}-{dtype}-{digest}"
    if not target.is_dir():
        root().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump({**request, "target": str(target)}, file)
        try:
            command = [sys.executable, "-m", "optrush_peers.weights", file.name]
            path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]))
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        finally:
            os.unlink(file.name)
        if done.returncode:
            last = " | ".join(done.stderr.strip().splitlines()[-TAIL:])
            raise RunError(f"random weights could not be written into {target}: {last}")
    return target, hf


def root() -> Path:
    """Return their folder: under `$OPTRUSH_CACHE`, or in the user's cache."""
    given = os.environ.get("OPTRUSH_CACHE")
    cache = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrush"
    return cache / "peers"


def write(hf: Mapping[str, Any], dtype: str, seed: int, device: str, target: Path) -> None:
    """Write the folder, completely or not at all."""
    import torch

    from optrush.models.hf import load
    from optrush.models.weights import export_weights

    model, recipe = load(None, hf, None, getattr(torch, dtype), seed)

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            recipe.fill(name, value, (0,) * value.dim())
            yield name, value.cpu()

    fresh = Path(tempfile.mkdtemp(prefix="fresh-", dir=target.parent))
    try:
        export_weights(fresh, drawn(), recipe, hf)
        name_tokens(int(hf["vocab_size"]), fresh)
        fresh.chmod(0o755)  # a temporary folder is its owner's alone
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def name_tokens(vocab: int, folder: Path) -> None:
    """Write a tokenizer of `vocab` words: t4, t5 and so on, and four special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *(f"t{i}" for i in range(len(SPECIAL), vocab))][:vocab]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)  # type: ignore[no-untyped-call]
    whole.save_pretrained(folder)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    write(request["hf"], request["dtype"], request["seed"], request["device"], Path(request["target"]))


if __name__ == "__main__":
    main()
