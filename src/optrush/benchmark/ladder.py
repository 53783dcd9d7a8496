"""Read a ladder, a list of differences applied to one configuration, and resolve it into the runs to measure. Pure.

YAML or a shipped name -> `find_ladder` -> Ladder (entries as written) -> `resolve_rungs` -> Rung (one resolved run)

    title: what the ladder compares
    repeats: 3                       # --repeats overrides it
    steps: 10                        # timed, after `warmup` more
    warmup: 3
    limit_s: 600                     # time limit per process, seconds
    all_but_one: true                # then the last rung without each of its techniques
    case: "{size}-full-{seq}"        # name of the load; a rung may have its own
    longest: {from: 8192, to: 1048576, factor: 1.1}  # each rung searches for the longest row that trains
    quality: {seeds: 3, score: number, samples: 200}  # each rung is trained to its end (quality.py)
    proof: {steps: 5, documents: 4}  # the same documents in every rung
    base:
      keep: false                    # true: start with CONFIG's techniques
      without: []                    # ... except these
      set: {batch.seq: 2048}         # any keys of CONFIG
      with: {}
    rungs:
      - name: eager
      - name: mixed precision
        with: {amp: {}}              # adds a technique, or replaces its options
      - name: native decoder
        from: eager                  # default: the rung before
        without: [amp]
        set: {model.implementation: native}
      - name: two GPUs
        ranks: 2                       # processes of this and later rungs; default 1
        with: {ddp: {}}
      - name: two GPUs without NVLink
        env: {NCCL_P2P_DISABLE: "1"}   # variables of NCCL, only for this rung
      - name: the other system         # with the load of its reference rung
        from: native decoder
        peer: {trainer: {checkpointing: true}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from optrush.benchmark.peer import CHECKOUT, Peer, build_peer, find_peers
from optrush.config import (
    SECTIONS,
    Config,
    Keys,
    Optim,
    StrictModel,
    Training,
    dump_config,
    explain,
    nearest,
    parse_config,
    parse_yaml,
    yaml_keys,
)  # fmt: skip
from optrush.decide import changed, decide, refuse_sampled, with_answers, with_method
from optrush.errors import ConfigError, UserError
from optrush.files import read_text
from optrush.technique import Part, Technique, instantiate
from optrush.techniques import ALL

OWN = "config"  # the ladder of CONFIG's own techniques
SIZED = "micro-batch"  # its rung with the decided micro-batch
FOLDER = Path(__file__).parent / "ladders"
WITHOUT = "without "
LOAD_KEYS = ("batch.seq", "batch.tokens", "batch.micro_tokens")
# Rungs of whole runs can also change these, `optim.*` and the keys of the objective.
QUALITY_KEYS = ("train.epochs", "data.too_long", "data.split_turns")
# Keys that a rung can change. Other changes would change the training and make a proof impossible.
# A rung of another shape is compared only with the first rung of its shape.
RUNG_KEYS = (*LOAD_KEYS, "model.implementation", "model.dtype", "model.shape")
OPTIM_KEYS = tuple(f"optim.{name}" for name in Optim.model_fields)
LOSS_KEYS = tuple(f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields)
LADDER_KEYS = ("train", "with", "output", "data.eval")  # decided by the ladder itself
Options = dict[str, Any]


# --- a ladder as written


def _printable(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("a printable name of one line")
    return name


def _case(text: str) -> str:
    try:
        text.format(size="", seq=0)
    except (LookupError, ValueError):
        raise ValueError("a name with no other braces than {size} and {seq}") from None
    return _printable(text)


def _nccl(name: str) -> str:
    if not re.fullmatch(r"NCCL_[A-Z0-9_]+", name):
        raise ValueError("the name of an NCCL variable, for example NCCL_P2P_DISABLE")
    return name


Case = Annotated[str, Field(max_length=60), AfterValidator(_case)]


class LadderEntry(StrictModel):
    """A rung as written: its changes to its `from` rung."""

    name: Annotated[str, Field(min_length=1, max_length=60), AfterValidator(_printable)]
    from_: str | None = Field(default=None, alias="from")
    with_: dict[str, Options | None] = Field(default_factory=dict, alias="with")
    without: list[str] = Field(default_factory=list)  # techniques to remove; with `keep` they may be absent
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    ranks: Annotated[int, Field(ge=1)] | None = None
    env: dict[Annotated[str, AfterValidator(_nccl)], str] = Field(default_factory=dict)
    case: Case | None = None
    peer: Annotated[dict[str, Options | None], Field(min_length=1, max_length=1)] | None = None


class Base(StrictModel):
    """The changes to CONFIG before the first rung."""

    keep: bool = False
    without: list[str] = Field(default_factory=list)  # techniques of CONFIG to remove under `keep`, if it has them
    with_: dict[str, Options | None] = Field(default_factory=dict, alias="with")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")


class Proof(StrictModel):
    """Settings of the proof that rungs learn the same: training steps on the first documents of the baseline."""

    steps: Annotated[int, Field(ge=2)] = 5  # a single step would show no update
    documents: Annotated[int, Field(ge=1)] = 4


class Longest(StrictModel):
    """Row lengths to try: from, to, and the final ratio of the shortest failed to the longest trained one."""

    from_: Annotated[int, Field(ge=2, alias="from")]
    to: Annotated[int, Field(ge=2)]
    factor: Annotated[float, Field(gt=1)] = 1.1


class Quality(StrictModel):
    """Train each rung to its end with these seeds; score its answers to the first held-out chats."""

    seeds: Annotated[int, Field(ge=1)] = 3
    score: Literal["number"] | None = None  # compares the last numbers of answer and reference
    samples: Annotated[int, Field(ge=1)] = 200


class Ladder(StrictModel):
    """A parsed ladder file. `name`, `where` and `lines` give its origin in messages."""

    title: str
    repeats: Annotated[int, Field(ge=1)] = 3
    steps: Annotated[int, Field(ge=1)] = 10
    warmup: Annotated[int, Field(ge=0)] = 3  # 0 only for longest rows
    limit_s: Annotated[float, Field(gt=0)] = 600
    all_but_one: bool = True
    case: Case | None = None
    longest: Longest | None = None
    quality: Quality | None = None
    proof: Proof = Proof()
    base: Base = Base()
    rungs: Annotated[list[LadderEntry], Field(min_length=1)]
    name: str = Field(default="", exclude=True)
    where: str = Field(default="", exclude=True)
    lines: dict[Keys, int] = Field(default_factory=dict, exclude=True)

    def at(self, *keys: str | int) -> str:
        """Return the place of a value, for messages: file:line, or the file for a default."""
        line = self.lines.get(keys)
        return self.where if line is None else f"{self.where}:{line}"

    @property
    def times(self) -> int:
        """Return the number of processes per rung: repeats, or seeds of whole runs."""
        return self.repeats if self.quality is None else self.quality.seeds

    @cached_property
    def peers(self) -> dict[str, type[Peer]]:
        """Return the other systems by name, including those next to the ladder's file."""
        return find_peers(Path(self.where).parent)


