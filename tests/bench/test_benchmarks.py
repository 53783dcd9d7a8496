"""Ladders and programs behind the published figures, as far as they can be asked without the GPU they are for."""

import importlib
import itertools
import json
import math
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from optrush import technique
from optrush.benchmark import ladder
from optrush.config import parse_config
from optrush.data import sample
from optrush.decide import decide
from optrush.hardware import parse_hardware
from optrush.kernels import attention, swiglu
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import search

from toy import document

FOLDER = Path(__file__).parents[2] / "benchmarks"
CLIMBED = {
    "adapter-levers": ("llama1b-peers",), "adapters": ("llama1b-peers", "llama8b"), "adapters-rows": ("llama8b",),
    "as-it-is": ("llama1b-peers", "llama8b"), "choices": ("llama1b-peers",), "doubt-adapters": ("llama8b",),
    "doubt-full": ("llama1b-peers",), "doubt-graphs": ("llama1b-peers",), "doubt-optimizers": ("llama8b",),
    "doubt-quantized": ("llama8b",), "doubt-uncompiled": ("llama1b-peers",), "eight": ("llama8b",),
    "families-full": ("families",), "families-lora": ("families",), "families-qlora": ("families",),
    "head": ("llama1b-peers",), "least": ("llama1b-peers", "llama8b"), "levers": ("llama1b-peers",),
    "longest": ("llama8b",), "longest-qlora": ("llama8b",), "peers": ("llama1b-peers",),
    "peers-best": ("llama1b-peers",), "gpus-peers": ("llama8b",), "peers-bf16": ("llama1b-peers",),
    "precisions": ("llama1b-peers",), "proof-amp": ("llama1b-peers",), "proofs": ("llama1b-peers", "llama8b"),
    "qlora": ("llama8b",), "rows": ("llama1b-peers",), "small-card": ("llama3b",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "load"), [(n, load) for n, loads in CLIMBED.items() for load in loads])
def test_every_rung_is_one_that_an_h200_takes(name, load, monkeypatch):
    from optrush_peers import work

    for module in (technique, work):
        monkeypatch.setattr(module, "library", lambda name: "1")
    h200 = parse_hardware("h200")[0]
    config = parse_config((FOLDER / f"{load}.yaml").read_text(), load)
    climbed = ladder.find_ladder(str(FOLDER / f"{name}.yaml"), config)
    for rung in ladder.resolve_rungs(climbed, config, True):
        prepared = decide(rung.config, ranks=1 if rung.peer else rung.ranks, device=h200)
        if rung.peer is not None:
            rung.peer.check(rung.config, prepared.env.device, rung.ranks)
            continue
        said = search.predict(rung.config, h200, rung.ranks)
        assert said.fits, f"{name}: {rung.name} takes {said.peak_bytes / 2**30:.1f} GiB"


def test_every_ladder_of_the_folder_is_looked_at():
    # The last four read texts that are made first; a small model's adapters run on another load.
    looked = {*CLIMBED, "small-adapters", "chats", "loader", "proof-chats", "demo-ladder"}
    assert {f.stem for f in FOLDER.glob("*.yaml") if "rungs:" in f.read_text()} == looked


def test_the_ladder_of_the_demo():
    config = parse_config((FOLDER.parent / "examples/demo.yaml").read_text(), "demo")
    written = ladder.find_ladder(str(FOLDER / "demo-ladder.yaml"), config)
    assert [rung.name for rung in ladder.resolve_rungs(written, config, True)] == [
        entry.name for entry in written.rungs
    ]


def climbed(load, name):
    """The techniques of each rung of a ladder of the folder, and who computes the model."""
    config = parse_config((FOLDER / f"{load}.yaml").read_text(), load)
    found = ladder.resolve_rungs(ladder.find_ladder(str(FOLDER / f"{name}.yaml"), config), config, True)
    return {r.name: (r.config.with_, r.config.model.implementation) for r in found}


