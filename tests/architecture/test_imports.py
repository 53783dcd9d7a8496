"""Rules of the source tree, checked on its syntax trees: imports, sizes, names, what techniques must declare.

Imports under `if TYPE_CHECKING` are exempt from every rule: they are not executed.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from optrush.technique import STAGES, Environment, Numerics
from optrush.techniques import ALL, OWN

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "optrush"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
LONGEST_FILE, LONGEST_FUNCTION = 800, 80
# Longer files, each with the reason why it is one subject.
ONE_SUBJECT = {
    "cli/import_config.py": "the combining of facts, which tools give key by key, into one YAML",
    "config.py": "every key of the YAML, what it may hold, and its text",
    "data/chat_template.py": "merged from several files; to be made smaller",
    "data/cleaning.py": "merged from several files; to be made smaller",
    "data/dataset.py": "samples, however they come to be: one chain from `data:` to documents by number",
    "data/readers.py": "merged from several files; to be made smaller",
    "data/schema.py": "the kinds of rows, and the keys of other tools that each obeys or refuses",
    "data/tokenize.py": "merged from several files; to be made smaller",
}
MOST_FILES = 210  # one a technique, and of a technique with kernels or modules of its own one more
MOST_MODULES_IN_PACKAGE = 14  # directly in src/optrush, without __init__ and __main__
MOST_SHARED_NAMES = 40  # public functions and classes whose name two modules or more define

PURE = (
    "errors", "config", "models.shapes", "hardware", "technique", "planner.ledger", "planner.optimizer",
    "planner.baseline", "planner.cost", "planner.search", "resolve", "launch", "planner.calibration", "models.source",
    "data.length_estimate", "optim.schedule", "cli", "techniques",
)  # fmt: skip
FOUNDATION = ("models", "kernels", "objectives", "optim", "data")  # import nothing of the trainer
ABOVE = (
    "techniques", "trainer.trainer", "trainer.build", "trainer.run", "trainer.metrics", "trainer.checkpoint",
    "trainer.run_dir", "export", "restore", "generate", "cli",
)  # fmt: skip
# Modules whose code and strings name no technique.
TECHNIQUE_FREE = (
    "trainer.trainer", "trainer.run", "trainer.metrics", "trainer.build", "trainer.checkpoint", "trainer.distributed",
    "resolve", "export", "technique", "planner.cost", "model_card", "restore", "generate",
)  # fmt: skip


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, deep: bool) -> Iterator[str]:
    """Modules named by imports outside `if TYPE_CHECKING`; without `deep` outside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from imports(other, deep=deep)
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, deep=deep)


def ours(name: str, *, deep: bool) -> frozenset[str]:
    """Modules of the package that one imports directly; importing a submodule runs its packages' __init__ too."""
    found = set()
    for module in imports(parsed(MODULES[name]), deep=deep):
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


def torches(name: str) -> bool:
    heavy = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "matplotlib")
    return any(module.split(".")[0] in heavy for module in imports(parsed(MODULES[name]), deep=False))


@pytest.mark.parametrize("name", sorted(n for n in MODULES if within(n, PURE)))
def test_the_pure_layer_imports_no_torch(name: str) -> None:
    """Neither directly nor through another module of the package: help, checks and plans run without it."""
    by = reached(name)
    for module in sorted(by):
        if torches(module):
            chain = [module]
            while chain[-1] != name:
                chain.append(by[chain[-1]])
            pytest.fail(" <- ".join(chain) + ", which imports torch or its like")


@pytest.mark.parametrize("name", sorted(n for n in MODULES if within(n, FOUNDATION)))
def test_the_foundation_imports_nothing_above_it(name: str) -> None:
    up = sorted(m for m in imports(parsed(MODULES[name]), deep=True) if within(m, ABOVE))
    assert not up, f"{name} imports {up[0]}"


