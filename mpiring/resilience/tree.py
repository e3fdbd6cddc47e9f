"""Converts a tree of dicts, lists and arrays to JSON and bytes, and back."""

import collections
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, ConfigError, MissingDependencyError
from ..files import parsed
from ..gpu.arrays import is_on_gpu
from ..memory.arrays import dtype_name, dtype_named
from ..memory.pytrees import Path, path_text
from ..remedies import pip_install
from ..sharding.sliced import Range, Sliced

Bytes = NDArray[np.uint8]

# Names of dtypes in the safetensors format. A dtype without a name is stored as pairs.
STORED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"}
_PAIRS = {"complex128": "F64"}
_BLOCK_BYTES = 32 << 20
# Names of all kinds of arrays.
KINDS = "array", "scalar", "gpu_array", "tensor", "sliced"
_MAX_LEVELS = 100
# In JSON, a dict is an object with a list of pairs, and a leaf is an object with a list.
_MAX_JSON_LEVELS = 3 * (_MAX_LEVELS + 1) + 2
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


class Kind(Protocol):
    """A kind of arrays that trees may hold, with its name in the files."""

    name: str

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array of this kind; None for other objects.

        Raises ConfigError if the array cannot be saved.
        """

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`."""

    def build(self, dtype: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return an array of these elements; in host memory, it shares the memory of `data`."""


class Arrays:
    """NumPy arrays, including bfloat16 arrays of ml_dtypes."""

    name = "array"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array; None for other objects."""
        if type(x) is not np.ndarray:
            return None
        return dtype_name(x.dtype), x.shape

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`."""
        out.view(x.dtype).reshape(x.shape)[...] = x

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return an array of these elements."""
        try:
            known = np.dtype(dtype)
        except TypeError as exc:
            raise MissingDependencyError(
                f"the checkpoint holds {dtype}, which NumPy has once ml_dtypes is imported: "
                f"{pip_install('ml_dtypes')}, and import it before load()") from exc
        return data.view(known).reshape(shape)


class Scalars(Arrays):
    """NumPy scalars, such as `numpy.float32(3)`."""

    name = "scalar"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a scalar; None for other objects."""
        return (dtype_name(x.dtype), ()) if isinstance(x, np.generic) else None

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return a scalar."""
        return super().build(dtype, shape, data)[()]


class DeviceArrays(Arrays):
    """CuPy arrays; they are loaded to the current GPU."""

    name = "gpu_array"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array; None for other objects."""
        # Arrays on a GPU without `get` belong to another framework.
        return (dtype_name(x.dtype), x.shape) if hasattr(x, "get") and is_on_gpu(x) else None

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`, after queued work is done."""
        super().copy(x.get(), out)

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return an array in GPU memory, or raise MissingDependencyError."""
        from ..gpu import cuda
        return cuda.cupy().asarray(super().build(dtype, shape, data))


@dataclass
class Stored:
    """An array in the form of the files, which nobody calculates with; also its own kind.

    `data` is None if only the tree is compared.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: Any = None

    def __repr__(self) -> str:
        return f"a {self.name} of {self.dtype} and shape {self.shape}"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array of this kind; None for other objects."""
        return (x.dtype, x.shape) if isinstance(x, Stored) and x.name == self.name else None

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements to `out`."""
        out[...] = x.data

    def build(self, dtype: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return an array of these elements."""
        return Stored(self.name, dtype, shape, data)


class SlicedTensors:
    """Tensors of which each rank has some ranges; if `refused`, they raise ConfigError."""

    name = "sliced"

    def __init__(self, *, refused: bool = False) -> None:
        self._refused = refused

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of the complete tensor; None for other objects."""
        if not isinstance(x, Sliced):
            return None
        if self._refused:
            raise ConfigError("a Sliced, of which each rank has other ranges, cannot be saved "
                              "here; pass this state as sharded=")
        return dtype_name(x.dtype), x.shape

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of the complete tensor to `out`, a block at a time."""
        elements, block = out.view(x.dtype), max(1, _BLOCK_BYTES // x.dtype.itemsize)
        for start in range(0, x.size, block):
            stop = min(start + block, x.size)
            elements[start:stop] = x.read(start, stop)

    def build(self, dtype: str, shape: tuple[int, ...], data: Mapping[Range, Bytes]) -> Any:
        """Return a tensor of these pieces, which share the memory of `data`."""
        known = dtype_named(dtype, [dtype])
        return Sliced(shape, {ends: x.view(known) for ends, x in data.items()}, known)


STORED_KINDS = tuple(map(Stored, KINDS))


@dataclass(frozen=True)
class Leaf:
    """An array in a tree, with its kind."""

    kind: Kind
    value: Any
    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, list[int]]:
        """Dtype and shape in the file."""
        if self.dtype in _PAIRS:
            return _PAIRS[self.dtype], [*self.shape, 2]
        return STORED[self.dtype], list(self.shape)

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element in the file."""
        digits = "".join(c for c in self.stored[0].partition("_")[0] if c.isdigit())
        return int(digits or 8) // 8

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements in the file."""
        return self.itemsize * math.prod(self.stored[1])


@dataclass(frozen=True)
class Outline:
    """A tree as JSON, and the arrays that this lacks, by their names in the file."""

    text: str
    leaves: Mapping[str, Leaf]


def outline(tree: Any, kinds: Sequence[Kind], root: str) -> Outline:
    """Describe a tree, without a copy of its arrays.

    `root` is the name of the tree in errors.

    Raises:
        ConfigError: The tree holds another object; the message gives its path and type.
    """
    walk = _Outlining(kinds, root)
    return Outline(json.dumps(walk.node(tree, ()), allow_nan=False), walk.leaves)


class _Outlining:
    """The description of a tree, node by node; it refuses all types that `rebuild` cannot make."""

    def __init__(self, kinds: Sequence[Kind], root: str) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._kinds, self._root = kinds, root

    def node(self, value: Any, path: Path) -> Any:
        """Return JSON for the value at a path."""
        if len(path) > _MAX_LEVELS:
            raise ConfigError(f"{self._where(path):.200}… is more than {_MAX_LEVELS} levels deep: "
                              f"does the tree contain itself?")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) in (list, tuple):
            nodes = [self.node(item, (*path, i)) for i, item in enumerate(value)]
            return nodes if type(value) is list else {"tuple": nodes}
        return (self._dict if type(value) in _DICTS.values() else self._leaf)(value, path)

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        # The result is a list of pairs, because keys of JSON objects must be strings.
        for key in value:
            if type(key) not in (str, int, bool):
                raise ConfigError(f"{self._where(path)} has the key {key!r:.80}, a "
                                  f"{type(key).__qualname__}; expected a string or a whole number")
        items = [[key, self.node(item, (*path, key))] for key, item in value.items()]
        node: dict[str, Any] = {type(value).__name__: items}
        # PyTorch modules keep versions of their state in this attribute.
        if hasattr(value, "_metadata"):
            node["metadata"] = self.node(value._metadata, (*path, "_metadata"))
        return node

    def _leaf(self, value: Any, path: Path) -> Any:
        for kind in self._kinds:
            try:
                described = kind.describe(value)
            except ConfigError as exc:
                raise ConfigError(f"{self._where(path)}: {exc}") from exc
            if described is not None:
                return self._array(Leaf(kind, value, *described), path)
        names = " or ".join(f"{kind.name}s" for kind in self._kinds)
        raise ConfigError(
            f"{self._where(path)} is a {type(value).__module__}.{type(value).__qualname__}; a "
            f"checkpoint holds dicts, lists and tuples of {names}, numbers, texts, True, False "
            f"and None")

    def _array(self, leaf: Leaf, path: Path) -> Any:
        if leaf.dtype not in STORED and leaf.dtype not in _PAIRS:
            raise ConfigError(
                f"{self._where(path)} is of {leaf.dtype}, which the safetensors format does not "
                f"have; expected one of {', '.join([*STORED, *_PAIRS])}")
        first = name = "/".join(map(str, path)) or "value"
        number = 2
        while name in self.leaves or name == "__metadata__":
            name, number = f"{first}#{number}", number + 1
        self.leaves[name] = leaf
        return {leaf.kind.name: name, "dtype": leaf.dtype, "shape": list(leaf.shape)}

    def _where(self, path: Path) -> str:
        return self._root + path_text(path)


