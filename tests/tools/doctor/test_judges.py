"""Gives the judges facts of machines that are not here, and reads what they say."""

import json
import math
import re
import sys
from dataclasses import replace

import pytest
from examined import (
    CRAY, ETHERNET, HYDRA, INFINIBAND, INTEL, MPICH, MVAPICH, OPEN, PLENTY, PRTE, STEP, findings_of,
    job, ranks, text_of)
from launching import needed

from mpiring import __version__
from mpiring.remedies import get_mpi
from mpiring.tools.doctor import hardware
from mpiring.tools.doctor.command import judge
from mpiring.tools.doctor.facts import (
    ENDING, EXCHANGING, STARTING, Failure, Gpus, Library, Memory, Mpirun, Pair, Processors,
    Slurm, vendor_of, version_of)
from mpiring.tools.doctor.facts import NetworkDevice as Device
from mpiring.tools.doctor.report import Finding, as_json, as_text, location, merge

BY_SLURM = replace(MPICH, text=f"{MPICH.text} MPICH configure: --with-slurm --with-pm=none")


@pytest.mark.parametrize(("text", "vendor", "version"), [
    (MPICH.text, "MPICH", "5.0.2"), (OPEN.text, "Open MPI", "5.0.11"),
    (CRAY.text, "Cray MPICH", "8.1.29.44"), (INTEL.text, "Intel MPI", "2021.13"),
    (MVAPICH.text, "MVAPICH", "2.3.7"), ("HYDRA build details: Version: 4.2.1", "MPICH", "4.2.1"),
    ("mpirun (Open MPI) 4.1.6 Report bugs", "Open MPI", "4.1.6"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024", "Intel MPI", "2021.13"),
    ("another", "", ""),
])
def test_vendors_are_told_by_what_they_say(text, vendor, version):
    assert (vendor_of(text), version_of(text)) == (vendor, version)


def test_a_healthy_job_is_told_so():
    pairs = [Pair(ranks=(0, 1), latency_s=1e-6, bytes_per_s=1e10),
             Pair(ranks=(0, 2), latency_s=2e-6, bytes_per_s=2.3e10)]
    healthy = job(ranks(4, 2, devices=(INFINIBAND, ETHERNET), variables={
        **HYDRA, "RDMAV_FORK_SAFE": "1"}), pairs=pairs, allreduce_s=1e-3, mpirun=Mpirun(
            path="/m/bin/mpirun", text="HYDRA Version: 5.0.2", of_library="/m/bin/mpirun"))
    verdicts = {name: findings[0].verdict for name, findings in findings_of(healthy).items()}
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} == {
        "survival", "torch", "numba", "xxhash", "ml_dtypes", "matplotlib"}
    assert all(len(findings) == 1 and findings[0].ranks == ()
               for findings in findings_of(healthy).values()), "what is the same is told once"
    assert "2.0 us, 184.00 Gbit/s, over mlx5_0" in text_of(healthy, "between nodes", "ok")


@pytest.mark.parametrize(("library", "text", "installed", "verdict", "words"), [
    (MPICH, "mpirun (Open MPI) 4.1.6", "/m/bin/mpirun", "problem", "-> use /m/bin/mpirun"),
    (OPEN, "HYDRA build details: Version: 5.0", "", "problem", "came with /o/lib/libmpi.so.40"),
    (CRAY, "mpirun (Open MPI) 4.1.6", "", "problem", "Cray MPICH 8.1.29.44"),
    (INTEL, "HYDRA build details: Version: 4.1", "", "ok", "the library is /i/lib"),
    (MPICH, "HYDRA build details: Version: 4.1", "/m/bin/mpirun", "warning",
     "another installation"),
    (MPICH, "slurm wrapper", "", "note", "of unknown make"),
    (MPICH, "mpirun (Open MPI) 5.0.11", "/usr/bin/mpiexec.hydra", "problem",
     "use /usr/bin/mpiexec.hydra; or uninstall Open MPI, whose mpirun has taken the place of MPI"),
    (replace(OPEN, path="/usr/lib/libmpi.so.40"), "HYDRA build details: Version: 5.0", "",
     "problem", "-> uninstall MPICH, whose mpirun has taken the place of Open MPI's, and install"),
])
def test_an_mpirun_must_belong_to_the_library(library, text, installed, verdict, words):
    alone = job(ranks(1, library=library, variables={}),
                mpirun=Mpirun(path="/usr/bin/mpirun", text=text, of_library=installed))
    assert words in text_of(alone, "mpirun", verdict)
    assert "none: one rank, so nothing is measured" in text_of(alone, "launcher", "note")


