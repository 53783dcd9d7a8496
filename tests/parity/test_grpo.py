"""`objective: grpo`: what is sampled beside transformers' own generation, the loss beside its formulas, whole runs.

The oracles: transformers' own logits on the same weights, formulas written answer by answer in float64, and the run
itself on other ranks, resumed, or with other slots.
"""

import gc
import json
import os
import shutil
import time
import weakref
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshes import further
from optrush.benchmark import ladder, tune
from optrush.config import Config, Grpo, RewardRule, parse_config
from optrush.data.batch import IGNORE, Batch, collate
from optrush.data.schema import Document
from optrush.decide import decide
from optrush.errors import ConfigError, DataError, NeedsError, RunError
from optrush.hardware import NAMED
from optrush.launch import launched
from optrush.models import kv_cache, padded_sampling, sampling
from optrush.models.hf import load
from optrush.objectives import SAMPLED, grpo, plugged, reward_pool, rewards
from optrush.planner.search import predict
from optrush.trainer import rollout
from optrush.trainer import run as fit
from optrush.trainer.dry_run import dry_run
from optrush.trainer.overfit import run_overfit
from optrush.trainer.trainer import evaluate

from golden import make_golden
from parity_models import EXPERTS, FAMILIES, SIZES, THEIR_EXPERTS, materialise, reference, save
from trials import alive, assembled, first_gradients, furthest, metrics, steps, weights

CACHED = [n for n, sizes in {**FAMILIES, **EXPERTS}.items() if "linear_num_key_heads" not in sizes]


# --- the engine
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return opened("qwen3", tmp_path_factory.mktemp("qwen3"))[1]


def opened(family: str, folder: Path) -> tuple[Any, Any]:
    theirs = reference({**FAMILIES, **EXPERTS}[family])
    loaded, recipe = load(folder, save(theirs, folder), None, torch.float32, 0)
    return theirs, materialise(loaded, recipe)


def asked(n: int = 4, vocab: int = 60, first: int = 0) -> list[sampling.PromptIds]:
    rng = np.random.default_rng(7)
    return [sampling.PromptIds(first + i, rng.integers(4, vocab, size=5 + 4 * i).astype(np.int32)) for i in range(n)]


@pytest.mark.parametrize("family", CACHED)
def test_greedy_answers_are_those_of_transformers(family, tmp_path):
    """With windows, sinks, capped scores, latent attention, local rotations and experts; packed prompts, few slots."""
    theirs, ours = opened(family, tmp_path)
    if ours.shape.chunks is not None or ours.shape.delta is not None:
        with pytest.raises(NeedsError):
            kv_cache.check_cacheable(ours)
        return
    prompts = asked()
    found = sampling.sample(ours, prompts, 1, sampling.Drawing(6, 0.0, (), 0, slots=3))
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.no_grad():
            every = theirs(input_ids=torch.tensor([[*prompt.ids.tolist(), *answer.ids]])).logits[0].log_softmax(-1)
        for scores, token, log_p in zip(every[len(prompt.ids) - 1 :], answer.ids, answer.log_p):
            assert abs(float(scores[token]) - log_p) < 2e-4
            assert float(scores.max() - scores[token]) < 1e-4  # the likeliest, or as likely as it


def test_draws_depend_on_seed_prompt_member_and_position_alone(model):
    prompts = asked()
    every = sampling.sample(model, prompts, 3, sampling.Drawing(8, 1.0, (), 5, slots=64))
    for slots, some in ((2, prompts), (5, prompts), (4, prompts[2:])):
        found = sampling.sample(model, some, 3, sampling.Drawing(8, 1.0, (), 5, slots=slots))
        assert [a.ids for a in found] == [a.ids for a in every[-len(found) :]]
    other = sampling.sample(model, prompts, 3, sampling.Drawing(8, 1.0, (), 6))
    assert [a.ids for a in other] != [a.ids for a in every]
    assert len({tuple(a.ids) for a in every}) == len(every)


def test_draws_follow_the_probabilities(model):
    """The first tokens of 3,000 members, beside the distribution; a temperature is part of it."""
    (prompt,) = asked(1)
    tokens = torch.tensor(prompt.ids.tolist())[None]
    batch = collate(
        [[(0, Document(prompt.ids, np.zeros(len(prompt.ids), bool)))]], len(prompt.ids), single=True, most=2
    )
    logits = model.head.logits(model(tokens, batch.positions, batch.documents)[0, -1]).detach()
    for temperature in (1.0, 0.5):
        found = sampling.sample(model, [prompt], 3000, sampling.Drawing(1, temperature, (), 1, slots=512))
        share = torch.bincount(torch.tensor([a.ids[0] for a in found]), minlength=len(logits)) / 3000
        p = (logits / temperature).softmax(-1)
        assert (share - p).abs().max() < 4 * (p * (1 - p) / 3000).max().sqrt()
        assert all(abs(a.log_p[0] - p[a.ids[0]].log()) < 1e-5 for a in found[:20])


def test_an_end_in_the_prompt_ends_nothing_and_a_cut_answer_has_not_ended(model):
    (prompt,) = asked(1)
    free = sampling.sample(model, [prompt], 4, sampling.Drawing(6, 1.0, (), 3))
    end = free[0].ids[2]
    inside = sampling.PromptIds(prompt.number, np.array([*prompt.ids, end, *prompt.ids], np.int32))
    for one in (prompt, inside):
        for answer in sampling.sample(model, [one], 4, sampling.Drawing(6, 1.0, (end,), 3)):
            assert answer.ended == (answer.ids[-1] == end)
            assert end not in answer.ids[:-1] and (answer.ended or len(answer.ids) == 6)


def test_sampling_leaves_the_model_as_it_was_and_drops_nothing_out(model):
    model.train()
    before = [block.attention for block in model.blocks.values()], model.block_call
    sampling.sample(model, asked(2), 2, sampling.Drawing(3, 1.0, (), 0))
    assert model.training
    assert ([block.attention for block in model.blocks.values()], model.block_call) == before


def test_keys_and_values_are_freed_with_the_answers(model, monkeypatch):
    kept = []
    within = kv_cache.SlotCache.within

    @contextmanager
    def noted(cache, of):
        with within(cache, of):
            yield
        kept.extend(weakref.ref(x) for layer in cache.layers for x in (layer.keys, layer.values))

    monkeypatch.setattr(kv_cache.SlotCache, "within", noted)
    gc.disable()
    try:
        sampling.sample(model, asked(2), 1, sampling.Drawing(3, 1.0, (), 0))
    finally:
        gc.enable()
    assert kept and not any(ref() is not None for ref in kept)


