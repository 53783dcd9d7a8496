"""`objective: dpo` against TRL's trainer and against plain transformers: losses, rewards, gradients, and every cutting.

TRL gets our token ids on a padded batch. The steps of a run are compared with a list made here by transformers and
torch.optim, documents one at a time; on two ranks, packed or not, in one micro-batch or several.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from meshes import further
from optrush.config import Config, parse_config
from optrush.decide import decide
from optrush.trainer import dpo_reference
from optrush.trainer.trainer import Trainer

from golden import make_golden
from golden.make_golden import SEED, T
from trials import apart, assembled, metrics, published, whole

PAIRS, PER_STEP, STEPS = 32, 8, 4
LR, BETA = 3e-3, 0.3
CLOSE = 1e-5  # relative; rewards are sums of a dozen tokens, whose rounding is theirs
FIGURES = ("rewards_chosen", "rewards_rejected", "reward_accuracy", "reward_margin")


def write_pairs(path: Path) -> Path:
    """32 pairs of two documents of 17 to 24 tokens each: a row of T = 48 holds one pair, one of 96 two."""
    draw = np.random.RandomState(7)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in draw.randint(0, 73, n))

    rows = []
    for i in range(PAIRS):
        asked = 3 + i % 7
        rows.append({"prompt": [{"role": "user", "content": words(asked)}]})
        for side in ("chosen", "rejected"):
            n = 17 + draw.randint(0, 8)
            rows[-1][side] = [{"role": "assistant", "content": words(n - 5 - asked)}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(box):
    return filled_box(box)


def filled_box(box: Path) -> Path:
    """The golden folder with pairs.jsonl, and `moved`, the untied model after some training it never had."""
    write_pairs(box / "pairs.jsonl")
    model = make_golden.open_model(box / "untied")
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    model.save_pretrained(box / "moved")
    AutoTokenizer.from_pretrained(box / "untied").save_pretrained(box / "moved")
    return box


def dpo_run(box, *, rows=1, packed=False, sets=(), model="untied", **with_):
    """rows: of one micro-batch of one rank; packed: 4 rows of 96 a step instead of 8 of 48."""
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    if packed:
        with_["packing"] = {"window": PER_STEP}  # a step's pairs share its rows, and no other's
    seq = 2 * T if packed else T
    document = {
        "model": str(box / model), "objective": "dpo", "dpo": {"beta": BETA, "label_smoothing": 0.1},
        "data": {"path": str(box / "pairs.jsonl"), "cache": str(box / "cache")},
        "batch": {"seq": seq, "tokens": T * PER_STEP, "micro_tokens": seq * rows},
        "optim": {"lr": LR, "warmup": 0, "schedule": "constant", "betas": [0.9, 0.95], "clip": 1.0},
        "train": {"steps": STEPS, "log_every": 1}, "seed": SEED, "output": str(box / "dpo"), "with": with_,
    }  # fmt: skip
    return parse_config(yaml.safe_dump(document), "dpo.yaml", sets)


def filled(config: Config) -> Trainer:
    prepared = decide(config)
    job = assembled(prepared)
    dpo_reference.fill_reference(job, prepared)
    return job


def documents(box: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, which are targets) of chosen and rejected in turn, as transformers itself tokenises and masks."""
    tokenizer = AutoTokenizer.from_pretrained(box / "untied")
    found = []
    for row in map(json.loads, (box / "pairs.jsonl").read_text().splitlines()):
        for side in ("chosen", "rejected"):
            turns = row["prompt"] + row[side]
            both = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
            found.append((torch.tensor(both["input_ids"]), torch.tensor(both["assistant_masks"], dtype=torch.bool)))
    return found


def order() -> list[list[int]]:
    raw = np.random.PCG64(np.random.SeedSequence([SEED, 0])).random_raw(PAIRS)
    line = np.argsort(raw, kind="stable").tolist()
    return [line[first : first + PER_STEP] for first in range(0, PAIRS, PER_STEP)]


# --- TRL


@pytest.fixture(scope="module")
def trainer(folder):
    return trls(folder, torch.device("cpu"))


