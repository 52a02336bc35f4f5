"""Draft heads: small modules that guess further tokens from the hidden states of the model they belong to."""