def test_no_library_and_no_mpirun():
    none = job(ranks(1, library=Library(error="cannot load MPI library\nlibmpi.so"),
                     variables={}), size=0)
    assert text_of(none, "MPI library", "problem").endswith(f" -> {get_mpi()}")
    assert "there is none" in text_of(none, "mpirun", "warning")
    nothing = job(ranks(1, library=Library(), variables={}, versions={}), size=0)
    assert "pip install mpi4py" in text_of(nothing, "mpi4py", "problem")
    assert "MPI library" not in findings_of(nothing)


@pytest.mark.parametrize(("library", "variables", "types", "words"), [
    (MPICH, STEP, (), "MPICH 5.0.2 needs pmi2 -> srun --mpi=pmi2 -n 2 python"),
    (MPICH, {**STEP, "SLURM_JOB_NUM_NODES": "2"}, (),
     "garbles what this MPICH sends; in a batch script: "),
    (BY_SLURM, {**STEP, "SLURM_JOB_NUM_NODES": "2"}, (), "-> srun --mpi=pmi2 -n 2 python"),
    (OPEN, {**STEP, "PMI_FD": "3", "SLURM_MPI_TYPE": "pmi2"}, ("pmi2", "pmix"),
     "srun offers PMI by --mpi=pmi2, and Open MPI 5.0.11 needs pmix -> srun --mpi=pmix -n 2"),
    (OPEN, STEP, ("none", "pmi2"), "this Slurm has no --mpi=pmix, which Open MPI needs"),
    (CRAY, STEP, (), "srun --mpi=cray_shasta"),
    (INTEL, STEP, (), "-> I_MPI_PMI_LIBRARY=/path/of/libpmi2.so srun --mpi=pmi2"),
    (OPEN, HYDRA, (), "the launcher is MPICH's, the library is Open MPI 5.0.11"),
    (MPICH, PRTE, (), "the launcher is Open MPI's, the library is MPICH 5.0.2"),
])
def test_worlds_of_one_rank_each_have_a_cause(library, variables, types, words):
    torn = job(ranks(1, library=library, variables=variables), wanted=2,
               wanted_by="SLURM_NTASKS=2", slurm=Slurm(installed=True, mpi_types=types))
    text = text_of(torn, "ranks", "problem")
    assert "alone in its MPI world" in text and words in text
    assert findings_of(replace(torn, wanted=1))["ranks"][0].verdict == "ok"


@pytest.mark.parametrize(("library", "per_node", "is_safe"), [
    (MPICH, 2, False), (MPICH, 4, True), (BY_SLURM, 2, True), (INTEL, 2, True)])
def test_slurms_pmi_starts_only_small_programs_of_pips_mpich_between_nodes(
        library, per_node, is_safe):
    step = {**STEP, "PMI_FD": "3", "SLURM_MPI_TYPE": "pmi2", "SLURM_JOB_NUM_NODES": "2"}
    works = job(ranks(4, per_node, library=library, variables=step), allreduce_s=1e-3,
                mpirun=Mpirun(path="/m/bin/mpirun", of_library="/m/bin/mpirun"))
    text = text_of(works, "launcher", "ok" if is_safe else "warning")
    assert "srun, with PMI by --mpi=pmi2" in text
    assert is_safe or "such as PyTorch" in text and "/m/bin/mpirun -n 4 python" in text


def test_a_shell_within_an_allocation_is_no_launch():
    shell = job(ranks(1, variables={"SLURM_JOB_ID": "7"}), wanted=4, wanted_by="SLURM_NTASKS=4",
                slurm=Slurm(installed=True, mpi_types=("none", "pmi2"), mpi_default="none",
                            kills=False))
    assert "speaks of 4 ranks -> srun --mpi=pmi2 -n 4 p" in text_of(shell, "launcher", "warning")
    assert "export SLURM_MPI_TYPE=pmi2" in text_of(shell, "srun --mpi", "note")
    assert "srun --kill-on-bad-exit=1" in text_of(shell, "srun --kill-on-bad-exit", "note")


