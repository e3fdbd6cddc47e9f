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
        name: mpiring's name of it.
        factor: What every rank's contribution is multiplied by first, if anything.
    """

    name: str
    factor: Any = None


def op_of(reduce_op: Any, dtype: torch.dtype) -> Op:
    """Return what an operator of torch.distributed does to a dtype.

    Raises:
        ConfigError: It is not known.
    """
    kind, factor = reduce_op.__getstate__() if isinstance(reduce_op, dist.ReduceOp) else (
        reduce_op, None)
    if kind not in _NAMES:
        known = ", ".join(one.name for one in _NAMES)
        raise ConfigError(f"{reduce_op}: expected one of {known}")
    name = _NAMES[kind]
    return Op(_ON_BOOL.get(name, name) if dtype is torch.bool else name, factor)
