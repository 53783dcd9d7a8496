"""Build the ledger of a run without techniques: parameters, blocks, head and optimizer of a decoder.

Memory is what torch has allocated at once (as `torch.cuda.max_memory_allocated` counts it) on one rank. Operators run
one at a time, and each keeps for the backward pass what its formula needs; lines that a compiler fuses away are marked.
The saved values equal torch's own autograd (saved tensors of one block, deduplicated by storage;
tests/unit/test_ledger_oracle.py).

Letters as everywhere: T tokens a row, D width, F feed-forward width, H heads, K key/value heads, E head width, V
vocabulary, L blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache

from optrush.models.shapes import DeltaShape, ExpertsShape, ModelShape
from optrush.planner import ledger
from optrush.planner.ledger import ComputedIn, Entry, Ledger, Line, Live, Role, Rule, Side, WorkItem
from optrush.planner.optimizer import MOMENTS, MOVED
from optrush.technique import Environment, Part, Teacher, Technique

DELTA_CHUNK = 64  # tokens a chunk (models/delta_rule.py)
CUBLAS_BYTES = 100e6  # workspaces that torch gives cuBLAS on a GPU, and batches; measured on an H200
# On a CPU the resident set is counted: the process with Python, torch and a tokenizer, and the C library's heap, which
# keeps more than is in use. The factors were fitted to a small model's ladder (Linux, torch 2.13); whole scores, which
# are allocated and freed in every block, scatter most. An allocation as large as glibc's largest threshold for memory
# of its own (mallopt(3), M_MMAP_THRESHOLD) is returned to the system when it is freed.
PROCESS_BYTES, HEAP, HEAP_OF_SCORES, APART = 4.1e8, 1.4, 4.0, 2**25


def book(
    techniques: Sequence[Technique], env: Environment, shape: ModelShape, padding: float,
    predicted: Sequence[Rule] | None = None,
) -> Ledger:  # fmt: skip
    """Build the ledger of a model and a set of techniques, with all rules applied.

    Args:
        env: settled, with a micro-batch.
        padding: share of the slots of a micro-batch that hold no token, before techniques pack rows.
        predicted: the techniques' rules, where they are known.
    """
    widths = ledger.BFLOAT16 if env.dtype == "bfloat16" else ledger.FLOAT32
    plain = entries(shape, env.seq, native=env.native, cuda=env.device.kind == "cuda", padding=padding)
    if predicted is None:
        predicted = [rule for t in techniques for rule in t.predict(env)]
    changes = [*_objective(env, shape), *predicted]
    made = ledger.apply_rules(plain, widths, changes, env.accumulation)
    return ledger.with_copy(made, cuda=env.device.kind == "cuda") if env.copies_saved else made


def books(techniques: Sequence[Technique], env: Environment, shape: ModelShape, padding: float) -> list[Ledger]:
    """Build the ledger of each rank of a pipeline as `book` does; one where there is none."""
    ranks = range(env.axes.get("pp", 1))
    return [book(techniques, dataclasses.replace(env, pp_rank=rank), shape, padding) for rank in ranks]


@cache  # one for all sets of a search
def entries(shape: ModelShape, T: int, *, native: bool, cuda: bool, padding: float = 0.0) -> tuple[Entry, ...]:
    """Build lines and work of float32 training with masked attention, whole logits and updates in a loop.

    Args:
        T: tokens a row.
        native: our own decoder, not transformers'.
        padding: share of the slots that hold no token.
    """
    lines = [*_parameters(shape), *_block(shape, T, native, cuda), *_head(shape), *_rest(shape, cuda)]
    if not cuda:
        lines = [dataclasses.replace(e, values=e.values * _heap(e, shape, T), side="") for e in lines]
    return (*lines, *_work(shape, T, native, padding))


def _heap(line: Line, shape: ModelShape, T: int) -> float:
    if not line.per_token:
        return 1.0
    if "scores" in line.name:  # (B, H, T, T) in float32
        return HEAP_OF_SCORES if 4 * shape.heads * T * T < APART else 1.0
    return HEAP_OF_SCORES if "spread" in line.name else HEAP


def _parameters(s: ModelShape) -> Iterator[Line]:
    head = 0 if s.tied else s.vocab * s.width
    embedding = s.vocab * s.width
    blocks = s.block_parameters
    matrices = s.block_matrices
    parts = (("blocks", blocks, s.layers), ("embedding", embedding, 1), ("head", head, 1), ("norm", s.width, 1))
    # The gradient of a tied weight begins at the head and ends at the embedding (`_rest`).
    end: ComputedIn = "throughout" if s.tied else "after"
    computed: dict[str, ComputedIn] = {"head": "before", "norm": "before", "embedding": end}
    kinds: tuple[tuple[str, Role, Live, float, str], ...] = (
        ("weights", "weight", "always", 1, "a value each"),
        ("gradients", "gradient", "gradient", 1, "a value each, from its backward pass to the update"),
        ("states", "state", "always", MOMENTS, "AdamW: a mean and a mean square each"),
    )
    for kind, role, live, each, why in kinds:
        for part, values, count in parts:
            if values:
                reason = f"{values:,} parameters: {why}"
                when = computed.get(part, "block")
                yield Line(f"{kind}.{part}", reason, each * values, role, live, blocks=count, computed=when)
    why = "copies of the matrices in the products' type, kept until their backward pass"
    yield Line("casts.blocks", why, matrices, "cast", "saved", blocks=s.layers)
    yield Line("casts.head", why, s.vocab * s.width, "cast", "saved")


def _block(s: ModelShape, T: int, native: bool, cuda: bool) -> Iterator[Line]:
    D, F, q, kv = s.width, s.active_width, s.heads * s.head_width, s.key_width

    def saved(name: str, reason: str, values: float, role: Role, fusable: bool = False, side: Side = "") -> Line:
        values *= s.layers
        return Line(f"saved.{name}", reason, values, role, "saved", True, s.layers, fusable=fusable, side=side)

    yield Line("input", "what enters a block, D", s.layers * D, "residual", "saved", True, s.layers)
    yield saved("middle", "what its feed-forward part adds to, D", D, "product")
    yield saved("middle.wide", "of which float32 is kept where products are narrower", D, "cast")
    yield saved("widened", "float32 copies of both inside the norms, 2 D", 2 * D, "widening", True)
    yield saved("normalised", "before the norms' weights, 2 D", 2 * D, "residual", True)
    yield saved("normed", "what enters the products after the norms, 2 D", 2 * D, "product")
    if not native:
        yield saved("normed again", "autocast copies it for each product that reads it, 3 D", 3 * D, "cast", True)
    full = s.attention_layers / s.layers  # share of the layers that have attention

    def attention(name: str, reason: str, values: float, role: Role, fusable: bool = False) -> Line:
        return saved(name, reason, full * values, role, fusable)

    if s.chunks is not None and s.chunks.normed:
        share = (s.layers - len(s.chunks.unrotated)) / s.layers
        why = "what enters the norms of queries and keys, (H + K) E"
        yield attention("entering heads", why, share * (q + kv), "residual", True)
        yield attention("widened heads", "float32 copies inside these norms", share * (q + kv), "widening", True)
    if s.qk_norm:
        why = "what enters the norms of queries and keys, (H + K) E"
        yield attention("entering heads", why, q + kv, "residual", True)
        yield attention("widened heads", "float32 copies inside these norms, (H + K) E", q + kv, "widening", True)
        yield attention("normalised heads", "before these norms' weights, (H + K) E", q + kv, "residual", True)
    if (latent := s.latent) is not None:
        ranks = latent.kv_rank + (latent.q_rank or 0)
        entering = ranks + latent.rotated
        yield attention("entering heads", "latents before their norms, and the shared key", entering, "residual")
        yield attention("widened heads", "float32 copies inside these norms", ranks, "widening", True)
        yield attention("normalised heads", "before these norms' weights", ranks, "residual", True)
        yield attention("latents", "what enters the products after these norms", ranks, "product")
    yield attention("heads", "queries, keys and values, (H + 2 K) E", q + 2 * kv, "product")
    why, spread = "keys and values repeated for each query head, 2 (H - K) E", (s.heads - s.kv_heads) * s.head_width
    yield attention("spread", why, 2 * spread, "product")
    yield attention("scores.held", "probabilities, H T, in float32", s.heads * T, "wide")
    yield attention("scores.cast.held", "probabilities again, in the products' type", s.heads * T, "narrowing", True)
    yield attention("attended", "what enters the output product, H E", s.attended_width, "product")
    if s.gated:
        why = "the gate of its output, its sigmoid, and what that multiplies, 3 H E"
        yield attention("output gate", why, 3 * s.attended_width, "product")
    if s.delta is not None:
        yield from _delta_rule(s.delta, len(s.delta.layers))
    yield saved("gate_up", "gate and up, 2 F", 2 * F, "product", side="feed")
    yield saved("gated", "the gate after its activation, F", F, "product", True, "feed")
    yield saved("product", "what enters the down product, F", F, "product", side="feed")

    if s.experts is not None:
        yield from _routed(s, s.experts)

    def working(name: str, reason: str, values: float, role: Role, live: Live, side: Side = "") -> Line:
        return Line(f"working.{name}", reason, values, role, live, True, fusable=True, side=side)

    scores = s.heads * T
    yield working(
        "scores.forward.held", "scores before the softmax, masked and not, 2 H T", 2 * scores, "wide", "forward"
    )
    # CUDA's backward softmax makes their product with the probabilities first, torch 2.11 (tests/gpu/test_kernels.py).
    copies = 3 if cuda else 2
    why = f"gradients of the scores, {copies} H T"
    yield working("scores.backward.held", why, copies * scores, "wide", "backward", "scores")
    yield working("forward", "gate, up and their product in flight, 2 F", 2 * F, "product", "forward")
    yield Line("feed.gradients", "gradients of gate and up, 2 F", 2 * F, "product", "backward", True, side="feed")


def _routed(s: ModelShape, e: ExpertsShape) -> Iterator[Line]:
    """Yield what layers with experts save besides what dense layers save, and what is in flight there."""
    D, share, k = s.width, len(e.layers) / s.layers, e.active

    def saved(name: str, reason: str, values: float, role: Role) -> Line:
        return Line(f"saved.{name}", reason, values * s.layers, role, "saved", True, s.layers, side="feed")

    yield saved("routed", "rows of a token's experts, k D", share * k * D, "product")
    if e.scaled_input:
        yield saved("weighed", "these rows before their experts' weights, k D", share * k * D, "product")
    else:
        yield saved("weighed", "the activation before its expert's weight, k F", s.active_width, "product")
    yield saved("entering router", "a float32 copy of what enters the router, D", share * 2 * D, "widening")
    why = "logits, probabilities and places of a token's experts, 2 N + 6 k"
    yield saved("router", why, share * (2 * e.count + 6 * k), "wide")
    why = "rows of a token's experts in flight, 2 k D"
    yield Line("working.rows", why, 2 * share * k * D, "product", "forward", True)
    yield Line("feed.rows", why, 2 * share * k * D, "product", "backward", True, side="feed")


def _delta_rule(d: DeltaShape, layers: int) -> Iterator[Line]:
    """Yield what layers of a delta rule save, by torch's operators (models/delta_rule.py)."""

    def saved(name: str, reason: str, values: float, role: Role) -> Line:
        return Line(f"saved.rule.{name}", reason, layers * values, role, "saved", True, layers)

    yield saved("taps", "what enters the convolution, once a tap", d.taps * d.channels, "product")
    yield saved("mixed", "what leaves the convolution", d.channels, "product")
    yield saved("pairs", "products of two tokens of a chunk, 5 H C", 5 * d.heads * DELTA_CHUNK, "wide")
    why = "queries, keys and values of a chunk, and what its system gives, H (6 E + 3 W)"
    states = d.heads * d.key * d.value / DELTA_CHUNK
    yield saved("heads", why, d.heads * (6 * d.key + 3 * d.value) + 2 * d.key_heads * d.key + states, "wide")
    yield saved("gated", "what the norm and the gate keep, H W each", 3 * d.heads * d.value, "wide")
    yield saved("gate", "the gate of what the rule gives, H W", d.heads * d.value, "product")
    yield saved("leaves", "what enters the output product, H W", d.heads * d.value, "product")


