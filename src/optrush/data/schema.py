"""Parse rows: the shapes of training data that are recognized by their keys; everything else is refused.

A row that is half understood trains the model on data that its author did not write. Here a row is exactly one of the
known kinds, and a key that would change its meaning and is not understood is an error with the row's place.
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
# Other names of roles: ShareGPT's, and those of single model families.
ROLE_NAMES = {
    **{role: role for role in ROLES}, "human": "user", "gpt": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
MAY_BE_EMPTY = ("system", "developer", "tool")  # an empty prompt or result has a meaning; another empty turn has none
REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys that change the model's input or its targets; dropping them would change the row.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
TURN_NOT_UNDERSTOOD = (*MEDIA, "function_call", "refusal", "prefix", "train_detail")
ROW_NOT_UNDERSTOOD = (*MEDIA, "history", "functions", "function_call", "chat_template_kwargs")
# They determine a row's kind; `chosen` and `rejected` are one kind. With each, the keys of a row of that kind.
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

# --- Keys of other tools. One that such a tool reads, and that changes what is learnt, is obeyed or refused; any other
# key that is not read is counted, and the run names it.

# How much a turn is learnt: 0 or false, 1 or true.
LEARNT = ("weight", "train", "loss", "loss_weight", "loss_mask", "loss_scale", "training", "trainable")
WEIGHTS = ("weight", "loss_weight", "loss_scale")  # of them, those that may be any number
LIGHTEST, HEAVIEST = 0.001, 1_000_000
# Words of a key that may tell a tool what to learn: `turn_mask`, `ignore_loss`.
CONTROL = re.compile(
    r"(?:^|_)(?:loss|masks?|masked|weights?|train|training|trainable|learn|learnt|learned|learnable|supervised?|ignored?"
    r"|excluded?|skip)(?:_|$)"
)
THOUGHTS = (
    *REASONING, "reasoning_details", "reasoning_text", "thinking_blocks", "thought", "thoughts", "think", "cot",
    "chain_of_thought", "complex_cot", "rationale", "analysis",
)  # fmt: skip
JUDGEMENT = frozenset({"label", "kto_tag", "kto_label", "desirable", "is_desirable", "is_good", "thumbs_up"})
# What precedes an answer: the key that each would be in a row with an instruction, and in others.
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
# All keys of a row that would change what is learnt, and what each says: dropping one is never silent.
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
    """How a run reads rows: its objective, and its names for keys (`data.columns`) and roles (`data.roles`)."""

    objective: str = ""
    columns: tuple[tuple[str, str], ...] = ()  # (a key, or `messages[].key` of turns; what it is, or `ignore`)
    roles: tuple[tuple[str, str], ...] = ()
    compares: str = ""  # of sampled answers: the reward that needs the row's own answer

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what the meaning of a row follows from."""
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
    """Return how a run reads rows."""
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
    """The place of a row; lines count from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Message:
    """One turn. `weight` is 0 if the row marks this assistant turn as context only."""

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    call_id: str | None = None
    weight: float = 1.0  # of its tokens in the loss
    thoughts: str = field(default="reasoning", compare=False)  # the row's key of `reasoning`
    images: tuple[Picture, ...] = ()  # at each MARK of the content

    @property
    def learnt(self) -> bool:
        """Whether it is not marked as context only."""
        return self.weight > 0

    @property
    def plain(self) -> bool:
        """Whether the turn is nothing but its content."""
        return not (self.reasoning or self.calls or self.name or self.call_id or self.images)

    def shown(self) -> dict[str, Any]:
        """Return the turn as a chat template gets it: absent parts are absent keys."""
        if self.plain:
            return {"role": self.role, "content": self.content}
        more = {  # each template has its own name for reasoning
            **dict.fromkeys(REASONING, self.reasoning), "tool_calls": list(self.calls), "name": self.name,
            "tool_call_id": self.call_id,
        }  # fmt: skip
        return {"role": self.role, "content": self.content} | {key: value for key, value in more.items() if value}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Chat:
    """A conversation; the first `prompt` messages are never learnt."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt: int = 0

    @property
    def images(self) -> tuple[Picture, ...]:
        """The images of all turns, in their order."""
        return tuple([one for message in self.messages for one in message.images])


