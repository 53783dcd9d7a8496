"""The ladder: each optimisation measured separately, in a fresh process, against the rung before it."""