def _head(s: ModelShape) -> Iterator[Line]:
    D, V = s.width, s.vocab

    def line(name: str, reason: str, values: float, role: Role, live: Live, fusable: bool = False) -> Line:
        return Line(f"head.{name}", reason, values, role, live, True, fusable=fusable)

    yield line("input", "the last norm's input and its copy, 2 D", 2 * D, "residual", "saved")
    yield line("hidden", "what enters the head, D", D, "product", "saved")
    yield line("hidden gradient", "the gradient that leaves the head, D", D, "residual", "backward")
    yield line("logits", "V, and their gradient in their place", V, "product", "head")
    yield line("logits.eager", "the softmax and two gradients of it, 2 V in float32", 2 * V, "wide", "head", True)
    why = "and where logits are narrower, what makes them 3 V in float32"
    yield line("logits.cast.eager", why, V, "narrowing", "head", True)


def _rest(s: ModelShape, cuda: bool) -> Iterator[Line]:
    # The two gradients of a tied weight: the head's waits for the embedding's, the last one, and is added.
    values = s.vocab * s.width if s.tied else 0
    yield Line("tied.embedding", "the embedding's own gradient, V D, beside the head's", values, "gradient", "end")
    yield Line("tied.sum", "and their sum, where it is not made in place, V D", values, "gradient", "end")
    experts = 1 if s.experts is None else s.experts.count
    largest = max(s.vocab * s.width, experts * s.width * 2 * (s.experts or s).ff_width)
    yield Line("update.loop", "two temporaries of the largest parameter", 2 * largest, "weight", "update")
    yield Line("angles", "cosines and sines, 2 E", 2 * s.rotated_width, "residual", "always", True)
    yield Line("stream gradient", "the gradient that enters the embedding, D", s.width, "residual", "end", True)
    yield Line("batch", "tokens, labels, positions, documents", 28, "byte", "always", True)
    if cuda:
        yield Line("runtime", "workspaces of the products' library", CUBLAS_BYTES, "byte", "always")
    else:
        yield Line("runtime", "the process itself: Python, torch, transformers", PROCESS_BYTES, "byte", "always")


