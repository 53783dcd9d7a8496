"""Build a Trainer: mesh, model on the meta device, stages in order, weights; reject techniques without effect.

data, model ... shard      stages on a model without memory
materialise  allocate this rank's shards, redo ties, fill them from the weight map; fix `trainer.trained`
optimizer, wrap_step, wrap_window   stages on a model with memory
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrush import console
from optrush.config import Config
from optrush.data import sampler
from optrush.data.chat_template import AS_STORED, COMPARED_ROWS, Tokens
from optrush.data.dataset import Source, Sources, read_sources
from optrush.data.images import ImageReader
from optrush.data.samples import SampleSource
from optrush.data.stored_tokens import StoredTokens
from optrush.data.tokenizer import open_tokens, settle_images, turn_ends
from optrush.decide import Decided
from optrush.errors import ConfigError, NeedsError, NoEffectError
from optrush.models.config_json import METHODS, is_readable
from optrush.models.decoder import Decoder, frozen_flops
from optrush.models.delta_rule import rules
from optrush.models.hf import HFModel, load, refuse_shared_rows
from optrush.models.score import score_head
from optrush.models.shapes import LOAD_FIGURES
from optrush.models.source import Growth, check_positions
from optrush.models.text_part import text_config
from optrush.models.vision import open_tower, train_tower, unfreeze
from optrush.models.weights import refuse_frozen, weights_fingerprint
from optrush.objectives import check_layout, dpo, figures, loss_of, rewards
from optrush.objectives.plugged import source_of
from optrush.optim.adamw import AdamW
from optrush.optim.rates import ScaledRates
from optrush.technique import Edit, Part, Technique
from optrush.trainer import distributed, rollout
from optrush.trainer.distributed import World
from optrush.trainer.teacher import StoringPass, add_teacher
from optrush.trainer.trainer import (
    TrainedParam,
    Trainer,
    eval_loss,
    forward_backward,
    loss,
    optimizer_step,
    zero_grad,
)


@dataclass(frozen=True)
class ProcessGroup:
    """This process after the process stage, in the process group."""

    device: torch.device
    applied: tuple[Edit, ...]  # edits of the process stage


def join_ranks(prepared: Decided) -> ProcessGroup:
    """Apply the process stage, then join the process group."""
    edits = [Edit.of("process", t, n) for t in prepared.techniques if (n := t.process(prepared.env))]
    return ProcessGroup(distributed.join(prepared.env.device.kind, prepared.config.train.timeout), tuple(edits))


@dataclass(frozen=True)
class Assembly:
    """Inputs of a build, and how much to build."""

    prepared: Decided
    started: ProcessGroup
    world: World
    training: bool
    data: str | None
    progress: Callable[[str], None] | None
    today: datetime.date | None
    first_steps: int | None


def build(
    prepared: Decided,
    started: ProcessGroup | None = None,
    *,
    training: bool = True,
    data: str | None = None,
    progress: Callable[[str], None] | None = None,
    today: datetime.date | None = None,
    first_steps: int | None = None,
) -> Trainer:
    """Build the trainer: everything before step 0 except resuming. One rank's error is raised on all.

    Args:
        started: the result of `join_ranks`, if it was called before.
        training: False builds no optimizer (`optrush eval`).
        data: a file to evaluate on instead of the held-out data.
        progress: called with a status line during long work.
        today: the date for chat templates that use one; a resumed run keeps its first date.
        first_steps: run only this many steps and do not evaluate; a teacher then stores tokens only for their rows.
    """
    started = started or join_ranks(prepared)
    distributed.record_operation("reading the data and the model")
    world = distributed.build_mesh(prepared.env.axes, started.device)
    a = Assembly(prepared, started, world, training, data, progress, today, first_steps)
    trainer, held_out = distributed.agreed(lambda: _opened(a))
    held_out = held_out if first_steps is None else None
    held_tokens, settings = None, prepared.config.distill
    if prepared.teacher is not None and settings is not None and settings.store is not None:
        held_tokens = _store_tokens(a, trainer, prepared.teacher, held_out)
    distributed.agreed(lambda: _completed(a, trainer, held_out, held_tokens))
    distributed.check_equal(trainer.fingerprints)
    return trainer


def _opened(a: Assembly) -> tuple[Trainer, SampleSource | None]:
    """Open the model on the meta device and the data; return the partial trainer and the held-out samples.

    Contains no collective, so that one rank's error cannot leave the others waiting.
    """
    prepared, config, env, hf = a.prepared, a.prepared.config, a.prepared.env, a.prepared.hf
    console.loading(f"opening the model {config.model.path or config.model.shape} and its tokenizer")
    tokens = open_tokens(config, prepared.folder, a.today)
    dtype, growth = getattr(torch, config.model.dtype), prepared.growth
    model, recipe = load(prepared.folder, hf, config.model.implementation, dtype, config.seed, growth)
    if prepared.scored:
        recipe, hf = score_head(model, recipe, hf, dtype, config.seed)
    if config.tower_part != "none":
        assert isinstance(model, Decoder) and prepared.folder is not None
        recipe = train_tower(model, recipe, prepared.folder, hf, config.tower_part)
    if Part.PACKED_ROWS in env.claimed:
        refuse_shared_rows(model, hf, env.paired)
    if isinstance(model, HFModel):  # its config has defaults for missing keys of config.json
        check_positions(model.config.to_dict(), config.batch.seq, f"`batch.seq: {config.batch.seq}`")
    assert isinstance(model.embedding.weight, Tensor)
    vocab = model.embedding.weight.shape[0]
    ids = prepared.shared_ids(vocab)
    trainer = Trainer(config, env, a.world, hf, model, recipe, vocab=vocab, ids=ids, roots=[model])
    trainer.applied = [*prepared.applied, *a.started.applied]
    trainer.tokenizer = None if tokens is None else tokens.tokenizer
    _note_model(trainer, growth)
    _defaults(trainer)
    _stage(trainer, prepared.techniques, "data")
    check_layout(config, trainer.layout)
    reader = settle_images(tokens, prepared.techniques, trainer.layout)
    console.loading(f"reading the data: {_named(config)}")
    uncut = trainer.layout.uncut or not a.training
    known = vocab if config.data.random is None else ids
    trainer.sources = sources = read_sources(config, tokens, known, a.progress, a.data, cut=uncut)
    held_out = _held_out(sources, a.training)
    _open_tower(trainer, prepared.folder, reader, a.training)
    trainer.notes.append(f"data: {sources.summary}")
    if tokens is not None and a.world.rank == 0 and config.data.random is None:
        _note_tokens(trainer, tokens, prepared.folder)
    trainer.fingerprints = fingerprints(trainer, tokens, sources, a.today)
    if config.grpo is not None:
        trainer.stream = rollout.prompt_stream(config, sources.train, trainer.layout, env.seq)
        return trainer, held_out
    trainer.stream = sampler.stream_of(
        sources.train, trainer.layout, T=env.seq, rows=env.rows, seed=config.seed, cost=model.flops,
        most_bad=config.data.most_bad,
    )  # fmt: skip
    trainer.stream.reader = reader
    return trainer, held_out


def _open_tower(trainer: Trainer, folder: Path | None, reader: ImageReader | None, training: bool) -> None:
    """Add the vision tower if rows have images; note the image sizes."""
    sources, data, part, model = trainer.sources, trainer.config.data, trainer.config.tower_part, trainer.model
    images = sum(part.counts.images for part in (sources.train, sources.held_out) if isinstance(part, Source))
    if reader is None or folder is None or not images:
        if part != "none" and training:
            found = "no row has an image" if reader is not None else "rows with images, but no image reader"
            raise NeedsError(f"`image.train: {part}`", found, "leave `image` out, or name rows with images")
        given = [f"data.{name}" for name in ("min_pixels", "max_pixels", "remote") if getattr(data, name)]
        trainer.notes += [f"{name} does nothing: no row has an image" for name in given]
        return
    assert isinstance(model, Decoder)
    shape, dtype = model.shape, getattr(torch, trainer.config.model.dtype)
    if shape.rope.by_length:
        found = f"{shape.rope.kind} rotary embeddings, which depend on a document's length"
        raise NeedsError("to train on rows with images", found, "use other rotary embeddings, or rows of text")
    if model.tower is None:
        model.tower = open_tower(folder, trainer.hf, dtype, shape.rotated_width).to(trainer.world.device)
    trainer.loading = sampler.decoding_ahead(trainer.loading, trainer.world.device, trainer.world.ranks)
    least, most = reader.sizes.least, reader.sizes.most
    size = sum(p.numel() for p in model.tower.module.parameters()) / 1e6
    workers = trainer.loading.workers
    done = {"none": "is frozen", "projector": "is frozen except its projector", "tower": "is trained"}[part]
    trainer.notes.append(
        f"images: {images}, {least:,} to {most:,} pixels each (set the same limits in a server); the tower, "
        f"{size:,.1f} M parameters, {done}" + (f"; {workers} processes decode images" if workers else "")
    )


def _stage(trainer: Trainer, techniques: Sequence[Technique], name: str) -> None:
    for t in techniques:
        count = getattr(t, name)(trainer)
        if not isinstance(count, int):
            raise TypeError(f"{name} of {t.name} returns {count!r}, not a number of changes")
        if count:
            trainer.applied.append(Edit.of(name, t, count))


def _store_tokens(
    a: Assembly, trainer: Trainer, teacher: tuple[Path | None, dict[str, Any]], held_out: SampleSource | None
) -> StoredTokens | None:
    """Give the stream the teacher's stored tokens, computed if missing; return the tokens of `held_out`."""
    storing, train = StoringPass(trainer, teacher), trainer.sources.train
    if a.first_steps is not None:
        length = trainer.config.train
        plan = trainer.stream.plan(None if length.steps else length.epochs, length.steps)
        steps = range(min(a.first_steps, plan.steps))
        numbers = [s for k in steps for row in trainer.stream.step(k, plan) for s, _ in row]
        trainer.stream.stored = storing.stored_in_memory(train, numbers)
        return None
    wanted = [*([train] if a.training else []), *([] if held_out is None else [held_out])]
    stores = storing.stored(wanted)
    trainer.stream.stored = stores[0] if a.training else None
    return None if held_out is None else stores[-1]


