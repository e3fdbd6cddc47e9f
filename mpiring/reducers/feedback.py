"""Adds what was not sent to the next gradients: error feedback, around any Reducer."""

from collections.abc import Callable

from ..sharding.state import Wide
from ..errors import ConfigError
from ..gpu import vectors
from ..gpu.device import Device
from ..transport.base import Schedule
from .compressor import Compressor, SliceExchange

Between = Callable[[SliceExchange, Wide, Wide | None], Schedule[bool]]


def with_feedback(
    exchange: SliceExchange, x: Wide, lost: Wide | None, between: Between,
) -> Schedule[bool]:
    """Return the schedule that averages a slice plus its residual; what is lost is the next one.

    Args:
        exchange, x, lost: As for `Compressor.between`; nothing is lost.
        between: Returns the schedule that averages.

    Source: Karimireddy et al., ICML 2019, algorithm 2.
    """
    if lost is not None:
        vectors.clear(lost)
    with exchange.encoding():
        vectors.add(x, exchange.state.vector("residual"))
    return between(exchange, x, exchange.state.next("residual"))


class ErrorFeedback(Compressor):
    """Adds what another Reducer did not send to the next gradients.

    So nothing is lost for good: over time, the sum of all means is that of the gradients, but
    for one residual. It takes twice the memory of this rank's slices of the gradients (float32),
    one half for the case that a step does not count.

    Args:
        reducer: A Cast, an Int8, … One that feeds its errors back by itself is used as it is.

    Raises:
        ConfigError: The reducer does not compress.

    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    feeds_back = True

    def __init__(self, reducer: Compressor) -> None:
        super().__init__()
        if not isinstance(reducer, Compressor):
            raise ConfigError(
                f"ErrorFeedback({reducer!r}): expected a Reducer that compresses, such as Int8(); "
                f"a plain mean has no errors")
        self.reducer = reducer
        self.on_gpus, self.whole_tensors = reducer.on_gpus, reducer.whole_tensors

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.reducer!r})"

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The names of the vectors in its state; the same on all ranks."""
        return self.reducer.vector_names if self.reducer.feeds_back else ("residual",)

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed."""
        return self.reducer.compresses(nodes, step)

    def prepare(self, device: Device | None) -> None:
        """Let the other Reducer compile what it needs."""
        self.reducer.prepare(device)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        if self.reducer.feeds_back:
            return self.reducer.between(exchange, x, lost)
        return with_feedback(exchange, x, lost, self.reducer.between)