@dataclass(frozen=True)
class Completion:
    """Two plain strings that follow one another unchanged; the second is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Pair:
    chosen: Chat | Completion
    rejected: Chat | Completion


@dataclass(frozen=True)
class Judged:
    """Answers with whether each is a good one: of a row with a label one, of a pair both."""

    answers: tuple[Chat | Completion, ...]
    labels: tuple[bool, ...]


Row = Text | Chat | Completion | Pair | Judged


def parts_of(row: Row) -> tuple[Text | Chat | Completion, ...]:
    """Return the answers of a row, each with its prompt: of a pair two."""
    return row.answers if isinstance(row, Judged) else (row.chosen, row.rejected) if isinstance(row, Pair) else (row,)


def bad_row(where: RowLocation, reason: str, do: str = MEND) -> DataError:
    """Return the error of one row, with the same words for every reader and cleaner."""
    return DataError(f"a row of training data at {where}", reason, remedy(reason, do))


def row_text(row: Row) -> str:
    """Return the readable text of a row, a newline between turns; of a pair the common prompt once."""
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
    """Return a row's meaning: exactly one kind must be recognized by its keys.

    text; messages; conversations (ShareGPT); instruction, input, output (Alpaca); prompt, completion; chosen, rejected
    with or without prompt, which may be messages or conversations that end without an answer (LLaMA-Factory). Of
    several kinds the objective takes one: pretrain the text, any other the structured one, if what is left out has
    nothing of its own. A null counts as no key, except `system` beside texts: it makes turns of them, and the rows of
    one table are of one kind.

    Args:
        noted: gets the names of keys that are not read, turns' as `messages[].id`, and `key -> name` of those that
            `data.columns` names.

    Raises DataError with the place: no kind or several, a wrong type, an empty turn, nothing to learn, or a key that
    would change the row's meaning and is not understood.
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
        if keys := found.keys() - READ[sign]:
            _refuse_foreign(found, keys, sign, row, unread)
        return row
    except _Bad as bad:
        raise bad_row(where, str(bad), bad.do or (sign and _hint(found, sign)) or MEND) from None


def has_answer(found: dict[str, Any], rules: RowRules) -> bool:
    """Return whether a row that was read has an answer of its own."""
    return not _stand_in(_named_columns(found, rules, set()), replace(rules, compares=""))


