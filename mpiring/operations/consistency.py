"""Checks that all ranks pass the same values, and raises one rank's error on every rank."""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, MpiringError
from ..memory.digest import bytes_of, digest
from ..memory.pytrees import leaves, path_text
from ..sharding.sliced import Sliced
from ..memory.tensors import array_of, is_tensor


class Ranks(Protocol):
    """The part of a Communicator that compares objects."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    def allgather_object(self, obj: Any, /, *, label: str) -> list[Any]:
        """Return the objects of all ranks."""

    def broadcast_object(self, obj: Any, /, *, root: int) -> Any:
        """Return the object of rank `root`."""


@contextmanager
def same_on_all(comm: Ranks, call: str, *, error: type[MpiringError] = ConfigError,
                remedy: str = "pass the same on every rank") -> Iterator[dict[str, Any]]:
    """Check that the block writes equal values into a dict on all ranks; raise errors on all ranks.

        with same_on_all(comm, "LocalSGD") as same:
            same["every"] = self.every = whole_number("every", every, 1)

    If the block raises an exception on one rank, all other ranks raise an error with its text. No
    rank therefore changes anything before all ranks have passed the block.

    Args:
        call: Name of the call; a rank that makes a different call also causes an error.
        error: Type of the error to raise if values differ.
        remedy: End of its message.

    Yields:
        A dict for values by name: numbers, strings, arrays, tensors, and mappings and lists of
        these. `Sliced` tensors are compared by shape and dtype, other objects by type.

    Raises:
        MpiringError: The error of the lowest rank that has failed; or `error`, which names the
            first difference, both ranks and both values.

    Collective: yes, except for the block. Blocking: yes.
    """
    values: dict[str, Any] = {}
    failure: Exception | None = None
    flat: dict[str, Any] = {}
    try:
        yield values
        flat = {str(path[0]) + path_text(path[1:]): _on_host(leaf) for path, leaf in leaves(values)}
    except Exception as exc:
        failure = exc
    try:
        _compare(comm, call, error, failure, flat, remedy)
    finally:
        # The traceback refers to this frame. A reference cycle would keep the user's objects alive.
        failure = None


def _compare(comm: Ranks, call: str, error: type[MpiringError], failure: Exception | None,
             values: Mapping[str, Any], remedy: str) -> None:
    texts = {path: text_of(value) for path, value in values.items()}
    number = digest(f"{path}={text}\n".encode() for path, text in texts.items())
    answers = comm.allgather_object((_sendable(failure, error), number), label=call)
    try:
        if failure is not None and not isinstance(failure, MpiringError):
            raise failure
        # A rank that has failed raises its own failure; other ranks raise the lowest rank's.
        for rank, (sent, _) in sorted(enumerate(answers), key=lambda item: item[0] != comm.rank):
            if sent is not None:
                kind, text = sent
                named = text if text.startswith(f"rank {rank}:") else f"rank {rank}: {text}"
                raise kind(named) from failure
    finally:
        failure = None
    if len({number for _, number in answers}) == 1:
        return
    # From here on, the call fails, and time does not matter.
    expected = comm.broadcast_object(texts, root=0)
    first = next((path for path in {**expected, **texts}
                  if texts.get(path) != expected.get(path)), None)
    paths = comm.allgather_object(first, label=f"{call}, its differences")
    rank, path = next((rank, path) for rank, path in enumerate(paths) if path is not None)
    on_rank_0 = comm.broadcast_object(values.get(path) if path in texts and isinstance(
        values[path], np.ndarray) else None, root=0)
    text = _difference(path, values.get(path), on_rank_0, texts, expected)
    text = comm.broadcast_object(f"rank {rank}: {call} has {text}; {remedy}", root=rank)
    raise error(text)


def _difference(path: str, value: Any, on_rank_0: Any, texts: Mapping[str, str],
                expected: Mapping[str, str]) -> str:
    """Return a value on this rank and on rank 0; for arrays, the first different elements."""
    if isinstance(value, np.ndarray) and isinstance(on_rank_0, np.ndarray) and (
            value.size and (value.shape, value.dtype) == (on_rank_0.shape, on_rank_0.dtype)):
        bits, others = (bytes_of(x).reshape(value.size, -1) for x in (value, on_rank_0))
        index = int((bits != others).any(1).argmax())
        position = ", ".join(map(str, np.unravel_index(index, value.shape)))
        return (f"{path}[{position}]={value.reshape(-1)[index]}, but on rank 0 it is "
                f"{on_rank_0.reshape(-1)[index]}")
    return (f"{path}={texts.get(path, 'nothing')}, but on rank 0 it is "
            f"{expected.get(path, 'nothing')}")


def _sendable(failure: Exception | None, error: type[MpiringError]) -> Any:
    if failure is None:
        return None
    if isinstance(failure, MpiringError):
        return type(failure), str(failure)
    return error, f"{type(failure).__name__}: {failure}"


def _on_host(x: Any) -> Any:
    """Return tensors and GPU arrays as NumPy arrays, and scalars as numbers."""
    if is_tensor(x):
        dense = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        try:
            x = array_of(dense).reshape(dense.shape)
        except MpiringError:
            # NumPy lacks small floating dtypes, but float32 can hold all their values.
            x = dense.float().numpy()
    elif hasattr(x, "__cuda_array_interface__") and hasattr(x, "get"):
        x = x.get()
    return x.item() if isinstance(x, np.generic | np.ndarray) and not x.ndim else x


def text_of(x: Any) -> str:
    """Return a string for a value; strings are equal on two ranks if the values are equal.

    Types of numbers do not matter; arrays are represented by shape, dtype and a digest.
    """
    if isinstance(x, Sliced):
        return f"{x.dtype} {x.shape} in slices"
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {x.shape} {digest([bytes_of(x)]):016x}"
    if isinstance(x, float) and x.is_integer():
        return repr(int(x))
    if isinstance(x, bool | int | float | complex | str | bytes | None):
        return repr(x)
    if isinstance(x, Set):
        return f"{{{', '.join(sorted(map(text_of, x)))}}}"
    return f"a {type(x).__qualname__}"
