"""Parse the YAML of a run into one frozen, strict model. Inert: no I/O, no torch, no rules between fields.

Text -> `parse_yaml` (values, and the line of each) -> flags applied to them -> `Config`. Every mistake becomes one
ConfigError with file, line and the nearest name. Aliases are rejected: a training file has no use for them, and
they let a small YAML expand to a large one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from optrush.errors import ConfigError
from optrush.foreign_keys import foreign_spelling, inline_yaml

Keys = tuple[str | int, ...]  # the place of a value in the YAML
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")
_TEXT = "tag:yaml.org,2002:str"
_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in _KINDS)
_KEY_TAGS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")  # the keys << and =
_UNPAIRED = re.compile("[\ud800-\udfff]")
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")  # user:password@ of an address, or a token alone
# YAML 1.1 reads 1e-5 as text; we read it as a number.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
# It reads these as numbers of base 60, 8 and 2; YAML 1.2 and most people do not.
_OTHER_BASE = re.compile(r"[-+]?(\d[\d_]*:.*|0[0-7_]+|0b[01_]+)\Z")


class _Dumper(yaml.SafeDumper):
    """Quotes text that `parse_yaml` would read as a number."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style="'" if _NUMBER.match(text) else None)
)


# Characters; keys and values; nesting depth. The slowest text within them takes about 2 s.
LONGEST_YAML, MOST_VALUES, DEEPEST_YAML = 1 << 20, 50_000, 32
ELSEWHERE = "move the data to files; name them, their folder or a pattern in `data.path`"


class _RefusedNode(yaml.MarkedYAMLError):
    """A YAML feature that a configuration may not use."""

    def __init__(self, mark: Any, found: str, do: str) -> None:
        super().__init__(problem=found, problem_mark=mark)
        self.found, self.do = found, do


class _Loader(yaml.SafeLoader):
    """Rejects aliases, deep nesting and too many values while reading, before they use up memory or the stack."""

    depth, values, most = 0, 0, MOST_VALUES

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedNode(event.start_mark, f"the alias *{event.anchor}", "write the value out")
        if self.depth == DEEPEST_YAML:
            found = f"more than {DEEPEST_YAML} levels of nested mappings and lists"
            raise _RefusedNode(event.start_mark, found, "reduce the nesting")
        if self.values == self.most:
            raise _RefusedNode(event.start_mark, f"more than {self.most:,} values and keys", ELSEWHERE)
        self.values += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _OwnLoader(_Loader):
    """Reads the output of `dump_config`, with any number of values."""

    most = sys.maxsize