def test_ranks_that_an_allocation_does_not_know():
    ranks_of_torch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "WORLD_SIZE": "4", "RANK": "0"}
    torn = job(ranks(1, variables=ranks_of_torch), wanted=4, wanted_by="SLURM_NTASKS=4")
    assert "processes that MPI does not know" in text_of(torn, "launcher", "problem")


@pytest.mark.parametrize(("library", "variables", "memory", "failure", "words"), [
    (MPICH, HYDRA, Memory(shm_bytes=1 << 20, shm_free_bytes=0), ("Bus error (signal 7)",),
     "give /dev/shm more memory"),
    (MPICH, PRTE, PLENTY, ("exit status 16",), "the mpirun of MPICH -n 2"),
    (MPICH, {**STEP, "PMIX_NAMESPACE": "x"}, PLENTY, ("exit status 16",), "srun --mpi=pmi2"),
    (CRAY, {**STEP, "PMI_FD": "3"}, PLENTY, ("exit status 1", False, ("GTL is not linked",)),
     "MPICH_GPU_SUPPORT_ENABLED=0"),
    (MPICH, {**STEP, "PMI_FD": "3"}, PLENTY,
     ("exit status 15", False, ("MPIDI_UCX_comm_addr_exchange(159): Destination is unreachable",)),
     "export MPIR_CVAR_CH4_NETMOD=ofi"),
    (MPICH, HYDRA, PLENTY, ("no end within 30 s", True), "mpirun -iface NAME"),
    (INTEL, HYDRA, PLENTY, ("no end within 30 s", True), "FI_TCP_IFACE=NAME"),
    (MPICH, HYDRA, PLENTY, ("exit status 1",), "mpirun -n 1 python -m mpiring doctor"),
])
def test_a_death_in_mpi_init_has_a_remedy(library, variables, memory, failure, words):
    dead = job(ranks(1, library=library, variables=variables, memory=memory, thread_level=""),
               size=0, wanted=2, failure=Failure(
        stage=STARTING, **dict(zip(("reason", "timed_out", "printed"), failure))))
    text = text_of(dead, "MPI_Init", "problem")
    assert failure[0] in text and words in text
    assert "ranks" not in findings_of(dead)


def test_later_failures():
    late = Failure(stage=EXCHANGING, reason="no end within 30 s", timed_out=True)
    hung = job(ranks(1), wanted=2, size=2, failure=late)
    assert "name the network between them" in text_of(hung, EXCHANGING, "problem")
    ended = job(ranks(2), failure=replace(late, stage=ENDING))
    assert text_of(ended, ENDING, "warning")


@pytest.mark.parametrize(("allowed", "online", "quota", "verdict", "binding"), [
    ([{0}, {1}], 2, None, "ok", ("ok", "each rank has 1 of its own")),
    ([{0}, {0}], 2, None, "warning", ("warning", "bound to the same 1 of 2")),
    ([{0, 1}] * 2, 2, None, "ok", ("note", "-bind-to core")),
    ([{0, 1}] * 4, 2, None, "warning", ("ok", "each rank may use all 2")),
    ([{0, 1}] * 2, 8, None, "ok", ("ok", "share the same 2")),
    ([{0, 1}, {1, 2}], 8, None, "ok", ("warning", "some ranks share")),
    ([{0, 1}, {2, 3}], 8, 1.5, "warning", ("ok", "each rank has 2 of its own")),
])
def test_processors_and_binding(allowed, online, quota, verdict, binding):
    facts = [replace(rank, processors=Processors(
                allowed=frozenset(numbers), online=online, quota=quota or math.inf))
             for rank, numbers in zip(ranks(len(allowed)), allowed)]
    text = text_of(job(facts), "processors", verdict)
    assert ("oversubscribed" in text) == (verdict == "warning")
    assert quota is None or "a cgroup grants 1.5:" in text and "at most 1 rank " in text
    assert binding[1] in text_of(job(facts), "binding", binding[0])


