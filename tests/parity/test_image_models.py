"""Images against transformers' own class: ids, positions, logits and gradients of a document alone, and isolation."""

import ast
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from meshes import further
from optrush.cli import app
from optrush.config import Config, Sampling, parse_config
from optrush.data.batch import Batch, collate
from optrush.data.chat_template import Tokens
from optrush.data.dataset import read_sources
from optrush.data.images import MARK, ImageReader, Picture
from optrush.data.schema import Chat, Document, Message, RowLocation, parse_row
from optrush.data.tokenizer import open_tokens
from optrush.decide import decide
from optrush.errors import NeedsError, UserError
from optrush.generation import GenerationModel, find_model, prompts, row_of
from optrush.kernels import attention_varlen
from optrush.models.decoder import Decoder
from optrush.models.hf import load
from optrush.models.text_part import PARTS
from optrush.models.vision import PROJECTOR, open_tower, train_tower
from optrush.report.bench import write_run
from optrush.report.run import load_run, page_content
from optrush.restore import rebuild
from optrush.trainer.run import RunRequest, run
from sights import BASES, MARKS, PATCH, PIXTRAL, PROCESSORS, VOCABULARY, write_base, write_rows

from parity_models import compare_gradients, materialise
from trials import assembled, metrics, steps

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
def sight(request, sight_of):
    return sight_of(request.param)


# A family's own way is in its forward pass, which runs for all; a whole run wants one of each kind of tower and text.
KINDS = sorted(BASES, key=lambda kind: kind not in ("qwen3_vl", "gemma4"))
WHOLE_RUNS = pytest.mark.parametrize("sight", further(KINDS, 2), indirect=True)


