"""The only package that calls torchax: tensors as views of arrays, modules as pure functions."""
