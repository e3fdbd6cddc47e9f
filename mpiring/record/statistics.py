"""Statistics of what communication costs a rank."""

from dataclasses import astuple, dataclass

from ..text import count, seconds, size


@dataclass(frozen=True)
class Statistics:
    """Costs on this rank of a communicator's operations, or of the operations of a training step.

    `print` shows them as a sentence.

    Attributes:
        operations: Number of complete operations; 0 if the communicator has one rank.
        bytes_sent: Bytes that this rank sent to other ranks, except through shared memory. MPI
            collectives count as the least number of bytes that they can send.
        communication_s: Seconds during which at least one operation was in flight.
        exposed_s: Seconds that the program waited for operations.
        dense_bytes: Bytes that this rank would have sent to other nodes without compression of
            gradients; 0 if there are no gradients.
        encode_s, decode_s: Seconds of compressing and decompressing gradients.
        wire_s: Seconds that compressed buckets waited for other nodes, added up over the buckets
            in flight.
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

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __sub__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a - b for a, b in zip(astuple(self), astuple(other))))
