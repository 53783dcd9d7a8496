"""Other systems on a ladder: what they are given, what is asked of them, and the ratios; and the longest row."""

import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optrush import config, hardware
from optrush.benchmark import peer, results, runner
from optrush.benchmark.ladder import Longest
from optrush.benchmark.peer import build_peer, training_facts
from optrush.errors import ConfigError, NeedsError, RunError
from optrush.report import bench
from optrush.report import bench as summaries

import optrush_peers
from optrush_peers import weights, worker
from optrush_peers.work import Work
from toy import V, ladder, put, records
from toy import parsed as run

ROOT = Path(__file__).parents[2]
TRAINED = {"trained parameters": "7", "weights": "float32", "optimizer states": "float32"}


KNOWN = {system.name: system for system in optrush_peers.PEERS}


def build(name, options):
    return build_peer(name, options, KNOWN)


# --- how they are found


def test_options_are_checked():
    trainer = build("trainer", {"checkpointing": True, "weights": "bfloat16"})
    assert trainer.title == "Hugging Face Trainer + Liger + checkpointing, bfloat16 weights"
    assert trainer.required == ("transformers", "accelerate", "liger-kernel")
    assert build("trainer", {"liger": False}).required == ("transformers", "accelerate")
    assert build("unsloth", {}).title == "Unsloth + its checkpointing, bfloat16 weights"
    assert build("unsloth", {"adapter": "qlora"}).title.startswith("Unsloth qlora rank 16 + its checkpointing")
    adapting = build("trainer", {"adapter": "qlora", "rank": 8})
    assert adapting.title == "Hugging Face Trainer + Liger + qlora rank 8, float32 weights"
    assert adapting.required == ("transformers", "accelerate", "peft", "bitsandbytes", "liger-kernel")
    assert build("torchtitan", {}).title == "torchtitan + compile, float32 weights"


@pytest.mark.parametrize(("name", "options", "message"), [
    ("trainer", {"liger": "yes"}, "`trainer: liger`\nfound: 'yes'"),
    ("torchtitan", {"adapter": "lora"}, "`torchtitan: adapter`\nfound: no such option"),
])  # fmt: skip
def test_wrong_options(name, options, message):
    with pytest.raises(ConfigError) as caught:
        build(name, options)
    assert message in str(caught.value)


def test_a_provider_that_is_not_there(call, fakes, monkeypatch, tmp_path):
    """Neither installed, nor next to the ladder, nor in a checkout."""
    monkeypatch.setattr(peer, "CHECKOUT", tmp_path / "no-checkout")
    monkeypatch.setattr(peer, "entry_points", lambda group: [])
    put(Path("ladder.yaml"), ladder([{"name": "ours"}, {"name": "other", "peer": {"trainer": {}}}]))
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out")
    assert found.code == 2 and not Path("out").exists() and fakes.started == []
    asked, where, do = found.err.splitlines()[-3:]
    assert asked.endswith(": the system `trainer`") and "no package with the entry point `optrush.peers`" in where
    assert str(tmp_path / "no-checkout" / "peers") in where and "python -m pip install ./benchmarks/peers" in do


def test_an_installed_provider_comes_first(monkeypatch):
    unsloth = KNOWN["unsloth"]
    monkeypatch.setattr(peer, "entry_points", lambda group: [SimpleNamespace(load=lambda: (unsloth,))])
    assert peer.find_peers(ROOT / "benchmarks") == {"unsloth": unsloth}
    monkeypatch.setattr(peer, "entry_points", lambda group: [])
    assert peer.find_peers(Path()) == KNOWN, "of the checkout"


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("unsloth", {}, "the system `unsloth`\nfound: unsloth is not installed\ndo:    python -m pip install unsloth"),
    ("trainer", {"batch": {"seq": 64, "tokens": 256, "micro_tokens": 128}}, "one micro-batch a step"),
    ("trainer", {"batch": {"seq": 64, "tokens": 128, "micro_tokens": "auto"}}, "one micro-batch a step"),
    ("trainer", {"data": {"path": "x.jsonl", "stream": True}}, "the system `trainer` on `data.stream`"),
    ("unsloth:installed", {}, "needs a CUDA device\nfound: a CPU only"),
    ("torchtitan:installed", {}, "needs a CUDA device\nfound: a CPU only"),
])  # fmt: skip
def test_needs(name, changes, said, monkeypatch):
    name, _, installed = name.partition(":")
    if installed or name == "trainer":
        monkeypatch.setattr("optrush_peers.work.library", lambda name: "1.0")
    with pytest.raises(NeedsError) as caught:
        build(name, {}).check(run(**changes), hardware.CPU)
    assert said in str(caught.value)