@pytest.fixture(scope="module")
def sight_of(tmp_path_factory):
    return cache(lambda kind: Sight(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="module")
def run_of(sight_of, tmp_path_factory):
    """The folder of a run of all weights of the decoder on rows with images; to be read only."""
    return cache(lambda kind: Path(run_on(sight_of(kind), tmp_path_factory.mktemp("run"), withs=["packing"]).output))


@pytest.fixture(scope="module")
def qwen(sight_of):
    return sight_of("qwen3_vl")


def test_logits_positions_and_gradients(sight):
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


def test_packed_and_alone(sight):
    """To the bit: a document in the row of another, and with another image before it."""
    batch = sight.batch([2, 0])
    n, m = len(sight.document(2)), len(sight.document(0))
    with torch.no_grad():
        hidden = sight.ours(*batch.inputs)
        assert batch.images is not None
        colours = batch.images.colours.clone()
        colours[: sum(a * b for a, b in [image.grid for image in sight.document(2).images])] += 1
        changed = sight.ours(*replace(batch, images=batch.images._replace(colours=colours)).inputs)
        first = sight.ours(*sight.batch([2]).inputs)
    assert not torch.equal(changed[0, :n], hidden[0, :n]) and torch.equal(changed[0, n : n + m], hidden[0, n : n + m])
    assert torch.equal(first[0, :n], hidden[0, :n])


def test_images_in_one_call(sight):
    """A call of all images gives what a call for each gives, and pixels are the processor's own, to the bit."""
    images, tower = sight.batch([2, 0], [4]).images, sight.ours.tower
    assert images is not None and tower is not None and len(images.grids) == 6
    want = np.concatenate([sight.reader.patches(image) for i in (2, 0, 4) for image in sight.document(i).images])
    frames = getattr(tower.vision, "temporal_patch_size", 1)
    assert torch.equal(images.patches(0, len(want), frames), torch.from_numpy(want))
    alone, calls = tower(images), list(tower._calls(images.grids))
    together, kind = replace(tower, together=10**6), tower.spec.sizes
    runs = sum(one != before for one, before in zip(images.grids, (None, *images.grids[:-1]), strict=True))
    many = {"bounded": 1, "longest": 6}.get(kind, runs)
    assert len(calls) == 6 and len(list(together._calls(images.grids))) == many
    small = list(replace(tower, together=2 * 80)._calls(((8, 8), (8, 8), (10, 6), (40, 40))))
    assert [len(call) for call in small] == ([1] * 4 if kind == "longest" else [2, 1, 1])
    for one, other in zip((alone.features, *alone.deep), ((many := together(images)).features, *many.deep)):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_a_tower_in_bf16(qwen, tmp_path):
    """With bf16 products its weights are bf16 and its positions' frequencies float32, as transformers loads them."""
    rows = write_rows(tmp_path, 2)
    text = f"{{model: {qwen.base}, objective: sft, data: {{path: {rows}}}, train: {{steps: 1}}, output: {tmp_path}}}"
    for withs, sets in ((["amp"], []), (["bf16"], []), ([], ["model.dtype=bfloat16"])):
        config = parse_config(text, "images.yaml", [*sets, "batch.seq=128", "batch.tokens=128"], ["packing", *withs])
        model = assembled(config).model
        assert isinstance(model, Decoder) and model.tower is not None and model.tower.module.dtype == torch.bfloat16
        theirs = AutoModelForImageTextToText.from_pretrained(qwen.base, dtype=torch.bfloat16).model.visual
        kept = dict(model.tower.module.named_buffers())
        assert kept.keys() == dict(theirs.named_buffers()).keys()
        assert all(torch.equal(kept[name], t) and kept[name].dtype == t.dtype for name, t in theirs.named_buffers())
        images = qwen.batch([2]).images
        assert images is not None
        given = images.patches(0, len(images.colours), 2).bfloat16()
        with torch.no_grad():
            want = theirs(given, grid_thw=torch.tensor([[1, *g] for g in images.grids])).pooler_output
        torch.testing.assert_close(model.tower(images).features, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_a_compiled_tower(kind, sight_of, monkeypatch):
    """Attention over all images at once is what a call for each image computes; windows included."""

    def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> Any:
        parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in pairwise(starts.tolist())]
        assert starts.dtype == torch.int32 and longest >= int(starts.diff().max())
        return torch.cat([scaled_dot_product_attention(*part).transpose(0, 1) for part in parts])

    monkeypatch.setattr(attention_varlen, "attend_all", attend_all)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, dynamic: None)
    sight = sight_of(kind)
    images = sight.batch([2, 0], [5, 1], [6, 0]).images
    assert images is not None
    hf = json.loads((sight.base / "config.json").read_text())
    tower = open_tower(sight.base, hf, torch.float64, sight.ours.shape.rotated_width)
    assert tower.compile() == 0, "on a CPU images run one by one"
    tower.together = 1 << 20
    want = tower(images)
    assert tower.compile() == len(tower.module.blocks)
    found = tower(images)
    for one, other in zip((want.features, *want.deep), (found.features, *found.deep), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_parts_of_a_batch(qwen):
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


def test_ids_are_the_processors_own(sight):
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
                last = ours.view(len(ours), 3, -1).transpose(1, 2).flatten(1)
                assert torch.equal(last, seen["pixel_values"][n, : len(ours)]) and len(ours) == math.prod(grid)
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


def losses(output):
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@WHOLE_RUNS
def test_a_trained_model_sees_in_transformers(sight, run_of):
    """All weights of the decoder: an export has the tower's and the processor's bytes, and equal logits on images."""
    out = run_of(sight.kind) / "model"
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


@WHOLE_RUNS
def test_adapters_reach_the_decoder_alone(sight, tmp_path):
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
def test_images_that_read_both_ways(kind, layers, tmp_path, monkeypatch):
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
        with pytest.raises(NeedsError, match="bidirectional attention between image tokens"):
            sight.ours.set_attention("varlen")


def test_names_of_earlier_files(tmp_path):
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


@pytest.mark.parametrize("named", further([
    "packing loader:workers=1", "nf4 lora:rank=2", "packing recompute", "", "sort-by-length", "bf16", "neftune",
    "packing fused-loss", "ema",
], 2))  # fmt: skip
def test_with_techniques(named, qwen, run_of, tmp_path):
    found = losses(run_on(qwen, tmp_path, withs=named.split()).output)
    assert len(found) == 2 and np.isfinite(found).all()
    if named in ("packing loader:workers=1", "packing recompute"):
        assert found == losses(run_of("qwen3_vl"))


def test_a_runs_page_shows_samples_with_images(run_of, tmp_path):
    out = shutil.copytree(run_of("qwen3_vl"), tmp_path / "out")
    shown = page_content(load_run(out))["seen"]
    pieces = [p for s in shown for p in s["documents"][0]["pieces"]]
    assert len(shown) == 3 and all(bool(p["image"]) == ("image " in p["text"]) for p in pieces)
    page = report_text(out)
    assert page.count('<img src="data:image/jpeg;base64,') == len(re.findall(r"image \d+ x \d+, ", page)) == 4
    held = json.loads((out / "samples.json").read_text())
    held["samples"][0]["documents"][0]["pieces"][0]["image"] = "https://example.com/a.png"
    for damaged in ("{", "[]", json.dumps({"samples": [{"sample": "x"}]})):
        (out / "samples.json").write_text(damaged)
        page_content(load_run(out))
    (out / "samples.json").write_text(json.dumps(held))
    assert "example.com" not in report_text(out)
    (out / "samples.json").unlink()
    assert "Samples with images" not in report_text(out)


def report_text(out: Path) -> str:
    write_run(out)
    return (out / "report.html").read_text()


@pytest.mark.parametrize("kind", further(["gemma3", "mistral3", "gemma4", "llava"], 1))
def test_other_towers_with_techniques(kind, tmp_path):
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
        found.append(losses(config.output))
    assert len(found[0]) == 2 and np.isfinite(found).all() and found[0] == found[1]


@pytest.mark.parametrize(("named", "found"), [("wrap", "cuts documents"), ("compile:scope=model", "rows with images")])
def test_techniques_that_are_refused(named, found, qwen, tmp_path):
    with pytest.raises(UserError) as caught:
        run_on(qwen, tmp_path, withs=[named])
    assert "rows with images" in str(caught.value) and found in caught.value.found


def on_ranks(base: Path, folder: Path, withs: Sequence[str], sets: Sequence[str] = ()) -> list[tuple[float, float]]:
    """The losses and norms of a run, one document a row; none on other ranks than the first."""
    text = (
        f"{{model: {base}, objective: sft, data: {{path: {folder / 'rows.jsonl'}}}, batch: {{seq: 128, tokens: 256, "
        f"micro_tokens: 128}}, optim: {{lr: 0.01}}, train: {{steps: 3, log_every: 1}}, output: {folder / 'out'}}}"
    )
    config = parse_config(text, "images.yaml", sets, withs)
    return [(line["loss"], line["grad_norm"]) for line in metrics(config) if "loss" in line]


@pytest.mark.parametrize("withs", further([["amp"], ["amp", "lora:rank=2"], ["bf16:rounding=nearest"]], 1))
def test_pixels_are_not_rounded_in_shards(withs, qwen, pair, tmp_path):
    """Mixed precision casts what enters a sharded model: the tower sees what it sees on one rank."""
    write_rows(tmp_path, 4)
    (alone,) = on_ranks(qwen.base, tmp_path, ["pad", *withs], ["train.steps=1"])
    ((first, _),), _ = pair(on_ranks, qwen.base, tmp_path, ["pad", "fsdp", *withs], ["train.steps=1"])
    assert first == pytest.approx(alone[0], rel=5e-4)


def test_images_are_shared_by_ranks(qwen, tmp_path):
    """By what the tower costs, too: of four rows each of two ranks gets one with an image."""
    lines = write_rows(tmp_path, 2).read_text().splitlines()
    for said in ("is it" * 9, "?"):
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "yes"}]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    text = (
        f"{{model: {qwen.base}, objective: sft, data: {{path: {tmp_path / 'rows.jsonl'}}}, batch: {{seq: 128, "
        f"tokens: 512, micro_tokens: 128}}, train: {{steps: 1}}, output: {tmp_path / 'out'}}}"
    )
    stream = assembled(parse_config(text, "images.yaml", [], ["pad"])).stream
    for rank in range(2):
        found = stream.batches(0, stream.plan(None, 1), rank=rank, ranks=2, micro_rows=1)
        assert sum(batch.images is not None for batch in found) == 1, [batch.n_tokens for batch in found]


