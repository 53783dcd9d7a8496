"""Train large language models as efficiently as the hardware allows, and prove it.

The functions of the command line, from Python:

    from optrush import Config, plan, tune, train, evaluate, bench, export, generate

    outcome = train({
        "model": "tiny", "objective": "sft", "data": {"sample": "recipes"}, "output": "runs/first",
        "train": {"steps": 10},
    })
    print(outcome.output, generate("runs/first", ["How do I cook rice?"])[0].text)

docs/python.md describes them. `import optrush` loads nothing; each function imports its modules when called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optrush.api import Callback, Plan, bench, evaluate, export, generate, plan, train, tune
    from optrush.config import Config, Sampling

__version__ = "0.2.0"
__all__ = ["Callback", "Config", "Plan", "Sampling", "bench", "evaluate", "export", "generate", "plan", "train", "tune"]

_PLACES = {"Config": "config", "Sampling": "config"}  # others: `api`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'optrush' has no attribute {name!r}")
    return getattr(importlib.import_module(f"optrush.{_PLACES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
