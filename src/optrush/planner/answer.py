"""Answer a user's questions: which methods fit, how fast they are, and the nearest change if nothing fits.

A method defines the trained parameters (all weights, adapters, adapters on 8 or 4 bits). The fastest set of techniques
of each is searched, then methods are ranked: the least cost in quality comes first, unless it is tight, or another
method is more than `SLOWER` times as fast. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrush import hardware
from optrush.config import METHODS, Config, parse_scalar
from optrush.data.length_estimate import estimate_tokens
from optrush.decide import NothingFits, changed, decide, with_method, with_setting
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.hardware import GIB
from optrush.models.shapes import native_obstacle
from optrush.models.source import locate, shapes_of
from optrush.models.text_part import text_config
from optrush.planner import search
from optrush.planner.cost import TIGHT
from optrush.planner.ledger import Short
from optrush.planner.run_time import UNKNOWN, RunTime, run_time
from optrush.planner.sets import Candidate, SearchResult
from optrush.technique import RANK_PARTS, Environment, Part, Technique, instantiate, mesh_text
from optrush.techniques import ALL

HOST_GPUS = 8  # most GPUs per host in suggestions
SLOWER = 2.0
NEAR = 1.05  # speed ratio up to which a set with room for the plan's error is preferred
MUCH = 1.5  # speedup required of a set that saves memory at the cost of work, if another one fits
SHORTEST = 256  # tokens per row; shorter rows are not suggested
LONGEST = 1 << 20  # tokens per row, tried at most


@dataclass(frozen=True)
class Way:
    """A method with the fastest setting that fits."""

    method: str
    quality: tuple[str, ...]  # its costs in quality, in a few words each
    setting: Candidate | None  # None: no set fits
    least: Short | None  # requirement of the smallest set, if no set fits
    time: RunTime = UNKNOWN
    mesh: str = ""  # the ranks' axes, and the techniques that divide the run over them
    refused: str = ""  # why the model does not support the method; empty: it does

    @property
    def tight(self) -> bool:
        """Whether the free memory is smaller than the error of a prediction."""
        p = None if self.setting is None else self.setting.prediction
        return p is not None and p.filled > TIGHT

    @property
    def costs(self) -> str:
        return ", ".join(self.quality) or "all weights, no cost in quality"


@dataclass(frozen=True)
class Answer:
    """Methods, best first; the result of the configuration's own search; the smallest changes, if nothing fits."""

    ways: tuple[Way, ...]
    found: SearchResult
    nearest: tuple[str, ...] = ()
    tokens: float | None = None  # per epoch, estimated; None: unknown

    @property
    def best(self) -> Way | None:
        return next((w for w in self.ways if w.setting is not None), None)

    @property
    def least(self) -> Short | None:
        """The requirement of the smallest of the sets that do not fit."""
        return min((w.least for w in self.ways if w.least), key=lambda s: s.score, default=None)


def answer(
    config: Config, name: str = "auto", classes: Sequence[type[Technique]] = ALL, *, keep_maths: bool = False,
    nearest: bool = True,
) -> Answer:  # fmt: skip
    """Search every method that the configuration leaves open.

    Args:
        name: of the hardware, in the format of `hardware.parse_hardware`.
        keep_maths: see `sets.search_sets`.
        nearest: if nothing fits, also search the smallest changes after which something does.
    """
    first = search.search(with_method(config), name, classes, keep_maths=keep_maths, whole=nearest)
    tokens = estimate_tokens(config)
    ways: list[Way] = []
    refusals: list[NeedsError] = []
    start: Mapping[str, Mapping[str, Any]] | None = first.settings[0].with_ if first.settings else None
    for place, (method, techniques) in enumerate(methods(config, classes)):
        of = changed(config, {"with": techniques, "method": None})
        result = first
        try:
            if place or config.method == "auto" or techniques != with_method(config).with_:
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
    advice = () if ranked[0].setting is not None or not nearest else tuple(_nearest(config, name, classes, keep_maths))
    return Answer(tuple(ranked), first, advice, tokens)


