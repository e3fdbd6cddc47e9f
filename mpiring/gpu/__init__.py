"""Vectors in the memory of GPUs, with functions to copy and combine them."""
