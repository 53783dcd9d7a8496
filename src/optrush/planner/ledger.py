"""Predict memory and work before anything is built: symbolic lines, and the rules by which techniques edit them.

`baseline.entries` builds the lines of a run without techniques; each technique's `predict` yields rules; `apply_rules`
applies them by kind (add, retype, freeze, cut, live), so that the order of techniques never matters; `peak_memory` and
`cost.step_seconds` evaluate the result for a micro-batch of a given size. A rule selects one entry by name, or all
entries with some tags and without others; a rule that matches nothing raises, so that a prediction cannot drift from
the code it predicts. Pure arithmetic, per rank.

Bytes are resolved last: a line has a role (the kind of its values), and precision sets the bytes per value of each
role. A technique that adds a line is therefore independent of the precision of the run.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from optrush.hardware import GIB

T = TypeVar("T")
Role = Literal[
    "weight", "gradient", "state", "cast", "product", "residual", "widening", "narrowing", "wide",
    "byte", "code", "nibble", "stored", "plain",
]  # fmt: skip
# Bytes per value in float32 training. cast: a weight's copy in the matmul dtype; product: a matmul's saved inputs;
# residual: the stream between blocks; widening: a float32 copy beyond the value itself; narrowing: a copy in the matmul
# dtype in addition to a float32 value; wide: float32 in any precision; code: a byte, and its share of a float32 scale
# for 256 codes; nibble: half a byte, and its share of a scale for 128; stored: a weight in another form, whose
# technique sets the width; plain: traffic of single operators, where norms stay in float32.
FLOAT32: Mapping[Role, float] = {
    "weight": 4, "gradient": 4, "state": 4, "cast": 0, "product": 4, "residual": 4, "widening": 0, "narrowing": 0,
    "wide": 4, "byte": 1, "code": 1 + 4 / 256, "nibble": 0.5 + 4 / 128, "stored": 4, "plain": 4,
}  # fmt: skip
BFLOAT16: Mapping[Role, float] = {
    **FLOAT32, "weight": 2, "gradient": 2, "state": 2, "product": 2, "residual": 2, "widening": 2, "narrowing": 2,
    "plain": 2.5,
}  # fmt: skip

# Launch time of a compiled graph's kernel, and of one of our operators, in plain operators (docs/log: one H200).
COMPILED, OURS = 2.5, 7.0
# Launch time of a collective within a block, with the hosts' waits for each other, in plain operators (fitted to
# `tensor` and `context` with compiled blocks: benchmarks/results/2xh200-gpus.jsonl; assumed equal without).
COLLECTIVE_LAUNCHES = 25.0

Live = Literal["always", "gradient", "saved", "forward", "backward", "end", "head", "update"]
"""When a line is in memory: always; from its backward pass to the update; from its forward to its backward pass; in
one block's forward or backward pass; at the end of the whole backward pass; at the head; in the update."""

ComputedIn = Literal["block", "before", "after", "throughout"]
"""When a gradient is computed: in a block's backward pass; before all of those, after them, or throughout."""

Side = Literal["", "feed", "scores"]
"""The part of a block's backward pass: feed-forward, which comes first, or attention with whole scores."""

Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")
Tag = Literal[
    "weights", "gradients", "states", "averages", "casts", "copies",
    "blocks", "embedding", "head", "norm", "adapters", "tower", "tied",
    "saved", "stream", "heads", "mlp", "experts", "delta", "mask", "scores",
    "product-input", "product-output", "attention-output", "normalised", "widened",
    "loss", "logits", "vocabulary",
    "forward", "backward", "update", "reduce", "gather",
    "products", "attention", "elementwise", "launches", "exchange",
    "fusable", "per-token", "per-block",
]  # fmt: skip
"""Labels by which rules find an entry; docs/plan.md has a table. An entry counted by tokens gets `per-token`, an entry
with a part in each block `per-block`; other tags are given explicitly."""