def parse_ladder(text: str, where: str, name: str) -> Ladder:
    """Parse YAML text as a ladder.

    Raises:
        ConfigError: with `where`:line, the value found and the nearest name.
    """
    try:
        data, lines = parse_yaml(text, where)
    except ConfigError as error:
        if error.asked == where:  # not a mapping: a training file's first keys would not help
            raise ConfigError(where, error.found, "start with `title:`, `rungs:`") from None
        raise
    for key in ("name", "where", "lines"):
        if key in data:
            raise ConfigError(f"{where}:{lines[key,]}: `{key}`", "no such key", nearest(key, yaml_keys(Ladder)))
    try:
        ladder = Ladder(**data, name=name, where=where, lines=lines)
    except ValidationError as error:
        raise explain(error, where, lines, {}, Ladder) from None
    if ladder.quality is not None:
        _check_quality(ladder)
    _check_lengths(ladder)
    _check_rungs(ladder)
    return ladder


def _check_quality(ladder: Ladder) -> None:
    """Raise ConfigError for keys that are invalid in a ladder of whole runs."""
    dos = {"repeats": "write `quality: {seeds: N}`", "steps": "set `train.steps` in CONFIG or under `base.set`"}
    for key in ("repeats", "steps", "warmup", "proof", "longest", "all_but_one"):
        if key in ladder.model_fields_set:
            found = "`quality` trains whole runs: without timed steps, proofs and all-but-one rungs"
            raise ConfigError(f"{ladder.at(key)}: `{key}`", found, dos.get(key, "remove it"))


