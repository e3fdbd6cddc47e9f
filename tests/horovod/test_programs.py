"""Runs programs of Horovod's users on real ranks."""

import re

import pytest
from jobs import run
from launching import PROGRAMS, SOON_S, installed, launch

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _torch():
    installed("torch")


def test_every_name(tmp_path):
    """Under each MPI library."""
    run(3, PROGRAMS / "horovod_names.py", tmp_path).assert_well(3)


@pytest.mark.parametrize("shared_memory", [pytest.param("1", marks=pytest.mark.any_mpi), "0"])
def test_pairs_of_features(tmp_path, shared_memory):
    """On one node, and with each rank on a node of its own, where messages are compressed."""
    ended = run(3, PROGRAMS / "horovod_pairs.py", tmp_path, MPIRING_SHARED_MEMORY=shared_memory)
    ended.assert_well(3)


def test_the_first_operation_between_nodes():
    """One rank waits for it, another one does not, so they cannot tune."""
    run(2, PROGRAMS / "horovod_orders.py", "first", MPIRING_SHARED_MEMORY="0",
        MPIRING_TUNING="1", MPIRING_TUNING_FOLDER="").assert_well(2)


@pytest.mark.any_mpi
@pytest.mark.parametrize(("ranks", "command"), [
    (3, "horovod_optimizer.py"), (3, "horovod_orders.py right"),
    (2, "horovod_on_gpu.py simulated"), (2, "horovod_on_gpu.py accelerator")])
def test_a_program(ranks, command):
    program, *words = command.split()
    run(ranks, PROGRAMS / program, *words).assert_well(ranks)


@pytest.mark.any_mpi
@pytest.mark.parametrize("fusion_bytes", [0, 1 << 20])
def test_memory_orders(fusion_bytes):
    """Fused and not fused."""
    ended = run(2, PROGRAMS / "horovod_memory_orders.py", HOROVOD_FUSION_THRESHOLD=fusion_bytes)
    ended.assert_well(2)


@pytest.mark.any_mpi
def test_a_program_that_does_not_call_shutdown():
    """It has process sets without some ranks."""
    launch(2, PROGRAMS / "horovod_orders.py", "exit").assert_well(2)


@pytest.mark.any_mpi
def test_a_rank_that_exits_early():
    ended = launch(2, PROGRAMS / "horovod_orders.py", "exit", "early")
    assert ended.status != 0 and ended.seconds < SOON_S
    assert ("HorovodInternalError: rank 1 waits for 'allreduce.one more', but Horovod has been "
            "shut down on rank 0") in ended.output, ended.output


@pytest.mark.any_mpi
def test_a_name_that_one_rank_never_submits():
    ended = launch(3, PROGRAMS / "horovod_orders.py", "missing",
                   HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2", HOROVOD_CYCLE_TIME="5")
    assert ended.status != 0 and ended.seconds < SOON_S
    # Whichever is the first to give up.
    assert ("rank 1 did not submit 'allreduce.wanted'; they have allreduce.other" in ended.output or
            "ranks 0,2 did not submit 'allreduce.other'; they have allreduce.wanted" in
            ended.output), ended.output
    assert ended.output.count("ignores HOROVOD_CYCLE_TIME=5 (there are no cycles)") == 1


@pytest.mark.any_mpi
def test_a_rank_that_submits_nothing():
    ended = launch(2, PROGRAMS / "horovod_orders.py", "silent",
                   HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    assert ended.status != 0 and ended.seconds < SOON_S
    assert re.search(r"rank 0 has waited \d+ s for 'allreduce.wanted': some ranks have not "
                     r"submitted operations since then", ended.output), ended.output
    assert "HorovodInternalError: rank 0 waits for 'allreduce.wanted': rank 0: Timed out" in (
        ended.output), ended.output