@dataclass(frozen=True)
class Line:
    """Bytes of one kind in the whole model: `values` x the width of `role`, once or per token."""

    name: str
    reason: str
    values: float
    role: Role
    live: Live
    per_token: bool = False  # values per token of a micro-batch; else of the model
    blocks: int = 1  # parts, one per block; 1: outside the blocks
    ends: tuple[float, float] = (1.0, 1.0)  # parts of the first and of the last block, over the mean part
    most_tokens: float = math.inf  # held at once by a chunked operator
    computed: ComputedIn = "block"  # for gradients
    side: Side = ""
    of: tuple[Tag, ...] = ()
    # set by rules
    gone: bool = False
    freed_on_update: bool = False  # a gradient that is in memory only while it is computed
    recomputed: float = 0.0  # share of the blocks that hold it only while they are recomputed
    blocks_on_device: float = math.inf  # blocks whose part is on the device; the others are on the host
    cut: Mapping[str, float] = field(default_factory=dict)  # axis -> ranks; "pp" -> all blocks over a rank's
    in_flight: float = 1.0  # micro-batches whose saved tensors the blocks hold
    gathered: float = 0  # parts of a sharded line that are whole along "dp" at a time
    gathered_in: tuple[str, ...] = ()  # beginnings of the phases in which they are whole; (): all but the update

    @property
    def tags(self) -> frozenset[str]:
        """Return the tags by which rules find it, its quoted name included."""
        return _tags(self.name, self.of, self.per_token, self.blocks > 1)

    @property
    def here(self) -> float:
        """Return the number of its blocks on this rank."""
        return self.blocks / self.cut.get("pp", 1.0)

    @property
    def bend(self) -> float:
        """Return the tokens per micro-batch, over all ranks that share its rows, beyond which the line is constant."""
        return self.most_tokens * self.cut.get("cp", 1.0)


@dataclass(frozen=True)
class WorkItem:
    """FLOP, moved bytes and launches of a device or the host, per token, micro-batch or step."""

    name: str
    reason: str
    per: Literal["token", "micro", "step"]
    flop: float = 0.0
    # Kind of the work. product8: matmuls of 8-bit values; flash2, flash4: FlashAttention of that version; masked:
    # attention with a mask; link: to other ranks by NCCL; copy: to other ranks by copy engines.
    unit: Literal["product", "product8", "attention", "flash2", "flash4", "masked", "link"] = "product"
    values: float = 0.0  # read and written in device memory
    role: Role = "byte"
    launches: float = 0.0  # the host's launch time, in operators
    reads: float = 0.0  # values that the host reads before it launches more; the device waits for it
    padding: float = 0.0  # share of the slots without a token
    waiting: float = 0.0  # share of a window in which this rank waits for others
    of: tuple[Tag, ...] = ()
    awaited: bool = False  # link: matmuls wait for it; False: they overlap
    entering: float = 0.0  # link: values that enter each host from others
    steps: float = 0.0  # link: network steps between hosts, per micro-batch or step
    # set by rules
    gone: bool = False
    times: float = 1.0

    @property
    def tags(self) -> frozenset[str]:
        """Return the tags by which rules find it, its quoted name included."""
        return _tags(self.name, self.of, self.per == "token", False)


@cache  # a few hundred entries in all sets of a search
def _tags(name: str, of: tuple[Tag, ...], per_token: bool, per_block: bool) -> frozenset[str]:
    return frozenset((f"'{name}'", *of, *["per-token"] * per_token, *["per-block"] * per_block))


def saved(name: str, reason: str, values: float, blocks: int, *of: Tag, role: Role = "product") -> Line:
    """Return the line of tensors that all blocks save per token from their forward to their backward pass."""
    side: Side = "feed" if "mlp" in of or "experts" in of else ""
    return Line(f"saved.{name}", reason, values, role, "saved", True, blocks, side=side, of=("saved", *of))


