"""Puts mistakes into a copy of the package, one at a time, and checks that tests notice each.

    python tests/helpers/mutants.py [WORD …]

Run it by hand, before and after changes to the tests; words select mutants by file or text. A
mutant is noticed if its tests fail within a minute. A mutant whose text is gone is reported, and
counts as unnoticed. Tests that need ranks run under mpiexec.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launching import ROOT, environment, mpiexec

LIMIT_S = 60
COPIED = "mpiring", "tests", "benchmarks", "examples", "setup.cfg"


@dataclass
class Mutant:
    """A mistake.

    Attributes:
        file: File in the folder mpiring.
        right, wrong: String that occurs there once, and its replacement.
        tests: Tests that must fail.
        ranks: Number of ranks; 0 for plain pytest.
    """

    file: str
    right: str
    wrong: str
    tests: str
    ranks: int = 0


RING, DIRECT = "tests/collectives/test_ring.py", "tests/collectives/test_direct.py"
CONTRACT, NODE = "tests/collectives/test_contract.py", "tests/transport/test_rounds.py"
SIMULATED, AVERAGER = "tests/simulated/test_node_calls.py", "tests/mpi/test_averager.py"
AGREEMENT, BUCKET = "tests/operations/test_agreement.py", "tests/buckets/test_bucket.py"
CLOCKS, OUTER = "tests/asynchronous/test_clocks.py", "tests/optim/test_outer.py"
SLICED, STATE = "tests/sharding/test_sliced.py", "tests/sharding/test_state.py"
EVERY_NAME, ORDERS = (f"tests/horovod/test_programs.py::test_{name}" for name in (
    "every_name", "a_program"))
SEARCH = "tests/training/test_search.py"
WINDOWS, ARRAYS = "tests/mpi/test_communicator.py", "tests/memory/test_arrays.py"
STEP, ON_DEVICE = "tests/tools/test_step.py", "tests/operations/test_on_device.py"

MUTANTS = [
    # Schedules.
    Mutant("collectives/ring.py", "pieces[(r - hop // k - 1) % p][hop % k]",
           "pieces[(r - hop // k - 2) % p][hop % k]", CONTRACT),
    Mutant("collectives/ring.py", "last=landing >= copying - k", "last=landing > copying - k",
           RING),
    Mutant("collectives/ring.py", "slots[hop % len(slots)]", "slots[0]", CONTRACT),
    Mutant("collectives/ring.py", "return min(k, _IN_FLIGHT) * -(-n // (p * k))",
           "return min(k, _IN_FLIGHT) * (n // (p * k))", RING),
    Mutant("collectives/ring.py", "landing >= last - k", "landing > last - k",
           "tests/collectives/test_hierarchical.py"),
    Mutant("collectives/direct.py", "local.collect(r, k, count)", "pass",
           "tests/collectives/test_hierarchical.py"),
    Mutant("collectives/local.py", "sources if between and hands_out else", "",
           "tests/collectives/test_hierarchical.py"),
    Mutant("collectives/direct.py", "(k % 2 * (p - 1) + s - 1) * width", "(s - 1) * width",
           CONTRACT),
    Mutant("collectives/direct.py", "sources, requests = [pieces[r][k]] * p, []",
           "sources, requests = [pieces[r][0]] * p, []", DIRECT),
    Mutant("collectives/exchange.py", "copy_to(receives[r], sends[r])", "pass",
           "tests/collectives/test_adversary.py"),
    Mutant("collectives/shared.py", "    combine.combine(sources, sources[node.rank])\n"
           "    # Other ranks may still be reading this rank's contribution.\n"
           "    yield (node.barrier(),)", "    combine.combine(sources, sources[node.rank])",
           "tests/collectives/test_node_order.py tests/collectives/test_slices.py "
           "tests/collectives/test_adversary.py tests/collectives/test_hierarchical.py"),
    Mutant("collectives/slots.py", "j % 4 * quarter", "j % 3 * quarter", ON_DEVICE),
    # The protocol of a node.
    Mutant("transport/protocol.py", "_AHEAD = (AREAS << COUNT_BITS) - ENDED",
           "_AHEAD = (AREAS << COUNT_BITS)", SIMULATED),
    Mutant("transport/protocol.py", "first + before, n, before,", "first, n, before,",
           "tests/transport/test_pipeline.py"),
    Mutant("transport/protocol.py", "(j & 1) * call.half + before", "before",
           f"tests/transport/test_pipeline.py {SIMULATED}"),
    Mutant("transport/protocol.py", "load(base, area + _NOTE) == _IN_SLOT", "False", NODE),
    Mutant("transport/protocol.py", "at = (j - 1 & 1) * call.half",
           "at = (j & 1) * call.half", NODE),
    Mutant("transport/protocol.py", "kind != ROWS and j > 1", "j > 1", NODE),
    Mutant("transport/protocol.py", "                return DISAGREE\n", "                pass\n",
           NODE),
    Mutant("transport/protocol.py", "at, start = 0, rank * call.length // p",
           "at, start = 0, rank * (call.length // p)", NODE),
    Mutant("transport/protocol.py", "if counter.headers[written] != call.identity:",
           "if False:", NODE),
    # Agreement.
    Mutant("operations/agreement.py", "if bytes(other_header) != header:", "if False:", AGREEMENT),
    Mutant("operations/agreement.py", "if not node.agrees():", "if False:",
           "tests/mpi/test_different_calls.py", 2),
    Mutant("operations/agreement.py", "({zlib.crc32(header):08x})", "(…)", AGREEMENT),
    # Windows and arrays.
    Mutant("transport/windows.py", "segment[offset:offset + x.nbytes]", "segment[:x.nbytes]",
           WINDOWS, 2),
    Mutant("transport/windows.py", "if position[0] != number or number < 0:",
           "if number < 0:", WINDOWS, 2),
    Mutant("memory/arrays.py", "if writeable and not flags.writeable:", "if False:", ARRAYS),
    # Buckets.
    Mutant("buckets/bucket.py", "if used + tensor.padded_bytes > limit and (",
           "if used > limit and (", BUCKET),
    Mutant("buckets/bucket.py", "bisect.bisect_left(self.owners, rank)",
           "bisect.bisect_right(self.owners, rank)", BUCKET),
    Mutant("buckets/bucket.py",
           "start += tensor.padded_size\n            if elements.stop < start:",
           "start += tensor.size\n            if elements.stop < start:", BUCKET),
    Mutant("buckets/bucket.py", "self.flat[max(start, elements.start):", "self.flat[start:",
           BUCKET),
    Mutant("buckets/bucket.py", "        for gap in self._padding:\n            self.flat[gap] = 0",
           "        pass", BUCKET),
    # The clock of the server.
    Mutant("asynchronous/clocks.py", "if worker_clock < clock - self._staleness",
           "if worker_clock < clock", CLOCKS),
    Mutant("asynchronous/clocks.py", "1 / (1 + tau)", "1 / (2 + tau)", CLOCKS),
    Mutant("asynchronous/clocks.py", "self._pulled[worker] = self.updates", "pass", CLOCKS),
    Mutant("asynchronous/clocks.py", "self.finished[worker] = True\n"
           "                self._apply_together()", "self.finished[worker] = True", CLOCKS),
    # Outer optimizers.
    Mutant("optim/outer.py", "offset = (fragment.index + 1) * self.every",
           "offset = fragment.index * self.every", OUTER),
    Mutant("optim/outer.py", "factor = took_steps * self.comm.size / self._count(took_steps)",
           "factor = took_steps * 1.0", OUTER),
    Mutant("optim/fragments.py", "size + nbytes[stop] / 2 <= share", "size <= share", OUTER),
    Mutant("optim/fragments.py", "self.since = step\n", "self.since = step + 1\n", OUTER),
    # Slices.
    Mutant("sharding/sliced.py", "piece[position - piece_start:end - piece_start]",
           "piece[:end - position]", SLICED),
    Mutant("sharding/sliced.py", "if start < end:\n", "if start < end - 1:\n", SLICED),
    Mutant("sharding/state.py", "x[first - start:last - start]", "x[:last - first]", STATE),
    Mutant("sharding/state.py", "self._spare[key], self._now[key] = self._now[key], array",
           "self._spare[key] = array", STATE),
    # Means.
    Mutant("training/averager.py", "finite = not bad[0]", "pass",
           f"{AVERAGER} tests/mpi/test_nonfinite.py tests/mpi/test_optimizers.py", 2),
    Mutant("training/averager.py", "self._ready_s.clear()\n", "pass\n",
           "tests/mpi/test_optimizers.py tests/mpi/test_mixed_precision.py", 2),
    Mutant("record/statistics.py", "max(flight.started_s, until)", "flight.started_s",
           "tests/mpi/test_averager.py tests/mpi/test_numpy_adapter.py", 2),
    # Tuning.
    Mutant("training/search.py", "if seconds < (1 - _MIN_GAIN) * first_s:", "if True:",
           SEARCH),
    Mutant("training/search.py", "if identity in self._tried:", "if False:", SEARCH),
    Mutant("training/autotune.py", "self._comm.allreduce(slowest, op=\"max\")", "pass",
           "tests/mpi/test_autotune.py", 2),
    Mutant("training/search.py", "collectives.preferred = algorithm", "pass",
           "tests/mpi/test_autotune.py", 2),
    # Horovod's interface.
    Mutant("horovod/matching.py", "in lists[active[0]].items()",
           "in lists[self._comm.rank].items()", ORDERS),
    Mutant("horovod/matching.py", "same=self._words[0] == -self._words[1]", "same=True", ORDERS),
    Mutant("horovod/matching.py", "        self._unnamed.clear()\n", "", ORDERS),
    Mutant("horovod/fusion.py", "factors[1], self._divisor)", "factors[1])", EVERY_NAME),
    Mutant("horovod/requests.py", "least + (rank < more)", "least + (rank <= more)", EVERY_NAME),
    Mutant("horovod/torch/batch_norm.py", "total / (total - 1)", "total / total", ORDERS),
    Mutant("reducers/adasum.py", "dots = dots + received", "dots = dots + 0 * received",
           "tests/reducers/test_adasum.py"),
    # The simulated training step.
    Mutant("tools/simulate/profile.py", "return max(0.0, at - began - waited) / 1e6",
           "return max(0.0, at - began) / 1e6", STEP),
    Mutant("tools/simulate/step.py", "tuple(np.max([", "tuple(np.min([", STEP),
    Mutant("tools/simulate/step.py", "min(left_s, slice_s), on_own_core=True",
           "min(left_s, _SLICE_S)", STEP),
    Mutant("tools/simulate/strategies.py", "flag = flag if workload.overlaps else last",
           "flag = flag", STEP),
    Mutant("tools/simulate/codecs.py", "1.5 * sent[1] - 2 * sent[0]", "sent[1] - sent[0]", STEP),
    Mutant("simulated/prices.py", "done_s = max(now_s, self._free_s[number])", "done_s = now_s",
           STEP),
]


def main(words):
    """Try the selected mutants; return the number that no test has noticed."""
    chosen = [mutant for mutant in MUTANTS
              if all(word in mutant.file + mutant.right for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        current = [mutant for mutant in chosen if is_current(mutant)]
        unnoticed = len(chosen) - len(current)
        for tests, ranks in dict.fromkeys((mutant.tests, mutant.ranks) for mutant in current):
            assert passes(tests, ranks, Path(folder)), f"{tests} must pass without a mutant"
        for mutant in current:
            began = time.monotonic()
            noticed = is_noticed(mutant, Path(folder))
            unnoticed += not noticed
            print(f"{'noticed' if noticed else 'NOT NOTICED':<12}"
                  f"{time.monotonic() - began:5.1f} s  {mutant.file}: "
                  f"{' '.join(mutant.wrong.split())}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutants were noticed")
    return unnoticed


def is_current(mutant):
    """Return whether the package still has the mutant's text once; print if it does not."""
    path = ROOT / "mpiring" / mutant.file
    times = path.read_text().count(mutant.right) if path.exists() else 0
    if times != 1:
        print(f"OUT OF DATE  mpiring/{mutant.file} has this {times} times instead of once; "
              f"change the mutant in tests/helpers/mutants.py:\n{mutant.right}", flush=True)
    return times == 1


def is_noticed(mutant, folder):
    """Return whether the tests fail in time with a mutant."""
    path = folder / "mpiring" / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.right, mutant.wrong))
    try:
        return not passes(mutant.tests, mutant.ranks, folder)
    finally:
        path.write_text(text)


def passes(tests, ranks, folder):
    """Return whether tests pass, or do not end, within a minute."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
               *tests.split()]
    variables = environment(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    if ranks:
        command = [mpiexec(), "-n", str(ranks), *command, "-p", "pytest_mpi", "--with-mpi",
                   "-m", "mpi"]
        # Python runs the same steps as compiled code, and nothing has to be recompiled.
        variables["MPIRING_MACHINE_CODE"] = "0"
    else:
        variables = {name: value for name, value in variables.items()
                     if not name.startswith("MPIRING_")}
    job = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return True
    # pytest was called wrongly, or found no test.
    assert status not in (4, 5), f"{command} runs no test"
    return status == 0


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
