"""Readers of quantized checkpoints: each format's tensors as values, scales and offsets by group."""
