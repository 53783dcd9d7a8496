"""Writes golden.json: losses and gradient norms of 8 steps by plain transformers and torch.optim, nothing of ours.

    python tests/golden/make_golden.py

Documents go through the model one at a time, unpadded and unpacked, so nothing can leak between them; a step's loss is
the sum over its targets divided by their number; the norm is taken in float64. The model's folder and the documents
are drawn from numpy's frozen RandomState, so a test makes the very same ones again on any version of torch.

Every document has more than T/3 and at most T/2 tokens: whatever their order, a row of T holds exactly two of them, so
the 16 documents of a step are 16 rows of one or 8 rows of two. How many of a document's tokens are learnt differs much
in the `chat` case (1 to 18), so that no mean of means passes for the mean.
"""

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

T, STEPS, SEED = 48, 8, 11
PER_STEP = 16  # documents
DOCUMENTS = 64  # four steps an epoch, so that the second epoch has an order of its own
LR, WARMUP, DECAY, BETAS, EPS, CLIP = 3e-3, 0.25, 0.1, (0.9, 0.95), 1e-8, 1.0
SGD_LR, MOMENTUM = 0.05, 0.9
SIZES = {
    "model_type": "llama", "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rope_theta": 1000.0,
}  # fmt: skip
SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<end>")
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}"
    "{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Case:
    tied: bool
    chat: bool = False
    sgd: bool = False


CASES = {"untied": Case(False), "tied": Case(True), "chat": Case(False, chat=True), "sgd": Case(True, sgd=True)}


def write_model(folder: Path, tied: bool, **sizes: int) -> None:
    """A llama of two layers whose every parameter is drawn, norms too, with a tokenizer of one token a word.

    sizes: other ones than SIZES has.
    """
    logging.disable_progress_bar()
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "<unk>", *(f"w{i}" for i in range(73))])}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]), chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(**SIZES | sizes, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(p.shape))
            p.copy_(noise * 0.15 if p.dim() > 1 else 1 + noise * 0.1)
    model.save_pretrained(folder)


def write_documents(path: Path, chat: bool) -> None:
    """JSONL of 64 documents of 17 to 24 tokens: `text` with <bos> and <eos>, or `messages` of two turns."""
    draw = np.random.RandomState(5)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in draw.randint(0, 73, n))

    rows = []
    for i in range(DOCUMENTS):
        n = T // 3 + 1 + i % (T // 2 - T // 3)
        if chat:
            answer = 1 + draw.randint(0, n - 6)
            turns = [("user", words(n - 5 - answer)), ("assistant", words(answer))]
            rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        else:
            rows.append({"text": words(n - 2)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_documents(folder: Path, path: Path) -> list[tuple[Tensor, Tensor]]:
    """(ids, which of them are targets) a row, as transformers itself tokenises and masks it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        if "text" in row:
            ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
            learnt = [1] * len(ids)
        else:
            both = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            ids, learnt = both["input_ids"], both["assistant_masks"]
        found.append((torch.tensor(ids), torch.tensor([0, *learnt[1:]], dtype=torch.bool)))
        assert T // 3 < len(ids) <= T // 2
    return found


def order() -> Iterator[list[int]]:
    """The documents of each step. An epoch's order is argsort of raw PCG64 words seeded by (seed, epoch)."""
    line: list[int] = []
    for epoch in range(STEPS * PER_STEP // DOCUMENTS):
        raw = np.random.PCG64(np.random.SeedSequence([SEED, epoch])).random_raw(DOCUMENTS)
        line += np.argsort(raw, kind="stable").tolist()
    for first in range(0, len(line), PER_STEP):
        yield line[first : first + PER_STEP]


def rate(full: float, step: int) -> float:
    """Linear warm-up to the full rate, then half a cosine that would be zero at step STEPS + 1."""
    warm = math.ceil(WARMUP * STEPS)
    if step <= warm:
        return full * step / warm
    return full * 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (STEPS - warm)))


def window(model: torch.nn.Module, documents: list[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Gradients of the mean loss over all targets, documents one at a time; (that loss, number of targets)."""
    model.zero_grad()
    terms = sum(int(learnt.sum()) for _, learnt in documents)
    total = 0.0
    for ids, learnt in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        nll = cross_entropy(logits[:-1].float(), ids[1:], reduction="none")[learnt[1:]].sum()
        (nll / terms).backward()
        total += nll.item()
    return total / terms, terms


def open_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()


def golden(folder: Path, path: Path, sgd: bool) -> dict[str, list[float]]:
    """Losses, norms before clipping, rates, and numbers of targets of every step."""
    model = open_model(folder)
    documents = read_documents(folder, path)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if sgd:
        optimizer = torch.optim.SGD(params, lr=0.0, momentum=MOMENTUM)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS)
    out: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": [], "target_tokens": []}
    for step, chosen in enumerate(order(), 1):
        loss, terms = window(model, [documents[i] for i in chosen])
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
        for p in params:
            p.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = rate(SGD_LR if sgd else LR, step)
        optimizer.step()
        for key, value in zip(out, (loss, norm, optimizer.param_groups[0]["lr"], terms)):
            out[key].append(value)
    return out


def make(box: Path) -> dict[str, dict[str, list[float]]]:
    """Every case; the folders `tied`, `untied` and the files text.jsonl, chat.jsonl stay in `box`."""
    for tied in (True, False):
        write_model(box / ("tied" if tied else "untied"), tied)
    for kind in ("text", "chat"):
        write_documents(box / f"{kind}.jsonl", kind == "chat")
    return {name: golden(*places(box, case), case.sgd) for name, case in CASES.items()}


def places(box: Path, case: Case) -> tuple[Path, Path]:
    return box / ("tied" if case.tied else "untied"), box / f"{'chat' if case.chat else 'text'}.jsonl"


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        text = json.dumps(make(Path(made)), indent=1)
    (Path(__file__).parent / "golden.json").write_text(text + "\n")
