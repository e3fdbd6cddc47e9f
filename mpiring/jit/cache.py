"""Makes machine code of functions with numba, saves it, and loads it without numba.

To import numba takes 0.4 s and 50 MB, to compile a function 0.1 to 1 s; to load what an earlier
process has saved takes llvmlite alone, 0.05 s and 50 MiB; to find that none has, nothing of that.
numba's own cache would need numba.

A saved file is code that will run: it is taken only from its owner's hands, whole, and made from
the same functions, by the same versions, for the same processor; else it is made anew.
"""

import contextlib
import ctypes
import dis
import hashlib
import importlib
import importlib.metadata
import json
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from ..files import parsed, read, save

Make = Callable[..., Callable[..., Any]]
# The address of a function, and what owns its memory.
_Found = tuple[int, Any]

_log = logging.getLogger("mpiring")
_compiling = threading.Lock()
_codes: dict[Any, "Code | None"] = {}
# What `saved` has not found.
_missing: set[Any] = set()
_folder: Path | None = None
# Whether this process warns for its job; what it has warned of; why it makes no code any more.
_warns = True
_warned: set[str] = set()
_problem = ""
# How numba and llvmlite fail where they are installed, but memory or descriptors are short.
_FAILURES = ImportError, OSError, MemoryError, RuntimeError

_SYMBOL = np.dtype([("name", "u4"), ("info", "u1"), ("other", "u1"), ("section", "u2"),
                    ("value", "u8"), ("size", "u8")])
# The largest object file of this package has 60 kB.
_MOST_BYTES = 16 << 20
# Modules whose attributes are what their names say.
_MODULES = ("numpy", "math")


class Code:
    """A function in machine code.

    Args:
        signature: That it was compiled for.
        address: Of the function.
        owner: Owns its memory.

    Attributes:
        call: The function; other threads run during a call.
        call_with_lock: The function, called with Python's lock held, which saves 0.1 µs: for what
            takes a few microseconds at most.
    """

    def __init__(self, signature: str, address: int, owner: Any) -> None:
        arguments, result = _types(signature)
        types = [result and _c_type(result), *map(_c_type, arguments)]
        self.call = ctypes.CFUNCTYPE(*types)(address)
        self.call_with_lock = ctypes.PYFUNCTYPE(*types)(address)
        # Functions live as long as what owns their code.
        self.call.owner = self.call_with_lock.owner = owner  # type: ignore[attr-defined]


def save_in(folder: Path | None, *, warns: bool = True) -> None:
    """Save and look for machine code in a folder, from now on in this process.

    Args:
        folder: None for nowhere.
        warns: Log problems as warnings: for one process of a job.
    """
    global _folder, _warns
    _folder, _warns = folder, warns


def _report(problem: str, text: str, *values: object) -> None:
    """Log a problem: the first time, by the process that does so for its job, as a warning."""
    level = logging.WARNING if _warns and problem not in _warned else logging.INFO
    _warned.add(problem)
    _log.log(level, text, *values)


def code(label: str, make: Make, signature: str, *arguments: Any) -> Code | None:
    """Return machine code, loaded or made by the first thread that needs it; None without numba.

    Args:
        label: What it does, for the log: a plural.
        make: `make(intrinsics, *arguments)` returns the function to compile, of pointers and
            numbers, in the Python that numba compiles; `intrinsics` is the module of that name.
        signature: The function's types, separated by spaces, such as "float32* int8* intp", then
            "-> int64" where it returns something.
        arguments: Functions, dtypes, numbers, texts.
    """
    return _once(label, make, signature, arguments, compiles=True)


def saved(label: str, make: Make, signature: str, *arguments: Any) -> Code | None:
    """Return machine code as `code` does, if that takes no compiling; else None, until it is made.

    What was not found once is not looked for again.
    """
    return _once(label, make, signature, arguments, compiles=False)


