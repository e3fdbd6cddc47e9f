"""Machine code: loops that numba compiles once per kind of processor and keeps on disk."""
