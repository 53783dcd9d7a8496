"""Hostile files and disks: exit code 2 in three lines that name the place, or accepted and right."""

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from meshes import further
from optrush.models.config_json import read_config_json

from hostile import LIMIT_S, Box, called, within

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))
from payloads import corpus, verdict


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return Box(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def _alone(box, monkeypatch):
    monkeypatch.chdir(box.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def refused(ended: Any, *says: str) -> None:
    assert ended.refused, ended
    for part in says:
        assert part in ended.err, f"{part!r} is not in\n{ended.err}"


# --- config.json: values of a wrong type or size

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text for a size": ({"hidden_size": "64"}, "hidden_size"),
    "null for a size": ({"num_attention_heads": None}, "num_attention_heads"),
    "text for a number": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "null for a number": ({"rms_norm_eps": None}, "rms_norm_eps"),
    "no finite number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "text for a window": ({"sliding_window": "x"}, "sliding_window"),
    "an unknown activation": ({"hidden_act": "foo"}, "hidden_act"),
    "a list for a text": ({"model_type": ["llama"]}, "model_type"),
    "401 digits": ({"hidden_size": 10**400}, "hidden_size"),
    "401 digits under any key": ({"anything": {"deep": [10**400]}}, "anything.deep"),
    "a text for a mapping": ({"rope_scaling": "x"}, "rope_scaling"),
    "in a mapping": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_parameters.rope_theta"),
    "a mapping a kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": 3}}}, "rope_parameters.full_attention.rope_type",
    ),
    "a number for a list": ({"architectures": 3}, "architectures"),
    "a number for kinds of layers": ({"layer_types": 5}, "layer_types"),
    "a text for a switch": ({"tie_word_embeddings": "x"}, "tie_word_embeddings"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings"),
}  # fmt: skip


UNPLANNED = "an unknown activation"  # a plan counts bytes, and has no table of activations


@pytest.mark.parametrize(
    ("name", "verb"),
    [(name, verb) for name in WRONG for verb in ("train", "plan") if (name, verb) != (UNPLANNED, "plan")],
)
def test_a_wrong_value_in_config_json(name, verb, box):
    changes, key = WRONG[name]
    refused(called(verb, box.write(model=str(box.edited(**changes)))), "edited/config.json", key)
    assert not (box.folder / "out").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 5000, '{"a": ' + "9" * 5000 + "}", "\x00", '{"a": "\\ud8'])
def test_a_config_json_that_is_none(text, box):
    refused(called("train", box.write(model=str(box.edited(text)))), "edited/config.json", "not JSON")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]"])
def test_a_generation_config_that_is_none(text, box, tmp_path):
    folder = box.edited()
    (folder / "generation_config.json").write_text(text)
    model, data = {"path": str(folder), "chat_template": "chatml"}, {"path": str(box.folder / "chat.jsonl")}
    config = box.write(model=model, data=data, objective="sft", output=str(tmp_path / "out"))
    refused(called("train", config), "edited/generation_config.json", "download the model again")


def test_a_large_or_deep_config_json(box):
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    refused(called("plan", box.write(model=str(box.edited(a=deep)))), "32 nested mappings")
    refused(called("plan", box.write(model=str(box.edited(" " * (17 << 20))))), "17825792 bytes")


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_more_layers_than_the_files_have(implementation, box):
    """Refused at once, with the size that it would be; nothing is built."""
    folder = box.edited(num_hidden_layers=1_000_000)
    ended = called("train", box.write(model={"path": str(folder), "implementation": implementation}))
    refused(ended, "1,000,000 layers", "393,600,393,408 parameters", "38 tensors", "config.json fits the weights")


def test_a_model_to_talk_to(box):
    """The verbs that read a folder through transformers refuse it the same way."""
    prompts = box.folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Soup"}\n')
    for changes, key in ({"hidden_size": "64"}, "hidden_size"), ({"num_hidden_layers": 10**6}, "1,000,000 layers"):
        ended = called("generate", str(box.edited(**changes)), "--prompts", str(prompts), "--out", "answers.jsonl")
        refused(ended, key)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None, "head_dim": None, "rope_scaling": None, "attention_bias": None, "use_cache": None},
        {"eos_token_id": [1, 2], "pad_token_id": -1, "initializer_range": 1, "unheard_of": {"a": [1.5, "x", None]}},
    ],
)
def test_values_that_are_right(changes, box):
    folder = box.edited(**changes)
    assert read_config_json(folder / "config.json").items() >= changes.items()


# --- YAML

TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nested lists": ("model: " + "[" * 1000 + "]" * 1000, ("run.yaml:1", "more than 32 levels of nested mappings")),
    "nested mappings": ("".join(" " * i + "a:\n" for i in range(300)), ("run.yaml:32", "more than 32")),
    "never closed": ("{a: " * 20_000, ("run.yaml:1", "more than 32")),
    "a list as a key": ("seed: 1\n? [a, b]\n: 1", ("run.yaml:2", "a list or a mapping as a key", "give each key")),
    "a mapping as a key": ("{a: b}: 1", ("run.yaml:1", "a list or a mapping as a key")),
    "10 MB": ("".join(f"k{i}: 1\n" for i in range(1_000_000)), ("run.yaml", "10,888,890 characters", "data.path")),
    "an alias of itself": ("seed: &x [*x]", ("run.yaml:1", "the alias *x")),
    "a tag that its value is not of": ("seed: !!bool x", ("run.yaml:1", "`x` does not match its tag")),
    "a time that is none": ("seed: !!timestamp x", ("run.yaml:1", "`x` does not match its tag")),
    "an empty number": ("seed: !!int ''", ("run.yaml:1", "does not match its tag")),
    "a text tag on a mapping": ("seed: !!str {a: 1}", ("run.yaml:1", "the tag tag:yaml.org,2002:str")),
    "a tag on a key": ("? !!python/object:os.system a\n: 1", ("run.yaml:1", "python/object:os.system")),
    "5,000 digits": ("seed: " + "9" * 5000, ("run.yaml:1", " characters) ... ")),
    "half a character": ('output: "a\\ud800"', ("run.yaml:1", "\\ud800", "remove that character")),
    "a NUL in a path": ('output: "a\\0b"', ("run.yaml:1", "\\x00", "remove that character")),
    "a bracket in a key": ('"a[0]": 1', ("run.yaml:1: `a[0]`", "no such key")),
    "the name of a type as a key": ("int: 1", ("run.yaml:1: `int`", "no such key")),
    "digits in a directive": ("%YAML " + "9" * 5000 + ".1\n---\na: 1", ("run.yaml", "not YAML")),
    "a line break in a key": ('"a\\nb": 1', ("run.yaml:1: `a\\nb`", "no such key")),
}


@pytest.mark.parametrize("name", TEXTS)
def test_yaml(name, box):
    text, says = TEXTS[name]
    ended = called("train", box.write(text))
    refused(ended, *says)
    assert max(map(len, ended.err.splitlines())) < 1100


def test_many_names_of_files(tmp_path):
    """Shards by their names are read; so is what a run writes of them, however long absolute names make it."""
    from optrush.config import dump_config, parse_config
    from optrush.errors import ConfigError
    from optrush.restore import open_run

    names = [f"{tmp_path}/{'corpus/' * 40}shard-{i:06}.parquet" for i in range(1200)]
    text = f"model: tiny\nobjective: pretrain\noutput: out\ndata:\n  path: {json.dumps(names)}\n"
    assert len(text) > 350_000
    config = parse_config(text, "run.yaml")
    assert config.data.path == tuple(names)
    long = config.model_copy(
        update={"data": config.data.model_copy(update={"path": tuple(f"/{'x/' * 450}{n}" for n in names)})}
    )
    (tmp_path / "run.yaml").write_text(dump_config(long))
    assert open_run(tmp_path)[1] == long
    with pytest.raises(ConfigError, match="characters; the limit is 1,048,576"):
        parse_config(dump_config(long), "run.yaml")


