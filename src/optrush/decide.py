"""Decide the open questions of a configuration: method, techniques, micro-batch, learning rate, mesh. Pure.

checks between fields -> the model's config.json -> for each open method the fastest set of techniques that fits
(`planner.sets`; a set in the file is fixed, and only its micro-batch is chosen) -> claims and needs on the device ->
`Decided`. Every verb calls `decide`, so that all of them give the same answer.

A `Config` is changed only here (`changed`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optrush import hardware
from optrush.config import (
    ADAPTER_LR,
    ANSWERS_LR,
    COMPARED,
    JUDGED,
    METHODS,
    SECTIONS,
    Config,
    Distill,
    Dpo,
    Grpo,
    Model,
    parse_config,
    refuse_secrets,
)
from optrush.data.length_estimate import estimate_fill, estimate_longest, estimate_mean, first_images, run_tokens
from optrush.errors import ConfigError, NeedsError, NoRowsError, UserError
from optrush.files import read_text
from optrush.hardware import GIB, Device
from optrush.launch import launched
from optrush.models.families import TOWER_BASES
from optrush.models.shapes import HF, ModelShape, native_obstacle, refuse_foreign, sdpa_obstacle
from optrush.models.source import Growth, check_positions, grow, locate, read_generation
from optrush.models.text_part import reads_mutually, text_config, tower_sizes, with_vocabulary
from optrush.models.traced import TracedShape, find_traced, shape_of
from optrush.planner import calibration
from optrush.planner.ledger import Short
from optrush.planner.sets import Candidate, Problem, evaluate_set, micro_batch_rows, search_sets
from optrush.technique import (
    RANK_PARTS,
    SAME_ROWS,
    Edit,
    Environment,
    ModelSpec,
    Part,
    Requirement,
    Rollout,
    RowImages,
    Teacher,
    Technique,
    in_order,
    instantiate,
    mesh_axes,
    mesh_text,
    missing,
    refuse_unmet,
    rows_of_batch,
    settle,
    unmet,
)
from optrush.techniques import ALL

ROOM = 64  # tokens per slot are a multiple of it
SLOTS = 64  # answers sampled at the same time on a CPU, by default
CACHED = 4  # on a GPU, their keys and values may take 1 / CACHED of its memory


class NothingFits(NeedsError):
    """No set of techniques that keeps the maths fits on the device."""


ROW_KEYS = {"sft": "messages", "kto": "prompt, completion, label", "grpo": "instruction, output"}  # else pairs


@dataclass(frozen=True)
class Reason:
    """One open question, the answer and its reason."""

    question: str  # "method", "techniques", "micro-batch", ...
    answer: str


@dataclass(frozen=True)
class Decided:
    """A run without open questions that passed every check without the model itself."""

    config: Config  # with explicit techniques, micro-batch and learning rate
    techniques: list[Technique]
    env: Environment
    folder: Path | None
    hf: dict[str, Any]  # config.json after the config stage
    applied: tuple[Edit, ...]  # edits of the config stage
    growth: Growth | None = None  # growth of the vocabulary
    scored: bool = False  # the model outputs a score in place of next tokens
    teacher: tuple[Path | None, dict[str, Any]] | None = None  # its folder and config.json
    reasons: tuple[Reason, ...] = ()  # answers to the file's open questions

    def shared_ids(self, vocab: int) -> int:
        """Return the number of token ids that both the model, with `vocab` ids, and its teacher embed."""
        return min(vocab, (text_config(self.teacher[1]).get("vocab_size") if self.teacher else None) or vocab)

    def lines(self) -> list[str]:
        """Return the decisions as at most six lines; empty: nothing was open."""
        width = max((len(r.question) for r in self.reasons), default=0)
        title = [f"decided for {self.env.device.name}:"] if self.reasons else []
        return title + [f"  {r.question:<{width}}  {r.answer}" for r in self.reasons]

    def facts(self) -> dict[str, Any]:
        """Return the answers as values for JSON: method, with, micro_tokens, lr, mesh, and the reasons."""
        c = self.config
        return {
            "method": c.method,
            "with": {name: dict(options) for name, options in c.with_.items()},
            "micro_tokens": self.env.micro_rows * self.env.seq,
            "lr": c.optim.lr,
            "mesh": dict(self.env.mesh),
            "reasons": {r.question: r.answer for r in self.reasons},
        }


def decide(
    config: Config, classes: Sequence[type[Technique]] = ALL, ranks: int | None = None, device: Device | None = None, *,
    here: bool | None = None, choose: bool | None = None,
) -> Decided:  # fmt: skip
    """Answer the open questions of a configuration, and check the result.

    Args:
        ranks: processes; None: the launcher's.
        device: the device to plan for; None: this machine's, to train on.
        here: leave out techniques whose packages or compilers this machine lacks; None: True if `device` is None.
        choose: choose techniques next to the configured ones; None: True without `with`, or with `method: auto`.

    Raises:
        UserError: something must be changed; nothing was written.
    """
    ranks = launched()[1] if ranks is None else ranks
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks", "a run has one or more", "give 1, or the number of GPUs")
    here = device is None if here is None else here
    check_pairs(config)
    check_fields(config)
    config = with_answers(config, classes)
    choose = config.unplanned if choose is None else choose
    if not choose and isinstance(config.batch.micro_tokens, int):
        decided = _checked(config, classes, ranks, device)
        return dataclasses.replace(decided, reasons=tuple(_sampling(decided)))
    given = config
    if isinstance(config.batch.micro_tokens, int):
        rows_of_batch(config, 1)  # rejects sizes that do not divide into rows
    if config.batch.micro_tokens == "auto":
        config = _with_chooser(config, classes)
    if choose:
        config, reasons = _choose_set(config, classes, ranks, device, here)
    else:
        config, reasons = _choose_size(with_method(config), classes, ranks, device)
    decided = _checked(config, classes, ranks, device)
    if given.batch.micro_tokens is None and decided.env.device.kind == "cuda" and native_obstacle(decided.hf):
        with suppress(UserError):  # no step of its family was measured: halve it if memory runs out
            decided = _checked(_with_chooser(config, classes), classes, ranks, device)
    if "lr" not in config.optim.model_fields_set and decided.config.optim.lr != config.optim.lr:
        reasons.append(Reason("learning rate", f"{decided.config.optim.lr:g}, the default of adapters"))
    return dataclasses.replace(decided, reasons=(*reasons, *_sampling(decided)))


def _sampling(decided: Decided) -> Iterator[Reason]:
    """Yield the requirements of sampling; none if no answers are sampled."""
    r, shape = decided.env.rollout, decided.env.shape
    if r is None or r.served or not isinstance(shape, ModelShape):
        return
    values = 2 * shape.key_width * shape.layers * (r.slots + 1) * r.room
    size = values * (2 if Part.PRECISION in decided.env.claimed or decided.env.dtype == "bfloat16" else 4)
    text = f"{r.slots} answers at a time; at most {size / GIB:.1f} GiB of keys and values"
    if decided.env.device.kind == "cuda":
        yield Reason("sampling", f"{text}, kept for the run; its time is planned for answers of {r.most} tokens")
    else:
        yield Reason("sampling", f"{text}, freed before the update; its time is not planned")


def _rollout(config: Config, ranks: int, shape: object, device: Device) -> Rollout | None:
    """Return the answers that each rank samples per step."""
    if (g := config.grpo) is None or config.objective != "grpo":
        return None
    answers, longest = -(-g.prompts // ranks) * g.group, estimate_longest(config) or config.batch.seq
    room = -(-min(config.batch.seq, longest + g.max_new) // ROOM) * ROOM
    slots = narrow = g.slots or (SLOTS if config.rollout is None else answers)
    free = g.slots is None and config.rollout is None and device.kind == "cuda"
    if free and device.memory_bytes and isinstance(shape, ModelShape):
        token = 4 * shape.key_width * shape.layers  # bytes of its keys and values in 16 bits
        narrow = max(1, int(device.memory_bytes / CACHED / (token * room)))
        slots = narrow if config.model.dtype == "bfloat16" else max(1, narrow // 2)
    mean = min(config.batch.seq, estimate_mean(config) + g.max_new)
    slots, narrow = min(slots, answers), min(narrow, answers)
    return Rollout(answers, slots, g.max_new, room, mean, config.rollout is not None, narrow)


# --- changes of a configuration


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with changed values by key: `seed`, `batch.micro_tokens`, `with`."""
    sections: dict[str, Any] = {}
    for key, value in changes.items():
        name, _, inner = key.partition(".")
        name = "with_" if name == "with" else name
        if inner:
            value = sections.get(name, getattr(config, name)).model_copy(update={inner: value})
        sections[name] = value
    return config.model_copy(update=sections)


