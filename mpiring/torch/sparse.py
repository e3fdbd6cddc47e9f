"""Sums sparse tensors over ranks, by gathering what is not zero."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..collectives.operation import Collectives
from ..errors import ConfigError
from ..memory.arrays import Array
from ..transport.base import Schedule
from .ops import Op
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
    mine = op.scaled(tensor.detach()).coalesce()
    places, values = mine.indices().T.contiguous(), mine.values()
    loan = Loan()
    raw_places, raw_values = (loan.raw(one, written=False) for one in (places, values))

    def schedule(collectives: Collectives) -> Schedule[None]:
        all_places = yield from collectives.allgather_bytes(raw_places)
        all_values = yield from collectives.allgather_bytes(raw_values)
        total = torch.sparse_coo_tensor(
            _joined(all_places, places).T, _joined(all_values, values), mine.shape,
            check_invariants=False).coalesce()
        with torch.no_grad():    # a detached sparse tensor would keep the news to itself
            tensor.copy_(total / collectives.size if op.name == "mean" else total)

    return schedule


def _joined(gathered: Sequence[Array], like: torch.Tensor) -> torch.Tensor:
    """Return all ranks' rows as one tensor of the dtype and row shape of `like`."""
    raw = torch.from_numpy(np.concatenate(gathered))
    return raw.view(like.dtype).reshape(-1, *like.shape[1:])
