"""Help, checks and plans import no heavy library, so that they start at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from optrush.cli import app

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "safetensors", "tokenizers")
OFTEN_UNUSED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "matplotlib")
PROBE = """
import sys
from pathlib import Path

from optrush.cli import app
{code}
print(*[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
EACH = """
from optrush.cli.app import main
for arguments, code in {commands!r}:
    sys.argv = ["optrush", *arguments]
    try:
        main()
    except SystemExit as leaving:
        assert leaving.code in (0, code), (arguments, leaving.code)
    assert not [name for name in {heavy!r} if name in sys.modules], arguments
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


VERBS = (
    "train", "eval", "bench", "techniques", "report", "init", "doctor", "plan", "calibrate", "export", "chat",
    "generate", "data", "import", "schema",
)  # fmt: skip
LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama1b.yaml"


COMMANDS = [
    *(([verb, "--help"], 0) for verb in VERBS),
    (["--help"], 0),
    (["--version"], 0),
    ([], 2),
    (["train", "no-such.yaml"], 2),
    (["techniques", "--json"], 0),
    (["doctor", "--json"], 0),
    (["plan", str(LLAMA), "--hardware", "h200"], 0),
]


def test_commands_without_torch() -> None:
    """One after the other in one process, and which is the first to import something."""
    assert loaded(EACH.format(commands=COMMANDS, heavy=HEAVY)) == []


def test_training_imports_no_compiler_and_no_sharding() -> None:
    """Nor the libraries of tokenizers and reports, which take a second or more and are not always used."""
    assert loaded("import optrush.trainer.run, optrush.benchmark.worker", OFTEN_UNUSED) == []


def test_the_list_of_verbs_imports_none_of_them() -> None:
    """Nor what they need: it is printed in a fifth of a second."""
    assert loaded(EACH.format(commands=[(["--help"], 0)], heavy=()), ("pydantic", "yaml", "optrush.techniques")) == []


def test_the_list_of_verbs_says_what_their_docstrings_say() -> None:
    for name, (_, text) in app.VERBS.items():
        command = app.Verbs()[name]
        assert command.name == name and command.help.replace("\n", " ").startswith(text), name
