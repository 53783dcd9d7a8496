"""`optrush plan` as a user and as a program call it: what it shows, what it writes, what it refuses."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from meshes import further
from optrush import hardware
from optrush.config import parse_config
from optrush.planner import answer

LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama1b.yaml"
# Steps of one row, where the answer does not rest on their size: a search of a quarter of the time.
ONE_ROW = ("--set", "batch.tokens=2048", "--set", "batch.micro_tokens=2048")


def test_for_people(call):
    short = call("plan", str(LLAMA), "--hardware", "h200", *ONE_ROW)
    first = short.out.splitlines()[0]
    assert (
        first.startswith("fits on NVIDIA H200, rows of 2,048 tokens: full, ")
        and "tokens/s" in first
        and " steps of 2,048 tokens, " in first
        and "USD" in first
    )
    assert "as configured: " in short.out and "backward.gate_up" not in short.out


def test_for_programs(call):
    rows = ("--set", "batch.micro_tokens=2048", "--set", "batch.tokens=4096")
    found = call("plan", str(LLAMA), "--hardware", "2xh200", "--with", "fsdp", *rows, "--json")
    document = json.loads(found.out)
    assert document["fits"] is True and document["basis"] == "datasheet" and document["refused"] is None
    assert sum(line["bytes"] for line in document["lines"]) == document["peak_bytes"]
    assert all(line["name"] and line["reason"] for line in document["lines"])
    assert document["tokens_per_s"] > 0 and len(document["alternatives"]) == 3
    for other in document["alternatives"]:
        assert other["fits"] and {"ddp", "fsdp"} & other["with"].keys()


def test_how_long_a_run_takes_as_it_is_written(call, tmp_path):
    """Steps that the file gives, and steps by an estimate of the data's tokens."""
    path = tmp_path / "run.yaml"
    path.write_text("{model: tiny, objective: sft, data: {sample: recipes}, output: o, with: {fused-adamw: {}}}")
    for given, said in (([], "; this data: about "), (["--set", "train.steps=30"], "; this data: 30 steps, ")):
        first, *lines = call("plan", str(path), "--hardware", "h200", *given).out.splitlines()
        (configured,) = (line for line in lines if line.startswith("as configured: "))
        assert all(said in line and " + start " in line and "USD" in line for line in (first, configured))
    document = json.loads(call("plan", str(path), "--hardware", "h200", *given, "--json").out)
    assert document["steps"] == 30 and document["steps_s"] == pytest.approx(30 * document["step_s"])
    assert document["hours"] * 3600 == pytest.approx(sum(document[part] for part in ("start_s", "steps_s", "end_s")))
    assert document["usd"] > 0


@pytest.mark.parametrize("beside", [("--out", "x.yaml"), ("--price", "0"), ("--details",), ("--keep-maths",)])
def test_a_question_takes_no_option_that_it_would_ignore(call, here, beside):
    found = call("plan", str(LLAMA), "--hardware", "h200", "--solve", "batch", *beside)
    assert found.code == 2 and f"--solve batch with {beside[0]}" in found.err and not Path("x.yaml").exists()
    assert "with --hardware" in call("plan", str(LLAMA), "--hardware", "h200", "--solve", "cheapest").err


@pytest.mark.parametrize(("what", "card", "steps", "hours"), further([
    ("tokens=1e9", "h100", 30518, None), ("usd=5", "2xh100", None, 5 / 2.71 / 2), ("hours=2", "l4", None, 2),
], 2))  # fmt: skip
def test_steps_within_a_limit(call, what, card, steps, hours):
    """The steps that hours, dollars or tokens allow take as long as the plan of so many steps says."""
    given = ["plan", "meta-llama/Llama-3.2-1B", "--set", "method=lora", "--hardware", card, "--json"]
    found = json.loads(call(*given, "--solve", what).out)
    assert steps in (None, found["steps"]) and (hours is None or found["hours"] == pytest.approx(hours, rel=0.01))
    planned = json.loads(call(*given, "--set", f"train.steps={found['steps']}").out)["answer"]["methods"][0]
    assert planned["hours"] == pytest.approx(found["hours"], rel=0.02)


