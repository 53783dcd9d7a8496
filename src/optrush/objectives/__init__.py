"""Objectives: the target tokens, the valid layouts of rows, and the next-token loss.

Each preference objective is a file of its name with the loss `score`; pairs.py has shared code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from optrush.config import JUDGED, SECTIONS, Config
from optrush.errors import ConfigError
from optrush.objectives.plugged import figures_of, plugged_loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optrush.data.batch import Batch
    from optrush.data.packing import RowLayout

# Metrics of preference objectives besides the loss, means over pairs: names in metrics.jsonl (docs/dpo.md).
FIGURES = ("rewards_chosen", "rewards_rejected", "reward_accuracy", "reward_margin")
JUDGEMENTS = ("kl", "reward_accuracy", "reward_margin")  # for labelled answers, means over answers (docs/kto.md)
LESSONS = ("kl", "next_token_loss")  # for distillation, means over target tokens (docs/distill.md)
# For sampled answers, means over their tokens, and one maximum (docs/grpo.md).
SAMPLED = ("ratio", "clipped", "kl", "logp_difference_mean", "logp_difference_max")
ALL_FIGURES = tuple(dict.fromkeys((*FIGURES, *JUDGEMENTS, *LESSONS, *SAMPLED)))


def figures(config: Config) -> tuple[str, ...]:
    """Return the names of the objective's metrics besides the loss."""
    if config.loss is not None:
        return figures_of(config.loss)
    of = {JUDGED: JUDGEMENTS, "distill": LESSONS, "grpo": SAMPLED}
    return of.get(config.objective, FIGURES if config.paired else ())


def unit(config: Config) -> str:
    """Return the unit of the loss."""
    if config.loss is not None:
        return f"{config.loss.use}, {'a pair' if config.paired else 'a target token'}"
    of = {JUDGED: "a judged answer", "grpo": "a sampled token, weighted by its advantage"}
    return of.get(config.objective, "a pair" if config.paired else "nats per target token")


def learnt(config: Config) -> str:
    """Return the target tokens of a conversation: `all` in pretraining, `data.train_on` in fine-tuning.

    `each` makes one document per answer, with only that answer as target (`data.split_turns`); `each-answer` also
    excludes its thoughts.
    """
    if config.data.split_turns:
        return "each-answer" if config.data.train_on == "answer" else "each"
    return {"pretrain": "all", "grpo": "last"}.get(config.objective, config.data.train_on)


def check_layout(config: Config, layout: RowLayout) -> None:
    """Raise an error if the objective cannot be trained on these rows.

    Raises:
        ConfigError: pairs, or stored teacher tokens, in rows that split documents.
    """
    if config.paired and not (layout.isolated and layout.uncut):
        found = "rows whose documents are split and attend to each other; a pair's answers must not"
        raise ConfigError(f"`objective: {config.objective}` with --with wrap", found, "use --with packing instead")
    stored = None if config.distill is None else config.distill.store
    if stored is not None and not (layout.isolated and layout.uncut):
        found = "rows whose documents are split and attend to each other; the teacher read them one by one"
        raise ConfigError(f"`distill.store: {stored}` with --with wrap", found, "use --with packing, or remove it")


def loss_of(config: Config, head: nn.Module, metrics: Mapping[str, Tensor]) -> Callable[[Tensor, Batch], Tensor]:
    """Return the objective's loss function: hidden states (B, T, D), batch -> the sum over the batch's terms.

    Args:
        metrics: a tensor per name of `figures`, to which the loss adds sums.
    """
    if config.loss is not None:
        return plugged_loss(config.loss, head, metrics)
    if config.objective not in SECTIONS:
        return partial(next_token, head)
    score = import_module(f"{__name__}.{config.objective}").score
    return cast("Callable[[Tensor, Batch], Tensor]", partial(score, head, getattr(config, config.objective), metrics))


def next_token(head: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of the batch's targets, times their weights: hidden (B, T, D) -> () float32.

    The loss of pretrain and sft, which differ only in their targets. Calls the head and never reads its weight: with
    sharding, only its forward has the full weight.
    """
    if (weights := batch.extra.get("weights")) is not None:
        weighted: Tensor = head(hidden, batch.labels, reduce="none") * weights
        return weighted.sum()
    loss: Tensor = head(hidden, batch.labels)
    return loss
