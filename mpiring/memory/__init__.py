"""Host memory: vectors and dtypes, their combination, and memory that processes share."""
