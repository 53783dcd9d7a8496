"""Predict the memory and speed of a set of techniques, choose its micro-batch, and search the fastest set. Pure.

A `Problem` (model, device, rows) -> the baseline's ledger -> rules of the techniques -> peak and seconds. `choose_rows`
is the only place where a micro-batch is chosen, `search_sets` the only search: over sets of techniques that can be
combined, ranked by useful tokens per second. No technique is named here: claims and needs decide which sets are
possible, `Technique.variants` which options are tried.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from optrush import technique
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.hardware import Device
from optrush.models.shapes import HF, ModelShape
from optrush.models.text_part import text_config
from optrush.models.traced import TracedShape
from optrush.planner import baseline, cost, ledger
from optrush.planner.calibration import Calibration
from optrush.planner.climb import Score, climb
from optrush.planner.cost import CLOSE, SPARE, TIGHT, WORTH, Rates, excess_on_host, fullness, host_room, room
from optrush.planner.ledger import Item, Ledger, Short
from optrush.planner.starts import Options, by_axes, clash, repaired_start, shares_rows, with_all, with_axis_owners
from optrush.technique import (
    RANK_PARTS,
    SAME_ROWS,
    Environment,
    Numerics,
    Part,
    Requirement,
    Technique,
    compilers,
    in_order,
    instantiate,
    mesh_axes,
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Memory and speed of one configuration on the rank with the most memory."""

    peak_bytes: int
    memory_kind: str  # "cuda_allocated" or "rss"
    phase: str
    lines: tuple[Item, ...]  # their sum is the peak
    device: str
    capacity_bytes: int | None
    fits: bool
    tokens_per_s: float | None  # without padding, over all ranks; None: unknown rates
    basis: str  # "datasheet" or "calibrated"
    rates_from: str = ""  # a sentence on the source of the rates
    work: tuple[cost.WorkTime, ...] = ()  # per step on one rank
    room_bytes: int | None = None  # most bytes of a peak: the capacity without the CUDA context and the gaps
    parameters: int = 0
    a_parameter: Mapping[str, float] = dataclasses.field(default_factory=dict)  # bytes of each kind
    # Seconds of a step by part at the device's highest rates: measured, or the datasheet's.
    ceiling_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0  # of pinned host memory, in addition to the device's
    host_room_bytes: int | None = None  # a rank's share of host memory; None: unknown
    host_assumed: bool = False  # the host is unknown, so its room is assumed
    step_s: float | None = None  # seconds per step
    compile_s: float = 0.0  # added to a first start by its techniques
    stage_bytes: tuple[int, ...] = ()  # peak of each rank of a pipeline
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # ranks per axis with several
    traced: bool = False  # the model's blocks are transformers', and were traced

    @property
    def filled(self) -> float:
        """Return the filled share of a rank's room on the device or the host, whichever is fuller; 0.0: unknown."""
        rooms = ((self.peak_bytes, self.room_bytes), (self.host_bytes, self.host_room_bytes))
        return max(used / most if most else 0.0 for used, most in rooms)


@dataclass(frozen=True)
class Candidate:
    """A set of techniques with a micro-batch."""

    with_: Mapping[str, Mapping[str, Any]]
    micro_rows: int
    prediction: Prediction
    saving: bool = False  # one of its techniques saves memory at the cost of work
    pace: float = 0.0  # ranks sets without known speeds: steps/s at assumed rates
    tokens: float | None = None  # of the whole run; None: unknown

    @property
    def title(self) -> str:
        return " ".join(_title(name, options) for name, options in self.with_.items()) or "no technique"

    @property
    def speed(self) -> float:
        """Return the run's tokens per second, including its techniques' start-up time; `pace` if unknown."""
        stepping = self.prediction.tokens_per_s
        if not stepping or not self.tokens or math.isinf(stepping):
            return stepping or self.pace
        return self.tokens / (self.tokens / stepping + self.prediction.compile_s)

    @property
    def rank(self) -> tuple[bool, float]:
        """Return the sort key of settings that fit, the best largest; on a CPU room for other programs comes first."""
        return self.prediction.memory_kind != "rss" or self.prediction.filled <= SPARE, self.speed


