"""The techniques, one a file. The order of ALL is the ladder's order; adding one is a file and a line here."""

from __future__ import annotations

from optrush.technique import Technique
from optrush.techniques.amp import Amp
from optrush.techniques.attention import Attention
from optrush.techniques.bf16 import Bf16
from optrush.techniques.compile import Compile
from optrush.techniques.ddp import Ddp
from optrush.techniques.fsdp import Fsdp
from optrush.techniques.fused_adamw import FusedAdamW
from optrush.techniques.fused_loss import FusedLoss
from optrush.techniques.loader import Loader
from optrush.techniques.packing import Packing
from optrush.techniques.pad import Pad
from optrush.techniques.recompute import Recompute
from optrush.techniques.sort_by_length import SortByLength
from optrush.techniques.wrap import Wrap

ALL: tuple[type[Technique], ...] = (
    Amp,
    Bf16,
    FusedAdamW,
    Attention,
    Compile,
    Pad,
    SortByLength,
    Wrap,
    Packing,
    Loader,
    FusedLoss,
    Recompute,
    Ddp,
    Fsdp,
)
