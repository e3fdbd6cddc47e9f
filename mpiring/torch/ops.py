"""Translates reduction operators of torch.distributed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError

_Kind = dist.ReduceOp.RedOpType
_NAMES = {
    _Kind.SUM: "sum", _Kind.AVG: "mean", _Kind.PRODUCT: "prod", _Kind.MIN: "min",
    _Kind.MAX: "max", _Kind.BAND: "band", _Kind.BOR: "bor", _Kind.BXOR: "bxor",
    _Kind.PREMUL_SUM: "sum"}
# As with Gloo, which adds bytes: what is not zero is true.
_ON_BOOL = {"sum": "bor", "prod": "band"}


@dataclass(frozen=True)
class Op:
    """A reduction.

    Attributes:
        name: mpiring's name of it, on which ranks must agree.
        factor: Multiplies every rank's contribution first, if there is one.
        divides: Divide the sum at the end, as `quotient` does: a mean of integers.
    """

    name: str
    factor: Any = None
    divides: bool = False

    @property
    def combine(self) -> str:
        """The op by which the collective itself combines the contributions."""
        return "sum" if self.divides else self.name

    def divisor(self, size: int) -> int | None:
        """Return the divisor of the sum over `size` ranks, if there is one."""
        return size if self.divides else None


def op_of(reduce_op: Any, dtype: torch.dtype) -> Op:
    """Return the reduction by which an operator of torch.distributed combines a dtype.

    An average of integers is as NCCL's: a sum in their dtype, which may wrap, then a division that
    rounds toward zero. `Communicator.allreduce` refuses a mean of integers, where users of NumPy
    would expect 2.5, not 2.

    Raises:
        ConfigError: The operator is unknown, or undefined for the dtype.
    """
    kind, factor = reduce_op.__getstate__() if isinstance(reduce_op, dist.ReduceOp) else (
        reduce_op, None)
    if kind not in _NAMES:
        known = ", ".join(kind.name for kind in _NAMES)
        raise ConfigError(f"{reduce_op}: expected one of {known}")
    name = _NAMES[kind]
    if name == "mean" and dtype in (torch.bool, torch.uint64):
        raise ConfigError(f"AVG is not defined for {dtype}, which PyTorch cannot divide; use SUM, "
                          f"or convert to another dtype")
    if dtype is torch.complex32 and name not in ("sum", "mean"):
        raise ConfigError(f"{kind.name} is not defined for {dtype}; use SUM or AVG, or convert to "
                          f"torch.complex64")
    divides = name == "mean" and not (dtype.is_floating_point or dtype.is_complex)
    return Op(_ON_BOOL.get(name, name) if dtype is torch.bool else name, factor, divides)


def quotient(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return integers divided by a positive number, rounded toward zero, as C and NCCL do.

    Args:
        x: Of any integer dtype but uint64; int64 in the result, as a divisor may exceed int8.
    """
    return x.to(torch.int64).div(divisor, rounding_mode="trunc")
