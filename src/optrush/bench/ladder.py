"""A ladder: a list of differences laid over one configuration, resolved into the runs that are measured. Pure.

YAML or a shipped name -> `find` -> Ladder (entries as written) -> `rungs` -> Rung (a resolved Run each)

    title: what the ladder compares
    repeats: 3                       # --repeats goes before it
    steps: 10                        # timed, after `warmup` more
    warmup: 3
    limit_s: 600                     # seconds one process may take
    all_but_one: true                # then the last rung without each of its techniques
    case: "{size}-full-{seq}"        # what the load is called; a rung may name its own
    longest: {from: 8192, to: 1048576, factor: 1.1}  # each rung looks for the longest row that trains
    proof: {steps: 5, documents: 4}  # the same documents in every rung
    base:
      keep: false                    # true: begin with the techniques of CONFIG
      without: []                    # ... but these
      set: {batch.seq: 2048}         # any keys of CONFIG
      with: {}
    rungs:
      - name: eager
      - name: mixed precision
        with: {amp: {}}              # adds, or gives other options
      - name: native decoder
        from: eager                  # else the rung before
        without: [amp]
        set: {model.implementation: native}
      - name: the other system         # on the load of the rung it is compared with
        from: native decoder
        peer: {trainer: {checkpointing: true}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from optrush.bench import peers
from optrush.bench.peer import Peer
from optrush.config import Config, Keys, Training, dump_config, nearest, parse_config, parse_yaml
from optrush.errors import ConfigError
from optrush.technique import Technique, instantiate
from optrush.techniques import ALL

# --- A ladder as written: its keys, and every mistake in them with file and line. Pure. What it means: ladder.py.


LOAD_KEYS = ("batch.seq", "batch.tokens", "batch.micro_tokens")
# What a rung may change: else two rungs would not learn the same, and nothing could be proved of them.
# Rungs of different shapes are only held against the first one of their own.
RUNG_KEYS = (*LOAD_KEYS, "model.implementation", "model.dtype", "model.shape")
LADDER_KEYS = ("train", "with", "output", "data.eval")  # what the ladder itself decides
WITHOUT = "without "
Options = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _printable(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("a name that can be read and printed in one line")
    return name


def _case(text: str) -> str:
    try:
        text.format(size="", seq=0)
    except (LookupError, ValueError):
        raise ValueError("a name in which {size} and {seq} may stand, and nothing else in braces") from None
    return _printable(text)


Case = Annotated[str, Field(max_length=60), AfterValidator(_case)]


class Entry(_Part):
    """A rung as written: what it changes of the rung it comes from."""

    name: Annotated[str, Field(min_length=1, max_length=60), AfterValidator(_printable)]
    from_: str | None = Field(default=None, alias="from")
    with_: dict[str, Options | None] = Field(default_factory=dict, alias="with")
    without: list[str] = []
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    case: Case | None = None
    peer: Annotated[dict[str, Options | None], Field(min_length=1, max_length=1)] | None = None


class Base(_Part):
    """What is laid over CONFIG before the first rung."""

    keep: bool = False
    without: list[str] = []  # of the techniques that `keep` keeps, if they are there
    with_: dict[str, Options | None] = Field(default_factory=dict, alias="with")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")


class Proof(_Part):
    """How the rungs are shown to learn the same: training steps on the first documents of the baseline."""

    steps: Annotated[int, Field(ge=2)] = 5  # after one step alone, no update would have shown
    documents: Annotated[int, Field(ge=1)] = 4


class Longest(_Part):
    """Rows to try: from, to, and the ratio of the shortest that failed to the longest that trained."""

    from_: Annotated[int, Field(ge=2, alias="from")]
    to: Annotated[int, Field(ge=2)]
    factor: Annotated[float, Field(gt=1)] = 1.1


class Ladder(_Part):
    """A ladder as written. `name`, `where` and `lines` say where it stands."""

    title: str
    repeats: Annotated[int, Field(ge=1)] = 3
    steps: Annotated[int, Field(ge=1)] = 10
    warmup: Annotated[int, Field(ge=0)] = 3  # 0 only for longest rows
    limit_s: Annotated[float, Field(gt=0)] = 600
    all_but_one: bool = True
    case: Case | None = None
    longest: Longest | None = None
    proof: Proof = Proof()
    base: Base = Base()
    rungs: Annotated[list[Entry], Field(min_length=1)]
    name: Annotated[str, Field(exclude=True)] = ""
    where: Annotated[str, Field(exclude=True)] = ""
    lines: Annotated[dict[Keys, int], Field(exclude=True)] = {}

    def at(self, *keys: str | int) -> str:
        """Where a value stands, for messages: file:line, or the file where nobody wrote it."""
        line = self.lines.get(keys)
        return self.where if line is None else f"{self.where}:{line}"


def parse(text: str, where: str, name: str) -> Ladder:
    """YAML text as a ladder.

    Raises:
        ConfigError: naming `where`:line, what was found and the nearest name.
    """
    try:
        data, lines = parse_yaml(text, where)
    except ConfigError as error:
        if error.asked == where:  # no mapping: what a training file begins with is no help here
            raise ConfigError(where, error.found, "begin with `title:`, `rungs:`") from None
        raise
    for key in ("name", "where", "lines"):
        if key in data:
            raise ConfigError(f"{where}:{lines[key,]}: `{key}`", "no such key", nearest(key, _fields(Ladder)))
    try:
        ladder = Ladder(**data, name=name, where=where, lines=lines)
    except ValidationError as error:
        raise _explain(error, where, lines) from None
    _check(ladder)
    return ladder


def _check(ladder: Ladder) -> None:
    """The rules between the entries of a ladder."""
    _check_peers(ladder)
    if ladder.warmup == 0 and ladder.longest is None:
        place = f"{ladder.at('warmup')}: `warmup: 0`"
        raise ConfigError(place, "the first step compiles and allocates", "take at least 1")
    if ladder.longest is not None:
        one = ladder.longest
        place = f"{ladder.at('longest')}: `longest`"
        if one.to < one.from_:
            raise ConfigError(place, f"`to: {one.to}` before `from: {one.from_}`", "give the longer row as `to`")
        parts: list[Base | Entry] = [ladder.base, *ladder.rungs]
        held = [k for part in parts for k in part.set_ if k in LOAD_KEYS]
        if held:
            raise ConfigError(place, f"`{held[0]}` is set too", "leave it out: a row of each length is tried alone")
    for key in ladder.base.set_:
        if any(key == own or key.startswith(f"{own}.") for own in LADDER_KEYS):
            place = f"{ladder.at('base', 'set', key)}: `{key}`"
            raise ConfigError(place, "the ladder decides it", "leave it out; techniques stand under `with:`")
    seen: list[str] = []
    for i, entry in enumerate(ladder.rungs):
        place = f"{ladder.at('rungs', i, 'name')}: `name: {entry.name}`"
        if entry.name in seen or entry.name.startswith(WITHOUT):
            found = (
                "a second rung of this name" if entry.name in seen else f"names with `{WITHOUT}` are the ladder's own"
            )
            raise ConfigError(place, found, "give it another name")
        if entry.from_ is not None and entry.from_ not in seen:
            place = f"{ladder.at('rungs', i, 'from')}: `from: {entry.from_}`"
            todo = nearest(entry.from_, seen) if seen else "leave it out of the first rung"
            raise ConfigError(place, "no earlier rung of this name", todo)
        for key in entry.set_:
            if key not in RUNG_KEYS:
                place = f"{ladder.at('rungs', i, 'set', key)}: `{key}`"
                raise ConfigError(place, "no key that a rung may change", nearest(key, RUNG_KEYS))
        seen.append(entry.name)


def _check_peers(ladder: Ladder) -> None:
    """What a rung of another system may say."""
    theirs: set[str] = set()
    for i, entry in enumerate(ladder.rungs):
        place = f"{ladder.at('rungs', i, 'name')}: `name: {entry.name}`"
        if entry.from_ in theirs:
            raise ConfigError(place, f"`from: {entry.from_}`, another system's rung", "begin from one of our own")
        if entry.peer is None:
            continue
        theirs.add(entry.name)
        if i == 0:
            raise ConfigError(place, "another system's as the first rung", "begin with one of our own")
        if entry.with_ or entry.without:
            do = "leave `with` and `without` out; its options stand under `peer`"
            raise ConfigError(place, "techniques for another system", do)
        if ladder.longest is not None:
            raise ConfigError(place, "another system in a ladder of longest rows", "leave one of the two out")


def _explain(error: ValidationError, where: str, lines: Mapping[Keys, int]) -> ConfigError:
    """The first mistake of many, in the house's three lines."""
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path: Keys = tuple(first["loc"])
    name = ".".join(map(str, path))
    if first["type"] == "missing":
        line = lines.get(path[:-1])
        place = f"{where}:{line}" if line and len(path) > 1 else where
        return ConfigError(f"{place}: `{name}`", "it is missing", f"add `{path[-1]}:`")
    known = path
    while known and known not in lines:  # a value inside, as pydantic counts it
        known = known[:-1]
    place = f"{where}:{lines[known]}: `{name}`"
    if first["type"] == "extra_forbidden":
        parts: dict[str | int, type[_Part]] = {"rungs": Entry, "proof": Proof, "longest": Longest}
        part = Ladder if len(path) == 1 else parts.get(path[0], Base)
        return ConfigError(place, "no such key", nearest(str(path[-1]), _fields(part)))
    return ConfigError(place, f"{first['input']!r}", first["msg"][0].lower() + first["msg"][1:])


