"""A user's program, to be checked by mypy and pyright; each ignored error must be one."""
import numpy as np
import numpy.typing as npt

import mpiring
from mpiring import AlgorithmName, Communicator, OpName
from mpiring.numpy import DataParallel, DiLoCo

comm = mpiring.init()
x: npt.NDArray[np.float64] = np.ones(3)
y: npt.NDArray[np.float64] = comm.allreduce(x, op="avg", algorithm="ring")
op: OpName = "mean"
algorithm: AlgorithmName = "auto"
comm.allreduce(x, op=op, algorithm=algorithm)
part: Communicator = comm.split(comm.rank % 2)
nothing: None = comm.split(None)
maybe: Communicator | None = comm.split(comm.rank if comm.rank else None)
dp = DataParallel({"w": x}, bucket_bytes=3)
waited_s: float = dp.statistics.exposed_s
config = mpiring.Config(algorithm="ring", stall_timeout_s=3)
outer = DiLoCo({"w": x}, every=3)
comm.allreduce(x, op="summ")  # type: ignore[arg-type]
comm.allreduce(x, algorithm="rung")  # type: ignore[arg-type]
DataParallel({"w": x}, bucket_cap_mb=3)  # type: ignore[call-arg]
comm.Allreduce(x)  # type: ignore[attr-defined]
