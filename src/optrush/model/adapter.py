"""Any other causal language model of transformers, under the attributes that our own decoder has.

The published module does the work, unchanged; what is ours is the seam around it: hidden states instead of logits, a
head that is called, a `through` slot before every block, weights that can be cut. transformers keeps packed documents
apart by their restarting positions, but only without an attention mask and without a cache, and only in models that
hand positions to its mask builder. So nothing is assumed: when it is made, the adapter runs the real model on the CPU
and compares (`probe`). A model whose head does more than we know, or whose documents see each other, is refused with
the difference found, before anything is trained.

Canonical names are transformers' own, except the head's: `head.weight`, `head.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optrush.data.batch import Documents
from optrush.errors import NeedsError
from optrush.model.decoder import Head, call, redo_ties
from optrush.model.weights import Drawn, Entry, Folder, Memory, Recipe, drawn
from optrush.shapes import HF

ATTENTIONS = {"masked": "eager", "sdpa": "sdpa"}  # our name: transformers' name
PROBE_LENGTHS = (7, 1, 5, 11)  # documents of the probe's packed row
PROBE_LOGIT = 60.0  # hidden states are stretched until logits are this large: a softcap shows only there


class Adapter(nn.Module):
    """A transformers model behind our attributes; see `model.decoder.Decoder` for what each means.

    Args:
        hf_model: ...ForCausalLM with real values on the CPU; its modules are taken over, its class is left alone.
    """

    isolates = True

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        config = hf_model.config
        self.config = config
        self.prefix: str = hf_model.base_model_prefix
        backbone = getattr(hf_model, self.prefix, None)
        output = hf_model.get_output_embeddings()
        if not isinstance(backbone, nn.Module) or not isinstance(output, nn.Linear):
            raise _unsupported(config, "no separate backbone and linear output layer")
        self.add_module(self.prefix, backbone)  # under its own name: canonical names are then transformers' names
        self.head = Head(output.weight, output.bias)
        self.head.scale = _logit_scale(config)
        self.head.softcap = getattr(config, "final_logit_softcapping", None)
        self.through: Callable[..., Any] = call
        self._blocks = _block_list(backbone, self.prefix, config)  # number -> path
        for name in self._blocks:
            self._reroute(self.blocks[name])
        self.ties = _ties(self)
        self._buffers_on_host: dict[tuple[str, str], Tensor] = {}

    def _reroute(self, layer: nn.Module) -> None:
        """Let calls of one block's forward pass through the slot, on this instance only."""
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.through(original, *args, **kwargs)

        layer.forward = forward

    @property
    def _trunk(self) -> Any:
        """The backbone, whatever name its family gives it."""
        return getattr(self, self.prefix)

    @property
    def embedding(self) -> nn.Module:
        module: nn.Module = self._trunk.get_input_embeddings()
        return module

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """Blocks by number."""
        return {number: self.get_submodule(path) for number, path in self._blocks.items()}

    @property
    def norm(self) -> nn.Module | None:
        """The norm after the last block, if the backbone has one beside its blocks."""
        parent = self.get_submodule(self._blocks["0"].rpartition(".")[0].rpartition(".")[0])
        norms = [m for m in parent.children() if "norm" in type(m).__name__.lower()]
        return norms[-1] if norms else None

    def forward(self, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
        """tokens and positions (B, T) -> hidden states after the last norm (B, T, D).

        Documents are told by the restarts of `positions`; `documents` itself is not read.
        """
        out = self._trunk(input_ids=tokens, position_ids=positions.long(), attention_mask=None, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def linears(self) -> Iterator[tuple[str, nn.Module]]:
        """Every nn.Linear of the blocks by its canonical name (models of other linears, as GPT-2's, have none)."""
        for path in self._blocks.values():
            for name, module in self.get_submodule(path).named_modules(prefix=path):
                if isinstance(module, nn.Linear):
                    yield name, module

    def set_attention(self, name: str) -> int:
        """'masked' or 'sdpa', in transformers' own implementation; how many blocks changed.

        Raises:
            NeedsError: another name, or sdpa where scores are capped (transformers' sdpa leaves the cap out).
        """
        if name not in ATTENTIONS:
            raise NeedsError(
                f"attention {name!r} in a transformers model",
                f"the adapter has {', '.join(ATTENTIONS)}",
                "choose one of them, or a model of a family that our own decoder represents",
            )
        if name == "sdpa" and getattr(self.config, "attn_logit_softcapping", None) is not None:
            raise NeedsError(
                f"sdpa attention in a {self.config.model_type} model",
                f"attn_logit_softcapping {self.config.attn_logit_softcapping}, which sdpa would leave out",
                "use masked attention",
            )
        self._trunk.set_attn_implementation(ATTENTIONS[name])
        return len(self._blocks)

    @property
    def matrix_parameters(self) -> int:
        """N_mm: the blocks' matrices and the head."""
        blocks = sum(p.numel() for block in self.blocks.values() for p in block.parameters() if p.ndim > 1)
        return blocks + self.head.weight.numel()

    def flops(self, tokens: int, attended: int) -> int:
        """Training FLOPs as `ModelShape.flops`; sliding windows are counted as if they were whole."""
        c = self.config
        head_width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        attention = 6 * attended * c.num_attention_heads * head_width * len(self._blocks)
        return 6 * self.matrix_parameters * tokens + int(attention)

    def tie(self) -> None:
        """Make every alias in `ties` its parameter again."""
        redo_ties(self, self.ties)

    def to_meta(self) -> dict[str, Tensor]:
        """Move to the meta device; the values it had, by canonical name. Buffers are kept for `restore_buffers`."""
        values = {name: parameter.data for name, parameter in self.named_parameters()}
        for path, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers_on_host[path, name] = buffer
        self.to("meta")
        self.tie()
        return values

    def restore_buffers(self, device: torch.device) -> None:
        """Give every buffer (RoPE frequencies, embedding scales) its value again, on `device`."""
        for (path, name), value in self._buffers_on_host.items():
            self.get_submodule(path)._buffers[name] = value.to(device, copy=True)


def adapt(folder: Path | None, hf: HF, dtype: torch.dtype, seed: int) -> tuple[Adapter, Recipe]:
    """Load or draw a transformers model on the CPU, prove it, and hand it over on the meta device with its recipe.

    Raises:
        NeedsError: transformers does not know it, the weights do not fit, or the probe found a difference.
    """
    hf_model = _from_config(hf, dtype) if folder is None else _from_folder(folder, hf, dtype)
    names = {id(p): name for name, p in hf_model.named_parameters()}
    adapter = Adapter(hf_model)
    entries: dict[str, Entry] = {}
    for name, parameter in adapter.named_parameters():
        if parameter.ndim == 0:
            raise _unsupported(adapter.config, f"a parameter without dimensions ({name})")
        entries[name] = Entry(tuple(parameter.shape), ((names[id(parameter)], parameter.shape[0]),))
    source = None if folder is not None else _draw(adapter, entries, hf, seed)
    probe(adapter, hf_model, dtype)
    persistent = hf_model.state_dict().keys() - dict(hf_model.named_parameters(remove_duplicate=False)).keys()
    buffers = {name: hf_model.state_dict()[name].clone() for name in sorted(persistent)}
    values = adapter.to_meta()
    if source is not None:
        return adapter, Recipe(entries, source, buffers)
    held = {entries[name].pieces[0][0]: value for name, value in values.items()}
    return adapter, Recipe(entries, Memory(held), buffers)


def _config(hf: HF) -> Any:
    from transformers import CONFIG_MAPPING

    kind = str(hf.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise NeedsError(
            f"a model of type {kind!r}",
            "transformers does not know it without running code from the model's folder",
            "choose a model that transformers itself knows, or update transformers",
        )
    return CONFIG_MAPPING[kind].from_dict(dict(hf))


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _from_config(hf: HF, dtype: torch.dtype) -> Any:
    config, auto = _config(hf), _auto_model()
    try:
        model = auto.from_config(config, dtype=dtype, attn_implementation="eager")
    except ValueError as error:
        raise _unsupported(config, str(error).splitlines()[0]) from None
    return model.eval()


def _from_folder(folder: Path, hf: HF, dtype: torch.dtype) -> Any:
    config, auto = _config(hf), _auto_model()
    Folder(folder)  # refuses pickles, and an index that leaves the folder
    try:
        model, info = auto.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        raise _unsupported(config, str(error).splitlines()[0]) from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise NeedsError(
                f"the weights in {folder}",
                f"{what.replace('_', ' ')}: {sorted(map(str, info[what]))[0]}",
                "check that config.json fits the weights",
            )
    return model.eval()


def _draw(adapter: Adapter, entries: dict[str, Entry], hf: HF, seed: int) -> Drawn:
    """Replace the values of a fresh model by the draw that every model class shares.

    What transformers makes constant (norms that start at 1, or at 0 where a family adds 1; biases) stays constant.
    """
    constants: dict[str, float] = {}
    for name, parameter in adapter.named_parameters():
        low, high = parameter.data.aminmax()
        if low == high or parameter.ndim < 2:
            constants[entries[name].pieces[0][0]] = float(low)
    source = drawn(hf, seed, constants)
    recipe = Recipe(entries, source)
    for name, parameter in adapter.named_parameters():
        recipe.fill(name, parameter.data, (0,) * parameter.ndim)
    return source


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
        raise _unsupported(adapter.config, f"it does not run on tokens and positions ({error})") from None
    spans = list(zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True))
    alone = [adapter(tokens[:, a:b], positions[:, a:b], documents) for a, b in spans]
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
    adapter.train(was)


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
    size = theirs.float().abs().max().item()
    apart = (ours.float() - theirs.float()).abs().max().item()
    if not apart <= close * max(size, 1e-6):  # not >: a NaN is a difference
        raise _unsupported(config, f"{what} differ by {apart:.2e}, where the largest value is {size:.2e}")


def _unsupported(config: Any, found: str) -> NeedsError:
    return NeedsError(
        f"a model of type {config.model_type!r} through transformers",
        found,
        "choose a model of another family; llama, mistral, qwen2 and qwen3 have a decoder here",
    )


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits by logit_scale, Granite divides them by logits_scaling."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _block_list(backbone: nn.Module, prefix: str, config: Any) -> dict[str, str]:
    """{'0': path of the first block, ...}: the first list of modules as long as the model has layers."""
    count = config.num_hidden_layers
    for path, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {str(i): f"{prefix}.{path}.{i}" for i in range(count)}
    raise _unsupported(config, f"no list of {count} blocks in it")


def _ties(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """(alias, first name) for every parameter that is registered twice."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties.append((name, first[id(parameter)]))
        else:
            first[id(parameter)] = name
    return tuple(ties)
