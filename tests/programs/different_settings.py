"""Gives rank 1 other settings than rank 0."""

from mpi4py import MPI

import mpiring

mpiring.init(config=mpiring.Config(operations_in_flight=2 + MPI.COMM_WORLD.rank))
