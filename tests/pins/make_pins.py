"""What can be seen of optrush from outside, as values; this file makes the pins that the tests compare them with.

    PYTHONPATH=src python tests/pins/make_pins.py [plans [NAME ...] | surface [SECTION ...]]

writes plans.json and surface.json again, or one of them, or some of its entries. They hold the product while its
inside is rebuilt: a pin may change only in a commit that says why. The values do not depend on the machine: its
devices, cores, memory, host name, caches and version of torch are kept out, the plan's figures for a CPU, which rest
on cores and memory, are left out. Figures of plans are rounded and compared with a tolerance, so that a better
constant changes only the pins that it moves. Sentences for people are not pinned.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from command import Command, Ended

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests" / "golden" / "golden.json"
RESULTS = ROOT / "benchmarks" / "results"
PLANS, SURFACE = HERE / "plans.json", HERE / "surface.json"
TORCH = "2.13.0"  # what a plan supposes to be installed here
CLOSE, CLOSE_SPEED = 0.01, 0.02  # relative, of floats; of those under these names:
SPEEDS = ("tokens_per_s", "work_s")
LEAST_LINE, LEAST_WORK = 0.01, 0.02  # of the peak and of a step: smaller entries are pinned by name
WIDTH = 120


# --- plans


@cache
def table() -> dict[str, Any]:
    """plans.yaml: `base` and `plans`."""
    return yaml.safe_load((HERE / "plans.yaml").read_text("utf-8"))


def plan(command: Command, name: str) -> dict[str, Any]:
    """What `optrush plan` says of a configuration of the table."""
    given = {**table()["base"], **table()["plans"][name]}
    hardware = given.pop("hardware")
    put(command.folder / "plan.yaml", yaml.safe_dump(given))
    ended = command("plan", "plan.yaml", "--hardware", hardware, "--json", torch=TORCH)
    return refusal(ended) if ended.code else planned(json.loads(ended.out), hardware == "cpu")


def planned(said: dict[str, Any], cpu: bool) -> dict[str, Any]:
    """The figures of a plan's document, and the names they stand under."""
    found = {"refused": said["refused"] is not None, "fits": said["fits"], "basis": said["basis"]}
    if not found["refused"]:
        peak = said["peak_bytes"]
        found |= {"memory_kind": said["memory_kind"], "parameters": said["parameters"]}
        found |= {"peak_gib": gib(peak), "host_gib": gib(said["host_bytes"])}
        lines = by_name((line["name"], line["bytes"]) for line in said["lines"])
        found |= {"lines_gib": {name: gib(size) for name, size in lines.items() if size > LEAST_LINE * peak}}
        found |= {"small_lines": sorted(lines.keys() - found["lines_gib"])}
    if cpu:
        return found
    if not found["refused"]:
        found |= {"tokens_per_s": rounded(said["tokens_per_s"]), "capacity_gib": gib(said["capacity_bytes"])}
        work = by_name((f"{w['where']} {w['name']}", w["seconds"]) for w in said["work"])
        least = LEAST_WORK * sum(work.values())
        found |= {"work_s": {name: rounded(seconds) for name, seconds in work.items() if seconds > least}}
        found |= {"small_work": sorted(work.keys() - found["work_s"])}
    found["alternatives"] = {
        " ".join(spelled(name, options) for name, options in one["with"].items()): {
            "rows": one["micro_rows"], "peak_gib": gib(one["peak_bytes"]), "host_gib": gib(one["host_bytes"]),
            "tokens_per_s": rounded(one["tokens_per_s"]), "fits": one["fits"],
        }
        for one in said["alternatives"]
    }  # fmt: skip
    return found


def spelled(name: str, options: dict[str, Any]) -> str:
    """A technique as `--with` takes it."""
    given = (f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in options.items())
    return name + ":" * bool(options) + ",".join(given)


def gib(size: float) -> float:
    return rounded(size / 2**30)


def rounded(figure: float) -> float:
    return float(f"{figure:.4g}")


def by_name(pairs: Any) -> dict[str, Any]:
    pairs = list(pairs)
    assert len(dict(pairs)) == len(pairs), "a name stands there twice"
    return dict(pairs)


# --- options of the command line


def options(command: Command) -> dict[str, list[str]]:
    """Of every command its arguments and options with their values' names, bounds and defaults, found from the top."""
    return {" ".join(("optrush", *verb)): list(_options(text)) for verb, text in _helps(command, ())}


