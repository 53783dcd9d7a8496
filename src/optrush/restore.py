"""Build the model of a run folder from a checkpoint, on one device and without the run's data.

Only the parts that define the parameters and their meaning are rebuilt: techniques that edit config.json or the
weights, and under adapters the dtype of frozen weights. Techniques for training speed are left out, so that a machine
that could not train the model can still export it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from optrush.config import SECTIONS, BatchSize, Config, Data, parse_config
from optrush.decide import changed, decide
from optrush.errors import CheckpointError, ConfigError
from optrush.files import parse_json, read_file, read_text
from optrush.technique import Part, Technique, instantiate
from optrush.techniques import ALL
from optrush.trainer.build import build
from optrush.trainer.checkpoint import FOLDER, Manifest, find_checkpoints, load_parameters, verify
from optrush.trainer.run_dir import POINTER, RUN
from optrush.trainer.trainer import Trainer


@dataclass(frozen=True)
class RebuiltModel:
    trainer: Trainer
    config: Config  # from its run.yaml
    folder: Path
    base: Path | None  # the folder of the initial model
    manifest: Manifest
    passed: tuple[tuple[str, str], ...]  # newer damaged checkpoints, and the damage


def open_run(place: Path) -> tuple[Path, Config]:
    """Read the run of a folder, or of its run.yaml.

    Raises:
        ConfigError: it does not exist, or its run.yaml cannot be read.
    """
    folder = place.parent if place.name == RUN else place
    file = folder / RUN
    if not file.exists():
        found = f"no {RUN} in it" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"the run {place}", found, "name a folder written by `optrush train`")
    try:
        text = read_text(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}", f"not UTF-8: {error.reason}", "restore it from a checkpoint's manifest") from None
    return folder, parse_config(text, str(file), own=True)


def choose_checkpoint(folder: Path, name: str | None) -> tuple[Manifest, tuple[tuple[str, str], ...]]:
    """Choose the named checkpoint; else the best one, if the run kept it; else the newest intact one.

    Args:
        name: a folder, or a step.

    Returns:
        Its manifest, and the skipped checkpoints with reasons.

    Raises:
        CheckpointError: no checkpoint exists, none is intact, or the named one is damaged.
    """
    if name is not None:
        named = folder / FOLDER / f"step-{int(name):06d}" if name.isdecimal() else Path(name)
        if not named.is_dir():
            present = ", ".join(p.name for p in find_checkpoints(folder)) or "none"
            raise CheckpointError(f"--checkpoint {name}", "no such checkpoint", f"there are: {present}")
        return verify(named.resolve()), ()
    passed: list[tuple[str, str]] = []
    for path in dict.fromkeys([*_best(folder), *find_checkpoints(folder)]):
        try:
            return verify(path), tuple(passed)
        except CheckpointError as error:
            passed.append((path.name, error.found))
    reason = "; ".join(f"{step}: {damage}" for step, damage in passed) or "no checkpoint in it"
    do = "train it first, or name a folder with saved checkpoints (`train.save_every`)"
    raise CheckpointError(f"the run {folder}", f"nothing to export: {reason}", do)


def _best(folder: Path) -> list[Path]:
    file = folder / FOLDER / POINTER
    if not file.is_file():
        return []
    try:
        return [folder / FOLDER / f"step-{int(parse_json(read_file(file))['step']):06d}"]
    except (ValueError, KeyError, TypeError) as error:
        do = "delete it, or use another: --checkpoint STEP"
        raise CheckpointError(f"{file}", f"it names no step: {error}", do) from None


def rebuild(place: Path, checkpoint_name: str | None = None) -> RebuiltModel:
    """Build the run's model with the parameters of the checkpoint that `choose_checkpoint` returns.

    Raises:
        UserError: no such run or checkpoint, or the model or its base has changed since.
    """
    folder, config = open_run(place)
    checkpoint, passed = choose_checkpoint(folder, checkpoint_name)
    prepared = replace(decide(_bare(config), ranks=1), scored=config.scored)
    trainer = build(prepared, training=False)
    _same(checkpoint, trainer)
    load_parameters(trainer, checkpoint)
    trainer.model.eval()
    return RebuiltModel(trainer, config, folder, prepared.folder, checkpoint, passed)


def _bare(config: Config) -> Config:
    """Return the configuration for one process without data: random tokens, and the keys that define the weights."""
    built = instantiate(ALL, config.with_)
    with_ = {}
    for t in built:  # those that edit the model's configuration, its weights, or their dtype
        edits = type(t).config is not Technique.config or type(t).peft is not Technique.peft
        if edits or t.averages or Part.WEIGHTS in t.claims:
            with_[t.name] = dict(config.with_[t.name])
    for t in built if any(Part.ADAPTERS in t.claims for t in built) else ():
        if Part.ADAPTERS in t.claims and not t.splits_base:
            # The checkpoint has the adapters' initial and trained values.
            with_[t.name].pop("init", None)
        elif Part.PRECISION in t.claims and t.name not in with_:  # only the dtype of weights, not of activations
            with_[t.name] = {key: value for key, value in config.with_[t.name].items() if key == "dtype"}
    seq = config.batch.seq
    batch = BatchSize(seq=seq, tokens=seq, micro_tokens=seq)
    changes = {"objective": "pretrain", "loss": None, **dict.fromkeys(SECTIONS), "data": Data(random=1), "batch": batch}
    return changed(config, {**changes, "with": with_, "method": None})


def _same(checkpoint: Manifest, trainer: Trainer) -> None:
    """Reject parameters of another model, and adapters of another base or meaning."""
    for name in ("config", "base"):
        then, now = checkpoint.fingerprints.get(name), trainer.fingerprints.get(name)
        # All weights come from the checkpoint: initial weights (and a reference model) are not exported.
        if then != now and not (name == "base" and now is None):
            what = "the model's config.json" if name == "config" else "the weights that the run did not train"
            found = f"{what} changed: {then or 'absent'} then, {now or 'absent'} now"
            do = f"restore {trainer.config.model.path} as at the start of the run, or name a copy of it"
            raise CheckpointError(f"the checkpoint {checkpoint.path}", found, do)
    for name in ("tokenizer", "template"):  # exported from the base's files
        then, now = checkpoint.fingerprints.get(name), trainer.fingerprints.get(name)
        if then is not None and now is not None and then != now:
            found = f"the model's {'chat template' if name == 'template' else name} changed"
            raise CheckpointError(f"the checkpoint {checkpoint.path}", found, "restore the one used in training")
    then, now = (prints.get("adapters", "absent") for prints in (checkpoint.fingerprints, trainer.fingerprints))
    if then != now:
        found = f"`adapters` was {then} and is {now}"
        raise CheckpointError(f"the checkpoint {checkpoint.path}", found, "restore the old value in run.yaml")
