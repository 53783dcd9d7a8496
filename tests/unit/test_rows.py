"""What rows mean: every kind and its variants, one of them only, and nothing that matters dropped."""

import json
from pathlib import Path

import pytest

from optrush.config import parse_config
from optrush.data.schema import Chat, Completion, Message, Pair, RowLocation, Text, parse_row, row_rules, row_text
from optrush.errors import ConfigError, DataError

WHERE = RowLocation(Path("data.jsonl"), 3)
ASK, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}
U, A = Message("user", "ask"), Message("assistant", "answer")
B = Message("assistant", "worse")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def row(**keys):
    return parse_row(WHERE, keys)


def why(**keys):
    with pytest.raises(DataError) as caught:
        row(**keys)
    assert caught.value.asked == "the row at data.jsonl:3"
    assert "\n" not in caught.value.found
    return caught.value.found


def said(**turn):
    """The reason why a conversation with this assistant turn is none."""
    return why(messages=[ASK, {"role": "assistant", "content": "answer", **turn}])


# --- the kinds


def test_every_kind_is_known_by_its_keys():
    both = (U, A)
    turns, other = [ASK, ANSWER], [ASK, {"role": "assistant", "content": "worse"}]
    assert row(text=" a ", id=7, source=None) == Text(" a ")
    assert row(messages=turns, prompt="ask") == Chat(both)
    assert row(conversations=[{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]) == Chat(both)
    assert row(conversations=turns) == Chat(both)
    assert row(instruction="ask", output="answer") == Chat(both)
    assert row(prompt="ask ", completion=" answer") == Completion("ask ", " answer")
    assert row(prompt=[ASK], completion=[ANSWER]) == Chat(both, prompt=1)
    assert row(prompt="ask", completion=[ANSWER]) == Chat(both, prompt=1)
    strings = Pair(Completion("ask", "answer"), Completion("ask", "worse"))
    assert row(prompt="ask", chosen="answer", rejected="worse") == strings
    assert row(chosen="answer", rejected="worse") == Pair(Completion("", "answer"), Completion("", "worse"))
    pair = Pair(Chat(both, prompt=1), Chat((U, B), prompt=1))
    assert row(chosen=turns, rejected=other) == pair
    assert row(prompt=None, chosen=turns, rejected=other) == pair
    for prompt in ("ask", [ASK]):  # beside answers, or beside whole conversations
        assert row(prompt=prompt, chosen=turns[1:], rejected=other[1:]) == pair
        assert row(prompt=prompt, chosen=turns, rejected=other, score_chosen=7) == pair
        assert row(prompt=prompt, chosen=ANSWER, rejected=other[1]) == pair, "one turn is an object"
        assert row(prompt=prompt, chosen=ANSWER, rejected=other[1:]) == pair
    assert row(prompt=ASK, chosen={"from": "gpt", "value": "answer"}, rejected=other[1]) == pair
    assert row(prompt=ASK, completion=ANSWER) == Chat(both, prompt=1)


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("\n\nHuman: Soup?\n\nAssistant: ", "Yes.", "No."),
        ("\n\nHuman: Soup?\n\nAssistant: ", "Soup is good.", "Sour."),  # words stay whole
        ("Soup? ", "Yes", "Yes, please"),
        ("Soup?\n", " Yes", "No"),
        ("", "Yes", "Yeah"),
    ],
)
def test_two_texts_have_their_prompt_in_common(prompt, chosen, rejected):
    want = Pair(Completion(prompt, chosen), Completion(prompt, rejected))
    assert row(chosen=prompt + chosen, rejected=prompt + rejected) == want


@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo", "reward"])
@pytest.mark.parametrize(
    "more", [{}, {"input": "x"}, {"system": "s"}, {"system": None}, {"system": "", "id": 1}], ids=str
)
def test_an_instruction_before_two_answers_is_a_turn(objective, more):
    """As LLaMA-Factory has pairs; with an `output` it is not known which answer is meant."""
    rules = row_rules(parse_config(f"model: {{path: tiny}}\nobjective: {objective}\ndata: {{path: x}}\noutput: o", "x"))
    given = {"instruction": "ask", "chosen": "answer", "rejected": "worse", **more}
    before = (Message("system", "s"),) if more.get("system") else ()
    before += (Message("user", "ask\n\nx" if "input" in more else "ask"),)
    pair = Pair(Chat((*before, A), prompt=len(before)), Chat((*before, B), prompt=len(before)))
    assert parse_row(WHERE, given, rules) == pair
    with pytest.raises(DataError, match="ambiguous"):
        parse_row(WHERE, given | {"output": "o"}, rules)
    with pytest.raises(DataError, match="ambiguous"):
        row(**given)


