"""Elementwise updates of vectors: one source text for numba, NumPy and GPUs."""

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..gpu.interface import DeviceVector
from ..gpu.warps import WarpKernel, warp_kernel
from ..jit import loops
from ..memory.arrays import Array
from ..memory.reduction import quietly

# Number of elements that NumPy updates at a time. With all intermediate results, they fit in the
# level-2 cache.
BLOCK = 16 << 10
# Number of elements that a warp of a GPU updates at a time: four of each vector in each thread.
_KERNEL_BLOCK = 128


class Update:
    """An update of vectors in one pass over memory.

    All backends produce the same bits, because each operation of the text is rounded separately.

    Args:
        name: Unique name.
        vectors, numbers: Names, separated by spaces. All vectors have the same length and the same
            dtype, float32 or float64.
        text: Assignments, one per line, that are both Python and C++. They use names, + - * /,
            parentheses and sqrt(x), but no literals. An assignment to the name of a vector is
            stored, except for `g`, the gradient, which is only read.

    Attributes:
        stored: The names of the vectors that the update writes.
    """

    def __init__(self, name: str, vectors: str, numbers: str, text: str) -> None:
        self.name = name
        self.vectors, self.numbers = vectors.split(), numbers.split()
        self._lines = textwrap.dedent(text).strip().splitlines()
        assigned = [line.partition(" = ")[0] for line in self._lines]
        self.stored = [x for x in self.vectors if x in assigned and x != "g"]

    def __call__(self, vectors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        """Update vectors in place, given values by name; on a GPU, queue the update."""
        xs, values = [vectors[x] for x in self.vectors], [numbers[x] for x in self.numbers]
        n, dtype = xs[0].size, xs[0].dtype
        if isinstance(xs[0], DeviceVector):
            xs[0].device.launch(self._kernel(dtype.name), self._in_blocks, *xs, *values)
            return
        loop = self._loop(dtype.name)
        if loop is not None:
            loop(*xs, n, *values)
        else:
            quietly(self._in_blocks, *xs, *values)

    def _in_blocks(self, *arguments: Any) -> None:
        vectors = arguments[:len(self.vectors)]
        numbers = [vectors[0].dtype.type(x) for x in arguments[len(self.vectors):]]
        stored = [vectors[self.vectors.index(name)] for name in self.stored]
        for start in range(0, vectors[0].size, BLOCK):
            block = slice(start, start + BLOCK)
            results = self._array_function(*[x[block] for x in vectors], *numbers)
            for x, result in zip(stored, results):
                x[block] = result

    @functools.cached_property
    def _array_function(self) -> Callable[..., Sequence[Array]]:
        """A function that returns the new values of the stored vectors."""
        return _define([*self.vectors, *self.numbers],
                       [*self._lines, f"return [{', '.join(self.stored)}]"])

    @functools.cache  # noqa: B019  # updates are constants of modules
    def _pointer_function(self, dtype: str) -> Callable[..., None]:
        """Return a function of pointers, a length and numbers, which numba compiles.

        Each dtype needs a separate function, because numba compiles a function only once.
        """
        at = [f"at_{x}" for x in self.vectors]
        body = [*(f"{x} = at_{x}[i]" for x in self.vectors), *self._lines,
                *(f"at_{x}[i] = {x}" for x in self.stored)]
        return _define([*at, "n", *self.numbers],
                       ["for i in range(n):", *(f"    {line}" for line in body)])

    def _loop(self, dtype: str) -> Callable[..., None] | None:
        """Return the compiled loop; None if numba is missing."""
        signature = [f"{dtype}*"] * len(self.vectors) + ["intp"] + [dtype] * len(self.numbers)
        return loops.loop(f"updates of {dtype} by {self.name}", self._pointer_function(dtype),
                          " ".join(signature))

    @functools.cache  # noqa: B019  # updates are constants of modules
    def _kernel(self, dtype: str) -> WarpKernel:
        """Return the text as a kernel of the vectors and the numbers."""
        kind = {"float32": "float", "float64": "double"}[dtype]
        numbers = "".join(f"const {kind} {x} = job.{x};\n" for x in self.numbers)
        loads = "".join(f"{kind} at_{x}[ROWS];\nload(at_{x}, job.{x} + start, size);\n"
                        for x in self.vectors)
        body = [*(f"{kind} {x} = at_{x}[row];" for x in self.vectors),
                *(f"{line};" for line in self._lines),
                *(f"at_{x}[row] = {x};" for x in self.stored)]
        stores = "".join(f"store(job.{x} + start, at_{x}, size);\n" for x in self.stored)
        return warp_kernel(
            f"{self.name}_{dtype}",
            {**{x: f"{kind} *" for x in self.vectors}, **dict.fromkeys(self.numbers, kind)},
            f"{numbers}{loads}#pragma unroll\nfor (int row = 0; row < ROWS; ++row) {{\n"
            + "".join(f"    {line}\n" for line in body) + f"}}\n{stores}", block=_KERNEL_BLOCK)


def _define(arguments: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
    """Return a function with these lines as its body."""
    text = f"def update({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
    namespace: dict[str, Any] = {"sqrt": np.sqrt}
    exec(text, namespace)  # noqa: S102  # the lines are a module's constant
    function: Callable[..., Any] = namespace["update"]
    return function
