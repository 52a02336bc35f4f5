"""The systems that `serving.py` compares, each in a process of its own, and what they are asked."""
