"""Makes collective calls in which one rank differs from the others, and returns the errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

import mpiring

# The odd rank skips the call and continues.
SKIPPED = object()
STALL_TIMEOUT_S = 30


@dataclass
class Row:
    """A collective call with arguments.

    Attributes:
        name: Name of the call, for the test's name.
        call: Function that makes the call, given the result of `make` and keyword arguments.
        usual: Arguments of all ranks but one.
        odd: Arguments of the last rank that differ, by the kind of difference: a value, a type, or
            None for an argument that is left out; each with the errors' text for both values.
        make: Function that returns the object of the call.
        label: Name, in errors, of the call that the odd rank skips; None for no such test.
    """

    name: str
    call: Callable[..., Any]
    usual: dict[str, Any]
    odd: dict[str, tuple[dict[str, Any] | None, str]]
    make: Callable[[Any], Any] = field(default=lambda comm: comm)
    label: str | None = None


def rows_of(name, call, arguments, *, make=lambda comm: comm, label):
    """Return a row for each argument of a call; the usual call passes all arguments.

    Args:
        arguments: By name: the usual value, another value, a value of a wrong type, and the name
            in errors if it differs.
    """
    usual = {argument: values[0] for argument, values in arguments.items()}
    return [Row(f"{name}({argument}=)", call, usual,
                {"value": ({argument: value}, *(told or [argument])),
                 "type": ({argument: wrong}, argument),
                 "missing": ({argument: SKIPPED}, *(told or [argument]))},
                make, None if i else label)
            for i, (argument, (_, value, wrong, *told)) in enumerate(arguments.items())]


def in_turn(name, make, use, told="of model 2"):
    """Return the row of two equal models that the odd rank uses in the other order."""
    def use_all(pair, order):
        for i in order:
            use(pair[i])

    return Row(f"two models, {name}", use_all, {"order": (0, 1)},
               {"order": ({"order": (1, 0)}, told)}, lambda comm: [make(comm), make(comm)])


def cases(rows):
    """Return the parameters of a test of rows: a row, the arguments of the odd rank, a pattern."""
    parameters = []
    for row in rows:
        for kind, (odd, told) in row.odd.items():
            parameters.append((f"{row.name}, {kind}", row, odd, told))
        if row.label is not None:
            parameters.append((f"{row.name}, not called", row, SKIPPED, row.label))
    return parameters


def errors_of(comm, row, odd):
    """Make a call with one odd rank; return the errors of all ranks as texts, "" for none.

    Args:
        comm: Communicator that gathers the errors.
        odd: Arguments that the last rank passes instead of `row.usual`; None leaves an argument
            out.
    """
    is_odd = comm.rank == comm.size - 1
    part = mpiring.Communicator(
        MPI.COMM_WORLD, config=mpiring.Config(stall_timeout_s=STALL_TIMEOUT_S))
    subject, arguments, error = row.make(part), dict(row.usual), None
    if is_odd and odd is not SKIPPED:
        arguments = {name: value for name, value in {**arguments, **odd}.items()
                     if value is not SKIPPED}
    # All ranks continue, also after an error: this reports it to ranks without an error.
    calls = [] if is_odd and odd is SKIPPED else [lambda: row.call(subject, **arguments)]
    for action in (*calls, part.barrier):
        try:
            action()
        except Exception as exc:
            error = error or exc
    texts = comm.allgather_object(
        "" if error is None else f"{type(error).__name__}: {error}", label=row.name)
    # After some of these errors it cannot be closed, not even at the end of the program.
    part._group.engine.give_up(error or mpiring.ClosedError("the test is over"))
    return texts


def check(comm, row, odd, told):
    """Fail unless one odd rank causes an error on all ranks that names the difference."""
    if comm.size == 1:
        return
    texts = errors_of(comm, row, odd)
    assert all(texts), texts
    assert all(re.search(told, text) for text in texts), texts
    # An error that only the odd rank detects is shown with its rank when it ends the job.
    assert all("rank " in text for text in texts[:-1]), texts
