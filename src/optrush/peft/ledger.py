"""Predict the memory and work of a frozen model with adapters, and resolve the names of linears to adapt. Pure.

Names are the last parts of Hugging Face's module names: `q_proj`. A linear of our decoder can contain several of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from optrush.config import nearest
from optrush.data.time_limit import TooLong, limited
from optrush.errors import NeedsError
from optrush.hardware import Device
from optrush.models.traced import TracedShape
from optrush.planner import ledger
from optrush.planner.ledger import WAYS, Line, Role, Rule, Tag, WorkItem, add, like, live, saved, tagged
from optrush.technique import LINEARS as technique_linears
from optrush.technique import Environment, Part, Requirement, compilers

if TYPE_CHECKING:
    from optrush.models.shapes import ModelShape


PIECES = {  # pieces of each linear of our decoder; latent attention has linears of one piece
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
LINEARS = tuple(name for names in PIECES.values() for name in names)
JOINED = {"qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}  # if one tensor has all
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")  # of latent attention
DELTA = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")  # delta rule
LATENT_LINEARS = technique_linears[4:]  # of our decoder, in the same order
EVERY = ("auto", "all-linear")
DENSE = tuple(f"dense.{name}" for name in LINEARS[4:])  # linears outside experts, in a model with experts
SETS = {"attention": LINEARS[:4], "mlp": LINEARS[4:], "experts": ("gate_up_proj", "down_proj"), "dense": DENSE}
STACKED = SETS["experts"]
EMBEDDING, HEAD = "embed_tokens", "lm_head"
SPLITS = r"pissa|olora|pissa_niter_[1-9]\d?"  # values of `init` that split the weights themselves
WHOLE = (EMBEDDING, HEAD, "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm",
         "q_a_layernorm", "kv_a_layernorm")  # fmt: skip

# Names of a block's modules with linears. The first is the default, unless a pattern contains one of the others.
MIXERS = ("self_attn", "attention", "attn", "self_attention")
FEEDERS = ("mlp", "feed_forward", "ffn")
BLOCKS = ("model.layers", "model.language_model.layers", "language_model.model.layers", "transformer.h", "layers")
MATCHING_s = 2.0  # limit for matching all names
MOST_LAYERS = 200  # a pattern that matches fewer layers selects only some
# Linears of other families, accepted in a list of targets.
OTHERS = ("c_attn", "c_proj", "c_fc", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2",
          "out_proj", "in_proj", "x_proj", "dt_proj", "w1", "w2", "w3", "Wqkv", "wq", "wk", "wv", "wo")  # fmt: skip


def last(module: str) -> str:
    return module.rpartition(".")[2]


def resolve_targets(asked: str | Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the names that `targets` selects in a model with linears `known`; a list may also name sets.

    A linear with the name of a set has priority: `dense` in models of gpt_neox, falcon and phi. A text that is not a
    name is a regular expression of full module names; in a list, a name with a dot is a suffix, like in PEFT.
    """
    if not isinstance(asked, str):
        parts = (resolve_targets(entry, known) if entry in SETS else _ends_with(entry, known) for entry in asked)
        return tuple(dict.fromkeys(name for part in parts for name in part))
    if asked in known:
        return (asked,)
    if asked == "attention":
        return attention_of(known)
    if asked == "mlp" and JOINED["gate_up"] in known and "gate_proj" not in known:
        return JOINED["gate_up"], JOINED["down"]
    if asked in EVERY or asked in SETS:
        return tuple(known) if asked in EVERY else SETS[asked]
    return (asked,) if re.fullmatch(r"[\w.]+", asked) else matching(asked, tuple(known))


