"""Adapters inside QuACK's products: on a CPU, with operators that do the same mathematics and refuse what QuACK would.

tests/gpu/test_kernels.py has the operators themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from meshes import further
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.hardware import TILE, parse_hardware
from optrush.kernels import lora_matmul, swiglu, swiglu_quack
from optrush.kernels.lora_matmul import Padding, concat_in_padding, concat_padded, with_padding
from optrush.models.decoder import Linear
from optrush.peft import lora
from optrush.peft.adapter import AdapterToggle, place
from optrush.peft.lora import Lora, Settings
from optrush.peft.quantized import Form, QuantizedLinear
from optrush.planner import baseline, search
from optrush.techniques import ALL
from optrush.techniques.fused_kernels import FusedKernels
from techniques.test_lora import filled_by_nobody, offloading

import memory
from golden.make_golden import SIZES, T
from trials import assembled, first_gradients, furthest, golden_run, kept, learnt, micro, shaped, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch of its own
D_, F_ = SIZES["hidden_size"], SIZES["intermediate_size"]


def aligned(*tensors):
    """QuACK reads rows of 16 bytes, of 2-byte values."""
    for t in tensors:
        assert sorted(t.stride())[0] == 1 and sorted(t.stride())[1] % 8 == 0, (t.shape, t.stride())


@swiglu_quack.gated_matmul.register_kernel("cpu")
def _(x, weight, z=None, u=None, padded_x=False, padded=False, padding=0):
    left, whole = concat_in_padding(x, z, 1, padded_x), concat_in_padding(weight, u, 1, padded)
    aligned(left, whole)
    pairs = F.linear(left, whole)
    product = torch.empty(len(x), len(weight) // 2 + padding, dtype=x.dtype)[:, : len(weight) // 2]
    return pairs, product.copy_(swiglu.swiglu(pairs))


@swiglu_quack.gated_matmul_backward.register_kernel("cpu")
def _(grad, weight, pairs, below=None, padded=False):
    whole = concat_in_padding(weight, below, 0, padded)
    aligned(grad, whole, pairs)
    return swiglu.swiglu_backward(pairs, grad @ whole)


@dataclass(frozen=True)
class Here(FusedKernels):
    """On this machine."""

    def needs(self, setup):
        yield from ()

    def packages(self):
        return ()


CLASSES = [Here if t is FusedKernels else t for t in ALL]
QUACK = {"fused_kernels": {"mlp": "quack"}}
FUSED = {"padded": True}  # `learning` adds norm and rope, which pad what they write
LORA = {"targets": "all-linear", "rank": 4}


def learning(box, lora=LORA, rows=2, classes=CLASSES, **with_):
    """A job whose adapters have learnt something already, so that every gradient is there."""
    if with_.pop("padded", False):
        with_["fused_kernels"] = {"mlp": "none", "norm": True, "rope": True, **with_.get("fused_kernels", {})}
    run = golden_run(box, packed=True, rows=rows, sets=with_.pop("sets", ()), lora=lora, **with_)
    return learnt(assembled(run, classes))


def inside(trainer):
    return all(block.mlp is lora.feed for block in trainer.model.blocks.values())


# The function.


def linears(names, *, rank=3):
    """gate_up and down in float64, D and F of 16 and 8; adapters for those names, with rsLoRA's uneven factor."""
    torch.manual_seed(0)
    at = {"bias": False, "device": torch.device("cpu"), "dtype": torch.float64}
    made = Linear(16, (("gate", 1), ("up", 1)), groups=8, **at), Linear(8, (("down", 16),), **at)
    switch = AdapterToggle()
    for linear, modules in zip(made, (["gate_proj", "up_proj"], ["down_proj"])):
        linear.weight.requires_grad_(False)
        if {*modules} & {*names}:
            adapter = Lora(linear, modules, names, switch, Settings(rank, 4.0, 0.0, True, False))
            place("", linear, adapter.to_empty(device="cpu").double(), mock.Mock(fillers={}), ())
            for p in adapter.parameters():
                torch.nn.init.normal_(p)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    return x, *made, switch


