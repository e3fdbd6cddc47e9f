"""Horovod's functions for NumPy arrays: `import mpiring.horovod as hvd`."""

from ..provisional import publish
from .arrays import NumPyArrays
from .compression import Compression
from .functions import (
    allgather_object, broadcast_object, broadcast_object_fn, broadcast_parameters)
from .operations import Operations
from .ops import Adasum, Average, Max, Min, Product, Sum
from .process_sets import ProcessSet
from .requests import HorovodInternalError
from .world import (
    add_process_set, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, global_process_set,
    gloo_built, gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_size,
    mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank, remove_process_set, rocm_built,
    shutdown, size, start_timeline, stop_timeline)

_numpy = Operations(NumPyArrays())
allgather, allgather_async = _numpy.allgather, _numpy.allgather_async
allreduce, allreduce_async = _numpy.allreduce, _numpy.allreduce_async
allreduce_, allreduce_async_ = _numpy.allreduce_, _numpy.allreduce_async_
alltoall, alltoall_async = _numpy.alltoall, _numpy.alltoall_async
barrier, join, poll, synchronize = _numpy.barrier, _numpy.join, _numpy.poll, _numpy.synchronize
broadcast, broadcast_async = _numpy.broadcast, _numpy.broadcast_async
broadcast_, broadcast_async_ = _numpy.broadcast_, _numpy.broadcast_async_
grouped_allgather, grouped_allgather_async = (
    _numpy.grouped_allgather, _numpy.grouped_allgather_async)
grouped_allreduce, grouped_allreduce_async = (
    _numpy.grouped_allreduce, _numpy.grouped_allreduce_async)
grouped_allreduce_, grouped_allreduce_async_ = (
    _numpy.grouped_allreduce_, _numpy.grouped_allreduce_async_)
grouped_reducescatter, grouped_reducescatter_async = (
    _numpy.grouped_reducescatter, _numpy.grouped_reducescatter_async)
reducescatter, reducescatter_async = _numpy.reducescatter, _numpy.reducescatter_async

__all__ = [
    "Adasum", "Average", "Compression", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_object_fn", "broadcast_parameters", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline", "synchronize"]

publish(__name__)
