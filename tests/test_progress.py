"""Tests the bar that a terminal shows."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from launching import environment, needed

PROGRAM = """
from mpiring.progress import Progress
progress = Progress("bench it", 2)
progress.step()
progress.say("a line")
progress.step()
progress.close()
Progress("hidden", 2, shown=False).say("hidden, too")
"""


def test_a_terminal_shows_a_bar():
    needed("tqdm")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(), stderr=slave,
                           stdout=subprocess.PIPE, text=True, timeout=60)
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert ended.returncode == 0 and ended.stdout == "a line\n"
    assert "bench it" in shown and "0/2" in shown and "hidden" not in shown


def test_elsewhere_there_are_only_lines():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(), text=True,
                           capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "a line\n", "")
