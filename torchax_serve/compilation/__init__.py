"""Compiled programs: where they are kept on disk, and how much room they take."""
