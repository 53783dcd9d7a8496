"""Build the ledger of a run without techniques: parameters, blocks, head and optimizer of a decoder.

Memory is torch's peak allocation (`torch.cuda.max_memory_allocated`) on one rank. Operators run one at a time, and each
saves for the backward pass the tensors that its formula needs; lines that a compiler fuses away are marked.
The saved values equal torch's own autograd (saved tensors of one block, deduplicated by storage;
tests/unit/test_ledger_oracle.py).

Letters (docs/notation.md): T tokens per row, D width, F feed-forward width, H heads, K key/value heads, E head width,
V vocabulary, L blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

from optrush.models.parts import DeltaShape, ExpertsShape
from optrush.models.shapes import ModelShape
from optrush.models.text_part import PATCHES_TOGETHER
from optrush.models.traced import TracedShape
from optrush.planner import ledger, traced
from optrush.planner.ledger import WAYS, ComputedIn, Entry, Ledger, Line, Live, Role, Rule, Side, Tag, Way, WorkItem
from optrush.planner.optimizer import MOMENTS, MOVED
from optrush.technique import Environment, Part, Rollout, RowImages, Teacher, Technique

DELTA_CHUNK = 64  # tokens per chunk (models/delta_rule.py)
# Host time of an operator with autograd in an uncompiled block, in launches; the highest that fits h200-single-gpu.
# SmolLM2-135M in bf16 was slower: 85,000 tokens/s on a shared host (planned 125,000).
AUTOGRAD = 1.8
SAMPLED = 0.5  # share of the memory rate reached in sampling (docs/log: 1B and 4B on an H200)
CUBLAS_BYTES = 100e6  # torch's workspaces for cuBLAS on a GPU, and batches; measured on an H200
# On a CPU the resident set is counted: the process with Python, torch and a tokenizer, and the C library's heap, which
# keeps freed memory. The factors were fitted to a small model's ladder (Linux, torch 2.13); whole scores, which every
# block allocates and frees, scatter most. Allocations of glibc's largest mmap threshold or more (mallopt(3),
# M_MMAP_THRESHOLD) are returned to the system when they are freed.
PROCESS_BYTES, HEAP, HEAP_OF_SCORES, APART = 4.1e8, 1.4, 4.0, 2**25


def book(
    techniques: Sequence[Technique], env: Environment, shape: ModelShape, padding: float,
    predicted: Sequence[Rule] | None = None,
) -> Ledger:  # fmt: skip
    """Build the ledger of a model and a set of techniques, with all rules applied.

    Args:
        env: settled, with a micro-batch.
        padding: share of a micro-batch's slots without a token, before techniques pack rows.
        predicted: the techniques' rules, if known.
    """
    widths = ledger.BFLOAT16 if env.dtype == "bfloat16" else ledger.FLOAT32
    plain = entries(shape, env.seq, native=env.native, cuda=env.device.kind == "cuda", padding=padding)
    if predicted is None:
        predicted = [rule for t in techniques for rule in t.predict(env)]
    changes = [*_objective(env, shape), *_copied_heads(env, shape), *predicted]
    made = ledger.apply_rules(plain, widths, changes, env.accumulation)
    return ledger.with_copy(made, cuda=env.device.kind == "cuda") if env.copies_saved else made


def books(techniques: Sequence[Technique], env: Environment, shape: ModelShape, padding: float) -> list[Ledger]:
    """Build the ledger of each rank of a pipeline with `book`; one without a pipeline."""
    ranks = range(env.axes.get("pp", 1))
    return [book(techniques, dataclasses.replace(env, pp_rank=rank), shape, padding) for rank in ranks]


@cache  # shared by all sets of a search
def entries(shape: ModelShape, T: int, *, native: bool, cuda: bool, padding: float = 0.0) -> tuple[Entry, ...]:
    """Build lines and work of float32 training with masked attention, whole logits and updates in a loop.

    Args:
        T: tokens per row.
        native: our own decoder, not transformers'.
        padding: share of the slots without a token.
    """
    kept = [*(traced.saved_lines(shape, T) if isinstance(shape, TracedShape) else _block(shape, T, native))]
    last = shape.at(shape.layers - 1)
    if shape.by_layer is not None:
        first, end = ({e.name: e.values for e in _block(s, T, native)} for s in (shape.at(0), last))
        kept = [
            dataclasses.replace(e, ends=(first[e.name] / e.values, end[e.name] / e.values))
            if e.values and e.name in first else e for e in kept
        ]  # fmt: skip
    lines = [*_parameters(shape), *kept, *_working(last, T, cuda), *_head(shape), *_rest(shape, cuda)]
    if not cuda:
        lines = [dataclasses.replace(e, values=e.values * _heap(e, shape, T), side="") for e in lines]
    return (*lines, *_work(shape, T, padding, cuda))


def _heap(line: Line, shape: ModelShape, T: int) -> float:
    if not line.per_token:
        return 1.0
    if "scores" in line.of:  # (B, H, T, T) in float32
        return HEAP_OF_SCORES if 4 * shape.heads * T * T < APART else 1.0
    return HEAP_OF_SCORES if line.name == "saved.spread" else HEAP


def _parameters(s: ModelShape) -> Iterator[Line]:
    """Yield weights, gradients and AdamW's states of each part, and copies of matrices in the matmuls' dtype."""
    vocabulary, outer = s.vocab * s.width, s.parameters - s.block_parameters
    parts: tuple[tuple[str, int, int, tuple[Tag, ...]], ...] = (
        ("blocks", s.block_parameters, s.layers, ("blocks",)),
        ("embedding", vocabulary + s.input_parameters, 1, ("embedding",)),
        ("head", 0 if s.tied else vocabulary, 1, ("head",)),
        ("norm", outer - s.input_parameters - vocabulary * (1 if s.tied else 2), 1, ("norm",)),
    )
    # The gradient of a tied weight begins at the head and ends at the embedding (`_rest`).
    end: ComputedIn = "throughout" if s.tied else "after"
    computed: dict[str, ComputedIn] = {"head": "before", "norm": "before", "embedding": end}
    kinds: tuple[tuple[Literal["weights", "gradients", "states"], Role, Live, float, str], ...] = (
        ("weights", "weight", "always", 1, "a value each"),
        ("gradients", "gradient", "gradient", 1, "a value each, from its backward pass to the update"),
        ("states", "state", "always", MOMENTS, "AdamW: a mean and a mean square each"),
    )
    for kind, role, live, each, note in kinds:
        for part, values, count, whose in parts:
            if values:
                reason, name, of = f"{values:,} parameters: {note}", f"{kind}.{part}", (kind, *whose)
                when = computed.get(part, "block")
                yield Line(name, reason, each * values, role, live, blocks=count, computed=when, of=of)
    note = "copies of the matrices in the products' type, kept until their backward pass"
    yield Line("casts.blocks", note, s.block_matrices, "cast", "saved", blocks=s.layers, of=("casts", "blocks"))
    yield Line("casts.head", note, vocabulary, "cast", "saved", of=("casts", "head"))


def _block(s: ModelShape, T: int, native: bool) -> Iterator[Line]:
    """Yield the tensors that all blocks save for the backward pass; `native`: our own decoder, not transformers'."""
    D, F = s.width, s.active_width

    def saved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> Line:
        return ledger.saved(name, reason, s.layers * values, s.layers, *of, role=role)

    yield ledger.entering(s.layers, D)
    beside, n = s.norms == "beside", len(s.block_norms)
    middle = 0 if beside else D
    yield saved("middle", "what its feed-forward part adds to, D", middle, "stream", "product-output")
    yield saved("middle.wide", "of which float32 is kept where products are narrower", middle, "stream", role="cast")
    inside = n * D if s.norm == "rms" else 0  # a layer norm is one operator, and keeps its input
    note = f"float32 copies of both inside the norms, {n} D"
    yield saved("widened", note, inside, "stream", "widened", "fusable", role="widening")
    note = f"before the norms' weights, {n} D"
    role: Role = "wide" if s.centred else "residual"  # 1 + weight multiplies in float32
    yield saved("normalised", note, inside, "stream", "normalised", "fusable", role=role)
    if s.norms == "after":  # the matmuls read the stream itself
        yield saved("normed", "copies of it for the products, 2 D", 2 * D, "product-input", role="cast")
    else:
        note = f"what enters the products after the norms, {min(n, 2)} D"
        yield saved("normed", note, min(n, 2) * D, "product-input")
    if beside:
        yield saved("normed twice", "and its copy for the second product, D", D, "product-input", role="cast")
    elif s.norms != "before":
        yield saved("leaving", "what enters the norms after both parts, 2 D", 2 * D, "product-output")
    if not native:
        note = "autocast copies it for each product that reads it, 3 D"
        yield saved("normed again", note, 3 * D, "fusable", role="cast")
    yield from _attention(s, T, native)
    if s.input_width:
        yield from _inputs(s)
    if s.delta is not None:
        yield from _delta_rule(s.delta, len(s.delta.layers))
    yield saved("gate_up", "gate and up, 2 F; without a gate F", s.fed, "mlp", "product-output")
    yield saved("gated", "the gate after its activation, F", 0 if s.gateless else F, "mlp", "fusable")
    yield saved("product", "what enters the down product, F", F, "mlp", "product-input")
    if s.experts is not None:
        yield from _routed(s, s.experts)