def entering(blocks: int, width: int) -> Line:
    """Return the line of the blocks' inputs, which stay in memory if a block is recomputed."""
    return Line("input", "what enters a block, D", blocks * width, "residual", "saved", True, blocks, of=("stream",))


Entry = Line | WorkItem
Kind = enum.IntEnum("Kind", "ADD RETYPE FREEZE CUT LIVE")  # kinds of rules, in order of application


def launched(way: Way, name: str, reason: str, launches: float, *of: Tag) -> WorkItem:
    """Return the work of operators that the host launches in each micro-batch's pass."""
    return WorkItem(f"{way}.{name}", reason, "micro", launches=launches, of=(way, "launches", *of))


def at_head(
    name: str, reason: str, values: float, role: Role, *of: Tag, most_tokens: float = math.inf
) -> Line:  # fmt: skip
    """Return the line of the loss's memory per token, a multiple of the vocabulary."""
    tags: tuple[Tag, ...] = ("loss", "vocabulary", *of)
    return Line(f"head.{name}", reason, values, role, "head", True, most_tokens=most_tokens, of=tags)


class Match(NamedTuple):
    """The entries that a rule changes: those with all of some tags and none of others."""

    every: frozenset[str]
    none: frozenset[str] = frozenset()

    def __str__(self) -> str:
        without = f", none of {', '.join(sorted(self.none))}" if self.none else ""
        return f"{', '.join(sorted(self.every))}{without}"


def tagged(*tags: Tag, no: Iterable[Tag] = (), but: str = "") -> Match:
    """Match the entries with all of these tags and none of `no`, except the entry of a given name."""
    return Match(frozenset(tags), frozenset((*no, *[f"'{but}'"] * bool(but))))


def _named(match: Match | str) -> Match:
    return Match(frozenset((f"'{match}'",))) if isinstance(match, str) else match


@dataclass(frozen=True)
class Rule:
    """One edit with its reason; built by `add`, `like`, `retype`, `freeze_rule`, `cut`, `live`."""

    kind: Kind
    reason: str
    match: Match | None = None
    entries: tuple[Entry, ...] = ()
    bytes_per_value: Mapping[Role, float] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


# Each matches the exact name of an entry, or `tagged`.


def add(*entries: Entry) -> Rule:
    """Add lines or work; the other kinds of rules apply to them too."""
    return Rule(Kind.ADD, "; ".join(e.reason for e in entries), entries=entries)


def like(match: Match | str, entry: Entry) -> Rule:
    """Add an entry with `entry.values` times the values of the matching lines of the baseline."""
    return Rule(Kind.ADD, entry.reason, _named(match), (entry,))


def retype(widths: Mapping[Role, float], reason: str) -> Rule:
    """Set the bytes per value, by role."""
    return Rule(Kind.RETYPE, reason, bytes_per_value=widths)


def freeze_rule(match: Match | str, reason: str, share: float = 1.0) -> Rule:
    """Remove a share of the matching gradients and states: those of frozen parameters."""
    changes = {"gone": True} if share == 1 else {"values": 1 - share}
    return Rule(Kind.FREEZE, reason, _named(match), changes=changes)


def cut(
    match: Match | str, axis: str, ranks: float, reason: str, gathered: float = 0, during: tuple[str, ...] = ()
) -> Rule:
    """Shard the matches over the ranks of an axis; of their `blocks` parts, `gathered` are whole along dp at once.

    Args:
        during: beginnings of the phases in which they are whole; (): all but the update.
    """
    changes = {"cut": {axis: ranks}, "gathered": gathered, "gathered_in": during}
    return Rule(Kind.CUT, reason, _named(match), changes=changes)


def live(match: Match | str, reason: str, /, **changes: Any) -> Rule:
    """Change fields of the matches, combined with their old values by `_EDITS`."""
    assert changes.keys() <= _EDITS.keys() - {"cut", "gathered", "gathered_in"}, changes
    return Rule(Kind.LIVE, reason, _named(match), changes=changes)


