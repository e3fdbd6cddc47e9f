"""Simulates a cluster on one machine: hosts with their own addresses and slow links.

Each host is a network namespace with a rate-limited link to a bridge. MPICH starts
ranks on these hosts as on real ones. All namespaces belong to one process, the
holder. When the holder ends for any reason, the kernel ends all processes in the
namespaces, including the ranks.

Needs Linux, root, iproute2, util-linux and MPICH's mpiexec.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import ConfigError, LaunchError, MissingDependencyError
from ...provisional import launch, remedies

PLACEMENTS = ("block", "round-robin")

_TOOLS = {"ip": "iproute2", "tc": "iproute2",
          "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
_MAX_HOSTS = 250
# File in which `lab up` records the lab that it leaves running.
_RECORD = Path("/run/mpiring-lab.json")
# By default, UCX would use the machine's shared memory instead of the links.
_UCX = ("UCX_TLS=tcp,self", "UCX_NET_DEVICES=eth0")

_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")

# This script runs in the holder's namespaces. MPICH's launcher uses
# `remote-shell [options] host command…` in place of ssh.
_SETUP = r"""
set -e
mount -t tmpfs none /run
mkdir /run/netns
cat >/run/remote-shell <<'EOF'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "host${host##*.}" sh -c "cd \"$LAB_FOLDER\" && $*"
EOF
chmod 755 /run/remote-shell
ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.77.0.254/24 dev bridge0
ip link set bridge0 up
for i in $(seq 1 "$1"); do
  ip netns add host$i
  ip link add port$i type veth peer name eth0 netns host$i
  ip link set port$i master bridge0 up
  ip -n host$i addr add 10.77.0.$i/24 dev eth0
  ip -n host$i link set eth0 up
  ip -n host$i link set lo up
  tc qdisc add dev port$i root tbf rate "$2" burst 128kb latency 400ms
  tc -n host$i qdisc add dev eth0 root tbf rate "$2" burst 128kb latency 400ms
done
echo ready
eval "$3"
"""


@dataclass(frozen=True)
class Lab:
    """A running lab, whose first host is number 1.

    The holder is a process number. The rate, in tc's notation, is that of each link in each
    direction.
    """

    holder: int
    hosts: int
    rate: str

    def run(self, command: Sequence[str], *, hosts: int | None, ranks_per_host: int,
            placement: str) -> int:
        """Run a command with ranks on the first hosts, or on all, and return mpiexec's exit status.

        The placement "block" fills one host after another; "round-robin" assigns ranks to the hosts
        in turn.

        Raises:
            ConfigError: A number is below 1, or the lab has fewer hosts.
        """
        hosts = self.hosts if hosts is None else hosts
        if not 1 <= hosts <= self.hosts or ranks_per_host < 1:
            raise ConfigError(
                f"{hosts} hosts with {ranks_per_host} ranks each: the lab has {self.hosts} hosts, "
                f"and at least one of each is needed")
        count = f":{ranks_per_host}" if placement == "block" else ""
        names = ",".join(f"10.77.0.{host}{count}" for host in range(1, hosts + 1))
        folder = os.getcwd()
        options = (f"--hosts {hosts} --ranks-per-host {ranks_per_host} "
                   f"--rate {self.rate} --placement {placement}")
        mpiexec = shlex.join([
            *_DIES_WITH_PARENT, "env", f"LAB_FOLDER={folder}", f"{launch.LAB_OPTIONS}={options}",
            *_UCX, _mpich_mpiexec(),
            "-launcher", "ssh", "-launcher-exec", "/run/remote-shell", "-iface", "bridge0",
            "-hosts", names, "-n", str(hosts * ranks_per_host), *command])
        job = subprocess.Popen(
            [*_DIES_WITH_PARENT, *self._nsenter(),
             "sh", "-c", f"cd {shlex.quote(folder)} && exec {mpiexec}"],
            stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return job.wait()
        except BaseException:
            # When interrupted, mpiexec ends its ranks. Other processes die with their parent.
            os.killpg(job.pid, signal.SIGINT)
            job.wait()
            raise

    def traffic(self) -> Iterator[tuple[int, int, int]]:
        """Yield each host and the number of bytes that it sent and received, including headers."""
        for host in range(1, self.hosts + 1):
            show = ["ip", "-n", f"host{host}", "-json", "-stats", "link", "show", "eth0"]
            out = subprocess.run([*self._nsenter(), *show], check=True, capture_output=True)
            stats = json.loads(out.stdout)[0]["stats64"]
            yield host, stats["tx"]["bytes"], stats["rx"]["bytes"]

    def down(self) -> None:
        """End the lab and all processes in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holder, signal.SIGKILL)
        while Path(f"/proc/{self.holder}").exists():
            time.sleep(0.01)

    def _nsenter(self) -> list[str]:
        """Return the command that runs another command in the holder's namespaces."""
        return ["nsenter", "--target", str(self.holder), "--mount", "--net", "--pid", "--"]


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise LaunchError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise MissingDependencyError(
                f"the lab needs the command {tool!r}; install it: apt-get install {package}")
    if os.geteuid() != 0:
        raise LaunchError(
            f"the lab makes network namespaces, which needs root; you are user {os.geteuid()}. "
            f"Run it with sudo, or in a container of your own")
    _mpich_mpiexec()


