"""experts: any mesh with it is one process, whatever the routing; checkpoints; what a rank holds; what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from meshes import MeshCase, further, prove, train
from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.models import expert_parallel
from optrush.models.activation_offload import of_parameter
from optrush.models.shapes import LOAD_FIGURES, SHAPES, ModelShape
from optrush.planner import search
from optrush.techniques import ALL

from golden import make_golden
from isolation import disturbed
from trials import assembled, first_gradients, furthest, golden_run, published, shaped

EP = {"experts": {}}
ROWS = {"experts": {"over": "context"}, "context": {}}  # experts shared by the ranks of a row
DDP = EP | {"ddp": {}}
FSDP = EP | {"fsdp": {}}
BIASES = {
    "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
    "swiglu_limit": 1.0,
}  # fmt: skip
FAMILIES = {
    "balanced": {  # with its loss of balance
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "output_router_logits": True, "router_aux_loss_coef": 0.5, "mlp_only_layers": [1],
    },
    "shared": {
        "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0,
    },
    "latent": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7, "head_dim": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
    "delta": {
        "model_type": "qwen3_next", "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "scaled": {  # chunks within documents, a layer without a rotation, one of two layers with experts
        "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 5,
        "pad_token_id": None,
    },
    "biases": BIASES,
    "two": BIASES,  # all tokens are at the first two experts, which are one rank's: the other rank gets none
    "one": BIASES | {"num_experts_per_tok": 1},  # all at the last one
}  # fmt: skip
WANTED = {"two": (0, 1), "one": (3,)}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the golden tests', with a model of each family; `untied` is the first."""
    made = tmp_path_factory.mktemp("moe")
    for name, sizes in FAMILIES.items():
        make_golden.write_model(made / name, False, **sizes)
        if name in WANTED:
            file = made / name / "model.safetensors"
            tensors = load_file(file)
            for bias in (t for key, t in tensors.items() if key.endswith("router.bias")):
                bias[list(WANTED[name])] += 50.0
            save_file(tensors, file, metadata={"format": "pt"})
    file = shutil.copytree(made / "shared", made / "even") / "model.safetensors"
    tensors = load_file(file)
    for name in [key for key in tensors if "mlp.gate." in key]:
        tensors[name] = torch.arange(1.0, 1.0008, 1e-4) if name.endswith("correction_bias") else 0 * tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    (made / "untied").symlink_to(made / "balanced")
    make_golden.write_documents(made / "text.jsonl", False)
    return made


LORA = {"lora": {"rank": 4, "targets": ["q_proj", "gate_up_proj", "down_proj"]}}
TOGETHER = {"fused-kernels": {"mlp": "triton", "norm": True}, "recompute": {}, "fused-adamw": {}}
ROW = {"rows": 1}  # a micro-batch: the loss of balance is of one, and so does not depend on the ranks
TWO = [
    MeshCase(2, DDP, model="shared", **ROW), MeshCase(2, ROWS | {"fsdp": {}}, model="shared", **ROW),
    MeshCase(2, DDP, model="one", **ROW), MeshCase(2, FSDP, model="two", **ROW),
    MeshCase(2, FSDP | TOGETHER, packed=False, model="balanced", **ROW),
    MeshCase(2, DDP | LORA, base=LORA, model="balanced", **ROW), MeshCase(2, FSDP, model="latent", **ROW),
    MeshCase(2, FSDP | TOGETHER, model="scaled", **ROW),
    MeshCase(2, ROWS | {"ddp": {}, "recompute": {}}, model="balanced", **ROW),
    MeshCase(2, {"context": {}, "fsdp": {}, "recompute": {}}, model="balanced", **ROW),
    MeshCase(2, {"context": {"kind": "ring"}, "ddp": {}}, packed=False, model="balanced", **ROW),
]  # fmt: skip
FOUR = [
    MeshCase(4, EP | {"context": {}, "fsdp": {}}, model="balanced", **ROW),
    MeshCase(4, ROWS | {"fsdp": {}}, model="shared", **ROW),
    MeshCase(4, ROWS | {"fsdp": {"replicate": 2}}, model="shared", **ROW),
    MeshCase(4, ROWS | {"ddp": {}} | LORA, base=LORA, model="balanced", **ROW),
    MeshCase(4, EP | {"context": {"kind": "gather"}, "ddp": {}} | LORA, base=LORA, model="shared", **ROW),
    MeshCase(4, DDP, model="balanced", **ROW),
    MeshCase(4, EP | {"fsdp": {"stage": 2, "sync": "each"}} | LORA, base=LORA, model="shared", **ROW),
    MeshCase(4, FSDP, model="biases", **ROW),
    MeshCase(4, EP | {"fsdp": {"replicate": 2}}, model="shared", **ROW),
]
BF16 = {"bf16": {"rounding": "nearest"}}
# A key's bias has no gradient but by rounding, so that one of bfloat16 says little.
HALF = [MeshCase(2, FSDP | BF16, base=BF16, close=0.2, model="biases", **ROW)]


