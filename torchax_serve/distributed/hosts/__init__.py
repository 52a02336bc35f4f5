"""Hosts that share a model: who they are, and what they send each other."""