class StrictModel(BaseModel):
    """Base class of all YAML sections: frozen, no unknown keys, no conversions, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _cadence(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("a whole number of steps (1 or more), or a fraction of the run (below 1)")
    return value


def _file(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("file", "a path")
    return os.path.expanduser(value) if value.startswith("~") else value


def _separator(value: str) -> str:
    if len(value) != 1 or value in '"\r\n':
        raise ValueError("one character, such as ';' or '|' in quotes")
    return value


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise ValueError("each value once")
    return values


Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Cadence = Annotated[float, Field(gt=0), AfterValidator(_cadence)]
File = Annotated[str, BeforeValidator(_file), Field(min_length=1)]


def _short_model(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


class Model(StrictModel):
    """The model: a Hugging Face folder (or the built-in `tiny`), or a named shape with random weights."""

    path: File | None = None
    revision: Text | None = None  # branch, tag or commit of a hub id
    shape: str | None = None
    tokenizer: File | None = None  # folder with a tokenizer, for a shape trained on text
    implementation: Literal["native", "transformers"] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat_template: File | None = None  # a jinja file, or chatml
    add_tokens: Annotated[tuple[Text, ...], Strict(False), AfterValidator(_distinct)] = ()  # special tokens


Bounds = Annotated[tuple[float | None, float | None], Strict(False)]  # [min, max]; null: no limit


class Origin(StrictModel):
    """One of several sources; `weight`: how often each document is read per epoch (0.5: half of them)."""

    path: File
    weight: Annotated[float, Field(gt=0)] = 1.0


class Items(StrictModel):
    """Items to count in a row: the entries of a list, or the matches of a pattern."""

    field: str = "text"  # a key of the row, dotted: meta.ingredients; `text` is all of the row's text
    pattern: str | None = None  # a regular expression whose first group (or whole match) is an item: "^- (.+)$"
    bounds: Bounds | None = None  # rows with fewer or more items are removed
    rarest: Annotated[int, Field(ge=2)] | None = None  # removes rows with an item found in fewer rows than this


class Cleaning(StrictModel):
    """Filters that remove rows before training, applied in this order."""

    chars: Bounds | None = None  # length of the row's text
    tokens: Bounds | None = None
    items: Annotated[tuple[Items, ...], Strict(False)] = ()
    repeated_lines: Share | None = None  # maximum fraction of characters in repeated lines
    language: Annotated[tuple[str, ...], Strict(False)] = ()  # codes such as en; rows in other languages are removed
    exact_duplicates: bool = False
    near_duplicates: Annotated[float, Field(gt=0, lt=1)] | None = None  # Jaccard similarity of duplicates
    decontaminate: File | None = None  # removes rows that share text with this file's rows


Column = Literal[  # of a row or, for `messages[].key`, of its turns
    "text", "messages", "conversations", "instruction", "input", "output", "system", "prompt", "completion", "chosen",
    "rejected", "label", "tools", "role", "from", "content", "value", "reasoning_content", "tool_calls",
    "tool_call_id", "name", "weight", "train", "images", "ignore",
]  # fmt: skip


class Data(StrictModel):
    """The documents; exactly one of path, sample, random."""

    path: File | Annotated[tuple[File | Origin, ...], Strict(False), Field(min_length=1)] | None = None
    sample: Literal["recipes"] | None = None
    random: Annotated[int, Field(ge=1)] | Literal[True] | None = None
    eval: Annotated[float, Field(gt=0, lt=1)] | File | None = None
    max_samples: Annotated[int, Field(ge=1)] | None = None
    train_on: Literal["assistant", "answer", "last", "all"] = "assistant"  # answer: its thoughts are no targets
    too_long: Literal["error", "split", "drop", "truncate"] = "error"
    most_truncated: Annotated[float, Field(ge=0, le=1)] = 0.1  # maximum fraction of rows, with too_long: truncate
    bad_rows: Literal["error", "quarantine"] = "error"
    most_bad: Annotated[float, Field(ge=0, le=1)] = 0.01  # maximum fraction of rows, with bad_rows: quarantine
    text_rows: Literal["file", "paragraph", "line"] = "file"  # unit of a .txt file that becomes one document
    separator: Annotated[str, AfterValidator(_separator)] | None = None  # between the cells of .csv and .tsv files
    columns: dict[Text, Column] = Field(default_factory=dict)  # maps keys of the rows: {question: prompt}
    roles: dict[Text, Literal["system", "developer", "user", "assistant", "tool"]] = Field(default_factory=dict)
    min_pixels: Annotated[int, Field(ge=1)] | None = None  # smaller images are enlarged
    max_pixels: Annotated[int, Field(ge=1)] | None = None  # larger images are reduced
    remote: bool = False  # download images given by web address
    split_turns: bool = False  # one document per answer of a conversation
    clean: Cleaning | None = None
    stream: bool = False  # tokenise while training, without a cache
    cache: File | None = None  # folder of tokenised shards
    workers: Annotated[int, Field(ge=1)] | None = None  # processes that read and tokenise; default: one per core

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Return `path` as a list of origins."""
        paths = (self.path,) if isinstance(self.path, str) else self.path or ()
        return tuple(Origin(path=p) if isinstance(p, str) else p for p in paths)

    @property
    def reading(self) -> str:
        """Return how readers find rows in a file: `text_rows`, then a space and the separator, if given."""
        return self.text_rows if self.separator is None else f"{self.text_rows} {self.separator}"

    @property
    def read_paths(self) -> list[str]:
        """Return the paths that a run trains and evaluates on."""
        held_out = [self.eval] if isinstance(self.eval, str) else []
        return [*(origin.path for origin in self.origins), *held_out]


class BatchSize(StrictModel):
    """Slots, padding included: per row, per step over all ranks, per micro-batch of one rank."""

    seq: Annotated[int, Field(ge=2)] = 2048
    tokens: Annotated[int, Field(ge=1)] = 32768
    micro_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None


