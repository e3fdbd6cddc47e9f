"""Prints its arguments, and what each rank has in variables of these names."""

import os
import sys

import mpiring

with mpiring.init() as comm:
    of_ranks = comm.allgather_object([os.environ.get(name, "-") for name in sys.argv[1:]])
    if comm.rank == 0:
        print(sys.argv[1:], *(f"rank {rank}: {values}" for rank, values in enumerate(of_ranks)),
              sep="\n", flush=True)
