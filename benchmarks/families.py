"""Try a tiny model of every family of causal language models that transformers knows; write docs/models.md.

    python benchmarks/families.py [FAMILY ...]

Each model has random weights and is loaded as a run loads one: our own decoder, or transformers' model after it was
compared with itself (packed documents and each alone, a changed document, our head and its own). Families whose
configuration cannot be made small are listed as not tried. Families in the arguments: only those are tried again.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections import Counter
from itertools import starmap
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from optrush.errors import UserError
from optrush.models.decoder import Decoder
from optrush.models.families import FAMILIES, FamilySpec
from optrush.models.hf import _tagged_float, load
from optrush.models.published import SHAPES
from optrush.models.shapes import HF, native_obstacle, refuse_foreign
from optrush.models.source import _published
from optrush.models.text_part import OTHER_MEDIA, is_multimodal
from optrush.models.trace import trace_model

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "benchmarks/results/families.json", ROOT / "docs/models.md"
MOST = 100_000_000  # parameters of a tiny model
PATIENCE = 60  # seconds of a trace
LAYERS, WIDTH, HEADS = 2, 32, 4
SMALL = {
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "global_head_dim": 8,
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "intermediate_size": 48, "ffn_dim": 48,
    "n_inner": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_hidden_layers": LAYERS, "n_layer": LAYERS,
    "num_layers": LAYERS, "n_layers": LAYERS, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "n_positions": 128, "word_embed_proj_dim": WIDTH, "rotary_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {  # heads of latent attention
    "head_dim": 8, "num_key_value_heads": HEADS, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16,
}  # fmt: skip
NEEDED = {  # by family: what its class has no value for, or a large one
    "deepseek_v2": {"num_experts_per_tok": 2}, "qwen3_next": {"num_experts": 16, "linear_num_value_heads": 16},
    "qwen3_5_moe_text": {"num_experts": 16}, "hunyuan_v1_moe": {"head_dim": 8}, "doge": {"num_experts": 16},
    "zaya": {"num_experts_per_tok": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **{kind: {"layer_types": ["conv", "full_attention"]} for kind in ("lfm2", "lfm3")},
    **{kind: {"head_dim": 8, "num_key_value_heads": 2} for kind in ("hunyuan_v1_dense", "ministral", "nemotron")},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{kind: {"mamba_n_heads": 8, "mamba_d_head": 8} for kind in ("bamba", "granitemoehybrid")},
    "mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 1},
    "zamba": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1,
    },
}  # fmt: skip
TOWER = {  # of images, whatever a family calls the sizes
    **SMALL, "depth": 1, "num_hidden_layers": 1, "intermediate_size": 64, "image_size": 28, "patch_size": 14,
    "out_hidden_size": WIDTH, "projection_dim": WIDTH, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
    "projector_input_dim": WIDTH, "projector_output_dim": WIDTH, "vision_output_dim": WIDTH, "num_heads": HEADS,
    "embed_dim": WIDTH,
}  # fmt: skip
# Of as many layers as a family has.
BY_LAYER = ("layer_types", "mlp_layer_types", "per_layer_config", "moe_layers", "no_rope_layers")
TEXT = """\
# Models

