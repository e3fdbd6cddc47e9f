"""Predicts which Reducer pays on this network, if any does."""

import math
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...buckets.bucket import Bucket, BucketPlan, TensorSpec, plan, usual_bytes
from ...communicator import Communicator
from ...errors import ConfigError
from ...operations.agreement import Call
from ...operations.model import Model
from ...reducers import Cast, Compressor, Int8, Mean, OneBit, PowerSGD, Reducer, TopK
from ..table import Column, head, line, significant
from ..units import size_text

# A step computes forward and backward, and the latter about twice as long. Gradients travel then.
BACKWARD_SHARE = 2 / 3
# Predictions are no more precise than this, so smaller savings are not recommended.
_WORTHWHILE = 0.1
# The sample: bytes of gradients for each rank of a node; a call to warm up, then calls until
# their number or their time is enough.
_SAMPLE_BYTES = 4 << 20
_CALLS, _FEWEST_CALLS, _ENOUGH_S = 6, 2, 0.5

# Reducers as programs write them; their loss (0: rounded to 16 bits, 1: to 8 bits, right on
# average, 2: approximated, with errors fed back); and how to make one that compresses from the
# first step on.
_REDUCERS: Sequence[tuple[str, int, Callable[[], Compressor]]] = (
    ('Cast("bfloat16")', 0, lambda: Cast("bfloat16")),
    ('Cast("float16")', 0, lambda: Cast("float16")),
    ("Int8()", 1, Int8),
    ("PowerSGD(rank=2)", 2, lambda: PowerSGD(rank=2, start_step=0)),
    ("OneBit()", 2, lambda: OneBit(warmup_steps=0)),
    ("TopK(0.001)", 2, lambda: TopK(0.001)))
_COLUMNS = (
    Column("name", -16, title="reducer"), Column("sent", 12, 3, "MB sent/rank"),
    Column("ratio", 6, 3), Column("codec", 16, 3, "encode+decode ms"),
    Column("wire", 8, 3, "wire ms"))
_WIDTH = 100
_LOSSES = (
    "All of these change gradients. Casts change them least: a rounding to 16 bits. Int8 rounds "
    "to 8 bits by chance; PowerSGD, OneBit and TopK send an approximation, and the errors with "
    "later gradients. What that does to a model's accuracy, only training it can tell.")


