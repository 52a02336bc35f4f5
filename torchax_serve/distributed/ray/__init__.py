"""Replicas of one model on Ray Serve (extra ``ray``): ingress, prefix-aware router, replicas."""
