"""Read a model's sharding from DeepSpeed's, FSDP's and accelerate's configurations, for `optrush import`.

They are inline, a file, or only a file's name; the result is the stage and the use of host memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from optrush.errors import ConfigError
from optrush.files import read_text

ABSENT: tuple[Any, ...] = (None, False, "", "false", "False", "none", "None", "no", 0, [], {})
_STAGE = re.compile(r"z(?:ero)?_?-?([0-3])")
_WHOLE = re.compile(r"multi_gpu|single_gpu|no_shard", re.IGNORECASE)  # everything on each rank
_STRATEGIES = {"1": 3, "2": 2, "3": 0, "4": 3, "5": 2}  # torch's enumeration of FSDP's strategies
# Keys that only DeepSpeed has: without `zero_optimization` it shards nothing.
_DEEPSPEED = {"train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "fp16", "bf16"}
_FILE = re.compile(r"\.(json|ya?ml)\Z")
_NAMED = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}


@dataclass(frozen=True)
class Sharding:
    """The sharding of a model over the ranks."""

    stage: int  # of ZeRO; below 2 each rank has all weights and gradients
    source: Literal["settings", "name", "missing file"] = "settings"
    in_host: str | None = None  # the key below that offloads to host memory; empty: the whole value
    recompute: bool = False  # activations, by a key of FSDP


def read_sharding(given: Any, beside: Path) -> Sharding | None:
    """Return the sharding by a value of `deepspeed`, `fsdp` or `fsdp_config`; None: no sharding.

    Args:
        beside: the file with the value; files named in it are looked up in its folder.

    Raises:
        ConfigError: a file that is neither JSON nor YAML.
    """
    if given in ABSENT:
        return None
    if isinstance(given, Mapping):
        return _of_mapping(given, beside)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return _of_mapping(_parsed(given, f"{beside}"), beside)
    text = " ".join(map(str, given)) if isinstance(given, list) else str(given)
    is_file = _FILE.search(text) is not None
    for file in (Path(text), beside.parent / text) if is_file else ():
        if file.is_file():
            return _of_mapping(_parsed(read_text(file, "utf-8", "replace"), f"{file}"), file)
    stage = int(match[1]) if (match := _STAGE.search(text)) else 0 if _WHOLE.search(text) else 3
    stage = 2 if "shard_grad_op" in text.lower() else stage
    return Sharding(stage, "missing file" if is_file else "name", "" if "offload" in text.lower() else None)


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(where, "not a JSON or YAML mapping", "fix it, or leave it out")
    return value


def _of_mapping(given: Mapping[str, Any], beside: Path) -> Sharding | None:
    if str(given.get("distributed_type", "")).upper() in ("NO", "FALSE"):  # YAML reads NO as false
        return None
    keys = dict(_leaves(given))
    path, file = next(((k, v) for k, v in keys.items() if k.endswith("deepspeed_config_file")), ("", None))
    if (inner := read_sharding(file, beside)) is not None:
        host = None if inner.in_host is None else f"{path}.{inner.in_host}".rstrip(".")
        return replace(inner, in_host=host)
    recompute = any(key.endswith("activation_checkpointing") and value not in ABSENT for key, value in keys.items())
    return Sharding(_stage(given, keys), "settings", next(_in_host(given), None), recompute)


def _leaves(given: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with values that are not mappings."""
    for key, value in given.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _in_host(given: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted keys that offload to host memory: a flag, a device, or a mapping with a device."""
    for key, value in given.items():
        name, held = f"{path}{key}", "offload" in str(key) or key == "cpu_checkpointing"
        held = held and not str(key).endswith("nvme_path")  # a path alone offloads nothing
        if held and (value.get("device") if isinstance(value, Mapping) else value) not in ABSENT:
            yield name
        elif isinstance(value, Mapping):
            yield from _in_host(value, f"{name}.")


def _stage(given: Mapping[str, Any], keys: Mapping[str, Any]) -> int:
    """Return the stage of a mapping of DeepSpeed, FSDP or accelerate."""
    kind = str(given.get("distributed_type", "")).upper()
    last = {name.rpartition(".")[2].removeprefix("fsdp_"): value for name, value in keys.items()}
    zero = given.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else last.get("zero_stage")
    if stage not in (None, ""):
        if str(stage) not in ("0", "1", "2", "3"):
            raise ConfigError("`zero_optimization.stage`", f"{stage!r}", "give 0, 1, 2 or 3")
        return int(stage)
    if (strategy := last.get("sharding_strategy")) is not None:
        return _STRATEGIES.get(str(strategy), _NAMED.get(str(strategy).lower(), 3))
    if (kept := last.get("reshard_after_forward")) is not None:
        return _NAMED.get(str(kept).lower(), 2 if kept in ABSENT else 3)
    fsdp = {"fsdp_config", "use_fsdp"} & given.keys() or kind == "FSDP"
    unsharded = given.keys() & _DEEPSPEED or kind.startswith("MULTI_")
    return 0 if unsharded and not fsdp else 3


def parallel_axes(get: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
    """Return the techniques for axolotl's mesh sizes; `get` returns the value of a place, or None."""
    axes: dict[str, dict[str, Any]] = {
        name: {"size": size} for name in ("tensor", "context", "experts") if (size := get(f"@{name}")) is not None
    }
    shards, replicas = get("@shards"), get("@replicas")
    if shards is not None:
        axes["fsdp"] = {} if replicas is None else {"replicate": replicas}
    elif replicas is not None:
        axes["ddp"] = {}
    return axes
