"""Lets the doctor look at machines made of files, and at this one."""

import math
import mmap
import os
import subprocess

import pytest
from launching import ROOT, python

from mpiring.launch import host
from mpiring.launch.environment import launch_variables
from mpiring.tools.doctor import gather, hardware
from mpiring.tools.doctor.facts import Library
from mpiring.tools.doctor.facts import NetworkDevice as Device
from mpiring.tools.doctor.measure import rounds


def machine(root, **files):
    """Make a system's files; a double underscore in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


HYDRA_SAYS, OPEN_SAYS = "HYDRA build details: Version: 5.0.2", "mpirun (Open MPI) 5.0.11"


@pytest.mark.parametrize(("vendor", "launchers", "name"), [
    ("MPICH", {"mpirun": HYDRA_SAYS, "mpiexec.hydra": HYDRA_SAYS}, "mpirun"),
    ("MPICH", {"mpirun": OPEN_SAYS, "mpiexec.hydra": HYDRA_SAYS}, "mpiexec.hydra"),
    ("Open MPI", {"mpirun": HYDRA_SAYS, "mpiexec.hydra": HYDRA_SAYS}, ""),
    ("Open MPI", {"mpirun": HYDRA_SAYS, "mpirun.openmpi": OPEN_SAYS}, "mpirun.openmpi"),
    ("MPICH", {"mpirun": OPEN_SAYS}, ""), ("MPICH", {"mpirun": "of this site"}, "mpirun")])
def test_of_two_libraries_in_one_folder_the_launcher_is_told_by_its_version(
        tmp_path, monkeypatch, vendor, launchers, name):
    machine(tmp_path, **{f"bin__{file}": f"#!/bin/sh\necho '{text}'\n"
                         for file, text in launchers.items()})
    for file in launchers:
        (tmp_path / "bin" / file).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    text = {"MPICH": "MPICH Version: 5.0.2", "Open MPI": "Open MPI v5.0.11"}[vendor]
    mpirun = gather.mpirun(Library(text=text, path=str(tmp_path / "lib" / "libmpi.so")))
    assert mpirun.path == str(tmp_path / "bin" / "mpirun") and mpirun.text == launchers["mpirun"]
    assert mpirun.of_library == (str(tmp_path / "bin" / name) if name else "")


@pytest.mark.parametrize(("files", "quota"), [
    ({}, math.inf),
    ({"proc__self__cgroup": "0::/job/step", "sys__fs__cgroup__job__cpu.max": "250000 100000",
      "sys__fs__cgroup__job__step__cpu.max": "max 100000"}, 2.5),
    ({"proc__self__cgroup": "0::/elsewhere", "sys__fs__cgroup__cpu.max": "50000 100000"}, 0.5),
    ({"proc__self__cgroup": "7:memory:/a\n1:cpu,cpuacct:/a",
      "sys__fs__cgroup__cpu__a__cpu.cfs_quota_us": "300000",
      "sys__fs__cgroup__cpu__a__cpu.cfs_period_us": "100000",
      "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1",
      "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"}, 3.0),
])
def test_the_tightest_cgroup_counts(tmp_path, files, quota):
    machine(tmp_path, **files)
    assert host.quota(tmp_path) == quota


def test_network_devices(tmp_path):
    net, ib = "sys__class__net__", "sys__class__infiniband__"
    machine(tmp_path, **{
        f"{net}lo__type": "772", f"{net}eth0__type": "1", f"{net}eth0__speed": "25000",
        f"{net}eth0__operstate": "up", f"{net}eth1__type": "1", f"{net}eth1__speed": "-1",
        f"{net}eth1__operstate": "down", f"{net}ib0__type": "32", f"{net}ib0__operstate": "up",
        f"{ib}mlx5_0__ports__1__rate": "200 Gb/sec (4X HDR)",
        f"{ib}mlx5_0__ports__1__state": "4: ACTIVE",
        f"{ib}mlx5_0__ports__1__link_layer": "InfiniBand",
        f"{ib}mlx5_1__ports__1__rate": "10 Gb/sec (4X SDR)",
        f"{ib}mlx5_1__ports__1__state": "1: DOWN", f"{ib}mlx5_1__ports__1__link_layer": "Ethernet",
        f"{ib}hfi1_0__ports__1__state": "4: ACTIVE", f"{ib}hfi1_0__ports__1__rate": "100 Gb/sec",
        f"{ib}rdmap0s6__ports__1__state": "4: ACTIVE",
        "sys__class__cxi__cxi0__device__properties__speed": "BS_200G"})
    assert list(gather.devices(tmp_path)) == [
        Device(name="eth0", kind="Ethernet", gbit=25),
        Device(name="eth1", kind="Ethernet", active=False), Device(name="ib0", kind="Ethernet"),
        Device(name="hfi1_0", kind="Omni-Path", gbit=100),
        Device(name="mlx5_0", kind="InfiniBand", gbit=200),
        Device(name="mlx5_1", kind="RoCE", gbit=10, active=False),
        Device(name="rdmap0s6", kind="EFA"), Device(name="cxi0", kind="Slingshot", gbit=200)]


MAPS = """7fcc00aed000-7fcc00cf3000 rw-s 00000000 00:1b 2640       /dev/shm/{}
7f74016ed000-7f74018f3000 r--p 00000000 00:1b 2640                       /usr/lib/libm.so.6"""


def test_what_dead_jobs_have_left(tmp_path, monkeypatch):
    machine(tmp_path, dev__shm__mpich_shm_1_0="12345", dev__shm__mpich_shm_2_0="running",
            dev__shm__mpich_shm_3_0="begins", dev__shm__other="not MPI's",
            proc__7__maps=MAPS.format("mpich_shm_2_0"), proc__8__maps=MAPS.format("mpich_shm_10_0"),
            proc__self__maps="", **{"dev__shm__sm_segment.host.0.7.0": "123"})
    for path in (tmp_path / "dev/shm").glob("*"):
        if path.name != "mpich_shm_3_0":
            os.utime(path, (0, 0))
    memory = gather.memory(tmp_path)
    assert (memory.leftover_files, memory.leftover_bytes) == (2, 8)
    (tmp_path / "proc/9").mkdir()
    (tmp_path / "proc/9/maps").write_text(MAPS.format("mpich_shm_1_0"))
    assert gather.memory(tmp_path).leftover_bytes == 3
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert gather.memory(tmp_path).leftover_files == 0, "another user's are his"


@pytest.mark.parametrize(("content", "chosen"), [
    ("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("", "")])
def test_who_gets_huge_pages(tmp_path, content, chosen):
    machine(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=content, proc__self__maps="")
    assert gather.memory(tmp_path).huge_pages == chosen


def test_the_line_that_removes_what_dead_jobs_have_left(tmp_path):
    """Run on files elsewhere: it takes those that no process has mapped."""
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "other"):
        (folder / name).write_bytes(bytes(5000))
    with open(folder / "mpich_shm_2_0", "r+b") as file, mmap.mmap(file.fileno(), 0):
        line = hardware.REMOVE_LEFTOVERS.replace("/dev/shm", str(folder))
        subprocess.run(["sh", "-c", line], timeout=60)
    assert sorted(path.name for path in folder.iterdir()) == ["mpich_shm_2_0", "other"]


def test_gpus(tmp_path):
    assert gather.gpus(tmp_path).kind == ""
    machine(tmp_path, **{
        "proc__driver__nvidia__version": "NVRM version: NVIDIA UNIX x86_64  570.86.10",
        "dev__nvidia0": "", "dev__nvidia1": "", "dev__nvidiactl": "",
        "sys__module__nvidia_peermem__refcnt": "0"})
    gpus = gather.gpus(tmp_path)
    assert (gpus.kind, gpus.count, gpus.driver) == ("NVIDIA", 2, "570.86.10")
    assert gpus.modules == ("nvidia_peermem",)
    nodes, amd = "sys__class__kfd__kfd__topology__nodes__", tmp_path / "another"
    machine(amd, **{f"{nodes}0__gpu_id": "0", f"{nodes}1__gpu_id": "51110"})
    assert (gather.gpus(amd).kind, gather.gpus(amd).count) == ("AMD", 1)


def test_this_process(monkeypatch):
    facts = gather.rank(3, Library())
    assert 1 <= facts.processors.cores <= len(os.sched_getaffinity(0))
    assert facts.memory.shm_bytes >= facts.memory.shm_free_bytes
    assert {"numpy", "mpi4py"} <= facts.versions.keys()
    monkeypatch.setenv("MPIRING_STALL_TIMEOUT", "9")
    assert "did you mean MPIRING_STALL_TIMEOUT_S?" in gather.rank(0, Library()).settings_error
    monkeypatch.delenv("MPIRING_STALL_TIMEOUT")
    for name, value in (("MPIRING_TUNING", "perhaps"), ("MPIRING_REDUCER", "powersdg")):
        with monkeypatch.context() as variables:
            variables.setenv(name, value)
            assert f"{name}='{value}': expected " in gather.rank(0, Library()).settings_error


def test_commands_that_do_not_answer(monkeypatch):
    monkeypatch.setattr(gather, "_COMMAND_S", 0.1)
    assert gather.output_of(["sleep", "5"]) == gather.output_of(["no-such-command"]) == ""
    assert gather.output_of(["printf", "a\\nb\\n"]) == "a\nb"


def test_variables_that_are_shown_are_no_secrets():
    secret = {"SLURM_JWT": "s", "AWS_SECRET": "s", "MPIRING_TUNING": "0", "PMI_RANK": "1"}
    assert launch_variables(secret) == {"MPIRING_TUNING": "0", "PMI_RANK": "1"}


@pytest.mark.parametrize(("leaders", "expected"), [
    ([0], []), ([0, 0, 0], [[(0, 1)]]), ([0, 1], [[(0, 1)]]),
    ([0, 1, 0, 1, 4], [[(0, 2), (1, 3)], [(0, 1)], [(1, 4)]]),
])
def test_who_is_measured_with_whom(leaders, expected):
    assert rounds(leaders) == expected


def test_a_child_that_dies_is_told(monkeypatch, tmp_path):
    """As where the dynamic linker, or the library's constructor, crashes."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "import os, signal\nprint('about to crash', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)")
    ended = python("-m", "mpiring", "doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert ended.returncode == 1
    assert "loading the MPI library: Segmentation fault (signal 11)" in ended.stdout
    assert "about to crash" in ended.stdout
