"""Measure a model on public tasks (`eval --tasks`) through the Language Model Evaluation Harness.

https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrush.errors import ConfigError, NeedsError, RunError, reason
from optrush.files import read_text

if TYPE_CHECKING:
    from optrush.generation import ModelSource

PACKAGE = "lm_eval"
BATCH = 8  # requests per batch


def run_tasks(source: ModelSource, names: list[str], limit: int | None) -> dict[str, Any]:
    """Measure a model on tasks.

    Args:
        source: the model; transformers reads its folder, PEFT its adapter.
        names: the harness's names, or paths of its YAML files of single tasks.
        limit: requests a task; None for all.

    Returns:
        `tasks`: by name, its finite figures (`acc`, `acc_stderr`; with filters `acc,filter`), `samples` and `version`;
        `harness`: its version.

    Raises:
        NeedsError: the harness is not installed.
        ConfigError: an unknown task, or a file that does not define a task.
        RunError: a task's data is unavailable, or the harness failed.
    """
    from optrush.technique import library

    version = library(PACKAGE)
    if version is None:
        raise NeedsError(
            "`optrush eval --tasks`", f"the package {PACKAGE} is not installed", "pip install optrush[eval]"
        )
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks, folders = _named(names)
    manager = TaskManager(include_path=folders or None)
    for name in tasks:
        if name not in manager.all_tasks:
            found = f"none of the harness's {len(manager.all_tasks):,} tasks"
            raise ConfigError(f"--tasks {name}", found, _close(name, manager.all_tasks))
    where = {"pretrained": str(source.folder), "peft": None if source.adapter is None else str(source.adapter)}
    try:
        results = simple_evaluate(
            "hf", model_args=where, tasks=list(tasks), limit=limit, batch_size=BATCH, task_manager=manager,
            device="cuda" if torch.cuda.is_available() else "cpu", log_samples=False, bootstrap_iters=0,
        )  # fmt: skip
    except Exception as error:  # the library reads arbitrary files and addresses
        raise RunError(f"the tasks {', '.join(tasks)} could not be measured: {reason(error)}") from error
    assert results is not None, "this is the only process"
    return {"tasks": {name: _figures(results, name) for name in results["results"]}, "harness": version}


def table(result: dict[str, Any]) -> str:
    """Return the figures as text, one per line."""
    rows = [
        (name, key, str(value) if isinstance(value, int) else f"{value:.4f}")
        for name, figures in result["tasks"].items()
        for key, value in figures.items()
        if key not in ("samples", "version") and not key.endswith("_stderr")
    ]
    counts = {name: figures["samples"] for name, figures in result["tasks"].items()}  # groups of tasks have no count
    ends = {name: "" if count is None else f"  of {count}" for name, count in counts.items()}
    return "\n".join(f"{name:<24} {key:<16} {value:>10}{ends[name]}" for name, key, value in rows)


def _named(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the tasks' names, and the folders of tasks given as files."""
    import yaml

    tasks, folders = [], []
    for name in names:
        if not name.endswith((".yaml", ".yml")):
            tasks.append(name)
            continue
        path = Path(name).absolute()
        if not path.is_file():
            raise ConfigError(f"--tasks {name}", "no such file", "name a task, or a task's YAML file")
        try:  # line by line, because of the harness's own YAML tags
            lines = [line.partition(":") for line in read_text(path).splitlines()]
            task = next((yaml.safe_load(value) for key, _, value in lines if key == "task"), None)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"--tasks {name}", f"not read: {reason(error)}", "name a single task's file") from None
        if not isinstance(task, str):
            raise ConfigError(f"--tasks {name}", "it has no `task: NAME`", "name a single task's file")
        tasks.append(task)
        folders.append(str(path.parent))
    return tasks, folders


def _close(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, 3, 0.6)
    return f"did you mean {', '.join(close)}?" if close else "lm_eval ls tasks lists them"


def _figures(results: Any, name: str) -> dict[str, Any]:
    """Return a task's finite numbers by metric, or by `metric,filter` if a filter was applied."""
    figures = {}
    for key, value in results["results"][name].items():
        if isinstance(value, int | float) and math.isfinite(value) and "," in key:
            figures[key.removesuffix(",none")] = value
    counts = results.get("n-samples", {}).get(name, {})
    return {**figures, "samples": counts.get("effective"), "version": results["versions"].get(name)}