PLACES = [["gate_proj", "up_proj", "down_proj"], ["down_proj"], ["gate_proj"], ["up_proj", "down_proj"], []]


@pytest.mark.parametrize("names", further(PLACES, 1), ids=str)
def test_gradients_by_finite_differences(names):
    x, gate_up, down, switch = linears(names)
    stream = torch.randn_like(x).requires_grad_()
    inputs = (stream, x, *(p for p in (*gate_up.parameters(), *down.parameters()) if p.requires_grad))
    assert len(inputs) == 2 + 2 * len({n == "down_proj" for n in names})

    def ours(*_):
        return lora.feed(stream, x, gate_up, down)

    def plain():
        return swiglu.gated_mlp(stream, x, gate_up, down)

    assert torch.autograd.gradcheck(ours, inputs)
    torch.testing.assert_close(ours(), plain())
    want, got = (torch.autograd.grad(f.sin().sum(), inputs) for f in (plain(), ours()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    with switch.off():
        pairs = F.linear(x, gate_up.weight).view(2, 3, -1, 2)
        want = stream + (F.silu(pairs[..., 0]) * pairs[..., 1]) @ down.weight.t()
        torch.testing.assert_close(ours(), want)
        with torch.no_grad():
            torch.testing.assert_close(ours(), want)


def test_adapters_lie_in_whole_tiles_of_columns(monkeypatch):
    seen = []

    def gated(x, weight, z, u, *more):
        seen.append((concat_in_padding(x, z, 1, False).shape, concat_in_padding(weight, u, 1, False).shape))
        return swiglu_quack.gated_matmul(x, weight, z, u, *more)

    monkeypatch.setattr(lora, "gated_matmul", gated)
    for rank, width in ((4, 16 + 64), (32, 16 + 64), (33, 16 + 128)):
        x, gate_up, down, _ = linears(["gate_proj", "up_proj"], rank=rank)
        lora.feed(x, x, gate_up, down)
        assert seen.pop() == ((6, width), (16, width))
    x, gate_up, down, _ = linears(["down_proj"])
    lora.feed(x, x, gate_up, down)
    assert seen.pop() == ((6, 16), (16, 16))


# The whole model.


@pytest.mark.parametrize(
    ("targets", "beside"),
    further([("all-linear", {}), (["down_proj"], {"nf4": {"double": False}}), ("attention", {"int8": {}}),
             ("mlp", {"selective_recompute": {"ops": "attention"}, "nf4": {}}), ("mlp", {"nf4": {}}),
             ("mlp", {"int8": {}}), (["gate_proj"], {}), ("mlp", {"recompute": {}}),
             ("mlp", {"attention": {}, "fused_loss": {"chunk": 64}, "fused_adamw": {}, "nf4": {}})], 4),
    ids=str,
)  # fmt: skip
def test_same_loss_and_gradients(box, targets, beside):
    lora = {**LORA, "targets": targets}
    want_loss, want = first_gradients(learning(box, lora, **beside))
    job = learning(box, lora, **QUACK, **beside)
    assert inside(job)
    loss, grads = first_gradients(job)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert furthest(grads, want) < 1e-5
    _, _, skipped = next(steps(job, 1))
    assert not skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "beside"),
    further(
        [("all-linear", {}), (["down_proj"], {"nf4": {}}), (["up_proj"], {"int8": {}, "recompute": {"every": 2}})], 1
    ),
    ids=str,
)
def test_compiled(box, partitioned, targets, beside):
    """Full graphs, of the first block, of the others, and with adapters off; a compiler keeps no more than we do."""
    lora = {**LORA, "targets": targets}
    plain = learning(box, lora, rows=8, **beside)
    want_loss, want = first_gradients(plain)
    job = learning(box, lora, rows=8, **QUACK, compile={}, attention={}, **beside)
    assert inside(job)
    shapes = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.add(tuple(t.shape)), t)[1], lambda t: t):
        loss, grads = first_gradients(job)
    N, wide = 8 * T, D_ + TILE
    assert (N, 2 * F_) in shapes and not shapes & {(N, F_), (8, T, F_), (N, wide), (2 * F_, wide), (wide, F_)}
    dense = {(2 * F_, D_), (D_, 2 * F_), (D_, F_), (F_, D_), (2 * F_, wide), (wide, F_)}
    assert not ("nf4" in beside or "int8" in beside) or not shapes & dense
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5
    assert not counters["graph_break"]
    with job.adapters_disabled(), plain.adapters_disabled(), torch.no_grad():
        want_off, off = (each.loss(micro(each)).item() for each in (plain, job))
    assert off == pytest.approx(want_off, rel=1e-6) and off != pytest.approx(want_loss, rel=1e-3)


