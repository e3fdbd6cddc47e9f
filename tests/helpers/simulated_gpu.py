"""Simulates a GPU for tests: queued actions happen late, in any order that its streams allow.

The host cannot access its memory: a vector's address is invalid there. A copy reads and writes host
memory when it is executed, not when it is queued. Until then, the target of a download contains
junk, so a missing wait causes a wrong result.
"""

import ctypes
import functools
import itertools
import mmap
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpiring.errors import MissingDependencyError
from mpiring.gpu import cuda
from mpiring.gpu.device import Device
from mpiring.gpu.interface import DeviceVector
from mpiring.memory.arrays import is_finite
from mpiring.operations import on_device
from mpiring.memory.reduction import quietly, reduction

JUNK = 0xA5
_ALL_BITS = (1 << 32) - 1
# Streams on a network's clock that wait until a word is written.
_meeting = weakref.WeakSet()
# No host memory is at these addresses.
FIRST_ADDRESS = 1 << 50
_bases = itertools.count(FIRST_ADDRESS, 1 << 40)


class _Memory:
    """An allocation, the `owner` of vectors."""

    def __init__(self, address, content):
        self.address = address
        self.opened = 0
        self.bytes = content
        # Event after which it may be read; None for at once.
        self.ready = None
        with _remembering:
            _memories[address] = self


_memories = weakref.WeakValueDictionary()
# Ranks may be threads.
_remembering = threading.Lock()


def memory_of(address, nbytes):
    """Return the allocation that contains a number of bytes at an address."""
    with _remembering:
        memories = list(_memories.values())
    return next(memory for memory in memories
                if 0 <= address - memory.address <= len(memory.bytes) - nbytes)


def content(x):
    """Return the present content of a vector, as the GPU sees it."""
    memory = memory_of(x.address, x.nbytes)
    assert memory.ready is None or memory.ready.done, "it may be written yet"
    start = x.address - memory.address
    return memory.bytes[start:start + x.nbytes].view(x.dtype)


def _raw(x):
    return content(x).view(np.uint8)


class Event:
    """A mark in a stream.

    Attributes:
        done: True if the GPU has reached it.
        complete: True if the host can see that.
    """

    def __init__(self, gpu):
        self.done = self.complete = False
        self.waiting = []
        self._gpu = gpu

    def __repr__(self):
        return f"an event of {self._gpu.name}"

    def test(self):
        self._gpu.idle()
        return self.complete


