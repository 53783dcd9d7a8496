"""How long a run takes from its command to its model, and what that changes in the choice of techniques."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

from optrush.config import parse_config
from optrush.data.length_estimate import estimate_tokens
from optrush.decide import decide
from optrush.hardware import NAMED
from optrush.planner import answer
from optrush.planner.run_time import FORWARD, WRITTEN_BYTES_S
from optrush.technique import Environment, instantiate
from optrush.techniques import ALL

RUN = (
    "{model: {shape: HuggingFaceTB/SmolLM2-135M}, objective: pretrain, data: {random: %d}, "
    "batch: {seq: 1024, tokens: 16384}, output: o}"
)

# What changes the weights, their type and the time of a step: the others change no part of a run that is asked about.
FEW = [t for t in ALL if t.name in {"amp", "bf16", "lora", "nf4", "fused-adamw", "attention", "packing", "fused-loss"}]


def chosen(rows, *sets):
    return dict(decide(parse_config(RUN % rows, "x", sets), device=NAMED["h200"], ranks=1).config.with_)


def test_a_short_run_compiles_nothing_and_a_long_one_does():
    assert "compile" not in chosen(64)
    assert "compile" in chosen(100_000)
    assert "compile" in chosen(64, "train.epochs=2000") and "compile" in chosen(64, "train.steps=9000")


def test_a_kernel_that_gains_less_than_it_takes_to_compile_is_left_out():
    size = ("model.shape=llama-3.2-1b", "batch.seq=2048", "batch.tokens=32768")
    assert chosen(20_000, *size)["attention"] == {}
    assert chosen(2_000_000, *size)["attention"] == {"impl": "fa4"}


def test_start_steps_and_end():
    config = parse_config(RUN % 10_000, "x", ("with={bf16: {}, compile: {}}", "data.eval=0.1", "train.eval_every=0.25"))
    best = answer.answer(config, "h200").best
    assert best is not None and best.setting is not None
    time, p = best.time, best.setting.prediction
    assert time.seconds == pytest.approx((time.start_s or 0) + (time.steps_s or 0) + (time.end_s or 0))
    assert time.steps and time.steps_s == pytest.approx(time.steps * (p.step_s or 0))
    assert time.start_s and time.start_s > p.compile_s > 0


def test_more_saves_and_evaluations_take_longer():
    def end(*sets):
        best = answer.answer(parse_config(RUN % 10_000, "x", ("data.eval=0.1", *sets)), "h200", FEW).best
        assert best is not None and best.time.end_s is not None
        return best.time.end_s

    plain = end("train.eval_every=1.0")
    assert end("train.eval_every=0.1") < plain and end("train.eval_every=1.0", "train.save_every=0.1") > plain
    assert end("train.eval_every=1.0", "train.export=false") < plain


def test_each_evaluation_takes_a_forward_pass_of_what_is_held_out():
    ends = []
    for every in (0.5, 0.25):  # once on the way, and three times
        config = parse_config(RUN % 10_000, "x", ("data.eval=0.1", f"train.eval_every={every}"))
        best = answer.answer(config, "h200", FEW).best
        assert best is not None and best.setting is not None and best.time.end_s is not None
        ends.append(best.time.end_s)
    trained = estimate_tokens(config)
    speed = best.setting.prediction.tokens_per_s
    assert trained and speed
    assert (ends[1] - ends[0]) / 2 == pytest.approx(trained / 9 * FORWARD / speed, rel=1e-3)


@pytest.mark.parametrize(
    ("techniques", "bytes_"),
    [("{amp: {}}", 4), ("{amp: {}, lora: {}}", 2), ("{bf16: {}}", 2), ("{bf16: {}, lora: {}, nf4: {}}", 2)],
)
def test_the_whole_model_is_written_in_the_end(techniques, bytes_):
    """With adapters too, which are merged."""
    ends = []
    for export in ("true", "false"):
        config = parse_config(RUN % 64, "x", (f"with={techniques}", f"train.export={export}"))
        best = answer.answer(config, "h200", FEW, keep_maths="amp" in techniques).best
        assert best is not None and best.setting is not None and best.time.end_s is not None
        ends.append(best.time.end_s)
    written = (ends[0] - ends[1]) * WRITTEN_BYTES_S / best.setting.prediction.parameters
    assert written == pytest.approx(bytes_, rel=0.1)


def test_a_held_out_file_is_counted(tmp_path):
    """As a share of the rows of the same size is, before the first step and at the end."""
    for name, rows in (("all", 1000), ("train", 800), ("held", 200)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "Oslo lies by the sea, and has trams."}\n' * rows)
    times = []
    for file, held_out in (("all", 0.2), ("train", f"{tmp_path}/held.jsonl"), ("train", "null")):
        sets = (f"data={{path: {tmp_path}/{file}.jsonl, eval: {held_out}}}", "with={}")
        best = answer.answer(parse_config(RUN % 1, "x", sets), "h200", FEW).best
        assert best is not None and best.time.start_s is not None and best.time.end_s is not None
        times.append((best.time.start_s, best.time.end_s))
    assert times[1] == pytest.approx(times[0], rel=1e-6)
    assert times[2][0] < times[1][0] and times[2][1] < times[1][1]


def test_what_is_not_known():
    unknown = answer.answer(parse_config(RUN % 64, "x", ()), "mi300x", FEW).best
    assert unknown is not None and unknown.time.seconds is None
    given = answer.answer(parse_config(RUN % 64, "x", ("train.steps=7",)), "mi300x", FEW).best
    assert given is not None and given.time.steps == 7


def test_what_compiles_says_how_long():
    env = Environment(NAMED["h200"], 1, 1024, 1, 1, None, "float32", True, 30)
    given = {
        "compile": {}, "attention": {"impl": "fa4"}, "fused-loss": {"impl": "quack"}, "fused-kernels": {"mlp": "quack"},
    }  # fmt: skip
    assert all(t.compile_s(env) > 0 for t in instantiate(ALL, given))
    assert not any(t.compile_s(env) for t in instantiate(ALL, {name: {} for name in given if name != "compile"}))


def test_tokens_are_estimated_by_the_models_tokenizer(tiny_folder, tmp_path):
    """Digits and signs are a token each, where the rule of thumb has four characters."""
    rows = [{"text": " ".join(f"{n * k}+{n}=<{n * 7}>" for k in range(20))} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = (f"data={{path: {tmp_path}/rows.jsonl}}", "batch.seq=4096")
    engine = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    true = sum(len(engine.encode(row["text"]).ids) for row in rows)
    plain = estimate_tokens(parse_config(RUN % 1, "x", sets))
    shutil.copytree(tiny_folder, tmp_path / "m")
    engine.enable_truncation(4)
    engine.enable_padding(length=4096)
    engine.save(str(tmp_path / "m" / "tokenizer.json"))
    found = estimate_tokens(parse_config(RUN % 1, "x", (*sets, f"model={{path: {tmp_path}/m}}")))
    assert plain and found and abs(found / true - 1) < 0.1 < abs(plain / true - 1)
