"""Lets the doctor look at containers made of files, and judges such as are not here."""

from dataclasses import replace

import pytest
from examined import CRAY, HYDRA, MPICH, OPEN, PRTE, STEP, findings_of, job, ranks, text_of

from mpiring.tools.doctor.facts import STARTING, Container, Failure, Gpus, Memory, Rank
from mpiring.tools.doctor.gather import container

BOOT = "proc/sys/kernel/random/boot_id"
# As /proc/PID/mountinfo has it; the last line at a place counts.
HOSTS = ("22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
         "23 22 0:5 / /dev rw,nosuid - devtmpfs udev rw\n"
         "24 23 0:27 / /dev/shm rw shared:3 - tmpfs tmpfs rw\n")
OWN = HOSTS + "90 23 0:61 / /dev/shm rw - tmpfs none rw,size=65536k\n"


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("variables", "files", "kinds"), [
    ({}, {}, ()), ({"APPTAINER_CONTAINER": "/a.sif", "SINGULARITY_CONTAINER": "/a.sif"}, {},
                   ("Apptainer",)),
    ({}, {".singularity.d/runscript": ""}, ("Apptainer",)), ({}, {".lock": ""}, ("enroot",)),
    ({}, {".dockerenv": ""}, ("Docker",)),
    ({}, {"proc/self/cgroup": "0::/system.slice/docker-0a1b.scope"}, ("Docker",)),
    ({"container": "podman"}, {"run/.containerenv": ""}, ("Podman",)),
    ({"container": "lxc"}, {}, ("lxc",)),
    ({"container": "oci", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, ("Kubernetes",)),
    # What sshd starts has not the pod's variables.
    ({}, {"var/run/secrets/kubernetes.io/serviceaccount/token": "", ".dockerenv": ""},
     ("Kubernetes", "Docker")),
    ({}, {"proc/self/cgroup": "1:cpu:/kubepods/besteffort/pod1"}, ("Kubernetes",)),
])
def test_containers_are_told_by_their_marks(tmp_path, variables, files, kinds):
    seen = container(variables, machine(tmp_path, files))
    assert seen.kinds == kinds
    assert seen.image == variables.get("APPTAINER_CONTAINER", "")


def test_who_has_another_shared_memory_is_counted(tmp_path):
    """Ranks' doctors are; their children, other programs and other users' are not."""
    doctor = "\0".join(["python", "-m", "mpiring", "doctor", ""])
    machine(tmp_path, {
        BOOT: "abc-def\n", "proc/self/mountinfo": HOSTS,
        "proc/10/cmdline": doctor, "proc/10/mountinfo": HOSTS,
        "proc/11/cmdline": doctor, "proc/11/mountinfo": OWN,
        "proc/12/cmdline": f"{doctor}--examine\x003\0", "proc/12/mountinfo": OWN,
        "proc/13/cmdline": "python\0train.py\0", "proc/13/mountinfo": OWN,
        "proc/14/cmdline": doctor,
        "proc/15/cmdline": f"mpirun\0-n\x002\0{doctor}", "proc/15/mountinfo": OWN})
    seen = container({}, tmp_path)
    assert (seen.machine, seen.shm, seen.other_shm) == ("abc-def", "0:27 /", 1)
    (tmp_path / "proc/self/mountinfo").write_text("23 22 0:5 / /dev rw - devtmpfs udev rw\n")
    assert container({}, tmp_path).shm == "0:5 /", "no file system of its own"
    (tmp_path / "proc/self/mountinfo").unlink()
    assert container({}, tmp_path).other_shm == 0, "nothing is known"


def test_a_rank_that_is_the_first_process_is_alone_in_its_container(tmp_path):
    machine(tmp_path, {"proc/1/environ": "HOME=/\0SLURM_PROCID=0\0"})
    assert container(STEP, tmp_path).private
    assert not container({**STEP, **HYDRA}, tmp_path).private, "mpirun in it has started the rank"
    assert not container({}, tmp_path).private


