"""Read the language model of an image-text model from its files, and keep all other tensors unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from optrush.errors import NeedsError
from optrush.models.text_part import LAYOUTS, is_text, layout
from optrush.models.weights import Folder


class TextFolder(Folder):
    """A folder whose language model tensors have transformers' names; the others are in `others`."""

    def __init__(self, folder: Path, names: tuple[str, str] = LAYOUTS[0]) -> None:
        """names: transformers' prefixes of the language model and of its head."""
        super().__init__(folder)
        known = layout(self.files)
        if known is None:
            asked, do = f"the language model in {folder}", "check that config.json fits the weights"
            raise NeedsError(asked, "no tensor of its embedding in any known layout", do)
        prefix, head = known
        texts = [name for name in self.files if is_text(name, known)]
        named = {
            (
                names[1] + name.removeprefix(head) if name.startswith(head) else names[0] + name.removeprefix(prefix)
            ): name
            for name in texts
        }
        self.others = {name: file for name, file in self.files.items() if name not in set(texts)}
        self.files = {ours: self.files[name] for ours, name in named.items()}
        self.stored_names = {ours: name for ours, name in named.items() if ours != name}

    def stored_name(self, name: str) -> str:
        return self.stored_names.get(name, name)


class OtherTensors(Mapping[str, Tensor]):
    """Tensors of a folder that a run does not use, by name; read at export."""

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
