"""Read the images of rows: find them in a row, check them, and make the patches for the base model's vision tower.

A row has an image as a path or as bytes. Tokenization reads and decodes each image once, at a fraction of its size if
its format allows that. A damaged image makes a bad row and does not end a run. Pixels are decoded when a batch is made:
only the pixels of prefetched batches are in memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optrush.config import Config
from optrush.console import transformers_silenced
from optrush.data.download import REMOTE, download
from optrush.data.image_sizes import ImageSizes, sizes_of
from optrush.data.strict_json import kind_of, quoted
from optrush.errors import DataError, NeedsError, UserError, first_line
from optrush.files import open_file, parse_json, read_file, read_text
from optrush.models.families import TOWER_BASES, TowerSpec
from optrush.models.text_part import image_token, is_multimodal, reads_mutually, tower_sizes, tower_spec
from optrush.tokenizer_files import PROCESSORS

MARK = "\ufdd0"  # marks an image in a turn's text: a code point that texts do not have
PLACE = "<image>"  # marks an image in the texts of a row with `images`
# Keys of images in other tools: `image_path`, `img`, `picture_urls`.
NAMING = re.compile(r"(?i)(image|img|picture|photo)s?(_?(url|uri|path|file|file_?name|bytes|base64|b64|data)s?)?")
IMAGE_PARTS = ("image", "image_url")  # types of parts of a turn's content
SCHEMES = ("data", "http", "https", "file")
SOURCES = ("bytes", "base64", "image", "image_url", "url", "path")  # keys of such a part
# Pillow's decoders for these are in common use; others run external programs (EPS) or are rarely tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MOST_FILE_bytes, MOST_PIXELS = 64 << 20, 100_000_000  # per image; phones make up to 16 MiB and 50 million pixels
USUAL = 256.0  # assumed placeholders of an image that cannot be read
LONGEST_PATH_chars = 4096
PLAIN = {"do_rescale": False, "do_normalize": False}  # processor options that keep colour values unchanged
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange width and height


class Picture(NamedTuple):
    """An image in a row: the path of a file, or its bytes."""

    path: str = ""  # absolute, or relative to the folder of the row's file; or a URL
    data: bytes = b""


class SeenImage(NamedTuple):
    """An image of a document."""

    at: int  # position of its first token
    tokens: int  # number of its tokens
    grid: tuple[int, int]  # patches in height and width
    size: tuple[int, int]  # pixels in width and height, in the file
    digest: int  # of its bytes
    picture: Picture
    folder: Path = Path()  # of the row's file


# A shard stores each image as a row of numbers: the fields of `SeenImage`, the end of its path or bytes among those of
# all images, and whether these are bytes. An image's position counts through all tokens of the shard.
COLUMNS = 9


def pack_images(images: Sequence[SeenImage], before: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return images as (I * COLUMNS,) int64 and (bytes,) uint8; `before`: tokens before each image's document."""
    held = [image.picture.data or image.picture.path.encode("utf-8", "surrogatepass") for image in images]
    ends = np.cumsum([len(data) for data in held])
    rows = [
        (image.at + n, image.tokens, *image.grid, *image.size, image.digest, end, bool(image.picture.data))
        for image, n, end in zip(images, before, ends, strict=True)
    ]
    return np.array(rows, np.int64).reshape(-1), np.frombuffer(b"".join(held), np.uint8)


def unpack_images(table: np.ndarray, held: np.ndarray, start: int, end: int) -> tuple[SeenImage, ...]:
    """Return the images among the tokens [start, end) of a shard, with positions relative to `start`."""
    rows = table.reshape(-1, COLUMNS)
    images = []
    for k in range(*np.searchsorted(rows[:, 0], (start, end)).tolist()):
        at, tokens, high, wide, width, height, digest, last, inline = rows[k].tolist()
        raw = held[rows[k - 1, 7] if k else 0 : last].tobytes()
        given = Picture(data=raw) if inline else Picture(raw.decode("utf-8", "surrogatepass"))
        images.append(SeenImage(at - start, tokens, (high, wide), (width, height), digest, given))
    return tuple(images)


