"""`objective: dpo` as a user meets it: it learns, every verb knows pairs, and what pairs cannot have is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from optrush import config, hardware
from optrush.config import parse_config
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.models import tiny
from optrush.planner import search

from clirun import base, metrics, refused, write_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-dpo-cpu.yaml"
NAMES = ("rewards_chosen", "rewards_rejected", "reward_accuracy", "reward_margin")
SHORT = {"sample": "recipes", "path": None, "max_samples": 24, "too_long": "drop", "eval": 0.25}


def preferences(**changes):
    """A short run on pairs, of 4 rows of 512 a step."""
    data = {**SHORT, **changes.pop("data", {})}
    return {"objective": "dpo", "data": data, "batch": {"seq": 512, "tokens": 2048}, "train": {"epochs": 1}, **changes}


def rows(n=12):
    return [{"prompt": f"Soup {i}? ", "chosen": "Yes, with two onions.", "rejected": "No."} for i in range(n)]


@pytest.mark.slow
def test_the_example_learns_which_answer_is_better(call, here):
    """Four short steps of it: pairs that were held out are the right way round, from a coin's flip; and `eval`."""
    run = yaml.safe_load(EXAMPLE.read_text())
    run |= {"output": "out", "train": {"steps": 4, "log_every": 2}}
    run["data"] |= {"max_samples": 40, "eval": 0.25}
    run["batch"]["tokens"] = 2048
    (here / "dpo.yaml").write_text(yaml.safe_dump(run))
    found = call("train", "dpo.yaml")
    assert found.code == 0, found.err
    lines = metrics(here / "out")
    first, last = [m for m in lines if "eval_loss" in m]
    assert first["eval_loss"] == pytest.approx(0.693147, abs=1e-5) and first["eval_reward_margin"] == 0
    assert last["eval_reward_accuracy"] >= 0.9 and last["eval_loss"] < 0.3 and last["eval_reward_margin"] > 1
    for m in (m for m in lines if "loss" in m or "eval_loss" in m):
        kind = "eval_" if "eval_loss" in m else ""
        chosen, rejected, accuracy, margin = (m[f"{kind}{name}"] for name in NAMES)
        assert margin == pytest.approx(chosen - rejected, abs=1e-4) and 0 <= accuracy <= 1
    assert "pairs right" in found.err and (here / "out" / "report.html").is_file()
    page = (here / "out" / "report.html").read_text()
    assert "Reward margin" in page and "a pair" in page and "nats per target token" not in page
    measured = json.loads(call("eval", "dpo.yaml", "--model", "out/model", "--json").out)
    assert measured["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert measured["target_tokens"] == last["eval_target_tokens"] and measured["documents"] == 20
    assert measured["reward_margin"] == pytest.approx(last["eval_reward_margin"], rel=1e-5)


def test_a_dry_run_shows_both_answers(call, write):
    facts = json.loads(call("train", write(**preferences()), "--dry-run", "--json").out)
    shown = [d for row in facts["rows"] for s in row["samples"] for d in s["documents"]]
    assert [d["name"] for d in shown] == ["chosen", "rejected"] * (len(shown) // 2)
    assert facts["data"]["documents"] == 36 and facts["data"]["held_out_documents"] == 12
    assert facts["config"]["dpo"] == {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0, "reference": "auto"}
    text = call("train", write(**preferences()), "--dry-run").out
    assert "── chosen " in text and "── rejected " in text and not Path("out").exists()


def test_rows_of_pairs_are_shown(call, write, here):
    write_rows(here / "pairs.jsonl", rows())
    config = write(objective="dpo", data={"path": "pairs.jsonl", "eval": None})
    found = json.loads(call("data", "show", config, "--packed", "--json").out)
    assert all(
        [d["name"] for d in s["documents"]] == ["chosen", "rejected"] for r in found["rows"] for s in r["samples"]
    )


def test_a_plan_counts_what_pairs_cost(write):
    """Logits that are made again under fused-loss, and with an adapter the reference's pass."""

    def flop(withs=(), sets=()):
        config = Path(write(**preferences(model={"path": "tiny"}))).read_text()
        return {w.name: w.flop for w in search.predict(parse_config(config, "run.yaml", sets, withs), "h200").work}

    plain, fused, lora = flop(), flop(["fused-loss"]), flop(["lora"])
    assert "head.again" not in plain and fused["head.again"] == pytest.approx(fused["head.products"] / 3)
    assert lora["forward.gate_up"] == pytest.approx(2 * plain["forward.gate_up"]) and lora["reference.head"] > 0
    given = flop(["lora"], ["dpo.reference=precomputed"])
    assert given["forward.gate_up"] == pytest.approx(plain["forward.gate_up"]) and "reference.head" not in given


@pytest.mark.parametrize("objective", ["sft", "pretrain", "grpo", "own"])
def test_a_plan_counts_losses_by_token(write, objective):
    """A loss of one's own, and sampled answers; the objectives' own mean over tokens makes logits once."""

    def work(**changes):
        config = write(model={"path": "tiny"}, with_={"fused-loss": {}}, **changes)
        run = parse_config(Path(config).read_text(), "run.yaml", ["batch.tokens=8192"])
        return {w.name for w in search.predict(run, "h200").work}

    if objective == "grpo":
        assert "head.again" in work(objective="grpo", grpo={"rewards": [{"use": "exact"}]})
    elif objective == "own":
        assert "head.again" in work(objective={"use": "own.py:loss", "rows": "text"})
    else:
        assert "head.again" not in work(objective=objective)
        assert "head.again" in work(objective=objective, loss="own.py:loss")


def test_a_plan_knows_which_adapters_can_be_undone(call, write):
    """Beside modules that are trained whole the reference is made once, and no step pays for it."""
    config = write(**preferences(model={"path": "tiny"}), with_={"lora": {"save": ["norm"]}})
    found = call("plan", config, "--hardware", "h200", "--json")
    assert found.code == 0 and "reference.head" not in {w["name"] for w in json.loads(found.out)["work"]}


def test_a_first_file_for_pairs(call, here):
    write_rows(here / "pairs.jsonl", rows())
    assert call("init", "train.yaml", "--model", "tiny", "--data", "pairs.jsonl").code == 0
    run = yaml.safe_load((here / "train.yaml").read_text())
    assert run["objective"] == "dpo" and run["dpo"]["reference"] == "auto" and run["data"]["too_long"] == "drop"
    assert call("train", "train.yaml", "--dry-run").code == 0


def test_a_streamed_run_with_an_adapter(call, write, here):
    """Nobody has read its rows before: but the adapter's reference needs none."""
    write_rows(here / "pairs.jsonl", rows(40))
    data = {"path": "pairs.jsonl", "stream": True, "eval": 0.2}
    config = write(objective="dpo", data=data, train={"steps": 2, "epochs": None}, with_={"packing": {}, "lora": {}})
    found = call("train", config)
    assert found.code == 0, found.err
    assert [m["step"] for m in metrics(here / "out") if "loss" in m] == [1, 2]
    found = call("train", config, "--without", "lora", "--set", "output=other")
    note, _, error = found.err.partition("asked: ")
    assert "chat template is not used" in note and "messages" in note
    found = found._replace(err="asked: " + error)
    refused(found, "a reference for `objective: dpo`", "`data.stream`", "train an adapter", output="other")


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "its block elsewhere": ({"objective": "sft", "dpo": {}}, ("`dpo` with `objective: sft`", "does not use it")),
    "another's section": (preferences(orpo={}), ("`orpo` with `objective: dpo`", "this objective does not use it")),
    "conversations, for another": ({"objective": "simpo"}, ("`objective: simpo`", "chat.jsonl:1 is not a pair")),
    "cut answers, for another": (preferences(objective="orpo", data={"too_long": "split"}),
        ("`objective: orpo`", "too_long: error or drop")),
    "smoothed ipo": (preferences(dpo={"loss": "ipo", "label_smoothing": 0.1}),
        ("`dpo.loss: ipo`", "leave one of the two out")),
    "beta": (preferences(dpo={"beta": 0}), ("`dpo.beta`", "a number above 0")),
    "half of the labels": (preferences(dpo={"label_smoothing": 0.5}), ("`dpo.label_smoothing`", "a number below 0.5")),
    "split": (preferences(data={"too_long": "split"}), ("`data.too_long: split`", "take data.too_long: error or drop")),
    "truncate": (preferences(data={"too_long": "truncate"}), ("`data.too_long: truncate`", "never compared")),
    "the prompt too": (preferences(data={"train_on": "all"}), ("`data.train_on: all`", "cancels out")),
    "a stream": (preferences(data={"stream": True}, dpo={"reference": "precomputed"}),
        ("`dpo.reference: precomputed`", "`data.stream`", "reference: adapter")),
    "random tokens": ({"objective": "dpo", "data": {"random": 64, "path": None, "eval": None}},
        ("`data.random`", "objective: pretrain")),
    "conversations": ({"objective": "dpo"}, ("chat.jsonl:1 is not a pair", '"chosen"')),
    "wrapped": (preferences(data={"too_long": "error"}, with_={"wrap": {}}),
        ("--with wrap", "attend to", "--with packing")),
    "no adapter": (preferences(dpo={"reference": "adapter"}),
        ("`dpo.reference: adapter`", "every weight is trained", "precomputed")),
    "an adapter and whole weights": (preferences(dpo={"reference": "adapter"},
        with_={"packing": {}, "lora": {"save": ["norm"]}}), ("`dpo.reference: adapter`",
        "what is trained cannot be undone", "leave save and init out")),
    "too long": (preferences(data={"too_long": "error"}, batch={"seq": 64, "tokens": 256}),
        ("pairs of at most 64", "data.too_long: drop")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, call, write):
    changes, says = REFUSED[name]
    refused(call("train", write(**changes)), *says)


@pytest.mark.parametrize("verb", [("train", "--dry-run"), ("plan",)])
@pytest.mark.parametrize(
    ("with_", "says"), [({}, "every weight is trained"), ({"lora": {"save": ["norm"]}}, "leave save and init out")]
)
def test_what_cannot_be_undone_is_refused_by_all(verb, with_, says, call, write):
    name, *flags = verb
    config = write(**preferences(dpo={"reference": "adapter"}, with_=with_))
    refused(call(name, config, *flags), "`dpo.reference: adapter`", says, "dpo.reference: precomputed")
    config = write(**preferences(dpo={"reference": "adapter"}, with_={"lora": {}}))
    assert call(name, config, *flags).code == 0


@pytest.mark.parametrize("verb", [("train", "--dry-run"), ("data", "show", "--packed")])
def test_wrapped_pairs_are_refused_by_all(verb, call, write):
    name, *flags = verb if verb[0] == "train" else verb[1:]
    command = ("train",) if name == "train" else ("data", "show")
    config = write(**preferences(data={"too_long": "error"}, with_={"wrap": {}}))
    refused(call(*command, config, *flags), "--with wrap", "--with packing")


def test_pairs_under_another_objective(call, write, here):
    write_rows(here / "pairs.jsonl", rows())
    refused(call("train", write(data={"path": "pairs.jsonl"})), "pairs.jsonl:1", "or set objective: dpo")


@pytest.mark.parametrize(("technique", "option", "says"), [
    ("fused-loss", "quack", "take impl=chunked"), ("fused-loss", "liger", "take impl=chunked"),
    ("attention", "cudnn", "take impl=varlen"),
])  # fmt: skip
def test_kernels_that_cannot_serve_pairs(technique, option, says):
    """Gradients made with the sum, before each pair's factor is known; rows of one document. On a GPU that has them."""
    run = base(**preferences(with_={"bf16": {}, technique: {"impl": option}}))
    run["model"] = {"shape": "llama-3.2-1b", "tokenizer": "tiny"}
    h200 = hardware.NAMED["h200"]
    with pytest.raises(NeedsError, match=option) as caught:
        decide(config.parse_config(yaml.safe_dump(run), "run.yaml"), ranks=1, device=h200)
    assert caught.value.do == says
    other = config.parse_config(yaml.safe_dump(run | {"objective": "sft"}), "run.yaml")
    decide(other, ranks=1, device=h200)


def test_an_evaluation_needs_another_model(call, write):
    refused(call("eval", write(**preferences())), "`optrush eval` of `objective: dpo`", "--model OUTPUT/model")


@pytest.mark.slow
def test_models_that_read_the_pairs_otherwise_are_not_compared(call, write, here):
    """Another template, another tokenizer; new tokens alone, of which no pair has one, change nothing."""
    write_rows(here / "pairs.jsonl", [{k: [{"role": "assistant", "content": v}] if k != "prompt" else v
                                       for k, v in row.items()} for row in rows()])  # fmt: skip
    config = write(**preferences(data={"sample": None, "path": "pairs.jsonl"}, output="trained"))
    tiny.write_tiny(here / "other", seed=3)
    assert call("eval", config, "--model", "other").code == 0
    (here / "other" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    found = call("eval", config, "--model", "other")
    asked = "`optrush eval` of `objective: dpo`"
    refused(
        found, asked, "other and tiny tokenize the pairs differently: another chat template", "as CONFIG",
        output="trained",
    )  # fmt: skip
    tiny.write_tiny(here / "third", seed=3)
    tokenizer = json.loads((here / "third" / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 2]
    (here / "third" / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = call("eval", config, "--model", "third")
    refused(found, asked, "another tokenizer", output="trained")
    tiny.write_tiny(here / "fourth", seed=3)
    made = AutoTokenizer.from_pretrained(here / "fourth")
    made.add_tokens(["<unseen>"], special_tokens=True)
    made.save_pretrained(here / "fourth")
    assert call("eval", config, "--model", "fourth").code == 0


@pytest.mark.slow
def test_a_merged_model_is_measured_without_adapters(call, write, here):
    """One that began from a folder's: laid over the merged model it would count twice, as would 4 bits."""
    write_rows(here / "pairs.jsonl", rows(20))
    run = preferences(data={"sample": None, "path": "pairs.jsonl"}, optim={"lr": 3e-2})
    first = call("train", write(**run, with_={"packing": {}, "lora": {"rank": 2}}), "--set", "output=first")
    assert first.code == 0, first.err
    init = here / "first" / "adapter"
    assert init.is_dir()
    config = write(**run, with_={"packing": {}, "nf4": {}, "lora": {"rank": 2, "init": str(init)}})
    found = call("train", config)
    assert found.code == 0, found.err
    evals = [m for m in metrics(here / "out") if "eval_loss" in m]
    found = call("eval", config, "--model", "out/model", "--json")
    assert found.code == 0 and "out/model is measured as it lies there, without nf4, lora" in " ".join(
        found.err.split()
    )
    measured = json.loads(found.out)
    assert measured["loss"] == pytest.approx(evals[-1]["eval_loss"], rel=1e-4)
    assert abs(evals[-1]["eval_loss"] - evals[0]["eval_loss"]) > 1e-2
    assert measured["reward_margin"] == pytest.approx(evals[-1]["eval_reward_margin"], rel=1e-3, abs=1e-4)


@pytest.mark.skipif(bool(hardware.probe()), reason="a rung of its own device")
@pytest.mark.slow
def test_a_rung_is_measured_and_proved(here):
    """Over two layouts the same pairs: the same losses."""
    from optrush.benchmark import worker

    with_: dict[str, Any] = {"packing": {}, "lora": {}}

    write_rows(here / "pairs.jsonl", rows())
    data = {"path": "pairs.jsonl", "eval": None}
    run = base(objective="dpo", data=data, train={"steps": 2, "epochs": None}, with_=with_)
    other = run | {"with": {name: o for name, o in with_.items() if name != "packing"}}
    runs = [config.parse_config(yaml.safe_dump(r), "run.yaml") for r in (run, other)]
    found = [worker.measure(r, runs[0], 1, 2, 3) for r in runs]
    assert [f["proof"]["note"] for f in found] == [None, None]
    for key in ("losses", "grad_norms"):
        assert found[0]["proof"][key] == pytest.approx(found[1]["proof"][key], rel=2e-4)
    assert len(found[0]["losses"]) == 2