def _fields(part: type[BaseModel]) -> list[str]:
    """The keys one may write."""
    return [
        f.alias or name
        for name, f in part.model_fields.items()
        if name not in ("name", "where", "lines") or part is Entry
    ]


OWN = "config"  # the ladder made of CONFIG's own techniques
FOLDER = Path(__file__).parent / "ladders"


@dataclass(frozen=True)
class Rung:
    """One resolved run, and which rung it is compared with."""

    name: str
    mode: Literal["cumulative", "without"]
    since: str | None
    config: Config
    changes: str
    case: str
    peer: Peer | None = None  # who trains the run instead of us


def named() -> list[str]:
    """The ladders one can ask for by name."""
    return [OWN, *sorted(path.stem for path in FOLDER.glob("*.yaml"))]


def find(name: str, config: Config) -> Ladder:
    """The ladder of a name, or of a YAML file.

    Raises:
        ConfigError: no such ladder or file, or a mistake in it, with file and line.
    """
    if name == OWN:
        return _own(config)
    shipped = FOLDER / f"{name}.yaml"
    path = shipped if name in named() else Path(name)
    if not path.is_file():
        known = [*named(), "or a YAML file"]
        raise ConfigError(f"--ladder {name}", "no ladder of that name, and no file", nearest(name, known))
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    return parse(text, f"ladder {name}" if path == shipped else str(path), path.stem)


