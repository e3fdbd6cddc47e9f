"""Compares mpiring with MPI's own allreduce, Gloo and Horovod: `python -m mpiring bench`."""
