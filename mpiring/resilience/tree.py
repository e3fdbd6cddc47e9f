"""Takes a nest of dicts, lists and arrays apart, into JSON and bytes, and rebuilds it."""

import collections
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, MissingDependencyError
from ..gpu.arrays import is_on_gpu
from ..memory.arrays import dtype_name

Bytes = NDArray[np.uint8]

# How the safetensors format calls dtypes. What it has no name for is stored as pairs.
STORED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"}
_PAIRS = {"complex128": "F64"}
_MOST_LEVELS = 100
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


class Kind(Protocol):
    """One kind of arrays that trees may hold.

    Attributes:
        name: In the files.
    """

    name: str

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape; None if `x` is of another kind. Raises ConfigError."""

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`."""

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return an array of these elements; in host memory, it shares that of `data`."""


class Arrays:
    """NumPy's arrays, also of ml_dtypes' bfloat16."""

    name = "array"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array; None if it is none."""
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
                f"the checkpoint holds {dtype}, which NumPy knows once ml_dtypes is imported: "
                f"pip install ml_dtypes, and import it before load()") from exc
        return data.view(known).reshape(shape)


class Scalars(Arrays):
    """NumPy's scalars, such as `numpy.float32(3)`."""

    name = "scalar"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a scalar; None if it is none."""
        return (dtype_name(x.dtype), ()) if isinstance(x, np.generic) else None

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return a scalar."""
        return super().build(dtype, shape, data)[()]


class DeviceArrays(Arrays):
    """CuPy's arrays; read on the GPU that is current then."""

    name = "gpu_array"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array; None if it is none."""
        # What is seen as one, but has no `get`, belongs to another framework.
        return (dtype_name(x.dtype), x.shape) if hasattr(x, "get") and is_on_gpu(x) else None

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`, when what is queued is done."""
        super().copy(x.get(), out)

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return an array of these elements, in the GPU's memory.

        Raises:
            MissingDependencyError: There is no CuPy, or no GPU.
        """
        from ..gpu import cuda
        return cuda.cupy().asarray(super().build(dtype, shape, data))


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


@dataclass
class Outline:
    """A tree without its arrays' elements.

    Attributes:
        text: JSON that tells everything but the elements.
        leaves: The arrays, by their names in the file.
    """

    text: str = ""
    leaves: dict[str, Leaf] = field(default_factory=dict)


def outline(tree: Any, kinds: Sequence[Kind], root: str) -> Outline:
    """Look through a tree, and copy nothing.

    Args:
        tree: Dicts, lists and tuples of arrays, numbers, texts, True, False and None.
        kinds: The arrays that it may hold.
        root: What to call it in errors.

    Raises:
        ConfigError: It holds something else; names the place.
    """
    found = Outline()

    def visit(part: Any, place: str, path: tuple[str, ...]) -> Any:
        if len(path) > _MOST_LEVELS:
            raise ConfigError(f"{place:.200}… is more than {_MOST_LEVELS} levels deep: does the "
                              f"tree contain itself?")
        if part is None or type(part) in (bool, int, str):
            return part
        if type(part) is float:
            return part if math.isfinite(part) else {"float": repr(part)}
        if type(part) in (list, tuple):
            nodes = [visit(one, f"{place}[{i}]", (*path, str(i))) for i, one in enumerate(part)]
            return nodes if type(part) is list else {"tuple": nodes}
        if type(part) in _DICTS.values():
            return _dict_node(part, place, path, visit)
        return _leaf_node(part, place, path, kinds, found)

    found.text = json.dumps(visit(tree, root, ()), allow_nan=False)
    return found


def _dict_node(part: dict[Any, Any], place: str, path: tuple[str, ...],
               visit: Callable[[Any, str, tuple[str, ...]], Any]) -> Any:
    """Describe a dict: its keys may be numbers, which JSON's own objects would make texts."""
    for key in part:
        if type(key) not in (str, int, bool):
            raise ConfigError(f"{place} has the key {key!r:.80}, a {type(key).__qualname__}; "
                              f"expected a text or a whole number")
    items = [[key, visit(value, f"{place}[{key!r}]", (*path, str(key)))]
             for key, value in part.items()]
    node: dict[str, Any] = {type(part).__name__: items}
    # PyTorch's modules look there for the version that their state has.
    if hasattr(part, "_metadata"):
        node["metadata"] = visit(part._metadata, f"{place}._metadata", (*path, "_metadata"))
    return node


def _leaf_node(part: Any, place: str, path: tuple[str, ...], kinds: Sequence[Kind],
               found: Outline) -> Any:
    for kind in kinds:
        try:
            described = kind.describe(part)
        except ConfigError as exc:
            raise ConfigError(f"{place}: {exc}") from exc
        if described is None:
            continue
        leaf = Leaf(kind, part, *described)
        if leaf.dtype not in STORED and leaf.dtype not in _PAIRS:
            raise ConfigError(f"{place} is of {leaf.dtype}, which the safetensors format does not "
                              f"have; expected one of {', '.join([*STORED, *_PAIRS])}")
        name, number = "/".join(path) or "value", 2
        while name in found.leaves or name == "__metadata__":
            name, number = f"{'/'.join(path)}#{number}", number + 1
        found.leaves[name] = leaf
        return {kind.name: name, "dtype": leaf.dtype, "shape": list(leaf.shape)}
    names = " or ".join(f"{kind.name}s" for kind in kinds)
    raise ConfigError(
        f"{place} is a {type(part).__module__}.{type(part).__qualname__}; a checkpoint holds "
        f"dicts, lists and tuples of {names}, numbers, texts, True, False and None")


def rebuild(text: str, data: Mapping[str, Bytes], kinds: Sequence[Kind]) -> Any:
    """Put a tree together.

    Args:
        text: As in its Outline.
        data: The elements of its arrays, by name; the arrays share this memory.
        kinds: The arrays that it may hold.

    Raises:
        ConfigError: It holds arrays of another kind.
    """
    known = {kind.name: kind for kind in kinds}

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(one) for one in node]
        if not isinstance(node, dict):
            return node
        name, value = next(iter(node.items()))
        if name == "float":
            return float(value)
        if name == "tuple":
            return tuple(build(one) for one in value)
        if name in _DICTS:
            found = _DICTS[name]()
            found.update({key: build(one) for key, one in value})
            if "metadata" in node:
                found._metadata = build(node["metadata"])  # type: ignore[attr-defined]
            return found
        if name not in known:
            raise ConfigError(f"{value!r} is a {name}; load it with the adapter that saved it, "
                              f"as mpiring.torch.Checkpoints does")
        return known[name].build(node["dtype"], tuple(node["shape"]), data[value])

    return build(json.loads(text))