def _inputs(s: ModelShape) -> Iterator[Line]:
    """Yield the tensors saved because of per-layer inputs, and for computing those."""
    D, P = s.width, s.input_width

    def saved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> Line:
        return ledger.saved(f"inputs.{name}", reason, s.layers * values, s.layers, *of, role=role)

    yield saved("stream", "what enters the gate of an input, D", D, "product-input")
    yield saved("gate", "its gate before and after the activation, and the input, 3 P", 3 * P)
    yield saved("product", "what enters the product after it, P", P, "product-input")
    yield saved("leaving", "what enters the norm after that, D", D, "product-output")
    yield saved("widened", "float32 copies inside the norms, D + P", D + P, "widened", "fusable", role="widening")
    yield saved("normalised", "before these norms' weights, D + P", D + P, "normalised", "fusable", role="residual")


def _working(s: ModelShape, T: int, cuda: bool) -> Iterator[Line]:
    """Yield the temporary tensors of one block."""

    def working(name: str, reason: str, values: float, role: Role, live: Live, *of: Tag, side: Side = "") -> Line:
        return Line(f"working.{name}", reason, values, role, live, True, side=side, of=("fusable", *of))

    scores = s.heads * T
    note = "scores before the softmax, masked and not, 2 H T"
    yield working("scores.forward.held", note, 2 * scores, "wide", "forward", "heads", "scores")
    # CUDA's backward softmax first multiplies them by the probabilities, torch 2.11 (tests/gpu/test_kernels.py).
    copies = 3 if cuda else 2
    note = f"gradients of the scores, {copies} H T"
    yield working("scores.backward.held", note, copies * scores, "wide", "backward", "heads", "scores", side="scores")
    yield working("forward", "gate, up and their product in flight, 2 F", s.fed, "product", "forward", "mlp")
    note = "gradients of gate and up, 2 F"
    yield Line("feed.gradients", note, s.fed, "product", "backward", True, side="feed", of=("mlp",))


