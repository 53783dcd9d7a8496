"""A model small enough for a fresh process a rung, a fake worker, and a copy of the package to sabotage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

import optrush
from calls import Found as Found
from optrush.config import Config, parse_config

Call = Callable[..., Found]
D, F, L, H, K, V = 64, 256, 4, 4, 2, 128


def write_model(folder: Path) -> None:
    """A Llama without a tokenizer, so that nobody imports one: random tokens are enough here."""
    folder.mkdir()
    hf = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": D,
        "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": K,
        "head_dim": D // H, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(hf))
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(L):
        at = f"model.layers.{i}"
        kv = D // H * K
        shapes |= {f"{at}.{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (D, D) for n in "qo"}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (kv, D) for n in "kv"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (F, D) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (D, F)}
    random = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.05
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def document(**changes: Any) -> dict[str, Any]:
    """A run that works, as the YAML's values."""
    run = {
        "model": "toy", "objective": "pretrain", "data": {"random": 256},
        "batch": {"seq": 64, "tokens": 128, "micro_tokens": 128},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0}, "with": {}, "output": "never-written",
    }  # fmt: skip
    return {**run, **changes}


def parsed(**changes: Any) -> Config:
    """A run that works, of three steps."""
    return parse_config(yaml.safe_dump(document(**{"train": {"steps": 3, "log_every": 1}, **changes})), "run.yaml")


def ladder(rungs: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A ladder of few steps, as the YAML's values."""
    return {"title": "a test", "repeats": 1, "steps": 4, "warmup": 1, "proof": {"steps": 3, "documents": 2}} | {
        **changes,
        "rungs": rungs,
    }


def put(path: Path, value: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return str(path)


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a bench folder by rung."""
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return {r["rung"]: r for r in found}


class Copy:
    """The package copied into a folder, to be edited there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("*.pyc.*")  # what is compiled goes with it: half of a process's start
        shutil.copytree(Path(optrush.__file__).parent, folder / "optrush", ignore=ignored)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / "optrush" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has changed: {old!r} stands there {text.count(old)} times"
        path.write_text(text.replace(old, new))

    def add(self, name: str, text: str) -> None:
        """A technique: its file, and its line of OWN."""
        module = name.replace("-", "_")
        (self.folder / "optrush" / "techniques" / f"{module}.py").write_text(text)
        cls = name.title().replace("-", "")
        path = self.folder / "optrush" / "techniques" / "__init__.py"
        line = f"from optrush.techniques.{module} import {cls}\n\nOWN: "
        path.write_text(
            path.read_text().replace("\nOWN: ", line, 1).replace("    Amp,\n", f"    Amp,\n    {cls},\n", 1)
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`optrush ARGUMENTS` of the copy, as a process of its own."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # many processes read the copy, and one of them compiles it
        return subprocess.run(
            [sys.executable, "-m", "optrush", *arguments],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


class Fakes:
    """Processes that do as they are told, by the techniques of the rung they are started for."""

    def __init__(self, folder: Path) -> None:
        self.log, self.script = folder / "log", folder / "script.json"
        self.does()

    def does(self, **by_techniques: dict[str, Any]) -> None:
        self.script.write_text(
            json.dumps({k.replace("_", "-").replace("--", " "): v for k, v in by_techniques.items()})
        )

    @property
    def started(self) -> list[str]:
        """The techniques of each process that was started, in order; forgets them."""
        found = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in Path(f"{self.log}.pids").read_text().split()]


FAKE = """
import json, os, signal, sys, time, yaml
request = json.load(open(sys.argv[1]))
run = yaml.safe_load(request["run"])
how = json.load(open({script!r}))
key = " ".join(sorted(run.get("with", {{}}))) or "none"
with open({log!r}, "a") as file:
    file.write(key + "\\n")
does = how.get(key, {{}})
if does.get("do") == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if does.get("do") == "hang":
    child = os.fork()
    if child:
        open({log!r} + ".pids", "a").write(f"{{os.getpid()}} {{child}} ")
    time.sleep(600)
if does.get("do") == "leave":
    sys.exit("Something went wrong")
if does.get("do") == "refuse":
    result = {{"error": "asked: a\\nfound: b\\ndo:    c", "refused": ["a", "b", "c"]}}
else:
    speed = does.get("speed", 1000.0)
    gradient = does.get("gradient")
    if isinstance(gradient, list):
        gradient = gradient[open({log!r}).read().splitlines().count(key) - 1]
    proof = {{"losses": does.get("losses", [2.0, 1.5]), "grad_norms": [1.0, 0.5], "note": None,
             "gradient": gradient}}
    if "again" in does:
        proof["again"] = {{**proof, "gradient": does["again"]}}
    result = {{
        "proof": proof, "step_s": [0.1, 0.1], "tokens_per_s": [speed, speed * 1.001], "mfu": None,
        "peak_bytes": 10**9, "memory_kind": "rss", "device": "cpu", "environment": {{"threads": "1"}},
    }}
json.dump(result, open(sys.argv[2], "w"))
"""


# --- what is done to a copy

TECHNIQUE = '''
"""A technique for tests: {name}."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from optrush.technique import Environment, Numerics, Technique
if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

@dataclass(frozen=True)
class {cls}(Technique):
    name = "{name}"
    summary = "a test"
    source = "https://example.org"
    numerics = Numerics.SAME_MATHS
    proof = "tests/bench/test_sabotage.py"
    verified_on = ("cpu",)

    def wrap_step(self, trainer: Trainer) -> int:
        inner, window = trainer.loss, trainer.forward_backward
{body}
        return 1
'''
BODIES = {
    "sound": "trainer.loss = lambda batch: inner(batch)", "scaled": "trainer.loss = lambda batch: inner(batch) * 1.05",
    "divisor": "trainer.forward_backward = halved", "late": "trainer.forward_backward = idle",
}  # fmt: skip
HALVED = """def halved(batches, terms):
            loss = window(batches, terms)
            for t in trainer.trained:
                t.grad.mul_(0.5)
            return loss
        """
IDLE = """seen = [0]
        def idle(batches, terms):
            seen[0] += 1
            loss = window(batches, terms)
            for t in trainer.trained:
                if seen[0] > 2:  # the proof is over
                    t.grad.mul_(0.01)
            return loss
        """
LOAD = {"model.implementation": "native", "batch.tokens": 3072, "batch.micro_tokens": 3072}


def technique(name: str) -> str:
    body = {"divisor": HALVED, "late": IDLE}.get(name, "") + BODIES[name]
    return TECHNIQUE.format(name=name, cls=name.title(), body=f"        {body}")


def put_ladder(*rungs: dict[str, Any], load: dict[str, Any] | None = None) -> str:
    changes = {"base": {"set": LOAD if load is None else load}, "steps": 2, "proof": {"steps": 2, "documents": 2}}
    return put(Path("ladder.yaml"), ladder([{"name": "base"}, *rungs], **changes))


def each(*names: str) -> list[dict[str, Any]]:
    """A rung a technique, each from the base."""
    return [{"name": n, "from": "base", "with": {n: {}}} for n in names]
