"""Sample, reward and pack the answers for `objective: grpo`.

A step takes prompts in row order, samples a group of answers to each from the current model, rewards them, and gives
the loop ordinary micro-batches. Draws depend only on (seed, prompt, member, position), and a prompt's number on the
step. So a resumed run samples the same answers as an uninterrupted one.

A data row is a conversation or a text with its answer: the prompt is everything before the last answer, and that answer
is the rewards' reference.
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
from optrush.data.dataset import SAMPLE_ROWS
from optrush.data.packing import Padded, RowLayout, padded_width
from optrush.data.readers import read_rows
from optrush.data.sample import conversations
from optrush.data.sampler import ROOM, Loading, Row, Stream, StreamPlan, Totals, plain_cost
from optrush.data.samples import SampleSource
from optrush.data.schema import Document, RowLocation, has_answer, row_rules
from optrush.data.tokenizer import answer_ends
from optrush.errors import ConfigError, DataError, NeedsError, RunError, exhausted, first_line
from optrush.models.hf import HFModel
from optrush.models.kv_cache import check_cacheable
from optrush.models.padded_sampling import PaddedEngine
from optrush.models.sampling import AnswerEngine, Drawing, PromptIds, SampledAnswer, SamplingEngine, Weigh, sample
from optrush.objectives import grpo
from optrush.objectives.reward_pool import judge_of
from optrush.objectives.rewards import Judge, is_own
from optrush.technique import Part, compilers
from optrush.trainer import distributed, run_dir
from optrush.trainer.rollout_server import ServerEngine
from optrush.trainer.trainer import Storage

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

ANSWERS = "answers.jsonl"  # in the run's folder: one group per logged step
OTHERWISE = 0.05  # mean nats per token at which sampling and training count as two policies


@dataclass(frozen=True)
class Rewarded:
    """An answer with its total reward (None: one failed), the single rewards, and its advantage in its group."""

    answer: SampledAnswer
    reward: float | None
    values: list[float]
    advantage: float = 0.0


class PromptStream(Stream):
    """A stream with prompts as rows, and the sampled answers as micro-batches."""

    tokenized = True
    trainer: Trainer  # set by `attach`
    sampler: Sampler

    def __init__(self, source: SampleSource, layout: RowLayout, settings: Grpo, *, T: int, seed: int) -> None:
        """layout: of the sampled answers. Raises ConfigError if a prompt and its answer do not fit a row."""
        self.packed, self.settings = layout, settings
        before = source.lengths() - source.targets()  # tokens of the prompts, and after an answer
        if len(invalid := np.flatnonzero((before < 2) | (source.targets() == 0))):
            where = _place(source)(int(invalid[0]))
            found = "a text without an answer, or an answer without a prompt"
            do = "write prompt and completion, or messages that end with the right answer"
            raise DataError(f"`objective: grpo` at {where}", found, do)
        if (longest := int(before.max())) + settings.max_new > T:
            found = f"a prompt of {longest:,} tokens and `grpo.max_new: {settings.max_new}`"
            do = f"set batch.seq: {-(-(longest + settings.max_new) // 64) * 64}, or a smaller grpo.max_new"
            raise ConfigError(f"`batch.seq: {T}`", found, do)
        super().__init__(source, Padded(), T=T, rows=settings.prompts, seed=seed, cost=plain_cost)
        self.room = 2 if layout.one_doc else ROOM  # for documents per row; it grows with the rows
        self.most_room = 2 if layout.one_doc else -(-(T // (int(before.min()) + 1) + 1) // ROOM) * ROOM
        self.one_shape = False  # every micro-batch has all rows: other shapes would recompile

    def plan(self, epochs: float | None = None, steps: int | None = None) -> StreamPlan:
        """Return the length of a run; with several updates per rollout, each prompt has several steps."""
        updates = self.settings.updates
        length = super().plan(epochs, None if steps is None else -(-steps // updates))
        return StreamPlan(steps or length.steps * updates, length.rows, self.room)

    def totals(self, plan: StreamPlan, micro_rows: int) -> Totals | None:
        """Return None: the length of answers is unknown."""
        return None

    def position(self, k: int) -> int:
        return k // self.settings.updates * self.rows

    def batches(self, k: int, plan: StreamPlan, *, rank: int, ranks: int, micro_rows: int) -> list[Batch]:
        """Return none: a step samples from the weights after the previous step."""
        return []

    def run(
        self, plan: StreamPlan, done: int, *, rank: int, ranks: int, micro_rows: int, loading: Loading
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the steps from `done` on, sampled on demand."""
        updates, window = self.settings.updates, list[Batch]()
        self.sampler.forget_after(done)
        for k in range(done, plan.steps):
            if k % updates == 0 or k == done:
                rows = self.step(k // updates, plan)
                first = k // updates * self.rows
                mine = [(first + r, rows[r]) for r in range(rank, self.rows, ranks)]
                logs = any(self._logs(step, plan.steps) for step in range(k + 1, min(k + updates, plan.steps) + 1))
                window = self.sampler.step(k + 1, mine, micro_rows, logs)
            yield window

    def _logs(self, step: int, steps: int) -> bool:
        return step % self.trainer.config.train.steps_a_line(steps) == 0 or step == steps

    def collated(self, rows: Sequence[Row], micro_rows: int) -> Batch:
        """Collate at most `micro_rows` rows, padded to a power of two: few shapes, little padding."""
        count = micro_rows if self.one_shape else min(micro_rows, 1 << max(0, len(rows) - 1).bit_length())
        padded = [*rows, *([] for _ in range(count - len(rows)))]
        longest = max([sum(len(d) for _, d in row) for row in rows], default=1)
        T = padded_width(longest, self.T) if self.packed.pad_to_longest else self.T
        return collate(padded, T, single=self.packed.one_doc, most=count * self.room)


@dataclass
class Sampler:
    """Samples, rewards and packs answers; one per run."""

    trainer: Trainer
    stream: PromptStream
    judge: Judge
    ends: list[int]
    raw: Callable[[int], Mapping[str, Any]]  # sample number -> its row in the file
    where: Callable[[int], object]  # sample number -> its place
    engine: AnswerEngine | None = None  # for the whole run; None: one per step, of the needed size
    settings: Grpo = field(init=False)
    said: set[str] = field(default_factory=set)  # events that were logged

    def __post_init__(self) -> None:
        assert self.trainer.config.grpo is not None
        self.settings = self.trainer.config.grpo

    @property
    def slots(self) -> int:
        """Return the number of answers sampled at once."""
        assert self.trainer.env.rollout is not None
        return self.trainer.env.rollout.slots

    # --- sampling and rewards

    def answers(
        self, rows: Sequence[tuple[int, int, Document]], seed: int, *, greedy: bool = False
    ) -> list[list[Rewarded]]:
        """Sample and reward answers.

        Args:
            rows: each prompt's number, sample and document with its answer.
            greedy: one answer of the most likely tokens.

        Raises:
            RunError: the keys and values do not fit in memory.
        """
        s, trainer = self.settings, self.trainer
        prompts = [PromptIds(number, d.ids[: begin_of_answer(d)]) for number, _, d in rows]
        members = 1 if greedy else s.group
        drawing = Drawing(s.max_new, 0.0 if greedy else s.temperature, tuple(self.ends), seed, self.slots)
        draw = self.engine.sample if self.engine else partial(sample, trainer.model)  # type: ignore[arg-type]
        try:
            with trainer.whole_weights():
                answers = draw(prompts, members, drawing, precision_of(trainer))
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            asked = f"`grpo.slots: {self.slots}` answers of `grpo.max_new: {s.max_new}` tokens at a time"
            do = f"set grpo.slots: {max(1, self.slots // 2)}, or a smaller grpo.max_new"
            raise RunError(asked, f"out of memory while sampling: {first_line(error)}", do) from error
        groups = [answers[p * members : (p + 1) * members] for p in range(len(rows))]
        given = []
        for (_, number, document), group in zip(rows, groups, strict=True):
            more = self.reference(number, document), self.raw(number), str(self.where(number))
            given += [(self.text(a.ids), *more) for a in group]
        values = self.judge.every(given)
        return [self._rewarded(group, values[p * members : (p + 1) * members]) for p, group in enumerate(groups)]

    def _rewarded(self, group: Sequence[SampledAnswer], values: Sequence[list[float] | None]) -> list[Rewarded]:
        rewards = [None if v is None else self.judge.total(v) for v in values]
        advantages = grpo.advantages_of(rewards, self.settings)
        columns = zip(group, rewards, values, advantages, strict=True)
        return [Rewarded(a, reward, v or [], advantage) for a, reward, v, advantage in columns]

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.trainer.tokenizer.decode(list(map(int, ids)), skip_special_tokens=True))

    def reference(self, number: int, document: Document) -> str:
        """Return a sample's own answer; "" if its row is only a prompt."""
        answered = has_answer(dict(self.raw(number)), row_rules(self.trainer.config))
        return self.text(document.ids[document.targets]) if answered else ""

    def forget_after(self, step: int) -> None:
        """Truncate `answers.jsonl` to the step of a resume."""
        file = Path(self.trainer.config.output) / ANSWERS
        if self.trainer.world.rank == 0 and file.is_file():
            run_dir.truncate_to_step(file, step)

    # --- a step's micro-batches

    def step(self, step: int, rows: Sequence[tuple[int, Row]], micro_rows: int, logs: bool) -> list[Batch]:
        """Return this rank's micro-batches of a step; every rank calls it and gets the same number.

        Args:
            rows: the number of each prompt in the run, and its row with one sample; no rows at the end of the data.
            logs: a step that learns from these answers is logged.
        """
        self._compare_last()
        began = time.perf_counter()
        given = [(number, sample, document) for number, row in rows for sample, document in row]
        groups = self.answers(given, self.trainer.config.seed)
        sampled_s = time.perf_counter() - began
        learnt = [
            (sample, document, r)
            for (_, sample, document), group in zip(given, groups, strict=True)
            for r in group
            if self.learns(r)
        ]
        tokens, answers = sum(len(r.answer.ids) for _, _, r in learnt), len(learnt)
        moving = [item for item in learnt if self.moves(item[2])]
        packed, terms = self._rows(moving), sum(len(r.answer.ids) for _, _, r in moving)
        *sizes, micros = self._agreed(groups, (terms, tokens, answers), -(-len(packed) // micro_rows), sampled_s)
        batches = [self._batch(packed[i * micro_rows : (i + 1) * micro_rows], micro_rows, sizes) for i in range(micros)]
        weigh = self.engine.weigh if self.engine else None
        if self.settings.updates > 1 or weigh:
            old = self._old(batches)
            batches = self._weighed(batches, old, weigh) if weigh else batches
            if self.settings.updates > 1:
                batches = [replace(b, extra={**b.extra, "old": o}) for b, o in zip(batches, old, strict=True)]
        if logs:
            self._write(step, given, groups)
        return batches

    def learns(self, r: Rewarded) -> bool:
        """Return whether an answer is used: it has a reward, and ended or is kept anyway."""
        return r.reward is not None and (r.answer.ended or self.settings.truncated == "keep")

    def moves(self, r: Rewarded) -> bool:
        """Return whether an answer has a gradient: not with advantage 0, unless beta is set."""
        return r.advantage != 0 or self.settings.beta > 0

    def _rows(self, learnt: Sequence[tuple[int, Document, Rewarded]]) -> list[list[tuple[int, Document, Rewarded]]]:
        """Pack prompts with their answers in rows of at most T tokens."""
        if not learnt:
            return []
        documents = []
        for number, document, r in learnt:
            n = begin_of_answer(document)
            ids = np.concatenate([document.ids[:n], np.asarray(r.answer.ids, document.ids.dtype)])
            documents.append((number, Document(ids, np.arange(len(ids)) >= n), r))
        lengths = np.array([len(d) for _, d, _ in documents], np.int64)
        laid = self.stream.packed.place(lengths, self.stream.T, 1, 0, np.random.PCG64(0))
        most = int((laid.starts[1:] - laid.starts[:-1]).max()) + 1
        self.stream.room = max(self.stream.room, most if self.stream.packed.one_doc else -(-most // ROOM) * ROOM)
        return [[documents[i] for i in laid.samples[a:b]] for a, b in zip(laid.starts, laid.starts[1:])]

    def _batch(
        self, rows: Sequence[Sequence[tuple[int, Document, Rewarded]]], micro_rows: int, sizes: Sequence[int]
    ) -> Batch:
        """Collate rows with the loss's inputs per token (objectives/grpo.py).

        sizes: terms, tokens and answers of the step, for `token_weight`.
        """
        batch = self.stream.collated([[(s, d) for s, d, _ in row] for row in rows], micro_rows)
        shape = tuple(batch.tokens.shape)
        advantages, weights, sampled = (np.zeros(shape, np.float32) for _ in range(3))
        counted = np.zeros(shape, np.int64)
        for b, row in enumerate(rows):
            at = 0
            for i, (_, document, r) in enumerate(row):
                n = len(r.answer.ids)
                labels = slice(at + len(document) - n - 1, at + len(document) - 1)  # labels are one token earlier
                advantages[b, labels], counted[b, labels], sampled[b, labels] = r.advantage, i + 1, r.answer.log_p
                weights[b, labels] = grpo.token_weight(self.settings, n, *sizes)
                at += len(document)
        arrays = {"advantages": advantages, "weights": weights, "sampled": sampled, "answers": counted}
        return replace(batch, extra={name: torch.from_numpy(a) for name, a in arrays.items()})

    @torch.no_grad()
    def _old(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the current model's log-probabilities of the answers' tokens, (B, T) per batch, on the host."""
        trainer, outputs, score = self.trainer, list[Tensor](), self.trainer.loss_from_hidden

        def noted(hidden: Tensor, batch: Batch) -> Tensor:
            outputs.append(grpo.token_log_probabilities(trainer.model.head, self.settings, hidden, batch).float().cpu())
            return hidden.new_zeros(())

        trainer.loss_from_hidden = noted
        try:
            for batch in batches:
                trainer.eval_loss([replace(batch, extra={})])
        finally:
            trainer.loss_from_hidden = score
        return outputs

    def _weighed(self, batches: Sequence[Batch], old: Sequence[Tensor], weigh: Weigh) -> list[Batch]:
        """Return the batches with importance weights for tokens sampled by another program."""
        learnt, disabled = [b.extra["answers"] > 0 for b in batches], self.trainer.adapters_disabled

        def chosen(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([v[mask] for v, mask in zip(values, learnt, strict=True)])

        def untrained() -> Tensor:
            with disabled() if disabled else nullcontext():
                return chosen(self._old(batches))

        sampled = chosen([b.extra["sampled"] for b in batches])
        factors = weigh(sampled, chosen(old), untrained if disabled else None)
        parts = torch.split(factors, [int(mask.sum()) for mask in learnt])
        weights = [
            b.extra["weights"].masked_scatter(mask, b.extra["weights"][mask] * part)
            for b, mask, part in zip(batches, learnt, parts, strict=True)
        ]
        return [replace(b, extra={**b.extra, "weights": w}) for b, w in zip(batches, weights, strict=True)]

    # --- sums over ranks, and reports

    def _agreed(
        self, groups: Sequence[Sequence[Rewarded]], sizes: tuple[int, int, int], micros: int, seconds: float
    ) -> list[int]:
        """Return sizes (terms, tokens, answers) over all ranks and micro-batches per rank; set the step's metrics."""
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
        mine = {"sizes": sizes, "micros": micros, "sums": sums, "s": seconds, "failure": self.judge.first_failure}
        reports = [json.loads(text) for text in distributed.gather(json.dumps(mine))]
        totals = {name: sum(report["sums"][name] for report in reports) for name in sums}
        count, slowest = max(1, totals["answers"]), max(report["s"] for report in reports)
        figures = {name: totals[name] / max(1, totals["known"]) for name in sums if name.startswith("reward")}
        groups_of_all = max(1, totals["groups"])
        figures |= {
            "group_spread": totals["spread"] / groups_of_all, "groups_flat": totals["flat"] / groups_of_all,
            "truncated": totals["truncated"] / count, "rewards_failed": 1 - totals["known"] / count,
            "answer_tokens": totals["length"] / count, "entropy": totals["entropy"] / count,
            "rollout_s": slowest, "rollout_tokens_per_s": totals["length"] / slowest,
        }  # fmt: skip
        self.trainer.host_figures = figures
        self._report(totals, figures, next(filter(None, (report["failure"] for report in reports)), ""))
        summed = [max(1, sum(report["sizes"][i] for report in reports)) for i in range(len(sizes))]
        return [*summed, max(1, *(report["micros"] for report in reports))]

    def _report(self, sums: Mapping[str, float], figures: Mapping[str, float], failure: str) -> None:
        """Log, once each, conditions that keep a run from learning; every rank calls it with the same values.

        Raises:
            DataError: no answer of the step has a reward.
        """
        refuse_failed(int(sums["known"]), int(sums["answers"]), failure)
        cut, flat = figures["truncated"], figures["groups_flat"]
        nothing = f"{cut:.0%} of the answers were cut off at grpo.max_new, {flat:.0%} of the groups have equal rewards"
        for name, text in (
            ("reward_failed", failure),
            ("sampled_by", (self.engine and self.engine.note) or ""),
            ("nothing_to_learn", nothing if flat == 1 or (cut == 1 and self.settings.truncated == "mask") else ""),
        ):
            if text and name not in self.said:
                self.said.add(name)
                self.trainer.log_event({name: text})

    def _compare_last(self) -> None:
        """Log once if the sampler's and training's log-probabilities of the last step differ too much."""
        figures, name = self.trainer.metrics, "sampled_otherwise"
        seen = figures["ratio"].item()  # a sum of ratios near 1: about the tokens of this rank's last window
        gap = figures["logp_difference_mean"].item() / max(seen, 1.0)
        if gap > OTHERWISE and name not in self.said:
            self.said.add(name)
            found = f"log-probabilities differ by {gap:.2g} per token between sampling and training"
            do = "turn off whatever only training uses (dropout, another attention)"
            self.trainer.log_event({name: f"{found}; {do}"})

    def _write(
        self, step: int, given: Sequence[tuple[int, int, Document]], groups: Sequence[Sequence[Rewarded]]
    ) -> None:
        """Append the first group of the step to `answers.jsonl`; rank 0 only."""
        trainer = self.trainer
        folder = Path(trainer.config.output)
        if trainer.world.rank or not given or not folder.is_dir():  # only a run creates the folder
            return
        _, number, document = given[0]
        n = begin_of_answer(document)
        line = {
            "step": step, "prompt": self.text(document.ids[:n]), "reference": self.reference(number, document),
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
    """Held-out prompts with greedy answers; iterate for a batch with their rewards."""

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
        rewarded = [r for group in s.answers(given, 0, greedy=True) for r in group]
        known = [r.reward for r in rewarded if r.reward is not None]
        tokens, cut = sum(len(r.answer.ids) for r in rewarded), sum(not r.answer.ended for r in rewarded)
        mine = [[len(rewarded), tokens, len(known), cut], s.judge.first_failure]
        reports = [json.loads(text) for text in distributed.gather(json.dumps(mine))]
        count, every, rated, cut = (sum(column) for column in zip(*(sizes for sizes, _ in reports), strict=True))
        refuse_failed(rated, count, next(filter(None, (failure for _, failure in reports)), ""))
        self.figures.update(answer_tokens=every / count, rewards_failed=1 - rated / count, truncated=cut / count)
        batch = s.stream.collated([], self.micro_rows)
        yield replace(batch, n_terms=len(known), n_targets=tokens, extra={"rewards": torch.tensor([known])})


def refuse_failed(known: int, answers: int, failure: str) -> None:
    """Raise DataError if no answer has a reward."""
    if answers and not known:
        do = "fix the function, or raise grpo.reward_timeout"
        raise DataError("rewards of sampled answers", f"all {answers} failed; the first: {failure}", do)


def try_rewards(config: Config, source: SampleSource, tokenizer: Any) -> None:
    """Reward the first row's own answer like a sampled one.

    Raises:
        ConfigError, DataError: a rule is invalid or fails.
    """
    assert config.grpo is not None
    judge, (document,) = judge_of(config.grpo), source.documents(0)
    text = str(tokenizer.decode(document.ids[document.targets].tolist(), skip_special_tokens=True))
    row = _raw_rows(source, config)(0)
    reference = text if has_answer(dict(row), row_rules(config)) else ""
    (result,) = judge.every([(text, reference, row, str(_place(source)(0)))])
    refuse_failed(0 if result is None else 1, 1, judge.first_failure)


def begin_of_answer(document: Document) -> int:
    """Return where a document's answer begins: its first target token."""
    return int(np.argmax(document.targets))


def precision_of(trainer: Trainer) -> AbstractContextManager[object]:
    """Return the context for the trainer's forward passes."""
    if not trainer.autocast:
        return nullcontext()
    # No cache of cast weights: a recorded step would read stale ones after an update.
    return torch.autocast(trainer.world.device.type, trainer.precision, cache_enabled=False)


def prompt_stream(config: Config, source: SampleSource, layout: RowLayout, T: int) -> PromptStream:
    """Return the stream of a run's prompts.

    Raises:
        ConfigError: rows are streamed, split documents, or are too short.
    """
    assert config.grpo is not None
    asked = "`objective: grpo`"
    if not source.tokenized:
        raise ConfigError(f"{asked} with `data.stream`", "prompts are numbered before step 1", "set data.stream=false")
    if not (layout.isolated and layout.uncut):
        found = "documents of a row attend to each other"
        raise ConfigError(f"{asked} with --with wrap", found, "take --with packing instead")
    return PromptStream(source, layout, config.grpo, T=T, seed=config.seed)


def attach(trainer: Trainer, held_out: SampleSource | None) -> None:
    """Let a built trainer sample: in its stream's steps, and in its evaluation.

    Raises:
        NeedsError: the model, or its sharding, cannot sample here.
    """
    settings, world = trainer.config.grpo, trainer.world
    assert settings is not None and isinstance(trainer.stream, PromptStream)
    gathers = trainer.whole_weights is not nullcontext  # gathered during sampling
    cut = [*sorted(trainer.env.sharded - ({"dp"} if gathers else set()))]
    cut += [axis for axis in ("tp", "cp", "pp") if world.along(axis) > 1]
    if world.ranks > 1 and type(trainer.storage) is not Storage:  # weights held by another engine
        cut.append(type(trainer.storage).__name__)
    if cut:
        raise NeedsError("`objective: grpo`", f"sharded weights or rows ({cut[0]})", "use --with ddp or fsdp")
    if settings.temperature != 1 and (trainer.model.head.softcap or trainer.model.head.bias is not None):
        found = "a head with a soft cap or a bias: scaling its input does not scale the logits"
        raise NeedsError(f"`grpo.temperature: {settings.temperature:g}`", found, "remove grpo.temperature")
    if settings.prompts % world.data_ranks:
        found = f"{world.data_ranks} ranks"
        raise ConfigError(f"`grpo.prompts: {settings.prompts}`", found, "use a multiple of the number of ranks")
    ends = answer_ends(trainer.tokenizer, trainer.hf.get("eos_token_id"))
    if not ends:
        do = "set model.chat_template, or use a model whose config has eos_token_id"
        raise NeedsError("`objective: grpo`", "no end-of-answer token is known", do)
    judge = judge_of(settings)
    train = trainer.sources.train
    engine = _engine(trainer, [train] if held_out is None else [train, held_out])
    sampler = Sampler(trainer, trainer.stream, judge, ends, _raw_rows(train, trainer.config), _place(train), engine)
    stream = trainer.stream
    stream.trainer, stream.sampler = trainer, sampler
    if Part.COMPILED in trainer.env.claimed:
        stream.one_shape, stream.room = True, stream.most_room
    if held_out is not None:
        held_sampler = replace(sampler, raw=_raw_rows(held_out, trainer.config), where=_place(held_out))
        trainer.evaluation = SampledEvaluation(  # type: ignore[assignment]
            held_sampler, held_out, world.data_rank, world.data_ranks, trainer.env.micro_rows
        )


def _engine(trainer: Trainer, sources: Sequence[SampleSource]) -> AnswerEngine | None:
    """Return the sampler of a run; on CUDA one of a fixed size for all steps, recorded and compiled once."""
    settings, world = trainer.config.grpo, trainer.world
    if (served := trainer.config.rollout) is not None and trainer.optimizer is not None:  # evaluations sample here
        return ServerEngine(served, trainer)
    if isinstance(trainer.model, HFModel):
        return PaddedEngine(trainer.model)
    check_cacheable(trainer.model)
    if world.device.type != "cuda":
        return None
    assert settings is not None
    if unmet := next((r for r in compilers(trainer.env.device) if not r.met), None):
        raise NeedsError("`objective: grpo` on a GPU (sampling uses Triton kernels)", unmet.found, unmet.do)
    longest = max(int((s.lengths() - s.targets()).max()) for s in sources)
    assert trainer.env.rollout is not None
    slots = trainer.env.rollout.slots
    return SamplingEngine(trainer.model, slots, longest + settings.max_new, settings.max_new)


def stay_near_base(trainer: Trainer) -> None:
    """Give the loss the initial model if `grpo.beta` is set; before other stages wrap the loss.

    Raises:
        NeedsError: the weights before training are not kept.
    """
    settings = trainer.config.grpo
    if settings is None or not settings.beta:
        return
    if trainer.adapters_disabled is None:
        found = "the original weights are not kept, and there is no adapter to disable"
        raise NeedsError(f"`grpo.beta: {settings.beta:g}`", found, "train an adapter (--with lora), or remove beta")
    trainer.loss = partial(grpo.loss_near_base, trainer.loss, trainer.model, settings, trainer.adapters_disabled)


def _place(source: SampleSource) -> Callable[[int], object]:
    """Return the function from a sample's number to its row's location."""
    return getattr(source, "where", None) or (lambda number: f"row {number}")


def _raw_rows(source: SampleSource, config: Config) -> Callable[[int], Mapping[str, Any]]:
    """Return the function from a sample's number to its row in the file; files are read once.

    Nothing is read if no reward needs a row: no reward is a user's function, and rows have answers.
    """
    where: Callable[[int], RowLocation] | None = getattr(source, "where", None)
    rules, data = (config.grpo or Grpo()).rewards, config.data
    if where is None or not (any(map(is_own, rules)) or not any(rule.compares for rule in rules)):
        return lambda number: {}
    read: dict[Path, dict[RowLocation, dict[str, Any]]] = {}

    def rows(file: Path) -> dict[RowLocation, dict[str, Any]]:
        if data.sample is None or file.exists():
            return dict(read_rows(file, data.reading))
        turns_of = conversations(data.max_samples or SAMPLE_ROWS, config.seed)  # their file was temporary
        return {RowLocation(file, n): {"messages": turns} for n, turns in enumerate(turns_of, 1)}

    def row(number: int) -> Mapping[str, Any]:
        place = where(number)
        file = Path(str(place[0]))
        if file not in read:
            read[file] = rows(file)
        return read[file].get(place, {})

    return row
