"""Every chat template that the `trl` package ships, each with conversations of many kinds: masked exactly, or refused.

What must be learnt is told by the conversations themselves, and by the templates rendered plainly by transformers;
nothing here asks the code under test where a text lies. A refusal must have its reason in the plain rendering too.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshes import further
from optrush.data.chat_template import Tokens
from optrush.data.mask import MEND_EARLIER, Masker
from optrush.data.schema import RowLocation, parse_row
from optrush.errors import DataError

WHERE = RowLocation(Path("chat.jsonl"), 3)
TEMPLATES = sorted(Path(find_spec("trl").submodule_search_locations[0]).glob("chat_templates/*.jinja"))
MARKER = re.compile(r"<[^<>\s'\"{}()=]+>|\[gMASK\]|\[/?INST\]|<</?SYS>>")
PARTS = ("idefics3", "smolvlm", "llava_next")  # they take a content as a list of parts
AS_JSON = ("deepseekv3",)  # it takes arguments as JSON
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather.",
    "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string",
        "description": "City."}, "days": {"type": "integer", "description": "How long."}}},
}}]  # fmt: skip


def calling(content, *arguments, **more):
    calls = [
        {"id": f"call{n}", "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for n, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def told(text, n=0):
    return {"role": "tool", "content": text, "name": "get_weather", "tool_call_id": f"call{n}"}


def talk(answers, system=None):
    turns = [] if system is None else [{"role": "system", "content": system}]
    for number, answer in enumerate(answers):
        turns.append({"role": "user", "content": f"Question {number}? 🙂"})
        turns.append(answer if isinstance(answer, dict) else {"role": "assistant", "content": answer})
    return turns


BERN, ZURICH = {"city": "Bern"}, {"city": 'Zü"ri\nch', "days": 3, "sure": True, "near": [1.5, {"to": "the lake"}]}
CALL, AND_BACK = calling("", ZURICH), talk(["Bring an umbrella."])
CONVERSATIONS = {
    "1 turn": talk(["Soup."]), "2 turns, empty system": talk(["Two eggs.", "And salt."], ""),
    "3 turns, the same answer": talk(["same", "same", "same"]),
    "4 turns, white space": talk(["  Soup.\n", "\n\n\n1. Eggs\n```\nx = 0\n```\n ", "\tTab", "End "], "Be kind."),
    "5 turns, unicode": talk(["crème 🙂👩‍🍳", "e\u0301\u0323 नमस्ते", "مرحبا שלום", "中文\u3000字", "\u200ba\u00a0b"]),
    "6 turns, markup": talk(["# A\n- b", "{{ x }} {% if %}", "User: a\nAssistant:", "<b>&amp;</b>", "[x](y)", "\\n"]),
    "8 turns, system": talk([f"Answer {n}: {'egg ' * n}." for n in range(8)], "Be kind."),
    "thinking in the content": talk(["<think>\nEggs boil.\n</think>\n\nTen minutes."]),
    "reasoning": talk([{"role": "assistant", "content": "Ten minutes.", "reasoning_content": "Eggs boil.\nSlowly."}]),
    "call": [*talk([CALL], "Be kind."), told("rain"), {"role": "assistant", "content": "It rains."}],
    "call, turns": [*talk([CALL]), told("rain"), {"role": "assistant", "content": "It rains."}, *AND_BACK],
    "call with text": [*talk([calling("Let me look.", BERN)]), told("fog"), {"role": "assistant", "content": "Fog."}],
    "two calls, last": talk([calling("", BERN, ZURICH)]),
    "reasoning, calls": [*talk([calling("", BERN, reasoning_content="I must look.")]), told("fog"),
        calling("", ZURICH, reasoning_content="And there?"), told("rain"),
        {"role": "assistant", "content": "Fog, rain.", "reasoning_content": "Now I know."}],
}  # fmt: skip
# What is refused though the plain rendering holds everything: why, of which templates, of which conversations.
REFUSED = [
    ("no end-of-turn token", r"glm4moe", re.compile("")),  # no token ends a turn
    (
        r"<\|end\|> follows an answer, <\|return\|> the last",
        r"gptoss.*",
        re.compile("[2-8] turns|, turns"),
    ),  # <|return|> ends the last answer only
    ("later turns change how", r"gemma4(_v[345])?|diffusion_gemma.*", re.compile("call with text")),  # moved
    ("neither a plain answer", r"qwen3_5_nothink.*", re.compile("reasoning|thinking")),  # asks for no thoughts
]


@pytest.fixture(scope="module")
def bytelevel():
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("e", "r"), ("i", "n"), ("Ġ", "y"), ("Ġy", "o")]  # none reaches from a header into an answer
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine.to_str()


def opened(engine, path):
    """A tokenizer that knows the template's special tokens."""
    source = path.read_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(engine), bos_token="<|bos|>", eos_token="</s>", chat_template=source
    )
    marks = [AddedToken(mark, normalized=False) for mark in sorted(set(MARKER.findall(source)))]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return Tokens(tokenizer)


def rendered(tokens, path, turns, tools=None, **more):
    """What transformers makes of it, by itself."""
    name = path.stem.removesuffix("_training")
    turns = json.loads(json.dumps(turns))
    for turn in turns:
        if name in PARTS:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        for call in turn.get("tool_calls", ()) if path.stem in AS_JSON else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return tokens.tokenizer.apply_chat_template(turns, tools=tools, **{"tokenize": False, **more})