@pytest.mark.parametrize(("load", "proof", "rung", "name", "published"), [
    ("llama1b-peers", "proofs", "bf16", "peers-bf16", "ours, bf16"),
    ("llama1b-peers", "proofs", "bf16", "rows", "T=8192"),
    ("llama1b-peers", "proofs", "least memory", "least", "activations on the host"),
    ("llama1b-peers", "proof-amp", "mixed precision", "peers-best", "ours, amp"),
    ("llama8b", "proofs", "bf16", "eight", "four rows"), ("llama8b", "proofs", "float8", "eight", "float8"),
    ("llama8b", "proofs", "least memory", "least", "activations on the host"),
    ("chat-lengths", "proof-chats", "packed", "chats", "ours, packed"),
])  # fmt: skip
def test_what_is_proved_is_what_was_published(load, proof, rung, name, published):
    """The same techniques with the same options; what it is held against has none of them, nor our decoder."""
    found = climbed(load, proof)
    assert found[rung] == (climbed(load, name)[published][0], "native")
    assert found["plain float32"] == ({"attention": {"impl": "sdpa"}, "recompute": {}}, "transformers")


def test_no_lever_changes_the_loss_kernel_unawares():
    """A rung's options replace all of a technique's."""
    for name in ("levers", "adapter-levers"):
        config = parse_config((FOLDER / "llama1b-peers.yaml").read_text(), name)
        for rung in ladder.resolve_rungs(ladder.find_ladder(str(FOLDER / f"{name}.yaml"), config), config, True):
            assert rung.config.with_["fused-loss"]["impl"] == "quack", rung.name
            assert rung.config.with_["fused-loss"]["chunk"] in (4096, 8192, 16384), rung.name


