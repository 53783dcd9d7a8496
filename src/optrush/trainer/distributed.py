"""Join the process group, build the mesh, and exchange host integers and texts between ranks.

One process per device. Device tensors go through NCCL (gloo on CPU); host integers and the stop flag through gloo, so
that counting a step's targets never waits for the GPU.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from optrush import errors
from optrush.errors import ConfigError, RunError, UserError, first_line
from optrush.launch import launched
from optrush.technique import DATA_AXES, MESH_ORDER, SAME_ROWS, SUMMED
from optrush.trainer.peers import Start, Watch, agree_on_prefix

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Result = TypeVar("Result")

_meetings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # store keys used so far, by name
SEGMENTS = "expandable_segments:True"  # less fragmentation
CHOSEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables by which users configure torch's allocator


@dataclass(frozen=True)
class World:
    """This process among all ranks. `mesh` is None with one process, which calls no collective."""

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh | None = None
    pairs: Mapping[frozenset[int], dist.ProcessGroup] = field(default_factory=dict)  # see `neighbour_groups`

    def at(self, axis: str) -> int:
        """Return this rank's position on an axis; 0 if the mesh has no such axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None and self.along(axis) > 1 else 0

    def along(self, axis: str) -> int:
        """Return the number of ranks of an axis; 1 if the mesh has no such axis."""
        if self.mesh is None:
            return 1
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape)).get(axis, 1)

    @property
    def data_rank(self) -> int:
        place = 0
        for axis in DATA_AXES:
            place = place * self.along(axis) + self.at(axis)
        return place

    @property
    def data_ranks(self) -> int:
        return math.prod(self.along(axis) for axis in DATA_AXES)

    @property
    def first(self) -> bool:
        """Return whether this rank is the first of those with the same rows."""
        return not any(self.at(axis) for axis in SAME_ROWS)

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of its pipeline stage, or of all ranks without a pipeline."""
        return self.rank % (self.ranks // self.along("pp")) == 0

    def sum_along(self, axis: str, t: Tensor) -> Tensor:
        """Return the sum over an axis' ranks; the gradient is that of this rank's part."""
        if self.mesh is None or self.along(axis) == 1:
            return t
        total = t.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group(axis))
        return t + (total - t.detach())

    def summed(self, t: Tensor) -> DeviceMesh | None:
        """Return, as one axis, the ranks with gradients of the same shard from other tokens."""
        cut = cut_axes(t)
        return self.flat(*(axis for axis in SUMMED if axis not in cut))

    def shards(self, *cut: str) -> DeviceMesh | None:
        """Return the mesh for data sharding: its axes as one, after "rep" if there is one.

        Args:
            cut: axes over which the tensors are already sharded.
        """
        joined = self.flat(*(axis for axis in SUMMED if axis not in ("rep", *cut)))
        if self.mesh is None or joined is None or self.along("rep") == 1:
            return joined
        assert joined.mesh_dim_names is not None, "build_mesh names every axis"
        return self.mesh["rep", joined.mesh_dim_names[0]]

    def flat(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh's axes among these as one axis; None with one process."""
        if self.mesh is None:
            return None
        return self.mesh["_".join(a for a in self.mesh.mesh_dim_names or () if a in axes)]

    @cached_property
    def summing(self) -> dist.ProcessGroup | None:
        """Return the ranks with gradients of the same weights from other tokens; None: only this one."""
        mesh = self.flat(*SUMMED)
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()


TIMEOUT_S = 600.0  # the default of `train.timeout`
JOINING_S = 60.0  # minimum wait for others to start: they may import torch from a slow disk
_watch: Watch | None = None  # of the process group that `join` joined


def join(kind: str, timeout_s: float = TIMEOUT_S) -> torch.device:
    """Set up the device, and join the process group if a launcher started several processes.

    Args:
        timeout_s: maximum time that a rank may keep the others waiting in a collective.

    Returns:
        This process's device.

    Raises:
        RunError: a rank did not connect within `timeout_s`, at least JOINING_S. The process exits if another process on
            this host is stopped for `timeout_s`.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
        if not any(name in os.environ for name in CHOSEN):
            torch._C._accelerator_setAllocatorSettings(SEGMENTS)  # the variable is read only once, perhaps earlier
    if launched()[1] > 1 and not dist.is_initialized():
        _join_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout_s)
    return device


def _join_group(backend: str, timeout_s: float) -> None:
    """Create the process group of all ranks and the watch over them; raise RunError if that fails."""
    global _watch
    rank, ranks = launched()
    limit_s = max(timeout_s, JOINING_S)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect(serves: bool) -> Store:
        limit = timedelta(seconds=limit_s)
        return TCPStore(*where, ranks, serves, limit, wait_for_workers=False, multi_tenant=True)

    start = Start(rank, ranks, timeout_s)
    try:
        with start.watched():
            store = connect(rank == 0 and not agent)
            name = agree_on_prefix(store, rank, ranks, limit_s, start.known)
            reports, store = PrefixStore(f"{name}/watch", store), PrefixStore(name, store)
            limit = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            _watch = Watch(PrefixStore(f"{name}/watch", connect(False)), reports, rank, ranks, timeout_s, start.known)
    except RuntimeError as error:
        do = "look for another rank's error above; check MASTER_ADDR and MASTER_PORT"
        raise RunError(f"rank {rank} of {ranks}, joining the others", first_line(error), do) from error


def record_operation(operation: str, step: int = 0, at_once: bool = True) -> None:
    """Record the starting operation, for the error if another rank does not reach it.

    Args:
        at_once: publish it before the next heartbeat; operations in every step are too short for this.
    """
    if _watch is not None:
        _watch.note(step, operation, at_once)


def resume_with(line: Callable[[], str]) -> None:
    """Set the remedy in the error about a missing rank."""
    if _watch is not None:
        _watch.resume = line


@contextmanager
def reported() -> Iterator[None]:
    """Report this rank's error to the others; name the missing rank if a collective failed."""
    try:
        yield
    except BaseException as error:
        raised = error if _watch is None else _watch.explain(error)
        if raised is error:
            raise
        raise raised from error