class Optim(StrictModel):
    lr: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Literal["cosine", "constant", "linear", "wsd"] = "cosine"
    warmup: Annotated[float, Field(ge=0), AfterValidator(_cadence)] = 0.03
    restarts: Annotated[int, Field(ge=0)] = 0  # cosine: number of warm restarts
    decay: Cadence = 0.1  # wsd: the last steps, with linear decay
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # fraction of `lr` at the end of the schedule
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: Annotated[tuple[Share, Share], Strict(False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(gt=0)] | None = 1.0


def _short_stop(value: object) -> object:
    return {"evals": value} if isinstance(value, int) and not isinstance(value, bool) else value


class StopAfter(StrictModel):
    """Early stopping: after this many evaluations in a row without a new lowest held-out loss."""

    evals: Annotated[int, Field(ge=1)]
    min_delta: Annotated[float, Field(ge=0)] = 0.0  # smaller improvements do not count


class Training(StrictModel):
    """`*_every`: below 1 a fraction of the run, else a number of steps."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    steps: Annotated[int, Field(ge=1)] | None = None
    log_every: Annotated[int, Field(ge=1)] | None = None  # None: by run length, at most 10
    eval_every: Cadence | None = None  # None: at the end; five times from 100 steps on
    save_every: Cadence | None = None
    save: Literal["sync", "async"] = "sync"  # async: a thread writes checkpoints from a host copy
    keep: Annotated[int, Field(ge=1)] = 2
    # With data.eval, and save_every or stop_after: keeps and exports the checkpoint with the lowest held-out loss.
    best: bool = True
    stop_after: Annotated[StopAfter | None, BeforeValidator(_short_stop)] = None  # a number sets `evals`
    export: bool = True  # writes model/ at the end
    # Address (s3://, gs://, hf://, ...) that gets a copy of each checkpoint, and at the end of the whole folder.
    copy_to: Text | None = None
    overwrite: bool = False  # empties the output folder first
    timeout: Annotated[float, Field(ge=1)] = 600.0  # seconds: how long a rank may keep the others waiting

    def steps_a_line(self, total: int) -> int:
        """Return the steps between log lines in a run of `total` steps."""
        return max(1, min(10, total // 20)) if self.log_every is None else self.log_every

    def eval_cadence(self, total: int) -> float | None:
        """Return `eval_every`, or its default in a run of `total` steps; None: only at the end."""
        return 0.2 if self.eval_every is None and total >= 100 else self.eval_every


class Dpo(StrictModel):
    """Settings of `objective: dpo`: the loss of a pair and the source of its reference (docs/dpo.md)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # assumed fraction of swapped pairs
    reference: Literal["auto", "adapter", "precomputed"] = "auto"


class Kto(StrictModel):
    """Settings of `objective: kto`: the loss of a judged answer and the source of its reference (docs/kto.md)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0  # for answers labelled true
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0  # for answers labelled false
    reference: Literal["auto", "adapter", "precomputed"] = "auto"


class Orpo(StrictModel):
    """Settings of `objective: orpo`: the weight of the odds-ratio loss (docs/orpo.md)."""

    beta: Annotated[float, Field(gt=0)] = 0.1


class Simpo(StrictModel):
    """Settings of `objective: simpo`: the scale of mean log-probabilities, and the target margin (docs/simpo.md)."""

    beta: Annotated[float, Field(gt=0)] = 2.0
    gamma: Annotated[float, Field(ge=0)] = 1.0


class Reward(StrictModel):
    """Settings of `objective: reward`: the margin of the chosen score, and score centering (docs/reward.md)."""

    margin: Annotated[float, Field(ge=0)] = 0.0
    center: Annotated[float, Field(ge=0)] = 0.0  # weight of the squared sum of both scores


class Distill(StrictModel):
    """Settings of `objective: distill`: the teacher and the divergence from it (docs/distill.md)."""

    teacher: File | None = None  # a Hugging Face folder or hub id; required
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of the teacher's weights
    divergence: Literal["forward", "reverse"] = "forward"  # forward: KL(teacher || model)
    temperature: Annotated[float, Field(gt=0)] = 1.0
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0  # weight of the next-token loss
    chunk: Annotated[int, Field(ge=1)] = 1024  # tokens with logits in memory at once
    store: Annotated[int, Field(ge=1)] | None = None  # top tokens stored per target; None: the teacher runs live


COLDEST, HOTTEST = 1e-3, 1e3  # beyond, divided logits overflow or become equal


class RewardRule(StrictModel):
    """A reward for answers: number, exact, contains, regex, length, or a function `FILE.py:NAME` (docs/grpo.md)."""

    use: Text
    weight: float = 1.0  # weight in the sum of all rewards
    options: dict[str, Any] = Field(default_factory=dict)  # regex: {pattern}, length: {most}; a function's keywords

    @property
    def compares(self) -> bool:
        """Return whether the reward needs the row's own answer."""
        return self.use in ("number", "exact", "contains")


def _rewards(value: object) -> object:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple({"use": v} if isinstance(v, str) else v for v in values)


class Grpo(StrictModel):
    """Settings of `objective: grpo`: sampling, rewards and loss (docs/grpo.md)."""

    rewards: Annotated[tuple[RewardRule, ...], BeforeValidator(_rewards), Strict(False), Field(min_length=1)] = (
        RewardRule(use="number"),
    )
    reward_timeout: Annotated[float, Field(gt=0, le=1e6)] = 5.0  # seconds per answer for a reward function
    reward_workers: Annotated[int, Field(ge=0)] = 0  # reward processes per rank; 0: the rank itself
    prompts: Annotated[int, Field(ge=1)] = 8  # prompts per step, over all ranks
    group: Annotated[int, Field(ge=2)] = 8  # answers per prompt
    max_new: Annotated[int, Field(ge=1)] = 256  # maximum tokens of an answer
    temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST)] = 1.0
    # Answers each rank samples at once; None: all of a step that fit in a quarter of GPU memory, on a CPU 64.
    slots: Annotated[int, Field(ge=1)] | None = None
    loss: Literal["clip", "cispo"] = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip: Annotated[tuple[Share, Annotated[float, Field(gt=0)]], Strict(False)] = (0.2, 0.28)
    normalise: Literal["tokens", "sequences", "constant"] = "tokens"
    divide_by_spread: bool = False
    beta: Annotated[float, Field(ge=0)] = 0.0  # weight of the KL divergence from the initial model
    updates: Annotated[int, Field(ge=1)] = 1  # optimizer steps per rollout
    truncated: Literal["mask", "keep"] = "mask"  # answers cut off at max_new: masked, or kept


