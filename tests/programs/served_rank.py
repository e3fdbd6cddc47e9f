"""One rank of a job that runs programs one after the other; started by tests/helpers/jobs.py.

    mpiexec -n 2 python tests/programs/served_rank.py SOCKET

Each program finds what it would find in a process of its own: its words, folder, variables, output,
fresh random numbers, settings as they are by default, and its own modules. When it has ended, what
it has registered with atexit is called. Then nothing of it may be left: no thread, no process, no
communicator, no memory shared with other ranks, no open files. Packages stay imported: for that
programs share a process.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import logging
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import threading
import traceback
import warnings
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.launch import silence

# What one program may leave: packages open files at their first use, and autograd's graphs keep
# what a hook holds, if that holds a parameter. Tests of lifetimes count for themselves.
FILES, MEMORIES = 64, 16
# A job that has more of it ends after the program.
MAX_FILES, MAX_MEMORIES, MAX_BYTES = 256, 64, 2 << 30
ROOT = Path(__file__).parents[2]


class ExitFunctions:
    """Keeps what programs and mpiring register with atexit apart from what packages do."""

    def __init__(self):
        self._register, self._unregister = atexit.register, atexit.unregister
        self._registered = []
        atexit.register, atexit.unregister = self.register, self.unregister

    def register(self, function, *args, **kwargs):
        caller = sys._getframe(1).f_globals
        if caller["__name__"].partition(".")[0] in ("__main__", "mpiring") or is_own(
                caller.get("__file__")):
            self._registered.append((function, args, kwargs))
        else:
            self._register(function, *args, **kwargs)
        return function

    def unregister(self, function):
        self._registered = [each for each in self._registered if each[0] != function]
        self._unregister(function)

    def call(self):
        """Call those that are registered, the last one first; return the exceptions' status."""
        status = 0
        while self._registered:
            function, args, kwargs = self._registered.pop()
            try:
                function(*args, **kwargs)
            except BaseException:
                traceback.print_exc()
                status = 1
        return status


class Settings:
    """What a program may change in its process, as it was before."""

    def __init__(self):
        self._variables, self._folder, self._path = dict(os.environ), os.getcwd(), list(sys.path)
        self._modules, self._filters = set(sys.modules), list(warnings.filters)
        self._hooks = [(place, name, getattr(place, name)) for place, name in (
            (sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook"),
            (warnings, "showwarning"), (sys, "exit"))]
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()
                         - {signal.SIGKILL, signal.SIGSTOP}}
        self._loggers = {logger: (logger.level, list(logger.handlers), logger.propagate)
                         for logger in map(logging.getLogger, (None, "mpiring"))}
        self._numpy_errors = np.geterr()
        self._threads = set(threading.enumerate())
        self._freeze, self._program_froze = gc.freeze, False
        gc.freeze = self.freeze
        self._files, self._memories = len(open_files()), shared_memories()

    def freeze(self):
        """Do what a program calls gc.freeze for, and remember that it did."""
        self._program_froze = True
        self._freeze()

    def enter(self, task):
        """Begin a program: with its variables, folder and words."""
        os.environ.update(task["variables"])
        os.chdir(task["cwd"])
        random.seed()
        np.random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].seed()

    def restore(self):
        """Undo what the last program has changed."""
        os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._variables)
        sys.path[:] = self._path
        warnings.filters[:] = self._filters
        # Warnings that a module has given once are due again.
        warnings._filters_mutated()
        for place, name, value in self._hooks:
            setattr(place, name, value)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Else it would end another program.
        faulthandler.cancel_dump_traceback_later()
        for logger, (level, handlers, propagate) in self._loggers.items():
            logger.setLevel(level)
            logger.handlers[:], logger.propagate = handlers, propagate
        np.seterr(**self._numpy_errors)
        if "torch" in sys.modules:
            restore_torch(sys.modules["torch"])
        for name, module in list(sys.modules.items()):
            if name not in self._modules and is_own(getattr(module, "__file__", None)):
                del sys.modules[name]

    def left(self):
        """Return what the last program has left behind, and whether this process is worn out."""
        if self._program_froze:
            gc.unfreeze()
            self._program_froze = False
        # One closes generators, which hold what the next one finds.
        for _ in range(10):
            if not gc.collect():
                break
        remains = [f"runs the thread {thread.name!r}" for thread in threading.enumerate()
                   if thread not in self._threads and of_a_program(thread) and not stopped(thread)]
        remains += [f"has the process {child.pid}" for child in multiprocessing.active_children()]
        communicators = [each for each in gc.get_objects() if type(each) is mpiring.Communicator
                         and not each.closed]
        remains += [f"has {len(communicators)} open communicators"] * bool(communicators)
        # What is left belongs to packages: collections need not look at it again.
        self._freeze()
        files, memories = open_files(), shared_memories()
        if len(files) > self._files + FILES:
            kinds = Counter(name.partition(":")[0] for name in files)
            remains.append(f"has {len(files)} open files: {kinds.most_common(5)}")
        if memories > self._memories + MEMORIES:
            remains.append(f"maps {memories - self._memories} memories shared with other ranks")
        self._files, self._memories = len(files), memories
        worn = (len(files) > MAX_FILES or memories > MAX_MEMORIES
                or resident_bytes() > MAX_BYTES)
        return remains, worn


