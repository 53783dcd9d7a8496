"""Images against transformers' own class: ids, positions, logits and gradients of a document alone, and isolation."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from meshes import further
from optrush.config import Config, parse_config
from optrush.data.batch import Batch, collate
from optrush.data.chat_template import Tokens
from optrush.data.dataset import read_sources
from optrush.data.images import ImageReader
from optrush.data.schema import Document
from optrush.data.tokenizer import open_tokens
from optrush.decide import decide
from optrush.errors import NeedsError, UserError
from optrush.models.hf import load
from optrush.models.vision import PARTS, open_tower
from optrush.report.bench import write_run
from optrush.report.run import load_run, page_content
from optrush.trainer.run import RunRequest, run
from sights import BASES, MARKS, PATCH, PIXTRAL, PROCESSORS, VOCABULARY, write_base, write_rows

from pair import Pair
from parity_models import compare_gradients, materialise
from trials import assembled, metrics

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
T = 544


class Sight:
    """A base, its rows read, and both models of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.base = kind, folder / "base"
        self.theirs = write_base(self.base, kind)
        rows = write_rows(folder / "rows", 5, most=3)
        with rows.open("a") as file:  # no image at all, and the answer before one
            turns = [("user", "what is that ?"), ("assistant", "a circle")]
            talk: list[Any] = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": talk}) + "\n")
            last = [{"type": "text", "text": "and ?"}, *[{"type": "image", "image": f"{n}.png"} for n in (0, 4)]]
            file.write(json.dumps({"messages": [*talk, {"role": "user", "content": last}]}) + "\n")
        text = f"{{model: {self.base}, objective: sft, data: {{path: {rows}}}, batch: {{seq: {T}, tokens: {T}}}}}"
        config = parse_config(text, "images.yaml", [f"output={folder / 'out'}", "train.steps=1"])
        tokens = open_tokens(config, self.base)
        assert isinstance(tokens, Tokens) and isinstance(tokens.images, ImageReader)
        self.tokens, self.reader, self.rows = tokens, tokens.images, rows
        self.source = read_sources(config, tokens, VOCABULARY).train
        hf = json.loads((self.base / "config.json").read_text())
        self.ours, self.recipe = load(self.base, hf, None, torch.float32, 0)
        materialise(self.ours, self.recipe)
        self.ours.tower = open_tower(self.base, hf, torch.float32, self.ours.shape.rotated_width)

    def document(self, i: int) -> Document:
        return self.source.documents(i)[0]

    def batch(self, *rows: list[int]) -> Batch:
        most = max(map(len, rows)) + 1
        held = [[(i, self.document(i)) for i in row] for row in rows]
        return collate(held, T, single=False, most=most * len(rows), reader=self.reader)

    def alone(self, document: Document) -> dict[str, Any]:
        """What transformers gets of a document."""
        ids = torch.from_numpy(document.ids.astype(np.int64))[None]
        seen = (ids == self.reader.token).int()
        kind = {"gemma3": "token_type_ids"}.get(self.kind, "mm_token_type_ids")
        given = {"input_ids": ids, **({} if self.kind in ("llava", "pixtral", "mistral3") else {kind: seen})}
        if not document.images:
            return given
        pictures = [Image.open(self.rows.parent / image.picture.path) for image in document.images]
        made = self.processor(images=pictures, return_tensors="pt", **self.reader.sizes.options)
        return {**given, **{key: made[key] for key in made if not key.startswith("num_")}}

    @cached_property
    def processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self.base)


