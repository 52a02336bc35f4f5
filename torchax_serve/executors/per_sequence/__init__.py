"""Execution of one forward per sequence, for models that cannot run packed."""
