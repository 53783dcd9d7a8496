"""Answer what a user asks of the planner: what fits, by which method, how fast, and what is nearest if nothing does.

A method is what is trained (all weights, adapters, adapters on 8 or 4 bits). Each is searched for its fastest set of
techniques, then methods are ranked: the one that costs least in quality comes first, unless it is tight, or another one
is more than `SLOWER` times as fast. `choose_techniques` makes the same search for a run without `with`. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrush import hardware
from optrush.config import METHODS, Config, with_method
from optrush.data.length_estimate import estimate_tokens
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.hardware import GIB, Device
from optrush.models.shapes import native_obstacle
from optrush.models.source import locate, shapes_of
from optrush.models.text_part import text_config
from optrush.planner import search
from optrush.planner.cost import CLOSE, TIGHT, micro_batch_rows
from optrush.planner.ledger import Short
from optrush.planner.search import Candidate, Prediction, SearchResult
from optrush.resolve import resolve
from optrush.technique import (
    RANK_PARTS,
    Environment,
    Part,
    Requirement,
    Technique,
    compilers,
    instantiate,
    mesh_text,
)  # fmt: skip
from optrush.techniques import ALL

HOST_GPUS = 8  # GPUs of a host at most, of which more are suggested
SLOWER = 2.0
NEAR = 1.05  # as fast, where one of two sets leaves room for the plan's error
MUCH = 1.5  # what a set must be faster by that is tried for want of memory, where another one fits
SHORTEST = 256  # tokens of a row, below which shorter rows are no advice
LONGEST = 1 << 20  # that are tried
SPARE = 0.5  # of a CPU's memory, for other programs, and because the plan was up to 17 % low there (docs/log/open.md)


@dataclass(frozen=True)
class Way:
    """A method with the fastest setting that fits."""

    method: str
    quality: tuple[str, ...]  # what it costs, as sentences of a few words
    setting: Candidate | None  # None: none fits
    least: Short | None  # where none fits
    steps: float | None = None  # of the whole run; None: the data's size is not known
    seconds: float | None = None
    mesh: str = ""  # the ranks' axes, and the techniques that divide the run over them
    refused: str = ""  # why the model has no such method; empty: it has

    @property
    def tight(self) -> bool:
        """Whether what is usable is filled but for the error of a prediction."""
        p = None if self.setting is None else self.setting.prediction
        return p is not None and p.filled > TIGHT

    @property
    def costs(self) -> str:
        return ", ".join(self.quality) or "all weights, no cost in quality"


@dataclass(frozen=True)
class Answer:
    """What fits, best first; what the configuration's own search found; and the nearest, if nothing fits."""

    ways: tuple[Way, ...]
    found: SearchResult
    nearest: tuple[str, ...] = ()
    tokens: float | None = None  # of one epoch, by estimate; None: not known

    @property
    def best(self) -> Way | None:
        return next((w for w in self.ways if w.setting is not None), None)

    @property
    def least(self) -> Short | None:
        """What the smallest set needs of all that do not fit."""
        return min((w.least for w in self.ways if w.least), key=lambda s: s.score, default=None)


def answer(
    config: Config, name: str = "auto", classes: Sequence[type[Technique]] = ALL, *, keep_maths: bool = False,
    nearest: bool = True,
) -> Answer:  # fmt: skip
    """Search every method that the configuration leaves open.

    Args:
        name: of the hardware, as in `hardware.parse_hardware`.
        keep_maths: as in `search.search`.
        nearest: also search what would fit, if nothing does.
    """
    with search.remembered():
        return _answer(config, name, classes, keep_maths, nearest)


def _answer(config: Config, name: str, classes: Sequence[type[Technique]], keep_maths: bool, nearest: bool) -> Answer:
    found = search.search(with_method(config), name, classes, keep_maths=keep_maths, whole=nearest)
    tokens = estimate_tokens(config)
    ways: list[Way] = []
    refusals: list[NeedsError] = []
    start: Mapping[str, Mapping[str, Any]] | None = found.settings[0].with_ if found.settings else None
    for place, (method, techniques) in enumerate(methods(config, classes)):
        of = config.model_copy(update={"with_": techniques, "method": None})
        result = found
        try:
            if place or config.method == "auto":
                result = search.search(of, name, classes, keep_maths=keep_maths, whole=False, start=start)
        except NeedsError as error:
            refusals.append(error)
            ways.append(Way(method, (), None, None, refused=error.found))
            continue
        if not keep_maths and (not result.settings or _short_of_memory(result.settings[0], classes)):
            result = _better(result, search.search(of, name, classes, whole=False, scarce=True))
        start = start or (result.settings[0].with_ if result.settings else None)
        ways.append(_way(of, name, method, result, classes, tokens))
    if len(refusals) == len(ways):
        raise refusals[0]
    ranked = _ranked(ways)
    advice = () if ranked[0].setting is not None or not nearest else tuple(_nearest(config, name, classes))
    return Answer(tuple(ranked), found, advice, tokens)


