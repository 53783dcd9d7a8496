"""Optimizers over local tensors (no DTensor), and the learning rate."""