def rungs(
    ladder: Ladder, config: Config, cumulative_only: bool, classes: Sequence[type[Technique]] = ALL
) -> list[Rung]:
    """The resolved runs: first the entries in their order, then the last one without each of its techniques.

    Raises:
        ConfigError: an unknown key or technique, or a value of the wrong kind, with file and line.
    """
    given = {k: v for k, v in config.with_.items() if ladder.base.keep and k not in ladder.base.without}
    start = config.model_copy(
        update={
            "with_": dict(given),
            "data": config.data.model_copy(update={"eval": None}),
            "train": Training(steps=ladder.warmup + ladder.steps, log_every=1),
        }
    )
    start = _laid(ladder, start, ladder.base, ("base",), classes)
    if ladder.longest is not None:
        sizes = dict.fromkeys(LOAD_KEYS, ladder.longest.from_)
        start = _laid(ladder, start, Base(set=sizes), ("longest",), classes)
    found: dict[str, Rung] = {}
    last: Rung | None = None  # of our own
    for i, entry in enumerate(ladder.rungs):
        since = entry.from_ or (last.name if last else None)
        before = found[since].config if since else start
        resolved = _laid(ladder, before, entry, ("rungs", i), classes)
        peer = _peer(ladder, entry, i)
        changes = differences(before, resolved) if since else "the baseline"
        if peer is not None:
            resolved = resolved.model_copy(update={"with_": {}})
            changes = peer.title + ("" if changes == "nothing" else f", {changes}")
        called = entry.case or ladder.case
        found[entry.name] = Rung(
            entry.name, "cumulative", since, resolved, changes,
            case(resolved) if called is None else called.format(size=size(resolved), seq=resolved.batch.seq), peer,
        )  # fmt: skip
        last = last if peer is not None else found[entry.name]
    assert last is not None, "the first rung is our own"
    if ladder.all_but_one and not cumulative_only:
        for name in (c.name for c in classes if c.name in last.config.with_):
            left = last.config.model_copy(update={"with_": {k: v for k, v in last.config.with_.items() if k != name}})
            found[WITHOUT + name] = Rung(
                WITHOUT + name, "without", last.name, left, differences(last.config, left), last.case
            )
    return list(found.values())


