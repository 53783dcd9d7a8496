"""Hugging Face Trainer, with or without Liger's kernels: what most fine-tuning scripts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from optrush.config import Config
from optrush.technique import Requirement

from optrush_peers.work import Adapting, Work


class Trainer(Adapting):
    """transformers.Trainer in autocast of bf16, torch's fused AdamW, attention through SDPA.

    liger: Liger's kernels, as `use_liger_kernel` puts them in.
    checkpointing: gradient checkpointing, which TRL's trainers turn on by default and Trainer does not.
    compile: `torch_compile`.
    shard: on several ranks `fsdp`, accelerate's FSDP2 of whole decoder layers; without it DDP, Trainer's own choice.
    adapter: PEFT's LoRA on every linear of the blocks; `qlora` on a base that bitsandbytes holds in 4 bits.
    """

    liger: bool = True
    checkpointing: bool = False
    compile: bool = False
    shard: Literal["fsdp"] | None = None

    name: ClassVar[str] = "trainer"
    libraries: ClassVar[tuple[str, ...]] = ("transformers", "accelerate")
    shares: ClassVar[bool] = True

    @property
    def required(self) -> tuple[str, ...]:
        more = {None: (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}[self.adapter]
        return (*self.libraries, *more, *("liger-kernel",) * self.liger)

    @property
    def title(self) -> str:
        parts = ["Hugging Face Trainer", "Liger" * self.liger, "checkpointing" * self.checkpointing]
        parts += ["torch_compile" * self.compile, "FSDP2" if self.shard else ""]
        parts += [f"{self.adapter} rank {self.rank}" if self.adapter else ""]
        return " + ".join(filter(None, parts)) + f", {self.weights} weights"

    def needs_ranks(self, config: Config, ranks: int) -> Iterator[Requirement]:
        yield from super().needs_ranks(config, ranks)
        asked, found = "`trainer: shard: fsdp`", "one rank" if ranks == 1 else f"`adapter: {self.adapter}`"
        met = self.shard is None or (ranks > 1 and self.adapter is None)
        yield Requirement(met, f"{asked} cuts all weights over several ranks", found, "leave shard out")

    def train(self, work: Work) -> None:
        """Run its own loop on our rows; a callback reports each step."""
        import transformers
        from torch.utils.data import Dataset, SequentialSampler

        optim, losses = work.config.optim, []

        class Prepared(Dataset[dict[str, Any]]):
            """A row an item, those of one step as wide as its longest."""

            def __init__(self) -> None:
                self.items = [(batch, r) for batch in work.batches for r in range(len(batch.ids))]

            def __len__(self) -> int:
                return len(self.items)

            def __getitem__(self, i: int) -> dict[str, Any]:
                batch, r = self.items[i]
                row = {"input_ids": batch.ids[r], "labels": batch.labels[r]}
                return row if batch.mask is None else row | {"attention_mask": batch.mask[r]}

        rows = Prepared()

        class Ordered(transformers.Trainer):
            """The rows in our order; keeps each step's loss on the device."""

            def _get_train_sampler(self, *_: object) -> Any:
                return SequentialSampler(rows)

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                losses.append(loss)
                return loss

        class Clock(transformers.TrainerCallback):
            def on_train_begin(self, *_: object, **__: object) -> None:
                work.begin()

            def on_step_end(self, *_: object, **__: object) -> None:
                work.step(losses[-1])

        model = self._model(work)
        arguments = transformers.TrainingArguments(
            output_dir=str(work.scratch),
            max_steps=len(work.batches),
            per_device_train_batch_size=work.own_rows,
            learning_rate=optim.lr,
            lr_scheduler_type="constant",
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_epsilon=optim.eps,
            max_grad_norm=optim.clip or 0.0,
            optim="adamw_torch_fused",
            bf16=True,
            use_cpu=work.device == "cpu",
            use_liger_kernel=self.liger,
            gradient_checkpointing=self.checkpointing and self.shard is None,
            torch_compile=self.compile,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            seed=work.config.seed,
            disable_tqdm=True,
            **self._sharded(model),
        )
        trainer: Any = Ordered(model, arguments, train_dataset=rows, callbacks=[Clock()])
        trainer.train()
        assert trainer.optimizer is not None
        states = (s for by_name in trainer.optimizer.state.values() for s in by_name.values())
        work.record([p for p in trainer.model.parameters() if p.requires_grad], states)

    def _sharded(self, model: Any) -> dict[str, Any]:
        """Return Trainer's arguments of accelerate's FSDP2, a decoder layer a group."""
        if self.shard is None:
            return {}
        settings = {
            "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": [type(model.get_submodule("model.layers.0")).__name__],
            "activation_checkpointing": self.checkpointing,
        }  # fmt: skip
        return {"fsdp": True, "fsdp_config": settings}

    def _model(self, work: Work) -> Any:
        """Return the published model, or its adapters around it."""
        import torch
        import transformers

        dtype = getattr(torch, self.weights)
        quantized = None
        if self.adapter == "qlora":
            quantized = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(
            work.folder, dtype=dtype, attn_implementation="sdpa", quantization_config=quantized
        )
        if self.adapter is None:
            return model
        import peft

        settings = peft.LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules="all-linear", bias="none")
        return peft.get_peft_model(model, settings)
