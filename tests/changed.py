"""Which test files prove a source file, by imports and by names; run alone, the quick check of what was changed.

    python tests/changed.py [SECONDS]

runs the tests of everything that differs from `main`, the nearest first, and stops beginning tests after SECONDS (45).
It names what it left out. `make check` runs it beside the linters and tests/architecture.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if p.parent.name not in ("architecture", "gpu"))
MODULES = {
    ".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted((ROOT / "src").rglob("*.py"))
}
FURTHER, FAR = 0.3, 2  # what a test of a module proves of one that this imports, and over how many imports
LEAST, MOST = 0.15, 12  # a test file below this score, or after so many better ones, is left out
SECONDS = 45.0


# --- from a source file to its tests


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def uses(file: Path) -> frozenset[str]:
    """The package's modules that a file imports anywhere, or names in a string (for `monkeypatch.setattr`)."""
    named: set[str] = set()
    for node in ast.walk(tree(file)):
        match node:
            case ast.Import(names=names):
                named |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                named |= {f"{module}.{alias.name}" for alias in names}
            case ast.Constant(value=str(text)) if re.fullmatch(r"optrush\.[\w.]+", text):
                named.add(text)
    return frozenset(module for name in named if (module := module_of(name)))


def module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a module below the package; '' without one."""
    parts = name.split(".")
    return next((m for n in range(len(parts), 1, -1) if (m := ".".join(parts[:n])) in MODULES), "")


@cache
def importers(module: str) -> frozenset[str]:
    return frozenset(name for name, file in MODULES.items() if module in uses(file) and name != module)


@cache
def words(name: str) -> frozenset[str]:
    """The words of a file's name by their beginnings: `cleaning` and `clean` are one."""
    return frozenset(word[:5] for word in re.split(r"[_\W]+", name) if word not in ("test", "cli", ""))


@cache
def names(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """What a module defines, and the test files that its source names (a technique's proof)."""
    file = MODULES[module]
    defined = (n.name for n in tree(file).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
    return frozenset(defined), frozenset(re.findall(r'"(tests/[\w/]+\.py)', file.read_text("utf-8")))


@cache
def direct(module: str, test: Path) -> float:
    """How much of a test file is about a module: its name, the proof that the module declares, its imports."""
    (defined, proofs), stem, title = names(module), words(module.rpartition(".")[2]), words(test.stem)
    score = 0.0
    if stem and (stem <= title or str(test.relative_to(ROOT)) in proofs):
        score = 1.0
    elif stem & title:
        score = 0.4
    if score and MODULES[module].parent.name == test.parent.name:
        score += 0.4
    if module in uses(test):
        score += 0.4 + 2 / (3 + len(uses(test)))
    if MODULES[module].parent.name == test.parent.name and defined & set(test.stem.split("_")):
        score += 0.4
    return score


@cache
def scores(module: str) -> dict[Path, float]:
    """Every test file that has to do with a module, over the modules that import it too."""
    near, seen, best = {module}, {module}, Counter[Path]()
    for distance in range(FAR + 1):
        for name in near:
            for test in TESTS:
                best[test] = max(best[test], direct(name, test) * FURTHER**distance)
        near = {by for name in near for by in importers(name)} - seen
        seen |= near
    return {test: score for test, score in best.items() if score >= LEAST}


def nearest(module: str, most: int = MOST) -> list[Path]:
    """The test files of a module, the nearest first."""
    ranked = sorted(scores(module).items(), key=lambda one: (-one[1], one[0]))
    return [test for test, _ in ranked[:most]]


# --- what was changed


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed() -> Iterator[Path]:
    """Files that differ from where this branch left `main`: committed, in the working tree, or new."""
    base = next((b[0] for name in ("main", "origin/main") if (b := git("merge-base", name, "HEAD"))), "HEAD")
    for name in sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}):
        if (file := ROOT / name).is_file():
            yield file


def chosen(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Test files for changed files, the nearest first, and the Python files that none is about.

    A test file stands for itself, a helper for those that import it, a module for the nearest, a page for the figures.
    """
    named = {file: name for name, file in MODULES.items()}
    ranked, alone = Counter[Path](), []
    for file in files:
        if file in TESTS:
            near = {file: 3.0}
        elif file in named:
            near = {test: scores(named[file])[test] for test in nearest(named[file])}
        elif file.suffix == ".md" or file.is_relative_to(ROOT / "benchmarks"):
            near = {ROOT / "tests/docs/test_figures.py": 1.0}
        else:
            helper = re.compile(rf"^(from|import) (\w+\.)?{file.stem}\b", re.MULTILINE)
            near = {test: 1.0 for test in TESTS if helper.search(test.read_text("utf-8"))}
        for test, score in near.items():
            ranked[test] += score
        if file.suffix == ".py" and not near and file.parent.name != "architecture":
            alone.append(file)
    return [test for test, _ in ranked.most_common()], alone


class Budget:
    """Begins no test after a time from the first one on, and counts by file what it left out."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end, self.left_out = seconds, 0.0, Counter[str]()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.end = self.end or time.monotonic() + self.seconds  # collecting may take longer, on a busy machine
        if time.monotonic() > self.end:
            self.left_out[item.nodeid.partition("::")[0]] += 1
            pytest.skip("no time left")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        order = {Path(name).resolve(): place for place, name in enumerate(config.args)}
        items.sort(key=lambda item: order[item.path])


def main() -> int:
    budget = Budget(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
    near, alone = chosen(list(changed()))
    tests = [str(test.relative_to(ROOT)) for test in near]
    if alone:
        print(f"no test file is about: {' '.join(str(file.relative_to(ROOT)) for file in alone)}")
    if not tests:
        print("nothing was changed that a test file is about")
        return 0
    print(f"tests of what was changed: {' '.join(tests)}", flush=True)
    code = pytest.main(["-rf", "--maxfail=5", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *tests], [budget])
    if budget.left_out:
        listed = ", ".join(f"{file} ({count})" for file, count in budget.left_out.items())
        print(f"no time for {budget.left_out.total()} tests: {listed}")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
