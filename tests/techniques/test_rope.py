"""Rotary positions of each kind: transformers' own model with the same settings, trained and exported; refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshes import MeshCase, further, play, prove
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.models.decoder import Decoder, frequencies
from optrush.models.shapes import ModelShape
from optrush.techniques.rope import Rope
from optrush.trainer import run as fit

from golden import make_golden
from golden.make_golden import CASES, SIZES
from trials import apart, assembled, golden_run, published

# What transformers gets for each set of options, of a model of 64 positions and theta 1000.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "base": ({"kind": "base", "base": 250.0}, {"rope_type": "default", "rope_theta": 250.0}, 64),
    "linear": ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}, 256),
    "yarn": (
        {"factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 64},
        256,
    ),
    "yarn of another base": (
        {"kind": "yarn", "factor": 2.5, "base": 90.0},
        {"rope_type": "yarn", "factor": 2.5, "rope_theta": 90.0, "original_max_position_embeddings": 64},
        160,
    ),
    "dynamic": ({"kind": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}, 64),
}


def theirs(folder: Path, settings: dict[str, Any], positions: int) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters, config.max_position_embeddings = settings, positions
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("implementation", further(["native", "transformers"], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient_are_those_of_transformers(box, kind, implementation):
    """Of packed documents, and of each alone there; and each kind is another model than the plain one."""
    options, settings, positions = KINDS[kind]
    folder, path = make_golden.places(box, CASES["untied"])
    model = theirs(folder, settings, positions)
    documents = make_golden.read_documents(folder, path)
    want, _ = make_golden.window(model, [documents[i] for i in next(make_golden.order())])
    grads = {n: p.grad for n, p in model.named_parameters()}
    sets = (f"model={json.dumps({'path': str(folder), 'implementation': implementation})}",)
    job = assembled(golden_run(box, packed=True, sets=sets, rope=options))
    assert isinstance(job.model, Decoder) == (implementation == "native")
    loss, found = published(job)
    assert loss == pytest.approx(want, rel=1e-5)
    assert found.keys() == grads.keys() and max(apart(found[n], grads[n]) for n in grads) < 1e-5
    plain, _ = published(assembled(golden_run(box, packed=True, sets=sets)))
    assert (abs(plain - loss) > 1e-4) == (kind != "dynamic")  # no row here is longer than the positions


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "dynamic"])
def test_frequencies_are_those_of_transformers_bit_by_bit(kind):
    options, settings, positions = KINDS[kind]
    for old in (False, True):
        hf = {**SIZES, "hidden_size": 512, "head_dim": 128, "rms_norm_eps": 1e-6}
        if not old:
            hf["rope_parameters"] = {"rope_type": "default", "rope_theta": hf.pop("rope_theta")}
        assert Rope(**options).config(hf) == 1
        assert (
            hf["rope_parameters"] == settings and hf["max_position_embeddings"] == positions and "rope_theta" not in hf
        )
        shape = ModelShape.read(hf)
        wanted = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf)).model.rotary_emb
        torch.testing.assert_close(frequencies(shape.rope, 128), wanted.inv_freq, rtol=1e-6, atol=0)
        assert shape.rope.scale == pytest.approx(wanted.attention_scaling)


def test_a_run_exports_what_it_trained(box, tmp_path):
    """Logits of the exported model, as transformers opens it, far beyond the old positions."""
    options, settings, positions = KINDS["yarn"]
    sets = (f"output={tmp_path / 'run'}", "train.steps=2", "batch.seq=96", "batch.tokens=768", "batch.micro_tokens=192")
    assert fit.run(fit.RunRequest(decide(golden_run(box, sets=sets, rope=options)))).code == 0
    written = json.loads((tmp_path / "run/model/config.json").read_text())
    assert written["rope_parameters"] == settings and written["max_position_embeddings"] == positions
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    shutil.copytree(tmp_path / "run/model", tmp_path / "plain")
    plain = theirs(tmp_path / "plain", settings, positions)
    ids = torch.arange(200)[None] % 70
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(NeedsError, match="'yarn' already"):
        decide(golden_run(box, sets=(f"model={tmp_path / 'run/model'}",), rope=options))


@pytest.mark.slow
def test_two_ranks_and_recomputation(box, pair, reference):
    with_ = {"rope": {"factor": 4.0}}
    more = {"fsdp": {}, "recompute": {}, "attention": {}, "fused-kernels": {"mlp": "none", "rope": True}}
    prove(box, pair, MeshCase(2, {**with_, **more}, base=with_), reference)
    assert play(box, MeshCase(1, {}), {}).losses != play(box, MeshCase(1, {}), with_).losses


@pytest.mark.parametrize(
    ("options", "changed", "said"),
    [({}, {}, "no factor"), ({"kind": "base"}, {}, "no base"),
     ({"kind": "base", "base": 9.0, "factor": 2.0}, {}, "does not use"),
     ({"kind": "linear", "factor": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear' already"),
     ({"factor": 2.0}, {"model_type": "phi3"}, "a model of type 'phi3', which has default, longrope"),
     ({"factor": 2.0}, {"max_position_embeddings": None}, "no max_position_embeddings"),
     ({"factor": 2.0}, {"model_type": "gpt2", "rope_theta": None}, "no rotary positions"),
     ({"factor": 2.0}, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers")],
)  # fmt: skip
def test_what_it_refuses(options, changed, said):
    hf = {key: value for key, value in (SIZES | changed).items() if value is not None}
    with pytest.raises(UserError) as refused:
        Rope(**options).config(hf)
    assert said in refused.value.found and refused.value.do and isinstance(refused.value, ConfigError | NeedsError)


def test_another_base_keeps_the_scale():
    hf = {**SIZES, "rope_scaling": {"type": "linear", "factor": 2.0}}
    Rope(kind="base", base=5e5).config(hf)
    assert hf["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
