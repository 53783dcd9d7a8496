"""Open the tokenizer of a run: the model's, or a configured one, with added special tokens and chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from optrush.config import Config
from optrush.console import transformers_silenced
from optrush.data import pool, readers
from optrush.data.images import ImageReader, obstacle
from optrush.data.mask import (
    TEMPLATE,
)
from optrush.data.schema import Chat, Message
from optrush.errors import ConfigError, DataError, NeedsError, UserError, reason
from optrush.files import check_model_files, parse_json, read_file, read_text
from optrush.models.config_json import read_config_json
from optrush.models.families import TowerSpec
from optrush.models.text_part import image_token, text_config, tower_spec
from optrush.technique import Part, Technique, library, parts_without_images
from optrush.tokenizer_files import (
    PATTERNS,
    PROCESSORS,
    READER_s,
    check_sizes,
    copy_tokenizer,
    tokenizer_files,
    try_reading,
)

if TYPE_CHECKING:
    from optrush.data.packing import RowLayout
from optrush.data.chat_template import Tokens, tokenizing

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ASKED = Message("user", "a"), Message("assistant", "b")
_CALLED = {"type": "function", "function": {"name": "f", "arguments": {"c": "d"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "e", "parameters": {"type": "object"}}}
PROBES = (  # conversations that reveal the tokens that end an answer
    Chat(_ASKED), Chat((Message("system", "c"), *_ASKED)),
    Chat((_ASKED[0], Message("assistant", "", calls=(_CALLED,))), tools=(_TOOL,)),
)  # fmt: skip
AROUND = ("{}", "a{}b", "a {} b\n")  # texts in which an added token must survive encoding and decoding


def open_tokens(config: Config, folder: Path | None, today: datetime.date | None = None) -> Tokens | None:
    """Return the tokenizer with the run's added tokens and chat template; None for a model shape without one.

    Raises:
        ConfigError: no such template, or tokens that cannot be added.
        NeedsError: the folder has no tokenizer.
    """
    base = folder
    if config.model.tokenizer is not None:
        folder = Path(config.model.tokenizer)
    if folder is None:
        return None
    if config.data.random is not None and not config.model.add_tokens and not (folder / "tokenizer.json").exists():
        return None  # random tokens need no tokenizer
    tokenizer = open_tokenizer(folder)
    if config.model.add_tokens:
        add_tokens(tokenizer, config.model.add_tokens)
        _refuse_moved(folder, tokenizer, config.model.add_tokens)
    given = None if config.model.chat_template is None else _template(config.model.chat_template, tokenizer)
    if given is not None:
        tokenizer.chat_template = given
    tokens = Tokens(tokenizer, given, today)
    tokens.images = image_reader(config, base, tokenizer)
    return tokens


def image_reader(config: Config, base: Path | None, tokenizer: Any) -> ImageReader | DataError:
    """Return the reader of the rows' images, or the error for rows with images."""
    known = base is not None and (base / "config.json").is_file()
    hf = read_config_json(base / "config.json") if base is not None and known else None
    if (error := obstacle(config, base, hf)) is not None:
        return error
    assert base is not None and hf is not None
    spec = tower_spec(hf)
    assert spec is not None
    marks, frame = list[int](), ("", "")
    asked, do = "to train on rows with images", "use the base model's tokenizer, or rows of text"
    rows = text_config(hf).get("vocab_size")
    for n, (name, token) in enumerate(_image_tokens(base, hf, spec, tokenizer)):
        if not isinstance(token, int) or token not in tokenizer.added_tokens_decoder:
            return DataError(asked, f"{name} {token!r} is not an added token of the tokenizer", do)
        if n == 0 and rows is not None and token >= rows:
            return DataError(asked, f"{name} {token}, but the embedding has {rows:,} rows", do)
        marks += [token] if n else []
    if spec.frame == "text":
        begin, place, end = tokenizer.convert_ids_to_tokens([marks[0], image_token(hf), marks[1]])
        frame = (begin, f"\n\n{begin}{place}{end}\n\n")
    d = config.data
    return ImageReader(base, hf, d.min_pixels, d.max_pixels, d.remote, tuple(marks), frame)


