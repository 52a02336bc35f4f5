"""Replicas of a model on Ray Serve (extra ``ray``): ingress, prefix-aware router, replicas."""
