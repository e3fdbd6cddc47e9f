"""Tests more elements than a C int can count."""

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


def test_more_than_2_to_the_31_elements(comm):
    if comm.size != 2:
        pytest.skip(reason="one size is enough: two ranks need 7 GiB already")
    n = 2**31 + 11
    x = np.zeros(n, np.int8)
    marks = [0, 2**30, 2**31 - 1, 2**31, n - 1]
    # In the same memory: to be given it takes longer than the rest.
    for algorithm in ("ring", "native"):
        x[marks] = comm.rank + 1
        comm.allreduce(x, algorithm=algorithm)
        assert x[marks].tolist() == [3] * len(marks)
        assert np.count_nonzero(x) == len(marks)
