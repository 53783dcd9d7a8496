"""R3, R4, R15, R16 through the command line: what a run must refuse, and what it must say."""

import json
import shutil

import pytest

from optrush.trainer.checkpoint import find_checkpoints

from harness import ended, told
from runs import begun, configuration, figures, held, lines, said, trained, trained_on, wait_for, weights
from test_kill import DDP


def copy(home, name):
    """The reference's folder under another name, and its configuration."""
    shutil.copytree(home / "reference", home / name)
    return home / name, configuration(home, home / name)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_newest_one_is_passed_over_aloud(home, ranks):
    """R3: said, written into the metrics, and the run ends as if nothing had happened."""
    output, config = copy(home, f"damaged-{ranks}")
    if ranks > 1:
        config = configuration(home, output, **{"with": DDP})
    flip(output / "checkpoints" / "step-000012" / "rank-0.safetensors")
    codes = trained_on(2, config, "--resume", "auto") if ranks > 1 else [trained(config, "--resume", "auto")]
    assert codes == [0] * ranks, said(config)
    assert "step-000012" in said(config) and "rank-0.safetensors does not match" in said(config)
    (told_,) = [m["passed_over"] for m in lines(output) if "passed_over" in m]
    assert told_[0]["checkpoint"] == "step-000012"
    if ranks == 1:
        assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_intact_one(home, ranks):
    """R4: exit 2 on every rank, and nothing is touched."""
    output, config = copy(home, f"none-intact-{ranks}")
    if ranks > 1:
        config = configuration(home, output, **{"with": DDP})
    for path in find_checkpoints(output):
        flip(path / "manifest.json")
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    codes = trained_on(2, config, "--resume", "auto") if ranks > 1 else [trained(config, "--resume", "auto")]
    assert codes == [2] * ranks, said(config)
    assert "no checkpoint is intact" in said(config) and "train.overwrite" in said(config)
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before
    path = find_checkpoints(output)[1]
    assert trained(configuration(home, output), "--resume", str(path)) == 2
    assert f"the checkpoint {path}" in said(config)


def test_from_an_older_one_by_name(home):
    output, config = copy(home, "older")
    assert trained(config, "--resume", str(output / "checkpoints" / "step-000009")) == 0, said(config)
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")


def other_config(model):
    config = json.loads((model / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (model / "config.json").write_text(json.dumps(config))


def other_tokenizer(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def other_template(model):
    (model / "chat_template.jinja").write_text("{{ messages }}")


def other_data(model):
    path = model.parent / "data.jsonl"
    path.write_text(path.read_text() + '{"text": "w1 w2 w3"}\n')


CHANGES = {"config": other_config, "tokenizer": other_tokenizer, "template": other_template, "data": other_data}


@pytest.mark.parametrize("field", CHANGES)
def test_another_model_or_data_at_resume(home, tmp_path, field):
    """R15: exit 2 naming the field; allowed by name, it goes on."""
    for name in ("model", "reference"):
        shutil.copytree(home / name, tmp_path / name)
    shutil.copy(home / "data.jsonl", tmp_path)
    output, rows = tmp_path / "reference", str((tmp_path if field == "data" else home) / "data.jsonl")
    config = configuration(tmp_path, output, train__steps=13, data__path=rows)
    CHANGES[field](tmp_path / "model")
    before = (output / "metrics.jsonl").read_bytes()
    assert trained(config, "--resume", "auto") == 2, said(config)
    found = "`data` changed: " if field == "data" else f"`{field}` was"
    assert found in said(config) and f"--allow-change {field}" in said(config), said(config)
    assert (output / "metrics.jsonl").read_bytes() == before
    if field == "tokenizer":
        assert "tokenizer.json or tokenizer_config.json changed: the same rows have other tokens" in said(config)
    if field in ("data", "tokenizer"):
        assert trained(config, "--resume", "auto", "--allow-change", field) == 0, said(config)
        assert figures(output)[-1]["step"] == 13
    told("R15", 1, field)


def test_other_steps_at_resume(home):
    """Another cut of the data would lose samples or repeat them; with fewer steps the checkpoint lies past the end."""
    _, config = copy(home, "other-steps")
    for change, text in (
        ("batch.tokens=1024", "`order` was seed"), ("seed=1", "and is seed 1, "),
        ("train.steps=7", "this run has 7 steps, the checkpoint was saved after step 12"),
    ):  # fmt: skip
        assert trained(config, "--resume", "auto", "--set", change) == 2, said(config)
        assert text in said(config)
    allow = ("--resume", "auto", "--allow-change", "order")
    assert trained(config, *allow, "--set", "batch.tokens=1024", "--set", "train.steps=14") == 0, said(config)
    assert figures(home / "other-steps")[-1]["step"] == 14


def test_two_runs_in_one_folder(home):
    """R16: the second is refused, whether it begins, resumes or cleans; the first ends as if alone."""
    output = home / "shared"
    config = configuration(home, output)
    pid = begun(config, before=held(4, home / "refused"))
    wait_for(output, 1)
    second = home / "second.yaml"
    second.write_text(config.read_text())
    for flags in ([], ["--resume", "auto"], ["--set", "train.overwrite=true"]):
        assert trained(second, *flags) == 2, said(second)
    assert "another run is using it" in said(second) and "the folder has a run" in said(second)
    (home / "refused").touch()
    assert ended(pid) == 0, said(config)
    assert figures(output) == figures(home / "reference") and weights(output) == weights(home / "reference")


def test_a_run_is_not_overwritten(home):
    """R16: exit 2 and nothing touched; `train.overwrite` replaces it; --resume goes on."""
    output, config = copy(home, "there")
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    assert trained(config) == 2
    assert "--resume auto" in said(config) and "train.overwrite" in said(config)
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before
    assert trained(config, "--set", "train.overwrite=true", "--set", "seed=1") == 0, said(config)
    assert figures(output) != figures(home / "reference") and len(figures(output)) == 12
    (output / "thesis.tex").write_text("")
    assert trained(config, "--set", "train.overwrite=true") == 2
    assert "thesis.tex" in said(config)


def test_where_nothing_can_be_written(home):
    (home / "file").write_text("")
    config = configuration(home, home / "unwritable", output=str(home / "file" / "run"))
    assert trained(config) == 2
    assert "is not a folder" in said(config) and "Traceback" not in said(config)
    odd = home / "ünï côde ☃" / ("long " * 30)
    odd.parent.mkdir()
    config = configuration(home, home / "odd", output=str(odd))
    assert trained(config) == 0, said(config)
    assert weights(odd) == weights(home / "reference")