@pytest.mark.parametrize(("what", "card", "said"), [
    ("usd=5", "l4", "no list price of NVIDIA L4"), ("tokens=many", "h100", "write tokens=1e9"),
    ("hours=2", "mi300x", "is not known"), ("hours=1e-3", "h100", "start, one step and end take"),
    ("time", "h100", "hours=2, usd=5, tokens=1e9; without --solve the plan has the time"),
])  # fmt: skip
def test_limits_that_cannot_be_met(call, what, card, said):
    found = call("plan", "meta-llama/Llama-3.2-1B", "--set", "method=lora", "--hardware", card, "--solve", what)
    assert found.code == 2 and said in found.err


@pytest.mark.parametrize("key", ["train.hours", "train.max_time", "train.budget", "train.cost", "deadline"])
def test_a_limit_as_a_key_is_a_question_of_the_plan(call, key):
    found = call("plan", "meta-llama/Llama-3.2-1B", "--hardware", "h100", "--set", f"{key}=2")
    assert found.code == 2 and "no key: optrush plan CONFIG --solve " in found.err


def test_answers_name_the_rows_that_they_are_for(call, monkeypatch):
    """Cards are compared with the rows that a run on a card has, whatever machine asks."""
    monkeypatch.setattr(hardware, "PRICES_USD_H", {"4090": 0.29, "h100": 2.71})
    for given in (["cheapest"], ["gpus", "--hardware", "4090"], ["largest-model", "--hardware", "4090"]):
        found = call("plan", "meta-llama/Llama-3.2-1B", "--set", "method=lora", "--solve", *given)
        assert ", rows of 2,048 tokens: lora, " in found.out, found


def test_a_card_whose_rates_are_not_known(call):
    """No speed, time or price; what is slower on other cards and saves nothing that is needed comes later."""
    given = [str(LLAMA), "--hardware", "mi300x", *ONE_ROW]
    text = call("plan", *given, "--details").out
    first, second, *_ = text.splitlines()
    assert first.endswith("GiB, speed not known") and second.endswith("run `optrush calibrate` on it")
    assert "tokens/s" not in text and "USD" not in text and "h per billion" not in text
    assert "in the order of their speeds on an H100" in text and "  with recompute " in text
    document = json.loads(call("plan", *given, "--json").out)
    assert document["tokens_per_s"] is None and document["hours"] is None
    assert {"compile", "attention"} <= document["alternatives"][0]["with"].keys()
    assert not {"recompute", "selective-recompute"} & document["alternatives"][0]["with"].keys()


def test_sets_without_what_only_the_user_chooses_are_no_answer(call, tmp_path):
    """Groups of 3000 tokens divide no row; a group that does is in every set."""
    given = [str(LLAMA), "--hardware", "h200", "--with", "lora", *ONE_ROW]
    out = tmp_path / "out.yaml"
    found = call("plan", *given, "--with", "longlora:group=3000", "--out", str(out))
    first, second, *_ = found.out.splitlines()
    assert found.code == 2 and not out.exists()
    assert first.startswith("invalid as configured: `longlora` splits rows of 2048 tokens: groups of 3000")
    assert second.startswith("fits on") and second.endswith("; without longlora, which you named")
    whole = call("plan", *given, "--with", "longlora:group=1024")
    first = whole.out.splitlines()[0]
    assert whole.code == 0 and first.startswith("fits on") and "which you named" not in first