def test_exactly_one_kind_is_meant():
    assert why(text="a", messages=[]) == "both 'text' and 'messages': ambiguous"
    assert "both 'messages' and 'rejected'" in why(messages=[ASK, ANSWER], chosen="a", rejected="b")
    assert "both 'instruction' and 'completion'" in why(instruction="a", output="b", prompt="c", completion="d")
    assert why() == "no known format: the row has no keys"
    assert why(prompt="a", id=1).endswith("the row has 'prompt', 'id'")
    assert row(text=None, messages=[ASK, ANSWER], chosen=None) == Chat((U, A))  # a null is no key
    assert why(text=None) == "text is null, not a string"
    assert why(messages=None) == "messages is null, not a list"


@pytest.mark.parametrize(("keys", "reason"), [
    ({"text": ["a"]}, "text is a list, not a string"),
    ({"text": b"a"}, "text is a value of the kind bytes, not a string"),
    ({"text": True}, "text is a boolean, not a string"), ({"text": " \n"}, "text is empty"),
    ({"text": "a", "image": "a.png"}, "the row has 'image', which is not supported"),
    ({"instruction": "a"}, "'instruction' without 'output'"),
    ({"instruction": "", "output": "b"}, "instruction is empty"),
    ({"instruction": "a", "output": " "}, "output is empty"),
    ({"instruction": "a", "output": "b", "input": 3}, "input is a number, not a string"),
    ({"instruction": "a", "output": "b", "history": [["q", "r"]]}, "the row has 'history', which is not"),
    ({"instruction": "a", "output": "b", "tools": [TOOL]}, "the row has 'tools', which is not"),
    ({"completion": "b"}, "'completion' without 'prompt'"), ({"prompt": "", "completion": "b"}, "prompt is empty"),
    ({"prompt": "a", "completion": ""}, "completion is empty"),
    ({"prompt": "a", "completion": 7}, "completion is a number, not a list"),
    ({"prompt": [ASK], "completion": "b"}, "prompt is a list, not a string"),
    ({"prompt": "a", "completion": "b", "label": False}, "'label': a judged answer"),
    ({"chosen": "a", "rejected": "b", "system": "s"}, "a row of texts has 'system' without 'prompt'"),
    ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "the row has 'tools', which is not"),
    ({"prompt": [ASK], "completion": [ASK]}, "completion: no assistant turn follows the prompt"),
    ({"prompt": [ASK], "completion": [ASK, ASK, ANSWER]}, "completion: no assistant turn follows the prompt"),
    ({"chosen": "a"}, "'chosen' without 'rejected'"),
    ({"rejected": "a", "chosen": None, "prompt": "b"}, "'rejected' without 'chosen'"),
    ({"chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    ({"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}, "chosen and rejected are the same"),
    ({"chosen": "a", "rejected": [ASK, ANSWER]}, "chosen is a string, rejected is a list"),
    ({"prompt": "a", "chosen": "a", "rejected": ""}, "rejected is empty"),
    ({"chosen": "ask: ", "rejected": "ask: No"}, "chosen after the common prompt is empty"),
    ({"chosen": [ASK, ANSWER], "rejected": [ASK]}, "rejected: no assistant turn follows the prompt"),
    ({"chosen": [ANSWER], "rejected": [ASK, ANSWER]}, "chosen and rejected do not begin with the same prompt"),
    ({"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER, ASK]}, "chosen: no assistant turn follows"),
    ({"prompt": "other", "chosen": [ASK, ANSWER], "rejected": [ANSWER]}, "chosen: no assistant turn follows"),
    ({"chosen": [], "rejected": [ASK]}, "chosen is an empty list"),
    ({"prompt": "a", "chosen": {"text": "b"}, "rejected": {"text": "c"}}, "chosen is an object, not a list"),
    ({"prompt": "a", "chosen": ASK, "rejected": ANSWER}, "chosen: no assistant turn follows the prompt"),
    ({"messages": ANSWER}, "messages is an object, not a list"), ({"messages": []}, "messages is an empty list"),
    ({"messages": "hello"}, "messages is a string, not a list"),
    ({"messages": ["hello"]}, "messages[0] is a string, not an object"),
    ({"messages": [{"role": "system", "content": "s"}, ASK]}, "no assistant turn"),
    ({"messages": [ASK, ANSWER], "history": [1]}, "the row has 'history', which is not"),
    ({"messages": [ASK, ANSWER], "images": ["a"]}, "the row has images: 1; places for them in its turns (<image>): 0"),
    ({"messages": [ASK, ANSWER], "functions": [TOOL]}, "the row has 'functions', which is not"),
    ({"messages": [{"role": "user", "content": ""}, ANSWER]}, "messages[0].content: an empty user turn"),
])  # fmt: skip
def test_rows_that_mean_nothing_or_too_much(keys, reason):
    assert reason in why(**keys)


def test_a_prompt_and_a_system_turn_before_it():
    system = {"role": "system", "content": "s"}
    s = Message("system", "s")
    found = row(
        prompt="ask", chosen=[system, ASK, ANSWER], rejected=[system, {"role": "assistant", "content": "worse"}]
    )
    assert found == Pair(Chat((s, U, A), prompt=2), Chat((s, U, B), prompt=2))
    assert "do not begin with the same prompt" in why(
        prompt="ask", chosen=[system, ASK, ANSWER], rejected=[ASK, ANSWER]
    )
    longer = [ASK, ANSWER, ASK]
    assert (
        row(chosen=[*longer, ANSWER], rejected=[*longer, {"role": "assistant", "content": "worse"}]).chosen.prompt == 3
    )


def test_the_system_turn_of_a_row():
    s = Message("system", "s")
    assert row(messages=[ASK, ANSWER], system="s") == Chat((s, U, A))
    assert row(messages=[ASK, ANSWER], system="") == row(messages=[ASK, ANSWER], system=None) == Chat((U, A))
    assert row(instruction="ask", output="answer", system="s") == Chat((s, U, A))
    turns = [{"from": "system", "value": ""}, {"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]
    assert row(conversations=turns) == Chat((Message("system", ""), U, A))
    assert "both 'system' and a system turn in conversations" in why(conversations=turns, system="s")
    assert "messages is an empty list" in why(messages=[], system="s")
    assert "system is a number" in why(messages=[ASK, ANSWER], system=1)


def test_alpacas_input():
    for given in (None, "", "  \n"):
        assert row(instruction="ask", input=given, output="answer").messages == (U, A)
    assert row(instruction="ask", input="this", output="answer").messages == (Message("user", "ask\n\nthis"), A)


# --- turns


@pytest.mark.parametrize(("turn", "reason"), [
    ({"role": None}, "messages[1].role is null, not a string"),
    ({"role": "wizard"}, "messages[1].role is 'wizard', not one of system, developer, user, assistant, tool"),
    ({"role": "Assistant"}, "messages[1].role is 'Assistant'"),
    ({"content": None}, "messages[1].content is null, not a string"),
    ({"content": " "}, "messages[1].content: an empty assistant turn"),
    ({"content": "", "reasoning_content": "hm"}, "messages[1].content: an empty assistant turn"),
    ({"content": {"text": "a"}}, "messages[1].content is an object, not a string"),
    ({"content": [{"type": "text"}]}, "messages[1].content[0].text is null, not a string"),
    ({"content": [{"type": "image_url"}]}, "messages[1].content[0] is 'image_url', not a part of type 'text'"),
    ({"content": ["a"]}, "messages[1].content[0] is a string, not a part of type 'text'"),
    ({"content": []}, "messages[1].content: an empty assistant turn"),
    ({"images": ["a"]}, "messages[1] has 'images', which is not supported"),
    ({"function_call": {"name": "f"}}, "messages[1] has 'function_call', which is not supported"),
    ({"refusal": "no"}, "messages[1] has 'refusal', which is not supported"),
    ({"prefix": True}, "messages[1] has 'prefix', which is not supported"),
    ({"tool_call_id": "1"}, "messages[1], of the role 'assistant', has 'tool_call_id'"),
    ({"reasoning": 1}, "messages[1].reasoning is a number, not a string"),
    ({"reasoning": "a", "thinking": "b"}, "messages[1] has several of reasoning_content, reasoning, thinking"),
    ({"name": 7}, "messages[1].name is a number"),
    ({"weight": -0.5}, "messages[1].weight is -0.5, not 0 or a number from 0.001"),
    ({"weight": True}, "messages[1].weight is not a number of 0 or more"),
    ({"weight": [0]}, "messages[1].weight is not a number of 0 or more"),
    ({"loss_mask": 0.5}, "messages[1].loss_mask is neither 0 nor 1"),
    ({"loss_scale": 1e7}, "messages[1].loss_scale is 10000000.0, not 0 or a number from 0.001"),
    ({"train": 1}, "messages[1].train is neither false nor true"),
    ({"train": True, "weight": 0}, "messages[1]: weight and train contradict each other"),
    ({"train": False}, "no assistant turn is a target"),
    ({"tool_calls": {"name": "f"}}, "messages[1].tool_calls is an object, not a list"),
    ({"tool_calls": [1]}, "messages[1].tool_calls[0] is not a function call"),
    ({"tool_calls": [{"name": "f", "arguments": {}}]}, "messages[1].tool_calls[0] is not a function call"),
    ({"tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0] is not a function call"),
    ({"tool_calls": [{"function": {"arguments": {}}}]}, "messages[1].tool_calls[0].name is null"),
    ({"tool_calls": [{**CALL, "id": 3}]}, "messages[1].tool_calls[0].id is a number"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "[0].arguments is a list, not an object"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}, "[0].arguments: not valid JSON: NaN"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "a": 1}'}}]}, "'a' appears twice"),
])  # fmt: skip
def test_turns_that_are_not_understood(turn, reason):
    assert reason in said(**turn)


def test_keys_that_a_turn_must_have():
    assert why(messages=[ASK, {"content": "a"}]) == "messages[1] has no 'role'"
    assert why(messages=[ASK, {"role": "assistant"}]) == "messages[1] has no 'content'"
    assert why(conversations=[{"from": "human"}]) == "conversations[0] has no 'value'"
    assert why(conversations=[{"value": "a"}]) == "conversations[0] has no 'role'"
    assert "not one of system, developer, user" in why(conversations=[{"from": "narrator", "value": "a"}])
    assert "has both 'from' and 'role'" in why(conversations=[{"from": "human", "role": "user", "value": "a"}])
    assert row(messages=[{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]) == Chat((U, A))
    for turn in ({**ASK, "tool_calls": [CALL]}, {**ASK, "reasoning": "hm"}, {**ASK, "tool_call_id": "1"}):
        assert "messages[0], of the role 'user', has" in why(messages=[turn, ANSWER])
    assert "messages[0].train: a user turn is never a target" in why(messages=[{**ASK, "train": True}, ANSWER])


def test_parts_of_a_content_are_joined():
    parts = [{"type": "text", "text": "an"}, {"type": "text", "text": "swer", "annotations": []}]
    assert row(messages=[ASK, {"role": "assistant", "content": parts}]) == Chat((U, A))


def test_turns_that_are_context_only():
    turns = [ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "weight": 1.0, "train": True}, {**ASK, "weight": 0}, ANSWER]
    assert [turn.learnt for turn in row(messages=turns).messages] == [True, False, True, True, False, True]
    last = {"prompt": [ASK, ANSWER, ASK], "completion": [{**ANSWER, "train": False}]}
    assert "no assistant turn is a target" in why(**last)


def test_empty_keys_are_no_keys():
    more = {"tool_calls": [], "tool_call_id": "", "reasoning_content": None, "name": "", "images": [], "weight": None}
    assert row(messages=[{**ASK, **more}, {**ANSWER, **more}], images=[], history=[], tools=[]) == Chat((U, A))


def test_tools_calls_and_reasoning_arrive_in_one_shape():
    text_call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}', "strict": None}}
    turns = [
        ASK, {"role": "assistant", "tool_calls": [text_call], "thinking": "hm"},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {"function": {"name": "now"}}]}, ANSWER,
    ]  # fmt: skip
    for tools in ([TOOL, {"name": "now"}], json.dumps([TOOL, {"name": "now"}])):
        found = row(messages=turns, tools=tools)
        assert found.tools == (TOOL, {"name": "now"})
    first = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    now = {"type": "function", "function": {"name": "now", "arguments": {}}}
    assert found.messages[1:4] == (
        Message("assistant", "", reasoning="hm", calls=(first,)),
        Message("tool", "", name="add", call_id="c1"),
        Message("assistant", "", calls=(CALL, now)),
    )
    shown = found.messages[1].shown()
    assert shown["tool_calls"] == [first] and shown["reasoning_content"] == shown["thinking"] == "hm"
    assert found.messages[2].shown() == {"role": "tool", "content": "", "name": "add", "tool_call_id": "c1"}
    assert U.shown() == ASK


