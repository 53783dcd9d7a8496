"""The gated delta rule beyond its parity (test_native.py): the rule token by token, isolation, plans, refusals."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from optrush import hardware
from optrush.data.batch import Documents
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError
from optrush.models import delta_rule
from optrush.models.decoder import Decoder
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import baseline, search
from optrush.techniques.attention import Attention, check_package

from memory import supposed, track
from parity_models import packed
from trials import shaped

QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_value_heads": 16, "linear_num_key_heads": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "rope_theta": 10000000,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
MOE = {key: value for key, value in {**NEXT, "model_type": "qwen3_5_moe_text"}.items() if key != "intermediate_size"}
LENGTHS = [70, 50, 3, 30]  # over two boundaries of chunks; a row of them, and behind them padding


def drawn(dtype: torch.dtype, T: int = 160) -> list[Tensor]:
    """Queries and keys of 2 heads, values of 4, decays of all sizes."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, n, w, dtype=dtype, generator=g) for n, w in ((2, 6), (2, 6), (4, 5)))
    decay = -torch.exp(3 * torch.randn(1, T, 4, dtype=dtype, generator=g))
    beta = torch.rand(1, T, 4, dtype=dtype, generator=g)
    return [x.requires_grad_() for x in (q, k, v, decay, beta)]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The formula, of one document."""
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x[0].repeat_interleave(2, 1) for x in (q * q.shape[-1] ** -0.5, k))
    state, found = q.new_zeros(4, 6, 5), []
    for t in range(q.shape[0]):
        state = state * g[0, t].exp()[:, None, None]
        error = v[0, t] - torch.einsum("hew,he->hw", state, k[t])
        state = state + torch.einsum("he,hw->hew", k[t], beta[0, t][:, None] * error)
        found.append(torch.einsum("hew,he->hw", state, q[t]))
    return torch.stack(found)[None]


def test_chunks_are_the_formula():
    """In float64 document by document, with every gradient; of a long document as transformers' chunks, in float32."""
    inputs, documents = drawn(torch.float64), packed([LENGTHS], 160, 61).documents
    got = delta_rule.plain(*inputs, documents)
    parts = zip(*(x[:, : sum(LENGTHS)].split(LENGTHS, 1) for x in inputs), strict=True)
    want = torch.cat([token_by_token(*part) for part in parts], 1)
    torch.testing.assert_close(got[:, : sum(LENGTHS)], want, rtol=1e-9, atol=1e-9)
    grad = torch.randn(want.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got[:, : sum(LENGTHS)], inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    inputs = drawn(torch.float32)
    q, k, v, g, beta = inputs
    theirs = torch_chunk_gated_delta_rule(q, k, v, g / 20, beta, use_qk_l2norm_in_kernel=True)[0]
    ours = delta_rule.plain(q, k, v, g / 20, beta, packed([[160]], 160, 61, single=True).documents)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_document_changes_no_bit_of_another():
    """Nor does a value of it that is not finite, which all later ones of its document show."""
    inputs, documents = [x.detach() for x in drawn(torch.float32)], packed([LENGTHS], 160, 61).documents
    before = delta_rule.plain(*inputs, documents)
    second = slice(70, 120)
    for value in (None, float("nan")):
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, 80] = 0.5 if value is None else value
        after = delta_rule.plain(*changed, documents)
        assert torch.equal(after[:, :80], before[:, :80]) and torch.equal(after[:, 120:], before[:, 120:])
        assert not torch.equal(after[:, second], before[:, second])
        assert after[:, 80:120].isnan().all() == (value is not None)
    mixed, weight = torch.randn(1, 160, 7), torch.randn(7, 1, 4)
    other = mixed.clone()
    other[:, second] += 1
    one, two = (delta_rule.causal_convolution(x, weight, documents.ids) for x in (mixed, other))
    assert torch.equal(one[:, :70], two[:, :70]) and torch.equal(one[:, 120:], two[:, 120:])


@pytest.mark.parametrize("hf", [QWEN35, NEXT, MOE], ids=lambda hf: hf["model_type"])
def test_published_sizes(hf):
    """Counted by transformers on the meta device, from the same config.json."""
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    shape = ModelShape.read(hf)
    assert shape.parameters == sum(p.numel() for p in theirs.parameters())
    assert shape.attention_layers == shape.layers // 4
    attention = 6 * 10**6 * shape.heads * shape.head_width * shape.attention_layers
    assert shape.flops(0, 10**6) == attention


