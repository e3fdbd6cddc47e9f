"""Trains a NumPy model across ranks: parameters in, averaged gradients out."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator, refuse_other_than_communicators
from ..errors import ConfigError
from ..gpu.arrays import is_on_gpu, vector_of
from ..gpu.device import Device
from ..memory.arrays import COMPLEX, FLOATING, Array, dtype_name
from ..memory.digest import bytes_of
from ..record.statistics import Statistics
from ..reducers.by_name import Wish
from ..training.gradients import Gradients, refuse_different
from ..training.replicas import Replicas, Replicated, replicated_in


class DataParallel:
    """Averages the gradients of a model over ranks while they are still being computed.

    Parameters are broadcast from rank 0, in place. A training step writes each
    gradient into its view as soon as it is known, and marks it:

        dp.grads["w1"][...] = dw1
        dp.ready("w1")
        ...
        dp.wait()    # dp.grads now holds the means over ranks

    The views keep the means, so the first write of a step must assign; to
    accumulate over several batches, add in the later ones, and call `ready` in
    the last one only.

    Look views up in `dp.grads` in every step: after the first one, gradients
    move once to new memory, ordered as they really became ready. A view kept
    from before cannot be written to any more, and reads NaN from the second
    step on.

    Args:
        params: Arrays by name, contiguous and floating or complex; the same
            names, shapes and dtypes in the same order on every rank.
        comm: The ranks to average over.
        bucket_bytes: Gradients are fused into messages of about this many bytes; the first
            ones are shorter, to leave early.
        reducer: How gradients become their mean: one of `mpiring.reducers`, or a mapping from
            names or patterns to several; a plain mean by default.
        deterministic: Keep the first order of gradients, so that two runs have equal
            bits even if gradients became ready in different orders.
        order: What `order` was when a checkpoint was saved, to go on from it bit by bit.

    Attributes:
        comm: The ranks.
        params: The arrays that were given, by name.
        grads: A view for each parameter's gradient, of its shape and dtype.

    Raises:
        ConfigError: A parameter cannot be trained on: wrong dtype, not contiguous, read-only.
        BufferMismatchError: The parameters differ between ranks; names the first.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, params: Mapping[str, NDArray[Any]], comm: Communicator, *,
                 bucket_bytes: int = 25 << 20, reducer: Wish = None,
                 deterministic: bool = False, order: Sequence[str] | None = None) -> None:
        refuse_other_than_communicators(comm)
        if not isinstance(params, Mapping) or not params:
            raise ConfigError(
                f"rank {comm.rank}: params is {params!r:.80}; pass a dict of the model's arrays")
        device = _device_of(params, comm)
        tensors = [_spec(name, array) for name, array in params.items()]
        refuse_different(comm, "parameter", [str(tensor) for tensor in tensors])
        for array in params.values():
            comm.broadcast(array, root=0)
        self._gradients = Gradients(
            tensors, comm, bucket_bytes=bucket_bytes, reducer=reducer,
            deterministic=deterministic, order=order, device=device)
        self.comm, self.params = comm, dict(params)
        self.grads = self._gradients.views
        # Of the last step, too, which no other one follows.
        weakref.finalize(self, self._gradients.nonfinite.report)
        self._watched: dict[str, Any] = {}
        self._replicas = Replicas(
            comm, functools.partial(_parts, self.params, self._watched))

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written; its bucket leaves once it is full.

        The view must not be touched again before `wait` has returned.

        Args:
            name: As in `params`.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        self._gradients.nonfinite.report()
        self._gradients.ready(name)

    def wait(self) -> None:
        """Return when every gradient in `grads` is the mean over ranks.

        Raises:
            GradientError: Some gradients were not marked ready; names them.
            BufferMismatchError: The ranks' buckets differ.
            StallError: Some ranks did not arrive in time.
            ReplicaError: Parameters, or what `watch` was given, differ between ranks; after
                every `digest_steps` steps.

        Collective: yes. Blocking: yes.
        """
        self._gradients.wait()
        self._replicas.end_step()

    def watch(self, **state: Any) -> None:
        """Let optimiser state be compared between ranks, and restored, as parameters are.

            dp.watch(velocity=velocity, masters=masters)

        Args:
            state: By any name, on all ranks the same: an array, or a nest of mappings, lists
                and tuples with arrays and numbers in it, which may change and be replaced.

        Raises:
            ConfigError: It is none of that.

        Collective: no.
        """
        for name, value in state.items():
            if not (isinstance(value, np.ndarray | Mapping | list | tuple) or is_on_gpu(value)):
                raise ConfigError(
                    f"rank {self.comm.rank}: watch({name}=...) is a {type(value).__name__}; pass "
                    f"an array, or a mapping or list of arrays")
            for part in _parts({}, {name: value}):
                part.read()
        self._watched.update(state)

    def compare_replicas(self) -> None:
        """Compare parameters, and what `watch` was given, now: as before a checkpoint.

        Raises:
            ReplicaError: They differ, unless `digest_action` is "restore".

        Collective: yes. Blocking: yes.
        """
        self._replicas.compare()

    @property
    def steps(self) -> int:
        """How many steps are complete."""
        return self._gradients.steps

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which gradients are fused; None in the first step."""
        return self._gradients.order

    @property
    def statistics(self) -> Statistics:
        """What averaging gradients cost in the last complete step.

        Other operations on the communicator do not count, be they yours or those that compare
        replicas.
        """
        return self._gradients.statistics

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf of any rank is in the means of all. Where it is False, take no step:
        reducers have taken none either. Of a step for which nobody asks, rank 0 warns when the
        next one begins, or the program ends; once while it goes on.
        """
        self._gradients.nonfinite.leave_to_user()
        return self._gradients.finite

    @property
    def nonfinite(self) -> Mapping[int, Sequence[str]]:
        """Whose own gradients held NaN or Inf in the last complete step: by rank, some of them.

        The same on all ranks. It has those that were looked at before they left: in each step
        the ones that leave last (not on a GPU, which would have to be waited for), where the NaN
        of any other layer ends up, and all in the ten steps after such a step.
        """
        return self._gradients.nonfinite.found

    def rescale(self, factor: float) -> None:
        """Tell reducers, which remember gradients, that the loss is scaled otherwise now.

        Args:
            factor: New scale / old scale.
        """
        self._gradients.rescale(factor)


