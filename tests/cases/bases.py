"""Tiny random models in the layout that transformers 4 writes, and the command line in this process."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from hostile import called

logging.disable_progress_bar()
BOS, EOS, UNK = "<s>", "</s>", "<unk>"
LONGROPE = {
    "type": "longrope", "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]
}  # fmt: skip
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# model_type, keys of config.json, the tokenizer's class, further files.
KINDS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "llama": ({"model_type": "llama"}, "PreTrainedTokenizerFast", ()),
    "llama-pieces": ({"model_type": "llama"}, "LlamaTokenizer", ("tokenizer.model",)),
    "mistral": ({"model_type": "mistral", "sliding_window": None}, "LlamaTokenizerFast", ("tokenizer.model",)),
    "qwen2": ({
        "model_type": "qwen2", "tie_word_embeddings": True,
    }, "Qwen2Tokenizer", ("vocab.json", "merges.txt", "added_tokens.json")),
    "gpt_neox": ({"model_type": "gpt_neox"}, "GPTNeoXTokenizerFast", ()),
    "gpt2": ({
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
    }, "GPT2Tokenizer", ("vocab.json", "merges.txt")),
    "phi3": ({
        "model_type": "phi3", "pad_token_id": 2, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE,
    }, "LlamaTokenizerFast", ("tokenizer.model", "added_tokens.json")),
    "gemma2": ({
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "pad_token_id": 0,
    }, "GemmaTokenizerFast", ("tokenizer.model",)),
    "gemma4_text": ({
        "model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 64,
        "pad_token_id": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300,
    }, "GemmaTokenizerFast", ("tokenizer.model",)),
}  # fmt: skip


def write_base(folder: Path, kind: str, **config: Any) -> Path:
    """Write a model; `config`: further keys of config.json, None removes one."""
    folder.mkdir(parents=True)
    own, tokenizer, files = KINDS[kind]
    engine = write_tokenizer(folder, tokenizer, files)
    keys = {**SIZES, **own, "rope_theta": 5000.0, "torch_dtype": "float32", "transformers_version": "4.44.2"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = AutoConfig.for_model(**json.loads(json.dumps(keys)))
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        for name, p in model.named_parameters():
            p.data = torch.randn(p.shape) * 0.1 + (1.0 if "norm" in name and kind != "gemma2" else 0.0)
    model.save_pretrained(folder)
    if kind == "gpt2":  # the published file has no prefix
        stored = load_file(folder / "model.safetensors")
        named = {name.removeprefix("transformer."): t for name, t in stored.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    keys = {"architectures": [type(model).__name__], **keys, **config}
    kept = {key: value for key, value in keys.items() if value is not None or key in own}
    (folder / "config.json").write_text(json.dumps(kept, indent=1))  # not the layout that is written here
    ends = {"_from_model_config": True, "eos_token_id": 2, "bos_token_id": 1, "transformers_version": "4.44.2"}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    assert engine.get_vocab_size() <= SIZES["vocab_size"]
    return folder


def write_tokenizer(folder: Path, kind: str, files: tuple[str, ...]) -> Tokenizer:
    """Write a byte-level BPE as an earlier transformers does; tokenizer.model is bytes that nothing here reads."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=[UNK, BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    engine.train_from_iterator(["The town of Oslo is a mile from the sea."] * 3, trainer)
    engine.save(str(folder / "tokenizer.json"), pretty=False)
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {str(i): {"content": t, **token, "special": True} for i, t in enumerate((UNK, BOS, EOS))}
    settings = {
        "added_tokens_decoder": decoder, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "tokenizer_class": kind,
        "clean_up_tokenization_spaces": False, "model_max_length": 256, "legacy": True,
    }  # fmt: skip
    special = {name: {"content": settings[name], **token} for name in ("bos_token", "eos_token", "unk_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1))
    if "vocab.json" in files:
        engine.model.save(str(folder))
    if "added_tokens.json" in files:
        (folder / "added_tokens.json").write_text(json.dumps({EOS: 2}))
    if "tokenizer.model" in files:
        (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    return engine


def optrush(*arguments):
    """`optrush ARGUMENTS` in this process."""
    return called(*map(str, arguments))


def write_run(folder: Path, base: Path | str, rows: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Write a run of two steps on a model; `changes`: keys of the configuration, sections are extended."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [{"text": f"The town of Oslo is {i} miles from the sea."} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or texts))
    run: dict[str, Any] = {
        "model": {"path": str(base)}, "objective": "pretrain", "data": {"path": str(folder / "rows.jsonl")},
        "batch": {"seq": 64, "tokens": 128}, "optim": {"lr": 1e-2}, "train": {"steps": 2, "log_every": 1},
        "output": str(folder / "out"), "with": {"packing": {}},
    }  # fmt: skip
    for key, value in changes.items():
        key = "with" if key == "with_" else key
        run[key] = {**run[key], **value} if isinstance(value, dict) and key in run and key != "with" else value
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def trained(folder: Path, base: Path | str, **changes: Any) -> Path:
    """Train a run and return its folder."""
    ended = optrush("train", write_run(folder, base, **changes))
    assert ended.code == 0, ended.err
    return folder / "out"


def edited(base: Path, folder: Path, **config: Any) -> Path:
    """Copy a model and change keys of its config.json; None removes one."""
    shutil.copytree(base, folder)
    keys = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))
    return folder