@pytest.mark.parametrize(
    ("stream", "beside"),
    further([("float32", {"nf4": {}}), ("half", {}), ("float32", {}), ("half", {"nf4": {}}),
             ("float32", {"compile": {}}), ("half", {"compile": {}})], 2),
    ids=str,
)  # fmt: skip
def test_mixed_precision(box, stream, beside, traced):
    """No further from float32's gradients than without it. Compiled without the code that would be written."""
    _, right = first_gradients(learning(box, **{k: v for k, v in beside.items() if k != "compile"}))
    loss, ours = first_gradients(learning(box, amp={"stream": stream}, **QUACK, **beside))
    want, theirs = first_gradients(learning(box, amp={"stream": stream}, **beside))
    assert loss == pytest.approx(want, rel=1e-3)
    assert all(g.dtype == torch.float32 for g in ours.values())
    right, ours, theirs = (torch.cat([g[n].flatten() for n in right]) for g in (right, ours, theirs))
    assert (ours - right).norm() < 1.25 * (theirs - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize("beside", further([{"nf4": {}}, {}, {"recompute": {}}, FUSED], 1), ids=str)
def test_switched_off_it_is_the_base(box, beside):
    job, base = learning(box, **QUACK, **beside), learning(box, **beside)
    batch = micro(job)

    def loss(trainer):
        return (trainer.eval_loss([batch]) / batch.n_terms).item()

    with base.adapters_disabled():
        want = loss(base)
    assert loss(job) == pytest.approx(loss(base), rel=1e-6) and loss(job) != pytest.approx(want, rel=1e-3)
    with job.adapters_disabled():
        assert loss(job) == pytest.approx(want, rel=1e-6)
    assert furthest(first_gradients(job)[1], first_gradients(base)[1]) < 1e-5


def test_offloaded(box, monkeypatch):
    classes = offloading(monkeypatch, CLASSES)
    for base in ({}, {"nf4": {}}, FUSED):
        want = first_gradients(learning(box, **QUACK, **base))
        found = first_gradients(learning(box, classes=classes, offload_activations={"keep": 0}, **QUACK, **base))
        assert found[0] == want[0] and furthest(found[1], want[1]) == 0


def shared(box, with_):
    loss, grads = first_gradients(learning(box, **QUACK, **with_))
    return loss, grads, list(steps(learning(box, **QUACK, **with_), 2))


def test_what_has_no_room(box, monkeypatch):
    """Weights that nobody gave room, as sharded ones: copied where A or U lies beside them, and not for the input's
    gradient, which is made by two products then."""
    monkeypatch.setattr(lora, "make_room", lambda *_, **__: 1)
    monkeypatch.setattr(lora, "low_rank_gradients", mock.Mock(side_effect=AssertionError))
    job, copied = learning(box, **QUACK), []
    monkeypatch.setattr(
        lora_matmul, "concat_padded", lambda *given: copied.append(given[0].shape) or concat_padded(*given)
    )
    loss, grads = first_gradients(job)
    assert {shape for shape in copied if shape[0] != 2 * T} == {(2 * F_, D_), (D_, F_)}
    want_loss, want = first_gradients(learning(box))
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5


@pytest.mark.parametrize(
    "with_", further([{"fsdp": {}, "nf4": {}, **FUSED}, {"fsdp": {}, "recompute": {}}], 1), ids=str
)
def test_two_ranks_agree_with_one_process(box, pair, with_):
    want_loss, want, want_steps = shared(box, {k: v for k, v in with_.items() if k == "nf4"})
    for loss, grads, found in pair(shared, box, with_):
        assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5
        assert found == [pytest.approx(line, rel=1e-5) for line in want_steps]


# Room behind weights.


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 3)), (0, (3, 10))], ids=["right", "below"])
def test_what_lies_in_room(dim, shape):
    weight, narrow = torch.randn(6, 10), torch.randn(shape)
    want = torch.cat((weight, narrow), dim)
    laid = with_padding(weight, 64, 3)
    assert torch.equal(laid, weight) and laid.stride() == (74, 1)
    for t, has in ((weight, False), (weight, True), (laid, False), (laid, True), (laid, True)):
        found = concat_in_padding(t, narrow, dim, has)
        assert found.shape[dim] == weight.shape[dim] + 64
        assert torch.equal(found.narrow(dim, 0, want.shape[dim]), want)
        assert not found.narrow(dim, want.shape[dim], 61).any()
        assert (found.data_ptr() == t.data_ptr()) == (t is laid and has)
        found.fill_(torch.nan).narrow(dim, 0, weight.shape[dim]).copy_(weight)  # room is scratch
    assert torch.equal(laid, weight)
    large = torch.randn(6, 65) if dim else torch.randn(65, 10)
    assert concat_in_padding(laid, large, dim, True).data_ptr() != laid.data_ptr(), "it has no room for so much"
    assert concat_in_padding(laid, narrow.narrow(dim, 0, 0), dim, True) is laid


