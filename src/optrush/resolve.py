"""Config -> ResolvedConfig: all that can be refused before anything is built or written. Pure: the plan uses it too.

rules between fields -> the model's config.json -> the config stage -> needs and claims on the device
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optrush import hardware
from optrush.config import (
    ADAPTER_LR,
    JUDGED,
    METHODS,
    SECTIONS,
    Config,
    Distill,
    Dpo,
    refuse_secrets,
    spelled_out,
    with_method,
)
from optrush.errors import ConfigError, NeedsError
from optrush.hardware import Device
from optrush.launch import launched
from optrush.models.shapes import ModelShape, native_obstacle, refuse_foreign, sdpa_obstacle
from optrush.models.source import Growth, check_positions, grow, locate, read_generation
from optrush.models.text_part import text_config, with_vocabulary
from optrush.planner.cost import choose_micro_batch
from optrush.technique import (
    SAME_ROWS,
    Edit,
    Environment,
    ModelSpec,
    Part,
    Requirement,
    Teacher,
    Technique,
    in_order,
    instantiate,
    mesh_axes,
    missing,
    refuse_unmet,
    rows_of_batch,
    settle,
    unmet,
)
from optrush.techniques import ALL


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that has passed every check that needs no model."""

    config: Config  # its micro-batch is a number, also where the file has `auto`
    techniques: list[Technique]
    env: Environment
    folder: Path | None
    hf: dict[str, Any]  # config.json as the config stage left it
    applied: tuple[Edit, ...]  # of the config stage
    growth: Growth | None = None  # of the vocabulary
    scored: bool = False  # the model gets a score in place of next tokens
    teacher: tuple[Path | None, dict[str, Any]] | None = None  # its folder and config.json