@pytest.fixture
def program(monkeypatch):
    """A program of the folder, by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_sample_of_the_package_is_what_the_grammar_makes(program):
    recipes = program("recipes")
    assert list(sample.conversations(2000, 0)) == list(recipes.conversations(1000, 0))
    assert list(sample.preferences(2000, 0)) == list(recipes.preferences(1000, 0))


FAST = {"bf16": {}, "fused-loss": {"chunk": 8}}


@pytest.mark.parametrize(("before", "after", "found"), [
    (FAST, {**FAST, "compile": {}}, "compile"), (FAST, {**FAST, "fused-loss": {"chunk": 9}}, "fused-loss"),
    ({**FAST, "fused-adamw": {}}, {**FAST, "adam8bit": {}}, "adam8bit"),
    (FAST, {**FAST, "fp8": {}, "fused-loss": {"chunk": 9}}, "fp8"), (FAST, {**FAST, "fp8": {}, "compile": {}}, ""),
    ({**FAST, "compile": {}, "recompute": {}}, {**FAST, "adam8bit": {}}, ""),
    ({**FAST, "compile": {}}, {**FAST, "fp8": {}, "fused-loss": {"chunk": 9}}, ""),
    ({**FAST, "compile": {}}, {**FAST, "fused-loss": {"chunk": 9}}, ""), (FAST, {"bf16": {}}, ""), (FAST, FAST, ""),
])  # fmt: skip
def test_a_rung_measures_one_technique(program, before, after, found):
    gains = program("gains")

    def record(with_, seq=64, longest=None):
        run = {**document(batch={"seq": seq, "tokens": seq}), "with": with_}
        return SimpleNamespace(config=run, longest_seq=longest)

    assert gains.alone(record(before), record(after)) == found
    assert gains.alone(record(before), record(after, seq=128)) == "", "another load"
    assert gains.alone(record(before, longest=64), record(after, seq=128, longest=128)) == found


@pytest.mark.parametrize(("case", "hardware"), [
    ("cpu", "cpu"), ("1b", "h100"), ("1b", "h200"), ("8b-lora", "h100"), ("8b-lora", "h200"), ("1b-two", "2xh200"),
    ("8b-two", "2xh100"), ("8b-two", "2xh200"),
])  # fmt: skip
def test_every_set_made_by_hand_starts_and_keeps_what_the_answer_trains(program, case, hardware):
    (_, answer, plan), *sets = program("answers").entries(program("answers").CASES[case], hardware)
    assert plan["planned_fits"] and len(sets) == 10
    for name, config, planned in sets:
        assert "refused" not in planned, f"{name}: {planned}"
        assert all((part in config.with_) == (part in answer.with_) for part in ("amp", "bf16", "lora", "nf4")), name
        assert config.with_ != answer.with_ or config.batch.micro_tokens != answer.batch.micro_tokens, name


@pytest.mark.parametrize(("speed", "error", "holds"), [(98.0, None, True), (96.0, None, False), (98.0, "lost", False)])
def test_the_answer_holds_where_it_is_near_the_best_set_and_never_fails(
    program, monkeypatch, tmp_path, speed, error, holds
):
    """Every second set has less than the best, one no memory; the last answer fails or does not."""
    answers, ran = program("answers"), []

    def measure(config, ranks, limit_s):
        ran.append(config)
        found = {"tokens_per_s": 100.0 - len(ran) % 2, "peak_bytes": 1, "seconds": 1.0, "error": None}
        if (config.with_, config.batch) == (ran[0].with_, ran[0].batch):
            return {**found, "tokens_per_s": speed, "error": error if len(ran) > 1 else None}
        return {**found, "tokens_per_s": None, "error": "out of memory: of a set"} if len(ran) == 3 else found

    monkeypatch.setattr(answers, "measure", measure)
    result = answers.compare("cpu", tmp_path / "out.jsonl", 1, 1e6)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["name"] for r in lines[:-1]][:: len(ran) - 1] == ["answer", "answer"] and len(ran) == 12
    assert lines[-1] == result and result["holds"] is holds and result["ratio"] == speed / 100
    assert result["out_of_memory"] == [lines[2]["name"]] and result["measured"] == 9
    result = answers.compare("cpu", tmp_path / "late.jsonl", 1, 1.0)
    assert len(ran) == 12 and result["ratio"] is None, "no time, nothing measured"


CURVE = """
model: tiny
objective: sft
data: {{path: {0}/train.jsonl, eval: {0}/held.jsonl, max_samples: 40, too_long: drop}}
batch: {{seq: 128, tokens: 128, micro_tokens: 128}}
optim: {{lr: 1.0e-3, schedule: constant, warmup: 0}}
train: {{steps: 10, log_every: 1}}
output: {0}/out
with: {{packing: {{}}}}
"""


def curves(program, monkeypatch, capsys, folder, *more):
    (folder / "run.yaml").write_text(CURVE.format(folder))
    line = ["curves.py", str(folder / "run.yaml"), "--with", "bf16", "--seeds", "2", "--write", *more]
    monkeypatch.setattr(sys, "argv", line)
    module = program("curves")
    monkeypatch.setattr(module, "curve_process", module.curve)  # in this process: importing torch takes longest
    monkeypatch.setattr(module, "CONVERSATIONS", 60)
    monkeypatch.setattr(module, "HELD", 5)
    module.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_curves_with_and_without(program, monkeypatch, capsys, tmp_path):
    *runs, summary = curves(program, monkeypatch, capsys, tmp_path)
    assert [(r["seed"], r["with"]) for r in runs] == [(0, None), (0, "bf16"), (1, None), (1, "bf16")]
    assert all(len(r["losses"]) == 10 and r["losses"][9] < r["losses"][0] for r in runs)
    a, b, c, d = (r["held_out"] for r in runs)
    assert summary["difference"] == [b - a, d - c]
    assert summary["scatter"] == pytest.approx(abs(a - c) / 2**0.5)
    assert 0 < abs(summary["mean"]) < 0.1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_curve_that_diverges_is_said(program, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match="diverged"):
        curves(program, monkeypatch, capsys, tmp_path, "--set", "optim.lr=1e30", "--set", "optim.clip=null")
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(runs) == 4 and all(r["held_out"] is None for r in runs)


# --- gradients.py

PRECISIONS = """
title: precisions
proof: {documents: 2}  # none has the padding id, whose row transformers gives no gradient
base: {set: {model.implementation: native, model.dtype: float32}}
rungs:
  - {name: float32}
  - {name: transformers, set: {model.implementation: transformers}}
  - {name: bf16, from: float32, with: {bf16: {}}}
  - {name: fp16, from: float32, with: {amp: {dtype: fp16}}}
  - {name: taken, from: bf16, with: {update-in-backward: {}, fused-adamw: {}}}
