"""Print which published configurations of other trainers `optrush import` takes, and by which key it refuses others.

    python benchmarks/imports.py FOLDER [PATTERN]

FOLDER holds their examples, which are not part of this repository. Of what is imported, the techniques are instantiated
and their claims and needs checked on an H200, with their own model if its config.json is known here; else with the
built-in one, whose linears have other names: all of them are adapted.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from optrush.cli.import_config import translate
from optrush.config import Config, Model
from optrush.decide import decide
from optrush.errors import UserError
from optrush.hardware import parse_hardware
from optrush.models.source import known_config


def planned(config: Config, ranks: int) -> None:
    """Raise UserError unless the configuration can be planned."""
    with_ = {name: dict(options) for name, options in config.with_.items()}
    model = config.model
    for options in with_.values():
        options.pop("init", None)
    if known_config(model.path or model.shape) is None:
        model = Model(path="tiny")
        with_ |= {name: {**with_[name], "targets": "auto"} for name in ("lora",) if name in with_}
    changes = {"model": model, "with_": with_, "data": config.data.model_copy(update={"cache": None})}
    decide(config.model_copy(update=changes), ranks=ranks, device=parse_hardware("h200")[0])


def main() -> None:
    folder, pattern = Path(sys.argv[1]), next(iter(sys.argv[2:]), "*.y*ml")
    good, keys = 0, Counter[str]()
    files = sorted(folder.rglob(pattern))
    for file in files:
        try:
            found = translate(file)
            planned(found.config, found.ranks)
            good += 1
            print(f"imported  {file.relative_to(folder)} ({found.tool})")
        except UserError as error:
            key = error.asked.replace(str(file), "").lstrip(":0123456789 ")
            keys[key] += 1
            print(f"refused   {file.relative_to(folder)}: {key}: {error.found}")
    print(f"{good} of {len(files)} imported; refused by", dict(keys.most_common()))


main()
