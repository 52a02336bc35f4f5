"""Has libraries of torchax-serve's C++ kernels; `manifest.json` says for which processors."""