def _attention(s: ModelShape, T: int, native: bool) -> Iterator[Line]:
    """Yield the tensors that attention saves, averaged over all layers, those without attention too."""
    q, kv, first = (
        s.queries,
        s.key_width,
        sum(x.outputs * len(x.layers) for x in s.linears.values() if x.module == "qkv"),
    )

    def saved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> Line:
        return ledger.saved(name, reason, s.attention_layers * values, s.layers, *of, role=role)

    def normed(share: float) -> Iterator[Line]:
        yield saved("entering heads", "queries and keys before their norms, (H + K) E", share * (q + kv))
        if native:
            beside = min(kv, first / s.attention_layers - q - kv)  # less if keys are the values
            note = "the values beside them, K E, where one product is kept whole"
            yield saved("joined heads", note, share * max(0.0, beside))
        note = "1 / rms of each query and key head, H + K"
        yield saved("scales of heads", note, share * (2 if s.whole_qk_norm else s.heads + s.kv_heads), role="wide")
        note = "what one operator at a time copies of them where products are narrower, (H + K) E"
        yield saved("widened heads", note, share * (q + kv), "widened", "fusable", role="narrowing")

    if s.chunks is not None and s.chunks.normed:
        yield from normed((s.layers - len(s.chunks.unrotated)) / s.layers)
    if s.qk_norm:
        yield from normed(1.0)
        note = "before the weights of these norms, (H + K) E"
        yield saved("normalised heads", note, q + kv, "normalised", "fusable")
    if s.value_norm:
        note = "what float32 copies of keys and values add inside their norms, K E"
        yield saved("widened values", note, kv, "widened", "fusable", role="narrowing")
    if (latent := s.latent) is not None:
        ranks = latent.kv_rank + (latent.q_rank or 0)
        yield saved("entering heads", "what enters the norms of latents", ranks + latent.rotated, role="residual")
        note = "float32 copies inside these norms"
        yield saved("widened heads", note, ranks, "widened", "fusable", role="widening")
        note = "before these norms' weights"
        yield saved("normalised heads", note, ranks, "normalised", "fusable", role="residual")
        yield saved("latents", "what enters the products after these norms", ranks, "product-input")
    yield saved("heads", "queries, keys and values, (H + 2 K) E", q + 2 * kv, "heads", "product-output")
    yield saved("spread", "keys and values repeated for each query head, 2 (H - K) E", 2 * s.repeated, "heads")
    if s.score_cap is not None:
        note = "scores bounded by a tanh, H T"
        yield saved("scores.capped.held", note, s.heads * T, "heads", "scores", "fusable")
    yield saved("scores.held", "probabilities, H T, in float32", s.heads * T, "heads", "scores", role="wide")
    note = "probabilities again, in the products' type"
    yield saved("scores.cast.held", note, s.heads * T, "heads", "scores", "fusable", role="narrowing")
    note = "what enters the output product, H E"
    yield saved("attended", note, s.attended_width, "heads", "attention-output", "product-input")
    if s.gated:
        note = "the gate of its output, its sigmoid, and what that multiplies, 3 H E"
        yield saved("output gate", note, 3 * s.attended_width, "heads")


