"""A parameter server that shards the model over all ranks and bounds how stale weights are."""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import ClosedError, Communicator, ConfigError, Handle, StallError, Statistics
from ..provisional import (
    Array, Call, Schedule, arguments, first_few, memory, optimizers, ranks_text, same_on_all, world,
)
from .base import AsynchronousTraining
from .clocks import Condition, SliceOwner, SliceWorker
from .layout import FlatModel, ModelArrays, arrays_of
from .store import SliceStore, refuse_other_than_makers

_log = logging.getLogger("mpiring")
# Number of tensors that a warning names.
_NAMES = 4


class ParameterServer(AsynchronousTraining):
    """A model whose weights are updated by all ranks, each at its own pace.

        with ParameterServer(params, comm, optimizer=partial(SGD, lr=0.1)) as server:
            for batch in batches:
                server.push(gradients(params, batch))
                server.pull()

    Each rank owns a slice of the model, with the optimizer state for it, and serves it in the
    background. A rank's clock is the number of its pushes. `pull` at clock c returns once every
    rank has pushed c − `staleness` times. No rank reads older weights, and no rank that pulls in
    every step runs further ahead. A rank always reads its own pushes. Ranks that have finished
    delay no other rank.

    With a staleness of 0, the owners apply the pushes of one clock together, as their mean, in rank
    order. This is synchronous training, bitwise identical in every run. Otherwise, each push is
    applied as a separate update when it arrives. Its learning rate is divided by 1 + τ, where τ is
    the number of updates since the rank last pulled. Functions passed as `lr` or `momentum` get
    the number of updates: one per clock, or one per push.

    Sources: Ho et al., NIPS 2013. Zhang et al., IJCAI 2016. See SliceOwner.

    Args:
        params: Model as a dict of NumPy arrays or PyTorch tensors in host memory, of dtype
            float16, bfloat16, float32 or float64. Names, shapes and dtypes are the same on all
            ranks. Training starts with the values of rank 0. `pull` writes into the arrays that
            the dict holds at that time.
        comm: Communicator whose ranks train together; by default, all ranks.
        optimizer: Function that makes an elementwise mpiring.optim optimizer from a model, like
            `SGD` or `functools.partial(AdamW, lr=1e-3)`.
        staleness: Bound on the difference between clocks, in pushes; with None, ranks never wait.
        damped: If true, divide learning rates by 1 + τ.

    Attributes:
        params: The argument of the same name.
        grads: Memory for gradients, by name; write gradients into it, and call `push()` without an
            argument.
        clock: Number of this rank's pushes.
        refused: Number of this rank's pushes whose gradients were not finite.
        staleness: The argument of the same name.
        closed: True after `close`.

    Raises:
        ConfigError: An argument is wrong, or differs between ranks.
        BufferMismatchError: The models differ between ranks; the message has the first difference.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, params: Mapping[str, Any], comm: Communicator | None = None, *,
                 optimizer: Callable[[Any], optimizers.Optimizer], staleness: int | None = 4,
                 damped: bool = True) -> None:
        comm = world.or_world(comm)
        with same_on_all(comm, "ParameterServer") as same:
            same["staleness"] = self.staleness = staleness = (
                None if staleness is None else arguments.whole_number("staleness", staleness, 0))
            same["damped"] = damped = arguments.truth("damped", damped)
            refuse_other_than_makers(optimizer)
        self._model = ModelArrays(params, comm, "ParameterServer")
        self.params = dict(self._model.arrays())
        self.clock = self.refused = 0
        self._gradients, self._weights = (FlatModel(self._model.tensors, comm.size, name)
                                          for name in ("grads", "weights"))
        self.grads = self._gradients.views
        self._store = SliceStore(self._weights, comm, optimizer)
        self._owner = SliceOwner(comm.size, staleness, self._store, damped=damped)
        self._worker = SliceWorker()
        self._pushed: Handle[None] | None = None
        self._finished = False
        # This comes last, so that an error above leaves no open communicator behind.
        super().__init__(comm)
        self._begin()

    def _begin(self) -> None:
        """Broadcast rank 0's weights, and start to serve this rank's slice."""
        for name, x in self.params.items():
            self._weights.views[name][...] = x
        for flat in self._weights.flats:
            self._comm.broadcast(flat, root=0)
        for owned, x in zip(self._store.weights, self._weights.slices[self._comm.rank]):
            owned[...] = x
        self._write_params()
        self._serving = self._messages.submit(Call("serve", "a slice"), self._owner.serve)
        # After this, every rank serves its slice.
        self._comm.barrier()

    # Training

    def push(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Send this rank's gradients; return while the messages are in flight.

        A push with NaN or Inf counts for the clock, but changes no weights. A warning names the
        tensors.

        Args:
            gradients: Gradients by name, like `params`; copied. By default, the gradients in
                `grads`, which must not change until the next `pull` has returned.

        Raises:
            ConfigError: Gradients are missing, or have other shapes or dtypes.
            StallError: The previous push has not arrived within `stall_timeout_s`.
            ClosedError: This rank has finished.

        Collective: no. Blocking: until the previous push has arrived, unless a `pull` followed it.
        """
        self._refuse_finished("push()")
        self._await_push()
        if gradients is not None:
            self._copy(gradients)
        self.clock += 1
        self._calls += 1
        bad = [name for name, x in self.grads.items() if not memory.is_finite(x.reshape(-1))]
        if bad:
            self.refused += 1
            _log.warning("rank %d: push %d is refused: NaN or Inf in the gradients of %s",
                         self._comm.rank, self.clock, first_few(bad, _NAMES))
        slices = None if bad else self._gradients.slices
        self._pushed = self._messages.submit(
            Call("push", f"number {self.clock}", nbytes=self._weights.nbytes * (not bad)),
            lambda net: self._worker.push(net, self.clock, slices))

    def pull(self) -> Mapping[str, Array]:
        """Write the newest weights into `params`, and return `params`.

        Returns once no rank is further behind than `staleness` allows.

        Raises:
            StallError: After `stall_timeout_s`, a rank is behind or an owner has not answered; the
                message names these ranks.
            ClosedError: This rank has finished.

        Collective: no. Blocking: yes.
        """
        self._refuse_finished("pull()")
        self._calls += 1
        handle = self._messages.submit(
            Call("pull", f"at clock {self.clock}", nbytes=self._weights.nbytes),
            lambda net: self._worker.pull(net, self.clock, self._weights.slices))
        self._await(handle)
        self._in_flight_s += handle.flight.ended_s - handle.flight.called_s
        self._await_push()
        self._write_params()
        return self.params

    def step(self, gradients: Mapping[str, Any] | None = None) -> bool:
        """Push, then pull; return True if the gradients were finite.

        Args:
            gradients: Gradients by name, as for `push`; by default, the gradients in `grads`.
        """
        refused = self.refused
        self.push(gradients)
        self.pull()
        return self.refused == refused

    @property
    def clocks(self) -> list[int]:
        """Number of pushes of each rank that were applied to this rank's slice."""
        return list(self._owner.clocks)

    @property
    def statistics(self) -> Statistics:
        """Costs of this rank's pushes and pulls so far; `communication_s` counts pulls only.

        The bytes sent include the weights that this rank has sent to other ranks.
        """
        return self._costs(self._worker.bytes_sent + self._owner.bytes_sent)

    # The end

    def finish(self) -> None:
        """End this rank's training; it then delays no other rank, but still serves its slice.

        Collective: no. Blocking: until the last push has arrived.
        """
        if self._finished:
            return
        self._await_push()
        self._finished = True
        self._pushed = self._messages.submit(
            Call("finish", f"at clock {self.clock}"),
            lambda net: self._worker.finish(net, self.clock))

    def close(self) -> None:
        """Finish, wait until all ranks have finished, and write the final weights into `params`.

        Raises:
            BufferMismatchError: A rank has left without `close`.

        Collective: yes. Blocking: yes, as long as other ranks train.
        """
        if self.closed:
            return
        self.finish()
        self._wait_for_all(Call("finish", "a ParameterServer"))
        self._await(self._serving)
        self._await_push()
        self._gather()
        self.closed = True
        self._comm.close()

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's weights and optimizer state after all pushes so far.

        Raises:
            ConfigError: With a staleness of 0, ranks have pushed different numbers of times.

        Collective: yes. Blocking: yes.
        """
        with self._settled():
            return self._store.whole()

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's slice of `state_dict`, for `Checkpoints.save(step, sharded=...)`.

        Raises:
            ConfigError: As for `state_dict`.

        Collective: yes. Blocking: yes.
        """
        with self._settled():
            return self._store.sliced()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, on any number of ranks; write its weights into `params`.

        All clocks restart at 0.

        Args:
            state_dict: Result of `state_dict`, or `Saved.sharded` of a checkpoint.

        Raises:
            ConfigError: The state belongs to another model or optimizer, or a rank has finished.

        Collective: yes. Blocking: yes.
        """
        with self._settled() as finished:
            if finished:
                raise ConfigError(f"rank {self._comm.rank}: load_state_dict() after "
                                  f"{ranks_text(finished)} finished; make another ParameterServer")
            self._store.load(state_dict)
            self._gather()
            self.clock = 0
            self._owner.restart()

    @contextmanager
    def _settled(self) -> Iterator[list[int]]:
        """Block all ranks until all pushes so far are applied; yield the finished ranks."""
        if self.closed:
            raise ClosedError(f"rank {self._comm.rank}: this ParameterServer is closed; ask for "
                              f"its state before")
        ranks = self._comm.allgather_object((self.clock, self._finished))
        clocks = [clock for clock, _ in ranks]
        if self.staleness == 0 and len({clock for clock, finished in ranks if not finished}) > 1:
            raise ConfigError(
                f"rank {self._comm.rank}: ranks have pushed {clocks} times: with staleness=0, "
                f"pushes of a clock are applied together; ask for the state after the same step")
        condition = Condition(lambda: self._owner.clocks == clocks, f"the pushes {clocks}")
        self._await(self._messages.submit(
            Call("settle", f"at clocks {clocks}"), lambda net: _until(condition)))
        yield [rank for rank, (_, finished) in enumerate(ranks) if finished]
        self._comm.barrier()

    # Details

    def _refuse_finished(self, method: str) -> None:
        if self._finished:
            raise ClosedError(f"rank {self._comm.rank}: {method} after finish(); this rank's "
                              f"training has ended")

    def _copy(self, gradients: Mapping[str, Any]) -> None:
        arrays = arrays_of(gradients, self._comm.rank, "gradient")
        wrong = sorted(arrays.keys() ^ self.grads.keys())
        if wrong:
            raise ConfigError(f"rank {self._comm.rank}: gradients and parameters differ by "
                              f"{', '.join(wrong)}; push one of each, zeros where there is none")
        for name, view in self.grads.items():
            x = arrays[name]
            if (x.shape, x.dtype) != (view.shape, view.dtype):
                raise ConfigError(
                    f"rank {self._comm.rank}: the gradient of {name!r} is {x.dtype} {x.shape}; "
                    f"expected {view.dtype} {view.shape}")
            if x is not view:
                view[...] = x

    def _write_params(self) -> None:
        self.params.update(self._model.arrays())
        for name, x in self.params.items():
            x[...] = self._weights.views[name]

    def _gather(self) -> None:
        """Write the weights of all owners into `params`; no rank may push meanwhile."""
        for owned, x in zip(self._store.weights, self._weights.slices[self._comm.rank]):
            x[...] = owned
        for flat, bounds in zip(self._weights.flats, self._weights.bounds):
            self._comm.run(Call("allgather", "weights"), operator.methodcaller(
                "allgather", flat, bounds=bounds))
        self._write_params()

    def _await_push(self) -> None:
        if self._pushed is not None:
            self._await(self._pushed)
            self._pushed = None

    def _await(self, handle: Handle[Any]) -> None:
        try:
            with self._waiting():
                handle.wait()
        except StallError as error:
            raise StallError("\n".join([*self._late_ranks(), str(error)])) from None

    def _late_ranks(self) -> list[str]:
        """Return lines that name the ranks for which this rank waits."""
        silent = sorted(self._worker.unanswered)
        behind = self._owner.behind(self.clock)
        return [f"rank {self._comm.rank} waits at clock {self.clock}", *(
            f"  rank {rank} is behind: it has pushed {self._owner.clocks[rank]} times, and "
            f"staleness={self.staleness} wants {self.clock - (self.staleness or 0)}"
            for rank in behind), *[f"  no weights from {ranks_text(silent)}"] * bool(silent)]


def _until(condition: Condition) -> Schedule[None]:
    yield (condition,)
