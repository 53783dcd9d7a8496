"""Compiled blocks and loss: the baseline's figures, one compilation for equal blocks, none after the first step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from meshes import further
from optrush.kernels import attention
from optrush.technique import package_digest

from golden.make_golden import SIZES, T
from trials import apart, assembled, first_gradients, furthest, golden_run, micro, steps, wire

CLOSE = 1e-5
LONG = 160  # T, over several buckets of Documents.longest


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def uneven(box):
    """Documents of 22 to 152 tokens, the long ones together in the first half."""
    lengths = [*range(100, 151, 5), *range(20, 60, 2)]
    lines = [json.dumps({"text": " ".join(f"w{(i * n) % 73}" for i in range(n))}) for n in lengths]
    (box / "uneven.jsonl").write_text("\n".join(lines))
    return f"data.path={box}/uneven.jsonl"


@pytest.fixture
def far(box):
    """The golden model with room for LONG positions, which the wrapper asks for."""
    config = json.loads((box / "untied/config.json").read_text())
    shutil.copytree(box / "untied", box / "far", dirs_exist_ok=True)
    (box / "far/config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return f"model.path={box}/far"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("implementation", "scope", "packed", "code"),
    further([("native", "blocks", True, False), ("native", "blocks", True, True), ("native", "model", True, True),
             ("transformers", "model", False, True)], 1),
)  # fmt: skip
def test_same_figures_from_one_compilation(box, uneven, far, monkeypatch, implementation, scope, packed, code):
    """Every step has other documents, whose longest differ; one of the two blocks is recomputed.

    code: it is written and compiled, which takes most of the time; or the same graphs run without.
    """
    if not code:
        _unwritten(monkeypatch)
    with_ = {"attention": {}, "fused_loss": {"chunk": 64}, "recompute": {"every": 2}}
    sets = [uneven, f"batch.seq={LONG}", f"batch.tokens={LONG * 4}", f"batch.micro_tokens={LONG * 2}"]
    sets += [far, f"model.implementation={implementation}"]

    def trained(**more):
        job = assembled(golden_run(box, packed=packed, sets=sets, **with_, **more))
        longest, inner = set(), job.loss
        job.loss = lambda batch: longest.add(batch.documents.longest) or inner(batch)
        _, grads = first_gradients(job)
        wire(job)  # from the first step again
        return grads, list(steps(job, 4)), longest

    want, base, longest = trained()
    assert len(longest) > 1 and not counters["stats"]
    grads, figures, _ = trained(compile={"scope": scope})
    graphs = 2 + (scope == "blocks")
    assert counters["stats"]["unique_graphs"] == graphs, "of both blocks and the norm, or the model; of a chunk's loss"
    assert not counters["graph_break"]
    assert furthest(grads, want) < CLOSE
    assert figures == [pytest.approx(line, rel=CLOSE) for line in base]


def _unwritten(monkeypatch):
    """The same graphs, run without code that is written for them."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("code", further([False, True], 1))
def test_the_whole_loss_compiles_too(box, monkeypatch, code):
    if not code:
        _unwritten(monkeypatch)
    hidden, labels = torch.randn(2, T, SIZES["hidden_size"], requires_grad=True), torch.randint(0, 80, (2, T))

    def made(**with_):
        head = assembled(golden_run(box, **with_)).model.head
        return torch.autograd.grad(head(hidden, labels), [hidden, head.weight])

    want, found = made(), made(compile={})
    assert counters["stats"]["unique_graphs"] == 1
    assert all(apart(a, b) < CLOSE for a, b in zip(found, want))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_an_attention_may_be_compiled_for_many_lengths(box, monkeypatch):
    """Nine values of the longest document, each a constant of its graph; torch's own limit is eight. The limit is on
    graphs: without the code that a compiler writes."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **kwargs: real(f, backend="eager", **kwargs))

    def told(q, k, v, documents):
        return attention.masked(q, k, v, documents) * (1.0 if documents.longest else 2.0)

    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=8):
        job = assembled(golden_run(box, packed=True, compile={}))
        for block in job.model.blocks.values():
            block.attention = told
        batch = micro(job)
        for longest in range(1, 10):
            job.loss(replace(batch, documents=batch.documents._replace(longest=longest)))
        torch._dynamo.reset()


def test_what_other_code_compiled_is_not_taken(box):
    """torch's files on the disk are known by the graph, and so by the names of operators, whatever these do."""
    for before, want in (("", package_digest()), ("theirs", f"theirs {package_digest()}")):
        with torch.compiler.config.patch(cache_key_tag=before):
            for _ in range(2):
                assembled(golden_run(box, packed=True, compile={}))
                assert torch.compiler.config.cache_key_tag == want


# --- autotune


@pytest.fixture
def told(monkeypatch):
    """The options that modules and functions are compiled with, instead of compiling them."""
    told = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, options, **_: told.append(("module", options)))
    monkeypatch.setattr(torch, "compile", lambda f, options, **_: told.append(("function", options)) or f)
    return told


@pytest.mark.parametrize("with_", [{}, {"fused_loss": {"chunk": 32}}, {"compile": {"scope": "model"}}], ids=str)
@pytest.mark.parametrize("tuned", [True, False])
def test_everything_compiled_is_told(box, told, with_, tuned):
    asked = {**with_, "compile": {**with_.get("compile", {}), "autotune": tuned}}
    job = assembled(golden_run(box, packed=True, **asked))
    list(steps(job, 1))
    assert {kind for kind, _ in told} == {"module", "function"}
    assert all(options == ({"max_autotune": True} if tuned else {}) for _, options in told)
    assert tuned == any("first steps compile" in note for note in job.notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_same_figures_from_tuned_kernels(box):
    """Compiled with them, in earnest: losses, norms and gradients of the baseline."""

    def trained(**with_):
        job = assembled(golden_run(box, packed=True, attention={}, **with_))
        _, grads = first_gradients(job)
        wire(job)  # from the first step again
        return grads, list(steps(job, 2))

    grads, figures = trained()
    tuned, tuned_figures = trained(compile={"autotune": True})
    assert furthest(tuned, grads) < CLOSE
    assert tuned_figures == [pytest.approx(line, rel=CLOSE) for line in figures]
