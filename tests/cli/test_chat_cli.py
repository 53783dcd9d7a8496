"""`optrush chat`: the answers are transformers' own, they end where they should, and a terminal is safe from them."""

import io
import json
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from trained import run
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush import generation
from optrush.cli import chat
from optrush.config import Sampling
from optrush.console import shown
from optrush.data.schema import Message, RowLocation
from optrush.errors import DataError
from optrush.models import tiny, weights
from optrush.models.hf import load_plain

from clirun import document_of, edited, error_of

asked, refused = document_of("chat"), error_of("chat")

SHORT = ("--max-tokens", "12")


def texts(document, speaker=0):
    return [turn["answers"][speaker]["text"] for turn in document["turns"]]


def plain(folder, turns, seed=None):
    """What transformers alone answers; greedily, unless there is a seed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    how: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    out = model.generate(**ids, max_new_tokens=12, **how)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("seed", further([5, None], 1))
def test_the_answers_are_transformers_own(seed, call, trained):
    """Two turns with a system prompt; the base beside it has its own conversation."""
    drawn = ("--greedy",) if seed is None else ("--seed", str(seed))
    questions = ("How do I make soup?", "And for four?")
    flags = [flag for q in questions for flag in ("--message", q)]
    found = asked(call, str(trained), "--base", *drawn, "--system", "Be brief.", *flags, *SHORT)
    assert found["models"] == ["tiny", str(trained)] and found["system"] == "Be brief."
    base, _ = generation.locate(yaml_run(trained))
    assert base is not None
    for n, folder in enumerate((base, trained / "model")):
        turns = [{"role": "system", "content": "Be brief."}]
        for i, (question, answer) in enumerate(zip(questions, texts(found, n), strict=True)):
            turns.append({"role": "user", "content": question})
            assert answer == plain(folder, turns, None if seed is None else seed + i), folder
            turns.append({"role": "assistant", "content": answer})
    assert texts(found, 0) != texts(found, 1)
    alone = asked(call, str(trained / "model"), *drawn, "--system", "Be brief.", *flags, *SHORT)
    assert texts(alone) == texts(found, 1)


def yaml_run(folder):
    return generation.open_run(folder)[1]


def test_the_seed(call, trained):
    flags = (str(trained), "--message", "Hello", "--message", "Again", *SHORT)
    one, same, other = (asked(call, *flags, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == same and texts(one) != texts(other)
    drawn = asked(call, *flags)
    assert texts(asked(call, *flags, "--seed", str(drawn["seed"]))) == texts(drawn), "the seed that was drawn is told"
    hot = asked(call, *flags, "--seed", "1", "--temperature", "5", "--top-p", "1")
    assert texts(hot) != texts(one)
    for setting in (("--top-k", "1"), ("--top-p", "0.0001")):  # the likeliest token alone
        assert texts(asked(call, *flags, *setting)) == texts(asked(call, *flags, "--greedy"))


def test_where_an_answer_ends(trained, here):
    """At what generation_config.json lists; and at the template's end of turn, where it lists less."""
    folder = shutil.copytree(trained / "model", here / "model")
    ends = [tiny.END, tiny.EOS]
    for listed in ([2], None):
        config = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": listed}
        (folder / "generation_config.json").write_text(json.dumps(config))
        speaker = generation.GenerationModel(generation.find_model("model"))  # of no run, whatever its name
        assert sorted(speaker.tokenizer.convert_ids_to_tokens(speaker.stops)) == sorted(ends)
    end = speaker.tokenizer.convert_tokens_to_ids(tiny.END)
    answer = speaker._answer(torch.tensor([300, 301, end, 302]))
    assert (answer.tokens, answer.finish) == (3, "stop") and answer.text == speaker.tokenizer.decode([300, 301])
    speaker.model.lm_head = torch.nn.Linear(192, tiny.VOCABULARY)  # which says the end of turn at once
    torch.nn.init.zeros_(speaker.model.lm_head.weight)
    torch.nn.init.zeros_(speaker.model.lm_head.bias)
    with torch.no_grad():
        speaker.model.lm_head.bias[end] = 9.0
    ids = speaker.ids([Message("user", "Hi")], RowLocation(Path("x"), 1))
    said = speaker.stream(ids, Sampling(), 0, lambda piece: None)
    assert (said.text, said.tokens, said.finish) == ("", 1, "stop")


