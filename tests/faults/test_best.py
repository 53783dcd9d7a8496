"""The best checkpoint, kept and exported whatever happens; and TensorBoard's files, which no kill doubles."""

import json
import math
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from test_refusals import flip
from torch.utils.tensorboard import SummaryWriter  # noqa: F401 - forked runs find it loaded

from meshes import further
from optrush import files
from optrush.config import Dpo, StopAfter, parse_config
from optrush.trainer import run, trackers
from optrush.trainer.checkpoint import find_checkpoints, verify
from optrush.trainer.run_dir import Best, BestCheckpoint, Patience, comparable, recall

from harness import ended, fork, launch_env, told
from runs import (
    begun,
    command,
    configuration,
    each_step,
    figures,
    held,
    lines,
    said,
    trained,
    trained_on,
    wait_for,
    write_data,
    write_model,
)  # fmt: skip

TRAIN = {"steps": 12, "log_every": 1, "save_every": 5, "eval_every": 2, "keep": 1}


def configured(home, name, **changes):
    """A run that learns words by heart that mean nothing, so that its held-out loss is best early."""
    run = {"data__eval": 0.2, "train": TRAIN, "optim__lr": 3e-2, **changes}
    return home / name, configuration(home, home / name, **run)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, data, and `reference`: a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_data(folder / "data.jsonl", 60)
    output, config = configured(folder, "reference")
    assert trained(config) == 0, said(config)
    assert best_of(output)[0] not in (10, 12), f"no test of anything: {losses(output)}"
    return folder


def losses(output):
    return {m["step"]: m["eval_loss"] for m in lines(output) if "eval_loss" in m}


def best_of(output):
    """By the evaluations alone."""
    return min(((n, loss) for n, loss in losses(output).items() if n), key=lambda pair: pair[1])


def pointed(output):
    found = json.loads((output / "checkpoints" / "best.json").read_text())
    return found["step"], found["eval_loss"]


def exported(output):
    return (output / "model" / "model.safetensors").read_bytes()


def config_of(config):
    found: dict[str, Any] = yaml.safe_load(config.read_text())
    return found


def measured(config, model):
    """The held-out loss of a model's folder, measured anew."""
    log = config.with_suffix(".json")
    two = {"ddp", "fsdp"} & set(config_of(config)["with"])
    work = partial(command, "eval", str(config), "--model", str(model), "--json")
    pids = [fork(work, env, log) for env in (launch_env(2) if two else [{}])]
    assert {ended(pid) for pid in pids} == {0}, log.read_text()
    return float(json.loads(log.read_text().splitlines()[-1])["loss"])


def test_it_is_kept_and_exported(home):
    output = home / "reference"
    at, loss = best_of(output)
    assert pointed(output) == (at, loss)
    assert [p.name for p in find_checkpoints(output)] == ["step-000012", f"step-{at:06d}"]  # keep: 1, and the best
    assert measured(home / "reference.yaml", output / "model") == pytest.approx(loss, abs=1e-6)
    assert f"best eval_loss {loss:.4f} at step {at}, exported" in said(home / "reference.yaml")
    assert f"| steps | {at} |" in (output / "model" / "README.md").read_text()


def test_asked_for_the_last(home):
    """`train.best: false` exports the last, `train.export: false` nothing; training is the same."""
    for key in ("best", "export"):
        output, config = configured(home, f"no-{key}", train={**TRAIN, key: False})
        assert trained(config) == 0, said(config)
        assert figures(output) == figures(home / "reference") and losses(output) == losses(home / "reference")
        if key == "export":
            assert not (output / "model").exists() and pointed(output) == best_of(output)
        else:
            assert measured(config, output / "model") == pytest.approx(losses(output)[12], abs=1e-6)
            assert [p.name for p in find_checkpoints(output)] == ["step-000012"]
            assert not (output / "checkpoints" / "best.json").exists()


def same(output, reference):
    assert figures(output) == figures(reference) and losses(output) == losses(reference)
    assert pointed(output) == pointed(reference) and exported(output) == exported(reference)
    assert [p.name for p in find_checkpoints(output)] == [p.name for p in find_checkpoints(reference)]


@pytest.mark.parametrize("logged", further([11, 3], 1))
def test_killed_and_resumed(home, logged):
    """Nothing that is lost in a kill is missed, the pointer included."""
    output, config = configured(home, f"killed-{logged}")
    pid = begun(config, before=held(logged + 1, home / "never"))
    wait_for(output, logged)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -9
    (output / "checkpoints" / "best.json").unlink(missing_ok=True)  # as if killed before it was written
    assert trained(config, "--resume", "auto") == 0, said(config)
    same(output, home / "reference")


EARLY = {"steps": 12, "log_every": 1, "eval_every": 2, "keep": 1, "stop_after": 2}


def off_plan():
    run.off_plan = lambda log, ranks: "slower than planned"


