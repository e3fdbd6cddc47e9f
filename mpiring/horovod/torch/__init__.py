"""Horovod's functions for PyTorch: `import mpiring.horovod.torch as hvd`."""

from ...provisional import publish
from ..compression import Compression
from ..functions import allgather_object, broadcast_object, broadcast_object_fn
from ..ops import Adasum, Average, Max, Min, Product, Sum
from ..process_sets import ProcessSet
from ..requests import HorovodInternalError
from ..world import (
    add_process_set, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, global_process_set,
    gloo_built, gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_size,
    mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank, remove_process_set, rocm_built,
    shutdown, size, start_timeline, stop_timeline)
from . import elastic
from .batch_norm import SyncBatchNorm
from .functions import broadcast_optimizer_state, broadcast_parameters
from .operations import TensorOperations
from .optimizer import DistributedOptimizer

_tensors = TensorOperations()
allgather, allgather_async = _tensors.allgather, _tensors.allgather_async
allreduce, allreduce_async = _tensors.allreduce, _tensors.allreduce_async
allreduce_, allreduce_async_ = _tensors.allreduce_, _tensors.allreduce_async_
alltoall, alltoall_async = _tensors.alltoall, _tensors.alltoall_async
barrier, join = _tensors.barrier, _tensors.join
poll, synchronize = _tensors.poll, _tensors.synchronize
broadcast, broadcast_async = _tensors.broadcast, _tensors.broadcast_async
broadcast_, broadcast_async_ = _tensors.broadcast_, _tensors.broadcast_async_
grouped_allgather, grouped_allgather_async = (
    _tensors.grouped_allgather, _tensors.grouped_allgather_async)
grouped_allreduce, grouped_allreduce_async = (
    _tensors.grouped_allreduce, _tensors.grouped_allreduce_async)
grouped_allreduce_, grouped_allreduce_async_ = (
    _tensors.grouped_allreduce_, _tensors.grouped_allreduce_async_)
grouped_reducescatter, grouped_reducescatter_async = (
    _tensors.grouped_reducescatter, _tensors.grouped_reducescatter_async)
sparse_allreduce_async = _tensors.sparse_allreduce_async
reducescatter, reducescatter_async = _tensors.reducescatter, _tensors.reducescatter_async

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max",
    "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_object_fn",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize"]

publish(__name__)
