"""Many replicas of one model, by Ray Serve (extra ``ray``): an ingress, a router that knows prefixes, the replicas."""