def with_method(config: Config) -> Config:
    """Return the configuration with its method's techniques added; its own techniques keep their options.

    Raises:
        ConfigError: the file has a technique of another method.
    """
    if config.method is None or config.method == "auto":
        return config
    required = METHODS[config.method]
    others = {name for parts in METHODS.values() for name in parts} - required.keys()
    if odd := sorted(others & config.with_.keys()):
        fitting = next((m for m, parts in METHODS.items() if {*odd, *required} <= parts.keys()), "auto")
        do = f"leave one of the two out, or write `method: {fitting}`"
        raise ConfigError(f"`method: {config.method}`", f"`with.{odd[0]}`, which is not part of that method", do)
    if required.keys() <= config.with_.keys():
        return config
    return changed(config, {"with": {**required, **config.with_}})


def spelled_out(config: Config) -> Config:
    """Return the configuration with its method expressed only as techniques, which a caller may then change."""
    return config if config.method == "auto" else changed(with_method(config), {"method": None})


def with_setting(config: Config, setting: Candidate) -> Config:
    """Return the configuration with the techniques and micro-batch of a search's result."""
    with_ = {name: dict(options) for name, options in setting.with_.items()}
    return changed(config, {"with": with_, "batch.micro_tokens": setting.micro_rows * config.batch.seq})