@pytest.mark.parametrize(
    "line", further(["  - /corpus/of/many/shards/{i:06}.parquet\n", "'", "k{i}: 1\n", "- 1\n", "- x\n\n", "# x\n"], 1)
)
def test_the_longest_yaml_is_read_soon(line):
    from optrush.config import LONGEST_YAML, parse_yaml
    from optrush.errors import ConfigError

    text = ("" if line.startswith("k") else "a:\n") + "".join(
        line.format(i=i) for i in range(LONGEST_YAML // len(line))
    )
    with within(LIMIT_S), suppress(ConfigError):  # it takes about 1 s
        parse_yaml(text[:LONGEST_YAML], "run.yaml")


def test_more_values_than_are_read(box):
    ended = called("train", box.write("a:\n" + "- 1\n" * 50_000))
    refused(ended, "run.yaml:49999", "more than 50,000 values and keys", "data.path")


def test_flags_take_the_same_values(box):
    """What is no value of YAML is a text, as a pattern of names is; a tag is refused."""
    refused(called("train", box.write(), "--set", "seed=" + "[" * 1000), "--set seed=", "`seed`", "give a whole number")
    refused(called("train", box.write(), "--set", "seed=!!python/object:os.system x"), "python/object")
    refused(called("train", box.write(), "--set", "data.path=*.nothing"), "*.nothing")


def test_a_card_that_is_a_bomb(tmp_path):
    """The front matter of the base's README is of strangers too; its licence is left out, and the card is written."""
    from optrush.model_card import _licence

    for text in ("a: " + "[" * 5000, "a: &a [1]\nlicense: *a", "license: mit\nb: !!python/object:os.system x", "[1]"):
        (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
        assert _licence(tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags:\n- x\n---\n")
    assert _licence(tmp_path) == "mit"
    assert json.dumps(_licence(tmp_path))


# --- the output folder: nothing is written through a link out of it, and nothing that the run reads is overwritten
@pytest.mark.parametrize(
    "name",
    ["report.html.tmp", "loss.png", "metrics.jsonl", "run.yaml", ".lock", "checkpoints", "tensorboard/x", "tracker"],
)
def test_a_link_out_of_the_output(name, box, tmp_path):
    target, output = tmp_path / "target", tmp_path / "out"
    if name in ("checkpoints", "tracker"):
        target.mkdir()
    else:
        target.write_text("mine")
    (output / name).parent.mkdir(parents=True)
    (output / name).symlink_to(target)
    refused(called("train", box.write(output=str(output))), name if name == ".lock" else f"{name} is a symbolic link")
    assert {p.name for p in output.iterdir()} == {name.partition("/")[0]}
    assert list(target.iterdir()) == [] if target.is_dir() else target.read_text() == "mine"


def test_links_of_other_programs(box, tmp_path):
    """The output may be a link, as to a larger disk, and links within it may lead to its own files; a tracker keeps
    links to its own cache in its folder, and what optrush does not write is not examined either."""
    output, disk = tmp_path / "out", tmp_path / "disk"
    (disk / "tracker").mkdir(parents=True)
    (disk / "tracker" / "latest").symlink_to("../tracker")
    output.symlink_to(disk)
    config = box.write(output=str(output), train={"steps": 1, "export": False})
    assert (ended := called("train", config)).code == 0, ended
    for name in ("tracker/wandb/offline-run/logs/debug-core.log", "notes/plan"):
        (disk / name).parent.mkdir(parents=True)
        (disk / name).symlink_to(tmp_path / "elsewhere")
    assert (ended := called("train", config, "--resume", "auto")).code == 0, ended


@pytest.mark.parametrize("name", [".lock", "rungs/x.json", "report.html"])
def test_a_link_out_of_the_folder_of_a_bench(name, tmp_path):
    from types import SimpleNamespace

    from optrush.benchmark.runner import _check_folder
    from optrush.errors import ConfigError

    state: Any = SimpleNamespace(out=tmp_path / "out", asked="--out")

    (tmp_path / "out" / "rungs").mkdir(parents=True)
    (tmp_path / "out" / "notes").symlink_to(tmp_path)
    _check_folder(state, resume=True)
    (tmp_path / "out" / name).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="symbolic link"):
        _check_folder(state, resume=True)


def test_links_made_while_it_writes(tmp_path):
    """Each writer replaces a link, or refuses it; none writes where it leads."""
    from optrush.data.schema import RowLocation
    from optrush.data.tokenize import append_bad_rows
    from optrush.errors import DataError
    from optrush.files import open_to_append, write_whole

    target = tmp_path / "target"
    target.write_text("mine")
    for name in ("a", "a.tmp", "b"):
        (tmp_path / name).symlink_to(target)
    write_whole(tmp_path / "a", "ours")
    assert (tmp_path / "a").read_text() == "ours" and not (tmp_path / "a").is_symlink()
    with pytest.raises(OSError, match="symbolic"):
        open_to_append(tmp_path / "b")
    with pytest.raises(OSError, match="symbolic"):
        append_bad_rows(tmp_path / "b", [(RowLocation(Path("x"), 1), DataError("a", "b", "c"))])
    assert target.read_text() == "mine"


def test_the_report_and_the_curve_replace_links(box, tmp_path):
    output, target = tmp_path / "out", tmp_path / "target"
    assert called("train", box.write(output=str(output))).code == 0
    target.write_text("mine")
    for name in ("report.html", "report.html.tmp"):
        (output / name).unlink(missing_ok=True)
        (output / name).symlink_to(target)
    assert called("report", str(output)).code == 0
    assert target.read_text() == "mine" and "<html" in (output / "report.html").read_text()


READ = {
    "an adapter to begin with": ("adapter/adapter_config.json", {"with": {"lora": {"init": "out/adapter"}}}),
    "data": ("metrics.jsonl", {"data": {"path": "out/metrics.jsonl"}}),
    "a pattern of data": ("quarantine.jsonl", {"data": {"path": "out/*.jsonl"}}),
    "held-out data": ("checkpoints/x.jsonl", {"data": {"path": "text.jsonl", "eval": "out/checkpoints/x.jsonl"}}),
    "contaminated data": (
        "quarantine.jsonl", {"data": {"path": "text.jsonl", "clean": {"decontaminate": "out/quarantine.jsonl"}}},
    ),
    "a template": ("model/t.jinja", {"model": {"path": "model", "chat_template": "out/model/t.jinja"}}),
    "a tokenizer": ("model/tokenizer.json", {"model": {"shape": "llama-3.2-1b", "tokenizer": "out/model"}}),
    "the folder itself": ("x.jsonl", {"data": {"path": "out"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_run_does_not_overwrite_what_it_reads(name, box, tmp_path, monkeypatch):
    from optrush.config import parse_config
    from optrush.decide import Decided
    from optrush.errors import ConfigError
    from optrush.trainer.run import check_run_output

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(box.model)
    (tmp_path / "text.jsonl").symlink_to(box.folder / "text.jsonl")
    file, changes = READ[name]
    (tmp_path / "out" / file).parent.mkdir(parents=True)
    (tmp_path / "out" / file).write_text('{"text": "Stir."}\n')
    config = parse_config(Path(box.write(**{"model": "model", "output": "out", **changes})).read_text(), "run.yaml")
    resolved: Any = Decided(config, [], None, None, {}, ())  # type: ignore[arg-type]
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match="and would write to it"):
            check_run_output(resolved, resume)


def test_an_output_in_the_folder_of_the_data(box, tmp_path):
    (tmp_path / "text.jsonl").write_bytes((box.folder / "text.jsonl").read_bytes())
    ended = called("train", box.write(data={"path": str(tmp_path)}, output=str(tmp_path / "runs" / "out")))
    refused(ended, "it is in", "would be read as data")
    assert not (tmp_path / "runs").exists()


# --- names are text
@pytest.mark.parametrize(
    "name", further(["a $b$ <script>alert(1)</script>", "-rf", "$x^$", "$\\frac{$", "${HOME}", "[red]x[/]"], 1)
)
def test_any_name_of_the_output(name, box, tmp_path):
    output = tmp_path / name.replace("/", "∕")
    ended = called("train", box.write(output=str(output)))
    assert ended.code == 0, ended
    assert (output / "loss.png").stat().st_size > 1000
    page = (output / "report.html").read_text()
    assert "<script>alert" not in page


def test_dollar_signs_in_charts():
    from optrush.report.page import BarRow, Series, bars_svg, curves, inline_svg

    text = "$x^$"
    figure = curves([Series(text, [(1, 2.0), (2, 1.0)]), Series("b$", [(1, 1.0)])], title=text, axis=text, unit=text)
    assert inline_svg(figure, text, text).count("$x^$") > 3
    assert "$x^$" in str(bars_svg(text, [BarRow(text, text, ((0.0, 1.0, "s0"),))], axis=text))


# --- what changed of the data since a checkpoint

ROWS = [{"text": f"Chop {i + 2} onions, fry them in butter and stir."} for i in range(12)]


@pytest.fixture(scope="module")
def begun(box, tmp_path_factory):
    """A run's folder with one checkpoint, and next to it what it read: rows.jsonl and held.jsonl."""
    folder = tmp_path_factory.mktemp("begun")
    for name, verb in (("rows.jsonl", "Chop"), ("held.jsonl", "Peel")):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS).replace("Chop", verb))
    ended = called("train", box.write(**of_two(folder)))
    assert ended.code == 0, ended
    return folder


def of_two(folder: Path) -> dict[str, Any]:
    data = {"path": str(folder / "rows.jsonl"), "eval": str(folder / "held.jsonl")}
    train = {"steps": 2, "export": False, "save_every": 1}
    return {"data": data, "train": train, "output": str(folder / "out")}


def test_a_file_that_changed(box, begun):
    before = (begun / "rows.jsonl").read_bytes()
    (begun / "rows.jsonl").write_bytes(now := before + b'{"text": "More."}\n')
    try:
        ended = called("train", box.write(**of_two(begun)), "--resume", "auto")
    finally:
        (begun / "rows.jsonl").write_bytes(before)
    changed = f"rows.jsonl: other content ({len(before):,} bytes then, {len(now):,} now)\n"
    refused(ended, f"`data` changed: {begun}/{changed}", "--allow-change data")
    assert "held.jsonl" not in ended.err


def test_files_and_keys_that_changed(box, begun):
    other = of_two(begun)
    (begun / "more.jsonl").write_text('{"text": "More."}\n')
    other["data"]["path"] = [other["data"]["path"], str(begun / "more.jsonl")]
    refused(
        called("train", box.write(**other), "--resume", "auto"), "more.jsonl was not read before", "`data.path` was",
    )  # fmt: skip
    other = of_two(begun)
    other["data"]["max_samples"] = 5
    ended = called("train", box.write(**other), "--resume", "auto")
    refused(ended, "`data` changed: `data.max_samples` was None and is 5\n")


def test_a_seed_that_changed(box, begun):
    """It draws what is held out as a share: other rows of the same files."""
    other = of_two(begun)
    other["data"]["eval"] = 0.4
    other |= {"output": str(begun / "share"), "seed": 1}
    assert called("train", box.write(**other)).code == 0
    refused(called("train", box.write(**other | {"seed": 2}), "--resume", "auto"), "`seed` was 1 and is 2\n")


def test_without_a_record(box, begun):
    """As a run of an earlier version left it: the digests, and not 64 digits of each."""
    record, rows = (begun / "out" / "data.json").read_bytes(), (begun / "rows.jsonl").read_bytes()
    (begun / "out" / "data.json").unlink()
    (begun / "rows.jsonl").write_bytes(rows * 2)
    try:
        ended = called("train", box.write(**of_two(begun)), "--resume", "auto")
    finally:
        (begun / "rows.jsonl").write_bytes(rows)
        (begun / "out" / "data.json").write_bytes(record)
    refused(ended, "`data` was ", "... and is ")
    assert max(map(len, ended.err.split())) < 64 + len(str(begun))


def test_keys_of_an_earlier_version(box, begun):
    """A key that a checkpoint does not have is no change where it has its default, in a nested part too."""
    from optrush.config import parse_config
    from optrush.trainer.run_dir import data_changes

    run = of_two(begun)
    run["data"]["clean"] = {"items": [{"field": "text"}]}
    config = parse_config(Path(box.write(**run)).read_text(), "run.yaml")
    before = {"path": run["data"]["path"], "eval": run["data"]["eval"], "clean": run["data"]["clean"], "left": 1}
    assert data_changes(begun / "out", config, {"data": before}) == ""
    assert data_changes(begun / "out", config, {"data": {**before, "split_turns": True, "most_bad": "x"}}) == (
        "`data.most_bad` was x and is 0.01; `data.split_turns` was True and is False; "
        "`data.clean` was {'items': [{'field': 'text'}]} and is " + str(config.data.clean.model_dump(mode="json"))
    )  # fmt: skip


def test_a_file_is_hashed_once_at_the_start(box, tmp_path, monkeypatch):
    """By no later start either, whatever its size; the record is written where the data changed."""
    import hashlib
    import os

    from optrush.trainer import run_dir

    hashed, digest, data, made = [], hashlib.file_digest, tmp_path / "rows.json", run_dir.readers.record_files
    recorded: list[int] = []
    data.write_text(json.dumps(ROWS))
    os.utime(data, (1, 1))
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: (hashed.append(Path(file.name).name), digest(file, name))[1]
    )
    monkeypatch.setattr(run_dir.readers, "record_files", lambda *given: (recorded.append(1), made(*given))[1])
    run = {"data": {"path": str(data)}, "train": {"steps": 1, "export": False}, "output": str(tmp_path / "out")}
    ended = called("train", box.write(**run))
    assert ended.code == 0 and hashed.count("rows.json") == 1 and recorded == [1], (ended, hashed)
    run["train"]["steps"] = 2
    ended = called("train", box.write(**run), "--resume", "auto")
    assert ended.code == 0 and hashed.count("rows.json") == 1 and recorded == [1], (ended, hashed)
    data.write_text(json.dumps(ROWS[:-1]))
    os.utime(data, (2, 2))
    run["train"]["steps"] = 3
    ended = called("train", box.write(**run), "--resume", "auto", "--allow-change", "data", "--allow-change", "order")
    assert ended.code == 0 and hashed.count("rows.json") == 2 and recorded == [1, 1], (ended, hashed)


def test_files_that_are_read_whole(tmp_path):
    from optrush.data.readers import record_changes, record_files

    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    then = record_files([str(tmp_path)], None)
    (tmp_path / "a.json").write_text('[{"text": "ab"}]')
    (said,) = record_changes(then, record_files([str(tmp_path)], None))
    assert said == f"{tmp_path}/a.json: other content (15 bytes then, 16 now)"


# --- the corpus: a part of it here, all of it in benchmarks/faults/security.py


PAYLOADS = corpus()


def test_the_corpus_is_large():
    kinds = {payload.kind for payload in PAYLOADS}
    assert len(PAYLOADS) >= 500 and len({(p.kind, p.name) for p in PAYLOADS}) >= len(PAYLOADS) - 5
    assert len(kinds) == 11, kinds


@pytest.mark.parametrize("payload", further(
    PAYLOADS[::36] + PAYLOADS[18::36], len(PAYLOADS[::36]),
), ids=lambda p: f"{p.kind}-{p.name}"[:60].encode("ascii", "replace").decode())  # fmt: skip
def test_a_payload(payload, box):
    wrong = verdict(payload, box)
    assert not wrong, wrong


# --- files that are none: a pipe, a device, the kernel's own; a link out of a model's folder
def replaced(path: Path, kind: str) -> None:
    """Put something that is no regular file in place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("verb", ["plan", "train", "eval", "data show", "import"])
@pytest.mark.parametrize("kind", ["pipe", "/proc/self/mem", "/dev/zero"])
def test_a_configuration_that_is_no_file(verb, kind, box, tmp_path):
    replaced(tmp_path / "run.yaml", kind)
    refused(called(*verb.split(), str(tmp_path / "run.yaml"), limit_s=10), "not a regular file", "run.yaml")


@pytest.mark.parametrize(("name", "kind"), [
    ("config.json", "pipe"), ("tokenizer.json", "pipe"), ("tokenizer_config.json", "pipe"),
    ("model.safetensors", "pipe"), ("model.safetensors.index.json", "pipe"), ("generation_config.json", "pipe"),
    ("README.md", "pipe"), ("tokenizer.json", "/dev/zero"), ("chat_template.jinja", "/etc/passwd"),
    ("chat_template.jinja", "../elsewhere"), ("config.json", "/proc/self/environ"), ("README.md", "/etc/passwd"),
    ("generation_config.json", "/nowhere"), ("additional_chat_templates/a.jinja", "/etc/passwd"),
    ("added_tokens.json", "/proc/kmsg"),
])  # fmt: skip
def test_a_file_of_a_model_that_is_none(name, kind, box, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(box.model, folder)
    (tmp_path / "elsewhere").write_text("{{ messages }}")
    (folder / name).parent.mkdir(exist_ok=True)
    replaced(folder / name, kind)
    says = "not a regular file" if kind == "pipe" else "a link to"
    for verb in (["train"], ["data", "show"]):
        refused(called(*verb, box.write(model=str(folder), output=str(tmp_path / "out")), limit_s=10), name, says)
    assert not (tmp_path / "out").exists()
    rows = ["--prompts", str(box.folder / "text.jsonl"), "--out", str(tmp_path / "answers.jsonl")]
    refused(called("generate", str(folder), *rows, limit_s=10), name, says)


def test_weights_may_be_links(box, tmp_path):
    """They are read, and never copied: a folder of links to weights on another disk is usual."""
    shutil.copytree(box.model, tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert called("train", box.write(model=str(tmp_path / "m"), output=str(tmp_path / "out"))).code == 0


def test_links_of_a_hubs_cache_stay_in_it(box, tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for n, file in enumerate(box.model.iterdir()):
        (repository / "blobs" / f"{n}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    (snapshot / "again.json").symlink_to("config.json")
    (tmp_path / "linked").symlink_to(snapshot)
    (snapshot / "sub").mkdir()
    for file in (repository / "blobs").iterdir():
        name = next(p.name for p in snapshot.iterdir() if p.name != "again.json" and p.resolve() == file)
        (snapshot / "sub" / name).symlink_to(f"../../../blobs/{file.name}")
    for folder, flags in ((snapshot, ["--dry-run"]), (tmp_path / "linked", ["--dry-run"]), (snapshot / "sub", [])):
        assert called("train", box.write(model=str(folder), output=str(tmp_path / "out-sub")), *flags).code == 0
    (tmp_path / "hub" / "other").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to("../../../other")
    refused(called("train", box.write(model=str(snapshot), output=str(tmp_path / "out"))), "a link to")


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize(("name", "changes"), [
    ("t.jsonl", {"data": {"path": "t.jsonl"}}), ("t.txt", {"data": {"path": "t.txt"}}),
    ("t.parquet", {"data": {"path": "t.parquet"}}), ("t.jsonl.gz", {"data": {"path": "t.jsonl.gz"}}),
    ("d/t.jsonl", {"data": {"path": "d"}}), ("t.jsonl", {"data": {"path": "text.jsonl", "eval": "t.jsonl"}}),
    ("t.jsonl", {"data": {"path": "*t.jsonl", "stream": True}, "train": {"steps": 1}}),
    ("t.jinja", {"model": {"path": "model", "chat_template": "t.jinja"}}),
])  # fmt: skip
def test_data_that_is_no_file(name, changes, kind, box, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(box.model)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(box.folder / "text.jsonl", tmp_path / "text.jsonl")
    replaced(tmp_path / name, kind)
    refused(called("train", box.write(**{"output": "out", **changes}), limit_s=10), "not a regular file", name)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run_of_two(box, tmp_path_factory):
    """A run with two checkpoints."""
    output = tmp_path_factory.mktemp("saved") / "out"
    assert called("train", box.write(output=str(output), train={"steps": 2, "save_every": 1})).code == 0
    return output


@pytest.mark.parametrize(("name", "code", "says"), further([
    ("checkpoints/step-000002/manifest.json", 0, ""), ("metrics.jsonl", 2, "a named pipe"), ("run.yaml", 0, ""),
    ("checkpoints/step-000002/rank-0.safetensors", 0, ""), ("checkpoints/best.json", 0, ""), ("data.json", 0, ""),
], 3))  # fmt: skip
def test_a_file_of_a_run_that_is_none(name, code, says, box, run_of_two, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(run_of_two, output)
    if name.endswith("safetensors"):
        name = next((output / name).parent.glob("*.safetensors")).relative_to(output).as_posix()
    replaced(output / name, "pipe")
    config = box.write(output=str(output), train={"steps": 2, "save_every": 1, "export": False})
    if "manifest" in name:
        refused(called("train", config, "--resume", str((output / name).parent), limit_s=10), "a named pipe")
    if name in ("metrics.jsonl", "run.yaml"):
        refused(called("report", str(output), limit_s=10), "named pipe")
    ended = called("train", config, "--resume", "auto", limit_s=20)
    assert ended.code == code and not ended.failure and says in ended.err, ended


# --- tokenizers whose unknown token is not in their vocabulary: the library raises bare exceptions

LETTERS = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz.,")}
WORDS = {"type": "Whitespace"}
LACKING: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, str]] = {
    "another class": (None, None, "GemmaTokenizerFast"),
    "WordLevel": ({"type": "WordLevel", "vocab": {"Chop": 0, "onions": 1}, "unk_token": "[UNK]"}, WORDS, ""),
    "WordPiece": (
        {"type": "WordPiece", "vocab": {"Chop": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100}, WORDS, "",
    ),
    "BPE": ({"type": "BPE", "vocab": LETTERS, "merges": [], "unk_token": "<nope>"}, WORDS, ""),
    "Unigram": ({"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]], "unk_id": None}, None, ""),
}  # fmt: skip


def lacking(box: Box, folder: Path, kind: str) -> Path:
    model, split, name = LACKING[kind]
    shutil.copytree(box.model, folder)
    engine = json.loads((folder / "tokenizer.json").read_text())
    if model is not None:
        engine |= {"model": model, "pre_tokenizer": split, "decoder": None, "normalizer": None}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(engine))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": name} if name else {})))
    return folder


@pytest.mark.parametrize("kind", LACKING)
def test_a_tokenizer_that_lacks_its_unknown_token(kind, box, tmp_path):
    folder = lacking(box, tmp_path / "m", kind)
    rows, out = str(box.folder / "text.jsonl"), str(tmp_path / "out")
    config = box.write(model=str(folder), output=out)
    for verb in (["train", config], ["train", config, "--dry-run"], ["data", "show", config]):
        refused(called(*verb), "text.jsonl:1", "the tokenizer fails", "model.tokenizer")
    refused(called("generate", str(folder), "--plain", "--prompts", rows, "--out", f"{out}.jsonl"), "text.jsonl:1")
    cleaned = box.write(model=str(folder), output=out, data={"path": rows, "clean": {"tokens": [2, None]}})
    refused(called("data", "clean", cleaned, "--out", out), "the row that begins 'Chop 2 onions", "the tokenizer fails")
    chatml = {"path": str(folder), "chat_template": "chatml", "add_tokens": ["<|new|>"]}
    refused(called("train", box.write(model=chatml, data={"path": rows}, output=out)), "the tokenizer fails")


def test_rows_that_such_a_tokenizer_reads(box, tmp_path):
    folder = lacking(box, tmp_path / "m", "WordLevel")
    texts = ["Chop onions", "Chop", "Boil onions", "onions Chop"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"path": str(tmp_path / "t.jsonl"), "bad_rows": "quarantine", "most_bad": 0.5}
    ended = called("train", box.write(model=str(folder), data=data, output=str(tmp_path / "out")))
    assert ended.code == 0, ended
    (bad,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(bad)["line"] == 3 and "Missing [UNK]" in bad


# --- a tokenizer as a bomb: ids and texts by which a library allocates memory
def tenfold(letter: str = "w") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * 10}


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def _nested(_: Any) -> str:
    return '{"normalizer": ' + '{"type": "Sequence", "normalizers": [' * 9000 + "]}" * 9000 + "}"


FAR = {"id": 2**31 - 1, "content": "<far>", "special": True} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
)
BOMBS: dict[str, tuple[str, Any, str]] = {
    "an id": ("tokenizer.json", lambda t: t["model"]["vocab"].update({"<far>": 2**31 - 1}), "the id 2,147,483,647"),
    "an added id": ("tokenizer.json", lambda tree: tree["added_tokens"].append(FAR), "the id 2,147,483,647"),
    "an id in the settings": (
        "tokenizer_config.json", lambda t: t.update(added_tokens_decoder={f"{2**31 - 1}": FAR}), "the id 2,147,483",
    ),
    "an id in a list": ("added_tokens.json", lambda tree: tree.update({"<far>": 2**30}), "the id 1,073,741,824"),
    "an id of a post-processor": ("tokenizer.json", lambda tree: tree.update(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<f>", "type_id": 0}}], "pair": [],
        "special_tokens": {"<f>": {"id": "<f>", "ids": [2**31 - 1], "tokens": ["<f>"]}},
    }), "the id 2,147,483,647"),
    "ten replacements": ("tokenizer.json", lambda t: t.update(_steps(*[tenfold()] * 10)), "10,000,000,000 times"),
    "replacements of any letter": (
        "tokenizer.json", lambda t: t.update(_steps(*[tenfold("é"), {"type": "Lowercase"}] * 8)), "times as long",
    ),
    "replacements by expression": ("tokenizer.json", lambda t: t.update(
        _steps(*[{"type": "Replace", "pattern": {"Regex": "\\h*"}, "content": "ww"}] * 6)
    ), "tokens of 1,307 characters"),
    "replacements in the decoder": ("tokenizer.json", lambda t: t.update(
        decoder={"type": "Sequence", "decoders": [tenfold()] * 10}
    ), "times as long"),
    "a prefix": (
        "tokenizer.json", lambda t: t.update(normalizer={"type": "Prepend", "prepend": "x" * 3_000_000}), "3,000,000",
    ),
    "a short prefix": (
        "tokenizer.json", lambda t: t.update(normalizer={"type": "Prepend", "prepend": "x" * 3_000}), "3,000 char",
    ),
    "1,001 normalizers": ("tokenizer.json", lambda t: t.update(_steps(*[{"type": "NFC"}] * 1001)), "1,001 entries"),
    "a suffix": ("tokenizer.json", lambda t: t["model"].update(end_of_word_suffix="x" * 90_000), "90,000 characters"),
    "nested": ("tokenizer.json", _nested, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_tokenizer_that_is_a_bomb(kind, box, tmp_path):
    name, change, says = BOMBS[kind]
    shutil.copytree(box.model, tmp_path / "m")
    file = tmp_path / "m" / name
    tree = json.loads(file.read_text()) if file.exists() else {}
    text = change(tree)
    file.write_text(text if isinstance(text, str) else json.dumps(tree))
    for verb in ("train", "data show"):
        ended = called(*verb.split(), box.write(model=str(tmp_path / "m"), output=str(tmp_path / "out")), limit_s=60)
        refused(ended, "the tokenizer of")
        assert re.search(says, ended.err), ended


def test_a_large_tokenizer_is_read_first(box, tmp_path, monkeypatch):
    """Within limits in a process of its own; the same files once."""
    from optrush.data import tokenizer

    shutil.copytree(box.model, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    tree = json.loads(file.read_text())
    words = tree["model"]["vocab"]
    words |= {f"a rather long word {n}": len(words) + n for n in range(40_000)}
    file.write_text(json.dumps(tree))
    counted: list[int] = []
    forked = tokenizer.pool.forked
    monkeypatch.setattr("optrush.tokenizer_files.LIGHT_bytes", 1 << 20)
    monkeypatch.setattr(tokenizer.pool, "forked", lambda *a: (counted.append(1), forked(*a))[1])
    for _ in range(2):
        assert len(tokenizer.open_tokenizer(tmp_path / "m")) > 40_000
    assert len(counted) == 1
    tree["normalizer"] = {"type": "Prepend", "prepend": "x" * 3000}
    file.write_text(json.dumps(tree))
    with pytest.raises(tokenizer.NeedsError, match="3,000 characters"):
        tokenizer.open_tokenizer(tmp_path / "m")


# --- pages: whatever is in metrics.jsonl, a report or a model card ends no run and no export
@pytest.mark.parametrize("change", further([
    {"peak_bytes": None, "memory_kind": 7}, {"lr": [1]}, {"step_s": "x"}, {"tokens_per_s": None}, {"tokens_per_s": {}},
], 1))  # fmt: skip
def test_lines_of_metrics_that_lack_or_garble_a_value(change, box, run_of_two, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(run_of_two, output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "loss" in line:
            line.update(change)
            for key in [key for key, value in change.items() if value is None]:
                del line[key]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert called("export", str(output), "--out", str(tmp_path / "e")).code == 0
    card = (tmp_path / "e" / "README.md").read_text()
    assert "| steps | 2 |" in card and ("jsonl is damaged" in card) == ("lr" not in change), card
    config = box.write(output=str(output), train={"steps": 3, "save_every": 1, "export": True})
    ended = called("train", config, "--resume", "auto", "--allow-change", "config")
    assert ended.code == 0 and (output / "model" / "README.md").is_file(), ended


def test_a_report_that_fails_ends_no_run(box, tmp_path, monkeypatch):
    from optrush.trainer import run

    def fails(*_: Any) -> None:
        raise KeyError("tokens_per_s")

    monkeypatch.setattr(run, "write_run", fails)
    ended = called("train", box.write(output=str(tmp_path / "out")))
    assert ended.code == 0 and "the report was not written (KeyError: 'tokens_per_s')" in ended.err, ended
