"""Host memory: vectors and dtypes, their combination, and memory that processes share."""

from .arrays import (
    COMPLEX, FLOATING, INTEGER, bounds_of, chunks_of, cut, dtype_name, dtype_named, is_finite,
    may_overlap, refuse_unusable, slice_of)
from .pytrees import leaves, mapped
from .reduction import Combine, Reduction
from .tensors import array_of, is_tensor