def texts(turn):
    """What a turn says, argument by argument."""

    def values(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return [value] if inner is None else [text for part in inner for text in values(part)]

    found = re.split("</?think>", turn["content"]) + [turn.get("reasoning_content", "")]
    for call in turn.get("tool_calls", ()):
        found += [call["function"]["name"], *values(call["function"]["arguments"])]
    return [text for text in found if text != ""]


def holds(text, said):
    """Whether the text has it, perhaps without white space at its ends, or quoted."""
    if not isinstance(said, str):
        return str(said) in text or json.dumps(said) in text
    quoted = json.dumps(said, ensure_ascii=False)[1:-1]
    return any(form in text for form in (said.strip(), quoted, quoted.replace('\\"', '"')))


def runs(tokens, document):
    """The texts of the runs of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.targets, [False]]).astype(int)))
    return [tokens.tokenizer.decode(document.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def header(text, before):
    """What follows the turn before."""
    return text[text.rindex(before["content"]) :]


def headers(tokens, path, turns, tools, i):
    """What a plain answer follows in the place of turn i, alone and among the others, and what asks for an answer."""
    yield header(rendered(tokens, path, turns[:i], tools, add_generation_prompt=True), turns[i - 1])
    for after in ([], turns[i + 1 :]):
        try:
            text = rendered(tokens, path, [*turns[:i], {"role": "assistant", "content": "@@"}, *after], tools)
        except TemplateError:
            continue  # no call, and yet its answer
        yield header(text.partition("@@")[0], turns[i - 1])


def masked(tokens, path, name, document):
    """Asserts that exactly the answers and their ends of turn are learnt."""
    turns = CONVERSATIONS[name]
    tools = TOOLS if "call" in name else None
    whole = rendered(tokens, path, turns, tools)
    assert document.ids.tolist() == rendered(tokens, path, turns, tools, tokenize=True)["input_ids"]
    found, answers = runs(tokens, document), [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    assert len(found) == len(answers)
    stops, at = set(), 0
    for run, i in zip(found, answers, strict=True):
        turn, upto = turns[i], rendered(tokens, path, turns[: i + 1], tools).rstrip()
        form = run
        while end := next((mark for mark in tokens.tokenizer.all_special_tokens if form.endswith(mark)), None):
            form = form.removesuffix(end)
        assert form != run and any(end.endswith(run.lstrip()) for end in (upto, upto.removesuffix("</s>").rstrip()))
        at = whole.index(run, at)
        same = form.strip() == turn["content"].strip()
        if same or not (turn.keys() & {"tool_calls", "reasoning_content"} or "<think>" in turn["content"]):
            stops.add(run.removeprefix(form))
            assert same and form in turn["content"]
            assert form == turn["content"] or turn["content"] + run.removeprefix(form) not in whole, (
                "it was not trimmed"
            )
        else:
            assert all(holds(run, text) for text in texts(turn)), run
            assert header(whole[:at], turns[i - 1]) in headers(tokens, path, turns, tools, i)
        at += len(run)
    assert len(stops) < 2
    if re.search(r"{%-? *generation", path.read_text()) and "unicode" not in name:  # theirs loses bytes of characters
        more = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        theirs = np.array(rendered(tokens, path, turns, tools, **more)["assistant_masks"], bool)
        outside = set(tokens.tokenizer.convert_ids_to_tokens(document.ids[document.targets & ~theirs]))
        # With this the model hands over to the tool: it must learn it, though the template does not mark it.
        assert outside <= ({"<|tool_response>"} if path.stem == "diffusion_gemma_training" else set())


def justified(tokens, path, name, error):
    """Asserts that the plain rendering fails or loses something, or that the refusal is a known one."""
    turns, tools = CONVERSATIONS[name], TOOLS if "call" in name else None
    for why, templates, names in REFUSED:
        if re.search(why, error.found):
            assert re.fullmatch(templates, path.stem) and names.search(name), error
            return
    try:
        whole = rendered(tokens, path, turns, tools)
    except (TemplateError, TypeError):
        assert "chat template failed" in error.found
        return
    assert "left out" in error.found or "leaves out" in error.found, error
    said = [text for turn in turns if turn["role"] == "assistant" for text in texts(turn)]
    lost = whole.count("get_weather") < said.count("get_weather") or not all(holds(whole, text) for text in said)
    assert lost or (tools and rendered(tokens, path, turns) == whole), error


@pytest.mark.parametrize(
    "path", further(TEMPLATES[::3] + TEMPLATES[1::3] + TEMPLATES[2::3], 12), ids=lambda path: path.stem
)
def test_answers_are_learnt_exactly_or_the_row_is_refused(bytelevel, path, monkeypatch):
    """Each row as it is written, whether or not later turns change it (tests/unit/test_probe.py)."""
    monkeypatch.setattr(Masker, "check_steady", lambda *_: None)
    tokens = opened(bytelevel, path)
    rows = [
        (WHERE, parse_row(WHERE, {"messages": turns, **({"tools": TOOLS} if "call" in name else {})}))
        for name, turns in CONVERSATIONS.items()
    ]
    every, last = (tokens.batch(rows, train_on) for train_on in ("assistant", "last"))
    for name, made, one in zip(CONVERSATIONS, every, last, strict=True):
        if isinstance(made, DataError):
            assert "chat.jsonl:3" in made.asked
            justified(tokens, path, name, made)
            assert isinstance(one, DataError) or made.do == MEND_EARLIER
        else:
            masked(tokens, path, name, made[0])
            assert runs(tokens, one[0]) == runs(tokens, made[0])[-1:]
