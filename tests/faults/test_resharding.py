"""Checkpoints over ranks and over changes: any cutting into any other; what does not fit is refused on all ranks."""

import errno
import os

import pytest
import torch

from optrush import files
from optrush.errors import CheckpointError
from optrush.trainer import checkpoint
from optrush.trainer.checkpoint import Meta, SaveFailed, check_plan, choose, find_checkpoints, restore, save, verify

from harness import advance, holds, leftovers, meta, ranks, run, saved, small_job, told


def test_one_ranks_full_disk_is_everybodys(tmp_path):
    def work():
        job = small_job(tmp_path, "rows")
        advance(job, 2)
        save(job, 2, meta(2))
        real = files.write_piece

        def full(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if job.world.rank == 1:
            files.write_piece = full
        advance(job, 4)
        try:
            save(job, 4, meta(4))
            seen = "saved"
        except SaveFailed as error:
            seen = str(error)
        left = leftovers(tmp_path) if job.world.rank == 0 else []  # it is rank 0 that cleans up
        files.write_piece = real
        save(job, 6, meta(6))
        return [seen, left]

    assert ranks(2, work) == [["rank 1: [Errno 28] No space left on device", []]] * 2
    assert [p.name for p in find_checkpoints(tmp_path)] == ["step-000006", "step-000002"]


CUTTINGS = [(1, "whole"), (2, "rows"), (2, "whole"), (3, "rows"), (2, "columns"), (3, "copies")]


def test_any_cutting_loads_into_any_other(tmp_path):
    """R9: uneven and empty shards (33, 7 and 2 rows over 3 ranks), copies, columns, one value; bit for bit."""

    def step(n, how):
        return 2 * CUTTINGS.index((n, how)) + 2

    def write(n, how):
        job = small_job(tmp_path / f"{n}-{how}", how)
        advance(job, step(n, how))
        save(job, step(n, how), meta(1))

    def read(how):
        job = small_job(tmp_path, how)
        good = []
        for n, other in CUTTINGS:
            advance(job, 1)
            restore(job, find_checkpoints(tmp_path / f"{n}-{other}")[0], {})
            good.append(holds(job, step(n, other)))
        return good

    for n, how in CUTTINGS:
        ranks(n, lambda n=n, how=how: write(n, how)) if n > 1 else run(lambda n=n, how=how: write(n, how))
    for n, how in CUTTINGS:
        if n > 1:
            assert ranks(n, lambda how=how: read(how)) == [[True] * len(CUTTINGS)] * n
        else:
            assert read(how) == [True] * len(CUTTINGS)
    copies = verify(find_checkpoints(tmp_path / "3-copies")[0])
    assert list(copies.files) == ["rank-0.safetensors"], "what is the same on every rank is saved once"
    assert len(verify(find_checkpoints(tmp_path / "3-rows")[0]).tensors["param/narrow"].pieces) == 2
    told("R9", len(CUTTINGS) ** 2, "cuttings x cuttings, every tensor equal")


def test_blocks_inside_rows_are_cut_like_the_rows(tmp_path):
    """An optimizer that keeps one scale a block of a row (R, ceil(C / block))."""

    def job_with_blocks(how):
        job = small_job(tmp_path, how)
        trained = [t for t in job.trained if t.name in ("embed", "narrow")]
        states = {t.name: {"scale": torch.zeros(t.local.shape[0], 3)} for t in trained}
        job.trained, job.optimizer = trained, type("Blocks", (), {"state": lambda self: states})()
        return job

    def write():
        job = job_with_blocks("rows")
        advance(job, 2)
        save(job, 2, meta(2))

    ranks(3, write)
    job = job_with_blocks("whole")
    restore(job, find_checkpoints(tmp_path)[0], {})
    assert holds(job, 2)


def test_what_does_not_fit_is_refused(tmp_path):
    saved(tmp_path)
    path = find_checkpoints(tmp_path)[0]

    def refused(change, text, **kinds):
        job = small_job(tmp_path, **kinds)
        change(job)
        with pytest.raises(CheckpointError) as error:
            restore(job, path, {})
        assert text in error.value.found

    refused(lambda j: j.trained.pop(1), "rank-0.safetensors: the tensor `param/norm` is not in this run")
    refused(lambda j: None, "`param/embed` is (33, 64) F32, this run needs (33, 64) F64", dtype=torch.float64)
    refused(lambda j: j.state.clear(), "the state `kept` is not in this run")
    refused(lambda j: j.state.update(more=j.state["kept"]), "the state `more` is missing")

    def renamed(job):
        job.trained[0] = type(job.trained[0])("other", job.trained[0].parameter, True)
        job.optimizer = type(job.optimizer)(job.trained, job.config.optim, fused=False)

    refused(renamed, "manifest.json: the tensor `param/other` is missing")


def test_a_refusal_on_one_rank_is_a_refusal_on_all(tmp_path):
    saved(tmp_path)

    def work():
        job = small_job(tmp_path, "rows")
        if job.world.rank == 1:
            job.state.clear()
        try:
            restore(job, find_checkpoints(tmp_path)[0], {})
        except CheckpointError as error:
            return error.found
        return "restored"

    assert ranks(2, work) == ["manifest.json: the state `kept` is not in this run"] * 2

    def damaged():
        small_job(tmp_path, "rows")
        try:
            choose(tmp_path, "auto")
        except CheckpointError as error:
            return error.found
        return "chosen"

    for p in find_checkpoints(tmp_path):
        (p / "manifest.json").write_text("")
    found = ranks(2, damaged)
    assert found[0] == found[1] and "manifest.json is empty" in found[0]


def test_fingerprints(tmp_path):
    """R15: each field is refused by name, and accepted by name."""
    fields = ("config", "tokenizer", "template", "data")
    then = {f: f"{f}-was" for f in fields}
    saved(tmp_path, **then)
    job = small_job(tmp_path)
    path = find_checkpoints(tmp_path)[0]
    restore(job, path, then)
    for field in fields:
        now = then | {field: "new"}
        with pytest.raises(CheckpointError) as error:
            restore(job, path, now)
        assert f"`{field}` was {field}-was and is new" in error.value.found
        assert f"--allow-change {field}" in error.value.do
        assert restore(job, path, now, frozenset({field})).step == 6
    with pytest.raises(CheckpointError, match="`data` was data-was and is absent"):
        restore(job, path, {f: then[f] for f in fields[:3]})
    with pytest.raises(CheckpointError, match="did you mean `tokenizer`"):
        restore(job, path, then, frozenset({"tokeniser"}))
    told("R15", len(fields), "named, refused, and allowed by name")


def test_the_plan_must_be_the_same(tmp_path):
    saved(tmp_path, (2,))
    manifest, _ = choose(tmp_path, "auto")
    assert manifest is not None
    check_plan(manifest, 3, 20)
    with pytest.raises(CheckpointError, match="step 3 would begin at row 22, the checkpoint ended before row 20"):
        check_plan(manifest, 3, 22)
    check_plan(manifest, 3, 22, frozenset({"data"}))
    with pytest.raises(CheckpointError, match="this run has 1 steps, the checkpoint was saved after step 2"):
        check_plan(manifest, 1, 20)


def test_a_run_id_is_one_for_all_ranks(tmp_path):
    def work():
        small_job(tmp_path)
        return checkpoint.fresh_id()

    a, b = ranks(2, work)
    assert a == b and len(a) == 16 and checkpoint.fresh_id() != checkpoint.fresh_id()
    assert Meta(a, 0).skipped_in_a_row == 0
