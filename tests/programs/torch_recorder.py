"""Starts and ends groups where PyTorch attaches its flight recorder to groups; run by mpirun.

PyTorch 2.15 does so. For older versions its hook is imitated, before mpiring.torch is imported.
"""

import inspect
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def imitate_the_hook():
    """Attach to what records nothing itself; to groups in Python that is an error."""
    make = distributed_c10d._new_process_group_helper

    def make_and_attach(*args, **kwargs):
        group, store = make(*args, **kwargs)
        backend = inspect.signature(make).bind(*args, **kwargs).arguments["backend"]
        backends = distributed_c10d.BackendConfig(backend).get_device_backend_map().values()
        if not distributed_c10d._FR_SELF_RECORDING_BACKENDS.issuperset(backends) and (
                group._device_types):
            raise RuntimeError(f"Could not find the default backend type 0 for {group}")
        return group, store

    distributed_c10d._FR_SELF_RECORDING_BACKENDS = {"gloo", "fake", "undefined"}
    distributed_c10d._new_process_group_helper = make_and_attach


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if not hasattr(distributed_c10d, "_maybe_attach_flight_recorder"):
    imitate_the_hook()

import mpiring.torch  # noqa: E402, F401 (registers the back end)

for name in ("mpiring", "cpu:mpiring,cuda:mpiring"):
    dist.init_process_group(name, init_method="mpi://")
    size = dist.get_world_size()
    for group in (None, dist.new_group([*range(size)]), dist.new_group(backend="gloo")):
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [size] * 3
    dist.barrier()
    dist.destroy_process_group()
print("all is well", flush=True)
