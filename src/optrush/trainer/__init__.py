"""Turn a resolved configuration into a trained model: build, loop, checkpoints, run folder."""
