"""The engine: many requests on one device, a step at a time."""