_HOST = r"([\w-]{1,63}(\.[\w-]{1,63})*\.?|\[[\da-fA-F:.]+\])"
_ADDRESS = re.compile(rf'https?://{_HOST}(:\d{{1,5}})?(/[!"$->@-~]*)?', re.ASCII)


def _server_address(value: str) -> str:
    try:
        sound = _ADDRESS.fullmatch(value) and urlsplit(value).port != 0
    except ValueError:  # an invalid port or IPv6 address
        sound = False
    if not sound:
        raise ValueError("the address of a server, such as http://host:8000")
    return value


class RolloutServer(StrictModel):
    """A running vLLM or SGLang server that samples the answers of `objective: grpo` (docs/grpo.md#a-server)."""

    server: Annotated[Text, AfterValidator(_server_address)]  # http://host:port
    folder: File | None = None  # for the trained weights, a path on both machines; None: in the run's
    correction: Annotated[float, Field(ge=1)] = 2.0  # maximum importance weight of a token
    timeout: Annotated[float, Field(gt=0, le=1e6)] = 600.0  # seconds per request


# Objectives with a section of the same name.
SECTIONS: dict[
    str, type[Dpo] | type[Kto] | type[Orpo] | type[Simpo] | type[Reward] | type[Distill] | type[Grpo]
] = {
    "dpo": Dpo, "kto": Kto, "orpo": Orpo, "simpo": Simpo, "reward": Reward, "distill": Distill, "grpo": Grpo,
}  # fmt: skip
# Objectives with rows of a chosen and a rejected answer.
PAIRED = frozenset({"dpo", "orpo", "simpo", "reward"})
JUDGED = "kto"  # the objective with rows of labelled answers
COMPARED = PAIRED | {JUDGED}  # objectives with two documents per sample


def _short_plugin(value: object) -> object:
    return {"use": value} if isinstance(value, str) else value


class ImageTraining(StrictModel):
    """The trained part of the vision tower: none, its projector, or all of it (docs/data.md)."""

    train: Literal["none", "projector", "tower"] = "none"
    lr: Annotated[float, Field(gt=0)] | None = None  # its own peak rate; None: optim.lr

    @model_validator(mode="after")
    def _trained(self) -> ImageTraining:
        if self.lr is not None and self.train == "none":
            raise ValueError("`train: projector` or `train: tower` together with `lr`")
        return self


class Plugin(StrictModel):
    """A user's function or class: an entry point, `FILE.py:NAME` or `MODULE:NAME` (docs/python.md)."""

    use: Text
    options: dict[str, Any] = Field(default_factory=dict)  # keyword arguments


# Row formats of a user's objective, and the built-in objective with the same rows.
ROWS = {"text": "pretrain", "chat": "sft", "pairs": "orpo"}
_OWN_OBJECTIVE = frozenset({"use", "rows", "options"})


