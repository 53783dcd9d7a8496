"""Images of rows: every form that names one, files that are damaged or hostile, and what is kept of them."""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

from optrush.cli.data import show
from optrush.config import Cleaning, parse_config
from optrush.data import download, images, preview, tokenize
from optrush.data.cleaning import Task, clean_files, measure_files
from optrush.data.dataset import read_sources
from optrush.data.image_sizes import processed_size
from optrush.data.images import ImageReader, Picture, about_tokens
from optrush.data.length_estimate import estimate
from optrush.data.packing import Padded
from optrush.data.sampler import Loading, decoding_ahead
from optrush.data.samples import Counts, describe_counts
from optrush.data.schema import NO_RULES, Chat, RowLocation, parse_row
from optrush.data.tokenizer import open_tokens, settle_images
from optrush.decide import decide
from optrush.errors import DataError, NeedsError, UserError
from optrush.hardware import parse_hardware
from optrush.models.text_part import PARTS, tower_sizes
from optrush.models.vision import PROJECTOR
from optrush.planner.search import predict
from optrush.techniques.cuda_graphs import CudaGraphs
from optrush.techniques.rows import Wrap
from sights import BASES, NAMES, PROCESSOR, TOWER, VOCABULARY, draw, write_base, write_rows
from sights import TEXT as TEXT_SIZES

from trials import ledgers

WHERE = RowLocation(Path("data.jsonl"), 3)
ANSWER = {"role": "assistant", "content": "a red circle"}
T = 384


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


PNG = encoded(draw("circle", "red", 32, 24, 0))
TEXT = base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder, "qwen3_vl")
    return folder


