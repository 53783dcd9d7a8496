"""Linear layer and cross-entropy in chunks of tokens: the logits are never held whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from optrush.ledger import Line, Rule, like, live
from optrush.technique import Numerics, Part, Setup, Technique

if TYPE_CHECKING:
    from optrush.job import Job


@dataclass(frozen=True)
class FusedLoss(Technique):
    """Computes a chunk's logits, its loss and its gradients at once, and forgets the logits.

    Source: Wijmans et al., https://arxiv.org/abs/2411.09009; the chunking as in Liger, https://arxiv.org/abs/2410.10989
    Memory: chunk*V*(2+4) bytes instead of B*T*V*(2+4+4), and V*D*4 for the weight's gradient in float32.
    Work: unchanged FLOPs.
    Differs from the source: plain torch products around a compilable softmax; the weight's gradient is summed over
        chunks in float32.
    """

    chunk: Annotated[int, Field(ge=1)] = 4096

    name = "fused-loss"
    summary = "linear + cross-entropy in chunks, logits never held whole"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    proof = "tests/techniques/test_fused_loss.py"
    verified_on = ("cpu", "gpu")
    claims = frozenset({Part.HEAD})

    def predict(self, setup: Setup) -> Iterator[Rule]:
        yield live("head.logits*", "of one chunk at a time", most_tokens=self.chunk)
        yield live("tied.sum", "the head's gradient is added to in place", gone=True)
        why = "the gradients of a chunk's logits and of the one before, 2 V"
        yield like("head.logits", Line("head.chunk", why, 2.0, "product", "head", True, most_tokens=self.chunk))
        why = "operators of a chunk, one at a time"
        chunk = Line("head.chunk.eager", why, 1.25, "wide", "head", True, most_tokens=self.chunk, fusable=True)
        yield like("head.logits", chunk)
        why = "the head's gradient, summed over chunks in float32, D V"
        yield like("casts.head", Line("head.gradient", why, 1.0, "wide", "head"))

    def loss(self, job: Job) -> int:
        from optrush.kernels.nll import Chunked

        job.model.head.nll = Chunked(chunk=self.chunk)
        return 1