def trls(folder: Path, device: torch.device) -> Any:
    """TRL's trainer on a device, whose policy is `moved` and whose reference is `untied`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        settings = DPOConfig(
            output_dir=str(folder / "trl"), beta=BETA, report_to=[], use_cpu=device.type == "cpu", bf16=False,
            gradient_checkpointing=False, disable_tqdm=True,
        )  # fmt: skip
        return DPOTrainer(
            model=make_golden.open_model(folder / "moved"), ref_model=make_golden.open_model(folder / "untied"),
            args=settings, processing_class=AutoTokenizer.from_pretrained(folder / "untied"),
            train_dataset=Dataset.from_list([{"prompt": "w1 ", "chosen": "w2", "rejected": "w3"}]),
        )  # fmt: skip


def theirs(trainer: Any, box: Path, chosen: Sequence[int], swapped: bool = False) -> tuple[float, dict[str, Any], Any]:
    """Loss, gradients and metrics of some pairs by TRL: chosen documents first, then rejected ones, padded."""
    made, sides = documents(box), (1, 0) if swapped else (0, 1)
    picked = [made[2 * i + side] for side in sides for i in chosen]
    width = max(len(ids) for ids, _ in picked)
    columns = [torch.stack([F.pad(t.long(), (0, width - len(t))) for t in part]) for part in zip(*picked)]
    seen = torch.stack([F.pad(torch.ones(len(ids)), (0, width - len(ids))) for ids, _ in picked]).long()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = {"input_ids": columns[0], "completion_mask": columns[1], "attention_mask": seen}
        inputs = {name: t.to(trainer.model.device) for name, t in inputs.items()}
        loss = trainer.compute_loss(trainer.model.train(), inputs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return loss.item(), grads, trainer._metrics["train"]


@pytest.mark.parametrize(("loss", "smoothing", "packed"), further([
    ("sigmoid", 0.0, True), ("sigmoid", 0.1, False), ("ipo", 0.0, True), ("sigmoid", 0.0, False),
    ("sigmoid", 0.1, True), ("ipo", 0.0, False),
], 3))  # fmt: skip
def test_losses_rewards_and_gradients_are_trls(folder, trainer, loss, smoothing, packed):
    agrees_with_trl(folder, trainer, loss, smoothing, packed)


def agrees_with_trl(folder: Path, trainer: Any, loss: str, smoothing: float, packed: bool, **with_: Any) -> None:
    """Smoothing is not in TRL's sigmoid: but it is the mean of both ways round, which TRL is asked for one by one."""
    sets = [f"dpo.loss={loss}", f"dpo.label_smoothing={smoothing}"]
    job = filled(dpo_run(folder, model="moved", packed=packed, rows=2, sets=sets, **with_))
    job.stream.reference = filled(dpo_run(folder, packed=packed, sets=sets)).stream.reference
    ours, found = published(job)
    trainer.loss_types = [loss]
    want, grads, said = theirs(trainer, folder, order()[0])
    if smoothing:
        other, back, _ = theirs(trainer, folder, order()[0], swapped=True)
        want = (1 - smoothing) * want + smoothing * other
        grads = {name: (1 - smoothing) * g + smoothing * back[name] for name, g in grads.items()}
        said = theirs(trainer, folder, order()[0])[2]
    assert ours == pytest.approx(want, rel=CLOSE) and abs(want - math.log(2)) > 0.005
    assert grads.keys() == found.keys()
    for name, g in grads.items():
        assert apart(found[name], g) < CLOSE, name
    means = {name: figure.item() / PER_STEP for name, figure in job.metrics.items()}
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
    for name, of_trl in zip(FIGURES, names, strict=True):
        assert means[name] == pytest.approx(said[of_trl][0], abs=2e-5), name
    assert 0 < means["reward_accuracy"] < 1


# --- a run, however it is cut