def test_products_that_read_their_groups_on_the_host_are_not_recorded(model, tmp_path, monkeypatch):
    name = next(name for name in EXPERTS if name in CACHED)
    engines = [sampling.SamplingEngine(m, 2, 64, 4) for m in (model, opened(name, tmp_path)[1])]
    for engine in engines:
        engine.sample(asked(1), 1, sampling.Drawing(2, 0.0, (), 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert [engine.recordable() for engine in engines] == [True, False]
    layer = engines[1].cache.layers[0]
    layer.keys = layer.keys.bfloat16()
    assert engines[1].recordable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not engines[1].recordable()


def test_a_step_that_cannot_be_recorded_leaves_no_recording_and_says_why(model, monkeypatch):
    class Graph:
        def capture_begin(self, **_):
            pass

        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    engine = sampling.SamplingEngine(model, 2, 64, 4)
    engine.drawing, steps_left = sampling.Drawing(4, 1.0, (), 0), [None]

    def advance() -> None:
        if not steps_left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        steps_left.pop()

    monkeypatch.setattr(engine, "advance", advance)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        engine.replay()
    assert not engine.graphs


def test_a_model_that_keeps_other_things_is_refused(tmp_path):
    _, ours = opened("qwen3_5_text", tmp_path)
    with pytest.raises(NeedsError, match="delta-rule layers"):
        sampling.sample(ours, asked(1), 1, sampling.Drawing(2, 0.0, (), 0))


MAMBA = {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 61, "pad_token_id": 0}
HYBRID = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "pad_token_id": 0}
THEIRS = {  # attention with learnt positions, slopes, windows; recurrent states, and both
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "lfm2": {**SIZES, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "head_dim": 6},
    "mamba": {"model_type": "mamba", **MAMBA},
    "gemma2": FAMILIES["gemma2"],
    "granitemoe": THEIR_EXPERTS["granitemoe"],
    "qwen3_5_text": FAMILIES["qwen3_5_text"],
    "bloom": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    "falcon_h1": {**SIZES, **HYBRID, "model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4},
}  # fmt: skip


@pytest.fixture(scope="module", params=further(list(THEIRS), 3))
def theirs_and_ours(request, tmp_path_factory):
    theirs = reference(THEIRS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    loaded, recipe = load(folder, save(theirs, folder), "transformers", torch.float32, 0)
    return theirs, materialise(loaded, recipe)


def check_sampled(theirs: Any, engine: Any, note: str) -> None:
    """Log-probabilities are those of the whole answers, and draws do not depend on the batch."""
    prompts, drawing = asked(), sampling.Drawing(6, 0.8, (7,), 3, slots=5)
    found = engine.sample(prompts, 2, drawing)
    for answer in found:
        ids = torch.tensor([[*prompts[answer.prompt].ids.tolist(), *answer.ids]])
        with torch.no_grad():
            want = (theirs(input_ids=ids).logits[0] / 0.8).log_softmax(-1)[-len(answer.ids) - 1 :]
        assert [float(p[t]) for p, t in zip(want, answer.ids)] == pytest.approx(answer.log_p, abs=2e-4)
        assert answer.ended == (answer.ids[-1] == 7) and 7 not in answer.ids[:-1]
    few = engine.sample(prompts[1:3], 2, replace(drawing, slots=64))
    assert [a.ids for a in few] == [a.ids for a in found if a.prompt in (1, 2)]
    assert engine.note == note


def test_a_model_of_transformers_samples_from_what_training_computes(theirs_and_ours):
    theirs, ours = theirs_and_ours
    ours.train()
    check_sampled(theirs, padded_sampling.PaddedEngine(ours), "")
    assert ours.training and ours.block_call.__name__ == "call"


@pytest.mark.parametrize("wrong", ["padding", "cache", "nothing", "error"])
def test_a_cache_that_gives_something_else_is_found_and_not_used(tmp_path, monkeypatch, wrong):
    theirs = reference(THEIRS["gpt2"])
    loaded, recipe = load(tmp_path, save(theirs, tmp_path), "transformers", torch.float32, 0)
    ours, plain = materialise(loaded, recipe), type(loaded)._resumed

    def resumed(self, tokens, positions, kept):
        if wrong == "error":
            raise TypeError("an argument that it does not know")
        mask = kept.mask
        kept.mask = torch.ones_like(mask) if wrong == "padding" else mask
        hidden = plain(self, tokens, positions, kept) + (wrong == "cache" and tokens.shape[1] == 1)
        kept.mask, kept.cache = mask, None if wrong == "nothing" else kept.cache
        return hidden

    monkeypatch.setattr(type(ours), "_resumed", resumed)
    note = padded_sampling.ONE_LENGTH if wrong == "padding" else padded_sampling.UNCACHED
    check_sampled(theirs, padded_sampling.PaddedEngine(ours), note)


# --- the loss
class Plain(torch.nn.Module):
    """A head whose logits are its input."""

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, reduce: str) -> torch.Tensor:
        assert reduce == "token"
        flat = torch.nn.functional.cross_entropy(
            hidden.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return flat.view(labels.shape)


ANSWERS = [[(3, 2, 0.5), (2, 4, -1.0)], [(4, 3, 1.5)]]  # rows of (prompt, answer, advantage)


def answered(settings: Grpo, old: bool) -> tuple[Batch, torch.Tensor, list[Any]]:
    """A batch, hidden states that are logits, and of each answer (row, first label, length, advantage)."""
    rng, T, V = np.random.default_rng(3), 12, 7
    rows, places = [], []
    for b, row in enumerate(ANSWERS):
        documents, at = [], 0
        for n, m, advantage in row:
            ids = rng.integers(V, size=n + m).astype(np.int32)
            documents.append((0, Document(ids, np.arange(n + m) >= n)))
            places.append((b, at + n - 1, m, advantage))
            at += n + m
        rows.append(documents)
    batch = collate(rows, T, single=False, most=8)
    shape, tokens = (2, T), sum(m for *_, m, _ in places)
    extra = {n: torch.zeros(shape, dtype=torch.float64) for n in ("advantages", "weights", "sampled", "reference")}
    counted = torch.zeros(shape, dtype=torch.int64)
    for i, (b, at, m, advantage) in enumerate(places):
        extra["advantages"][b, at : at + m] = advantage
        extra["weights"][b, at : at + m] = grpo.token_weight(settings, m, tokens, tokens, len(places))
        counted[b, at : at + m] = i + 1
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*shape, V, generator=generator, dtype=torch.float64, requires_grad=True)
    moved = -Plain()(
        (hidden + 0.5 * torch.randn(hidden.shape, generator=generator)) / settings.temperature, batch.labels, "token"
    ).detach()
    extra["sampled"], extra["answers"] = moved, counted
    extra |= {"old": moved} if old else {}
    extra["reference"] = moved * 0.9
    if not settings.beta:
        del extra["reference"]
    return replace(batch, extra=extra), hidden, places


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("normalise", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize(
    ("loss", "ratio"), [("clip", "token"), ("clip", "sequence"), ("cispo", "token"), ("cispo", "sequence")]
)
def test_loss_and_gradients_are_those_of_the_formulas(loss, ratio, normalise, beta, old):
    s = Grpo(loss=loss, ratio=ratio, normalise=normalise, beta=beta, clip=(0.1, 0.15), max_new=9, temperature=0.7)
    batch, hidden, places = answered(s, old)
    figures = {name: torch.zeros((), dtype=torch.float64) for name in SAMPLED}
    ours = grpo.score(Plain(), s, figures, hidden, batch) / batch.n_terms
    (mine,) = torch.autograd.grad(ours, hidden)
    log_p = (hidden / s.temperature).log_softmax(-1).gather(-1, batch.labels.clamp_min(0)[..., None])[..., 0]
    each, ratios = [], []
    for b, at, m, advantage in places:
        now = log_p[b, at : at + m]
        before = batch.extra["old"][b, at : at + m] if old else now.detach()
        r = (now - before).exp() if ratio == "token" else (now - before).mean().exp().expand(m)
        ratios.append(r)
        if loss == "clip":
            terms = [-torch.min(x * advantage, x.clamp(1 - 0.1, 1 + 0.15) * advantage) for x in r]
        else:
            terms = [-x.detach().clamp(max=1.15) * advantage * lp for x, lp in zip(r, now, strict=True)]
        if beta:
            d = batch.extra["reference"][b, at : at + m] - now
            terms = [t + beta * (x.exp() - x - 1) for t, x in zip(terms, d, strict=True)]
        each.append(torch.stack(terms))
    if normalise == "tokens":
        theirs = torch.cat(each).mean()
    elif normalise == "sequences":
        theirs = torch.stack([t.mean() for t in each]).mean()
    else:
        theirs = torch.stack([t.sum() / 9 for t in each]).mean()
    (their,) = torch.autograd.grad(theirs, hidden)
    assert abs(ours.item() - theirs.item()) < 1e-12
    assert (mine - their).abs().max() < 1e-12
    assert mine.abs().max() > 1e-3
    assert figures["ratio"].item() == pytest.approx(sum(r.sum().item() for r in ratios))
    labels = batch.labels != IGNORE
    assert figures["logp_difference_max"].item() == pytest.approx(
        (log_p - batch.extra["sampled"]).abs()[labels].max().item()
    )


def test_advantages():
    assert grpo.advantages_of([1.0, 0.0, 0.5], Grpo()) == [0.5, -0.5, 0.0]
    spread = Grpo(divide_by_spread=True)
    assert grpo.advantages_of([1.0, 0.0, 0.5], spread) == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0])
    assert grpo.advantages_of([1.0, None, 0.0], Grpo()) == [0.5, 0.0, -0.5]
    assert grpo.advantages_of([1.0, None], Grpo()) == [0.0, 0.0]
    assert grpo.advantages_of([0.3, 0.3], spread) == [0.0, 0.0]
    assert grpo.advantages_of([0.1] * 3, Grpo()) == [0.0] * 3, "their mean is not 0.1"


# --- rewards
@pytest.mark.parametrize(("answer", "reference", "value"), [
    ("so 1,234.0", "#### 1234", 1), ("#### 7 or 8\n", "8", 1), (r"\boxed{12} of 13", "12", 1), ("none", "3", 0),
    (".5", "5", 0), (".5", "0.50", 1), (r"\boxed{\frac{1}{2}}", "2", 0), ("-3", "3", 0), ("#### x", "3", 0),
    ("5", "five", 0), ("#### 2\n#### 3", "3", 1),
])  # fmt: skip
def test_numbers(answer, reference, value):
    assert rewards.same_number(answer, reference, {}) == value


def judge(*rules: Any, seconds: float = 5.0) -> rewards.Judge:
    given = Grpo.model_validate({"rewards": list(rules)}).rewards
    return rewards.Judge(given, seconds)


def test_rules_are_summed_by_their_weights():
    both = judge({"use": "regex", "options": {"pattern": "^<a>.*</a>$"}, "weight": 0.5}, "exact", "contains")
    values = both("<a>4</a>", "<a>4</a>", {}, "row 0")
    assert values == [1.0, 1.0, 1.0] and both.total(values) == 2.5
    assert both.total(both("x <a>4</a>", "<a>4</a>", {}, "row 0")) == 1.0
    assert judge({"use": "length", "options": {"most": 4}})("12345678", "", {}, "") == [0.5]
    assert Grpo.model_validate({"rewards": "exact"}).rewards == (RewardRule(use="exact"),)


@pytest.mark.parametrize(("rule", "found"), [
    ("nunber", "no such reward; known: number"), ({"use": "regex"}, "options none"),
    ({"use": "regex", "options": {"pattern": "("}}, "not a regular expression"),
    ({"use": "length", "options": {"most": "4"}}, "options most"),
    ({"use": "exact", "options": {"case": 1}}, "options case"), ("nowhere.py:f", "no file"),
])  # fmt: skip
def test_rules_that_are_wrong(rule, found):
    with pytest.raises(ConfigError) as error:
        judge(rule)
    assert found in error.value.found


OWN = """
import os, time
def alone(answer, reference, row):
    assert reference == "" or "key" in row, reference
    return len(answer)
def slow(answer, reference, row):
    time.sleep(9)
def stubborn(answer, reference, row):
    begun = time.monotonic()
    while time.monotonic() - begun < 1:
        try:
            time.sleep(0.05)
        except Exception:
            pass
    return 1.0
def leaving(answer, reference, row):
    raise SystemExit(0)
def huge(answer, reference, row):
    return 1e308
def broken(answer, reference, row):
    return 1 / (len(answer) - len(answer))
def wordy(answer, reference, row):
    return "good"
def starts(answer, reference, row):
    return answer[:2] in ("w1", "w2")
def forked(answer, reference, row):
    child = os.fork()
    if child == 0 and answer == "exit":
        raise SystemExit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 100
def known(answer, reference, row, times=1):
    return times * (row["key"] == reference)
"""


@pytest.mark.parametrize(("name", "why"), [
    ("slow", "longer than 0.2 s"), ("stubborn", "longer than 0.2 s"), ("leaving", "SystemExit"),
    ("huge", "not a finite number"), ("broken", "ZeroDivisionError"), ("wordy", "not a finite number"),
])  # fmt: skip
def test_a_reward_that_fails_is_none_and_named(tmp_path, name, why):
    (tmp_path / "own.py").write_text(OWN)
    asking, begun = judge(f"{tmp_path}/own.py:{name}", seconds=0.2), time.monotonic()
    assert asking("4", "4", {}, "row 7") is None
    assert why in asking.first_failure and "row 7" in asking.first_failure and time.monotonic() - begun < 5


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_of_a_reward_does_not_come_back(tmp_path, workers):
    """Its value, or that it exits, is no result of this answer, nor of the next one."""
    (tmp_path / "own.py").write_text(OWN)
    rules, begun = [RewardRule(use=f"{tmp_path}/own.py:forked")], os.getpid()
    judging = reward_pool.judge_of(Grpo(rewards=tuple(rules), reward_workers=workers))
    found = judging.every(texts("exit", "return", "exit"))
    if os.getpid() != begun:
        os._exit(0)
    assert found == [[3.0], [0.0], [3.0]]


POOLED = """
import ctypes, multiprocessing, os, re, signal, subprocess, sys, time
KEPT = []
def kind(answer, reference, row):
    if answer == "hang":  # in C, where no signal of Python's arrives
        ctypes.CDLL(None).sleep(60) if not row else re.match("(a+)+$", "a" * 60 + "b")
    if answer == "deaf":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)
    if answer == "program":
        child = subprocess.Popen(["sleep", "9"])
        child.terminate()
        return child.wait(2)
    if answer == "fork":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(9,))
        child.start()
        child.join(0.5)
        child.terminate()
        child.join(2)
        return child.exitcode
    if answer == "path":
        return "PYTHONPATH" in os.environ
    if answer == "child":
        subprocess.run([sys.executable, "-c", f"open({row['file']!r}, 'w').write(str(__import__('os').getpid())); "
                        "__import__('time').sleep(60)"])
    if answer == "exit":
        os._exit(3)
    if answer == "fault":
        ctypes.string_at(0)
    if answer == "raise":
        raise KeyError("x")
    if answer == "leak":
        KEPT.append(bytearray(os.urandom(1 << 20)) * 48)
    print("no result")
    return {"pid": os.getpid(), "held": len(KEPT)}.get(answer, len(answer))
"""


@pytest.fixture
def pooled(tmp_path):
    made = []

    def make(count: int = 2, seconds: float = 0.3, *more: Any) -> Any:
        (tmp_path / "pooled.py").write_text(POOLED)
        given = Grpo.model_validate(
            {"rewards": [f"{tmp_path}/pooled.py:kind", *more], "reward_workers": count, "reward_timeout": seconds}
        )
        made.append(reward_pool.judge_of(given))
        return made[-1]

    yield make
    for one in made:
        one._end()


def texts(*answers: str, row: dict[str, Any] | None = None) -> list[tuple[str, str, dict[str, Any], str]]:
    return [(text, "", row or {}, f"row {i}") for i, text in enumerate(answers)]


@pytest.mark.parametrize(
    ("text", "why"),
    further([("deaf", "longer than 0.3 s"), ("fault", "its process ended with -11"), ("raise", "KeyError"),
             ("hang", "longer than 0.3 s"), ("exit", "its process ended with 3")], 3),
)  # fmt: skip
def test_a_worker_that_hangs_or_dies_costs_one_answer_its_reward(pooled, monkeypatch, text, why):
    monkeypatch.setattr(reward_pool, "GRACE_S", 0.1)
    judging, begun = pooled(), time.monotonic()
    assert judging.every(texts("a", "bb", text, "cccc", "ddddd")) == [[1.0], [2.0], None, [4.0], [5.0]]
    assert why in judging.first_failure and "row 2" in judging.first_failure and "kind" in judging.first_failure
    assert judging.every(texts("a", "bb", "ccc")) == [[1.0], [2.0], [3.0]] and time.monotonic() - begun < 8


def test_a_regular_expression_that_takes_forever_ends(pooled, monkeypatch):
    monkeypatch.setattr(reward_pool, "GRACE_S", 0.1)
    judging = pooled(1, 0.3, {"use": "regex", "options": {"pattern": "(b+)+$"}})
    assert judging.every(texts("b" * 40 + "c", "b")) == [None, [1.0, 1.0]]


def test_what_a_reward_began_ends_with_its_worker(pooled, monkeypatch, tmp_path):
    monkeypatch.setattr(reward_pool, "GRACE_S", 0.1)
    assert pooled(1, 1.0).every(texts("deaf", "child", row={"file": str(tmp_path / "pid")})) == [None, None]
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("text", ["program", "fork"])
def test_a_reward_can_terminate_what_it_began(pooled, text):
    assert pooled(1, 5.0).every(texts(text)) == [[-15.0]]


def test_workers_neither_read_nor_change_where_others_find_modules(pooled, tmp_path, monkeypatch):
    """A file of a library's name in the working folder does not replace the library, as it does not in a run."""
    (tmp_path / "subprocess.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert pooled(1, 5.0).every(texts("path")) == [[0.0]]


def test_workers_stay_until_they_are_used_up(pooled):
    (one,), (two,) = (pooled(1).every(texts("pid")) for _ in range(2))
    assert one != two  # of two judges
    judging = pooled(1)
    assert len({tuple(v) for v in judging.every(texts(*["pid"] * 4))}) == 1 and len(judging.workers) == 1
    assert judging.every([]) == []


@pytest.mark.parametrize(("name", "value"), [("RECYCLED", 2), ("GROWTH_bytes", 1 << 26)])
def test_workers_that_leak_are_replaced(pooled, monkeypatch, name, value):
    monkeypatch.setattr(reward_pool, name, value)
    held = [v[0] for v in pooled(1).every(texts(*["leak", "held"] * 3)) if v]
    assert len(held) == 6 and max(held[1::2]) < 3


def test_a_function_of_this_process_and_a_worker_that_does_not_start_are_refused(pooled, monkeypatch):
    name = f"{plugged.HERE}f"
    monkeypatch.setattr(rewards, "open_reward", lambda rule: None)
    with pytest.raises(ConfigError, match="others cannot load"):
        reward_pool.PooledJudge([RewardRule(use=name)], 1.0, 1)
    monkeypatch.setattr(reward_pool.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"(?s)reward_workers: 2.*ended with 1 before its first answer"):
        pooled().every(texts("a"))


def test_a_run_rewards_by_workers_as_by_itself(folder):
    """The same rewards and updates; a hanging function is counted as failed."""
    found = []
    for workers in (0, 2):
        own = [f"grpo.rewards=[{{use: '{folder}/own.py:starts'}}]", f"grpo.reward_workers={workers}", "train.steps=1"]
        lines = metrics(grpo_run(folder, packing={}, sets=own))
        found.append([(l["loss"], l["reward"], l["rewards_failed"]) for l in lines if "loss" in l])
    assert found[0] == found[1]


# --- whole runs
@pytest.fixture(scope="module")
def folder(box):
    rows = [{"messages": [
        {"role": "user", "content": f"w{a} w{b}"}, {"role": "assistant", "content": f"w{a + b}"},
    ], "key": f"w{a + b}"} for a in range(4) for b in range(4)]  # fmt: skip
    (box / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (box / "own.py").write_text(OWN)
    return box


def grpo_run(box: Path, *, sets: Sequence[str] = (), rows: int = 8, **with_: Any) -> Config:
    document = {
        "objective": "grpo",
        "grpo": {"rewards": [
            {"use": "length", "options": {"most": 6}}
        ], "prompts": 4, "group": 4, "max_new": 12, "slots": 6, "truncated": "keep"},
        "data": {"path": str(box / "sums.jsonl"), "cache": str(box / "cache"), "eval": 0.2},
        "model": str(box / "untied"), "batch": {"seq": 64, "micro_tokens": 64 * rows},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant"},
        "train": {"steps": 4, "log_every": 1, "eval_every": 2, "export": False}, "seed": make_golden.SEED,
        "output": str(box / "grpo"), "with": {name.replace("_", "-"): options for name, options in with_.items()},
    }  # fmt: skip
    return parse_config(json.dumps(document), "grpo.yaml", sets)


def test_a_run_samples_learns_and_reports(folder):
    lines = metrics(grpo_run(folder, packing={}, sets=["train.steps=12"]))
    of_steps, evals = [l for l in lines if "loss" in l], [l["eval_loss"] for l in lines if "eval_loss" in l]
    learning = [l for l in of_steps if l["target_tokens"]]  # where groups differ
    assert learning and all(l["ratio"] == 1.0 and l["clipped"] == 0 for l in learning)  # first updates
    assert all(l["logp_difference_max"] < 1e-4 for l in of_steps)
    assert all(0 < l["reward"] <= 1 and l["answer_tokens"] <= 12 and l["rollout_s"] > 0 for l in of_steps)
    rewarded = [l["reward"] for l in of_steps]
    assert sum(rewarded[-4:]) > sum(rewarded[:4])  # shorter answers
    assert len(evals) == 7
    assert all(l["eval_truncated"] <= 1 and "eval_ratio" not in l for l in lines if "eval_loss" in l)


def test_several_updates_of_the_same_answers_begin_at_a_ratio_of_one(folder):
    """To the bit: log-probabilities before the first update are those that the first update sees; beside averages."""
    config = grpo_run(folder, packing={}, sets=["grpo.updates=2"], ema={"decay": 0.5})
    lines = [l for l in metrics(config) if "loss" in l]
    assert [l["ratio"] == 1.0 for l in lines] == [True, False, True, False]
    assert lines[0]["reward"] == lines[1]["reward"] and lines[0]["target_tokens"] == lines[1]["target_tokens"]


def test_averages_of_the_weights_answer_an_evaluation(folder):
    """Averages of so many steps are still the first weights: greedy answers stay, while those of the weights change."""
    found = []
    for with_ in ({}, {"ema": {"decay": 0.99999}}):
        trainer = assembled(grpo_run(folder, packing={}, sets=["optim.lr=0.05"], **with_))
        before = evaluate(trainer)
        list(steps(trainer, 3))
        found.append(evaluate(trainer) == before)
    assert found == [False, True]


def test_adapters_are_sampled_with_and_kept_near_the_base(folder):
    sets = ["grpo.beta=0.1", "optim.lr=0.05", "train.eval_every=null", "train.steps=2"]
    dropped, plain = (
        [l for l in metrics(grpo_run(folder, packing={}, lora={"rank": 4, **more}, sets=sets)) if "loss" in l]
        for more in ({"dropout": 0.2}, {})
    )
    assert dropped[0]["kl"] < 1e-3 < dropped[-1]["kl"]  # dropout moves the first one
    assert plain[0]["kl"] == 0 and all(l["logp_difference_max"] < 1e-4 for l in plain)


def test_packed_rows_and_single_ones_learn_the_same(folder):
    found = {}
    for name, with_ in (("packed", {"packing": {}}), ("single", {})):
        trainer = assembled(grpo_run(folder, rows=2 if name == "packed" else 16, **with_))
        losses = [loss for loss, *_ in steps(trainer, 2)]
        found[name] = losses, weights(trainer)
    assert found["packed"][0] == pytest.approx(found["single"][0], abs=1e-5)
    for name, value in found["packed"][1].items():
        assert torch.allclose(value, found["single"][1][name], atol=2e-5), name


@pytest.mark.parametrize("normalise", ["tokens", "sequences", "constant"])
def test_answers_as_good_as_their_group_are_left_out_and_change_nothing(folder, normalise, monkeypatch):
    own = [f"grpo.rewards=[{{use: '{folder}/own.py:starts'}}]", "grpo.group=2", "grpo.prompts=8"]  # half of the groups
    found = []
    for moves in (None, lambda self, r: True):
        if moves is not None:
            monkeypatch.setattr(rollout.Sampler, "moves", moves)
        trainer = assembled(grpo_run(folder, packing={}, sets=[*own, f"grpo.normalise={normalise}"]))
        found.append(first_gradients(trainer))
        assert 0 < trainer.host_figures["groups_flat"] < 1
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert furthest(found[0][1], found[1][1]) < 1e-5


def ranked(box, both, **over):
    with_: dict[str, Any] = {"packing": {}, **both}
    sets = through_transformers(box) if with_.pop("theirs", False) else []
    if launched()[1] > 1:
        with_ |= over
    trainer = assembled(grpo_run(box, rows=2, sets=sets, **with_))
    found = [(loss, norm) for loss, norm, _ in steps(trainer, 2)]
    timeless = {k: v for k, v in trainer.host_figures.items() if not k.startswith("rollout")}
    return found, weights(trainer), timeless


@pytest.mark.parametrize(("both", "over"), further([
    ({"lora": {"rank": 4}}, {"fsdp": {}}), ({"theirs": True}, {"ddp": {}}), ({"theirs": True}, {"fsdp": {}}),
    ({}, {"ddp": {}}), ({}, {"fsdp": {}}), ({}, {"fsdp": {"stage": 2}}),
], 2), ids=str)  # fmt: skip
def test_two_ranks_are_one(folder, pair, both, over):
    alone, (first, second) = ranked(folder, both), pair(partial(ranked, both=both, **over), folder)
    for own in (first, second):
        assert own[0] == [pytest.approx(both, rel=1e-5, abs=1e-6) for both in alone[0]]
        assert own[2] == pytest.approx(alone[2], rel=1e-6)
        for name, value in alone[1].items():
            assert torch.allclose(own[1][name], value, atol=1e-5), name


def sampled_twice(box: Path) -> list[list[list[float]]]:
    sets = [f"model={box / 'tied'}"]
    trainer = assembled(grpo_run(box, rows=2, packing={}, neftune={"alpha": 50.0}, fsdp={}, sets=sets))
    list(steps(trainer, 1))
    given = [(i, i, trainer.sources.train.documents(i)[0]) for i in range(2)]
    return [[r.answer.log_p for g in trainer.stream.sampler.answers(given, 1) for r in g] for _ in range(2)]


def test_noise_of_training_is_off_while_ranks_sample_from_shards(folder, pair):
    """Hooks that other techniques put around the model and the embedding run as in any pass."""
    for first, again in pair(sampled_twice, folder):
        assert first == again


def test_sharded_blocks_sample_uncompiled(model):
    """A compiled block runs its hooks, of which FSDP's would free the weights after each token."""

    def compiled(*_):
        raise AssertionError

    block, cache = model.blocks["0"], kv_cache.SlotCache(model, 1, 8)
    block._get_fsdp_state, block._compiled_call_impl, cache.kernel = (lambda: None), compiled, compiled
    try:
        with cache.within(model), cache.one_shape():
            assert block._compiled_call_impl is not compiled
        assert block._compiled_call_impl is compiled
    finally:
        del block._get_fsdp_state, block._compiled_call_impl


def through_transformers(box: Path) -> list[str]:
    return [f"model={{path: '{box / 'untied'}', implementation: transformers}}"]


@pytest.mark.parametrize("with_", further([
    {"lora": {"rank": 4}}, {"neftune": {"alpha": 5}}, {}, {"attention": {}, "recompute": {}}, {"nf4": {}, "lora": {}},
], 1), ids=str)  # fmt: skip
def test_a_model_of_transformers_learns_as_our_decoder_does(folder, with_):
    """The same weights, draws and updates: what it learns differs by rounding alone."""
    found = []
    for sets in ([], through_transformers(folder)):
        trainer = assembled(
            grpo_run(folder, packing={}, sets=[*sets, "grpo.beta=0.1"] if "lora" in with_ else sets, **with_)
        )
        found.append([loss for loss, *_ in steps(trainer, 2)])
        noise = "neftune" in with_  # of training alone
        assert (trainer.metrics["logp_difference_max"] < 1e-4) != noise and trainer.host_figures["reward"] > 0
    assert found[1] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("implementation", further(["native", "transformers"], 1))
def test_a_resumed_run_samples_and_learns_the_same_to_the_bit(folder, tmp_path, implementation):
    own = through_transformers(folder) if implementation == "transformers" else []

    def trained(output: str, *sets: str, resume: Any = None) -> list[dict[str, Any]]:
        config = grpo_run(folder, packing={}, sets=[f"output={tmp_path / output}", "train.save_every=2", *own, *sets])
        assert fit.run(fit.RunRequest(decide(config), resume=resume)).code == 0
        lines = [json.loads(l) for l in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        timed = ("_s", "tokens_per_s", "peak_bytes", "mfu")
        return [{k: v for k, v in l.items() if not k.endswith(timed)} for l in lines if "loss" in l]

    whole = trained("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-000004")
    again = trained("half", resume="auto")
    assert again == whole
    answers = [(tmp_path / n / "answers.jsonl").read_text().splitlines() for n in ("whole", "half")]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("sets", "kind", "found"), [
    (["grpo.temperature=1e-40"], ConfigError, "1e-40"),
    (["grpo.max_new=60"], ConfigError, "tokens and `grpo.max_new: 60`"),
    (["batch.tokens=64"], ConfigError, "4 prompts x 4 answers"),
    (["data.stream=true", "data.eval=null"], ConfigError, "prompts are numbered"),
    (["grpo.beta=0.1"], NeedsError, "original weights are not kept"),
    (["grpo.rewards=[{use: own.py:f}]"], ConfigError, "no file"),
    (["grpo.rewards=[nunber]"], ConfigError, "no such reward; known: number"),
    (["dpo={}"], ConfigError, "this objective does not use it"),
])  # fmt: skip
def test_what_cannot_be_is_refused(folder, sets, kind, found):
    with pytest.raises(kind) as error:
        assembled(grpo_run(folder, sets=sets))
    assert found in error.value.found


def test_too_many_answers_at_a_time_name_the_key(folder, monkeypatch):
    trainer = assembled(grpo_run(folder))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rollout, "sample", full)
    with pytest.raises(RunError, match=r"(?s)grpo.slots: 6.*out of memory while sampling.*grpo.slots: 3"):
        next(trainer.batches)


def test_noise_of_training_is_off_while_sampling(folder):
    """Only then is the difference of both that of dropout in training, and the sampler's draws are those without."""
    plain = assembled(grpo_run(folder, packing={}))
    noisy = assembled(grpo_run(folder, packing={}, neftune={"alpha": 50.0}))
    for trainer in (plain, noisy):
        list(steps(trainer, 1))
    assert plain.host_figures["reward"] == noisy.host_figures["reward"]
    assert plain.metrics["logp_difference_mean"] < 1e-2 < noisy.metrics["logp_difference_mean"]


def test_compiled_parts_are_not_compiled_for_prompts(folder):
    """Lengths of prompts are many: each would be another graph, and a full graph has a limit of them."""
    trainer = assembled(grpo_run(folder, packing={}))
    norm = trainer.model.norm
    norm.compile(backend="eager", dynamic=False, fullgraph=True)
    list(steps(trainer, 1))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (3, 7, 70):
        ids = np.resize(np.arange(4, 60), length)
        sampling.sample(trainer.model, [sampling.PromptIds(0, ids)], 2, sampling.Drawing(2, 1.0, (), 0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert norm._compiled_call_impl is not None


def test_one_token_answers_fill_a_row_with_documents(folder):
    trainer = assembled(
        grpo_run(folder, packing={}, rows=1, sets=["grpo.max_new=1", "batch.seq=128", "batch.micro_tokens=128"])
    )
    ((loss, *_),) = steps(trainer, 1)
    assert np.isfinite(loss)


def test_a_run_that_learns_nothing_is_logged(folder):
    never = "grpo.rewards=[{use: regex, options: {pattern: never}}]"
    lines = metrics(grpo_run(folder, packing={}, sets=[never, "train.steps=2"]))
    assert any("equal rewards" in str(l.get("nothing_to_learn")) for l in lines)


@pytest.mark.parametrize("with_", further(
    [{"ema": {"decay": 0.5}}, {"update-in-backward": {}}, {}, {"adam8bit": {}}, {"lora": {}}], 1,
), ids=str)  # fmt: skip
def test_a_step_without_anything_to_learn_changes_no_weight(folder, monkeypatch, with_):
    """By groups of equal rewards in the second step: neither the weights' decay nor the moments act."""
    sets = ["optim.weight_decay=0.5", "train.steps=3", "train.log_every=1"]
    sets += ["optim.clip=null"] * ("update-in-backward" in with_)
    kept: list[dict[str, torch.Tensor]] = []
    plain = rollout.Sampler.step

    def step(self: Any, step: int, *more: Any) -> Any:
        kept.append({name: w.clone() for name, w in weights(self.trainer).items()})
        self.moves_none = step == 2
        return plain(self, step, *more)

    monkeypatch.setattr(rollout.Sampler, "step", step)
    monkeypatch.setattr(rollout.Sampler, "moves", lambda self, r: not self.moves_none)
    lines = [l for l in metrics(grpo_run(folder, rows=16, packing={}, sets=sets, **with_)) if "loss" in l]
    same = [all(torch.equal(w, after[name]) for name, w in before.items()) for before, after in pairwise(kept)]
    assert same == [False, True]
    assert [l.get("updates_left_out", 0) for l in lines] == [0, 1, 0] and lines[1]["loss"] == lines[1]["grad_norm"] == 0


def test_a_dry_run_counts_prompts_and_tries_the_rewards(folder):
    found, _ = dry_run(decide(grpo_run(folder, packing={}, sets=["train.steps=null"])), None, "optrush train")
    assert found["data"]["steps"] == 4  # 13 rows of 4 prompts
    broken = f"grpo.rewards=[{{use: '{folder}/own.py:broken'}}]"
    with pytest.raises(DataError, match="ZeroDivisionError"):
        dry_run(decide(grpo_run(folder, packing={}, sets=[broken])), None, "optrush train")


def test_a_plan_has_both_phases(folder):
    text = (
        f"{{model: {{shape: llama-3.2-1b, tokenizer: {folder / 'untied'}}}, objective: grpo,"
        f" data: {{path: {folder / 'sums.jsonl'}}}, batch: {{seq: 1024}},"
        " grpo: {prompts: 16, group: 16, max_new: 960, slots: 128}, output: x, method: full}"
    )
    short, long = (predict(parse_config(text, "x", (f"grpo.max_new={n}",)), "h200") for n in (240, 960))
    lines = {line.name: line.bytes for line in long.lines}
    room = lines["rollout.cache"] / (2 * 2 * 8 * 64 * 16 * 129)  # keys and values in bf16, and a slot that is empty
    assert room == 1024  # a multiple of 64, as the cache has
    sampled = [sum(w.seconds for w in p.work if w.name.startswith("rollout.")) for p in (short, long)]
    assert sampled[1] > 4 * sampled[0] > 0
    learnt = [(p.step_s or 0) - seconds for p, seconds in zip((short, long), sampled, strict=True)]
    assert 3 < learnt[1] / learnt[0] < 4.1  # packed, answers fill as many rows as they have tokens
    tokens = [(p.step_s or 0) * (p.tokens_per_s or 0) / 256 for p in (short, long)]
    assert tokens[1] - tokens[0] == pytest.approx(720, rel=0.03)  # of an answer
    free = [predict(parse_config(text, "x", ("grpo.slots=null", f"grpo.prompts={n}")), "h200") for n in (16, 256)]
    few, many = (next(line.bytes for line in p.lines if line.name == "rollout.cache") for p in free)
    assert few == pytest.approx(257 / 129 * lines["rollout.cache"])  # all of a step,
    assert 0.24 < many / NAMED["h200"].memory_bytes < 0.251  # or a quarter of the memory
    ddp = predict(parse_config(text, "x", ("grpo.slots=256",)), "2 x h200")
    assert {line.name: line.bytes for line in ddp.lines}["rollout.cache"] == lines["rollout.cache"]  # half the answers


def test_a_plan_for_a_model_of_transformers_launches_each_operator_of_a_token(folder):
    """Its steps are not recorded: 36 tokens, 45 operators in each of its blocks."""
    plans = [predict(grpo_run(folder, packing={}, sets=s), "h200") for s in ([], through_transformers(folder))]
    ours, theirs = (max(w.launches for w in plan.work if w.name == "rollout.cache") for plan in plans)
    assert theirs == 45 * 2 * ours > 0


@pytest.mark.parametrize("with_", ["", "bf16: {}, "])
def test_slots_left_out_take_a_quarter_of_the_memory_in_any_precision(folder, with_):
    text = (
        f"{{model: {{shape: llama-3.2-1b, tokenizer: {folder / 'untied'}}}, objective: grpo, output: x,"
        f" data: {{path: {folder / 'sums.jsonl'}}}, batch: {{seq: 1024, micro_tokens: 1024}},"
        f" grpo: {{prompts: 512, group: 16, max_new: 960}}, with: {{{with_}packing: {{}}}}}}"
    )
    lines = {line.name: line.bytes for line in predict(parse_config(text, "x", ()), "h200").lines}
    assert 0.24 < lines["rollout.cache"] / NAMED["h200"].memory_bytes < 0.251


def test_a_plan_counts_what_a_token_reads_of_weights(folder):
    """Under `fsdp` they are gathered in the type of the products; quantised ones are written first."""

    def seconds(hardware: str, *names: str) -> dict[str, float]:
        text = (
            f"{{model: {{shape: llama-3.2-1b, tokenizer: {folder / 'untied'}}}, objective: grpo, output: x,"
            f" data: {{path: {folder / 'sums.jsonl'}}}, batch: {{seq: 1024, micro_tokens: 1024}},"
            f" with: {{packing: {{}}, fused-loss: {{}}, {', '.join(f'{name}: {{}}' for name in names)}}}}}"
        )
        return {w.name: w.seconds for w in predict(parse_config(text, "x", ()), hardware).work}

    alone, cut, half = seconds("h200", "amp"), seconds("2 x h200", "amp", "fsdp"), seconds("h200", "bf16")
    assert cut["rollout.weights"] == pytest.approx(half["rollout.weights"]) == alone["rollout.weights"] / 2
    assert alone["rollout.casts"] > 0 and not cut.get("rollout.casts")
    lora, nf4 = (seconds("h200", "bf16", "lora", *more) for more in ((), ("nf4",)))
    assert nf4["rollout.dense"] > 0.3 * nf4["rollout.weights"] and "rollout.dense" not in lora
    for frozen in (seconds("h200", "amp", "lora"), seconds("h200", "amp", "ia3")):  # held in the products' type
        assert frozen["rollout.weights"] == pytest.approx(half["rollout.weights"]) and not frozen.get("rollout.casts")


def test_what_repeats_or_measures_steps_is_refused(folder):
    config = grpo_run(folder)
    single = ladder.find_ladder("single-gpu", config)
    for work in (
        lambda: tune.plan_rungs(config),
        lambda: run_overfit(decide(config), 1),
        lambda: ladder.resolve_rungs(single, config, True),
    ):
        with pytest.raises(ConfigError, match="sampled from the weights"):
            work()


def test_rewards_that_all_fail_end_the_run_and_a_row_reaches_its_function(folder):
    broken = f"grpo.rewards=[{{use: '{folder}/own.py:broken'}}]"
    trainer = assembled(grpo_run(folder, packing={}, sets=[broken]))
    with pytest.raises(DataError, match="ZeroDivisionError"):
        next(trainer.batches)
    known = f"grpo.rewards=[{{use: '{folder}/own.py:known', options: {{times: 3}}}}]"
    trainer = assembled(grpo_run(folder, packing={}, sets=[known]))
    next(trainer.batches)
    assert trainer.host_figures["reward"] == 3.0


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 0.6, 1.0), (3, 1.0, 0.7), (5, 0.8, 2.0), (0, 1e-9, 1.0)]
)
def test_the_likeliest_are_those_of_transformers(top_k, top_p, temperature):
    from transformers.generation import logits_process as theirs

    torch.manual_seed(0)
    logits = 2 * torch.randn(4, 40)
    want = logits / temperature
    for step in (
        theirs.TopKLogitsWarper(top_k) if top_k else None,
        theirs.TopPLogitsWarper(top_p) if top_p < 1 else None,
    ):
        want = want if step is None else step(None, want)
    drawing = sampling.Drawing(1, temperature, (), 0, top_k=top_k, top_p=top_p)
    found = sampling.keep_likeliest(logits, drawing)
    assert torch.equal(found.isinf(), want.isinf()) and not found.isinf().all(-1).any()
    assert torch.equal(found[~found.isinf()], logits[~found.isinf()])


def test_a_gpu_without_triton_is_refused(folder, monkeypatch):
    trainer = assembled(grpo_run(folder))
    trainer.env = replace(trainer.env, device=NAMED["h100"])
    trainer.world = replace(trainer.world, device=torch.device("cuda"))
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    with pytest.raises(NeedsError) as error:
        rollout._engine(trainer, [trainer.sources.train])
    assert error.value.found == "triton is not installed"


# --- prompts without an answer

USER = {"role": "user", "content": "w1 w2"}
TALK = [USER, {"role": "assistant", "content": "w3"}]
LENGTH = "grpo.rewards=[{use: length, options: {most: 6}}]"


@pytest.mark.parametrize("row", [
    {"prompt": "w1 w2"}, {"prompt": [USER]}, {"prompt": USER}, {"prompt": json.dumps([USER])},
    {"prompt": "w1 w2", "completion": None, "answer": "w3"}, {"prompt": "w1 w2", "system": "w5"}, {"messages": [USER]},
    {"messages": [*TALK, USER]}, {"messages": json.dumps([USER]), "system": "w5"},
    {"conversations": [{"from": "human", "value": "w1 w2"}]}, {"instruction": "w1", "input": "w2"},
], ids=str)  # fmt: skip
def test_prompts_alone_are_sampled_where_no_reward_compares(folder, tmp_path, row):
    """Its prompt is that of the same row with an answer, and a function gets an empty reference."""
    m, turns = row.get("messages", []), row.get("prompt") if isinstance(row.get("prompt"), list | dict) else None
    whole = {
        "prompt": {**row, "completion": [TALK[1]] if turns or row.get("prompt", "").startswith("[") else " w3"},
        "messages": {**row, "messages": [*(json.loads(m) if isinstance(m, str) else m), TALK[1]]},
        "conversations": {**row, "conversations": [*row.get("conversations", []), {"from": "gpt", "value": "w3"}]},
        "instruction": {**row, "output": "w3"},
    }[next(iter(row))]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, {**whole, "key": 1}) * 8))
    sets = [
        f"data.path={tmp_path / 'rows.jsonl'}", "data.eval=null", f"grpo.rewards=[{{use: '{folder}/own.py:alone'}}]",
    ]  # fmt: skip
    trainer = assembled(grpo_run(folder, packing={}, sets=[*sets, "grpo.max_new=4", "train.steps=1"]))
    documents = [trainer.sources.train.documents(i)[0] for i in range(2)]
    prompts = [d.ids[: rollout.begin_of_answer(d)].tolist() for d in documents]
    assert prompts[0] == prompts[1]
    assert [trainer.stream.sampler.reference(i, d).strip() for i, d in enumerate(documents)] == ["", "w3"]
    list(steps(trainer, 1))
    assert trainer.host_figures["rewards_failed"] == 0


