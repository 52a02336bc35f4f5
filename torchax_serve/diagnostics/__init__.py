"""Diagnosis of the installation, its devices and its kernels: ``torchax-serve doctor``.

It tells what is installed, what it runs on, and whether its kernels compute what they should.
"""
