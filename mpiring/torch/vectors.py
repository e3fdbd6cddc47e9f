"""Converts tensors to vectors for collectives; tensors that are not contiguous are copied."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ..engine.group import Group
from ..engine.handle import Handle
from ..engine.prepared import Pattern, Prepared
from ..engine.short_gpu import ShortOnGpu, is_short
from ..errors import ConfigError
from ..gpu.arrays import CurrentStream, TorchStream, stream_of
from ..gpu.device import Device
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, may_overlap
from ..memory.tensors import array_of
from ..operations.agreement import Call
from ..operations.collectives import Build
from ..transport.base import NO_BYTES, T, Schedule
from .private import copy_all
from .tensors import DEVICE_TYPES, viewed_as

_Kind = dist.ReduceOp.RedOpType
_NAMES = {
    _Kind.SUM: "sum", _Kind.AVG: "mean", _Kind.PRODUCT: "prod", _Kind.MIN: "min",
    _Kind.MAX: "max", _Kind.BAND: "band", _Kind.BOR: "bor", _Kind.BXOR: "bxor",
    _Kind.PREMUL_SUM: "sum"}
# As with Gloo, which adds bytes, any nonzero value is true.
_ON_BOOL = {"sum": "bor", "prod": "band"}
_P = TypeVar("_P", bound=Prepared)


@dataclass(frozen=True)
class Op:
    """A reduction, with its name in mpiring, on which ranks must agree.

    Every rank's contribution is multiplied by `factor`. For a mean of integers, the sum is divided
    by `divisor`, as by `quotient`.
    """

    name: str
    factor: Any = None
    divisor: int | None = None

    @property
    def combine(self) -> str:
        """The op with which the collective combines the contributions."""
        return self.name if self.divisor is None else "sum"


def op_of(opts: Any, dtype: torch.dtype, size: int) -> Op:
    """Return the reduction for a dtype, given options of torch.distributed.

    An average of integers is computed in the same way as by NCCL: a sum in their dtype, which may
    overflow, then a division that rounds toward zero. `Communicator.allreduce` refuses a mean of
    integers, because NumPy users would expect 2.5, not 2.

    Raises ConfigError if the operator is unknown, or undefined for the dtype.
    """
    kind, factor = (_Kind.SUM, None) if opts is None else opts.reduceOp.__getstate__()
    if kind not in _NAMES:
        known = ", ".join(kind.name for kind in _NAMES)
        raise ConfigError(f"{opts.reduceOp}: expected one of {known}")
    name = _NAMES[kind]
    if name == "mean" and dtype in (torch.bool, torch.uint64):
        raise ConfigError(f"AVG is not defined for {dtype}, which PyTorch cannot divide; use SUM, "
                          f"or convert to another dtype")
    if dtype is torch.complex32 and name not in ("sum", "mean"):
        raise ConfigError(f"{kind.name} is not defined for {dtype}; use SUM or AVG, or convert to "
                          f"torch.complex64")
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return Op(_ON_BOOL.get(name, name) if dtype is torch.bool else name, factor,
              size if name == "mean" and is_integer else None)


def quotient(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return integers divided by a positive number, rounded toward zero, as in C and NCCL.

    The tensor has any integer dtype but uint64. The result is int64, since the divisor may exceed
    the range of int8.
    """
    return x.to(torch.int64).div(divisor, rounding_mode="trunc")


def _same(device: Device) -> Device:
    """Return a GPU, for tensors that are not sent from it."""
    return device


