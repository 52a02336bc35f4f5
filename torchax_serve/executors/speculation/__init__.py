"""Drafts of tokens, and the steps that verify them."""