def _completed(a: Assembly, trainer: Trainer, held_out: SampleSource | None, held_tokens: StoredTokens | None) -> None:
    """Apply the stages and allocate the model. Contains no collective, like `_opened`."""
    prepared, training, model, world = a.prepared, a.training, trainer.model, a.world
    config, env = prepared.config, prepared.env
    stage = partial(_stage, trainer, prepared.techniques)
    for name in ("model", "peft", "split", "loss", "recompute", "compile", "shard"):
        stage(name)
        if name == "peft":  # every rank still has the full model: its cost distributes rows
            model.frozen_flops = frozen_flops(model)
        _other_model(a, trainer, name)
        if isinstance(model, Decoder) and model.tower is not None:
            if name == "model" and not model.tower.trained:  # cast once
                types = trainer.precision, model.embedding.weight.dtype
                model.tower.to(world.device, torch.bfloat16 if torch.bfloat16 in types else None)
            elif name == "peft" and model.tower.trained:  # adapters freeze all else
                unfreeze(model, config.tower_part)
    if prepared.growth is not None and training:
        refuse_frozen(model, trainer.weight_map, prepared.growth)
    if held_out is not None and config.grpo is None:
        trainer.evaluation = sampler.evaluation(
            held_out, T=env.seq, micro_rows=env.micro_rows, rank=world.data_rank, ranks=world.data_ranks,
            packed=model.supports_packing,
        )  # fmt: skip
        trainer.evaluation = replace(trainer.evaluation, stored=held_tokens, reader=trainer.stream.reader)
    if config.referenced is not None or not all(p.requires_grad for p in model.parameters()):
        trainer.fingerprints["base"] = weights_fingerprint(prepared.folder, config.seed)
    _note_rules(trainer)
    console.loading(f"loading the weights: {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters")
    settle_weights(trainer)
    if training:
        stage("optimizer")
        if trainer.optimizer is None:
            trainer.optimizer = AdamW(
                trainer.trained, config.optim, fused=False, rounding=trainer.rounding, seed=config.seed
            )
        check_rounding(trainer)
        if config.image is not None and config.image.lr is not None:
            ratio = config.image.lr / config.optim.lr
            faster = [t for t in trainer.trained if t.name.startswith("visual.")]
            trainer.optimizer = ScaledRates(trainer.optimizer, trainer.trained, ratio, faster.__contains__)
        if trainer.optimizer.reads_host:
            trainer.notes.append("the optimizer synchronizes with the GPU in each step")
        stage("wrap_step")
        stage("wrap_window")
        _refuse_without_effect(trainer, prepared.techniques)
    else:
        stage("wrap_step")
    if config.grpo is not None:
        rollout.attach(trainer, held_out)


