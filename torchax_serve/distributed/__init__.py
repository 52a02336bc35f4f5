"""A model on several devices or hosts."""
