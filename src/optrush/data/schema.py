"""Parse rows of training data: each known format is recognized by its keys; all other rows are rejected.

A row that is only partly understood trains the model on data that its author did not write. Here a row has exactly one
known format, and an unsupported key that would change its meaning is an error with the row's location.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from optrush.config import COMPARED, JUDGED, PAIRED, Config, Grpo
from optrush.data.images import IMAGE_PARTS, MARK, SOURCES, Picture, SeenImage, as_picture, image_keys, place_images
from optrush.data.strict_json import decode_json, kind_of, quoted, remedy
from optrush.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names of roles, from ShareGPT and from single model families.
ROLE_NAMES = {
    **{role: role for role in ROLES}, "human": "user", "gpt": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
MAY_BE_EMPTY = ("system", "developer", "tool")  # an empty system prompt or tool result is valid; other turns need text
REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys that change the model's input or its targets; dropping them would change the row.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TURN_NOT_UNDERSTOOD = (*MEDIA, "function_call", "refusal", "prefix", "train_detail")
ROW_NOT_UNDERSTOOD = (*MEDIA, "history", "functions", "function_call", "chat_template_kwargs")
# The keys that determine a row's kind (`chosen` and `rejected` are one kind), and the keys that are read for each kind.
SIGNS = ("text", "messages", "conversations", "instruction", "completion", "chosen", "rejected")
READ = {
    "text": frozenset({"text"}), "messages": frozenset({"messages", "system", "tools"}),
    "conversations": frozenset({"conversations", "system", "tools"}),
    "instruction": frozenset({"instruction", "input", "output", "system"}),
    "completion": frozenset({"prompt", "completion", "system", "tools"}),
    "chosen": frozenset({"prompt", "chosen", "rejected", "system", "tools"}),
}  # fmt: skip
READ_OF_TURN = frozenset({"tool_calls", "tool_call_id", "name", *REASONING})
# All keys of a row that are read.
MEANT = frozenset({*SIGNS, *ROW_NOT_UNDERSTOOD, "input", "output", "prompt", "system", "tools", "label"})

IGNORE = "ignore"  # in `data.columns`: a key that is not read

# --- Keys of other tools. A key that changes the loss in such a tool is applied or rejected; any other unread key is
# counted, and the run lists it.

# Weight of a turn in the loss: 0 or false, 1 or true.
LEARNT = ("weight", "train", "loss", "loss_weight", "loss_mask", "loss_scale", "training", "trainable")
WEIGHTS = ("weight", "loss_weight", "loss_scale")  # these may be any number
LIGHTEST, HEAVIEST = 0.001, 1_000_000
# Words in keys that may control the loss: `turn_mask`, `ignore_loss`.
CONTROL = re.compile(
    r"(?:^|_)(?:loss|masks?|masked|weights?|train|training|trainable|learn|learnt|learned|learnable|supervised?|ignored?"
    r"|excluded?|skip)(?:_|$)"
)
THOUGHTS = (
    *REASONING, "reasoning_details", "reasoning_text", "thinking_blocks", "thought", "thoughts", "think", "cot",
    "chain_of_thought", "complex_cot", "rationale", "analysis",
)  # fmt: skip
JUDGEMENT = frozenset({"label", "kto_tag", "kto_label", "desirable", "is_desirable", "is_good", "thumbs_up"})
# Keys of the text before an answer, each with its name here; `_column` adapts that to the row's kind.
BEFORE = {
    **dict.fromkeys((
        "system", "developer", "system_prompt", "system_message", "system_msg", "sys_prompt", "preamble", "persona",
    ), "system"),
    **dict.fromkeys(("instruction", "question", "query", "input", "prompt", "problem", "user_prompt"), "prompt"),
    **dict.fromkeys((
        "context", "contexts", "background", "passage", "passages", "document", "documents", "knowledge", "history",
        "conversation_history",
    ), "input"),
}  # fmt: skip
# All keys of a row that would change the loss or the text, with their meaning: such a key is never dropped silently.
FOREIGN = {
    **dict.fromkeys((
        *LEARNT, "weights", "sample_weight", "example_weight", "token_weights", "mask", "masks", "train_mask", "labels",
        "completion_mask", "assistant_mask", "assistant_masks", "ignore_loss", "no_loss", "skip_loss",
    ), "mask"),
    **dict.fromkeys(JUDGEMENT, "judgement"),
    **dict.fromkeys((*BEFORE, *THOUGHTS), "text"),
    **dict.fromkeys(("chat_template", "enable_thinking", "tool_choice"), "setting"),
    **dict.fromkeys((
        f"{side}_{name}{many}" for side in ("chosen", "rejected") for many in ("", "s")
        for name in ("response", "message", "answer", "completion", "output", "text", "conversation")
    ), "answer"),
}  # fmt: skip
ASKING = ("instruction", "question", "query", "prompt", "input", "problem", "user", "human", "user_prompt", "ask")
ANSWERING = ("output", "answer", "response", "completion", "reply", "solution", "target", "assistant", "gpt", "bot")


@dataclass(frozen=True)
class RowRules:
    """Settings for reading rows: the objective, and names for keys (`data.columns`) and roles (`data.roles`)."""

    objective: str = ""
    columns: tuple[tuple[str, str], ...] = ()  # (a key, or `messages[].key` of turns; its name here, or `ignore`)
    roles: tuple[tuple[str, str], ...] = ()
    compares: str = ""  # for GRPO: the reward that needs the row's own answer

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return the settings that determine a row's meaning."""
        return self.objective, self.columns, self.roles, *([self.compares] if self.objective == "grpo" else ())

    @cached_property
    def of_rows(self) -> dict[str, str]:
        """The names of a row's own keys."""
        return {key: name for key, name in self.columns if "[]." not in key}

    @cached_property
    def of_turns(self) -> dict[str, str]:
        """The names of the keys of turns."""
        return {key: name for key, name in self.columns if "[]." in key}

    @cached_property
    def role_names(self) -> dict[str, str]:
        """The role of each name."""
        return {**ROLE_NAMES, **dict(self.roles)}


