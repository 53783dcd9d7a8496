"""The ledger against torch itself: real steps of published shapes on tensors without bytes, every storage counted.

The tracker (tests/memory.py) sees what eager code allocates, and is held to the allocator by its own tests. Of what
torch.compile allocates only the values that a block keeps are compared; the cells of benchmarks/cells.py have the rest.
"""

from contextlib import nullcontext

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshes import further
from optrush.config import parse_config
from optrush.data.batch import Documents
from optrush.hardware import parse_hardware
from optrush.kernels import attention
from optrush.models.shapes import SHAPES
from optrush.models.source import _published
from optrush.planner import baseline, search

from memory import supposed, track
from trials import assembled, ledgers

SDPA = ("fused-adamw", "attention")
CASES = [
    # shape, implementation, techniques, rows of a micro-batch, T, micro-batches of a step
    ("llama-3.2-1b", "transformers", (), 1, 2048, 1),
    ("llama-3.2-1b", "transformers", ("amp", *SDPA), 4, 1024, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA), 4, 1024, 2),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "fused-loss:chunk=1024"), 4, 1024, 2),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "fused-loss", "recompute"), 8, 2048, 1),
    ("llama-3.2-1b", "native", (*SDPA, "recompute"), 1, 512, 1),  # a tied weight's two gradients are the peak
    ("qwen2.5-0.5b", "native", ("amp", "fused-adamw"), 4, 1024, 1),
    ("qwen2.5-0.5b", "transformers", ("bf16", *SDPA, "recompute"), 2, 1024, 2),
    ("qwen2.5-0.5b", "native", (*SDPA, "packing"), 2, 1024, 1),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "fused-loss"), 2, 1024, 1),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "fused-loss", "fused-kernels", "recompute"), 8, 2048, 1),
]
# Blocks with other places of norms, other multipliers, layers without a rotation; linears in one tensor of the files.
ORDERS = [
    (shape, "native", (*withs, *SDPA, "fused-loss"), 4, 1024, 1)
    for shape in (
        "google/gemma-3-1b-pt",
        "allenai/OLMo-2-0425-1B",
        "HuggingFaceTB/SmolLM3-3B",
        "microsoft/Phi-4-mini-instruct",
    )
    for withs in (("bf16",), ("amp",), ("bf16", "lora"))
]
ORDERS += [
    ("google/gemma-2-2b", "native", (*withs, "fused-adamw", "fused-loss"), 2, 1024, 1)
    for withs in (("bf16",), ("amp",))
]
SMALL_HEAD = "fused-loss:chunk=128"
BACKWARD = [  # the peak is a block's backward pass, or the embedding's
    ("llama-3.2-1b", "native", ("bf16", *SDPA, SMALL_HEAD, "recompute"), 16, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, SMALL_HEAD, "recompute", "fused-kernels"), 16, 2048, 1),
    ("llama-3.2-1b", "native", ("amp", *SDPA, SMALL_HEAD, "recompute"), 8, 2048, 1),
    ("llama-3.2-1b", "native", (*SDPA, SMALL_HEAD), 8, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 2),
    ("llama-3.1-8b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 1),
    ("llama-3.1-8b", "native", ("bf16", *SDPA, "recompute"), 1, 256, 2),
    ("qwen3-30b-a3b", "native", ("bf16", *SDPA, "recompute", "fused-loss:chunk=64", "lora", "nf4"), 1, 4096, 1),
]
# The peak is attention's backward pass, which holds whole scores: masked, or transformers' sdpa in float32 on CUDA.
SCORES = [
    ("llama-3.2-1b", "native", (SMALL_HEAD,), 2, 2048, 1),
    ("llama-3.2-1b", "native", ("bf16", SMALL_HEAD), 2, 2048, 1),
    ("llama-3.2-1b", "transformers", ("amp", SMALL_HEAD), 2, 2048, 1),
    ("llama-3.2-1b", "transformers", (*SDPA, "recompute"), 8, 4096, 1),
    ("llama-3.2-1b", "transformers", (*SDPA, SMALL_HEAD), 8, 2048, 1),
]