@dataclass(frozen=True)
class SearchResult:
    """The best settings, the number of sets tried, and why other techniques are not in the best setting."""

    settings: tuple[Candidate, ...]
    tried: int
    lost: tuple[tuple[str, str], ...]
    least: Short | None = None  # requirement of the smallest set, if no set fits


def search_sets(
    problem: Problem, classes: Sequence[type[Technique]], configured: Mapping[str, Mapping[str, Any]], *,
    keep_maths: bool = False, best: int = 3, whole: bool = True, scarce: bool = False, here: bool = False,
    start: Mapping[str, Mapping[str, Any]] | None = None, keep: Container[str] = (),
) -> SearchResult:  # fmt: skip
    """Search sets of techniques and micro-batches for the fastest settings; the tokens of a step stay the same.

    The climb starts from the run's own set and from the empty set, and changes one technique at a time (`climb`).
    Configured techniques that a search does not choose are in every set, except as few as make some set possible.

    Args:
        configured: the run's techniques with their options.
        keep_maths: leave out techniques that change the maths (`Numerics.DIFFERENT_MATHS`).
        best: number of settings.
        whole: also try each option that is not in the best set, to report what it would change.
        scarce: also try techniques that save memory at the cost of speed.
        here: leave out techniques whose packages or compilers this machine lacks.
        start: techniques to climb from, instead of the run's own set and the empty set.
        keep: techniques that stay as configured.

    Raises:
        NeedsError: no set is possible with the trained parameters.
        ConfigError: no mesh divides a step's rows over the ranks.
    """
    env = dataclasses.replace(problem.env, scarce=scarce)
    options, unmet = _options(env, classes, keep_maths, configured, keep)
    _refuse_rows(env, options, env.seq)
    if here:
        options = [[t for t in group if t is None or _runs_here(t, env)] or [None] for group in options]
    begin = {**(start or {}), **configured}
    options = [_pinned(group, begin, keep) for group in options]
    first = [instantiate([c], {c.name: begin[c.name]})[0] for c in classes if c.name in begin]
    initial = tuple(next((t for t in group if t in first), None) for group in options)
    part = _largest_part(problem, options, initial, keep, whole=whole, both=start is None)
    evaluations = part.evaluations
    if not evaluations.tried:
        _refuse_required(problem.env, [group[0] for group in options if _required(group, keep)])
    settings = sorted(evaluations.settings, key=lambda s: s.rank, reverse=True)
    leading = tuple(_leading(settings, best))
    lost: Iterable[tuple[str, str]] = ()
    if leading and whole:
        others = _without_each(problem, options, part.named, initial, keep, leading[0])
        lost = (*others, *_lost(leading[0], settings, part, env))
    short = [s for s in evaluations.results.values() if isinstance(s, Short)]
    least = min(short, key=lambda s: s.score, default=None)
    return SearchResult(leading, evaluations.tried, (*lost, *unmet), least)


def evaluate_set(problem: Problem, techniques: Sequence[Technique]) -> Candidate | Short | None:
    """Return a set with its best micro-batch; the smallest one's needs if none fits; None: it is not possible."""
    return Evaluations(problem).evaluate(techniques)


def predict_set(
    techniques: Sequence[Technique], env: Environment, shape: ModelShape, padding: float, found: Calibration | None
) -> Prediction:
    """Predict a set with the micro-batch of `env`, which is settled, on the rank that needs most memory.

    Args:
        padding: share of the slots without a token, with one document per row.
        found: the device's calibration.
    """
    books, tokens = baseline.books(techniques, env, shape, padding), env.micro_rows * env.seq
    book = max(books, key=lambda book: ledger.peak_memory(book, tokens).bytes)
    rates, ceiling = cost.expected_and_ceiling(env.device, found, shape, env.span, env.seq)
    ceiling_s = {} if ceiling is None else cost.seconds_by_part(book, tokens, ceiling)
    prediction = _prediction(book, books, env, ledger.peak_memory(book, tokens), rates)
    return dataclasses.replace(prediction, ceiling_s=ceiling_s, compile_s=_compile_s(techniques, env))


