"""Weights & Biases. Offline: files under the run's folder, which `wandb sync` sends later.

The library sends in a process of its own and keeps what waits on disk, so a server that dies shows only at the end.
What it would note of the machine, the user, the repository, the packages and the command line is turned off.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optrush.config import Tracker as Options

ANSWER_S, SEND_S = 8, 600  # how long the server may take to let us in; to take an artifact


class Wandb:
    """A run of a project; `scratch` is a folder that goes with the process."""

    def __init__(self, library: Any, options: Options, folder: Path, scratch: Any) -> None:
        self.library, self.options, self.folder, self.scratch = library, options, folder, scratch
        self.run: Any = None
        self.late: TimeoutError | None = None

    def answer(self) -> None:
        if not self.options.offline:
            _ = self.library.Api(timeout=ANSWER_S).viewer

    def start(self, config: Mapping[str, Any], fresh: str, known: str | None) -> str:
        self.folder.mkdir(exist_ok=True)
        quiet = self.library.Settings(
            silent=True, console="off", save_code=False, disable_git=True, disable_code=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            init_timeout=ANSWER_S, finish_timeout=ANSWER_S, finish_timeout_raises=True,
        )  # fmt: skip
        self.run = self.library.init(
            project=self.options.project, name=self.options.run, id=known or fresh, resume="allow", dir=self.folder,
            mode="offline" if self.options.offline else "online", settings=quiet,
        )  # fmt: skip
        self.run.config.update(dict(config), allow_val_change=True)
        return known or fresh

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def artifact(self, path: Path, kind: str) -> None:
        made = self.library.Artifact(f"{kind}-{self.run.id}", type=kind)
        add = made.add_dir if path.is_dir() else made.add_file
        add(str(path), policy="immutable", skip_cache=True)  # as it lies there, not a copy
        logged = self.run.log_artifact(made, aliases=[path.name])
        if not self.options.offline:
            logged.wait(timeout=SEND_S)

    def finish(self, status: str) -> None:
        if self.late is not None:  # asked again, the library would say that all is well
            raise self.late
        try:
            self.run.finish(exit_code=0 if status == "finished" else 1)
        except TimeoutError as error:
            self.late = error
            raise


def make(options: Options, folder: Path) -> Wandb:
    scratch = tempfile.TemporaryDirectory(prefix="optrush-")  # for what the library notes of asking the server
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder), "WANDB_CACHE_DIR": scratch.name}
    if options.uri is not None:
        os.environ["WANDB_BASE_URL"] = options.uri
    import wandb

    return Wandb(wandb, options, folder, scratch)
