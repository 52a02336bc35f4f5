"""Readers of quantized checkpoints: tensors as values, scales and offsets by group."""