def test_two_passes_before_one_goes_back():
    """What is laid behind a weight is no change of the weight that the backward pass has saved."""
    x, gate_up, down, _ = linears(PLACES[0])
    want = torch.autograd.grad(lora.feed(x, x, gate_up, down).sum(), x)
    for linear in (gate_up, down):
        assert lora.pad_weight(linear, 64, Padding(True), below=linear is down)
    first, _ = lora.feed(x, x, gate_up, down), lora.feed(x, x, gate_up, down)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x), want)


@pytest.mark.parametrize(
    "lora", [{"targets": "all-linear", "rank": 40}, {"targets": ["o_proj", "up_proj"], "rank": 65}]
)
def test_ranks_beyond_a_tile(box, lora):
    want, found = (first_gradients(learning(box, lora, **FUSED, **with_)) for with_ in ({}, QUACK))
    assert found[0] == pytest.approx(want[0], rel=1e-6) and furthest(found[1], want[1]) < 1e-5


def test_no_sum_of_nothing(monkeypatch):
    """Where no adapter acts there is one product, and nothing is added."""
    monkeypatch.setattr(lora_matmul, "add_product", mock.Mock(side_effect=AssertionError))
    x, wide, bias = torch.randn(3, 8), torch.randn(8, 5), torch.randn(5)
    for added, want in ((None, x @ wide), (bias, x @ wide + bias)):
        y, z = lora_matmul.low_rank(x, wide, x.new_empty(8, 0), x.new_empty(0, 5), "quack", added)
        assert z.shape == (3, 0)
        torch.testing.assert_close(y, want)


def test_what_does_not_lie_beside():
    for weight in (torch.randn(6, 16), with_padding(torch.randn(6, 16), 64, 64)):
        for narrow, dim in ((torch.randn(5, 3), 1), (torch.randn(3, 15), 0)):
            with pytest.raises(AssertionError):
                concat_in_padding(weight, narrow, dim, True)


