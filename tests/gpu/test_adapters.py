"""Adapters on the device against PEFT there: losses and gradients, over dense bases and bases in 4 and 8 bits.

PEFT, on transformers' model with bitsandbytes' linears where the base is packed, always computes in float32 here, and
without TF32. The model is as small as the kernels of the fast path take it: D = 256, heads of 64. Its values are those
of a published one: of the size that transformers draws, and such as bfloat16 has, so that what is off in bfloat16 comes
of products and sums. tests/parity has the same cases, and more of them, on a CPU.
"""

import functools
import math
import sys
from pathlib import Path

import pytest
import torch

from optrush.technique import library
from optrush.trainer.trainer import Trainer

from trials import assembled

sys.path.append(str(Path(__file__).parents[1] / "parity"))  # which pytest has not added, where this folder runs alone

from parity_models import SIZES, packed, reference, save

test_peft = pytest.importorskip("test_peft", reason="PEFT is not installed")
DEVICE = torch.device("cuda")

T, V = 128, 256
MODEL = {
    **SIZES, "model_type": "llama", "vocab_size": V, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64,
    "max_position_embeddings": T, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
BATCH = packed([[50, 70], [128], [1, 100, 20], [33, 33, 33]], T, V)
SETS = (f"batch.seq={T}", f"batch.tokens={4 * T}", f"batch.micro_tokens={4 * T}")
SIZE = 0.03  # of what is added to the first values of PEFT's adapters

FUSED = {"fused-kernels": {"norm": True, "rope": True}, "fused-loss": {"chunk": 128}}
QUACK = {**FUSED, "fused-kernels": {
    "mlp": "quack", "norm": True, "rope": True,
}, "fused-loss": {"impl": "quack", "chunk": 128}}  # fmt: skip
PATHS = {
    "plain": {},
    "sdpa": {"attention": {"impl": "sdpa"}, **FUSED},  # the only one that takes float32
    "varlen": {"attention": {"impl": "varlen"}, **FUSED},
    "fa4": {"attention": {"impl": "fa4"}, **FUSED},
    "quack": {"attention": {"impl": "fa4"}, **QUACK},
    "loss": {"attention": {"impl": "fa4"}, "fused-loss": {"impl": "quack"}},
}
PATHS |= {f"{name} compiled": {**path, "compile": {}} for name, path in PATHS.items()}
DEMANDS = {"fa4": "flash-attn-4", "quack": "quack-kernels"}

Asked = tuple[float, dict[str, torch.Tensor]]  # a loss, and gradients under the names of PEFT's files


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made, folder = reference(MODEL), tmp_path_factory.mktemp("model")
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((p / 0.3 / 64 if p.ndim > 1 else p).bfloat16())
    save(made, folder)
    return folder


@pytest.fixture(scope="module")
def peft(model, tmp_path_factory):
    """Of a case of tests/parity/test_peft.py: the folder of PEFT's adapter, and what PEFT says of the batch."""

    @functools.cache
    def made(case: str) -> tuple[Path, Asked]:
        theirs, folder = test_peft.theirs(model, case, size=SIZE), tmp_path_factory.mktemp("adapter")
        theirs.save_pretrained(folder)
        return folder, test_peft.asked(theirs.to(DEVICE), BATCH.to(DEVICE))

    return made


@pytest.fixture(scope="module")
def qlora(model, tmp_path_factory):
    """With double quantisation or without: a folder that bitsandbytes quantised on the device, and as `peft`."""
    pytest.importorskip("bitsandbytes")
    import test_qlora

    @functools.cache
    def made(double: bool) -> tuple[Path, Path, Asked]:
        four, folder = tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("adapter")
        test_qlora.opened(model, double=double, device=DEVICE.type).save_pretrained(four)
        theirs = test_qlora.theirs(test_qlora.opened(four, device=DEVICE.type), size=SIZE)
        theirs.save_pretrained(folder)
        return four, folder, test_peft.asked(theirs, BATCH.to(DEVICE))

    return made


def job_of(model: Path, tmp_path: Path, case: str, adapter: Path, **with_) -> Trainer:
    """Ours of the case, begun with PEFT's adapter. Skips where a package of these techniques is not installed."""
    for impl in (options.get("impl") for options in with_.values()):
        if impl in DEMANDS and library(DEMANDS[impl]) is None:
            pytest.skip(f"{DEMANDS[impl]} is not installed")
    init = {"init": str(adapter)}
    return assembled(test_peft.run(model, tmp_path / "run", case, *SETS, init=init, **with_))


def answered(trainer: Trainer) -> Asked:
    assert trainer.world.device.type == DEVICE.type
    return test_peft.answered(trainer, BATCH.to(DEVICE))


def same(ours: Asked, theirs: Asked) -> None:
    """In float32: the loss, and each gradient by its norm, within 1e-5."""
    assert torch.get_float32_matmul_precision() == "highest", "no TF32"
    (loss, found), (want, wanted) = ours, theirs
    assert found.keys() == wanted.keys() and len(found) > 2
    off = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in wanted.items()}
    print(f"loss off by {abs(loss / want - 1):.1e}, a gradient by {max(off.values()):.1e}")
    assert loss == pytest.approx(want, rel=1e-5)
    assert all(o < 1e-5 for o in off.values()), off


