"""Define a technique: its options, requirements, owned parts and stages. Pure, because the plan needs it.

A technique is one file with one frozen class, with its options as dataclass fields, and one line of
`techniques.ALL`. It acts before step 0 only, stage by stage, by replacing or wrapping callables and slots of the
`Trainer`. A part has one owner, the technique that claims it, so conflicts need no list.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

import optrush
from optrush.config import Config, accepted, nearest, refuse_method
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.foreign_keys import foreign_spelling
from optrush.hardware import CPU, Device
from optrush.planner.ledger import Rule, replaced
from optrush.planner.optimizer import OptimizerSpec, optimizer_rules

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from optrush.models.shapes import ModelShape
    from optrush.models.text_part import TowerSizes
    from optrush.trainer.trainer import Trainer as Trainer
else:
    Trainer = object  # techniques name it in annotations only: its module imports torch


class Part(enum.Enum):
    """Parts of a run with at most one owner each."""

    BATCH_LAYOUT = "which documents are in which row"
    PACKED_ROWS = "rows of several isolated documents"
    ROW_WIDTH = "the width of micro-batches"
    ATTENTION = "the attention kernel"
    HEAD = "the head's loss kernel"
    LINEARS = "the matmuls of the blocks' linears"
    TRAINED = "which parameters are trained"
    ADAPTERS = "adapters beside frozen weights"
    ACTIVATION_CHECKPOINTING = "what the forward pass keeps for the backward pass"
    ACTIVATION_STORAGE = "where that is kept"
    PRECISION = "the dtype of matmuls"
    WEIGHTS = "the dtype of weights"
    DATA = "the data-parallel axis"
    TP = "the tensor-parallel axis"
    CP = "the context-parallel axis"
    PP = "the pipeline axis"
    EP = "the expert-parallel axis"
    LINKS = "the form in which ranks send weights and gradients"
    MICRO_BATCH = "the size of micro-batches"
    OPTIMIZER = "the optimizer"
    STATES = "where the optimizer's states are kept"
    UPDATE = "when parameters are updated"
    COMPILED = "what is compiled"
    CAPTURE = "the recording of a whole window"
    MEMORY = "how much of the device a process may take"


class Numerics(enum.Enum):
    """The proof that a technique owes (docs/notation.md)."""

    EXACT = "equal bits with the baseline (CPU, float32, deterministic)"
    SAME_MATHS = "losses and gradients within a stated tolerance of the float32 baseline"
    DIFFERENT_MATHS = "held-out loss no worse than the baseline's within a stated margin"


# Linears of a block of our decoder; from the fifth on, those of latent attention in place of qkv.
LINEARS = ("qkv", "o", "gate_up", "down", "q", "q_a", "q_b", "kv_a", "kv_b")

# Axes of the mesh. Ranks along pp, cp and tp work on the same rows; ranks along data axes have separate rows.
SAME_ROWS = ("pp", "cp", "tp")
DATA_AXES = ("rep", "dp", "ep")
SUMMED = (*DATA_AXES, "cp")  # ranks along these have gradients of the same weights from different tokens
MESH_ORDER = ("pp", *SUMMED, "tp")  # outermost first: axes with more traffic are closer together
RANK_PARTS = frozenset({Part.DATA, Part.TP, Part.CP, Part.PP, Part.EP, Part.LINKS})  # for several ranks

# The object of each stage's changes, in the order of the stages. The first two run before the Trainer exists.
STAGES = {
    "process": "environment and allocator, before torch and the process group are started",
    "config": "the config.json dict, in place, before a model is built",
    "data": "how rows become batches",
    "model": "whole modules, on the meta device",
    "peft": "quantized bases, adapters, freezing: on the linears that `model` settled",
    "split": "which part of the model this rank holds, over axes other than the data axes, still on the meta device",
    "loss": "the head's kernel",
    "recompute": "what is not saved for the backward pass",
    "compile": "modules and kernels, compiled in place",
    "shard": "placement of `trainer.roots` over the data axis, still on the meta device",
    "optimizer": "the optimizer over `trainer.trained`, which has bytes now",
    "wrap_step": "what runs a window, and what follows it: here it is replaced",
    "wrap_window": "the finished window: here it is wrapped, whoever runs it",
}


@dataclass(frozen=True)
class LinearSpec:
    """A linear of a block: its weight's storage, its matmul, and its adapter."""

    weight: Literal["dense", "quantized"] = "dense"
    matmul: Literal["torch", "float8"] = "torch"
    adapter: Literal["none", "low-rank", "other"] = "none"
    adapter_rows: int = 0  # rows of a low-rank adapter's A


