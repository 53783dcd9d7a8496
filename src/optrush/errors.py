"""Every error a user can meet, and nothing else.

UserError            asked for / found / do: printed as one block, exit code 2, no traceback without --debug
├── ConfigError      the YAML or a flag: unknown key, wrong type, values that do not go together
├── NeedsError       a technique or model needs hardware, a library or a shape that is not here
├── ConflictError    two techniques own the same part
├── NoEffectError    a technique was asked for and changed nothing
├── DataError        a row, a file, a template
└── CheckpointError  a damaged, missing or foreign checkpoint
RunError             the run itself failed (three bad updates in a row): exit code 1, also without a traceback
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user must change: what was asked, what was found, what to do (each one line)."""

    everywhere = False  # every rank raises it: one of them says it for all

    def __init__(self, asked: str, found: str, do: str) -> None:
        super().__init__(asked, found, do)
        self.asked, self.found, self.do = asked, found, do

    def __str__(self) -> str:
        return f"asked: {self.asked}\nfound: {self.found}\ndo:    {self.do}"


class ConfigError(UserError):
    pass


class NeedsError(UserError):
    pass


class ConflictError(UserError):
    pass


class NoEffectError(UserError):
    pass


class DataError(UserError):
    pass


class CheckpointError(UserError):
    pass


class RunError(Exception):
    """The run failed by itself, beyond what a changed configuration would surely mend."""

    everywhere = False  # as UserError.everywhere
