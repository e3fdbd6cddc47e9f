"""Averages the gradients of a NumPy or CuPy model over ranks."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import refuse_other_state, truth
from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import BufferMismatchError, ConfigError
from ..gpu.arrays import is_on_gpu, vector_of
from ..gpu.device import Device
from ..gpu.interface import await_event
from ..memory.arrays import COMPLEX, FLOATING, SIXTEEN_BIT, Array, dtype_name
from ..memory.digest import bytes_of
from ..memory.reduction import quietly
from ..memory.tensors import is_tensor
from ..names import DATA_PARALLEL, explaining
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics
from ..reducers.named import or_setting
from ..reducers.reducer import ReducerSpec
from ..training.averager import Averager
from ..training.fused import Fusion, Placement, Views
from ..training.replicas import Replicas, Replicated, replicated_in
from ..world import or_world

SAME_STATE = "load the same state on every rank"


class DataParallel:
    """Averages the gradients of a model over ranks while later gradients are being computed.

    The constructor broadcasts the parameters of rank 0, in place. A training step writes each
    gradient into its view as soon as it is computed, and marks it as ready:

        dp.grads["w1"][...] = dw1
        dp.ready("w1")
        ...
        dp.wait()    # dp.grads now holds the means over ranks

    The views hold the means afterwards, so the first write of a step must assign. To accumulate
    gradients over several batches, add later batches, and call `ready` for the last batch only.

    Views stay valid, except if bucket lengths are being tuned, or an `order` is loaded that these
    buckets do not have. Then `dp.grads` has new views, and old views are read-only and read as NaN.

    Args:
        params: Arrays by name, contiguous, floating or complex; the same names, shapes and dtypes
            in the same order on every rank.
        comm: Ranks to average over; by default all ranks of the job.
        bucket_bytes: Size in bytes of the buckets into which gradients are fused; the first
            buckets are smaller, so that they are sent early. By default 25 MiB on one node. Between
            nodes the default is 4 MiB, or 128 KiB per node if this is more, up to 25 MiB.
        reducer: Reducer of `mpiring.reducers` that computes the mean, or a mapping from names or
            patterns to reducers; by default that of the setting `reducer`, or a plain mean.
        deterministic: If true, do not tune by the setting `autotune`, so that two runs on the same
            machines are bitwise identical. Otherwise, this has no effect, because the order in
            which gradients become ready does not matter.
        order: Names of all parameters in the order in which gradients are fused, for example the
            value of `order` from a checkpoint. By default the reverse order, with small parameters
            last.
        autotune: If true, try bucket sizes, algorithms and numbers of operations in flight in the
            first 60 steps or fewer, and use the fastest, also in later jobs. By default the
            setting `autotune` decides. Views move during these steps.

    Attributes:
        comm: Ranks to average over.
        params: Arrays by name, as given.
        grads: View of each gradient by name, with the shape and dtype of the parameter. With a
            sharded optimizer, only write to views: no rank has all means, and elements of other
            ranks read as NaN.
        gradients: Averager of the gradients, for an optimizer.

    Raises:
        ConfigError: A parameter cannot be trained: wrong dtype, not contiguous, or read-only.
        BufferMismatchError: The parameters or the arguments differ between ranks; names the first
            difference.

    Collective: yes. Blocking: yes.
    """

    @explaining(DATA_PARALLEL)
    def __init__(self, params: Mapping[str, Array], comm: Communicator | None = None, *,
                 bucket_bytes: int | None = None, reducer: ReducerSpec = None,
                 deterministic: bool = False, order: Sequence[str] | None = None,
                 autotune: bool | None = None) -> None:
        comm = or_world(comm)
        fusion = Fusion(bucket_bytes, or_setting(reducer, comm), deterministic, order, autotune)
        tensors, device = share(params, comm, **vars(fusion))
        self.gradients = Averager(tensors, comm, fusion, Placement(device))
        self.comm, self.params = comm, dict(params)
        # The content of `grads`.
        self._views = dict(self.gradients.views)
        self.grads = Views(self._views, "grads")
        # `ready` reports the previous step, and no call of it follows the last step.
        weakref.finalize(self, self.gradients.nonfinite.report)
        # Parameters that an optimizer updates, and state passed to `watch`.
        self._updated: dict[str, Any] = {}
        self._watched: dict[str, Any] = {}
        self._replicas = self.gradients.replicas = Replicas(
            comm, functools.partial(_parts, self.params, self._watched),
            self.gradients.weighing.model, by_optimizer=False)

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written; its bucket is sent when it is full.

        Do not read or write the view again before `wait` has returned.

        Args:
            name: Name of the parameter, as in `params`.

        Raises:
            GradientError: The name is unknown, or the gradient was already marked in this step.

        Collective: yes, over a step. Blocking: no.
        """
        factor = self.gradients.weighing.factor
        if factor != 1 and name in self.grads and self.gradients.expects(name):
            _multiply(self.grads[name], factor)
        self.gradients.ready(name)
        # Means that are queued on a GPU are checked when the next step begins.
        self.gradients.nonfinite.report()

    def weigh(self, tokens: float) -> None:
        """Weight this rank's gradients in this step by its number of tokens, or samples.

        Use this if the batches of ranks have different lengths. The mean over ranks becomes the
        mean over all tokens, as if one rank had all of them.

            dp.weigh(mask.sum())
            loss_gradient = mask * dloss / max(mask.sum(), 1)    # mean over this rank's tokens
            ...    # dp.grads, dp.ready, dp.wait

        Each rank's gradients must be means over its own tokens. The gradients of a rank with 0
        tokens count as zeros, even if `grads` holds NaN; that rank must also call `ready`. If a
        step has several batches, pass the tokens of all of them, and divide by this number.

        Args:
            tokens: Number of tokens of this rank in this step, finite and at least 0. If all ranks
                have 0, the means are 0.

        Raises:
            ConfigError: `tokens` is not a finite number of at least 0.
            GradientError: This is the second call in a step, or `ready` was called before.
            BufferMismatchError: Other ranks did not call this; raised here, in `ready` or in
                `wait`.

        Collective: yes. Blocking: no.
        """
        self.gradients.weighing.begin(tokens)

    def wait(self) -> None:
        """Wait until every gradient in `grads` is the mean over ranks.

        Raises:
            GradientError: Gradients were not marked as ready; names them.
            ConfigError: An array that an optimizer updates was replaced in `params`.
            BufferMismatchError: The buckets of the ranks differ.
            StallError: A rank did not arrive within `stall_timeout_s`.
            ReplicaError: Parameters or watched state differ between ranks; checked every
                `digest_steps` steps. If the model has an optimizer, its `step` checks this.

        Collective: yes. Blocking: yes.
        """
        for name, array in self._updated.items():
            if self.params.get(name) is not array:
                raise ConfigError(
                    f"rank {self.comm.rank}: params[{name!r}] was replaced by another array, which "
                    f"the optimizer would not update; write into it: dp.params[{name!r}][...] = x")
        self.gradients.wait()
        self._build()
        self._replicas.end_step()

    def _build(self) -> None:
        """Replace the buckets if others are due; the means and the optimizer's state move.

        Collective and blocking if so.
        """
        before, due = self.gradients, self.gradients.due
        if due is None:
            return
        buckets = before.buckets
        before.close()
        self.gradients = Averager(list(before.tensors.values()), self.comm, due,
                                  Placement(before.device), before=before)
        for name, view in self.gradients.views.items():
            view[...] = self._views[name]
        if before.device is not None:
            # Packages other than CuPy may write on other streams.
            await_event(before.device.gpu.mark())
        for bucket in buckets:
            bucket.retire()
        self._views.update(self.gradients.views)
        if before.optimizer is not None:
            before.optimizer.follow(self.gradients)

    def watch(self, **state: Any) -> None:
        """Compare optimizer state between ranks, and restore it, in the same way as parameters.

            dp.watch(velocity=velocity, masters=masters)

        Args:
            state: Arrays, or pytrees of mappings, lists and tuples with arrays and numbers, by
                names that are the same on all ranks. The contents may change and be replaced.

        Raises:
            ConfigError: A value is neither an array nor a pytree of arrays and numbers.

        Collective: no. Blocking: no.
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
        """Compare parameters and watched state now, for example before a checkpoint.

        Raises:
            ReplicaError: They differ between ranks, unless `digest_action` is "restore".

        Collective: yes. Blocking: yes.
        """
        self._replicas.compare()

    def vector(self, name: str) -> Any:
        """Return a parameter as a vector that shares its memory, for an optimizer.

        Raises ConfigError if the parameter is not in C order, unlike its gradient.
        """
        array = self._updated[name] = self.params[name]
        if not array.flags.c_contiguous:
            raise ConfigError(
                f"parameter {name!r} of shape {array.shape} is in Fortran order; give the "
                f"model numpy.ascontiguousarray({name}), because its gradient is in C order")
        return vector_of(array)

    @property
    def steps(self) -> int:
        """Number of complete steps."""
        return self.gradients.steps

    @property
    def order(self) -> list[str]:
        """Names in the order in which gradients are fused."""
        return self.gradients.order

    @property
    def statistics(self) -> Statistics:
        """Cost of averaging gradients in the last complete step.

        Other operations on the communicator, such as comparisons of replicas, are not counted.
        """
        return self.gradients.statistics

    @property
    def finite(self) -> bool:
        """True if all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf on any rank reaches the means on all ranks. If this is False, skip the update;
        reducers ignore such a step. If the program does not read this, rank 0 warns of such steps,
        once for several in a row, when the next step begins or the program ends. If operations are
        queued on a GPU, reading this waits for the GPU, and rank 0 does not warn when the program
        ends.
        """
        self.gradients.skip_report()
        return self.gradients.finite

    @property
    def nonfinite(self) -> Mapping[int, Sequence[str]]:
        """Names of gradients that held NaN or Inf before averaging in the last step, by rank.

        The same on all ranks. Each step checks the gradients that are sent last, because a NaN in
        any layer reaches them; on a GPU, this check would wait for the GPU and is omitted. All
        gradients are checked in the ten steps after a step whose means were not finite.
        """
        return self.gradients.nonfinite.by_rank

    def rescale(self, factor: float) -> None:
        """Rescale the gradients that reducers store, after the scale of the loss has changed.

        Args:
            factor: New scale divided by old scale.

        Collective: no, but call it on all ranks. Blocking: no.
        """
        self.gradients.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by name: the arrays themselves, not copies."""
        return dict(self.params)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write the parameters that `state_dict` returned into the arrays of this model.

        Args:
            state_dict: Result of `state_dict`.

        Raises:
            ConfigError: An array is missing, unknown, of another shape or dtype, or differs
                between ranks. In this case nothing has changed on any rank.

        Collective: yes. Blocking: yes.
        """
        load_arrays(self.comm, self.params, state_dict, "of the DataParallel")

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: the order of the gradients, and the state of its Reducers.

        `TrainState` saves it with the weights, so that a resumed run is bitwise identical.

        Collective: no.
        """
        return self.gradients.own_state_dict()

    def load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from this rank's result of `own_state_dict`; call it on all ranks.

        Args:
            state_dict: Result of `own_state_dict`.

        Raises:
            ConfigError: The state belongs to another model or to other Reducers.
            GradientError: A step has begun.

        Collective: yes. Blocking: yes.
        """
        self.gradients.load_own_state_dict(state_dict)
        self._build()


def share(params: Mapping[str, Array], comm: Communicator, *, deterministic: bool = False,
          **arguments: Any) -> tuple[list[TensorSpec], Device | None]:
    """Broadcast rank 0's parameters to all ranks; return the tensors, and their GPU, if any.

    The other arguments must also be the same on all ranks. Raises ConfigError if a parameter cannot
    be trained. Raises BufferMismatchError, which names the first difference, if parameters differ
    between ranks. Collective, blocking.
    """
    with same_on_all(comm, "the model", error=BufferMismatchError,
                     remedy="build the same model, in the same order, on every rank") as same:
        same.update(arguments, deterministic=truth("deterministic", deterministic))
        if not isinstance(params, Mapping) or not params:
            raise ConfigError(
                f"rank {comm.rank}: params is {params!r:.80}; pass a dict of the model's arrays")
        device = _device_of(params, comm)
        tensors = [spec_of(name, array, comm.rank) for name, array in params.items()]
        same["parameters"] = [str(tensor) for tensor in tensors]
    for array in params.values():
        comm.broadcast(array, root=0)
    return tensors, device


def load_arrays(comm: Communicator, arrays: Mapping[str, Any], state: Mapping[str, Any],
                owner: str) -> None:
    """Copy the arrays of a state into existing arrays, by name. Collective, blocking.

    `owner` is the end of "the state …" in messages. Raises ConfigError if the state does not fit,
    or differs between ranks. In this case nothing has changed on any rank.
    """
    with same_on_all(comm, f"the state {owner}", remedy=SAME_STATE) as same:
        refuse_other_state(state, arrays, owner, only=True)
        # Each access to a file of numpy.load reads the array.
        same["arrays"] = saved = {name: state[name] for name in arrays}
        for name, array in arrays.items():
            expected, given = [f"{x.dtype.name} {x.shape}" if hasattr(x, "dtype")
                               else f"a {type(x).__name__}" for x in (array, saved[name])]
            if given != expected:
                raise ConfigError(f"rank {comm.rank}: {name!r} is {given} in the state {owner}, "
                                  f"but {expected} in the model; build the model that was saved")
    for name, array in arrays.items():
        array[...] = saved[name]


def _device_of(params: Mapping[str, Any], comm: Communicator) -> Device | None:
    """Return the GPU that holds the parameters; None for host memory."""
    kinds = {name: vector_of(array).device if is_on_gpu(array) else None
             for name, array in params.items()}
    first, device = next(iter(kinds.items()))
    for name, other in kinds.items():
        if other is not device:
            raise ConfigError(
                f"rank {comm.rank}: parameter {name!r} is on {other or 'the CPU'}, but {first!r} "
                f"on {device or 'the CPU'}; expected all of them on one device")
    return device


def spec_of(name: str, array: Array, rank: int) -> TensorSpec:
    """Return the specification of a parameter; raise ConfigError if it cannot be trained."""
    label = f"rank {rank}: parameter {name!r}"
    if not isinstance(name, str):
        raise ConfigError(f"{label}: names must be strings, as str({name!r})")
    if is_tensor(array):
        raise ConfigError(f"{label} is a tensor; use mpiring.torch.DataParallel")
    try:
        kind = dtype_name(vector_of(array).dtype)
    except ConfigError as exc:
        raise ConfigError(f"{label}: {exc}") from exc
    if kind not in (*FLOATING, *COMPLEX):
        raise ConfigError(
            f"{label} is {kind}, which has no gradient; leave it out of params")
    return TensorSpec(name, array.shape, array.dtype)


def _multiply(gradient: Array, factor: float) -> None:
    """Multiply a gradient, in place; 0 times NaN is 0."""
    if factor == 0:
        gradient[...] = 0
    else:
        # NumPy would round a Python float to 16 bits.
        precise = np.float32(factor) if dtype_name(gradient.dtype) in SIXTEEN_BIT else factor
        if is_on_gpu(gradient):
            np.multiply(gradient, precise, out=gradient)
        else:
            quietly(np.multiply, gradient, precise, gradient)


def _parts(params: Mapping[str, Array], watched: dict[str, Any]) -> Iterator[Replicated]:
    """Yield everything that should be equal on all ranks; each array once, by its first name."""
    ids: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if not isinstance(x, np.ndarray) and not is_on_gpu(x) or id(x) in ids:
            return None
        ids.add(id(x))
        if is_on_gpu(x):
            return Replicated(name, lambda: bytes_of(x.get()),
                              lambda raw: x.set(raw.view(x.dtype).reshape(x.shape)))

        def write(raw: Array) -> None:
            x[...] = raw.view(x.dtype).reshape(x.shape)

        return Replicated(name, functools.partial(bytes_of, x), write)

    for name, x in (*params.items(), *watched.items()):
        yield from replicated_in(x, name, leaf)