NO_RULES = RowRules()


def row_rules(config: Config) -> RowRules:
    """Return the settings for reading a run's rows."""
    data, rewards = config.data, (config.grpo or Grpo()).rewards if config.objective == "grpo" else ()
    compares = next((rule.use for rule in rewards if rule.compares), "")
    return RowRules(config.objective, tuple(data.columns.items()), tuple(data.roles.items()), compares)


MEND = "fix that line, or remove it"


class _Bad(Exception):
    """Why a row is invalid, and how to fix it."""

    def __init__(self, reason: str, do: str = "") -> None:
        super().__init__(reason)
        self.do = do


class RowLocation(NamedTuple):
    """A row's file and line, counted from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Message:
    """One turn; `weight` is 0 if the row marks an assistant turn as context only."""

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    call_id: str | None = None
    weight: float = 1.0  # of its tokens in the loss
    thoughts: str = field(default="reasoning", compare=False)  # the key that held `reasoning` in the row
    images: tuple[Picture, ...] = ()  # one for each MARK in the content

    @property
    def learnt(self) -> bool:
        """Whether the turn counts in the loss."""
        return self.weight > 0

    @property
    def plain(self) -> bool:
        """Whether the turn has only a role and text."""
        return not (self.reasoning or self.calls or self.name or self.call_id or self.images)

    def shown(self) -> dict[str, Any]:
        """Return the turn as a dict for chat templates, without keys for absent parts."""
        if self.plain:
            return {"role": self.role, "content": self.content}
        more = {  # templates differ in their name for reasoning
            **dict.fromkeys(REASONING, self.reasoning), "tool_calls": list(self.calls), "name": self.name,
            "tool_call_id": self.call_id,
        }  # fmt: skip
        return {"role": self.role, "content": self.content} | {key: value for key, value in more.items() if value}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Chat:
    """A conversation; the first `prompt` messages are never targets."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt: int = 0

    @property
    def images(self) -> tuple[Picture, ...]:
        """The images of all turns, in order."""
        return tuple([image for message in self.messages for image in message.images])


@dataclass(frozen=True)
class Completion:
    """Two plain strings that are concatenated unchanged; the second is the target."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Pair:
    chosen: Chat | Completion
    rejected: Chat | Completion


@dataclass(frozen=True)
class Judged:
    """Answers, each labelled good or bad: one from a row with a label, two from a pair."""

    answers: tuple[Chat | Completion, ...]
    labels: tuple[bool, ...]


Row = Text | Chat | Completion | Pair | Judged


def parts_of(row: Row) -> tuple[Text | Chat | Completion, ...]:
    """Return the answers of a row, each with its prompt: two for a pair."""
    return row.answers if isinstance(row, Judged) else (row.chosen, row.rejected) if isinstance(row, Pair) else (row,)


def bad_row(where: RowLocation, reason: str, do: str = MEND) -> DataError:
    """Return the error for a row, in the same words for every reader and cleaner."""
    return DataError(f"the row at {where}", reason, remedy(reason, do))


def row_text(row: Row) -> str:
    """Return the readable text of a row, with a newline between turns; a pair's common prompt appears once."""
    if isinstance(row, Text):
        return row.text
    if isinstance(row, Judged):
        return row_text(row.answers[0] if len(row.answers) == 1 else Pair(*row.answers))
    if isinstance(row, Completion):
        return row.prompt + row.completion
    if isinstance(row, Chat):
        parts: list[str | None] = []
        for message in row.messages:
            parts += [message.reasoning, message.content]
            parts += [json.dumps(call["function"], ensure_ascii=False) for call in message.calls]
        return "\n".join(part for part in parts if part)
    rejected = row.rejected
    if isinstance(rejected, Completion):
        return f"{row_text(row.chosen)}\n{rejected.completion}"
    return f"{row_text(row.chosen)}\n{row_text(Chat(rejected.messages[rejected.prompt :]))}"


def parse_row(
    where: RowLocation, found: dict[str, Any], rules: RowRules = NO_RULES, noted: set[str] | None = None
) -> Row:
    """Return the parsed row; its keys must match exactly one kind.

    text; messages; conversations (ShareGPT); instruction, input, output (Alpaca); prompt, completion; chosen, rejected
    with or without prompt, which may be messages or conversations that end without an answer (LLaMA-Factory). If a row
    has several kinds, pretrain takes the text, other objectives the structured kind, if the unused keys repeat the same
    text. A null counts as an absent key, except a null `system` in a row of texts: it turns them into messages, so that
    all rows of a table have the same kind.

    Args:
        noted: gets the names of unread keys (of turns as `messages[].id`), and `key -> name` for keys renamed by
            `data.columns`.

    Raises DataError with the location: no kind or several, a wrong type, an empty turn, no target, or an unsupported
    key that would change the row's meaning.
    """
    unread, sign = set[str]() if noted is None else noted, ""
    try:
        if rules.columns:
            found = _named_columns(found, rules, unread)
        found, label = _prompted(found, rules), None
        if rules.objective == JUDGED:
            found, label = _label(found)
        if rules.objective == "grpo":
            found |= _stand_in(found, rules)
        sign = _sign(found, rules.objective)
        found, sign = _with_images(found, sign, unread)
        row = _row(found, sign, rules, unread)
        if rules.objective == JUDGED:
            row = _judgement(row, label)
        if rules.objective == "grpo" and isinstance(row, Text):
            raise _Bad("a text without a prompt and an answer", "use rows of prompt and completion, or of messages")
        if keys := found.keys() - READ[sign]:
            _refuse_foreign(found, keys, sign, row, unread)
        return row
    except _Bad as bad:
        raise bad_row(where, str(bad), bad.do or (sign and _hint(found, sign)) or MEND) from None


