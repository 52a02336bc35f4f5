"""GIT stores the patches of its image in the cache before the text, where caches here have a token for a position."""

PREPENDS = "its cache holds the patches of an image before the text"
