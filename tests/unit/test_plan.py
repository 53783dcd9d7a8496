"""Predictions against committed measurements and against each other; searches and refusals."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from optrush import hardware
from optrush.config import Config, dump_config, parse_config
from optrush.data.length_estimate import estimate, estimate_fill
from optrush.decide import decide, with_setting
from optrush.errors import ConfigError, DataError, NeedsError
from optrush.models.published import SHAPES
from optrush.planner import cost, search, sets
from optrush.technique import Numerics, Part
from optrush.techniques import ALL

ROOT = Path(__file__).parents[2]
LLAMA = (ROOT / "benchmarks" / "llama1b.yaml").read_text()


def llama(*sets, **with_):
    config = parse_config(LLAMA, "llama1b.yaml", sets)
    return config.model_copy(update={"with_": {k.replace("_", "-"): v for k, v in with_.items()}}) if with_ else config


def test_the_lines_are_the_peak():
    found = search.predict(llama(), "h200")
    assert sum(i.bytes for i in found.lines) == found.peak_bytes
    assert all(i.reason for i in found.lines)
    assert found.memory_kind == "cuda_allocated" and found.basis == "datasheet" and found.fits


def test_committed_measurements():
    """Peaks within 10 %, in the middle within 5 %; speeds within 10 %."""
    apart, speeds = [], []
    for line in (ROOT / "benchmarks/results/h200-llama1b.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "peer" in record:
            continue
        run = llama(f"batch.micro_tokens={record['micro_tokens']}")
        found = search.predict(run.model_copy(update={"with_": record["with"]}), "h200")
        apart.append(abs(found.peak_bytes / 2**30 / record["peak_gib"] - 1))
        speeds.append(abs((found.tokens_per_s or 0) / record["tokens_per_s"] - 1))
    assert max(apart) <= 0.10 and statistics.median(apart) <= 0.05 and max(speeds) <= 0.10


def test_bf16_weights_as_configured():
    bare = search.predict(llama("model.dtype=bfloat16", fused_adamw={}), "h200")
    assert bare.a_parameter == {"weights": 2, "gradients": 2, "states": 4}


def test_the_copy_that_a_save_in_the_background_makes():
    """Of this rank's trained weights and their states, in pinned memory of the host: nothing of frozen weights."""
    behind, weights = "train.save=async", 1_235_814_400
    assert search.predict(llama(bf16={}), "h200").host_bytes == 0
    assert search.predict(llama(behind, bf16={}), "h200").host_bytes == 6 * weights
    assert search.predict(llama(behind, fused_adamw={}), "h200").host_bytes == 12 * weights
    two = search.predict(llama(behind, "batch.micro_tokens=8192", bf16={}, fsdp={}), "2xh200")
    assert two.host_bytes == pytest.approx(3 * weights, rel=1e-3)
    lora = search.predict(llama(behind, bf16={}, lora={"rank": 16}), "h200")
    states = sum(i.bytes for i in lora.lines if i.name == "states.adapters")
    assert 0 < states < lora.host_bytes <= 2 * states


def test_several_ranks_by_name():
    small = "batch.micro_tokens=8192"
    one = search.predict(llama(small, bf16={}, attention={}), "h200")
    two = search.predict(llama(small, bf16={}, attention={}, fsdp={}), "2xh200")
    assert two.peak_bytes < one.peak_bytes
    assert one.tokens_per_s < two.tokens_per_s <= 2 * one.tokens_per_s
    with pytest.raises(NeedsError, match="shares the work"):
        search.predict(llama(small, bf16={}), "2xh200")
    with pytest.raises(ConfigError, match="3 ranks cannot share"):
        search.search(llama(), "3xh200")


@pytest.mark.parametrize(
    "name", ["h2000", "0xh200", "xh200", "2x", "axh200", "", "\u00b2xh200", "\u0663xh200", "9" * 5000 + "xh200"]
)
def test_unknown_hardware(name):
    with pytest.raises(ConfigError, match="the hardware"):
        hardware.parse_hardware(name)