@pytest.mark.parametrize("logged", further([3, None], 1))
def test_stopped_early(home, logged):
    """Two evaluations after the least held-out loss, by the reference's losses; killed in between or not.

    What runs until then is the same, the least is exported without `save_every`, and going on changes nothing.
    """
    known, least, since = losses(home / "reference"), math.inf, 0
    for last, loss in known.items():  # noqa: B007
        least, since = (loss, 0) if loss < least else (least, since + 1)
        if since == 2:
            break
    assert last < 12, f"no test of anything: {known}"
    output, config = configured(home, f"early-{logged}", train={**EARLY, **({"save_every": 3} if logged else {})})
    if logged is not None:
        pid = begun(config, before=held(logged + 1, home / "never"))
        wait_for(output, logged)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -9
    for flags in (("--resume", "auto") if logged else (), ("--resume", "auto")):
        assert trained(config, *flags, before=off_plan) == 0, said(config)
        assert losses(output) == {n: loss for n, loss in known.items() if n <= last}
        assert figures(output) == [f for f in figures(home / "reference") if f["step"] <= last]
        assert pointed(output) == best_of(output) == best_of(home / "reference")
        assert exported(output) == exported(home / "reference")
        assert find_checkpoints(output)[0].name == f"step-{last:06d}"
        notes = [m for m in lines(output) if "stopped_early" in m or "off_plan" in m]
        text = f"2 evaluations without a held-out loss below {least:.4f}"
        assert notes == [{"step": last, "stopped_early": text}, {"step": last, "off_plan": "slower than planned"}]


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_stopped_early_on_two_ranks(home, kind):
    """Both ranks end with the same step, as the losses say, and export the least; going on changes nothing."""
    many = {"packing": {}, kind: {}}
    output, config = configured(
        home, f"early-two-{kind}", **{"with": many}, train={**EARLY, "steps": 24}, optim__lr=1e-2
    )
    for flags in ((), ("--resume", "auto")):
        assert trained_on(2, config, *flags) == [0, 0], said(config)
        known, patience = losses(output), Patience(StopAfter(evals=2))
        ends = [(patience.add(loss), patience.exhausted)[1] for loss in known.values()]
        assert ends == [False] * (len(ends) - 1) + [True], known
        last = max(known)
        assert 4 < last < 24, f"no test of anything: {known}"
        assert [f["step"] for f in figures(output)] == list(range(1, last + 1))
        assert find_checkpoints(output)[0].name == f"step-{last:06d}" and pointed(output) == best_of(output)
        (note,) = [m for m in lines(output) if "stopped_early" in m]
        text = f"2 evaluations without a held-out loss below {patience.least:.4f}"
        assert note == {"step": last, "stopped_early": text}
    assert measured(config, output / "model") == pytest.approx(best_of(output)[1], abs=1e-6)


@pytest.mark.parametrize(("changes", "said"), [
    ({"data__eval": None}, "no `data.eval`: nothing is held out"), ({}, "1 evaluation in 12 steps, the last after the"),
])  # fmt: skip
def test_a_run_that_could_not_stop_early(home, changes, said, capsys):
    output, config = configured(home, "never", train={"steps": 12, "stop_after": {"evals": 1, "min_delta": 0.01}})
    config = configuration(home, output, data__eval=changes.get("data__eval", 0.2), train=config_of(config)["train"])
    assert command("train", str(config)) == 2
    assert said in capsys.readouterr().err and not output.exists()


def test_patience():
    """The least so far counts, as do losses that are not finite; `min_delta` is how much lower is lower."""
    for losses_, evals, min_delta, expected in (
        ([3.0, 2.0, 2.1, 2.2], 2, 0.0, [False, False, False, True]),
        ([3.0, 2.0, 2.1, 1.9, 2.0], 2, 0.0, [False] * 5),
        ([3.0, 2.95, 2.92, 2.5], 2, 0.1, [False, False, True, False]),
        ([math.nan, 3.0, math.inf, math.nan], 2, 0.0, [False, False, False, True]),
    ):
        patience = Patience(StopAfter(evals=evals, min_delta=min_delta))
        for loss, ends in zip(losses_, expected, strict=True):
            patience.add(loss)
            assert patience.exhausted == ends, (losses_, loss)


def test_a_damaged_best_one(home):
    """Passed over aloud when the run is resumed; what is next best is exported."""
    output, config = configured(home, "damaged")
    assert trained(config) == 0, said(config)
    at, _ = best_of(output)
    flip(output / "checkpoints" / f"step-{at:06d}" / "rank-0.safetensors")
    assert trained(config, "--resume", "auto") == 0, said(config)
    (over,) = [m["passed_over"] for m in lines(output) if "passed_over" in m]
    assert over[0]["checkpoint"] == f"step-{at:06d}"
    assert measured(config, output / "model") == pytest.approx(losses(output)[12], abs=1e-6)


