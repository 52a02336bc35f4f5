"""Serves one model on several hosts, and several replicas on a cluster."""