@pytest.mark.parametrize(("tools", "reason"), [
    (7, "tools is a number, not a list"), ({"name": "f"}, "tools is an object, not a list"),
    ("{", "tools: not valid JSON"), ('{"name": "f"}', "tools is an object, not a list"),
    (["f"], "tools[0] is not an object with a function name"),
    ([TOOL, {"type": "function", "function": {}}], "tools[1] is not an object with a function name"),
])  # fmt: skip
def test_tools_that_are_not_understood(tools, reason):
    assert reason in why(messages=[ASK, ANSWER], tools=tools)
    assert reason in why(prompt=[ASK], completion=[ANSWER], tools=tools)


def test_sharegpts_calls():
    turns = [
        {"from": "human", "value": "ask"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "function_call", "value": '[{"name": "add", "arguments": "{\\"a\\": 1}"}]', "weight": 0},
        {"from": "tool", "value": "2"}, {"from": "gpt", "value": "answer"},
    ]  # fmt: skip
    found = row(conversations=turns, tools=json.dumps([TOOL]))
    call = Message("assistant", "", calls=(CALL,))
    unlearnt = Message("assistant", "", calls=(CALL,), weight=0)
    assert found == Chat((U, call, Message("tool", "2"), unlearnt, Message("tool", "2"), A), (TOOL,))
    turns[1] = {"from": "function_call", "value": "add(1)"}
    assert "conversations[1].value: not valid JSON" in why(conversations=turns)
    turns[1] = {"from": "function_call", "value": "7"}
    assert "conversations[1].value[0] is not a function call" in why(conversations=turns)