def _stand_in(found: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    """Return the key of an answer, with a word of the prompt in its place, if the row is a prompt alone; else nothing.

    The word has tokens wherever the prompt has. Raises _Bad: a reward compares with the answer.
    """
    filled = dict[str, Any]()
    if key := next((key for key in ("messages", "conversations") if found.get(key) is not None), ""):
        turns = _turn_list(found[key], key)
        last = turns[-1] if turns and isinstance(turns, list) else None
        role = str(last.get("from") or last.get("role")) if isinstance(last, dict) else ""
        if rules.role_names.get(role) not in (None, "assistant"):
            filled = {key: [*turns, _word_turn(turns)]}
    elif found.get("instruction") is not None:
        filled = {"output": _word(found["instruction"])} if found.get("output") is None else {}
    elif found.get("prompt") is not None and all(found.get(key) is None for key in SIGNS):
        turns = _turn_list(found["prompt"], "prompt", sure=False)
        plain = isinstance(turns, str)  # which its answer follows unchanged
        space = " " if plain and not turns[-1:].isspace() else ""
        filled = {"completion": space + _word(turns) if plain else [_word_turn(turns)]}
    if filled and rules.compares:
        to = next(iter(filled))
        answers = [key for key in found if key.lower() in ANSWERING and key != to and found[key] is not None]
        ways = [f"`data.columns: {{{answers[0]}: {to}}}`"] if answers and to in ("output", "completion") else []
        ways += ["add the answer", "use grpo.rewards without a reference: regex, length, a function"]
        raise _Bad(f"a prompt without the answer that the reward `{rules.compares}` needs", "; or ".join(ways))
    return filled


def _word(text: object) -> str:
    found = re.search(r"\w{1,32}", text) if isinstance(text, str) else None
    return found[0] if found else "-"


def _word_turn(turns: Any) -> dict[str, str]:
    last = turns[-1] if isinstance(turns, list) and turns else turns
    text = (last.get("content") or last.get("value")) if isinstance(last, dict) else None
    return {"role": "assistant", "content": _word(text)}


def _label(found: dict[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Return the row without the judgement of its answer, and that."""
    given = {key: found[key] for key in found if key.lower() in JUDGEMENT and found[key] is not None}
    labels = {key: _flag(value) for key, value in given.items()}
    for key, label in labels.items():
        if label is None:
            raise _Bad(f"{key} is neither true nor false: {quoted(str(given[key]))}")
    if len({*labels.values()}) > 1:
        raise _Bad(f"{' and '.join(labels)} contradict each other")
    rest = {key: value for key, value in found.items() if key.lower() not in JUDGEMENT}
    return rest, next(iter(labels.values()), None)


def _judgement(row: Row, label: bool | None) -> Judged:
    if isinstance(row, Pair):
        if label is not None:
            raise _Bad("the row has 'chosen' and 'rejected' and a label; keep one")
        return Judged((row.chosen, row.rejected), (True, False))
    if not isinstance(row, Chat | Completion):
        raise _Bad("a text, without an answer to judge")
    if label is None:
        raise _Bad("no 'label' (true or false) for the answer")
    return Judged((row,), (label,))


def _named_columns(found: dict[str, Any], rules: RowRules, noted: set[str]) -> dict[str, Any]:
    """Return the row under the names of `data.columns`."""
    result = _renamed(found, rules.of_rows, "", noted)
    for name, turns in list(result.items()) if rules.of_turns else ():
        names = {k.partition("[].")[2]: to for k, to in rules.of_turns.items() if k.startswith(f"{name}[].")}
        if names and isinstance(turns, dict):
            result[name] = _renamed(turns, names, f"{name}[].", noted)
        elif names and isinstance(turns := _turn_list(turns, name), list):
            result[name] = [_renamed(t, names, f"{name}[].", noted) if isinstance(t, dict) else t for t in turns]
    return result


def _renamed(found: dict[str, Any], names: dict[str, str], place: str, noted: set[str]) -> dict[str, Any]:
    result = {key: value for key, value in found.items() if key not in names}
    for key, name in names.items():
        if found.get(key) is None:
            if key in found and name != IGNORE:
                result.setdefault(name, None)
            continue
        noted.add(f"{place}{key} -> {name}")
        if name != IGNORE:
            if result.get(name) is not None:
                raise _Bad(f"{quoted(place + key)} is {quoted(name)} by data.columns, but the row has that key, too")
            result[name] = found[key]
    return result


def _sign(found: dict[str, Any], objective: str) -> str:
    """Return the kind of a row."""
    signs = [key for key in SIGNS if found.get(key) is not None] or [key for key in SIGNS if key in found]
    if len(signs) == 1:
        return "chosen" if signs[0] == "rejected" else signs[0]
    if not signs:
        keys = ", ".join(quoted(key) for key in list(found)[:8]) or "no keys"
        raise _Bad(f"no known format: the row has {keys}", _mapping(found))
    kinds = [sign for sign in signs if sign != "rejected" or "chosen" not in signs]
    if objective and "text" in kinds:
        kinds = ["text"] if objective == "pretrain" else [kind for kind in kinds if kind != "text"]
    if objective and len(kinds) == 2 and kinds[1] == "chosen" and found[kinds[0]] == found["chosen"]:
        kinds = kinds[1:] if objective in PAIRED else kinds[:1]  # the conversation is the chosen one
    if len(kinds) > 1:
        reason = f"both {quoted(signs[0])} and {quoted(signs[-1])}: ambiguous"
        line = f"ignore one: `data.columns: {{{signs[-1]}: ignore}}`"
        if kinds[1] in ("chosen", "rejected") and objective in COMPARED:
            chosen = found.get("chosen")
            whole = isinstance(chosen, list) and len(chosen) > 1  # with the prompt in it
            line = f"ignore one: `data.columns: {{{signs[0]}: ignore}}`"
            line = line if whole else f"is {quoted(signs[0])} the prompt? `data.columns: {{{signs[0]}: prompt}}`"
        raise _Bad(reason, f"{line}, or fix that line")
    return "chosen" if kinds[0] == "rejected" else kinds[0]


def _prompted(found: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    """Return the row with its conversation as `prompt`, where that has no answer and two answers are next to it.

    An `instruction` before two texts is a user's turn: `system`, even none, makes turns of texts.
    """
    asks = rules.objective in COMPARED and found.get("instruction") is not None and isinstance(found.get("chosen"), str)
    if asks and found.get("output") is None and found.get("prompt") is None:
        turns = {"prompt": _question(found), "system": found.get("system")}
        return {key: value for key, value in found.items() if key not in ("instruction", "input")} | turns
    key = next((key for key in ("messages", "conversations") if found.get(key) is not None), None)
    answers = [found.get("chosen"), found.get("rejected")]
    if key is None or found.get("prompt") is not None or not all(isinstance(one, dict | list) for one in answers):
        return found
    turns = _turn_list(found[key], key)
    last = turns[-1] if turns and isinstance(turns, list) else None
    role = str(last.get("from") or last.get("role")) if isinstance(last, dict) else ""
    if rules.role_names.get(role) in (None, "assistant"):
        return found
    return {**{name: value for name, value in found.items() if name != key}, "prompt": turns}


def _mapping(found: dict[str, Any]) -> str:
    """Return what to do with a row of an unknown kind: the line that names its keys."""
    keys = {key.lower(): key for key in found if found[key] is not None}
    ask, answer = (next((keys[k] for k in names if k in keys), None) for names in (ASKING, ANSWERING))
    if any(re.match("image|img|file_name|photo", k) for k in keys) and {"caption", "description", "answer"} & {*keys}:
        return "images with captions: file_name, question, caption in metadata.csv; then optrush init --data FOLDER"
    if ask is None or answer is None:
        kinds = "text; messages; instruction, output; prompt, completion; prompt, chosen, rejected"
        return f"{MEND}; or map its keys to a known format (data.columns: {{KEY: text}}): {kinds}"
    names = {ask: "instruction", answer: "output"}
    for key in found:
        to = "system" if BEFORE.get(key.lower()) == "system" else "input"
        if key.lower() in BEFORE and found[key] is not None and to not in names.values():
            names.setdefault(key, to)
    changed = ", ".join(f"{key}: {name}" for key, name in names.items() if key != name)
    return f"map them as question and answer: `data.columns: {{{changed}}}`; or as another format (docs/data.md)"


def _row(found: dict[str, Any], sign: str, rules: RowRules, unread: set[str]) -> Row:
    _refuse(found, MEDIA if sign == "text" else ROW_NOT_UNDERSTOOD, "the row")
    if sign == "text":
        return Text(_full(found["text"], "text"))
    if sign in ("messages", "conversations"):
        return _chat(_with_system(found, _turns(found[sign], sign, rules, unread), sign), _tools(found))
    if sign == "instruction":
        return _alpaca(found)
    # One turn may be an object alone, as in LLaMA-Factory's preferences.
    found = {k: [v] if k in ANSWERED and isinstance(v, dict) and _is_turn(v) else v for k, v in found.items()}
    if sign == "completion":
        if found.get("prompt") is None and not isinstance(found.get("label"), bool):
            raise _Bad("'completion' without 'prompt'", _mapping(found))
        return _answer(found, "completion", rules, unread)
    return _pair(found, rules, unread)


def _refuse_foreign(found: dict[str, Any], keys: set[str], sign: str, row: Row, unread: set[str]) -> None:
    """Note the keys that a row's kind does not read; raises _Bad for one of FOREIGN, unless it changes nothing."""
    for key in sorted(keys, key=lambda key: (key.lower() not in ASKING, key)):
        value, says = found[key], FOREIGN.get(key.lower())
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
            ways += [f"`data.columns: {{{key}: {to}}}`"] if to and to != key and found.get(to) is None else []
        if not harmless:
            raise _Bad(f"the row has {quoted(key)}{reason}", ", or ".join([*ways, ignored]))
        unread.add(key)


def _column(name: str, sign: str) -> str | None:
    """Return the key that one of BEFORE would be in a row of a kind, if any."""
    to = BEFORE.get(name)
    if sign == "instruction" and to == "prompt":
        to = "input"
    return to if to in READ[sign] else "prompt" if to == "input" and "prompt" in READ[sign] else None


def _hint(found: dict[str, Any], sign: str) -> str:
    """Return the line that names a key of the row which another tool takes for the prompt, if there is one."""
    for key in sorted(found, key=lambda key: key.lower() not in ASKING):
        to = None if key in READ[sign] else _column(key.lower(), sign)
        if to is not None and found[key] is not None and found.get(to) is None:
            return f"{MEND}; is {quoted(key)} its {to}? `data.columns: {{{key}: {to}}}`"
    if "system" in found and found.get("prompt") is None and isinstance(found.get("chosen"), str):
        return f"{MEND}; or read only its texts: `data.columns: {{system: ignore}}`"
    return ""


def _is_in(value: Any, text: str) -> bool:
    """Return whether a text holds all texts of a value."""
    return all(inner.strip() in text for inner in _inner_texts(value) if inner not in ROLE_NAMES)


def _inner_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inner_texts(inner)


def _flag(value: Any) -> bool | None:
    """Return the boolean that a value is: true, 1, or the texts of them, which CSV has; None if it is none."""
    if isinstance(value, str):
        return {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}.get(value.lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _may_be_mask(value: Any) -> bool:
    """Return whether a value could say what is learnt: a boolean or a number, or several and nothing else."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return any(one is not None for one in inner) and all(one is None or _may_be_mask(one) for one in inner)
    return isinstance(value, bool | int | float) or _flag(value) is not None


def _question(found: dict[str, Any]) -> str:
    """Return the instruction of a row, and its input after an empty line."""
    ask, given = _full(found["instruction"], "instruction"), _string(_given(found, "input", ""), "input")
    return f"{ask}\n\n{given}" if given.strip() else ask


IMAGES_IN = ("messages", "conversations", "prompt", "completion")
TURNS_OF_IMAGES = "write turns (messages, or prompt and completion as lists), for objective: sft"


def _with_images(found: dict[str, Any], sign: str, unread: set[str]) -> tuple[dict[str, Any], str]:
    """Return a row with its `images` as parts of its turns, and its kind: an instruction becomes turns."""
    named = image_keys(found, unread)
    if named and sign not in (*IMAGES_IN, "instruction"):
        _refuse(found, tuple(named), "the row", TURNS_OF_IMAGES)
    if not named:
        return found, sign
    if sign == "instruction" and found.get("output") is not None:
        asked = {"role": "user", "content": _question(found)}
        rest = {key: value for key, value in found.items() if key not in ("instruction", "input", "output")}
        found, sign = {**rest, "messages": [asked, {"role": "assistant", "content": found["output"]}]}, "messages"
    found = {key: _turn_list(found[key], key, sure=key == sign) if key in IMAGES_IN else found[key] for key in found}
    try:
        return place_images(found, named, IMAGES_IN), sign
    except ValueError as error:
        texts = any(isinstance(found.get(key), str) for key in IMAGES_IN)
        raise _Bad(f"the row has {error}", TURNS_OF_IMAGES if texts else "") from None


def _alpaca(found: dict[str, Any]) -> Chat:
    _refuse(found, ("tools",), "the row")
    ask = _question(found)
    if found.get("output") is None:
        raise _Bad("'instruction' without 'output'", _mapping(found))
    turns = (Message("user", ask), Message("assistant", _full(found["output"], "output")))
    return _chat(_with_system(found, turns, "instruction"))


def _pair(found: dict[str, Any], rules: RowRules, unread: set[str]) -> Pair:
    for key, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if found.get(key) is None:
            raise _Bad(f"{quoted(other)} without {quoted(key)}")
    answers = {key: _turn_list(found[key], key, sure=False) for key in ("chosen", "rejected")}
    if all(isinstance(answer, list) for answer in answers.values()):  # else both are texts
        found = {**found, **answers}
    if found["chosen"] == found["rejected"]:
        raise _Bad("chosen and rejected are the same")
    chosen, rejected = (_answer(found, key, rules, unread) for key in ("chosen", "rejected"))
    if isinstance(chosen, Completion) != isinstance(rejected, Completion):
        raise _Bad(f"chosen is {kind_of(found['chosen'])}, rejected is {kind_of(found['rejected'])}")
    if isinstance(chosen, Completion) and isinstance(rejected, Completion) and found.get("prompt") is None:
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
        if found.get("prompt") is None:
            chosen, rejected = _after(chosen, alike, "chosen"), _after(rejected, alike, "rejected")
    return Pair(chosen, rejected)


def _answer(found: dict[str, Any], key: str, rules: RowRules, unread: set[str]) -> Chat | Completion:
    """Return the prompt with one of its answers; a conversation that begins with the prompt has it once."""
    prompt, answer = found.get("prompt"), found[key]
    turns: tuple[Message, ...]
    if not isinstance(answer, str):
        prompt, turns = _turn_list(prompt, "prompt", sure=False), _turns(answer, key, rules, unread)
    elif "system" not in found:
        _refuse(found, ("tools",), "the row")
        return Completion("" if prompt is None else _full(prompt, "prompt"), _full(answer, key))
    elif prompt is None:
        raise _Bad("a row of texts has 'system' without 'prompt': a system turn comes before a user's")
    else:  # the texts are turns
        prompt, turns = _full(prompt, "prompt"), (Message("assistant", _full(answer, key)),)
    if prompt is None:
        return Chat(_with_system(found, turns, key), _tools(found))
    n, before = 0, _turns(prompt, "prompt", rules, unread) if isinstance(prompt, list) else ()
    if not isinstance(prompt, list):  # a system turn comes before it
        before = (Message("user", _full(prompt, "prompt")),)
        n = next((i for i, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns))
    before, turns = turns[:n] + before, turns[n:]
    if turns[: len(before) - n] == before[n:]:
        turns = turns[len(before) - n :]
    before = _with_system(found, before, "prompt")
    return _after(Chat(before + turns, _tools(found)), len(before), key)


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


def _with_system(found: dict[str, Any], turns: tuple[Message, ...], name: str) -> tuple[Message, ...]:
    """Return a row's turns after its `system`, if it has one."""
    system = _string(_given(found, "system", ""), "system")
    if system and turns[0].role == "system":
        raise _Bad(f"both 'system' and a system turn in {name}: ambiguous")
    return (Message("system", system), *turns) if system else turns


def _tools(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = _given(found, "tools", [])
    if isinstance(tools, str):
        tools = _decoded(tools, "tools")
    _list(tools, "tools")
    for i, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise _Bad(f"tools[{i}] is not an object with a function name")
    return tuple(tools)


def _turn_list(found: Any, name: str, sure: bool = True) -> Any:
    """Return the turns that a text holds as JSON, as tables have them; any other value as it is.

    Args:
        sure: the value can be nothing but turns. Else it is a text, unless it is a list of turns alone.
    """
    if not isinstance(found, str) or not found.lstrip().startswith("["):
        return found
    try:
        turns = decode_json(found.encode())
    except ValueError as error:
        if sure or TURNS.match(found):
            raise _Bad(f"{name} looks like a list of turns as text, but is not JSON: {error}") from None
        return found
    return turns if sure or (turns and all(map(_is_turn, turns))) else found


def _is_turn(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    return {"from", "value"} <= found.keys() or ("role" in found and not found.keys().isdisjoint(SAID))


MOST_TURNS = 10_000
SAID = ("content", "tool_calls")
ANSWERED = ("prompt", "completion", "chosen", "rejected")
# The beginning of turns as text, also as Python prints them.
TURNS = re.compile(
    r"""(?s)\s*\[\s*\{\s*["'](?:role["'].*["']content|content["'].*["']role|from["'].*["']value|value["'].*["']from)["']\s*:"""
)


def _turns(found: Any, name: str, rules: RowRules, unread: set[str]) -> tuple[Message, ...]:
    if not _list(found := _turn_list(found, name), name):
        raise _Bad(f"{name} is an empty list")
    if len(found) > MOST_TURNS:
        raise _Bad(f"{name} has {len(found):,} turns; the limit is {MOST_TURNS:,}", "split it into several rows")
    return tuple([_turn(turn, f"{name}[{i}]", rules, unread) for i, turn in enumerate(found)])


def _turn(found: Any, name: str, rules: RowRules, unread: set[str]) -> Message:
    if not isinstance(found, dict):
        raise _Bad(f"{name} is {kind_of(found)}, not an object with role and content")
    said, content_key = ("from", "value") if found.get("from") is not None else ("role", "content")
    if said == "from" and found.get("role") is not None:
        raise _Bad(f"{name} has both 'from' and 'role'")
    if said not in found:
        raise _Bad(f"{name} has no {said!r}", _turn_mapping(found, name, said))
    given = _string(found[said], f"{name}.{said}")
    role = rules.role_names.get(given)
    if role is None:
        reason = f"{name}.{said} is {quoted(given)}, not one of {', '.join(ROLE_NAMES)}"
        raise _Bad(reason, f"map the role: `data.roles: {{{given}: assistant}}`, or fix that line")
    content = found.get(content_key)
    if given == "function_call" and role == "assistant":
        at = f"{name}.{content_key}"
        value = _decoded(_string(content, at), at)
        listed = [{"function": call} for call in (value if isinstance(value, list) else [value])]
        more = _more(found, role, name, (said, content_key), unread, rules.objective)
        return Message("assistant", "", **{**more, "calls": _calls(listed, at, unread)})
    more = (
        _more(found, role, name, (said, content_key), unread, rules.objective)
        if len(found) > 2 or content is None
        else {}
    )
    if content is None and role == "assistant" and more.get("calls"):
        content = ""
    if content_key not in found and content is None:
        raise _Bad(f"{name} has no {content_key!r}", _turn_mapping(found, name, content_key))
    if len(found) > 2:
        _refuse(found, tuple(image_keys(found)), name)
    pictures = list[Picture]()
    content = _content(content, f"{name}.{content_key}", unread, None if role == "assistant" else pictures)
    if not content.strip() and role not in MAY_BE_EMPTY and not more.get("calls"):
        raise _Bad(f"{name}.{content_key}: an empty {role} turn")
    return Message(role, content, images=tuple(pictures), **more)


def _turn_mapping(found: dict[str, Any], name: str, lacking: str) -> str:
    """Return what to do with a turn that lacks a key: the line that names another one."""
    names = (
        ("speaker", "author", "user", "type", "from") if lacking in ("role", "from") else ("text", "value", "message")
    )
    other = next((key for key in names if isinstance(found.get(key), str)), None)
    if other is None:
        return MEND
    return f"`data.columns: {{'{_of_all(name)}.{other}': {lacking}}}`, or fix that line"


def _of_all(name: str) -> str:
    """Return the name of all turns: `messages[3]` is one of `messages[]`."""
    return name[: name.index("[")] + "[]"


def _more(
    found: dict[str, Any], role: str, name: str, named: tuple[str, str], unread: set[str], objective: str
) -> dict[str, Any]:
    _refuse(found, TURN_NOT_UNDERSTOOD, name)
    if role != "assistant":
        _refuse(found, ("tool_calls", *REASONING), f"{name}, of the role {role!r},")
    if role != "tool":
        _refuse(found, ("tool_call_id",), f"{name}, of the role {role!r},")
    thoughts = {_string(found[key], f"{name}.{key}") for key in REASONING if found.get(key)}
    if len(thoughts) > 1:
        raise _Bad(f"{name} has several of {', '.join(REASONING)}, which differ")
    for key in found.keys() - named - READ_OF_TURN:
        value, lower = found[key], key.lower()
        if value is None or key in LEARNT:
            continue
        strange = lower in THOUGHTS or lower in BEFORE
        if strange:
            strange = not _is_in(value, _content(_given(found, named[1], ""), f"{name}.{named[1]}", unread))
        if strange or (CONTROL.search(lower) and _may_be_mask(value)):
            reason = f"{name} has {quoted(key)}: unsupported key; it would change the loss mask"
            raise _Bad(reason, f"fix that line, or ignore the key: `data.columns: {{'{_of_all(name)}.{key}': ignore}}`")
        if value not in ("", [], {}):
            unread.add(f"{_of_all(name)}.{key}")
    return {
        **({"reasoning": thoughts.pop(), "thoughts": next(filter(found.get, REASONING))} if thoughts else {}),
        "calls": _calls(_given(found, "tool_calls", []), f"{name}.tool_calls", unread),
        "name": _string(_given(found, "name", ""), f"{name}.name") or None,
        "call_id": _string(_given(found, "tool_call_id", ""), f"{name}.tool_call_id") or None,
        "weight": _weight(found, role, name, objective),
    }


def _weight(found: dict[str, Any], role: str, name: str, objective: str) -> float:
    """Return a turn's weight in the loss: one of WEIGHTS is a number of at least 0; of the others of LEARNT 0 or 1."""
    given = {key: found[key] for key in LEARNT if found.get(key) is not None}
    for key, value in given.items():
        wrong = not isinstance(value, bool | int | float) or (value not in (0, 1) and key not in WEIGHTS)
        if wrong or (key in ("weight", "train") and isinstance(value, bool) != (key == "train")):
            one = "neither false nor true" if key == "train" else "neither 0 nor 1"
            raise _Bad(f"{name}.{key} is {'not a number of 0 or more' if key in WEIGHTS else one}")
        if value and not LIGHTEST <= value <= HEAVIEST:
            raise _Bad(f"{name}.{key} is {value}, not 0 or a number from {LIGHTEST} to {HEAVIEST:,}")
        if value not in (0, 1) and objective not in ("", "sft"):
            raise _Bad(f"{name}.{key} is {value}: only `objective: sft` has weights", "write 0 or 1")
        if value and role != "assistant":
            raise _Bad(f"{name}.{key}: a {role} turn is never a target")
    if len(set(given.values())) > 1:
        raise _Bad(f"{name}: {' and '.join(given)} contradict each other")
    return float(next(iter(given.values()), 1))


def _calls(found: Any, name: str, unread: set[str]) -> tuple[dict[str, Any], ...]:
    """Return tool calls as {"type": "function", "id" if any, "function": {"name", "arguments" as an object}}."""
    _list(found, name)
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(found):
        at = f"{name}[{i}]"
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or call.get("type", "function") not in ("function", None):
            raise _Bad(f"{at} is not a function call: {{'type': 'function', 'function': {{'name', 'arguments'}}}}")
        if inner.get("arguments") is None and inner.get("parameters"):
            raise _Bad(f"{at} has 'parameters' instead of 'arguments'")
        arguments = _given(inner, "arguments", {})
        if isinstance(arguments, str):  # of a call without parameters clients write an empty text
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


def _content(found: Any, name: str, unread: set[str], pictures: list[Picture] | None = None) -> str:
    """Return the text of a turn, with MARK where an image is; `pictures` gets those, None: it may have none."""
    if not isinstance(found, list):
        return _string(found, name)
    texts = list[str]()
    for i, part in enumerate(found):
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


def _refuse(found: dict[str, Any], keys: tuple[str, ...], name: str, do: str = "") -> None:
    for key in keys:
        if found.get(key):  # null, empty, false: counts as no key
            raise _Bad(f"{name} has {key!r}, which is not supported", do)


def _decoded(found: str, name: str) -> Any:
    try:
        return decode_json(found.encode())
    except ValueError as error:
        raise _Bad(f"{name}: {error}") from None


def _full(found: Any, name: str) -> str:
    if not _string(found, name).strip():
        raise _Bad(f"{name} is empty")
    return cast(str, found)


def _string(found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise _Bad(f"{name} is {kind_of(found)}, not a string")
    return found


def _list(found: Any, name: str) -> list[Any]:
    if not isinstance(found, list):
        raise _Bad(f"{name} is {kind_of(found)}, not a list")
    return found


def _given(found: dict[str, Any], key: str, absent: Any) -> Any:
    """Return an optional value; null counts as absent, 0 and false do not."""
    value = found.get(key)
    return absent if value is None else value


# --- A tokenized document. Without torch, which a process that only makes documents does not load.


@dataclass(frozen=True)
class Document:
    """Token ids and which of them are learnt; `targets[0]` is always False: nothing predicts a first token."""

    ids: np.ndarray  # (n,) int32
    targets: np.ndarray  # (n,) bool
    desirable: bool = True  # False: an answer that was judged to be a bad one
    weights: np.ndarray | None = None  # (n,) float32, of each target in the loss; None: all 1
    images: tuple[SeenImage, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)