def _options(text: str) -> Iterator[str]:
    """The entries of a help text: two spaces, the name in one column, the text in another."""
    for part in ("Arguments", "Options"):
        entries = text.partition(f"\n{part}:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"^  (?=\S)", entries, flags=re.MULTILINE)[1:]:
            name = re.split(r"\s{2,}|\n", entry)[0]
            facts = re.findall(r"\[(?:default: [^]]*|[^]]*[<>]=?[^]]*|required)\]", " ".join(entry.split()))
            yield " ".join((name, *facts))


def _helps(command: Command, verb: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    ended = command(*verb, "--help")
    assert ended.code == 0, ended
    yield verb, ended.out
    for name in re.findall(r"^  (\S+)", ended.out.partition("\nCommands:\n")[2].partition("\n\n")[0], re.MULTILINE):
        yield from _helps(command, (*verb, name))


# --- the rest


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
    kinds = {"loss": "train", "eval_loss": "eval", "start_s": "end"}
    found = {kinds[k]: list(line) for line in lines(folder / "metrics.jsonl") for k in line if k in kinds}
    assert found.keys() == {"train", "eval", "end"}
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
    kept = ("numerics", "claims", "proof", "verified_on", "source")
    return {
        **{key: technique[key] for key in kept},
        "options": {name: option["default"] for name, option in technique["options"].items()},
    }


def begun(command: Command) -> dict[str, Any]:
    """What `optrush init` writes for a machine that is not this one, by flags."""
    found = {}
    for hardware, more in (("h100", ()), ("t4", ()), ("2xh200", ("--with", "fsdp", "--with", "recompute:every=2"))):
        done(command("init", f"{hardware}.yaml", "--yes", "--hardware", hardware, *more, torch=TORCH))
        found[" ".join((hardware, *more))] = yaml.safe_load((command.folder / f"{hardware}.yaml").read_text("utf-8"))
    return found


def demo(command: Command) -> dict[str, Any]:
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
    return {
        record["rung"]: {
            **{key: record[key] for key in ("ladder", "mode", "seq", "micro_tokens")},
            "implementation": record["config"]["model"].get("implementation"),
            "tokens": record["config"]["batch"]["tokens"],
            "with": " ".join(spelled(name, options) for name, options in record["config"]["with"].items()),
        }
        for record in records
    }


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
    "techniques": lambda command: {one["name"]: described(one) for one in answers(command, "techniques", "--json")},
    "options": options,
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
        close = CLOSE_SPEED if set(SPEEDS) & set(at.split("/")) else CLOSE
        if not (both and abs(pinned - now) <= close * abs(pinned)):
            yield f"{at}: pinned {json.dumps(pinned)}, now {json.dumps(now)}"


def regrouped(pinned: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A plan with the entries that are pinned by name where its pin has them: one may lie near the limit."""
    now = dict(now)
    for large, small, least in (("lines_gib", "small_lines", LEAST_LINE), ("work_s", "small_work", LEAST_WORK)):
        if large in pinned and large in now:
            total = now["peak_gib"] if large == "lines_gib" else sum(now[large].values())
            near = [name for name in now[large] if name in pinned[small] and now[large][name] < 1.2 * least * total]
            now[large] = {name: figure for name, figure in now[large].items() if name not in near}
            now[small] = sorted([*now[small], *near])
    return now


def laid(value: Any, used: int = 0, indent: int = 0) -> str:
    """JSON with as much on a line as it holds; of what is longer, each inner mapping and list on lines of its own."""
    text = json.dumps(value, ensure_ascii=False)
    if used + len(text) < WIDTH or not isinstance(value, dict | list) or not value:
        return text
    space = " " * (indent + 1)
    named = isinstance(value, dict)
    pairs = [(f"{json.dumps(k)}: ", v) for k, v in value.items()] if named else [("", v) for v in value]
    rows, open_row = list[str](), False
    for name, one in pairs:
        entry = name + laid(one, len(space + name), indent + 1)
        plain = not isinstance(one, dict) and "\n" not in entry
        if rows and plain and open_row and len(rows[-1]) + len(entry) + 4 < WIDTH:
            rows[-1] += f", {entry}"
        else:
            rows.append(space + entry)
        open_row = plain
    opened, closed = "{}" if named else "[]"
    return "\n".join((opened, ",\n".join(rows), " " * indent + closed))


def written(file: Path, make: Callable[[str], Any], names: Sequence[str], every: Sequence[str]) -> None:
    """Make some entries of a file again, or all."""
    if unknown := set(names) - set(every):
        sys.exit(f"{file.name} has no {', '.join(sorted(unknown))}; it has {', '.join(every)}")
    held = json.loads(file.read_text("utf-8")) if names else {}
    held |= {name: make(name) for name in names or every}
    file.write_text(laid({name: held[name] for name in every if name in held}) + "\n", "utf-8")
    print(file)


def main() -> None:
    what, names = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    with tempfile.TemporaryDirectory() as folder:
        command = Command(Path(folder))
        if what in ("", "plans"):
            written(PLANS, lambda name: plan(command, name), names, list(table()["plans"]))
        if what in ("", "surface"):
            written(SURFACE, lambda name: SECTIONS[name](command), names, list(SECTIONS))


if __name__ == "__main__":
    main()