def test_what_is_no_room():
    """What lies behind a weight stays, unless somebody said that it is the weight's own, and it looks like that."""
    narrow, flat = torch.randn(6, 3), torch.randn(1200)
    behind = flat.clone()
    for weight in (flat[:60].view(6, 10), flat[10:130].view(6, 20)[:, :10], flat.view(12, 100).t()[:6]):
        for said in (False, True):
            assert torch.equal(concat_in_padding(weight, narrow, 1, said)[:, :-61], torch.cat((weight, narrow), 1))
    concat_in_padding(flat.view(10, 120)[:6, :10], narrow, 1, False)
    assert torch.equal(flat, behind)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("base", "fused"),
    further([({"nf4": {}}, FUSED), ({"int8": {}}, {}), ({}, {**FUSED, "amp": {}}), ({}, {}), ({}, FUSED),
             ({"nf4": {}}, {}), ({"int8": {}}, FUSED)], 3),
    ids=str,
)  # fmt: skip
def test_no_weight_is_copied(box, base, compiled, fused, monkeypatch, traced):
    """Nor what a linear reads, forward or backward, where a kernel of ours wrote it: attention's result is not."""
    job = learning(box, **QUACK, **base, **fused, **({"compile": {}, "attention": {}} if compiled else {}))

    def frozen():
        """By name: bytes, of which some are no numbers."""
        found = {name: p for name, p in job.model.named_parameters() if not p.requires_grad}
        return {name: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, p in found.items()}

    before = frozen()
    copied = []
    monkeypatch.setattr(
        lora_matmul, "concat_padded", lambda *given: copied.append(given[0].shape) or concat_padded(*given)
    )
    for _ in steps(job, 2):
        pass
    assert before and frozen() == before
    assert {shape[0] for shape in copied} == {2 * T}, "no weight"
    if fused:
        assert len(copied) == 16, "two blocks, eight micro-batches"


# What is kept.


@pytest.mark.parametrize(
    ("targets", "wants_input"), [("mlp", True), (["up_proj"], True), (["down_proj"], False), ("attention", False)]
)
@pytest.mark.parametrize("base", further([{"nf4": {}}, {}], 1), ids=str)
def test_what_is_kept(box, targets, wants_input, base):
    """Of each block without it: gate and up, the gate after its activation and the product, what enters."""
    lora = {**LORA, "targets": targets}
    plain, ours = (learning(box, lora, rows=4, **with_, **base) for with_ in ({}, QUACK))
    assert inside(ours)
    seen = []
    for block in ours.model.blocks.values():
        feed = block.mlp

        def counted(x, h, gate_up, down, feed=feed):
            held = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
                out = feed(x, h, gate_up, down)
            known = {p.untyped_storage().data_ptr() for p in ours.model.parameters()}
            sizes = {s.data_ptr(): s.nbytes() for t in held if (s := t.untyped_storage()).data_ptr() not in known}
            seen.append(sum(sizes.values()) / 4)
            return out

        block.mlp = counted
    ours.loss(micro(ours))
    r, N = LORA["rank"], 4 * T
    n1 = len({"gate_proj", "up_proj"} & {*(adapter_names(ours, "gate_up"))})
    n2 = len(adapter_names(ours, "down"))
    laid = r * (n1 * 2 * F_ + n2 * D_)  # U; A is a parameter
    assert {*seen} == {N * (2 * F_ + wants_input * D_ + r * (n1 + n2)) + laid}
    assert kept(plain) > kept(ours)


def adapter_names(trainer, which):
    adapter = getattr(trainer.model.blocks["0"], which).adapter
    return [] if adapter is None else [module.rpartition(".")[2] for module in adapter.hf]


@pytest.mark.parametrize(
    ("withs", "rows", "times"),
    further([(["amp", "fused-adamw", "attention", "lora"], 2, 1),
             (["bf16", "fused-adamw", "attention", "lora:rank=64,targets=[down_proj]", "fused-loss:chunk=1024"], 4, 2),
             (["bf16", "fused-adamw", "attention", "recompute", "lora:targets=mlp,rank=33"], 2, 1),
             (["bf16", "fused-adamw", "attention", "nf4", "lora"], 2, 1)], 0),
    ids=str,
)  # fmt: skip
def test_memory_is_what_was_said(withs, rows, times):
    config = shaped("llama-3.2-1b", *withs, "fused-kernels:mlp=quack", rows=rows, seq=1024, windows=times)
    said = search.predict(config, "h200")
    with mock.patch.object(memory, "_unfilled", filled_by_nobody), memory.supposed(config, CLASSES) as job:
        assert inside(job)
        made = [
            of.weight
            for _, of in job.model.linears()
            if of.adapter and of.weight is not None and of.adapter.room.weight
        ]
        room = sum(w.untyped_storage().nbytes() - w.numel() * w.element_size() for w in made)
        assert room == sum(line.bytes for line in said.lines if line.name == "weights.room")
        assert bool(room) == ("nf4" not in withs)
        found = memory.track(job, 1, supposed=True)
    assert said.peak_bytes - baseline.CUBLAS_BYTES == pytest.approx(found.peak, rel=0.05)