def with_rate(config: Config, classes: Sequence[type[Technique]] = ALL) -> Config:
    """Return the configuration with a default learning rate if it has none: higher for adapters, except on pairs."""
    if "lr" in config.optim.model_fields_set:
        return config
    adapters = any(Part.ADAPTERS in t.claims for t in instantiate(classes, with_method(config).with_))
    return changed(config, {"optim.lr": ADAPTER_LR if adapters and not config.paired else config.optim.lr})


def with_answers(config: Config, classes: Sequence[type[Technique]] = ALL) -> Config:
    """Return a configuration of sampled answers with their rows per step, and the learning rate of such runs.

    Raises:
        ConfigError: `batch.tokens` differs from the room of a step's answers.
    """
    g, b = config.grpo or Grpo(), config.batch
    if config.objective != "grpo":
        return config
    slots = g.prompts * g.group * b.seq
    if "tokens" in b.model_fields_set and b.tokens != slots:
        found = f"a step is {g.prompts} prompts x {g.group} answers, at most {slots:,} slots"
        raise ConfigError(
            f"`batch.tokens: {b.tokens}`", found, "leave it out; grpo.prompts and grpo.group set the step"
        )
    config = changed(config, {"grpo": g, "batch.tokens": slots})
    if "lr" in config.optim.model_fields_set:
        return config
    adapters = any(Part.ADAPTERS in t.claims for t in instantiate(classes, with_method(config).with_))
    return changed(config, {"optim.lr": ANSWERS_LR * (10 if adapters else 1)})


def refuse_sampled(config: Config, asked: str) -> None:
    """Raise ConfigError if steps with answers sampled from the run's own weights would be repeated or measured."""
    if config.objective == "grpo":
        found = "`objective: grpo`, whose steps are sampled from the weights of the steps before"
        raise ConfigError(asked, found, "optrush train, or a ladder with `quality:`, which trains whole runs")


def with_reference(config: Config, kind: str) -> Config:
    """Return the configuration with its reference from that source; unchanged without a reference."""
    section = JUDGED if config.objective == JUDGED else "dpo"
    return config if config.referenced is None else changed(config, {f"{section}.reference": kind})


def of_teacher(config: Config) -> Config | None:
    """Return the configuration of the teacher as a model; None: there is no teacher."""
    if config.distill is None or config.distill.teacher is None:
        return None
    return changed(config, {"model": Model(path=config.distill.teacher, dtype=config.distill.dtype)})


def without_adapters(config: Config, classes: Sequence[type[Technique]] = ALL) -> tuple[Config, list[str]]:
    """Return the configuration for a trained and exported model, whose weights include its adapters.

    Returns:
        It without techniques that claim or need TRAINED, which would add adapters and quantize again; their names.
    """
    config = spelled_out(config)
    gone = [c.name for c in classes if Part.TRAINED in c.claims | c.wants and c.name in config.with_]
    kept = {name: options for name, options in config.with_.items() if name not in gone}
    return changed(with_reference(config, "auto"), {"with": kept, "method": None}), gone


