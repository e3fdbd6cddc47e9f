"""Tests what launchers' variables say of a process."""

import os

import pytest

from mpiring.launch.environment import (LAUNCHERS, job_end, launched_here, launched_rank,
                                        launched_size, launcher_of, launchers, prints_for_job,
                                        survives_deaths, variables_for_another_job)

# What each sets for rank 2 of 4, which is rank 1 of its node.
TOLD = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "1",
                 "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
    "deepspeed": {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2",
                 "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun"},
    "MVAPICH 2": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "2",
                  "MV2_COMM_WORLD_LOCAL_RANK": "1"},
    "MVAPICH 3": {"MVP_COMM_WORLD_SIZE": "4", "MVP_COMM_WORLD_RANK": "2",
                  "MVP_COMM_WORLD_LOCAL_RANK": "1"},
    "MPICH": {"PMI_SIZE": "4", "PMI_RANK": "2", "PMI_FD": "9", "MPI_LOCALNRANKS": "2",
              "MPI_LOCALRANKID": "1", "HYDI_CONTROL_FD": "7"},
    "Intel MPI": {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1",
                  "PMI_FD": "9", "I_MPI_HYDRA_UUID": "f64e", "HYDRA_BSTRAP_UPSTREAM_FD": "7"},
    "PALS": {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "1", "PALS_APID": "a"},
    "ALPS": {"ALPS_APP_PE": "2"},
    "Flux": {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "1",
             "PMI_SIZE": "4", "PMI_RANK": "2"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2",
              "JSM_NAMESPACE_LOCAL_RANK": "1"},
    "srun": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2",
             "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"},
    "srun with PMI": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2",
                      "SLURM_LOCALID": "1", "PMI_SIZE": "4", "PMI_RANK": "2"},
    "another's PMI": {"PMI_SIZE": "4", "PMI_RANK": "2", "PMI_LOCAL_RANK": "1"},
    "PMIx": {"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-1"},
    "Slurm": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "PyTorchJob": {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "host"},
}
# Their variables hold this process's rank, but not how many there are: at least three.
RANK_ONLY = {"PALS", "ALPS", "PMIx"}


@pytest.mark.parametrize("name", TOLD)
def test_every_launcher_is_recognized(name):
    environ = TOLD[name]
    size, source = launched_size(environ)
    assert size == (3 if name in RANK_ONLY else 4)
    assert source.partition("=")[0] in environ and launchers(environ)[0].title in source
    local = {"ALPS": None, "PMIx": None, "Slurm": None, "PyTorchJob": None}.get(name, 1)
    assert launched_rank(environ) == (None if name == "Slurm" else 2)
    assert launched_rank(environ, local=True) == local
    assert (launcher_of(environ) == "") == (name == "Slurm"), "an allocation starts nothing"
    left = variables_for_another_job(environ)
    assert launchers(left) == [], "another job is not misled"


@pytest.mark.parametrize("name", TOLD)
def test_one_rank_prints_for_its_job(name):
    environ = TOLD[name]
    # Those of a shell in an allocation or a pod, which is no rank, may be left over.
    assert prints_for_job(environ) == (name in ("Slurm", "PyTorchJob"))
    assert prints_for_job({variable: "0" if value == "2" else value
                           for variable, value in environ.items()})
    if name in ("MPICH", "PALS", "srun"):
        started = {**environ, "_MPIRING_RANK_PROCESS": str(os.getppid())}
        assert prints_for_job(started), "a rank's child is no rank"
    assert prints_for_job({})


def test_every_launcher_is_tried():
    assert launched_here(TOLD["MPICH"]) == 2 and launched_here({}) is None
    assert {launchers(environ)[0] for environ in TOLD.values()} == set(LAUNCHERS)


@pytest.mark.parametrize(("environ", "size"), [
    ({}, 1),
    ({"SLURM_NTASKS": "4"}, 4),
    ({"SLURM_NTASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}, 1),
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"}, 2),
    # The shell that salloc opens is a step, too.
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, 4),
    ({"PMI_SIZE": "8"}, 8),
    ({"PMI_SIZE": "", "SLURM_NTASKS": "many"}, 1),
    # mpirun -n 1 torchrun --nproc-per-node 4
    ({**TOLD["MPICH"], "PMI_SIZE": "1", "PMI_RANK": "0", **TOLD["torchrun"]}, 4),
    # srun -n 1 deepspeed --num_gpus 4
    ({**TOLD["srun"], "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **TOLD["deepspeed"]}, 4),
    # mpirun -n 1, where the cluster has exported what its jobs have.
    ({**TOLD["MPICH"], "PMI_SIZE": "1", "PMI_RANK": "0", "WORLD_SIZE": "4", "RANK": "0"}, 1),
    ({"PMIX_RANK": "0"}, 1),
])
def test_the_innermost_launcher_is_believed(environ, size):
    launched, source = launched_size(environ)
    assert launched == size
    assert (source == "") == (not environ or "many" in environ.values())


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False)])
def test_whether_the_launcher_survives_deaths(value, expected):
    assert survives_deaths({"OMPI_MCA_mpi_ft_enable": value}) is expected
    assert not survives_deaths({})


def test_when_slurm_ends_the_job():
    assert job_end({}) is None and job_end({"SLURM_JOB_END_TIME": "0"}) is None
    assert job_end({"SLURM_JOB_END_TIME": "1795284174"}) == 1795284174
    assert job_end({"SLURM_JOB_END_TIME": "Unknown"}) is None
