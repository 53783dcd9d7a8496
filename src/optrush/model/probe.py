"""What the adapter must show before anything is trained: it runs the real model on the CPU and compares.

Documents of a packed row against the same documents alone, our head against the model's own, and sdpa without a mask
against masked attention. The first two refuse a model, the last one only says which kernel it may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.data.batch import Documents
from optrush.errors import NeedsError

if TYPE_CHECKING:
    from optrush.model.adapter import Adapter

PROBE_LENGTHS = (7, 1, 5, 11)  # documents of the probe's packed row
PROBE_LOGIT = 60.0  # hidden states are stretched until logits are this large: a softcap shows only there


def unsupported(config: Any, found: str) -> NeedsError:
    """The refusal of a model, with what was found in it."""
    return NeedsError(
        f"a model of type {config.model_type!r} through transformers",
        found,
        "choose a model of another family; llama, mistral, qwen2 and qwen3 have a decoder here",
    )


@torch.no_grad()
def probe(adapter: Adapter, hf_model: Any, dtype: torch.dtype) -> None:
    """Compare on the CPU: a packed row with its documents one by one, and our head with the model's own logits.

    Packed and alone agree to rounding only, which in bfloat16 could hide a faint leak; so the first document is also
    changed, which must leave every bit of the others.

    Raises:
        NeedsError: which of them differed, and by how much.
    """
    was, close = adapter.training, 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    adapter.eval()
    tokens, positions, documents = _probe_row(adapter)
    try:
        hidden = adapter(tokens, positions, documents)
    except (TypeError, ValueError, AttributeError) as error:
        raise unsupported(adapter.config, f"it does not run on tokens and positions ({error})") from None
    spans = list(zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True))
    single = documents._replace(single=True)
    alone = [adapter(tokens[:, a:b], positions[:, a:b], single) for a, b in spans]
    _compare(adapter.config, "packed documents and the same documents alone", hidden, torch.cat(alone, 1), close)
    changed, first = tokens.clone(), spans[0][1]
    changed[:, :first] = (changed[:, :first] + 1) % adapter.head.weight.shape[0]
    others = adapter(changed, positions, documents)[:, first:]
    _compare(adapter.config, "documents beside a changed document, before and after,", others, hidden[:, first:], 0.0)
    largest = F.linear(hidden, adapter.head.weight).float().abs().max().clamp_min(1e-6).item()
    # At 0 only a bias is left, at 1 all is as it comes, and a softcap shows only in large logits.
    for factor in (0.0, 1.0, PROBE_LOGIT / largest):
        ours, theirs = _both_logits(adapter, hf_model, tokens[:, spans[-1][0] :], factor)
        _compare(adapter.config, f"our head's logits and its own (hidden states x {factor:.3g})", ours, theirs, close)
    adapter.maskless = _maskless(adapter, tokens[:, spans[-1][0] :], single, alone[-1], close)
    adapter.train(was)


def _maskless(adapter: Adapter, tokens: Tensor, documents: Documents, want: Tensor, close: float) -> bool:
    """Whether one document through sdpa without a mask is what it is through masked attention.

    Chunks of attention could be longer than the probe's document, so they count as a difference.
    """
    if not set(getattr(adapter.config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
        return False
    try:
        adapter.set_attention("sdpa")
        adapter._leave_masks()
        found = adapter(tokens, torch.arange(tokens.shape[1])[None], documents)
    except (NeedsError, TypeError, ValueError, ImportError):
        return False  # this model has no sdpa: whoever asks for it is told so
    finally:
        adapter.set_attention("masked")
    return _apart(found, want) <= close


def _both_logits(adapter: Adapter, hf_model: Any, tokens: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Logits of one document by our head and by the model itself, its hidden states multiplied by `factor`."""
    kept: list[Tensor] = []

    def multiply(_module: nn.Module, _args: Any, out: Any) -> Any:
        out["last_hidden_state"] = out.last_hidden_state * factor
        kept.append(out.last_hidden_state)
        return out

    hook = adapter._trunk.register_forward_hook(multiply)
    try:
        theirs = hf_model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return adapter.head.logits(kept[0]), theirs


def _probe_row(adapter: Adapter) -> tuple[Tensor, Tensor, Documents]:
    """One row of PROBE_LENGTHS documents, of tokens spread over the vocabulary."""
    T, vocab = sum(PROBE_LENGTHS), adapter.head.weight.shape[0]
    tokens = (torch.arange(T) * 7919 + 13)[None] % vocab
    positions = torch.cat([torch.arange(n) for n in PROBE_LENGTHS])[None]
    ids = torch.repeat_interleave(torch.arange(len(PROBE_LENGTHS)), torch.tensor(PROBE_LENGTHS))[None]
    starts = torch.tensor([0, *PROBE_LENGTHS]).cumsum(0)
    return tokens, positions.int(), Documents(starts.int(), ids.int(), max(PROBE_LENGTHS), False)


def _compare(config: Any, what: str, ours: Tensor, theirs: Tensor, close: float) -> None:
    apart, size = _apart(ours, theirs), theirs.float().abs().max().item()
    if not apart <= close:  # not >: a NaN is a difference
        raise unsupported(config, f"{what} differ by {apart * size:.2e}, where the largest value is {size:.2e}")


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in units of the largest value of `theirs`."""
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6)).item()
