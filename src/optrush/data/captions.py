"""Make rows from a folder of captioned images, with metadata.jsonl, metadata.csv or a text file per image."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optrush.errors import DataError
from optrush.files import parse_json, read_text, write_whole

SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif"])
LISTS = ("metadata.jsonl", "metadata.csv")
FILE, CAPTION = ("file_name", "image", "path", "file"), ("text", "caption", "description", "answer")
QUESTION, ASKED = ("question", "prompt"), "Describe this image."
NAMED = 3  # files in an error
SIGNED = "utf-8-sig"  # without the byte order mark that some programs write


def has_images(folder: Path) -> bool:
    """Return whether a folder has images, or a list of some."""
    return folder.is_dir() and (_list(folder) is not None or any(_images(folder)))


def write_captions(folder: Path, to: Path) -> int:
    """Write a row per image of a folder, with its path relative to the rows file; return the number of rows.

    Raises DataError: an image without a caption, a caption without an image, or no image.
    """
    listed = _list(folder)
    captions = list(_beside(folder) if listed is None else _listed(listed))
    asked = f"captions of the images in {folder}"
    if not captions:
        raise DataError(asked, "no image", "name a folder with images and their captions")
    if listed is not None:
        named = {os.path.realpath(image) for image, _, _ in captions}
        images = list(_images(folder))
        bare = [path.name for path in images if os.path.realpath(path) not in named]
        what, do = f"of {len(images)} are not in {listed.name}", f"list them in {listed.name}, or take them out"
        _refuse_bare(asked, bare, what, do)
    lines = []
    for image, question, caption in captions:
        part = {"type": "image", "image": os.path.relpath(image, to.parent)}
        if any("\ud800" <= c <= "\udfff" for c in part["image"]):
            raise DataError(asked, f"the file name {part['image']!a} is not UTF-8", "rename that file")
        user = {"role": "user", "content": [part, {"type": "text", "text": question}]}
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": caption}]}, ensure_ascii=False))
    write_whole(to, "\n".join(lines) + "\n")
    return len(lines)


def _list(folder: Path) -> Path | None:
    return next((folder / name for name in LISTS if (folder / name).is_file()), None)


def _images(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file())


def _beside(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each image, the question, and the caption in its text file."""
    images = list(_images(folder))
    bare = [path.name for path in images if not path.with_suffix(".txt").is_file()]
    asked, do = f"captions of the images in {folder}", "write NAME.txt beside NAME.jpg, or list them in metadata.jsonl"
    _refuse_bare(asked, bare, f"of {len(images)} have none", do)
    for path in images:
        beside = path.with_suffix(".txt")
        try:
            caption = read_text(beside, SIGNED).strip()
        except UnicodeDecodeError:
            raise DataError(asked, f"{beside} is not UTF-8", "save it as UTF-8") from None
        if not caption:
            raise DataError(asked, f"{beside} is empty", "write a caption, or remove the image")
        yield path, ASKED, caption


def _refuse_bare(asked: str, bare: list[str], what: str, do: str) -> None:
    if bare:
        more = f", and {len(bare) - NAMED} more" if len(bare) > NAMED else ""
        raise DataError(asked, f"{len(bare)} {what}: {', '.join(bare[:NAMED])}{more}", do)


def _listed(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each image that a list names, its question and its caption."""
    asked = f"captions of the images in {path.parent}"
    do = f"give each line one of {', '.join(FILE)} and one of {', '.join(CAPTION)}"
    for number, row in _lines(path):
        values = [next((row[k] for k in keys if row.get(k)), None) for keys in (FILE, CAPTION, QUESTION)]
        name, caption, question = (value.strip() if isinstance(value, str) else value for value in values)
        if not isinstance(name, str) or not isinstance(caption, str) or not caption:
            what = f"one of {', '.join(CAPTION if isinstance(name, str) else FILE)}"
            raise DataError(asked, f"{path}:{number} has no text in {what}", do)
        if not (path.parent / name).is_file():
            raise DataError(
                asked, f"{path}:{number} names {name}, which does not exist", "fix the name, or add the file"
            )
        yield path.parent / name, question if isinstance(question, str) and question else ASKED, caption


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each line of a list; empty lines are skipped, invalid ones raise DataError."""
    asked = f"captions of the images in {path.parent}"
    try:
        text = read_text(path, SIGNED)
    except UnicodeDecodeError:
        raise DataError(asked, f"{path} is not UTF-8", "save it as UTF-8") from None
    if path.suffix == ".csv":
        table = csv.DictReader(io.StringIO(text))
        try:
            yield from ((table.line_num, row) for row in table)
        except csv.Error as error:
            raise DataError(asked, f"{path}, from line {table.line_num} on: {error}", "close its quotes") from None
        return
    for number, line in enumerate(text.split("\n"), 1):  # other line separators may be in a caption
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError:
            row = line
        if isinstance(row, dict):
            yield number, row
        elif row is not None:
            raise DataError(asked, f"{path}:{number} is not a JSON object", "fix that line, or remove it")
