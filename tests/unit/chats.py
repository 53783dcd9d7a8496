"""Templates, tokenizers and conversations that the tests of chat masks share."""

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from optrush.data.schema import Chat, Message, RowLocation
from optrush.models import tiny

WHERE = RowLocation("chat.jsonl", 3)
CHATML = tiny.TEMPLATE
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
LLAMA2 = MISTRAL.replace("m['content'] + '</s>'", "m['content'].strip() + ' </s>'")
ZEPHYR = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + "
    "'</s>' }}{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '</s>' }}{% endif %}\n{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + "
    "'\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
)
PHI = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
SWALLOWING = PHI.replace("<|end|>", "<|fin|>")  # this mark swallows the white space before it
GLM = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
TEMPLATES = {  # source, the end of a turn as decoded, what stands before the text as decoded, does it trim
    "chatml": (CHATML, "<|im_end|>", "", False),
    "llama3": (LLAMA3, "<|eot_id|>", "", True),
    "mistral": (MISTRAL, "</s>", " ", False),
    "llama2": (LLAMA2, " </s>", " ", True),
    "zephyr": (ZEPHYR, "</s>", "", False),
    "gemma": (GEMMA, "<end_of_turn>", "", True),
    "phi": (PHI, "<|end|>", "", False),
    "swallowing": (SWALLOWING, "<|fin|>", "", False),
}
ANSWERS = (
    "Soup.", "a\n\nb  c", "crème brûlée 🙂👩‍🍳", "e\u0301\u0323 नमस्ते 中文", "1. x\n- y\n\n```py\nz = 0\n```",
    "|im_end|> ok",
)  # fmt: skip


def bytelevel_bpe(folder):
    """Byte-level BPE with special tokens of many families, some of which swallow white space."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "</s>", "<start_of_turn>", "<end_of_turn>"]
    header = [AddedToken(f"<|{role}|>", rstrip=True, normalized=False) for role in ("system", "user", "assistant")]
    ends = [AddedToken("<|end|>", rstrip=True, normalized=False), AddedToken("<|fin|>", lstrip=True, normalized=False)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*plain, *header, *ends]})
    tokenizer.add_tokens(["   "])  # some vocabularies have runs of spaces as added tokens
    return tokenizer


def sentencepiece_bpe():
    """Prefix space, spaces as ▁, unknown characters as bytes: the offsets of the SentencePiece family."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for character in "▁abcdefghijklmnopqrstuvwxyz[]/INST.\n":
        vocab.setdefault(character, len(vocab))
    merges = [("▁", "a"), ("o", "u"), ("▁", "x")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    engine = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    engine.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=engine, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def row(*turns):
    return Chat(tuple(Message(role, content) for role, content in turns))


def talk(answers, system=None):
    turns = [] if system is None else [("system", system)]
    for number, answer in enumerate(answers):
        turns += [("user", f"Question {number}? 🙂"), ("assistant", answer)]
    return row(*turns)


def learnt(tokens, document):
    """The texts of the runs of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.targets, [False]]).astype(int)))
    pieces = [document.ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [tokens.tokenizer.decode(piece, clean_up_tokenization_spaces=False) for piece in pieces]