def _held_out(sources: Sources, training: bool) -> SampleSource | None:
    """Return the samples to evaluate: held-out samples, or all without training."""
    held_out = sources.held_out or (None if training else sources.train)
    if held_out is not None and not held_out.tokenized:
        do = "leave data.stream out (--set data.stream=false), or give a data.eval"
        raise ConfigError("to evaluate on `data.path`", "`data.stream`: the number of rows is unknown", do)
    return held_out


def _other_model(a: Assembly, trainer: Trainer, stage: str) -> None:
    """Give the loss its second model once the first is final: an adapter's base, or a teacher."""
    settings, untrained = a.prepared.config.referenced, trainer.adapters_disabled
    if stage == "peft" and settings is not None and dpo.by_adapter(settings, untrained):
        assert untrained is not None
        trainer.loss = partial(dpo.loss_with_reference, trainer.loss, trainer.model, untrained)
    if stage == "peft" and a.training:
        rollout.stay_near_base(trainer)
    if stage == "loss" and a.prepared.teacher is not None:
        add_teacher(trainer, *a.prepared.teacher)


def _named(config: Config) -> str:
    """Return a short name of the data source."""
    places = [origin.path for origin in config.data.origins]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{places[0]}{more}" if places else f"the sample {config.data.sample}" if config.data.sample else "random"


