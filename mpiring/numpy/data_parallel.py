"""Trains a NumPy or CuPy model on several ranks: in step, or each at its own pace."""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import refuse_other_state, truth
from ..asynchronous import ParameterServer
from ..buckets.bucket import TensorSpec
from ..communicator import Communicator, refuse_other_than_communicators
from ..errors import BufferMismatchError, ConfigError, GradientError
from ..gpu.arrays import is_on_gpu, vector_of
from ..gpu.device import Device
from ..memory.arrays import COMPLEX, FLOATING, SIXTEEN_BIT, Array, dtype_name
from ..memory.digest import bytes_of
from ..memory.reduction import quietly
from ..memory.tensors import is_tensor
from ..operations.consistency import same_on_all
from ..record.statistics import Statistics
from ..reducers.reducer import ReducerSpec
from ..training.averager import Averager
from ..training.fused import Fusion, Placement
from ..training.replicas import Replicas, Replicated, replicated_in

SAME_STATE = "load the same state on every rank"


class DataParallel:
    """Averages the gradients of a model over ranks while others are still being computed.

    Parameters are broadcast from rank 0, in place. A training step writes each gradient into its
    view as soon as it is computed, and marks it:

        dp.grads["w1"][...] = dw1
        dp.ready("w1")
        ...
        dp.wait()    # dp.grads now holds the means over ranks

    The views hold the means afterwards, so the first write of a step must assign. To accumulate
    over several batches, add in the later ones, and call `ready` in the last only.

    Look views up in `dp.grads` in every step: after the first step gradients move to new memory,
    in the order in which they became ready. An older view cannot be written to any more, and reads
    NaN from the second step on.

    Args:
        params: Arrays by name, contiguous, floating or complex; the same names, shapes and dtypes
            in the same order on every rank.
        comm: The ranks to average over.
        bucket_bytes: Gradients are fused into messages of about this many bytes; the first are
            shorter, to be sent early. By default 25 MiB on one node; between nodes 4 MiB, or
            128 KiB for each where that is more, up to 25 MiB.
        reducer: How gradients become their mean: one of `mpiring.reducers`, or a mapping from
            names or patterns to several; a plain mean by default.
        deterministic: Do not reorder gradients after the first step, so that two runs have equal
            bits even if gradients became ready in different orders.
        order: `order` of a saved checkpoint, to continue from it bit by bit.
        autotune: In the first steps, at most 60, try which length of buckets, algorithm and
            number of operations in flight make steps fastest; later jobs begin with these.
            By default as in Config. Views move until then.

    Attributes:
        comm: The ranks.
        params: The given arrays, by name.
        grads: A view for each parameter's gradient, of its shape and dtype. With a sharded
            optimizer they are to be written only: no rank has all means, and a NaN in a view says
            that it holds others.
        gradients: Averages them, for an optimizer.

    Raises:
        ConfigError: A parameter cannot be trained: wrong dtype, not contiguous, read-only.
        BufferMismatchError: The parameters or the arguments differ between ranks; names the first
            difference.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, params: Mapping[str, Array], comm: Communicator, *,
                 bucket_bytes: int | None = None, reducer: ReducerSpec = None,
                 deterministic: bool = False, order: Sequence[str] | None = None,
                 autotune: bool | None = None) -> None:
        refuse_other_than_communicators(comm)
        fusion = Fusion(bucket_bytes, reducer, deterministic, order, autotune)
        tensors, device = share(params, comm, **vars(fusion))
        self.gradients = Averager(tensors, comm, fusion, Placement(device))
        self.comm, self.params = comm, dict(params)
        self.grads = self.gradients.views
        # Also of the last step, which no `ready` follows.
        weakref.finalize(self, self.gradients.nonfinite.report)
        # What an optimizer updates.
        self._updated: dict[str, Any] = {}
        self._watched: dict[str, Any] = {}
        self._replicas = Replicas(
            comm, functools.partial(_parts, self.params, self._watched))

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written; its bucket is sent when it is full.

        Do not touch the view again before `wait` has returned.

        Args:
            name: As in `params`.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        self.gradients.nonfinite.report()
        factor = self.gradients.weighing.factor
        if factor != 1 and name in self.grads and self.gradients.expects(name):
            _multiply(self.grads[name], factor)
        self.gradients.ready(name)

    def weigh(self, tokens: float) -> None:
        """Let this rank count in this step as much as it has tokens, or samples.

        For ranks whose batches are of different lengths: the mean over ranks becomes the mean over
        all their tokens, as one rank with all of them would get it.

            dp.weigh(mask.sum())
            loss_gradient = mask * dloss / max(mask.sum(), 1)    # of the mean over this rank's own
            ...    # dp.grads, dp.ready, dp.wait

        Gradients must be means over this rank's own tokens; those of a rank with 0 count as zeros,
        whatever is in `grads`: even NaN, the mean of nothing. It has to mark them ready, as ever.
        Over several batches per step, give the tokens of all of them, and divide by these.

        Args:
            tokens: A finite number from 0; of this rank and this step. If all ranks have 0, the
                means are 0.

        Raises:
            ConfigError: Not such a number.
            GradientError: A second call in one step, or one after the first `ready`.
            BufferMismatchError: Other ranks did not call this; here, in `ready` or in `wait`.

        Collective: yes. Blocking: no.
        """
        self.gradients.weighing.begin(tokens)

    def wait(self) -> None:
        """Return when every gradient in `grads` is the mean over ranks.

        Raises:
            GradientError: Gradients were not marked ready; names them.
            ConfigError: An array that an optimizer updates was replaced in `params`.
            BufferMismatchError: The ranks' buckets differ.
            StallError: A rank did not arrive in time.
            ReplicaError: Parameters, or watched state, differ between ranks; every `digest_steps`
                steps.

        Collective: yes. Blocking: yes.
        """
        self._refuse_replaced()
        self.gradients.wait()
        self._replicas.end_step()

    def watch(self, **state: Any) -> None:
        """Compare optimiser state between ranks, and restore it, as is done with parameters.

            dp.watch(velocity=velocity, masters=masters)

        Args:
            state: By any name, the same on all ranks: an array, or a nest of mappings, lists and
                tuples with arrays and numbers in it, which may change and be replaced.

        Raises:
            ConfigError: Not such a state.

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
        """Compare parameters and watched state now, as before a checkpoint.

        Raises:
            ReplicaError: They differ, unless `digest_action` is "restore".

        Collective: yes. Blocking: yes.
        """
        self._replicas.compare()

    def vector(self, name: str) -> Any:
        """Return a parameter as a vector that shares its memory, for an optimizer.

        Raises:
            ConfigError: It does not lie in C order, as its gradient does.
        """
        array = self._updated[name] = self.params[name]
        if not array.flags.c_contiguous:
            raise ConfigError(
                f"parameter {name!r} of shape {array.shape} lies in Fortran's order; give the "
                f"model numpy.ascontiguousarray({name}), for its gradient lies in C's")
        return vector_of(array)

    def _refuse_replaced(self) -> None:
        """Raise ConfigError where `params` has another array than an optimizer updates."""
        for name, array in self._updated.items():
            if self.params.get(name) is not array:
                raise ConfigError(
                    f"rank {self.comm.rank}: params[{name!r}] was replaced by another array, which "
                    f"the optimizer would not update; write into it: dp.params[{name!r}][...] = x")

    @property
    def steps(self) -> int:
        """How many steps are complete."""
        return self.gradients.steps

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which gradients are fused; None in the first step."""
        return self.gradients.order

    @property
    def statistics(self) -> Statistics:
        """The cost of averaging gradients in the last complete step.

        Other operations on the communicator do not count: yours, and those that compare replicas.
        """
        return self.gradients.statistics

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf of any rank is in the means of all. Where this is False, take no step:
        reducers have not counted it either. If this is not read, rank 0 warns of such a step when
        the next begins, or the program ends; once for several in a row.
        """
        self.gradients.nonfinite.leave_to_user()
        return self.gradients.finite

    @property
    def nonfinite(self) -> Mapping[int, Sequence[str]]:
        """By rank, names of its own gradients that held NaN or Inf in the last complete step.

        The same on all ranks. Gradients are checked before they are sent: in each step those that
        are sent last (except on a GPU, which would have to be waited for), which the NaN of any
        other layer reaches, and all in the ten steps after one whose means were not finite.
        """
        return self.gradients.nonfinite.by_rank

    def rescale(self, factor: float) -> None:
        """Rescale what reducers remember of gradients, after the scale of the loss has changed.

        Args:
            factor: New scale / old scale.
        """
        self.gradients.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by name: the arrays themselves, not copies."""
        return dict(self.params)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write the parameters that `state_dict` returned into the arrays of this model.

        Raises:
            ConfigError: An array is missing, unknown, of another shape or dtype, or differs
                between ranks. Nothing has changed then, on any rank.

        Collective: yes. Blocking: yes.
        """
        load_arrays(self.comm, self.params, state_dict, "of the DataParallel")

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: the order of the gradients, and the state of its Reducers.

        `TrainState` saves it with the weights, so that a run resumes with identical bits.

        Collective: no.
        """
        return self.gradients.own_state_dict()

    def load_own_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from what `own_state_dict` returned on this rank; call it on all ranks.

        Raises:
            ConfigError: The state belongs to another model or to other Reducers.
            GradientError: A step has begun.

        Collective: yes. Blocking: yes.
        """
        self.gradients.load_own_state_dict(state_dict)


