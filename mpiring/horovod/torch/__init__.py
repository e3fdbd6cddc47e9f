"""Horovod's functions for PyTorch: `import mpiring.horovod.torch as hvd`."""
