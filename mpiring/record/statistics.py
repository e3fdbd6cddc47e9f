"""Statistics of a rank's communication costs, also for Prometheus and TensorBoard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..text import count, seconds, size

if TYPE_CHECKING:
    from .flight import Flight

# Each cost's name and help text in OpenMetrics. The name ends with the unit, if there is one.
_METRICS = {
    "operations": ("operations", "Complete operations"),
    "bytes_sent": ("sent_bytes", "Bytes sent to other ranks, except through shared memory"),
    "communication_s": ("communication_seconds", "Time with at least one operation in flight"),
    "exposed_s": ("exposed_seconds", "Time that the program waited for operations"),
    "dense_bytes": ("dense_bytes", "Bytes to other nodes if gradients were not compressed"),
    "encode_s": ("encode_seconds", "Time of compressing gradients"),
    "wire_s": ("wire_seconds", "Time that compressed buckets waited for other nodes"),
    "decode_s": ("decode_seconds", "Time of decompressing gradients")}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r'\"', "\n": r"\n"})


@dataclass(frozen=True)
class Statistics:
    """Costs, on this rank, of the operations of a communicator, or of a training step.

    `print` shows them as a sentence.

    Attributes:
        operations: Number of complete operations; 0 if the communicator has one rank.
        bytes_sent: Bytes that this rank sent to other ranks, except through shared memory: 0 if
            all ranks share a node's memory, whatever the Reducer. Collectives of MPI and NCCL
            count as the least number of bytes that they can send.
        communication_s: Seconds during which at least one operation was in flight.
        exposed_s: Seconds that the program waited for operations.
        dense_bytes: Bytes that this rank would have sent to other nodes without compression of
            gradients; 0 if there are no gradients.
        encode_s, decode_s: Seconds of compressing and decompressing gradients.
        wire_s: Seconds that compressed buckets waited for other nodes, summed over the buckets in
            flight.
        reducers: Reducers that have averaged gradients, in alphabetical order. They are no costs,
            so `==` ignores them, and the sum or difference of two values has those of both.
    """

    operations: int = 0
    bytes_sent: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    dense_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    reducers: tuple[str, ...] = field(default=(), kw_only=True, compare=False)

    def __str__(self) -> str:
        """The costs as a sentence."""
        if not self.operations:
            return "no operations"
        text = (f"{count(self.operations, 'operation')} in {seconds(self.communication_s)}, "
                f"{self.hidden_share:.0%} of it hidden behind computation; waited "
                f"{seconds(self.exposed_s)}, sent {size(self.bytes_sent)}"
                + " over networks: on one node, data is in shared memory" * (not self.bytes_sent))
        if self.dense_bytes > self.bytes_sent > 0:
            text += f", which would be {size(self.dense_bytes)} without compression"
        if self.encode_s or self.decode_s:
            text += (f"; compressing took {seconds(self.encode_s)}, decompressing "
                     f"{seconds(self.decode_s)}, sending {seconds(self.wire_s)}")
        return text

    @property
    def compression_ratio(self) -> float:
        """Dense bytes divided by bytes sent; 1 if nothing was sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that overlapped computation."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def hidden_share(self) -> float:
        """Hidden seconds divided by all seconds of communication; 0 if there were none."""
        return self.hidden_s / self.communication_s if self.communication_s else 0.0

    def openmetrics(self, **labels: object) -> str:
        """Return the costs as counters in the OpenMetrics text format, which Prometheus reads.

        Counters must not decrease. `comm.statistics` only grows; add up the costs of single steps.
        `mpiring_reducer_info` is 1 for each of `reducers`, which is its label `reducer`.

        Args:
            labels: Labels of all values, such as `rank=comm.rank`.

        Raises:
            ConfigError: A label has a name that OpenMetrics does not allow.

        Source: OpenMetrics 1.0.
        """
        for name in labels:
            if not (name.isascii() and name.isidentifier()) or name.startswith("__"):
                raise ConfigError(f"label {name!r}: expected ASCII letters, digits and "
                                  f"underscores, and neither a digit nor '__' at the start")
        pairs, lines = _pairs(labels), []
        for cost, (metric, text) in _METRICS.items():
            name, unit = f"mpiring_{metric}", metric.rpartition("_")[2]
            lines += [f"# TYPE {name} counter", *[f"# UNIT {name} {unit}"] * ("_" in metric),
                      f"# HELP {name} {text}.", f"{name}_total{{{pairs}}} {getattr(self, cost)}"]
        if self.reducers:
            # The collector of node_exporter refuses the type "info".
            lines += ["# TYPE mpiring_reducer_info gauge",
                      "# HELP mpiring_reducer_info Reducers that have averaged gradients."]
        lines += [f"mpiring_reducer_info{{{_pairs({**labels, 'reducer': reducer})}}} 1"
                  for reducer in self.reducers]
        return "\n".join([*lines, "# EOF", ""])

    def add_scalars(self, writer: Any, step: int) -> None:
        """Write the costs and `hidden_share` to a writer like that of TensorBoard.

        Args:
            writer: Object with a method `add_scalar(tag, value, step)`. Tags are the OpenMetrics
                names, such as `mpiring/exposed_seconds`.
            step: Number of the training step.
        """
        for cost, (metric, _) in _METRICS.items():
            writer.add_scalar(f"mpiring/{metric}", getattr(self, cost), step)
        writer.add_scalar("mpiring/hidden_share", self.hidden_share, step)

    def __add__(self, other: "Statistics") -> "Statistics":
        return self._plus(other, 1)

    def __sub__(self, other: "Statistics") -> "Statistics":
        return self._plus(other, -1)

    def _plus(self, other: "Statistics", factor: int) -> "Statistics":
        return Statistics(
            *(getattr(self, name) + factor * getattr(other, name) for name in _METRICS),
            reducers=tuple(sorted({*self.reducers, *other.reducers})))


def _pairs(labels: Mapping[str, object]) -> str:
    """Return labels as OpenMetrics writes them."""
    return ",".join(f'{name}="{str(value).translate(_ESCAPES)}"'
                    for name, value in labels.items())


def statistics_of(flights: Sequence["Flight"], ranks: int) -> Statistics:
    """Return the costs of complete operations, given their records, among some ranks."""
    seconds = until = 0.0
    for flight in sorted(flights, key=lambda flight: flight.started_s):
        seconds += max(0.0, flight.ended_s - max(flight.started_s, until))
        until = max(until, flight.ended_s)
    return Statistics(len(flights) if ranks > 1 else 0, sum(flight.sent[0] for flight in flights),
                      seconds, sum(flight.exposed_s for flight in flights))