def _image_tokens(folder: Path, hf: Any, spec: TowerSpec, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and id of the image placeholder, then of the marks that are written around placeholders."""
    name = "image_token_id" if "image_token_id" in hf or "image_token_index" not in hf else "image_token_index"
    yield f"{name} of config.json:", image_token(hf)
    if spec.frame == "rows":
        path = folder / PROCESSORS[1]
        given = parse_json(read_text(path)) if path.is_file() else {}
        for part in ("break", "end"):
            written = str(given.get(f"image_{part}_token", f"[IMG_{part.upper()}]"))
            yield f"image_{part}_token {written!r}:", tokenizer.get_added_vocab().get(written)
    for part, usual in (("boi", 255999), ("eoi", 256000)) if spec.frame in ("ids", "text") else ():
        usual = 258882 if part == "eoi" and spec.frame == "ids" else usual
        yield f"{part}_token_id of config.json:", hf.get(f"{part}_token_id", hf.get(f"{part}_token_index", usual))


def settle_images(tokens: Tokens | None, techniques: Sequence[Technique], layout: RowLayout) -> ImageReader | None:
    """Return the image reader if the techniques and the layout support images; else rows with images become errors.

    Ranks may have different rows, and shards of the decoder; each has the full tower, which needs no collective.
    """
    if tokens is None or not isinstance(tokens.images, ImageReader):
        return None
    owners = {part: t.name for t in techniques for part in t.claims}
    parts, cuts = parts_without_images(owners), not (layout.uncut and layout.isolated)
    if not parts and not cuts:
        return tokens.images
    name = owners.get(parts[0] if parts else Part.BATCH_LAYOUT, "NAME")
    found = f"`{name}` owns {parts[0].value}" if parts else "a layout of rows that cuts documents"
    do = f"leave that technique out (--without {name}), or take rows of text"
    tokens.images = DataError("to train on rows with images", found, do)
    return None


def open_tokenizer(folder: Path) -> Any:
    """Return the transformers tokenizer of a folder.

    Raises:
        NeedsError: there is none, a package that reads it is missing, or its config.json is invalid.
    """
    asked = f"the tokenizer of {folder}"
    check_model_files(folder, ["config.json", *PATTERNS])
    _check_reading(folder, tuple(tuple(readers.file_state(folder / name)) for name in tokenizer_files(folder)))
    try:
        with transformers_silenced():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any class: it depends on the error in the files
        if (wrong := _config_error(folder)) is not None:
            raise NeedsError(f"{folder / 'config.json'}", reason(wrong), "fix that in config.json") from None
        pieces = [file.name for file in folder.glob("*.model") if read_file(file)[:1] == b"\n"]  # a protobuf message
        if pieces and not (folder / "tokenizer.json").is_file():
            missing = [name for name in ("sentencepiece", "protobuf") if library(name) is None]
            found = f"{pieces[0]} without tokenizer.json, which sentencepiece reads: "
            found += f"not installed: {', '.join(missing)}" if missing else reason(error)
            do = f"pip install {' '.join(missing)}" if missing else "download the model again"
            raise NeedsError(asked, found, f"{do}, or put the model's tokenizer.json there") from None
        raise NeedsError(asked, reason(error), "put its tokenizer.json there") from None
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


@cache
def _check_reading(folder: Path, marks: object) -> None:
    """Raise NeedsError for a tokenizer that takes too much memory or time; cached by folder and marks.

    Args:
        marks: numbers that change with the files.
    """
    asked, do = f"the tokenizer of {folder}", "download it again, or use another: model.tokenizer"

    def lost(_: Path, what: str) -> Exception:
        return NeedsError(asked, f"the process that read it (with limited memory and time) {what}", do)

    try:
        if check_sizes(folder):
            with pool.Pool[Path, str](
                pool.forked(lambda: try_reading, 1), [folder], lost, limit_s=2 * READER_s
            ) as reader:
                if found := next(reader):
                    raise NeedsError(asked, found, do)
    except (json.JSONDecodeError, UnicodeDecodeError):  # opening it raises the same error
        pass
    except ValueError as error:
        raise NeedsError(asked, f"{error}", do) from None


def _config_error(folder: Path) -> Exception | None:
    """Return the error of reading config.json, which transformers reads before a tokenizer; None if it is valid."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return None
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # model families raise errors of many classes
        return error
    return None


def add_tokens(tokenizer: Any, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Add special tokens to a tokenizer; return the new ones in the order of their ids.

    An added token that was not special becomes special and keeps its id. Raises ConfigError for a token that is a word
    of the vocabulary, or that does not encode to one token and decode to itself.
    """
    from tokenizers import AddedToken

    vocabulary, added = tokenizer.get_vocab(), {str(t): t for t in tokenizer.added_tokens_decoder.values()}
    for token in tokens:
        asked = f"`model.add_tokens`: {token!r}"
        if token != token.strip():
            raise ConfigError(asked, "leading or trailing white space, which templates strip", "remove it")
        if token in vocabulary and token not in added:
            found = "a word of this tokenizer's vocabulary: texts that contain it would tokenize differently"
            raise ConfigError(asked, found, "use a string that no text contains, such as <|im_start|>")
    fresh = tuple(token for token in tokens if token not in vocabulary)
    given = [AddedToken(t, special=True, normalized=False) for t in fresh]
    for old in (added[t] for t in tokens if t in added and not added[t].special):
        ways = {way: getattr(old, way) for way in ("single_word", "lstrip", "rstrip", "normalized")}
        given.append(AddedToken(str(old), special=True, **ways))
    tokenizer.add_tokens(given, special_tokens=True)
    for token in tokens:
        id_ = tokenizer.convert_tokens_to_ids(token)
        for around in AROUND:
            with tokenizing(around.format(token)):
                ids = tokenizer.encode(around.format(token), add_special_tokens=False)
            if ids.count(id_) != 1 or tokenizer.decode([id_]) != token:
                found = f"the tokenizer reads {around.format(token)!r} as {tokenizer.convert_ids_to_tokens(ids)}"
                do = "use another, or a tokenizer that keeps special tokens whole (split_special_tokens: false)"
                raise ConfigError(f"`model.add_tokens`: {token!r}", found, do)
    return fresh


def _refuse_moved(folder: Path, tokenizer: Any, tokens: tuple[str, ...]) -> None:
    """Raise NeedsError if an added token's id changes when the tokenizer is saved and loaded."""
    with TemporaryDirectory() as made:
        copy_tokenizer(folder, Path(made), tokenizer, tokens)
        again = open_tokenizer(Path(made))
    for token in tokens:
        before, after = tokenizer.convert_tokens_to_ids(token), again.convert_tokens_to_ids(token)
        if before != after:
            found = f"its id is {before} in training but {after} in the exported tokenizer"
            raise NeedsError(f"`model.add_tokens`: {token!r}", found, "save the tokenizer with transformers 5 first")


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the ids that end an answer or a tool call in the tokenizer's template; empty if unknown."""
    ends: list[int] = []
    with suppress(UserError):
        tokens = Tokens(tokenizer)
        for chat in PROBES:
            with suppress(DataError):  # a template may reject a system turn, or require one; many have no tool calls
                (span,) = tokens.spans(chat, [len(chat.messages) - 1], TEMPLATE, steady=False)[1]
                ends += [int(tokenizer.convert_tokens_to_ids(stop)) for stop in span.stops[:1]]
    return list(dict.fromkeys(ends))


def answer_ends(tokenizer: Any, known: Any) -> list[int]:
    """Return the ids that stop generation: `known`, the tokenizer's end of text, the template's ends of an answer.

    Args:
        known: `eos_token_id` of the model's generation config: an id, a list or None.
    """
    listed = known if isinstance(known, list) else [known]
    ends = [*listed, tokenizer.eos_token_id, *(turn_ends(tokenizer) if tokenizer.chat_template else ())]
    return list(dict.fromkeys(end for end in ends if end is not None))


def _template(given: str, tokenizer: Any) -> str:
    """Return the source of the configured template: the file's text, or ChatML for `chatml` if no such file exists."""
    path, asked = Path(given), f"`model.chat_template: {given}`"
    if path.is_dir() or not path.exists():
        if given == "chatml":
            return _chatml(tokenizer)
        raise ConfigError(asked, "no such file", "use a jinja template file, or chatml")
    try:
        return read_text(path, "utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise ConfigError(asked, f"not UTF-8: {error.reason}", "save it as UTF-8") from None


def chatml_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of `model` that set up ChatML; empty if the folder's tokenizer has a chat template.

    Raises:
        NeedsError: like `open_tokenizer`.
    """
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat_template:
        return {}
    lacking = _lacking(tokenizer)
    return {"chat_template": "chatml", **({"add_tokens": lacking} if lacking else {})}


def _lacking(tokenizer: Any) -> list[str]:
    """Return the special tokens of ChatML that a tokenizer lacks."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [token for token in (START, END) if token not in added]


def _chatml(tokenizer: Any) -> str:
    """Return ChatML, after the begin-of-text token if the tokenizer puts one before every text."""
    if lacking := _lacking(tokenizer):
        found = f"the tokenizer has no special token {' and no '.join(lacking)}"
        do = f'add them: add_tokens: ["{START}", "{END}"] under model'
        raise ConfigError("`model.chat_template: chatml`", found, do)
    bos = tokenizer.bos_token_id
    with tokenizing("a"):
        ids = tokenizer.encode("a")
    return "{{ bos_token }}" + CHATML if bos is not None and ids[:1] == [bos] else CHATML
