"""How a process sets its device up."""

import pytest
import torch

from optrush import hardware
from optrush.errors import ConfigError
from optrush.trainer import distributed


@pytest.mark.parametrize("name", [None, *distributed.CHOSEN])
def test_segments_grow_unless_somebody_chose(monkeypatch, name):
    at, asked = [], []
    for variable in (*distributed.CHOSEN, "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "set_device", at.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    assert distributed.join("cuda") == torch.device("cuda", 0)
    assert at == [torch.device("cuda", 0)] and asked == ([] if name else ["expandable_segments:True"])
    assert distributed.join("cpu") == torch.device("cpu") and len(at) == 1, "a CPU has neither"


def test_one_process_is_alone(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    world = distributed.build_mesh({}, torch.device("cpu"))
    assert (world.rank, world.ranks, world.mesh) == (0, 1, None)


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "4096\n", "a/b/memory.max": "9000"}, [4096, 9000]),
        ("0::/\n", {"memory.max": "8192\n"}, [8192]),  # in a container of its own name space
        ("4:cpu,memory:/pod/x\n0::/\n", {"memory/pod/x/memory.limit_in_bytes": "77"}, [77]),
        ("4:memory:/pod/x\n", {"memory/memory.limit_in_bytes": "78"}, [78]),  # of its own name space
        ("3:cpu:/pod\n9:name=systemd:/\nnot a line\n", {"memory.max": "1"}, []),
        (None, {}, []),
    ],
)
def test_the_memory_that_a_container_may_have(tmp_path, groups, limits, found):
    (tmp_path / "proc/self").mkdir(parents=True)
    if groups is not None:
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert sorted(hardware._limits(tmp_path)) == found
    whole = hardware._memory(str(tmp_path / "none"))
    assert hardware._memory(str(tmp_path)) == min([whole, *found])


def test_cards_are_found_by_their_memory():
    with pytest.raises(ConfigError) as error:
        hardware.parse_hardware("5090d 24gb")
    assert "`4090`" in error.value.do and "did you mean" in error.value.do
    for text, name in {
        "A10G": "NVIDIA A10G",
        "H100 PCIe": "NVIDIA H100 PCIe",
        "RTX 4060": "NVIDIA GeForce RTX 4060",
    }.items():
        assert hardware.parse_hardware(text)[0].name == name
    hosted, count = hardware.parse_hardware("2x4090@64GiB")
    assert (
        hosted.host_memory_bytes, count, hosted.memory_bytes,
    ) == (64 * 2**30, 2, hardware.NAMED["4090"].memory_bytes)  # fmt: skip
