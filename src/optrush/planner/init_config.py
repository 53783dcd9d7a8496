"""Write a run's first YAML for a model, data and a machine (`optrush init`). Pure.

`compose` chooses the values (`choose_values`), lets `decide` answer the open questions, formats everything with a
comment for every block (`yaml_text`), and parses and decides the text, so that the written configuration can run.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from optrush import hardware
from optrush.config import (
    ADAPTER_LR,
    COMPARED,
    JUDGED,
    METHODS,
    SECTIONS,
    Config,
    nearest,
    parse_config,
    parse_scalar,
    refuse_secrets,
    set_value,
)
from optrush.decide import Decided, NothingFits, changed, decide
from optrush.errors import ConfigError, DataError, NeedsError, UserError
from optrush.hardware import Device
from optrush.models.shapes import refuse_foreign
from optrush.models.source import locate
from optrush.models.text_part import text_config
from optrush.planner import answer, search
from optrush.technique import RANK_PARTS, Part, Technique, instantiate
from optrush.techniques import ALL

if TYPE_CHECKING:
    from optrush.data.schema import Row

# --- the text


def yaml_text(
    tree: dict[str, Any], file: str, device: Device, techniques: dict[str, dict[str, Any]], memory: str, ranks: int,
    classes: Sequence[type[Technique]] = ALL,
) -> str:  # fmt: skip
    """Format the tree and its techniques as YAML: for every block its meaning, its default, and when to change it.

    Args:
        memory: the prediction of memory, as part of a sentence.
    """
    import jinja2

    command = f"optrush train {shlex.quote(file) if file.isprintable() else 'FILE'}"
    machine = "this CPU" if device.kind == "cpu" else _line(device.name)
    if device.memory_bytes is not None:
        machine += f", {device.memory_bytes / hardware.GIB:.1f} GiB"
    several = tree["batch"]["micro_tokens"] > tree["batch"]["seq"]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    shown = {"model", "objective", "data", "batch", "optim", "train", "seed", "output", tree["objective"]}
    environment.filters |= {"flow": _flow, "line": _line}
    return environment.get_template("init.yaml.j2").render(
        **tree, settings=tree.get(tree["objective"]), more={key: tree[key] for key in tree if key not in shown},
        techniques=techniques, memory=memory, machine=machine,
        command=command + (f" --ranks {ranks}" if ranks > 1 else ""), summaries={c.name: c.summary for c in classes},
        larger="halve it when memory runs out" if several else "double it while memory lasts",
    )  # fmt: skip


def _flow(value: Any) -> str:
    """Format a value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r}"


def _text(value: str) -> str:
    """Format text so that `parse_yaml` returns it: plain where that is safe, else in quotes."""
    if re.fullmatch(r"[\w./][\w./~+@-]*", value, re.ASCII) and parse_scalar(value) == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31).removesuffix("\n")


def _line(text: str) -> str:
    return " ".join(text.split())


# --- the values

SMALLEST = "{model: tiny, objective: sft, data: {sample: recipes}, output: out}"  # to parse flags with
SAMPLES = ("recipes",)
SAMPLE, RANDOM, SHAPE = "sample:", "random", "shape:"
COUNTED = 2000  # rows counted at most, to choose the held-out part
FEW = 10  # rows of data too small for a held-out part
GPU_SEQ, GPU_TOKENS = 2048, 32768
CPU_SEQ, CPU_TOKENS = 512, 2048
LR = 2e-5  # for a pretrained model
CPU_CONVERSATIONS = 300  # conversations of the sample: minutes on two cores


@dataclass(frozen=True)
class InitRequest:
    """The values of the flags or prompts."""

    model: str  # a folder, a hub id, `tiny`, `shape:NAME`
    objective: str
    data: str  # a file, `sample:recipes`, `random`
    output: str
    hardware: str = "auto"
    withs: Sequence[str] = ()  # values of --with
    method: str = "auto"
    seq: int | None = None  # None: chosen for the device
    epochs: float = 1
    teacher: str | None = None  # for `distill`
    sets: Sequence[str] = ()  # values of --set


@dataclass(frozen=True)
class FirstConfig:
    """The text, its parsed configuration, and the number of ranks."""

    text: str
    config: Config
    ranks: int


