"""Run the verbs of the command line from Python: plan, tune, train, evaluate, bench, export, generate.

Each takes a configuration as a `Config`, as a mapping with the keys of the YAML, or as the path of a YAML file, and
returns the objects that the command line prints. A `UserError` has request, reason and remedy; nothing was
written then. A `RunError` is a run that failed. docs/python.md has examples.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from optrush.config import Config, Plugin, Sampling, parse_config, refuse_secrets
from optrush.decide import changed
from optrush.errors import ConfigError, ConflictError, DataError, NeedsError, UserError
from optrush.files import config_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optrush.benchmark.record import QualityRecord, Record
    from optrush.benchmark.tune import Tuned
    from optrush.data.batch import Batch
    from optrush.exporting import Delivered
    from optrush.generation import Answer
    from optrush.planner.sets import Prediction, SearchResult
    from optrush.trainer.run import Outcome
    from optrush.trainer.trainer import Evaluated

Configuration = Config | Mapping[str, Any] | str | Path
Loss = Callable[["nn.Module", "Tensor", "Batch"], "Tensor"]
"""(head, hidden (B, T, D), batch) -> () float32: the sum over the batch's target tokens, like
`optrush.objectives.next_token`. `head(hidden, batch.labels, reduce="none")` returns their losses, (B, T)."""


OWN_OPTIMIZER = "own-optimizer"  # the technique


class Callback(Protocol):
    """Callbacks of a run on its first rank; override the methods you need. An exception ends the run."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Receive a logged step (`train.log_every`): loss, lr, tokens_per_s ..., as in metrics.jsonl."""

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Receive an evaluation: eval_loss in nats per target token (dpo: per pair), eval_target_tokens."""

    def save(self, step: int, checkpoint: Path) -> None:
        """Receive the folder of a complete checkpoint."""


class Plan(NamedTuple):
    """The prediction for a configuration, and better ones."""

    prediction: Prediction | None  # None: the configuration is rejected
    refused: UserError | None
    search: SearchResult  # `search.settings`, the best first; `.settings[0].over(config)` is a Config


def _config(given: Configuration) -> Config:
    """Return a checked configuration.

    Raises:
        ConfigError: an unknown key, type or value, with the nearest valid one.
    """
    from optrush.objectives.plugged import refuse_while_importing

    refuse_while_importing("a function of `optrush`")
    if isinstance(given, Config):
        config = given
    elif isinstance(given, Mapping):
        import yaml

        try:
            text = yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise ConfigError(
                "the configuration", f"a value that YAML cannot hold: {error}", "use plain values"
            ) from None
        config = parse_config(text, "the configuration")
    else:
        path = Path(given)
        config = parse_config(config_text(path), str(path))
    refuse_secrets(config)
    return config


def plan(config: Configuration, hardware: str = "auto", *, keep_maths: bool = False) -> Plan:
    """Predict memory (bytes) and speed (tokens per second) of a configuration, and find better ones; builds nothing.

    Args:
        hardware: auto (this machine), h200, 2xh200, 4090, cpu, ...
        keep_maths: skip techniques that change the maths.

    Raises:
        UserError: no set of techniques can be planned.

    Example:
        >>> plan("first.yaml", "h200").prediction.peak_bytes
    """
    from optrush.planner import search

    chosen = _config(config)
    prediction, refused = None, None
    try:
        prediction = search.predict(chosen, hardware)
    except (ConfigError, ConflictError, NeedsError) as error:
        refused = error
    return Plan(prediction, refused, search.search(chosen, hardware, keep_maths=keep_maths))


def train(
    config: Configuration,
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    eval_rows: Iterable[Mapping[str, Any]] | None = None,
    loss: Loss | str | None = None,
    optimizer: Any = None,
    callbacks: Sequence[Callback] = (),
    resume: Literal["auto"] | str | Path | None = None,
    allow_change: Iterable[str] = (),
) -> Outcome:
    """Train a model, with several ranks under torchrun; its folder is the configuration's `output`.

    Args:
        rows: the data, in place of `data.path`: mappings such as {"messages": [...]}, {"prompt": ..., "completion":
            ...}, {"text": ...}. They are written to a file in the cache, so any length will do.
        eval_rows: held-out rows that replace `data.eval`.
        loss: in place of the objective's loss (pretrain, sft, and orpo for pairs): a function (see `Loss`), a `partial`
            of one, or a name such as "focal.py:focal". Checkpoints do not contain it.
        optimizer: a subclass of torch.optim.Optimizer, or a class of docs/optimizer.md; a `partial`, or a name.
        callbacks: see `Callback`.
        resume: "auto" resumes from the newest intact checkpoint, a folder from that one.
        allow_change: fields that may have changed, like --allow-change.

    Returns:
        `code` (0 done, 143 stopped by a signal and resumable), `output`, `evals` (held-out losses), seconds, tokens.

    Raises:
        UserError: something must be changed; nothing was written.
        RunError: the run failed.

    Example:
        >>> train({"model": "tiny", "objective": "sft", "data": {}, "output": "runs/a"}, rows=my_rows)
    """
    from optrush.decide import as_begun, decide
    from optrush.launch import launched
    from optrush.trainer import copies, distributed
    from optrush.trainer.run import RunRequest, run

    begun = time.monotonic()
    chosen = _with_own(_with_rows(_config(config), rows, eval_rows), loss, optimizer)
    start: Literal["auto"] | Path | None = "auto" if resume == "auto" else None if resume is None else Path(resume)
    if start is not None:
        copies.fetch_copies(chosen, launched()[1], start)
        chosen = as_begun(chosen, launched()[1])
    with distributed.leaving():
        return run(RunRequest(decide(chosen), start, frozenset(allow_change), tuple(callbacks), begun))


def _with_own(config: Config, loss: Loss | str | None, optimizer: Any, *, elsewhere: bool = False) -> Config:
    """Return the configuration with a program's own loss and optimizer.

    Args:
        elsewhere: other processes must be able to import them.
    """
    from optrush.objectives.plugged import named

    changes: dict[str, Any] = {}
    if loss is not None:
        changes["loss"] = Plugin(**named("loss", loss, elsewhere=elsewhere))
    if optimizer is not None:
        given = named("optimizer", optimizer, elsewhere=elsewhere)
        changes["with"] = {**config.with_, OWN_OPTIMIZER: {**config.with_.get(OWN_OPTIMIZER, {}), **given}}
    return changed(config, changes)


def _with_rows(
    config: Config, rows: Iterable[Mapping[str, Any]] | None, held_out: Iterable[Mapping[str, Any]] | None
) -> Config:
    """Return the configuration with the rows' files as its data."""
    changes: dict[str, Any] = {}
    if rows is not None:
        if config.data.path is not None or config.data.sample is not None or config.data.random is not None:
            raise ConfigError("`rows` and data of the configuration", "both are set", "remove one")
        changes["data.path"] = _stored(rows, "rows", config.data.cache)
    if held_out is not None:
        if config.data.eval is not None:
            raise ConfigError("`eval_rows` and `data.eval`", "both are set", "remove one")
        changes["data.eval"] = _stored(held_out, "eval_rows", config.data.cache)
    return changed(config, changes)