def _mpich_mpiexec() -> str:
    """Return the path of MPICH's mpiexec."""
    mpiexec = launch.find_mpiexec()
    if mpiexec is not None:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        if "HYDRA" in version:
            return mpiexec
    raise MissingDependencyError(
        f"the lab needs MPICH's mpiexec, but finds {mpiexec}; {remedies.pip_install('[mpich]')}")


def _start(hosts: int, rate: str, until: str) -> "tuple[Lab, subprocess.Popen[str]]":
    """Start a lab, and return the lab and the parent process of its holder.

    The shell command `until` keeps the holder running; the lab ends with it.
    """
    _check_tools()
    if not 1 <= hosts <= _MAX_HOSTS:
        raise ConfigError(f"hosts={hosts}: expected 1 to {_MAX_HOSTS}")
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmg]bit", rate):
        raise ConfigError(f"rate={rate!r}: expected a number with kbit, mbit or gbit, as 1gbit")
    process = subprocess.Popen(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
         "sh", "-c", _SETUP, "lab", str(hosts), rate, until],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Ctrl-C must reach the job only; the lab ends later.
        start_new_session=True)
    if process.stdout is None or process.stdout.readline() != "ready\n":
        raise LaunchError(f"the lab could not be set up: {process.communicate()[1].strip()}")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return Lab(int(children[0]), hosts, rate), process


@contextlib.contextmanager
def temporary(hosts: int, rate: str) -> Iterator[Lab]:
    """Set up a lab that ends with the `with` block, or earlier if this process dies.

    The rate is that of each link in each direction: "1gbit", "100mbit".

    Raises:
        LaunchError: The system is not Linux, the user is not root, or the kernel refuses.
        MissingDependencyError: A tool is missing; the message names its package.
        ConfigError: The number of hosts or the rate is invalid.
    """
    # `cat` ends when its input is closed, even if this process is killed.
    lab, process = _start(hosts, rate, "exec cat")
    try:
        yield lab
    finally:
        lab.down()
        process.communicate()


def up(hosts: int, rate: str) -> Lab:
    """Set up a lab that stays until `Lab.down`; arguments and errors are as in `temporary`.

    It also raises LaunchError if a lab is up already.
    """
    if running_lab() is not None:
        raise LaunchError("a lab is up already; end it: python -m mpiring lab down")
    # If this process ends before the record is written, the lab ends with it.
    lab, process = _start(hosts, rate, "read -r go; exec sleep infinity")
    _RECORD.write_text(json.dumps([lab.holder, lab.hosts, lab.rate]))
    print("go", file=process.stdin, flush=True)
    return lab


def _recorded() -> Lab:
    """Return the lab that `up` has recorded."""
    try:
        holder, hosts, rate = json.loads(_RECORD.read_text())
        return Lab(int(holder), int(hosts), str(rate))
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{_RECORD} is not as `lab up` writes it; delete it") from exc


def running_lab() -> Lab | None:
    """Return the lab that `up` set up, if it still runs; raise ConfigError for damaged records."""
    with contextlib.suppress(FileNotFoundError):
        lab = _recorded()
        # Another process may have the same number now.
        with contextlib.suppress(FileNotFoundError):
            command = Path(f"/proc/{lab.holder}/cmdline").read_bytes()
            if command == b"sleep\0infinity\0" or b"remote-shell" in command:
                return lab
        _RECORD.unlink()
    return None
