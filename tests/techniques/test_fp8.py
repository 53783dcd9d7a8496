"""8-bit products: the arithmetic they promise, losses and gradients near float32's, a held-out loss as good."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func

from meshes import further
from optrush.decide import decide
from optrush.errors import NoEffectError
from optrush.hardware import NAMED
from optrush.kernels import float8
from optrush.models.shapes import SHAPES
from optrush.planner import search
from optrush.technique import Part
from optrush.techniques.fp8 import MLP_SHARE, Fp8

from golden.make_golden import SIZES, T
from heldout import float32, held_out
from trials import apart, assembled, build_decoder, first_gradients, golden_run, micro, shaped, steps

LINEARS = {"qkv", "o", "gate_up", "down"}
M, K, N = 48, 64, 96
KINDS = ((4, 3, 7, 448.0), (5, 2, 15, 57344.0))  # e4m3, e5m2: bits of exponent and mantissa, bias, largest value


# The arithmetic, against one of its own.


def by_hand(values: np.ndarray, kind: tuple[int, int, int, float]) -> np.ndarray:
    """What `rounded` stands for, in float64: scaled to the largest value, rounded to the nearest, ties to even."""
    _, mantissa, bias, most = kind
    factor = np.float32(most) / np.float32(np.abs(values).max())
    scaled = np.float32(values * factor).astype(np.float64)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 1e-300))), 1 - bias)
    unit = 2.0 ** (exponent - mantissa)
    return np.clip(np.round(scaled / unit) * unit, -most, most) / np.float64(factor)


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, (float8.FORWARD, float8.BACKWARD))), ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_rounding(kind, dtype, size):
    values = np.float32(np.random.RandomState(3).standard_cauchy((64, 64)) * size)
    rounded, back = float8.rounded(torch.from_numpy(values), dtype)
    assert rounded.dtype == dtype and rounded.float().abs().max() == kind[3], "the whole range is used"
    found = rounded.double().numpy() * back.double().item()
    assert np.abs(found - by_hand(values, kind)).max() <= 1e-6 * np.abs(values).max()


def drawn(dtype=torch.float32):
    draw = torch.Generator().manual_seed(5)
    shapes = ((2, M // 2, K), (N, K), (N,), (2, M // 2, N))
    x, w, b, g = (torch.randn(s, generator=draw).to(dtype) for s in shapes)
    return [t.requires_grad_() for t in (x, w, b)], g * 1e-4


def test_products_of_rounded_values():
    """Output and both gradients are products of what was rounded: nothing else is lost."""
    inputs, g = drawn()
    y = float8.float8_linear(*inputs)
    found = [y, *torch.autograd.grad(y, inputs, g)]
    flat = [t.detach().numpy().reshape(-1, t.shape[-1]) for t in (*inputs[:2], g)]
    x, w, e = (by_hand(values, kind) for values, kind in zip(flat, (KINDS[0], KINDS[0], KINDS[1])))
    bias = inputs[2].detach().double().numpy()
    want = [x @ w.T + bias, e @ w, e.T @ x, flat[2].sum(0)]
    for a, b in zip(found, want):
        assert apart(a.detach().double().view(b.shape), torch.from_numpy(b)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_the_plain_product(dtype):
    inputs, g = drawn(dtype)
    y, plain = float8.float8_linear(*inputs), F.linear(*inputs)
    assert y.dtype == dtype and y.shape == plain.shape
    found = [y, *torch.autograd.grad(y, inputs, g)]
    want = [plain, *torch.autograd.grad(plain, inputs, g)]
    for a, b, off in zip(found, want, (0.05, 0.08, 0.08, 0.01)):
        assert a.dtype == b.dtype and 0 <= (a.float() - b.float()).norm() / b.float().norm() < off
    assert not torch.equal(y, plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", range(3))
def test_what_is_not_finite_is_not_hidden(value, at):
    inputs, g = drawn()
    with torch.no_grad():
        (inputs[0], inputs[1], g)[at].view(-1)[7] = value
    y = float8.float8_linear(*inputs)
    dx, dw, _ = torch.autograd.grad(y, inputs, g)
    touched = {0: (y, dw), 1: (y, dx), 2: (dx, dw)}[at]
    assert all(t.isnan().all() for t in touched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_the_products_alone(dtype):
    """Values are up to 448 before they are scaled back: sums of their products would overflow in fp16."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 2048).to(dtype), torch.randn(4, 2048).to(dtype)
    want = float8.float8_linear(x, w, None)
    with torch.autocast("cpu", dtype):
        found = float8.float8_linear(x, w, None)
    assert torch.isfinite(found).all() and torch.equal(found, want)


