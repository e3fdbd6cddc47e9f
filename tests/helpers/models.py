"""Small models, and gradients of each rank and step, for tests of training over MPI."""

import numpy as np

SHAPES = {"w1": (37, 11), "b1": (11,), "scale": (), "w2": (3001,), "w3": (40, 50), "b3": (1,)}


def random(name, *numbers, dtype="float32"):
    """Return a tensor that depends on its name and some numbers, such as a rank and a step."""
    rng = np.random.default_rng([*numbers, *name.encode()])
    return np.asarray(rng.standard_normal(SHAPES[name])).astype(dtype)


def model(*numbers, dtype="float32", dtypes={}):
    return {name: random(name, *numbers, dtype=dtypes.get(name, dtype)) for name in SHAPES}


def bits(arrays):
    return {name: np.asarray(x).tobytes() for name, x in arrays.items()}


def same_on_all_ranks(comm, arrays):
    own_bits = bits(arrays)
    return comm.broadcast_object(own_bits, root=0) == own_bits


def close(first, second, tolerance=1e-5):
    for name, x in first.items():
        np.testing.assert_allclose(x.astype("f4"), second[name].astype("f4"), tolerance, tolerance)
