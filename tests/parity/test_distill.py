"""`objective: distill` against the formula in float64: losses, gradients, both divergences, every cutting."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush.config import Config
from optrush.errors import ConfigError, NeedsError
from optrush.objectives import LESSONS
from optrush.planner import search
from optrush.resolve import check_teacher, resolve
from optrush.technique import Part
from optrush.trainer import run as fit
from optrush.trainer.trainer import evaluate

from golden import make_golden
from golden.make_golden import CASES
from trials import apart, assembled, golden_run, published, steps

CLOSE = 1e-5
BLENDS = {
    "forward": {"temperature": 2.0, "alpha": 0.3},
    "reverse": {"divergence": "reverse", "temperature": 0.7, "alpha": 0.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(box: Path) -> Path:
    """The golden folder with `teacher`, wider, of one block, and with rows of its embedding that no token has."""
    config = AutoConfig.from_pretrained(box / "untied")
    config.hidden_size, config.num_hidden_layers, config.head_dim = 48, 1, 12
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.vocab_size += 5
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(box / "teacher")
    AutoTokenizer.from_pretrained(box / "untied").save_pretrained(box / "teacher")
    return box


def distill_run(
    box: Path, blend: str = "forward", teacher: str = "teacher", case: str = "untied", **how: Any
) -> Config:
    config = golden_run(box, CASES[case], **how)
    settings = {"teacher": str(box / teacher), "dtype": "float32", "chunk": 17, **BLENDS[blend]}
    changed = {"objective": "distill", "distill": settings}
    return Config.model_validate({**config.model_dump(by_alias=True), **changed})


@cache
def wanted(box: Path, case: str, blend: str) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and metrics of the first step in float64, documents one at a time."""
    of = {"divergence": "forward", **BLENDS[blend]}
    folder, path = make_golden.places(box, CASES[case])
    student = make_golden.open_model(folder).double()
    teacher = AutoModelForCausalLM.from_pretrained(box / "teacher", attn_implementation="eager").double()
    made = make_golden.read_documents(folder, path)
    chosen, tau = next(make_golden.order()), of["temperature"]
    V, total, terms, sums = student.config.vocab_size, 0.0, 0, [0.0, 0.0]
    losses = []
    for i in chosen:
        ids, targets = made[i]
        learnt = targets[1:]
        y = student(input_ids=ids[None], use_cache=False).logits[0, :-1][learnt]
        with torch.no_grad():
            t = teacher(input_ids=ids[None], use_cache=False).logits[0, :-1, :V][learnt]
        labels = ids[1:][learnt]
        log_p, log_q = (y / tau).log_softmax(-1), (t / tau).log_softmax(-1)
        one, other = (log_q, log_p) if of["divergence"] == "forward" else (log_p, log_q)
        kl = (one.exp() * (one - other)).sum(-1)
        ce = -y.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        losses.append(((1 - of["alpha"]) * tau**2 * kl + of["alpha"] * ce).sum())
        terms += len(kl)
        sums = [sums[0] + kl.sum().item(), sums[1] + ce.sum().item()]
    for one in losses:
        (one / terms).backward()
        total += one.item() / terms
    return total, {n: p.grad.float() for n, p in student.named_parameters()}, [s / terms for s in sums]


