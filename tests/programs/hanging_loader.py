"""Waits for a loader that never returns, until Ctrl-C; also leaves an iteration that goes on."""

import itertools
import sys
import threading
import time

from mpiring.data import prefetch


def hangs():
    yield 1
    # Ctrl-C comes while the program waits for the loader.
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "_item":
        time.sleep(0.01)
    print("the loader hangs", flush=True)
    threading.Event().wait()


# Alive until Python is torn down.
unfinished = iter(prefetch(itertools.count(), "cpu"))
next(unfinished)
try:
    for batch in prefetch(hangs(), "cpu"):
        pass
except KeyboardInterrupt:
    print("Ctrl-C has come")
