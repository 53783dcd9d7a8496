"""Reward sampled answers by verifiable rules: a number, a text, a pattern, a length, a user's function.

A reward is `function(answer, reference, row) -> number`: the sampled text, the row's answer, and the row. If the
function raises, takes too long or returns no number, the answer has no reward, which differs from 0; such answers are
counted and logged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any

from optrush.config import RewardRule
from optrush.data.time_limit import TooLong, limited
from optrush.errors import ConfigError, one_line
from optrush.objectives import plugged

NUMBER = re.compile(r"(?<!\d)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
BOXED = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
MARKED = re.compile(rf"####\s*([^\n]*)|{BOXED}")  # marks around an answer's result
LARGEST = 1e12  # maximum reward: larger values would absorb the others in a sum
Function = Callable[[str, str, Mapping[str, Any]], float]


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text: 1234.5 for "1,234.50"; None if there is none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def result_number(text: str) -> Decimal | None:
    r"""Return the number after the last `####` or in the last `\boxed{}`, else the last number in a text."""
    marked = [line or boxed for line, boxed in MARKED.findall(text)]
    if marked and "\\" in marked[-1]:  # a fraction or another formula, not a single number
        return None
    return last_number(marked[-1] if marked else text)


def same_number(answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the answer's result is the same number as the reference's."""
    result = result_number(answer)
    return float(result is not None and result == result_number(reference))


def same_text(answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the answer equals the reference, ignoring white space around it."""
    return float(answer.strip() == reference.strip())


def has_text(answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the reference is in the answer."""
    return float(reference.strip() in answer)


def matches(pattern: re.Pattern[str], answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """Return 1 if a pattern is found in the answer."""
    return float(pattern.search(answer) is not None)


def short_text(most: int, answer: str, reference: str, row: Mapping[str, Any]) -> float:
    """Return 1 for an answer of at most `most` characters, else most / characters."""
    return min(1.0, most / max(1, len(answer)))


BUILT_IN: dict[str, Function] = {"number": same_number, "exact": same_text, "contains": has_text}
WITH_OPTIONS = {"regex": ("pattern", str), "length": ("most", int)}


def is_own(rule: RewardRule) -> bool:
    """Return whether a rule is a user's function, which may read the row."""
    return rule.use not in BUILT_IN and rule.use not in WITH_OPTIONS


def open_reward(rule: RewardRule) -> Function:
    """Return the function of a rule.

    Raises:
        ConfigError: no such reward, an option is missing or unknown, or a function cannot be loaded.
    """
    asked, given = f"the reward `{rule.use}`", dict(rule.options)
    if rule.use in WITH_OPTIONS:
        key, kind = WITH_OPTIONS[rule.use]
        value: Any = given.pop(key, None)
        sound: bool = isinstance(value, kind) and not isinstance(value, bool)
        if not sound or given:
            found = f"options {', '.join(rule.options) or 'none'}"
            example = "pattern: '^<answer>.*</answer>$'" if key == "pattern" else "most: 400"
            raise ConfigError(asked, found, f"write {{use: {rule.use}, options: {{{example}}}}}")
        if rule.use == "length":
            return partial(short_text, max(1, int(value)))
        try:
            return partial(matches, re.compile(str(value), re.DOTALL))
        except re.error as error:
            raise ConfigError(asked, f"not a regular expression: {error}", "fix options.pattern") from None
    if rule.use in BUILT_IN:
        if given:
            raise ConfigError(asked, f"unknown options {', '.join(given)}", "remove options")
        return BUILT_IN[rule.use]
    if ":" not in rule.use and rule.use not in plugged.entry_names("reward"):
        known = ", ".join([*BUILT_IN, *WITH_OPTIONS, *plugged.entry_names("reward")])
        raise ConfigError(asked, f"no such reward; known: {known}", "name one of these, or write FILE.py:FUNCTION")
    function: Function = plugged.find("reward", rule.use)
    return partial(function, **given) if given else function


@contextmanager
def _forks_ended() -> Iterator[None]:
    """Kill forked processes that leave the block: each would continue as a second trainer or worker."""
    process, code = os.getpid(), 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        if os.getpid() != process:
            os._exit(code & 0xFF)


@dataclass
class Judge:
    """The rewards of a run: their weighted sum for an answer, and failures.

    seconds: limit of a function per answer.
    """

    rules: Sequence[RewardRule]
    seconds: float
    functions: list[Function] = field(init=False)
    first_failure: str = ""
    said: bool = False  # whether the run has logged it

    def __post_init__(self) -> None:
        self.functions = [open_reward(rule) for rule in self.rules]

    @property
    def names(self) -> list[str]:
        """Return short, unique names of the rewards, for the metrics."""
        short = list[str]()
        for rule in self.rules:
            name = re.sub(r"\W+", "_", rule.use.rpartition(":")[2])
            short.append(name if name not in short else f"{name}_{len(short) + 1}")
        return short

    def __call__(self, answer: str, reference: str, row: Mapping[str, Any], where: str) -> list[float] | None:
        """Return the value of each reward, unweighted; None if one of them failed."""
        values = []
        for rule, function in zip(self.rules, self.functions, strict=True):
            try:
                with _forks_ended(), limited(self.seconds):
                    value = function(answer, reference, row)
                if isinstance(value, str | bytes) or not abs(float(value)) <= LARGEST:
                    raise ValueError(f"it returned {value!r}, not a finite number up to {LARGEST:g}")
                values.append(float(value))
            except (Exception, SystemExit, TooLong) as error:  # from the user's code
                what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.first_failure = self.first_failure or one_line(f"the reward `{rule.use}` at {where}: {what}")
                return None
        return values

    def every(self, answers: Sequence[tuple[str, str, Mapping[str, Any], str]]) -> list[list[float] | None]:
        """Return the values for several answers, each given as the arguments of `__call__`."""
        return [self(*answer) for answer in answers]

    def total(self, values: Sequence[float]) -> float:
        """Return the weighted sum."""
        return sum(rule.weight * value for rule, value in zip(self.rules, values, strict=True))