def _once(label: str, make: Make, signature: str, arguments: tuple[Any, ...], *,
          compiles: bool) -> Code | None:
    key = (make, signature, arguments)
    if key not in _codes and (compiles or key not in _missing):
        with _compiling:
            if key not in _codes:
                loaded = _loaded_or_made(label, make, signature, arguments, compiles=compiles)
                if loaded is None and not compiles:
                    _missing.add(key)
                    return None
                _missing.discard(key)
                _codes[key] = None if loaded is None else Code(signature, *loaded)
    return _codes.get(key)


def _loaded_or_made(label: str, make: Make, signature: str, arguments: tuple[Any, ...], *,
                    compiles: bool) -> _Found | None:
    """Return code, if it can be had: whatever it makes, NumPy makes, too."""
    global _problem
    if _problem:
        return None
    try:
        about = _about(label, make, signature, arguments)
        loaded = None if about is None else _read(about)
        if loaded is None and compiles:
            return _made(label, make, signature, arguments, about)
        return loaded
    except _FAILURES as error:
        _problem = str(error) or type(error).__name__
        _report("use", "numba is installed, but cannot be used (%s): this job runs without "
                       "compiled code, and is slower. Are memory (ulimit -v) or open files "
                       "(ulimit -n) limited?", _problem)
        return None


def _made(label: str, make: Make, signature: str, arguments: tuple[Any, ...],
          about: dict[str, str] | None) -> _Found | None:
    """Compile a function, and save the code if it can be loaded without numba."""
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        # numba raises it, too, where NumPy is newer than it supports.
        _log.info("%s are made by NumPy, which takes longer: %s", label, error)
        return None
    _log.info("compiling %s, which takes about a second", label)
    try:
        function = make(importlib.import_module(".intrinsics", __package__), *arguments)
        compiled = _compiled(numba, function, signature)
    except numba.errors.NumbaError as error:
        _log.info("%s are made by NumPy, which takes longer: %s", label, error)
        return None
    llvm = _llvm()
    image = _image(llvm, compiled)
    if not _is_loadable(llvm, image):
        _log.debug("code of %s is not saved: it needs numba", label)
        return compiled.address, compiled
    if about is not None:
        _save(about, _processor(llvm), compiled.native_name, image)
    return _loaded(llvm, image, compiled.native_name)


def _compiled(numba: Any, function: Callable[..., Any], signature: str) -> Any:
    """Compile a function of pointers and numbers by numba."""
    def kind(name: str) -> Any:
        base = name.rstrip("*")
        numba_type = numba.from_dtype(np.dtype(base))
        for _ in range(len(name) - len(base)):
            numba_type = numba.types.CPointer(numba_type)
        return numba_type

    arguments, result = _types(signature)
    returned = numba.types.void if result is None else kind(result)
    # Inlined into what ctypes calls, it is seen not to raise; else numba would be needed to.
    return numba.cfunc(returned(*map(kind, arguments)), error_model="numpy",
                       forceinline=True)(function)


def _types(signature: str) -> tuple[list[str], str | None]:
    arguments, _, result = signature.partition("->")
    return arguments.split(), result.strip() or None


def _c_type(name: str) -> Any:
    return ctypes.c_void_p if name.endswith("*") else np.ctypeslib.as_ctypes_type(name)


def _image(llvm: Any, compiled: Any) -> bytes:
    """Return the object file of a function that numba has compiled."""
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3,
        jit=True)
    image: bytes = machine.emit_object(llvm.parse_assembly(compiled.inspect_llvm()))
    return image


def _save(about: dict[str, str], processor: dict[str, str], symbol: str, image: bytes) -> None:
    """Save an object file for later processes."""
    body = b"%s\n%s" % (json.dumps({**about, **processor, "symbol": symbol}).encode(), image)
    try:
        save(_file(about, _hash(processor)), _checksum(body) + body)
    except OSError as error:
        _report("save", "compiled code cannot be saved, and so is compiled at every start, for "
                        "some seconds: %s. Set MPIRING_TUNING_FOLDER to a folder that can be "
                        "written to, or to nothing", error)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=32).hexdigest().encode() + b"\n"


