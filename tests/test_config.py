"""Tests where settings come from, and that bad ones are refused."""

import dataclasses

import numpy as np
import pytest

from mpiring import Config, ConfigError
from mpiring.config import (LAUNCHERS, launched_rank, launched_size, launcher_of, launchers,
                            survives_deaths, variables_for_another_job)


def test_defaults_variables_and_arguments(monkeypatch):
    assert Config().stall_timeout_s == 600 and Config().algorithm == "auto"
    monkeypatch.setenv("MPIRING_STALL_TIMEOUT_S", "5")
    monkeypatch.setenv("MPIRING_ABORT_ON_EXCEPTION", "0")
    monkeypatch.setenv("MPIRING_ALGORITHM", "ring")
    config = Config(algorithm="native")
    assert config.stall_timeout_s == 5.0 and config.abort_on_exception is False
    assert config.algorithm == "native", "an argument goes before the variable"


def test_every_field_is_described_and_has_a_default():
    for entry in dataclasses.fields(Config):
        assert f"{entry.name}:" in Config.__doc__
        assert getattr(Config(), entry.name) == entry.metadata["default"]


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().algorithm = "ring"


@pytest.mark.parametrize(("name", "value", "message"), [
    ("MPIRING_STALL_TIMEOUT", "5", "did you mean MPIRING_STALL_TIMEOUT_S"),
    ("MPIRING_COLOUR", "red", "known: MPIRING_ABORT_ON_EXCEPTION"),
    ("MPIRING_STALL_TIMEOUT_S", "soon", "MPIRING_STALL_TIMEOUT_S='soon': expected a number"),
    ("MPIRING_STALL_TIMEOUT_S", "-1", "MPIRING_STALL_TIMEOUT_S=-1.0: expected a finite number"),
    ("MPIRING_ABORT_ON_EXCEPTION", "maybe", "='maybe': expected .* in a variable 1 or 0"),
    ("MPIRING_ALGORITHM", "tree", "MPIRING_ALGORITHM='tree': expected one of auto, ring"),
    ("MPIRING_TRACE", "1", "MPIRING_TRACE='1': expected a folder"),
    ("MPIRING_TUNING_FOLDER", "here", "MPIRING_TUNING_FOLDER='here': expected an absolute path"),
])
def test_bad_variables(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Config()


@pytest.mark.parametrize(("field", "value", "message"), [
    ("stall_timeout_s", -1, "Config.stall_timeout_s=-1.0: expected a finite number of seconds, 0"),
    ("stall_warning_s", float("nan"), "expected a finite number"),
    ("max_pause_s", float("inf"), "expected a finite number"),
    ("stall_timeout_s", np.float64(3), None),
    ("operations_in_flight", np.int64(3), None),
    ("stall_timeout_s", 3, None),
    ("stall_timeout_s", "3", None),
    ("operations_in_flight", 0, "expected 1 or more"),
    ("operations_in_flight", 1.5, "expected a whole number"),
    ("operations_in_flight", True, "expected a whole number"),
    ("algorithm", 3, "expected text"),
    ("digest_steps", -1, "Config.digest_steps=-1: expected 0 or more"),
    ("digest_steps", 3, None),
    ("digest_action", "x", "Config.digest_action='x': expected one of stop, restore"),
])
def test_bad_arguments(field, value, message):
    if message is None:
        assert getattr(Config(**{field: value}), field) == 3
        return
    with pytest.raises(ConfigError, match=message):
        Config(**{field: value})


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
    "Intel MPI": {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
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
# These tell which rank this is, but not how many there are: at least three.
RANK_ONLY = {"PALS", "ALPS", "PMIx"}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_launcher_tells(name):
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


def test_every_launcher_is_tried():
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
    found, source = launched_size(environ)
    assert found == size
    assert (source == "") == (not environ or "many" in environ.values())


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False)])
def test_the_launcher_tells_whether_deaths_are_survived(value, expected):
    assert survives_deaths({"OMPI_MCA_mpi_ft_enable": value}) is expected
    assert not survives_deaths({})
