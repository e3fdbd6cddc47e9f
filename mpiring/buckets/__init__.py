"""Flat memory in which the tensors of a model are fused."""
