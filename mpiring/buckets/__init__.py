"""Flat memory for tensors, and what is remembered about slices of it."""
