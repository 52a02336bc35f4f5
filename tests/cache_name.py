"""What the installed transformers calls the cache of a decoder: `past_key_values`, from 5.24 on `cache`."""

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE = ALL_CACHE_NAMES[0]
