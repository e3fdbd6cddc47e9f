"""The command `python -m mpiring trace`; works without any MPI library."""

import argparse

from . import merge, report

_DESCRIPTION = """\
Looks at what the ranks of a job did. The job wrote it to a folder:

    MPIRING_TRACE=FOLDER mpirun -n 8 python train.py

`merge` joins the traces of all ranks, on one clock, into a file for
https://ui.perfetto.dev; `report` prints where the time of a step goes. A step ends when
DataParallel has all its gradients. It is made up of
  compute   the program does not wait: forward, backward, optimizer
  data      it waits for a batch of mpiring.data.prefetch(..., comm=comm)
  exposed   it waits for communication
  idle      it waits for another rank, which has not called the operation yet
and hidden is the time within compute in which operations are under way. Below stands which ranks
wait for their data, and which the others wait for, and why, where it is 5 % of a step or more."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `trace merge` and `trace report`."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    merging = commands.add_parser("merge", help="join the traces of all ranks for Perfetto")
    reporting = commands.add_parser("report", help="print where the time of a step goes")
    for command in (merging, reporting):
        command.add_argument("folder", metavar="FOLDER", help="where the traces are")
        command.add_argument("--job", metavar="NAME",
                             help="which job, where the folder has several; its name's beginning")
    merging.add_argument("-o", "--output", metavar="FILE.json",
                         help="default: merged-JOB.json in the folder; -: standard output")
    merging.set_defaults(action=merge.run)
    reporting.add_argument("--plot", metavar="FILE.png",
                           help="draw it, and one step over time (needs matplotlib)")
    reporting.add_argument("--step", type=int, metavar="N",
                           help="which step to draw; default: one of median length")
    reporting.set_defaults(action=report.run)
