"""The tokenizer of a run: the model's own, with special tokens added and its chat template or the one given."""

from __future__ import annotations

import datetime
from contextlib import suppress
from pathlib import Path
from typing import Any

from optrush.config import Run
from optrush.data.chat import Tokens
from optrush.data.rows import Chat, Message, Where
from optrush.errors import ConfigError, DataError, NeedsError

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AROUND = ("{}", "a{}b", "a {} b\n")  # texts in which an added token must come out as it went in


def open_tokens(run: Run, folder: Path | None, today: datetime.date | None = None) -> Tokens | None:
    """The model's tokenizer, as the run changes it, with its chat template; None for a shape without one.

    Raises:
        ConfigError: no such template, or tokens that cannot be added.
        NeedsError: no tokenizer there.
    """
    if run.model.tokenizer is not None:
        folder = Path(run.model.tokenizer)
    if folder is None:
        return None
    if run.data.random is not None and not (folder / "tokenizer.json").exists():
        return None  # random tokens need none
    tokenizer = open_tokenizer(folder)
    add_tokens(tokenizer, run.model.add_tokens)
    given = None if run.model.chat_template is None else _template(run.model.chat_template, tokenizer)
    if given is not None:
        tokenizer.chat_template = given
    return Tokens(tokenizer, given, today)


def open_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder.

    Raises:
        NeedsError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        asked = f"the tokenizer of {folder}"
        raise NeedsError(asked, str(error).splitlines()[0], "put its tokenizer.json there") from None


def add_tokens(tokenizer: Any, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Gives a tokenizer special tokens; those that it did not have, in the order of their ids.

    One that it had and that was not special is from now on, under its id.

    Raises:
        ConfigError: one that is a word of its vocabulary, or that it does not read back as one token.
    """
    from tokenizers import AddedToken

    vocabulary, added = tokenizer.get_vocab(), {str(t): t for t in tokenizer.added_tokens_decoder.values()}
    for token in tokens:
        if token != token.strip():
            raise ConfigError(_asked(token), "white space at its ends, which templates cut off", "leave it out")
        if token in vocabulary and token not in added:
            found = "a word of this tokenizer's vocabulary: every text that has it would be read otherwise"
            raise ConfigError(_asked(token), found, "take one that no text has, such as <|im_start|>")
    fresh = tuple(token for token in tokens if token not in vocabulary)
    given = [AddedToken(t, special=True, normalized=False) for t in fresh]
    for old in (added[t] for t in tokens if t in added and not added[t].special):
        ways = {way: getattr(old, way) for way in ("single_word", "lstrip", "rstrip", "normalized")}
        given.append(AddedToken(str(old), special=True, **ways))
    tokenizer.add_tokens(given, special_tokens=True)
    for token in tokens:
        own = tokenizer.convert_tokens_to_ids(token)
        for around in AROUND:
            ids = tokenizer.encode(around.format(token), add_special_tokens=False)
            if ids.count(own) != 1 or tokenizer.decode([own]) != token:
                found = f"the tokenizer reads {around.format(token)!r} as {tokenizer.convert_ids_to_tokens(ids)}"
                do = "take another, or a tokenizer that keeps special tokens whole (split_special_tokens: false)"
                raise ConfigError(_asked(token), found, do)
    return fresh


def turn_ends(tokenizer: Any) -> list[int]:
    """The ids with which an answer ends under the tokenizer's template; none where that cannot be told."""
    chat = Chat((Message("user", "a"), Message("assistant", "b")))
    with suppress(DataError):
        (span,) = Tokens(tokenizer).masker(chat, [1], Where(Path("the template"), 0)).spans()
        return [int(tokenizer.convert_tokens_to_ids(stop)) for stop in span.stops[:1]]
    return []


def _asked(token: str) -> str:
    return f"`model.add_tokens`: {token!r}"


def _template(given: str, tokenizer: Any) -> str:
    """The source of the template that a run names: a file's, or ChatML where no such file is."""
    path = Path(given)
    asked = f"`model.chat_template: {path}`"
    if not path.is_file():
        if given == "chatml":
            return _chatml(tokenizer)
        raise ConfigError(asked, "no such file", "name a file with a jinja template, or chatml")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(asked, f"not UTF-8: {error.reason}", "save it as UTF-8") from None


def _chatml(tokenizer: Any) -> str:
    """ChatML, with the begin-of-text token before it where the tokenizer writes one before every text.

    Raises:
        ConfigError: the tokenizer has not the two tokens.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if lacking := [token for token in (START, END) if token not in added]:
        found = f"the tokenizer has no special token {' and no '.join(lacking)}"
        do = f'give it them: add_tokens: ["{START}", "{END}"] under model'
        raise ConfigError("`model.chat_template: chatml`", found, do)
    bos = tokenizer.bos_token_id
    return "{{ bos_token }}" + CHATML if bos is not None and tokenizer.encode("a")[:1] == [bos] else CHATML
