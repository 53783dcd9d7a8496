"""Sample answers to prompts from the decoder in training, many at a time.

Sequences use slots of a cache; a finished one leaves its slot to the next in the queue (continuous batching). A token's
random number depends only on (seed, prompt, member, position): not on concurrent sequences, the number of slots or
earlier draws. Probabilities depend on the batch in their last digits.

Shapes: S slots, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from optrush.data.batch import Documents, collate
from optrush.data.schema import Document
from optrush.models.decoder import Decoder
from optrush.models.kv_cache import BUCKET, SlotCache, Step

CHECK = 16  # tokens between checks for ended sequences, on a GPU
FEW = 16  # 1 / FEW of the slots must be free before more prompts pass
PROMPTS = 8192  # prompt tokens per packed pass


class PromptIds(NamedTuple):
    """A prompt: its number in the run, which seeds the draws, and its token ids."""

    number: int
    ids: np.ndarray  # (n,) int


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled continuation of a prompt.

    log_p: per token, natural logarithms under the temperature.
    ended: its last token is an end-of-answer token; otherwise it was cut off.
    """

    prompt: int  # index among the given prompts
    member: int
    ids: list[int]
    log_p: list[float]
    ended: bool
    entropy: float  # mean over its tokens, nats


@dataclass(frozen=True)
class Drawing:
    """Sampling settings.

    temperature: 0 takes the likeliest token.
    ends: end-of-answer token ids.
    top_k: number of likeliest tokens to sample from; 0: all.
    top_p: sample from the fewest tokens whose probabilities, after the other settings, sum to it.
    """

    most: int  # tokens per answer
    temperature: float
    ends: tuple[int, ...]
    seed: int
    slots: int = 64
    top_k: int = 0
    top_p: float = 1.0


def sample(
    model: Decoder,
    prompts: Sequence[PromptIds],
    members: int,
    drawing: Drawing,
    precision: AbstractContextManager[object] | None = None,
) -> list[SampledAnswer]:
    """Return `members` answers to each prompt, prompt by prompt; arguments and errors: see `SamplingEngine`."""
    if not prompts or not members:
        return []
    slots = min(drawing.slots, len(prompts) * members)
    engine = SamplingEngine(model, slots, max(len(p.ids) for p in prompts) + drawing.most, drawing.most)
    try:
        return engine.sample(prompts, members, drawing, precision)
    finally:
        engine.cache.layers.clear()  # they refer to the cache: a cycle, which would be freed later


Weigh = Callable[[Tensor, Tensor, Callable[[], Tensor] | None], Tensor]


class AnswerEngine(Protocol):
    """Samples answers to prompts: our decoder, a transformers model, or a server.

    weigh: if another program samples: returns the importance weights of tokens (N,) from their log-probabilities as
        sampled, by the trained model, and by the model before training, if any; called on every rank.
    """

    @property
    def note(self) -> str | None:
        """Return a note on the sampling method; empty if there is none yet."""

    @property
    def weigh(self) -> Weigh | None: ...

    def sample(
        self, prompts: Sequence[PromptIds], members: int, drawing: Drawing,
        precision: AbstractContextManager[object] | None = None,
    ) -> list[SampledAnswer]:  # fmt: skip
        """Return `members` answers to each prompt, prompt by prompt."""


