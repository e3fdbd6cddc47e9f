"""Sums sparse tensors over ranks, by gathering what is not zero, in host memory."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..errors import ConfigError
from ..memory.arrays import Array
from ..operations.operation import Collectives
from ..transport.base import Schedule
from .ops import Op, quotient
from .vectors import Loan


def allreduce(tensor: torch.Tensor, op: Op) -> Callable[[Collectives], Schedule[None]]:
    """Return what builds the schedule that sums a sparse tensor over all ranks, in place.

    Args:
        tensor: COO, of any number of sparse and dense dimensions.
        op: "sum" or "mean".

    Raises:
        ConfigError: Another layout or op.
    """
    if tensor.layout is not torch.sparse_coo or op.name not in ("sum", "mean"):
        raise ConfigError(f"{op.name} of a {tensor.layout} tensor: expected a sum or mean of "
                          f"torch.sparse_coo")
    mine = tensor.detach() if op.factor is None else tensor.detach() * op.factor
    mine = mine.coalesce()
    places, values, loan = mine.indices().T.contiguous(), mine.values(), Loan(staged=True)
    raw_places, raw_values = (loan.raw(one, written=False) for one in (places, values))

    def schedule(collectives: Collectives) -> Schedule[None]:
        all_places = yield from collectives.allgather_bytes(raw_places)
        all_values = yield from collectives.allgather_bytes(raw_values)
        total = torch.sparse_coo_tensor(
            _joined(all_places, places).T, _joined(all_values, values), mine.shape,
            check_invariants=False).coalesce()
        # Not detached: that would keep the news to itself.
        yield from loan.copied_back(
            [(tensor, quotient(total, collectives.size) if op.divides else
              total / collectives.size if op.name == "mean" else total)])

    return schedule


def _joined(gathered: Sequence[Array], like: torch.Tensor) -> torch.Tensor:
    """Return all ranks' rows as one tensor of the dtype and row shape of `like`."""
    raw = torch.from_numpy(np.concatenate(gathered))
    return raw.view(like.dtype).reshape(-1, *like.shape[1:])
