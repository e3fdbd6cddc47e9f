"""Decides how long the engine's thread sleeps between two looks at MPI."""

_FIRST_PAUSE_S = 20e-6
_PAUSE_GROWTH = 1.5
_PAUSE_SHRINKAGE = 2.0


class Pause:
    """How long the thread sleeps: it settles at a part of the time in which something moves.

    A pause that began anew after each movement would look, and take the core from who
    computes, ten times for each piece of a long message.

    Args:
        longest_s: At most so many seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = _FIRST_PAUSE_S

    def after(self, moved: bool) -> float:
        """Return the seconds to sleep after looks that found something, or nothing."""
        if moved:
            self._next_s = max(self._next_s / _PAUSE_SHRINKAGE, _FIRST_PAUSE_S)
        pause = min(self._next_s, self._longest_s)
        if not moved:
            self._next_s = min(self._next_s * _PAUSE_GROWTH, self._longest_s)
        return pause