def _copied_heads(env: Environment, s: ModelShape) -> Iterator[Rule]:
    """Yield copies of queries and keys for their norms; a compiler saves the plain product instead.

    Compared with torch's partitioner in tests/unit/test_ledger_oracle.py.
    """
    normed = s.qk_norm or (s.chunks is not None and s.chunks.normed)
    plain = Part.COMPILED in env.claimed and env.spec.linears["qkv"].adapter == "none"
    if env.native and normed and not plain and not isinstance(s, TracedShape):
        yield ledger.live("saved.joined heads", "queries and keys are kept as copies", gone=True)


def _routed(s: ModelShape, e: ExpertsShape) -> Iterator[Line]:
    """Yield the tensors that layers with experts save in addition to dense layers, and their temporaries."""
    D, share, k = s.width, len(e.layers) / s.layers, e.active

    def saved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> Line:
        return ledger.saved(name, reason, s.layers * values, s.layers, "experts", *of, role=role)

    if e.beside:
        yield saved("apart", "what enters and leaves the norms of both parts, 3 D", share * 3 * D)
        note = "float32 copies inside these norms and that of the router, 4 D"
        yield saved("widened again", note, share * 4 * D, "widened", "fusable", role="widening")
        note = "before the weights of these norms, 3 D"
        yield saved("normalised again", note, share * 3 * D, "normalised", "fusable", role="residual")
    yield saved("routed", "rows of a token's experts, k D", share * k * D, "product-input")
    if e.scaled_input:
        yield saved("weighed", "these rows before their experts' weights, k D", share * k * D)
    else:
        yield saved("weighed", "the activation before its expert's weight, k F", s.active_width)
    note = "a float32 copy of what enters the router, D"
    yield saved("entering router", note, share * 2 * D, "widened", role="widening")
    note = "logits, probabilities and places of a token's experts, 2 N + 6 k"
    yield saved("router", note, share * (2 * e.count + 6 * k), role="wide")
    note = "rows of a token's experts in flight, 2 k D"
    yield Line("working.rows", note, 2 * share * k * D, "product", "forward", True, of=("experts",))
    yield Line("feed.rows", note, 2 * share * k * D, "product", "backward", True, side="feed", of=("experts",))


def _delta_rule(d: DeltaShape, layers: int) -> Iterator[Line]:
    """Yield the tensors that layers with a delta rule save under torch's operators (models/delta_rule.py)."""

    def saved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> Line:
        return ledger.saved(f"rule.{name}", reason, layers * values, layers, "delta", *of, role=role)

    yield saved("taps", "what enters the convolution, once a tap", d.taps * d.channels)
    yield saved("mixed", "what leaves the convolution", d.channels)
    yield saved("pairs", "products of two tokens of a chunk, 5 H C", 5 * d.heads * DELTA_CHUNK, role="wide")
    note = "queries, keys and values of a chunk, and what its system gives, H (6 E + 3 W)"
    states = d.heads * d.key * d.value / DELTA_CHUNK
    heads = d.heads * (6 * d.key + 3 * d.value) + 2 * d.key_heads * d.key + states
    yield saved("heads", note, heads, role="wide")
    yield saved("gated", "what the norm and the gate keep, H W each", 3 * d.heads * d.value, role="wide")
    yield saved("gate", "the gate of what the rule gives, H W", d.heads * d.value)
    yield saved("leaves", "what enters the output product, H W", d.heads * d.value, "product-input")


