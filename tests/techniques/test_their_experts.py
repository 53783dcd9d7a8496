"""Experts of transformers models under techniques: ranks, recomputation, compiled blocks, refusals, a whole run."""

from __future__ import annotations

import json

import pytest
import torch

from meshes import further
from optrush.errors import NeedsError
from optrush.models.experts import TheirExperts

from golden import make_golden
from trials import assembled, first_gradients, golden_run, metrics, steps

FAMILIES = {
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "pad_token_id": None,
    },
    "granitemoe": {
        "model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None,
        "initializer_range": 0.1,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
        "pad_token_id": None, "moe_layer_start_index": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, box):
    """Folders as `box`, whose models have experts of families that our own decoder does not have."""
    made = {}
    for family, sizes in FAMILIES.items():
        made[family] = tmp_path_factory.mktemp(family)
        make_golden.write_model(made[family] / "untied", False, **sizes)
        for name in ("text.jsonl", "held.jsonl"):
            (made[family] / name).write_text((box / name).read_text())
    return made


def three_steps(box, with_):
    job = assembled(golden_run(box, packed=True, **with_))
    return [line[:2] for line in steps(job, 3)]


@pytest.mark.parametrize(
    ("family", "data"),
    further([("qwen2_moe", {"fsdp": {}}), ("granitemoe", {"ddp": {}}), ("ernie4_5_moe", {"fsdp": {"stage": 2}}),
             ("granitemoe", {"fsdp": {}}), ("qwen2_moe", {"ddp": {}})], 2),
    ids=str,
)  # fmt: skip
def test_two_ranks_are_one_process(mixed, pair, family, data):
    """5 experts of granitemoe do not divide by 2; each rank routes other tokens."""
    want = three_steps(mixed[family], {})
    for found in pair(three_steps, mixed[family], data):
        assert found == [pytest.approx(line, rel=1e-5) for line in want]


@pytest.mark.parametrize("family", further(list(FAMILIES), 1))
def test_recomputed_blocks_route_alike(mixed, family):
    """Losses, gradients, to the bit."""
    (one, plain), (other, again) = (
        first_gradients(assembled(golden_run(mixed[family], packed=True, **with_))) for with_ in ({}, {"recompute": {}})
    )
    assert one == other and plain.keys() == again.keys() and all(torch.equal(plain[n], again[n]) for n in plain)
    assert any("experts" in name for name in plain)


def test_a_correction_of_the_choice_is_not_trained(mixed):
    job = assembled(golden_run(mixed["ernie4_5_moe"], packed=True))
    held = {n: p.detach().clone() for n, p in job.model.named_parameters() if "correction" in n}
    list(steps(job, 2))
    now = dict(job.model.named_parameters())
    assert held and all(torch.equal(now[n], p) and not now[n].requires_grad for n, p in held.items())


def test_a_correction_keeps_its_type(mixed):
    job = assembled(golden_run(mixed["ernie4_5_moe"], packed=True, bf16={}))
    types = {n.rpartition(".")[2]: p.dtype for n, p in job.model.named_parameters()}
    assert types["e_score_correction_bias"] == torch.float32 and types["down_proj"] == torch.bfloat16
    assert all(torch.isfinite(torch.tensor(line[:2])).all() for line in steps(job, 2))


@pytest.mark.parametrize("with_", further([{"amp": {}}, {"bf16": {}}], 1), ids=str)
def test_in_16_bits(mixed, with_):
    found, want = (three_steps(mixed["qwen2_moe"], more) for more in (with_, {}))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in want], rel=2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_blocks(mixed, traced):
    want, found = (three_steps(mixed["qwen2_moe"], more) for more in ({}, {"compile": {}}))
    assert found == [pytest.approx(line, rel=1e-4) for line in want]


def test_a_whole_run(mixed):
    """It learns; the folder that it leaves has the experts."""
    lines = metrics(golden_run(mixed["granitemoe"], packed=True))
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("targets", ["experts", "gate_up_proj"])
def test_no_adapters_of_transposed_matrices(tmp_path, box, targets):
    sizes = {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "pad_token_id": None}
    make_golden.write_model(tmp_path / "untied", False, **sizes)
    (tmp_path / "text.jsonl").write_text((box / "text.jsonl").read_text())
    for with_, found in (
        ({"lora": {"rank": 2, "alpha": 4, "targets": targets}}, "without gates or transposed"),
        ({"nf4": {}, "lora": {"rank": 2, "alpha": 4}}, r"stored as \(experts, width, rows\)"),
    ):
        with pytest.raises(NeedsError, match=found):
            assembled(golden_run(tmp_path, packed=True, **with_))


@pytest.mark.parametrize("data", further([{"fsdp": {}}, {"ddp": {}}], 1), ids=str)
def test_adapters_of_experts_on_two_ranks(mixed, pair, data):
    lora = {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}}
    want = three_steps(mixed["granitemoe"], lora)
    for found in pair(three_steps, mixed["granitemoe"], lora | data):
        assert found == [pytest.approx(line, rel=1e-5) for line in want]


def test_experts_that_no_block_of_codes_fits(tmp_path, box):
    make_golden.write_model(tmp_path / "untied", False, **FAMILIES["qwen2_moe"] | {"moe_intermediate_size": 31})
    (tmp_path / "text.jsonl").write_text((box / "text.jsonl").read_text())
    lora = {"lora": {"rank": 2, "alpha": 4}}
    job = assembled(golden_run(tmp_path, packed=True, int8={}, **lora))
    assert all(m.down_proj is None for m in job.model.modules() if isinstance(m, TheirExperts))


def test_a_balance_loss_is_refused(mixed, tmp_path, box):
    folder = tmp_path / "untied"
    make_golden.write_model(folder, False, **FAMILIES["qwen2_moe"])
    file = folder / "config.json"
    (tmp_path / "text.jsonl").write_text((box / "text.jsonl").read_text())
    hf = json.loads(file.read_text()) | {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    file.write_text(json.dumps(hf))
    with pytest.raises(NeedsError, match="output_router_logits true") as error:
        assembled(golden_run(tmp_path, packed=True))
    assert '"output_router_logits": false' in error.value.do
