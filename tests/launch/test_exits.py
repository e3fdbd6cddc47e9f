"""Tests in which order things are closed at the end of a program."""

from launching import python

PROGRAM = """
import atexit
from mpiring.launch import exits

def left_out():
    print("left out")

def fails():
    print("fails")
    raise ValueError("in between")

atexit.register(print, "last")
exits.register(left_out)
exits.unregister(left_out)
exits.register(lambda: print("first communicator"))
exits.register(lambda: print("first user"), uses_communicators=True)
exits.register(fails)
atexit.register(print, "of the program")
exits.register(lambda: print("second communicator"))
exits.register(lambda: print("second user"), uses_communicators=True)
"""


def test_users_of_communicators_end_before_communicators():
    ended = python("-c", PROGRAM)
    assert ended.stdout.splitlines() == [
        "of the program", "second user", "first user", "second communicator", "fails",
        "first communicator", "last"]
    assert "ValueError: in between" in ended.stderr
