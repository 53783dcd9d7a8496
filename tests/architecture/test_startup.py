"""Help and checks answer at once because they do not import torch; how fast they are is a benchmark's business."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "safetensors", "tokenizers")
OFTEN_UNUSED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "matplotlib")
PROBE = """
import sys
from pathlib import Path
{code}
print(*[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
HELP = """
sys.argv = ["optrush", *{arguments!r}]
from optrush.cli.app import main
try:
    main()
except SystemExit as leaving:
    assert leaving.code in (0, {code}), leaving.code
"""


def loaded(code: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the heavy libraries are loaded after this code, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(code=code, heavy=heavy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()


def test_import() -> None:
    assert loaded("import optrush") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        [],
        *(
            [verb, "--help"]
            for verb in (
                *("train", "eval", "bench", "techniques", "report", "init", "doctor", "plan", "calibrate"),
                *("export", "chat", "generate"),
            )
        ),
    ],
)
def test_help(arguments: list[str]) -> None:
    assert loaded(HELP.format(arguments=arguments, code=2)) == []


def test_a_wrong_configuration_is_refused_without_torch() -> None:
    assert loaded(HELP.format(arguments=["train", "no-such.yaml"], code=2)) == []


def test_techniques() -> None:
    assert loaded(HELP.format(arguments=["techniques", "--json"], code=0)) == []


def test_doctor() -> None:
    assert loaded(HELP.format(arguments=["doctor", "--json"], code=0)) == []


def test_plan() -> None:
    arguments = ["plan", str(Path(__file__).parents[2] / "benchmarks" / "llama1b.yaml"), "--hardware", "h200"]
    assert loaded(HELP.format(arguments=arguments, code=0)) == []


def test_what_trains_waits_for_no_compiler_and_no_sharding() -> None:
    """Nor for what a tokenizer or a report loads: each takes a process a second or more, and not all want them."""
    assert loaded("import optrush.trainer.run, optrush.bench.worker", OFTEN_UNUSED) == []