def head_gradient(why: str = "the head's gradient, summed over chunks in float32, D V", role: Role = "wide") -> Rule:
    """Return the rule that adds the head's gradient from a chunked loss."""
    return like("casts.head", Line("head.gradient", why, 1.0, role, "head", of=("loss", "vocabulary")))


# Combines the old value of a field with a rule's. Rules of one kind commute, so that their order never matters.
_EDITS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("gone", "recomputed", "freed_on_update", "gathered", "in_flight"), max),
    **dict.fromkeys(("most_tokens", "blocks_on_device"), min),
    **dict.fromkeys(("unit", "live", "role", "reason"), lambda _, new: new),
    "gathered_in": lambda old, new: new or old,
    **dict.fromkeys(("times", "values"), operator.mul),
    "cut": operator.or_,
}


@dataclass(frozen=True)
class Ledger:
    """Lines and work after all rules, with the bytes per value by role."""

    lines: tuple[Line, ...]
    work: tuple[WorkItem, ...]
    bytes_per_value: Mapping[Role, float]
    accumulation: int  # micro-batches per step
    copied: float = 0.0  # bytes on a GPU's host of the copy that is saved in the background

    def width(self, line: Line) -> float:
        """Return the bytes per value of a line."""
        return 0.0 if line.gone else self.bytes_per_value[line.role]

    @cached_property
    def in_memory(self) -> list[tuple[Line, tuple[float, ...]]]:
        """Lines with bytes, and the share of each that is in memory in each of `PHASES`."""
        return [(line, _shares(line, self.accumulation)) for line in self.lines if self.width(line) * line.values]

    @cached_property
    def forms(self) -> dict[str, tuple[float, float, dict[float, float]]]:
        """Bytes by phase: once, per token, and per token up to a number of tokens."""
        once, each = [0.0] * len(PHASES), [0.0] * len(PHASES)
        chunks: list[dict[float, float]] = [{} for _ in PHASES]
        for line, shares in self.in_memory:
            size = line_bytes(self, line, 1.0)
            most = line.bend if line.most_tokens < math.inf else math.inf
            for i, share in enumerate(shares):
                if line.gathered:
                    once[i] += _gathered(self, line, size * share, PHASES[i])
                if not share:
                    continue
                if not line.per_token:
                    once[i] += size * share
                elif most == math.inf:
                    each[i] += size * share
                else:
                    chunks[i][most] = chunks[i].get(most, 0.0) + size * share
        return {phase: (once[i], each[i], chunks[i]) for i, phase in enumerate(PHASES)}


def apply_rules(
    baseline: Sequence[Entry], widths: Mapping[Role, float], rules: Iterable[Rule], accumulation: int = 1
) -> Ledger:
    """Apply rules in the order of their kinds.

    Raises:
        ValueError: a rule matches nothing, or two contradict each other.
    """
    entries, plain = list(baseline), tuple([e.tags for e in baseline])
    changed: dict[Role, float] = {}
    ordered = sorted(rules, key=lambda r: r.kind)
    roles: set[Role] = set()
    for rule in ordered:
        if rule.kind is Kind.ADD:
            entries += _added(rule, baseline, plain)
        elif rule.kind is Kind.RETYPE:
            roles = roles or {e.role for e in entries}
            for role, width in rule.bytes_per_value.items():
                if changed.setdefault(role, width) != width:
                    raise ValueError(f"two rules give {role!r} different widths ({rule.reason})")
                if role not in roles:
                    raise ValueError(f"nothing has the role {role!r} ({rule.reason})")
    tags = tuple([e.tags for e in entries])
    edits: dict[int, dict[str, Any]] = {}  # by place: the changed fields
    for rule in ordered:
        if rule.match is not None and rule.kind is not Kind.ADD:
            places = _places(rule.match, rule.kind is Kind.FREEZE, tags)
            if not sum([_edit(rule, entries[i], edits.setdefault(i, {})) for i in places]):
                raise ValueError(f"nothing to change is {rule.match} ({rule.reason})")
    for i, fields in edits.items():
        entries[i] = replaced(entries[i], **fields)
    doubled = [name for name, n in Counter((type(e), e.name) for e in entries).items() if n > 1]
    if doubled:
        raise ValueError(f"two entries are called {doubled[0][1]!r}")
    lines = tuple(e for e in entries if isinstance(e, Line))
    work = tuple(e for e in entries if isinstance(e, WorkItem))
    return Ledger(lines, work, {**widths, **changed}, accumulation)


