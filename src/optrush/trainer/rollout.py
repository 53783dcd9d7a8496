"""Sample, reward and pack the answers that `objective: grpo` learns from.

A step takes prompts in the order in which it would take rows, samples a group of answers to each from the model
as it is, rewards them, and hands the loop micro-batches like any other: the loop does not know that they were sampled.
What is drawn follows from (seed, prompt, member, position), and a prompt's number from the step. So a resumed run
samples what the run that was stopped would have sampled.

A row of the data is a conversation or a text with its answer: its prompt is what is before the last answer, and that
answer is the reference of the rewards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from optrush import files
from optrush.config import Config, Grpo
from optrush.data.batch import Batch, collate
from optrush.data.packing import Padded, RowLayout
from optrush.data.readers import read_rows
from optrush.data.sampler import Loading, Row, Stream, StreamPlan, Totals, plain_cost
from optrush.data.samples import SampleSource
from optrush.data.schema import Document, RowLocation
from optrush.data.tokenizer import answer_ends
from optrush.errors import ConfigError, DataError, NeedsError, RunError, exhausted, first_line
from optrush.models.kv_cache import check_cacheable
from optrush.models.sampling import Drawing, PromptIds, SampledAnswer, sample
from optrush.objectives import grpo
from optrush.objectives.rewards import Judge
from optrush.trainer import distributed, run_dir

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

ANSWERS = "answers.jsonl"  # in the run's folder: one group of each logged step
EVAL_SEED = 2**31  # an evaluation's draws are others than any step's


@dataclass(frozen=True)
class Rewarded:
    """An answer with its reward (None: a reward failed), the single ones, and its advantage in its group."""

    answer: SampledAnswer
    reward: float | None
    values: list[float]
    advantage: float = 0.0


class PromptStream(Stream):
    """Prompts as rows of a step, and as its micro-batches the answers sampled to them."""

    tokenized = True
    trainer: Trainer  # set by `attach`
    sampler: Sampler

    def __init__(self, source: SampleSource, layout: RowLayout, settings: Grpo, *, T: int, seed: int) -> None:
        """layout: of the sampled answers. Raises ConfigError: a prompt and its answer do not fit a row."""
        self.packed, self.settings = layout, settings
        longest = int((source.lengths() - source.targets()).max())
        if longest + settings.max_new > T:
            found = f"a prompt of {longest:,} tokens and `grpo.max_new: {settings.max_new}`"
            do = f"set batch.seq: {-(-(longest + settings.max_new) // 64) * 64}, or a smaller grpo.max_new"
            raise ConfigError(f"`batch.seq: {T}`", found, do)
        super().__init__(source, Padded(), T=T, rows=settings.prompts, seed=seed, cost=plain_cost)
        shortest = int((source.lengths() - source.targets()).min())
        self.room = T // max(1, shortest + 1) + 1 if not layout.one_doc else 2

    def plan(self, epochs: float | None = None, steps: int | None = None) -> StreamPlan:
        """Return the length of a run; of several updates a rollout every prompt has as many steps."""
        updates = self.settings.updates
        whole = super().plan(epochs, None if steps is None else -(-steps // updates))
        return StreamPlan(steps or whole.steps * updates, whole.rows, self.room)

    def totals(self, plan: StreamPlan, micro_rows: int) -> Totals | None:
        """Return None: how long answers will be is not known."""
        return None

    def position(self, k: int) -> int:
        return k // self.settings.updates * self.rows

    def batches(self, k: int, plan: StreamPlan, *, rank: int, ranks: int, micro_rows: int) -> list[Batch]:
        """Return none: a step is sampled from the weights that the steps before it left."""
        return []

    def run(
        self, plan: StreamPlan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the steps from `done` on; each is sampled when it is asked for."""
        updates, made = self.settings.updates, list[Batch]()
        self.sampler.forget_after(done)
        for k in range(done, plan.steps):
            if k % updates == 0 or k == done:
                rows = self.step(k // updates, plan)
                first = k // updates * self.rows
                mine = [(first + r, rows[r]) for r in range(rank, self.rows, ranks)]
                made = self.sampler.step(k + 1, mine, micro_rows)
            yield made

    def collated(self, rows: Sequence[Row], micro_rows: int) -> Batch:
        """Collate at most `micro_rows` rows; of fewer, as many as the next power of two: few shapes, little padding."""
        many = min(micro_rows, 1 << max(0, len(rows) - 1).bit_length())
        whole = [*rows, *([] for _ in range(many - len(rows)))]
        return collate(whole, self.T, single=self.packed.one_doc, most=many * self.room)


@dataclass
class Sampler:
    """What samples, rewards and packs; one a run."""

    trainer: Trainer
    stream: PromptStream
    judge: Judge
    ends: list[int]
    raw: Callable[[int], Mapping[str, Any]]  # of a sample: its row as it is in the file
    settings: Grpo = field(init=False)

    def __post_init__(self) -> None:
        assert self.trainer.config.grpo is not None
        self.settings = self.trainer.config.grpo

    # --- sampling and rewards

    def answers(
        self, rows: Sequence[tuple[int, int, Document]], seed: int, source: SampleSource, *, greedy: bool = False
    ) -> list[list[Rewarded]]:
        """Sample and reward answers.

        Args:
            rows: of each prompt its number, its sample and the document with its answer.
            greedy: one answer of the likeliest tokens.

        Raises:
            RunError: keys and values of so many answers do not fit.
        """
        s, trainer = self.settings, self.trainer
        prompts = [PromptIds(number, d.ids[: begin_of_answer(d)]) for number, _, d in rows]
        members = 1 if greedy else s.group
        drawing = Drawing(s.max_new, 0.0 if greedy else s.temperature, self.ends, seed, s.slots)
        try:
            found = sample(trainer.model, prompts, members, drawing, precision_of(trainer))  # type: ignore[arg-type]
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            asked = f"`grpo.slots: {s.slots}` answers of `grpo.max_new: {s.max_new}` tokens at a time"
            do = f"take grpo.slots: {max(1, s.slots // 2)}, or a smaller grpo.max_new"
            raise RunError(asked, f"out of memory while sampling: {first_line(error)}", do) from error
        groups = []
        for p, (_, number, document) in enumerate(rows):
            group = found[p * members : (p + 1) * members]
            groups.append(self._rewarded(group, number, document, source))
        return groups

    def _rewarded(
        self, group: Sequence[SampledAnswer], number: int, document: Document, source: SampleSource
    ) -> list[Rewarded]:
        reference = self.text(document.ids[document.targets])
        row, where = self.raw(number), f"row {number}"
        values = [self.judge(self.text(a.ids), reference, row, where) for a in group]
        rewards = [None if v is None else self.judge.total(v) for v in values]
        advantages = grpo.advantages_of(rewards, self.settings)
        columns = zip(group, rewards, values, advantages, strict=True)
        return [Rewarded(a, reward, v or [], advantage) for a, reward, v, advantage in columns]

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.trainer.tokenizer.decode(list(map(int, ids)), skip_special_tokens=True))

    def forget_after(self, step: int) -> None:
        """Cut `answers.jsonl` back to a step, which a run goes on from."""
        file = Path(self.trainer.config.output) / ANSWERS
        if self.trainer.world.rank == 0 and file.is_file():
            run_dir.cut_back(file, step)

    # --- a step's micro-batches

    def step(self, step: int, rows: Sequence[tuple[int, Row]], micro_rows: int) -> list[Batch]:
        """Return this rank's micro-batches of a step; every rank calls it, and gets as many.

        Args:
            rows: the number of each prompt in the run, and its row of one sample; none at the end of the data.
        """
        began = time.perf_counter()
        given = [(number, sample, document) for number, row in rows for sample, document in row]
        groups = self.answers(given, self.trainer.config.seed, self.stream.source)
        sampled_s = time.perf_counter() - began
        self._check_first(groups)
        learnt = [
            (sample, document, r)
            for (_, sample, document), group in zip(given, groups, strict=True)
            for r in group
            if self.learns(r)
        ]
        tokens, answers = sum(len(r.answer.ids) for _, _, r in learnt), len(learnt)
        moving = [one for one in learnt if self.moves(one[2])]
        packed, terms = self._rows(moving), sum(len(r.answer.ids) for _, _, r in moving)
        *sizes, micros = self._agreed(groups, (terms, tokens, answers), -(-len(packed) // micro_rows), sampled_s)
        batches = [self._batch(packed[i * micro_rows : (i + 1) * micro_rows], micro_rows, sizes) for i in range(micros)]
        if self.settings.updates > 1:
            batches = [replace(b, extra={**b.extra, "old": old}) for b, old in zip(batches, self._old(batches))]
        self._show(step, given, groups)
        return batches

    def learns(self, r: Rewarded) -> bool:
        """Return whether an answer is learnt: it has a reward, and ended or is kept all the same."""
        return r.reward is not None and (r.answer.ended or self.settings.truncated == "keep")

    def moves(self, r: Rewarded) -> bool:
        """Return whether an answer moves a weight: one as good as its group has no gradient, unless the base pulls."""
        return r.advantage != 0 or self.settings.beta > 0

    def _rows(self, learnt: Sequence[tuple[int, Document, Rewarded]]) -> list[list[tuple[int, Document, Rewarded]]]:
        """Lay prompts with their answers out in rows of at most T tokens."""
        if not learnt:
            return []
        whole = []
        for number, document, r in learnt:
            n = begin_of_answer(document)
            ids = np.concatenate([document.ids[:n], np.asarray(r.answer.ids, document.ids.dtype)])
            whole.append((number, Document(ids, np.arange(len(ids)) >= n), r))
        lengths = np.array([len(d) for _, d, _ in whole], np.int64)
        laid = self.stream.packed.place(lengths, self.stream.T, 1, 0, np.random.PCG64(0))
        return [[whole[i] for i in laid.samples[a:b]] for a, b in zip(laid.starts, laid.starts[1:])]

    def _batch(
        self, rows: Sequence[Sequence[tuple[int, Document, Rewarded]]], micro_rows: int, sizes: Sequence[int]
    ) -> Batch:
        """Collate rows with what the loss needs of each token (objectives/grpo.py).

        sizes: terms, tokens and answers of the step, as `token_weight` takes them.
        """
        batch = self.stream.collated([[(s, d) for s, d, _ in row] for row in rows], micro_rows)
        shape = tuple(batch.tokens.shape)
        advantages, weights, sampled = (np.zeros(shape, np.float32) for _ in range(3))
        counted = np.zeros(shape, np.int64)
        for b, row in enumerate(rows):
            at = 0
            for i, (_, document, r) in enumerate(row):
                n = len(r.answer.ids)
                here = slice(at + len(document) - n - 1, at + len(document) - 1)  # a label belongs to the token before
                advantages[b, here], counted[b, here], sampled[b, here] = r.advantage, i + 1, r.answer.log_p
                weights[b, here] = grpo.token_weight(self.settings, n, *sizes)
                at += len(document)
        arrays = {"advantages": advantages, "weights": weights, "sampled": sampled, "answers": counted}
        return replace(batch, extra={name: torch.from_numpy(a) for name, a in arrays.items()})

    @torch.no_grad()
    def _old(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return log-probabilities of the answers' tokens by the model as it is, (B, T) of each batch, on the host."""
        trainer, found, score = self.trainer, list[Tensor](), self.trainer.loss_from_hidden

        def noted(hidden: Tensor, batch: Batch) -> Tensor:
            found.append(grpo.token_log_probabilities(trainer.model.head, self.settings, hidden, batch).float().cpu())
            return hidden.new_zeros(())

        trainer.loss_from_hidden = noted
        try:
            for batch in batches:
                trainer.eval_loss([replace(batch, extra={})])
        finally:
            trainer.loss_from_hidden = score
        return found

    # --- what all ranks know, and what people see

    def _agreed(
        self, groups: Sequence[Sequence[Rewarded]], sizes: tuple[int, int, int], micros: int, seconds: float
    ) -> list[int]:
        """Return sizes (terms, tokens, answers) of all ranks and the micro-batches of each; set the step's metrics."""
        every = [r for group in groups for r in group]
        known = [r for r in every if r.reward is not None]
        sums = {
            "answers": len(every), "known": len(known), "reward": sum(r.reward or 0.0 for r in known),
            "truncated": sum(not r.answer.ended for r in every),
            "flat": sum(len({r.reward for r in group}) == 1 for group in groups), "groups": len(groups),
            "length": sum(len(r.answer.ids) for r in every), "entropy": sum(r.answer.entropy for r in every),
            "spread": sum(float(np.std([r.reward for r in g if r.reward is not None] or [0.0])) for g in groups),
            **{f"reward_{name}": sum(r.values[i] for r in known) for i, name in enumerate(self.judge.names)},
        }  # fmt: skip
        mine = {"sizes": sizes, "micros": micros, "sums": sums, "s": seconds}
        told = [json.loads(text) for text in distributed.gather(json.dumps(mine))]
        all_ = {name: sum(one["sums"][name] for one in told) for name in sums}
        many, slowest = max(1, all_["answers"]), max(one["s"] for one in told)
        figures = {name: all_[name] / max(1, all_["known"]) for name in sums if name.startswith("reward")}
        groups_of_all = max(1, all_["groups"])
        figures |= {
            "reward_spread": all_["spread"] / groups_of_all, "groups_flat": all_["flat"] / groups_of_all,
            "truncated": all_["truncated"] / many, "rewards_failed": 1 - all_["known"] / many,
            "answer_tokens": all_["length"] / many, "entropy": all_["entropy"] / many,
            "rollout_s": slowest, "rollout_tokens_per_s": all_["length"] / slowest,
        }  # fmt: skip
        self.trainer.host_figures = figures
        summed = [max(1, sum(one["sizes"][i] for one in told)) for i in range(len(sizes))]
        return [*summed, max(1, *(one["micros"] for one in told))]

    def _check_first(self, groups: Sequence[Sequence[Rewarded]]) -> None:
        """Raise DataError where not one answer has a reward; note once a failure, and rewards that are all equal."""
        rewards = [r.reward for group in groups for r in group]
        if rewards and all(r is None for r in rewards):
            do = "correct the function, or raise grpo.reward_timeout"
            raise DataError(
                "the rewards of a step", f"all {len(rewards)} failed; the first: {self.judge.first_failure}", do
            )
        if self.judge.first_failure and not self.judge.said:
            self.judge.said = True
            self.trainer.log_event({"reward_failed": self.judge.first_failure})

    def _show(
        self, step: int, given: Sequence[tuple[int, int, Document]], groups: Sequence[Sequence[Rewarded]]
    ) -> None:
        """Append the first group of the step to `answers.jsonl`; rank 0 alone."""
        trainer = self.trainer
        folder, logged = Path(trainer.config.output), step % trainer.config.train.steps_a_line(1000) == 0
        if trainer.world.rank or not given or not logged or not folder.is_dir():  # nothing but a run makes the folder
            return
        _, _, document = given[0]
        n = begin_of_answer(document)
        line = {
            "step": step, "prompt": self.text(document.ids[:n]), "reference": self.text(document.ids[document.targets]),
            "answers": [
                {
                    "text": self.text(r.answer.ids), "reward": r.reward, "tokens": len(r.answer.ids),
                    "ended": r.answer.ended,
                } for r in groups[0]
            ],
        }  # fmt: skip
        with files.open_to_append(folder / ANSWERS) as file:
            files.append_whole(file, (json.dumps(line) + "\n").encode())


@dataclass(frozen=True)
class SampledEvaluation:
    """The held-out prompts, answered by the likeliest tokens; iterate for a batch that holds their rewards."""

    sampler: Sampler
    source: SampleSource
    rank: int
    ranks: int
    micro_rows: int
    reference: None = None
    stored: None = None
    batches: int = 1
    figures: dict[str, float] = field(default_factory=dict)  # of the last evaluation, of all ranks

    @property
    def documents(self) -> int:
        return len(self.source)

    @property
    def rows(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        s = self.sampler
        given = [(i, i, self.source.documents(i)[0]) for i in range(self.rank, len(self.source), self.ranks)]
        rewarded = [r for group in s.answers(given, EVAL_SEED, self.source, greedy=True) for r in group]
        rewards = torch.tensor([[r.reward or 0.0 for r in rewarded]])
        tokens = sum(len(r.answer.ids) for r in rewarded)
        failed, cut = sum(r.reward is None for r in rewarded), sum(not r.answer.ended for r in rewarded)
        told = [json.loads(t) for t in distributed.gather(json.dumps([len(rewarded), tokens, failed, cut]))]
        many, *sums = (sum(column) for column in zip(*told, strict=True))
        names = ("answer_tokens", "rewards_failed", "truncated")
        self.figures.update((name, n / max(1, many)) for name, n in zip(names, sums, strict=True))
        batch = s.stream.collated([], self.micro_rows)
        yield replace(batch, n_terms=len(rewarded), n_targets=tokens, extra={"rewards": rewards})


def begin_of_answer(document: Document) -> int:
    """Return where a document's answer begins: its first learnt token."""
    return int(np.argmax(document.targets))


def precision_of(trainer: Trainer) -> AbstractContextManager[object]:
    """Return the context in which the trainer's forward passes run."""
    if not trainer.autocast:
        return nullcontext()
    return torch.autocast(trainer.world.device.type, trainer.precision)


def prompt_stream(config: Config, source: SampleSource, layout: RowLayout, T: int) -> PromptStream:
    """Return the stream of a run's prompts.

    Raises:
        ConfigError: rows that are read while training, whose documents are torn, or that are too short.
    """
    assert config.grpo is not None
    asked = "`objective: grpo`"
    if not source.tokenized:
        raise ConfigError(f"{asked} with `data.stream`", "prompts are numbered before step 1", "leave data.stream out")
    if not (layout.isolated and layout.uncut):
        raise ConfigError(f"{asked} with --with wrap", "documents see each other", "take --with packing instead")
    return PromptStream(source, layout, config.grpo, T=T, seed=config.seed)


def attach(trainer: Trainer, held_out: SampleSource | None) -> None:
    """Let a built trainer sample: its stream's steps, and its evaluation.

    Raises:
        NeedsError: the model, or how it is cut over ranks, cannot sample here.
    """
    settings, world = trainer.config.grpo, trainer.world
    assert settings is not None and isinstance(trainer.stream, PromptStream)
    check_cacheable(trainer.model)
    if cut := [t.name for t in trainer.trained if t.is_sharded] or [
        a for a in ("tp", "cp", "pp") if world.along(a) > 1
    ]:
        found = f"weights or rows that are cut over ranks ({cut[0]})"
        raise NeedsError("`objective: grpo`", found, "give each rank the whole model: --with ddp")
    if settings.temperature != 1 and (trainer.model.head.softcap or trainer.model.head.bias is not None):
        found = "a head with a soft cap or a bias, whose logits no factor of its input scales"
        raise NeedsError(f"`grpo.temperature: {settings.temperature:g}`", found, "leave it out")
    if settings.prompts % world.data_ranks:
        found = f"{world.data_ranks} ranks"
        raise ConfigError(f"`grpo.prompts: {settings.prompts}`", found, "take a multiple of the ranks")
    ends = answer_ends(trainer.tokenizer, trainer.hf.get("eos_token_id"))
    if not ends:
        do = "give model.chat_template, or a model whose config names eos_token_id"
        raise NeedsError("`objective: grpo`", "no token that ends an answer is known", do)
    judge = Judge(settings.rewards, settings.reward_timeout)
    sampler = Sampler(trainer, trainer.stream, judge, ends, _raw_rows(trainer.sources.train, settings))
    trainer.stream.trainer, trainer.stream.sampler = trainer, sampler
    if held_out is not None:
        own = replace(sampler, raw=_raw_rows(held_out, settings))
        trainer.evaluation = SampledEvaluation(  # type: ignore[assignment]
            own, held_out, world.data_rank, world.data_ranks, trainer.env.micro_rows
        )


def stay_near_base(trainer: Trainer) -> None:
    """Let the loss see the model before training, where it is kept near that; before other steps wrap the loss.

    Raises:
        NeedsError: the weights before training are gone.
    """
    settings = trainer.config.grpo
    if settings is None or not settings.beta:
        return
    if trainer.adapters_disabled is None:
        found = "the weights before training are not kept: no adapter can be switched off"
        raise NeedsError(f"`grpo.beta: {settings.beta:g}`", found, "train an adapter (--with lora), or leave it out")
    trainer.loss = partial(grpo.loss_near_base, trainer.loss, trainer.model, settings, trainer.adapters_disabled)


def _raw_rows(source: SampleSource, settings: Grpo) -> Callable[[int], Mapping[str, Any]]:
    """Return what finds a sample's row as its file has it; files are read once, if a reward is one's own function."""
    where: Callable[[int], RowLocation] | None = getattr(source, "where", None)
    if where is None or not any(":" in rule.use for rule in settings.rewards):
        return lambda number: {}
    read: dict[Path, dict[RowLocation, dict[str, Any]]] = {}

    def row(number: int) -> Mapping[str, Any]:
        place = where(number)
        file = Path(str(place[0]))
        if file not in read:
            read[file] = dict(read_rows(file))
        return read[file].get(place, {})

    return row
