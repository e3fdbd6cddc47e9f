"""Machine code: loops that numba compiles, made once for a kind of processor and kept on disk."""
