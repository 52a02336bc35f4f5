"""The command line: one module per command, found by `torchax_serve.cli.main`.

Nothing here imports torch, jax or transformers while a module is loaded, so that ``--help`` answers at once.
Environment variables are read here and nowhere else in the project.
"""
