"""Counts the bytes that hosts send over their networks, by the system's counters (Linux)."""

import math
from pathlib import Path

from .world import World

_INTERFACES = Path("/sys/class/net")
_LOOPBACK = "lo"


class Traffic:
    """Counts the bytes that all hosts send, all headers included.

    Args:
        world: The ranks on these hosts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = sent_bytes()

    def begin(self) -> None:
        """Count from here on.

        Collective: yes. Blocking: yes.
        """
        self._world.barrier()
        self._before = sent_bytes()

    def end(self, known_bytes: int) -> float:
        """Return what all hosts have sent since `begin`.

        Args:
            known_bytes: Bytes that this rank has sent at least.

        Returns:
            NaN where all ranks are on one host, and where a counter shows less than a rank has
            sent, as with InfiniBand, whose messages bypass the system.

        Collective: yes. Blocking: yes.
        """
        self._world.barrier()
        mine = grown(self._before, sent_bytes())
        comm = self._world.comm
        found = comm.allgather_object((known_bytes, mine, comm.local_rank))
        least = min(known for known, _, _ in found)
        if comm.num_nodes == 1 or any(grew < least for _, grew, _ in found):
            return math.nan
        return float(sum(grew for _, grew, local_rank in found if local_rank == 0))


def sent_bytes(interfaces: Path = _INTERFACES) -> dict[str, int]:
    """Return the bytes that each network interface has sent, without the loopback."""
    return {path.name: int((path / "statistics/tx_bytes").read_text())
            for path in interfaces.glob("*") if path.name != _LOOPBACK and path.is_dir()}


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    """Return the growth of the interface that has sent the most.

    Not that of all: a bridge, a bond and its members count the same bytes.
    """
    return max((after[name] - before[name] for name in before.keys() & after.keys()), default=0)