def cores(count):
    return Processors(allowed=frozenset(range(count)), online=count)


def threads(**variables):
    return {"processors": cores(8), "variables": {**HYDRA, **variables}}


def shm(nbytes, free=None):
    return Memory(shm_bytes=nbytes, shm_free_bytes=nbytes if free is None else free)


def of(library, variables, **facts):
    return {"library": library, "variables": variables, **facts}


def with_gpu(library, variables, **facts):
    return of(library, variables, gpus=Gpus(kind="NVIDIA", count=4, driver="570.1", **facts))


CRAYS = {**STEP, "MPICH_GPU_SUPPORT_ENABLED": "1"}


@pytest.mark.parametrize(("name", "verdict", "words", "facts"), [
    ("threads", "warning", "8 per rank in NumPy's BLAS (nothing is set): 32 on 8 processors -> "
     "export OMP_NUM_THREADS=2", threads()),
    ("threads", "ok", "OMP_NUM_THREADS=2,1): 8 on 8", threads(OMP_NUM_THREADS="2,1")),
    ("threads", "note", "export OMP_NUM_THREADS=8",
     {**threads(OMP_NUM_THREADS="1"), "processors": cores(32)}),
    ("threads", "warning", "OPENBLAS_NUM_THREADS=4",
     threads(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="4")),
    ("/dev/shm", "warning", "too small: Open MPI takes 64 MiB for 4 ranks",
     of(OPEN, PRTE, memory=shm(1 << 20))),
    ("/dev/shm", "problem", "8.0 GiB, 1 MiB free, too full",
     {"memory": shm(1 << 33, 1 << 20), "thread_level": ""}),
    ("/dev/shm", "note", "data loaders -> mount -o remount,size=2G", {"memory": shm(1 << 26)}),
    ("/dev/shm", "warning", "there is none", {"memory": shm(None)}),
    ("dead jobs", "note", "7 files of MPI in /dev/shm that no process uses, 3 MiB -> for f in ",
     {"memory": replace(PLENTY, leftover_files=7, leftover_bytes=3 << 20)}),
    ("variables", "warning", "UCX_TLS=tcp,self keeps MPI from using mlx5_0",
     {"devices": (INFINIBAND,), "variables": {**HYDRA, "UCX_TLS": "tcp,self"}}),
    ("variables", "warning", "mlx5_0:1 is not on this node -> unset UCX_NET_DEVICES",
     {"devices": (ETHERNET,), "variables": {**HYDRA, "UCX_NET_DEVICES": "mlx5_0:1"}}),
    ("variables", "warning", "cray-mpich",
     {"devices": (Device(name="cxi0", kind="Slingshot", gbit=200),)}),
    ("devices", "warning", "eth0 (Ethernet, 25 Gbit/s); down: mlx5_0",
     {"devices": (ETHERNET, replace(INFINIBAND, active=False))}),
    ("GPUs", "ok", "4 of NVIDIA, driver 570.1", with_gpu(OPEN, PRTE)),
    ("GPU-aware MPI", "note", "it takes no GPU memory", with_gpu(OPEN, PRTE, aware=False)),
    ("GPU-aware MPI", "ok", "it takes GPU memory", with_gpu(OPEN, PRTE, aware=True)),
    ("GPU-aware MPI", "note", "MPIR_CVAR_ENABLE_GPU=1", with_gpu(MPICH, HYDRA, aware=False)),
    ("GPU-aware MPI", "note", "export MPICH_GPU_SUPPORT_ENABLED=1", with_gpu(CRAY, STEP)),
    ("GPU-aware MPI", "warning", "GTL library is not", with_gpu(CRAY, CRAYS)),
    ("GPU-aware MPI", "ok", "is set", with_gpu(CRAY, CRAYS, gtl=True)),
    ("GPU-aware MPI", "note", "export I_MPI_OFFLOAD=1", with_gpu(INTEL, HYDRA)),
    ("GPU-aware MPI", "ok", "I_MPI_OFFLOAD is set",
     with_gpu(INTEL, {**HYDRA, "I_MPI_OFFLOAD": "1"})),
    ("GPU-aware MPI", "note", "export MV2_USE_CUDA=1", with_gpu(MVAPICH, HYDRA)),
    ("survival", "note", "mpirun --with-ft ulfm", of(OPEN, PRTE)),
    ("survival", "note", "under srun", of(OPEN, STEP)),
    ("survival", "ok", "ULFM", of(OPEN, {**PRTE, "OMPI_MCA_mpi_ft_enable": "1"})),
    ("survival", "note", "since 5.0", of(replace(OPEN, text="Open MPI v4.1.6, package"), PRTE)),
    ("thread level", "warning", "export MPICH_MAX_THREAD_SAFETY=multiple",
     of(CRAY, STEP, thread_level="serialized")),
    ("thread level", "warning", "export MV2_ENABLE_AFFINITY=0",
     of(MVAPICH, HYDRA, thread_level="serialized")),
    ("thread level", "warning", "unset MPI4PY_RC_THREAD_LEVEL",
     of(MPICH, {**HYDRA, "MPI4PY_RC_THREAD_LEVEL": "serialized"}, thread_level="serialized")),
    ("other programs", "note", "load 7.5 on 4 processors",
     {"processors": replace(cores(4), load=7.5)}),
    ("--cpus-per-task", "warning", "export SRUN_CPUS_PER_TASK",
     {"variables": {**STEP, "SLURM_CPUS_PER_TASK": "8"}, "processors": cores(4)}),
    ("fork", "ok", "", {"devices": (INFINIBAND,), "start_method": "forkserver"}),
    ("fork", "ok", "", {"devices": (ETHERNET,)}),
])
def test_what_is_the_same_on_four_ranks(name, verdict, words, facts):
    assert words in text_of(job(ranks(4, **facts)), name, verdict)


