"""The norm of gradients of which each rank has slices; ranks compare its arguments with it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..arguments import number
from ..communicator import Communicator
from ..errors import ConfigError
from ..operations.agreement import Call
from ..operations.consistency import text_of

# Of squares: what is summed at once, in float64.
_BLOCK = 1 << 18
# Arguments that are numbers: in range, and in words.
_NUMBERS: Mapping[str, Any] = {"norm_type": (lambda x: x > 0, "a number above 0"),
                               "max_norm": (lambda x: x >= 0, "a number from 0")}


def norm_of_slices(comm: Communicator, gradients: Sequence[torch.Tensor], what: str,
                   norm_type: float, **more: Any) -> float:
    """Return the norm of all ranks' slices as one vector.

    Args:
        comm: The ranks.
        gradients: This rank's slices; at least one.
        what: The method that was called.
        norm_type, more: Its arguments.

    Raises:
        ConfigError: An argument is out of range, on all ranks.
        BufferMismatchError: Arguments differ between ranks.

    Collective: yes. Blocking: yes.
    """
    arguments = {"norm_type": norm_type, **more}
    call = Call(what, ", ".join(f"{name}={text_of(x)}" for name, x in arguments.items()),
                remedy=f"pass the same to {what} on every rank")
    total, failure = 0.0, None
    try:
        checked = {name: number(name, arguments[name], *_NUMBERS[name])
                   for name in _NUMBERS if name in arguments}
        norm_type = checked["norm_type"]
        total = _norm_of(gradients, norm_type)
    except ConfigError as error:
        # Raised when all ranks are known to have passed the same.
        failure, norm_type = error, 1.0
    if norm_type == math.inf:
        largest = np.array([total])
        comm.run(call, lambda collectives: collectives.allreduce(largest, op="max"))
        return float(largest[0])
    with np.errstate(over="ignore"):
        total = _sum(comm, call, float(np.float64(total) ** norm_type))
    if failure is not None:
        raise failure
    return total ** (1 / norm_type)


def _norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    parts = [torch.linalg.vector_norm(block.abs() if block.is_complex() else block, norm_type,
                                      dtype=torch.float64)
             for gradient in gradients for block in gradient.split(_BLOCK)]
    return float(torch.linalg.vector_norm(torch.stack(parts), norm_type))


def _sum(comm: Communicator, call: Call, x: float) -> float:
    """Return the sum of all ranks' numbers, if they have made the same call.

    An allreduce whose call is always the same is several times as fast as one with a call of its
    own. So a digest of the call is sent with the number: k and its square, whose sums belong
    together only if all are equal. They are exact below 8,192 ranks.
    """
    key = call.digest % 2**20
    sums = comm.allreduce(np.array([x, key, key**2], np.float64))
    if int(sums[2]) * comm.size != int(sums[1])**2:
        # Raises: it says which rank has called what.
        comm.run(call, lambda collectives: collectives.barrier())
    return float(sums[0])