def test_every_named_device_is_known():
    for name in hardware.NAMED:
        device, count = hardware.parse_hardware(name)
        assert count == 1 and device.memory_bytes and device.bandwidth_bytes_s
        if not device.name.startswith(("NVIDIA", "Tesla")):  # of another maker's only the memory is planned
            assert device.half_flop_s is None
            continue
        assert device.float32_flop_s
        assert (device.peak_flop_s is None) == (device.capability < (8, 0))
    assert hardware.PRICES_USD_H.keys() <= hardware.NAMED.keys()
    free, count = hardware.parse_hardware("2x24GiB")
    assert count == 2 and free.memory_bytes == 24 * 2**30 and free.half_flop_s is None
    assert hardware.parse_hardware("RTXPRO6000") == hardware.parse_hardware("rtxpro6000")
    with pytest.raises(ConfigError, match="a100-40 or a100-80"):
        hardware.parse_hardware("2xa100")
    assert hardware.parse_hardware("8xa100-80") == (hardware.NAMED["a100-80"], 8)
    assert hardware.parse_hardware("cpu")[0].memory_bytes > 2**30
    (half, _), (whole, _) = hardware.parse_hardware("2xcpu"), hardware.parse_hardware("cpu")
    assert half.memory_bytes == whole.memory_bytes // 2 and half.float32_flop_s == whole.float32_flop_s / 2


