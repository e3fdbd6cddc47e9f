"""Starts MPI, ends the job, and detects launchers, nodes and forks; caches results on disk."""

from . import exits, forks, topology
from .environment import (
    CONTAINERS, LAB_OPTIONS, Launcher, horovod_variables, lab_options, launch_variables,
    launched_first, launched_here, launched_rank, launched_size, launcher_of, launchers,
    prints_for_job, relevant_variables, survives_deaths)
from .host import (
    count_cores, ipv4_address, ipv4_addresses, keep_freed_memory, quota, text_of,
    usable_processors)
from .start import find_mpiexec, load_mpi, mpi_world, required_mpiexec, thread_level