@dataclass(frozen=True)
class ModelSpec:
    """The model's blocks and the training of their weights under a run's techniques. Pure.

    Every technique edits it in `describe`, before any `needs` and `predict`; so the edits must not depend on their
    order.
    """

    grouped_heads: bool = True  # fewer key/value heads than query heads, or unknown
    attention: str = "masked"
    norm: Literal["torch", "fused"] = "torch"
    rope: Literal["torch", "fused"] = "torch"
    mlp: Literal["torch", "triton", "quack"] = "torch"
    linears: Mapping[str, LinearSpec] = dataclasses.field(default_factory=lambda: dict.fromkeys(LINEARS, LinearSpec()))
    joined: frozenset[str] = frozenset()  # linears with all pieces in one published tensor
    adapters_removable: bool = False  # the initial model can be run: `Trainer.adapters_disabled` is set
    narrow_stream: bool = False  # the residual stream has the matmul dtype
    rounding: Literal["nearest", "stochastic", "kahan"] = "nearest"  # of updated bfloat16 weights
    adds_unrounded: bool = False  # an adapter's output is added to the linear's before rounding

    def with_linears(self, names: Iterable[str] = LINEARS, **changes: Any) -> Self:
        """Return the description with these fields of these linears changed."""
        changed = {name: replaced(self.linears[name], **changes) for name in names}
        return replaced(self, linears={**self.linears, **changed})


@dataclass(frozen=True)
class Teacher:
    """The teacher model of distillation."""

    shape: ModelShape | None  # None outside our own decoder's families
    width_bytes: int  # per weight
    chunk: int  # tokens with logits in memory at once
    stored: int | None = None  # top tokens per target, read from files; None: it runs in each step

    @property
    def record_bytes(self) -> int:
        """Return the bytes of a target's stored tokens: ids, log-probabilities, and the rest's log-probability."""
        return 0 if self.stored is None else 4 * self.stored + self.width_bytes * (self.stored + 1)


@dataclass(frozen=True)
class Rollout:
    """The answers that each rank samples per step."""

    answers: int  # per step
    slots: int  # sampled at the same time
    most: int  # tokens of an answer
    room: int  # tokens per slot: prompt and answer
    mean: float  # mean tokens of a prompt and an answer of `most`
    served: bool = False  # by another program, without memory of this device
    narrow: int = 0  # slots if matmuls, keys and values have 16 bits


class RowImages(NamedTuple):
    """The estimated images of rows, and their vision tower."""

    tower: TowerSizes
    part: Literal["none", "projector", "tower"]  # the trained part
    patches: float  # per token of a row
    mean: float  # patches of an image
    largest: float

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return {"none": 0, "projector": self.tower.projector, "tower": self.tower.parameters}[self.part]