class TensorBuffers:
    """The tensors of one operation, as vectors, all in host memory or all on one GPU.

    Tensors that are not contiguous are copied, and copied back if the operation writes them. If
    `staged`, tensors on a GPU are copied to host memory. The user's `stream`, on which the tensors
    were written, is None in host memory. For `own_device`, see the method of Communicator.
    """

    def __init__(self, own_device: Callable[[Device], Device] = _same, *,
                 staged: bool = False) -> None:
        self.nbytes = 0
        self.stream: TorchStream | None = None
        self._own_device, self._staged = own_device, staged
        self._where: torch.device | None = None
        self._vectors: list[Any] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[tuple[torch.Tensor, int]] = []

    copy_all = staticmethod(copy_all)

    def numbers(self, tensor: torch.Tensor, *, written: bool = False, factor: Any = None,
                divisor: int | None = None) -> Array:
        """Return the elements of a dense tensor of any shape and strides, for arithmetic.

        The factor is applied first, in place if the operation has `written` the tensor; the divisor
        divides an integer result. Raises ConfigError if the tensor is not dense, is on a different
        device than other tensors, or has a dtype without arithmetic.
        """
        x = self._contiguous(tensor, written)
        if x.dtype is torch.complex32:
            # NumPy lacks this dtype; a sum can add real and imaginary parts separately.
            x = viewed_as(x, torch.float16)
        if factor is not None:
            x = torch.mul(x, factor, out=x if written else torch.empty_like(x))
        if divisor is not None:
            self._sums.append((x, divisor))
        return self._vector(x)

    def raw(self, tensor: torch.Tensor, *, written: bool = False) -> Array:
        """Return a tensor's bytes, as `numbers` does, for any dtype."""
        return self._vector(viewed_as(self._contiguous(tensor, written), torch.uint8))

    def _contiguous(self, tensor: torch.Tensor, written: bool) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.device.type not in DEVICE_TYPES:
            raise ConfigError(
                f"a {tensor.layout} tensor on {tensor.device}: this collective takes dense "
                f"tensors on the CPU or a GPU")
        if tensor.device != (self._where or tensor.device):
            raise ConfigError(f"tensors on {self._where} and on {tensor.device}: expected all of "
                              f"one collective on one device")
        if written:
            refuse_overlap(tensor)
        if self._where is None:
            self._where, self.stream = tensor.device, stream_of(tensor)
        self.nbytes += tensor.nbytes
        plain = tensor.detach()
        contiguous = plain.resolve_conj().resolve_neg().contiguous()
        if self._staged:
            contiguous = contiguous.cpu()
        if written and contiguous is not plain and contiguous.data_ptr() != plain.data_ptr():
            self._copies.append((plain, contiguous))
        return contiguous

    def _vector(self, x: torch.Tensor) -> Any:
        if self.stream is None or self._staged:
            vector: Any = array_of(x)
        else:
            vector = self.stream.vector(x)
            vector = replace(vector, device=self._own_device(vector.device))
        self._vectors.append(vector)
        return vector

    def bound(self, group: Group, call: Call, build: Build[Any], plain: tuple[str, Any] | None,
              ) -> tuple[Callable[[], Handle[Any]], Callable[[], Any]]:
        """Return two functions: one starts the operation, the other one runs it to its end.

        A plain operation on contiguous host memory, or on a short vector of a GPU, is prepared once
        per call, so that node calls run it. Collective and blocking, but only the first time on
        each GPU.

        Args:
            build: Function that returns the schedule, given the collectives of its channel.
            plain: Kind and option of a Pattern that describes the same schedule on the only vector;
                None if there is none.
        """
        x: Any = self._vectors[0] if self._vectors else NO_BYTES
        settles = self._copies or self._sums
        if plain is not None and is_short(group, x):
            short = _prepared(ShortOnGpu, group, call, Pattern(*plain, x.dtype, x.size))
            # The tensor, because a vector does not name its stream.
            if not settles:
                return partial(short.start, x.owner, None), partial(short.run, x.owner)
            build = short.build(x.owner)
        elif self.stream is not None:
            build = group.gpus.for_device(self.stream.device(), (self.stream.mark(),), build,
                                          CurrentStream(self._where))
        elif not (plain is None or group.fast_calls.memory is None or settles
                  or not x.flags.carray):
            prepared = _prepared(Prepared, group, call, Pattern(*plain, x.dtype, x.size))
            return partial(prepared.start, x, None), partial(prepared.run, x)
        bound = call, lambda collectives: self.settled(build(collectives))
        return partial(group.submit, *bound), partial(group.run, *bound)

    def settled(self, schedule: Schedule[T]) -> Schedule[T]:
        """Run a schedule, then divide sums, and copy results back into the user's tensors."""
        result = yield from schedule
        yield from self.copied_back(self._copies)
        return result

    def copied_back(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Schedule[None]:
        """Copy results, given as pairs of a tensor and its new value, into the user's tensors."""
        if not (copies or self._sums):
            return
        # The user's stream may still read the old values, and PyTorch's allocator expects that this
        # memory is used on this stream.
        stream = self.stream
        device = None if stream is None or self._staged else self._vectors[0].device
        if stream is not None and device is not None:
            stream.follow(device.mark())
        with torch.no_grad(), nullcontext() if stream is None else stream.in_use():
            for x, divisor in self._sums:
                x.copy_(quotient(x, divisor))
            for tensor, copy in copies:
                tensor.copy_(copy)
        if stream is not None:
            copied = stream.mark()
            if device is None:
                yield (copied,)
            else:
                device.follow([copied])


def _prepared(kind: type[_P], group: Group, call: Call, pattern: Pattern) -> _P:
    """Return the collective that the group keeps for a call."""
    prepared = group.prepared.get(call)
    if prepared is None:
        prepared = kind(group, call, pattern)
        group.keep(call, prepared)
    return cast(_P, prepared)


def refuse_overlap(tensor: torch.Tensor) -> None:
    """Raise ConfigError if elements of a strided tensor may share memory."""
    if not tensor.is_contiguous() and may_overlap(tensor.shape, tensor.stride(), 1):
        raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} and strides "
                          f"{tensor.stride()}, whose elements may share memory: it cannot take a "
                          f"result; pass tensor.clone()")


