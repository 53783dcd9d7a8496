"""IA3: learned factors of keys, values and feed-forward hidden values in a frozen model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from optrush.peft import io, ledger
from optrush.planner.ledger import Rule, add, saved
from optrush.technique import Environment, ModelSpec, Numerics, Part, Requirement, Technique, Trainer, refuse_unmet

OURS = ("k_proj", "v_proj", "down_proj")
# For families with other names: the targets of PEFT 0.21 (peft/utils/constants.py).
OTHERS = (
    ("query_key_value", "dense_4h_to_h"),  # bloom, falcon, gpt_neox
    ("q_proj", "k_proj", "fc2"),  # opt
    ("q_proj", "v_proj", "fc2"),  # phi
    ("q_proj", "v_proj", "fc_out"),  # gptj
    ("q_proj", "v_proj", "c_proj"),  # gpt_neo
)


@dataclass(frozen=True)
class Ia3(Technique):
    """Multiplies keys, values and the input of the down projection by learned factors; factors start at 1.

    targets: `auto`, these three (in families with other names, PEFT's targets), or names: [q_proj, down_proj].
    feedforward: targets whose input is scaled instead of their output.
    init: a PEFT folder to start from, with the same targets.

    Source: Liu et al., https://arxiv.org/abs/2205.05638
    Memory: 16 bytes per factor, and only the weights of the model, in the matmul dtype.
    Work: 4 FLOPs per frozen weight and token instead of 6.
    """

    targets: str | tuple[str, ...] = "auto"
    feedforward: tuple[str, ...] = ("down_proj", "dense_4h_to_h", "fc2", "fc_out", "c_proj")
    init: str | None = None

    name = "ia3"
    summary = "frozen model with learned factors for keys, values and the feed-forward part; PEFT's files"
    source = "https://arxiv.org/abs/2205.05638"
    numerics = Numerics.DIFFERENT_MATHS
    proof = "tests/parity/test_peft.py"
    claims = frozenset({Part.TRAINED, Part.ADAPTERS})
    searched = False  # changes the trained parameters

    def describe(self, spec: ModelSpec) -> ModelSpec:
        linears = [linear for linear, _ in ledger.targeted(self._targets(ledger.LINEARS), spec.joined)]
        return replace(spec.with_linears(linears, adapter="other"), adapters_removable=self.init is None)

    def needs(self, env: Environment) -> Iterator[Requirement]:
        if env.shape is None or env.shape.delta is None or env.shape.experts is not None:
            yield env.needs_dense("`ia3`")
        if env.native:
            known = ledger.names_of(env.shape)
            yield from (self._named(known), ledger.require_names(self.name, "targets", self._targets(known), known))
            yield from self._apart(ledger.PIECES.values(), self._targets(known))
            yield self._within(ledger.resolve_targets(self._targets(known), known))
        if self.init is not None:
            io.read_config(self.name, self.init, {"peft_type": "IA3"})

    def _targets(self, known: Collection[str]) -> str | tuple[str, ...]:
        """Return the targets of `auto` for linears with these names; `auto` if no known family matches."""
        if self.targets != "auto":
            return self.targets
        return next((names for names in (OURS, *OTHERS) if {*names} <= {*known}), "auto")

    def _named(self, known: Collection[str]) -> Requirement:
        found, do = f"linears with other names: {', '.join(known)}", "set targets, and their subset feedforward"
        return Requirement(self._targets(known) != "auto", "`ia3:targets=auto`", found, do)

    def _apart(self, linears: Collection[Collection[str]], targets: str | tuple[str, ...]) -> Iterator[Requirement]:
        """Yield whether each module with a scaled input is the only reader of that input."""
        names = {*ledger.resolve_targets(targets, [n for pieces in linears for n in pieces])} & {*self.feedforward}
        do = "leave it out of feedforward, or take model.implementation: transformers"
        for name, pieces in ((n, p) for n in sorted(names) for p in linears if n in p):
            found = f"one matmul computes {', '.join(pieces)} from one input"
            yield Requirement(len(pieces) == 1, f"`ia3:feedforward=[{name}]`", found, do)

    def _within(self, names: Collection[str]) -> Requirement:
        """Return whether `feedforward` is a subset of the targets; its default has more names than any model."""
        wrong = next((n for n in self.feedforward if n not in names), "")
        asked, found = f"`ia3:feedforward=[{', '.join(self.feedforward)}]`", f"{wrong} is not a target"
        do = f"take some of {', '.join(names)}, or add it to the targets"
        return Requirement(not wrong or self.feedforward == Ia3.feedforward, asked, found, do)

    def quality(self, env: Environment) -> str:
        return "adapters only"

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield the frozen weights, the trained vectors, and the saved linear output of each vector."""
        learnt: list[tuple[int, int]] = []
        known = ledger.names_of(env.shape)
        keep, left, names = set(), 0, {*ledger.resolve_targets(self._targets(known), known)}
        for name, linear in {} if env.shape is None else env.shape.linears.items():
            mine = {piece: n for piece, n in linear.pieces.items() if piece in names}
            if not mine:
                continue
            inputs, layers = bool({*mine} & {*self.feedforward}), len(linear.layers)
            learnt.append((linear.inputs if inputs else sum(mine.values()), layers))
            keep |= {name} if inputs else set()
            left += 0 if inputs else layers * linear.outputs
        yield from ledger.predict_frozen(env, (), learnt, keep)
        if left:
            yield add(saved("left", "a linear's output, before scaling", left, env.blocks, "adapters"))

    def peft(self, trainer: Trainer) -> int:
        from optrush.peft import adapter as adapted
        from optrush.peft.adapter import Ia3 as Adapter

        model, recipe = trainer.model, trainer.weight_map
        known = adapted.known(model, recipe)
        targets = self._targets(known)
        refuse_unmet([self._named(known)])
        adapted.check_targets(self.name, model, recipe, targets, ())
        names = ledger.resolve_targets(targets, known)
        refuse_unmet([self._within(names)])
        adapted.freeze_base(model, recipe, (), trainer.precision)
        switch, places = adapted.AdapterToggle(), adapted.find_linears(model, recipe, names)
        for name, linear, modules in places:
            inputs = bool({ledger.last(m) for m in modules} & {*names} & {*self.feedforward})
            adapter = Adapter(linear, modules, names, switch, inputs)
            adapted.place(name, linear, adapter, recipe, adapter.fillers())
        if self.init is not None:
            begun = io.load_adapter(self.name, self.init, model, recipe, ())
            recipe.fillers.update({name: partial(adapted.fill_from, tensor) for name, tensor in begun.items()})
        trainer.adapters_disabled = switch.off if self.init is None else None
        scaled = ", ".join(n for n in names if n in self.feedforward) or "none"
        trainer.fingerprints["adapters"] = f"ia3 of {', '.join(names)}, inputs of {scaled}"
        return len(places)