def check_kind(objective: str, pair: bool, where: RowLocation) -> None:
    """Raise DataError if the objective cannot learn from a row that is a pair, or from one that is not."""
    asked, pairs = f"`objective: {objective}`", objective in PAIRED
    if pair and not pairs:
        do = "use rows of messages, of prompt and completion, or of text; or set objective: dpo"
        raise DataError(asked, f"a pair of a chosen and a rejected answer at {where}", do)
    if pairs and not pair:
        found = f"the row at {where} is not a pair of a chosen and a rejected answer"
        raise DataError(asked, found, 'use rows {"prompt": ..., "chosen": ..., "rejected": ...}')


def has_answer(found: dict[str, Any], rules: RowRules) -> bool:
    """Return whether a raw row has an answer."""
    return not _stand_in(_named_columns(found, rules, set()), replace(rules, compares=""))


def _stand_in(raw: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    """Return {key: placeholder} for the answer of a row that is only a prompt; an empty dict for a row with an answer.

    The placeholder is a word of the prompt, so the tokenizer can encode it. Raises _Bad if a reward needs an answer.
    """
    filled = dict[str, Any]()
    if key := next((key for key in ("messages", "conversations") if raw.get(key) is not None), ""):
        turns = _turn_list(raw[key], key)
        last = turns[-1] if turns and isinstance(turns, list) else None
        role = str(last.get("from") or last.get("role")) if isinstance(last, dict) else ""
        if rules.role_names.get(role) not in (None, "assistant"):
            filled = {key: [*turns, _word_turn(turns)]}
    elif raw.get("instruction") is not None:
        filled = {"output": _word(raw["instruction"])} if raw.get("output") is None else {}
    elif raw.get("prompt") is not None and all(raw.get(key) is None for key in SIGNS):
        turns = _turn_list(raw["prompt"], "prompt", sure=False)
        plain = isinstance(turns, str)  # a text, which is concatenated with its answer
        space = " " if plain and not turns[-1:].isspace() else ""
        filled = {"completion": space + _word(turns) if plain else [_word_turn(turns)]}
    if filled and rules.compares:
        to = next(iter(filled))
        answers = [key for key in raw if key.lower() in ANSWERING and key != to and raw[key] is not None]
        ways = [f"`data.columns: {{{answers[0]}: {to}}}`"] if answers and to in ("output", "completion") else []
        ways += ["add the answer", "use a reward without a reference: regex, length or FILE.py:FUNCTION, such as "]
        ways[-1] += "`grpo.rewards: [{use: length, options: {most: 400}}]`"
        raise _Bad(f"a prompt without the answer that the reward `{rules.compares}` needs", "; or ".join(ways))
    return filled


def _word(text: object) -> str:
    match = re.search(r"\w{1,32}", text) if isinstance(text, str) else None
    return match[0] if match else "-"


def _word_turn(turns: Any) -> dict[str, str]:
    last = turns[-1] if isinstance(turns, list) and turns else turns
    text = (last.get("content") or last.get("value")) if isinstance(last, dict) else None
    return {"role": "assistant", "content": _word(text)}


def _label(raw: dict[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Return the row without its label, and the label."""
    given = {key: raw[key] for key in raw if key.lower() in JUDGEMENT and raw[key] is not None}
    labels = {key: _flag(value) for key, value in given.items()}
    for key, label in labels.items():
        if label is None:
            raise _Bad(f"{key} is neither true nor false: {quoted(str(given[key]))}")
    if len({*labels.values()}) > 1:
        raise _Bad(f"{' and '.join(labels)} contradict each other")
    rest = {key: value for key, value in raw.items() if key.lower() not in JUDGEMENT}
    return rest, next(iter(labels.values()), None)


KTO_ROWS = (
    'use rows {"prompt": ..., "completion": ..., "label": true} (or false), or pairs of chosen and rejected; '
    "if another key holds the label: `data.columns: {KEY: label}`"
)


def _judgement(row: Row, label: bool | None) -> Judged:
    if isinstance(row, Pair):
        if label is not None:
            raise _Bad("the row has 'chosen' and 'rejected' and a label; keep one")
        return Judged((row.chosen, row.rejected), (True, False))
    if not isinstance(row, Chat | Completion):
        raise _Bad("a text, without an answer to judge", KTO_ROWS)
    if label is None:
        raise _Bad("no 'label' (true or false) for the answer", KTO_ROWS)
    return Judged((row,), (label,))


def _named_columns(raw: dict[str, Any], rules: RowRules, noted: set[str]) -> dict[str, Any]:
    """Return the row with its keys renamed by `data.columns`."""
    result = _renamed(raw, rules.of_rows, "", noted)
    for name, turns in list(result.items()) if rules.of_turns else ():
        names = {k.partition("[].")[2]: to for k, to in rules.of_turns.items() if k.startswith(f"{name}[].")}
        if names and isinstance(turns, dict):
            result[name] = _renamed(turns, names, f"{name}[].", noted)
        elif names and isinstance(turns := _turn_list(turns, name), list):
            result[name] = [_renamed(t, names, f"{name}[].", noted) if isinstance(t, dict) else t for t in turns]
    return result


def _renamed(raw: dict[str, Any], names: dict[str, str], place: str, noted: set[str]) -> dict[str, Any]:
    result = {key: value for key, value in raw.items() if key not in names}
    for key, name in names.items():
        if raw.get(key) is None:
            if key in raw and name != IGNORE:
                result.setdefault(name, None)
            continue
        noted.add(f"{place}{key} -> {name}")
        if name != IGNORE:
            if result.get(name) is not None:
                raise _Bad(f"{quoted(place + key)} is {quoted(name)} by data.columns, but the row has that key, too")
            result[name] = raw[key]
    return result


def _sign(raw: dict[str, Any], objective: str) -> str:
    """Return the kind of a row."""
    signs = [key for key in SIGNS if raw.get(key) is not None] or [key for key in SIGNS if key in raw]
    if len(signs) == 1:
        return "chosen" if signs[0] == "rejected" else signs[0]
    if not signs:
        keys = ", ".join(quoted(key) for key in list(raw)[:8]) or "no keys"
        raise _Bad(f"no known format: the row has {keys}", _mapping(raw))
    kinds = [sign for sign in signs if sign != "rejected" or "chosen" not in signs]
    if objective and "text" in kinds:
        kinds = ["text"] if objective == "pretrain" else [kind for kind in kinds if kind != "text"]
    if objective and len(kinds) == 2 and kinds[1] == "chosen" and raw[kinds[0]] == raw["chosen"]:
        kinds = kinds[1:] if objective in PAIRED else kinds[:1]  # the conversation is the chosen one
    if len(kinds) > 1:
        reason = f"both {quoted(signs[0])} and {quoted(signs[-1])}: ambiguous"
        line = f"ignore one: `data.columns: {{{signs[-1]}: ignore}}`"
        if kinds[1] in ("chosen", "rejected") and objective in COMPARED:
            chosen = raw.get("chosen")
            conversation = isinstance(chosen, list) and len(chosen) > 1  # includes the prompt
            line = f"ignore one: `data.columns: {{{signs[0]}: ignore}}`"
            line = line if conversation else f"is {quoted(signs[0])} the prompt? `data.columns: {{{signs[0]}: prompt}}`"
        raise _Bad(reason, f"{line}, or fix that line")
    return "chosen" if kinds[0] == "rejected" else kinds[0]


def _prompted(raw: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    """Return the row with its conversation as `prompt`, if that ends without an answer and the row has two answers.

    An `instruction` before two texts becomes a user turn: the key `system`, even if null, turns texts into messages.
    """
    asks = rules.objective in COMPARED and raw.get("instruction") is not None and isinstance(raw.get("chosen"), str)
    if asks and raw.get("output") is None and raw.get("prompt") is None:
        turns = {"prompt": _question(raw), "system": raw.get("system")}
        return {key: value for key, value in raw.items() if key not in ("instruction", "input")} | turns
    key = next((key for key in ("messages", "conversations") if raw.get(key) is not None), None)
    answers = [raw.get("chosen"), raw.get("rejected")]
    if key is None or raw.get("prompt") is not None or not all(isinstance(answer, dict | list) for answer in answers):
        return raw
    turns = _turn_list(raw[key], key)
    last = turns[-1] if turns and isinstance(turns, list) else None
    role = str(last.get("from") or last.get("role")) if isinstance(last, dict) else ""
    if rules.role_names.get(role) in (None, "assistant"):
        return raw
    return {**{name: value for name, value in raw.items() if name != key}, "prompt": turns}


def _mapping(raw: dict[str, Any]) -> str:
    """Return the fix for a row of an unknown kind: the `data.columns` line that names its keys."""
    keys = {key.lower(): key for key in raw if raw[key] is not None}
    ask, answer = (next((keys[k] for k in names if k in keys), None) for names in (ASKING, ANSWERING))
    if any(re.match("image|img|file_name|photo", k) for k in keys) and {"caption", "description", "answer"} & {*keys}:
        return "images with captions: file_name, question, caption in metadata.csv; then optrush init --data FOLDER"
    if ask is None or answer is None:
        kinds = "text; messages; instruction, output; prompt, completion; prompt, chosen, rejected"
        return f"{MEND}; or map its keys to a known format (data.columns: {{KEY: text}}): {kinds}"
    names = {ask: "instruction", answer: "output"}
    for key in raw:
        to = "system" if BEFORE.get(key.lower()) == "system" else "input"
        if key.lower() in BEFORE and raw[key] is not None and to not in names.values():
            names.setdefault(key, to)
    changed = ", ".join(f"{key}: {name}" for key, name in names.items() if key != name)
    return f"map them as question and answer: `data.columns: {{{changed}}}`; or as another format (docs/data.md)"


def _row(raw: dict[str, Any], sign: str, rules: RowRules, unread: set[str]) -> Row:
    """Return the parsed row of the kind `sign`; add unread keys to `unread`; raise _Bad if the row is invalid."""
    _refuse(raw, MEDIA if sign == "text" else ROW_NOT_UNDERSTOOD, "the row")
    if sign == "text":
        return Text(_full(raw["text"], "text"))
    if sign in ("messages", "conversations"):
        return _chat(_with_system(raw, _turns(raw[sign], sign, rules, unread), sign), _tools(raw))
    if sign == "instruction":
        return _alpaca(raw)
    # A single turn may be an object without a list, like in LLaMA-Factory's preferences.
    raw = {k: [v] if k in ANSWERED and isinstance(v, dict) and _is_turn(v) else v for k, v in raw.items()}
    if sign == "completion":
        if raw.get("prompt") is None and not isinstance(raw.get("label"), bool):
            raise _Bad("'completion' without 'prompt'", _mapping(raw))
        return _answer(raw, "completion", rules, unread)
    return _pair(raw, rules, unread)


def _refuse_foreign(raw: dict[str, Any], keys: set[str], sign: str, row: Row, unread: set[str]) -> None:
    """Add the unread keys of a row to `unread`; raise _Bad for a FOREIGN key, unless ignoring it is harmless."""
    for key in sorted(keys, key=lambda key: (key.lower() not in ASKING, key)):
        value, says = raw[key], FOREIGN.get(key.lower())
        if value is None or value in ("", [], {}):
            continue
        reason, ways = ": unsupported key; it would change the loss mask", list[str]()
        ignored = f"ignore the key: `data.columns: {{{key}: ignore}}`"
        if says == "mask":
            harmless = _flag(value) is True  # 1 and true
        elif sign == "text" or says is None:
            harmless = True
        elif says == "judgement":
            harmless = sign == "chosen" or (_flag(value) is None and key == "label")
            reason = ": a judged answer; training would treat it as good"
            ignored = f"remove bad answers, then {ignored}"
        else:
            harmless = says == "text" and _is_in(value, row_text(row))
            to = _column(key.lower(), sign)
            ways += [f"`data.columns: {{{key}: {to}}}`"] if to and to != key and raw.get(to) is None else []
        if not harmless:
            raise _Bad(f"the row has {quoted(key)}{reason}", ", or ".join([*ways, ignored]))
        unread.add(key)


def _column(name: str, sign: str) -> str | None:
    """Return the name of a BEFORE key in rows of a kind; None if they have no place for it."""
    to = BEFORE.get(name)
    if sign == "instruction" and to == "prompt":
        to = "input"
    return to if to in READ[sign] else "prompt" if to == "input" and "prompt" in READ[sign] else None


def _hint(raw: dict[str, Any], sign: str) -> str:
    """Return a hint about a key that other tools read as a part of the prompt; "" if there is none."""
    for key in sorted(raw, key=lambda key: key.lower() not in ASKING):
        to = None if key in READ[sign] else _column(key.lower(), sign)
        if to is not None and raw[key] is not None and raw.get(to) is None:
            return f"{MEND}; is {quoted(key)} its {to}? `data.columns: {{{key}: {to}}}`"
    if "system" in raw and raw.get("prompt") is None and isinstance(raw.get("chosen"), str):
        return f"{MEND}; or read only its texts: `data.columns: {{system: ignore}}`"
    return ""


def _is_in(value: Any, text: str) -> bool:
    """Return whether a text contains all texts in a value, roles excepted."""
    return all(inner.strip() in text for inner in _inner_texts(value) if inner not in ROLE_NAMES)


def _inner_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inner_texts(inner)


def _flag(value: Any) -> bool | None:
    """Return a value as a boolean: true, 1, or these as text (CSV); None if it is not one."""
    if isinstance(value, str):
        return {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}.get(value.lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _may_be_mask(value: Any) -> bool:
    """Return whether a value could be a loss mask: a boolean or number, or a collection of these alone."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return any(part is not None for part in inner) and all(part is None or _may_be_mask(part) for part in inner)
    return isinstance(value, bool | int | float) or _flag(value) is not None


def _question(raw: dict[str, Any]) -> str:
    """Return the instruction of a row, followed by an empty line and its input, if any."""
    ask, given = _full(raw["instruction"], "instruction"), _string(_given(raw, "input", ""), "input")
    return f"{ask}\n\n{given}" if given.strip() else ask


IMAGES_IN = ("messages", "conversations", "prompt", "completion")
TURNS_OF_IMAGES = "write turns (messages, or prompt and completion as lists), for objective: sft"


def _with_images(raw: dict[str, Any], sign: str, unread: set[str]) -> tuple[dict[str, Any], str]:
    """Return a row with its `images` moved into its turns, and its kind; an instruction becomes messages."""
    named = image_keys(raw, unread)
    if named and sign not in (*IMAGES_IN, "instruction"):
        _refuse(raw, tuple(named), "the row", TURNS_OF_IMAGES)
    if not named:
        return raw, sign
    if sign == "instruction" and raw.get("output") is not None:
        question = {"role": "user", "content": _question(raw)}
        rest = {key: value for key, value in raw.items() if key not in ("instruction", "input", "output")}
        raw, sign = {**rest, "messages": [question, {"role": "assistant", "content": raw["output"]}]}, "messages"
    raw = {key: _turn_list(raw[key], key, sure=key == sign) if key in IMAGES_IN else raw[key] for key in raw}
    try:
        return place_images(raw, named, IMAGES_IN), sign
    except ValueError as error:
        texts = any(isinstance(raw.get(key), str) for key in IMAGES_IN)
        raise _Bad(f"the row has {error}", TURNS_OF_IMAGES if texts else "") from None


def _alpaca(raw: dict[str, Any]) -> Chat:
    _refuse(raw, ("tools",), "the row")
    ask = _question(raw)
    if raw.get("output") is None:
        raise _Bad("'instruction' without 'output'", _mapping(raw))
    turns = (Message("user", ask), Message("assistant", _full(raw["output"], "output")))
    return _chat(_with_system(raw, turns, "instruction"))


def _pair(raw: dict[str, Any], rules: RowRules, unread: set[str]) -> Pair:
    """Return the pair; raise _Bad if it is invalid. Without `prompt`, the answers' common beginning is the prompt."""
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if raw.get(key) is None:
            raise _Bad(f"{quoted(other)} without {quoted(key)}")
    answers = {key: _turn_list(raw[key], key, sure=False) for key in ("chosen", "rejected")}
    if all(isinstance(answer, list) for answer in answers.values()):  # else both are texts
        raw = {**raw, **answers}
    if raw["chosen"] == raw["rejected"]:
        raise _Bad("chosen and rejected are the same")
    chosen, rejected = (_answer(raw, key, rules, unread) for key in ("chosen", "rejected"))
    if isinstance(chosen, Completion) != isinstance(rejected, Completion):
        raise _Bad(f"chosen is {kind_of(raw['chosen'])}, rejected is {kind_of(raw['rejected'])}")
    if isinstance(chosen, Completion) and isinstance(rejected, Completion) and raw.get("prompt") is None:
        common = os.path.commonprefix([chosen.completion, rejected.completion])  # noqa: RUF071 - of characters
        n = max((i for i, char in enumerate(common, 1) if char.isspace()), default=0)  # words stay whole
        chosen, rejected = (
            Completion(common[:n], _full(side.completion[n:], f"{name} after the common prompt"))
            for name, side in (("chosen", chosen), ("rejected", rejected))
        )
    if isinstance(chosen, Chat) and isinstance(rejected, Chat):
        both = list(zip(chosen.messages, rejected.messages))
        alike = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), len(both))
        if alike < max(1, chosen.prompt, rejected.prompt):
            raise _Bad("chosen and rejected do not begin with the same prompt")
        if raw.get("prompt") is None:
            chosen, rejected = _after(chosen, alike, "chosen"), _after(rejected, alike, "rejected")
    return Pair(chosen, rejected)


def _answer(raw: dict[str, Any], key: str, rules: RowRules, unread: set[str]) -> Chat | Completion:
    """Return the prompt with the answer `key`; if the answer's conversation repeats the prompt, it appears once."""
    prompt, answer = raw.get("prompt"), raw[key]
    turns: tuple[Message, ...]
    if not isinstance(answer, str):
        prompt, turns = _turn_list(prompt, "prompt", sure=False), _turns(answer, key, rules, unread)
    elif "system" not in raw:
        _refuse(raw, ("tools",), "the row")
        return Completion("" if prompt is None else _full(prompt, "prompt"), _full(answer, key))
    elif prompt is None:
        raise _Bad("a row of texts has 'system' without 'prompt': a system turn comes before a user's")
    else:  # the texts are turns
        prompt, turns = _full(prompt, "prompt"), (Message("assistant", _full(answer, key)),)
    if prompt is None:
        return Chat(_with_system(raw, turns, key), _tools(raw))
    n, before = 0, _turns(prompt, "prompt", rules, unread) if isinstance(prompt, list) else ()
    if not isinstance(prompt, list):  # system turns come before it
        before = (Message("user", _full(prompt, "prompt")),)
        n = next((i for i, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns))
    before, turns = turns[:n] + before, turns[n:]
    if turns[: len(before) - n] == before[n:]:
        turns = turns[len(before) - n :]
    before = _with_system(raw, before, "prompt")
    return _after(Chat(before + turns, _tools(raw)), len(before), key)


def _after(chat: Chat, n: int, key: str) -> Chat:
    """Return the conversation with its first n turns as the prompt, if an answer follows them."""
    if len(chat.messages) == n or chat.messages[n].role != "assistant":
        raise _Bad(f"{key}: no assistant turn follows the prompt")
    return _chat(chat.messages, chat.tools, n)


def _chat(messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...] = (), prompt: int = 0) -> Chat:
    answers = [message for message in messages[prompt:] if message.role == "assistant"]
    if not any(message.learnt for message in answers):
        raise _Bad(f"no assistant turn{' is a target' if answers else ''}")
    return Chat(messages, tools, prompt)


