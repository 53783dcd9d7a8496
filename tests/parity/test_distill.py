"""`objective: distill` against the formula in float64: losses, gradients, both divergences, every cutting."""

import copy
import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush.config import Config
from optrush.data import stored_tokens
from optrush.decide import check_teacher, decide
from optrush.errors import ConfigError, DataError, NeedsError
from optrush.objectives import LESSONS
from optrush.planner import search
from optrush.technique import Part
from optrush.trainer import run as fit
from optrush.trainer import sample_store
from optrush.trainer import teacher as other_model
from optrush.trainer.dry_run import dry_run, dry_run_text
from optrush.trainer.overfit import run_overfit
from optrush.trainer.trainer import evaluate

from golden import make_golden
from golden.make_golden import CASES, PER_STEP
from trials import apart, assembled, golden_run, published, steps, undrawn

CLOSE = 1e-5
K = 7  # stored tokens of a target
BLENDS = {
    "forward": {"temperature": 2.0, "alpha": 0.3},
    "reverse": {"divergence": "reverse", "temperature": 0.7, "alpha": 0.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(box):
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


@pytest.fixture
def no_second_pass(monkeypatch):
    """Make the loading of a teacher an error."""

    def loaded(*_):
        raise AssertionError("the teacher was loaded")

    return lambda: monkeypatch.setattr(other_model, "load_teacher", loaded)


def distill_run(box, blend="forward", teacher="teacher", case="untied", **how):
    config = golden_run(box, CASES[case], **how)
    settings = {"teacher": str(box / teacher), "dtype": "float32", "chunk": 17, **BLENDS[blend]}
    changed = {"objective": "distill", "distill": settings}
    return Config.model_validate({**config.model_dump(by_alias=True), **changed})


@cache
def wanted(box, case, blend, k=None):
    """Loss, gradients and metrics of the first step in float64, documents one at a time.

    k: only the teacher's k likeliest tokens are known, and all others are one class.
    """
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
        if k is not None:
            top = log_q.topk(k, -1).indices
            log_p, log_q = (
                torch.cat((x.gather(1, top), (1 - x.exp().gather(1, top).sum(-1, keepdim=True)).log()), -1)
                for x in (log_p, log_q)
            )
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


def stored(config: Config, cache: Path, k: int, **changes: Any) -> Config:
    """The configuration with k stored tokens a target, in this cache."""
    settings = config.distill.model_copy(update={"store": k, **changes})
    data = config.data.model_copy(update={"cache": str(cache)})
    return config.model_copy(update={"distill": settings, "data": data})


def ours(box, case, blend, how, cache=None, k=0):
    config = distill_run(box, blend, case=case, **how)
    config = config if cache is None else stored(config, cache, k)
    job = assembled(config)
    terms = job.all_reduce_int(sum(b.n_terms for b in next(copy.copy(job).batches)))
    job = assembled(config)
    loss, grads = published(job)
    return loss, grads, [job.all_reduce(job.metrics[name]).item() / terms for name in LESSONS]


@pytest.mark.parametrize("case", further(["chat", "untied", "tied"], 1))
@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("how", further(
    [{"packed": True, "rows": 2, "attention": {}}, {"rows": 16}, {"sets": ["model.implementation=transformers"]}], 2,
), ids=["packed", "rows", "transformers"])  # fmt: skip
def test_losses_metrics_and_gradients_are_the_formula(folder, case, blend, how):
    found, want = ours(folder, case, blend, how), wanted(folder, case, blend)
    assert found[0] == pytest.approx(want[0], rel=CLOSE) and found[2] == pytest.approx(want[2], rel=CLOSE)
    assert found[1].keys() == want[1].keys()
    for name, g in want[1].items():
        assert apart(found[1][name], g) < CLOSE, name


@pytest.mark.parametrize(("data", "k"), further([("fsdp", 0), ("ddp", K), ("ddp", 0)], 2))
def test_two_ranks(folder, tmp_path, pair, no_second_pass, data, k):
    """With a teacher, and with the tokens that are stored of it, each rank's part."""
    want, how = wanted(folder, "untied", "forward", k or None), {"packed": True, "rows": 1, data: {}}
    for found in pair(ours, folder, "untied", "forward", how, *((tmp_path, k) if k else ())):
        assert found[0] == pytest.approx(want[0], rel=CLOSE)
        assert data == "fsdp" or max(apart(found[1][name], g) for name, g in want[1].items()) < CLOSE
    if k:
        no_second_pass()
        assert ours(folder, "untied", "forward", {"rows": 2}, tmp_path, k)[0] == pytest.approx(want[0], rel=CLOSE)


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
    assert fit.run(fit.RunRequest(decide(config))).code == 0
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


@pytest.mark.parametrize(("sizes", "sets", "k"), further([
    ((512, 96), ["data.random=8", "data.path=null"], None), ((96, 512), [], None), ((512, 96), [], None),
    ((512, 96), [], 7), ((96, 512), ["data.random=8", "data.path=null"], None),
], 2), ids=str)  # fmt: skip
def test_embeddings_of_other_lengths(folder, tmp_path, sizes, sets, k):
    """Of which both have the tokenizer's 80 tokens: no id is drawn that the shorter one has not."""
    for name, rows in zip(("untied", "teacher"), sizes):
        shutil.copytree(folder / name, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(tmp_path / name)
    shutil.copy(folder / "text.jsonl", tmp_path)
    sets = [*sets, "train.steps=2", f"output={tmp_path / 'out'}"]
    config = distill_run(tmp_path, sets=sets, packed=True)
    config = config if k is None else stored(config, tmp_path / "cache", k)
    assert dry_run(decide(config), None, "train")[0]
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines if "loss" in line][-1] > 0


@pytest.mark.parametrize("kind", ["tokens", "rows", "positions", "none", "fused", "ranks"])
def test_refused(folder, tmp_path, kind):
    config = distill_run(folder)
    if kind == "none":
        with pytest.raises(ConfigError, match="it is missing"):
            decide(Config.model_validate({**config.model_dump(by_alias=True), "distill": {}}))
    elif kind == "fused":
        with pytest.raises(NeedsError, match="already computes logits in chunks"):
            decide(distill_run(folder, fused_loss={}))
    elif kind == "ranks":
        env = dataclasses.replace(decide(config).env, claimed=frozenset({Part.CP}))
        with pytest.raises(NeedsError, match="whole rows"):
            check_teacher(env)
    else:
        shutil.copytree(folder / "teacher", tmp_path / "other")
        own = config.distill.model_copy(update={"teacher": str(tmp_path / "other")})
        if kind == "positions":
            short = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 16}
            (tmp_path / "other" / "config.json").write_text(json.dumps(short))
            with pytest.raises(ConfigError, match="a model of 16 positions"):
                decide(config.model_copy(update={"distill": own}))
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


# --- A teacher whose tokens were stored.


@pytest.mark.parametrize(("case", "how"), further(
    [("chat", {"packed": True, "rows": 2, "attention": {}}), ("untied", {"rows": 16})], 1,
), ids=["packed", "rows"])  # fmt: skip
def test_stored_tokens_are_the_formula_in_any_layout(folder, tmp_path, no_second_pass, case, how):
    """The whole vocabulary is the live loss; fewer are the formula with one class more; both in rows of any kind."""
    vocab = decide(distill_run(folder, case=case)).env.vocab
    for k, want in ((vocab, wanted(folder, case, "forward")), (K, wanted(folder, case, "forward", K))):
        found = ours(folder, case, "forward", how, tmp_path, k)
        assert found[0] == pytest.approx(want[0], rel=CLOSE) and found[2] == pytest.approx(want[2], rel=CLOSE)
        assert max(apart(found[1][name], g) for name, g in want[1].items()) < CLOSE
    assert abs(wanted(folder, case, "forward", K)[0] / wanted(folder, case, "forward")[0] - 1) > 100 * CLOSE
    no_second_pass()
    other = {"rows": 4} if how.get("packed") else {"packed": True, "rows": 1, "attention": {}}
    assert ours(folder, case, "forward", other, tmp_path, K)[0] == pytest.approx(want[0], rel=CLOSE)


def test_a_run_with_stored_tokens(folder, tmp_path, no_second_pass, monkeypatch):
    """Trains, evaluates and resumes as with the live teacher, from several files, more than once over the data."""
    monkeypatch.setattr(sample_store, "FILE_BYTES", 2**16)
    undrawn(monkeypatch)
    sets = [f"data.eval={folder}/held.jsonl", "train.save_every=2", f"data.max_samples={3 * PER_STEP // 2}"]
    sets += ["train.keep=9", "train.steps=5", "train.export=false", f"output={tmp_path}/live"]
    live = distill_run(folder, packed=True, sets=sets)
    config = stored(live, tmp_path, decide(live).env.vocab)
    first, again = (config.model_copy(update={"output": str(tmp_path / name)}) for name in ("first", "again"))
    lines = [trained(live), trained(first)]
    assert len(list((tmp_path / "teacher").glob("*.npy"))) > 2
    no_second_pass()
    lines.append(trained(again, resume=tmp_path / "first" / "checkpoints" / "step-000002"))
    for theirs in lines[1:]:
        for a, b in zip(theirs[::-1], lines[0][::-1], strict=False):
            for name in {"step", "loss", "eval_loss", "kl", "eval_kl", "grad_norm"} & b.keys():
                assert a[name] == pytest.approx(b[name], rel=1e-4), (b["step"], name)


def trained(config: Config, **how: Any) -> list[dict[str, Any]]:
    assert fit.run(fit.RunRequest(decide(config), **how)).code == 0
    return [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]


def test_overfit_stores_nothing(folder, tmp_path):
    config = stored(distill_run(folder, packed=True), tmp_path, K)
    result = run_overfit(decide(config), 1, 6)
    assert result.steps >= 2 and result.loss < result.first_loss and not (tmp_path / "teacher").exists()


def test_what_is_stored_belongs_to_one_teacher_and_its_data(folder, tmp_path):
    """A change of what determines the tokens makes files of its own; any other change takes those that are there."""
    config = stored(distill_run(folder), tmp_path / "cache", K)
    for name in ("untied", "teacher"):
        shutil.copytree(folder / name, tmp_path / name)
    own = config.distill.model_copy(update={"teacher": str(tmp_path / "teacher")})
    config = config.model_copy(
        update={"distill": own, "model": config.model.model_copy(update={"path": str(tmp_path / "untied")})}
    )

    def files() -> int:
        assembled(config)
        return len(list((tmp_path / "cache" / "teacher").glob("*.npy")))

    assert files() == 1
    plain = config
    changes = ({"alpha": 0.7, "chunk": 5}, {"store": K + 1}, {"temperature": 3.0}, {"dtype": "bfloat16"})
    for n, change in enumerate(changes, 1):
        config = stored(plain, tmp_path / "cache", K, **change)
        assert files() == n, change
    config = plain.model_copy(update={"data": plain.data.model_copy(update={"max_samples": 20})})
    assert files() == 5
    config = plain
    for name in ("untied", "teacher"):  # two words change places in both tokenizers
        path = tmp_path / name / "tokenizer.json"
        found = json.loads(path.read_text())
        vocab = found["model"]["vocab"]
        vocab["w1"], vocab["w2"] = vocab["w2"], vocab["w1"]
        path.write_text(json.dumps(found))
    assert files() == 6
    values = load_file(tmp_path / "teacher" / "model.safetensors")
    values["lm_head.weight"][3, 3] += 1
    save_file(values, tmp_path / "teacher" / "model.safetensors", {"format": "pt"})
    assert files() == 7


@pytest.mark.parametrize("harm", further(["cut", "bit"], 1))
def test_damaged_files_are_made_again(folder, tmp_path, no_second_pass, harm):
    config = stored(distill_run(folder), tmp_path, K)
    assembled(config)
    (path,) = (tmp_path / "teacher").glob("*.npy")
    whole = path.read_bytes()
    data = bytearray(whole)
    data[-9] ^= 4
    path.write_bytes(data[:-100] if harm == "cut" else data)
    assembled(config)
    assert [p.read_bytes() for p in (tmp_path / "teacher").iterdir()] == [whole]
    no_second_pass()
    assembled(config)


@pytest.mark.parametrize(("sets", "with_", "k", "message"), [
    (["data.stream=true"], {}, K, "not read before step 0"),
    (["distill.divergence=reverse"], {}, K, "few of them are stored"), ([], {}, 10**6, "a vocabulary of"),
    ([], {"wrap": {}}, K, "split and attend to each other"),
], ids=["stream", "reverse", "vocabulary", "wrap"])  # fmt: skip
def test_what_stored_tokens_cannot_serve(folder, tmp_path, sets, with_, k, message):
    config = stored(distill_run(folder, packed=True, **with_), tmp_path, k)
    given = config.model_dump(by_alias=True)
    for key, value in (one.split("=") for one in sets):
        part, _, name = key.partition(".")
        given[part] = {**given[part], name: True if value == "true" else value}
    with pytest.raises(ConfigError, match=message):
        assembled(Config.model_validate(given))


def test_a_full_disk_is_refused_before_the_pass(folder, tmp_path, no_second_pass, monkeypatch):
    monkeypatch.setattr(other_model, "free_space", lambda path: (path, 10))
    no_second_pass()
    with pytest.raises(DataError, match="10 free"):
        assembled(stored(distill_run(folder), tmp_path, K))


def test_a_pass_without_memory_is_an_error_of_three_lines(folder, tmp_path, monkeypatch):
    def likeliest(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(other_model, "likeliest", likeliest)
    with pytest.raises(NeedsError, match="smaller teacher"):
        assembled(stored(distill_run(folder), tmp_path, K))


def test_the_plan_and_the_dry_run_count_what_is_stored(folder, tmp_path):
    config = stored(distill_run(folder, packed=True), tmp_path, K)
    of, live = (search.predict(c, "h100", 1) for c in (config, distill_run(folder, packed=True)))
    assert {item.name for item in live.lines} - {item.name for item in of.lines} == {"teacher"}
    assert {item.name for item in of.lines} - {item.name for item in live.lines} == {"teacher.stored"}
    facts, _ = dry_run(decide(config), None, "optrush train")
    size = stored_tokens.record_type(K, 4).itemsize
    assert facts["disk"]["stored_tokens_bytes"] == size * int(assembled(config).stream.source.targets().sum())
    assert decide(config).env.teacher.record_bytes == size
    assert "its most likely tokens for each target" in dry_run_text(facts, config, [])
