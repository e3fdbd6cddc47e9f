"""Facts of healthy jobs, and the findings of the doctor."""

from mpiring.tools.doctor.command import judge
from mpiring.tools.doctor.facts import (
    JobFacts, Library, Memory, NetworkDevice, Processors, Rank)

MPICH = Library(path="/m/lib/libmpi.so.12", standard="5.0",
                text="MPICH Version: 5.0.2 MPICH Release date: 2026")
OPEN = Library(path="/o/lib/libmpi.so.40", standard="3.1",
               text="Open MPI v5.0.11, package: Open MPI user@host Distribution")
CRAY = Library(path="/opt/cray/lib/libmpi_cray.so.12", standard="3.1",
               text="MPI VERSION : CRAY MPICH version 8.1.29.44 (ANL base 3.4a2)")
INTEL = Library(path="/i/lib/libmpi.so.12", standard="3.1",
                text="Intel(R) MPI Library 2021.13 for Linux* OS")
MVAPICH = Library(path="/v/lib/libmpi.so.12", standard="3.1",
                  text="MVAPICH2 Version : 2.3.7 MVAPICH2 Release date : 2022")

HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"}
PRTE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2"}
PLENTY = Memory(shm_bytes=1 << 33, shm_free_bytes=1 << 33)
INFINIBAND = NetworkDevice(name="mlx5_0", kind="InfiniBand", gbit=200)
ETHERNET = NetworkDevice(name="eth0", kind="Ethernet", gbit=25)


def ranks(count, per_node=None, *, library=MPICH, variables=HYDRA, **facts):
    """Return facts of healthy ranks, each bound to a separate processor."""
    per_node = per_node or count
    healthy = {"python": "3.11.7", "versions": {"numpy": "2.4.6", "mpi4py": "4.1.2"},
               "thread_level": "multiple", "start_method": "fork", "memory": PLENTY}
    return [Rank(**{**healthy, "rank": rank, "host": f"n{1 + rank // per_node}",
                    "node": rank // per_node, "library": library, "variables": variables,
                    "processors": Processors(allowed=frozenset([rank % per_node]), online=per_node),
                    **facts})
            for rank in range(count)]


def job(members, **facts):
    return JobFacts(**{"ranks": members, "size": len(members), "wanted": len(members), **facts})


def findings_of(facts):
    """Return lists of findings by name."""
    names = {}
    for finding in judge(facts):
        names.setdefault(finding.name, []).append(finding)
    return names


def text_of(facts, name, verdict):
    (finding,) = findings_of(facts)[name]
    assert finding.verdict == verdict, finding
    assert finding.remedy or verdict == "ok", finding
    return f"{finding.value} -> {finding.remedy}"
