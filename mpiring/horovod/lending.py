"""Lends the communicators of a process set to its optimizers, one after the other."""

from collections.abc import Collection
from dataclasses import dataclass

from .. import Communicator


@dataclass
class Loan:
    """A communicator for one optimizer at a time; `is_free` once this rank has given it back."""

    comm: Communicator
    is_free: bool = False


class Lender:
    """The communicators of a process set that optimizers use.

    An optimizer needs a communicator for itself, since ranks may complete the gradients of several
    optimizers in different orders. Ranks drop an optimizer at different times, when their garbage
    collectors run. Hence communicators are not closed then, but used again.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._loans: list[Loan] = []

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self) -> Loan:
        """Return a communicator that all ranks have given back, or a new one. Collective."""
        free = self._comm.allgather_object(
            {number for number, loan in enumerate(self._loans) if loan.is_free},
            label="communicators that are not in use")
        common = set[int].intersection(*free)
        if not common:
            self._loans.append(Loan(self._comm.split(0)))
        loan = self._loans[min(common, default=-1)]
        loan.is_free = False
        return loan

    def close(self) -> None:
        """Close all communicators. Collective, blocking."""
        for loan in self._loans:
            loan.comm.close()


def give_back(loans: Collection[Loan], steps: Collection[object]) -> None:
    """Give communicators back, unless operations of incomplete `steps` may be in flight."""
    for loan in loans:
        loan.is_free = not steps