def test_limits_and_forks_beside_a_fast_network():
    limited = job(ranks(2, devices=(INFINIBAND,), memory=replace(
        PLENTY, locked_bytes=65536, open_files=256)))
    assert "only 64 KiB may be locked" in text_of(limited, "ulimit -l", "warning")
    assert "ulimit -n 1024" in text_of(limited, "ulimit -n", "note")
    assert "with mlx5_0" in text_of(limited, "fork", "warning")


@pytest.mark.parametrize(("mode", "packages", "variables", "noted"), [
    ("madvise", {"torch": "2.13.0"}, {}, True),
    ("madvise", {"torch": "2.13.0"}, {"THP_MEM_ALLOC_ENABLE": "1"}, False),
    ("madvise", {}, {}, False), ("always", {"torch": "2.13.0"}, {}, False)])
def test_huge_pages_of_tensors(mode, packages, variables, noted):
    facts = ranks(2, memory=replace(PLENTY, huge_pages=mode),
                  versions={"mpi4py": "4.1", **packages}, variables={**HYDRA, **variables})
    if noted:
        assert "export THP_MEM_ALLOC_ENABLE=1" in text_of(job(facts), "huge pages", "note")
    else:
        assert "huge pages" not in findings_of(job(facts))


@pytest.mark.parametrize(("devices", "us", "gbit", "verdict", "words"), [
    ((INFINIBAND, ETHERNET), 25, 9, "warning", "9.00 Gbit/s, far below mlx5_0 (InfiniBand, 200"),
    ((INFINIBAND, ETHERNET), 60, 180, "warning", "UCX_TLS"),
    ((ETHERNET,), 25, 23, "ok", "over eth0 (Ethernet, 25 Gbit/s)"),
    ((ETHERNET,), 25, 0.9, "warning", "OMPI_MCA_btl_tcp_if_include"),
    ((replace(ETHERNET, gbit=0),), 25, 0.9, "ok", "speed is unknown"),
    ((ETHERNET, replace(INFINIBAND, active=False)), 25, 23, "ok", "over eth0"),
])
def test_between_nodes(devices, us, gbit, verdict, words):
    facts = ranks(2, 1, devices=devices)
    pair = Pair(ranks=(0, 1), latency_s=us * 1e-6, bytes_per_s=gbit / 8 * 1e9)
    assert words in text_of(job(facts, pairs=[pair]), "between nodes", verdict)


