"""How an answer is drawn. Pure: flags and `/set` are checked here before a model is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from optrush.config import nearest, scalar
from optrush.errors import ConfigError

COLDEST, HOTTEST = 1e-3, 1e3  # beyond, dividing logits by it leaves no finite numbers, or no differences


@dataclass(frozen=True)
class Sampling:
    """`greedy` takes the likeliest token each time; else it is drawn, from the most likely ones."""

    temperature: float = 0.7
    top_p: float = 0.9  # the fewest tokens whose probabilities sum to it
    top_k: int = 0  # the likeliest so many; 0: all
    max_tokens: int = 512
    greedy: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for what no draw can be made with."""
        wrong = (
            (
                "temperature",
                COLDEST <= self.temperature <= HOTTEST,
                f"of {COLDEST} to {HOTTEST}; --greedy draws nothing",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (all of them) or more"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
        )
        for name, met, do in wrong:
            if not met:
                raise ConfigError(f"`{name}`", f"{getattr(self, name)}", f"take a value {do}")

    def changed(self, setting: str) -> Sampling:
        """With `name=value` laid over it.

        Raises:
            ConfigError: no such name, or no such value.
        """
        name, equals, text = setting.replace("-", "_").partition("=")
        name, value = name.strip(), scalar(text.strip())
        kinds = {f.name: type(f.default) for f in dataclasses.fields(self)}
        if name not in kinds:
            raise ConfigError(f"/set {setting}", "no such setting", nearest(name, kinds))
        kind = kinds[name]
        value = float(value) if kind is float and isinstance(value, int) and not isinstance(value, bool) else value
        if not equals or type(value) is not kind:
            raise ConfigError(f"/set {setting}", "no value of its kind", f"/set {name}={getattr(self, name)}")
        changes: dict[str, Any] = {name: value}
        return dataclasses.replace(self, **changes)
