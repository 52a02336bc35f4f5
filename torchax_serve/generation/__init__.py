"""The drop-in for Hugging Face ``generate``: a static batch, and transformers' own loops."""