def as_begun(config: Config, ranks: int) -> Config:
    """Return the configuration with the decisions of its run's start, if it has started: a resumed run keeps them.

    Values in the file stay, so that the checks of a resume find changes. On another number of ranks than before, the
    first possible technique shares the work.

    Raises:
        UserError: the run.yaml there cannot be read.
    """
    began = Path(config.output) / "run.yaml"
    if not (config.unplanned or config.batch.micro_tokens is None) or not began.is_file():
        return config
    before = parse_config(read_text(began), str(began), own=True)
    changes: dict[str, Any] = {}
    if config.unplanned and config.method in (None, "auto", before.method):
        named = config.method if config.method in METHODS else None
        if (named is None and "with_" not in config.model_fields_set) or config.method == "auto":
            named = before.method
        with_ = {**before.with_, **config.with_}
        apart = RANK_PARTS if ranks == 1 else {Part.CAPTURE}  # parts that this number of ranks does not support
        without = {c.name for c in ALL if c.claims & apart and c.name not in config.with_}
        with_ = {name: options for name, options in with_.items() if name not in without}
        if ranks > 1 and not any(Part.DATA in c.claims for c in ALL if c.name in with_):
            with_ |= {next(c.name for c in ALL if Part.DATA in c.claims): {}}
        changes |= {"with": with_, "method": named}
    micro, b = before.batch.micro_tokens, config.batch
    if b.micro_tokens is None and isinstance(micro, int) and micro % b.seq == b.tokens % (micro * ranks) == 0:
        changes["batch.micro_tokens"] = micro
    return changed(config, changes)


# --- the open questions


def problem_of(
    config: Config, classes: Sequence[type[Technique]], ranks: int, device: Device | None, *, fixed: bool = True
) -> Problem:
    """Return the constants of a search for a configuration with its techniques in `with`.

    Args:
        device: None: this machine's.
        fixed: keep the micro-batch if the configuration has a number.
    """
    config = with_answers(config, classes)
    micro, seq = config.batch.micro_tokens, config.batch.seq
    # Check only what every set has: the owner of the trained parameters, and one row per micro-batch.
    kept = {c.name: config.with_[c.name] for c in classes if Part.TRAINED in c.claims and c.name in config.with_}
    bare = changed(config, {"with": kept, "method": None, "batch.micro_tokens": seq})
    here = device is None
    if device is None or device == hardware.CPU:  # no memory and rates
        device = _device(ranks)
    checked = _checked(bare, classes, 1, device, weights=here)
    lengths = estimate_fill(config)
    always = [c for c in classes if c.name in config.with_ and not c.searched]  # every set has them
    axes = mesh_axes(instantiate(always, {c.name: config.with_[c.name] for c in always}), ranks)
    rollout = _rollout(config, ranks, checked.env.shape, checked.env.device)
    env = dataclasses.replace(checked.env, ranks=ranks, reach=lengths.reach, axes=axes, rollout=rollout)
    rows = micro // seq if fixed and isinstance(micro, int) else None
    rates = calibration.for_device(env.device)
    read = stand_in if checked.env.shape is None and native_obstacle(checked.hf) else shape_of
    read(checked.hf)  # raises errors that no set avoids
    return Problem(checked.hf, env, lengths.padding, rates, rows, read, run_tokens(config))