def run(box, shape, implementation, withs, rows, T, times):
    text = f"""
model: {{shape: {shape}, implementation: {implementation}}}
objective: pretrain
data: {{random: 32}}
batch: {{seq: {T}, tokens: {rows * T * times}, micro_tokens: {rows * T}}}
train: {{steps: 4}}
output: {box / "output"}
with: {{}}
"""
    return parse_config(text, "case", (), withs)


EVERY = [*((c, 0.05) for c in (*CASES, *ORDERS)), *((c, 0.02) for c in (*BACKWARD, *SCORES))]
WHOLE_ONLY = (*BACKWARD[:3], BACKWARD[-1], *SCORES[1:3])  # few blocks peak elsewhere; many chunks take long
QUICK = [(case, near) for case, near in EVERY if case not in WHOLE_ONLY]


@pytest.mark.parametrize(("case", "near", "blocks"), [
    *further([(case, near, 3) for case, near in QUICK[::4] + QUICK[1::4] + QUICK[2::4] + QUICK[3::4]], 3),
    *(pytest.param(case, near, None, marks=pytest.mark.slow) for case, near in EVERY),
], ids=str)  # fmt: skip
def test_peak(tmp_path, monkeypatch, case, near, blocks):
    """Of the published number of blocks, or of a few of them, which takes a tenth of the time."""
    shape, *rest = case
    if blocks is not None:
        sizes = {**SHAPES, **_published()}[shape]
        monkeypatch.setitem(SHAPES, shape := f"{shape} here", sizes | {"num_hidden_layers": blocks})
    near_the_peak(monkeypatch, run(tmp_path, shape, *rest), near, scored=case in SCORES)


def near_the_peak(monkeypatch, asked, near, scored=False):
    # As on an H200: its kernels take groups of heads in 16 bits, and no head wider than 256.
    monkeypatch.setattr(attention, "_groups", lambda q: q.dtype != torch.float32 and q.shape[-1] <= 256)
    said = search.predict(asked, "h200").peak_bytes - baseline.CUBLAS_BYTES  # the one line that only a GPU has
    with supposed(asked) as job, sdpa_kernel(SDPBackend.MATH) if scored else nullcontext():
        found = track(job, 1, supposed=True, cuda=True)
    assert said == pytest.approx(found.peak, rel=near)


