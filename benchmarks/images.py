"""Measure rows with images on one GPU: ours packed, rows of text of equal tokens, and transformers with PEFT and Liger.

    python benchmarks/images.py OUT.jsonl [--shape 8b] [--peer] [--text] [--tower] [--repeats 2] [--folder DIR]
    python benchmarks/images.py --table OUT.jsonl

A base of the published shape of Qwen3-VL with random weights in bfloat16 (written once into DIR), pictures of 448 to
1,024 pixels a side as JPEG files, and some 200 tokens of text each. LoRA of rank 16 on all linears of the decoder. Each
case is a process of its own, in turn, and appends a line to OUT at once. Without network; `--shape tiny` on a CPU.

image: rows with images, packed, by a given set; `chosen`: by the set that the plan chooses. text: rows of text with as
many tokens each. peer, peer-recompute: the same rows in batches padded to the longest. tower: the tower alone, on the
images of a micro-batch. Real tokens count, padding does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = {"8b": 151_643, "4b": 151_643, "tiny": 1000}  # ids below the added tokens
ADDED = {
    "<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|vision_start|>": 9, "<|vision_end|>": 10,
    "<|image_pad|>": 12, "<|video_pad|>": 13,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
# config.json of Qwen/Qwen3-VL-8B-Instruct and -4B-Instruct, on huggingface.co.
TEXT = {
    "vocab_size": 151_936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True, "mrope_section": [24, 20, 20],
    },
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {  # text, tower, whether head and embedding are one
    "8b": (
        {**TEXT, "hidden_size": 4096, "intermediate_size": 12_288},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
         "deepstack_visual_indexes": [8, 16, 24]},
        False,
    ),
    "4b": (
        {**TEXT, "hidden_size": 2560, "intermediate_size": 9728},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
         "deepstack_visual_indexes": [5, 11, 17]},
        True,
    ),
    "tiny": (
        {**TEXT, "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [3, 3, 2]}},
        {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
         "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        False,
    ),
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
LORA = {"lora": {"rank": 16, "alpha": 16}}
GIVEN: dict[str, Any] = {
    "attention": {"impl": "varlen"}, "fused-kernels": {"norm": True}, "compile": {}, "fused-loss": {},
    "fused-adamw": {}, "packing": {}, **LORA,
}  # fmt: skip
ON_CPU: dict[str, Any] = {"packing": {}, **LORA}
PEER_ROWS = {"8b": 4, "4b": 8, "tiny": 2}  # of a padded micro-batch
SHARD_BYTES, WARMUP = 4 << 30, 4


def write_base(folder: Path, name: str) -> None:
    """Write a base with random weights, drawn a tensor at a time, its tokenizer and its image processor."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig

    folder.mkdir(parents=True)
    first = WORDS[name]
    words = {f"t{i}": i for i in range(8, first)} | {token: first + i for token, i in ADDED.items()}
    words |= {word: i for i, word in enumerate(("user", "assistant", "<unk>"))}
    engine = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=engine, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(ADDED), chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    text, tower, tied = SHAPES[name]
    ids = {key: first + ADDED[f"<|{key}|>"] for key in ("image_pad", "video_pad", "vision_start", "vision_end")}
    config = Qwen3VLConfig(
        text_config=text, vision_config={**tower, "patch_size": 16}, image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=tied,
    )  # fmt: skip
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    shards, held = list[dict[str, Tensor]]([{}]), 0
    where = dict[str, int]()
    for key, p in model.named_parameters():  # a tied head once
        drawn = torch.randn(p.shape, device=device, dtype=torch.bfloat16) * 0.02
        drawn = drawn if p.ndim > 1 else drawn + (0 if key.endswith("bias") else 1)
        size = drawn.numel() * 2
        if held and held + size > SHARD_BYTES:
            save_file(shards[-1], folder / f"model-{len(shards)}.safetensors", {"format": "pt"})
            shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))
            shards.append({})
            held = 0
        held, where[key] = held + size, len(shards)
        shards[-1][key] = drawn.cpu()
    save_file(shards[-1], folder / f"model-{len(shards)}.safetensors", {"format": "pt"})
    named = {key: f"model-{n}.safetensors" for key, n in where.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))


