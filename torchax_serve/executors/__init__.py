"""Execution of step plans: packed on the paged cache, or one forward per sequence."""
