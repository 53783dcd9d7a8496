"""Try a tiny model of every family of causal language models that transformers knows; write docs/models.md.

    python benchmarks/families.py [FAMILY ...]

Each model has random weights and is loaded as a run loads one: our own decoder, or transformers' model after it was
compared with itself (packed documents and each alone, a changed document, our head and its own). Families whose
configuration cannot be made small are listed as not tried. Some families in the arguments: only those are printed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from optrush.errors import UserError
from optrush.models.decoder import Decoder
from optrush.models.hf import load
from optrush.models.shapes import refuse_foreign

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "benchmarks/results/families.json", ROOT / "docs/models.md"
MOST = 20_000_000  # parameters of a tiny model
LAYERS, WIDTH, HEADS = 2, 32, 4
SMALL = {
    "vocab_size": 96, "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "intermediate_size": 48, "ffn_dim": 48,
    "n_inner": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_hidden_layers": LAYERS, "n_layer": LAYERS,
    "num_layers": LAYERS, "n_layers": LAYERS, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "n_positions": 128, "word_embed_proj_dim": WIDTH, "rotary_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {  # heads of latent attention
    "head_dim": 8, "num_key_value_heads": HEADS, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16,
}  # fmt: skip
TEXT = """\
# Models

Of each family (`model_type` of config.json) of causal language models that transformers 5 knows, a tiny model with
random weights was loaded as a run loads one (`benchmarks/families.py` writes this page).

- native: in our own decoder.
- transformers: through transformers' own model, after packed documents were compared with each alone, one document was
  changed, and our head was compared with its own.
- refused: before anything is written, with the reason in the table.
- not tried: the script makes no small model of it. A run compares the model before it trains.

{numbers}.

| family | how | reason |
|---|---|---|
{rows}
"""


def small(kind: str) -> dict[str, Any]:
    """Return the config.json of a family with small sizes, of the keys that its class has."""
    known = CONFIG_MAPPING[kind]()
    sizes = SMALL | LATENT if hasattr(known, "qk_rope_head_dim") else SMALL
    made = type(known)(**{key: value for key, value in sizes.items() if getattr(known, key, None) is not None})
    return json.loads(made.to_json_string(use_diff=False))


def tried(kind: str) -> tuple[str, str]:
    """Return how a family is trained (native, transformers, refused, not tried, crashes), and why it is not."""
    try:
        hf = small(kind)
        refuse_foreign(hf)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(dict(hf)))
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
    return ("native" if isinstance(model, Decoder) else "transformers"), ""


def page(found: dict[str, list[str]]) -> str:
    """Return docs/models.md."""
    kinds = [how for how, _ in found.values()]
    rows = (f"| {kind} | {how} | {why.replace('|', '/')} |" for kind, (how, why) in sorted(found.items()))
    numbers = ", ".join(f"{kinds.count(how)} {how}" for how in ("native", "transformers", "refused", "not tried"))
    return TEXT.format(numbers=numbers, rows="\n".join(rows))


def main(names: list[str]) -> None:
    logging.set_verbosity_error()
    found: dict[str, list[str]] = {}
    for kind in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found[kind] = list(tried(kind))
        print(kind, *found[kind], flush=True)
    if not names:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
