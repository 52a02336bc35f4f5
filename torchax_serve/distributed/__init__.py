"""One model on several hosts, and several models on a cluster."""
