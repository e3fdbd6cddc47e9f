"""Tests what the processes that have started a rank tell about it, on made-up ones; no MPI."""

import pytest

from mpiring.launch.environment import launched_by_ancestors, starting_rank

ALONE = 1, ""


@pytest.fixture
def processes(tmp_path):
    """Makes a process: number, parent, name, children; and the text of files."""
    def process(pid, parent, name, children=(), **files):
        folder = tmp_path / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "task" / str(pid) / "children").write_text(" ".join(map(str, children)))
        (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nUid:\t0\t0\n")
        for file, text in {"maps": "", "environ": "", **files}.items():
            (folder / file).write_text(text)
        return tmp_path

    process(1, 0, "init", [100, 200])
    return process


@pytest.mark.parametrize(("name", "others", "count"), [
    ("hydra_pmi_proxy", ["bash"], 2), ("prterun", ["ssh", "python", "python"], 3),
    ("slurmstepd", [], 1), ("mpirun", ["ssh", "srun"], 1), ("tmux: server", ["bash"] * 5, 1)])
def test_ranks_of_a_launcher_on_this_node_are_counted(processes, name, others, count):
    processes(100, 1, name, range(101, 102 + len(others)))
    for pid, other in enumerate(others, 102):
        processes(pid, 100, other)
    processes(101, 100, "sudo", [110])
    counted = launched_by_ancestors(processes(110, 101, "python"), 110)
    assert counted[0] == count
    assert counted == ALONE or counted[1] == (
        f"{name} (process 100) has started {count} processes on this node,")


@pytest.mark.parametrize(("variables", "expected"), [
    ("PMI_SIZE=4\0PMI_RANK=1\0MPI_LOCALNRANKS=2", (
        4, "PMI_SIZE=4 (MPICH's mpirun) of process 100 (bash) promises 4 ranks,")),
    ("SLURM_STEP_NUM_TASKS=1\0SLURM_NTASKS=4\0SLURM_STEP_ID=0", (
        1, "SLURM_STEP_NUM_TASKS=1 (srun) of process 100 (bash) promises 1 ranks,")),
    # A batch script, which starts no ranks by itself.
    ("SLURM_NTASKS=4\0SLURM_JOB_ID=7", ALONE), ("PATH=/bin", ALONE)])
def test_the_variables_of_a_wrapper_are_believed(processes, variables, expected):
    processes(100, 1, "bash", [110], environ=variables)
    assert launched_by_ancestors(processes(110, 100, "python"), 110) == expected


def test_what_a_rank_starts_without_variables_is_meant_to_be_alone(processes):
    processes(100, 1, "mpirun", [110, 111])
    processes(110, 100, "python", [120], environ="PMI_SIZE=2\0PMI_RANK=0\0MPI_LOCALNRANKS=2",
              maps="7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/libmpi.so.12\n")
    processes(111, 100, "python")
    assert launched_by_ancestors(processes(120, 110, "python"), 120) == ALONE


@pytest.mark.parametrize(("variables", "between", "refused"), [
    ({}, "bash", True), ({}, "hydra_pmi_proxy", False),
    ({"_MPIRING_RANK_PROCESS": "99"}, "bash", False),
    ({"MPI_LOCALNRANKS": None, "PMI_SIZE": None}, "bash", False)])
def test_a_child_with_the_variables_of_its_rank(processes, variables, between, refused):
    processes(110, 1, "python", [120])
    processes(120, 110, between, [130])
    told = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "_MPIRING_RANK_PROCESS": "110", **variables}
    told = {name: value for name, value in told.items() if value is not None}
    proc = processes(130, 120, "python")
    assert starting_rank(told, proc, 130) == (110 if refused else None)
    assert starting_rank(told, proc, 110) is None, "the rank itself, also after an exec"
    assert starting_rank(told, proc / "missing", 130) is None


def test_a_system_that_shows_no_other_processes(processes, tmp_path):
    assert launched_by_ancestors(tmp_path / "missing", 7) == ALONE
    assert launched_by_ancestors(processes(110, 100, "python"), 110) == ALONE
    assert launched_by_ancestors(processes(7, 0, "python"), 7) == ALONE
