"""Trace one block of each kind of a transformers model without values: storages, matmuls, copies and launches.

The class is built on the meta device, which gives all sizes. Then one block of each kind runs on fake tensors, while
`saved_tensors_hooks` records the tensors that autograd keeps, and a dispatch mode the operators that create them.
Blocks run at two lengths, to separate linear from quadratic growth with a row; in float32, bfloat16 and under autocast,
to find the ledger's roles; and trained and frozen, to find what only weight gradients need. Other blocks pass their
input through. On a CPU torch's attention keeps the same tensors as flash attention on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrush.console import transformers_silenced
from optrush.data.batch import Documents
from optrush.errors import NeedsError, one_line
from optrush.models.experts import TheirExperts
from optrush.models.hf import HFModel, opened_on_meta
from optrush.models.layers import uncast
from optrush.models.shapes import HF, sdpa_obstacle
from optrush.models.text_part import text_config

LENGTH = 768  # tokens of the shorter row: a multiple of recurrent layers' chunks, and not a head width
VIEW = 0.25  # of the host's time to start an operator: assumed for an operator that only makes a view
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "grouped_matmul")
FLASH = "_scaled_dot_product"
PRECISIONS = ("float32", "bfloat16", "autocast")
ROLES = ("product", "residual", "widening", "narrowing")  # roles of planner.ledger
KINDS = ("attended", "entering", "weighed", "rest")
# Ledger tags of a block's saved tensors, by kind.
TAGS: Mapping[str, tuple[str, ...]] = {
    "attended": ("heads", "attention-output", "product-input"),
    "entering": ("product-input",),
    "weighed": ("normalised", "fusable"),
    "rest": (),
}


SavedLine = tuple[str, float, str, list[str], bool]  # a `SavedShape`


class Mode(NamedTuple):
    """How a block runs."""

    attention: str  # "sdpa" or "masked"
    precision: str  # "float32", "bfloat16" or "autocast"
    frozen: bool
    length: int


@dataclass
class Seen:
    """The trace of one block: its storages in order of creation, and those that autograd keeps."""

    bytes: dict[int, int] = field(default_factory=dict)  # by number
    kind: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # created after attention
    kept: set[int] = field(default_factory=set)
    enters: set[int] = field(default_factory=set)  # inputs of matmuls with a weight
    inputs: dict[str, int] = field(default_factory=dict)  # linear -> its input storage; negative: from outside
    moved: float = 0.0  # values
    launches: float = 0.0
    attended: bool = False

    def what(self, number: int, frozen: bool) -> str:
        """Return the kind of a storage's lines; `frozen`: it is kept with frozen weights, too."""
        if self.kind[number] == "attended":
            return "attended"
        if frozen or self.kind[number] == "stream":
            return "rest"
        return "entering" if number in self.enters else "weighed"


