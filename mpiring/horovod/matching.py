"""Starts operations that ranks submit by name, fused and in the same order on all ranks.

Each rank may submit named operations in any order. The operations of a rank are divided into
batches. A batch ends when the rank waits for an operation, when the batch has enough bytes, or
after a short time without new operations. For each batch, ranks compare a digest of names and terms
in one short allreduce. Usually all digests are equal; all operations then start in the order of
submission. Otherwise ranks gather their lists of names. The operations that all ranks have
submitted start in the order of the lowest rank; the other operations join the next batch.

The last operation of a rank is named `barrier.shutdown`. Operations that this rank has not
submitted before then fail on the other ranks. Ranks that have called `join` take part in reductions
with zeros, and in steps of optimizers by a function of the process set.
"""

import contextlib
import functools
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .. import Communicator, ConfigError, Handle, MpiringError
from ..provisional import first_few, ranks_text, trace_file
from .arrays import NumPyArrays
from .fusion import FusedVectors
from .ops import MEAN
from .requests import (
    BARRIER, JOIN, REDUCTIONS, STEP, HorovodInternalError, NamedRequest, Terms)

_log = logging.getLogger("mpiring")

# Name of the last operation of each process set.
_LAST_NAME = "shutdown"
_LAST = f"{BARRIER}.{_LAST_NAME}"
# Other ranks may compute for this time before they also end.
_END_PATIENCE_S = 86400.0
# A batch ends after this time without new operations; a thread checks five times as often.
_QUIET_S = 5e-3
# Limits of the pause between two comparisons of operations that some ranks have not submitted.
_SHORTEST_S, _LONGEST_S = 5e-4, 2e-2


