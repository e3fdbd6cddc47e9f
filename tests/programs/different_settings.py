"""Gives rank 1 another value of a setting than rank 0."""

import sys

from mpi4py import MPI

import mpiring

name, *values = sys.argv[1:]
value = values[MPI.COMM_WORLD.rank]
mpiring.init(config=mpiring.Config(**{name: int(value) if value.isdigit() else value}))
