"""Stands for numba in the jobs that tests start: NumPy gives the same bits, and sooner.

To compile loops takes every rank seconds. Jobs that want numba have `launching.WITHOUT_STAND_INS`;
that the bits are the same is shown by tests/memory/test_sixteen.py and tests/reducers/codecs.
"""

raise ImportError("tests/stand_ins has none")