def test_zeros_and_frozen_weights():
    inputs, g = drawn()
    zero = torch.zeros_like(inputs[0]).requires_grad_()
    weight = inputs[1].detach()
    y = float8.float8_linear(zero, weight, None)
    assert not y.any() and torch.autograd.grad(y, zero, g)[0].abs().sum() > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_as_one_graph(dtype):
    """The same bits through torch's compiler, but for its generated code: that compiled by 2.11 gave zeros once."""
    inputs, g = drawn(dtype)
    torch._dynamo.reset()
    traced = torch.compile(float8.float8_linear, fullgraph=True, dynamic=False, backend="aot_eager")
    want = torch.autograd.grad(float8.float8_linear(*inputs), inputs, g)
    found = torch.autograd.grad(traced(*inputs), inputs, g)
    torch._dynamo.reset()
    assert all(map(torch.equal, found, want)) and all(t.any() for t in found)


# In a model.


def changed(trainer) -> set[str]:
    return {
        name.rpartition(".")[2] for name, linear in trainer.model.linears() if linear.matmul is float8.float8_linear
    }


@pytest.mark.parametrize(("targets", "want"), [("all", LINEARS), ("mlp", {"gate_up", "down"})])
def test_chosen_linears(box, targets, want):
    job = assembled(golden_run(box, fp8={"targets": targets}))
    assert changed(job) == want
    edit = next(e for e in job.applied if e.technique == "fp8")
    assert edit.count == len(want) * SIZES["num_hidden_layers"]
    assert all(linear.output_splits and linear.groups for _, linear in job.model.linears())


@pytest.mark.parametrize(
    "with_", [{}, {"amp": {}}, {"bf16": {}}, {"recompute": {}, "attention": {}, "fused_loss": {"chunk": 32}}], ids=str
)
def test_losses_and_gradients_near_the_baseline(box, with_):
    loss, want = first_gradients(assembled(golden_run(box, packed=True)))
    off, found = first_gradients(assembled(golden_run(box, packed=True, fp8={}, **with_)))
    assert off == pytest.approx(loss, rel=5e-3) and off != loss
    a, b = (torch.cat([d[name].float().flatten() for name in want]) for d in (found, want))
    assert F.cosine_similarity(a, b, dim=0) > 0.95, "two blocks, each of whose products is 4 to 6 % off"
    assert (a - b).norm() / b.norm() < 0.3
    assert all(found[name].dtype == (torch.bfloat16 if "bf16" in with_ else torch.float32) for name in want)


def played(box, data):
    run = golden_run(box, packed=True, fp8={}, **{data: {}})
    return [line[:2] for line in steps(assembled(run), 3)]


def test_ranks_that_share_the_weights_agree_with_ranks_that_hold_them(box, pair):
    whole, cut = (pair(played, box, data) for data in ("ddp", "fsdp"))
    assert whole[0] == whole[1] and cut[0] == cut[1]
    for a, b in zip(whole[0], cut[0]):
        assert a == pytest.approx(b, rel=1e-3)


MARGIN = 0.03  # nats a token, of the mean over the seeds; a seed alone twice