def _short_of_memory(setting: Candidate, classes: Sequence[type[Technique]]) -> bool:
    """Return whether a set computes again what it could not keep, or leaves no room: host memory may be better."""
    again = any(Part.ACTIVATION_CHECKPOINTING in t.claims for t in instantiate(classes, setting.with_))
    return again or setting.prediction.filled > TIGHT


def _better(usual: SearchResult, scarce: SearchResult) -> SearchResult:
    """Return the second of two searches where it is much faster, or as fast with room and without host memory."""
    if not usual.settings or not scarce.settings:
        return usual if usual.settings else scarce
    one, other = usual.settings[0], scarce.settings[0]
    roomy = one.prediction.filled > TIGHT >= other.prediction.filled and not other.prediction.host_bytes
    return scarce if other.speed > one.speed * MUCH or (roomy and other.speed * NEAR >= one.speed) else usual


def methods(config: Config, classes: Sequence[type[Technique]] = ALL) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return the methods that a configuration leaves open, each with the techniques to begin from, best quality first.

    What the file names stays: its adapters, its quantised base, and every other technique.
    """
    own = {name: dict(options) for name, options in with_method(config).with_.items()}
    parts = {part for t in instantiate(classes, own) for part in t.claims}
    bases = [c.name for c in classes if Part.LINEARS in c.claims and Part.TRAINED in c.wants]
    quantised = bool(own.keys() & bases)
    adapters = METHODS["lora"] if Part.ADAPTERS not in parts else {}
    given = next((m for m, names in METHODS.items() if names and own.keys() >= names.keys()), "as configured")
    given = "qlora" if own.keys() >= METHODS["qlora"].keys() else given
    if config.method in METHODS or quantised:
        return [(config.method if config.method in METHODS else given, own)]
    ways = [] if Part.ADAPTERS in parts else [("full", own)]
    ways.append(("lora" if adapters else given, {**own, **adapters}))
    if Part.LINEARS not in parts:
        for base in reversed(bases):  # more bits first
            name = "qlora" if base in METHODS["qlora"] else f"{'lora' if adapters else given} + {base}"
            ways.append((name, {**own, **adapters, base: {}}))
    return ways


def _way(
    config: Config, name: str, method: str, result: SearchResult, classes: Sequence[type[Technique]],
    tokens: float | None = None,
) -> Way:  # fmt: skip
    if not result.settings:
        return Way(method, (), None, result.least)
    setting = fastest = result.settings[0]
    if method == "full":  # rather one that leaves room for the plan's error than adapters
        near = (s for s in result.settings if s.prediction.filled <= TIGHT and s.speed * NEAR >= fastest.speed)
        setting = next(near, fastest)
    device, ranks = hardware.parse_hardware(name)
    chosen = instantiate(classes, setting.with_)
    claimed = frozenset(part for t in chosen for part in t.claims)
    env = Environment(device, ranks, config.batch.seq, 1, 1, None, "float32", True, 1, claimed)
    quality = tuple(dict.fromkeys(text for t in chosen if (text := t.quality(env))))
    dividing = {t.name: setting.with_[t.name] for t in chosen if t.claims & RANK_PARTS}
    owners = dataclasses.replace(setting, with_=dividing).title
    mesh = f"mesh {mesh_text(setting.prediction.mesh)} ({owners})" if dividing else ""
    return Way(method, quality, setting, None, *duration(config, setting.prediction, tokens), mesh)


def _ranked(ways: Sequence[Way]) -> list[Way]:
    """Sort: what fits before what does not; of that, the least cost in quality that is not much slower."""
    fitting = [w for w in ways if w.setting is not None]
    fastest = max((w.setting.speed for w in fitting if w.setting), default=0.0)
    quick = [w for w in fitting if w.setting and w.setting.speed * SLOWER >= fastest and not w.tight]
    return [*quick, *(w for w in fitting if w not in quick), *(w for w in ways if w.setting is None)]


def duration(config: Config, p: Prediction, tokens: float | None) -> tuple[float | None, float | None]:
    """Return steps and seconds of a run over data of so many tokens; None: not known."""
    if p.step_s is None or not p.tokens_per_s:
        return (None if config.train.steps is None else float(config.train.steps)), None
    steps: float | None = config.train.steps
    if steps is None and tokens is not None:
        steps = math.ceil(config.train.epochs * tokens / (p.step_s * p.tokens_per_s))
    return steps, None if steps is None else steps * p.step_s


# --- if nothing fits: the smallest change after which something does


def fits(config: Config, name: str, classes: Sequence[type[Technique]] = ALL) -> Way | None:
    """Return the best way of a configuration that fits; None: none does, or it cannot be planned there."""
    try:
        if not _any_setting(config, name, classes):
            return None
        return answer(config, name, classes, nearest=False).best
    except UserError:
        return None


def _too_large(config: Config, name: str, classes: Sequence[type[Technique]]) -> bool:
    """Return whether a configuration can be planned, and nothing fits."""
    try:
        return not _any_setting(config, name, classes)
    except UserError:
        return False


def _any_setting(config: Config, name: str, classes: Sequence[type[Technique]]) -> bool:
    """Return whether something fits by the method that holds least, of those that the model has."""
    ways = [config.model_copy(update={"with_": with_, "method": None}) for _, with_ in methods(config, classes)]
    for of in reversed(ways[1:]):
        try:
            return bool(search.search(of, name, classes, whole=False, scarce=True).settings)
        except NeedsError:
            continue
    return bool(search.search(ways[0], name, classes, whole=False, scarce=True).settings)


def _nearest(config: Config, name: str, classes: Sequence[type[Technique]]) -> Iterator[str]:
    """Yield a change of method, rows, model and hardware each, with what then fits."""
    bases = [c.name for c in classes if Part.TRAINED in c.claims | c.wants]
    freed = {n: o for n, o in config.with_.items() if n not in bases}
    other = config.model_copy(update={"method": None, "with_": freed})
    if (config.method is not None or freed != config.with_) and (way := fits(other, name, classes)):
        yield f"method: {way.method} ({_fact(way)})"
    T = config.batch.seq
    small = config.batch.model_copy(update={"tokens": T * hardware.parse_hardware(name)[1], "micro_tokens": None})
    steps = config.model_copy(update={"batch": small})
    unclipped = steps.model_copy(update={"optim": config.optim.model_copy(update={"clip": None})})
    fewer = config.method == "full" and small.tokens < config.batch.tokens  # gradients need not wait for the last row
    for other, also in ((steps, ""), (unclipped, ", optim.clip: null")) if fewer else ():
        if way := fits(other, name, classes):
            yield f"smaller steps: batch.tokens: {small.tokens}{also} ({way.method}, {_fact(way)})"
            break
    shorter = [*itertools.takewhile(lambda n: n >= SHORTEST, (T // 2**k for k in range(1, 12)))]
    for seq in () if not shorter or _too_large(_rows_of(config, shorter[-1]), name, classes) else shorter:
        if way := fits(_rows_of(config, seq), name, classes):
            yield f"rows of {seq} tokens: batch.seq: {seq} ({way.method}, {_fact(way)})"
            break
    for shape, smaller in reversed(_family(config)):
        if way := fits(smaller, name, classes):
            yield f"a smaller model: {shape} ({way.method}, {_fact(way)})"
            break
    for card in larger_hardware(name):
        rows = _shared(config, hardware.parse_hardware(card)[1])
        if way := fits(rows, card, classes):
            yield f"other hardware: {card} ({way.method}, {_fact(way)})"
            break


def _fact(way: Way) -> str:
    assert way.setting is not None
    p = way.setting.prediction
    speed = "" if p.tokens_per_s is None else f", {p.tokens_per_s:,.0f} tokens/s"
    hosted = f" + {p.host_bytes / GIB:.1f} GiB of host memory" if p.host_bytes else ""
    return f"{p.peak_bytes / GIB:.1f} GiB{hosted}{speed}"


def _rows_of(config: Config, seq: int) -> Config:
    """Return the configuration with rows of `seq` tokens and about as many tokens a step."""
    tokens = max(1, config.batch.tokens // seq) * seq
    batch = config.batch.model_copy(update={"seq": seq, "tokens": tokens, "micro_tokens": None})
    return config.model_copy(update={"batch": batch})


def _shared(config: Config, ranks: int) -> Config:
    """Return the configuration with as many rows a step as ranks can share, at least as many as now."""
    b = config.batch
    rows = -(-(b.tokens // b.seq) // ranks) * ranks
    return config.model_copy(update={"batch": b.model_copy(update={"tokens": rows * b.seq, "micro_tokens": None})})


def _family(config: Config) -> list[tuple[str, Config]]:
    """Return the named shapes of the model's family that are smaller than it, smallest first."""
    from optrush.models.shapes import ModelShape

    _, hf = locate(config, weights=False)
    if native_obstacle(hf) is not None:
        return []
    most = ModelShape.read(hf).parameters
    sizes = {n: ModelShape.read(s).parameters for n, s in shapes_of(hf["model_type"]).items()}
    names = sorted((n for n, size in sizes.items() if size < most and "untied" not in n), key=lambda n: sizes[n])
    return [(n, _of_shape(config, n)) for n in names]


