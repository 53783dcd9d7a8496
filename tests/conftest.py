"""What all tests share: one thread each, the golden folders, and two ranks that live as long as the session.

torch is imported where it is used: the checks of the source tree need none.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too: threads that wait for a core burn another
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # one of those processes compiles the package, not each of them

import pytest
import typer.main
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

    from pair import Pair

typer.main.get_command = cache(typer.main.get_command)  # made anew by each call, it takes longer than most of them
DRAWN = {"architecture", "pins", "report", "test_dpo_cli.py", "test_hostile.py"}  # tests that look at a run's report
# How long an example takes says what else the machine does.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/faults first: they fork, and a process that has run a backward pass or a compiler does not fork well."""
    items.sort(key=lambda item: "faults" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported is no garbage: a collection, of which some tests ask for several, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests tokenise on the disk is theirs alone; processes that they start inherit it."""
    os.environ["OPTRUSH_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _processor() -> Iterator[None]:
    """What is chosen for a processor without matrix units is chosen on any machine that runs these tests."""
    from optrush import hardware

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_cpuinfo", lambda: "model name : one without matrix units\nflags : avx2\n")
        hardware.cpu.cache_clear()  # what was asked for while tests were collected
        yield


@pytest.fixture(scope="module", autouse=True)
def _pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run's report is empty where no test looks at it: drawing takes as long as the tiny run itself."""
    with pytest.MonkeyPatch.context() as patch:
        if not DRAWN & {request.path.name, request.path.parent.name}:
            from trials import undrawn

            undrawn(patch)
        yield


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the golden script's models (`tied`, `untied`), one with experts (`moe`, tied), and documents (text,
    chat, held.jsonl, and the first sixteen of held.jsonl: few.jsonl)."""
    from golden import make_golden

    made = tmp_path_factory.mktemp("golden")
    for name in ("tied", "untied"):
        make_golden.write_model(made / name, name == "tied")
    make_golden.write_model(
        made / "moe", True, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    for kind in ("text", "chat"):
        make_golden.write_documents(made / f"{kind}.jsonl", kind == "chat")
    texts = [json.loads(line)["text"] for line in (made / "text.jsonl").read_text().splitlines()]
    held = [{"text": text[1:] + text[:1]} for text in texts]  # as long, and none that is trained on
    for name, rows in (("held", held), ("few", held[:16])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's folder, to be read only."""
    from optrush.models import tiny

    tiny.write_tiny(folder := tmp_path_factory.mktemp("tiny"))
    return folder


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    from pair import Pair

    with Pair() as two:
        yield two


@pytest.fixture(scope="session")
def quad() -> Iterator[Pair]:
    """Four ranks, for meshes of two axes."""
    from pair import Pair

    with Pair(4) as four:
        yield four


@pytest.fixture(scope="session")
def reference(box: Path) -> Callable[[str], tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of a golden case's first step by transformers, documents one at a time, under its names."""
    from golden import make_golden

    @cache
    def make(name: str) -> tuple[float, dict[str, torch.Tensor]]:
        folder, path = make_golden.places(box, make_golden.CASES[name])
        model = make_golden.open_model(folder)
        documents = make_golden.read_documents(folder, path)
        loss, _ = make_golden.window(model, [documents[i] for i in next(make_golden.order())])
        return loss, {n: p.grad for n, p in model.named_parameters()}

    return make
