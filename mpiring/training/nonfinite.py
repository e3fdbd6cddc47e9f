"""Finds out which gradients of which ranks were not finite before they were averaged.

Once one rank's gradient is NaN, so is the mean on all ranks, which overwrites that gradient. So
each rank looks at its own before they leave.
"""

import logging
from collections.abc import Mapping, Sequence

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..text import first_few

# Checking all gradients takes 1.0 to 1.7 % of a step (13 MB of them in 80 ms: 0.8 to 1.4 ms),
# checking the last bucket 0.1 %. That holds the gradients of the first layers, to which backward
# takes every NaN of the layers behind them.
_CLOSE_STEPS = 10
# After as many in a row, a loss scale that is too large is not the reason any more.
HOPELESS_STEPS = 10

_log = logging.getLogger("mpiring")


class NonFinite:
    """Looks for NaN and Inf in the gradients of all ranks, before they are averaged.

    In each step each rank checks the bucket that is sent last, and in the ten steps after one whose
    means were not finite it checks all buckets. The ranks exchange names only if the means are not
    finite.

    Attributes:
        found: The names of such gradients in the last complete step, by rank; the same on all
            ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.found: Mapping[int, Sequence[str]] = {}
        self._comm = comm
        self._mine: list[str] = []
        self._means: Sequence[str] = ()
        self._step = self._steps_in_row = self._close_steps = 0
        self._finite, self._is_reported, self._is_known, self._saw_all = True, False, False, False

    def look_at(self, bucket: Bucket, *, last: bool) -> None:
        """Look at a bucket that is about to leave, if it is the last one or a closer look is due.

        On a GPU only then: backward would have to be waited for.

        Collective: no.
        """
        due = self._close_steps or last and bucket.device is None
        if due:
            self._mine += bucket.not_finite(0, bucket.plan.size)

    @property
    def unreported(self) -> bool:
        """Whether `report` would log the last complete step; the same on all ranks."""
        return not (self._finite or self._is_reported or self._is_known)

    def settle(self, step: int, beside: Sequence[str], bad_means: Sequence[str], *,
               finite: bool) -> None:
        """Complete a step.

        Args:
            step: Its number.
            beside: Names of gradients of this rank that are in no bucket, and not finite.
            bad_means: Names of means in which this rank has seen NaN or Inf.
            finite: Whether all means of all ranks are finite.

        Collective: yes. Blocking: yes.
        """
        mine, self._mine, self._step = [*self._mine, *beside], [], step
        self._finite, self._is_known = finite, False
        if finite:
            self.found, self._steps_in_row, self._is_reported = {}, 0, False
            self._close_steps = max(0, self._close_steps - 1)
            return
        everybodys = self._comm.allgather_object((mine, bad_means))
        self.found = {rank: names for rank, (names, _) in enumerate(everybodys) if names}
        self._means = sorted({name for _, bad in everybodys for name in bad})
        self._saw_all, self._close_steps = self._close_steps > 0, _CLOSE_STEPS
        self._steps_in_row += 1
        if self._steps_in_row == HOPELESS_STEPS and not self._is_reported:
            self._warn(f"; it was the {HOPELESS_STEPS}th such step in a row, which no loss scale "
                       f"explains")

    def leave_to_user(self) -> None:
        """Note that the user has asked about the last complete step: no report of it is needed.

        Collective: no.
        """
        self._is_known = True

    def report(self) -> None:
        """Warn that such gradients are used: on rank 0, and once while it goes on.

        Collective: no.
        """
        if self.unreported:
            self._warn()

    def _warn(self, more: str = "") -> None:
        # In the next step, the rank can be named as well.
        self._is_known, self._is_reported = True, bool(self.found) or self._saw_all
        if self._comm.rank:
            return
        before = ("NaN or Inf in gradients before they were averaged, and so in the means of all "
                  "ranks")
        if self.found:
            unseen = "" if self._saw_all else (
                " (of those that leave last: others were not looked at)")
            text = f"{before}: {_described(self.found)}{unseen}"
        elif self._saw_all:
            text = (f"NaN or Inf in the means of {first_few(self._means, 3)}, although all ranks' "
                    f"gradients were finite: their sum exceeds the range of the dtype, or a "
                    f"Reducer writes NaN or Inf")
        else:
            text = (f"{before}, of {first_few(self._means, 3)} (of an unknown rank: these were not "
                    f"looked at before; in the next {_CLOSE_STEPS} steps all are)")
        _log.warning("step %d: %s%s", self._step, text, more)


def _described(found: Mapping[int, Sequence[str]]) -> str:
    """Return ranks and names as a text, ranks with the same names together."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, names in found.items():
        ranks.setdefault(tuple(names), []).append(str(rank))
    return first_few([
        f"rank{'s' * (len(those) > 1)} {first_few(those, 8)} in {first_few(names, 3)}"
        for names, those in ranks.items()], 4, "; ")
