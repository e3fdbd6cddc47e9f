"""Holds the state from which training continues, and its last two commits, in memory."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..communicator import Communicator, or_world
from ..errors import ConfigError, TransportError

# Immutable, so that no copy is needed.
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)


class State:
    """State from which training continues after deaths: every public attribute but `comm`.

        state = State(mpiring.init(), params=params, rng=generator.bit_generator.state)
        state.loss = 0.0

    An attribute is a number, a text, an array (of NumPy, CuPy or PyTorch), a dict, list or
    tuple of those, or an object with `state_dict` and `load_state_dict`, such as a PyTorch
    module, optimizer or scheduler; not one that communicates, of which the state is kept instead:
    `state.outer = outer.state_dict()`.

    Args:
        comm: The ranks.
        attributes: To begin with; others can be set later.

    Attributes:
        comm: The surviving ranks; another communicator after each death.
        step: For `train` to count its steps.

    Raises:
        ConfigError: `comm` is not a Communicator, or a name is taken.
    """

    comm: Communicator
    step: int

    def __init__(self, comm: Communicator | None = None, **attributes: Any) -> None:
        comm = or_world(comm)
        for name in attributes:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(f"{name!r} cannot be an attribute's name here; choose another")
        self.comm, self.step = comm, 0
        # Only within `run`, and where ranks can survive.
        self._commits: Commits | None = None
        vars(self).update(attributes)

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

    def commit(self) -> None:
        """Copy all attributes, in memory, to return to them if a rank dies later.

        Costs a barrier and a copy; nothing where MPI cannot continue without a dead rank.
        Operations on the arrays must be complete.

        Raises:
            ConfigError: An attribute cannot be copied.

        Collective: yes. Blocking: yes.
        """
        if self._commits is not None:
            # Once all ranks are here, all have the last commit: the one before it may go.
            self.comm.barrier()
            self._commits.add(self._attributes)

    @property
    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items()
                if name != "comm" and not name.startswith("_")}

    @property
    def _place(self) -> str:
        return f"step {self.step}"

    def _go_back(self, commits: "Commits") -> None:
        """Return to the newest commit that all ranks have.

        Collective: yes. Blocking: yes.
        """
        committed = commits.at(commits.agreed(self.comm))
        for name in self._attributes.keys() - committed.keys():
            delattr(self, name)
        for name, value in committed.items():
            vars(self)[name] = restored(value, vars(self).get(name))


class Commits:
    """The last two commits of a rank: while one is being written, the other is whole."""

    def __init__(self) -> None:
        self._commits: dict[int, dict[str, Any]] = {}
        self._next = 0

    def add(self, attributes: dict[str, Any]) -> None:
        """Commit a copy of the attributes, in the memory of the commit before the last."""
        memory = self._commits.pop(self._next - 2, {})
        self._commits[self._next] = {
            name: _committed(name, value, memory.get(name)) for name, value in attributes.items()}
        self._next += 1

    def agreed(self, comm: Communicator) -> int:
        """Return the number of the newest commit that all ranks have.

        Collective: yes. Blocking: yes.
        """
        common = set.intersection(*comm.allgather_object({*self._commits}))
        if not common:
            raise TransportError(f"rank {comm.rank}: no commit is on all ranks; this one has "
                                 f"{sorted(self._commits)}")
        return max(common)

    def at(self, number: int) -> dict[str, Any]:
        """Return the attributes of a commit, and forget later ones."""
        self._commits.pop(number + 1, None)
        self._next = number + 1
        return self._commits[number]


@dataclass
class _Saved:
    """An object, and a copy of its state."""

    owner: Any
    state: Any


def _committed(name: str, value: Any, old: Any) -> Any:
    try:
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            _refuse_communicating(value)
            memory = old.state if isinstance(old, _Saved) else None
            return _Saved(value, copied(value.state_dict(), memory))
        return copied(value, old)
    except ConfigError as error:
        raise ConfigError(f"attribute {name!r} of the state: {error}") from error


def _refuse_communicating(value: Any) -> None:
    """Raise ConfigError where an object could not be restored without a rank that has died."""
    if any(isinstance(held, Communicator) for held in getattr(value, "__dict__", {}).values()):
        whose = type(value).__name__
        raise ConfigError(f"a {whose} communicates, with ranks of which one may die; keep what its "
                          f"state_dict() returns instead, and make another {whose} in train()")


def restored(committed: Any, present: Any) -> Any:
    """Return an attribute as it was committed, in the memory of its present value if possible."""
    if not isinstance(committed, _Saved):
        return copied(committed, present)
    # A copy: an optimizer writes into what it is given.
    committed.owner.load_state_dict(copied(committed.state))
    if hasattr(committed.owner, "zero_grad"):
        # Gradients of a step that came to nothing.
        committed.owner.zero_grad()
    return committed.owner


def copied(value: Any, memory: Any = None) -> Any:
    """Return a copy of an array, a number or text, or a nest of dicts, lists and tuples of these.

    Args:
        memory: An earlier copy, or the original: where it has the same form, it is overwritten
            and returned. Fresh memory takes three times as long.

    Raises:
        ConfigError: It contains something else.
    """
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, dict):
        target = memory if type(memory) is type(value) else copy.copy(value)
        items = {key: copied(item, target.get(key) if target is memory else None)
                 for key, item in value.items()}
        target.clear()
        target.update(items)
        return target
    if isinstance(value, list | tuple):
        alike = type(memory) is type(value) and len(memory) == len(value)
        parts = [copied(item, memory[index] if alike else None)
                 for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if not alike:
            return parts
        memory[:] = parts
        return memory
    return _copied_array(value, memory)


def _copied_array(value: Any, memory: Any) -> Any:
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.dtype == object:
        raise ConfigError(
            f"a {type(value).__name__} cannot be copied; expected numbers, texts, arrays, dicts, "
            f"lists and tuples of them, or, by itself, an object with state_dict and "
            f"load_state_dict")
    # A tensor that requires gradients must not be written to; its data may be.
    plain, target = (x.detach() if hasattr(x, "detach") else x for x in (value, memory))
    if type(target) is type(plain) and _form(target) == _form(plain) and _is_writeable(target):
        target[...] = plain
        return memory
    return plain.clone() if hasattr(plain, "clone") else plain.copy()


def _form(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, getattr(array, "device", None)


def _is_writeable(array: Any) -> bool:
    return bool(getattr(getattr(array, "flags", None), "writeable", True))