def _check_lengths(ladder: Ladder) -> None:
    """Raise ConfigError if `warmup`, `longest` or a key of `base.set` is invalid."""
    if ladder.warmup == 0 and ladder.longest is None:
        place = f"{ladder.at('warmup')}: `warmup: 0`"
        raise ConfigError(place, "the first step compiles and allocates", "use at least 1")
    if ladder.longest is not None:
        place = f"{ladder.at('longest')}: `longest`"
        if ladder.longest.to < ladder.longest.from_:
            found = f"`to: {ladder.longest.to}` before `from: {ladder.longest.from_}`"
            raise ConfigError(place, found, "give the longer row as `to`")
        parts: list[Base | LadderEntry] = [ladder.base, *ladder.rungs]
        lengths = [k for part in parts for k in part.set_ if k in LOAD_KEYS]
        if lengths:
            raise ConfigError(place, f"`{lengths[0]}` is set too", "remove it: one row of each length is tried")
    for key in ladder.base.set_:
        decided = LADDER_KEYS if ladder.quality is None else ("with", "output")
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in decided):
            place = f"{ladder.at('base', 'set', key)}: `{key}`"
            raise ConfigError(place, "the ladder decides it", "remove it; techniques go under `with:`")


def _check_rungs(ladder: Ladder) -> None:
    """Raise ConfigError if a rung's name, `from`, `set` or peer is invalid."""
    names: list[str] = []
    peers: set[str] = set()
    for i, entry in enumerate(ladder.rungs):
        place = f"{ladder.at('rungs', i, 'name')}: `name: {entry.name}`"
        if entry.name in names:
            raise ConfigError(place, "another rung has this name", "give it another name")
        if entry.name.startswith(WITHOUT):
            raise ConfigError(place, f"names with `{WITHOUT}` are reserved", "give it another name")
        if entry.from_ is not None and entry.from_ not in names:
            place = f"{ladder.at('rungs', i, 'from')}: `from: {entry.from_}`"
            do = nearest(entry.from_, names) if names else "remove it from the first rung"
            raise ConfigError(place, "no earlier rung has this name", do)
        for key in entry.set_:
            known = RUNG_KEYS if ladder.quality is None else (*RUNG_KEYS, *QUALITY_KEYS, *OPTIM_KEYS, *LOSS_KEYS)
            if key not in known:
                place = f"{ladder.at('rungs', i, 'set', key)}: `{key}`"
                raise ConfigError(place, "a rung cannot change this key", nearest(key, known))
        if entry.from_ in peers:
            raise ConfigError(place, f"`from: {entry.from_}`, another system's rung", "start from an optrush rung")
        if entry.peer is not None:
            peers.add(entry.name)
            if i == 0:
                raise ConfigError(place, "the first rung is another system's", "start with an optrush rung")
            if entry.with_ or entry.without:
                do = "remove `with` and `without`; its options go under `peer`"
                raise ConfigError(place, "techniques for another system", do)
            if ladder.longest is not None or ladder.quality is not None:
                kind = "longest rows" if ladder.quality is None else "whole runs"
                raise ConfigError(place, f"another system in a ladder of {kind}", "remove one of the two")
        names.append(entry.name)


def shipped() -> list[str]:
    """Return the names of the package's ladders."""
    return [OWN, *sorted(path.stem for path in FOLDER.glob("*.yaml"))]


def find_ladder(name: str, config: Config) -> Ladder:
    """Read the ladder of a name, or of a YAML file; in a checkout, names of files in benchmarks/ work too.

    Raises:
        ConfigError: no such ladder or file, or a mistake in it, with file and line.
    """
    if name == OWN:
        return _own(config)
    by_name = [path for folder in (FOLDER, CHECKOUT) if (path := folder / f"{name}.yaml").is_file()]
    path = by_name[0] if by_name else Path(name)
    if path.is_dir() or not path.exists():
        do = f"{nearest(name, shipped())}; or name a YAML file"
        raise ConfigError(f"--ladder {name}", "no such ladder or file", do)
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    return parse_ladder(text, f"ladder {name}" if by_name else str(path), path.stem)