def rebuild(text: str, data: Mapping[str, Any], kinds: Sequence[Kind]) -> Any:
    """Rebuild a tree.

    The arrays share the memory of the data, which the `build` methods of their kinds accept.

    Raises:
        CheckpointError: The text does not come from an Outline, or the data does not fit the text.
        ConfigError: The tree holds arrays of another kind.
    """
    known = {kind.name: kind for kind in kinds}

    def build(node: dict[str, Any]) -> Any:
        name, value = next(iter(node.items()))
        if name == "float":
            return float(value)
        if name == "tuple":
            return tuple(value)
        if name in _DICTS:
            items = _DICTS[name]()
            items.update(dict(value))
            if "metadata" in node:
                items._metadata = node["metadata"]  # type: ignore[attr-defined]
            return items
        if name in KINDS and name not in known:
            raise ConfigError(f"{value!r} is a {name}; load it with the adapter that saved it, "
                              f"as mpiring.torch.Checkpoints does")
        return _build_array(known[name], node, data[value])

    try:
        return parsed(text.encode(), _MAX_JSON_LEVELS, build)
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, StopIteration,
            RecursionError) as exc:
        raise CheckpointError(f"its tree is not as mpiring writes it: {exc!r:.200}") from exc


def _build_array(kind: Kind, node: Mapping[str, Any], data: Any) -> Any:
    """Rebuild an array, if its node in the tree fits its data."""
    dtype, shape = node["dtype"], tuple(map(index, node["shape"]))
    nbytes = Leaf(kind, None, dtype, shape).nbytes
    if min(shape, default=0) < 0 or isinstance(data, np.ndarray) and data.size != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} has other bytes")
    try:
        return kind.build(dtype, shape, data)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