def _device_of(params: Mapping[str, Any], comm: Communicator) -> Device | None:
    """Return the GPU that parameters lie on; None for host memory."""
    kinds = {name: vector_of(array).device if is_on_gpu(array) else None
             for name, array in params.items()}
    first, device = next(iter(kinds.items()))
    for name, other in kinds.items():
        if other is not device:
            raise ConfigError(
                f"rank {comm.rank}: parameter {name!r} is on {other or 'the CPU'}, but {first!r} "
                f"on {device or 'the CPU'}; expected all of them on one device")
    return device


def _spec(name: str, array: NDArray[Any]) -> TensorSpec:
    if not isinstance(name, str):
        raise ConfigError(f"parameter {name!r}: names must be strings, as str({name!r})")
    try:
        kind = dtype_name(vector_of(array).dtype)
    except ConfigError as exc:
        raise ConfigError(f"parameter {name!r}: {exc}") from exc
    if kind not in (*FLOATING, *COMPLEX):
        raise ConfigError(
            f"parameter {name!r} is {kind}, which has no gradient; leave it out of params")
    return TensorSpec(name, array.shape, array.dtype)


def _parts(params: Mapping[str, Array], watched: dict[str, Any]) -> Iterator[Replicated]:
    """Yield what all ranks have in common; each array once, under the first of its names."""
    seen: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if not isinstance(x, np.ndarray) and not is_on_gpu(x) or id(x) in seen:
            return None
        seen.add(id(x))
        if is_on_gpu(x):
            return Replicated(name, lambda: bytes_of(x.get()),
                              lambda raw: x.set(raw.view(x.dtype).reshape(x.shape)))

        def write(raw: Array) -> None:
            x[...] = raw.view(x.dtype).reshape(x.shape)

        return Replicated(name, functools.partial(bytes_of, x), write)

    for name, x in (*params.items(), *watched.items()):
        yield from replicated_in(x, name, leaf)
