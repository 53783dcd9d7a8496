"""What is learnt. An objective says which tokens are targets and how rows may lie; the scores: loss.py, dpo.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrush.config import Config
from optrush.errors import ConfigError

if TYPE_CHECKING:
    from optrush.data.packing import Layout

# What preferences say beside their loss, means over pairs: names of metrics.jsonl (docs/dpo.md).
FIGURES = ("rewards_chosen", "rewards_rejected", "reward_accuracy", "reward_margin")


def unit(config: Config) -> str:
    """What a loss is counted in."""
    return "a pair" if config.objective == "dpo" else "nats a target token"


def learnt(config: Config) -> str:
    """Which tokens of a conversation are targets: in pre-training all of them, in fine-tuning what the run says."""
    return "all" if config.objective == "pretrain" else config.data.train_on


def check_layout(config: Config, layout: Layout) -> None:
    """Refuses rows that the objective cannot learn from.

    Raises:
        ConfigError: pairs in rows whose documents are torn, and see each other.
    """
    if config.objective == "dpo" and not (layout.isolated and layout.uncut):
        found = "rows whose documents are torn and see each other, where two answers must stand apart"
        raise ConfigError("`objective: dpo` with --with wrap", found, "take --with packing instead")