def _short_of_memory(setting: Candidate, classes: Sequence[type[Technique]]) -> bool:
    """Return whether a set recomputes activations or nearly fills the memory: offloading to the host may be better."""
    again = any(Part.ACTIVATION_CHECKPOINTING in t.claims for t in instantiate(classes, setting.with_))
    return again or setting.prediction.filled > TIGHT


def _better(usual: SearchResult, scarce: SearchResult) -> SearchResult:
    """Return `scarce` if it is much faster, or equally fast with room to spare and without host memory."""
    if not usual.settings or not scarce.settings:
        return usual if usual.settings else scarce
    first, second = usual.settings[0], scarce.settings[0]
    roomy = first.prediction.filled > TIGHT >= second.prediction.filled and not second.prediction.host_bytes
    return scarce if second.speed > first.speed * MUCH or (roomy and second.speed * NEAR >= first.speed) else usual


def methods(config: Config, classes: Sequence[type[Technique]] = ALL) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return the methods that a configuration leaves open, each with its initial techniques, best quality first.

    Techniques of the file stay: its adapters, its quantised base, and every other one.
    """
    techniques = {name: dict(options) for name, options in with_method(config).with_.items()}
    parts = {part for t in instantiate(classes, techniques) for part in t.claims}
    bases = [c.name for c in classes if Part.LINEARS in c.claims and Part.TRAINED in c.wants]
    quantised = bool(techniques.keys() & bases)
    adapters = METHODS["lora"] if Part.ADAPTERS not in parts else {}
    given = next((m for m, names in METHODS.items() if names and techniques.keys() >= names.keys()), "as configured")
    given = "qlora" if techniques.keys() >= METHODS["qlora"].keys() else given
    if config.method is None and quantised and not parts & {Part.TRAINED, Part.ADAPTERS}:  # a base for adapters
        base = next(name for name in bases if name in techniques)
        return [("qlora" if base in METHODS["qlora"] else f"lora + {base}", {**techniques, **adapters})]
    if config.method in METHODS or quantised:
        return [(config.method if config.method in METHODS else given, techniques)]
    ways = [] if Part.ADAPTERS in parts else [("full", techniques)]
    ways.append(("lora" if adapters else given, {**techniques, **adapters}))
    if Part.LINEARS not in parts:
        for base in reversed(bases):  # more bits first
            name = "qlora" if base in METHODS["qlora"] else f"{'lora' if adapters else given} + {base}"
            ways.append((name, {**techniques, **adapters, base: {}}))
    return ways


def _way(
    config: Config, name: str, method: str, result: SearchResult, classes: Sequence[type[Technique]],
    tokens: float | None = None,
) -> Way:  # fmt: skip
    """Return the chosen setting of a method on hardware `name`, or the least memory if no setting fits."""
    if not result.settings:
        return Way(method, (), None, result.least)
    setting = fastest = result.settings[0]
    if method == "full":  # a set with room for the plan's error is preferred to adapters
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
    return Way(method, quality, setting, None, run_time(config, setting.prediction, tokens), mesh)


def _ranked(ways: Sequence[Way]) -> list[Way]:
    """Sort the methods: those that fit first, by least cost in quality unless it is much slower."""
    fitting = [w for w in ways if w.setting is not None]
    fastest = max((w.setting.speed for w in fitting if w.setting), default=0.0)
    quick = [w for w in fitting if w.setting and w.setting.speed * SLOWER >= fastest and not w.tight]
    return [*quick, *(w for w in fitting if w not in quick), *(w for w in ways if w.setting is None)]


# --- if nothing fits: the smallest change after which something does


def fits(
    config: Config, name: str, classes: Sequence[type[Technique]] = ALL, keep_maths: bool = False
) -> Way | None:  # fmt: skip
    """Return the best method of a configuration; None: no method fits, or the planner does not support it there."""
    if not _any_fits(config, name, classes, keep_maths):
        return None
    try:
        return answer(config, name, classes, nearest=False, keep_maths=keep_maths).best
    except UserError:
        return None


def _any_fits(config: Config, name: str, classes: Sequence[type[Technique]], keep: bool = False) -> bool:
    """Return whether a configuration fits by the supported method that needs least memory."""
    for _, with_ in reversed(methods(config, classes)):
        try:
            of = changed(config, {"with": with_, "method": None})
            return bool(search.search(of, name, classes, whole=False, scarce=not keep, keep_maths=keep).settings)
        except NeedsError:
            continue
        except UserError:
            return False
    return False


def _nearest(config: Config, name: str, classes: Sequence[type[Technique]], keep: bool = False) -> Iterator[str]:
    """Yield the smallest change each of method, step, rows, model and hardware after which something fits."""
    if keep and (way := fits(config, name, classes)):
        yield f"other maths: leave out --keep-maths ({way.method}, {_fact(way)})"
    trained = [c.name for c in classes if Part.TRAINED in c.claims | c.wants]
    freed = {n: o for n, o in config.with_.items() if n not in trained}
    other = changed(config, {"method": None, "with": freed})
    if (config.method is not None or freed != config.with_) and (way := fits(other, name, classes, keep)):
        yield f"another method: {typed(way.method)} ({_fact(way)})"
    T, tokens = config.batch.seq, config.batch.seq * hardware.parse_hardware(name)[1]
    smaller = changed(config, {"batch.tokens": tokens, "batch.micro_tokens": None})
    steps = []
    if config.method == "full" and tokens < config.batch.tokens:  # gradients need not wait for the last row
        unclipped = changed(smaller, {"optim.clip": None})
        what = f"smaller steps: --set batch.tokens={tokens}"
        steps = [(what, smaller, name), (f"{what} --set optim.clip=null", unclipped, name)]
    lengths = itertools.takewhile(lambda n: n >= SHORTEST, (T // 2**k for k in range(1, 12)))
    shorter = [(n, _rows_of(config, n)) for n in lengths]
    rows = [(f"shorter rows: --set batch.seq={n} --set batch.tokens={c.batch.tokens}", c, name) for n, c in shorter]
    models = [(f"a smaller model: {shape}", other, name) for shape, other in reversed(_family(config))]
    cards = [
        (f"other hardware: --hardware {c}", _shared(config, hardware.parse_hardware(c)[1]), c)
        for c in larger_hardware(name)
    ]
    for options in (steps, rows, models, cards):
        # If one fits, all after it are assumed to fit.
        first = bisect_left(options, True, key=lambda o: _any_fits(o[1], o[2], classes, keep))
        for what, other, card in options[first : first + 1]:
            if way := fits(other, card, classes, keep):
                yield f"{what} ({way.method}, {_fact(way)})"


def typed(method: str) -> str:
    """Return the options of a method, such as "lora + int8"."""
    name, _, technique = method.partition(" + ")
    return f"--set method={name}" + (f" --with {technique}" if technique else "")


def _fact(way: Way) -> str:
    assert way.setting is not None
    p = way.setting.prediction
    speed = "" if p.tokens_per_s is None else f", {p.tokens_per_s:,.0f} tokens/s"
    hosted = f" + {p.host_bytes / GIB:.1f} GiB of host memory" if p.host_bytes else ""
    return f"{p.peak_bytes / GIB:.1f} GiB{hosted}{speed}"


def _rows_of(config: Config, seq: int) -> Config:
    """Return the configuration with rows of `seq` tokens and about the same tokens per step."""
    tokens = max(1, config.batch.tokens // seq) * seq
    return changed(config, {"batch.seq": seq, "batch.tokens": tokens, "batch.micro_tokens": None})


def _shared(config: Config, ranks: int) -> Config:
    """Return the configuration with its rows per step rounded up to a multiple of the ranks."""
    b = config.batch
    rows = -(-(b.tokens // b.seq) // ranks) * ranks
    return changed(config, {"batch.tokens": rows * b.seq, "batch.micro_tokens": None})


def _family(config: Config) -> list[tuple[str, Config]]:
    """Return the smaller named shapes of the model's family, smallest first."""
    from optrush.models.shapes import ModelShape

    _, hf = locate(config, weights=False)
    if native_obstacle(hf) is not None:
        return []
    most = ModelShape.read(hf).parameters
    sizes = {n: ModelShape.read(s).parameters for n, s in shapes_of(hf["model_type"]).items()}
    names = sorted((n for n, size in sizes.items() if size < most and "untied" not in n), key=lambda n: sizes[n])
    return [(n, _of_shape(config, n)) for n in names]