@pytest.fixture(scope="module", params=BASES)
def sight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sight:
    return Sight(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    return Sight(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


def test_logits_positions_and_gradients(sight: Sight) -> None:
    """Three, one, two and no images in documents of packed rows, and two side by side at an end; two sizes of them."""
    rows = ([2, 0], [5, 1], [6, 0])
    batch = sight.batch(*rows)
    hidden = sight.ours(*batch.inputs)
    logits, loss = sight.ours.head.logits(hidden), torch.zeros(())
    assert batch.images is not None
    for b, row in enumerate(rows):
        at = 0
        for i in row:
            document = sight.document(i)
            given, part = sight.alone(document), slice(at, at + len(document))
            want = sight.theirs(**given, use_cache=False).logits[0]
            torch.testing.assert_close(logits[b, part], want, rtol=1e-5, atol=1e-5)
            if hasattr(sight.theirs.model, "get_rope_index"):
                places = {key: given[key] for key in ("mm_token_type_ids", "image_grid_thw") if key in given}
                axes = sight.theirs.model.get_rope_index(given["input_ids"], **places)[0][:, 0].T
                assert torch.equal(axes.int(), batch.images.axes[b, part])
            loss = loss + cross_entropy(want, batch.labels[b, part], reduction="sum")
            at += len(document)
    sight.theirs.zero_grad()
    loss.backward()
    sight.ours.zero_grad()
    sight.ours.head(hidden, batch.labels).backward()
    # A delta rule's decay has a gradient of cancelling terms, which each side sums in its own order.
    close = 1e-3 if "linear_num_key_heads" in BASES[sight.kind]["text_config"] else 1e-4
    compare_gradients(sight.ours, sight.recipe, decoder_of(sight.theirs), close=close)


def decoder_of(theirs: Any) -> Any:
    """Leave out the tower's gradients, which a frozen one has not."""
    for name, p in theirs.named_parameters():
        p.grad = p.grad if "language_model" in name or name.startswith("lm_head") else None
    return theirs


def test_packed_and_alone(sight: Sight) -> None:
    """To the bit: a document in the row of another, and with another image before it."""
    batch = sight.batch([2, 0])
    n, m = len(sight.document(2)), len(sight.document(0))
    with torch.no_grad():
        hidden = sight.ours(*batch.inputs)
        assert batch.images is not None
        patches = batch.images.patches.clone()
        patches[: sum(a * b for a, b in [image.grid for image in sight.document(2).images])] += 1
        changed = sight.ours(*replace(batch, images=batch.images._replace(patches=patches)).inputs)
        first = sight.ours(*sight.batch([2]).inputs)
    assert not torch.equal(changed[0, :n], hidden[0, :n]) and torch.equal(changed[0, n : n + m], hidden[0, n : n + m])
    assert torch.equal(first[0, :n], hidden[0, :n])


def test_parts_of_a_batch(qwen: Sight) -> None:
    batch = qwen.batch([2], [5], [0, 1])
    with torch.no_grad():
        whole = qwen.ours(*batch.inputs)
        parts = batch.parts(1)
        for b, part in enumerate(parts):
            assert (part.images is None) == (b == 1)
            torch.testing.assert_close(qwen.ours(*part.inputs)[0], whole[b])


def pixtral_processor() -> type:
    """Return the class with its own way to write an image, whose module asks for torchvision."""
    tree = ast.parse((Path(transformers.__path__[0]) / "models/pixtral/processing_pixtral.py").read_text())
    (function,) = (node for node in ast.walk(tree) if getattr(node, "name", "") == "replace_image_token")
    found: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "pixtral", "exec"), found)
    return type("PixtralProcessor", (), {"replace_image_token": found["replace_image_token"]})


CLASSES = {"gemma3": Gemma3Processor, "gemma4": Gemma4Processor, "llava": LlavaProcessor}


