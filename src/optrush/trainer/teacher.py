"""Load the teacher of `objective: distill`: a second model, frozen, whole on every rank, with the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from optrush.config import Config
from optrush.errors import NeedsError
from optrush.kernels.distillation import Blend, Compared, Lesson
from optrush.models.decoder import Decoder
from optrush.models.hf import HFModel, load
from optrush.models.shapes import sdpa_obstacle
from optrush.models.weights import weights_fingerprint
from optrush.objectives.distill import loss_with_teacher
from optrush.trainer.trainer import Trainer


def add_teacher(trainer: Trainer, folder: Path | None, hf: dict[str, Any]) -> None:
    """Load the teacher onto the device; make the head's kernel and the loss use it.

    Raises:
        NeedsError: its tokens are others, or the model is not supported.
    """
    config, settings = trainer.config, trainer.config.distill
    assert settings is not None
    _same_tokens(trainer, config, folder, hf)
    dtype = getattr(torch, settings.dtype)
    teacher, recipe = load(folder, hf, None, dtype, config.seed)
    attention = trainer.env.spec.attention
    if isinstance(teacher, HFModel) and attention != "masked":
        attention = "masked" if sdpa_obstacle(hf) else "sdpa"
    teacher.set_attention(attention)
    teacher.to_empty(device=trainer.world.device)
    teacher.tie()
    teacher.restore_buffers(trainer.world.device)
    with torch.no_grad():
        for name, p in teacher.named_parameters():
            recipe.fill(name, p, (0,) * p.dim())
    recipe.release()
    teacher.requires_grad_(False).eval()
    lesson, blend = Lesson(), Blend(settings.temperature, settings.alpha, settings.divergence == "reverse")
    trainer.model.head.nll = Compared(
        logits=teacher.head.logits, lesson=lesson, blend=blend, metrics=trainer.metrics, chunk=settings.chunk
    )
    trainer.loss = partial(loss_with_teacher, trainer.loss, teacher, lesson)
    trainer.fingerprints["teacher"] = weights_fingerprint(folder, config.seed)
    kind = "our decoder" if isinstance(teacher, Decoder) else "transformers"
    size = f"{sum(p.numel() for p in teacher.parameters()) / 1e6:,.1f} M parameters in {settings.dtype}"
    trainer.notes.append(f"teacher: {settings.teacher}, {size}, {kind}, attention {attention}")


def _same_tokens(trainer: Trainer, config: Config, folder: Path | None, hf: dict[str, Any]) -> None:
    """Raise NeedsError unless the teacher has the same tokens at the same numbers."""
    from transformers import AutoTokenizer

    from optrush.console import transformers_silenced

    assert config.distill is not None
    asked, do = f"`distill.teacher: {config.distill.teacher}`", "take a teacher of the same family"
    ours = {} if trainer.tokenizer is None else trainer.tokenizer.get_vocab()
    if folder is None or not ours or not any(folder.glob("tokenizer*")):
        if hf.get("vocab_size") != trainer.vocab:
            found = f"a vocabulary of {hf.get('vocab_size')}, where the model has {trainer.vocab}"
            raise NeedsError(asked, found, do)
        return
    with transformers_silenced():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    theirs: dict[str, int] = tokenizer.get_vocab()
    odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if odd:
        one = odd[0]
        found = f"{len(odd)} tokens differ: {one!r} is {theirs.get(one, 'none')} there, {ours.get(one, 'none')} here"
        raise NeedsError(asked, found, do)
    least, most = min(int(hf.get("vocab_size") or 0), trainer.vocab), max(ours.values())
    if most >= least:
        raise NeedsError(asked, f"{least} logits in common, where the tokenizer has {most + 1} tokens", do)
