"""tensor: any mesh with it is one process; checkpoints, adapters, precisions; what it refuses."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func

from meshes import MeshCase, further, prove
from optrush.errors import NeedsError

from golden import make_golden
from trials import assembled, first_gradients, furthest, golden_run, published, steps

TP = {"tensor": {}}
WHOLE = {"tensor": {"sequence": False}}
LORA = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "save": ["norm"]}}
TOGETHER = {"fused-kernels": {"mlp": "triton", "norm": True, "rope": True}, "recompute": {}, "fused-adamw": {}}
TWO = [
    MeshCase(2, TP | {"fused-loss": {"chunk": 5}}, "chat"), MeshCase(2, WHOLE, "tied"),
    MeshCase(2, TP | TOGETHER, "tied", packed=False), MeshCase(2, WHOLE | LORA, base=LORA),
    MeshCase(2, TP | {"ia3": {}}, base={"ia3": {}}),
]  # fmt: skip
FOUR = [
    MeshCase(4, TP | {"fsdp": {}}, "tied"),
    MeshCase(4, TP | {"ddp": {}}),
    MeshCase(4, TP | {"fsdp": {"stage": 2, "sync": "each"}}, "chat", packed=False),
    MeshCase(4, TP | LORA | {"fsdp": {}, "attention": {}}, base=LORA),
]


@pytest.mark.parametrize("case", further(TWO, 2), ids=str)
def test_two_ranks_are_one_process(box, pair, reference, case):
    prove(box, pair, case, reference)


def curve(box, with_):
    return [(loss, norm) for loss, norm, _ in steps(assembled(golden_run(box, **with_)), 3)]


@pytest.mark.parametrize("with_", further([TP, WHOLE, {"pipeline": {}}], 1), ids=str)
def test_layer_norms_with_a_bias_and_no_gate(box, pair, tmp_path_factory, with_):
    """Each rank has a part of the tokens, whose gradients of biases are summed."""
    folder = tmp_path_factory.mktemp("starcoder2")
    make_golden.write_model(folder / "untied", True, model_type="starcoder2", norm_epsilon=1e-5)
    (folder / "text.jsonl").write_bytes((box / "text.jsonl").read_bytes())
    want = curve(folder, {})
    for found in pair(curve, folder, with_):
        assert found == [pytest.approx(each, rel=1e-5) for each in want]


@pytest.mark.parametrize("case", further(FOUR, 1), ids=str)
def test_four_ranks_are_one_process(box, quad, reference, case):
    prove(box, quad, case, reference)


@pytest.mark.parametrize("with_", further([{"bf16": {"rounding": "nearest"}}, {"amp": {}, "fsdp": {}}], 1), ids=str)
def test_in_sixteen_bits_it_is_as_near(box, pair, quad, reference, with_):
    """As one process in bf16, to what bf16 rounds; a sum too many or too few would be half or twice."""
    base = {name: options for name, options in with_.items() if name != "fsdp"}
    many = 4 if "fsdp" in with_ else 2
    case = MeshCase(many, TP | {"selective-recompute": {"ops": "attention"}} | with_, base=base, close=0.1)
    prove(box, quad if many == 4 else pair, case, reference)


def traced(box, case):
    """The first step compiled, by a compiler that makes the graphs and writes no code for them."""
    real = torch.compile
    with mock.patch("torch.compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more)):
        job = assembled(golden_run(box, rows=case.rows, packed=True, **case.with_))
        return published(job)[1]


@pytest.mark.slow
def test_compiled_blocks_leave_the_embedding_its_gradient(box, quad, reference):
    """A collective's result that is still on its way would lose the hooks of sharding: a gradient of exactly 0."""
    case = MeshCase(4, TP | {"fsdp": {}, "compile": {}})
    want = reference("untied")[1]
    for grads in quad(traced, box, case):
        assert furthest(grads, want) < 1e-5


# What a rank holds.


def held(box, with_):
    """(numbers of the blocks' matrices, of embedding and head, of norms) on this rank, and the longest stream."""
    job = assembled(golden_run(box, packed=True, **with_))
    seen = []
    for block in job.model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    first_gradients(job)
    sums = {"blocks": 0, "vocabulary": 0, "norms": 0}
    for t in job.trained:
        part = "norms" if "norm" in t.name else "blocks" if t.name.startswith("blocks") else "vocabulary"
        sums[part] += t.local.numel()
    return sums, set(seen)


def test_what_a_rank_holds(box, pair):
    whole, _ = held(box, {})
    for with_, width in ((TP, 24), (WHOLE, 48)):
        for mine, widths in pair(held, box, with_):
            assert mine == {
                "blocks": whole["blocks"] // 2,
                "vocabulary": whole["vocabulary"] // 2,
                "norms": whole["norms"],
            }
            assert widths == {width}


# What it refuses.


def refused_in_building(box, with_):
    try:
        assembled(golden_run(box, packed=True, **TP | with_))
    except NeedsError as error:
        return error.found
    return "built"


@pytest.mark.parametrize(
    ("with_", "found"), [({"lora": {"dora": True}}, "dora"), ({"lora": {"dropout": 0.1}}, "dropout")], ids=str
)
def test_what_it_refuses_when_it_is_built(box, pair, with_, found):
    assert all(found in said for said in pair(refused_in_building, box, with_))


def exchanges(box, with_):
    """Collectives of one forward and backward pass in compiled blocks."""
    from torch._inductor.compile_fx import compile_fx  # whose graphs run as they are, without code for them

    real, graphs = (
        torch.compile,
        partial(compile_fx, inner_compile=lambda graph, _, **how: make_boxed_func(graph.forward)),
    )
    torch._dynamo.reset()
    with mock.patch("torch.compile", lambda f, options=None, **how: real(f, backend=graphs, **how)):
        job = assembled(golden_run(box, packed=True, rows=1, tensor={}, bf16={}, compile={}, attention={}, **with_))
        batches = next(job.batches)
        job.loss(batches[0]).sum().backward()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        job.loss(batches[0]).sum().backward()
    names = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")
    return sum(event.count for event in seen.key_averages() if event.key in names)


def test_selective_recompute_repeats_no_collective(box, pair):
    (plain, *_), (selective, *_) = (pair(exchanges, box, with_) for with_ in ({}, {"selective_recompute": {}}))
    assert selective == plain > 0