def settled(base: Path, folder: Path, withs: Sequence[str]) -> str:
    with pytest.raises(UserError) as caught:
        on_ranks(base, folder, withs)
    return caught.value.found


def test_ranks_that_share_a_model(qwen, pair, tmp_path):
    write_rows(tmp_path, 2)
    for found in pair(settled, qwen.base, tmp_path, ["tensor"]):
        assert found == "a technique that owns the tensor-parallel axis"


def test_settings_of_images_that_do_nothing(qwen, tmp_path):
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a square"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    text = f"{{model: {qwen.base}, objective: sft, data: {{path: {tmp_path / 'rows.jsonl'}}}, train: {{steps: 1}}}}"
    sets = ["data.max_pixels=256", "data.remote=true", f"output={tmp_path}", "batch.seq=64", "batch.tokens=64"]
    trainer = assembled(parse_config(text, "images.yaml", sets, ["pad"]))
    assert trainer.model.tower is None and {f"data.{key} does nothing: no row has an image" for key in (
        "max_pixels", "remote")} <= {*trainer.notes}  # fmt: skip


TRAINED = ("projector", "tower")


def trained_sight(sight: Sight, part: Any) -> tuple[Any, Any]:
    """Return our model with a tower of which a part is trained, and the map of its weights."""
    hf = json.loads((sight.base / "config.json").read_text())
    model, recipe = load(sight.base, hf, None, torch.float32, 0)
    assert isinstance(model, Decoder)
    recipe = train_tower(model, recipe, sight.base, hf, part)
    materialise(model, recipe)
    return model, recipe