def resolve(
    config: Config,
    classes: Sequence[type[Technique]] = ALL,
    ranks: int | None = None,
    device: Device | None = None,
) -> ResolvedConfig:
    """Check what can be checked before anything is built.

    Args:
        device: the device to plan for; None: this machine's, to train on.

    Raises:
        UserError: in its three lines; nothing has been written.
    """
    if config.method == "auto":
        raise ConfigError("`method: auto`", "nothing here plans", f"take {', '.join(METHODS)}")
    config = with_method(config)
    automatic = config.batch.micro_tokens == "auto"
    config = _chooser(config, classes) if automatic else config
    check_pairs(config)
    if section := SECTIONS.get(config.objective):
        settings = getattr(config, config.objective) or section()
        config = config.model_copy(update={config.objective: settings})
    techniques = in_order(instantiate(classes, config.with_))
    config = with_rate(config, classes)
    check_fields(config)
    ranks = launched()[1] if ranks is None else ranks
    axes = mesh_axes(techniques, ranks)
    each = math.prod(n for axis, n in axes.items() if axis in SAME_ROWS)
    rows, micro_rows = rows_of_batch(config, ranks // each, each)
    folder, hf = locate(config, weights=device is None)
    if config.model.chat_template is not None and folder is not None:
        read_generation(folder)  # its end of a turn is added after the last step
    growth = grow(config, folder, text_config(hf))
    hf = hf if growth is None else with_vocabulary(hf, growth.vocab)
    text = text_config(hf)
    edits = [Edit.of("config", t, n) for t in techniques if (n := t.config(text))]
    refuse_foreign(hf)
    obstacle = native_obstacle(hf)
    if config.model.implementation == "native" and obstacle is not None:
        raise NeedsError("`model.implementation: native`", obstacle, "take `model.implementation: transformers`")
    native = config.model.implementation != "transformers" and obstacle is None
    known = ModelShape.read(hf) if obstacle is None else None
    shape = known if native else None
    if shape is None:  # padding has positions too, and a table of them ends
        check_positions(text, config.batch.seq, f"`batch.seq: {config.batch.seq}`")
    here = device is None
    device = device or _device(ranks)
    if config.model.dtype == "bfloat16" and device.kind == "cuda" and device.capability < (8, 0):
        found = f"{device.name}, capability {device.capability}, which has no such products"
        raise NeedsError("`model.dtype: bfloat16`", found, "leave it out, and take --with amp:dtype=fp16")
    teacher = None if (of := config.of_teacher()) is None else locate(of, weights=here)
    env = Environment(
        device, ranks, config.batch.seq, rows, micro_rows, config.optim.clip, config.model.dtype, native,
        blocks=int(text.get("num_hidden_layers") or text.get("n_layer") or 0), vocab=int(text.get("vocab_size") or 0),
        shape=shape, sdpa_obstacle=None if native else sdpa_obstacle(hf),
        spec=ModelSpec(grouped_heads=known is None or known.kv_heads < known.heads), paired=config.paired,
        reference=config.referenced.reference if config.referenced else None, axes=axes,
        scored=config.scored, teacher=None if teacher is None else _sizes(config, teacher[1], text),
        copies_saved=config.train.save == "async",
    )  # fmt: skip
    if automatic:
        env = dataclasses.replace(env, micro_rows=choose_micro_batch(techniques, env, hf))
    env = settle(techniques, env, classes)
    check_reference(env, config.objective)
    check_teacher(env)
    if here:  # before hours of tokenising
        for technique in techniques:
            refuse_unmet(missing(technique))
    return ResolvedConfig(
        _sized(config, env), techniques, env, folder, hf, tuple(edits), growth, config.scored, teacher
    )


def resized(prepared: ResolvedConfig, rows: int) -> ResolvedConfig:
    """Return the same with another micro-batch, or raise NeedsError if a technique does not allow it."""
    env = dataclasses.replace(prepared.env, micro_rows=rows)
    # The owner of MEMORY has already replaced the device by a smaller one, and would do so again.
    others = [t for t in prepared.techniques if Part.MEMORY not in t.claims]
    refuse_unmet(unmet(others, env))
    return dataclasses.replace(prepared, config=_sized(prepared.config, env), env=env)


def with_rate(config: Config, classes: Sequence[type[Technique]] = ALL) -> Config:
    """Return the configuration with a learning rate where none is given: adapters' own, unless it trains on pairs."""
    if "lr" in config.optim.model_fields_set:
        return config
    adapters = any(Part.ADAPTERS in t.claims for t in instantiate(classes, with_method(config).with_))
    lr = ADAPTER_LR if adapters and not config.paired else config.optim.lr
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": lr})})


def _sized(config: Config, env: Environment) -> Config:
    tokens = env.micro_rows * env.seq
    if config.batch.micro_tokens == tokens or (config.batch.micro_tokens is None and tokens == env.seq):
        return config
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_tokens": tokens})})


def _chooser(config: Config, classes: Sequence[type[Technique]]) -> Config:
    """Add a technique that owns the micro-batch, which `auto` needs and the file need not name."""
    owners = [c.name for c in classes if Part.MICRO_BATCH in c.claims]
    if not owners:
        do = f"give a multiple of {config.batch.seq}"
        raise ConfigError("`batch.micro_tokens: auto`", "no technique here finds it", do)
    if config.with_.keys() & set(owners):
        return config
    return config.model_copy(update={"with_": {**config.with_, owners[0]: {}}})


def _device(ranks: int) -> Device:
    """Return this machine's device, or raise ConfigError if it has fewer than its ranks."""
    devices = hardware.probe()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if devices and here > len(devices):
        raise ConfigError(f"{here} ranks on this machine", f"{len(devices)} devices", f"take --ranks {len(devices)}")
    return devices[0] if devices else hardware.CPU


def check_fields(config: Config) -> None:
    """Raise ConfigError for fields of `data:`, `model:` and the objective that contradict each other; reads nothing."""
    refuse_secrets(config)
    d = config.data
    if config.objective == "pretrain" and d.train_on == "last":
        raise ConfigError("`data.train_on: last`", "`objective: pretrain` learns every token", "objective: sft")
    if d.split_turns and (config.objective, d.train_on) != ("sft", "assistant"):
        found = (
            f"`objective: {config.objective}`, `data.train_on: {d.train_on}`: not every answer alone is learnt there"
        )
        raise ConfigError("`data.split_turns`", found, "leave it out, or take objective: sft and train_on: assistant")
    given = [name for name in ("path", "sample", "random") if getattr(d, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"`data.{g}`" for g in given) or "none of them"
        raise ConfigError("one of `data.path`, `data.sample`, `data.random`", found, "give exactly one")
    if config.distill is not None and config.distill.teacher is None:
        do = "name a Hugging Face folder or hub id: distill: {teacher: ...}"
        raise ConfigError("`distill.teacher`", "none is named", do)
    if config.distill is not None and config.distill.store is not None:
        _check_store(config.distill, d.stream)
    if d.random is not None:
        if config.objective not in ("pretrain", "distill"):
            asked = f"`objective: {config.objective}` on `data.random`"
            raise ConfigError(asked, "random tokens", "objective: pretrain")
        if isinstance(d.eval, str):
            raise ConfigError("`data.eval` from a file beside `data.random`", d.eval, "give a fraction")
    elif config.model.shape is not None and config.model.tokenizer is None:
        do = "name a folder that has one: model.tokenizer; or take data.random"
        raise ConfigError(f"`model.shape: {config.model.shape}` on text", "a shape has no tokenizer", do)
    if config.model.tokenizer is not None and config.model.shape is None:
        raise ConfigError(f"`model.tokenizer: {config.model.tokenizer}`", "`model.path` brings its own", "leave it out")
    if config.train.stop_after is not None and d.eval is None:
        do = "add data.eval: 0.1, or leave train.stop_after out"
        raise ConfigError("`train.stop_after`", "no `data.eval`: nothing is held out", do)
    if d.stream and d.path is None:
        raise ConfigError("`data.stream`", "no `data.path` to read from", "leave data.stream out")
    if d.clean is not None and d.path is None:
        raise ConfigError("`data.clean`", "no `data.path` to clean", "leave data.clean out")


def _check_store(settings: Distill, stream: bool) -> None:
    """Raise ConfigError for a teacher whose stored probabilities cannot serve the run."""
    asked = f"`distill.store: {settings.store}`"
    if settings.divergence == "reverse":
        found = "`divergence: reverse`, which weighs every token by the model's own probability: few of them are stored"
        raise ConfigError(asked, found, "take divergence: forward, or leave store out")
    if stream:
        found = "`data.stream`, whose rows are not read before step 0"
        raise ConfigError(asked, found, "leave data.stream out, or leave store out")


def check_pairs(config: Config) -> None:
    """Raise ConfigError for a section that the objective ignores, or data that pairs cannot have; reads nothing."""
    asked, d, settings = f"`objective: {config.objective}`", config.data, config.dpo or Dpo()
    for name in SECTIONS:
        if name != config.objective and getattr(config, name) is not None:
            do = f"leave `{name}` out, or objective: {name}"
            raise ConfigError(f"`{name}` with {asked}", "nothing there reads it", do)
    if not config.paired:
        return
    if settings.loss == "ipo" and settings.label_smoothing:
        found = "a squared distance, which has no probability of a wrong label in it"
        raise ConfigError("`dpo.label_smoothing` with `dpo.loss: ipo`", found, "leave one of the two out")
    if d.too_long in ("split", "truncate"):
        found = "pairs: answers that are cut were never compared"
        raise ConfigError(f"`data.too_long: {d.too_long}` with {asked}", found, "take data.too_long: error or drop")
    if d.stream and config.objective == JUDGED:
        found = "`data.stream`, whose rows are not read before step 0: none has the answer of another one"
        raise ConfigError(f"`data.stream` with {asked}", found, "leave data.stream out")
    if d.train_on == "all":
        found = "pairs, whose prompt is the same on both sides and cancels out"
        raise ConfigError(f"`data.train_on: all` with {asked}", found, "take data.train_on: assistant or last")
    if d.stream and settings.reference == "precomputed":
        found = "`data.stream`, whose rows nobody has read before step 0"
        raise ConfigError("`dpo.reference: precomputed`", found, "leave data.stream out, or take reference: adapter")


def _sizes(config: Config, hf: dict[str, Any], student: dict[str, Any]) -> Teacher:
    """Return what the plan needs of a teacher.

    Raises:
        ConfigError: its table of positions is shorter than the rows, or the vocabulary smaller than what is stored.
    """
    refuse_foreign(hf)
    assert config.distill is not None
    known = ModelShape.read(hf) if native_obstacle(hf) is None else None
    if known is None:
        check_positions(text_config(hf), config.batch.seq, f"`batch.seq: {config.batch.seq}`, `distill.teacher`")
    asked, vocab = config.distill.store, min(int(of.get("vocab_size") or 0) for of in (text_config(hf), student))
    if asked is not None and asked > vocab:
        found = f"a vocabulary of {vocab}"
        raise ConfigError(f"`distill.store: {asked}`", found, "take fewer: 64 is usual")
    return Teacher(known, 2 if config.distill.dtype == "bfloat16" else 4, config.distill.chunk, asked)


def check_teacher(env: Environment) -> None:
    """Raise NeedsError for techniques that a teacher cannot run with."""
    if env.teacher is None:
        return
    asked, do = "`objective: distill`, whose teacher sees whole rows on every rank", "leave that technique out"
    found = "a technique that gives ranks parts of the rows, the model or its layers"
    met = not {Part.CP, Part.TP, Part.PP} & env.claimed
    refuse_unmet([Requirement(met, asked, found, do)])
    found = "a technique that records the step, in which no teacher has been tried"
    refuse_unmet([Requirement(Part.CAPTURE not in env.claimed, "`objective: distill`", found, do)])


def check_reference(env: Environment, objective: str) -> None:
    """Raise NeedsError if `reference: adapter` is set and the model before training cannot be restored."""
    if env.reference != "adapter" or env.spec.adapters_removable:
        return
    found = "every weight is trained, and nothing keeps what it was"
    other = f"{objective}.reference: precomputed"
    do = f"train an adapter (optrush techniques), or take {other}"
    if Part.ADAPTERS in env.claimed:
        found = "what is trained cannot be undone: whole weights are, or the adapter began from a folder (save, init)"
        do = f"leave save and init out, or take {other}"
    raise NeedsError(f"`{objective}.reference: adapter`", found, do)


def without_adapters(config: Config, classes: Sequence[type[Technique]] = ALL) -> tuple[Config, list[str]]:
    """Return the configuration for a trained and exported model, whose weights include its adapters.

    Returns:
        It without the techniques that claim or want TRAINED, which would add adapters and quantise again; their names.
    """
    config = spelled_out(config)
    gone = [c.name for c in classes if Part.TRAINED in c.claims | c.wants and c.name in config.with_]
    kept = {name: options for name, options in config.with_.items() if name not in gone}
    return config.with_reference("auto").model_copy(update={"with_": kept, "method": None}), gone
