"""How a process was launched: the start of MPI, the end of the job, nodes, results on disk."""
