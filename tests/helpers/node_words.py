"""Maps words that all ranks see, in pinned host memory, for barriers of streams."""

import os

import numpy as np

from mpiring.memory import window


def pinned_words(device, comm, before=0):
    """Return a word for each rank, apart from each other, with a number in it; collective."""
    descriptor = window.create()
    process, number, identity = comm.bcast((os.getpid(), descriptor, window.identity(descriptor)))
    if comm.rank:
        descriptor = window.attach(process, number, identity)
    page = window.one_array(descriptor, comm.rank, comm.size, window.PAGE_BYTES)
    device.gpu.pin(page)
    words = [word[:1] for word in page.view(np.uint32).reshape(-1, 32)[:comm.size]]
    words[comm.rank][:] = before
    comm.Barrier()
    return words