def test_needs_of_a_gpu(monkeypatch):
    monkeypatch.setattr("optrush_peers.work.library", lambda name: "1.0")
    device, _ = hardware.parse_hardware("h200")
    build("unsloth", {}).check(run(), device)
    with pytest.raises(NeedsError, match="take weights: bfloat16"):
        build("unsloth", {"weights": "float32"}).check(run(), device)
    titan = build("torchtitan", {})
    titan.check(run(model={"shape": "llama-3.2-1b-untied"}), device)
    for changes, said in (
        ({"model": {"shape": "llama-3.2-1b"}}, "a shape whose head is tied"),
        ({"model": {"shape": "qwen2.5-0.5b"}}, "on its own Llama"),
        ({"model": {"shape": "llama-3.2-1b-untied", "tokenizer": "x"}, "data": {"path": "x"}}, "rows of one length"),
    ):
        with pytest.raises(NeedsError, match=said):
            titan.check(run(**changes), device)


# --- what they are given


def test_rows_are_ours():
    """Random tokens: the very batches that our own loop takes, labels not shifted."""
    from optrush.decide import decide
    from optrush.trainer.build import build

    mine = run()
    trainer = build(decide(mine))
    plan = trainer.stream.plan(None, 3)
    found = list(worker.rows(mine, trainer.hf, Path("toy"), 3))
    for k, theirs in enumerate(found):
        (ours,) = trainer.stream.batches(k, plan, rank=0, ranks=1, micro_rows=2)
        assert torch.equal(theirs.ids, ours.tokens) and theirs.mask is None
        assert torch.equal(theirs.labels[:, 1:], ours.labels[:, :-1])
        assert (theirs.labels[:, 0] == -100).all() and (ours.labels[:, -1] == -100).all()
        assert (theirs.n_tokens, theirs.n_targets, theirs.attended) == (128, 126, 2 * 64**2)


def test_rows_of_several_lengths_are_padded_to_the_longest(tmp_path):
    weights.name_tokens(V, tmp_path / "tokenizer")
    texts = [" ".join(f"t{w}" for w in range(9, 9 + n)) for n in (3, 20, 7, 11)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    shape = {"path": "toy", "tokenizer": None}
    given = run(model=shape, data={"path": str(tmp_path / "texts.jsonl")})
    (first, second) = worker.rows(given, {"vocab_size": V}, tmp_path / "tokenizer", 2)
    for batch in (first, second):
        assert batch.mask is not None
        widths = batch.mask.sum(1)
        assert batch.ids.shape[1] == widths.max() and batch.n_tokens == widths.sum()
        assert batch.n_targets == (batch.labels != -100).sum() == batch.n_tokens - 2
        assert batch.attended == widths.square().sum()
        assert not batch.ids[batch.mask == 0].any() and (batch.labels[batch.mask == 0] == -100).all()
    assert sorted(int(n) for b in (first, second) for n in b.mask.sum(1)) == [4, 8, 12, 21]  # each with its end


def test_texts_with_the_lengths_of_chats(tmp_path):
    program = runpy.run_path(str(ROOT / "benchmarks" / "chat_lengths.py"))
    lengths = program["lengths"]()
    assert 380 < np.median(lengths) < 420 and lengths.max() == 4096 and lengths.min() > 2
    assert np.log(lengths[lengths < 4096]).std() == pytest.approx(1.0, abs=0.05)
    program["write"](tmp_path, count=12, vocabulary=V)
    given = run(data={"path": str(tmp_path / "texts.jsonl")}, batch={"seq": 4096, "tokens": 4 * 4096})
    found = list(worker.rows(given, {"vocab_size": V}, tmp_path / "tokenizer", 3))
    held = [int(n) for b in found for n in (b.mask.sum(1) if b.mask is not None else [])]
    assert sorted(held) == sorted(program["lengths"](12).tolist())  # a word is a token, and the end is one


@pytest.mark.slow
def test_they_begin_from_our_weights(tmp_path, monkeypatch):
    """Written once, in a process of its own, and read back by transformers to what our own run begins with."""
    from transformers import AutoModelForCausalLM

    from optrush.models.hf import load
    from optrush.models.shapes import SHAPES

    hf = json.loads(Path("toy/config.json").read_text())
    monkeypatch.setitem(SHAPES, "mini-2b", hf)
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "cache"))
    given = run(model={"shape": "mini-2b"}, seed=7)
    folder, found = weights.ensure(given, "float32", "cpu")
    assert found == hf and folder.parent == tmp_path / "cache" / "peers" and folder.name.startswith("mini-2b-float32-")
    written = (folder / "model.safetensors").stat()
    assert weights.ensure(given, "float32", "cpu")[0] == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    with monkeypatch.context() as patch:  # where they would lie, without a second process
        patch.setattr(weights.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0))
        assert weights.ensure(run(model={"shape": "mini-2b"}, seed=8), "float32", "cpu")[0] != folder
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    model, recipe = load(None, hf, None, torch.float32, 7)
    count = 0
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape)
        recipe.fill(name, value, (0,) * value.dim())
        for hf_name, part in recipe.split(name, value):
            assert torch.equal(theirs[hf_name], part), hf_name
            count += part.numel()
    assert count == sum(p.numel() for p in theirs.values())
    assert weights.ensure(run(), "float32", "cpu")[0] == Path("toy")


