"""Replicas by Ray Serve: what needs no Ray itself."""