@pytest.mark.parametrize(("text", "name"), [
    ("rtx 4090", "4090"), ("RTX-4090", "4090"), (" 2 x 4090 ", "2x4090"), ("4090 24GB", "4090"), ("24GB", "24gib"),
    ("2x24 GiB", "2x24gib"), ("A100 80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("4xh100-sxm", "4xh100"),
    ("NVIDIA H100 80GB", "h100"), ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 3090", "3090"),
    ("RTX Pro 6000", "rtxpro6000"), ("4060 Ti 16GB", "4060ti-16"), ("RTX A6000", "a6000"), ("T4 16GB", "t4"),
    ("L4 24GB", "l4"), ("NVIDIA H100 80GB HBM3", "h100"), ("2xH200: pcie", "2xh200:pcie"),
    ("2 X 8 x H100 : InfiniBand", "2x8xh100:infiniband"), ("H100x8", "8xh100"), ("8 * h100", "8xh100"),
    ("4090 x 2", "2x4090"), ("RTX 6000 Ada Generation", "6000ada"), ("NVIDIA A40", "a40"),
])  # fmt: skip
def test_cards_as_people_write_them(text, name):
    assert hardware.parse_hardware(text) == hardware.parse_hardware(name)


@pytest.mark.parametrize(("text", "said"), [
    ("0xh100", "0 devices"), ("0 x 4090", "0 devices"), ("h10", "did you mean `h100`"), ("A100", "several cards"),
    ("4090 48GB", "no such name"), ("1.5xh100", "did you mean `h100`"), ("-1xh100", "did you mean `h100`"),
    ("24", "write 24GiB"), ("a100x8", "several cards"), ("x8", "no such name"), ("8**h100", "no such name"),
    ("0GB", "without memory"), ("rtx 6000", "a6000 or 6000ada or rtxpro6000"), ("RTX5000", "a5000 or 5000ada"),
    ("1080ti", "for an unlisted card write its memory: 24GiB"), ("4090 0GB", "no such name"), ("-4090", "no such name"),
    ("4090é", "no such name"),
])  # fmt: skip
def test_hardware_that_is_no_such(text, said):
    with pytest.raises(ConfigError, match="the hardware") as refused:
        hardware.parse_hardware(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "name", ["2x8xh100", "2x8xh100:carrier", "1x8xh100:ethernet", "2xh100:infiniband", "h100:ethernet"]
)
def test_hosts_need_a_link(name):
    with pytest.raises(ConfigError, match="the hardware"):
        hardware.parse_hardware(name)


@pytest.mark.parametrize(
    ("axes", "along", "hosts", "enters"),
    [
        ({}, ("dp",), 2, 1 / 2),  # one group of all: each host lacks half
        ({"rep": 2}, ("dp",), 1, 0.0),  # gathers stay within a host
        ({"rep": 2}, ("rep",), 2, 8 * 1 / 2),  # eight groups of two: each sends its part
        ({"tp": 2}, ("dp", "cp"), 2, 2 * 1 / 2),
        ({"tp": 16}, ("tp",), 2, 1 / 2),
        ({"cp": 8}, ("cp",), 1, 0.0),
        ({"rep": 4}, ("rep",), 2, 4 * 1 / 2),
        ({"rep": 4}, ("dp",), 1, 0.0),
    ],
)
def test_what_enters_a_host(axes, along, hosts, enters):
    device, ranks = hardware.parse_hardware("2x8xH100:infiniband")
    env = dataclasses.replace(decide(llama()).env, device=device, ranks=ranks, axes=axes)
    assert env.over_hosts(*along) == (hosts, enters)
    assert dataclasses.replace(env, device=hardware.NAMED["h100"]).over_hosts(*along) == (1, 0.0)


def test_a_slower_link_within_a_host(monkeypatch):
    """By name, or by what turns NCCL to it: 0.8 of the 28 and 4.4 GB/s of an all-reduce between two H200."""
    rates = {}
    for name in ("2xh200", "2xh200:pcie", "2xH200:socket"):
        device, count = hardware.parse_hardware(name)
        rates[device.linked] = cost.device_rates(device).link_bytes_s
        said = search.predict(
            llama("batch.tokens=4096", "batch.micro_tokens=2048", bf16={}, attention={}, ddp={}), name
        )
        rates[f"speed {device.linked}"] = said.tokens_per_s
        assert count == 2 and (f"by {device.linked}, as with NCCL_" in said.rates_from) == bool(device.linked)
    assert rates["pcie"] == pytest.approx(0.8 * 2.8e10, rel=0.02)
    assert rates["socket"] == pytest.approx(0.8 * 4.4e9, rel=0.02)
    assert rates["speed "] > rates["speed pcie"] > rates["speed socket"]
    assert hardware.counted(device, 2) == "2 x NVIDIA H200 (socket)"
    card = hardware.NAMED["4090"]
    assert hardware.over(card, "pcie").link_bytes_s < card.link_bytes_s == 3.2e10
    for name in ("h200:pcie", "1xh200:pcie", "2xcpu:pcie", "2x8xh200:pcie", "2xh200:nvlink", "2xh200:"):
        with pytest.raises(ConfigError, match="the hardware"):
            hardware.parse_hardware(name)
    monkeypatch.setattr(hardware, "probe", lambda: [hardware.NAMED["h200"]])
    found = []
    for variable in ("", *hardware.SLOWER.values()):
        if variable:
            monkeypatch.setenv(variable, "1")
        found.append(hardware.parse_hardware("auto")[0].linked)
    assert found == ["", "pcie", "socket"] and hardware.parse_hardware("2xh200")[0].linked == ""


@pytest.mark.parametrize("link", hardware.NETWORKS)
def test_hosts_are_priced_by_their_link(link):
    """What enters a host takes its bytes over the network's rate; a group within a host does not know of it."""
    bf16 = {"bf16": {}, "fused_adamw": {}, "attention": {}}
    rows = ("batch.tokens=65536", "batch.micro_tokens=4096")
    name = f"2x8xh100:{link}"

    def seconds(on, what, **fsdp):
        return {e.name: e.seconds for e in search.predict(llama(*rows, **bf16, **fsdp), on).work}[what]

    device, ranks = hardware.parse_hardware(name)
    assert (ranks, device.hosts, device.network.bytes_s) == (16, 2, {"infiniband": 4e11, "ethernet": 1.25e10}[link])
    whole, layers = 2 * 1_235_814_400, 16
    within = whole * 15 / 16 / (device.link_bytes_s * cost.LINK)  # at the same time
    reduced = max(within, whole / 2 / (device.network.bytes_s * cost.LINK)) + layers * hardware.STEP_S
    assert seconds(name, "reduce", fsdp={}) == pytest.approx(reduced, rel=1e-3)
    assert seconds(name, "reduce", ddp={}) == pytest.approx(2 * reduced, rel=1e-3)
    groups = {"fsdp": {"replicate": 2}}
    assert seconds(name, "reduce", **groups) == seconds("8xh100", "reduce", fsdp={}) < reduced
    replicas = whole / (device.network.bytes_s * cost.LINK) + 2 * layers * hardware.STEP_S
    assert seconds(name, "reduce.replicas", **groups) == pytest.approx(replicas, rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "entering"),
    [
        ({"tensor": {"size": 4}}, 1 / 2),  # of the whole stream, each host lacks half
        ({"context": {"size": 4}, "ddp": {}}, 2 / 2),  # of what a rank has, two send half each
        ({"context": {"size": 4, "kind": "gather"}, "ddp": {}}, 1 / 2),
        ({"context": {"size": 4, "kind": "ring"}, "ddp": {}}, 1 / 2),
    ],
)
def test_ranks_of_one_row_on_two_hosts(mesh, entering):
    one = llama("batch.tokens=4096", "batch.micro_tokens=4096", **{"bf16": {}, **mesh})

    def links(on):
        return {e.name: e for e in search.predict(one, on).work if e.name.endswith((".links", ".exchange"))}

    within, over, fast = links("4xh100"), links("2x2xh100:ethernet"), links("2x2xh100:infiniband")
    assert len(within) == 2
    for name, work in within.items():
        whole = work.bytes * 4 / 3  # of all ranks of the row, or, sent by one, of what it has
        steps = over[name].seconds - whole * entering / (1.25e10 * cost.LINK)
        assert 0 < steps < 1.2e-2 and round(steps / hardware.STEP_S, 3) % 1 == 0, name
        assert work.seconds < fast[name].seconds < over[name].seconds