def _short_tracker(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class TrackerConfig(StrictModel):
    """A tracker that gets the run's metrics in addition to its folder (docs/trackers.md)."""

    name: Literal["mlflow", "wandb"]
    project: Text = "optrush"
    run: Text | None = None  # run name; default: the output folder's
    uri: Text | None = None  # of the server; None: from the tracker's environment
    offline: bool = False  # write files to the output folder instead
    artifacts: Literal["all", "model", "none"] = "all"  # all: checkpoints and the final model


_TEXT_FILE = re.compile(r"\.txt(\.(gz|bz2|xz|zst))?$")


class Config(StrictModel):
    """The configuration of a run, as in its YAML file (docs/contract.md)."""

    model: Annotated[Model, BeforeValidator(_short_model)]
    objective: Literal["pretrain", "sft", "dpo", "kto", "orpo", "simpo", "reward", "distill", "grpo"]
    loss: Annotated[Plugin | None, BeforeValidator(_short_plugin)] = None  # replaces the objective's loss
    method: Literal["full", "lora", "qlora", "auto"] | None = None  # None: given by `with`
    dpo: Dpo | None = None  # None: the defaults, for the objective of that name
    kto: Kto | None = None
    orpo: Orpo | None = None
    simpo: Simpo | None = None
    reward: Reward | None = None
    distill: Distill | None = None
    grpo: Grpo | None = None
    rollout: RolloutServer | None = None  # None: the trained model samples
    data: Data
    image: ImageTraining | None = None
    batch: BatchSize = BatchSize()
    optim: Optim = Optim()
    train: Training = Training()
    tracker: Annotated[TrackerConfig | None, BeforeValidator(_short_tracker)] = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    output: File
    with_: dict[str, dict[str, Any]] = Field(default_factory=dict, alias="with")

    @model_validator(mode="before")
    @classmethod
    def _own_objective(cls, given: Any) -> Any:
        """Return `objective: {use: NAME, rows: chat}` as the built-in objective with those rows, plus the loss."""
        objective = given.get("objective") if isinstance(given, dict) else None
        if not isinstance(objective, dict) or given.get("loss") is not None:
            return given
        sound = isinstance(objective.get("rows"), str) and objective["rows"] in ROWS
        if "use" not in objective or not sound or objective.keys() - _OWN_OBJECTIVE:
            return given  # rejected as a value of `objective`
        used = {key: objective[key] for key in ("use", "options") if key in objective}
        return {**given, "objective": ROWS[objective["rows"]], "loss": used}

    @model_validator(mode="before")
    @classmethod
    def _split_texts(cls, given: Any) -> Any:
        """Split long text files in pre-training, unless `data.too_long` is given: a file is one document."""
        data = given.get("data") if isinstance(given, dict) and given.get("objective") == "pretrain" else None
        if isinstance(data, dict) and "too_long" not in data:
            paths = data.get("path")
            paths = [
                p.get("path") if isinstance(p, dict) else p for p in (paths if isinstance(paths, list) else [paths])
            ]
            if all(isinstance(p, str) and _TEXT_FILE.search(p) for p in paths):
                return {**given, "data": {**data, "too_long": "split"}}
        return given

    @property
    def tower_part(self) -> Literal["none", "projector", "tower"]:
        """Return which part of the vision tower is trained."""
        return "none" if self.image is None else self.image.train

    @property
    def paired(self) -> bool:
        """Return whether a sample is two documents with compared likelihoods."""
        return self.objective in COMPARED

    @property
    def scored(self) -> bool:
        """Return whether the model outputs a score instead of next tokens."""
        return self.objective == "reward"

    @property
    def has_reference(self) -> bool:
        """Return whether the objective needs a reference model."""
        return self.objective in ("dpo", JUDGED)

    @property
    def referenced(self) -> Dpo | Kto | None:
        """Return the settings of such an objective, if present."""
        return self.kto if self.objective == JUDGED else self.dpo

    @property
    def unplanned(self) -> bool:
        """Return whether the planner chooses the techniques: `with` is absent, or the method is auto."""
        return self.method == "auto" or "with_" not in self.model_fields_set


# Techniques of each method; `full` has none.
METHODS: dict[str, dict[str, dict[str, Any]]] = {"full": {}, "lora": {"lora": {}}, "qlora": {"nf4": {}, "lora": {}}}
ADAPTER_LR = 2e-4  # default `optim.lr` with adapters
ANSWERS_LR = 1e-6  # default `optim.lr` of grpo for all weights; ten times as much for adapters


def dump_config(config: Config) -> str:
    """Return the configuration as YAML that `parse_config` reads back unchanged.

    A learning rate that was not given stays out: it follows from the trained weights (`decide.with_rate`).
    """
    data = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    if "lr" not in config.optim.model_fields_set:
        del data["optim"]["lr"]
    if config.optim.clip is None:  # the only value with another meaning when absent
        data["optim"]["clip"] = None
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_config(
    text: str,
    where: str,
    sets: Iterable[str] = (),
    withs: Iterable[str] = (),
    withouts: Iterable[str] = (),
    own: bool = False,
) -> Config:
    """Parse YAML text and apply the flags in the order --set, --with, --without.

    Args:
        own: `dump_config` wrote the text; no size limit.

    Raises:
        ConfigError: with `where`:line (or the flag), the value found and the nearest name.
    """
    data, lines = parse_yaml(text, where, own)
    flags: dict[Keys, str] = {}
    for flag in sets:
        path = set_value(data, flag)
        flags |= {path[:n]: f"--set {flag}" for n in range(1, len(path) + 1) if n == len(path) or path[:n] not in lines}
    for flag in withs:
        name, _, options = flag.partition(":")
        given = _section(data, "with", f"--with {flag}").setdefault(name, None)
        if not isinstance(given, dict | None):
            raise ConfigError(f"--with {flag}", f"`with.{name}` holds {given!r}", "give the options as a mapping")
        chosen = dict(given or {})
        for pair in filter(None, options.split(",")):
            key, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--with {flag}", f"{pair!r} has no value", "write --with NAME:option=value,...")
            chosen[key] = parse_scalar(value)
        data["with"][name] = chosen
    for flag, name in [*(("--with", w.partition(":")[0]) for w in withs), *(("--without", w) for w in withouts)]:
        refuse_method(name, f"{flag} {name}")
    for name in withouts:
        held = _section(data, "with", f"--without {name}")
        if name not in held:
            known = ", ".join(held) or "nothing"
            raise ConfigError(f"--without {name}", f"`with` holds {known}", "remove the flag, or name one of those")
        del held[name]
    if isinstance(data.get("with"), dict):  # `packing:` alone means packing with its defaults
        data["with"] = {k: {} if v is None else v for k, v in data["with"].items()}
    if isinstance(data.get("objective"), dict) and data.get("loss") is not None:
        place = flags.get(("loss",)) or f"{where}:{lines.get(('loss',), 1)}"
        found, do = "`loss` and `objective: {use: ...}`, which has its own loss", "keep one"
        raise ConfigError(f"{place}: `loss`", found, f"{do}: remove `loss`, or write `objective: sft`")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, where, lines, flags, Config) from None


