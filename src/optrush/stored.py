"""What techniques share that hold frozen linears in fewer bits: lines of the ledger, needs of the kernels. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from optrush.errors import NeedsError
from optrush.hardware import Device
from optrush.ledger import OURS, Line, Rule, Work, add, like, live, retype
from optrush.technique import Setup
from optrush.toolchain import compilers


def demand(technique: str, device: Device) -> None:
    """For a stage: refuses a CUDA device for which this machine cannot build our Triton kernels; a CPU needs none.

    Raises:
        NeedsError: what is missing.
    """
    for need in compilers(device) if device.kind == "cuda" else ():
        if not need.met:
            raise NeedsError(need.asked.replace("torch.compile", f"`{technique}`"), need.found, need.do)


def predict(setup: Setup, width_bytes: float) -> Iterator[Rule]:
    """Rules for blocks whose weights take `width_bytes` each; the few values of their norms are counted as if theirs
    did too."""
    why = f"frozen, in {8 * width_bytes:.3f} bits each"
    yield retype({"stored": width_bytes}, why)
    yield live("weights.blocks", why, role="stored")
    yield live("casts.blocks", "made dense in the products' type, never cast", gone=True)
    launches = OURS * 7.0 * setup.blocks  # one for each of q, k, v, o, gate, up, down
    for way in ("forward", "backward"):
        why = "codes of a linear read, to make it dense"
        yield like("casts.blocks", Work(f"{way}.packed", why, "micro", values=1.0, role="stored"))
        why = "the dense weight of a linear written"
        yield like("casts.blocks", Work(f"{way}.unpacked", why, "micro", values=1.0, role="product"))
        yield add(Work(f"{way}.unpacking.launches", "a kernel for each piece", "micro", launches=launches))
    if setup.shape is not None:
        s = setup.shape
        largest = s.width * max(2 * s.ff_width, (s.heads + 2 * s.kv_heads) * s.head_width)
        for live_in in ("forward", "backward"):
            why = "the largest linear, dense while it multiplies"
            yield add(Line(f"working.dense.{live_in}", why, largest, "product", live_in))