# --- what is planned, and what is refused
@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(SHAPES, "delta", {**QWEN35, "num_hidden_layers": 4, "vocab_size": 32000})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "with_", [("bf16", "lora", "nf4"), pytest.param((), marks=pytest.mark.slow)], ids=["adapters", "all"]
)
def test_a_plan_counts_what_the_rule_saves(with_):
    """Without the products of a chunk, the smallest large line, it would be 3 % off."""
    asked = shaped("delta", "fused-adamw", "attention:delta=plain", "fused-loss:chunk=128", *with_, rows=16, seq=256)
    said = search.predict(asked, "h200").peak_bytes - baseline.CUBLAS_BYTES
    with supposed(asked) as job:
        assert any("delta rule: plain" in note for note in job.notes)
        found = track(job, 1, supposed=True, cuda=True)
    assert said == pytest.approx(found.peak, rel=0.02)


def test_the_package_within_a_compiled_graph(monkeypatch):
    """The operator that a compiler takes has the values and the gradients of calling the package, to the bit."""

    class Package(torch.autograd.Function):
        """Stands for the package: its function of q, k, v, g and beta, by `plain`."""

        @staticmethod
        def forward(ctx: Any, documents: Documents, *inputs: Tensor) -> Tensor:
            ctx.documents = documents
            ctx.save_for_backward(*inputs)
            return delta_rule.plain(*inputs, documents)

        @staticmethod
        def backward(ctx: Any, d_out: Tensor) -> Any:
            def differentiate() -> tuple[Tensor, ...]:
                leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return torch.autograd.grad(delta_rule.plain(*leaves, ctx.documents), leaves, d_out)

            with ThreadPoolExecutor(1) as pool:  # kernels need no autograd; `plain` does, which an operator excludes
                return None, *pool.submit(differentiate).result()

    def package(*qkv: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor) -> Any:
        lengths = cu_seqlens.diff()
        ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None]
        return Package.apply(Documents(cu_seqlens.int(), ids, 256, False), *qkv, g, beta), None

    monkeypatch.setattr(delta_rule, "_package", lambda: package)
    starts = torch.tensor([0, 70, 120, 123, 160, 160], dtype=torch.int32)

    def compute(rule: Callable[..., Tensor]) -> list[Tensor]:
        q, k, v, g, beta = drawn(torch.float32)
        out = rule(q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v, g, beta, starts)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, g, beta))]

    compiled = torch.compile(delta_rule._operator, backend="aot_eager", fullgraph=True)
    for want, got in zip(compute(delta_rule._by_package), compute(compiled), strict=True):
        assert want.abs().max() > 0 and torch.equal(want, got)


@pytest.mark.parametrize(("capability", "triton", "tilelang", "found"), [
    ((9, 0), "3.6.0", None, "triton 3.6.0, which compiles the gradients"), ((9, 0), "3.7.0+git1", None, "triton 3.7.0"),
    ((9, 0), "3.7.1", None, ""), ((9, 0), "3.3.1", None, ""), ((9, 0), "3.6.0", "0.1", ""), ((8, 0), "3.6.0", None, ""),
    ((10, 0), "3.6.0", None, ""),
])  # fmt: skip
def test_a_compiler_that_is_wrong_is_refused(monkeypatch, capability, triton, tilelang, found):
    versions = {"flash-linear-attention": "0.6", "triton": triton, "tilelang": tilelang}
    monkeypatch.setattr("optrush.techniques.attention.library", versions.get)
    with pytest.raises(NeedsError, match=found) if found else nullcontext():
        check_package(capability)


@pytest.mark.usefixtures("small")
def test_a_kernel_is_chosen_in_words(monkeypatch, tmp_path):
    """On CUDA the package's, or an error; asked for on a CPU, or for a model without such layers, an error."""
    device, _ = hardware.parse_hardware("h100")
    env = decide(shaped("delta", "bf16", "attention", seq=1024, rows=2), device=device, ranks=1).env
    model: Any = Decoder(ModelShape.read(SHAPES["delta"]), device=torch.device("meta"), dtype=torch.float32)
    trainer: Any = SimpleNamespace(env=env, model=model, notes=[])
    with pytest.raises(NeedsError, match="flash-linear-attention is not installed"):
        Attention().model(trainer)
    assert Attention(delta="plain").model(trainer) == 4 and delta_rule.rules(model) == ["plain"]
    monkeypatch.setattr("optrush.techniques.attention.library", lambda name: "0.4")
    Attention().model(trainer)
    assert delta_rule.rules(model) == ["fla"]
    with pytest.raises(NeedsError, match="tensors on cpu"):
        delta_rule.fla(*drawn(torch.float32), packed([LENGTHS], 160, 61).documents)
    with pytest.raises(NeedsError, match="attention:delta=fla"):
        decide(shaped("delta", "attention:delta=fla", seq=1024, rows=2), ranks=1)
    with pytest.raises(NeedsError, match="a model without layers of a delta rule"):
        decide(shaped("qwen2.5-0.5b", "attention:delta=plain", seq=1024, rows=2), ranks=1)
    with pytest.raises(ConfigError, match="linear_num_value_heads 5"):
        ModelShape.read({**QWEN35, "linear_num_value_heads": 5, "linear_num_key_heads": 2})
