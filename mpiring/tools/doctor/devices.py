"""Looks at what mpiring would find of GPUs in this process."""

from dataclasses import replace

from ...errors import MpiringError
from .facts import Gpus

# Processes share whole blocks of this size.
_BLOCK_BYTES = 2 << 20


def usable(gpus: Gpus, place: int) -> Gpus:
    """Return what CuPy sees, beside what the node has, and whether memory can be shared.

    Args:
        gpus: Of the node.
        place: Of this rank among those of its node, who take GPUs in turn.
    """
    if gpus.kind != "NVIDIA":
        return gpus
    try:
        from ...gpu import cuda
        package = cuda.cupy()
        count = package.cuda.runtime.getDeviceCount()
        seen = tuple(str(package.cuda.Device(index).pci_bus_id) for index in range(count))
        device = cuda.device(place % count)
        try:
            device.gpu.export(device.allocate(_BLOCK_BYTES))
            unshared = ""
        except OSError as error:
            unshared = str(error)
    # A look must not end the examination: CUDA's own errors are RuntimeErrors.
    except (MpiringError, RuntimeError, ImportError, MemoryError) as error:
        return replace(gpus, problem=" ".join(str(error).split()) or type(error).__name__)
    return replace(gpus, seen=seen, own=seen[place % count], unshared=unshared)