@cache
def golden(box: Path, loss: str = "sigmoid") -> list[dict[str, float]]:
    """The steps of the run by transformers and torch.optim, documents one at a time; log-probabilities in float32."""
    policy, made = make_golden.open_model(box / "untied"), documents(box)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def log_probability(i: int) -> torch.Tensor:
        ids, learnt = made[i]
        logits = policy(input_ids=ids[None], use_cache=False).logits[0]
        return -cross_entropy(logits[:-1].float(), ids[1:], reduction="none")[learnt[1:]].sum()

    with torch.no_grad():
        known = [log_probability(i).item() for i in range(2 * PAIRS)]
    lines = []
    for chosen in order():
        policy.zero_grad()
        said = dict.fromkeys(("loss", *FIGURES), 0.0)
        for i in chosen:
            good, bad = (log_probability(2 * i + side) - known[2 * i + side] for side in (0, 1))
            z = BETA * (good - bad)
            one = -0.9 * F.logsigmoid(z) - 0.1 * F.logsigmoid(-z)
            if loss == "ipo":
                n, m = (int(made[2 * i + side][1].sum()) for side in (0, 1))
                one = (good / n - bad / m - 1 / (2 * BETA)) ** 2
            (one / PER_STEP).backward()
            values = (one, BETA * good, BETA * bad, z > 0, z)
            said = {k: old + v.item() / PER_STEP for (k, old), v in zip(said.items(), values, strict=True)}
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in policy.parameters()))
        for p in policy.parameters():
            p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
        lines.append({"grad_norm": norm, **said})
    return lines


def play(box: Path, sets: Sequence[str], packed: bool, rows: int, with_: dict[str, Any]) -> list[dict[str, Any]]:
    return metrics(dpo_run(box, sets=sets, packed=packed, rows=rows, **with_))


def agrees(box: Path, lines: list[dict[str, Any]], loss: str = "sigmoid") -> None:
    lines = [line for line in lines if "loss" in line]
    assert len(lines) == STEPS
    for line, want in zip(lines, golden(box, loss), strict=True):
        for key, value in want.items():
            if key == "reward_accuracy" and line["step"] == 1:
                continue  # both models are one, and rounding decides
            assert line[key] == pytest.approx(value, rel=CLOSE, abs=5e-5 if "reward" in key else 0), (line["step"], key)


@pytest.mark.parametrize(("packed", "rows"), further([(True, 4), (False, 2), (False, 8), (True, 1)], 1))
def test_every_cutting_is_the_same_run(folder, packed, rows):
    agrees(folder, play(folder, [], packed, rows, {}))


@pytest.mark.parametrize(
    ("packed", "rows", "data"), further([(False, 2, "fsdp"), (True, 1, "ddp"), (False, 1, "ddp")], 1)
)
def test_two_ranks(folder, pair, packed, rows, data):
    """With another cache, in which nothing is: each rank makes the reference of half of the pairs, both get all."""
    shutil.rmtree(folder / "other", ignore_errors=True)
    agrees(folder, pair(play, folder, [f"data.cache={folder}/other"], packed, rows, {data: {}})[0])
    kept = [np.load(path) for path in (folder / "other" / "reference").glob("*.npy")]
    assert len(kept) == 1 and kept[0].shape == (PAIRS, 2) and (kept[0] < -1).all()


@pytest.mark.parametrize(
    "with_", further([{"fused-loss": {"chunk": 5}}, {"sort-by-length": {}}, {"attention": {}}, {"pad": {}}], 1)
)
def test_one_technique_at_a_time(folder, with_):
    lines = play(folder, [], False, 8, with_)
    if "sort-by-length" in with_:  # other pairs a step: all of the epoch's, in the end
        assert sum(m["target_tokens"] for m in lines) == sum(int(learnt.sum()) for _, learnt in documents(folder))
    else:
        agrees(folder, lines)


@pytest.mark.slow
def test_ipo(folder):
    sets = ["dpo.loss=ipo", "dpo.label_smoothing=0"]
    agrees(folder, play(folder, sets, True, 2, {}), "ipo")


# --- the reference


def test_an_adapter_is_its_own_reference(folder):
    """With the adapter off, asked in every step, against log-probabilities made before: the same four steps."""
    runs = [
        play(folder, [f"dpo.reference={how}", "optim.lr=3e-2"], True, 2, {"lora": {"rank": 4}})
        for how in ("adapter", "precomputed")
    ]
    for one, other in zip(*runs, strict=True):
        for key in ("loss", "grad_norm", *(FIGURES if one["step"] > 1 else ())):
            assert one[key] == pytest.approx(other[key], rel=2e-5, abs=5e-5), (one["step"], key)
    assert abs(runs[0][-1]["reward_margin"]) > 0.1, "it moves"
    trainer = filled(dpo_run(folder, lora={"rank": 4}))
    assert trainer.stream.reference is None, "auto takes the adapter"


