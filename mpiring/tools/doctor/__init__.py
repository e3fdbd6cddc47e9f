"""Finds problems with an MPI launch or a machine: `python -m mpiring doctor`."""
