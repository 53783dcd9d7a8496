"""`objective: dpo`, `orpo`, `simpo`, `kto` and `reward`: the papers' formulas in float64, TRL, files, every cutting.

The formulas and TRL see documents one at a time or padded, tokenised and masked by transformers; ours see them packed
or not, with losses in chunks or not, on one rank and two.
"""

import copy
import json
import math
import shutil
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from meshes import further
from optrush.config import Orpo, Simpo, dump_config, parse_config
from optrush.decide import decide
from optrush.errors import ConfigError, DataError, NeedsError
from optrush.exporting import export_run, write_model
from optrush.models.hf import load_plain
from optrush.models.weights import weights_fingerprint as fingerprint
from optrush.objectives import FIGURES, figures, orpo, simpo
from optrush.objectives.reward import last_scores
from optrush.trainer import dpo_reference
from optrush.trainer import run as fit

from golden import make_golden
from golden.make_golden import SEED, SIZES, T
from trials import apart, assembled, metrics, published, steps, whole, wire

# PEFT's own.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PAIRS, PER_STEP, STEPS = 32, 8, 4
CLOSE = 1e-5  # relative; rewards are sums of a dozen tokens, whose rounding is theirs
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1}, "ipo": {"beta": 0.3, "loss": "ipo"}, "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.5, "gamma": 0.7}, "kto": {"beta": 0.3, "undesirable_weight": 1.5},
    "reward": {"margin": 0.2, "center": 0.01},
}  # fmt: skip
BETA = 0.3


@pytest.fixture(scope="module")
def folder(box):
    return filled_box(box)


def filled_box(box):
    """The golden folder with pairs.jsonl: 32 pairs of two documents of 17 to 24 tokens each, of which a row of T = 48
    holds one and one of 96 two; judged.jsonl, of each pair one answer and whether it was the chosen one; and `moved`,
    the untied model after some training it never had."""
    draw, rows, judged = np.random.RandomState(7), [], []

    def said(role, n):
        return [{"role": role, "content": " ".join(f"w{i}" for i in draw.randint(0, 73, n))}]

    for i in range(PAIRS):
        asked = 3 + i % 7
        rows.append({"prompt": said("user", asked)})
        for side in ("chosen", "rejected"):
            n = 17 + draw.randint(0, 8)
            rows[-1][side] = said("assistant", n - 5 - asked)
        kind = "chosen" if i % 3 else "rejected"
        judged.append({"prompt": rows[-1]["prompt"], "completion": rows[-1][kind], "label": kind == "chosen"})
    write(box / "pairs.jsonl", rows)
    write(box / "judged.jsonl", judged)
    model = make_golden.open_model(box / "untied")
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    model.save_pretrained(box / "moved")
    AutoTokenizer.from_pretrained(box / "untied").save_pretrained(box / "moved")
    return box


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_of(box, kind="dpo", *, rows=1, packed=False, sets=(), model="moved", settings=None, **with_):
    """rows: of one micro-batch of one rank; packed: 4 rows of twice the length a step instead of 8."""
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    objective, length = "dpo" if kind == "ipo" else kind, 64 if kind == "kto" else T
    if packed:
        with_["packing"] = {"window": PER_STEP}  # a step's pairs share its rows, and no other's
    seq, data = length * (1 + packed), "judged.jsonl" if kind == "kto" else "pairs.jsonl"
    document = {
        "model": str(box / model), "objective": objective, objective: SETTINGS[kind] if settings is None else settings,
        "data": {"path": str(box / data), "cache": str(box / "cache")},
        "batch": {"seq": seq, "tokens": length * PER_STEP, "micro_tokens": seq * rows},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "betas": [0.9, 0.95], "clip": 1.0},
        "train": {"steps": STEPS, "log_every": 1}, "seed": SEED, "output": str(box / "run"), "with": with_,
    }  # fmt: skip
    return parse_config(json.dumps(document), "run.yaml", sets)


def filled(config):
    prepared = decide(config)
    job = assembled(prepared)
    dpo_reference.fill_reference(job, prepared)
    return job


