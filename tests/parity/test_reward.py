"""`objective: reward` against transformers' sequence classifier in float64: losses, gradients, scores, files.

The oracle sees documents one at a time; ours see them packed or not, on one rank and two.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_dpo import PER_STEP, documents, dpo_run, filled_box, order
from transformers import AutoModelForSequenceClassification

from meshes import further
from optrush.config import Config, dump_config
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.exporting import export_run, write_model
from optrush.models.hf import load_plain
from optrush.objectives import FIGURES
from optrush.objectives.reward import last_scores
from optrush.trainer import run as fit

from trials import apart, assembled, published, steps

# PEFT's own.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CLOSE = 1e-5
SETTINGS = {"margin": 0.2, "center": 0.01}


@pytest.fixture(scope="module")
def folder(box):
    return filled_box(box)


def reward_run(box: Path, *, settings: dict[str, Any] | None = None, **how: Any) -> Config:
    changes = {"dpo": None, "objective": "reward", "reward": SETTINGS if settings is None else settings}
    config = dpo_run(box, **{"model": "moved", **how})
    return Config.model_validate({**config.model_dump(by_alias=True), **changes})


def job_of(box: Path, **how: Any):
    """The first step's job, its head larger than it begins."""
    job = assembled(reward_run(box, **how))
    with torch.no_grad():
        weight = torch.randn(job.model.head.weight.shape, generator=torch.Generator().manual_seed(4)) * 0.3
        next(t for t in job.trained if t.name == "head.weight").local.copy_(weight)
    return job


def oracle(box: Path, name: str = "moved"):
    model = AutoModelForSequenceClassification.from_pretrained(box / name, num_labels=1, attn_implementation="eager")
    with torch.no_grad():
        drawn = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(4))
        model.score.weight.copy_(drawn * 0.3)
    model.config.pad_token_id = None
    return model


