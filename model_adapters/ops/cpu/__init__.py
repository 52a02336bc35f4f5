"""C++ kernels for the CPU: their sources, their build, and the JAX functions that call them."""
