"""Kinds of types, in the order of tables and pictures."""

KINDS = ("dense", "experts", "latent", "hybrid", "recurrent", "encoder-decoder", "per-sequence", "speech", "media")
