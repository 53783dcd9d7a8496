"""Calibration: the measurement, its file, and plans that use it."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from optrush import hardware
from optrush.config import parse_config
from optrush.decide import with_setting
from optrush.errors import ConfigError, NeedsError
from optrush.models.shapes import SHAPES, ModelShape
from optrush.planner import calibrate, calibration, cost, search
from optrush.planner.calibrate import Bench, Load
from optrush.planner.calibration import AttentionRate, Calibration, ProductRate
from optrush.planner.ledger import BFLOAT16, WorkItem, apply_rules

LLAMA = (Path(__file__).parents[2] / "benchmarks" / "llama1b.yaml").read_text()
SHAPE = ModelShape.read(SHAPES["llama-3.2-1b"])
SMALL = dataclasses.replace(
    SHAPE, layers=1, width=16, heads=4, kv_heads=2, head_width=8, ff_width=24, vocab=40, family="qwen2"
)
H200 = hardware.NAMED["h200"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where these tests keep calibrations."""
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibrations"


def fake(**changes):
    """Of an H200, at the shapes of Llama 1B: 400 and 40 TFLOP/s of products, 200 and 20 of attention."""
    products = tuple(
        ProductRate(part, direction, dtype, 4096, inputs, outputs, 4e14 if dtype == "bfloat16" else 4e13, 0.01)
        for dtype in ("bfloat16", "float32")
        for part, (outputs, inputs) in cost.linears(SHAPE).items()
        for direction in ("forward", "input", "weight")
    )
    attention = tuple(
        AttentionRate(direction, dtype, 2, seq, 32, 8, 64, 2e14 if dtype == "bfloat16" else 2e13, 0.01)
        for dtype in ("bfloat16", "float32")
        for seq in (2048, 8192)
        for direction in ("forward", "backward")
    )
    whole = Calibration(
        device=H200.name, torch="2.11.0", driver="580.159", date="2026-11-21T10:00:00+00:00", seconds=60.0,
        threads=16, float32="highest", products=products, attention=attention, copy_bytes_s=4e12,
        to_device_bytes_s=5e10, from_device_bytes_s=5e10, launch_s=5e-6,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def keep(c):
    file = calibration.path(c)
    calibration.check_writable(file.parent)
    calibration.write_calibration(c, file)
    return file


# --- measuring


def tiny(seconds=0.3, report=lambda *_: None):
    return calibrate.measure_rates([Load("small", SMALL, 8, 32)], hardware.cpu(), seconds, report)


@pytest.fixture(scope="module")
def found():
    return tiny()


def test_every_shape_and_direction_in_both_types(found):
    shapes = {(p.part, p.outputs, p.inputs) for p in found.products}
    assert shapes == {("qkv", 64, 16), ("o", 16, 32), ("gate_up", 48, 16), ("down", 16, 24), ("head", 40, 16)}
    assert len(found.products) == 5 * 3 * 2 and len(found.attention) == 2 * 2 * 2, "of two lengths"
    assert {p.dtype for p in found.products} == {a.dtype for a in found.attention} == {"bfloat16", "float32"}
    assert {p.direction for p in found.products} == {"forward", "input", "weight"}
    for m in (*found.products, *found.attention):
        assert m.flop_s > 0 and m.spread >= 0
    assert all(1 <= p.tokens <= 32 for p in found.products) and all(1 <= a.rows <= 4 for a in found.attention)
    assert found.copy_bytes_s > 0 and found.launch_s > 0
    assert found.to_device_bytes_s is None and found.driver is None and found.threads == torch.get_num_threads()


def test_a_shape_of_two_models_is_measured_once():
    both = [Load("a", SMALL, 8, 32), Load("b", dataclasses.replace(SMALL, layers=3), 8, 64)]
    trials = list(calibrate._trials(Bench(hardware.cpu()), both, torch.float32))
    assert len(trials) == 5 * 3 + 2 * 2 and all(t.name.startswith("a ") for t in trials)


def test_full_memory_is_an_error_of_three_lines(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibrate, "_fit", full)
    with pytest.raises(NeedsError, match="its memory is full") as error:
        tiny()
    assert "shorter rows" in error.value.do


def test_longer_rows_only_where_no_scores_are_held():
    """Of a row of 16,384 they are 32 GiB at 32 heads."""
    bench = Bench(hardware.cpu())

    def lengths(tokens, dtype):
        trials = calibrate._trials(bench, [Load("a", SMALL, 8, tokens)], dtype)
        return [t.fields["seq"] for t in trials if t.kind is AttentionRate]

    assert lengths(64, bench.half) == lengths(64, torch.float32) == [8, 8, 32, 32], "a CPU's kernel holds none"
    bench.scoreless = {bench.half}  # as on a GPU
    assert lengths(64, bench.half) == [8, 8, 32, 32] and lengths(64, torch.float32) == [8, 8]
    assert lengths(16, bench.half) == [8, 8, 16, 16] and lengths(8, bench.half) == [8, 8]


@pytest.mark.parametrize("direction", ["forward", "input", "weight"])
def test_a_product_is_the_one_that_autograd_asks_for(direction):
    """Against the gradients of a linear, and the FLOPs that torch itself counts."""
    from torch.utils.flop_counter import FlopCounterMode

    bench = Bench(hardware.cpu())
    trial = next(
        t for t in calibrate._trials(bench, [Load("s", SMALL, 8, 32)], torch.float32)
        if t.fields["part"] == "gate_up" and t.fields["direction"] == direction
    )  # fmt: skip
    bench.fill(torch.float32, calibrate._held(bench, [trial]))
    x, w, y = (v.clone().requires_grad_() for v in bench.cut(torch.float32, (32, 16), (48, 16), (32, 48)))
    out = torch.nn.functional.linear(x, w)
    gx, gw = torch.autograd.grad(out, (x, w), y)
    with FlopCounterMode(display=False) as counted:
        made = trial.make(32)()
    assert isinstance(made, torch.Tensor)
    torch.testing.assert_close(made, {"forward": out, "input": gx, "weight": gw}[direction])
    assert counted.get_total_flops() == trial.flop * 32


def test_attention_is_causal_and_counts_half(found):
    bench = Bench(hardware.cpu())
    forward, backward = (
        t for t in calibrate._trials(bench, [Load("s", SMALL, 8, 32)], torch.float32) if t.fields.get("seq") == 8
    )
    bench.fill(torch.float32, calibrate._held(bench, [forward, backward]))
    q, k, v, g = bench.cut(torch.float32, (2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8), (2, 4, 8, 8))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 8**-0.5
    scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf"))
    whole = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(forward.make(2)(), whole)
    for got, expected in zip(backward.make(2)(), torch.autograd.grad(whole, (q, k, v), g)):  # type: ignore[call-overload]
        torch.testing.assert_close(got, expected)
    assert (forward.flop, backward.flop) == (2 * 8 * 8 * 4 * 8, 4 * 8 * 8 * 4 * 8)


def test_values_are_random():
    bench = Bench(hardware.cpu())
    bench.fill(torch.bfloat16, 5000)
    a, b = bench.cut(torch.bfloat16, (50, 50), (50, 50))
    assert a.dtype == torch.bfloat16 and 0.9 < a.float().std() < 1.1 and not torch.equal(a, b)
    assert len(a.unique()) > 500


def test_a_slow_call_takes_fewer_tokens():
    """What one slice of time does not hold is measured smaller."""
    bench = Bench(hardware.cpu())
    sizes: list[int] = []

    def make(size):
        sizes.append(size)
        return lambda: None

    taken = {16: 0.01, 64: 0.04, 256: 0.16, 1000: 0.6}
    bench.seconds = lambda call, enough: taken[sizes[-1]]  # type: ignore[method-assign]
    trial = calibrate.Trial("t", {}, ProductRate, "tokens", 1000, 1.0, make)
    calibrate._fit(bench, trial, slice_s=0.5)
    assert trial.size == 256 and sizes == [16, 64, 256], "1000 would take more than 0.5 s"
    trial.size = 1000
    calibrate._fit(bench, trial, slice_s=10.0)
    assert trial.size == 1000


def test_what_does_not_fit_into_memory_is_smaller_or_refused():
    bench = Bench(dataclasses.replace(hardware.cpu(), memory_bytes=1 << 20))
    trials = list(calibrate._trials(bench, [Load("s", SMALL, 8, 1 << 16)], torch.float32))
    calibrate._held(bench, trials)
    assert all(t.values * 4 <= bench.room for t in trials) and all(t.size < 1 << 16 for t in trials)
    with pytest.raises(NeedsError) as refused:
        calibrate._held(bench, list(calibrate._trials(bench, [Load("l", SHAPE, 8, 16)], torch.float32)))
    assert refused.value.asked == "the rate of l qkv, forward, float32"
    assert "GiB may be used" in refused.value.found and "smaller CONFIG" in refused.value.do


def test_a_gpu_that_torch_does_not_see():
    if torch.cuda.is_available():
        pytest.skip("torch sees one")
    with pytest.raises(NeedsError, match="finds no CUDA device"):
        Bench(H200)


def test_what_is_measured():
    config = parse_config(LLAMA, "x", ["batch.seq=512", "batch.micro_tokens=1024"])
    assert calibrate.loads(config, H200) == [Load("llama-3.2-1b", SHAPE, 512, 1024)]
    assert [load.name for load in calibrate.loads(None, H200)] == ["llama-3.2-1b", "llama-3.1-8b"]
    with pytest.raises(ConfigError, match=r"batch\.micro_tokens: auto"):
        calibrate.loads(parse_config(LLAMA, "x", ["batch.micro_tokens=auto"]), H200)


# --- the file


def test_it_is_read_as_it_was_written(cache, found):
    for c in (found, fake()):
        file = keep(c)
        assert file.parent == cache and dataclasses.asdict(calibration.read_calibration(file)) == dataclasses.asdict(c)
        assert json.loads(file.read_text())["format"] == 1
    assert not [f for f in cache.iterdir() if f.suffix != ".json"]


def test_one_file_a_device_torch_and_driver(cache):
    keep(fake())
    keep(fake(date="2026-11-22T10:00:00+00:00", launch_s=1e-6))
    assert len(list(cache.iterdir())) == 1
    for other in ({"torch": "2.13.0"}, {"driver": "600.1"}, {"device": "NVIDIA H100 80GB HBM3"}):
        keep(fake(**other))
    assert len(list(cache.iterdir())) == 4


def test_which_one_is_found(monkeypatch):
    assert calibration.for_device(H200) is None
    keep(fake(device="NVIDIA L4"))
    assert calibration.for_device(H200) is None
    keep(fake(torch="9.9", date="2026-11-01T00:00:00+00:00"))
    keep(fake(torch="8.8", date="2026-11-02T00:00:00+00:00"))
    chosen = calibration.for_device(H200)
    assert chosen is not None and chosen.torch == "8.8", "the newest"
    monkeypatch.setattr(calibration, "torch_version", lambda: "9.9")
    monkeypatch.setattr(calibration, "driver", lambda: "580.159")
    chosen = calibration.for_device(H200)
    assert chosen is not None and chosen.torch == "9.9", "of this torch and driver"


def test_what_has_changed_here_since(monkeypatch):
    assert calibration.stale(fake()) == "", "no such device here: nothing to compare with"
    monkeypatch.setattr(hardware, "probe", lambda: [H200])
    monkeypatch.setattr(calibration, "torch_version", lambda: "3.0")
    monkeypatch.setattr(calibration, "driver", lambda: "580.159")
    assert calibration.stale(fake()) == "torch is 3.0 now"
    assert "torch is 3.0 now: optrush calibrate measures again" in known(fake()).source


def refused(file):
    with pytest.raises(ConfigError) as error:
        calibration.for_device(H200)
    assert str(file) in error.value.asked and "optrush calibrate" in error.value.do
    return error.value


@pytest.mark.parametrize(("text", "said"), [
    (b"", "damaged: not JSON"), (b"\xff\xfe", "damaged: not JSON"), (b'{"format": 1, "laun', "damaged: not JSON"),
    (b"[" * 100_000, "damaged: not JSON"), (b"[1]", "no calibration"), (b'{"a": 1}', "no calibration"),
    (b'{"launch_s": 1}', "format None, where this version of optrush reads 1"),
    (b'{"launch_s": 1, "format": 2}', "format 2"), (b'{"launch_s": 1, "format": 1}', "damaged: `device`"),
])  # fmt: skip
def test_a_file_that_is_none(cache, text, said):
    cache.mkdir(parents=True)
    (cache / "x.json").write_bytes(text)
    assert said in refused(cache / "x.json").found


@pytest.mark.parametrize(("key", "value", "said"), [
    ("copy_bytes_s", 0, "`copy_bytes_s`"), ("copy_bytes_s", -1.0, "`copy_bytes_s`"), ("launch_s", None, "`launch_s`"),
    ("copy_bytes_s", "4e12", "`copy_bytes_s`"), ("more", 1, "`more`"), ("device", 3, "`device`"),
    ("products", [], "`products` lacks a type"), ("attention", [], "`attention` lacks a type"),
    ("products", [{"part": "qkv"}], "`products.0."), ("copy_bytes_s", float("inf"), "copy_bytes_s"),
])  # fmt: skip
def test_a_value_that_is_none(key, value, said):
    file = keep(fake())
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert said in refused(file).found


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="to write the calibration"):
        calibration.check_writable(tmp_path / "file" / "inside")
    with pytest.raises(ConfigError, match="to write the calibration"):
        calibration.write_calibration(fake(), tmp_path / "none" / "x.json")


