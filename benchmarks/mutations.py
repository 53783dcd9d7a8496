"""Break lines of the package one at a time and see which test notices.

    python benchmarks/mutations.py --out build/mutations.jsonl [--commit HEAD] [--lines 40] [--seed 1]

Picks lines inside functions by a seed, as many of a folder as its share of the package. One operator breaks each: a
comparison turned, + for -, `and` for `or`, a constant one higher, `not` dropped, None returned, a call left out.
Text for people (messages, logs) is left alone. The nearest test files of the broken module (tests/changed.py) run in a
worktree of the commit. The same command goes on where it stopped.

`--again FILE` breaks the same functions of another commit, by their names: it shows whether a rewrite of the tests
still proves what they proved.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/optrush")
WITHOUT_GPU = ("_triton.py", "_quack.py")  # files that no test here reaches
FOR_PEOPLE = re.compile(r"Error|Requirement|print|\blog\b|logg|note|warn|echo|style|markup|help|reason|message|typer")
COMPARED = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
REPLACED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
WAITING = 10  # seconds by the clock for one of the processor: others may use the machine
OUT_OF_TIME = (124, 137, 152, -9, -24)  # by `timeout`, and of a process past its limit


@dataclass(frozen=True)
class Mutant:
    """One broken place."""

    file: str  # below src/optrush
    line: int
    column: int  # bytes
    function: str  # qualified
    operator: str
    before: str
    after: str

    @property
    def module(self) -> str:
        return f"optrush.{self.file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


# --- operators


def broken(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The ways to break one node: an operator's name and what stands in its place."""
    new = copy.copy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            new.ops = [COMPARED[type(op)]()]
            yield "comparison", new
        case ast.BinOp(left=left, right=right, op=op) if type(op) in REPLACED and not (text(left) or text(right)):
            new.op = REPLACED[type(op)]()
            yield "arithmetic", new
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op):
            new.op = REPLACED[type(op)]()
            yield "arithmetic", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", new
        case ast.UnaryOp(op=ast.Not()):
            yield "not", new.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "condition", test  # negated below
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield "call", ast.Pass()


def text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def for_people(node: ast.AST) -> bool:
    """Whether a node is prose, an annotation or a message: nothing below it is broken."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
        return True
    return isinstance(node, ast.Call) and bool(FOR_PEOPLE.search(ast.unparse(node.func)))


def places(node: ast.AST, at: str = "", inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of a file's functions that may be broken, each with its function's qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            function = isinstance(child, ast.FunctionDef)
            for part in child.body:
                holder = ast.Module([part], [])
                yield from places(holder, f"{at}.{child.name}".removeprefix("."), inside or function)
        elif not for_people(child) and not (isinstance(child, ast.Expr) and for_people(child.value)):
            if inside and not (isinstance(child, ast.Expr) and text(child.value)):
                yield at, child
            value = child.value if isinstance(child, ast.AnnAssign) else None
            yield from places(ast.Module([value], []) if value else child, at, inside)


def segment(rows: list[bytes], node: ast.AST) -> bytes:
    """The source of a node."""
    first, last = node.lineno - 1, node.end_lineno - 1
    if first == last:
        return rows[first][node.col_offset : node.end_col_offset]
    return b"".join((rows[first][node.col_offset :], *rows[first + 1 : last], rows[last][: node.end_col_offset]))


def mutants_of(tree: Path, name: str) -> Iterator[Mutant]:
    """Every way to break a file."""
    source = (tree / PACKAGE / name).read_bytes()
    rows = source.splitlines(keepends=True)
    for function, node in places(ast.parse(source)):
        for operator, new in broken(node):
            of = new if operator == "condition" else node
            after = f"not ({ast.unparse(new)})" if operator == "condition" else ast.unparse(new)
            if isinstance(new, ast.expr):
                after = f"({after})"
            place = (name, of.lineno, of.col_offset)
            yield Mutant(*place, function, operator, segment(rows, of).decode(), after)


def apply(mutant: Mutant, tree: Path) -> None:
    """Write the broken file into a copy of the tree."""
    file = tree / PACKAGE / mutant.file
    rows = file.read_bytes().splitlines(keepends=True)
    at, before = sum(map(len, rows[: mutant.line - 1])) + mutant.column, mutant.before.encode()
    source = file.read_bytes()
    assert source[at:].startswith(before), mutant
    whole = source[:at] + mutant.after.encode() + source[at + len(before) :]
    ast.parse(whole)
    file.write_bytes(whole)


# --- which lines


def mutants(tree: Path) -> Iterator[Mutant]:
    """Every way to break the package."""
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        if not file.name.endswith(WITHOUT_GPU):
            yield from mutants_of(tree, str(file.relative_to(tree / PACKAGE)))


def picked(tree: Path, count: int, seed: int) -> list[Mutant]:
    """Lines of all folders in proportion, one mutant a line and at most one a function."""
    draw, folders = random.Random(seed), defaultdict[str, dict[tuple[str, int], list[Mutant]]](dict)
    for mutant in mutants(tree):
        lines = folders[os.path.dirname(mutant.file) or "."]
        lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    total = sum(map(len, folders.values()))
    shares = {name: count * len(lines) / total for name, lines in folders.items()}
    quota = {name: max(1, int(share)) for name, share in shares.items()}
    for name in sorted(shares, key=lambda n: int(shares[n]) - shares[n])[: max(0, count - sum(quota.values()))]:
        quota[name] += 1
    chosen: dict[tuple[str, str], Mutant] = {}
    for name, lines in sorted(folders.items()):
        begin = len(chosen)
        while len(chosen) < begin + quota[name]:
            one = draw.choice(lines[draw.choice(sorted(lines))])
            chosen.setdefault((one.file, one.function), one)
    mixed = list(chosen.values())
    draw.shuffle(mixed)
    return mixed


def found_again(tree: Path, held: list[Mutant], seed: int) -> Iterator[Mutant]:
    """The same functions in today's tree, wherever they lie; the same place of each if it is still there."""
    today = defaultdict[str, list[Mutant]](list)
    for mutant in mutants(tree):
        today[mutant.function].append(mutant)
    for old in held:
        here = [m for m in today[old.function] if m.file == old.file] or today[old.function]
        alike = [m for m in here if (m.operator, m.before) == (old.operator, old.before)]
        if here:
            yield random.Random(f"{seed} {old.function}").choice(alike or here)
        else:
            print(f"{old.file}: {old.function} is gone", flush=True)