@pytest.mark.parametrize("part", further(TRAINED[::-1], 1))
def test_gradients_of_a_trained_tower(part, sight):
    """Every gradient, of packed documents with three, one, two and no images, as transformers has them; of a batch
    without images each is 0, which the sum over ranks needs, and hidden states keep their bits."""
    model, recipe = trained_sight(sight, part)
    plain = sight.batch([5])
    hidden = model(*plain.inputs)
    assert torch.equal(hidden, sight.ours(*plain.inputs))
    model.head(hidden, plain.labels).backward()
    grads = [p.grad for p in model.visual.parameters() if p.requires_grad]
    assert grads and all(g is not None and not g.any() for g in grads)
    model.zero_grad()
    batch = sight.batch([2, 0], [5, 1])
    model.head(model(*batch.inputs), batch.labels).backward()
    sight.theirs.zero_grad()
    for i in (2, 0, 5, 1):
        document = sight.document(i)
        logits = sight.theirs(**sight.alone(document), use_cache=False).logits[0]
        labels = torch.from_numpy(np.where(document.targets[1:], document.ids[1:], -100).astype(np.int64))
        cross_entropy(logits[:-1], labels, reduction="sum").backward()
    trained = {name for name, p in model.visual.named_parameters() if p.requires_grad}
    for name, p in (inner := getattr(sight.theirs.model, "visual", sight.theirs.model)).named_parameters():
        if "language_model" not in name or inner is not sight.theirs.model:
            assert (name in trained) == (p.grad is not None and (part == "tower" or name.startswith(PROJECTOR))), name
            p.grad = p.grad if name in trained else None
    close = 1e-3 if "linear_num_key_heads" in BASES[sight.kind]["text_config"] else 1e-4
    compare_gradients(model, recipe, sight.theirs, close=close)


def read_by_transformers(name: str, base: dict[str, torch.Tensor]) -> str:
    """The name of a tower's parameter in the file of a base."""
    return next(file for file in (f"model.visual.{name}", f"model.{name}", name) if file in base)