class Stream:
    """A queue of actions, which are executed later, one after the other; see gpu.Stream."""

    def __init__(self, gpu):
        self._gpu = gpu
        self._actions = deque()
        self._busy = False

    def queue(self, action):
        with self._gpu.lock:
            self._actions.append(action)
            self.go_on()

    def go_on(self):
        """Schedule the first action, if no action is scheduled."""
        if self._actions and not self._busy:
            self._busy = True
            self._gpu.later(self._act)

    def _act(self):
        self._busy = False
        if self._actions[0]():
            self._actions.popleft()
            self.go_on()

    def download(self, x, out):
        assert out.nbytes == x.nbytes and self._gpu.is_pinned(out)
        out.view(np.uint8)[...] = JUNK
        self.queue(lambda: np.copyto(out.view(np.uint8), _raw(x)) or True)

    def upload(self, x, out):
        assert out.nbytes == x.nbytes and self._gpu.is_pinned(x)
        self.queue(lambda: np.copyto(_raw(out), x.view(np.uint8)) or True)

    def combine(self, op, sources, divisor, outs, nonfinite=None):
        assert {x.size for x in (*sources, *outs)} == {outs[0].size}
        assert {x.dtype for x in (*sources, *outs)} == {outs[0].dtype}
        assert all(isinstance(x, DeviceVector) for x in (*sources, *outs))
        assert nonfinite is None or not self._gpu.unqueued and self._gpu.is_pinned(nonfinite[0])

        def act():
            vectors = [content(x) for x in sources]
            result = vectors[0].copy()
            if len(vectors) > 1 or divisor != 1:
                kind = "mean" if divisor != 1 else "sum" if op == "mean" else op
                reduction(kind, result.dtype, divisor).combine(vectors, result)
            for x in outs:
                content(x)[...] = result
            if nonfinite is not None and not is_finite(result):
                word, number = nonfinite
                word[...] = number & _ALL_BITS
            return True

        self.queue(act)

    def meet(self, flags, number):
        assert not self._gpu.unqueued and all(map(self._gpu.is_pinned, flags.words))
        number &= _ALL_BITS

        def write():
            flags.words[flags.rank][...] = number
            while self._gpu.is_clocked and _meeting:
                _meeting.pop().go_on()
            return True

        def wait():
            here = all((int(word[0]) - number) & _ALL_BITS < 1 << 31 for word in flags.words)
            if not here and self._gpu.is_clocked:
                _meeting.add(self)
            elif not here:
                # Another process or thread may write the word.
                self._gpu.awaits_others = True
                self.go_on()
            return here

        self.queue(write)
        self.queue(wait)

    def call(self, queue):
        """Call a function that does work at once, and may wait for other ranks, in a thread."""
        thread = threading.Thread(target=queue, args=(0,), daemon=True)

        def act():
            if thread.ident is None:
                thread.start()
            if thread.is_alive():
                self.go_on()
            return not thread.is_alive()

        self.queue(act)

    def clear(self, x):
        self.queue(lambda: _raw(x).fill(0) or True)

    def launch(self, kernel, function, *arguments):
        """Run the function that computes the same with NumPy."""
        assert len(arguments) == len(kernel.parameters.names) - 1

        def act():
            quietly(function, *[content(x) if isinstance(x, DeviceVector) else x
                                for x in arguments])
            return True

        self.queue(act)

    def repeat(self, program, ready, flags, number, nonfinite):
        for event in ready:
            self.wait(event)
        for step in program.steps:
            if step is None:
                self.meet(flags, number)
                number += 1
            elif callable(step):
                self.call(step)
            else:
                *sums, alarmed = step
                self.combine(*sums, nonfinite if alarmed else None)
        return self.record()

    def record(self):
        event = Event(self._gpu)

        def act():
            event.done = True
            for stream in event.waiting:
                stream.go_on()
            self._gpu.later(lambda: setattr(event, "complete", True))
            return True

        self.queue(act)
        return event

    def wait(self, event):
        def act():
            if not event.done:
                event.waiting.append(self)
            return event.done

        self.queue(act)

    def synchronize(self):
        event = self.record()
        while not event.test():
            pass


class PyTorchStream:
    """The user's stream for PyTorch, which is not simulated and reads results at once."""

    def __init__(self, stream):
        self._stream = stream

    def upload(self, x, out):
        self._stream.upload(x, out)
        self._stream.synchronize()

    def __getattr__(self, name):
        return getattr(self._stream, name)


class Threads:
    """Memory that GPUs of one process open to each other."""

    def __init__(self):
        self.exported = []

    def new(self, nbytes):
        return np.full(nbytes, JUNK, np.uint8)

    def export(self, memory):
        self.exported.append(weakref.ref(memory))
        return (len(self.exported), *range(7))

    def open(self, handle, nbytes):
        memory = self.exported[handle[0] - 1]()
        assert len(memory.bytes) == nbytes
        return memory


class Processes:
    """Memory that GPUs of several processes open to each other, in files without a name."""

    def new(self, nbytes):
        return self._mapped(os.memfd_create("gpu"), nbytes, JUNK)

    def _mapped(self, descriptor, nbytes, value=None):
        os.ftruncate(descriptor, max(nbytes, 1))
        content = np.frombuffer(mmap.mmap(descriptor, max(nbytes, 1)), np.uint8, nbytes)
        if value is not None:
            content[...] = value
        _files[content.ctypes.data] = descriptor
        # Later memory may be mapped at the same address.
        weakref.finalize(content.base, os.close, descriptor)
        return content

    def export(self, memory):
        return (os.getpid(), _files[memory.bytes.ctypes.data], *range(6))

    def open(self, handle, nbytes):
        descriptor = os.open(f"/proc/{handle[0]}/fd/{handle[1]}", os.O_RDWR)
        return _Memory(next(_bases), self._mapped(descriptor, nbytes))