def _product_by_group(
    a: Tensor, b: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of torch's grouped matmul, whose own rule took only bfloat16 before torch 2.13."""
    groups = (len(ends),) if ends is not None and a.dim() == b.dim() == 2 else b.shape[:1] if a.dim() == 3 else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=dtype)


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of one pass, block by block."""

    def __init__(self, weights: set[int], length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.block, self.length = weights, -1, length
        self.seen: dict[int, Seen] = defaultdict(Seen)
        self.number: dict[int, tuple[int, int]] = {}  # by storage: its block, and its number there
        self.alive: list[Any] = []  # so that no storage's address is reused

    def enter(self, block: int, hidden: Tensor) -> None:
        """Begin a block, whose input is its storage 0."""
        self.block = block
        self._place(hidden, "stream")

    def _place(self, t: Tensor, kind: str) -> None:
        storage, seen = t.untyped_storage(), self.seen[self.block]
        number = len(seen.bytes)
        self.alive.append(storage)
        self.number[storage._cdata] = (self.block, number)
        seen.bytes[number], seen.kind[number] = storage.nbytes(), kind
        if seen.attended:
            seen.late.add(number)

    def own(self, t: Tensor) -> int | None:
        """Return the number of a tensor's storage in this block; None: created outside it."""
        block, number = self.number.get(t.untyped_storage()._cdata, (-1, -1))
        return number if block == self.block else None

    def keep(self, t: Tensor) -> Tensor:
        """Record that autograd keeps a tensor."""
        if self.block >= 0 and (number := self.own(t)) is not None:
            self.seen[self.block].kept.add(number)
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and return its result; record its new storages, moved values and launches in the block."""
        name = str(func.overloadpacket).partition(".")[2]
        out = _product_by_group(*args, **(kwargs or {})) if name == "_grouped_mm" else func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        storages = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in storages]
        if storages and storages <= self.weights:  # a view of a weight, or its copy in another type
            for t in new:
                self.alive.append(t.untyped_storage())
                self.weights.add(t.untyped_storage()._cdata)
            return out
        if self.block < 0:
            return out
        seen = self.seen[self.block]
        seen.launches += VIEW
        weighed = name in PRODUCTS and bool(storages & self.weights)
        attends = name.startswith(FLASH) or (name in PRODUCTS and not weighed)
        if weighed:
            for t in given:
                if (number := self.own(t)) is not None:
                    seen.enters.add(number)
        if not new and not name.endswith("_"):
            return out
        seen.launches += 1 - VIEW
        if name.startswith(FLASH) or (attends and any(self.squared(t) for t in given)):
            seen.attended = True
        copied = name in ("clone", "_to_copy") and (n := self.own(given[0])) is not None and seen.kind[n] == "attended"
        kind = "attended" if copied or (attends and seen.attended) else "made"
        fresh: set[int] = set()
        for t in new:
            if (key := t.untyped_storage()._cdata) not in fresh:
                fresh.add(key)
                self._place(t, kind)
        if not (attends or weighed):
            values = sum(t.numel() for t in given if t.untyped_storage()._cdata not in self.weights)
            seen.moved += values + sum(t.numel() for t in made)
        return out

    def squared(self, t: Tensor) -> bool:
        """Return whether a tensor has a value per pair of tokens of a row, like attention probabilities."""
        return t.ndim > 2 and t.shape[-1] == t.shape[-2] == self.length


def trace_model(hf: HF) -> dict[str, Any]:
    """Return the fields of the `TracedShape` of a transformers model, in JSON types.

    Raises:
        NeedsError: it cannot be built, or its code reads values, which a trace does not have.
    """
    from transformers import CONFIG_MAPPING

    if str(hf.get("model_type")) not in CONFIG_MAPPING:
        do = "use a model that transformers has, or update transformers: a folder's code is not run"
        raise NeedsError("a trace of its blocks", "its code is not transformers' own", do)
    model = opened_on_meta(hf)
    model.tie_weights()
    with torch.device("meta"):
        wrapper = HFModel(model)
    tracer = Tracer(wrapper, hf)
    try:
        with transformers_silenced():
            figures = tracer.figures()
    except NeedsError:
        raise
    except Exception as error:
        kind, found = wrapper.config.model_type, f"{type(error).__name__}: {one_line(str(error), 120)}"
        do = "set `with` and `batch.micro_tokens`, and train without a plan"
        raise NeedsError(f"a plan for a model of type {kind!r}", f"its blocks cannot be traced ({found})", do) from None
    return tracer.shape(figures)


class Tracer:
    """Runs one block of each kind of a model, in all modes."""

    def __init__(self, wrapper: HFModel, hf: HF) -> None:
        self.wrapper, self.hf = wrapper, hf
        self.blocks = list(wrapper.blocks.values())
        config, types = wrapper.config, getattr(wrapper.config, "layer_types", None) or ()
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for number, block in enumerate(self.blocks):
            sizes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
            by_kind[type(block), types[number] if number < len(types) else "", sizes].append(number)
        self.kinds = {places[-1]: tuple(places) for places in by_kind.values()}  # others may read the last one's keys
        self.eager = sdpa_obstacle(hf) is not None
        wrapper.maskless = {*types} <= {"full_attention", "sliding_attention"}
        self.config, self.watcher = config, Watcher(set(), LENGTH)
        for number in self.kinds:
            for path, module in self.blocks[number].named_modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(partial(self._enters, number, path))
        self.tuples: int | None = None  # length of the blocks' output tuple, hidden states first; None: unknown

    def _enters(self, number: int, path: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Record the input storage of a linear."""
        local = self.watcher.own(args[0])
        self.watcher.seen[number].inputs[path] = -args[0].untyped_storage()._cdata if local is None else local

    def figures(self) -> dict[Mode, dict[int, Seen]]:
        """Return the traces of one block of each kind in each mode."""
        traces: dict[Mode, dict[int, Seen]] = {}
        for precision in PRECISIONS:
            with FakeTensorMode(allow_non_fake_inputs=True):
                self._fill(torch.bfloat16 if precision == "bfloat16" else torch.float32)
                for attention in ("masked",) if self.eager else ("sdpa", "masked"):
                    self.wrapper.set_attention(attention)
                    for frozen in (False, True) if attention == "sdpa" or self.eager else (False,):
                        self.wrapper.requires_grad_(not frozen)
                        for length in (LENGTH, 2 * LENGTH):
                            mode = Mode(attention, precision, frozen, length)
                            traces[mode] = self._run(mode)
        return traces

    def _fill(self, dtype: torch.dtype) -> None:
        """Give parameters and buffers of the traced parts fake storage, with the types of technique `bf16`."""
        wide = {id(p) for p in uncast(self.wrapper)}
        made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        left = {id(m) for n, block in enumerate(self.blocks) if n not in self.kinds for m in block.modules()}
        for module in self.wrapper.modules():
            if id(module) in left:
                continue
            for name, p in module._parameters.items():
                if p is not None:
                    kind = torch.float32 if id(p) in wide else dtype if p.is_floating_point() else p.dtype
                    fake = torch.empty(p.shape, dtype=kind)
                    module._parameters[name] = made.setdefault(id(p), nn.Parameter(fake, p.is_floating_point()))
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)

    def _run(self, mode: Mode, guesses: tuple[int, ...] = (3, 2)) -> dict[int, Seen]:
        """Run the model in a mode; return the chosen blocks' traces. `guesses`: tuple lengths to try on failure."""
        T, real = mode.length, (p for p in self.wrapper.parameters() if p.device.type != "meta")
        self.watcher = watcher = Watcher({p.untyped_storage()._cdata for p in real}, T)
        places = {id(block): number for number, block in enumerate(self.blocks)}

        def through(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            block = call.__self__  # type: ignore[attr-defined]
            hidden = args[0] if args else kwargs["hidden_states"]
            if (number := places[id(block)]) not in self.kinds:
                return (hidden, *[None] * (self.tuples - 1)) if self.tuples else hidden
            watcher.enter(number, hidden)
            with torch.autograd.graph.saved_tensors_hooks(watcher.keep, lambda t: t):
                out = call(*args, **kwargs)
            watcher.block = -1
            self.tuples = len(out) if isinstance(out, tuple) else 0
            return out

        self.wrapper.block_call = through
        tokens, positions = torch.zeros(1, T, dtype=torch.long), torch.arange(T)[None]
        documents = Documents(torch.tensor([0, T], dtype=torch.int32), torch.zeros(1, T, dtype=torch.int32), T, True)
        hook = self.wrapper.embedding.register_forward_hook(lambda m, i, out: out.detach().requires_grad_().clone())
        half = torch.autocast("cpu", torch.bfloat16) if mode.precision == "autocast" else contextlib.nullcontext()
        try:
            with watcher, half:
                self.wrapper(tokens, positions, documents)
        except Exception:  # if blocks return tuples, the model indexed a tensor instead
            if not guesses:
                raise
            self.tuples = guesses[0]
            return self._run(mode, guesses[1:])
        finally:
            hook.remove()
        if not self.kinds.keys() <= watcher.seen.keys():
            raise NeedsError("a trace of every block", "blocks that were not called", "train without a plan")
        return dict(watcher.seen)

    # --- from traces to the figures of the shape

    def shape(self, found: dict[Mode, dict[int, Seen]]) -> dict[str, Any]:
        """Return the fields of the shape from the traces of all modes."""
        w, c, L, embedding = self.wrapper, self.config, len(self.blocks), cast("nn.Embedding", self.wrapper.embedding)
        base = found[Mode("masked" if self.eager else "sdpa", "float32", False, LENGTH)]
        count = {number: len(places) for number, places in self.kinds.items()}
        attending = sum(n for number, n in count.items() if base[number].attended)
        D, query, groups = int(embedding.weight.shape[-1]), w._query_width if attending else 0, [*self._groups(base)]

        each = [m for number, places in self.kinds.items() for m in len(places) * self._experts(number)]
        fed = max((m.active * m.sizes["down_proj"][1 if m.transposed else 2] for m in each), default=0)

        outputs = sum(sum(g[3].values()) * len(g[4]) for g in groups) + sum(map(_rows, each))

        def number(name: str, default: int) -> int:
            given = getattr(c, name, None) or default
            return int(given if isinstance(given, int) else max(given))

        heads = number("num_attention_heads", 1)
        types, window = getattr(c, "layer_types", None) or (), getattr(c, "sliding_window", None)
        slides = [i for i in range(L) if window and (not types or types[i] == "sliding_attention")]
        widest = max((sum(pieces.values()) for _, _, _, pieces, *_ in groups), default=8 * D)
        return {
            "family": str(text_config(self.hf).get("model_type")), "layers": L, "width": D, "heads": heads,
            "kv_heads": min(number("num_key_value_heads", heads), heads),
            "head_width": max(1, round(query / max(1, attending) / heads)),
            "ff_width": max(number("intermediate_size", widest // 2), fed), "vocab": int(w.head.weight.shape[0]),
            "tied": w.tied, "window": int(window) if window and slides else None, "window_layers": slides,
            "all_parameters": sum(p.numel() for p in w.parameters()),
            "parameters_of_blocks": sum(p.numel() for block in self.blocks for p in block.parameters()),
            "matrices": w._block_matrices, "groups": groups, "query_width": query,
            "stacked": sum(m.weights for m in each), "routed": sum(m.active * m.weights // m.count for m in each),
            "largest": max(p.numel() for p in w.parameters()),
            "adaptable": self._adaptable(D),
            "largest_stack": max((math.prod(size) for m in each for size in m.sizes.values()), default=0),
            "saved": [*self._saved(found, D, outputs)],
            "moved": sum(base[number].moved * n for number, n in count.items()) / LENGTH,
            "launches": sum(base[number].launches * n for number, n in count.items()),
            "softcap": w.head.softcap is not None, "sdpa_obstacle": sdpa_obstacle(self.hf),
        }  # fmt: skip

    def _experts(self, number: int) -> list[TheirExperts]:
        return [m for m in self.blocks[number].modules() if isinstance(m, TheirExperts)]

    def _adaptable(self, width: int) -> tuple[list[int], int, int, int] | None:
        """Return layers, N, k and F of experts that adapters may adapt; None: no experts, or different sizes."""
        experts = {n: self._experts(n) for n in self.kinds}
        sizes = {(m.count, m.active, m.weights // (3 * m.count * width)) for held in experts.values() for m in held}
        pairs = all(len(held) < 2 and all(m.is_pair(width) for m in held) for held in experts.values())
        layers = sorted(i for n, held in experts.items() if held for i in self.kinds[n])
        return (layers, *sizes.pop()) if pairs and len(sizes) == 1 else None

    def _groups(self, base: Mapping[int, Seen]) -> Iterator[tuple[str, str, int, dict[str, int], list[int], bool]]:
        """Yield linears by common input: a name, and the `LinearShape`; "o" has attention's output as its input."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, places in self.kinds.items():
            by: dict[int, list[str]] = defaultdict(list)
            for path, storage in base[number].inputs.items():
                by[storage].append(path)
            for storage, paths in by.items():
                members = [(path.rpartition(".")[2], self.blocks[number].get_submodule(path)) for path in paths]
                pieces = tuple((name, m.out_features) for name, m in members)
                module = "o" if base[number].kind.get(storage) == "attended" else paths[0]
                bias = any(m.bias is not None for _, m in members)
                groups.setdefault((module, members[0][1].in_features, pieces, bias), []).extend(places)
        names: Counter[str] = Counter()
        for (module, width, pieces, bias), layers in groups.items():
            names[module] += 1
            name = module if names[module] == 1 else f"{module} {names[module]}"
            yield name, module, int(width), dict(pieces), sorted(layers), bias

    def _saved(self, traces: Mapping[Mode, Mapping[int, Seen]], width: int, outputs: float) -> Iterator[SavedLine]:
        """Yield the saved values per token of all blocks, by the roles that give its bytes in each precision."""
        attention, L = "masked" if self.eager else "sdpa", len(self.blocks)
        sizes: dict[tuple[str, bool], dict[str, float]] = defaultdict(lambda: dict.fromkeys(PRECISIONS, 0.0))
        for precision in PRECISIONS:
            for key, size in self._sizes(traces, attention, precision).items():
                sizes[key][precision] += size[0]
        kept = outputs - sum(len(places) * self._last(number) for number, places in self.kinds.items())
        stream = float(L * width)
        for kind in KINDS:
            both = {p: sizes[kind, False][p] + sizes[kind, True][p] for p in PRECISIONS}
            late = sizes[kind, True]["float32"] / both["float32"] if both["float32"] else 0.0
            late = 0.0 if kind == "attended" else late
            product, residual, widening, narrowing = _roles(both)
            tags = TAGS[kind]
            if kind == "rest":
                residual = max(0.0, residual - stream)  # a block's input has a separate line
                for role, values in (("product", product), ("residual", residual)):
                    part = min(values, kept)
                    kept -= part
                    yield from _both(f"outputs.{role}", part, role, ("product-output",), late)
                    yield from _both(f"made.{role}", values - part, role, ("fusable",), late)
            else:
                yield from _both(kind, product, "product", tags, late)
                yield from _both(f"{kind}.residual", residual, "residual", tags, late)
            yield from _both(f"{kind}.widened", widening, "widening", (*tags, "widened", "fusable"), late)
            yield from _both(f"{kind}.narrowed", narrowing, "narrowing", (*tags, "fusable"), late)
        eager = {p: [0.0, 0.0] for p in PRECISIONS}
        for precision in PRECISIONS:
            for linear, squared in self._sizes(traces, "masked", precision, frozen=False).values():
                eager[precision][0] += linear
                eager[precision][1] += squared
        for role, values in zip(ROLES, _roles({p: both[1] for p, both in eager.items()}), strict=True):
            yield (f"scores.{role}", values, role, ["heads", "scores"], True)
        more = eager["float32"][0] - sum(size["float32"] for size in sizes.values())
        yield ("spread", 0.0 if self.eager else max(0.0, more / 4), "product", ["heads"], False)

    def _last(self, number: int) -> int:
        """Return the output width of a block's last linear, whose output autograd does not keep."""
        linears = [m for m in self.blocks[number].modules() if isinstance(m, nn.Linear)]
        return int(linears[-1].out_features) if linears else 0

    def _sizes(
        self, traces: Mapping[Mode, Mapping[int, Seen]], attention: str, precision: str, frozen: bool = True
    ) -> dict[tuple[str, bool], tuple[float, float]]:  # fmt: skip
        """Return bytes by (kind, after attention): per token, and per token and token of its row."""
        at: list[dict[tuple[str, bool], float]] = []
        for length in (LENGTH, 2 * LENGTH):
            sums: dict[tuple[str, bool], float] = defaultdict(float)
            full = traces[Mode(attention, precision, False, length)]
            bare = traces[Mode(attention, precision, True, length)] if frozen else full
            for number, places in self.kinds.items():
                seen, others = full[number], bare[number].kept
                for n in seen.kept:
                    key = (seen.what(n, n in others), n in seen.late)
                    sums[key] += len(places) * seen.bytes[n]
            at.append(sums)
        short, long = at
        result = {}
        for key in short.keys() | long.keys():
            a, b = short.get(key, 0.0), long.get(key, 0.0)
            squared = max(0.0, (b - 2 * a) / (2 * LENGTH**2))
            squared = squared if squared * LENGTH > 0.002 * a / LENGTH else 0.0  # otherwise it is a constant per block
            result[key] = (a / LENGTH - squared * LENGTH, squared)
        return result


def _rows(experts: TheirExperts) -> int:
    """Return the number of output values of the matmuls of a token's experts."""
    return experts.active * sum(size[2 if experts.transposed else 1] for size in experts.sizes.values())


def _roles(sizes: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Return the values by `ROLES` that have these bytes in each precision.

    Matmul and residual values have 4 bytes in float32 and 2 in bfloat16; under autocast 2 and 4. Widened values have 2
    more bytes in bfloat16, narrowed values 2 more in both.
    """
    full, half, mixed = (sizes[p] for p in PRECISIONS)
    product, narrowing = min(full / 4, max(0.0, (full - mixed) / 2)), max(0.0, (mixed - full) / 2)
    return product, full / 4 - product, max(0.0, (half - full / 2) / 2 - narrowing), narrowing


def _both(name: str, values: float, role: str, tags: tuple[str, ...], late: float) -> Iterator[SavedLine]:
    """Yield one line for tensors before attention's end, and one for later tensors."""
    yield name, values * (1 - late), role, [*tags], False
    if late * values:
        yield f"{name}.late", values * late, role, [*tags, "mlp"], False