def test_damaged_while_it_trained(home):
    """Exit 1, with what to do; the weights of another step are not exported for it."""
    output, config = configured(home, "damaged-late")

    def damage(n):
        if n == 12:
            flip(output / "checkpoints" / f"step-{best_of(home / 'reference')[0]:06d}" / "rank-0.safetensors")

    assert trained(config, before=each_step(damage)) == 1, said(config)
    assert "the best checkpoint" in said(config) and "export the next best: --resume auto" in said(config)
    assert not (output / "model").exists()


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_is_not_the_best(home):
    """The disk is full at the best step: the best that was saved is exported."""
    output, config = configured(home, "full")
    best = best_of(home / "reference")[0]

    write = files.write_piece
    assert trained(config, before=each_step(lambda n: setattr(files, "write_piece", full if n == best else write))) == 0
    assert [m["step"] for m in lines(output) if "save_failed" in m] == [best]
    found = losses(output)
    assert pointed(output) == min(((n, x) for n, x in found.items() if n not in (0, best)), key=lambda pair: pair[1])
    told("best", 1, f"step {best} could not be saved, {pointed(output)[0]} is exported")


def test_what_is_best(tmp_path):
    best = BestCheckpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert best.protected_step(2) is None
    assert not best.is_best(2, float("nan")) and best.is_best(4, 1.0)
    assert best.protected_step(4) == 4 and best.protected_step(5) is None
    best.saved(4)
    assert best.best == Best(4, 1.0) and pointed(tmp_path) == (4, 1.0)
    assert not best.is_best(6, 1.0), "the earlier of equals"
    assert best.is_best(8, 0.5)
    assert best.protected_step(8) == 8 and best.protected_step(9) == 4, "not saved yet"
    (tmp_path / "metrics.jsonl").write_text("")
    assert recall(tmp_path, 12, bool) == (None, []), "no such checkpoint"
    assert not (tmp_path / "checkpoints" / "best.json").exists()
    (tmp_path / "checkpoints" / "best.json").write_text("{")
    assert recall(tmp_path, 12, bool) == (None, [])


def test_losses_that_do_not_compare(home):
    """Of other held-out data: what was better before the change is not the best, however often the run is resumed."""
    output, config = configured(home, "other", train={**TRAIN, "keep": 9})
    assert trained(config) == 0, said(config)
    before = best_of(output)
    for steps in (14, 16):
        flags = ("--set", "data.eval=0.1", "--set", f"train.steps={steps}", "--allow-change", "data")
        assert trained(config, "--resume", "auto", *flags) == 0, said(config)
        found = {n: loss for n, loss in losses(output).items() if n > 12}
        assert min(found.values()) > before[1], "no test of anything"
        assert pointed(output) == min(found.items(), key=lambda pair: pair[1])


def test_what_compares(home):
    config = parse_config((home / "reference" / "run.yaml").read_text(), "run.yaml")
    marks = {"data": "a", "template": "b", "tokenizer": "c", "order": "d"}
    manifest = verify(find_checkpoints(home / "reference")[0])
    before = manifest.model_copy(update={"fingerprints": marks})
    assert comparable(config, marks | {"order": "e"}, before)
    for key in ("data", "template", "tokenizer"):
        assert not comparable(config, marks | {key: "x"}, before), key
    assert not comparable(config.model_copy(update={"dpo": Dpo(loss="ipo")}), marks, before)
    assert not comparable(config.model_copy(update={"objective": "sft"}), marks, before)


def test_a_best_one_of_a_future_that_was_left(home):
    """Told to go on from an older checkpoint, a run forgets what came after it."""
    output, config = configured(home, "left", train={**TRAIN, "keep": 9})
    assert trained(config) == 0, said(config)
    assert trained(config, "--resume", str(output / "checkpoints" / "step-000002")) == 0, said(config)
    same_but_kept = pointed(output), exported(output), losses(output)
    assert same_but_kept == (pointed(home / "reference"), exported(home / "reference"), losses(home / "reference"))


def scalars(output):
    """What TensorBoard would show."""
    board = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return sorted((tag, e.step, e.value) for tag in board.Tags()["scalars"] for e in board.Scalars(tag))


def shown(output):
    logged = (m for m in lines(output) if "loss" in m or "eval_loss" in m)
    pairs = ((m, k, v) for m in logged for k, v in m.items() if k != "step" and isinstance(v, int | float))
    return sorted((key, m["step"], pytest.approx(value, rel=1e-6)) for m, key, value in pairs)


def test_tensorboard_shows_every_figure_once(home):
    """Also of runs that were killed: neither doubled nor missed."""
    for name in ("reference", *(f"killed-{n}" for n in (3, 11) if (home / f"killed-{n}").exists())):
        assert scalars(home / name) == shown(home / name) and len(shown(home / name)) > 12 * 5


def test_tensorboard_on_a_full_disk(home):
    """The run goes on, and at its end the files have every figure."""
    output, config = configured(home, "board-full", train={**TRAIN, "steps": 4})

    write = RecordWriter.write

    def fills(n):
        trackers.EVERY_S = 0.05
        time.sleep(0.3)  # the files are written more often
        RecordWriter.write = full if n == 3 else write

    assert trained(config, before=each_step(fills)) == 0, said(config)
    assert scalars(output) == shown(output)
