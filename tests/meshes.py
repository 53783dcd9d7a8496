"""Any mesh against one process: the golden list, every gradient of the first step, and checkpoints across meshes.

A case names a golden case, its ranks and its `with:`; `prove(box, ranks, case, reference)` plays it on the ranks of a
`Pair` (the fixtures `pair` and `quad`). A technique's own file holds its cases, so that a mesh costs seconds, not a
new group of processes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optrush.decide import decide
from optrush.launch import launched
from optrush.technique import Technique
from optrush.techniques import ALL
from optrush.trainer import checkpoint
from optrush.trainer import run as fit
from optrush.trainer.trainer import Trainer

from golden.make_golden import CASES, STEPS
from pair import Pair
from trials import apart, assembled, golden_run, steps, wire

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
PLAYED = 4  # steps of the eight: past the warmup, the first updates are in all that follows
CLOSE = 1e-5  # relative, of losses and norms; of a gradient's largest value


def further(cases: Sequence[Any], quick: int) -> list[Any]:
    """Mark the cases after the first few as slow: `make test` leaves them to `make test-all`."""
    rest = (case if type(case) is tuple else (case,) for case in cases[quick:])
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


@dataclass(frozen=True)
class MeshCase:
    """One run on several ranks, and the run of one process that it must equal."""

    ranks: int
    with_: dict[str, Any]
    name: str = "untied"  # of golden.make_golden.CASES
    packed: bool = True
    rows: int = 2  # of a micro-batch of one rank
    base: dict[str, Any] = field(default_factory=dict)  # `with:` of the one process; {}: the golden list itself
    sets: tuple[str, ...] = ()
    close: float = CLOSE
    model: str = ""  # a folder in the box, in place of the golden case's

    def __str__(self) -> str:
        chosen = (f"{name}{tuple(options.values()) or ''}" for name, options in self.with_.items())
        of, rows = self.model or self.name, "" if self.packed else "-rows"
        return f"{'+'.join(chosen)}-{of}{rows}-{self.ranks}".replace(" ", "")


@dataclass(frozen=True)
class Played:
    """What a rank has seen: of every step, and of the first one every gradient that it holds, whole."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]  # by transformers' names, adapters' by their own
    held: int  # numbers of trained weights on this rank


def play(box: Path, case: MeshCase, with_: dict[str, Any], classes: Sequence[type[Technique]] = ALL) -> Played:
    """Run the golden script's first steps, here or on a rank."""
    sets = (f"model.path={box / case.model}", *case.sets) if case.model else case.sets
    config = golden_run(box, CASES[case.name], rows=case.rows, packed=case.packed, sets=sets, **with_)
    job = assembled(config, classes)
    batches = next(job.batches)
    job.set_step(1)
    job.forward_backward(batches, job.all_reduce_int(sum(b.n_terms for b in batches)))
    gradients = {}
    for t in job.trained:
        grad, mapped = t.whole_grad.clone(), t.name in job.weight_map.entries
        gradients.update(job.weight_map.split(t.name, grad) if mapped else [(t.name, grad)])
    wire(job)  # and from the first step again
    seen = list(steps(job, PLAYED))
    assert not any(skipped for *_, skipped in seen)
    held = sum(t.local.numel() for t in job.trained)
    return Played([loss for loss, *_ in seen], [norm for _, norm, _ in seen], gradients, held)


@functools.cache
def _alone(box: Path, key: str) -> Played:
    case = MeshCase(1, {}, **{k: tuple(v) if k == "sets" else v for k, v in json.loads(key).items()})
    return play(box, case, case.base)


def alone(box: Path, case: MeshCase) -> Played:
    """The same steps in one process, each such run once a session."""
    own = {field: getattr(case, field) for field in ("name", "packed", "rows", "base", "sets", "model")}
    return _alone(box, json.dumps(own, sort_keys=True))


