"""Write and read adapters in PEFT's format: a folder of adapter_config.json and adapter_model.safetensors.

The configuration is read without torch, so that a mismatch is rejected before a model is built. Pickled adapters
(adapter_model.bin) are rejected, because they could run code when read.

Source: the format is PEFT's, https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrush.errors import NeedsError
from optrush.files import check_model_files, parse_json, read_text, regular
from optrush.models.text_part import LAYOUTS, PARTS
from optrush.peft.ledger import DENSE, EMBEDDING, HEAD, last

if TYPE_CHECKING:
    from torch import Tensor

    from optrush.models.weights import WeightMap
    from optrush.peft.adapter import LinearAdapter, Model
    from optrush.peft.experts import ExpertsLora

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
# Fields of PEFT (version 0.21) that do not change the meaning of the tensors, or that follow from the tensors.
SILENT = frozenset({
    "auto_mapping", "base_model_name_or_path", "feedforward_modules", "inference_mode", "layers_pattern",
    "lora_dropout", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
    "target_modules", "target_parameters", "task_type",
})  # fmt: skip
# Accepted values of other fields, besides null, false and empty. Other initializations, such as PiSSA, change the base.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, "gaussian"), "init_ia3_weights": (True,),
}  # fmt: skip


def adapters(model: Model) -> dict[str, LinearAdapter | ExpertsLora]:
    """Return a model's adapters, including other ranks', by the names of their linears or of a layer's experts."""
    from optrush.models.experts import StackedMatrices

    linears = (*model.linears(), *model.elsewhere.items())
    of_linears: dict[str, LinearAdapter | ExpertsLora] = {
        name: linear.adapter for name, linear in linears if linear.adapter is not None
    }
    experts = ((name, module) for name, module in model.named_modules() if isinstance(module, StackedMatrices))
    return of_linears | {name: module.adapter for name, module in experts if module.adapter is not None}


