"""Starts a real Slurm with four nodes on this machine, for tests, and stops it again.

Each node is a network namespace with a separate address and host name, so MPI sees four hosts. All
processes (munged, slurmctld, the slurmds and the jobs) are in the process namespace of one process,
the holder. When the holder ends, the kernel ends everything in the namespace, and nothing else.
Each holder has separate ports and sockets, so several Slurms can run at once.

Needs Linux, root, slurm-wlm, munge, iproute2 and util-linux; libpmix-dev for `srun --mpi=pmix`.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import HANG_S, ROOT, SOON_S, environment, missing

NODES = ("n1", "n2", "n3", "n4")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "setpriv")

# It ends at the end of its input, at the latest when the process of the tests dies.
_HOLDER = """
set -e
mount -t tmpfs none /run
mkdir /run/netns /run/munge /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t tmpfs -o size=200k none "$1/small"
mount --bind "$1/hosts" /etc/hosts
hostname head
ip link set lo up
ip link add switch0 type bridge
ip addr add 10.78.0.254/24 dev switch0
ip link set switch0 up
for i in 1 2 3 4; do
  ip netns add n$i
  ip link add port$i type veth peer name eth0 netns n$i
  ip link set port$i master switch0 up
  ip -n n$i addr add 10.78.0.$i/24 dev eth0
  ip -n n$i link set eth0 up
  ip -n n$i link set lo up
