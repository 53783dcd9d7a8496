"""The ladders behind the published figures: each rung is one that an H200 takes, as far as can be asked without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrush import config, plan, technique
from optrush.bench import ladder, peer, peer_worker
from optrush.hardware import named
from optrush.prepare import prepare

FOLDER = Path(__file__).parents[2] / "benchmarks"
CLIMBED = {
    "adapter-levers": ("llama1b-peers",),
    "adapters": ("llama1b-peers", "llama8b"),
    "eight": ("llama8b",),
    "least": ("llama1b-peers", "llama8b"),
    "levers": ("llama1b-peers",),
    "longest": ("llama8b",),
    "longest-qlora": ("llama8b",),
    "peers-best": ("llama1b-peers",),
    "qlora": ("llama8b",),
    "rows": ("llama1b-peers",),
    "small-card": ("llama3b",),
}


@pytest.mark.parametrize(("name", "load"), [(n, load) for n, loads in CLIMBED.items() for load in loads])
def test_every_rung_is_one_that_an_h200_takes(name, load, monkeypatch):
    for module in (technique, peer):
        monkeypatch.setattr(module, "library", lambda name: "1")
    h200 = named("h200")[0]
    run = config.parse((FOLDER / f"{load}.yaml").read_text(), load)
    climbed = ladder.find(str(FOLDER / f"{name}.yaml"), run)
    for rung in ladder.rungs(climbed, run, True):
        prepared = prepare(rung.run, device=h200)
        if rung.peer is not None:
            peer_worker.check(rung.peer, rung.run, prepared.setup.device)
            continue
        said = plan.predict(rung.run, "h200")
        assert said.fits, f"{name}: {rung.name} takes {said.peak_bytes / 2**30:.1f} GiB"


def test_every_ladder_of_the_folder_is_looked_at():
    looked = {*CLIMBED, "chats", "loader"}  # the last two read texts that are made first
    assert {f.stem for f in FOLDER.glob("*.yaml") if "rungs:" in f.read_text()} == looked