def _of_shape(config: Config, name: str) -> Config:
    """Return the configuration with a named shape, on rows of the same length and padding."""
    tokenizer = config.model.tokenizer or "."
    return changed(config, {"model.path": None, "model.shape": name, "model.tokenizer": tokenizer})


def planned_notes(config: Config, device: hardware.Device, ranks: int) -> Iterator[str]:
    """Yield warnings: rows longer than the model's positions, options without effect, many GPUs of one host."""
    from optrush.models.shapes import ModelShape

    hf = locate(config, weights=False)[1]
    seq, text = config.batch.seq, text_config(hf)
    made = int(text.get("max_position_embeddings") or seq)
    techniques = instantiate(ALL, config.with_)
    scaled = any(type(t).config is not Technique.config for t in techniques)
    if native_obstacle(hf) is None:
        yield from (note for t in techniques for note in t.remarks(ModelShape.read(hf)))
    if seq > made and not scaled:
        yield f"rows of {seq} tokens exceed the model's {made} positions; use shorter rows, or --with rope"
    if device.hosts == 1 and device.kind == "cuda" and ranks > HOST_GPUS:
        hosts = f"2x{ranks // 2}x" if ranks % 2 == 0 else "HOSTSxGPUSx"
        yield f"assuming {ranks} GPUs in one host; for two hosts write {hosts}NAME:infiniband"