def documents(box, kind="dpo"):
    """(ids, which are targets) of chosen and rejected in turn, as transformers itself tokenises and masks; of `kto`
    each answer, and behind it that of the row half the file away to its prompt."""
    tokenizer, found = AutoTokenizer.from_pretrained(box / "untied"), []
    for row in read(box / ("judged.jsonl" if kind == "kto" else "pairs.jsonl")):
        for side in ("completion",) if kind == "kto" else ("chosen", "rejected"):
            turns = row["prompt"] + row[side]
            both = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
            found.append((torch.tensor(both["input_ids"]), torch.tensor(both["assistant_masks"], dtype=torch.bool)))
    if kind != "kto":
        return found
    made = []
    for i, (ids, learnt) in enumerate(found):
        other, others = found[(i + PAIRS // 2) % PAIRS]
        n, m = int(learnt.int().argmax()), int(others.int().argmax())
        made += [(ids, learnt), (torch.cat((ids[:n], other[m:])), torch.cat((learnt[:n], others[m:])))]
    return made


def first_step():
    raw = np.random.PCG64(np.random.SeedSequence([SEED, 0])).random_raw(PAIRS)
    return np.argsort(raw, kind="stable").tolist()[:PER_STEP]


# --- the formulas, of log-probabilities of the answers' tokens by both models: loss and rewards of a pair
def dpo_of(chosen, rejected):
    good, bad = ((now - before).sum() for now, before in (chosen, rejected))
    return -0.9 * F.logsigmoid(BETA * (good - bad)) - 0.1 * F.logsigmoid(BETA * (bad - good)), BETA * good, BETA * bad


def ipo_of(chosen, rejected):
    good, bad = ((now - before).sum() for now, before in (chosen, rejected))
    return (good / len(chosen[0]) - bad / len(rejected[0]) - 1 / (2 * BETA)) ** 2, BETA * good, BETA * bad


def orpo_loss(chosen, rejected):
    """Equations 3, 4, 6 and 7 of the paper, of log p(y|x) that are means over the answer's tokens."""
    odds = [log_p.exp() / (1 - log_p.exp()) for log_p in (chosen, rejected)]
    return -chosen - SETTINGS["orpo"]["beta"] * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


def simpo_loss(chosen, rejected):
    """Equation 6 of the paper."""
    beta, gamma = SETTINGS["simpo"].values()
    return -torch.log(torch.sigmoid(beta * chosen - beta * rejected - gamma))


def mean_of(loss, beta):
    def formula(chosen, rejected):
        good, bad = chosen[0].mean(), rejected[0].mean()
        return loss(good, bad), beta * good, beta * bad

    return formula


def reward_of(chosen, rejected):
    (good, _), (bad, _) = chosen, rejected
    margin, center = SETTINGS["reward"].values()
    return -torch.log(torch.sigmoid(good - bad - margin)) + center * (good + bad) ** 2, good, bad


FORMULAS = {
    "dpo": dpo_of, "ipo": ipo_of, "orpo": mean_of(orpo_loss, 0.3), "simpo": mean_of(simpo_loss, 2.5),
    "reward": reward_of,
}  # fmt: skip


def classifier(box):
    made = AutoModelForSequenceClassification.from_pretrained(box / "moved", num_labels=1, attn_implementation="eager")
    with torch.no_grad():
        made.score.weight.copy_(head(made.score.weight.shape))
    made.config.pad_token_id = None
    return made


def head(shape):
    """The head of a model of rewards, larger than it begins."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.3


def answer_of(model, ids, learnt):
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    if logits.dim() == 1:
        return logits[0]
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[learnt[1:], 0]


@cache
def wanted(box, kind, groups):
    """Loss, gradients and figures of the first step in float64; each group a micro-batch, which has, for KTO, a
    divergence of its own."""
    made, many = documents(box, kind), sum(map(len, groups))
    policy = (classifier(box) if kind == "reward" else make_golden.open_model(box / "moved")).double()
    before, labels = make_golden.open_model(box / "untied").double(), [r["label"] for r in read(box / "judged.jsonl")]

    def sides(i):
        return [(answer_of(policy, *made[n]), answer_of(before, *made[n]).detach()) for n in (2 * i, 2 * i + 1)]

    loss, sums = 0.0, [0.0] * (3 if kind == "kto" else 4)
    for group in groups:
        if kind == "kto":
            ratios = {i: [(now - then).sum() for now, then in sides(i)] for i in group}
            z = torch.stack([other for _, other in ratios.values()]).mean().clamp(min=0).detach()
        for i in group:
            if kind == "kto":
                gain = BETA * (ratios[i][0] - z) * (1 if labels[i] else -1)
                one = (1 if labels[i] else 1.5) * (1 - torch.sigmoid(gain))
                values = [z, gain > 0, gain]
            else:
                one, good, bad = FORMULAS[kind](*sides(i))
                values = [good, bad, good > bad, good - bad]
            (one / many).backward(retain_graph=kind == "kto")
            loss += one.item() / many
            sums = [old + value.item() / many for old, value in zip(sums, values, strict=True)]
    return loss, {name: p.grad.float() for name, p in policy.named_parameters()}, sums


def ours(box, kind, how):
    """The same of ours, and the samples of each micro-batch."""
    job = filled(run_of(box, kind, **how))
    if job.stream.reference is not None:
        job.stream.reference = filled(run_of(box, kind, **{**how, "model": "untied"})).stream.reference
    with torch.no_grad():
        for t in (t for t in job.trained if kind == "reward" and t.name == "head.weight"):
            t.local.copy_(head(job.model.head.weight.shape))  # of one row: one of two ranks has none
    wire(other := copy.copy(job))
    groups = [tuple(batch.samples) for batch in next(other.batches)]
    loss, grads = published(job)
    many = job.all_reduce_int(sum(map(len, groups)))
    return loss, grads, [job.all_reduce(job.metrics[name]).item() / many for name in figures(job.config)], groups


def agrees(box, kind, found, groups=None):
    loss, grads, sums = wanted(box, kind, tuple(groups or [tuple(first_step())]))
    assert found[0] == pytest.approx(loss, rel=CLOSE) and found[2] == pytest.approx(sums, rel=CLOSE, abs=2e-5)
    assert kind != "kto" or sums[0] > 0.01
    assert grads.keys() == found[1].keys()
    for name, g in grads.items():
        assert apart(found[1][name], g) < CLOSE, name


THEIRS = {"sets": ["model.implementation=transformers"]}
CUTS: dict[str, dict[str, Any]] = {
    "micro": {"rows": 2}, "chunked": {"packed": True, "rows": 2, "fused_loss": {"chunk": 5}, "attention": {}},
    "transformers": {"rows": 4, **THEIRS}, "whole": {"rows": 8}, "packed": {"packed": True, "rows": 4},
    "packed-micro": {"packed": True, "rows": 1}, "narrow": {"rows": 8, "pad": {}},
}  # fmt: skip
QUICK = [*((kind, cut) for kind in SETTINGS for cut in ("micro", "chunked")), ("reward", "transformers")]


@pytest.mark.parametrize(
    ("kind", "cut"), further([*QUICK, *((k, c) for k in SETTINGS for c in CUTS if (k, c) not in QUICK)], len(QUICK))
)
def test_losses_figures_and_gradients_are_the_formula(folder, kind, cut):
    how = {name: value for name, value in CUTS[cut].items() if (kind, name) != ("reward", "fused_loss")}
    found = ours(folder, kind, how)
    assert how.get("packed") or sorted(i for group in found[3] for i in group) == sorted(first_step())
    agrees(folder, kind, found, found[3] if kind == "kto" else None)


@pytest.mark.parametrize(("kind", "data"), further(
    [("dpo", "fsdp"), ("orpo", "ddp"), ("kto", "ddp"), ("reward", "fsdp"), ("dpo", "ddp"), ("simpo", "ddp"),
     ("reward", "ddp")], 4))  # fmt: skip
def test_two_ranks(folder, pair, kind, data):
    """Each rank's micro-batches of judged answers have a divergence of their own."""
    both = pair(ours, folder, kind, {"packed": True, "rows": 1, data: {}})
    groups = [group for found in both for group in found[3]] if kind == "kto" else None
    for n, found in enumerate(both):
        if n == 0 or data == "ddp":
            agrees(folder, kind, found, groups)


def play(box, how, kind="dpo"):
    return [line for line in metrics(run_of(box, kind, **how)) if "loss" in line]


def alike(one, other, names=FIGURES):
    for before, after in zip(one, other, strict=True):
        for key in ("loss", "grad_norm", *(names if before["step"] > 1 else ())):  # at step 1 both models are one
            assert before[key] == pytest.approx(after[key], rel=2e-5, abs=5e-5), (before["step"], key)


def test_a_run_on_two_ranks_is_that_of_one(folder, pair):
    """With another cache, in which nothing is: each rank makes the reference of half of the pairs, both get all."""
    shutil.rmtree(folder / "other", ignore_errors=True)
    alone = play(folder, {"model": "untied", "rows": 8})
    two = pair(play, folder, {"model": "untied", "rows": 2, "sets": [f"data.cache={folder}/other"], "fsdp": {}})[0]
    assert len(alone) == STEPS and alone[-1]["reward_margin"] != 0
    alike(alone, two)
    kept = [np.load(path) for path in (folder / "other" / "reference").glob("*.npy")]
    assert len(kept) == 1 and kept[0].shape == (PAIRS, 2) and (kept[0] < -1).all()


@pytest.mark.slow
def test_pairs_sorted_by_length(folder):
    """Other pairs a step: all of the epoch's, in the end."""
    lines = play(folder, {"rows": 8, "sort_by_length": {}})
    assert sum(m["target_tokens"] for m in lines) == sum(int(learnt.sum()) for _, learnt in documents(folder))


# --- TRL
@pytest.fixture(scope="module")
def trainer(folder):
    return trls(folder, torch.device("cpu"))


def trls(folder, device, kind="dpo"):
    """TRL's trainer on a device, whose policy is `moved` and whose reference is `untied`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl
        from datasets import Dataset

        own = {"beta": BETA} if kind == "dpo" else {**SETTINGS["kto"], "per_device_train_batch_size": 8}
        settings = getattr(trl, f"{kind.upper()}Config")(
            output_dir=str(folder / "trl"), report_to=[], use_cpu=device.type == "cpu", bf16=False, max_length=None,
            gradient_checkpointing=False, disable_tqdm=True, **own,
        )  # fmt: skip
        answers = {"chosen": "w2", "rejected": "w3"} if kind == "dpo" else {"completion": "w2", "label": True}
        return getattr(trl, f"{kind.upper()}Trainer")(
            model=make_golden.open_model(folder / "moved"), ref_model=make_golden.open_model(folder / "untied"),
            args=settings, processing_class=AutoTokenizer.from_pretrained(folder / "untied"),
            train_dataset=Dataset.from_list([{"prompt": "w1 ", **answers}] * 8),
        )  # fmt: skip


def padded(made):
    """Columns of documents as TRL takes them."""
    width = max(len(ids) for ids, _ in made)
    columns = [torch.stack([F.pad(t.long(), (0, width - len(t))) for t in part]) for part in zip(*made)]
    seen = torch.stack([F.pad(torch.ones(len(ids)), (0, width - len(ids))) for ids, _ in made]).long()
    return {"input_ids": columns[0], "completion_mask": columns[1], "attention_mask": seen}


def theirs(trainer, inputs):
    """Loss, gradients and metrics by TRL."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = {name: t.to(trainer.model.device) for name, t in inputs.items()}
        loss = trainer.compute_loss(trainer.model.train(), inputs)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters()}, trainer._metrics["train"]


@pytest.mark.parametrize(("loss", "smoothing", "packed"), further(
    [("sigmoid", 0.1, False), ("ipo", 0.0, True), ("sigmoid", 0.0, True), ("sigmoid", 0.0, False),
     ("sigmoid", 0.1, True), ("ipo", 0.0, False)], 2))  # fmt: skip
def test_dpo_is_trls(folder, trainer, loss, smoothing, packed):
    agrees_with_trl(folder, trainer, loss, smoothing, packed)


def agrees_with_trl(folder, trainer, loss, smoothing, packed, **with_):
    """Smoothing is not in TRL's sigmoid: but it is the mean of both ways round, which TRL is asked for one by one."""
    sets = [f"dpo.loss={loss}", f"dpo.label_smoothing={smoothing}"]
    job = filled(run_of(folder, packed=packed, rows=2, sets=sets, **with_))
    job.stream.reference = filled(run_of(folder, packed=packed, sets=sets, model="untied")).stream.reference
    ours, found = published(job)
    trainer.loss_types, made = [loss], documents(folder)
    chosen, rejected = ([made[2 * i + side] for i in first_step()] for side in (0, 1))
    other, back, _ = theirs(trainer, padded(rejected + chosen)) if smoothing else (0.0, {}, None)
    want, grads, said = theirs(trainer, padded(chosen + rejected))
    assert ours == pytest.approx((1 - smoothing) * want + smoothing * other, rel=CLOSE)
    assert abs(want - math.log(2)) > 0.005 and grads.keys() == found.keys()
    for name, g in grads.items():
        assert apart(found[name], (1 - smoothing) * g + smoothing * back.get(name, 0)) < CLOSE, name
    means = {name: figure.item() / PER_STEP for name, figure in job.metrics.items()}
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
    for name, of_trl in zip(FIGURES, names, strict=True):
        assert means[name] == pytest.approx(said[of_trl][0], abs=2e-5), name
    assert 0 < means["reward_accuracy"] < 1


def test_kto_is_trls(folder):
    made, chosen = documents(folder, "kto"), first_step()
    inputs = padded([made[2 * i] for i in chosen])
    inputs |= {f"KL_{name}": t for name, t in padded([made[2 * i + 1] for i in chosen]).items()}
    inputs["label"] = torch.tensor([read(folder / "judged.jsonl")[i]["label"] for i in chosen])
    loss, found, _ = theirs(trls(folder, torch.device("cpu"), "kto"), inputs)
    want, grads, _ = wanted(folder, "kto", (tuple(chosen),))
    assert loss == pytest.approx(want, rel=CLOSE)
    for name, g in grads.items():
        assert apart(found[name], g) < CLOSE, name


def test_the_other_formulas_are_trls():
    """TRL's functions of log-probabilities; its SimPO divides gamma by beta, its ORPO has the odds apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import RewardTrainer
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
    chosen, rejected = torch.tensor([-1.2, -0.3, -4.0]).double(), torch.tensor([-1.0, -2.3, -4.5]).double()
    of, device = SETTINGS["simpo"], SimpleNamespace(device=torch.device("cpu"))
    settings = SimpleNamespace(
        alpha=0.0, beta=of["beta"], simpo_gamma=of["gamma"], loss_type="simpo", label_smoothing=0.0, accelerator=device
    )
    assert torch.allclose(CPOTrainer.cpo_loss(settings, chosen, rejected)[0], simpo_loss(chosen, rejected))
    settings = SimpleNamespace(beta=SETTINGS["orpo"]["beta"], accelerator=device)
    ratios = ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]
    assert torch.allclose(-chosen - ratios, orpo_loss(chosen, rejected))
    model: Any = lambda **inputs: SimpleNamespace(logits=torch.cat((chosen, rejected))[:, None])
    model.training = False
    same = SimpleNamespace(gather=lambda t: t, gather_for_metrics=lambda t: t)
    lists: Any = {"eval": {k: [] for k in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}}
    other = SimpleNamespace(
        model=model, args=SimpleNamespace(center_rewards_coefficient=0.01), accelerator=same, _metrics=lists,
        _total_train_tokens=0,
    )  # fmt: skip
    loss = RewardTrainer.compute_loss(other, model, {"margin": torch.full((3,), 0.2)})
    assert loss.item() == pytest.approx(reward_of((chosen, None), (rejected, None))[0].mean().item())


def test_an_answer_learnt_by_heart_has_a_finite_loss():
    """Its odds are infinite: 1 - p is 0 in float32."""
    batch: Any = SimpleNamespace(
        extra={"pairs": torch.tensor([[True]])}, labels=torch.tensor([[1, 1]]),
        documents=SimpleNamespace(ids=torch.tensor([[0, 1]])),
    )  # fmt: skip
    for score, settings in ((orpo.score, Orpo()), (simpo.score, Simpo())):
        hidden = torch.zeros(1, 2, requires_grad=True)
        loss = score(lambda h, labels, reduce: h, settings, {n: torch.zeros(()) for n in FIGURES}, hidden, batch)
        loss.backward()
        assert math.isfinite(loss.item()) and bool(hidden.grad.isfinite().all())


# --- the reference
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_an_adapter_is_its_own_reference(folder, kind):
    """With the adapter off, asked in every step, against log-probabilities made before: the same four steps."""
    how = {"packed": True, "rows": 2, "lora": {"rank": 4}}
    runs = [
        play(folder, {**how, "sets": [f"{kind}.reference={of}", "optim.lr=3e-2"]}, kind)
        for of in ("adapter", "precomputed")
    ]
    alike(*runs, FIGURES if kind == "dpo" else ("reward_margin",))
    assert abs(runs[0][-1]["reward_margin"]) > 0.05, "it moves"
    assert filled(run_of(folder, kind, lora={"rank": 4})).stream.reference is None, "auto takes the adapter"


def test_the_reference_is_asked_without_dropout(folder):
    """A model in training mode while the reference is made would give it away: its log-probabilities at step 1."""
    trainer = filled(run_of(folder, sets=["dpo.reference=adapter"], lora={"rank": 4, "dropout": 0.5}))
    modes = []
    trainer.model.norm.register_forward_hook(lambda module, inputs, out: modes.append(module.training))
    batches = next(trainer.batches)
    trainer.set_step(1)
    trainer.forward_backward(batches, PER_STEP)
    assert modes == [False, True] * len(batches) and trainer.model.training
    assert trainer.metrics["reward_accuracy"].item() == 0, "at step 1 both are the same model, bit by bit"


def test_what_was_found_is_kept_and_found_again(folder, tmp_path, monkeypatch):
    sets = [f"data.cache={tmp_path}"]
    job = assembled(prepared := decide(run_of(folder, sets=sets)))
    before = {t.name: whole(t.parameter.detach()).clone() for t in job.trained}
    dpo_reference.fill_reference(job, prepared)
    assert all(torch.equal(before[t.name], t.parameter) for t in job.trained), "the pass changes nothing"
    first, (path,) = job.stream.reference, (tmp_path / "reference").iterdir()
    passes, real = [], dpo_reference.compute_reference
    monkeypatch.setattr(dpo_reference, "compute_reference", lambda *args: passes.append(args) or real(*args))
    assert np.array_equal(filled(run_of(folder, sets=[*sets, "dpo.beta=2", "optim.lr=1"])).stream.reference, first)
    assert not passes, "neither beta nor the rate has to do with it"
    filled(run_of(folder, sets=sets, model="untied"))
    filled(run_of(folder, sets=sets, amp={}))
    assert len(passes) == 2, "another model, another precision"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert np.array_equal(filled(run_of(folder, sets=sets)).stream.reference, first) and len(passes) == 3


def test_an_adapter_that_has_learnt_before_is_another_reference(folder, tmp_path):
    """Its values are part of the key, wherever they came from."""
    config = run_of(folder, sets=[f"data.cache={tmp_path}", "dpo.reference=precomputed"], lora={"rank": 4})
    first = filled(config).stream.reference
    job = assembled(prepared := decide(config))
    for t in job.trained:
        t.local.add_(0.1)
    dpo_reference.fill_reference(job, prepared)
    assert np.abs(job.stream.reference - first).max() > 0.1


def test_a_resumed_run_has_the_reference_it_began_with(folder, tmp_path):
    """Also where what was kept is gone: it is made of the model as it was, not of the checkpoint."""
    sets = [f"data.cache={tmp_path}/cache", f"output={tmp_path}/out", "train.save_every=2"]
    config = run_of(folder, rows=8, sets=sets)
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    lines = read(tmp_path / "out" / "metrics.jsonl")
    for path in (tmp_path / "cache" / "reference").iterdir():
        path.unlink()
    assert fit.run(fit.RunRequest(decide(config), tmp_path / "out" / "checkpoints" / "step-000002")).code == 0
    for before, after in zip(lines, read(tmp_path / "out" / "metrics.jsonl"), strict=True):
        for key in ("loss", "grad_norm", *FIGURES) if "loss" in before else ():
            assert before[key] == after[key], (before["step"], key)


LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def large(box, tmp_path_factory):
    """A model of 7 MiB: no sample of its bytes holds all of them."""
    folder = tmp_path_factory.mktemp("large") / "model"
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "model_type"} | {"intermediate_size": 4096, "pad_token_id": 0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.float32)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(box / "untied").save_pretrained(folder)
    return folder


def other(model, folder, first):
    """The model with other values from row `first` on in one matrix of its last block."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[LAST][first : first + 30] += 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_no_model_has_anothers_reference(folder, large, tmp_path):
    """Also where they differ in the middle of a matrix alone, which no sample sees; the same bytes are found again."""
    assert fingerprint(large, 0) != fingerprint(other(large, tmp_path / "first", 0), 0), "its first values"
    assert fingerprint(large, 0) != fingerprint(other(large, tmp_path / "last", 34), 0), "its last"
    assert fingerprint(large, 0) == fingerprint(shutil.copytree(large, tmp_path / "same"), 7)
    moved = other(large, tmp_path / "moved", 20)
    assert fingerprint(large, 0) == fingerprint(moved, 0)
    first, second, again = (
        filled(run_of(folder, sets=[f"data.cache={tmp_path}", f"model.path={model}"])).stream.reference
        for model in (large, moved, large)
    )
    assert np.abs(first - second).max() > 1e-3 and np.array_equal(again, first)
    assert len(list((tmp_path / "reference").iterdir())) == 2


def test_texts_with_and_without_a_prompt_are_one_run(folder, tmp_path):
    """`ipo` divides by the number of targets: words that both answers share count on neither side."""

    def taken(keys):
        rows = [{"prompt": f"w{i} w2 ", "chosen": f"w3 w4 w{i}", "rejected": "w5"} for i in range(9)]
        if not keys:
            rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
        path = write(tmp_path / f"{keys}.jsonl", rows)
        trainer = filled(run_of(folder, "ipo", rows=8, settings={"loss": "ipo"}, sets=[f"data.path={path}"]))
        with torch.no_grad():
            for t in trainer.trained:
                t.local.mul_(1.1)
        (batch,) = next(trainer.batches)
        return batch, trainer.forward_backward([batch], batch.n_terms).item()

    (given, loss), (found, same) = taken(True), taken(False)
    assert torch.equal(given.labels, found.labels) and given.n_targets == found.n_targets > 0
    assert loss == same and abs(loss - 25) > 1e-3, "25 is where it begins"


# --- judged answers
@pytest.mark.parametrize("kind", ["pairs", "messages", "kto_tag", "evaluated"])
def test_rows_of_judged_answers(folder, tmp_path, kind):
    """Pairs are two judged answers; chats have a label too; a part is held out."""
    rows = read(folder / ("pairs.jsonl" if kind == "pairs" else "judged.jsonl"))
    if kind == "messages":
        rows = [{"messages": r["prompt"] + r["completion"], "label": int(r["label"])} for r in rows]
    if kind == "kto_tag":
        rows = [{"prompt": r["prompt"], "completion": r["completion"], "kto_tag": r["label"]} for r in rows]
    sets = [f"data.path={write(tmp_path / 'rows.jsonl', rows)}", *(["data.eval=0.25"] if kind == "evaluated" else [])]
    job = filled(run_of(folder, "kto", rows=8, sets=sets))
    source, plain = job.sources.train, assembled(run_of(folder, "kto")).sources.train
    assert len(source) == {"pairs": 2 * PAIRS, "evaluated": 24}.get(kind, PAIRS)
    if kind == "pairs":
        assert [source.documents(i)[0].desirable for i in range(len(source))] == [True, False] * PAIRS
    for i in range(PAIRS) if kind in ("messages", "kto_tag") else ():
        for one, want in zip(source.documents(i), plain.documents(i), strict=True):
            assert one.ids.tolist() == want.ids.tolist() and one.desirable == want.desirable
    assert next(steps(job, 1))[0] > 0


@pytest.mark.parametrize(("row", "found"), [
    ({"prompt": "a", "completion": "b"}, "no 'label'"),
    ({"prompt": "a", "completion": "b", "label": "maybe"}, "neither true nor false"),
    ({"prompt": "a", "completion": "b", "label": True, "kto_tag": False}, "contradict"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "label": True}, "and a label; keep one"),
    ({"text": "a", "label": True}, "a text"), ({"prompt": "w1 " * 30, "completion": "w2", "label": True}, "tokens"),
])  # fmt: skip
def test_judged_answers_that_are_refused(folder, tmp_path, row, found):
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=found):
        assembled(run_of(folder, "kto", sets=[f"data.path={path}", "batch.seq=32", "batch.micro_tokens=32"]))


