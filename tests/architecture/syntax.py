"""The syntax trees of this repository's files, each read once for all checks."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "optrush"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` gives them."""
    return tuple(ast.walk(parsed(file)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name and its attributes; of any other expression what follows it, as `.b.c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