def _own(config: Config) -> Ladder:
    """Return the ladder of the run's techniques, one by one in the order of `techniques.ALL`, then its micro-batch.

    Open questions of CONFIG are decided. A decided micro-batch is the last rung, because the first rungs may lack the
    memory for it; they have one row.
    """
    known = [c.name for c in ALL]
    if unknown := [n for n in config.with_ if n not in known]:
        raise ConfigError(f"the technique `{unknown[0]}`", "no such technique", nearest(unknown[0], known))
    sized = isinstance(config.batch.micro_tokens, int)
    decided = config
    try:
        decided = decide(config).config
    except UserError:
        if config.unplanned:
            raise  # else the rung is rejected, with the reason
    choosers = {c.name for c in ALL if Part.MICRO_BATCH in c.claims} - config.with_.keys()
    entries = [LadderEntry(name="baseline")]
    for name in (n for n in known if n in decided.with_ and n not in choosers):
        entries.append(LadderEntry.model_validate({"name": name, "with": {name: decided.with_[name]}}))
    micro, one_row = decided.batch.micro_tokens, {"batch.micro_tokens": config.batch.seq}
    if not sized and isinstance(micro, int) and micro > config.batch.seq:
        entries.append(LadderEntry.model_validate({"name": SIZED, "set": {"batch.micro_tokens": micro}}))
    base = Base() if sized else Base.model_validate({"set": one_row})
    return Ladder(
        title="The techniques of the configuration, one by one", base=base, rungs=entries, name=OWN, where="CONFIG"
    )


# --- a ladder as resolved configurations


@dataclass(frozen=True)
class Rung:
    """One resolved configuration, and its reference rung."""

    name: str
    mode: Literal["cumulative", "without"]
    since: str | None
    config: Config
    changes: str
    case: str
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)  # variables of its processes
    peer: Peer | None = None  # another system that trains the run


def resolve_rungs(
    ladder: Ladder, config: Config, cumulative_only: bool, classes: Sequence[type[Technique]] = ALL
) -> list[Rung]:
    """Resolve the runs: first the entries in order, then the last one without each of its techniques.

    A rung starts from the previous one, or in a ladder of whole runs from the first.

    Raises:
        ConfigError: an unknown key, technique or system, or a value of the wrong type, with file and line.
    """
    if ladder.quality is None:
        refuse_sampled(config, "a ladder of steps")
    config = with_answers(config, classes)
    kept = with_method(config).with_
    given = {k: v for k, v in kept.items() if ladder.base.keep and k not in ladder.base.without}
    length: dict[str, Any] = {"train": Training(steps=ladder.warmup + ladder.steps, log_every=1), "data.eval": None}
    if ladder.quality is not None:  # CONFIG's own length, without checkpoints
        exports = ladder.quality.score is not None
        length = {"train.save_every": None, "train.stop_after": None, "train.export": exports, "tracker": None}
    elif not config.batch.micro_tokens:
        length["batch.micro_tokens"] = config.batch.seq  # possible for every rung
    start = changed(config, {"with": given, "method": None, **length})
    start = _apply(ladder, start, ladder.base, ("base",), classes)
    if ladder.longest is not None:
        sizes = dict.fromkeys(LOAD_KEYS, ladder.longest.from_)
        start = _apply(ladder, start, Base(set=sizes), ("longest",), classes)
    resolved: dict[str, Rung] = {}
    last: Rung | None = None  # without other systems
    for i, entry in enumerate(ladder.rungs):
        since = entry.from_ or (last.name if last else None)
        if ladder.quality is not None and entry.from_ is None and i:
            since = ladder.rungs[0].name
        before = resolved[since].config if since else start
        run = _apply(ladder, before, entry, ("rungs", i), classes)
        peer = _peer(ladder, entry, i)
        ranks = entry.ranks or (resolved[since].ranks if since else 1)
        changes = changes_since(resolved[since], run, ranks, entry.env, peer) if since else "the baseline"
        if peer is not None:
            run = changed(run, {"with": {}})
        name = entry.case or ladder.case
        case = case_of(run) if name is None else name.format(size=model_size(run), seq=run.batch.seq)
        resolved[entry.name] = Rung(entry.name, "cumulative", since, run, changes, case, ranks, entry.env, peer)
        last = last if peer is not None else resolved[entry.name]
    assert last is not None, "the first rung is our own"
    if ladder.all_but_one and ladder.quality is None and not cumulative_only:
        for name in (c.name for c in classes if c.name in last.config.with_):
            others = {k: v for k, v in last.config.with_.items() if k != name}
            less = changed(last.config, {"with": others})
            changes = differences(last.config, less)
            resolved[WITHOUT + name] = Rung(
                WITHOUT + name, "without", last.name, less, changes, last.case, last.ranks, last.env
            )
    return list(resolved.values())


def changes_since(before: Rung, config: Config, ranks: int, env: Mapping[str, str], peer: Peer | None = None) -> str:
    """Describe a rung's changes from another rung: ranks, variables, techniques and sizes, or another system."""
    texts = [] if ranks == before.ranks else [f"{before.ranks} -> {ranks} ranks"]
    texts += [f"{name}={value}" for name, value in env.items()]
    if (changed := differences(before.config, config)) != "nothing":
        texts.append(changed)
    return ", ".join(texts if peer is None else [peer.title, *texts]) or "nothing"