def stand_in(hf: HF) -> ModelShape:
    """Return the shape of a dense decoder with the sizes of a model without a memory plan.

    It ranks sets and micro-batches; its predictions are not shown.

    Raises:
        NeedsError: config.json lacks the sizes.
    """
    text = text_config(hf)
    if not {"hidden_size", "n_embd", "d_model"} & text.keys():  # config.json leaves them to the family's defaults
        from transformers import AutoConfig

        with suppress(ValueError, TypeError):
            text = {**AutoConfig.for_model(str(text.get("model_type"))).to_dict(), **text}

    def size(*names: str) -> int:
        return next((int(text[name]) for name in names if isinstance(text.get(name), int | float)), 0)

    width, vocab = size("hidden_size", "n_embd", "d_model"), size("vocab_size")
    layers = size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if not (width and layers and vocab):
        found = "a config.json without hidden_size, num_hidden_layers or vocab_size"
        raise NeedsError("`with` and `batch.micro_tokens` left out", found, "give both")
    heads = size("num_attention_heads", "n_head", "num_heads", "n_heads") or max(1, width // 64)
    while width % heads:
        heads -= 1
    return ModelShape.read({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "vocab_size": vocab, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": size("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * width,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", True)), "hidden_act": "silu",
        "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6,
    })  # fmt: skip


def _choose_set(
    config: Config, classes: Sequence[type[Technique]], ranks: int, device: Device | None, here: bool
) -> tuple[Config, list[Reason]]:
    """Choose the first of `full`, `lora`, `qlora` that fits, with its fastest set that keeps the maths.

    Raises:
        NeedsError: nothing fits.
    """
    instantiate(classes, config.with_)  # rejects unknown names and options
    automatic = config.method == "auto"
    tried = tuple(METHODS) if automatic else (config.method or "full",)
    least: Short | None = None
    refused: NeedsError | None = None
    able: list[str] = []  # methods compatible with the file's techniques
    for method in tried:
        try:
            of = with_method(changed(config, {"method": method}))
        except ConfigError:  # the file has techniques of another method
            if not automatic:
                raise
            continue
        able.append(method)
        try:
            problem = problem_of(of, classes, ranks, device)
            result = search_sets(problem, classes, of.with_, keep_maths=True, whole=False, here=here, keep=of.with_)
        except NeedsError as error:  # the model does not support the method
            refused = refused or error
            continue
        least = min(filter(None, (least, result.least)), key=lambda s: s.score, default=None)
        if result.settings:
            setting = result.settings[0]
            reasons = [Reason("method", f"{method}, the first that fits of {', '.join(able)}")] if automatic else []
            added = {name: options for name, options in setting.with_.items() if name not in of.with_}
            of_sets = f"the fastest of {result.tried} sets that keep the maths"
            reasons.append(Reason("techniques", f"{techniques_text(added) or 'none'}: {of_sets}"))
            chosen = changed(with_setting(of, setting), {"method": method if config.method else None})
            return chosen, [*reasons, *_size_reasons(config, setting, problem)]
    if refused is not None and least is None:
        raise refused
    if least is None and isinstance(config.batch.micro_tokens, int):
        rows_of_batch(config, ranks)
    if least is None:  # no set is possible with any memory
        _choose_size(of, classes, ranks, device)
    what = "any method" if automatic else config.method or "full"
    asked = f"method {what} on {problem.env.device.name}, with optimizer and {config.model.dtype} weights as configured"
    needs = "no set of techniques fits" if least is None else f"it needs at least {least.text()}"
    raise NothingFits(asked, needs, _what_fits(config, classes, ranks, device, here))


def _what_fits(
    config: Config, classes: Sequence[type[Technique]], ranks: int, device: Device | None, here: bool
) -> str:
    """Return the line to write for a set that fits at a cost in quality, by the method with the least cost."""
    for method in METHODS:
        with suppress(UserError):
            of = with_method(changed(config, {"method": method}))
            problem = problem_of(of, classes, ranks, device)
            result = search_sets(problem, classes, of.with_, whole=False, scarce=True, here=here)
            if result.settings:
                with_ = {name: dict(options) for name, options in result.settings[0].with_.items()}
                line = ", ".join(f"{n}: {{{', '.join(f'{k}: {v}' for k, v in o.items())}}}" for n, o in with_.items())
                size = f"{result.settings[0].prediction.peak_bytes / GIB:.1f} GiB"
                return f"write `{f'method: {method}` and `' * (method != 'full')}with: {{{line}}}`, which takes {size}"
    return "take a smaller model, shorter rows or other hardware (optrush plan names the nearest)"


def _choose_size(
    config: Config, classes: Sequence[type[Technique]], ranks: int, device: Device | None
) -> tuple[Config, list[Reason]]:
    """Choose the micro-batch of the configured techniques; if none fits, the smallest, to be tried in a rehearsal.

    Raises:
        UserError: no micro-batch is compatible with the techniques.
    """
    techniques = instantiate(classes, config.with_)
    problem = problem_of(config, classes, ranks, device, fixed=False)
    result = evaluate_set(problem, techniques)
    if isinstance(result, Candidate):
        sized = changed(config, {"batch.micro_tokens": result.micro_rows * config.batch.seq})
        return sized, [*_size_reasons(config, result, problem)]
    each = math.prod(n for axis, n in mesh_axes(techniques, ranks).items() if axis in SAME_ROWS)
    refused: list[NeedsError] = []
    for rows in micro_batch_rows(max(1, problem.env.rows // max(1, ranks // each))):
        sized = changed(config, {"batch.micro_tokens": rows * config.batch.seq})
        try:
            _checked(sized, classes, ranks, device)
        except NeedsError as error:  # some techniques need one micro-batch per step
            refused.append(error)
            continue
        needs = "" if result is None else f": by the plan none fits, {result.text()} are needed"
        return sized, [Reason("micro-batch", f"{_rows_text(rows, config.batch.seq)}{needs}")]
    raise max(refused, key=lambda error: sum(str(error) == str(other) for other in refused))  # the most frequent error


def _size_reasons(config: Config, setting: Candidate, problem: Problem) -> Iterator[Reason]:
    """Yield the reasons for the micro-batch, and for the division of the run over several ranks."""
    p = setting.prediction
    if not isinstance(config.batch.micro_tokens, int):
        rows = _rows_text(setting.micro_rows, config.batch.seq)
        if problem.read is stand_in:
            yield Reason("micro-batch", f"{rows}, by a dense decoder of these sizes: this family has no memory plan")
        else:
            most = "" if p.room_bytes is None else f" of {p.room_bytes / GIB:.1f}"
            speed = "" if p.tokens_per_s is None else f", {p.tokens_per_s:,.0f} tokens/s"
            hosted = f" + {p.host_bytes / GIB:.1f} GiB of host memory" if p.host_bytes else ""
            yield Reason("micro-batch", f"{rows}: {p.peak_bytes / GIB:.1f}{most} GiB{hosted}{speed} by the plan")
    if p.mesh:
        yield Reason("mesh", mesh_text(p.mesh))


def _rows_text(rows: int, seq: int) -> str:
    return f"{rows * seq} tokens ({rows} row{'s' * (rows > 1)})"


def techniques_text(techniques: Mapping[str, Mapping[str, Any]]) -> str:
    """Return techniques in the format of --with, separated by spaces."""
    return " ".join(n + (":" + ",".join(f"{k}={v}" for k, v in o.items()) if o else "") for n, o in techniques.items())


def _with_chooser(config: Config, classes: Sequence[type[Technique]]) -> Config:
    """Add the owner of the micro-batch, which halves it if memory runs out, unless the file has one."""
    owners = [c.name for c in classes if Part.MICRO_BATCH in c.claims]
    if not owners:
        do = f"give a multiple of {config.batch.seq}"
        raise ConfigError(f"`batch.micro_tokens: {config.batch.micro_tokens}`", "no technique here finds it", do)
    if config.with_.keys() & set(owners):
        return config
    return changed(config, {"with": {**config.with_, owners[0]: {}}})


# --- the checks


def _checked(
    config: Config, classes: Sequence[type[Technique]], ranks: int, device: Device | None, *,
    weights: bool | None = None,
) -> Decided:  # fmt: skip
    """Check a configuration with given techniques and micro-batch.

    Args:
        weights: require the model's weights, not only its config.json; None: True if `device` is None.
    """
    weights = device is None if weights is None else weights
    config = with_method(config)
    if config.loss is None and (section := SECTIONS.get(config.objective)):
        config = changed(config, {config.objective: getattr(config, config.objective) or section()})
    techniques = in_order(instantiate(classes, config.with_))
    config = with_rate(config, classes)
    axes = mesh_axes(techniques, ranks)
    each = math.prod(n for axis, n in axes.items() if axis in SAME_ROWS)
    rows, micro_rows = rows_of_batch(config, ranks // each, each)
    folder, hf = locate(config, weights=weights)
    if config.model.chat_template is not None and folder is not None:
        read_generation(folder)  # its end-of-turn token is added after the last step
    growth = grow(config, folder, text_config(hf))
    hf = hf if growth is None else with_vocabulary(hf, growth.vocab)
    text = text_config(hf)
    edits = [Edit.of("config", t, n) for t in techniques if (n := t.config(text))]
    refuse_foreign(hf)
    obstacle = native_obstacle(hf)
    if config.model.implementation == "native" and obstacle is not None:
        raise NeedsError("`model.implementation: native`", obstacle, "take `model.implementation: transformers`")
    native = config.model.implementation != "transformers" and obstacle is None
    known = ModelShape.read(hf) if obstacle is None else find_traced(hf)
    shape = known if native or obstacle else None
    if not native:  # padding has positions too, and a position table is finite
        check_positions(text, config.batch.seq, f"`batch.seq: {config.batch.seq}`")
    here = device is None
    device = device or _training_device(ranks)
    if config.model.dtype == "bfloat16" and device.kind == "cuda" and device.capability < (8, 0):
        found = f"{device.name}, capability {device.capability}, which has no such products"
        raise NeedsError("`model.dtype: bfloat16`", found, "leave it out, and take --with amp:dtype=fp16")
    teacher = None if (of := of_teacher(config)) is None else locate(of, weights=weights)
    images = _images(config, folder, hf, native)
    env = Environment(
        device, ranks, config.batch.seq, rows, micro_rows, config.optim.clip, config.model.dtype, native,
        blocks=known.layers if known else int(text.get("num_hidden_layers") or text.get("n_layer") or 0),
        vocab=known.vocab if known else int(text.get("vocab_size") or 0), shape=shape,
        sdpa_obstacle=None if native else known.sdpa_obstacle if isinstance(known, TracedShape) else sdpa_obstacle(hf),
        spec=ModelSpec(grouped_heads=known is None or known.kv_heads < known.heads), paired=config.paired,
        reference=config.referenced.reference if config.referenced else None, axes=axes,
        scored=config.scored, teacher=None if teacher is None else _sizes(config, teacher[1], text),
        copies_saved=config.train.save == "async", rollout=_rollout(config, ranks, shape, device),
        by_token=config.paired or config.loss is not None or config.objective == "grpo",
        images=images, mutual=images is not None and reads_mutually(hf),
    )  # fmt: skip
    env = settle(techniques, env, classes)
    check_reference(env, config.objective)
    check_teacher(env)
    if here:  # before hours of tokenization
        for technique in techniques:
            refuse_unmet(missing(technique))
    return Decided(config, techniques, env, folder, hf, tuple(edits), growth, config.scored, teacher)


def _images(config: Config, folder: Path | None, hf: HF, native: bool) -> RowImages | None:
    """Return the images of the first rows, and the base's vision tower; None: rows have no images.

    Raises:
        NeedsError: the configuration trains a part of a tower that the base does not have.
        DataError: the run does not support images, and would stop at the first one.
    """
    part, tower, seen = config.tower_part, tower_sizes(hf) if native and folder else None, first_images(config)
    if part != "none" and tower is None:
        found = "model.implementation: transformers" if not native else f"a base of model_type {hf.get('model_type')!r}"
        found = found if folder else "a model without a folder: its tower has no weights"
        do = f"leave `image` out, or take a base of one of {', '.join(TOWER_BASES)} (model.path)"
        raise NeedsError(f"`image.train: {part}`", found, do)
    if seen is None:
        return None
    from optrush.data.images import obstacle

    if (error := obstacle(config, folder, hf)) is not None and config.data.bad_rows == "error":
        raise error
    if error is not None or tower is None:
        return None
    merge = tower.merge
    return RowImages(tower, part, seen.share * merge, seen.mean * merge, seen.largest * merge)


def resized(decided: Decided, rows: int) -> Decided:
    """Return the decided run with another micro-batch, or raise NeedsError if a technique does not allow it."""
    env = dataclasses.replace(decided.env, micro_rows=rows)
    # The owner of MEMORY has already replaced the device by a smaller one, and would shrink it again.
    others = [t for t in decided.techniques if Part.MEMORY not in t.claims]
    refuse_unmet(unmet(others, env))
    config = changed(decided.config, {"batch.micro_tokens": rows * env.seq})
    return dataclasses.replace(decided, config=config, env=env)


def _training_device(ranks: int) -> Device:
    """Return this machine's device, or raise ConfigError if it has fewer devices than ranks."""
    devices = hardware.probe()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if devices and here > len(devices):
        raise ConfigError(f"{here} ranks on this machine", f"{len(devices)} devices", f"take --ranks {len(devices)}")
    return devices[0] if devices else hardware.CPU


def _device(ranks: int) -> Device:
    """Return this machine's device with its memory and rates; on a CPU, one rank's share."""
    device = _training_device(ranks)
    if device.kind == "cpu":
        return hardware.share_of_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    return hardware.over(device, hardware.turned_to())


def check_fields(config: Config) -> None:
    """Raise ConfigError for fields of `data:`, `model:` and the objective that contradict each other; reads nothing."""
    refuse_secrets(config)
    d = config.data
    if config.objective in COMPARED and d.train_on == "answer":
        found, do = f"`objective: {config.objective}` compares whole answers", "leave it out, or take objective: sft"
        raise ConfigError("`data.train_on: answer`", found, do)
    if config.objective == "pretrain" and d.train_on in ("last", "answer"):
        asked, found = f"`data.train_on: {d.train_on}`", "`objective: pretrain` learns every token"
        raise ConfigError(asked, found, "objective: sft")
    if d.split_turns and (config.objective != "sft" or d.train_on not in ("assistant", "answer")):
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
        raise ConfigError("`distill.teacher`", "it is missing", do)
    if config.distill is not None and config.distill.store is not None:
        _check_store(config.distill, d.stream)
    if d.separator is not None and d.path is None:
        raise ConfigError(f"`data.separator: {d.separator}`", "no `data.path` with a table", "leave it out")
    if d.random is not None:
        if config.objective not in ("pretrain", "distill"):
            asked = f"`objective: {config.objective}` on `data.random`"
            keys = ROW_KEYS.get(config.objective, "prompt, chosen, rejected")
            do = f"name a file of rows with {keys}: data.path (optrush plan MODEL --data FILE); or objective: pretrain"
            raise NoRowsError(asked, "random tokens", do)
        if isinstance(d.eval, str):
            raise ConfigError("`data.eval` from a file with `data.random`", d.eval, "give a fraction")
    elif config.model.shape is not None and config.model.tokenizer is None:
        do = "name a folder that has one: model.tokenizer; or take data.random"
        raise ConfigError(f"`model.shape: {config.model.shape}` on text", "a shape has no tokenizer", do)
    template = config.model.chat_template
    if template not in (None, "chatml") and not Path(str(template)).exists():
        do = "name a file with a jinja template, or chatml; left out, the model's own is taken"
        raise ConfigError(f"`model.chat_template: {template}`", "no such file", do)
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
    """Raise ConfigError if a teacher's stored probabilities cannot serve the run."""
    asked = f"`distill.store: {settings.store}`"
    if settings.divergence == "reverse":
        found = "`divergence: reverse`, which weighs every token by the model's own probability: few of them are stored"
        raise ConfigError(asked, found, "take divergence: forward, or leave store out")
    if stream:
        found = "`data.stream`, whose rows are not read before step 0"
        raise ConfigError(asked, found, "leave data.stream out, or leave store out")


def check_pairs(config: Config) -> None:
    """Raise ConfigError for a section that the objective ignores, or data unsuitable for pairs; reads nothing."""
    if config.loss is not None and config.objective in SECTIONS and config.objective not in ("orpo", "simpo"):
        asked = f"a loss of your own with `objective: {config.objective}`"
        do = "take objective: sft or pretrain; for pairs objective: orpo"
        raise ConfigError(asked, "this objective has its own loss", do)
    asked, d, settings = f"`objective: {config.objective}`", config.data, config.dpo or Dpo()
    for name in SECTIONS:
        if (config.loss is not None or name != config.objective) and getattr(config, name) is not None:
            do = f"leave `{name}` out" + (f", or objective: {name}" if config.loss is None else "")
            what = asked if config.loss is None else f"the loss `{config.loss.use}`"
            raise ConfigError(f"`{name}` with {what}", "this objective does not use it", do)
    if config.rollout is not None and config.objective != "grpo":
        found = "no answers are sampled there"
        raise ConfigError(f"`rollout` with {asked}", found, "leave `rollout` out, or objective: grpo")
    if config.objective == "grpo" and d.too_long in ("split", "truncate"):
        found = "prompts and answers that are cut: neither is what the row asks and gives"
        raise ConfigError(f"`data.too_long: {d.too_long}` with {asked}", found, "take data.too_long: error or drop")
    if not config.paired:
        return
    if settings.loss == "ipo" and settings.label_smoothing:
        found = "a squared distance, which has no probability of a wrong label in it"
        raise ConfigError("`dpo.label_smoothing` with `dpo.loss: ipo`", found, "leave one of the two out")
    if d.too_long in ("split", "truncate"):
        found = "pairs: answers that are cut were never compared"
        raise ConfigError(f"`data.too_long: {d.too_long}` with {asked}", found, "take data.too_long: error or drop")
    if d.stream and config.objective == JUDGED:
        found = "`data.stream`: KTO pairs each prompt with another row's answer, and a stream is not read ahead"
        raise ConfigError(f"`data.stream` with {asked}", found, "leave data.stream out")
    if d.train_on == "all":
        found = "pairs: the prompt is the same on both sides and cancels out"
        raise ConfigError(f"`data.train_on: all` with {asked}", found, "take data.train_on: assistant or last")
    if d.stream and settings.reference == "precomputed":
        found = "`data.stream`, whose rows are not read before step 0"
        raise ConfigError("`dpo.reference: precomputed`", found, "leave data.stream out, or take reference: adapter")


def _sizes(config: Config, hf: dict[str, Any], student: dict[str, Any]) -> Teacher:
    """Return the facts of a teacher for the plan.

    Raises:
        ConfigError: its position table is shorter than the rows, or the vocabulary smaller than `distill.store`.
    """
    refuse_foreign(hf)
    assert config.distill is not None
    known = ModelShape.read(hf) if native_obstacle(hf) is None else find_traced(hf)
    if native_obstacle(hf) is not None:
        check_positions(text_config(hf), config.batch.seq, f"`batch.seq: {config.batch.seq}`, `distill.teacher`")
    asked, vocab = config.distill.store, min(int(of.get("vocab_size") or 0) for of in (text_config(hf), student))
    if asked is not None and asked > vocab:
        raise ConfigError(f"`distill.store: {asked}`", f"a vocabulary of {vocab}", "take fewer: 64 is usual")
    return Teacher(known, 2 if config.distill.dtype == "bfloat16" else 4, config.distill.chunk, asked)


def check_teacher(env: Environment) -> None:
    """Raise NeedsError for techniques that are incompatible with a teacher."""
    if env.teacher is None:
        return
    asked, do = "`objective: distill`, whose teacher sees whole rows on every rank", "leave that technique out"
    found = "a technique that gives ranks parts of the rows, the model or its layers"
    met = not {Part.CP, Part.TP, Part.PP} & env.claimed
    refuse_unmet([Requirement(met, asked, found, do)])
    found = "a technique that records the step as a CUDA graph, untested with a teacher"
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
