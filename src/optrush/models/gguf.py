"""Write a Hugging Face folder as one GGUF file, for llama.cpp and tools built on it.

The file has the weights, the vocabulary with its merges, the chat template and the end-of-answer tokens. One tensor is
in memory at a time. Rows of queries and keys are reordered for families whose rotary embedding rotates neighboring
values in GGUF (`gguf_pairs`), but values half a head apart here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open

from optrush.errors import NeedsError, RunError
from optrush.files import read_file, regular
from optrush.models.config_json import read_config_json
from optrush.models.families import FAMILIES, FamilySpec
from optrush.models.shapes import ModelShape
from optrush.models.weights import Folder

Kind = Literal["f32", "f16", "bf16", "q8_0"]
# RoPE types for which GGUF has keys or factor tensors.
ROPE_KINDS = {"default": "", "linear": "", "llama3": "ROPE_FREQS", "longrope": "ROPE_FACTORS_LONG"}
UNROTATED = 4  # in llama.cpp every fourth layer of such a family has no rotary embedding
# GGUF identifies a byte-level tokenizer by the name of its word-splitting rule.
_LLAMA3, _QWEN, _CASES = r"\p{N}{1,3}", r"\p{N}|", r"\p{Lu}"
MOST_ENDS = 3  # end-of-answer tokens: eos, eot, eom
# Tokens whose text alone ends an answer in llama.cpp, without one of these roles.
ENDS_BY_TEXT = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "</s>", "<eos>", "<EOT>", "[EOS]", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}  # fmt: skip


def demand_gguf() -> None:
    """Raise NeedsError without the package that writes the format."""
    if find_spec("gguf") is None:
        raise NeedsError("a GGUF file", "the package gguf is not installed", "python -m pip install 'optrush[gguf]'")


def write_gguf(folder: Path, file: Path, kind: Kind, name: str) -> int:
    """Write a folder's model, tokenizer, template and end-of-answer tokens; return the number of tensors.

    Args:
        folder: config.json, safetensors, tokenizer.json and generation_config.json.
        kind: of the matrices; vectors are float32. q8_0 falls back to f16 for rows that are not a multiple of 32.

    Raises:
        NeedsError: a family or tokenizer that the format does not support, or no package gguf.
        RunError: a tensor differs when read back.
    """
    demand_gguf()
    import gguf

    hf = read_config_json(folder / "config.json")
    family = str(hf.get("model_type"))
    spec, written = FAMILIES.get(family), [name for name, each in FAMILIES.items() if each.gguf]
    if spec is None or not spec.gguf:
        raise NeedsError(f"{family} as GGUF", "not supported", f"one of {', '.join(written)}; else export to hf")
    shape, arch = ModelShape.read(hf), spec.gguf
    _refuse(shape, spec)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]])
    _write_sizes(writer, hf, shape, kind, name)
    _write_tokenizer(writer, folder, shape.vocab)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], shape.layers)
    held = Folder(folder)

    def tensors() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for hf_name in held.files:
            new = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise NeedsError(f"{hf_name} in a GGUF file", f"{arch} has no such tensor", "export to hf")
            with safe_open(regular(folder / held.files[hf_name]), "pt") as opened:
                values = opened.get_tensor(hf_name).to(torch.float32)
            if spec.gguf_pairs and hf_name.split(".")[-2] in ("q_proj", "k_proj"):
                heads = shape.heads if ".q_proj." in hf_name else shape.kv_heads
                values = _reordered(values, heads)
            yield new, values.numpy()
        yield from _rope_factors(shape)

    types: dict[str, gguf.GGMLQuantizationType] = {}
    for new, values in tensors():  # sizes first: they start the file
        types[new] = chosen = _type(values, kind)
        size = gguf.quant_shape_to_byte_shape(values.shape, chosen)
        plain = chosen in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        dtype = np.dtype(np.float16 if chosen == gguf.GGMLQuantizationType.F16 else np.float32 if plain else np.uint8)
        writer.add_tensor_info(new, values.shape if plain else size, dtype, int(np.prod(size)), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for new, values in tensors():
        writer.write_tensor_data(gguf.quants.quantize(values, types[new]))
    writer.close()
    read = {t.name: t for t in gguf.GGUFReader(file).tensors}
    for new, values in tensors():
        if new not in read or not np.array_equal(read[new].data, gguf.quants.quantize(values, types[new])):
            raise RunError(f"{file} is not the trained model: {new} differs after reloading")
    return len(read)


def _type(values: np.ndarray[Any, Any], kind: Kind) -> Any:
    """Return the type of a tensor: float32 for vectors, else the requested kind if its blocks fit a row."""
    import gguf

    if values.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[kind.upper()]


def _reordered(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows (H E, ...) with each head's two halves interleaved."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def _refuse(shape: ModelShape, spec: FamilySpec) -> None:
    """Raise NeedsError for parts of a model that its GGUF architecture lacks."""
    import gguf

    held = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[spec.gguf]]
    kinds = [kind for kind, tensor in ROPE_KINDS.items() if not tensor or gguf.MODEL_TENSOR[tensor] in held]
    if shape.rope.kind not in kinds:
        found = f"not supported; GGUF files of {shape.family} support {', '.join(kinds)}"
        raise NeedsError(f"RoPE type {shape.rope.kind!r} as GGUF", found, "export to hf")
    if not spec.gguf_biases and (shape.qkv_bias or shape.o_bias or shape.mlp_bias):
        raise NeedsError(f"{shape.family} as GGUF", "linears with biases, which the format lacks", "export to hf")
    fourth = tuple(range(UNROTATED - 1, shape.layers, UNROTATED))
    if spec.unrotated != "none" and shape.unrotated != fourth:
        found = f"layers {', '.join(map(str, shape.unrotated)) or 'none'} without rotary embedding"
        raise NeedsError(f"{shape.family} as GGUF", f"{found}, llama.cpp expects every fourth", "export to hf")


def _rope_factors(shape: ModelShape) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors of RoPE frequency divisors, (rotated width / 2,)."""
    r = shape.rope
    if r.kind == "longrope":
        yield "rope_factors_long.weight", np.array(r.long_factor, np.float32)
        yield "rope_factors_short.weight", np.array(r.short_factor, np.float32)
    if r.kind != "llama3":
        return
    dim = shape.head_width
    waves = 2 * np.pi * r.theta ** (torch.arange(0, dim, 2, dtype=torch.float32).numpy() / dim)
    low, high = r.original_max / r.low_freq_factor, r.original_max / r.high_freq_factor
    smooth = (r.original_max / waves - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
    between = 1 / ((1 - smooth) / r.factor + smooth)
    yield "rope_freqs.weight", np.where(waves < high, 1.0, np.where(waves > low, r.factor, between)).astype(np.float32)


def _write_sizes(writer: Any, hf: dict[str, Any], shape: ModelShape, kind: Kind, name: str) -> None:
    """Add a model's name, sizes, RoPE, scales and file type to the writer's metadata."""
    import gguf

    spec = FAMILIES[shape.family]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    positions = int(hf.get("max_position_embeddings") or 2048)
    if shape.window is not None and spec.gguf != "COHERE2":  # GGUF has no window for others: limit the context to it
        positions = min(positions, shape.window)
    writer.add_context_length(positions)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.rotated_width)
    writer.add_rope_freq_base(shape.rope.theta)
    if shape.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope.factor)
    if shape.rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(shape.rope.original_max)
        writer.add_rope_scaling_attn_factors(shape.rope.scale)
    if spec.gguf in ("PHI3", "COHERE2"):
        writer.add_sliding_window(shape.window or 0)  # 0: no window
    if spec.gguf_scales:
        m = shape.multipliers
        writer.add_embedding_scale(m.embedding)
        writer.add_attention_scale(m.scores * shape.head_width**-0.5)
        writer.add_residual_scale(m.residual)
        writer.add_logit_scale(1 / m.logits)
    if spec.norm == "rms":
        writer.add_layer_norm_rms_eps(shape.norm_eps)
    else:
        writer.add_layer_norm_eps(shape.norm_eps)
        writer.add_logit_scale(shape.multipliers.logits)
    writer.add_vocab_size(shape.vocab)
    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[kinds[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    """Write tokens with their types, merges, special tokens, the chat template, and end-of-answer tokens."""
    import gguf

    file, asked = folder / "tokenizer.json", "the tokenizer as GGUF"
    if not file.is_file():
        raise NeedsError(asked, f"no {file.name}", "export to hf, and convert it with llama.cpp's own script")
    engine = json.loads(read_file(file))
    words = engine["model"]
    if words.get("type") != "BPE" or words.get("byte_fallback"):
        found = f"{words.get('type')}{' of sentencepiece' if words.get('byte_fallback') else ''}, not byte-level BPE"
        raise NeedsError(asked, found, "export to hf, and convert it with llama.cpp's own script")
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [gguf.TokenType.UNUSED] * vocabulary
    for text, i in words["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for added in engine.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(engine, asked))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocabulary)
    generation = folder / "generation_config.json"
    held = generation if generation.is_file() else folder / "config.json"  # transformers reads them in this order
    ends = json.loads(read_file(held)).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if ends and special.special_token_ids.get("eos") not in ends:
        special.special_token_ids["eos"] = ends[0]
    others = [i for i in ends if i != special.special_token_ids["eos"]]
    if len(ends) > MOST_ENDS:
        others = [i for i in others if tokens[i] not in ENDS_BY_TEXT]
    if len(others) >= MOST_ENDS:
        found = f"{len(ends)} end-of-answer tokens: {', '.join(tokens[i] for i in ends)}"
        raise NeedsError(asked, found, f"keep {MOST_ENDS} as eos_token_id in the base's generation_config.json")
    for role, i in zip(("eot", "eom"), others):
        special.special_token_ids[role] = i
    special.add_to_gguf(writer, quiet=True)


def _splitting(engine: dict[str, Any], asked: str) -> str:
    """Return the name of a byte-level tokenizer's word-splitting rule."""
    first = engine.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers") or [first]
    patterns = [str((p.get("pattern") or {}).get("Regex", "")) for p in parts if p.get("type") == "Split"]
    if not patterns and any(p.get("type") == "ByteLevel" and p.get("use_regex", True) for p in parts):
        digits = any(p.get("type") == "Digits" and p.get("individual_digits") for p in parts)
        return "smollm" if digits else "gpt-2"
    if len(patterns) == 1 and _LLAMA3 in patterns[0]:
        if _CASES in patterns[0]:
            return "gpt-4o"
        return "llama-bpe" if engine["model"].get("ignore_merges") else "dbrx"  # same rule, but complete words first
    if len(patterns) == 1 and _QWEN in patterns[0]:
        return "qwen2"
    raise NeedsError(asked, f"words split by {patterns or first.get('type')}", "export to hf; convert that")