def _head(s: ModelShape) -> Iterator[Line]:
    """Yield the tensors of the head and the loss: their inputs, the logits and gradients."""
    D, V = s.width, s.vocab

    def line(name: str, reason: str, values: float, role: Role, live: Live, *of: Tag) -> Line:
        return Line(f"head.{name}", reason, values, role, live, True, of=("loss", *of))

    yield line("input", "the last norm's input and its copy, 2 D", 2 * D, "residual", "saved", "stream")
    yield line("hidden", "what enters the head, D", D, "product", "saved")
    yield line("hidden gradient", "the gradient that leaves the head, D", D, "residual", "backward")
    yield ledger.at_head("logits", "V, and their gradient in their place", V, "product", "logits")
    note = "the softmax and two gradients of it, 2 V in float32"
    yield ledger.at_head("logits.eager", note, 2 * V, "wide", "logits", "fusable")
    note = "and where logits are narrower, what makes them 3 V in float32"
    yield ledger.at_head("logits.cast.eager", note, V, "narrowing", "logits", "fusable")
    if s.softcap:
        note = "logits divided by their cap, and what tanh makes of them, 2 V"
        yield ledger.at_head("logits.capped", note, 2 * V, "product", "logits", "fusable")


def _rest(s: ModelShape, cuda: bool) -> Iterator[Line]:
    """Yield the memory of a tied weight's gradients, the update, rotary angles, the batch and the runtime."""
    # A tied weight has two gradients: the head's stays in memory until the embedding's, the last one, is added.
    values = s.vocab * s.width if s.tied else 0
    reason = "the embedding's own gradient, V D, beside the head's"
    yield Line("tied.embedding", reason, values, "gradient", "end", of=("tied",))
    yield Line("tied.sum", "and their sum, where it is not made in place, V D", values, "gradient", "end", of=("tied",))
    experts = 1 if s.experts is None else s.experts.count
    words = 0 if s.by_layer is None else s.by_layer.input_words * s.layers * s.input_width
    largest = max(s.vocab * s.width, words, experts * s.width * 2 * (s.experts or s).ff_width)
    largest = s.largest if isinstance(s, TracedShape) else largest
    reason = "two temporaries of the largest parameter"
    yield Line("update.loop", reason, 2 * largest, "weight", "update", of=("update",))
    yield Line("angles", "cosines and sines, 2 E", 2 * s.rotated_width, "residual", "always", True)
    reason = "the gradient that enters the embedding, D"
    yield Line("stream gradient", reason, s.width, "residual", "end", True, of=("stream",))
    yield Line("batch", "tokens, labels, positions, documents", 28, "byte", "always", True)
    if cuda:
        yield Line("runtime", "workspaces of the products' library", CUBLAS_BYTES, "byte", "always")
    else:
        yield Line("runtime", "the process itself: Python, torch, transformers", PROCESS_BYTES, "byte", "always")


