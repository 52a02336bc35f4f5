"""How the tokens of a text become one embedding, by name; imports nothing, as flags are checked by it."""

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean")
"""mean: of all tokens; cls: the first; last; max: by dimension; mean_sqrt_len: the sum over the square root of the
number of tokens; weighted_mean: later tokens weigh more, by their place."""
