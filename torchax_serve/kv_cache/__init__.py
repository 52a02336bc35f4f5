"""Memory of the engine's cache: pools of pages, states of slots, int8 scales."""