def replaced(value: T, **fields: Any) -> T:
    """Return a copy with these fields changed, like dataclasses.replace, in a tenth of its time."""
    copied: T = object.__new__(type(value))
    vars(copied).update(vars(value), **fields)
    return copied


def with_accumulation(ledger: Ledger, accumulation: int) -> Ledger:
    """Return the ledger of a step with `accumulation` micro-batches."""
    if (accumulation > 1) != (ledger.accumulation > 1):
        return dataclasses.replace(ledger, accumulation=accumulation)
    return replaced(ledger, accumulation=accumulation)  # the bytes are the same: keep their cache


def _added(rule: Rule, baseline: Sequence[Entry], tags: tuple[frozenset[str], ...]) -> tuple[Entry, ...]:
    if rule.match is None:
        return rule.entries
    values = sum(e.values for i in _places(rule.match, False, tags) if isinstance(e := baseline[i], Line))
    if not values:
        raise ValueError(f"no line of the baseline is {rule.match} ({rule.reason})")
    return tuple(_times(e, values) for e in rule.entries)


def _times(entry: Entry, values: float) -> Entry:
    if isinstance(entry, WorkItem):
        return replaced(entry, values=entry.values * values, entering=entry.entering * values)
    return replaced(entry, values=entry.values * values)


@cache  # shared by sets of a search with the same entries
def _places(match: Match, freezes: bool, tags: tuple[frozenset[str], ...]) -> tuple[int, ...]:
    """Return the places of the matches; for a freeze rule, only of gradients and states."""
    places = (i for i, entry_tags in enumerate(tags) if match.every <= entry_tags and match.none.isdisjoint(entry_tags))
    return tuple(i for i in places if not freezes or not tags[i].isdisjoint(("gradients", "states")))


def _edit(rule: Rule, entry: Entry, fields: dict[str, Any]) -> bool:
    """Combine a rule's changes with an entry's fields after earlier rules; return whether it has such fields."""
    known = [name for name in rule.changes if hasattr(entry, name)]  # lines and work differ in some fields
    for name in known:
        fields[name] = _EDITS[name](fields.get(name, getattr(entry, name)), rule.changes[name])
    return bool(known)


# --- evaluation