@pytest.mark.parametrize(
    "name", sorted(n for n in MODULES if within(n, ("errors", "config", "models.shapes", "hardware")))
)
def test_the_lowest_import_errors_only(name: str) -> None:
    text = (
        {"optrush.models", "optrush.models.config_json", "optrush.models.published", "optrush.models.text_part"}
        if name == "optrush.models.shapes"
        else set()
    )
    assert loads(name) <= {"optrush", "optrush.errors", *text}


@pytest.mark.parametrize("name", sorted(n for n in MODULES if n.startswith("optrush.techniques.")))
def test_techniques_do_not_import_each_other(name: str) -> None:
    others = [m for m in imports(parsed(MODULES[name]), deep=True) if m.startswith("optrush.techniques")]
    assert not others, f"{name} imports {others[0]}"


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
    assert len(FILES) <= MOST_FILES


def test_few_names_are_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, file in MODULES.items():
        for node in parsed(file).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert len(shared) <= MOST_SHARED_NAMES, "\n".join(f"{len(shared)} names: {shared}".split("], "))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_nothing_is_too_long(file: Path) -> None:
    lines, name = len(file.read_text("utf-8").splitlines()), str(file.relative_to(SOURCE))
    assert lines <= LONGEST_FILE or name in ONE_SUBJECT, f"{file}: {lines} lines, and no reason in ONE_SUBJECT"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= LONGEST_FUNCTION, f"{file}:{node.lineno}: {node.name} has {size} lines"


# --- forbidden code


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_forbidden_code(file: Path) -> None:
    tree = parsed(file)
    for node in tree.body:
        if isinstance(node, ast.Try):
            tried = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not tried, f"{file}:{node.lineno}: an import that may fail belongs to a technique's needs"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id != "NotImplementedError", f"{file}:{node.lineno}: NotImplementedError"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{file}:{node.lineno}: a bare except"
    modules = set(imports(tree, deep=True))
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "warnings.warn", "torch.load"} & modules
    assert not banned, f"{file} imports {banned}"
    for line, called in calls(tree):
        assert called not in ("eval", "exec", "__import__", "os.system"), f"{file}:{line}: {called}"
        assert not called.endswith(("warnings.warn", "pickle.load", "pickle.loads", "torch.load", "torch.save")), (
            f"{file}:{line}: {called}"
        )
        prints = file.parent == SOURCE / "cli"
        assert called != "print" or prints, f"{file}:{line}: only the command line prints"


def test_no_code_from_a_models_folder() -> None:
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, file


SHORT = 15  # lines that a name and the module's docstring can carry


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_docstrings(file: Path) -> None:
    """Every module, and every public function and class that is more than a few lines."""
    tree = parsed(file)
    assert ast.get_docstring(tree), file
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]
    overriding = set(STAGES) | {"forward", "backward", "needs", "main"}
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.FunctionDef) and scope is not tree and node.name in overriding:
                continue  # explained where it is declared
            size = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            assert size <= SHORT or ast.get_docstring(node), f"{file}:{node.lineno}: {node.name}"


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


@pytest.mark.parametrize("name", TECHNIQUE_FREE)
def test_no_technique_is_named(name: str) -> None:
    """As a word of code or of a string; messages may name the flag to add (`--with ddp`)."""
    tree = parsed(SOURCE / f"{name.replace('.', '/')}.py")
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    # Words, and names of stages and methods.
    ordinary = {
        "attention", "compile", "context", "experts", "micro-batch", "packing", "pipeline", "recompute", "tensor",
    }  # fmt: skip
    names = {t.name for t in ALL} - ordinary | {t.__name__ for t in ALL}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            text = re.sub(r"--with(out)? [\w-]+|torch\.[\w.]+", "", node.value)
            found = names & set(re.findall(r"[A-Za-z][\w-]*", text))
            assert not found, f"{name}.py:{node.lineno}: {found}"
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            assert word not in {t.__name__ for t in ALL}, f"{name}.py:{node.lineno}: {word}"


def test_the_environment_holds_no_names_of_techniques() -> None:
    assert not {f.name for f in dataclasses.fields(Environment)} & {"techniques", "names", "with_", "run"}
