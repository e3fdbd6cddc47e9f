"""Statistics of what communication costs a rank."""

from dataclasses import astuple, dataclass

from ..text import count, seconds, size


@dataclass(frozen=True)
class Statistics:
    """Costs on this rank of a communicator's operations, or of those of a training step.

    Attributes:
        operations: How many were completed; 0 for a rank that is alone.
        bytes_sent: By this rank to others, other than through shared memory. MPI's own
            collectives are assumed to send the least that is possible.
        communication_s: Seconds in which at least one operation was under way.
        exposed_s: Seconds that the program waited for operations.
        dense_bytes: What this rank would have sent to other nodes, had no gradient been
            compressed; 0 where there are no gradients.
        encode_s, decode_s: Seconds of compressing and decompressing gradients.
        wire_s: Seconds that compressed buckets waited for other nodes; those of buckets under way
            at once add up.
    """

    operations: int = 0
    bytes_sent: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    dense_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def __str__(self) -> str:
        """The costs as a sentence."""
        if not self.operations:
            return "no operations"
        text = (f"{count(self.operations, 'operation')} in {seconds(self.communication_s)}, "
                f"{self.hidden_share:.0%} of it hidden behind computation; waited "
                f"{seconds(self.exposed_s)}, sent {size(self.bytes_sent)}")
        if self.dense_bytes > self.bytes_sent > 0:
            text += f", which would be {size(self.dense_bytes)} without compression"
        if self.encode_s or self.decode_s:
            text += (f"; compressing took {seconds(self.encode_s)}, decompressing "
                     f"{seconds(self.decode_s)}, sending {seconds(self.wire_s)}")
        return text

    @property
    def compression_ratio(self) -> float:
        """Dense bytes over sent bytes; 1 where nothing is sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def hidden_s(self) -> float:
        """Seconds of communication behind computation."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def hidden_share(self) -> float:
        """Hidden seconds over all seconds of communication; 0 where there were none."""
        return self.hidden_s / self.communication_s if self.communication_s else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __sub__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a - b for a, b in zip(astuple(self), astuple(other))))