def _note_model(trainer: Trainer, growth: Growth | None) -> None:
    """Note unusual properties of the model for these rows."""
    seq = trainer.config.batch.seq
    if seq > (made := text_config(trainer.hf).get("max_position_embeddings") or seq):
        trainer.notes.append(f"rows of {seq} tokens exceed the model's max_position_embeddings ({made})")
    if not trainer.model.supports_packing:
        trainer.notes.append("one document per row: this model, through transformers, lets packed documents mix")
    if growth is not None:
        trainer.notes.append(growth.note)
    if is_readable(stored := trainer.hf.get("quantization_config")):
        trainer.notes.append(f"the base's {METHODS[stored['quant_method']]} weights are loaded as dense weights")
    talks = trainer.config.objective not in ("pretrain", "reward") and getattr(trainer.tokenizer, "chat_template", None)
    if talks and not turn_ends(trainer.tokenizer):
        known = "add it to eos_token_id in generation_config.json of the exported model"
        trainer.notes.append(f"the token that ends an answer under the chat template is unknown: {known}")


def _note_tokens(trainer: Trainer, tokens: Tokens, base: Path | None) -> None:
    """Note where other programs would tokenize the first documents differently."""
    given, train = trainer.config.model.tokenizer, trainer.sources.train
    folder = base if given is None else Path(given)
    first = range(min(COMPARED_ROWS, len(train))) if train.tokenized else ()
    documents = (d.ids.tolist() for i in first for d in train.documents(i))
    if folder is not None and (difference := tokens.otherwise(folder, documents)) is not None:
        trainer.notes.append(f"trained on other tokens than tokenizer.json gives: {difference}; {AS_STORED}")


def _note_rules(trainer: Trainer) -> None:
    """Note the functions called by the model's delta rules, once they are final."""
    if trainer.env.shape is not None and trainer.env.shape.delta is not None:
        trainer.notes.append(f"delta rule: {' and '.join(rules(trainer.model))}")