@dataclass(frozen=True)
class Workload:
    """The gradients and the compute of a step.

    Attributes:
        nbytes: Bytes of all gradients, in float32.
        matrix: Shape of the matrices that the gradients are assumed to be.
        compute_s: Seconds of a step without communication; None if unknown.
    """

    nbytes: int
    matrix: tuple[int, int] = (512, 2048)
    compute_s: float | None = None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of a matrix."""
        return 4 * math.prod(self.matrix)

    def buckets(self, nodes: int) -> list[int]:
        """Return the bytes of each bucket that DataParallel makes of the gradients by default."""
        full_tensors, left_bytes = divmod(self.nbytes, self.tensor_bytes)
        tensors = self.tensors(full_tensors)
        if left_bytes >= 4 or not full_tensors:
            tensors.append(TensorSpec("rest", (max(1, left_bytes // 4),), np.dtype(np.float32)))
        return [4 * bucket.size for bucket in plan(tensors, usual_bytes(nodes))]

    def tensors(self, count: int) -> list[TensorSpec]:
        """Return so many matrices."""
        return [TensorSpec(f"matrix {i}", self.matrix, np.dtype(np.float32)) for i in range(count)]


@dataclass(frozen=True)
class Method:
    """The cost of averaging with a Reducer, for each byte of gradients.

    Attributes:
        name: The Reducer's.
        loss: What it does to gradients, as in `_REDUCERS`; -1 for the plain mean.
        sent: Bytes that the busiest rank sends to other nodes.
        share: What the busiest node sends, over what it sends in a dense allreduce.
        codec_s: Seconds of encoding and decoding, on the slowest rank.
    """

    name: str
    loss: int
    sent: float
    share: float
    codec_s: float


@dataclass(frozen=True)
class Prediction:
    """The cost of averaging with a Reducer in a step of a workload.

    Attributes:
        sent_bytes: By the busiest rank.
        codec_s: Seconds of encoding and decoding.
        wire_s, last_s: Seconds on the wire, of all buckets and of the last one.
    """

    method: Method
    sent_bytes: float
    codec_s: float
    wire_s: float
    last_s: float

    def step_s(self, compute_s: float = 0.0) -> float:
        """Return the seconds of a step; without computing, those of communication alone.

        Messages hide behind the backward pass, at most as long as that takes; those of the last
        bucket do not, since it is full only at the end. Encoding and decoding do not hide: they
        compete with the compute for the processor.
        """
        exposed_s = max(self.last_s, self.wire_s - BACKWARD_SHARE * compute_s)
        return compute_s + self.codec_s + exposed_s


@dataclass(frozen=True)
class Wire:
    """The measured cost of the plain mean between these nodes.

    Attributes:
        latency_s: Seconds of a short allreduce.
        s_per_byte: Seconds per byte of a long array.
    """

    latency_s: float
    s_per_byte: float


def predict(method: Method, wire: Wire, buckets: Sequence[int]) -> Prediction:
    """Predict what a method costs in a step.

    The model: each bucket takes the latency of an allreduce, whichever the method (those with more
    rounds of messages than a ring, as PowerSGD, pay a little more), and what is sent costs as
    much per byte as in the plain mean, by the node that sends most. Encoding and decoding grow with
    the bytes. Buckets follow each other.

    Args:
        buckets: The bytes of each.
    """
    total = sum(buckets)
    wires_s = [wire.latency_s + method.share * nbytes * wire.s_per_byte for nbytes in buckets]
    return Prediction(
        method, method.sent * total, method.codec_s * total, sum(wires_s), wires_s[-1])


def verdict(
    dense: Prediction, others: Sequence[Prediction], compute_s: float | None,
) -> list[str]:
    """Return a paragraph or two on whether to compress, and how."""
    dense_s = dense.step_s(compute_s or 0.0)

    def ratio(prediction: Prediction) -> float:
        return prediction.step_s(compute_s or 0.0) / dense_s

    subject = "a step" if compute_s else "communication"
    paying = [prediction for prediction in others if ratio(prediction) <= 1 - _WORTHWHILE]
    fastest = min(others, key=ratio)
    if paying:
        least = min(prediction.method.loss for prediction in paying)
        gentlest = [prediction for prediction in paying if prediction.method.loss == least]
        limit = min(map(ratio, gentlest)) / (1 - _WORTHWHILE)
        # The first of those that are about as fast.
        gentle = next(prediction for prediction in gentlest if ratio(prediction) <= limit)
        text = (f"{gentle.method.name} changes gradients least of those that pay: with it, "
                f"{subject} is predicted to take {ratio(gentle):.2f} of the time with the plain "
                f"mean.")
        if ratio(fastest) <= (1 - _WORTHWHILE) * ratio(gentle):
            text += (f" {fastest.method.name} is predicted to take {ratio(fastest):.2f}, and may "
                     f"cost accuracy.")
    else:
        text = (f"Compression does not pay here: the fastest, {fastest.method.name}, is predicted "
                f"to take {ratio(fastest):.2f} of the time that {subject} takes with the plain "
                f"mean.")
    if compute_s:
        hidden_s = compute_s + dense.wire_s - dense_s
        return [f"{text} Of the plain mean's communication, {_ms(hidden_s)} of "
                f"{_ms(dense.wire_s)} ms can hide behind the backward pass."]
    enough_s = (dense.wire_s - dense.last_s) / BACKWARD_SHARE
    return [text, f"From a computing time of {_ms(enough_s)} ms a step on, the plain mean's "
                  f"communication can hide behind the backward pass, but for the last bucket's "
                  f"{_ms(dense.last_s)} ms: more cannot be gained then. Give that time with "
                  f"--compute-ms to see steps."]


def report(work: Workload, dense: Prediction, others: Sequence[Prediction]) -> str:
    """Return a table of predictions, and the verdict."""
    compute_s, matrix = work.compute_s, "x".join(map(str, work.matrix))
    given = "" if compute_s is None else f", {_ms(compute_s)} ms of computing a step"
    columns = [*_COLUMNS, Column("total", 8, 3, "comm. ms" if compute_s is None else "step ms"),
               Column("of_dense", 6, 2, "/dense")]
    lines = [f"Compression, predicted for {size_text(work.nbytes)} of float32 gradients in "
             f"{matrix} matrices{given}", "", head(columns)]
    dense_s = dense.step_s(compute_s or 0.0)
    for prediction in (dense, *others):
        total_s = prediction.step_s(compute_s or 0.0)
        lines.append(line({
            "name": prediction.method.name, "sent": prediction.sent_bytes / 1e6,
            "ratio": dense.sent_bytes / prediction.sent_bytes, "codec": 1e3 * prediction.codec_s,
            "wire": 1e3 * prediction.wire_s, "total": 1e3 * total_s,
            "of_dense": total_s / dense_s}, columns))
    texts = [*verdict(dense, others, compute_s), _LOSSES]
    return "\n".join([*lines, "", *(textwrap.fill(text, _WIDTH) for text in texts)])


def advise(comm: Communicator, model: Model, work: Workload) -> str:
    """Measure what Reducers cost here, and return what that means for a workload.

    Args:
        model: What the dense algorithms cost here.

    Collective: yes. Blocking: yes.
    """
    nodes = comm.memory_groups
    if len(nodes) == 1:
        return ("All ranks share one node's memory: nothing is sent between nodes, so Reducers "
                "have nothing to compress, and take the plain mean.")
    sample = _Sample(comm, nodes, work)
    wire = _wire(model, sample)
    node_bytes = 2 * (len(nodes) - 1) / len(nodes)
    dense = Method("Mean() (dense)", -1, node_bytes / min(map(len, nodes)), 1.0, 0.0)
    methods = []
    for name, loss, make in _REDUCERS:
        reducer = make()
        sample.attach_buckets(reducer)
        taken = sample.measure(reducer)
        by_node = [sum(taken.sent[rank] for rank in ranks) for ranks in nodes]
        methods.append(Method(
            name, loss, max(taken.sent) / sample.nbytes,
            max(by_node) / sample.nbytes / node_bytes, taken.codec_s / sample.nbytes))
    buckets = work.buckets(len(nodes))
    return report(work, predict(dense, wire, buckets),
                  [predict(method, wire, buckets) for method in methods])


def _wire(model: Model, sample: "_Sample") -> Wire:
    """Measure what the plain mean costs.

    The curves give the latency only: links may let bursts of bytes pass, and on slow ones no
    long array was timed.
    """
    latency_s = min(seconds for _, curve in model.curves for _, seconds in curve.points)
    seconds = sample.measure(Mean()).seconds
    return Wire(latency_s, max(seconds - latency_s, 0.0) / sample.nbytes)


@dataclass(frozen=True)
class _Taken:
    """The cost of a reduction of the sample.

    Attributes:
        seconds, codec_s: Of the slowest rank.
        sent: Bytes, per rank.
    """

    seconds: float
    codec_s: float
    sent: Sequence[int]


class _Sample:
    """A bucket of random gradients, which Reducers reduce on the real network.

    It is as long for each rank of a node, however many there are, but no longer than the model:
    so ranks of a node encode at once, as in training, each its own matrices.

    Args:
        nodes: The ranks of each node.
    """

    def __init__(self, comm: Communicator, nodes: Sequence[Sequence[int]], work: Workload) -> None:
        self._comm = comm
        wanted = max(map(len, nodes)) * max(1, _SAMPLE_BYTES // work.tensor_bytes)
        tensors = work.tensors(max(1, min(wanted, work.nbytes // work.tensor_bytes)))
        self._bucket = Bucket(0, BucketPlan(tuple(tensors)), comm.empty)
        self.nbytes = self._bucket.flat.nbytes
        self._gradients = np.random.default_rng(comm.rank).standard_normal(
            self._bucket.flat.size, np.float32)

    def attach_buckets(self, reducer: Compressor) -> None:
        """Make the sample known to a Reducer."""
        buckets, order = [self._bucket], list(self._bucket.views)
        self._comm.submit(
            Call("attach buckets", repr(reducer)),
            lambda collectives: reducer.attach_buckets(collectives, buckets, order)).wait()

    def measure(self, reducer: Reducer) -> _Taken:
        """Return the least that a reduction takes; the same on all ranks."""
        # The first call compiles, and touches fresh memory.
        first = self._reduced(reducer)
        samples: list[_Taken] = []
        while len(samples) < _CALLS and (
                len(samples) < _FEWEST_CALLS
                or sum(sample.seconds for sample in samples) < _ENOUGH_S):
            samples.append(self._reduced(reducer))
        return _Taken(min(sample.seconds for sample in samples),
                      min(sample.codec_s for sample in samples), first.sent)

    def _reduced(self, reducer: Reducer) -> _Taken:
        comm, bucket = self._comm, self._bucket
        bucket.flat[...], bucket.finite = self._gradients, None
        comm.barrier()
        sent, codec_s = comm.statistics.bytes_sent, _codec_s(reducer)
        began = time.perf_counter()
        comm.submit(Call("reduce", repr(reducer)),
                    lambda collectives: reducer.reduce(collectives, bucket)).wait()
        seconds = time.perf_counter() - began
        if isinstance(reducer, Compressor):
            reducer.commit_step(True)
        rows = comm.allgather_object((
            seconds, _codec_s(reducer) - codec_s, comm.statistics.bytes_sent - sent))
        return _Taken(max(row[0] for row in rows), max(row[1] for row in rows),
                      [row[2] for row in rows])


def _codec_s(reducer: Reducer) -> float:
    """Return the seconds that a Reducer has encoded and decoded so far, on this rank."""
    if not isinstance(reducer, Compressor):
        return 0.0
    return reducer.cost.encode_s + reducer.cost.decode_s


def _ms(seconds: float) -> str:
    return significant(1e3 * seconds, 3)


def parse_matrix(text: str) -> tuple[int, int]:
    """Return the shape of a matrix: "512x2048".

    Raises:
        ConfigError: Not a shape.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
    if match is None:
        raise ConfigError(f"matrix {text!r}: expected rows x columns, as 512x2048")
    return int(match[1]), int(match[2])
