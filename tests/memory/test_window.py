"""Tests memory that several processes map, and that nobody else's file is ever touched."""

import gc
import os

import numpy as np
import pytest

from mpiring.memory import window


def test_segments_are_shared_and_zero():
    first = window.create()
    second = window.attach(os.getpid(), first, window.identity(first))
    maps = [window.segments(descriptor, rank, 2, 5000)
            for rank, descriptor in enumerate((first, second))]
    os.close(first)
    os.close(second)
    assert all((segment == 0).all() and segment.size == 5000 for each in maps for segment in each)
    maps[0][1][7] = 3
    assert maps[1][1][7] == 3 and maps[1][0][7] == 0


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 30000])
def test_one_array_is_the_same_in_all_processes(nbytes):
    first = window.create()
    second = window.attach(os.getpid(), first, window.identity(first))
    x, y = (window.one_array(descriptor, rank, 2, nbytes)
            for rank, descriptor in enumerate((first, second)))
    os.close(first)
    os.close(second)
    assert x.size == y.size == nbytes and not x.any()
    x[...] = np.arange(nbytes) % 251
    assert (y == x).all() and x.ctypes.data != y.ctypes.data


def test_memory_holds_one_descriptor_and_goes_with_its_last_view():
    def maps():
        with open("/proc/self/maps") as file:
            return sum("memfd:mpiring" in line for line in file)

    # What other tests have left must not go in between.
    gc.collect()
    files, before = len(os.listdir("/proc/self/fd")), maps()
    made = [window.create() for _ in range(10)]
    views = [window.segments(descriptor, 0, 2, 5000)[0][100:] for descriptor in made]
    for descriptor in made:
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == files + 10
    assert maps() == before + 10
    assert sum(int(view.sum()) for view in views) == 0
    del views
    gc.collect()
    assert maps() == before and len(os.listdir("/proc/self/fd")) == files


def forked(child):
    """Return the exit status of a fork: 0 if `child` has returned True."""
    pid = os.fork()
    if pid == 0:
        os._exit(not child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit", [1 << 20, 8])
def test_a_fork_writes_to_a_copy_of_its_own(monkeypatch, limit):
    """Also one that has no descriptor left for the file; and so does a fork of the fork."""
    monkeypatch.setattr(window.resource, "getrlimit", lambda number: (limit, limit))
    files = len(os.listdir("/proc/self/fd"))
    descriptor = window.create()
    segments = window.segments(descriptor, 0, 2, 20_000)
    os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == files + (limit > 8)
    segments[0][...] = 1

    def child():
        saw = int(segments[0].sum())
        segments[0][5], segments[1][7] = 2, 3
        ended = forked(lambda: (segments[0][5], segments[1][7], segments[0][6]) == (2, 3, 1))
        return saw == 20_000 and ended == 0

    assert forked(child) == 0
    assert (segments[0] == 1).all() and not segments[1].any()


def test_memory_that_is_not_to_be_had_is_an_error_of_the_system():
    with pytest.raises(OSError, match="Bad file descriptor"):
        window._Mapping(10**6, 4096, True)


def test_another_file_is_not_touched(tmp_path):
    """In a container of its own, a rank finds another file under the same path."""
    file = tmp_path / "precious"
    file.write_text("data")
    memory = window.create()
    with open(file, "r+") as opened, pytest.raises(OSError, match="not of this container"):
        window.attach(os.getpid(), opened.fileno(), window.identity(memory))
    os.close(memory)
    assert file.read_text() == "data"


def test_a_file_that_is_not_there():
    with pytest.raises(OSError):
        window.attach(os.getpid(), 10**6, (1, 1))


def test_more_memory_than_there_is_is_not_tried():
    """It was, and whatever program the system then chose was killed."""
    descriptor = window.create()
    with pytest.raises(OSError, match="than this node has"):
        window.segments(descriptor, 0, 2, 1 << 50)
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
