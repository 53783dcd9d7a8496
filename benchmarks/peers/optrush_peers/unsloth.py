"""Unsloth in a plain loop around its model: full fine-tuning of bf16 weights, LoRA, or LoRA on a 4-bit base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from optrush.config import Config
from optrush.hardware import Device
from optrush.technique import Requirement

from optrush_peers.work import LINEARS, Adapting, Weights, Work


class Unsloth(Adapting):
    """FastLanguageModel, autocast of bf16, torch's fused AdamW; `full_finetuning` where there is no adapter.

    checkpointing: its own gradient checkpointing ("unsloth"), which is its default.
    adapter: its LoRA on every linear of the blocks, without dropout and biases; `qlora` on a base in 4 bits.
    """

    checkpointing: bool = True
    weights: Weights = "bfloat16"

    name: ClassVar[str] = "unsloth"
    libraries: ClassVar[tuple[str, ...]] = ("unsloth", "unsloth_zoo")
    first: ClassVar[str | None] = "unsloth"  # it changes torch and transformers while they are imported

    @property
    def required(self) -> tuple[str, ...]:
        return (*self.libraries, "bitsandbytes")  # which it imports, whatever is trained

    @property
    def title(self) -> str:
        what = f" {self.adapter} rank {self.rank}" if self.adapter else ""
        return f"Unsloth{what}" + " + its checkpointing" * self.checkpointing + f", {self.weights} weights"

    def needs(self, config: Config, device: Device) -> Iterator[Requirement]:
        yield from super().needs(config, device)
        yield self.needs_cuda(device)
        asked, do = "the system `unsloth`, full fine-tuning", "take weights: bfloat16"
        yield Requirement(self.weights == "bfloat16", asked, f"`weights: {self.weights}`", do)

    def train(self, work: Work) -> None:
        """Run the loop that its makers' notebooks write out, without their trainer."""
        import torch
        from unsloth import FastLanguageModel

        optim = work.config.optim
        checkpointing = "unsloth" if self.checkpointing else False
        model, _ = FastLanguageModel.from_pretrained(
            str(work.folder),
            max_seq_length=work.config.batch.seq,
            dtype=torch.bfloat16,
            load_in_4bit=self.adapter == "qlora",
            full_finetuning=self.adapter is None,
            use_gradient_checkpointing=checkpointing,
        )
        if self.adapter is not None:
            model = FastLanguageModel.get_peft_model(
                model,
                r=self.rank,
                lora_alpha=self.rank,
                lora_dropout=0,
                bias="none",
                target_modules=list(LINEARS),
                use_gradient_checkpointing=checkpointing,
                random_state=work.config.seed,
            )
        elif not self.checkpointing:  # its loader turns it on for full fine-tuning, whatever the argument
            model.gradient_checkpointing_disable()
        model.config.use_cache = False  # of keys and values, for generating; trainers turn it off, too
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        work.begin()
        for batch in work.batches:
            rows = {"input_ids": batch.ids, "labels": batch.labels, "attention_mask": batch.mask}
            inputs = {k: v.to("cuda", non_blocking=True) for k, v in rows.items() if v is not None}
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            if optim.clip is not None:
                torch.nn.utils.clip_grad_norm_(trained, optim.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            work.step(loss)
        work.record(trained, (s for by_name in optimizer.state.values() for s in by_name.values()))