def wanted(box: Path) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and rewards of the first step in float64."""
    model, made = oracle(box).double(), documents(box)
    loss, rewards = 0.0, [0.0] * 4
    for i in order()[0]:
        chosen, rejected = (
            model(input_ids=ids[None], use_cache=False).logits[0, 0] for ids, _ in made[2 * i : 2 * i + 2]
        )
        one = -torch.log(torch.sigmoid(chosen - rejected - SETTINGS["margin"]))
        one = (one + SETTINGS["center"] * (chosen + rejected) ** 2) / PER_STEP
        one.backward()
        loss += one.item()
        values = (chosen.item(), rejected.item(), (chosen > rejected).item(), (chosen - rejected).item())
        rewards = [old + value / PER_STEP for old, value in zip(rewards, values, strict=True)]
    return loss, {name: p.grad.float() for name, p in model.named_parameters()}, rewards


def ours(box: Path, how: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    trainer = job_of(box, **how)
    loss, grads = published(trainer)
    return loss, grads, [trainer.all_reduce(trainer.metrics[name]).item() / PER_STEP for name in FIGURES]


def agrees(box: Path, found: tuple[float, dict[str, torch.Tensor], list[float]]) -> None:
    loss, grads, rewards = wanted(box)
    assert found[0] == pytest.approx(loss, rel=CLOSE) and found[2] == pytest.approx(rewards, rel=CLOSE)
    assert grads.keys() == found[1].keys()
    for name, g in grads.items():
        assert apart(found[1][name], g) < CLOSE, name


@pytest.mark.parametrize("how", further([
    {"rows": 2}, {"packed": True, "rows": 2, "attention": {}},
    {"rows": 4, "sets": ["model.implementation=transformers"]}, {"rows": 8}, {"rows": 8, "pad": {}},
], 3), ids=["micro", "packed", "transformers", "padded", "narrow"])  # fmt: skip
def test_losses_rewards_and_gradients_are_the_formula(folder, how):
    agrees(folder, ours(folder, how))


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_ranks(folder, pair, data):
    for found in pair(ours, folder, {"packed": True, "rows": 1, data: {}}):
        assert found[0] == pytest.approx(wanted(folder)[0], rel=CLOSE)


def test_the_formula_is_trls(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import RewardTrainer
    scores = torch.tensor([1.5, -0.2, 0.4, 0.7, 0.1, -1.0], dtype=torch.float64)
    model: Any = lambda **inputs: SimpleNamespace(logits=scores[:, None])
    model.training = False
    same = SimpleNamespace(gather=lambda t: t, gather_for_metrics=lambda t: t)
    lists: Any = {"eval": {k: [] for k in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}}
    trainer = SimpleNamespace(
        model=model, args=SimpleNamespace(center_rewards_coefficient=0.01), accelerator=same, _metrics=lists,
        _total_train_tokens=0,
    )  # fmt: skip
    loss = RewardTrainer.compute_loss(trainer, model, {"margin": torch.full((3,), 0.2)})
    chosen, rejected = scores.chunk(2)
    want = -torch.log(torch.sigmoid(chosen - rejected - 0.2)) + 0.01 * (chosen + rejected) ** 2
    assert loss.item() == pytest.approx(want.mean().item())


@pytest.mark.parametrize(
    ("implementation", "adapter"),
    further([("native", True), ("transformers", False), ("native", False), ("transformers", True)], 2),
)
def test_transformers_gives_the_same_scores(folder, tmp_path, implementation, adapter):
    """Of what a run leaves: the model, and of an adapter PEFT's files, with the head in them."""
    with_ = {"lora": {"rank": 4}} if adapter else {}
    sets = [f"model.implementation={implementation}"]
    config = reward_run(folder, packed=implementation == "native", sets=sets, **with_)
    job = assembled(config)
    assert "head.weight" in {t.name for t in job.trained}
    list(steps(job, 2))
    (tmp_path / "run.yaml").write_text(dump_config(config))
    model = AutoModelForSequenceClassification.from_pretrained(write_model(job, tmp_path, 2, folder / "moved")).eval()
    assert model.config.num_labels == 1 and type(model).__name__ == "LlamaForSequenceClassification"
    models = [model]
    if adapter:
        base = AutoModelForSequenceClassification.from_pretrained(folder / "moved", num_labels=1)
        models.append(PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    batch = next(job.batches)[0]
    job.model.eval()
    with torch.no_grad():
        hidden = job.model(batch.tokens, batch.positions, batch.documents)
        found = last_scores(job.model.head(hidden, batch.labels, reduce="token"), job.model.head.pad, batch)
        for n, i in enumerate(batch.rows[0].samples):
            for side, document in enumerate(job.sources.train.documents(i)):
                for theirs in models:
                    score = theirs(input_ids=torch.tensor(document.ids[None].astype("int64"))).logits[0, 0]
                    assert found[0, n, side].item() == pytest.approx(score.item(), rel=1e-4, abs=2e-6)


def test_a_run_is_exported_and_not_chatted_with(folder, tmp_path):
    config = reward_run(
        folder, packed=True, settings={}, lora={"rank": 4}, sets=[f"output={tmp_path}/run", "train.save_every=2"]
    )
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    done = export_run(tmp_path / "run", tmp_path / "out")
    assert done.compared is not None and done.compared.sound
    with pytest.raises(NeedsError, match="scores texts"):
        load_plain(tmp_path / "out", None, torch.device("cpu"))


def test_the_padding_token_ends_no_text(folder):
    """transformers scores the last token that is not the padding's."""
    batch = next(assembled(reward_run(folder, rows=8)).batches)[0]
    pad = int(batch.tokens[0][batch.documents.ids[0] == 0][-1])
    places = torch.arange(batch.tokens.shape[1]).float().expand(batch.tokens.shape)
    last = last_scores(places, pad, batch)
    for b in range(len(batch.rows)):
        for side in range(2):
            ids = (batch.documents.ids[b] == side).nonzero().flatten()
            assert last[b, 0, side] == max(i for i in ids if batch.tokens[b, i] != pad)


def test_the_padding_token_is_the_models(folder, tmp_path):
    model = shutil.copytree(folder / "moved", tmp_path / "model")
    (model / "config.json").write_text(
        json.dumps({**json.loads((model / "config.json").read_text()), "pad_token_id": 5})
    )
    assert assembled(reward_run(folder, sets=[f"model.path={model}"])).model.head.pad == 5


def test_refused(folder):
    with pytest.raises(NeedsError, match="over the vocabulary"):
        decide(reward_run(folder, fused_loss={}))
