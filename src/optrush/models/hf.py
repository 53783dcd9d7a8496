"""Load a model and its weights: our own decoder, or any causal language model of transformers behind its interface.

The published modules compute, unchanged; our part is the interface around them: hidden states instead of logits, a
callable head, a `block_call` slot around every block, weights that can be sharded. transformers separates packed
documents by their restarting positions, but only without an attention mask and a cache, and only in models that pass
positions to its mask builder. So `load_hf` first runs every model on the CPU and compares (`probe_model`): a model with
an unknown head is rejected, with the difference in the error; one that mixes documents of a row gets rows of one
document only.

Canonical names are transformers' names, except the head's: `head.weight`, `head.bias`.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from optrush.console import transformers_silenced
from optrush.data.batch import Documents
from optrush.errors import NeedsError, UserError, reason
from optrush.models import weights
from optrush.models.config_json import EXPERTS, read_config_json
from optrush.models.decoder import Decoder, Head, Linear, call, redo_ties
from optrush.models.delta_rule import causal_convolution
from optrush.models.experts import TheirExperts, take_experts
from optrush.models.families import FAMILIES
from optrush.models.multimodal import OtherTensors, TextFolder
from optrush.models.rope_angles import document_lengths
from optrush.models.shapes import HF, ModelShape, native_obstacle, refuse_balance, refuse_foreign, sdpa_obstacle
from optrush.models.stored_quantized import opened_weights, refuse_quantised
from optrush.models.text_part import as_text, is_multimodal, prefixes, with_vocabulary
from optrush.models.weights import Folder, Memory, WeightEntry, WeightMap, WeightSource

if TYPE_CHECKING:
    from optrush.models.source import Growth


PROBE_LENGTHS = (7, 1, 5, 11)  # lengths of the documents in the probe's packed row
POSITION_PLANES = 4  # for tokens with three positions: the text's, which separates documents, and those three
PROBE_LOGIT = 60.0  # hidden states are scaled until logits are this large, which makes a softcap visible
ATTENTIONS = {"masked": "eager", "sdpa": "sdpa"}  # our name: transformers' name
CLASSIFIER = "ForSequenceClassification"  # suffix of transformers' reward model classes
ALONE = "optrush_sdpa"  # name of `_alone` in transformers' registries
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # keys of config.json
CORRECTIONS = ("e_score_correction_bias", ".expert_bias")  # correct the choice of experts; not trained by gradients
SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")  # classes that compute the same
NUMBERED = frozenset({None, "default", "linear", "llama3", "yarn"})  # rotations independent of the row's length


@dataclass
class Kept:
    """The cached sequences that a pass continues.

    mask: (B, cached and given tokens), 0 for padding.
    cache: transformers' cache for the family; None before the first tokens, and if it has none.
    """

    mask: Tensor
    cache: Any = None


class HFModel(nn.Module):
    """A transformers model with the attributes of `models.decoder.Decoder` (documented there).

    Args:
        hf_model: ...ForCausalLM with real values on the CPU; its modules are reused, but not its class.
    """

    supports_packing = True  # `probe_model` sets False if documents of a row mix
    frozen_flops = 0  # see `Decoder`
    kept: Kept | None = None  # set while sequences are continued token by token

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        config = hf_model.config.get_text_config() if is_multimodal(hf_model.config.to_dict()) else hf_model.config
        self.config = config
        self.prefix, backbone = _backbone(hf_model)
        output = hf_model.get_output_embeddings()
        if not isinstance(backbone, nn.Module) or not isinstance(output, nn.Linear):
            raise unsupported(config, "no separate backbone and linear output layer")
        owner: nn.Module = self  # the backbone's path is kept: canonical names are transformers'
        *outer, last = self.prefix.split(".")
        for name in outer:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, backbone)
        self.head = Head(output.weight, output.bias)
        self.head.scale = _logit_scale(config)
        self.head.softcap = next((cap for key in SOFTCAPS if (cap := getattr(config, key, None)) is not None), None)
        self.block_call: Callable[..., Any] = call
        self.maskless = False  # set by `probe_model`: sdpa needs no mask for rows of one document
        self._attention_flags: dict[str, Any] = {}  # arguments of the attention function for such rows
        self._numbered = _numbered(config)
        recurrent = "cache_params" in inspect.signature(backbone.forward).parameters
        self._cache_name = "cache_params" if recurrent else "past_key_values"
        rope = getattr(config, "rope_parameters", None) or {}
        self._planes = POSITION_PLANES if "mrope_section" in rope else 0
        self._blocks = _block_list(backbone, self.prefix, config)  # number -> path
        take_experts(backbone)
        for name, p in backbone.named_parameters():  # loading from files makes them trainable
            if name.endswith(CORRECTIONS):
                p.requires_grad_(False)
                path, _, last = name.rpartition(".")
                router: Any = backbone.get_submodule(path)
                router.uncast = (last,)
        for block in self.blocks.values():
            self._own_linears(block)
            self._reroute(block)
        convolutions = [m for m in backbone.modules() if type(m).__name__ in SHORT_CONVOLUTIONS]
        for module in convolutions:
            _convolve_by_document(module)
        self._convolves = bool(convolutions)
        for module in list(backbone.modules()):
            if "longrope" in _rope_kinds(getattr(module, "config", None)) and hasattr(module, "original_inv_freq"):
                _rotate_by_document(module)
        # Counted before a technique quantizes them or adds adapters.
        matrices = (p for block in self.blocks.values() for p in block.parameters() if p.ndim > 1)
        self._block_matrices = sum(p.numel() for p in matrices)
        self._query_width = sum(_query_widths(config, list(self.blocks.values())))
        self._mixtures = [m for m in backbone.modules() if isinstance(m, TheirExperts)]
        self.ties = _ties(self)
        self.tied = bool(self.ties)
        self.elsewhere: dict[str, Linear] = {}
        self._buffers_on_host: dict[tuple[str, str], Tensor] = {}

    def _own_linears(self, block: nn.Module) -> None:
        """Replace each nn.Linear of a block by our `Linear`, which has slots; keep other classes, like GPT-2's."""
        for name, module in list(block.named_modules()):
            if type(module) is nn.Linear:
                owner, _, role = name.rpartition(".")
                setattr(block.get_submodule(owner), role, Linear.of(module, role))

    def _reroute(self, layer: nn.Module) -> None:
        """Route calls of a block's forward through the slot, on this instance only."""
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.block_call(original, *args, **kwargs)

        layer.forward = forward

    @property
    def _trunk(self) -> Any:
        """The backbone; its name depends on the family."""
        return self.get_submodule(self.prefix)

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
        """The norm after the last block, if the backbone has one next to its blocks."""
        parent = self.get_submodule(self._blocks["0"].rpartition(".")[0].rpartition(".")[0])
        norms = [m for m in parent.children() if "norm" in type(m).__name__.lower()]
        return norms[-1] if norms else None

    def forward(self, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
        """Return the hidden states after the last norm (B, T, D) of tokens and positions (B, T).

        transformers separates packed documents where `positions` restart. Rows of one document need no positions and no
        mask: transformers then numbers the padding, too, but no document attends to it.
        """
        if self.kept is not None:
            return self._resumed(tokens, positions, self.kept)
        alone = documents.single and tokens.shape[1] <= self._numbered
        out = self._trunk(
            input_ids=tokens, position_ids=None if alone else self._given(positions), use_cache=False,
            attention_mask=None,
            **(self._attention_flags if documents.single else {}),
            **({"document_ids": documents.ids} if self._convolves and not documents.single else {}),
        )  # fmt: skip
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _given(self, positions: Tensor) -> Tensor:
        return positions.long().expand(self._planes, *positions.shape) if self._planes else positions.long()

    def _resumed(self, tokens: Tensor, positions: Tensor, kept: Kept) -> Tensor:
        given = None if self._cache_name == "cache_params" and kept.cache is not None else kept.mask
        out = self._trunk(
            input_ids=tokens, position_ids=self._given(positions), use_cache=True, attention_mask=given,
            **{self._cache_name: kept.cache},
        )  # fmt: skip
        kept.cache = getattr(out, self._cache_name, None)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield every linear of the blocks by canonical name (except other linear classes, like GPT-2's)."""
        for path in self._blocks.values():
            for name, module in self.get_submodule(path).named_modules(prefix=path):
                if isinstance(module, Linear):
                    yield name, module

    def set_attention(self, name: str) -> int:
        """Select transformers' 'masked' or 'sdpa' attention; return the number of blocks changed.

        Raises:
            NeedsError: another name, or sdpa with capped scores (transformers' sdpa ignores the cap).
        """
        if name not in ATTENTIONS:
            do = "use one of them, or a model family of our own decoder"
            found = f"transformers' models have {', '.join(ATTENTIONS)}"
            raise NeedsError(f"attention {name!r} in a transformers model", found, do)
        obstacle = sdpa_obstacle(self.config.to_dict()) if name == "sdpa" else None
        if obstacle is not None:
            raise NeedsError(f"sdpa attention in a {self.config.model_type} model", obstacle, "use masked attention")
        self._trunk.set_attn_implementation(ATTENTIONS[name])
        self._attention_flags = {}
        if name == "sdpa" and self.maskless:
            self._leave_masks()
        return len(self._blocks)

    def _leave_masks(self) -> None:
        """Replace sdpa by `_alone`: when compiled, transformers always passes a mask to sdpa."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(ALONE, _alone)
        AttentionMaskInterface.register(ALONE, sdpa_mask)
        self._trunk.set_attn_implementation(ALONE)
        self._attention_flags = {"one_document": True}

    @property
    def matrix_parameters(self) -> int:
        """N_mm: number of weights in the blocks' matrices, the head, and the experts of one token."""
        idle = ((1 - m.active / m.count) * m.weights for m in self._mixtures)
        return self._block_matrices - round(sum(idle)) + self.head.weight.numel()

    def flops(self, tokens: int, attended: int) -> int:
        """Return training FLOPs like `ModelShape.flops`; sliding windows count as full attention."""
        attention = 6 * attended * self._query_width
        return (6 * self.matrix_parameters - self.frozen_flops) * tokens + attention

    def tie(self) -> None:
        """Restore every alias in `ties`."""
        redo_ties(self, self.ties)

    def to_meta(self) -> dict[str, Tensor]:
        """Move to the meta device; return the values by canonical name. Buffers are kept for `restore_buffers`."""
        values = {name: parameter.data for name, parameter in self.named_parameters()}
        for path, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers_on_host[path, name] = buffer
        self.to("meta")
        self.tie()
        return values

    def restore_buffers(self, device: torch.device) -> None:
        """Restore the values of all buffers (RoPE frequencies, embedding scales) on `device`."""
        for (path, name), value in self._buffers_on_host.items():
            self.get_submodule(path)._buffers[name] = value.to(device, copy=True)


def unsupported(config: Any, found: str) -> NeedsError:
    """Return the error for an unsupported model."""
    do = f"use another model family; our own decoder has {', '.join(FAMILIES)}"
    return NeedsError(f"a model of type {config.model_type!r} through transformers", found, do)


def load_hf(
    folder: Path | None, hf: HF, dtype: torch.dtype, seed: int, growth: Growth | None = None
) -> tuple[HFModel, WeightMap]:
    """Load or draw a transformers model on the CPU and probe it; return it on the meta device with its weight map.

    Args:
        growth: new tokens; `hf` already has the larger vocabulary, the folder does not.

    Raises:
        NeedsError: transformers does not support it, the weights do not fit, or the probe found a difference.
    """
    refuse_balance(as_text(hf))
    published = hf if growth is None else with_vocabulary(hf, growth.rows)
    hf_model = _opened(folder, published if folder else hf, dtype)
    if growth is not None and folder is not None:
        weights.enlarge(hf_model, growth)
    names = {id(p): name for name, p in hf_model.named_parameters()}
    wrapper = HFModel(hf_model)
    entries: dict[str, WeightEntry] = {}
    for name, parameter in wrapper.named_parameters():
        if parameter.ndim == 0:
            raise unsupported(wrapper.config, f"a parameter without dimensions ({name})")
        entries[name] = WeightEntry(tuple(parameter.shape), ((names[id(parameter)], parameter.shape[0]),))
    drawn = _draw(wrapper, entries, hf, seed, growth) if folder is None else None
    probe_model(wrapper, hf_model, dtype)
    persistent = hf_model.state_dict().keys() - dict(hf_model.named_parameters(remove_duplicate=False)).keys()
    persisted = [name for name in sorted(persistent) if name.startswith(f"{wrapper.prefix}.") or not is_multimodal(hf)]
    buffers: Mapping[str, Tensor] = {name: hf_model.state_dict()[name].clone() for name in persisted}
    stored = {} if folder is None else stored_names(folder, hf_model, buffers)
    if folder is not None and is_multimodal(hf):
        buffers = ChainMap({**buffers}, OtherTensors(folder, TextFolder(folder).others))  # type: ignore[arg-type]  # which is only read
    values = {entries[name].pieces[0][0]: value for name, value in wrapper.to_meta().items()}
    recipe = WeightMap(
        entries,
        drawn or Memory(values),
        buffers,
        stored_names=stored,
        architecture=type(hf_model).__name__,
        growth=growth,
    )
    return wrapper, recipe


def stored_names(folder: Path, hf_model: Any, buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tensors in a folder's files, by their names in transformers' model, if different.

    transformers renames tensors while loading (GPT-NeoX's head), and adds or removes the backbone's prefix. Tensors
    that it builds from several stored ones keep its names, which it also reads.
    """
    from transformers.core_model_loading import revert_weight_conversion

    files, prefix = Folder(folder).files, f"{hf_model.base_model_prefix}."
    values = {**dict(hf_model.named_parameters()), **buffers}
    names = {id(value): name for name, value in values.items()}
    reverted = {names[id(t)]: name for name, t in revert_weight_conversion(hf_model, values).items() if id(t) in names}
    names_in_files: dict[str, str] = {}
    for name in values:
        old = reverted.get(name, name)
        forms = (form for n in (old, name) for form in (n, n.removeprefix(prefix), prefix + n))
        stored = next((form for form in forms if form in files), name)
        if stored != name:
            names_in_files[name] = stored
    return names_in_files


def opened_on_meta(hf: HF) -> Any:
    """Return transformers' model of a config.json on the meta device."""
    with torch.device("meta"):
        return _opened(None, hf, torch.float32)


def _opened(folder: Path | None, hf: HF, dtype: torch.dtype) -> Any:
    """Return transformers' model of a folder, or with undrawn matrices, on the CPU in eval mode."""
    from transformers import CONFIG_MAPPING

    kind = str(hf.get("model_type"))
    if kind not in CONFIG_MAPPING:
        found = "transformers cannot load it without running code from the model's folder"
        do = "choose a model that transformers supports, or update transformers"
        raise NeedsError(f"a model of type {kind!r}", found, do)
    auto = _auto_class(hf)
    try:  # the families' checks raise many classes, even KeyError and AttributeError
        # A deep copy: transformers adds its own keys to its argument.
        given = json.loads(json.dumps(dict(hf)), object_hook=_tagged_float)
        with transformers_silenced():
            config = CONFIG_MAPPING[kind].from_dict(given)
        if folder is not None:
            return _pretrained(folder, config, dtype, "eager", auto)
        with _Undrawn():
            return auto.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    except (UserError, MemoryError):
        raise
    except Exception as error:
        place = "config.json" if folder is None else folder / "config.json"
        do = "fix that in config.json, or use another model family"
        found = _reason(error)
        if isinstance(error, KeyError):  # from one of transformers' tables: activations, RoPE types ...
            named = [key for key, value in hf.items() if isinstance(value, str) and value in error.args]
            found = f"{named[0]} {error}, which transformers does not have" if named else found
        raise NeedsError(f"a model of type {kind!r} through transformers ({place})", found, do) from None


def _tagged_float(mapping: dict[str, Any]) -> Any:
    """Return the number that transformers 5 writes as {"__float__": "Infinity"}; other mappings unchanged."""
    given = mapping.get("__float__")
    return float(given) if mapping.keys() == {"__float__"} and given in ("Infinity", "-Infinity", "NaN") else mapping


def _reason(error: Exception) -> str:
    if "ignore_mismatched_sizes" in str(error):
        return "tensor shapes differ from config.json"
    return reason(error)


class _Undrawn(TorchFunctionMode):
    """Skip drawing matrices, most of a model's building time: `_draw` replaces them. Writes NaN at both ends."""

    draws = frozenset({"normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"})  # of Tensor or of torch.nn.init

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in self.draws:
            matrix: Tensor = args[0] if args else kwargs["tensor"]
            if isinstance(matrix, nn.Parameter) and matrix.ndim > 1 and matrix.is_contiguous():
                matrix.detach().view(-1)[:: max(matrix.numel() - 1, 1)] = float("nan")
                return matrix
        return function(*args, **kwargs)


def _backbone(hf_model: Any) -> tuple[str, Any]:
    """Return the path and module of a model's decoder, or of its language model if it is an image-text model."""
    prefix: str = hf_model.base_model_prefix
    if not is_multimodal(hf_model.config.to_dict()):
        backbone = getattr(hf_model, prefix, None)
        inner = getattr(backbone, "decoder", None)  # OPT's head reads the decoder, not the module around it
        alone = backbone is not None and [*backbone.children()] == [inner]
        return (f"{prefix}.decoder", inner) if alone else (prefix, backbone)
    path = f"{prefix}.language_model"
    inner_model = next((module for name, module in hf_model.named_modules() if name == path), None)
    if inner_model is None:
        raise unsupported(hf_model.config, f"no module {path}, where others with images have their language model")
    return path, inner_model


def _auto_class(hf: HF) -> Any:
    """Return transformers' auto class for a config.json."""
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if not is_multimodal(hf):
        return AutoModelForCausalLM
    if CONFIG_MAPPING[str(hf["model_type"])] not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = "transformers has no image-text class for it"
        raise NeedsError(f"a model of type {hf['model_type']!r}", found, "use another model")
    return AutoModelForImageTextToText


def _pretrained(folder: Path, config: Any, dtype: torch.dtype | str, attention: str, auto: Any) -> Any:
    """Return transformers' model of a folder in eval mode; raise NeedsError if its weights do not fit config.json."""
    weights.refuse_more_layers(Folder(folder), config.to_dict())  # rejects pickles, and an index to other folders
    with transformers_silenced():
        loaded: Any = auto.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(kind) or ()))
        if wrong := [n for n in names if kind != "unexpected_keys" or not _predicts_further(model, n)]:
            found, do = f"{kind.replace('_', ' ')}: {wrong[0]}", "check that config.json fits the weights"
            raise NeedsError(f"the weights in {folder}", found, do)
    return model.eval()


def _predicts_further(model: Any, name: str) -> bool:
    """Return whether a tensor belongs to multi-token prediction layers after the last layer.

    transformers' classes list the numbers of these layers in the published models, which have one depth each.
    """
    config = model.config.get_text_config()
    named = any("mtp" in each or "layers" in each for each in model._keys_to_ignore_on_load_unexpected or ())
    counted = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    match = re.search(r"(?:^|\.)(?:mtp\w*|layers\.(\d+))\.", name) if named or counted else None
    return match is not None and (match[1] is None or int(match[1]) >= config.num_hidden_layers)


def _draw(wrapper: HFModel, entries: dict[str, WeightEntry], hf: HF, seed: int, growth: Growth | None) -> WeightSource:
    """Replace the values of a new model by the random initialization that all model classes share.

    Parameters that transformers initializes to a constant (norms to 1, or 0 if a family adds 1; biases) stay constant.
    """
    constants: dict[str, float] = {}
    for name, parameter in wrapper.named_parameters():
        low, high = parameter.data.aminmax()
        if low == high or parameter.ndim < 2:
            constants[entries[name].pieces[0][0]] = float(low)
    source = weights.widened(weights.random_init(hf, seed, constants), wrapper, entries, growth)
    recipe = WeightMap(entries, source)
    for name, parameter in wrapper.named_parameters():
        recipe.fill(name, parameter.data, (0,) * parameter.ndim)
    return source


def _alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    one_document: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run transformers' sdpa; for rows of one document causally and without a mask, unless the block has a window."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if one_document and kwargs.get("sliding_window") is None:
        attention_mask = None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _query_widths(config: Any, blocks: list[nn.Module]) -> list[int]:
    """Return heads times head width of each block: 0 for a block without attention in a family with it."""
    layers = getattr(config, "per_layer_config", None) or [config] * len(blocks)
    modules = [[m for m in b.modules() if "attention" in type(m).__name__.lower()] for b in blocks]
    widths: list[Any] = [next((m.head_dim for m in modules_of if hasattr(m, "head_dim")), 0) for modules_of in modules]
    widths_by_block = []
    for i, layer in enumerate(layers):
        heads = getattr(layer, "num_attention_heads", 0)  # 0 in a family without attention
        heads = heads[i] if isinstance(heads, list | tuple) else heads
        width = widths[i] if any(widths) else getattr(layer, "head_dim", None) or layer.hidden_size // max(1, heads)
        widths_by_block.append(int(heads * width))
    return widths_by_block


def _numbered(config: Any) -> int:
    """Return the longest row whose positions may be numbered beyond the end of its document."""
    return (getattr(config, "max_position_embeddings", None) or 0) if _rope_kinds(config) <= NUMBERED else 0


def _rope_kinds(config: Any) -> set[str | None]:
    """Return a model's RoPE types; some families have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {kind.get("rope_type") for kind in (rope, *rope.values()) if isinstance(kind, dict)}


def _rotate_by_document(rotary: Any) -> None:
    """Make a longrope module select its short or long factors by each document's length, on this instance only.

    transformers selects one of them per batch, by its longest document. Here both are computed: positions clamped to
    the last short one select the short factors, one more position beyond it selects the long ones.
    """
    original = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        given, more = rotary.config.rope_parameters, () if layer_type is None else (layer_type,)
        given = given if layer_type is None else given[layer_type]
        if given["rope_type"] != "longrope":
            return original(x, position_ids, *more)
        most = given["original_max_position_embeddings"]
        short = original(x, position_ids.clamp(max=most - 1), *more)
        beyond = torch.cat([position_ids, torch.full_like(position_ids[:, :1], most)], 1)
        long = [part[:, :-1] for part in original(x, beyond, *more)]
        chosen = (document_lengths(position_ids) > most)[..., None]
        return tuple(torch.where(chosen, b, a) for a, b in zip(short, long, strict=True))

    rotary.forward = forward


def _convolve_by_document(module: Any) -> None:
    """Keep the short convolution of LFM2's blocks within each document; without `document_ids`, a row is one."""
    published = module.forward

    def forward(hidden_states: Tensor, document_ids: Tensor | None = None, **more: Any) -> Any:
        if more.get("past_key_values") is not None:
            return published(hidden_states, **more)
        b, c, x = module.in_proj(hidden_states).chunk(3, -1)
        ids = x.new_zeros(x.shape[:2], dtype=torch.int32) if document_ids is None else document_ids
        y = causal_convolution(b * x, module.conv.weight, ids)
        out: Tensor = module.out_proj(c * (y if module.conv.bias is None else y + module.conv.bias))
        return out

    module.forward = forward


def _logit_scale(config: Any) -> float:
    """Return the factor of the logits: Cohere multiplies by logit_scale, Granite and Inkling divide by theirs."""
    keys = ("logits_scaling", "logits_mup_width_multiplier")
    below = math.prod(float(getattr(config, key, None) or 1.0) for key in keys)
    return float(getattr(config, "logit_scale", None) or 1.0) / below


def _block_list(backbone: nn.Module, prefix: str, config: Any) -> dict[str, str]:
    """Return the paths of the blocks by number: the first module list with as many entries as the model has layers."""
    count = config.num_hidden_layers
    for path, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {str(i): f"{prefix}.{path}.{i}" for i in range(count)}
    raise unsupported(config, f"no list of {count} blocks in it")


def _ties(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return (alias, first name) for every parameter that is registered twice."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = ((name, first[id(p)]) for name, p in module.named_parameters(remove_duplicate=False))
    return tuple((alias, name) for alias, name in names if alias != name)


# --- the probe: a comparison on the CPU before training


@torch.no_grad()
def probe_model(wrapper: HFModel, hf_model: Any, dtype: torch.dtype) -> None:
    """Compare on the CPU a packed row with its documents alone, and our head with the model's logits; raise NeedsError.

    Packed and single documents agree only up to rounding, which in bfloat16 could hide a small leak. So the first
    document is also changed, which must not change any bit of the others, except with `_loops`. A model that fails this
    gets rows of one document, provided that tokens after a document do not change it. sdpa without a mask is compared
    with masked attention, and only sets `maskless`.
    """
    training, close = wrapper.training, 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    wrapper.eval()
    tokens, positions, documents = _probe_row(wrapper)
    try:
        hidden = wrapper(tokens, positions, documents)
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:
        if "alloc" in str(error):  # out of memory
            raise
        raise unsupported(wrapper.config, f"it does not run on tokens and positions ({error})") from None
    spans = list(zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True))
    single = documents._replace(single=True)
    alone = [wrapper(tokens[:, a:b], positions[:, a:b], single) for a, b in spans]
    changed, first = tokens.clone(), spans[0][1]
    changed[:, :first] = (changed[:, :first] + 1) % wrapper.head.weight.shape[0]
    others = wrapper(changed, positions, documents)[:, first:]
    unmixed = _apart(hidden, torch.cat(alone, 1)) <= close  # False for a NaN, too
    wrapper.supports_packing = unmixed and _apart(others, hidden[:, first:]) <= (close if _loops(wrapper) else 0.0)
    if not wrapper.supports_packing:
        row = wrapper(tokens, torch.arange(tokens.shape[1])[None], single)
        _compare(wrapper.config, "a document alone and before other tokens", row[:, :first], alone[0], close)
    largest = F.linear(hidden, wrapper.head.weight).float().abs().max().clamp_min(1e-6).item()
    # With 0 only a bias remains, 1 is the model itself, and a softcap shows only in large logits.
    for factor in (0.0, 1.0, PROBE_LOGIT / largest):
        ours, theirs = _both_logits(wrapper, hf_model, tokens[:, spans[-1][0] :], factor)
        _compare(wrapper.config, f"our head's logits and its own (hidden states x {factor:.3g})", ours, theirs, close)
    wrapper.maskless = _maskless(wrapper, tokens[:, spans[-1][0] :], single, alone[-1], close)
    wrapper.train(training)


def _loops(wrapper: HFModel) -> bool:
    """Return whether transformers' experts multiply all rows that are routed to each of them at once.

    A matmul's rounding depends on its number of rows, and so on other documents; a leak is orders of magnitude larger.
    """
    text = wrapper.config.to_dict()
    return any(text.get(key) for key in EXPERTS) and not any(isinstance(m, TheirExperts) for m in wrapper.modules())


def _maskless(wrapper: HFModel, tokens: Tensor, documents: Documents, expected: Tensor, close: float) -> bool:
    """Return whether sdpa without a mask equals masked attention on one document.

    False for chunked attention, whose chunks could be longer than the probe's document.
    """
    if not set(getattr(wrapper.config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
        return False
    try:
        wrapper.set_attention("sdpa")
        wrapper._leave_masks()
        hidden = wrapper(tokens, torch.arange(tokens.shape[1])[None], documents)
    except (NeedsError, TypeError, ValueError, ImportError):
        return False  # this model has no sdpa: a request for it fails later
    finally:
        wrapper.set_attention("masked")
    return _apart(hidden, expected) <= close


def _both_logits(wrapper: HFModel, hf_model: Any, tokens: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return one document's logits by our head and by the model itself, with hidden states multiplied by `factor`."""
    hidden: list[Tensor] = []

    def multiply(_module: nn.Module, _args: Any, out: Any) -> Any:
        out["last_hidden_state"] = out.last_hidden_state * factor
        hidden.append(out.last_hidden_state)
        return out

    hook = wrapper._trunk.register_forward_hook(multiply)
    try:
        theirs = hf_model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return wrapper.head.logits(hidden[0]), theirs


def _probe_row(wrapper: HFModel) -> tuple[Tensor, Tensor, Documents]:
    """Return a row of PROBE_LENGTHS documents, with tokens spread over the vocabulary."""
    T, vocab = sum(PROBE_LENGTHS), wrapper.head.weight.shape[0]
    tokens = (torch.arange(T) * 7919 + 13)[None] % vocab
    positions = torch.cat([torch.arange(n) for n in PROBE_LENGTHS])[None]
    ids = torch.repeat_interleave(torch.arange(len(PROBE_LENGTHS)), torch.tensor(PROBE_LENGTHS))[None]
    starts = torch.tensor([0, *PROBE_LENGTHS]).cumsum(0)
    return tokens, positions.int(), Documents(starts.int(), ids.int(), max(PROBE_LENGTHS), False)


def _compare(config: Any, what: str, ours: Tensor, theirs: Tensor, close: float) -> None:
    apart, size = _apart(ours, theirs), theirs.float().abs().max().item()
    if not apart <= close:  # not `>`: a NaN is a difference
        raise unsupported(config, f"{what} differ by {apart * size:.2e}, where the largest value is {size:.2e}")


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value of `theirs`."""
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6)).item()


# --- loading a model


def refuse_shared_rows(model: Decoder | HFModel, hf: HF, paired: bool) -> None:
    """Raise NeedsError if a model mixes a row's documents, but rows of several documents are requested."""
    if not model.supports_packing:
        do = "use objective: sft, or another model family" if paired else "turn packing off: --without packing"
        asked = f"rows of several documents for a model of type {hf.get('model_type')!r}"
        raise NeedsError(asked, "a document in its row changes the hidden states of the next one", do)


def load(
    folder: Path | None, hf: HF, implementation: Literal["native", "transformers"] | None, dtype: torch.dtype,
    seed: int, growth: Growth | None = None,
) -> tuple[Decoder | HFModel, WeightMap]:  # fmt: skip
    """Build a model on the meta device, and the map of its weights.

    Args:
        folder: of safetensors and config.json; None draws random weights from `seed`.
        hf: the config.json, possibly edited; the folder's is ignored.
        implementation: None uses our own decoder if it supports the model, else transformers'.
        growth: new tokens; `hf` already has the larger vocabulary, the folder does not.

    Raises:
        NeedsError: the model is not supported, or the weights do not fit it.
        ConfigError: config.json is incomplete.
    """
    refuse_foreign(hf)
    if implementation == "transformers" or (implementation is None and native_obstacle(hf) is not None):
        if folder is not None:
            refuse_quantised(folder, hf)
            weights.refuse_packed(folder)
        return load_hf(folder, hf, dtype, seed, growth)
    return _native(folder, hf, dtype, seed, growth)


def _native(
    folder: Path | None, hf: HF, dtype: torch.dtype, seed: int, growth: Growth | None
) -> tuple[Decoder, WeightMap]:
    """Build our own decoder, and the map of its weights."""
    multimodal = is_multimodal(hf)
    prefix, head = names = prefixes(hf)
    stored = None if folder is None else TextFolder(folder, names) if multimodal else opened_weights(folder, hf)
    if stored is not None:
        weights.refuse_more_layers(stored, hf)
    shape = ModelShape.read(hf)
    files = () if stored is None else (stored if isinstance(stored, Folder) else stored.everything).files
    if multimodal and stored is not None and "tie_word_embeddings" not in hf:  # each class has its own default
        shape = replace(shape, tied=f"{head}weight" not in files)
    model = Decoder(shape, device=torch.device("meta"), dtype=dtype)
    entries = weights.native_entries(model, files, names)
    if stored is None:
        drawn = weights.random_init(hf, seed, weights.native_constants(entries, model.shape.centred))
        return model, WeightMap(entries, weights.widened(drawn, model, entries, growth), growth=growth)
    needed = {name: shape for entry in entries.values() for name, shape in entry.hf_shapes()}
    if growth is not None:
        needed |= {name: (growth.rows, *needed[name][1:]) for name in weights.vocabulary_names(model, entries)}
    others = weights.leave_unread(stored, model.shape)
    others += stored.others if isinstance(stored, TextFolder) else ()
    tied = {f"{head}weight": f"{prefix}embed_tokens.weight"} if model.shape.tied else {}
    stored.check(needed, tied)
    source = weights.widened(stored, model, entries, growth)
    named = stored.stored_names if isinstance(stored, TextFolder) else {}
    kept = OtherTensors(folder, others) if folder is not None and others else {}
    return model, WeightMap(entries, source, kept, stored_names=named, growth=growth)


def load_plain(folder: Path, dtype: torch.dtype | None, device: torch.device, scores: bool = False) -> Any:
    """Load transformers' own model of a folder, in eval mode: for generation, and to verify an export.

    Args:
        dtype: None: as stored.
        scores: load a reward model instead of one that continues texts.

    Raises:
        NeedsError: it is of the other kind, transformers does not support it, its weights are pickles, or do not fit
            its config.json.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    hf = read_config_json(folder / "config.json")
    try:
        auto = AutoModelForSequenceClassification if scores else _auto_class(hf)
        with transformers_silenced():
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # config.json may name an attention whose code is on the hub, and overrides the argument.
        attention = "eager" if sdpa_obstacle(config.to_dict()) else "sdpa"
        config._attn_implementation = attention
        kind = next(iter(config.architectures or ()), "")
        if kind.endswith(CLASSIFIER) != scores:
            found = f"architecture {kind}, which scores texts and generates none" if not scores else f"a {kind}"
            raise NeedsError(f"the model {folder}", found, "name a model that objective: pretrain, sft or dpo trained")
        model = _pretrained(folder, config, dtype or "auto", attention, auto)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise NeedsError(f"the model {folder}", _reason(error), "name a folder that transformers loads") from None
    return model.to(device)
