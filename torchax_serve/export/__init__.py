"""Bundles: a model's programs, weights and tokenizer in a folder that runs without torch and transformers."""