def test_a_processor_is_called_by_its_model_and_cores():
    assert calibration.device_name(H200) == "NVIDIA H200"
    assert " core" in calibration.device_name(hardware.cpu()) and calibration.device_name(hardware.cpu()) != "cpu"


# --- the rates


def known(c, T=2048):
    found = cost.device_rates(H200, c, SHAPE, T)
    assert found is not None
    return found


def rate(of, name, narrow=True, **work):
    return of.flop_s(WorkItem(name, "", "token", 1.0, **work), narrow)


def changed(c, flop_s, **where):
    """With another rate where all fields are as given."""

    def set_(m):
        return dataclasses.replace(m, flop_s=flop_s) if all(getattr(m, k, 0) == v for k, v in where.items()) else m

    products, attention = tuple(map(set_, c.products)), tuple(map(set_, c.attention))
    return dataclasses.replace(c, products=products, attention=attention)


def test_each_product_by_its_shape_and_direction():
    c = changed(fake(), 1e14, part="down", dtype="bfloat16", direction="weight")
    of = known(c)
    assert rate(of, "forward.down") == 4e14
    assert rate(of, "backward.down") == pytest.approx(2 / (1 / 4e14 + 1 / 1e14)), "half of the work at each rate"
    assert rate(of, "backward.gate_up") == pytest.approx(4e14)
    assert rate(of, "forward.down", narrow=False) == 4e13
    head = known(changed(fake(), 1e14, part="head", dtype="bfloat16", direction="forward"))
    assert rate(head, "head.products") == pytest.approx(3 / (1 / 1e14 + 2 / 4e14))


