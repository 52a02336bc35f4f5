"""Bundles: programs, weights and tokenizer in a folder that runs without torch."""
