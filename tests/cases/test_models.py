"""Models of many families: what is written for other programs to read, and which config.json is refused.

What training did not change is the base's own file, to the byte, because other programs read more files, and older
ones, than transformers 5 writes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import yaml
from bases import KINDS, SIZES, edited, optrush, trained, write_base, write_run
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from meshes import further
from optrush import generation
from optrush.data.chat_template import Tokens
from optrush.data.tokenizer import open_tokenizer
from optrush.models.config_json import read_config_json
from optrush.models.hf import HFModel, _opened, load
from optrush.technique import library

WRITTEN = {"model.safetensors", "README.md"}
Base = Callable[[str], Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a kind, written once; nobody writes there."""
    root = tmp_path_factory.mktemp("bases")

    def find(kind: str) -> Path:
        return root / kind if (root / kind).is_dir() else write_base(root / kind, kind)

    return find


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def changed(base: Path, folder: Path) -> set[str]:
    """Names of the files that differ, or that one of the folders lacks."""
    a, b = contents(base), contents(folder)
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


# --- what training did not change
@pytest.mark.parametrize("kind", further(sorted(KINDS, key=lambda kind: kind not in ("llama", "phi3")), 2))
def test_files_and_names_are_the_bases_own(kind, base, tmp_path):
    """After a run, and in a folder exported again; merged adapters too."""
    run = trained(tmp_path / "run", base(kind))
    assert changed(base(kind), run / "model") == WRITTEN
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "model", base(kind)))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours), "it was trained"
    again = optrush("export", run, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert changed(run / "model", tmp_path / "again") <= {"README.md"}
    if kind in ("gpt_neox", "phi3"):  # adapters have other modules' names
        merged = trained(tmp_path / "lora", base(kind), with_={"lora": {"rank": 2}, "packing": {}})
        assert changed(base(kind), merged / "model") == WRITTEN
        assert load_file(merged / "model" / "model.safetensors").keys() == theirs.keys()


def test_everything_that_a_tokenizer_may_have_is_copied(base, tmp_path):
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    names = ("tokenizer.model.v3", "spiece.model", "vocab.txt", "o200k.tiktoken", "chat_template.jinja",
             "additional_chat_templates/tool_use.jinja")  # fmt: skip
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{{ messages }}\r\n")
    (folder / "modeling.py").write_text("")
    (folder / "LICENSE").write_text("")
    run = trained(tmp_path / "run", folder)
    assert changed(folder, run / "model") == {*WRITTEN, "modeling.py", "LICENSE"}


@pytest.mark.parametrize("kind", ["llama", "llama-pieces", "qwen2", "phi3"])
def test_added_tokens_and_a_template_change_their_own_entries(kind, base, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<a>{{ m['content'] }}<b>{% endfor %}")
    model = {"add_tokens": ["<a>", "<b>", "</s>"], "chat_template": str(tmp_path / "t.jinja")}
    run = trained(tmp_path / "run", base(kind), model=model)
    files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    listed = {"added_tokens.json"} & set(contents(base(kind)))
    assert changed(base(kind), run / "model") == WRITTEN | files | listed | {"generation_config.json"}
    ends = json.loads((run / "model" / "generation_config.json").read_text())
    at = max(AutoTokenizer.from_pretrained(base(kind)).get_vocab().values()) + 1
    old, new = (json.loads((folder / "tokenizer.json").read_text()) for folder in (base(kind), run / "model"))
    added = new.pop("added_tokens")
    assert [t["id"] for t in added] == [*range(3), *range(280, at + 2)], "no gap: readers number them in turn"
    assert added[:3] == old.pop("added_tokens") and new == old
    assert added[-2] == {"id": at, "content": "<a>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    old, new = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (base(kind), run / "model"))
    assert list(new) == list(old), "keys in their order"
    decoder = new.pop("added_tokens_decoder")
    more = {str(i) for i in range(280, at + 2)}
    assert decoder.keys() - old.pop("added_tokens_decoder").keys() == more and new == old
    if listed:
        ids = json.loads((run / "model" / "added_tokens.json").read_text())
        assert ids.items() >= {"</s>": 2, "<a>": at, "<b>": at + 1}.items() and len(ids) == 1 + len(more)
    assert (run / "model" / "chat_template.jinja").read_bytes() == (tmp_path / "t.jinja").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.encode("x<a>y<b>", add_special_tokens=False)[1::2] == [at, at + 1]
    assert ends["eos_token_id"] == [2, at + 1] and next(iter(ends)) == "_from_model_config"


def test_added_tokens_where_a_file_lists_none(base, tmp_path):
    """A folder older than added_tokens_decoder: converters read added_tokens.json beside tokenizer.model."""
    folder = shutil.copytree(base("llama-pieces"), tmp_path / "base")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["added_tokens_decoder"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    run = trained(tmp_path / "run", folder, model={"add_tokens": ["<a>"]})
    assert changed(folder, run / "model") == {*WRITTEN, "tokenizer.json", "added_tokens.json"}
    at = AutoTokenizer.from_pretrained(run / "model").convert_tokens_to_ids("<a>")
    assert json.loads((run / "model" / "added_tokens.json").read_text()) == {"<a>": at}


def test_a_template_takes_the_place_of_the_others(base, tmp_path):
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ old }}"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ old }}")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    out = trained(tmp_path / "run", folder, model={"chat_template": str(tmp_path / "t.jinja")}) / "model"
    source = (tmp_path / "t.jinja").read_text()
    assert json.loads((out / "tokenizer_config.json").read_text()) == {**settings, "chat_template": source}
    assert not (out / "additional_chat_templates").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template == source
    ends = {"_from_model_config": True, "eos_token_id": 2, "bos_token_id": 1, "transformers_version": "4.44.2"}
    assert json.loads((out / "generation_config.json").read_text()) == ends, "</s> ended answers before"


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_the_bases_template_ends_answers_of_the_exported_model(objective, base, tmp_path):
    """The base's generation config knows its end of text alone, and the run gives neither template nor tokens."""
    folder, chatml = tmp_path / "base", "{% for m in messages %}<a>{{ m['role'] + '\n' + m['content'] }}<b>{% endfor %}"
    shutil.copytree(base("llama"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokenizer.chat_template = chatml
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    asked, (good, bad) = {"role": "user", "content": "Oslo?"}, ({"role": "assistant", "content": c} for c in "ab")
    pair = {"prompt": [asked], "chosen": [good], "rejected": [bad]}
    rows = [{"messages": [asked, good]} if objective == "sft" else pair] * 8
    run = trained(tmp_path / "run", folder, rows=rows, objective=objective, train={"steps": 1}, with_={})
    end = tokenizer.convert_tokens_to_ids("<b>")
    assert json.loads((run / "model" / "generation_config.json").read_text())["eos_token_id"] == [2, end]
    card = (run / "model" / "README.md").read_text()
    assert r"| end-of-answer tokens | &lt;/s&gt;, &lt;b&gt; |" in card
    if objective == "sft":
        assert optrush("export", run, "--to", "gguf").code == 0
        fields = gguf.GGUFReader(run / "model-f16.gguf").fields
        assert [fields[f"tokenizer.ggml.{role}_token_id"].contents() for role in ("eos", "eot")] == [2, end]
        assert generation.GenerationModel(generation.find_model(str(run))).stops == [2, end]


PREFERENCE = [{"prompt": "Oslo?", "chosen": f" {i} miles.", "rejected": " No."} for i in range(8)]
JUDGED = [{"prompt": "Oslo?", "completion": f" {i} miles.", "label": i % 2 == 0} for i in range(8)]


@pytest.mark.parametrize(
    ("objective", "rows", "changes"),
    further([("dpo", PREFERENCE, {}), ("kto", JUDGED, {}), ("reward", PREFERENCE, {}), ("orpo", PREFERENCE, {}),
             ("dpo", PREFERENCE, {"with_": {"lora": {"rank": 2}}}), ("dpo", PREFERENCE, {"dpo": {"loss": "ipo"}})], 3),
)  # fmt: skip
def test_every_objective_is_exported(objective, rows, changes, base, tmp_path):
    """A reference is not in the exported weights: it is asked for neither what it was nor where it is now."""
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    run = trained(tmp_path / "run", folder, rows=rows, objective=objective, **{"with_": {}, **changes})
    if "with_" not in changes:  # other weights, of which none are exported
        stored = load_file(folder / "model.safetensors")
        save_file({name: t + 1 for name, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    again = optrush("export", run, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert contents(run / "model")["model.safetensors"] == contents(tmp_path / "again")["model.safetensors"]


def test_a_template_of_which_the_end_is_unknown_is_noted(base, tmp_path):
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    rows = [{"prompt": "Oslo?", "completion": " Yes."}] * 4
    config = write_run(tmp_path / "run", folder, rows=rows, objective="sft", train={"steps": 1}, with_={})
    ended = optrush("train", config)
    said = "the token that ends an answer under the chat template is unknown: add it to eos_token_id"
    assert ended.code == 0 and said in ended.out + ended.err
    ends = (tmp_path / "run" / "out" / "model" / "generation_config.json").read_bytes()
    assert ends == (folder / "generation_config.json").read_bytes()


LLAMA3_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(("kind", "tokenizer_class", "digits", "differs"), [
    ("llama", "Qwen2Tokenizer", 3, True), ("llama", "PreTrainedTokenizerFast", 3, False),
    ("llama", "GPT2Tokenizer", None, False),
])  # fmt: skip
def test_a_class_that_splits_otherwise_than_its_file(kind, tokenizer_class, digits, differs, base, tmp_path):
    """Noted for a folder, refused for a GGUF file, which has the file's rule. The vocabulary merges digits."""
    folder = shutil.copytree(base(kind), tmp_path / "base")
    file = folder / "tokenizer.json"
    engine = json.loads(file.read_text())
    words = engine["model"]["vocab"]
    for pair in ("12", "34"):
        words[pair] = len(words)
        engine["model"]["merges"].append([*pair])
    words["1234"] = len(words)
    engine["model"]["merges"].append(["12", "34"])
    if digits is not None:
        split = {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}
        level = {**engine["pre_tokenizer"], "use_regex": False}
        engine["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    file.write_text(json.dumps(engine))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": tokenizer_class}))
    rows = [{"text": "7 12345"}] * 4
    ended = optrush("train", write_run(tmp_path / "run", folder, rows=rows, train={"steps": 1}))
    assert ended.code == 0, ended.err
    noted = "trained on other tokens than tokenizer.json gives: '7 12345'" in ended.out + ended.err
    assert noted == differs
    written = optrush("export", tmp_path / "run" / "out", "--to", "gguf")
    assert written.code == (2 if differs else 0), written.err
    if differs:
        assert written.lines == ["asked", "found", "do"] and "tokenizer_class: PreTrainedTokenizerFast" in written.err
        assert "'7 12345': tokenizer.json has the tokens" in written.err


def test_texts_that_a_tokenizer_cannot_read_are_not_compared(tmp_path):
    """A vocabulary of words without its own `<unk>`: encoding any other word is an error of the library."""
    engine = Tokenizer(WordLevel({"Oslo": 0, "</s>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="</s>").save_pretrained(tmp_path)
    assert Tokens(open_tokenizer(tmp_path)).otherwise(tmp_path, [[0, 1]]) is None


def test_a_tokenizer_that_changed_since(base, tmp_path):
    """Its files would be exported, with weights that were trained with others."""
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    run = trained(tmp_path / "run", folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    refused = optrush("export", run, "--out", tmp_path / "out")
    assert refused.code == 2 and "the model's chat template changed" in refused.err
    assert not (tmp_path / "out").exists()


def test_config_changes_in_what_training_changed(base, tmp_path):
    """The weights' type under its old name, and the vocabulary; other keys, unknown ones too, stay in their order."""
    folder = edited(base("phi3"), tmp_path / "base", torch_dtype="bfloat16", of_the_future={"b": 1, "a": [None]})
    run = trained(tmp_path / "run", folder, model={"add_tokens": [f"<{i}>" for i in range(60)]})
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, run / "model"))
    assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} == {"torch_dtype", "vocab_size"}
    assert (new["torch_dtype"], new["vocab_size"], list(new)) == ("float32", 384, list(old))


@pytest.mark.parametrize("kind", further(["phi3", "gemma2", "llama"], 1))
def test_no_architectures_in_config(kind, base, tmp_path):
    folder = edited(base(kind), tmp_path / "base", architectures=None, torch_dtype=None)
    run = trained(tmp_path / "run", folder)
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, run / "model"))
    assert new == {**old, "architectures": json.loads((base(kind) / "config.json").read_text())["architectures"]}
    assert optrush("export", run, "--out", tmp_path / "out").code == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- attention that a family has
def test_a_family_without_sdpa(base, tmp_path):
    """It is trained, exported, asked and verified with masked attention; `init` writes what `train` takes."""
    run = trained(tmp_path / "run", base("gemma2"))
    for folder in (run / "model", base("gemma2")):
        asked = ("--prompts", tmp_path / "run" / "rows.jsonl", "--max-tokens", 3, "--greedy")
        said = optrush("generate", folder, *asked, "--out", tmp_path / f"{folder.name}.jsonl")
        assert said.code == 0, said.err
    assert optrush("export", run, "--out", tmp_path / "out").code == 0
    first = tmp_path / "first.yaml"
    arguments = ("--model", base("gemma2"), "--data", tmp_path / "run" / "rows.jsonl", "--objective", "pretrain")
    made = optrush("init", first, *arguments, "--output", tmp_path / "new", "--yes")
    assert made.code == 0, made.err
    assert "attention" not in yaml.safe_load(first.read_text())["with"]
    sets = [f"batch.{key}={n}" for key, n in (("seq", 64), ("tokens", 128), ("micro_tokens", 64))]
    started = optrush("train", first, *(word for each in sets for word in ("--set", each)))
    assert started.code == 0, started.err
    refused = optrush("train", write_run(tmp_path / "sdpa", base("gemma2"), with_={"attention": {}}))
    assert refused.code == 2 and refused.lines == ["asked", "found", "do"] and "impl=masked" in refused.err


# --- rotations that depend on a document's length
def alone(folder: Path, rows: list[list[int]]) -> float:
    """The loss a target by transformers, a document at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for ids in rows:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    return total / sum(len(ids) - 1 for ids in rows)


@pytest.mark.parametrize("lengths", [(64, 63), (65, 64, 20)])
def test_longrope_is_chosen_document_by_document(lengths, base, tmp_path):
    """Short factors up to 64 tokens, long ones beyond, whatever the rows and micro-batches that documents are in."""
    tokenizer = AutoTokenizer.from_pretrained(base("phi3"))
    words = "BCDFGHJKLMNPQRUVWXYZ" * 7  # a token a letter
    texts = [words[i : i + n - 1] for i, n in enumerate(lengths)]
    rows = [[*tokenizer.encode(text), 2] for text in texts]
    assert [len(ids) for ids in rows] == list(lengths)
    right = alone(base("phi3"), rows)
    for layout in ({"packing": {}}, {"pad": {}}, {"packing": {}, "attention": {}}):
        for micro in (128, 256):
            run = write_run(
                tmp_path / f"{len(str(layout))}-{micro}", base("phi3"), [{"text": text} for text in texts],
                batch={"seq": 128, "tokens": 256, "micro_tokens": micro}, with_=layout,
            )  # fmt: skip
            found = json.loads(optrush("eval", run, "--json").out)
            assert found["documents"] == len(rows) and abs(found["loss"] - right) < 1e-5, (layout, micro)


def test_rows_beyond_the_positions_that_a_family_has(base, tmp_path):
    """By its default where config.json has none: beyond them, dynamic RoPE depends on the longest document of a row."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    keys = {"max_position_embeddings": None, "rope_parameters": rope}
    folder = edited(base("llama"), tmp_path / "base", rope_theta=None, **keys)
    for T, code in ((2048, 0), (2176, 2)):
        given = {"batch": {"seq": T, "tokens": T}, "model": {"implementation": "transformers"}}
        ended = optrush("eval", write_run(tmp_path / str(T), folder, **given))
        assert ended.code == code, ended.err
    assert ended.lines == ["asked", "found", "do"] and "2048 positions" in ended.err


def test_infinity_in_config(base, tmp_path):
    """As transformers 5 and 4 write it; kept where another value of the file changes."""
    limits: dict[str, object] = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    limits |= {"of_the_future": {"a": [float("inf"), {"__float__": "x"}]}, "other_limit": [0.0, float("inf")]}
    folder = edited(base("gpt_neox"), tmp_path / "base", torch_dtype="bfloat16", **limits)
    run = trained(tmp_path / "run", folder)
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, run / "model"))
    assert new == {**old, "torch_dtype": "float32"}
    read = [AutoModelForCausalLM.from_pretrained(run / "model").config, _opened(folder, old, torch.float32).config]
    assert all(config.time_step_limit == config.other_limit == [0.0, float("inf")] for config in read)
    assert all(config.of_the_future == {"a": [float("inf"), {"__float__": "x"}]} for config in read)


def test_a_state_that_runs_on_takes_rows_of_one_document(base, tmp_path):
    """Infinity is read where the family's own class checks it, and documents of a row are then found to leak."""
    mamba = {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }  # fmt: skip
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    made = AutoConfig.for_model("falcon_h1", **SIZES, **mamba)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)
    assert '"__float__"' in (folder / "config.json").read_text()
    refused = optrush("train", write_run(tmp_path / "run", folder))
    assert refused.code == 2 and refused.lines == ["asked", "found", "do"] and "leave packing out" in refused.err
    rows = [{"text": f"Oslo is {i} miles away."} for i in range(4)]
    small = {"rows": rows, "train": {"steps": 1}, "batch": {"seq": 32, "tokens": 64}}
    run = trained(tmp_path / "alone", folder, with_={}, **small)
    assert optrush("eval", tmp_path / "alone" / "run.yaml", "--model", run / "model").code == 0


