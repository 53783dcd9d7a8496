"""Turn a resolved configuration into a trained model: build, training loop, checkpoints, run folder."""
