"""Says what becomes of a job when a rank dies."""

from collections.abc import Iterator

from ...launch.environment import launcher_of
from .facts import Job
from .findings import NOTE, OK, Finding

TITLE = "After a rank's death"

_CHECKPOINTS = "save checkpoints, and start again from the last (slurm/preemptible.sbatch)"


def findings(job: Job) -> Iterator[Finding]:
    """Tell whether this MPI, launched as it is, lets the other ranks go on."""
    library, variables = job.here.library, job.here.variables
    if not library.text:
        return
    launcher = launcher_of(variables)
    if library.vendor != "Open MPI":
        yield Finding("survival", NOTE, f"{library.name} ends the job when a rank dies",
                      _CHECKPOINTS)
    elif int(library.name.split()[-1].partition(".")[0] or 0) < 5:
        yield Finding("survival", NOTE, f"{library.name} ends the job when a rank dies; since 5.0 "
                      f"the others can go on", _CHECKPOINTS)
    elif launcher == "srun":
        yield Finding("survival", NOTE, "under srun the job ends when a rank dies",
                      f"{_CHECKPOINTS}; or mpirun --with-ft ulfm within the batch script")
    elif variables.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true"):
        yield Finding("survival", OK, "the other ranks can go on (ULFM): mpiring.elastic")
    else:
        yield Finding("survival", NOTE, f"{library.name} can let the other ranks go on, but was "
                      f"not launched so", "mpirun --with-ft ulfm; or " + _CHECKPOINTS)
