"""Trains with Horovod's DistributedOptimizer on real ranks."""

import pytest
from jobs import run
from launching import PROGRAMS, installed

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


def test_it_trains_as_one_process_does():
    installed("torch")
    ended = run(3, PROGRAMS / "horovod_optimizer.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("all is well") == 3