@dataclass(frozen=True)
class _Searched:
    """Evaluated sets with the same configured techniques.

    `named` are the places of techniques that a search does not choose; `always` are all techniques of every set.
    """

    evaluations: Evaluations
    options: list[Options]
    named: tuple[int, ...]
    always: tuple[Technique, ...]

    @property
    def rank(self) -> tuple[bool, tuple[bool, float]]:
        """Return the sort key, the best largest: whether a set is possible, then the speed of the fastest that fits."""
        return self.evaluations.tried > 0, max((s.rank for s in self.evaluations.settings), default=(False, 0.0))


def _largest_part(
    problem: Problem, options: list[Options], initial: tuple[Technique | None, ...], keep: Container[str], *,
    whole: bool, both: bool,
) -> _Searched:  # fmt: skip
    """Search with all configured techniques that a search does not choose; if no set is possible, without the fewest.

    Args:
        initial: the run's own set, to climb from.
        both: also climb from the empty set.
    """
    named = [i for i, group in enumerate(options) if None not in group and not _required(group, keep)]
    for count in range(len(named) + 1):
        parts = ([i for i in named if i not in left] for left in itertools.combinations(named, count))
        searched = [
            _searched(problem, options, part, initial, keep, whole=whole, both=both)
            for part in parts
            if not (part and clash(options[i] for i in part))  # they exclude each other
        ]
        best = max(searched, key=lambda part: part.rank, default=None)
        if best is not None and best.evaluations.tried:
            break
    assert best is not None, "the last part has no technique that could clash"
    return best


def _searched(
    problem: Problem, options: Sequence[Options], named: Sequence[int], initial: tuple[Technique | None, ...],
    keep: Container[str], *, whole: bool, both: bool,
) -> _Searched:  # fmt: skip
    """Climb over the options that are compatible with every set's; groups without a choice keep the `named` options."""
    free = [None in group or _required(group, keep) for group in options]
    part = [group if free[i] or i in named else [None] for i, group in enumerate(options)]
    fixed = [i in named or _required(group, keep) for i, group in enumerate(part)]
    always = tuple(t for i, group in enumerate(part) if fixed[i] and len(group) == 1 and (t := group[0]))
    taken = frozenset(claim for t in always for claim in t.claims)
    part = [g if fixed[i] else [t for t in g if t is None or not t.claims & taken] for i, g in enumerate(part)]
    evaluations = Evaluations(problem, fixed)
    none = tuple(None if None in group else group[0] for group in part)
    for meshes in by_axes(part):
        for tried in meshes:
            starts = [tuple(t if t in g else g[0] for t, g in zip(b, tried)) for b in (initial, none)[: 1 + both]]
            starts += [with_axis_owners(start, tried) for start in starts]
            starts = [repaired_start(start, tried, evaluations.possible) for start in starts]
            climb(dict.fromkeys(starts), tried, _claim_the_same, evaluations.score, whole)
            for i, owners in _unused_precisions(evaluations.settings, tried, problem.env):
                narrow = tuple(owners[0] if i == j else t for j, t in enumerate(starts[-1]))
                groups = [owners if i == j else group for j, group in enumerate(tried)]
                climb([narrow], groups, _claim_the_same, evaluations.score, False)
            if _mostly_padding(evaluations.settings, problem.env):
                everything = with_all(starts[-1], tried, evaluations.possible)
                climb([everything], tried, _claim_the_same, evaluations.score, False)
        if evaluations.settings:
            break
    return _Searched(evaluations, [*options], tuple(named), always)


