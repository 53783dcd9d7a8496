"""Define the errors that are shown to a user.

UserError            request, finding and remedy: printed as one block, exit code 2, no traceback without --debug
├── ConfigError      the YAML or a flag: unknown key, wrong type, incompatible values
│   ├── NoRowsError      random tokens but an objective with rows: can be planned, not trained
│   └── NotRegularError  a pipe, a device or a socket in place of a file; also an OSError
├── NeedsError       a technique or model needs hardware, a library or a shape that is missing
├── ConflictError    two techniques own the same part
├── NoEffectError    a technique of the configuration changed nothing
├── DataError        a row, a file, a template
└── CheckpointError  a damaged, missing or foreign checkpoint
RunError             the run itself failed (three consecutive bad updates): exit code 1, also without a traceback
"""

from __future__ import annotations

import errno
import re

LONGEST = 1000  # characters per line
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def one_line(text: str, longest: int = 300) -> str:
    """Return a text as one line with single spaces, shortened in the middle."""
    return _cut(" ".join(text.split()), longest)


def reason(error: BaseException) -> str:
    """Return another library's exception in one line: its message, with its class if the message is too short."""
    text, name = one_line(str(error)), type(error).__name__
    complete = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    return text if complete and text else f"{name}: {text}" if text else name


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def exhausted(error: BaseException) -> bool:
    """Return whether an error is out of memory: GPU or CPU allocator, or a CUDA library."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    )


def write_remedy(failure: BaseException | str) -> str:
    """Return the remedy for a failed write, from the error or its text."""
    if isinstance(failure, UserError):
        return failure.do
    full = isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or re.search(r"No space left|quota exceeded|File too large|os error 28", str(failure), re.IGNORECASE):
        return "free space there"
    return "check that the folder exists and is writable"


def _cut(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


def _quoted(text: str) -> str:
    """Return one line of at most LONGEST characters; quoted text may have any length and line breaks."""
    return _cut("\\n".join(text.splitlines()), LONGEST)


class UserError(Exception):
    """Something the user must change: the request, the finding and the remedy (each one line)."""

    everywhere = False  # every rank raises it, and one rank prints it

    def __init__(self, asked: str, found: str, do: str) -> None:
        super().__init__(asked, found, do)
        self.asked, self.found, self.do = asked, found, do

    def __str__(self) -> str:
        return f"asked: {_quoted(self.asked)}\nfound: {_quoted(self.found)}\ndo:    {_quoted(self.do)}"


class ConfigError(UserError):
    pass


class NoRowsError(ConfigError):
    pass


class NotRegularError(ConfigError, OSError):
    """Not a regular file: reading it may block or never end."""

    def __init__(self, asked: str, found: str, do: str = "copy its content into a regular file") -> None:
        super().__init__(asked, found, do)
        self.errno, self.strerror, self.filename = errno.EINVAL, found, asked


class NeedsError(UserError):
    pass


class ConflictError(UserError):
    pass


class NoEffectError(UserError):
    pass


class DataError(UserError):
    image = ""  # path or address of the image for which a row is rejected


class CheckpointError(UserError):
    pass


class RunError(Exception):
    """The run failed, and a changed configuration may not help: only a reason, or request, finding and remedy."""

    everywhere = False  # see UserError.everywhere

    def __init__(self, asked: str, found: str = "", do: str = "") -> None:
        super().__init__(asked, found, do)
        self.text = f"asked: {asked}\nfound: {found}\ndo:    {do}" if found else asked

    def __str__(self) -> str:
        return self.text