def test_the_reference_is_asked_without_dropout(folder):
    """A model in training mode while the reference is made would give it away: its log-probabilities at step 1."""
    trainer = filled(dpo_run(folder, sets=["dpo.reference=adapter"], lora={"rank": 4, "dropout": 0.5}))
    modes = []
    trainer.model.norm.register_forward_hook(lambda module, inputs, out: modes.append(module.training))
    batches = next(trainer.batches)
    trainer.set_step(1)
    trainer.forward_backward(batches, PER_STEP)
    assert modes == [False, True] * len(batches) and trainer.model.training
    assert trainer.metrics["reward_accuracy"].item() == 0, "at step 1 both are the same model, bit by bit"


def test_what_was_found_is_kept_and_found_again(folder, tmp_path, monkeypatch):
    sets = [f"data.cache={tmp_path}"]
    first = filled(dpo_run(folder, sets=sets)).stream.reference
    (path,) = (tmp_path / "reference").iterdir()
    passes = []
    real = dpo_reference.passed
    monkeypatch.setattr(dpo_reference, "passed", lambda *args: passes.append(args) or real(*args))
    assert np.array_equal(filled(dpo_run(folder, sets=[*sets, "dpo.beta=2", "optim.lr=1"])).stream.reference, first)
    assert not passes, "neither beta nor the rate has to do with it"
    filled(dpo_run(folder, sets=sets, model="moved"))
    filled(dpo_run(folder, sets=sets, amp={}))
    assert len(passes) == 2, "another model, another precision"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert np.array_equal(filled(dpo_run(folder, sets=sets)).stream.reference, first) and len(passes) == 3


def test_an_adapter_that_has_learnt_before_is_another_reference(folder, tmp_path):
    """Its values are part of the key, wherever they came from."""
    config = dpo_run(folder, sets=[f"data.cache={tmp_path}", "dpo.reference=precomputed"], lora={"rank": 4})
    first = filled(config).stream.reference
    prepared = decide(config)
    job = assembled(prepared)
    for t in job.trained:
        t.local.add_(0.1)
    dpo_reference.fill_reference(job, prepared)
    assert np.abs(job.stream.reference - first).max() > 0.1


def test_a_resumed_run_has_the_reference_it_began_with(folder, tmp_path):
    """Also where what was kept is gone: it is made of the model as it was, not of the checkpoint."""
    from optrush.trainer import run as fit

    sets = [f"data.cache={tmp_path}/cache", f"output={tmp_path}/out", "train.save_every=2"]
    config = dpo_run(folder, rows=8, sets=sets)
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    for path in (tmp_path / "cache" / "reference").iterdir():
        path.unlink()
    assert fit.run(fit.RunRequest(decide(config), tmp_path / "out" / "checkpoints" / "step-000002")).code == 0
    again = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    for before, after in zip(map(json.loads, lines), map(json.loads, again), strict=True):
        for key in ("loss", "grad_norm", *FIGURES) if "loss" in before else ():
            assert before[key] == after[key], (before["step"], key)


def test_the_head_may_be_cut_over_ranks_while_the_reference_is_made(folder, pair):
    alone = filled(dpo_run(folder)).stream.reference
    for found in pair(shared_reference, folder):
        assert np.abs(found - alone).max() < 1e-4 and np.abs(alone).max() > 1


def shared_reference(box: Path) -> np.ndarray:
    return filled(dpo_run(box, sets=[f"data.cache={box}/sharded"], fsdp={})).stream.reference


def test_the_weights_are_the_models(folder):
    """The pass over the pairs changes nothing of what is trained."""
    job = assembled(decide(dpo_run(folder)))
    before = {t.name: whole(t.parameter.detach()).clone() for t in job.trained}
    dpo_reference.fill_reference(job, decide(dpo_run(folder, sets=[f"data.cache={folder}/third"])))
    assert all(torch.equal(before[t.name], t.parameter) for t in job.trained)
