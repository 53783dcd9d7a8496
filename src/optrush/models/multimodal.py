"""Read the language model of a model of images and text from its files, and keep all other tensors as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from optrush.errors import NeedsError
from optrush.models.text_part import LAYOUTS, is_text, layout
from optrush.models.weights import Folder


class TextFolder(Folder):
    """A folder whose tensors of the language model have transformers' names; the others are in `others`."""

    def __init__(self, folder: Path, names: tuple[str, str] = LAYOUTS[0]) -> None:
        """names: prefixes in transformers of the language model and of its head."""
        super().__init__(folder)
        found = layout(self.files)
        if found is None:
            asked, do = f"the language model in {folder}", "check that config.json fits the weights"
            raise NeedsError(asked, "no tensor of its embedding in any known layout", do)
        prefix, head = found
        mine = [name for name in self.files if is_text(name, found)]
        named = {
            (
                names[1] + name.removeprefix(head) if name.startswith(head) else names[0] + name.removeprefix(prefix)
            ): name
            for name in mine
        }
        self.others = {name: file for name, file in self.files.items() if name not in set(mine)}
        self.files = {ours: self.files[name] for ours, name in named.items()}
        self.stored_names = {ours: name for ours, name in named.items() if ours != name}

    def stored_name(self, name: str) -> str:
        return self.stored_names.get(name, name)


class OtherTensors(Mapping[str, Tensor]):
    """Tensors of a folder that a run does not read, by name; read when they are exported."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.names = sorted(names)

    def __getitem__(self, name: str) -> Tensor:
        stored: Any = Folder(self.folder)._slice(name)
        values: Tensor = stored[...] if stored.get_shape() else stored[:]
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