def test_what_cannot_run_there_is_said_and_others_are_found(call):
    small = ["--set", "model.shape=qwen2.5-0.5b", "--hardware", "t4", *ONE_ROW]  # the 1B model fits there in no way
    found = call("plan", str(LLAMA), *small)
    assert found.code == 0
    assert "`bf16` needs a device with bf16 matmuls" in found.out and "  1. " in found.out
    document = json.loads(call("plan", str(LLAMA), *small, "--json").out)
    assert document["peak_bytes"] is None and not document["fits"]
    assert document["refused"]["found"].startswith("Tesla T4") and document["alternatives"]


def test_out_is_a_run(call, tmp_path):
    file = tmp_path / "best.yaml"
    found = call("plan", str(LLAMA), "--hardware", "4090", "--out", str(file), *ONE_ROW)
    assert found.code == 0 and str(file) in found.err
    best = parse_config(file.read_text(), "best.yaml")
    assert best.with_ and best.model.shape == "llama-3.2-1b"
    assert best.batch.micro_tokens and best.batch.tokens % best.batch.micro_tokens == 0
    again = json.loads(call("plan", str(file), "--hardware", "4090", "--json").out)
    assert again["fits"] and again["alternatives"][0]["with"] == dict(best.with_)


def test_out_has_the_rate_of_adapters(call, tmp_path):
    for number, flags in enumerate((["--set", "method=lora"], ["--set", "method=full"], ["--set", "optim.lr=3e-5"])):
        config = tmp_path / f"{number}.yaml"
        config.write_text(
            "model: {shape: llama-3.2-1b}\nobjective: pretrain\ndata: {random: 8}\noutput: o\n"
            "batch: {seq: 1024, tokens: 8192}\ntrain: {steps: 4}\n"
        )
        out = tmp_path / f"out-{number}.yaml"
        assert call("plan", str(config), "--hardware", "h100", "--out", str(out), *flags).code == 0
        assert yaml.safe_load(out.read_text())["optim"]["lr"] == (2e-4, 2e-5, 3e-5)[number]


def refused(call, *arguments):
    found = call("plan", *arguments)
    assert found.code == 2, found.out
    assert [line.split(":")[0] for line in found.err.splitlines()[-3:]] == ["asked", "found", "do"]
    return found.err


def test_refusals(call, tmp_path):
    assert "the hardware h300" in refused(call, str(LLAMA), "--hardware", "h300")
    assert "3 ranks cannot share" in refused(call, str(LLAMA), "--hardware", "3xh200", "--with", "fsdp")
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    assert "this file exists" in refused(call, str(LLAMA), "--hardware", "h200", "--out", str(there))
    assert there.read_text() == "mine"
    call("plan", str(LLAMA), "--hardware", "h200", "--out", str(there), "--force", *ONE_ROW)
    assert yaml.safe_load(there.read_text())["with"]
    assert "No such file" in refused(call, str(LLAMA), "--hardware", "h200", "--out", str(tmp_path / "a" / "b.yaml"))


def test_a_refused_run_is_not_written(call, tmp_path, monkeypatch):
    """Without --out the plan is the answer, which says it too."""
    monkeypatch.setattr(answer, "_nearest", lambda *_: iter(()))
    given = (str(LLAMA), "--hardware", "t4", "--with", "bf16", *ONE_ROW, "--set", "model.shape=llama-3.1-70b")
    assert "`bf16` needs a device" in refused(call, *given, "--out", str(tmp_path / "best.yaml"))
    assert not (tmp_path / "best.yaml").exists()


def test_what_fits_in_no_way_is_refused(call, tmp_path, monkeypatch):
    """What would fit is another test's."""
    monkeypatch.setattr(answer, "_nearest", lambda *_: iter(()))
    given = [str(LLAMA), "--hardware", "1GiB", "--out", str(tmp_path / "none.yaml"), *ONE_ROW]
    assert "no setting fits" in refused(call, *given)