"""


def gradients_of(program, monkeypatch, folder):
    """The program, about to be run on a small model, and its command line."""
    load = "{seq: 64, tokens: 64, micro_tokens: 64}"
    (folder / "run.yaml").write_text(
        f"{{model: tiny, objective: pretrain, data: {{random: 8}}, batch: {load}, optim: {{clip: null}}, output: none}}"
    )
    (folder / "ladder.yaml").write_text(PRECISIONS)
    line = ["gradients.py", str(folder / "run.yaml"), "--ladder", str(folder / "ladder.yaml")]
    monkeypatch.setattr(sys, "argv", line)
    gradients = program("gradients")

    def answered(line, **_):
        """Answer a rung in this process: importing torch takes longest."""
        try:
            result = gradients.answer(json.loads(line[3]), Path(line[4]))
        except ValueError as error:
            result = {"error": str(error)}
        return SimpleNamespace(stdout=json.dumps(result), stderr="")

    monkeypatch.setattr(gradients, "subprocess", SimpleNamespace(run=answered))
    return gradients, line


def test_gradients_are_compared_value_by_value(program, monkeypatch, capsys, tmp_path):
    gradients, line = gradients_of(program, monkeypatch, tmp_path)
    gradients.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["documents"], r["ladder"]) for r in told] == [(2, "ladder")] * 5
    float32, other, narrow, scaled, taken = told
    assert float32["cosine"] == pytest.approx(1, abs=1e-12) and float32["length"] == pytest.approx(1, abs=1e-12)
    assert 0 < 1 - other["cosine"] < 1e-9
    assert "no gradient is left" in taken["error"]
    assert scaled["length"] == pytest.approx(1, abs=0.01), "without the loss scale"
    config = parse_config((tmp_path / "run.yaml").read_text(), "run")
    rungs = {r.name: r.config for r in ladder.resolve_rungs(ladder.find_ladder(line[3], config), config, True)}
    jobs = [gradients.gradient(rungs[name], rungs["float32"], 2)[0] for name in ("float32", "bf16")]
    a, b = (torch.cat([t.grad.double().flatten() for t in job.trained]) for job in jobs)
    assert narrow["cosine"] == pytest.approx(torch.cosine_similarity(a, b, 0).item(), abs=1e-9)
    assert narrow["length"] == pytest.approx((b.norm() / a.norm()).item(), abs=1e-9)
    assert 1e-7 < 1 - narrow["cosine"] < 1e-3 and narrow["tensors"]["lowest"][1] < narrow["tensors"]["median"] < 1
    assert 1 - narrow["sketch"] == pytest.approx(1 - narrow["cosine"], rel=0.1)


def test_gradients_of_trained_weights(program, monkeypatch, capsys, tmp_path):
    """The second rung's steps are CONFIG's, and all rungs start from what these leave."""
    gradients, line = gradients_of(program, monkeypatch, tmp_path)
    (tmp_path / "ladder.yaml").write_text("\n".join(PRECISIONS.splitlines()[:-2]))
    monkeypatch.setattr(sys, "argv", [*line, "--trained", "--set", "train.steps=7", "--set", "optim.lr=1e-3"])
    gradients.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[0]["trained"]["rung"] == "transformers" and told[0]["trained"]["steps"] == 7
    for r in told:
        assert r["loss"] < 0.98 * r["trained"]["losses"][0] and r["loss"] == pytest.approx(told[0]["loss"], rel=5e-3)
    assert 0 < 1 - told[1]["cosine"] < 1e-9 and 1e-7 < 1 - told[2]["cosine"] < 1e-2
    monkeypatch.setattr(gradients, "rung_result", lambda *_, **__: {"error": "no"})
    with pytest.raises(SystemExit, match="no trained weights"):
        gradients.main()


def test_gradients_that_are_zero_have_no_angle(program):
    """That of an adapter's first factor, before the second has moved."""
    gradients = program("gradients")
    text = yaml.safe_dump(document(train={"steps": 2}))
    config = parse_config(text, "run", withs=["lora:rank=4"])
    job, loss = gradients.gradient(config, config, 2)
    assert 0 < loss < 20
    held = {name: values.clone() for t in job.trained for name, values in gradients.exported_gradients(job, t)}
    assert any(not v.any() for v in held.values())
    assert gradients.compared(job, held)["cosine"] == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match="other tensors"):
        gradients.compared(job, {})
    for wrong in (0, math.nan):
        with pytest.raises(ValueError, match="zero, or not finite"):
            gradients.compared(job, {name: v * wrong for name, v in held.items()})


