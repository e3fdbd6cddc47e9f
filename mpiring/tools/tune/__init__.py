"""Measures which algorithm is the fastest here: `python -m mpiring tune`."""
