"""Numbers by which Horovod's functions name their reductions."""

Average, Sum, Adasum, Min, Max, Product = range(6)

# Adasum is a Reducer, not an op of a plain allreduce.
OP_NAMES = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
