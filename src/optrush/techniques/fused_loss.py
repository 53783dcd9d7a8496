"""Linear layer and cross-entropy in chunks of tokens, without the whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from optrush.errors import NeedsError
from optrush.planner.ledger import Role, Rule, at_head, head_gradient, like, live, tagged
from optrush.technique import Environment, Numerics, Part, Requirement, Technique, Trainer

# Logits per chunk: 4,096 tokens of the largest usual vocabulary, above which no rung got faster; on a CPU 256.
LOGITS = {"cuda": 1 << 29, "cpu": 1 << 25}
VOCABULARY = 1 << 17  # if unknown
TILE = 128  # rows of a matmul's tile; chunks are multiples of it
LIGER_CHUNK = 1024  # tokens, about Liger's own choice for 16 to 32 thousand tokens and the Llama vocabulary


@dataclass(frozen=True)
class FusedLoss(Technique):
    """Computes a chunk's logits, loss and gradients at once, and discards the logits.

    chunked: plain torch matmuls around a compilable softmax; any device and dtype, biases, softcaps, losses per token.
    quack: with the package quack-kernels, one matmul whose epilogue exponentiates, and two plain ones; bf16 on Hopper.
    liger: the package liger-kernel (Triton); CUDA. It chooses its own chunk.

    Source: Wijmans et al., https://arxiv.org/abs/2411.09009; the chunking as in Liger, https://arxiv.org/abs/2410.10989
    Memory: chunk*V*(2+4) bytes instead of B*T*V*(2+4+4), quack chunk*V*2; and V*D*4 for the weight's gradient, except
        with quack if all tokens fit into one chunk.
    Work: unchanged FLOPs.
    Differs from the source: the weight's gradient is summed over chunks in float32.
    """

    impl: Literal["chunked", "quack", "liger"] = "chunked"
    chunk: Annotated[int, Field(ge=1)] | None = None  # None: chosen from vocabulary and micro-batch

    name = "fused-loss"
    summary = "head and cross-entropy in chunks, without whole logits: chunked, quack, liger"
    source = "https://arxiv.org/abs/2410.10989"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.HEAD})

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found, do = "an objective whose head gives one score, without a vocabulary", "leave it out"
        yield Requirement(not env.scored, "`fused-loss` computes a loss over the vocabulary", found, do)
        found = "an objective that already computes logits in chunks (distill.chunk)"
        yield Requirement(env.teacher is None, "`fused-loss` computes the next-token loss", found, do)
        if self.impl == "chunked":
            return
        asked = f"fused-loss:impl={self.impl}"
        found = "an objective that needs per-token losses; this kernel computes only gradients of their sum"
        yield Requirement(not env.paired, f"`{asked}`", found, "take impl=chunked")
        yield Requirement(
            "tp" not in env.axes, f"`{asked}`", "a vocabulary that is sharded over ranks", "take impl=chunked"
        )
        yield env.needs_gpu(asked, (9, 0) if self.impl == "quack" else (8, 0))
        if self.impl == "liger":
            found, do = f"chunk={self.chunk}; Liger chooses its own chunk", "leave chunk out"
            yield Requirement(self.chunk is None, f"`{asked}`", found, do)
            return
        do = "take impl=chunked"
        yield Requirement(env.device.capability == (9, 0), f"`{asked}` needs Hopper", env.device.name, do)
        yield env.needs_half(f"`{asked}` needs matmuls in bf16", do)
        found = f"a vocabulary of {env.vocab}, not a multiple of 128"
        yield Requirement(env.vocab % 128 == 0, f"`{asked}`", found, do)
        asked, found = f"`{asked},chunk={self.chunk}`", "a chunk that is not a multiple of 128"
        yield Requirement((self.chunk or TILE) % TILE == 0, asked, found, "take a multiple of 128")

    def predict(self, env: Environment) -> Iterator[Rule]:
        """Yield the logits of a chunk, and those of the previous chunk if a micro-batch has several."""
        role: Role
        most = LIGER_CHUNK if self.impl == "liger" else self.tokens(env)
        yield live(tagged("logits"), "of one chunk at a time", most_tokens=most)
        yield live("tied.sum", "the head's gradient is added to in place", gone=True)
        if self.impl == "quack":
            yield live(tagged("logits", "fusable"), "done in the matmul's epilogue", gone=True)
            yield live("head.moved", "written and read by matmuls, which hide it", gone=True)
        else:
            reason, values = "the gradients of a chunk's logits and of the one before, 2 V", 2.0
            if env.slots <= most:
                reason, values = "the gradients of the only chunk's logits, V", 1.0
            yield like("head.logits", at_head("chunk", reason, values, "product", most_tokens=most))
            reason = "operators of a chunk, one at a time"
            yield like("head.logits", at_head("chunk.eager", reason, 1.25, "wide", "fusable", most_tokens=most))
            if env.shape is not None and env.shape.softcap:
                reason = "the slope of the logits' cap, V"
                yield like("head.logits", at_head("chunk.capped", reason, 1.0, "wide", "fusable", most_tokens=most))
        if self.impl == "quack" and env.slots <= most:
            # In the backward pass: the head's gather buffer, of the same size, has been freed by then.
            role = "cast" if "dp" in env.sharded and not (env.shape is None or env.shape.tied) else "gradient"
            yield head_gradient("the head's gradient, written once, D V", role)
        else:
            yield head_gradient()

    def tokens(self, env: Environment) -> int:
        """Return the tokens per chunk: as given, else a size near `LOGITS` that divides a micro-batch evenly."""
        if self.chunk is not None:
            return self.chunk
        logits = LOGITS[env.device.kind] * (2 if self.impl == "quack" else 1)  # it stores half the bytes per logit
        most = max(TILE, logits // (env.vocab or VOCABULARY) // TILE * TILE)
        chunks = max(1, -(-env.slots // most))
        return -(-env.slots // (chunks * TILE)) * TILE

    def packages(self) -> tuple[tuple[str, str], ...]:
        return {"quack": (("quack-kernels", "kernels"),), "liger": (("liger-kernel", "kernels"),)}.get(self.impl, ())

    def compile_s(self, env: Environment) -> float:
        return 6.0 if self.impl == "quack" else 0.0  # three kernels (H200)

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        yield {}
        if env.device.capability == (9, 0) and env.native:  # heads of other families may be unsupported
            yield {"impl": "quack"}

    def loss(self, trainer: Trainer) -> int:
        import torch

        from optrush.kernels.cross_entropy import Chunked, Package, liger
        from optrush.kernels.linear_cross_entropy import quack

        head = trainer.model.head
        if self.impl == "chunked":
            head.nll = Chunked(chunk=self.tokens(trainer.env))
            return 1
        asked = f"fused-loss:impl={self.impl}"
        self.demand_triton(trainer.env.device, asked)
        if head.bias is not None or head.scale != 1.0 or head.softcap is not None:
            raise NeedsError(f"`{asked}`", "a head with a bias, a scale or a softcap", "take impl=chunked")
        if self.impl == "quack":
            V = trainer.env.vocab if head.weight is None else head.weight.shape[0]  # None: on another stage
            if V % 128:
                raise NeedsError(f"`{asked}`", f"a vocabulary of {V}, not a multiple of 128", "take impl=chunked")
            if trainer.precision == torch.float16:
                raise NeedsError(f"`{asked}`", "matmuls in fp16", "take bf16, or impl=chunked")
        head.nll = Package(function={"quack": quack, "liger": liger}[self.impl], chunk=self.tokens(trainer.env))
        trainer.notes.append("fused-loss: evaluation uses the chunked kernel")
        return 1
