"""The back end `mpiring` of torch.distributed: every collective, over a group of MPI ranks.

PyTorch's Python functions call these methods directly, with lists of one tensor, because a rank has
one device. DistributedDataParallel and DTensor call some of them from C++.
"""

import functools
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ..config import Config
from ..engine.group import Group
from ..errors import ConfigError, StallError
from ..launch.start import mpi_world, refusal
from ..memory.arrays import Array, chunks_of
from ..operations.agreement import Call
from ..operations.collectives import Collectives
from ..transport import waiting
from ..transport.base import NO_BYTES, Schedule
from . import sparse
from .private import leave_recording_to
from .profiling import recorded
from .tensors import DEVICE_TYPES
from .threads import fill_cores, own_share
from .vectors import (
    TensorBuffers, by_splits, check_alike, check_count, described, in_turn, only, op_of,
)
from .works import DONE, Work, coalesced, in_callback

Tensors = Sequence[Tensor]
# Tag of internal messages, below all tags of users.
_TAG = -1
# First pause between two checks whether all members of a new group have arrived.
_PAUSE_S = 1e-3


def register() -> None:
    """Register the back end with torch.distributed."""
    dist.Backend.register_backend("mpiring", _make, extended_api=True, devices=[*DEVICE_TYPES])
    leave_recording_to("mpiring")


def _make(options: Any, _: Any) -> "ProcessGroup":
    """Open a process group; torch.distributed calls this on its members."""
    default = dist.group.WORLD
    known = default._group if isinstance(default, ProcessGroup) else None
    return ProcessGroup(options.store, open_group(options, known))


# Cached, since a Call has to be hashed for the comparison.
_call = functools.lru_cache(maxsize=4096)(Call)


