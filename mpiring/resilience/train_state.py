"""Saves and restores the complete state of a training run; a resumed job has identical bits."""

import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..communicator import Communicator
from ..errors import CheckpointError, ConfigError, MpiringError
from ..gpu.arrays import is_on_gpu
from ..memory.pytrees import at, leaves, path_text
from ..operations.consistency import same_on_all
from ..reducers.compressor import Compressor
from ..sharding.sliced import whole
from ..world import or_world
from .checkpoint import NEW_SEEDS, Checkpoints, random_state, set_random_state
from .reader import Saved
from .tree import outline

_log = logging.getLogger("mpiring")

_LOADABLE = ("pass an object with state_dict() and load_state_dict(), a random generator, an "
             "array, or a dict or list of arrays and numbers")
# A rank's own state: global random numbers, own parts, and each rank's addition to shared parts.
_NO_OWN: Mapping[str, Any] = {"random": {}, "parts": {}, "of parts": {}}
# Key, in the replicated state, of the random numbers that were equal on all ranks: their global
# generators, and generators that are parts.
_COMMON = "equal random numbers"


@dataclass(frozen=True)
class Framework:
    """The functions that save and load the arrays and random numbers of a framework."""

    checkpoints: type[Checkpoints]
    random_state: Callable[[], dict[str, Any]]
    set_random_state: Callable[[Mapping[str, Any]], None]
    whole: Callable[[Any], Any]


