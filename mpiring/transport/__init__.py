"""Moves bytes between ranks: real MPI, or a simulated network in one process."""
