"""The gradient noise scale against float64, the race of learning rates against a grid, and what is written of both."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from optrush import files
from optrush.benchmark import runner, trial
from optrush.benchmark.record import MEASURED
from optrush.benchmark.trial import Draw, Progress, Snapshot
from optrush.benchmark.tune import RATES
from optrush.config import Config, parse_config
from optrush.errors import ConfigError
from optrush.trainer.run import batches

import toy
from toy import Found, document, parsed, put

Call = Callable[..., Found]


def progress(trainer: Any, folder: Path) -> Progress:
    """What is stored in a folder, as a process begins with it."""
    folder.mkdir(exist_ok=True)
    file = folder / MEASURED
    return Progress(trainer, folder, json.loads(file.read_text()) if file.exists() else {})


def test_the_noise_scale_is_that_of_float64(here: Path) -> None:
    """Eight gradients of transformers' model in float64: the trace of their covariance, the length of their mean."""
    config = parsed(batch={"seq": 64, "tokens": 512, "micro_tokens": 64}, train={"steps": 4})
    trainer, plan = trial.assemble(config)
    window = next(batches(trainer, plan))
    oracle = AutoModelForCausalLM.from_pretrained("toy", dtype=torch.float64)
    gradients = []
    for batch in window:
        logits = oracle(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        parts = torch.autograd.grad(loss, list(oracle.parameters()))
        gradients.append(torch.cat([g.flatten() for g in parts]))
    each, mean = torch.stack(gradients), torch.stack(gradients).mean(0)
    terms = window[0].n_terms
    variance = (each - mean).square().sum() / (len(window) - 1)
    draws = trial.noise_draws(trainer, plan, math.inf, progress(trainer, here))
    noise, squared = trial.noise_scale(draws[:1])
    assert len(draws) == 4 and len(window) == 8 and draws[0].terms == 8 * terms
    assert noise == pytest.approx(float(variance) * terms, rel=1e-4)
    assert squared == pytest.approx(float(mean.square().sum() - variance / len(window)), rel=1e-4)


def test_micro_batches_of_unequal_terms() -> None:
    """|g|^2 = |G|^2 + S / terms exactly, of one to eight terms: both come back."""
    sizes = range(1, 9)
    inverse = sum(1 / n for n in sizes) / 8
    draw = Draw(1, 5.0 + 40.0 * inverse, 5.0 + 40.0 / sum(sizes), inverse, sum(sizes), 64)
    assert trial.noise_scale([draw, draw]) == pytest.approx((40.0, 5.0))
    assert trial.noise_result([draw])["running"] == [[1, pytest.approx(8.0 * 64 / 36)]]


# --- the race


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Sequences that count up by 1 to 4 from anywhere, modulo 100: a model has to see by how much."""
    folder = tmp_path_factory.mktemp("counted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "L", 2)
        toy.write_model(folder)
    engine = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, **{str(n): n + 2 for n in range(100)}}, "<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    draw = random.Random(0)
    starts = [(draw.randrange(100), draw.randrange(1, 5)) for _ in range(400)]
    rows = [{"text": " ".join(str((a + n * by) % 100) for n in range(31))} for a, by in starts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parsed(
        model=str(folder), data={"path": str(folder / "rows.jsonl"), "eval": 0.05, "cache": str(folder / "cache")},
        batch={"seq": 32, "tokens": 128, "micro_tokens": 128}, train={"steps": 48, "eval_every": 1e9},
        optim={"lr": 2e-3, "warmup": 0.1},
    )  # fmt: skip


@pytest.mark.slow
def test_the_race_finds_the_rate_of_a_grid(counted: Config, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % of the best held-out loss of all rates, each trained to the end, at a quarter of their steps."""
    trainer, plan = trial.assemble(counted)
    rates = [2e-3 * factor for factor in RATES]
    begin, leg, took = Snapshot(trainer), trial.train_leg, list[tuple[float, int]]()
    ends = [-1, 25]  # legs after which a process ends

    def noted(trainer: Any, plan: Any, rate: float, done: int, stop: int, steps: int) -> float:
        took.append((rate, stop - done))
        if len(took) - 1 in ends:
            raise Cut
        return leg(trainer, plan, rate, done, stop, steps)

    monkeypatch.setattr(trial, "train_leg", noted)
    found = trial.rate_race(trainer, plan, rates, time.monotonic() + 1e6, progress(trainer, here / "whole"))
    steps = [n for _, n in took]
    assert found["steps"] == 48 and sum(steps[1:]) == 48 * len(rates) / 4, "the first two steps are timed"
    begin.restore()
    with pytest.raises(Cut):
        trial.rate_race(trainer, plan, rates, time.monotonic() + 1e6, progress(trainer, here / "cut"))
    other, plan = trial.assemble(counted)
    resumed = trial.rate_race(other, plan, rates, time.monotonic() + 1e6, progress(other, here / "cut"))
    assert resumed == found and took[26] == took[25] and len(took) == 15 + 15 + 1, (
        "the leg that was cut off, and no other"
    )
    losses = {}
    for rate in rates:
        begin.restore()
        losses[rate] = leg(trainer, plan, rate, 0, 48, 48)
    picked = found["legs"][-1]["rate"]
    assert losses[picked] <= 1.01 * min(losses.values()) < 0.9 * max(losses.values()), (picked, losses)
    begin.restore()
    halves = [leg(trainer, plan, rates[4], a, b, 48) for a, b in ((0, 20), (20, 48))]
    assert halves[1] == losses[rates[4]], "what goes on is what runs through"
    with pytest.raises(ConfigError, match="a race of 8 rates"):
        trial.rate_race(trainer, plan, rates, time.monotonic(), Progress(trainer, here, {}))


def test_rates_that_fail_leave_the_race() -> None:
    legs = trial.race([1.0, 2.0, 4.0, 8.0], [4, 8], lambda rate, done, stop: math.inf if rate > 2 else abs(rate - 2.0))
    assert [(leg["rate"], leg["step"], leg["loss"]) for leg in legs] == [
        (1.0, 4, 1.0), (2.0, 4, 0.0), (4.0, 4, None), (8.0, 4, None), (1.0, 8, 1.0), (2.0, 8, 0.0)
    ]  # fmt: skip


# --- going on


class Cut(BaseException):
    """The end of a process."""


@pytest.mark.parametrize(("change", "every"), [("rename_file", 3), ("remove_file", 2), ("write_piece", 67)])
def test_a_race_that_was_killed_at_any_change_of_the_disk(
    here: Path, monkeypatch: pytest.MonkeyPatch, change: str, every: int
) -> None:
    """Legs that add up to a loss: each is run once, but for the one that was not stored yet."""
    trainer, plan = trial.assemble(parsed(train={"steps": 48}))
    (_, weight), *_, (_, moment) = trial.state_tensors(trainer)
    begin, rates, ran = Snapshot(trainer), [2.0**n for n in range(8)], list[tuple[float, int]]()

    def leg(trainer: Any, plan: Any, rate: float, done: int, stop: int, steps: int) -> float:
        for tensor in (weight, moment):
            tensor.add_(rate * (stop - done))
        ran.append((rate, stop))
        return abs(float((weight + moment.mean()).flatten()[0]) / stop - 18.0)

    monkeypatch.setattr(trial, "train_leg", leg)
    monkeypatch.setattr(trial, "_race_steps", lambda *_: 48)

    def raced(folder: str) -> dict[str, Any]:
        begin.restore()
        stored = progress(trainer, here / folder)
        result = trial.rate_race(trainer, plan, rates, math.inf, stored)
        stored.keep(result=result)
        return result

    whole, order = raced("whole"), [*ran]
    assert len(order) == 14 and whole["legs"][-1]["rate"] == 8.0
    for n in range(0, 1000, every):
        ran.clear()
        with monkeypatch.context() as patch:
            real, calls = getattr(files, change), iter(range(10**6))

            def ending(*args: Any, real: Any = real, calls: Any = calls, n: int = n) -> None:
                if next(calls) == n:
                    raise Cut
                real(*args)

            patch.setattr(files, change, ending)
            try:
                raced(f"cut-{n}")
                break
            except Cut:
                pass
        stored = progress(trainer, here / f"cut-{n}").values.get("legs", [])
        assert order[: len(stored)] == [(one["rate"], one["step"]) for one in stored]
        ran.clear()
        assert raced(f"cut-{n}") == whole and ran == order[len(stored) :]
        assert not [*(here / f"cut-{n}").glob(trial.STATES)]
    assert n > 5, "it was killed nowhere"


def test_draws_that_were_cut_off_go_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second of four steps, and again without time left."""
    monkeypatch.setattr(trial, "SAVING", math.inf)  # a state a step
    config = parsed(batch={"seq": 64, "tokens": 512, "micro_tokens": 64}, train={"steps": 4})

    def drawn(folder: str, until: float = math.inf) -> list[Draw]:
        trainer, plan = trial.assemble(config)
        return trial.noise_draws(trainer, plan, until, progress(trainer, here / folder))

    whole = drawn("whole")
    took, draw = list[int](), trial._draw

    def counted(trainer: Any, plan: Any, step: int, draws: Any) -> None:
        if step == 3 and took == [1, 2]:
            raise Cut
        took.append(step)
        draw(trainer, plan, step, draws)

    monkeypatch.setattr(trial, "_draw", counted)
    with pytest.raises(Cut):
        drawn("cut")
    took.append(0)
    assert drawn("cut") == whole and took == [1, 2, 0, 3, 4]
    assert drawn("cut", -math.inf) == whole and took == [1, 2, 0, 3, 4]
    with pytest.raises(ConfigError, match="1 steps with finite gradients"):
        drawn("late", -math.inf)
    trainer, _ = trial.assemble(config)
    trainer.fingerprints["data"] = "other"
    with pytest.raises(ConfigError, match="changed since: data"):
        progress(trainer, here / "cut")


# --- what is written


NOISE = {"noise": 3000.0, "squared": 2.0, "slots_per_term": 1.5, "running": [[1, None], [2, 2250.0]]}
LEGS = [{"rate": 5e-4, "step": 4, "loss": None}, {"rate": 1e-3, "step": 8, "loss": 2.0}, {"rate": 2e-3, "step": 8,
        "loss": 1.5}]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "result", "code", "expected"),
    [
        ("batch", NOISE, 0, "the gradient noise scale is 2,250 tokens: batch.tokens: 2304 (it was 512); then race"),
        ("batch", {**NOISE, "squared": -1.0}, 1, "the gradient cannot be separated from its noise"),
        ("lr", {"legs": LEGS, "steps": 16}, 0, "optim.lr: 0.002 (it was 0.001), held-out loss 1.5000 after 8 steps of"),
        ("lr", {"legs": LEGS[:1], "steps": 16}, 1, "no rate has a finite held-out loss"),
        ("lr", {"error": "killed by signal 9", "seconds": 1.0}, 1, "killed by signal 9"),
        ("lr", {"error": "asked", "refused": ["a", "b", "c"]}, 2, "asked: a"),
    ],
)
def test_a_number_is_written(
    call: Call, monkeypatch: pytest.MonkeyPatch, kind: str, result: Any, code: int, expected: str
) -> None:
    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "run_worker", lambda request, limit_s, module: requests.append(request) or result)
    changes = {"data": {"random": 64, "eval": 0.25}, "batch": {"seq": 64, "tokens": 512, "micro_tokens": 256}}
    put(Path("run.yaml"), document(**changes, **{"with": {"fused-loss": {}}}))
    found = call("tune", "run.yaml", f"--{kind}")
    assert found.code == code and expected in found.out + found.err, found
    request = parse_config(requests[0]["run"], "request")
    assert request.batch.micro_tokens == (64 if kind == "batch" else 256)
    assert requests[0]["rates"] == [1e-3 * 2.0**k for k in range(-4, 4)]
    written = Path(f"run.{kind}.yaml")
    assert written.exists() == (code == 0)
    if code == 0:
        after = parse_config(written.read_text(), "written")
        assert (after.batch.tokens, after.optim.lr) == ((2304, 1e-3) if kind == "batch" else (512, 2e-3))
        assert after.with_ == {"fused-loss": {}} and after.train.eval_every is None
        assert Path(f"run.{kind}/{kind}.png").stat().st_size > 1000 and "next: optrush train" in found.out


def test_a_number_that_was_cut_off_goes_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, an error and a budget that is over leave what was measured; other configurations and code are refused."""
    requests: list[dict[str, Any]] = []
    ends: Any = None

    def process(request: dict[str, Any], limit_s: float, module: str) -> Any:
        requests.append(request)
        Path(request["folder"], MEASURED).write_text(json.dumps(stored))
        if ends is None:
            raise SystemExit(143)
        return ends

    monkeypatch.setattr(runner, "run_worker", process)
    changes = {"data": {"random": 64, "eval": 0.25}, "batch": {"seq": 64, "tokens": 512, "micro_tokens": 256}}
    put(Path("run.yaml"), document(**changes))
    stored: dict[str, Any] = {"spent_s": 400.0, "states": {}, "step": 3, "draws": [], "whole": False, "result": None}
    stopped = call("tune", "run.yaml", "--batch")
    assert stopped.code == 143 and "the same command goes on" in stopped.err, stopped
    ends = NOISE
    stored |= {"spent_s": 650.0, "result": NOISE}
    assert call("tune", "run.yaml", "--batch").code == 0
    assert [(r["budget_s"], r["measured"].get("step")) for r in requests] == [(600.0, None), (200.0, 3)]
    again = call("tune", "run.yaml", "--batch")
    assert again.code == 0 and "noise scale is 2,250 tokens" in again.out and len(requests) == 2, "the budget is over"
    assert call("tune", "run.yaml", "--batch", "--budget", "1h").code == 0 and requests[2]["budget_s"] == 2950.0
    other = call("tune", "run.yaml", "--batch", "--set", "optim.lr=1e-4")
    assert other.code == 2 and "they are of another configuration" in other.err
    assert call("tune", "run.yaml", "--lr", "--out", "run.batch.yaml").code == 2
    ends = {"error": "asked", "refused": ["too few", "b", "c"]}
    assert call("tune", "run.yaml", "--batch", "--budget", "2h").code == 2 and Path("run.batch/tune.json").exists()
    for name, text, why in (
        (MEASURED, json.dumps({**stored, "states": {"3": {}}}), "measured.json is damaged"),
        ("tune.json", Path("run.batch/tune.json").read_text().replace('"digest": "', '"digest": "0'), "has changed"),
        ("tune.json", "{", "tune.json is damaged"),
    ):
        Path("run.batch", name).write_text(text)
        found = call("tune", "run.yaml", "--batch")
        assert found.code == 2 and why in found.err and "delete that folder" in found.err, found
    assert len(requests) == 4
    stored = {"spent_s": 1.0, "states": {}}
    assert call("tune", "run.yaml", "--lr").code == 2 and not Path("run.lr").exists(), "nothing was measured"

    def beside(request: dict[str, Any], limit_s: float, module: str) -> Any:
        for name in ("notes.txt", "state-0.safetensors", MEASURED):
            Path(request["folder"], name).write_text(json.dumps(stored))
        return ends

    monkeypatch.setattr(runner, "run_worker", beside)
    assert call("tune", "run.yaml", "--lr").code == 2
    assert [path.name for path in Path("run.lr").iterdir()] == ["notes.txt"], "a file of others stays"
    Path("run.lr/tune.json").write_text('{"config": "", "ranks": 1, "rungs": []}')
    other = call("tune", "run.yaml", "--lr")
    assert other.code == 2 and "they are of another configuration" in other.err
    other = call("tune", "run.yaml", "--out", "run.batch.yaml")
    assert other.code == 2 and "tune.json is damaged" in other.err, "as it was left above"


def test_what_was_measured_on_other_data_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_worker", lambda request, limit_s, module: _stored_by(request))
    rows = [json.dumps({"prompt": f"{n} plus 1 is", "completion": str(n + 1)}) for n in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    put(Path("run.yaml"), document(objective="sft", data={"path": "rows.jsonl"}))
    assert call("tune", "run.yaml", "--batch").code == 0
    Path("rows.jsonl").write_text("\n".join([*rows, rows[0]]) + "\n")
    again = call("tune", "run.yaml", "--batch")
    assert again.code == 2 and "the data has changed" in again.err and "rows.jsonl" in again.err, again
    speeds = call("tune", "run.yaml", "--out", "run.batch.yaml")
    assert speeds.code == 2 and "they are of `tune --batch`" in speeds.err, speeds


def _stored_by(request: dict[str, Any]) -> dict[str, Any]:
    stored = {"spent_s": 700.0, "states": {}, "step": 3, "draws": [], "whole": True, "result": NOISE}
    Path(request["folder"], MEASURED).write_text(json.dumps(stored))
    return NOISE


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lr"], "no `data.eval`: rates race for the least held-out loss"),
        (["--lr", "--batch"], "--batch with --lr"),
        (["--batch", "--dry-run"], "--batch with --dry-run"),
        (["--lr", "--ranks", "2"], "--lr with --ranks 2"),
    ],
)
def test_refusals_of_numbers(call: Call, flags: list[str], expected: str) -> None:
    found = call("tune", "run.yaml", *flags)
    assert found.code == 2 and expected in found.err, found.err
