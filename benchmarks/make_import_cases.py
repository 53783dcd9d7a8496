"""Record what axolotl's and LLaMA-Factory's own code make of rows: tokens, and which of them are learnt.

    python benchmarks/make_import_cases.py AXOLOTL LLAMA_FACTORY    # folders of their sources; writes the cases

Their code runs as it is, with the tokenizer of the built-in tiny model. Rows, flags and results are the data of
test_import_cases.py. torchaudio, which LLaMA-Factory imports for sounds, is replaced by an empty module.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from optrush.models import tiny

OUT = Path(__file__).parents[1] / "tests/parity/import_cases.json"
TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "How much salt?"},
    {"role": "assistant", "content": "a spoon"},
    {"role": "user", "content": "Oil?"},
    {"role": "assistant", "content": "two"},
]
MESSAGES = [{"messages": TALK}]
SHAREGPT = [{"conversations": [
    {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in TALK
]}]  # fmt: skip
ALPACA = [
    {"instruction": "How much salt?", "input": "", "output": "a spoon"},
    {"instruction": "How much oil?", "input": "in a soup", "output": "two"},
]
END = {"eot_tokens": [tiny.END]}
SHARE = {
    "field_messages": "conversations",
    "message_property_mappings": {"role": "from", "content": "value"},
}
OPENAI = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system",
}  # fmt: skip


def marked(*flags: bool) -> list[dict[str, Any]]:
    """The conversation with a flag at each of its last turns."""
    turns = TALK[-len(flags) :]
    return [{"messages": [*TALK[: -len(flags)], *({**m, "train": f} for m, f in zip(turns, flags, strict=True))]}]


def axolotl_case(
    name: str, rows: list[dict[str, Any]], kind: str = "chat_template", top: dict[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    top = {"train_on_inputs": False, **(END if kind == "chat_template" else {}), **(top or {})}
    return {"tool": "axolotl", "name": name, "rows": rows, "config": top, "dataset": {"type": kind, **own}}


def factory_case(
    name: str, rows: list[dict[str, Any]], flags: dict[str, Any] | None = None, **info: Any
) -> dict[str, Any]:
    return {"tool": "llama-factory", "name": name, "rows": rows, "config": flags or {}, "dataset": info}


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
CASES = [
    axolotl_case("chat", MESSAGES),
    axolotl_case("chat-inputs", MESSAGES, top={"train_on_inputs": True}),
    axolotl_case("chat-sharegpt", SHAREGPT, **SHARE),
    axolotl_case("chat-no-system", MESSAGES, drop_system_message=True),
    *(axolotl_case(f"chat-eos-{value}", MESSAGES, train_on_eos=value) for value in ("turn", "last", "all", "none")),
    *(axolotl_case(f"chat-eot-{value}", MESSAGES, train_on_eot=value) for value in ("turn", "last", "all", "none")),
    axolotl_case("chat-no-eot", MESSAGES, top={"eot_tokens": None}),
    axolotl_case("chat-roles", MESSAGES, roles_to_train=["assistant"]),
    axolotl_case("chat-roles-user", MESSAGES, roles_to_train=["assistant", "user"]),
    axolotl_case("chat-roles-none", MESSAGES, roles_to_train=[]),
    axolotl_case("chat-marked", marked(False, True), message_field_training="train"),
    axolotl_case("chat-marked-first", marked(True, False, False), message_field_training="train"),
    axolotl_case("chat-marked-unnamed", marked(False, False, True)),
    axolotl_case("chat-marked-user", marked(False, True, True), message_field_training="train"),
    axolotl_case("alpaca", ALPACA, "alpaca"),
    axolotl_case("alpaca-inputs", ALPACA, "alpaca", {"train_on_inputs": True}),
    axolotl_case("qa", [{"question": "How much salt?", "answer": "a spoon"}], "alpaca_chat.load_qa"),
    axolotl_case("completion", [{"text": "salt and pepper"}], "completion"),
    axolotl_case("completion-field", [{"body": "salt and pepper"}], "completion", field="body"),
    factory_case("alpaca", ALPACA),
    factory_case("alpaca-columns", ALPACA, columns=COLUMNS),
    factory_case("alpaca-no-query", ALPACA, columns={"prompt": "instruction", "response": "output"}),
    factory_case("alpaca-prompt", ALPACA, {"train_on_prompt": True}),
    factory_case(
        "alpaca-system", [{**ALPACA[0], "system": "be short"}], columns={**COLUMNS, "system": "system"}
    ),
    factory_case("alpaca-system-unnamed", [{**ALPACA[0], "system": "be short"}]),
    factory_case(
        "alpaca-history", [{**ALPACA[1], "history": [["How much salt?", "a spoon"]]}],
        columns={**COLUMNS, "history": "history"},
    ),
    factory_case("sharegpt", SHAREGPT, formatting="sharegpt"),
    factory_case("sharegpt-history", SHAREGPT, {"mask_history": True}, formatting="sharegpt"),
    factory_case("sharegpt-prompt", SHAREGPT, {"train_on_prompt": True}, formatting="sharegpt"),
    factory_case("openai", MESSAGES, formatting="sharegpt", columns={"messages": "messages"}, tags=OPENAI),
    factory_case(
        "own-tags",
        [{"talk": [{"who": {"user": "cook", "assistant": "bot"}.get(m["role"]), "says": m["content"]}
                   for m in TALK[1:]]}],
        {"mask_history": True}, formatting="sharegpt", columns={"messages": "talk"},
        tags={"role_tag": "who", "content_tag": "says", "user_tag": "cook", "assistant_tag": "bot"},
    ),
]  # fmt: skip


def axolotl_rows(case: dict[str, Any], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each row by axolotl's prompt strategies."""
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"sequence_len": 512, "chat_template": "tokenizer_default", **case["config"]})
    own = dict(case["dataset"])
    kind = own.pop("type")
    if kind == "alpaca":  # that one has no module of its own
        inputs = bool(cfg.train_on_inputs)
        strategy = AlpacaPromptTokenizingStrategy(AlpacaPrompter("instruct"), tokenizer, inputs, cfg.sequence_len)
    else:
        strategy = load(kind, tokenizer, cfg, DictDefault(own) if own else {})
    found = []
    for row in case["rows"]:
        batch = {key: [value] for key, value in row.items()}
        made = strategy.tokenize_prompt(batch if kind == "completion" else row)
        several = bool(made["input_ids"]) and isinstance(made["input_ids"][0], list)
        pairs = zip(made["input_ids"], made["labels"], strict=True)
        found += list(pairs) if several else [(made["input_ids"], made["labels"])]
    return found