def _stored(rows: Iterable[Mapping[str, Any]], name: str, cache: str | None) -> str:
    """Write rows as JSON Lines to the cache, under their hash; return the file's path."""
    from optrush.data.tokenize import cache_root

    folder = cache_root(cache) / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    part, digest, count = folder / f".{name}-{os.getpid()}", hashlib.sha256(), 0
    try:
        with part.open("xb") as file:
            for number, row in enumerate(rows):
                try:
                    line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise DataError(f"`{name}`, row {number}", f"{error}", "use mappings of plain values") from None
                digest.update(line)
                file.write(line)
                count += 1
        if not count:
            raise DataError(f"`{name}`", "no row", "give at least one row")
        final = folder / f"{digest.hexdigest()[:32]}.jsonl"
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)
    return str(final)


def evaluate(
    config: Configuration, *, model: str | Path | None = None, data: str | Path | None = None,
    loss: Loss | str | None = None,
) -> Evaluated:  # fmt: skip
    """Measure a model's loss on held-out data, packed, like `optrush eval`.

    Args:
        model: another model's folder, such as OUTPUT/model; default: the configuration's initial model.
        data: another file of rows; default: the held-out data (`data.eval`), else all data.
        loss: as for `train`.

    Returns:
        `loss` (mean nats per target token), `targets` (their number), `figures` (other metrics of the objective).

    Raises:
        UserError: something must be changed.

    Example:
        >>> evaluate("first.yaml", model="runs/first/model").loss
    """
    from optrush.decide import decide, without_adapters
    from optrush.trainer import distributed
    from optrush.trainer.build import build
    from optrush.trainer.trainer import evaluate as measure

    chosen = _with_own(_config(config), loss, None)
    if chosen.has_reference:
        asked, found = f"`evaluate` of `objective: {chosen.objective}`", "answers to compare with a second model's"
        raise ConfigError(asked, found, "optrush eval CONFIG --model OUTPUT/model")
    file = None if data is None else str(data)
    if data is None and isinstance(chosen.data.eval, str):
        file = chosen.data.eval
    elif data is not None:
        chosen = changed(chosen, {"data.path": file, "data.random": None, "data.sample": None})
    if model is not None:
        other = {"model.path": str(model), "model.shape": None, "model.revision": None}
        chosen, _ = without_adapters(changed(chosen, other))
    with distributed.leaving():
        return measure(build(decide(chosen), training=False, data=file))


