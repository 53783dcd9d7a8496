"""The ladder: each optimization measured separately, in a fresh process, against the rung before it."""