class SamplingEngine:
    """Slots of sequences and their states; on CUDA a step of all slots is one recorded graph.

    Memory: the cache, and 16 bytes per answer token and slot, as long as the engine exists.
    """

    note: str | None = None
    weigh = None

    def __init__(self, model: Decoder, slots: int, room: int, most: int) -> None:
        """Allocate the sequences' state; the first prompt allocates the cache.

        Args:
            room: tokens per slot, prompt and answer.
            most: tokens per answer.

        Raises:
            NeedsError: see `kv_cache.check_cacheable`.
        """
        self.model, self.most, S = model, most, slots
        self.cache = SlotCache(model, slots, room)
        self.device = device = model.embedding.weight.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.token, self.length, self.made, self.number, self.member = (zeros(S) for _ in range(5))
        self.live, self.ended = zeros(S, dtype=torch.bool), zeros(S, dtype=torch.bool)
        self.out = zeros(S, most)
        self.log_p, self.entropy = (zeros(S, most, dtype=torch.float32) for _ in range(2))
        self.first = torch.arange(S, device=device) * self.cache.room  # positions of the slots' first tokens
        self.span = 0
        self.ends_of: dict[Drawing, Tensor] = {}
        self.graphs: dict[Drawing, torch.cuda.CUDAGraph] = {}
        self.places: list[int] = []  # addresses of the weights that the graphs read

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[PromptIds], members: int, drawing: Drawing,
        precision: AbstractContextManager[object] | None = None,
    ) -> list[SampledAnswer]:  # fmt: skip
        """Return `members` answers to each prompt, prompt by prompt.

        Args:
            prompts: fitting into the room with an answer.
            drawing: with answers of up to `most` tokens.
            precision: the context of the model's forward passes, such as autocast; it must cast anew in each step.
        """
        self.prompts, self.drawing, self.queue = prompts, drawing, deque[tuple[int, int]]()
        self.slot_of: dict[int, tuple[int, int]] = {}  # slot -> prompt, member
        self.answers: list[SampledAnswer] = []
        if drawing not in self.ends_of:  # at a fixed address, which a recording reads
            self.ends_of[drawing] = torch.tensor(drawing.ends, dtype=torch.int64, device=self.device)
        self.live.zero_()
        self.span, cuda = 0, self.device.type == "cuda"
        if (places := [p.data_ptr() for p in self.model.parameters()]) != self.places:
            self.graphs, self.places = {}, places
        with precision or nullcontext(), self.cache.within(self.model):
            self.queue.extend((p, m) for p in range(len(prompts)) for m in range(members))
            while self.queue or self.slot_of:
                self.admit()
                step = self.replay if cuda and self.recordable() else self.advance
                with self.cache.one_shape():
                    for _ in range(CHECK if cuda else 1):
                        step()
                self.collect()
        return sorted(self.answers, key=lambda a: (a.prompt, a.member))

    def recordable(self) -> bool:
        """Return whether no expert matmul reads its groups on the host: only torch's in bfloat16 does not."""
        if self.model.shape.experts is None:
            return True
        keys, card = self.cache.layers[0].keys, torch.cuda.get_device_capability(self.device)
        return keys is not None and keys.dtype == torch.bfloat16 and card[0] in (9, 10)

    def replay(self) -> None:
        """Continue every sequence by one token, recorded after a first unrecorded step (which compiles kernels).

        A recording holds the addresses of weights, cache and state, which change in place.
        """
        if (graph := self.graphs.get(self.drawing)) is not None:
            graph.replay()
            return
        self.advance()
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # a loader's threads pin memory
            try:
                self.advance()
            except BaseException:
                with suppress(RuntimeError):  # of the failed capture; the first error has the reason
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graphs[self.drawing] = graph
        current.wait_stream(side)

    def admit(self) -> None:
        """Run the prompts of the next sequences, and draw their first tokens."""
        free = [slot for slot in range(self.cache.slots) if slot not in self.slot_of]
        if self.slot_of and len(free) * FEW < self.cache.slots:  # a pass costs the same for one prompt as for many
            return
        taken: dict[int, list[tuple[int, int]]] = {}  # prompt -> its slots and members
        tokens = 0
        while free and self.queue:
            p, m = self.queue[0]
            tokens += 0 if p in taken else len(self.prompts[p].ids)
            if taken and tokens > PROMPTS:
                break
            self.queue.popleft()
            taken.setdefault(p, []).append((slot := free.pop(0), m))
            self.slot_of[slot] = p, m
        if taken:
            self._pass_prompts(taken)

    def _pass_prompts(self, taken: dict[int, list[tuple[int, int]]]) -> None:
        """Run the prompts of `taken` (prompt -> its slots and members), set the slots' state, and draw first tokens."""
        lengths = [len(self.prompts[p].ids) for p in taken]
        documents = [
            (p, Document(np.asarray(self.prompts[p].ids, np.int32), np.zeros(n, bool)))
            for p, n in zip(taken, lengths, strict=True)
        ]
        wide = -(-sum(lengths) // BUCKET) * BUCKET  # few shapes
        batch = collate([documents], wide, single=len(documents) == 1, most=len(documents) + 1)
        target, source, last, slots = list[np.ndarray](), list[np.ndarray](), list[int](), list[int]()
        at = 0
        for (_, held), n in zip(taken.items(), lengths, strict=True):
            for slot, _ in held:
                target.append(slot * self.cache.room + np.arange(n))
                source.append(at + np.arange(n))
                last.append(at + n - 1)
                slots.append(slot)
            at += n

        def tensor(values: Sequence[int] | np.ndarray) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=self.device)

        self.cache.step = Step(tensor(np.concatenate(target)), tensor(np.concatenate(source)))
        batch = batch.to(self.device)
        hidden = self.model(batch.tokens, batch.positions, batch.documents)
        at_slots = tensor(slots)
        members = [(p, m, n) for (p, held), n in zip(taken.items(), lengths, strict=True) for _, m in held]
        self.number[at_slots] = tensor([self.prompts[p].number for p, _, _ in members])
        self.member[at_slots] = tensor([m for _, m, _ in members])
        self.length[at_slots] = tensor([n for _, _, n in members])
        self.made[at_slots], self.live[at_slots], self.ended[at_slots] = 0, True, False
        self.span = max([self.span, *lengths])
        logits = self.model.head.logits(hidden[0, tensor(last)])
        fresh = torch.zeros_like(self.live)
        fresh[at_slots] = True
        padded = logits.new_zeros(self.cache.slots, logits.shape[-1])
        padded[at_slots] = logits
        self._draw(padded, fresh)

    def advance(self) -> None:
        """Continue every sequence by one token."""
        S, room = self.cache.slots, self.cache.room
        self.span += 1  # used only on a CPU
        span = min(room, -(-self.span // BUCKET) * BUCKET)
        target = torch.where(self.live, self.first + self.length, S * room)
        lengths = torch.where(self.live, self.length + 1, 0)
        self.cache.step = Step(target, lengths=lengths, span=span)
        starts = torch.arange(S + 1, dtype=torch.int32, device=self.device)
        documents = Documents(
            starts, torch.zeros(S, 1, dtype=torch.int32, device=self.device), 1, True, self.live[:, None]
        )
        positions = torch.where(self.live, self.length, 0).int()[:, None]
        hidden = self.model(self.token[:, None], positions, documents)
        self.length += self.live
        self._draw(self.model.head.logits(hidden[:, 0]), self.live)

    def _draw(self, logits: Tensor, who: Tensor) -> None:
        """Draw a token from logits (S, V) for the slots of a mask (S,), and end finished answers."""
        if logits.is_cuda:
            from optrush.kernels.draw_triton import draw

            logits = keep_likeliest(logits, self.drawing)
            noted, d = (self.out, self.log_p, self.entropy), self.drawing
            keys = self.number, self.member, self.made
            draw(
                logits.float(), who, keys, self.token, self.live, self.ended, noted, self.ends_of[d],
                seed=d.seed, temperature=d.temperature, most=d.most,
            )  # fmt: skip
            return
        token, log_p, entropy = draw_tokens(logits, self.drawing, self.number, self.member, self.made)
        rows = torch.arange(len(token), device=token.device)
        place = self.made.clamp_max(self.drawing.most - 1)
        for kept, value in (
            (self.out, token), (self.log_p, log_p), (self.entropy, entropy),
        ):  # fmt: skip
            kept[rows, place] = torch.where(who, value.to(kept.dtype), kept[rows, place])
        self.token.copy_(torch.where(who, token, self.token))
        self.made += who
        ends = who & (token[:, None] == self.ends_of[self.drawing]).any(1)
        self.ended |= ends
        self.live &= ~(ends | (who & (self.made >= self.drawing.most)))

    def collect(self) -> None:
        """Collect finished answers and free their slots."""
        live = self.live.tolist()
        done = [slot for slot in self.slot_of if not live[slot]]
        if not done:
            return
        at = torch.tensor(done, device=self.device)
        made, ended = self.made[at].tolist(), self.ended[at].tolist()
        columns = zip(self.out[at].tolist(), self.log_p[at].tolist(), self.entropy[at].tolist(), strict=True)
        for slot, n, end, (ids, log_p, entropy) in zip(done, made, ended, columns, strict=True):
            p, m = self.slot_of.pop(slot)
            self.answers.append(SampledAnswer(p, m, ids[:n], log_p[:n], end, sum(entropy[:n]) / n))
        self.span = int(torch.where(self.live, self.length, 0).max())


def draw_tokens(
    logits: Tensor, drawing: Drawing, number: Tensor, member: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from each row of logits (S, V): the tokens, their log-probabilities and the entropies, (S,) each.

    Args:
        number, member, position: (S,) int64, which determine the draws together with the seed.
    """
    logits, greedy = keep_likeliest(logits, drawing).float(), drawing.temperature == 0
    log_p = torch.log_softmax(logits if greedy else logits / drawing.temperature, -1)
    p = log_p.exp()
    if greedy:
        token = log_p.argmax(-1)
    else:
        below = p.cumsum(-1)
        total = below[:, -1:]
        point = (total * uniform(drawing.seed, number, member, position)[:, None]).to(below.dtype)
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(below, point, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return token, log_p.gather(1, token[:, None])[:, 0], -(p * log_p).nansum(-1)


def keep_likeliest(logits: Tensor, drawing: Drawing) -> Tensor:
    """Return logits (S, V) with -inf for excluded tokens; at least one remains.

    Source: Fan et al., https://arxiv.org/abs/1805.04833 (top k); Holtzman et al., https://arxiv.org/abs/1904.09751
    """
    if not drawing.temperature:
        return logits
    if drawing.top_k:
        least = logits.topk(min(drawing.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if drawing.top_p < 1:
        ordered, places = logits.sort(-1)
        left_out = (ordered / drawing.temperature).softmax(-1).cumsum(-1) <= 1 - drawing.top_p
        left_out[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(left_out).scatter(-1, places, left_out), -torch.inf)
    return logits


_M1, _M2, _STEP = (x - 2**64 if x >= 2**63 else x for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))


def uniform(seed: int, *keys: Tensor) -> Tensor:
    """Return (S,) float64 numbers in [0, 1), determined by the seed and keys (S,) int64.

    Source: the mixing function of SplitMix64, Steele et al., https://doi.org/10.1145/2660193.2660195
    """

    def shifted(x: Tensor, n: int) -> Tensor:
        return (x >> n) & ((1 << (64 - n)) - 1)  # int64 keeps its sign

    state = torch.full_like(keys[0], seed)
    for key in (torch.zeros_like(state), *keys):  # mix the seed first: else a seed only permutes draws
        state = (state ^ key) + _STEP
        state = (state ^ shifted(state, 30)) * _M1
        state = (state ^ shifted(state, 27)) * _M2
        state = state ^ shifted(state, 31)
    return shifted(state, 11).double() * 2.0**-53
