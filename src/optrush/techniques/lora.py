"""Low-rank adapters for a frozen model's linears: LoRA, rsLoRA, DoRA, LoRA+, PiSSA and OLoRA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from optrush.errors import NeedsError
from optrush.models.traced import TracedShape
from optrush.peft import io, ledger
from optrush.planner.ledger import OURS, WAYS, Line, Role, Rule, WorkItem, add, launched, saved
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer

if TYPE_CHECKING:
    from optrush.models.decoder import Linear
    from optrush.models.shapes import ModelShape
    from optrush.peft.decomposed import Decomposed


@dataclass(frozen=True)
class Lora(Technique):
    """Adds alpha / rank * B A x to the output of a frozen linear, A and B of the given rank; B starts as zeros.

    rslora: the factor is alpha / sqrt(rank). dora: each row of the sum is scaled to a learned length.
    targets: `auto` and `all-linear` every linear of the blocks, `attention`, `mlp`, names: [q_proj, v_proj], or a
        regular expression of whole module names, as in PEFT. Names that match nothing are listed. In a model with
        experts `auto` is its attention; `experts` their stacked matrices, [gate_up_proj, down_proj], `dense` its other
        feed-forward parts: shared experts, layers without experts. Lists may name sets, too.
    save: modules that are also trained whole: embed_tokens, lm_head, names of norms.
    init: a PEFT folder to start from, with the same rank, targets and save; or `pissa`, `pissa_niter_N`, `olora`: the
        adapter starts as the largest part of the weight, and the rest is frozen.
    lr_ratio: B's learning rate as a multiple of A's (LoRA+).
    dtype: of A and B, their gradients and states. bfloat16: rounded stochastically, like weights of `bf16`.

    Source: Hu et al., https://arxiv.org/abs/2106.09685; rsLoRA https://arxiv.org/abs/2312.03732, DoRA
        https://arxiv.org/abs/2402.09353, PiSSA https://arxiv.org/abs/2404.02948, OLoRA
        https://arxiv.org/abs/2406.01775, LoRA+ https://arxiv.org/abs/2402.12354
    Memory: 16 bytes per adapter parameter, 8 in bfloat16; only the weights of the model, in the matmul dtype.
    Work: 4 FLOPs per frozen weight and token instead of 6, and 6 per adapter's; dora 2 r n per weight and micro-batch,
        for W A^T of n pieces in one linear, and each weight read twice more, or dequantized once more. pissa: a
        decomposition of every weight when it is loaded.
    Differs from the source: pieces of a fused linear (q, k, v; gate, up) share matmuls and one dropout mask; adapters
        multiply in the dtype of the linear's output; dora applies no dropout to the frozen linear's input.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rslora: bool = False
    dora: bool = False
    targets: str | tuple[str, ...] = "auto"
    save: tuple[str, ...] = ()
    init: str | None = None
    lr_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"

    name = "lora"
    summary = "frozen model, low-rank adapters on its linears; rsLoRA, DoRA, LoRA+, PiSSA; PEFT's files"
    source = "https://arxiv.org/abs/2106.09685"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/parity/test_peft.py"
    claims = frozenset({Part.TRAINED, Part.ADAPTERS})
    searched = False  # changes the trained parameters

    def describe(self, spec: ModelSpec) -> ModelSpec:
        low_rank = not (self.dora or self.dropout)
        for linear, count in ledger.targeted(self.targets, spec.joined):
            rows = self.rank * count if low_rank else 0
            spec = spec.with_linears([linear], adapter="low-rank" if low_rank else "other", adapter_rows=rows)
        return replace(spec, adapters_removable=self._removable)

    @property
    def _removable(self) -> bool:
        return not self.save and self.init is None  # with an `init`, the model without adapters is not the initial one

    @property
    def splits_base(self) -> bool:  # type: ignore[override]
        return self.init is not None and re.fullmatch(ledger.SPLITS, self.init) is not None

    def needs(self, env: Environment) -> Iterator[Requirement]:
        targets = ledger.in_mixture(self.targets, env.shape)
        if env.shape is not None:  # other models' linears are known once the model is built
            yield ledger.require_targets(self.name, env, targets)
        if env.native:
            tied = env.shape is not None and env.shape.tied
            yield from ledger.require_saved(self.name, self.save, ledger.WHOLE, tied)
        parts = {name.removeprefix("" if env.native else "dense.") for name in ledger.DENSE}
        routed = env.native or (isinstance(env.shape, TracedShape) and env.shape.stacked > 0)
        beside = routed and not parts.isdisjoint(ledger.resolve_targets(targets, ledger.names_of(env.shape)))
        found = "dora or dropout, which PEFT does not support for parts next to experts"
        do = "take targets=attention, or leave out dora and dropout"
        met = not (beside and (self.dora or self.dropout))
        yield Requirement(met, f"`lora:targets={targets}`", found, do)
        if env.shape is not None and [*ledger.expert_sizes(env.shape, targets)]:
            asked, do = f"`lora:targets={targets}`", "take targets=attention for it"
            found = "dora or dropout, which are undefined for grouped matmuls of experts"
            yield Requirement(not (self.dora or self.dropout), f"{asked} adapts experts", found, do)
            found = f"rank {self.rank}; grouped matmuls on a GPU need multiples of 8"
            aligned = env.device.kind != "cuda" or self.rank % 8 == 0
            yield Requirement(aligned, f"{asked} adapts experts", found, "take a multiple of 8")
        found = "a technique that records the step: replays are not proved to draw new dropout masks"
        met = not self.dropout or Part.CAPTURE not in env.claimed
        yield Requirement(met, f"`lora:dropout={self.dropout:g}`", found, "leave dropout out")
        if self.dtype == "bfloat16":
            yield from self._narrow(env)
        narrow = (Part.WEIGHTS in env.claimed or env.dtype == "bfloat16") and self.dtype == "float32"
        delta = env.shape is not None and env.shape.delta is not None  # its layers have a module `norm`
        inside = sorted({*self.save} - {ledger.EMBEDDING, ledger.HEAD, *(() if delta else ("norm",))})
        asked = f"`lora:save=[{', '.join(self.save)}]` over several ranks"
        found = f"{inside[0] if inside else ''} in bf16 with float32 adapters, sharded together"
        do = "leave norms of blocks out, or take --with amp instead of bf16 weights"
        yield Requirement(not (inside and narrow and Part.DATA in env.claimed), asked, found, do)
        if self.splits_base:
            asked, do = f"`lora:init={self.init}`", "leave one of the two out"
            found = "a 4-bit or 8-bit base, which would round the rest of each weight"
            dense = all(linear.weight == "dense" for linear in env.spec.linears.values())
            yield Requirement(dense, asked, found, do)
            yield Requirement(not self.dora, asked, "dora: true, which uses the lengths of whole weights", do)
            found = "a technique that gives ranks some of the layers; the first rank publishes all adapters"
            yield Requirement(Part.PP not in env.claimed, asked, found, do)
        elif self.init is not None:
            trained_with = {  # without targets, which follow from its tensors
                "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rslora,
                "use_dora": self.dora,
            }  # fmt: skip
            io.read_config(self.name, self.init, trained_with)

    def _narrow(self, env: Environment) -> Iterator[Requirement]:
        """Yield requirements of bfloat16 adapters: rounding that preserves small updates, exact initial values."""
        asked, rounding = "`lora:dtype=bfloat16`", env.spec.rounding
        found = f"updates rounded {'to nearest' if rounding == 'nearest' else 'with Kahan summation'}"
        yield Requirement(rounding == "stochastic", asked, found, "take --with bf16, whose rounding is stochastic")
        found = "dora: true, which uses the lengths of the weights" if self.dora else f"init={self.init}"
        exact = not (self.dora or self.splits_base)
        yield Requirement(exact, f"{asked} rounds initial values", found, "leave dtype out")

    def quality(self, env: Environment) -> str:
        return "adapters only" if self.dtype == "float32" else "adapters only, in bf16"

    def remarks(self, shape: ModelShape) -> Iterator[str]:
        yield from ledger.remarks(self.name, self.targets, shape)

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield the frozen model, h = A x with r values per piece and token, and B laid out over all rows."""
        learnt: list[tuple[int, int]] = []
        keep, r, laid, low, rows, weights, crossed = dict[str, int](), self.rank, 0, 0, 0, 0, 0
        forward = back = entering = 0  # values per token that the passes read and write for experts' adapters
        targets = ledger.in_mixture(self.targets, env.shape)
        known, traced = ledger.names_of(env.shape), isinstance(env.shape, TracedShape)
        linears = ledger.resolve_targets(ledger.without_experts(targets) if traced else targets, known)
        for name, linear in {} if env.shape is None else env.shape.linears.items():
            mine = [n for piece, n in linear.pieces.items() if piece in linears]
            if not mine:
                continue
            keep[name] = layers = len(linear.layers)
            mine_rank, all_rows, width = len(mine) * r, linear.outputs, linear.inputs
            each = [mine_rank * width, r * sum(mine), *([sum(mine)] if self.dora else [])]
            learnt += [(size, layers) for size in each]
            low += layers * mine_rank
            rows += layers * all_rows
            laid += layers * mine_rank * (all_rows + width)
            weights += layers * all_rows * width
            crossed += layers * mine_rank * (all_rows * width + mine_rank * (all_rows + width))
        e = None if env.shape is None else env.shape.mixture
        sharing = 1 if "dp" in env.sharded else env.expert_ranks  # dp shards over all ranks anyway
        for name, width, many in () if env.shape is None else ledger.expert_sizes(env.shape, targets):
            assert e is not None
            here, L, active = e.count // sharing, len(e.layers), e.active
            learnt += [(here * r * width, L), (here * r * many, L)]
            if traced:
                entering += L * active * width
            else:
                keep["routed" if name == "gate_up_proj" else "down"] = L
            low += L * active * r
            rows += L * active * many
            laid += L * active * r * (many + width)
            forward += L * active * (width + 4 * many)  # read x; write B A x, and add it to the output
            back += L * active * (5 * width + 2 * many)  # the same for the input's gradient; read both again
        yield from ledger.predict_frozen(env, self.save, learnt, keep, added=keep, narrow=self.dtype == "bfloat16")
        if not learnt:
            return
        L = env.blocks
        reason = "A x of every adapter, n r values" + (", and the scaled output" if self.dora else "")
        copies = "A and B in the matmul dtype, B over all rows"
        if entering:
            yield add(saved("enters.experts", "inputs of experts, saved for their adapters", entering, L))
        yield add(
            saved("low", reason, low + rows * self.dora, L, "adapters"),
            Line("saved.laid", copies, laid, "product", "saved", blocks=L, of=("saved", "adapters")),
        )
        for way, times in zip(WAYS, (2, 4), strict=True):
            reason = f"{times} per value of A and of B over all rows"
            yield add(WorkItem(f"{way}.adapters", reason, "token", times * laid, of=(way,)))
        for way, values in zip(WAYS, (forward, back), strict=True):
            reason = "rows of the experts, with separate matmuls for adapters"
            if values:
                yield add(WorkItem(f"{way}.adapters.rows", reason, "token", values=values, role="product", of=(way,)))
        for way, kernels in zip(WAYS, (3, 7), strict=True):
            factor = OURS if Part.COMPILED in env.claimed else 1.0  # else assumed, not measured
            reason, launches = f"{kernels} kernels per linear", factor * kernels * sum(keep.values())
            yield add(launched(way, "adapters.launches", reason, launches))
        if self.dora:
            yield from _lengths(env, crossed, weights, rows)

    def peft(self, trainer: Trainer) -> int:
        from optrush.models.experts import StackedMatrices
        from optrush.peft import adapter as adapted
        from optrush.peft.lora import Lora as Adapter
        from optrush.peft.lora import Settings

        model, recipe = trainer.model, trainer.weight_map
        known, shape = adapted.known(model, recipe), trainer.env.shape
        chosen_targets = ledger.in_mixture(self.targets, shape)
        targets: str | Sequence[str] = chosen_targets
        inside, dense = list[str](), list[str]()  # experts; other feed-forward parts
        if shape is not None and shape.experts is not None:
            known = [name for name in known if name in ledger.attention_of(known)]
            resolved = ledger.resolve_targets(targets, known)
            dense = [name.removeprefix("dense.") for name in resolved if name in ledger.DENSE]
            inside = [name for name, *_ in ledger.expert_sizes(shape, targets)]
            what = "the routers of the experts stay" if inside else "the experts and their routers stay"
            trainer.notes.append(f"lora: {what} frozen, without adapters")
        elif any(isinstance(m, StackedMatrices) for m in model.modules()):
            inside, targets = [*ledger.select_expert_matrices(self.targets)], ledger.without_experts(self.targets)
            what = "the routers" if inside else "the stacked matrices"
            trainer.notes.append(f"lora: {what} of the experts stay frozen, without adapters")
        expert_targets = inside if targets is chosen_targets else ()
        resolved = ledger.resolve_targets(targets, known)
        names = (*(name for name in resolved if name not in (*expert_targets, *ledger.DENSE)), *dense)
        if names or not inside:
            adapted.check_targets(self.name, model, recipe, names if inside or dense else targets, self.save)
        trainer.notes += ledger.remarks(self.name, self.targets, shape, known)
        if self.splits_base and inside:
            do = "leave init out, or take targets: attention"
            raise NeedsError(f"`lora:init={self.init}`", "targets among the experts, which cannot be decomposed", do)
        trained = adapted.freeze_base(model, recipe, self.save, trainer.precision)
        settings = Settings(self.rank, self.alpha, self.dropout, self.rslora, self.dora, self.dtype == "bfloat16")
        switch = adapted.AdapterToggle()
        places = adapted.find_linears(model, recipe, names)
        split = self._split(trainer, places, names, settings.scaling) if self.splits_base else None
        recipe = trainer.weight_map
        for name, linear, modules in places:
            adapter = Adapter(linear, modules, names, switch, settings, trainer.env.spec.mlp == "quack", split)
            adapted.place(name, linear, adapter, recipe, adapter.fillers(name, linear, recipe, trainer.config.seed))
        layers = 0
        if inside:
            from optrush.models.families import FAMILIES
            from optrush.peft import experts

            spec = FAMILIES[shape.family] if shape is not None and shape.experts is not None else None
            layers = experts.place(model, recipe, inside, switch, settings, trainer.config.seed, spec)
        if self.init is not None and not self.splits_base:
            begun = io.load_adapter(self.name, self.init, model, recipe, trained)
            for name, tensor in begun.items():
                fills = partial(adapted.fill_over, tensor, recipe, name) if name in trained else None
                recipe.fillers[name] = fills or partial(adapted.fill_from, tensor)
        trainer.adapters_disabled = switch.off if self._removable else None
        chosen = f"lora, scaling {settings.scaling:g}, dora {self.dora}, of {', '.join((*names, *inside))}"
        chosen += ", in bfloat16" if settings.narrow else ""
        trainer.fingerprints["adapters"] = chosen + (f", init {self.init}" if self.splits_base else "")
        return len(places) + layers

    def _split(
        self, trainer: Trainer, places: list[tuple[str, Linear, list[str]]], names: tuple[str, ...], scaling: float
    ) -> Decomposed:
        """Make the weight map subtract the initial adapters from the chosen weights."""
        from optrush.peft.decomposed import Decomposed

        assert self.init is not None
        recipe = trainer.weight_map
        modules = [m for _, _, targets in places for m in targets if ledger.last(m) in names]
        shapes = {hf: shape for name, _, _ in places for hf, shape in recipe.entries[f"{name}.weight"].hf_shapes()}
        for module in modules:
            if self.rank > min(shape := shapes[f"{module}.weight"]):
                found, do = f"{module} is {shape[0]} x {shape[1]}", f"take a rank of at most {min(shape)}"
                raise NeedsError(f"`lora:init={self.init}` of rank {self.rank}", found, do)
        split = Decomposed(recipe.source, self.init, self.rank, scaling, modules, trainer.config.seed)
        trainer.weight_map = replace(recipe, source=split)
        return split

    def wrap_step(self, trainer: Trainer) -> int:
        from optrush.optim.rates import ScaledRates

        if self.lr_ratio == 1 or trainer.optimizer is None:  # None: an evaluation
            return 0
        of = {f"{name}.adapter.{p}" for name, a in io.adapters(trainer.model).items() for p, _ in a.named_parameters()}
        b = {name for name in of if name.endswith((".b", "_b"))}
        trainer.optimizer = ScaledRates(trainer.optimizer, trainer.trained, self.lr_ratio, lambda t: t.name in b)
        return 1


def _lengths(env: Environment, crossed: float, weights: float, rows: float) -> Iterator[Rule]:
    """Yield the work of computing row norms of weights, and of scaling each token's sums."""

    def work(name: str, reason: str, flop: float = 0.0, values: float = 0.0, role: Role = "product") -> Rule:
        return add(WorkItem(f"forward.{name}", reason, "micro", flop, values=values, role=role, of=("forward",)))

    yield work("lengths", "W A^T and B (A A^T), the second in float32", 2 * crossed)
    yield work("measured", "W read twice for lengths", values=2 * weights)
    for way, each, reason in zip(WAYS, (2, 4), ("the sum read and written", "both gradients of a matmul"), strict=True):
        yield add(WorkItem(f"{way}.scaled", reason, "token", values=each * rows, role="product", of=(way,)))
    if Part.LINEARS in env.claimed:
        reason = "W dequantized once more, for the lengths"
        yield work("measured.packed", reason, values=weights, role="stored")
        yield work("measured.unpacked", reason, values=weights)