def test_bad_answers_are_refused_elsewhere_and_streams_here(folder):
    with pytest.raises(DataError, match="a judged answer"):
        assembled(run_of(folder, "kto", sets=["objective=sft", "kto=null"]))
    with pytest.raises(ConfigError, match="KTO pairs each prompt with another"):
        decide(run_of(folder, "kto", sets=["data.stream=true"]))


# --- models of rewards
@pytest.mark.parametrize(
    ("implementation", "adapter"),
    further([("native", True), ("transformers", False), ("native", False), ("transformers", True)], 2),
)
def test_transformers_gives_the_same_scores(folder, tmp_path, implementation, adapter):
    """Of what a run leaves: the model, and of an adapter PEFT's files, with the head in them."""
    with_ = {"lora": {"rank": 4}} if adapter else {}
    sets = [f"model.implementation={implementation}"]
    config = run_of(folder, "reward", packed=implementation == "native", sets=sets, **with_)
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
    sets = [f"output={tmp_path}/run", "train.save_every=2"]
    config = run_of(folder, "reward", packed=True, settings={}, lora={"rank": 4}, sets=sets)
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    done = export_run(tmp_path / "run", tmp_path / "out")
    assert done.compared is not None and done.compared.sound
    with pytest.raises(NeedsError, match="scores texts"):
        load_plain(tmp_path / "out", None, torch.device("cpu"))
    with pytest.raises(NeedsError, match="over the vocabulary"):
        decide(run_of(folder, "reward", fused_loss={}))


def test_the_padding_token_ends_no_text(folder, tmp_path):
    """transformers scores the last token that is not the padding's, which is the model's."""
    batch = next(assembled(run_of(folder, "reward", rows=8)).batches)[0]
    pad = int(batch.tokens[0][batch.documents.ids[0] == 0][-1])
    last = last_scores(torch.arange(batch.tokens.shape[1]).float().expand(batch.tokens.shape), pad, batch)
    for b in range(len(batch.rows)):
        for side in range(2):
            ids = (batch.documents.ids[b] == side).nonzero().flatten()
            assert last[b, 0, side] == max(i for i in ids if batch.tokens[b, i] != pad)
    model = shutil.copytree(folder / "moved", tmp_path / "model")
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**hf, "pad_token_id": 5}))
    assert assembled(run_of(folder, "reward", sets=[f"model.path={model}"])).model.head.pad == 5