# Descriptors of the files that are mapped at addresses.
_files = {}


class SimulatedGpu:
    """A GPU as CuPy shows it; see gpu.Gpu.

    Attributes:
        shared: Memory that GPUs open to each other, as Threads or Processes; None if they cannot.

        unqueued: Reason why its streams cannot wait for other GPUs.
        streams: The user's streams; `chosen` is the number of the one in use.

    Args:
        later: Function that schedules an action; by default, each test of an event executes some
            of the actions that are due, in any order.
        seed: Seed of that order.
    """

    programmable = True
    address = ""
    current = staticmethod(nullcontext)

    def __init__(self, later=None, seed=0, name="simulated GPU", shared=None, unqueued=""):
        self.index, self.name, self.unqueued = 0, name, unqueued
        self.shared = shared
        self._due = []
        # Any thread may queue actions, and any thread that tests an event executes some.
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self.later = later or self._due.append
        # The addresses of GPUs of one machine do not overlap.
        self._next = next(_bases)
        self._pinned, self.awaits_others = [], False
        self.streams, self.chosen = [Stream(self), Stream(self)], 0

    @property
    def user(self):
        """The user's current stream."""
        return self.streams[self.chosen]

    @property
    def is_clocked(self):
        """Whether a network schedules the actions, not the tests of events."""
        return self.later != self._due.append

    @contextmanager
    def on(self, network, rank):
        """Join a simulated network, whose clock schedules all actions.

        Actions that are due before are executed now.
        """
        while self._due:
            self.idle()
        before, self.later = self.later, functools.partial(network.later, 0, rank)
        yield
        self.later = before

    def idle(self):
        """Execute some actions that are due, unless a network schedules them."""
        with self.lock:
            self.awaits_others = False
            for _ in range(self._random.randrange(4)):
                if self._due:
                    self._due.pop(self._random.randrange(len(self._due)))()
        if self.awaits_others:
            # They may need this core.
            time.sleep(2e-5)

    def stream(self):
        return Stream(self)

    def allocate(self, nbytes, device=None):
        return self.hold((self.shared or Threads()).new(nbytes), device)

    def hold(self, memory, device):
        """Return bytes in GPU memory as a vector."""
        nbytes = len(memory)
        memory = _Memory(self._next, memory)
        self._next += nbytes + 4096 & -256
        return DeviceVector(device, memory.address, nbytes, np.dtype(np.uint8), memory)

    def vector(self, device, x):
        """Copy a NumPy vector to GPU memory."""
        moved = self.allocate(x.nbytes, device).view(x.dtype)
        content(moved)[...] = x
        return moved

    def pinned(self, nbytes):
        memory = np.full(nbytes, JUNK, np.uint8)
        self.pin(memory)
        return memory

    def pin(self, memory):
        self._pinned.append(memory)

    def export(self, x):
        if self.shared is None:
            raise OSError("simulated GPUs share nothing here")
        return self.shared.export(x.owner)

    def open(self, handle, nbytes, device):
        memory = self.shared.open(handle, nbytes)
        memory.opened += 1
        # The vector keeps only memory of another process alive.
        owner = None if isinstance(self.shared, Threads) else memory
        return DeviceVector(device, memory.address, nbytes, np.dtype(np.uint8), owner)

    def close(self, x):
        _memories[x.address].opened -= 1

    def put(self, x):
        """Return a copy of a NumPy array in GPU memory, as an array of the user."""
        x = np.asarray(x)
        array = self.array(self.allocate(x.nbytes).view(x.dtype), x.shape)
        array.set(x)
        return array

    def calculated(self, function, *inputs, out=None, **kwargs):
        """Return the result of a NumPy function on arrays, after their pending work."""
        for x in inputs:
            if isinstance(x, np.ndarray) and x.ndim:
                raise TypeError("unsupported type: numpy.ndarray")
        result = function(*map(_on_host, inputs), **kwargs)
        if out is None:
            return self.put(result)
        out, = out if isinstance(out, tuple) else (out,)
        out.set(result)
        return out

    def is_pinned(self, x):
        return not x.size or any(np.shares_memory(x, memory) for memory in self._pinned)

    def user_stream(self, stream=None):
        if isinstance(stream, int):
            return self.streams[stream]
        return self.user if stream is None else PyTorchStream(self.user)

    def mark(self, stream=None):
        return self.user_stream(stream).record()

    def follow(self, event, stream=None):
        self.user.wait(event)
        if stream is not None:
            # PyTorch uses the memory at once.
            while not event.test():
                pass

    def is_finite(self, x):
        return bool(np.isfinite(x.get()).all())

    def array(self, x, shape):
        return Array(self, content(x).reshape(shape), memory_of(x.address, x.nbytes), x.owner,
                     x.device)


