"""Training in which ranks do not wait for each other: a parameter server, and pair averaging."""

from .server import ParameterServer

__all__ = ["ParameterServer"]