def test_the_launchers_folder_is_looked_for(tmp_path):
    variables = {"PMIX_SERVER_TMPDIR": "/var/spool/slurmd/pmix.7.0"}
    assert container(variables, tmp_path).missing_folder == "/var/spool/slurmd/pmix.7.0"
    (tmp_path / "var/spool/slurmd/pmix.7.0").mkdir(parents=True)
    assert container(variables, tmp_path).missing_folder == ""


def inside(*kinds, **facts):
    return Container(**{"kinds": kinds, "machine": "m", "shm": "0:27 /", "processes": "1", **facts})


TWO = "launcher's and container's MPI"


@pytest.mark.parametrize(("library", "variables", "verdict", "words"), [
    (MPICH, HYDRA, "ok", "MPICH's mpirun has started ranks that load MPICH 5.0.2"),
    (MPICH, {**PRTE, "OMPI_VERSION": "5.0.11"}, "problem", "-> hybrid model: an image with Open"),
    (OPEN, HYDRA, "problem", "-> bind model: bind the host's MPICH into the container, and name "
                             "it by MPI4PY_LIBMPI="),
    (OPEN, {**PRTE, "OMPI_VERSION": "5.0.11"}, "ok", "mpirun 5.0.11 has started ranks that load "),
    (OPEN, {**PRTE, "OMPI_VERSION": "4.1.6"}, "warning", "-> put Open MPI 4 into the image"),
    (CRAY, {"PALS_RANKID": "0"}, "ok", "Cray's mpiexec has started"),
    (MPICH, {**STEP, "SLURM_MPI_TYPE": "cray_shasta"}, "problem", "srun --mpi=cray_shasta has"),
    (MPICH, STEP, None, ""),
])
def test_the_hosts_mpi_and_the_containers(library, variables, verdict, words):
    facts = ranks(2, library=library, variables=variables, container=inside("Apptainer"))
    if verdict is None:
        assert TWO not in findings_of(job(facts))
    else:
        assert words in text_of(job(facts), TWO, verdict)
    outside = job([replace(rank, container=Container()) for rank in facts])
    assert TWO not in findings_of(outside)


PMIX = {**STEP, "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0", "PMIX_VERSION": "4.2.2"}


@pytest.mark.parametrize(("kind", "library", "missing", "torn", "verdict", "words"), [
    ("enroot", MPICH, "", True, "problem", "MPICH 5.0.2 inside has loaded no libpmix, and cannot "
     "speak the launcher's PMIx 4.2.2 -> srun --mpi=pmi2"),
    ("enroot", replace(OPEN, pmix=True), "/spool/pmix", True, "problem",
     "-> srun --container-mounts=/spool/pmix:/spool/pmix, or enroot's hook 50-slurm-pmi.sh"),
    ("Apptainer", replace(OPEN, pmix=True), "/spool/pmix", False, "warning",
     "-> apptainer exec --bind /spool/pmix"),
    ("enroot", replace(MPICH, pmix=True), "", False, "ok", "PMIx 4.2.2, and PMIx inside"),
])
def test_pmix_inside(kind, library, missing, torn, verdict, words):
    facts = ranks(1 if torn else 2, library=library, variables=PMIX,
                  container=inside(kind, missing_folder=missing))
    contained = job(facts, wanted=2, wanted_by="SLURM_STEP_NUM_TASKS=2 (srun)")
    assert words in text_of(contained, "PMIx", verdict)


def test_ranks_on_one_machine_with_several_shared_memories_are_told():
    facts = [replace(rank, container=inside("Apptainer", shm=f"0:{rank.rank} /",
                                            processes=f"{rank.rank}"))
             for rank in ranks(4, 1)]
    facts[3] = replace(facts[3], container=inside("Apptainer", machine="another"))
    text = text_of(job(facts), "one /dev/shm", "warning")
    assert "3 ranks on one machine have 3 different ones" in text
    assert "-> start it without --contain, --containall" in text
    assert text.endswith("or export MPIR_CVAR_NOLOCAL=1, and they use the network")
    (finding,) = findings_of(job(facts))["one /dev/shm"]
    assert finding.ranks == (0, 1, 2)
    assert "each other's memory" not in findings_of(job(facts)), "one cause is enough"


