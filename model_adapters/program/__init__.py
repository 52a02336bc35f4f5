"""The pure forward of a model, and the facts and replacements of its code for a trace."""
