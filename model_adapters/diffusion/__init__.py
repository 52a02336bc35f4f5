"""Modules of diffusers as pure functions, and their attention on this project's op."""