@dataclass(frozen=True)
class Item:
    """One line of memory in a report."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Peak:
    """The largest memory of a step, and the phase in which it occurs."""

    phase: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(i.bytes for i in self.items)


LAST, FIRST, SCORES = "backward, last block", "backward, first block", ", scores"
PHASES = ("forward", "head", LAST, LAST + SCORES, FIRST, FIRST + SCORES, "backward, embedding", "update")
_WORKING = {"forward": "forward", "head": "head", "update": "update", "backward, embedding": "end"}  # else: "backward"


def peak_memory(ledger: Ledger, tokens: float) -> Peak:
    """Return the phase with the most memory in a step with micro-batches of `tokens` tokens.

    Saved lines shrink and gradients grow linearly during the backward pass from the last block to the first, so that
    the maximum is at one of the two, or at the embedding. Within a block it is in the feed-forward part, or if
    attention stores whole scores, after the feed-forward part has freed its saved tensors.
    """
    worst = max(PHASES, key=lambda phase: _bytes(ledger, tokens, phase))
    items, place = [], PHASES.index(worst)
    for line, shares in ledger.in_memory:
        local = line_bytes(ledger, line, tokens) * shares[place]
        if size := round(local):
            items.append(Item(line.name, size, line.reason))
        if line.gathered and (size := round(_gathered(ledger, line, local, worst))):
            items.append(Item(f"gathered {line.name}", size, "cut over the ranks, and whole while it is used"))
    return Peak(worst, tuple(items))


def most_bytes(ledger: Ledger, tokens: float) -> float:
    """Return the bytes of the phase with the most memory: `peak_memory` without its lines."""
    return max(_bytes(ledger, tokens, phase) for phase in PHASES)


def _bytes(ledger: Ledger, tokens: float, phase: str) -> float:
    once, each, chunks = ledger.forms[phase]
    held = sum([size * min(tokens, most) for most, size in chunks.items()]) if chunks else 0
    return once + each * tokens + held


def line_bytes(ledger: Ledger, line: Line, tokens: float = 0.0) -> float:
    """Return the bytes of a line while all of it is in memory, without gathered parts."""
    count = 1.0
    if line.per_token:
        count = tokens if line.most_tokens == math.inf else min(tokens, line.bend)
    return ledger.width(line) * line.values * count / math.prod(line.cut.values())


def _gathered(ledger: Ledger, line: Line, local: float, phase: str) -> float:
    """Return the bytes of a line that are gathered in a phase, beyond this rank's `local` bytes."""
    if line.live == "gradient":
        in_use = local > 0 and phase.startswith("backward")
    else:
        in_use = phase.startswith(line.gathered_in) if line.gathered_in else phase != "update"
    if not (line.gathered and in_use):
        return 0.0
    used = min(ledger.width(line), ledger.bytes_per_value["product"])
    others = math.prod(n for axis, n in line.cut.items() if axis not in ("dp", "pp"))
    return used * line.values * min(line.gathered, line.here) / line.blocks / others


def host_bytes(ledger: Ledger, tokens: float) -> tuple[float, float]:
    """Return the bytes offloaded to the host until the backward pass, and those that stay there.

    The first cross the link twice per micro-batch, the second twice per update.
    """
    totals: dict[Live, float] = {"saved": 0.0, "always": 0.0}
    for line in ledger.lines:
        if line.live in totals and line.blocks_on_device < line.here:
            size = line_bytes(ledger, line, tokens) * (1 - line.recomputed)
            totals[line.live] += size * (1 - line.blocks_on_device / line.here)
    return totals["saved"], totals["always"]


class Short(NamedTuple):
    """The memory requirement of the smallest setting of a set that does not fit."""

    peak_bytes: int
    lacking_bytes: int = 0  # of host memory, beyond a rank's room

    @property
    def score(self) -> int:
        """Return the bytes by which sets are ranked: the device would have to hold the host's excess."""
        return self.peak_bytes + self.lacking_bytes

    def text(self) -> str:
        """Format the requirement as the end of a sentence."""
        lacking = self.lacking_bytes / GIB
        more = f", and {lacking:.1f} GiB more of host memory than a rank may have" if lacking else ""
        return f"{self.peak_bytes / GIB:.1f} GiB{more}"


def hosted_bytes(ledger: Ledger, tokens: float) -> float:
    """Return the bytes of pinned memory on a GPU's host: offloaded activations, resident data, a copy being saved."""
    return sum(host_bytes(ledger, tokens)) + ledger.copied


def with_copy(ledger: Ledger, *, cuda: bool) -> Ledger:
    """Return the ledger of a run that saves a copy: in a GPU's host memory, or on a CPU in its own memory."""
    copied = saved_bytes(ledger)
    if cuda:
        return replace(ledger, copied=copied)
    line = Line("saved copy", "of weights and states, for the thread that saves", copied, "byte", "always")
    return replace(ledger, lines=(*ledger.lines, line))


