"""Turn the facts of an optimizer into rules on the ledger: its states, its step, its workspace. Pure.

Only this module names the ledger's lines of an optimizer. A technique that sets one, or changes how it runs, returns an
`OptimizerSpec` (`Technique.optimizer_spec`) and writes no rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optrush.planner.ledger import Line, Live, Match, Role, Rule, WorkItem, add, like, live, replaced, tagged

# AdamW, per trained value: its moments, and the values of a weight's width read and written per step (weight and both
# moments twice, the gradient once).
MOMENTS, MOVED = 2.0, 7.0


@dataclass(frozen=True)
class States:
    """Values that an optimizer stores per trained value."""

    values: float = MOMENTS
    role: Role | None = None  # sets their bytes (planner/ledger.py); None: the run's, like AdamW's


@dataclass(frozen=True)
class OptimizerSpec:
    """Facts that determine the plan of an optimizer. The defaults are the baseline's, AdamW in a loop.

    Keys of mappings are parts of the model: "blocks", "embedding", "head", or "*" for all parameters.
    """

    reason: str  # in a few words
    # States, and where they are.
    states: Mapping[str, States] = field(default_factory=dict)  # parts without an entry have AdamW's
    resident: float | None = None  # trained values with states on the device at a time; other states are on the host
    # The step.
    loop: bool = True  # operators per parameter; False: kernels over many, without copies of whole parameters
    moved: float = MOVED  # values of a weight's width, per trained value
    work: Mapping[str, WorkItem] = field(default_factory=dict)  # further work; its `values` are per trained value
    in_backward: bool = False  # updates a parameter and frees its gradient as soon as this is computed
    # Temporary memory.
    workspace: Mapping[str, float] = field(default_factory=dict)  # float32 values during the update of that part


def optimizer_rules(spec: OptimizerSpec, *, early: bool) -> Iterator[Rule]:
    """Yield the rules that follow from an optimizer's facts.

    Args:
        early: some technique updates parameters in the backward pass.
    """
    for part, kept in spec.states.items():
        changes: dict[str, Any] = {} if kept.role is None else {"role": kept.role}
        changes |= {"reason": spec.reason, "values": kept.values / MOMENTS}
        yield live(_of("states", part), spec.reason, **changes)
    if spec.resident is not None:
        yield live(_of("states", "*"), spec.reason, blocks_on_device=0)
    if spec.resident:
        yield add(Line("paging", "states of two pieces in transit", MOMENTS * spec.resident, "state", "always"))
    if not spec.loop:
        yield live("update.loop", spec.reason, gone=True)
    if spec.moved != MOVED:
        yield live("update", spec.reason, times=spec.moved / MOVED)
    for part, item in spec.work.items():
        yield like(_of("weights", part), replaced(item, of=("update",)))
    if spec.in_backward:
        yield live(tagged("gradients"), spec.reason, freed_on_update=True)
        yield live("update.loop", "of the embedding, which is updated last", live="end")
    if spec.workspace and not early:
        yield add(Line("update.workspace", spec.reason, max(spec.workspace.values()), "wide", "update"))
    for part, values in spec.workspace.items() if early else ():
        when: Live = "backward" if part == "blocks" else "end"
        yield add(Line(f"update.workspace.{part}", spec.reason, values, "wide", when))


def _of(kind: Literal["weights", "states"], part: str) -> Match | str:
    return tagged(kind, no=("averages",)) if part == "*" else f"{kind}.{part}"
