"""Optimizers over plain local tensors, and the learning rate."""
