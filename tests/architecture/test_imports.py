"""The plan of the house, held by walking the syntax tree: who imports whom, what nobody writes, how large files are.

`if TYPE_CHECKING` is exempt: annotations cost nothing at run time.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from optrush.technique import STAGES, Numerics
from optrush.techniques import ALL

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "optrush"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = {".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
LONGEST_FILE, LONGEST_FUNCTION = 800, 80  # a longer file has one subject that is not to be torn, named here
ONE_SUBJECT = ("data/chat_template.py", "data/cleaning.py")  # to be made smaller

PURE = (
    "errors",
    "config",
    "models.shapes",
    "hardware",
    "technique",
    "planner.ledger",
    "planner.baseline",
    "planner.cost",
    "planner.search",
    "resolve",
    "launch",
    "planner.calibration",
    "planner.micro_batch",
    "judge",
    "models.source",
    "data.length_estimate",
    "optim.schedule",
    "cli",
    "commands",
    "techniques",
)
FOUNDATION = ("model", "kernels", "objectives", "optim", "data")  # they know nothing of a job
ABOVE = (
    "techniques",
    "trainer.trainer",
    "trainer.trainer",
    "trainer.build",
    "trainer.trainer",
    "trainer.run",
    "trainer.metrics",
    "trainer.checkpoint",
    "trainer.run_dir",
    "export",
    "restore",
    "generate",
    "cli",
)
# What neither loop nor assembly may know by name.
NAMELESS = (
    "trainer.trainer",
    "trainer.run",
    "trainer.trainer",
    "trainer.metrics",
    "trainer.trainer",
    "trainer.build",
    "resolve",
    "trainer.checkpoint",
    "trainer.distributed",
    "export",
    "technique",
    "trainer.run",
    "planner.micro_batch",
    "model_card",
    "restore",
    "generate",
)


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


@cache
def loads(name: str) -> frozenset[str]:
    """Our modules that importing this one runs directly; a package's __init__ is run with its parts."""
    found = set()
    for module in imports(parsed(NAMES[name]), deep=False):
        parts = module.split(".")
        found |= {m for i in range(1, len(parts) + 1) if (m := ".".join(parts[:i])) in NAMES}
    return frozenset(found - {name})


def reached(name: str) -> dict[str, str]:
    """Every one of our modules that importing this one runs, and which module brought it."""
    by, waiting = {name: ""}, [name]
    while waiting:
        here = waiting.pop()
        for there in loads(here):
            if there not in by:
                by[there] = here
                waiting.append(there)
    return by


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == f"optrush.{p}" or name.startswith(f"optrush.{p}.") for p in parts)


def torches(name: str) -> bool:
    heavy = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "matplotlib")
    return any(module.split(".")[0] in heavy for module in imports(parsed(NAMES[name]), deep=False))


@pytest.mark.parametrize("name", sorted(n for n in NAMES if within(n, PURE)))
def test_the_pure_layer_imports_no_torch(name: str) -> None:
    """Neither by itself nor through another of our modules: help, checks and plans answer without it."""
    by = reached(name)
    for module in sorted(by):
        if torches(module):
            chain = [module]
            while chain[-1] != name:
                chain.append(by[chain[-1]])
            pytest.fail(" <- ".join(chain) + ", which imports torch or its like")


@pytest.mark.parametrize("name", sorted(n for n in NAMES if within(n, FOUNDATION)))
def test_the_foundation_knows_nothing_above_it(name: str) -> None:
    up = sorted(m for m in imports(parsed(NAMES[name]), deep=True) if within(m, ABOVE))
    assert not up, f"{name} imports {up[0]}"


@pytest.mark.parametrize(
    "name", sorted(n for n in NAMES if within(n, ("errors", "config", "models.shapes", "hardware")))
)
def test_the_lowest_import_errors_only(name: str) -> None:
    ours = {m for m in loads(name) if m != "optrush"}
    assert ours <= {"optrush.errors"}, ours


@pytest.mark.parametrize("name", sorted(n for n in NAMES if n.startswith("optrush.techniques.")))
def test_techniques_do_not_know_each_other(name: str) -> None:
    others = [m for m in imports(parsed(NAMES[name]), deep=True) if m.startswith("optrush.techniques")]
    assert not others, f"{name} imports {others[0]}"


def test_nobody_imports_in_a_circle() -> None:
    for name in NAMES:
        for there in loads(name):
            assert name not in reached(there) or name == "optrush", f"{name} and {there}"


# --- what nobody writes


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_what_nobody_writes(file: Path) -> None:
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
        prints = file.name == "cli.py" or file.parent.name in ("commands", "cli")
        assert called != "print" or prints, f"{file}:{line}: only the command line prints"


def test_no_code_from_a_models_folder() -> None:
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_nothing_is_too_long(file: Path) -> None:
    lines = len(file.read_text("utf-8").splitlines())
    one_subject = str(file.relative_to(SOURCE)) in ONE_SUBJECT
    assert lines <= LONGEST_FILE or one_subject, f"{file}: {lines} lines"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= LONGEST_FUNCTION, f"{file}:{node.lineno}: {node.name} has {size} lines"


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
def test_a_technique_says_what_it_owes(technique: type) -> None:
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
    """The page says what the code says: numerics, options with their defaults, source, proof."""
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


def test_the_readme_lists_every_technique() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for technique in ALL:
        assert f"[{technique.name}](docs/techniques/{technique.name}.md)" in text


def test_names_are_unique_and_plain() -> None:
    names = [t.name for t in ALL]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]*", name) for name in names)
    files = {f.stem for f in (SOURCE / "techniques").glob("*.py")} - {"__init__"}
    assert files == {name.replace("-", "_") for name in names}, "one file a technique, named like it"


@pytest.mark.parametrize("name", NAMELESS)
def test_the_loop_and_what_carries_it_name_no_technique(name: str) -> None:
    """As a word of code or of a string; messages may tell a user which flag to add (`--with ddp`)."""
    tree = parsed(SOURCE / f"{name.replace('.', '/')}.py")
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    ordinary = {"attention", "compile", "micro-batch", "packing", "recompute"}  # words, and names of stages and methods
    names = {t.name for t in ALL} - ordinary | {t.__name__ for t in ALL}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            text = re.sub(r"--with(out)? [\w-]+|torch\.[\w.]+", "", node.value)
            found = names & set(re.findall(r"[A-Za-z][\w-]*", text))
            assert not found, f"{name}.py:{node.lineno}: {found}"
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            assert word not in {t.__name__ for t in ALL}, f"{name}.py:{node.lineno}: {word}"


def test_setup_shows_no_names() -> None:
    from optrush.technique import Environment

    assert not {f.name for f in dataclasses.fields(Environment)} & {"techniques", "names", "with_", "run"}