# --- blocks that differ from each other
def test_operations_are_summed_block_by_block(base):
    """4 heads of 16 in the two blocks with a window, of 32 in the third; none in a block of convolutions."""
    for folder, width in ((base("gemma4_text"), 4 * (16 + 16 + 32)), (base("llama"), 2 * 64), (base("gpt2"), 2 * 64)):
        config = read_config_json(folder / "config.json")
        model, _ = load(folder, config, "transformers", torch.float32, 0)
        assert model.flops(0, 10) == 6 * 10 * width
    lfm = {
        "model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"], "block_ff_dim": 96,
        "block_multiple_of": 8, "conv_L_cache": 3,
    }  # fmt: skip
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**lfm), dtype=torch.float32)
    assert HFModel(made).flops(0, 10) == 6 * 10 * 64


# --- blocks of convolutions

LFM = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}


@pytest.fixture(scope="module")
def convolved(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "lfm2", ({"model_type": "lfm2", **LFM, "pad_token_id": 0}, "PreTrainedTokenizerFast", ()))
        return write_base(tmp_path_factory.mktemp("lfm2") / "base", "lfm2")


@pytest.mark.parametrize("with_", further([
    {"packing": {}}, {}, {"lora": {"rank": 2, "targets": ["in_proj", "q_proj"]}}, {"wrap": {}},
    {"attention": {"impl": "sdpa"}, "packing": {}}, {"recompute": {}, "packing": {}}, {"sort-by-length": {}},
], 1), ids=str)  # fmt: skip
def test_convolutions_are_trained_in_every_layout(with_, convolved, tmp_path):
    run = trained(tmp_path / "run", convolved, with_=with_)
    again = optrush("export", run, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


# --- adapters, as PEFT reads them

SAVED = {"rank": 2, "save": ["embed_tokens", "lm_head"]}
NEW = [f"<{i}>" for i in range(60)]


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("kind", further(["qwen2", "gemma2", "llama"], 2))
@pytest.mark.parametrize("tokens", further([NEW, [], NEW[:3]], 1))
def test_an_adapter_has_its_tokenizer(kind, tokens, base, tmp_path):
    """Under added tokens with rows to spare, and with an embedding that grows; the base by its absolute path."""
    from peft import AutoPeftModelForCausalLM

    run = trained(tmp_path / "run", base(kind), model={"add_tokens": tokens}, with_={"lora": SAVED, "packing": {}})
    own = {name for name in contents(run / "model") if "token" in name or name in ("vocab.json", "merges.txt")}
    for name in own:
        assert (run / "adapter" / name).read_bytes() == (run / "model" / name).read_bytes()
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base(kind)
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    ids = torch.tensor([tokenizer.encode(f"The town{''.join(tokens)} of Oslo")])
    merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    adapted = AutoPeftModelForCausalLM.from_pretrained(run / "adapter", dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = merged(ids).logits, adapted(ids).logits
    assert len(tokenizer) <= theirs.shape[-1]
    torch.testing.assert_close(theirs, ours[..., : theirs.shape[-1]], rtol=1e-4, atol=1e-5)
    if tokens == NEW and kind == "llama":
        shutil.rmtree(run / "model")
        asked = ("--prompts", tmp_path / "run" / "rows.jsonl", "--max-tokens", 3, "--greedy")
        said = optrush("generate", run, *asked, "--out", tmp_path / "said.jsonl")
        assert said.code == 0, said.err
        lora = {**SAVED, "init": str(run / "adapter")}
        again = trained(
            tmp_path / "again", base(kind), model={"add_tokens": tokens}, with_={"lora": lora, "packing": {}},
            optim={"lr": 1e-30},
        )  # fmt: skip
        a, b = (load_file(r / "adapter" / "adapter_model.safetensors") for r in (run, again))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), "it began where that ended"


def test_a_relative_base(base, tmp_path, monkeypatch):
    (tmp_path / "at").mkdir()
    monkeypatch.chdir(tmp_path / "at")
    shutil.copytree(base("llama"), tmp_path / "base")
    run = trained(tmp_path / "run", "../base", with_={"lora": {"rank": 2}, "packing": {}})
    named = json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "base")