def test_what_it_predicts():
    def said(*withs):
        usual = ("bf16", "attention", "compile", "fused-loss", "fused-adamw")
        return search.predict(shaped("llama-3.2-1b", *usual, *withs, rows=16), "h200")

    def copied(said):
        found = {}
        for work in said.work:
            way, _, rest = work.name.partition(".beside.")
            if rest and work.seconds:
                found.setdefault(way, set()).add(rest)
        return found

    for more in ([], ["nf4"], ["recompute"]):
        plain, triton, quack = (
            said("lora", *more, *block) for block in ([], ["fused-kernels"], ["fused-kernels:mlp=quack"])
        )
        if more != ["recompute"]:
            lines = {i.name for i in quack.lines}
            assert "saved.product" not in lines and {"saved.enters.gate_up", "saved.gate_up"} <= lines
            assert "saved.product" in {i.name for i in triton.lines}
            both = ((2048, 3072), (2048, 2048), (8192, 2048))  # of qkv, o and down: below and beside
            values = sum(64 * (width + rows + 64) for width, rows in both) + 64 * 2 * 8192
            room = 0 if more == ["nf4"] else 16 * values * 2
            assert quack.peak_bytes == triton.peak_bytes - 16 * 32768 * 8192 * 2 + room
        assert quack.tokens_per_s > 1.005 * plain.tokens_per_s
        done = {w.name: w.seconds for w in quack.work}
        assert not any(seconds for name, seconds in done.items() if name.startswith("forward.added"))
        assert copied(quack) == {"forward": {"qkv", "o", "gate_up"}, "backward": {"qkv", "o", "down"}}
        fused = said("lora", *more, "attention:impl=fa4", "fused-kernels:mlp=quack,norm=true,rope=true")
        assert copied(fused) == {"backward": {"down"}}
    attention = said("lora:targets=attention", "fused-kernels:mlp=quack")
    assert copied(attention) == {"forward": {"qkv", "o"}, "backward": {"qkv", "o"}}
    for other in ("lora:targets=attention,dora=true", "lora:targets=attention,dropout=0.1", "ia3:targets=attention"):
        none = said(other, "fused-kernels:mlp=quack")
        assert not copied(none) and not any(i.bytes for i in none.lines if i.name == "weights.room")
        assert any(w.seconds for w in none.work if w.name.startswith("forward.added")) == other.startswith("lora")


# What is refused.


def test_what_needs_refuse(box):
    h200 = parse_hardware("h200")[0]

    def ready(**with_):
        return decide(golden_run(box, packed=True, bf16={}, **QUACK, **with_), device=h200)

    ready(lora={})
    ready(lora={}, nf4={})
    ready(lora={}, int8={})
    ready(lora={"dora": True, "targets": "attention"})
    for refused in (
        {"fp8": {}, "compile": {}, "sets": ["batch.micro_tokens=96"]},
        {"lora": {"dora": True, "targets": "mlp"}},
        {"lora": {"dropout": 0.1}, "nf4": {}},
        {"lora": {"targets": ["down_proj"], "dora": True}, "int8": {}},
        {"ia3": {}},
    ):
        with pytest.raises(NeedsError, match="other than matrices with low-rank adapters") as caught:
            ready(**refused)
        assert caught.value.asked == "`fused-kernels:mlp=quack` computes the matmuls"
        assert caught.value.do == "take mlp=triton"


def test_what_lays_matrices_side_by_side_is_asked_for(box, monkeypatch):
    job = learning(box, **QUACK)
    monkeypatch.setattr("optrush.technique.library", lambda name: None)
    there = mock.Mock(env=mock.Mock(claimed=job.env.claimed, device=parse_hardware("h200")[0]), model=job.model)
    with pytest.raises(NeedsError, match="triton is not installed") as caught:
        FusedKernels(mlp="quack").wrap_step(there)
    assert caught.value.asked == "`fused-kernels:mlp=quack` runs a Triton kernel"
    there.env.claimed = {}
    monkeypatch.setattr(lora, "make_room", lambda *_, **__: 0)
    assert FusedKernels(mlp="quack").wrap_step(there) == 0


