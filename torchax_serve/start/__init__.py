"""A second start: a record and weights on disk, and objects that stand for the rest."""
