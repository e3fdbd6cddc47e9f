"""Horovod's functions for NumPy arrays: `import mpiring.horovod as hvd`."""
