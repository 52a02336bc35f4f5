"""Checks of every architecture of transformers beside eager PyTorch, and the pages about their results."""
