"""Packed execution: all rows of a step as one ragged batch on the paged cache."""
