"""Vectors in the memory of GPUs, and what copies and combines them."""
