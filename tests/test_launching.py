"""Tests that the tests depend on nothing that they inherit."""

import signal
import subprocess
import sys

from launching import HANG_S, ROOT

INHERITED = [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]

# Ignores and blocks signals, as whoever starts the tests may, and becomes a process that does
# what the tests do first, and starts another one, which is ended by a signal.
OUTER = f"""
import os, signal, sys
for number in {[*map(int, INHERITED)]}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {[*map(int, INHERITED)]})
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
INNER = f"""
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from launching import default_signals
default_signals()
for number in {[*map(int, INHERITED)]}:
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(number)
    print(child.wait(30))
"""


def test_jobs_can_be_signalled_however_the_tests_were_started():
    told = subprocess.run(
        [sys.executable, "-c", OUTER, INNER, ROOT / "tests" / "helpers"], cwd=ROOT, text=True,
        capture_output=True, timeout=HANG_S)
    assert told.stdout.split() == [str(-number) for number in INHERITED], told.stderr