def test_ids_are_the_processors_own(sight: Sight) -> None:
    tokenizer, hf = AutoTokenizer.from_pretrained(sight.base), sight.reader.hf
    kind = pixtral_processor() if PROCESSORS.get(sight.kind) is PIXTRAL else CLASSES.get(sight.kind, Qwen3VLProcessor)
    made: Any = object.__new__(kind)  # their classes ask for more of a tokenizer, or for a reader of videos
    made.image_processor = sight.processor
    begin, pad, end = MARKS[3:6]
    made.image_token = place = pad if sight.kind != "gemma3" else begin
    made.boi_token, made.eoi_token, made.image_break_token, made.image_end_token = begin, end, begin, end
    made.full_image_sequence = f"\n\n{begin}{pad * hf.get('mm_tokens_per_image', 0)}{end}\n\n"
    made.patch_size, made.spatial_merge_size = PATCH, hf.get("spatial_merge_size", 1)
    made.num_additional_image_tokens, made.vision_feature_select_strategy = 1, "default"
    rows = [json.loads(line)["messages"] for line in sight.rows.read_text().splitlines()]
    for i, row in enumerate(rows[:5]):
        text = tokenizer.apply_chat_template(row, tokenize=False)
        pictures = [Image.open(sight.rows.parent / p["image"]) for p in row[0]["content"] if p["type"] == "image"]
        seen = made.image_processor(images=pictures, return_tensors="pt", **sight.reader.sizes.options)
        for k in range(len(pictures)):
            text = text.replace(place, made.replace_image_token(seen, k).replace(place, "<|hole|>"), 1)
        document = sight.document(i)
        assert tokenizer(text.replace("<|hole|>", place))["input_ids"] == document.ids.tolist()
        for n, image in enumerate(document.images):
            ours, grid = torch.from_numpy(sight.reader.patches(image)), image.grid
            if "image_grid_thw" in seen:
                sizes = seen["image_grid_thw"].prod(1).tolist()
                assert torch.equal(ours, seen["pixel_values"].split(sizes)[n])
            elif "image_position_ids" in seen:
                assert torch.equal(ours, seen["pixel_values"][n, : len(ours)]) and len(ours) == math.prod(grid)
            else:
                whole = ours.view(*grid, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2)
                assert torch.equal(whole, seen["pixel_values"][n, :, : grid[0] * PATCH, : grid[1] * PATCH])
        assert not document.targets[document.ids == sight.reader.token].any()


def run_on(sight: Sight, folder: Path, sets: Sequence[str] = (), withs: Sequence[str] = ()) -> Config:
    """Train a few steps on pictures, as `optrush train` does, and return the configuration."""
    rows = write_rows(folder / "rows", 12, most=2)
    text = (
        f"{{model: {sight.base}, objective: sft, data: {{path: {rows}, eval: 0.2}}, batch: {{seq: 256, tokens: 1024, "
        f"micro_tokens: 512}}, optim: {{lr: 0.01}}, train: {{steps: 2, log_every: 1}}, output: {folder / 'out'}}}"
    )
    config = parse_config(text, "images.yaml", sets, withs)
    assert run(RunRequest(decide(config))).code == 0
    return config


def losses(config: Config) -> list[float]:
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_a_trained_model_sees_in_transformers(sight: Sight, tmp_path: Path) -> None:
    """All weights of the decoder: an export has the tower's and the processor's bytes, and equal logits on images."""
    out = Path(run_on(sight, tmp_path, withs=["packing"]).output) / "model"
    base, made = (load_file(folder / "model.safetensors") for folder in (sight.base, out))
    assert base.keys() == made.keys()
    same = {name for name in base if torch.equal(base[name], made[name])}
    kept = {name for name in base if name.removeprefix("model.").startswith(PARTS)}
    fixed = {name for name in base if name.endswith("layer_scalar")}
    assert kept <= same and same - kept == fixed, "what the decoder has moved, and nothing else"
    name = "preprocessor_config.json"
    assert (out / name).read_bytes() == (sight.base / name).read_bytes()
    theirs = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    hf = json.loads((out / "config.json").read_text())
    ours, recipe = load(out, hf, None, torch.float32, 0)
    materialise(ours, recipe)
    ours.tower = open_tower(out, hf, torch.float32, ours.shape.rotated_width)
    with torch.no_grad():
        batch = sight.batch([2])
        found = ours.head.logits(ours(*batch.inputs))[0, : len(sight.document(2))]
        want = theirs(**sight.alone(sight.document(2)), use_cache=False).logits[0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_adapters_reach_the_decoder_alone(sight: Sight, tmp_path: Path) -> None:
    """Of names that the tower has, too; the merged model and the adapter on the base see the same."""
    out = Path(run_on(sight, tmp_path, withs=["lora:rank=2", "packing"]).output)
    given = sight.alone(sight.document(2))
    with torch.no_grad():
        merged, fresh = (
            AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (out / "model", sight.base)
        )
        before = fresh(**given).logits
        adapted = PeftModel.from_pretrained(fresh, out / "adapter").eval()
        assert not [n for n, _ in adapted.named_parameters() if "lora" in n and "language_model" not in n]
        torch.testing.assert_close(adapted(**given).logits, merged(**given).logits, rtol=1e-4, atol=1e-4)
    assert (merged(**given).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "layers"), [("gemma3", "all"), ("gemma4", "windowed"), ("gemma4", "none")])
