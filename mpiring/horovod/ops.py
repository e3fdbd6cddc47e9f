"""Horovod's reductions: their numbers, and their names in mpiring."""

Average, Sum, Adasum, Min, Max, Product = range(6)
ADASUM, MEAN = "adasum", "mean"
OP_NAMES = {Average: MEAN, Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "prod"}


def op_named(op: int | None, average: bool | None) -> str:
    """Return the name of a reduction in mpiring.

    `op` is the number of a Horovod reduction, or None for a mean; `average` is Horovod's deprecated
    argument. Raises ValueError if both were passed, or there is no such op.
    """
    if op is None:
        op = Average if average is None or average else Sum
    elif average is not None:
        raise ValueError(f"op={op!r} and average={average!r}: the op parameter supersedes "
                         f"average; please provide only one of them")
    if op not in OP_NAMES:
        raise ValueError(f"op={op!r}: expected hvd.Average, Sum, Adasum, Min, Max or Product")
    return OP_NAMES[op]