def _without_each(
    problem: Problem, options: Sequence[Options], named: Sequence[int], initial: tuple[Technique | None, ...],
    keep: Container[str], best: Candidate,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield the changes of the fastest set without each configured technique, by one search each."""
    for left in named:
        rest = [i for i in named if i != left]
        evaluated = _searched(problem, options, rest, initial, keep, whole=False, both=True).evaluations
        other = next(_leading(sorted(evaluated.settings, key=lambda s: s.rank, reverse=True), 1), None)
        if other is not None and (t := options[left][0]) is not None:
            yield f"without {t.name}", _difference(other, best)


def _claim_the_same(first: Technique, second: Technique) -> bool:
    return bool(first.claims & second.claims)


def _unused_precisions(
    settings: Sequence[Candidate], options: Sequence[Options], env: Environment
) -> list[tuple[int, Options]]:
    """Return the techniques of precision by group, if a GPU's fastest setting multiplies in float32.

    A kernel for float32 may beat a narrower precision alone, and lose to that precision with its own kernel.
    """
    groups = [(i, [t for t in g if t is not None and Part.PRECISION in t.claims]) for i, g in enumerate(options)]
    used = max(settings, key=lambda s: s.rank).with_ if settings else {}
    wide = env.device.kind == "cuda" and env.dtype == "float32" and bool(used)
    return [f for f in groups if f[1]] if wide and not any(t.name in used for _, group in groups for t in group) else []


def _mostly_padding(settings: Sequence[Candidate], env: Environment) -> bool:
    """Return whether most slots that the fastest setting computes are padding."""
    p = max(settings, key=lambda s: s.speed).prediction if settings else None
    return p is not None and 2 * (p.tokens_per_s or math.inf) * (p.step_s or 1.0) < env.rows * env.seq * env.filled


def _pinned(group: Options, given: Mapping[str, Mapping[str, Any]], keep: Container[str]) -> Options:
    """Return only the configured options of a kept technique."""
    for t in group:
        if t is not None and t.name in keep:
            return instantiate([type(t)], {t.name: given[t.name]})
    return group


def _required(group: Options, keep: Container[str]) -> bool:
    """Return whether every set has one of these: kept techniques, and those that choose the trained parameters."""
    return all(t is not None and (t.name in keep or Part.TRAINED in t.claims | t.wants) for t in group)


def _runs_here(t: Technique, env: Environment) -> bool:
    compiles = type(t).compile is not Technique.compile
    return not any(True for _ in technique.missing(t)) and (not compiles or all(n.met for n in compilers(env.device)))


def _prediction(
    book: Ledger, books: Sequence[Ledger], env: Environment, peak: ledger.Peak, rates: Rates | None
) -> Prediction:
    """Build the prediction: memory of the rank with the most, time of the slowest rank."""
    tokens = env.micro_rows * env.seq
    count = max(min(2, env.accumulation), math.ceil(env.accumulation * env.filled))
    timed = books if env.filled == 1 else [ledger.with_accumulation(each, count) for each in books]
    seconds = None if rates is None else cost.slowest(timed, env.device, tokens, rates)
    useful = env.rows * env.seq * cost.filled_share(book) * env.filled
    most = room(env.device)
    parameters, by_kind = _parameters(book)
    stages = tuple(ledger.peak_memory(b, tokens).bytes for b in books) if len(books) > 1 else ()
    hosted, host_most = round(max(ledger.hosted_bytes(b, tokens) for b in books)), host_room(env)
    return Prediction(
        peak_bytes=peak.bytes,
        memory_kind="cuda_allocated" if env.device.kind == "cuda" else "rss",
        phase=peak.phase,
        lines=peak.items,
        device=env.device.name,
        capacity_bytes=env.device.memory_bytes,
        fits=(most is None or peak.bytes <= most) and (host_most is None or hosted <= host_most),
        tokens_per_s=None if seconds is None else useful / seconds,
        step_s=seconds,
        basis="datasheet" if rates is None else rates.basis,
        rates_from="" if rates is None else rates.source,
        work=() if rates is None else tuple(cost.list_work_times(book, env.device, tokens, rates)),
        room_bytes=None if most is None else int(most),
        host_bytes=hosted,
        host_room_bytes=host_most,
        host_assumed=host_most is not None and env.device.host_memory_bytes is None,
        parameters=parameters,
        a_parameter=by_kind,
        stage_bytes=stages,
        mesh=env.mesh,
        traced=isinstance(env.shape, TracedShape),
    )


def _compile_s(techniques: Iterable[Technique], env: Environment) -> float:
    return sum(t.compile_s(env) for t in techniques)


def _parameters(book: Ledger) -> tuple[int, dict[str, float]]:
    """Return the number of parameters, and the average bytes per parameter by kind."""
    kinds: dict[str, float] = {}
    for line in book.lines:
        kind = line.name.partition(".")[0]
        if kind in ("weights", "gradients", "states", "casts"):
            kinds[kind] = kinds.get(kind, 0.0) + ledger.line_bytes(book, line)
    count = round(sum(line.values for line in book.lines if line.name.startswith("weights.")))
    return count, {kind: size / count for kind, size in kinds.items() if size}


# --- one problem and its evaluations


@dataclass(frozen=True)
class Problem:
    """The constants of a search."""

    hf: HF  # the model's config.json
    env: Environment  # with the ranks and rows of the run, and no techniques
    padding: float  # share of the slots without a token, with one document per row
    calibration: Calibration | None
    micro_rows: int | None = None  # None: to be chosen
    read: Callable[[HF], ModelShape] = ModelShape.read
    tokens: float | None = None  # of the whole run, estimated; None: unknown

    def shape(self, techniques: Iterable[Technique]) -> ModelShape:
        """Return the sizes of the model after the techniques' config stage."""
        editing = [t for t in techniques if type(t).config is not Technique.config]
        hf = copy.deepcopy(dict(self.hf)) if editing else self.hf
        for t in editing:
            t.config(text_config(hf))
        return self.read(hf)


def _refuse_rows(env: Environment, options: Sequence[Options], seq: int) -> None:
    """Raise ConfigError if no mesh of these options divides a step's rows over the ranks."""

    def able(t: Technique) -> bool:
        return not any(technique.unmet([t], dataclasses.replace(env, axes={**env.axes, **t.axes()})))

    shared = [[t for t in group if t and shares_rows(t) and able(t)] for group in options]
    sizes = ({math.prod(n for axis, n in t.axes().items() if axis in SAME_ROWS) for t in group} for group in shared)
    for chosen in itertools.product(*({1, *group} for group in sizes)):
        groups = env.ranks // math.prod(chosen)
        if groups and env.rows % groups == 0 and env.ranks % math.prod(chosen) == 0:
            return
    who = f"{env.ranks} ranks" if env.data_ranks == env.ranks else f"{env.data_ranks} groups of ranks"
    raise ConfigError(
        f"`batch.tokens: {env.rows * seq}`",
        f"{env.rows} rows, which {who} cannot share",
        f"take {max(1, env.rows // env.data_ranks) * env.data_ranks * seq}",
    )


def _options(
    env: Environment, classes: Sequence[type[Technique]], keep_maths: bool,
    configured: Mapping[str, Mapping[str, Any]], keep: Container[str] = (),
) -> tuple[list[Options], list[tuple[str, str]]]:  # fmt: skip
    """Return the options of each technique, and (name, reason) of techniques that are not tried at all."""
    options: list[Options] = []
    unmet: list[tuple[str, str]] = []
    for cls in classes:
        trains = Part.TRAINED in cls.claims | cls.wants and cls.name in configured  # requested, not chosen for speed
        if keep_maths and cls.numerics is Numerics.DIFFERENT_MATHS and not trains and cls.name not in keep:
            unmet.append((cls.name, "it changes the maths, which are to be kept"))
            continue
        given = configured.get(cls.name)
        variants = [] if given is not None and cls.claims & RANK_PARTS and not cls.searched else list(cls.variants(env))
        # Configured options that no variant sets stay in all variants; configured values of the others are tried too.
        kept = {k: v for k, v in (given or {}).items() if not any(k in variant for variant in variants)}
        tried = [*({**variant, **kept} for variant in variants), *([] if given is None else [given])]
        group = dict.fromkeys(instantiate([cls], {cls.name: o})[0] for o in tried)
        # A configured technique without variants is never left out.
        options.append([*([None] if variants or given is None else []), *group])
    return options, unmet


class Evaluations:
    """Sets of techniques with their best settings, each evaluated once."""

    def __init__(self, problem: Problem, required: Sequence[bool] = ()) -> None:
        """required: for each group of options, whether one of them is in every set."""
        self.problem, self.required = problem, required
        # By set: its fastest setting; its smallest one's needs, if none fits; None: it is not possible.
        self.results = dict[tuple[Technique | None, ...], Candidate | Short | None]()

    @property
    def settings(self) -> list[Candidate]:
        """Settings that fit, each with its fastest micro-batch."""
        return [s for s in self.results.values() if isinstance(s, Candidate)]

    @property
    def tried(self) -> int:
        """Number of possible sets."""
        return sum(s is not None for s in self.results.values())

    def score(self, chosen: tuple[Technique | None, ...]) -> Score | None:
        """Rank a set: sets that fit come first, by speed and then memory; the others by memory alone."""
        if any(must and t is None for must, t in zip(self.required, chosen)):
            return None  # a change dropped the required option
        if chosen not in self.results:
            self.results[chosen] = self.evaluate([t for t in chosen if t is not None])
        result = self.results[chosen]
        if isinstance(result, Candidate):
            return True, *result.rank, -result.prediction.peak_bytes
        return None if result is None else (False, -result.score)

    def possible(self, chosen: tuple[Technique | None, ...]) -> bool:
        """Return whether the techniques of a set are compatible on this hardware, whether or not they fit."""
        return self.score(chosen) is not None

    def evaluate(self, members: Sequence[Technique]) -> Candidate | Short | None:
        """Return a set with its best micro-batch; its smallest one's needs if none fits; None: it is not possible."""
        claimed = [part for t in members for part in t.claims]
        if len(claimed) != len(set(claimed)):
            return None
        base = self.problem.env
        with suppress(NeedsError):
            base = ledger.replaced(base, axes=mesh_axes(members, base.ranks))
        # Without one of the run's axes, more ranks read their own rows.
        if base.rows % base.data_ranks or (base.rows // base.data_ranks) % (self.problem.micro_rows or 1):
            return None
        for micro_rows in dict.fromkeys(
            (base.micro_rows, base.rows // base.data_ranks)
        ):  # some need a step of one micro-batch
            with suppress(ConflictError, NeedsError):
                env = technique.settle(in_order(members), ledger.replaced(base, micro_rows=micro_rows))
                return choose_rows(members, env, self.problem)
        return None


def choose_rows(members: Sequence[Technique], env: Environment, problem: Problem) -> Candidate | Short:
    """Choose the fastest micro-batch of a set that fits; `fastest_rows` chooses between equally fast ones.

    Args:
        env: settled, with any micro-batch.

    Returns:
        the setting; if none fits, the needs of the smallest micro-batch.
    """
    shape = problem.shape(members)
    most, rows = room(env.device), env.rows // env.data_ranks
    rates: Rates | None = None
    order: Rates | None = None
    fitting: list[tuple[float, Environment, list[Ledger]]] = []
    books: list[Ledger] = []
    rules: list[ledger.Rule] = []
    lacking = math.inf
    smallest: tuple[int, list[Ledger]] | None = None  # among sizes that all techniques support
    sizes = micro_batch_rows(rows) if problem.micro_rows is None else [problem.micro_rows]
    for size in sizes:
        sized = ledger.replaced(env, micro_rows=size)
        if any(technique.unmet(members, sized)):
            continue
        predicted = [rule for t in members for rule in t.predict(sized)]
        if not books or predicted != rules:
            rules = predicted
            if "pp" in env.axes:
                books = baseline.books(members, sized, shape, problem.padding)
            else:
                books = [baseline.book(members, sized, shape, problem.padding, predicted)]
            rates, _ = cost.expected_and_ceiling(env.device, problem.calibration, shape, env.span, env.seq)
            order = rates or cost.assumed_rates(env.device, shape, env.span, env.seq)
        books = [ledger.with_accumulation(book, sized.accumulation) for book in books]
        needed = max(ledger.most_bytes(book, size * env.seq) for book in books)
        smallest = smallest or (size, books)
        if most is not None and needed > most:
            continue
        if excess := excess_on_host(books, sized, size * env.seq):
            lacking = min(lacking, excess)
            continue
        seconds = cost.slowest(books, env.device, size * env.seq, order)
        fitting.append((1 / (seconds or 1.0), sized, books))
    if not fitting:
        assert smallest is not None, "the set was settled with one of these sizes"
        size, books = smallest
        peak = max(ledger.peak_memory(book, size * env.seq).bytes for book in books)
        return Short(peak, 0 if lacking == math.inf else round(lacking))
    by_rows = {sized.micro_rows: (sized, of) for _, sized, of in fitting}

    def filled(rows: int) -> float:
        return fullness(by_rows[rows][1], by_rows[rows][0], rows * env.seq)

    chosen = fastest_rows([(speed, sized.micro_rows) for speed, sized, _ in fitting], filled, env.device)
    sized, books = by_rows[chosen]
    peaks = [ledger.peak_memory(book, chosen * env.seq) for book in books]
    worst = max(range(len(books)), key=lambda rank: peaks[rank].bytes)
    prediction = _prediction(books[worst], books, sized, peaks[worst], rates)
    pace = max(speed for speed, sized, _ in fitting if sized.micro_rows == chosen)
    saving = any({Part.ACTIVATION_CHECKPOINTING, Part.ACTIVATION_STORAGE} & t.claims for t in members)
    prediction = dataclasses.replace(prediction, compile_s=_compile_s(members, env))
    return Candidate({t.name: _changed(t) for t in members}, chosen, prediction, saving, pace, problem.tokens)


def micro_batch_rows(share: int) -> list[int]:
    """Return the possible rows per micro-batch, smallest first, for a rank with `share` rows per step."""
    return sorted({2**k for k in range(share.bit_length()) if share % 2**k == 0} | {share})


def fastest_rows(fitting: Sequence[tuple[float, int]], filled: Callable[[int], float], device: Device) -> int:
    """Choose from (speed, rows): the fastest that leaves room to spare, and of equally fast ones the largest.

    Each micro-batch has a cost that the plan does not model (8B with LoRA: benchmarks/results/h100-answers.jsonl). A
    size without room to spare is chosen if it is faster by `WORTH`, or if no other fits. On a CPU, where other programs
    need memory and peaks are less certain, the smallest of the fastest that fill at most `SPARE` of it is chosen.

    Args:
        filled: `fullness` by rows.
    """
    if device.kind == "cpu":
        fitting = [(speed, rows) for speed, rows in fitting if filled(rows) <= SPARE] or fitting[:1]
    fastest = max(speed for speed, _ in fitting)
    near = sorted(rows for speed, rows in fitting if speed >= fastest * (1 - CLOSE))
    if device.kind == "cpu" or room(device) is None:
        return near[0]
    spare = [(speed, rows) for speed, rows in fitting if speed >= fastest * (1 - WORTH) and filled(rows) <= TIGHT]
    if not spare:
        return near[0]
    fastest = max(speed for speed, _ in spare)
    return max(rows for speed, rows in spare if speed >= fastest * (1 - CLOSE))


def _changed(t: Technique) -> dict[str, Any]:
    """Return the options that differ from the defaults."""
    fields = dataclasses.fields(t)  # type: ignore[arg-type]
    return {f.name: getattr(t, f.name) for f in fields if getattr(t, f.name) != f.default}


# --- reports of a search


def _leading(settings: Sequence[Candidate], best: int) -> Iterator[Candidate]:
    """Yield the `best` settings, fastest first, and only one of several equally fast ones.

    On a GPU, that is the one with the fewest micro-batches that leaves room to spare (`fastest_rows`), preferably one
    that saves no memory at the cost of work; else the one with the least memory.
    """
    left = list(settings)
    for _ in range(best):
        if not left:
            return
        close = [s for s in left if s.rank >= (left[0].rank[0], left[0].speed * (1 - CLOSE))]
        yield min(close, key=_preference)
        left = [s for s in left if s not in close]


def _preference(s: Candidate) -> tuple[float, ...]:
    p = s.prediction
    spare = p.memory_kind != "rss" and p.room_bytes is not None and p.filled <= TIGHT
    return -s.micro_rows if spare else 0, s.saving and spare, p.peak_bytes, -s.speed, len(s.with_)


def _lost(
    best: Candidate, settings: Sequence[Candidate], part: _Searched, env: Environment
) -> Iterator[tuple[str, str]]:
    """Yield the cost of each technique that could be added, left out or changed, or why it cannot be."""
    free = [group for group in part.options if None in group or len(group) > 1]  # the others are in every setting
    for t in (t for group in free for t in group if t is not None):
        name, changed = t.name, _changed(t)
        if chosen := best.with_.get(name) == changed:
            others = [s for s in settings if name not in s.with_]
            what = f"without {name}"
        else:
            others = [s for s in settings if s.with_.get(name) == changed]
            what = f"with {_title(name, changed)}"
        other = next(_leading(others, 1), None)
        yield what, _unusable(t, env, part.always, chosen) if other is None else _difference(other, best)


def _unusable(t: Technique, env: Environment, always: Sequence[Technique], without: bool) -> str:
    """Return why no setting has a technique, or why all have it: an unmet requirement of one they share, or memory."""
    members = always if without else (t, *always)
    if not without and (other := next((a for a in always if a.claims & t.claims), None)):
        return f"it takes the place of {other.name}, which is configured"
    least = frozenset(part for member in members for part in member.claims)
    most = frozenset(Part) - t.claims if without else frozenset(Part)
    need = next(filter(None, (_lacking(member, env, (least, most)) for member in members)), None)
    return "nothing that fits" if need is None else f"{need.asked}; found {need.found}"


def _lacking(
    t: Technique, env: Environment, claims: Iterable[frozenset[Part]] = (frozenset(), frozenset(Part))
) -> Requirement | None:
    """Return the first requirement of a technique that is unmet with any other techniques; None: there is none.

    Args:
        claims: the fewest and the most parts that the set can own.
    """
    unmet = [[n for n in t.needs(dataclasses.replace(env, claimed=owned)) if not n.met] for owned in claims]
    fewest: list[Requirement] = min(unmet, key=len)
    return fewest[0] if fewest else None


def _refuse_required(env: Environment, required: Iterable[Technique | None]) -> None:
    """Raise NeedsError if no set is possible because of a technique that every set has."""
    needs = (_lacking(t, env) for t in required if t is not None)
    for need in filter(None, needs):
        raise NeedsError(need.asked, need.found, need.do)


def _difference(other: Candidate, best: Candidate) -> str:
    more = (other.prediction.peak_bytes - best.prediction.peak_bytes) / 2**30
    gain = "" if best.prediction.tokens_per_s is None else f"{other.speed / (best.speed or 1.0) - 1:+.0%} tokens/s, "
    return f"{gain}{more:+.1f} GiB at {other.micro_rows} rows"


def _title(name: str, options: Mapping[str, Any]) -> str:
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
