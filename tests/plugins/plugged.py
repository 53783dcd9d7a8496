"""Packages of techniques as they lie on the path when they are installed, and optrush in a process with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def installed(source: Path, folder: Path, entry: str | None = None) -> Path:
    """Install a package as its pyproject.toml says, without pip and without a network; return the folder.

    entry: another entry point than its own.
    """
    said: dict[str, Any] = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))
    project, packed = said["project"], said["tool"]["setuptools"]
    entries = [f"{name} = {value}" for name, value in project["entry-points"]["optrush.techniques"].items()]
    facts = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (facts / "entry_points.txt").write_text("\n".join(["[optrush.techniques]", *([entry] if entry else entries), ""]))
    for module in packed.get("py-modules", ()):
        shutil.copy(source / f"{module}.py", folder)
    for package in packed.get("packages", ()):
        shutil.copytree(source / package, folder / package)
    return folder


def optrush(*arguments: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    return _process(["-m", "optrush", *arguments], folder, path)


SEVERAL = """
import json, sys
from optrush.cli import app
for given in json.loads(sys.argv[1]):
    sys.argv = ["optrush", *given]
    try:
        app.main()
    except SystemExit as left:
        assert not left.code, given
"""


def commands(*given: list[str], folder: Path, path: Path) -> str:
    """Run commands in one process, which is started once, and return what they said; each ends well."""
    ended = _process(["-c", SEVERAL, json.dumps(given)], folder, path)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def _process(arguments: list[str], folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(path)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
