"""Opens the default process group by both doors, and says where the ranks have met."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mpiring
import mpiring.torch

dist.init_process_group("mpiring", init_method="mpi://")
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, dist.get_rank())
assert objects == list(range(dist.get_world_size()))
dist.destroy_process_group()

with mpiring.init() as comm:
    mpiring.torch.export_environment(comm)
dist.init_process_group("mpiring", init_method="env://")
x = torch.arange(8.0)
part = torch.empty(2)
dist.reduce_scatter_tensor(part, x)
assert part.tolist() == [8.0 * dist.get_rank(), 8.0 * dist.get_rank() + 4]
part[...] = 1
dist.reduce(part, 3)
assert part[0] == (4 if dist.get_rank() == 3 else 1)
rows = torch.empty(4, dtype=torch.int64)
dist.all_to_all_single(rows, torch.arange(4) + 10 * dist.get_rank())
assert rows.tolist() == [10 * rank + dist.get_rank() for rank in range(4)]
# Groups within groups.
full = torch.arange(24.0).reshape(4, 6)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
assert (distribute_tensor(full, mesh, [Shard(0), Shard(1)]) + 1).full_tensor().equal(full + 1)
print("rank {RANK} of {WORLD_SIZE}, local {LOCAL_RANK} of {LOCAL_WORLD_SIZE}, "
      "met at {MASTER_ADDR}".format(**os.environ), flush=True)
dist.destroy_process_group()