# --- what a person reads


def test_the_text_of_a_row():
    turns = [
        ASK, {"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"}, {"role": "tool", "content": "2"}, ANSWER,
    ]  # fmt: skip
    assert row_text(row(text="a")) == "a"
    assert row_text(row(messages=turns)) == 'ask\nhm\n{"name": "add", "arguments": {"a": 1}}\n2\nanswer'
    assert row_text(row(prompt="a ", completion="b")) == "a b"
    assert row_text(row(prompt="a ", chosen="b", rejected="c")) == "a b\nc"
    assert (
        row_text(row(prompt="ask", chosen=[ANSWER], rejected=[{**ANSWER, "content": "worse"}])) == "ask\nanswer\nworse"
    )


@pytest.mark.parametrize("given", ["", " ", "\n", None, "{}", {}])
def test_a_call_without_parameters(given):
    call = {"type": "function", "function": {"name": "now", "arguments": given}}
    row = {"messages": [{"role": "user", "content": "Now?"}, {"role": "assistant", "tool_calls": [call]}]}
    found = parse_row(RowLocation(Path("f"), 1), row)
    assert found.messages[1].calls[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(("columns", "line"), [
    ("{prompt: Customer Message, completion: reply}", "{Customer Message: prompt}"), ("{text: body}", "{body: text}"),
    ("{ignore: note}", "{note: ignore}"), ("{question: answer}", None),
])  # fmt: skip
def test_columns_the_wrong_way_round(columns, line):
    text = f"model: tiny\nobjective: sft\noutput: o\ndata: {{path: x, columns: {columns}}}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "x.yaml")
    assert (f"write the row's key first: `data.columns: {line}`" in caught.value.do) == (line is not None)
