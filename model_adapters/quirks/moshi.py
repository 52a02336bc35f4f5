"""Moshi's masks show every token, while its cache keeps those of a window: steps see the window, prompts see all."""

UNMASKED_SLIDING_CACHE = True
