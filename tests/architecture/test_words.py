"""Checks of the prose: plain technical English in docstrings and comments, and relative links that lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from syntax import FILES, ROOT, nodes

# Words that speak of code as of a person, or for which the field has a plainer one (logs, requests, returns, is stored,
# is next to).
BANNED = re.compile(
    r"\b(tells?|told|asks?|asked|says?|said|wants?|wanted|lies|lying|lie|beside|nobody|somebody|whoever|by heart|who"
    r"|whom|knows?|knew|stands?|stood|obeys?|speaks?|hears?|sees?|the mend)\b",
    re.IGNORECASE,
)
MOST_BANNED = 0.01  # share of sentences


def comments(source: str, tree: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    """Lines with a comment, each with the comment; a `#` inside a string is none."""
    rows = source.splitlines()
    marked = {n: row for n, row in enumerate(rows, 1) if "#" in row}
    inside: dict[int, list[tuple[float, float]]] = {}
    for node in tree:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            last = node.end_lineno or node.lineno
            for n in range(node.lineno, last + 1):
                begin = node.col_offset if n == node.lineno else 0
                inside.setdefault(n, []).append((begin, (node.end_col_offset or 0) if n == last else float("inf")))
    for n, row in marked.items():
        data = row.encode()
        for found in re.finditer(rb"#", data):
            if not any(begin <= found.start() < end for begin, end in inside.get(n, ())):
                yield n, data[found.start() :].decode()
                break


def prose(source: str, tree: tuple[ast.AST, ...] = ()) -> Iterator[str]:
    """Strings that stand alone as statements (docstrings of modules, classes, functions, fields), then comments.

    Comments on consecutive lines are one text.
    """
    tree = tree or tuple(ast.walk(ast.parse(source)))
    for node in tree:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    block: list[str] = []
    last = 0
    for line, comment in comments(source, tree):
        if block and line != last + 1:
            yield " ".join(block)
            block = []
        block.append(comment.lstrip("# "))
        last = line
    if block:
        yield " ".join(block)


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text) if re.search(r"\w{2}", s)]


def test_sentences_of_docstrings_and_comments_are_found() -> None:
    source = '"""One. Two:\nstill two.\n\nThree"""\nx = 1  # four\n# five,\n# goes on\n"""six"""\ny = "none"\n'
    found = [s for text in prose(source) for s in sentences(text)]
    assert found == ["One.", "Two:", "still two.", "Three", "six", "four five, goes on"]


def test_docstrings_and_comments_are_plain() -> None:
    texts = ((file, text) for file in FILES for text in prose(file.read_text("utf-8"), nodes(file)))
    written = [(file, sentence) for file, text in texts for sentence in sentences(text)]
    banned = [f"{file.relative_to(ROOT)}: {' '.join(s.split())}" for file, s in written if BANNED.search(s)]
    share = len(banned) / len(written)
    assert share <= MOST_BANNED, f"{share:.1%} of all sentences have a banned word:\n" + "\n".join(sorted(banned)[:50])


# --- links


@cache
def pages() -> dict[Path, str]:
    """Tracked Markdown files without their code blocks."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    return {file: re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL) for file in files}


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    plain = (re.sub(r"[`*]", "", h).strip().lower() for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(page: Path, text: str, known: dict[Path, str]) -> list[str]:
    """Relative links of a page to a file or a heading that does not exist."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if ":" in link.partition("/")[0]:  # https:, mailto:
            continue
        if not target.exists() or (anchor and anchor not in anchors(known.get(target, ""))):
            dead.append(link)
    return dead


def test_links_lead_somewhere() -> None:
    dead = {str(p.relative_to(ROOT)): links for p, t in pages().items() if (links := dead_links(p, t, pages()))}
    assert not dead


@pytest.mark.parametrize("link", ["no.md", "#no", "README.md#no"])
def test_a_dead_link_is_found(link: str) -> None:
    readme = ROOT / "README.md"
    assert dead_links(readme, f"# Title\n[text]({link}) and [this](#title)", {readme: "# Title"}) == [link]
