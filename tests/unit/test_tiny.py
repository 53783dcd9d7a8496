"""The built-in model is an ordinary checkpoint, the same each time; the recipes are many and the same each time."""

import json
import math
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush.data.readers import read_rows
from optrush.data.sample import conversations, write_sample
from optrush.data.schema import parse_row
from optrush.models import tiny


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_writings_are_the_same_bytes_and_another_seed_changes_the_weights_alone(tmp_path, tiny_folder):
    for name, seed in (("b", 0), ("c", 1)):
        tiny.write_tiny(tmp_path / name, seed)
    a, b, c = (contents(folder) for folder in (tiny_folder, tmp_path / "b", tmp_path / "c"))
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
    configs = {"config.json", "tokenizer_config.json", "generation_config.json"}
    assert set(a) == configs | {"model.safetensors", "tokenizer.json"}
    assert "<|im_start|>" in json.loads(a["tokenizer_config.json"])["chat_template"]


@pytest.mark.parametrize("family", further(list(tiny.FAMILIES), 2))
def test_it_loads_as_any_checkpoint_does(tmp_path, family):
    before = torch.random.get_rng_state()
    tiny.write_tiny(tmp_path, family=family)
    assert torch.equal(torch.random.get_rng_state(), before)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family and 1_900_000 < model.num_parameters() < 4_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = tokenizer("Two eggs.", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id and len(tokenizer) <= model.config.vocab_size
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - math.log(model.config.vocab_size)) < 0.5
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id


def test_its_tokenizer_gives_back_any_text_and_the_template_one_token_a_mark(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    text = "Crème brûlée 🙂 for 4: ½ tsp\n\n  नमस्ते"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    messages = [{"role": "user", "content": "Soup?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["<|bos|>", "<|im_start|>"]
    assert tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_recipes_are_deterministic_many_and_of_many_lengths(tmp_path):
    made = list(conversations(1000, seed=0))
    assert made[:100] == list(conversations(100, seed=0)) == list(islice(conversations(2000, seed=0), 100))
    other = list(conversations(1000, seed=1))
    assert other[:100] != made[:100] and sorted(map(json.dumps, other)) == sorted(map(json.dumps, made))
    texts = {json.dumps(conversation) for conversation in made}
    assert len(texts) == 1000
    lengths = sorted(map(len, texts))
    assert lengths[-1] > 20 * lengths[0]
    turns = {sum(message["role"] == "assistant" for message in conversation) for conversation in made}
    assert turns == {1, 2, 3, 4}
    assert 0.3 < sum(conversation[0]["role"] == "system" for conversation in made) / 1000 < 0.5
    write_sample(tmp_path / "r.jsonl", 100, seed=0)
    rows = [parse_row(where, found) for where, found in read_rows(tmp_path / "r.jsonl")]
    assert [[(m.role, m.content) for m in row.messages] for row in rows] == [
        [(m["role"], m["content"]) for m in conversation] for conversation in islice(made, 100)
    ]
