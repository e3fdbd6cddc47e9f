"""Trains with child processes of a kind, which a signal must not end; run by mpirun.

python signaled_children.py KIND [SIGNAL [before]]

KIND is a start method of DataLoader workers, "pool" or "subprocess"; "before" starts the children
before Stopping. A signal with a name is sent to all processes of each rank, as Slurm does.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import mpiring
from mpiring.resilience import Stopping

PATIENCE_S = 60
# On a busy machine, a rank is late to handle a signal that its workers have also received.
mpiring.resilience.children._PATIENCE_S = PATIENCE_S


class Samples(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(1)


def descendants(pid):
    """Return the numbers of all children of a process, and of their children."""
    children = [int(child) for thread in Path(f"/proc/{pid}/task").iterdir()
                for child in (thread / "children").read_text().split()]
    return children + [pid for child in children for pid in descendants(child)]


def batches(kind):
    """Yield without end what children of this kind produce."""
    if kind == "subprocess":
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while child.poll() is None:
            child.stdin.write("1\n")
            child.stdin.flush()
            yield float(child.stdout.readline())
        raise ChildProcessError(child.returncode)
    if kind == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            while True:
                yield pool.apply_async(float, (1,)).get(PATIENCE_S)
    yield from DataLoader(Samples(), num_workers=2, multiprocessing_context=kind,
                          persistent_workers=True)


def main():
    kind, number, *rest = [*sys.argv[1:], ""]
    comm = mpiring.init()
    loaded = batches(kind)
    if rest[:1] == ["before"]:
        next(loaded)
    with Stopping(comm) as stopping:
        for step, _ in enumerate(loaded):
            if step == 3:
                comm.barrier()
                print(f"rank {comm.rank} is ready", flush=True)
                children = descendants(os.getpid())
                if number:
                    for pid in (*children, os.getpid()):
                        os.kill(pid, signal.Signals[number])
            if stopping.now():
                break
    # Now, because srun may end before it has forwarded the last lines.
    print(f"stopped at step {step}: {stopping.reason}, says rank {comm.rank}", flush=True)
    # The program may need its children after that, as for a last evaluation.
    for _ in range(10):
        next(loaded)
    assert set(descendants(os.getpid())) == set(children) != set(), "a child has ended"
    loaded.close()
    comm.close()


if __name__ == "__main__":
    main()
