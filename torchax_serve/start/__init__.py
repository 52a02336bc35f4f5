"""What a second start needs of a model: a record and its weights on disk, and objects that stand for the rest."""
