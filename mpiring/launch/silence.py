"""Warns at the end of a job of several ranks that have never communicated."""

import atexit
import functools
import logging
import sys

from . import forks

_log = logging.getLogger("mpiring")
# Number of ranks of the largest communicator that was closed, and this process's rank in it.
_size, _rank = 0, 0
_communicated = False


@functools.cache
def watch() -> None:
    """At the end of the program, warn if no communicator was used.

    A model that is not wrapped, or wrapped in `torch.nn.DataParallel`, trains without an error, but
    on each rank separately. Call this before `exits.register` closes a communicator: functions that
    are registered first run last.
    """
    atexit.register(warn)


def note(rank: int, size: int, *, communicated: bool) -> None:
    """Record that a communicator was closed.

    If `communicated`, one of its ranks has communicated, in any communicator.
    """
    global _communicated, _rank, _size
    _communicated |= communicated
    if size > _size:
        _rank, _size = rank, size


def warn() -> None:
    """Warn on rank 0 if communicators were closed and none was used; then forget them."""
    global _communicated, _size
    size, communicated, _size, _communicated = _size, _communicated, 0, False
    watch.cache_clear()
    has_failed = hasattr(sys, "last_value")
    if size > 1 and not (_rank or communicated or has_failed or forks.in_fork):
        _log.warning(
            "mpiring has sent nothing between the %d ranks of this job (calls of mpi4py are not "
            "counted). If they train a model, each rank has trained its own: wrap the model in "
            "DataParallel of mpiring.torch or mpiring.numpy; torch.nn.DataParallel averages "
            "nothing over ranks. To hide this: "
            "logging.getLogger(\"mpiring\").setLevel(\"ERROR\")", size)