def larger_hardware(name: str) -> Iterator[str]:
    """Yield the names of hardware with more memory: more GPUs of the card if it has several, then others by memory."""
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


# --- --solve: the longest row, the largest model, the cheapest card, the batch


def solve(config: Config, name: str, what: str, classes: Sequence[type[Technique]] = ALL) -> tuple[str, dict[str, Any]]:
    """Return the answer as a sentence, and as values.

    Raises:
        ConfigError: nothing fits, or the question is unknown.
    """
    kinds = {"longest": _longest, "largest-model": _largest, "gpus": _gpus, "cheapest": _cheapest, "batch": _batch}
    if what.partition("=")[0] in LIMITS:
        return _within(config, name, classes, what)
    if what not in kinds:
        do = f"take {', '.join(kinds)}, {', '.join(LIMITS.values())}; without --solve the plan has the time of the run"
        raise ConfigError(f"--solve {what}", "no such question", do)
    return kinds[what](config, name, classes)


def _nothing(what: str, name: str) -> ConfigError:
    return ConfigError(f"--solve {what}", f"nothing fits on {name}", "optrush plan names the nearest that fits")


LIMITS = {"hours": "hours=2", "usd": "usd=5", "tokens": "tokens=1e9"}  # units of a run's limit, with an example


def _within(
    config: Config, name: str, classes: Sequence[type[Technique]], what: str
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Return the steps of a run within a limit of hours, dollars or tokens, start and end included."""
    unit, _, number = what.partition("=")
    amount, (device, ranks) = parse_scalar(number), hardware.parse_hardware(name)
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < 1e18:
        raise ConfigError(f"--solve {what}", "no number above 0", f"write {LIMITS[unit]}")
    usd_s = (hardware.price_usd_h(device) or 0.0) * ranks / 3600
    if unit == "usd" and not usd_s:
        raise ConfigError(f"--solve {what}", f"no list price of {device.name}", "divide by your own: --solve hours=N")
    epoch, limit = estimate_tokens(config), amount * 3600 if unit == "hours" else amount / usd_s if usd_s else 0.0

    def planned(steps: int) -> tuple[Way, float, float, int]:
        """Return the best method, the seconds of one step with start and end, those per further step, and the steps."""
        if (way := fits(changed(config, {"train.steps": steps}), name, classes)) is None or way.setting is None:
            raise _nothing(what, name)
        p = way.setting.prediction
        once, two = (run_time(changed(config, {"train.steps": n}), p, epoch).seconds for n in (1, 2))
        if p.step_s is None or not p.tokens_per_s or once is None or two is None:
            raise ConfigError(f"--solve {what}", f"the time of a step on {device.name} is not known", "plan without it")
        tokens = math.ceil(amount / (p.step_s * p.tokens_per_s))
        return way, once, two - once, tokens if unit == "tokens" else 1 + int(max(0.0, limit - once) / (two - once))

    way, once, more, steps = planned(planned(config.train.steps or 1000)[3])  # some sets pay only in long runs
    assert way.setting is not None
    if unit != "tokens" and limit < once:
        raise ConfigError(f"--solve {what}", f"start, one step and end take {once / 3600:.2g} hours", "take more")
    hours, p = (once + (steps - 1) * more) / 3600, way.setting.prediction
    tokens = steps * (p.step_s or 0.0) * (p.tokens_per_s or 0.0)
    text = f"--set train.steps={steps}: {tokens:,.0f} tokens in {hours:,.2g} hours"
    text += f", {hours * 3600 * usd_s:,.2f} USD" if usd_s else ""
    text += f"; {way.method}, {_fact(way)}, by {way.setting.title}"
    return text, _values(way) | {"steps": steps, "tokens": tokens, "hours": hours}


def _longest(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the longest row of one document: powers of two, then steps of an eighth of the last power."""
    _, ranks = hardware.parse_hardware(name)
    if not config.paired:
        other = {} if config.objective == "distill" else {"objective": "pretrain"}  # it takes random tokens too
        data = {"data.random": True, "data.path": None, "data.sample": None, "data.eval": None}
        config = changed(config, {**data, **other})
    _, hf = locate(config, weights=False)
    most = min(LONGEST, int(text_config(hf).get("max_position_embeddings") or LONGEST))

    def of(seq: int) -> Way | None:
        sizes = {"batch.seq": seq, "batch.tokens": seq * ranks, "batch.micro_tokens": None}
        return fits(changed(config, sizes), name, classes)

    best: tuple[int, Way] | None = None
    for power in range(8, 21):
        if 2**power > most or (way := of(2**power)) is None:
            break
        best = (2**power, way)
    if best is None:
        raise _nothing("longest", name)
    step, low = best[0] // 8, best[0]
    for seq in sorted({*range(low + step, min(2 * low, most + 1), step), *((most,) if low < most < 2 * low else ())}):
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
    if not sizes:
        found = f"no other sizes of the family {hf['model_type']!r} are listed"
        raise ConfigError("--solve largest-model", found, "plan each model: optrush plan MODEL --hardware NAME")
    for shape in sorted(sizes, key=lambda n: -sizes[n]):
        if way := fits(_of_shape(config, shape), name, classes):
            text = f"{shape}, the largest of its family that fits, rows of {config.batch.seq:,} tokens"
            return f"{text}: {way.method}, {_fact(way)}", _values(way) | {"model": shape}
    raise _nothing("largest-model", name)


def _fewest(
    config: Config, card: str, classes: Sequence[type[Technique]], host: str = ""
) -> tuple[int, Way] | None:  # fmt: skip
    """Return the fewest GPUs of a card in one host on which something fits, and the best method there.

    Args:
        host: its memory in the format of `parse_hardware`: "@64GiB".
    """
    for count in (1, 2, 4, HOST_GPUS):
        if way := fits(_shared(config, count), f"{count}x{card}{host}", classes):
            return count, way
    return None


def _gpus(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the fewest GPUs of one host that the run needs: 1, 2, 4 or 8."""
    device, _ = hardware.parse_hardware(name)
    card = next((n for n, d in hardware.NAMED.items() if d.name == device.name), None)
    if card is None:
        asked, found = f"--solve gpus on {name}", "no card that has a name here"
        raise ConfigError(asked, found, "take --hardware 4090, for instance")
    if ":" in name:
        raise ConfigError(
            f"--solve gpus on {name}", "a link between GPUs", "leave it out, then plan the answer with it"
        )
    host = "" if device.host_memory_bytes is None or name == "auto" else f"@{device.host_memory_bytes / GIB:g}GiB"
    if (best := _fewest(config, card, classes, host)) is None:
        raise _nothing("gpus", f"{HOST_GPUS}x{card}")
    count, way = best
    assert way.setting is not None
    text = f"{count} x {card}, rows of {config.batch.seq:,} tokens: {way.method}, {_fact(way)}, by {way.setting.title}"
    return text, _values(way) | {"hardware": f"{count}x{card}", "gpus": count}


def _cheapest(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the hardware with the lowest price per token, on the fewest GPUs of a card on which the run fits."""
    costs: list[tuple[float, str, float, Way]] = []
    for card, price in hardware.PRICES_USD_H.items():
        best = _fewest(changed(config, {"batch.micro_tokens": None}), card, classes)
        speed = None if best is None or best[1].setting is None else best[1].setting.prediction.tokens_per_s
        if best is not None and speed:
            text = card if best[0] == 1 else f"{best[0]}x{card}"
            costs.append((price * best[0] / speed / 3600 * 1e9, text, price * best[0], best[1]))
    if not costs:
        raise _nothing("cheapest", f"up to {HOST_GPUS} of any card of the table")
    cost, card, price, way = min(costs, key=lambda c: c[0])
    text = f"{card}, rows of {config.batch.seq:,} tokens: {way.method}, {_fact(way)}"
    text += f", about {cost:,.0f} USD per billion tokens"
    if way.time.seconds is not None:
        text += f", {way.time.seconds / 3600 * price:,.2f} USD for this run"
    text += f"; compared: {', '.join(hardware.PRICES_USD_H)}; no list price of others"
    return text, _values(way) | {"hardware": card, "usd_a_billion_tokens": cost}


def _batch(config: Config, name: str, classes: Sequence[type[Technique]]) -> tuple[str, dict[str, Any]]:
    """Search the largest micro-batch of the configuration; without `with`, of its planned techniques."""
    device, ranks = hardware.parse_hardware(name)
    by = ""
    try:
        config = decide(config, classes, ranks, device, here=name == "auto").config
    except NothingFits:  # take the plan's best set, which changes the maths
        if (way := fits(config, name, classes)) is None or way.setting is None:
            raise
        config, by = with_setting(config, way.setting), f", by {way.method}: {way.setting.title}"
    T = config.batch.seq

    def fitting(rows: int) -> bool:
        sized = changed(config, {"batch.tokens": rows * T * ranks, "batch.micro_tokens": rows * T})
        return search.predict(sized, name, ranks, classes).fits

    best = max(itertools.takewhile(fitting, (2**k for k in range(20))), default=0)
    step = max(1, best // 8)
    best = max(itertools.takewhile(fitting, range(best + step, 2 * best, step)), default=best)
    if not best:
        raise _nothing("batch", name)
    text = f"{best} row{'s' * (best > 1)} of {T} tokens a micro-batch: batch.micro_tokens: {best * T}{by}"
    return text, {"micro_tokens": best * T}


def _values(way: Way) -> dict[str, Any]:
    assert way.setting is not None
    p = way.setting.prediction
    with_ = {k: dict(v) for k, v in way.setting.with_.items()}
    return {"method": way.method, "with": with_, "peak_bytes": p.peak_bytes, "tokens_per_s": p.tokens_per_s}
