"""Prints its arguments, and what each rank has in variables of these names."""

import os
import sys

import mpiring

with mpiring.init() as comm:
    found = comm.allgather_object([os.environ.get(name, "-") for name in sys.argv[1:]])
    if comm.rank == 0:
        print(sys.argv[1:], *(f"rank {rank}: {values}" for rank, values in enumerate(found)),
              sep="\n", flush=True)