def test_a_shape_that_was_not_measured_takes_the_median():
    c = changed(fake(), 9e14, part="head", dtype="bfloat16")  # 3 of 15: the median stays
    other = cost.device_rates(H200, c, ModelShape.read(SHAPES["llama-3.1-8b"]), 2048)
    assert other is not None and not {"forward.down", "head.products"} & other.products[True].keys()
    assert rate(other, "forward.down") == rate(other, "head.products") == 4e14
    assert rate(other, "forward.scores", unit="attention") == 2e14


def test_attention_at_a_length_between_two():
    c = changed(fake(), 3e14, seq=8192, dtype="bfloat16", direction="backward")
    for T, want in ((512, 2.0), (2048, 2.0), (4096, 2.5), (8192, 3.0), (32768, 3.0)):
        assert rate(known(c, T), "backward.scores", unit="attention") == pytest.approx(want * 1e14)
        assert rate(known(c, T), "forward.scores", unit="attention") == 2e14
    assert rate(known(c), "forward.scores") == 4e14, "whole scores are products"


@pytest.mark.parametrize(("seq", "want"), [(512, 2.5), (2048, 2.5), (8192, 2.125), (4096, 2.3125)])
def test_a_mask_on_a_cpu_takes_the_whole_square_at_the_kernels_rate(seq, want):
    """Of the rows that were measured, whatever the documents' length; it skipped whole pieces, and halves count."""
    cpu = cost.device_rates(hardware.cpu(), fake(), SHAPE, T=300, seq=seq)  # measured at 2048 and 8192
    assert cpu is not None and rate(cpu, "forward.scores", unit="attention") == 2e14
    assert rate(cpu, "forward.scores", unit="masked") == pytest.approx(want * 1e14)
    assert rate(known(fake()), "forward.scores", unit="masked") == 2e14, "on a GPU as if causal"