@pytest.mark.slow
def test_fewer_bits_would_be_seen(box, monkeypatch):
    """The margin can fail: with no bit of mantissa left in any operand, the loss is worse by more."""
    right = float8.rounded

    def coarse(t, dtype):
        q, back = right(t, dtype)
        wide = q.float()
        unit = 2.0 ** (torch.floor(torch.log2(wide.abs().clamp_min(1e-30))))
        return (torch.trunc(wide / unit) * unit).to(dtype), back

    monkeypatch.setattr(float8, "rounded", coarse)
    two_layers = (f"model.path={box}/untied",)
    assert held_out(box, 1, two_layers, fp8={})[1] - float32(box, 1, two_layers)[1] > 2 * MARGIN


# What it refuses, leaves and predicts.


def test_linears_of_other_widths_stay():
    hf = dict(SHAPES["llama-3.2-1b"], hidden_size=64, intermediate_size=90, num_hidden_layers=2, head_dim=16,
              num_attention_heads=4, num_key_value_heads=2, vocab_size=80)  # fmt: skip
    job = SimpleNamespace(model=build_decoder(hf, torch.float32), notes=[])
    assert Fp8().model(job) == 4 and changed(job) == {"qkv", "o"}
    assert "4 linears stay: " in job.notes[0] and "blocks.0.gate_up (180 x 64)" in job.notes[0]
    job.notes.clear()
    assert Fp8("mlp").model(SimpleNamespace(model=build_decoder(hf, torch.float32), notes=job.notes)) == 0


def test_a_model_without_such_linears(box, monkeypatch):
    monkeypatch.setattr("optrush.techniques.fp8.MULTIPLE", 1000)
    with pytest.raises(NoEffectError, match="--without fp8"):
        assembled(golden_run(box, fp8={}))


def test_it_is_had_on_a_device_that_has_it(box):
    run = golden_run(box, sets=["batch.micro_tokens=96"], fp8={}, bf16={}, compile={})
    assert {Part.LINEARS, Part.COMPILED} <= decide(run, device=NAMED["4090"]).env.claimed


# What is kept, bytes a token and block.


def inputs(targets: str, width: int, D: int, F: int, *, normed: int = 1, product: int = 1) -> int:
    """How much more the inputs of the chosen linears take with 8 bits than without, of `width` bytes a value, where
    the activation is made again; `normed` and `product`: bytes that a value of theirs takes then."""
    return product * F + (normed - width) * D * (2 if targets == "all" else 1)


def kept_compiled(box, **with_) -> float:
    """Bytes that the forward part of a compiled block leaves for its backward part, parameters left out: cut in two by
    torch's compiler, and run one operator at a time, for the generated code holds nothing else."""
    from torch._inductor.compile_fx import compile_fx  # warns when it is imported

    torch._dynamo.reset()
    job = assembled(golden_run(box, rows=4, packed=True, attention={}, **with_))
    plain = partial(compile_fx, inner_compile=lambda graph, _, **how: make_boxed_func(graph.forward))
    for block in job.model.blocks.values():
        block.compile(backend=plain, fullgraph=True, dynamic=False)
    held: list[torch.Tensor] = []  # alive, so that no address is given twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):
        job.loss(micro(job))
    torch._dynamo.reset()
    trained = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for at, size in storages.items() if at not in trained) / SIZES["num_hidden_layers"]


def fused(norm, block):
    """The fused kernels of the norms and of the activation."""
    return {"fused_kernels": {"mlp": "triton" if block else "none", "norm": bool(norm)}} if norm or block else {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("targets", "norm", "block", "precision"),
    further([("all", 1, 1, "bf16"), ("mlp", 0, 0, "amp"), ("all", 0, 1, "bf16"), ("all", 1, 0, "bf16"),
             ("all", 0, 0, "bf16"), ("mlp", 1, 1, "bf16"), ("all", 1, 1, "amp")], 1),
)  # fmt: skip
def test_what_a_compiled_block_keeps(box, targets, norm, block, precision):
    """What a kernel of its own has made, in 8 bits; what the compiler makes, and copies of weights, not at all."""
    D, F_, HE = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"] * SIZES["head_dim"]
    beside = {precision: {}, **fused(norm, block)}
    more = kept_compiled(box, fp8={"targets": targets}, **beside) - kept_compiled(box, **beside)
    want = inputs(targets, 2, D, F_, normed=norm, product=block) - (0 if block else 2 * F_)
    if targets == "all":  # a CPU's attention is laid anew for `o`, which kept that copy
        want -= 2 * HE
    casts = 3 * D * F_ + (D * (HE + HE) + HE * D if targets == "all" else 0)  # K = H / 2
    slots = 4 * T
    assert more == pytest.approx(want * slots - (2 * casts if precision == "amp" else 0), abs=slots), "factors beside"


