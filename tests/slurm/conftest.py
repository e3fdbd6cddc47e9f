"""Starts early what waits for a time limit, so that it is over when test_slurm_time.py comes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import slurm_cluster
from launching import PROGRAMS, ROOT, needed

TRAIN = ROOT / "slurm" / "train.sbatch"
PREEMPTIBLE = ROOT / "slurm" / "preemptible.sbatch"
EPOCHS = 3


@dataclass
class Training:
    """A job that trains and may be disturbed.

    Attributes:
        job: The job.
        folder: Of its checkpoints; it saves its weights there, too.
    """

    job: slurm_cluster.Job
    folder: Path

    def weights(self):
        """Return the bits of all ranks' weights."""
        files = sorted(self.folder.glob("weights*.npz"))
        return [{name: values.tobytes() for name, values in np.load(file).items()}
                for file in files]


class Trainings:
    """Submits jobs that train on two nodes, and knows what they end with when left alone.

    Attributes:
        slurm: Where.
        limited: A job that outlives its time limit; Slurm looks every 30 s, and counts minutes.
        warned: A training that gets USR1 15 to 45 s after its begin: Slurm sends it 30 s early.
    """

    def __init__(self, slurm, folder):
        self.slurm, self._folder = slurm, folder
        self.limited = slurm.submit(TRAIN, "-c", "import time; time.sleep(300)",
                                    options=["--nodelist=n1", "--nodes=1", "--time=1"])
        self.warned = self.start("warned", "--time=2", "--signal=B:USR1@75", step_s=2.5)
        self.undisturbed = self.start("undisturbed", step_s=0)

    def start(self, name, *options, nodes="n[1-2]", step_s=2, checkpoint=None, **variables):
        """Submit a training; after 20 of 45 steps, its first attempt takes `step_s` for each."""
        folder = self._folder / name
        folder.mkdir()
        example = ROOT / "examples" / "train_numpy.py"
        job = self.slurm.submit(
            PREEMPTIBLE, PROGRAMS / "slow_attempt.py", step_s, example, "--epochs", EPOCHS,
            "--checkpoint", checkpoint or folder, "--save", folder / "weights",
            options=["--ntasks-per-node=1", f"--nodelist={nodes}", *options], **variables)
        return Training(job, folder)


@pytest.fixture(scope="session")
def trainings(slurm, tmp_path_factory):
    """Return what starts trainings; some are under way."""
    for module in ("sklearn", "threadpoolctl"):
        needed(module)
    return Trainings(slurm, tmp_path_factory.mktemp("trainings"))
