"""Chooses the algorithm of an allreduce."""

import functools
import logging
from typing import Any

import numpy as np

from ..collectives import hierarchical, native, shared
from ..config import ALGORITHMS
from ..errors import ConfigError
from ..memory.arrays import dtype_name
from ..memory.reduction import widens
from .model import Model

# Where nothing was measured: MPI's own call needs fewer messages, ours fewer bytes.
OWN_FROM_BYTES = 256 << 10

_log = logging.getLogger("mpiring")


@functools.cache
def say_fallback(reason: str) -> None:
    """Say once that the configured algorithm cannot be used."""
    _log.warning('the configured algorithm cannot be used, "auto" is taken instead: %s', reason)


@functools.lru_cache(maxsize=4096)
def choose(
    nbytes: int, dtype: np.dtype[Any], op: str, wish: str, ranks: int, nodes: int,
    model: Model | None = None,
) -> str:
    """Return the name of the algorithm for an allreduce, the same on every rank.

    Args:
        nbytes: Of the array.
        dtype: Of the array.
        op: As in Reduction.
        wish: "auto", or the algorithm that the user insists on.
        ranks: How many there are.
        nodes: How many memories they share.
        model: What was measured.

    Returns:
        "ring", "direct", "native", "shared", "hierarchical", or, for few bytes, "eager" in
        place of "shared" and "short" in place of "hierarchical".

    Raises:
        ConfigError: The wish is unknown, or cannot be done here.
    """
    if wish == "auto":
        wish = _best(nbytes, dtype, op, ranks, nodes, model)
    if wish == "shared" and nodes == 1:
        is_short = shared.is_short(nbytes, dtype, ranks, shared.EAGER_BYTES)
        return "eager" if is_short else "shared"
    if wish == "hierarchical" and 1 < nodes < ranks:
        is_short = nbytes <= hierarchical.SHORT_BYTES and dtype.char not in "gG"
        return "short" if is_short else "hierarchical"
    _refuse_the_impossible(wish, dtype, op, ranks, nodes)
    return wish


def candidates(ranks: int, nodes: int) -> tuple[str, ...]:
    """Return the algorithms that are worth measuring on a cluster."""
    if nodes == 1:
        return ("shared", "native")
    return ("native", "ring", "hierarchical") if nodes < ranks else ("native", "ring")


def _best(
    nbytes: int, dtype: np.dtype[Any], op: str, ranks: int, nodes: int, model: Model | None,
) -> str:
    if nodes == 1:
        return "shared"
    if widens(dtype, op):
        # A ring would round at every hop.
        return "hierarchical" if nodes < ranks else "direct"
    names = candidates(ranks, nodes)
    if not native.supports(dtype, op):
        names = names[1:]
    if model is None:
        return "native" if "native" in names and nbytes < OWN_FROM_BYTES else names[-1]
    return model.best(nbytes, names)


def _refuse_the_impossible(
    wish: str, dtype: np.dtype[Any], op: str, ranks: int, nodes: int,
) -> None:
    if wish == "native" and not native.supports(dtype, op):
        raise ConfigError(
            f"algorithm='native': MPI's own {op} is wrong or missing for "
            f"{dtype_name(dtype)}; use algorithm='auto'")
    if wish == "shared":
        raise ConfigError(
            "algorithm='shared': not all ranks share one node's memory; use algorithm='auto'")
    if wish == "hierarchical":
        raise ConfigError(
            f"algorithm='hierarchical': expected several nodes, and several ranks on one of them "
            f"that share its memory; here are {ranks} ranks and {nodes} node(s); use "
            f"algorithm='auto'")
    if wish not in ALGORITHMS:
        raise ConfigError(f"algorithm={wish!r}: expected one of {', '.join(ALGORITHMS)}")