@pytest.mark.parametrize(("kind", "namespace", "words"), [
    ("Docker", "processes", "-> docker run --ipc=host --pid=host"),
    ("Apptainer", "users", "-> apptainer exec --sharens (since 1.3)"),
    ("lxc", "users", "-> start the ranks of a node in one container")])
def test_ranks_that_do_not_see_each_others_memory_are_told(kind, namespace, words):
    facts = [replace(rank, container=inside(kind, **{namespace: f"{rank.rank}"}))
             for rank in ranks(2, library=OPEN, variables=PRTE)]
    text = text_of(job(facts), "one /dev/shm", "ok")
    assert text.startswith("all ranks of a machine have the same")
    text = text_of(job(facts), "each other's memory", "warning")
    assert f"several namespaces of {namespace}: they cannot map" in text and words in text


def test_mpich_reads_the_others_memory_unless_told():
    def two(**variables):
        return [replace(rank, container=inside("Apptainer", users=f"{rank.rank}"))
                for rank in ranks(2, variables={**HYDRA, **variables})]

    text = text_of(job(two()), "each other's memory", "problem")
    assert text.endswith("setuid; or export MPIR_CVAR_CH4_CMA_ENABLE=0")
    text_of(job(two(MPIR_CVAR_CH4_CMA_ENABLE="no")), "each other's memory", "warning")


def test_nothing_is_said_outside_of_containers():
    assert not {"container", "one /dev/shm", TWO, "PMIx"} & findings_of(job(ranks(2))).keys()


@pytest.mark.parametrize(("facts", "words"), [
    ({"other_shm": 1}, "1 other rank on this node has another: MPI looks there for memory"),
    ({"other_shm": 3}, "3 other ranks on this node have another: "),
    ({"private": True}, "the launcher has started a container for each rank: "),
])
def test_an_mpi_that_did_not_start_for_want_of_one_shared_memory(facts, words):
    late = Failure(stage=STARTING, reason="no end within 30 s", timed_out=True)
    torn = job(ranks(1, container=inside("Docker", **facts)), size=0, wanted=4, failure=late)
    assert words in text_of(torn, "one /dev/shm", "problem")
    assert "-> give the ranks of a node one /dev/shm, as explained below" in text_of(
        torn, "MPI_Init", "problem")
    well = job(ranks(1, container=inside("Docker")), size=0, wanted=4, failure=late)
    assert "one /dev/shm" not in findings_of(well)


def test_what_a_small_shared_memory_wants_in_containers():
    small = Memory(shm_bytes=64 << 20, shm_free_bytes=64 << 20)
    text = text_of(job(ranks(2, memory=small, container=inside("Docker"))), "/dev/shm", "note")
    assert "docker run --shm-size=2g; in a pod: an emptyDir" in text


@pytest.mark.parametrize(("kind", "library"), [
    ("NVIDIA", "libmpi_gtl_cuda.so"), ("AMD", "libmpi_gtl_hsa.so")])
def test_crays_library_for_gpus(kind, library):
    facts = ranks(1, library=CRAY, gpus=Gpus(kind=kind, count=1), container=inside("Apptainer"),
                  variables={"PALS_RANKID": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"})
    text = text_of(job(facts), "GPU-aware MPI", "warning")
    assert f"-> LD_PRELOAD={library}, or " in text and "bind /opt/cray/pe/mpich" in text
    loaded = [replace(facts[0], gpus=replace(facts[0].gpus, gtl=True))]
    assert findings_of(job(loaded))["GPU-aware MPI"][0].verdict == "ok"
    unseen = [Rank(library=CRAY, variables=facts[0].variables)]
    assert "apptainer exec --nv (AMD: --rocm)" in text_of(job(unseen), "GPUs", "warning")
