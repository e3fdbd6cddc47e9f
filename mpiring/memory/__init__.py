"""Host memory: vectors, dtypes, how they are combined, and memory that processes share."""