def near(ours: Asked, theirs: Asked) -> None:
    """In bfloat16 against float32: the loss, and all gradients together by their norm, within 1e-2; each gradient by
    its own within 5e-2, which a wrong factor or a transposed matrix would exceed."""
    (loss, found), (want, wanted) = ours, theirs
    assert found.keys() == wanted.keys() and len(found) > 2
    apart = {name: (found[name] - g).norm().item() for name, g in wanted.items()}
    size = {name: g.norm().item() for name, g in wanted.items()}
    off = math.hypot(*apart.values()) / math.hypot(*size.values())
    each = {name: apart[name] / n for name, n in size.items()}
    print(f"loss off by {abs(loss / want - 1):.1e}, all gradients by {off:.1e}, one by {max(each.values()):.1e}")
    assert loss == pytest.approx(want, rel=1e-2) and off < 1e-2
    assert all(o < 5e-2 for o in each.values()), each


# Over a dense base.
@pytest.mark.parametrize("case", ["all", "attention", "rslora", "dora", "ia3", "transformers", "transformers, dora"])
def test_float32(model, peft, tmp_path, case):
    adapter, theirs = peft(case)
    same(answered(job_of(model, tmp_path, case, adapter)), theirs)


@pytest.mark.parametrize("case", ["all", "attention", "rslora", "dora", "ia3", "transformers"])
@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_bfloat16(model, peft, tmp_path, case, precision):
    adapter, theirs = peft(case)
    near(answered(job_of(model, tmp_path, case, adapter, **{precision: {}})), theirs)


@pytest.mark.parametrize(
    ("case", "path"), [("all", "sdpa"), ("attention", "sdpa"), ("ia3", "sdpa"), ("dora", "sdpa compiled")]
)
def test_float32_by_the_fast_path(model, peft, tmp_path, case, path):
    adapter, theirs = peft(case)
    same(answered(job_of(model, tmp_path, case, adapter, **PATHS[path])), theirs)


@pytest.mark.parametrize(("case", "precision", "path"), [
    ("attention", "bf16", "varlen"), ("dora", "amp", "varlen"), ("ia3", "bf16", "varlen"),
    ("all", "bf16", "varlen compiled"), ("ia3", "amp", "fa4"), ("dora", "bf16", "fa4"), ("attention", "bf16", "quack"),
    ("rslora", "amp", "quack"), ("all", "amp", "quack compiled"), ("all", "amp", "loss compiled"),
    ("all", "bf16", "quack compiled"),
])  # fmt: skip
def test_bfloat16_by_the_fast_path(model, peft, tmp_path, case, precision, path):
    adapter, theirs = peft(case)
    near(answered(job_of(model, tmp_path, case, adapter, **{precision: {}}, **PATHS[path])), theirs)


# Over a base in few bits.
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("path", ["plain", "sdpa"])
def test_float32_over_4_bits(qlora, tmp_path, double, path):
    four, adapter, theirs = qlora(double)
    same(answered(job_of(four, tmp_path, "all", adapter, nf4={"double": double}, **PATHS[path])), theirs)


@pytest.mark.parametrize(
    ("precision", "path"),
    [("bf16", "plain"), ("amp", "plain"), ("amp", "varlen"), ("amp", "quack"), ("bf16", "quack compiled")],
)
def test_bfloat16_over_4_bits(qlora, tmp_path, precision, path):
    four, adapter, theirs = qlora(True)
    near(answered(job_of(four, tmp_path, "all", adapter, nf4={}, **{precision: {}}, **PATHS[path])), theirs)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_over_8_bits(model, peft, tmp_path, precision):
    """Against PEFT on a model of the values that our bytes stand for."""
    adapter, dense = peft("all")
    trainer = job_of(model, tmp_path, "all", adapter, int8={}, **({precision: {}} if precision else {}))
    theirs = test_peft.theirs(model, "all", size=SIZE).to(DEVICE)
    of = {name.replace(".base_layer", ""): p for name, p in theirs.get_base_model().named_parameters()}
    with torch.no_grad():
        for name, linear in trainer.model.linears():
            for published, part in trainer.weight_map.split(f"{name}.weight", linear.dequantized(torch.float32)):
                of[published].copy_(part)
    wanted = test_peft.asked(theirs, BATCH.to(DEVICE))
    assert wanted[0] != dense[0], "8 bits are not all of it"
    (near if precision else same)(answered(trainer), wanted)
