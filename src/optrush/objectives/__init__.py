"""What is learnt. An objective says which tokens are targets; the score is loss.py's."""

from __future__ import annotations

from optrush.config import Run


def learnt(run: Run) -> str:
    """Which tokens of a conversation are targets: in pre-training all of them, in fine-tuning what the run says."""
    return "all" if run.objective == "pretrain" else run.data.train_on