def test_streaming(trained):
    """The pieces are the answer, and Ctrl-C ends it and keeps what is there."""
    speaker = generation.GenerationModel(generation.find_model(str(trained)))
    ids, pieces = speaker.ids("Salt the water", RowLocation(Path("x"), 1)), list[str]()
    sampling = Sampling(temperature=1.0, max_tokens=30)
    whole = speaker.stream(ids, sampling, 0, pieces.append)
    assert "".join(pieces) == whole.text and len([p for p in pieces if p]) > 3
    assert speaker.answers([ids], sampling, 0) == [whole]

    def interrupt(piece):
        raise KeyboardInterrupt

    cut = speaker.stream(ids, Sampling(greedy=True, max_tokens=2000), 0, interrupt)
    assert cut.finish == "interrupted" and 0 < cut.tokens < 2000
    assert speaker.stream(ids, sampling, 0, lambda piece: None) == whole, "it goes on"

    def gone(piece):
        raise BrokenPipeError

    threads = threading.active_count()
    with pytest.raises(BrokenPipeError):
        speaker.stream(ids, Sampling(greedy=True, max_tokens=2000), 0, gone)
    assert threading.active_count() == threads
    speaker.model.generate = None
    with pytest.raises(TypeError):
        speaker.stream(ids, sampling, 0, lambda piece: None)


KEPT = "ok\n\ttab nbsp\u00a0 漢\u3000字 \U0001f469\u200d\U0001f373"
ESCAPES = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202egnp.exe\r\x00 " + KEPT


def test_no_control_character_reaches_a_terminal(call, trained, monkeypatch, capsys):
    seen = shown(ESCAPES)
    assert not set(seen) & set("\x1b\x07\x9b\u202e\r\x00")
    assert seen.endswith(KEPT)
    whole = generation.Answer(ESCAPES, 3, "stop")

    def stream(self, ids, sampling, seed, told):
        told(ESCAPES)
        return whole

    monkeypatch.setattr(generation.GenerationModel, "stream", stream)
    for columns in (False, True):
        if columns:
            monkeypatch.setenv("COLUMNS", "120")
            monkeypatch.setattr(chat, "_screen", lambda speakers: chat._Columns([s.name for s in speakers]))
        found = call("chat", str(trained), "--base", "--message", "Hi")
        assert found.code == 0 and not set(found.out) & set("\x1b\x07\x9b\u202e\r\x00"), found.out
        assert found.out.count("gnp.exe") == 2
    assert asked(call, str(trained), "--message", "Hi")["turns"][0]["answers"][0]["text"] == ESCAPES


def talked(call, monkeypatch, folder, *lines, flags=()):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return call("chat", str(folder), "--greedy", *SHORT, *flags)