class Array(NDArrayOperatorsMixin):
    """Replaces a CuPy array: writes to it are queued on the user's stream.

    Arithmetic waits for that stream, and queues its result. Like CuPy, it refuses arrays in host
    memory.
    """

    def __init__(self, gpu, inside, base, owner, device):
        self.gpu, self.inside, self.base, self.owner = gpu, inside, base, owner
        self._device = device
        self.dtype, self.shape, self.size = inside.dtype, inside.shape, inside.size
        self.strides = inside.strides
        self.nbytes, self.ndim, self.flags = inside.nbytes, inside.ndim, inside.flags

    @property
    def __cuda_array_interface__(self):
        # CuPy's own attribute, which nothing reads.
        return {}

    @property
    def data(self):
        inside = self.inside.ctypes.data - self.base.bytes.ctypes.data if self.size else 0
        return SimpleNamespace(ptr=self.base.address + inside)

    @property
    def device(self):
        """Return the device, as CuPy does; a GPU without CuPy's number gets a number."""
        index = 0 if self._device is None else id(self._device)
        cuda._devices.setdefault(index, self._device)
        return SimpleNamespace(id=index)

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __len__(self):
        return len(self.inside)

    def __float__(self):
        return float(self.get())

    def __getitem__(self, part):
        if any(isinstance(i, Array) for i in (part if isinstance(part, tuple) else (part,))):
            return self.gpu.put(self.get()[_on_host(part)])
        return self._like(self.inside[part])

    def _like(self, inside):
        return Array(self.gpu, inside, self.base, self.owner, self._device)

    def __setitem__(self, part, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self._queue(_on_host(part), value)

    def _queue(self, part, value):
        source = value.inside if isinstance(value, Array) else np.array(value)

        def act():
            self.inside[part] = source
            return True

        self.gpu.user.queue(act)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return self.gpu.calculated(getattr(ufunc, method), *inputs, **kwargs)

    def __getattr__(self, name):
        """Return a method of NumPy arrays that returns a new array."""
        if name not in ("sum", "max", "mean", "argmax", "astype", "copy"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.gpu.calculated(
            getattr(np.ndarray, name), self, *args, **kwargs)

    @property
    def T(self):
        return self._like(self.inside.T)

    def reshape(self, *shape):
        return self._like(self.inside.reshape(*shape))

    def get(self):
        """Wait for the user's stream, and return a copy in host memory, as CuPy does."""
        self.gpu.user.synchronize()
        return self.inside.copy()

    def set(self, value):
        self._queue(..., value)


def _on_host(part):
    if isinstance(part, tuple):
        return tuple(map(_on_host, part))
    return part.get() if isinstance(part, Array) else part


class Cupy:
    """Replaces the package cupy: NumPy functions on arrays of a simulated GPU."""

    __version__ = "14"
    ndarray = Array
    savez = staticmethod(lambda path, **arrays: np.savez(
        path, **{name: array.get() for name, array in arrays.items()}))

    def __init__(self, gpu):
        # Time of the host.
        class Event:
            def record(self):
                self.when = time.perf_counter()

            def synchronize(self):
                pass

        self._gpu = gpu
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0, getDeviceCount=lambda: 1,
                                    runtimeGetVersion=self._no_version,
                                    memGetInfo=lambda: (0, 0)), Event=Event,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            get_current_stream=lambda index: SimpleNamespace(ptr=gpu.chosen),
            Device=lambda index: SimpleNamespace(use=lambda: None, pci_bus_id=f"0000:{index}"),
            get_elapsed_time=lambda began, ended: 1e3 * (ended.when - began.when))

    @staticmethod
    def _no_version():
        # MPI in another process cannot test whether it can send its memory.
        raise MissingDependencyError("the GPU is simulated")

    def asarray(self, x):
        return x if isinstance(x, Array) else self._gpu.put(np.asarray(x))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._gpu.calculated(getattr(np, name), *args, **kwargs)