@pytest.mark.parametrize(("row", "do"), [
    ({"prompt": "w1 w2"}, "add the answer"), ({"messages": [USER]}, "add the answer"),
    ({"messages": [*TALK, USER]}, "add the answer"), ({"conversations": [USER]}, "add the answer"),
    ({"prompt": "w1", "answer": "w3"}, "`data.columns: {answer: completion}`"),
    ({"instruction": "w1", "response": "w3"}, "`data.columns: {response: output}`"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("reward", ["number", "exact", "contains"])
def test_prompts_alone_are_refused_by_the_name_of_a_reward_that_compares(folder, tmp_path, row, do, reward):
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    both = f"grpo.rewards=[{{use: length, options: {{most: 6}}}}, {reward}]"
    with pytest.raises(DataError) as error:
        assembled(grpo_run(folder, sets=[f"data.path={tmp_path / 'rows.jsonl'}", "data.eval=null", both]))
    assert f"a prompt without the answer that the reward `{reward}` needs" in error.value.found
    assert error.value.do.startswith(do) and "regex, length" in error.value.do and "rows.jsonl:1" in error.value.asked


def test_prompts_alone_train_evaluate_and_show_no_reference(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))
    sets = [f"data.path={tmp_path / 'rows.jsonl'}", f"output={tmp_path / 'run'}", LENGTH, "grpo.prompts=2"]
    config = grpo_run(folder, rows=4, packing={}, sets=[*sets, "train.steps=2"])
    assert dry_run(decide(config), None, "optrush train")[0]["data"]["steps"] == 2
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [line["reference"] for line in lines] == ["", ""]
    with pytest.raises(DataError, match="no known format"):  # of another objective
        assembled(parse_config(json.dumps({
            "objective": "sft", "model": str(folder / "untied"), "data": {"path": str(tmp_path / "rows.jsonl")},
            "batch": {"seq": 64}, "output": "x", "train": {"steps": 1},
        }), "x", ()))  # fmt: skip


@pytest.mark.parametrize("kind", ["sample", "separator", "text rows"])
def test_a_function_gets_the_row_of_any_source(folder, tiny_folder, tmp_path, kind):
    """As the run itself reads it: made recipes, whose file is a temporary one, and tables with a separator."""
    (tmp_path / "own.py").write_text(
        "def own(answer, reference, row):\n    return len(row['messages' if 'messages' in row else 'prompt'])\n"
    )
    (tmp_path / "rows.csv").write_text("prompt;completion\nw1 w2; w3\n" * 1 + "w2 w1; w4\n" * 7)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1 w2", "completion": " w3"}\n' * 8)
    data = {
        "sample": {"sample": "recipes", "max_samples": 8, "too_long": "drop"},
        "separator": {"path": str(tmp_path / "rows.csv"), "separator": ";"},
        "text rows": {"path": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "prompt"}},
    }[kind]  # fmt: skip
    model, seq = (tiny_folder, 512) if kind == "sample" else (folder / "untied", 64)
    sets = [
        f"data={json.dumps(data)}", f"model={model}", f"batch.seq={seq}", f"batch.micro_tokens={seq}", "grpo.max_new=2",
    ]  # fmt: skip
    own = f"grpo.rewards=[{{use: '{tmp_path}/own.py:own'}}]"
    trainer = assembled(grpo_run(folder, packing={}, sets=[*sets, own, "train.steps=1"]))
    list(steps(trainer, 1))
    assert trainer.host_figures["rewards_failed"] == 0 and trainer.host_figures["reward"] >= 2


def test_rewards_that_compare_are_those_that_read_the_reference():
    assert {rule for rule in rewards.BUILT_IN if RewardRule(use=rule).compares} == set(rewards.BUILT_IN)
    assert not any(RewardRule(use=rule).compares for rule in (*rewards.WITH_OPTIONS, "own.py:f"))