def as_picture(found: Any) -> Picture:
    """Return the image in a value of a row; raises ValueError with the reason if there is none."""
    if isinstance(found, dict):
        given = {key: found[key] for key in SOURCES if found.get(key) is not None}
        if not given or (len(given) > 1 and given.keys() != {"bytes", "path"}):
            raise ValueError(f"is named by {' and '.join(given) or 'nothing'}, not by one of {', '.join(SOURCES)}")
        key = next(iter(given))
        if key in ("bytes", "base64") and isinstance(given[key], str):
            return Picture(data=_decoded(given[key]))
        return as_picture(given[key])
    if isinstance(found, bytes):
        if not found:
            raise ValueError("has no bytes")
        return Picture(data=found)
    if not isinstance(found, str):
        raise ValueError(f"is {kind_of(found)}, not a path or an object with one")
    scheme, colon, rest = found[:8].partition(":")  # in upper or lower case
    found = f"{scheme.lower()}:{rest}{found[8:]}" if colon and scheme.lower() in SCHEMES else found
    if found.startswith("data:"):
        head, comma, body = found.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError(f"is a data: address without base64: {quoted(found[:40])}")
        return Picture(data=_decoded(body))
    if found.startswith(REMOTE):
        return Picture(found)
    if "://" in found and not found.startswith("file://"):
        raise ValueError(
            f"is the address {quoted(found[:80])}, of none of {', '.join(REMOTE)}; save it beside the data"
        )
    path = found.removeprefix("file://")
    if not path.strip() or "\0" in path or len(path) > LONGEST_PATH_chars:
        raise ValueError(f"is no path: {quoted(path[:40])}")
    return Picture(path)


