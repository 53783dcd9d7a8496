"""The techniques. The order of ALL is the ladder's order; a new technique needs a file and a line here.

Other packages add theirs through the entry point group `optrush.techniques` (docs/python.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from optrush.errors import one_line
from optrush.technique import Technique
from optrush.techniques.adam8bit import Adam4bit, Adam8bit
from optrush.techniques.amp import Amp
from optrush.techniques.attention import Attention
from optrush.techniques.bf16 import Bf16
from optrush.techniques.compile import Compile
from optrush.techniques.context import Context
from optrush.techniques.cuda_graphs import CudaGraphs
from optrush.techniques.ddp import Ddp
from optrush.techniques.deepspeed import DeepSpeed
from optrush.techniques.ema import Ema
from optrush.techniques.experts import ExpertParallel
from optrush.techniques.fp8 import Fp8
from optrush.techniques.freeze import Freeze
from optrush.techniques.fsdp import Fsdp
from optrush.techniques.fused_adamw import FusedAdamW
from optrush.techniques.fused_kernels import FusedKernels
from optrush.techniques.fused_loss import FusedLoss
from optrush.techniques.ia3 import Ia3
from optrush.techniques.loader import Loader
from optrush.techniques.longlora import LongLora
from optrush.techniques.lora import Lora
from optrush.techniques.memory_cap import MemoryCap
from optrush.techniques.micro_batch import MicroBatch
from optrush.techniques.muon import Muon
from optrush.techniques.neftune import Neftune
from optrush.techniques.nf4 import Int8, Nf4
from optrush.techniques.offload_activations import OffloadActivations
from optrush.techniques.paged_states import PagedStates
from optrush.techniques.pipeline import Pipeline
from optrush.techniques.plugged_optimizer import PluggedOptimizer
from optrush.techniques.quantised_activations import QuantisedActivations
from optrush.techniques.quantised_links import QuantisedLinks
from optrush.techniques.recompute import Recompute
from optrush.techniques.rope import Rope
from optrush.techniques.rows import Packing, Pad, SortByLength, Wrap
from optrush.techniques.selective_recompute import SelectiveRecompute
from optrush.techniques.tensor import TensorParallel
from optrush.techniques.update_in_backward import UpdateInBackward

OWN: tuple[type[Technique], ...] = (
    Amp,
    Bf16,
    Nf4,
    Int8,
    Lora,
    Ia3,
    Freeze,
    Neftune,
    Rope,
    FusedAdamW,
    Adam8bit,
    Adam4bit,
    Muon,
    PluggedOptimizer,
    Ema,
    Attention,
    LongLora,
    FusedKernels,
    Compile,
    Fp8,
    Pad,
    SortByLength,
    Wrap,
    Packing,
    Loader,
    FusedLoss,
    Recompute,
    SelectiveRecompute,
    OffloadActivations,
    QuantisedActivations,
    PagedStates,
    UpdateInBackward,
    CudaGraphs,
    TensorParallel,
    Pipeline,
    ExpertParallel,
    Ddp,
    Fsdp,
    DeepSpeed,
    QuantisedLinks,
    Context,
    MicroBatch,
    MemoryCap,
)


def installed(own: Sequence[type[Technique]]) -> Iterator[type[Technique]]:
    """Yield the techniques of other packages; skip unusable ones with a message on standard error."""
    names = {technique.name for technique in own}
    for entry in sorted(entry_points(group="optrush.techniques"), key=lambda entry: entry.name):
        try:
            loaded = entry.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Technique)):
                raise TypeError(f"{entry.value} is no subclass of optrush.technique.Technique")
            if loaded.name != entry.name or loaded.name in names:
                raise ValueError(f"its name {loaded.name!r} is not the entry point's, or another technique has it")
        except (Exception, SystemExit) as error:  # foreign code can raise anything
            package = "a package" if entry.dist is None else entry.dist.name
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            sys.stderr.write(f"the technique {entry.name} of {package} is left out: {reason}\n")
        else:
            names.add(loaded.name)
            yield loaded


ALL = (*OWN, *installed(OWN))
