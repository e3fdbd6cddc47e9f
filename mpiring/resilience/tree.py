"""Takes a tree of dicts, lists and arrays apart, into JSON and bytes, and rebuilds it."""

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
from ..memory.pytrees import Path
from ..sharding.sliced import Range, Sliced

Bytes = NDArray[np.uint8]

# The names of dtypes in the safetensors format. Those without a name are stored as pairs.
STORED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"}
_PAIRS = {"complex128": "F64"}
_BLOCK_BYTES = 32 << 20
# The names of all kinds of arrays.
KINDS = "array", "scalar", "gpu_array", "tensor", "sliced"
_MAX_LEVELS = 100
# A dict is an object of a list of pairs; a leaf is an object with a list.
_MAX_JSON_LEVELS = 3 * (_MAX_LEVELS + 1) + 2
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


class Kind(Protocol):
    """A kind of arrays that trees may hold.

    Attributes:
        name: In the files.
    """

    name: str

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape; None for other objects. Raises ConfigError."""

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`."""

    def build(self, dtype: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return an array of these elements; in host memory, it shares that of `data`."""


class Arrays:
    """NumPy's arrays, also of ml_dtypes' bfloat16."""

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
                f"pip install ml_dtypes, and import it before load()") from exc
        return data.view(known).reshape(shape)


class Scalars(Arrays):
    """NumPy's scalars, such as `numpy.float32(3)`."""

    name = "scalar"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a scalar; None for other objects."""
        return (dtype_name(x.dtype), ()) if isinstance(x, np.generic) else None

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return a scalar."""
        return super().build(dtype, shape, data)[()]


class DeviceArrays(Arrays):
    """CuPy's arrays; loaded on the GPU that is current then."""

    name = "gpu_array"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array; None for other objects."""
        # Arrays on a GPU without `get` belong to another framework.
        return (dtype_name(x.dtype), x.shape) if hasattr(x, "get") and is_on_gpu(x) else None

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`, when queued work is done."""
        super().copy(x.get(), out)

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return an array of these elements, in the GPU's memory.

        Raises:
            MissingDependencyError: CuPy or a GPU is missing.
        """
        from ..gpu import cuda
        return cuda.cupy().asarray(super().build(dtype, shape, data))


@dataclass
class Stored:
    """An array that stays as it is in the files, since nobody calculates with it; and its kind.

    Attributes:
        name: Name of the kind.
        dtype, shape: As in the tree.
        data: Elements of the array; None if only the tree is compared.
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
    """Tensors of which ranges are here: a kind of arrays in a tree.

    Args:
        refused: Explain that such a tensor cannot be saved here.
    """

    name = "sliced"

    def __init__(self, *, refused: bool = False) -> None:
        self._refused = refused

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of the whole tensor; None for other objects."""
        if not isinstance(x, Sliced):
            return None
        if self._refused:
            raise ConfigError("a Sliced, of which each rank has other ranges, cannot be saved "
                              "here; pass this state as sharded=")
        return dtype_name(x.dtype), x.shape

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of the whole tensor to `out`, a block at a time."""
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
    """An array in a tree.

    Attributes:
        kind, value: The array, and what kind it is.
        dtype, shape: Of it.
        nbytes: Of its elements.
    """

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
        """Bytes of an element as it is stored."""
        digits = "".join(c for c in self.stored[0].partition("_")[0] if c.isdigit())
        return int(digits or 8) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.itemsize * math.prod(self.stored[1])


@dataclass(frozen=True)
class Outline:
    """A tree without the elements of its arrays.

    Attributes:
        text: JSON of everything but the elements.
        leaves: The arrays, by their names in the file.
    """

    text: str
    leaves: Mapping[str, Leaf]


def outline(tree: Any, kinds: Sequence[Kind], root: str) -> Outline:
    """Describe a tree, without a copy of its arrays.

    Args:
        tree: Dicts, lists and tuples of arrays, numbers, texts, True, False and None.
        kinds: The arrays that it may hold.
        root: Its name in errors.

    Raises:
        ConfigError: It holds something else; says what and where.
    """
    walk = _Outlining(kinds, root)
    return Outline(json.dumps(walk.node(tree, ()), allow_nan=False), walk.leaves)


class _Outlining:
    """The description of a tree, node by node; strict about types, as `rebuild` needs it."""

    def __init__(self, kinds: Sequence[Kind], root: str) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._kinds, self._root = kinds, root

    def node(self, value: Any, path: Path) -> Any:
        """Return JSON for a value, which the keys in `path` lead to."""
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
        # A list of pairs: as keys of JSON's objects, numbers would become texts.
        for key in value:
            if type(key) not in (str, int, bool):
                raise ConfigError(f"{self._where(path)} has the key {key!r:.80}, a "
                                  f"{type(key).__qualname__}; expected a string or a whole number")
        items = [[key, self.node(item, (*path, key))] for key, item in value.items()]
        node: dict[str, Any] = {type(value).__name__: items}
        # Versions of the state, in PyTorch's modules.
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
        return self._root + "".join(f"[{key!r}]" for key in path)


def rebuild(text: str, data: Mapping[str, Any], kinds: Sequence[Kind]) -> Any:
    """Build a tree again.

    Args:
        text: Text of its Outline.
        data: Elements of its arrays, by name, as `build` of their kinds accepts them: bytes, whose
            memory the arrays share.
        kinds: Kinds of arrays that it may hold.

    Raises:
        CheckpointError: It is not the text of an Outline, or the data does not fit it.
        ConfigError: It holds arrays of another kind.
    """
    known = {kind.name: kind for kind in kinds}

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(item) for item in node]
        if not isinstance(node, dict):
            return node
        name, value = next(iter(node.items()))
        if name == "float":
            return float(value)
        if name == "tuple":
            return tuple(build(item) for item in value)
        if name in _DICTS:
            items = _DICTS[name]()
            items.update({key: build(item) for key, item in value})
            if "metadata" in node:
                items._metadata = build(node["metadata"])  # type: ignore[attr-defined]
            return items
        if name in KINDS and name not in known:
            raise ConfigError(f"{value!r} is a {name}; load it with the adapter that saved it, "
                              f"as mpiring.torch.Checkpoints does")
        return _built(known[name], node, data[value])

    try:
        return build(parsed(text.encode(), _MAX_JSON_LEVELS))
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, StopIteration,
            RecursionError) as exc:
        raise CheckpointError(f"its tree is not as mpiring writes it: {exc!r:.200}") from exc


def _built(kind: Kind, node: Mapping[str, Any], data: Any) -> Any:
    """Build an array again, if the node in the tree fits its bytes."""
    dtype, shape = node["dtype"], tuple(map(index, node["shape"]))
    nbytes = Leaf(kind, None, dtype, shape).nbytes
    if min(shape, default=0) < 0 or isinstance(data, np.ndarray) and data.size != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} has other bytes")
    try:
        return kind.build(dtype, shape, data)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
