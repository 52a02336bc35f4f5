"""Rewrites of jaxprs: rows that are not read, concatenations that are sliced again."""