done
echo ready
cat
# More than one last command, so that the shell stays, and reaps whom daemons leave behind.
exit
"""

# /sys shows the network devices of the namespace in which it was mounted, and UCX reads it.
_NODE = """
set -e
hostname "$0"
mount -t tmpfs none /dev/shm
mount -t sysfs none /sys
mount --rbind /run/cgroup /sys/fs/cgroup
exec slurmd -N "$0"
"""

_HOSTS = "127.0.0.1 localhost\n10.78.0.254 head\n" + "".join(
    f"10.78.0.{i} {node}\n" for i, node in enumerate(NODES, 1))

# More CPUs than the machine has, so that jobs may share a node. All waiting times are short: until
# a requeued job may start (cred_expire), from SIGTERM to SIGKILL (KillWait), and until a node that
# does not answer counts as down (SlurmdTimeout, MessageTimeout: together about 15 s).
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# PMIx keeps files of the ranks there; nodes that are one machine need a folder each.
TmpFS={folder}/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
KillWait=10
SlurmdTimeout=9
MessageTimeout=5
MinJobAge=3600
NodeName=n[1-4] CPUs=8 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""
_GPUS = "NodeName=n[1-4] Name=gpu File=/dev/null,/dev/zero\n"


@dataclass
class Slurm:
    """A running Slurm.

    Attributes:
        folder: Folder of configuration, logs and state; `small` in it is a disk of 200 kB.
        holder: First process in the namespaces.
    """

    folder: Path
    holder: int

    def command(self, *words):
        """Return the command line that runs a command on the login node."""
        inside = ["nsenter", "--target", str(self.holder), "--mount", "--net", "--uts", "--pid"]
        return [*inside, f"--wd={ROOT}", "setpriv", "--pdeathsig", "KILL", *map(str, words)]

    def environment(self, **variables):
        """Return the variables of a user: those of this process, without variables of Slurm."""
        inherited = {name: value for name, value in environment().items()
                     if not name.startswith(("SLURM", "SBATCH"))}
        # UCX detects that all nodes share one memory, and Open MPI then waits forever. srun does
        # not report that ranks outnumber the cores, so Open MPI would spin.
        openmpi = {"UCX_TLS": "tcp,self", "OMPI_MCA_mpi_yield_when_idle": "1"}
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        return {**openmpi, **inherited, **ours, **variables}

    def run(self, *words, timeout_s=HANG_S, **variables):
        """Run a command on the login node to its end; its stderr joins its stdout."""
        return subprocess.run(
            self.command(*words), env=self.environment(**variables), timeout=timeout_s, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)

    def must(self, *words):
        """Run a command that must not fail, and return its output."""
        ended = self.run(*words)
        assert ended.returncode == 0, f"{words}: {ended.stdout}"
        return ended.stdout

    def submit(self, script, *words, options=(), **variables):
        """Submit a batch script with its arguments, and return the job."""
        folder = Path(tempfile.mkdtemp(prefix="job-", dir=self.folder))
        ended = self.run("sbatch", "--parsable", f"--output={folder}/log", *options, script,
                         *words, **variables)
        assert ended.returncode == 0, ended.stdout
        return Job(self, int(ended.stdout.split()[-1]), folder)

    def start_node(self, node):
        """Start a node's daemon."""
        for name in ("spool", "tmp"):
            (self.folder / f"{name}-{node}").mkdir(exist_ok=True)
        self.must("nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "--mount",
                  "sh", "-c", _NODE, node)

    def kill_node(self, node):
        """Kill a node's daemon, like a crash; its child processes continue."""
        pid = (self.folder / f"slurmd-{node}.pid").read_text().strip()
        self.must("kill", "-KILL", pid)

    def await_nodes(self, timeout_s=SOON_S):
        """Wait until all nodes are up, or fail with the logs of the daemons."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            shown = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
            states = shown.stdout.split()
            # Jobs of other tests may exist.
            if len(states) == len(NODES) and {"idle", "mixed", "allocated"}.issuperset(states):
                return
            time.sleep(0.2)
        logs = "".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
        pytest.fail(f"not all nodes are up after {timeout_s} s: {shown.stdout}\n{logs}")


@dataclass
class Job:
    """A submitted job.

    Attributes:
        slurm: Slurm that runs it.
        number: Number of the job.
        folder: Folder of the job; the file `log` in it is the output.
    """

    slurm: Slurm
    number: int
    folder: Path

    @property
    def output(self):
        """Output of the job so far."""
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def show(self):
        """Return the fields of `scontrol show job`."""
        text = self.slurm.must("scontrol", "--oneliner", "show", "job", self.number)
        return dict(re.findall(r"([\w/:]+)=(\S*)", text))

    def wait(self, *states, timeout_s=HANG_S):
        """Wait until the job is in one of the states, by default final ones; return `show()`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        return self.until(lambda: (shown := self.show())["JobState"] in (states or ended) and shown,
                          f"the job is {' or '.join(states) or 'over'}", timeout_s)

    def wait_for(self, pattern, timeout_s=HANG_S):
        """Wait until the output of the job matches a regular expression."""
        self.until(lambda: re.search(pattern, self.output, re.MULTILINE), f"it prints {pattern!r}",
                   timeout_s)

    def until(self, condition, goal, timeout_s):
        """Wait for a condition and return its value; if late, fail with the job's output."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"job {self.number}: {timeout_s} s, and not yet that {goal}:\n"
                            f"{self.show()}\n{self.output[-5000:]}")
            time.sleep(0.2)
        return value

    def processes(self, program=""):
        """Return the processes of the job whose command line contains a string."""
        of_job = f"SLURM_CONF={self.slurm.folder}/slurm.conf", f"SLURM_JOB_ID={self.number}"
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_text(errors="replace").split("\0")
                command = (process / "cmdline").read_text(errors="replace")
                if program in command and set(of_job) <= set(variables):
                    pids.append(int(process.name))
        return sorted(pids)

    def cancel(self, *options):
        """Cancel the job, or call scancel with other options."""
        self.slurm.must("scancel", *options, self.number)


def _missing():
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return missing if os.geteuid() == 0 else [*missing, "root"]


def _write_configuration(folder):
    (folder / "hosts").write_text(_HOSTS)
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text(_GPUS)
    (folder / "state").mkdir()
    (folder / "small").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)


def _start_daemons(slurm):
    folder = slurm.folder
    slurm.must("munged", "--force", f"--key-file={folder}/munge.key",
               f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed")
    slurm.must("slurmctld")
    for node in NODES:
        slurm.start_node(node)
    slurm.await_nodes()


@contextlib.contextmanager
def running():
    """Run a Slurm during a `with` block; skip, or fail in CI, if that is impossible."""
    if needs := _missing():
        missing(f"a Slurm needs {', '.join(needs)}: apt-get install slurm-wlm munge iproute2")
    folder = Path(tempfile.mkdtemp(prefix="mpiring-slurm-"))
    # munged and Slurm check that every user can enter the folder.
    folder.chmod(0o755)
    _write_configuration(folder)
    process = subprocess.Popen(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
         "sh", "-c", _HOLDER, "slurm", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True)
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        slurm = Slurm(folder, int(children[0]))
        _start_daemons(slurm)
        yield slurm
    finally:
        # Closes the holder's input, and returns after the kernel has ended all its processes.
        process.communicate()
        shutil.rmtree(folder)