def _apply(
    ladder: Ladder, config: Config, part: Base | LadderEntry, keys: Keys, classes: Sequence[type[Technique]]
) -> Config:
    """Return the configuration with an entry's changes, checked as if they were written in CONFIG."""
    for key, value in part.set_.items():
        try:
            config = parse_config(dump_config(config), "CONFIG", [f"{key}={json.dumps(value)}"])
        except ConfigError as error:
            raise ConfigError(f"{ladder.at(*keys, 'set', key)}: `{key}`", error.found, error.do) from None
    techniques = dict(config.with_)
    for n, name in enumerate(part.without if isinstance(part, LadderEntry) else []):
        if name not in techniques:
            if ladder.base.keep and any(c.name == name for c in classes):  # the techniques depend on CONFIG
                continue
            place = f"{ladder.at(*keys, 'without', n)}: `without: {name}`"
            raise ConfigError(place, f"so far there is {', '.join(techniques) or 'nothing'}", "remove it")
        del techniques[name]
    for name, options in part.with_.items():
        techniques[name] = options or {}
        try:
            instantiate(classes, {name: techniques[name]})
        except ConfigError as error:
            raise ConfigError(f"{ladder.at(*keys, 'with', name)}: {error.asked}", error.found, error.do) from None
    return changed(config, {"with": techniques})


def _peer(ladder: Ladder, entry: LadderEntry, i: int) -> Peer | None:
    for name, options in (entry.peer or {}).items():
        try:
            return build_peer(name, options or {}, ladder.peers)
        except ConfigError as error:
            raise ConfigError(f"{ladder.at('rungs', i, 'peer', name)}: {error.asked}", error.found, error.do) from None
    return None


def at_length(config: Config, seq: int) -> Config:
    """Return the configuration with one row of `seq` tokens per step."""
    return changed(config, {"batch.seq": seq, "batch.tokens": seq, "batch.micro_tokens": seq})


# --- differences between two configurations


def differences(before: Config, after: Config) -> str:
    """Describe the differences: `+ amp`, `- bf16`, `compile: scope model -> blocks`, `batch.seq 2048 -> 4096`."""
    old, new = before.with_, after.with_
    texts = [f"- {name}" for name in old if name not in new]
    for name, options in new.items():
        if name not in old:
            values = ", ".join(f"{k}={v}" for k, v in options.items())
            texts.append(f"+ {name}" + (f" ({values})" if values else ""))
        elif options != old[name]:
            pairs = [
                f"{k} {old[name].get(k, 'default')} -> {options.get(k, 'default')}"
                for k in dict.fromkeys([*old[name], *options])
                if old[name].get(k) != options.get(k)
            ]
            texts.append(f"{name}: {', '.join(pairs)}")
    first, second = flat_values(before), flat_values(after)
    texts += [f"{k} {first.get(k)} -> {second.get(k)}" for k in _changed(first, second)]
    return ", ".join(texts) or "nothing"


def only_load(before: Config, after: Config) -> bool:
    """Return whether two configurations differ only in T and batch sizes."""
    changed = _changed(flat_values(before), flat_values(after))
    return before.with_ == after.with_ and bool(changed) and set(changed) <= set(LOAD_KEYS)


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [k for k in {**first, **second} if first.get(k) != second.get(k)]


def flat_values(config: Config) -> dict[str, Any]:
    """Return every value of a configuration except its techniques, by dotted key."""

    def walk(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in tree.items():
            values |= walk(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
        return values

    return walk({k: v for k, v in config.model_dump(mode="json", by_alias=True).items() if k != "with"}, "")


def case_of(config: Config) -> str:
    """Return the name of the load: the model and the data."""
    m, d = config.model, config.data
    data = "random tokens" if d.random is not None else d.sample or ", ".join(Path(o.path).name for o in d.origins)
    return f"{m.shape or Path(m.path or '').name}, {data}"


def model_size(config: Config) -> str:
    """Return the model's name in a case: 1b for llama-3.2-1b, else the whole name."""
    name = config.model.shape or Path(config.model.path or "").name
    match = re.search(r"(?<![a-z\d.])\d+(\.\d+)?[bm](?![a-z\d])", name.lower())
    return match[0] if match else name