def _work(s: ModelShape, T: int, padding: float, cuda: bool) -> Iterator[WorkItem]:
    """Yield the work of a step: padding, blocks, head, casts and the update."""
    D, F, V, L = s.width, s.active_width, s.vocab, s.layers
    o = sum(linear.weights for linear in s.linears.values() if linear.module in ("o", "delta.out_proj")) / L
    mixing = sum(linear.weights for linear in s.linears.values() if linear.module not in ("gate_up", "down")) / L
    eager = "the same one operator at a time"
    yield WorkItem("padding", "slots that hold no token", "token", padding=padding)
    matrices = {"qkv": L * (mixing - o), "o": L * o, "gate_up": L * D * s.fed, "down": L * F * D}
    for name, weights in (traced.matrices(s) if isinstance(s, TracedShape) else matrices).items():
        for way, each in zip(WAYS, (2, 4), strict=True):
            reason = f"{each} FLOP per weight of the blocks"
            yield WorkItem(f"{way}.{name}", reason, "token", each * weights, of=(way, "products"))
    for way in WAYS:
        yield from _between_products(s, T, way, cuda)
    if s.delta is not None:
        yield from _delta_rule_work(s.delta, T)
    if s.experts is not None:
        yield from _experts_work(s, s.experts)
    yield WorkItem("head.products", "6 FLOP per weight of the head", "token", 6 * D * V, of=("loss",))
    reason = "logits, their softmax and their gradients"
    yield WorkItem("head.moved", reason, "token", values=4 * V, role="wide", of=("loss",))
    yield WorkItem("head.eager", eager, "token", values=6 * V, role="wide", of=("loss", "fusable"))
    reason = "weights read, their copies written"
    yield WorkItem("casts", reason, "micro", values=1.5 * (s.block_matrices + D * V), role="cast")
    reason = "weights, gradients, states: read and written"
    yield WorkItem("update", reason, "step", values=MOVED * s.parameters, role="weight", of=("update",))
    values, launches = 11 * s.parameters, 14 * (L * 9 + 2)
    yield WorkItem("update.loop", eager, "step", values=values, role="weight", launches=launches, of=("update",))
    reason = "gradients read for their norm"
    yield WorkItem("norm", reason, "step", values=s.parameters, role="gradient", of=("update",))


def _between_products(s: ModelShape, T: int, way: Way, cuda: bool) -> Iterator[WorkItem]:
    """Yield the work of attention and of elementwise operators between the matmuls, in one pass."""
    L, back, q = s.layers, way == "backward", s.queries

    def moved(name: str, reason: str, values: float, *of: Tag, role: Role = "product") -> WorkItem:
        return WorkItem(f"{way}.{name}", reason, "token", values=values, role=role, of=(way, *of))

    flop = 2 * T * (q + s.attended_width) * s.attention_layers  # of a query: with a key, and with a value
    note, times = ("8 T H E a block", 2) if back else ("every score, masked or not: 4 T H E a block", 1)
    yield WorkItem(f"{way}.scores", note, "token", times * flop, of=(way, "attention"))
    scores, note = s.heads * T * s.attention_layers, "scores written, scaled, masked, made probabilities, cast, read"
    note = "gradients of the scores, likewise" if back else note
    yield moved("scores.moved", note, (11 if back else 10) * scores, "scores", role="wide")
    note = "the stream between blocks, read by norms and sums and written by sums" + ", and its gradient" * back
    norms = len(s.block_norms) - 2
    passes = (9 if back else 5) + (6 if back else 4) * norms / 2
    yield moved("elementwise.stream", note, L * passes * s.width, "elementwise", role="residual")
    each = s.width + 2 * (q + s.key_width) + (6 if back else 3) * s.active_width
    yield moved("elementwise", "norms, rotation, gating", L * each, "elementwise")
    note = "the same one operator at a time"
    values, operators = 75.0 * L * s.width, 45.0
    if isinstance(s, TracedShape):
        values, operators = max(0.0, traced.UNEVEN * s.moved - L * (5 * s.width + each)), s.launches / L
    yield moved("eager", note, times * values, "elementwise", "fusable", role="plain")
    launches = times * operators * L * (AUTOGRAD if cuda else 1.0)
    yield ledger.launched(way, "launches", f"about {times * operators:.0f} operators a block", launches, "fusable")


def _delta_rule_work(d: DeltaShape, T: int) -> Iterator[WorkItem]:
    layers, E, W, C = len(d.layers), d.key, d.value, DELTA_CHUNK
    flop = 2.0 * d.heads * (2 * C * E + C * (E + W) / 2 + C * W + 3 * E * W) * layers
    values, chunks = layers * (4.0 * d.channels + d.heads * (5 * C + 9 * E + 6 * W)), layers * T / C
    for way, times in zip(WAYS, (1, 2), strict=True):
        again = ", twice" * (times - 1)
        reason = f"products of a chunk, its system, and the state{again}"
        yield WorkItem(f"{way}.rule", reason, "token", times * flop, of=(way, "delta"))
        reason = f"what a chunk reads and writes{again}"
        yield WorkItem(f"{way}.rule.moved", reason, "token", values=times * values, role="wide", of=(way, "delta"))
        reason = f"{6 * times} kernel launches per chunk of a row"
        yield ledger.launched(way, "rule.launches", reason, 6 * times * chunks, "delta")