def _read(about: dict[str, str]) -> _Found | None:
    """Return the code in its file; None if that is missing, damaged, another's or about another."""
    file = _file(about, "*")
    if not any(file.parent.glob(file.name)):
        # LLVM is not asked what this processor is.
        return None
    llvm = _llvm()
    processor = _processor(llvm)
    file = _file(about, _hash(processor))
    try:
        content = read(file, _MOST_BYTES, private=True)
        check, body = content[:65], content[65:]
        if check != _checksum(body):
            raise ValueError("it is damaged")
        head, _, image = body.partition(b"\n")
        description = parsed(head, 1)
        symbol = description.pop("symbol")
        if description != {**about, **processor}:
            raise ValueError("it is of something else")
        if not _is_loadable(llvm, image):
            raise ValueError("it needs what this process does not have")
        return _loaded(llvm, image, symbol)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("%s is not used: %s", file, error)
        return None


def _loaded(llvm: Any, image: bytes, symbol: str) -> _Found:
    """Load an object file, and find a function in it."""
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine(jit=True))
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(image))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise ValueError(f"it has no function {symbol}")
    return address, engine


def _is_loadable(llvm: Any, image: bytes) -> bool:
    """Return whether the process has all that an object needs; LLVM would end it otherwise."""
    parts = {part.name(): part.data()
             for part in llvm.object_file.ObjectFileRef.from_data(image).sections()}
    if image[:4] != b"\x7fELF" or b".symtab" not in parts:
        return False
    symbols, names = np.frombuffer(parts[b".symtab"], _SYMBOL), parts[b".strtab"]
    process = ctypes.CDLL(None)
    needed = (names[start:names.index(b"\0", start)].decode()
              for start in symbols["name"][symbols["section"] == 0].tolist() if start)
    return all(hasattr(process, name) for name in needed)


def _llvm() -> Any:
    llvm = importlib.import_module("llvmlite.binding")
    with contextlib.suppress(RuntimeError):
        # Later versions have done it, and say so.
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _file(about: dict[str, str], processor: str) -> Path:
    return (_folder or Path()) / f"code-{_hash(about)}-{processor}.bin"


def _hash(about: dict[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(about.items())).encode(), digest_size=12).hexdigest()


def _processor(llvm: Any) -> dict[str, str]:
    """Return all that machine code depends on beside `_about`."""
    return {"processor": llvm.get_host_cpu_name(),
            "features": llvm.get_host_cpu_features().flatten()}


def _about(label: str, make: Make, signature: str,
           arguments: tuple[Any, ...]) -> dict[str, str] | None:
    """Return what machine code depends on; None where nothing is to be saved."""
    if _folder is None:
        return None
    try:
        versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    except ImportError:
        return None
    return {"what": label, "versions": " ".join([*versions, platform.python_version()]),
            "function": _digest([*_described(make), signature, *_described(arguments),
                                 *_sources()])}


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()


def _sources() -> Iterator[str]:
    for name in ("intrinsics.py", "cache.py"):
        yield Path(__file__).with_name(name).read_text()


def _described(value: Any) -> Iterator[str]:
    """Yield lines that are equal for values, and functions, that do the same.

    Raises:
        TypeError: Nobody knows what it does.
    """
    if isinstance(value, FunctionType):
        yield from _described_code(value.__code__, value.__globals__)
        yield from _described(value.__defaults__ or ())
        for cell in value.__closure__ or ():
            yield from _described(cell.cell_contents)
    elif isinstance(value, tuple):
        yield f"{len(value)} values"
        for part in value:
            yield from _described(part)
    elif isinstance(value, ModuleType) and value.__name__ in _MODULES:
        yield value.__name__
    elif isinstance(value, (type, BuiltinFunctionType, np.ufunc)):
        yield f"{getattr(value, '__module__', 'numpy')}.{value.__name__}"
    elif value is None or isinstance(value, (bool, int, float, str, np.generic, np.dtype)):
        yield f"{type(value).__name__} {value!r}"
    else:
        raise TypeError(f"machine code cannot depend on {value!r}")


def _described_code(code: CodeType, names: dict[str, Any]) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in names:
            yield from _described(names[instruction.argval])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _described_code(constant, names)
        else:
            yield from _described(constant)