class TrainState:
    """The complete state of a training run: everything that a job needs to resume.

        state = TrainState(comm, model=model, optimizer=optimizer, sampler=sampler)
        step = state.restore("run1")                # 0 if the folder holds no checkpoint
        while step < 1000:
            ...
            step += 1
            if step % 100 == 0:
                state.save("run1", step)            # writes in the background
        state.close()

    A job with the same number of ranks resumes with identical bits. The state of the global random
    generators of Python, NumPy and (in `mpiring.torch`) PyTorch is always saved. A `DataParallel`
    adds the order of its gradients and the state of its Reducers.

    A part is an object with `state_dict` and `load_state_dict`, a random generator, an array, or a
    dict or list of arrays and numbers, which `restore` overwrites in place. How a part is saved
    follows from its methods:

    - Each rank writes its slices of a part that has `sharded_state_dict`, such as a `Sharded`
      optimizer, an optimizer of `mpiring.optim`, `DiLoCo`, or a parameter server. Any number of
      ranks can restore it.
    - Each rank writes its own state of random generators, Reducers, and the parts in `own`. With
      another number of ranks, `restore` leaves these parts unchanged, except for generators that
      were equal on all ranks. Rank 0 logs a warning that names what was left out, and the effect.
    - Rank 0 writes all other parts, which must be equal on all ranks. Any number of ranks can
      restore them.

    Args:
        comm: Communicator whose ranks train together; by default, all ranks.
        own: Parts, by name, that have a different state on each rank. With `LocalSGD` or `DiLoCo`,
            these are the model and its optimizer.
        keep: Number of checkpoints to keep in a folder, at least 1; older checkpoints are deleted.
        seed: Seed of the training run; a checkpoint with another seed is refused.
        parts: Parts by names of your choice; the same names in the same order on every rank.

    Attributes:
        step: Step of the last `restore` or `save`; 0 before the first.

    Raises:
        ConfigError: A part has no state, or the ranks' parts differ; on all ranks.

    Collective: yes. Blocking: yes.
    """

    framework: ClassVar[Framework] = Framework(Checkpoints, random_state, set_random_state, whole)

    def __init__(self, comm: Communicator | None = None, *, own: Mapping[str, Any] | None = None,
                 keep: int = 3, seed: int | None = None, **parts: Any) -> None:
        comm = or_world(comm)
        self._comm, self._keep, self._seed, self.step = comm, keep, seed, 0
        self._checkpoints: Checkpoints | None = None
        self._folder: str | os.PathLike[str] | None = None
        with same_on_all(comm, "TrainState", remedy="pass the same parts on every rank") as same:
            if own is not None and not isinstance(own, Mapping):
                raise ConfigError(f"own is a {type(own).__name__}; pass a dict of parts by name")
            duplicates = sorted(parts.keys() & (own or {}).keys())
            if duplicates:
                raise ConfigError(f"{', '.join(duplicates)}: given by keyword and in own; each "
                                  f"part is either equal on all ranks or each rank's own")
            if not own:
                _refuse_local_training(parts)
            own_parts = {name: part for name, part in parts.items()
                         if isinstance(part, Compressor) or _is_random(part)}
            self._own = {name: _with_state(name, part)
                         for name, part in {**own_parts, **(own or {})}.items()}
            self._shared = {name: _with_state(name, part) for name, part in parts.items()
                            if name not in self._own}
            same["parts"], same["own"] = list(self._shared), list(self._own)
        self._counting = [name for name, part in {**self._shared, **self._own}.items()
                          if "seen" in inspect.signature(part.state_dict).parameters]

    @property
    def save_s(self) -> float:
        """Seconds that the last `save` took until it was complete; for `Stopping`."""
        return 0.0 if self._checkpoints is None else self._checkpoints.save_s

    def restore(self, folder: str | os.PathLike[str] | None) -> int:
        """Load the newest complete checkpoint in a folder into the parts; return its step.

        Args:
            folder: Folder on a file system that all ranks share; created if it is missing. None
                restores nothing.

        Returns:
            The step that was saved; 0 if the folder holds no checkpoint.

        Raises:
            CheckpointError: No checkpoint in the folder can be used, another job writes to the
                folder, the checkpoint has other parts, or a part refuses its state. Raised on all
                ranks.

        Collective: yes. Blocking: yes.
        """
        saved, left_out = self._open(folder)._newest()
        if saved is None:
            return 0
        with same_on_all(self._comm, "TrainState.restore", error=CheckpointError):
            self._refuse_other_parts(saved)
        own = saved.own or self._common_of(saved)
        if left_out and self._comm.rank == 0:
            _log.warning("%s. Not restored: %s", left_out, "; ".join(self._left_out(own)))
        # The order of gradients comes first: it determines the buckets whose slices optimizers
        # load.
        for name, state in own["of parts"].items():
            if state and hasattr(self._shared[name], "load_own_state_dict"):
                self._load(saved, name, self._shared[name].load_own_state_dict, state)
        for name, part in self._shared.items():
            state = saved.replicated.get(name)
            if name not in saved.replicated:
                state = saved.sharded[name]
                if not hasattr(part, "sharded_state_dict"):
                    state = self.framework.whole(state)
            self._load(saved, name, part.load_state_dict, state)
        # With DiLoCo, a rank's own weights replace the global ones.
        for name, state in own["parts"].items():
            self._load(saved, name, self._own[name].load_state_dict, state)
        if own["random"]:
            # With another number of ranks, only the generators that were equal on all ranks.
            present = {} if saved.own else self.framework.random_state()
            self._load(saved, "random", self.framework.set_random_state,
                       {**present, **own["random"]})
        self.step = saved.step
        return saved.step

    def _refuse_other_parts(self, saved: Saved) -> None:
        """Raise CheckpointError if a checkpoint has other parts than this state."""
        own = _NO_OWN if saved.own is None else saved.own
        common = (saved.replicated.get(_COMMON, _NO_OWN) if isinstance(saved.replicated, dict)
                  else None)
        if not all(isinstance(state, dict) and state.keys() == _NO_OWN.keys()
                   for state in (own, common)):
            raise CheckpointError(f"checkpoint {saved.name} in {self._folder} was not saved by a "
                                  f"TrainState; read it with Checkpoints")
        names = [*(saved.replicated.keys() - {_COMMON}), *(saved.sharded or {}), *own["parts"]]
        expected = [*self._shared, *([] if saved.own is None else self._own)]
        missing = [name for name in expected if name not in names]
        unexpected = [str(name) for name in names if name not in expected]
        problems = [f"lacks the state of {', '.join(missing)}"] if missing else []
        if unexpected:
            problems.append(f"has the state of {', '.join(unexpected)} besides")
        if problems:
            raise CheckpointError(
                f"checkpoint {saved.name} in {self._folder} {' and '.join(problems)}: give "
                f"TrainState the parts that were saved, or read the checkpoint with Checkpoints")

    def _load(self, saved: Saved, name: str, load: Callable[[Any], object], state: Any) -> None:
        """Load the state of a part; raise the error of one rank on all ranks."""
        with same_on_all(self._comm, f"TrainState.restore of {name}", error=CheckpointError):
            try:
                load(state)
            except MpiringError:
                raise
            except Exception as exc:
                raise CheckpointError(
                    f"rank {self._comm.rank}: {name} cannot take its state from checkpoint "
                    f"{saved.name} in {self._folder}: {type(exc).__name__}: {exc}") from exc

    def save(self, folder: str | os.PathLike[str] | None, step: int, *,
             seen: int | None = None) -> None:
        """Copy the state and start to write it in the background.

        Args:
            folder: Folder on a file system that all ranks share. None saves nothing.
            step: Number of complete steps.
            seen: Number of samples (`DistributedSampler`) or batches (`TokenBatches`) that this
                rank has trained on since its iteration began; needed if `prefetch` or a DataLoader
                with workers draws ahead of training.

        Raises:
            ConfigError: A part's state cannot be saved (on all ranks), or `seen` is given, but no
                part counts samples or batches.
            CheckpointError: The previous checkpoint could not be written; on all ranks.

        Collective: yes. Blocking: until the state is copied.
        """
        if seen is not None and not self._counting:
            raise ConfigError(f"rank {self._comm.rank}: seen={seen!r}, but no part has a position "
                              f"that it could set; pass a DistributedSampler or TokenBatches")
        checkpoints = self._open(folder)
        if folder is None:
            return
        replicated: dict[str, Any] = {}
        sharded: dict[str, Any] = {}
        for name, part in self._shared.items():
            if hasattr(part, "sharded_state_dict"):
                sharded[name] = part.sharded_state_dict()
            else:
                replicated[name] = self._state_of(name, part, seen)
        own = {"random": self.framework.random_state(),
               "parts": {name: self._state_of(name, part, seen)
                         for name, part in self._own.items()},
               "of parts": {name: part.own_state_dict() for name, part in self._shared.items()
                            if hasattr(part, "own_state_dict")}}
        replicated[_COMMON] = self._common(own)
        checkpoints.save(step, replicated=replicated, own=own, sharded=sharded or None)
        self.step = step

    def _common(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the random numbers, of a rank's own state, that all ranks share; collective."""
        states = {"random": own["random"], "parts": {
            name: state for name, state in own["parts"].items()
            if isinstance(self._own[name], _Random)}}
        digests = {(kind, name): self._digest(state) for kind, named in states.items()
                   for name, state in named.items()}
        ranks = self._comm.allgather_object(digests, label="TrainState: random numbers")
        return {**_NO_OWN, **{kind: {
            name: state for name, state in named.items()
            if all(digests[kind, name] and digests[kind, name] == other.get((kind, name))
                   for other in ranks)} for kind, named in states.items()}}

    def _digest(self, state: Any) -> str:
        """Return a hash of a state; "" if it cannot be saved, which `save` reports."""
        try:
            tree = outline(state, self.framework.checkpoints.kinds, "random")
        except ConfigError:
            return ""
        hashed = hashlib.sha256(tree.text.encode())
        for leaf in tree.leaves.values():
            elements = np.empty(leaf.nbytes, np.uint8)
            leaf.kind.copy(leaf.value, elements)
            hashed.update(elements.data)
        return hashed.hexdigest()

    def _common_of(self, saved: Saved) -> Mapping[str, Any]:
        """Return the random numbers that another number of ranks can restore; collective.

        A single rank has only equal random numbers. They are those of all ranks if the program has
        given all ranks of this job the same.
        """
        common: Mapping[str, Any] = saved.replicated.get(_COMMON, _NO_OWN)
        present = {"random": self.framework.random_state(),
                   "parts": {name: part.state_dict() for name, part in self._own.items()
                             if isinstance(part, _Random)}}
        known = {**_NO_OWN, **present} if saved.size > 1 else self._common(present)
        return {kind: {name: state for name, state in named.items() if name in known[kind]}
                for kind, named in common.items()}

    def _left_out(self, own: Mapping[str, Any]) -> Iterator[str]:
        """Yield what `restore` leaves out with another number of ranks, and the effect."""
        generators = [name for name, part in self._own.items() if isinstance(part, _Random)]
        drawn = [*(name for name in self.framework.random_state() if name not in own["random"]),
                 *(name for name in generators if name not in own["parts"])]
        others = [name for name in self._own if name not in generators]
        adding = [name for name, part in self._shared.items() if hasattr(part, "own_state_dict")]
        if drawn:
            yield f"random numbers ({', '.join(drawn)}). {NEW_SEEDS}"
        if others:
            yield f"{', '.join(others)}, which keep their present state on each rank"
        if adding:
            yield (f"each rank's addition to {', '.join(adding)}: residuals of Reducers start at "
                   f"zero")

    def _state_of(self, name: str, part: Any, seen: int | None) -> Any:
        if seen is not None and name in self._counting:
            return part.state_dict(seen=seen)
        return part.state_dict()

    def _open(self, folder: str | os.PathLike[str] | None) -> Checkpoints:
        """Return the checkpoints of a folder. Collective, blocking."""
        if self._checkpoints is None or folder != self._folder:
            self.close()
            self._checkpoints = self.framework.checkpoints(
                folder, self._comm, keep=self._keep, seed=self._seed)
            self._folder = folder
        return self._checkpoints

    def close(self) -> None:
        """Wait until the last checkpoint is written, and let other jobs use the folder.

        Raises:
            CheckpointError: The checkpoint could not be written; on all ranks.

        Collective: yes. Blocking: yes.
        """
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    def __enter__(self) -> "TrainState":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.__exit__(kind, error, trace)


def _refuse_local_training(parts: Mapping[str, Any]) -> None:
    """Raise ConfigError if a part trains a different model on each rank."""
    for name, part in parts.items():
        if hasattr(part, "global_parameters"):
            raise ConfigError(
                f"{name} is a {type(part).__name__}, which leaves each rank its own weights: pass "
                f"own={{'model': model, 'optimizer': optimizer}}")


def _is_random(part: Any) -> bool:
    return isinstance(part, np.random.Generator) or hasattr(part, "set_state")


def _with_state(name: str, part: Any) -> Any:
    """Return a part with state_dict and load_state_dict, or raise ConfigError."""
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part
    if _is_random(part):
        return _Random(part)
    if isinstance(part, np.ndarray | dict | list) or is_on_gpu(part):
        return _Arrays(name, part)
    missing = " and ".join(f"{method}()" for method in ("state_dict", "load_state_dict")
                           if not hasattr(part, method))
    raise ConfigError(f"{name} is a {type(part).__name__} and has no {missing}; {_LOADABLE}")


class _Random:
    """A random generator of NumPy or PyTorch."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        if isinstance(self._generator, np.random.Generator):
            return self._generator.bit_generator.state
        return self._generator.get_state()

    def load_state_dict(self, state: Any) -> None:
        if isinstance(self._generator, np.random.Generator):
            self._generator.bit_generator.state = state
        else:
            self._generator.set_state(state)


class _Arrays:
    """An array, or a dict or list of arrays and numbers, that `restore` overwrites in place."""

    def __init__(self, name: str, tree: Any) -> None:
        self._name, self._tree = name, tree
        for path, leaf in leaves(tree):
            if not (_is_array(leaf) or isinstance(leaf, np.generic | float | int | str | None)):
                raise ConfigError(f"{self._text(path)} is a {type(leaf).__name__}; {_LOADABLE}")

    def _text(self, path: tuple[Any, ...]) -> str:
        return self._name + path_text(path)

    def state_dict(self) -> Any:
        return self._tree

    def load_state_dict(self, state: Any) -> None:
        present, saved = dict(leaves(self._tree)), dict(leaves(state))
        for path in {**present, **saved}:
            expected, given = _description(present, path), _description(saved, path)
            if given != expected:
                raise ConfigError(f"{self._text(path)} is {given} in the state, but {expected} "
                                  f"here; make what was saved")
        for path, value in saved.items():
            if _is_array(present[path]):
                present[path][...] = value
            else:
                at(self._tree, path[:-1])[path[-1]] = value


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "__setitem__")


def _description(leaf_of: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...]) -> str:
    """Return the dtype and shape of an array as a string; "no array" for other leaves."""
    if path not in leaf_of:
        return "missing"
    leaf = leaf_of[path]
    return f"{leaf.dtype} {tuple(leaf.shape)}" if _is_array(leaf) else "no array"