def _with_system(raw: dict[str, Any], turns: tuple[Message, ...], name: str) -> tuple[Message, ...]:
    """Return a row's turns after its `system`, if it has one."""
    system = _string(_given(raw, "system", ""), "system")
    if system and turns[0].role == "system":
        raise _Bad(f"both 'system' and a system turn in {name}: ambiguous")
    return (Message("system", system), *turns) if system else turns


def _tools(raw: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = _given(raw, "tools", [])
    if isinstance(tools, str):
        tools = _decoded(tools, "tools")
    _list(tools, "tools")
    for i, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise _Bad(f"tools[{i}] is not an object with a function name")
    return tuple(tools)


def _turn_list(value: Any, name: str, sure: bool = True) -> Any:
    """Return the turns in a JSON text, a common form in tables; any other value unchanged.

    Args:
        sure: the value must be turns. Else it counts as text, unless it is a list of turns alone.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        turns = decode_json(value.encode())
    except ValueError as error:
        if sure or TURNS.match(value):
            raise _Bad(f"{name} looks like a list of turns as text, but is not JSON: {error}") from None
        return value
    return turns if sure or (turns and all(map(_is_turn, turns))) else value


def _is_turn(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return {"from", "value"} <= value.keys() or ("role" in value and not value.keys().isdisjoint(SAID))


MOST_TURNS = 10_000
SAID = ("content", "tool_calls")
ANSWERED = ("prompt", "completion", "chosen", "rejected")
# The beginning of turns as text, in JSON or as a Python literal.
TURNS = re.compile(
    r"""(?s)\s*\[\s*\{\s*["'](?:role["'].*["']content|content["'].*["']role|from["'].*["']value|value["'].*["']from)["']\s*:"""
)


def _turns(value: Any, name: str, rules: RowRules, unread: set[str]) -> tuple[Message, ...]:
    if not _list(value := _turn_list(value, name), name):
        raise _Bad(f"{name} is an empty list")
    if len(value) > MOST_TURNS:
        raise _Bad(f"{name} has {len(value):,} turns; the limit is {MOST_TURNS:,}", "split it into several rows")
    return tuple([_turn(turn, f"{name}[{i}]", rules, unread) for i, turn in enumerate(value)])


def _turn(raw: Any, name: str, rules: RowRules, unread: set[str]) -> Message:
    """Return a turn's message; `name` is its name in errors; add unread keys to `unread`; raise _Bad if invalid."""
    if not isinstance(raw, dict):
        raise _Bad(f"{name} is {kind_of(raw)}, not an object with role and content")
    speaker, content_key = ("from", "value") if raw.get("from") is not None else ("role", "content")
    if speaker == "from" and raw.get("role") is not None:
        raise _Bad(f"{name} has both 'from' and 'role'")
    if speaker not in raw:
        raise _Bad(f"{name} has no {speaker!r}", _turn_mapping(raw, name, speaker))
    given = _string(raw[speaker], f"{name}.{speaker}")
    role = rules.role_names.get(given)
    if role is None:
        reason = f"{name}.{speaker} is {quoted(given)}, not one of {', '.join(ROLE_NAMES)}"
        raise _Bad(reason, f"map the role: `data.roles: {{{given}: assistant}}`, or fix that line")
    content = raw.get(content_key)
    if given == "function_call" and role == "assistant":
        at = f"{name}.{content_key}"
        value = _decoded(_string(content, at), at)
        listed = [{"function": call} for call in (value if isinstance(value, list) else [value])]
        more = _more(raw, role, name, (speaker, content_key), unread, rules.objective)
        return Message("assistant", "", **{**more, "calls": _calls(listed, at, unread)})
    more = (
        _more(raw, role, name, (speaker, content_key), unread, rules.objective)
        if len(raw) > 2 or content is None
        else {}
    )
    if content is None and role == "assistant" and more.get("calls"):
        content = ""
    if content_key not in raw and content is None:
        raise _Bad(f"{name} has no {content_key!r}", _turn_mapping(raw, name, content_key))
    if len(raw) > 2:
        _refuse(raw, tuple(image_keys(raw)), name)
    pictures = list[Picture]()
    content = _content(content, f"{name}.{content_key}", unread, None if role == "assistant" else pictures)
    if not content.strip() and role not in MAY_BE_EMPTY and not more.get("calls"):
        raise _Bad(f"{name}.{content_key}: an empty {role} turn")
    return Message(role, content, images=tuple(pictures), **more)


def _turn_mapping(raw: dict[str, Any], name: str, lacking: str) -> str:
    """Return the fix for a turn without the key `lacking`: the `data.columns` line for a similar key."""
    names = (
        ("speaker", "author", "user", "type", "from") if lacking in ("role", "from") else ("text", "value", "message")
    )
    other = next((key for key in names if isinstance(raw.get(key), str)), None)
    if other is None:
        return MEND
    return f"`data.columns: {{'{_of_all(name)}.{other}': {lacking}}}`, or fix that line"


def _of_all(name: str) -> str:
    """Return the name for all turns of a list: `messages[]` for `messages[3]`."""
    return name[: name.index("[")] + "[]"


def _more(
    raw: dict[str, Any], role: str, name: str, named: tuple[str, str], unread: set[str], objective: str
) -> dict[str, Any]:
    """Return a turn's other Message arguments; `named`: the keys already read; add unread keys to `unread`."""
    _refuse(raw, TURN_NOT_UNDERSTOOD, name)
    if role != "assistant":
        _refuse(raw, ("tool_calls", *REASONING), f"{name}, of the role {role!r},")
    if role != "tool":
        _refuse(raw, ("tool_call_id",), f"{name}, of the role {role!r},")
    thoughts = {_string(raw[key], f"{name}.{key}") for key in REASONING if raw.get(key)}
    if len(thoughts) > 1:
        raise _Bad(f"{name} has several of {', '.join(REASONING)}, which differ")
    for key in raw.keys() - named - READ_OF_TURN:
        value, lower = raw[key], key.lower()
        if value is None or key in LEARNT:
            continue
        strange = lower in THOUGHTS or lower in BEFORE
        if strange:
            strange = not _is_in(value, _content(_given(raw, named[1], ""), f"{name}.{named[1]}", unread))
        if strange or (CONTROL.search(lower) and _may_be_mask(value)):
            reason = f"{name} has {quoted(key)}: unsupported key; it would change the loss mask"
            raise _Bad(reason, f"fix that line, or ignore the key: `data.columns: {{'{_of_all(name)}.{key}': ignore}}`")
        if value not in ("", [], {}):
            unread.add(f"{_of_all(name)}.{key}")
    return {
        **({"reasoning": thoughts.pop(), "thoughts": next(filter(raw.get, REASONING))} if thoughts else {}),
        "calls": _calls(_given(raw, "tool_calls", []), f"{name}.tool_calls", unread),
        "name": _string(_given(raw, "name", ""), f"{name}.name") or None,
        "call_id": _string(_given(raw, "tool_call_id", ""), f"{name}.tool_call_id") or None,
        "weight": _weight(raw, role, name, objective),
    }


def _weight(raw: dict[str, Any], role: str, name: str, objective: str) -> float:
    """Return a turn's weight in the loss: a number of at least 0 for keys in WEIGHTS, 0 or 1 for others in LEARNT."""
    given = {key: raw[key] for key in LEARNT if raw.get(key) is not None}
    for key, value in given.items():
        wrong = not isinstance(value, bool | int | float) or (value not in (0, 1) and key not in WEIGHTS)
        if wrong or (key in ("weight", "train") and isinstance(value, bool) != (key == "train")):
            wanted = "neither false nor true" if key == "train" else "neither 0 nor 1"
            raise _Bad(f"{name}.{key} is {'not a number of 0 or more' if key in WEIGHTS else wanted}")
        if value and not LIGHTEST <= value <= HEAVIEST:
            raise _Bad(f"{name}.{key} is {value}, not 0 or a number from {LIGHTEST} to {HEAVIEST:,}")
        if value not in (0, 1) and objective not in ("", "sft"):
            raise _Bad(f"{name}.{key} is {value}: only `objective: sft` has weights", "write 0 or 1")
        if value and role != "assistant":
            raise _Bad(f"{name}.{key}: a {role} turn is never a target")
    if len(set(given.values())) > 1:
        raise _Bad(f"{name}: {' and '.join(given)} contradict each other")
    return float(next(iter(given.values()), 1))


def _calls(value: Any, name: str, unread: set[str]) -> tuple[dict[str, Any], ...]:
    """Return tool calls as {"type": "function", "id" if any, "function": {"name", "arguments" as an object}}."""
    _list(value, name)
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(value):
        at = f"{name}[{i}]"
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or call.get("type", "function") not in ("function", None):
            raise _Bad(f"{at} is not a function call: {{'type': 'function', 'function': {{'name', 'arguments'}}}}")
        if inner.get("arguments") is None and inner.get("parameters"):
            raise _Bad(f"{at} has 'parameters' instead of 'arguments'")
        arguments = _given(inner, "arguments", {})
        if isinstance(arguments, str):  # some clients write an empty text for a call without parameters
            arguments = _decoded(arguments, f"{at}.arguments") if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise _Bad(f"{at}.arguments is {kind_of(arguments)}, not an object")
        number = {"id": _string(call["id"], f"{at}.id")} if call.get("id") else {}
        function = {"name": _full(inner.get("name"), f"{at}.name"), "arguments": arguments}
        calls.append({"type": "function", **number, "function": function})
        for keys, known in ((call, ("function", "type", "id", "index")), (inner, ("name", "arguments", "strict"))):
            left = [key for key in keys if key not in known and keys[key] not in (None, "", [], {})]
            unread.update(f"{_of_all(name)}.tool_calls[].{key}" for key in left)
    return tuple(calls)


def _content(raw: Any, name: str, unread: set[str], pictures: list[Picture] | None = None) -> str:
    """Return the text of a turn, with MARK for each image; images are added to `pictures`. None: images are invalid."""
    if not isinstance(raw, list):
        return _string(raw, name)
    texts = list[str]()
    for i, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and (pictures is None or kind not in IMAGE_PARTS):
            shown = quoted(str(kind)) if isinstance(part, dict) else kind_of(part)
            raise _Bad(f"{name}[{i}] is {shown}, not a part of type 'text'")
        if kind == "text" and len(part) > 2:
            _refuse(part, tuple(image_keys(part)), f"{name}[{i}]")
        for key in part.keys() - {"type", *(("text",) if kind == "text" else SOURCES)}:
            if CONTROL.search(key.lower()) and _may_be_mask(part[key]):
                raise _Bad(f"{name}[{i}] has {quoted(key)}: parts of a turn have no loss mask of their own")
            if part[key] not in (None, "", [], {}):
                unread.add(f"{_of_all(name)}.content[].{key}")
        if kind == "text":
            texts.append(_string(part.get("text"), f"{name}[{i}].text"))
            continue
        given = {key: part[key] for key in SOURCES if part.get(key) is not None}
        inner = {key for value in given.values() if isinstance(value, dict) for key in value if key not in SOURCES}
        unread.update(f"{_of_all(name)}.content[].{kind}.{key}" for key in inner)
        assert pictures is not None
        try:
            pictures.append(as_picture(given))
        except ValueError as error:
            raise _Bad(f"{name}[{i}]: the image {error}") from None
        texts.append(MARK)
    if pictures and sum(text.count(MARK) for text in texts) != len(pictures):
        raise _Bad(f"{name} has the character U+{ord(MARK):04X}, which marks the places of images", "remove it")
    return "".join(texts)


def _refuse(raw: dict[str, Any], keys: tuple[str, ...], name: str, do: str = "") -> None:
    for key in keys:
        if raw.get(key):  # null, empty, false: counts as no key
            raise _Bad(f"{name} has {key!r}, which is not supported", do)


def _decoded(text: str, name: str) -> Any:
    try:
        return decode_json(text.encode())
    except ValueError as error:
        raise _Bad(f"{name}: {error}") from None


def _full(value: Any, name: str) -> str:
    if not _string(value, name).strip():
        raise _Bad(f"{name} is empty")
    return cast(str, value)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _Bad(f"{name} is {kind_of(value)}, not a string")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Bad(f"{name} is {kind_of(value)}, not a list")
    return value


def _given(raw: dict[str, Any], key: str, absent: Any) -> Any:
    """Return an optional value; null counts as absent, 0 and false do not."""
    value = raw.get(key)
    return absent if value is None else value


# --- A tokenized document. No torch here: processes that only make documents do not import it.


@dataclass(frozen=True)
class Document:
    """Token ids and a mask of targets; `targets[0]` is always False, because the first token has no context."""

    ids: np.ndarray  # (n,) int32
    targets: np.ndarray  # (n,) bool
    desirable: bool = True  # False: an answer labelled bad
    weights: np.ndarray | None = None  # (n,) float32, of each target in the loss; None: all 1
    images: tuple[SeenImage, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)
