"""Adapters of peft on models that run on JAX."""
