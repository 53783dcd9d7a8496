"""Train torchtitan's own Llama 3.1 8B under FSDP on this host's GPUs, random text: what `8b amp fsdp, 2` stands beside.

usage: torchtitan_fsdp.py prepare FOLDER                   writes a tokenizer of 128,256 words and a text
       torchrun --nproc_per_node N torchtitan_fsdp.py FOLDER ROWS SEQ float32|bfloat16
                                                           prints torchtitan's own lines: memory, tokens/s of a GPU

Its blocks are compiled; every other block is computed again (its default of selective checkpointing). Needs torchtitan,
torchdata, datasets, tyro. A dozen steps; the medians of the last half are recorded in 2xh200-torchtitan.jsonl.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import tempfile
from pathlib import Path

VOCABULARY, DOCUMENTS, WORDS, STEPS = 128_256, 200, 8192, 14


def prepare(folder: Path) -> None:
    """Write what torchtitan reads: a tokenizer's folder, and documents of random words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<s>", "</s>", "<pad>")
    words = {word: i for i, word in enumerate((*special, *(f"t{i}" for i in range(len(special), VOCABULARY))))}
    engine = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unk, bos, eos, pad = special
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=engine, unk_token=unk, bos_token=bos, eos_token=eos, pad_token=pad
    ).save_pretrained(folder)
    drawn = random.Random(0)
    with (folder / "text.json").open("w") as file:
        for _ in range(DOCUMENTS):
            text = " ".join(f"t{drawn.randint(len(special), VOCABULARY - 1)}" for _ in range(WORDS))
            file.write(json.dumps({"text": text}) + "\n")


def train(folder: Path, rows: str, seq: str, dtype: str) -> None:
    """Run torchtitan's trainer in this process, one of torchrun's."""
    flags = {
        "model.name": "llama3", "model.flavor": "8B", "model.hf_assets_path": str(folder),
        "training.dataset": "c4_test", "training.dataset_path": str(folder / "text.json"),
        "training.local_batch_size": rows, "training.seq_len": seq, "training.steps": str(STEPS),
        "training.dtype": dtype, "activation_checkpoint.mode": "selective", "metrics.log_freq": "2",
        "job.dump_folder": tempfile.mkdtemp(),
    }  # fmt: skip
    sys.argv = ["train", "--compile.enable", *(part for key, value in flags.items() for part in (f"--{key}", value))]
    # Not before: torchtitan's parser keeps the arguments that are there when it is imported.
    import torchtitan.hf_datasets.text_datasets as texts
    from datasets import load_dataset

    texts.DATASETS["c4_test"].loader = lambda path: load_dataset("json", data_files=path, split="train")
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        train(Path(sys.argv[1]), *sys.argv[2:5])