def saved_bytes(ledger: Ledger) -> float:
    """Return the bytes of this rank's part of a checkpoint: trained weights, and the states of their optimizer."""
    lines = {line.name: line for line in ledger.lines if not line.gone}
    total = 0.0
    for line in lines.values():
        learnt = lines.get(line.name.replace("weights.", "gradients.")) if "weights" in line.of else None
        if learnt is not None:  # partly frozen: only the values with a gradient
            total += line_bytes(ledger, line) * learnt.values / (line.values or 1)
        elif "states" in line.of:
            total += line_bytes(ledger, line)
    return total


def _shares(line: Line, accumulation: int) -> tuple[float, ...]:
    """Return the share of a line that is in memory in each of `PHASES`."""
    kind = (line.live, line.freed_on_update, line.computed, line.side)
    sizes = (line.blocks, line.here, line.recomputed, line.blocks_on_device, line.in_flight, line.ends)
    return _shares_of(*kind, *sizes, accumulation > 1)


@cache  # a few dozen kinds of lines in all sets of a search
def _shares_of(
    live: Live, freed_on_update: bool, computed: ComputedIn, side: Side, blocks: int, here: float, recomputed: float,
    blocks_on_device: float, in_flight: float, ends: tuple[float, float], accumulating: bool,
) -> tuple[float, ...]:  # fmt: skip
    line = Line(
        "", "", 1.0, "byte", live, blocks=blocks, computed=computed, side=side, freed_on_update=freed_on_update,
        recomputed=recomputed, blocks_on_device=blocks_on_device, in_flight=in_flight, ends=ends,
    )  # fmt: skip
    return tuple(_share(line, phase, accumulating, here) for phase in PHASES)


def _share(line: Line, phase: str, accumulating: bool, here: float) -> float:
    """Return the share of a line that is in memory in a phase; `here`: number of its blocks on this rank."""
    block = 1 / here
    scores = phase.endswith(SCORES)
    if line.live == "always":
        return min(1.0, line.blocks_on_device * block)
    if line.live == "gradient" and line.freed_on_update:
        # A gradient from before the blocks (the head's, computed with the logits) is freed when theirs begin.
        last = float(phase == "backward, embedding")
        parts: dict[ComputedIn, float] = {"block": block * (1 - last), "before": 0.0, "after": last, "throughout": 1.0}
        return parts[line.computed] if phase.startswith("backward") else 0.0
    if line.live == "gradient":
        if accumulating:  # earlier micro-batches' gradients; a second one of the embedding until it is added
            end = {"throughout": "backward", "after": "backward, embedding"}.get(line.computed)
            return 2.0 if end and phase.startswith(end) else 1.0
        late = phase in ("backward, embedding", "update")
        early = phase in ("forward", "head") or (line.computed == "after" and not late)
        return 0.0 if early else block if phase.startswith(LAST) else 1.0
    if line.live == "saved":
        backward = phase.startswith("backward")
        others = 0.0 if phase == "update" else (line.in_flight - 1) * (1 - line.recomputed)
        if phase in ("backward, embedding", "update") or (backward and line.blocks == 1):
            return others  # tensors outside the blocks were used first
        # The device holds the resident blocks, and, except at the head, one in transfer; if no block is resident, one
        # in use and one in transfer.
        near = line.blocks_on_device if phase == "head" else max(2.0, line.blocks_on_device + 1)
        saved = block if phase.startswith(FIRST) else min(1.0, near * block)
        used = block if scores and line.side == "feed" else 0.0  # the block in its backward pass
        again = block * line.ends[phase.startswith(LAST)] - used if line.recomputed and backward else 0.0
        return others + (saved - used) * (1 - line.recomputed) + again
    if line.side == ("feed" if scores else "scores"):
        return 0.0
    return float(line.live == _WORKING.get(phase, "backward"))
