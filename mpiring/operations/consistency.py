"""Checks that all ranks pass the same values, and raises the error of one rank on every rank."""

import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, MpiringError
from ..memory.digest import bytes_of, digest
from ..memory.nests import leaves
from ..memory.sliced import Sliced
from ..memory.tensors import is_tensor


class Ranks(Protocol):
    """The part of a Communicator that compares objects."""

    @property
    def rank(self) -> int:
        """Of this process."""

    def allgather_object(self, obj: Any, /, *, label: str) -> list[Any]:
        """Return the objects of all ranks."""

    def broadcast_object(self, obj: Any, /, *, root: int) -> Any:
        """Return the object of rank `root`."""


@contextmanager
def same_on_all(comm: Ranks, call: str, *, error: type[MpiringError] = ConfigError,
                remedy: str = "pass the same on every rank") -> Iterator[dict[str, Any]]:
    """Compare across ranks what the block writes into a dict, and raise errors on all ranks.

        with same_on_all(comm, "LocalSGD") as same:
            same["every"] = self.every = whole_number("every", every, 1)

    An exception in the block of one rank is raised on that rank, and ends the call on all others
    with its text. So no rank changes anything before all ranks have passed the block.

    Args:
        comm: The ranks.
        call: What they have called; ranks that have called something else are refused, too.
        error: Raised if values differ.
        remedy: The end of its message.

    Yields:
        A dict for values by name: numbers, strings, arrays, tensors, and mappings and lists of
        them. Of `Sliced` tensors only shape and dtype are compared, of other objects the type.

    Raises:
        MpiringError: The error of the lowest rank that has failed; or `error`, which names the
            first difference, both ranks and both values.

    Collective: yes, but not in the block. Blocking: yes.
    """
    values: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        yield values
        texts = {_path_text(path): text_of(leaf) for path, leaf in leaves(values)}
    except Exception as exc:
        failure, texts = exc, {}
    _compare(comm, call, error, failure, texts, remedy)


def _compare(comm: Ranks, call: str, error: type[MpiringError], failure: Exception | None,
             texts: Mapping[str, str], remedy: str) -> None:
    number = digest(f"{path}={text}\n".encode() for path, text in texts.items())
    answers = comm.allgather_object((_sendable(failure, error), number), label=call)
    if failure is not None:
        raise failure
    for rank, (sent, _) in enumerate(answers):
        if sent is not None:
            kind, text = sent
            raise kind(text if text.startswith(f"rank {rank}:") else f"rank {rank}: {text}")
    if len({number for _, number in answers}) == 1:
        return
    expected = comm.broadcast_object(texts, root=0)
    difference = next(
        (f"rank {comm.rank}: {call} has {path}={texts.get(path, 'nothing')}, but on rank 0 it is "
         f"{expected.get(path, 'nothing')}; {remedy}"
         for path in {**expected, **texts} if texts.get(path) != expected.get(path)), None)
    for text in comm.allgather_object(difference, label=f"{call}, its differences"):
        if text is not None:
            raise error(text)


def _sendable(failure: Exception | None, error: type[MpiringError]) -> Any:
    if failure is None:
        return None
    if isinstance(failure, MpiringError):
        return type(failure), str(failure)
    return error, f"{type(failure).__name__}: {failure}"


def _path_text(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def text_of(x: Any) -> str:
    """Return a value as a text that is equal on two ranks if the values are.

    Numbers are equal whatever their types are; arrays and tensors are told by shape, dtype and a
    digest of their bits.
    """
    if is_tensor(x):
        if not x.dim():
            return text_of(x.item())
        dense = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        bits = dense.view(-1).view(sys.modules["torch"].uint8).numpy()
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {digest([bits]):016x}"
    if isinstance(x, Sliced):
        return f"{x.dtype} {x.shape} in slices"
    if hasattr(x, "__cuda_array_interface__") and hasattr(x, "get"):
        x = x.get()
    if isinstance(x, np.generic) or isinstance(x, np.ndarray) and not x.ndim:
        x = x.item()
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {x.shape} {digest([bytes_of(x)]):016x}"
    if isinstance(x, float) and x.is_integer():
        return repr(int(x))
    if isinstance(x, bool | int | float | complex | str | bytes | None):
        return repr(x)
    if isinstance(x, Set):
        return f"{{{', '.join(sorted(map(text_of, x)))}}}"
    return f"a {type(x).__qualname__}"