@pytest.mark.parametrize(
    ("kind", "part", "withs"),
    further([("gemma3", "projector", ["lora:rank=2"]), ("qwen3_vl", "tower", []), ("gemma4", "tower", ["lora:rank=2"]),
     ("qwen3_vl", "projector", []), ("qwen3_vl", "projector", ["lora:rank=2"]), ("llava", "tower", ["lora:rank=2"]),
     ("llava", "tower", []), ("mistral3", "tower", ["lora:rank=2"])], 1),
)  # fmt: skip
def test_a_run_that_trains_the_tower(kind, part, withs, sight_of, tmp_path):
    """Stopped and resumed it has the losses of one in one go; its export has what moved, and transformers reads it."""
    qwen = sight_of(kind)
    sets = ["optim.schedule=constant", f"image.train={part}", "image.lr=0.02"]
    parts = run_on(qwen, tmp_path, [*sets, "train.save_every=1", "train.keep=9"], ["packing", *withs])
    out, whole = Path(parts.output), losses(parts.output)
    for step in sorted((out / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(step)
    assert run(RunRequest(decide(parts), resume="auto")).code == 0 and losses(out) == whole
    base, made = (load_file(folder / "model.safetensors") for folder in (qwen.base, out / "model"))
    assert base.keys() == made.keys()
    ends = (*(f"model.{part}" for part in PARTS), *PARTS)
    moved = {name for name in base if name.startswith(ends) and not torch.equal(base[name], made[name])}
    assert moved and all(re.search("|".join(PROJECTOR), name) for name in moved) == (part == "projector")
    given = qwen.alone(qwen.document(2))
    theirs = AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        merged = theirs(**given).logits
        if withs:
            fresh = AutoModelForImageTextToText.from_pretrained(qwen.base, dtype=torch.float32).eval()
            adapted = PeftModel.from_pretrained(fresh, out / "adapter").eval()
            torch.testing.assert_close(adapted(**given).logits, merged, rtol=1e-4, atol=1e-4)
    kept = rebuild(out).trainer.model  # as `optrush export` builds it
    assert isinstance(kept, Decoder) and kept.tower is not None
    for name, p in kept.tower.module.named_parameters():
        assert torch.equal(p, made[read_by_transformers(name, made)]), name


@pytest.mark.parametrize(
    "named",
    further(["nf4 lora:rank=2", "amp", "update-in-backward", "bf16:rounding=nearest", "muon", "adam8bit", "ema"], 1),
)
def test_techniques_that_train_a_projector(named, qwen, tmp_path):
    sets = ["image.train=projector", *(["optim.clip=null", "batch.micro_tokens=1024"] * ("update" in named))]
    config = run_on(qwen, tmp_path, sets, ["packing", *named.split()])
    base, made = (load_file(folder / "model.safetensors") for folder in (qwen.base, Path(config.output) / "model"))
    moved = {name for name in base if "visual" in name and not torch.equal(base[name].to(made[name].dtype), made[name])}
    assert np.isfinite(losses(config.output)).all() and moved and all("merger" in name for name in moved)


def test_the_rate_of_a_tower(qwen, tmp_path):
    """With a rate of its own the tower moves by as much more as the rate is larger, and the decoder as before."""
    rows = write_rows(tmp_path, 4)
    text = f"{{model: {qwen.base}, objective: sft, data: {{path: {rows}}}, batch: {{seq: 128, tokens: 256}}}}"
    own, moved = [f"output={tmp_path}", "train.steps=1", "optim.warmup=0", "image.train=projector"], []
    for sets in ([], ["image.lr=0.03"]):
        job = assembled(parse_config(text, "images.yaml", ["optim.lr=0.01", *own, *sets], ["packing"]))
        parts = {t.name: t for t in job.trained}
        tower = next(t for name, t in parts.items() if name.endswith("merger.linear_fc1.weight"))
        before = tower.whole.clone()
        list(steps(job, 1))
        moved.append(((tower.whole - before).abs().mean(), parts["norm.weight"].whole.clone()))
    assert moved[1][0] / moved[0][0] == pytest.approx(3, rel=1e-2) and torch.equal(moved[0][1], moved[1][1])


@pytest.mark.parametrize(("kind", "part", "cut"), further(
    [("qwen3_vl", "none", "fsdp"), ("qwen3_vl", "tower", "ddp"), ("qwen3_vl", "none", "ddp"),
     ("qwen3_vl", "none", "fsdp:stage=2"), ("qwen3_vl", "tower", "fsdp"), ("gemma4", "tower", "fsdp"),
     ("llava", "tower", "ddp")], 2))  # fmt: skip
def test_ranks_with_rows_of_their_own(kind, part, cut, sight_of, pair, tmp_path):
    """In some steps one of two ranks has no image, in others both have; with the tower trained, too."""
    base = sight_of(kind).base
    lines = write_rows(tmp_path, 4).read_text().splitlines()
    turns = [{"role": "user", "content": "what is that ?"}, {"role": "assistant", "content": "a green square"}]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, *[json.dumps({"messages": turns})] * 3]))
    sets = [] if part == "none" else [f"image.train={part}"]
    alone = on_ranks(base, tmp_path, ["pad"], sets)
    first, other = pair(on_ranks, base, tmp_path, ["pad", cut], sets)
    assert len(alone) == 3 and not other
    np.testing.assert_allclose(first, alone, rtol=1e-5)


@pytest.mark.parametrize(("sets", "found"), [(["image.train=projector"], "no row has an image"), (
    ["image.train=tower", "model.implementation=transformers"], "model.implementation: transformers",
), (["image.lr=0.1"], "together with `lr`")])  # fmt: skip
def test_what_trains_no_tower(sets, found, qwen, tmp_path):
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a square"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    text = f"{{model: {{path: {qwen.base}}}, objective: sft, data: {{path: {tmp_path / 'rows.jsonl'}}}}}"
    with pytest.raises(UserError) as caught:
        assembled(
            parse_config(text, "a.yaml", [*sets, f"output={tmp_path}", "batch.seq=64", "batch.tokens=64"], ["pad"])
        )
    assert found in str(caught.value)


