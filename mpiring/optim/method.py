"""An update rule, as a published method defines it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parts import Part
from .settings import Settings
from .update import Update


@dataclass(frozen=True)
class Layerwise:
    """A factor of each tensor's learning rate, computed from norms of the tensor.

    Attributes:
        ratio: Returns the factor, given a part, the norm of the weights, and the norm of the
            gradient or direction. The factor is 1 if a norm is zero.
        first: Update of all parts before norms are computed.
        direction: Update that writes the direction into `r`; None to use the gradient.
    """

    ratio: Callable[[Part, float, float], float]
    first: Update | None = None
    direction: Update | None = None


@dataclass(frozen=True)
class UpdateRule:
    """The update of one tensor, as a published method defines it.

    Attributes:
        settings: Default settings of all tensors, by name.
        update_of: Returns the update of a tensor, given the tensor's settings.
        numbers: Returns the numbers of the updates, given a part.
        vectors: Names of the state vectors.
        optional: Names of state vectors that the first update that needs them adds.
        layerwise: Dependence of each tensor's learning rate on norms, or None.
        extra: Returns further arguments that must be equal on all ranks, given the settings of all
            tensors. Raises ConfigError if an argument is wrong.
    """

    settings: Settings
    update_of: Callable[[Mapping[str, Any]], Update]
    numbers: Callable[[Part], Mapping[str, float]]
    vectors: Sequence[str] = ()
    optional: Sequence[str] = ()
    layerwise: Layerwise | None = None
    extra: Callable[[Mapping[str, Mapping[str, Any]]], Mapping[str, Any]] = lambda settings: {}
