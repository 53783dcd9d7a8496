"""The gradient noise scale against float64, the race of learning rates against a grid, and what is written of both."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from optrush.benchmark import runner, trial
from optrush.benchmark.trial import Draw, States
from optrush.benchmark.tune import RATES
from optrush.config import parse_config
from optrush.errors import ConfigError
from optrush.trainer.run import batches

import toy
from toy import document, parsed, put


def test_the_noise_scale_is_that_of_float64(here):
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
    draws = trial.noise_draws(trainer, plan, math.inf)
    noise, squared = trial.noise_scale(draws[:1])
    assert len(draws) == 4 and len(window) == 8 and draws[0].terms == 8 * terms
    assert noise == pytest.approx(float(variance) * terms, rel=1e-4)
    assert squared == pytest.approx(float(mean.square().sum() - variance / len(window)), rel=1e-4)


def test_micro_batches_of_unequal_terms():
    """|g|^2 = |G|^2 + S / terms exactly, of one to eight terms: both come back."""
    sizes = range(1, 9)
    inverse = sum(1 / n for n in sizes) / 8
    draw = Draw(1, 5.0 + 40.0 * inverse, 5.0 + 40.0 / sum(sizes), inverse, sum(sizes), 64)
    assert trial.noise_scale([draw, draw]) == pytest.approx((40.0, 5.0))
    assert trial.noise_result([draw])["running"] == [[1, pytest.approx(8.0 * 64 / 36)]]


# --- the race


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
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
def test_the_race_finds_the_rate_of_a_grid(counted, here, monkeypatch):
    """Within 1 % of the best held-out loss of all rates, each trained to the end, at a quarter of their steps."""
    trainer, plan = trial.assemble(counted)
    rates = [2e-3 * factor for factor in RATES]
    leg, took = trial.train_leg, list[int]()
    states = States(trainer, here / "states")

    def noted(trainer, plan, rate, done, stop, steps):
        took.append(stop - done)
        return leg(trainer, plan, rate, done, stop, steps)

    monkeypatch.setattr(trial, "train_leg", noted)
    found = trial.rate_race(trainer, plan, rates, time.monotonic() + 1e6, states)
    assert found["steps"] == 48 and sum(took[1:]) == 48 * len(rates) / 4, "the first two steps are timed"
    losses = {}
    for rate in rates:
        states.restore("begin")
        losses[rate] = leg(trainer, plan, rate, 0, 48, 48)
    picked = found["legs"][-1]["rate"]
    assert losses[picked] <= 1.01 * min(losses.values()) < 0.9 * max(losses.values()), (picked, losses)
    states.restore("begin")
    leg(trainer, plan, rates[4], 0, 20, 48)
    states.save("half")
    leg(trainer, plan, rates[0], 0, 4, 48)
    states.restore("half")
    assert leg(trainer, plan, rates[4], 20, 48, 48) == losses[rates[4]], "what goes on is what runs through"
    with pytest.raises(ConfigError, match="a race of 8 rates"):
        trial.rate_race(trainer, plan, rates, time.monotonic(), states)


def test_rates_that_fail_leave_the_race():
    legs = trial.race([1.0, 2.0, 4.0, 8.0], [4, 8], lambda rate, done, stop: math.inf if rate > 2 else abs(rate - 2.0))
    assert [(leg["rate"], leg["step"], leg["loss"]) for leg in legs] == [
        (1.0, 4, 1.0), (2.0, 4, 0.0), (4.0, 4, None), (8.0, 4, None), (1.0, 8, 1.0), (2.0, 8, 0.0)
    ]  # fmt: skip


# --- what is written


NOISE = {"noise": 3000.0, "squared": 2.0, "slots_per_term": 1.5, "running": [[1, None], [2, 2250.0]]}
LEGS = [{"rate": 5e-4, "step": 4, "loss": None}, {"rate": 1e-3, "step": 8, "loss": 2.0}, {"rate": 2e-3, "step": 8,
        "loss": 1.5}]  # fmt: skip


@pytest.mark.parametrize(("kind", "result", "code", "expected"), [
    ("batch", NOISE, 0, "the gradient noise scale is 2,250 tokens: batch.tokens: 2304 (it was 512); then race"),
    ("batch", {**NOISE, "squared": -1.0}, 1, "the gradient cannot be separated from its noise"),
    ("lr", {"legs": LEGS, "steps": 16}, 0, "optim.lr: 0.002 (it was 0.001), held-out loss 1.5000 after 8 steps of"),
    ("lr", {"legs": LEGS[:1], "steps": 16}, 1, "no rate has a finite held-out loss"),
    ("lr", {"error": "killed by signal 9", "seconds": 1.0}, 1, "killed by signal 9"),
    ("lr", {"error": "asked", "refused": ["a", "b", "c"]}, 2, "asked: a"),
])  # fmt: skip
def test_a_number_is_written(call, monkeypatch, kind, result, code, expected):
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


def test_the_folder_of_a_number(call, monkeypatch):
    """States that a killed process left are removed; files of others stay, and refuse the folder."""
    monkeypatch.setattr(runner, "run_worker", lambda request, limit_s, module: NOISE)
    put(Path("run.yaml"), document(data={"random": 64}, batch={"seq": 64, "tokens": 512, "micro_tokens": 256}))
    (left := Path("run.batch/states/begin")).parent.mkdir(parents=True)
    left.write_text("")
    assert call("tune", "run.yaml", "--batch").code == call("tune", "run.yaml", "--batch").code == 0
    assert sorted(p.name for p in Path("run.batch").iterdir() if p.name[0] != ".") == ["batch.json", "batch.png"]
    Path("run.batch/notes.txt").write_text("")
    refused = call("tune", "run.yaml", "--batch")
    assert refused.code == 2 and "exists and has other files" in refused.err


@pytest.mark.parametrize(("flags", "expected"), [
    (["--lr"], "no `data.eval`: rates compete for the lowest held-out loss"),
    (["--lr", "--batch"], "--batch with --lr"), (["--batch", "--dry-run"], "--batch with --dry-run"),
    (["--lr", "--ranks", "2"], "--lr with --ranks 2"),
])  # fmt: skip
def test_refusals_of_numbers(call, flags, expected):
    found = call("tune", "run.yaml", *flags)
    assert found.code == 2 and expected in found.err, found.err
