"""What can be seen of optrush from outside, as values; this file makes the pins that the tests compare them with.

    PYTHONPATH=src python tests/pins/make_pins.py

writes plans.json, surface.json and help.txt again. They hold the product while its inside is rebuilt: a pin may change
only in a commit that says why. The values do not depend on the machine: its devices, cores, memory, host name, caches
and version of torch are kept out, the plan's figures for a CPU, which rest on cores and memory, are left out, and
floats are compared to 1e-9 (`sum` of Python 3.12 rounds otherwise than that of 3.11). help.txt was made with typer
0.29.2; another one may lay options out in another way. Sentences for people are not pinned, except in help.txt.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from command import Command, Ended

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests" / "golden" / "golden.json"
RESULTS = ROOT / "benchmarks" / "results"
PLANS, SURFACE, HELP = HERE / "plans.json", HERE / "surface.json", HERE / "help.txt"
TORCH = "2.13.0"  # what a plan supposes to be installed here
CLOSE = 1e-9  # relative, of floats
WIDTH = 120


# --- plans


@cache
def table() -> dict[str, Any]:
    """plans.yaml: `base` and `plans`."""
    return yaml.safe_load((HERE / "plans.yaml").read_text("utf-8"))


def plan(command: Command, name: str) -> dict[str, Any]:
    """What `optrush plan` says of a configuration of the table."""
    given = {**table()["base"], **table()["plans"][name]}
    hardware, flags = given.pop("hardware"), given.pop("flags", [])
    torch, environment = given.pop("torch", TORCH), {}
    if given.pop("calibrated", False):
        environment["OPTRUSH_CACHE"] = str(calibrated(command.folder / "calibrated"))
    if (config := given.pop("config", None)) is not None:
        given["model"] = f"model-of-{name}"
        put(command.folder / given["model"] / "config.json", json.dumps(config))
    put(command.folder / "plan.yaml", yaml.safe_dump(given))
    arguments = ("plan", "plan.yaml", "--hardware", hardware, "--json", *flags)
    ended = command(*arguments, torch=torch, **environment)
    return refusal(ended) if ended.code else planned(json.loads(ended.out), hardware == "cpu")


def calibrated(folder: Path) -> Path:
    """A cache that holds the committed calibration."""
    put(folder / "calibrations" / "h200.json", (RESULTS / "h200-calibration.json").read_text("utf-8"))
    return folder


def planned(said: dict[str, Any], cpu: bool) -> dict[str, Any]:
    """The figures of a plan's document, and the names they stand under."""
    whole = ("peak_bytes", "host_bytes", "memory_kind", "fits", "basis", "parameters", "a_parameter")
    found = {"refused": said["refused"] is not None, **{key: said[key] for key in whole}}
    found["lines"] = by_name((line["name"], line["bytes"]) for line in said["lines"] or ())
    if cpu:
        return found
    for key in ("tokens_per_s", "capacity_bytes", "room_bytes", "ceiling_s"):
        found[key] = said[key]
    found["work"] = by_name((f"{w['where']} {w['name']}", w["seconds"]) for w in said["work"] or ())
    found["alternatives"] = said["alternatives"]
    found["tried"] = said["tried"]
    # Of a reason only its signed numbers: more or less tokens/s in percent, and GiB.
    found["lost"] = by_name((one["what"], signed(one["why"])) for one in said["lost"])
    return found


def signed(text: str) -> list[float]:
    return [float(number) + 0.0 for number in re.findall(r"(?<![\w.])[-+]\d+(?:\.\d+)?", text)]


def by_name(pairs: Any) -> dict[str, Any]:
    pairs = list(pairs)
    assert len(dict(pairs)) == len(pairs), "a name stands there twice"
    return dict(pairs)


# --- help


def helps(command: Command) -> str:
    """The text of every --help, found from the top."""
    return "\n".join(f"$ {' '.join(('optrush', *verb, '--help'))}\n{text}" for verb, text in _helps(command, ()))