def write_rows(folder: Path, name: str, n: int) -> None:
    """Write rows with a picture each, and rows of text with as many tokens each."""
    from PIL import Image, ImageDraw

    from optrush.data.image_sizes import processed_size

    folder.mkdir(parents=True)
    sides, words = ((256, 320), 20) if name == "tiny" else ((448, 1024), 200)
    rng, lines, plain = random.Random(0), list[str](), list[str]()

    def said(count: int) -> str:
        return " ".join(f"t{rng.randrange(8, WORDS[name])}" for _ in range(count))

    for i in range(n):
        width, height = (rng.randint(*sides) for _ in range(2))
        grain = np.random.default_rng(i).integers(60, 190, (height // 8, width // 8, 3), np.uint8)
        image = Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC)
        pen, side = ImageDraw.Draw(image), min(width, height) // 2
        pen.ellipse((side // 4, side // 4, side, side), fill=tuple(rng.randrange(256) for _ in range(3)))
        image.save(folder / f"{i}.jpg", quality=90)
        low, high = PROCESSOR["size"].values()  # type: ignore[attr-defined]
        tokens = int(np.prod([s // 32 for s in processed_size(height, width, 32, low, high)]))
        asked, answer = said(words // 4), said(words - words // 4)
        parts = [{"type": "image", "image": f"{i}.jpg"}, {"type": "text", "text": " " + asked}]
        reply = {"role": "assistant", "content": answer}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, reply]}))
        longer = said(tokens + 2) + " " + asked  # the two tokens around an image
        plain.append(json.dumps({"messages": [{"role": "user", "content": longer}, reply]}))
    (folder / "image.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "text.jsonl").write_text("\n".join(plain) + "\n")


def configuration(a: argparse.Namespace, case: str) -> dict[str, Any]:
    """Return the configuration of a case of ours."""
    rows = "text" if case == "text" else "image"
    found: dict[str, Any] = {
        "model": {"path": str(a.folder / a.shape), "dtype": "bfloat16"}, "objective": "sft",
        "data": {"path": str(a.folder / "rows" / f"{rows}.jsonl"), "cache": str(a.folder / "cache")},
        "batch": {"seq": a.seq, "tokens": a.tokens, "micro_tokens": a.seq},
        "optim": {"lr": 1e-4, "schedule": "constant", "warmup": 0}, "train": {"steps": a.steps, "log_every": 1},
        "output": str(a.folder / "unused"),
    }  # fmt: skip
    if a.part != "none" and rows == "image":
        found["image"] = {"train": a.part}
    if case == "chosen":
        del found["batch"]["micro_tokens"]
        return found | {"method": "lora"}
    given = GIVEN if torch.cuda.is_available() else ON_CPU
    return found | {"with": {**given, **json.loads(a.with_)}}


def ours(a: argparse.Namespace, case: str) -> dict[str, Any]:
    """Return the plan's prediction and the figures of `speed.py`, which is a run without its files."""
    from optrush.config import parse_config
    from optrush.errors import UserError
    from optrush.planner.search import predict

    text = json.dumps(configuration(a, case))
    path = a.folder / f"{case}.yaml"
    path.write_text(text)
    planned: dict[str, Any] = {}
    try:
        plan = predict(parse_config(text, str(path)), "auto", 1)
        planned = {"predicted_peak_bytes": plan.peak_bytes, "predicted_tokens_per_s": plan.tokens_per_s}
    except UserError as error:
        planned = {"plan": f"{error.asked}: {error.found}"}
    command = [sys.executable, str(Path(__file__).with_name("speed.py")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=a.limit, check=False)
    if done.returncode:
        return planned | {"error": done.stderr[-1500:]}
    found = json.loads(done.stdout.splitlines()[-1])
    return planned | found | {"data_wait": found["data_wait_s"] / found["step_s"]}


def documents(a: argparse.Namespace) -> tuple[Any, Any]:
    """Return the tokenized rows with images, and what reads their pixels."""
    from optrush.config import parse_config
    from optrush.data.dataset import read_sources
    from optrush.data.tokenizer import open_tokens

    config = parse_config(json.dumps(configuration(a, "image")), "images.yaml")
    tokens = open_tokens(config, a.folder / a.shape)
    assert tokens is not None
    return read_sources(config, tokens, SHAPES[a.shape][0]["vocab_size"]).train, tokens.images


class Padded(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Batches of rows, padded to the longest."""

    def __init__(self, source: Any, reader: Any, order: list[list[int]], filler: int) -> None:
        self.source, self.reader, self.order, self.filler = source, reader, order, filler

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        rows = [self.source.documents(n)[0] for n in self.order[i]]
        T = max(map(len, rows))
        ids, labels, mask = (
            np.full((len(rows), T), self.filler),
            np.full((len(rows), T), -100),
            np.zeros((len(rows), T), int),
        )
        for b, row in enumerate(rows):
            n = len(row)
            ids[b, :n], mask[b, :n] = row.ids, 1
            labels[b, :n] = np.where(row.targets, row.ids, -100)
        seen = [image for row in rows for image in row.images]
        return {
            "input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels),
            "attention_mask": torch.from_numpy(mask),
            "mm_token_type_ids": torch.from_numpy((ids == self.reader.token).astype(int)),
            "pixel_values": torch.from_numpy(np.concatenate([as_float(self.reader, image) for image in seen])),
            "image_grid_thw": torch.tensor([[1, *image.grid] for image in seen]),
        }  # fmt: skip


def as_float(reader: Any, image: Any) -> np.ndarray:
    """Return an image's patches as transformers takes them."""
    return np.asarray(reader.patches(image), np.float32)


def peer(a: argparse.Namespace, recompute: bool) -> dict[str, Any]:
    """Return figures of transformers with PEFT and Liger's kernels, on padded batches."""
    import transformers
    from peft import LoraConfig, get_peft_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, reader = documents(a)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        a.folder / a.shape, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    kernels = ""
    if device.type == "cuda" and not a.no_liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

        apply_liger_kernel_to_qwen3_vl(model=model)
        kernels = "liger"
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    rows = a.peer_rows or PEER_ROWS[a.shape]
    order = [[(k * rows + i) % len(source) for i in range(rows)] for k in range(a.steps * 2)]
    workers = min(8, max(1, (os.cpu_count() or 2) - 2)) if device.type == "cuda" else 0
    loader = torch.utils.data.DataLoader(
        Padded(source, reader, order, WORDS[a.shape]),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    seconds, tokens, slots, losses = [], [], [], list[float]()
    began = time.perf_counter()
    for batch in loader:
        given = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        now = time.perf_counter()
        seconds.append(now - began)
        tokens.append(int(batch["attention_mask"].sum()))
        slots.append(batch["attention_mask"].numel())
        began = now
    late = slice(WARMUP, None)
    return {
        "rows": rows, "kernels": kernels, "tokens_per_s": round(sum(tokens[late]) / sum(seconds[late])),
        "step_s": statistics.median(seconds[late]), "step_tokens": statistics.mean(tokens[late]),
        "fill": sum(tokens) / sum(slots), "losses": losses, "transformers": transformers.__version__,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }  # fmt: skip


def tower(a: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the frozen tower on the images of a micro-batch of `--seq` tokens."""
    from optrush.data.batch import collate
    from optrush.models.vision import open_tower

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, reader = documents(a)
    row, left, n = list[Any](), a.seq, 0
    while n < len(source) and len(document := source.documents(n)[0]) <= left:
        row.append((n, document))
        left, n = left - len(document), n + 1
    began = time.perf_counter()
    batch = collate([row], a.seq, single=False, most=len(row) + 1, reader=reader)
    decoding = time.perf_counter() - began
    assert batch.images is not None
    hf = json.loads((a.folder / a.shape / "config.json").read_text())
    sight = open_tower(a.folder / a.shape, hf, torch.bfloat16, SHAPES[a.shape][0]["head_dim"])
    sight.to(device)
    images, times = batch.to(device).images, list[float]()
    assert images is not None
    for _ in range(8):
        began = time.perf_counter()
        sight(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "images": len(images.grids), "patches": len(images.colours), "tower_s": statistics.median(times[3:]),
        "decoding_s": decoding, "peak_gib": peak,
    }  # fmt: skip


def table(path: Path) -> str:
    """Return the records as a table in Markdown."""
    rows = ["| case | tokens/s | s a step | peak GiB | planned | data wait | fill |", "|---|---|---|---|---|---|---|"]
    for r in map(json.loads, path.read_text().splitlines()):
        if "error" in r:
            rows.append(f"| {r['shape']} {r['case']} | {r['error'].strip().splitlines()[-1][:80]} | | | | | |")
        elif "tokens_per_s" in r:
            planned = r.get("predicted_peak_bytes")
            speed = r.get("predicted_tokens_per_s")
            told = f"{planned / 2**30:.1f} GiB, {speed or 0:,.0f}" if planned else ""
            fill = f"{r['fill']:.2f}" if "fill" in r else ""
            wait = f"{r['data_wait']:.1%}" if "data_wait" in r else ""
            rows.append(
                f"| {r['shape']} {r['case']} | {r['tokens_per_s']:,} | {r['step_s']:.3f} | {r['peak_gib']} | {told} "
                f"| {wait} | {fill} |"
            )
        else:
            rows.append(f"| {r['shape']} {r['case']} | {r['patches']:,} patches | {r['tower_s']:.3f} | | | | |")
    return "\n".join(rows)


def measured(a: argparse.Namespace, case: str) -> dict[str, Any]:
    """Return the record of a case, with its error where it has no figures."""
    try:
        if case.startswith("peer"):
            return peer(a, case == "peer-recompute")
        return tower(a) if case == "tower" else ours(a, case)
    except Exception:  # of another system, too: the record has it
        return {"error": traceback.format_exc()[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--folder", type=Path, help="where base, rows and cache are kept (a temporary one)")
    for flag in ("chosen", "text", "peer", "tower", "table"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--part", choices=("none", "projector", "tower"), default="none", help="of the tower to train")
    parser.add_argument("--no-liger", action="store_true", help="the peer without Liger's kernels")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=float, default=280, help="seconds of a case")
    parser.add_argument("--peer-rows", type=int, default=0, help="rows of the peer's micro-batch")
    parser.add_argument("--with", dest="with_", default="{}", help="techniques to add to the given set, as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one, in this process
    a = parser.parse_args()
    if a.table:
        print(table(a.file))
        return
    if a.case:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        base = {
            "case": a.case,
            "shape": a.shape,
            "seq": a.seq,
            "part": a.part,
            "machine": machine,
            "torch": torch.__version__,
        }
        with a.file.open("a") as file:
            file.write(json.dumps(base | measured(a, a.case)) + "\n")
        return
    with tempfile.TemporaryDirectory() as held:
        a.folder = a.folder or Path(held)
        if not (a.folder / a.shape).exists():
            write_base(a.folder / a.shape, a.shape)
        if not (a.folder / "rows").exists():
            write_rows(a.folder / "rows", a.shape, a.rows)
        cases = ["image", *(name for name in ("chosen", "text") if getattr(a, name))]
        cases += ["peer", "peer-recompute"] * a.peer + ["tower"] * a.tower
        for case in cases * a.repeats:
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(a.folder), "--case", case]
            try:
                subprocess.run(command, timeout=a.limit, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            except subprocess.TimeoutExpired:
                with a.file.open("a") as file:
                    file.write(json.dumps({"case": case, "shape": a.shape, "error": f"over {a.limit:g} s"}) + "\n")
            print(case, "is done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