@pytest.mark.parametrize(("saving", "again"), [({}, 1), ({"recompute": {}}, 2), ({"selective-recompute": {}}, 2)])
def test_a_cut_stream_is_sent_once_a_pass(saving, again):
    """Four times a block in each pass of it, and four times outside of blocks."""
    config = llama(**{"bf16": {}, "tensor": {"size": 2}, **saving})
    sent = {e.name: e.bytes for e in search.predict(config, "2xh100").work if e.name.endswith(".links")}
    once = 32768 * 4 * 2048 * 2 / 2  # tokens, calls, values of 2 bytes, of which each rank lacks half
    assert sent["forward.links"] == pytest.approx(16 * once * again) and sent["backward.links"] == 17 * once


def test_ranks_share_rows_where_rows_are_few():
    found = search.search(llama("batch.tokens=2048", "model.shape=llama-3.2-3b"), "4xh100", whole=False)
    assert {s.prediction.mesh.get("cp", 1) * s.prediction.mesh.get("tp", 1) for s in found.settings} == {4}


def test_work_by_item():
    """Products take 6 FLOPs a weight and token, attention 6 T H E a block; the items are the step."""
    found = search.predict(llama(), "h200")
    assert all(e.reason and e.seconds > 0 for e in found.work)
    tokens, shape = 32768, search.ModelShape.read(SHAPES["llama-3.2-1b"])
    flop = sum(e.flop for e in found.work)
    assert flop == pytest.approx(shape.flops(tokens, 16 * 2048**2))
    assert {"forward.qkv", "forward.down", "head.products", "update", "forward.scores"} <= {e.name for e in found.work}
    alone = sum(e.seconds for e in found.work if e.where == "device")
    assert tokens / alone == pytest.approx(found.tokens_per_s, rel=0.03)
    two = search.predict(llama("batch.micro_tokens=8192", bf16={}, fsdp={}), "2xh200")
    assert {e.name for e in two.work if e.where == "link"} == {"gather.blocks", "gather.ends", "reduce"}


