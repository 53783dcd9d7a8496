"""The tokenizer of a run: the model's own, with its chat template or the one given."""

from __future__ import annotations

import datetime
from pathlib import Path

from optrush.config import Run
from optrush.data.chat import Tokens
from optrush.errors import ConfigError, NeedsError


def open_tokens(run: Run, folder: Path | None, today: datetime.date | None = None) -> Tokens | None:
    """The model's tokenizer with its chat template, or the one given; None for a shape without one."""
    if run.model.tokenizer is not None:
        folder = Path(run.model.tokenizer)
    if folder is None:
        return None
    if run.data.random is not None and not (folder / "tokenizer.json").exists():
        return None  # random tokens need none
    from transformers import AutoTokenizer

    template = None
    if run.model.chat_template is not None:
        path = Path(run.model.chat_template)
        if not path.is_file():
            raise ConfigError(f"`model.chat_template: {path}`", "no such file", "name a file with a jinja template")
        try:
            template = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            asked = f"`model.chat_template: {path}`"
            raise ConfigError(asked, f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise NeedsError(
            f"the tokenizer of {folder}", str(error).splitlines()[0], "put its tokenizer.json there"
        ) from None
    if template is not None:
        tokenizer.chat_template = template
    return Tokens(tokenizer, template, today)
