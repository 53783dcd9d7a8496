"""Triton's interpreter, which runs kernels on a CPU. It is chosen when Triton is imported: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import optrush


def says(file: str, word: str) -> None:
    """Runs a test file as a program; what it prints must end with a word."""
    paths = [str(Path(__file__).parent), str(Path(optrush.__file__).parents[1])]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith(f"{word}\n"), done.stderr[-3000:]
