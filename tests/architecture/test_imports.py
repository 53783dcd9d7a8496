"""Rules of the source tree, checked on its syntax trees: imports, sizes, names, what techniques must declare.

Imports under `if TYPE_CHECKING` are exempt from every rule: they are not executed.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from syntax import FILES, ROOT, SOURCE, dotted, nodes, parsed

from optrush.technique import STAGES, Environment, Numerics
from optrush.techniques import ALL, OWN

MODULES = {".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
LONGEST_FILE, LONGEST_FUNCTION = 800, 80
# Longer files, each with the reason why it is one subject.
ONE_SUBJECT = {
    "cli/import_config.py": "another trainer's configuration, section by section",
    "config.py": "every key of the YAML, what it may hold, and its text",
    "data/schema.py": "every form that a row may have, and what is wrong with the others",
    "trainer/run.py": "a run from its refusals to its export",
    "trainer/checkpoint.py": "a checkpoint written, found, checked and restored",
}
# Lines a folder may have; "top" are the files directly in src/optrush. What is raised is raised in a commit of its own
# that says what the lines buy; what shrinks is lowered with it.
LINES = {
    "data": 10185,
    "trainer": 7960,
    "models": 9067,
    "techniques": 5840,
    "kernels": 4926,
    "top": 6612,
    "cli": 4514,
    "planner": 4586,
    "benchmark": 3835,
    "peft": 1988,
    "report": 1942,
    "optim": 1015,
    "objectives": 1205,
}
MOST_FILES = 243
MOST_MODULES_IN_PACKAGE = 15  # directly in src/optrush, without __init__ and __main__
MOST_SHARED_NAMES = 40  # public functions and classes whose name two modules or more define

PURE = (
    "errors", "config", "models.shapes", "hardware", "technique", "planner.ledger", "planner.optimizer",
    "planner.baseline", "planner.cost", "planner.search", "planner.sets", "decide", "launch", "planner.calibration",
    "models.source", "models.rope_config",
    "data.length_estimate", "optim.schedule", "cli", "techniques",
)  # fmt: skip
FOUNDATION = ("models", "kernels", "objectives", "optim", "data")  # import nothing of the trainer
ABOVE = (
    "techniques", "trainer.trainer", "trainer.build", "trainer.run", "trainer.metrics", "trainer.checkpoint",
    "trainer.run_dir", "exporting", "restore", "generation", "cli",
)  # fmt: skip
# Modules and folders whose code and strings name no technique.
TECHNIQUE_FREE = (
    "trainer.trainer", "trainer.run", "trainer.metrics", "trainer.build", "trainer.checkpoint", "trainer.distributed",
    "decide", "config", "exporting", "technique", "model_card", "restore", "generation", "planner", "benchmark", "cli",
)  # fmt: skip
# What a module names all the same, each with the reason.
NAMED = {
    "cli.app": ({"DeepSpeed"}, "a logger of the library"),
    "cli.chat": ({"bf16", "fp8"}, "formats of exported files"),
    "cli.setup": ({"lora"}, "the methods of `method:`, explained"),
    "config": ({"lora", "nf4"}, "METHODS, the one place where a method is spelled out as techniques"),
    "decide": ({"lora"}, "the methods of `method:`, in the order of their quality"),
    "planner.answer": ({"lora"}, "the methods of `method:`"),
}
TRANSLATING = ("cli.import_config", "cli.import_sharding")  # other tools' keys into techniques


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(dotted(n).endswith("TYPE_CHECKING") for n in ast.walk(node.test))


def imports(tree: ast.AST, *, deep: bool) -> list[str]:
    """Modules named by imports outside `if TYPE_CHECKING`; without `deep` outside functions too."""
    found: list[str] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            waiting += node.orelse
        elif not isinstance(node, ast.expr) and (deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return found


@cache
def imported(name: str, deep: bool) -> frozenset[str]:
    """What a module of the package imports."""
    return frozenset(imports(parsed(MODULES[name]), deep=deep))


def ours(name: str, *, deep: bool) -> frozenset[str]:
    """Modules of the package that one imports directly; importing a submodule runs its packages' __init__ too."""
    found = set()
    for module in imported(name, deep):
        parts = module.split(".")
        found |= {m for i in range(1, len(parts) + 1) if (m := ".".join(parts[:i])) in MODULES}
    return frozenset(found - {name})