Every family (`model_type` in config.json) of causal language models and of image-text models in transformers 5. Each
was tried with a tiny model with random weights (`benchmarks/families.py` writes this page). Here image-text models
train their language model on rows without images; see also [rows with images](data.md#images).

- native: runs in our own decoder.
- transformers: runs in transformers' own model. Packed documents gave the same results as single ones, and our output
  head the same as the model's. "rows of one document": the model mixes packed documents, so it trains without `packing`
  and not on preference pairs.
- refused: rejected before any file is written, for the reason in the table.
- not tried: the script cannot make a small model of it. A run checks the model before it trains.

{numbers}.

{causal} of the {refused} refused families are [causal language models of text](#refused-causal-language-models).
The other {others} are {kinds}.

`optrush plan` supports {planned} of the {all} families. The column "plan" gives the source of its sizes:

- native: the formulas of our own decoder.
- traced: one block of each kind is run once on the meta device; the result is cached.
- slow: traced too, but its layers run token by token, and the first plan takes minutes.
- none: `plan` gives the reason. A refused family can have a plan: it is rejected only when the model is checked.

"images": "kept" means that an export has the image tensors unchanged, in the base model's layout.
"GGUF": the architecture that `optrush export --to gguf` writes.

## Families of our own decoder

| family | class in transformers | attention | experts | GGUF |
|---|---|---|---|---|
{native}

## Refused causal language models

| family | reason |
|---|---|
{list}

## All families

| family | how | plan | images | GGUF | reason |
|---|---|---|---|---|---|
{rows}

## Named shapes

`model.shape: NAME` uses the sizes of these models, with random weights. `model.path` and `optrush plan` accept the hub
ids among them without a network:

{shapes}
"""
CAUSAL, ENCODER, SEQUENCES, MEDIA = "causal", "encoders", "encoder-decoders", "models of images, video or sound"
DECODERS = {"bert-generation": SEQUENCES, "trocr": SEQUENCES}  # of pairs whose encoder is another model


def small(kind: str) -> dict[str, Any]:
    """Return the config.json of a family with small sizes, of the keys that its class has."""
    known = CONFIG_MAPPING[kind]()
    if getattr(known, "text_config", None) is not None and getattr(known, "vision_config", 0) is None:
        known = CONFIG_MAPPING[kind](vision_config={})  # which it leaves out by default
    whole = json.loads(known.to_json_string(use_diff=False), object_hook=_tagged_float)
    if is_multimodal(whole):
        return _small_parts(known, whole)
    sizes = SMALL | LATENT if hasattr(known, "qk_rope_head_dim") else SMALL
    given = {key: value for key, value in sizes.items() if whole.get(key) is not None}
    made = type(known)(**given | NEEDED.get(kind, {}))
    return json.loads(made.to_json_string(use_diff=False), object_hook=_tagged_float)


def _small_parts(known: Any, whole: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model of images and text, its language model and its towers small."""
    for name, part in [(key, part) for key, part in whole.items() if isinstance(part, dict) and "model_type" in part]:
        sizes = SMALL | NEEDED.get(part["model_type"], {}) if name == "text_config" else TOWER
        if "qk_rope_head_dim" in part:
            sizes = sizes | LATENT
        whole[name] = {key: sizes.get(key, value) if value is not None else None for key, value in part.items()}
        for key in BY_LAYER:
            if key not in sizes and isinstance(whole[name].get(key), (list, dict)):
                del whole[name][key]
        if "mrope_section" in (rope := whole[name].get("rope_parameters") or {}):
            rope["mrope_section"] = [1, 1, 2]
    made = type(known)(**{key: value for key, value in whole.items() if key not in ("model_type", "architectures")})
    return json.loads(made.to_json_string(use_diff=False), object_hook=_tagged_float)


def tried(kind: str) -> tuple[str, str]:
    """Return how a family is trained (native, transformers, refused, not tried, crashes), and why it is not."""
    try:
        hf = small(kind)
        refuse_foreign(hf)
        with torch.device("meta"):
            auto = AutoModelForImageTextToText if is_multimodal(hf) else AutoModelForCausalLM
            empty = auto.from_config(CONFIG_MAPPING[kind].from_dict(dict(hf)))
        if (size := sum(p.numel() for p in empty.parameters())) > MOST:
            return "not tried", f"{size:,} parameters at least"
    except UserError as error:
        return "refused", error.found
    except Exception as error:  # of the families' own checks of sizes
        return "not tried", f"no small configuration: {type(error).__name__}"
    try:
        model, _ = load(None, hf, None, torch.float32, 0)
    except UserError as error:
        found = " ".join(error.found.split())[:160]
        return "refused", re.sub(r" differ by .*", " differ", found)  # the figures are this machine's
    except Exception as error:
        return "crashes", f"{type(error).__name__}: {error}"[:200]
    if isinstance(model, Decoder):
        return "native", ""
    return "transformers", "" if model.supports_packing else "rows of one document"


def default(kind: str) -> HF:
    """Return the config.json of a family with the sizes of its class."""
    return json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False), object_hook=_tagged_float)