def _ends_with(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of linears with this module suffix, including shared experts'; the name itself if none match."""
    if "." not in name or name in DENSE:
        return (name,)
    end = rf".*\.{re.escape(name)}"
    return matching(end, tuple(known)) or (matching(end, DENSE) if "shared_expert" in name else ()) or (name,)


@lru_cache(maxsize=256)
def matching(pattern: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of linears whose modules in every layer match a regular expression.

    Raises:
        NeedsError: not a regular expression, matches only in some layers, or takes too long.
    """
    try:
        with limited(MATCHING_s):
            return tuple(_matched(pattern, re.compile(pattern), known))
    except re.error as error:
        raise NeedsError(f"`targets={pattern}`", f"not a regular expression: {error}", "fix it") from None
    except TooLong:
        found = f"it takes longer than {MATCHING_s:g} s to match (nested repeats)"
        raise NeedsError(f"`targets={pattern}`", found, f"name the linears: [{', '.join(known)}]") from None


def _matched(pattern: str, read: re.Pattern[str], known: tuple[str, ...]) -> Iterator[str]:
    """Yield the names in `known` whose modules match the pattern in every layer; raise NeedsError if only in some."""
    mixers, feeders = (
        [part for part in parts if re.search(rf"(?<![a-z_]){part}(?![a-z])", pattern)] or [parts[0]]
        for parts in (MIXERS, FEEDERS)
    )
    for name in known:
        plain, inside = name.removeprefix("dense."), [*mixers, *feeders]
        if plain != name:
            inside = [f"{part}{shared}" for part in feeders for shared in ("", ".shared_expert", ".shared_experts")]
        elif plain in (*SETS["mlp"], JOINED["gate_up"]):
            inside = feeders
        elif plain in {*attention_of(known), *LATENT, *DELTA, JOINED["qkv"]}:
            inside = ["linear_attn"] if plain in DELTA else mixers
        ends = [f"{part}.{plain}" for part in inside]
        layers = [
            n for n in range(MOST_LAYERS) if any(read.fullmatch(f"{top}.{n}.{end}") for top in BLOCKS for end in ends)
        ]
        if layers and len(layers) < MOST_LAYERS:
            do = f"name the linears, which adapts all layers: [{name}]"
            raise NeedsError(f"`targets={pattern}`", f"it matches {name} in some layers only", do)
        if layers:
            yield name


def unmatched(asked: str | Sequence[str], known: Collection[str]) -> list[str]:
    """Return the entries of a list of targets without a match; empty if no entry matches."""
    names = [] if isinstance(asked, str) else [entry for entry in asked if entry not in SETS]
    lacking = [entry for entry in names if not {*_ends_with(entry, known)} & {*known, *DENSE}]
    return lacking if {*resolve_targets(asked, known)} & {*known} else []


def remarks(
    technique: str, targets: str | tuple[str, ...], shape: ModelShape | None, known: Collection[str] | None = None
) -> Iterator[str]:
    """Yield a note on targets that match no linear of the model, or that do not include its experts."""
    routed = shape is not None and shape.experts is not None
    meant = in_mixture(targets, shape)
    known = {*(names_of(shape) if known is None else known), *(STACKED if routed else ())} - {*(SETS["mlp"] * routed)}
    lacking = unmatched(meant, known | {"down_proj"} if routed else known)
    lacking += [
        name for name in targets if meant is not targets and name in SETS["mlp"] and f"dense.{name}" not in meant
    ]
    if lacking:
        yield f"{technique}: no linear of this model is called {', '.join(lacking)}: the other targets have adapters"
    elif meant is not targets:
        yield f"{technique}: gate_proj and up_proj are outside the experts; `experts` adapts the experts, too"


def _meant(name: str, known: Collection[str]) -> bool:
    """Return whether an unknown name belongs to another family, rather than being a typo."""
    families = {*LINEARS, *LATENT, *DELTA, *JOINED.values(), *OTHERS}
    return last(name) in families or not difflib.get_close_matches(last(name), {*known, *families}, 1, 0.75)


def attention_of(known: Collection[str]) -> tuple[str, ...]:
    """Return the names of the attention linears in a model with linears `known`."""
    names = tuple(name for name in LATENT if name in known) if LATENT[3] in known else SETS["attention"]
    names = (JOINED["qkv"], JOINED["o"]) if JOINED["qkv"] in known else names
    return names + tuple(name for name in DELTA if name in known)


def names_of(shape: ModelShape | None) -> tuple[str, ...]:
    """Return the names of a block's linears except experts; for an unknown shape, the names of most families."""
    if shape is None:
        return LINEARS
    if isinstance(shape, TracedShape):
        return tuple(dict.fromkeys(name for linear in shape.linears.values() for name in linear.pieces))
    mixing = (linear.pieces for linear in shape.linears.values() if linear.module not in ("gate_up", "down"))
    feeding = resolve_targets("mlp", [JOINED["gate_up"]]) if "gate_up" in shape.joined else SETS["mlp"]
    if shape.gateless:
        feeding = tuple(name for each in ("gate_up", "down") for name in shape.linears[each].pieces)
    return tuple(dict.fromkeys((*(name for pieces in mixing for name in pieces), *feeding)))


def targeted(targets: str | Sequence[str], joined: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield each linear of our decoder that `targets` names, for any kind of attention, and its number of pieces.

    joined: linears with one adapter for all pieces.
    """
    known = (LINEARS, LATENT, *([JOINED.values()] if joined else []))
    names = {name.removeprefix("dense.") for each in known for name in resolve_targets(targets, [*each])}
    linears = PIECES | {linear: (name,) for linear, name in zip(LATENT_LINEARS, LATENT, strict=False)}
    linears |= {linear: (JOINED[linear],) for linear in joined}
    yield from ((linear, count) for linear, pieces in linears.items() if (count := len(names & {*pieces})))


def require_names(technique: str, option: str, asked: str | Sequence[str], known: Collection[str]) -> Requirement:
    """Require that a model has the modules named by an option."""
    names = resolve_targets(asked, known)
    other = unmatched(asked, known) if option == "targets" else []
    wrong = next((n for n in names if n not in known and not (n in other and _meant(n, known))), None)
    found, do = f"no {'linear' if option == 'targets' else 'such module'} is called {wrong}", ""
    of = [entry for entry in ((asked,) if isinstance(asked, str) else asked) if wrong in SETS.get(entry, ())]
    if wrong is not None and of and wrong not in asked:
        found, do = f"a model without linears of the set {of[0]}", f"name some: {', '.join(known)}"
    elif wrong is not None:
        do = nearest(wrong, known)
    elif not names:
        found = "it matches no linear of this model" if asked and known else "no linears to choose from"
        do = f"name some: {', '.join(known)}" if known else "use another model"
    text = asked if isinstance(asked, str) else f"[{', '.join(asked)}]"
    return Requirement(wrong is None and bool(names), f"`{technique}:{option}={text}`", found, do)


def require_saved(technique: str, save: Sequence[str], known: Collection[str], tied: bool) -> Iterator[Requirement]:
    """Require that the modules in `save` exist, and are not half of a tied pair."""
    if save:
        yield require_names(technique, "save", save, known)
    alone = {EMBEDDING, HEAD} & set(save)
    found = "embedding and head are one weight in this model"
    asked = f"`{technique}:save=[{', '.join(save)}]`"
    yield Requirement(not tied or len(alone) != 1, asked, found, f"name both, {EMBEDDING} and {HEAD}, or neither")


def in_mixture(targets: str | tuple[str, ...], shape: ModelShape | None) -> str | tuple[str, ...]:
    """Return targets for a model with stacked experts: names of linears mean linears outside experts, like in PEFT.

    `down_proj` alone means the experts; with `gate_proj` or `up_proj` it means a linear.
    """
    if shape is None or shape.experts is None or isinstance(targets, str) or not {*targets} & {"gate_proj", "up_proj"}:
        return targets
    beside = any({*linear.pieces} & {*DENSE} for linear in shape.linears.values())
    rest = tuple(name for name in targets if name not in SETS["mlp"])
    names = tuple(f"dense.{name}" for name in SETS["mlp"] if name in targets)
    return (*rest, *names) if beside else rest or targets


def require_targets(technique: str, env: Environment, targets: str | Sequence[str]) -> Requirement:
    """Require that the model has the `targets`: linears, stacked matrices of experts, dense parts."""
    known = names_of(env.shape)
    if isinstance(env.shape, TracedShape) and env.shape.stacked and select_expert_matrices(targets):
        found, do = "experts of several sizes, without gates or transposed", "use targets=attention or all-linear"
        if env.shape.mixture is None or not (rest := without_experts(targets)):
            return Requirement(env.shape.mixture is not None, f"`{technique}:targets={targets}`", found, do)
        return require_names(technique, "targets", rest, known)
    if env.shape is None or env.shape.experts is None:
        if "experts" in ((targets,) if isinstance(targets, str) else targets) and JOINED["gate_up"] in known:
            found, do = "a model without linears of the set experts", f"name some: {', '.join(known)}"
            return Requirement(False, f"`{technique}:targets={targets}`", found, do)
        return require_names(technique, "targets", targets, known)
    attention = attention_of(known)
    wrong = next((name for name in resolve_targets(targets, attention) if name in ("gate_proj", "up_proj")), None)
    dense = any({*linear.pieces} & {*DENSE} for linear in env.shape.linears.values())
    is_pattern = isinstance(targets, str) and targets not in (*SETS, *EVERY)
    if dense and is_pattern and {*resolve_targets(targets, DENSE)} & {*DENSE}:
        found, do = "it matches layers without experts or shared experts", "name the linears: [q_proj, dense]"
        return Requirement(False, f"`{technique}:targets={targets}`", found, do)
    if wrong is None and not dense and {*resolve_targets(targets, attention)} & {*DENSE}:
        found, do = "every layer has experts, and no shared experts", "remove dense"
        return Requirement(False, f"`{technique}:targets={targets}`", found, do)
    if wrong is None:
        return require_names(technique, "targets", targets, (*attention, *SETS["experts"], *DENSE))
    do = "use targets=attention, targets=experts" + (", or dense for shared experts and dense layers" if dense else "")
    return Requirement(False, f"`{technique}:targets={targets}`", f"{wrong} is a part of the experts' gate_up_proj", do)


def select_expert_matrices(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stacked expert matrices that `targets` selects: `experts` both, `gate_up_proj` itself, others none."""
    names = {targets} if isinstance(targets, str) else {*targets}
    return SETS["experts"] if "experts" in names else SETS["experts"][:1] if "gate_up_proj" in names else ()


def without_experts(targets: str | Sequence[str]) -> str | list[str]:
    """Return `targets` without the experts of a transformers model."""
    if not select_expert_matrices(targets):
        return targets if isinstance(targets, str) else [*targets]
    return [] if isinstance(targets, str) else [entry for entry in targets if entry not in ("experts", "gate_up_proj")]


def expert_sizes(shape: ModelShape, targets: str | Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, width, rows) of each matrix of an expert that `targets` names."""
    if shape.mixture is None:
        return
    names, F = select_expert_matrices(targets), shape.mixture.ff_width
    if not isinstance(shape, TracedShape):
        names = resolve_targets(targets, attention_of(names_of(shape)))
    sizes = {"gate_up_proj": (shape.width, 2 * F), "down_proj": (F, shape.width)}
    yield from ((name, *size) for name, size in sizes.items() if name in names)


def predict_frozen(
    env: Environment, save: Sequence[str], learnt: Sequence[tuple[int, int]], keep: Collection[str],
    added: Collection[str] = (), narrow: bool = False,
) -> Iterator[Rule]:  # fmt: skip
    """Yield the rules for a frozen model with adapters.

    Args:
        save: fully trained modules; the few values of norms are not counted.
        learnt: (values, layers) of each adapter parameter; unused for a model of unknown shape.
        keep: linears of a block whose adapters save the input.
        added: linears of a block whose adapters add to the output.
        narrow: the adapters are bfloat16.
    """
    trained: dict[Tag, bool] = {"embedding": EMBEDDING in save, "head": HEAD in save}
    note, stays = "frozen: no gradient, no state", "frozen: held in the products' type, and so never cast"
    yield ledger.freeze_rule(
        tagged(no=("adapters", "tower", *(part for part, learns in trained.items() if learns))), note
    )
    if Part.LINEARS not in env.claimed:  # else the technique that claims them has rules
        yield live("weights.blocks", stays, role="product")
    if not trained["embedding"]:
        yield live("weights.embedding", stays, role="product")
    if not trained["head"] and env.shape is not None and not env.shape.tied:
        yield live("weights.head", stays, role="product")
    if not any(trained.values()):
        yield live(tagged("tied"), note, gone=True)
    yield live("casts.blocks", stays, gone=True)
    if (r := env.rollout) is not None and not r.served and env.device.kind == "cuda":
        yield live("rollout.weights", stays, role="product")
        yield from () if "dp" in env.sharded else (live("rollout.casts", stays, gone=True),)
    if env.shape is not None and env.shape.experts is not None:
        yield live("saved.entering router", "a frozen router's product does not save it", gone=True)
    if not trained["head"]:
        for copies in (tagged("casts"), "casts"):
            yield live(copies, stays, gone=True)
        yield live("head.products", "the head's own gradient is not made", times=4 / 6)
        if Part.HEAD in env.claimed:
            yield live("head.gradient", "the frozen head has no gradient", gone=True)
    yield live(tagged("backward", "products"), "the weights' gradients are not made", times=0.5)
    yield live(tagged("normalised"), "only the norms' own gradients read it", gone=True)
    if env.shape is not None:
        yield from _inputs(env, env.shape, keep)
        yield from _learnt(env, env.shape, list(trained.values()), learnt, narrow)
        yield from _added(env, env.shape, added)


def _inputs(env: Environment, shape: ModelShape, keep: Collection[str]) -> Iterator[Rule]:
    """Yield the rules for saved inputs: frozen matmuls do not save theirs, adapters may."""
    kept: list[Tag] = [part for part, linear in OWN if linear in keep]
    kept += ["heads"] if Part.ATTENTION in env.claimed else []  # attention kernels save their output
    yield live(tagged("product-input", no=kept), "no frozen product keeps what enters it", gone=True)
    if shape.delta is not None:
        yield live("saved.rule.taps", "only the convolution's own gradient reads it", gone=True)
    L = env.blocks
    first = next((name for name in DELTA[:-1] if name in keep), "")  # they share one input
    counted = {n for n, linear in shape.linears.items() if linear.module == "down" and "down" in keep}  # saved.product
    for name in sorted(set(keep) - {"o", "down", "routed", *counted, *(set(DELTA) - {first})}):
        note, linear = f"what enters {name}, kept for its adapter", shape.linears[name]
        values = 0 if linear.module == "o" else len(linear.layers) * linear.inputs  # attention's output is saved
        # Without a norm before it, a linear reads the residual stream, which is saved already, or a narrower copy.
        role: Role = "cast" if shape.norms == "after" and name in ("qkv", "gate_up") else "product"
        yield add(saved(f"enters.{name}", note, values, L, role=role))
        if isinstance(shape, TracedShape):
            note, again = "autocast copies it for each linear", values * (len(linear.pieces) - 1)
            yield add(saved(f"enters.{name} again", note, again, L, role="cast"))


def _added(env: Environment, shape: ModelShape, added: Collection[str]) -> Iterator[Rule]:
    """Yield the work of adding for each linear, even if 0, because a technique that owns its matmul may add there."""
    for name, linear in shape.linears.items():
        values = 2.0 * len(linear.layers) * linear.outputs * (name in added)
        note = "what a linear gave, read and written"
        yield add(WorkItem(f"forward.added.{name}", note, "token", values=values, role="product", of=("forward",)))


# Inputs that adapters may save and that have a line in the baseline: the part of a block, and the linear that saves it.
OWN: tuple[tuple[Tag, str], ...] = (("mlp", "down"), ("heads", "o"), ("experts", "routed"), ("delta", "out_proj"))


# Roles of adapters' weights, gradients and states.
_WIDE: tuple[Role, Role, Role] = ("wide", "wide", "wide")
_NARROW: tuple[Role, Role, Role] = ("weight", "gradient", "state")


def _learnt(
    env: Environment, s: ModelShape, outer: Sequence[bool], learnt: Sequence[tuple[int, int]], narrow: bool
) -> Iterator[Rule]:
    """Yield the lines for the trained values, and their share of the update."""
    L, values = env.blocks, sum(size * layers for size, layers in learnt)
    beside = s.vocab * s.width * (any(outer) if s.tied else sum(outer))
    note = f"{values:,} parameters of adapters, in {'bfloat16' if narrow else 'float32'}"
    weight, gradient, state = _NARROW if narrow else _WIDE
    yield add(
        Line("weights.adapters", note, values, weight, "always", blocks=L, of=("weights", "adapters")),
        Line("gradients.adapters", note, values, gradient, "gradient", blocks=L, of=("gradients", "adapters")),
        Line("states.adapters", f"{note}: a mean and a mean square each", 2 * values, state, "always", blocks=L,
             of=("states", "adapters")),
    )  # fmt: skip
    share = (values + beside) / s.parameters
    updated = [tagged("update")] if Part.OPTIMIZER in env.claimed else ["update", "norm"]  # else update.adapters, below
    for match in (*updated, *([tagged("reduce")] if Part.DATA in env.claimed else [])):
        yield live(match, "of what is trained", times=share)
    if Part.OPTIMIZER not in env.claimed:
        largest = s.vocab * s.width if beside else max(size for size, _ in learnt)
        tensors = float(sum(layers for _, layers in learnt) + sum(outer))
        yield live("update.loop", "of what is trained, see update.adapters", gone=True)
        note = "two temporaries of the largest parameter that is trained"
        launches, moved = (3.0, 7.0) if narrow else (14.0, 11.0)  # one kernel per parameter needs no temporaries
        yield add(
            Line("update.adapters", note, 0 if narrow else 2 * largest, weight, "update", of=("update", "adapters")),
            WorkItem("update.adapters", "one operator at a time", "step", values=moved * (values + beside), role=weight,
                 launches=launches * tensors, of=("update", "adapters")),
        )  # fmt: skip


# --- Quantized frozen linears: lines of the ledger, requirements of the kernels.


def demand_compilers(technique: str, device: Device) -> None:
    """Raise NeedsError if this machine cannot build our Triton kernels for a CUDA device; a CPU needs none."""
    for need in compilers(device) if device.kind == "cuda" else ():
        if not need.met:
            raise NeedsError(need.asked.replace("torch.compile", f"`{technique}`"), need.found, need.do)


def expert_share(shape: ModelShape | None) -> float:
    """Return the share of the experts' matrices in the blocks' parameters."""
    if shape is None or shape.experts is None:
        return 0.0
    e, s = shape.experts, shape
    outer = s.vocab * s.width * (1 if s.tied else 2) + s.width
    return 3 * s.width * e.ff_width * e.count * len(e.layers) / (s.parameters - outer)


def predict_quantized(env: Environment, width_bytes: float) -> Iterator[Rule]:
    """Yield the rules for blocks with `width_bytes` per weight, which is also assumed for the few values of norms."""
    note = f"frozen, in {8 * width_bytes:.3f} bits each"
    yield ledger.retype({"stored": width_bytes}, note)
    yield live("weights.blocks", note, role="stored")
    yield live("casts.blocks", "made dense in the products' type, never cast", gone=True)
    routed = env.shape is not None and env.shape.experts is not None
    launches = ledger.OURS * (6.0 if routed else 7.0) * env.blocks  # q, k, v, o, gate, up, down
    for way in WAYS:
        note = "codes of a linear read, to make it dense"
        yield like("casts.blocks", WorkItem(f"{way}.packed", note, "micro", values=1.0, role="stored", of=(way,)))
        note = "the weight of a linear, dequantized and written"
        yield like("casts.blocks", WorkItem(f"{way}.unpacked", note, "micro", values=1.0, role="product", of=(way,)))
        yield add(ledger.launched(way, "unpacking.launches", "a kernel for each piece", launches))
    if env.shape is not None:
        s = env.shape
        largest = max(linear.inputs * linear.outputs for linear in s.linears.values())
        inside = 0 if s.experts is None else 2 * s.experts.count * s.experts.ff_width * s.width
        inside = s.largest_stack if isinstance(s, TracedShape) else inside
        if inside > largest:
            largest, note = inside, "gate and up of a layer's experts, dense while they multiply"
        for way in WAYS:
            yield add(Line(f"working.dense.{way}", note, largest, "product", way))
