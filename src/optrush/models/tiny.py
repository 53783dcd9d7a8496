"""Write a small checkpoint in the layout of a downloaded one: for a first run without a network, and for tests.

The same code reads it as any other folder. Both its tokenizer and its chat template add a begin-of-text token, like in
many large models.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as bars

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 2048  # recipes have fewer distinct words; the model's rows beyond the tokenizer's are padding, as usual
BOS, EOS, PAD, START, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
POSITIONS = 4096


def write_tiny(folder: Path, seed: int = 0, family: str = "llama") -> None:
    """Write config, weights, tokenizer with chat template, and generation config; the same bytes for the same seed."""
    assert family in FAMILIES, f"{family} is none of {FAMILIES}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    model = _model(seed, family, tokenizer)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would appear in the middle of a run's log
    model.save_pretrained(folder)
    bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on 2,000 recipes; its merges are stored next to this file."""
    special = [PAD, BOS, EOS, START, END]
    lines = Path(__file__).with_name("tiny_merges.txt").read_text("utf-8").splitlines()
    merges = [(first, second) for first, _, second in (line.partition(" ") for line in lines)]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    engine = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, special.index(BOS))]
    )
    engine.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=engine, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=TEMPLATE,
        additional_special_tokens=[START, END], clean_up_tokenization_spaces=False, model_max_length=POSITIONS,
    )  # fmt: skip


def _model(seed: int, family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return cast(PreTrainedModel, model)