def factory_rows(case: dict[str, Any], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each row by LLaMA-Factory's converters, its template chatml and its processor."""
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer

    flags = {"mask_history": False, "train_on_prompt": False, **case["config"]}
    args: Any = SimpleNamespace(
        template="chatml", cutoff_len=512, tool_format=None, default_system=None, media_dir="", enable_thinking=None,
        preserve_thinking=False, **flags,
    )  # fmt: skip
    attr = DatasetAttr("file", "rows")
    attr.join(case["dataset"])
    template = get_template_and_fix_tokenizer(tokenizer, args)
    convert = get_dataset_converter(attr.formatting, attr, args)
    made = [convert(row) for row in case["rows"]]
    processor = SupervisedDatasetProcessor(template=template, tokenizer=tokenizer, processor=None, data_args=args)
    found = processor.preprocess_dataset({key: [one[key] for one in made] for key in made[0]})
    return list(zip(found["input_ids"], found["labels"], strict=True))


def version(folder: Path, name: str) -> str:
    """Return the version that the sources name, and their commit where they are a checkout."""
    place = {"axolotl": "VERSION", "llama-factory": "src/llamafactory/extras/env.py"}[name]
    text = (folder / place).read_text()
    named = text.strip() if name == "axolotl" else text.split('VERSION = "')[1].split('"')[0]
    commit = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return f"{named}, {commit.stdout.strip() or folder.name}"


def main() -> None:
    folders = {"axolotl": Path(sys.argv[1]), "llama-factory": Path(sys.argv[2])}
    sys.path[:0] = [str(folder / "src") for folder in folders.values()]
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    with tempfile.TemporaryDirectory() as place:
        tiny.write_tiny(Path(place))
        for case in CASES:
            tokenizer = AutoTokenizer.from_pretrained(place)
            rows = (axolotl_rows if case["tool"] == "axolotl" else factory_rows)(case, tokenizer)
            case["made"] = [
                {"tokens": list(ids), "learnt": [i for i, label in enumerate(labels) if i and label != -100]}
                for ids, labels in rows
            ]
    made_from = {name: version(folder, name) for name, folder in folders.items()}
    cases = ",\n".join(json.dumps(case) for case in CASES)
    OUT.write_text(f'{{"made_from": {json.dumps(made_from)}, "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()