def build_mesh(axes: Mapping[str, int], device: torch.device) -> World:
    """Return this process in the mesh: the declared axes, and "dp" with the remaining ranks."""
    rank, ranks = launched()
    if ranks == 1:
        return World(0, 1, device)
    made = set[str]()
    sizes = {**axes, "dp": ranks // math.prod(axes.values())}
    names = tuple(a for a in MESH_ORDER if a in sizes)
    mesh = init_device_mesh(device.type, tuple(sizes[a] for a in names), mesh_dim_names=names)
    for left_out in (
        (),
        ("rep",),
        ("ep",),
        ("rep", "ep"),
        ("cp",),
        ("rep", "cp"),
    ):  # on all ranks: it creates process groups
        several = tuple(a for a in names if a in SUMMED and a not in left_out)
        if len(several) > 1 and "_".join(several) not in made:
            made.add("_".join(several))
            mesh[several]._flatten("_".join(several))
    return World(rank, ranks, device, mesh, neighbour_groups(mesh))


def neighbour_groups(mesh: DeviceMesh) -> dict[frozenset[int], dist.ProcessGroup]:
    """Create a process group for each pair of neighbours in each pipeline's ring of ranks; return this rank's.

    Every rank creates all of them, in one order, as `dist.new_group` requires.
    """
    if "pp" not in (names := mesh.mesh_dim_names or ()):
        return {}
    rings = mesh.mesh.movedim(names.index("pp"), -1).flatten(end_dim=-2).tolist()
    pairs = dict.fromkeys(frozenset(pair) for ring in rings for pair in itertools.pairwise([*ring, ring[0]]))
    groups = {pair: dist.new_group(sorted(pair)) for pair in pairs}
    return {pair: group for pair, group in groups.items() if dist.get_rank() in pair}


@contextmanager
def leaving() -> Iterator[None]:
    """Leave the process group at the end; without an error, after the others."""
    global _watch
    with reported():
        yield
        record_operation("the end of the run")
        wait_for_all()  # rank 0 may write for a long time, and serves the store that others still use
        host_sum([0])
    if _watch is not None:
        _watch.close()
        _watch = None
    if dist.is_initialized():  # after an error this may wait for the others
        dist.destroy_process_group()


def host_sum(values: list[int]) -> list[int]:
    """Return the sums of host integers over all ranks, through the CPU."""
    if not dist.is_initialized():
        return values
    box = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(box)
    return [int(v) for v in box]


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace small tensors by their sums over the ranks of a group: one collective, in float32."""
    if not tensors:
        return
    flat = torch.cat([t.reshape(-1).float() for t in tensors])
    dist.all_reduce(flat, group=group)
    for t, total in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        t.copy_(total.view_as(t))


def wait_for_all() -> None:
    """Wait for every rank without a time limit: no collective can time out.

    For work of different duration per machine, such as tokenising.
    """
    exchange("here", math.inf)


def exchange(
    text: str, limit_s: float, name: str = "", cancelled: Callable[[], bool] = lambda: False
) -> list[str] | None:
    """Return every rank's text without a collective; None: a rank did not answer in time.

    Args:
        name: of a thread's exchanges, whose order relative to others differs between ranks.
        cancelled: returns whether to give up.
    """
    if not dist.is_initialized():
        return [text]
    store, place = dist.distributed_c10d._get_default_store(), next(_meetings[name])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = [f"optrush/{name}/{place}/{r}" for r in range(ranks)]
    store.set(everyone[rank], text)
    until, pause = time.monotonic() + limit_s, 0.001
    while not store.check(everyone):
        if time.monotonic() > until or cancelled():
            return None
        time.sleep(pause)
        pause = min(0.05, 2 * pause)
    if place:  # all have read the previous exchange
        store.delete_key(f"optrush/{name}/{place - 1}/{rank}")
    return [store.get(key).decode() for key in everyone]


def gather(text: str) -> list[str]:
    """Return every rank's text, in order of rank, through the CPU."""
    if not dist.is_initialized():
        return [text]
    data, rank, ranks = text.encode(), dist.get_rank(), dist.get_world_size()
    sizes = host_sum([len(data) if r == rank else 0 for r in range(ranks)])
    box = torch.zeros(max(sizes), dtype=torch.uint8)
    if data:
        box[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    boxes = [torch.empty_like(box) for _ in sizes]
    dist.all_gather(boxes, box)
    return [b[:n].numpy().tobytes().decode() for b, n in zip(boxes, sizes)]


def from_first(text: str) -> str:
    """Return rank 0's text on every rank."""
    return gather(text if launched()[0] == 0 else "")[0]


def from_stages(world: World, own: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors by name, on rank 0 also the other pipeline stages'; every rank calls it.

    Args:
        own: full tensors, on the host of each stage's first rank (`World.leads`).
    """
    stages = world.along("pp")
    for stage in range(stages):
        leader = stage * (world.ranks // stages)  # "pp" is the outermost axis
        if stage == world.at("pp"):
            for name, t in own:
                if world.leads and world.rank:
                    _send(0, name, t)
                yield name, t
            if world.leads and world.rank:
                dist.send(torch.zeros(1, dtype=torch.int64), 0)
        elif world.rank == 0:
            yield from _received(leader)
        if stages > 1:
            wait_for_all()  # not in a collective: rank 0 is writing


def _send(to: int, name: str, t: Tensor) -> None:
    head = json.dumps([name, str(t.dtype).removeprefix("torch."), list(t.shape)]).encode()
    dist.send(torch.tensor([len(head)]), to)
    dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
    if t.numel():
        dist.send(t.detach().contiguous().flatten().view(torch.uint8), to)


def _received(source: int) -> Iterator[tuple[str, Tensor]]:
    length = torch.zeros(1, dtype=torch.int64)
    while dist.recv(length, source) is not None and int(length):
        head = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(head, source)
        name, dtype, shape = json.loads(head.numpy().tobytes())
        t = torch.empty(shape, dtype=getattr(torch, dtype))
        if t.numel():
            dist.recv(t.flatten().view(torch.uint8), source)  # receives into its storage
        yield name, t


def agree(error: UserError | RunError | None) -> None:
    """Raise the first rank's error on every rank, so that no rank waits for one that left; every rank calls it."""
    reports = [json.loads(t) for t in gather(json.dumps([type(error).__name__, error.args] if error else None))]
    for kind, args in filter(None, reports):
        agreed: UserError | RunError = getattr(errors, kind)(*args)
        agreed.everywhere = True  # one rank prints it
        raise agreed from error


def agreed(work: Callable[[], Result]) -> Result:
    """Run work without a collective, return its result once all ranks are done; raise the first rank's error."""
    error: UserError | RunError | None = None
    try:
        result = work()
    except (UserError, RunError) as e:
        error = e
    wait_for_all()  # one machine may have worked for an hour
    agree(error)
    return result


def check_equal(what: Mapping[str, str]) -> None:
    """Raise ConfigError if ranks read different files: their training or their collectives would diverge."""
    digests = [json.loads(t) for t in gather(json.dumps(dict(what)))]
    for rank, digest in enumerate(digests):
        for name in digest:
            if digest[name] != digests[0].get(name):
                asked, do = "the same files on every rank", "copy them again, and use absolute paths"
                error = ConfigError(asked, f"`{name}` of rank {rank} differs from rank 0's", do)
                error.everywhere = True
                raise error


# --- Sharded tensors (torch's DTensor), without importing their module.
#
# The import takes a second, and most processes do not need it: if it is not imported, no tensor is sharded.


def is_sharded(t: Tensor) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor: this rank may have only a shard."""
    made = sys.modules.get("torch.distributed.tensor")
    return made is not None and isinstance(t, made.DTensor)


def is_gathered(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP gathers this module's parameters."""
    made = sys.modules.get("torch.distributed.fsdp")
    return made is not None and isinstance(module, made.FSDPModule)


def local(t: Tensor) -> Tensor:
    """Return this rank's shard, which shares storage."""
    return t.to_local() if is_sharded(t) else t


def like(t: Tensor, piece: Tensor) -> Tensor:
    """Return a rank's shard as a tensor sharded like `t`."""
    if not is_sharded(t):
        return piece
    return type(t).from_local(piece, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def gathered(t: Tensor) -> Tensor:
    """Return the full tensor; if it is sharded, every rank must call it."""
    return t.full_tensor() if is_sharded(t) else t


def cut_axes(t: Tensor) -> set[str]:
    """Return the mesh axes over which a tensor is sharded."""
    if not is_sharded(t):
        return set()
    placed = zip(t.device_mesh.mesh_dim_names or (), t.placements, strict=True)
    return {axis for name, how in placed if not how.is_replicate() for axis in name.split("_")}  # joined axes


def offset(t: Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard in the full tensor."""
    if not is_sharded(t):
        return (0,) * t.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)[1])
