"""Names of a checkpoint's files."""

CONFIG = "config.json"
MODULES = "modules.json"  # of sentence-transformers
