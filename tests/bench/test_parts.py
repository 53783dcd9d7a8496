"""Where the time of a step goes: who a moment belongs to, what a kernel is called, and marks that change nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshes import further
from optrush import config
from optrush.benchmark import record, runner, worker
from optrush.benchmark.worker import ProfiledSpan as Span
from optrush.benchmark.worker import RegionMarks
from optrush.decide import decide
from optrush.errors import RunError
from optrush.planner import cost
from optrush.planner.cost import PARTS
from optrush.planner.ledger import WorkItem
from optrush.report.bench import GAPS
from optrush.trainer.build import build
from optrush.trainer.run import batches
from optrush.trainer.trainer import RunPlan

from toy import document

KERNELS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-kernels.jsonl"


def run(**changes):
    return config.parse_config(
        yaml.safe_dump(document(**{"train": {"steps": 4, "log_every": 1}, **changes})), "run.yaml"
    )


def in_milliseconds(found):
    return {part: round(1e3 * s, 6) for part, s in found.items() if s}


def test_a_moment_belongs_to_the_innermost():
    spans = [
        Span(0, 9000, "aten::linear"), Span(1000, 4000, "aten::mul"), Span(2000, 3000, "aten::_softmax"),
        Span(5000, 7000, "aten::_scaled_dot_product_flash_attention_for_cpu"),
    ]  # fmt: skip
    assert in_milliseconds(worker.part_seconds(spans)) == {"products": 4.0, "elementwise": 3.0, "attention": 2.0}


def test_copies_yield_to_what_computes_beside_them():
    """The second copy begins after the product did, and has only the time in which that has ended."""
    spans = [
        Span(0, 6000, "Memcpy DtoH (Device -> Pinned)"), Span(1000, 4000, "nvjet_sm90_tst_256x128"),
        Span(7000, 9000, "nvjet_sm90_tst_256x128"), Span(8000, 10000, "Memcpy HtoD (Pinned -> Device)"),
    ]  # fmt: skip
    assert in_milliseconds(worker.part_seconds(spans)) == {"products": 5.0, "elementwise": 4.0, "gaps": 1.0}


def test_marks_tell_head_and_update():
    marks = {
        (region, change): f"void at::native::{name}_kernel_cuda(x)" for name, (region, change) in worker.MARKS.items()
    }
    spans = [
        Span(0, 1, "nvjet_a"), Span(1, 1.5, marks["head", 1]), Span(2, 4, "nvjet_b"), Span(4, 4.5, marks["head", -1]),
        Span(5, 6, "nvjet_c"), Span(6, 6.5, marks["optimizer", 1]), Span(7, 8, "multi_tensor"),
        Span(8, 8.1, marks["optimizer", 1]), Span(9, 10, "_update"), Span(10, 10.1, marks["optimizer", -1]),
        Span(11, 12, "multi_tensor"), Span(12, 12.5, marks["optimizer", -1]), Span(13, 14, "multi_tensor"),
    ]  # fmt: skip
    found = {part: round(1e6 * s, 6) for part, s in worker.part_seconds(spans).items()}
    assert found == {"products": 2, "head": 2, "optimizer": 3, "elementwise": 1, "attention": 0, "gaps": 6}


def test_an_update_in_the_heads_backward_pass_is_the_optimizers():
    """A head with a weight of its own is stepped there by `update-in-backward`."""
    names = {place: f"aten::{name}_" for name, place in worker.MARKS.items()}
    spans = [
        Span(0, 1, names["head", 1]), Span(1, 2, "aten::mm"), Span(2, 3, names["optimizer", 1]),
        Span(3, 5, "aten::mul"), Span(5, 6, names["optimizer", -1]), Span(6, 7, "aten::mm"),
        Span(7, 8, names["head", -1]), Span(8, 9, "aten::mm"),
    ]  # fmt: skip
    found = {part: round(1e6 * s, 6) for part, s in worker.part_seconds(spans).items() if s}
    assert found == {"head": 2, "optimizer": 2, "products": 1, "gaps": 4}


def test_the_inner_of_two_that_begin_at_once():
    spans = [Span(0, 9000, "aten::linear"), Span(0, 8999, "aten::_softmax")]
    assert in_milliseconds(worker.part_seconds(spans)) == {"elementwise": 8.999, "products": 0.001}


def test_steps_are_counted_from_the_end_of_the_first():
    """From end to end; a copy on another stream that passes an end counts as far as it lies within."""
    step, copy = "void at::native::asin_kernel_cuda(x)", "Memcpy DtoH (Device -> Pinned)"
    spans = [
        Span(0, 1, "nvjet"), Span(17, 18, "nvjet"), Span(19, 23, copy), Span(20, 21, step), Span(22, 25, "nvjet"),
        Span(26, 27, step), Span(28, 31, "flash"), Span(32, 60, copy), Span(33, 34, step), Span(36, 40, "nvjet"),
    ]  # fmt: skip
    held, steps = worker.steady(spans)
    assert steps == 2 and held[0].start == 21 and max(s.end for s in held) == 34
    found = {part: round(1e6 * s, 6) for part, s in worker.part_seconds(held).items() if s}
    assert found == {"products": 3, "attention": 3, "elementwise": 1 + 2, "gaps": 4}
    assert worker.steady(spans[:5])[1] == 0, "one end ends no step that was seen whole"
    assert worker.steady([]) == ([], 0) and not any(worker.part_seconds([]).values())


def test_the_kernels_of_an_h200_are_known_by_their_names():
    """All that a record of whole steps lists: products are of cuBLAS and QuACK, attention is of flash-attn-4."""
    names = {name for line in KERNELS.read_text().splitlines() for name, *_ in json.loads(line)["kernels"]}
    for name in names:
        product = "nvjet" in name or "quackgemm" in name or "GemmMod" in name or "splitKreduce" in name
        wanted = "attention" if "flash_attncute" in name else "products" if product else "elementwise"
        assert worker.part_of(name) == wanted, name
    assert len(names) > 100


@pytest.mark.parametrize(("name", "part"), [
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>", "products"),
    ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<x",
        "products"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "products"), ("triton_tem_fused_mm_3", "products"),
    ("triton_mm_plus_mm", "products"), ("triton_poi_fused__scaled_dot_product_flash_attention_mm_2", "elementwise"),
    ("triton_red_fused_addmm_0", "elementwise"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<x>", "attention"), ("fmha_cutlassF_bf16_aligned_64x128", "attention"),
    ("aten::mm", "products"), ("aten::addmm", "products"), ("aten::bmm", "products"), ("aten::baddbmm", "products"),
    ("aten::_scaled_mm", "products"), ("aten::_int_mm", "products"), ("aten::linear", "products"),
    ("aten::mul", "elementwise"), ("aten::_softmax", "elementwise"), ("_update", "elementwise"),
    ("kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensor", "elementwise"),
])  # fmt: skip
def test_names(name, part):
    assert worker.part_of(name) == part


# --- a job


def job_of(of):
    trainer = build(decide(of))
    plan = RunPlan(trainer, trainer.stream.plan(None, of.train.steps or 1))
    trainer.batches = batches(trainer, plan)
    return trainer, plan


WITH = [{}, {"packing": {}, "fused-loss": {}}, {"compile": {}}, {"update-in-backward": {}}]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, when it begins to compile
@pytest.mark.parametrize(
    "with_", further(WITH[1:2] + WITH[3:] + WITH[:1] + WITH[2:3], 1), ids=lambda w: ", ".join(w) or "baseline"
)
def test_marks_change_nothing(with_, monkeypatch):
    """Bit by bit the same weights; and each mark that begins a region is followed by the one that ends it."""
    real = torch.compile  # the same graphs, without the code, which takes most of the time
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: real(f, backend="aot_eager", **more))
    of = run(**{"with": with_, **({"optim": {"clip": None, "lr": 1e-3}} if "update-in-backward" in with_ else {})})
    plain, plan = job_of(of)
    worker.loop(plain, plan)
    marked, plan = job_of(of)
    marks = RegionMarks(marked)
    with marks.watching() as spans:
        worker.loop(marked, plan)
    for a, b in zip(plain.trained, marked.trained, strict=True):
        assert torch.equal(a.local, b.local), a.name
    depth = {"head": 0, "optimizer": 0}
    names = [m[1] for s in spans if (m := worker.MARK.search(s.name))]
    each = len(marked.trained) if "update-in-backward" in with_ else 1
    assert names.count("atanh") == 4 * (1 + each), "around the update, and each call of the optimizer"
    assert names.count("asin") == 4 and worker.steady(spans)[1] == 3
    for name in filter(worker.MARKS.get, names):
        region, change = worker.MARKS[name]
        depth[region] += change
        assert 0 <= depth[region] <= 2
    assert not any(depth.values())
    found = worker.part_seconds(spans)
    assert set(found) == {*PARTS, GAPS} and min(found[p] for p in ("products", "head", "optimizer")) > 0
    wall = (max(s.end for s in spans) - min(s.start for s in spans)) / 1e6
    assert sum(found.values()) == pytest.approx(wall, rel=1e-6), "every moment once"


def test_no_marks_unless_watched():
    trainer, plan = job_of(run())
    marks = RegionMarks(trainer)
    marks.place.fill_(0.5)
    worker.loop(trainer, plan)
    assert marks.place.item() == 0.5


def test_the_head_alone_is_the_heads():
    """Its forward pass and its backward pass."""
    trainer, _ = job_of(run())
    marks = RegionMarks(trainer)
    hidden = torch.randn(8, 64, 64, requires_grad=True)
    labels = torch.zeros(8, 64, dtype=torch.int64)
    with marks.watching() as spans:
        trainer.model.head(hidden, labels).backward()
    told = {(part, span.name) for span, (_, _, part, _) in zip(_unmarked(spans), worker._parts(spans), strict=True)}
    assert ("head", "aten::mm") in told and ("products", "aten::mm") not in told


def _unmarked(spans):
    return [s for s in spans if not worker.MARK.search(s.name)]


# --- a process


@pytest.mark.parametrize(("fails", "note"), [
    (RuntimeError("CUPTI_ERROR_NOT_INITIALIZED"), "RuntimeError: CUPTI_ERROR_NOT_INITIALIZED (test_parts.py:"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: CUDA out of memory"),
    (RunError("three updates were not finite"), "RunError: three updates were not finite"),
    (MemoryError(), "out of memory: MemoryError"), (KeyError("x"), "KeyError: 'x'"),
    (None, "the profiler saw 0 whole steps of 3"),
])  # fmt: skip
def test_a_profiler_that_fails_costs_no_figure(monkeypatch, fails, note):
    class Broken:
        def __init__(self, **_: Any) -> None:
            if fails is not None:
                raise fails

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return []

    monkeypatch.setattr(torch.profiler, "profile", Broken)
    base = run()
    kept: list[dict[str, Any]] = []
    found = worker.measure(base, base, warmup=1, proof_steps=0, proof_documents=0, keep=kept.append)
    assert found["parts_note"].startswith(note) and "parts_s" not in found and len(found["step_s"]) == 3
    assert [k.pop("parts_note") for k in kept] == ["the process ended under the profiler"]
    assert kept == [{k: v for k, v in found.items() if k != "parts_note"}]


@pytest.mark.parametrize(("end", "note"), [
    ("import time; time.sleep(600)",
        "still running after 60 s, and stopped (limit_s); raise --limit SECONDS, " "or --budget of tune"),
    ("import os; os.kill(os.getpid(), 11)", "killed by signal 11 (SIGSEGV)"), ("sys.exit(0)", "x"),
])  # fmt: skip
def test_an_answer_counts_though_its_process_was_stopped(monkeypatch, end, note):
    """It hangs, or dies, under the profiler: figures were there before."""
    answer = json.dumps({"tokens_per_s": [1.0], "parts_note": "x"})
    monkeypatch.setattr(
        runner, "COMMAND", [sys.executable, "-c", f"import sys; open(sys.argv[2], 'w').write({answer!r}); {end}"]
    )
    waited = runner._exit_codes

    def once_answered(processes, limit_s):
        answered = Path(processes[0].args[-1])
        while processes[0].poll() is None and not (answered.exists() and answered.stat().st_size):
            time.sleep(0.01)
        return waited(processes, 0.1 if "sleep" in end else limit_s)

    monkeypatch.setattr(runner, "_exit_codes", once_answered)
    found = runner.run_worker({}, 60)
    del found["seconds"]
    assert found == {"tokens_per_s": [1.0], "parts_note": note}


def test_a_process_writes_its_figures_before_it_is_profiled(monkeypatch, tmp_path):
    asked, answered = tmp_path / "request.json", tmp_path / "result.json"
    base = config.dump_config(run())
    request = {"run": base, "baseline": base, "warmup": 1, "proof": {"steps": 0, "documents": 0}}
    asked.write_text(json.dumps({**request, "parent": os.getpid()}))
    there: list[dict[str, Any]] = []

    def profiled(*_):
        there.append(json.loads(answered.read_text()))
        return {"parts_s": {"products": 1.0}}

    monkeypatch.setattr(worker, "_profile", profiled)
    monkeypatch.setattr(record, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(sys, "argv", ["worker", str(asked), str(answered)])
    with pytest.raises(SystemExit) as left:
        worker.answer_bench_request()
    found = json.loads(answered.read_text())
    assert left.value.code == 0 and there[0].pop("parts_note") == worker.ENDED
    assert found.pop("parts_s") == {"products": 1.0} and there[0]["step_s"] == found["step_s"]
    assert found.pop("seconds") >= there[0].pop("seconds") and there == [found]


def test_the_head_of_a_pass_for_reference_is_the_heads_work():
    works = (
        WorkItem("head.products", "", "token", 1.0, of=("loss",)),
        WorkItem("reference.head", "", "token", 1.0, of=("loss",)),
        WorkItem("forward.qkv", "", "token", 1.0, of=("forward", "products")),
    )
    assert [cost._part(w) for w in works] == ["head", "head", "products"]