def compose(request: InitRequest, file: str, classes: Sequence[type[Technique]] = ALL) -> FirstConfig:
    """Compose a YAML, and check it like `optrush train`.

    Raises:
        UserError: from `decide`; the data file cannot be read; the output is not empty.
    """
    device, ranks = hardware.parse_hardware(request.hardware)
    here = request.hardware == "auto"
    if not request.model:
        raise ConfigError("the model ''", "no name", "name a Hugging Face folder, a hub id, or `tiny`")
    check_objective(request.objective)
    check_method(request.method)
    check_teacher(request)
    check_sets(request.sets)
    check_data(request.data, request.sets, request.objective)
    check_new_output(request.output)
    named = parse_config(SMALLEST, file, request.sets, request.withs).with_
    wanted = instantiate(classes, named)
    if ranks == 1 and any(RANK_PARTS & t.claims for t in wanted):
        many = math.prod(n for t in wanted for n in t.axes().values())
        ranks = max(2, many, len(hardware.probe()) // many * many if here else 2)
    tree = choose_values(request, device, ranks)
    named = _with_new_tokens({**METHODS.get(request.method, {}), **named}, tree)
    decided = _decided(request, tree, named, device, ranks, classes)
    try:
        prediction = search.predict_decided(decided)
    except UserError as error:
        memory = f"no prediction of memory: {error.found}"
    else:
        memory = f"predicted to need {prediction.peak_bytes / hardware.GIB:.1f} GiB of memory at most"
        if not prediction.fits:
            asked = f"{', '.join(sorted(named)) or 'a run'} in a run of {request.model} on {request.hardware}"
            raise NeedsError(asked, f"with that it does not fit: {memory}", "leave it out, or take --method auto")
    techniques = _with_new_tokens(decided.config.with_, tree)
    tree["batch"]["micro_tokens"] = decided.config.batch.micro_tokens
    if tree["optim"]["lr"] == LR and any(Part.ADAPTERS in t.claims for t in decided.techniques):
        tree["optim"]["lr"] = ADAPTER_LR
        _lay(tree, request.sets)
    text = yaml_text(tree, file, device, techniques, memory, ranks, classes)
    config = parse_config(text, file)
    decide(config, classes, ranks, device)
    _check_first_row(request.data, config)
    return FirstConfig(text, config, ranks)


def of_model(
    model: str, data: str | None, name: str, sets: Sequence[str], withs: Sequence[str], withouts: Sequence[str]
) -> Config:
    """Return the configuration of a model's first run, to plan; without `data`, on random tokens.

    Raises:
        UserError: the data cannot be read, or a flag names an unknown key.
    """
    data = data or RANDOM
    named = _given(sets).get("objective")
    named = named if named in ("sft", "pretrain", *SECTIONS) else ""
    suited = check_data(data, sets, named)
    request = InitRequest(model, named or suited, data, "runs/new", name, sets=sets)
    tree = choose_values(request, *hardware.parse_hardware(name), model=model)
    config = parse_config(yaml.safe_dump(tree), model, sets, withs, withouts)
    refuse_secrets(config)
    return config


def _decided(
    request: InitRequest, tree: dict[str, Any], named: dict[str, dict[str, Any]], device: Device, ranks: int,
    classes: Sequence[type[Technique]],
) -> Decided:  # fmt: skip
    """Decide the run: with the fastest set of the same maths, or if none fits, with the best set that fits."""
    here = request.hardware == "auto"
    config = Config.model_validate({**tree, "method": request.method, "with": named})
    try:
        return decide(config, classes, ranks, device, here=here, choose=True)
    except NeedsError as error:
        if not isinstance(error, NothingFits):
            raise
    chosen = _searched(Config.model_validate(tree | {"with": named}), request, classes)
    return decide(Config.model_validate(tree | {"with": _with_named(chosen, named, classes)}), classes, ranks, device)


def _with_named(
    chosen: dict[str, dict[str, Any]], named: dict[str, dict[str, Any]], classes: Sequence[type[Technique]]
) -> dict[str, dict[str, Any]]:
    """Return the chosen techniques with the named ones, which replace those that own the same part of a run."""
    taken = {part for t in instantiate(classes, named) for part in t.claims}
    free = {t.name for t in instantiate(classes, chosen) if not taken & t.claims}
    return {**{name: options for name, options in chosen.items() if name in free}, **named}


def _with_new_tokens(techniques: dict[str, dict[str, Any]], tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the techniques; adapters also train the modules with rows for new tokens, which the run requires."""
    if not isinstance(tree["model"], dict) or "add_tokens" not in tree["model"]:
        return techniques
    saved = {"save": ["embed_tokens", "lm_head"]}
    adapters = [t for t in instantiate(ALL, techniques) if Part.ADAPTERS in t.claims and hasattr(t, "save")]
    return {**techniques, **{t.name: {**saved, **techniques[t.name]} for t in adapters}}


def _searched(config: Config, request: InitRequest, classes: Sequence[type[Technique]]) -> dict[str, dict[str, Any]]:
    """Return the techniques of the best setting that fits, of the requested method or of any.

    Raises:
        NeedsError: nothing fits; it names the smallest changes after which something does.
    """
    method = None if request.method == "auto" else request.method
    answered = answer.answer(changed(config, {"method": method}), request.hardware, classes)
    if answered.best is None or answered.best.setting is None:
        needs = "" if (least := answered.least) is None else f": the smallest set tried needs {least.text()}"
        do = "; or ".join(answered.nearest) or "take a smaller model, shorter rows or other hardware"
        asked = f"a run of {request.model} on {request.hardware}"
        raise NeedsError(asked, f"nothing fits{needs}", do)
    return {name: dict(options) for name, options in answered.best.setting.with_.items()}


def choose_values(
    request: InitRequest, device: Device, ranks: int = 1, *, model: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """Choose every value except the techniques; return them as the tree of the YAML.

    Args:
        model: value of `model` in the YAML; None: the request's, with ChatML if its files have no chat template.
    """
    shape = request.model.removeprefix(SHAPE)
    model = None if shape != request.model else model
    tree: dict[str, Any] = {
        "model": model or _model(request),
        "objective": request.objective,
        "data": _data(request.data, device, _has_images(_first_row(request.data, request.sets, request.objective))),
    }
    pairs = request.objective in COMPARED
    if request.objective in SECTIONS:
        settings = SECTIONS[request.objective]().model_dump()
        tree[request.objective] = {key: value for key, value in settings.items() if value}
        if request.teacher is not None:
            tree[request.objective]["teacher"] = request.teacher
    sampled = request.objective == "grpo"
    if sampled:
        tree["grpo"]["rewards"] = ["number"]
    if (pairs or sampled) and "too_long" in tree["data"]:
        tree["data"]["too_long"] = "drop"
    gpu = device.kind == "cuda"
    seq = _longest(tree, request.seq or (GPU_SEQ if gpu else CPU_SEQ))
    seq_set = _given(request.sets).get("batch.seq")
    seq = seq_set if isinstance(seq_set, int) and seq_set > 0 else seq
    rows = max(1, (GPU_TOKENS if gpu else CPU_TOKENS) // seq // ranks) * ranks
    tree["batch"] = {"seq": seq} if sampled else {"seq": seq, "tokens": seq * rows}
    fresh = request.model == "tiny" or request.model.startswith(SHAPE)
    lr = 2e-3 if request.model == "tiny" else 3e-4 if fresh else LR
    lr = lr / 10 if pairs and fresh else 1e-6 if pairs or sampled else lr  # 1e-6 is also TRL's
    tree["optim"] = {"lr": lr, "schedule": "cosine", "warmup": 0.1 if fresh else 0.03, "clip": 1.0}
    tree["train"] = {"steps": 100} if "random" in tree["data"] else {"epochs": request.epochs}
    tree["train"] |= {"log_every": 5, "save_every": 0.25, "keep": 2}
    if "eval" in tree["data"]:
        tree["train"]["eval_every"] = 0.25
    tree |= {"seed": 0, "output": request.output}
    _lay(tree, request.sets)
    _hold_out_no_more(tree, request)
    return tree


def _hold_out_no_more(tree: dict[str, Any], request: InitRequest) -> None:
    """Remove the held-out part and its evaluations if the values of --set leave too few rows."""
    data, given = tree["data"], _given(request.sets).keys()
    if "eval" in data and "data.eval" not in given and given & {"data.text_rows", "data.max_samples"}:
        path = data.get("path")
        rows = FEW if path is None else _count_rows(Path(path).expanduser(), data.get("text_rows", "file"))
        if min(rows, data.get("max_samples") or rows) < FEW:
            del data["eval"]
    if data.get("eval") is None and "train.eval_every" not in given:
        tree["train"].pop("eval_every", None)


def _given(sets: Sequence[str]) -> dict[str, Any]:
    """Return the values of --set by their keys."""
    return {key: parse_scalar(value) for key, _, value in (flag.partition("=") for flag in sets)}


def _lay(tree: dict[str, Any], sets: Sequence[str]) -> None:
    """Apply the values of --set to the tree, except techniques, which are kept elsewhere."""
    for flag in sets:
        if flag.partition("=")[0].split(".")[0] != "with":
            set_value(tree, flag)


def _model(request: InitRequest) -> Any:
    """Return the value of `model`; with ChatML if rows are conversations and the tokenizer has no chat template."""
    from optrush.data.tokenizer import chatml_keys

    if request.model.startswith(SHAPE):
        return {"shape": request.model.removeprefix(SHAPE)}
    template = any(flag.startswith("model.chat_template=") for flag in request.sets)
    if template or request.model == "tiny" or not _conversations(request):
        return request.model
    bare = {"model": request.model, "objective": "pretrain", "data": {"random": True}, "output": "runs/new"}
    folder, _ = locate(Config.model_validate(bare))
    assert folder is not None
    try:
        keys = chatml_keys(folder)
    except NeedsError:  # a tokenizer that cannot be read here may be readable where the run is
        return request.model
    return {"path": request.model, **keys} if keys else request.model


def _conversations(request: InitRequest) -> bool:
    """Return whether the rows of the data are rendered by a chat template."""
    from optrush.data.schema import Chat, parts_of

    row = _first_row(request.data, request.sets, request.objective)
    parts = () if row is None else parts_of(row)
    return request.data.startswith(SAMPLE) or any(isinstance(part, Chat) for part in parts)


def _data(text: str, device: Device, seen: bool) -> dict[str, Any]:
    """Return the section `data`; `seen`: rows have images and must not be truncated."""
    if text.startswith(SAMPLE):
        sample = {"sample": text.removeprefix(SAMPLE), "eval": 0.1, "too_long": "split"}
        return sample if device.kind == "cuda" else sample | {"max_samples": CPU_CONVERSATIONS}
    if text == RANDOM or text.startswith(RANDOM + ":"):
        n = text.removeprefix(RANDOM).removeprefix(":")
        return {"random": int(n) if n else True}
    from optrush.data.readers import TEXT, form

    path = Path(text).expanduser()
    documents, rows = {}, _count_rows(path, "paragraph")  # data other than text has rows anyway
    if (form(path) or ("",))[0] in TEXT:
        documents = {"text_rows": "paragraph" if rows >= FEW else "file"}
    held_out = {} if rows < FEW else {"eval": 0.1 if rows < COUNTED else 0.02}
    return {"path": text, **documents, **held_out, "too_long": "truncate" if seen else "split"}


def _has_images(row: Row | None) -> bool:
    from optrush.data.schema import Chat

    return isinstance(row, Chat) and len(row.images) > 0


def _count_rows(path: Path, text_rows: str) -> int:
    """Count the rows of a file, whatever its format, up to COUNTED."""
    from optrush.data.readers import read_rows_or_errors

    return sum(1 for _ in islice(read_rows_or_errors(path, text_rows), COUNTED))


def check_data(text: str, sets: Sequence[str] = (), objective: str = "") -> str:
    """Return the objective that suits the data; --set may describe its rows, which are parsed for `objective`, if any.

    Raises:
        ConfigError: no such sample, or an invalid number of documents.
        DataError: no such file, or its first row is invalid.
    """
    from optrush.data.schema import Judged, Pair, Text

    if text.startswith(SAMPLE):
        name = text.removeprefix(SAMPLE)
        if name not in SAMPLES:
            raise ConfigError(f"the data {text}", "no such sample", f"take {SAMPLE}{SAMPLES[0]}, or a JSON Lines file")
        return "sft"
    if text == RANDOM or text.startswith(RANDOM + ":"):
        if not re.fullmatch(r"random(:[1-9]\d*)?", text):
            raise ConfigError(f"the data {text}", "no number of documents", "write random, or random:4096")
        return "pretrain"
    row = _first_row(text, sets, objective)
    if isinstance(row, Judged):
        return JUDGED
    return "dpo" if isinstance(row, Pair) else "pretrain" if isinstance(row, Text) else "sft"


def _built_in(text: str) -> bool:
    """Return whether the data is a sample or random, not a file."""
    return text.startswith((SAMPLE, RANDOM + ":")) or text == RANDOM


def _first_row(text: str, sets: Sequence[str], objective: str = "") -> Row | None:
    """Return the first row of a file, parsed for an objective or the one that suits it; None for other data.

    Raises:
        DataError: an invalid row; names the flag of `data.columns` or `grpo.rewards` if that helps.
    """
    from optrush.data.readers import read_rows
    from optrush.data.schema import JUDGEMENT, parse_row, row_rules

    if _built_in(text):
        return None
    config = parse_config(SMALLEST, "init", sets)
    rules = row_rules(config)
    where, row = next(read_rows(Path(text).expanduser(), config.data.reading))
    judged = JUDGEMENT & {rules.of_rows.get(key, key).lower() for key in row}
    usual = JUDGED if judged else "dpo"  # structured formats come first, pairs before others
    compares = "" if any(flag.startswith("grpo.rewards=") for flag in sets) else "number"
    try:
        return parse_row(where, row, replace(rules, objective=objective or usual, compares=compares))
    except DataError as error:
        raise DataError(error.asked, error.found, _LINE.sub(_as_flag, error.do)) from None


def _check_first_row(text: str, config: Config) -> None:
    """Raise DataError if the run could not learn from the first row of the data."""
    from optrush.data.readers import read_rows
    from optrush.data.schema import Pair, check_kind, parse_row, row_rules

    if not _built_in(text):
        where, row = next(read_rows(Path(text).expanduser(), config.data.reading))
        check_kind(config.objective, isinstance(parse_row(where, row, row_rules(config)), Pair), where)


_LINE = re.compile(r"(data\.columns|grpo\.rewards): (\{.*?\}|\[.*?\])")


def _as_flag(line: re.Match[str]) -> str:
    """Return the flag that is equivalent to a line of YAML."""
    return f"--set {shlex.quote(f'{line[1]}={line[2]}')}"


# Keys that --set rejects: they have a flag of their own, or are chosen because others follow from them.
OWN_FLAGS = {
    "model": "--model", "model.path": "--model", "model.shape": "--model shape:NAME", "objective": "--objective",
    "data": "--data", "data.path": "--data", "data.sample": "--data sample:NAME", "data.random": "--data random:N",
    "output": "--output", "method": "--method", "batch.seq": "--seq", "train.epochs": "--epochs",
    "distill.teacher": "--teacher",
}  # fmt: skip
CHOSEN = ("batch.tokens", "batch.micro_tokens")
WHOLE = ("batch", "optim", "train", "with", *SECTIONS)


def check_sets(sets: Sequence[str], epochs: float | None = None) -> None:
    """Raise ConfigError for a value of --set that has a flag of its own, is chosen here, or is a whole section."""
    for flag in sets:
        key = flag.partition("=")[0]
        if key == "train.steps" and epochs is not None:
            raise ConfigError(f"--epochs with --set {flag}", "each says how long the run is", "give one of them")
        if key in OWN_FLAGS:
            raise ConfigError(f"--set {flag}", f"`optrush init` has a flag for `{key}`", f"give {OWN_FLAGS[key]}")
        if key in CHOSEN:
            do = f"leave it out, and change `{key}` in the file that is written"
            raise ConfigError(f"--set {flag}", f"`optrush init` chooses `{key}`, by the memory and the model", do)
        if key in WHOLE:
            raise ConfigError(f"--set {flag}", f"the whole of `{key}`", f"name a key of it: --set {key}.KEY=VALUE")


def check_objective(text: str) -> str:
    """Return the objective if it exists; else raise ConfigError."""
    known = ("sft", "pretrain", *SECTIONS)
    if text not in known:
        raise ConfigError(f"the objective {text}", "no such objective", nearest(text, known))
    return text


def check_teacher(request: InitRequest) -> None:
    """Raise ConfigError for a teacher without an objective that needs it, or such an objective without a teacher."""
    if (request.objective == "distill") != (request.teacher is not None):
        found = "no teacher" if request.teacher is None else f"a teacher, {request.teacher}"
        do = "name one: --teacher MODEL" if request.teacher is None else "take --objective distill, or leave it out"
        raise ConfigError(f"the objective {request.objective}", found, do)


def check_method(text: str) -> str:
    """Return the method if it exists; else raise ConfigError."""
    known = ("auto", *METHODS)
    if text not in known:
        raise ConfigError(f"the method {text}", "no such method", nearest(text, known))
    return text


def check_number(text: str) -> str:
    """Return the text if it is a number above 0; else raise ConfigError."""
    value = parse_scalar(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"the number {text}", "no number above 0", "write 1, or 2048")
    return text


def check_new_output(text: str) -> str:
    """Return the output if it does not exist or is an empty folder.

    Raises:
        ConfigError: it is a file, or a folder that is not empty.
    """
    path = Path(text).expanduser()
    if not text:
        raise ConfigError("the output ''", "no name", "name a folder for what the run writes")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"the output {text}", "a file, not a folder", "name another folder")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"the output {text}", "a folder that is not empty", "name another folder")
    return text


def _longest(tree: dict[str, Any], seq: int) -> int:
    """Return the tokens per row: `seq`, or fewer if the model has fewer positions."""
    bare = {"model": tree["model"], "objective": tree["objective"], "data": tree["data"], "output": "runs/new"}
    _, hf = locate(Config.model_validate(bare), weights=False)
    refuse_foreign(hf)
    text = text_config(hf)
    limits = [text.get("max_position_embeddings"), text.get("n_positions")]
    return min([seq, *(n for n in limits if isinstance(n, int))])
