"""`optrush export`: what it writes is what was trained, what is not is refused, and a card that says nothing untrue."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from trained import run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from meshes import further
from optrush import exporting, model_card, restore
from optrush.config import Config
from optrush.errors import NeedsError
from optrush.models import fp8_folder
from optrush.trainer import run_dir

from clirun import document_of, error_of

exported, refused = document_of("export"), error_of("export")

TEXT = "Chop the onions, fry them in butter, and stir."


@pytest.fixture
def trained(cache, here):
    """A copy of the run, to change; its own model/ is taken away."""
    shutil.copytree(run(cache), here / "run")
    (here / "run" / "model").rename(here / "model")
    return here / "run"


@torch.no_grad()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(**AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")).logits


def test_it_is_the_runs_own_model(call, trained, here):
    facts = exported(call, "run")
    ours, theirs = load_file(trained / "model" / "model.safetensors"), load_file(here / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert {p.name for p in (trained / "model").iterdir()} == {p.name for p in (here / "model").iterdir()}
    best = json.loads((trained / "checkpoints" / "best.json").read_text())["step"]
    assert (facts["step"], facts["dtype"], facts["passed"]) == (best, "float32", [])
    found = facts["compared"]
    assert not found["rounded"] and found["agreement"] == 1.0
    assert found["worst"] > 0 and found["relative"] == found["worst"] / found["scale"] <= found["tolerance"] == 1e-4
    said = call("export", "run/run.yaml", "--out", "again")
    assert said.code == 0 and said.out == "again\n" and "nothing was rounded" in said.err


def test_any_checkpoint(call, trained, here):
    for asked in ("2", str(trained / "checkpoints" / "step-000002")):
        shutil.rmtree("out", ignore_errors=True)
        assert exported(call, "run", "--checkpoint", asked, "--out", "out")["step"] == 2
        saved = load_file(trained / "checkpoints" / "step-000002" / "rank-0.safetensors")
        written = load_file(here / "out" / "model.safetensors")
        assert torch.equal(saved["param/embedding.weight"], written["model.embed_tokens.weight"])
        assert torch.equal(saved["param/blocks.1.down.weight"], written["model.layers.1.mlp.down_proj.weight"])
    assert "| steps | 2 |" in (here / "out" / "README.md").read_text()


def test_the_best_before_the_newest(call, trained):
    best = trained / "checkpoints" / "best.json"
    for step in (2, 4):
        best.write_text(json.dumps({"step": step, "eval_loss": 1.0}))
        assert exported(call, "run", "--out", f"best{step}")["step"] == step
    (trained / "checkpoints" / "step-000004" / "manifest.json").unlink()
    facts = exported(call, "run", "--out", "newest")
    assert facts["step"] == 6 and [name for name, _ in facts["passed"]] == ["step-000004"]
    best.unlink()
    assert exported(call, "run", "--out", "last")["step"] == 6
    best.write_text("[]")
    assert "names no step" in refused(call, "run", "--out", "none")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_converted_weights_say_what_that_changed(dtype, call, trained, here):
    facts = exported(call, "run", "--dtype", dtype, "--out", "half")
    stored = load_file(here / "half" / "model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {f"torch.{dtype}"}
    assert json.loads((here / "half" / "config.json").read_text())["dtype"] == dtype
    off = (logits(here / "half") - logits(here / "model")).abs().max().item()
    found = facts["compared"]
    assert found["rounded"] and found["worst"] > 1e-5, "rounding moves logits"
    assert 0.2 < found["worst"] / off < 5, "of other tokens, but of the same size"


def test_shards(call, trained, here):
    exported(call, "run", "--max-shard-gb", "0.002")
    assert len(list((trained / "model").glob("*.safetensors"))) > 2
    assert torch.equal(logits(trained / "model"), logits(here / "model"))


def damage(tensor, how):
    """After the weights were written, one tensor of the folder is another."""
    real = exporting.write_generation

    def write(job, folder, source):
        real(job, folder, source)
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor] = how(tensors[tensor].clone()).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def nudge(t):
    t[0] += 1.0
    return t


def rolled(t):  # heads in another order
    return t.roll(32, 0)


def flipped(t):
    return t.flip(0)


def last_bits(t):
    return t.view(torch.uint8).bitwise_xor(1).view(t.dtype)


@pytest.mark.parametrize(("tensor", "how", "dtype"), further([
    ("model.layers.2.self_attn.q_proj.weight", rolled, "bfloat16"), ("model.norm.weight", last_bits, "float32"),
    ("model.layers.0.mlp.gate_proj.weight", flipped, "bfloat16"),
    ("model.layers.0.mlp.gate_proj.weight", flipped, "float32"),
    ("model.layers.2.self_attn.q_proj.weight", rolled, "float32"), ("model.norm.weight", last_bits, "bfloat16"),
], 2))  # fmt: skip
def test_a_tensor_that_is_not_what_was_written_is_red(tensor, how, dtype, call, trained, here, monkeypatch):
    monkeypatch.setattr(exporting, "write_generation", damage(tensor, how))
    found = call("export", "run", "--out", "bad", "--dtype", dtype)
    assert found.code == 1 and found.out == "", found
    assert f"is not the trained model: {tensor} differs after reloading" in found.err
    assert not (here / "bad").exists() and (here / "bad.tmp" / "config.json").is_file()
    assert "bad.tmp exists" in refused(call, "run", "--out", "bad")
    shutil.rmtree(here / "bad.tmp")
    assert call("export", "run", "--out", "bad", "--no-verify", "--dtype", dtype).code == 0, "nobody looked"


@pytest.mark.parametrize(("dtype", "tensor", "how"), further([
    ("float32", "model.norm.weight", lambda t: t * 1.01), ("bfloat16", "model.embed_tokens.weight", nudge),
    ("float32", "model.layers.1.mlp.down_proj.weight", flipped), ("float32", "model.embed_tokens.weight", nudge),
    ("bfloat16", "model.norm.weight", lambda t: t * 1.2),
], 2))  # fmt: skip
def test_other_logits_are_red(dtype, tensor, how, call, trained, monkeypatch):
    """Where the bytes are what was meant and what was meant is wrong, as by a wrong layout."""
    monkeypatch.setattr(exporting, "write_generation", damage(tensor, how))
    monkeypatch.setattr(exporting, "demand_bytes", lambda *_: None)
    found = call("export", "run", "--out", "bad", "--dtype", dtype)
    assert found.code == 1 and found.out == "", found
    assert "is not the trained model: logits after reloading" in found.err and "largest difference" in found.err


def test_a_nan_is_red():
    one = torch.randn(3, 5)
    found = exporting.compare([one], [one.clone().fill_(float("nan"))], "", torch.float32, True)
    assert not found.sound


def test_neither_data_nor_the_training_machine_is_needed(call, trained):
    """The data is gone, and a technique of the run needs a GPU."""
    settings = yaml.safe_load((trained / "run.yaml").read_text())
    settings["data"]["path"] = "/nowhere/chat.jsonl"
    settings["with"] |= {"fp8": {}, "ddp": {}}
    (trained / "run.yaml").write_text(yaml.safe_dump(settings))
    facts = exported(call, "run")
    assert "random tokens" in facts["compared"]["texts"]


@pytest.mark.parametrize(("name", "changes", "dtype"), further([
    ("adapter", {"model": "{path: tiny, implementation: transformers}"}, "float32"),
    ("bf16", {"with_": "{bf16: {}, packing: {}, attention: {}}"}, "bfloat16"),
], 1))  # fmt: skip
def test_other_runs(name, changes, dtype, call, cache, here):
    """Nothing is rounded where the weights were trained in the type that they are written in."""
    of = run(cache, name, **changes)
    facts = exported(call, str(of), "--out", "out")
    assert facts["dtype"] == dtype and not facts["compared"]["rounded"]
    ours, theirs = load_file(here / "out" / "model.safetensors"), load_file(of / "model" / "model.safetensors")
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_damaged_checkpoints_are_passed_over(call, trained):
    (trained / "checkpoints" / "best.json").unlink()
    (trained / "checkpoints" / "step-000006" / "rank-0.safetensors").write_bytes(b"")
    facts = exported(call, "run", "--out", "out")
    assert facts["step"] == 4 and facts["passed"][0][0] == "step-000006" and "0 bytes" in facts["passed"][0][1]
    assert "step-000006 was passed over" in call("export", "run", "--out", "out2").err
    assert "has 0 bytes" in refused(call, "run", "--checkpoint", "6", "--out", "none")
    for step in (2, 4):
        (trained / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    said = refused(call, "run", "--out", "none")
    assert "nothing to export" in said and "step-000002: manifest.json has no digest" in said


def test_what_is_refused(call, trained, here):
    assert "no such folder" in refused(call, "nowhere")
    assert "no run.yaml in it" in refused(call, ".")
    (here / "rows.jsonl").write_text("")
    assert "found: a file" in refused(call, "rows.jsonl")
    assert "there are: step-000006, step-000004, step-000002" in refused(call, "run", "--checkpoint", "3")
    (here / "full").mkdir()
    (here / "full" / "notes").write_text("")
    assert "it is not empty" in refused(call, "run", "--out", "full")
    assert "a file, not a folder" in refused(call, "run", "--out", "chat.jsonl")
    assert "is not a folder" in refused(call, "run", "--out", "a/b")
    assert "has no adapter" in refused(call, "run", "--adapter")
    assert "leave one out" in refused(call, "run", "--adapter", "--dtype", "bfloat16")
    assert "an adapter is one file" in refused(call, "run", "--adapter", "--max-shard-gb", "2")
    shutil.rmtree(trained / "checkpoints")
    assert "no checkpoint in it" in refused(call, "run")
    (trained / "run.yaml").write_bytes(b"\xff")
    assert "not UTF-8" in refused(call, "run")
    assert not (trained / "model").exists() and not list(here.glob("*.tmp"))


def test_another_model_than_was_trained(call, trained, model, here):
    """The published model changed since; parameters that are the checkpoint's alone."""
    shutil.copytree(model, here / "other")
    settings = yaml.safe_load((trained / "run.yaml").read_text()) | {"model": {"path": "other"}}
    (trained / "run.yaml").write_text(yaml.safe_dump(settings))
    exported(call, "run", "--out", "same")
    config = json.loads((here / "other" / "config.json").read_text())
    (here / "other" / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert "the model's config.json changed: " in refused(call, "run", "--out", "none")


def test_adapters(call, cache, here):
    """Merged in float32; or as PEFT's files, which give the same logits on the base."""
    from peft import PeftModel

    of = run(cache, "lora", with_="{lora: {rank: 4}, packing: {}}")
    facts = exported(call, str(of), "--out", "merged")
    assert facts["compared"]["relative"] < 1e-4
    found = exported(call, str(of), "--out", "adapter", "--adapter")
    assert found["compared"] is None and found["dtype"] is None
    base = AutoModelForCausalLM.from_pretrained(cache / "optrush" / "tiny-1", dtype=torch.float32)
    before = base(torch.arange(9)[None]).logits
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        ours = PeftModel.from_pretrained(base, here / "adapter")(torch.arange(9)[None]).logits
        merged = AutoModelForCausalLM.from_pretrained(here / "merged", dtype=torch.float32)
        theirs = merged(torch.arange(9)[None]).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max() and not torch.allclose(before, theirs, atol=1e-3)


def test_adapters_that_meant_something_else(call, cache, here):
    shutil.copytree(run(cache, "lora", with_="{lora: {rank: 4}, packing: {}}"), here / "run")
    settings = yaml.safe_load((here / "run" / "run.yaml").read_text())
    settings["with"]["lora"]["alpha"] = 2.0
    (here / "run" / "run.yaml").write_text(yaml.safe_dump(settings))
    for more in ((), ("--adapter",)):
        said = refused(call, "run", "--out", "none", *more)
        assert "`adapters` was lora, scaling 8," in said and "and is lora, scaling 0.5," in said


@pytest.mark.slow
def test_a_base_that_training_rounded_and_a_folder_that_is_gone(call, cache, here):
    """Under amp frozen matrices multiply in bf16, and so they are written. What adapters began with is not needed."""
    of, begun = run(cache, "lora", with_="{lora: {rank: 4}, packing: {}}"), cache / "begun"
    shutil.copytree(of / "adapter", begun)
    lora = f"{{rank: 4, init: {begun}}}"
    of = run(cache, "amp", with_=f"{{amp: {{stream: half}}, lora: {lora}, packing: {{}}}}")
    shutil.rmtree(begun)
    facts = exported(call, str(of), "--checkpoint", "6", "--out", "out")
    assert facts["dtype"] == "bfloat16"
    assert restore._bare(restore.open_run(of)[1]).with_["amp"] == {}, "compared in float32, without its stream"
    ours, theirs = load_file(here / "out" / "model.safetensors"), load_file(of / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_weights_stored_in_few_bits_are_written_dense(call, cache, here):
    of = run(cache, "nf4", with_="{nf4: {}, lora: {rank: 4, targets: attention}, packing: {}}")
    found = exported(call, str(of), "--out", "out")["compared"]
    assert found["rounded"] and found["relative"] < 1e-4
    dense, base = (load_file(f / "model.safetensors") for f in (here / "out", cache / "optrush" / "tiny-1"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert 0.01 < (dense[name] - base[name]).norm() / base[name].norm() < 0.2, "4 bits, and no adapter"


EVIL = "<img src=x onerror=alert(1)> [click](https://evil.example) | `x` **b** \x1b[31m\nwww.evil.example # h"


def test_the_card_is_escaped(trained, here):
    text = model_card.escaped(EVIL)
    assert "<" not in text and "\x1b" not in text and "\n" not in text
    assert r"\[click\]\(https\://evil\.example\)" in text and r"\|" in text and r"www\.evil" in text
    settings: dict[str, Any] = {"model": {"path": EVIL}, "objective": "sft", "data": {"path": EVIL}, "output": "x"}
    odd = here / "a *folder* <b>"
    trained.rename(odd)
    written = model_card.card(Config.model_validate(settings), odd, 6, None)
    body = written.partition("---\n\n")[2]
    assert "<img" not in written and "<b>" not in written and r"\*folder\*" in body
    front = yaml.safe_load(written.split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["optrush"]}


def test_what_the_card_says(call, trained, model, here):
    """The base's licence, a hub id, and the run's own figures; no path of this machine."""
    base = here / "base"
    shutil.copytree(model, base)
    (base / "README.md").write_text("---\nlicense: llama3.2\ntags: [x]\n---\n# Base\n")
    changes: dict[str, Any] = {"model": {"path": "org/Some-1B"}, "objective": "sft", "data": {"path": str(here)}}
    text = model_card.card(Config.model_validate(changes | {"output": "x"}), trained, 4, base, "8 documents")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "llama3.2" and front["base_model"] == "org/Some-1B"
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    evals = {m["step"]: m["eval_loss"] for m in lines if "eval_loss" in m}
    assert f"| held-out loss | {evals[4]:.4f} at step 4 |" in text
    assert f"| best held-out loss | {min(evals[s] for s in (0, 2, 4)):.4f} at step" in text
    assert "8 documents" in text and str(here) not in text and "GiB resident" in text
    for licence in ("[evil](x)", "a\nb: c", "", 7):
        (base / "README.md").write_text(f"---\n{yaml.safe_dump({'license': licence})}---\n")
        text = model_card.card(Config.model_validate(changes | {"output": "x"}), trained, 4, base)
        assert "license" not in yaml.safe_load(text.split("---\n")[1])
    (base / "README.md").write_text("---\na: [\n---\n")
    model_card.card(Config.model_validate(changes | {"output": "x"}), trained, 4, base)


def test_the_card_has_no_path_of_what_is_gone(trained, here):
    (here / "notes").mkdir()
    named = {
        f"{here}/gone/base": "base", f"{here}/*/chat-*.jsonl": "chat-*.jsonl", "notes/gone": "gone",
        "secret/rows.jsonl": "rows.jsonl", "../secret": "secret", "org/Set:train": "org/Set:train",
        "hub:org/Set": "hub:org/Set",
    }  # fmt: skip
    for path, name in named.items():
        settings: dict[str, Any] = {"model": {"path": path}, "objective": "sft", "data": {"path": path}, "output": "x"}
        text = model_card.card(Config.model_validate(settings), trained, 6, None)
        assert (
            f"| base model | {model_card.escaped(name)} |" in text and f"| data | {model_card.escaped(name)} |" in text
        )
        assert str(here) not in text and "secret/" not in text


def test_what_others_made_is_left(call, cache, trained, here):
    """Folders called as export's own; of a run at work, and of whoever."""
    for folder in (here / "other.tmp", here / "other.tmp.tmp", here / "other.old.tmp", trained / "model.tmp"):
        folder.mkdir()
        (folder / "config.json").write_text("mine")

    def untouched():
        return all((f / "config.json").read_text() == "mine" for f in (here / "other.tmp", trained / "model.tmp"))

    assert "the temporary folder " in refused(call, "run", "--out", "other") and untouched()
    with run_dir.lock(trained):
        for more in ((), ("--out", "run/model"), ("--out", str(here / "run" / "adapter"))):
            assert "another run is using it" in refused(call, "run", *more) and untouched()
    exported(call, "run", "--out", "run/model", "--no-verify")
    assert not (trained / "model.tmp").exists(), "what a kill left"
    (here / "other.tmp").rename(here / "kept")
    exported(call, str(run(cache, "lora", with_="{lora: {rank: 4}, packing: {}}")), "--out", "other", "--adapter")
    assert all((here / f / "config.json").is_file() for f in ("kept", "other.tmp.tmp", "other.old.tmp"))


def test_data_that_cannot_be_read_is_not_there(call, trained, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(exporting.readers, "read_rows_or_errors", fail)
    assert "random tokens" in exported(call, "run")["compared"]["texts"]


def test_nothing_is_left_of_what_failed(call, trained, here, monkeypatch):
    """A full disk, no memory, a run that is at work there."""
    with run_dir.lock(trained):
        assert "another run is using it" in refused(call, "run")
        exported(call, "run", "--out", "elsewhere")
    errors = {
        OSError(28, "No space left on device"): (2, "No space left on device"),
        torch.OutOfMemoryError("CUDA out of memory"): (1, "CUDA_VISIBLE_DEVICES= optrush export"),
    }
    for error, (code, said) in errors.items():

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(exporting, "write_generation", fail)
        found = call("export", "run")
        assert found.code == code and said in found.err and found.out == ""
    assert not (trained / "model").exists() and not list(trained.glob("*.tmp"))


# --- GGUF


def test_a_gguf_file(call, trained):
    facts = exported(call, "run", "--to", "gguf", "--gguf-type", "f32", "--out", "m.gguf")
    assert facts["out"] == "m.gguf" and Path("m.gguf").stat().st_size == facts["size_bytes"]
    assert not list(Path().glob(".gguf-*")) and not Path("m.gguf.tmp").exists()
    assert call("export", "run", "--to", "gguf", "--out", "m.gguf").code == 2, "an existing file stays"


@pytest.mark.parametrize(("flags", "says"), [
    (("--gguf-type", "f16"), "--to hf"), (("--to", "gguf", "--adapter"), "--adapter with --to gguf"),
    (("--to", "gguf", "--dtype", "float16"), "--dtype float16 with --to gguf"),
    (("--to", "fp8", "--adapter"), "--adapter with --to fp8"),
    (("--to", "gguf", "--max-shard-gb", "1"), "--max-shard-gb with --to gguf"),
    (("--to", "gguf", "--out", "folder"), "not a .gguf file"),
])  # fmt: skip
def test_flags_of_gguf(call, trained, flags, says):
    found = call("export", "run", *flags)
    assert found.code == 2 and says in found.err


# --- 8-bit floats


def test_a_folder_in_8_bit_floats(call, trained):
    """Read back, each weight is as near as three bits of mantissa allow; all else is what the other folder has."""
    exported(call, "run", "--out", "plain")
    facts = exported(call, "run", "--to", "fp8")
    folder = trained / "model-fp8"
    assert facts["out"] == str(folder.relative_to(Path.cwd())) and not list(Path().glob("**/.fp8-*"))
    plain, narrow = (load_file(f / "model.safetensors") for f in (Path("plain"), folder))
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "float-quantized" and settings["ignore"] == ["lm_head"]
    scales = {name.removesuffix("_scale") for name in narrow if name.endswith("_scale")}
    assert facts["linears"] == len(scales) and narrow.keys() == plain.keys() | {f"{name}_scale" for name in scales}
    for name, weight in plain.items():
        if name not in scales:
            assert torch.equal(narrow[name], weight) and (weight.dim() < 2 or "layers" not in name), name
            continue
        assert narrow[name].dtype == torch.float8_e4m3fn and narrow[f"{name}_scale"].shape == (len(weight), 1)
        scale = narrow[f"{name}_scale"].float()
        apart = (narrow[name].float() * scale - weight.float()).abs()
        assert (apart <= weight.float().abs() / 16 * 1.01 + scale * 2**-10).all(), (
            name
        )  # half a step; below it, subnormal
    assert call("export", "run", "--to", "fp8").code == 2, "an existing folder stays"


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "num_experts": 0,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_keep_their_type(kind, tmp_path):
    """A convolution's weight has three dimensions, as one tensor of all experts has."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **CONVOLUTIONS[kind]))
    model.save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    beyond = ["model.layers.2.eh_proj", "mtp.layers.0.mlp.up_proj"]
    extra = {f"{name}.weight": torch.randn(4, 4) for name in beyond}
    save_file({**stored, **extra}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "to").mkdir()
    done = fp8_folder.write_fp8(tmp_path / "base", tmp_path / "to")
    base, narrow = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "to"))
    convolutions = [name for name, t in base.items() if t.dim() == 3 and "conv" in name]
    assert convolutions and all(torch.equal(base[name], narrow[name]) for name in convolutions)
    listed = set(json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]["ignore"])
    linears = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linears - listed) == done and {f"{name}.weight_scale" for name in linears - listed} <= narrow.keys()
    assert "lm_head" in listed and sorted(name for name in listed if "proj" in name) == beyond


def test_experts_in_one_tensor_are_refused(tmp_path):
    (tmp_path / "to").mkdir()
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 4)}, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_local_experts": 2, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "vocab_size": 8, **sizes}))
    with pytest.raises(NeedsError, match="all experts of a layer"):
        fp8_folder.write_fp8(tmp_path, tmp_path / "to")


# --- an upload


class Hub:
    """Records what would be uploaded, or fails as the library does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.error = error

    def create_repo(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options))
        return f"https://hub/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((repo_id, sorted(p.name for p in folder_path.iterdir())))

    def upload_file(self, *, path_or_fileobj: Path, path_in_repo: str, repo_id: str) -> None:
        self.calls.append((repo_id, path_in_repo))


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_verysecret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return found


def test_a_pushed_folder_has_its_card(call, trained, hub):
    facts = exported(call, "run", "--push", "cooks/first", "--no-verify")
    assert facts["pushed"] == "https://hub/cooks/first"
    (made, options), (repository, files) = hub.calls
    assert made == repository == "cooks/first" and options == {"private": True, "exist_ok": True}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)


def test_a_failed_upload_keeps_the_folder_and_the_token(call, trained, hub):
    hub.error = ValueError("refused for hf_verysecret")
    found = call("export", "run", "--push", "cooks/first", "--no-verify")
    assert found.code == 1 and "could not be uploaded to cooks/first: ValueError: refused for ***" in found.err
    assert "hf_verysecret" not in found.err + found.out and (trained / "model" / "README.md").is_file()


@pytest.mark.parametrize("case", ["name", "offline", "token"])
def test_a_push_that_cannot_begin_writes_nothing(call, trained, hub, monkeypatch, case):
    if case == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if case == "token":
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    found = call("export", "run", "--push", "cooks" if case == "name" else "cooks/first")
    assert found.code == 2 and not (trained / "model").exists() and not hub.calls
    assert [line[:7] for line in found.err.splitlines()[-3:]] == ["asked: ", "found: ", "do:    "]
