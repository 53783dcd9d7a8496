"""A ladder as written: its keys, and every mistake in them with file and line. Pure. What it means: ladder.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from optrush import config
from optrush.config import Keys, nearest
from optrush.errors import ConfigError

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
        data, lines = config.document(text, where)
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