@pytest.mark.parametrize(("name", "given", "kept"), [
    ("bf16", {"rounding": "kahan"}, ["rounding"]), ("fused-kernels", {"norm": True, "rope": True}, ["norm", "rope"]),
    ("fused-loss", {"impl": "liger", "chunk": 1024}, ["chunk"]),
])  # fmt: skip
def test_a_configured_option_that_no_variant_sets_stays(name, given, kept):
    """The technique itself may be left out, as any other that the search chooses."""
    found = search.search(llama(**{name.replace("-", "_"): given}), "h200", best=100)
    having = [s.with_[name] for s in found.settings if name in s.with_]
    assert having and all(options[key] == given[key] for options in having for key in kept)


def test_options_that_the_search_chooses_are_tried_next_to_the_runs_own():
    found = search.search(llama(bf16={}, attention={}, recompute={"every": 4}), "h200")
    assert {"with recompute", "with recompute:every=2", "with recompute:every=4"} <= dict(found.lost).keys()
    assert "without bf16" in dict(found.lost) or "with amp" in dict(found.lost)


def test_a_technique_that_wants_the_whole_step_stays_in_the_search():
    """Judged at one row a micro-batch it would be refused in every set, and dropped without a word."""
    given = {"bf16": {}, "update-in-backward": {}, "recompute": {}, "compile": {}}
    run = llama("optim.clip=null").model_copy(update={"with_": given})
    found = search.search(run, "h200")
    assert found.settings
    for setting in found.settings:
        assert "update-in-backward" in setting.with_ and setting.micro_rows * run.batch.seq == run.batch.tokens
    assert not any("micro-batches per step" in why for _, why in found.lost)


@pytest.mark.parametrize(("name", "options", "hardware", "possible"), [
    ("quantised-activations", {}, "h100", True), ("deepspeed", {}, "2xh100", True),
    ("longlora", {"group": 3000}, "h100", False), ("fp8", {}, "a100-80", False),
])  # fmt: skip
def test_what_no_search_chooses_stays_where_it_can(name, options, hardware, possible):
    """Sets without it are searched as any others are: for what it costs, or as the answer where it is not possible."""
    run = llama(bf16={}, attention={})
    given = run.model_copy(update={"with_": {**run.with_, name: options}})
    found, alone = search.search(given, hardware), search.search(run, hardware)
    lost = dict(found.lost)
    if not possible:
        assert found.settings == alone.settings and f"without {name}" not in lost
        return
    assert all(name in s.with_ for s in found.settings)
    assert lost[f"without {name}"] == sets._difference(alone.settings[0], found.settings[0])
    what, why = {
        "deepspeed": ("with fsdp", "it takes the place of deepspeed, which is configured"),
        "quantised-activations": ("with compile", "compile"),
    }[name]
    assert why in lost[what] and "nothing that fits" not in lost[what]


def test_a_file_that_is_not_there(tmp_path):
    config = parse_config(f"model: tiny\nobjective: sft\ndata: {{path: {tmp_path}/none.jsonl}}\noutput: o\n", "x")
    with pytest.raises(DataError, match="no such file"):
        search.predict(config, "h200")


def test_what_fusing_gives_on_a_cpu():
    """Little: what an operator reads of the one before lies in its cache; kernels of our own do not run there."""
    run = {"model": "tiny", "objective": "pretrain", "data": {"random": True}, "output": "o"}
    speed = {
        name: search.predict(Config.model_validate({**run, "with": {**more, "attention": {}}}), "cpu").tokens_per_s
        for name, more in {"plain": {}, "compile": {"compile": {}}, "kernels": {"fused-kernels": {}}}.items()
    }
    assert speed["kernels"] == pytest.approx(speed["plain"], rel=0.01)
    assert 1.02 < speed["compile"] / speed["plain"] < 1.15


# --- the search


def test_the_best_is_a_run_that_can_be_prepared_and_fits():
    run = llama()
    for name in ("h200", "t4", "2xa100-80", "cpu"):
        found = search.search(run, name)
        device, ranks = hardware.parse_hardware(name)
        for setting in found.settings:
            chosen = parse_config(dump_config(with_setting(run, setting)), "plan.yaml")
            decide(chosen, ranks=ranks, device=device)
            again = search.predict(chosen, name)
            assert again.fits and again.peak_bytes == setting.prediction.peak_bytes
            assert again.tokens_per_s == pytest.approx(setting.prediction.tokens_per_s)
        speeds = [s.prediction.tokens_per_s for s in found.settings]
        assert speeds == sorted(speeds, reverse=True)


