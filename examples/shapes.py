"""Writes pictures of coloured shapes, questions about them and a small base with a tower; and scores what was trained.

usage: shapes.py FOLDER                 rows.jsonl, held-out.jsonl and base/, all made from a seed
       shapes.py FOLDER --score MODEL   the share of held-out questions that a trained model answers word for word
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TRAINED, HELD_OUT, SIDE, PATCH = 3000, 300, 32, 4  # rows; pixels of a picture and of a patch
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {"what is this ?": "a {colour} {shape}", "which colour ?": "{colour}", "which shape ?": "a {shape}"}
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def draw(colour: str, shape: str, chance: random.Random) -> Any:
    """Return a picture of one shape, of any size and place, on grey."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), (chance.randrange(90, 130),) * 3)
    side = chance.randrange(SIDE * 3 // 4, SIDE - 1)
    left, top = (chance.randrange(SIDE - side) for _ in range(2))
    box, pen = (left, top, left + side, top + side), ImageDraw.Draw(image)
    if shape == "triangle":
        pen.polygon([(left, top + side), (left + side // 2, top), (left + side, top + side)], COLOURS[colour])
    else:
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, COLOURS[colour])
    return image


def write_rows(folder: Path, name: str, count: int, seed: int, drawn: set[bytes]) -> None:
    """Write questions about pictures, of which none was drawn before."""
    chance, rows = random.Random(seed), list[str]()
    (folder / name).mkdir(exist_ok=True)
    while (n := len(rows)) < count:
        colour, shape, asked = chance.choice(list(COLOURS)), chance.choice(SHAPES), chance.choice(list(QUESTIONS))
        image = draw(colour, shape, chance)
        if image.tobytes() in drawn:
            continue
        drawn.add(image.tobytes())
        image.save(folder / name / f"{n}.png")
        part = {"type": "image", "image": f"{name}/{n}.png"}
        user = {"role": "user", "content": [part, {"type": "text", "text": asked}]}
        answer = {"role": "assistant", "content": QUESTIONS[asked].format(colour=colour, shape=shape)}
        rows.append(json.dumps({"messages": [user, answer]}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(rows))


def write_base(folder: Path) -> None:
    """Write a base of Qwen3-VL's kind with random weights; a token is a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig

    ids = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKS])}
    engine = Tokenizer(models.BPE(ids, []))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE,
        additional_special_tokens=list(MARKS),
    ).save_pretrained(folder)  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    text = {
        "vocab_size": len(ids), "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 24,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": None,
        "rope_parameters": {
            "mrope_section": [4, 4, 4], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 10000.0,
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 96, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96,
        "patch_size": PATCH, "num_position_embeddings": (SIDE // PATCH) ** 2, "deepstack_visual_indexes": [],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"], tie_word_embeddings=False,
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for p in model.parameters():  # as suits narrow layers; and the tower, which stays as it is, must tell patches apart
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p[0].numel() ** -0.5)
    model.save_pretrained(folder)


def score(folder: Path, trained: Path) -> float:
    """Return the share of held-out questions whose greedy answer is right word for word."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    tokenizer, seer = AutoTokenizer.from_pretrained(trained), AutoImageProcessor.from_pretrained(trained)
    model = AutoModelForImageTextToText.from_pretrained(trained, dtype=torch.float32).eval()
    right, places = 0, (SIDE // PATCH // 2) ** 2
    rows = [json.loads(line)["messages"] for line in (folder / "held-out.jsonl").read_text().splitlines()]
    for asked in QUESTIONS:  # of one question all prompts are as long
        group = [(user, answer) for user, answer in rows if user["content"][1]["text"] == asked]
        if not group:
            continue
        images = [Image.open(folder / user["content"][0]["image"]) for user, _ in group]
        text = tokenizer.apply_chat_template([group[0][0]], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * places), return_tensors="pt")["input_ids"]
        ids = ids.repeat(len(group), 1)
        made = model.generate(
            ids, **seer(images=images, return_tensors="pt"), max_new_tokens=24, do_sample=False,
            mm_token_type_ids=(ids == model.config.image_token_id).int(), eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        answers = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
        right += sum(made == answer["content"] for made, (_, answer) in zip(answers, group, strict=True))
    return right / len(rows)


def main() -> int:
    match sys.argv[1:]:
        case [folder] if not folder.startswith("-"):
            at = Path(folder)
            at.mkdir(exist_ok=True)
            drawn = set[bytes]()
            write_rows(at, "rows", TRAINED, 0, drawn)
            write_rows(at, "held-out", HELD_OUT, 1, drawn)
            write_base(at / "base")
            print(f"{TRAINED} rows, {HELD_OUT} held out, and a base in {at}")
            return 0
        case [folder, "--score", trained]:
            print(f"{score(Path(folder), Path(trained)):.1%} of the held-out answers are right")
            return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