def _work(s: ModelShape, T: int, native: bool, padding: float) -> Iterator[WorkItem]:
    D, F, V, L = s.width, s.active_width, s.vocab, s.layers
    q, kv, linears = s.heads * s.head_width, s.key_width, s.attention_linears
    weights: dict[str, float] = {name: width * sum(pieces.values()) for name, (width, pieces) in linears.items()}
    o, full = weights.pop("o"), s.attention_layers / L
    scores = s.heads * T * s.attention_layers
    qkv, o, delta = full * sum(weights.values()), full * o, s.delta
    if delta is not None:
        out = s.delta_linears["out_proj"]
        inner = sum(width * rows for width, rows in s.delta_linears.values()) - out[0] * out[1]
        qkv, o = qkv + (1 - full) * inner, o + (1 - full) * out[0] * out[1]

    def moved(name: str, reason: str, values: float, role: Role = "product", fusable: bool = False) -> WorkItem:
        return WorkItem(name, reason, "token", values=values, role=role, fusable=fusable)

    yield WorkItem("padding", "slots that hold no token", "token", padding=padding)
    for name, each in (("qkv", qkv), ("o", o), ("gate_up", 2 * D * F), ("down", F * D)):
        yield WorkItem(f"forward.{name}", "2 a weight of the blocks", "token", 2 * L * each)
        yield WorkItem(f"backward.{name}", "4 a weight of the blocks", "token", 4 * L * each)
    flop = 2 * T * (q + s.attended_width) * s.attention_layers  # of a query: with a key, and with a value
    yield WorkItem("forward.scores", "every score, masked or not: 4 T H E a block", "token", flop)
    why = "scores written, scaled, masked, made probabilities, cast, read"
    yield moved("forward.scores.moved", why, 10 * scores, "wide")
    stream = "the stream between blocks, read by norms and sums and written by sums"
    yield moved("forward.elementwise.stream", stream, L * 5 * D, "residual")
    yield moved("forward.elementwise", "norms, rotation, gating", L * (D + 2 * (q + kv) + 3 * F))
    yield moved("forward.eager", "the same one operator at a time", L * 75 * D, "plain", True)
    yield WorkItem("forward.launches", "about 45 operators a block", "micro", launches=45 * L, fusable=True)
    yield WorkItem("backward.scores", "8 T H E a block", "token", 2 * flop)
    yield moved("backward.scores.moved", "gradients of the scores, likewise", 11 * scores, "wide")
    yield moved("backward.elementwise.stream", f"{stream}, and its gradient", L * 9 * D, "residual")
    yield moved("backward.elementwise", "norms, rotation, gating", L * (D + 2 * (q + kv) + 6 * F))
    yield moved("backward.eager", "the same one operator at a time", L * 150 * D, "plain", True)
    yield WorkItem("backward.launches", "about 90 operators a block", "micro", launches=90 * L, fusable=True)
    if delta is not None:
        E, W, C = delta.key, delta.value, DELTA_CHUNK
        rule = 2.0 * delta.heads * (2 * C * E + C * (E + W) / 2 + C * W + 3 * E * W) * len(delta.layers)
        why = "products of a chunk, its system, and the state"
        yield WorkItem("forward.rule", why, "token", rule)
        yield WorkItem("backward.rule", f"{why}, twice", "token", 2 * rule)
        values = len(delta.layers) * (4.0 * delta.channels + delta.heads * (5 * C + 9 * E + 6 * W))
        yield moved("forward.rule.moved", "what a chunk reads and writes", values, "wide")
        yield moved("backward.rule.moved", "likewise, twice", 2 * values, "wide")
        chunks = len(delta.layers) * T / C
        yield WorkItem("forward.rule.launches", "6 operators a chunk of a row", "micro", launches=6 * chunks)
        yield WorkItem("backward.rule.launches", "12 operators a chunk of a row", "micro", launches=12 * chunks)
    if s.experts is not None:
        e = s.experts
        sparse, k, N = len(e.layers), e.active, e.count
        yield WorkItem("forward.router", "2 a weight of the routers", "token", 2 * sparse * D * N)
        yield WorkItem("backward.router", "4 a weight of the routers", "token", 4 * sparse * D * N)
        # torch's grouped product has some 0.83 of the rate of a single one (551 to 714 TFLOP/s at 30B-A3B's shapes).
        why, routed = "products of groups of rows, slower than one product", 6 * k * e.ff_width * D * sparse
        yield WorkItem("forward.grouped", why, "token", 0.2 * routed)
        yield WorkItem("backward.grouped", why, "token", 0.4 * routed)
        # Three times what is moved: sorting, and rows read by number, which reach half of the memory's rate
        # (benchmarks/results/h100-experts.jsonl: a layer less its products).
        why = "rows put in the order of experts, and their sums"
        yield moved("forward.rows", why, sparse * 11 * k * D)
        yield moved("backward.rows", why, sparse * 12 * k * D)
    yield WorkItem("head.products", "6 a weight of the head", "token", 6 * D * V)
    yield moved("head.moved", "logits, their softmax and their gradients", 4 * V, "wide")
    yield moved("head.eager", "the same one operator at a time", 6 * V, "wide", True)
    why = "weights read, their copies written"
    yield WorkItem("casts", why, "micro", values=1.5 * (s.block_matrices + D * V), role="cast")
    why = "weights, gradients, states: read and written"
    yield WorkItem("update", why, "step", values=MOVED * s.parameters, role="weight")
    why, launches = "the same one operator at a time", 14 * (L * 9 + 2)
    yield WorkItem("update.loop", why, "step", values=11 * s.parameters, role="weight", launches=launches)
    yield WorkItem("norm", "gradients read for their norm", "step", values=s.parameters, role="gradient")


