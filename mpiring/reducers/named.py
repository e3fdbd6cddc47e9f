"""Makes the Reducer that the setting `reducer` names, for models whose program names none."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..communicator import Communicator
from ..names import reducer_named
from .compressor import ErrorFeedback
from .encoded import Cast, Int8, OneBit
from .powersgd import PowerSGD
from .reducer import Mean, Reducer, ReducerSpec
from .topk import TopK

S = TypeVar("S", bound=ReducerSpec)
# Functions that make a Reducer, by its name in the setting; a number follows some names.
_MAKERS: Mapping[str, Callable[..., Reducer]] = {
    "mean": Mean, "bf16": Cast, "float16": lambda: Cast("float16"),
    "int8": lambda: ErrorFeedback(Int8()), "onebit": OneBit, "powersgd": PowerSGD, "topk": TopK}


def or_setting(spec: S, comm: Communicator) -> S | Reducer:
    """Return the argument `reducer` of a model; if it is None, a new Reducer by the setting."""
    if spec is not None or not comm.config.reducer:
        return spec
    name, *number = reducer_named(comm.config.reducer)
    return _MAKERS[name](*number)