class Matcher:
    """Operations of a process set, by name. Collective, blocking.

    It alone uses `comm`; `ranks` are global. Messages into which tensors are fused have at most
    `fusion_bytes`. `step` is called with the name of an optimizer's step, in which this rank takes
    part without a batch because it has called `join`. If `marks_rounds`, traces record the start of
    each comparison.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], fusion_bytes: int,
                 step: Callable[[str], None]) -> None:
        self._comm, self._ranks = comm, list(ranks)
        self._rank = self._ranks[comm.rank]
        self._fusion = FusedVectors(comm, fusion_bytes)
        self._batch_bytes = max(fusion_bytes, 1)
        # All operations that have not started, in the order in which they are compared. The first
        # `_left` were compared before, but some ranks had not submitted them. `_lock` protects
        # them; `_progress_lock` is held while operations are compared and started.
        self._waiting: list[NamedRequest] = []
        self._left = 0
        # Number of the open batch, and its size in bytes.
        self._batch, self._open_bytes = 0, 0
        self._lock, self._progress_lock = threading.Lock(), threading.Lock()
        self._names: dict[str, NamedRequest] = {}
        self._unnamed: dict[str, int] = {}
        # The operations that ranks compare now, their digest, and the allreduce of the digest.
        self._compared: list[NamedRequest] = []
        self._words = np.zeros(2, np.int64)
        self._round: Any = None
        self._retry_s = self._pause_s = 0.0
        self._rounds, self._joined = 0, dict[int, int]()
        # Steps of other ranks, for the thread that has called `join`.
        self._step, self._steps = step, deque[str]()
        self._last: NamedRequest | None = None
        self._last_s = self._warned_s = 0.0
        self._work, self._closed = threading.Event(), False
        self._failure: BaseException | None = None
        self.marks_rounds = False
        if comm.size > 1 and comm.threaded:
            threading.Thread(target=self._loop, name="mpiring horovod", daemon=True).start()
        elif comm.size > 1:
            comm.work_inline(self._work_inline)

    def submit(self, request: NamedRequest) -> NamedRequest:
        """Submit an operation, which starts once all ranks have submitted its name; return at once.

        Raises ConfigError if an operation of this name is in flight, or an array cannot be sent.
        """
        terms, name = request.terms, request.name
        kind = terms.kind
        if not name:
            # Arrivals have one order, so their numbers are the same even after a refused one.
            counted = "" if terms.is_arrival else kind
            number = self._unnamed[counted] = self._unnamed.get(counted, 0) + 1
            name = f"noname.{number}"
        name = request.name = f"{kind}.{name}"
        request.matcher = self
        if not self._fusion.fuses(terms) and kind != JOIN:
            request.prepare(self._comm, self._ranks)
        # Set before the operation is added, as the thread ends batches without recent operations.
        self._last_s = request.submitted_s = time.monotonic()
        with self._lock:
            previous = self._names.get(name)
            if previous is not None and not previous.ended:
                raise ConfigError(
                    f"rank {self._rank}: Requested to {kind} a tensor with the "
                    f"same name as another tensor that is currently being processed: {name!r}. If "
                    f"you want to request another tensor, use a different tensor name; or "
                    f"synchronize the first one before")
            self._names[name] = request
            request.batch = self._batch
            self._waiting.append(request)
            self._open_bytes += terms.nbytes
            if self._open_bytes >= self._batch_bytes:
                self._end_batch()
        if not self._work.is_set():
            self._work.set()
        return request

    def _end_batch(self) -> None:
        """End the open batch; the caller holds the lock."""
        self._batch += 1
        self._open_bytes = 0

    def start(self, request: NamedRequest) -> None:
        """Block until an operation has started; all ranks must submit it. Collective."""
        while not request.started:
            self._end_open_batch()
            with self._progress_lock:
                moved = request.started or self._advance(blocking=True)
            if not moved:
                time.sleep(_SHORTEST_S)

    def poll(self, request: NamedRequest) -> bool:
        """Make progress, and return whether an operation is complete."""
        if not request.started:
            self._end_open_batch()
            self._try_to_advance()
            while self._steps:
                self._step(self._steps.popleft())
            return False
        return request.ended or request.handle is not None and request.handle.test()

    def _end_open_batch(self) -> None:
        with self._lock:
            if self._waiting and self._waiting[-1].batch == self._batch:
                self._end_batch()

    def _try_to_advance(self) -> None:
        """Make progress, unless another thread is doing so."""
        if self._progress_lock.acquire(blocking=False):
            try:
                self._advance(blocking=False)
            finally:
                self._progress_lock.release()

    def _loop(self) -> None:
        """Advance operations while the program does not wait for them."""
        while not self._closed:
            self._work.wait()
            self._work.clear()
            while self._waiting and not self._closed:
                time.sleep(_QUIET_S / 5)
                if time.monotonic() - self._last_s > _QUIET_S:
                    self._end_open_batch()
                self._warn(self._compared, "some ranks have not submitted operations since then")
                try:
                    self._try_to_advance()
                except MpiringError:
                    # The program gets the error when it waits.
                    return

    def _work_inline(self) -> None:
        """Advance operations inside other waits of the program, without a thread."""
        if not self._closed:
            if time.monotonic() - self._last_s > _QUIET_S:
                self._end_open_batch()
            # The program gets the error when it waits.
            with contextlib.suppress(MpiringError):
                self._try_to_advance()

    def _advance(self, *, blocking: bool) -> bool:
        """Compare the next batch, and start its common operations; return whether a batch ended.

        The caller holds `_progress_lock`. If `blocking`, wait for the other ranks. Raises
        HorovodInternalError if a rank has not called before the timeout, or has failed.
        """
        if self._failure is not None:
            raise HorovodInternalError(
                f"rank {self._rank}: an earlier operation failed: {self._failure}"
            ) from self._failure
        try:
            if not self._compared:
                if not self._select_batch():
                    return False
                if blocking:
                    self._comm.allreduce(self._words, op="max")
                else:
                    self._round = self._comm.iallreduce(self._words, op="max")
                    self._watch(self._round)
            if self._round is not None:
                if blocking:
                    self._round.wait()
                elif not self._round.test():
                    return False
            self._round = None
            self._match(self._compared, same=self._words[0] == -self._words[1],
                        blocking=blocking)
            self._compared = []
        except BaseException as error:
            # The state of the other ranks is now unknown.
            self._failure = error
            if not isinstance(error, MpiringError):
                raise
            raise HorovodInternalError(
                f"rank {self._rank} waits for {_listed(self._compared)}: {error}") from error
        return True

    def _watch(self, handle: Handle[Any]) -> None:
        """Limit the time of a comparison for which `await_all` polls."""
        if self._last is not None:
            handle.patience_s = _END_PATIENCE_S
        elif any(request.terms.kind == JOIN for request in self._compared):
            handle.patience_s = 0.0

    def _select_batch(self) -> bool:
        """Select left-over operations and the oldest ended batch; return whether there are any."""
        with self._lock:
            new = self._waiting[self._left:]
            number = new[0].batch if new else self._batch
            is_early = not self._left or time.monotonic() < self._retry_s
            if self._closed or number == self._batch and is_early:
                return False
            self._compared = self._waiting[:self._left]
            if number < self._batch:
                self._compared += [request for request in new if request.batch == number]
        text = "\0".join([request.name + request.terms.text for request in self._compared])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self._words[0] = int.from_bytes(digest, "little") >> 2
        self._words[1] = -self._words[0]
        self._rounds += 1
        trace = self._comm.recorder.trace
        if trace is not None and self.marks_rounds:
            trace.span("CYCLE_START", "cycle", time.monotonic(), time.monotonic())
        return True

    def _match(self, batch: list[NamedRequest], *, same: bool, blocking: bool) -> None:
        """Start the operations that all ranks have submitted; keep the rest of the batch.

        Collective. Blocking if batches differ.
        """
        if same:
            ready, self._pause_s = batch, 0.0
            if any(request.terms.kind == JOIN for request in batch):
                self._record_joined(range(self._comm.size))
                ready = self._complete_join(batch)
        else:
            ready = self._common(batch)
            self._pause_s = 0.0 if ready else min(max(2 * self._pause_s, _SHORTEST_S), _LONGEST_S)
            self._retry_s = time.monotonic() + self._pause_s
        # All ranks close together, and do not compare the remaining operations again.
        if any(request.name == _LAST for request in ready):
            self._closed = True
        if self._comm.recorder.trace is not None:
            for request in ready:
                request.started_s = time.monotonic()
        for request in self._fusion.start(ready, blocking=blocking):
            if request.start is not None:
                request.start()
        with self._lock:
            left = [request for request in batch if not request.started]
            self._waiting[:len(batch)], self._left = left, len(left)

    def _complete_join(self, requests: Iterable[NamedRequest]) -> list[NamedRequest]:
        """Complete this rank's `join`, which all ranks have called; return the other operations."""
        last, others = max(self._joined, key=lambda rank: (self._joined[rank], rank)), []
        for request in requests:
            if request.terms.kind == JOIN:
                request.results = [self._ranks[last]]
            else:
                others.append(request)
        self._joined.clear()
        # Ranks that joined early have submitted fewer operations without names.
        self._unnamed.clear()
        return others

    def _common(self, batch: list[NamedRequest]) -> list[NamedRequest]:
        """Return the operations of all ranks, in the order of the lowest rank."""
        lists: list[dict[str, Terms]] = self._comm.allgather_object(
            {request.name: request.terms for request in batch}, label="names of operations")
        is_joined = [any(terms.kind == JOIN for terms in terms_by_name.values())
                     for terms_by_name in lists]
        self._record_joined(rank for rank, joined in enumerate(is_joined) if joined)
        everyone = range(self._comm.size)
        active = [rank for rank in everyone if not is_joined[rank]]
        if not active:
            batch, active = self._complete_join(batch), [*everyone]
        by_name = {request.name: request for request in batch}
        ready = []
        for name, terms in lists[active[0]].items():
            needed = everyone if name == _LAST else active
            if terms.kind != JOIN and all(name in lists[rank] for rank in needed):
                problem = self._problem(name, lists, active)
                request = by_name.pop(name, None)
                if problem and request is not None:
                    request.error = HorovodInternalError(problem)
                elif not problem:
                    ready.append(request or self._zeros(name, terms, batch))
        self._report([request for request in by_name.values()
                      if request.terms.kind != JOIN and request.name != _LAST], lists)
        self._refuse_ended(by_name.values(), lists)
        self._refuse_different(by_name.values(), lists, active)
        return ready

    def _refuse_ended(self, requests: Iterable[NamedRequest],
                      lists: Sequence[dict[str, Terms]]) -> None:
        """End the operations that a rank did not submit before its last operation."""
        for rank, names in enumerate(lists):
            for request in requests:
                if _LAST in names and request.name not in names and request.name != _LAST:
                    request.error = HorovodInternalError(
                        f"rank {self._rank} waits for {request.name!r}, but Horovod has been shut "
                        f"down on rank {self._ranks[rank]}: its program has ended, or has called "
                        f"shutdown(). Every rank must submit the same names before")

    def _refuse_different(self, requests: Iterable[NamedRequest],
                          lists: Sequence[dict[str, Terms]], active: Sequence[int]) -> None:
        """End an arrival if all ranks wait in different arrivals."""
        arrivals = {rank: name for rank in active for name, terms in lists[rank].items()
                    if terms.is_arrival and not all(name in lists[other] for other in active)}
        if len(arrivals) < len(active):
            return
        for request in requests:
            if request.terms.is_arrival:
                other = next(rank for rank in active if request.name not in lists[rank])
                request.error = HorovodInternalError(
                    f"rank {self._rank} called {request.name!r}, but rank {self._ranks[other]} "
                    f"called {arrivals[other]!r}; every rank must call the same functions in the "
                    f"same order, and give its optimizers parameters of the same names")

    def _problem(self, name: str, lists: Sequence[dict[str, Terms]], active: Sequence[int]) -> str:
        """Return the reason why a common operation cannot run; "" if it can."""
        first = active[0]
        terms = lists[first][name]
        for rank in active:
            if lists[rank][name].text != terms.text:
                return (f"{terms.difference(lists[rank][name])} Ranks {self._ranks[first]} and "
                        f"{self._ranks[rank]} differ in {name!r}: submit the same on every rank, "
                        f"or use another name")
        takes_zeros = terms.kind == BARRIER or terms.kind in REDUCTIONS and terms.op in (
            "sum", MEAN)
        if len(active) < len(lists) and not takes_zeros:
            joined = [self._ranks[rank] for rank in range(len(lists)) if rank not in active]
            words = f"{terms.kind} {terms.op}".strip()
            return (f"{words[0].upper()}{words[1:]} is not supported with Join at this time: "
                    f"{ranks_text(joined)} called join(), others submitted {name!r}")
        return ""

    def _zeros(self, name: str, terms: Terms, batch: Sequence[NamedRequest]) -> NamedRequest:
        """Return an operation of the other ranks with zeros, for a rank that has called `join`."""
        arrays = next(request.arrays for request in batch if request.terms.kind == JOIN)
        zeros = [arrays.zeros(dtype, shape, terms.device)
                 for dtype, shape in zip(terms.dtypes, terms.shapes)]
        request = NamedRequest(arrays, name, terms, zeros, in_place=True, single=False)
        if terms.kind == STEP:
            request.start = functools.partial(self._steps.append, name)
        elif not self._fusion.fuses(terms):
            request.prepare(self._comm, self._ranks)
        return request

    def _record_joined(self, ranks: Iterable[int]) -> None:
        """Record the ranks that have called `join`, and the round."""
        for rank in ranks:
            self._joined.setdefault(rank, self._rounds)

    def _report(self, requests: Iterable[NamedRequest],
                lists: Sequence[dict[str, Terms]]) -> None:
        """Warn about operations that other ranks have not submitted, and time them out."""
        config, now_s = self._comm.config, time.monotonic()
        for request in requests:
            waited_s = now_s - request.submitted_s
            missing = [self._ranks[rank] for rank, names in enumerate(lists)
                       if request.name not in names]
            text = (f"{ranks_text(missing)} did not submit {request.name!r}; they have "
                    f"{first_few(list(lists[self._ranks.index(missing[0])]), 3) or 'nothing'}. "
                    f"Every rank must submit the same names" if missing else "")
            if missing and config.stall_timeout_s and waited_s > config.stall_timeout_s:
                request.error = HorovodInternalError(
                    f"rank {self._rank} has waited {waited_s:.0f} s: {text}")
            elif missing:
                self._warn([request], text)

    def _warn(self, requests: Sequence[NamedRequest], text: str) -> None:
        """Warn at intervals about operations that have waited longer than `stall_warning_s`."""
        now_s, limit_s = time.monotonic(), self._comm.config.stall_warning_s
        since_s = max(self._warned_s, requests[0].submitted_s) if requests else now_s
        if limit_s and now_s - since_s > limit_s:
            self._warned_s = now_s
            _log.warning("rank %d has waited %.0f s for %s: %s", self._rank,
                         now_s - requests[0].submitted_s, _listed(requests), text)

    def finish(self, request: NamedRequest) -> Any:
        """Return an operation's result, or raise HorovodInternalError. Collective, blocking."""
        if request.results is None:
            try:
                if not request.started:
                    self.start(request)
                request.complete()
            except MpiringError as error:
                request.error = error
                if isinstance(error, HorovodInternalError):
                    raise
                raise HorovodInternalError(f"{request.name}: {error}") from error
        if self._names.get(request.name) is request:
            del self._names[request.name]
        if self._comm.recorder.trace is not None:
            self._trace(self._comm.recorder.trace, request)
        return request.results[0] if request.single else request.results

    def _trace(self, trace: trace_file.TraceFile, request: NamedRequest) -> None:
        """Record the time until all ranks had submitted, and the duration, as Horovod does."""
        kind, started_s = request.terms.kind.upper(), request.started_s or time.monotonic()
        trace.span(f"NEGOTIATE_{kind}", "negotiate", request.submitted_s, started_s,
                   tensor=request.name)
        trace.span(kind, "named", started_s, time.monotonic(), tensor=request.name)

    def end(self) -> NamedRequest:
        """Submit the last operation, complete when all ranks have called this. Collective."""
        if self._last is None:
            self._last = self.submit(NamedRequest(NumPyArrays(), _LAST_NAME, Terms(BARRIER), ()))
        return self._last

    def close(self) -> None:
        """Wait until all ranks close; unfinished operations may be lost. Collective, blocking."""
        try:
            self.finish(self.end())
        finally:
            self._closed = True
            self._work.set()
        with self._progress_lock:
            self._comm.close()


def await_all(requests: Iterable[NamedRequest]) -> list[Any]:
    """Return the results of operations, also of several process sets; see `Matcher.finish`."""
    requests = list(requests)
    while not all([request.matcher.poll(request) for request in requests]):
        time.sleep(_SHORTEST_S)
    return [request.matcher.finish(request) for request in requests]


def _listed(requests: Sequence[NamedRequest]) -> str:
    return first_few([repr(request.name) for request in requests], 3)
