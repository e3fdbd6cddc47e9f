"""Finds out which gradients of which ranks were not finite before they were averaged.

Once one rank's gradient is NaN, so is the mean on all ranks, which overwrites that gradient. So
each rank looks at its own before they leave.
"""

import logging
from collections.abc import Mapping, Sequence

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..text import first_few

# A look at all gradients takes 1.0 to 1.7 % of a step (13 MB of them in 80 ms: 0.8 to 1.4 ms), one
# at the last bucket 0.1 %. That holds the gradients of the first layers, to which backward takes
# every NaN of the layers behind them.
_CLOSE_STEPS = 10
# After as many in a row, a loss scale that is too large is not the reason any more.
HOPELESS_STEPS = 10

_log = logging.getLogger("mpiring")


class NonFinite:
    """Looks for NaN and Inf in the gradients of all ranks, before they are averaged.

    In each step each rank looks at the bucket that leaves last, and at its mean; at all of them in
    the ten steps after one whose mean was not finite. All ranks have the same means: they exchange
    names, and send anything at all, only when there are any.

    Attributes:
        found: The names of such gradients in the last complete step, by rank; the same on all
            ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.found: Mapping[int, Sequence[str]] = {}
        self._comm = comm
        self._mine: list[str] = []
        self._step = self._steps_in_row = self._close_steps = 0
        self._is_reported = self._is_known = self._saw_all = False

    def look_at(self, bucket: Bucket, *, last: bool) -> None:
        """Look at a bucket that is about to leave, if it is the last one or a closer look is due.

        On a GPU only then: backward would have to be waited for.

        Collective: no.
        """
        due = self._close_steps or last and bucket.device is None
        if due and not bucket.holds_finite(bucket.flat):
            # What a lossy Reducer has left between the tensors does not count.
            self._mine += [name for name, view in bucket.views.items()
                           if not bucket.holds_finite(view)]

    def settle(self, step: int, buckets: Sequence[Bucket], beside: Sequence[str] = (), *,
               finite: bool = True) -> bool:
        """Complete a step; return whether no NaN or Inf was seen.

        Args:
            step: Its number.
            buckets: All, in the order in which they leave; with the means.
            beside: Names of gradients of this rank that are in no bucket, and not finite.
            finite: Whether there are none of that kind, on all ranks.

        Collective: yes. Blocking: yes.
        """
        looked_at = buckets if self._close_steps else buckets[-1:]
        finite = all([finite, *(bucket.is_finite() for bucket in looked_at)])
        mine, self._mine, self._step = [*self._mine, *beside], [], step
        self._is_known = False
        if finite:
            self.found, self._steps_in_row, self._is_reported = {}, 0, False
            self._close_steps = max(0, self._close_steps - 1)
            return True
        everybodys = self._comm.allgather_object(mine)
        self.found = {rank: names for rank, names in enumerate(everybodys) if names}
        self._saw_all, self._close_steps = self._close_steps > 0, _CLOSE_STEPS
        self._steps_in_row += 1
        if self._steps_in_row == HOPELESS_STEPS and not self._is_reported:
            self._warn(f"; it was the {HOPELESS_STEPS}th such step in a row, which no loss scale "
                       f"explains")
        return False

    def leave_to_user(self) -> None:
        """Note that the user has asked about the last complete step: no report of it is needed.

        Collective: no.
        """
        self._is_known = True

    def report(self) -> None:
        """Warn that such gradients are used: on rank 0, and once while it goes on.

        Collective: no.
        """
        if self.found and not (self._is_reported or self._is_known):
            self._warn()

    def _warn(self, more: str = "") -> None:
        self._is_reported = True
        if self._comm.rank == 0:
            seen = "" if self._saw_all else " (of those that leave last: others were not looked at)"
            _log.warning("step %d: NaN or Inf in gradients before they were averaged, and so in "
                         "the means of all ranks: %s%s%s", self._step, _described(self.found), seen,
                         more)


def _described(found: Mapping[int, Sequence[str]]) -> str:
    """Return ranks and names as a text, ranks with the same names together."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, names in found.items():
        ranks.setdefault(tuple(names), []).append(str(rank))
    return first_few([
        f"rank{'s' * (len(those) > 1)} {first_few(those, 8)} in {first_few(names, 3)}"
        for names, those in ranks.items()], 4, "; ")