@cache
def loads(name: str) -> frozenset[str]:
    """Modules of the package that are loaded when this one is imported."""
    return ours(name, deep=False)


def reached(name: str) -> dict[str, str]:
    """Modules of the package that importing this one loads, each with the module that imports it."""
    by, waiting = {name: ""}, [name]
    while waiting:
        here = waiting.pop()
        for there in loads(here):
            if there not in by:
                by[there] = here
                waiting.append(there)
    return by


def circle(graph: Mapping[str, frozenset[str]]) -> list[str]:
    """One circle of a graph as the list of its nodes, the first repeated at the end; empty without one."""
    done: set[str] = set()
    for begin in sorted(graph):
        if begin in done:
            continue
        path, stack = [begin], [iter(sorted(graph[begin]))]
        while stack:
            there = next(stack[-1], None)
            if there is None:
                stack.pop()
                done.add(path.pop())
            elif there in path:
                return [*path[path.index(there) :], there]
            elif there not in done:
                path.append(there)
                stack.append(iter(sorted(graph[there])))
    return []


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == f"optrush.{p}" or name.startswith(f"optrush.{p}.") for p in parts)


@cache
def torches(name: str) -> bool:
    heavy = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "matplotlib")
    return any(module.split(".")[0] in heavy for module in imported(name, False))


def below(*parts: str) -> list[str]:
    return [name for name in MODULES if within(name, parts)]


def test_the_pure_layer_imports_no_torch() -> None:
    """Neither directly nor through another module of the package: help, checks and plans run without it."""
    chains = []
    for name in below(*PURE):
        by = reached(name)
        for module in sorted(filter(torches, by)):
            chain = [module]
            while chain[-1] != name:
                chain.append(by[chain[-1]])
            chains.append(" <- ".join(chain) + ", which imports torch or its like")
    assert not chains, "\n".join(chains)


def test_the_foundation_imports_nothing_above_it() -> None:
    up = {
        name: found for name in below(*FOUNDATION) if (found := {m for m in imported(name, True) if within(m, ABOVE)})
    }
    assert not up, up


@pytest.mark.parametrize("name", below("errors", "config", "models.shapes", "hardware"))
def test_the_lowest_import_errors_only(name: str) -> None:
    more = {
        "optrush.models.shapes": {
            f"optrush.models{end}"
            for end in ("", ".config_json", ".families", ".parts", ".published", ".rope_config", ".text_part")
        },
        "optrush.config": {"optrush.foreign_keys"},  # hints for the keys of other tools
    }
    assert loads(name) <= {"optrush", "optrush.errors", *more.get(name, ())}


def test_techniques_do_not_import_each_other() -> None:
    files = [name for name in MODULES if name.startswith("optrush.techniques.")]
    others = {
        name: found for name in files if (found := [m for m in imported(name, True) if within(m, ("techniques",))])
    }
    assert not others, others


def test_no_circular_imports() -> None:
    """Imports inside functions count: they only hide a circle."""
    graph = {name: frozenset(m for m in ours(name, deep=True) if not name.startswith(f"{m}.")) for name in MODULES}
    assert not circle(graph), " -> ".join(circle(graph))


def test_a_circle_inside_functions_is_found() -> None:
    lazy = ast.parse("def f() -> None:\n    from optrush import b")
    assert "optrush.b" in set(imports(lazy, deep=True)) - set(imports(lazy, deep=False))
    edges = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset("d"), "d": frozenset()}
    assert circle(edges) == []
    assert circle({**edges, "d": frozenset("b")}) == ["b", "c", "d", "b"]


# --- sizes and names


