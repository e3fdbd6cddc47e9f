"""Keeps the state of Python's and NumPy's global random numbers, to go on with the same ones."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arguments import refuse_other_state


def random_state() -> dict[str, Any]:
    """Return the state of `random` and `numpy.random`, as a tree for a checkpoint.

    Each rank has its own. That of a Generator is `generator.bit_generator.state`.

    Collective: no.
    """
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers that followed when `random_state` was called.

    Raises:
        ConfigError: It is no such state.

    Collective: no.
    """
    refuse_other_state(state, ("python", "numpy"), "of random numbers")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