def _experts_work(s: ModelShape, e: ExpertsShape) -> Iterator[WorkItem]:
    D, sparse, k = s.width, len(e.layers), e.active
    for way, each in zip(WAYS, (2, 4), strict=True):
        note = f"{each} FLOP per weight of the routers"
        yield WorkItem(f"{way}.router", note, "token", each * sparse * D * e.count, of=(way, "experts"))
    for way, each in zip(WAYS, (2, 4), strict=True):
        # torch's grouped matmul reaches some 0.83 of a single one's rate (551 to 714 TFLOP/s at 30B-A3B's shapes).
        note, flop = "products of groups of rows, slower than one product", each / 10 * 6 * k * e.ff_width * D * sparse
        yield WorkItem(f"{way}.grouped", note, "token", flop, of=(way, "experts", "products"))
    for way, rows in zip(WAYS, (11, 12), strict=True):
        # Three times the moved bytes: sorting, and gathered rows, which reach half of the memory rate
        # (benchmarks/results/h100-experts.jsonl: a layer without its matmuls).
        note, values = "rows put in the order of experts, and their sums", sparse * rows * k * D
        yield WorkItem(f"{way}.rows", note, "token", values=values, role="product", of=(way, "experts"))


def _teacher(teacher: Teacher, shape: ModelShape) -> Iterator[Rule]:
    """Yield the memory and work of a frozen second model, whose logits are computed in chunks."""
    chunk = teacher.chunk
    yield ledger.live(ledger.tagged("logits"), "of one chunk at a time", most_tokens=chunk)
    reason = "probabilities of both models and their difference, of a chunk, 4 V in float32"
    yield ledger.add(ledger.at_head("compared", reason, 4 * shape.vocab, "wide", most_tokens=chunk))
    yield ledger.head_gradient()
    if teacher.stored is not None:
        reason = f"the teacher's {teacher.stored} most likely tokens for each target, which take the same bytes on disk"
        yield ledger.add(Line("teacher.stored", reason, teacher.record_bytes, "byte", "always", True))
        return
    if teacher.shape is None:
        return
    t = teacher.shape
    reason = f"{t.parameters:,} frozen parameters of the teacher, {teacher.width_bytes} bytes each"
    yield ledger.add(Line("teacher", reason, t.parameters * teacher.width_bytes, "byte", "always"))
    reason = "the teacher's forward pass, 2 a weight of its matrices and head"
    flop = 2.0 * (t.block_matrices + t.vocab * t.width)
    yield ledger.add(WorkItem("forward.teacher", reason, "token", flop))


