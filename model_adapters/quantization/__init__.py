"""Weights with fewer bits: rules that choose them, and how numbers are quantized."""