NORMED = {  # Qwen3-0.6B, of four blocks and few words
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
PRECISIONS = [("bf16",), ("amp",), (), ("amp:stream=half",), ("bf16", "selective-recompute"), ("bf16", "recompute")]


WIDE = {  # Gemma 4 E2B and 31B, of six blocks and few words; 31B narrower
    "model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 256, "global_head_dim": 512, "vocab_size": 2048,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 512,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
}  # fmt: skip
BY_LAYER = {
    "inputs": WIDE | {"hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8,
        "num_key_value_heads": 1, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 2048,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "keys": WIDE | {"hidden_size": 2688, "intermediate_size": 8192, "num_attention_heads": 16,
        "num_key_value_heads": 8, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 2},
    "experts": WIDE | {"hidden_size": 1408, "intermediate_size": 2112, "num_attention_heads": 16,
        "num_key_value_heads": 8, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 32, "top_k_experts": 8,
        "moe_intermediate_size": 704},
}  # fmt: skip

KEPT = (("bf16", "lora", "recompute"), ("bf16",), ("bf16", "lora"), ("amp",), (), ("bf16", "recompute"))
KINDS = {"heads": NORMED, **{kind: NORMED | {"model_type": kind} for kind in ("cohere", "starcoder2")}, **BY_LAYER}
# Queries and keys are kept before their norms and after the rotation; a layer norm keeps its input, and a norm for both
# parts gives each what enters its product; heads of two widths, keys and values of other layers, inputs of each layer.
NORMS = [
    [("heads", "native", w, 4, 2048, 0.02) for w in PRECISIONS],
    [("heads", "transformers", (w,), 4, 2048, 0.02) for w in ("bf16", "amp")],
    *([(kind, "native", w, 4, 2048, 0.03) for w in (("bf16",), ("amp",), (), KEPT[-1])] for kind in list(KINDS)[1:3]),
    *([(kind, "native", w, 2, 1024, 0.05) for w in (*KEPT, ("amp", "recompute"))] for kind in BY_LAYER),
]
FIRST = [NORMS[n][0] for n in (0, 2, 4)]


@pytest.mark.parametrize(
    ("kind", "implementation", "withs", "rows", "T", "near"),
    further(FIRST + [case for cases in NORMS for case in cases if case not in FIRST], len(FIRST)),
    ids=str,
)
def test_peak_with_other_norms_and_layers(
    tmp_path, monkeypatch, kind, implementation, withs, rows,
    T, near,
):  # fmt: skip
    monkeypatch.setitem(SHAPES, "normed", KINDS[kind])
    near_the_peak(monkeypatch, run(tmp_path, "normed", implementation, (*withs, *SDPA, SMALL_HEAD), rows, T, 1), near)


def test_tensor_parallelism_divides_norms_of_heads(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "normed", NORMED)
    config = run(tmp_path, "normed", "native", ("bf16", "attention", "compile", "tensor:size=2"), 1, 64, 1)
    (book,), *_ = ledgers(config, parse_hardware("2xh100")[0], 2)
    lines = {line.name: line for line in book.lines}
    assert all(lines[f"saved.{name} heads"].cut == {"tp": 2} for name in ("entering", "scales of"))


@torch.library.custom_op("optrush_tests::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("optrush_tests::attend_backward", mutates_args=())
def attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t in (q, k, v)]


attend.register_fake(lambda q, k, v: torch.empty_like(q))
attend_backward.register_fake(lambda gradient, q, k, v, out: [torch.empty_like(t) for t in (q, k, v)])
attend.register_autograd(
    lambda ctx, gradient: tuple(attend_backward(gradient, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)
GROUPED = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of Functions
@pytest.mark.parametrize(
    ("changes", "adapters"),
    further([({**GROUPED, "num_key_value_heads": 12}, ()), ({}, ("lora",)), ({"model_type": "llama"}, ()), ({}, ()),
        (GROUPED, ()), ({"model_type": "qwen2"}, ()), ({}, ("lora:targets=mlp",)),
        ({**GROUPED, "num_key_value_heads": 12}, ("lora",)), ({"model_type": "llama"}, ("lora",)),
        ({"model_type": "olmo2", "tie_word_embeddings": False}, ("lora",))], 2),
    ids=["own heads", "lora", "llama", "qwen3", "grouped", "qwen2", "lora of mlp", "lora, own heads", "lora, llama",
        "lora, olmo2"],
)  # fmt: skip
def test_what_a_compiled_block_keeps(tmp_path, monkeypatch, changes, adapters):
    """The bytes a token that torch's partitioner keeps for a block's backward pass, by a kernel for attention."""
    monkeypatch.setitem(SHAPES, "normed", NORMED | {"num_hidden_layers": 1, **changes})
    torch._dynamo.reset()
    asked = run(tmp_path, "normed", "native", ("bf16", "attention", "compile", *adapters), 1, 64, 1)
    (book,), *_ = ledgers(asked, parse_hardware("h200")[0], 1)
    lines = [line for line in book.lines if line.per_token and line.name.startswith(("input", "saved."))]
    said = sum(book.width(line) * line.values for line in lines)
    block = next(iter(assembled(run(tmp_path, "normed", "native", adapters, 1, 64, 1)).model.blocks.values()))
    block = block.to(torch.bfloat16)
    block.attention = lambda q, k, v, documents, **_: attend(q, k, v)
    E, D = SHAPES["normed"]["head_dim"], NORMED["hidden_size"]
    x, angle = (torch.randn(1, 64, *n, dtype=torch.bfloat16) for n in ((D,), (1, E)))
    parameters = {t.untyped_storage().data_ptr() for t in (*block.parameters(), angle)}
    kept: list[float] = []

    def forward(graph, inputs):
        def call(given):
            outputs = graph(*given)  # the first is what it returns; a view keeps all of its storage
            tokens = [t for t in outputs[1:] if isinstance(t, Tensor) and 64 in t.shape[:2]]
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tokens}
            kept.append(sum(size for at, size in held.items() if at not in parameters) / 64)
            return outputs

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    documents = Documents(torch.tensor([0, 64], dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32), 64, True)
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, _: graph, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(x.requires_grad_(), angle, angle, documents)
    assert kept and said == pytest.approx(kept[0], rel=0.005)