def only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only tensor of a list; raise ConfigError if the list has another length."""
    if len(tensors) != 1:
        raise ConfigError(f"{len(tensors)} tensors: expected one, of this rank's one device")
    return tensors[0]


def check_count(tensors: Sequence[torch.Tensor], size: int, label: str) -> None:
    """Raise ConfigError unless there is one tensor per rank."""
    if len(tensors) != size:
        raise ConfigError(f"{len(tensors)} {label} tensors: expected {size}, one per rank")


def check_alike(tensors: Sequence[torch.Tensor], model: torch.Tensor, label: str) -> None:
    """Raise ConfigError unless all tensors have the shape and dtype of `model`."""
    for i, tensor in enumerate(tensors):
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            raise ConfigError(
                f"{label} tensor {i} is {described(tensor)}: expected {described(model)}, as the "
                f"others are")


def described(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as a string."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def by_splits(x: Array, tensor: torch.Tensor, splits: Sequence[int], size: int,
              label: str) -> list[Array]:
    """Cut the bytes `x` of a tensor into one view per rank.

    `splits` has the number of rows (the first dimension) for each rank; it is empty for equal
    shares. `label` names the tensor in messages. Raises ConfigError if rows cannot be divided in
    this way.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits and rows % size:
        raise ConfigError(f"the {label} tensor has {rows} rows, which {size} ranks cannot share "
                          f"evenly; pass {label}_split_sizes")
    counts = list(splits) or [rows // size] * size
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(f"{label}_split_sizes={counts}: expected {size} numbers that add up to "
                          f"the tensor's {rows} rows")
    width = x.size // rows if rows else 0
    bounds = np.cumsum([0, *counts]) * width
    return [x[start:stop] for start, stop in zip(bounds, bounds[1:])]


def in_turn(copies: Sequence[tuple[Array, Array]],
            schedules: Sequence[Schedule[Any]]) -> Schedule[None]:
    """Copy vectors, given as destination and source, then run schedules one after the other."""
    for out, x in copies:
        copy_to(out, x)
    for schedule in schedules:
        yield from schedule