@pytest.mark.parametrize(
    ("lora", "beside"),
    [({"dora": True, "targets": "mlp"}, {}), ({"targets": ["down_proj"], "dropout": 0.1}, {"int8": {}}),
     ({"targets": "attention"}, {"fp8": {}}), (None, {"ia3": {}})],
    ids=str,
)  # fmt: skip
def test_what_the_stage_refuses(box, lora, beside):
    with_ = {**beside, **({} if lora is None else {"lora": lora})}
    run = golden_run(box, packed=True, **QUACK, **with_)
    with pytest.raises(NeedsError, match="other than matrices with low-rank adapters") as caught:
        assembled(run, CLASSES)
    assert caught.value.asked == "`fused-kernels:mlp=quack`" and caught.value.do == "take mlp=triton"


def test_what_fits():
    _, gate_up, down, _ = linears(["gate_proj"])
    assert lora.fits(gate_up) and lora.fits(down)
    down.weight.requires_grad_(True)
    assert not lora.fits(down), "its gradient would be lost"
    down.weight.requires_grad_(False)
    down.matmul = F.bilinear
    assert not lora.fits(down)
    gate_up.adapter.inner = F.bilinear
    assert not lora.fits(gate_up)
    gate_up.adapter.inner, gate_up.matmul = F.linear, lambda *args: gate_up.adapter.product(*args)
    assert not lora.fits(gate_up)
    for other in (torch.nn.Linear(16, 8, bias=False), Linear.of(torch.nn.Linear(8, 16), "down")):
        assert not lora.fits(other.requires_grad_(False))
    _, _, down, _ = linears(["down_proj"])
    stored = QuantizedLinear(down, Form(8), torch.bfloat16)
    down.quantized, down.adapter.inner = stored, stored.product
    assert lora.fits(down)
    down.adapter.inner = F.linear
    assert not lora.fits(down)


@pytest.mark.parametrize("with_", further([{"amp": {}}, {"bf16": {}}, {}, {"amp": {"stream": "half"}}], 1), ids=str)
def test_compiled_without_adapters(box, with_, traced):
    """Compiled without the code that would be written; a compiler refuses a tensor that is given twice."""
    want, right = first_gradients(assembled(golden_run(box, packed=True)))
    loss, grads = first_gradients(
        assembled(golden_run(box, packed=True, rows=8, compile={}, **QUACK, **with_), CLASSES)
    )
    assert loss == pytest.approx(want, rel=1e-2 if with_ else 1e-6)
    for name, grad in grads.items():
        assert (grad - right[name]).norm() < (0.1 if with_ else 1e-5) * right[name].norm(), name


@pytest.mark.parametrize("stream", ["float32", "half"])
def test_gradients_of_float32_weights_are_not_rounded(box, stream):
    """Under mixed precision a sum over tokens goes to its weight as it was summed."""
    one = {"packed": True, "rows": 8}  # no sum of several micro-batches
    _, right = first_gradients(assembled(golden_run(box, **one)))
    _, grads = first_gradients(assembled(golden_run(box, **one, amp={"stream": stream}, **QUACK), CLASSES))
    for name, grad in grads.items():
        inside = name.endswith(("gate_up.weight", "down.weight"))
        assert grad.dtype == torch.float32 and (grad - right[name]).norm() < 0.1 * right[name].norm()
        if "blocks" in name and "norm" not in name:
            assert torch.equal(grad, grad.bfloat16().float()) == (not inside), name


def test_without_adapters_weights_learn_as_before(box):
    job = assembled(golden_run(box, packed=True, **QUACK), CLASSES)
    assert all(block.mlp is swiglu_quack.quack_mlp for block in job.model.blocks.values())
    want_loss, want = first_gradients(assembled(golden_run(box, packed=True)))
    loss, grads = first_gradients(job)
    assert loss == pytest.approx(want_loss, rel=1e-6) and furthest(grads, want) < 1e-5