def test_the_page_shows_what_it_prints(call, monkeypatch):
    root = LLAMA.parents[1]
    page = (root / "docs" / "plan.md").read_text("utf-8")
    monkeypatch.chdir(root)
    found = call("plan", "benchmarks/llama1b.yaml", "--hardware", "h200", "--details")
    assert textwrap.indent(found.out.rstrip(), "    ") in page, "paste it again"


SMALL = {
    "model_type": "stablelm", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


def model(here, **changes):
    """Write a folder with a config.json alone."""
    here.mkdir(exist_ok=True)
    (here / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return here


def test_a_model_without_a_yaml(call, tmp_path):
    """A folder is enough; what its blocks keep is traced."""
    folder = str(model(tmp_path / "m"))
    found = call("plan", folder, "--hardware", "h100")
    assert found.code == 0 and found.out.startswith("fits on NVIDIA H100"), found.err
    assert "tokens/s; 100 steps of 32,768 tokens, " in found.out.splitlines()[0]
    assert "(basis: traced, datasheet)" in found.out
    details = call("plan", folder, "--hardware", "h100", "--details", "--with", "amp", "--set", "batch.seq=512")
    assert "traced: what products give" in details.out and "models of the family" not in details.out
    assert json.loads(call("plan", folder, "--hardware", "h100", "--json").out)["traced"] is True
    longest = call("plan", folder, "--hardware", "4090", "--solve", "longest")
    assert longest.out.startswith("a document of 4,096 tokens a row, all that the model has positions for")
    refused = call("plan", folder, "--hardware", "4090", "--solve", "largest-model")
    assert refused.code == 2 and "no other sizes of the family 'stablelm' are listed" in refused.err
    beside = call("plan", str(LLAMA), "--data", "random")
    assert beside.code == 2 and "--set data.path=random" in beside.err


@pytest.mark.parametrize("objective", further(["grpo", "dpo", "kto", "sft"], 1))
def test_a_model_with_another_objective(call, objective):
    """What the first run of a model leaves to its objective is not refused as if the user had written it."""
    given = ["plan", "Qwen/Qwen2.5-0.5B", "--hardware", "h100", "--set", f"objective={objective}", "--json"]
    document = json.loads(call(*given, "--data", "sample:recipes").out)
    assert document["refused"] is None and document["fits"]
    found = call(*given)  # random tokens suit only pretrain
    assert "name a file of rows with " in found.out + found.err and "batch.tokens" not in found.err


@pytest.mark.parametrize(("flags", "first", "code"), [
    (["--set", "objective=kto", "--with", "ia3"], "no data given for `objective: kto`; planned with", 0),
    (["--set", "method=qlora", "--with", "int8"], "invalid as configured: `nf4` with `int8`: both own", 2),
    (["--with", "bf16", "--with", "amp"], "invalid as configured: `amp` with `bf16`: both own", 0),
])  # fmt: skip
def test_a_refusal_comes_before_what_fits(call, flags, first, code):
    """What fits is not said first where the run as asked is refused, nor that nothing fits."""
    found = call("plan", "Qwen/Qwen3-0.6B", "--hardware", "4090", *flags)
    assert found.out.startswith(first) and found.code == code and "does NOT fit" not in found.out
    assert "as configured: refused\n  asked: " in found.out


@pytest.mark.parametrize("flags", further([["lora", "--with", "int8"], ["fp8"], ["int8"], ["recompute"]], 1))
def test_a_technique_of_a_models_first_run_joins_what_is_chosen(call, flags):
    """As `optrush init --with` chooses the others: not a run of this technique alone."""
    found = call("plan", "Qwen/Qwen3-1.7B", "--hardware", "4090", "--with", *flags)
    (configured,) = (line for line in found.out.splitlines() if line.startswith("as configured: "))
    assert found.out.startswith("fits on") and " GiB, fits; " in configured and " attention" in found.out


@pytest.mark.parametrize(("hardware", "prompts"), further([("4090", 2048), ("h100", 8), ("2xh100", 8)], 1))
def test_sampled_answers_have_one_speed(call, tmp_path, hardware, prompts):
    """The set is chosen by what a rank samples, and in the precision of the set."""
    (tmp_path / "sums.jsonl").write_text('{"prompt": "What is two and two, and why?", "completion": "4"}\n' * 64)
    given = ["--set", "objective=grpo", "--set", "method=qlora", "--data", str(tmp_path / "sums.jsonl")]
    given += ["--set", f"grpo.prompts={prompts}"]
    lines = call("plan", "Qwen/Qwen3-4B", "--hardware", hardware, *given).out.splitlines()
    configured, decided = (next(t for t in lines if t.startswith(b)) for b in ("as configured: ", "  micro-batch "))
    (one,), (other,) = (re.findall(r"([\d,]+) tokens/s", text) for text in (configured, decided))
    assert one == other and "steps; answers decide how long" in lines[0]


def test_a_card_without_a_price_is_said(call):
    given = ("plan", "Qwen/Qwen3-0.6B", "--hardware")
    assert call(*given, "l4").out.splitlines()[0].endswith(", no list price (--price USD)")
    for more in (["l4", "--price", "0.8"], ["4090"]):
        assert "no list price" not in call(*given, *more).out


def test_what_fits_is_said_once(call):
    """Where the maths of the precision fit in no way, what to do is the answer, and not another setting."""
    for card, does in (
        ("4090", "  do:    take a setting above: --out FILE writes the first"),
        ("4060", "nearest, above"),
    ):
        method = ["--set", "method=full"] if card == "4060" else []
        found = call("plan", "meta-llama/Llama-3.1-8B", "--hardware", card, *method, "--set", "batch.tokens=2048")
        assert does in found.out and "write `" not in found.out and "your file" not in found.out


def test_rows_of_a_model_are_as_long_as_asked(call):
    """A step holds whole rows, also where one of them is longer than the usual step."""
    for length, ranks in ((131_072, 1), (3000, 4)):
        given = ("--hardware", f"{ranks}xh100", "--set", f"batch.seq={length}", "--set", "method=qlora", "--json")
        found = call("plan", "meta-llama/Llama-3.1-8B", *given)
        assert found.code == 0 and json.loads(found.out)["answer"]["fits"], found.err


def test_the_memory_of_the_host_is_compared(call, tmp_path):
    asked = ("plan", "shape:llama-3.1-8b", "--hardware", "4090", "--set", "method=full", "--set", "optim.clip=null")
    asked += ("--set", "batch.tokens=2048", "--set", "batch.seq=2048")
    found = call(*asked, "--host-memory", "64")
    assert found.out.startswith("fits on NVIDIA GeForce RTX 4090, rows of 2,048 tokens: full, "), found.out
    assert call(*asked, "--host-memory", "8").out.startswith("does NOT fit on NVIDIA GeForce RTX 4090, rows of 2,048")
    refused = call("plan", "shape:llama-3.1-8b", "--hardware", "cpu", "--host-memory", "8")
    assert refused.code == 2 and "name a GPU" in refused.err


def test_a_model_without_a_plan(call, tmp_path):
    """Its code is in its folder, and is not run: the weights are all that is known."""
    folder = str(model(tmp_path / "m", model_type="somebodys", hidden_size=4096, num_hidden_layers=32))
    found = call("plan", folder, "--hardware", "4090")
    first, second = found.out.splitlines()
    assert found.code == 2 and first == f"no plan for {folder}: its code is not transformers' own"
    assert second.startswith("  its weights alone need about 4.") and "does NOT fit" not in found.out
    document = json.loads(call("plan", folder, "--hardware", "4090", "--json").out)
    assert document["weights_bytes"]["16"] > 3 * document["weights_bytes"]["4"]
    solved = call("plan", folder, "--hardware", "4090", "--solve", "longest")
    assert solved.code == 2 and "its code is not transformers' own" in solved.err
