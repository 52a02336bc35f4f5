"""A model's compiled forward: capabilities, padding, static arguments, encoder."""