def test_a_slow_link_is_named():
    pairs = [Pair(ranks=(i, i + 1), latency_s=1e-5, bytes_per_s=1e9 if i == 2 else 3e9)
             for i in range(4)]
    text = text_of(job(ranks(5, 1, devices=(ETHERNET,)), pairs=pairs), "slow link", "warning")
    assert text.startswith("rank 2 on n3, rank 3 on n4: 8.00 Gbit/s, where the median is 24.00")


def test_within_a_node():
    slow = [Pair(ranks=(0, 1), latency_s=1e-3, bytes_per_s=1e8)]
    quiet = job(ranks(2), pairs=slow)
    assert "does not use shared memory" in text_of(quiet, "within a node", "warning")
    busy = ranks(2, processors=Processors(allowed=frozenset((0,)), online=1))
    assert "the processors are busy" in text_of(job(busy, pairs=slow), "within a node", "note")


def test_gpus_and_what_lies_beside_them():
    gpus = Gpus(kind="NVIDIA", count=1, modules=("gdrdrv",), transports=())
    crowded = job(ranks(2, devices=(INFINIBAND,), gpus=gpus))
    assert "for 2 ranks -> start 1 rank" in text_of(crowded, "GPUs", "warning")
    assert "modprobe nvidia_peermem" in text_of(crowded, "GPUDirect RDMA", "note")
    assert "gdrdrv is loaded" in text_of(crowded, "GDRCopy", "ok")
    assert "no modules for GPUs" in text_of(crowded, "UCX transports", "note")
    chosen = job(ranks(2, gpus=gpus, variables={**HYDRA, "UCX_TLS": "rc,sm"}))
    assert "or add cuda" in text_of(chosen, "UCX transports", "warning")
    none = job(ranks(1, variables={"MPICH_GPU_SUPPORT_ENABLED": "1"}))
    assert "export MPICH_GPU_SUPPORT_ENABLED=0" in text_of(none, "GPUs", "warning")


A_GPU, OTHER = "0000:01:00.0", "0000:41:00.0"


def with_gpus(addresses, per_node=None, variables=HYDRA, **facts):
    """Return a job whose ranks have these GPUs."""
    without = ranks(len(addresses), per_node, variables=variables)
    return job([replace(rank, gpus=Gpus(kind="NVIDIA", count=2, visible=(A_GPU, OTHER),
                                        address=address, **facts))
                for rank, address in zip(without, addresses)])


def test_what_mpiring_does_with_gpus():
    own, shared = "mpiring's GPU", "GPU memory within a node"
    assert A_GPU in text_of(with_gpus([A_GPU]), own, "ok")
    assert shared not in findings_of(with_gpus([A_GPU]))
    assert [f.verdict for f in findings_of(with_gpus([A_GPU, OTHER]))[own]] == ["ok"] * 2
    assert "0000:01:00.0, one of 2, for 2 ranks -> " in text_of(
        with_gpus([A_GPU, A_GPU]), own, "note")
    # Nodes have GPUs at equal places.
    assert "one of 2 ->" in text_of(with_gpus([A_GPU, A_GPU], per_node=1), own, "ok")
    assert "summed in place" in text_of(with_gpus([A_GPU, OTHER]), shared, "ok")
    refused = with_gpus([A_GPU, OTHER], sharing_error="invalid device context")
    assert "(invalid device context): data goes through pinned" in text_of(refused, shared, "note")
    missing = job(ranks(1, gpus=Gpus(kind="NVIDIA", count=1, problem="no CuPy: install it")))
    assert "none by CuPy: no CuPy: install it -> do so for CuPy models" in text_of(
        missing, own, "note")
    for setting, words in (("yes", "gets its pointers without a test"),
                           ("auto", "where a trial at the "),
                           ("no", "MPIRING_GPU_AWARE=no: staged")):
        between_nodes = with_gpus([A_GPU, A_GPU], 1, {**HYDRA, "MPIRING_GPU_AWARE": setting})
        assert words in text_of(between_nodes, "GPU memory between nodes", "ok")


