"""Updates of vectors, element by element: one text, run by numba, by NumPy, or on a GPU."""

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..gpu import kernels
from ..gpu.base import DeviceVector
from ..memory import compiled
from ..memory.arrays import Array
from ..memory.reduction import quietly

# Elements that NumPy updates at a time: with all intermediate results, they stay in the level-2
# cache.
BLOCK = 16 << 10

_KERNEL = """
typedef %(kind)s T;
__device__ inline T root_of(T x) { return %(sqrt)s(x); }
#define sqrt root_of
struct Job { %(pointers)s long long n; %(numbers)s };

extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(const Job job) {
    %(constants)s
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long i = thread; i < job.n; i += (long long)gridDim.x * blockDim.x) {
        %(load)s
        %(text)s
        %(store)s
    }
}
#undef sqrt
"""


class Update:
    """An update of vectors in one pass over memory.

    All ways of running it have the same bits: each operation of the text is rounded by itself.

    Args:
        name: Different from all others'.
        vectors: Names, separated by spaces. All vectors are of one length and one dtype, float32
            or float64.
        numbers: Names, separated by spaces.
        text: Assignments, one per line, that are both Python and C++: names, + - * /, parentheses
            and sqrt(x), without literals. What is assigned to a vector's name is stored, except
            to `g`, the gradient, which is only read.

    Attributes:
        vectors, numbers: The names.
        stored: Those of the vectors that are written.
    """

    def __init__(self, name: str, vectors: str, numbers: str, text: str) -> None:
        self.name = name
        self.vectors, self.numbers = vectors.split(), numbers.split()
        self._lines = textwrap.dedent(text).strip().splitlines()
        assigned = [line.partition(" = ")[0] for line in self._lines]
        self.stored = [x for x in self.vectors if x in assigned and x != "g"]

    def __call__(self, vectors: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        """Update vectors in place; on a GPU, queue to do so.

        Args:
            vectors, numbers: By name; others are ignored.

        Collective: no. Blocking: yes, in host memory.
        """
        xs, values = [vectors[x] for x in self.vectors], [numbers[x] for x in self.numbers]
        n, dtype = xs[0].size, xs[0].dtype
        if isinstance(xs[0], DeviceVector):
            if n:
                xs[0].device.launch(
                    self.kernel(dtype), n, n=n, **dict(zip(self.numbers, values)),
                    **{f"at_{name}": x.address for name, x in zip(self.vectors, xs)})
            return
        loop = self._loop(dtype.name)
        if loop is not None:
            loop(*xs, n, *values)
        else:
            quietly(self._in_blocks, xs, [dtype.type(x) for x in values])

    def _in_blocks(self, vectors: Sequence[Array], numbers: Sequence[Any]) -> None:
        stored = [vectors[self.vectors.index(name)] for name in self.stored]
        for start in range(0, vectors[0].size, BLOCK):
            here = slice(start, start + BLOCK)
            for x, result in zip(stored, self._of_arrays(*[x[here] for x in vectors], *numbers)):
                x[here] = result

    @functools.cached_property
    def _of_arrays(self) -> Callable[..., Sequence[Array]]:
        """A function that returns the new values of the vectors that are stored."""
        return _made([*self.vectors, *self.numbers],
                     [*self._lines, f"return [{', '.join(self.stored)}]"])

    @functools.lru_cache(maxsize=None)  # noqa: B019  # updates are constants of modules
    def _of_pointers(self, dtype: str) -> Callable[..., None]:
        """Return a function for numba to compile, of pointers, a length and numbers.

        One for each dtype, since it is compiled once.
        """
        at = [f"at_{x}" for x in self.vectors]
        return _made([*at, "n", *self.numbers], ["for i in range(n):", *(f"    {line}" for line in [
            *(f"{x} = at_{x}[i]" for x in self.vectors), *self._lines,
            *(f"at_{x}[i] = {x}" for x in self.stored)])])

    def _loop(self, dtype: str) -> Callable[..., None] | None:
        """Return the compiled loop; None where numba is missing."""
        signature = [f"{dtype}*"] * len(self.vectors) + ["intp"] + [dtype] * len(self.numbers)
        return compiled.loop(f"updates of {dtype} by {self.name}", self._of_pointers(dtype),
                             " ".join(signature))

    @functools.lru_cache(maxsize=None)  # noqa: B019  # updates are constants of modules
    def kernel(self, dtype: "np.dtype[Any]") -> kernels.Kernel:
        """Return the kernel that does it on a GPU."""
        kind, root = {4: ("float", "sqrtf"), 8: ("double", "sqrt")}[dtype.itemsize]
        name = f"mpiring_{self.name}_{kind}"
        return kernels.Kernel(name, _KERNEL % {
            "kind": kind, "sqrt": root, "name": name, "threads": kernels.THREADS,
            "pointers": " ".join(f"T *at_{x};" for x in self.vectors),
            "numbers": " ".join(f"T {x};" for x in self.numbers),
            "constants": " ".join(f"const T {x} = job.{x};" for x in self.numbers),
            "load": " ".join(f"T {x} = job.at_{x}[i];" for x in self.vectors),
            "text": "\n        ".join(f"{line};" for line in self._lines),
            "store": " ".join(f"job.at_{x}[i] = {x};" for x in self.stored),
        }, np.dtype([*((f"at_{x}", "u8") for x in self.vectors), ("n", "i8"),
                     *((x, dtype) for x in self.numbers)], align=True))


def _made(arguments: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
    """Return a function of these lines."""
    text = f"def update({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
    namespace: dict[str, Any] = {"sqrt": np.sqrt}
    exec(text, namespace)  # noqa: S102  # of a module's constant
    function: Callable[..., Any] = namespace["update"]
    return function