def test_the_package_is_small_enough() -> None:
    modules = [f.stem for f in SOURCE.glob("*.py") if f.stem not in ("__init__", "__main__")]
    assert len(modules) <= MOST_MODULES_IN_PACKAGE, modules


def over(lines: Mapping[str, int], files: int) -> list[str]:
    """What is over its budget, with its count."""
    held = [f"{name}: {count:,} lines, budget {LINES.get(name, 0):,}" for name, count in sorted(lines.items())
            if count > LINES.get(name, 0)]  # fmt: skip
    if files > MOST_FILES:
        held.append(f"{files} files, budget {MOST_FILES}")
    return held


def test_every_folder_keeps_its_budget() -> None:
    lines: Counter[str] = Counter()
    for file in FILES:
        folder = file.relative_to(SOURCE).parts[0] if file.parent != SOURCE else "top"
        lines[folder] += len(file.read_text("utf-8").splitlines())
    large = over(lines, len(FILES))
    assert not large, "\n".join(large)


def test_what_is_over_its_budget_is_listed() -> None:
    assert not over(LINES, MOST_FILES)
    grown = over({**LINES, "data": LINES["data"] + 1, "elsewhere": 1}, MOST_FILES + 1)
    assert [line.partition(":")[0] for line in grown] == [
        "data",
        "elsewhere",
        f"{MOST_FILES + 1} files, budget {MOST_FILES}",
    ]


def test_few_names_are_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, file in MODULES.items():
        for node in parsed(file).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert len(shared) <= MOST_SHARED_NAMES, "\n".join(f"{len(shared)} names: {shared}".split("], "))


def test_nothing_is_too_long() -> None:
    long = []
    for file in FILES:
        lines, name = len(file.read_text("utf-8").splitlines()), str(file.relative_to(SOURCE))
        if lines > LONGEST_FILE and name not in ONE_SUBJECT:
            long.append(f"{name}: {lines} lines, and no reason in ONE_SUBJECT")
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > LONGEST_FUNCTION:
                    long.append(f"{name}:{node.lineno}: {node.name} has {size} lines")
    assert not long, "\n".join(long)


# --- forbidden code

MODULES_BANNED = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "warnings.warn", "torch.load"}
CALLS_BANNED = {"eval", "exec", "__import__", "os.system"}
ENDS_BANNED = ("warnings.warn", "pickle.load", "pickle.loads", "torch.load", "torch.save")