def test_images_that_read_both_ways(kind: str, layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layers of the family alone; a kernel that cannot is refused; sdpa packs as masked attention does."""
    if layers == "none":  # small models of that family
        text = BASES[kind]["text_config"]
        monkeypatch.setitem(BASES[kind], "text_config", {**text, "use_bidirectional_attention": None})
    sight = Sight(tmp_path, kind)
    assert sight.ours.tower is not None and sight.ours.tower.mutual == layers
    batch = sight.batch([2, 0])
    assert (batch.documents.mutual is None) == (layers == "none")
    with torch.no_grad():
        want = sight.ours(*batch.inputs)
        sight.ours.set_attention("sdpa")
        torch.testing.assert_close(sight.ours(*batch.inputs), want, rtol=1e-4, atol=1e-4)
        theirs = sight.theirs(**sight.alone(sight.document(2)), use_cache=False).logits[0]
        torch.testing.assert_close(sight.ours.head.logits(want)[0, : len(theirs)], theirs, rtol=1e-4, atol=2e-5)
    if layers != "none":
        with pytest.raises(NeedsError, match="images whose placeholders read each other"):
            sight.ours.set_attention("varlen")


def test_names_of_earlier_files(tmp_path: Path) -> None:
    """A module between, and places that are no tensor now."""
    write_base(tmp_path, "llava")
    hf = json.loads((tmp_path / "config.json").read_text())
    before = open_tower(tmp_path, hf, torch.float32, 16).module.state_dict()
    held = load_file(tmp_path / "model.safetensors")
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): values for name, values in held.items()}
    named["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(37)[None]
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    after = open_tower(tmp_path, hf, torch.float32, 16).module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    named.pop("multi_modal_projector.linear_2.bias")
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NeedsError, match=r"multi_modal_projector\.linear_2\.bias is missing"):
        open_tower(tmp_path, hf, torch.float32, 16)


@pytest.mark.parametrize(
    "named",
    further(
        ["packing loader:workers=1", "nf4 lora:rank=2", "packing recompute", "", "sort-by-length", "bf16", "neftune",
         "packing fused-loss", "ema"], 2,
    ),
)  # fmt: skip
def test_with_techniques(named: str, qwen: Sight, tmp_path: Path) -> None:
    withs = named.split()
    found = losses(run_on(qwen, tmp_path, withs=withs))
    assert len(found) == 2 and np.isfinite(found).all()
    if named in ("packing loader:workers=1", "packing recompute"):
        assert found == losses(run_on(qwen, tmp_path / "plain", withs=["packing"]))


def test_a_runs_page_shows_samples_with_images(qwen: Sight, tmp_path: Path) -> None:
    out = Path(run_on(qwen, tmp_path, withs=["packing"]).output)
    shown = page_content(load_run(out))["seen"]
    pieces = [p for s in shown for p in s["documents"][0]["pieces"]]
    assert len(shown) == 3 and all(bool(p["image"]) == ("image " in p["text"]) for p in pieces)
    page = report_text(out)
    assert page.count('<img src="data:image/jpeg;base64,') == len(re.findall(r"image \d+ x \d+, ", page)) == 4
    held = json.loads((out / "samples.json").read_text())
    held["samples"][0]["documents"][0]["pieces"][0]["image"] = "https://example.com/a.png"
    for damaged in ("{", "[]", json.dumps({"samples": [{"sample": "x"}]}), json.dumps(held)):
        (out / "samples.json").write_text(damaged)
        assert "example.com" not in report_text(out)
    (out / "samples.json").unlink()
    assert "Samples with images" not in report_text(out)


def report_text(out: Path) -> str:
    write_run(out)
    return (out / "report.html").read_text()


@pytest.mark.parametrize("kind", further(["gemma3", "mistral3", "gemma4", "llava"], 2))
def test_other_towers_with_techniques(kind: str, tmp_path: Path) -> None:
    """In bf16, by sdpa, recomputed, with batches from another process: as without the last two."""
    write_base(tmp_path / "base", kind)
    rows = write_rows(tmp_path / "rows", 12, most=2)
    found = []
    for n, more in enumerate((["recompute", "loader:workers=1"], [])):
        text = (
            f"{{model: {{path: {tmp_path / 'base'}, dtype: bfloat16}}, objective: sft, data: {{path: {rows}}}, "
            f"batch: {{seq: 320, tokens: 640, micro_tokens: 640}}, train: {{steps: 2, log_every: 1, export: false}}, "
            f"output: {tmp_path / str(n)}}}"
        )
        config = parse_config(text, "images.yaml", [], ["packing", "attention:impl=sdpa", *more])
        assert run(RunRequest(decide(config))).code == 0
        found.append(losses(config))
    assert len(found[0]) == 2 and np.isfinite(found).all() and found[0] == found[1]


@pytest.mark.parametrize(("named", "found"), [("wrap", "cuts documents"), ("compile:scope=model", "rows with images")])
def test_techniques_that_are_refused(named: str, found: str, qwen: Sight, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_on(qwen, tmp_path, withs=[named])
    assert "rows with images" in str(caught.value) and found in caught.value.found


def test_a_run_that_goes_on(qwen: Sight, tmp_path: Path) -> None:
    whole = losses(run_on(qwen, tmp_path / "whole", ["train.steps=4", "optim.schedule=constant"], ["packing"]))
    sets = ["train.steps=4", "optim.schedule=constant", "train.save_every=2", "train.stop_after=2"]
    config = run_on(qwen, tmp_path / "parts", [*sets[:3], "train.keep=9"], ["packing"])
    for step in sorted((Path(config.output) / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(step)
    again = run(RunRequest(decide(config), resume="auto"))
    assert again.code == 0 and losses(config) == whole


def on_ranks(base: Path, folder: Path, withs: Sequence[str]) -> list[tuple[float, float]]:
    """The losses and norms of a run, one document a row; none on other ranks than the first."""
    text = (
        f"{{model: {base}, objective: sft, data: {{path: {folder / 'rows.jsonl'}}}, batch: {{seq: 128, tokens: 256, "
        f"micro_tokens: 128}}, optim: {{lr: 0.01}}, train: {{steps: 3, log_every: 1}}, output: {folder / 'out'}}}"
    )
    config = parse_config(text, "images.yaml", [], withs)
    return [(line["loss"], line["grad_norm"]) for line in metrics(config) if "loss" in line]


def test_ranks_with_rows_of_their_own(qwen: Sight, pair: Pair, tmp_path: Path) -> None:
    """In some steps one of two ranks has no image, in others both have."""
    lines = write_rows(tmp_path, 4).read_text().splitlines()
    turns = [{"role": "user", "content": "what is that ?"}, {"role": "assistant", "content": "a green square"}]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, *[json.dumps({"messages": turns})] * 3]))
    alone = on_ranks(qwen.base, tmp_path, ["pad"])
    first, other = pair(on_ranks, qwen.base, tmp_path, ["pad", "ddp"])
    assert len(alone) == 3 and not other
    np.testing.assert_allclose(first, alone, rtol=1e-5)


def settled(base: Path, folder: Path, withs: Sequence[str]) -> str:
    with pytest.raises(UserError) as caught:
        on_ranks(base, folder, withs)
    return caught.value.found


def test_ranks_that_share_a_model(qwen: Sight, pair: Pair, tmp_path: Path) -> None:
    write_rows(tmp_path, 2)
    for withs, owned in ((["fsdp"], "data-parallel"), (["tensor"], "tensor-parallel")):
        for found in pair(settled, qwen.base, tmp_path, withs):
            assert found == f"a technique that owns the {owned} axis"


def test_settings_of_images_that_do_nothing(qwen: Sight, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a square"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    text = f"{{model: {qwen.base}, objective: sft, data: {{path: {tmp_path / 'rows.jsonl'}}}, train: {{steps: 1}}}}"
    sets = ["data.max_pixels=256", "data.remote=true", f"output={tmp_path}", "batch.seq=64", "batch.tokens=64"]
    trainer = assembled(parse_config(text, "images.yaml", sets, ["pad"]))
    assert trainer.model.tower is None and {f"data.{key} does nothing: no row has an image" for key in (
        "max_pixels", "remote")} <= {*trainer.notes}  # fmt: skip
