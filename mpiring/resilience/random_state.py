"""Reads and sets the state of Python's and NumPy's global random numbers."""

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
    """Continue with the random numbers that followed `random_state`.

    Raises:
        ConfigError: Not such a state.

    Collective: no.
    """
    refuse_other_state(state, ("python", "numpy"), "of random numbers")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