def _teacher(teacher: Teacher, shape: ModelShape) -> Iterator[Rule]:
    """Yield the memory and work of a frozen second model, whose logits are made a chunk at a time."""
    chunk = teacher.chunk
    yield ledger.live("head.logits*", "of one chunk at a time", most_tokens=chunk)
    why = "probabilities of both models and their difference, of a chunk, 4 V in float32"
    yield ledger.add(Line("head.compared", why, 4 * shape.vocab, "wide", "head", True, most_tokens=chunk))
    why = "the head's gradient, summed over chunks in float32, D V"
    yield ledger.like("casts.head", Line("head.gradient", why, 1.0, "wide", "head"))
    if teacher.stored is not None:
        why = f"the teacher's {teacher.stored} likeliest tokens of each, as many bytes a target on the disk"
        yield ledger.add(Line("teacher.stored", why, teacher.record_bytes, "byte", "always", True))
        return
    if teacher.shape is None:
        return
    t = teacher.shape
    why = f"{t.parameters:,} frozen parameters of the teacher, {teacher.width_bytes} bytes each"
    yield ledger.add(Line("teacher", why, t.parameters * teacher.width_bytes, "byte", "always"))
    why = "the teacher's forward pass, 2 a weight of its matrices and head"
    flop = 2.0 * (t.block_matrices + t.vocab * t.width)
    yield ledger.add(WorkItem("forward.teacher", why, "token", flop))


def _objective(env: Environment, shape: ModelShape) -> Iterator[Rule]:
    """Yield the work that the objective adds to one forward and one backward pass."""
    if env.teacher is not None:
        yield from _teacher(env.teacher, shape)
    if not env.paired:
        return
    if env.scored:
        why = "a score of each token, in place of logits"
        yield ledger.live("head.*", why, gone=True)
        yield ledger.live("casts.head", why, gone=True)
        yield ledger.live("tied.*" if shape.tied else "[!c]*.head", why, gone=True)
        return
    flop = 2 * shape.width * shape.vocab
    if Part.HEAD in env.claimed:
        why = "losses token by token: a chunk's logits are made again in the backward pass, 2 a weight of the head"
        yield ledger.add(WorkItem("head.again", why, "token", flop))
    if env.reference not in (None, "precomputed") and env.spec.adapters_removable:
        yield ledger.live("forward.*", "and once more without what is trained, as the reference", times=2)
        yield ledger.add(WorkItem("reference.head", "the head of that pass, 2 a weight of it", "token", flop))