# --- what is refused, and what is not
def test_keys_left_over_in_a_text_model(base, tmp_path):
    trained(tmp_path / "run", edited(base("llama"), tmp_path / "base", text_config={}, num_experts=1))


def test_an_evaluation_that_is_not_finite(base, tmp_path):
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ended = optrush("eval", write_run(tmp_path / "run", folder), "--json")
    assert (ended.code, ended.out) == (1, "") and "no finite number" in ended.err


def test_a_generation_config_that_is_no_json(base, tmp_path):
    """Where the run's template changes it, before step 0."""
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    (folder / "generation_config.json").write_text("{")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    run = write_run(tmp_path / "run", folder, model={"chat_template": str(tmp_path / "t.jinja")})
    ended = optrush("train", run)
    assert ended.code == 2 and ended.lines == ["asked", "found", "do"] and not (tmp_path / "run" / "out").exists()


def test_pieces_alone(base, tmp_path):
    """tokenizer.model without tokenizer.json: the package that reads it is named, and not another."""
    folder = shutil.copytree(base("llama-pieces"), tmp_path / "base")
    (folder / "tokenizer.json").unlink()
    refused = optrush("train", write_run(tmp_path / "run", folder))
    assert refused.code == 2 and "tokenizer.model without tokenizer.json, which sentencepiece reads" in refused.err
    assert ("pip install sentencepiece" in refused.err) == (library("sentencepiece") is None)
    assert "tiktoken" not in refused.err.partition("asked:")[2]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("key", "value", "found"), [
    ("torch_dtype", "nope", "torch_dtype"), ("dtype", "auto", "dtype"), ("id2label", 3, "config.json"),
    ("auto_map", 3, "config.json"), ("rope_scaling", {"rope_type": "yarn"}, "config.json"),
    ("rope_theta", 0, "rope_theta"), ("hidden_act", "nope", None),
])  # fmt: skip
def test_a_value_that_transformers_refuses(kind, key, value, found, base, tmp_path):
    """The tokenizer is not blamed for config.json, which transformers reads first."""
    folder = edited(base(kind), tmp_path / "base", **{key: value})
    ended = optrush("eval", write_run(tmp_path / "run", folder))
    assert ended.code == 2 or (kind, key) in {("gpt2", "hidden_act")}, "GPT-2 has another key for it"
    if ended.code:
        assert ended.lines[-3:] == ["asked", "found", "do"] and (found or "nope") in ended.err
        assert "put its tokenizer.json there" not in ended.err
