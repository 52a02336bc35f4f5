"""Mllama's cross attention stores an image's features in the cache, where caches here have a token for a position."""

PREPENDS = "its cross attention stores an image's features beside the tokens"