def asked(*parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": "what ?"}]}


def pic(**named):
    return {"type": "image", **named}


def turns(*parts, **more):
    """A row of one question with these parts before its text."""
    return {"messages": [asked(*parts), ANSWER], **more}


def read(base, path, *sets, objective="sft"):
    text = f"{{model: {base}, objective: {objective}, data: {{path: {path}}}, batch: {{seq: {T}, tokens: {T}}}}}"
    config = parse_config(text, "images.yaml", [f"output={path.parent / 'out'}", "train.steps=1", *sets])
    return read_sources(config, open_tokens(config, base), VOCABULARY)


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- what names an image


@pytest.mark.parametrize(("row", "images"), [
    (turns(pic(image="a.png")), [Picture("a.png")]), (turns(pic(path="/b/a.png")), [Picture("/b/a.png")]),
    (turns(pic(url="file:///b/a.png")), [Picture("/b/a.png")]),
    (turns({"type": "image_url", "image_url": {"url": "a.png"}}), [Picture("a.png")]),
    (turns({"type": "image_url", "image_url": f"data:image/png;base64,{TEXT}"}), [PNG]),
    (turns(pic(base64=TEXT)), [PNG]), (turns(pic(url=f"DATA:image/png;BASE64,{TEXT}")), [PNG]),
    (turns(pic(url="HTTPS://x.y/A.png")), [Picture("https://x.y/A.png")]),
    (turns(pic(url="File:///b/A.png")), [Picture("/b/A.png")]),
    (turns(pic(path="Data/A:b.png")), [Picture("Data/A:b.png")]),
    (turns(pic(image={"bytes": PNG, "path": "x.png"})), [PNG]),
    (turns(pic(bytes=PNG), pic(path="b")), [PNG, Picture("b")]),
    (turns(pic(), images=[{"bytes": PNG, "path": None}]), [PNG]),
    ({"messages": [{"role": "user", "content": "<image>\nwhat ? <image>"}, ANSWER], "images": ["a", "b"]},
        [Picture("a"), Picture("b")]),
    (turns({"type": "text", "text": "<image>!"}, image="a"), [Picture("a")]),
    ({"conversations": [{"from": "human", "value": "<image>what ?"}, {"from": "gpt", "value": "b"}], "image": "a"},
        [Picture("a")]),
    ({"instruction": "<image>what ?", "input": "", "output": "b", "images": ["a"]}, [Picture("a")]),
    ({"prompt": [asked(pic())], "completion": [ANSWER], "images": ["a"]}, [Picture("a")]),
    ({"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "b"}], "image_path": "a"},
        [Picture("a")]),
    ({"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "image_urls": ["a", {"url": "b"}]},
        [Picture("a"), Picture("b")]),
    (turns(pic(), img={"bytes": PNG}), [PNG]),
    ({"instruction": "<image>what ?", "output": "b", "picture_file": "a"}, [Picture("a")]),
])  # fmt: skip
def test_every_form_names_its_image(row, images):
    noted: set[str] = set()
    found = parse_row(WHERE, row, noted=noted)
    assert isinstance(found, Chat) and not noted
    assert list(found.images) == [Picture(data=one) if isinstance(one, bytes) else one for one in images]
    assert all("<image>" not in message.content for message in found.messages)


@pytest.mark.parametrize(("row", "reason"), [
    (turns(pic()), "messages[0].content[0]: the image is named by nothing"),
    (turns(pic(image="s3://a/b.png")), "the address 's3://a/b.png', of none"),
    (turns(pic(image="ftp://a/b.png")), "save it beside the data"),
    (turns(pic(image=7)), "the image is a number, not a path"), (turns(pic(image="")), "the image is no path: ''"),
    (turns(pic(image="a\0b")), "the image is no path"), (turns(pic(image="a", path="b")), "named by image and path"),
    (turns(pic(base64="a%")), "the image is no base64"), (turns(pic(base64="")), "the image has no bytes"),
    (turns(pic(image="data:image/png,abc")), "without base64"),
    (turns(pic(image="a"), {"type": "text", "text": "\ufdd0"}), "U+FDD0"),
    (turns(pic(image="a", weight=0)), "no loss mask of their own"),
    (turns({"type": "video", "video": "a"}), "'video', not a part of type 'text'"),
    ({"messages": [asked(), {"role": "assistant", "content": [pic(image="a")]}]}, "is 'image'"),
    (turns(images=["a"]), "images: 1; places for them in its turns (<image>): 0"),
    (turns(pic(), images=["a", "b"]), "images: 2; places"),
    ({"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "images": ["a"]}, "places for them in"),
    (turns(pic(), images=["a"], image="a"), "both 'images' and 'image'"),
    (turns(pic(), images=[["a"]]), "the image is a list, not a path"),
    (turns(pic(), images=[None]), "the image is named by nothing"),
    (turns(pic(), images=[{"path": None}]), "the image is named by nothing"),
    (turns(pic(bytes="a b!")), "the image is no base64"),
    ({"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "image_path": "a"}, "1 in 'image_path'"),
    (turns(pic(), image_url="a", image_path="b"), "in both 'image_url' and 'image_path'"),
    ({"messages": [{"role": "user", "content": "<image>", "image_path": "a"}, ANSWER]}, "[0] has 'image_path'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>", "image_url": "a"}]}, ANSWER]},
        "messages[0].content[0] has 'image_url', which is not supported"),
    ({"text": "<image> a", "image_path": "a"}, "the row has 'image_path', which is not supported"),
    ({"prompt": "<image>", "chosen": "b", "rejected": "c", "image_url": "a"}, "'image_url', which is not supported"),
    ({"prompt": "<image>", "completion": "c", "image_url": "a"}, "1 in 'image_url'; places for them in its turns"),
    (turns(videos=["a"]), "the row has 'videos', which is not supported"),
    ({"text": "a", "images": ["a"]}, "the row has 'images', which is not supported"),
    ({"prompt": "<image>", "completion": "a", "images": ["a"]}, "places for them in its turns (<image>): 0"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a"]}, "'images', which is not supported"),
])  # fmt: skip
def test_what_names_none(row, reason):
    with pytest.raises(DataError) as caught:
        parse_row(WHERE, row)
    assert reason in caught.value.found and "\n" not in caught.value.found


def test_a_text_keeps_its_words():
    found = parse_row(WHERE, {"messages": [{"role": "user", "content": "an <image> tag"}, ANSWER], "images": []})
    assert isinstance(found, Chat) and found.messages[0].content == "an <image> tag" and not found.images


@pytest.mark.parametrize("more", [{"images": []}, {"images": None}, {"image": None}, {"image": ""}])
def test_a_place_beside_no_images_is_named(more):
    for row, n in (
        ({"messages": [{"role": "user", "content": "<image>?"}, ANSWER]}, 1),
        ({"instruction": "<image>?", "output": "a"}, 1),
        ({"messages": [{"role": "user", "content": "?"}, ANSWER]}, 0),
    ):
        noted, alone = set[str](), set[str]()
        parse_row(WHERE, {**row, **more}, noted=noted)
        parse_row(WHERE, row, noted=alone)
        assert noted == ({"<image> without images"} if n else set()) and not alone


@pytest.mark.parametrize("row", [
    {"text": "a"}, {"prompt": "<image>", "completion": "a"}, {"prompt": "<image>", "chosen": "b", "rejected": "c"},
    {"prompt": [asked(pic())], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "no"}]},
])  # fmt: skip
def test_rows_without_places_name_those_that_have_them(row):
    with pytest.raises(DataError) as caught:
        parse_row(WHERE, {**row, "images": ["a"]})
    assert "write turns (messages, or prompt and completion as lists), for objective: sft" in caught.value.do


def test_what_is_not_read_of_an_image_is_named():
    noted: set[str] = set()
    url = {"url": "a.png", "detail": "low"}
    parse_row(WHERE, turns({"type": "image_url", "image_url": url, "id": 3}), noted=noted)
    assert noted == {"messages[].content[].image_url.detail", "messages[].content[].id"}
    for row in (turns(image_url="a"), turns(pic(), image=PNG, image_path="a")):
        noted = set()
        parse_row(WHERE, row, noted=noted)
        assert len(noted) == 1 and noted < {"image_url", "image_path"}


# --- damaged and hostile files


def bomb(width, height):
    """A PNG whose header alone is large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
JPEG = encoded(NOISE, "JPEG")
BAD = {
    "missing": (None, "No such file"), "empty": (b"", "no image of a known format"),
    "text": (b"not an image", "no image of a known format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a known format"),
    "half-png": (encoded(NOISE)[:4000], "truncated"), "half-jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "header-alone": (PNG[:30], ""), "bomb": (bomb(60_000, 60_000), "pixels"),
    "large": (bomb(12_000, 12_000), "12000 x 12000 pixels; at most 100,000,000 are read"),
    "no-pixels": (bomb(0, 8), ""),
    "a-line": (encoded(Image.new("RGB", (1, 10_000))), "at most 200 times as long as wide"),
    "wide": (encoded(Image.new("RGB", (4000, 3))), "at most 200 times as long as wide"),
    "broken-data": (bomb(40, 40), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_bad_row(name, base, tmp_path):
    raw, reason = BAD[name]
    if raw is not None:
        (tmp_path / "a.png").write_bytes(raw)
    (tmp_path / "good.png").write_bytes(PNG)
    good, bad = (turns(pic(image=file)) for file in ("good.png", "a.png"))
    path = write(tmp_path, good, bad, good)
    begun = time.monotonic()
    with pytest.raises(DataError) as caught:
        read(base, path)
    assert caught.value.asked == f"the row at {path}:2" and "image 1 of 1: " in caught.value.found
    assert reason in caught.value.found and "quarantine" in caught.value.do
    found = read(base, path, "data.bad_rows=quarantine", "data.most_bad=0.5")
    assert [row.where.line for row in found.refused] == [2] and len(found.train) == 2
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "kernel", "link to a device"])
def test_what_is_no_file_does_not_hang(kind, base, tmp_path):
    name = {"fifo": "pipe", "device": "/dev/zero", "folder": "folder", "kernel": "/proc/kmsg"}.get(kind, "link")
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    elif name == "link":
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"image 1 of 1: .*(not a regular file|Operation not permitted)"):
        read(base, write(tmp_path, turns(pic(image=name))))


@pytest.fixture
def site():
    """An address whose /a.png is a picture, /slow never ends, /empty has nothing, and others are missing."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/head":
                with suppress(OSError):
                    for _ in range(60):
                        self.wfile.write(b"HTTP/1.0 200 OK\r\n" if not _ else b"a: b\r\n")
                        time.sleep(0.02)
            places = {"/file": "file:///etc/hostname", "/ftp": "ftp://127.0.0.1:9/a.png", "/moved": "/a.png"}
            found = self.path.removeprefix("http://pictures.example.invalid") in ("/a.png", "/slow", "/empty", "/short")
            self.send_response(302 if self.path in places else 200 if found else 404)
            if self.path in places:
                self.send_header("Location", places[self.path])
            if self.path == "/short":
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"abc" if self.path == "/short" else b"")
            self.wfile.write(PNG if self.path.endswith("/a.png") else b"")
            for _ in range(60 if self.path == "/slow" else 0):
                self.wfile.write(b"x")
                time.sleep(0.02)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_addresses_of_the_web(site, base, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "is_outside", lambda _: True)
    path = write(tmp_path, turns({"type": "image_url", "image_url": {"url": f"{site}/a.png"}}))
    with pytest.raises(DataError, match=r"`data\.remote: true` downloads it"):
        read(base, path)
    (document,) = read(base, path, "data.remote=true").train.documents(0)
    assert document.images[0].picture == Picture(data=PNG) and document.images[0].size == (32, 24)
    monkeypatch.setattr(download, "DOWNLOAD_s", 0.4)
    reader = open_reader(base, "data.remote=true")
    reasons = {
        "/b.png": "404", "/slow": "more than 0.4 s", "/head": "more than 0.4 s", "/empty": "no bytes",
        "/file": "file:///etc", "/ftp": "ftp://", "/short": "97 bytes before its end",
    }  # fmt: skip
    for place, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            reader.look(Picture(f"{site}{place}"), tmp_path)
    assert reader.look(Picture(f"{site}/moved"), tmp_path).size == (32, 24)
    with pytest.raises(ValueError, match="refused"):
        reader.look(Picture("http://127.0.0.1:9/a.png"), tmp_path)


