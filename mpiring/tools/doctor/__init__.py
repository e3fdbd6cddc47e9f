"""Finds what is wrong with an MPI launch or a machine: `python -m mpiring doctor`."""
