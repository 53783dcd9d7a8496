"""A folder as transformers alone loads it: what others will get. For talking to a model, and to verify an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from optrush.errors import NeedsError
from optrush.model.weights import Folder

KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def load_plain(folder: Path, dtype: torch.dtype | None, device: torch.device) -> Any:
    """transformers' model of a folder, in eval mode.

    Args:
        dtype: None: as stored.

    Raises:
        NeedsError: transformers does not know it, its weights are pickles, or they do not fit its config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    Folder(folder)  # refuses pickles, and an index that leaves the folder
    asked = f"the model {folder}"
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Whatever attention config.json names, which may be code on the hub. It goes before the argument alone.
        config._attn_implementation = "sdpa"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype or "auto", local_files_only=True, use_safetensors=True,
            trust_remote_code=False, attn_implementation="sdpa", output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError, KeyError, ImportError) as error:
        found = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise NeedsError(asked, found, "name a folder that transformers loads") from None
    finally:
        if shows:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model, info = loaded
    for kind in KINDS:
        if wrong := sorted(map(str, info.get(kind) or ())):
            raise NeedsError(asked, f"{kind.replace('_', ' ')}: {wrong[0]}", "check that config.json fits the weights")
    return model.to(device).eval()