class SimulatedDevice(Device):
    """A simulated GPU that also accepts host memory as its own.

    Its streams refuse vectors of other devices, for whose streams nothing waits.
    """

    def _refuse_others(self, *xs):
        for x in xs:
            assert not isinstance(x, DeviceVector) or x.device is self, (x, self)

    def to_host(self, x, out):
        self._refuse_others(x)
        return super().to_host(x, out)

    def to_device(self, x, out):
        self._refuse_others(out)
        return super().to_device(x, out)

    def combine(self, op, sources, divisor, outs, nonfinite=None):
        self._refuse_others(*sources, *outs)
        super().combine(op, sources, divisor, outs, nonfinite)

    def clear(self, x):
        self._refuse_others(x)
        super().clear(x)

    def launch(self, kernel, function, *arguments):
        self._refuse_others(*arguments)
        super().launch(kernel, function, *arguments)

    def put(self, x):
        """Return a copy of a NumPy array in GPU memory, as an array of the user."""
        return self.gpu.put(x)

    def vector_at(self, address, n, dtype, owner):
        if n and address >= FIRST_ADDRESS:
            return super().vector_at(address, n, dtype, owner)
        nbytes = n * np.dtype(dtype).itemsize
        plain = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else bytearray(1)
        vector = self.gpu.hold(np.frombuffer(plain, np.uint8, nbytes), self)
        # Writes are complete when the stream of the writer has reached its present end.
        vector.owner.owner, vector.owner.ready = owner, self.gpu.mark()
        return vector.view(dtype)


# The GPU that was installed last.
_installed = None


def _drive(ref):
    """Execute actions while the host does other things, because other ranks may wait for them."""
    while ref is _installed and (gpu := ref()) is not None:
        gpu.idle()
        del gpu
        time.sleep(1e-4)


def installed(monkeypatch):
    """Replace CuPy by a simulated package with one GPU; return this GPU's device."""
    device = SimulatedDevice(SimulatedGpu(shared=Processes()))
    global _installed
    _installed = weakref.ref(device.gpu)
    threading.Thread(target=_drive, args=(_installed,), daemon=True).start()
    device.gpu.cupy = Cupy(device.gpu)
    monkeypatch.setitem(sys.modules, "cupy", device.gpu.cupy)
    monkeypatch.setattr(cuda, "cupy", functools.cache(cuda.cupy.__wrapped__))
    monkeypatch.setattr(cuda, "_devices", {0: device})
    # Each GPU of a process keeps its slots.
    monkeypatch.setattr(on_device, "SLOT_BYTES", 1 << 20)
    return device
