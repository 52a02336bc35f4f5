"""The bridge to torchax: tensors as views of arrays, modules as pure functions.

No other package calls torchax.
"""