@dataclass(frozen=True)
class Environment:
    """The inputs of techniques before anything is built: owners and sizes, never names of techniques."""

    device: Device
    ranks: int
    seq: int  # T
    rows: int  # rows of one step over all ranks
    micro_rows: int  # B, rows of one micro-batch of one rank
    clip: float | None
    dtype: str  # configured dtype of the weights: "float32" or "bfloat16"
    native: bool  # our decoder, or the wrapper around a transformers model
    blocks: int  # L
    claimed: frozenset[Part] = frozenset()
    vocab: int = 0  # V; 0: unknown
    shape: ModelShape | None = None  # for our own decoder
    sdpa_obstacle: str | None = None  # why a model through transformers cannot run sdpa
    paired: bool = False  # the objective compares pairs: rows of two documents, losses token by token
    by_token: bool = False  # per-token losses: pairs, sampled answers, or a user's loss
    teacher: Teacher | None = None  # for distillation
    rollout: Rollout | None = None  # for objectives with sampled answers
    images: RowImages | None = None  # for rows with images
    mutual: bool = False  # bidirectional attention between an image's placeholders
    scored: bool = False  # the head outputs a score in place of next tokens
    reference: str | None = None  # source of the reference model
    spec: ModelSpec = ModelSpec()
    scarce: bool = False  # no set without last-resort techniques fits
    reach: float = 1.0  # mean of document length / T per token, estimated by the plan
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # ranks per axis; "dp" has the rest
    sharded: frozenset[str] = frozenset()  # axes over which matrices are sharded
    pp_rank: int = 0  # the predicted rank along "pp"
    copies_saved: bool = False  # saves copy first and write during training

    # Requirements shared by several techniques.

    def needs_gpu(self, technique: str, capability: tuple[int, int] = (0, 0)) -> Requirement:
        """Return the requirement of a CUDA device of at least this compute capability."""
        found = "a CPU only" if self.device.kind == CPU.kind else f"{self.device.name}, {self.device.capability}"
        wanted = f"a CUDA device of capability {capability[0]}.{capability[1]}" if any(capability) else "a CUDA device"
        met = self.device.kind == "cuda" and self.device.capability >= capability
        return Requirement(met, f"`{technique}` needs {wanted}", found, "use such a device, or turn the technique off")

    def needs_half(self, asked: str, instead: str = "") -> Requirement:
        """Return the requirement of 16-bit matmuls."""
        met = self.dtype == "bfloat16" or Part.PRECISION in self.claimed
        do = "add --with amp or --with bf16" + (f", or {instead}" if instead else "")
        return Requirement(met, asked, "weights and matmuls in float32", do)

    def needs_capability(self, capability: tuple[int, int], asked: str, do: str) -> Requirement:
        """Return the requirement of at least this compute capability, if the device is a GPU."""
        met = self.device.kind != "cuda" or self.device.capability >= capability
        return Requirement(met, asked, f"{self.device.name}, capability {self.device.capability}", do)

    def needs_no_kahan(self, technique: str) -> Requirement:
        """Return the requirement of an optimizer that stores no remainders."""
        found = "Kahan rounding, which keeps each weight's rounding error"
        do = "use --with bf16:rounding=stochastic, or --with fused-adamw"
        return Requirement(self.spec.rounding != "kahan", f"`{technique}` has no place for remainders", found, do)

    def needs_whole_rows(self, technique: str) -> Requirement:
        """Return the requirement that trained matrices are not sharded by columns."""
        met = "tp" not in self.sharded or Part.ADAPTERS in self.claimed  # adapters are whole on every rank
        asked, found = f"`{technique}` keeps states of whole rows", "a technique that also shards matrices by columns"
        return Requirement(met, asked, found, "use --with fused-adamw instead, or turn tensor off")

    def needs_dense(self, asked: str, *, or_experts: bool = False) -> Requirement:
        """Return the requirement of plain blocks: dense, with standard attention."""
        other = None
        if self.shape is not None:
            other = self.shape.other_attention if or_experts else self.shape.other_blocks
        found, do = f"a model with {other}, whose matrices it does not support", "turn it off, or use a dense model"
        return Requirement(other is None, asked, found, do if other == "experts" else "turn it off")

    def needs_own_matrices(self, technique: str, whose: str) -> Iterator[Requirement]:
        """Yield the requirements of an optimizer that steps whole matrices of the model itself."""
        asked, do = f"`{technique}` updates {whose} own matrices", "use --with fused-adamw or --with adam8bit instead"
        found = "a technique that freezes them and trains others instead"
        yield Requirement(Part.ADAPTERS not in self.claimed, asked, found, do)
        asked, found = f"`{technique}` makes its states where the weights are", "a technique that keeps them elsewhere"
        yield Requirement(Part.STATES not in self.claimed, asked, found, do)

    def needs_mesh(self, technique: str, asked: str) -> Requirement:
        """Return the requirement that the axes of the mesh divide the ranks."""
        many = math.prod(self.axes.values())
        found = "one rank" if self.ranks == 1 else f"{self.ranks} ranks, in a mesh of {mesh_text(self.axes)}"
        do = f"start it with --ranks {many} or torchrun, or turn {technique} off"
        return Requirement(self.ranks % many == 0, asked, found, do)

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks, or groups of ranks, with separate rows."""
        return self.ranks // math.prod(n for axis, n in self.axes.items() if axis in SAME_ROWS)

    @property
    def gradient_ranks(self) -> int:
        """Return the number of ranks with gradients of the same weights from different tokens."""
        return self.data_ranks * self.axes.get("cp", 1)

    @property
    def expert_axis(self) -> str:
        """Return the axis over which experts are sharded; empty: none."""
        return "" if Part.EP not in self.claimed else "ep" if "ep" in self.axes else "cp"

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks that share the experts of a layer."""
        return self.axes.get(self.expert_axis, 1)

    @property
    def blocks_held(self) -> float:
        """Return a rank's fraction of the blocks' parameters before data sharding (along ep, of experts)."""
        s = self.shape
        if s is None:
            return 1.0
        return 1 - s.expert_parameters / s.block_parameters * (1 - 1 / self.expert_ranks)

    @property
    def blocks_alone(self) -> float:
        """Return the fraction of `blocks_held` that is on this rank only, which data sharding does not shard.

        Not under autocast: it casts gathered weights.
        """
        s, ep = self.shape, self.expert_ranks
        cast = Part.PRECISION in self.claimed and Part.WEIGHTS not in self.claimed
        if s is None or cast or ep == 1 or ep != self.gradient_ranks:
            return 0.0
        return s.expert_parameters / ep / (s.block_parameters * self.blocks_held)

    @property
    def slots(self) -> int:
        """Return the tokens of a micro-batch that one rank computes."""
        return self.micro_rows * self.seq // self.axes.get("cp", 1)

    @property
    def mesh(self) -> dict[str, int]:
        """Return the ranks of each axis that has several, outermost first."""
        sizes = {"dp": self.ranks // math.prod(self.axes.values()), **self.axes}
        return {axis: sizes[axis] for axis in MESH_ORDER if sizes.get(axis, 1) > 1}

    @property
    def shared_row_sizes(self) -> list[int]:
        """Return the number of a host's ranks that may share rows in a search: none unless needed."""
        each = self.ranks // self.device.hosts
        needed = self.scarce or self.rows % self.data_ranks > 0
        return [n for n in range(2, each + 1) if each % n == 0] if needed else []

    def over_hosts(self, *axes: str) -> tuple[int, float]:
        """Return the number of hosts that a group of ranks along these axes spans, and the traffic into each host.

        The traffic is that of all groups with ranks in the host, as a multiple of one group's data.
        """
        if self.device.hosts == 1:
            return 1, 0.0
        return _over_hosts(tuple(self.mesh.items()), self.ranks // self.device.hosts, axes)

    @property
    def alone(self) -> str:
        """Return the error's `found` for a technique that needs several data ranks."""
        return "one rank" if self.ranks == 1 else f"one group of {self.ranks} ranks (mesh: {mesh_text(self.axes)})"

    @property
    def accumulation(self) -> int:
        return self.rows // (self.micro_rows * self.data_ranks)

    @property
    def fewer_rows(self) -> int | None:
        """Return the next smaller micro-batch: at most half the rows, dividing a rank's rows per step; else None."""
        share = self.rows // self.data_ranks
        return max((n for n in range(1, self.micro_rows // 2 + 1) if share % n == 0), default=None)

    @property
    def filled(self) -> float:
        """Return the fraction of a step's rows that is computed: for packed sampled answers, the filled ones."""
        if self.rollout is None or not {Part.BATCH_LAYOUT, Part.PACKED_ROWS} <= self.claimed:
            return 1.0
        return min(1.0, self.rollout.mean / self.seq)

    @property
    def span(self) -> float:
        """Return the attended tokens per row with document separation: T, or fewer with packed rows."""
        fixed = Part.ROW_WIDTH not in self.claimed or Part.COMPILED in self.claimed  # all rows have T slots
        packed = {Part.BATCH_LAYOUT, Part.PACKED_ROWS} <= self.claimed and fixed
        return self.seq * (self.reach if packed else 1.0)


@cache  # shared by all sets of a search
def _over_hosts(mesh: tuple[tuple[str, int], ...], each: int, axes: tuple[str, ...]) -> tuple[int, float]:
    stride, group = 1, [0]
    for axis, n in reversed(mesh):  # the innermost axis has neighboring ranks
        if axis in axes:
            group = [rank + place * stride for place in range(n) for rank in group]
        stride *= n
    hosts = len({rank // each for rank in group})
    groups = each * hosts / len(group)  # groups with ranks in one host
    return hosts, (hosts - 1) / hosts * groups


@dataclass(frozen=True)
class Requirement:
    """A condition, the fact found and the fix. If `met` is False, nothing is run and nothing written."""

    met: bool
    asked: str
    found: str
    do: str


@dataclass(frozen=True)
class Edit:
    """The number of changes made by one technique in one stage."""

    stage: str
    technique: str
    count: int
    options: str = ""

    @classmethod
    def of(cls, stage: str, technique: Technique, count: int) -> Edit:
        """Includes active options, defaults among them, and options that were turned off."""
        default = partial(getattr, type(technique))
        chosen = (f"{name}={value}" for name, value in vars(technique).items() if value or value != default(name, None))
        return cls(stage, technique.name, count, ", ".join(chosen))

    def __str__(self) -> str:
        options = f" ({self.options})" if self.options else ""
        return f"{self.stage:<10} {self.technique}{options}: {self.count} change{'s' * (self.count != 1)}"


class Technique:
    """Base of every technique. Subclasses are frozen dataclasses; a stage returns its number of changes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    numerics: ClassVar[Numerics]
    proof: ClassVar[str]  # the test of its numerics; default: named like its module
    verified_on: ClassVar[tuple[str, ...]] = ("cpu", "gpu")  # ("cpu",) if no test in tests/gpu covers it
    claims: ClassVar[frozenset[Part]] = frozenset()
    wants: ClassVar[frozenset[Part]] = frozenset()
    shards: ClassVar[frozenset[str]] = frozenset()  # mesh axes over which it shards matrices
    searched: ClassVar[bool] = True  # False: the user decides, and a search neither adds nor removes the technique
    last_resort: ClassVar[bool] = False  # a search tries it only if nothing else fits
    draws: ClassVar[bool] = False  # uses random values that depend on the row layout
    averages: ClassVar[bool] = False  # an export writes averages of the parameters
    splits_base: bool = False  # freezes changed weights: a rebuilt model needs `init` again
    sample: ClassVar[Mapping[str, Any]] = {}  # options for a description, if the defaults are rejected

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "proof"):
            cls.proof = f"tests/techniques/test_{cls.__module__.rpartition('.')[2]}.py"

    def axes(self) -> Mapping[str, int]:
        """Return the ranks of each mesh axis that these options add; "dp" has the remaining ranks."""
        return {}

    def describe(self, spec: ModelSpec) -> ModelSpec:
        """Return the model's description with this technique's changes."""
        return spec

    def needs(self, env: Environment) -> Iterator[Requirement]:
        """Yield conditions, each with the fact found and the fix. May not import torch."""
        yield from ()

    def card(self, device: Device) -> Device:
        """Return the device as limited for the run and the plan."""
        return device

    def optimizer_spec(self, env: Environment) -> OptimizerSpec | None:
        """Return the plan's facts about this technique's optimizer, or about where and when it steps."""
        return None

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield rules on the ledger's lines and work, each with its reason. May not import torch.

        Here: the rules that follow from `optimizer_spec`.
        """
        if (spec := self.optimizer_spec(env)) is not None:
            yield from optimizer_rules(spec, early=Part.UPDATE in env.claimed)

    def compile_s(self, env: Environment) -> float:
        """Return its compile time in a first start, in seconds; later starts use the cache."""
        return 0.0

    def quality(self, env: Environment) -> str:
        """Return its cost in quality as text; empty: none."""
        return ""

    def remarks(self, shape: ModelShape) -> Iterator[str]:
        """Yield notes on options without effect for this model."""
        yield from ()

    def packages(self) -> tuple[tuple[str, str], ...]:
        """Return (distribution, extra of optrush that installs it) for each package that these options use."""
        return ()

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        """Yield options that a search should try on this device: the defaults, unless others can be faster."""
        if cls.searched or (cls.last_resort and env.scarce):
            yield {}

    # The stages: each returns its number of changes.

    def process(self, env: Environment) -> int:
        return 0

    def config(self, hf: dict[str, Any]) -> int:
        return 0

    def _unchanged(self, trainer: Trainer) -> int:
        return 0

    data = model = peft = split = loss = recompute = compile = shard = optimizer = wrap_step = wrap_window = _unchanged

    # Helpers for the stages of several techniques.

    def demand_triton(self, device: Device, asked: str = "") -> None:
        """Raise NeedsError if this machine cannot build our Triton kernels for a CUDA device; a CPU needs none."""
        asked = f"`{asked or self.name}` runs a Triton kernel"
        if device.kind == "cuda" and library("triton") is None:
            raise NeedsError(asked, "triton is not installed", "python -m pip install triton")
        if device.kind == "cuda" and installed(os.environ.get("CC"), *CC) is None:
            raise NeedsError(asked, f"no C compiler: none of {', '.join(CC)}", "install gcc")

    def set_optimizer(self, trainer: Trainer, optimizer: Callable[..., Any], **options: Any) -> int:
        """Build the optimizer over `trainer.trained`, with its states in place; return the number of changes, 1."""
        options |= {"optim": trainer.config.optim, "rounding": trainer.rounding, "seed": trainer.config.seed}
        trainer.optimizer = trainer.optimizer_factory(trainer.trained, partial(optimizer, **options))
        return 1


def instantiate(classes: Sequence[type[Technique]], wanted: Mapping[str, Mapping[str, Any]]) -> list[Technique]:
    """Return the techniques of a configuration in the order of the ladder, their options checked.

    Raises:
        ConfigError: an unknown technique or option, or a value of the wrong type.
    """
    known = {c.name: c for c in classes}
    for name in wanted:
        refuse_method(name, f"the technique `{name}`")
        if name not in known:
            hint = foreign_spelling(name, True) or nearest(name, known)
            raise ConfigError(f"the technique `{name}`", "no such technique", hint)
    return [_instance(c, wanted[c.name]) for c in classes if c.name in wanted]


def _instance(cls: type[Technique], options: Mapping[str, Any]) -> Technique:
    """Return a technique with checked options; raise ConfigError for an unknown option or an invalid value."""
    from pydantic import ValidationError

    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for option in options:
        if option not in fields:
            todo = nearest(option, fields) if fields else f"`{cls.name}` takes no options"
            if todo.startswith("known"):
                types = get_type_hints(cls)
                todo = "known: " + ", ".join(name + _values(types[name]) for name in sorted(fields))
            raise ConfigError(f"`{cls.name}: {option}`", "no such option", todo)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}  # YAML has lists
    for option, value in options.items():
        try:
            _validator(cls, option).validate_python(value, strict=True)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError(f"`{cls.name}: {option}`", f"{value!r}", accepted(error.errors())) from None
    return cls(**options)


def _values(annotation: Any) -> str:
    """Return the allowed values of an option, if listed."""
    given = [
        value for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal for value in get_args(part)
    ]
    return f" ({', '.join(map(str, given))})" if given else ""


@cache  # a search makes the same few hundred options for each model and card
def _validator(cls: type[Technique], option: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(get_type_hints(cls, include_extras=True)[option])


def settle(techniques: Sequence[Technique], env: Environment, classes: Sequence[type[Technique]] = ()) -> Environment:
    """Check claims, wants and needs; return the environment with its owners and model.

    Args:
        classes: techniques to suggest.

    Raises:
        ConflictError: two techniques claim one part.
        NeedsError: a part that a technique wants has no owner, a requirement is not met, or the ranks do not divide by
            the axes.
    """
    owners: dict[Part, str] = {}
    for t in techniques:
        for part in sorted(t.claims, key=lambda p: p.name):
            if part in owners:
                do = f"turn one off: --without {owners[part]} or --without {t.name}"
                raise ConflictError(f"`{owners[part]}` with `{t.name}`", f"both own {part.value}", do)
            owners[part] = t.name
    spec = _described(tuple(techniques), env.spec.grouped_heads, env.shape.joined if env.shape else frozenset())
    claimed = frozenset(owners) | ({Part.PACKED_ROWS} if env.paired else set())
    if env.paired and env.shape is not None and not env.shape.separates:
        raise NeedsError("rows of pairs", f"{env.shape.family} models let packed documents mix", "use objective: sft")
    axes, sharded = mesh_axes(techniques, env.ranks), frozenset(axis for t in techniques for axis in t.shards)
    if (rollout := env.rollout) is not None and Part.PRECISION in claimed:
        rollout = replaced(rollout, slots=rollout.narrow)
    env = replaced(env, claimed=claimed, spec=spec, axes=axes, sharded=sharded, rollout=rollout)
    for t in techniques:
        for part in t.wants - env.claimed:
            able = " or ".join(f"--with {c.name}" for c in classes if part in c.claims)
            do = f"add {able}" if able else "add a technique that sets it"
            raise NeedsError(f"`{t.name}`", f"no technique sets {part.value}", do)
        refuse_unmet(t.needs(env))
    if env.images is not None and (parts := parts_without_images(env.claimed)):
        found = f"a technique that owns {parts[0].value}"
        raise NeedsError("to train on rows with images", found, f"turn it off: --without {owners[parts[0]]}")
    device = env.device
    for t in techniques:
        device = t.card(device)
    if device is not env.device:
        env = replaced(env, device=device)
    if env.gradient_ranks > 1 and Part.DATA not in env.claimed:
        raise NeedsError(
            f"{env.ranks} ranks", "no technique shares the work between them", "add --with ddp or --with fsdp"
        )
    return env


@lru_cache(4096)  # a search reuses each set for several cards and micro-batches
def _described(techniques: tuple[Technique, ...], grouped_heads: bool, joined: frozenset[str]) -> ModelSpec:
    spec = ModelSpec(grouped_heads, joined=joined)
    for t in techniques:
        spec = t.describe(spec)
    return spec


def parts_without_images(claimed: Collection[Part]) -> list[Part]:
    """Return the claimed parts that do not support rows with images: model sharding, or recording."""
    wrong = {Part.CAPTURE} | (RANK_PARTS - {Part.DATA})
    wrong |= {Part.DATA} if {Part.DATA, Part.STATES} <= {*claimed} else set()  # a separate engine
    return [part for part in Part if part in claimed and part in wrong]


def mesh_axes(techniques: Sequence[Technique], ranks: int) -> dict[str, int]:
    """Return the ranks of each mesh axis added by techniques, without axes of one rank.

    Raises:
        NeedsError: the ranks do not divide by them.
    """
    axes = {axis: n for t in techniques for axis, n in t.axes().items() if n > 1}
    many = math.prod(axes.values())
    if ranks % many:
        names = ", ".join(f"`{t.name}`" for t in techniques if t.axes())
        do = f"start it with --ranks {many}, or a multiple of that"
        raise NeedsError(f"{names}: a mesh of {mesh_text(axes)}", "one rank" if ranks == 1 else f"{ranks} ranks", do)
    return axes


def mesh_text(axes: Mapping[str, int]) -> str:
    """Format axes, such as `tp 2 x rep 2`."""
    return " x ".join(f"{axis} {n}" for axis, n in axes.items())


def unmet(techniques: Sequence[Technique], env: Environment) -> Iterator[Requirement]:
    """Return the unmet requirements of techniques, in order."""
    return (need for t in techniques for need in t.needs(env) if not need.met)


def refuse_unmet(needs: Iterable[Requirement]) -> None:
    """Raise NeedsError for the first requirement that is not met."""
    for need in needs:
        if not need.met:
            raise NeedsError(need.asked, need.found, need.do)


def in_order(techniques: Sequence[Technique]) -> list[Technique]:
    """Return the order within a stage: owners of parts first, then the ladder's order."""
    return sorted(techniques, key=lambda t: not t.claims)


def rows_of_batch(config: Config, ranks: int, each: int = 1) -> tuple[int, int]:
    """Return (rows per step over all ranks, rows per micro-batch; for `auto` the least, 1).

    Args:
        ranks: ranks with separate rows.
        each: ranks that share one rank's rows.

    Raises:
        ConfigError: micro_tokens is not a multiple of T, or tokens not one of micro_tokens x ranks.
    """
    b = config.batch
    micro = b.micro_tokens if isinstance(b.micro_tokens, int) else b.seq
    if micro % b.seq:
        below = max(b.seq, micro // b.seq * b.seq)
        raise ConfigError(
            f"`batch.micro_tokens: {micro}`", f"not a multiple of `batch.seq: {b.seq}`", f"set it to {below}"
        )
    if b.tokens % (micro * ranks):
        who = "rank" if each == 1 else f"group of {each} ranks" if ranks == 1 else f"groups of {each} rank"
        near = max(1, round(b.tokens / (micro * ranks))) * micro * ranks
        raise ConfigError(
            f"`batch.tokens: {b.tokens}`",
            f"not divisible by {micro} slots of a micro-batch x {ranks} {who}{'s' * (ranks > 1)}",
            f"set it to {near}, or change `batch.micro_tokens`",
        )
    return b.tokens // b.seq, micro // b.seq


def library(name: str) -> str | None:
    """Return the version of an installed distribution, or None, without importing it."""
    return _version(name, metadata.version)


@cache  # a search asks hundreds of times, and a distribution's metadata is a file
def _version(name: str, read: Callable[[str], str]) -> str | None:
    try:
        return read(name)
    except metadata.PackageNotFoundError:
        return None


def missing(technique: Technique) -> Iterator[Requirement]:
    """Yield packages that a technique uses and that are not installed. Not in `needs`: plans are for any machine."""
    for distribution, extra in technique.packages():
        if library(distribution) is None:
            found, do = f"the package {distribution} is not installed", f"python -m pip install 'optrush[{extra}]'"
            yield Requirement(False, f"`{technique.name}` as asked", found, do)


# --- Compilers on this machine: checked in a stage, not in `needs`, because a plan may be for another machine.


COMPILERS = ("g++", "clang++", "c++")
CC = ("gcc", "clang", "cc")
TRITON = (7, 0)  # the lowest capability that torch compiles for


def package_digest() -> str:
    """Return a digest of all files of this package, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(Path(optrush.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compilers(device: Device) -> Iterator[Requirement]:
    """Yield the requirements of torch.compile."""
    asked = f"torch.compile on {device.name if device.kind == 'cuda' else 'a CPU'}"
    if device.kind == "cuda":
        found = f"capability {device.capability[0]}.{device.capability[1]}"
        yield Requirement(device.capability >= TRITON, f"{asked}, from capability 7.0 on", found, "turn compile off")
        triton = library("triton") is not None
        yield Requirement(triton, asked, "triton is not installed", "python -m pip install triton")
        c = installed(os.environ.get("CC"), *CC)
        yield Requirement(c is not None, f"{asked} needs a C compiler", f"none of {', '.join(CC)}", "install gcc")
        return
    wanted = os.environ.get("CXX", COMPILERS[0])  # torch uses only this one
    other = installed(*COMPILERS)
    do = f"export CXX={other}" if other else "install g++ (Debian and Ubuntu: apt-get install g++)"
    yield Requirement(installed(wanted) is not None, f"{asked} needs a C++ compiler", f"no {wanted} on the PATH", do)


def installed(*names: str | None) -> str | None:
    """Return the path of the first of these programs that is on the PATH."""
    return next((path for name in names if name and (path := shutil.which(name))), None)