def _of_shape(config: Config, name: str) -> Config:
    """Return the configuration with a named shape, on rows as long and as full as now."""
    model = config.model.model_copy(update={"path": None, "shape": name, "tokenizer": config.model.tokenizer or "."})
    return config.model_copy(update={"model": model})


def planned_notes(config: Config, device: hardware.Device, ranks: int) -> Iterator[str]:
    """Yield what may not be meant: rows longer than the model's positions, more GPUs of one host than hosts have."""
    seq, text = config.batch.seq, text_config(locate(config, weights=False)[1])
    made = int(text.get("max_position_embeddings") or seq)
    if seq > made and "rope" not in config.with_:
        yield f"rows of {seq} tokens, where the model was made for {made} positions: shorter rows, or --with rope"
    if device.hosts == 1 and device.kind == "cuda" and ranks > HOST_GPUS:
        hosts = f"2x{ranks // 2}x" if ranks % 2 == 0 else "HOSTSxGPUSx"
        yield f"{ranks} GPUs of one host, which few have; two hosts and their link: {hosts}NAME:infiniband"


def larger_hardware(name: str) -> Iterator[str]:
    """Yield the names of hardware with more memory: of several of one card more, then others, least first."""
    device, count = hardware.parse_hardware(name)
    same = next((n for n, d in hardware.NAMED.items() if d.name == device.name), None)
    if same is not None and device.hosts == 1 and 1 < count < HOST_GPUS:
        yield from (f"{n}x{same}" for n in (4, 8) if n > count)
    have = count * (device.memory_bytes or 0)
    cards = sorted(hardware.NAMED, key=lambda n: hardware.NAMED[n].memory_bytes or 0)
    many = ("4090", "a100-80", "h100", "h200")
    named = [(n, card) for n in (1, 2, 4, 8) for card in cards if n == 1 or card in many]
    sizes = [(n * (hardware.NAMED[c].memory_bytes or 0), f"{n}x{c}" if n > 1 else c) for n, c in named]
    yield from (text for size, text in sorted(sizes) if size > have)


