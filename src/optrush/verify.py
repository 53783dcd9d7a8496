"""Is a written folder what was trained? Its bytes, then logits of our forward pass against transformers' on the folder.

Bytes: each tensor is read again and is the one that was to be written. Logits: both sides in float32 arithmetic, on the
same tokens, so that what differs is the layout (which must not) and what rounding did to the weights when adapters were
merged or `--dtype` converted them. The two models are never in memory together: only the logits are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from optrush.data import readers, schema
from optrush.data import sample as recipes
from optrush.data.batch import collate
from optrush.data.chat_template import Tokens
from optrush.data.schema import Document
from optrush.errors import DataError, RunError
from optrush.job import Job
from optrush.models.hf import load_plain
from optrush.models.weights import Folder

ROWS, LENGTH = 4, 128  # documents compared, most tokens of each
RANDOM_SEED = 0
# Largest difference of a logit, as a part of the largest logit. Nothing was rounded: float32's own noise, over the
# sums of a deep model. Rounded weights are off by up to 2^-12 (float16) and 2^-9 (bfloat16) of themselves each.
EXACT = 1e-4
ROUNDED = {torch.float32: EXACT, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Compared:
    """What the reloaded model's logits are against the trained model's."""

    tokens: int
    texts: str  # which tokens
    scale: float  # the largest logit
    worst: float  # the largest difference
    mean: float  # of all differences
    agreement: float  # share of the tokens for which both predict the same next token
    tolerance: float  # of worst / scale
    rounded: bool  # whether weights were rounded as they were written

    @property
    def sound(self) -> bool:
        return self.worst <= self.tolerance * self.scale  # not so for a NaN

    def __str__(self) -> str:
        how = "rounding included" if self.rounded else "nothing was rounded"
        return (
            f"logits after reloading, {self.texts}, {how}: largest difference {self.worst:.3g} of {self.scale:.3g} "
            f"({self.worst / self.scale:.1e}; at most {self.tolerance:.0e}), mean {self.mean:.3g}, "
            f"same next token for {self.agreement:.2%}"
        )


def digest(t: Tensor) -> str:
    """Of a tensor's bytes, on the host."""
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def demand_bytes(folder: Path, written: Mapping[str, str]) -> None:
    """Raises RunError unless the folder holds these tensors; `written`: digests by Hugging Face name."""
    held = Folder(folder)
    for name, sha in written.items():
        try:
            with safe_open(folder / held.files[name], "pt") as file:
                same = digest(file.get_tensor(name)) == sha
        except (KeyError, OSError, SafetensorError):
            same = False
        if not same:
            raise RunError(f"{folder} is not the trained model: {name} was written otherwise than it is read")


def samples(job: Job, paths: Sequence[str], sample: str | None) -> tuple[list[list[int]], str]:
    """Token ids to compare on, and what they are: the first documents of the run's data, else random tokens.

    Args:
        paths: what `data.eval` or `data.path` names.
        sample: `data.sample`.
    """
    documents: list[list[int]] = []
    if job.tokenizer is not None:
        documents = list(islice(_documents(Tokens(job.tokenizer), paths, sample, job.run.seed), ROWS))
    if documents:
        return documents, f"the first {len(documents)} documents of the data"
    assert isinstance(job.model.embedding.weight, Tensor)
    ids = np.random.default_rng(RANDOM_SEED).integers(0, job.model.embedding.weight.shape[0], (ROWS, LENGTH // 2))
    return ids.tolist(), f"{ROWS} rows of random tokens"


def _documents(tokens: Tokens, paths: Sequence[str], sample: str | None, seed: int) -> Iterator[list[int]]:
    """Documents that are there and can be read; a file that is gone, or another machine's, has none."""
    if sample is not None:
        talks = recipes.conversations(ROWS, seed)
        found = [(schema.Where(Path(sample), i), {"messages": talk}) for i, talk in enumerate(talks, 1)]
        yield from _tokenised(tokens, iter(found))
    for path in paths:
        try:
            if path.startswith(readers.HUB) or not Path(path).exists():
                continue
            for file in readers.find(path):
                yield from _tokenised(tokens, readers.attempts(file))
        except (DataError, OSError):
            continue


def _tokenised(tokens: Tokens, found: Iterator[tuple[schema.Where, Any]]) -> Iterator[list[int]]:
    for where, row in islice(found, 10 * ROWS):
        try:
            if not isinstance(row, DataError):
                for document in tokens.batch([(where, schema.parse(where, row))], "all"):
                    if not isinstance(document, DataError):
                        yield document[0].ids[:LENGTH].tolist()
        except DataError:  # a row that training refuses, too
            continue


@torch.no_grad()
def trained(job: Job, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 logits (T, V) of the trained model for each text, on the host. Its weights become float32."""
    job.model.eval()
    stored = [m.stored for _, m in job.model.linears() if m.stored is not None]
    codes = {id(p) for s in stored if isinstance(s, nn.Module) for p in s.parameters()}  # bytes, whatever their type
    for p in job.model.parameters():
        if id(p) not in codes:
            p.data = p.data.float()
    found = []
    for ids in texts:
        document = Document(np.array(ids, np.int32), np.arange(len(ids)) > 0)
        row = collate([[(0, document)]], len(ids), single=True, most=1).to(job.world.device)
        hidden = job.model(row.tokens, row.positions, row.documents)  # (1, T, D)
        found.append(job.model.head.logits(hidden)[0].cpu())
    return found


@torch.no_grad()
def reloaded(folder: Path, texts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """The same of the folder, by transformers alone."""
    model = load_plain(folder, torch.float32, device)
    return [model(torch.tensor([list(ids)], device=device), use_cache=False).logits[0].float().cpu() for ids in texts]


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], texts: str, dtype: torch.dtype, exact: bool) -> Compared:
    """ours, theirs: (T, V) each. `exact`: the weights were written as they were trained."""
    a, b = torch.cat(list(ours)), torch.cat(list(theirs))
    off = (a - b).abs()
    return Compared(
        tokens=len(a),
        texts=texts,
        scale=a.abs().max().item(),
        worst=off.max().item(),
        mean=off.mean().item(),
        agreement=(a.argmax(-1) == b.argmax(-1)).float().mean().item(),
        tolerance=EXACT if exact else ROUNDED[dtype],
        rounded=not exact,
    )


def demand(found: Compared, folder: Path) -> None:
    """Raises RunError where the folder does not compute what was trained."""
    if not found.sound:
        raise RunError(f"{folder} is not the trained model: {found}; it is left there to be looked at")
