"""Names that users write: ops and algorithms as types, and names that other libraries use."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, cast

OpName: TypeAlias = Literal[
    "sum", "mean", "avg", "average", "prod", "max", "min", "band", "bor", "bxor"]
AlgorithmName: TypeAlias = Literal[
    "auto", "nccl", "shared", "native", "ring", "hierarchical", "direct"]
# One copy of the weights for each rank, or for each node.
WeightCopies: TypeAlias = Literal["rank", "node"]

# Other names of ops.
OP_ALIASES: dict[str, OpName] = {"avg": "mean", "average": "mean"}

_IN_PLACE = "which combines x in place and returns it"
_ONE_TO_ONE = "mpi4py's communicators: mpiring has no messages from one rank to another"
# Names of attributes in mpi4py, torch.distributed and Horovod, with the remedy.
COMMUNICATOR: Mapping[str, str] = {
    **dict.fromkeys(("Allreduce", "all_reduce", "allreduce_"), f"allreduce(x), {_IN_PLACE}"),
    **dict.fromkeys(("Iallreduce", "allreduce_async", "allreduce_async_"),
                    "iallreduce(x), which returns a handle to wait for"),
    **dict.fromkeys(("Reduce", "reduce"), f"allreduce(x), {_IN_PLACE} on every rank"),
    **dict.fromkeys(("Reduce_scatter", "Reduce_scatter_block", "reducescatter",
                     "reduce_scatter_tensor"), "reduce_scatter(x), which returns a part of x"),
    **dict.fromkeys(("Allgather", "all_gather", "all_gather_into_tensor", "Gather"),
                    "allgather(x), for which each rank writes its own part of x"),
    **dict.fromkeys(("all_gather_object", "gather", "gather_object"),
                    "allgather_object(obj), which returns a list"),
    **dict.fromkeys(("Bcast", "broadcast_"), "broadcast(x, root=0), in place"),
    "bcast": "broadcast(x, root=0) for arrays, in place, or broadcast_object(obj, root=0)",
    "broadcast_object_list": "broadcast_object(obj, root=0), which returns the object",
    "Allreduce_init": "persistent_allreduce(x)",
    **dict.fromkeys(("Barrier", "monitored_barrier"), "barrier()"),
    **dict.fromkeys(("Get_rank", "get_rank"), "rank"),
    **dict.fromkeys(("Get_size", "get_size", "get_world_size", "world_size"), "size"),
    "cross_rank": "node_rank",
    "cross_size": "num_nodes",
    **dict.fromkeys(("Split", "new_group"), "split(color, key=key)"),
    **dict.fromkeys(("Dup", "Clone"), "split(0)"),
    **dict.fromkeys(("Free", "Disconnect", "destroy_process_group"), "close()"),
    **dict.fromkeys(("Send", "Recv", "Isend", "Irecv", "Sendrecv", "send", "recv", "isend",
                     "irecv"), _ONE_TO_ONE),
}

# Names of arguments in PyTorch's DistributedDataParallel and Horovod, with the remedy.
DATA_PARALLEL: Mapping[str, str] = {
    "bucket_cap_mb": "use bucket_bytes, in bytes: bucket_bytes=25 << 20 for bucket_cap_mb=25",
    "timeout": "use the setting stall_timeout_s, in seconds: MPIRING_STALL_TIMEOUT_S=600, or "
               "mpiring.init(config=mpiring.Config(stall_timeout_s=600))",
    **dict.fromkeys(("device_ids", "output_device"),
                    "leave it out: gradients stay where the model's parameters are; "
                    "model.to(mpiring.torch.device_for()) chooses this rank's GPU"),
    **dict.fromkeys(("process_group", "device_mesh"),
                    "use comm, a mpiring.Communicator, such as comm.split(color)"),
    **dict.fromkeys(("gradient_as_bucket_view", "init_sync"),
                    "leave it out: mpiring always does this"),
    "static_graph": "leave it out: buckets do not depend on the graph; for unused parameters there "
                    "is find_unused_parameters=True",
    "find_unused_parameters": "leave it out: call ready(name) also for a gradient that is zero",
    "broadcast_buffers": "leave it out: only the arrays in params are kept equal",
    "compression": "use reducer, such as mpiring.reducers.Cast()",
    "op": "use reducer: a mean by default, or mpiring.reducers.Adasum()",
    "backward_passes_per_step": "leave it out: accumulate in no_sync() (PyTorch), or call ready() "
                                "in the last pass only (NumPy)",
}

# Names of arguments in torch.distributed.init_process_group, with the remedy.
INIT: Mapping[str, str] = {
    **dict.fromkeys(("backend", "init_method", "store", "device_id"),
                    "leave it out: mpiring uses the MPI that launched the ranks"),
    **dict.fromkeys(("rank", "world_size"), "leave it out: MPI knows it"),
    "comm": "use mpiring.Communicator(comm) for a communicator of mpi4py's",
    "timeout": DATA_PARALLEL["timeout"],
}
CONFIG: Mapping[str, str] = {"timeout": "use stall_timeout_s, in seconds"}

# Arguments of torchft, with the names of mpiring's arguments that mean the same.
TORCHFT_SYNONYMS: Mapping[str, str] = {
    "sync_every": "every", "fragment_sync_delay": "delay", "fragment_update_alpha": "alpha"}
# Other arguments of torchft, with the remedy.
LOCAL_TRAINING: Mapping[str, str] = {
    "manager": "use comm: ranks are those of a communicator",
    "model_fragments": "use fragments=4, by which mpiring divides the model itself",
    "inner_optimizer": "leave it out: call step() after each step of the optimizer",
    "outer_optimizer": "use lr and momentum: the outer optimizer is SGD with Nesterov's momentum",
    "should_quantize": "use reducer, such as mpiring.reducers.Int8()",
    "bucket_cap_mb": DATA_PARALLEL["bucket_cap_mb"],
    **dict.fromkeys(("use_bucketization", "backup_device", "pin_memory"),
                    "leave it out: mpiring decides this"),
}

# Names of Reducers in the setting `reducer`, with the form of a number after a colon.
REDUCERS: Mapping[str, str] = {
    **dict.fromkeys(("mean", "bf16", "float16", "int8", "onebit"), ""),
    "powersgd": "RANK of at least 1", "topk": "DENSITY above 0 and up to 1"}

F = TypeVar("F", bound=Callable[..., Any])


def publish(package: str) -> None:
    """Set the `__module__` of the classes that a package exports to the package.

    Classes that another package has published keep its name.
    """
    exported = sys.modules[package]
    for name in exported.__all__:
        item = vars(exported).get(name)
        if isinstance(item, type) and not hasattr(sys.modules[item.__module__], "__all__"):
            item.__module__ = package


def later(package: str, **homes: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports names from their homes when needed.

    A home is a module, or a module and a name in it: `mpiring.optim` or `mpiring.optim:SGD`.
    """
    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import pkgutil
        item = pkgutil.resolve_name(homes[name])
        if isinstance(item, type):
            item.__module__ = package
        return item

    return find


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names, beginning with the most similar to an unknown name."""
    import difflib
    return sorted(known, key=lambda word: -difflib.SequenceMatcher(None, name, word).ratio())


def reducer_named(text: str) -> tuple[str] | tuple[str, float]:
    """Return the name of a Reducer in a text like "powersgd:4", and its number if there is one.

    Raises ValueError, without a message, if it is not as in REDUCERS.
    """
    name, colon, digits = text.partition(":")
    if name not in REDUCERS or colon and not REDUCERS[name]:
        raise ValueError
    if not colon:
        return (name,)
    value: float = int(digits) if name == "powersgd" else float(digits)
    if not (value >= 1 if name == "powersgd" else 0 < value <= 1):
        raise ValueError
    return name, value


def explaining(hints: Mapping[str, str], synonyms: Mapping[str, str] | None = None,
               ) -> Callable[[F], F]:
    """Decorate a function so that its TypeError for an unknown keyword says what to use instead.

    For keywords without a hint, the most similar argument is named. Synonyms are accepted keywords
    that mean the same as an argument, with its name.
    """
    def decorate(function: F) -> F:
        known = {*inspect.signature(function).parameters} - {"self"}
        is_constructor = function.__name__ == "__init__"

        @functools.wraps(function)
        def explained(*args: Any, **keywords: Any) -> Any:
            if not keywords.keys() <= known:
                function_name = type(args[0]).__name__ if is_constructor else function.__name__
                keywords = _resolved(function_name, keywords, known, hints, synonyms or {})
            return function(*args, **keywords)

        return cast(F, explained)

    return decorate


def _resolved(function_name: str, keywords: Mapping[str, Any], known: Iterable[str],
              hints: Mapping[str, str], synonyms: Mapping[str, str]) -> dict[str, Any]:
    """Return keywords with synonyms replaced by a function's arguments; refuse other keywords."""
    resolved: dict[str, Any] = {}
    for name, value in keywords.items():
        argument = synonyms.get(name, name)
        if argument not in known:
            hint = hints.get(name) or f"did you mean {nearest(name, known)[0]}?"
            raise TypeError(f"{function_name}() has no argument {name!r}; {hint}")
        if argument in resolved:
            both = " and ".join(each for each in keywords if synonyms.get(each, each) == argument)
            raise TypeError(
                f"{function_name}() was given {both}, which mean the same; pass {argument} only")
        resolved[argument] = value
    return resolved