def test_a_rung_that_others_left_no_memory_is_asked_again_alone(program, monkeypatch, capsys, tmp_path):
    gradients, line = gradients_of(program, monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "argv", [*line, "--jobs", "2"])
    tries = []

    def asked(rung, first, documents, folder):
        tries.append(rung.name)
        full = rung.name == "transformers" and tries.count(rung.name) == 1
        return {"rung": rung.name, **({"error": "out of memory: CUDA"} if full else {"cosine": 1.0})}

    monkeypatch.setattr(gradients, "rung_result", asked)
    gradients.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["rung"], r.get("cosine")) for r in told] == [
        ("float32", 1), ("bf16", 1), ("fp16", 1), ("taken", 1), ("transformers", 1)
    ]  # fmt: skip
    assert tries[-1] == "transformers" and len(tries) == 6
    monkeypatch.setattr(gradients, "rung_result", lambda *_: {"error": "no such file"})
    with pytest.raises(SystemExit, match="first rung has no gradient"):
        gradients.main()


# --- operators.py

SMALL = ModelShape.read(
    SHAPES["llama-3.2-1b"]
    | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 8, "vocab_size": 768}
)
ROWS = 24


@pytest.fixture
def operators(program, monkeypatch):
    """The program, on a processor; torch's reference stands for the kernels of attention."""
    module = program("operators")
    monkeypatch.setattr(module.Gauge, "__init__", lambda self: None)
    monkeypatch.setattr(module.Gauge, "device", torch.device("cpu"))
    monkeypatch.setattr(module.Gauge, "sync", staticmethod(lambda: None))
    for name in ("driver", "handle"):
        monkeypatch.setattr(module.Gauge, name, None, raising=False)
    monkeypatch.setattr(module, "ATTENTIONS", dict.fromkeys(attention.ATTENTIONS, attention.masked))
    return module


def small(module):
    """Of every group, on shapes that a processor takes."""
    yield from module.head(ROWS, SMALL.vocab, SMALL.width)
    yield from module.feed("small", SMALL, ROWS)
    yield from module.products("small", SMALL, ROWS)
    yield from module.attention("small", SMALL, 2, 12)


def test_work_is_what_torch_counts(operators):
    counted = 0
    for o in small(operators):
        if o.impl not in ("chunked-4096", "cublas", "cublas-triton", "fa4"):
            continue
        operands = o.operands(cache(operators.drawn))
        with FlopCounterMode(display=False) as counter:
            o.function(*operands)
        assert counter.get_total_flops() == o.flop * (2 if o.impl == "fa4" else 1), o.name  # it computes what is masked
        counted += 1
    assert counted == 1 + 2 + 15 + 2


def test_products_are_those_of_a_linear(operators):
    values = cache(operators.drawn)
    made = {o.operator: o for o in operators.products("small", SMALL, ROWS) if o.impl == "cublas"}
    for part, (outputs, inputs) in operators.linears(SMALL).items():
        x, weight = (values(*key).requires_grad_() for key in (("x", ROWS, inputs), ("weight", outputs, inputs)))
        y = torch.nn.functional.linear(x, weight)
        wanted = y, *torch.autograd.grad(y, (x, weight), values("grad", ROWS, outputs))
        for way, want in zip(("forward", "input", "weight"), wanted, strict=True):
            o = made[f"{part} {way}"]
            torch.testing.assert_close(o.function(*o.operands(values)), want, msg=o.name)