def refuse_method(name: str, place: str) -> None:
    """Raise ConfigError for a method that is named as a technique, with its spelling.

    Args:
        place: a flag and the name, or a description of its place in the YAML.
    """
    if name in METHODS.keys() - METHODS["lora"].keys():
        spelling = f"--set method={name}" if place.startswith("--") else f"method: {name}"
        raise ConfigError(place, "a method (several techniques), not a technique", f"write `{spelling}`")


def parse_yaml(text: str, where: str, own: bool = False) -> tuple[dict[str, Any], dict[Keys, int]]:
    """Return YAML text as plain values, and the line of every key.

    Args:
        own: `dump_config` wrote the text; no size limit.

    Raises:
        ConfigError: not YAML; a duplicate key, an alias, a tag, a key that is not text; no mapping at the top; too long
            or too deep.
    """
    if len(text) > LONGEST_YAML and not own:
        raise ConfigError(where, f"{len(text):,} characters; the limit is {LONGEST_YAML:,}", ELSEWHERE)
    try:
        node = yaml.compose(text, Loader=_OwnLoader if own else _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: digits in a directive
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        if isinstance(error, _RefusedNode):
            raise ConfigError(place, error.found, error.do) from None
        raise ConfigError(place, f"not YAML: {_reason(error)}", "fix that line") from None
    if not isinstance(node, yaml.MappingNode):
        found = "nothing" if node is None else "no mapping"
        raise ConfigError(where, f"{found} at the top", "start with `model:`, `objective:`, `data:`, `output:`")
    lines: dict[Keys, int] = {}
    value: dict[str, Any] = _plain(node, (), where, lines)
    return value, lines


def parse_scalar(text: str) -> Any:
    """Return the value of a flag, by YAML's rules and our rule for 1e-5."""
    if _UNPAIRED.search(text):  # bytes of the command line that are not UTF-8
        raise ConfigError("a value of a flag", f"{text!r}, which is not UTF-8", "remove that character")
    try:
        node = yaml.compose(text, Loader=_Loader) if len(text) <= LONGEST_YAML else None
    except (yaml.YAMLError, ValueError):
        return text
    return None if node is None else _plain(node, (), "flag", {})


MOST_LISTED = 50  # names in a message


def nearest(name: str, known: Iterable[str], page: str = "") -> str:
    """Return a hint for an unknown name: the nearest known one, the list, or the nearest of a list on a page."""
    names = {k.lower(): k for k in sorted(known)}
    swapped = [k for k in names if sorted(k) == sorted(name.lower())]  # `loar` is lora, not loader
    close = swapped or difflib.get_close_matches(name.lower(), names, 1, 0.6)
    if not close and len(names) > MOST_LISTED:
        near = ", ".join(names[k] for k in difflib.get_close_matches(name.lower(), names, 5, 0.0))
        return f"nearest: {near}; {f'all {len(names)} are in {page}' if page else f'{len(names) - 5} more exist'}"
    return f"did you mean `{names[close[0]]}`?" if close else "known: " + ", ".join(names.values())


def _plain(node: yaml.Node, path: Keys, where: str, lines: dict[Keys, int]) -> Any:
    """Return the value of a YAML node; write the line of each key path below `path` to `lines`."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    kind = "map" if isinstance(node, yaml.MappingNode) else "seq" if isinstance(node, yaml.SequenceNode) else ""
    if node.tag not in _PLAIN or not node.tag.endswith(kind):
        raise ConfigError(f"{where}:{line}", f"the tag {node.tag}", "write a plain value, without a tag")
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag not in {*_PLAIN, *_KEY_TAGS}:
                raise ConfigError(f"{where}:{at}", f"the tag {key_node.tag}", "write a plain key, without a tag")
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{where}:{at}", "a list or a mapping as a key", "give each key a name")
            key = str(key_node.value)
            if key in out:
                raise ConfigError(f"{where}:{at}", f"`{key}` appears twice", "keep one")
            lines[(*path, key)] = at
            out[key] = _plain(value_node, (*path, key), where, lines)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(n, (*path, i), where, lines) for i, n in enumerate(node.value)]
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and node.tag == _TEXT and _NUMBER.match(node.value):
        return float(node.value)
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (LookupError, AttributeError):  # !!bool x, !!timestamp x
        raise ConfigError(f"{where}:{line}", f"`{node.value}` does not match its tag", "write a plain value") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}:{line}", f"`{node.value}`: {_reason(error)}", "write a plain value") from None
    finally:
        loader.dispose()
    if plain and isinstance(value, int | float) and _OTHER_BASE.match(node.value):
        found = f"`{node.value}`, which YAML reads as {value}"
        do = f"write {value}, or the intended number; for text, quote it: '{node.value}'"
        place = f"{where}:{line}: `{'.'.join(map(str, path))}`" if path else "a value of a flag"
        raise ConfigError(place, found, do)
    if isinstance(value, str) and ("\0" in value or (not value.isascii() and _UNPAIRED.search(value))):
        raise ConfigError(f"{where}:{line}", f"{value!r}, which no file or path can contain", "remove that character")
    return value if isinstance(value, str | int | float | bool | None) else str(node.value)


def _reason(error: Exception) -> str:
    texts = [getattr(error, name, None) for name in ("context", "problem")]
    return ", ".join(filter(None, texts)) or next(iter(str(error).splitlines()), type(error).__name__)


def _section(data: dict[str, Any], key: str, asked: str) -> dict[str, Any]:
    if data.get(key) is None:
        data[key] = {}
    section = data[key]
    if not isinstance(section, dict):
        raise ConfigError(asked, f"`{key}` holds {section!r}, no mapping", "give the full path of a value")
    return section


def set_value(data: dict[str, Any], flag: str) -> Keys:
    """Set the value of a flag `--set KEY=VALUE`; return the place of its key.

    Raises:
        ConfigError: not `key=value`, or a key inside a value that is not a mapping.
    """
    path, equals, value = flag.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {flag}", "no `key=value`", "write --set optim.lr=1e-4")
    for name, longer in (("model", _short_model), ("tracker", _short_tracker)):
        if keys[0] == name and len(keys) > 1:
            data[name] = longer(data.get(name))
    target = data
    for key in keys[:-1]:
        target = _section(target, key, f"--set {flag}")
    target[keys[-1]] = parse_scalar(value)
    return tuple(keys)


def explain(
    error: ValidationError, where: str, lines: Mapping[Keys, int], flags: Mapping[Keys, str], root: type[StrictModel]
) -> ConfigError:
    """Return the first mistake of a file with the schema `root`, or of its flags, as a three-line error."""
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":  # the last part is a key of the file, whatever it looks like
        path = (*_path(first["loc"][:-1]), first["loc"][-1])
    lacking = first["type"] == "missing" and isinstance(path[-1], str)  # a key; else an item of a list
    if not lacking and first["type"] != "extra_forbidden":
        while path and path not in lines and path not in flags:  # a union's branch
            path = path[:-1]
    name = ".".join(map(str, path))
    flag = flags.get(path)
    if lacking:
        line = lines.get(path[:-1]) if len(path) > 1 else None
        place = flags.get(path[:-1]) or (f"{where}:{line}" if line else where)
        return ConfigError(f"{place}: `{name}`", "it is missing", f"add `{name if root is Config else path[-1]}:`")
    place = flag or (f"{where}:{lines[path]}" if path in lines else where)
    if first["type"] == "extra_forbidden":
        keys = yaml_keys(root, path)
        hint = nearest(str(path[-1]), keys)
        if "options" in keys and not hint.startswith("did you mean"):
            hint = f"write `options: {{{path[-1]}: ...}}` for an option of `use`; {hint}"
        elif root is Config:
            elsewhere = "" if hint.startswith("did you mean") else _elsewhere(str(path[-1]))
            hint = foreign_spelling(str(path[-1]), first["input"]) or elsewhere or hint
        return ConfigError(f"{place}: `{name}`", "no such key", hint)
    here = [p for p in problems if _path(p["loc"])[: len(path)] == path]
    section = all(p["type"] == "model_type" for p in here)
    do = _whole_section(root, path, first["input"], flag) if section else accepted(here)
    if path == ("objective",):
        do += f"; one of your own: `objective: {{use: FILE.py:NAME, rows: {'|'.join(ROWS)}}}`"
    if path[:2] == ("data", "columns") and path[-1] in get_args(Column) and isinstance(first["input"], str):
        do = f"write the row's key first: `data.columns: {{{first['input']}: {path[-1]}}}`"
    place, found, do = (LOGIN.sub("***@", text) for text in (place, f"{first['input']!r}", do))  # repeat no password
    return ConfigError(f"{place}: `{name}`", found, do)


# Required form of a value by pydantic's type of the error; values in braces come from its context.
ACCEPTED = {
    "file": "a path", "string_type": "text", "string_too_short": "text that is not empty",
    "bool_type": "true or false", "int_type": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number", "finite_number": "a finite number", "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}", "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}", "literal_error": "{expected}", "list_type": "a list",
    "tuple_type": "a list", "too_short": "a list of at least {min_length}", "missing": "a list of more values",
    "too_long": "a list of at most {max_length}", "dict_type": "a mapping {{KEY: VALUE}}",
    "model_type": "a mapping {{KEY: VALUE}}", "value_error": "{error}",
}  # fmt: skip


def accepted(problems: Iterable[ErrorDetails]) -> str:
    """Return the accepted form of a value; for a union, the forms of all its members."""
    texts = [_accepted(p) for p in problems]
    return "give " + " or ".join(dict.fromkeys(texts))


def _accepted(problem: ErrorDetails) -> str:
    form = ACCEPTED.get(problem["type"])  # another system's options may have error types that ours do not
    context = problem.get("ctx", {})
    bounds = {key: int(value) for key, value in context.items() if isinstance(value, float) and value == int(value)}
    text = problem["msg"] if form is None else form.format(**{**context, **bounds})
    return "true" if text == "True" else text


def _whole_section(root: type[BaseModel], path: Keys, given: Any, flag: str | None) -> str:
    """Return the fix for a value in place of a section: under the section's first key, if that accepts the value."""
    part, name = _part(root, path), ".".join(map(str, path))
    keys = yaml_keys(part)
    try:
        filled = part.model_validate({keys[0]: given})
    except ValidationError:
        filled = None
    if filled is None or given is None:
        return f"give a mapping {{KEY: VALUE}} with the keys {', '.join(keys)}"
    if flag is not None:
        return f"write `--set {name}.{keys[0]}={inline_yaml(given)}`"
    text = f"{{{keys[0]}: {inline_yaml(given)}}}"
    if part is Training:  # a number of steps is likelier than of epochs
        return f"write `{name}: {{steps: {inline_yaml(given)}}}` or `{name}: {text}`"
    return f"write `{path[-1]}: {text}`" if isinstance(path[-1], str) else f"write `{text}`"  # an item of a list


def _path(loc: Keys) -> Keys:
    """Return the place of a mistake without pydantic's names for the branches of a union."""
    return tuple(p for p in loc if not (isinstance(p, str) and re.search(r"[\[\(]|^(str|int|float|Origin)$", p)))


def yaml_keys(part: type[BaseModel], path: Keys = ()) -> list[str]:
    """Return the valid keys next to the one at `path`."""
    return [f.alias or name for name, f in _part(part, path[:-1]).model_fields.items() if not f.exclude]


def _elsewhere(key: str) -> str:
    """Return a hint for a key that belongs at the top or in other sections; empty: in no section."""
    parts = {name: _model(f.annotation) for name, f in Config.model_fields.items() if name != "tracker"}
    places = [key] if key in yaml_keys(Config) else []
    places += [f"{name}.{key}" for name, part in parts.items() if part and key in yaml_keys(part)]
    return f"did you mean {' or '.join(f'`{place}`' for place in places)}?" if places else ""


def _part(part: type[BaseModel], path: Keys) -> type[BaseModel]:
    """Return the section at `path`."""
    for key in map(str, path):
        if key in part.model_fields:  # not a place in a list
            part = _model(part.model_fields[key].annotation) or part
    return part


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the section type of a key: X for X | None, or for a list of X."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model(a))), None)


# --- secrets
#
# A run writes its configuration to run.yaml, to every checkpoint and to its tracker. So an address with a password is
# rejected, and the error does not repeat it.

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 6  # a shorter value would be found in ordinary words


def refuse_secrets(config: Config) -> None:
    """Raise ConfigError, with the key but not the value, if a configuration contains a password."""
    for key, value in _texts(config.model_dump(mode="json", by_alias=True)):
        if LOGIN.search(value):
            do = "remove it; set the credential variables of the library that opens the address"
            raise ConfigError(f"`{key}`", "an address with a user or password, which the run would store", do)


def scrubbed(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a foreign message without the environment's secrets and without passwords in addresses."""
    for name, value in environment.items():
        if _NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return LOGIN.sub("***@", text)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, key)


# --- sampling of answers: flags and `/set` are checked before a model is loaded


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; `greedy` takes the most likely token instead of drawing one."""

    temperature: float = 0.7
    top_p: float = 0.9  # the fewest tokens with this total probability
    top_k: int = 0  # the k most likely tokens; 0: all
    max_tokens: int = 512
    greedy: bool = False

    def __post_init__(self) -> None:
        limits = f"of {COLDEST} to {HOTTEST}; use --greedy for 0"
        wrong = (
            ("temperature", COLDEST <= self.temperature <= HOTTEST, limits),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (all of them) or more"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
        )
        for name, met, do in wrong:
            if not met:
                raise ConfigError(f"`{name}`", f"{getattr(self, name)}", f"use a value {do}")

    def changed(self, setting: str) -> Sampling:
        """Return these settings with `name=value` replaced; raise ConfigError if it is invalid."""
        name, equals, text = setting.replace("-", "_").partition("=")
        name, value = name.strip(), parse_scalar(text.strip())
        kinds = {f.name: type(f.default) for f in dataclasses.fields(self)}
        if name not in kinds:
            raise ConfigError(f"/set {setting}", "unknown setting", nearest(name, kinds))
        kind = kinds[name]
        value = float(value) if kind is float and isinstance(value, int) and not isinstance(value, bool) else value
        if not equals or type(value) is not kind:
            raise ConfigError(f"/set {setting}", "not a valid value", f"/set {name}={getattr(self, name)}")
        changes: dict[str, Any] = {name: value}
        return dataclasses.replace(self, **changes)