def test_a_mask_on_a_cpu_by_its_datasheet_is_a_product():
    cpu = dataclasses.replace(hardware.cpu(), half_flop_s=2e12, float32_flop_s=1e12, bandwidth_bytes_s=5e10)
    for sheet in (cost.device_rates(cpu), cost.device_rates(cpu, ceiling=True)):
        assert sheet is not None
        for narrow in (True, False):
            masked, product = (rate(sheet, "forward.scores", narrow, unit=u) for u in ("masked", "product"))
            assert masked == product >= rate(sheet, "forward.scores", narrow, unit="attention")


@pytest.mark.parametrize("measured", [None, fake()], ids=["datasheet", "calibrated"])
def test_ranks_share_the_rates_of_a_cpu(measured):
    whole, half = (cost.device_rates(hardware.share_of_cpu(n), measured, SHAPE, 2048) for n in (1, 2))
    assert whole is not None and half is not None and half.bytes_s == pytest.approx(whole.bytes_s / 2)
    for name, by in (("products", whole.products), ("attention", whole.attention)):
        for narrow, rates in by.items():
            assert getattr(half, name)[narrow] == pytest.approx({key: rate / 2 for key, rate in rates.items()})


def test_a_datasheet_is_what_it_was():
    of = known(None)
    assert of.basis == "datasheet" and "not measured" in of.source and "optrush calibrate" in of.source
    assert rate(of, "forward.down") == pytest.approx(9.895e14 * cost.HALF_PRODUCTS)
    whole = cost.device_rates(H200, None, ceiling=True)
    assert whole is not None and rate(whole, "forward.down") == 9.895e14 and whole.bytes_s == 4.8e12
    alone, c = cost.device_rates(H200, fake(), SHAPE, 2048, ceiling=True), known(fake())
    assert alone == dataclasses.replace(c, bytes_s=4e12) and c.bytes_s == pytest.approx(4e12 * cost.MOVING["cuda"])
    cpu = cost.device_rates(hardware.cpu(), fake(), SHAPE, 2048)
    assert cpu is not None and cpu.bytes_s == pytest.approx(4e12 * cost.MOVING["cpu"])


