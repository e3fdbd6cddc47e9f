"""Submits the batch scripts to a real Slurm, and looks at what they give to ranks and leave."""

import json
import os
import re
import subprocess

import pytest
import slurm_cluster
from launching import PROGRAMS, ROOT, SOON_S, installed, needed

pytestmark = pytest.mark.launch

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
TRAIN = ROOT / "slurm" / "train.sbatch"
TRAIN_GPU = ROOT / "slurm" / "train_gpu.sbatch"
BENCH = ROOT / "slurm" / "bench.sbatch"
README = (ROOT / "slurm" / "README.md").read_text()


def launch_block(script):
    rule, end = "\n# --- the same in all scripts", "\n# -----------------"
    _, _, rest = script.read_text().partition(rule)
    return rest.partition(end)[0]


@pytest.mark.any_mpi
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_keep_the_rules(script):
    text = script.read_text()
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len(options) >= 6
    for line in options:
        assert re.fullmatch(r"#SBATCH --\S+ +# .{5,}", line), line
    assert "\nset -euo pipefail\n" in text
    assert "srun --mpi=\"$pmi\" --kill-on-bad-exit=1" in text
    assert not re.search(r"^\s*(source|\.) ", text, re.MULTILINE), "nothing is sourced"
    assert launch_block(script) == launch_block(TRAIN) != ""
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.any_mpi
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_say_how_they_are_submitted(script):
    variables = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    ended = subprocess.run(["bash", script, "train.py"], env=variables, text=True,
                           capture_output=True, timeout=SOON_S)
    assert ended.returncode == 2 and f"usage: sbatch [options] {script.name}" in ended.stderr


def test_ranks_are_placed_and_told_their_cores(slurm):
    """Also arguments with blanks and quotes arrive as they were."""
    places = slurm.submit(TRAIN, PROGRAMS / "where.py", options=["--nodes=4"])
    words = slurm.submit(TRAIN, PROGRAMS / "environment.py", "OMP_NUM_THREADS", "it's a \"b\" $c *",
                         options=["--ntasks-per-node=1", "--cpus-per-task=3"], OMP_NUM_THREADS="")
    shown = places.wait()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), places.output
    assert "places [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4), (2, 0, 4), (2, 1, 4), " \
        "(3, 0, 4), (3, 1, 4)] sum 8.0" in places.output
    assert words.wait()["JobState"] == "COMPLETED", words.output
    given = ["OMP_NUM_THREADS", "it's a \"b\" $c *"]
    for line in (given, f"rank 0: {['3', '-']}", f"rank 1: {['3', '-']}"):
        assert str(line) in words.output


def test_the_wrong_pmi_is_refused(slurm):
    """Where srun speaks none that the library knows, each rank would train for itself."""
    job = slurm.submit(TRAIN, PROGRAMS / "where.py", options=["--ntasks-per-node=1"],
                       SLURM_MPI_TYPE="none")
    assert job.wait()["JobState"] == "FAILED", job.output
    assert "LaunchError: SLURM_STEP_NUM_TASKS=2 (srun) says that 2 ranks" in job.output
    assert "is alone in its MPI world" in job.output and "srun --mpi=pmi2 (MPICH)" in job.output
    assert "places" not in job.output


@pytest.mark.any_mpi
@pytest.mark.usefixtures("machine_code")
def test_the_first_command_of_the_readme_trains(slurm):
    """Its ranks find the machine code: two nodes would compile it twice, while ranks wait."""
    for module in ("sklearn", "safetensors"):
        needed(module)
    first, *_ = re.findall(r"^sbatch (\S+) (.*) --epochs 30$", README, re.MULTILINE)
    job = slurm.submit(ROOT / first[0], first[1], "--epochs", "2")
    assert job.wait()["JobState"] == "COMPLETED", job.output
    assert re.search(r"4 ranks on n\[\d[-,]\d\]: ", job.output), job.output  # whichever are idle
    assert "epoch   2  loss 0.3437" in job.output


@pytest.mark.any_mpi
def test_gpus_are_seen_by_all_ranks_of_a_node(slurm):
    wanted = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=1"]
    seen = slurm.submit(TRAIN_GPU, PROGRAMS / "environment.py", "CUDA_VISIBLE_DEVICES",
                        "MPICH_GPU_SUPPORT_ENABLED", options=[*wanted, "--ntasks-per-node=2"])
    refused = slurm.submit(TRAIN_GPU, PROGRAMS / "where.py",
                           options=[*wanted, "--ntasks-per-node=1"])
    assert seen.wait()["JobState"] == "COMPLETED", seen.output
    assert seen.output.count(f": {['0,1', '1']}") == 4, seen.output
    assert refused.wait()["ExitCode"] == "2:0"
    assert "1 ranks for 2 GPUs: set --ntasks-per-node" in refused.output


@pytest.mark.any_mpi
def test_bench_leaves_tables_and_pictures(slurm, tmp_path):
    installed("matplotlib")
    job = slurm.submit(BENCH, "allreduce", "--sizes", "64K", "--contenders", "mpiring,mpi",
                       "--algorithms", "ring", "--rounds", "1", RESULTS=str(tmp_path / "bench"),
                       options=["--nodes=3", "--ntasks-per-node=1"])
    shown = job.wait()
    assert shown["JobState"] == "COMPLETED", job.output
    for nodes in (1, 2, 3):
        result = json.loads((tmp_path / "bench" / f"{nodes}.json").read_text())
        assert result["environment"]["nodes"] == result["environment"]["ranks"] == nodes
        assert (tmp_path / "bench" / f"{nodes}.png").read_bytes().startswith(b"\x89PNG")
        assert "64" in (tmp_path / "bench" / f"{nodes}.csv").read_text()


@pytest.mark.any_mpi
def test_two_clusters_can_be_up_and_one_ends_alone(slurm):
    with slurm_cluster.running() as other:
        job = other.submit(TRAIN, "-c", "import time; time.sleep(100)", options=["--nodes=1"])
        processes = job.until(lambda: job.processes("time.sleep"), "it runs", 30)
        slurm.await_nodes()
    assert not other.folder.exists()
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    slurm.await_nodes()


@pytest.mark.any_mpi
def test_the_readme_names_every_script_and_real_options():
    for script in SCRIPTS:
        assert f"`{script.name}`" in README
    for command in re.findall(r"^sbatch .*$", README, re.MULTILINE):
        (script,) = re.findall(r"slurm/(\w+\.sbatch)", command)
        assert (ROOT / "slurm" / script).exists(), command
        for program in re.findall(r"examples/\w+\.py", command):
            assert (ROOT / program).exists(), command
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / "slurm" / target).exists(), target
