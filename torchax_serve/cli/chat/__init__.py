"""Interactive chat in the terminal."""
