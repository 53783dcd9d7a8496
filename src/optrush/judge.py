"""Two answers to each prompt: which one a person prefers without knowing whose it is, and how often. Pure.

Verdicts are kept line by line beside the answers, so judging can stop and go on. A verdict names the answers by their
hash: answers that were generated anew are judged anew, not by old verdicts.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from optrush.errors import DataError

Verdict = Literal["answer", "other", "tie"]
Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True)
class Rate:
    """How often the first of two won. Ties count for neither; the interval is Wilson's, of 95 %."""

    wins: int
    losses: int
    ties: int
    rate: float | None  # wins / (wins + losses)
    low: float
    high: float

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.rate is None:
            return f"0 decided, {self.ties} ties"
        decided = self.wins + self.losses
        interval = f"95 % interval {self.low:.1%} to {self.high:.1%}"
        return f"{self.rate:.1%} of {decided} decided ({interval}), {self.ties} ties"


def rate(verdicts: Sequence[Verdict]) -> Rate:
    """Source of the interval: Wilson 1927, doi:10.1080/01621459.1927.10502953."""
    wins, losses = verdicts.count("answer"), verdicts.count("other")
    n, ties = wins + losses, len(verdicts) - wins - losses
    if n == 0:
        return Rate(0, 0, ties, None, 0.0, 1.0)
    p = wins / n
    centre, spread = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    whole = 1 + Z * Z / n
    return Rate(wins, losses, ties, p, max(0.0, (centre - spread) / whole), min(1.0, (centre + spread) / whole))


@dataclass(frozen=True)
class Case:
    """One prompt with two answers; `left` is the one that is shown first."""

    row: int
    prompt: Any
    answer: str
    other: str
    left: Literal["answer", "other"]
    mark: str

    @property
    def sides(self) -> tuple[str, str]:
        return (self.answer, self.other) if self.left == "answer" else (self.other, self.answer)

    def verdict(self, key: str) -> Verdict | None:
        """What a key means here: 1 the first, 2 the second, 0 neither; None: no such key."""
        right: Verdict = "other" if self.left == "answer" else "answer"
        return {"1": self.left, "2": right, "0": "tie"}.get(key)


def cases(path: Path, seed: int) -> list[Case]:
    """The rows of a file of answers; which side each answer is on depends on (seed, row) alone.

    Raises:
        DataError: no such file, or a row without two answers.
    """
    found = []
    for n, row in enumerate(_rows(path), 1):
        texts = [row.get(key) for key in ("answer", "other")]
        if "prompt" not in row or not all(isinstance(text, str) for text in texts):
            do = "generate with --base or --against OTHER"
            raise DataError(f"to judge {path}:{n}", "no `prompt`, `answer` and `other` in it", do)
        mark = hashlib.sha256(json.dumps([row["prompt"], *texts]).encode()).hexdigest()[:16]
        left: Literal["answer", "other"] = "answer" if random.Random(f"{seed} {n}").random() < 0.5 else "other"
        found.append(Case(n, row["prompt"], row["answer"], row["other"], left, mark))
    return found


def verdicts(path: Path, known: Sequence[Case]) -> dict[int, Verdict]:
    """The verdicts that a file holds on these cases, by row.

    Raises:
        DataError: a line that is none, or one on other answers.
    """
    marks = {case.row: case.mark for case in known}
    found: dict[int, Verdict] = {}
    begun = path.is_file() and path.stat().st_size > 0  # empty: stopped before the first
    for n, row in enumerate(_rows(path) if begun else [], 1):
        at, verdict = row.get("row"), row.get("verdict")
        if type(at) is not int or verdict not in ("answer", "other", "tie") or marks.get(at, "") != row.get("mark"):
            what = "a verdict on other answers" if "verdict" in row else "no verdict"
            raise DataError(f"the verdicts in {path}:{n}", what, f"delete {path.name}, and judge again")
        found[at] = verdict
    return found


def line(case: Case, verdict: Verdict, seed: int) -> str:
    return json.dumps({"row": case.row, "verdict": verdict, "left": case.left, "seed": seed, "mark": case.mark}) + "\n"


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text("utf-8").removesuffix("\n").split("\n")  # not splitlines: a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"to read {path}", found, "name a file that `optrush generate` wrote") from None
    for n, text in enumerate(lines, 1):
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{n}", "no JSON object", "name a file that `optrush generate` wrote")
        yield row
