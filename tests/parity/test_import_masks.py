"""Rows under an imported configuration of TRL: tokens and targets are those that its own trainer makes of them."""

import json
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from optrush.cli.import_config import translate
from optrush.data.batch import IGNORE
from optrush.decide import decide
from optrush.models import tiny
from optrush.trainer.build import build

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "salt and pepper"}], "completions": [{"prompt": "How much?", "completion": " a spoon"}],
    "answered": [{"prompt": [
        {"role": "user", "content": "How much salt?"}
    ], "completion": [{"role": "assistant", "content": "a spoon"}]}],
    "chats": [{"messages": [
        {"role": "system", "content": "be short"}, {"role": "user", "content": "How much salt?"},
        {"role": "assistant", "content": "a spoon"}, {"role": "user", "content": "Oil?"},
        {"role": "assistant", "content": "two"},
    ]}],
}  # fmt: skip
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks") / "model"
    tiny.write_tiny(folder, family="llama")
    return folder


def theirs(model, rows, flags, output):
    """Tokens of each row, and the places of those that are learnt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if flags.get("assistant_only_loss"):
        tokenizer.chat_template = MARKED
    args = SFTConfig(str(output), max_length=64, bf16=False, use_cpu=True, report_to=[], **flags)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model), args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    made = [(row["input_ids"], row.get("labels", row["input_ids"])) for row in trainer.train_dataset]
    return [(ids, {i for i, label in enumerate(labels) if i and label != -100}) for ids, labels in made]


def ours(model, rows, flags, folder):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = {"model_name_or_path": str(model), "dataset_name": str(path), "output_dir": str(folder / "run")}
    given |= {
        "max_length": 64, "per_device_train_batch_size": 1, "bf16": False, "gradient_checkpointing": False,
    } | flags  # fmt: skip
    (folder / "sft.json").write_text(json.dumps(given))
    config = translate(folder / "sft.json", tool="trl-sft").config
    found = []
    for batch in build(decide(config), training=False, data=str(path)).evaluation or ():
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist()):
            length = 2 + max(i for i, label in enumerate(labels) if label != IGNORE)
            found.append((tokens[:length], {i + 1 for i, label in enumerate(labels) if label != IGNORE}))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # theirs
@pytest.mark.parametrize(("kind", "flags"), [*((kind, {}) for kind in ROWS), *(
    (kind, {"completion_only_loss": False}) for kind in ("completions", "answered")
), ("chats", {"assistant_only_loss": True}), ("completions", {"assistant_only_loss": False})], ids=str)  # fmt: skip
def test_what_is_learnt_is_what_trl_learns(model, tmp_path, kind, flags):
    """But for the line break after an answer's end, which no answer of ours has."""
    found = sorted(ours(model, ROWS[kind], flags, tmp_path))
    want = sorted(theirs(model, ROWS[kind], flags, tmp_path / "trl"))
    assert len(found) == len(want)
    for (tokens, learnt), (ids, targets) in zip(found, want):
        if kind == "answered" and not flags:
            targets -= {len(ids) - 1}
        assert tokens == ids[: len(tokens)] and learnt == {i for i in targets if i < len(tokens)}
        assert len(ids) - len(tokens) <= 1
