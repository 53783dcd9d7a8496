"""Many prompts, one model or two: answers in batches, and how likely each model finds the rows' own answers.

One model is in memory at a time. The likelihood is the one simple measure here: the negative log-likelihood, in nats,
of all tokens of the reference that training would learn, its end of turn included. It says which model expects the
reference more, not whose answers are better.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from optrush.data.prompts import Prompt
from optrush.data.schema import Document
from optrush.errors import RunError
from optrush.judge import Rate, Verdict, rate
from optrush.sampling import Sampling
from optrush.step import exhausted
from optrush.talk import Answer, Place, Speaker

EQUAL = 1e-6  # relative: two likelihoods nearer than this are a tie


@dataclass(frozen=True)
class Said:
    """One model's part of a row."""

    answer: Answer
    nll: float | None = None  # of the reference, summed over its tokens
    nll_tokens: int | None = None

    def facts(self, prefix: str = "") -> dict[str, Any]:
        found = {prefix or "answer": self.answer.text}
        more = asdict(self.answer) | {"reference_nll": self.nll, "reference_tokens": self.nll_tokens}
        del more["text"]
        start = f"{prefix}_" if prefix else ""
        return found | {f"{start}{key}": value for key, value in more.items() if value is not None}


def ask(
    place: Place,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    seed: int,
    batch: int,
    template: str | None = None,
    measures: bool = False,
    advance: Callable[[int], None],
) -> Iterator[Said]:
    """The model's answers in the order of the prompts; it is loaded here and gone afterwards.

    Args:
        template: for a model that has none.
        measures: the likelihood of the references, too.
        advance: told how many more are done.

    Raises:
        UserError: before anything is answered, if one of the prompts cannot be asked.
        RunError: out of memory.
    """
    speaker = Speaker(place, template)
    ids = [speaker.ids(p.asked, p.where, p.tools) for p in prompts]
    references = [_reference(speaker, p) if measures else None for p in prompts]
    try:
        for first in range(0, len(ids), batch):
            answers = speaker.answers(ids[first : first + batch], sampling, seed + first)
            for answer, document in zip(answers, references[first:]):
                yield Said(answer, *((None, None) if document is None else speaker.nll(document)))
            advance(len(answers))
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        smaller = f"take --batch {batch // 2}" if batch > 1 else "take a smaller --max-tokens"
        raise RunError(f"out of memory with {batch} prompts at once; {smaller}") from error
    finally:
        del speaker
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _reference(speaker: Speaker, prompt: Prompt) -> Document | None:
    if prompt.row is None:
        return None
    return speaker.tokens.document(prompt.row, "last", prompt.where)


def likelier(pairs: Sequence[tuple[Said, Said]]) -> Rate:
    """How often the first model gives a reference the higher likelihood."""
    return rate([_likelier(a.nll, b.nll) for a, b in pairs if a.nll is not None and b.nll is not None])


def _likelier(ours: float, theirs: float) -> Verdict:
    if abs(ours - theirs) <= EQUAL * max(abs(ours), abs(theirs)):
        return "tie"
    return "answer" if ours < theirs else "other"
