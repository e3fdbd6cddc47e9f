"""Compiles functions to machine code with numba, saves it, and loads it without numba.

Loading the code of `Communicator.prepare` takes 0.1 s and 50 MiB in each process. Of these, 45 MiB
are llvmlite's files, whose memory the processes of a node share. llvmlite is loaded only if saved
code is found.

numba's own cache cannot replace this one, because it never finds a function that was made by
another function. It compares pickled closures, in which compiled functions and intrinsics have
names that are random in each process. Each start would compile again, for 20 s, and add files. Even
with a hit, each process would import numba, which takes 0.2 s and 65 MiB before anything is loaded:

    python -X importtime -c "import numpy, numba"

A saved file contains code that will be run. It is used only if it belongs to this user and nobody
else may write to it. A checksum must show that the file is complete and was made from the same
functions, by the same versions, for the same processor. Otherwise, the code is compiled again.
"""

import contextlib
import ctypes
import dis
import hashlib
import importlib
import logging
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np

from ..files import read, save

Make = Callable[..., Callable[..., Any]]
# The address of a function, and the object that owns its memory.
_Loaded = tuple[int, Any]

_log = logging.getLogger("mpiring")
_compiling = threading.Lock()
_codes: dict[Any, "Code | None"] = {}
# Keys of code that is not saved.
_missing: set[tuple[Make, str, tuple[Any, ...]]] = set()
_folder: Path | None = None
_enabled = True
# Whether this process warns for its job, the problems of which it has warned, and the reason for
# which it uses no more code.
_warns = True
_warned: set[str] = set()
_problem = ""
_SYMBOL = np.dtype([("name", "u4"), ("info", "u1"), ("other", "u1"), ("section", "u2"),
                    ("value", "u8"), ("size", "u8")])
# Limit for the size of a file; the largest object file of this package has 60 kB.
_MAX_BYTES = 16 << 20
_DIGEST_LENGTH = 64


class Code:
    """A function in machine code.

    Attributes:
        call: The function, called without Python's lock, so that other threads run.
        call_with_lock: The function, called with Python's lock, which saves 0.1 µs; for calls of
            at most a few microseconds.
    """

    def __init__(self, signature: str, address: int, owner: Any) -> None:
        arguments, result = _parse_signature(signature)
        types = [result and _c_type(result), *map(_c_type, arguments)]
        self.call = ctypes.CFUNCTYPE(*types)(address)
        self.call_with_lock = ctypes.PYFUNCTYPE(*types)(address)
        # Keep the code's memory alive as long as the functions.
        self.call.owner = self.call_with_lock.owner = owner  # type: ignore[attr-defined]


def configure(folder: Path | None, *, enabled: bool = True, warns: bool = True) -> None:
    """Set how this process uses machine code from now on.

    Problems are logged as warnings if `warns`, in one process of a job. Without a folder, no code
    is saved.
    """
    global _folder, _enabled, _warns
    _folder, _enabled, _warns = folder, enabled, warns


def code(label: str, make: Make, signature: str, *arguments: Any,
         compiles: bool = True) -> Code | None:
    """Return machine code; the first thread that needs it loads or compiles it.

    `label` describes the code for the log, in the plural. `make`, a function of the module
    `intrinsics` and of `arguments` (functions, dtypes, numbers and strings), returns the function
    to compile. That is a function of pointers and numbers in numba's subset of Python.

    Args:
        signature: Types of the function's arguments, separated by spaces, then "-> int64" if it
            returns a value. An example is "float32* int8* intp".
        compiles: If false, return None for code that is neither loaded nor saved; later calls do
            not search for it again.

    Returns:
        The code; None if it cannot be loaded or compiled, for example without numba.
    """
    if not _enabled:
        return None
    key = make, signature, arguments
    if key not in _codes and (compiles or key not in _missing):
        with _compiling:
            if key not in _codes:
                loaded = _load_or_compile(label, *key, compiles)
                if loaded is not None:
                    _codes[key] = Code(signature, *loaded)
                elif compiles:
                    _codes[key] = None
                else:
                    _missing.add(key)
    return _codes.get(key)