@pytest.fixture
def fake_quack(monkeypatch):
    """The library's functions in plain torch; what they were asked for."""
    asked = []

    def multiplied(a, b, config, dynamic_scheduler):
        assert (config.is_dynamic_persistent, config.device_capacity) == (False, 9)
        how, order = "pingpong" if config.pingpong else "cooperative", "dynamic" if dynamic_scheduler else "fixed"
        tile, cluster = f"{config.tile_m}x{config.tile_n}", f"{config.cluster_m}x{config.cluster_n}"
        asked.append(f"quack-{tile}-{how}-{cluster}-{order}")
        return a @ b

    def gemm(a, b, out, **options):
        return out.copy_(multiplied(a, b, **options))

    def gemm_gated(x, weight, activation, **options):
        pairs = multiplied(x, weight, **options)
        return pairs, swiglu.swiglu(pairs)

    def gemm_dgated(grad, weight, pairs, activation, **options):
        return swiglu.swiglu_backward(pairs, multiplied(grad, weight, **options))

    def loss(hidden, weight, labels, chunk, ignored, reduction):
        asked.append("quack-library")
        return torch.nn.functional.cross_entropy(
            (hidden @ weight.t()).float(), labels, None, None, ignored, None, reduction
        )

    interface = SimpleNamespace(gemm_tuned=SimpleNamespace(fn=gemm), gemm_gated=gemm_gated, gemm_dgated=gemm_dgated)
    entropy = SimpleNamespace(scaled_exp_linear_cross_entropy=loss)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(gemm_interface=interface))
    monkeypatch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", entropy)
    return asked


def test_kernels_of_a_library_are_asked_for_the_same_as_torch(operators, fake_quack):
    made, values = [o for o in small(operators) if "attention" not in o.operator], cache(operators.drawn)
    wanted = {o.operator: o for o in made if o.impl in ("chunked-4096", "cublas", "cublas-triton")}
    asked = [o for o in made if o.impl.startswith("quack-") and o.operator != "exponents"]
    for o in asked:
        results = []
        for each in (wanted[o.operator], o):
            each.operands(values)
            torch.manual_seed(0)  # the labels, which alone are drawn again
            result = each.function(*each.operands(values))
            results.append(result if isinstance(result, tuple) else (result,))
        want, got = results
        for a, b in zip(want, got[-len(want) :], strict=True):
            assert (
                (o.kernel == "loss" or fake_quack[-1] == o.impl)  # ours has a plain form
                and b.shape == a.shape
                and (b - a).norm() <= (0.01 if o.operator == "loss" else 0) * a.norm()
            ), o.name
    assert len(asked) == 2 + 1 + 2 * 48 + 15 * 12


class Moving:
    """A device on which a call takes as long as it says, and whose driver counts."""

    device, ready = torch.device("cpu"), None

    def __init__(self, module):
        self.at = 0.0
        self.ready = module.Gauge.ready.__get__(self)

    def now(self):
        return self.at

    def sync(self):
        pass

    def read(self):
        return {"at_s": self.at, "mj": None, "sm_mhz": 1500, "capped": False}

    def operator(self, module, name, *times):
        """Calls last these milliseconds, one after the other, then the last; None raises."""
        each = itertools.chain(times, itertools.repeat(times[-1]))

        def function():
            if (ms := next(each)) is None:
                raise ValueError(f"{name}\n  is broken")
            self.at += ms / 1e3

        return module.Operator(name, "fake", None, {"rows": 1}, lambda _: (), function, 8e9, kernel=name)


def test_what_fails_is_a_line_and_the_rest_is_measured(operators, capsys):
    gauge, broken = Moving(operators), "ValueError: late is broken"
    first_round = [2.0] * (1 + 3 + 10 + 30)  # the first call, the trial, the warming up, the round
    made = [
        gauge.operator(operators, "never", None), gauge.operator(operators, "late", *first_round, None),
        gauge.operator(operators, "crashing", 1.0), gauge.operator(operators, "slowing", *first_round, 4.0),
    ]  # fmt: skip
    assert operators.run(made, gauge, 0.06, 3, 0.0, {"crashing": "exit status -6: "}) == 1
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(line["operator"], line.get("error")) for line in lines] == [
        ("never", "ValueError: never is broken"), ("crashing", "RuntimeError: exit status -6:"), ("late", broken),
        ("slowing", None),
    ]  # fmt: skip
    assert lines[3] == {
        "operator": "slowing", "impl": "fake", "case": None, "shape": {"rows": 1}, "ms": pytest.approx(4.0),
        "spread": pytest.approx(0.5), "tflops": pytest.approx(2.0), "joules": None, "watts": None,
        "sm_mhz": lines[3]["sm_mhz"], "capped": lines[3]["capped"], "rounds": 3, "seconds": 0.06, "rest": 0.0,
    }  # fmt: skip