def ours(box: Path, case: str, blend: str, how: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    job = assembled(distill_run(box, blend, case=case, **how))
    terms = job.all_reduce_int(sum(b.n_terms for b in next(copy.copy(job).batches)))
    job = assembled(distill_run(box, blend, case=case, **how))
    loss, grads = published(job)
    return loss, grads, [job.all_reduce(job.metrics[name]).item() / terms for name in LESSONS]


@pytest.mark.parametrize("case", further(["chat", "untied", "tied"], 1))
@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize(
    "how",
    further(
        [{"packed": True, "rows": 2, "attention": {}}, {"rows": 16}, {"sets": ["model.implementation=transformers"]}], 2
    ),
    ids=["packed", "rows", "transformers"],
)  # fmt: skip
def test_losses_metrics_and_gradients_are_the_formula(folder, case, blend, how):
    found, want = ours(folder, case, blend, how), wanted(folder, case, blend)
    assert found[0] == pytest.approx(want[0], rel=CLOSE) and found[2] == pytest.approx(want[2], rel=CLOSE)
    assert found[1].keys() == want[1].keys()
    for name, g in want[1].items():
        assert apart(found[1][name], g) < CLOSE, name


@pytest.mark.parametrize("data", further(["fsdp", "ddp"], 1))
def test_two_ranks(folder, pair, data):
    for found in pair(ours, folder, "untied", "forward", {"packed": True, "rows": 1, data: {}}):
        assert found[0] == pytest.approx(wanted(folder, "untied", "forward")[0], rel=CLOSE)


def test_an_adapter_learns_from_its_own_base(folder):
    """A teacher that is the model itself: nothing to learn, and no gradient; a teacher in bfloat16 is nearly that."""
    of = {"lora": {"rank": 4}, "packed": True}
    settings = ["distill.temperature=1", "distill.alpha=0"]
    config = distill_run(folder, teacher="untied", **of)
    for dtype, near in (("float32", 1e-6), ("bfloat16", 1e-2)):
        own = config.distill.model_copy(update={"dtype": dtype, "temperature": 1.0, "alpha": 0.0})
        loss, norm, _ = next(steps(assembled(config.model_copy(update={"distill": own})), 1))
        assert abs(loss) < near and norm < 10 * near, settings


def test_a_run_learns_and_evaluates(folder, tmp_path):
    """The loss falls; a held-out part has the figures too; the written model is the student alone."""
    sets = [f"output={tmp_path}/run", f"data.eval={folder}/held.jsonl", "train.save_every=2"]
    config = distill_run(folder, packed=True, sets=sets)
    assert fit.run(fit.RunRequest(resolve(config))).code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert (
        logged[-1]["kl"] < logged[0]["kl"] and {"eval_kl", "eval_next_token_loss"} <= lines[-1].keys() | lines[0].keys()
    )
    assert AutoConfig.from_pretrained(tmp_path / "run" / "model").hidden_size != 48
    job = assembled(config, training=False)
    assert evaluate(job)[2].keys() == set(LESSONS)


def test_the_plan_counts_the_teacher(folder):
    config = distill_run(folder, packed=True)
    plain = config.model_copy(update={"objective": "pretrain", "distill": None})
    of, without = (search.predict(c, "h100", 1) for c in (config, plain))
    assert of.peak_bytes > without.peak_bytes
    (line,) = (item for item in of.lines if item.name == "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    assert line.bytes == 4 * sum(p.numel() for p in teacher.parameters())


@pytest.mark.parametrize("kind", ["tokens", "rows", "positions", "none", "fused", "ranks"])
def test_refused(folder, tmp_path, kind):
    config = distill_run(folder)
    if kind == "none":
        with pytest.raises(ConfigError, match="none is named"):
            resolve(Config.model_validate({**config.model_dump(by_alias=True), "distill": {}}))
    elif kind == "fused":
        with pytest.raises(NeedsError, match="by itself"):
            resolve(distill_run(folder, fused_loss={}))
    elif kind == "ranks":
        env = dataclasses.replace(resolve(config).env, claimed=frozenset({Part.CP}))
        with pytest.raises(NeedsError, match="whole rows"):
            check_teacher(env)
    else:
        shutil.copytree(folder / "teacher", tmp_path / "other")
        own = config.distill.model_copy(update={"teacher": str(tmp_path / "other")})
        if kind == "positions":
            short = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 16}
            (tmp_path / "other" / "config.json").write_text(json.dumps(short))
            with pytest.raises(ConfigError, match="a model of 16 positions"):
                resolve(config.model_copy(update={"distill": own}))
            return
        if kind == "tokens":
            path = tmp_path / "other" / "tokenizer.json"
            found = json.loads(path.read_text())
            vocab = found["model"]["vocab"]
            vocab["w1"], vocab["w2"] = vocab["w2"], vocab["w1"]
            path.write_text(json.dumps(found))
        else:
            for path in (tmp_path / "other").glob("tokenizer*"):
                path.unlink()
        with pytest.raises(NeedsError, match="2 tokens differ" if kind == "tokens" else "a vocabulary of"):
            assembled(config.model_copy(update={"distill": own}))
