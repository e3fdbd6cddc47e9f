"""Horovod's reductions: their numbers, and their names in mpiring."""

Average, Sum, Adasum, Min, Max, Product = range(6)
ADASUM, MEAN = "adasum", "mean"
OP_NAMES = {Average: MEAN, Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "prod"}


def op_named(op: int | None, average: bool | None) -> str:
    """Return the name of a reduction in mpiring.

    Args:
        op: Number of a Horovod reduction; None for a mean.
        average: Deprecated argument of Horovod, instead of `op`.

    Raises:
        ValueError: Both were passed, or there is no such op.
    """
    if op is None:
        op = Average if average is None or average else Sum
    elif average is not None:
        raise ValueError(f"op={op!r} and average={average!r}: the op parameter supersedes "
                         f"average; please provide only one of them")
    if op not in OP_NAMES:
        raise ValueError(f"op={op!r}: expected hvd.Average, Sum, Adasum, Min, Max or Product")
    return OP_NAMES[op]