def test_it_searches_what_the_techniques_allow():
    found = search.search(llama(), "h200")
    assert 20 < found.tried < 1000, "each technique at least once, and not every set"
    best = found.settings[0]
    assert {"bf16", "attention", "compile", "fused-loss"} <= best.with_.keys()
    assert best.micro_rows == 16
    why = dict(found.lost)
    assert "one rank" in why["with ddp"] and why["with recompute"].startswith("-")


def test_a_smaller_card_recomputes_or_takes_smaller_micro_batches():
    big, small = search.search(llama(), "h200").settings[0], search.search(llama(), "4090").settings[0]
    assert small.micro_rows < big.micro_rows
    assert small.prediction.peak_bytes < hardware.NAMED["4090"].memory_bytes


@pytest.mark.parametrize(("name", "tflop_s"), [("t4", 24.0), ("h100", 0.66 * 989.5), ("v100", 0.66 * 125)])
def test_a_card_whose_power_limit_lowers_its_clock(name, tflop_s):
    rates = cost.device_rates(hardware.NAMED[name])
    assert rates is not None and rates.products[True][""] == pytest.approx(tflop_s * 1e12)
    assert rates.attention[True][""] < rates.products[True][""]


def test_a_card_without_bf16_products():
    best = search.search(llama("model.shape=qwen2.5-0.5b"), "t4").settings
    assert best
    assert all(s.with_.get("amp", {}).get("dtype") == "fp16" for s in best if "amp" in s.with_)
    assert all("bf16" not in s.with_ for s in best)


def test_keeping_the_maths():
    changing = {t.name for t in ALL if t.numerics is Numerics.DIFFERENT_MATHS}
    found = search.search(llama(), "h200", keep_maths=True)
    assert not any(changing & s.with_.keys() for s in found.settings)
    assert changing <= dict(found.lost).keys()


def test_nothing_fits():
    config = parse_config(LLAMA.replace("llama-3.2-1b", "llama-3.1-8b"), "x.yaml")
    assert search.search(config, "t4").settings == ()


def test_the_family():
    run = llama()
    best = search.search(run, "h200").settings[0]
    rows = list(search.predict_family(run, "h200", best))
    sizes = [parameters for _, parameters, _ in rows]
    assert sizes == sorted(sizes) and {"llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"} <= {name for name, _, _ in rows}
    by = {name: setting for name, _, setting in rows}
    assert by["llama-3.2-1b"].prediction.tokens_per_s > by["llama-3.2-3b"].prediction.tokens_per_s
    assert by["llama-3.1-70b"] is None


def test_a_family_the_plan_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt9", "n_layer": 2, "n_positions": 4096}))
    run = llama("model.shape=null", f"model.path={tmp_path}")
    with pytest.raises(NeedsError, match="a plan for a model of type 'gpt9'"):
        search.predict(run, "h200")


# --- how full rows are


def test_what_rows_hold(tmp_path):
    turns = [{"role": "user", "content": "y" * 370}, {"role": "assistant", "content": "z" * 14}]
    rows = [{"text": "x" * 400}, {"messages": turns}, "a bad row"]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\nno json at all\n\n")
    config = parse_config(f"model: tiny\nobjective: sft\ndata: {{path: {file}}}\nbatch: {{seq: 200}}\noutput: o\n", "x")
    lengths = estimate(config.data, 0)
    assert lengths == pytest.approx([100, 106], abs=0.6)
    assert estimate_fill(config) == pytest.approx(
        (1 - sum(lengths) / 400, sum(n * n for n in lengths) / (200 * sum(lengths)))
    )
    assert estimate_fill(llama()) == (0.0, 1.0)
    sample = parse_config("model: tiny\nobjective: sft\ndata: {sample: recipes}\noutput: o\n", "x")
    assert 0.5 < estimate_fill(sample).padding < 0.95