def load_missing() -> None:
    """Load code that was missing in earlier calls and has been saved since then."""
    for key in tuple(_missing):
        with _compiling:
            if key not in _codes and (loaded := _load_or_compile("", *key, False)):
                _codes[key] = Code(key[1], *loaded)


def _load_or_compile(label: str, make: Make, signature: str, arguments: tuple[Any, ...],
                     compiles: bool) -> _Loaded | None:
    """Load or compile code if possible; NumPy gives the same results without it."""
    global _problem
    if _problem:
        return None
    try:
        identity = _identity(make, signature, arguments)
        loaded = _load_saved(identity) if identity else None
        if loaded is None and compiles:
            loaded = _compile_and_save(label, make, signature, arguments, identity)
        return loaded
    except (ImportError, OSError, MemoryError, RuntimeError) as error:
        # numba and llvmlite raise these if memory or file descriptors run out.
        _problem = str(error) or type(error).__name__
        _report("use", "numba is installed, but cannot be used (%s): this job runs without "
                       "compiled code, and is slower. Are memory (ulimit -v) or open files "
                       "(ulimit -n) limited?", _problem)
        return None


def _report(problem: str, text: str, *values: object) -> None:
    """Log a problem; the job's warning process logs it the first time as a warning."""
    level = logging.WARNING if _warns and problem not in _warned else logging.INFO
    _warned.add(problem)
    _log.log(level, text, *values)


def _compile_and_save(label: str, make: Make, signature: str, arguments: tuple[Any, ...],
                      identity: str) -> _Loaded | None:
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        # numba also raises ImportError if it does not support this version of NumPy.
        _log.info("%s are made by NumPy, which takes longer: %s", label, error)
        return None
    _log.info("compiling %s, which takes about a second", label)
    try:
        function = make(importlib.import_module(".intrinsics", __package__), *arguments)
        compiled = _compile(numba, function, signature)
    except numba.errors.NumbaError as error:
        _log.info("%s are made by NumPy, which takes longer: %s", label, error)
        return None
    llvm, symbol = _llvm(), compiled.native_name
    machine = llvm.Target.from_default_triple().create_target_machine(
        *_processor(llvm), opt=3, jit=True)
    image = machine.emit_object(llvm.parse_assembly(compiled.inspect_llvm()))
    try:
        loaded = _load(llvm, image, symbol)
    except ValueError as error:
        _log.debug("code of %s is not saved: %s", label, error)
        return compiled.address, compiled
    if identity:
        _save(identity, _processor(llvm), symbol, image)
    return loaded


def _compile(numba: Any, function: Callable[..., Any], signature: str) -> Any:
    def kind(name: str) -> Any:
        if name.endswith("*"):
            return numba.types.CPointer(kind(name[:-1]))
        return numba.from_dtype(np.dtype(name))

    arguments, result = _parse_signature(signature)
    returned = numba.types.void if result is None else kind(result)
    # When the function is inlined into the function that ctypes calls, the compiler sees that it
    # never raises. Otherwise, the code would need numba to raise.
    return numba.cfunc(returned(*map(kind, arguments)), error_model="numpy",
                       forceinline=True)(function)


def _parse_signature(signature: str) -> tuple[list[str], str | None]:
    arguments, _, result = signature.partition("->")
    return arguments.split(), result.strip() or None


def _c_type(name: str) -> Any:
    return ctypes.c_void_p if name.endswith("*") else np.ctypeslib.as_ctypes_type(name)


def _load(llvm: Any, image: bytes, symbol: str) -> _Loaded:
    """Load an object file, and find a function in it.

    Raises ValueError if it needs a symbol that this process lacks, for which LLVM would end the
    process, or is otherwise not usable.
    """
    sections = {section.name(): section.data()
                for section in llvm.object_file.ObjectFileRef.from_data(image).sections()}
    if image[:4] != b"\x7fELF" or b".symtab" not in sections:
        raise ValueError("it is no object file in ELF with symbols")
    symbols, names = np.frombuffer(sections[b".symtab"], _SYMBOL), sections[b".strtab"]
    process = ctypes.CDLL(None)
    for start in symbols["name"][symbols["section"] == 0].tolist():
        name = names[start:names.index(b"\0", start)].decode()
        if name and not hasattr(process, name):
            raise ValueError(f"it needs {name}, which this process does not have")
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine(jit=True))
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(image))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise ValueError(f"it has no function {symbol}")
    return address, engine


