"""Other training systems as rungs of a ladder, one a file; a new one is a file and an entry in PEERS."""

from __future__ import annotations

from optrush_peers.torchtitan import Torchtitan
from optrush_peers.trainer import Trainer
from optrush_peers.unsloth import Unsloth
from optrush_peers.work import System

PEERS: tuple[type[System], ...] = (Trainer, Unsloth, Torchtitan)
