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
from typing import Any, Literal

from optrush import config
from optrush.bench import peers
from optrush.bench.peer import Peer
from optrush.bench.written import LOAD_KEYS, WITHOUT, Base, Entry, Ladder, parse
from optrush.config import Keys, Run, nearest
from optrush.errors import ConfigError
from optrush.technique import Technique, build
from optrush.techniques import ALL

OWN = "config"  # the ladder made of CONFIG's own techniques
FOLDER = Path(__file__).parent / "ladders"


@dataclass(frozen=True)
class Rung:
    """One resolved run, and which rung it is compared with."""

    name: str
    mode: Literal["cumulative", "without"]
    since: str | None
    run: Run
    changes: str
    case: str
    peer: Peer | None = None  # who trains the run instead of us


def named() -> list[str]:
    """The ladders one can ask for by name."""
    return [OWN, *sorted(path.stem for path in FOLDER.glob("*.yaml"))]


def find(name: str, run: Run) -> Ladder:
    """The ladder of a name, or of a YAML file.

    Raises:
        ConfigError: no such ladder or file, or a mistake in it, with file and line.
    """
    if name == OWN:
        return _own(run)
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


def rungs(ladder: Ladder, run: Run, cumulative_only: bool, classes: Sequence[type[Technique]] = ALL) -> list[Rung]:
    """The resolved runs: first the entries in their order, then the last one without each of its techniques.

    Raises:
        ConfigError: an unknown key or technique, or a value of the wrong kind, with file and line.
    """
    given = {k: v for k, v in run.with_.items() if ladder.base.keep and k not in ladder.base.without}
    start = run.model_copy(
        update={
            "with_": dict(given),
            "data": run.data.model_copy(update={"eval": None}),
            "train": config.Training(steps=ladder.warmup + ladder.steps, log_every=1),
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
        before = found[since].run if since else start
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
        for name in (c.name for c in classes if c.name in last.run.with_):
            left = last.run.model_copy(update={"with_": {k: v for k, v in last.run.with_.items() if k != name}})
            found[WITHOUT + name] = Rung(
                WITHOUT + name, "without", last.name, left, differences(last.run, left), last.case
            )
    return list(found.values())


def differences(before: Run, after: Run) -> str:
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


def only_load(before: Run, after: Run) -> bool:
    """Whether two runs differ in T and in sizes of batches, and in nothing else."""
    one, other = flat(before), flat(after)
    changed = {k for k in {**one, **other} if one.get(k) != other.get(k)}
    return before.with_ == after.with_ and bool(changed) and changed <= set(LOAD_KEYS)


def flat(run: Run) -> dict[str, Any]:
    """Every value of a run but its techniques, by dotted key."""

    def walk(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= walk(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
        return found

    return walk({k: v for k, v in run.model_dump(mode="json", by_alias=True).items() if k != "with"}, "")


def case(run: Run) -> str:
    """The load, for people: which model on which data."""
    m, d = run.model, run.data
    data = "random tokens" if d.random is not None else d.sample or ", ".join(Path(o.path).name for o in d.origins)
    return f"{m.shape or Path(m.path or '').name}, {data}"


def size(run: Run) -> str:
    """The model in a case's name: 1b of llama-3.2-1b, else the whole name."""
    name = run.model.shape or Path(run.model.path or "").name
    found = re.search(r"(?<![a-z\d.])\d+(\.\d+)?[bm](?![a-z\d])", name.lower())
    return found[0] if found else name


def _own(run: Run) -> Ladder:
    """CONFIG without any technique, then its own one by one, in the order of `techniques.ALL`."""
    names = [c.name for c in ALL if c.name in run.with_]
    entries = [Entry(name="baseline"), *(Entry.model_validate({"name": n, "with": {n: run.with_[n]}}) for n in names)]
    unknown = [n for n in run.with_ if n not in names]
    if unknown:
        raise ConfigError(
            f"the technique `{unknown[0]}`", "no such technique", nearest(unknown[0], [c.name for c in ALL])
        )
    return Ladder(title="The techniques of the configuration, one by one", rungs=entries, name=OWN, where="CONFIG")


def _laid(ladder: Ladder, run: Run, part: Base | Entry, keys: Keys, classes: Sequence[type[Technique]]) -> Run:
    """The run with an entry's changes laid over it, checked as if they stood in the YAML."""
    for key, value in part.set_.items():
        where = f"{ladder.at(*keys, 'set', key)}: `{key}`"
        try:
            run = config.parse(config.dump(run), "CONFIG", [f"{key}={json.dumps(value)}"])
        except ConfigError as error:
            raise ConfigError(where, error.found, error.do) from None
    techniques = dict(run.with_)
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
            build(classes, {name: techniques[name]})
        except ConfigError as error:
            raise ConfigError(f"{ladder.at(*keys, 'with', name)}: {error.asked}", error.found, error.do) from None
    return run.model_copy(update={"with_": techniques})


def _peer(ladder: Ladder, entry: Entry, i: int) -> Peer | None:
    """The other system of an entry."""
    for name, options in (entry.peer or {}).items():
        try:
            return peers.build(name, options or {})
        except ConfigError as error:
            raise ConfigError(f"{ladder.at('rungs', i, 'peer', name)}: {error.asked}", error.found, error.do) from None
    return None


def at_length(run: Run, seq: int) -> Run:
    """The run with one row of so many tokens a step."""
    batch = run.batch.model_copy(update={"seq": seq, "tokens": seq, "micro_tokens": seq})
    return run.model_copy(update={"batch": batch})
