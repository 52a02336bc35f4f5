"""Checks of arguments before anything is computed, with errors that name the remedy."""