def save_adapter(folder: Path, model: Model, recipe: WeightMap, trained: Mapping[str, Tensor], base: str) -> None:
    """Write both files into an existing folder.

    Args:
        trained: every trained parameter in full, on the CPU, by canonical name.
        base: the base model's name or path, for PEFT.
    """
    from safetensors.torch import save_file

    from optrush.peft.adapter import find_outer_modules

    tensors, theirs, saved = dict[str, "Tensor"](), adapters(model), set[str]()
    modules = find_outer_modules(model, recipe)
    for name, adapter in theirs.items():
        prefix = f"{name}.adapter."
        mine = {p.removeprefix(prefix): t for p, t in trained.items() if p.startswith(prefix)}
        tensors |= {key: t.contiguous().clone() for key, t in adapter.exported(mine)}
    for parameter, module in modules.items():
        if parameter in trained:
            # PEFT selects all modules with this suffix: `norm` would select every norm.
            # Vision towers have modules with the same names as the language model.
            alone = not _beside_towers(module) and all(
                last(m) == last(module) for m in modules.values() if m.endswith(last(module))
            )
            saved.add(last(module) if alone else module)
            rows = _stored_rows(recipe, parameter)
            tensors |= {key: trained[parameter][:rows].clone() for key in _whole(model, parameter, module)}
    # PEFT includes the modules inside a module.
    saved = {name for name in saved if not any(name.startswith(f"{other}.") for other in saved)}
    if model.tied and EMBEDDING in saved:
        saved.add(HEAD)
    beside = _beside_experts(model, theirs)
    config = {
        "base_model_name_or_path": base, "task_type": "SEQ_CLS" if model.head.scores else "CAUSAL_LM",
        "inference_mode": True, "revision": None,
        "auto_mapping": None, "modules_to_save": sorted(saved) or None,
        "target_modules": _targets(m for a in theirs.values() for m in a.hf if m not in beside),
        **next(iter(theirs.values())).settings(),
    }  # fmt: skip
    if parameters := {*beside.values(), *(p for a in theirs.values() for p in getattr(a, "parameters_of", ()))}:
        config["target_parameters"] = sorted(parameters)
    if config["peft_type"] == "IA3":
        config["feedforward_modules"] = _targets(m for a in theirs.values() for m in a.hf if a.feedforward)
    save_file({PREFIX + key: t for key, t in tensors.items()}, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _beside_experts(model: Model, theirs: Mapping[str, LinearAdapter | ExpertsLora]) -> dict[str, str]:
    """Return feed-forward modules outside experts, each with the name of its parameter.

    If they were listed as modules, PEFT (version 0.21) would mistake their names for old names of experts.
    """
    from optrush.models.experts import StackedMatrices

    if not any(isinstance(module, StackedMatrices) for module in model.modules()):
        return {}
    modules = (m for a in theirs.values() for m in a.hf if f"dense.{last(m)}" in DENSE)
    return {m: f"{re.sub(r'^.*?[.]layers[.][0-9]+[.]', '', m)}.weight" for m in modules}


def _targets(modules: Iterable[str]) -> list[str] | str:
    """Return PEFT's selector for these modules: their last names, or a pattern if towers have the same names."""
    named = sorted(modules)
    ends = sorted({last(m) for m in named})
    prefix = next((prefix for prefix, _ in LAYOUTS[:2] if bool(named) and all(m.startswith(prefix) for m in named)), "")
    return rf"{re.escape(prefix)}.*\.({'|'.join(map(re.escape, ends))})" if prefix else ends


def _beside_towers(module: str) -> bool:
    return f"{module}.".startswith((*(prefix for prefix, _ in LAYOUTS[:2]), *(f"model.{part}" for part in PARTS)))


def _stored_rows(recipe: WeightMap, parameter: str) -> int:
    """Return the number of rows of a parameter in an adapter's file.

    A grown embedding has one row per token of the saved tokenizer: PEFT resizes the base's embedding to that.
    """
    rows, growth = recipe.entries[parameter].shape[0], recipe.growth
    return growth.length if growth is not None and growth.rows < growth.vocab == rows else rows


def _whole(model: Model, parameter: str, module: str) -> Iterator[str]:
    """Yield the names of a fully trained parameter: a tied weight has the names of both modules."""
    kind = parameter.rpartition(".")[2]
    yield f"{module}.{kind}"
    if model.tied and last(module) == EMBEDDING:
        yield f"{HEAD}.{kind}"


def read_config(technique: str, folder: str, wanted: Mapping[str, Any]) -> None:
    """Check an adapter's configuration against the run's, without torch.

    Args:
        wanted: PEFT's fields with the run's values.

    Raises:
        NeedsError: a field differs or is unknown, or a file is missing or invalid.
    """
    asked, path = f"`{technique}:init={folder}`", Path(folder) / CONFIG
    check_model_files(Path(folder), (CONFIG, TENSORS))
    if not path.is_file():
        raise NeedsError(asked, f"no {CONFIG} there", "name a folder that PEFT's save_pretrained or a run wrote")
    if not (path.parent / TENSORS).is_file():
        pickled = (path.parent / PICKLE).is_file()
        found = f"only {PICKLE}, a pickle, which could run code when read" if pickled else f"no {TENSORS} there"
        raise NeedsError(asked, found, "save it as safetensors (PEFT's save_pretrained does)")
    try:
        config = parse_json(read_text(path))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise NeedsError(asked, f"{CONFIG} is not a JSON object", "save the adapter again")
    for field, value in wanted.items():
        if (stored := config.get(field, False if value is False else None)) != value:
            do = f"make the two equal, or start without init (of this run: {value})"
            raise NeedsError(asked, f"{field} {stored!r} in {CONFIG}, and {value!r} here", do)
    for field, stored in config.items():
        if stored and field not in {*wanted, *SILENT} and stored not in HARMLESS.get(field, ()):
            raise NeedsError(asked, f"{field} {stored!r} in {CONFIG}, which is unknown", "start without init")


def load_adapter(
    technique: str, folder: str, model: Model, recipe: WeightMap, trained: Collection[str]
) -> dict[str, Tensor]:
    """Return an adapter's tensors as full parameters of a model with adapters, by canonical name.

    A grown embedding lacks its rows without a token.

    Args:
        trained: canonical names of fully trained parameters.

    Raises:
        NeedsError: a tensor is missing, unknown, or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from optrush.peft.adapter import find_outer_modules

    asked, do = f"`{technique}:init={folder}`", "set rank, targets and save as in its training"
    try:
        tensors = {key.removeprefix(PREFIX): t for key, t in load_file(regular(Path(folder) / TENSORS)).items()}
    except (SafetensorError, OSError) as error:
        raise NeedsError(asked, f"{TENSORS}: {error}", "download it again") from None
    shapes: dict[str, tuple[int, ...]] = {}
    for adapter in adapters(model).values():
        meta = {name: p.detach() for name, p in adapter.named_parameters()}
        shapes |= {key: tuple(t.shape) for key, t in adapter.published(meta)}
    of: dict[str, str] = {}  # fully trained parameter -> the name of its tensor
    for parameter, module in find_outer_modules(model, recipe).items():
        if parameter in trained:
            keys = list(_whole(model, parameter, module))
            shape = recipe.entries[parameter].shape
            shapes |= dict.fromkeys(keys, (_stored_rows(recipe, parameter), *shape[1:]))
            of[parameter] = keys[0]
    for key in sorted({*shapes, *tensors}):
        if key not in tensors:
            raise NeedsError(asked, f"no tensor {key} in {TENSORS}", do)
        if key not in shapes:
            raise NeedsError(asked, f"the tensor {key}, for which this run has no adapter", do)
        if tuple(tensors[key].shape) != shapes[key]:
            raise NeedsError(asked, f"{key} of shape {list(tensors[key].shape)}, not {list(shapes[key])}", do)
    parameters = {parameter: tensors[key] for parameter, key in of.items()}
    for name, adapter in adapters(model).items():
        parameters |= {f"{name}.adapter.{part}": t for part, t in adapter.taken(tensors).items()}
    return parameters