class AsyncDataParallel(ParameterServer):
    """A NumPy model that all ranks update, each at its own pace; see ParameterServer.

        dp = AsyncDataParallel(params, comm, optimizer=partial(SGD, lr=0.1), staleness=4)
        ...
        dp.step()                               # in the place of optimizer.step()
        ...
        dp.close()                              # all ranks have the same weights

    Between steps, gradients are written into `dp.grads` and marked by `dp.ready(name)`, as with a
    DataParallel.

    Args: see ParameterServer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ready: set[str] = set()
        super().__init__(*args, **kwargs)

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: no. Blocking: no.
        """
        if name not in self.grads or name in self._ready:
            mistake = "was marked ready twice" if name in self._ready else "is unknown"
            raise GradientError(f"rank {self._comm.rank}: gradient {name!r} {mistake}; call step() "
                                f"after each backward pass, and ready() once per parameter")
        self._ready.add(name)
        self._comm.poke()

    def step(self, gradients: Mapping[str, Any] | None = None) -> bool:
        """Push this rank's gradients, pull the weights; return whether gradients were finite.

        Args:
            gradients: In the place of those in `grads`.

        Raises:
            GradientError: Gradients were not marked ready; names them.
            StallError: As `pull`.

        Collective: no. Blocking: yes.
        """
        missing = [name for name in self.grads if name not in self._ready]
        if missing and gradients is None:
            raise GradientError(
                f"rank {self._comm.rank}: step() with {len(missing)} of {len(self.grads)} gradients"
                f" missing: {', '.join(missing)}; call ready(name) for each, also for one that is "
                f"zero in this step")
        self._ready.clear()
        return super().step(gradients)