# --- what notices


def verdict(mutant: Mutant, tree: Path, tests: list[Path], options: argparse.Namespace) -> str:
    """The first test that fails, `survived`, `no time`, or `no test`."""
    if not tests:
        return "no test"
    arguments = ("-x", "-rfE", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *map(str, tests))
    limited = [*shlex.split(options.through), "timeout", str(options.limit * WAITING)]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "pytest", *arguments],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5)),
    )  # fmt: skip
    if done.returncode in OUT_OF_TIME:
        return "no time"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        return f"caught by a stop of all tests ({done.returncode})"
    return failed[1] if failed else "survived"


def table(rows: list[dict[str, str]]) -> Iterator[str]:
    for row in rows:
        change = f"{' '.join(row['before'].split())[:60]} -> {' '.join(row['after'].split())[:60]}"
        yield f"{row['file']}:{row['line']} {row['function']} | {row['operator']}: {change} | {row['verdict']}"
    counted = Counter(v if (v := row["verdict"]) in ("survived", "no time", "no test") else "caught" for row in rows)
    yield ", ".join(f"{count} {what}" for what, count in counted.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; the table is written beside them")
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--files", type=int, default=4, help="test files for each line")
    parser.add_argument("--limit", type=int, default=180, help="seconds of a processor for each line")
    parser.add_argument("--again", type=Path, help="the lines of this file, by their functions")
    parser.add_argument("--through", default="", help="a command before each run of tests, such as `nice`")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worktree is removed
    rows = [json.loads(line) for line in options.out.read_text("utf-8").splitlines()] if options.out.is_file() else []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "worktree")
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), options.commit], cwd=ROOT, check=True)
        try:
            shutil.copy(ROOT / "tests" / "changed.py", tree / "tests")
            sys.path.insert(0, str(tree / "tests"))
            import changed  # that of the tree, whose files it knows

            if options.again:
                held = [json.loads(line) for line in options.again.read_text("utf-8").splitlines()]
                old = [Mutant(**{key: value for key, value in one.items() if key != "verdict"}) for one in held]
                chosen = list(found_again(tree, old, options.seed))
            else:
                chosen = picked(tree, options.lines, options.seed)
            for mutant in chosen[len(rows) :]:
                apply(mutant, tree)
                tests = changed.nearest(mutant.module, options.files)
                rows.append({**asdict(mutant), "verdict": verdict(mutant, tree, tests, options)})
                subprocess.run(["git", "checkout", "--quiet", "--", "."], cwd=tree, check=True)
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
                options.out.with_suffix(".txt").write_text("\n".join(table(rows)) + "\n", "utf-8")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
