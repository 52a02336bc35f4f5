"""One table of sharding rules a family of architectures; data only."""
