"""Messages between ranks by MPI, and the memory in which the ranks of a node meet."""
