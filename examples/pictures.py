"""Writes a small base of images and text with random weights, and pictures of shapes with a caption each.

usage: pictures.py FOLDER

FOLDER/base is a Qwen3-VL of 0.4 million parameters in the Hugging Face layout, FOLDER/captions.csv names the pictures,
and FOLDER/rows.jsonl has the rows that `optrush train` reads.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

PICTURES = 400
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>",
         "<|video_pad|>")  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_base(folder: Path) -> None:
    """Write the base: a tokenizer of bytes, an image processor, a tower of 2 blocks and a decoder of 4."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig

    ids = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKS])}
    engine = Tokenizer(models.BPE(ids, []))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(MARKS), chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": 264, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope_parameters": rope,
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": None,
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96, "patch_size": 8,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():  # so that a frozen tower of random weights tells pictures apart
            if "visual" in name and p.ndim > 1:
                p.normal_(0, p[0].numel() ** -0.5)
    model.save_pretrained(folder)


def write_pictures(folder: Path, n: int) -> None:
    """Draw n pictures of 64 x 64, and list each with its caption in captions.csv."""
    from PIL import Image, ImageDraw

    rng = random.Random(0)
    (folder / "pictures").mkdir()
    rows = []
    for i in range(n):
        colour, shape = rng.choice([*COLOURS]), rng.choice(["circle", "square"])
        left, top, side = rng.randrange(20), rng.randrange(20), rng.randrange(28, 44)
        picture = Image.new("RGB", (64, 64), (110, 110, 110))
        pen = ImageDraw.Draw(picture)
        (pen.ellipse if shape == "circle" else pen.rectangle)((left, top, left + side, top + side), COLOURS[colour])
        picture.save(folder / "pictures" / f"{i}.png")
        rows.append((f"pictures/{i}.png", f"A {colour} {shape}."))
    with open(folder / "captions.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])


def write_rows(folder: Path) -> None:
    """Write rows.jsonl from captions.csv; paths of pictures are relative to it."""
    with open(folder / "captions.csv", newline="") as table, open(folder / "rows.jsonl", "w") as file:
        for line in csv.DictReader(table):
            asked = [{"type": "image", "image": line["image"]}, {"type": "text", "text": "What is it?"}]
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": line["caption"]}]
            file.write(json.dumps({"messages": turns}) + "\n")


def main(folder: Path, pictures: int = PICTURES) -> None:
    folder.mkdir(parents=True)
    write_base(folder / "base")
    write_pictures(folder, pictures)
    write_rows(folder)
    print(f"{pictures} pictures and rows.jsonl in {folder}, a base in {folder / 'base'}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