# --- what is asked for: the longest row, the largest model, the cheapest card, the batch


def solve(config: Config, name: str, what: str, classes: Sequence[type[Technique]] = ALL) -> tuple[str, dict[str, Any]]:
    """Return the answer as a sentence, and as values.

    Raises:
        ConfigError: nothing fits, or no such question.
    """
    asked = {"longest": _longest, "largest-model": _largest, "cheapest": _cheapest, "batch": _batch}
    if what not in asked:
        raise ConfigError(f"--solve {what}", "no such question", f"take {', '.join(asked)}")
    with search.remembered():
        return asked[what](config, name, classes)


def _nothing(what: str, name: str) -> ConfigError:
    do = "optrush plan names the nearest that fits"
    return ConfigError(f"--solve {what}", f"nothing fits on {name}", do)


def _longest(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the longest row of one document: powers of two, then steps of an eighth of the last one."""
    _, ranks = hardware.parse_hardware(name)
    if not config.paired:
        data = config.data.model_copy(update={"random": True, "path": None, "sample": None, "eval": None})
        other = {} if config.objective == "distill" else {"objective": "pretrain"}  # which takes random tokens as well
        config = config.model_copy(update={"data": data, **other})
    _, hf = locate(config, weights=False)
    most = min(LONGEST, int(text_config(hf).get("max_position_embeddings") or LONGEST))

    def of(seq: int) -> Way | None:
        batch = config.batch.model_copy(update={"seq": seq, "tokens": seq * ranks, "micro_tokens": None})
        return fits(config.model_copy(update={"batch": batch}), name, classes)

    best: tuple[int, Way] | None = None
    for power in range(8, 21):
        if 2**power > most or (way := of(2**power)) is None:
            break
        best = (2**power, way)
    if best is None:
        raise _nothing("longest", name)
    step, low = best[0] // 8, best[0]
    for seq in range(low + step, min(2 * low, most + 1), step) if 2 * low <= most else ():
        if (way := of(seq)) is None:
            break
        best = (seq, way)
    seq, way = best
    limit = ", all that the model has positions for" if seq >= most else ""
    assert way.setting is not None
    by = f"{way.method}, {_fact(way)}, in steps of {seq * ranks:,} tokens, by {way.setting.title}"
    return f"a document of {seq:,} tokens a row{limit}: {by}", _values(way) | {"seq": seq}


def _largest(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    from optrush.models.shapes import ModelShape

    _, hf = locate(config, weights=False)
    sizes = {n: ModelShape.read(s).parameters for n, s in shapes_of(hf["model_type"]).items()}
    for shape in sorted(sizes, key=lambda n: -sizes[n]):
        if way := fits(_of_shape(config, shape), name, classes):
            return f"{shape}: {way.method}, {_fact(way)}", _values(way) | {"model": shape}
    raise _nothing("largest-model", name)


def _cheapest(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the hardware whose run costs least: an hour's price over its speed."""
    costs: list[tuple[float, str, Way]] = []
    for card, price in hardware.PRICES_USD_H.items():
        way = fits(config.model_copy(update={"batch": config.batch.model_copy(update={"micro_tokens": None})}), card)
        speed = None if way is None or way.setting is None else way.setting.prediction.tokens_per_s
        if way is not None and speed:
            costs.append((price / speed / 3600 * 1e9, card, way))
    if not costs:
        raise _nothing("cheapest", "any one card of the table")
    cost, card, way = min(costs, key=lambda c: c[0])
    text = f"{card}: {way.method}, {_fact(way)}, about {cost:,.0f} USD a billion tokens"
    if way.seconds is not None:
        text += f", {way.seconds / 3600 * hardware.PRICES_USD_H[card]:,.2f} USD for this run"
    return text, _values(way) | {"hardware": card, "usd_a_billion_tokens": cost}


def _batch(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the largest micro-batch of the configuration as it is, or as a run without `with` is planned."""
    _, ranks = hardware.parse_hardware(name)
    config, _ = choose_techniques(config, name, ranks, classes)
    T, best = config.batch.seq, 0
    for rows in (2**k for k in range(20)):
        batch = config.batch.model_copy(update={"tokens": rows * T * ranks, "micro_tokens": rows * T})
        if not search.predict(config.model_copy(update={"batch": batch}), name, ranks, classes).fits:
            break
        best = rows
    step = max(1, best // 8)
    for rows in range(best + step, 2 * best, step):
        batch = config.batch.model_copy(update={"tokens": rows * T * ranks, "micro_tokens": rows * T})
        if not search.predict(config.model_copy(update={"batch": batch}), name, ranks, classes).fits:
            break
        best = rows
    if not best:
        raise _nothing("batch", name)
    return f"{best} row{'s' * (best > 1)} of {T} tokens a micro-batch: batch.micro_tokens: {best * T}", {
        "micro_tokens": best * T
    }


def _values(way: Way) -> dict[str, Any]:
    assert way.setting is not None
    p = way.setting.prediction
    with_ = {k: dict(v) for k, v in way.setting.with_.items()}
    return {"method": way.method, "with": with_, "peak_bytes": p.peak_bytes, "tokens_per_s": p.tokens_per_s}


# --- the techniques of a run that names none

# For a CPU, and for models without a plan: in the ladder's order; of several options the first that can run here.
Choice = tuple[str, tuple[dict[str, Any], ...]]
ON_GPU: tuple[Choice, ...] = (
    ("amp", ({}, {"dtype": "fp16"})),
    ("fused-adamw", ({},)),
    ("attention", ({"impl": "varlen"}, {"impl": "sdpa"})),
    ("compile", ({},)),
    ("packing", ({},)),
    ("fused-loss", ({},)),
)
ON_CPU: tuple[Choice, ...] = (
    ("fused-adamw", ({},)),
    ("attention", ({"impl": "sdpa"},)),
    ("packing", ({},)),
    ("fused-loss", ({"chunk": 256},)),
)


def choose_techniques(
    config: Config, name: str = "auto", ranks: int = 1, classes: Sequence[type[Technique]] = ALL
) -> tuple[Config, str]:
    """Choose the method, techniques and micro-batch that a configuration leaves to the planner.

    The fastest set that fits and keeps the maths; on a CPU, and for a model without a plan, the listed ones, on a CPU
    in the micro-batch of `size_on_cpu`.

    Returns:
        the configuration, and a line that says what was chosen; empty: nothing was left to choose.

    Raises:
        NeedsError: nothing fits, with what does.
    """
    if not config.unplanned:
        return config, ""
    device, _ = hardware.parse_hardware(name)
    _, hf = locate(config, weights=False)
    here = name == "auto"
    if device.kind == "cpu" or native_obstacle(hf) is not None or config.model.implementation == "transformers":
        config = with_method(config.model_copy(update={"method": "full"}) if config.method == "auto" else config)
        techniques = _listed(config, ranks, device, classes, here)
        chosen = config.model_copy(update={"with_": techniques})
        if device.kind == "cpu":
            chosen = size_on_cpu(chosen, name, ranks, config.with_.keys(), classes)
        line = f"planned for {device.name}: {_line(config, chosen.with_)}"
        if chosen.batch != config.batch:
            line += f"; {chosen.batch.micro_tokens} tokens a micro-batch"
        return chosen, line
    tried = ("full", "lora", "qlora") if config.method == "auto" else (config.method or "full",)
    least: Short | None = None
    for method in tried:
        of = with_method(config.model_copy(update={"method": method}))
        fixed = isinstance(config.batch.micro_tokens, int)
        try:
            result = search.search(
                of, name, classes, keep_maths=True, ranks=ranks, whole=False, fixed=fixed, here=here, keep=of.with_
            )
        except NeedsError:
            if method == tried[0]:
                raise
            continue  # the model has no such method
        if result.settings:
            setting = result.settings[0]
            chosen = setting.over(of).model_copy(update={"method": method if config.method else None})
            fact = _fact(_way(of, name, method, result, classes))
            return chosen, f"planned for {device.name}: {_line(config, setting.with_)}; {fact}"
        least = result.least
    best = answer(config.model_copy(update={"method": None}), name, classes).best
    do = "take a smaller model, shorter rows or other hardware (optrush plan names the nearest)"
    if best is not None and best.setting is not None:
        do = f"write `method: {best.method}`" if best.method in METHODS and best.method != "full" else "write"
        do += (
            f" `with: {{{', '.join(f'{n}: {dict(o)}' if o else f'{n}: {{}}' for n, o in best.setting.with_.items())}}}`"
        )
        do += f", which takes {_fact(best)} ({best.costs})"
    asked = f"a run of {config.method or 'all weights'} on {device.name}, with the maths of its precision"
    needs = "" if least is None else f"; the smallest needs {least.text()}"
    raise NeedsError(asked, f"no set of techniques fits{needs}", do)


def size_on_cpu(
    config: Config, name: str, ranks: int, own: Container[str], classes: Sequence[type[Technique]] = ALL
) -> Config:
    """Choose the micro-batch of listed techniques on a CPU, and whether it holds all of its logits.

    Whole logits are faster there than chunks of them. Of the micro-batches that need at most `SPARE` of the memory the
    smallest that is as fast as the fastest. Where none does, or the model has no plan, the configuration stays.

    Args:
        config: with the listed techniques; a micro-batch that it gives stays.
        own: techniques that the file names, which stay.
    """
    T, given = config.batch.seq, config.batch.micro_tokens
    _, sharing = hardware.parse_hardware(name)  # ranks that its memory is already divided by
    sizes = [rows * T for rows in micro_batch_rows(max(1, config.batch.tokens // T // ranks))]
    heads = {c.name for c in classes if Part.HEAD in c.claims and c.name not in own}
    whole = {n: o for n, o in config.with_.items() if n not in heads}
    for techniques in (whole, config.with_):
        fitting: list[tuple[float, Config]] = []
        for tokens in sizes if given is None else [given]:
            batch = config.batch.model_copy(update={"micro_tokens": tokens})
            sized = config.model_copy(update={"with_": techniques, "batch": batch})
            try:
                p = search.predict(sized, name, ranks, classes)
            except UserError:  # the run itself raises it, unless it is of this size alone
                continue
            if p.room_bytes is not None and p.peak_bytes * ranks <= SPARE * p.room_bytes * sharing:
                fitting.append((p.tokens_per_s or float(batch.tokens), sized))
        if fitting:
            fastest = max(speed for speed, _ in fitting)
            return next(sized for speed, sized in fitting if speed >= fastest * (1 - CLOSE))
    return config


def _line(config: Config, techniques: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the techniques that the file does not name."""
    added = {n: o for n, o in techniques.items() if n not in config.with_}
    return " ".join(n + (":" + ",".join(f"{k}={v}" for k, v in o.items()) if o else "") for n, o in added.items())


def _listed(
    config: Config, ranks: int, device: Device, classes: Sequence[type[Technique]], here: bool
) -> dict[str, dict[str, Any]]:
    own = {name: dict(options) for name, options in config.with_.items()}
    bare = config.model_copy(update={"with_": {}, "method": None})
    share = bare.batch.model_copy(update={"micro_tokens": None})
    env = dataclasses.replace(resolve(bare.model_copy(update={"batch": share}), classes, 1, device).env, ranks=ranks)
    taken = {part for t in instantiate(classes, own) for part in t.claims}
    if ranks > 1 and Part.DATA not in taken:
        own |= {next(c.name for c in classes if Part.DATA in c.claims): {}}
    text = config.data.random is None
    techniques, _ = pick_listed(own, env, classes, here, text=text)
    return techniques


def pick_listed(
    own: Mapping[str, dict[str, Any]], env: Environment, classes: Sequence[type[Technique]], here: bool, *, text: bool
) -> tuple[dict[str, dict[str, Any]], list[tuple[str, Requirement]]]:
    """Choose listed techniques next to the given ones.

    Args:
        here: it is for this machine, whose packages and compilers count.
        text: rows hold documents of any length, not one of exactly T tokens.

    Returns:
        techniques in the ladder's order, and those left out with the reason.
    """
    known = {c.name: c for c in classes}
    taken = {part for t in instantiate(classes, own) for part in t.claims}
    chosen: dict[str, tuple[dict[str, Any], ...]] = {}
    for name, options in ON_GPU if env.device.kind == "cuda" else ON_CPU:
        if name not in known or name in own or known[name].claims & taken:
            continue
        if not text and Part.BATCH_LAYOUT in known[name].claims:
            continue
        if not text and name == "attention":  # rows of one document need no mask
            options = options[-1:]
        chosen[name] = options
    left: list[tuple[str, Requirement]] = []
    while True:
        owned = frozenset(taken.union(*(known[name].claims for name in chosen)))
        settled = dataclasses.replace(env, claimed=owned)
        first = {name: _first(known[name], options, settled, here) for name, options in chosen.items()}
        lacks = {name: need for name, need in first.items() if isinstance(need, Requirement)}
        if not lacks:
            break
        for name, need in lacks.items():
            left.append((name, need))
            del chosen[name]
    techniques = {**{name: options for name, options in first.items() if isinstance(options, dict)}, **own}
    return {c.name: techniques[c.name] for c in classes if c.name in techniques}, left


def _first(
    cls: type[Technique], options: Sequence[dict[str, Any]], env: Environment, here: bool
) -> dict[str, Any] | Requirement:
    """Return the first of these options whose needs are met, or what the last one lacks."""
    unmet: list[Requirement] = []
    for option in options:
        technique = instantiate([cls], {cls.name: option})[0]
        unmet = [n for n in technique.needs(env) if not n.met]
        compiles = type(technique).compile is not Technique.compile
        unmet += [n for n in compilers(env.device) if not n.met] if here and compiles else []
        if not unmet:
            return option
    return unmet[0]