def of_a_program(thread):
    """Return whether a thread runs a program's or mpiring's code; packages keep theirs."""
    module = getattr(getattr(thread, "_target", None) or thread.run, "__module__", None) or ""
    return module.partition(".")[0] in ("__main__", "mpiring") or is_own(
        getattr(sys.modules.get(module), "__file__", None))


def stopped(thread):
    """Wait a moment for a thread that is about to end."""
    thread.join(5)
    return not thread.is_alive()


@functools.cache
def is_own(file):
    """Return whether a file belongs to the tests, to mpiring, or to a folder of a test's own."""
    if not isinstance(file, str):
        return False
    path = Path(file).resolve()
    if "site-packages" in path.parts or path.is_relative_to(ROOT / "mpiring"):
        # A virtual environment may lie in the checkout.
        return False
    return path.is_relative_to(ROOT) or not any(
        path.is_relative_to(Path(folder).resolve())
        for folder in (sys.prefix, sys.base_prefix, Path(os.__file__).parent))


def open_files():
    """Return what this process has open."""
    names = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(entry.path))
    return names


def shared_memories():
    """Return how many windows and the like are mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:mpiring" in line for line in maps)


def resident_bytes():
    """Return how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def restore_torch(torch):
    """Give PyTorch the settings of a new process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    if "torch._dynamo" in sys.modules:
        # It keeps the modules that it has compiled.
        torch.compiler.reset()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def status_of(exit_):
    """Return the status with which Python would end; say what it would say."""
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    print(exit_.code, file=sys.stderr)
    return 1


def run(command):
    """Run the words after `python` as a program; return its exit status."""
    if command[0] in ("-m", "-c"):
        sys.argv = [command[0], *command[2:]]
        sys.path.insert(0, os.getcwd())
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(command[0], run_name="__main__")
        return 0
    except SystemExit as exit_:
        return status_of(exit_)
    except BaseException:
        # mpiring's hook ends the job.
        sys.excepthook(*sys.exc_info())
        return 1


def serve(address):
    """Run what comes, until nobody is there who sends more."""
    rank = MPI.COMM_WORLD.rank
    # The first one registers with atexit what ends all others that a program has made.
    weakref.finalize(serve, int)
    # What mpiring leaves for the whole life of a process, and PyTorch, which adds to the filters of
    # warnings, are there before the first program.
    with mpiring.init() as comm:
        comm.barrier()
    # Programs are silent or not by themselves.
    silence.warn()
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    at_exit = ExitFunctions()
    settings = Settings()
    # Open from now on: the first program that prints would else count as having opened it.
    own_output = os.dup(1), os.dup(2)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(address)
        tasks = end.makefile("r")
        for line in tasks:
            task = json.loads(line)
            output = os.open(task["output"], os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1), os.dup2(output, 2)
            os.close(output)
            # Lines of two ranks would mix where a print is written in pieces.
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)
            settings.enter(task)
            status = run(task["command"])
            status = at_exit.call() or status
            settings.restore()
            left, worn = settings.left()
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(own_output[0], 1), os.dup2(own_output[1], 2)
            end.sendall(json.dumps(
                {"rank": rank, "status": status, "left": left, "worn": worn}).encode() + b"\n")


if __name__ == "__main__":
    serve(sys.argv[1])
