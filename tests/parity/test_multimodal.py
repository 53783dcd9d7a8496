"""Language models of models of images and text against transformers' whole model, and what is written of them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from meshes import further
from optrush import exporting
from optrush.decide import decide
from optrush.errors import DataError, NeedsError
from optrush.models.decoder import Decoder
from optrush.models.fp8_folder import write_fp8
from optrush.models.hf import load, load_plain
from optrush.models.shapes import ModelShape, native_obstacle
from optrush.models.text_part import PREFIX
from optrush.models.weights import export_weights

from golden import make_golden
from parity_models import EXPERTS, LATENT, materialise, packed, reference_alone, save
from trials import assembled, golden_run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks

TEXT = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 8}
VISUAL = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1000.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {
        "model_type": "gemma3_text", "sliding_window": 8,
    }, "vision_config": {**TOWER, "model_type": "siglip_vision_model"}},
    "mistral3": {"text_config": {
        "model_type": "mistral", "sliding_window": None,
    }, "vision_config": PIXTRAL, "tie_word_embeddings": False},
    "mistral3 ministral3": {"text_config": {
        "model_type": "ministral3", "sliding_window": None, "rope_parameters": YARN,
    }, "vision_config": PIXTRAL},
    "qwen2_5_vl": {"text_config": {
        "model_type": "qwen2_5_vl_text", **MROPE,
    }, "vision_config": {**VISUAL, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", **MROPE}, "tie_word_embeddings": True,
        "vision_config": {**VISUAL, "deepstack_visual_indexes": [0]},
    },
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {
        **TOWER, "model_type": "clip_vision_model",
    }, "image_seq_length": 4},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": {**TOWER, "model_type": "internvl_vision"}},
    "gemma4": {"text_config": {
        "model_type": "gemma4_text", "sliding_window": 8, "global_head_dim": 8, "num_hidden_layers": 6,
        "pad_token_id": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 80,
        "num_kv_shared_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }, "vision_config": {**TOWER, "head_dim": 8, "num_key_value_heads": 2}, "audio_config": None},
    "gemma4_unified": {
        "text_config": {
            "model_type": "gemma4_unified_text", "sliding_window": 8, "global_head_dim": 8, "pad_token_id": 0,
            "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"patch_size": 14, "mm_embed_dim": 32, "mm_posemb_size": 4, "output_proj_dims": 32},
        "audio_config": None,
    },
}  # fmt: skip
RULE = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 8, "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
CASES["qwen3_5"] = {"text_config": {"model_type": "qwen3_5_text", **RULE}, "vision_config": VISUAL}
CASES["qwen3_5_moe"] = {"text_config": {
    "model_type": "qwen3_5_moe_text", **RULE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 8,
}, "vision_config": VISUAL, "tie_word_embeddings": True}  # fmt: skip
DEEP = {key: value for key, value in EXPERTS["deepseek_v3"].items() if key not in ("bos_token_id", "eos_token_id")}
CASES["kimi_k25"] = {"text_config": {**DEEP, **TEXT, **LATENT}, "vision_config": {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4,
    "pos_emb_width": 4,
}, "projection_hidden_size": 16, "tie_word_embeddings": False}  # fmt: skip
CASES["llama4"] = {
    "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 3, "intermediate_size_mlp": 24, "num_local_experts": 3,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 6, "no_rope_layer_interval": 2, "floor_scale": 4,
    },
    "vision_config": {
        **TOWER, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
        "projector_output_dim": 16,
    },
}  # fmt: skip
NATIVE = {
    "gemma3", "gemma4", "gemma4_unified", "llama4", "kimi_k25", "qwen3_5", "qwen3_5_moe", "mistral3", "qwen2_5_vl",
    "qwen3_vl", "llava", "internvl",
}  # fmt: skip
ROWS = [[5, 7, 3], [13, 2]]


def whole(case: str) -> Any:
    """transformers' model of a case, every parameter drawn."""
    given = copy.deepcopy(CASES[case])
    given["text_config"] = {**TEXT, **given["text_config"]}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[case.split()[0]](**given)).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise * 0.3 if p.ndim > 1 else p + noise * 0.2)
    for m in (
        model.modules() if case.startswith("gemma4") else ()
    ):  # whose class demands a padding id; here it is a token
        m.padding_idx = None
    return model


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Folders as transformers writes them, with the run's tokenizer and a file of the images' processor."""
    tokenizer, made = tmp_path_factory.mktemp("tokenizer"), {}
    make_golden.write_model(tokenizer, False)
    for name in ("model.safetensors", "config.json"):
        (tokenizer / name).unlink()
    for case in CASES:
        theirs, folder = whole(case), tmp_path_factory.mktemp("whole") / "base"
        shutil.copytree(tokenizer, folder)
        (folder / "preprocessor_config.json").write_text('{"size": 28}')
        save(theirs, folder)
        if case == "kimi_k25":  # transformers writes `blocks` where published files have `layers`
            tensors = load_file(folder / "model.safetensors")
            tensors = {name.replace("model.blocks.", "model.layers."): t for name, t in tensors.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        made[case] = folder, theirs
    return made


@pytest.mark.parametrize(("case", "flat"), [*((case, False) for case in CASES), ("qwen2_5_vl", True)])
def test_text_of_a_whole_model(case, flat, wholes, tmp_path):
    """Logits, every gradient, isolation, and an export with the layout and bytes of its base.

    flat: the language model's keys at the top of config.json.
    """
    folder, theirs = wholes[case]
    if flat:
        shutil.copytree(folder, tmp_path / "flat")
        folder = tmp_path / "flat"
        hf = json.loads((folder / "config.json").read_text())
        text = {k: v for k, v in hf.pop("text_config").items() if k not in ("model_type", "rope_parameters")}
        hf |= {**text, "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
        (folder / "config.json").write_text(json.dumps(hf))
    hf = json.loads((folder / "config.json").read_text())
    ours, recipe = load(folder, hf, None, torch.float32, 0)
    assert isinstance(ours, Decoder) == (case in NATIVE)
    assert not any("vis" in name for name, _ in ours.named_parameters())
    materialise(ours, recipe)
    batch = packed(ROWS, 16, 80)
    hidden = ours(batch.tokens, batch.positions, batch.documents)
    logits = ours.head.logits(hidden)
    want, loss = reference_alone(theirs, batch)
    found = [part for row, n in zip(logits, ROWS, strict=True) for part in torch.split(row[: sum(n)], n)]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)  # processors sum in other orders
    theirs.zero_grad()
    loss.backward()
    ours.head(hidden, batch.labels).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    if case in ("qwen3_5_moe", "kimi_k25"):  # to a tensor of each expert, as it is written
        grads = revert_weight_conversion(theirs, grads)
        written = {"language_model.model.blocks.": f"{PREFIX}layers.", "language_model.lm_head.": "lm_head."}
        for stored, name_of in (written | {"language_model.model.": PREFIX}).items() if case == "kimi_k25" else ():
            grads = {name.replace(stored, name_of): g for name, g in grads.items()}
    for name, p in ours.named_parameters():
        for hf_name, part in recipe.split(name, p.grad) if p.requires_grad else ():
            mine, expected = part, grads.pop(hf_name)
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item(), msg=hf_name)
    assert not grads
    changed = batch.tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 80
    again = ours(changed, batch.positions, batch.documents)
    assert torch.equal(again[0, 5:15], hidden[0, 5:15]) and not torch.equal(again[0, 2:5], hidden[0, 2:5])
    export_weights(tmp_path / "out", ((n, p.data) for n, p in ours.named_parameters()), recipe, hf, base=folder)
    base, out = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert base.keys() == out.keys() and all(torch.equal(base[name], out[name]) for name in base)
    assert (folder / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_qwen_through_transformers(wholes):
    """Tokens with three positions each: packed documents are separated by a fourth."""
    folder, theirs = wholes["qwen2_5_vl"]
    hf = json.loads((folder / "config.json").read_text())
    ours, recipe = load(folder, hf, "transformers", torch.float32, 0)
    materialise(ours, recipe)
    batch = packed(ROWS, 16, 80)
    logits = ours.head.logits(ours(batch.tokens, batch.positions, batch.documents))
    torch.testing.assert_close(logits[0, 5:12], reference_alone(theirs, batch)[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("case", "dtype"), further([
    ("mistral3", "bfloat16"), ("gemma4", "float32"), ("llama4", "float32"), ("gemma3", "float32"),
    ("qwen3_5", "float32"),
], 2))  # fmt: skip
def test_a_run_with_adapters(case, dtype, wholes, tmp_path):
    """The merged export and the adapter on the whole model compute the same; towers keep their bytes."""
    folder, _ = wholes[case]
    make_golden.write_documents(tmp_path / "text.jsonl", False)
    sets = [f"model.path={folder}", "train.steps=2", "optim.lr=0.05", f"model.dtype={dtype}"]
    more = ["experts"] if case == "llama4" else []
    lora = {"rank": 2, "targets": ["q_proj", "v_proj", *more], "save": ["norm"]}
    config = golden_run(tmp_path, packed=True, sets=sets, lora=lora)
    from optrush.trainer.run import RunRequest, run

    assert run(RunRequest(decide(config))).code == 0
    out = Path(config.output)
    base, merged = (load_file(place / "model.safetensors") for place in (folder, out / "model"))
    assert base.keys() == merged.keys()
    same = {name for name in base if torch.equal(base[name], merged[name])}
    assert {name for name in base if "vision" in name or "projector" in name} <= same
    moved = {name for name in base if name not in same}
    if dtype == "float32":
        assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "norm", *more}
    assert (out / "model" / "preprocessor_config.json").read_text() == '{"size": 28}'
    ids = torch.arange(12)[None] + 3
    with torch.no_grad():
        full = AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32).eval()
        fresh = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        before = fresh(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(fresh, out / "adapter").eval()
        assert not [n for n, _ in adapted.named_parameters() if "lora" in n and "language_model" not in n]
        if dtype == "float32":  # else the sums were rounded
            want = full(input_ids=ids).logits
            torch.testing.assert_close(adapted(input_ids=ids).logits, want, rtol=1e-5, atol=1e-5)
        assert (full(input_ids=ids).logits - before).abs().max() > 0.01
    done = exporting.export_run(out, tmp_path / "again")
    assert done.compared is not None and done.compared.sound


def seen(config: Any) -> dict[str, torch.Tensor]:
    """Two words around one image of four patches, which merge to one token."""
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    config.vision_start_token_id, config.image_token_id, config.vision_end_token_id = 76, 77, 78
    ids, kinds = torch.tensor([[5, 76, 77, 78, 7]]), torch.tensor([[0, 0, 1, 0, 0]])
    patches = torch.randn(4, values, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_8_bit_floats_leave_towers_alone(case, wholes, tmp_path):
    """Each linear has a scale or is in `ignore`, by the names of the files and of transformers' modules; towers keep
    their bytes; the values with their scales are a model that reads an image.
    """
    folder, theirs = wholes[case]
    if case == "llama4":
        with pytest.raises(NeedsError, match="all experts of a layer"):
            write_fp8(folder, tmp_path)
        return
    done = write_fp8(folder, tmp_path)
    base, narrow = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    scaled = {name.removesuffix(".weight_scale") for name in narrow if name.endswith("_scale")}
    ignored = set(json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"])
    assert len(scaled) == done > 0 and not scaled & ignored
    for name, t in base.items():
        module = name.removesuffix(".weight")
        assert narrow[name].dtype == torch.float8_e4m3fn if module in scaled else torch.equal(narrow[name], t), name
        assert module not in scaled or "language_model" in name or (".layers." in name and "vis" not in name), name
    modules = {name for name, m in theirs.named_modules() if isinstance(m, torch.nn.Linear)}
    towers = {name for name in modules if not name.startswith((PREFIX, "lm_head", "language_model."))}
    assert towers <= ignored and towers
    text = {name for name in modules - ignored if ".layers." in name or ".blocks." in name}
    assert text == modules - ignored and len(text) <= done
    if case in ("qwen3_5", "qwen3_vl"):
        values = {
            n: t.float() * narrow[f"{n}_scale"].float() if f"{n}_scale" in narrow else t for n, t in narrow.items()
        }
        shutil.copytree(folder, tmp_path / "wide")
        save_file(
            {n: t for n, t in values.items() if not n.endswith("_scale")}, tmp_path / "wide" / "model.safetensors",
            metadata={"format": "pt"},
        )  # fmt: skip
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / "wide", dtype=torch.float32).eval()
        with torch.no_grad():
            got, want = (model(**seen(model.config)).logits for model in (again, theirs))
        assert 0 < (got - want).abs().mean() < 0.4 * want.abs().mean()


def test_new_tokens(wholes, tmp_path):
    for case in ("gemma3", "gemma4", "mistral3"):
        folder, _ = wholes[case]
        make_golden.write_documents(tmp_path / "text.jsonl", False)
        sets = [f"model.path={folder}", "model.add_tokens=[<new>]"]
        trainer = assembled(golden_run(tmp_path, packed=True, sets=sets))
        assert trainer.hf["text_config"]["vocab_size"] == trainer.model.embedding.weight.shape[0] == 128
        named = ((n, p.data) for n, p in trainer.model.named_parameters())
        export_weights(tmp_path / case, named, trainer.weight_map, trainer.hf, base=folder)
        again = load_plain(tmp_path / case, torch.float32, torch.device("cpu"))
        assert again.config.text_config.vocab_size == 128 == len(again.get_input_embeddings().weight)


def test_layers_that_predict_further_tokens(wholes, tmp_path):
    folder, _ = wholes["kimi_k25"]
    shutil.copytree(folder, tmp_path / "base")
    file, extra = tmp_path / "base" / "model.safetensors", "language_model.model.layers.2.eh_proj.weight"
    save_file({**load_file(file), extra: torch.randn(3, 5)}, file, {"format": "pt"})
    hf = json.loads((folder / "config.json").read_text())
    ours, recipe = load(tmp_path / "base", hf, None, torch.float32, 0)
    materialise(ours, recipe)
    named = ((n, p.data) for n, p in ours.named_parameters())
    export_weights(tmp_path / "out", named, recipe, hf, base=tmp_path / "base")
    assert extra in load_file(tmp_path / "out" / "model.safetensors")
    load_plain(tmp_path / "out", torch.float32, torch.device("cpu"))


def test_a_file_without_the_language_model(wholes, tmp_path):
    folder, _ = wholes["mistral3"]
    shutil.copytree(folder, tmp_path / "base")
    hf = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    towers = {name: t for name, t in tensors.items() if "language_model" not in name}
    save_file(towers, tmp_path / "base" / "model.safetensors")
    with pytest.raises(NeedsError, match="no tensor of its embedding"):
        load(tmp_path / "base", hf, None, torch.float32, 0)
    hf["text_config"]["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(NeedsError, match="method awq"):
        load(None, hf, None, torch.float32, 0)


def test_a_text_config_that_leaves_keys_out():
    """Whose defaults each class has: transformers computes it then, but for Llama in LLaVA, as it is published."""
    text = {key: value for key, value in TEXT.items() if key != "hidden_size"}
    hf = {"model_type": "llava", "vision_config": TOWER, "text_config": {**text, "model_type": "llama"}}
    assert native_obstacle(hf) is None and ModelShape.read(hf).width == CONFIG_MAPPING["llama"]().hidden_size
    hf = {"model_type": "llava", "vision_config": TOWER, "text_config": {**text, "model_type": "qwen2"}}
    assert native_obstacle(hf) == "hidden_size is not in its text_config"
    with pytest.raises(NeedsError, match="hidden_size"):
        ModelShape.read(hf)


@pytest.mark.parametrize("content", [[{"type": "image"}, {"type": "text", "text": "w1 w2"}], None])
def test_rows_with_images(content, wholes, tmp_path):
    turns = [{"role": "user", "content": content or "w1"}, {"role": "assistant", "content": "w3"}]
    row = {"messages": turns, **({} if content else {"images": ["a.png"]})}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    sets = [f"model.path={wholes['mistral3'][0]}"]
    with pytest.raises(DataError, match="image"):
        assembled(golden_run(tmp_path, make_golden.CASES["chat"], packed=True, sets=sets))