def test_versions_of_nccl():
    same = with_gpus([A_GPU, OTHER], nccl="NCCL 2.28.9 (libnccl.so.2)")
    assert "NCCL 2.28.9 (libnccl.so.2)" in text_of(same, "NCCL", "ok")
    none = with_gpus([A_GPU], nccl_problem="no NCCL: pip install it")
    assert "no NCCL: pip install it -> mpiring uses it if" in text_of(none, "NCCL", "note")
    second = replace(same.ranks[1], gpus=replace(same.ranks[1].gpus, nccl="NCCL 2.27.3 (x)"))
    both = findings_of(job([same.ranks[0], second]))["NCCL"]
    assert {(f.verdict, f.value.partition(" (")[0]) for f in both} == {
        ("warning", "NCCL 2.28.9"), ("warning", "NCCL 2.27.3")}


def test_settings():
    wrong = ranks(2)
    wrong[1] = replace(wrong[1], settings_error="MPIRING_X is no setting; known: …")
    text = as_text(judge(job(wrong)), job(wrong))
    assert "problem  MPIRING_* variables: MPIRING_X is no setting; known: …  [rank 1 on n1]" in text
    differing = ranks(4, 2)
    differing[3] = replace(differing[3], variables={**HYDRA, "MPIRING_TUNING": "0"})
    values = {(f.value, f.ranks) for f in findings_of(job(differing))["MPIRING_* variables"]}
    assert values == {("none", (0, 1, 2)), ("MPIRING_TUNING=0", (3,))}


def long_report():
    """Return a report with a long remedy and a command of several lines."""
    facts = ranks(1)
    facts[0] = replace(facts[0], memory=replace(PLENTY, shm_bytes=1 << 20, leftover_files=3))
    return as_text(judge(job(facts)), job(facts))


def test_the_report_fits_the_terminal_and_its_commands_stay_whole(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = long_report()
    remedies = re.findall(r"-> .*", plain)
    assert max(map(len, remedies)) > 100 and "\x1b" not in plain
    for columns, most in (("80", 80), ("300", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        text = long_report()
        assert re.findall(r"-> .*", text) == remedies and text.split() == plain.split()
        lengths = [len(line) for line in text.splitlines() if "-> " not in line]
        assert most - 25 < max(lengths) <= most
        command = re.sub(r"\n +", "\n", text[text.index("for f in"):])
        assert command.startswith(hardware.REMOVE_LEFTOVERS), command


def test_the_report_in_a_terminal(monkeypatch):
    """It has the same content, with styles if rich is there."""
    plain = long_report()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert long_report() == plain
    monkeypatch.undo()
    needed("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for problem in ("1;31", "1"):
        text = long_report()
        assert re.sub(r"\x1b\[[\d;]*m", "", text) == plain
        assert f"\x1b[{problem}mproblem\x1b[0m  /dev/shm: " in text, text
        monkeypatch.setenv("NO_COLOR", "1")


def test_findings_of_all_ranks_are_told_once_and_others_where():
    facts = ranks(8, 4)
    for rank in range(4, 8):
        facts[rank] = replace(
            facts[rank], python="3.12.1", memory=replace(PLENTY, shm_bytes=1 << 26))
    examined_job = job(facts)
    shown = as_text(judge(examined_job), examined_job)
    assert "  warning  Python: 3.12.1  [ranks 4-7 on n2]\n" in shown
    assert shown.startswith(f"mpiring {__version__} doctor: 8 ranks on n1, n2\n")
    report = json.loads(as_json(judge(examined_job), examined_job))
    (shm,) = [f for f in report["findings"] if f["where"] and f["name"] == "/dev/shm"
              and f["verdict"] != "ok"]
    assert (shm["ranks"], shm["where"]) == ([4, 5, 6, 7], "ranks 4-7 on n2")
    assert (report["verdict"], report["ranks"], report["nodes"]) == ("warning", 8, ["n1", "n2"])


def test_places():
    same = job(ranks(4, 2, host="vm"))
    assert location((1, 2, 3), same) == "rank 1 on vm (node 0), ranks 2-3 on vm (node 1)"
    assert location(range(12), job(ranks(12, 2))).endswith("ranks 6-7 on n4 and 2 more nodes")
    assert merge([Finding("a", "ok", "", "", (1,)), Finding("a", "ok", "", "", (0,))], 2) == [
        Finding("a", "ok", "")]
