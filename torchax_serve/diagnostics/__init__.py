"""What is installed, what it runs on and whether its kernels compute what they should: ``torchax-serve doctor``."""
