"""Checkpoints: written, published, verified, read back, sent elsewhere."""
