"""What a run will need and how fast it will be, before anything is built; and which settings would do better. Pure.

config.json -> ModelShape -> the baseline's ledger -> rules of the techniques -> peak and seconds. The search does the
same for every compatible set of techniques, solves each for its largest micro-batch, and ranks by useful tokens a
second. Nothing here knows a technique's name: sets come from claims and needs, and a technique says itself which of
its options are worth a thought (`variants`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from optrush import technique
from optrush.config import Config
from optrush.data.length_estimate import estimate_fill
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.hardware import named
from optrush.models.shapes import SHAPES, ModelShape, native_obstacle
from optrush.planner import baseline, calibration, cost, ledger
from optrush.planner.calibration import Calibration
from optrush.planner.cost import CLOSE, Rates, room
from optrush.planner.ledger import Item, Ledger
from optrush.resolve import resolve
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, in_order, instantiate
from optrush.techniques import ALL

# --- The best of very many combinations without trying them all: one choice changed at a time, until none betters it.
#
# Options that go together double the combinations each, so that soon no plan can try them all. Most of them are good,
# or not, whatever the others are; there one change at a time finds the same (tests/unit/test_ascent.py compares). Where
# two changes gain together what each alone would lose, it may stop short. Pure.


T = TypeVar("T")
Chosen = tuple[T | None, ...]  # one option of each group
Groups = Sequence[Sequence[T | None]]
Clash = Callable[[Any, Any], bool]  # two options that cannot stand together: who comes puts the other out
Score = tuple[float, ...]  # whether it is good for anything, then what is larger is better; compared in order
Value = Callable[[Chosen[T]], Score | None]  # of a combination; None: it is not possible


def climb(
    begins: Sequence[tuple[T | None, ...]], groups: Sequence[Sequence[T | None]], clash: Clash, value: Value[T]
) -> Chosen[T]:
    """The best combination that is found, climbing from each beginning.

    `value` has then been asked of every single change of it; and, of every option that none of these is good for
    anything with, of the best that a climb with it finds: so that what is said of it is not said of one change alone.

    Args:
        value: remembers what it was asked.
    """
    best = max((_ascend(b, groups, clash, value) for b in begins), key=lambda c: value(c) or (-1.0,))
    for place, group in enumerate(groups):
        for option in group:
            held = [[option] if i == place else g for i, g in enumerate(groups)]
            around = [best, *_changes(best, place, [option], clash, value)]
            if not any((w := value(c)) and w[0] for c in around if c[place] == option):
                other = _ascend(_put(best, place, option, clash), held, clash, value)
                if (value(other) or (-1.0,)) > (value(best) or (-1.0,)):
                    return climb([other], groups, clash, value)
    return best


def _ascend(begin: Chosen[T], groups: Groups[T], clash: Clash, value: Value[T]) -> Chosen[T]:
    """A combination that no single change betters; `begin` need not be possible."""
    here, best = begin, value(begin)
    place, calm = 0, 0
    while calm < len(groups):  # groups in a row that bettered nothing
        found = [
            (w, there)
            for there in _changes(here, place, groups[place], clash, value)
            if (w := value(there)) and all(o in group for o, group in zip(there, groups))
        ]
        top = max(found, key=lambda f: f[0], default=None)
        calm += 1
        if top is not None and (best is None or top[0] > best):
            (best, here), calm = top, 0
        place = (place + 1) % len(groups)
    return here


def _put(here: Chosen[T], place: int, option: T | None, clash: Clash) -> Chosen[T]:
    return tuple(
        option if i == place else None if option is not None and o is not None and clash(option, o) else o
        for i, o in enumerate(here)
    )


def _changes(
    here: Chosen[T], place: int, group: Sequence[T | None], clash: Clash, value: Value[T]
) -> Iterator[Chosen[T]]:
    """With another option of the group; where that is not possible, with one of the others left out as well."""
    for option in group:
        if option == here[place]:
            continue
        there = _put(here, place, option, clash)
        if value(there) is not None:
            yield there
            continue
        for i, o in enumerate(there):
            if i != place and o is not None:
                yield (*there[:i], None, *there[i + 1 :])


Options = Sequence[Technique | None]


@dataclass(frozen=True)
class Prediction:
    """Of one configuration, for the worst rank."""

    peak_bytes: int
    memory_kind: str  # "cuda_allocated" or "rss"
    phase: str
    lines: tuple[Item, ...]  # their sum is the peak
    device: str
    capacity_bytes: int | None
    fits: bool
    tokens_per_s: float | None  # useful ones, of all ranks; None where the device's rates are unknown
    basis: str  # "datasheet" or "calibrated"
    rates_from: str = ""  # where the rates come from, for people
    work: tuple[cost.WorkTime, ...] = ()  # of one step on one rank
    room_bytes: int | None = None  # of the capacity, what a peak may have: less the CUDA context and the gaps
    parameters: int = 0
    a_parameter: Mapping[str, float] = dataclasses.field(default_factory=dict)  # bytes of each kind
    # Seconds of a step by part, were the device at its ceiling: measured rates, or the datasheet's whole ones.
    ceiling_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0  # of pinned host memory, beside the device's


@dataclass(frozen=True)
class Candidate:
    """One set of techniques with a micro-batch."""

    with_: Mapping[str, Mapping[str, Any]]
    micro_rows: int
    prediction: Prediction

    def over(self, config: Config) -> Config:
        """The run with this setting."""
        batch = config.batch.model_copy(update={"micro_tokens": self.micro_rows * config.batch.seq})
        return config.model_copy(update={"with_": {k: dict(v) for k, v in self.with_.items()}, "batch": batch})

    @property
    def title(self) -> str:
        """The techniques in a line."""
        return " ".join(map(_titled, self.with_.items())) or "no technique"


@dataclass(frozen=True)
class SearchResult:
    """What a search found: the best settings, how many sets it tried, and why other techniques are not in the best."""

    settings: tuple[Candidate, ...]
    tried: int
    lost: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Problem:
    """What a search does not vary."""

    hf: dict[str, Any]
    env: Environment
    padding: float
    found: Calibration | None


def predict(
    config: Config, hardware: str = "auto", ranks: int | None = None, classes: Sequence[type[Technique]] = ALL
) -> Prediction:
    """Peak memory and speed of a run as it is configured.

    Args:
        hardware: as `hardware.named` takes it.
        ranks: processes; None: as many as the hardware's name says.

    Raises:
        UserError: the run cannot be prepared there, or the plan does not know its model.
    """
    device, count = named(hardware)
    prepared = resolve(config, classes, ranks or count, device)
    holding = estimate_fill(config)
    env = dataclasses.replace(prepared.env, reach=holding.reach)
    tokens = env.micro_rows * env.seq
    book = _book(prepared.techniques, env, prepared.hf, holding.padding)
    expected, most = cost.known(device, calibration.find(device), prepared.hf, env.span, env.seq)
    parts = {} if most is None else cost.parts(book, tokens, most)
    found = _prediction(book, env, ledger.peak(book, tokens), expected)
    return dataclasses.replace(found, ceiling_s=parts, host_bytes=round(ledger.hosted(book, tokens)))


def search(
    config: Config,
    hardware: str = "auto",
    classes: Sequence[type[Technique]] = ALL,
    *,
    keep_maths: bool = False,
    best: int = 3,
) -> SearchResult:
    """The best settings over sets of techniques that go together, and micro-batch; tokens a step stay as they are.

    From the run's own set, and from none, one technique is changed at a time until no change is faster (ascent.py).

    Args:
        keep_maths: leave out techniques that change what is computed (`Numerics.DIFFERENT_MATHS`).
        best: so many settings.
    """
    scene = _scene(config, hardware, classes)
    options, unmet = _options(scene.env, classes, keep_maths, config.with_)
    looked = _Evaluated(scene)
    asked = [instantiate([c], {c.name: config.with_[c.name]})[0] for c in classes if c.name in config.with_]
    own = tuple(next((t for t in group if t in asked), None) for group in options)
    none = tuple(None if None in group else group[0] for group in options)
    climb((own, none), options, lambda a, b: bool(a.claims & b.claims), looked.worth)
    settings = sorted(looked.settings, key=lambda s: s.prediction.tokens_per_s or 0.0, reverse=True)
    return SearchResult(tuple(_leading(settings, best)), looked.tried, (*_lost(settings, options, scene.env), *unmet))


def family(
    config: Config, hardware: str, setting: Candidate, classes: Sequence[type[Technique]] = ALL
) -> Iterator[tuple[str, int, Candidate | None]]:
    """What the named shapes of the run's family would cost on the same hardware, smallest first.

    Each takes the given setting, with or without what keeps less for the backward pass; None: it does not fit.

    Yields:
        name, parameters, setting.
    """
    scene = _scene(config, hardware, classes)
    chosen: list[Options] = [[t] for t in instantiate(classes, setting.with_)]
    saving = [t for c in classes if Part.ACTIVATION_CHECKPOINTING in c.claims for t in _variants(c, scene.env)]
    chosen = [[o for o in group if o and Part.ACTIVATION_CHECKPOINTING not in o.claims] or [None] for group in chosen]
    shapes = {n: ModelShape.read(hf) for n, hf in SHAPES.items() if hf["model_type"] == scene.hf["model_type"]}
    for name, shape in sorted(shapes.items(), key=lambda s: s[1].parameters):
        env = dataclasses.replace(scene.env, blocks=shape.layers, vocab=shape.vocab, shape=shape)
        other = dataclasses.replace(scene, hf=copy.deepcopy(SHAPES[name]), env=env)
        looked = _Evaluated(other)
        for one in itertools.product(*chosen, [None, *saving]):
            looked.worth(one)
        yield name, shape.parameters, max(looked.settings, key=lambda s: s.prediction.tokens_per_s or 0.0, default=None)


def _scene(config: Config, hardware: str, classes: Sequence[type[Technique]]) -> _Problem:
    """Everything but the micro-batch and the techniques (save who says what is trained), checked."""
    device, ranks = named(hardware)
    batch = config.batch.model_copy(update={"micro_tokens": config.batch.seq})
    kept = {c.name: config.with_[c.name] for c in classes if Part.TRAINED in c.claims and c.name in config.with_}
    prepared = resolve(config.model_copy(update={"with_": kept, "batch": batch}), classes, 1, device)
    if prepared.env.rows % ranks:
        rows = prepared.env.rows
        do = f"take {max(1, rows // ranks) * ranks * config.batch.seq}"
        raise ConfigError(
            f"`batch.tokens: {config.batch.tokens}`", f"{rows} rows, which {ranks} ranks cannot share", do
        )
    holding = estimate_fill(config)
    env = dataclasses.replace(prepared.env, ranks=ranks, reach=holding.reach)
    return _Problem(prepared.hf, env, holding.padding, calibration.find(device))


def _book(members: Sequence[Technique], env: Environment, hf: Mapping[str, Any], empty: float) -> Ledger:
    """The settled ledger of a set of techniques."""
    if (obstacle := native_obstacle(hf)) is not None:
        asked = f"a plan for a model of type {hf.get('model_type')!r}"
        raise NeedsError(asked, obstacle, "train it without a plan")
    entries = _baseline(shape := ModelShape.read(hf), env.seq, env.native, env.device.kind == "cuda", empty)
    widths = ledger.BFLOAT16 if env.dtype == "bfloat16" else ledger.FLOAT32
    return ledger.settle(entries, widths, baseline.rules(members, env, shape), env.accumulation)


@cache  # one for all sets of a search
def _baseline(shape: ModelShape, T: int, native: bool, cuda: bool, empty: float) -> list[ledger.Entry]:
    return baseline.entries(shape, T, native=native, cuda=cuda, padding=empty)


def _prediction(book: Ledger, env: Environment, peak: ledger.Peak, speeds: Rates | None) -> Prediction:
    tokens = env.micro_rows * env.seq
    seconds = None if speeds is None else cost.seconds(book, env.device, tokens, speeds)
    useful = env.rows * env.seq * cost.filled(book)
    most = room(env.device)
    kind = "cuda_allocated" if env.device.kind == "cuda" else "rss"
    return Prediction(
        peak.bytes, kind, peak.phase, peak.items, env.device.name, env.device.memory_bytes,
        most is None or peak.bytes <= most, None if seconds is None else useful / seconds,
        "datasheet" if speeds is None else speeds.basis, "" if speeds is None else speeds.said,
        () if speeds is None else tuple(cost.efforts(book, env.device, tokens, speeds)),
        None if most is None else int(most), *_a_parameter(book),
    )  # fmt: skip


def _a_parameter(book: Ledger) -> tuple[int, dict[str, float]]:
    """How many parameters there are, and what each costs on average: where 16 bytes a parameter go."""
    kinds: dict[str, float] = {}
    for line in book.lines:
        kind = line.name.partition(".")[0]
        if kind in ("weights", "gradients", "states", "casts"):
            kinds[kind] = kinds.get(kind, 0.0) + ledger.held(book, line)
    count = round(sum(line.values for line in book.lines if line.name.startswith("weights.")))
    return count, {kind: size / count for kind, size in kinds.items() if size}


def _options(
    env: Environment, classes: Sequence[type[Technique]], keep_maths: bool, given: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Options], list[tuple[str, str]]]:
    """For each technique: leaving it out, or one of its variants; and why some cannot run here at all."""
    options: list[Options] = []
    unmet: list[tuple[str, str]] = []
    for cls in classes:
        if keep_maths and cls.numerics is Numerics.DIFFERENT_MATHS:
            unmet.append((cls.name, "it changes the maths, which are to be kept"))
            continue
        own = instantiate([cls], {cls.name: given[cls.name]}) if cls.name in given else []
        tried = _variants(cls, env)
        # What the run asks for, too; and what no search tries is not left out by one either.
        options.append([*([None] if tried or not own else []), *dict.fromkeys([*tried, *own])])
    return options, unmet


def _variants(cls: type[Technique], env: Environment) -> list[Technique]:
    return [instantiate([cls], {cls.name: given})[0] for given in cls.variants(env)]


class _Evaluated:
    """Sets that were looked at, each once."""

    def __init__(self, scene: _Problem) -> None:
        self.scene, self.found = scene, dict[tuple[Technique | None, ...], Candidate | int | None]()

    @property
    def settings(self) -> list[Candidate]:
        """Those that fit, each with its fastest micro-batch."""
        return [s for s in self.found.values() if isinstance(s, Candidate)]

    @property
    def tried(self) -> int:
        """How many go together."""
        return sum(s is not None for s in self.found.values())

    def worth(self, chosen: tuple[Technique | None, ...]) -> Score | None:
        """What fits before what does not; by speed, then by memory; what does not fit by memory alone."""
        if chosen not in self.found:
            self.found[chosen] = self._look([t for t in chosen if t is not None])
        found = self.found[chosen]
        if isinstance(found, Candidate):
            return True, found.prediction.tokens_per_s or 0.0, -found.prediction.peak_bytes
        return None if found is None else (False, -found)

    def _look(self, members: list[Technique]) -> Candidate | int | None:
        claimed = [part for t in members for part in t.claims]
        if len(claimed) != len(set(claimed)):
            return None
        one = self.scene.env
        for micro_rows in dict.fromkeys((one.micro_rows, one.rows // one.ranks)):  # some want a step in one
            with suppress(ConflictError, NeedsError):
                env = technique.settle(in_order(members), dataclasses.replace(one, micro_rows=micro_rows))
                return _fastest(members, env, self.scene)
        return None


def _fastest(members: Sequence[Technique], env: Environment, scene: _Problem) -> Candidate | int:
    """With the micro-batch to take: solved for the largest that fits, then the smallest that is as fast.

    Returns:
        bytes of the peak with the smallest micro-batch, where nothing fits.
    """
    hf = copy.deepcopy(scene.hf)
    for t in members:
        t.config(hf)
    most, rows = room(env.device), env.rows // env.ranks
    speeds: Rates | None = None
    best: tuple[float, Environment, Ledger] | None = None
    book: Ledger | None = None
    rules: list[ledger.Rule] = []
    for alone in (False, True):  # rules may depend on whether there is accumulation
        sizes = [rows] if alone else [2**k for k in range(20) if 2**k < rows and rows % 2**k == 0]
        if not sizes:
            continue
        asked = [r for t in members for r in t.predict(dataclasses.replace(env, micro_rows=sizes[0]))]
        if book is None or asked != rules:
            book, rules = _book(members, dataclasses.replace(env, micro_rows=sizes[0]), hf, scene.padding), asked
            speeds, _ = cost.known(env.device, scene.found, hf, env.span, env.seq)
        largest = rows if most is None else ledger.largest(book, most, env.seq) // env.seq
        for n in (n for n in sizes if n <= largest):
            made = dataclasses.replace(env, micro_rows=n)
            if any(technique.unmet(members, made)):
                continue
            book = dataclasses.replace(book, accumulation=made.accumulation)
            taken = None if speeds is None else cost.seconds(book, env.device, n * env.seq, speeds)
            speed = 1 / (taken or 1.0)
            if best is None or speed > best[0] * (1 + CLOSE):
                best = (speed, made, book)
    if best is None:
        assert book is not None
        return ledger.peak(book, env.seq * (1 if rows % 2 == 0 else rows)).bytes
    _, env, book = best
    peak = ledger.peak(book, env.micro_rows * env.seq)
    return Candidate({t.name: _chosen(t) for t in members}, env.micro_rows, _prediction(book, env, peak, speeds))


def _chosen(t: Technique) -> dict[str, Any]:
    """Its options that are not the defaults."""
    fields = dataclasses.fields(t)  # type: ignore[arg-type]
    return {f.name: getattr(t, f.name) for f in fields if getattr(t, f.name) != f.default}


def _leading(settings: Sequence[Candidate], best: int) -> Iterator[Candidate]:
    """The fastest; of equally fast ones the one that needs least memory, and none that another equals in all."""
    left, given = list(settings), 0
    while left and given < best:
        fastest = left[0].prediction.tokens_per_s or 0.0
        close = [s for s in left if (s.prediction.tokens_per_s or 0.0) >= fastest * (1 - CLOSE)]
        chosen = min(close, key=lambda s: (s.prediction.peak_bytes, len(s.with_)))
        yield chosen
        given += 1
        left = [s for s in left if s not in close]


def _lost(settings: Sequence[Candidate], options: Sequence[Options], env: Environment) -> Iterator[tuple[str, str]]:
    """What the best setting would be with one technique more, less or otherwise, or why it cannot be had."""
    best = next(_leading(settings, 1), None)
    if best is None:
        return
    free = [group for group in options if None in group or len(group) > 1]  # else as the run asks for it, always
    for t in (t for group in free for t in group if t is not None):
        name, given = t.name, _chosen(t)
        if best.with_.get(name) == given:
            others = [s for s in settings if name not in s.with_]
            what = f"without {name}"
        else:
            others = [s for s in settings if s.with_.get(name) == given]
            what = f"with {_titled((name, given))}"
        other = next(_leading(others, 1), None)
        yield what, _unusable(t, env) if other is None else _against(other, best)


def _unusable(t: Technique, env: Environment) -> str:
    """Why no setting has it: what it lacks by itself, else memory."""
    others = (frozenset[Part](), frozenset(Part))  # nobody beside it, or somebody for every part
    unmet = [[n for n in t.needs(dataclasses.replace(env, claimed=owned)) if not n.met] for owned in others]
    fewest: list[Requirement] = min(unmet, key=len)
    lacks = fewest[0] if fewest else None
    return "nothing that fits" if lacks is None else f"{lacks.asked}; found {lacks.found}"


def _against(other: Candidate, best: Candidate) -> str:
    gain = (other.prediction.tokens_per_s or 0.0) / (best.prediction.tokens_per_s or 1.0) - 1
    more = (other.prediction.peak_bytes - best.prediction.peak_bytes) / 2**30
    return f"{gain:+.0%} tokens/s, {more:+.1f} GiB at {other.micro_rows} rows"


def _titled(item: tuple[str, Mapping[str, Any]]) -> str:
    name, options = item
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