def _save(identity: str, processor: Sequence[str], symbol: str, image: bytes) -> None:
    body = symbol.encode() + b"\n" + image
    try:
        save(_file(identity, _digest(*processor)), _checksum(identity, processor, body) + body)
    except OSError as error:
        _report("save", "compiled code cannot be saved, and so is compiled at every start, for "
                        "some seconds: %s. Set MPIRING_TUNING_FOLDER to a folder that can be "
                        "written to, or to nothing", error)


def _load_saved(identity: str) -> _Loaded | None:
    """Return saved code; None if there is none, or if the file fails the checks."""
    files = _file(identity, "*")
    if not any(files.parent.glob(files.name)):
        # Without a file, there is no need to load LLVM.
        return None
    llvm = _llvm()
    processor = _processor(llvm)
    file = _file(identity, _digest(*processor))
    try:
        content = read(file, _MAX_BYTES, private=True)
        body = content[_DIGEST_LENGTH:]
        if content[:_DIGEST_LENGTH] != _checksum(identity, processor, body):
            raise ValueError("it is damaged, or of something else")
        symbol, _, image = body.partition(b"\n")
        return _load(llvm, image, symbol.decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.info("%s is not used: %s", file, error)
        return None


def _file(identity: str, processor: str) -> Path:
    return (_folder or Path()) / f"code-{identity[:24]}-{processor[:24]}.bin"


def _checksum(identity: str, processor: Sequence[str], body: bytes) -> bytes:
    return _digest(identity, *processor, body.hex()).encode()


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=_DIGEST_LENGTH // 2).hexdigest()


def _llvm() -> Any:
    llvm = importlib.import_module("llvmlite.binding")
    with contextlib.suppress(RuntimeError):
        # Later versions are initialized automatically, and raise.
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _processor(llvm: Any) -> tuple[str, str]:
    """Return the name and the features of this processor, on which machine code depends."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _identity(make: Make, signature: str, arguments: tuple[Any, ...]) -> str:
    """Return a digest of everything else on which the code depends; "" if nothing is saved."""
    if _folder is None:
        return ""
    # Importing this takes a quarter of the time of importing this package.
    from importlib.metadata import version
    try:
        versions = [version(name) for name in ("numba", "llvmlite")]
    except ImportError:
        return ""
    sources = [Path(__file__).with_name(name).read_text() for name in ("intrinsics.py", "cache.py")]
    return _digest(*versions, platform.python_version(), *sources,
                   *_description((make, signature, arguments)))


def _description(value: Any, names: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield lines that are equal for equal values and for functions that do the same.

    `names` are the global names of a function. Raises TypeError if the value's behavior is unknown.
    """
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        yield from _description((value.__code__, value.__defaults__, *cells), value.__globals__)
    elif isinstance(value, CodeType):
        yield f"{value.co_code.hex()} {value.co_names} {value.co_varnames} {value.co_freevars}"
        for instruction in dis.get_instructions(value):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in names:
                yield from _description(names[instruction.argval])
        yield from _description(value.co_consts, names)
    elif isinstance(value, tuple):
        yield f"{len(value)} values"
        for part in value:
            yield from _description(part, names)
    elif isinstance(value, ModuleType) and value.__name__ in ("numpy", "math"):
        # The names of the attributes of these modules determine their behavior.
        yield value.__name__
    elif isinstance(value, (type, BuiltinFunctionType, np.ufunc)):
        yield f"{getattr(value, '__module__', 'numpy')}.{value.__name__}"
    elif value is None or isinstance(value, (bool, int, float, str, np.generic, np.dtype)):
        yield f"{type(value).__name__} {value!r}"
    else:
        raise TypeError(f"machine code cannot depend on {value!r}")