def test_links_slow_matmuls_beside_them_by_half_at_most():
    """Of a second of matmuls and n seconds of links; those as fast as NVLink take half of their own time from them."""
    known_rates = cost.device_rates(H200, fake(), SHAPE, 2048)
    assert known_rates is not None
    rates, begun = dataclasses.replace(known_rates, link_bytes_s=cost.DISTURBING), cost.MICRO_S + cost.STEP_S
    for links_s, found_s in ((0.0, 1.0), (0.5, 1.25), (1.0, 1.5), (1.4, 1.5), (2.0, 2.0)):
        link = WorkItem("gather", "", "micro", unit="link", values=links_s * cost.DISTURBING, role="byte")
        book = apply_rules([WorkItem("forward.down", "", "micro", 4e14), link], BFLOAT16, [])
        assert cost.step_seconds(book, H200, 1.0, rates) == pytest.approx(found_s + begun, rel=1e-3), links_s


def test_an_unknown_device_is_known_once_it_was_measured():
    device = hardware.Device("cuda", "NVIDIA L40S", (8, 9), None)
    assert cost.device_rates(device) is None
    found = cost.device_rates(device, fake(), SHAPE, 2048)
    assert found is not None and found.link_bytes_s is None
    alone = apply_rules([WorkItem("forward.down", "", "token", 1e9)], BFLOAT16, [])
    assert cost.step_seconds(alone, device, 100.0, found) == pytest.approx(1e11 / 4e14 + cost.MICRO_S + cost.STEP_S)
    linked = apply_rules(
        [*alone.work, WorkItem("reduce", "", "step", unit="link", values=1e9, role="wide")], BFLOAT16, []
    )
    assert cost.step_seconds(linked, device, 100.0, found) is None, "nobody knows its link"
    assert [e.name for e in cost.list_work_times(linked, device, 100.0, found)] == ["forward.down"]


# --- the plan


def llama(*sets):
    return parse_config(LLAMA, "llama1b.yaml", sets)


def test_a_plan_goes_by_what_was_measured():
    sheet = search.predict(llama(), "h200")
    assert sheet.basis == "datasheet" and "not measured" in sheet.rates_from
    keep(fake())
    half = search.predict(llama(), "h200")
    assert half.basis == "calibrated" and search.predict(llama("batch.micro_tokens=8192"), "h100").basis == "datasheet"
    assert half.rates_from == "measured on 2026-11-21 with torch 2.11.0, driver 580.159"
    assert half.peak_bytes == sheet.peak_bytes
    work = {e.name: e for e in half.work if e.where == "device"}
    for name, speed in (("forward.gate_up", 4e14), ("backward.qkv", 4e14), ("backward.scores", 2e14)):
        assert work[name].seconds == pytest.approx(work[name].flop / speed)
    assert work["update"].seconds == pytest.approx(work["update"].bytes / (4e12 * cost.MOVING["cuda"]))
    alone = sum(e.seconds for e in work.values())
    assert half.tokens_per_s == pytest.approx(32768 / (alone + cost.MICRO_S + cost.STEP_S))
    assert half.tokens_per_s is not None and sheet.tokens_per_s is not None
    assert 0.5 < half.tokens_per_s / sheet.tokens_per_s < 0.75, "400 TFLOP/s of products instead of 653"