def _rollout(r: Rollout, env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """Yield the memory of sampling, reserved for the whole run, and its time if every answer has the maximum length.

    One token of all slots reads every weight, and the keys and values of every slot.
    """
    token, steps = 2 * shape.key_width * shape.layers, math.ceil(r.answers / r.slots) * r.most
    reason = f"keys and values of {r.slots:,} answers, of {r.room:,} tokens each with their prompts"
    yield ledger.add(Line("rollout.cache", reason, token * (r.slots + 1) * r.room, "product", "always"))
    yield ledger.add(Line("rollout.logits", "logits of a token of each", r.slots * shape.vocab, "product", "always"))
    reason = "the same in float32; ids, log-probabilities and entropies of their tokens"
    yield ledger.add(Line("rollout.answers", reason, r.slots * (4 * shape.vocab + 16 * r.most), "byte", "always"))
    if gathered := "dp" in env.sharded:  # sampling keeps no activations, like the update
        reason = "weights of other ranks, gathered whole while answers are sampled"
        others = shape.parameters * (1 - 1 / env.data_ranks)
        yield ledger.add(Line("rollout.gathered", reason, others, "product", "update"))
    reason = f"every weight, read for each of {steps:,} tokens"
    role: Role = "product" if gathered else "weight"
    yield ledger.add(WorkItem("rollout.weights", reason, "step", values=steps * shape.parameters / SAMPLED, role=role))
    if not gathered:  # gathering casts the weights once
        yield ledger.add(WorkItem("rollout.casts", reason, "step", values=2 * steps * shape.parameters, role="cast"))
    if any(linear.weight == "quantized" for linear in env.spec.linears.values()):
        reason, made = "quantised matrices, written for each token as products read them", steps * shape.block_matrices
        yield ledger.add(WorkItem("rollout.dense", reason, "step", values=made, role="product"))
    reason, launches = "keys and values of every token before it", steps * (1 if env.native else 45 * env.blocks)
    read = token * min(r.slots, r.answers) * (r.room - r.most / 2) / SAMPLED
    yield ledger.add(WorkItem("rollout.cache", reason, "step", values=steps * read, role="product", launches=launches))


def _tower(images: RowImages, env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """Yield the memory and work of the vision tower."""
    t, trained, each = images.tower, images.trained, images.patches
    frozen = t.parameters - trained
    if images.part == "none":
        note = f"{t.parameters:,} parameters that read images, frozen, in the products' type"
        yield ledger.add(Line("tower", note, t.parameters, "product", "always"))
    else:
        note = f"{t.parameters:,} parameters that read images, {frozen:,} of them frozen"
        yield ledger.add(Line("weights.tower", note, t.parameters, "weight", "always", of=("weights", "tower")))
        note = "of what is trained of the tower"
        yield ledger.add(
            Line("gradients.tower", note, trained, "gradient", "gradient", computed="after", of=("gradients", "tower"))
        )
        yield ledger.add(Line("states.tower", note, MOMENTS * trained, "state", "always", of=("states", "tower")))
        yield ledger.add(WorkItem("update.tower", note, "step", values=MOVED * trained, role="weight", of=("update",)))
    many = images.largest
    if env.device.kind == "cuda":
        many = max(many, min(PATCHES_TOGETHER, each * env.micro_rows * env.seq))
    note = f"what the tower has in flight of {many:,.0f} patches, before the first block"
    yield ledger.add(Line("tower.flight", note, many * 2 * (t.width + t.inner), "product", "update"))
    note = "features of images, before and behind the first blocks"
    features = each / t.merge * t.outputs * shape.width
    yield ledger.add(Line("tower.features", note, features, "product", "forward", True))
    if images.part == "tower":
        note = "what enters the tower's blocks, which run again in the backward pass"
        yield ledger.add(Line("tower.kept", note, each * t.depth * t.width, "product", "always", True))
        note = "one block of the tower in its backward pass"
        yield ledger.add(Line("tower.block", note, each * (14 * t.width + 4 * t.inner), "product", "end", True))
    elif images.part == "projector":
        note = "what the projector keeps of a placeholder"
        kept = each / t.merge * t.outputs * 4 * t.merge * t.width
        yield ledger.add(Line("tower.kept", note, kept, "product", "always", True))
    passes = {"none": 1.0, "projector": 1.0, "tower": 4.0}[images.part]
    note = f"the tower's products and attention, {each:.2f} patches a token"
    flop = passes * t.flops(each, images.mean) + 4.0 * each / t.merge * t.projector * (images.part == "projector")
    moved = passes * each * t.depth * (30 * t.width + 6 * t.inner)
    yield ledger.add(WorkItem("tower.passes", note, "token", flop, values=moved, role="product", of=("forward",)))
    launches = passes * t.depth * (22 + 3 * each / images.mean * env.micro_rows * env.seq)
    note = "operators of the tower, of attention one an image"
    yield ledger.add(WorkItem("tower.launches", note, "micro", launches=launches, of=("forward", "launches")))


def _objective(env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """Yield the work that the objective adds to one forward and one backward pass."""
    if env.rollout is not None and not env.rollout.served and env.device.kind == "cuda":
        yield from _rollout(env.rollout, env, shape)
    if env.teacher is not None:
        yield from _teacher(env.teacher, shape)
    if env.images is not None:
        yield from _tower(env.images, env, shape)
    flop = 2 * shape.width * shape.vocab
    if env.by_token and not env.scored and Part.HEAD in env.claimed:
        reason = "losses token by token: a chunk's logits are made again in the backward pass, 2 a weight of the head"
        yield ledger.add(WorkItem("head.again", reason, "token", flop, of=("loss",)))
    if env.scored:
        reason = "a score of each token, in place of logits"
        yield ledger.live(ledger.tagged("loss"), reason, gone=True)
        yield ledger.live(ledger.tagged("tied") if shape.tied else ledger.tagged("head"), reason, gone=True)
        if shape.tied:
            yield ledger.live("casts.head", reason, gone=True)
        return
    if env.reference not in (None, "precomputed") and env.spec.adapters_removable:
        yield ledger.live(ledger.tagged("forward"), "and a pass of the reference, without adapters", times=2)
        reason = "the head in that pass, 2 FLOP per weight"
        yield ledger.add(WorkItem("reference.head", reason, "token", flop, of=("loss",)))