@pytest.mark.parametrize("case", further([*TWO, *HALF], 2), ids=str)
def test_two_ranks_are_one_process(moe, pair, reference, case):
    prove(moe, pair, case, reference)


@pytest.mark.parametrize("case", further(FOUR, 1), ids=str)
def test_four_ranks_are_one_process(moe, quad, reference, case):
    prove(moe, quad, case, reference)


def traced(moe, with_):
    """The first step compiled, by a compiler that makes the graphs and writes no code for them."""
    real = torch.compile
    torch._dynamo.reset()
    with mock.patch("torch.compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more)):
        grads = published(assembled(golden_run(moe, rows=1, packed=True, compile={}, **with_)))[1]
    again = [str(why) for found in torch._dynamo.utils.guard_failures.values() for why in found]
    assert not [why for why in again if "size mismatch" in why], "each number of rows that arrive is compiled anew"
    return grads


@pytest.mark.slow
@pytest.mark.parametrize("with_", [DDP, FSDP | {"recompute": {}}], ids=["ddp", "fsdp"])
def test_compiled_blocks_have_the_same_gradients(moe, pair, with_):
    want = published(assembled(golden_run(moe, rows=1, packed=True)))[1]
    for grads in pair(traced, moe, with_):
        assert furthest(grads, want) < 1e-5


def delta(moe, with_):
    sets = (f"model.path={moe / 'delta'}",)
    return first_gradients(assembled(golden_run(moe, rows=1, packed=True, sets=sets, **with_)))[1]


RULE_LORA = {"lora": {"rank": 4, "targets": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj", "gate_up_proj"]}}


@pytest.mark.parametrize(("with_", "base"), further([(FSDP | RULE_LORA, RULE_LORA), (DDP, {})], 1), ids=str)
def test_beside_a_delta_rule(moe, pair, with_, base):
    """Of the first step: eight of them part by 3e-4 under ddp alone, for routing is discrete."""
    want = delta(moe, base)
    for grads in pair(delta, moe, with_):
        assert furthest(grads, want) < 1e-5


def chosen(moe, with_):
    """How many tokens each expert of each layer has, in a model whose choice is by a fine correction alone."""
    job = assembled(golden_run(moe, rows=1, packed=True, sets=(f"model.path={moe / 'even'}",), **with_))
    job.loss(job.stream.batches(0, job.stream.plan(None, 1), rank=0, ranks=1, micro_rows=1)[0])
    return job.model.load[:, 0].tolist()


@pytest.mark.parametrize("half", further([{"bf16": {}}, {"amp": {}}], 1), ids=str)
def test_the_correction_stays_wide(moe, pair, half):
    """In bfloat16 all experts would be equal, and the first ones would be taken."""
    tokens = chosen(moe, half)
    assert all(layer[0] == layer[1] == 0 < layer[7] for layer in tokens)
    assert pair(chosen, moe, half | {"fsdp": {}}) == [tokens, tokens]
    assert pair(chosen, moe, half | FSDP) == [tokens, tokens]


# What a rank holds, and what becomes of other documents.


def held(moe, with_):
    """(numbers of experts, of all else) on this rank, and whether an expert's matrix is known as a parameter's."""
    job = assembled(golden_run(moe, packed=True, **with_))
    own = [t.local.numel() for t in job.trained if ".experts." in t.name and "router" not in t.name]
    experts = job.model.blocks["0"].experts
    known = of_parameter(experts.piece(experts.gate_up).bfloat16().mT)  # and so is never offloaded
    return sum(own), sum(t.local.numel() for t in job.trained) - sum(own), known


def test_what_a_rank_holds(moe, pair):
    experts, rest, _ = held(moe, {})
    assert all(mine == (experts // 2, rest, True) for mine in pair(held, moe, DDP))


def exchanged(moe, with_):
    """(exchanges of the forward pass, of the backward pass, whether FSDP has a group of experts alone)."""
    job = assembled(golden_run(moe, rows=1, packed=True, sets=(f"model.path={moe / 'shared'}",), **with_))
    batch = job.stream.batches(0, job.stream.plan(None, 1), rank=0, ranks=1, micro_rows=1)[0]
    with mock.patch.object(torch.distributed, "all_to_all_single", wraps=torch.distributed.all_to_all_single) as spy:
        loss = job.loss(batch)
        forward = spy.call_count
        loss.backward()
    grouped = any(isinstance(block.experts, FSDPModule) for block in job.model.blocks.values())
    if "recompute" in with_:
        loss = job.loss(batch)
        for key, last in expert_parallel._LAST.items():
            expert_parallel._LAST[key] = last._replace(ends=last.ends + 1)
        with pytest.raises(RuntimeError, match="chose other experts"):
            loss.backward()
    return forward, spy.call_count - forward, grouped


def test_a_pass_that_runs_again_sends_rows_and_their_weights_alone(moe, pair):
    """Of each of two layers: counts, rows, weights and products; two gradients of what went, one of what came back.

    Nobody else has the experts of a rank, so that FSDP gathers none.
    """
    assert pair(exchanged, moe, FSDP) == [(2 * 4, 2 * 3, False)] * 2
    assert pair(exchanged, moe, FSDP | {"recompute": {}}) == [(2 * 4, 2 * (2 + 3), False)] * 2
    assert pair(exchanged, moe, FSDP | {"amp": {}}) == [(2 * 4, 2 * 3, True)] * 2, "which casts what it gathers"


def other_token(moe):
    """The same rows on both ranks: what another token of the first document changes."""
    job = assembled(golden_run(moe, rows=2, packed=True, **DDP))
    batch = job.stream.batches(0, job.stream.plan(None, 1), rank=0, ranks=1, micro_rows=2)[0]
    before, after, _ = disturbed(job, batch, equal=1)
    return torch.equal(before, after)


def test_documents_do_not_see_each_other(moe, pair):
    assert pair(other_token, moe) == [True, True]


# A whole run.


def test_a_run_says_the_same_of_its_experts(moe, pair, tmp_path):
    rows = ("batch.micro_tokens=48",)
    lines = pair(train, moe, tmp_path / "two", DDP, None, "untied", ALL, False, rows)[0]
    for a, b in zip(train(moe, tmp_path / "one", {}, sets=rows), lines, strict=True):
        for figure in ("loss", "grad_norm", "tokens", "target_tokens", *LOAD_FIGURES):
            assert a[figure] == pytest.approx(b[figure], rel=1e-5), figure


# What the plan says of it.


def planned(*withs):
    settings = ("bf16", "attention", "fused-loss", "recompute", *withs)
    found = search.predict(shaped("qwen3-30b-a3b", *settings, rows=1, windows=16), "8xh100")
    return {line.name: line.bytes for line in found.lines}, {work.name: work.bytes for work in found.work}


@pytest.mark.parametrize("size", [2, 8])
def test_the_plan_has_a_ranks_experts_and_their_links(size):
    """With ddp a rank holds 1 / size of the experts; with fsdp as much as without, and gathers less."""
    s = ModelShape.read(SHAPES["qwen3-30b-a3b"])
    experts = 48 * 128 * 3 * 2048 * 768
    assert s.expert_parameters == experts and s.block_parameters == s.parameters - 2 * s.vocab * s.width - s.width
    held = s.block_parameters - experts + experts // size
    lines, work = planned("ddp", f"experts:size={size}")
    for kind, each in (("weights", 2), ("gradients", 2), ("states", 4)):
        assert lines[f"{kind}.blocks"] == pytest.approx(each * held)
    sent = (s.parameters - experts) * 7 / 8 + experts / size * (1 - size / 8)
    assert work["reduce"] == pytest.approx(2 * 2 * sent)
    assert work["backward.rows.arriving"] == pytest.approx(4 * work["backward.rows.links"] * size / (size - 1))
    rows = 2 * 2048 * (2 * 8 * 2048) * 48 * (size - 1) / size  # of the 2 micro-batches of a rank
    assert work["backward.rows.links"] == pytest.approx(2 * rows)
    assert work["forward.rows.links"] == pytest.approx(2 * rows), "recomputation sends them again"
    assert work["returned.links"] == pytest.approx(rows), "but no products"
    (sharded, gathers), (plain, most) = planned("fsdp", f"experts:size={size}"), planned("fsdp")
    for kind in ("weights", "states"):
        assert sharded[f"{kind}.blocks"] == pytest.approx(plain[f"{kind}.blocks"])
    share = (s.block_parameters - experts + experts / size * (1 - size / 8) * 8 / 7) / s.block_parameters
    assert gathers["gather.blocks"] == pytest.approx(share * most["gather.blocks"])
    assert sharded["gradients.blocks"] == pytest.approx(2 * held), "whole while accumulating: of a rank's experts"
    if size == 8:  # nobody else has them, and FSDP copies none
        share = 1 - experts / s.block_parameters
        assert gathers["gather.blocks.copied"] == pytest.approx(share * most["gather.blocks.copied"])


@pytest.mark.parametrize(("options", "n"), [("size=2", 4), ("size=8,over=context", 8)])
def test_ranks_that_share_rows_send_their_own_tokens(options, n):
    """With context a rank has as many tokens of more micro-batches: links carry as much, 1 / n is held at once."""
    alone, sent = planned("ddp", f"experts:{options.partition(',')[0]}")
    lines, work = planned("ddp", f"experts:{options}", f"context:size={n}")
    for name in ("forward.rows.links", "returned.links", "backward.rows.links", "reduce"):
        assert work[name] == pytest.approx(sent[name]), name
    for name in ("saved.arriving", "working.arriving", "feed.arriving"):
        assert lines.get(name, 0) == pytest.approx(alone.get(name, 0) / n), name
    for name in ("weights.blocks", "gradients.blocks", "states.blocks"):
        assert lines[name] == pytest.approx(alone[name]), name


# What it refuses.

REFUSED = [
    ({"size": 3}, {"ddp": {}}, "balanced", (), 3, "8 experts"), ({}, {"ddp": {}}, "balanced", (), 3, "3 ranks"),
    ({"over": "context"}, {"ddp": {}}, "balanced", (), 2, "no context"),
    ({"size": 4, "over": "context"}, {"ddp": {}, "context": {}}, "balanced", (), 4, "`context: size: 2`"),
    ({}, {}, "balanced", (), 1, "one rank"), ({}, {}, "balanced", (), 2, "no technique shares the work"),
    ({}, {"fsdp": {}}, "biases", (), 8, "4 experts for 8 ranks"),
    ({}, {"ddp": {}}, "balanced", ("model.implementation=transformers",), 2, "through transformers"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "with_", "name", "sets", "ranks", "found"), REFUSED, ids=str)
def test_what_it_refuses(moe, options, with_, name, sets, ranks, found):
    sets = [f"model.path={moe / name}", f"batch.tokens={48 * 24}", *sets]
    run = golden_run(moe, rows=1, packed=True, sets=sets, experts=options, **with_)
    with pytest.raises(NeedsError) as error:
        decide(run, ranks=ranks)
    assert found in error.value.found and error.value.do