def test_a_terminal_is_told_how_to_begin_again(call, trained, monkeypatch):
    typed = io.StringIO("/quit\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    found = call("chat", str(trained))
    assert found.code == 0 and "/reset begins a new conversation" in found.err
    assert "/reset" not in talked(call, monkeypatch, trained, "/quit").err


def test_a_conversation(call, trained, here, monkeypatch):
    found = talked(
        call, monkeypatch, trained, "How do I make soup?", "/nonsense", "/set max_tokens=3", "/set colour=red",
        "/set top_p=2", "Again", "/save ~nosuchuser/x", "/save a\0b", "/save talk.jsonl", "/system Be brief.", "Hello",
        "/save talk.jsonl", "/reset", "/save talk.jsonl", "/help", "  /really", "hold <|im_end|> it", "", "/quit",
        "Never asked",
    )  # fmt: skip
    assert found.code == 0 and "Never" not in found.out
    rows = [json.loads(line)["messages"] for line in (here / "talk.jsonl").read_text().splitlines()]
    assert [[m["role"] for m in row] for row in rows] == [["user", "assistant"] * 2, ["system", "user", "assistant"]]
    assert rows[0][0]["content"] == "How do I make soup?" and rows[1][0]["content"] == "Be brief."
    assert rows[0][1]["content"] == plain(trained / "model", rows[0][:1])
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert len(tokenizer(rows[0][3]["content"], add_special_tokens=False)["input_ids"]) <= 3
    for said in (
        "no such command",
        "unknown setting",
        "no such user",
        "null byte",
        "`top_p`",
        "max_tokens=3",
        "the conversation is empty",
        "/save FILE",
    ):
        assert said in found.err, said
    assert "messages[3] holds the text <|im_end|>, a control token" in found.err
    again = talked(call, monkeypatch, trained, "How do I make soup?")  # the end of the input is a leave
    assert again.code == 0 and again.out == rows[0][1]["content"] + "\n"


def test_set():
    start = Sampling()
    assert start.changed("temperature=1").temperature == 1.0 and start.changed("top-k=5").top_k == 5
    assert start.changed("greedy=true").greedy
    for wrong in ("temperature", "temperature=", "temperature=0", "top_k=-1", "max_tokens=0", "max_tokens=1.5",
                  "greedy=1", "top_p=true"):  # fmt: skip
        with pytest.raises(generation.ConfigError):
            start.changed(wrong)


def test_plain_continues_the_text(call, trained, here, monkeypatch):
    folder = shutil.copytree(trained / "model", here / "m")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "its tokenizer has no chat template" in refused(call, "m", "--message", "Hi")
    found = asked(call, "m", "--plain", "--greedy", "--message", "Chop the", "--message", " and", *SHORT)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = ""
    for message, answer in zip(("Chop the", " and"), texts(found), strict=True):
        ids = tokenizer(text + message, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=[4, 2])
        assert answer == tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        text += message + answer
    said = talked(call, monkeypatch, folder, "Chop the", "/save t.jsonl", "/system x", "/quit", flags=("--plain",))
    assert json.loads((here / "t.jsonl").read_text()) == {"text": "Chop the" + texts(found)[0]}
    assert "no system prompt" in said.err


def test_the_base_speaks_the_template_of_what_was_trained(trained, model, here):
    """A base without a template is asked in its student's."""
    bare = shutil.copytree(model, here / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    own = generation.GenerationModel(generation.find_model(str(trained)))
    base = generation.GenerationModel(generation.find_model("bare"), own.tokenizer.chat_template)
    turn = ([Message("user", "Hi")], RowLocation(Path("x"), 1))
    rendered = own.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True
    )
    assert base.ids(*turn) == own.ids(*turn) == rendered["input_ids"], "the header of the answer included"


def test_what_is_refused(call, trained, model, here):
    say = ("--message", "Hi")
    assert "no --message" in refused(call, "tiny", "--json")
    assert "no such folder" in refused(call, "nowhere", *say)
    assert "without config.json" in refused(call, ".", *say)
    assert "its base model is unknown" in refused(call, "tiny", "--base", *say)
    assert "no system prompt" in refused(call, "tiny", "--plain", "--system", "x", *say)
    assert "`temperature`" in refused(call, "tiny", "--temperature", "0", *say)
    assert "a control token: a forged turn" in refused(call, "tiny", "--message", "<|im_start|>system")
    assert "4096 positions" in refused(call, "tiny", "--message", "salt " * 5000)
    unfinished = here / "unfinished"
    unfinished.mkdir()
    settings = yaml.safe_load((trained / "run.yaml").read_text())
    (unfinished / "run.yaml").write_text(yaml.safe_dump(settings))
    assert "neither model/ nor adapter/" in refused(call, "unfinished", *say)
    shape = here / "shape"
    shutil.copytree(trained / "model", shape / "model")
    (shape / "run.yaml").write_text(yaml.safe_dump({**settings, "model": {"shape": "llama-3.2-1b"}}))
    assert "random weights of the shape" in refused(call, "shape", "--base", *say)
    pickled = shutil.copytree(model, here / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "a pickle" in refused(call, "pickled", *say)
    lacking = shutil.copytree(model, here / "lacking")
    (lacking / "tokenizer.json").unlink()
    assert "tokenizer" in refused(call, "lacking", *say)
    odd = shutil.copytree(model, here / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    assert "missing keys: model.layers.4" in refused(call, "odd", *say)


def test_no_code_that_a_folder_names(trained, model, here, call, monkeypatch):
    """An attention that config.json names is neither asked for nor handed on; a package that is lacking is said."""
    kernel = {key: "org/kernel" for key in weights.LEFT_OUT if "attn" in key}
    folder = edited(trained / "model", here / "m", **kernel)
    loaded = load_plain(folder, None, torch.device("cpu"))
    assert loaded.config._attn_implementation == "sdpa"
    weight = torch.zeros(2, 2)
    recipe = weights.WeightMap({"w": weights.WeightEntry((2, 2), (("w", 2),))}, weights.Memory({}))
    weights.export_weights(here / "out", iter([("w", weight)]), recipe, {"model_type": "llama", **kernel})
    written = json.loads((here / "out" / "config.json").read_text())
    assert written["model_type"] == "llama" and not written.keys() & kernel.keys()

    def lacks(*_, **__):
        raise ImportError("the package kernels is not installed")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lacks)
    assert "the package kernels" in refused(call, "m", "--message", "Hi")


def test_an_adapter_on_its_base(call, cache, here, monkeypatch):
    """A run's adapter/ where no model/ is, or the folder alone; without PEFT it is said what to install."""
    of = run(cache, "lora", with_="{lora: {rank: 4}, packing: {}}")
    bare = here / "bare"
    bare.mkdir()
    shutil.copy(of / "run.yaml", bare)
    shutil.copytree(of / "adapter", bare / "adapter")
    flags = ("--greedy", "--message", "How do I make soup?", *SHORT)
    merged = texts(asked(call, str(of), *flags))
    assert texts(asked(call, "bare", *flags)) == merged
    both = asked(call, "bare/adapter", "--base", *flags)
    assert texts(both, 1) == merged != texts(both, 0) == texts(asked(call, "tiny", *flags))
    file = here / "bare" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    for wrong, why in (
        ({k: v for k, v in tensors.items() if k != name}, f"no values for {name}"),
        ({**tensors, "base_model.model.other.lora_A.weight": torch.ones(1)}, "base_model.model.other.lora_A.weight"),
        ({**tensors, name: torch.ones(1)}, "Error(s) in loading"),
    ):
        save_file(wrong, file)
        found = refused(call, "bare", *flags)
        assert why in found, found
    file.write_bytes(b"no")
    assert "no adapter_model.safetensors that can be read" in refused(call, "bare", *flags)
    file.rename(file.with_suffix(".bin"))
    assert "no adapter_model.safetensors that can be read" in refused(call, "bare", *flags)
    (here / "bare" / "adapter" / "adapter_config.json").write_text("[")
    assert "adapter_config.json is not JSON" in refused(call, "bare/adapter", *flags)
    monkeypatch.setattr(generation, "library", lambda name: None)
    assert "python -m pip install peft" in refused(call, "bare", *flags)


def test_a_refused_message_leaves_its_image_to_the_next_one():
    seen = []

    def ids(prompt, *_):
        seen.append(len(prompt[-1].images))
        if "bad" in prompt[-1].content:
            raise DataError("the messages", "a forged turn", "take it out")
        return []

    reader = SimpleNamespace(look=lambda *_: None)
    model = SimpleNamespace(name="m", images=reader, ids=ids, stream=lambda *_: generation.Answer("a", 1, "stop"))
    talk = chat.Conversation(cast(Any, [model]), Sampling(), 0, None, False)
    talk.show("/image a.png", Path("a.png"))
    for text in ("bad", "good", "again"):
        with suppress(DataError):
            talk.turn(text, lambda *_: None)
    assert seen == [1, 1, 0]
    talk.show("/image a.png", Path("a.png"))
    assert "without the picture" in str(talk.command("/reset")) and talk.command("/reset") == "a new conversation"
    talk.turn("good", lambda *_: None)
    assert seen[-1] == 0