def share(params: Mapping[str, Array], comm: Communicator, *, deterministic: bool = False,
          **arguments: Any) -> tuple[list[TensorSpec], Device | None]:
    """Give all ranks rank 0's parameters.

    Args:
        deterministic, arguments: Other values that all ranks must pass.

    Returns:
        The tensors, in their order, and the GPU on which they lie, None for host memory.

    Raises:
        ConfigError: A parameter cannot be trained.
        BufferMismatchError: The parameters differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
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
                whose: str) -> None:
    """Write the arrays of a state into others, by name.

    Args:
        comm: The ranks; all must load the same.
        arrays: Arrays to write to.
        state: Arrays to read, by the same names, of the same shapes and dtypes.
        whose: End of "the state …" in messages.

    Raises:
        ConfigError: The state does not fit, or differs between ranks. Nothing has changed then, on
            any rank.

    Collective: yes. Blocking: yes.
    """
    with same_on_all(comm, f"the state {whose}", remedy=SAME_STATE) as same:
        refuse_other_state(state, arrays, whose, only=True)
        # Of files such as numpy.load's, each access reads the array.
        same["arrays"] = saved = {name: state[name] for name in arrays}
        for name, array in arrays.items():
            expected, given = [f"{x.dtype.name} {x.shape}" if hasattr(x, "dtype")
                               else f"a {type(x).__name__}" for x in (array, saved[name])]
            if given != expected:
                raise ConfigError(f"rank {comm.rank}: {name!r} is {given} in the state {whose}, "
                                  f"but {expected} in the model; build the model that was saved")
    for name, array in arrays.items():
        array[...] = saved[name]


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


def spec_of(name: str, array: Array, rank: int) -> TensorSpec:
    """Return the name, shape and dtype of a parameter.

    Args:
        rank: Of this process, for messages.

    Raises:
        ConfigError: It cannot be trained.
    """
    which = f"rank {rank}: parameter {name!r}"
    if not isinstance(name, str):
        raise ConfigError(f"{which}: names must be strings, as str({name!r})")
    if is_tensor(array):
        raise ConfigError(f"{which} is a tensor; use mpiring.torch.DataParallel")
    try:
        kind = dtype_name(vector_of(array).dtype)
    except ConfigError as exc:
        raise ConfigError(f"{which}: {exc}") from exc
    if kind not in (*FLOATING, *COMPLEX):
        raise ConfigError(
            f"{which} is {kind}, which has no gradient; leave it out of params")
    return TensorSpec(name, array.shape, array.dtype)


def _multiply(gradient: Array, factor: float) -> None:
    """Multiply a gradient, in place; by 0 also what is NaN."""
    if factor == 0:
        gradient[...] = 0
    else:
        # NumPy would round the factor to 16 bits, too.
        precise = np.float32(factor) if dtype_name(gradient.dtype) in SIXTEEN_BIT else factor
        if is_on_gpu(gradient):
            np.multiply(gradient, precise, out=gradient)
        else:
            quietly(np.multiply, gradient, precise, gradient)


def _parts(params: Mapping[str, Array], watched: dict[str, Any]) -> Iterator[Replicated]:
    """Yield what should be equal on all ranks; each array once, under its first name."""
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
