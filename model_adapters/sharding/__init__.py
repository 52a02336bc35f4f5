"""Sharding rules applied to a model's weights and activations on a mesh."""
