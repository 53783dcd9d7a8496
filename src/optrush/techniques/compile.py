"""torch.compile, one block at a time or the whole model, and the loss, with fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from optrush.planner.ledger import COMPILED, WAYS, Rule, add, launched, live, tagged
from optrush.technique import (
    RANK_PARTS,
    Environment,
    Numerics,
    Part,
    Requirement,
    Technique,
    Trainer,
    compilers,
    package_digest,
    refuse_unmet,
)

COMPILATIONS = 64  # limit per block
BLOCK_S = 13.0  # seconds to compile a block, head and loss, with and without gradients (SmolLM2-135M on H200)
# Share of the elementwise operators' time in a block that remains on a CPU when they are fused: its cache already holds
# the inputs of each. Compiling changed the built-in model's tokens/s there by 0.97 (cpu-answers.jsonl), 1.07 and, with
# amp, 1.12 times (runs of 24 steps, no record).
ON_CPU = 0.8


@dataclass(frozen=True)
class Compile(Technique):
    """Compiles blocks or the model in place, and the head's kernel as far as possible.

    blocks: each block by itself, and the last norm. Equal blocks share one compilation, so it costs one block's time.
    model: everything from the tokens to the last norm as one graph, one rank only. Compile time is multiplied by the
        number of blocks.
    autotune: times several kernels for each matmul, and uses the fastest. Records no CUDA graphs.

    Source: Ansel et al., https://doi.org/10.1145/3620665.3640366; autotune: "max-autotune-no-cudagraphs" of
        https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    Memory: activations of elementwise operators between matmuls are recomputed in their fused backward. As one graph,
        all gradients except the head's exist before the first is released.
    Work: unchanged FLOPs; elementwise operators read and write memory once per fused group, with `model` also across
        blocks; the host launches one graph instead of one per block.
    """

    scope: Literal["blocks", "model"] = "blocks"
    autotune: bool = False

    name = "compile"
    summary = "torch.compile of each block or the whole model, and of the loss, with fixed shapes"
    source = "https://doi.org/10.1145/3620665.3640366"
    numerics = Numerics.SAME_MATHS
    claims = frozenset({Part.COMPILED, Part.ROW_WIDTH})  # one width: others would be recompiled

    def needs(self, env: Environment) -> Iterator[Requirement]:
        found = "a technique over several ranks, which cannot communicate inside one graph of all blocks"
        met = self.scope == "blocks" or not RANK_PARTS & env.claimed
        yield Requirement(met, "`compile:scope=model`", found, "take scope=blocks")

    def compile_s(self, env: Environment) -> float:
        return BLOCK_S * (1 if self.scope == "blocks" else max(1, env.blocks))

    @classmethod
    def variants(cls, env: Environment) -> Iterator[dict[str, Any]]:
        if env.device.kind == "cuda":  # on a CPU it gains a few percent, less than most runs spend compiling
            yield {}

    def predict(self, env: Environment) -> Iterator[Rule]:
        reason = "fused into their neighbours, and recomputed in the backward pass"
        cpu = env.device.kind == "cpu"
        yield live(tagged("fusable", no=("elementwise",) if cpu else ()), reason, gone=True)
        if self.scope == "blocks":
            yield live("saved.middle.wide", "the product that was added is kept instead", gone=True)
        if cpu:
            reason = "fused; most of it came from the cache before"
            yield live(tagged("fusable", "elementwise"), reason, times=ON_CPU)
        for way, kernels in zip(WAYS, (16, 31), strict=True):
            reason, launches = f"about {kernels} kernels per block", COMPILED * kernels * env.blocks
            yield add(launched(way, "compiled.launches", reason, launches))

    def compile(self, trainer: Trainer) -> int:
        import torch
        from torch import nn

        from optrush.models.decoder import Decoder

        seen = self.scope == "model" and getattr(trainer.model, "tower", None) is not None
        found = "rows with images: a vision tower runs before the blocks, on a varying number of patches"
        refuse_unmet([Requirement(not seen, "`compile:scope=model`", found, "take scope=blocks")])
        refuse_unmet(compilers(trainer.env.device))
        # torch's cache on disk identifies our operators by name, not by code.
        mark, tag = package_digest(), torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = tag if mark in tag else f"{tag} {mark}".strip()
        # Some attention needs one compilation per power of two of the longest document, and again for evaluation;
        # torch's default limit is eight.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
        model, head = trainer.model, trainer.model.head
        as_model = self.scope == "model"
        if as_model and isinstance(model, Decoder):
            # The decoder computes its frequencies at the first call: inside the graph, that would compile it twice.
            model.angles(torch.zeros(1, 1, device=trainer.world.device), torch.float32)
        modules: list[nn.Module] = [model] if as_model else [*model.blocks.values()]
        if not as_model and isinstance(model, Decoder):
            modules.append(model.norm)
        options = {"max_autotune": True} if self.autotune else {}
        if self.autotune:
            trainer.notes.append("compile: the first steps compile and time candidates: minutes, on a GPU many")
        # Experts that gather their own weights under data sharding do so between two graphs of their block.
        env = trainer.env
        fullgraph = env.native and not (Part.EP in env.claimed and "dp" in env.sharded)
        if not fullgraph:  # a full graph sets it itself: else each number of rows at experts is recompiled
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
        for module in modules:
            module.compile(fullgraph=fullgraph, dynamic=False, options=options)
        head.nll = head.nll.compiled(options)
        if isinstance(model, Decoder) and model.tower is not None:
            return len(modules) + 1 + model.tower.compile()
        return len(modules) + 1
