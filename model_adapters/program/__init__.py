"""The pure forward of a model, and what of its code has to be known or replaced to trace it."""
