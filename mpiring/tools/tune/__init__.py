"""Measures which algorithm is the fastest here, and advises: `python -m mpiring tune`."""