@pytest.mark.parametrize(("host", "found"), [
    ("127.0.0.1:9", "127.0.0.1"), ("localhost:9", ""), ("[::1]:9", "::1"), ("169.254.169.254", "169.254.169.254"),
    ("10.0.0.1", "10.0.0.1"), ("192.168.1.1:80", "192.168.1.1"), ("[::ffff:10.0.0.1]", "10.0.0.1|a00:1"),
    ("[fe80::1]", "fe80::1"), ("[64:ff9b::7f00:1]", "64:ff9b::7f00:1"), ("0.0.0.0:9", "0.0.0.0"), ("2130706433", "127"),
    ("224.0.0.1", "224.0.0.1"), ("[2002:7f00:1::]", "2002:7f00:1::"), ("100.64.0.1", "100.64.0.1"),
])  # fmt: skip
def test_addresses_of_the_own_network(host, found, base, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for form in ("http", "https"):
        with pytest.raises(ValueError, match=rf"({found}).*, an address of your network; save the image"):
            download.download(f"{form}://{host}/a.png", 9)


def test_a_name_that_leads_into_the_own_network(site, monkeypatch):
    """By its address, of which each is asked; and by a redirect of a public site. A proxy is taken as given."""
    public = site.replace("127.0.0.1", "pictures.example.com")
    known = socket.getaddrinfo

    def names(host, *given, **more):
        return known("127.0.0.1" if host == "pictures.example.com" else host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", names)
    with pytest.raises(ValueError, match=r"'pictures\.example\.com' is 127\.0\.0\.1, an address of your"):
        download.download(f"{public}/a.png", 9999)
    asked, outside = list[str](), [True, False]
    monkeypatch.setattr(download, "is_outside", lambda one: not asked.append(one) and outside[len(asked) - 1])
    with pytest.raises(ValueError, match="an address of your network"):
        download.download(f"{public}/moved", 9999)
    assert len(asked) == 2
    monkeypatch.setattr(download, "is_outside", lambda one: one != "127.0.0.1")
    monkeypatch.setenv("http_proxy", site)
    monkeypatch.delenv("no_proxy", raising=False)
    assert download.download("http://pictures.example.invalid/a.png", 9999) == PNG
    with pytest.raises(ValueError, match="an address of your network"):
        download.download(f"{public}/a.png", 9999)


# --- what is read of sound ones


@pytest.mark.parametrize(("form", "mode"), [
    ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "L"), ("PNG", "1"), ("JPEG", "RGB"), ("JPEG", "CMYK"),
    ("JPEG", "L"), ("WEBP", "RGB"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"),
])  # fmt: skip
def test_formats_and_modes(form, mode, base, tmp_path):
    image = draw("circle", "red", 40, 24, 1)
    (tmp_path / "a").write_bytes(encoded(image.convert(mode), form))
    found = read(base, write(tmp_path, turns(pic(image="a")))).train
    (document,) = found.documents(0)
    (seen,) = document.images
    assert seen.size == (40, 24) and seen.grid == (6, 10) and seen.tokens == 15
    reader = open_reader(base)
    with Image.open(tmp_path / "a") as opened:
        size = dict(zip(("shortest_edge", "longest_edge"), (reader.sizes.least, reader.sizes.most), strict=True))
        want = reader.processor(images=[opened.convert("RGB")], size=size, return_tensors="np")["pixel_values"]
    assert np.array_equal(reader.patches(seen), want) and want.shape == (60, 96) and want.std() > 0.02


def test_pixels_that_8_bits_do_not_hold(base, tmp_path):
    wide = Image.fromarray(np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 60)
    (tmp_path / "a.png").write_bytes(encoded(wide, "PNG"))
    with pytest.raises(ValueError, match="I;16, which 8 bits do not hold"):
        open_reader(base).look(Picture("a.png"), tmp_path)


@pytest.mark.parametrize("size", [(7, 30), (4, 4), (40, 7), (1, 1)])
def test_small_photographs(base, tmp_path, size):
    (tmp_path / "a.jpg").write_bytes(encoded(Image.new("RGB", size, "red"), "JPEG"))
    reader = open_reader(base)
    assert reader.patches(reader.look(Picture("a.jpg"), tmp_path)).shape[1] == 96


def test_many_places_in_one_turn(base, tmp_path):
    turn = {"role": "user", "content": f"a{'<image>' * 1500}b"}
    with pytest.raises(DataError, match="1500"):
        read(base, write(tmp_path, {"messages": [turn, ANSWER], "images": ["a.png"]}))


def open_reader(base, *sets):
    config = parse_config(f"{{model: {base}, objective: sft, data: {{path: x}}, output: o}}", "x.yaml", sets)
    tokens = open_tokens(config, base)
    assert tokens is not None
    if isinstance(tokens.images, DataError):
        raise tokens.images
    return tokens.images


TURNED = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("by", ["exif", "xmp"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_photograph(base, tmp_path, form, by):
    exif, notes = Image.Exif(), PngInfo()
    if by == "exif":
        exif[0x0112] = 6
    elif form == "TIFF":
        exif[700] = TURNED
    else:
        notes.add_itxt("XML:com.adobe.xmp", TURNED.decode())
    image = draw("square", "blue", 40, 24, 1)
    options = {"xmp": TURNED} if by == "xmp" and form in ("JPEG", "WEBP") else {"pnginfo": notes}
    (tmp_path / "a").write_bytes(encoded(image, form, exif=exif, **options))
    reader = open_reader(base)
    seen = reader.look(Picture("a"), tmp_path)
    assert seen.size == (24, 40) and seen.grid == (10, 6) and reader.patches(seen).shape == (60, 96)


@pytest.mark.parametrize(("sets", "grid"), [
    ((), (8, 8)), (("data.max_pixels=256",), (4, 4)), (("data.min_pixels=1025", "data.max_pixels=4096"), (10, 10)),
    (("data.min_pixels=1024",), (8, 8)),
])  # fmt: skip
def test_pixels(sets, grid, base, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(draw("circle", "red", 32, 32, 0)))
    reader = open_reader(base, *sets)
    seen = reader.look(Picture("a.png"), tmp_path)
    assert seen.grid == grid and len(reader.patches(seen)) == grid[0] * grid[1]
    assert (reader.identity == open_reader(base).identity) == (not sets)


def test_least_pixels_above_most(base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(NeedsError, match="at least 4,096"):
        open_reader(base, "data.min_pixels=4096").look(Picture("a.png"), tmp_path)


def test_adjacent_images_and_an_image_at_the_end(base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    image = pic(image="a.png")
    talk = [asked(image, image), ANSWER, {"role": "user", "content": [{"type": "text", "text": "and ?"}, image]}]
    found = read(base, write(tmp_path, {"messages": [*talk, ANSWER]}), "data.train_on=all").train
    (document,) = found.documents(0)
    token = open_reader(base).token
    places = [image.at for image in document.images]
    assert len(places) == 3 and all((document.ids[a : a + 12] == token).all() for a in places)
    assert int((document.ids == token).sum()) == 36 and not document.targets[document.ids == token].any()
    assert document.targets.sum() == len(document) - 1 - 36


@pytest.mark.parametrize("inside", range(3))
def test_no_image_is_cut(inside, base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    image = pic(image="a.png")
    row = {"messages": [asked(image), ANSWER, asked(image), ANSWER]}
    path = write(tmp_path, row)
    (whole,) = read(base, path).train.documents(0)
    at = whole.images[1].at
    T = at + (0, 5, 11)[inside]
    sets = (f"batch.seq={T}", f"batch.tokens={T}", "data.too_long=truncate", "data.most_truncated=1")
    found = read(base, path, *sets)
    (document,) = found.train.documents(0)
    assert len(document) == at and len(document.images) == 1


def test_an_image_longer_than_a_row(base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    path = write(tmp_path, turns(pic(image="a.png")))
    sets = ("batch.seq=24", "batch.tokens=24")
    with pytest.raises(DataError, match=r"tokens at .*:1\n.*lower data.max_pixels"):
        read(base, path, *sets)
    for how in ("truncate", "drop"):  # no advice to split, which rows with images are refused with
        with pytest.raises(
            DataError, match=r"nothing is left of 1 rows.*\n.*raise batch.seq, or lower data.max_pixels$"
        ):
            read(base, path, *sets, f"data.too_long={how}", "data.most_truncated=1")


def test_what_holds_bytes(base, tmp_path, monkeypatch):
    """Parquet with bytes, through shards on the disk; the same images in files elsewhere."""
    answer = {**ANSWER, "content": [{"type": "text", "text": ANSWER["content"]}]}
    rows = [{"messages": [asked(pic()), answer], "images": [{"bytes": PNG, "path": "x.png"}]}] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    in_memory = read(base, tmp_path / "rows.parquet", f"data.cache={tmp_path / 'cache'}").train
    monkeypatch.setattr(tokenize, "CHUNK_bytes", 1)
    on_disk = read(base, tmp_path / "rows.parquet", f"data.cache={tmp_path / 'cache'}", "data.workers=1").train
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    (tmp_path / "a.png").write_bytes(PNG)
    file = write(tmp_path, *[turns(pic(image="a.png"))] * 3)
    by_path = read(base, file, f"data.cache={tmp_path / 'cache'}", "data.workers=1").train
    reader = open_reader(base)
    for i in range(3):
        seen = [source.documents(i)[0] for source in (in_memory, on_disk, by_path)]
        assert seen[0].images[0].picture.data == PNG and seen[2].images[0].picture == Picture("a.png")
        made = [reader.patches(document.images[0]) for document in seen]
        assert all(np.array_equal(seen[0].ids, one.ids) for one in seen)
        assert all(np.array_equal(made[0], one) for one in made)


def test_rows_that_differ_by_their_images_alone(base, tmp_path):
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(encoded(draw("circle", colour, 32, 32, 0)))
    rows = [turns(pic(image=f"{c}.png")) for c in ("red", "blue", "red")]
    source: Any = read(base, write(tmp_path, *rows)).train
    a, b, c = source.digests().tolist()
    assert a == c != b


def test_an_image_that_changes_while_a_run_reads_it(base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    source = read(base, write(tmp_path, turns(pic(image="a.png")))).train
    (seen,) = source.documents(0)[0].images
    (tmp_path / "a.png").write_bytes(encoded(draw("circle", "blue", 32, 24, 0)))
    with pytest.raises(DataError, match="it has changed since its row was tokenised"):
        open_reader(base).patches(seen)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="No such file"):
        open_reader(base).patches(seen)


def test_an_image_is_shown_as_one_piece(base, tmp_path):
    """Also where a long document is shown in parts, whose border is inside an image."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    (document,) = read(base, write_rows(tmp_path, 2, most=2)).train.documents(1)
    special, places = preview.special_ids(tokenizer), document.images
    for middle in (0, places[0].at + 3, places[1].at, len(document)):
        parts = ((0, middle), (middle, len(document)))
        found = [p for part in parts for p in preview.token_pieces(tokenizer, document, *part, special)]
        assert [i for piece in found for i in piece.ids] == document.ids.tolist()
        shown = [piece.text for piece in found if piece.text.startswith("image")]
        assert list(dict.fromkeys(shown)) == ["image 32 x 32, 16 tokens", "image 40 x 24, 15 tokens"]
        assert not any(piece.learnt for piece in found if piece.text in shown)
    assert "2 images" in describe_counts(Counts(images=2)) and "image" not in describe_counts(Counts())


# --- what is refused


@pytest.mark.parametrize(("sets", "objective", "found"), [
    (("data.too_long=split",), "sft", "data.too_long: split"), (("data.stream=true",), "sft", "data.stream"),
    (("data.clean.exact_duplicates=true",), "sft", "data.clean"),
    (("model.implementation=transformers",), "sft", "model.implementation: transformers"),
    ((), "pretrain", "objective: pretrain"), ((), "kto", "objective: kto"), ((), "grpo", "objective: grpo"),
])  # fmt: skip
def test_what_does_not_read_images(sets, objective, found, base, tmp_path):
    path = write_rows(tmp_path, 2)
    if objective == "kto":
        rows = [{**json.loads(line), "label": True} for line in path.read_text().splitlines()]
        path = write(tmp_path, *rows)
    with pytest.raises(UserError) as caught:
        read(base, path, *sets, objective=objective)
    assert caught.value.found == found or found in caught.value.found, caught.value
    filtered = found == "data.clean"  # before they are tokenised
    assert filtered or ("rows with images" in caught.value.asked and "rows of text" in caught.value.do)


@pytest.mark.parametrize(("technique", "cut"), [(CudaGraphs(), False), (Wrap(), True)], ids=["recorded", "cut"])
def test_a_technique_that_takes_no_images_is_named(technique, cut, base, tmp_path):
    """Also where rows behind the first ones, which a choice of techniques looks at, have the images."""
    path = write_rows(tmp_path, 2)
    text = f"{{model: {base}, objective: sft, data: {{path: {path}}}, batch: {{seq: {T}, tokens: {T}}}}}"
    config = parse_config(text, "images.yaml", [f"output={path.parent / 'out'}", "train.steps=1"])
    tokens, job = open_tokens(config, base), SimpleNamespace(config=config, layout=Padded())
    if cut:
        technique.data(cast(Any, job))
    assert settle_images(tokens, [technique], job.layout) is None
    with pytest.raises(DataError) as caught:
        read_sources(config, tokens, VOCABULARY)
    assert f"--without {technique.name}" in caught.value.do and "rows with images" in caught.value.asked


def test_filters_do_not_take_rows_for_their_texts(tmp_path):
    rows = [turns(pic(image=f"{n}.png")) for n in range(2)]
    path = write(tmp_path, *rows, turns())
    settings = Cleaning(exact_duplicates=True)
    done = clean_files([path], settings, tokens=None, bad_rows="quarantine", most_bad=1, workers=1)
    assert done.record["bad"]["rows"] == 2 and done.record["kept"]["rows"] == 1
    table = measure_files([path], Task(Cleaning(), "file", NO_RULES, None, None), 1, lambda *_: None, strict=False)
    assert not table.bad, "they are rows where nothing is compared"


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3", "llava", "qwen2_vl", "internvl"])
def test_other_families(kind, base, tmp_path):
    other = tmp_path / "base"
    other.mkdir()
    for file in base.iterdir():
        if file.name != "model.safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    hf = json.loads((base / "config.json").read_text())
    from optrush.data.tokenizer import image_reader

    (other / "config.json").write_text(json.dumps({**hf, "model_type": kind}))
    config = parse_config(f"{{model: {other}, objective: sft, data: {{path: x}}, output: o}}", "x.yaml", [])
    refused = image_reader(config, other, None)
    assert isinstance(refused, DataError) and re.search(kind, refused.found) and "qwen3_vl" in refused.do


@pytest.mark.parametrize(("edit", "found"), [
    (None, "none of preprocessor_config.json"), ({"image_processor_type": "CLIPImageProcessor"}, "a CLIPImage"),
    ({"patch_size": 14}, "patch_size 14, and 4 in the vision_config"), ({"merge_size": 1}, "merge_size 1, and 2"),
])  # fmt: skip
def test_a_processor_of_another_base(edit, found, base, tmp_path):
    for file in base.iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if edit is None:
        (tmp_path / "preprocessor_config.json").unlink()
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **edit}))
    rows = write_rows(tmp_path / "rows", 1)
    with pytest.raises(NeedsError, match=re.escape(found)):
        read(tmp_path, rows)


def test_a_template_that_drops_images(base, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(DataError, match=r"1 images, but the chat template writes <\|image_pad\|> 0 times"):
        read(base, write_rows(tmp_path, 1), f"model.chat_template={template}")


def test_a_placeholder_written_in_a_text(base, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    row = turns(pic(image="a.png"), {"type": "text", "text": "<|image_pad|>"})
    with pytest.raises(DataError, match="a forged turn"):
        read(base, write(tmp_path, row))


# --- what a page shows


def test_a_page_has_small_images(base, tmp_path, capsys):
    """A few, as JPEG in the page itself; of one that is gone the text alone."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 1600, 3), np.uint8))
    (tmp_path / "a.png").write_bytes(encoded(noise))
    (tmp_path / "b.png").write_bytes(PNG)
    rows = [turns(*[pic(image=f"{n}.png") for n in names]) for names in "abb"]
    text = f"model: {base}\nobjective: sft\ndata: {{path: {write(tmp_path, *rows)}}}\nbatch: {{seq: 384, tokens: 384}}"
    (tmp_path / "c.yaml").write_text(f"{text}\ntrain: {{steps: 1}}\noutput: {tmp_path / 'out'}\n")
    show(tmp_path / "c.yaml", out=tmp_path / "page", rows=5, first=0)
    page = (tmp_path / "page" / "data.html").read_text()
    small = [base64.b64decode(held) for held in re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)]
    sizes = [Image.open(io.BytesIO(raw)).size for raw in small]
    assert sizes == [(128, 72), (32, 24), (32, 24)] and max(map(len, small)) < 20_000
    assert "image 1600 x 900, " in page and "data:image" not in capsys.readouterr().out
    reader = open_reader(base)
    seen, few = reader.look(Picture("b.png"), tmp_path), images.thumbnails(2)
    assert few(seen) and few(seen) and few(seen) == ""
    (tmp_path / "b.png").write_bytes(PNG[:-1] + b"!")
    assert images.thumbnails(2)(seen) == ""
    (tmp_path / "b.png").unlink()
    assert images.thumbnails(2)(seen) == ""


# --- what the plan counts


def test_sizes_are_the_processors_own():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(300):
        height, width = (int(n) for n in rng.integers(20, 3000, 2))
        factor = int(rng.choice([8, 28, 32]))
        least = int(rng.integers(64, 5000))
        most = least + int(rng.integers(5000, 2_000_000))
        assert processed_size(height, width, factor, least, most) == smart_resize(height, width, factor, least, most)


@pytest.mark.parametrize("kind", [*BASES, "siglip"])
def test_parameters_of_a_tower(kind):
    """Counted from config.json, by transformers' own module; none of a base whose images are not read."""
    own = copy.deepcopy(BASES["llava" if kind == "siglip" else kind])
    own["text_config"] = {**TEXT_SIZES, **own["text_config"]}
    own["vision_config"] |= {"model_type": "siglip_vision_model"} if kind == "siglip" else {}
    own["vision_config"] |= {} if "model_type" in own["vision_config"] else TOWER | own["vision_config"]
    name = {**NAMES, "siglip": "llava"}.get(kind, kind)
    for given in (own, copy.deepcopy(own)):
        config = CONFIG_MAPPING[name](**given)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config).model
        want = sum(p.numel() for n, p in model.named_parameters() if n.startswith(PARTS))
        assert (sizes := tower_sizes(config.to_dict())) is not None and sizes.parameters == want
        given["vision_config"]["hidden_size"] = 64
    other = {"mistral3": "qwen2_vl"}.get(kind, "idefics3")
    assert tower_sizes({**config.to_dict(), "model_type": other}) is None


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "llava", "pixtral", "mistral3"])
def test_sizes_of_every_family(kind, tmp_path, monkeypatch):
    """The patches of images of any size are those that the processor makes; the plan's tokens are the run's."""
    base = tmp_path / "base"
    write_base(base, kind)
    reader = open_reader(base)
    sizes = reader.sizes
    for width, height in [(1, 1), (64, 48), (7, 300), (300, 7), (41, 41), (16, 640)]:
        (tmp_path / "a.png").write_bytes(encoded(Image.new("RGB", (width, height), "red")))
        if 7 in (width, height) and kind in ("pixtral", "mistral3"):  # where the processor raises, for 40 / 300 of 7
            with pytest.raises(ValueError, match="the short side vanishes once the longest is reduced"):
                reader.look(Picture("a.png"), tmp_path)
            continue
        seen = reader.look(Picture("a.png"), tmp_path)
        assert len(reader.patches(seen)) == np.prod(seen.grid)
        assert (
            len(reader.written(seen.grid)) == seen.tokens == about_tokens(base, None, None)(Picture("a.png"), tmp_path)
        )
    with pytest.raises(ValueError, match="at most 200 times as long as wide"):
        sizes.grid(1, 201)


@pytest.mark.parametrize(("kind", "bound", "found", "do"), [
    ("gemma3", "max_pixels=1000", "a base whose Gemma3ImageProcessor has one size", "remove it"),
    ("llava", "min_pixels=64", "a base whose CLIPImageProcessor has one size", "remove it"),
    ("gemma4", "min_pixels=64", "the largest size within a number of tokens", "remove it"),
    ("gemma4", "max_pixels=100", "100 (data.max_pixels)", "data.max_pixels to at least 4,480"),
    ("mistral3", "min_pixels=64", "a longest edge and enlarges no image", "remove it"),
    ("mistral3", "max_pixels=20", "20 (data.max_pixels)", "data.max_pixels to at least 64"),
    ("mistral3", "max_pixels=700", "", "grid 4 x 6"), ("gemma4", "max_pixels=9000", "", "grid 18 x 30"),
])  # fmt: skip
def test_bounds_of_every_family(kind, bound, found, do, tmp_path):
    write_base(tmp_path, kind)
    if not found:
        high, wide = open_reader(tmp_path, f"data.{bound}").sizes.grid(300, 500)
        assert do == f"grid {high} x {wide}"
        return
    with pytest.raises(NeedsError) as caught:
        _ = open_reader(tmp_path, f"data.{bound}").sizes
    assert found in caught.value.found and do in caught.value.do
    path = write_rows(tmp_path / "rows", 2)
    text = f"{{model: {tmp_path}, objective: sft, data: {{path: {path}}}, output: o}}"
    with pytest.raises(NeedsError) as planned:  # nothing is planned that the run refuses
        decide(parse_config(text, "images.yaml", ["train.steps=1", f"data.{bound}"]))
    assert planned.value.args == caught.value.args


@pytest.mark.parametrize(("kind", "file", "edit", "found"), [
    ("gemma3", "config.json", {"boi_token_index": 7}, "boi_token_id of config.json: 7 is not an added token"),
    ("gemma3", "config.json", {"image_token_index": None}, "image_token_index of config.json: None is no"),
    ("gemma3", "config.json", {"vision_config": {"model_type": "clip_vision_model"}}, "of the kind 'clip"),
    ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan, which cuts an image"),
    ("gemma3", "preprocessor_config.json", {"size": {"height": 40, "width": 40}}, "other patches than 8 x 8"),
    ("llava", "preprocessor_config.json", {"crop_size": {"height": 24, "width": 24}}, "other patches than 6 x 6"),
    ("llava", "preprocessor_config.json", {"do_center_crop": False}, "other patches than 6 x 6"),
    ("mistral3", "processor_config.json", {"image_end_token": "[IMG_END]"}, "None is not an added token"),
    ("mistral3", "config.json", {"text_config": {"vocab_size": 100}}, "260, but the embedding has 100 rows"),
    ("pixtral", "config.json", {"vision_feature_select_strategy": "default"}, "'default', which drops a"),
    ("gemma4", "preprocessor_config.json", {"max_soft_tokens": 71}, "`max_soft_tokens` must be one of"),
])  # fmt: skip
def test_parts_of_a_base_that_do_not_fit(kind, file, edit, found, tmp_path):
    write_base(tmp_path, kind)
    held = json.loads((tmp_path / file).read_text())
    held |= {key: {**held[key], **new} if isinstance(new, dict) and key in held else new for key, new in edit.items()}
    (tmp_path / file).write_text(json.dumps(held))
    with pytest.raises(UserError) as caught:
        _ = open_reader(tmp_path).sizes
    assert found in caught.value.found


def test_the_plan_counts_the_tower_and_the_images_tokens(base, tmp_path):
    path = write_rows(tmp_path, 8, most=2)
    text = f"{{model: {base}, objective: sft, data: {{path: {path}}}, batch: {{seq: {T}, tokens: {T}}}, output: o}}"
    config = parse_config(text, "images.yaml", ["train.steps=1"])
    decided = decide(config)
    hf = json.loads((base / "config.json").read_text())
    assert decided.env.images is not None and decided.env.images.tower == tower_sizes(hf)
    found = estimate(config.data, 0, tokenizer=str(base), base=str(base))
    real = read(base, path).train.lengths()
    assert sum(found) == pytest.approx(real.sum(), rel=0.15)
    write(tmp_path, turns())
    assert decide(config).env.images is None


def test_what_was_tokenised_elsewhere_or_without_the_web_is_not_taken(site, base, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "is_outside", lambda _: True)
    monkeypatch.setattr(tokenize, "CHUNK_bytes", 1)  # small data is kept on the disk, too
    cache = f"data.cache={tmp_path / 'cache'}"
    path = write(tmp_path, turns({"type": "image_url", "image_url": {"url": f"{site}/a.png"}}))
    with pytest.raises(DataError, match=r"`data\.remote: true` downloads it"):
        read(base, path, cache)
    assert read(base, path, cache, "data.remote=true").train.documents(0)[0].images[0].size == (32, 24)
    sizes = []
    for name, wide in (("one", 40), ("two", 56)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.png").write_bytes(encoded(Image.new("RGB", (wide, 24), "red"), "PNG"))
        row = turns(pic(image="a.png"))
        sizes.append(read(base, write(folder, row), cache).train.documents(0)[0].images[0].size)
    assert sizes == [(40, 24), (56, 24)]


def test_a_row_refused_for_its_image_is_tried_again(site, base, tmp_path, monkeypatch):
    """Once the image has come, was mended or may be read; other shards and rows stay as they are."""
    monkeypatch.setattr(download, "is_outside", lambda _: True)
    monkeypatch.setattr(tokenize, "CHUNK_bytes", 1)
    monkeypatch.setattr(tokenize, "SHARD_rows", 1)
    monkeypatch.setattr(tokenize, "BATCH_rows", 1)
    (tmp_path / "good.png").write_bytes(PNG)
    (tmp_path / "half.png").write_bytes(PNG[:60])
    names = ["good.png", "half.png", "missing.png", f"{site}/late", "folder/a.png"]
    rows = [turns(pic(image=name)) for name in names]
    path = write(tmp_path, *rows, {"a": 1})
    sets = (f"data.cache={tmp_path / 'cache'}", "data.bad_rows=quarantine", "data.most_bad=0.9", "data.remote=true")

    def refused():
        return [row.where.line for row in read(base, path, *sets).refused]

    def kept():
        return {(file.name, file.stat().st_mtime_ns) for file in (tmp_path / "cache").rglob("*.safetensors")}

    assert refused() == [2, 3, 4, 5, 6]
    first = kept()
    assert refused() == [2, 3, 4, 5, 6] and kept() == first
    (tmp_path / "half.png").write_bytes(PNG)
    assert refused() == [3, 4, 5, 6] and {name[:6] for name, _ in kept() ^ first} == {"000001"}
    (tmp_path / "missing.png").write_bytes(PNG)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(PNG)
    assert refused() == [4, 6]
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
    before = kept()
    assert refused() == [4, 6] and {name[:6] for name, _ in kept() ^ before} == {"000003"}
    assert len(read(base, path, *sets).train) == 4


@pytest.mark.parametrize(
    ("workers", "device", "ranks", "want"),
    [(0, "cpu", 1, 0), (0, "cuda", 1, 4), (0, "cuda", 8, 2), (0, "cuda", 64, 1), (3, "cuda", 1, 3)],
)
def test_pixels_are_decoded_beside_a_gpu(workers, device, ranks, want, monkeypatch):
    monkeypatch.setattr("optrush.data.tokenize.cores", lambda: 32)
    assert decoding_ahead(Loading(workers), torch.device(device), ranks).workers == want


def test_levels_are_the_processors_own(base, tmp_path):
    """By other means and deviations a colour, and without them."""
    for edit in ({"image_mean": [0.1, 0.4, 0.6], "image_std": [0.2, 0.3, 0.25]}, {"do_normalize": False}):
        folder = tmp_path / "other"
        shutil.copytree(base, folder, dirs_exist_ok=True)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | edit))
        draw("circle", "red", 24, 40, 1).save(tmp_path / "a.png")
        reader = ImageReader(folder, json.loads((base / "config.json").read_text()))
        seen = reader.look(Picture("a.png"), tmp_path)
        made = reader.processor(images=[Image.open(tmp_path / "a.png")], return_tensors="np")
        assert np.array_equal(reader.patches(seen), made["pixel_values"])


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "llava", "pixtral"])
def test_levels_of_every_family(kind, tmp_path):
    """Each has all 256 values, in order; a processor whose pixels do not follow from them is refused."""
    write_base(tmp_path, kind)
    levels = open_reader(tmp_path).levels
    assert levels.shape == (3, 256) and (np.diff(levels) > 0).all()
    reader = open_reader(tmp_path)
    own = reader.processor

    class Drawn:
        patch_size, size, max_soft_tokens = (
            getattr(own, name, None) for name in ("patch_size", "size", "max_soft_tokens")
        )

        def __call__(self, **given: Any) -> Any:
            made = own(**given)
            made["pixel_values"] = made["pixel_values"] + 0.25 * (given.get("do_rescale") is False)
            return made

    reader.__dict__["processor"] = Drawn()
    with pytest.raises(NeedsError) as caught:
        _ = reader.levels
    assert caught.value.found == "pixels that are not one for each value of a colour"


def planned(base, tmp_path, *sets, withs=()):
    """Return the values of the lines of a plan on an H100, and tokens a second."""
    path = tmp_path / "rows.jsonl"
    path = path if path.exists() else write_rows(tmp_path, 8, most=2)
    text = f"{{model: {base}, objective: sft, data: {{path: {path}}}, batch: {{seq: {T}, tokens: {T}}}, output: o}}"
    config = parse_config(text, "images.yaml", ["train.steps=1", *sets], withs)
    speed = predict(config, "h100", 1).tokens_per_s
    assert speed is not None
    (book,), *_ = ledgers(config, parse_hardware("h100")[0], 1)
    return {line.name: line.values for line in book.lines if not line.gone}, speed


def test_the_plan_counts_what_a_tower_computes_and_trains(base, tmp_path):
    sizes = tower_sizes(json.loads((base / "config.json").read_text()))
    assert sizes is not None
    plans = {part: planned(base, tmp_path, f"image.train={part}") for part in ("none", "projector", "tower")}
    lines = {part: found for part, (found, _) in plans.items()}
    assert lines["none"]["tower"] == lines["tower"]["weights.tower"] == sizes.parameters
    assert "gradients.tower" not in lines["none"]
    assert lines["projector"]["gradients.tower"] == sizes.projector == lines["projector"]["states.tower"] / 2
    assert lines["tower"]["gradients.tower"] == sizes.parameters > sizes.projector
    adapted = planned(base, tmp_path, "image.train=tower", withs=["lora"])[0]
    assert adapted["gradients.tower"] == sizes.parameters
    speeds = [speed for _, speed in plans.values()]
    assert sorted(speeds, reverse=True) == speeds
    assert planned(base, tmp_path, "data.max_pixels=256")[0]["tower.flight"] < lines["none"]["tower.flight"]


@pytest.mark.parametrize("kind", [*BASES])
def test_the_projector_of_a_tower(kind):
    own = copy.deepcopy(BASES[kind])
    own["text_config"] = {**TEXT_SIZES, **own["text_config"]}
    own["vision_config"] = (
        own["vision_config"] if "model_type" in own["vision_config"] else TOWER | own["vision_config"]
    )
    config = CONFIG_MAPPING[NAMES.get(kind, kind)](**own)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    module = getattr(model, "visual", model)
    sizes = tower_sizes(config.to_dict())
    assert sizes is not None
    assert sizes.projector == sum(p.numel() for name, p in module.named_parameters() if name.startswith(PROJECTOR))
    assert sizes.merge == {"gemma3": 4, "gemma4": 4, "llava": 1, "pixtral": 1}.get(kind, 4)
    assert (sizes.depth, sizes.width, sizes.inner) == (2 if kind in ("pixtral", "mistral3") else 3, 16, 24)
    assert sizes.flops(64, 64) > 2 * 64 * (sizes.parameters - sizes.projector - sizes.tables)


@pytest.mark.parametrize(("sets", "withs", "found"), [
    (["model.path=null", "model.shape=Qwen/Qwen3-0.6B", "model.tokenizer=TEXT"], [], "a model without a folder"),
    (["model.path=TEXT"], [], "a base of model_type 'llama', whose images are not read"),
    (["objective=pretrain"], [], "objective: pretrain"), (["data.too_long=split"], [], "data.too_long: split"),
    (["model.implementation=transformers"], [], "model.implementation: transformers"),
    ([], ["cuda-graphs"], "a technique that owns the recording of a whole window"),
])  # fmt: skip
def test_no_plan_of_what_does_not_train(sets, withs, found, base, tmp_path):
    """The plan refuses rows with images where a run would, with the same words."""
    text = tmp_path / "text"
    shutil.copytree(base, text)
    (text / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False,
    }))  # fmt: skip
    with pytest.raises(UserError) as caught:
        planned(base, tmp_path, *[each.replace("TEXT", str(text)) for each in sets], withs=withs)
    assert caught.value.found.startswith(found) and caught.value.asked == "to train on rows with images"
