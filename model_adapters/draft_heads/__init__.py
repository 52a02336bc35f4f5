"""Draft heads: small modules that guess tokens from the hidden states of a model."""