class ProcessGroup(dist.ProcessGroup):
    """The collectives and messages of torch.distributed among MPI ranks.

    PyTorch gets the names, descriptions and stores of process groups from back ends in C++. A back
    end in Python has to return them itself.

    Args:
        store: Store that torch.distributed made for this group; see `get_group_store`.
        group: The ranks.

    Attributes:
        supports_splitting: Flag that init_process_group reads if it is given a `device_id`.
    """

    supports_splitting = False

    def __init__(self, store: Any, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self._store, self._group = store, group
        self._name = self._description = ""
        self._callback_group: Group | None = None
        self._messages = group.messages()
        self._share = own_share(group.run, group.sharing.topology.node_rank)
        self._coalescing: list[Work] | None = None

    # The interface of back ends

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        """Return the name of the back end."""
        return "mpiring"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch.distributed finds the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch.distributed finds the group."""
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """The types of devices that the group supports; checkpoints look for the CPU among them."""
        return [torch.device(kind) for kind in DEVICE_TYPES]

    def _get_backend(self, device: Any) -> "ProcessGroup":
        """Return the back end for a device: this group, for every device."""
        return self

    def get_group_store(self) -> Any:
        """Return the store that torch.distributed made for this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time without progress after which collectives fail."""
        self._group.set_stall_timeout(timeout.total_seconds())

    def dump_flight(self, *, last: int = 32, file: TextIO | None = None,
                    folder: str | os.PathLike[str] | None = None) -> None:
        """Print the last operations of all groups of this rank; see Communicator.dump_flight.

        Args:
            last, file, folder: Arguments of Communicator.dump_flight.

        Raises:
            ConfigError: `last` or `folder` has the wrong type or range.

        Collective: no. Blocking: no.
        """
        self._group.engine.dump(last, file, folder)

    def shutdown(self) -> None:
        """Wait for all operations and all members, then close the group. Collective, blocking."""
        if self._callback_group is not None:
            self._callback_group.close()
        self._group.close()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return coalesced(works)

    # Submitting

    @property
    def _current_group(self) -> Group:
        """The group for an operation that this thread calls now."""
        if in_callback():
            # Collective: every rank runs callbacks in the order of the operations.
            self._callback_group = self._callback_group or self._group.duplicate()
            return self._callback_group
        return self._group

    def _buffers(self) -> TensorBuffers:
        """Return the buffers of one operation that this thread calls now."""
        return TensorBuffers(self._current_group.gpus.own_device)

    def _submit(self, kind: str, detail: str, opts: Any, buffers: TensorBuffers, value: Any,
                build: Callable[[Collectives], Schedule[Any]],
                timeout_s: float | None = None, plain: tuple[str, Any] | None = None) -> Work:
        group = self._current_group
        where = "" if buffers.stream is None else " on a GPU"
        call = _call(kind, detail + where, nbytes=buffers.nbytes)
        start, run = buffers.bound(group, call, build, plain)
        if group is self._callback_group or timeout_s or getattr(opts, "asyncOp", True):
            handle = start()
            # If PyTorch's threads fill the node, background progress takes their cores: with two
            # ranks on two cores, it took as much time as the reductions.
            pauses = (buffers.stream is None and len(group.sharing.memory_groups) == 1
                      and fill_cores(self._share))
            return self._work(Work(handle, value, timeout_s, threaded=group.threaded,
                                   queues=[handle.queue] if pauses else []))
        run()
        return self._work(Work(DONE, value, threaded=True))

    def _work(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _check_peer(self, rank: int, name: str = "rank") -> None:
        if not 0 <= rank < self.size():
            raise ConfigError(f"rank {self.rank()}: {name}={rank} is no rank of this group; "
                              f"expected 0 to {self.size() - 1}")

    def _chunks(self, tensors: Tensor | Tensors, model: Tensor, label: str,
                lend: Callable[[Tensor], Array]) -> list[Array]:
        """Return one vector per rank: parts of one tensor, or a list of tensors like `model`."""
        if isinstance(tensors, Tensor):
            if tensors.dtype != model.dtype or tensors.numel() != self.size() * model.numel():
                raise ConfigError(f"the {label} tensor is {described(tensors)}: expected "
                                  f"{self.size()} times {described(model)}")
            return chunks_of(lend(tensors), self.size())
        check_count(tensors, self.size(), label)
        check_alike(tensors, model, label)
        return [lend(tensor) for tensor in tensors]

    # Reductions

    @recorded("c10d::allreduce_")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine a tensor over all ranks, in place."""
        tensor = only(tensors)
        if tensor.layout is torch.strided:
            return self._allreduce("all_reduce", tensors, opts)
        op = op_of(opts, tensor.dtype, self.size())
        return self._submit(
            "all_reduce", f"{op.name} of {tensor.layout} {described(tensor)}", opts,
            self._buffers(), list(tensors), sparse.allreduce(tensor, op))

    @recorded("c10d::allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine several tensors over all ranks, in place, as one operation."""
        return self._allreduce("all_reduce_coalesced", tensors, opts)

    def _allreduce(self, kind: str, tensors: Tensors, opts: Any) -> Work:
        buffers = self._buffers()
        ops = [op_of(opts, tensor.dtype, self.size()) for tensor in tensors]
        vectors = [buffers.numbers(tensor, written=True, factor=op.factor, divisor=op.divisor)
                   for tensor, op in zip(tensors, ops)]
        detail = f"{[op.name for op in ops]} of " + ", ".join(map(described, tensors))
        return self._submit(kind, detail, opts, buffers, list(tensors), lambda collectives: in_turn(
            (), [collectives.allreduce(x, op=op.combine) for x, op in zip(vectors, ops)]),
            plain=("allreduce", ops[0].combine) if len(ops) == 1 else None)

    @recorded("c10d::reduce_")
    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Combine a tensor over all ranks into the root's tensor; other tensors do not change."""
        tensor, root = only(tensors), opts.rootRank
        self._check_peer(root, "root")
        op, buffers = op_of(opts, tensor.dtype, self.size()), self._buffers()
        is_root = self.rank() == root
        x = buffers.numbers(tensor, written=is_root, factor=op.factor,
                            divisor=op.divisor if is_root else None)
        return self._submit(
            "reduce", f"{op.name} of {described(tensor)} to root {root}", opts, buffers,
            list(tensors), lambda collectives: collectives.reduce(x, root, op=op.combine))

    @recorded("c10d::reduce_scatter_", 2)
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Combine tensor r of a list over all ranks into the output of rank r."""
        return self._reduce_scatter("reduce_scatter", [only(outputs)], inputs, opts)

    @recorded("c10d::_reduce_scatter_base_", 2)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combine a tensor over all ranks; rank r gets the r-th part."""
        return self._reduce_scatter("reduce_scatter_single", [output], [input], opts)

    @recorded("c10d::reduce_scatter_tensor_coalesced_", 2)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors,
                                        opts: Any = None) -> Work:
        """Combine several tensors over all ranks; rank r gets the r-th part of each."""
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter(self, kind: str, outputs: Tensors,
                        inputs: Sequence[Tensor | Tensors], opts: Any) -> Work:
        check_count(inputs, len(outputs), "input")
        buffers, rank, rows, copies = self._buffers(), self.rank(), [], []
        ops = [op_of(opts, output.dtype, self.size()) for output in outputs]
        for output, input, op in zip(outputs, inputs, ops):
            chunks = self._chunks(input, output, "input", functools.partial(
                buffers.numbers, factor=op.factor))
            result = buffers.numbers(output, written=True, divisor=op.divisor)
            copies.append((result, chunks[rank]))
            # The result replaces this rank's own contribution.
            rows.append([*chunks[:rank], result, *chunks[rank + 1:]])
        detail = f"{[op.name for op in ops]} of " + ", ".join(map(described, outputs))
        return self._submit(kind, detail, opts, buffers, list(outputs), lambda collectives: in_turn(
            copies, [collectives.reduce_scatter_chunks(chunks, op=op.combine)
                     for chunks, op in zip(rows, ops)]))

    # Copies

    @recorded("c10d::broadcast_")
    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor, root, buffers = only(tensors), opts.rootRank, self._buffers()
        self._check_peer(root, "root")
        x = buffers.raw(tensor, written=self.rank() != root)
        return self._submit(
            "broadcast", f"of {described(tensor)} from root {root}", opts, buffers, list(tensors),
            lambda collectives: collectives.broadcast(x, root), plain=("broadcast", root))

    @recorded("c10d::allgather_", 2)
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy every rank's tensor to a list of tensors on all ranks."""
        return self._allgather("all_gather", outputs, [only(inputs)], opts, [*map(list, outputs)])

    @recorded("c10d::allgather_coalesced_", 2)
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors,
                            opts: Any = None) -> Work:
        """Copy every rank's tensors; list r of the output receives the tensors of rank r."""
        check_count(outputs, self.size(), "lists of output")
        by_input = list(zip(*outputs, strict=True))
        return self._allgather("all_gather_coalesced", by_input, inputs, opts, outputs)

    @recorded("c10d::_allgather_base_", 2)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Copy every rank's tensor to one part of a tensor on all ranks."""
        return self._allgather("all_gather_single", [output], [input], opts, [output])

    @recorded("c10d::allgather_into_tensor_coalesced_", 2)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors,
                                    opts: Any = None) -> Work:
        """Copy several tensors of every rank, each to one part of a tensor on all ranks."""
        return self._allgather("all_gather_single_coalesced", outputs, inputs, opts, [*outputs])

    def _allgather(self, kind: str, outputs: Sequence[Tensor | Tensors], inputs: Tensors,
                   opts: Any, value: Any) -> Work:
        check_count(inputs, len(outputs), "input")
        buffers, rows, copies = self._buffers(), [], []
        for output, input in zip(outputs, inputs):
            x = buffers.raw(input)
            rows.append(self._chunks(
                output, input, "output", functools.partial(buffers.raw, written=True)))
            copies.append((rows[-1][self.rank()], x))
        detail = "of " + ", ".join(map(described, inputs))
        return self._submit(kind, detail, opts, buffers, value, lambda collectives: in_turn(
            copies, [collectives.allgather_chunks(chunks) for chunks in rows]))

    @recorded("c10d::gather_", 2)
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy every rank's tensor to a list of tensors on the root."""
        input, root, buffers = only(inputs), opts.rootRank, self._buffers()
        targets = self._root_tensors("gather", outputs, input, root, "output")
        x = buffers.raw(input)
        chunks = [buffers.raw(target, written=True) for target in targets]
        return self._submit(
            "gather", f"of {described(input)} to root {root}", opts, buffers, [list(targets)],
            lambda collectives: collectives.gather(x, chunks, root))

    @recorded("c10d::scatter_", 2)
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Copy tensor r of the root's list to rank r."""
        output, root, buffers = only(outputs), opts.rootRank, self._buffers()
        sources = self._root_tensors("scatter", inputs, output, root, "input")
        x = buffers.raw(output, written=True)
        chunks = [buffers.raw(source) for source in sources]
        return self._submit(
            "scatter", f"of {described(output)} from root {root}", opts, buffers, list(outputs),
            lambda collectives: collectives.scatter(chunks, x, root))

    def _root_tensors(self, kind: str, lists: Sequence[Tensors], model: Tensor, root: int,
                      label: str) -> Tensors:
        """Return the root's list of tensors, one per rank; an empty list on other ranks."""
        self._check_peer(root, "root")
        tensors = lists[0] if lists else ()
        if self.rank() == root:
            check_count(tensors, self.size(), label)
            check_alike(tensors, model, label)
        elif tensors:
            raise ConfigError(f"{label} tensors on another rank than the root of a {kind}")
        return tensors

    @recorded("c10d::alltoall_", 2)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send tensor r of a list to rank r; shapes may differ."""
        check_count(outputs, self.size(), "output")
        check_count(inputs, self.size(), "input")
        buffers = self._buffers()
        sends = [buffers.raw(tensor) for tensor in inputs]
        receives = [buffers.raw(tensor, written=True) for tensor in outputs]
        return self._all_to_all(
            "all_to_all", inputs[0], opts, buffers, list(outputs), sends, receives)

    @recorded("c10d::alltoall_base_", 2)
    def all_to_all_single(self, output: Tensor, input: Tensor,
                          output_split_sizes: Sequence[int] = (),
                          input_split_sizes: Sequence[int] = (), opts: Any = None) -> Work:
        """Send part r of a tensor's rows to rank r."""
        buffers, size = self._buffers(), self.size()
        sends = by_splits(buffers.raw(input), input, input_split_sizes, size, "input")
        receives = by_splits(
            buffers.raw(output, written=True), output, output_split_sizes, size, "output")
        return self._all_to_all(
            "all_to_all_single", input, opts, buffers, [output], sends, receives)

    def _all_to_all(self, kind: str, model: Tensor, opts: Any, buffers: TensorBuffers,
                    value: Any, sends: Sequence[Array], receives: Sequence[Array]) -> Work:
        to_self = sends[self.rank()], receives[self.rank()]
        if to_self[0].size != to_self[1].size:
            raise ConfigError(f"rank {self.rank()} sends {to_self[0].size} bytes to itself, but "
                              f"receives {to_self[1].size}")
        return self._submit(kind, f"of {model.dtype}", opts, buffers, value, lambda collectives: (
            collectives.all_to_all(sends, receives)))

    # Messages

    @recorded("c10d::send")
    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        self._check_peer(dest)
        x = TensorBuffers(staged=True).raw(only(tensors))
        return self._message(self._messages.isend(x, dest, tag), tensors)

    @recorded("c10d::recv_")
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        self._check_peer(source)
        return self._recv(tensors, tag, source)

    @recorded("c10d::recv_any_source_")
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from the rank that sends first."""
        return self._recv(tensors, tag, None)

    def _recv(self, tensors: Tensors, tag: int, source: int | None) -> Work:
        buffers = TensorBuffers(staged=True)
        x = buffers.raw(only(tensors), written=True)
        return self._message(self._messages.irecv(x, source, tag, buffers.settled), tensors)

    def _message(self, handle: Any, tensors: Tensors) -> Work:
        timeout_s = self._group.config.stall_timeout_s or None
        return self._work(
            Work(handle, list(tensors), timeout_s, threaded=self._group.threaded))

    # Barriers

    @recorded("c10d::barrier", 0)
    def barrier(self, opts: Any = None) -> Work:
        """Complete when every rank has called; a timeout in the options applies to this call."""
        limit_s = 0.0 if opts is None else opts.timeout.total_seconds()
        return self._submit(
            "barrier", "", opts, self._buffers(), [], lambda collectives: collectives.barrier(),
            limit_s if limit_s > 0 else None, plain=("barrier", None))

    @recorded("c10d::monitored_barrier_", 0)
    def monitored_barrier(self, timeout: timedelta | None = None,
                          wait_all_ranks: bool = False) -> None:
        """Return when every rank has called; on rank 0 an error names the missing ranks.

        Call it on the group itself: torch.distributed.monitored_barrier accepts Gloo only. Every
        rank reports to rank 0, which answers when all have reported. By default, the timeout is
        that of the group. If `wait_all_ranks`, the error names all missing ranks, not only the
        first. Raises StallError if a rank has not called in time. Collective, blocking.
        """
        limit_s = self._group.config.stall_timeout_s if not timeout else timeout.total_seconds()
        if self.rank():
            self._messages.isend(NO_BYTES, 0, _TAG)
            self._messages.irecv(NO_BYTES, 0, _TAG).wait(limit_s or None)
            return
        reports = {rank: self._messages.irecv(NO_BYTES, rank, _TAG)
                   for rank in range(1, self.size())}
        deadline, missing = time.monotonic() + limit_s, list[str]()
        for rank, report in reports.items():
            try:
                report.wait(max(deadline - time.monotonic(), 1e-3) if limit_s else None)
            except StallError:
                missing.append(str(rank))
                if not wait_all_ranks:
                    break
        if missing:
            raise StallError(f"rank 0: Timed out after {limit_s:g} s in monitored_barrier, which "
                             f"was not called by rank {', '.join(missing)}")
        for rank in reports:
            self._messages.isend(NO_BYTES, rank, _TAG)

    # Names of these methods before PyTorch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def open_group(options: Any, default: Group | None) -> Group:
    """Return the MPI ranks of a new process group; `default` is the group of all ranks, if any.

    Raises ConfigError if rank and size differ from MPI's. Raises LaunchError if the group has
    several ranks, but this process is alone in MPI. Raises StallError if a member has not called in
    time. Collective among the members, blocking.
    """
    ranks: Sequence[int] = options.global_ranks_in_group
    if not ranks:
        return _open_default(options)
    if default is None:
        raise ConfigError("a group with the back end 'mpiring' needs a default group with it; "
                          "call init_process_group('mpiring')")
    # MPI has no timeout, so this waits until all members have arrived.
    store = options.store
    if store.add("arrived", 1) == len(ranks):
        store.set("all here", "yes")
    limit_s, began_s = options.timeout.total_seconds(), time.monotonic()
    while not store.check(["all here"]):
        # Members may wait for an operation of the default group first.
        default.poke()
        waited_s = time.monotonic() - began_s
        # All members ask the same store: those that wait for long ask less often.
        time.sleep(min(_PAUSE_S + waited_s / 10, waiting.IDLE_CHECK_S))
        if waited_s > limit_s:
            raise StallError(
                f"rank {default.rank}: Timed out after {limit_s:g} s in new_group: "
                f"{store.add('arrived', 0)} of the ranks {list(ranks)} have called it; all of "
                f"them must, in the same order")
    tag = zlib.crc32(str(options.group_id).encode())
    return default.subgroup(ranks, tag, with_timeout(default.config, options.timeout))


def _open_default(options: Any) -> Group:
    config = Config()
    world = mpi_world(allow_singleton=config.allow_singleton)
    given, real = (options.group_rank, options.group_size), (world.rank, world.size)
    if world.size == 1 < options.group_size and not config.allow_singleton:
        raise refusal(options.group_size, f"torch.distributed has a world_size of "
                      f"{options.group_size}, but this process is alone in its MPI world")
    if given != real:
        raise ConfigError(
            f"torch.distributed calls this rank {given[0]} of {given[1]}, but in MPI it is rank "
            f"{real[0]} of {real[1]}; use init_method='mpi://', which asks MPI, or unset RANK and "
            f"WORLD_SIZE, or set them by mpiring.torch.export_environment")
    return Group(world, with_timeout(config, options.timeout))


def with_timeout(config: Config, timeout: timedelta) -> Config:
    """Return the settings with a timeout of torch.distributed, unless it is PyTorch's default."""
    if timeout in (default_pg_timeout, default_pg_nccl_timeout):
        return config
    return replace(config, stall_timeout_s=timeout.total_seconds())
