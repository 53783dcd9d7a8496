"""Tiny random bases of images and text as their makers publish them, and rows about pictures that Pillow draws."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
SHAPES = ("circle", "square")
MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What templates write for an image, where others than Qwen's do.
WRITTEN = {"gemma3": "<|vision_start|>", **dict.fromkeys(("gemma4", "llava", "pixtral", "mistral3"), "<|image_pad|>")}
PATCH, VOCABULARY = 4, 264
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}, **NORMAL}
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}, **NORMAL},
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": PATCH, "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    "llava": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 26},
        "crop_size": {"height": 26, "width": 26}, **NORMAL,
    },
    "pixtral": PIXTRAL, "mistral3": PIXTRAL,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 258,
    "pad_token_id": None,
}  # fmt: skip
TOWER = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": PATCH,
}  # fmt: skip
TURNS = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 1000.0}
RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "rope_parameters": {**TURNS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}  # fmt: skip
SEEN = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": PATCH,
}  # fmt: skip
EYE = {**SEEN, "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 8, "image_size": 64}
KINDS = ("sliding_attention", "full_attention")
GEMMA: dict[str, Any] = {"sliding_window": 24, "query_pre_attn_scalar": 16}
BASES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {
            "head_dim": 8,
            "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1000.0},
        },
        "vision_config": {"fullatt_block_indexes": [1], "window_size": 16},
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": TURNS},
        "vision_config": {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16},
    },
    "qwen3_5": {"text_config": RULE, "vision_config": {"num_position_embeddings": 16}},
    "qwen3_5_moe": {
        "text_config": {
            **RULE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 8,
        },
        "vision_config": {"num_position_embeddings": 16},
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **GEMMA, "layer_types": [*KINDS, KINDS[0]]},
        "mm_tokens_per_image": 16,
        "vision_config": {**SEEN, "model_type": "siglip_vision_model", "image_size": 32, "vision_use_head": False},
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text", **GEMMA, "layer_types": [*KINDS, KINDS[1]],
            "pad_token_id": 256, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY, "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **SEEN, "model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": None,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {**SEEN, "model_type": "clip_vision_model", "image_size": 26},  # 6 patches and 2 pixels
    },
    "pixtral": {
        "text_config": {"model_type": "mistral"}, "vision_config": EYE, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {"text_config": {"model_type": "mistral", "sliding_window": None}, "vision_config": EYE},
}  # fmt: skip
NAMES = {"pixtral": "llava"}  # of bases whose names here are others


def write_base(folder: Path, kind: str) -> Any:
    """Write a base with every parameter drawn, and return transformers' own model of it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKS])}
    engine = Tokenizer(models.BPE(ids, []))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(MARKS),
        chat_template=TEMPLATE.replace("IMAGE", WRITTEN.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")),
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS.get(kind, PROCESSOR)))
    given = copy.deepcopy(BASES[kind])
    given["text_config"] = {**TEXT, **given["text_config"]}
    begin, place, end = (ids[token] for token in MARKS[3:6])
    if kind in WRITTEN:
        tied = kind.startswith("gemma")
        given |= {"tie_word_embeddings": tied, "image_token_id" if kind == "gemma4" else "image_token_index": place}
        if tied:
            suffix = "index" if kind == "gemma3" else "id"
            given |= {f"boi_token_{suffix}": begin, f"eoi_token_{suffix}": end}
        else:
            given["text_config"]["tie_word_embeddings"] = False
        named = {"image_break_token": MARKS[3], "image_end_token": MARKS[5]} if PROCESSORS[kind] is PIXTRAL else {}
        (folder / "processor_config.json").write_text(json.dumps(named))
    else:
        given["vision_config"] = {**TOWER, **given["vision_config"]}
        given |= {
            "image_token_id": place, "video_token_id": ids["<|video_pad|>"], "vision_start_token_id": begin,
            "vision_end_token_id": end, "tie_word_embeddings": False,
        }  # fmt: skip
    torch.manual_seed(0)  # small weights where what rounds otherwise in transformers grows from block to block
    model = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[NAMES.get(kind, kind)](**given), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            small = {"gemma4": 0.03}.get(kind, 0.05 if kind.startswith("qwen3_5") else 0.2)
            p.copy_(noise * small if p.ndim > 1 else p + noise * 0.2)
    model.save_pretrained(folder)
    return model


def draw(shape: str, colour: str, width: int, height: int, seed: int) -> Image.Image:
    """Return a picture of one shape on a noisy grey ground."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(90, 130, (height, width, 3), np.uint8))
    side = min(width, height) * 2 // 3
    left, top = (int(rng.integers(0, n - side + 1)) for n in (width, height))
    pen = ImageDraw.Draw(image)
    (pen.ellipse if shape == "circle" else pen.rectangle)((left, top, left + side, top + side), COLOURS[colour])
    return image


def write_rows(folder: Path, n: int, most: int = 1, sizes: tuple[tuple[int, int], ...] = ((32, 32), (40, 24))) -> Path:
    """Write n questions about pictures, each about 1 to `most` of them, and return the file of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(n):
        parts: list[Any] = []
        said = []
        for k in range(1 + i % most):
            j = i * most + k
            shape, colour = SHAPES[j % 2], list(COLOURS)[j // 2 % len(COLOURS)]
            draw(shape, colour, *sizes[j % len(sizes)], seed=j).save(folder / f"{j}.png")
            parts.append({"type": "image", "image": f"{j}.png"})
            said.append(f"a {colour} {shape}")
        parts.append({"type": "text", "text": "what is this ?"})
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": " and ".join(said)}]
        rows.append({"messages": turns})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
