"""Training in which ranks do not wait for each other: a parameter server, and pair averaging."""

from ..provisional import publish
from .pair_averaging import PairAveraging
from .server import ParameterServer

__all__ = ["PairAveraging", "ParameterServer"]

publish(__name__)