def planned(name: str, with_: dict, targets: str) -> tuple[search.Prediction, search.Prediction]:
    """Without and with float8 products, of a published shape on an H200."""
    config = shaped(name, rows=4, seq=4096).model_copy(update={"with_": with_})
    ours = config.model_copy(update={"with_": {**with_, "fp8": {"targets": targets}}})
    return search.predict(config, "h200"), search.predict(ours, "h200")


USUAL = {"attention": {}, "compile": {}, "fused-loss": {}, "fused-adamw": {}}


@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_what_it_predicts(targets):
    """The chosen products take half the time and are as many; rounding costs bytes."""
    plain, ours = planned("llama-3.1-8b", {"bf16": {}, **USUAL}, targets)
    before, after = ({e.name: e for e in p.work if e.where == "device"} for p in (plain, ours))
    halved = {name for name, e in before.items() if after[name].seconds < 0.6 * e.seconds}
    chosen = LINEARS if targets == "all" else {"gate_up", "down"}
    assert halved == {f"{way}.{name}" for way in ("forward", "backward") for name in chosen}
    assert all(after[name].flop == before[name].flop for name in before)
    assert sum(e.seconds for name, e in after.items() if name.startswith("fp8.")) > 0
    assert ours.tokens_per_s > 1.1 * plain.tokens_per_s


@pytest.mark.parametrize(("norm", "block"), [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_the_memory_it_predicts(targets, norm, block):
    """As a compiled block keeps it (above)."""
    beside = {name.replace("_", "-"): options for name, options in fused(norm, block).items()}
    for name, precision, L, D, F_ in (
        ("llama-3.1-8b", "bf16", 32, 4096, 14336),
        ("llama-3.2-1b", "amp", 16, 2048, 8192),
    ):
        plain, ours = planned(name, {precision: {}, **beside, **USUAL}, targets)
        want = 16384 * L * (inputs(targets, 2, D, F_, normed=norm, product=block) - (0 if block else 2 * F_))
        if precision == "amp":
            want -= 2 * 973_078_528 * (1 if targets == "all" else MLP_SHARE)
        assert saved(ours) - saved(plain) == pytest.approx(want)


def saved(said: search.Prediction) -> float:
    """Bytes of what waits for the backward pass, and of cast weights: not all of it need be there at the peak."""
    return sum(i.bytes for i in said.lines if i.name.startswith(("saved.", "casts.")))


def test_blocks_that_run_again_keep_as_much_as_before():
    """But for the one that runs: what enters qkv, gate and up takes 8 bits there instead of 16."""
    with_ = {"bf16": {}, "fused-kernels": {"norm": True}, "recompute": {}, **USUAL}
    plain, ours = planned("llama-3.1-8b", with_, "all")
    assert ours.peak_bytes - plain.peak_bytes == -16384 * 2 * 4096


def test_cast_copies_of_the_other_weights_are_made_again_too():
    """As those of all weights are, where compiled blocks run again in part."""
    beside = {"amp": {}, "selective-recompute": {"ops": "attention"}, **USUAL}
    plain, ours = planned("llama-3.2-1b", beside, "mlp")
    assert ours.peak_bytes <= plain.peak_bytes


def test_frozen_weights_leave_the_inputs_alone():
    with_ = {"bf16": {}, "lora": {}, "fused-kernels": {}, **USUAL}
    plain, ours = planned("llama-3.2-1b", with_, "all")
    assert {i.name: i.bytes for i in ours.lines} == {i.name: i.bytes for i in plain.lines}