def _helps(command: Command, verb: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    ended = command(*verb, "--help")
    assert ended.code == 0, ended
    yield verb, ended.out
    for name in re.findall(r"^  (\S+)", ended.out.partition("\nCommands:\n")[2].partition("\n\n")[0], re.MULTILINE):
        yield from _helps(command, (*verb, name))


# --- the rest


def surface(command: Command) -> dict[str, Any]:
    """Everything that is neither a plan nor a help text; a few small runs on the CPU."""
    return {name: make(command) for name, make in SECTIONS.items()}


def answers(command: Command, *arguments: str) -> Any:
    """The document that a command prints."""
    return json.loads(done(command(*arguments)).out)


def configured(command: Command, name: str) -> str:
    """A file of `FILES`, written where the commands run."""
    put(command.folder / name, yaml.safe_dump(FILES[name]))
    return name


def run(command: Command, name: str) -> Path:
    """The folder of a run, trained once."""
    if not (command.folder / name / "model").is_dir():
        done(command("train", configured(command, f"{name}.yaml")))
    return command.folder / name


def run_keys(command: Command, name: str) -> dict[str, Any]:
    folder = run(command, name)
    found = {"train" if "loss" in line else "eval": list(line) for line in lines(folder / "metrics.jsonl")}
    assert found.keys() == {"train", "eval"}
    return {**found, "run.yaml": paths(yaml.safe_load((folder / "run.yaml").read_text("utf-8")))}


def exported(command: Command) -> dict[str, Any]:
    run(command, "sft")
    said = answers(command, "export", "sft", "--out", "exported", "--json")
    return {"keys": paths(said), "files": listing(command.folder / "exported")}


def evaluated(command: Command) -> list[str]:
    return paths(answers(command, "eval", configured(command, "sft.yaml"), "--json"))


def rehearsed(command: Command) -> dict[str, Any]:
    """The configuration with all its defaults, and the keys of what else is said."""
    said = answers(command, "train", configured(command, "smallest.yaml"), "--dry-run", "--json")
    whole = said.pop("config")
    return {"config": {**whole, "output": os.path.basename(whole["output"])}, "keys": paths(said)}


def climbed(command: Command) -> dict[str, Any]:
    asked = ("bench", configured(command, "random.yaml"), "--ladder", configured(command, "ladder.yaml"))
    done(command(*asked, "--out", "climbed"))
    return {
        "keys": paths(lines(command.folder / "climbed" / "records.jsonl")),
        "files": listing(command.folder / "climbed"),
    }


def committed(_: Command) -> dict[str, Any]:
    held = lines(RESULTS / "cpu-demo" / "records.jsonl")
    return {"keys": paths(held), "rungs": [one["rung"] for one in held]}


SMALLEST = {"model": "tiny", "objective": "sft", "data": {"sample": "recipes", "max_samples": 8}, "output": "never",
            "with": {}}  # fmt: skip
SFT = {
    **SMALLEST,
    "data": {"sample": "recipes", "eval": 0.25, "max_samples": 16, "too_long": "split"},
    "batch": {"seq": 128, "tokens": 256},
    "train": {"steps": 2, "log_every": 1, "eval_every": 1, "save_every": 1},
    "output": "sft",
    "with": {"packing": {}},
}
DPO = {
    **SFT,
    "objective": "dpo",
    "dpo": {"beta": 0.1},
    "data": {"sample": "recipes", "eval": 0.25, "max_samples": 8},
    "batch": {"seq": 512, "tokens": 512},
    "output": "dpo",
}
RANDOM = {
    "model": "tiny", "objective": "pretrain", "data": {"random": 16}, "batch": {"seq": 64, "tokens": 64},
    "output": "never",
}  # fmt: skip
LADDER = {
    "title": "a pin", "repeats": 1, "steps": 2, "warmup": 1, "all_but_one": False,
    "proof": {"steps": 2, "documents": 2}, "rungs": [{"name": "base"}],
}  # fmt: skip
FILES = {
    "smallest.yaml": SMALLEST, "sft.yaml": SFT, "dpo.yaml": DPO, "random.yaml": RANDOM, "ladder.yaml": LADDER,
}  # fmt: skip
EXITS = (
    ("--version",),
    ("techniques",),
    ("trian", "sft.yaml"),
    ("train",),
    ("train", "none.yaml"),
    ("train", "smallest.yaml", "--set", "optim.lrr=1"),
    ("train", "smallest.yaml", "--set", "optim.lr=fast"),
    ("train", "smallest.yaml", "--with", "pakcing"),
    ("train", "smallest.yaml", "--with", "recompute:evry=2"),
    ("train", "smallest.yaml", "--without", "packing"),
    ("train", "smallest.yaml", "--with", "amp", "--with", "bf16"),
    ("train", "smallest.yaml", "--set", "batch.tokens=1000"),
    ("train", "smallest.yaml", "--set", "data.path=none.jsonl", "--set", "data.sample=null"),
    ("train", "sft.yaml"),
    ("train", "smallest.yaml", "--resume", "nowhere"),
    ("plan", "smallest.yaml", "--hardware", "h300"),
    ("bench", "smallest.yaml", "--ladder", "none", "--out", "unclimbed"),
    ("init", "smallest.yaml", "--yes"),
    ("report", "unclimbed"),
    ("export", "untrained", "--out", "unexported"),
    ("eval", "smallest.yaml", "--model", "untrained"),
)


def described(technique: dict[str, Any]) -> dict[str, Any]:
    """A technique without what is said of it for people."""
    kept = ("name", "numerics", "claims", "proof", "verified_on", "source")
    options = {name: option["default"] for name, option in technique["options"].items()}
    return {**{key: technique[key] for key in kept}, "options": options}


def begun(command: Command) -> dict[str, Any]:
    """What `optrush init` writes for a machine that is not this one, by flags."""
    found = {}
    for hardware, more in (("h100", ()), ("t4", ()), ("2xh200", ("--with", "fsdp", "--with", "recompute:every=2"))):
        done(command("init", f"{hardware}.yaml", "--yes", "--hardware", hardware, *more, torch=TORCH))
        found[" ".join((hardware, *more))] = yaml.safe_load((command.folder / f"{hardware}.yaml").read_text("utf-8"))
    return found


def demo(command: Command) -> list[dict[str, Any]]:
    """The rungs of the ladder `cpu-demo`: a climb whose processes all end at once, for their torch cannot be imported.

    Every rung leaves a record all the same, with the run it was resolved to.
    """
    put(command.folder / "broken" / "torch.py", "raise SystemExit('of no use')\n")
    path = os.pathsep.join((str(command.folder / "broken"), command.package))
    asked = ("bench", configured(command, "smallest.yaml"), "--ladder", "cpu-demo", "--out", "demo")
    ended = command(*asked, PYTHONPATH=path)
    assert ended.code == 1, ended
    records = lines(command.folder / "demo" / "records.jsonl")
    assert all(record["error"] for record in records)
    return [
        {
            **{key: record[key] for key in ("ladder", "rung", "mode", "seq", "micro_tokens")},
            "implementation": record["config"]["model"].get("implementation"),
            "tokens": record["config"]["batch"]["tokens"],
            "with": record["config"]["with"],
        }
        for record in records
    ]


def reread(command: Command) -> bool:
    """Whether `optrush report` reads records of the past."""
    put(command.folder / "past" / "records.jsonl", (RESULTS / "cpu-demo" / "records.jsonl").read_text("utf-8"))
    done(command("report", "past"))
    return (command.folder / "past" / "report.html").is_file()


def exits(command: Command) -> dict[str, Any]:
    """Exit codes, most of them of wrong input; of an error the number of its lines."""
    run(command, "sft")  # the folder that is in the way
    configured(command, "smallest.yaml")
    ends = {" ".join(("optrush", *arguments)): command(*arguments) for arguments in EXITS}
    return {line: refusal(end) if end.code else {"code": 0} for line, end in ends.items()}


SECTIONS: dict[str, Callable[[Command], Any]] = {
    "techniques": lambda command: [described(one) for one in answers(command, "techniques", "--json")],
    "train --dry-run": rehearsed,
    "init": begun,
    "run of sft": lambda command: run_keys(command, "sft"),
    "run of dpo": lambda command: run_keys(command, "dpo"),
    "run folder": lambda command: listing(run(command, "sft")),
    "export": exported,
    "eval": evaluated,
    "bench": climbed,
    "keys of plan": lambda command: paths(
        answers(command, "plan", configured(command, "smallest.yaml"), "--hardware", "h200", "--json")
    ),
    "keys of techniques": lambda command: paths(answers(command, "techniques", "--json")),
    "keys of doctor": lambda command: paths(json.loads(done(command.process("doctor", "--json")).out)),
    "ladder cpu-demo": demo,
    "results cpu-demo": committed,
    "results are read": reread,
    "golden list": lambda _: hashlib.sha256(GOLDEN.read_bytes()).hexdigest(),
    "exits": exits,
}


# --- shapes and comparisons

NAMES = ("options", "with", "environment", "ceiling_s", "parts_s", "seen", "a_parameter")  # of mappings whose keys vary


def paths(value: Any) -> list[str]:
    """The keys of a document, dotted; `[]` is any place of a list, `*` any key of a mapping whose keys vary.

    Not at the end, where an empty list or mapping would read otherwise than a filled one.
    """
    return sorted({re.sub(r"(\[\]|\.\*)+$", "", path) for path in _paths(value, "")})


def _paths(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        varied = at.rpartition(".")[2] in NAMES
        for key, one in value.items():
            yield from _paths(one, f"{at}.{'*' if varied else key}".removeprefix("."))
    elif isinstance(value, list) and value:
        for one in value:
            yield from _paths(one, f"{at}[]")
    else:
        yield at


def listing(folder: Path) -> list[str]:
    """The files of a folder; of TensorBoard's the name without time and host."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"(events\.out\.tfevents\.).*", r"\1*", name) for name in found)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def done(ended: Ended) -> Ended:
    assert ended.code == 0, ended
    return ended


def refusal(said: Ended) -> dict[str, Any]:
    return {"code": said.code, "lines": len(said.err.splitlines()), "printed": bool(said.out)}


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def differences(pinned: Any, now: Any, at: str = "") -> Iterator[str]:
    """Where two values differ, a line each."""
    if isinstance(pinned, dict) and isinstance(now, dict):
        if list(pinned) != list(now):
            gone, new = [k for k in pinned if k not in now], [k for k in now if k not in pinned]
            yield f"{at}: gone {gone}, new {new}" if gone or new else f"{at}: another order, {list(now)}"
        for key in pinned.keys() & now.keys():
            yield from differences(pinned[key], now[key], f"{at}/{key}")
    elif isinstance(pinned, list) and isinstance(now, list) and len(pinned) == len(now):
        for place, pair in enumerate(zip(pinned, now)):
            yield from differences(*pair, f"{at}/{place}")
    elif type(pinned) is not type(now) or pinned != now:
        both = isinstance(pinned, float) and isinstance(now, float)
        if not (both and abs(pinned - now) <= CLOSE * abs(pinned)):
            yield f"{at}: pinned {json.dumps(pinned)}, now {json.dumps(now)}"


def laid(value: Any, used: int = 0, indent: int = 0) -> str:
    """JSON with as much on a line as it holds, so that a change shows as few lines."""
    text = json.dumps(value, ensure_ascii=False)
    if used + len(text) < WIDTH or not isinstance(value, dict | list) or not value:
        return text
    named = isinstance(value, dict)
    pairs = [(f"{json.dumps(k)}: ", v) for k, v in value.items()] if named else [("", v) for v in value]
    space = " " * (indent + 1)
    inner = ",\n".join(space + name + laid(one, len(space + name), indent + 1) for name, one in pairs)
    opened, closed = "{}" if named else "[]"
    return f"{opened}\n{inner}\n{' ' * indent}{closed}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        command = Command(Path(name))
        PLANS.write_text(laid({one: plan(command, one) for one in table()["plans"]}) + "\n", "utf-8")
        HELP.write_text(helps(command), "utf-8")
        SURFACE.write_text(laid(surface(command)) + "\n", "utf-8")
    for file in (PLANS, HELP, SURFACE):
        print(file)


if __name__ == "__main__":
    main()
