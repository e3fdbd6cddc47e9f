"""Closes what is open when the program ends: first what uses communicators, then communicators."""

import atexit
import contextlib
from collections.abc import Callable

Action = Callable[[], object]
# Each in the order of registration; the last one runs first.
_communicators: list[Action] = []
_users: list[Action] = []


def register(action: Action, *, uses_communicators: bool = False) -> None:
    """Call an action at the end of the program, unless it is unregistered before.

    Actions run behind functions that the program has registered with `atexit` since the first one.

    Args:
        action: Function without arguments.
        uses_communicators: If true, it runs before communicators are closed.
    """
    if not (_communicators or _users):
        atexit.register(_run)
    (_users if uses_communicators else _communicators).append(action)


def unregister(action: Action) -> None:
    """Do not call an action at the end of the program."""
    for actions in (_communicators, _users):
        if action in actions:
            actions.remove(action)
    if not (_communicators or _users):
        atexit.unregister(_run)


def _run() -> None:
    # All actions run, even if some raise.
    with contextlib.ExitStack() as stack:
        for action in (*_communicators, *_users):
            stack.callback(action)
        _communicators.clear()
        _users.clear()
