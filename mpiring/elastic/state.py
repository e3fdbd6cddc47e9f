"""Holds the state from which training continues and its last two commits in memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import Communicator, ConfigError, TransportError
from ..provisional import memory, world

# Types of immutable values, which need no copy.
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)


class State:
    """State from which training continues after deaths: all public attributes except `comm`.

        state = State(mpiring.init(), params=params, rng=generator.bit_generator.state)
        state.loss = 0.0

    An attribute is a number, a string, an array (NumPy, CuPy or PyTorch), or a dict, list or tuple
    of these. It may also be an object with `state_dict` and `load_state_dict`, such as a PyTorch
    module, optimizer or scheduler. If an object communicates, store its state instead, as in
    `state.outer = outer.state_dict()`.

    Args:
        comm: Communicator whose ranks train together; by default, all ranks.
        attributes: Initial attributes; others can be set later.

    Attributes:
        comm: The ranks that train; a new communicator after each death, or when ranks join.
        step: Number of steps, which `train` counts.

    Raises:
        ConfigError: `comm` is not a Communicator, or a name is reserved.
    """

    comm: Communicator
    step: int

    def __init__(self, comm: Communicator | None = None, **attributes: Any) -> None:
        comm = world.or_world(comm)
        for name in attributes:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"{name!r} cannot be an attribute's name here; choose another")
        self.comm, self.step = comm, 0
        # Set only within `run`, if ranks can survive.
        self._commits: Commits | None = None
        self._grow: Callable[[], None] | None = None
        vars(self).update(attributes)

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

    def commit(self) -> None:
        """Copy all attributes in memory, for a return if a rank dies later; let new ranks join.

        A commit costs a barrier and a copy. It does nothing if the job cannot survive deaths.
        Operations on the arrays must be complete.

        Raises:
            ConfigError: An attribute cannot be copied.

        Collective: yes. Blocking: yes.
        """
        if self._commits is not None:
            # Once all ranks have arrived, all have the last commit. The previous one can be reused.
            self.comm.barrier()
            self._commits.add(self._attributes)
            if self._grow is not None:
                self._grow()

    @property
    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items()
                if name != "comm" and not name.startswith("_")}

    @property
    def _resume_point(self) -> str:
        return f"step {self.step}"

    def _restore(self, commits: "Commits") -> None:
        """Return to the newest commit that all ranks have; new ranks receive it.

        Collective: yes. Blocking: yes.
        """
        committed = commits.at(commits.agreed(self.comm))
        for name, value in committed.items():
            if isinstance(value, _Saved) and value.owner is None:
                if name not in vars(self):
                    raise ConfigError(f"the state of this new rank {self.comm.rank} has no "
                                      f"attribute {name!r}; set it before elastic.run")
                value.owner = vars(self)[name]
        for name in self._attributes.keys() - committed.keys():
            delattr(self, name)
        for name, value in committed.items():
            vars(self)[name] = restore_value(value, vars(self).get(name))


class NewRanksJoin(BaseException):
    """Ends `train` at a commit. It is not an Exception, so that `train` does not catch it."""


class Commits:
    """The last two commits of a rank; while one is being written, the other is complete."""

    def __init__(self) -> None:
        self._commits: dict[int, dict[str, Any]] = {}
        self.count = 0

    def add(self, attributes: dict[str, Any]) -> None:
        """Commit a copy of the attributes, in the memory of the commit before the last one."""
        earlier = self._commits.pop(self.count - 2, {})
        self._commits[self.count] = {
            name: _commit_value(name, value, earlier.get(name))
            for name, value in attributes.items()}
        self.count += 1

    def agreed(self, comm: Communicator) -> int:
        """Return the number of the newest commit that all ranks have.

        New ranks, which have no commits, receive this commit from the first rank that has it.

        Collective: yes. Blocking: yes.
        """
        held = comm.allgather_object({*self._commits})
        common = set.intersection(*filter(None, held)) if any(held) else set()
        if not common:
            raise TransportError(f"rank {comm.rank}: no commit is on all ranks; this one has "
                                 f"{sorted(self._commits)}")
        number = max(common)
        if not all(held):
            self._share(comm, number, is_source=comm.rank == [*map(bool, held)].index(True))
        return number

    def _share(self, comm: Communicator, number: int, *, is_source: bool) -> None:
        part = comm.split(0 if is_source or not self._commits else None, key=int(not is_source))
        if part is not None:
            with part:
                received = part.broadcast_object(
                    {name: replace(value, owner=None) if isinstance(value, _Saved) else value
                     for name, value in self._commits[number].items()} if is_source else {})
            self._commits.setdefault(number, received)

    def at(self, number: int) -> dict[str, Any]:
        """Return the attributes of a commit, and drop later commits."""
        self._commits.pop(number + 1, None)
        self.count = number + 1
        return self._commits[number]


@dataclass
class _Saved:
    """An object, and a copy of its state."""

    owner: Any
    state: Any


def _commit_value(name: str, value: Any, old: Any) -> Any:
    try:
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            _refuse_communicating(value)
            earlier = old.state if isinstance(old, _Saved) else None
            return _Saved(value, copy_value(value.state_dict(), earlier))
        return copy_value(value, old)
    except ConfigError as error:
        raise ConfigError(f"attribute {name!r} of the state: {error}") from error


def _refuse_communicating(value: Any) -> None:
    """Raise ConfigError if an object has a communicator, which becomes invalid after a death."""
    if any(isinstance(held, Communicator) for held in getattr(value, "__dict__", {}).values()):
        kind = type(value).__name__
        raise ConfigError(f"a {kind} communicates, with ranks of which one may die; keep what its "
                          f"state_dict() returns instead, and make another {kind} in train()")


def restore_value(committed: Any, present: Any) -> Any:
    """Return a committed attribute, in the memory of its current value if possible."""
    if not isinstance(committed, _Saved):
        return copy_value(committed, present)
    # A copy, because an optimizer writes into the state that it loads.
    committed.owner.load_state_dict(copy_value(committed.state))
    if hasattr(committed.owner, "zero_grad"):
        # These gradients belong to an incomplete step.
        committed.owner.zero_grad()
    return committed.owner


def copy_value(value: Any, earlier: Any = None) -> Any:
    """Return a copy of an array, a number, a string, or a pytree of these.

    If `earlier`, which is a copy or the original, has the same form, it is overwritten and
    returned. The reason is that a copy to new memory takes three times as long.

    Raises:
        ConfigError: The value contains another object.
    """
    old = dict(memory.leaves(earlier))
    paths = iter([path for path, _ in memory.leaves(value)])
    return memory.mapped(
        value, lambda leaf: _copy_leaf(leaf, old.get(next(paths, ()))), into=earlier)


def _copy_leaf(value: Any, earlier: Any) -> Any:
    if isinstance(value, _VALUES):
        return value
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.dtype == object:
        raise ConfigError(
            f"a {type(value).__name__} cannot be copied; expected numbers, texts, arrays, dicts, "
            f"lists and tuples of them, or, by itself, an object with state_dict and "
            f"load_state_dict")
    # Only the data of a tensor that requires gradients may be overwritten.
    plain, target = (x.detach() if hasattr(x, "detach") else x for x in (value, earlier))
    writeable = getattr(getattr(target, "flags", None), "writeable", True)
    if type(target) is type(plain) and writeable and all(
            getattr(target, name, None) == getattr(plain, name, None)
            for name in ("shape", "dtype", "device")):
        target[...] = plain
        return earlier
    return plain.clone() if hasattr(plain, "clone") else plain.copy()