def test_attention_knows_the_documents_of_a_row(tmp_path):
    """Eight documents of an eighth of a row: an eighth of the scores, at the rate of shorter rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "' + "x" * 1024 + '"}\n')
    asked = ("bf16", "fused-adamw", "packing")
    model = f"{{shape: llama-3.2-1b, tokenizer: {tmp_path}}}"
    data = f"model: {model}\nobjective: pretrain\ndata: {{path: {file}}}\noutput: o\n"

    def scores(*more):
        config = parse_config(
            data + "batch: {seq: 2048, tokens: 32768, micro_tokens: 32768}\n", "x", (), (*asked, *more)
        )
        return next(e for e in search.predict(config, "h200").work if e.name == "forward.scores")

    dense, documents = scores("attention:impl=sdpa"), scores("attention:impl=fa4")
    assert documents.flop == pytest.approx(dense.flop / 2 / 8)
    shape = search.ModelShape.read(SHAPES["llama-3.2-1b"])
    rate = cost.device_rates(hardware.parse_hardware("h200")[0], shape=shape, T=256).attention[True][""]
    assert documents.seconds == pytest.approx(documents.flop / rate / cost.FLASH4)


@pytest.mark.parametrize("T", [256, 1024, 4096])
def test_a_mask_is_never_faster(T):
    """Of full rows: packed or not, with the mask of packed rows or without."""
    sets = (f"batch.seq={T}", "batch.tokens=32768", "batch.micro_tokens=32768")

    def speed(**with_):
        return search.predict(llama(*sets, bf16={}, fused_adamw={}, **with_), "h200").tokens_per_s

    alone = speed(attention={"impl": "sdpa"})
    assert speed(attention={"impl": "fa4"}, packing={}) > alone > speed(attention={"impl": "sdpa"}, packing={})


def test_a_kernel_for_older_devices_is_slower_on_newer_ones():
    """On an H200 1.85 times as long as flash-attn-4 (h200-operators.jsonl); on an A100 it is the fastest there is."""

    def scores(impl, on):
        run = llama(bf16={}, fused_adamw={}, attention={"impl": impl})
        return next(e.seconds for e in search.predict(run, on).work if e.name == "forward.scores")

    assert scores("varlen", "h200") == pytest.approx(scores("fa4", "h200") * cost.FLASH4 / cost.FLASH2)
    assert scores("fa4", "h200") < scores("sdpa", "h200") < scores("varlen", "h200")
    assert scores("varlen", "a100-80") == scores("sdpa", "a100-80")
    found = search.search(llama(), "h200")
    assert not any(s.with_.get("attention") == {"impl": "varlen"} for s in found.settings)


def test_pairs_are_two_documents_and_padding_is_one():
    """Packed, each of a pair is a document; alone in its row, what lies behind a pair is seen by itself."""
    text = "model: {shape: llama-3.2-1b, tokenizer: t}\nobjective: dpo\ndata: {sample: recipes}\noutput: o\n"
    config = parse_config(text + "batch: {seq: 2048, tokens: 32768, micro_tokens: 32768}\n", "x")
    lengths = estimate(config.data, config.seed, pairs=True)
    assert estimate_fill(config).reach == pytest.approx(sum(2 * (n / 2) ** 2 for n in lengths) / (2048 * sum(lengths)))
    owned = frozenset({Part.PACKED_ROWS})
    env = dataclasses.replace(decide(llama()).env, reach=estimate_fill(config).reach, claimed=owned)
    assert env.span == env.seq
    assert dataclasses.replace(env, claimed=owned | {Part.BATCH_LAYOUT}).span == pytest.approx(env.seq * env.reach)
    layout = owned | {Part.BATCH_LAYOUT, Part.ROW_WIDTH}
    assert dataclasses.replace(env, claimed=layout).span == env.seq
    compiled = dataclasses.replace(env, claimed=layout | {Part.COMPILED})  # which claims the width, too
    assert compiled.span == pytest.approx(env.seq * env.reach)
