"""Speed of every model type at a size where time is weights: what `types_speed.py` is made of."""