def _decoded(text: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is no base64: {error}") from None
    if not data:
        raise ValueError("has no bytes")
    return data


def image_keys(found: dict[str, Any], noted: set[str] | None = None) -> list[str]:
    """Return the keys of images in a row or turn: `images` and `image`, else others if there is a place for an image.

    noted: gets `<image> without images` for a row with a place whose `images` or `image` is empty.
    """
    named = [key for key, value in found.items() if NAMING.fullmatch(key) and value not in (None, "", [], {})]
    usual = [key for key in named if key in ("images", "image")]
    if noted is not None and not named and {"images", "image"} & found.keys() and _has_place(found):
        noted.add(f"{PLACE} without images")
    return usual or (named if named and _has_place(found) else [])


def _has_place(value: Any) -> bool:
    """Return whether a value of a row has a place for an image, but no image there."""
    if isinstance(value, dict):
        empty = value.get("type") in IMAGE_PARTS and all(value.get(key) is None for key in SOURCES)
        return empty or any(map(_has_place, value.values()))
    return any(map(_has_place, value)) if isinstance(value, list) else isinstance(value, str) and PLACE in value


def place_images(found: dict[str, Any], named: list[str], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the row with its images moved into its turns: at each `<image>`, or into image parts without an image.

    Args:
        named: the keys of its images.
        keys: the keys of its turns, lists of objects.

    Raises ValueError: the number of images differs from the number of places.
    """
    given = [found[key] for key in named]
    rest = {key: value for key, value in found.items() if key not in ("images", "image", *named)}
    listed = given[0] if isinstance(given[0], list) else [given[0]]
    left, places = iter(listed), 0

    def parts(content: list[Any]) -> Iterator[Any]:
        """Yield the parts of a turn with an image part for each place; count the places in `places`."""
        nonlocal places
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str) and PLACE in part["text"]:
                for n, text in enumerate(part["text"].split(PLACE)):
                    if n:
                        places += 1
                        yield {"type": "image", "image": next(left, None)}
                    if text:
                        yield {**part, "text": text}
            elif kind in IMAGE_PARTS and all(part.get(key) is None for key in SOURCES):
                places += 1
                yield {**part, "type": "image", "image": next(left, None)}
            else:
                yield part

    def turn(message: Any) -> Any:
        key = "value" if isinstance(message, dict) and message.get("from") is not None else "content"
        content = message.get(key) if isinstance(message, dict) else None
        if isinstance(content, str) and PLACE in content:
            content = [{"type": "text", "text": content}]
        return {**message, key: list(parts(content))} if isinstance(content, list) else message

    for key in keys:
        if isinstance(rest.get(key), list):
            rest[key] = [turn(message) for message in rest[key]]
    if len(given) > 1 or places != len(listed):
        where = "" if named[0] in ("images", "image") else f" in {named[0]!r}"
        where = where if len(named) == 1 else f" in both {' and '.join(map(repr, named))}"
        raise ValueError(f"images: {len(listed)}{where}; places for them in its turns ({PLACE}): {places}")
    return rest


def about_tokens(folder: Path, least: int | None, most: int | None) -> Callable[[Picture, Path], float]:
    """Return a function that estimates an image's tokens, without transformers; USUAL if it cannot be read.

    Raises NeedsError: the base does not support these bounds, or the first is larger.
    """
    try:
        hf, given = parse_json(read_text(folder / "config.json")), dict[str, Any]()
        for name in PROCESSORS[1::-1]:
            if (folder / name).is_file():
                settings = parse_json(read_text(folder / name))
                given |= settings.get("image_processor") or settings
        sizes = sizes_of(hf, given.get, least, most)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError, UserError) as error:
        if isinstance(error, NeedsError) and (least, most) != (None, None):
            raise
        return lambda *_: USUAL  # the run reports it

    def tokens(given: Picture, at: Path) -> float:
        try:
            if given.path.startswith(REMOTE):
                return USUAL
            with _opened(_bytes(given, at)) as image:
                return sizes.tokens(sizes.grid(image.height, image.width))
        except ValueError:  # the run reports it
            return USUAL

    return tokens


def obstacle(config: Config, base: Path | None, hf: Any) -> DataError | None:
    """Return the error for rows with images, from the configuration and the base's config.json; None if supported."""
    asked, text = "to train on rows with images", "use rows of text"
    if base is None or hf is None:
        found = "a model without a folder: its tower has no weights"
        return DataError(asked, found, f"name one (model.path), or {text}")
    kind, named = hf.get("model_type"), f"a base of one of {', '.join(TOWER_BASES)}"
    if tower_spec(hf) is None:
        tower = hf["vision_config"].get("model_type") if kind in TOWER_BASES and is_multimodal(hf) else None
        tower = "" if tower is None else f" with a tower of the kind {tower!r}"
        found = f"a base of model_type {kind!r}{tower}, whose images are not read"
        return DataError(asked, found, f"take {named}, or {text}")
    obstacles = (
        (config.objective != "sft" or config.loss is not None, f"objective: {config.objective}", "objective: sft"),
        (config.model.implementation == "transformers", "model.implementation: transformers", "leave it out"),
        (config.data.clean is not None, "data.clean, which compares texts alone", "leave data.clean out"),
        (config.data.too_long == "split", "data.too_long: split, which cuts what follows an image from it",
         "choose data.too_long: truncate or drop"),
        (config.data.stream, "data.stream", "leave data.stream out"),
    )  # fmt: skip
    return next((DataError(asked, found, f"{do}, or {text}") for met, found, do in obstacles if met), None)


@dataclass(frozen=True)
class ImageReader:
    """Read images like the base's image processor.

    Args:
        folder: of the base.
        hf: its config.json.
        least, most: pixels of an image (`data.min_pixels`, `data.max_pixels`); None: the processor's bounds.
        remote: `data.remote`.
        marks: ids written with placeholders: after each row and after the last; or before and after all placeholders.
        frame: a template's text for an image, and its replacement by the base's processor; "": none.
    """

    folder: Path
    hf: Any
    least: int | None = None
    most: int | None = None
    remote: bool = False  # download images from URLs
    marks: tuple[int, ...] = ()
    frame: tuple[str, str] = ("", "")

    @cached_property
    def spec(self) -> TowerSpec:
        """The specification of the base's vision tower."""
        spec = tower_spec(self.hf)
        assert spec is not None
        return spec

    @property
    def token(self) -> int:
        """The id of a placeholder."""
        return int(image_token(self.hf))

    @property
    def mutual(self) -> bool:
        """Whether an image's placeholders attend to each other in both directions, in some layers."""
        return reads_mutually(self.hf)

    @property
    def identity(self) -> str:
        """A digest of all settings that determine an image's tokens."""
        parts = [read_file(self.folder / name) for name in PROCESSORS if (self.folder / name).is_file()]
        facts: list[Any] = [self.hf.get("model_type"), self.token, self.least, self.most, self.remote]
        facts += [self.marks, self.frame, self.hf.get("vision_config")]
        return hashlib.sha256(b"\0".join([json.dumps(facts).encode(), *parts])).hexdigest()

    @cached_property
    def processor(self) -> Any:
        """The transformers image processor; raises NeedsError if it is missing or does not fit the tower."""
        asked = f"the image processor of {self.folder}"
        if not any((self.folder / name).is_file() for name in PROCESSORS):
            do = "copy preprocessor_config.json from the base's page into that folder"
            raise NeedsError(asked, f"none of {', '.join(PROCESSORS[:2])}", do)
        try:
            with transformers_silenced():
                from transformers import AutoImageProcessor

                kind: Any = AutoImageProcessor

                made = kind.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # any class: it depends on the error in the files
            raise NeedsError(asked, first_line(error), "download that folder again") from None
        vision, do = self.hf["vision_config"], "take the preprocessor_config.json that belongs to the base"
        kinds = self.spec.processors
        if not type(made).__name__.startswith(kinds):
            raise NeedsError(asked, f"a {type(made).__name__}, not a {' or '.join(kinds)}", do)
        if getattr(made, "do_pan_and_scan", None):
            raise NeedsError(asked, "do_pan_and_scan, which cuts an image into several", "set it to false there")
        pairs = (("patch_size",) * 2, ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2)
        for name, key in pairs if self.spec.sizes == "bounded" else ():
            if key in vision and getattr(made, name) != vision[key]:
                found = f"{name} {getattr(made, name)}, and {vision[key]} in the vision_config of config.json"
                raise NeedsError(asked, found, do)
        return made

    @cached_property
    def sizes(self) -> ImageSizes:
        """The sizes of images; raises NeedsError if the processor's sizes do not match config.json."""
        made = self.processor
        sizes = sizes_of(self.hf, lambda name: getattr(made, name, None), self.least, self.most)
        from PIL import Image

        grid = sizes.grid(48, 64)
        wrong = f"an image of 64 x 48 pixels has other patches than {grid[0]} x {grid[1]}, those by config.json"
        try:
            if self._prepared(Image.new("RGB", (64, 48)), sizes, grid, {}) is not None:
                return sizes
        except ValueError as error:
            wrong = first_line(error)
        do = "take the preprocessor_config.json that belongs to the base"
        raise NeedsError(f"the image processor of {self.folder}", wrong, do)

    def _prepared(
        self, image: Any, sizes: ImageSizes, grid: tuple[int, int], options: dict[str, Any]
    ) -> np.ndarray | None:
        """Return an image's patches of one frame, (P, colours, values per colour); None if they do not match its grid.

        options: additional arguments of the processor; with PLAIN, colours stay integers.
        """
        made = self.processor(images=[image], return_tensors="np", **sizes.options, **options)
        values, (high, wide), patch = np.asarray(made["pixel_values"], np.float32), grid, sizes.patch
        if self.spec.sizes == "bounded":  # frames are in the middle, all equal
            right = made["image_grid_thw"].tolist() == [[1, *grid]]
            return values.reshape(len(values), 3, -1, patch**2)[:, :, 0] if right else None
        if self.spec.sizes == "budget":  # colours last
            places = made["image_position_ids"][0]
            held = places[(places >= 0).all(-1)]
            right = len(held) == high * wide and held[-1].tolist() == [wide - 1, high - 1]
            return values[0, : high * wide].reshape(high * wide, -1, 3).swapaxes(1, 2) if right else None
        side = math.isqrt(sizes.most) if self.spec.sizes == "one" else 0  # the rest of a side has no patch
        if values.shape != (1, 3, side or high * patch, side or wide * patch):
            return None
        cut = values[0, :, : high * patch, : wide * patch].reshape(3, high, patch, wide, patch)
        return cut.transpose(1, 3, 0, 2, 4).reshape(high * wide, 3, -1)

    def written(self, grid: tuple[int, int]) -> np.ndarray:
        """Return the token ids of an image, (n,) int32."""
        high, wide = (n // self.sizes.merge for n in grid)
        if self.spec.frame == "rows":
            rows = np.full((high, wide + 1), self.token, np.int32)
            rows[:, -1], rows[-1, -1] = self.marks
            return rows.reshape(-1)
        ids = np.full(self.sizes.tokens(grid), self.token, np.int32)
        if self.spec.frame == "ids":
            ids[0], ids[-1] = self.marks
        return ids

    def look(self, given: Picture, folder: Path) -> SeenImage:
        """Decode an image and return its size, grid and number of tokens; raises ValueError for a bad image."""
        if given.path.startswith(REMOTE):
            if not self.remote:
                raise ValueError(f"the address {quoted(given.path[:80])}; `data.remote: true` downloads it")
            given = Picture(data=download(given.path, MOST_FILE_bytes))
        raw = _bytes(given, folder)
        with _opened(raw) as image:
            width, height = image.size
            image.draft("RGB", (max(1, width // 8), max(1, height // 8)))  # faster for JPEG; still reads all of it
            if image.format != "TIFF" and image.getexif().get(ORIENTATION) in TURNED:
                width, height = height, width
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"pixels of the mode {image.mode}, which 8 bits do not hold; save it with 8")
            image.load()
            if image.format == "TIFF":  # loading applies its orientation
                width, height = image.size
        grid = self.sizes.grid(height, width)
        return SeenImage(0, self.sizes.tokens(grid), grid, (width, height), _digest(raw), given, folder)

    def flops(self, seen: SeenImage) -> float:
        """Return the FLOPs of the tower's forward pass on an image."""
        sizes, patches = tower_sizes(self.hf), math.prod(seen.grid)
        return 0.0 if sizes is None else sizes.flops(patches, patches)

    @cached_property
    def levels(self) -> np.ndarray:
        """The processor's result for each of the 256 values of a colour, (colours, 256) float32.

        Raises NeedsError: the result for a value depends on other pixels.
        """
        sizes, levels, known = self.sizes, np.zeros((3, 256), np.float32), np.zeros((3, 256), bool)
        if self.spec.sizes in ("bounded", "longest"):  # else sizes are fixed, or few
            side = sizes.factor * -(-16 // sizes.factor)
            sizes = replace(sizes, least=side**2, most=side**2)
        side = math.isqrt(sizes.most) // (unit := 1 if self.spec.sizes == "one" else sizes.factor) * unit
        colour, noise = np.arange(3)[:, None], np.random.default_rng(0).integers(0, 256, 48 * 64)
        for shown, values in ((sizes, np.arange(side**2)), (sizes, np.arange(side**2) + 128), (self.sizes, noise)):
            high, wide = (48, 64) if values is noise else (side, side)
            image = np.repeat((values % 256).astype(np.uint8).reshape(high, wide, 1), 3, 2)
            raw, made = (self._prepared(image, shown, shown.grid(high, wide), given) for given in (PLAIN, {}))
            assert raw is not None and made is not None
            place = raw.astype(np.uint8)
            alike = not known[colour, place].all() or np.allclose(levels[colour, place], made, 0, 1e-6)
            if not alike or not np.array_equal(place, raw):
                what = "pixels that are not one for each value of a colour"
                do = "take the preprocessor_config.json that belongs to the base"
                raise NeedsError(f"the image processor of {self.folder}", what, do)
            levels[colour, place], known[colour, place] = made, True
        return levels

    def patches(self, seen: SeenImage) -> np.ndarray:
        """Return the processor's values of an image's patches, one colour after the other, (P, values) float32.

        Raises DataError: like `colours`.
        """
        colours = self.colours(seen)
        made: np.ndarray = self.levels[np.arange(3)[:, None, None], colours.reshape(len(colours), 3, 1, -1)]
        return made.repeat(int(getattr(self.processor, "temporal_patch_size", 1)), 2).reshape(len(colours), -1)

    def colours(self, seen: SeenImage) -> np.ndarray:
        """Return the colours of an image's patches, of one frame, one colour after the other: (P, values) uint8.

        Raises DataError: the image has changed since its row was tokenized.
        """
        asked = f"the image {seen.picture.path or 'in a row'} of {seen.folder}"
        do = "leave images alone while a run reads them; to read them anew, remove the folder data.cache names"
        try:
            raw = _bytes(seen.picture, seen.folder)
            if _digest(raw) != seen.digest:
                raise DataError(asked, "it has changed since its row was tokenised", do)
            with _opened(raw) as image:
                from PIL import ImageOps

                upright = ImageOps.exif_transpose(image).convert("RGB")  # as transformers loads images
                values = self._prepared(upright, self.sizes, seen.grid, PLAIN)
        except ValueError as error:
            raise DataError(asked, str(error), do) from None
        if values is None:
            found = f"{seen.grid[0]} x {seen.grid[1]} patches by its size, and others by the image processor"
            raise DataError(asked, found, "report it with the image and the base's preprocessor_config.json")
        return values.reshape(len(values), -1).astype(np.uint8)


SIDE_pixels = 128  # of a thumbnail


def thumbnails(most: int) -> Callable[[SeenImage], str]:
    """Return a function that returns an image's thumbnail as a data: URL; "" after `most` calls, or if it is gone."""
    left = iter(range(most))

    def small(seen: SeenImage) -> str:
        """Return an image's thumbnail as a data: URL; "" after `most` calls, or if it changed or is unreadable."""
        try:
            raw = _bytes(seen.picture, seen.folder) if next(left, None) is not None else b""
            if not raw or _digest(raw) != seen.digest:
                return ""
            with _opened(raw) as image:
                from PIL import ImageOps

                image.draft("RGB", (2 * SIDE_pixels,) * 2)
                made, file = ImageOps.exif_transpose(image).convert("RGB"), io.BytesIO()
                made.thumbnail((SIDE_pixels,) * 2)
                made.save(file, "JPEG", quality=75)
        except ValueError:
            return ""
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

    return small


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def _bytes(given: Picture, folder: Path) -> bytes:
    """Return the bytes of an image; raises ValueError: not a regular file, or more than MOST_FILE_bytes."""
    if given.data:
        size, raw = len(given.data), given.data
    else:
        path = folder / given.path
        try:
            with open_file(path) as file:  # open once: the file may be replaced meanwhile
                raw = file.read(MOST_FILE_bytes + 1)
                size = max(len(raw), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or first_line(error)}") from None
    if size > MOST_FILE_bytes:
        raise ValueError(f"{size:,} bytes; at most {MOST_FILE_bytes:,} are read")
    return raw


@contextmanager
def _opened(raw: bytes) -> Iterator[Any]:
    """Open an image of one of FORMATS; errors of its decoder within the context become ValueError."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large images, rejected below, and damaged metadata
        try:
            with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
                width, height = image.size
                if not 0 < width * height <= MOST_PIXELS:
                    raise ValueError(f"{width} x {height} pixels; at most {MOST_PIXELS:,} are read")
                yield image
        except (MemoryError, DataError, NeedsError):
            raise
        except UnidentifiedImageError:
            raise ValueError(f"no image of a known format ({', '.join(FORMATS)})") from None
        except Exception as error:  # any class: it depends on the decoder
            raise ValueError(first_line(error)) from None
