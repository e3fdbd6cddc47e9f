"""Starts new ranks: each joins the others, then runs the same program from its beginning."""

import re
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import ConfigError

if TYPE_CHECKING:
    from ..provisional import survivors

# Seconds that a new rank may take to start Python and MPI, and to join.
JOINING_S = 300
_MAIN = "from mpiring.elastic.joining import main; main()"
# Options of Python that are followed by a value.
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}

# The ranks that this process has joined, until `elastic.run` uses them; and whether `elastic.run`
# was called.
_joined: "survivors.Survivors | None" = None
_has_run = False


def command(numbers: Sequence[int]) -> list[str]:
    """Return the command of new ranks that run this program, with these numbers among all ranks.

    It raises ConfigError if this program is neither a file nor a module.
    """
    words = sys.orig_argv[1:]
    options = []
    while words and words[0].startswith("-") and not re.fullmatch(r"-[A-Za-z]*[cm]", words[0]):
        count = 2 if words[0] in _WITH_VALUE else 1
        options += words[:count]
        del words[:count]
    if words[1:2] == [_MAIN]:
        # This process is a new rank itself.
        words = words[3:]
    if not words or words[0].endswith("c") and words[0].startswith("-"):
        raise ConfigError("max_ranks: new ranks cannot run this program, because it is neither a "
                          "file nor a module; start `python train.py` or `python -m train`")
    return [sys.executable, *options, "-c", _MAIN, ",".join(map(str, numbers)), *words]


def main() -> None:
    """Join the ranks that have started this process, and run their program."""
    global _joined
    numbers, *words = sys.argv[1:]
    # The other ranks may have given up. Only a signal can then end a wait within MPI.
    signal.alarm(JOINING_S)
    from ..provisional import survivors
    _joined = survivors.join([int(number) for number in numbers.split(",")])
    signal.alarm(0)
    if words[0].startswith("-"):
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def take(*, may_grow: bool) -> "survivors.Survivors | None":
    """Return the ranks that this new rank has joined; None on other ranks and in later calls.

    With `may_grow`, this program may start new ranks. It raises ConfigError if they cannot be
    started.
    """
    global _joined, _has_run
    if may_grow:
        command([])
        if _has_run:
            raise ConfigError("max_ranks: new ranks would join the first elastic.run of the "
                              "program, but this is another one; call elastic.run once")
    _has_run = True
    joined, _joined = _joined, None
    return joined
