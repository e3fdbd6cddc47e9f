"""Starts MPI, ends the job, and detects launchers, nodes and forks; caches results on disk."""