def differences(before: Config, after: Config) -> str:
    """What differs, for people: `+ amp`, `- bf16`, `compile: scope model -> blocks`, `batch.seq 2048 -> 4096`."""
    old, new = before.with_, after.with_
    said = [f"- {name}" for name in old if name not in new]
    for name, options in new.items():
        if name not in old:
            shown = ", ".join(f"{k}={v}" for k, v in options.items())
            said.append(f"+ {name}" + (f" ({shown})" if shown else ""))
        elif options != old[name]:
            keys = dict.fromkeys([*old[name], *options])
            pairs = [
                f"{k} {old[name].get(k, 'default')} -> {options.get(k, 'default')}"
                for k in keys
                if old[name].get(k) != options.get(k)
            ]
            said.append(f"{name}: {', '.join(pairs)}")
    one, other = flat(before), flat(after)
    said += [f"{k} {one.get(k)} -> {other.get(k)}" for k in {**one, **other} if one.get(k) != other.get(k)]
    return ", ".join(said) or "nothing"


def only_load(before: Config, after: Config) -> bool:
    """Whether two runs differ in T and in sizes of batches, and in nothing else."""
    one, other = flat(before), flat(after)
    changed = {k for k in {**one, **other} if one.get(k) != other.get(k)}
    return before.with_ == after.with_ and bool(changed) and changed <= set(LOAD_KEYS)


def flat(config: Config) -> dict[str, Any]:
    """Every value of a run but its techniques, by dotted key."""

    def walk(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= walk(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
        return found

    return walk({k: v for k, v in config.model_dump(mode="json", by_alias=True).items() if k != "with"}, "")


def case(config: Config) -> str:
    """The load, for people: which model on which data."""
    m, d = config.model, config.data
    data = "random tokens" if d.random is not None else d.sample or ", ".join(Path(o.path).name for o in d.origins)
    return f"{m.shape or Path(m.path or '').name}, {data}"


def size(config: Config) -> str:
    """The model in a case's name: 1b of llama-3.2-1b, else the whole name."""
    name = config.model.shape or Path(config.model.path or "").name
    found = re.search(r"(?<![a-z\d.])\d+(\.\d+)?[bm](?![a-z\d])", name.lower())
    return found[0] if found else name


def _own(config: Config) -> Ladder:
    """CONFIG without any technique, then its own one by one, in the order of `techniques.ALL`."""
    names = [c.name for c in ALL if c.name in config.with_]
    entries = [
        Entry(name="baseline"),
        *(Entry.model_validate({"name": n, "with": {n: config.with_[n]}}) for n in names),
    ]
    unknown = [n for n in config.with_ if n not in names]
    if unknown:
        raise ConfigError(
            f"the technique `{unknown[0]}`", "no such technique", nearest(unknown[0], [c.name for c in ALL])
        )
    return Ladder(title="The techniques of the configuration, one by one", rungs=entries, name=OWN, where="CONFIG")


def _laid(ladder: Ladder, config: Config, part: Base | Entry, keys: Keys, classes: Sequence[type[Technique]]) -> Config:
    """The run with an entry's changes laid over it, checked as if they stood in the YAML."""
    for key, value in part.set_.items():
        where = f"{ladder.at(*keys, 'set', key)}: `{key}`"
        try:
            config = parse_config(dump_config(config), "CONFIG", [f"{key}={json.dumps(value)}"])
        except ConfigError as error:
            raise ConfigError(where, error.found, error.do) from None
    techniques = dict(config.with_)
    for n, name in enumerate(part.without if isinstance(part, Entry) else []):
        if name not in techniques:
            known = ", ".join(techniques) or "nothing"
            raise ConfigError(
                f"{ladder.at(*keys, 'without', n)}: `without: {name}`", f"so far there is {known}", "leave it out"
            )
        del techniques[name]
    for name, options in part.with_.items():
        techniques[name] = options or {}
        try:
            instantiate(classes, {name: techniques[name]})
        except ConfigError as error:
            raise ConfigError(f"{ladder.at(*keys, 'with', name)}: {error.asked}", error.found, error.do) from None
    return config.model_copy(update={"with_": techniques})


def _peer(ladder: Ladder, entry: Entry, i: int) -> Peer | None:
    """The other system of an entry."""
    for name, options in (entry.peer or {}).items():
        try:
            return peers.build(name, options or {})
        except ConfigError as error:
            raise ConfigError(f"{ladder.at('rungs', i, 'peer', name)}: {error.asked}", error.found, error.do) from None
    return None


def at_length(config: Config, seq: int) -> Config:
    """The run with one row of so many tokens a step."""
    batch = config.batch.model_copy(update={"seq": seq, "tokens": seq, "micro_tokens": seq})
    return config.model_copy(update={"batch": batch})
