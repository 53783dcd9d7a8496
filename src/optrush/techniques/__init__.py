"""The techniques, one a file. The order of ALL is the ladder's order; adding one is a file and a line here."""

from __future__ import annotations

from optrush.technique import Technique
from optrush.techniques.adam4bit import Adam4bit
from optrush.techniques.adam8bit import Adam8bit
from optrush.techniques.amp import Amp
from optrush.techniques.apollo import Apollo
from optrush.techniques.attention import Attention
from optrush.techniques.bf16 import Bf16
from optrush.techniques.compile import Compile
from optrush.techniques.context import Context
from optrush.techniques.cuda_graphs import CudaGraphs
from optrush.techniques.ddp import Ddp
from optrush.techniques.fp8 import Fp8
from optrush.techniques.fsdp import Fsdp
from optrush.techniques.fused_adamw import FusedAdamW
from optrush.techniques.fused_kernels import FusedKernels
from optrush.techniques.fused_loss import FusedLoss
from optrush.techniques.ia3 import Ia3
from optrush.techniques.int8 import Int8
from optrush.techniques.loader import Loader
from optrush.techniques.lora import Lora
from optrush.techniques.memory_cap import MemoryCap
from optrush.techniques.micro_batch import MicroBatch
from optrush.techniques.muon import Muon
from optrush.techniques.nf4 import Nf4
from optrush.techniques.offload_activations import OffloadActivations
from optrush.techniques.packing import Packing
from optrush.techniques.pad import Pad
from optrush.techniques.paged_states import PagedStates
from optrush.techniques.recompute import Recompute
from optrush.techniques.selective_recompute import SelectiveRecompute
from optrush.techniques.sort_by_length import SortByLength
from optrush.techniques.tensor import TensorParallel
from optrush.techniques.update_in_backward import UpdateInBackward
from optrush.techniques.wrap import Wrap

ALL: tuple[type[Technique], ...] = (
    Amp,
    Bf16,
    Nf4,
    Int8,
    Lora,
    Ia3,
    FusedAdamW,
    Adam8bit,
    Adam4bit,
    Muon,
    Apollo,
    Attention,
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
    PagedStates,
    UpdateInBackward,
    CudaGraphs,
    TensorParallel,
    Ddp,
    Fsdp,
    Context,
    MicroBatch,
    MemoryCap,
)