def forbidden(file: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file that may not be there, each with the reason."""
    for node in parsed(file).body:
        if isinstance(node, ast.Try) and any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(node)):
            yield node.lineno, "an import that may fail belongs to a technique's needs"
    for module in MODULES_BANNED & set(imports(parsed(file), deep=True)):
        yield 1, f"imports {module}"
    for node in nodes(file):
        match node:
            case ast.Name(id="NotImplementedError"):
                yield node.lineno, "NotImplementedError"
            case ast.ExceptHandler(type=None):
                yield node.lineno, "a bare except"
            case ast.keyword(arg="trust_remote_code", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield node.lineno, "runs code from a model's folder"
            case ast.Call(func=func):
                called = dotted(func)
                if called in CALLS_BANNED or called.endswith(ENDS_BANNED):
                    yield node.lineno, called
                if called == "print" and file.parent != SOURCE / "cli":
                    yield node.lineno, "only the command line prints"


def test_forbidden_code() -> None:
    found = [f"{file.relative_to(SOURCE)}:{line}: {reason}" for file in FILES for line, reason in forbidden(file)]
    assert not found, "\n".join(found)


def test_what_is_forbidden_is_found(tmp_path: Path) -> None:
    (file := tmp_path / "bad.py").write_text(
        "try:\n    import a\nexcept:\n    raise NotImplementedError\nimport pickle\nx = y.z().torch.load(1)\n"
        "eval(1)\nprint(1)\nopen_model(trust_remote_code=True)\nclosed(trust_remote_code=False)\n"
    )
    assert sorted(line for line, _ in forbidden(file)) == [1, 1, 3, 4, 6, 7, 8, 9]


# They read what the kernel or the package itself has; all others read by `files`, which takes regular files alone.
READERS = {
    "files.py", "hardware.py", "launch.py", "technique.py", "benchmark/record.py", "cli/launch.py", "cli/setup.py",
    "data/mask.py", "data/pool.py", "data/sample.py", "data/tokenize.py", "tokenizer_files.py", "models/source.py",
    "models/tiny.py", "objectives/reward_pool.py", "planner/calibration.py",
    "trainer/metrics.py",
}  # fmt: skip


def read_by_itself(file: Path) -> list[int]:
    """Lines of a file that open another one to read it."""
    calls = [node for node in nodes(file) if isinstance(node, ast.Call)]
    ways = {id(call): {arg.value for arg in call.args if isinstance(arg, ast.Constant)} for call in calls}
    return [
        call.lineno for call in calls
        if (dotted(call.func).rpartition(".")[2] in ("read_text", "read_bytes", "FileIO")
        and isinstance(call.func, ast.Attribute))
        or (dotted(call.func).endswith("open") and {"r", "rb", "r+"} & ways[id(call)])
    ]  # fmt: skip


def test_files_are_read_in_one_place(tmp_path: Path) -> None:
    found = {str(file.relative_to(SOURCE)): lines for file in FILES if (lines := read_by_itself(file))}
    assert set(found) <= READERS, found
    (file := tmp_path / "bad.py").write_text(
        "p.read_text()\nread_text(p)\n(a / b).open('rb')\nio.FileIO(p)\nopen('w')\n"
    )
    assert read_by_itself(file) == [1, 3, 4]


SHORT = 15  # lines that a name and the module's docstring can carry


def undocumented(file: Path) -> Iterator[str]:
    """The module, and its public functions and classes of more than a few lines, that have no docstring."""
    tree = parsed(file)
    if not ast.get_docstring(tree):
        yield str(file)
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]
    overriding = set(STAGES) | {"forward", "backward", "needs", "main"}
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.FunctionDef) and scope is not tree and node.name in overriding:
                continue  # explained where it is declared
            size = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if size > SHORT and not ast.get_docstring(node):
                yield f"{file}:{node.lineno}: {node.name}"


def test_docstrings() -> None:
    missing = [name for file in FILES for name in undocumented(file)]
    assert not missing, "\n".join(missing)


# --- the techniques


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_what_a_technique_declares(technique: type) -> None:
    text = technique.__doc__ or ""
    for heading in ("Source:", "Memory:", "Work:"):
        assert re.search(rf"^\s*{heading} \S", text, re.MULTILINE), f"{technique.name} has no line {heading}"
    assert text.splitlines()[0].strip().endswith((".", ":"))
    assert technique.summary and len(technique.summary) <= 100 and not technique.summary.endswith(".")
    assert technique.source.startswith("https://")
    assert technique.source in text, "the docstring and the field name one source"
    assert isinstance(technique.numerics, Numerics)
    assert technique.verified_on and set(technique.verified_on) <= {"cpu", "gpu"}
    assert dataclasses.is_dataclass(technique) and technique.__dataclass_params__.frozen
    assert (ROOT / technique.proof.partition("::")[0]).is_file(), f"{technique.name}: no {technique.proof}"
    page = ROOT / "docs" / "techniques" / f"{technique.name}.md"
    assert page.is_file(), f"{technique.name} has no {page.relative_to(ROOT)}"


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_a_technique_has_its_page(technique: type) -> None:
    """The page has the numerics, the options with their defaults, the source and the proof that the code has."""
    page = (ROOT / "docs" / "techniques" / f"{technique.name}.md").read_text("utf-8")
    assert page.startswith(f"# {technique.name}\n")
    card = re.findall(r"^\| \*\*([a-z ]+)\*\* \| \S.* \|$", page.partition("\n## ")[0], re.MULTILINE)
    assert card == ["saves", "costs", "measured", "when", "when not"], f"the card of {technique.name}"
    for needed in (technique.source, technique.proof, technique.numerics.name):
        assert needed in page, f"{needed} is not on the page of {technique.name}"
    for field in dataclasses.fields(technique):
        row = re.search(rf"^\| `{field.name}` \| `([^`]*)` \|", page, re.MULTILINE)
        assert row and row[1] == str(field.default), f"{technique.name}: {field.name} and its default"
    for heading in (
        "## What it does",
        "## Memory",
        "## Work",
        "## Measured",
        "## When",
        "## Options",
        "## Proof",
        "## Source",
    ):
        assert f"\n{heading}" in page, f"{technique.name} has no {heading}"


def test_the_index_lists_every_technique() -> None:
    text = (ROOT / "docs/techniques/README.md").read_text("utf-8")
    for technique in ALL:
        assert f"[{technique.name}]({technique.name}.md)" in text


def test_names_are_unique_and_plain() -> None:
    names = [t.name for t in ALL]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*", name) for name in names)
    files = {f.stem for f in (SOURCE / "techniques").glob("*.py")} - {"__init__"}
    assert {f"optrush.techniques.{file}" for file in files} == {t.__module__ for t in OWN}, "each has one or several"


# Words, and names of stages and methods.
ORDINARY = {
    "attention", "compile", "context", "experts", "micro-batch", "packing", "pipeline", "recompute", "tensor",
}  # fmt: skip
EXAMPLE = {"help", "epilog", "metavar"}  # arguments that are shown to people: an example names what it likes


def named(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that name a technique in code or in a string; messages may name the flag to add (`--with ddp`)."""
    shown = {id(inner) for node in nodes(file) for text in texts(node) for inner in ast.walk(text)}
    classes = {t.__name__ for t in ALL}
    names = {t.name for t in ALL} - ORDINARY | classes
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in shown:
            text = re.sub(r"--with(out)? [\w-]+|torch\.[\w.]+", "", node.value)
            for name in sorted(names & set(re.findall(r"[A-Za-z][\w-]*", text))):
                yield node.lineno, name
        word = dotted(node)
        if word.rpartition(".")[2] in classes and not word.startswith("typer."):
            yield node.lineno, word.rpartition(".")[2]


def texts(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, and the help of options."""
    if (
        isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    ):
        yield node.body[0]
    if isinstance(node, ast.keyword) and node.arg in EXAMPLE:
        yield node.value


def test_no_technique_is_named() -> None:
    assert not (lost := [part for part in TECHNIQUE_FREE if not below(part)]), f"no such module: {lost}"
    found = []
    for name in sorted(set(below(*TECHNIQUE_FREE)) - set(below(*TRANSLATING))):
        allowed, _ = NAMED.get(name.removeprefix("optrush."), (set(), ""))
        found += [f"{name}:{line}: {word}" for line, word in sorted(named(MODULES[name])) if word not in allowed]
    assert not found, "\n".join(found)


def test_a_name_of_a_technique_is_found(tmp_path: Path) -> None:
    (file := tmp_path / "named.py").write_text(
        '"""ddp"""\nx = "fsdp"\n'
        + ALL[0].__name__
        + '\ny = "add --with ddp"\noption(help="as nf4")\nz = f"{x}, the ddp of"\n'
    )
    assert sorted(named(file)) == [(2, "fsdp"), (3, ALL[0].__name__), (6, "ddp")]


COPIES = re.compile(r"\bmodel_copy\b")


def test_a_configuration_is_completed_in_one_place() -> None:
    """`model_copy` makes a configuration out of another one: only `decide` does."""
    places = [str(file.relative_to(SOURCE)) for file in FILES if COPIES.search(file.read_text("utf-8"))]
    assert places == ["decide.py"], places


def test_the_environment_holds_no_names_of_techniques() -> None:
    assert not {f.name for f in dataclasses.fields(Environment)} & {"techniques", "names", "with_", "run"}
