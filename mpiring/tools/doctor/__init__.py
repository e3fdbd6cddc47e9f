"""Finds problems of an MPI launch or a machine: `python -m mpiring doctor`."""
