"""Messages between ranks through MPI, and memory that the ranks of a node share."""