# --- a system that trains: through the whole path, in processes of their own

FAKE_PEER = '''
"""A plain loop of transformers, as another system."""
from __future__ import annotations
from typing import ClassVar
from optrush_peers.work import System, Work

class Fake(System):
    does: str = "train"
    name: ClassVar[str] = "fake"
    libraries: ClassVar[tuple[str, ...]] = ("transformers",)

    @property
    def title(self) -> str:
        return f"a plain loop that {self.does}s"

    def train(self, work: Work) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, self.weights))
        if self.does == "freeze":
            model.model.embed_tokens.weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=work.config.optim.lr, betas=work.config.optim.betas, weight_decay=0.0)
        work.begin()
        for batch in work.batches:
            loss = model(input_ids=batch.ids, labels=batch.labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            work.step(loss)
        work.record(trained, (s for of in optimizer.state.values() for s in of.values()))
'''


@pytest.mark.slow
def test_a_system_is_one_file_and_one_line():
    """Trained, recorded, compared with ours, and shown; what is not the same work is red, and failures are records."""
    package = Path("peers/optrush_peers")  # next to the ladder
    shutil.copytree(ROOT / "benchmarks" / package, package)
    (package / "fake.py").write_text(FAKE_PEER)
    init = (package / "__init__.py").read_text().replace("PEERS: ", "from optrush_peers.fake import Fake\n\nPEERS: ")
    (package / "__init__.py").write_text(init.replace("Torchtitan)", "Torchtitan, Fake)"))
    doing = ["train", "freeze"]
    rungs: list[dict[str, Any]] = [{"name": "ours", "with": {"fused-adamw": {}}}]
    rungs += [{"name": does, "peer": {"fake": {"does": does}}} for does in doing]
    rungs += [{"name": "absent", "peer": {"unsloth": {}}}]
    put(Path("ladder.yaml"), ladder(rungs, steps=2, case="{size}-full-{seq}", all_but_one=False))
    command = [sys.executable, "-m", "optrush", "bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = records(Path("out"))
    assert list(told) == ["ours", *doing, "absent"]  # no all-but-one rungs
    ours, theirs = told["ours"], told["train"]
    assert (theirs["peer"], theirs["case"], theirs["since"]) == ("fake", "toy-full-64", "ours")
    assert ours["case"] == "toy-full-64" and ours["peer"] is None
    assert theirs["changes"] == "a plain loop that trains" and theirs["red"] == [] and theirs["error"] is None
    assert theirs["seen"] == ours["seen"] and theirs["seen"]["weights"] == "float32"
    assert len(theirs["losses"]) == 3 and theirs["proof"] is None and theirs["predicted_peak_bytes"] is None
    assert len(theirs["step_s"][0]) == 2 and theirs["tokens_per_s"] > 0 and theirs["peak_bytes"] > 0
    assert theirs["config"]["with"] == {} and theirs["config"]["peer"] == {
        "fake": {"does": "train", "weights": "float32"}
    }
    assert "transformers" in theirs["environment"]
    mine = json.loads(Path("out/rungs/01-ours-1.json").read_text())["result"]
    assert theirs["losses"][0] == pytest.approx(mine["losses"][0], rel=1e-5)
    assert theirs["losses"][-1] == pytest.approx(mine["losses"][-1], rel=1e-3)
    assert "not the same work: trained parameters 246,336, ours 254,528" in told["freeze"]["red"][0]
    assert "do:    python -m pip install unsloth" in told["absent"]["error"]
    page = Path("out/report.html").read_text()
    assert "Against other systems" in page and "Ours against the fastest other system: toy-full-64: ×" in page


def test_ratios():
    def record(rung, speed, peak, **more):
        return {
            "case": "c", "device": "d", "mode": "cumulative", "rung": rung, "tokens_per_s": speed, "peak_bytes": peak,
            "targets_per_s": speed / 2, **more,
        }  # fmt: skip

    shown, _ = summaries.read_rungs([
        record("ours", 120.0, 10), record("slow", 60.0, 40, peer="p", since="ours"),
        record("quick", 100.0, 20, peer="p", since="ours"),
        record("wrong", 200.0, 20, peer="p", since="ours", red=["not the same work"]),
        record("broken", 200.0, 20, peer="p", since="ours", error="no"),
        record("else", 30.0, 20, case="e", since="ours"),
    ])  # fmt: skip
    pairs = summaries.versus(shown)
    assert [(p.theirs.name, p.faster, p.learns_faster, p.smaller) for p in pairs[:2]] == [
        ("slow", 2.0, 2.0, 4.0), ("quick", 1.2, 1.2, 2.0),
    ]  # fmt: skip
    assert [p.theirs.name for p in pairs] == ["slow", "quick", "wrong"]
    assert summaries.versus_summary(pairs) == "Ours against the fastest other system: c: ×1.20 the tokens/s of “quick”."
    assert shown[-1].factor == 0.25  # compared with a rung of another case
    assert summaries.versus_summary([]) == ""


def test_facts():
    weights = [torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(1)]
    assert training_facts(7, weights, [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(()), 4]) == {
        "trained parameters": "7", "weights": "bfloat16, float32", "optimizer states": "bfloat16",
    }  # fmt: skip
    for count, alone in ((9_980, False), (10_000, True)):  # ten norms among so many: more, or less, than a thousandth
        weights = [torch.zeros(count, dtype=torch.bfloat16), torch.zeros(10)]
        found = training_facts(7, weights, [torch.zeros(5)])
        assert found["weights"] == "bfloat16" + ", float32" * (not alone) and found["optimizer states"] == "float32"
        assert found.get("not compared") == ("10 float32 weights" if alone else None)


def test_unlike():
    ours = {"seen": TRAINED, "fill": 1, "losses": [11.0]}
    assert list(results.incomparable_reasons({**ours, "losses": [11.01]}, ours, True)) == []
    assert "its first loss is 11.1, ours 11" in next(
        results.incomparable_reasons({**ours, "losses": [11.1]}, ours, True)
    )
    assert list(results.incomparable_reasons({**ours, "losses": [11.1]}, ours, False)) == []  # it draws its own weights
    assert (
        list(results.incomparable_reasons({**ours, "losses": [11.1], "fill": 0.9}, ours, True)) == []
    )  # other documents in a step
    few = {**TRAINED, "not compared": "10 float32 weights"}
    assert not [
        *results.incomparable_reasons({**ours, "seen": few}, ours, True),
        *results.incomparable_reasons(ours, {**ours, "seen": few}, True),
    ]
    states = {**TRAINED, "optimizer states": "uint8"}
    found = list(results.incomparable_reasons({**ours, "seen": states}, ours, True))
    assert found == ["not the same work: optimizer states uint8, ours float32"]


def test_what_a_system_tells(tmp_path):
    hf = json.loads(Path("toy/config.json").read_text())
    batches = list(worker.rows(run(), hf, Path("toy"), 3))
    work = Work(run(), hf, tmp_path, tmp_path, batches, "cpu")
    work.begin()
    for loss in (5.0, math.nan):
        work.step(torch.tensor(loss))
    fake = build("trainer", {"liger": False})
    with pytest.raises(RunError, match="Hugging Face Trainer, float32 weights took 2 steps of 3"):
        worker.result(fake, work, hardware.CPU, 1)
    work.step(torch.tensor(4.0))
    work.marks = [0.0, 9.0, 9.5, 9.75]
    work.seen = TRAINED
    found = worker.result(fake, work, hardware.CPU, 1)
    assert found["losses"] == [5.0, None, 4.0] and found["tokens_per_s"] == [256.0, 512.0]
    assert found["step_s"] == [0.5, 0.25] and found["fill"] == 1
    assert found["targets_per_s"] == (126 / 0.5 + 126 / 0.25) / 2
    assert results.dead_step_reason(found["losses"], found["grad_norms"])  # so that the rung is red
    alone = worker.result(fake, work, hardware.NAMED["h100"], 1)["mfu"]
    work.ranks = 2  # the same tokens by two GPUs
    assert worker.result(fake, work, hardware.NAMED["h100"], 1)["mfu"] == pytest.approx(alone / 2)


# --- the real Trainer, where what it needs is here


def test_flops_of_adapters():
    """4 a frozen weight, 6 one that is trained, and attention as it was."""
    shape = worker.ModelShape.read(json.loads(Path("toy/config.json").read_text()))
    batch = next(iter(worker.rows(run(), json.loads(Path("toy/config.json").read_text()), Path("toy"), 1)))
    whole = build("trainer", {}).flops(shape, batch, 999)
    found = build("trainer", {"adapter": "lora"}).flops(shape, batch, 999)
    assert whole == shape.flops(128, 2 * 64**2)
    assert whole - found == 128 * (2 * shape.matrix_parameters - 6 * 999)


ADAPTERS = (None, "lora")
# Answers one request after the other, as the process of a rung answers one: what is imported takes longer than both.
ANSWERS = """
import sys
from optrush_peers import worker
for sys.argv[1:] in (["request-0.json", "result-0.json"], ["request-1.json", "result-1.json"]):
    try:
        worker.main()
    except SystemExit as leaving:
        if leaving.code:
            raise
"""


@pytest.fixture(scope="module")
def by_the_trainer(toy, tmp_path_factory):
    """What the Trainer tells, by adapter."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "toy").symlink_to(toy)
    for n, adapter in enumerate(ADAPTERS):
        request = {
            "run": config.dump_config(run(batch={"seq": 64, "tokens": 128, "micro_tokens": 128})), "warmup": 1,
            "peer": {"trainer": {"liger": False, "weights": "float32", "adapter": adapter}}, "parent": os.getpid(),
        }  # fmt: skip
        (folder / f"request-{n}.json").write_text(json.dumps(request))
    command, environment = [sys.executable, "-c", ANSWERS], {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT / 'benchmarks' / 'peers'}"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {a: json.loads((folder / f"result-{n}.json").read_text()) for n, a in enumerate(ADAPTERS)}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_trainer_trains_as_we_do(adapter, by_the_trainer):
    found = by_the_trainer[adapter]
    assert found["seen"]["weights"] == "float32" and len(found["step_s"]) == 2 and len(found["losses"]) == 3
    from optrush.benchmark import worker

    with_ = {"amp": {}} | ({} if adapter is None else {"lora": {"rank": 16, "alpha": 16}})
    ours = worker.measure(run(**{"with": with_}), run(), 1, 0, 0)
    same = 3 if adapter is None else 1  # adapters begin as other random values, which the first loss does not see
    assert found["losses"][:same] == pytest.approx(ours["losses"][:same], rel=2e-3)
    assert found["seen"]["trained parameters"] == ours["seen"]["trained parameters"]


@pytest.mark.parametrize(("name", "micro", "said"), [
    ("unsloth", 128, "the system `unsloth` trains on one GPU"), ("trainer", 256, "set batch.micro_tokens: 128"),
    ("trainer", 128, None), ("torchtitan", 128, None),
])  # fmt: skip
def test_ranks_share_the_rows_of_a_step(name, micro, said):
    asked = build(name, {}).needs_ranks(run(batch={"seq": 64, "tokens": 256, "micro_tokens": micro}), 2)
    unmet = [need for need in asked if not need.met]
    assert not unmet if said is None else any(said in (need.asked, need.do) for need in unmet)


@pytest.mark.parametrize(
    ("ranks", "adapter", "found"), [(1, None, "one rank"), (2, "lora", "`adapter: lora`"), (2, None, None)]
)
def test_what_the_trainer_shards(ranks, adapter, found):
    sharded = build("trainer", {"shard": "fsdp", "adapter": adapter})
    asked = sharded.needs_ranks(run(batch={"seq": 64, "tokens": 256, "micro_tokens": 256 // ranks}), ranks)
    assert [need.found for need in asked if not need.met] == ([] if found is None else [found])


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "fsdp"])
def test_the_trainer_on_two_ranks_trains_as_on_one(shard):
    pytest.importorskip("accelerate")

    def losses(ranks, shard):
        options = {"liger": False, "shard": shard}
        batch = {"seq": 64, "tokens": 256, "micro_tokens": 256 // ranks}
        request = {"run": config.dump_config(run(batch=batch)), "warmup": 1, "peer": {"trainer": options}}
        found = runner.run_worker({**request, "ranks": ranks}, 240, build("trainer", options))
        assert "error" not in found, found
        assert found["seen"]["trained parameters"] == "254,528" and found["seen"]["weights"] == "float32"
        return list(found["losses"])

    assert losses(2, shard) == pytest.approx(losses(1, None), rel=5e-4)


# --- the longest row


def tried(span, limit, begin):
    asked: list[int] = []

    def attempt(seq):
        asked.append(seq)
        return {"losses": [1.0], "seq": seq} if seq <= limit else {"error": "out of memory: no"}

    first = {"losses": [1.0], "proof": "of the shortest", "seq": span.from_}
    return asked, runner.search_longest(span, begin, first, attempt)


def span(first=8192, last=1 << 20, factor=1.1):
    return Longest(**{"from": first, "to": last, "factor": factor})


@pytest.mark.parametrize("limit", [8192, 9000, 50_000, 131_072, 300_001, 1 << 20])
@pytest.mark.parametrize("begin", [None, 8192, 20_000, 131_072, 290_000, 1 << 20])
def test_the_longest_row_is_found(limit, begin):
    asked, found = tried(span(), limit, begin)
    reached = found["longest_seq"]
    assert reached <= limit and found["seq"] == reached and found["proof"] == "of the shortest"
    assert len(set(asked)) == len(asked) <= 14 and all(seq % 1024 == 0 for seq in asked)
    failed = [t["seq"] for t in found["tries"] if t["error"]]
    if failed:  # known to the factor, or to the grain
        assert min(failed) > limit and min(failed) <= max(reached * 1.1, reached + 1024)
    else:
        assert reached == 1 << 20
    assert [t["seq"] for t in found["tries"]] == [8192, *asked] and found["ended"] is None


def test_a_good_guess_takes_few_tries():
    asked, found = tried(span(), 300_000, 290_000)
    assert asked == [289_792, 318_464] and found["longest_seq"] == 289_792
    asked, found = tried(span(), 280_000, 290_000)
    assert asked == [289_792, 264_192] and found["longest_seq"] == 264_192


def test_what_ends_a_search():
    def attempt(seq):
        return {"error": "killed by signal 9 (SIGKILL)"} if seq > 40_000 else {"losses": [1.0, None]}

    first = {"losses": [1.0], "proof": {}}
    found = runner.search_longest(span(), None, first, attempt)
    assert found["longest_seq"] == 8192 and found["ended"].endswith("rows of 16,384 tokens: a loss was not finite")
    broken = runner.search_longest(span(), None, {"error": "ValueError: no"}, attempt)
    assert broken["error"] == "ValueError: no" and "longest_seq" not in broken and len(broken["tries"]) == 1
    small = runner.search_longest(span(48, 50), None, first, attempt)
    assert small["longest_seq"] == 48 and small["ended"] is None


def test_the_guess_is_the_longest_that_the_plan_says_fits():
    fits = runner.longest_that_fits
    assert fits(span(), lambda seq: seq <= 123_456) == 123_456 // 1024 * 1024
    assert fits(span(), lambda seq: True) == 1 << 20 and fits(span(), lambda seq: None) is None


def test_a_ladder_of_longest_rows(call, fakes):
    """Scripts for processes: they run out of memory from a length on, which is another with a technique."""
    text = fakes_with_memory(fakes)
    assert "seq" in text
    rungs = [{"name": "base"}, {"name": "recompute", "with": {"recompute": {}}}]
    put(Path("ladder.yaml"), ladder(
        rungs, steps=1, warmup=0, all_but_one=False, case="{size}-longest",
        longest={"from": 64, "to": 4096, "factor": 1.1},
    ))  # fmt: skip
    found = call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out")
    assert found.code == 0, found.err
    told = records(Path("out"))
    assert {n: r["verdict"] for n, r in told.items()} == {"base": "baseline", "recompute": "longer"}
    for name, limit in (("base", 300), ("recompute", 1200)):
        r = told[name]
        assert limit / 1.1 - 64 <= r["longest_seq"] <= limit and r["longest_seq"] == r["seq"] == r["micro_tokens"]
        assert r["config"]["batch"]["seq"] == r["config"]["batch"]["tokens"] == r["seq"]
        assert any(str(t["error"]).startswith("out of memory") for t in r["tries"]) and r["tries"][0]["seq"] == 64
        assert r["case"] == "toy-longest" and "includes compiling" in r["changes"]
        assert r["predicted_tokens_per_s"] is None and not r["ceiling_s"] and r["predicted_peak_bytes"]
    assert told["recompute"]["proof"]["against"] == "base"
    assert " tokens: trained" in found.err and " tokens: failed: out of memory: no room" in found.err
    ran = len(fakes.started)
    assert ran == sum(len(r["tries"]) for r in told.values())
    Path("out/rungs/02-recompute-1.json").unlink()  # stopped before its end: what was tried is not tried again
    assert call("bench", "run.yaml", "--ladder", "ladder.yaml", "--out", "out", "--resume").code == 0
    assert fakes.started == [] and records(Path("out"))["recompute"]["longest_seq"] == told["recompute"]["longest_seq"]
    report_of(Path("out"))
    page = Path("out/report.html").read_text()
    reached = [f"{r['longest_seq']:,}" for r in told.values()]
    assert f"From rows of {reached[0]} to {reached[1]} tokens" in page and " or more" not in page
    Path("short.yaml").write_text(Path("ladder.yaml").read_text().replace("4096", "128"))
    assert call("bench", "run.yaml", "--ladder", "short.yaml", "--out", "short").code == 0
    report_of(Path("short"))
    page = Path("short/report.html").read_text()
    assert "From rows of 128 or more to 128 or more tokens" in page and '<td class="n">128 or more</td>' in page


def fakes_with_memory(fakes):
    """Gives the scripted worker a memory: 300 tokens, 1200 with recompute."""
    path = fakes.log.parent / "worker.py"
    text = (
        path.read_text()
        .replace(
            "does = how.get(key, {})\n",
            "does = how.get(key, {})\n"
            'seq = run["batch"]["seq"]\n'
            'short = seq > (1200 if "recompute" in run.get("with", {}) else 300)\n',
        )
        .replace("json.dump(result", 'if short:\n    result = {"error": "out of memory: no room"}\njson.dump(result')
    )
    text = text.replace('"step_s": [0.1, 0.1]', '"losses": [1.0], "step_s": [0.1, 0.1]')
    path.write_text(text)
    return text


def report_of(folder):
    import importlib

    importlib.reload(bench)  # the scripts' fixture does not draw it
    bench.write_bench(folder)
    assert "The longest row that trains" in (folder / "report.html").read_text()