def test_answers_about_images(sight, tmp_path):
    """Greedy answers of prompts with three, one and no images, in one batch and streamed, are transformers' own."""
    speaker, sampling = GenerationModel(find_model(str(sight.base))), Sampling(greedy=True, max_tokens=5)
    asked = [prompt for n, prompt in enumerate(prompts(sight.rows)) if n in (2, 0, 5)]
    ids = [speaker.ids(prompt.asked, prompt.where) for prompt in asked]
    assert [len(each.images) for each in ids] == [1, 3, 0]
    found = speaker.answers(ids, sampling, 0)
    for prompt, own, n in zip(ids, found, (0, 2, 5), strict=True):
        assert speaker.stream(prompt, sampling, 0, lambda _: None) == own
        given = sight.alone(sight.document(n))
        assert given["input_ids"][0, : len(prompt)].tolist() == prompt
        by_token = {"input_ids", "mm_token_type_ids", "token_type_ids"}
        given |= {key: given[key][:, : len(prompt)] for key in by_token & given.keys()}
        mask = torch.ones_like(given["input_ids"])
        made = sight.theirs.generate(
            **given, attention_mask=mask, do_sample=False, max_new_tokens=5, eos_token_id=[258]
        )
        assert speaker._answer(made[0, len(prompt) :]).text == own.text
    ids[0].images = (ids[0].images[0]._replace(digest=1),)
    with pytest.raises(UserError) as caught:
        speaker.answers(ids, sampling, 0)
    assert "changed" in caught.value.found


def talk(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["optrush", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        app.main()
    return int(left.value.code or 0)


def test_images_in_a_terminal(qwen, tmp_path, monkeypatch, capsys):
    rows = [json.loads(line) for line in qwen.rows.read_text().splitlines()]
    words = ["--image", qwen.rows.parent / "0.png", "--message", "what is this ?"]
    assert talk(monkeypatch, "chat", qwen.base, *words, "--greedy", "--max-tokens", 4, "--json") == 0
    said = json.loads(capsys.readouterr().out)["turns"][0]["answers"][0]["text"]
    out = tmp_path / "answers.jsonl"
    words = ["--prompts", qwen.rows, "--out", out, "--greedy", "--max-tokens", 4, "--batch", 3]
    assert talk(monkeypatch, "generate", qwen.base, *words) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert answers[0]["answer"] == said and answers[0]["prompt"] == rows[0]["messages"][:1]
    for sets, found in ((["--image", tmp_path / "none.png"], "No such file"), (["--image", qwen.rows], "no image")):
        assert talk(monkeypatch, "chat", qwen.base, *sets, "--message", "what ?") == 2
        assert found in capsys.readouterr().err
    assert talk(monkeypatch, "chat", "tiny", "--image", qwen.rows.parent / "0.png", "--message", "what ?") == 2
    assert "whose images are not read" in capsys.readouterr().err


def test_eval_of_a_trained_projector(qwen, tmp_path, monkeypatch, capsys):
    """The loss of the exported model on rows with images is that of transformers' model; rows of text do, too."""
    config = run_on(qwen, tmp_path, ["image.train=projector"], ["packing"])
    out = Path(config.output)
    given = ["eval", out / "run.yaml", "--model", out / "model", "--json", "--data"]
    assert talk(monkeypatch, *given, qwen.rows) == 0
    found, theirs = (
        json.loads(capsys.readouterr().out),
        AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32).eval(),
    )
    total, many = 0.0, 0
    for i in range(7):
        document = qwen.document(i)
        with torch.no_grad():
            logits = theirs(**qwen.alone(document), use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(np.where(document.targets[1:], document.ids[1:], -100).astype(np.int64))
        total += cross_entropy(logits, labels, reduction="sum").item()
        many += int(document.targets[1:].sum())
    assert found["target_tokens"] == many and found["loss"] == pytest.approx(total / many, rel=1e-5)
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a square"}]
    (tmp_path / "text.jsonl").write_text(json.dumps({"messages": turns}))
    assert talk(monkeypatch, *given, tmp_path / "text.jsonl") == 0


def test_a_conversation_with_images_is_kept_as_a_row():
    message = Message("user", f"{MARK}what is{MARK}?", images=(Picture("a.png"), Picture(data=b"x")))
    found = {"messages": [row_of(message), {"role": "assistant", "content": "yes"}]}
    row = parse_row(RowLocation(Path("x"), 1), found)
    assert isinstance(row, Chat) and row.messages[0] == message