def planned(kind: str) -> str:
    """Return where a plan of a family has its sizes from: native, traced, slow or none.

    Traced in a process of its own, which is ended after a minute: layers that run token by token take longer.
    """
    forked = multiprocessing.get_context("fork")
    queue = forked.SimpleQueue()
    process = forked.Process(target=_plan, args=(kind, queue))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        return "slow"
    return "none" if queue.empty() else queue.get()


def _plan(kind: str, queue: Any) -> None:
    """Put "native" or "traced" into the queue: by the small model of a family, else by the sizes of its class."""
    for make in (small, default):
        try:
            refuse_foreign(hf := make(kind))
            if (own := native_obstacle(hf) is None) or trace_model(hf):
                return queue.put("native" if own else "traced")
        except Exception:  # whatever such a class raises: the record is then "none", and `plan` gives the reason
            continue


def kind_of(kind: str) -> str:
    """Return what a family is: a causal language model of text, or one of the other kinds."""
    try:
        hf = default(kind)
    except Exception:
        return MEDIA if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else CAUSAL
    if hf.get("is_encoder_decoder") or kind in DECODERS:
        return SEQUENCES
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or any(hf.get(key) not in (None, {}) for key in OTHER_MEDIA):
        return MEDIA
    return ENCODER if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES else CAUSAL


def page(found: dict[str, list[str]]) -> str:
    """Return docs/models.md."""
    hows = Counter(how for how, *_ in found.values())
    numbers = ", ".join(f"{hows[how]} {how}" for how in ("native", "transformers", "refused", "not tried"))
    refused = {kind: (each[1], each[3]) for kind, each in sorted(found.items()) if each[0] == "refused"}
    of = Counter(what for _, what in refused.values())
    causal = [f"| {kind} | {why.replace('|', '/')} |" for kind, (why, what) in refused.items() if what == CAUSAL]
    return TEXT.format(
        numbers=numbers, refused=hows["refused"], causal=of[CAUSAL], others=hows["refused"] - of[CAUSAL],
        kinds=", ".join(f"{of[what]} {what}" for what in (ENCODER, SEQUENCES, MEDIA)),
        planned=sum(each[2] != "none" for each in found.values()), all=len(found), list="\n".join(causal),
        native="\n".join(starmap(native_row, FAMILIES.items())), rows="\n".join(starmap(row, sorted(found.items()))),
        shapes=fill(", ".join(f"`{name}`" for name in {**SHAPES, **_published()}), 118, break_long_words=False,
                    break_on_hyphens=False) + ".",
    )  # fmt: skip


def row(kind: str, each: list[str]) -> str:
    """Return the row of a family in the table of all."""
    how, why, plan, what = each
    images = "kept" if what == MEDIA and how in ("native", "transformers") else ""
    gguf = FAMILIES[kind].gguf.lower() if kind in FAMILIES else ""
    return f"| {kind} | {how} | {plan} | {images} | {gguf} | {why.replace('|', '/')} |"


def native_row(name: str, spec: FamilySpec) -> str:
    """Return the row of a family of our own decoder."""
    kinds = {"latent": spec.latent, "delta rule in some layers": spec.delta, "chunks in some layers": spec.chunks}
    kinds |= {"sliding window": spec.window != "none", "sinks": spec.sinks, "capped scores": spec.score_cap}
    kinds |= {"two head sizes": spec.by_layer}
    attention = ", ".join(kind for kind, has in kinds.items() if has) or "full"
    experts = "" if spec.experts is None else f"{spec.experts.router} router"
    return f"| {name} | {spec.architecture} | {attention} | {experts} | {spec.gguf.lower()} |"


def main(names: list[str]) -> None:
    logging.set_verbosity_error()
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    found: dict[str, list[str]] = json.loads(RECORD.read_text("utf-8")) if names else {}
    for kind in names or every:
        found[kind] = [*tried(kind), planned(kind), kind_of(kind)]
        print(kind, *found[kind], flush=True)
    RECORD.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", "utf-8")
    PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