def test_power_is_between_two_moves_of_the_counter(operators):
    samples = [{"at_s": t, "mj": mj} for t, mj in enumerate([50, 50, 2050, None, 2050, 2050, 5050, 5050, 5050])]
    assert operators.power(samples) == pytest.approx(3 / 4)
    assert operators.power(samples[:6]) is None and operators.power([]) is None
    assert operators.power([{"at_s": t, "mj": None} for t in range(9)]) is None


def said(operators, monkeypatch, capsys, *arguments, gpu=True):
    monkeypatch.setattr(sys, "argv", ["operators.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a {device.type}")
    monkeypatch.setattr(operators, "COPIED_BYTES", 1 << 16)
    operators.main()
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_operators_from_the_command_line(operators, monkeypatch, capsys):
    # Rested, for a processor heats long.
    asked = ["memory", "--seconds", "0.01", "--only", "copy", "--rounds", "1", "--rest", "0.001"]
    first, line = said(operators, monkeypatch, capsys, *asked)
    assert first["device"] == "a cpu" and set(first["source"]) == {"commit", "clean", "digest"}
    assert first["command"][0] == "memory" and "quack-kernels" in first["packages"]
    assert line["gb_s"] == pytest.approx(2 * 65536 / 1e6 / line["ms"]) and line["joules_gb"] is None
    assert line["rest"] == 0.001
    assert said(operators, monkeypatch, capsys, "memory", "--try", "copy torch") == []


# --- experts.py


def test_products_of_experts_from_the_command_line(program, monkeypatch, capsys):
    """Kernels that are right, one that writes nothing for experts without a row, one that fails, those not here."""
    experts = program("experts")
    product, of_weight = experts.PLAIN
    empty = lambda c: torch.tensor(c.counts)[:, None, None] == 0
    wrong = lambda d_y, x, c: of_weight(d_y, x, c).masked_fill(empty(c), torch.nan)
    made = partial(experts.grouped, product, wrong, experts.experts.gate_pairs)
    monkeypatch.setattr(experts, "MS", 0.1)
    monkeypatch.setitem(experts.KERNELS, "wrong", (None, ("weights",), made))
    monkeypatch.setitem(experts.KERNELS, "failing", (None, ("forward",), lambda c: 1 / 0))
    lines = {}
    for late in ([], ["--limit", "-1"]):
        arguments = ["--device", "cpu", "--repeats", "1", "--only", "weights|forward|layer", *late]
        monkeypatch.setattr(sys, "argv", ["experts.py", *arguments])
        experts.main()
        for line in map(json.loads, capsys.readouterr().out.splitlines()):
            assert line["shape"]["empty"] == (2 if line["routing"] == "skewed" else 0) and "torch" in line["packages"]
            lines[line["routing"], line["what"], line["kernel"], bool(late)] = line
    for (routing, what, kernel, late), line in lines.items():
        if kernel in ("quack", "quack bare", "sonic", "experts compiled", "experts quack"):
            assert line["missing"] == "needs a GPU" and "ms" not in line
        elif late:
            assert line["late"] == "not begun within -1 s" and "ms" not in line
        elif kernel == "failing":
            assert line["error"] == "ZeroDivisionError: division by zero" and "ms" not in line
        else:
            assert (line["difference"] > 1e3) is (kernel == "wrong" and routing == "skewed"), (kernel, what)
            assert line["ms"] > 0 and (kernel == "wrong" or line["difference"] < 0.01)
            assert 0 < line["share"] <= 1 or kernel == "torch bare"
    assert len(lines) == 2 * 2 * (7 + 7 + 3 + 6)  # of two runs and routings
