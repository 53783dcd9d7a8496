"""torchtitan's own Trainer on its own Llama, one rank or FSDP2 over all: float32 weights, autocast, compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from optrush.config import Config
from optrush.hardware import Device
from optrush.launch import rank_environments
from optrush.models.shapes import ModelShape
from optrush.technique import Requirement

from optrush_peers.work import System, Work


class Torchtitan(System):
    """torchtitan. Its head is never tied to its embedding, so the run's shape must not be tied.

    compile: its blocks and its loss, each by itself.
    recompute: its activation checkpointing; "selective" is its default.
    """

    compile: bool = True
    recompute: Literal["none", "selective", "full"] = "none"

    name: ClassVar[str] = "torchtitan"
    libraries: ClassVar[tuple[str, ...]] = ("torchtitan",)
    shares: ClassVar[bool] = True
    begins_alike: ClassVar[bool] = False  # it draws its weights itself

    @property
    def title(self) -> str:
        parts = ["torchtitan", "compile" * self.compile, f"{self.recompute} recompute" * (self.recompute != "none")]
        return " + ".join(filter(None, parts)) + f", {self.weights} weights"

    def needs(self, config: Config, device: Device) -> Iterator[Requirement]:
        from optrush.models.source import locate

        yield from super().needs(config, device)
        asked = "the system `torchtitan`"
        yield self.needs_cuda(device)
        hf = locate(config, weights=False)[1]
        shape = ModelShape.read(hf)
        plain = shape.family == "llama" and shape.head_width * shape.heads == shape.width
        do = "take a Llama whose heads fill its width"
        yield Requirement(plain, f"{asked} on its own Llama", f"{shape.family}, heads of {shape.head_width}", do)
        do = "set model.shape: llama-3.2-1b-untied"
        yield Requirement(not shape.tied, f"{asked}, whose head is never tied", "a shape whose head is tied", do)
        found = f"`data` with rows of several lengths, or none of {config.batch.seq} tokens"
        yield Requirement(config.data.random is not None, f"{asked} on rows of one length", found, "take data.random")

    def train(self, work: Work) -> None:
        """Run its own loop in this process, with a subclass of its Trainer as the clock."""
        from torchtitan.train import Trainer

        if work.ranks == 1:
            os.environ.update(rank_environments(1)[0])
        losses: list[Any] = []

        class Clock(Trainer):  # type: ignore[misc, unused-ignore]
            """Reports each step; everything else is torchtitan's."""

            def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
                losses.append(super().forward_backward_step(*args, **kwargs))
                return losses[-1]

            def train_step(self, data_iterator: Any) -> None:
                if not work.losses:
                    work.begin()
                super().train_step(data_iterator)
                work.step(losses[-1] * work.ranks)  # a rank's sum was divided by the targets of all

        _register(work)
        trainer = Clock(self._settings(work))
        try:
            trainer.train()
            states = [s for o in trainer.optimizers for by_name in o.state.values() for s in by_name.values()]
            work.record([p for m in trainer.model_parts for p in m.parameters()], states)
        finally:
            trainer.close()

    def _settings(self, work: Work) -> Any:
        """Return its configuration: the values of our run, and its own defaults elsewhere."""
        from torchtitan.config import JobConfig

        run, config = work.config, JobConfig()
        config.job.dump_folder = str(work.scratch)
        config.model.name, config.model.flavor = "optrush", "run"
        config.model.hf_assets_path = str(work.folder)
        config.training.local_batch_size = work.own_rows
        config.training.seq_len = run.batch.seq
        config.training.steps = len(work.batches)
        config.training.dtype = self.weights
        config.training.max_norm = float("inf") if run.optim.clip is None else run.optim.clip
        config.optimizer.lr, config.optimizer.eps = run.optim.lr, run.optim.eps
        config.optimizer.beta1, config.optimizer.beta2 = run.optim.betas
        config.optimizer.weight_decay = run.optim.weight_decay
        config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0  # a constant rate
        config.activation_checkpoint.mode = self.recompute
        config.compile.enable = self.compile
        config.debug.seed = run.seed
        return config


def _register(work: Work) -> None:
    """Register its Llama 3 with the run's sizes and rows under the name `optrush`."""
    import dataclasses

    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.protocols.train_spec import register_train_spec

    shape = ModelShape.read(work.hf)
    unscaled = int(8 * shape.width / 3)  # as it begins to find its feed-forward width, before it rounds up
    rope = shape.rope
    sizes = llama3.TransformerModelArgs(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        multiple_of=shape.ff_width,
        ffn_dim_multiplier=min(1.0, 0.99 * shape.ff_width / unscaled),
        norm_eps=shape.norm_eps,
        rope_theta=rope.theta,
        rope_scaling_args=RoPEScalingArgs(rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max),
    )
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args={"run": sizes},
        build_dataloader_fn=lambda **_: Loader(work),
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )
    register_train_spec("optrush", spec)


class Loader:
    """A rank's rows as it takes them: labels shifted to the token that predicts them."""

    def __init__(self, work: Work) -> None:
        self.batches, first = work.batches, work.rank * work.own_rows
        self.own = slice(first, first + work.own_rows)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        import torch

        for batch in self.batches:
            labels = batch.labels[self.own]
            ends = torch.full_like(labels[:, :1], -100)
            yield {"input": batch.ids[self.own].clone()}, torch.cat((labels[:, 1:], ends), dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state
