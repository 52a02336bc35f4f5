"""Names of the poolings. Imports nothing, since the command line checks flags with it."""

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean")
"""mean: mean over the tokens; cls: first token; last: last token; max: maximum by dimension; mean_sqrt_len: sum over
the square root of the number of tokens; weighted_mean: mean with weights that grow with the position."""