def test_the_search_goes_by_it_too():
    keep(fake())
    found = search.search(llama(), "h200")
    best = found.settings[0]
    assert {s.prediction.basis for s in found.settings} == {"calibrated"}
    again = search.predict(with_setting(llama(), best), "h200")
    assert again.tokens_per_s == pytest.approx(best.prediction.tokens_per_s)
    rows = {name: setting for name, _, setting in search.predict_family(llama(), "h200", best)}
    assert rows["llama-3.1-8b"] is not None and rows["llama-3.1-8b"].prediction.basis == "calibrated"


def test_a_processor_by_its_own():
    keep(fake(device=calibration.device_name(hardware.cpu()), driver=None))
    assert search.predict(llama("batch.micro_tokens=2048"), "cpu").basis == "calibrated"
    two = llama("batch.micro_tokens=2048").model_copy(update={"with_": {"ddp": {}}})
    assert search.predict(two, "2xcpu").basis == "calibrated"


def test_the_ceiling_by_part():
    """The parts are the device's work, each once; without a calibration at the datasheet's whole rates."""
    sheet = search.predict(llama(), "h200")
    assert set(sheet.ceiling_s) == set(cost.PARTS)
    products = sum(e.flop for e in sheet.work if e.name.endswith(("qkv", ".o", "gate_up", "down")))
    assert sheet.ceiling_s["products"] == pytest.approx(products / 9.895e14)
    assert sheet.ceiling_s["attention"] == pytest.approx(
        sum(e.flop for e in sheet.work if e.name.endswith("scores")) / 9.895e14
    )
    keep(fake())
    found = search.predict(llama(), "h200")
    moved = sum(e.bytes for e in found.work if e.where == "device")
    whole = sum(e.seconds for e in found.work if e.where == "device") - moved * (1 / cost.MOVING["cuda"] - 1) / 4e12
    assert sum(found.ceiling_s.values()) == pytest.approx(whole), "bytes move as a copy does"
    assert all(found.ceiling_s[part] > 0 for part in cost.PARTS)
    steps = sum(e.seconds for e in found.work if e.name in ("update", "norm"))
    assert found.ceiling_s["optimizer"] == pytest.approx(steps * cost.MOVING["cuda"])


# --- links


def exchanged():
    """Measure on a rank of a pair, whose group an earlier test may have made."""
    calibrate.COPY_BYTES = {"cpu": 1 << 16}
    if torch.distributed.is_initialized():
        return list(calibrate.collectives(2, torch.device("cpu"), 0.01))
    return list(calibrate.measure_links(hardware.cpu(), int(os.environ["RANK"]), 2, 0.2))


def test_links_are_measured_kept_and_planned_with(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTRUSH_CACHE", str(tmp_path))
    first, second = pair(exchanged)
    assert [link.operation for link in first] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert [link.bytes for link in first] == [link.bytes for link in second] == [1 << 16] * 3
    assert all(link.bytes_s > 0 and 0 < link.latency_s < 1 and link.ranks == 2 for link in first)
    links = tuple(dataclasses.replace(link, bytes_s=rate) for link, rate in zip(first, (1e10, 1e10, 4e10), strict=True))
    keep(fake(links=links))
    again = calibration.for_device(H200)
    assert again is not None and again.links == links and "links of 2 ranks" in again.source
    assert again.link_bytes_s == pytest.approx(3 / (2e-10 + 0.25e-10))
    rates = cost.device_rates(H200, again, SHAPE, 2048)
    assert rates is not None and rates.link_bytes_s == again.link_bytes_s
    named = cost.device_rates(hardware.over(H200, "pcie"), again, SHAPE, 2048)
    assert named is not None and named.link_bytes_s == pytest.approx(0.8 * 2.8e10, rel=0.02), "what was named stays"