def bench(
    config: Configuration, out: str | Path, *, ladder: str = "config", repeats: int | None = None,
    limit_s: float | None = None, cumulative_only: bool = False, resume: bool = False,
    loss: Loss | str | None = None, optimizer: Any = None,
) -> list[Record | QualityRecord]:  # fmt: skip
    """Measure the rungs of a ladder one by one, each in fresh processes; records and report are written to `out`.

    Args:
        ladder: config (the configuration's own techniques), single-gpu, cpu-demo ..., or a YAML file.
        repeats: processes per rung; default: the ladder's number.
        limit_s: maximum seconds of one process.
        cumulative_only: skip the rungs that remove one technique.
        resume: continue a stopped bench.
        loss, optimizer: as for `train`, defined at the top level of a file, because fresh processes import it.

    Returns:
        One record per rung: tokens_per_s, peak_bytes, predicted_*, verdict, error; for whole runs held_out.

    Raises:
        UserError: the ladder, the baseline or the folder must be changed; nothing was written.

    Example:
        >>> [(r.rung, r.tokens_per_s) for r in bench("first.yaml", "ladder")]
    """
    from optrush.benchmark.ladder import find_ladder
    from optrush.benchmark.runner import ProgressBoard, run_ladder

    chosen = _with_own(_config(config), loss, optimizer, elsewhere=True)
    with ProgressBoard() as board:
        return run_ladder(
            find_ladder(ladder, chosen), chosen, Path(out), board, repeats=repeats, cumulative_only=cumulative_only,
            limit_s=limit_s, resume=resume, command="optrush.bench",
        )  # fmt: skip


def tune(
    config: Configuration, out: str | Path, *, budget_s: float = 600.0, ranks: int = 1,
    loss: Loss | str | None = None, optimizer: Any = None,
) -> Tuned:  # fmt: skip
    """Measure the plan's best settings, prove each, and write the fastest as YAML, like `optrush tune`.

    Args:
        out: the YAML to write; the records are in the folder of its name without the suffix.
        budget_s: maximum seconds of all processes together.
        ranks: processes on this machine, one per GPU.
        loss, optimizer: as for `bench`.

    Returns:
        `config` (to train with), `ratio` (of its speed to the configuration's), `tried`, `sentence()`.

    Raises:
        UserError: the configuration or a file must be changed; nothing was measured.
        RunError: neither the configuration nor any setting ran.

    Example:
        >>> train(tune("first.yaml", "first.tuned.yaml").config)
    """
    from optrush.benchmark.runner import ProgressBoard
    from optrush.benchmark.tune import tune_config

    with ProgressBoard() as board:
        chosen = _with_own(_config(config), loss, optimizer, elsewhere=True)
        return tune_config(chosen, Path(out), board, budget_s=budget_s, ranks=ranks)


def export(
    run: str | Path, out: str | Path | None = None, *, checkpoint: str | int | None = None, dtype: str | None = None,
    adapter: bool = False, verify: bool = True,
) -> Delivered:  # fmt: skip
    """Write a checkpoint of a run as a folder that transformers loads, and compare its logits after reloading.

    Args:
        out: folder to write (default RUN/model).
        checkpoint: a step or a folder; default: the best, else the newest intact one.
        dtype: float32, bfloat16 or float16; default: as trained.
        adapter: export only the adapter, in PEFT's format, instead of merged weights.

    Raises:
        UserError: the run or the checkpoint does not exist.
        RunError: the folder's logits differ by more than rounding explains.

    Example:
        >>> export("runs/first", "exported", dtype="bfloat16").out
    """
    from optrush.exporting import export_run

    return export_run(
        Path(run), None if out is None else Path(out), checkpoint=None if checkpoint is None else str(checkpoint),
        dtype=dtype, adapter=adapter, verifies=verify,
    )  # fmt: skip


def generate(
    model: str | Path, prompts: Iterable[str | Sequence[Mapping[str, Any]]], *, sampling: Sampling | None = None,
    seed: int = 0, batch: int = 8, plain: bool = False,
) -> list[Answer]:  # fmt: skip
    """Answer prompts with a model, in their order.

    Args:
        model: a run's folder, a Hugging Face folder or hub id, or tiny.
        prompts: each a user's turn, or a list of messages ({"role": ..., "content": ...}).
        sampling: temperature, top_p, top_k, max_tokens (512), greedy.
        batch: prompts at once.
        plain: continue texts without the chat template.

    Returns:
        One answer per prompt: `text`, `tokens` (their number), `finish` (stop, length).

    Raises:
        UserError: no such model, or an invalid prompt; nothing was generated.

    Example:
        >>> generate("runs/first", ["How do I cook rice?"], sampling=Sampling(greedy=True))[0].text
    """
    from optrush.data.schema import RowLocation
    from optrush.generation import find_model, generate_answers, read_prompt

    requests = [
        read_prompt(RowLocation(Path("prompts"), n + 1), {"prompt" if isinstance(p, str) else "messages": p}, plain)
        for n, p in enumerate(prompts)
    ]
    return list(generate_answers(find_model(str(model)), requests, sampling or Sampling(), seed=seed, batch=batch))