def prove(
    box: Path, group: Pair, case: MeshCase, reference: Callable[[str], tuple[float, dict[str, torch.Tensor]]],
    classes: Sequence[type[Technique]] = ALL,
) -> list[Played]:  # fmt: skip
    """Assert losses and norms of all steps and every gradient of the first; return what each rank saw.

    Against transformers' list and gradients; against one process of ours where the case has a base of its own.
    """
    assert group.ranks == case.ranks, f"{case} on {group.ranks} ranks"
    found = group(play, box, case, case.with_, classes)
    if case.base or case.sets or case.model:
        want = alone(box, case)
        losses, norms, gradients = want.losses, want.norms, want.gradients
    else:
        losses, norms = GOLDEN[case.name]["loss"][:PLAYED], GOLDEN[case.name]["grad_norm"][:PLAYED]
        gradients = reference(case.name)[1]
    held: dict[str, torch.Tensor] = {}
    for rank, one in enumerate(found):
        for what, seen, wanted in (("loss", one.losses, losses), ("norm", one.norms, norms)):
            for step, (a, b) in enumerate(zip(seen, wanted, strict=True), 1):
                off = abs(a - b) / abs(b)
                assert off < case.close, f"{what} of step {step} on rank {rank}: {a}, wanted {b}, {off:.1e} apart"
        for name, grad in one.gradients.items():
            off = apart(grad, gradients[name])
            assert off < case.close, f"{name} on rank {rank}: {off:.1e} of its largest gradient"
        held |= one.gradients
    assert held.keys() == gradients.keys()
    return found


SAVED = 4  # steps, of the eight


def train(
    box: Path, output: Path, with_: dict[str, Any], resume: Path | None = None, name: str = "untied",
    classes: Sequence[type[Technique]] = ALL, export: bool = False, sets: tuple[str, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Train the golden run as `optrush train` does, saving twice; return the steps' lines of metrics.jsonl.

    resume: a checkpoint of any mesh, e.g. `saved(other output)`. On other ranks than the first the list is empty.
    """
    sets = (f"output={output}", f"train.save_every={SAVED}", f"train.export={str(export).lower()}", *sets)
    config = golden_run(box, CASES[name], packed=True, sets=sets, **with_)
    assert fit.run(fit.RunRequest(decide(config, classes), resume)).code == 0
    if launched()[0]:
        return []
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def saved(output: Path) -> Path:
    """The checkpoint in the middle of `train`."""
    return output / "checkpoints" / f"step-{SAVED:06d}"


def follows(lines: list[dict[str, Any]], name: str = "untied", first: int = 1) -> None:
    """Assert that the steps from `first` on are the golden list's."""
    assert [line["step"] for line in lines] == list(range(first, STEPS + 1))
    for line in lines:
        for key, wanted in GOLDEN[name].items():
            want = wanted[line["step"] - 1]
            off = abs(line[key] - want) / want
            assert off < CLOSE, f"{key} of step {line['step']}: {line[key]}, golden {want}, {off:.1e} apart"


def bits(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole: weights and optimizer states."""
    manifest, found = checkpoint.verify(path), {}
    files = {name: load_file(path / name) for name in manifest.files}
    for name, entry in manifest.tensors.items():
        whole = torch.empty(entry.shape, dtype=files[entry.pieces[0].file][name].dtype)
        for piece in entry.pieces:
            at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            whole[at] = files[piece.file][name]
        found[name] = whole
    return found


def passed_on(box: Path, output: Path, with_: dict[str, Any], path: Path, sets: tuple[str, ...] = ()) -> Path:
    """Load a checkpoint in another mesh, and save what was loaded."""
    job = assembled(golden_run(box, packed=True, sets=(f"output={output}", *sets), **with_))
    return pass_on(job, path, checkpoint.step_of(path))


def pass_on(job: Trainer, path: Path, step: int) -> Path:
    """The same with a job that may have loaded others before; `step` is the folder's number."""
    manifest = checkpoint.restore(job, path, job.fingerprints)
    meta = checkpoint.Meta(manifest.run_id, manifest.position, fingerprints=job.fingerprints)
    return checkpoint.save(job, step, meta)
