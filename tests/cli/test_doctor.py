"""`optrush doctor`: the machine's facts, and of each technique whether it runs here and what mends it where not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from optrush import hardware, technique
from optrush.cli import setup
from optrush.config import parse_config
from optrush.hardware import NAMED
from optrush.technique import Environment, Part, Requirement, Technique
from optrush.techniques import ALL

CLASSES = {c.name: c for c in ALL}
WORDS = ("ok", "lacks")


def on(monkeypatch, *devices):
    """This machine has these devices, and the packages and compilers for them."""
    monkeypatch.setattr(hardware, "probe", lambda: list(devices))
    for module in (setup, technique, technique):
        monkeypatch.setattr(module, "library", lambda name: "1.0")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def stands(name, *devices):
    return setup.standing(CLASSES[name], devices)


# --- the command


def test_json(call):
    found = call("doctor", "--json")
    assert found.code == 0 and found.err == ""
    shown = json.loads(found.out)
    assert [t["name"] for t in shown["techniques"]] == [c.name for c in ALL]
    assert shown["processor"]["cores"] >= 1 and shown["processor"]["memory_bytes"] > 2**28
    assert shown["free_bytes"] > 0 and shown["python"] == sys.version.split()[0]
    assert shown["packages"]["torch"] and shown["packages"]["transformers"] and "triton" in shown["packages"]
    assert len(shown["devices"]) == len(hardware.probe())
    for row in shown["techniques"]:
        assert isinstance(row["runs"], bool)
        for need in [*row["lacks"], *(n for lacks in row["options"].values() for n in lacks)]:
            assert need["asked"] and need["found"] and need["do"]


@pytest.mark.parametrize(("writable", "prefix", "bare", "note"), [
    (True, None, False, ""), (False, None, False, "set PYTHONPYCACHEPREFIX=DIR"), (False, "/cache", False, ""),
    (True, None, True, "unset PYTHONDONTWRITEBYTECODE"),
])  # fmt: skip
def test_warm(call, monkeypatch, writable, prefix, bare, note):
    """Two runs in a folder that is gone afterwards; what cannot be kept is said."""
    folders: list[Path] = []

    def run(command, cwd, **_):
        assert command[1:] == ["-m", "optrush", "train", "warm.yaml"]
        assert parse_config((Path(cwd) / "warm.yaml").read_text(), "warm").train.steps == 2
        (Path(cwd) / "run").mkdir()
        folders.append(Path(cwd))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(setup.subprocess, "run", run)
    monkeypatch.setattr(setup.os, "access", lambda path, mode: writable)
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    monkeypatch.setattr(sys, "dont_write_bytecode", bare)
    found, text = call("doctor", "--warm", "--json"), call("doctor", "--warm")
    assert found.code == 0 and len(folders) == 4 and not any(folder.exists() for folder in folders)
    facts = json.loads(found.out)
    assert set(facts) == {"first_s", "again_s", "note"} and (note in facts["note"] if note else not facts["note"])
    assert "a first run of two steps took " in text.out and note in text.out


def test_warming_that_fails(call, monkeypatch):
    failed = subprocess.CompletedProcess([], 2, "", "asked: a\nfound: no disk\ndo:    b\n")
    monkeypatch.setattr(setup.subprocess, "run", lambda *_, **__: failed)
    done = call("doctor", "--warm")
    assert done.code == 1 and "found: exit code 2: asked: a found: no disk do: b" in done.err


@pytest.mark.slow
def test_warm_trains(call):
    facts = json.loads(call("doctor", "--warm", "--json").out)
    assert facts["first_s"] > 0 and facts["again_s"] > 0


def test_text(call, monkeypatch):
    """A word, not a colour, says how each stands; what is lacking has its three parts; lines are short."""
    on(monkeypatch)
    found = call("doctor")
    assert found.code == 0 and found.err == "" and "\x1b" not in found.out
    lines = found.out.splitlines()
    assert max(map(len, lines)) <= 120
    for c in ALL:
        row = next(line for line in lines if line.startswith(f"{c.name} "))
        assert row[22:].split()[0] in WORDS and c.summary in row
    at = next(i for i, line in enumerate(lines) if "impl=varlen: " in line)
    assert "lacks" in lines[at] and "needs a CUDA device of capability 8.0" in lines[at]
    assert lines[at + 1].split()[:3] == ["found", "a", "CPU"] and lines[at + 2].split()[0] == "do"
    assert "with several ranks: start it with --ranks 2" in found.out
    for fact in ("gpu", "cpu", "memory", "disk", "python", "torch", "transformers", "triton", "compiler"):
        assert any(line.startswith(f"{fact} ") for line in lines), fact


def test_lacking_is_no_error(call, monkeypatch):
    """A machine with an old device, no compiler and a build of torch for CPUs: everything said, exit code 0."""
    on(monkeypatch, NAMED["t4"])
    for module in (setup, technique, technique):
        monkeypatch.setattr(module, "library", lambda name: {"torch": "2.13.0+cpu", "triton": None}.get(name, "1"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = call("doctor")
    assert found.code == 0
    assert "Tesla T4, capability 7.5, 14.6 GiB" in found.out
    assert "torch 2.13.0+cpu, built without CUDA" in found.out
    assert "python -m pip install triton" in found.out and "take --with amp:dtype=fp16" in found.out
    assert "none for C++" in found.out


# --- what is asked


def test_a_gpu_has_it_all(monkeypatch):
    on(monkeypatch, NAMED["h200"], NAMED["h200"])
    monkeypatch.setattr(technique, "library", lambda name: None if name == "flash-attn-4" else "1")
    attention = stands("attention", NAMED["h200"])
    assert attention.runs and "optrush[kernels]" in dict(attention.options)["impl=fa4"][0].do
    monkeypatch.setattr(technique, "library", lambda name: "1")
    for c in ALL:
        found = setup.standing(c, [NAMED["h200"]] * 2)
        assert found.runs and not any(lacks for _, lacks in found.options), found
        assert found.several == bool(c.claims & technique.RANK_PARTS)


def test_several_ranks(monkeypatch):
    """One GPU holds one rank; a CPU as many as one likes."""
    on(monkeypatch, NAMED["h200"])
    one = stands("fsdp", NAMED["h200"])
    assert not one.runs and not one.several
    assert one.lacks[0].found == "one rank" and "--ranks 2" in one.lacks[0].do
    assert stands("fsdp").runs and stands("fsdp").several


def test_an_old_gpu(monkeypatch):
    on(monkeypatch, NAMED["v100"])
    amp = stands("amp", NAMED["v100"])
    assert not amp.runs and amp.lacks[0].do == "take --with amp:dtype=fp16"
    assert dict(amp.options)["dtype=fp16"] == ()
    assert not stands("bf16", NAMED["v100"]).runs
    older = replace(NAMED["v100"], capability=(6, 1))
    assert [n.found for n in stands("compile", older).lacks] == ["capability 6.1"]


@pytest.mark.parametrize(("there", "cxx", "do"), [
    ((), None, "install g++ (Debian and Ubuntu: apt-get install g++)"),
    (("clang++",), None, "export CXX=/usr/bin/clang++"), (("clang++",), "clang++", None), (("g++",), None, None),
    (("g++",), "icpx", "export CXX=/usr/bin/g++"),
])  # fmt: skip
def test_a_compiler_for_a_cpu(there, cxx, do, monkeypatch):
    """What torch calls is g++, or what CXX names; another one on the PATH does not help until CXX names it."""
    on(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    found = stands("compile")
    assert found.runs == (do is None)
    if do is not None:
        assert "needs a C++ compiler" in found.lacks[0].asked and found.lacks[0].do == do
        assert f"no {cxx or 'g++'} on the PATH" == found.lacks[0].found
    assert stands("packing").runs, "nothing is compiled there"


def test_a_compiler_for_a_gpu(monkeypatch):
    on(monkeypatch, NAMED["h200"])
    monkeypatch.setattr(technique, "library", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    lacks = stands("compile", NAMED["h200"]).lacks
    assert [n.do for n in lacks] == ["python -m pip install triton", "install gcc"]


def test_problems_of_every_run():
    packages: dict[str, str | None] = dict.fromkeys((*setup.REQUIRED, *setup.OPTIONAL), "1.0")
    assert not list(setup.problems([], packages | {"torch": "2.13.0+cpu"}))
    assert not list(setup.problems([NAMED["h200"]], packages | {"triton": None}))
    (missing,) = setup.problems([], packages | {"tokenizers": None})
    assert missing.found == "not installed" and missing.do == "python -m pip install tokenizers"
    (build,) = setup.problems([NAMED["h200"]], packages | {"torch": "2.13.0+cpu"})
    assert build.found == "torch 2.13.0+cpu, built without CUDA"
    (mixed,) = setup.problems([NAMED["h200"], NAMED["l4"]], packages)
    assert mixed.found == "NVIDIA H200, NVIDIA L4" and "CUDA_VISIBLE_DEVICES" in mixed.do


@dataclass(frozen=True)
class Toy(Technique):
    """Runs beside an owner of the precision only, with the slow half on no GPU at all."""

    half: Literal["fast", "slow"] = "fast"

    name = "toy"
    summary = "a toy"

    def needs(self, env: Environment) -> Iterator[Requirement]:
        yield Requirement(Part.PRECISION in env.claimed, "`toy` needs half precision", "float32", "add --with amp")
        yield Requirement(self.half == "fast", "`toy:half=slow`", "nothing is that slow", "leave it out")


def test_what_another_technique_gives_is_not_lacking(monkeypatch):
    on(monkeypatch)
    found = setup.standing(Toy, [])
    assert found.runs and not found.lacks
    ((option, lacks),) = found.options
    assert option == "half=slow" and [n.found for n in lacks] == ["nothing is that slow"]


def test_a_containers_limit(monkeypatch, call, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(setup, "CONTAINER_LIMIT", limit)
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: "model name : A Chip\n")
    limit.write_text(f"{2**30}\n")
    assert setup._processor().limit_bytes == 2**30 and setup._processor().model == "A Chip"
    assert "(1.0 GiB for this container)" in call("doctor").out
    limit.write_text("max\n")
    assert setup._processor().limit_bytes is None