def _refuse_without_effect(trainer: Trainer, techniques: Sequence[Technique]) -> None:
    """Raise NoEffectError for a technique that changed nothing."""
    effective = {e.technique for e in trainer.applied}
    for t in techniques:
        if t.name not in effective:
            raise NoEffectError(f"`{t.name}`", "it changed nothing in this run", f"leave it out: --without {t.name}")


def _defaults(trainer: Trainer) -> None:
    """Set the trainer's metrics, scalars and default functions, before techniques replace them."""
    device = trainer.world.device
    trainer.metrics = {name: torch.zeros((), device=device) for name in figures(trainer.config)}
    if trainer.env.shape is not None and trainer.env.shape.experts is not None:
        trainer.metrics.update((name, torch.zeros((), device=device)) for name in LOAD_FIGURES)
    trainer.loss_from_hidden = loss_of(trainer.config, trainer.model.head, trainer.metrics)
    if (plugged := trainer.config.loss) is not None:
        trainer.notes.append(f"the loss is {plugged.use}, in place of the objective's")
    trainer.loss = partial(loss, trainer)
    trainer.place = lambda batch: batch.to(device)
    trainer.forward_backward = partial(forward_backward, trainer)
    trainer.eval_loss = partial(eval_loss, trainer)
    trainer.optimizer_step = partial(optimizer_step, trainer)
    trainer.zero_grad = partial(zero_grad, trainer)
    trainer.scale = torch.ones((), device=device)
    trainer.lr = torch.zeros((), device=device)
    trainer.loss_is_finite = torch.ones((), dtype=torch.bool, device=device)


def settle_weights(trainer: Trainer) -> None:
    """Allocate and fill the weights, fix `trainer.trained`."""
    # Before materialising: an engine may flatten parameters. Experts' biases have several rows, too.
    matrices = {name for name, p in trainer.model.named_parameters() if p.dim() > 1 and not name.endswith("bias")}
    trainer.storage.materialise(trainer)
    trainer.weight_map.release()
    learned = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    trainer.trained = [TrainedParam(name, p, decays=name in matrices) for name, p in learned]


def check_rounding(trainer: Trainer) -> None:
    """Check that the optimizer rounds bfloat16 weights as configured; note any loss.

    Raises:
        NeedsError: the optimizer rounds differently.
    """
    done = getattr(trainer.optimizer, "rounding", "nearest")
    if done != trainer.rounding:
        found = f"the optimizer {type(trainer.optimizer).__name__} rounds to {done}" if done == "nearest" else done
        do = "use --with bf16:rounding=nearest, or another optimizer"
        raise NeedsError(f"bfloat16 weights with {trainer.rounding} rounding", found, do)
    if done == "nearest" and any(t.local.dtype == torch.bfloat16 for t in trainer.trained):
        trainer.notes.append("bfloat16 weights are rounded to nearest: at small learning rates most never change")


def fingerprints(
    trainer: Trainer, tokens: Tokens | None, sources: Sources, today: datetime.date | None
) -> dict[str, str]:
    """Return digests by field; equal on every rank and in a resumed run."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

    order = f"seed {trainer.config.seed}, {trainer.env.rows} rows of {trainer.env.seq} tokens a step, {trainer.layout}"
    order += "" if sources.train.tokenized else f", windows of {sampler.LIVE_WINDOW} rows"
    digests = {"config": digest(trainer.hf), "data": sources.fingerprint, "order": order}
    if trainer.config.loss is not None:
        digests["loss"] = digest([source_of("loss", trainer.config.loss.use), trainer.config.loss.options])
    if trainer.config.grpo is not None:
        for rule in (rules := trainer.config.grpo.rewards):
            rewards.open_reward(rule)  # rejects an unknown name and lists the known ones
        functions = [source_of("reward", rule.use) for rule in rules if rewards.is_own(rule)]
        digests["rewards"] = digest([[dict(rule) for rule in rules], functions])
    if tokens is not None:
        digests["tokenizer"] = digest(tokens.tokenizer.backend_tokenizer.to_str())
        template = getattr(tokens.tokenizer, "chat_template", None)
        digests["template"] = digest(template)
        if "strftime_now" in str(template):  # the template writes the date into every conversation
            digests["date"] = (today or datetime.date.today()).isoformat()
    return digests
