"""Check that every name of the package which a program here uses exists.

Type checkers read neither benchmarks nor the strings given to `monkeypatch.setattr`, and tests on a GPU run seldom.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from syntax import ROOT, nodes

from optrush.models.families import FAMILIES, MULTIMODAL, SAME

PROGRAMS = [p for d in ("tests", "benchmarks", "examples") for p in sorted((ROOT / d).rglob("*.py"))]


def file_of(module: str) -> Path | None:
    at = ROOT / "src" / module.replace(".", "/")
    return next((f for f in (at.with_suffix(".py"), at / "__init__.py") if f.is_file()), None)


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return the names that a module of the package binds, submodules included; None: there is no such module."""
    file = file_of(module)
    if file is None:
        return None
    found = {p.stem for p in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in nodes(file):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(a.asname or a.name).split(".")[0] for a in names}
    return frozenset(found)


def is_missing(module: str, name: str) -> bool:
    names = names_of(module)
    return names is not None and name not in names and not name.startswith("__")


def missing(tree: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names of the package that are imported, read or set, and do not exist."""
    imported = [
        (a.asname or a.name, node.module or "", f"{node.module}.{a.name}")
        for node in tree
        if isinstance(node, ast.ImportFrom)
        for a in node.names
    ]
    modules = {local: inner for local, _, inner in imported if file_of(inner)}
    for local, module, inner in imported:
        is_ours = module.split(".")[0] == "optrush" and not file_of(inner)
        if is_ours and (names_of(module) is None or is_missing(module, inner.rpartition(".")[2])):
            yield inner
        if local in modules and modules[local] != inner:
            del modules[local]  # two functions mean different modules by it
    for node in tree:
        match node:
            case ast.Attribute(value=ast.Name(id=local), attr=name) if local in modules:
                if is_missing(modules[local], name):
                    yield f"{modules[local]}.{name}"
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "object"),
                args=[ast.Name(id=local), ast.Constant(value=str(name)), *_],
            ) if local in modules:
                if is_missing(modules[local], name):
                    yield f"{modules[local]}.{name}, set"
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(text)), *_]) if (
                text.startswith("optrush.")
            ):
                parts = text.split(".")
                known = max(n for n in range(1, len(parts) + 1) if names_of(".".join(parts[:n])) is not None)
                if known < len(parts) and is_missing(".".join(parts[:known]), parts[known]):
                    yield f"{text}, set"


def test_names_of_the_package_exist() -> None:
    lost = {str(file.relative_to(ROOT)): names for file in PROGRAMS if (names := list(missing(nodes(file))))}
    assert not lost, lost


def test_what_is_missing_is_found() -> None:
    program = """
from optrush.trainer import run, nowhere
from optrush.trainer.run import no_such
run.no_such()
patch.setattr(run, "nothing", 1)
patch.setattr("optrush.trainer.run.none", 1)
"""
    assert len(list(missing(list(ast.walk(ast.parse(program)))))) == 5


# --- families are known by their switches

NAMED = {  # files that name families of our decoder, besides their table
    "models/published.py": "config.json files", "models/tiny.py": "the families of small checkpoints",
    "decide.py": "the dense decoder that stands in for a family without a memory plan",
    "models/gguf.py": "a rule for splitting words, which has a family's name in the format",
}  # fmt: skip


def families_in(tree: ast.Module) -> set[str]:
    """Return the families that a program has as strings."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings & {*FAMILIES, *MULTIMODAL, *SAME}


def test_no_family_is_known_by_its_name() -> None:
    """A family is one entry of `FAMILIES`; everything else asks for its switches."""
    source = ROOT / "src/optrush"
    found = {str(p.relative_to(source)): families_in(ast.parse(p.read_text("utf-8"))) for p in source.rglob("*.py")}
    assert {file for file, names in found.items() if names} == {"models/families.py", *NAMED}
    assert families_in(ast.parse("if shape.family in ('llama', 'odd'): pass")) == {"llama"}
